package trace

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"path"
	"slices"
	"sort"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of one look at an upper. What lies beyond is counted where it was seen, and told as not looked at where it was not.
const (
	MaxChanges  = 512     // paths that a step tells
	maxVisits   = 100_000 // names that one walk looks at
	maxWalk     = time.Second
	maxKnown    = 20_000   // names of one sandbox that are remembered
	maxDepth    = 200      // folders in folders
	maxHash     = 64 << 20 // octets that one walk hashes
	maxHashFile = 16 << 20 // octets of a file that is hashed
	maxLinks    = 4096
	clockSlack  = 12 * time.Millisecond // the kernel stamps files with the time of its last tick
)

// Kinds of a change.
const (
	Created = "created"
	Changed = "changed"
	Removed = "removed"
)

// State is what a path is, without its times.
type State struct {
	Type   string // file | dir | link | fifo | socket | device
	Mode   uint32 // permission bits, with setuid, setgid and sticky
	Size   int64  // of files, in octets
	SHA256 []byte // of files; nil where it was not taken: too large, or too much for one step
	Link   string // target
}

func (s State) equal(o State) bool {
	return s.Type == o.Type && s.Mode == o.Mode && s.Size == o.Size && s.Link == o.Link && (s.SHA256 == nil || o.SHA256 == nil || string(s.SHA256) == string(o.SHA256))
}

// same reports whether two states are known to be equal.
func (s State) same(o State) bool {
	return s.equal(o) && (s.Type != "file" || s.SHA256 != nil && o.SHA256 != nil)
}

// Change of a path.
type Change struct {
	Path   string // absolute in the sandbox; octets
	Kind   string
	Before State // zero for created
	After  State // zero for removed
	At     time.Time
	// Replaced says of a folder that it was removed with all in it and made anew; what it held before is not told one by one.
	Replaced bool
	Earlier  bool // it was changed before the step began: by what ran in the background, or a step that was not looked at
}

// Files are the changes of a step.
type Files struct {
	Changes  []Change
	More     int64 // changes beyond those
	Partial  bool  // the walk came to its bounds: there may be others, and removals are not told
	Same     int64 // files that were written with what they held already
	Volatile []string
	Visited  int64
	Hashed   int64 // octets
	Unhashed int64 // files too large, or too many, to hash
	Took     time.Duration
}

// Lower tells what the layers below an upper hold.
type Lower interface {
	// State is that of a path relative to the root, with the content's hash when sum allows; false when there is none.
	State(path string, sum func(size int64) bool) (State, bool)
}

// Budget bounds the names that all trees of a host remember together.
type Budget struct {
	Most int64
	used atomic.Int64
}

func (b *Budget) take(n int64) bool {
	if b == nil {
		return true
	}
	if b.used.Add(n) > b.Most {
		b.used.Add(-n)
		return false
	}
	return true
}

// Tree compares an overlay's upper with what it was. It is for one goroutine at a time.
type Tree struct {
	dir      string
	lower    Lower
	volatile []string // without the leading slash
	outside  []string
	budget   *Budget
	visits   int64 // bound of one walk

	known map[string]*entry
	moved map[string]int64 // newest time seen in a volatile folder
	full  bool             // not all names could be remembered: new and old are told apart by their times
	last  time.Time
}

type entry struct {
	ino, rdev uint64
	ctime     int64
	size      int64
	mode      uint32
	sum       []byte
	link      string
	pass      uint32
}

// NewTree remembers an upper as it is. Volatile are absolute paths whose contents are not looked at, only whether something in them moved.
// Outside are names at the root that never hold a sandbox's own files.
func NewTree(dir string, lower Lower, volatile, outside []string, budget *Budget) *Tree {
	t := &Tree{dir: dir, lower: lower, outside: outside, budget: budget, visits: maxVisits, known: map[string]*entry{}, moved: map[string]int64{}}
	for _, v := range volatile {
		if v = strings.Trim(path.Clean("/"+v), "/"); v != "" {
			t.volatile = append(t.volatile, v)
		}
	}
	w := &walk{t: t, began: time.Now(), first: true}
	w.all(context.Background())
	t.last = w.began
	return t
}

