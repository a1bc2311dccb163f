package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/guest/wire"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// command is a process of a sandbox that the keeper answers for, or a session's command that runs in its shell.
type command struct {
	b       *box
	id      string
	num     uint64 // in the guest protocol; 0 for a session's command
	session string
	place   *session              // the session it runs in
	dirty   bool                  // guarded by box.mu
	begun   chan struct{}         // closed when it runs or has failed to start
	hidden  bool                  // the keeper's own (a session's shell, a file server): no event tells of it
	shared  bool                  // its group is a session's, which outlives it
	onStart func(wire.Started)    // of a hidden one, before begun is closed
	onEnd   func(sandbox.Outcome) // of a hidden one
	before  map[process]bool      // of a session's command: the processes in its group at its start
	relay   bool                  // it has a terminal that process 1 carries; guarded by mu
	refused bool                  // process 1 says that a fork was refused; guarded by mu
	spent   time.Duration         // time that its process used, where its group can't tell; guarded by mu

	mu        sync.Mutex
	out, err  *stream // err is nil for a terminal
	in        *input
	group     string       // its cgroup, "" for a session's command
	running_  bool         // STARTED came
	failure   error        // of the platform at start
	failed    *wire.Failed // of a hidden one
	exited    bool
	outcome   sandbox.Outcome
	timedOut  bool
	stopped   bool // killed on request
	base      counters
	since     time.Duration // time used in its group before it; -1: not known
	quiet     *quiet        // figures at its start that are known already
	timer     *time.Timer
	left      time.Duration // of the timeout, when the clock stands still
	armed     time.Time     // when it was started; zero: it stands still or there is none
	graceOver bool
	end       outState
}

// counters are the kernel's figures at a moment.
type counters struct {
	oom, refused int64
	cpu          time.Duration
	peak         bool  // the maximum was reset, or was read: it then tells only if it rose
	max          int64 // what it was, where it can't be reset
}

func (b *box) counters(group string) counters {
	c := counters{oom: b.grp.oomKills(), refused: b.grp.forksRefused()}
	if group != "" && !b.inner {
		c.cpu = b.grp.cpu(group)
	}
	return c
}

// figures are the counters for a command. Where its kernel is its own, a session's command has no end of a process that tells its time:
// the sandbox's stands for it.
func (c *command) figures() counters {
	n := c.b.counters(c.group)
	if c.b.inner && c.session != "" {
		n.cpu = c.b.grp.allCPU()
	}
	return n
}

// start begins a command and waits until it runs or has failed to.
func (b *box) start(ctx context.Context, req *sandbox.Command) error {
	if err := req.Validate(); err != nil {
		return err
	}
	if req.Session != "" {
		return b.startInSession(ctx, req)
	}
	c := &command{b: b, id: req.ID, begun: make(chan struct{})}
	if have, err := b.register(c); err != nil || have != nil {
		return await(ctx, have, err)
	}
	if err := b.launch(c, req, launch{flags: wire.StartCgroupNS}); err != nil {
		b.forget(c)
		return fmt.Errorf("start %s: %w", req.ID, err)
	}
	return await(ctx, c, nil)
}

func await(ctx context.Context, c *command, err error) error {
	if c == nil || err != nil {
		return err
	}
	select {
	case <-c.begun:
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.failure
	case <-ctx.Done():
		return fmt.Errorf("start %s: not yet: %w", c.id, ctx.Err())
	}
}

// register makes the command known, or returns the one that has the ID. Both nil: it has ended and was taken.
func (b *box) register(c *command) (*command, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if have := b.cmds[c.id]; have != nil {
		return have, nil
	}
	switch {
	case b.dead || b.removed || !b.ready:
		return nil, fmt.Errorf("start %s: sandbox %s has ended: %w", c.id, b.id, sandbox.ErrState)
	case b.frozen:
		return nil, fmt.Errorf("start %s: sandbox %s is frozen: %w", c.id, b.id, sandbox.ErrState)
	case len(b.cmds) >= maxCommands:
		return nil, fmt.Errorf("start %s: %d commands of sandbox %s are not settled: %w", c.id, len(b.cmds), b.id, sandbox.ErrExhausted)
	}
	if _, ok := b.known[keyOf(c.id)]; ok {
		close(c.begun)
		return c, nil // started once, ended and taken: nothing to do
	}
	b.cmds[c.id] = c
	b.known[keyOf(c.id)] = struct{}{}
	return nil, nil
}

