package fake

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Op is a point at which the hook is asked.
type Op string

const (
	OpCreate      Op = "create"
	OpCreated     Op = "created" // after the birth, before the answer
	OpRecover     Op = "recover"
	OpSweep       Op = "sweep"
	OpStart       Op = "start"
	OpStarted     Op = "started" // after the command runs, before the answer
	OpStdin       Op = "stdin"
	OpSignal      Op = "signal"
	OpOpenSession Op = "open_session"
	OpFiles       Op = "files"
	OpDial        Op = "dial"
	OpPause       Op = "pause"
	OpResume      Op = "resume"
	OpSnapshot    Op = "snapshot"
	OpDestroy     Op = "destroy"
	OpDeadline    Op = "deadline"
)

// Hook is called before (or at Created and Started after) each operation, without a lock. It may sleep; an error is what the
// operation answers. arg is the command, session or port.
type Hook func(ctx context.Context, op Op, id sandbox.ID, arg string) error

// Options dial a world.
type Options struct {
	Hook Hook
	// Capabilities replaces the default: everything, pause level frozen, networks none and open.
	Capabilities *sandbox.Capabilities
	// Files makes the inner end of a file connection serve; nil refuses. It runs in a goroutine of its own.
	Files func(ctx context.Context, id sandbox.ID, user string, conn io.ReadWriteCloser)
	// Listen serves a connection to a port inside; nil, or false, is a closed port.
	Listen func(id sandbox.ID, port uint16) (net.Conn, bool)
	// Console is what a machine wrote; nil is a sandbox without one.
	Console func(id sandbox.ID) []byte
	// Born is told of each birth before anything happens in the sandbox; nil is told nothing.
	Born func(id sandbox.ID, spec *sandbox.Spec)
	// Snap names the layer that a snapshot makes; nil makes names up.
	Snap func(id sandbox.ID) string
}

// World is what outlives the host daemons.
type World struct {
	opt Options

	mu    sync.Mutex
	gen   int
	boxes map[sandbox.ID]*box
	runs  map[string]int // "<id> <command>" -> how often it really ran
	born  map[sandbox.ID]int
	sent  map[string]int // "<id> <command> <number>" -> how many of the signal it really got
}

// NewWorld returns an empty world.
func NewWorld(opt Options) *World {
	return &World{opt: opt, boxes: map[sandbox.ID]*box{}, runs: map[string]int{}, born: map[sandbox.ID]int{}, sent: map[string]int{}}
}

// Connect fences the backends given before and returns a new one.
func (w *World) Connect() *Backend {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gen++
	for _, x := range w.boxes {
		x.sink = nil
	}
	return &Backend{w: w, gen: w.gen}
}

// Alive lists the sandboxes that exist.
func (w *World) Alive() []sandbox.ID {
	w.mu.Lock()
	defer w.mu.Unlock()
	var ids []sandbox.ID
	for id := range w.boxes {
		ids = append(ids, id)
	}
	return ids
}

// Runs says how often each command really ran, by "<sandbox> <command>".
func (w *World) Runs() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := make(map[string]int, len(w.runs))
	for k, v := range w.runs {
		m[k] = v
	}
	return m
}

// Signals says how many signals each command really got, by "<sandbox> <command> <number>".
func (w *World) Signals() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.sent)
}

// Births says how often each sandbox was born.
func (w *World) Births() map[sandbox.ID]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := make(map[sandbox.ID]int, len(w.born))
	for k, v := range w.born {
		m[k] = v
	}
	return m
}

// KillKeeper loses every sandbox at once, as when the keeper dies: sinks hear of it, later calls answer ErrLost.
func (w *World) KillKeeper() {
	w.mu.Lock()
	var all []*box
	for id, x := range w.boxes {
		x.gone = true
		x.cancel()
		delete(w.boxes, id)
		all = append(all, x)
	}
	w.mu.Unlock()
	for _, x := range all {
		x.post(event{kind: evEnded, cause: sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "keeper_lost"}})
	}
}

// Close ends everything, so that no goroutine is left.
func (w *World) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gen++
	for _, x := range w.boxes {
		x.gone, x.sink = true, nil
		x.cancel()
		if x.timer != nil {
			x.timer.Stop()
		}
	}
}

// End ends one sandbox from within, with a cause.
func (w *World) End(id sandbox.ID, c sandbox.Cause) {
	w.mu.Lock()
	x := w.boxes[id]
	w.mu.Unlock()
	if x != nil {
		x.cancel()
		x.post(event{kind: evEnded, cause: c})
	}
}

