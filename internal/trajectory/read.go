package trajectory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"sort"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Query selects records of a trajectory.
type Query struct {
	From  uint64  // the first seq; 0 is 1
	Limit int     // records at most; 0 is 1000
	Kinds KindSet // zero is all; others are skipped without being read
}

// maxRead bounds the octets that one Read holds, beside its first record.
const maxRead = 4 << 20

// Read returns records from q.From on, in order, and the seq to go on from; fewer than the limit when they are large. At the end it
// returns none. A record that the disk has lost or damaged is an ErrLost after those before it; next is then the one behind it.
func (l *Log) Read(ctx context.Context, id ID, q Query) (recs []Record, next uint64, err error) {
	next = max(q.From, 1)
	limit := q.Limit
	if limit <= 0 || limit > 1000 {
		limit = 1000
	}
	l.mu.Lock()
	t, err := l.find(id)
	if err == nil && l.closed {
		err = l.err
	}
	if err != nil {
		l.mu.Unlock()
		return nil, next, err
	}
	type place struct {
		seq uint64
		at  ref
		seg *segment // nil: lost
		h   *handle
	}
	var places []place
	end := uint64(len(t.recs)) + 1
	for seq := next; seq < end && len(places) < limit; seq++ {
		r := t.recs[seq-1]
		if r != 0 && !q.Kinds.has(r.kind()) {
			continue
		}
		p := place{seq: seq, at: r, seg: l.segs[r.seg()]}
		if p.seg != nil {
			p.h = p.seg.file
			p.h.refs++
		}
		places = append(places, p)
	}
	l.mu.Unlock()
	defer func() {
		hs := make([]*handle, 0, len(places))
		for _, p := range places {
			if p.h != nil {
				hs = append(hs, p.h)
			}
		}
		l.release(hs...)
	}()

	size := 0
	for _, p := range places {
		if err := ctx.Err(); err != nil {
			return recs, next, err
		}
		if p.seg == nil {
			return recs, p.seq + 1, fmt.Errorf("trajectory %v: record %d: its segment is gone: %w", id, p.seq, sandbox.ErrLost)
		}
		r, err := readRecord(p.h, p.seg.header.Nonce, p.at.off())
		if err != nil || r.Seq != p.seq {
			return recs, p.seq + 1, fmt.Errorf("trajectory %v: record %d is damaged (segment %s at %d): %w", id, p.seq, segmentName(p.seg.num), p.at.off(), lost(err))
		}
		recs = append(recs, r)
		next = p.seq + 1
		if size += len(r.Payload); r.Input != nil {
			size += len(r.Input.Data)
		}
		if size >= maxRead {
			return recs, next, nil
		}
	}
	if len(places) < limit {
		next = max(next, end)
	}
	return recs, next, nil
}

// lost turns damage into ErrLost and leaves errors of the device as they are.
func lost(err error) error {
	if err == nil || errors.Is(err, errTorn) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return sandbox.ErrLost
	}
	return err
}

// readRecord reads one record; most come with the first read.
func readRecord(f io.ReaderAt, nonce uint32, off int64) (Record, error) {
	buf := make([]byte, 1024)
	n, err := f.ReadAt(buf, off)
	if err != nil && (err != io.EOF || n < headerLen) {
		return Record{}, err
	}
	size, err := checkHeader(buf[:n], nonce)
	if err != nil {
		return Record{}, err
	}
	if end := headerLen + size; end > n {
		all := make([]byte, end)
		copy(all, buf[:n])
		if _, err := f.ReadAt(all[n:], off+int64(n)); err != nil {
			return Record{}, err
		}
		buf = all
	}
	_, r, err := decodeRecord(buf[:headerLen], buf[headerLen:headerLen+size:headerLen+size], nonce)
	return r, err
}

