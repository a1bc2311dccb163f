package trajectory

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func segmentName(num uint32) string { return fmt.Sprintf("%08x.log", num) }

// Open opens the log, or makes it. It cuts the tail that a crash tore, seals what was left unsealed and builds the index. It starts
// nothing. Where the disk is full, the log opens and takes records as far as its reserve goes. Call Close at the end.
func Open(cfg Config, log *slog.Logger) (_ *Log, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("open trajectory log: %w", err)
	}
	l := &Log{tenure: tenure{gather: shipEvery, epochMu: newSemaphore()}, cfg: cfg, fs: cfg.FS, log: log, work: make(chan struct{}, 1), later: make(chan struct{}, 1), byID: map[ID]*traj{}, byNum: map[uint64]*traj{},
		segs: map[uint32]*segment{}, cache: newBlockCache(), blobs: map[[32]byte]*blob{}, nextTraj: 1, nextSeg: 1, loaded: map[uint64]bool{}}
	if l.fs == nil {
		if l.fs, err = DirFS(cfg.Dir); err != nil {
			return nil, fmt.Errorf("open trajectory log: %w", err)
		}
	}
	defer func() {
		if err != nil {
			l.closeFiles()
			err = fmt.Errorf("open trajectory log: %w", err)
		}
	}()
	if l.lock, err = l.fs.Lock("LOCK"); err != nil {
		return nil, err
	}
	if err := l.claim(); err != nil {
		return nil, err
	}
	if err := l.load(); err != nil {
		return nil, err
	}
	l.loaded = nil
	l.oldest = l.nextSeg
	if err := l.sweepBlobs(); err != nil {
		return nil, err
	}
	if err := l.allocate(l.spareTarget()); err != nil && !noSpace(err) {
		return nil, err
	}
	l.kick()
	return l, nil
}

// load reads the segments in order.
func (l *Log) load() error {
	names, err := l.fs.List(".")
	if err != nil {
		return err
	}
	var nums []uint32
	for _, n := range names {
		base, ok := strings.CutSuffix(n, ".log")
		if strings.HasSuffix(n, ".tmp") {
			if err := l.fs.Remove(n); err != nil {
				return err
			}
		}
		if v, err := strconv.ParseUint(base, 16, 32); ok && err == nil && segmentName(uint32(v)) == n {
			nums = append(nums, uint32(v))
		}
	}
	slices.Sort(nums)
	// What an earlier process did last may not be on the disk yet: names, and the seal of the segment before ours. Were that lost
	// later, the log would seem to end there.
	if err := l.fs.SyncDir("."); err != nil {
		return err
	}
	torn := false
	for _, num := range nums {
		l.nextSeg = max(l.nextSeg, num+1)
		if err := l.loadSegment(num, &torn, false); err != nil {
			return fmt.Errorf("segment %s: %w", segmentName(num), err)
		}
	}
	if all := l.sealedByAge(); len(all) > 0 {
		if err := all[len(all)-1].file.Sync(); err != nil {
			return err
		}
	}
	for _, t := range l.byNum {
		if len(t.recs) == 0 {
			l.forget(t) // the crash left its bind and took its first record
		}
	}
	return nil
}