// Close gives back what the tree remembers.
func (t *Tree) Close() {
	if t.budget != nil {
		t.budget.used.Add(-int64(len(t.known)))
	}
	t.known = map[string]*entry{}
}

// Look tells what changed since the last look, or since the tree was made; from is when the step began.
func (t *Tree) Look(ctx context.Context, from time.Time) Files {
	w := &walk{t: t, began: time.Now(), from: from.Add(-clockSlack).UnixNano(), since: t.last.Add(-clockSlack).UnixNano()}
	w.pass = w.nextPass()
	w.all(ctx)
	if !w.files.Partial {
		w.gone()
	}
	w.files.Partial = w.files.Partial || t.full
	t.last = w.began
	sort.Slice(w.files.Changes, func(i, j int) bool { return w.files.Changes[i].Path < w.files.Changes[j].Path })
	w.files.Took = time.Since(w.began)
	return w.files
}

// walk is one pass over an upper.
type walk struct {
	t      *Tree
	began  time.Time
	first  bool // remember, and tell nothing
	from   int64
	since  int64
	pass   uint32
	files  Files
	octets int64 // of the paths told
}

// nextPass differs from that of every entry.
func (w *walk) nextPass() uint32 {
	for _, e := range w.t.known {
		return e.pass + 1
	}
	return 1
}

func (w *walk) all(ctx context.Context) {
	fd, err := unix.Open(w.t.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		w.files.Partial = true
		return
	}
	w.folder(ctx, fd, "", 0)
}

// enough reports that the walk is at its bounds.
func (w *walk) enough(ctx context.Context) bool {
	if w.files.Visited < w.t.visits && (w.files.Visited%256 != 0 || time.Since(w.began) < maxWalk && ctx.Err() == nil) {
		return false
	}
	w.files.Partial = true
	return true
}

// folder looks at all that lies in a folder; it closes fd. Names that come while it reads are the next walk's.
func (w *walk) folder(ctx context.Context, fd int, at string, depth int) {
	f := os.NewFile(uintptr(fd), "upper")
	defer f.Close()
	if depth > maxDepth {
		w.files.Partial = true
		return
	}
	for {
		names, err := f.Readdirnames(1024)
		for _, name := range names {
			if depth == 0 && slices.Contains(w.t.outside, name) {
				continue
			}
			if w.enough(ctx) {
				return
			}
			w.files.Visited++
			w.name(ctx, fd, name, path.Join(at, name), depth)
		}
		if err != nil || len(names) == 0 {
			return
		}
	}
}

func (w *walk) name(ctx context.Context, dir int, name, at string, depth int) {
	var st unix.Stat_t
	if unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return // gone meanwhile
	}
	if slices.Contains(w.t.volatile, at) {
		w.volatile(dir, name, at, &st)
		return
	}
	e := w.t.known[at]
	switch {
	case e == nil:
		w.fresh(dir, name, at, &st)
	case w.moved(e, &st):
		w.changed(dir, name, at, e, &st)
		e.pass = w.pass
	default:
		e.pass = w.pass
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NOATIME, 0)
		if err == nil {
			w.folder(ctx, fd, at, depth+1)
		}
	}
}

// moved reports whether something of a name's own is otherwise. A folder's times tell of what lies in it, which is looked at anyway.
func (w *walk) moved(e *entry, st *unix.Stat_t) bool {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return e.mode != st.Mode
	}
	return e.ino != st.Ino || e.ctime != st.Ctim.Nano() || e.mode != st.Mode || e.size != st.Size || e.rdev != st.Rdev
}

// earlier reports whether the step can't have done it. What came in by the renaming of a folder has times of before the last look.
func (w *walk) earlier(st *unix.Stat_t) bool {
	at := st.Ctim.Nano()
	return at < w.from && at >= w.since
}

func isWhiteout(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 }

// remember keeps a name, if there is room; nil if there is none.
func (w *walk) remember(at string, st *unix.Stat_t) *entry {
	if len(w.t.known) >= maxKnown || !w.t.budget.take(1) {
		w.t.full = true
		return nil
	}
	e := &entry{pass: w.pass}
	e.set(st)
	w.t.known[at] = e
	return e
}

