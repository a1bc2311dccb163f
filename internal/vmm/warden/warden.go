// Package warden is the parent of a host's virtual machine monitors: a small process that outlives the host daemon, as the keeper does for
// containers. It starts each monitor as a user of its own in cgroups of its own, ends it at its deadline, removes what was its, and holds
// descriptors (a template's memory) as long as it lives. When it dies, the kernel kills the monitors, and what they held of memory files goes
// with it; the next warden of the folder removes their cgroups.
//
// The protocol is one request a connection: u32 length, JSON, descriptors with the first octet; then the answer in the same form. A watch is
// answered by a line for each end. Both sides are this package.
//
// Lock order: warden.mu alone; it is not held during I/O.
package warden

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Names in the run folder.
const (
	SocketName = "warden.sock"
	LogName    = "warden.log"
	lockName   = "warden.lock"
)

// exitLocked is the exit code of a warden that found its folder's lock taken.
const exitLocked = 3

// Bounds.
const (
	maxRequest   = 256 << 10
	maxFiles     = 64
	maxHeld      = 256
	maxProcesses = 4096
	callBound    = 30 * time.Second
	killBound    = 20 * time.Second
)

// Process is a monitor to start. The files that go with it are its descriptors from 3 on. What it writes on its standard output and error is
// kept up to 64 KiB, and its begin is told with its end.
type Process struct {
	ID       string    `json:"id"` // also the name of its cgroup
	Argv     []string  `json:"argv"`
	Env      []string  `json:"env"`
	UID      uint32    `json:"uid"`
	GID      uint32    `json:"gid"`
	Groups   []uint32  `json:"groups,omitempty"`
	Netns    int       `json:"netns"`  // position of its network namespace among the files, or -1
	Memory   int64     `json:"memory"` // octets, 0 for no limit
	CPU      int64     `json:"cpu"`    // milli-CPU, 0 for no cap
	Weight   int64     `json:"weight"` // of CPU time, 1 to 10,000; 0 is 100
	Pids     int64     `json:"pids"`
	Deadline time.Time `json:"deadline"` // zero: none
	// Jail: the program is a jailer, which starts as root, becomes UID by itself and has namespaces of its own. Binds are mounts that it
	// alone sees.
	Jail  bool   `json:"jail,omitempty"`
	Binds []Bind `json:"binds,omitempty"`
}

// Bind mounts one of the files that go with a process on a file.
type Bind struct {
	File int    `json:"file"` // position among the files
	At   string `json:"at"`
}

// Alive is a monitor that runs or whose end nobody has forgotten.
type Alive struct {
	ID      string    `json:"id"`
	Pid     int       `json:"pid"`
	Started time.Time `json:"started"`
	Ended   bool      `json:"ended"`
	Said    string    `json:"said,omitempty"` // what it wrote, at most 2 KiB
	Why     string    `json:"why,omitempty"`  // "deadline", "killed" or how it ended by itself
}

type request struct {
	Op      string    `json:"op"`
	Process *Process  `json:"process,omitempty"`
	ID      string    `json:"id,omitempty"`
	At      time.Time `json:"at"`
}

type answer struct {
	Error string  `json:"error,omitempty"`
	Code  string  `json:"code,omitempty"`
	Pid   int     `json:"pid,omitempty"`
	List  []Alive `json:"list,omitempty"`
}

var sentinels = map[string]error{"not_found": sandbox.ErrNotFound, "exists": sandbox.ErrExists, "invalid": sandbox.ErrInvalid, "exhausted": sandbox.ErrExhausted, "state": sandbox.ErrState}

var namePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

type process struct {
	Alive
	timer *time.Timer
	done  chan struct{} // closed when it was reaped and its groups are gone
}

type warden struct {
	log    *slog.Logger
	groups *groups
	spawn  chan func()

	mu       sync.Mutex
	procs    map[string]*process
	held     map[string]*os.File
	memories map[[2]uint64]*sharedMemory // that faults are answered from, by device and inode
	guard    *os.File                    // its end ends the jails
	watchers map[chan Alive]bool
}

