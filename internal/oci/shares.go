package oci

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// shares are places of which no project has more than half.
type shares struct {
	all  *semaphore.Weighted
	each int64

	mu  sync.Mutex
	own map[string]*share
}

type share struct {
	places *semaphore.Weighted
	users  int
}

func newShares(n int) *shares {
	return &shares{all: semaphore.NewWeighted(int64(n)), each: max(1, int64(n)/2), own: map[string]*share{}}
}

// take waits for a place; done gives it back.
func (s *shares) take(ctx context.Context, project string) (done func(), err error) {
	s.mu.Lock()
	o := s.own[project]
	if o == nil {
		o = &share{places: semaphore.NewWeighted(s.each)}
		s.own[project] = o
	}
	o.users++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if o.users--; o.users == 0 {
			delete(s.own, project)
		}
	}
	if err := o.places.Acquire(ctx, 1); err != nil {
		leave()
		return nil, err
	}
	if err := s.all.Acquire(ctx, 1); err != nil {
		o.places.Release(1)
		leave()
		return nil, err
	}
	return func() {
		s.all.Release(1)
		o.places.Release(1)
		leave()
	}, nil
}
