package keeper

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/wire"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

const (
	birthBound   = 20 * time.Second // from the clone to HELLO
	destroyBound = 30 * time.Second
	freezeBound  = 5 * time.Second
	tellBound    = 10 * time.Second // for process 1 to take a frame
	maxCommands  = 4096             // remembered with something left to do
)

// box is a sandbox.
type box struct {
	k     *Keeper
	id    sandbox.ID
	birth Birth
	born  Born
	ctl   *wire.Conn // to process 1
	pid   int        // of process 1, our child until gone is closed
	netns *netns
	lent  bool          // the host was given the network namespace: something of it may live on
	inner bool          // its kernel is its own: process 1 makes the groups of commands, and no descriptor comes out
	gone  chan struct{} // closed when process 1 is reaped and nothing of the sandbox runs

	settled chan struct{}      // closed when create has returned, or has undone what it did
	abort   context.CancelFunc // ends a birth under way

	mu        sync.Mutex
	grp       *group // of its berth, once it has one
	nextNum   uint64
	byNum     map[uint64]*command
	cmds      map[string]*command
	known     map[[16]byte]struct{}  // every command ever started
	lastGroup int                    // number of the group that process 1 was last told to make
	asked     map[uint64]chan uint32 // GROUP frames that are not answered
	dirty     []*command             // may have something to send
	sessions  map[string]*session
	endings   []*ending // of sessions, in order
	denials   denials
	frozen    bool
	ready     bool           // born
	dead      bool           // process 1 has ended
	killed    *sandbox.Cause // why we killed it
	swept     bool           // everything in it was killed, once: the kernel kills also what is being born meanwhile
	cause     *sandbox.Cause // set at the end
	causeOut  outState
	timers    map[DeadlineKind]*time.Timer
	removed   bool      // Destroy has begun: nothing is sent any more
	used      Destroyed // what Destroy tells of use, once nothing runs
	wait      sync.WaitGroup
}

// outState is how far an event has come.
type outState uint8

const (
	outNone outState = iota
	outPending
	outSent
	outTaken
)

// create makes a sandbox. It owns parent.
func (k *Keeper) create(ctx context.Context, birth *Birth, parent int) (*Born, error) {
	if err := checkBirth(birth); err != nil {
		unix.Close(parent)
		return nil, err
	}
	if birth.Caps == 0 {
		birth.Caps = DefaultCaps
	}
	class := classLS
	if birth.BestEffort {
		class = classBE
	}
	b := &box{k: k, id: birth.ID, birth: *birth, gone: make(chan struct{}), settled: make(chan struct{}), byNum: map[uint64]*command{}, cmds: map[string]*command{},
		known: map[[16]byte]struct{}{}, sessions: map[string]*session{}, timers: map[DeadlineKind]*time.Timer{}, nextNum: 1,
		grp: &group{g: k.cg, class: class, id: string(birth.ID), files: k.recent.files()}}
	b.birth.Seccomp, b.birth.Events = nil, nil
	if birth.Runtime != nil {
		b.inner = birth.Runtime.Kind == RuntimeRunsc
		b.birth.Runtime = &Runtime{Kind: birth.Runtime.Kind, Program: birth.Runtime.Program}
	}
	ctx, b.abort = context.WithCancel(ctx)
	defer b.abort()
	defer close(b.settled)
	k.mu.Lock()
	if k.boxes[b.id] != nil {
		k.mu.Unlock()
		unix.Close(parent)
		return nil, fmt.Errorf("create %s: %w", b.id, sandbox.ErrExists)
	}
	k.boxes[b.id] = b
	k.mu.Unlock()
	// From here on only this goroutine touches the birth; a Destroy aborts it and waits.
	if err := b.bear(ctx, birth, parent); err != nil {
		// The undo has a bound of its own: the context may have ended.
		undo, cancel := context.WithTimeout(context.Background(), destroyBound)
		defer cancel()
		if e := k.remove(undo, b); e != nil {
			err = fmt.Errorf("%w; and its undo: %w", err, e)
		}
		return nil, fmt.Errorf("create %s: %w", b.id, err)
	}
	born := b.born
	return &born, nil
}

