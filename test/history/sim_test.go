package history_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/gateway"
	"github.com/dsec-dev/dsec/internal/guest"
	"github.com/dsec-dev/dsec/internal/host"
	"github.com/dsec-dev/dsec/internal/iam"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/trajectory"
	"github.com/dsec-dev/dsec/internal/trajectory/crashfs"
	"github.com/dsec-dev/dsec/test/history"
)

const (
	hostID = sandbox.HostID("hsimulated")
	heirID = sandbox.HostID("hheir00001") // goes on when the machine of the other is lost
	token  = "0123456789abcdef"
)

// ground is what all histories begin with: a layer, a key.
type ground struct {
	objects map[string][]byte
	facts   map[string]facts.Fact
	last    facts.Revision
	key     string
	layer   string
	dir     string // of the host: its key for secrets
}

var laid = sync.OnceValues(func() (*ground, error) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "dsec-history-")
	if err != nil {
		return nil, err
	}
	st, err := store.NewDir(filepath.Join(dir, "store"))
	if err != nil {
		return nil, err
	}
	f := &memFacts{all: map[string]facts.Fact{}, odd: calm}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err = errors.Join(w.WriteHeader(&tar.Header{Name: "etc/hosts", Mode: 0o644, Size: 4, Typeflag: tar.TypeReg}))
	_, werr := io.WriteString(w, "abc\n")
	if err = errors.Join(err, werr, w.Close()); err != nil {
		return nil, err
	}
	d, err := layer.New(f, st).ImportTar(ctx, iam.DefaultProject, &b, layer.Options{})
	if err != nil {
		return nil, err
	}
	g := &ground{layer: string(d.ID), dir: filepath.Join(dir, "state")}
	keys := iam.New(f)
	if err := keys.CreateProject(ctx, iam.DefaultProject); err != nil {
		return nil, err
	}
	if g.key, _, err = keys.CreateKey(ctx, iam.DefaultProject, "", time.Time{}); err != nil {
		return nil, err
	}
	if g.objects, err = load(filepath.Join(dir, "store")); err != nil {
		return nil, err
	}
	g.facts, g.last = f.all, f.last
	if err := os.MkdirAll(g.dir, 0o700); err != nil {
		return nil, err
	}
	return g, os.WriteFile(filepath.Join(g.dir, "secret.key"), bytes.Repeat([]byte{7}, 32), 0o600)
})

func calm(bool) (time.Duration, error, error) { return 0, nil, nil }

func TestMain(m *testing.M) {
	code := m.Run()
	if g, err := laid(); err == nil {
		os.RemoveAll(filepath.Dir(g.dir))
	}
	os.Exit(code)
}

// plan is what a seed decides before anything runs.
type plan struct {
	seed     uint64
	clients  int
	steps    int // of each client
	faults   int
	crashAt  int  // the changing call of the first host's file system that crashes it; 0: faults are drawn
	power    bool // it is a power loss
	moved    bool // at the end the machine is lost, and the log comes back from the store
	heir     bool // then another host takes it over and restores what is gone
	storm    bool // store and facts fail now and then
	quietNet bool // no answer is lost
	verbose  bool
}

func drawn(seed uint64) plan {
	r := rand.New(rand.NewPCG(seed, 11))
	return plan{seed: seed, clients: 1 + r.IntN(3), steps: 3 + r.IntN(6), faults: r.IntN(5), moved: r.IntN(5) == 0, storm: r.IntN(3) == 0, quietNet: r.IntN(4) == 0, heir: r.IntN(2) == 0}
}

