package rpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const token = "0123456789abcdef"

// host is a service whose answers a test dials.
type host struct {
	dsecv1connect.UnimplementedHostServiceHandler
	dsecv1connect.UnimplementedLogServiceHandler
	status func(ctx context.Context) error
	logs   func(ctx context.Context, send func(*dsecv1.ReadLogResponse) error) error
}

func (h *host) Status(ctx context.Context, _ *connect.Request[dsecv1.HostStatusRequest]) (*connect.Response[dsecv1.HostStatusResponse], error) {
	if err := h.status(ctx); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.HostStatusResponse{Host: Project(ctx)}), nil
}

func (h *host) Read(ctx context.Context, _ *connect.Request[dsecv1.ReadLogRequest], s *connect.ServerStream[dsecv1.ReadLogResponse]) error {
	return h.logs(ctx, s.Send)
}

type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// serve starts a server on a Unix socket and on TCP and returns both addresses.
func serve(t *testing.T, h *host, edge *Edge, dial PortDialer) (unix, tcp string) {
	t.Helper()
	guard, err := ClusterGuard(token)
	if err != nil {
		t.Fatal(err)
	}
	edge.Guard = guard
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewHostServiceHandler(h, edge.Options()...))
	mux.Handle(dsecv1connect.NewLogServiceHandler(h, edge.Options()...))
	if dial != nil {
		mux.Handle(TunnelPattern, edge.Tunnel(dial))
		mux.Handle(ScreenPattern, edge.TunnelScreen(dial))
	}
	s, err := NewServer(edge.Wrap(mux), ServerConfig{Log: edge.Log})
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "dsec")
	if err != nil {
		t.Fatal(err)
	}
	unix = "unix:" + filepath.Join(dir, "s")
	lu, err := Listen(unix)
	if err != nil {
		t.Fatal(err)
	}
	lt, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, lu, lt) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(strings.TrimPrefix(unix, "unix:")); err == nil {
			t.Error("the socket is left behind")
		}
		os.RemoveAll(dir)
	})
	return unix, "http://" + lt.Addr().String()
}