// bear does a birth: groups, process 1 in new namespaces, mounts, and the word from process 1 that it is ready. What it made before
// an error is removed by destroy.
func (b *box) bear(ctx context.Context, birth *Birth, parent int) (err error) {
	k := b.k
	sl, err := k.slots.get(birth.UIDBase)
	if err != nil {
		unix.Close(parent)
		return err
	}
	if birth.Runtime != nil {
		b.grp.owner, b.grp.res = int(birth.UIDBase)+idsPerSandbox, hostLimits(birth)
		if err = b.grp.make(); err == nil {
			err = errors.Join(b.grp.settle(), b.grp.delegate())
		}
		if err != nil {
			unix.Close(parent)
			return err
		}
		return b.bearByRuntime(ctx, birth, sl, parent)
	}
	bt, again, err := k.takeBerth(ctx, b.grp.class)
	if err != nil {
		unix.Close(parent)
		return err
	}
	defer again()
	bt.grp.owner, bt.grp.res = int(birth.UIDBase)+idsPerSandbox, birth.Resources
	b.mu.Lock()
	b.grp, b.ctl, b.pid, b.netns = bt.grp, bt.ctl, bt.pid, bt.netns
	b.mu.Unlock()
	b.wait.Add(1)
	r, err := k.compose(birth, sl, parent)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil || k.overlayByPath {
			k.discard(r.fds())
		} else {
			closeAll(r.fds()) // all were attached
		}
	}()
	b.born = Born{Pid: b.pid, Mapping: r.mapping, Shm: r.shmKind, ProcessU: birth.UIDBase + idsPerSandbox, Laid: r.laid, Group: b.grp.v2()}
	if err := b.sendBirth(birth, r, sl); err != nil {
		return err
	}
	if err := b.grp.settle(); err != nil { // while process 1 is at it; nothing of the sandbox runs before its word
		return err
	}
	if err := b.awaitReady(ctx); err != nil {
		return err
	}
	return b.grp.delegate()
}

func (b *box) sendBirth(birth *Birth, r *root, sl slot) error {
	o := &ops{}
	defer o.close()
	if !b.k.overlayByPath {
		o.fd("drop", r.parent)
	}
	o.fd("root", r.overlay)
	for _, d := range []string{"/dev", "/sys", "/proc"} {
		o.do("shift", d)
	}
	o.fd("move", r.shm, "/dev/shm")
	o.do("devpts", "/dev/pts", strconv.Itoa(int(birth.UIDBase)+5))
	for i, v := range birth.Volumes {
		o.fd("move", r.volumes[i], v.Path)
	}
	o.do("enter")
	o.do("hostname", birth.Hostname)
	if len(birth.Events) > 0 {
		fd, err := b.k.eventsFile(birth.Events)
		if err != nil {
			return err
		}
		o.fd("events", fd)
	}
	o.fd("userns", sl.user)
	return b.tellBirth(birth, birth.UIDBase+idsPerSandbox, o.list, o.fds)
}

func (b *box) tellBirth(birth *Birth, uid uint32, ops []string, fds []int) error {
	m := wire.Birth{UID: uid, Ops: ops, Filter: birth.Seccomp, Caps: birth.Caps, Env: birth.Env, Rlimits: b.k.rlimits()}
	if birth.NoNewPrivs {
		m.Flags |= wire.BirthNoNewPrivs
	}
	if err := b.ctl.SetDeadline(time.Now().Add(birthBound)); err != nil {
		return err
	}
	if err := b.ctl.Send(wire.TBirth, 0, m, fds...); err != nil {
		return fmt.Errorf("send birth: %w", err)
	}
	return nil
}

func (k *Keeper) rlimits() []wire.Rlimit {
	var files unix.Rlimit
	soft := uint64(1024)
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &files) == nil {
		soft = min(65536, files.Max)
	}
	return []wire.Rlimit{{Resource: unix.RLIMIT_CORE}, {Resource: unix.RLIMIT_NOFILE, Soft: soft, Hard: soft}}
}

