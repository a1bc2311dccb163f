package guest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// B12: a file call through a link inside goes where a command inside would go, never to the host.
func TestB12LinksAreFollowedInside(t *testing.T) {
	root := jail(t)
	f := serveIn(t, root, 0)
	ctx := within(t)
	in := func(p string) string { return filepath.Join(root, p) }
	check(t, os.Symlink("/run", in("var/run")))
	check(t, os.Symlink("/etc", in("l")))
	check(t, os.Symlink("../../../../../../../../etc", in("m")))
	check(t, os.Symlink("loop", in("loop")))

	write(t, f, WriteHeader{Path: "/var/run/app/x", Parents: true}, "x")
	write(t, f, WriteHeader{Path: "/l/mark"}, "1")
	write(t, f, WriteHeader{Path: "/m/mark2"}, "2")
	for p, want := range map[string]string{"run/app/x": "x", "etc/mark": "1", "etc/mark2": "2"} {
		if b, err := os.ReadFile(in(p)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", p, b, err)
		}
	}
	_, err := f.Read(ctx, "/loop", 0, 0)
	wantErr(t, "read /loop", err, sandbox.ErrInvalid)
	if err == nil || !strings.Contains(err.Error(), "/loop") || !strings.Contains(err.Error(), "loop?") {
		t.Errorf("the loop's error is not clear: %v", err)
	}
	_, err = f.Write(ctx, WriteHeader{Path: "/loop", Size: -1}, strings.NewReader("x"))
	wantErr(t, "write /loop", err, sandbox.ErrInvalid)
	if i, err := f.Stat(ctx, "/loop", false); err != nil || i.Kind != Link || i.Target != "loop" {
		t.Errorf("stat of the loop: %+v, %v", i, err)
	}

	tree := tarOf(t, entryOf{"d/", "", 0o755, '5', ""}, entryOf{"d/f", "body", 0o644, '0', ""})
	_, err = f.Upload(ctx, UploadHeader{Path: "/var/run"}, tree)
	check(t, err)
	if b, err := os.ReadFile(in("run/d/f")); err != nil || string(b) != "body" {
		t.Errorf("tree into a link: %q, %v", b, err)
	}
	// A link that leads nowhere: `cat >` makes its target.
	check(t, os.Symlink("/tmp/made", in("tmp/dangling")))
	write(t, f, WriteHeader{Path: "/tmp/dangling"}, "through")
	if b, err := os.ReadFile(in("tmp/made")); err != nil || string(b) != "through" {
		t.Errorf("through a dangling link: %q, %v", b, err)
	}
}

// B12: the link is swapped with a folder 10,000 times while files are written through it.
func TestB12RaceStaysInside(t *testing.T) {
	root := jail(t)
	outside := t.TempDir()
	f := serveIn(t, root, 0)
	in := func(p string) string { return filepath.Join(root, p) }
	check(t, os.Mkdir(in("real"), 0o755))
	check(t, os.Mkdir(in("l"), 0o755))
	// The same path exists on the host: what follows the link outside would land there.
	check(t, os.MkdirAll(in(outside), 0o755))
	check(t, os.Symlink(outside, in("link")))
	done := make(chan struct{})
	var calls atomic.Int64
	go func() {
		defer close(done)
		// Each swap pair leaves a moment in which calls run; the race goes on until many met it.
		for n := 0; n < 10000 || calls.Load() < 3000 && n < 1000000; n++ {
			if err := unix.Renameat2(unix.AT_FDCWD, in("l"), unix.AT_FDCWD, in("link"), unix.RENAME_EXCHANGE); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	var group sync.WaitGroup
	for w := range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for n := 0; ; n++ {
				select {
				case <-done:
					return
				default:
				}
				calls.Add(1)
				p := fmt.Sprintf("/l/w%d", w)
				switch n % 3 {
				case 0:
					if _, err := f.Write(context.Background(), WriteHeader{Path: p, Size: 1, Parents: true}, strings.NewReader("x")); err != nil {
						t.Error(err)
					}
				case 1:
					if _, err := f.Upload(context.Background(), UploadHeader{Path: "/l"}, tarOf(t, entryOf{fmt.Sprintf("u%d/x", w), "x", 0o644, '0', ""})); err != nil {
						t.Error(err)
					}
				case 2:
					if err := f.List(context.Background(), "/l", 3, func([]Info) error { return nil }); err != nil {
						t.Error(err)
					}
				}
			}
		}()
	}
	group.Wait()
	t.Logf("%d calls", calls.Load())
	left, err := os.ReadDir(outside)
	check(t, err)
	if len(left) != 0 {
		t.Fatalf("on the host: %v", left)
	}
}

