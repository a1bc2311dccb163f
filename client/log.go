package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/structpb"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Verdict attaches a reward and free metadata (what JSON can hold) to the sandbox's trajectory, before or after its end, under the key
// "verdict". The same verdict again changes nothing; another fails with ErrExists: give [Sandbox.SetVerdict] a key of its own.
func (s *Sandbox) Verdict(ctx context.Context, reward float64, metadata map[string]any) error {
	m, err := structpb.NewStruct(metadata)
	if err != nil {
		return fmt.Errorf("verdict: metadata: %w", err)
	}
	_, err = s.SetVerdict(ctx, &dsecv1.Verdict{Reward: &reward, Metadata: m})
	return err
}

// SetVerdict attaches a verdict under its key; the latest of several keys stands.
func (s *Sandbox) SetVerdict(ctx context.Context, v *dsecv1.Verdict) (*dsecv1.Verdict, error) {
	r, err := call(ctx, s.c, s.c.Logs.SetVerdict, &dsecv1.SetVerdictRequest{Sandbox: s.ID, Verdict: v})
	if err != nil {
		return nil, err
	}
	return r.Verdict, nil
}

// Records yields the sandbox's trajectory from a sequence number on; with follow live, until the sandbox has ended. A connection that
// breaks is taken up again where it broke. An error is the last that is yielded.
func (s *Sandbox) Records(ctx context.Context, from int64, follow bool) iter.Seq2[*dsecv1.LogRecord, error] {
	return func(yield func(*dsecv1.LogRecord, error) bool) {
		q := &dsecv1.ReadLogRequest{Sandbox: s.ID, FromSeq: max(1, from), Follow: follow, Output: true}
		for attempt := 0; ; attempt++ {
			stopped := false
			err := s.c.Log(ctx, q, func(r *dsecv1.LogRecord) error {
				attempt, q.FromSeq = 0, r.Seq+1
				if !yield(r, nil) {
					stopped = true
					return io.EOF
				}
				return nil
			})
			if stopped || err == nil {
				return
			}
			if ctx.Err() != nil || attempt >= 20 || !errors.Is(err, ErrUnavailable) {
				yield(nil, err)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(250 * time.Millisecond):
			}
		}
	}
}

// ExportOptions pick what is exported; all that is set must match.
type ExportOptions struct {
	Job         string
	Labels      map[string]string
	Reward      string                   // as in ">0", "==1"; "none" has no reward, "any" has one
	Ended       bool                     // of ended sandboxes alone
	Rows        string                   // steps (default) | trajectories
	OutputLimit int64                    // octets of each stream in a row; 0 is 64 KiB, -1 none
	Without     []string                 // labels that none has, as dsec-replay
	LeftOut     func(trajectories int64) // unless nil, is told how many Without alone left out
}

// Export writes rows of JSON, one a line, as they come; nothing is held whole. When hosts did not answer, what the others have is written
// and the error, which wraps ErrUnavailable, names them.
func (c *Client) Export(ctx context.Context, o ExportOptions, w io.Writer) error {
	st, err := c.Logs.Export(ctx, connect.NewRequest(&dsecv1.ExportRequest{Rows: o.Rows, OutputLimit: o.OutputLimit,
		Filter: &dsecv1.TrajectoryFilter{Job: o.Job, Labels: o.Labels, Reward: o.Reward, Ended: o.Ended, WithoutLabels: o.Without}}))
	if err != nil {
		return wrap(err)
	}
	defer st.Close()
	var missing []*dsecv1.ItemError
	var left int64
	for st.Receive() {
		left += st.Msg().GetLeftOut()
		for _, row := range st.Msg().Rows {
			if _, err := io.WriteString(w, row+"\n"); err != nil {
				return err
			}
		}
		missing = append(missing, st.Msg().Errors...)
	}
	if err := st.Err(); err != nil {
		return wrap(err)
	}
	if o.LeftOut != nil {
		o.LeftOut(left)
	}
	return missingHosts("export", missing)
}

func missingHosts(act string, missing []*dsecv1.ItemError) error {
	if len(missing) == 0 {
		return nil
	}
	all := make([]string, len(missing))
	for i, e := range missing {
		all[i] = e.Message
	}
	return fmt.Errorf("%s: part is missing: %s: %w", act, strings.Join(all, "; "), ErrUnavailable)
}

// Export is [Client.Export] of the job.
func (j *Job) Export(ctx context.Context, o ExportOptions, w io.Writer) error {
	o.Job = j.Name
	return j.c.Export(ctx, o, w)
}

// Rows yields the rows of [Client.Export] as they come.
func (c *Client) Rows(ctx context.Context, o ExportOptions) iter.Seq2[map[string]any, error] {
	return func(yield func(map[string]any, error) bool) {
		stop := fmt.Errorf("stopped")
		err := c.Export(ctx, o, rowWriter(func(line []byte) error {
			var row map[string]any
			if err := json.Unmarshal(line, &row); err != nil {
				return err
			}
			if !yield(row, nil) {
				return stop
			}
			return nil
		}))
		if err != nil && err != stop {
			yield(nil, err)
		}
	}
}

type rowWriter func([]byte) error

func (f rowWriter) Write(p []byte) (int, error) { return len(p), f(p) }

// RemoveLogs deletes the trajectories of a job as a whole (its name and keys are then used up), or of all that ended longer ago than
// older, or both. It returns how many.
func (c *Client) RemoveLogs(ctx context.Context, job string, older time.Duration) (int64, error) {
	r, err := call(ctx, c, c.Logs.Remove, &dsecv1.RemoveLogsRequest{Job: job, OlderMs: older.Milliseconds()})
	if err != nil {
		return 0, err
	}
	return r.Trajectories, missingHosts("remove logs", r.Errors)
}
