package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
)

// server plays a gateway: each test gives the calls that it needs.
type server struct {
	dsecv1connect.UnimplementedInfoServiceHandler
	sandboxes
	commands
	files
	jobs

	mu      sync.Mutex
	headers map[string]http.Header // of the last call, by path
	info    *dsecv1.GetInfoResponse
}

type sandboxes struct {
	dsecv1connect.UnimplementedSandboxServiceHandler
	get  func(context.Context, *dsecv1.GetRequest) (*dsecv1.GetResponse, error)
	stop func(context.Context, *dsecv1.StopRequest) (*dsecv1.SelectorResult, error)
}

func (s *sandboxes) Get(ctx context.Context, r *connect.Request[dsecv1.GetRequest]) (*connect.Response[dsecv1.GetResponse], error) {
	return respond(s.get(ctx, r.Msg))
}

func (s *sandboxes) Stop(ctx context.Context, r *connect.Request[dsecv1.StopRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	return respond(s.stop(ctx, r.Msg))
}

type commands struct {
	dsecv1connect.UnimplementedCommandServiceHandler
	start  func(context.Context, *dsecv1.StartRequest) (*dsecv1.StartResponse, error)
	wait   func(context.Context, *dsecv1.WaitRequest) (*dsecv1.WaitResponse, error)
	attach func(context.Context, *dsecv1.AttachRequest, func(*dsecv1.AttachResponse) error) error
	stdin  func(context.Context, *dsecv1.WriteStdinRequest) (*dsecv1.WriteStdinResponse, error)
}

func (c *commands) Start(ctx context.Context, r *connect.Request[dsecv1.StartRequest]) (*connect.Response[dsecv1.StartResponse], error) {
	return respond(c.start(ctx, r.Msg))
}

func (c *commands) Wait(ctx context.Context, r *connect.Request[dsecv1.WaitRequest]) (*connect.Response[dsecv1.WaitResponse], error) {
	return respond(c.wait(ctx, r.Msg))
}

func (c *commands) Attach(ctx context.Context, r *connect.Request[dsecv1.AttachRequest], out *connect.ServerStream[dsecv1.AttachResponse]) error {
	return c.attach(ctx, r.Msg, out.Send)
}

func (c *commands) WriteStdin(ctx context.Context, r *connect.Request[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	return respond(c.stdin(ctx, r.Msg))
}

type files struct {
	dsecv1connect.UnimplementedFileServiceHandler
	write func(context.Context, *connect.ClientStream[dsecv1.WriteRequest]) (*dsecv1.WriteResponse, error)
}

func (f *files) Write(ctx context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	return respond(f.write(ctx, in))
}

type jobs struct {
	dsecv1connect.UnimplementedJobServiceHandler
	renewed atomic.Int64
}

func (j *jobs) Put(context.Context, *connect.Request[dsecv1.PutJobRequest]) (*connect.Response[dsecv1.PutJobResponse], error) {
	return respond(&dsecv1.PutJobResponse{}, nil)
}

func (j *jobs) Renew(context.Context, *connect.Request[dsecv1.RenewJobRequest]) (*connect.Response[dsecv1.RenewJobResponse], error) {
	if j.renewed.Add(1)%2 == 0 {
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("now and then"))
	}
	return respond(&dsecv1.RenewJobResponse{}, nil)
}

func respond[T any](m *T, err error) (*connect.Response[T], error) {
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(m), nil
}

func (s *server) GetInfo(context.Context, *connect.Request[dsecv1.GetInfoRequest]) (*connect.Response[dsecv1.GetInfoResponse], error) {
	return respond(s.info, nil)
}

func serve(t *testing.T) (*server, Config) {
	t.Helper()
	s := &server{headers: map[string]http.Header{}, info: &dsecv1.GetInfoResponse{Version: "test", Protocol: Protocol, ProtocolMin: Protocol}}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewInfoServiceHandler(s))
	mux.Handle(dsecv1connect.NewSandboxServiceHandler(&s.sandboxes))
	mux.Handle(dsecv1connect.NewCommandServiceHandler(&s.commands))
	mux.Handle(dsecv1connect.NewFileServiceHandler(&s.files))
	mux.Handle(dsecv1connect.NewJobServiceHandler(&s.jobs))
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.headers[r.URL.Path] = r.Header.Clone()
		s.mu.Unlock()
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(func() { h.CloseClientConnections(); h.Close() })
	return s, Config{URL: h.URL, Key: "secret"}
}

func dial(t *testing.T) (*server, *Client) {
	t.Helper()
	s, cfg := serve(t)
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s, c
}

