// Package crashfs is a file system in memory that crashes, to test what must survive it. It is harsher than a real one: of what was
// not synced, a power loss keeps any subset of the 512-octet sectors, any prefix of each folder's changes, and any file size in
// between. A kill keeps everything but tears the write that was under way.
package crashfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/trajectory"
)

// ErrCrashed is what every call answers after the crash.
var ErrCrashed = errors.New("crashed")

const sector = 512

// FS implements trajectory.FS. A lock is not part of it: there is one process.
type FS struct {
	mu      sync.Mutex
	rng     *rand.Rand
	names   map[string]*node   // what processes see
	durable map[string]*node   // what the disk has
	dirs    map[string]bool    // folders survive always: the log only makes some for blobs
	pending map[string][]dirOp // by folder
	ops     int                // changing calls so far
	crashAt int                // the call that crashes; 0 none
	dead    bool
	size    int64 // of the disk; 0 unbounded
	fail    func(op, name string) error
	crashed func()
}

type dirOp struct {
	name string
	node *node // nil removes
}

type node struct {
	cur, dur []byte
	pending  []fileOp
}

// fileOp is a write, or a change of size where data is nil.
type fileOp struct {
	off  int64
	data []byte
}

// New is an empty file system whose crashes are drawn from the seed.
func New(seed uint64) *FS {
	return &FS{rng: rand.New(rand.NewPCG(seed, 1)), names: map[string]*node{}, durable: map[string]*node{}, dirs: map[string]bool{".": true},
		pending: map[string][]dirOp{}}
}

// Ops counts the calls that changed something or synced it.
func (f *FS) Ops() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ops
}

// CrashIn lets the n-th changing call from now crash, 1 being the next; 0 takes it back.
func (f *FS) CrashIn(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.crashAt = 0
	if n > 0 {
		f.crashAt = f.ops + n
	}
}

// SetSize bounds the disk, in octets of all files; 0 is unbounded.
func (f *FS) SetSize(n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.size = n
}

// SetFail installs a function that may fail a changing call: op is create, write, sync, allocate, truncate, remove, rename or syncdir.
func (f *FS) SetFail(fail func(op, name string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = fail
}

// OnCrash calls f in the call that crashes, before anybody hears of it: what else dies with the process dies there. f must not use the
// file system.
func (f *FS) OnCrash(crashed func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.crashed = crashed
}

// Kill ends the process: the file system as the next one finds it. Files opened before are dead.
func (f *FS) Kill() *FS { return f.after(false) }

// PowerLoss ends the host: what was not synced is lost in part.
func (f *FS) PowerLoss() *FS { return f.after(true) }

func (f *FS) after(power bool) *FS {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dead = true
	g := New(f.rng.Uint64())
	g.size = f.size
	maps.Copy(g.dirs, f.dirs)
	copies := map[*node]*node{}
	clone := func(n *node) *node {
		c := copies[n]
		if c == nil {
			c = &node{cur: slices.Clone(n.cur), dur: slices.Clone(n.dur), pending: slices.Clone(n.pending)}
			if power {
				c = &node{cur: f.tear(n)}
				c.dur = slices.Clone(c.cur)
			}
			copies[n] = c
		}
		return c
	}
	if !power {
		for name, n := range f.names {
			g.names[name] = clone(n)
		}
		for name, n := range f.durable {
			g.durable[name] = clone(n)
		}
		for dir, ops := range f.pending {
			for _, op := range ops {
				if op.node != nil {
					op.node = clone(op.node)
				}
				g.pending[dir] = append(g.pending[dir], op)
			}
		}
		return g
	}
	left := maps.Clone(f.durable)
	dirs := slices.Sorted(maps.Keys(f.pending))
	for _, dir := range dirs {
		ops := f.pending[dir]
		for _, op := range ops[:f.rng.IntN(len(ops)+1)] {
			op.apply(left)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(left)) {
		g.names[name] = clone(left[name])
		g.durable[name] = g.names[name]
	}
	return g
}

func (op dirOp) apply(names map[string]*node) {
	if op.node == nil {
		delete(names, op.name)
	} else {
		names[op.name] = op.node
	}
}

// tear draws what the disk has of a file.
func (f *FS) tear(n *node) []byte {
	b := slices.Clone(n.dur)
	keep := f.rng.Float64() // from nearly nothing to nearly all
	for _, op := range n.pending {
		if op.data == nil {
			if f.rng.Float64() < keep {
				b = resize(b, op.off)
			}
			continue
		}
		for i := int64(0); i < int64(len(op.data)); {
			end := min(int64(len(op.data)), (op.off+i)/sector*sector+sector-op.off)
			if f.rng.Float64() < keep {
				b = put(b, op.off+i, op.data[i:end])
			}
			i = end
		}
	}
	return b
}

func resize(b []byte, n int64) []byte {
	if n <= int64(len(b)) {
		return b[:n:n]
	}
	return append(b, make([]byte, n-int64(len(b)))...)
}

func put(b []byte, off int64, data []byte) []byte {
	if end := off + int64(len(data)); end > int64(len(b)) {
		b = resize(b, end)
	}
	copy(b[off:], data)
	return b
}

// change begins a changing call; mu is held. crash says that this is the one that crashes: it may take effect in part.
func (f *FS) change(op, name string) (crash bool, err error) {
	if f.dead {
		return false, ErrCrashed
	}
	f.ops++
	if f.crashAt > 0 && f.ops >= f.crashAt {
		f.dead = true
		if f.crashed != nil {
			f.crashed()
		}
		return true, ErrCrashed
	}
	if f.fail != nil {
		return false, f.fail(op, name)
	}
	return false, nil
}

func (f *FS) used() (n int64) {
	for _, nd := range f.names {
		n += int64(len(nd.cur))
	}
	return n
}

func (f *FS) enter(name string, n *node) {
	op := dirOp{name, n}
	op.apply(f.names)
	dir := path.Dir(name)
	f.pending[dir] = append(f.pending[dir], op)
}

func missing(op, name string) error { return &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist} }

func (f *FS) Create(name string) (trajectory.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	crash, err := f.change("create", name)
	if f.names[name] != nil {
		return nil, &fs.PathError{Op: "create", Path: name, Err: fs.ErrExist}
	}
	if !f.dirs[path.Dir(name)] {
		return nil, missing("create", name)
	}
	n := &node{}
	if err == nil || crash && f.rng.IntN(2) == 0 {
		f.enter(name, n)
	}
	if err != nil {
		return nil, err
	}
	return &file{f, n, name}, nil
}

func (f *FS) Open(name string) (trajectory.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dead {
		return nil, ErrCrashed
	}
	n := f.names[name]
	if n == nil {
		return nil, missing("open", name)
	}
	return &file{f, n, name}, nil
}

func (f *FS) Remove(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	crash, err := f.change("remove", name)
	if f.names[name] == nil {
		return missing("remove", name)
	}
	if err == nil || crash && f.rng.IntN(2) == 0 {
		f.enter(name, nil)
	}
	return err
}

func (f *FS) Rename(from, to string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	crash, err := f.change("rename", from)
	n := f.names[from]
	if n == nil || !f.dirs[path.Dir(to)] {
		return missing("rename", from)
	}
	if err == nil || crash && f.rng.IntN(2) == 0 {
		f.enter(to, n)
		f.enter(from, nil)
	}
	return err
}

func (f *FS) Mkdir(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dead {
		return ErrCrashed
	}
	f.dirs[name] = true
	return nil
}

func (f *FS) List(dir string) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.dead {
		return nil, ErrCrashed
	}
	if !f.dirs[dir] {
		return nil, missing("list", dir)
	}
	var names []string
	for name := range f.names {
		if path.Dir(name) == dir {
			names = append(names, path.Base(name))
		}
	}
	for name := range f.dirs {
		if name != "." && path.Dir(name) == dir {
			names = append(names, path.Base(name))
		}
	}
	slices.Sort(names)
	return names, nil
}

