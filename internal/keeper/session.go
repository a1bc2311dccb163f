package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	shell "github.com/dsec-dev/dsec/internal/guest/session"
	"github.com/dsec-dev/dsec/internal/guest/wire"
	"github.com/dsec-dev/dsec/internal/memfile"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	holderBound  = 10 * time.Second
	maxSessions  = 256
	maxWaiting   = 32
	timeoutTries = 20 // rounds of killing what a session's command starts after its timeout, before its shell is killed
	timeoutPause = 50 * time.Millisecond
)

// session is a living shell with its holder, in one cgroup. One command runs at a time, the others wait in line.
type session struct {
	b       *box
	name    string
	group   string
	holder  *command
	shell   *command
	hold    *wire.Conn // to the holder
	control *os.File   // lines to the shell
	opened  chan struct{}
	failure error         // set before opened is closed
	turn    chan struct{} // holds one token while a command runs
	gone    chan struct{} // closed when the shell has ended

	mu      sync.Mutex
	next    uint64
	current *command
	waiting int // commands in line
	ended   bool
}

// openSession starts a shell, or joins the one with the name.
func (b *box) openSession(ctx context.Context, req *sandbox.Session) error {
	if err := sandbox.CheckKey("session", req.Name); err != nil {
		return err
	}
	b.mu.Lock()
	s := b.sessions[req.Name]
	switch {
	case s != nil:
		b.mu.Unlock()
		select {
		case <-s.opened:
			return s.failure
		case <-ctx.Done():
			return ctx.Err()
		}
	case b.dead || b.removed || !b.ready || b.frozen:
		b.mu.Unlock()
		return fmt.Errorf("open session %s: sandbox %s has ended or is frozen: %w", req.Name, b.id, sandbox.ErrState)
	case len(b.sessions) >= maxSessions:
		b.mu.Unlock()
		return fmt.Errorf("open session %s: %d sessions live: %w", req.Name, maxSessions, sandbox.ErrExhausted)
	}
	s = &session{b: b, name: req.Name, opened: make(chan struct{}), turn: make(chan struct{}, 1), gone: make(chan struct{})}
	b.sessions[req.Name] = s
	group, _, err := b.takeGroup()
	b.mu.Unlock()
	s.group = group
	if err == nil {
		err = s.open(ctx, req)
	}
	if err != nil {
		s.failure = fmt.Errorf("open session %s: %w", req.Name, err)
		s.clean()
		b.mu.Lock()
		delete(b.sessions, req.Name)
		b.mu.Unlock()
	}
	close(s.opened)
	return s.failure
}

func (s *session) open(ctx context.Context, req *sandbox.Session) error {
	b := s.b
	conn, far, err := wire.Pair()
	if err != nil {
		return err
	}
	s.hold = conn
	s.holder = &command{b: b, id: "holder of " + s.name, hidden: true, begun: make(chan struct{})}
	pid := make(chan wire.Started, 1)
	s.holder.onStart = func(m wire.Started) { pid <- m }
	err = b.launch(s.holder, &sandbox.Command{User: req.User, Cwd: "/"}, launch{fds: []int{far}, group: s.group, flags: wire.StartHolder | wire.StartCgroupNS})
	unix.Close(far)
	if err != nil {
		return err
	}
	if err := begun(ctx, s.holder); err != nil {
		return err
	}
	holder := <-pid
	p, near, err := b.pipe(false)
	if err != nil {
		return err
	}
	s.control = near
	nums, err := s.keep(p)
	unix.Close(p)
	if err != nil {
		return err
	}
	shells := shell.Shells()
	if req.Shell != "" {
		shells = []string{req.Shell}
	}
	null := b.k.tmpl.null
	for i, program := range shells {
		sh := &command{b: b, id: "shell of " + s.name, hidden: true, begun: make(chan struct{}), onEnd: s.shellEnded}
		s.mu.Lock()
		s.shell = sh
		s.mu.Unlock()
		req := &sandbox.Command{Argv: shell.Argv(program, int(holder.PID), nums[0]), User: req.User, Cwd: req.Cwd, Env: req.Env}
		if err := b.launch(sh, req, launch{fds: []int{null, null, null}, group: s.group, flags: wire.StartCgroupNS}); err != nil {
			return err
		}
		err := begun(ctx, sh)
		if err == nil {
			return nil
		}
		var f *startError
		if !errors.As(err, &f) || f.stage != wire.StageProgram || i == len(shells)-1 {
			return err
		}
	}
	return nil
}

// startError is a start that failed for the request's own fault.
type startError struct {
	stage wire.Stage
	text  string
}

