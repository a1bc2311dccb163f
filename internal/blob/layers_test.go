package blob

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

func importTree(t testing.TB, st store.Store, form string) (*layer.Catalogue, layer.ID, []byte) {
	t.Helper()
	tree := t.TempDir()
	content := random(3<<20, 77)
	do(t, os.WriteFile(filepath.Join(tree, "f"), content, 0o644))
	c := layer.New(nil, st)
	d, err := c.ImportDir(context.Background(), "default", tree, layer.Options{Form: form})
	do(t, err)
	return c, d.ID, content
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func diskDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "dsec-blob-")
	do(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestLocalLayersAreTheStoresFiles(t *testing.T) {
	for _, form := range []string{layer.FormEROFS, layer.FormSplit} {
		dir := diskDir(t)
		st, err := store.NewDir(filepath.Join(dir, "store"))
		do(t, err)
		c, id, _ := importTree(t, st, form)
		l, err := NewLayers(LayersConfig{Dir: filepath.Join(dir, "layers")}, c, st, nil, discard())
		do(t, err)
		f, err := l.Files(context.Background(), id)
		do(t, err)
		if filepath.Dir(f.Meta.Name()) != filepath.Join(dir, "store", "blobs") || (f.Data != nil) != (form == layer.FormSplit) {
			t.Errorf("%s: %s, %v; want files of the store", form, f.Meta.Name(), f.Data)
		}
		do(t, f.Close())
		if left, _ := os.ReadDir(filepath.Join(dir, "layers")); len(left) > 0 {
			t.Errorf("%s: copies were made: %v", form, left)
		}
		if _, err := l.Files(context.Background(), layer.ID("sha256:"+string(bytes.Repeat([]byte("0"), 64)))); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("no such layer: %v", err)
		}
	}
}

// Without a blob daemon layers that are not local are fetched whole, through a store that errs and lies.
func TestLayersFetchedWhole(t *testing.T) {
	for _, form := range []string{layer.FormEROFS, layer.FormSplit} {
		dir := diskDir(t)
		st, err := store.NewDir(filepath.Join(dir, "store"))
		do(t, err)
		c, id, content := importTree(t, st, form)
		far := storetest.NewFaulty(st, 5, nil, storetest.Faults{Errors: .1, Short: .1, Corrupt: .1})
		l, err := NewLayers(LayersConfig{Dir: filepath.Join(dir, "layers")}, c, far, nil, discard())
		do(t, err)
		f, err := l.Files(context.Background(), id)
		do(t, err)
		if form == layer.FormSplit {
			got, err := io.ReadAll(f.Data)
			do(t, err)
			if !bytes.Contains(got, content) {
				t.Error("wrong contents")
			}
			if os.Geteuid() == 0 {
				at := mountImage(t, f.Meta.Name(), f.Data)
				if b, err := os.ReadFile(filepath.Join(at, "f")); err != nil || !bytes.Equal(b, content) {
					t.Errorf("through the mount: wrong octets, %v", err)
				}
			}
		}
		do(t, f.Close())
		far.Set(storetest.Faults{Down: true})
		if f, err = l.Files(context.Background(), id); err != nil { // the copies do
			t.Error(err)
		} else {
			f.Close()
		}
	}
}

// EROFS takes no metadata from a memory file system, so it is copied. Contents it does take: only an image itself is looked at so closely.
func TestStoreOnAFileSystemThatErofsRefuses(t *testing.T) {
	h := newHouse(t, 0, func(c *SupervisorConfig) {})
	small := filepath.Join(h.dir, "store")
	do(t, unix.Mount("dsec-test", small, "tmpfs", 0, "size=64m"))
	t.Cleanup(func() { unix.Unmount(small, unix.MNT_DETACH) })
	st, err := store.NewDir(small)
	do(t, err)
	c, id, content := importTree(t, st, layer.FormSplit)
	l, err := NewLayers(LayersConfig{Dir: filepath.Join(h.dir, "layers")}, c, st, h, discard())
	do(t, err)
	f, err := l.Files(context.Background(), id)
	do(t, err)
	defer f.Close()
	if l.noFile {
		t.Skip("skip: this kernel mounts no EROFS from files")
	}
	if filepath.Dir(f.Meta.Name()) != filepath.Join(h.dir, "layers") {
		t.Errorf("metadata %s, want a copy", f.Meta.Name())
	}
	at := mountImage(t, f.Meta.Name(), f.Data)
	if b, err := os.ReadFile(filepath.Join(at, "f")); err != nil || !bytes.Equal(b, content) {
		t.Errorf("wrong octets, %v", err)
	}
}

func TestCopiesOfMetadataHaveALimit(t *testing.T) {
	dir := diskDir(t)
	st, err := store.NewDir(filepath.Join(dir, "store"))
	do(t, err)
	far := storetest.NewFaulty(st, 1, nil, storetest.Faults{})
	var ids []layer.ID
	var c *layer.Catalogue
	for i := range 4 {
		tree := t.TempDir()
		do(t, os.WriteFile(filepath.Join(tree, "f"), random(1<<20, uint64(i)), 0o644))
		c = layer.New(nil, st)
		d, err := c.ImportDir(context.Background(), "default", tree, layer.Options{Form: layer.FormEROFS})
		do(t, err)
		ids = append(ids, d.ID)
	}
	l, err := NewLayers(LayersConfig{Dir: filepath.Join(dir, "layers"), Limit: 5 << 19}, c, far, nil, discard())
	do(t, err)
	for _, id := range ids {
		f, err := l.Files(context.Background(), id)
		do(t, err)
		f.Close()
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "layers")); len(left) != 2 {
		t.Errorf("%d copies are kept, want 2", len(left))
	}
}

// A copy of metadata is not synced: what a crash of the machine, or a bad disk, made of it is found before it is mounted.
func TestCopiesAreComparedAtTheirFirstUse(t *testing.T) {
	dir := diskDir(t)
	st, err := store.NewDir(filepath.Join(dir, "store"))
	do(t, err)
	far := storetest.NewFaulty(st, 1, nil, storetest.Faults{})
	c, id, _ := importTree(t, st, layer.FormSplit)
	d, err := c.Descriptor(context.Background(), id)
	do(t, err)
	files := func() (copied string, same bool) {
		l, err := NewLayers(LayersConfig{Dir: filepath.Join(dir, "layers")}, c, far, nil, discard())
		do(t, err)
		f, err := l.Files(context.Background(), id)
		do(t, err)
		defer f.Close()
		b, err := io.ReadAll(io.NewSectionReader(f.Meta, 0, 1<<30))
		do(t, err)
		return f.Meta.Name(), digestOf(b) == d.Forms[0].Digest
	}
	path, ok := files()
	for what, spoil := range map[string]func() error{
		"zeros":   func() error { return os.WriteFile(path, make([]byte, d.Forms[0].Size), 0o600) },
		"shorter": func() error { return os.Truncate(path, d.Forms[0].Size-1) },
		"a bit": func() error {
			b, err := os.ReadFile(path)
			if err == nil {
				b[len(b)/2] ^= 4
				err = os.WriteFile(path, b, 0o600)
			}
			return err
		},
	} {
		if !ok {
			t.Fatal("wrong octets")
		}
		do(t, spoil())
		if _, ok = files(); !ok {
			t.Errorf("%s: a spoilt copy was used", what)
		}
	}
}
