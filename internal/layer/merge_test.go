package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/layertest"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// shown lists all that a sandbox sees of a folder: every attribute, contents, and which names are one file.
func shown(t testing.TB, root string) []string {
	t.Helper()
	var lines []string
	first := map[[2]uint64]string{}
	err := filepath.Walk(root, func(p string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		st := info.Sys().(*syscall.Stat_t)
		line := fmt.Sprintf("%q %o %d:%d %d.%09d", rel, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d octets %x", len(b), sha256.Sum256(b))
		case unix.S_IFLNK:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			line += " -> " + target
		case unix.S_IFCHR, unix.S_IFBLK:
			line += fmt.Sprintf(" %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
		if !info.IsDir() {
			key := [2]uint64{st.Dev, st.Ino}
			if f, ok := first[key]; ok {
				line += " = " + f
			} else {
				first[key] = rel
			}
		}
		buf := make([]byte, 1<<16)
		n, err := unix.Llistxattr(p, buf)
		if err != nil {
			return err
		}
		names := strings.FieldsFunc(string(buf[:n]), func(r rune) bool { return r == 0 })
		sort.Strings(names)
		for _, name := range names {
			if !strings.HasPrefix(name, "trusted.overlay.") { // of the layers below the one that is looked at
				line += " " + name + "=" + xattr(t, p, name)
			}
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func importAs(t testing.TB, c *layer.Catalogue, form string, entries ...entry) layer.ID {
	t.Helper()
	d, err := c.ImportTar(context.Background(), "default", bytes.NewReader(archive(t, entries...)), layer.Options{Form: form})
	must(t, err)
	return d.ID
}

func mountLayer(t testing.TB, c *layer.Catalogue, dir string, id layer.ID) string {
	t.Helper()
	f, err := c.Form(context.Background(), id)
	must(t, err)
	return mountForm(t, dir, f)
}

// randomLayer is an archive with everything that lies on or hides what lower layers have.
func randomLayer(r *rand.Rand) []entry {
	var entries []entry
	used := map[string]byte{}
	stamp := func(e entry) entry {
		e.ModTime = time.Unix(r.Int64N(2e9), r.Int64N(1e9))
		e.Uid, e.Gid = r.IntN(3), r.IntN(3)
		if r.IntN(4) == 0 {
			e.PAXRecords = map[string]string{"SCHILY.xattr.user.k": fmt.Sprint(r.IntN(100))}
		}
		return e
	}
	name := func(depth int) string {
		parts := make([]string, 1+r.IntN(depth))
		for i := range parts {
			parts[i] = string(rune('a' + r.IntN(3)))
		}
		return strings.Join(parts, "/")
	}
	// Folders first, so that nothing goes through a file.
	put := func(p string, kind byte) bool {
		for at := p; at != "."; at = filepath.Dir(at) {
			if k, ok := used[at]; ok && (at == p || k != 'd') {
				return false
			}
		}
		for at := filepath.Dir(p); at != "."; at = filepath.Dir(at) {
			if used[at] == 0 {
				used[at] = 'd'
			}
		}
		used[p] = kind
		return true
	}
	for range 1 + r.IntN(5) {
		if p := name(4); put(p, 'd') {
			entries = append(entries, stamp(folder(p)))
			if r.IntN(4) == 0 {
				entries = append(entries, file(p+"/.wh..wh..opq", ""))
			}
		}
	}
	var files []string
	for range r.IntN(8) {
		p := name(4)
		switch r.IntN(6) {
		case 0:
			if put(p, 'w') {
				entries = append(entries, file(filepath.Dir(p)+"/.wh."+filepath.Base(p), ""))
			}
		case 1:
			if put(p, 'l') {
				entries = append(entries, stamp(symlink(p, name(3))))
			}
		case 2:
			if len(files) > 0 && put(p, 'f') {
				entries = append(entries, hardlink(p, files[r.IntN(len(files))]))
			}
		default:
			if put(p, 'f') {
				entries = append(entries, stamp(file(p, strings.Repeat(fmt.Sprint(r.IntN(1000)), r.IntN(3000)))))
				files = append(files, p)
			}
		}
	}
	return entries
}

// Layers that were merged show in any stack what they showed one by one, and a flat one shows it alone.
func TestMergeIsWhatOverlayShows(t *testing.T) {
	ctx := context.Background()
	rounds := 40
	if testing.Short() {
		rounds = 5
	}
	for seed := range uint64(rounds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			c, dir := newCatalogue(t)
			r := rand.New(rand.NewPCG(seed, 1))
			form := []string{layer.FormEROFS, layer.FormSplit}
			var ids []layer.ID
			var mounts []string
			for len(ids) < 3+r.IntN(3) {
				id := importAs(t, c, form[r.IntN(2)], randomLayer(r)...)
				ids = append(ids, id)
				mounts = append(mounts, mountLayer(t, c, dir, id))
			}
			over := func(mounts ...string) []string {
				t.Helper()
				m, _ := layertest.Overlay(t, mounts...)
				return shown(t, m)[1:] // the root's own attributes are the fresh upper's
			}
			want := over(mounts...)
			from := r.IntN(len(ids) - 1)
			to := from + 2 + r.IntN(len(ids)-from-1)
			d, err := c.Merge(ctx, ids[from:to])
			must(t, err, c.Verify(ctx, d.ID))
			stack := append(append(append([]string{}, mounts[:from]...), mountLayer(t, c, dir, d.ID)), mounts[to:]...)
			if diff := cmp.Diff(want, over(stack...)); diff != "" {
				t.Errorf("layers %d to %d merged, one by one -, merged +:\n%s", from, to, diff)
			}
			flat, err := c.Flatten(ctx, ids)
			must(t, err)
			if diff := cmp.Diff(want, shown(t, mountLayer(t, c, dir, flat.ID))[1:]); diff != "" {
				t.Errorf("flat, one by one -, flat +:\n%s", diff)
			}
			// The same way by archives.
			var archived bytes.Buffer
			must(t, c.WriteFlatTar(ctx, ids, &archived))
			again, err := c.ImportTar(ctx, "default", &archived, layer.Options{})
			must(t, err)
			if again.ID != flat.ID {
				t.Error("the flat archive is another tree")
			}
			for _, id := range append([]layer.ID{d.ID}, ids...) {
				roundTrip(t, c, id)
			}
			// One alone is itself, save a folder that no entry described.
			one, err := c.Merge(ctx, ids[:1])
			must(t, err)
			if one.ID != ids[0] {
				t.Error("one layer merged is another")
			}
		})
	}
}

// roundTrip writes a layer as an archive, twice, and builds it again.
func roundTrip(t testing.TB, c *layer.Catalogue, id layer.ID) {
	t.Helper()
	ctx := context.Background()
	var a, b bytes.Buffer
	must(t, c.WriteTar(ctx, id, &a), c.WriteTar(ctx, id, &b))
	if !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Error("two archives of one layer differ")
	}
	d, err := c.ImportTar(ctx, "default", &a, layer.Options{})
	must(t, err)
	if d.ID != id {
		t.Errorf("built from its own archive, layer %s is %s", id, d.ID)
	}
}

// snapshotOver makes a snapshot of what change does in an overlay of the layers.
func snapshotOver(t testing.TB, c *layer.Catalogue, dir string, ids []layer.ID, change func(root string)) (layer.ID, []string) {
	t.Helper()
	var mounts []string
	for _, id := range ids {
		mounts = append(mounts, mountLayer(t, c, dir, id))
	}
	merged, upper := layertest.Overlay(t, mounts...)
	change(merged)
	d, err := c.ImportUpper(context.Background(), "default", upper, layer.Options{Parents: ids, Form: layer.FormSplit})
	must(t, err)
	return d.ID, shown(t, merged)
}

// Folders that were renamed have no content of their own in a snapshot; what is merged, flattened or exported has it.
func TestRenamedFoldersAreResolved(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	base := importAs(t, c, layer.FormEROFS, folder("a"), folder("a/b"), file("a/b/deep", "1"), file("a/top", "2"), folder("x"), file("x/y", "3"), folder("keep"), file("keep/k", "4"))
	kit := importAs(t, c, layer.FormSplit, folder("a"), folder("a/b"), file("a/b/kit", "5"), file("a/.wh.top", ""), folder("o"), file("o/f", "6"))
	s1, _ := snapshotOver(t, c, dir, []layer.ID{base, kit}, func(m string) {
		must(t, os.Rename(m+"/a", m+"/moved"), os.Rename(m+"/moved/b", m+"/moved/c"), os.WriteFile(m+"/moved/c/own", []byte("7"), 0o600),
			os.Rename(m+"/o", m+"/keep/o"), os.Mkdir(m+"/a", 0o700), os.WriteFile(m+"/a/new", []byte("8"), 0o644))
	})
	ids := []layer.ID{base, kit, s1}
	s2, want := snapshotOver(t, c, dir, ids, func(m string) {
		must(t, os.Rename(m+"/moved/c", m+"/x/d"), os.Remove(m+"/x/d/deep"), os.Rename(m+"/keep", m+"/kept"), os.WriteFile(m+"/kept/o/f", []byte("9"), 0o644))
	})
	ids = append(ids, s2)
	flat, err := c.Flatten(ctx, ids)
	must(t, err)
	if d := cmp.Diff(want, shown(t, mountLayer(t, c, dir, flat.ID))); d != "" {
		t.Errorf("live -, flat +:\n%s", d)
	}
	all, err := c.Merge(ctx, ids)
	must(t, err)
	if len(all.Parents) != 0 {
		t.Errorf("parents %v", all.Parents)
	}
	other := importAs(t, c, layer.FormEROFS, folder("moved"), file("moved/strange", "s"), folder("etc"), file("etc/e", "e"))
	merged, _ := layertest.Overlay(t, mountLayer(t, c, dir, other), mountLayer(t, c, dir, all.ID))
	var names []string
	for _, l := range shown(t, merged) {
		names = append(names, strings.Trim(strings.Fields(l)[0], `"`))
	}
	if d := cmp.Diff([]string{".", "a", "a/new", "etc", "etc/e", "kept", "kept/k", "kept/o", "kept/o/f", "moved", "x", "x/d", "x/d/kit", "x/d/own", "x/y"}, names); d != "" {
		t.Error(d)
	}

	// As archives one over the other: each is built without a reference to lower ones.
	var mounts []string
	for _, id := range ids {
		var b bytes.Buffer
		must(t, c.WriteTar(ctx, id, &b))
		d, err := c.ImportTar(ctx, "default", &b, layer.Options{})
		must(t, err)
		mounts = append(mounts, mountLayer(t, c, dir, d.ID))
	}
	merged, _ = layertest.Overlay(t, mounts...)
	if d := cmp.Diff(want[1:], shown(t, merged)[1:]); d != "" {
		t.Errorf("live -, from archives +:\n%s", d)
	}

	for name, wrong := range map[string][]layer.ID{"without its parents": {s1}, "on others": {other, base, kit, s1}, "with one missing": {base, s1}, "none": nil} {
		if _, err := c.Merge(ctx, wrong); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("a snapshot %s: %v", name, err)
		}
	}
}

// Random changes in a sandbox: what is flattened shows what the sandbox showed.
func TestRandomSnapshots(t *testing.T) {
	needRoot(t)
	rounds := 15
	if testing.Short() {
		rounds = 3
	}
	for seed := range uint64(rounds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			ctx := context.Background()
			c, dir := newCatalogue(t)
			r := rand.New(rand.NewPCG(seed, 2))
			ids := []layer.ID{importAs(t, c, layer.FormSplit, randomLayer(r)...), importAs(t, c, layer.FormSplit, randomLayer(r)...)}
			if ids[0] == ids[1] {
				ids = ids[:1]
			}
			var want []string
			for range 3 {
				var id layer.ID
				id, want = snapshotOver(t, c, dir, ids, func(m string) {
					for range 12 {
						paths := []string{m}
						filepath.Walk(m, func(p string, info os.FileInfo, err error) error {
							if err == nil && p != m {
								paths = append(paths, p)
							}
							return nil
						})
						p, q := paths[r.IntN(len(paths))], paths[r.IntN(len(paths))]
						fresh := filepath.Join(p, fmt.Sprintf("n%d", r.IntN(5)))
						switch r.IntN(7) { // what can't be done is not
						case 0:
							os.Mkdir(fresh, 0o750)
						case 1:
							os.WriteFile(fresh, []byte(fmt.Sprint(r.IntN(1000))), 0o640)
						case 2, 3:
							if p != m && !strings.HasPrefix(q+"/", p+"/") {
								os.Rename(p, filepath.Join(q, filepath.Base(p)))
							}
						case 4:
							if p != m {
								os.RemoveAll(p)
							}
						case 5:
							os.Link(p, filepath.Join(filepath.Dir(q), fmt.Sprintf("l%d", r.IntN(5))))
						case 6:
							os.Chmod(p, 0o711)
						}
					}
				})
				ids = append(ids, id)
			}
			flat, err := c.Flatten(ctx, ids)
			must(t, err)
			if d := cmp.Diff(want, shown(t, mountLayer(t, c, dir, flat.ID))); d != "" {
				t.Errorf("live -, flat +:\n%s", d)
			}
			all, err := c.Merge(ctx, ids)
			must(t, err)
			merged, _ := layertest.Overlay(t, mountLayer(t, c, dir, all.ID))
			if d := cmp.Diff(want[1:], shown(t, merged)[1:]); d != "" {
				t.Errorf("live -, merged +:\n%s", d)
			}
		})
	}
}

