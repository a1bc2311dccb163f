package storetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/store"
)

// Faults are what goes wrong, each with its probability for one operation (0 to 1).
type Faults struct {
	Errors  float64       // the operation fails before it does anything
	Lost    float64       // it is done, but its answer is lost (writes)
	Short   float64       // a read brings fewer octets and an error
	Corrupt float64       // a read brings a wrong octet and no error
	Stalls  float64       // the operation stands still for Stall first
	Stall   time.Duration // bound of a stall; its length is random
	Down    bool          // every operation fails
	Hang    bool          // every operation stands still until its context ends or this is taken back
}

// ErrInjected is what a Faulty's own failures wrap.
var ErrInjected = errors.New("injected fault")

// FaultCounts are the faults that were injected and the reads that went through.
type FaultCounts struct {
	Operations, Reads, Octets, Errors, Lost, Short, Corrupt, Stalls int64
}

// Faulty is a store that is far away and breaks. Its faults follow from the seed and the order of operations.
type Faulty struct {
	inner store.Store
	link  *Link

	mu     sync.Mutex
	rng    *rand.Rand
	faults Faults
	counts FaultCounts
	change chan struct{} // closed when faults change
}

var _ store.Store = (*Faulty)(nil)

// NewFaulty wraps the store; link may be nil.
func NewFaulty(inner store.Store, seed uint64, link *Link, f Faults) *Faulty {
	return &Faulty{inner: inner, link: link, rng: rand.New(rand.NewPCG(seed, 1)), faults: f, change: make(chan struct{})}
}

// Set changes the faults from now on; what hangs goes on.
func (s *Faulty) Set(f Faults) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = f
	close(s.change)
	s.change = make(chan struct{})
}

// Counts returns what happened so far.
func (s *Faulty) Counts() FaultCounts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counts
}

// roll decides for one operation of n octets (n < 0: no read).
func (s *Faulty) roll(ctx context.Context, n int) (f Faults, err error) {
	for {
		s.mu.Lock()
		if !s.faults.Hang {
			break
		}
		change := s.change
		s.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
			return f, ctx.Err()
		}
	}
	defer s.mu.Unlock()
	hit := func(p float64, count *int64) float64 {
		if p > 0 && s.rng.Float64() < p {
			*count++
			return 1
		}
		return 0
	}
	s.counts.Operations++
	if s.faults.Down {
		s.counts.Errors++
		return f, fmt.Errorf("store is down: %w", ErrInjected)
	}
	f.Errors, f.Stalls = hit(s.faults.Errors, &s.counts.Errors), hit(s.faults.Stalls, &s.counts.Stalls)
	if n >= 0 {
		s.counts.Reads++
		s.counts.Octets += int64(n)
		f.Short, f.Corrupt = hit(s.faults.Short, &s.counts.Short), hit(s.faults.Corrupt, &s.counts.Corrupt)
	} else {
		f.Lost = hit(s.faults.Lost, &s.counts.Lost)
	}
	if f.Stalls > 0 && s.faults.Stall > 0 {
		f.Stall = time.Duration(s.rng.Int64N(int64(s.faults.Stall))) + 1
	}
	return f, nil
}

func (s *Faulty) before(ctx context.Context, n int) (Faults, error) {
	f, err := s.roll(ctx, n)
	if err != nil {
		return f, err
	}
	if err := sleep(ctx, f.Stall); err != nil {
		return f, err
	}
	if err := s.link.Begin(ctx); err != nil {
		return f, err
	}
	if f.Errors > 0 {
		return f, fmt.Errorf("operation refused: %w", ErrInjected)
	}
	return f, nil
}

func after(f Faults, err error) error {
	if err == nil && f.Lost > 0 {
		return fmt.Errorf("answer lost: %w", ErrInjected)
	}
	return err
}

func (s *Faulty) Create(ctx context.Context) (store.Draft, error) {
	if _, err := s.before(ctx, -1); err != nil {
		return nil, err
	}
	d, err := s.inner.Create(ctx)
	if err != nil {
		return nil, err
	}
	return &faultyDraft{d, s}, nil
}

func (s *Faulty) Open(ctx context.Context, key string) (store.Reader, error) {
	if _, err := s.before(ctx, -1); err != nil {
		return nil, err
	}
	r, err := s.inner.Open(ctx, key)
	if err != nil {
		return nil, err
	}
	return &faultyReader{r, s}, nil
}

func (s *Faulty) Stat(ctx context.Context, key string) (store.Info, error) {
	if _, err := s.before(ctx, -1); err != nil {
		return store.Info{}, err
	}
	return s.inner.Stat(ctx, key)
}

func (s *Faulty) List(ctx context.Context, prefix string, each func(store.Info) bool) error {
	if _, err := s.before(ctx, -1); err != nil {
		return err
	}
	return s.inner.List(ctx, prefix, each)
}

func (s *Faulty) Delete(ctx context.Context, key string) error {
	f, err := s.before(ctx, -1)
	if err != nil {
		return err
	}
	return after(f, s.inner.Delete(ctx, key))
}

// Path says that objects are no files of this machine: else its readers would go around the faults.
func (s *Faulty) Path(string) (string, bool) { return "", false }

type faultyReader struct {
	store.Reader
	s *Faulty
}

func (r *faultyReader) ReadAt(p []byte, off int64) (int, error) {
	return r.ReadAtContext(context.Background(), p, off)
}

func (r *faultyReader) ReadAtContext(ctx context.Context, p []byte, off int64) (int, error) {
	f, err := r.s.before(ctx, len(p))
	if err != nil {
		return 0, err
	}
	n, err := store.ReadAt(ctx, r.Reader, p, off)
	if serr := r.s.link.Send(ctx, n); serr != nil {
		return 0, serr
	}
	r.s.mu.Lock()
	cut, wrong := 0, 0
	if n > 0 {
		cut, wrong = r.s.rng.IntN(n), r.s.rng.IntN(n)
	}
	r.s.mu.Unlock()
	if n > 0 && f.Short > 0 {
		return cut, fmt.Errorf("after %d of %d octets: %w: %w", cut, n, ErrInjected, io.ErrUnexpectedEOF)
	}
	if n > 0 && f.Corrupt > 0 {
		p[wrong] ^= 0x20
	}
	return n, err
}

type faultyDraft struct {
	store.Draft
	s *Faulty
}

func (d *faultyDraft) Publish(ctx context.Context, key string) error {
	f, err := d.s.before(ctx, -1)
	if err != nil {
		return err
	}
	return after(f, d.Draft.Publish(ctx, key))
}
