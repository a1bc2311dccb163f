package initproc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/guest/wire"
	"golang.org/x/sys/unix"
)

// base is the first host id of the tests' sandboxes; process 1 is the id after the range.
const base = 1_700_000_000

const longest = 2 * time.Minute // bound of every wait here

type box struct {
	t     testing.TB
	conn  *wire.Conn
	pid   int
	root  string
	mu    sync.Mutex
	next  uint64
	cmds  map[uint64]*proc
	ended chan struct{}
}

// proc is a command as its frames told it.
type proc struct {
	b        *box
	id       uint64
	started  chan struct{} // STARTED or FAILED came
	exited   chan struct{} // EXITED came
	hello    wire.Started
	failed   *wire.Failed
	exit     wire.Exited
	pidfd    int
	master   *os.File
	listener int
	stdin    *os.File
	out, err *os.File
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	if _, err := os.Stat("/bin/busybox"); err != nil {
		t.Skip("needs a static busybox")
	}
}

// tree makes a small root file system whose files belong to the sandbox's root.
func tree(t testing.TB, programs ...string) string {
	t.Helper()
	dir := t.TempDir()
	os.Chmod(dir, 0o755)
	for p := dir; p != "/"; p = filepath.Dir(p) { // t.TempDir's parents are 0700
		if st, err := os.Stat(p); err == nil && st.Mode().Perm()&1 == 0 {
			os.Chmod(p, st.Mode()|0o111)
		}
	}
	for _, d := range []string{"bin", "dev", "proc", "etc", "tmp", "root", "home/alice", "work", "closed", "usr/bin"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	os.Chmod(filepath.Join(dir, "tmp"), 0o777|os.ModeSticky)
	os.Chmod(filepath.Join(dir, "closed"), 0o700)
	copyFile(t, "/bin/busybox", filepath.Join(dir, "bin/busybox"))
	applets, err := exec.Command("/bin/busybox", "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range strings.Fields(string(applets)) {
		os.Symlink("busybox", filepath.Join(dir, "bin", a))
	}
	for _, p := range programs {
		os.Remove(filepath.Join(dir, "bin", filepath.Base(p)))
		copyFile(t, p, filepath.Join(dir, "bin", filepath.Base(p)))
		libs, _ := exec.Command("ldd", p).Output()
		for _, f := range strings.Fields(string(libs)) {
			if strings.HasPrefix(f, "/") {
				to := filepath.Join(dir, f)
				os.MkdirAll(filepath.Dir(to), 0o755)
				copyFile(t, f, to)
			}
		}
	}
	write := func(name, text string, mode os.FileMode) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		os.Chmod(filepath.Join(dir, name), mode)
	}
	write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n# comment\nbad:x:x:1::\n"+
		"nobody:x:65534:65534:nobody:/nonexistent:/bin/false\nlong"+strings.Repeat("g", 3000)+":x:7:7::/:\n1234:x:50:51::/tmp:/bin/sh", 0o644)
	write("etc/group", "root:x:0:\nadm:x:4:syslog,alice\nalice:x:1000:\nvideo:x:44:alice,bob\nbig:x:70000:alice\nnogroup:x:65534:", 0o644)
	write("work/noexec.sh", "#!/bin/sh\necho hi\n", 0o644)
	write("work/nointerp", "#!/no/interp -x\n", 0o755)
	write("work/crlf", "#!/bin/sh\r\necho hi\r\n", 0o755)
	write("work/noformat", "echo hi\n", 0o755)
	write("work/empty", "", 0o755)
	write("work/ok.sh", "#!/bin/sh\necho script\n", 0o755)
	elf, _ := os.ReadFile("/bin/busybox")
	arm := append([]byte(nil), elf[:4096]...)
	arm[18], arm[19] = 183, 0
	write("work/arm", string(arm), 0o755)
	if dyn, err := os.ReadFile("/bin/ls"); err == nil {
		write("work/noloader", string(bytes.ReplaceAll(dyn, []byte("/lib64/ld-linux"), []byte("/nib64/ld-linux"))), 0o755)
	}
	err = filepath.Walk(dir, func(p string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		id := base
		if strings.HasPrefix(p, filepath.Join(dir, "home/alice")) {
			id += 1000
		}
		if err := os.Lchown(p, id, id); err != nil {
			return err
		}
		if info.Mode()&os.ModeSymlink == 0 {
			return os.Chmod(p, info.Mode())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func copyFile(t testing.TB, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Skipf("needs %s", from)
	}
	if err := os.WriteFile(to, b, 0o755); err != nil {
		t.Fatal(err)
	}
}

func must[T any](v T, err error) func(t testing.TB, what string) T {
	return func(t testing.TB, what string) T {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		return v
	}
}

// devTree is a detached tmpfs with the nodes of a sandbox's /dev.
func devTree(t testing.TB) int {
	fs := must(unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC))(t, "fsopen")
	defer unix.Close(fs)
	unix.FsconfigSetString(fs, "mode", "0755")
	if err := unix.FsconfigCreate(fs); err != nil {
		t.Fatal(err)
	}
	m := must(unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC))(t, "fsmount")
	for name, dev := range map[string][2]uint32{"null": {1, 3}, "zero": {1, 5}, "full": {1, 7}, "random": {1, 8}, "urandom": {1, 9}, "tty": {5, 0}} {
		if err := unix.Mknodat(m, name, unix.S_IFCHR|0o666, int(unix.Mkdev(dev[0], dev[1]))); err != nil {
			t.Fatal(err)
		}
		unix.Fchmodat(m, name, 0o666, 0)
	}
	for _, d := range []string{"pts", "shm", "mqueue"} {
		unix.Mkdirat(m, d, 0o755)
	}
	for _, l := range [][2]string{{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}, {"pts/ptmx", "ptmx"}} {
		unix.Symlinkat(l[0], m, l[1])
	}
	return m
}