// Main runs a warden until it is told to end, and returns the process's exit code.
func Main(args []string) int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	fs := flag.NewFlagSet("warden", flag.ContinueOnError)
	dir := fs.String("dir", "", "run folder")
	instance := fs.String("instance", "", "name of the instance")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	debug.SetMemoryLimit(64 << 20)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	if err := run(ctx, stop, *dir, *instance, log); err != nil {
		log.Error("warden", "err", err)
		if errors.Is(err, sandbox.ErrExists) {
			return exitLocked
		}
		return 1
	}
	return 0
}

func lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("a warden of this run folder lives: %w", sandbox.ErrExists)
	}
	return f, nil
}

func run(ctx context.Context, stop func(), dir, instance string, log *slog.Logger) error {
	if !filepath.IsAbs(dir) || !namePattern.MatchString(instance) {
		return fmt.Errorf("folder %q, instance %q: %w", dir, instance, sandbox.ErrInvalid)
	}
	l, err := lock(dir)
	if err != nil {
		return err
	}
	defer l.Close()
	g, err := findGroups("dsec-" + instance + "-vm")
	if err != nil {
		return err
	}
	if err := g.sweep(); err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	if err := g.setup(); err != nil {
		return fmt.Errorf("set up cgroups: %w", err)
	}
	w := &warden{log: log, groups: g, spawn: make(chan func()), procs: map[string]*process{}, held: map[string]*os.File{}, memories: map[[2]uint64]*sharedMemory{}, watchers: map[chan Alive]bool{}}
	go func() {
		// The kernel ends a monitor with the thread that started it, so that is one that never ends.
		runtime.LockOSThread()
		// Else it could not change its mount namespace; a jail then says so. Its mask of modes is its own from then on, and is not to be
		// that of the moment.
		if unix.Unshare(unix.CLONE_FS) == nil {
			unix.Umask(0o022)
		}
		// In a sandbox of ours somebody listens already, and nobody else can: clones then keep what they have.
		if listener, err := askAboutHoles(); err != nil {
			log.Warn("clones give no memory back", "err", err)
		} else {
			go func() { log.Error("clones give no memory back any more", "err", answerHoles(listener)) }()
		}
		for f := range w.spawn {
			f()
		}
	}()
	sock := filepath.Join(dir, SocketName)
	os.Remove(sock)
	old := unix.Umask(0o177)
	ln, err := listen(sock)
	unix.Umask(old)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	go func() { <-ctx.Done(); ln.Close() }()
	log.Info("warden serves", "dir", dir, "pid", os.Getpid())
	slots := make(chan struct{}, 128)
	for {
		c, err := ln.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil {
				break
			}
			return err
		}
		slots <- struct{}{}
		go func() {
			defer func() { c.Close(); <-slots }()
			w.serve(ctx, stop, c)
		}()
	}
	w.endAll()
	return g.remove()
}

// listen goes through the folder's descriptor: a socket's path is bounded at 107 octets.
func listen(sock string) (*net.UnixListener, error) {
	d, err := os.Open(filepath.Dir(sock))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), filepath.Base(sock)), Net: "unix"})
	if err == nil {
		ln.SetUnlinkOnClose(false)
	}
	return ln, err
}

