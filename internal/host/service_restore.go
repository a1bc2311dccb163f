package host

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

type restoreService struct{ h *Host }

func (s restoreService) Restore(ctx context.Context, req *connect.Request[dsecv1.HostRestoreRequest]) (*connect.Response[dsecv1.RestoreResponse], error) {
	r, err := s.h.restore(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(r), nil
}

// Recall takes over what a lost host had of a key.
func (s restoreService) Recall(ctx context.Context, req *connect.Request[dsecv1.RecallRequest]) (*connect.Response[dsecv1.RecallResponse], error) {
	m, h := req.Msg, s.h
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	q := &dsecv1.RestoreRequest{Job: m.GetJob(), Key: m.GetKey()}
	b, err := h.find1(ctx, q)
	if errors.Is(err, sandbox.ErrNotFound) {
		b, err = h.recallBox(ctx, &dsecv1.HostRestoreRequest{Request: q, LostHost: m.GetLostHost(), SilentMs: -1})
	}
	if err != nil {
		return nil, fmt.Errorf("recall: %w", err)
	}
	return connect.NewResponse(&dsecv1.RecallResponse{Sandbox: b.latest().proto()}), nil
}
