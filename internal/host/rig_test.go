package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// rig is a host over a fake world, whose log lies in a folder of the test. It can be stopped and started again.
type rig struct {
	t      testing.TB
	dir    string
	world  *fake.World
	config func(*Config, *Deps)
	fuse   *fuse       // of the running host
	store  store.Store // of its log; nil is none
	id     sandbox.HostID
	// refusal takes the error of a start that is meant to fail; it has room for one.
	refusal chan error

	log    *trajectory.Log
	h      *Host
	cancel context.CancelFunc
	done   sync.WaitGroup
}

func newRig(t testing.TB, opt fake.Options, config func(*Config, *Deps)) *rig {
	return (&rig{t: t, dir: t.TempDir(), world: fake.NewWorld(opt), config: config}).begin()
}

// rigOn is one of several hosts, each on a machine of its own, whose logs go to one store; nil is none.
func rigOn(t testing.TB, id sandbox.HostID, st store.Store) *rig {
	return (&rig{t: t, dir: t.TempDir(), world: fake.NewWorld(fake.Options{}), store: st, id: id}).begin()
}

// begin starts the host, and ends it and its world with the test.
func (r *rig) begin() *rig {
	r.start()
	r.t.Cleanup(func() {
		r.stop()
		r.world.Close()
		time.Sleep(20 * time.Millisecond) // in a bubble: its last goroutines end
	})
	return r
}

const testHost = sandbox.HostID("htest1")

func (r *rig) start() {
	r.t.Helper()
	cfg := trajectory.Default(r.dir + "/log")
	cfg.SegmentBytes, cfg.Reserve = 4<<20, 1<<20
	if r.id == "" {
		r.id = testHost
	}
	cfg.Store, cfg.Host = r.store, string(r.id)
	logger := slog.New(slog.NewTextHandler(testWriter{r.t}, &slog.HandlerOptions{Level: slog.LevelWarn}))
	log, err := trajectory.Open(cfg, logger)
	if err != nil {
		r.t.Fatal(err)
	}
	r.log, r.fuse = log, &fuse{}
	c := Default()
	c.ID, c.Dir = r.id, r.dir
	deps := Deps{
		Backends: map[string]sandbox.Backend{"container": &fusedBackend{r.world.Connect(), r.fuse}}, Log: &fusedLog{log, r.fuse}, Logger: logger,
		Memory: func() (int64, int64, error) { return 8 << 30, 4 << 30, nil },
	}
	if st := r.store; st != nil {
		deps.TakeOver = func(ctx context.Context, host, dir string) (LostLog, error) {
			return trajectory.TakeOver(ctx, st, host, dir, logger)
		}
	}
	if r.config != nil {
		r.config(&c, &deps)
	}
	if r.h, err = New(c, deps); err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	r.done.Go(func() { log.Run(ctx) })
	h := r.h
	r.done.Go(func() {
		err := h.Run(ctx)
		switch {
		case err == nil || ctx.Err() != nil || errors.Is(err, errBlown):
		case r.refusal != nil:
			r.refusal <- err
		default:
			r.t.Errorf("run: %v", err)
		}
	})
}

func (r *rig) stop() {
	if r.cancel == nil {
		return
	}
	r.cancel()
	r.done.Wait()
	if err := r.log.Close(); err != nil {
		r.t.Errorf("close log: %v", err)
	}
	r.cancel = nil
}

func (r *rig) restart() {
	r.t.Helper()
	r.stop()
	r.start()
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	if testing.Verbose() {
		fmt.Printf("%s", p)
	}
	return len(p), nil
}

func createRequest(key string, change ...func(*dsecv1.Spec)) *dsecv1.HostCreateRequest {
	s := &dsecv1.Spec{Project: "default", Job: "j", Key: key, Backend: "container", Layers: []string{"sha256:" + strings.Repeat("0", 64)}}
	for _, f := range change {
		f(s)
	}
	return &dsecv1.HostCreateRequest{Spec: s, Request: &dsecv1.CreateRequest{Layers: s.Layers, Key: s.Key, Job: s.Job, Name: s.Name, Env: s.Env, Lifetime: s.Lifetime},
		RequestHash: fmt.Sprint(s)}
}

