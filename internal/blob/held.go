package blob

import (
	"context"
	"sync"
	"time"
)

// What was fetched is served from memory first and written to the cache file later: a start that fetches much would else share its disk
// and its processors with writes that nobody waits for. A unit that is held counts as fetched, never as cached; a daemon that is killed
// loses it, and fetches it again.
const (
	heldMax   = 96 << 20               // octets in memory; what comes beyond is written at once
	heldShare = 8                      // and at most this part of the cache's limit
	heldCalm  = 200 * time.Millisecond // without a read or a fetch, after which writing begins
	heldLong  = 2 * time.Second        // after which a unit is written in any case
	heldLook  = 50 * time.Millisecond
)

type heldUnit struct {
	b     *blob
	i     int
	since time.Time
}

// held is the order in which units are to be written. Its lock is taken under a blob's.
type held struct {
	mu     sync.Mutex
	queue  []heldUnit
	octets int64
	more   chan struct{} // of one: something was added
}

func (s *Server) heldLimit() int64 { return min(heldMax, s.cfg.Limit/heldShare) }

// hold keeps a unit that was verified in memory until it is written; false when there is no room for it.
func (b *blob) hold(i int, data []byte) bool {
	if b.s.ctx.Err() != nil {
		return false
	}
	h := &b.s.held
	n := int64(len(data))
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held[i] != nil {
		return true // counted, and in the queue
	}
	h.mu.Lock()
	if h.octets+n > b.s.heldLimit() {
		h.mu.Unlock()
		return false
	}
	h.octets += n
	h.queue = append(h.queue, heldUnit{b, i, time.Now()})
	h.mu.Unlock()
	if b.held == nil {
		b.held = map[int][]byte{}
	}
	b.held[i] = data
	select {
	case h.more <- struct{}{}:
	default:
	}
	return true
}

// peek returns what is held of a unit, or nil.
func (b *blob) peek(i int) []byte {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.held[i]
}

// unhold forgets what is held of a unit, with b.mu held.
func (b *blob) unhold(i int) {
	data, ok := b.held[i]
	if !ok {
		return
	}
	delete(b.held, i)
	b.s.held.mu.Lock()
	b.s.held.octets -= int64(len(data))
	b.s.held.mu.Unlock()
}

// keepHeld writes what is held when reads have calmed down, it is much, or it has waited long; all of it when the daemon ends.
func (s *Server) keepHeld(ctx context.Context) {
	h := &s.held
	for {
		h.mu.Lock()
		n, octets := len(h.queue), h.octets
		var first heldUnit
		if n > 0 {
			first = h.queue[0]
		}
		h.mu.Unlock()
		var due <-chan time.Time
		switch now := time.Now(); {
		case n == 0:
			if ctx.Err() != nil {
				return
			}
			select {
			case <-h.more:
			case <-ctx.Done():
			}
			continue
		case ctx.Err() != nil, octets > s.heldLimit()/2, now.Sub(first.since) > heldLong, now.UnixNano()-s.touched.Load() > int64(heldCalm):
		default:
			due = time.After(heldLook)
		}
		if due != nil {
			select {
			case <-due:
			case <-ctx.Done():
			}
			continue
		}
		h.mu.Lock()
		h.queue[0] = heldUnit{}
		if h.queue = h.queue[1:]; len(h.queue) == 0 {
			h.queue = nil
		}
		h.mu.Unlock()
		first.b.writeHeld(first.i)
	}
}

// writeHeld moves a unit from memory into the cache file.
func (b *blob) writeHeld(i int) {
	data := b.peek(i)
	if data == nil {
		return // emptied meanwhile
	}
	if !b.store(i, data) {
		b.s.recent.put(b, i, data)
	}
	b.mu.Lock()
	b.unhold(i)
	b.mu.Unlock()
}
