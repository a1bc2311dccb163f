package gateway

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/iam"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/monitor"
	"github.com/dsec-dev/dsec/internal/obs"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

const token = "0123456789abcdef"

// fakeHost behaves as a host does towards gateways: it keeps sandboxes by key and name, refuses other projects, and stops. Commands echo.
type fakeHost struct {
	dsecv1connect.UnimplementedHostServiceHandler
	id   sandbox.HostID
	addr string
	dir  string

	mu       sync.Mutex
	boxes    map[string]*dsecv1.Sandbox
	hashes   map[string]string // of create requests, by sandbox
	specs    map[string]*dsecv1.Spec
	jobs     map[string]*dsecv1.Job
	tombs    map[string]bool
	slots    int64
	creates  int
	started  map[string]int // commands by id, how often they ran
	files    map[string][]byte
	reads    int // of files, that began
	begun    int // writes that sent a message
	broken   int // and broke off
	dials    map[uint16]string
	given    map[string]*dsecv1.FindKeyResponse // to other hosts, by sandbox
	arrivals []*dsecv1.Arrival
	failNext error         // of the next create, after it was made
	hang     bool          // questions get no answer
	late     chan struct{} // a create that was done is answered when this is closed

	restores *fakeRestores
	stop     func()
}

type fakeSandboxes struct {
	dsecv1connect.UnimplementedSandboxServiceHandler
	h *fakeHost
}
type fakeCommands struct {
	dsecv1connect.UnimplementedCommandServiceHandler
	h *fakeHost
}
type fakeFiles struct {
	dsecv1connect.UnimplementedFileServiceHandler
	h *fakeHost
}
type fakeJobs struct {
	dsecv1connect.UnimplementedJobServiceHandler
	h *fakeHost
}
type fakeLogs struct {
	dsecv1connect.UnimplementedLogServiceHandler
	h *fakeHost
}

func newFakeHost(t testing.TB, id sandbox.HostID) *fakeHost {
	t.Helper()
	dir, err := os.MkdirTemp("", "dsec")
	if err != nil {
		t.Fatal(err)
	}
	h := &fakeHost{id: id, dir: dir, addr: "unix:" + filepath.Join(dir, "s"), boxes: map[string]*dsecv1.Sandbox{}, hashes: map[string]string{}, specs: map[string]*dsecv1.Spec{},
		jobs: map[string]*dsecv1.Job{}, tombs: map[string]bool{}, slots: 100000, started: map[string]int{}, files: map[string][]byte{}, dials: map[uint16]string{},
		given: map[string]*dsecv1.FindKeyResponse{}}
	h.restores = &fakeRestores{h: h}
	h.run(t)
	t.Cleanup(func() { h.stop(); os.RemoveAll(dir) })
	return h
}

