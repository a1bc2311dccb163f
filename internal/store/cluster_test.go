package store_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// cluster is a file system with the limits of 3FS, on a folder: no fallocate, lseek(SEEK_DATA), copy_file_range, locks or extended attributes,
// requests of at most 1 MiB, names and attributes cached for 30 s by the kernel. It fails now and then, and knows a length only some time
// after the fsync.
type cluster struct {
	mu     sync.Mutex
	rng    *rand.Rand
	faults float64 // probability of an operation that fails, before or after the deed
	late   int     // how many answers after an fsync tell an older length
	behind map[string]int
	failed int
	asked  map[int]bool // sizes of reads
	direct bool         // reads come as the program makes them, past the page cache
	across int          // reads that go across a multiple of 1 MiB
}

// fail decides whether an operation fails now; of one that changes something, after says that it is done first.
func (c *cluster) fail(changes bool) (errno syscall.Errno, after bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.faults == 0 || c.rng.Float64() >= c.faults {
		return 0, false
	}
	c.failed++
	return []syscall.Errno{syscall.EIO, syscall.ENOTCONN, syscall.ESTALE}[c.rng.IntN(3)], changes && c.rng.IntN(2) == 0
}

func mountCluster(t *testing.T, c *cluster, dir string) string {
	t.Helper()
	if c.rng == nil {
		c.rng, c.behind, c.asked = rand.New(rand.NewPCG(1, 1)), map[string]int{}, map[int]bool{}
	}
	if _, err := os.Stat("/dev/fuse"); err != nil || os.Geteuid() != 0 {
		t.Skip("skip: needs root and /dev/fuse")
	}
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	root := &fs.LoopbackRoot{Path: dir, Dev: uint64(st.Dev)}
	root.NewNode = func(r *fs.LoopbackRoot, _ *fs.Inode, _ string, _ *syscall.Stat_t) fs.InodeEmbedder {
		return &clusterNode{LoopbackNode: fs.LoopbackNode{RootData: r}, c: c}
	}
	long, short := 30*time.Second, 5*time.Second
	at := filepath.Join(t.TempDir(), "dsec-cluster")
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	server, err := fs.Mount(at, &clusterNode{LoopbackNode: fs.LoopbackNode{RootData: root}, c: c}, &fs.Options{
		AttrTimeout: &long, EntryTimeout: &long, NegativeTimeout: &short,
		MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "dsec-cluster", MaxWrite: 1 << 20, MaxBackground: 32,
			DisableXAttrs: true, DisabledCapabilities: fuse.CAP_PASSTHROUGH},
	})
	if err != nil {
		t.Skipf("skip: needs root and /dev/fuse: %v", err)
	}
	t.Cleanup(func() {
		for range 50 {
			if server.Unmount() == nil {
				return
			}
			time.Sleep(100 * time.Millisecond)
		}
		syscall.Unmount(at, syscall.MNT_DETACH)
	})
	return at
}

type clusterNode struct {
	fs.LoopbackNode
	c *cluster
}

func (n *clusterNode) file() string { return n.Path(nil) }

func (n *clusterNode) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	if e, _ := n.c.fail(false); e != 0 {
		return nil, e
	}
	return n.LoopbackNode.Lookup(ctx, name, out)
}

func (n *clusterNode) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	e, after := n.c.fail(true)
	if e != 0 && !after {
		return nil, e
	}
	i, errno := n.LoopbackNode.Mkdir(ctx, name, mode, out)
	if errno == 0 && after {
		return nil, e
	}
	return i, errno
}

func (n *clusterNode) Unlink(ctx context.Context, name string) syscall.Errno {
	e, after := n.c.fail(true)
	if e != 0 && !after {
		return e
	}
	if errno := n.LoopbackNode.Unlink(ctx, name); errno != 0 || !after {
		return errno
	}
	return e
}

func (n *clusterNode) Rename(ctx context.Context, name string, to fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	if flags != 0 {
		return syscall.EINVAL
	}
	e, after := n.c.fail(true)
	if e != 0 && !after {
		return e
	}
	if errno := n.LoopbackNode.Rename(ctx, name, to, newName, flags); errno != 0 || !after {
		return errno
	}
	return e
}