func (e *entry) set(st *unix.Stat_t) {
	e.ino, e.ctime, e.size, e.mode, e.rdev = st.Ino, st.Ctim.Nano(), st.Size, st.Mode, st.Rdev
}

// fresh takes a name that was not known.
func (w *walk) fresh(dir int, name, at string, st *unix.Stat_t) {
	old := w.t.full && st.Ctim.Nano() < w.since // known, if there had been room
	e := w.remember(at, st)
	if w.first || old {
		return
	}
	c := Change{Path: "/" + at, Kind: Created, At: time.Unix(0, st.Ctim.Nano()), Earlier: w.earlier(st)}
	before, was := w.below(at)
	if was {
		c.Kind, c.Before = Changed, before
	}
	if isWhiteout(st) {
		if was {
			c.Kind = Removed
			w.tell(c)
		}
		return
	}
	c.After = w.state(dir, name, st)
	c.Replaced = was && before.Type == "dir" && c.After.Type == "dir" && opaqueAt(dir, name)
	if e != nil {
		e.sum, e.link = c.After.SHA256, c.After.Link
	}
	switch {
	case was && before.same(c.After) && !c.Replaced:
		if c.After.Type == "file" {
			w.files.Same++
		}
	default:
		w.tell(c)
	}
}

// changed takes a known name that is otherwise than it was.
func (w *walk) changed(dir int, name, at string, e *entry, st *unix.Stat_t) {
	c := Change{Path: "/" + at, Kind: Changed, At: time.Unix(0, st.Ctim.Nano()), Earlier: w.earlier(st)}
	wasWhiteout := e.mode&unix.S_IFMT == unix.S_IFCHR && e.rdev == 0
	if wasWhiteout {
		c.Kind = Created
	} else {
		c.Before = e.state()
	}
	e.set(st)
	if isWhiteout(st) {
		e.sum, e.link = nil, ""
		if !wasWhiteout {
			c.Kind = Removed
			w.tell(c)
		}
		return
	}
	c.After = w.state(dir, name, st)
	e.sum, e.link = c.After.SHA256, c.After.Link
	if !wasWhiteout && c.Before.same(c.After) {
		if c.After.Type == "file" {
			w.files.Same++
		}
		return
	}
	w.tell(c)
}

// gone tells of known names that were not met.
func (w *walk) gone() {
	var dead []string
	for at, e := range w.t.known {
		if e.pass != w.pass {
			dead = append(dead, at)
		}
	}
	sort.Strings(dead)
	for _, at := range dead {
		e := w.t.known[at]
		delete(w.t.known, at)
		if w.t.budget != nil {
			w.t.budget.used.Add(-1)
		}
		if e.mode&unix.S_IFMT == unix.S_IFCHR && e.rdev == 0 {
			continue // a whiteout whose folder went
		}
		w.tell(Change{Path: "/" + at, Kind: Removed, Before: e.state()})
	}
}

func (w *walk) tell(c Change) {
	if len(w.files.Changes) >= MaxChanges || w.octets > 64<<10 {
		w.files.More++
		return
	}
	w.octets += int64(len(c.Path) + len(c.Before.Link) + len(c.After.Link))
	w.files.Changes = append(w.files.Changes, c)
}

func (w *walk) below(at string) (State, bool) {
	if w.t.lower == nil || len(w.files.Changes) >= MaxChanges {
		return State{}, false
	}
	return w.t.lower.State(at, w.mayHash)
}

// mayHash takes from what one walk may hash.
func (w *walk) mayHash(size int64) bool {
	if size > maxHashFile || w.files.Hashed+size > maxHash || len(w.files.Changes) >= MaxChanges {
		w.files.Unhashed++
		return false
	}
	w.files.Hashed += size
	return true
}

// state reads what a name is.
func (w *walk) state(dir int, name string, st *unix.Stat_t) State {
	s := stateOf(st)
	switch s.Type {
	case "link":
		s.Link = readLink(dir, name)
	case "file":
		if w.mayHash(st.Size) {
			s.SHA256 = hashAt(dir, name, st.Size)
		}
	}
	return s
}