func (e *startError) Error() string { return e.text }
func (e *startError) Unwrap() error { return sandbox.ErrInvalid }

// begun waits until a hidden process runs.
func begun(ctx context.Context, c *command) error {
	select {
	case <-c.begun:
	case <-ctx.Done():
		return ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.failure != nil:
		return c.failure
	case c.failed != nil:
		return &startError{c.failed.Stage, c.failed.Text}
	case !c.running_:
		return fmt.Errorf("%s: the sandbox ended: %w", c.id, sandbox.ErrState)
	}
	return nil
}

// keep gives descriptors to the holder and returns their numbers there.
func (s *session) keep(fds ...int) ([]uint32, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	if err := s.hold.SetDeadline(time.Now().Add(holderBound)); err != nil {
		return nil, err
	}
	if err := s.hold.Send(wire.THold, s.next, nil, fds...); err != nil {
		return nil, s.holderError(err)
	}
	f, err := s.hold.ReadFrame()
	if err != nil {
		return nil, s.holderError(err)
	}
	f.CloseFDs()
	m, err := wire.DecodeHeld(f.Body)
	if err != nil || f.Type != wire.THeld || f.ID != s.next || len(m.Numbers) != len(fds) {
		return nil, fmt.Errorf("session %s: holder: unexpected answer: %w", s.name, errors.Join(err, wire.ErrFormat))
	}
	return m.Numbers, nil
}

// holderError tells a holder that is gone from one that misbehaves: a session's end kills it a moment before the end is known here, and a
// command that comes in between is refused like any later one.
func (s *session) holderError(err error) error {
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("session %s has ended: %w", s.name, sandbox.ErrState)
	}
	return fmt.Errorf("session %s: holder: %w", s.name, err)
}

func (s *session) drop(nums []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	s.hold.SetDeadline(time.Now().Add(holderBound))
	s.hold.Send(wire.TDrop, s.next, wire.Drop{Numbers: nums}) // a holder that is gone holds nothing
}

// startInSession runs text in a living shell when it is its turn.
func (b *box) startInSession(ctx context.Context, req *sandbox.Command) error {
	b.mu.Lock()
	s := b.sessions[req.Session]
	_, known := b.known[keyOf(req.ID)]
	have := b.cmds[req.ID]
	b.mu.Unlock()
	switch {
	case have != nil:
		return await(ctx, have, nil)
	case known:
		return nil
	case s == nil:
		return fmt.Errorf("start %s: session %s has ended or was never opened: %w", req.ID, req.Session, sandbox.ErrState)
	}
	select {
	case <-s.opened:
	case <-ctx.Done():
		return ctx.Err()
	}
	if s.failure != nil {
		return s.failure
	}
	c := &command{b: b, id: req.ID, session: s.name, place: s, shared: true, group: s.group, begun: make(chan struct{})}
	if have, err := b.register(c); err != nil || have != nil {
		return await(ctx, have, err)
	}
	s.mu.Lock()
	s.waiting++
	full := s.waiting > maxWaiting
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.waiting--
		s.mu.Unlock()
	}()
	if full { // each holds a request of the host, whose number is bounded
		b.forget(c)
		return fmt.Errorf("start %s: %d commands wait for session %s: %w", req.ID, maxWaiting, s.name, sandbox.ErrExhausted)
	}
	select {
	case s.turn <- struct{}{}:
	case <-s.gone:
		b.forget(c)
		return fmt.Errorf("start %s: session %s has ended: %w", req.ID, s.name, sandbox.ErrState)
	case <-ctx.Done():
		b.forget(c)
		return fmt.Errorf("start %s: session %s is busy: %w", req.ID, s.name, ctx.Err())
	}
	if err := s.run(c, req); err != nil {
		<-s.turn
		b.forget(c)
		return fmt.Errorf("start %s: %w", req.ID, err)
	}
	return nil
}