// userns is a user namespace of 65536 ids from base on.
func userns(t testing.TB) int {
	c := exec.Command("/bin/busybox", "sleep", "100")
	maps := []syscall.SysProcIDMap{{ContainerID: 0, HostID: base, Size: 65536}}
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: maps, GidMappings: maps, GidMappingsEnableSetgroups: true}
	if err := c.Start(); err != nil {
		t.Skipf("needs user namespaces: %v", err)
	}
	defer func() { c.Process.Kill(); c.Wait() }()
	return must(unix.Open(fmt.Sprintf("/proc/%d/ns/user", c.Process.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0))(t, "user namespace")
}

// spawn starts process 1 and returns the host's end, before BIRTH.
func spawn(t testing.TB) (*wire.Conn, *os.Process) {
	t.Helper()
	image := must(Open())(t, "image")
	defer image.Close()
	conn, guest, err := wire.Pair()
	if err != nil {
		t.Fatal(err)
	}
	g := os.NewFile(uintptr(guest), "guest")
	defer g.Close()
	null := must(os.OpenFile("/dev/null", os.O_RDWR, 0))(t, "null")
	defer null.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p, err := os.StartProcess(fmt.Sprintf("/proc/self/fd/%d", image.Fd()), []string{"dsec-init"}, &os.ProcAttr{
		Dir: "/", Env: []string{}, Files: []*os.File{null, null, null, g},
		Sys: &syscall.SysProcAttr{Setsid: true, Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC | syscall.CLONE_NEWNET},
	})
	if err != nil {
		t.Skipf("needs namespaces: %v", err)
	}
	t.Cleanup(func() {
		conn.Close()
		done := make(chan struct{})
		go func() { p.Wait(); close(done) }()
		select {
		case <-done:
		case <-time.After(longest):
			t.Errorf("process 1 outlived its stream")
			p.Kill()
			<-done
		}
	})
	return conn, p
}

// birthOps is a usual birth; descriptors 0 root, 1 dev, 2 userns.
func birthOps() []string {
	ops := []string{wire.Op("private"), wire.OpFD("root", 0), wire.OpFD("move", 1, "/dev"), wire.Op("devpts", "/dev/pts", strconv.Itoa(base+5)),
		wire.Op("proc", "/proc"), wire.Op("sysctl", "sys/kernel/shm_rmid_forced", "0"), wire.Op("hostname", "box")}
	for _, m := range []string{"kcore", "keys", "timer_list", "sysrq-trigger", "scsi", "acpi", "nosuch/file"} {
		ops = append(ops, wire.Op("mask", "/proc/"+m))
	}
	return append(ops, wire.Op("ro", "/proc/sys"), wire.Op("pivot"), wire.OpFD("userns", 2))
}

func newBox(t testing.TB, root string, change func(*wire.Birth)) *box {
	t.Helper()
	needRoot(t)
	conn, p := spawn(t)
	fds := []int{must(unix.OpenTree(unix.AT_FDCWD, root, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC))(t, "open_tree"), devTree(t), userns(t)}
	birth := wire.Birth{UID: base + 65536, Ops: birthOps(), Caps: confine.Caps, Env: []string{"LANG=C", "BASE=1"},
		Rlimits: []wire.Rlimit{{Resource: unix.RLIMIT_CORE}, {Resource: unix.RLIMIT_NOFILE, Soft: 1024, Hard: 65536}}}
	if change != nil {
		change(&birth)
	}
	if err := conn.Send(wire.TBirth, 0, birth, fds...); err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	conn.SetDeadline(time.Now().Add(longest))
	f, err := conn.ReadFrame()
	if err != nil {
		t.Fatal(err)
	}
	if f.Type != wire.THello {
		m, _ := wire.DecodeFailed(f.Body)
		t.Fatalf("%s: %+v", f.Type, m)
	}
	conn.SetDeadline(time.Time{})
	if m, err := wire.DecodeHello(f.Body); err != nil || m.Version != wire.Version || m.Features != 7 {
		t.Fatalf("HELLO %+v, %v", m, err)
	}
	b := &box{t: t, conn: conn, pid: p.Pid, root: root, cmds: map[uint64]*proc{}, ended: make(chan struct{})}
	go b.read()
	t.Cleanup(func() { conn.Close(); <-b.ended })
	return b
}