func (w *warden) serve(ctx context.Context, stop func(), c *net.UnixConn) {
	c.SetDeadline(time.Now().Add(callBound))
	var r request
	files, err := receive(c, &r)
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	if err != nil {
		return
	}
	if r.Op == "watch" {
		w.watch(ctx, c)
		return
	}
	var a answer
	var out []*os.File
	switch r.Op {
	case "start":
		a.Pid, err = w.start(r.Process, files)
	case "kill":
		err = w.kill(r.ID, "killed")
	case "forget":
		err = w.forget(r.ID)
	case "deadline":
		err = w.deadline(r.ID, r.At)
	case "pages":
		if err = w.pages(ctx, r.ID, files); err == nil {
			files = nil
		}
	case "list":
		a.List = w.list()
	case "hold":
		if err = w.hold(r.ID, files); err == nil {
			files = nil
		}
	case "held":
		var f *os.File
		if f, err = w.heldFile(r.ID); err == nil {
			out = append(out, f)
		}
	case "drop":
		w.drop(r.ID)
	case "shutdown":
		defer stop()
	default:
		err = fmt.Errorf("request %q: %w", r.Op, sandbox.ErrInvalid)
	}
	if err != nil {
		a.Error = err.Error()
		for code, s := range sentinels {
			if errors.Is(err, s) {
				a.Code = code
			}
		}
	}
	c.SetDeadline(time.Now().Add(callBound))
	if send(c, &a, out) != nil && r.Op == "start" && err == nil {
		// Whoever asked gave up before it began, and may have asked for its end before that: nobody answers for it.
		if err := errors.Join(w.kill(r.Process.ID, "killed"), w.forget(r.Process.ID)); err != nil {
			w.log.Error("end a monitor that nobody waits for", "monitor", r.Process.ID, "err", err)
		}
	}
}

func (w *warden) start(p *Process, files []*os.File) (int, error) {
	switch {
	case p == nil || !namePattern.MatchString(p.ID) || len(p.Argv) == 0 || p.Netns >= len(files):
		return 0, fmt.Errorf("start: malformed: %w", sandbox.ErrInvalid)
	case p.UID == 0:
		return 0, fmt.Errorf("start %s: as root: %w", p.ID, sandbox.ErrInvalid)
	case len(p.Binds) > 0 && !p.Jail || slices.ContainsFunc(p.Binds, func(b Bind) bool { return b.File < 0 || b.File >= len(files) || !filepath.IsAbs(b.At) }):
		return 0, fmt.Errorf("start %s: malformed mounts: %w", p.ID, sandbox.ErrInvalid)
	}
	x := &process{Alive: Alive{ID: p.ID, Started: time.Now()}, done: make(chan struct{})}
	w.mu.Lock()
	switch {
	case w.procs[p.ID] != nil:
		w.mu.Unlock()
		return 0, fmt.Errorf("start %s: %w", p.ID, sandbox.ErrExists)
	case len(w.procs) >= maxProcesses:
		w.mu.Unlock()
		return 0, fmt.Errorf("start %s: %d monitors: %w", p.ID, maxProcesses, sandbox.ErrExhausted)
	}
	w.procs[p.ID] = x
	w.mu.Unlock()
	undo := func(err error) (int, error) {
		w.groups.removeOf(p.ID)
		w.mu.Lock()
		x.Ended = true
		delete(w.procs, p.ID)
		w.mu.Unlock()
		close(x.done)
		return 0, fmt.Errorf("start %s: %w", p.ID, err)
	}
	at, err := w.groups.make(p)
	if err != nil {
		return undo(err)
	}
	defer at.Close()
	cmd := exec.Command(p.Argv[0], p.Argv[1:]...)
	cmd.Env, cmd.Dir = p.Env, "/"
	out, in, err := saying()
	if err != nil {
		return undo(err)
	}
	defer in.Close()
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = in, in, files
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true, Pdeathsig: syscall.SIGKILL, UseCgroupFD: true, CgroupFD: int(at.Fd()),
		Credential: &syscall.Credential{Uid: p.UID, Gid: p.GID, Groups: p.Groups},
	}
	if p.Jail {
		// The kernel forgets whose end is its own when it changes its user: the guard sees to that.
		if err := w.guardJails(); err != nil {
			return undo(err)
		}
		cmd.ExtraFiles = nil
		cmd.SysProcAttr.Credential = nil
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	}
	started := make(chan error, 1)
	w.spawn <- func() { started <- startIn(cmd, p, files) }
	if err := <-started; err != nil {
		unix.Close(out)
		return undo(err)
	}
	if err := w.groups.join(p.ID, cmd.Process.Pid); err != nil {
		cmd.Process.Kill()
		cmd.Wait()
		unix.Close(out)
		return undo(err)
	}
	w.mu.Lock()
	x.Pid = cmd.Process.Pid
	if x.Why != "" { // a kill came while it was being born
		unix.Kill(x.Pid, unix.SIGKILL)
	}
	w.mu.Unlock()
	w.deadline(p.ID, p.Deadline)
	go w.await(x, cmd, out)
	return cmd.Process.Pid, nil
}