// oddFolder makes what B19 lists.
func oddFolder(t *testing.T, dir string) {
	check(t, os.WriteFile(filepath.Join(dir, "file"), []byte("f"), 0o644))
	check(t, os.Symlink("/no/where", filepath.Join(dir, "nowhere")))
	check(t, os.Symlink("self", filepath.Join(dir, "self")))
	check(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o644))
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	check(t, unix.Mknod(filepath.Join(dir, "socket"), unix.S_IFSOCK|0o755, 0))
	unix.Close(s)
	check(t, unix.Mknod(filepath.Join(dir, "device"), unix.S_IFCHR|0o644, int(unix.Mkdev(1, 3))))
	check(t, os.Mkdir(filepath.Join(dir, "closed"), 0o700))
	check(t, os.WriteFile(filepath.Join(dir, "closed", "inside"), nil, 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "\xff"), []byte("b"), 0o644))
	check(t, os.WriteFile(filepath.Join(dir, "secret"), nil, 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "a\nb"), nil, 0o644))
}

// B19: odd entries never make a listing or a transfer fail.
func TestB19OddEntries(t *testing.T) {
	root := jail(t)
	dir := filepath.Join(root, "odd")
	check(t, os.Mkdir(dir, 0o755))
	oddFolder(t, dir)
	f := serveIn(t, root, 65534)
	ctx := within(t)
	got := map[string]string{}
	err := f.List(ctx, "/odd", 5, func(list []Info) error {
		for _, i := range list {
			if i.Error != "" {
				got[i.Path] += " error: " + i.Error
				continue
			}
			got[i.Path] = string(i.Kind) + map[bool]string{true: " -> " + i.Target}[i.Kind == Link] + got[i.Path]
		}
		return nil
	})
	check(t, err)
	want := map[string]string{
		"file": "file", "nowhere": "link -> /no/where", "self": "link -> self", "fifo": "fifo", "socket": "socket", "device": "char",
		"closed": "dir error: permission denied", "\xff": "file", "secret": "file", "a\nb": "file",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for name := range want {
		i, err := f.Stat(ctx, "/odd/"+name, false)
		if err != nil || !strings.HasPrefix(want[name], string(i.Kind)) {
			t.Errorf("stat %q: %+v, %v", name, i, err)
		}
	}
	_, err = f.Stat(ctx, "/odd/nowhere", true)
	wantErr(t, "stat through a dangling link", err, sandbox.ErrNotFound)

	tree, err := f.Download(ctx, "/odd", nil)
	check(t, err)
	names, err := tarNames(tree)
	check(t, err)
	wantNames := []string{"./", "a\nb", "closed/", "device", "fifo", "file", "nowhere", "self", "\xff"}
	if d := cmp.Diff(wantNames, names); d != "" {
		t.Error(d)
	}
	skipped, n := tree.Skipped()
	sort.Strings(skipped)
	wantSkipped := []string{`"closed": permission denied`, `"secret": permission denied`, `"socket": is a socket, which a tar can't hold`}
	if d := cmp.Diff(wantSkipped, skipped); d != "" || n != 3 {
		t.Error(n, d)
	}
}

// B21: a tree goes up and down again and stays the same; what is made belongs to the user.
func TestB21TreesStayTheSame(t *testing.T) {
	root := jail(t)
	f := serveIn(t, root, 1000)
	ctx := within(t)
	old := time.Date(2001, 2, 3, 4, 5, 6, 123456789, time.UTC)
	r := write(t, f, WriteHeader{Path: "/home/alice/n1/n2/run.sh", Parents: true, Mode: 0o755, Modified: old}, "#!/bin/sh\n")
	if r.Info.Mode != 0o755 || !r.Info.Modified.Equal(old) || r.Info.Owner != "alice" || r.Info.Group != "alice" {
		t.Errorf("run.sh: %+v", r.Info)
	}
	for _, p := range []string{"/home/alice/n1", "/home/alice/n1/n2"} {
		if i, err := f.Stat(ctx, p, false); err != nil || i.UID != 1000 || i.GID != 1000 || i.Mode != 0o755 {
			t.Errorf("%s: %+v, %v", p, i, err)
		}
	}
	check(t, f.Remove(ctx, "/home/alice/n1", true, false))

	src := t.TempDir()
	long := strings.Repeat("n", 200)
	deep := strings.Repeat(strings.Repeat("p", 99)+"/", 4)
	check(t, os.MkdirAll(filepath.Join(src, deep), 0o755))
	check(t, os.WriteFile(filepath.Join(src, deep, "end"), []byte("deep"), 0o644))
	check(t, os.WriteFile(filepath.Join(src, long), []byte("long"), 0o755))
	check(t, os.WriteFile(filepath.Join(src, "private"), []byte("p"), 0o600))
	check(t, os.WriteFile(filepath.Join(src, "\xff\xfe"), []byte("octets"), 0o640))
	check(t, os.WriteFile(filepath.Join(src, "grün"), []byte("utf"), 0o640))
	check(t, os.Mkdir(filepath.Join(src, "empty"), 0o711))
	check(t, os.Mkdir(filepath.Join(src, "shut"), 0o755))
	check(t, os.WriteFile(filepath.Join(src, "shut", "in"), []byte("in"), 0o444))
	check(t, os.Symlink(strings.Repeat("t", 150), filepath.Join(src, "link")))
	check(t, os.Symlink("/etc", filepath.Join(src, "etc")))
	check(t, os.Link(filepath.Join(src, "private"), filepath.Join(src, "second")))
	check(t, os.Link(filepath.Join(src, "private"), filepath.Join(src, "shut", "third")))
	check(t, unix.Mkfifo(filepath.Join(src, "fifo"), 0o644))
	check(t, os.WriteFile(filepath.Join(src, "empty.file"), nil, 0o644))
	sparse, err := os.Create(filepath.Join(src, "sparse"))
	check(t, err)
	_, err = sparse.WriteAt([]byte("middle"), 64<<20)
	check(t, err)
	check(t, sparse.Truncate(256<<20))
	check(t, sparse.Close())
	check(t, os.WriteFile(filepath.Join(src, "setuid"), []byte("s"), 0o755))
	check(t, unix.Chmod(filepath.Join(src, "setuid"), 0o4755))
	check(t, os.Chmod(filepath.Join(src, "shut"), 0o555))
	check(t, filepath.Walk(src, func(p string, i os.FileInfo, err error) error {
		ts, _ := unix.TimeToTimespec(old.Add(time.Duration(len(p)) * time.Second))
		return errors.Join(os.Lchown(p, 1000, 1000), func() error {
			if i.Name() == "setuid" {
				return unix.Chmod(p, 0o4755) // chown took it away
			}
			return nil
		}(), unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
	}))
	unix.Setxattr(filepath.Join(src, "private"), "user.note", []byte("x\x00y"), 0)

	// Down from the machine's own root by a server here, up as alice, down again, and up once more.
	here := serve(t)
	copyTree := func(from *Files, fromPath string, to *Files, toPath string) {
		t.Helper()
		tree, err := from.Download(ctx, fromPath, nil)
		check(t, err)
		defer tree.Close()
		up, err := to.Upload(ctx, UploadHeader{Path: toPath, Parents: true}, tree)
		check(t, err)
		if s, n := tree.Skipped(); n != 0 {
			t.Errorf("down: skipped %v", s)
		}
		if up.Left != 0 {
			t.Errorf("up: skipped %v", up.Skipped)
		}
	}
	copyTree(here, src, f, "/home/alice/up/1")
	copyTree(f, "/home/alice/up/1", f, "/home/alice/up/2")
	copyTree(f, "/home/alice/up/1", f, "/home/alice/up/2") // again over what is there
	want := describe(t, src)
	for _, p := range []string{"home/alice/up/1", "home/alice/up/2"} {
		// A folder that was there keeps its own mode and time, so the second's first line differs.
		if d := cmp.Diff(want[1:], describe(t, filepath.Join(root, p))[1:]); d != "" {
			t.Errorf("%s: %s", p, d)
		}
	}
	var st unix.Stat_t
	check(t, unix.Stat(filepath.Join(root, "home/alice/up/2/sparse"), &st))
	if st.Blocks*512 > 4<<20 {
		t.Errorf("the sparse file takes %d octets", st.Blocks*512)
	}
	if want[0] != describe(t, filepath.Join(root, "home/alice/up/1"))[0] {
		t.Errorf("the folder itself differs from %s", want[0])
	}
	wantErr(t, "remove what is in a shut folder", f.Remove(ctx, "/home/alice/up", true, false), sandbox.ErrDenied)
	check(t, os.Chmod(filepath.Join(root, "home/alice/up/1/shut"), 0o755))
	check(t, os.Chmod(filepath.Join(root, "home/alice/up/2/shut"), 0o755))
	check(t, f.Remove(ctx, "/home/alice/up", true, false))
}

// B21: a mode written in decimal is refused, never 01363.
func TestB21DoubtfulModes(t *testing.T) {
	f := serve(t)
	dir := t.TempDir()
	for _, mode := range []uint32{755, 777, 644, 700, 750, 0o10644, 1 << 31} {
		_, err := f.Write(within(t), WriteHeader{Path: dir + "/f", Mode: mode, Size: -1}, strings.NewReader(""))
		wantErr(t, fmt.Sprint("write with mode ", mode), err, sandbox.ErrInvalid)
	}
	for _, mode := range []uint32{755, 777, 700, 750, 775} {
		_, err := f.MakeDir(within(t), dir+"/d", mode, false)
		wantErr(t, fmt.Sprint("make with mode ", mode), err, sandbox.ErrInvalid)
	}
	if i, err := f.MakeDir(within(t), dir+"/d", 493, false); err != nil || i.Mode != 0o755 {
		t.Errorf("493: %+v, %v", i, err)
	}
	if i, err := f.MakeDir(within(t), dir+"/t", 0o1777, false); err != nil || i.Mode != 0o1777 {
		t.Errorf("01777: %+v, %v", i, err)
	}
}

// describe lists a tree with all that a tar keeps.
func describe(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	first := map[uint64]string{}
	check(t, filepath.Walk(root, func(p string, i os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%q %o %d:%d %d.%d", rel, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		switch {
		case i.Mode()&os.ModeSymlink != 0:
			target, _ := os.Readlink(p)
			line += " -> " + target
		case i.Mode().IsRegular():
			line += fmt.Sprintf(" %d octets", st.Size)
			if st.Size < 1<<20 {
				b, _ := os.ReadFile(p)
				line += fmt.Sprintf(" %q", b)
			}
			if f, ok := first[st.Ino]; ok {
				line += " = " + f
			}
			if st.Nlink > 1 && first[st.Ino] == "" {
				first[st.Ino] = rel
			}
			b := make([]byte, 64)
			if n, err := unix.Getxattr(p, "user.note", b); err == nil {
				line += fmt.Sprintf(" note=%q", b[:n])
			}
		}
		out = append(out, line)
		return nil
	}))
	return out
}

// B22: files whose size says 0, reads that never end, and files that change while they are read.
func TestB22OddReads(t *testing.T) {
	f := serve(t)
	ctx := within(t)
	dir := t.TempDir()
	for _, p := range []string{"/proc/self/status", "/proc/cpuinfo", "/proc/filesystems"} {
		if s := readAll(t, f, p, 0, 0); len(s) < 100 || !strings.HasSuffix(s, "\n") {
			t.Errorf("%s: %d octets", p, len(s))
		}
	}
	if s := readAll(t, f, "/dev/zero", 0, 1<<20); len(s) != 1<<20 || strings.Trim(s, "\x00") != "" {
		t.Errorf("/dev/zero: %d octets", len(s))
	}
	// Without an end it flows until its reader goes away, and holds up nobody.
	endless, err := f.Read(ctx, "/dev/zero", 0, 0)
	check(t, err)
	if _, err := io.CopyN(io.Discard, endless, 3<<20); err != nil {
		t.Error(err)
	}
	if s := readAll(t, f, "/proc/self/status", 0, 0); len(s) < 100 {
		t.Error("a call beside an endless one")
	}
	check(t, endless.Close())

	fifo := filepath.Join(dir, "fifo")
	check(t, unix.Mkfifo(fifo, 0o644))
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	r, err := f.Read(short, fifo, 0, 0)
	if err == nil {
		_, err = r.Read(make([]byte, 1))
		r.Close()
	}
	wantErr(t, "FIFO without a writer", err, context.DeadlineExceeded)
	if err == nil || !strings.Contains(err.Error(), fifo) {
		t.Errorf("the error names no path: %v", err)
	}
	unread := filepath.Join(dir, "unread")
	check(t, unix.Mkfifo(unread, 0o644))
	_, err = f.Write(ctx, WriteHeader{Path: unread, Size: -1}, strings.NewReader("x"))
	wantErr(t, "FIFO without a reader", err, sandbox.ErrState)
	// With a writer that comes late it gives what was written.
	written := filepath.Join(dir, "written")
	check(t, unix.Mkfifo(written, 0o644))
	got := make(chan string)
	go func() { got <- readAll(t, f, written, 0, 0) }()
	check(t, os.WriteFile(written, []byte("late"), 0))
	if s := <-got; s != "late" {
		t.Errorf("FIFO gave %q", s)
	}

	_, err = f.Read(ctx, dir, 0, 0)
	wantErr(t, "read a folder", err, sandbox.ErrInvalid)
	n := 0
	check(t, f.List(ctx, "/proc", 1, func(l []Info) error { n += len(l); return nil }))
	if n < 20 {
		t.Errorf("/proc: %d entries", n)
	}
	_, err = f.Write(ctx, WriteHeader{Path: "/dev/null", Size: -1}, strings.NewReader("x"))
	check(t, err)
}

// B22: growing and truncated.
func TestB22ChangingFiles(t *testing.T) {
	f := serve(t)
	dir := t.TempDir()
	p := filepath.Join(dir, "grows")
	check(t, os.WriteFile(p, bytes.Repeat([]byte("a"), 4<<20), 0o644))
	stop := make(chan struct{})
	var group sync.WaitGroup
	group.Add(1)
	go func() {
		defer group.Done()
		w, err := os.OpenFile(p, os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Error(err)
			return
		}
		defer w.Close()
		for n := 0; n < 64<<20; n += 1 << 16 {
			select {
			case <-stop:
				return
			default:
				w.Write(bytes.Repeat([]byte("b"), 1<<16))
			}
		}
	}()
	r, err := f.Read(within(t), p, 0, 0)
	check(t, err)
	b, err := io.ReadAll(r)
	check(t, err)
	if int64(len(b)) != r.Info.Size || len(b) < 4<<20 {
		t.Errorf("growing: %d octets, %d when opened", len(b), r.Info.Size)
	}
	tree, err := f.Download(within(t), dir, nil)
	check(t, err)
	if _, err := tarNames(tree); err != nil {
		t.Errorf("tar of a growing file: %v", err)
	}
	close(stop)
	group.Wait()

	p = filepath.Join(dir, "shrinks")
	check(t, os.WriteFile(p, make([]byte, 8<<20), 0o644))
	r, err = f.Read(within(t), p, 0, 0)
	check(t, err)
	_, err = io.CopyN(io.Discard, r, 1<<20)
	check(t, err)
	check(t, os.Truncate(p, 2<<20))
	rest, err := io.Copy(io.Discard, r)
	if err != nil || rest >= 7<<20 {
		t.Errorf("truncated: %d more octets, %v", rest, err)
	}
	check(t, os.WriteFile(p, bytes.Repeat([]byte("x"), 8<<20), 0o644))
	tree, err = f.Download(within(t), p, nil)
	check(t, err)
	_, err = io.CopyN(io.Discard, tree, 1<<20)
	check(t, err)
	check(t, os.Truncate(p, 2<<20))
	rest, err = io.Copy(io.Discard, tree)
	if err != nil || rest+1<<20 < 8<<20 {
		t.Errorf("tar of a truncated file: %d octets, %v", rest, err)
	}
	if s, n := tree.Skipped(); n != 1 || !strings.Contains(s[0], "shorter") {
		t.Errorf("truncated: told %v", s)
	}
}

type entryOf struct {
	name, body string
	mode       int64
	kind       byte
	link       string
}

func tarOf(t testing.TB, list ...entryOf) io.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range list {
		check(t, w.WriteHeader(&tar.Header{Name: e.name, Size: int64(len(e.body)), Mode: e.mode, Typeflag: e.kind, Linkname: e.link,
			ModTime: time.Unix(1e9, 0), Uid: 77, Gid: 77, Devmajor: 1, Devminor: 3}))
		_, err := io.WriteString(w, e.body)
		check(t, err)
	}
	check(t, w.Close())
	return &b
}

