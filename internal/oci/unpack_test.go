package oci

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/layertest"
)

func gz(b []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	w.Write(b)
	w.Close()
	return out.Bytes()
}

// unpackOver unpacks one layer over a folder, as engines do that keep no layers apart: entries replace what is there, folders without an
// entry of their own are left as they are, whiteouts remove what lower layers brought and nothing of their own layer.
func unpackOver(t *testing.T, dir string, b []byte) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	mine := map[string]bool{}
	var marks []func()
	for tr := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		must(err)
		p := filepath.Join(dir, h.Name)
		must(os.MkdirAll(filepath.Dir(p), 0o755))
		base, parent := filepath.Base(p), filepath.Dir(p)
		if base == opaqueMark {
			marks = append(marks, func() {
				list, _ := os.ReadDir(parent)
				for _, e := range list {
					hide(filepath.Join(parent, e.Name()), mine)
				}
			})
			continue
		}
		if strings.HasPrefix(base, whiteoutPrefix) {
			marks = append(marks, func() { hide(filepath.Join(parent, strings.TrimPrefix(base, whiteoutPrefix)), mine) })
			continue
		}
		info, err := os.Lstat(p)
		if err == nil && !(info.IsDir() && h.Typeflag == tar.TypeDir) {
			must(os.RemoveAll(p))
		}
		for q := p; q != dir; q = filepath.Dir(q) {
			mine[q] = true
		}
		switch h.Typeflag {
		case tar.TypeDir:
			if err := os.Mkdir(p, 0o755); err != nil && !os.IsExist(err) {
				t.Fatal(err)
			}
		case tar.TypeReg:
			data, _ := io.ReadAll(tr)
			must(os.WriteFile(p, data, 0o600))
		case tar.TypeSymlink:
			must(os.Symlink(h.Linkname, p))
			must(os.Lchown(p, h.Uid, h.Gid))
			continue
		case tar.TypeLink:
			must(os.Link(filepath.Join(dir, h.Linkname), p))
			continue
		case tar.TypeFifo:
			must(unix.Mkfifo(p, 0o600))
		}
		must(os.Lchown(p, h.Uid, h.Gid))
		must(unix.Chmod(p, uint32(h.Mode)))
		for k, v := range h.PAXRecords {
			if n, ok := strings.CutPrefix(k, xattrRecord); ok {
				must(unix.Lsetxattr(p, n, []byte(v), 0))
			}
		}
	}
	for _, m := range marks {
		m()
	}
}

func hide(p string, mine map[string]bool) {
	if !mine[p] {
		os.RemoveAll(p)
		return
	}
	list, _ := os.ReadDir(p)
	for _, e := range list {
		hide(filepath.Join(p, e.Name()), mine)
	}
}