// forget undoes register: the command never ran.
func (b *box) forget(c *command) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cmds[c.id] == c {
		delete(b.cmds, c.id)
		delete(b.known, keyOf(c.id))
	}
	delete(b.byNum, c.num)
	for _, s := range c.streams() {
		s.close()
	}
}

// launch is how a process is started, beside its request.
type launch struct {
	fds   []int  // instead of standard streams of its own; they stay the caller's
	group string // instead of a group of its own
	flags uint32
}

// launch sends START.
func (b *box) launch(c *command, req *sandbox.Command, l launch) error {
	b.mu.Lock()
	if b.dead {
		b.mu.Unlock()
		return fmt.Errorf("sandbox %s has ended: %w", b.id, sandbox.ErrState)
	}
	group, err := l.group, error(nil)
	if group == "" {
		if known := b.grp.quiet; known.epoch == b.grp.epoch {
			c.quiet = &known
		}
		group, c.since, err = b.takeGroup()
	} else {
		c.shared = true
	}
	if err != nil {
		b.mu.Unlock()
		return err
	}
	c.group = group
	c.num = b.nextNum
	b.nextNum++
	b.byNum[c.num] = c
	b.mu.Unlock()
	if !c.hidden {
		c.begin()
	}
	var far []int
	fds := l.fds
	defer func() { closeAll(far) }()
	m := wire.Start{User: req.User, Cwd: req.Cwd, Argv: req.Argv, Env: req.Env, Flags: l.flags | wire.StartNoPidfd}
	if req.Terminal != nil {
		m.Flags |= wire.StartTerminal
		m.Rows, m.Cols = req.Terminal.Rows, req.Terminal.Cols
	}
	if req.Terminal != nil && b.inner {
		m.Flags |= wire.StartRelay
		if far, err = c.relayed(req); err != nil {
			b.giveBack(c)
			return err
		}
		fds = far
		c.in.first(b)
	} else if req.Terminal != nil {
		c.in = newInput(nil, req)
	} else if fds == nil {
		if far, err = c.pipes(req); err != nil {
			b.giveBack(c)
			return err
		}
		fds = far
	}
	at := -1
	if !b.inner {
		if at, err = b.grp.open(group); err != nil {
			b.giveBack(c)
			return err
		}
		defer unix.Close(at)
	}
	if b.inner || b.k.cg.pure() && b.birth.Runtime == nil { // see group.cradle
		m.Flags &^= wire.StartCgroupNS
	}
	c.mu.Lock()
	c.outcome.Started = time.Now()
	c.left = req.Timeout
	c.clockLocked(true)
	c.mu.Unlock()
	f := wire.Frame{Type: wire.TStart, Flags: uint16(innerNumber(group)), ID: c.num, Body: m.Append(nil), FDs: wire.StartFDs(at, fds...)}
	if err := b.tellFrame(f); err != nil {
		b.giveBack(c)
		return fmt.Errorf("send START: %w", err)
	}
	c.readStreams()
	return nil
}

func (c *command) readStreams() {
	for _, s := range c.streams() {
		c.b.wait.Add(1)
		go func() {
			defer c.b.wait.Done()
			s.read()
		}()
	}
}

// begin notes the figures at a command's start, and whether they are its own.
func (c *command) begin() {
	b := c.b
	shared := false
	b.mu.Lock()
	for _, o := range b.cmds {
		if o == c {
			continue
		}
		o.mu.Lock()
		if !o.exited {
			shared = true
			o.outcome.Shared = true
		}
		o.mu.Unlock()
	}
	b.mu.Unlock()
	var base counters
	switch known := c.quiet; {
	case known != nil && c.since >= 0:
		base = counters{oom: known.oom, refused: known.refused, cpu: c.since}
	default:
		base = c.figures()
	}
	switch {
	case shared, b.inner: // of the sandbox's memory a step's can't be told apart, or not from its kernel's
	case c.quiet != nil && c.quiet.epoch == 0:
		base.peak = true // the sandbox's first: the maximum so far is that of its birth
	default:
		base.peak = b.grp.resetPeak()
		if !base.peak {
			base.max = b.grp.peak()
			base.peak = base.max >= 0
		}
	}
	c.mu.Lock()
	c.base = base
	c.outcome.Shared = c.outcome.Shared || shared
	c.mu.Unlock()
}