// sim is one history in the making: a gateway and a host, which die and come back, over a world that outlives them.
type sim struct {
	t     testing.TB
	plan  plan
	g     *ground
	rec   *history.Recorder
	root  string // of the sandboxes' files
	world *fake.World
	store *memStore
	near  *memStore // the same for gateways, which lock while they use it: who waits for a lock stops a bubble's time
	facts *memFacts
	log   *slog.Logger
	front *wire // to the gateway
	back  *wire // to the host
	peer  *rpc.Peer
	boxes []string
	began time.Time

	mu     sync.Mutex
	rng    *rand.Rand
	fs     *crashfs.FS
	host   *process
	gw     *process
	births map[sandbox.ID]string // box of each sandbox that was born
	conns  map[io.Closer]bool    // to file servers, of the host that lives
	noted  map[string]string     // box of a sandbox, as its create record says
	alone  bool                  // the log has no store any more
	healed bool
	ops    int // changing calls of file systems of the past
	name   sandbox.HostID
	given  atomic.Bool                   // the lost host is in no gateway's list any more
	snaps  map[string]string             // folder of what a snapshot holds, by layer
	based  map[sandbox.ID]map[string]int // appended lines that a sandbox began with, by step

	wg sync.WaitGroup
}

func (s *sim) intn(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rng.IntN(n)
}

func (s *sim) chance(n int) bool { return s.intn(n) == 0 }

func (s *sim) upTo(d time.Duration) time.Duration { return time.Duration(s.intn(int(d) + 1)) }

func (s *sim) calmed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.healed
}

var errOdd = fmt.Errorf("the store is out of order: %w", rpc.ErrUnavailable)

func (s *sim) oddStore(changes bool) (time.Duration, error, error) {
	wait := s.upTo(2 * time.Millisecond)
	if s.calmed() || !s.plan.storm {
		return wait, nil, nil
	}
	switch s.intn(12) {
	case 0:
		return wait, errOdd, nil
	case 1:
		if changes {
			return wait, nil, errOdd
		}
	case 2:
		return s.upTo(3 * time.Second), nil, nil
	}
	return wait, nil, nil
}

func (s *sim) oddNet() (there, back time.Duration, lost bool) {
	there, back = s.upTo(time.Millisecond), s.upTo(time.Millisecond)
	if s.chance(20) {
		back += s.upTo(300 * time.Millisecond)
	}
	return there, back, !s.calmed() && !s.plan.quietNet && s.chance(15)
}

// hook lets the host die before an act of the backend, or after it and before its answer.
func (s *sim) hook(_ context.Context, op fake.Op, id sandbox.ID, _ string) error {
	if s.calmed() {
		return nil
	}
	if op == fake.OpCreated || op == fake.OpStarted {
		time.Sleep(s.upTo(2 * time.Millisecond))
	}
	if s.plan.crashAt == 0 && s.plan.faults > 0 && s.chance(60) {
		s.mu.Lock()
		p := s.host
		s.mu.Unlock()
		s.die(p)
	}
	return nil
}

// die is the death of a host's process: what it held is cut, what it still does has no effect.
func (s *sim) die(p *process) {
	if p == nil || !p.kill(s.rec.Now) {
		return
	}
	s.world.Connect() // fences its backend
	s.mu.Lock()
	conns := s.conns
	s.conns = map[io.Closer]bool{}
	s.mu.Unlock()
	for c := range conns {
		go c.Close()
	}
}

type fileConn struct {
	io.ReadWriteCloser
	left int // octets from inside the sandbox until it breaks; below 0 never
	cut  func()
}

func (c *fileConn) Write(p []byte) (int, error) {
	if c.left >= 0 && len(p) > c.left {
		n, _ := c.ReadWriteCloser.Write(p[:c.left])
		c.cut()
		c.ReadWriteCloser.Close()
		return n, io.ErrClosedPipe
	}
	if c.left >= 0 {
		c.left -= len(p)
	}
	return c.ReadWriteCloser.Write(p)
}