// loadSegment loads one segment. torn is set from the first one whose end says nothing of a next: later ones that are not sealed
// hold nothing that was ever synced. again is set for one that was fetched from the store since it was damaged.
func (l *Log) loadSegment(num uint32, torn *bool, again bool) error {
	f, err := l.fs.Open(segmentName(num))
	if err != nil {
		return err
	}
	keep := false
	defer func() {
		if !keep {
			f.Close()
		}
	}()
	size, err := f.Size()
	if err != nil {
		return err
	}
	s := &segment{num: num, disk: size, trajs: map[uint64]int64{}}
	if isPacked(f) {
		p, err := openPacked(f, size, l.cache, l.remote(num))
		if errors.Is(err, errFormat) && !again && l.refetch(num) {
			return l.loadSegment(num, torn, true)
		}
		if errors.Is(err, errFormat) {
			l.log.Error("trajectory log: a packed segment is damaged and its records are lost; its file is left as it is", "segment", num, "err", err)
			return nil
		}
		if err != nil {
			return err
		}
		f, size, s.packed, s.far = p, p.head.Size, true, p.head.Far > 0
		s.stored = s.far
	}
	s.file, s.size = &handle{File: f}, size
	head := make([]byte, segmentHeaderLen)
	if size >= segmentHeaderLen && !s.far { // of a far one the trailer says what is needed
		if _, err := f.ReadAt(head, 0); err != nil && !(s.packed && errors.Is(err, errTorn)) {
			return err
		}
	}
	var headErr error
	s.header, headErr = decodeSegmentHeader(head)
	foot, end, err := readFooter(f, size, &s.header)
	if err != nil && !(s.packed && errors.Is(err, errTorn)) {
		return err
	}
	if (foot == nil && s.packed || headErr != nil && !s.far) && !again && l.refetch(num) {
		return l.loadSegment(num, torn, true)
	}
	if foot == nil && s.packed {
		return l.loadPacked(s, f, &keep)
	}
	if foot != nil {
		if *torn {
			l.log.Error("trajectory log: a sealed segment follows a torn one", "segment", num)
		}
		s.sealed, s.off = true, end
		if err := decodeFooter(foot, end, func(e *entry) error { return l.loadEntry(s, e) }); err != nil {
			return err
		}
		l.segs[num] = s
		keep = true
		return nil
	}
	if headErr != nil || *torn {
		*torn = true
		if headErr == nil && size == l.cfg.SegmentBytes {
			// A spare has no records; what it may have is of the future that the crash cut off.
			keep = true
			return l.reuse(s)
		}
		return l.drop(s, "not complete")
	}
	s.foot = newFooter()
	end, rolled, err := scan(f, size, s.header.Nonce, func(e *entry, r *Record) error {
		s.foot.add(e)
		return l.loadEntry(s, e)
	})
	if err != nil {
		return err
	}
	s.off, *torn = end, !rolled
	if err := l.stranded(s, end, size); err != nil {
		return err
	}
	if end == segmentHeaderLen {
		if size != l.cfg.SegmentBytes {
			return l.drop(s, "empty")
		}
		keep = true
		return l.reuse(s)
	}
	l.segs[num] = s
	keep = true
	return l.seal(s)
}

// refetch replaces a damaged segment by the store's copy of it, where there is one that is whole.
func (l *Log) refetch(num uint32) bool {
	if l.cfg.Store == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeWait)
	defer cancel()
	look, stop := context.WithTimeout(ctx, 10*time.Second) // a store that is away must not keep the log from opening
	_, err := l.cfg.Store.Stat(look, l.key(num))
	stop()
	if errors.Is(err, sandbox.ErrNotFound) {
		return false
	}
	name := segmentName(num)
	temp := name + ".tmp"
	if err == nil {
		err = fetchObject(ctx, l.cfg.Store, l.key(num), temp, l.fs)
	}
	if err == nil {
		err = l.checkPacked(temp)
	}
	if err == nil {
		if err = l.fs.Rename(name, name+".damaged"); err == nil {
			if err = l.fs.Rename(temp, name); err == nil {
				err = l.fs.SyncDir(".")
			}
		}
	}
	if err != nil {
		l.log.Error("trajectory log: a segment is damaged, and its copy in the store can't be had", "segment", num, "err", err)
		if rerr := l.fs.Remove(temp); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			l.log.Error("trajectory log: remove what was fetched", "segment", num, "err", rerr)
		}
		return false
	}
	l.log.Warn("trajectory log: a segment was damaged and its copy was fetched from the store", "segment", num, "aside", name+".damaged")
	return true
}

