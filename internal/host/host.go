package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// Bounds of the host's own waits.
const (
	actWait      = 30 * time.Second // one call of a backend
	destroyWait  = 60 * time.Second // one try to destroy
	createWait   = 60 * time.Second // a create whose client names no deadline
	settleWait   = 10 * time.Second // acts under way in a sandbox that ends
	drainWait    = time.Second      // acts under way in a sandbox that is to be frozen
	stateWait    = 60 * time.Second // a request for a sandbox that is between states
	shipWait     = 30 * time.Second // a record on its way into the store
	tombstoneFor = 60 * time.Second
	maxTombs     = 100_000
)

// Host owns the sandboxes of one machine.
type Host struct {
	cfg     Config
	deps    Deps
	log     *slog.Logger
	m       *metrics
	secret  []byte
	births  *semaphore.Weighted
	screens *semaphore.Weighted

	life   context.Context // ends with Run; acts of the host run on it
	cancel context.CancelFunc
	wg     sync.WaitGroup
	ready  chan struct{} // closed when recovery is done
	// unshipped says that the store may lack what the last host recorded with durability store.
	unshipped atomic.Bool

	fenced atomic.Bool    // another has taken this host for lost, and answers for its keys
	calls  *fncall.Engine // nil: none are run
	loaded histories      // steps of ended sandboxes that were read back
	gone   lostLogs       // of hosts whose sandboxes were restored here
	turns  turns          // one act of a move at a time

	mu       sync.Mutex
	boxes    map[sandbox.ID]*box
	alive    map[sandbox.ID]*box // of boxes, those that have not ended
	keys     map[trajectory.ID]*box
	names    map[scoped]*box // of those that have not ended
	jobs     map[scoped]*job
	tombs    map[trajectory.ID]time.Time // until when a create with that key is refused
	restores map[trajectory.ID]*attempt  // under way, and of late
	creating int
	draining bool
	closed   bool
	passages map[sandbox.ID]*passage    // of sandboxes that went to other hosts or come from them
	crossed  map[trajectory.ID]*passage // the same
	looking  bool                       // whether the place in the store is still ours
	mem      reading
}

// scoped is a name within a project.
type scoped struct{ project, name string }

// New makes a host; Run starts it.
func New(cfg Config, deps Deps) (*Host, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if len(deps.Backends) == 0 || deps.Log == nil || deps.Logger == nil {
		return nil, fmt.Errorf("host: needs a backend, a log and a logger: %w", sandbox.ErrInvalid)
	}
	if deps.Memory == nil {
		deps.Memory = readMemory
	}
	secret, err := secretKey(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("host: %w", err)
	}
	h := &Host{
		cfg: cfg, deps: deps, log: deps.Logger, secret: secret, births: semaphore.NewWeighted(int64(cfg.MaxBirths)), screens: semaphore.NewWeighted(maxScreens),
		ready: make(chan struct{}), boxes: map[sandbox.ID]*box{}, alive: map[sandbox.ID]*box{}, keys: map[trajectory.ID]*box{}, names: map[scoped]*box{},
		jobs: map[scoped]*job{}, tombs: map[trajectory.ID]time.Time{}, restores: map[trajectory.ID]*attempt{}, passages: map[sandbox.ID]*passage{}, crossed: map[trajectory.ID]*passage{},
	}
	h.life, h.cancel = context.WithCancel(context.Background())
	h.m = newMetrics(h, deps.Registry)
	return h, nil
}

// Run takes back what a previous host left, serves, and returns when ctx has ended and nothing of the host runs any more.
// Sandboxes and their commands stay; StopAll ends them before.
func (h *Host) Run(ctx context.Context) error {
	defer h.shut()
	h.sweepLost()
	if err := h.recover(ctx); err != nil {
		if ctx.Err() != nil {
			return nil // asked to end before it was ready; the next start goes on
		}
		return fmt.Errorf("recover: %w", err)
	}
	close(h.ready)
	tick := time.NewTicker(time.Minute)
	defer tick.Stop()
	look := time.NewTicker(spaceEvery)
	defer look.Stop()
	var short string
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-look.C:
			short = h.tellSpace(short)
			h.lookForFence()
		case <-tick.C:
			h.expire(h.life)
		}
	}
}