func peer(t *testing.T, addr, token string) *Peer {
	t.Helper()
	p, err := Dial(addr, PeerConfig{Token: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

func TestCallsThroughTheEdge(t *testing.T) {
	out := &lines{}
	var observed sync.Map
	edge := &Edge{Log: slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Observe: func(p, c string, _ time.Duration) { observed.Store(p+" "+c, true) }}
	h := &host{}
	unix, tcp := serve(t, h, edge, nil)
	status := func(p *Peer, ctx context.Context) (*connect.Response[dsecv1.HostStatusResponse], error) {
		return p.Host.Status(ctx, connect.NewRequest(&dsecv1.HostStatusRequest{}))
	}
	for _, addr := range []string{unix, tcp} {
		p := peer(t, addr, token)
		h.status = func(ctx context.Context) error {
			if _, ok := ctx.Deadline(); !ok {
				t.Error("a call without a deadline")
			}
			return nil
		}
		resp, err := status(p, WithProject(context.Background(), "a/b"))
		if err != nil || resp.Msg.GetHost() != "a/b" {
			t.Fatalf("%s: %v, %v", addr, resp, err)
		}
		p.busy.Add(idleConns)
		if _, err := status(p, context.Background()); err != nil {
			t.Fatalf("over HTTP/2: %v", err)
		}
		p.busy.Add(-idleConns)
		if _, err := status(peer(t, addr, "wrong"), context.Background()); !errors.Is(FromError(err), ErrUnauthenticated) {
			t.Errorf("wrong token: %v", err)
		}
		h.status = func(context.Context) error { return fmt.Errorf("field x: fix it: %w", sandbox.ErrInvalid) }
		if _, err := status(p, context.Background()); !errors.Is(FromError(err), sandbox.ErrInvalid) {
			t.Errorf("refused call: %v", err)
		}
		h.status = func(context.Context) error { panic("boom") }
		if _, err := status(p, context.Background()); CodeName(FromError(err)) != "internal" || strings.Contains(err.Error(), "boom") {
			t.Errorf("panic: %v", err)
		}
		h.status = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		if _, err := status(p, ctx); !errors.Is(FromError(err), context.DeadlineExceeded) {
			t.Errorf("deadline: %v", err)
		}
		cancel()
	}
	if n := strings.Count(out.String(), "field x"); n != 2 {
		t.Errorf("a failed call is logged %d times for 2 calls", n)
	}
	for _, want := range []string{"/dsec.v1.HostService/Status ok", "/dsec.v1.HostService/Status invalid_argument", "/dsec.v1.HostService/Status internal"} {
		if _, ok := observed.Load(want); !ok {
			t.Errorf("not observed: %s", want)
		}
	}
}

func TestHostThatIsGoneIsUnavailable(t *testing.T) {
	for _, addr := range []string{"unix:/nonexistent/dsec", "http://127.0.0.1:1"} {
		p := peer(t, addr, token)
		if _, err := p.Host.Status(context.Background(), connect.NewRequest(&dsecv1.HostStatusRequest{})); !errors.Is(FromError(err), ErrUnavailable) {
			t.Errorf("%s: %v", addr, err)
		}
		p.busy.Add(idleConns)
		if _, err := p.Host.Status(context.Background(), connect.NewRequest(&dsecv1.HostStatusRequest{})); !errors.Is(FromError(err), ErrUnavailable) {
			t.Errorf("%s: %v", addr, err)
		}
		if _, err := p.DialPort(context.Background(), "habcdef-aaaaaaaaaaaaaaaa", 80); !errors.Is(err, ErrUnavailable) {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

func TestPlainJSONAndVersions(t *testing.T) {
	h := &host{status: func(context.Context) error { return nil }}
	_, tcp := serve(t, h, &Edge{}, nil)
	for _, tc := range []struct {
		name, version, body string
		status              int
		text                string
	}{
		{"no version", "", "{}", 200, ""},
		{"same", "1", `{"recent":true}`, 200, ""},
		{"older client", "0", "{}", 400, "upgrade the client"},
		{"newer client", "2", "{}", 400, "upgrade the server"},
		{"no number", "x", "{}", 400, "want a number"},
		{"unknown field", "", `{"recnt":true}`, 400, "recnt"},
		{"no body", "", "", 400, "empty body"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, _ := http.NewRequest("POST", tcp+"/dsec.v1.HostService/Status", strings.NewReader(tc.body))
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set(HeaderCluster, token)
			if tc.version != "" {
				r.Header.Set(HeaderProtocol, tc.version)
			}
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			if resp.StatusCode != tc.status || !strings.Contains(string(body), tc.text) {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
			if resp.Header.Get(HeaderProtocol) != "1" {
				t.Error("the answer does not tell the server's protocol")
			}
		})
	}
}

func TestShutdownCutsStreams(t *testing.T) {
	started := make(chan struct{})
	h := &host{logs: func(ctx context.Context, send func(*dsecv1.ReadLogResponse) error) error {
		if err := send(&dsecv1.ReadLogResponse{}); err != nil {
			return err
		}
		close(started)
		<-ctx.Done()
		return fmt.Errorf("follow: the server is going down: %w", ErrUnavailable)
	}}
	edge := &Edge{}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewLogServiceHandler(h, edge.Options()...))
	s, err := NewServer(edge.Wrap(mux), ServerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, l) }()
	stream, err := peer(t, "http://"+l.Addr().String(), token).Logs.Read(context.Background(), connect.NewRequest(&dsecv1.ReadLogRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	<-started
	cancel()
	if stream.Receive() {
		t.Error("a message after shutdown")
	}
	if !errors.Is(FromError(stream.Err()), ErrUnavailable) {
		t.Errorf("the stream ended with %v", stream.Err())
	}
	stream.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestUnixSocketIsPrivateAndReplacesADeadOne(t *testing.T) {
	dir, err := os.MkdirTemp("", "dsec")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	dead, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	dead.(*net.UnixListener).SetUnlinkOnClose(false)
	dead.Close()
	l, err := Listen("unix:" + path)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Lstat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if _, err := Listen("unix:" + path); !errors.Is(err, sandbox.ErrExists) {
		t.Errorf("a second one: %v", err)
	}
	l.Close()
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := Listen("unix:" + dir + "/" + strings.Repeat("x", 100)); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a long path: %v", err)
	}
}

func TestTunnel(t *testing.T) {
	inside, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	go func() {
		for {
			c, err := inside.Accept()
			if err != nil {
				return
			}
			go func() { // answers when the asker has closed its half
				defer c.Close()
				b, _ := io.ReadAll(c)
				fmt.Fprintf(c, "%d octets", len(b))
			}()
		}
	}()
	id := sandbox.ID("habcdef-aaaaaaaaaaaaaaaa")
	unix, tcp := serve(t, &host{}, &Edge{}, func(ctx context.Context, got sandbox.ID, port uint16) (net.Conn, error) {
		if got != id || Project(ctx) != "p" {
			return nil, fmt.Errorf("sandbox %s: %w", got, sandbox.ErrNotFound)
		}
		if port != 8080 {
			return nil, fmt.Errorf("port %d: nobody listens: %w", port, sandbox.ErrState)
		}
		return net.Dial("tcp", inside.Addr().String())
	})
	ctx := WithProject(context.Background(), "p")
	for _, addr := range []string{unix, tcp} {
		p := peer(t, addr, token)
		c, err := p.DialPort(ctx, id, 8080)
		if err != nil {
			t.Fatal(err)
		}
		sent := bytes.Repeat([]byte("x"), 3<<20)
		if _, err := c.Write(sent); err != nil {
			t.Fatal(err)
		}
		if err := c.(halfCloser).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		if err != nil || string(got) != fmt.Sprintf("%d octets", len(sent)) {
			t.Errorf("%s: %q, %v", addr, got, err)
		}
		c.Close()
		if _, err := p.DialPort(ctx, id, 81); !errors.Is(err, sandbox.ErrState) || !strings.Contains(err.Error(), "nobody listens") {
			t.Errorf("closed port: %v", err)
		}
		if _, err := p.DialPort(context.Background(), id, 8080); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("other project: %v", err)
		}
		if _, err := peer(t, addr, "no").DialPort(ctx, id, 8080); !errors.Is(err, ErrUnauthenticated) {
			t.Errorf("wrong token: %v", err)
		}
	}
}

// A screen is reached by port 0 too, which no port has.
func TestTunnelToAScreen(t *testing.T) {
	id := sandbox.ID("habcdef-aaaaaaaaaaaaaaaa")
	unix, _ := serve(t, &host{}, &Edge{}, func(_ context.Context, _ sandbox.ID, port uint16) (net.Conn, error) {
		if port == 9 {
			return nil, fmt.Errorf("screen: %w", sandbox.ErrUnsupported)
		}
		near, far := net.Pipe()
		go func() { fmt.Fprintf(far, "screen %d", port); far.Close() }()
		return near, nil
	})
	p := peer(t, unix, token)
	for _, port := range []uint16{0, 5900} {
		c, err := p.DialScreen(t.Context(), id, port)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(c); err != nil || string(got) != fmt.Sprintf("screen %d", port) {
			t.Errorf("port %d: %q, %v", port, got, err)
		}
		c.Close()
	}
	if _, err := p.DialScreen(t.Context(), id, 9); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("no screen: %v", err)
	}
	if _, err := p.DialPort(t.Context(), id, 0); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("port 0: %v", err)
	}
}

func TestDialDoesNotReadTheProxyVariables(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	t.Setenv("http_proxy", "http://127.0.0.1:1")
	_, tcp := serve(t, &host{status: func(context.Context) error { return nil }}, &Edge{}, nil)
	// A name, since the proxy variables are never used for loopback addresses.
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	p := peer(t, tcp, token)
	p.base = "http://" + name
	p.clients()
	if _, err := p.Host.Status(context.Background(), connect.NewRequest(&dsecv1.HostStatusRequest{})); err != nil {
		t.Error(err)
	}
}