// run hands a command to the shell. It holds the turn, which the command's end gives back.
func (s *session) run(c *command, req *sandbox.Command) error {
	b := s.b
	far, err := c.pipes(req)
	if err != nil {
		return err
	}
	defer func() { closeAll(far) }()
	text, err := textFile(req.Text, int(b.birth.UIDBase))
	if err != nil {
		return err
	}
	far = append(far, text)
	st, status, err := b.pipe(true)
	if err != nil {
		return err
	}
	far = append(far, st)
	nums, err := s.keep(far...)
	if err != nil {
		status.Close()
		return err
	}
	if c.before, err = s.mark(); err != nil {
		status.Close()
		s.drop(nums)
		return err
	}
	c.begin()
	s.mu.Lock()
	if s.ended {
		s.mu.Unlock()
		status.Close()
		return fmt.Errorf("session %s has ended: %w", s.name, sandbox.ErrState)
	}
	s.current = c
	s.mu.Unlock()
	c.mu.Lock()
	c.outcome.Shared = c.outcome.Shared || len(c.before) > 2
	c.outcome.Started = time.Now()
	c.running_ = true
	c.left = req.Timeout
	c.clockLocked(true)
	c.mu.Unlock()
	c.readStreams()
	line := shell.Command{Stdin: nums[0], Stdout: nums[1], Stderr: nums[2], Text: nums[3], Status: nums[4]}.Line()
	s.control.SetWriteDeadline(time.Now().Add(holderBound))
	if _, err := s.control.Write(line); err != nil {
		// The shell is gone or reads nothing: its end, or this, ends the session.
		b.killGroup(s.group)
	}
	close(c.begun)
	b.wait.Add(1)
	go func() {
		defer b.wait.Done()
		defer status.Close()
		var buf [shell.MaxStatus]byte
		n := 0
		for n < len(buf) {
			m, err := status.Read(buf[n:])
			n += m
			if code, ok := shell.Status(buf[:n]); ok {
				s.finish(c, nums, sandbox.Outcome{Kind: sandbox.Exited, Code: code})
				return
			}
			if err != nil || m == 0 {
				break
			}
		}
		// No status: the shell's own end tells, or the command forged what came, and then only that end can.
		<-s.gone
		s.drop(nums)
	}()
	return nil
}

// finish settles the running command and lets the next one run.
func (s *session) finish(c *command, nums []uint32, o sandbox.Outcome) {
	s.mu.Lock()
	mine := s.current == c
	if mine {
		s.current = nil
	}
	s.mu.Unlock()
	if nums != nil {
		s.drop(nums)
	}
	if mine {
		c.settle(o)
		<-s.turn
	}
}

// shellEnded is called once, when the shell's process has ended.
func (s *session) shellEnded(o sandbox.Outcome) {
	b := s.b
	s.mu.Lock()
	sh := s.shell
	s.mu.Unlock()
	sh.mu.Lock()
	ran := sh.running_
	sh.mu.Unlock()
	if !ran {
		return // it never was a shell; open goes on or fails
	}
	s.mu.Lock()
	c := s.current
	s.current = nil
	s.ended = true
	s.mu.Unlock()
	close(s.gone)
	if c != nil {
		end := o
		end.SessionEnd = true
		end.Usage = sandbox.Usage{}
		c.settle(end)
		<-s.turn
	}
	s.clean()
	b.mu.Lock()
	if b.sessions[s.name] == s {
		delete(b.sessions, s.name)
	}
	b.endings = append(b.endings, &ending{name: s.name, outcome: o, out: outPending})
	b.mu.Unlock()
	b.k.changed(b)
}

// clean kills what is left in the session's group and gives the group back.
func (s *session) clean() {
	if s.group != "" {
		s.b.killGroup(s.group)
	}
	if s.hold != nil {
		s.hold.Close()
	}
	if s.control != nil {
		s.control.Close()
	}
	s.b.mu.Lock()
	if s.group != "" && !s.b.dead {
		s.b.giveGroup(s.group)
	}
	s.b.mu.Unlock()
}

func (b *box) closeSession(name string) error {
	b.mu.Lock()
	s := b.sessions[name]
	b.mu.Unlock()
	if s == nil {
		return nil
	}
	s.mu.Lock()
	for _, c := range []*command{s.shell, s.current} {
		if c != nil {
			c.mu.Lock()
			c.stopped = true
			c.mu.Unlock()
		}
	}
	s.mu.Unlock()
	return b.killGroup(s.group)
}

// process is a process of the host; a number alone may come again.
type process struct {
	pid   int
	start string
}

// mark notes what is in the session's group before a command; where process 1 keeps the note, the answer holds as many of no name.
func (s *session) mark() (map[process]bool, error) {
	if !s.b.inner {
		return s.processes(), nil
	}
	n, err := s.b.askGroup(s.group, wire.GroupMark, 0)
	all := map[process]bool{}
	for i := range n {
		all[process{pid: -i}] = true
	}
	return all, err
}

// processes are those in the session's group.
func (s *session) processes() map[process]bool {
	var buf [64 << 10]byte
	b, err := readFile(s.b.grp.v2(s.group, "cgroup.procs"), buf[:])
	if err != nil {
		return nil
	}
	all := map[process]bool{}
	for f := range strings.FieldsSeq(string(b)) {
		pid, err := strconv.Atoi(f)
		if err != nil || pid <= 0 {
			continue
		}
		all[process{pid, startTime(pid)}] = true
	}
	return all
}

