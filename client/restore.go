package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

const restoreTries = 30 // a second apart, while nobody answers

// RestoreOptions say how a sandbox that is gone is made again.
type RestoreOptions struct {
	Warn           bool              // tell what came to something else and go on; else the restore ends there
	Skip           []string          // steps that are not done again; "*" is all that would be asked about
	Repeat         []string          // steps that are done again whatever their class; "*" is all that would be asked about
	Secrets        map[string]string // values of secret entries, which the log does not hold
	AcceptTailLoss bool              // go on where the end of the record may be missing
	LostHost       string            // this host is gone for good: the caller vouches for it
	ID             string            // of the call: the same again joins it; made when empty
	// Progress is told what was done so far, every now and then. May be nil.
	Progress func(*dsecv1.RestoreResponse)
}

// Restored is what a restore came to: a sandbox, or what only the caller can decide (Asks, Secrets), or steps that came to something else
// under a strict policy (Diverged). Nothing is left of one without a sandbox.
type Restored struct {
	Sandbox *Sandbox // nil unless it was restored
	*dsecv1.RestoreResponse
}

// Err says why there is no sandbox; nil when there is one.
func (r *Restored) Err() error {
	switch r.State {
	case "restored":
		return nil
	case "asks":
		var why []string
		for _, s := range r.Asks[:min(len(r.Asks), 3)] {
			why = append(why, fmt.Sprintf("step %s (%s)", s.Step, s.Why))
		}
		if more := r.Asked - int64(len(why)); more > 0 {
			why = append(why, fmt.Sprintf("%d more steps", more))
		}
		for _, s := range r.Secrets {
			why = append(why, "the value of secret "+s)
		}
		return &Error{Code: "failed_precondition", Message: "restore needs an answer: " + strings.Join(why, ", "), kind: ErrState}
	}
	what := ""
	if len(r.Diverged) > 0 {
		what = fmt.Sprintf(": step %s: %s", r.Diverged[0].Step, r.Diverged[0].Why)
	}
	return &Error{Code: "failed_precondition", Message: "restore " + r.State + what, kind: ErrState}
}

// Restore makes a sandbox that is gone again, by the ID of any sandbox of its trajectory, and waits for it, however long its steps take. It
// is never implied by anything else. [Restored.Err] says whether there is a sandbox.
func (c *Client) Restore(ctx context.Context, id string, o RestoreOptions) (*Restored, error) {
	return c.restore(ctx, &dsecv1.RestoreRequest{Sandbox: id}, o)
}

// RestoreKey is [Client.Restore] of the sandbox with a create key of a job.
func (c *Client) RestoreKey(ctx context.Context, job, key string, o RestoreOptions) (*Restored, error) {
	return c.restore(ctx, &dsecv1.RestoreRequest{Job: job, Key: key}, o)
}

// Restore is [Client.RestoreKey] in this job; it also learns the recorded steps under the new ID, as [Job.Resume] does.
func (j *Job) Restore(ctx context.Context, key string, o RestoreOptions) (*Restored, error) {
	r, err := j.c.RestoreKey(ctx, j.Name, key, o)
	if err == nil && r.Sandbox != nil {
		_, err = j.c.FastForward(ctx, j.Name, r.Sandbox.ID) // its steps are known under its new ID
	}
	return r, err
}

func (c *Client) restore(ctx context.Context, q *dsecv1.RestoreRequest, o RestoreOptions) (*Restored, error) {
	q.Id, q.Skip, q.Repeat, q.AcceptTailLoss, q.LostHost = o.ID, o.Skip, o.Repeat, o.AcceptTailLoss, o.LostHost
	if q.Id == "" {
		q.Id = "restore-" + strings.ToLower(rand.Text())
	}
	if o.Warn {
		q.Policy = "warn"
	}
	var names []string
	for n := range o.Secrets {
		names = append(names, n)
	}
	slices.Sort(names)
	q.Secrets = envVars(o.Secrets, names)
	for failed := 0; ; {
		wait := 20 * time.Second
		if o.Progress != nil {
			wait = time.Second
		}
		q.WaitMs = min(wait.Milliseconds(), waitFor(ctx))
		r, err := call(ctx, c, c.Restores.Restore, q)
		if errors.Is(err, ErrUnavailable) && failed < restoreTries { // a gateway or host is restarted: the same call goes on
			failed++
			select {
			case <-time.After(time.Second):
				continue
			case <-ctx.Done():
			}
		}
		if err != nil {
			return nil, err
		}
		failed = 0
		if r.State != "restoring" {
			out := &Restored{RestoreResponse: r}
			if r.Sandbox != nil {
				out.Sandbox = c.handle(r.Sandbox)
			}
			return out, nil
		}
		if o.Progress != nil {
			o.Progress(r)
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
}
