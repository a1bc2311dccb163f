package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/layertest"
)

// everyWay shows a stack of layers in every way in which it can be stored or passed on: as it is, laid out anew, merged, flat, and by
// archives.
func everyWay(t *testing.T, c *layer.Catalogue, dir string, ids []layer.ID, check func(t *testing.T, root string)) {
	ctx := context.Background()
	overlay := func(t *testing.T, ids ...layer.ID) string {
		t.Helper()
		var mounts []string
		for _, id := range ids {
			mounts = append(mounts, mountLayer(t, c, dir, id))
		}
		m, _ := layertest.Overlay(t, mounts...)
		return m
	}
	again := func(t *testing.T, b *bytes.Buffer) layer.ID {
		t.Helper()
		d, err := c.ImportTar(ctx, "default", b, layer.Options{})
		must(t, err)
		return d.ID
	}
	archived := func(t *testing.T, id layer.ID) layer.ID {
		t.Helper()
		var b bytes.Buffer
		must(t, c.WriteTar(ctx, id, &b))
		return again(t, &b)
	}
	merge := func(t *testing.T, ids ...layer.ID) layer.ID {
		t.Helper()
		d, err := c.Merge(ctx, ids)
		must(t, err)
		return d.ID
	}
	for _, way := range []struct {
		name string
		root func(t *testing.T) string
	}{
		{"as it is", func(t *testing.T) string { return overlay(t, ids...) }},
		{"archives", func(t *testing.T) string {
			var list []layer.ID
			for _, id := range ids {
				list = append(list, archived(t, id))
			}
			return overlay(t, list...)
		}},
		{"merged", func(t *testing.T) string { return overlay(t, merge(t, ids...)) }},
		{"merged below", func(t *testing.T) string { return overlay(t, append([]layer.ID{merge(t, ids[:2]...)}, ids[2:]...)...) }},
		{"archive of the merged", func(t *testing.T) string { return overlay(t, archived(t, merge(t, ids...))) }},
		{"flat", func(t *testing.T) string {
			d, err := c.Flatten(ctx, ids)
			must(t, err)
			return mountLayer(t, c, dir, d.ID)
		}},
		{"flat archive", func(t *testing.T) string {
			var b bytes.Buffer
			must(t, c.WriteFlatTar(ctx, ids, &b))
			return mountLayer(t, c, dir, again(t, &b))
		}},
		{"laid out anew", func(t *testing.T) string { // last: it changes what is stored
			for _, id := range ids {
				_, err := c.Relayout(ctx, id, []string{"h/f1", "c"})
				must(t, err)
			}
			return overlay(t, ids...)
		}},
	} {
		t.Run(way.name, func(t *testing.T) { check(t, way.root(t)) })
	}
}

// B03: the marks do not show either when layers were merged, flattened or passed on.
func TestB03MergedAndFlat(t *testing.T) {
	c, dir := newCatalogue(t)
	base := importAs(t, c, layer.FormEROFS, folder("etc"))
	with := importAs(t, c, "", folder("home"), file("home/gone.txt", "x"), file("home/base", "b"))
	marks := importAs(t, c, "", file("home/.wh.gone.txt", ""), file("home/.wh.never", ""), file("home/kept", "k"))
	opaque := importAs(t, c, "", folder("home"), file("home/.wh..wh..opq", ""), file("home/only", "o"))
	for name, s := range map[string]struct {
		ids  []layer.ID
		want []string
	}{
		"nothing to delete": {[]layer.ID{base, marks}, []string{"kept"}},
		"one to delete":     {[]layer.ID{base, with, marks}, []string{"base", "kept"}},
		"opaque":            {[]layer.ID{with, opaque}, []string{"only"}},
		"marks over opaque": {[]layer.ID{with, opaque, marks}, []string{"kept", "only"}},
		"opaque over marks": {[]layer.ID{with, marks, opaque}, []string{"only"}},
	} {
		t.Run(name, func(t *testing.T) {
			everyWay(t, c, dir, s.ids, func(t *testing.T, root string) {
				for _, cmdline := range [][]string{{"ls", "-la", "home"}, {"tar", "-c", "-f", "/dev/null", "home"}} {
					cmd := exec.Command(cmdline[0], cmdline[1:]...)
					cmd.Dir = root
					if out, err := cmd.CombinedOutput(); err != nil || bytes.ContainsAny(out, "?") || bytes.Contains(out, []byte("gone")) {
						t.Errorf("%v: %v\n%s", cmdline, err, out)
					}
				}
				entries, err := os.ReadDir(root + "/home")
				var names []string
				for _, e := range entries {
					names = append(names, e.Name())
				}
				if d := cmp.Diff(s.want, names); err != nil || d != "" {
					t.Errorf("%v %s", err, d)
				}
			})
		})
	}
}

