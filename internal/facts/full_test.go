package facts

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A full disk refuses changes as exhausted, and all that was there before stays and can be read.
func TestFullDisk(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounts a small file system: needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	b, err := OpenBolt(filepath.Join(dir, "facts.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	ctx := context.Background()
	if _, err := b.Put(ctx, "before", []byte("x"), Any); err != nil {
		t.Fatal(err)
	}
	fill, err := os.Create(filepath.Join(dir, "fill"))
	if err != nil {
		t.Fatal(err)
	}
	defer fill.Close()
	for err == nil {
		_, err = fill.Write(make([]byte, 4096))
	}
	value := make([]byte, 60<<10)
	for range 100 { // the file may have room of its own first
		if _, err = b.Put(ctx, sandbox.NewKey(), value, Any); err != nil {
			break
		}
	}
	if !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("a put on a full disk: %v", err)
	}
	if f, err := b.Get(ctx, "before"); err != nil || string(f.Value) != "x" {
		t.Errorf("%v %v", f, err)
	}
	if err := fill.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Put(ctx, "after", []byte("y"), Any); err != nil {
		t.Errorf("with room again: %v", err)
	}
}
