package trajectory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Packed segments are copied to the store under logs/<host>/<segment>. Under pressure the oldest of them go from here but for header,
// footer and index, with which the log opens and knows what it has; their records are then read through the store.

const storeWait = time.Minute // for one object of the store, but the time to copy it

func (l *Log) key(num uint32) string { return fmt.Sprintf("logs/%s/%08x", l.cfg.Host, num) }

// remote opens a segment in the store; nil where the log has none.
func (l *Log) remote(num uint32) func() (io.ReaderAt, error) {
	if l.cfg.Store == nil {
		return nil
	}
	return func() (io.ReaderAt, error) {
		ctx, cancel := context.WithTimeout(context.Background(), storeWait)
		defer cancel()
		r, err := l.cfg.Store.Open(ctx, l.key(num))
		if errors.Is(err, sandbox.ErrNotFound) {
			return nil, fmt.Errorf("read segment %s from the store: it is gone: %w", segmentName(num), sandbox.ErrLost)
		}
		if err != nil {
			return nil, fmt.Errorf("read segment %s from the store: %w", segmentName(num), err)
		}
		return r, nil
	}
}

// store copies packed segments to the store and makes room here.
func (l *Log) store(ctx context.Context) error {
	if l.cfg.Store == nil {
		return nil
	}
	err := l.own(ctx)
	if err == nil {
		err = l.checkEpoch(ctx)
	}
	if errors.Is(err, errFenced) {
		l.mu.Lock()
		l.fail("own the place in the store", err)
		l.mu.Unlock()
	}
	if err != nil {
		return err
	}
	l.formMu.Lock()
	defer l.formMu.Unlock()
	for ctx.Err() == nil {
		l.mu.Lock()
		var s *segment
		for _, c := range l.sealedByAge() {
			if c.packed && !c.stored && !c.skip {
				s = c
				break
			}
		}
		l.mu.Unlock()
		if s == nil {
			break
		}
		if err := l.upload(ctx, s); err != nil {
			return fmt.Errorf("copy segment %s to the store: %w", segmentName(s.num), err)
		}
	}
	if err := l.dropTails(ctx); err != nil {
		return err
	}
	for ctx.Err() == nil {
		l.mu.Lock()
		s := l.evictNext()
		l.mu.Unlock()
		if s == nil {
			return nil
		}
		if err := l.evict(ctx, s); err != nil {
			return fmt.Errorf("move segment %s to the store: %w", segmentName(s.num), err)
		}
		if err := l.allocate(l.spareTarget()); err != nil && !noSpace(err) {
			return err
		}
	}
	return ctx.Err()
}

// upload copies a packed segment, unless the store has this form of it.
func (l *Log) upload(ctx context.Context, s *segment) error {
	p := s.file.File.(*packed)
	same, err := l.hasStored(ctx, s, p)
	if err == nil && !same {
		err = store.Put(ctx, l.cfg.Store, l.key(s.num), io.NewSectionReader(p.file, 0, s.disk))
	}
	if err != nil {
		return err
	}
	l.mu.Lock()
	s.stored = true
	l.mu.Unlock()
	return nil
}

// hasStored compares length and index with those in the store: the index has the checksums of all blocks.
func (l *Log) hasStored(ctx context.Context, s *segment, p *packed) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, storeWait)
	defer cancel()
	size := s.disk + p.head.Far
	in, err := l.cfg.Store.Stat(ctx, l.key(s.num))
	if errors.Is(err, sandbox.ErrNotFound) || err == nil && in.Size != size {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	r, err := l.cfg.Store.Open(ctx, l.key(s.num))
	if err != nil {
		return false, err
	}
	defer r.Close()
	var theirs, ours [trailerLen]byte
	if _, err := store.ReadAt(ctx, r, theirs[:], size-trailerLen); err != nil && err != io.EOF {
		return false, err
	}
	if _, err := p.file.ReadAt(ours[:], s.disk-trailerLen); err != nil {
		return false, err
	}
	return theirs == ours, nil
}

// unstore removes a segment from the store. Where the tail may hold a part of it, an object says before that it is gone: that part would
// pass for the log's end.
func (l *Log) unstore(s *segment) error {
	if l.cfg.Store == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeWait)
	defer cancel()
	if err := l.own(ctx); err != nil {
		return err
	}
	l.mu.Lock()
	s.dying = true
	told := l.listed && len(l.tails) == 0
	l.mu.Unlock()
	if !told {
		if err := l.putTail(ctx, nil); err != nil {
			return err
		}
	}
	return l.cfg.Store.Delete(ctx, l.key(s.num))
}

// evictNext is the oldest segment that may go from here, when room is short; mu is held.
func (l *Log) evictNext() *segment {
	short := len(l.spares) < l.spareTarget() && !l.noAlloc.IsZero()
	if !short && (l.cfg.Local == 0 || l.segmentBytes() <= l.cfg.Local) {
		return nil
	}
	for _, s := range l.sealedByAge() {
		if s.stored && !s.far && !s.skip {
			return s
		}
	}
	return nil
}

// evict leaves of a segment only what opening needs.
func (l *Log) evict(ctx context.Context, s *segment) error {
	p := s.file.File.(*packed)
	same, err := l.hasStored(ctx, s, p)
	if err != nil {
		return err
	}
	if !same {
		l.mu.Lock()
		s.stored = false
		l.mu.Unlock()
		return errors.New("the store has lost it; it is copied again")
	}
	return l.replace(s, func(f File) (int64, error) { return writeFar(p, s.off, s.disk, f) })
}

// writeFar writes what stays here of a packed segment whose records end at end.
func writeFar(p *packed, end, size int64, f File) (int64, error) {
	h := p.head
	for _, k := range p.blocks {
		if k.off+k.len <= end {
			h.Far = k.at + k.stored - segmentHeaderLen
		}
	}
	if _, err := f.WriteAt(h.encode(), 0); err != nil {
		return 0, err
	}
	b := make([]byte, 256<<10)
	at := int64(segmentHeaderLen)
	for from := segmentHeaderLen + h.Far; from < size; {
		n := min(int64(len(b)), size-from)
		if _, err := p.file.ReadAt(b[:n], from); err != nil {
			return 0, err
		}
		if _, err := f.WriteAt(b[:n], at); err != nil {
			return 0, err
		}
		from, at = from+n, at+n
	}
	return at, f.Sync()
}
