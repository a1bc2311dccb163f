package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/mux"
	"github.com/dsec-dev/dsec/internal/guest/vmwire"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// state is how far a sandbox is.
type state int

const (
	creating state = iota
	living
	undone    // its create failed
	dead      // its machine or its sandbox ended
	destroyed // or on its way
)

// instance is a sandbox with a machine.
type instance struct {
	b        *Backend
	id       sandbox.ID
	spec     *sandbox.Spec
	sink     sandbox.Sink
	h        handle
	handle   []byte
	undo     undoing
	turn     chan struct{} // pause, resume and snapshot, one at a time
	life     context.Context
	cancel   context.CancelFunc
	serving  sync.WaitGroup
	deadline time.Time
	vm       vmm.VM

	mu      sync.Mutex
	state   state
	told    bool          // the end was told, or is being told
	link    *link         // nil while there is none
	changed chan struct{} // closed and replaced when link or state changes
	frozen  bool
	saved   bool          // its machine is a file
	saving  bool          // its monitor ends because we say so
	stats   sandbox.Stats // the last that were told
	began   map[string]time.Time
	budgets map[string]*budget
	ends    map[string]sandbox.Outcome
}

var _ sandbox.Instance = (*instance)(nil)

var totalCause = sandbox.Cause{Class: sandbox.ClassLimit, Reason: "total"}

func newInstance(b *Backend, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) *instance {
	x := &instance{b: b, id: id, spec: spec, sink: sink, h: handle{Slot: -1}, undo: newUndoing(), turn: make(chan struct{}, 1), changed: make(chan struct{}),
		began: map[string]time.Time{}, budgets: map[string]*budget{}}
	x.life, x.cancel = context.WithCancel(b.life)
	return x
}

// name is the machine's: of its monitor, its folder and its disk.
func (x *instance) name() string {
	if x.h.Machine != "" {
		return x.h.Machine
	}
	return string(x.id)
}

// inside is what the guest calls the sandbox.
func (x *instance) inside() sandbox.ID {
	if x.h.Inside != "" {
		return x.h.Inside
	}
	return x.id
}

// Notes are what the sandbox has otherwise than asked, for its client.
func (x *instance) Notes() map[string]string {
	f := x.b.driver.Features()
	n := map[string]string{"driver": f.Driver + " " + f.Version, "accelerator": string(f.Accelerator)}
	if f.Degraded {
		n["degraded"] = degradedWhy(f)
	}
	return n
}

// Ends are how the commands ended that Destroy found running.
func (x *instance) Ends() map[string]sandbox.Outcome {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.ends
}

func (x *instance) setState(s state) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.state != destroyed {
		x.state = s
	}
	x.ringLocked()
}

func (x *instance) ringLocked() {
	close(x.changed)
	x.changed = make(chan struct{})
}

func (x *instance) isLiving() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.state == living
}

func (x *instance) isFrozen() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.frozen
}

func (x *instance) setFrozen(on bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.frozen = on
	x.ringLocked()
}

func (x *instance) setLink(l *link) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.link = l
	x.ringLocked()
}

// greet finds the guest of a machine that boots.
func (x *instance) greet(ctx context.Context) error {
	l, err := dialGuest(ctx, x.vm)
	if err != nil {
		return err
	}
	if _, err := l.greet(ctx); err != nil {
		l.close()
		return err
	}
	if err := l.renew(ctx, true); err != nil {
		l.close()
		return err
	}
	x.setLink(l)
	return nil
}

// unlink ends a conversation that has none at its other end any more.
func (x *instance) unlink() {
	x.mu.Lock()
	l := x.link
	x.link = nil
	x.ringLocked()
	x.mu.Unlock()
	l.close()
}

// serve keeps the conversation with the guest until the sandbox is destroyed or the backend ends.
func (x *instance) serve() {
	x.b.work.Add(1)
	x.serving.Add(1)
	go func() {
		defer x.b.work.Done()
		defer x.serving.Done()
		if x.h.Own {
			x.watchOwn(x.life)
		} else {
			x.keepLinked(x.life)
		}
		x.mu.Lock()
		l := x.link
		x.link = nil
		x.mu.Unlock()
		l.close()
		if x.vm != nil {
			x.vm.Release()
		}
	}()
}

