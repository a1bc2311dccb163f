package trajectory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Config of a Log.
type Config struct {
	Dir          string // the log's own folder; unused when FS is set
	SegmentBytes int64  // of one segment file, 64 KiB to 1 GiB, a multiple of 4 KiB
	Reserve      int64  // octets, always allocated, that only records of ends may use
	Limit        int64  // octets of segments and blobs together; 0 is what the disk has
	// Store takes copies of sealed segments, and the log's tail for durability store, under logs/<Host>/. Nil: none of it.
	Store store.Store
	Host  string
	Local int64 // octets of segments beyond which those that are in the store go from here; 0 is when the disk or Limit is full
	FS    FS    // nil is Dir

	// Now is wall time and the time since boot; Boot names the boot. Default's are those of the machine.
	Now  func() (time.Time, time.Duration)
	Boot [16]byte
}

// Default is the configuration of a host's log in dir.
func Default(dir string) Config {
	return Config{Dir: dir, SegmentBytes: 64 << 20, Reserve: 16 << 20, Now: clock(), Boot: bootID()}
}

// Validate checks a configuration; the error wraps ErrInvalid.
func (c *Config) Validate() error {
	switch {
	case c.Dir == "" && c.FS == nil:
		return fmt.Errorf("log dir: must be set: %w", sandbox.ErrInvalid)
	case c.SegmentBytes < 64<<10 || c.SegmentBytes > maxSegment || c.SegmentBytes%4096 != 0:
		return fmt.Errorf("log segment_bytes %d: want 65536 to %d, a multiple of 4096: %w", c.SegmentBytes, maxSegment, sandbox.ErrInvalid)
	case c.Store != nil && store.CheckKey("logs/"+c.Host) != nil:
		return fmt.Errorf("log host %q: a store needs it, as a part of its keys: %w", c.Host, sandbox.ErrInvalid)
	case c.Reserve < 0 || c.Limit < 0 || c.Local < 0:
		return fmt.Errorf("log reserve or limit: must not be negative: %w", sandbox.ErrInvalid)
	case c.Now == nil:
		return fmt.Errorf("log clock: must be set: %w", sandbox.ErrInvalid)
	}
	return nil
}

// clock reads the kernel's monotonic clock once and goes on with Go's, which needs no system call.
func clock() func() (time.Time, time.Duration) {
	var ts unix.Timespec
	start := time.Now()
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		ts = unix.Timespec{}
	}
	base := time.Duration(ts.Nano())
	return func() (time.Time, time.Duration) {
		now := time.Now()
		return now, base + now.Sub(start)
	}
}

func bootID() (id [16]byte) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return id // unknown: monotonic times of two boots can't be told apart
	}
	i := 0
	for _, c := range strings.ToLower(string(b)) {
		v := strings.IndexRune("0123456789abcdef", c)
		if v >= 0 && i < 32 {
			id[i/2] |= byte(v) << (4 * (1 - i%2))
			i++
		}
	}
	return id
}

// Log is the ordered log of a host. Its methods are safe for concurrent use.
type Log struct {
	cfg   Config
	fs    FS
	log   *slog.Logger
	temp  atomic.Uint64
	lock  io.Closer
	work  chan struct{} // wakes Run: to seal and allocate
	later chan struct{} // to do what can take its time

	sealMu  sync.Mutex // who seals segments; appenders may wait for it, so what can take its time has another
	formMu  sync.Mutex // who removes, rewrites, packs or moves sealed segments
	allocMu sync.Mutex // who makes segments
	blobMu  sync.Mutex // who places or removes blobs

	mu        sync.Mutex
	err       error // final
	closed    bool
	byID      map[ID]*traj
	byNum     map[uint64]*traj
	nextTraj  uint64
	loaded    map[uint64]bool     // while opening: the trajectories whose removal was seen
	segs      map[uint32]*segment // all with records, by number
	unsealed  []*segment          // full ones that wait for their seal, in order
	active    *segment            // takes the records; nil until the first
	spares    []*segment          // empty and allocated, in order
	nextSeg   uint32
	noAlloc   time.Time // when the last allocation failed for space
	cache     *blockCache
	blobs     map[[32]byte]*blob
	blobBytes int64

	queue   []*batch // in order, not yet taken by the leader
	queued  int64    // octets in queue
	writing bool     // a leader is at work
	free    [][]byte // buffers for batches
	written uint64   // number of the last batch that is in the page cache
	batches uint64   // number of the last batch
	synced  mark     // on the disk
	shipped mark     // in the store

	tenure // of the host's place in the store
}

// Run seals full segments, allocates ahead and frees what was removed, until ctx ends. Without it the log still works: what can't
// wait is then done by the callers of Append.
func (l *Log) Run(ctx context.Context) error {
	var both sync.WaitGroup
	both.Go(func() { l.repeat(ctx, l.work, l.maintain) })
	both.Go(func() { l.repeat(ctx, l.later, l.tidy) })
	both.Wait()
	return nil
}

