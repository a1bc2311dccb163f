package trajectory

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Space says what the log uses, in octets.
type Space struct {
	Segments int64 // of segment files, what is allocated ahead included
	Live     int64 // of records in them that are not removed
	Blobs    int64
	Ready    int64 // what ordinary records may take before more must be allocated
	// Short says that what keeps the reserve could not be allocated: make no new trajectories.
	Short bool
}

// Space accounts for the log's disk space.
func (l *Log) Space() Space {
	l.mu.Lock()
	defer l.mu.Unlock()
	sp := Space{Segments: l.segmentBytes(), Blobs: l.blobBytes, Ready: l.capacity() - l.cfg.Reserve}
	if l.active != nil {
		sp.Ready += l.left(l.active)
	}
	sp.Ready = max(0, sp.Ready)
	sp.Short = len(l.spares) < l.spareTarget() && !l.noAlloc.IsZero()
	for _, t := range l.byNum {
		sp.Live += t.bytes
	}
	return sp
}

func (l *Log) segmentBytes() (n int64) {
	for _, s := range l.segs {
		n += s.disk
	}
	return n + int64(len(l.spares))*l.cfg.SegmentBytes
}

// overLimit says whether so much more is over the limit; mu is held.
func (l *Log) overLimit(more int64) error {
	if l.cfg.Limit > 0 && l.segmentBytes()+l.blobBytes+more > l.cfg.Limit {
		return errLimit
	}
	return nil
}

// holdSpace counts octets of blobs, also negative ones.
func (l *Log) holdSpace(n int64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n > 0 {
		if l.err != nil {
			return l.err
		}
		if err := l.overLimit(n); err != nil {
			return err
		}
	}
	l.blobBytes += n
	return nil
}

// maintain does what appends wait for when nobody else does: it seals and allocates.
func (l *Log) maintain(ctx context.Context) error {
	err := l.sealFull()
	if aerr := l.allocate(l.spareTarget()); aerr != nil && !noSpace(aerr) {
		err = errors.Join(err, aerr)
	}
	return err
}

// tidy does what can take its time: it frees what was removed, packs, and talks to the store. One of its acts does not keep others back.
func (l *Log) tidy(ctx context.Context) error {
	return errors.Join(l.collect(ctx), l.packFull(func() bool { return ctx.Err() != nil }), l.store(ctx), l.dropBlobs(ctx))
}

// sealFull seals the full segments that are written, in order.
func (l *Log) sealFull() error {
	l.sealMu.Lock()
	defer l.sealMu.Unlock()
	for {
		l.mu.Lock()
		if l.err != nil || len(l.unsealed) == 0 || l.unsealed[0].last > l.written {
			err := l.err
			l.mu.Unlock()
			return err
		}
		s := l.unsealed[0]
		l.mu.Unlock()
		err := l.seal(s)
		l.mu.Lock()
		if err != nil {
			err = l.fail("seal", err)
			l.mu.Unlock()
			return err
		}
		l.unsealed = l.unsealed[1:]
		l.mu.Unlock()
	}
}

// collect deletes segments without a living record and rewrites those with few.
func (l *Log) collect(ctx context.Context) error {
	l.formMu.Lock()
	defer l.formMu.Unlock()
	for ctx.Err() == nil {
		l.mu.Lock()
		s, act, lsn := l.garbage(), l.deleteSegment, l.written
		if s == nil {
			s, act = l.sparse(), l.rewrite
		}
		l.mu.Unlock()
		if s == nil {
			return nil
		}
		// The removals must be on the disk before what they removed goes.
		if err := l.sync(ctx, lsn); err != nil {
			return err
		}
		if err := act(s); err != nil {
			return fmt.Errorf("collect segment %s: %w", segmentName(s.num), err)
		}
	}
	return ctx.Err()
}

// sealedByAge lists the sealed segments, the oldest first; mu is held.
func (l *Log) sealedByAge() []*segment {
	var all []*segment
	for _, s := range l.segs {
		if s.sealed {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *segment) int { return int(int64(a.num) - int64(b.num)) })
	return all
}

// garbage is the oldest segment that nothing needs; mu is held. A removal is needed as long as a segment holds records of its
// trajectory.
func (l *Log) garbage() *segment {
	for _, s := range l.sealedByAge() {
		if l.live(s) == 0 && !slices.ContainsFunc(s.gone, func(num uint64) bool { return l.needed(s, num) }) {
			return s
		}
	}
	return nil
}

func (l *Log) live(s *segment) (n int64) {
	for num, size := range s.trajs {
		if l.byNum[num] != nil {
			n += size
		}
	}
	return n
}