func (h *Host) shut() {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.cancel()
	h.wg.Wait()
	h.dropAllLost()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, j := range h.jobs {
		j.stopTimer()
	}
	for _, b := range h.boxes {
		b.mu.Lock()
		b.stopTimer()
		b.mu.Unlock()
	}
}

// goes runs f in the background; Run waits for it. It reports false when the host is shutting down.
func (h *Host) goes(f func()) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	h.wg.Go(f)
	return true
}

// bounded is a context for an act of the host: it ends with the host or after d, not with a client.
func (h *Host) bounded(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(h.life, d)
}

// wait blocks until recovery is done.
func (h *Host) wait(ctx context.Context) error {
	select {
	case <-h.ready:
		return nil
	default:
	}
	select {
	case <-h.ready:
		return nil
	case <-h.life.Done():
		return fmt.Errorf("host is shutting down: %w", rpc.ErrUnavailable)
	case <-ctx.Done():
		return fmt.Errorf("host is taking back its sandboxes after a start: %w: %w", ctx.Err(), rpc.ErrUnavailable)
	}
}

// Ready is closed when what a previous host left was taken back.
func (h *Host) Ready() <-chan struct{} { return h.ready }

// Drain makes the host refuse new sandboxes, or take them again.
func (h *Host) Drain(on bool) {
	h.mu.Lock()
	h.draining = on
	h.mu.Unlock()
}

// StopAll ends every sandbox and waits for it; new ones are refused from then on.
func (h *Host) StopAll(ctx context.Context) error {
	h.Drain(true)
	if err := h.wait(ctx); err != nil {
		return err
	}
	var errs []error
	all := h.find(func(b *box) bool { return true })
	for _, b := range all {
		h.end(b, sandbox.Cause{Class: sandbox.ClassClient, Reason: "shutdown"})
	}
	for _, b := range all {
		if err := b.waitEnd(ctx); err != nil && b.unlessMoved(nil) == nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// find lists the living boxes that match.
func (h *Host) find(match func(*box) bool) []*box {
	h.mu.Lock()
	all := make([]*box, 0, len(h.alive))
	for _, b := range h.alive {
		all = append(all, b)
	}
	h.mu.Unlock()
	out := all[:0]
	for _, b := range all {
		if !b.ended() && match(b) {
			out = append(out, b)
		}
	}
	return out
}

// project is that of the call; hosts are called for a project by their gateways.
func project(ctx context.Context) string {
	if p := rpc.Project(ctx); p != "" {
		return p
	}
	return "default"
}

// told is get for calls that may answer what is recorded: with durability store not before what the last host recorded is in the store, which
// may have been out of reach when this one began.
func (h *Host) told(ctx context.Context, ref string) (*box, error) {
	b, err := h.get(ctx, ref)
	if err != nil || b.spec.Durability != sandbox.DurabilityStore || !h.unshipped.Load() {
		return b, err
	}
	if err := b.ship(); err != nil {
		return nil, fmt.Errorf("sandbox %s: what the last host recorded of it: %w", b.id, err)
	}
	h.unshipped.Store(false)
	return b, nil
}

// get resolves an ID, or the name of a sandbox that has not ended, in the caller's project.
func (h *Host) get(ctx context.Context, ref string) (*box, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	p := project(ctx)
	h.mu.Lock()
	b := h.boxes[sandbox.ID(ref)]
	if b == nil {
		b = h.names[scoped{p, ref}]
	}
	var away *passage
	if b == nil {
		away = h.passedID(sandbox.ID(ref))
	}
	h.mu.Unlock()
	if away != nil && away.traj().Project == p {
		return nil, away.elsewhere(sandbox.ID(ref))
	}
	if b == nil || b.spec.Project != p {
		if ref == "" {
			return nil, fmt.Errorf("sandbox: give its id or name: %w", sandbox.ErrInvalid)
		}
		return nil, fmt.Errorf("sandbox %.60q: %w", ref, sandbox.ErrNotFound)
	}
	return b, nil
}