func (s *sim) serveFiles(ctx context.Context, _ sandbox.ID, _ string, conn io.ReadWriteCloser) {
	f := &fileConn{ReadWriteCloser: conn, left: -1}
	if !s.calmed() && s.plan.faults > 0 && s.chance(6) {
		f.left = s.intn(400)
		from := s.rec.Now()
		f.cut = func() { s.rec.Fault(history.FilesCut, from) }
	}
	s.mu.Lock()
	s.conns[conn] = true
	s.mu.Unlock()
	_ = guest.ServeFiles(ctx, f)
	s.mu.Lock()
	delete(s.conns, conn)
	s.mu.Unlock()
}

// startHost begins a host over a file system. It may die in that, too.
func (s *sim) startHost(fs *crashfs.FS, crashIn int) {
	p := newProcess()
	s.mu.Lock()
	s.fs, s.host = fs, p
	alone, name := s.alone, s.name
	s.mu.Unlock()
	fs.OnCrash(func() { s.die(p) })
	if crashIn > 0 {
		fs.CrashIn(crashIn)
	}
	cfg := trajectory.Default("")
	cfg.FS, cfg.SegmentBytes, cfg.Reserve = fs, 128<<10, 32<<10
	if !alone {
		cfg.Store, cfg.Host = s.store, string(name)
	}
	began := s.began
	cfg.Now = func() (time.Time, time.Duration) { now := time.Now(); return now, now.Sub(began) }
	ctx, cancel := context.WithCancel(context.Background())
	context.AfterFunc(p.ctx, cancel)
	s.wg.Go(func() {
		defer cancel()
		l, err := trajectory.Open(cfg, s.log)
		for err != nil && !p.dead.Load() && !errors.Is(err, crashfs.ErrCrashed) { // a supervisor starts it again
			if !errors.Is(err, errOdd) && !errors.Is(err, context.DeadlineExceeded) {
				s.t.Errorf("open the log: %v", err)
				s.die(p)
				return
			}
			time.Sleep(100 * time.Millisecond)
			l, err = trajectory.Open(cfg, s.log)
		}
		if err != nil {
			s.die(p)
			return
		}
		c := host.Default()
		c.ID, c.Dir = name, s.g.dir
		h, err := host.New(c, host.Deps{
			Backends: map[string]sandbox.Backend{"container": s.world.Connect()}, Log: l, Logger: s.log,
			Memory: func() (int64, int64, error) { return 8 << 30, 4 << 30, nil },
			TakeOver: func(ctx context.Context, lost, dir string) (host.LostLog, error) {
				return trajectory.TakeOver(ctx, s.store, lost, filepath.Join(s.root, "lost", filepath.Base(dir)), s.log)
			},
		})
		if err != nil {
			s.t.Errorf("make a host: %v", err)
			return
		}
		guard, err := rpc.ClusterGuard(token)
		if err != nil {
			s.t.Error(err)
			return
		}
		p.handler = h.Handler(&rpc.Edge{Log: s.log, Guard: guard})
		if !p.dead.Load() {
			s.back.set(p)
		}
		var both sync.WaitGroup
		both.Go(func() { _ = l.Run(ctx) })
		if err := h.Run(ctx); err != nil && ctx.Err() == nil && !p.dead.Load() {
			s.t.Errorf("run a host: %v", err)
		}
		s.die(p)
		both.Wait()
		_ = l.Close() // of a dead one it fails
	})
}

// startGateway begins a gateway, as another process would.
func (s *sim) startGateway() {
	p := newProcess()
	g, err := gateway.New(gateway.Config{Version: "sim", Stall: -1}, gateway.Deps{Fleet: fleet{s}, Keys: iam.New(s.facts), Layers: layer.New(s.facts, s.near), Log: s.log})
	if err != nil {
		s.t.Error(err)
		return
	}
	p.handler = g.Handler()
	s.mu.Lock()
	s.gw = p
	s.mu.Unlock()
	s.front.set(p)
}

// fleet is the one host, as a monitor that has just asked it would show it.
type fleet struct{ s *sim }