func (r *rig) create(key string, change ...func(*dsecv1.Spec)) *box {
	r.t.Helper()
	b, _, err := r.h.create(context.Background(), createRequest(key, change...))
	if err != nil {
		r.t.Fatalf("create %s: %v", key, err)
	}
	return b
}

func (r *rig) box(id sandbox.ID) *box {
	r.t.Helper()
	b, err := r.h.get(context.Background(), string(id))
	if err != nil {
		r.t.Fatal(err)
	}
	return b
}

func (b *box) mustStart(t testing.TB, id string, argv ...string) *step {
	t.Helper()
	s, _, err := b.start(context.Background(), &sandbox.Command{ID: id, Argv: argv})
	if err != nil {
		t.Fatalf("start %s: %v", id, err)
	}
	return s
}

// mustWait waits for a command's end, whatever it takes.
func (b *box) mustWait(t testing.TB, id string) sandbox.Outcome {
	t.Helper()
	s, err := b.command(context.Background(), id)
	if err != nil {
		t.Fatal(err)
	}
	for {
		if err := b.waitCommand(context.Background(), s, time.Minute); err != nil {
			t.Fatal(err)
		}
		b.mu.Lock()
		ended, o := s.ended(), s.outcome
		b.mu.Unlock()
		if ended {
			return o
		}
	}
}

func (b *box) output(t testing.TB, id string) string {
	t.Helper()
	s, err := b.command(context.Background(), id)
	if err != nil {
		t.Fatal(err)
	}
	out, _, err := b.head(context.Background(), s, maxOutput)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func (b *box) now() (sandbox.State, sandbox.Cause) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state, b.cause
}

func (r *rig) mustStop(b *box) {
	r.t.Helper()
	if err := r.h.stop(context.Background(), b, cancelled); err != nil {
		r.t.Fatal(err)
	}
}

// records reads a whole trajectory.
func (r *rig) records(b *box) []trajectory.Record {
	r.t.Helper()
	var all []trajectory.Record
	q := trajectory.Query{From: 1}
	for {
		recs, next, err := r.log.Read(context.Background(), b.traj, q)
		if err != nil {
			r.t.Fatal(err)
		}
		all = append(all, recs...)
		if next == q.From {
			return all
		}
		q.From = next
	}
}

func wantErr(t testing.TB, err, want error, parts ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Fatalf("error %q does not name %q", err, p)
		}
	}
}

func in(project string) context.Context { return rpc.WithProject(context.Background(), project) }

// errBlown is what everything answers once the fuse has blown: the process is dead.
var errBlown = errors.New("the host was killed")

// fuse kills a host between two of its outward acts, or in the middle of one: the act happens and its answer is never heard.
type fuse struct {
	mu   sync.Mutex
	left int // acts until it blows; 0 never
	late bool
	dead bool
	blew chan struct{}
}

func (f *fuse) set(after int, late bool) chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left, f.late, f.blew = after, late, make(chan struct{})
	return f.blew
}

func (f *fuse) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead = true
}

func (f *fuse) isDead() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead
}

// pass does an act, unless the host is dead.
func (f *fuse) pass(act func() error) error {
	f.mu.Lock()
	if f.dead {
		f.mu.Unlock()
		return errBlown
	}
	last := false
	if f.left > 0 {
		f.left--
		last = f.left == 0
	}
	if last {
		f.dead = true
		close(f.blew)
	}
	late := f.late
	f.mu.Unlock()
	if last && !late {
		return errBlown
	}
	err := act()
	if last || f.isDead() {
		return errBlown
	}
	return err
}

type fusedLog struct {
	*trajectory.Log
	f *fuse
}

