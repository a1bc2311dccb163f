package host

import (
	"net/http"

	"connectrpc.com/connect"

	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
)

// Handler serves the host's sandboxes to gateways: the services and the tunnel to ports, behind the edge.
func (h *Host) Handler(edge *rpc.Edge) http.Handler {
	mux := http.NewServeMux()
	opts := connect.WithHandlerOptions(edge.Options()...)
	mux.Handle(dsecv1connect.NewSandboxServiceHandler(sandboxService{h}, opts))
	mux.Handle(dsecv1connect.NewCommandServiceHandler(commandService{h}, opts))
	mux.Handle(dsecv1connect.NewFileServiceHandler(fileService{h}, opts))
	mux.Handle(dsecv1connect.NewDisplayServiceHandler(displayService{h}, opts))
	mux.Handle(dsecv1connect.NewJobServiceHandler(jobService{h}, opts))
	mux.Handle(dsecv1connect.NewLogServiceHandler(logService{h}, opts))
	mux.Handle(dsecv1connect.NewFnCallServiceHandler(fnCallService{h}, opts))
	mux.Handle(dsecv1connect.NewHostServiceHandler(hostService{h}, opts))
	mux.Handle(dsecv1connect.NewHostRestoreServiceHandler(restoreService{h}, opts))
	mux.Handle(dsecv1connect.NewHostMoveServiceHandler(moveService{h}, opts))
	mux.Handle(dsecv1connect.NewInfoServiceHandler(infoService{h}, opts))
	mux.Handle(rpc.TunnelPattern, edge.Tunnel(h.dialPort))
	mux.Handle(rpc.ScreenPattern, edge.TunnelScreen(h.dialScreen))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		if err := h.wait(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		w.Write([]byte("ok\n"))
	})
	return edge.Wrap(mux)
}
