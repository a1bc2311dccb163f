package container

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// teardownBound is what undoing one sandbox may take, whatever became of the request that caused it.
const teardownBound = 60 * time.Second

// teardown is what must be undone of a sandbox, newest first. The same stack serves a create that failed and a destroy: each step
// is idempotent, a step that succeeded is not run again, and one that failed stays for the next attempt together with all below
// it, because what lies below is used by what is above (an upper by its mount, a slot by both).
type teardown struct {
	mu    sync.Mutex // held while steps run: a second caller waits and finds nothing left
	steps []teardownStep
}

type teardownStep struct {
	what string
	undo func(ctx context.Context) error
}

// push adds a step. It may be called for a thing before it is made: undo of what is absent does nothing.
func (t *teardown) push(what string, undo func(ctx context.Context) error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.steps = append(t.steps, teardownStep{what, undo})
}

// run undoes all steps on a context that lost its cancel and got a deadline of its own.
func (t *teardown) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownBound)
	defer cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	for len(t.steps) > 0 {
		s := t.steps[len(t.steps)-1]
		if err := s.undo(ctx); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
		t.steps = t.steps[:len(t.steps)-1]
	}
	return nil
}

// runAll undoes every step whatever the others say, for what no one will try again.
func (t *teardown) runAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownBound)
	defer cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs []error
	for i := len(t.steps) - 1; i >= 0; i-- {
		if err := t.steps[i].undo(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", t.steps[i].what, err))
		}
	}
	t.steps = nil
	return errors.Join(errs...)
}