// awaitReady waits for HELLO, then hands the stream to control.
func (b *box) awaitReady(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { b.ctl.SetDeadline(time.Unix(1, 0)) })
	f, err := b.ctl.ReadFrame()
	if err == nil && f.Type == wire.TListener && len(f.FDs) == 1 {
		if err = b.k.watcher.add(b, f.FDs[0]); err == nil {
			f, err = b.ctl.ReadFrame()
		}
	}
	if !stop() {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("birth: process 1 said nothing: %w", err)
	}
	f.CloseFDs()
	switch f.Type {
	case wire.THello:
		h, err := wire.DecodeHello(f.Body)
		if err != nil || h.Version != wire.Version {
			return fmt.Errorf("birth: process 1 speaks version %d: %w", h.Version, errors.Join(err, sandbox.ErrUnsupported))
		}
	case wire.TFailed:
		m, err := wire.DecodeFailed(f.Body)
		if err != nil {
			return fmt.Errorf("birth: %w", err)
		}
		return fmt.Errorf("birth: %q: %w", m.Text, syscall.Errno(m.Errno))
	default:
		return fmt.Errorf("birth: unexpected %s: %w", f.Type, wire.ErrFormat)
	}
	if err := b.ctl.SetDeadline(time.Time{}); err != nil {
		return err
	}
	b.mu.Lock()
	b.ready = true
	b.mu.Unlock()
	go b.control()
	b.setDeadline(DeadlineTotal, b.birth.Deadline, sandbox.Cause{Class: sandbox.ClassLimit, Reason: "total"})
	b.setDeadline(DeadlineLease, b.birth.Lease, sandbox.Cause{Class: sandbox.ClassClient, Reason: "lease"})
	return nil
}

// control reads what process 1 says until it ends, then ends the sandbox.
func (b *box) control() {
	var err error
	for {
		var f wire.Frame
		if f, err = b.ctl.ReadFrame(); err != nil {
			break
		}
		if err = b.guestFrame(f); err != nil {
			break
		}
	}
	b.bury(err)
}

// tell sends process 1 a frame. One that takes nothing for so long is broken, and with it its sandbox: without the bound its
// requests, and a host that comes back, would wait for ever.
func (b *box) tell(t wire.Type, num uint64, m interface{ Append([]byte) []byte }, fds ...int) error {
	return b.tellFrame(wire.Frame{Type: t, ID: num, Body: m.Append(nil), FDs: fds})
}

func (b *box) tellFrame(f wire.Frame) error {
	b.ctl.SetWriteDeadline(time.Now().Add(tellBound))
	err := b.ctl.WriteFrame(f)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		b.finish(sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "process 1 hangs"})
	}
	return err
}

// guestFrame handles one frame of process 1; an error ends the sandbox, since its word can't be trusted any more.
func (b *box) guestFrame(f wire.Frame) error {
	b.k.berths.stir()
	b.mu.Lock()
	c := b.byNum[f.ID]
	b.mu.Unlock()
	if c == nil {
		f.CloseFDs()
		if f.Type == wire.TPong {
			return nil
		}
		if f.Type == wire.TGrouped {
			return b.grouped(f)
		}
		return fmt.Errorf("%s for command %d, which does not run: %w", f.Type, f.ID, wire.ErrFormat)
	}
	switch f.Type {
	case wire.TStarted:
		m, err := wire.DecodeStarted(f.Body)
		if err != nil {
			f.CloseFDs()
			return err
		}
		return c.onStarted(m, f.FDs)
	case wire.TFailed:
		f.CloseFDs()
		m, err := wire.DecodeFailed(f.Body)
		if err != nil {
			return err
		}
		return c.onFailed(m)
	case wire.TExited:
		f.CloseFDs()
		m, err := wire.DecodeExited(f.Body)
		if err != nil {
			return err
		}
		return c.onExited(m, f.Flags&wire.ExitedRefused != 0)
	case wire.TListener:
		f.CloseFDs() // notification is not asked for; a closed listener answers ENOSYS
		return nil
	}
	f.CloseFDs()
	return fmt.Errorf("unexpected %s: %w", f.Type, wire.ErrFormat)
}

