package layer_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/layertest"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// entry is a header with its content; Size and Format are filled in.
type entry struct {
	tar.Header
	body string
}

func file(name, body string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, body}
}
func folder(name string) entry {
	return entry{tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755}, ""}
}
func symlink(name, to string) entry {
	return entry{tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to, Mode: 0o777}, ""}
}
func hardlink(name, to string) entry {
	return entry{tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to}, ""}
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size = int64(len(e.body))
		if e.Format == tar.FormatUnknown {
			e.Format = tar.FormatPAX
		}
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatalf("%s: %v", e.Name, err)
		}
		io.WriteString(w, e.body)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func image(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// importTar builds the layer and mounts it.
func importTar(t testing.TB, entries ...entry) (*layer.Built, string) {
	t.Helper()
	out := image(t)
	b, err := layer.FromTar(context.Background(), bytes.NewReader(archive(t, entries...)), out, layer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	layertest.Fsck(t, out.Name())
	return b, layertest.Mount(t, out.Name())
}

// tree lists a folder, one line a name: "<path> <type><mode> <uid>:<gid> <detail>".
func tree(t testing.TB, root string) []string {
	t.Helper()
	var lines []string
	err := filepath.Walk(root, func(p string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		if rel == "." {
			return nil
		}
		st := info.Sys().(*syscall.Stat_t)
		detail := ""
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			detail = fmt.Sprintf("%q", b)
			if len(b) > 60 {
				detail = fmt.Sprintf("%d octets", len(b))
			}
		case unix.S_IFLNK:
			target, _ := os.Readlink(p)
			detail = "-> " + target
		case unix.S_IFCHR, unix.S_IFBLK:
			detail = fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
		if st.Nlink > 1 && !info.IsDir() {
			detail += fmt.Sprintf(" n%d", st.Nlink)
		}
		lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s %o %d:%d %s", rel, st.Mode, st.Uid, st.Gid, detail)))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(lines)
	return lines
}

func xattr(t testing.TB, path, name string) string {
	t.Helper()
	b := make([]byte, 1024)
	n, err := unix.Lgetxattr(path, name, b)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%x", b[:n])
}

func TestTarOfEveryType(t *testing.T) {
	when := time.Unix(1_700_000_000, 123456789)
	built, mnt := importTar(t,
		entry{tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o711, Uid: 3, ModTime: when}, ""},
		entry{tar.Header{Typeflag: tar.TypeReg, Name: "./a/b/c", Mode: 0o6755, Uid: 1000, Gid: 70000, ModTime: when,
			PAXRecords: map[string]string{"SCHILY.xattr.user.k": "v\x00w", "SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}}, "text"},
		symlink("/abs/link", "/etc/passwd"),
		entry{tar.Header{Typeflag: tar.TypeChar, Name: "null", Mode: 0o666, Devmajor: 1, Devminor: 3}, ""},
		entry{tar.Header{Typeflag: tar.TypeBlock, Name: "disk", Mode: 0o660, Devmajor: 8, Devminor: 300}, ""},
		entry{tar.Header{Typeflag: tar.TypeFifo, Name: "p", Mode: 0o600}, ""},
		file("gone-then-back", "old"), file("gone-then-back", "new"),
		file("odd\nname\xff", "x"),
		folder("kept"), file("kept/x", "x"),
		entry{tar.Header{Typeflag: tar.TypeDir, Name: "kept", Mode: 0o700}, ""},
	)
	want := []string{
		"a 40755 0:0", "a/b 40755 0:0", `a/b/c 106755 1000:70000 "text"`, "abs 40755 0:0", "abs/link 120777 0:0 -> /etc/passwd",
		"disk 60660 0:0 8:300", `gone-then-back 100644 0:0 "new"`, "kept 40700 0:0", `kept/x 100644 0:0 "x"`, "null 20666 0:0 1:3",
		"odd\nname\xff 100644 0:0 \"x\"", "p 10600 0:0",
	}
	if d := cmp.Diff(want, tree(t, mnt)); d != "" {
		t.Error(d)
	}
	if got := xattr(t, filepath.Join(mnt, "a/b/c"), "user.k"); got != "760077" {
		t.Errorf("user.k: %s", got)
	}
	if got := xattr(t, filepath.Join(mnt, "a/b/c"), "security.capability"); got != "0100000200200000000000000000000000000000" {
		t.Errorf("capability: %s", got)
	}
	st, err := os.Stat(mnt)
	if err != nil || st.Mode().Perm() != 0o711 || !st.ModTime().Equal(when) || st.Sys().(*syscall.Stat_t).Uid != 3 {
		t.Errorf("root: %v %v", st, err)
	}
	if built.Entries != int64(len(want)) || built.Bytes != 4+3+1+1 || built.Arch != layer.AnyArch {
		t.Errorf("%+v", built)
	}
}

func TestTarThatIsRefused(t *testing.T) {
	good := archive(t, file("a", "text"), file("b", strings.Repeat("x", 3000)))
	raw := func(b []byte) []byte { return b }
	for name, c := range map[string]struct {
		data []byte
		want string // in the error
	}{
		"parent":              {archive(t, file("a/../../etc/passwd", "x")), "a/../../etc/passwd"},
		"only dots":           {archive(t, file("..", "x")), `".."`},
		"through a link":      {archive(t, symlink("etc", "/etc"), file("etc/passwd", "x")), `"etc/passwd": "etc" is a symbolic link`},
		"below a file":        {archive(t, file("f", ""), file("f/x", "x")), `"f/x": "f" is not a folder`},
		"B24 link first":      {archive(t, hardlink("l", "later"), file("later", "x")), `"l": hard link to "later", which is not in the archive before it`},
		"link through a link": {archive(t, symlink("d", "/"), hardlink("l", "d/etc/passwd")), `"d" is a symbolic link`},
		"link outside":        {archive(t, hardlink("l", "../../etc/shadow")), "../../etc/shadow"},
		"link to a folder":    {archive(t, folder("d"), hardlink("l", "d")), "hard link to the folder"},
		"file over a folder":  {archive(t, folder("d"), file("d/x", ""), file("d", "x")), `"d": a folder of that name`},
		"long part":           {archive(t, file(strings.Repeat("n", 256), "")), "at most 255"},
		"too deep":            {archive(t, file(strings.Repeat("d/", 1100)+"f", "")), "deeper than 1024"},
		"wrong xattr":         {archive(t, entry{tar.Header{Typeflag: tar.TypeReg, Name: "x", PAXRecords: map[string]string{"SCHILY.xattr.bogus.a": "1"}}, ""}), `"x": attribute "bogus.a"`},
		"root as file":        {archive(t, file(".", "")), "root"},
		"below a whiteout":    {archive(t, file("a/.wh.b/c", "")), `".wh.b"`},
		"whiteout of nothing": {archive(t, file("a/.wh.", "")), "whiteout of nothing"},
		"cut in content":      {good[:1024+512+700], `"b"`},
		"cut between entries": {good[:1024], `cut off`},
		"cut in a header":     {good[:1024+100], `"a"`},
		"no tar":              {raw([]byte(strings.Repeat("hello ", 500))), "not a tar archive"},
		"short and no tar":    {raw([]byte("hello\n")), "not a tar archive, or"},
		"nothing":             {nil, "cut off"},
		"broken gzip":         {[]byte{0x1f, 0x8b, 0, 0, 0}, "gzip"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := layer.FromTar(context.Background(), bytes.NewReader(c.data), image(t), layer.Options{})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
			if !errors.Is(err, sandbox.ErrInvalid) && !errors.Is(err, sandbox.ErrUnsupported) {
				t.Errorf("%v is not the sender's fault", err)
			}
		})
	}
}

func TestTarLimits(t *testing.T) {
	var many []entry
	for i := range 50 {
		many = append(many, file(fmt.Sprint(i), strings.Repeat("x", 100)))
	}
	data := archive(t, many...)
	for name, l := range map[string]layer.Limits{"entries": {Entries: 49}, "bytes": {Bytes: 4999}} {
		_, err := layer.FromTar(context.Background(), bytes.NewReader(data), image(t), layer.Options{Limits: l})
		if !errors.Is(err, sandbox.ErrExhausted) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := layer.FromTar(context.Background(), bytes.NewReader(data), image(t), layer.Options{Limits: layer.Limits{Entries: 50, Bytes: 5000}}); err != nil {
		t.Errorf("at the limits: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := layer.FromTar(ctx, bytes.NewReader(data), image(t), layer.Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestTarCompressed(t *testing.T) {
	data := archive(t, file("a", strings.Repeat("text", 10000)))
	id := func(b []byte) layer.ID {
		built, err := layer.FromTar(context.Background(), bytes.NewReader(b), image(t), layer.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return built.ID
	}
	var gz, zs bytes.Buffer
	g := gzip.NewWriter(&gz)
	g.Write(data)
	g.Close()
	z, _ := zstd.NewWriter(&zs)
	z.Write(data)
	z.Close()
	if a, b, c := id(data), id(gz.Bytes()), id(zs.Bytes()); a != b || a != c {
		t.Errorf("%s %s %s", a, b, c)
	}
}

func TestTarGNUSparse(t *testing.T) {
	tool, err := exec.LookPath("tar")
	if err != nil {
		t.Skip("skip: no tar")
	}
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	f.WriteAt([]byte("island"), 3<<20)
	f.Truncate(8 << 20)
	f.Close()
	for _, format := range []string{"gnu", "pax"} {
		data, err := exec.Command(tool, "-C", dir, "--sparse", "--format="+format, "-c", "sparse").Output()
		if err != nil || len(data) > 1<<20 {
			t.Fatalf("%d octets, %v", len(data), err)
		}
		out := image(t)
		built, err := layer.FromTar(context.Background(), bytes.NewReader(data), out, layer.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if built.Bytes != 8<<20 || built.Size > 1<<20 {
			t.Errorf("%s: %+v", format, built)
		}
		got, err := os.ReadFile(filepath.Join(layertest.Mount(t, out.Name()), "sparse"))
		if err != nil || len(got) != 8<<20 || string(got[3<<20:3<<20+6]) != "island" {
			t.Errorf("%s: %d octets, %v", format, len(got), err)
		}
	}
}

// An archive of a few octets that declares a huge file of holes is refused before they are read, also when several declare it together; so
// are zeros that are really there, at their limit.
func TestTarOfHugeHoles(t *testing.T) {
	tool, err := exec.LookPath("tar")
	if err != nil {
		t.Skip("skip: no tar")
	}
	dir := t.TempDir()
	for name, size := range map[string]int64{"huge": 200 << 30, "b": 20 << 20, "c": 20 << 20} {
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.WriteAt([]byte("island"), size/2)
		if err := errors.Join(err, f.Truncate(size), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	limits := layer.Limits{Holes: 30 << 20}
	for _, format := range []string{"gnu", "pax"} {
		for name, l := range map[string]layer.Limits{"huge": {}, "b c": limits} {
			data, err := exec.Command(tool, append([]string{"-C", dir, "--sparse", "--format=" + format, "-c"}, strings.Fields(name)...)...).Output()
			if err != nil || len(data) > 1<<20 {
				t.Fatalf("%d octets, %v", len(data), err)
			}
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			_, err = layer.FromTar(ctx, bytes.NewReader(data), image(t), layer.Options{Limits: l})
			cancel()
			if !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), "sparse files") {
				t.Errorf("%s, %s: %v", format, name, err)
			}
		}
	}
	zeros := archive(t, file("1", strings.Repeat("\x00", 20<<20)), file("2", strings.Repeat("\x00", 10<<20)), file("3", strings.Repeat("\x00", 64<<10)))
	if _, err := layer.FromTar(context.Background(), bytes.NewReader(zeros), image(t), layer.Options{Limits: limits}); !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), `"3"`) {
		t.Errorf("zeros: %v", err)
	}
	limits.Holes += 64 << 10
	if _, err := layer.FromTar(context.Background(), bytes.NewReader(zeros), image(t), layer.Options{Limits: limits}); err != nil {
		t.Errorf("zeros at the limit: %v", err)
	}
}

// A symbolic link has the permissions that file systems give it, whatever an archive says of them.
func TestPermissionsOfLinksAreNone(t *testing.T) {
	var ids []layer.ID
	for _, mode := range []int64{0o777, 0o755, 0, 0o7777} {
		l := symlink("l", "to")
		l.Mode = mode
		built, _ := importTar(t, l)
		ids = append(ids, built.ID)
	}
	if len(slices.Compact(ids)) != 1 {
		t.Errorf("IDs differ: %v", ids)
	}
}

// The ID is of the tree: order of the archive, a base name's spelling, replaced entries and compression do not count; every
// attribute of a file does.
func TestIDIsOfTheTree(t *testing.T) {
	id := func(entries ...entry) layer.ID {
		t.Helper()
		b, err := layer.FromTar(context.Background(), bytes.NewReader(archive(t, entries...)), image(t), layer.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return b.ID
	}
	base := id(folder("d"), file("d/a", "1"), hardlink("d/b", "d/a"), file("z", "2"))
	for name, same := range map[string]layer.ID{
		"order":    id(file("z", "2"), folder("d"), file("d/b", "1"), hardlink("d/a", "d/b")),
		"spelling": id(folder("./d/"), file("/d//a", "1"), hardlink("d/b", "./d/a"), file("z", "2")),
		"replaced": id(file("z", "other"), folder("d"), file("d/a", "1"), hardlink("d/b", "d/a"), file("z", "2")),
	} {
		if same != base {
			t.Errorf("%s: %s, want %s", name, same, base)
		}
	}
	mode := file("z", "2")
	mode.Mode = 0o600
	owner := file("z", "2")
	owner.Gid = 1
	when := file("z", "2")
	when.ModTime = time.Unix(1, 1)
	attribute := file("z", "2")
	attribute.PAXRecords = map[string]string{"SCHILY.xattr.user.a": ""}
	rest := []entry{folder("d"), file("d/a", "1"), hardlink("d/b", "d/a")}
	seen := map[layer.ID]string{base: "base"}
	for name, last := range map[string][]entry{
		"mode": {mode}, "owner": {owner}, "time": {when}, "attribute": {attribute}, "content": {file("z", "3")}, "name": {file("y", "2")},
		"type": {symlink("z", "2")}, "missing": nil, "whiteout": {file("z", "2"), file(".wh.q", "")},
	} {
		got := id(append(rest[:3:3], last...)...)
		if other, ok := seen[got]; ok {
			t.Errorf("%s has the ID of %s", name, other)
		}
		seen[got] = name
	}
	if copies := id(folder("d"), file("d/a", "1"), file("d/b", "1"), file("z", "2")); copies == base {
		t.Error("two files have the ID of one with two names")
	}
}

// A change of these means that every layer ever made gets another ID.
func TestIDsAreFrozen(t *testing.T) {
	b, err := layer.FromTar(context.Background(), bytes.NewReader(archive(t, folder("d"), file("d/a", "hello"), hardlink("e", "d/a"), symlink("s", "d/a"),
		file("d/.wh.gone", ""), entry{tar.Header{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3}, ""})), image(t), layer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const want = "sha256:7cf02f04ec3df3c48df4cded305bc7498b84ab58ab5fc3496ab94b1d4f0efb94"
	if b.ID != want {
		t.Errorf("%s, want %s", b.ID, want)
	}
}

// B03: deletion marks over a base that has no such folder or file must not show.
func TestB03WhiteoutsThatHideNothing(t *testing.T) {
	_, work := importTar(t, file("home/.wh.gone.txt", ""), file("home/kept", "k"))
	_, without := importTar(t, folder("etc"))
	_, other := importTar(t, folder("usr"))
	_, empty := importTar(t, folder("home"))
	_, with := importTar(t, folder("home"), file("home/gone.txt", "x"), file("home/base", "b"))
	for name, c := range map[string]struct {
		lowers []string
		want   []string
	}{
		"no home":       {[]string{without, work}, []string{"kept"}},
		"empty home":    {[]string{empty, work}, []string{"kept"}},
		"gone is there": {[]string{with, work}, []string{"base", "kept"}},
		"two over it":   {[]string{without, work, other}, []string{"kept"}},
	} {
		t.Run(name, func(t *testing.T) {
			merged, _ := layertest.Overlay(t, c.lowers...)
			for _, cmdline := range [][]string{{"ls", "-la", "home"}, {"tar", "-c", "-f", "/dev/null", "home"}} {
				cmd := exec.Command(cmdline[0], cmdline[1:]...)
				cmd.Dir = merged
				if out, err := cmd.CombinedOutput(); err != nil || bytes.Contains(out, []byte("?")) || bytes.Contains(out, []byte("gone")) {
					t.Errorf("%v: %v\n%s", cmdline, err, out)
				}
			}
			entries, err := os.ReadDir(filepath.Join(merged, "home"))
			var names []string
			for _, e := range entries {
				names = append(names, e.Name())
			}
			if d := cmp.Diff(c.want, names); err != nil || d != "" {
				t.Errorf("%v %s", err, d)
			}
		})
	}
}

func TestOpaqueFoldersAndReplacedOnes(t *testing.T) {
	_, base := importTar(t, folder("o"), file("o/old", "1"), folder("r"), file("r/old", "1"), folder("f"), file("f/old", "1"), file("p/q", "1"))
	_, top := importTar(t,
		file("o/.wh..wh..opq", ""), folder("o"), file("o/new", "2"), // the mark before the folder's own entry
		file(".wh.r", ""), folder("r"), file("r/new", "2"), // removed and made again
		file(".wh.f", ""), file("f", "now a file"),
		file(".wh.p", ""), file(".wh..wh.plnk/1", ""),
	)
	merged, _ := layertest.Overlay(t, base, top)
	want := []string{`f 100644 0:0 "now a file"`, "o 40755 0:0", `o/new 100644 0:0 "2"`, "r 40755 0:0", `r/new 100644 0:0 "2"`}
	if d := cmp.Diff(want, tree(t, merged)); d != "" {
		t.Error(d)
	}
}

// B24: hard links stay one inode, are stored once, and a replaced or removed name leaves the others alone.
func TestB24HardLinks(t *testing.T) {
	five := strings.Repeat("five megabytes! ", 5<<20/16)
	built, l1 := importTar(t, file("f1", five), hardlink("f2", "f1"), hardlink("f3", "./f1"), symlink("s", "f1"), hardlink("s2", "s"),
		entry{tar.Header{Typeflag: tar.TypeFifo, Name: "p", Mode: 0o644}, ""}, hardlink("p2", "p"))
	want := []string{
		"f1 100644 0:0 5242880 octets n3", "f2 100644 0:0 5242880 octets n3", "f3 100644 0:0 5242880 octets n3",
		"p 10644 0:0  n2", "p2 10644 0:0  n2", "s 120777 0:0 -> f1 n2", "s2 120777 0:0 -> f1 n2",
	}
	if d := cmp.Diff(want, tree(t, l1)); d != "" {
		t.Error(d)
	}
	inode := func(p string) uint64 {
		st, err := os.Lstat(filepath.Join(l1, p))
		if err != nil {
			t.Fatal(err)
		}
		return st.Sys().(*syscall.Stat_t).Ino
	}
	if inode("f1") != inode("f2") || inode("f1") != inode("f3") || inode("s") != inode("s2") || inode("p") != inode("p2") {
		t.Error("links are copies")
	}
	if built.Size > 5<<20+64<<10 || built.Bytes != 5<<20 {
		t.Errorf("stored more than once: %+v", built)
	}
	_, l2 := importTar(t, file("f2", "new"), file(".wh.f3", ""))
	merged, _ := layertest.Overlay(t, l1, l2)
	if b, err := os.ReadFile(filepath.Join(merged, "f1")); err != nil || string(b) != five {
		t.Errorf("f1: %d octets, %v", len(b), err)
	}
	if b, err := os.ReadFile(filepath.Join(merged, "f2")); err != nil || string(b) != "new" {
		t.Errorf("f2: %.20q, %v", b, err)
	}
	if _, err := os.Lstat(filepath.Join(merged, "f3")); !os.IsNotExist(err) {
		t.Errorf("f3: %v", err)
	}
}

// A tenant's archive must not carry marks by which the overlay would show what lower layers hide.
func TestTarOverlayMarks(t *testing.T) {
	_, base := importTar(t, folder("secret"), file("secret/x", "x"), folder("d"), file("d/y", "y"))
	e := folder("win")
	e.PAXRecords = map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "/secret"}
	o := folder("d")
	o.PAXRecords = map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"}
	out := image(t)
	built, err := layer.FromTar(context.Background(), bytes.NewReader(archive(t, e, o)), out, layer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"win: attribute trusted.overlay.redirect"}, built.Skipped); d != "" {
		t.Error(d)
	}
	merged, _ := layertest.Overlay(t, base, layertest.Mount(t, out.Name()))
	if d := cmp.Diff([]string{"d 40755 0:0", "secret 40755 0:0", `secret/x 100644 0:0 "x"`, "win 40755 0:0"}, tree(t, merged)); d != "" {
		t.Error(d)
	}
}

func TestArchitecture(t *testing.T) {
	elf := func(name string, machine byte, mode int64) entry {
		b := make([]byte, 64)
		copy(b, "\x7fELF\x02\x01\x01")
		b[16], b[18] = 3, machine
		e := file(name, string(b))
		e.Mode = mode
		return e
	}
	for want, entries := range map[string][]entry{
		"amd64": {elf("bin/sh", 62, 0o755), elf("bin/ls", 62, 0o755), elf("testdata/arm", 183, 0o755)},
		"arm64": {elf("bin/sh", 183, 0o755), elf("usr/share/x", 62, 0o644)},
		"any":   {file("a.py", "print()"), elf("data", 62, 0o644)},
	} {
		b, err := layer.FromTar(context.Background(), bytes.NewReader(archive(t, entries...)), image(t), layer.Options{})
		if err != nil || b.Arch != want {
			t.Errorf("%s: %+v %v", want, b, err)
		}
	}
}
