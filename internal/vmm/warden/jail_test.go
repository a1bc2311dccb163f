package warden_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// jailer does what the operator's does as far as the warden has to do with it: it is root, becomes another user and runs a program in
// the same process.
func jailer(file string, argv []string) int {
	text, err := os.ReadFile(file)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	made, err := os.Create(filepath.Join(filepath.Dir(file), "made"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	st, _ := made.Stat()
	made.Close()
	fmt.Printf("%d %d %s %v\n", os.Getuid(), os.Getpid(), text, st.Mode())
	for _, err := range []error{syscall.Setgid(uid), syscall.Setuid(uid), syscall.Exec(argv[0], argv, nil)} {
		if err != nil {
			fmt.Println(err)
			return 1
		}
	}
	return 0
}

func jail(t *testing.T, id, file string, argv ...string) (*warden.Process, string) {
	t.Helper()
	at := filepath.Join(t.TempDir(), "inside")
	if err := os.WriteFile(at, []byte("the host's"), 0o644); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := shell(id, "")
	p.Argv = append([]string{self, "jailer", at}, argv...)
	p.Jail, p.Binds = true, []warden.Bind{{File: 0, At: at}}
	return p, at
}

// jailed starts a jail that sleeps as its own user, with a file mounted at a place.
func (r *rig) jailed(t *testing.T, id string) (f *os.File, pid int, at string) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	f.WriteString("mounted")
	p, at := jail(t, id, f.Name(), "/bin/sleep", "300")
	if pid, err = r.Start(within(t), p, f); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); owner(pid) != uid; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("its user is %d", owner(pid))
		}
	}
	return f, pid, at
}

// A jailer finds files mounted that nobody else sees, is the first process of its own namespace, and makes files that others may read.
func TestJailSeesItsFilesAlone(t *testing.T) {
	r := start(t)
	f, pid, at := r.jailed(t, "j1")
	if text, err := os.ReadFile(at); err != nil || string(text) != "the host's" {
		t.Errorf("the host sees %q, %v", text, err)
	}
	if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s", pid, at)); err != nil || string(text) != "mounted" {
		t.Errorf("the jail sees %q, %v", text, err)
	}
	if err := r.Kill(within(t), "j1"); err != nil {
		t.Fatal(err)
	}
	if a := r.wait(t, "j1"); !strings.HasPrefix(a.Said, "0 1 mounted -rw-r--r--\n") {
		t.Errorf("it says %q", a.Said)
	}
	for name, change := range map[string]func(*warden.Process){
		"mounts without a jail": func(p *warden.Process) { p.Jail = false },
		"a file that is none":   func(p *warden.Process) { p.Binds[0].File = 1 },
		"a relative place":      func(p *warden.Process) { p.Binds[0].At = "inside" },
	} {
		p, _ := jail(t, "j2", f.Name(), "/bin/true")
		change(p)
		if _, err := r.Start(within(t), p, f); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	// What can't be mounted is refused, and leaves nothing.
	fd, err := unix.MemfdCreate("none", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	m := os.NewFile(uintptr(fd), "none")
	defer m.Close()
	p, _ := jail(t, "j3", "", "/bin/true")
	if _, err := r.Start(within(t), p, m); err == nil || !strings.Contains(err.Error(), "can't be mounted") {
		t.Errorf("a memory file: %v", err)
	}
}

func owner(pid int) uint32 {
	var st unix.Stat_t
	if unix.Stat(fmt.Sprintf("/proc/%d", pid), &st) != nil {
		return 0
	}
	return st.Uid
}

// kill -9 of the warden ends jails too, although these have changed their user.
func TestDeadWardenEndsJails(t *testing.T) {
	r := start(t)
	_, pid, _ := r.jailed(t, "j1")
	out, err := exec.Command("pgrep", "-f", "warden --dir "+r.dir).Output()
	if err != nil {
		t.Fatalf("find the warden: %v", err)
	}
	var w int
	fmt.Sscan(string(out), &w)
	if err := unix.Kill(w, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); unix.Kill(pid, 0) == nil; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			unix.Kill(pid, unix.SIGKILL)
			t.Fatal("the jail lives on")
		}
	}
	r.again(t)
}

// liar asks for a machine's memory and says nonsense.
func liar(sock string) int {
	c, err := net.Dial("unix", sock)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	text, _ := json.Marshal([]string{})
	null, _ := os.Open("/dev/null")
	c.(*net.UnixConn).WriteMsgUnix(text, unix.UnixRights(int(null.Fd())), nil)
	time.Sleep(5 * time.Minute)
	return 0
}

// A monitor whose memory can't be served would stand still for ever: it is ended, and its end says why. Another one's is not touched.
func TestMonitorThatLiesAboutItsMemory(t *testing.T) {
	r := start(t)
	dir, err := os.MkdirTemp("/tmp", "dsec-pages-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/test", self, 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dir + "/s", Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Chmod(dir+"/s", 0o777); err != nil {
		t.Fatal(err)
	}
	lf, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer lf.Close()
	m, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	if err := r.Pages(within(t), "l1", lf, m); err != nil {
		t.Fatal(err)
	}
	p := shell("l1", "")
	p.Argv = []string{dir + "/test", "liar", dir + "/s"}
	if _, err := r.Start(within(t), p); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(within(t), shell("l2", "sleep 300")); err != nil {
		t.Fatal(err)
	}
	if a := r.wait(t, "l1"); !strings.Contains(a.Why, "its memory could not be served") {
		t.Errorf("%+v", a)
	}
	list, err := r.List(within(t))
	if err != nil || len(list) != 2 || list[1].Ended {
		t.Errorf("%+v, %v", list, err)
	}
	if err := r.Pages(within(t), "l3", m, m); err == nil {
		t.Errorf("a file was taken for a listener: %v", err)
	}
}
