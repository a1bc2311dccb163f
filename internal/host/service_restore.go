package host

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

type restoreService struct{ h *Host }

func (s restoreService) Restore(ctx context.Context, req *connect.Request[dsecv1.HostRestoreRequest]) (*connect.Response[dsecv1.RestoreResponse], error) {
	r, err := s.h.restore(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(r), nil
}