// startIn runs on the spawning thread.
func startIn(cmd *exec.Cmd, p *Process, files []*os.File) error {
	if p.Netns >= 0 {
		own, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(own)
		if err := unix.Setns(int(files[p.Netns].Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter its network namespace: %w", err)
		}
		defer func() {
			if err := unix.Setns(own, unix.CLONE_NEWNET); err != nil {
				panic(err) // the thread would start every later monitor in a sandbox's network
			}
		}()
	}
	if p.Jail {
		return withMounts(p.Binds, files, cmd.Start)
	}
	return cmd.Start()
}

// saying is a pipe that a monitor may write to without end: what does not fit is refused.
func saying() (out int, in *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return -1, nil, fmt.Errorf("pipe: %w", err)
	}
	return p[0], os.NewFile(uintptr(p[1]), "said"), nil
}

func (w *warden) await(x *process, cmd *exec.Cmd, out int) {
	err := cmd.Wait()
	said := make([]byte, 2048)
	n, _ := unix.Read(out, said)
	unix.Close(out)
	w.groups.removeOf(x.ID)
	w.mu.Lock()
	x.Ended, x.Said = true, strings.ToValidUTF8(string(said[:max(n, 0)]), "?")
	if x.timer != nil {
		x.timer.Stop()
	}
	if x.Why == "" {
		x.Why = "exit 0"
		if err != nil {
			x.Why = err.Error()
		}
	}
	told := x.Alive
	for c := range w.watchers {
		select {
		case c <- told:
		default: // it is full: its reader lists again
			close(c)
			delete(w.watchers, c)
		}
	}
	w.mu.Unlock()
	close(x.done)
}

func (w *warden) find(id string) (*process, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x := w.procs[id]; x != nil {
		return x, nil
	}
	return nil, fmt.Errorf("monitor %s: %w", id, sandbox.ErrNotFound)
}

// kill ends a monitor and returns when nothing of it is left.
func (w *warden) kill(id, why string) error {
	x, err := w.find(id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	w.mu.Lock()
	if !x.Ended {
		if x.Why == "" {
			x.Why = why
		}
		if x.Pid > 0 {
			unix.Kill(x.Pid, unix.SIGKILL)
		}
	}
	w.mu.Unlock()
	select {
	case <-x.done:
		return nil
	case <-time.After(killBound):
		return fmt.Errorf("monitor %s does not end: %w", id, sandbox.ErrState)
	}
}

// forget drops what is known of a monitor that has ended.
func (w *warden) forget(id string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	x := w.procs[id]
	if x == nil {
		return nil
	}
	if !x.Ended {
		return fmt.Errorf("monitor %s runs: %w", id, sandbox.ErrState)
	}
	delete(w.procs, id)
	return nil
}

func (w *warden) deadline(id string, at time.Time) error {
	x, err := w.find(id)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if x.timer != nil {
		x.timer.Stop()
		x.timer = nil
	}
	if !at.IsZero() && !x.Ended {
		x.timer = time.AfterFunc(time.Until(at), func() { w.kill(id, "deadline") })
	}
	return nil
}

func (w *warden) list() []Alive {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := []Alive{}
	for _, x := range w.procs {
		out = append(out, x.Alive)
	}
	slices.SortFunc(out, func(a, b Alive) int { return a.Started.Compare(b.Started) })
	return out
}

func (w *warden) hold(name string, files []*os.File) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !namePattern.MatchString(name) || len(files) != 1 {
		return fmt.Errorf("hold %q with %d files: %w", name, len(files), sandbox.ErrInvalid)
	}
	if len(w.held) >= maxHeld {
		return fmt.Errorf("hold %s: %d files are held: %w", name, maxHeld, sandbox.ErrExhausted)
	}
	if old := w.held[name]; old != nil {
		old.Close()
	}
	w.held[name] = files[0]
	return nil
}

