package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/layertest"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// blobPath is where an object lies in the store that newCatalogue made.
func blobPath(dir, digest string) string { return filepath.Join(dir, "store", layer.BlobKey(digest)) }

// mountForm mounts a layer's first form.
func mountForm(t testing.TB, dir string, f layer.Form) string {
	t.Helper()
	data := ""
	if f.Data != nil {
		data = blobPath(dir, f.Data.Digest)
	}
	layertest.Fsck(t, blobPath(dir, f.Digest), data)
	return layertest.MountSplit(t, blobPath(dir, f.Digest), data)
}

func importSplit(t testing.TB, c *layer.Catalogue, opt layer.Options, entries ...entry) layer.Descriptor {
	t.Helper()
	opt.Form = layer.FormSplit
	d, err := c.ImportTar(context.Background(), "default", bytes.NewReader(archive(t, entries...)), opt)
	must(t, err)
	return d
}

func TestSplitForm(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	big := strings.Repeat("0123456789abcdef", 100_000) // 1.6 MB: two units
	entries := []entry{folder("d"), file("d/big", big), file("d/small", "s"), hardlink("link", "d/big"), symlink("s", "d/small")}
	d := importSplit(t, c, layer.Options{}, entries...)
	f, err := c.Form(ctx, d.ID)
	must(t, err)
	if f.Kind != layer.FormSplit || f.Data == nil || f.Data.UnitCount() != 2 || f.Data.Hot != 0 {
		t.Fatalf("form %+v, data %+v", f, f.Data)
	}
	units, err := os.ReadFile(blobPath(dir, f.Data.Units))
	must(t, err)
	if len(units) != 64 {
		t.Errorf("unit table of %d octets", len(units))
	}
	must(t, c.Verify(ctx, d.ID))
	mnt := mountForm(t, dir, f)
	for name, want := range map[string]string{"d/big": big, "link": big, "s": "s"} {
		if b, err := os.ReadFile(filepath.Join(mnt, name)); err != nil || string(b) != want {
			t.Errorf("%s: %d octets, %v", name, len(b), err)
		}
	}
	// The ID does not depend on the form.
	one, _ := newCatalogue(t)
	e, err := one.ImportTar(ctx, "default", bytes.NewReader(archive(t, entries...)), layer.Options{Form: layer.FormEROFS})
	must(t, err)
	if e.ID != d.ID || e.Bytes != d.Bytes || e.Entries != d.Entries {
		t.Errorf("%+v\n%+v", e, d)
	}
	// Nor do the octets depend on anything but the input.
	other, _ := newCatalogue(t)
	if g := importSplit(t, other, layer.Options{}, entries...).Forms[0]; g.Digest != f.Digest || *g.Data != *f.Data {
		t.Errorf("%+v %+v\n%+v %+v", f, f.Data, g, g.Data)
	}
}

func TestSplitWithoutContents(t *testing.T) {
	c, dir := newCatalogue(t)
	d := importSplit(t, c, layer.Options{}, folder("d"), file("d/empty", ""), file("d/.wh.gone", ""), symlink("s", "d"))
	f := d.Forms[0]
	if f.Data != nil {
		t.Fatalf("data %+v", f.Data)
	}
	mnt := mountForm(t, dir, f)
	if b, err := os.ReadFile(filepath.Join(mnt, "d/empty")); err != nil || len(b) != 0 {
		t.Error(b, err)
	}
	must(t, c.Verify(context.Background(), d.ID))
	if left := objects(t, dir); len(left) != 2 {
		t.Errorf("objects: %v", left)
	}
}