func (f *FS) SyncDir(dir string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.change("syncdir", dir); err != nil {
		return err
	}
	for _, op := range f.pending[dir] {
		op.apply(f.durable)
	}
	delete(f.pending, dir)
	return nil
}

type nothing struct{}

func (nothing) Close() error { return nil }

func (f *FS) Lock(string) (io.Closer, error) { return nothing{}, nil }

type file struct {
	fs   *FS
	n    *node
	name string
}

func (h *file) ReadAt(p []byte, off int64) (int, error) {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	if h.fs.dead {
		return 0, ErrCrashed
	}
	if off >= int64(len(h.n.cur)) {
		return 0, io.EOF
	}
	n := copy(p, h.n.cur[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (h *file) WriteAt(p []byte, off int64) (int, error) {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	crash, err := h.fs.change("write", h.name)
	if crash {
		p = p[:h.fs.rng.IntN(len(p)+1)]
	} else if err != nil {
		return 0, err
	}
	if grow := off + int64(len(p)) - int64(len(h.n.cur)); grow > 0 && h.fs.size > 0 && h.fs.used()+grow > h.fs.size {
		return 0, fmt.Errorf("write %s: %w", h.name, unix.ENOSPC)
	}
	if len(p) > 0 {
		h.n.cur = put(h.n.cur, off, p)
		h.n.pending = append(h.n.pending, fileOp{off, slices.Clone(p)})
	}
	return len(p), err
}

func (h *file) Close() error { return nil }

func (h *file) Size() (int64, error) {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	if h.fs.dead {
		return 0, ErrCrashed
	}
	return int64(len(h.n.cur)), nil
}

func (h *file) Allocate(size int64) error { return h.resize("allocate", size) }
func (h *file) Truncate(size int64) error { return h.resize("truncate", size) }

func (h *file) resize(op string, size int64) error {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	crash, err := h.fs.change(op, h.name)
	if grow := size - int64(len(h.n.cur)); grow > 0 && h.fs.size > 0 && h.fs.used()+grow > h.fs.size {
		return fmt.Errorf("%s %s: %w", op, h.name, unix.ENOSPC)
	}
	if err == nil || crash && h.fs.rng.IntN(2) == 0 {
		h.n.cur = resize(h.n.cur, size)
		h.n.pending = append(h.n.pending, fileOp{off: size})
	}
	return err
}

func (h *file) Sync() error {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	if _, err := h.fs.change("sync", h.name); err != nil {
		return err
	}
	h.n.dur = slices.Clone(h.n.cur)
	h.n.pending = nil
	return nil
}

// Tick counts a changing call of something else that the process does, such as one of a store: the process may crash in it. before says
// whether it had its effect before it crashed.
func (f *FS) Tick(name string) (before bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	crash, err := f.change("tick", name)
	return crash && f.rng.IntN(2) == 0, err
}