// describe lists a tree with all that a program can see of it, but for times.
func describe(t *testing.T, dir string) string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		if rel == "." {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		line := fmt.Sprintf("%s %o %d:%d", rel, st.Mode, st.Uid, st.Gid)
		switch {
		case info.Mode().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %q", b)
		case info.Mode()&fs.ModeSymlink != 0:
			l, _ := os.Readlink(p)
			line += " -> " + l
		}
		buf := make([]byte, 100)
		if n, err := unix.Lgetxattr(p, "security.capability", buf); err == nil {
			line += fmt.Sprintf(" cap %x", buf[:n])
		}
		if n, err := unix.Lgetxattr(p, "user.note", buf); err == nil {
			line += fmt.Sprintf(" note %s", buf[:n])
		}
		out = append(out, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(out)
	return strings.Join(out, "\n")
}

// mountLayer mounts a layer, whichever form it has.
func (r *rig) mountLayer(id layer.ID) string {
	r.t.Helper()
	f, err := r.layers.Form(within(r.t), id)
	if err != nil {
		r.t.Fatal(err)
	}
	path := func(digest string) string {
		p, _ := r.store.Path("blobs/" + layer.ID(digest).Hex())
		return p
	}
	switch {
	case f.Kind == layer.FormEROFS:
		return layertest.Mount(r.t, path(f.Digest))
	case f.Data == nil:
		return layertest.MountSplit(r.t, path(f.Digest), "")
	}
	return layertest.MountSplit(r.t, path(f.Digest), path(f.Data.Digest))
}

// An image's layers, mounted over each other, show what an engine shows that unpacks them over each other.
func TestLayersLikeUnpacked(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	netRaw := "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	base := tarOf(file{name: "etc/"}, file{name: "etc/a", data: "1"}, file{name: "etc/b", data: "2"}, file{name: "tmp/", mode: 0o1777}, file{name: "home/"},
		file{name: "home/u/", mode: 0o700, uid: 1000}, file{name: "home/u/f", data: "f", uid: 1000}, file{name: "srv/", mode: 0o755, xattr: map[string]string{"user.note": "n"}},
		file{name: "bin/"}, file{name: "bin/su", mode: 0o4755, data: "su", uid: 3}, file{name: "bin/ping", mode: 0o755, data: "p", xattr: map[string]string{"security.capability": netRaw}},
		file{name: "h1", data: "hard"}, file{name: "h2", kind: tar.TypeLink, link: "h1"}, file{name: "h3", kind: tar.TypeLink, link: "h1"}, file{name: "s", kind: tar.TypeSymlink, link: "etc/a"},
		file{name: "fifo", kind: tar.TypeFifo, mode: 0o600}, file{name: "dir/"}, file{name: "dir/sub/"}, file{name: "dir/sub/x", data: "x"})
	for what, tars := range map[string][][]byte{
		"one":                   {base},
		"folders without entry": {base, tarOf(file{name: "tmp/x", data: "x"}, file{name: "home/u/new", data: "n"}, file{name: "srv/deep/er/y", data: "y"}, file{name: "newdir/z", data: "z"})},
		"twice without entry":   {base, tarOf(file{name: "tmp/x", data: "x"}), tarOf(file{name: "tmp/y", data: "y"}), tarOf(file{name: "home/u/.wh.f"}, file{name: "home/u/g", data: "g"})},
		"changed between":       {base, tarOf(file{name: "tmp/", mode: 0o750, uid: 5}), tarOf(file{name: "tmp/y", data: "y"})},
		"gone between":          {base, tarOf(file{name: ".wh.tmp"}), tarOf(file{name: "tmp/y", data: "y"})},
		"opaque above":          {base, tarOf(file{name: "home/"}, file{name: "home/.wh..wh..opq"}), tarOf(file{name: "home/u/y", data: "y"})},
		"its entry comes later": {base, tarOf(file{name: "tmp/y", data: "y"}, file{name: "tmp/", mode: 0o711, uid: 9})},
		"whiteouts":             {base, tarOf(file{name: "etc/.wh.a"}, file{name: ".wh.dir"}, file{name: ".wh.never"}), tarOf(file{name: "etc/a", data: "again"})},
		"opaque":                {base, tarOf(file{name: "etc/"}, file{name: "etc/.wh..wh..opq"}, file{name: "etc/only", data: "o"}), tarOf(file{name: "dir/.wh.sub"}, file{name: "dir/sub/", mode: 0o700}, file{name: "dir/sub/n", data: "n"})},
		"opaque root":           {base, tarOf(file{name: ".wh..wh..opq"}, file{name: "only", data: "o"}), tarOf(file{name: "etc/new", data: "n"})},
		"opaque root alone":     {base, tarOf(file{name: ".wh..wh..opq"}), tarOf(file{name: "etc/new", data: "n"})},
		"kinds change":          {base, tarOf(file{name: "dir", data: "now a file"}, file{name: "s/"}, file{name: "s/in", data: "i"}), tarOf(file{name: "dir/"}, file{name: "dir/again", data: "a"})},
		"hard links":            {base, tarOf(file{name: "h2", data: "other"}), tarOf(file{name: ".wh.h3"}, file{name: "l1", data: "l"}, file{name: "l2", kind: tar.TypeLink, link: "l1"})},
		"a layer again":         {base, tarOf(file{name: "etc/a", data: "x"}, file{name: "etc/.wh.b"}), base, tarOf(), tarOf(file{name: "etc/a", data: "x"}, file{name: "etc/.wh.b"})},
	} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, Config{}).serve(nil)
			ref := t.TempDir()
			for _, b := range tars {
				unpackOver(t, ref, b)
			}
			want := describe(t, ref)
			show := func(ids []layer.ID) string {
				var dirs []string
				for _, id := range ids {
					dirs = append(dirs, r.mountLayer(id))
				}
				merged, _ := layertest.Overlay(t, dirs...)
				return describe(t, merged)
			}
			got := r.mustPull(Pull{Ref: r.push("x:1", imageOf(t, nil, tars...))})
			if d := cmp.Diff(want, show(got.Layers)); d != "" {
				t.Errorf("mounted: %s", d)
			}
			// The same through an archive, whose layers are read again where folders must change.
			var list []string
			for _, b := range tars {
				if missing, err := r.Missing(within(t), "pushed", []string{digestOf(b)}); err != nil {
					t.Fatal(err)
				} else if len(missing) > 0 {
					if _, err := r.PushLayer(within(t), "pushed", digestOf(b), bytes.NewReader(b)); err != nil {
						t.Fatal(err)
					}
				}
				list = append(list, `"`+digestOf(b)+`"`)
			}
			fresh, err := r.Put(within(t), "pushed", "x:1", []byte(`{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":[`+strings.Join(list, ",")+`]}}`), "")
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(got.Layers, fresh.Layers); d != "" {
				t.Errorf("pushed: %s", d)
			}
			// And merged into few.
			if len(got.Layers) > 1 {
				id, err := r.merged(within(t), "default", got.Layers)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(want, show([]layer.ID{id})); d != "" {
					t.Errorf("merged: %s", d)
				}
			}
		})
	}
}