func (w *warden) heldFile(name string) (*os.File, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f := w.held[name]; f != nil {
		return f, nil
	}
	return nil, fmt.Errorf("held file %s: %w", name, sandbox.ErrNotFound)
}

func (w *warden) drop(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f := w.held[name]; f != nil {
		f.Close()
		delete(w.held, name)
		w.tidyMemoriesLocked()
	}
}

// watch tells the client of each end, first of those that were.
func (w *warden) watch(ctx context.Context, c *net.UnixConn) {
	ch := make(chan Alive, 256)
	w.mu.Lock()
	w.watchers[ch] = true
	var ended []Alive
	for _, x := range w.procs {
		if x.Ended {
			ended = append(ended, x.Alive)
		}
	}
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.watchers, ch)
		w.mu.Unlock()
	}()
	c.SetDeadline(time.Time{})
	gone := make(chan struct{})
	go func() {
		io.Copy(io.Discard, c) // ends with the client
		close(gone)
	}()
	enc := json.NewEncoder(c)
	tell := func(a Alive) bool {
		c.SetWriteDeadline(time.Now().Add(callBound))
		return enc.Encode(a) == nil
	}
	for _, a := range ended {
		if !tell(a) {
			return
		}
	}
	for {
		select {
		case a, ok := <-ch:
			if !ok || !tell(a) {
				return
			}
		case <-gone:
			return
		case <-ctx.Done():
			return
		}
	}
}

func (w *warden) endAll() {
	w.mu.Lock()
	var ids []string
	for id := range w.procs {
		ids = append(ids, id)
	}
	w.mu.Unlock()
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() {
			if err := w.kill(id, "killed"); err != nil {
				w.log.Error("end", "err", err)
			}
		})
	}
	wg.Wait()
}

// send writes one message with descriptors.
func send(c *net.UnixConn, v any, files []*os.File) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(text) > maxRequest || len(files) > maxFiles {
		return fmt.Errorf("warden: message of %d octets and %d files: %w", len(text), len(files), sandbox.ErrInvalid)
	}
	b := append(binary.LittleEndian.AppendUint32(nil, uint32(len(text))), text...)
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	n, _, err := c.WriteMsgUnix(b, oob, nil)
	runtime.KeepAlive(files)
	if err == nil && n < len(b) {
		_, err = c.Write(b[n:])
	}
	return err
}

// receive reads one message. The files are the caller's, also with an error.
func receive(c *net.UnixConn, v any) (files []*os.File, err error) {
	oob := make([]byte, unix.CmsgSpace(4*maxFiles))
	var buf []byte
	part := make([]byte, 32<<10)
	for {
		n, on, flags, _, err := c.ReadMsgUnix(part, oob)
		if on > 0 {
			msgs, err := unix.ParseSocketControlMessage(oob[:on])
			if err != nil {
				return files, err
			}
			for i := range msgs {
				fds, err := unix.ParseUnixRights(&msgs[i])
				if err != nil {
					continue
				}
				for _, fd := range fds {
					unix.CloseOnExec(fd)
					files = append(files, os.NewFile(uintptr(fd), "received"))
				}
			}
		}
		if err != nil {
			return files, err
		}
		if n == 0 {
			return files, io.ErrUnexpectedEOF
		}
		if flags&unix.MSG_CTRUNC != 0 || len(files) > maxFiles {
			return files, fmt.Errorf("warden: descriptors were cut off: %w", sandbox.ErrInvalid)
		}
		buf = append(buf, part[:n]...)
		if len(buf) < 4 {
			continue
		}
		size := int(binary.LittleEndian.Uint32(buf))
		if size > maxRequest {
			return files, fmt.Errorf("warden: message of %d octets: %w", size, sandbox.ErrInvalid)
		}
		if len(buf) >= 4+size {
			return files, json.Unmarshal(buf[4:4+size], v)
		}
	}
}
