package erofs_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/layer/layertest"
)

func dir(children map[string]*erofs.Inode) *erofs.Inode {
	if children == nil {
		children = map[string]*erofs.Inode{}
	}
	return &erofs.Inode{Mode: unix.S_IFDIR | 0o755, Sec: 1_700_000_000, Nsec: 123456789, Children: children}
}

func file(t testing.TB, w interface {
	Add(io.Reader, int64) (erofs.Content, error)
}, content []byte) *erofs.Inode {
	t.Helper()
	c, err := w.Add(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		t.Fatal(err)
	}
	return &erofs.Inode{Mode: unix.S_IFREG | 0o644, Sec: 1, Nsec: 2, Data: c}
}

func create(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// eachForm runs a test with both stored forms.
func eachForm(t *testing.T, test func(t *testing.T, im *image)) {
	for _, form := range []string{"one file", "two files"} {
		t.Run(form, func(t *testing.T) { test(t, newImage(t, form == "two files")) })
	}
}

// image is one that is being written.
type image struct {
	*erofs.Writer
	meta, data *os.File // data is nil in the one-file form
}

func newImage(t testing.TB, split bool) *image {
	im := &image{meta: create(t)}
	if split {
		im.data = create(t)
		im.Writer = erofs.NewSplitWriter(im.meta, im.data)
	} else {
		im.Writer = erofs.NewWriter(im.meta)
	}
	return im
}

// finish writes the metadata, and has fsck.erofs look at it.
func (im *image) finish(t testing.TB, root *erofs.Inode) {
	t.Helper()
	im.finishOnly(t, root)
	layertest.Fsck(t, im.meta.Name(), im.dataName())
}

func (im *image) finishOnly(t testing.TB, root *erofs.Inode) {
	t.Helper()
	if im.data != nil {
		size, err := im.EndData()
		if err != nil {
			t.Fatal(err)
		}
		h := sha256.New()
		n, err := io.Copy(h, io.NewSectionReader(im.data, 0, 1<<62))
		if err != nil || n != size {
			t.Fatalf("data: %d octets, want %d, %v", n, size, err)
		}
		if err := im.SetTag(fmt.Sprintf("%x", h.Sum(nil))); err != nil {
			t.Fatal(err)
		}
	}
	size, err := im.Finish(root, [16]byte{1, 2, 3})
	if err != nil {
		t.Fatal(err)
	}
	if st, _ := im.meta.Stat(); st.Size() != size {
		t.Fatalf("size %d, file %d", size, st.Size())
	}
}

// dataName is the second file's, "" when there is none or nothing in it.
func (im *image) dataName() string {
	if im.data == nil || im.Size() == 0 {
		return ""
	}
	return im.data.Name()
}

// size is what all files take.
func (im *image) size(t testing.TB) int64 {
	t.Helper()
	st, err := im.meta.Stat()
	if err != nil {
		t.Fatal(err)
	}
	n := st.Size()
	if im.data != nil {
		n += im.Size()
	}
	return n
}

// open reads the image back.
func (im *image) open(t testing.TB) *erofs.Image {
	t.Helper()
	var data io.ReaderAt
	if im.data != nil {
		data = im.data
	}
	got, err := erofs.Open(im.meta, data)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// readBack compares what erofs.Open reads with the tree that was written.
func (im *image) readBack(t testing.TB, want []string) {
	t.Helper()
	root := im.open(t).Root
	contents := map[*erofs.Inode][]byte{}
	var walk func(in *erofs.Inode)
	walk = func(in *erofs.Inode) {
		for _, c := range in.Children {
			walk(c)
		}
		if in.Mode&unix.S_IFMT == unix.S_IFREG && contents[in] == nil {
			b, err := io.ReadAll(in.Data.Reader())
			if err != nil {
				t.Error(err)
			}
			contents[in] = b
		}
	}
	walk(root)
	if d := cmp.Diff(want, expect(root, contents)); d != "" {
		t.Errorf("read back, want -, got +:\n%s", d)
	}
}

func (im *image) mount(t testing.TB) string {
	t.Helper()
	return layertest.MountSplit(t, im.meta.Name(), im.dataName())
}

// describe lists what the kernel shows of a tree, one line a name.
func describe(t testing.TB, root string) []string {
	t.Helper()
	var lines []string
	first := map[uint64]string{}
	err := filepath.Walk(root, func(p string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, p)
		st := info.Sys().(*syscall.Stat_t)
		line := fmt.Sprintf("%q %o %d:%d %d.%09d n%d", rel, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec, st.Nlink)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" size %d %x", st.Size, sha256.Sum256(b))
		case unix.S_IFLNK:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" -> %q", target)
		case unix.S_IFCHR, unix.S_IFBLK:
			line += fmt.Sprintf(" dev %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
		if st.Nlink > 1 && !info.IsDir() {
			if f, ok := first[st.Ino]; ok {
				line += " = " + f
			} else {
				first[st.Ino] = rel
			}
		}
		buf := make([]byte, 1<<16)
		n, err := unix.Llistxattr(p, buf)
		if err != nil {
			return fmt.Errorf("list attributes of %s: %w", p, err)
		}
		names := strings.FieldsFunc(string(buf[:n]), func(r rune) bool { return r == 0 })
		sort.Strings(names)
		for _, name := range names {
			v := make([]byte, 1<<16)
			n, err := unix.Lgetxattr(p, name, v)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %s=%x", name, v[:n])
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// expect lists the same of the tree in memory.
func expect(root *erofs.Inode, contents map[*erofs.Inode][]byte) []string {
	links := map[*erofs.Inode]int{}
	var count func(in *erofs.Inode)
	count = func(in *erofs.Inode) {
		links[in]++
		if in.IsDir() {
			links[in] = 2
			for _, c := range in.Children {
				if c.IsDir() {
					links[in]++
				}
				count(c)
			}
		}
	}
	count(root)
	// A folder's count is complete only after its children; count adds to it before them, so do folders again.
	first := map[*erofs.Inode]string{}
	var lines []string
	var walk func(in *erofs.Inode, rel string)
	walk = func(in *erofs.Inode, rel string) {
		n := links[in]
		if in.IsDir() {
			n = 2
			for _, c := range in.Children {
				if c.IsDir() {
					n++
				}
			}
		}
		line := fmt.Sprintf("%q %o %d:%d %d.%09d n%d", rel, in.Mode, in.UID, in.GID, in.Sec, in.Nsec, n)
		switch in.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			line += fmt.Sprintf(" size %d %x", in.Data.Size, sha256.Sum256(contents[in]))
		case unix.S_IFLNK:
			line += fmt.Sprintf(" -> %q", in.Target)
		case unix.S_IFCHR, unix.S_IFBLK:
			line += fmt.Sprintf(" dev %d:%d", in.Major, in.Minor)
		}
		if n > 1 && !in.IsDir() {
			if f, ok := first[in]; ok {
				line += " = " + f
			} else {
				first[in] = rel
			}
		}
		xs := append([]erofs.Xattr(nil), in.Xattrs...)
		sort.Slice(xs, func(i, j int) bool { return xs[i].Name < xs[j].Name })
		for _, x := range xs {
			line += fmt.Sprintf(" %s=%x", x.Name, x.Value)
		}
		lines = append(lines, line)
		for _, name := range in.Names() {
			walk(in.Children[name], filepath.Join(rel, name))
		}
	}
	walk(root, ".")
	return lines
}

func TestEveryTypeThroughTheKernel(t *testing.T) {
	eachForm(t, func(t *testing.T, im *image) {
		w := im.Writer
		contents := map[*erofs.Inode][]byte{}
		add := func(b []byte) *erofs.Inode {
			in := file(t, w, b)
			contents[in] = b
			return in
		}
		big := make([]byte, 3<<20+17)
		rand.NewChaCha8([32]byte{1}).Read(big)
		sparse := make([]byte, 1<<20+100)
		copy(sparse[200<<10:], "island")
		copy(sparse[len(sparse)-3:], "end")

		hard := add([]byte("one inode, three names"))
		hard.Mode = unix.S_IFREG | 0o4755
		hard.UID, hard.GID = 1000, 70000
		capable := add(big)
		capable.Set("security.capability", []byte{1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
		capable.Set("user.note", bytes.Repeat([]byte("x"), 3000))
		capable.Set("user.empty", nil)
		opaque := dir(nil)
		opaque.Set("trusted.overlay.opaque", []byte("y"))
		link := &erofs.Inode{Mode: unix.S_IFLNK | 0o777, Target: "../hard", Sec: -5, Nsec: 999999999}
		long := &erofs.Inode{Mode: unix.S_IFLNK | 0o777, Target: strings.Repeat("t", 4094)}
		many := map[string]*erofs.Inode{"!before-dot": add(nil), "...": add(nil), "-": add([]byte("-"))}
		for i := range 2000 {
			many[fmt.Sprintf("entry-%06d", i)] = dir(nil)
		}
		names := map[string]*erofs.Inode{
			strings.Repeat("n", 255): add([]byte("long name")),
			"new\nline\xff\xfe":      add([]byte("odd name")),
		}
		tagged := dir(names)
		for i := range 40 {
			tagged.Set(fmt.Sprintf("user.a%02d", i), bytes.Repeat([]byte{byte(i)}, 200))
		}
		root := dir(map[string]*erofs.Inode{
			"hard": hard, "hard2": hard, "sub": dir(map[string]*erofs.Inode{"hard3": hard, "rel": link, "rel2": link}),
			"big": capable, "sparse": add(sparse), "zeros": add(make([]byte, 8192)), "empty": add(nil), "same": add(big),
			"opaque": opaque, "long": long, "many": dir(many), "tagged": tagged,
			"gone": {Mode: unix.S_IFCHR}, "null": {Mode: unix.S_IFCHR | 0o666, Major: 1, Minor: 3},
			"disk": {Mode: unix.S_IFBLK | 0o600, Major: 259, Minor: 70000}, "fifo": {Mode: unix.S_IFIFO | 0o644, UID: 4294967294},
			"sock": {Mode: unix.S_IFSOCK | 0o755},
		})
		im.finish(t, root)
		if n := im.size(t); n > 5<<20 {
			t.Errorf("image has %d octets: equal contents or holes were stored", n)
		}
		mnt := im.mount(t)
		want := expect(root, contents)
		if d := cmp.Diff(want, describe(t, mnt)); d != "" {
			t.Errorf("tree, want -, got +:\n%s", d)
		}
		im.readBack(t, want)
		im.unpackBack(t, want)
	})
}

func TestFolderOf100kEntries(t *testing.T) {
	eachForm(t, func(t *testing.T, im *image) {
		w := im.Writer
		children := map[string]*erofs.Inode{}
		for i := range 100_000 {
			name := fmt.Sprintf("%s-%d", strings.Repeat("p", i%100), i)
			children[name] = file(t, w, fmt.Appendf(nil, "%d", i%50))
		}
		im.finish(t, dir(map[string]*erofs.Inode{"d": dir(children)}))
		mnt := im.mount(t)
		got, err := os.ReadDir(filepath.Join(mnt, "d"))
		if err != nil || len(got) != 100_000 {
			t.Fatalf("%d entries, %v", len(got), err)
		}
		for i := 0; i < 100_000; i += 997 {
			b, err := os.ReadFile(filepath.Join(mnt, "d", fmt.Sprintf("%s-%d", strings.Repeat("p", i%100), i)))
			if err != nil || string(b) != fmt.Sprint(i%50) {
				t.Fatalf("entry %d: %q, %v", i, b, err)
			}
		}
	})
}

// zeros is a reader of n zeros with a letter at each of the marks.
type zeros struct {
	n, at int64
	marks map[int64]byte
}

func (z *zeros) Read(p []byte) (int, error) {
	if z.at == z.n {
		return 0, io.EOF
	}
	k := int(min(int64(len(p)), z.n-z.at))
	clear(p[:k])
	for m, c := range z.marks {
		if m >= z.at && m < z.at+int64(k) {
			p[m-z.at] = c
		}
	}
	z.at += int64(k)
	return k, nil
}

func TestHugeFileWithHoles(t *testing.T) {
	eachForm(t, func(t *testing.T, im *image) {
		if testing.Short() {
			t.Skip("skip: hashes 6 GB")
		}
		w := im.Writer
		const size = 6<<30 + 5
		marks := map[int64]byte{0: 'a', 5 << 30: 'b', size - 1: 'c'}
		c, err := w.Add(&zeros{n: size, marks: marks}, size)
		if err != nil {
			t.Fatal(err)
		}
		im.finishOnly(t, dir(map[string]*erofs.Inode{"f": {Mode: unix.S_IFREG | 0o644, Data: c}}))
		if n := im.size(t); n > 2<<20 {
			t.Errorf("image of %d octets for a file that is holes", n)
		}
		g, err := os.Open(filepath.Join(im.mount(t), "f"))
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		if st, _ := g.Stat(); st.Size() != size {
			t.Errorf("size %d", st.Size())
		}
		for off, want := range marks {
			b := make([]byte, 1)
			if _, err := g.ReadAt(b, off); err != nil || b[0] != want {
				t.Errorf("at %d: %q, %v", off, b, err)
			}
		}
	})
}

func TestSameTreeSameOctets(t *testing.T) {
	for _, split := range []bool{false, true} {
		build := func() []byte {
			im := newImage(t, split)
			children := map[string]*erofs.Inode{}
			for i := range 300 {
				in := file(t, im, bytes.Repeat([]byte{byte(i)}, i*37))
				in.Set("user.b", []byte("1"))
				in.Set("user.a", []byte("2"))
				children[fmt.Sprint(i)] = in
			}
			im.finish(t, dir(children))
			b, err := os.ReadFile(im.meta.Name())
			if err != nil {
				t.Fatal(err)
			}
			if split {
				d, err := os.ReadFile(im.data.Name())
				if err != nil {
					t.Fatal(err)
				}
				b = append(b, d...)
			}
			return b
		}
		if !bytes.Equal(build(), build()) {
			t.Error("two images of one tree differ")
		}
	}
}

// An image whose last inode ends with a block: found by TestRandomTrees.
func TestLastInodeAtTheEndOfABlock(t *testing.T) {
	for n := 55; n < 130; n++ {
		im := newImage(t, n%2 == 0)
		children := map[string]*erofs.Inode{}
		for i := range n {
			children[fmt.Sprintf("%03d", i)] = &erofs.Inode{Mode: unix.S_IFIFO | 0o600}
		}
		im.finish(t, dir(children))
	}
}

func TestContentThatEndsEarly(t *testing.T) {
	w := erofs.NewWriter(create(t))
	before := w.Size()
	if _, err := w.Add(strings.NewReader("short"), 10); err == nil || !strings.Contains(err.Error(), "unexpected EOF") {
		t.Errorf("got %v", err)
	}
	if w.Size() != before {
		t.Error("the broken content keeps its blocks")
	}
}

func TestRandomTrees(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		// Not of t.TempDir, which keeps what all rounds write to the end.
		folder, err := os.MkdirTemp("", "dsec-erofs-")
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(folder)
		im := &image{}
		if im.meta, err = os.Create(folder + "/meta"); err != nil {
			rt.Fatal(err)
		}
		defer im.meta.Close()
		im.Writer = erofs.NewWriter(im.meta)
		if rapid.Bool().Draw(rt, "split") {
			if im.data, err = os.Create(folder + "/data"); err != nil {
				rt.Fatal(err)
			}
			defer im.data.Close()
			im.Writer = erofs.NewSplitWriter(im.meta, im.data)
		}
		contents := map[*erofs.Inode][]byte{}
		var all []*erofs.Inode
		var grow func(depth int) *erofs.Inode
		grow = func(depth int) *erofs.Inode {
			d := dir(nil)
			n := rapid.IntRange(0, 12).Draw(rt, "n")
			for range n {
				name := rapid.StringMatching(`[!-.0-~]{1,60}`).Draw(rt, "name")
				if name == "." || name == ".." {
					continue
				}
				var in *erofs.Inode
				switch rapid.IntRange(0, 6).Draw(rt, "type") {
				case 0:
					if depth < 3 {
						in = grow(depth + 1)
						break
					}
					in = dir(nil)
				case 1:
					in = &erofs.Inode{Mode: unix.S_IFLNK | 0o777, Target: strings.Repeat("x", rapid.IntRange(1, 4095).Draw(rt, "target"))}
				case 2:
					if len(all) > 0 {
						in = all[rapid.IntRange(0, len(all)-1).Draw(rt, "link")]
						break
					}
					fallthrough
				case 3:
					in = &erofs.Inode{Mode: unix.S_IFCHR}
				default:
					b := make([]byte, rapid.SampledFrom([]int{0, 1, 4095, 4096, 4097, 65535, 65536, 65537, 200000}).Draw(rt, "size"))
					if rapid.Bool().Draw(rt, "filled") && len(b) > 0 {
						b[rapid.IntRange(0, len(b)-1).Draw(rt, "mark")] = 1
					}
					c, err := im.Add(bytes.NewReader(b), int64(len(b)))
					if err != nil {
						rt.Fatal(err)
					}
					in = &erofs.Inode{Mode: unix.S_IFREG | 0o600, Data: c}
					contents[in] = b
				}
				if !in.IsDir() && len(in.Xattrs) == 0 {
					for i := range rapid.IntRange(0, 3).Draw(rt, "xattrs") {
						in.Set(fmt.Sprintf("trusted.t%d", i), make([]byte, rapid.IntRange(0, 6000).Draw(rt, "value")))
					}
					all = append(all, in)
				}
				d.Children[name] = in
			}
			return d
		}
		root := grow(0)
		im.finish(t, root)
		want := expect(root, contents)
		im.readBack(t, want)
		t.Run("mounted", func(t *testing.T) {
			if d := cmp.Diff(want, describe(t, im.mount(t))); d != "" {
				t.Errorf("tree, want -, got +:\n%s", d)
			}
			im.unpackBack(t, want)
		})
		if t.Failed() {
			rt.FailNow()
		}
	})
}
