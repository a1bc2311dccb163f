package trajectory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Append adds records to a trajectory, in order and next to each other, and returns the seq of the first when they are as durable
// as asked: written (process), on the disk (host), or also in the store (store). The first record of a trajectory is a KindCreate; ErrExists refuses a second,
// ErrNotFound any other record without one. Output must not begin below the end of its stream, nor an epoch below the last: else
// ErrState. ErrExhausted: only the reserve is left, which is kept for records of ends; nothing was appended.
//
// ctx bounds the wait for the disk. After its end, and after any error of durability host, the records may or may not be in the log
// and readers may see them; a crash may still take part of them, from the last on.
func (l *Log) Append(ctx context.Context, id ID, recs []Record, d sandbox.Durability) (first uint64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if d == sandbox.DurabilityStore && l.cfg.Store == nil {
		return 0, fmt.Errorf("append to %v: durability store: this log has no store: %w", id, sandbox.ErrUnsupported)
	}
	if off {
		return l.temp.Add(uint64(len(recs))), nil
	}
	if len(recs) == 0 {
		return 0, fmt.Errorf("append to %v: no records: %w", id, sandbox.ErrInvalid)
	}
	var crcs [4]uint32
	p := placing{id: id, recs: recs, crcs: crcs[:0], spare: true}
	for i := range recs {
		if err := recs[i].check(); err != nil {
			return 0, fmt.Errorf("append to %v: %w", id, err)
		}
		p.crcs = append(p.crcs, bodyCRC(&recs[i]))
		if !recs[i].final() {
			p.spare = false
		}
	}
	lsn, first, err := l.write(&p)
	if err != nil {
		return 0, fmt.Errorf("append to %v: %w", id, err)
	}
	switch d {
	case sandbox.DurabilityProcess:
		return first, nil
	case sandbox.DurabilityStore:
		err = l.ship(ctx, lsn)
	default:
		err = l.sync(ctx, lsn)
	}
	if err != nil {
		return 0, fmt.Errorf("append to %v: %w", id, err)
	}
	return first, nil
}

// Sync returns when everything that was appended before is on the disk.
func (l *Log) Sync(ctx context.Context) error {
	l.mu.Lock()
	lsn := l.written
	l.mu.Unlock()
	return l.sync(ctx, lsn)
}

// Ship returns when everything that was appended before is on the disk and in the store.
func (l *Log) Ship(ctx context.Context) error {
	if l.cfg.Store == nil {
		return fmt.Errorf("ship the log: it has no store: %w", sandbox.ErrUnsupported)
	}
	l.mu.Lock()
	lsn := l.written
	l.mu.Unlock()
	return l.ship(ctx, lsn)
}

// Remove removes trajectories with all their records: expiry by whole job is the caller's. It returns when that is on the disk; the
// space comes back by and by. Unknown ones are skipped.
func (l *Log) Remove(ctx context.Context, ids ...ID) error {
	var nums []uint64
	l.mu.Lock()
	for _, id := range ids {
		if t := l.byID[id]; t != nil {
			nums = append(nums, t.num)
		}
	}
	l.mu.Unlock()
	var lsn uint64
	for some := range slices.Chunk(nums, 256) {
		var err error
		if lsn, _, err = l.write(&placing{remove: some, spare: true}); err != nil {
			return fmt.Errorf("remove trajectories: %w", err)
		}
	}
	if len(nums) == 0 {
		return nil
	}
	if err := l.sync(ctx, lsn); err != nil {
		return fmt.Errorf("remove trajectories: %w", err)
	}
	l.kick()
	return nil
}

// placing is one call's records on their way into batches.
type placing struct {
	id     ID
	recs   []Record
	crcs   []uint32
	remove []uint64 // numbers; instead of recs
	spare  bool     // may use the reserve
	keep   bool     // times stay as they are
}

// maxUnsealed bounds the full segments that wait for their seal: what is not synced, and footers in memory.
const maxUnsealed = 4

// maxTries is how often an append makes room that others then take before it.
const maxTries = 100

// maxQueued bounds what waits for the leader, in octets; callers beyond wait.
const maxQueued = 32 << 20