// A root that hides everything below is one for the stack, as overlayfs knows no such root.
func TestOpaqueRoot(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	base := importAs(t, c, "", file("below", "1"))
	top := importAs(t, c, "", file(".wh..wh..opq", ""), file("own", "2"))
	d, err := c.Descriptor(ctx, top)
	must(t, err)
	if !d.Opaque {
		t.Error("not told")
	}
	stack, err := c.Compose(ctx, "default", []string{string(base), string(top)})
	must(t, err)
	if diff := cmp.Diff([]layer.ID{top}, stack); diff != "" {
		t.Error(diff)
	}
	m, err := c.Merge(ctx, []layer.ID{base, top})
	must(t, err)
	if m.ID != top || !m.Opaque {
		t.Errorf("merged: %+v", m)
	}
	flat, err := c.Flatten(ctx, []layer.ID{base, top})
	must(t, err)
	if diff := cmp.Diff([]string{`own 100644 0:0 "2"`}, tree(t, mountLayer(t, c, dir, flat.ID))); diff != "" || flat.Opaque {
		t.Error(diff)
	}
	roundTrip(t, c, top)
}

func TestRelayout(t *testing.T) {
	ctx := context.Background()
	for _, form := range []string{layer.FormEROFS, layer.FormSplit} {
		t.Run(form, func(t *testing.T) {
			c, dir := newCatalogue(t)
			entries := []entry{folder("d"), file("d/.wh.gone", ""), hardlinkTarget("d/a"), hardlink("d/b", "d/a"), file("empty", "")}
			for i := range 40 {
				entries = append(entries, file(fmt.Sprintf("f%02d", i), strings.Repeat(fmt.Sprintf("%04d", i), 1000+i)))
			}
			old, err := c.ImportTar(ctx, "default", bytes.NewReader(archive(t, entries...)), layer.Options{Form: form})
			must(t, err)
			before := shown(t, mountForm(t, dir, old.Forms[0]))
			d, err := c.Relayout(ctx, old.ID, []string{"f33", "d/b", "/f07"})
			must(t, err)
			if d.ID != old.ID || len(d.Forms) != 2 || d.Forms[1].Superseded == nil || d.Forms[1].Digest != old.Forms[0].Digest {
				t.Fatalf("%+v", d)
			}
			f, err := c.Form(ctx, d.ID)
			must(t, err, c.Verify(ctx, d.ID))
			if f.Kind != layer.FormSplit || f.Data.Hot != 4*4096 {
				t.Errorf("%+v %+v", f, f.Data)
			}
			b, err := os.ReadFile(blobPath(dir, f.Data.Digest))
			must(t, err)
			if got := string(b[:4]) + string(b[8192:8196]) + string(b[12288:12292]); got != "0033link0007" {
				t.Errorf("order %q", got)
			}
			if diff := cmp.Diff(before, shown(t, mountForm(t, dir, f))); diff != "" {
				t.Error(diff)
			}
			// The same again changes nothing; a young form stays, an old one goes with all that was its own.
			again, err := c.Relayout(ctx, d.ID, []string{"f33", "d/b", "/f07"})
			must(t, err)
			if diff := cmp.Diff(d, again); diff != "" {
				t.Error(diff)
			}
			_, err = c.Sweep(ctx, time.Hour)
			must(t, err, c.Verify(ctx, d.ID))
			_, err = c.Sweep(ctx, 0)
			must(t, err, c.Verify(ctx, d.ID))
			if d, err = c.Descriptor(ctx, d.ID); err != nil || len(d.Forms) != 1 {
				t.Errorf("%+v %v", d, err)
			}
			if left := objects(t, dir); len(left) != 4 {
				t.Errorf("objects: %v", left)
			}
		})
	}
}

