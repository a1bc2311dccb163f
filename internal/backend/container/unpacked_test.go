package container

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// everyType is a tar of files of every type, with what a tar can say of them.
func everyType() []byte { return types(map[string]string{"SCHILY.xattr.user.note": "kept"}) }

// memoryTypes is the same for disks in memory, which have no attributes of users before 6.6.
func memoryTypes() []byte { return types(map[string]string{}) }

func types(attributes map[string]string) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(h *tar.Header, text string) {
		h.Format, h.Size = tar.FormatPAX, int64(len(text))
		h.ModTime = time.Unix(1_600_000_000, 123456789)
		if err := errors.Join(w.WriteHeader(h), second(io.WriteString(w, text))); err != nil {
			panic(err)
		}
	}
	attributes["SCHILY.xattr.security.capability"] = string([]byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}) // net_bind
	attributes["SCHILY.xattr.trusted.mark"] = "kept too"
	sparse := "head" + strings.Repeat("\x00", 300<<10) + "tail"
	for _, f := range []struct {
		h    tar.Header
		text string
	}{
		{h: tar.Header{Name: "every/", Typeflag: tar.TypeDir, Mode: 0o3775, Uid: 7, Gid: 8}},
		{h: tar.Header{Name: "every/file", Mode: 0o4755, Uid: 1000, Gid: 1001}, text: "a file\n"},
		{h: tar.Header{Name: "every/group", Mode: 0o2711, Gid: 42}, text: "setgid\n"},
		{h: tar.Header{Name: "every/hard", Typeflag: tar.TypeLink, Linkname: "every/file"}},
		{h: tar.Header{Name: "every/able", Mode: 0o755, PAXRecords: attributes}, text: "able\n"},
		{h: tar.Header{Name: "every/link", Typeflag: tar.TypeSymlink, Linkname: "../nowhere", Uid: 5}},
		{h: tar.Header{Name: "every/pipe", Typeflag: tar.TypeFifo, Mode: 0o640}},
		{h: tar.Header{Name: "every/null", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3}},
		{h: tar.Header{Name: "every/disk", Typeflag: tar.TypeBlock, Mode: 0o600, Devmajor: 259, Devminor: 70000}},
		{h: tar.Header{Name: "every/sparse", Mode: 0o600}, text: sparse},
		{h: tar.Header{Name: "every/empty", Mode: 0}},
		{h: tar.Header{Name: "every/" + strings.Repeat("n", 255), Mode: 0o644}, text: "a long name"},
		{h: tar.Header{Name: "every/odd\n\xff", Mode: 0o644}, text: "an odd name"},
		{h: tar.Header{Name: "every/sub/", Typeflag: tar.TypeDir, Mode: 0o700}},
		{h: tar.Header{Name: "every/sub/.wh.gone"}},
		{h: tar.Header{Name: "every/sub/hard", Typeflag: tar.TypeLink, Linkname: "every/file"}},
		{h: tar.Header{Name: "every/new/", Typeflag: tar.TypeDir, Mode: 0o755}},
		{h: tar.Header{Name: "every/new/.wh..wh..opq"}},
		{h: tar.Header{Name: "every/new/in", Mode: 0o644}, text: "in a folder that hides what lies below\n"},
	} {
		add(&f.h, f.text)
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// EveryType and BelowEveryType are for the tests of sandboxes: a layer, and one that it hides parts of. Tidy does what is done each minute.
var (
	EveryType = everyType
	Tidy      = func(ctx context.Context, b *Backend) { b.tidyOnce(ctx, time.Now()) }
)

func BelowEveryType() []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, d := range []string{"every/", "every/sub/", "every/new/"} {
		w.WriteHeader(&tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755})
	}
	for _, f := range []string{"every/sub/gone", "every/new/below", "every/file"} {
		w.WriteHeader(&tar.Header{Name: f, Mode: 0o644})
	}
	w.Close()
	return b.Bytes()
}

func second[T any](_ T, err error) error { return err }

// shelf is a store with the layers of its tars, and counts who asks for files.
type shelf struct {
	*blob.Layers
	asked atomic.Int64
	wait  chan struct{} // closed before files are given; nil: at once
	gone  sync.Map      // of ids that the store has no more
}