func (l *fusedLog) Append(ctx context.Context, id trajectory.ID, recs []trajectory.Record, d sandbox.Durability) (first uint64, err error) {
	err = l.f.pass(func() error {
		first, err = l.Log.Append(ctx, id, recs, d)
		return err
	})
	return first, err
}

func (l *fusedLog) Remove(ctx context.Context, ids ...trajectory.ID) error {
	return l.f.pass(func() error { return l.Log.Remove(ctx, ids...) })
}

type fusedBackend struct {
	sandbox.Backend
	f *fuse
}

func (b *fusedBackend) Create(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (inst sandbox.Instance, err error) {
	err = b.f.pass(func() error {
		inst, err = b.Backend.Create(ctx, id, spec, &fusedSink{sink, b.f})
		return err
	})
	return &fusedInstance{inst, b.f}, err
}

func (b *fusedBackend) Recover(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, handle []byte, sink sandbox.Sink) (inst sandbox.Instance, err error) {
	err = b.f.pass(func() error {
		inst, err = b.Backend.Recover(ctx, id, spec, handle, &fusedSink{sink, b.f})
		return err
	})
	return &fusedInstance{inst, b.f}, err
}

func (b *fusedBackend) Holds(ctx context.Context) ([]sandbox.ID, error) {
	return b.Backend.(holder).Holds(ctx)
}

func (b *fusedBackend) Sweep(ctx context.Context, living map[sandbox.ID]bool) error {
	return b.f.pass(func() error { return b.Backend.Sweep(ctx, living) })
}

// fusedSink keeps a dead host from acknowledging anything.
type fusedSink struct {
	sandbox.Sink
	f *fuse
}

func (s *fusedSink) after(err error) error {
	if s.f.isDead() {
		return errBlown
	}
	return err
}

func (s *fusedSink) Output(ctx context.Context, cmd string, stream sandbox.StreamName, offset int64, data []byte, late bool) error {
	return s.after(s.Sink.Output(ctx, cmd, stream, offset, data, late))
}

func (s *fusedSink) CommandEnded(ctx context.Context, cmd string, o sandbox.Outcome) error {
	return s.after(s.Sink.CommandEnded(ctx, cmd, o))
}

func (s *fusedSink) SessionEnded(ctx context.Context, name string, o sandbox.Outcome) error {
	return s.after(s.Sink.SessionEnded(ctx, name, o))
}

func (s *fusedSink) Ended(ctx context.Context, c sandbox.Cause) error {
	return s.after(s.Sink.Ended(ctx, c))
}

type fusedInstance struct {
	sandbox.Instance
	f *fuse
}

func (i *fusedInstance) Start(ctx context.Context, c *sandbox.Command) error {
	return i.f.pass(func() error { return i.Instance.Start(ctx, c) })
}

func (i *fusedInstance) Console(ctx context.Context) ([]byte, error) {
	if c, ok := i.Instance.(sandbox.Consoled); ok {
		return c.Console(ctx)
	}
	return nil, sandbox.ErrUnsupported
}

func (i *fusedInstance) Destroy(ctx context.Context) error {
	return i.f.pass(func() error { return i.Instance.Destroy(ctx) })
}

func (i *fusedInstance) Pause(ctx context.Context, l sandbox.PauseLevel) error {
	return i.f.pass(func() error { return i.Instance.Pause(ctx, l) })
}

func (i *fusedInstance) Resume(ctx context.Context) error {
	return i.f.pass(func() error { return i.Instance.Resume(ctx) })
}

func (i *fusedInstance) Known(ctx context.Context, cmd string) (known bool, err error) {
	err = i.f.pass(func() error {
		known, err = i.Instance.Known(ctx, cmd)
		return err
	})
	return known, err
}

func (i *fusedInstance) Stdin(ctx context.Context, cmd string, off int64, data []byte, eof bool) (n int64, err error) {
	err = i.f.pass(func() error {
		n, err = i.Instance.Stdin(ctx, cmd, off, data, eof)
		return err
	})
	return n, err
}