func hardlinkTarget(name string) entry { return file(name, "linked") }

// Octets that are not what was written never get into another layer or an archive.
func TestNothingBrokenIsPassedOn(t *testing.T) {
	ctx := context.Background()
	for _, form := range []string{layer.FormEROFS, layer.FormSplit} {
		c, dir := newCatalogue(t)
		d, err := c.ImportTar(ctx, "default", bytes.NewReader(archive(t, file("f", strings.Repeat("x", 3<<20)))), layer.Options{Form: form})
		must(t, err)
		for _, digest := range []string{d.Forms[0].Digest, dataOf(d.Forms[0]).Digest, dataOf(d.Forms[0]).Units} {
			if digest == "" {
				continue
			}
			path := blobPath(dir, digest)
			whole, err := os.ReadFile(path)
			must(t, err)
			broken := bytes.Clone(whole)
			broken[len(broken)-1] ^= 1
			for _, b := range [][]byte{broken, whole[:len(whole)-1], nil} {
				must(t, os.Remove(path))
				if b != nil {
					must(t, os.WriteFile(path, b, 0o600))
				}
				if err := c.WriteTar(ctx, d.ID, io.Discard); !errors.Is(err, sandbox.ErrLost) && !errors.Is(err, sandbox.ErrNotFound) {
					t.Errorf("%s: archive of %d octets: %v", form, len(b), err)
				}
				if _, err := c.Relayout(ctx, d.ID, nil); err == nil {
					t.Errorf("%s: laid out", form)
				}
				if b == nil {
					must(t, os.WriteFile(path, nil, 0o600))
				}
			}
			must(t, os.WriteFile(path, whole, 0o600))
		}
		must(t, c.WriteTar(ctx, d.ID, io.Discard))
	}
}

