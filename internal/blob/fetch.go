package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

const (
	attemptBound = 10 * time.Second // of one read of the store; a read that hangs longer is left behind
	firstPause   = 50 * time.Millisecond
	longestPause = 2 * time.Second
)

var errCorrupt = errors.New("octets that do not have the unit's digest")

// flight is one fetch of a unit, for all who wait for it.
type flight struct {
	done chan struct{}
	data []byte // set when err is nil
	err  error
}

// source is an open object of the store. It is closed when it was given up and nobody reads from it.
type source struct {
	r      store.Reader
	users  int
	failed bool
	idle   time.Time
}

// unit fills dst from offset at of unit i, within the context.
func (b *blob) unit(ctx context.Context, i int, dst []byte, at int64, ahead bool) error {
	for {
		if b.cached(i, dst, at) {
			b.s.metrics.hit.Add(int64(len(dst)))
			return nil
		}
		if data := b.s.recent.get(b, i); data != nil {
			copy(dst, data[at:])
			b.s.metrics.hit.Add(int64(len(dst)))
			return nil
		}
		f := b.join(i, ahead)
		select {
		case <-f.done:
			if f.err == nil {
				copy(dst, f.data[at:])
				return nil
			}
			if ctx.Err() != nil {
				return f.err
			}
			// It began before this read did, and its time is up: this read's is not.
			if errors.Is(f.err, sandbox.ErrNotFound) {
				return f.err
			}
		case <-ctx.Done():
			return fmt.Errorf("unit %d of blob %s: %w", i, b.data.Digest, context.Cause(ctx))
		}
	}
}

// join returns the fetch of unit i that is under way, or starts one.
func (b *blob) join(i int, ahead bool) *flight {
	b.flightMu.Lock()
	defer b.flightMu.Unlock()
	if f := b.flights[i]; f != nil {
		return f
	}
	f := &flight{done: make(chan struct{})}
	b.flights[i] = f
	if !ahead {
		b.s.urgent.Add(1)
	}
	b.s.background(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, b.s.cfg.Deadline)
		defer cancel()
		// The flight before this one may have landed since the reader looked.
		data, stored := b.peek(i), true
		if data == nil {
			data = b.s.recent.get(b, i)
		}
		if data == nil {
			data = b.check(i)
		}
		if data == nil {
			data, f.err = b.fetch(ctx, i)
			stored = false
		}
		f.data = data
		if f.err != nil {
			f.data = nil
			b.s.metrics.failed.Add(1)
			b.s.failing(f.err)
			b.land(i)
		}
		close(f.done)
		if !ahead {
			b.s.urgent.Add(-1)
		}
		// Whoever waits goes on; until the unit is kept, it is found in its flight.
		b.s.touched.Store(time.Now().UnixNano())
		if f.err == nil {
			if !stored && !b.hold(i, data) && !b.store(i, data) {
				b.s.recent.put(b, i, data)
			}
			b.land(i)
		}
	})
	return f
}

func (b *blob) land(i int) {
	b.flightMu.Lock()
	delete(b.flights, i)
	b.flightMu.Unlock()
}

// fetch gets a unit from the store and compares it with its digest; it tries until the context ends.
func (b *blob) fetch(ctx context.Context, i int) ([]byte, error) {
	missing, first := 0, true
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		began := time.Now()
		data, err := b.attempt(ctx, i, first)
		first = false
		if err == nil {
			b.s.metrics.fetched.Add(int64(len(data)))
			b.s.metrics.latency.observe(time.Since(began))
			return data, nil
		}
		b.s.metrics.retries.Add(1)
		if errors.Is(err, errCorrupt) {
			b.s.metrics.corrupt.Add(1)
		}
		if errors.Is(err, sandbox.ErrNotFound) {
			if missing++; missing == 3 { // a cluster's file may be seen late, but not that late
				return nil, fmt.Errorf("fetch unit %d of blob %s: %w", i, b.data.Digest, err)
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("fetch unit %d of blob %s, given up after %v: %w", i, b.data.Digest, b.s.cfg.Deadline, err)
		case <-time.After(pause):
		}
	}
}

// attempt reads a unit once. A store that hangs keeps its slot but not the caller.
func (b *blob) attempt(ctx context.Context, i int, first bool) ([]byte, error) {
	select {
	case b.s.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("all %d reads of the store hang: %w", cap(b.s.slots), ctx.Err())
	}
	type result struct {
		data []byte
		err  error
	}
	ch := make(chan result, 1)
	ctx, cancel := context.WithTimeout(ctx, attemptBound)
	defer cancel()
	go func() {
		defer func() { <-b.s.slots }()
		data, err := b.readStore(ctx, i, first)
		ch <- result{data, err}
	}()
	select {
	case r := <-ch:
		return r.data, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("the store does not answer: %w", ctx.Err())
	}
}