// Every code of the wire has its kind, its name and the server's words.
func TestErrorsHaveTheirKind(t *testing.T) {
	s, c := dial(t)
	for code, want := range map[connect.Code]error{
		connect.CodeNotFound: ErrNotFound, connect.CodeAlreadyExists: ErrExists, connect.CodeInvalidArgument: ErrInvalid, connect.CodeFailedPrecondition: ErrState,
		connect.CodeResourceExhausted: ErrExhausted, connect.CodeUnavailable: ErrUnavailable, connect.CodePermissionDenied: ErrDenied,
		connect.CodeUnauthenticated: ErrDenied, connect.CodeUnimplemented: ErrUnsupported, connect.CodeDeadlineExceeded: context.DeadlineExceeded,
		connect.CodeCanceled: context.Canceled, connect.CodeDataLoss: nil, connect.CodeInternal: nil,
	} {
		s.get = func(context.Context, *dsecv1.GetRequest) (*dsecv1.GetResponse, error) {
			return nil, connect.NewError(code, fmt.Errorf("text of %v", code))
		}
		_, err := c.Get(t.Context(), "x")
		var e *Error
		if !errors.As(err, &e) || e.Code != code.String() || e.Message != fmt.Sprintf("text of %v", code) || e.Error() != e.Message {
			t.Errorf("%v: %#v", code, err)
		}
		for _, kind := range []error{ErrNotFound, ErrExists, ErrInvalid, ErrState, ErrExhausted, ErrUnavailable, ErrDenied, ErrUnsupported, context.DeadlineExceeded, context.Canceled} {
			if errors.Is(err, kind) != (kind == want) {
				t.Errorf("%v is %v: %v", code, kind, errors.Is(err, kind))
			}
		}
	}
}

func TestConnectChecksTheServer(t *testing.T) {
	s, cfg := serve(t)
	if _, err := Connect(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		min, max int32
		want     string
	}{{Protocol + 1, Protocol + 3, "upgrade this client"}, {0, Protocol - 1, "upgrade the server"}} {
		s.info = &dsecv1.GetInfoResponse{Version: "v9", ProtocolMin: tc.min, Protocol: tc.max}
		if _, err := Connect(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%d to %d: %v, want %s", tc.min, tc.max, err, tc.want)
		}
	}
	if _, err := Connect(t.Context(), Config{URL: "unix:" + filepath.Join(t.TempDir(), "no.sock"), Key: "k"}); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "dsec up") {
		t.Errorf("nobody there: %v", err)
	}
}

func TestConfig(t *testing.T) {
	for _, u := range []string{"localhost:7300", "ftp://x", "http://", "://"} {
		if _, err := New(Config{URL: u, Key: "k"}); err == nil || !strings.Contains(err.Error(), "want http://host:port") {
			t.Errorf("%s: %v", u, err)
		}
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "key")
	if err := os.WriteFile(file, []byte(" from the file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DSEC_URL", "")
	t.Setenv("DSEC_KEY", "")
	t.Setenv("DSEC_KEY_FILE", "")
	for name, tc := range map[string]struct {
		cfg  Config
		env  map[string]string
		want string
	}{
		"given":             {Config{URL: "http://h", Key: "k", KeyFile: file}, map[string]string{"DSEC_KEY": "env"}, "k"},
		"file":              {Config{URL: "http://h", KeyFile: file}, map[string]string{"DSEC_KEY": "env"}, "from the file"},
		"environment":       {Config{URL: "http://h"}, map[string]string{"DSEC_KEY": "env"}, "env"},
		"file of the env":   {Config{URL: "http://h"}, map[string]string{"DSEC_KEY_FILE": file}, "from the file"},
		"beside the socket": {Config{URL: "unix:" + filepath.Join(dir, "dsec.sock")}, nil, "from the file"},
	} {
		t.Run(name, func(t *testing.T) {
			for k, v := range tc.env {
				t.Setenv(k, v)
			}
			c, err := New(tc.cfg)
			if err != nil || c.key != tc.want {
				t.Errorf("%v, %v", c, err)
			}
		})
	}
	if _, err := New(Config{URL: "http://h", KeyFile: filepath.Join(dir, "none")}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a key file that is not there: %v", err)
	}
}

// A browser's address of a screen has the key only when it is asked for, and then where it is never sent.
func TestViewURL(t *testing.T) {
	c, err := New(Config{URL: "https://gw.example:7300/", Key: "dsec_a+b"})
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		port uint16
		key  bool
		want string
	}{{0, false, "https://gw.example:7300/v1/screens/mine"}, {5901, true, "https://gw.example:7300/v1/screens/mine?port=5901#key=dsec_a%2Bb"}} {
		if got, err := c.Sandbox("mine").Screen(x.port).ViewURL(x.key); err != nil || got != x.want {
			t.Errorf("%q, %v; want %q", got, err, x.want)
		}
	}
	if c, err = New(Config{URL: "unix:/run/x.sock", Key: "k"}); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Sandbox("mine").Screen(0).ViewURL(true); !errors.Is(err, ErrInvalid) {
		t.Errorf("over a Unix socket: %q, %v", got, err)
	}
}