// startTime is field 22 of /proc/<pid>/stat: the time at which the process began.
func startTime(pid int) string {
	var buf [1024]byte
	b, err := readFile("/proc/"+strconv.Itoa(pid)+"/stat", buf[:])
	if err != nil {
		return ""
	}
	s := string(b)
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(f) < 20 {
		return ""
	}
	return f[19]
}

// strike sends a signal to every process of the group that was not there when the command began, and reports how many. The group
// stands still meanwhile, so that none escapes by a fork. The group's other processes are the shell and what it already ran.
func (s *session) strike(c *command, sig unix.Signal) int {
	if s.b.inner {
		n, _ := s.b.askGroup(s.group, wire.GroupStrike, sig)
		return n
	}
	still := s.b.grp.freeze(true, freezeBound, s.group) == nil
	n := 0
	for p := range s.processes() {
		if !c.before[p] {
			n++
			unix.Kill(p.pid, sig)
		}
	}
	if still {
		s.b.grp.freeze(false, 0, s.group)
	}
	return n
}

// timeout ends the running command, not its session; a shell that is busy itself is killed.
func (s *session) timeout(c *command) {
	for range timeoutTries {
		s.strike(c, unix.SIGKILL)
		time.Sleep(timeoutPause)
		c.mu.Lock()
		ended := c.exited
		c.mu.Unlock()
		if ended {
			return
		}
	}
	s.mu.Lock()
	mine := s.current == c
	s.mu.Unlock()
	if mine {
		s.b.killGroup(s.group)
	}
}

// signal goes to what the command started; to the shell when it runs nothing.
func (s *session) signal(c *command, sig int) error {
	s.mu.Lock()
	mine, sh := s.current == c, s.shell
	s.mu.Unlock()
	if !mine {
		return fmt.Errorf("signal: command %s does not run: %w", c.id, sandbox.ErrState)
	}
	if s.strike(c, unix.Signal(sig)) > 0 {
		return nil
	}
	return s.b.tell(wire.TSignal, sh.num, wire.Signal{Signal: int32(sig)})
}

// textFile puts a command's text into a memory file that the shell may read.
func textFile(text string, uid int) (int, error) {
	fd, err := unix.MemfdCreate("command", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, fmt.Errorf("text: %w", err)
	}
	for b := []byte(text); len(b) > 0; {
		n, err := unix.Write(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			unix.Close(fd)
			return -1, fmt.Errorf("text: %w", err)
		}
		b = b[n:]
	}
	err = memfile.Seal(uintptr(fd))
	if err := errors.Join(err, unix.Fchmod(fd, 0o444), unix.Fchown(fd, uid, uid)); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("text: %w", err)
	}
	return fd, nil
}

// files starts a file server inside, or, with a port, a connection to that, and returns the host's end of its stream.
func (b *box) files(ctx context.Context, user string, port uint16) (int, error) {
	b.k.mu.Lock()
	guest := b.k.guest
	program := -1
	var err error
	if guest >= 0 {
		program, err = unix.FcntlInt(uintptr(guest), unix.F_DUPFD_CLOEXEC, 0)
	}
	b.k.mu.Unlock()
	if guest < 0 || err != nil {
		return -1, fmt.Errorf("files: no host brought the file server: %w", errors.Join(err, sandbox.ErrUnsupported))
	}
	defer unix.Close(program)
	b.mu.Lock()
	frozen := b.frozen || b.dead || !b.ready
	b.mu.Unlock()
	if frozen {
		return -1, fmt.Errorf("files: sandbox %s has ended or is frozen: %w", b.id, sandbox.ErrState)
	}
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("files: %w", err)
	}
	defer unix.Close(p[1])
	c := &command{b: b, id: "files", hidden: true, begun: make(chan struct{})}
	// The program comes as descriptor 0 and is executed from there: no file of the image is involved.
	argv := []string{"/proc/self/fd/0", "1"}
	if port != 0 {
		argv = append(argv, strconv.Itoa(int(port)))
	}
	err = b.launch(c, &sandbox.Command{Argv: argv, User: user, Cwd: "/"},
		launch{fds: []int{program, p[1], b.k.tmpl.null}, flags: wire.StartCgroupNS})
	if err == nil {
		err = begun(ctx, c)
	}
	if err != nil {
		unix.Close(p[0])
		return -1, fmt.Errorf("files: %w", err)
	}
	return p[0], nil
}
