package gateway

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
)

// Trace goes to the host of the sandbox.
func (s logs) Trace(ctx context.Context, r *connect.Request[dsecv1.TraceRequest], out *connect.ServerStream[dsecv1.TraceResponse]) error {
	of := func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.TraceRequest]) (*connect.ServerStreamForClient[dsecv1.TraceResponse], error) {
		return p.Logs.Trace
	}
	if r.Msg.Sandbox != "" {
		return pass(ctx, s.g, r.Msg, &r.Msg.Sandbox, out, of)
	}
	if r.Msg.Key == "" {
		return errNoLog
	}
	s.g.ready(ctx)
	sb, p, err := s.g.find(ctx, s.g.fleet.Fleet(), finding{job: r.Msg.Job, key: r.Msg.Key})
	if err != nil {
		return err
	}
	if sb == nil {
		return notFoundKey(r.Msg.Job, r.Msg.Key)
	}
	r.Msg.Sandbox, r.Msg.Job, r.Msg.Key = sb.GetId(), "", ""
	return pump(ctx, s.g, p, func() (*connect.ServerStreamForClient[dsecv1.TraceResponse], error) {
		return of(p)(ctx, connect.NewRequest(r.Msg))
	}, out.Send)
}