// Key and protocol go with calls and streams alike.
func TestHeaders(t *testing.T) {
	s, c := dial(t)
	s.get = func(context.Context, *dsecv1.GetRequest) (*dsecv1.GetResponse, error) {
		return &dsecv1.GetResponse{Sandbox: &dsecv1.Sandbox{Id: "s"}}, nil
	}
	s.attach = func(_ context.Context, _ *dsecv1.AttachRequest, send func(*dsecv1.AttachResponse) error) error {
		return send(ended(0))
	}
	s.write = func(context.Context, *connect.ClientStream[dsecv1.WriteRequest]) (*dsecv1.WriteResponse, error) {
		return &dsecv1.WriteResponse{}, nil
	}
	if _, err := c.Get(t.Context(), "s"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Sandbox("s").Process("p").Stream(t.Context(), io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	if err := c.Sandbox("s").Files().WriteFile(t.Context(), "/x", nil, 0); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dsecv1connect.SandboxServiceGetProcedure, dsecv1connect.CommandServiceAttachProcedure, dsecv1connect.FileServiceWriteProcedure} {
		if h := s.headers[path]; h.Get("Authorization") != "Bearer secret" || h.Get("Dsec-Protocol") != fmt.Sprint(Protocol) {
			t.Errorf("%s: %v", path, h)
		}
	}
}

func ended(code int32) *dsecv1.AttachResponse {
	return &dsecv1.AttachResponse{Event: &dsecv1.AttachResponse_Ended{Ended: &dsecv1.Command{Outcome: &dsecv1.Outcome{Kind: "exited", Code: code}}}}
}

func chunk(stream string, offset int64, data []byte) *dsecv1.AttachResponse {
	return &dsecv1.AttachResponse{Event: &dsecv1.AttachResponse_Chunk{Chunk: &dsecv1.Chunk{Stream: stream, Offset: offset, Data: data}}}
}

// A stream that breaks again and again, in the middle of messages or between them, yields every octet once.
func TestStreamIsResumed(t *testing.T) {
	s, c := dial(t)
	out, errs := bytes.Repeat([]byte("0123456789"), 1000), bytes.Repeat([]byte("abcdefg"), 700)
	attempts := 0
	s.attach = func(_ context.Context, q *dsecv1.AttachRequest, send func(*dsecv1.AttachResponse) error) error {
		attempts++
		o, e := q.StdoutOffset, q.StderrOffset
		for i := 0; o < int64(len(out)) || e < int64(len(errs)); i++ {
			if i == 3 && attempts%3 == 0 {
				panic(http.ErrAbortHandler)
			}
			if i == 3 {
				return connect.NewError(connect.CodeUnavailable, errors.New("gateway goes down"))
			}
			if n := min(int64(len(out))-o, 700); n > 0 {
				if err := send(chunk("stdout", o, out[o:o+n])); err != nil {
					return err
				}
				o += n
			}
			if n := min(int64(len(errs))-e, 300); n > 0 {
				if err := send(chunk("stderr", e, errs[e:e+n])); err != nil {
					return err
				}
				e += n
			}
		}
		return send(ended(7))
	}
	var o, e bytes.Buffer
	got, err := c.Sandbox("s").Process("p").Stream(t.Context(), &o, &e)
	if err != nil || got.Code != 7 || !bytes.Equal(o.Bytes(), out) || !bytes.Equal(e.Bytes(), errs) {
		t.Errorf("%v %v: %d of %d and %d of %d octets in %d attempts", got, err, o.Len(), len(out), e.Len(), len(errs), attempts)
	}
}

// What can't be resumed is not: a refusal, a writer of the caller's that fails, output that was not kept.
func TestStreamThatEnds(t *testing.T) {
	s, c := dial(t)
	p := c.Sandbox("s").Process("p")
	attempts := 0
	s.attach = func(context.Context, *dsecv1.AttachRequest, func(*dsecv1.AttachResponse) error) error {
		attempts++
		return connect.NewError(connect.CodeUnauthenticated, errors.New("API key x: revoked"))
	}
	if _, err := p.Stream(t.Context(), io.Discard, io.Discard); !errors.Is(err, ErrDenied) || attempts != 1 {
		t.Errorf("a revoked key: %v in %d attempts", err, attempts)
	}
	attempts = 0
	s.attach = func(_ context.Context, _ *dsecv1.AttachRequest, send func(*dsecv1.AttachResponse) error) error {
		attempts++
		return errors.Join(send(chunk("stdout", 0, []byte("x"))), send(ended(0)))
	}
	full := errors.New("disk full here")
	if _, err := p.Stream(t.Context(), failing{full}, io.Discard); !errors.Is(err, full) || attempts != 1 {
		t.Errorf("a writer that fails: %v in %d attempts", err, attempts)
	}
	s.attach = func(_ context.Context, _ *dsecv1.AttachRequest, send func(*dsecv1.AttachResponse) error) error {
		gap := &dsecv1.AttachResponse{Event: &dsecv1.AttachResponse_Gap{Gap: &dsecv1.Gap{Stream: "stdout", From: 1, To: 100}}}
		return errors.Join(send(chunk("stdout", 0, []byte("a"))), send(gap), send(chunk("stdout", 100, []byte("b"))), send(ended(0)))
	}
	var b bytes.Buffer
	if _, err := p.Stream(t.Context(), &b, io.Discard); err != nil || b.String() != "a\n[... 99 octets of stdout not kept ...]\nb" {
		t.Errorf("%q, %v", b.String(), err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// A context that ends ends every call at once, with its own error; one without a deadline gets the client's.
func TestContextsEndCalls(t *testing.T) {
	s, cfg := serve(t)
	cfg.Timeout = 100 * time.Millisecond
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	hang := make(chan struct{})
	defer close(hang)
	s.get = func(ctx context.Context, _ *dsecv1.GetRequest) (*dsecv1.GetResponse, error) {
		select {
		case <-hang:
		case <-ctx.Done():
		}
		return nil, ctx.Err()
	}
	s.attach = func(ctx context.Context, _ *dsecv1.AttachRequest, send func(*dsecv1.AttachResponse) error) error {
		if err := send(chunk("stdout", 0, []byte("x"))); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}
	if _, err := c.Get(context.Background(), "s"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the client's own deadline: %v", err)
	}
	for name, f := range map[string]func(ctx context.Context) error{
		"get": func(ctx context.Context) error { _, err := c.Get(ctx, "s"); return err },
		"stream": func(ctx context.Context) error {
			_, err := c.Sandbox("s").Process("p").Stream(ctx, io.Discard, io.Discard)
			return err
		},
	} {
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(20*time.Millisecond, cancel)
		if err := f(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("%s cancelled: %v", name, err)
		}
		ctx, cancel = context.WithTimeout(context.Background(), 30*time.Millisecond)
		if err := f(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s with a deadline: %v", name, err)
		}
		cancel()
	}
}

// A command is waited for by one call, and by long polls when that is not enough; none asks the server to wait beyond the caller's deadline.
func TestExecWaits(t *testing.T) {
	s, c := dial(t)
	polls := 0
	within := func(ms int64) error {
		if ms <= 0 || ms > 10_000 {
			return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("asked to wait for %d ms", ms))
		}
		return nil
	}
	s.start = func(_ context.Context, q *dsecv1.StartRequest) (*dsecv1.StartResponse, error) {
		return &dsecv1.StartResponse{Command: &dsecv1.Command{Id: "c", State: "running"}}, within(q.WaitMs)
	}
	s.wait = func(_ context.Context, q *dsecv1.WaitRequest) (*dsecv1.WaitResponse, error) {
		if polls++; polls < 3 {
			return &dsecv1.WaitResponse{Command: &dsecv1.Command{Id: "c", State: "running"}}, within(q.WaitMs)
		}
		return &dsecv1.WaitResponse{Command: &dsecv1.Command{Id: "c", State: "ended", Outcome: &dsecv1.Outcome{Kind: "signalled", Signal: 15}}, Stdout: []byte("out")}, nil
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	r, err := c.Sandbox("s").Exec(ctx, "x")
	if err != nil || polls != 3 || string(r.Stdout) != "out" || r.Code() != 143 || r.OK() {
		t.Errorf("%+v, %v after %d polls", r, err, polls)
	}
	for kind, code := range map[string]int{"exited": 3, "timed_out": 124, "start_failed": 127, "killed": 128 + 9, "out_of_memory": 128 + 9, "unknown": 125, "interrupted": 125} {
		r := &Result{Outcome: &dsecv1.Outcome{Kind: kind, Code: 3, Signal: 9}}
		if r.Code() != code || r.OK() {
			t.Errorf("%s: %d, want %d", kind, r.Code(), code)
		}
	}
}

// Input goes out at its offset, and what the server took only in part is sent again from there.
func TestStdinKeepsItsOffset(t *testing.T) {
	s, c := dial(t)
	var got []byte
	eof := false
	s.stdin = func(_ context.Context, q *dsecv1.WriteStdinRequest) (*dsecv1.WriteStdinResponse, error) {
		if q.Offset != int64(len(got)) {
			return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("offset %d, want %d", q.Offset, len(got)))
		}
		got = append(got, q.Data[:min(len(q.Data), 100_000)]...)
		eof = q.Eof
		return &dsecv1.WriteStdinResponse{Taken: int64(len(got))}, nil
	}
	p := c.Sandbox("s").Process("p")
	data := bytes.Repeat([]byte("0123456789abcdef"), 60_000)
	for _, part := range [][]byte{data[:1], data[1:500_000], data[500_000:]} {
		if err := p.Write(t.Context(), part); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.CloseStdin(t.Context()); err != nil || !eof || !bytes.Equal(got, data) {
		t.Errorf("%v, end of file %v, %d of %d octets", err, eof, len(got), len(data))
	}
}

// A body that breaks here breaks there too and never passes for a whole one; a refusal in its middle is told in the server's words.
func TestWriteBodies(t *testing.T) {
	s, c := dial(t)
	f := c.Sandbox("s").Files()
	read := make(chan error, 1)
	s.write = func(_ context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*dsecv1.WriteResponse, error) {
		n := int64(0)
		for in.Receive() {
			n += int64(len(in.Msg().Data))
		}
		read <- in.Err()
		return &dsecv1.WriteResponse{Written: n}, in.Err()
	}
	r, err := f.Write(t.Context(), "/x", bytes.NewReader(make([]byte, 1<<20)), WriteOptions{})
	if err != nil || r.Written != 1<<20 || <-read != nil {
		t.Fatal(r, err)
	}
	broken := errors.New("my disk broke")
	if _, err := f.Write(t.Context(), "/x", io.MultiReader(bytes.NewReader(make([]byte, 600<<10)), badReader{broken}), WriteOptions{}); !errors.Is(err, broken) {
		t.Errorf("a reader that fails: %v", err)
	}
	if err := <-read; err == nil {
		t.Error("the server took a broken body for a whole one")
	}
	s.write = func(_ context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*dsecv1.WriteResponse, error) {
		in.Receive()
		return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("write /x: no space left"))
	}
	if _, err := f.Write(t.Context(), "/x", bytes.NewReader(make([]byte, 8<<20)), WriteOptions{}); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("refused in the middle: %v", err)
	}
}

type badReader struct{ err error }

func (b badReader) Read([]byte) (int, error) { return 0, b.err }

// A deferred Close stops the sandbox although its caller's context has ended.
func TestCloseOutlivesItsContext(t *testing.T) {
	s, c := dial(t)
	stopped := ""
	s.stop = func(ctx context.Context, q *dsecv1.StopRequest) (*dsecv1.SelectorResult, error) {
		stopped = q.Id
		return &dsecv1.SelectorResult{Sandboxes: []*dsecv1.Sandbox{{Id: q.Id, State: "stopped"}}}, ctx.Err()
	}
	ctx, cancel := context.WithCancel(context.Background())
	sb := c.Sandbox("s")
	cancel()
	if err := sb.Stop(ctx); !errors.Is(err, context.Canceled) || stopped != "" {
		t.Errorf("stop: %v %s", err, stopped)
	}
	if err := sb.Close(); err != nil || stopped != "s" {
		t.Errorf("close: %v %s", err, stopped)
	}
}

// A lease is renewed while the job is open, whatever becomes of single renewals, and not after.
func TestLeaseIsRenewed(t *testing.T) {
	s, c := dial(t)
	j, err := c.OpenJob(t.Context(), "j", 60*time.Millisecond, "")
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); s.renewed.Load() < 5; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("renewed %d times", s.renewed.Load())
		}
	}
	j.Detach()
	n := s.renewed.Load()
	time.Sleep(100 * time.Millisecond)
	if got := s.renewed.Load(); got > n+1 { // one may have been on its way
		t.Errorf("renewed %d times more after the end", got-n)
	}
}
