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

// Layers as folders, under overlays that take their lowers by descriptor and by name (as before 6.13): an ID has a colon, which parts names.
func TestOverlaysOfFolders(t *testing.T) {
	needRoot(t)
	l, err := newLayers(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // ends the thread, and with it the namespace
		close(l.work)
		unix.Close(l.ns)
	})
	var paths []string
	for _, name := range []string{"a", "b"} {
		tree := t.TempDir()
		if err := os.WriteFile(filepath.Join(tree, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := FolderMount(tree)
		if err != nil {
			t.Fatal(err)
		}
		id := "sha256:" + name
		if err := l.mount(t.Context(), id, []int{int(f.Fd())}, false); err != nil {
			t.Fatal(err)
		}
		f.Close()
		paths = append(paths, "/layers/"+id)
	}
	for how, mount := range map[string]func([]string) (int, error){"descriptor": readOnlyOverlay, "name": readOnlyOverlayByPath} {
		var m int
		if err := l.do(func() (err error) { m, err = mount(paths); return err }); err != nil {
			t.Errorf("by %s: %v", how, err)
			continue
		}
		for _, name := range []string{"a", "b"} {
			fd, err := unix.Openat(m, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Errorf("by %s: %s: %v", how, name, err)
				continue
			}
			unix.Close(fd)
		}
		unix.Close(m)
	}
	if err := l.unmount("sha256:a"); err != nil {
		t.Error(err)
	}
}