func (f fleet) Fleet() *placement.Fleet {
	fl := &placement.Fleet{Hosts: []placement.Host{{ID: f.s.hostName(), Addr: "sim", Protocol: rpc.Protocol, Up: true, SlotsFree: 1000, MemoryTotal: 8 << 30, MemoryAvailable: 4 << 30,
		Backends: []sandbox.Capabilities{{Backend: "container", PauseLevels: []sandbox.PauseLevel{sandbox.Frozen}, Networks: []string{"none", "open"}, Snapshot: true, Terminal: true, Sessions: true, Ports: true}}}}}
	if f.s.hostName() != hostID && !f.s.given.Load() {
		fl.Hosts = append(fl.Hosts, placement.Host{ID: hostID, Addr: "lost", Protocol: rpc.Protocol})
	}
	return fl
}

func (s *sim) hostName() sandbox.HostID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.name
}

func (f fleet) Ready() <-chan struct{} {
	ch := make(chan struct{})
	close(ch)
	return ch
}

func (f fleet) Peer(id sandbox.HostID) (*rpc.Peer, bool) { return f.s.peer, id == f.s.hostName() }

// newPeer is the way to the host, whichever lives.
func newPeer(way http.RoundTripper) *rpc.Peer {
	h := &http.Client{Transport: way}
	opt := connect.WithInterceptors(between{})
	const base = "http://host"
	return &rpc.Peer{
		Addr: "sim", Info: dsecv1connect.NewInfoServiceClient(h, base, opt), Host: dsecv1connect.NewHostServiceClient(h, base, opt),
		Sandboxes: dsecv1connect.NewSandboxServiceClient(h, base, opt), Commands: dsecv1connect.NewCommandServiceClient(h, base, opt),
		Jobs: dsecv1connect.NewJobServiceClient(h, base, opt), Files: dsecv1connect.NewFileServiceClient(h, base, opt),
		Logs: dsecv1connect.NewLogServiceClient(h, base, opt), Restores: dsecv1connect.NewHostRestoreServiceClient(h, base, opt), Streams: dsecv1connect.NewCommandServiceClient(h, base, opt),
		FileStreams: dsecv1connect.NewFileServiceClient(h, base, opt),
	}
}

// between adds what calls between daemons carry.
type between struct{}

func (between) set(ctx context.Context, h http.Header) {
	h.Set(rpc.HeaderProtocol, fmt.Sprint(rpc.Protocol))
	h.Set(rpc.HeaderCluster, token)
	if p := rpc.Project(ctx); p != "" {
		h.Set(rpc.HeaderProject, p)
	}
}

func (b between) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		b.set(ctx, r.Header())
		return next(ctx, r)
	}
}

func (b between) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		c := next(ctx, spec)
		b.set(ctx, c.RequestHeader())
		return c
	}
}

func (between) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// revive waits for a host's death, whoever caused it, and starts the next.
func (s *sim) revive(stop context.Context) {
	for {
		s.mu.Lock()
		p := s.host
		s.mu.Unlock()
		select {
		case <-p.ctx.Done():
		case <-stop.Done():
			return
		}
		s.mu.Lock()
		old := s.fs
		s.mu.Unlock()
		kind := history.HostKilled
		var next *crashfs.FS
		if !s.calmed() && (s.plan.power || s.plan.crashAt == 0 && s.chance(3)) {
			kind = history.PowerLost
			s.world.KillKeeper()
			next = old.PowerLoss()
		} else {
			next = old.Kill()
		}
		s.rec.Fault(kind, p.from)
		pause(stop, s.upTo(3*time.Second))
		again := 0
		if s.plan.crashAt == 0 && !s.calmed() && s.chance(4) {
			again = 1 + s.intn(12) // it dies in its recovery
		}
		s.mu.Lock()
		s.ops += old.Ops()
		s.mu.Unlock()
		s.startHost(next, again)
	}
}

