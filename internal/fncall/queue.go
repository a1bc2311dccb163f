package fncall

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// queue gives out the places in which runs run. Projects with something to run are served in turn, each in the order of its requests, so
// that one with a thousand waiting holds up nobody else by more than one run a place.
type queue struct {
	mu      sync.Mutex
	free    int
	size    int
	waiting int
	most    int                  // that may wait
	lines   map[string][]*waiter // by project, none empty
	order   []string             // of the lines, the next one first
}

type waiter struct {
	n     int
	ready chan struct{}
}

func newQueue(size, most int) *queue {
	return &queue{free: size, size: size, most: most, lines: map[string][]*waiter{}}
}

// take waits for n places, at most bound; n above the size is the size. The caller calls release once.
func (q *queue) take(ctx context.Context, project string, n int, bound time.Duration) (release func(), err error) {
	q.mu.Lock()
	n = min(n, q.size)
	if q.waiting == 0 && q.free >= n {
		q.free -= n
		q.mu.Unlock()
		return q.releaser(n), nil
	}
	if q.waiting >= q.most {
		q.mu.Unlock()
		return nil, fmt.Errorf("function calls: %d wait for a place already: %w", q.most, sandbox.ErrExhausted)
	}
	w := &waiter{n, make(chan struct{})}
	if len(q.lines[project]) == 0 {
		q.order = append(q.order, project)
	}
	q.lines[project] = append(q.lines[project], w)
	q.waiting++
	q.serve()
	q.mu.Unlock()
	timer := time.NewTimer(bound)
	defer timer.Stop()
	select {
	case <-w.ready:
		return q.releaser(n), nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-timer.C:
		err = fmt.Errorf("function calls: no place within %v: %w", bound, sandbox.ErrExhausted)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-w.ready: // in the same moment
		q.free += n
	default:
		q.leave(project, w)
	}
	q.serve()
	return nil, err
}

func (q *queue) releaser(n int) func() {
	return func() {
		q.mu.Lock()
		q.free += n
		q.serve()
		q.mu.Unlock()
	}
}

// serve gives free places to whose turn it is; mu is held. One that wants more than is free is waited for, else it would never have them.
func (q *queue) serve() {
	for len(q.order) > 0 {
		project := q.order[0]
		w := q.lines[project][0]
		if w.n > q.free {
			return
		}
		q.free -= w.n
		q.waiting--
		close(w.ready)
		q.order = q.order[1:]
		if rest := q.lines[project][1:]; len(rest) > 0 {
			q.lines[project] = rest
			q.order = append(q.order, project)
		} else {
			delete(q.lines, project)
		}
	}
}

// leave takes a waiter out; mu is held.
func (q *queue) leave(project string, w *waiter) {
	line := q.lines[project]
	for i, x := range line {
		if x == w {
			line = append(line[:i:i], line[i+1:]...)
			q.waiting--
			break
		}
	}
	if len(line) > 0 {
		q.lines[project] = line
		return
	}
	delete(q.lines, project)
	for i, p := range q.order {
		if p == project {
			q.order = append(q.order[:i:i], q.order[i+1:]...)
			break
		}
	}
}

func (q *queue) length() (waiting, running int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting, q.size - q.free
}

// rates bounds the calls of each project by a bucket that fills at a rate and holds two seconds' worth.
type rates struct {
	rate float64 // a second; 0 is no bound
	now  func() time.Time

	mu sync.Mutex
	by map[string]*bucket
}

type bucket struct {
	left float64
	at   time.Time
}

const maxBuckets = 10_000

func (r *rates) allow(project string, n int) error {
	if r.rate <= 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now, full := r.now(), 2*r.rate
	b := r.by[project]
	if b == nil {
		if len(r.by) >= maxBuckets {
			for p, x := range r.by { // those that are full again say nothing
				if x.left+now.Sub(x.at).Seconds()*r.rate >= full {
					delete(r.by, p)
				}
			}
		}
		b = &bucket{left: full, at: now}
		r.by[project] = b
	}
	b.left = min(full, b.left+now.Sub(b.at).Seconds()*r.rate)
	b.at = now
	if b.left <= 0 {
		return fmt.Errorf("function calls: project %s has used up its rate of %g a second: %w", project, r.rate, sandbox.ErrExhausted)
	}
	b.left -= float64(n)
	return nil
}