// Deny makes a sandbox report a refused call.
func (w *World) Deny(id sandbox.ID, cmd, call string) {
	w.mu.Lock()
	x := w.boxes[id]
	w.mu.Unlock()
	if x != nil {
		x.post(event{kind: evDenied, cmd: cmd, detail: call})
	}
}

// Deadline is what SetDeadline armed last.
func (w *World) Deadline(id sandbox.ID) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x := w.boxes[id]; x != nil {
		return x.deadline
	}
	return time.Time{}
}

// Frozen reports whether a sandbox is paused.
func (w *World) Frozen(id sandbox.ID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	x := w.boxes[id]
	return x != nil && x.thaw != nil
}

func (w *World) hook(ctx context.Context, op Op, id sandbox.ID, arg string) error {
	if w.opt.Hook == nil {
		return nil
	}
	return w.opt.Hook(ctx, op, id, arg)
}

// Backend is one host's connection to a world.
type Backend struct {
	w   *World
	gen int
}

var _ sandbox.Backend = (*Backend)(nil)

func (b *Backend) fenced() error {
	if b.gen != b.w.gen {
		return fmt.Errorf("fake: a newer host took over: %w", sandbox.ErrLost)
	}
	return nil
}

// Capabilities implements [sandbox.Backend].
func (b *Backend) Capabilities() sandbox.Capabilities {
	if c := b.w.opt.Capabilities; c != nil {
		return *c
	}
	return sandbox.Capabilities{
		Backend: "fake", Isolation: "low", PauseLevels: []sandbox.PauseLevel{sandbox.Frozen}, Networks: []string{"none", "open"},
		Snapshot: true, Terminal: true, Sessions: true, Ports: true,
	}
}