// readStore reads a unit. The first try leaves all comparing to the unit's digest; later ones let the store find out what is wrong, and
// look elsewhere.
func (b *blob) readStore(ctx context.Context, i int, first bool) ([]byte, error) {
	src, err := b.use(ctx)
	if err != nil {
		return nil, err
	}
	buf := make([]byte, b.data.unitLen(i))
	read := store.ReadAt
	if first {
		read = store.ReadAtUnchecked
	}
	n, err := read(ctx, src.r, buf, int64(i)*UnitSize)
	if n == len(buf) {
		err = nil
	} else if err == nil || err == io.EOF {
		err = fmt.Errorf("%d of %d octets came: %w", n, len(buf), io.ErrUnexpectedEOF)
	}
	if err == nil && !b.verify(i, buf) {
		err = errCorrupt
	}
	b.done(src, err != nil)
	if err != nil {
		return nil, err
	}
	return buf, nil
}

// use opens the blob's object, or the one that is open.
func (b *blob) use(ctx context.Context) (*source, error) {
	b.flightMu.Lock()
	if src := b.source; src != nil {
		src.users++
		b.flightMu.Unlock()
		return src, nil
	}
	b.flightMu.Unlock()
	r, err := b.s.store.Open(ctx, key(b.data.Digest))
	if err != nil {
		return nil, err
	}
	if r.Size() != b.data.Size {
		err := fmt.Errorf("the object has %d octets, want %d", r.Size(), b.data.Size)
		r.Close()
		return nil, err
	}
	src := &source{r: r, users: 1}
	b.flightMu.Lock()
	if b.source == nil {
		b.source = src
	} else {
		src.failed = true // another was faster: closed after this use
	}
	b.flightMu.Unlock()
	return src, nil
}

func (b *blob) done(src *source, failed bool) {
	b.flightMu.Lock()
	src.users--
	src.failed = src.failed || failed
	src.idle = time.Now()
	if src.failed && b.source == src {
		b.source = nil
	}
	end := src.failed && src.users == 0
	b.flightMu.Unlock()
	if end {
		src.r.Close()
	}
}

// closeIdle closes the object when it was not read from since the given time; all: whenever.
func (b *blob) closeIdle(since time.Time) {
	b.flightMu.Lock()
	src := b.source
	if src == nil || src.users > 0 || src.idle.After(since) {
		b.flightMu.Unlock()
		return
	}
	b.source = nil
	b.flightMu.Unlock()
	src.r.Close()
}

// startPrefetch fetches the hot octets in front, in order, several at once, unless that is being done.
func (b *blob) startPrefetch(hot int64) {
	b.flightMu.Lock()
	begun := b.ahead
	b.ahead = true
	b.flightMu.Unlock()
	if begun {
		return
	}
	b.s.background(func(ctx context.Context) {
		b.prefetch(ctx, int((min(hot, b.data.Size)+UnitSize-1)/UnitSize))
		b.flightMu.Lock()
		b.ahead = false
		b.flightMu.Unlock()
	})
}

// prefetch fetches the first n units. Reads of the workload come first: while one waits for the store, only two units are fetched
// ahead. It ends when the store is in trouble: reads will tell.
func (b *blob) prefetch(ctx context.Context, n int) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	room := make(chan struct{}, b.s.cfg.Prefetch)
	for i := range n {
		if b.ready(int64(i)*UnitSize, b.data.unitLen(i)) {
			continue
		}
		for b.s.urgent.Load() > 0 && len(room) >= 2 {
			select {
			case <-time.After(2 * time.Millisecond):
			case <-ctx.Done():
				return
			}
		}
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return
		}
		f := b.join(i, true)
		b.s.background(func(context.Context) {
			defer func() { <-room }()
			select {
			case <-f.done:
				if f.err != nil {
					cancel()
				}
			case <-b.s.ctx.Done():
			}
		})
	}
	for range cap(room) { // all have ended
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return
		}
	}
}

const (
	streams     = 8         // sequential readers of one blob that are told apart
	aheadAfter  = 3 << 20   // octets read in a row before more is fetched than was asked for
	aheadUnits  = 4         // how far at most
	streamSlack = 256 << 10 // readers of one file come a little out of order: the kernel reads ahead in parts
)

// stream is a reader that goes on where it stopped.
type stream struct{ next, run int64 }

// ahead fetches what a sequential reader will want: one that reads a large file from front to end waits for the link once, not for each
// unit. Few octets read in a row fetch nothing more than was asked for.
func (s *Server) ahead(b *blob, off, n int64) {
	b.streamMu.Lock()
	found := -1
	for k := range b.streams {
		if d := off - b.streams[k].next; b.streams[k].run > 0 && d <= streamSlack && d >= -streamSlack {
			found = k
			break
		}
	}
	if found < 0 {
		copy(b.streams[1:], b.streams[:streams-1])
		b.streams[0] = stream{off + n, n}
		b.streamMu.Unlock()
		return
	}
	st := b.streams[found]
	st.run += n
	st.next = max(st.next, off+n)
	copy(b.streams[1:found+1], b.streams[:found])
	b.streams[0] = st
	b.streamMu.Unlock()
	if st.run < aheadAfter {
		return
	}
	units := min(int(st.run/aheadAfter), aheadUnits)
	first := int((off + n - 1) / UnitSize)
	for i := first + 1; i <= first+units && i < b.data.count(); i++ {
		if !b.ready(int64(i)*UnitSize, b.data.unitLen(i)) && s.recent.get(b, i) == nil {
			b.join(i, true)
		}
	}
}