func (x *instance) keepLinked(ctx context.Context) {
	for ctx.Err() == nil {
		x.mu.Lock()
		l, changed, frozen, s := x.link, x.changed, x.frozen, x.state
		x.mu.Unlock()
		if s == dead || s == destroyed {
			return
		}
		if l != nil {
			select {
			case <-l.done():
				x.b.log.Warn("conversation with a guest lost", "sandbox", x.id, "err", l.session.Err())
				l.close()
				x.mu.Lock()
				if x.link == l {
					x.link = nil
				}
				x.mu.Unlock()
			case <-changed:
			case <-x.vm.Over():
				if x.machineOver(ctx) {
					return
				}
			case <-ctx.Done():
			}
			continue
		}
		if frozen { // a guest that stands still can't answer
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		if err := x.relink(ctx); err != nil && ctx.Err() == nil {
			if x.machineOver(ctx) {
				return
			}
			x.b.log.Error("reach a guest, will try again", "sandbox", x.id, "err", err)
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
		}
	}
}

// relink finds a guest again whose sandbox lives.
func (x *instance) relink(ctx context.Context) error {
	l, err := dialGuest(ctx, x.vm)
	if err != nil {
		return err
	}
	born, err := l.greet(ctx)
	if err == nil && born != string(x.inside()) {
		err = fmt.Errorf("its guest has the sandbox %.60q: %w", born, sandbox.ErrLost)
	}
	if err == nil {
		err = l.openKeeper(ctx, x)
	}
	if err != nil {
		l.close()
		return err
	}
	x.setLink(l)
	return nil
}

// machineOver looks whether the guest ended by itself: it crashed, or process 1 gave up.
func (x *instance) machineOver(ctx context.Context) bool {
	s, err := x.vm.Status(ctx)
	if err != nil {
		if ctx.Err() != nil || x.isSaved() || x.isSaving() {
			return false
		}
		a, e := x.b.monitor(ctx, x.name())
		switch {
		case e != nil:
			return false
		case a == nil:
			a = &warden.Alive{Why: "it is gone, and nobody knows how"}
		case !a.Ended:
			return false
		}
		x.monitorEnded(*a)
		return true
	}
	if s == "running" || s == "paused" {
		return false
	}
	c := sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "guest_ended", Detail: "the machine " + s + ": " + consoleTail(ctx, x.vm)}
	if x.h.Own {
		c = ownEnd(s, consoleTail(ctx, x.vm))
	}
	x.ended(c)
	return true
}

// monitorEnded is told by the warden.
func (x *instance) monitorEnded(a warden.Alive) {
	if !x.isLiving() || x.isSaved() || x.isSaving() {
		return
	}
	c := sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "monitor_ended", Detail: cut("the machine's monitor: "+a.Why+" "+a.Said, maxDetail)}
	if a.Why == "deadline" {
		c = totalCause
	}
	x.ended(c)
}

// tell reports whether the caller is the one to tell the sink of the end; toldEnd follows.
func (x *instance) tell() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.told || x.state == destroyed {
		return false
	}
	x.told = true
	return true
}

func (x *instance) toldEnd(taken bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.told = taken
	if taken {
		x.dieLocked()
	}
}

func (x *instance) dieLocked() {
	if x.state == living {
		x.state = dead
	}
	x.ringLocked()
}

// ended tells the sink of an end that no guest tells, until it is taken. The machine is gone: no call is made to it any more.
func (x *instance) ended(c sandbox.Cause) {
	if !x.tell() {
		return
	}
	x.mu.Lock()
	x.dieLocked()
	x.mu.Unlock()
	x.b.work.Add(1)
	go func() {
		defer x.b.work.Done()
		for pause := 20 * time.Millisecond; x.sink.Ended(x.life, c) != nil; pause = min(2*pause, 5*time.Second) {
			select {
			case <-x.life.Done():
				return
			case <-time.After(pause):
			}
		}
	}()
}

// distrust ends a sandbox whose guest broke the protocol.
func (x *instance) distrust(err error) {
	x.b.log.Error("a guest broke the protocol", "sandbox", x.id, "err", err)
	x.ended(sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "guest_broke_protocol", Detail: cut(err.Error(), maxDetail)})
	go x.b.warden.Kill(context.WithoutCancel(x.life), x.name())
}