// B08: setuid bits, owners and capabilities are the same in every stored form and after an export.
func TestB08InEveryForm(t *testing.T) {
	c, dir := newCatalogue(t)
	mode := func(e entry, mode int64, uid, gid int) entry {
		e.Mode, e.Uid, e.Gid = mode, uid, gid
		e.ModTime = time.Unix(1_600_000_000, 987654321)
		return e
	}
	base := importAs(t, c, layer.FormEROFS, folder("tmp"), file("c", "old"), mode(file("a", "old"), 0o755, 1, 1))
	top := importAs(t, c, "", mode(file("a", "a"), 0o4755, 1000, 1000), mode(file("b", "b"), 0o2755, 0, 42), mode(folder("f"), 0o3775, 5, 6),
		pax(mode(file("c", "c"), 0o755, 0, 0), "SCHILY.xattr.security.capability", string(capV2), "SCHILY.xattr.user.empty", ""))
	snap, want := snapshotOver(t, c, dir, []layer.ID{base, top}, func(m string) {
		e := write(t, m+"/tmp/e", "e")
		must(t, os.Chmod(write(t, m+"/tmp/d", "d"), 0o755|os.ModeSetuid), setCapability(e), os.Rename(m+"/f", m+"/g"))
	})
	text := strings.Join(want, "\n")
	for _, part := range []string{`"a" 104755 1000:1000 1600000000.987654321`, `"b" 102755 0:42`, `"g" 43775 5:6 1600000000.987654321`, "security.capability=" + fmt.Sprintf("%x", capV2) + " user.empty=", `"tmp/d" 104755`} {
		if !strings.Contains(text, part) {
			t.Fatalf("%s is not in\n%s", part, text)
		}
	}
	everyWay(t, c, dir, []layer.ID{base, top, snap}, func(t *testing.T, root string) {
		if d := cmp.Diff(want[1:], shown(t, root)[1:]); d != "" {
			t.Errorf("in the sandbox -, here +:\n%s", d)
		}
	})
}

func setCapability(path string) error { return unix.Setxattr(path, "security.capability", capV2, 0) }

// B24: links stay links of one inode that is stored once, also after merging and export; a replaced or removed name leaves the others.
func TestB24InEveryForm(t *testing.T) {
	c, dir := newCatalogue(t)
	five := strings.Repeat("five megabytes! ", 5<<20/16)
	fifo := entry{tar.Header{Typeflag: tar.TypeFifo, Name: "h/p", Mode: 0o644}, ""}
	low := importAs(t, c, "", folder("h"), file("h/f1", five), hardlink("h/f2", "h/f1"), hardlink("h/f3", "h/f1"), hardlink("h/f4", "h/f1"),
		symlink("h/s", "f1"), hardlink("h/s2", "h/s"), fifo, hardlink("h/p2", "h/p"), file("h/copy", five))
	high := importAs(t, c, "", folder("h"), file("h/f2", "new"), file("h/.wh.f3", ""))
	stack := []layer.ID{low, high}
	var names []string
	everyWay(t, c, dir, stack, func(t *testing.T, root string) {
		var lines []string
		for _, l := range shown(t, root)[1:] {
			f := strings.Fields(l)
			link := ""
			if i := strings.Index(l, " = "); i >= 0 {
				link = l[i:]
			}
			lines = append(lines, f[0]+link)
		}
		want := []string{`"h"`, `"h/copy"`, `"h/f1"`, `"h/f2"`, `"h/f4" = h/f1`, `"h/p"`, `"h/p2" = h/p`, `"h/s"`, `"h/s2" = h/s`}
		if d := cmp.Diff(want, lines); d != "" {
			t.Error(d)
		}
		if b, err := os.ReadFile(root + "/h/f4"); err != nil || string(b) != five {
			t.Errorf("f4: %d octets, %v", len(b), err)
		}
		if b, err := os.ReadFile(root + "/h/f2"); err != nil || string(b) != "new" {
			t.Errorf("f2: %.20q, %v", b, err)
		}
		names = lines
	})
	if len(names) == 0 {
		return // no privileges
	}
	for what, make := range map[string]func(context.Context, []layer.ID) (layer.Descriptor, error){"merged": c.Merge, "flat": c.Flatten} {
		d, err := make(context.Background(), stack)
		must(t, err)
		if n := d.Forms[0].Stored(); n > 5<<20+64<<10 || d.Bytes != 2*5<<20+3 {
			t.Errorf("%s: stored %d octets of %d", what, n, d.Bytes)
		}
	}
}
