package trace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// rig is a kernel's tracer and groups as a host has them.
type rig struct {
	k   *Kernel
	top string
	box string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads programs into the kernel")
	}
	v2 := ""
	for _, at := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		var st unix.Statfs_t
		if unix.Statfs(at, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			v2 = at
			break
		}
	}
	if v2 == "" {
		t.Skip("needs cgroup v2: it is not mounted")
	}
	k, err := Open(slog.New(slog.DiscardHandler))
	if errors.Is(err, sandbox.ErrUnsupported) {
		t.Skip("needs BPF with type information: " + err.Error())
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	r := &rig{k: k, top: filepath.Join(v2, fmt.Sprintf("dsec-trace-test-%d", os.Getpid()))}
	r.box = filepath.Join(r.top, "box")
	for _, d := range []string{r.top, r.box, filepath.Join(r.box, "cmd-0"), filepath.Join(r.box, "cmd-1")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := k.Close(); err != nil {
			t.Error(err)
		}
		for _, d := range []string{filepath.Join(r.box, "cmd-0"), filepath.Join(r.box, "cmd-1"), r.box, r.top} {
			for range 100 {
				if os.Remove(d) == nil {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
	})
	return r
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// run runs a command in a group.
func (r *rig) run(t *testing.T, group string, argv ...string) error {
	t.Helper()
	f, err := os.Open(filepath.Join(r.box, group))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c := exec.Command(argv[0], argv[1:]...)
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	return c.Run()
}

func TestKernelTellsProcesses(t *testing.T) {
	r := newRig(t)
	w, err := r.k.Watch(inode(t, r.box), sandbox.TraceLight)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	file := filepath.Join(t.TempDir(), "f")
	if err := r.run(t, "cmd-0", "/bin/sh", "-c", "/bin/echo 'two words'; dd if=/dev/zero of="+file+" bs=64k count=16 2>/dev/null; exit 3"); err == nil {
		t.Fatal("exit 3 is no error")
	}
	if err := r.run(t, "cmd-1", "/bin/true", "other"); err != nil {
		t.Fatal(err)
	}
	s := w.Take(inode(t, filepath.Join(r.box, "cmd-0")))
	var argv []string
	for _, p := range s.Processes {
		argv = append(argv, strings.Join(p.Args, "|"))
	}
	if len(argv) != 3 || !strings.HasPrefix(argv[0], "/bin/sh|-c|/bin/echo") || argv[1] != "/bin/echo|two words" || !strings.HasPrefix(argv[2], "dd|if=") {
		t.Fatalf("%q", argv)
	}
	if p := s.Processes[0]; !p.Ended || p.Code != 3 || p.CPU <= 0 {
		t.Errorf("the shell: %+v", p)
	}
	if s.Processes[1].Parent != s.Processes[0].Pid {
		t.Errorf("parents: %+v", s.Processes)
	}
	if s.WriteBytes < 1<<20 {
		t.Errorf("%d octets written, want 1 MiB", s.WriteBytes)
	}
	if len(s.Reads)+len(s.Connections) != 0 {
		t.Errorf("light tells %v %v", s.Reads, s.Connections)
	}
	if again := w.Take(inode(t, filepath.Join(r.box, "cmd-0"))); len(again.Processes) != 0 || again.WriteBytes != 0 || again.MoreProcesses != 0 {
		t.Errorf("told twice: %+v", again)
	}
	if s := w.Take(inode(t, filepath.Join(r.box, "cmd-1"))); len(s.Processes) != 1 || s.Processes[0].Args[1] != "other" {
		t.Errorf("the other group: %+v", s)
	}
}

func TestKernelBoundsWhatItHolds(t *testing.T) {
	r := newRig(t)
	w, err := r.k.Watch(inode(t, r.box), sandbox.TraceLight)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	const n = maxExecs + 150
	if err := r.run(t, "cmd-0", "/bin/sh", "-c", fmt.Sprintf("i=0; while [ $i -lt %d ]; do /bin/true %s; i=$((i+1)); done", n, strings.Repeat("x", 2000))); err != nil {
		t.Fatal(err)
	}
	s := w.Take(inode(t, filepath.Join(r.box, "cmd-0")))
	if len(s.Processes) != maxExecs || s.MoreProcesses != n+1-maxExecs {
		t.Fatalf("%d and %d more, want %d and %d", len(s.Processes), s.MoreProcesses, maxExecs, n+1-maxExecs)
	}
	p := s.Processes[5]
	if len(strings.Join(p.Args, " ")) > textSize || p.Octets != int64(len("/bin/true")+1+2000+1) {
		t.Errorf("%d octets of %d", len(strings.Join(p.Args, " ")), p.Octets)
	}
}

func TestKernelTellsReadsAndConnections(t *testing.T) {
	r := newRig(t)
	w, err := r.k.Watch(inode(t, r.box), sandbox.TraceFull)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if why := r.k.Full(); why != "" {
		t.Skip("needs tracing of functions: " + why)
	}
	dir := t.TempDir()
	lower, upper, work, at := filepath.Join(dir, "l"), filepath.Join(dir, "u"), filepath.Join(dir, "w"), filepath.Join(dir, "m")
	for _, d := range []string{lower, upper, work, at} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(lower, "seen"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("dsec-test", at, "overlay", 0, "lowerdir="+lower+",upperdir="+upper+",workdir="+work); err != nil {
		t.Skip("needs overlayfs: " + err.Error())
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	script := fmt.Sprintf("cat %[1]s/seen %[1]s/seen >/dev/null; echo y >%[1]s/written; exec 3<>/dev/tcp/127.0.0.1/%[2]d", at, port)
	group := inode(t, filepath.Join(r.box, "cmd-0"))
	for range 2 { // what one step read is news in the next
		if err := r.run(t, "cmd-0", "/bin/bash", "-c", script); err != nil {
			t.Fatal(err)
		}
		s := w.Take(group)
		var paths []string
		for _, x := range s.Reads {
			paths = append(paths, x.Path)
		}
		if len(paths) != 1 || paths[0] != "/seen" {
			t.Errorf("read %q, want /seen once", paths)
		}
		if len(s.Connections) != 1 || s.Connections[0].Error != 0 || int(s.Connections[0].To.Port()) != port || s.Connections[0].To.Addr().String() != "127.0.0.1" {
			t.Errorf("connections %+v", s.Connections)
		}
	}
}

// Where loading programs is not permitted the reason is told, as unsupported, and nothing is left in the kernel.
func TestKernelNotPermitted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: gives up the right to load programs")
	}
	type answer struct {
		k   *Kernel
		err error
	}
	c := make(chan answer)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its capabilities
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&hdr, &none[0]); err != nil {
			c <- answer{err: err}
			return
		}
		k, err := Open(slog.New(slog.DiscardHandler))
		c <- answer{k, err}
	}()
	a := <-c
	if a.k != nil || !errors.Is(a.err, sandbox.ErrUnsupported) || !strings.Contains(a.err.Error(), "not permitted") {
		t.Fatalf("%v %v", a.k, a.err)
	}
}