// write places the records, waits until they are written and returns the number of their last batch.
func (l *Log) write(p *placing) (lsn, first uint64, err error) {
	l.mu.Lock()
	if len(l.unsealed) > maxUnsealed { // Run is behind, or does not run
		l.mu.Unlock()
		if err := l.sealFull(); err != nil {
			return 0, 0, err
		}
		l.mu.Lock()
	}
	for tries, full := 0, false; ; {
		if l.err != nil {
			l.mu.Unlock()
			return 0, 0, l.err
		}
		if l.queued > maxQueued {
			done := l.queue[len(l.queue)-1].done
			l.mu.Unlock()
			<-done
			l.mu.Lock()
			continue
		}
		if err := l.admit(p); err != nil {
			l.mu.Unlock()
			return 0, 0, err
		}
		if err := l.room(p); err == nil {
			break
		} else if tries++; full || tries > maxTries || !errors.Is(err, sandbox.ErrExhausted) || l.recentlyFull() {
			l.mu.Unlock()
			return 0, 0, err
		}
		l.mu.Unlock()
		err := l.allocate(l.spareTarget() + 1)
		if full = noSpace(err); err != nil && !full {
			return 0, 0, err
		}
		if full {
			l.kick() // what the store has may go from here
		}
		l.mu.Lock()
	}
	first = l.place(p)
	b := l.queue[len(l.queue)-1]
	err = l.lead(b) // unlocks
	return b.num, first, err
}

// admit checks the records against the trajectory; mu is held.
func (l *Log) admit(p *placing) error {
	if p.remove != nil {
		return nil
	}
	t := l.byID[p.id]
	epoch := uint32(0)
	if t != nil {
		epoch = t.epoch
	}
	var ends map[streamKey]int64 // of streams that this call goes on with
	for i := range p.recs {
		r := &p.recs[i]
		switch {
		case t == nil && i == 0 && r.Kind != KindCreate:
			return fmt.Errorf("no such trajectory, and %v does not create one: %w", r.Kind, sandbox.ErrNotFound)
		case r.Kind == KindCreate && (t != nil || i > 0):
			return fmt.Errorf("create: %w", sandbox.ErrExists)
		case r.Epoch < epoch:
			return fmt.Errorf("epoch %d is over, %d has begun: %w", r.Epoch, epoch, sandbox.ErrState)
		}
		epoch = r.Epoch
		if in := r.Input; in != nil && in.pin != nil && (!in.pin.held || in.pin.l != l) {
			return fmt.Errorf("input of %s was appended or released before: %w", r.Step, sandbox.ErrInvalid)
		}
		if r.Kind != KindOutput {
			continue
		}
		k := streamKey{r.Step, r.Stream}
		end, ok := ends[k]
		if !ok && t != nil && t.streams[k] != nil {
			end = t.streams[k].next
		}
		if r.Offset < end {
			return fmt.Errorf("output of %s at %d, its stream is at %d: %w", r.Step, r.Offset, end, sandbox.ErrState)
		}
		if len(p.recs) > 1 {
			if ends == nil {
				ends = map[streamKey]int64{}
			}
			ends[k] = r.Offset + int64(len(r.Payload))
		}
	}
	if t != nil && t.next+uint64(len(p.recs)) >= 1<<32 {
		return fmt.Errorf("trajectory has 2^32 records: %w", sandbox.ErrExhausted)
	}
	return nil
}

// cost bounds what a record takes in a segment and its footer.
func (p *placing) cost(i int) int64 {
	if p.remove != nil {
		return recordLen(0) + 24
	}
	r := &p.recs[i]
	return recordLen(bodyLen(r)) + bindLen(p.id) + entryMax(p.id, r)
}

func (p *placing) count() int { return len(p.recs) + len(p.remove) }

// room checks that the records fit into what is allocated and, unless they may use it, leave the reserve; mu is held.
// place comes to no worse result, since it sees the true costs.
func (l *Log) room(p *placing) error {
	left, total := int64(0), l.capacity()
	if l.active != nil {
		left = l.left(l.active)
	}
	total += left
	spare := 0
	sum := int64(0)
	for i := range p.count() {
		c := p.cost(i)
		if sum += c; sum > l.capacityOf() {
			return fmt.Errorf("records of %d octets: a segment holds %d: %w", sum, l.capacityOf(), sandbox.ErrInvalid)
		}
		if c > left {
			if spare == len(l.spares) {
				return fmt.Errorf("log space is used up: %w", sandbox.ErrExhausted)
			}
			total -= left
			left = l.capacityOf()
			spare++
		}
		left -= c
		total -= c
	}
	if !p.spare && total < l.cfg.Reserve {
		return fmt.Errorf("log space is used up, the rest is kept for records of ends: %w", sandbox.ErrExhausted)
	}
	return nil
}

