package client

import (
	"context"
	"fmt"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// ForkOptions say in what the forks of a sandbox differ from it. Zero values take what it has.
type ForkOptions struct {
	Key    string // step key of the snapshot; the forks' keys are Key/1 to Key/N; made by the server when empty
	Job    string
	Labels map[string]string // on top of its labels
	Env    map[string]string // on top of its environment
	Secret []string          // names in Env that the log must not hold
	Idle   time.Duration
	Total  time.Duration
}

// Fork makes n sandboxes (1 to 1,000) that begin with the files of this one, on its host; processes and sessions are not copied. It answers
// those that were made, in the order of their keys, and why the others are missing. The same key again answers the same sandboxes.
func (s *Sandbox) Fork(ctx context.Context, n int, o ForkOptions) ([]*Sandbox, []*dsecv1.ItemError, error) {
	if n < 1 {
		return nil, nil, fmt.Errorf("fork: n %d: want 1 to 1,000: %w", n, ErrInvalid)
	}
	r, err := call(ctx, s.c, s.c.Sandboxes.Fork, &dsecv1.ForkRequest{Id: s.ID, Count: int32(n), Key: o.Key, Job: o.Job, Labels: o.Labels,
		Env:      envVars(o.Env, o.Secret),
		Lifetime: &dsecv1.Lifetime{IdleMs: o.Idle.Milliseconds(), TotalMs: o.Total.Milliseconds()}})
	if err != nil {
		return nil, nil, err
	}
	out := make([]*Sandbox, 0, len(r.Sandboxes))
	for _, made := range r.Sandboxes {
		out = append(out, s.c.handle(made))
	}
	return out, r.Errors, nil
}