func (e *entry) state() State {
	s := stateOf(&unix.Stat_t{Mode: e.mode, Size: e.size, Rdev: e.rdev})
	s.SHA256, s.Link = e.sum, e.link
	return s
}

func stateOf(st *unix.Stat_t) State {
	s := State{Mode: st.Mode & 0o7777}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		s.Type, s.Size = "file", st.Size
	case unix.S_IFDIR:
		s.Type = "dir"
	case unix.S_IFLNK:
		s.Type, s.Mode = "link", 0
	case unix.S_IFIFO:
		s.Type = "fifo"
	case unix.S_IFSOCK:
		s.Type = "socket"
	default:
		s.Type = "device"
	}
	return s
}

func readLink(dir int, name string) string {
	b := make([]byte, maxLinks)
	n, err := unix.Readlinkat(dir, name, b)
	if err != nil {
		return ""
	}
	return string(b[:n])
}

// hashAt hashes an ordinary file of at most size octets, beneath what a tenant writes to: nothing is followed or waited for.
func hashAt(dir int, name string, size int64) []byte {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOATIME, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), "file")
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil
	}
	h := sha256.New()
	if n, err := io.Copy(h, io.LimitReader(f, size)); err != nil || n != size {
		return nil
	}
	return h.Sum(nil)
}

// volatile notes that something in a folder that is not looked at has moved, as far as the folder and those right in it tell.
func (w *walk) volatile(dir int, name, at string, st *unix.Stat_t) {
	newest := st.Ctim.Nano()
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NOATIME, 0)
		if err != nil {
			return
		}
		f := os.NewFile(uintptr(fd), "volatile")
		defer f.Close()
		names, _ := f.Readdirnames(1024)
		for _, n := range names {
			var in unix.Stat_t
			if w.files.Visited++; unix.Fstatat(fd, n, &in, unix.AT_SYMLINK_NOFOLLOW) == nil {
				newest = max(newest, in.Ctim.Nano())
			}
		}
	}
	if was := w.t.moved[at]; newest > was {
		w.t.moved[at] = newest
		if !w.first {
			w.files.Volatile = append(w.files.Volatile, "/"+at)
		}
	}
}

// Stack is a Lower of folders, the uppermost first: mounted layers, with an overlay's marks for what is removed.
type Stack []int

var errNone = errors.New("no such path")

// State implements Lower.
func (s Stack) State(at string, sum func(size int64) bool) (State, bool) {
	parts := strings.Split(at, "/")
	if len(parts) > maxDepth {
		return State{}, false
	}
	for _, root := range s {
		st, dir, over, err := find(root, parts)
		if err == nil {
			defer unix.Close(dir)
			name := parts[len(parts)-1]
			v := stateOf(&st)
			switch v.Type {
			case "link":
				v.Link = readLink(dir, name)
			case "file":
				if sum(st.Size) {
					v.SHA256 = hashAt(dir, name, st.Size)
				}
			}
			return v, true
		}
		if over {
			return State{}, false
		}
	}
	return State{}, false
}

// find looks a path up in one layer; over says that no layer below counts. dir, the last name's folder, is the caller's.
func find(root int, parts []string) (st unix.Stat_t, dir int, over bool, err error) {
	const how = unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC | unix.O_NOFOLLOW
	if dir, err = unix.Openat(root, ".", how, 0); err != nil {
		return st, -1, false, err
	}
	for i, name := range parts {
		if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			unix.Close(dir)
			return st, -1, over, errNone
		}
		last := i == len(parts)-1
		if isWhiteout(&st) || !last && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			unix.Close(dir)
			return st, -1, true, errNone
		}
		if last {
			return st, dir, over, nil
		}
		next, err := unix.Openat(dir, name, how, 0)
		unix.Close(dir)
		if err != nil {
			return st, -1, over, err
		}
		dir = next
		over = over || opaque(dir)
	}
	return st, dir, over, errNone
}

func opaque(dir int) bool { return opaqueAt(dir, ".") }

func opaqueAt(dir int, name string) bool {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	var b [4]byte
	n, err := unix.Fgetxattr(fd, "trusted.overlay.opaque", b[:])
	return err == nil && n == 1 && b[0] == 'y'
}