// left is what a segment can still take beside its roll, its footer so far and the trailer.
func (l *Log) left(s *segment) int64 {
	return max(0, l.cfg.SegmentBytes-s.off-rollLen-16-int64(len(s.foot.buf))-trailerLen)
}

// capacityOf is what an empty segment can take, capacity what all spares can.
func (l *Log) capacityOf() int64 {
	return l.cfg.SegmentBytes - segmentHeaderLen - rollLen - 16 - int64(len(footerMagic)) - trailerLen
}
func (l *Log) capacity() int64 { return int64(len(l.spares)) * l.capacityOf() }

// batch is a run of octets of one segment that is written at once.
type batch struct {
	num     uint64
	seg     *segment
	off     int64
	buf     []byte
	entries []entry
	done    chan struct{} // closed when written, or failed
	turn    chan struct{} // gets the lead: one token
	err     error
}

// place encodes the records behind those that are queued; mu is held and room has agreed. The last batch of the queue is then one
// that this call waits for: of every batch, or a later one, somebody does.
func (l *Log) place(p *placing) (first uint64) {
	wall, mono := l.cfg.Now()
	if p.remove != nil {
		for i, num := range p.remove {
			b := l.batchFor(p.cost(i))
			l.put(b, num, &Record{Kind: kindRemove, Wall: wall, Mono: mono}, 0, &entry{kind: kindRemove, traj: num})
			if t := l.byNum[num]; t != nil && l.byID[t.id] == t {
				delete(l.byID, t.id) // nothing may follow the removal
			}
		}
		return 0
	}
	t := l.byID[p.id]
	if t == nil {
		t = &traj{num: l.nextTraj, id: p.id, next: 1}
		l.nextTraj++
		l.byID[t.id], l.byNum[t.num] = t, t
	}
	first = t.next
	for i := range p.recs {
		r := p.recs[i]
		if r.Seq = t.next; !p.keep {
			r.Wall, r.Mono = wall, mono
		}
		b := l.batchFor(p.cost(i))
		t.epoch = r.Epoch
		if epoch, ok := b.seg.bound[t.num]; !ok || epoch != r.Epoch {
			bind := bindRecord(t.id, r.Epoch, t.next)
			bind.Wall, bind.Mono = wall, mono
			l.put(b, t.num, &bind, bodyCRC(&bind), &entry{kind: kindBind, traj: t.num, seq: t.next, epoch: r.Epoch, id: t.id})
			b.seg.bound[t.num] = r.Epoch
		}
		e := entry{kind: r.Kind, traj: t.num, seq: r.Seq}
		if r.Kind == KindOutput {
			e.stream, e.out, e.n, e.step = r.Stream, r.Offset, int64(len(r.Payload)), r.Step
			t.stream(r.Step, r.Stream).next = r.Offset + e.n
		}
		if in := r.Input; in != nil && in.Kept == KeptBlob {
			e.blob = in
			in.pin.held = false
		}
		l.put(b, t.num, &r, p.crcs[i], &e)
		t.next++
	}
	return first
}

// batchFor returns the batch for a record of that cost, in the next segment if the active one is full.
func (l *Log) batchFor(cost int64) *batch {
	if l.active == nil || cost > l.left(l.active) {
		if l.active != nil {
			wall, mono := l.cfg.Now()
			l.put(l.batch(), 0, &Record{Kind: kindRoll, Wall: wall, Mono: mono}, 0, &entry{kind: kindRoll})
			l.active.last = l.batches
			l.unsealed = append(l.unsealed, l.active)
		}
		l.active = l.spares[0]
		l.spares = l.spares[1:]
		l.segs[l.active.num] = l.active
		l.kick()
	}
	return l.batch()
}

// batch is the open batch of the active segment.
func (l *Log) batch() *batch {
	if n := len(l.queue); n > 0 && l.queue[n-1].seg == l.active {
		return l.queue[n-1]
	}
	l.batches++
	b := &batch{num: l.batches, seg: l.active, off: l.active.off, done: make(chan struct{}), turn: make(chan struct{}, 1)}
	if n := len(l.free); n > 0 {
		b.buf, l.free = l.free[n-1], l.free[:n-1]
	}
	l.queue = append(l.queue, b)
	return b
}