// run serves until stop; it may be called again, as after a restart.
func (h *fakeHost) run(t testing.TB) {
	guard, err := rpc.ClusterGuard(token)
	if err != nil {
		t.Fatal(err)
	}
	edge := &rpc.Edge{Guard: guard}
	mux := http.NewServeMux()
	o := edge.Options()
	mux.Handle(dsecv1connect.NewHostServiceHandler(h, o...))
	mux.Handle(dsecv1connect.NewSandboxServiceHandler(fakeSandboxes{h: h}, o...))
	mux.Handle(dsecv1connect.NewCommandServiceHandler(fakeCommands{h: h}, o...))
	mux.Handle(dsecv1connect.NewFileServiceHandler(fakeFiles{h: h}, o...))
	mux.Handle(dsecv1connect.NewJobServiceHandler(fakeJobs{h: h}, o...))
	mux.Handle(dsecv1connect.NewLogServiceHandler(fakeLogs{h: h}, o...))
	mux.Handle(dsecv1connect.NewHostRestoreServiceHandler(h.restores, o...))
	mux.Handle(dsecv1connect.NewHostMoveServiceHandler(fakeMoves{h: h}, o...))
	mux.Handle(rpc.TunnelPattern, edge.Tunnel(h.dial))
	mux.Handle(rpc.ScreenPattern, edge.TunnelScreen(h.dial))
	s, err := rpc.NewServer(edge.Wrap(mux), rpc.ServerConfig{Grace: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	l, err := rpc.Listen(h.addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { s.Run(ctx, l); close(done) }()
	h.stop = sync.OnceFunc(func() { cancel(); <-done })
}

func (h *fakeHost) Status(context.Context, *connect.Request[dsecv1.HostStatusRequest]) (*connect.Response[dsecv1.HostStatusResponse], error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return connect.NewResponse(&dsecv1.HostStatusResponse{Host: string(h.id), Version: "test", Protocol: rpc.Protocol, Running: int64(len(h.boxes)), Moved: int64(len(h.given)), SlotsFree: h.slots, MemoryTotal: 1 << 40, MemoryAvailable: 1 << 39,
		Backends: []*dsecv1.Capabilities{{Backend: "container", Networks: []string{"none", "open"}, PauseLevels: []string{"frozen"}}}}), nil
}

func (h *fakeHost) Create(ctx context.Context, r *connect.Request[dsecv1.HostCreateRequest]) (*connect.Response[dsecv1.CreateResponse], error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := r.Msg.GetSpec()
	traj := s.Project + " " + s.Job + " " + s.Key
	if h.tombs[traj] {
		return nil, fmt.Errorf("key %s: stopped before it was created: %w", s.Key, sandbox.ErrState)
	}
	for id, b := range h.boxes {
		if b.Project == s.Project && b.Job == s.Job && b.Key == s.Key {
			if h.hashes[id] != r.Msg.RequestHash {
				return nil, fmt.Errorf("key %s: other request: %w", s.Key, sandbox.ErrExists)
			}
			return connect.NewResponse(&dsecv1.CreateResponse{Sandbox: b, Existed: true}), nil
		}
		if s.Name != "" && b.Name == s.Name && b.Project == s.Project && b.State == "running" {
			return nil, fmt.Errorf("name %s: taken by %s: %w", s.Name, id, sandbox.ErrExists)
		}
	}
	for _, g := range h.given {
		if b := g.Sandbox; b.Project == s.Project && b.Job == s.Job && b.Key == s.Key {
			return nil, fmt.Errorf("sandbox %s went to host %s: %w", b.Id, g.MovedTo, rpc.ErrMoved)
		}
	}
	if h.slots <= 0 {
		return nil, fmt.Errorf("host %s: is full: %w", h.id, sandbox.ErrExhausted)
	}
	h.slots--
	h.creates++
	id := string(sandbox.NewID(h.id))
	b := &dsecv1.Sandbox{Id: id, Name: s.Name, Project: s.Project, Job: s.Job, Key: s.Key, Labels: s.Labels, State: "running", Host: string(h.id), Layers: s.Layers,
		Environment: s.Environment, Resources: s.Resources, User: s.User, Cwd: s.Cwd, Created: rpc.Timestamp(time.Now())}
	h.boxes[id], h.hashes[id], h.specs[id] = b, r.Msg.RequestHash, s
	if err := h.failNext; err != nil {
		h.failNext = nil
		return nil, err
	}
	if late := h.late; late != nil {
		h.mu.Unlock()
		<-late
		h.mu.Lock()
	}
	return connect.NewResponse(&dsecv1.CreateResponse{Sandbox: b}), nil
}

// hung waits for the end of the call when the host is to hang.
func (h *fakeHost) hung(ctx context.Context) error {
	h.mu.Lock()
	hang := h.hang
	h.mu.Unlock()
	if hang {
		<-ctx.Done()
	}
	return ctx.Err()
}

func (h *fakeHost) FindKey(ctx context.Context, r *connect.Request[dsecv1.FindKeyRequest]) (*connect.Response[dsecv1.FindKeyResponse], error) {
	if err := h.hung(ctx); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, b := range h.boxes {
		if b.Project != rpc.Project(ctx) {
			continue
		}
		if r.Msg.Key != "" && b.Key == r.Msg.Key && b.Job == jobOf(r.Msg.Job) || r.Msg.Name != "" && b.Name == r.Msg.Name && b.State == "running" || r.Msg.Sandbox != "" && b.Id == r.Msg.Sandbox {
			return connect.NewResponse(&dsecv1.FindKeyResponse{Sandbox: b}), nil
		}
	}
	for _, g := range h.given {
		if b := g.Sandbox; b.Project == rpc.Project(ctx) && (b.Id == r.Msg.Sandbox || r.Msg.Key != "" && b.Key == r.Msg.Key && b.Job == jobOf(r.Msg.Job)) {
			return connect.NewResponse(g), nil
		}
	}
	return nil, fmt.Errorf("key or name: %w", sandbox.ErrNotFound)
}

func (h *fakeHost) PutJob(ctx context.Context, r *connect.Request[dsecv1.PutJobRequest]) (*connect.Response[dsecv1.PutJobResponse], error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	j := proto.Clone(r.Msg.Job).(*dsecv1.Job)
	h.jobs[rpc.Project(ctx)+" "+j.Name] = j
	return connect.NewResponse(&dsecv1.PutJobResponse{Job: j}), nil
}

func (h *fakeHost) get(ctx context.Context, ref string) (*dsecv1.Sandbox, error) {
	for id, b := range h.boxes {
		if b.Project == rpc.Project(ctx) && (id == ref || b.Name != "" && b.Name == ref && b.State == "running") {
			return b, nil
		}
	}
	if g := h.given[ref]; g != nil {
		return nil, fmt.Errorf("sandbox %s went to host %s: %w", ref, g.MovedTo, rpc.ErrMoved)
	}
	return nil, fmt.Errorf("sandbox %s: %w", ref, sandbox.ErrNotFound)
}

func (h *fakeHost) dial(ctx context.Context, id sandbox.ID, port uint16) (net.Conn, error) {
	h.mu.Lock()
	_, err := h.get(ctx, string(id))
	addr := h.dials[port]
	h.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if addr == "" {
		return nil, fmt.Errorf("port %d of %s: nothing listens there: %w", port, id, sandbox.ErrNotFound)
	}
	return net.Dial("tcp", addr)
}

func (s fakeSandboxes) Get(ctx context.Context, r *connect.Request[dsecv1.GetRequest]) (*connect.Response[dsecv1.GetResponse], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	b, err := s.h.get(ctx, r.Msg.Id)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.GetResponse{Sandbox: b}), nil
}

func (s fakeSandboxes) List(ctx context.Context, r *connect.Request[dsecv1.ListRequest]) (*connect.Response[dsecv1.ListResponse], error) {
	if err := s.h.hung(ctx); err != nil {
		return nil, err
	}
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	var ids []string
	for id, b := range s.h.boxes {
		if b.Project == rpc.Project(ctx) && id > r.Msg.PageToken {
			ids = append(ids, id)
		}
	}
	sort.Strings(ids)
	out := &dsecv1.ListResponse{}
	for _, id := range ids {
		if len(out.Sandboxes) == int(min(r.Msg.PageSize, 3)) { // a host may answer less than was asked for
			out.NextPageToken = out.Sandboxes[len(out.Sandboxes)-1].Id
			break
		}
		out.Sandboxes = append(out.Sandboxes, s.h.boxes[id])
	}
	return connect.NewResponse(out), nil
}

func (s fakeSandboxes) Stop(ctx context.Context, r *connect.Request[dsecv1.StopRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	out := &dsecv1.SelectorResult{}
	q := r.Msg
	for id, b := range s.h.boxes {
		sel := q.Selector
		if b.Project == rpc.Project(ctx) && b.State == "running" && (q.Id == id || q.Key != "" && q.Key == b.Key && jobOf(q.Job) == b.Job ||
			sel != nil && (sel.Job == b.Job || slices.Contains(sel.Ids, id))) {
			b.State = "stopped"
			out.Sandboxes = append(out.Sandboxes, b)
		}
	}
	if q.Key != "" && len(out.Sandboxes) == 0 {
		s.h.tombs[rpc.Project(ctx)+" "+jobOf(q.Job)+" "+q.Key] = true
	}
	if q.Id != "" && len(out.Sandboxes) == 0 {
		return nil, fmt.Errorf("sandbox %s: %w", q.Id, sandbox.ErrNotFound)
	}
	return connect.NewResponse(out), nil
}

func (s fakeSandboxes) Snapshot(ctx context.Context, r *connect.Request[dsecv1.SnapshotRequest]) (*connect.Response[dsecv1.SnapshotResponse], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	b, err := s.h.get(ctx, r.Msg.Id)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.SnapshotResponse{Layer: b.Layers[0]}), nil
}

func (s fakeCommands) Start(ctx context.Context, r *connect.Request[dsecv1.StartRequest]) (*connect.Response[dsecv1.StartResponse], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if _, err := s.h.get(ctx, r.Msg.Sandbox); err != nil {
		return nil, err
	}
	s.h.started[r.Msg.Id]++
	return connect.NewResponse(&dsecv1.StartResponse{Command: &dsecv1.Command{Id: r.Msg.Id, State: "ended", Outcome: &dsecv1.Outcome{Kind: "exited"}}, Stdout: []byte(strings.Join(r.Msg.Argv, " "))}), nil
}

func (s fakeCommands) Attach(ctx context.Context, r *connect.Request[dsecv1.AttachRequest], out *connect.ServerStream[dsecv1.AttachResponse]) error {
	if r.Msg.Id == "waits" {
		if err := out.Send(&dsecv1.AttachResponse{Event: &dsecv1.AttachResponse_Chunk{Chunk: &dsecv1.Chunk{Stream: "stdout", Data: []byte("x")}}}); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}
	for i := range int64(1000) {
		if err := out.Send(&dsecv1.AttachResponse{Event: &dsecv1.AttachResponse_Chunk{Chunk: &dsecv1.Chunk{Stream: "stdout", Offset: i, Data: []byte{byte(i)}}}}); err != nil {
			return err
		}
	}
	return out.Send(&dsecv1.AttachResponse{Event: &dsecv1.AttachResponse_Ended{Ended: &dsecv1.Command{Id: r.Msg.Id}}})
}

func (s fakeLogs) Read(ctx context.Context, r *connect.Request[dsecv1.ReadLogRequest], out *connect.ServerStream[dsecv1.ReadLogResponse]) error {
	s.h.mu.Lock()
	_, err := s.h.get(ctx, r.Msg.Sandbox)
	s.h.mu.Unlock()
	if err != nil {
		return err
	}
	return out.Send(&dsecv1.ReadLogResponse{Records: []*dsecv1.LogRecord{{Seq: 1, Kind: "create"}}})
}

func (s fakeFiles) Read(ctx context.Context, r *connect.Request[dsecv1.ReadRequest], out *connect.ServerStream[dsecv1.ReadResponse]) error {
	s.h.mu.Lock()
	s.h.reads++
	b, ok := s.h.files[r.Msg.At.Path+string(r.Msg.At.PathRaw)]
	s.h.mu.Unlock()
	if !ok {
		return fmt.Errorf("%s: no such file: %w", r.Msg.At.Path, sandbox.ErrNotFound)
	}
	if err := out.Send(&dsecv1.ReadResponse{Info: &dsecv1.FileInfo{Size: int64(len(b)), Mode: 0o640, Type: "file"}}); err != nil {
		return err
	}
	b = b[r.Msg.Offset:]
	if r.Msg.Length > 0 {
		b = b[:r.Msg.Length]
	}
	for len(b) > 0 {
		n := min(len(b), 100<<10)
		if err := out.Send(&dsecv1.ReadResponse{Data: b[:n]}); err != nil {
			return err
		}
		b = b[n:]
	}
	if strings.HasSuffix(r.Msg.At.Path, "breaks") {
		return fmt.Errorf("%s: input/output error", r.Msg.At.Path)
	}
	return nil
}

func (s fakeFiles) Write(ctx context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	var first *dsecv1.WriteRequest
	var b bytes.Buffer
	for in.Receive() {
		if first == nil {
			first = in.Msg()
			s.h.mu.Lock()
			s.h.begun++
			s.h.mu.Unlock()
			if strings.HasPrefix(first.At.Path, "/refused") {
				return nil, fmt.Errorf("%s: permission denied: %w", first.At.Path, sandbox.ErrDenied)
			}
		}
		b.Write(in.Msg().Data)
	}
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if err := in.Err(); err != nil {
		s.h.broken++
		return nil, err
	}
	s.h.files[first.At.Path+string(first.At.PathRaw)] = b.Bytes()
	return connect.NewResponse(&dsecv1.WriteResponse{Written: int64(b.Len()), Info: &dsecv1.FileInfo{Mode: first.Mode}}), nil
}

func (s fakeFiles) Download(ctx context.Context, r *connect.Request[dsecv1.DownloadRequest], out *connect.ServerStream[dsecv1.DownloadResponse]) error {
	if err := out.Send(&dsecv1.DownloadResponse{Data: []byte("tar of " + r.Msg.At.Path)}); err != nil {
		return err
	}
	return out.Send(&dsecv1.DownloadResponse{Skipped: []string{"/a/socket: is a socket"}})
}

func (s fakeFiles) Upload(ctx context.Context, in *connect.ClientStream[dsecv1.UploadRequest]) (*connect.Response[dsecv1.UploadResponse], error) {
	n := int64(0)
	for in.Receive() {
		n += int64(len(in.Msg().Data))
	}
	return connect.NewResponse(&dsecv1.UploadResponse{Applied: n}), in.Err()
}

func (s fakeJobs) Renew(ctx context.Context, r *connect.Request[dsecv1.RenewJobRequest]) (*connect.Response[dsecv1.RenewJobResponse], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	j := s.h.jobs[rpc.Project(ctx)+" "+r.Msg.Name]
	if j == nil {
		return nil, fmt.Errorf("job %s: %w", r.Msg.Name, sandbox.ErrNotFound)
	}
	return connect.NewResponse(&dsecv1.RenewJobResponse{Job: j}), nil
}

func (s fakeJobs) List(ctx context.Context, _ *connect.Request[dsecv1.ListJobsRequest]) (*connect.Response[dsecv1.ListJobsResponse], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	out := &dsecv1.ListJobsResponse{}
	for _, j := range s.h.jobs {
		j = proto.Clone(j).(*dsecv1.Job)
		for _, b := range s.h.boxes {
			if b.Job == j.Name && b.State == "running" {
				j.Running++
			}
		}
		out.Jobs = append(out.Jobs, j)
	}
	return connect.NewResponse(out), nil
}

func (s fakeJobs) Stop(ctx context.Context, r *connect.Request[dsecv1.StopJobRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	s.h.mu.Lock()
	known := s.h.jobs[rpc.Project(ctx)+" "+r.Msg.Name] != nil
	s.h.mu.Unlock()
	if !known {
		return nil, fmt.Errorf("job %s: %w", r.Msg.Name, sandbox.ErrNotFound)
	}
	return fakeSandboxes{h: s.h}.Stop(ctx, connect.NewRequest(&dsecv1.StopRequest{Selector: &dsecv1.Selector{Job: r.Msg.Name}}))
}

// cluster is a gateway before fake hosts.
type cluster struct {
	hosts []*fakeHost
	keys  *iam.Keys
	g     *Gateway
	facts *facts.Bolt
	url   string
	key   string
	base  string // a layer
	log   *bytes.Buffer

	Sandboxes dsecv1connect.SandboxServiceClient
	Commands  dsecv1connect.CommandServiceClient
	Files     dsecv1connect.FileServiceClient
	Layers    dsecv1connect.LayerServiceClient
	Jobs      dsecv1connect.JobServiceClient
	Logs      dsecv1connect.LogServiceClient
	Iam       dsecv1connect.IamServiceClient
	Info      dsecv1connect.InfoServiceClient
}

type locked struct {
	mu sync.Mutex
	b  *bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

var hostIDs = []sandbox.HostID{"haaaaaaaa", "hbbbbbbbb", "hcccccccc", "hdddddddd"}

func newCluster(t testing.TB, n int) *cluster {
	t.Helper()
	c := &cluster{log: &bytes.Buffer{}}
	var addrs []string
	for i := range n {
		h := newFakeHost(t, hostIDs[i])
		c.hosts = append(c.hosts, h)
		addrs = append(addrs, h.addr)
	}
	dir := t.TempDir()
	b, err := facts.OpenBolt(filepath.Join(dir, "facts"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	st, err := store.NewDir(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(&locked{b: c.log}, nil))
	m, err := monitor.New(monitor.Config{Hosts: addrs, Peer: rpc.PeerConfig{Token: token}, Interval: 10 * time.Millisecond, Misses: 150}, log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { m.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	c.keys, c.facts = iam.New(b), b
	g, err := New(Config{Version: "test", Domain: "box.test"}, Deps{Fleet: m, Keys: c.keys, Layers: layer.New(b, st), Log: log, Registry: obs.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	c.g = g
	srv := httptest.NewServer(g.Handler())
	t.Cleanup(srv.Close)
	c.url = srv.URL
	if c.key, _, err = c.keys.CreateKey(ctx, iam.DefaultProject, "", time.Time{}); err != nil {
		t.Fatal(err)
	}
	c.dial(c.key)
	c.base = c.importLayer(t, "base", map[string]string{"etc/hosts": "127.0.0.1 localhost\n"})
	<-m.Ready()
	return c
}

// dial makes the clients of a key.
func (c *cluster) dial(key string) {
	with := connect.WithInterceptors(connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
			r.Header().Set("Authorization", "Bearer "+key)
			return next(ctx, r)
		}
	}))
	h := &http.Client{Transport: keyed(key)}
	c.Sandboxes = dsecv1connect.NewSandboxServiceClient(h, c.url, with)
	c.Commands = dsecv1connect.NewCommandServiceClient(h, c.url, with)
	c.Files = dsecv1connect.NewFileServiceClient(h, c.url)
	c.Layers = dsecv1connect.NewLayerServiceClient(h, c.url)
	c.Jobs = dsecv1connect.NewJobServiceClient(h, c.url, with)
	c.Logs = dsecv1connect.NewLogServiceClient(h, c.url)
	c.Iam = dsecv1connect.NewIamServiceClient(h, c.url, with)
	c.Info = dsecv1connect.NewInfoServiceClient(http.DefaultClient, c.url)
}

type keyed string

func (k keyed) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("X-API-Key", string(k))
	return http.DefaultTransport.RoundTrip(r)
}

func (c *cluster) importLayer(t testing.TB, name string, files map[string]string) string {
	t.Helper()
	return c.importHot(t, name, files).GetId()
}

// importHot lays the contents of the hot paths in front.
func (c *cluster) importHot(t testing.TB, name string, files map[string]string, hot ...string) *dsecv1.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, path := range slices.Sorted(maps.Keys(files)) {
		text := files[path]
		w.WriteHeader(&tar.Header{Name: path, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg})
		io.WriteString(w, text)
	}
	w.Close()
	in := c.Layers.Import(context.Background())
	first := true
	for data := b.Bytes(); len(data) > 0; first = false {
		n := min(len(data), 700)
		m := &dsecv1.ImportRequest{Data: data[:n]}
		if first {
			m.Publish, m.Hot = name, hot
		}
		if err := in.Send(m); err != nil {
			break
		}
		data = data[n:]
	}
	resp, err := in.CloseAndReceive()
	if err != nil {
		t.Fatal(err)
	}
	return resp.Msg.GetLayer()
}

func (c *cluster) create(t testing.TB, q *dsecv1.CreateRequest) (*dsecv1.CreateResponse, error) {
	t.Helper()
	if q.Environment == "" && q.Layers == nil {
		q.Layers = []string{"base"}
	}
	resp, err := c.Sandboxes.Create(context.Background(), connect.NewRequest(q))
	if err != nil {
		return nil, rpc.FromError(err)
	}
	return resp.Msg, nil
}

func (c *cluster) mustCreate(t testing.TB, q *dsecv1.CreateRequest) *dsecv1.Sandbox {
	t.Helper()
	r, err := c.create(t, q)
	if err != nil {
		t.Fatal(err)
	}
	return r.GetSandbox()
}

func (c *cluster) total() (n int) {
	for _, h := range c.hosts {
		h.mu.Lock()
		n += len(h.boxes)
		h.mu.Unlock()
	}
	return n
}

func (c *cluster) host(id string) *fakeHost {
	for _, h := range c.hosts {
		if string(h.id) == string(sandbox.ID(id).Host()) {
			return h
		}
	}
	return nil
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 2000 {
		if f() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatal("never: " + what)
}

func (s fakeLogs) Export(ctx context.Context, r *connect.Request[dsecv1.ExportRequest], out *connect.ServerStream[dsecv1.ExportResponse]) error {
	return out.Send(&dsecv1.ExportResponse{Rows: []string{`{"sandbox":"` + string(s.h.id) + `"}`}})
}

func (s fakeLogs) SetVerdict(ctx context.Context, r *connect.Request[dsecv1.SetVerdictRequest]) (*connect.Response[dsecv1.SetVerdictResponse], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	b, err := s.h.get(ctx, r.Msg.Sandbox)
	if err != nil {
		return nil, err
	}
	b.Verdict = r.Msg.Verdict
	return connect.NewResponse(&dsecv1.SetVerdictResponse{Verdict: b.Verdict}), nil
}