// bury kills and reaps all of a sandbox whose process 1 has ended or is not to be trusted, and settles what was under way.
func (b *box) bury(why error) {
	b.mu.Lock()
	killed := b.killed != nil && b.swept
	b.mu.Unlock()
	if !killed {
		b.grp.kill()
	}
	b.ctl.Close()
	unix.Kill(b.pid, unix.SIGKILL)
	ws, _ := reap(b.pid)
	b.mu.Lock()
	b.dead = true
	for _, t := range b.timers {
		t.Stop()
	}
	cause := sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "process 1 ended", Detail: fmt.Sprintf("%v (wait status %#x)", why, uint32(ws))}
	switch {
	case b.killed != nil:
		cause = *b.killed
	case (b.inner || ws.Signaled() && ws.Signal() == unix.SIGKILL) && b.grp.oomKills() > 0:
		cause = sandbox.Cause{Class: sandbox.ClassLimit, Reason: "memory", Detail: "the kernel killed process 1 for the memory limit"}
	}
	b.cause, b.causeOut = &cause, outPending
	for _, answer := range b.asked {
		close(answer)
	}
	b.asked = nil
	var cmds []*command
	for _, c := range b.byNum {
		cmds = append(cmds, c)
	}
	b.mu.Unlock()
	for _, c := range cmds {
		c.onLost()
	}
	b.wait.Done()
	close(b.gone)
	b.k.changed(b)
}

// finish kills everything in the sandbox, for a reason that its end will bear.
func (b *box) finish(cause sandbox.Cause) {
	b.mu.Lock()
	if b.killed == nil {
		b.killed = &cause
	}
	b.mu.Unlock()
	err := b.grp.kill()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		b.k.log.Error("kill", "sandbox", b.id, "err", err)
	}
	b.mu.Lock()
	b.swept = err == nil
	b.mu.Unlock()
}