// Create implements [sandbox.Backend].
func (b *Backend) Create(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (sandbox.Instance, error) {
	if err := b.w.hook(ctx, OpCreate, id, ""); err != nil {
		return nil, fmt.Errorf("create %s: %w", id, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("create %s: %w", id, err)
	}
	life, cancel := context.WithCancel(context.Background())
	x := &box{w: b.w, id: id, spec: spec, life: life, cancel: cancel, commands: map[string]*command{}, sessions: map[string]*session{}}
	b.w.mu.Lock()
	if err := b.fenced(); err != nil {
		b.w.mu.Unlock()
		cancel()
		return nil, err
	}
	if b.w.boxes[id] != nil {
		b.w.mu.Unlock()
		cancel()
		return nil, fmt.Errorf("create %s: %w", id, sandbox.ErrExists)
	}
	b.w.boxes[id] = x
	b.w.born[id]++
	x.sink, x.gen = sink, b.gen
	if total := spec.Lifetime.Total; total > 0 {
		x.arm(time.Now().Add(total))
	}
	b.w.mu.Unlock()
	if born := b.w.opt.Born; born != nil {
		born(id, spec)
	}
	if err := b.w.hook(ctx, OpCreated, id, ""); err != nil {
		i := &instance{b: b, x: x}
		i.Destroy(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("create %s: %w", id, err)
	}
	return &instance{b: b, x: x}, nil
}

// Recover implements [sandbox.Backend].
func (b *Backend) Recover(ctx context.Context, id sandbox.ID, _ *sandbox.Spec, handle []byte, sink sandbox.Sink) (sandbox.Instance, error) {
	if err := b.w.hook(ctx, OpRecover, id, ""); err != nil {
		return nil, fmt.Errorf("recover %s: %w", id, err)
	}
	var h struct{ ID sandbox.ID }
	if err := json.Unmarshal(handle, &h); err != nil || h.ID != id {
		return nil, fmt.Errorf("recover %s: handle %q: %w", id, handle, sandbox.ErrLost)
	}
	b.w.mu.Lock()
	if err := b.fenced(); err != nil {
		b.w.mu.Unlock()
		return nil, err
	}
	x := b.w.boxes[id]
	if x == nil {
		b.w.mu.Unlock()
		return nil, fmt.Errorf("recover %s: %w", id, sandbox.ErrLost)
	}
	x.sink, x.gen = sink, b.gen
	b.w.mu.Unlock()
	x.deliver()
	return &instance{b: b, x: x}, nil
}

// Holds lists what lives, for a host that asks before it sweeps.
func (b *Backend) Holds(context.Context) ([]sandbox.ID, error) { return b.w.Alive(), nil }

// Sweep implements [sandbox.Backend].
func (b *Backend) Sweep(ctx context.Context, living map[sandbox.ID]bool) error {
	if err := b.w.hook(ctx, OpSweep, "", ""); err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	b.w.mu.Lock()
	defer b.w.mu.Unlock()
	if err := b.fenced(); err != nil {
		return err
	}
	for id, x := range b.w.boxes {
		if !living[id] {
			x.gone = true
			x.cancel()
			delete(b.w.boxes, id)
		}
	}
	return nil
}

type instance struct {
	b *Backend
	x *box
}

var _ sandbox.Instance = (*instance)(nil)

// enter locks the world and checks that the caller may act; the caller unlocks.
func (i *instance) enter(ctx context.Context, op Op, arg string) error {
	if err := i.b.w.hook(ctx, op, i.x.id, arg); err != nil {
		return fmt.Errorf("%s %s %s: %w", op, i.x.id, arg, err)
	}
	i.b.w.mu.Lock()
	err := i.b.fenced()
	if err == nil && i.x.gone {
		err = fmt.Errorf("%s %s: %w", op, i.x.id, sandbox.ErrLost)
	}
	if err != nil {
		i.b.w.mu.Unlock()
	}
	return err
}

func (i *instance) Handle() []byte {
	b, _ := json.Marshal(struct{ ID sandbox.ID }{i.x.id}) // a string always marshals
	return b
}

func (i *instance) Start(ctx context.Context, c *sandbox.Command) error {
	if err := i.enter(ctx, OpStart, c.ID); err != nil {
		return err
	}
	if i.x.commands[c.ID] != nil {
		i.b.w.mu.Unlock()
		return nil
	}
	cmd := newCommand(i.x, c)
	i.x.commands[c.ID] = cmd
	i.b.w.runs[string(i.x.id)+" "+c.ID]++
	i.b.w.mu.Unlock()
	go cmd.run()
	if err := i.b.w.hook(ctx, OpStarted, i.x.id, c.ID); err != nil {
		return fmt.Errorf("start %s: %w", c.ID, err)
	}
	return nil
}

func (i *instance) Known(_ context.Context, cmd string) (bool, error) {
	i.b.w.mu.Lock()
	defer i.b.w.mu.Unlock()
	if err := i.b.fenced(); err != nil {
		return false, err
	}
	if i.x.gone {
		return false, fmt.Errorf("known %s: %w", cmd, sandbox.ErrLost)
	}
	return i.x.commands[cmd] != nil, nil
}

func (i *instance) command(id string) (*command, error) {
	c := i.x.commands[id]
	if c == nil {
		return nil, fmt.Errorf("command %s: %w", id, sandbox.ErrNotFound)
	}
	return c, nil
}

func (i *instance) Stdin(ctx context.Context, id string, offset int64, data []byte, eof bool) (int64, error) {
	if err := i.enter(ctx, OpStdin, id); err != nil {
		return 0, err
	}
	defer i.b.w.mu.Unlock()
	c, err := i.command(id)
	if err != nil {
		return 0, err
	}
	return c.stdin(offset, data, eof)
}

func (i *instance) Signal(ctx context.Context, id string, sig int) error {
	if err := i.enter(ctx, OpSignal, id); err != nil {
		return err
	}
	defer i.b.w.mu.Unlock()
	c, err := i.command(id)
	if err != nil {
		return err
	}
	i.b.w.sent[fmt.Sprint(i.x.id, " ", id, " ", sig)]++
	select {
	case c.signals <- sig:
	default:
	}
	return nil
}

func (i *instance) Resize(ctx context.Context, id string, size sandbox.Size) error {
	if err := i.enter(ctx, OpSignal, id); err != nil {
		return err
	}
	defer i.b.w.mu.Unlock()
	c, err := i.command(id)
	if err == nil && c.req.Terminal == nil {
		err = fmt.Errorf("resize %s: has no terminal: %w", id, sandbox.ErrState)
	}
	if err == nil {
		c.size = size
	}
	return err
}

func (i *instance) OpenSession(ctx context.Context, s *sandbox.Session) error {
	if err := i.enter(ctx, OpOpenSession, s.Name); err != nil {
		return err
	}
	defer i.b.w.mu.Unlock()
	if i.x.sessions[s.Name] == nil {
		i.x.sessions[s.Name] = &session{cwd: s.Cwd}
	}
	return nil
}

func (i *instance) CloseSession(ctx context.Context, name string) error {
	if err := i.enter(ctx, OpOpenSession, name); err != nil {
		return err
	}
	defer i.b.w.mu.Unlock()
	if i.x.sessions[name] == nil {
		return fmt.Errorf("session %s: %w", name, sandbox.ErrNotFound)
	}
	delete(i.x.sessions, name)
	i.x.postLocked(event{kind: evSession, cmd: name, outcome: sandbox.Outcome{Kind: sandbox.Killed, Ended: time.Now()}})
	return nil
}

func (i *instance) Files(ctx context.Context, user string) (io.ReadWriteCloser, error) {
	if err := i.enter(ctx, OpFiles, user); err != nil {
		return nil, err
	}
	life := i.x.life
	i.b.w.mu.Unlock()
	if i.b.w.opt.Files == nil {
		return nil, fmt.Errorf("files of %s: %w", i.x.id, sandbox.ErrUnsupported)
	}
	ours, theirs := net.Pipe()
	go func() {
		stop := context.AfterFunc(life, func() { theirs.Close() })
		defer stop()
		i.b.w.opt.Files(life, i.x.id, user, theirs)
		theirs.Close()
	}()
	return ours, nil
}

// Console implements sandbox.Consoled.
func (i *instance) Console(context.Context) ([]byte, error) {
	if i.b.w.opt.Console == nil {
		return nil, fmt.Errorf("console of %s: %w", i.x.id, sandbox.ErrUnsupported)
	}
	return i.b.w.opt.Console(i.x.id), nil
}

func (i *instance) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	if err := i.enter(ctx, OpDial, fmt.Sprint(port)); err != nil {
		return nil, err
	}
	i.b.w.mu.Unlock()
	if i.b.w.opt.Listen != nil {
		if c, ok := i.b.w.opt.Listen(i.x.id, port); ok {
			return c, nil
		}
	}
	return nil, fmt.Errorf("dial port %d of %s: nobody listens: %w", port, i.x.id, sandbox.ErrNotFound)
}

func (i *instance) Pause(ctx context.Context, level sandbox.PauseLevel) error {
	if err := i.enter(ctx, OpPause, string(level)); err != nil {
		return err
	}
	defer i.b.w.mu.Unlock()
	if i.x.thaw == nil {
		i.x.thaw = make(chan struct{})
	}
	return nil
}

func (i *instance) Resume(ctx context.Context) error {
	if err := i.enter(ctx, OpResume, ""); err != nil {
		return err
	}
	defer i.b.w.mu.Unlock()
	if i.x.thaw != nil {
		close(i.x.thaw)
		i.x.thaw = nil
	}
	return nil
}

func (i *instance) SetDeadline(ctx context.Context, at time.Time) error {
	if err := i.enter(ctx, OpDeadline, at.String()); err != nil {
		return err
	}
	defer i.b.w.mu.Unlock()
	i.x.arm(at)
	return nil
}

// arm sets the deadline; World.mu is held.
func (x *box) arm(at time.Time) {
	x.deadline = at
	if x.timer != nil {
		x.timer.Stop()
	}
	if !at.IsZero() {
		x.timer = time.AfterFunc(time.Until(at), func() {
			x.cancel()
			x.post(event{kind: evEnded, cause: sandbox.Cause{Class: sandbox.ClassLimit, Reason: "total"}})
		})
	}
}

func (i *instance) Stats(context.Context) (sandbox.Stats, error) {
	i.b.w.mu.Lock()
	defer i.b.w.mu.Unlock()
	if i.x.gone {
		return sandbox.Stats{}, fmt.Errorf("stats %s: %w", i.x.id, sandbox.ErrLost)
	}
	return sandbox.Stats{Memory: 1 << 20, MemoryPeak: -1, Pids: int64(len(i.x.commands)), Disk: -1}, nil
}

func (i *instance) Snapshot(ctx context.Context) (string, error) {
	if err := i.enter(ctx, OpSnapshot, ""); err != nil {
		return "", err
	}
	defer i.b.w.mu.Unlock()
	if snap := i.b.w.opt.Snap; snap != nil {
		return snap(i.x.id), nil
	}
	return fmt.Sprintf("sha256:%064x", len(i.x.commands)), nil
}

func (i *instance) Destroy(ctx context.Context) error {
	if err := i.b.w.hook(ctx, OpDestroy, i.x.id, ""); err != nil {
		return fmt.Errorf("destroy %s: %w", i.x.id, err)
	}
	i.b.w.mu.Lock()
	defer i.b.w.mu.Unlock()
	if err := i.b.fenced(); err != nil {
		return err
	}
	i.x.gone, i.x.sink = true, nil
	i.x.cancel()
	if i.x.timer != nil {
		i.x.timer.Stop()
	}
	if i.b.w.boxes[i.x.id] == i.x {
		delete(i.b.w.boxes, i.x.id)
	}
	return nil
}
