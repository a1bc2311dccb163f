package main

import (
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// link is an emulated network link in front of a server: every request waits for the latency, and all octets of answers share the rate.
// It counts them. What goes the other way is free.
type link struct {
	mu      sync.Mutex
	latency time.Duration
	rate    int64 // octets/s; 0 is without limit
	free    time.Time
	octets  atomic.Int64
}

func (l *link) set(latency time.Duration, rate int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.latency, l.rate, l.free = latency, rate, time.Time{}
}

// take books n octets and returns when they are through.
func (l *link) take(n int) {
	l.octets.Add(int64(n))
	l.mu.Lock()
	if l.rate == 0 {
		l.mu.Unlock()
		return
	}
	now := time.Now()
	if l.free.Before(now) {
		l.free = now
	}
	l.free = l.free.Add(time.Duration(float64(n) / float64(l.rate) * float64(time.Second)))
	wait := l.free.Sub(now)
	l.mu.Unlock()
	time.Sleep(wait)
}

func (l *link) wrap(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.mu.Lock()
		latency := l.latency
		l.mu.Unlock()
		time.Sleep(latency)
		h.ServeHTTP(&linkWriter{w, l}, r)
	})
}

type linkWriter struct {
	http.ResponseWriter
	l *link
}

// Write sends in parts, so that several answers share the link as they would a real one.
func (w *linkWriter) Write(p []byte) (int, error) {
	const part = 64 << 10
	sent := 0
	for len(p) > 0 {
		n := min(part, len(p))
		w.l.take(n)
		m, err := w.ResponseWriter.Write(p[:n])
		sent += m
		if err != nil {
			return sent, err
		}
		p = p[n:]
	}
	return sent, nil
}

func (w *linkWriter) Flush() { http.NewResponseController(w.ResponseWriter).Flush() }