// checkPacked reads header, index and footer of a packed segment.
func (l *Log) checkPacked(name string) error {
	f, err := l.fs.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Size()
	if err != nil {
		return err
	}
	if !isPacked(f) {
		return fmt.Errorf("not a packed segment: %w", errFormat)
	}
	p, err := openPacked(f, size, l.cache, nil)
	if err != nil {
		return err
	}
	defer l.cache.drop(p)
	foot, _, err := readFooter(p, p.head.Size, &segmentHeader{Nonce: p.head.Nonce})
	if err == nil && foot == nil {
		err = fmt.Errorf("no footer: %w", errFormat)
	}
	return err
}

// loadPacked loads a packed segment whose footer is damaged, by its records. It stays as it is.
func (l *Log) loadPacked(s *segment, f File, keep *bool) error {
	l.log.Error("trajectory log: the index of a packed segment is damaged; its records are read instead", "segment", s.num)
	s.header.Nonce = f.(*packed).head.Nonce
	end, _, err := scan(f, s.size, s.header.Nonce, func(e *entry, r *Record) error { return l.loadEntry(s, e) })
	if err != nil && !errors.Is(err, errTorn) {
		return err
	}
	s.off, s.sealed, s.skip = end, true, true
	l.segs[s.num] = s
	*keep = true
	return nil
}

// strandedWithin is how far behind the end of an unsealed segment a record is looked for, in octets.
const strandedWithin = 4 << 20

// stranded tells when a record lies behind what was taken for the end. After a power loss that is how unsynced writes may come to lie;
// within one boot nothing tears a file so, hence a record was damaged and what is behind it would be lost in silence: it is kept aside.
func (l *Log) stranded(s *segment, end, size int64) error {
	if end >= size {
		return nil
	}
	b := make([]byte, min(size-end, strandedWithin))
	if _, err := s.file.ReadAt(b, end); err != nil {
		return err
	}
	at := int64(-1)
	for off := 8; off+headerLen <= len(b); off += 8 {
		n, err := checkHeader(b[off:off+headerLen], s.header.Nonce)
		if err != nil || off+headerLen+n > len(b) {
			continue
		}
		if _, _, err := decodeRecord(b[off:off+headerLen], b[off+headerLen:off+headerLen+n], s.header.Nonce); err == nil {
			at = end + int64(off)
			break
		}
	}
	switch {
	case at < 0:
		return nil
	case s.header.Boot != l.cfg.Boot:
		l.log.Warn("trajectory log: records behind a torn one, as a power loss leaves them, are dropped", "segment", s.num, "end", end, "next", at)
		return nil
	}
	name := segmentName(s.num) + ".damaged"
	err := l.setAside(s, name, size)
	l.log.Error("trajectory log: a record is damaged and all behind it is lost; the segment was copied", "segment", s.num, "end", end, "next", at, "copy", name, "err", err)
	return nil
}