func newShelf(t testing.TB, dir string, tars ...[]byte) (*shelf, []string) {
	t.Helper()
	st, err := store.NewDir(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	c := layer.New(nil, st)
	l, err := blob.NewLayers(blob.LayersConfig{Dir: filepath.Join(dir, "layers")}, c, st, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, b := range tars {
		d, err := c.ImportTar(t.Context(), "default", bytes.NewReader(b), layer.Options{})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, string(d.ID))
	}
	return &shelf{Layers: l}, ids
}

func (s *shelf) Files(ctx context.Context, id layer.ID) (blob.LayerFiles, error) {
	s.asked.Add(1)
	if s.wait != nil {
		select {
		case <-s.wait:
		case <-ctx.Done():
			return blob.LayerFiles{}, ctx.Err()
		}
	}
	return s.Layers.Files(ctx, id)
}

func (s *shelf) Descriptor(ctx context.Context, id layer.ID) (layer.Descriptor, error) {
	if _, gone := s.gone.Load(string(id)); gone {
		return layer.Descriptor{}, fmt.Errorf("layer %s: %w", id, sandbox.ErrNotFound)
	}
	return s.Layers.Descriptor(ctx, id)
}

func openUnpacked(t testing.TB, dir string, limit int64, l Layers, used ...string) *unpacked {
	t.Helper()
	u, err := newUnpacked(dir, limit, l, func() map[string]bool {
		m := map[string]bool{}
		for _, id := range used {
			m[id] = true
		}
		return m
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(u.close)
	return u
}

// described tells all that the host sees of a tree: of a mount that is attached nowhere, or a folder.
func described(t testing.TB, root *os.File) (lines []string) {
	t.Helper()
	at := "/proc/self/fd/" + strconv.Itoa(int(root.Fd())) + "/"
	first := map[uint64]string{}
	err := filepath.WalkDir(at, func(p string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := "/" + strings.TrimPrefix(p, at)
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%q %o %d:%d dev %x time %d.%09d", name, st.Mode, st.Uid, st.Gid, st.Rdev, st.Mtim.Sec, st.Mtim.Nsec)
		if st.Mode&unix.S_IFMT != unix.S_IFDIR { // of folders file systems count otherwise
			line += fmt.Sprintf(" size %d names %d", st.Size, st.Nlink)
			if st.Nlink > 1 && first[st.Ino] == "" {
				first[st.Ino] = name
			}
			line += " like " + first[st.Ino]
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" sum %.40q %x", b, crc32.ChecksumIEEE(b))
		case unix.S_IFLNK:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			line += " to " + to
		}
		buf := make([]byte, 1<<16)
		n, err := unix.Llistxattr(p, buf)
		if err != nil {
			return err
		}
		names := strings.FieldsFunc(string(buf[:n]), func(r rune) bool { return r == 0 })
		slices.Sort(names)
		for _, x := range names {
			n, err := unix.Lgetxattr(p, x, buf)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %s=%q", x, buf[:n])
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// A layer's folder is what the kernel shows of its image, and nobody can write there.
func TestUnpackedIsLikeMounted(t *testing.T) {
	needRoot(t)
	if err := NoErofs(); err != nil {
		t.Skipf("skip: no EROFS here: %v", err)
	}
	dir := t.TempDir()
	s, ids := newShelf(t, dir, everyType())
	u := openUnpacked(t, filepath.Join(dir, "unpacked"), 1<<30, s)
	image, err := s.Files(t.Context(), layer.ID(ids[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	mounted, err := keeper.MountLayer(image.Meta, image.Data, false)
	if err != nil {
		t.Fatal(err)
	}
	defer mounted.Close()
	folder, err := u.Files(t.Context(), layer.ID(ids[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	want, got := described(t, mounted), described(t, folder.Meta)
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("mounted -, unpacked +:\n%s", d)
	}
	if len(want) < 19 {
		t.Errorf("only %d files were compared", len(want))
	}
	var st unix.Stat_t
	if err := unix.Fstatat(int(folder.Meta.Fd()), "every/sparse", &st, 0); err != nil || st.Blocks*512 >= st.Size {
		t.Errorf("a sparse file of %d octets takes %d, %v", st.Size, st.Blocks*512, err)
	}
	if err := unix.Unlinkat(int(folder.Meta.Fd()), "every/file", 0); err != unix.EROFS {
		t.Errorf("a write: %v, want EROFS", err)
	}
	if st, err := os.Stat(u.dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the folder of layers: %v, %v: setuid programs lie in it", st.Mode(), err)
	}
}

// Many wait for one layer: it is unpacked once. Who gives up is told so at once, and the others get it.
func TestUnpackManyAtOnce(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	s, ids := newShelf(t, dir, everyType())
	s.wait = make(chan struct{})
	u := openUnpacked(t, filepath.Join(dir, "unpacked"), 1<<30, s)
	hurried, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 60 {
		ctx := t.Context()
		if i%3 == 0 {
			ctx = hurried
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			f, err := u.Files(ctx, layer.ID(ids[0]))
			if ctx == hurried {
				if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "goes on") {
					t.Errorf("one that gave up: %v", err)
				}
				return
			}
			if err != nil {
				t.Error(err)
				return
			}
			f.Close()
		}()
	}
	for s.asked.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	time.Sleep(10 * time.Millisecond) // those that come later wait too
	close(s.wait)
	wg.Wait()
	if n := s.asked.Load(); n != 1 {
		t.Errorf("unpacked %d times", n)
	}
	for _, at := range []string{filepath.Join(u.dir, ids[0], unpackedTree), filepath.Join(u.dir, ids[0]), u.dir} {
		if err := os.RemoveAll(at); err != nil { // by somebody's hand
			t.Fatal(err)
		}
		if got := folderOf(t, u, ids[0]); len(got) < 19 {
			t.Errorf("what somebody took away: %v", got)
		}
	}
	if _, err := u.Files(t.Context(), layer.ID("sha256:"+strings.Repeat("0", 64))); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a layer that is not there: %v", err)
	}
	if n := len(u.byID); n != 1 {
		t.Errorf("%d layers are known, want 1", n)
	}
}

// memoryDisk is a small disk for the time of the test.
func memoryDisk(t testing.TB, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("unpacked", dir, "tmpfs", 0, "mode=0700,size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// A disk without room is told with what it takes, before anything is written, and when it becomes full on the way nothing is left.
func TestUnpackOnAFullDisk(t *testing.T) {
	needRoot(t)
	s, ids := newShelf(t, t.TempDir(), memoryTypes())
	small := openUnpacked(t, memoryDisk(t, "1m"), 1<<30, s)
	if _, err := small.Files(t.Context(), layer.ID(ids[0])); !errors.Is(err, unix.ENOSPC) || !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), "takes about 1 MiB") {
		t.Errorf("no room: %v", err)
	}
	if left, _ := os.ReadDir(small.dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	u := openUnpacked(t, memoryDisk(t, "1m"), 1<<30, s)
	u.spare = 0
	full := filepath.Join(u.dir, "others")
	u.step = func(what string) {
		if what == "unpack" {
			os.WriteFile(full, make([]byte, 1<<20), 0o600)
		}
	}
	_, err := u.Files(t.Context(), layer.ID(ids[0]))
	if !errors.Is(err, unix.ENOSPC) || !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), "became full") {
		t.Errorf("full on the way: %v", err)
	}
	os.Remove(full)
	if left, _ := os.ReadDir(u.dir); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	u.step = func(string) {}
	f, err := u.Files(t.Context(), layer.ID(ids[0]))
	if err != nil {
		t.Fatalf("with room again: %v", err)
	}
	f.Close()
}

// Layers that nobody uses make room, the one used longest ago first; what is in use stays, and the error says so. What the store has no more
// goes, and all goes that nobody uses where layers are mounted again.
func TestUnpackedMakesRoom(t *testing.T) {
	needRoot(t)
	dir, at := t.TempDir(), ""
	at = filepath.Join(dir, "unpacked")
	s, ids := newShelf(t, dir, tarOf("one"), tarOf("two"), tarOf("three"), tarOf("four"))
	probe := openUnpacked(t, at, 1<<30, s)
	use := func(u *unpacked, i int) error {
		f, err := u.Files(t.Context(), layer.ID(ids[i]))
		if err == nil {
			f.Close()
		}
		return err
	}
	if err := use(probe, 0); err != nil {
		t.Fatal(err)
	}
	each := probe.byID[ids[0]].octets
	probe.close()
	u := openUnpacked(t, at, 3*each, s, ids[0])
	for _, i := range []int{1, 2, 1, 3} { // the third makes way: the first is in use, the second was used since
		if err := use(u, i); err != nil {
			t.Fatal(err)
		}
	}
	there := func() (out []string) {
		entries, _ := os.ReadDir(at)
		for _, e := range entries {
			out = append(out, strconv.Itoa(slices.Index(ids, e.Name())))
		}
		slices.Sort(out)
		return out
	}
	if got := there(); !slices.Equal(got, []string{"0", "1", "3"}) {
		t.Errorf("there are %v", got)
	}
	u.inUse = func() map[string]bool { return map[string]bool{ids[0]: true, ids[1]: true, ids[3]: true} }
	if err := use(u, 2); !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), "host.unpack_limit") {
		t.Errorf("all in use: %v", err)
	}
	u.inUse = func() map[string]bool { return map[string]bool{ids[0]: true} }
	s.gone.Store(ids[0], true)
	s.gone.Store(ids[1], true)
	if err := u.tidy(t.Context(), time.Now()); err != nil {
		t.Error(err)
	}
	if got := there(); !slices.Equal(got, []string{"0", "3"}) {
		t.Errorf("after the store dropped 0, which is in use, and 1: %v", got)
	}
	u.close()
	if err := use(u, 3); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("after its end: %v", err)
	}
	off := openUnpacked(t, at, 0, s, ids[0])
	if err := off.tidy(t.Context(), time.Now()); err != nil {
		t.Error(err)
	}
	if got := there(); !slices.Equal(got, []string{"0"}) {
		t.Errorf("after it was switched off: %v", got)
	}
}

func tarOf(name string) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	text := strings.Repeat(name+" ", 20000)
	w.WriteHeader(&tar.Header{Name: name[:1] + "-file", Mode: 0o644, Size: 60000})
	io.WriteString(w, text[:60000])
	w.Close()
	return b.Bytes()
}

// dieEnv is of the process that TestUnpackIsKilledAtEveryStep starts: the folder, and the step at which it dies.
const dieEnv = "DSEC_TEST_UNPACK_DIES"

// A host that is killed at any step leaves a whole layer or none; the next start removes what is half, and unpacks again.
func TestUnpackIsKilledAtEveryStep(t *testing.T) {
	needRoot(t)
	if dir, n, child := strings.Cut(os.Getenv(dieEnv), ":"); child {
		dieUnpacking(t, dir, n)
		return
	}
	dir := memoryDisk(t, "300m")
	s, ids := newShelf(t, dir, memoryTypes())
	at := filepath.Join(dir, "unpacked")
	u := openUnpacked(t, filepath.Join(dir, "whole"), 1<<30, s)
	want := folderOf(t, u, ids[0])
	died, whole := 0, 0
	for n := 1; ; n++ {
		child := exec.Command(os.Args[0], "-test.run=^TestUnpackIsKilledAtEveryStep$")
		child.Env = append(os.Environ(), fmt.Sprintf("%s=%s:%d", dieEnv, dir, n))
		out, err := child.CombinedOutput()
		if err == nil {
			break
		}
		if ws, ok := child.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != unix.SIGKILL {
			t.Fatalf("step %d: %v\n%s", n, err, out)
		}
		died++
		next := openUnpacked(t, at, 1<<30, s)
		if next.byID[ids[0]] != nil {
			whole++
		}
		if err := next.sweep(); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, folderOf(t, next, ids[0])); d != "" {
			t.Errorf("step %d: want -, got +:\n%s", n, d)
		}
		if left, err := os.ReadDir(at); err != nil || len(left) != 1 {
			t.Errorf("step %d: left %v, %v", n, left, err)
		}
		next.close()
		if err := os.RemoveAll(at); err != nil {
			t.Fatal(err)
		}
	}
	if died < 20 || whole != 1 { // one step is behind the rename
		t.Errorf("killed at %d steps, of which %d were after the end", died, whole)
	}
}

func folderOf(t testing.TB, u *unpacked, id string) []string {
	t.Helper()
	f, err := u.Files(t.Context(), layer.ID(id))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	return described(t, f.Meta)
}

func dieUnpacking(t *testing.T, dir, step string) {
	left, _ := strconv.Atoi(step)
	s, ids := newShelf(t, dir, memoryTypes())
	u := openUnpacked(t, filepath.Join(dir, "unpacked"), 1<<30, s)
	u.step = func(string) {
		if left--; left == 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	folderOf(t, u, ids[0])
}