// use is the conversation for a call to the living sandbox; it waits for one.
func (x *instance) use(ctx context.Context, act string) (*link, error) {
	for {
		x.mu.Lock()
		l, s, changed, frozen := x.link, x.state, x.changed, x.frozen
		x.mu.Unlock()
		switch {
		case s == destroyed || s == undone:
			return nil, fmt.Errorf("%s in %s: it was destroyed: %w", act, x.id, sandbox.ErrNotFound)
		case s == dead && l == nil:
			return nil, fmt.Errorf("%s in %s: it has ended: %w", act, x.id, sandbox.ErrState)
		case x.h.Own:
			return nil, x.noGuest(act)
		case frozen:
			return nil, fmt.Errorf("%s in %s: it is frozen: %w", act, x.id, sandbox.ErrState)
		case l != nil && l.keeper != nil:
			return l, nil
		}
		select {
		case <-changed:
		case <-x.life.Done():
			return nil, fmt.Errorf("%s in %s: the backend ends: %w", act, x.id, sandbox.ErrLost)
		case <-ctx.Done():
			return nil, fmt.Errorf("%s in %s: its guest does not answer: %w", act, x.id, ctx.Err())
		}
	}
}

func (x *instance) said(act string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s in %s: %w", act, x.id, err)
}

func (x *instance) Handle() []byte { return x.handle }

func (x *instance) Start(ctx context.Context, cmd *sandbox.Command) error {
	l, err := x.use(ctx, "start "+cmd.ID)
	if err != nil {
		return err
	}
	x.mu.Lock()
	if _, ok := x.budgets[cmd.ID]; !ok {
		x.budgets[cmd.ID] = newBudget(max(cmd.OutputCap, 1<<16))
		x.began[cmd.ID] = time.Now()
	}
	x.mu.Unlock()
	c := *cmd
	c.ID = x.h.Mark + cmd.ID
	return x.said("start "+cmd.ID, l.keeper.Start(ctx, x.inside(), &c))
}

func (x *instance) Known(ctx context.Context, cmd string) (bool, error) {
	if x.h.Own {
		return false, nil // nothing is ever started
	}
	l, err := x.use(ctx, "look up "+cmd)
	if err != nil {
		return false, err
	}
	known, err := l.keeper.Known(ctx, x.inside(), x.h.Mark+cmd)
	return known, x.said("look up "+cmd, err)
}

func (x *instance) Stdin(ctx context.Context, cmd string, offset int64, data []byte, eof bool) (int64, error) {
	l, err := x.use(ctx, "write stdin of "+cmd)
	if err != nil {
		return offset, err
	}
	taken, err := l.keeper.Stdin(ctx, x.inside(), x.h.Mark+cmd, offset, data, eof)
	if taken > offset+int64(len(data)) || taken < 0 {
		taken = offset + int64(len(data)) // more than was given, says a hostile guest
	}
	return taken, x.said("write stdin of "+cmd, err)
}

func (x *instance) Signal(ctx context.Context, cmd string, sig int) error {
	l, err := x.use(ctx, "signal "+cmd)
	if err != nil {
		return err
	}
	return x.said("signal "+cmd, l.keeper.Signal(ctx, x.inside(), x.h.Mark+cmd, sig))
}

func (x *instance) Resize(ctx context.Context, cmd string, size sandbox.Size) error {
	l, err := x.use(ctx, "resize "+cmd)
	if err != nil {
		return err
	}
	return x.said("resize "+cmd, l.keeper.Resize(ctx, x.inside(), x.h.Mark+cmd, size))
}

func (x *instance) OpenSession(ctx context.Context, s *sandbox.Session) error {
	l, err := x.use(ctx, "open session "+s.Name)
	if err != nil {
		return err
	}
	return x.said("open session "+s.Name, l.keeper.OpenSession(ctx, x.inside(), s))
}

func (x *instance) CloseSession(ctx context.Context, name string) error {
	l, err := x.use(ctx, "close session "+name)
	if err != nil {
		return err
	}
	return x.said("close session "+name, l.keeper.CloseSession(ctx, x.inside(), name))
}

func (x *instance) Files(ctx context.Context, user string) (io.ReadWriteCloser, error) {
	l, err := x.use(ctx, "open files")
	if err != nil {
		return nil, err
	}
	if user == "" {
		user = x.spec.User
	}
	c, err := l.keeper.Files(ctx, x.inside(), user)
	if err != nil {
		return nil, x.said("open files", err)
	}
	return c, nil
}

func (x *instance) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, fmt.Errorf("dial port 0 in %s: want 1 to 65535: %w", x.id, sandbox.ErrInvalid)
	}
	l, err := x.use(ctx, "dial")
	if err != nil {
		return nil, err
	}
	c, err := l.connect(ctx, &vmwire.Request{Op: vmwire.OpDial, Port: port})
	if errors.Is(err, mux.ErrRefused) {
		err = fmt.Errorf("port %d: nothing listens on 127.0.0.1 or ::1: %w", port, sandbox.ErrNotFound)
	}
	if err != nil {
		return nil, x.said("dial", err)
	}
	return c, nil
}

