package guest

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// socketpair gives two connected streams that the runtime's poller waits for.
func socketpair(t testing.TB) (a, b *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fds[0]), "host"), os.NewFile(uintptr(fds[1]), "guest")
}

// serve runs the server in this process, as the user of the test, on the machine's own root.
func serve(t testing.TB) *Files {
	t.Helper()
	host, inside := socketpair(t)
	ended := make(chan error, 1)
	go func() { ended <- ServeFiles(context.Background(), inside) }()
	f := NewFiles(host)
	t.Cleanup(func() {
		f.Close()
		if err := <-ended; err != nil {
			t.Errorf("server ended with %v", err)
		}
	})
	return f
}

var builtIn string

var built = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "dsec-guest-test-")
	if err != nil {
		return "", err
	}
	builtIn = dir
	p := filepath.Join(dir, "dsec-guest")
	cmd := exec.Command("go", "build", "-o", p, "github.com/dsec-dev/dsec/cmd/dsec-guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.New("build dsec-guest: " + string(out))
	}
	return p, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if builtIn != "" {
		os.RemoveAll(builtIn)
	}
	os.Exit(code)
}

// jail is a root folder for the real program: /proc and a few devices inside, removed with the test.
func jail(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: chroot and another user")
	}
	root := t.TempDir()
	for dir, mode := range map[string]os.FileMode{"tmp": 0o1777, "etc": 0o755, "run": 0o755, "var": 0o755, "home": 0o755, "proc": 0o755, "dev": 0o755} {
		p := filepath.Join(root, dir)
		check(t, os.Mkdir(p, 0o755))
		check(t, unix.Chmod(p, uint32(mode.Perm())|map[bool]uint32{true: unix.S_ISVTX}[dir == "tmp"]))
	}
	check(t, os.Chmod(root, 0o755))
	check(t, os.WriteFile(filepath.Join(root, "etc/passwd"), []byte("root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n"), 0o644))
	check(t, os.WriteFile(filepath.Join(root, "etc/group"), []byte("root:x:0:\nalice:x:1000:\n"), 0o644))
	check(t, os.Mkdir(filepath.Join(root, "home/alice"), 0o755))
	check(t, os.Chown(filepath.Join(root, "home/alice"), 1000, 1000))
	for name, minor := range map[string]uint32{"null": 3, "zero": 5} {
		check(t, unix.Mknod(filepath.Join(root, "dev", name), unix.S_IFCHR|0o666, int(unix.Mkdev(1, minor))))
		check(t, os.Chmod(filepath.Join(root, "dev", name), 0o666))
	}
	return root
}

// serveIn runs the real program in the root as a user. The folders of t.TempDir above are closed to others, so the program enters
// the root before it changes the user, as process 1 does.
func serveIn(t testing.TB, root string, uid int) *Files {
	t.Helper()
	f, _ := startIn(t, root, uid)
	return f
}

// startIn also gives the program's pid.
func startIn(t testing.TB, root string, uid int) (*Files, int) {
	t.Helper()
	p, err := built()
	check(t, err)
	prog := filepath.Join(root, ".dsec-guest")
	if _, err := os.Stat(prog); err != nil {
		b, err := os.ReadFile(p)
		check(t, err)
		check(t, os.WriteFile(prog, b, 0o755))
	}
	host, inside := socketpair(t)
	cmd := exec.Command("/.dsec-guest")
	cmd.Path = "/.dsec-guest"
	cmd.ExtraFiles = []*os.File{inside}
	var said strings.Builder
	cmd.Stderr = &said
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	check(t, cmd.Start())
	inside.Close()
	f := NewFiles(host)
	t.Cleanup(func() {
		f.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("dsec-guest: %v %s", err, said.String())
		}
	})
	return f, cmd.Process.Pid
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func readAll(t testing.TB, f *Files, path string, off, n int64) string {
	t.Helper()
	r, err := f.Read(within(t), path, off, n)
	check(t, err)
	defer r.Close()
	b, err := io.ReadAll(r)
	check(t, err)
	return string(b)
}

func write(t testing.TB, f *Files, h WriteHeader, body string) WriteResult {
	t.Helper()
	h.Size = int64(len(body))
	r, err := f.Write(within(t), h, strings.NewReader(body))
	check(t, err)
	return r
}

func wantErr(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}
