package gateway

import (
	"context"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
)

// displays is DisplayService.
type displays struct{ g *Gateway }

var _ dsecv1connect.DisplayServiceHandler = displays{}

func (s displays) Screenshot(ctx context.Context, r *connect.Request[dsecv1.ScreenshotRequest]) (*connect.Response[dsecv1.ScreenshotResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.ScreenshotRequest, dsecv1.ScreenshotResponse] {
		return p.Displays.Screenshot
	})
}

func (s displays) Act(ctx context.Context, r *connect.Request[dsecv1.ScreenActRequest]) (*connect.Response[dsecv1.ScreenActResponse], error) {
	step(&r.Msg.Step)
	return forward(ctx, s.g, r.Msg, &r.Msg.Sandbox, true, func(p *rpc.Peer) unary[dsecv1.ScreenActRequest, dsecv1.ScreenActResponse] { return p.Displays.Act })
}