// take waits for the turn.
func (x *instance) take(ctx context.Context) error {
	select {
	case x.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Pause stops the sandbox's processes and their clocks in the guest, then the machine.
func (x *instance) Pause(ctx context.Context, level sandbox.PauseLevel) error {
	if level != sandbox.Frozen && level != sandbox.Saved {
		return fmt.Errorf("pause %s to level %q: this backend has %s and %s: %w", x.id, level, sandbox.Frozen, sandbox.Saved, sandbox.ErrUnsupported)
	}
	if !slices.Contains(x.b.pauseLevels(), level) {
		return fmt.Errorf("pause %s to level %q: %s: %w", x.id, level, x.b.driver.Features().Why["pause"], sandbox.ErrUnsupported)
	}
	if level == sandbox.Saved && x.h.Lent != nil {
		return fmt.Errorf("pause %s to level %q: its network is open, and goes with the machine: %w", x.id, level, sandbox.ErrUnsupported)
	}
	if err := x.take(ctx); err != nil {
		return x.said("pause", err)
	}
	defer func() { <-x.turn }()
	if !x.isFrozen() {
		if err := x.freeze(ctx); err != nil {
			return err
		}
	}
	if level == sandbox.Saved && !x.isSaved() {
		return x.said("pause", x.save(ctx))
	}
	return nil
}

// freeze stops the sandbox and its machine. The caller has the turn.
func (x *instance) freeze(ctx context.Context) error {
	if x.h.Own {
		return x.said("pause", x.freezeOwn(ctx))
	}
	l, err := x.use(ctx, "pause")
	if err != nil {
		return err
	}
	if s, err := l.keeper.Stats(ctx, x.inside()); err == nil {
		x.noteStats(s)
	}
	if err := l.keeper.Freeze(ctx, x.inside()); err != nil {
		return x.said("pause", err)
	}
	x.setFrozen(true)
	if err := x.vm.Pause(ctx); err != nil {
		x.setFrozen(false)
		return x.said("pause", errors.Join(err, l.keeper.Thaw(context.WithoutCancel(ctx), x.inside())))
	}
	// The guest's own clock stands still: from now on the warden alone holds the deadline.
	return x.armWarden(ctx, 0)
}

// Resume starts the machine, sets its clock and only then lets its processes go on.
func (x *instance) Resume(ctx context.Context) error {
	if err := x.take(ctx); err != nil {
		return x.said("resume", err)
	}
	defer func() { <-x.turn }()
	x.mu.Lock()
	s, frozen := x.state, x.frozen
	x.mu.Unlock()
	if s != living {
		return fmt.Errorf("resume %s: it has ended: %w", x.id, sandbox.ErrState)
	}
	if !frozen {
		return nil
	}
	if x.isSaved() {
		if err := x.load(ctx); err != nil {
			return x.said("resume", err)
		}
	}
	if err := x.vm.Resume(ctx); err != nil {
		return x.said("resume", err)
	}
	x.setFrozen(false)
	if err := x.wake(ctx); err != nil {
		x.setFrozen(true) // its workload is, so the next resume tries again
		return err
	}
	return nil
}

// wake thaws the workload of a machine that runs again, once it is told what changed meanwhile.
func (x *instance) wake(ctx context.Context) error {
	if x.h.Own {
		return x.said("resume", x.armWarden(ctx, 0))
	}
	l, err := x.use(ctx, "resume")
	if err != nil {
		return err
	}
	if err := l.renew(ctx, false); err != nil {
		return x.said("resume", err)
	}
	if err := l.keeper.Thaw(ctx, x.inside()); err != nil {
		return x.said("resume", err)
	}
	return x.arm(ctx, l)
}

func (x *instance) armWarden(ctx context.Context, grace time.Duration) error {
	x.mu.Lock()
	at := x.deadline
	x.mu.Unlock()
	if !at.IsZero() {
		at = at.Add(grace)
	}
	return x.b.warden.SetDeadline(ctx, x.name(), at)
}

// arm sets the deadline in the guest, which tells how commands ended, and later in the warden, which holds in any case.
func (x *instance) arm(ctx context.Context, l *link) error {
	if err := x.armWarden(ctx, deadlineGrace); err != nil {
		return x.said("set deadline", err)
	}
	x.mu.Lock()
	at := x.deadline
	x.mu.Unlock()
	return x.said("set deadline", l.keeper.SetDeadline(ctx, x.inside(), keeper.DeadlineTotal, at, totalCause))
}

func (x *instance) SetDeadline(ctx context.Context, at time.Time) error {
	x.mu.Lock()
	x.deadline = at
	frozen, saved := x.frozen && x.state == living, x.saved
	x.mu.Unlock()
	if saved {
		return nil // no monitor lives; the host ends it when its time is over
	}
	if frozen || x.h.Own {
		return x.said("set deadline", x.armWarden(ctx, 0))
	}
	l, err := x.use(ctx, "set deadline")
	if err != nil {
		return err
	}
	return x.arm(ctx, l)
}

// noteStats keeps figures for a sandbox that can't be asked.
func (x *instance) noteStats(s sandbox.Stats) sandbox.Stats {
	s.Memory = min(max(s.Memory, 0), sandbox.MaxMemory)
	if s.MemoryPeak < -1 || s.MemoryPeak > sandbox.MaxMemory {
		s.MemoryPeak = -1
	}
	s.CPU, s.Pids, s.OOMKills = max(s.CPU, 0), min(max(s.Pids, 0), sandbox.MaxPids), max(s.OOMKills, 0)
	x.mu.Lock()
	x.stats = s
	x.mu.Unlock()
	return s
}

func (x *instance) Stats(ctx context.Context) (sandbox.Stats, error) {
	var s sandbox.Stats
	if x.h.Own {
		s = x.ownStats()
	} else if x.isFrozen() {
		x.mu.Lock()
		s = x.stats
		x.mu.Unlock()
	} else {
		l, err := x.use(ctx, "stats")
		if err != nil {
			return s, err
		}
		if s, err = l.keeper.Stats(ctx, x.inside()); err != nil {
			return s, x.said("stats", err)
		}
		s = x.noteStats(s)
	}
	s.HostMemory = x.hostMemory()
	var err error
	s.Disk, err = x.b.disks.usage(x.name())
	return s, x.said("disk use", err)
}

// diskFull asks the guest for room when the disk's file on the host says that it may have none: what the guest still holds in memory is not
// in the file yet.
func (x *instance) diskFull(ctx context.Context) bool {
	used, err := x.b.disks.usage(x.name())
	if err != nil || used < x.h.Disk-x.h.Memory/2 {
		return false
	}
	x.mu.Lock()
	l := x.link
	x.mu.Unlock()
	if l == nil {
		return false
	}
	a, err := l.call(ctx, &vmwire.Request{Op: vmwire.OpSpace}, nil)
	return err == nil && a.Free < min(1<<20, x.h.Disk/16)
}

// endMachine ends the machine; a living guest is asked before how its commands end.
func (x *instance) endMachine(ctx context.Context) error {
	x.mu.Lock()
	l, frozen, running := x.link, x.frozen, len(x.began)
	x.mu.Unlock()
	if l != nil && l.keeper != nil && !frozen && running > 0 {
		bound, cancel := context.WithTimeout(ctx, 2*time.Second)
		ends, err := l.keeper.DestroyTelling(bound, x.inside())
		cancel()
		if err == nil {
			x.mu.Lock()
			x.ends = map[string]sandbox.Outcome{}
			for _, e := range ends {
				if cmd, ok := x.mineSince(e.Command); ok && len(x.ends) < maxRunning {
					x.ends[cmd] = checkOutcome(e.Outcome, x.began[cmd], time.Now())
				}
			}
			x.mu.Unlock()
		}
	}
	x.cancel()
	x.serving.Wait()
	var err error
	if x.vm != nil {
		err = x.vm.Kill(ctx)
	} else if err = x.b.warden.Kill(ctx, x.name()); err == nil {
		err = x.b.warden.Forget(ctx, x.name())
	}
	if errors.Is(err, sandbox.ErrLost) {
		// Its monitors died with the warden; what is left are cgroups, which the next one removes at its start.
		err = x.b.warden.Sweep(ctx, x.b.cfg.Instance)
	}
	return err
}

// Destroy runs what undoes the sandbox. Callers that come while one is at it wait for it; one that failed goes on where it stopped.
func (x *instance) Destroy(ctx context.Context) error {
	x.mu.Lock()
	x.state = destroyed
	x.ringLocked()
	x.mu.Unlock()
	done := make(chan error, 1)
	go func() { done <- x.undo.run(ctx) }()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("destroy %s: %w", x.id, err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("destroy %s: it goes on: %w", x.id, ctx.Err())
	}
}