func tarNames(r io.Reader) ([]string, error) {
	var names []string
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if err == io.EOF {
			_, err := io.Copy(io.Discard, r)
			sort.Strings(names)
			return names, err
		}
		if err != nil {
			return names, err
		}
		names = append(names, h.Name)
		if _, err := io.Copy(io.Discard, t); err != nil {
			return names, err
		}
	}
}

// GNU tar reads what a download gives, and an upload what GNU tar makes, in each of its formats.
func TestGNUTarAgrees(t *testing.T) {
	if _, err := exec.LookPath("tar"); err != nil {
		t.Skip("no tar on this machine")
	}
	f := serve(t)
	src, down := t.TempDir(), t.TempDir()
	check(t, os.WriteFile(filepath.Join(src, strings.Repeat("long", 40)), []byte("x"), 0o755))
	check(t, os.Symlink(strings.Repeat("t", 150), filepath.Join(src, "link")))
	check(t, os.Link(filepath.Join(src, strings.Repeat("long", 40)), filepath.Join(src, "second")))
	check(t, os.Mkdir(filepath.Join(src, "empty"), 0o700))
	s, err := os.Create(filepath.Join(src, "sparse"))
	check(t, err)
	for n := range int64(300) { // a map longer than a block
		_, err = s.WriteAt([]byte("data"), n*(64<<10)+1000)
		check(t, err)
	}
	check(t, s.Truncate(64<<20))
	check(t, s.Close())
	same := func(what, dir string) {
		t.Helper()
		if d := cmp.Diff(describe(t, src)[1:], describe(t, dir)[1:]); d != "" {
			t.Errorf("%s: %s", what, d)
		}
		a, _ := os.ReadFile(filepath.Join(src, "sparse"))
		b, _ := os.ReadFile(filepath.Join(dir, "sparse"))
		if !bytes.Equal(a, b) {
			t.Errorf("%s: the sparse file differs", what)
		}
		var st unix.Stat_t
		if unix.Stat(filepath.Join(dir, "sparse"), &st); st.Blocks*512 > 40<<20 {
			t.Errorf("%s: the sparse file takes %d octets", what, st.Blocks*512)
		}
	}
	tree, err := f.Download(within(t), src, nil)
	check(t, err)
	cmd := exec.Command("tar", "-x", "-p", "-C", down)
	cmd.Stdin = tree
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("tar: %v %s", err, out)
	}
	same("down", down)
	for _, format := range []string{"gnu", "posix"} {
		cmd := exec.Command("tar", "-c", "-S", "--format="+format, "-C", src, ".")
		out, err := cmd.Output()
		check(t, err)
		dir := t.TempDir()
		_, err = f.Upload(within(t), UploadHeader{Path: dir}, bytes.NewReader(out))
		check(t, err)
		if format == "posix" { // the other keeps whole seconds
			same("up "+format, dir)
		}
	}
}

// A body whose client has left before the call was sent is interrupted with nothing applied, never of unknown end.
func TestBodyOfAClientThatHasLeft(t *testing.T) {
	dir := t.TempDir()
	for _, gone := range []string{"client", "connection"} {
		f := serve(t)
		ctx, cancel := context.WithCancel(context.Background())
		if cancel(); gone == "connection" {
			ctx = context.Background()
			f.Close()
		}
		for i := range 20 {
			_, err := f.Write(ctx, WriteHeader{Path: filepath.Join(dir, fmt.Sprint(gone, i)), Append: true, StartOffset: -1, Size: -1}, strings.NewReader("x"))
			var broken *Incomplete
			if !errors.As(err, &broken) || !broken.Interrupted || broken.Applied > 1 || gone == "connection" && (broken.Applied != 0 || broken.Start != -1) {
				t.Fatalf("%s left: %v", gone, err)
			}
			if broken.Applied < 0 && gone == "client" {
				t.Fatalf("%s left: the end is unknown: %v", gone, err)
			}
		}
	}
}
