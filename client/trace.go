package client

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// TraceOptions say which part of a trace is wanted; zero is all of it.
type TraceOptions struct {
	Step string // this one: its key, or its number from 1
	File string // steps that changed or read this path or what lies in it, and its history
}

// Trace is what steps of a sandbox did beside their outcomes.
type Trace struct {
	Steps []*dsecv1.TraceStep
	File  *dsecv1.FileHistory // of TraceOptions.File
}

// Trace reads what the steps of a sandbox did: files, processes, I/O. The sandbox may have ended.
func (c *Client) Trace(ctx context.Context, sandbox string, o TraceOptions) (*Trace, error) {
	t := &Trace{}
	err := c.EachTrace(ctx, sandbox, o, func(r *dsecv1.TraceResponse) error {
		if r.Step != nil {
			t.Steps = append(t.Steps, r.Step)
		}
		if r.File != nil {
			t.File = r.File
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// EachTrace is [Client.Trace] for trajectories that are too long to hold.
func (c *Client) EachTrace(ctx context.Context, sandbox string, o TraceOptions, fn func(*dsecv1.TraceResponse) error) error {
	q := &dsecv1.TraceRequest{Sandbox: sandbox, Step: o.Step}
	q.File, q.FileRaw = octets(o.File)
	st, err := c.Logs.Trace(ctx, connect.NewRequest(q))
	if err != nil {
		return wrap(err)
	}
	defer st.Close()
	for st.Receive() {
		if err := fn(st.Msg()); err != nil {
			return err
		}
	}
	return wrap(st.Err())
}

// Trace is [Client.Trace] of the sandbox.
func (s *Sandbox) Trace(ctx context.Context, o TraceOptions) (*Trace, error) {
	return s.c.Trace(ctx, s.ID, o)
}
