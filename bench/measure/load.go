package measure

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Sequence calls do count times, one after the other, and returns how long each took. With every above 0 calls begin that far apart.
func Sequence(ctx context.Context, count int, every time.Duration, do func(ctx context.Context) (time.Duration, error)) (*Sample, error) {
	s := &Sample{}
	for range count {
		start := time.Now()
		if err := ctx.Err(); err != nil {
			return s, err
		}
		d, err := do(ctx)
		if err != nil {
			return s, err
		}
		s.Add(d)
		if rest := every - time.Since(start); rest > 0 {
			time.Sleep(rest)
		}
	}
	return s, nil
}

// Parallel calls do count times, width at once.
func Parallel(ctx context.Context, count, width int, do func(ctx context.Context, slot int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var left atomic.Int64
	left.Store(int64(count))
	var wg sync.WaitGroup
	for slot := range width {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for left.Add(-1) >= 0 && ctx.Err() == nil {
				if err := do(ctx, slot); err != nil {
					cancel(fmt.Errorf("load: %w", err))
				}
			}
		}()
	}
	wg.Wait()
	return context.Cause(ctx)
}