func (b *box) giveBack(c *command) {
	c.mu.Lock()
	c.clockLocked(false)
	c.mu.Unlock()
	b.mu.Lock()
	delete(b.byNum, c.num)
	if c.group != "" && !c.shared {
		b.giveGroup(c.group)
	}
	b.mu.Unlock()
}

// pipes makes the command's standard streams and returns the far ends.
func (c *command) pipes(req *sandbox.Command) (far []int, err error) {
	b := c.b
	defer func() {
		if err != nil {
			closeAll(far)
			far = nil
		}
	}()
	if len(req.Stdin) == 0 && !req.StdinOpen {
		fd, err := unix.FcntlInt(uintptr(b.k.tmpl.null), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return far, err
		}
		far = append(far, fd)
	} else {
		f, near, err := b.pipe(false)
		if err != nil {
			return far, err
		}
		far = append(far, f)
		c.in = newInput(near, req)
		if len(req.Stdin) > 0 || !req.StdinOpen {
			c.in.first(b)
		}
	}
	var outs [2]*stream
	for i, name := range []sandbox.StreamName{sandbox.Stdout, sandbox.Stderr} {
		f, near, err := b.pipe(true)
		if err != nil {
			return far, err
		}
		far = append(far, f)
		if outs[i], err = newStream(c, name, near, req.OutputCap); err != nil {
			near.Close()
			return far, err
		}
	}
	c.mu.Lock()
	c.out, c.err = outs[0], outs[1]
	c.mu.Unlock()
	return far, nil
}

// pipe returns the command's end and ours. The inode belongs to the sandbox's root and is open to all who can reach it, which is
// whoever may trace a process that has it: else /dev/stdout can't be opened by a user that was switched to.
func (b *box) pipe(out bool) (far int, near *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return -1, nil, fmt.Errorf("pipe: %w", err)
	}
	id := int(b.birth.UIDBase)
	if err := errors.Join(unix.Fchown(p[0], id, id), unix.Fchmod(p[0], 0o666)); err != nil {
		closeAll(p[:])
		return -1, nil, fmt.Errorf("pipe: %w", err)
	}
	mine, theirs, name := 1, 0, "stdin"
	if out {
		mine, theirs, name = 0, 1, "output"
	}
	// Only our end is non-blocking; each end of a pipe is an open file of its own.
	if err := unix.SetNonblock(p[mine], true); err != nil {
		closeAll(p[:])
		return -1, nil, fmt.Errorf("pipe: %w", err)
	}
	return p[theirs], os.NewFile(uintptr(p[mine]), name), nil
}

func (c *command) onStarted(m wire.Started, fds []int) error {
	defer closeAll(fds)
	c.mu.Lock()
	if c.running_ || c.exited {
		c.mu.Unlock()
		return fmt.Errorf("STARTED twice: %w", wire.ErrFormat)
	}
	c.running_ = true
	c.mu.Unlock()
	if len(fds) >= 1 && c.in != nil && c.out == nil { // a terminal
		if err := c.terminal(fds[0]); err != nil {
			return err
		}
	}
	if c.onStart != nil {
		c.onStart(m)
	}
	close(c.begun)
	return nil
}

// terminal takes the master of the command's terminal. It has one output.
func (c *command) terminal(fd int) error {
	fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
		unix.Close(fd)
		return fmt.Errorf("terminal: not a character device: %w", errors.Join(err, wire.ErrFormat))
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return err
	}
	f := os.NewFile(uintptr(fd), "terminal")
	s, err := newStream(c, sandbox.Stdout, f, c.in.cap)
	if err != nil {
		f.Close()
		return err
	}
	s.tty = true
	c.mu.Lock()
	c.out = s
	c.mu.Unlock()
	c.in.attach(f)
	c.b.wait.Add(1)
	go func() {
		defer c.b.wait.Done()
		s.read()
	}()
	c.in.first(c.b)
	return nil
}

