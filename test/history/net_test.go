package history_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// process is a server of the simulation. When it is killed, the calls in it break at once and nothing of it is heard any more.
type process struct {
	handler http.Handler
	dead    atomic.Bool
	ctx     context.Context // of its calls
	cancel  context.CancelFunc
	at      time.Time // when it was killed; valid once ctx has ended
	from    int64     // stamp of the death
}

func newProcess() *process {
	p := &process{}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// kill reports whether this was the first.
func (p *process) kill(stamp func() int64) bool {
	if p.dead.Swap(true) {
		return false
	}
	p.from, p.at = stamp(), time.Now()
	p.cancel()
	return true
}

// wire leads to the process that lives at an address now, or to nobody.
type wire struct {
	mu sync.Mutex
	to *process
	// odd draws what happens to a call: how long its request and its answer take, and whether the answer gets lost.
	odd func() (there, back time.Duration, lost bool)
}

func (w *wire) set(p *process) {
	w.mu.Lock()
	w.to = p
	w.mu.Unlock()
}

var (
	errReset   = &net.OpError{Op: "read", Net: "unix", Err: syscall.ECONNRESET}
	errRefused = &net.OpError{Op: "dial", Net: "unix", Err: syscall.ECONNREFUSED}
)

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	there, back, lost := w.odd()
	pause(r.Context(), there)
	w.mu.Lock()
	p := w.to
	w.mu.Unlock()
	if p == nil || p.dead.Load() {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, errRefused
	}
	ctx, cancel := context.WithCancel(r.Context())
	stop := context.AfterFunc(p.ctx, cancel)
	in := r.Clone(ctx)
	in.Proto, in.ProtoMajor, in.ProtoMinor, in.RemoteAddr, in.RequestURI, in.Host = "HTTP/2.0", 2, 0, "@", r.URL.RequestURI(), r.URL.Host
	if r.Body == nil {
		in.Body = http.NoBody
	}
	context.AfterFunc(ctx, func() { in.Body.Close() }) // breaks it for both sides
	body, out := io.Pipe()
	a := &answer{p: p, header: http.Header{}, out: out, begun: make(chan struct{})}
	go func() {
		defer cancel()
		defer stop()
		p.handler.ServeHTTP(a, in)
		if p.dead.Load() || lost {
			out.CloseWithError(errReset)
		}
		a.WriteHeader(http.StatusOK)
		out.Close()
	}()
	select {
	case <-a.begun:
	case <-ctx.Done():
	}
	pause(r.Context(), back)
	switch {
	case p.dead.Load():
		cancel()
		body.CloseWithError(errReset)
		return nil, errReset
	case r.Context().Err() != nil:
		cancel()
		body.CloseWithError(r.Context().Err())
		return nil, r.Context().Err()
	}
	<-a.begun
	return &http.Response{Status: http.StatusText(a.code), StatusCode: a.code, Proto: "HTTP/2.0", ProtoMajor: 2, Header: a.sent, Trailer: http.Header{}, ContentLength: -1,
		Body: &reply{body, p, cancel}, Request: r}, nil
}

func pause(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// answer is the server's side of a call.
type answer struct {
	p      *process
	header http.Header
	sent   http.Header
	code   int
	begun  chan struct{}
	out    *io.PipeWriter
}

func (a *answer) Header() http.Header { return a.header }

func (a *answer) WriteHeader(code int) {
	if a.code == 0 {
		a.code, a.sent = code, a.header.Clone()
		close(a.begun)
	}
}

func (a *answer) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	if a.p.dead.Load() {
		a.out.CloseWithError(errReset)
		return 0, errReset
	}
	return a.out.Write(b)
}

func (a *answer) Flush() { a.WriteHeader(http.StatusOK) }

// SetReadDeadline and SetWriteDeadline are what a gateway asks for before it ends a stalled body; nothing stalls here.
func (a *answer) SetReadDeadline(time.Time) error  { return nil }
func (a *answer) SetWriteDeadline(time.Time) error { return nil }
func (a *answer) EnableFullDuplex() error          { return nil }

// reply is the client's side of an answer's body.
type reply struct {
	*io.PipeReader
	p      *process
	cancel context.CancelFunc
}

func (b *reply) Read(p []byte) (int, error) {
	n, err := b.PipeReader.Read(p)
	if b.p.dead.Load() {
		return 0, errReset
	}
	if errors.Is(err, errReset) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func (b *reply) Close() error {
	b.cancel()
	return b.PipeReader.CloseWithError(errReset)
}
