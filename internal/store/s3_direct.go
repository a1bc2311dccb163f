package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sort"
	"sync"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// UncheckedReader is a Reader that can leave the comparing of octets to a caller who compares all that it reads with a digest of its
// own. What is wrong then is read again with ReadAtContext, which finds out more.
type UncheckedReader interface {
	Reader
	ReadAtUnchecked(ctx context.Context, p []byte, off int64) (int, error)
}

// ReadAtUnchecked reads from r as [ReadAt] does; where r can leave comparing to the caller, it does.
func ReadAtUnchecked(ctx context.Context, r Reader, p []byte, off int64) (int, error) {
	if u, ok := r.(UncheckedReader); ok {
		return u.ReadAtUnchecked(ctx, p, off)
	}
	return ReadAt(ctx, r, p, off)
}

// ReadAtUnchecked decodes chunks that lie in p as a whole into it, past the memory of chunks, and compares no digest of these. Those at the
// edges go the usual way, since the next read wants them too.
func (r *s3Reader) ReadAtUnchecked(ctx context.Context, p []byte, off int64) (int, error) {
	if r.chunks == nil || off < 0 || off >= r.size || len(p) > window {
		return r.ReadAtContext(ctx, p, off)
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	var end error
	if int64(len(p)) > r.size-off {
		p, end = p[:r.size-off], io.EOF
	}
	first := sort.Search(len(r.ends), func(i int) bool { return r.ends[i] > off })
	last := first
	for last < len(r.ends) && r.ends[last] < off+int64(len(p)) {
		last++
	}
	list := r.s.known.moved(r.chunks[first : last+1])
	parts := make([]chunkRead, len(list))
	for i, c := range list {
		parts[i].chunk = c
		at := r.ends[first+i] - int64(c.length) - off
		if at >= 0 && at+int64(c.length) <= int64(len(p)) {
			parts[i].into = p[at : at+int64(c.length) : at+int64(c.length)]
		}
	}
	if err := r.s.readParts(ctx, parts); err != nil {
		return 0, fmt.Errorf("read %s at %d: %w", r.key, off, err)
	}
	for i := range parts {
		if parts[i].into != nil {
			continue
		}
		at := r.ends[first+i] - int64(parts[i].chunk.length) - off
		copy(p[max(at, 0):], parts[i].data[max(-at, 0):])
	}
	return len(p), end
}

// chunkRead is a chunk on its way into a caller's memory (into), or into that of chunks (data).
type chunkRead struct {
	chunk  chunk
	into   []byte
	data   []byte
	flight *flight // of one that goes into the memory of chunks, and is being fetched
	mine   bool    // by this read
}

// readParts fills the parts. What is there already, or is on its way for another reader, is not fetched again.
func (s *S3) readParts(ctx context.Context, parts []chunkRead) error {
	c := &s.chunks
	c.mu.Lock()
	if c.flights == nil {
		c.flights = map[digest]*flight{}
	}
	for i := range parts {
		p := &parts[i]
		if data := c.get(p.chunk.sum); data != nil {
			if p.into != nil {
				copy(p.into, data)
			}
			p.data = data
			continue
		}
		p.flight = c.flights[p.chunk.sum]
		if p.flight == nil && p.into == nil {
			p.flight = &flight{done: make(chan struct{})}
			c.flights[p.chunk.sum] = p.flight
			p.mine = true
		}
	}
	c.mu.Unlock()
	d := &direct{}
	var fetches sync.WaitGroup
	for i := 0; i < len(parts); {
		if !parts[i].wanted() {
			i++
			continue
		}
		n, octets := i+1, parts[i].chunk.stored
		for n < len(parts) && parts[n].wanted() && parts[n].chunk.pack == parts[i].chunk.pack &&
			parts[n].chunk.off == parts[n-1].chunk.off+parts[n-1].chunk.stored && octets+parts[n].chunk.stored <= groupMax {
			octets += parts[n].chunk.stored
			n++
		}
		group := parts[i:n]
		i = n
		fetches.Go(func() { s.fetchParts(context.WithoutCancel(ctx), group, d) })
	}
	all := make(chan struct{})
	go func() { fetches.Wait(); close(all) }()
	select {
	case <-all:
	case <-ctx.Done():
		d.leave() // from here on nothing is written into the caller's memory
		return ctx.Err()
	}
	d.mu.Lock()
	err := d.err
	d.mu.Unlock()
	if err != nil {
		return err
	}
	for i := range parts {
		p := &parts[i]
		if p.flight == nil {
			continue
		}
		select {
		case <-p.flight.done:
		case <-ctx.Done():
			return ctx.Err()
		}
		if p.flight.err != nil {
			return p.flight.err
		}
		p.data = p.flight.data
		if p.into != nil {
			copy(p.into, p.data)
		}
	}
	return nil
}

// wanted says whether this read has to fetch the part.
func (p *chunkRead) wanted() bool { return p.mine || p.flight == nil && p.data == nil }

// direct guards the memory of a caller who may stop waiting.
type direct struct {
	writing sync.RWMutex // shared while somebody writes into the memory
	left    bool

	mu  sync.Mutex
	err error
}

func (d *direct) leave() {
	d.writing.Lock()
	d.left = true
	d.writing.Unlock()
}

func (d *direct) fail(err error) {
	d.mu.Lock()
	if d.err == nil {
		d.err = err
	}
	d.mu.Unlock()
}

// fetchParts brings neighbours home with one request and ends the flights among them.
func (s *S3) fetchParts(ctx context.Context, group []chunkRead, d *direct) {
	ctx, cancel := context.WithTimeout(ctx, 3*s.cfg.Timeout)
	defer cancel()
	first, last := group[0].chunk, group[len(group)-1].chunk
	span := int64(last.off+last.stored) - int64(first.off)
	began := s.now()
	o, err := s.get(ctx, packFolder+first.pack.String(), int64(first.off), span, 0)
	if err == nil && int64(len(o.body)) < span {
		err = broken("pack "+first.pack.String(), "it is cut short")
	}
	if errors.Is(err, sandbox.ErrNotFound) { // the next try finds where its chunks are now
		s.known.lose(first.pack)
		s.refreshAfter(ctx, began)
	}
	for i := range group {
		p := &group[i]
		var body []byte
		if err == nil {
			at := p.chunk.off - first.off
			body = o.body[at : at+p.chunk.stored]
		}
		if p.flight != nil {
			s.landPart(ctx, p, body, err)
		} else if err != nil {
			d.fail(err)
		} else if e := s.decodeInto(p, body, d); e != nil {
			d.fail(e)
		}
	}
}

// landPart ends the flight of a chunk, which others may wait for: it is checked, and fetched again when it is wrong.
func (s *S3) landPart(ctx context.Context, p *chunkRead, body []byte, err error) {
	var data []byte
	if err == nil {
		data, err = s.decode(p.chunk, body)
	}
	if errors.Is(err, sandbox.ErrLost) || errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, errRange) {
		data, err = s.second(ctx, p.chunk, err)
	}
	if err != nil {
		err = fmt.Errorf("fetch chunk %x of pack %s: %w", p.chunk.sum[:6], p.chunk.pack, err)
	}
	s.chunks.land(p.chunk.sum, p.flight, data, err)
}

// decodeInto unpacks a chunk into the caller's memory, unless it has left.
func (s *S3) decodeInto(p *chunkRead, body []byte, d *direct) error {
	d.writing.RLock()
	defer d.writing.RUnlock()
	if d.left {
		return context.Canceled
	}
	if len(body) == len(p.into) {
		copy(p.into, body)
		return nil
	}
	data, err := s.dec.DecodeAll(body, p.into[:0])
	if err != nil || len(data) != len(p.into) {
		return broken("chunk", "%d octets of %d: %v", len(data), len(p.into), err)
	}
	return nil
}
