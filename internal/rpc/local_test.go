package rpc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// localHost answers with the project that its edge found, an error, or not before its caller has gone.
type localHost struct {
	dsecv1connect.UnimplementedSandboxServiceHandler
}

func (localHost) Get(ctx context.Context, r *connect.Request[dsecv1.GetRequest]) (*connect.Response[dsecv1.GetResponse], error) {
	switch r.Msg.Id {
	case "missing":
		return nil, errors.Join(errors.New("sandbox missing"), sandbox.ErrNotFound)
	case "slow":
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return connect.NewResponse(&dsecv1.GetResponse{Sandbox: &dsecv1.Sandbox{Id: r.Msg.Id, Project: Project(ctx)}}), nil
}

// A call to a host in the same process passes the guard, keeps its project and its error, and ends with its caller.
func TestLocal(t *testing.T) {
	guard, err := ClusterGuard("a-token-of-the-cluster-that-is-long")
	if err != nil {
		t.Fatal(err)
	}
	edge := &Edge{Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Guard: guard}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewSandboxServiceHandler(localHost{}, edge.Options()...))
	const addr = "unix:/nonexistent/host.sock"
	peer := func(token string) *Peer {
		local := new(Local)
		local.Serve(edge.Wrap(mux))
		p, err := Dial(addr, PeerConfig{Token: token, Local: map[string]*Local{addr: local}})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := peer("a-token-of-the-cluster-that-is-long")
	get := func(ctx context.Context, p *Peer, id string) (*dsecv1.Sandbox, error) {
		r, err := p.Sandboxes.Get(ctx, connect.NewRequest(&dsecv1.GetRequest{Id: id}))
		if err != nil {
			return nil, FromError(err)
		}
		return r.Msg.Sandbox, nil
	}
	ctx, cancel := context.WithTimeout(WithProject(context.Background(), "a/b"), 10*time.Second)
	defer cancel()
	if s, err := get(ctx, p, "one"); err != nil || s.Id != "one" || s.Project != "a/b" {
		t.Errorf("answer %v, %v", s, err)
	}
	if _, err := get(ctx, p, "missing"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("missing: %v", err)
	}
	if _, err := get(ctx, peer("another-token-of-the-same-length-xx"), "one"); err == nil {
		t.Error("a wrong token was let in")
	}
	gone, leave := context.WithCancel(ctx)
	time.AfterFunc(20*time.Millisecond, leave)
	if _, err := get(gone, p, "slow"); err == nil || ctx.Err() != nil {
		t.Errorf("a call whose caller has gone: %v", err)
	}
}