// trouble breaks things at random moments.
func (s *sim) trouble(stop context.Context) {
	for range s.plan.faults {
		pause(stop, s.upTo(1500*time.Millisecond))
		if stop.Err() != nil {
			return
		}
		s.mu.Lock()
		h, g, fs := s.host, s.gw, s.fs
		s.mu.Unlock()
		switch s.intn(6) {
		case 0:
			if g.kill(s.rec.Now) {
				pause(stop, s.upTo(time.Second))
				s.startGateway()
				s.rec.Fault(history.GatewayKilled, g.from)
			}
		case 1:
			from := s.rec.Now()
			s.world.KillKeeper()
			s.rec.Fault(history.KeeperKilled, from)
		case 2:
			s.die(h)
		default:
			fs.CrashIn(1 + s.intn(40))
		}
	}
}

// simulate runs a plan and returns its history. It must be called in a bubble.
func simulate(t testing.TB, p plan) (h *history.History, ops int) {
	g, err := laid()
	if err != nil {
		t.Fatal(err)
	}
	root, err := os.MkdirTemp(filepath.Dir(g.dir), "files")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	s := &sim{t: t, plan: p, g: g, rec: history.NewRecorder(p.seed), root: root, began: time.Now(), rng: rand.New(rand.NewPCG(p.seed, 5)),
		births: map[sandbox.ID]string{}, conns: map[io.Closer]bool{}, noted: map[string]string{},
		name: hostID, snaps: map[string]string{}, based: map[sandbox.ID]map[string]int{}}
	s.log = slog.New(slog.DiscardHandler)
	if p.verbose {
		s.log = slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelWarn}))
	}
	s.store = &memStore{mu: new(sync.Mutex), all: maps.Clone(g.objects), odd: s.oddStore}
	prompt := func(changes bool) (time.Duration, error, error) {
		_, before, after := s.oddStore(changes)
		return 0, before, after
	}
	s.near = &memStore{mu: s.store.mu, all: s.store.all, odd: prompt}
	s.facts = &memFacts{all: maps.Clone(g.facts), last: g.last, odd: prompt}
	s.world = fake.NewWorld(fake.Options{Hook: s.hook, Files: s.serveFiles, Born: s.born, Snap: s.snap})
	s.front, s.back = &wire{odd: s.oddNet}, &wire{odd: s.oddNet}
	s.peer = newPeer(s.back)
	for i, d := range []string{"process", "host", "store"} {
		s.boxes = append(s.boxes, fmt.Sprintf("b%d-%s", i, d))
	}
	stop, end := context.WithCancel(context.Background())
	s.startHost(crashfs.New(p.seed), p.crashAt)
	s.startGateway()
	var watch, work sync.WaitGroup
	watch.Go(func() { s.revive(stop) })
	if p.crashAt == 0 {
		work.Go(func() { s.trouble(stop) })
	}
	for i := range p.clients {
		c := s.newClient(i)
		work.Go(c.run)
	}
	work.Wait()
	s.mu.Lock()
	s.healed = true
	ops = s.ops + s.fs.Ops()
	s.fs.CrashIn(0)
	s.mu.Unlock()
	s.conclude()
	end()
	watch.Wait()
	s.mu.Lock()
	hp, gp := s.host, s.gw
	s.mu.Unlock()
	hp.kill(s.rec.Now)
	gp.kill(s.rec.Now)
	s.world.Close()
	s.wg.Wait()
	time.Sleep(time.Hour) // what a dead gateway looks after by the clock comes to its end
	return s.rec.History(), ops
}

func (s *sim) rootOf(box string) string { return filepath.Join(s.root, box) }