func dataOf(f layer.Form) layer.Data {
	if f.Data == nil {
		return layer.Data{}
	}
	return *f.Data
}

type failing struct{ left int }

func (f *failing) Write(p []byte) (int, error) {
	if f.left -= len(p); f.left < 0 {
		return 0, io.ErrClosedPipe
	}
	return len(p), nil
}

func TestWhatAnArchiveCannotSay(t *testing.T) {
	needRoot(t)
	ctx := context.Background()
	c, _ := newCatalogue(t)
	for name, make := range map[string]func(dir string) error{
		"name of a mark": func(dir string) error { return os.WriteFile(dir+"/.wh.x", nil, 0o600) },
		"attribute": func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/f", nil, 0o600), unix.Setxattr(dir+"/f", "trusted.a=b", nil, 0))
		},
	} {
		dir := t.TempDir()
		must(t, make(dir))
		d, err := c.ImportDir(ctx, "default", dir, layer.Options{})
		must(t, err)
		if err := c.WriteTar(ctx, d.ID, io.Discard); !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	id := importAs(t, c, "", file("f", strings.Repeat("x", 10000)), entry{tar.Header{Typeflag: tar.TypeFifo, Name: "p", ModTime: time.Unix(-3, 5)}, ""})
	for _, n := range []int{0, 600, 5000, 12000} {
		if err := c.WriteTar(ctx, id, &failing{n}); !errors.Is(err, io.ErrClosedPipe) || errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("writer that fails after %d octets: %v", n, err)
		}
	}
	roundTrip(t, c, id)
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if err := c.WriteTar(cancelled, id, io.Discard); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