func (c *command) onFailed(m wire.Failed) error {
	c.mu.Lock()
	if c.running_ || c.exited {
		c.mu.Unlock()
		return fmt.Errorf("FAILED after STARTED: %w", wire.ErrFormat)
	}
	c.mu.Unlock()
	if c.hidden {
		c.mu.Lock()
		c.failed, c.exited = &m, true
		c.mu.Unlock()
		c.b.giveBack(c)
		close(c.begun)
		return nil
	}
	o := sandbox.Outcome{Kind: sandbox.StartFailed, Error: m.Text}
	if m.Errno != 0 && m.Text == "" {
		o.Error = unix.Errno(m.Errno).Error()
	}
	if m.Stage.Fault() && unix.Errno(m.Errno) != unix.EAGAIN && unix.Errno(m.Errno) != unix.ENOMEM {
		// The platform's fault, not the request's: the caller gets an error and the command never was.
		c.mu.Lock()
		c.failure = fmt.Errorf("start %s: %q: %w", c.id, m.Text, unix.Errno(m.Errno))
		c.mu.Unlock()
		c.b.giveBack(c)
		c.b.forget(c)
		close(c.begun)
		return nil
	}
	c.settle(o)
	close(c.begun)
	return nil
}

func (c *command) onExited(m wire.Exited, refused bool) error {
	c.mu.Lock()
	if !c.running_ || c.exited {
		c.mu.Unlock()
		return fmt.Errorf("EXITED out of turn: %w", wire.ErrFormat)
	}
	timedOut, stopped := c.timedOut, c.stopped
	if c.b.inner {
		c.refused = refused
		c.spent = time.Duration(min(m.UserMicros, 1<<50)+min(m.SysMicros, 1<<50)) * time.Microsecond
	}
	c.mu.Unlock()
	c.b.mu.Lock()
	stopped = stopped || c.b.killed != nil // with its whole sandbox
	c.b.mu.Unlock()
	ws := unix.WaitStatus(m.Status)
	o := sandbox.Outcome{}
	switch {
	case ws.Exited():
		o.Kind, o.Code = sandbox.Exited, ws.ExitStatus()
	case ws.Signaled():
		o.Kind, o.Signal = sandbox.Signalled, int(ws.Signal())
	default:
		return fmt.Errorf("EXITED with status %#x: %w", m.Status, wire.ErrFormat)
	}
	if o.Signal == int(unix.SIGKILL) {
		switch {
		case timedOut:
			o = sandbox.Outcome{Kind: sandbox.TimedOut, Signal: o.Signal}
		case stopped:
			o = sandbox.Outcome{Kind: sandbox.Killed, Signal: o.Signal}
		}
	}
	c.settle(o)
	return nil
}

// onLost settles a command whose sandbox has ended.
func (c *command) onLost() {
	c.mu.Lock()
	if c.exited {
		c.mu.Unlock()
		return
	}
	started := c.running_
	timedOut := c.timedOut
	c.mu.Unlock()
	o := sandbox.Outcome{Kind: sandbox.Killed, Signal: int(unix.SIGKILL)}
	if timedOut {
		o.Kind = sandbox.TimedOut
	}
	c.settle(o)
	if !started {
		close(c.begun)
	}
}

