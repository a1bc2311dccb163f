package warden_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "warden" {
		os.Exit(warden.Main(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == "jailer" {
		os.Exit(jailer(os.Args[2], os.Args[3:]))
	}
	if len(os.Args) > 1 && os.Args[1] == "liar" {
		os.Exit(liar(os.Args[2]))
	}
	if len(os.Args) > 1 && os.Args[1] == "punch" {
		os.Exit(punch())
	}
	os.Exit(m.Run())
}

const uid = 0x7fbf0000

type rig struct {
	*warden.Client
	dir, instance string
}

func start(t *testing.T) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	r := &rig{dir: t.TempDir(), instance: fmt.Sprintf("w%d", os.Getpid())}
	r.again(t)
	t.Cleanup(func() {
		r.Shutdown(context.Background())
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			if err := warden.Sweep(r.dir, r.instance); err == nil {
				break
			} else if time.Now().After(end) {
				t.Errorf("sweep: %v", err)
				break
			}
		}
		if left := r.groups(); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	})
	return r
}

func (r *rig) again(t *testing.T) {
	t.Helper()
	c, err := warden.Spawn(within(t), os.Args[0], []string{"warden"}, r.dir, r.instance)
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(r.dir, warden.LogName))
		t.Fatalf("%v\n%s", err, log)
	}
	r.Client = c
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func (r *rig) groups() (out []string) {
	for _, top := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/cpu"} {
		if _, err := os.Stat(filepath.Join(top, "dsec-"+r.instance+"-vm")); err == nil {
			out = append(out, top)
		}
	}
	return out
}

func shell(id, text string) *warden.Process {
	return &warden.Process{ID: id, Argv: []string{"/bin/sh", "-c", text}, UID: uid, GID: uid, Netns: -1, Memory: 64 << 20, Pids: 16, CPU: 500, Weight: 50}
}

// running are the processes of the monitors' user that have not ended; where process 1 reaps nothing, ended ones stay.
func running() (out []string) {
	pids, _ := exec.Command("pgrep", "-u", fmt.Sprint(uid)).Output()
	for _, pid := range strings.Fields(string(pids)) {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		if err == nil && !strings.Contains(string(stat), ") Z ") {
			out = append(out, pid)
		}
	}
	return out
}

func (r *rig) wait(t *testing.T, id string) warden.Alive {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		list, err := r.List(within(t))
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range list {
			if a.ID == id && a.Ended {
				return a
			}
		}
	}
	t.Fatalf("%s does not end", id)
	return warden.Alive{}
}

func TestMonitorGetsItsFilesAndItsUser(t *testing.T) {
	r := start(t)
	f, err := os.Open("/etc/hostname")
	if err != nil {
		t.Skip("skip: no /etc/hostname")
	}
	defer f.Close()
	if _, err := r.Start(within(t), shell("m1", "id -u; cat <&3 >/dev/null && echo read; cat /proc/self/cgroup | grep -c m1; exit 3"), f); err != nil {
		t.Fatal(err)
	}
	a := r.wait(t, "m1")
	if a.Why != "exit status 3" || !strings.HasPrefix(a.Said, fmt.Sprintf("%d\nread\n", uid)) {
		t.Errorf("%+v", a)
	}
	if _, err := r.Start(within(t), shell("m1", "true")); !errors.Is(err, sandbox.ErrExists) {
		t.Errorf("an ID that is remembered: %v, want ErrExists", err)
	}
	if err := r.Forget(within(t), "m1"); err != nil {
		t.Fatal(err)
	}
	p := shell("m2", "true")
	p.UID = 0
	if _, err := r.Start(within(t), p); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a monitor as root: %v, want ErrInvalid", err)
	}
}