// needed reports whether a segment other than s holds records of the removed trajectory.
func (l *Log) needed(s *segment, num uint64) bool {
	for _, o := range l.segs {
		if _, ok := o.trajs[num]; ok && o != s {
			return true
		}
	}
	return false
}

// sparse is the oldest segment of which less than a quarter lives; mu is held. Stragglers then cost at most four times their size.
func (l *Log) sparse() *segment {
	for _, s := range l.sealedByAge() {
		if live := l.live(s); !s.skip && !s.far && live > 0 && live < s.off/4 {
			return s
		}
	}
	return nil
}

func (l *Log) deleteSegment(s *segment) error {
	if err := l.unstore(s); err != nil { // first: what is gone here is looked for nowhere
		return err
	}
	if err := l.fs.Remove(segmentName(s.num)); err != nil {
		return err
	}
	l.mu.Lock()
	delete(l.segs, s.num)
	h := s.file.retire()
	l.mu.Unlock()
	if h != nil {
		h.Close()
	}
	return l.fs.SyncDir(".") // before a removal in a later segment goes
}

// rewrite replaces a sealed segment by one with its living records only. Its number stays, and with it the order.
func (l *Log) rewrite(s *segment) error {
	name := fmt.Sprintf("%08x.tmp", s.num)
	f, err := l.fs.Create(name)
	if err != nil {
		return err
	}
	var nonce [4]byte
	rand.Read(nonce[:])
	n := &segment{num: s.num, header: s.header, off: segmentHeaderLen, foot: newFooter(), sealed: true, trajs: map[uint64]int64{}}
	n.header.Num, n.header.Nonce = uint64(s.num), binary.LittleEndian.Uint32(nonce[:])
	moved, err := l.copyLiving(s, n, f)
	if err == nil {
		err = l.fs.Rename(name, segmentName(s.num))
	}
	if err != nil {
		f.Close()
		return errors.Join(err, l.fs.Remove(name))
	}
	l.mu.Lock()
	n.file = &handle{File: f}
	n.foot = nil
	for _, m := range moved {
		if t := l.byNum[m.traj]; t != nil {
			t.recs[m.seq-1] = makeRef(s.num, m.kind, m.off)
		}
	}
	for _, t := range l.byNum {
		t.bytes += n.trajs[t.num] - s.trajs[t.num]
	}
	l.segs[s.num] = n
	h := s.file.retire()
	l.mu.Unlock()
	if h != nil {
		h.Close()
	}
	return l.fs.SyncDir(".")
}

var errDamaged = errors.New("damaged")

// copyLiving writes the new file of a segment, with its footer, and syncs it.
func (l *Log) copyLiving(s, n *segment, f File) (moved []entry, err error) {
	l.mu.Lock()
	living := map[uint64]bool{}
	for num := range s.trajs {
		living[num] = l.byNum[num] != nil
	}
	for _, num := range s.gone {
		if l.needed(s, num) {
			n.gone = append(n.gone, num)
		}
	}
	l.mu.Unlock()
	if _, err := f.WriteAt(n.header.encode(), 0); err != nil {
		return nil, err
	}
	var buf []byte
	flushed := n.off
	flush := func() error {
		if _, err := f.WriteAt(buf, flushed); err != nil {
			return err
		}
		flushed += int64(len(buf))
		buf = buf[:0]
		return nil
	}
	end, _, err := scan(s.file, s.off, s.header.Nonce, func(e *entry, r *Record) error {
		switch {
		case e.kind == kindRoll:
		case e.kind == kindRemove && !slices.Contains(n.gone, e.traj):
			return nil
		case e.kind != kindRemove && !living[e.traj]:
			return nil
		}
		e.off = n.off
		buf = appendRecord(buf, n.header.Nonce, e.traj, r, bodyCRC(r))
		n.foot.add(e)
		n.off += e.size
		if e.kind != kindRoll && e.kind != kindRemove {
			n.trajs[e.traj] += e.size
		}
		if e.kind <= kindLast {
			moved = append(moved, entry{kind: e.kind, traj: e.traj, seq: e.seq, off: e.off})
		}
		if len(buf) > 1<<20 {
			return flush()
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if end != s.off {
		l.mu.Lock()
		s.skip = true
		l.mu.Unlock()
		return nil, fmt.Errorf("record at %d: %w", end, errDamaged)
	}
	buf = append(buf, n.foot.seal(n.off, n.header)...)
	n.size = flushed + int64(len(buf))
	n.disk = n.size
	if err := flush(); err != nil {
		return nil, err
	}
	return moved, f.Sync()
}