func (l *Log) put(b *batch, num uint64, r *Record, crc uint32, e *entry) {
	e.off = b.seg.off
	n := len(b.buf)
	b.buf = appendRecord(b.buf, b.seg.header.Nonce, num, r, crc)
	e.size = int64(len(b.buf) - n)
	b.seg.off += e.size
	b.seg.foot.add(e)
	b.entries = append(b.entries, *e)
	l.queued += e.size
}

// lead waits until the batch, the queue's last, is written: by whoever leads, or by itself. mu is held, and released.
func (l *Log) lead(b *batch) error {
	if l.writing {
		l.mu.Unlock()
		select {
		case <-b.done:
			return b.err
		case <-b.turn:
		}
		l.mu.Lock()
	}
	l.writing = true
	bs := l.queue
	l.queue, l.queued = nil, 0
	failed := l.err
	l.mu.Unlock()

	for _, b := range bs {
		if failed == nil {
			_, failed = b.seg.file.WriteAt(b.buf, b.off)
		}
		b.err = failed
	}

	l.mu.Lock()
	for _, b := range bs {
		if b.err != nil {
			b.err = l.fail("write", b.err)
		} else {
			b.seg.wrote = b.off + int64(len(b.buf))
			for i := range b.entries {
				if err := l.index(b.seg, &b.entries[i]); err != nil {
					b.err = l.fail("index", err)
				}
			}
			l.written = b.num
		}
		if cap(b.buf) <= 4<<20 && len(l.free) < 4 {
			l.free = append(l.free, b.buf[:0])
		}
		b.buf, b.entries = nil, nil
		close(b.done)
	}
	if n := len(l.queue); n > 0 {
		l.queue[n-1].turn <- struct{}{}
	} else {
		l.writing = false
	}
	if len(l.unsealed) > 0 {
		l.kick()
	}
	l.mu.Unlock()
	return b.err
}

// mark is how far something has come that one caller does for all who wait; mu guards it.
type mark struct {
	upto uint64        // number of the last batch that it holds for
	busy chan struct{} // closed when the one who does it is done; nil when nobody does
}

// reach returns when m has come to lsn. Who finds nobody before does the work, without mu, and tells how far it came.
func (l *Log) reach(ctx context.Context, m *mark, lsn uint64, work func() (uint64, error)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for m.upto < lsn {
		if l.err != nil {
			return l.err
		}
		if busy := m.busy; busy != nil {
			l.mu.Unlock()
			var gone error
			select {
			case <-busy:
			case <-ctx.Done():
				gone = ctx.Err()
			}
			l.mu.Lock()
			if gone != nil {
				return gone
			}
			continue
		}
		done := make(chan struct{})
		m.busy = done
		l.mu.Unlock()
		upto, err := work()
		l.mu.Lock()
		m.busy = nil
		if err == nil {
			m.upto = max(m.upto, upto)
		}
		close(done)
		if err != nil && l.err == nil {
			return err
		}
	}
	return nil
}

// sync returns when the batches up to lsn are on the disk.
func (l *Log) sync(ctx context.Context, lsn uint64) error {
	return l.reach(ctx, &l.synced, lsn, func() (uint64, error) {
		l.mu.Lock()
		target, files := l.written, l.dirty()
		l.mu.Unlock()
		defer l.release(files...)
		for _, f := range files { // in order: a later segment is never safer than an earlier one
			if err := f.Sync(); err != nil {
				l.mu.Lock()
				defer l.mu.Unlock()
				return 0, l.fail("sync", err)
			}
		}
		return target, nil
	})
}

// dirty holds the files of the segments that may have octets which are not on the disk; mu is held.
func (l *Log) dirty() []*handle {
	var files []*handle
	for _, s := range l.unsealed {
		s.file.refs++
		files = append(files, s.file)
	}
	if l.active != nil {
		l.active.file.refs++
		files = append(files, l.active.file)
	}
	return files
}

// recentlyFull spares a full disk the attempt to allocate for every record; mu is held.
func (l *Log) recentlyFull() bool { return time.Since(l.noAlloc) < 100*time.Millisecond }