// setAside copies a segment.
func (l *Log) setAside(s *segment, name string, size int64) error {
	f, err := l.fs.Create(name)
	if err != nil {
		return err
	}
	b := make([]byte, 1<<20)
	for off := int64(0); off < size && err == nil; off += int64(len(b)) {
		b = b[:min(int64(len(b)), size-off)]
		if _, err = s.file.ReadAt(b, off); err == nil {
			_, err = f.WriteAt(b, off)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// loadEntry indexes a record; what contradicts the index is told and left out.
func (l *Log) loadEntry(s *segment, e *entry) error {
	err := l.index(s, e)
	if errors.Is(err, errFormat) {
		l.log.Error("trajectory log: record left out", "segment", s.num, "offset", e.off, "err", err)
		return nil
	}
	return err
}

// readFooter returns the footer of a sealed segment and where its records end, or nil.
func readFooter(f File, size int64, h *segmentHeader) (foot []byte, end int64, err error) {
	if size < segmentHeaderLen+trailerLen {
		return nil, 0, nil
	}
	b := make([]byte, trailerLen)
	if _, err := f.ReadAt(b, size-trailerLen); err != nil {
		return nil, 0, err
	}
	t, err := decodeTrailer(b)
	if err != nil || t.off+t.len+trailerLen != size {
		return nil, 0, nil
	}
	foot = make([]byte, t.len)
	if _, err := f.ReadAt(foot, t.off); err != nil {
		return nil, 0, err
	}
	if crc32.Checksum(foot, castagnoli) != t.crc {
		return nil, 0, nil
	}
	h.Nonce = t.nonce
	return foot, t.off, nil
}

// drop removes a segment that holds nothing.
func (l *Log) drop(s *segment, why string) error {
	l.log.Warn("trajectory log: segment dropped", "segment", s.num, "why", why)
	if err := l.fs.Remove(segmentName(s.num)); err != nil {
		return err
	}
	return l.fs.SyncDir(".")
}

// reuse makes an allocated segment a spare of this Log. Its new nonce makes everything in it invalid.
func (l *Log) reuse(s *segment) error {
	l.spares = append(l.spares, s)
	return l.prepare(s)
}

// prepare gives an allocated file the header of an empty segment, on the disk.
func (l *Log) prepare(s *segment) error {
	wall, _ := l.cfg.Now()
	var nonce [4]byte
	rand.Read(nonce[:])
	s.header = segmentHeader{Num: uint64(s.num), Created: wall.UnixNano(), Boot: l.cfg.Boot, Nonce: binary.LittleEndian.Uint32(nonce[:])}
	s.off, s.size, s.disk = segmentHeaderLen, l.cfg.SegmentBytes, l.cfg.SegmentBytes
	s.wrote, s.shipped = segmentHeaderLen, 0
	s.foot, s.trajs, s.bound = newFooter(), map[uint64]int64{}, map[uint64]uint32{}
	if _, err := s.file.WriteAt(s.header.encode(), 0); err != nil {
		return err
	}
	return s.file.Sync()
}

// spareTarget is the number of empty segments that hold the reserve, one at least.
func (l *Log) spareTarget() int {
	return int(max(1, (l.cfg.Reserve+l.capacityOf()-1)/l.capacityOf()))
}

// allocate makes empty segments until there are so many.
func (l *Log) allocate(target int) error {
	l.allocMu.Lock()
	defer l.allocMu.Unlock()
	for {
		l.mu.Lock()
		num, enough := l.nextSeg, len(l.spares) >= target
		err := l.overLimit(l.cfg.SegmentBytes)
		if !enough && err != nil {
			l.noAlloc = time.Now()
		}
		l.mu.Unlock()
		if enough || err != nil {
			return err
		}
		s := &segment{num: num}
		if err := l.create(s); err != nil {
			if noSpace(err) {
				l.mu.Lock()
				l.noAlloc = time.Now()
				l.mu.Unlock()
			}
			return fmt.Errorf("allocate log segment: %w", err)
		}
		l.mu.Lock()
		l.spares = append(l.spares, s)
		l.nextSeg++
		l.noAlloc = time.Time{}
		l.mu.Unlock()
	}
}

// create makes the file of an empty segment; it leaves nothing behind when it fails.
func (l *Log) create(s *segment) error {
	f, err := l.fs.Create(segmentName(s.num))
	if err != nil {
		return err
	}
	s.file = &handle{File: f}
	err = f.Allocate(l.cfg.SegmentBytes)
	if err == nil {
		err = l.prepare(s)
	}
	if err == nil {
		err = l.fs.SyncDir(".")
	}
	if err != nil {
		f.Close()
		return errors.Join(err, l.fs.Remove(segmentName(s.num)))
	}
	return nil
}

// seal puts the index of a full segment behind its records and cuts the rest off.
func (l *Log) seal(s *segment) error {
	if err := s.file.Sync(); err != nil {
		return err
	}
	b := s.foot.seal(s.off, s.header)
	if _, err := s.file.WriteAt(b, s.off); err != nil {
		return err
	}
	if err := s.file.Truncate(s.off + int64(len(b))); err != nil {
		return err
	}
	if err := s.file.Sync(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s.size, s.sealed = s.off+int64(len(b)), true
	s.disk = s.size
	s.foot, s.bound = nil, nil
	return nil
}

var errLimit = fmt.Errorf("log limit is reached: %w: %w", unix.ENOSPC, sandbox.ErrExhausted)
