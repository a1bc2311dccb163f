package keeper

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/store"
)

// An image of two files, mounted in each way there is: as files, past their page cache, and by loop devices as before 6.12.
func TestImageOfTwoFiles(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	dir, err := os.MkdirTemp("/var/tmp", "dsec-keeper-") // EROFS reads no image on a memory file system
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	content := bytes.Repeat([]byte("some octets "), 100000)
	if err := os.WriteFile(filepath.Join(tree, "f"), content, 0o644); err != nil {
		t.Fatal(err)
	}
	st, err := store.NewDir(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := layer.New(nil, st).ImportDir(context.Background(), "default", tree, layer.Options{Form: layer.FormSplit})
	if err != nil {
		t.Fatal(err)
	}
	var fds []int
	defer func() { closeAll(fds) }()
	for _, digest := range []string{d.Forms[0].Digest, d.Forms[0].Data.Digest} {
		path, _ := st.Path(layer.BlobKey(digest))
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	for name, mount := range map[string]func() (int, error){
		"files":  func() (int, error) { return openLayer(fds, false) },
		"direct": func() (int, error) { return openLayer(fds, true) },
		"loops":  func() (int, error) { return openLoops(fds) },
	} {
		m, err := mount()
		if name == "loops" && errors.Is(err, unix.ENOENT) {
			t.Log("no loop devices here")
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		fd, err := unix.Openat(m, "f", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			unix.Close(m)
			continue
		}
		f := os.NewFile(uintptr(fd), "f")
		got := make([]byte, len(content)+1)
		if n, err := f.ReadAt(got, 0); n != len(content) || !bytes.Equal(got[:n], content) {
			t.Errorf("%s: %d octets (%v), want %d and the same", name, n, err, len(content))
		}
		f.Close()
		unix.Close(m)
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, l := range loops {
		if b, err := os.ReadFile(l); err == nil && bytes.Contains(b, []byte(dir)) {
			t.Errorf("%s: %s is left", l, b)
		}
	}
}
