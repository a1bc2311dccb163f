package layer_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/layer/layertest"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root to make devices and owners")
	}
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func write(t testing.TB, path, text string) string {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644))
	return path
}

type builder func(context.Context, string, erofs.Output, layer.Options) (*layer.Built, error)

func build(t testing.TB, from builder, dir string, opt layer.Options) (*layer.Built, string) {
	t.Helper()
	out := image(t)
	b, err := from(context.Background(), dir, out, opt)
	must(t, err)
	layertest.Fsck(t, out.Name())
	return b, layertest.Mount(t, out.Name())
}

// capV2 is cap_net_raw=ep as setcap writes it.
var capV2 = []byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

// B08: setuid bits, owners and capabilities of a folder, an archive of it and a snapshot over it.
func TestB08SetuidAndCapabilities(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	a, b, c := write(t, dir+"/a", "a"), write(t, dir+"/b", "b"), write(t, dir+"/c", "c")
	must(t, os.Chown(a, 1000, 1000), os.Chmod(a, 0o4755|os.ModeSetuid), unix.Chmod(a, 0o4755),
		os.Chown(b, 0, 42), unix.Chmod(b, 0o2755), unix.Setxattr(c, "security.capability", capV2, 0))
	want := []string{`a 104755 1000:1000 "a"`, `b 102755 0:42 "b"`, `c 100644 0:0 "c"`}
	_, base := build(t, layer.FromDir, dir, layer.Options{})
	if d := cmp.Diff(want, tree(t, base)); d != "" {
		t.Error(d)
	}
	wantCap := "0100000200200000000000000000000000000000"
	if got := xattr(t, base+"/c", "security.capability"); got != wantCap {
		t.Errorf("capability: %s", got)
	}

	merged, upper := layertest.Overlay(t, base)
	d, e := write(t, merged+"/tmp/d", "d"), write(t, merged+"/tmp/e", "e")
	must(t, unix.Chmod(d, 0o4755), unix.Setxattr(e, "security.capability", capV2, 0), os.Chmod(merged+"/a", 0o700), unix.Chmod(merged+"/a", 0o4711))
	_, snap := build(t, layer.FromUpper, upper, layer.Options{})
	again, _ := layertest.Overlay(t, base, snap)
	if d := cmp.Diff(tree(t, merged), tree(t, again)); d != "" {
		t.Error(d)
	}
	for _, p := range []string{"/c", "/tmp/e"} {
		if got := xattr(t, again+p, "security.capability"); got != wantCap {
			t.Errorf("capability of %s: %s", p, got)
		}
	}
}

// Where an upper's ids are shifted, a capture maps them back, with the root of namespaced capabilities.
func TestB08ShiftedUpper(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	f := write(t, dir+"/f", "f")
	v3 := append(bytes.Clone(capV2), 0, 0, 0, 0)
	v3[3] = 3
	binary.LittleEndian.PutUint32(v3[20:], 100000)
	must(t, os.Chown(dir, 100000, 100000), os.Chown(f, 100000+1000, 100000+5), unix.Setxattr(f, "security.capability", v3, 0))
	m := &layer.IDMap{Outside: 100000, Inside: 0, Count: 65536}
	_, mnt := build(t, layer.FromUpper, dir, layer.Options{Unshift: m})
	if d := cmp.Diff([]string{`f 100644 1000:5 "f"`}, tree(t, mnt)); d != "" {
		t.Error(d)
	}
	if got := xattr(t, mnt+"/f", "security.capability"); got != "0100000200200000000000000000000000000000" {
		t.Errorf("capability: %s", got)
	}
	must(t, os.Chown(f, 99, 0))
	if _, err := layer.FromUpper(context.Background(), dir, image(t), layer.Options{Unshift: m}); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), `"f"`) {
		t.Errorf("an owner outside of the range: %v", err)
	}
}

func TestDirOfEveryType(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	write(t, dir+"/sub/file", "text")
	write(t, dir+"/skip/this", "x")
	write(t, dir+"/sub/skip", "x")
	must(t, os.Link(dir+"/sub/file", dir+"/link"), os.Symlink("/etc/shadow", dir+"/sym"), unix.Mkfifo(dir+"/fifo", 0o640),
		unix.Mknod(dir+"/null", unix.S_IFCHR|0o644, int(unix.Mkdev(1, 3))), unix.Mknod(dir+"/white", unix.S_IFCHR, 0),
		unix.Mknod(dir+"/sock", unix.S_IFSOCK|0o600, 0), os.Mkdir(dir+"/proc", 0o555), unix.Chmod(dir+"/sub", 0o1777),
		unix.Setxattr(dir+"/sub", "trusted.t", []byte("1"), 0), unix.Lsetxattr(dir+"/sym", "trusted.s", []byte("2"), 0),
		unix.Setxattr(dir+"/sub", "trusted.overlay.redirect", []byte("/etc"), 0))
	when := time.Unix(1_600_000_000, 987654321)
	must(t, os.Chtimes(dir+"/sub/file", when, when))
	must(t, unix.Mount("proc", dir+"/proc", "proc", 0, ""))
	defer unix.Unmount(dir+"/proc", unix.MNT_DETACH)
	built, mnt := build(t, layer.FromDir, dir, layer.Options{Exclude: []string{"/skip", "sub/skip"}})
	want := []string{
		"fifo 10640 0:0", `link 100644 0:0 "text" n2`, "null 20644 0:0 1:3", "proc 40555 0:0", "sub 41777 0:0", `sub/file 100644 0:0 "text" n2`,
		"sym 120777 0:0 -> /etc/shadow", "white 20000 0:0 0:0",
	}
	if d := cmp.Diff(want, tree(t, mnt)); d != "" {
		t.Error(d)
	}
	if a, b := xattr(t, mnt+"/sub", "trusted.t"), xattr(t, mnt+"/sym", "trusted.s"); a != "31" || b != "32" {
		t.Errorf("attributes: %s %s", a, b)
	}
	if got := xattr(t, mnt+"/sub", "trusted.overlay.redirect"); got != unix.ENODATA.Error() {
		t.Errorf("an overlay's mark in a folder was taken: %s", got)
	}
	if st, err := os.Stat(mnt + "/sub/file"); err != nil || !st.ModTime().Equal(when) {
		t.Errorf("%v %v", st, err)
	}
	if d := cmp.Diff([]string{"proc: another mount; taken as an empty folder", "sock: a socket"}, built.Skipped); d != "" {
		t.Error(d)
	}
	_, mnt = build(t, layer.FromDir, dir+"/sub", layer.Options{Owner: &layer.Owner{UID: 7, GID: 8}})
	if d := cmp.Diff([]string{`file 100644 7:8 "text"`, `skip 100644 7:8 "x"`}, tree(t, mnt)); d != "" {
		t.Error(d)
	}
}