func (n *clusterNode) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	if e, _ := n.c.fail(false); e != 0 {
		return nil, nil, 0, e
	}
	i, h, f, errno := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	if errno != 0 {
		return i, h, f, errno
	}
	return i, &clusterFile{f: h.(*fs.LoopbackFile), n: i.Operations().(*clusterNode)}, f, 0
}

func (n *clusterNode) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if e, _ := n.c.fail(false); e != 0 {
		return nil, 0, e
	}
	h, f, errno := n.LoopbackNode.Open(ctx, flags)
	if errno != 0 {
		return h, f, errno
	}
	if n.c.direct {
		f |= fuse.FOPEN_DIRECT_IO
	}
	return &clusterFile{f: h.(*fs.LoopbackFile), n: n}, f, 0
}

func (n *clusterNode) Getattr(ctx context.Context, h fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	if e, _ := n.c.fail(false); e != 0 {
		return e
	}
	var errno syscall.Errno
	if c, ok := h.(*clusterFile); ok {
		errno = c.f.Getattr(ctx, out)
	} else {
		errno = n.LoopbackNode.Getattr(ctx, nil, out)
	}
	n.c.mu.Lock()
	defer n.c.mu.Unlock()
	if left := n.c.behind[n.file()]; left > 0 && out.Size > 0 {
		n.c.behind[n.file()] = left - 1
		out.Size /= 2
	}
	return errno
}

func (n *clusterNode) Setattr(ctx context.Context, h fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	return n.LoopbackNode.Setattr(ctx, nil, in, out)
}

func (n *clusterNode) Statx(context.Context, fs.FileHandle, uint32, uint32, *fuse.StatxOut) syscall.Errno {
	return syscall.ENOSYS
}
func (n *clusterNode) Getxattr(context.Context, string, []byte) (uint32, syscall.Errno) {
	return 0, syscall.ENOTSUP
}
func (n *clusterNode) Setxattr(context.Context, string, []byte, uint32) syscall.Errno {
	return syscall.ENOTSUP
}
func (n *clusterNode) Listxattr(context.Context, []byte) (uint32, syscall.Errno) {
	return 0, syscall.ENOTSUP
}
func (n *clusterNode) Removexattr(context.Context, string) syscall.Errno { return syscall.ENOTSUP }
func (n *clusterNode) CopyFileRange(context.Context, fs.FileHandle, uint64, *fs.Inode, fs.FileHandle, uint64, uint64, uint64) (uint32, syscall.Errno) {
	return 0, syscall.ENOSYS
}
func (n *clusterNode) Tmpfile(context.Context, uint32, uint32, *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	return nil, nil, 0, syscall.ENOTSUP
}

// clusterFile is an open file: it can be read, written and synced, and nothing else.
type clusterFile struct {
	f *fs.LoopbackFile
	n *clusterNode
}

func (h *clusterFile) Read(ctx context.Context, p []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	h.n.c.mu.Lock()
	h.n.c.asked[len(p)] = true
	if off>>20 != (off+int64(len(p))-1)>>20 {
		h.n.c.across++
	}
	h.n.c.mu.Unlock()
	if e, _ := h.n.c.fail(false); e != 0 {
		return nil, e
	}
	r, errno := h.f.Read(ctx, p, off)
	if errno != 0 || !h.n.c.direct {
		return r, errno
	}
	b, status := r.Bytes(p) // go-fuse can't splice what is not aligned
	return fuse.ReadResultData(b), syscall.Errno(status)
}

func (h *clusterFile) Write(ctx context.Context, p []byte, off int64) (uint32, syscall.Errno) {
	if e, _ := h.n.c.fail(false); e != 0 {
		return 0, e
	}
	return h.f.Write(ctx, p, off)
}

func (h *clusterFile) Fsync(ctx context.Context, flags uint32) syscall.Errno {
	h.n.c.mu.Lock()
	h.n.c.behind[h.n.file()] = h.n.c.late
	h.n.c.mu.Unlock()
	return h.f.Fsync(ctx, flags)
}

