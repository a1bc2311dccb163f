package vm

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A copy of a disk that does not fit on the host, as a snapshot makes, says so.
func TestCopyOntoAFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=6m"); err != nil {
		t.Skip("skip: tmpfs: ", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	from, err := os.Create(filepath.Join(dir, "from"))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	if _, err := from.Write(bytes.Repeat([]byte("x"), 4<<20)); err != nil {
		t.Fatal(err)
	}
	to, err := os.Create(filepath.Join(dir, "to"))
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if err := copySparse(to, from); !errors.Is(err, sandbox.ErrExhausted) || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%v, want ErrExhausted", err)
	}
}