// conclude looks at everything when no more can break: through the gateway, after one more restart of the host.
func (s *sim) conclude() {
	c := s.newClient(-1)
	for _, b := range s.boxes {
		c.readLog(b)
	}
	s.mu.Lock()
	p := s.host
	s.mu.Unlock()
	if s.plan.moved && s.plan.heir {
		s.inherit(c, p)
	} else if s.plan.moved {
		from := s.rec.Now()
		s.mu.Lock()
		s.alone = true
		s.mu.Unlock()
		s.world.KillKeeper()
		next := crashfs.New(s.plan.seed + 1)
		ctx := context.Background()
		if err := errors.Join(trajectory.Fence(ctx, s.store, string(hostID)), trajectory.Recall(ctx, s.store, string(hostID), next)); err != nil {
			s.t.Errorf("take the log over: %v", err)
		}
		s.mu.Lock()
		s.fs = next // what revive goes on with, instead of the lost disk
		s.mu.Unlock()
		s.die(p)
		s.rec.Fault(history.MachineLost, from)
	} else {
		s.die(p)
	}
	runs, births := s.world.Runs(), s.world.Births()
	for _, key := range s.boxes {
		b := &history.Box{Key: key, Host: string(s.hostName()), Durability: history.Durability(key[strings.Index(key, "-")+1:]), Root: s.rootOf(key), Births: map[string]int{},
			Runs: map[history.Ran]int{}, Seen: map[string]bool{}}
		sb, log := c.finalLog(key)
		b.Log = log
		for _, r := range log {
			if r.GetKind() == "create" {
				s.noted[r.GetStep()] = key
			}
		}
		for id := range c.ids(key) {
			s.noted[id] = key
		}
		for id, n := range births {
			if s.noted[string(id)] == key {
				b.Births[string(id)], b.Seen[string(id)] = n, true
			}
		}
		for k, n := range runs {
			id, step, _ := strings.Cut(k, " ")
			if s.noted[id] == key {
				b.Runs[history.Ran{ID: id, Step: step}] = n
			}
		}
		for k, n := range s.world.Signals() {
			f := strings.Fields(k)
			if s.noted[f[0]] == key && f[2] == "15" { // sent under a key, one to a command
				b.Runs[history.Ran{ID: f[0], Step: "signal-" + f[1]}] = n
			}
		}
		b.ID = sb.GetId()
		for id := range b.Births {
			files := s.filesOf(sandbox.ID(id), b.Root)
			if id == sb.GetId() && sb.GetState() == "running" {
				b.Files = files
			}
			for step, n := range s.linesOf(files, b.Root) {
				if n -= s.based[sandbox.ID(id)][step]; n != 0 {
					b.Runs[history.Ran{ID: id, Step: step}] += n
				}
			}
		}
		for _, id := range s.world.Alive() {
			if s.noted[string(id)] == key && string(id) != sb.GetId() {
				s.t.Errorf("seed %d: sandbox %s of %s lives beside %s", s.plan.seed, id, key, sb.GetId())
			}
		}
		s.rec.History().Boxes[key] = b
	}
	// A birth that its host did not outlive is undone by the next: its record is void. Nothing may have been done in it.
	for id, n := range births {
		if s.noted[string(id)] == "" && n > 0 && !s.lossy() {
			if slices.Contains(s.world.Alive(), id) {
				s.t.Errorf("seed %d: sandbox %s belongs to no key and lives", s.plan.seed, id)
			}
			for k := range runs {
				if ran, step, _ := strings.Cut(k, " "); ran == string(id) {
					s.t.Errorf("seed %d: sandbox %s belongs to no key, and step %s was done in it", s.plan.seed, id, step)
				}
			}
		}
	}
}

func (s *sim) lossy() bool {
	for _, f := range s.rec.History().Faults {
		if f.Kind == history.PowerLost || f.Kind == history.MachineLost {
			return true
		}
	}
	return false
}

// inBubble runs a plan in virtual time and checks its history.
func inBubble(t *testing.T, p plan) (h *history.History, ops int) {
	synctest.Test(t, func(t *testing.T) { h, ops = simulate(t, p) })
	return h, ops
}