func TestBrokenFormIsNoticed(t *testing.T) {
	ctx := context.Background()
	for _, what := range []string{"one file", "meta", "data", "units"} {
		t.Run(what, func(t *testing.T) {
			c, dir := newCatalogue(t)
			opt := layer.Options{Form: layer.FormSplit}
			if what == "one file" {
				opt.Form = layer.FormEROFS
			}
			data := archive(t, file("f", strings.Repeat("text", 5000)))
			d, err := c.ImportTar(ctx, "default", bytes.NewReader(data), opt)
			must(t, err)
			path := blobPath(dir, map[string]string{"one file": d.Forms[0].Digest, "meta": d.Forms[0].Digest, "data": dataOf(d.Forms[0]).Digest, "units": dataOf(d.Forms[0]).Units}[what])
			whole, err := os.ReadFile(path)
			must(t, err)
			b := bytes.Clone(whole)
			b[17] ^= 1
			for _, b := range [][]byte{b, whole[:len(whole)-1]} {
				must(t, os.WriteFile(path, b, 0o600))
				if err := c.Verify(ctx, d.ID); !errors.Is(err, sandbox.ErrLost) {
					t.Error(err)
				}
			}
			_, err = c.ImportTar(ctx, "default", bytes.NewReader(data), opt) // built again, it is whole again
			must(t, err, c.Verify(ctx, d.ID))
		})
	}
}

// Layers that differ in metadata alone share their contents, and the removal of one leaves those of the other.
func TestSharedContents(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	text := strings.Repeat("text", 5000)
	a := importSplit(t, c, layer.Options{}, file("f", text))
	b := importSplit(t, c, layer.Options{}, file("g", text))
	if a.ID == b.ID || a.Forms[0].Data.Digest != b.Forms[0].Data.Digest {
		t.Fatalf("%+v %+v", a, b)
	}
	must(t, c.Remove(ctx, "default", string(a.ID)))
	_, err := c.Sweep(ctx, 0)
	must(t, err)
	must(t, c.Verify(ctx, b.ID))
	must(t, c.Remove(ctx, "default", string(b.ID)))
	_, err = c.Sweep(ctx, 0)
	must(t, err)
	if left := objects(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestHotFilesInFront(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	block := func(s string) string { return strings.Repeat(s, 4096/len(s)) }
	var entries []entry
	for i := range 50 {
		entries = append(entries, file(fmt.Sprintf("cold/%02d", i), block(fmt.Sprintf("%04d", i))))
	}
	sparse := make([]byte, 300<<10)
	copy(sparse[:], block("hol1"))
	copy(sparse[256<<10:], block("hol2"))
	entries = append(entries, file("usr/lib/z", block("zzzz")), symlink("lib", "usr/lib"), symlink("usr/lib/y", "/lib/z"), symlink("loop", "loop"),
		file("sparse", string(sparse)))
	hot := []string{"/sparse", "nosuch", "loop", "../../lib/../lib/y", "cold", "cold/33", "usr/lib/z"}
	d := importSplit(t, c, layer.Options{Hot: hot}, entries...)
	f := d.Forms[0]
	// 64 KiB chunks with something in them, and two blocks.
	if want := int64(64<<10 + 44<<10 + 2*4096); f.Data.Hot != want {
		t.Errorf("hot %d, want %d", f.Data.Hot, want)
	}
	b, err := os.ReadFile(blobPath(dir, f.Data.Digest))
	must(t, err)
	if got := string(b[:4]) + string(b[64<<10:][:4]) + string(b[108<<10:][:4]) + string(b[112<<10:][:4]) + string(b[116<<10:][:4]); got != "hol1hol2zzzz00330000" {
		t.Errorf("order %q", got)
	}
	mnt := mountForm(t, dir, f)
	for _, e := range entries {
		if e.Typeflag != tar.TypeReg {
			continue
		}
		if got, err := os.ReadFile(filepath.Join(mnt, e.Name)); err != nil || string(got) != e.body {
			t.Errorf("%s: %d octets, %v", e.Name, len(got), err)
		}
	}
	// The same list again changes nothing but what is stored: the ID stays.
	plain, _ := newCatalogue(t)
	if p := importSplit(t, plain, layer.Options{}, entries...); p.ID != d.ID {
		t.Error("the ID depends on the hot list")
	}
	must(t, c.Verify(ctx, d.ID))
}