func (h *clusterFile) Flush(ctx context.Context) syscall.Errno   { return h.f.Flush(ctx) }
func (h *clusterFile) Release(ctx context.Context) syscall.Errno { return h.f.Release(ctx) }
func (h *clusterFile) Lseek(context.Context, uint64, uint32) (uint64, syscall.Errno) {
	return 0, syscall.ENOSYS
}
func (h *clusterFile) Allocate(context.Context, uint64, uint64, uint32) syscall.Errno {
	return syscall.ENOTSUP
}

func TestDirOnAClusterFileSystem(t *testing.T) {
	for name, c := range map[string]*cluster{"Good": {late: 2}, "Failing": {late: 2, faults: 0.03}} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, func(t *testing.T) store.Store {
				d, err := store.NewDir(filepath.Join(mountCluster(t, c, t.TempDir()), "s"))
				if err != nil {
					t.Fatal(err)
				}
				return d
			}, storetest.Options{Listing: 150})
			if c.rng != nil && (c.faults > 0) != (c.failed > 20) {
				t.Errorf("%d operations failed", c.failed)
			}
		})
	}
}

// What one node publishes, others read at once, in whole and with the right length.
func TestClusterNodesSeeWhatIsPublished(t *testing.T) {
	dir := t.TempDir()
	a, err := store.NewDir(mountCluster(t, &cluster{late: 3}, dir))
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{}
	b, err := store.NewDir(mountCluster(t, c, dir))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 20 {
		want := storetest.Random(uint64(i), i*300<<10+5)
		key := "x/" + string(rune('a'+i))
		put(t, a, key, string(want))
		if got, err := store.ReadAll(t.Context(), b, key, 1<<30); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d octets, %v", key, len(got), err)
		}
	}
	for n := range c.asked {
		if n > 1<<20 {
			t.Errorf("a read of %d octets", n)
		}
	}
}

// Reads are large and end at multiples of 1 MiB, wherever they begin.
func TestClusterReadsAreAligned(t *testing.T) {
	c := &cluster{direct: true}
	d, err := store.NewDir(mountCluster(t, c, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	want := storetest.Random(5, 5<<20+5)
	put(t, d, "x", string(want))
	r, err := d.Open(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	rng := rand.New(rand.NewPCG(3, 3))
	for range 40 {
		off := rng.IntN(len(want))
		b := make([]byte, rng.IntN(len(want)-off)+1)
		if _, err := r.ReadAt(b, int64(off)); err != nil || !bytes.Equal(b, want[off:off+len(b)]) {
			t.Fatalf("%d octets at %d: %v", len(b), off, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	largest := 0
	for n := range c.asked {
		largest = max(largest, n)
	}
	if c.across > 0 || largest < 1<<20-4096 { // one page less where the program's memory does not begin with a page
		t.Errorf("%d reads go across a multiple of 1 MiB; the largest has %d octets", c.across, largest)
	}
}

// A file system that answers nothing but errors ends reads after its bound.
func TestClusterThatStaysBroken(t *testing.T) {
	c := &cluster{}
	d, err := store.NewDir(mountCluster(t, c, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	put(t, d, "x", string(storetest.Random(1, 3<<20)))
	r, err := d.Open(t.Context(), "x")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if p, _ := d.Path("x"); true { // nothing may come from the page cache
		f, err := os.Open(p)
		if err != nil {
			t.Fatal(err)
		}
		unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
		f.Close()
	}
	c.mu.Lock()
	c.faults = 1
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := store.ReadAt(ctx, r, make([]byte, 4096), 1<<20); err == nil {
		t.Error("no error")
	}
	c.mu.Lock()
	c.faults = 0
	c.mu.Unlock()
	b := make([]byte, 4096)
	if _, err := r.ReadAt(b, 1<<20); err != nil || !bytes.Equal(b, storetest.Random(1, 3<<20)[1<<20:1<<20+4096]) {
		t.Errorf("whole again: %v", err)
	}
}