// Wait returns when the trajectory has a record of that seq, or ctx ends. ErrNotFound: it was removed.
func (l *Log) Wait(ctx context.Context, id ID, seq uint64) error {
	for {
		l.mu.Lock()
		t, err := l.find(id)
		if err == nil && uint64(len(t.recs)) < seq {
			err = l.err
		}
		if err != nil || uint64(len(t.recs)) >= seq {
			l.mu.Unlock()
			return err
		}
		if t.wake == nil {
			t.wake = make(chan struct{})
		}
		wake := t.wake
		l.mu.Unlock()
		select {
		case <-wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Follow yields records from q.From on and waits for more, until ctx ends (its error is the last one yielded), the trajectory is
// removed, or the caller stops. Limit is per read. A lost record is yielded as an error and the next follows.
func (l *Log) Follow(ctx context.Context, id ID, q Query) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		for {
			recs, next, err := l.Read(ctx, id, q)
			for _, r := range recs {
				if !yield(r, nil) {
					return
				}
			}
			moved := next > max(q.From, 1)
			q.From = next
			if err == nil && !moved {
				err = l.Wait(ctx, id, next)
			}
			if err != nil && (!yield(Record{}, err) || !errors.Is(err, sandbox.ErrLost)) {
				return
			}
		}
	}
}

// GapError says that the octets [From, To) of a stream were not kept.
type GapError struct{ From, To int64 }

func (e *GapError) Error() string {
	return fmt.Sprintf("output from %d to %d was not kept", e.From, e.To)
}

// StreamState is what the log has of a command's stream. All zero: nothing yet.
type StreamState struct {
	End  int64 // offset behind the last octet
	Kept int64 // octets in the log; less than End where there are gaps
}

// StreamState describes the stream of a command (its step key).
func (l *Log) StreamState(id ID, step string, s sandbox.StreamName) (StreamState, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, err := l.find(id)
	if err != nil {
		return StreamState{}, err
	}
	st := t.streams[streamKey{step, s}]
	if st == nil {
		return StreamState{}, nil
	}
	return StreamState{End: st.end, Kept: st.kept}, nil
}

// ReadOutput fills p with the octets of a command's stream at off, as far as they are there without a gap. io.EOF: the log has
// none there yet, and whether more will come is in the command's end. *GapError: off lies in a gap. ErrLost: the disk lost them.
func (l *Log) ReadOutput(ctx context.Context, id ID, step string, s sandbox.StreamName, off int64, p []byte) (n int, err error) {
	if off < 0 {
		return 0, fmt.Errorf("read output of %s at %d: %w", step, off, sandbox.ErrInvalid)
	}
	for n < len(p) {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		c, err := l.chunkAt(id, step, s, off+int64(n))
		var gap *GapError
		if n > 0 && (err == io.EOF || errors.As(err, &gap)) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		recs, _, err := l.Read(ctx, id, Query{From: uint64(c.seq), Limit: 1})
		if err == nil && (len(recs) == 0 || recs[0].Offset != c.off || len(recs[0].Payload) != int(c.n)) {
			err = fmt.Errorf("record %d is another: %w", c.seq, sandbox.ErrLost)
		}
		if err != nil {
			return n, fmt.Errorf("read output of %s at %d: %w", step, off, err)
		}
		n += copy(p[n:], recs[0].Payload[off+int64(n)-c.off:])
	}
	return n, nil
}

// chunkAt finds the chunk that holds the octet.
func (l *Log) chunkAt(id ID, step string, s sandbox.StreamName, off int64) (chunk, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t, err := l.find(id)
	if err != nil {
		return chunk{}, err
	}
	st := t.streams[streamKey{step, s}]
	if st == nil || off >= st.end {
		return chunk{}, io.EOF
	}
	i := sort.Search(len(st.chunks), func(i int) bool { return st.chunks[i].off+int64(st.chunks[i].n) > off })
	c := st.chunks[i]
	if off >= c.off {
		return c, nil
	}
	gap := &GapError{To: c.off}
	if i > 0 {
		gap.From = st.chunks[i-1].off + int64(st.chunks[i-1].n)
	}
	return chunk{}, gap
}
