package host

import (
	"context"
	"fmt"
	"io"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

type moveService struct{ h *Host }

func (s moveService) Survey(ctx context.Context, req *connect.Request[dsecv1.SurveyRequest]) (*connect.Response[dsecv1.MoveFacts], error) {
	b, err := s.h.get(ctx, req.Msg.GetSandbox())
	if err != nil {
		return nil, err
	}
	f, err := b.survey(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(f), nil
}

func (s moveService) Admit(ctx context.Context, req *connect.Request[dsecv1.AdmitRequest]) (*connect.Response[dsecv1.AdmitResponse], error) {
	if err := s.h.admitMove(ctx, req.Msg.GetFacts()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.AdmitResponse{}), nil
}

func (s moveService) Depart(ctx context.Context, req *connect.Request[dsecv1.DepartRequest], stream *connect.ServerStream[dsecv1.MovePart]) error {
	b, err := s.h.get(ctx, req.Msg.GetSandbox())
	if err != nil {
		return err
	}
	return b.depart(ctx, req.Msg, stream.Send)
}

func (s moveService) Arrive(ctx context.Context, stream *connect.ClientStream[dsecv1.MovePart]) (*connect.Response[dsecv1.ArriveResponse], error) {
	err := s.h.arrive(ctx, func() (*dsecv1.MovePart, error) {
		if stream.Receive() {
			return stream.Msg(), nil
		}
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, fmt.Errorf("a moved sandbox breaks off: %w: %w", io.ErrUnexpectedEOF, sandbox.ErrInvalid)
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ArriveResponse{}), nil
}

func (s moveService) Conclude(ctx context.Context, req *connect.Request[dsecv1.ConcludeRequest]) (*connect.Response[dsecv1.ConcludeResponse], error) {
	moved, err := s.h.conclude(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ConcludeResponse{Moved: moved}), nil
}

func (s moveService) Settle(ctx context.Context, req *connect.Request[dsecv1.SettleRequest]) (*connect.Response[dsecv1.SettleResponse], error) {
	b, err := s.h.settleMove(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	r := &dsecv1.SettleResponse{}
	if b != nil {
		r.Sandbox = b.proto()
	}
	return connect.NewResponse(r), nil
}

func (s moveService) Arrivals(ctx context.Context, _ *connect.Request[dsecv1.ArrivalsRequest]) (*connect.Response[dsecv1.ArrivalsResponse], error) {
	if err := s.h.wait(ctx); err != nil {
		return nil, err
	}
	r := &dsecv1.ArrivalsResponse{}
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	for _, p := range s.h.passages {
		if c := p.Coming; c != nil && c.Here {
			r.Arrivals = append(r.Arrivals, &dsecv1.Arrival{Sandbox: string(p.ID), Project: c.Traj.Project, Nonce: c.Nonce, From: string(c.From), AgeMs: time.Since(p.since).Milliseconds()})
		}
	}
	return connect.NewResponse(r), nil
}

// Migrate is a gateway's: it takes two hosts.
func (s sandboxService) Migrate(context.Context, *connect.Request[dsecv1.MigrateRequest]) (*connect.Response[dsecv1.MigrateResponse], error) {
	return nil, fmt.Errorf("migrate: ask a gateway: %w", sandbox.ErrUnsupported)
}