// repeat works when it is kicked, and once a minute.
func (l *Log) repeat(ctx context.Context, kicked <-chan struct{}, work func(context.Context) error) {
	tick := time.NewTicker(time.Minute)
	defer tick.Stop()
	for {
		if err := work(ctx); err != nil && ctx.Err() == nil {
			l.log.Error("trajectory log maintenance", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-kicked:
		case <-tick.C:
		}
	}
}

func (l *Log) kick() {
	for _, c := range []chan struct{}{l.work, l.later} {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// Close syncs and seals the log and frees it. No other method may be running; Run must have returned.
func (l *Log) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	failed, lsn := l.err, l.written
	l.mu.Unlock()
	var err error
	if failed == nil {
		err = l.sync(context.Background(), lsn)
	}
	if failed == nil && err == nil {
		err = l.sealFull()
	}
	if failed == nil && err == nil && l.active != nil && l.active.off > segmentHeaderLen {
		err = l.seal(l.active) // opening is then fast, and takes damage for damage rather than for the log's end
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = fmt.Errorf("trajectory log is closed: %w", sandbox.ErrState)
	}
	for _, t := range l.byNum {
		t.notify()
	}
	return errors.Join(err, l.closeFiles())
}

func (l *Log) closeFiles() error {
	var errs []error
	for _, s := range l.segs {
		errs = append(errs, s.file.Close())
	}
	for _, s := range l.spares {
		errs = append(errs, s.file.Close())
	}
	if l.lock != nil {
		errs = append(errs, l.lock.Close())
	}
	return errors.Join(errs...)
}

// fail makes the log refuse all that follows; mu is held.
func (l *Log) fail(act string, err error) error {
	if l.err == nil {
		l.err = fmt.Errorf("trajectory log failed and takes nothing more until it is opened again: %s: %w", act, err)
	}
	return l.err
}

// segment is one file of the log. Fields but num and header are under Log.mu; those of the active one are set by appenders.
type segment struct {
	num    uint32
	header segmentHeader
	file   *handle
	off    int64 // where the next record goes
	size   int64 // of the file, unpacked
	disk   int64 // octets that its file takes here
	wrote  int64 // where the octets end that are in the page cache
	foot   *footer
	sealed bool
	last   uint64           // number of its last batch, once full
	trajs  map[uint64]int64 // octets of each trajectory's records
	bound  map[uint64]uint32
	gone   []uint64 // trajectories removed by a record in this segment
	// skip says that a rewrite failed on a damaged record: it stays as it is.
	skip   bool
	packed bool
	stored bool // the store has this very form of it
	dying  bool // is being deleted
	far    bool // its records lie in the store alone
	// shipped is where the octets end that are in the store as part of the log's tail.
	shipped int64
}

// handle is an open file that is closed when its last reader is gone; refs is under Log.mu.
type handle struct {
	File
	refs int
	dead bool
}

func (l *Log) release(hs ...*handle) {
	var dead []*handle
	l.mu.Lock()
	for _, h := range hs {
		if h.refs--; h.refs == 0 && h.dead {
			dead = append(dead, h)
		}
	}
	l.mu.Unlock()
	for _, h := range dead {
		h.Close()
	}
}

// retire closes the handle now or with its last reader; mu is held. It returns what is to be closed without mu.
func (h *handle) retire() *handle {
	h.dead = true
	if h.refs == 0 {
		return h
	}
	return nil
}

// ref is the place of a record: segment number, kind, and offset in units of 8 octets. Zero is a record that is lost.
type ref uint64

const maxSegment = 8 << 27

func makeRef(seg uint32, k Kind, off int64) ref { return ref(seg)<<32 | ref(k)<<27 | ref(off/8) }

func (r ref) seg() uint32 { return uint32(r >> 32) }
func (r ref) kind() Kind  { return Kind(r >> 27 & 31) }
func (r ref) off() int64  { return int64(r&(1<<27-1)) * 8 }

// traj is the index of one trajectory.
type traj struct {
	num     uint64
	id      ID
	epoch   uint32
	next    uint64 // seq of the next record to append; recs may lag behind by what is being written
	recs    []ref  // recs[i] is seq i+1
	bytes   int64
	streams map[streamKey]*stream
	blobs   [][32]byte
	wake    chan struct{} // closed when recs grows or the trajectory is removed
	removed bool
}

type streamKey struct {
	step   string
	stream sandbox.StreamName
}

// stream is the index of a command's output stream: 16 octets a chunk.
type stream struct {
	next   int64 // where the next append may begin
	end    int64 // of what readers see
	kept   int64
	chunks []chunk
}

type chunk struct {
	off int64
	seq uint32
	n   uint32
}

func (t *traj) notify() {
	if t.wake != nil {
		close(t.wake)
		t.wake = nil
	}
}

func (t *traj) stream(step string, s sandbox.StreamName) *stream {
	k := streamKey{step, s}
	st := t.streams[k]
	if st == nil {
		st = &stream{}
		if t.streams == nil {
			t.streams = map[streamKey]*stream{}
		}
		t.streams[k] = st
	}
	return st
}

// index takes a written record into the index; mu is held (or the log not yet shared).
func (l *Log) index(s *segment, e *entry) error {
	switch e.kind {
	case kindRoll:
		return nil
	case kindRemove:
		s.gone = append(s.gone, e.traj)
		l.nextTraj = max(l.nextTraj, e.traj+1)
		if l.loaded != nil {
			l.loaded[e.traj] = true
		}
		if t := l.byNum[e.traj]; t != nil {
			l.forget(t)
		}
		return nil
	case kindBind:
		s.trajs[e.traj] += e.size
		t := l.byNum[e.traj]
		if t == nil {
			if l.loaded == nil || l.loaded[e.traj] {
				return nil
			}
			if old := l.byID[e.id]; old != nil { // its removal is lost
				l.forget(old)
			}
			t = &traj{num: e.traj, id: e.id, next: 1}
			l.byNum[t.num], l.byID[t.id] = t, t
			l.nextTraj = max(l.nextTraj, e.traj+1)
		}
		t.epoch = max(t.epoch, e.epoch)
		t.bytes += e.size
		return nil
	}
	s.trajs[e.traj] += e.size
	t := l.byNum[e.traj]
	if t == nil {
		return nil
	}
	if e.seq <= uint64(len(t.recs)) || e.seq-uint64(len(t.recs)) > 1<<26 || e.seq >= 1<<32 {
		return fmt.Errorf("trajectory %v: record %d follows %d: %w", t.id, e.seq, len(t.recs), errFormat)
	}
	for uint64(len(t.recs)) < e.seq-1 {
		t.recs = append(t.recs, 0) // a segment is lost; its records read as ErrLost
	}
	t.recs = append(t.recs, makeRef(s.num, e.kind, e.off))
	t.next = max(t.next, e.seq+1)
	t.bytes += e.size
	if e.kind == KindOutput {
		st := t.stream(e.step, e.stream)
		if e.out < st.end {
			return fmt.Errorf("trajectory %v: output of %q at %d overlaps %d: %w", t.id, e.step, e.out, st.end, errFormat)
		}
		st.chunks = append(st.chunks, chunk{off: e.out, seq: uint32(e.seq), n: uint32(e.n)})
		st.end = e.out + e.n
		st.next = max(st.next, st.end)
		st.kept += e.n
	}
	if e.blob != nil {
		t.blobs = append(t.blobs, e.blob.SHA256)
		if e.blob.pin == nil { // else the pin becomes the record's reference
			b := l.blobs[e.blob.SHA256]
			if b == nil {
				b = &blob{sha: e.blob.SHA256, size: e.blob.Size}
				l.blobs[b.sha] = b
			}
			b.refs++
		}
	}
	t.notify()
	return nil
}

// forget drops a removed trajectory from the index; mu is held.
func (l *Log) forget(t *traj) {
	t.removed = true
	delete(l.byNum, t.num)
	if l.byID[t.id] == t {
		delete(l.byID, t.id)
	}
	for _, sha := range t.blobs {
		l.blobs[sha].refs--
	}
	t.blobs, t.recs, t.streams = nil, nil, nil
	t.notify()
}

// Info describes a trajectory.
type Info struct {
	ID      ID
	LastSeq uint64
	Epoch   uint32
	Bytes   int64 // in the log, without blobs
}

func (t *traj) info() Info {
	return Info{ID: t.id, LastSeq: uint64(len(t.recs)), Epoch: t.epoch, Bytes: t.bytes}
}

// Trajectories lists all, ordered by ID.
func (l *Log) Trajectories() []Info {
	l.mu.Lock()
	all := make([]Info, 0, len(l.byID))
	for _, t := range l.byID {
		if len(t.recs) > 0 {
			all = append(all, t.info())
		}
	}
	l.mu.Unlock()
	slices.SortFunc(all, func(a, b Info) int { return a.ID.compare(b.ID) })
	return all
}

// Stat describes one trajectory. ErrNotFound: there is none.
func (l *Log) Stat(id ID) (Info, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, err := l.find(id)
	if err != nil {
		return Info{}, err
	}
	return t.info(), nil
}

func (l *Log) find(id ID) (*traj, error) {
	if t := l.byID[id]; t != nil && len(t.recs) > 0 {
		return t, nil
	}
	return nil, fmt.Errorf("trajectory %v: %w", id, sandbox.ErrNotFound)
}
