package store

import (
	"container/list"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// groupMax bounds the stored octets that one request asks for.
const groupMax = 4 << 20

// chunkCache holds decoded chunks, the most lately used ones, and the fetches under way.
type chunkCache struct {
	limit int64

	mu      sync.Mutex
	size    int64
	order   list.List // of *cached, most lately used first
	by      map[digest]*list.Element
	flights map[digest]*flight
}

type cached struct {
	sum  digest
	data []byte
}

// flight is one fetch; data and err are set before done is closed.
type flight struct {
	done chan struct{}
	data []byte
	err  error
}

func (c *chunkCache) get(d digest) []byte {
	if e := c.by[d]; e != nil {
		c.order.MoveToFront(e)
		return e.Value.(*cached).data
	}
	return nil
}

// land ends a flight and keeps what it brought.
func (c *chunkCache) land(d digest, f *flight, data []byte, err error) {
	f.data, f.err = data, err
	c.mu.Lock()
	delete(c.flights, d)
	if err == nil && c.by[d] == nil && int64(len(data)) <= c.limit {
		if c.by == nil {
			c.by = map[digest]*list.Element{}
		}
		c.by[d] = c.order.PushFront(&cached{d, data})
		for c.size += int64(len(data)); c.size > c.limit; {
			e := c.order.Back()
			old := c.order.Remove(e).(*cached)
			delete(c.by, old.sum)
			c.size -= int64(len(old.data))
		}
	}
	c.mu.Unlock()
	close(f.done)
}

// read returns the chunks' octets, which the caller must not change. Chunks that lie one after another come with one request; one that is
// on its way already is waited for.
func (s *S3) read(ctx context.Context, chunks []chunk) ([][]byte, error) {
	out := make([][]byte, len(chunks))
	waits := make([]*flight, len(chunks))
	var mine []chunk
	c := &s.chunks
	c.mu.Lock()
	if c.flights == nil {
		c.flights = map[digest]*flight{}
	}
	for i, ch := range chunks {
		if out[i] = c.get(ch.sum); out[i] != nil {
			continue
		}
		f := c.flights[ch.sum]
		if f == nil {
			f = &flight{done: make(chan struct{})}
			c.flights[ch.sum] = f
			mine = append(mine, ch)
		}
		waits[i] = f
	}
	c.mu.Unlock()
	// Others may wait for these too, so they don't end with this reader but with their attempts.
	for len(mine) > 0 {
		n, octets := 1, mine[0].stored
		for n < len(mine) && mine[n].pack == mine[0].pack && mine[n].off == mine[n-1].off+mine[n-1].stored && octets+mine[n].stored <= groupMax {
			octets += mine[n].stored
			n++
		}
		group := mine[:n]
		mine = mine[n:]
		go s.fetch(context.WithoutCancel(ctx), group)
	}
	for i, f := range waits {
		if f == nil {
			continue
		}
		select {
		case <-f.done:
			if f.err != nil {
				return nil, f.err
			}
			out[i] = f.data
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return out, nil
}

// fetch brings neighbours home, all of whose flights it ends.
func (s *S3) fetch(ctx context.Context, group []chunk) {
	ctx, cancel := context.WithTimeout(ctx, 3*s.cfg.Timeout)
	defer cancel()
	s.chunks.mu.Lock()
	flights := make([]*flight, len(group))
	for i, c := range group {
		flights[i] = s.chunks.flights[c.sum]
	}
	s.chunks.mu.Unlock()
	first, last := group[0], group[len(group)-1]
	span := int64(last.off+last.stored) - int64(first.off)
	o, err := s.get(ctx, packFolder+first.pack.String(), int64(first.off), span, 0)
	short := err == nil && int64(len(o.body)) < span
	if errors.Is(err, sandbox.ErrNotFound) {
		s.known.lose(first.pack)
	}
	for i, c := range group {
		var data []byte
		var cerr error
		switch {
		case err != nil && !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, errRange):
			cerr = err
		case err == nil && !short:
			at := c.off - first.off
			data, cerr = s.decode(c, o.body[at:at+c.stored])
		default:
			cerr = broken("pack "+c.pack.String(), "it is gone or cut short")
		}
		if errors.Is(cerr, sandbox.ErrLost) {
			data, cerr = s.second(ctx, c, cerr)
		}
		if cerr != nil {
			cerr = fmt.Errorf("fetch chunk %x of pack %s: %w", c.sum[:6], c.pack, cerr)
		}
		s.chunks.land(c.sum, flights[i], data, cerr)
	}
}

// second tries a chunk again that came wrong: from where else it is, as far as that is known or after a look at the indexes, and from where it was.
func (s *S3) second(ctx context.Context, c chunk, first error) ([]byte, error) {
	was := c.place
	tried := map[place]bool{}
	for looked := false; ; looked = true {
		at := []place{was}
		if p, ok := s.known.find(c.sum); ok && p != was {
			at = []place{p, was}
		}
		if looked || len(at) > 1 {
			for _, p := range at {
				if tried[p] || p.stored > c.length {
					continue
				}
				tried[p] = true
				c.place = p
				o, err := s.get(ctx, packFolder+p.pack.String(), int64(p.off), int64(p.stored), 0)
				if err == nil && len(o.body) == int(p.stored) {
					data, err := s.decode(c, o.body)
					if err == nil {
						return data, nil
					}
					first = err
				} else if errors.Is(err, sandbox.ErrNotFound) {
					s.known.lose(p.pack)
				} else if err != nil && !errors.Is(err, errRange) {
					return nil, err
				}
			}
		}
		if looked {
			return nil, first
		}
		if s.refresh(ctx) != nil {
			return nil, first
		}
	}
}

// decode unpacks a chunk and checks it. What comes back shares no memory with b.
func (s *S3) decode(c chunk, b []byte) ([]byte, error) {
	var data []byte
	if c.stored == c.length {
		data = append(data, b...)
	} else {
		var err error
		if data, err = s.dec.DecodeAll(b, make([]byte, 0, c.length)); err != nil {
			return nil, broken("chunk", "%v", err)
		}
	}
	if len(data) != int(c.length) || sha256.Sum256(data) != c.sum {
		return nil, broken("chunk", "%d octets of %d do not have its digest", len(data), c.length)
	}
	return data, nil
}
