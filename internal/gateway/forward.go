package gateway

import (
	"context"
	"fmt"
	"strings"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// unary is a call of a host's service.
type unary[Q, S any] func(context.Context, *connect.Request[Q]) (*connect.Response[S], error)

// forward sends a call to the host of the sandbox that *ref names. again allows to send it twice.
func forward[Q, S any](ctx context.Context, g *Gateway, q *Q, ref *string, again bool, of func(*rpc.Peer) unary[Q, S]) (*connect.Response[S], error) {
	id, p, err := g.locate(ctx, *ref)
	if err != nil {
		return nil, err
	}
	*ref = id
	resp, err := send(ctx, g, p, q, again, of(p))
	if err == nil {
		return resp, nil
	}
	next, err := g.astray(ctx, id, p, err)
	if next != nil && again {
		return send(ctx, g, next, q, again, of(next))
	}
	return nil, err
}

func send[Q, S any](ctx context.Context, g *Gateway, p *rpc.Peer, q *Q, again bool, call unary[Q, S]) (*connect.Response[S], error) {
	resp, err := patient(ctx, g, p, again, func() (*connect.Response[S], error) { return call(ctx, connect.NewRequest(q)) })
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp.Msg), nil // without the host's headers
}

// pass sends a server stream on, one message at a time: the next is taken when the last was written.
func pass[Q, S any](ctx context.Context, g *Gateway, q *Q, ref *string, out *connect.ServerStream[S],
	of func(*rpc.Peer) func(context.Context, *connect.Request[Q]) (*connect.ServerStreamForClient[S], error)) error {
	id, p, err := g.locate(ctx, *ref)
	if err != nil {
		return err
	}
	*ref = id
	told := false
	tell := func(m *S) error {
		told = true
		return out.Send(m)
	}
	err = pump(ctx, g, p, func() (*connect.ServerStreamForClient[S], error) { return of(p)(ctx, connect.NewRequest(q)) }, tell)
	if err == nil || told {
		return err
	}
	next, err := g.astray(ctx, id, p, err)
	if next != nil {
		return pump(ctx, g, next, func() (*connect.ServerStreamForClient[S], error) { return of(next)(ctx, connect.NewRequest(q)) }, tell)
	}
	return err
}

func pump[S any](ctx context.Context, g *Gateway, p *rpc.Peer, open func() (*connect.ServerStreamForClient[S], error), send func(*S) error) error {
	// The first message shows whether the host was reached; until then a refused connection may be tried again.
	stream, err := patient(ctx, g, p, false, func() (*connect.ServerStreamForClient[S], error) {
		s, err := open()
		if err != nil {
			return nil, err
		}
		if !s.Receive() {
			err := s.Err()
			s.Close()
			return nil, err
		}
		return s, nil
	})
	if err != nil {
		return err
	}
	if stream == nil {
		return nil // an empty stream
	}
	defer stream.Close()
	for {
		if err := send(stream.Msg()); err != nil {
			return err
		}
		if !stream.Receive() {
			break
		}
	}
	return named(rpc.FromError(stream.Err()), p, false)
}

// relay sends a client stream on. The first message is checked and changed by first.
func relay[Q, S any](ctx context.Context, g *Gateway, in *connect.ClientStream[Q], first func(*Q) *string,
	of func(*rpc.Peer) func(context.Context) *connect.ClientStreamForClient[Q, S]) (*connect.Response[S], error) {
	if !in.Receive() {
		if err := in.Err(); err != nil {
			return nil, err
		}
		return nil, errNoMessage
	}
	ref := first(in.Msg())
	id, p, err := g.surely(ctx, *ref)
	if err != nil {
		return nil, err
	}
	*ref = id
	// When the caller's stream breaks, the host's must break too: an end would pass for the end of the body.
	ctx, cut := context.WithCancel(ctx)
	defer cut()
	out := of(p)(ctx)
	for {
		if out.Send(in.Msg()) != nil {
			break // the host has answered; what, CloseAndReceive tells
		}
		if !in.Receive() {
			if err := in.Err(); err != nil {
				abandon(cut, out)
				return nil, err
			}
			break
		}
	}
	resp, err := out.CloseAndReceive()
	if err != nil {
		_, err = g.astray(ctx, id, p, named(rpc.FromError(err), p, rpc.Unsent(err))) // the next call goes there
		return nil, err
	}
	return connect.NewResponse(resp.Msg), nil
}

// abandon breaks a client stream off, so that the host sees a broken stream. The sending half is not closed: that would race with the
// transport giving the request up, and could pass for a regular end. The transport closes it.
func abandon[Q, S any](cut context.CancelFunc, out *connect.ClientStreamForClient[Q, S]) {
	cut()
	if conn, err := out.Conn(); err == nil {
		conn.CloseResponse()
	}
}

// info is InfoService.
type info struct{ g *Gateway }

