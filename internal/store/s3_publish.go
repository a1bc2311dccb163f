package store

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// s3Draft is a file of this machine until it is published: S3 can't write in any order, and cutting wants the whole.
type s3Draft struct {
	*draft
	s *S3
}

// Create starts a draft in the spool folder. Its file has no name there, so that nothing is left of a process that dies.
func (s *S3) Create(ctx context.Context) (Draft, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(s.cfg.Spool, "dsec-draft-*")
	if err != nil {
		return nil, fmt.Errorf("create draft: %w", full(err))
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, fmt.Errorf("create draft: %w", err)
	}
	return &s3Draft{&draft{File: f}, s}, nil
}

func (w *s3Draft) Discard() error {
	if w.done {
		return nil
	}
	w.done = true
	return w.Close()
}

// Publish sends what the store lacks, several packs at once, then the manifest. After a failure the draft can be published again, or
// another one of the same content: packs that had arrived are not sent again.
func (w *s3Draft) Publish(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if w.done {
		return fmt.Errorf("publish %s: the draft has ended: %w", key, sandbox.ErrState)
	}
	st, err := w.Stat()
	if err == nil {
		err = w.s.publish(ctx, key, w.File, st.Size())
	}
	if err != nil {
		return fmt.Errorf("publish %s: %w", key, err)
	}
	w.done = true
	return w.Close()
}

func (s *S3) publish(ctx context.Context, key string, r io.ReaderAt, size int64) error {
	if size <= rawMax {
		b := make([]byte, size)
		if n, err := r.ReadAt(b, 0); int64(n) < size {
			return err
		}
		// What looks like a manifest is cut like a large object, so that no object can pass for one.
		if len(b) < len(manifestMagic) || string(b[:len(manifestMagic)]) != manifestMagic {
			return s.put(ctx, key, b)
		}
	}
	// A refresh lists all packs; what is a tenth of the limit old will do to begin with.
	if err := s.refreshAfter(ctx, s.now().Add(-publishLimit/10)); err != nil {
		return err
	}
	for range 4 {
		m, err := s.send(ctx, io.NewSectionReader(r, 0, size), size)
		if err != nil {
			return err
		}
		alive, at := s.known.alive(m.chunks)
		if !alive || s.now().Sub(at) > publishLimit/2 {
			if err := s.refresh(ctx); err != nil {
				return err
			}
			alive, at = s.known.alive(m.chunks)
		}
		if !alive {
			continue // a collection condemned one of the packs meanwhile: its chunks are sent again
		}
		bound, cancel := context.WithTimeout(ctx, at.Add(publishLimit).Sub(s.now()))
		err = s.put(bound, key, m.encode())
		late := bound.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil || !late {
			return err
		}
	}
	return fmt.Errorf("its packs were collected, or its manifest came too late, four times: %w", sandbox.ErrState)
}

// send makes sure that all chunks of r are in packs and returns where.
func (s *S3) send(ctx context.Context, r io.Reader, size int64) (*manifest, error) {
	p := newPacker(ctx, s)
	m, err := p.object(r, size)
	if cerr := p.close(); cerr != nil {
		err = cerr // object only saw that the others had ended
	}
	return m, err
}

// packer gathers chunks into packs and sends them.
type packer struct {
	s     *S3
	ctx   context.Context // of the caller; packs on their way go on when another fails, so that they need not be sent again
	sends *errgroup.Group
	fail  context.Context // ends when a pack fails

	mine map[short]place // what this packer has put where
	id   packID
	buf  []byte
	list []chunk
	sent int64 // octets of packs
}

// packsInFlight bounds the memory of a packer: so many packs are being sent while one more is filled.
const packsInFlight = 3

func newPacker(ctx context.Context, s *S3) *packer {
	p := &packer{s: s, ctx: ctx, mine: map[short]place{}}
	p.sends, p.fail = errgroup.WithContext(ctx)
	p.sends.SetLimit(packsInFlight)
	return p
}

// work is a chunk on its way through object.
type work struct {
	chunk
	data, packed []byte
	have         bool
}

// object cuts what r yields. Digests and compression of a batch run at once; the packs are filled in order, so that neighbours stay so.
func (p *packer) object(r io.Reader, size int64) (*manifest, error) {
	m := &manifest{size: size, chunks: make([]chunk, 0, size/chunkAvg+1)}
	workers := max(runtime.GOMAXPROCS(0), 1)
	batch := make([]*work, 0, 8*workers)
	flush := func() error {
		var g errgroup.Group
		g.SetLimit(workers)
		for _, w := range batch {
			g.Go(func() error {
				w.sum = sha256.Sum256(w.data)
				w.length = uint32(len(w.data))
				if w.place, w.have = p.s.known.find(w.sum); !w.have {
					w.packed = p.s.enc.EncodeAll(w.data, nil)
				}
				return nil
			})
		}
		_ = g.Wait()
		for _, w := range batch {
			if !w.have {
				stored := w.packed
				if len(stored) >= len(w.data) {
					stored = w.data
				}
				if err := p.add(&w.chunk, stored); err != nil {
					return err
				}
			}
			m.chunks = append(m.chunks, w.chunk)
		}
		batch = batch[:0]
		return nil
	}
	var n int64
	err := p.s.cut.split(&contextReader{p.fail, r}, func(b []byte) error {
		n += int64(len(b))
		batch = append(batch, &work{data: append([]byte(nil), b...)})
		if len(batch) == cap(batch) {
			return flush()
		}
		return nil
	})
	if err == nil {
		err = flush()
	}
	if err == nil && n != size {
		err = fmt.Errorf("read %d of %d octets", n, size)
	}
	return m, err
}

// add puts a chunk into the pack, unless it is in one of this packer's, and sets its place.
func (p *packer) add(c *chunk, stored []byte) error {
	key := short(c.sum[:16])
	if at, ok := p.mine[key]; ok {
		c.place = at
		return nil
	}
	if len(p.buf)+len(stored) > packSize && len(p.list) > 0 {
		if err := p.flush(); err != nil {
			return err
		}
	}
	if p.buf == nil {
		if _, err := rand.Read(p.id[:]); err != nil {
			return err
		}
		p.buf = append(make([]byte, 0, packSize), packMagic...)
	}
	c.place = place{p.id, uint32(len(p.buf)), uint32(len(stored))}
	p.buf = append(p.buf, stored...)
	p.list = append(p.list, *c)
	p.mine[key] = c.place
	return nil
}

// flush sends the pack and then its index; only what has both is relied on. Names are random, never made from the content: a pack that is
// sent again must not be one that a collection is about to remove.
func (p *packer) flush() error {
	if len(p.list) == 0 {
		return nil
	}
	if err := p.fail.Err(); err != nil {
		return err
	}
	id, buf, list := p.id, p.buf, p.list
	p.buf, p.list = nil, nil
	p.sent += int64(len(buf))
	p.sends.Go(func() error {
		if err := p.s.put(p.ctx, packFolder+id.String(), buf); err != nil {
			return fmt.Errorf("send pack %s: %w", id, err)
		}
		index := encodeIndex(id, int64(len(buf)), list)
		if err := p.s.put(p.ctx, indexFolder+id.String(), index); err != nil {
			return fmt.Errorf("send index of pack %s: %w", id, err)
		}
		p.s.keepIndex(id, index)
		p.s.known.mu.Lock()
		p.s.known.add(id, list)
		p.s.known.mu.Unlock()
		return nil
	})
	return nil
}

// close sends what is left and waits.
func (p *packer) close() error {
	return errors.Join(p.flush(), p.sends.Wait())
}

// contextReader stops with its context.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
