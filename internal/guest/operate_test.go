package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestWriteReplacesInPlace(t *testing.T) {
	f := serve(t)
	dir := t.TempDir()
	p, q := filepath.Join(dir, "f"), filepath.Join(dir, "other name")
	check(t, os.WriteFile(p, []byte("a longer content"), 0o640))
	check(t, os.Chmod(p, 0o750))
	check(t, os.Link(p, q))
	r := write(t, f, WriteHeader{Path: p, Mode: 0o600}, "new")
	if r.Written != 3 || r.Info.Size != 3 || r.Info.Mode != 0o750 || r.Info.Nlink != 2 {
		t.Errorf("%+v", r)
	}
	if b, _ := os.ReadFile(q); string(b) != "new" {
		t.Errorf("the other name says %q", b)
	}
	old := time.Unix(1234567, 89)
	if r = write(t, f, WriteHeader{Path: p, Mode: 0o4711, SetMode: true, Modified: old}, "x"); r.Info.Mode != 0o4711 || !r.Info.Modified.Equal(old) {
		t.Errorf("%+v", r.Info)
	}
	if r = write(t, f, WriteHeader{Path: filepath.Join(dir, "a/b/c"), Parents: true}, ""); r.Info.Mode != 0o644 || r.Info.Size != 0 {
		t.Errorf("%+v", r.Info)
	}
	ctx := within(t)
	for name, c := range map[string]struct {
		path string
		want error
	}{
		"no parent": {dir + "/none/x", sandbox.ErrNotFound},
		"a folder":  {dir, sandbox.ErrInvalid},
		"slash":     {dir + "/new/", sandbox.ErrInvalid},
		"long":      {dir + "/" + strings.Repeat("x", 256), sandbox.ErrInvalid},
		"relative":  {"x", sandbox.ErrInvalid},
		"NUL":       {"/a\x00b", sandbox.ErrInvalid},
		"under":     {p + "/x", sandbox.ErrInvalid},
	} {
		_, err := f.Write(ctx, WriteHeader{Path: c.path, Size: -1}, strings.NewReader("x"))
		wantErr(t, name, err, c.want)
	}
	for _, body := range []string{"ab", "abcd"} {
		_, err := f.Write(ctx, WriteHeader{Path: p, Size: 3}, strings.NewReader(body))
		var part *Incomplete
		if !errors.As(err, &part) || !part.Interrupted {
			t.Errorf("a body of %d for 3: %v", len(body), err)
		}
	}
}

func TestAppendCarriesItsOffset(t *testing.T) {
	f := serve(t)
	ctx := within(t)
	p := filepath.Join(t.TempDir(), "f")
	_, err := f.Write(ctx, WriteHeader{Path: p, Append: true, StartOffset: 2, Size: -1}, strings.NewReader("x"))
	wantErr(t, "append to what isn't there", err, sandbox.ErrState)
	r := write(t, f, WriteHeader{Path: p, Append: true, StartOffset: 0}, "one")
	if r.Start != 0 || r.Info.Size != 3 {
		t.Errorf("%+v", r)
	}
	_, err = f.Write(ctx, WriteHeader{Path: p, Append: true, StartOffset: 0, Size: -1}, strings.NewReader("one"))
	wantErr(t, "the same append again", err, sandbox.ErrState)
	if r = write(t, f, WriteHeader{Path: p, Append: true, StartOffset: -1}, "two"); r.Start != 3 || r.Info.Size != 6 {
		t.Errorf("%+v", r)
	}
	if b, _ := os.ReadFile(p); string(b) != "onetwo" {
		t.Errorf("%q", b)
	}
}

// slowly gives its text, waits for go on, then ends with the error.
type slowly struct {
	text string
	then func() error
}

func (s *slowly) Read(p []byte) (int, error) {
	if s.text == "" {
		return 0, s.then()
	}
	n := copy(p, s.text)
	s.text = s.text[n:]
	return n, nil
}

