package trace

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Source opens a [Kernel] when somebody first asks for it: a host without traced sandboxes has no program in the kernel.
type Source struct {
	log    *slog.Logger
	opened chan struct{} // closed when there is one

	mu   sync.Mutex
	k    *Kernel
	err  error // why there is none, for good
	over bool
}

// NewSource makes a source. It opens nothing.
func NewSource(log *slog.Logger) *Source { return &Source{log: log, opened: make(chan struct{})} }

// Kernel is the one; the error says why there is none. Its events are read while Run runs.
func (s *Source) Kernel() (*Kernel, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.over:
		return nil, fmt.Errorf("trace: ended: %w", sandbox.ErrState)
	case s.k != nil || s.err != nil:
		return s.k, s.err
	}
	if s.k, s.err = Open(s.log); s.err == nil {
		close(s.opened)
	}
	return s.k, s.err
}

// Run reads the events of the kernel's programs, once there are any, until ctx ends, and detaches them.
func (s *Source) Run(ctx context.Context) error {
	defer func() {
		s.mu.Lock()
		s.over = true
		k := s.k
		s.mu.Unlock()
		if k != nil {
			if err := k.Close(); err != nil {
				s.log.Error("detach programs", "err", err)
			}
		}
	}()
	select {
	case <-s.opened:
		if err := s.k.Run(ctx); err != nil {
			s.log.Error("processes of steps are told no more", "err", err)
			<-ctx.Done()
		}
	case <-ctx.Done():
	}
	return nil
}