func (s info) GetInfo(context.Context, *connect.Request[dsecv1.GetInfoRequest]) (*connect.Response[dsecv1.GetInfoResponse], error) {
	return connect.NewResponse(&dsecv1.GetInfoResponse{Version: s.g.cfg.Version, Protocol: rpc.Protocol, ProtocolMin: rpc.ProtocolMin, Role: s.g.cfg.Role}), nil
}

// commands is CommandService.
type commands struct{ g *Gateway }

var _ dsecv1connect.CommandServiceHandler = commands{}

func (s commands) Start(ctx context.Context, r *connect.Request[dsecv1.StartRequest]) (*connect.Response[dsecv1.StartResponse], error) {
	if r.Msg.Id == "" {
		r.Msg.Id = sandbox.NewKey() // given here, so that the call may be sent again
	}
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.StartRequest, dsecv1.StartResponse] { return p.Commands.Start })
}

func (s commands) Wait(ctx context.Context, r *connect.Request[dsecv1.WaitRequest]) (*connect.Response[dsecv1.WaitResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.WaitRequest, dsecv1.WaitResponse] { return p.Commands.Wait })
}

func (s commands) Attach(ctx context.Context, r *connect.Request[dsecv1.AttachRequest], out *connect.ServerStream[dsecv1.AttachResponse]) error {
	return pass(ctx, s.g, r.Msg, &r.Msg.Sandbox, out, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.AttachRequest]) (*connect.ServerStreamForClient[dsecv1.AttachResponse], error) {
		return p.Streams.Attach
	})
}

func (s commands) ReadOutput(ctx context.Context, r *connect.Request[dsecv1.ReadOutputRequest]) (*connect.Response[dsecv1.ReadOutputResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.ReadOutputRequest, dsecv1.ReadOutputResponse] {
		return p.Commands.ReadOutput
	})
}

func (s commands) WriteStdin(ctx context.Context, r *connect.Request[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.WriteStdinRequest, dsecv1.WriteStdinResponse] {
		return p.Commands.WriteStdin
	})
}

func (s commands) Signal(ctx context.Context, r *connect.Request[dsecv1.SignalRequest]) (*connect.Response[dsecv1.SignalResponse], error) {
	if r.Msg.Step == "" {
		r.Msg.Step = sandbox.NewKey()
	}
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.SignalRequest, dsecv1.SignalResponse] { return p.Commands.Signal })
}

func (s commands) Resize(ctx context.Context, r *connect.Request[dsecv1.ResizeRequest]) (*connect.Response[dsecv1.ResizeResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.ResizeRequest, dsecv1.ResizeResponse] { return p.Commands.Resize })
}

func (s commands) List(ctx context.Context, r *connect.Request[dsecv1.ListCommandsRequest]) (*connect.Response[dsecv1.ListCommandsResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.ListCommandsRequest, dsecv1.ListCommandsResponse] {
		return p.Commands.List
	})
}

func (s commands) OpenSession(ctx context.Context, r *connect.Request[dsecv1.OpenSessionRequest]) (*connect.Response[dsecv1.OpenSessionResponse], error) {
	if r.Msg.Name == "" {
		r.Msg.Name = sandbox.NewKey()
	}
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.OpenSessionRequest, dsecv1.OpenSessionResponse] {
		return p.Commands.OpenSession
	})
}

func (s commands) CloseSession(ctx context.Context, r *connect.Request[dsecv1.CloseSessionRequest]) (*connect.Response[dsecv1.CloseSessionResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.CloseSessionRequest, dsecv1.CloseSessionResponse] {
		return p.Commands.CloseSession
	})
}

func (s commands) ListSessions(ctx context.Context, r *connect.Request[dsecv1.ListSessionsRequest]) (*connect.Response[dsecv1.ListSessionsResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.ListSessionsRequest, dsecv1.ListSessionsResponse] {
		return p.Commands.ListSessions
	})
}

// logs is LogService.
type logs struct{ g *Gateway }

func (s logs) Read(ctx context.Context, r *connect.Request[dsecv1.ReadLogRequest], out *connect.ServerStream[dsecv1.ReadLogResponse]) error {
	if r.Msg.Sandbox != "" {
		return pass(ctx, s.g, r.Msg, &r.Msg.Sandbox, out, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.ReadLogRequest]) (*connect.ServerStreamForClient[dsecv1.ReadLogResponse], error) {
			return p.Logs.Read
		})
	}
	if r.Msg.Key == "" {
		return errNoLog
	}
	if strings.HasPrefix(r.Msg.Key, fncall.Stream) {
		return s.readCalls(ctx, r.Msg, out)
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
	return pump(ctx, s.g, p, func() (*connect.ServerStreamForClient[dsecv1.ReadLogResponse], error) {
		return p.Logs.Read(ctx, connect.NewRequest(r.Msg))
	}, out.Send)
}

var (
	errNoMessage = fmt.Errorf("stream: ended before its first message: %w", sandbox.ErrInvalid)
	errNoLog     = fmt.Errorf("log: give the sandbox, or job and key: %w", sandbox.ErrInvalid)
)
