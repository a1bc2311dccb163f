package storetest

import (
	"context"
	"sync"
	"time"
)

// Link is an emulated network link: every request waits for the latency, and all octets share the rate. The zero value is no limit.
type Link struct {
	Latency time.Duration
	Rate    int64 // octets/s

	mu     sync.Mutex
	free   time.Time // when the link has sent all that was asked for so far
	octets int64
	asked  int64
}

// Begin waits for the latency of one request.
func (l *Link) Begin(ctx context.Context) error {
	if l == nil {
		return ctx.Err()
	}
	l.mu.Lock()
	l.asked++
	l.mu.Unlock()
	return sleep(ctx, l.Latency)
}

// Send waits until n octets have gone over the link.
func (l *Link) Send(ctx context.Context, n int) error {
	if l == nil || n <= 0 {
		return ctx.Err()
	}
	l.mu.Lock()
	l.octets += int64(n)
	if l.Rate <= 0 {
		l.mu.Unlock()
		return ctx.Err()
	}
	now := time.Now()
	if l.free.Before(now) {
		l.free = now
	}
	l.free = l.free.Add(time.Duration(float64(n) / float64(l.Rate) * float64(time.Second)))
	wait := l.free.Sub(now)
	l.mu.Unlock()
	return sleep(ctx, wait)
}

// Counts are the requests and octets so far.
func (l *Link) Counts() (requests, octets int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked, l.octets
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
