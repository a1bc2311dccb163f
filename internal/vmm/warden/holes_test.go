package warden_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/memfile"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// punch makes a hole in each of the files that it got, as a monitor does that gives up its machine's pages.
func punch() int {
	for fd := 3; fd < 6; fd++ {
		err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 8192)
		fmt.Print(fd, " ", err, "; ")
	}
	return 0
}

// A hole in a sealed file is answered as made, and nothing is; in other files, and where it is refused for another reason, it is as without us.
func TestHolesInSealedMemory(t *testing.T) {
	r := start(t)
	data := bytes.Repeat([]byte("x"), 16384)
	memory := func() *os.File {
		fd, err := unix.MemfdCreate("dsec-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		return os.NewFile(uintptr(fd), "memory")
	}
	at := filepath.Join(t.TempDir(), "read-only")
	if err := os.WriteFile(at, data, 0o644); err != nil {
		t.Fatal(err)
	}
	sealed, open := memory(), memory()
	refusing, err := os.Open(at)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []*os.File{sealed, open} {
		if _, err := f.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	if err := memfile.Seal(sealed.Fd()); err != nil {
		t.Fatal(err)
	}
	p := &warden.Process{ID: "puncher", Argv: []string{program(t), "punch"}, UID: uid, GID: uid, Netns: -1, Memory: 256 << 20, Pids: 64}
	if _, err := r.Start(within(t), p, sealed, open, refusing); err != nil {
		t.Fatal(err)
	}
	if got, want := r.wait(t, "puncher").Said, "3 <nil>; 4 <nil>; 5 bad file descriptor; "; got != want {
		t.Errorf("the monitor was told %q, want %q", got, want)
	}
	want := append(make([]byte, 8192), data[8192:]...)
	for name, c := range map[string]struct {
		f    *os.File
		want []byte
	}{"sealed": {sealed, data}, "open": {open, want}, "read-only": {refusing, data}} {
		got := make([]byte, len(data))
		if _, err := c.f.ReadAt(got, 0); err != nil || !bytes.Equal(got, c.want) {
			t.Errorf("%s: other octets than before (%v)", name, err)
		}
		c.f.Close()
	}
}

// program is this test's, where a monitor's user can reach it.
func program(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "dsec-warden-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	text, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	at := filepath.Join(dir, "test")
	if err == nil {
		err = os.WriteFile(at, text, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return at
}
