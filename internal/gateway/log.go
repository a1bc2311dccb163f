package gateway

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// SetVerdict goes to the host of the sandbox. Its key makes it safe to send again.
func (s logs) SetVerdict(ctx context.Context, r *connect.Request[dsecv1.SetVerdictRequest]) (*connect.Response[dsecv1.SetVerdictResponse], error) {
	of := func(p *rpc.Peer) unary[dsecv1.SetVerdictRequest, dsecv1.SetVerdictResponse] { return p.Logs.SetVerdict }
	if r.Msg.Sandbox != "" {
		return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, of)
	}
	if r.Msg.Key == "" {
		return nil, errNoLog
	}
	s.g.ready(ctx)
	sb, p, err := s.g.find(ctx, s.g.fleet.Fleet(), finding{job: r.Msg.Job, key: r.Msg.Key})
	if err != nil {
		return nil, err
	}
	if sb == nil {
		return nil, notFoundKey(r.Msg.Job, r.Msg.Key)
	}
	r.Msg.Sandbox, r.Msg.Job, r.Msg.Key = sb.GetId(), "", ""
	return send(ctx, s.g, p, r.Msg, true, of(p))
}

func (s logs) ReadInput(ctx context.Context, r *connect.Request[dsecv1.ReadInputRequest], out *connect.ServerStream[dsecv1.ReadInputResponse]) error {
	return pass(ctx, s.g, r.Msg, &r.Msg.Sandbox, out, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.ReadInputRequest]) (*connect.ServerStreamForClient[dsecv1.ReadInputResponse], error) {
		return p.Logs.ReadInput
	})
}

func (s logs) Steps(ctx context.Context, r *connect.Request[dsecv1.StepsRequest], out *connect.ServerStream[dsecv1.StepsResponse]) error {
	errs, err := inTurn(ctx, s.g, r.Msg, r.Msg.GetFilter(), out.Send, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.StepsRequest]) (*connect.ServerStreamForClient[dsecv1.StepsResponse], error) {
		return p.Logs.Steps
	})
	if err != nil || len(errs) == 0 {
		return err
	}
	return out.Send(&dsecv1.StepsResponse{Errors: errs})
}

func (s logs) Export(ctx context.Context, r *connect.Request[dsecv1.ExportRequest], out *connect.ServerStream[dsecv1.ExportResponse]) error {
	errs, err := inTurn(ctx, s.g, r.Msg, r.Msg.GetFilter(), out.Send, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.ExportRequest]) (*connect.ServerStreamForClient[dsecv1.ExportResponse], error) {
		return p.Logs.Export
	})
	if err != nil || len(errs) == 0 {
		return err
	}
	return out.Send(&dsecv1.ExportResponse{Errors: errs})
}

// readCalls streams the function calls of a job, which lie on every host that ran some.
func (s logs) readCalls(ctx context.Context, q *dsecv1.ReadLogRequest, out *connect.ServerStream[dsecv1.ReadLogResponse]) error {
	errs, err := inTurn(ctx, s.g, q, nil, out.Send, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.ReadLogRequest]) (*connect.ServerStreamForClient[dsecv1.ReadLogResponse], error) {
		return p.Logs.Read
	})
	if err != nil || len(errs) == 0 {
		return err
	}
	return fmt.Errorf("calls of job %s: what %s has is missing: %s: %w", jobOf(q.Job), errs[0].Id, errs[0].Message, rpc.ErrUnavailable)
}

// inTurn streams what every host has, one host after the other, so that nothing is held. Hosts that can't be asked are told at the end;
// one that breaks off in the midst fails the call, since part of what it has was told.
func inTurn[Q, S any](ctx context.Context, g *Gateway, q *Q, f *dsecv1.TrajectoryFilter, send func(*S) error,
	of func(*rpc.Peer) func(context.Context, *connect.Request[Q]) (*connect.ServerStreamForClient[S], error)) (errs []*dsecv1.ItemError, err error) {
	if len(f.GetSandboxes()) > maxSelected {
		return nil, fmt.Errorf("filter.sandboxes: %d given, at most %d: %w", len(f.GetSandboxes()), maxSelected, sandbox.ErrInvalid)
	}
	g.ready(ctx)
	fleet := g.fleet.Fleet()
	if len(fleet.Hosts) == 0 {
		return nil, fmt.Errorf("no host answers (%d configured): %w", len(fleet.Nameless), rpc.ErrUnavailable)
	}
	for _, h := range fleet.Hosts {
		p, ok := g.fleet.Peer(h.ID)
		if !ok {
			errs = append(errs, itemError(string(h.ID), fmt.Errorf("host %s: is gone: %w", h.ID, rpc.ErrUnavailable)))
			continue
		}
		told := false
		err := pump(ctx, g, p, func() (*connect.ServerStreamForClient[S], error) { return of(p)(ctx, connect.NewRequest(q)) }, func(m *S) error {
			told = true
			return send(m)
		})
		switch {
		case err == nil:
		case ctx.Err() != nil || told || !errors.Is(err, rpc.ErrUnavailable):
			return nil, err
		default:
			errs = append(errs, itemError(string(h.ID), err))
		}
	}
	for _, a := range fleet.Nameless {
		errs = append(errs, itemError(a, fmt.Errorf("host at %s: did not answer so far: %w", a, rpc.ErrUnavailable)))
	}
	return errs, nil
}

// Remove asks all hosts; what can't be asked, or still lives, is told.
func (s logs) Remove(ctx context.Context, r *connect.Request[dsecv1.RemoveLogsRequest]) (*connect.Response[dsecv1.RemoveLogsResponse], error) {
	if r.Msg.GetJob() == "" && r.Msg.GetOlderMs() == 0 {
		return nil, fmt.Errorf("job or older_ms: give one of them, this deletes: %w", sandbox.ErrInvalid)
	}
	answers, errs, err := everywhere(ctx, s.g, 0, func(ctx context.Context, p *rpc.Peer) (*dsecv1.RemoveLogsResponse, error) {
		resp, err := p.Logs.Remove(ctx, connect.NewRequest(r.Msg))
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	})
	if err != nil {
		return nil, err
	}
	if len(answers) == 0 && len(errs) > 0 {
		return nil, rpc.FromCode(errs[0].Code, errs[0].Message)
	}
	out := &dsecv1.RemoveLogsResponse{Errors: errs}
	for _, a := range answers {
		out.Trajectories += a.GetTrajectories()
	}
	return connect.NewResponse(out), nil
}