func (b *box) read() {
	defer close(b.ended)
	for {
		f, err := b.conn.ReadFrame()
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) && !strings.Contains(err.Error(), "closed") {
				b.t.Errorf("stream: %v", err)
			}
			return
		}
		b.mu.Lock()
		p := b.cmds[f.ID]
		b.mu.Unlock()
		if p == nil {
			b.t.Errorf("%s of unknown command %d", f.Type, f.ID)
			continue
		}
		switch f.Type {
		case wire.TStarted:
			if p.hello, err = wire.DecodeStarted(f.Body); err != nil || len(f.FDs) == 0 {
				b.t.Errorf("STARTED %+v, %v, %d descriptors", p.hello, err, len(f.FDs))
				continue
			}
			p.pidfd = f.FDs[0]
			if len(f.FDs) > 1 {
				unix.SetNonblock(f.FDs[1], true)
				p.master = os.NewFile(uintptr(f.FDs[1]), "master")
			}
			close(p.started)
		case wire.TFailed:
			m, err := wire.DecodeFailed(f.Body)
			if err != nil {
				b.t.Error(err)
			}
			p.failed = &m
			close(p.started)
		case wire.TListener:
			p.listener = f.FDs[0]
		case wire.TExited:
			select {
			case <-p.started:
			default:
				b.t.Errorf("EXITED of %d before STARTED", f.ID)
			}
			if p.exit, err = wire.DecodeExited(f.Body); err != nil {
				b.t.Error(err)
			}
			close(p.exited)
		case wire.TPong:
			close(p.exited)
		}
	}
}

func (b *box) register() *proc {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.next++
	p := &proc{b: b, id: b.next, started: make(chan struct{}), exited: make(chan struct{}), pidfd: -1, listener: -1}
	b.cmds[p.id] = p
	return p
}

// start starts a command with pipes that the range's root owns, as the keeper makes them.
func (b *box) start(s wire.Start, cgroup int) *proc {
	b.t.Helper()
	p := b.register()
	var give []*os.File
	if s.Flags&wire.StartTerminal == 0 {
		var other [3]*os.File
		for i := range 3 {
			r, w, err := os.Pipe()
			if err != nil {
				b.t.Fatal(err)
			}
			r.Chown(base, base)
			if i == 0 {
				other[i], give = w, append(give, r)
			} else {
				other[i], give = r, append(give, w)
			}
		}
		p.stdin, p.out, p.err = other[0], other[1], other[2]
	}
	var fds []int
	for _, f := range give {
		fds = append(fds, int(f.Fd()))
	}
	if err := b.conn.Send(wire.TStart, p.id, s, wire.StartFDs(cgroup, fds...)...); err != nil {
		b.t.Fatal(err)
	}
	for _, f := range give {
		f.Close()
	}
	b.wait(p.started)
	b.t.Cleanup(func() {
		if p.pidfd >= 0 {
			unix.Close(p.pidfd)
		}
		for _, f := range []*os.File{p.stdin, p.out, p.err, p.master} {
			if f != nil {
				f.Close()
			}
		}
	})
	return p
}

func (b *box) wait(c <-chan struct{}) {
	b.t.Helper()
	select {
	case <-c:
	case <-b.ended:
		select {
		case <-c:
		default:
			b.t.Fatal("process 1 ended")
		}
	case <-time.After(longest):
		b.t.Fatal("no answer from process 1")
	}
}

// result is what a finished command left.
type result struct {
	Code     int // exit code, or -signal
	Out, Err string
}

func (p *proc) finish(stdin string) result {
	p.b.t.Helper()
	if p.failed != nil {
		p.b.t.Fatalf("not started: %+v", *p.failed)
	}
	if p.stdin != nil {
		go func() { io.WriteString(p.stdin, stdin); p.stdin.Close() }()
	}
	p.out.SetReadDeadline(time.Now().Add(longest))
	p.err.SetReadDeadline(time.Now().Add(longest))
	var out, err []byte
	var wg sync.WaitGroup
	wg.Go(func() { out, _ = io.ReadAll(p.out) })
	wg.Go(func() { err, _ = io.ReadAll(p.err) })
	wg.Wait()
	p.b.wait(p.exited)
	ws := syscall.WaitStatus(p.exit.Status)
	code := ws.ExitStatus()
	if ws.Signaled() {
		code = -int(ws.Signal())
	}
	return result{Code: code, Out: string(out), Err: string(err)}
}

func (b *box) run(s wire.Start) result {
	b.t.Helper()
	return b.start(s, -1).finish("")
}

func (b *box) sh(script string) result {
	b.t.Helper()
	return b.run(wire.Start{Argv: []string{"sh", "-c", script}})
}