// An archive and a folder with the same tree have the same ID.
func TestDirAndTarAgree(t *testing.T) {
	tool, err := exec.LookPath("tar")
	if err != nil {
		t.Skip("skip: no tar")
	}
	dir := t.TempDir()
	write(t, dir+"/a/b", "1")
	write(t, dir+"/a.c", "2")
	must(t, os.Link(dir+"/a.c", dir+"/z"), os.Symlink("a", dir+"/s"))
	data, err := exec.Command(tool, "-C", dir, "--format=pax", "--numeric-owner", "-c", ".").Output()
	must(t, err)
	x, err := layer.FromTar(context.Background(), bytes.NewReader(data), image(t), layer.Options{})
	must(t, err)
	y, err := layer.FromDir(context.Background(), dir, image(t), layer.Options{})
	must(t, err)
	if x.ID != y.ID || x.Entries != y.Entries || x.Bytes != y.Bytes {
		t.Errorf("%+v\n%+v", x, y)
	}
}

// A snapshot that is stacked on its lowers shows what the live sandbox showed.
func TestUpperRestacked(t *testing.T) {
	_, base := importTar(t, folder("d"), file("d/keep", "1"), file("d/gone", "2"), folder("moved"), file("moved/inside", "3"),
		folder("opaque"), file("opaque/old", "4"), file("changed", "5"), file("h1", "6"), hardlink("h2", "h1"), folder("emptied"), file("emptied/x", "7"))
	merged, upper := layertest.Overlay(t, base)
	must(t, os.Remove(merged+"/d/gone"), os.Rename(merged+"/moved", merged+"/d/renamed"), os.RemoveAll(merged+"/opaque"), os.Mkdir(merged+"/opaque", 0o700),
		os.WriteFile(merged+"/opaque/new", []byte("8"), 0o600), os.WriteFile(merged+"/changed", []byte("9"), 0o644), os.Remove(merged+"/emptied/x"),
		os.WriteFile(merged+"/h1", []byte("10"), 0o644), os.Link(merged+"/changed", merged+"/changed2"), os.WriteFile(merged+"/secret", []byte("s"), 0o600),
		unix.Mknod(merged+"/sock", unix.S_IFSOCK|0o600, 0))
	live := tree(t, merged)
	built, snap := build(t, layer.FromUpper, upper, layer.Options{Exclude: []string{"secret"}})
	again, _ := layertest.Overlay(t, base, snap)
	want := make([]string, 0, len(live))
	for _, l := range live {
		if !strings.HasPrefix(l, "secret ") && !strings.HasPrefix(l, "sock ") {
			want = append(want, l)
		}
	}
	if d := cmp.Diff(want, tree(t, again)); d != "" {
		t.Errorf("live -, restacked +:\n%s", d)
	}
	if d := cmp.Diff([]string{"sock: a socket"}, built.Skipped); d != "" {
		t.Error(d)
	}
	if got := xattr(t, snap+"/opaque", "trusted.overlay.opaque"); got != "79" {
		t.Errorf("opaque: %s", got)
	}
	if got := xattr(t, snap+"/d/renamed", "trusted.overlay.redirect"); !strings.HasPrefix(got, "2f") {
		t.Errorf("redirect: %s", got)
	}
	for _, m := range []string{"impure", "uuid"} {
		if got := xattr(t, snap+"/d", "trusted.overlay."+m); got != unix.ENODATA.Error() {
			t.Errorf("%s was kept: %s", m, got)
		}
	}
}

func TestUpperWithMetacopyIsRefused(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	must(t, unix.Setxattr(write(t, dir+"/f", ""), "trusted.overlay.metacopy", nil, 0))
	if _, err := layer.FromUpper(context.Background(), dir, image(t), layer.Options{}); !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), `"f"`) {
		t.Error(err)
	}
}

func TestDirThatIsWrong(t *testing.T) {
	dir := t.TempDir()
	f := write(t, dir+"/f", "")
	for path, want := range map[string]error{dir + "/none": sandbox.ErrNotFound, f: sandbox.ErrInvalid} {
		if _, err := layer.FromDir(context.Background(), path, image(t), layer.Options{}); !errors.Is(err, want) {
			t.Errorf("%s: %v", path, err)
		}
	}
	at := dir
	for range 30 {
		at += "/d"
	}
	must(t, os.MkdirAll(at, 0o755))
	if _, err := layer.FromDir(context.Background(), dir, image(t), layer.Options{Limits: layer.Limits{Depth: 20}}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("too deep: %v", err)
	}
}