func TestBodyThatBreaksOff(t *testing.T) {
	f := serve(t)
	dir := t.TempDir()
	broke := errors.New("the client hung up")
	body := strings.Repeat("x", 100000)
	_, err := f.Write(within(t), WriteHeader{Path: dir + "/f", Size: -1}, &slowly{body, func() error { return broke }})
	var part *Incomplete
	if !errors.As(err, &part) || !part.Interrupted || part.Applied != 100000 || !errors.Is(err, broke) {
		t.Errorf("%v", err)
	}
	if st, err := os.Stat(dir + "/f"); err != nil || st.Size() != 100000 || st.Mode() != 0o644 {
		t.Errorf("%v, %v", st, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	_, err = f.Write(ctx, WriteHeader{Path: dir + "/g", Size: -1}, &slowly{body, func() error { cancel(); return ctx.Err() }})
	if !errors.As(err, &part) || !part.Interrupted || part.Applied != 100000 || !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	tree, _ := io.ReadAll(tarOf(t, entryOf{"a", "aaa", 0o644, '0', ""}, entryOf{"b", strings.Repeat("b", 5000), 0o644, '0', ""}))
	_, err = f.Upload(within(t), UploadHeader{Path: dir}, &slowly{string(tree[:3000]), func() error { return broke }})
	if !errors.As(err, &part) || !part.Interrupted || part.Applied != 3000 {
		t.Errorf("%v", err)
	}
	if b, _ := os.ReadFile(dir + "/a"); string(b) != "aaa" {
		t.Errorf("the entry before the break: %q", b)
	}
	// A stream that merely ends too early is no tar, and no interruption.
	_, err = f.Upload(within(t), UploadHeader{Path: dir}, strings.NewReader(string(tree[:3000])))
	if wantErr(t, "half a tar", err, sandbox.ErrInvalid); errors.As(err, &part) && part.Interrupted {
		t.Errorf("%v", err)
	}
	_, err = f.Upload(within(t), UploadHeader{Path: dir}, strings.NewReader(strings.Repeat("no tar", 1000)))
	wantErr(t, "no tar", err, sandbox.ErrInvalid)
}

func TestFullDiskIsExhausted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts a file system")
	}
	dir := t.TempDir()
	if err := unix.Mount("dsec-test", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skip("no mounts here: ", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	f := serve(t)
	_, err := f.Write(within(t), WriteHeader{Path: dir + "/f", Size: -1}, io.LimitReader(zeroes{}, 1<<20))
	var part *Incomplete
	if wantErr(t, "full", err, sandbox.ErrExhausted); !errors.As(err, &part) || part.Interrupted || part.Applied < 100<<10 {
		t.Errorf("%v", err)
	}
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestMakeMoveRemove(t *testing.T) {
	f := serve(t)
	ctx := within(t)
	dir := t.TempDir()
	i, err := f.MakeDir(ctx, dir+"/a/b", 0o2750, true)
	if err != nil || i.Mode != 0o2750 {
		t.Errorf("%+v, %v", i, err)
	}
	if i, err = f.MakeDir(ctx, dir+"/a/b/c", 0, false); err != nil || i.Mode != 0o2755 {
		t.Errorf("below a setgid folder: %#o, %v", i.Mode, err)
	}
	_, err = f.MakeDir(ctx, dir+"/a", 0, false)
	wantErr(t, "make again", err, sandbox.ErrExists)
	_, err = f.MakeDir(ctx, dir+"/a", 0, true)
	check(t, err)
	write(t, f, WriteHeader{Path: dir + "/f"}, "f")
	_, err = f.MakeDir(ctx, dir+"/f", 0, true)
	wantErr(t, "over a file", err, sandbox.ErrExists)
	_, err = f.MakeDir(ctx, dir+"/f/g", 0, true)
	wantErr(t, "below a file", err, sandbox.ErrInvalid)

	write(t, f, WriteHeader{Path: dir + "/g"}, "g")
	wantErr(t, "over a file", f.Move(ctx, dir+"/f", dir+"/g", false), sandbox.ErrExists)
	check(t, f.Move(ctx, dir+"/f", dir+"/g", true))
	wantErr(t, "move into itself", f.Move(ctx, dir+"/a", dir+"/a/b/x", true), sandbox.ErrInvalid)
	wantErr(t, "over a full folder", f.Move(ctx, dir+"/a/b", dir+"/a", true), sandbox.ErrExists)
	wantErr(t, "not there", f.Move(ctx, dir+"/f", dir+"/h", false), sandbox.ErrNotFound)

	wantErr(t, "full", f.Remove(ctx, dir+"/a", false, false), sandbox.ErrExists)
	check(t, os.Symlink(dir+"/a", dir+"/link"))
	check(t, f.Remove(ctx, dir+"/link", true, false))
	if _, err := os.Stat(dir + "/a"); err != nil {
		t.Error("removing a link removed what it leads to")
	}
	check(t, f.Remove(ctx, dir+"/a/", true, false))
	wantErr(t, "gone", f.Remove(ctx, dir+"/a", true, false), sandbox.ErrNotFound)
	check(t, f.Remove(ctx, dir+"/a", true, true))
	for _, p := range []string{"/", "//", "/..", dir + "/.", dir + "/x/.."} {
		wantErr(t, p, f.Remove(ctx, p, true, true), sandbox.ErrInvalid)
	}
}

func TestDeepTrees(t *testing.T) {
	f := serve(t)
	ctx := within(t)
	dir := t.TempDir()
	// 3,000 folders deep, past any path and many descriptors.
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_RDONLY, 0)
	check(t, err)
	for range 3000 {
		check(t, unix.Mkdirat(fd, "d", 0o755))
		next, err := unix.Openat(fd, "d", unix.O_DIRECTORY|unix.O_RDONLY, 0)
		check(t, err)
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
	n, told := 0, 0
	check(t, f.List(ctx, dir, 1<<20, func(l []Info) error {
		for _, i := range l {
			n++
			if i.Error != "" {
				told++
			}
		}
		return nil
	}))
	if n < 500 {
		t.Errorf("%d listed, %d told", n, told)
	}
	tree, err := f.Download(ctx, dir, nil)
	check(t, err)
	_, err = tarNames(tree)
	check(t, err)
	if s, n := tree.Skipped(); n != 1 || !strings.Contains(s[0], "too deep") {
		t.Errorf("%v", s)
	}
	check(t, f.Remove(ctx, dir+"/d", true, false))
	if l, _ := os.ReadDir(dir); len(l) != 0 {
		t.Errorf("left: %v", l)
	}
}

func TestWatch(t *testing.T) {
	f := serve(t)
	dir := t.TempDir()
	check(t, os.MkdirAll(dir+"/sub/deep", 0o755))
	events := make(chan Event, 100)
	done := make(chan error, 1)
	go func() {
		done <- f.Watch(context.Background(), dir, true, func(e Event) error { events <- e; return nil })
	}()
	until := func(kind EventKind, path string) {
		t.Helper()
		want := Event{Kind: kind, Path: path}
		timeout := time.After(20 * time.Second)
		var seen []Event
		for {
			select {
			case e := <-events:
				if seen = append(seen, e); e == want {
					return
				}
			case err := <-done:
				done <- err
				for len(events) > 0 { // what came before the end
					if e := <-events; e == want {
						return
					}
				}
				t.Fatalf("watch ended with %v before %v; seen %v", err, want, seen)
			case <-timeout:
				t.Fatalf("no %v; seen %v", want, seen)
			}
		}
	}
	until(Ready, "")
	check(t, os.WriteFile(dir+"/sub/deep/f", []byte("x"), 0o644))
	until(Created, "sub/deep/f")
	until(Modified, "sub/deep/f")
	check(t, os.Chmod(dir+"/sub/deep/f", 0o600))
	until(Attrib, "sub/deep/f")
	check(t, os.Rename(dir+"/sub/deep/f", dir+"/g"))
	until(MovedFrom, "sub/deep/f")
	until(MovedTo, "g")
	check(t, os.MkdirAll(dir+"/n1/n2/n3", 0o755))
	until(Created, "n1")
	until(Created, "n1/n2/n3")
	check(t, os.Rename(dir+"/n1", dir+"/m1"))
	until(MovedTo, "m1")
	check(t, os.WriteFile(dir+"/m1/n2/n3/h\xff", nil, 0o644))
	until(Created, "m1/n2/n3/h\xff")
	check(t, os.Remove(dir+"/g"))
	until(Removed, "g")
	check(t, os.RemoveAll(dir))
	until(Removed, "")
	check(t, <-done)

	err := f.Watch(within(t), dir, false, nil)
	wantErr(t, "watch what isn't there", err, sandbox.ErrNotFound)
	stop := errors.New("enough")
	wantErr(t, "ended by its reader", f.Watch(within(t), "/tmp", false, func(Event) error { return stop }), stop)
}

func TestWatchTellsOverflow(t *testing.T) {
	f := serve(t)
	dir := t.TempDir()
	block, over := make(chan struct{}), errors.New("told")
	done := make(chan error, 1)
	go func() {
		done <- f.Watch(context.Background(), dir, false, func(e Event) error {
			switch e.Kind {
			case Ready:
				block <- struct{}{}
				<-block
			case Overflow:
				return over
			}
			return nil
		})
	}()
	<-block
	for n := range 15000 { // twice that many events: more than the kernel's queue of 16,384, our window and what is in between
		p := fmt.Sprintf("%s/%0100d", dir, n%2)
		check(t, os.WriteFile(p, nil, 0o644))
		check(t, os.Remove(p))
	}
	close(block)
	wantErr(t, "overflow", <-done, over)
}

func TestUploadIsConfined(t *testing.T) {
	root := jail(t)
	f := serveIn(t, root, 0)
	ctx := within(t)
	check(t, os.Mkdir(filepath.Join(root, "target"), 0o755))
	check(t, os.Symlink("/var", filepath.Join(root, "target/before")))
	_, err := f.Upload(ctx, UploadHeader{Path: "/target"}, tarOf(t,
		entryOf{"../up", "1", 0o644, '0', ""}, entryOf{"/abs", "2", 0o644, '0', ""}, entryOf{"a/../../b/./c", "3", 0o644, '0', ""},
		entryOf{"../../hard", "", 0o644, '1', "../up"}, entryOf{"su", "4", 0o4755, '0', ""}, entryOf{"before/x", "5", 0o644, '0', ""}))
	check(t, err)
	for p, want := range map[string]string{"target/up": "1", "target/abs": "2", "target/b/c": "3", "target/hard": "1", "target/su": "4", "var/x": "5"} {
		if b, err := os.ReadFile(filepath.Join(root, p)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", p, b, err)
		}
	}
	if i, err := f.Stat(ctx, "/target/su", false); err != nil || i.Mode != 0o755 || i.UID != 0 {
		t.Errorf("another user's setuid program for root: %#o, %v", i.Mode, err)
	}
	for _, target := range []string{"/etc", "../etc"} {
		_, err := f.Upload(ctx, UploadHeader{Path: "/target"}, tarOf(t, entryOf{"out", "", 0o777, '2', target}, entryOf{"out/passwd", "no", 0o644, '0', ""}))
		wantErr(t, "through a link of its own to "+target, err, sandbox.ErrDenied)
	}
	if b, _ := os.ReadFile(filepath.Join(root, "etc/passwd")); strings.Contains(string(b), "no") {
		t.Error("a link of the upload led out")
	}
	_, err = f.Upload(ctx, UploadHeader{Path: "/target"}, tarOf(t, entryOf{"early", "", 0, '1', "late"}, entryOf{"late", "", 0, '0', ""}))
	if wantErr(t, "hard link before its target", err, sandbox.ErrInvalid); err == nil || !strings.Contains(err.Error(), "early") {
		t.Errorf("names no entry: %v", err)
	}
	// What is there is replaced: a file over a link replaces the link; a link over a folder with something inside does not.
	check(t, os.Symlink("/etc/passwd", filepath.Join(root, "target/l")))
	_, err = f.Upload(ctx, UploadHeader{Path: "/target"}, tarOf(t, entryOf{"l", "mine", 0o644, '0', ""}))
	check(t, err)
	if st, err := os.Lstat(filepath.Join(root, "target/l")); err != nil || !st.Mode().IsRegular() {
		t.Errorf("%v, %v", st, err)
	}
	_, err = f.Upload(ctx, UploadHeader{Path: "/target"}, tarOf(t, entryOf{"b", "", 0o777, '2', "x"}))
	wantErr(t, "over a full folder", err, sandbox.ErrExists)
	// /tmp keeps its sticky bit, and a link to a folder stays.
	_, err = f.Upload(ctx, UploadHeader{Path: "/"}, tarOf(t, entryOf{"./", "", 0o700, '5', ""}, entryOf{"tmp/", "", 0o755, '5', ""}, entryOf{"target/before/", "", 0o700, '5', ""}))
	check(t, err)
	if i, _ := f.Stat(ctx, "/tmp", false); i.Mode != 0o1777 {
		t.Errorf("/tmp is %#o", i.Mode)
	}
	if i, _ := f.Stat(ctx, "/target/before", false); i.Kind != Link {
		t.Errorf("/target/before is %s", i.Kind)
	}
	if i, _ := f.Stat(ctx, "/", false); i.Mode != 0o755 {
		t.Errorf("/ is %#o", i.Mode)
	}
	_, err = f.Upload(ctx, UploadHeader{Path: "/target", KeepOwner: true}, tarOf(t, entryOf{"kept", "", 0o4755, '0', ""}))
	check(t, err)
	if i, _ := f.Stat(ctx, "/target/kept", false); i.UID != 77 || i.Mode != 0o4755 {
		t.Errorf("kept: %+v", i)
	}
	alice := serveIn(t, root, 1000)
	_, err = alice.Upload(ctx, UploadHeader{Path: "/tmp", KeepOwner: true}, tarOf(t))
	wantErr(t, "owners without root", err, sandbox.ErrDenied)
	r, err := alice.Upload(ctx, UploadHeader{Path: "/tmp/n/m", Parents: true}, tarOf(t, entryOf{"dev", "", 0o666, '3', ""}, entryOf{"f", "x", 0o600, '0', ""}))
	if err != nil || r.Left != 1 || r.Entries != 2 {
		t.Errorf("%+v, %v", r, err)
	}
	if i, _ := alice.Stat(ctx, "/tmp/n", false); i.Owner != "alice" {
		t.Errorf("the parent belongs to %+v", i)
	}
	_, err = alice.Upload(ctx, UploadHeader{Path: "/etc"}, tarOf(t, entryOf{"x", "x", 0o600, '0', ""}))
	wantErr(t, "where alice may not write", err, sandbox.ErrDenied)
}

func TestDownloadLeavesOut(t *testing.T) {
	f := serve(t)
	dir := t.TempDir()
	for _, p := range []string{"a/x.o", "a/x.c", "node_modules/m", "b/node_modules/m", "b/keep", "b/drop/f"} {
		check(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, p)), 0o755))
		check(t, os.WriteFile(filepath.Join(dir, p), nil, 0o644))
	}
	tree, err := f.Download(within(t), dir, []string{"*.o", "node_modules", "b/drop"})
	check(t, err)
	names, err := tarNames(tree)
	check(t, err)
	sort.Strings(names)
	if d := cmp.Diff([]string{"./", "a/", "a/x.c", "b/", "b/keep"}, names); d != "" {
		t.Error(d)
	}
	_, err = f.Download(within(t), dir, []string{"["})
	wantErr(t, "a pattern", err, sandbox.ErrInvalid)
}

// The names of users come from the sandbox's own files, which may say anything.
func TestOwnersFromOddFiles(t *testing.T) {
	root := jail(t)
	passwd := filepath.Join(root, "etc/passwd")
	f := serveIn(t, root, 1000)
	ctx := within(t)
	owner := func() string {
		t.Helper()
		i, err := f.Stat(ctx, "/home/alice", false)
		check(t, err)
		return i.Owner
	}
	if o := owner(); o != "alice" {
		t.Errorf("%q", o)
	}
	check(t, os.WriteFile(passwd, []byte("evil\xff:x:1000:\n\n:::\nal ice:x:1000:\n"+strings.Repeat("x", 100)+":x:1000:1\nok:x:1000:1:\nlater:x:1000:1:\n"), 0o644))
	if o := owner(); o != "ok" {
		t.Errorf("%q", o)
	}
	check(t, os.Remove(passwd))
	check(t, unix.Mkfifo(passwd, 0o644))
	if o := owner(); o != "" {
		t.Errorf("%q", o)
	}
	check(t, os.Remove(passwd))
	check(t, os.Symlink("/dev/zero", passwd))
	if o := owner(); o != "" {
		t.Errorf("%q", o)
	}
}