// settle takes the end of the command's process. The end is told when its octets are read, or, where someone holds its output
// open, after the grace.
func (c *command) settle(o sandbox.Outcome) {
	b := c.b
	var now counters
	own := c.group != "" && !c.shared && !b.inner
	populated := false
	b.mu.Lock()
	epoch := b.grp.epoch
	b.mu.Unlock()
	if own {
		populated = b.grp.populated(c.group) // before the figures: when nothing lives any more, they are the last
	}
	if !c.hidden {
		now = c.figures()
	}
	peak := int64(-1)
	c.mu.Lock()
	if c.exited {
		c.mu.Unlock()
		return
	}
	c.exited = true
	c.clockLocked(false)
	o.Shared = c.outcome.Shared
	if c.timedOut && c.session != "" {
		o.Kind, o.Code = sandbox.TimedOut, 0
	}
	o.Started, o.Ended = c.outcome.Started, time.Now()
	o.MemoryHit = now.oom > c.base.oom
	o.PidsHit = now.refused > c.base.refused || c.refused
	if c.base.peak && !c.hidden {
		if peak = b.grp.stepPeak(); peak <= c.base.max {
			peak = -1
		}
	}
	o.Usage = sandbox.Usage{CPU: max(0, now.cpu-c.base.cpu) + c.spent, MemoryPeak: peak}
	if o.Kind == sandbox.Signalled && o.Signal == int(unix.SIGKILL) && o.MemoryHit {
		o.Kind = sandbox.OutOfMemory
	}
	o.Group = c.group
	if c.place != nil {
		o.Group = c.place.group
	}
	c.outcome = o
	c.mu.Unlock()

	b.mu.Lock()
	delete(b.byNum, c.num)
	if own {
		cpu := time.Duration(-1)
		if !c.hidden && !populated {
			cpu = now.cpu
		}
		same := b.grp.epoch == epoch
		b.grp.putKnown(c.group, populated, cpu)
		if same && cpu >= 0 && len(b.byNum) == 0 && len(b.grp.used) == 0 && len(b.sessions) == 0 {
			b.grp.quiet = quiet{epoch: b.grp.epoch, oom: now.oom, refused: now.refused}
		}
	}
	b.mu.Unlock()
	c.closeStdin()
	if o.Kind == sandbox.StartFailed {
		for _, s := range c.streams() {
			s.close()
		}
	}
	if c.hidden {
		if c.onEnd != nil {
			c.onEnd(o)
		}
		return
	}
	if !c.complete() {
		time.AfterFunc(sandbox.OutputGrace, c.grace)
	}
}

// grace fixes the end of streams that someone still holds open.
func (c *command) grace() {
	for _, s := range c.streams() {
		s.fixEnd()
	}
	c.complete()
}

// complete makes the end ready to be told when the process has ended and every octet that belongs to it was read.
func (c *command) complete() bool {
	c.mu.Lock()
	if !c.exited || c.end != outNone {
		done := c.exited
		c.mu.Unlock()
		return done
	}
	for i, s := range []*stream{c.out, c.err} {
		if s == nil {
			continue
		}
		s.mu.Lock()
		done := s.finished
		s.mu.Unlock()
		if !done {
			c.mu.Unlock()
			return false
		}
		e, open := s.result()
		c.outcome.OutputOpen = c.outcome.OutputOpen || open
		if i == 0 {
			c.outcome.Stdout = e
		} else {
			c.outcome.Stderr = e
		}
	}
	c.end = outPending
	c.mu.Unlock()
	c.b.mark(c)
	return true
}

func (c *command) streamChanged(done bool) {
	if done {
		c.complete()
	}
	if !c.hidden {
		c.b.mark(c)
	}
}

func (c *command) streamEOF(_ *stream, _ bool) {
	c.complete()
	c.b.mark(c)
}

func (c *command) streams() []*stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	var s []*stream
	for _, o := range []*stream{c.out, c.err} {
		if o != nil {
			s = append(s, o)
		}
	}
	return s
}

// clock starts or stops the timeout's clock.
func (c *command) clock(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.clockLocked(on)
}

func (c *command) clockLocked(on bool) {
	switch {
	case on && c.left > 0 && c.armed.IsZero() && !c.exited:
		c.armed = time.Now()
		c.timer = time.AfterFunc(c.left, c.timeout)
	case !on && !c.armed.IsZero():
		c.timer.Stop()
		c.left = max(time.Nanosecond, c.left-time.Since(c.armed))
		c.armed = time.Time{}
	}
}

// timeout kills all of the command. A group that is frozen is killed at once on v2.
func (c *command) timeout() {
	c.mu.Lock()
	if c.exited || c.armed.IsZero() {
		c.mu.Unlock()
		return
	}
	c.timedOut = true
	c.mu.Unlock()
	if c.place != nil {
		c.place.timeout(c)
		return
	}
	if err := c.b.killGroup(c.group); err != nil {
		c.b.k.log.Error("kill after timeout", "sandbox", c.b.id, "command", c.id, "err", err)
	}
}