// setDeadline arms or disarms an end of the sandbox.
func (b *box) setDeadline(kind DeadlineKind, at time.Time, cause sandbox.Cause) error {
	if kind != DeadlineTotal && kind != DeadlineLease {
		return fmt.Errorf("deadline of kind %d: %w", kind, sandbox.ErrInvalid)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if t := b.timers[kind]; t != nil {
		t.Stop()
		delete(b.timers, kind)
	}
	if kind == DeadlineTotal {
		b.birth.Deadline = at
	} else {
		b.birth.Lease = at
	}
	if at.IsZero() || b.dead {
		return nil
	}
	b.timers[kind] = time.AfterFunc(time.Until(at), func() { b.finish(cause) })
	return nil
}

// destroy ends a sandbox and removes everything of it.
func (k *Keeper) destroy(ctx context.Context, id sandbox.ID) (end Destroyed, err error) {
	k.unreserve(id)
	b, err := k.box(id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return end, nil
	}
	if err != nil {
		return end, err
	}
	b.abort()
	select {
	case <-b.settled:
	case <-ctx.Done():
		return end, fmt.Errorf("destroy %s: its birth does not end: %w", id, ctx.Err())
	}
	if err := k.remove(ctx, b); err != nil {
		return end, err
	}
	b.mu.Lock()
	end = b.used
	b.mu.Unlock()
	end.Ends = b.killedEnds()
	return end, nil
}

// maxEnds bounds an answer.
const maxEnds = 1000

// killedEnds are the ends of the commands that the end of the sandbox ended. Nobody else tells them any more.
func (b *box) killedEnds() (ends []CommandEnd) {
	b.mu.Lock()
	cmds := slices.Collect(maps.Values(b.cmds))
	b.mu.Unlock()
	for _, c := range cmds {
		c.mu.Lock()
		o, ended := c.outcome, c.exited && !c.hidden
		c.mu.Unlock()
		if ended && (o.Kind == sandbox.Killed || o.Kind == sandbox.TimedOut) && len(ends) < maxEnds {
			ends = append(ends, CommandEnd{Command: c.id, Outcome: o})
		}
	}
	return ends
}

// remove removes a sandbox that no birth works on any more. What is gone already is no error.
func (k *Keeper) remove(ctx context.Context, b *box) error {
	id := b.id
	b.mu.Lock()
	first := !b.removed
	b.removed = true
	born, spawned := b.ready, b.pid != 0
	b.mu.Unlock()
	b.finish(sandbox.Cause{Class: sandbox.ClassNone})
	if first && spawned && !born {
		b.bury(sandbox.ErrState) // control has not begun
	}
	if spawned {
		select {
		case <-b.gone:
		case <-ctx.Done():
			return fmt.Errorf("destroy %s: its processes do not end (a read from a store may be under way): %w", id, ctx.Err())
		}
	}
	b.mu.Lock()
	if b.ready && b.nextNum > 1 && !b.used.Ran {
		b.used = Destroyed{Ran: true, CPU: b.grp.allCPU(), Peak: b.grp.peak()}
	}
	var streams []*stream
	for _, c := range b.cmds {
		streams = append(streams, c.streams()...)
		c.closeStdin()
	}
	b.mu.Unlock()
	for _, s := range streams {
		s.close()
	}
	b.mu.Lock()
	names := b.grp.names()
	b.mu.Unlock()
	end := time.Now().Add(10 * time.Second)
	if at, ok := ctx.Deadline(); ok && at.Before(end) {
		end = at
	}
	b.grp.files.closeAll()
	if err := b.grp.remove(names, time.Until(end)); err != nil {
		return fmt.Errorf("destroy %s: %w", id, err)
	}
	b.wait.Wait() // its readers: their files are closed
	if b.birth.Runtime != nil {
		if err := k.dropBundle(b, time.Until(end)); err != nil {
			return fmt.Errorf("destroy %s: %w", id, err)
		}
	}
	k.mu.Lock()
	if k.boxes[id] == b {
		delete(k.boxes, id)
	}
	k.mu.Unlock()
	b.mu.Lock()
	ns, lent := b.netns, b.lent
	b.netns = nil
	b.mu.Unlock()
	if ns != nil && (lent || !k.netns.give(ns)) {
		k.discard(append(ns.files, ns.fd))
	}
	return nil
}

// freeze stops or starts all processes of the sandbox and the clocks of its commands.
func (b *box) freeze(on bool) error {
	b.mu.Lock()
	if b.dead || !b.ready {
		b.mu.Unlock()
		return fmt.Errorf("sandbox %s has ended: %w", b.id, sandbox.ErrState)
	}
	already := b.inner && b.frozen == on // a runtime refuses what is so already
	b.mu.Unlock()
	if already {
		return nil
	}
	stop := func() error { return b.grp.freeze(on, freezeBound) }
	if b.inner {
		stop = func() error { return b.pauseInside(on) }
	}
	if err := stop(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.frozen == on {
		return nil
	}
	b.frozen = on
	for _, c := range b.cmds {
		c.clock(!on)
	}
	return nil
}

// lendNetns returns the network namespace, for the host.
func (b *box) lendNetns() (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.netns == nil || b.removed {
		return -1, fmt.Errorf("sandbox %s is going or coming: %w", b.id, sandbox.ErrState)
	}
	b.lent = true
	return unix.FcntlInt(uintptr(b.netns.fd), unix.F_DUPFD_CLOEXEC, 0)
}

func (b *box) stats() (sandbox.Stats, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.removed || !b.ready {
		return sandbox.Stats{}, fmt.Errorf("sandbox %s is going or coming: %w", b.id, sandbox.ErrState)
	}
	return b.grp.stats(), nil
}

// figures is stats with the number of processes, which only process 1 knows where the kernel is the sandbox's own.
func (b *box) figures() (sandbox.Stats, error) {
	s, err := b.stats()
	if err != nil || !b.inner {
		return s, err
	}
	b.mu.Lock()
	frozen := b.frozen
	b.mu.Unlock()
	s.Pids = -1
	if !frozen {
		if n, err := b.askGroup("", wire.GroupCount, 0); err == nil {
			s.Pids = int64(n)
		}
	}
	return s, nil
}

func (k *Keeper) list() *listResponse {
	r := &listResponse{}
	for _, b := range k.all() {
		b.mu.Lock()
		if b.ready && !b.removed {
			a := Alive{ID: b.id, Born: b.born, Birth: b.birth, Frozen: b.frozen, Ended: b.cause}
			for _, c := range b.cmds {
				a.Commands = append(a.Commands, c.running())
			}
			for name := range b.sessions {
				a.Sessions = append(a.Sessions, name)
			}
			r.Boxes = append(r.Boxes, a)
		}
		b.mu.Unlock()
	}
	return r
}

func keyOf(id string) (k [16]byte) {
	sum := sha256.Sum256([]byte(id))
	copy(k[:], sum[:])
	return k
}

func (b *box) knows(id string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, ok := b.known[keyOf(id)]
	return ok
}

// ending is the end of a session, on its way to the host.
type ending struct {
	name    string
	outcome sandbox.Outcome
	out     outState
}

// rewind makes everything that was not acknowledged unsent.
func (b *box) rewind() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.dirty = b.dirty[:0]
	for _, c := range b.cmds {
		c.rewind()
		c.dirty = true
		b.dirty = append(b.dirty, c)
	}
	for _, e := range b.endings {
		e.out = outPending
	}
	b.denials.out = 0
	if b.causeOut == outSent {
		b.causeOut = outPending
	}
}

// mark notes that a command may have something to send.
func (b *box) mark(c *command) {
	b.mu.Lock()
	if !c.dirty {
		c.dirty = true
		b.dirty = append(b.dirty, c)
	}
	b.mu.Unlock()
	b.k.changed(b)
}

const pumpBudget = 256 << 10

// pump sends what the sandbox has for the host, at most about pumpBudget octets; more says that some is left.
func (b *box) pump(l *link) (more bool, err error) {
	budget := pumpBudget
	for budget > 0 {
		b.mu.Lock()
		if b.removed || len(b.dirty) == 0 {
			b.mu.Unlock()
			return false, b.pumpEnds(l)
		}
		c := b.dirty[0]
		b.dirty = b.dirty[1:]
		c.dirty = false
		b.mu.Unlock()
		n, left, err := c.pump(l)
		if err != nil {
			return false, err
		}
		budget -= n + 64
		if left {
			b.mu.Lock()
			if !c.dirty {
				c.dirty = true
				b.dirty = append(b.dirty, c)
			}
			b.mu.Unlock()
		}
	}
	return true, nil
}

// pumpEnds sends ends of sessions and of the sandbox, each after those of the commands that belong to it.
func (b *box) pumpEnds(l *link) error {
	b.mu.Lock()
	if b.removed {
		b.mu.Unlock()
		return nil
	}
	if len(b.denials.pending) > 0 {
		b.mu.Unlock()
		if err := b.pumpDenials(l); err != nil {
			return err
		}
		b.mu.Lock()
	}
	if len(b.endings) == 0 && b.causeOut != outPending {
		b.mu.Unlock()
		return nil
	}
	open := false
	of := map[string]bool{} // sessions with a command whose end was not sent
	for _, c := range b.cmds {
		if !c.endSent() {
			open = true
			of[c.session] = true
		}
	}
	var send []*ending
	for _, e := range b.endings {
		if e.out == outPending && !of[e.name] {
			e.out = outSent
			send = append(send, e)
		}
	}
	cause := b.cause
	last := !open && b.causeOut == outPending && len(b.sessions) == 0
	if last {
		b.causeOut = outSent
	}
	b.mu.Unlock()
	for _, e := range send {
		err := l.send(evSessionEnded, &endEvent{b.id, e.name, e.outcome}, nil, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			for i, o := range b.endings {
				if o == e {
					b.endings = append(b.endings[:i], b.endings[i+1:]...)
					break
				}
			}
		})
		if err != nil {
			return err
		}
	}
	if last {
		return l.send(evEnded, &endedEvent{b.id, *cause}, nil, func() {
			b.mu.Lock()
			b.causeOut = outTaken
			b.mu.Unlock()
		})
	}
	return nil
}