func TestDeadlineAndKillLeaveNothing(t *testing.T) {
	r := start(t)
	for id, text := range map[string]string{"k1": "trap '' TERM; (setsid sleep 300 &); sleep 300", "d1": "sleep 300 & sleep 300"} {
		if _, err := r.Start(within(t), shell(id, text)); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.SetDeadline(within(t), "d1", time.Now().Add(100*time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if err := r.Kill(within(t), "k1"); err != nil {
		t.Fatal(err)
	}
	if a := r.wait(t, "k1"); a.Why != "killed" {
		t.Errorf("%+v", a)
	}
	if a := r.wait(t, "d1"); a.Why != "deadline" {
		t.Errorf("%+v", a)
	}
	if out := running(); len(out) > 0 {
		t.Errorf("processes are left: %s", out)
	}
	if err := r.Kill(within(t), "never"); err != nil {
		t.Errorf("kill of an unknown one: %v", err)
	}
}

// What a monitor writes without end is dropped, and does not stop it.
func TestMonitorThatWritesWithoutEnd(t *testing.T) {
	r := start(t)
	if _, err := r.Start(within(t), shell("w1", "dd if=/dev/zero bs=64k count=100 2>/dev/null; exit 4")); err != nil {
		t.Fatal(err)
	}
	if a := r.wait(t, "w1"); len(a.Said) > 2048 {
		t.Errorf("%d octets are told", len(a.Said))
	}
}

// A start whose client gives up at any moment leaves no monitor, also when its kill is faster than the start.
func TestStartThatIsGivenUp(t *testing.T) {
	r := start(t)
	for i := range 60 {
		id := fmt.Sprintf("g%d", i)
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%20)*300*time.Microsecond)
		r.Start(ctx, shell(id, "sleep 300")) // whatever became of it
		cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := r.Kill(within(t), id); err != nil {
				t.Errorf("kill: %v", err)
			}
		})
		wg.Wait()
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		out := running()
		if len(out) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("monitors are left: %s", out)
		}
	}
}

// kill -9 of the warden ends its monitors, and the next one removes their groups.
func TestDeadWarden(t *testing.T) {
	r := start(t)
	if _, err := r.Start(within(t), shell("x1", "exec sleep 300")); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- r.Watch(within(t), func(warden.Alive) {}) }()
	out, err := exec.Command("pgrep", "-f", "warden --dir "+r.dir).Output()
	if err != nil {
		t.Fatalf("find the warden: %v", err)
	}
	var pid int
	fmt.Sscan(string(out), &pid)
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, sandbox.ErrLost) {
		t.Errorf("watch of a dead warden: %v, want ErrLost", err)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if len(running()) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("its monitor lives on")
		}
	}
	r.again(t)
	if list, err := r.List(within(t)); err != nil || len(list) != 0 {
		t.Errorf("the next one knows %v, %v", list, err)
	}
}

func TestHeldFile(t *testing.T) {
	r := start(t)
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.WriteString("kept")
	if err := r.Hold(within(t), "a-memory", f); err != nil {
		t.Fatal(err)
	}
	h, err := r.Held(within(t), "a-memory")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	b := make([]byte, 4)
	if _, err := h.ReadAt(b, 0); err != nil || string(b) != "kept" {
		t.Errorf("%q, %v", b, err)
	}
	if err := r.Drop(within(t), "a-memory"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Held(within(t), "a-memory"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("after its drop: %v", err)
	}
}

// The lock of a dead warden's folder may be held a moment longer, by a monitor that it was about to start or by another sweep: whoever sweeps
// waits for it, and so does whoever starts the next warden.
func TestLockHeldForAMoment(t *testing.T) {
	r := start(t)
	if err := r.Shutdown(within(t)); err != nil {
		t.Fatal(err)
	}
	hold := func() {
		t.Helper()
		lock, err := os.OpenFile(filepath.Join(r.dir, "warden.lock"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(200*time.Millisecond, func() { lock.Close() })
	}
	hold()
	left := filepath.Join("/sys/fs/cgroup", "dsec-"+r.instance+"-vm", "box")
	if _, err := os.Stat("/sys/fs/cgroup/unified"); err == nil {
		left = filepath.Join("/sys/fs/cgroup/unified", "dsec-"+r.instance+"-vm", "box")
	}
	if err := os.MkdirAll(left, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := r.Sweep(within(t), r.instance); err != nil {
		t.Errorf("sweep: %v", err)
	}
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it was not swept: %v", err)
	}
	hold()
	r.again(t)
}
