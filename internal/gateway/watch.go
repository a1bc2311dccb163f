package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
)

// Requests that last are watched: one whose key is revoked or runs out is ended within seconds, and one that carries a body and moves no
// octet for a while is ended too, since it holds descriptors, buffers and a command's or file's place on its host.

const (
	watchTick    = time.Second
	keyEvery     = 2 * time.Second  // between two looks at the key of an open stream
	defaultStall = 60 * time.Second // without an octet of a body
	smallBody    = 64 << 10         // octets of a call that comes as a whole
	lastWord     = 2 * time.Second  // for the error of a request that is ended
)

// watch ends requests. The goroutine behind it lives while there are some.
type watch struct {
	check func(ctx context.Context, key string) error
	tick  time.Duration
	every time.Duration
	stall time.Duration // 0 never

	mu      sync.Mutex
	open    map[*watched]struct{}
	running bool
}

// watched is one request.
type watched struct {
	key    string // ID of the caller's key; "" when there is none to look at
	stalls bool
	end    context.CancelCauseFunc
	rc     *http.ResponseController
	// Since when a read of the request or a write of the answer waits, in nanoseconds of the clock; 0 when none does.
	reading, writing atomic.Int64
}

// callerKey is where the ID of a caller's key stands in a context.
type callerKey struct{}

func callerOf(ctx context.Context) string {
	id, _ := ctx.Value(callerKey{}).(string)
	return id
}

// wrap watches the requests that may last; others pass as they are.
func (w *watch) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if !lasts(r) {
			next.ServeHTTP(rw, r)
			return
		}
		w.serve(rw, r, bulk(r.URL.Path), next)
	})
}

func (w *watch) serve(rw http.ResponseWriter, r *http.Request, stalls bool, next http.Handler) {
	ctx, end := context.WithCancelCause(r.Context())
	defer end(nil)
	x := &watched{key: callerOf(ctx), stalls: stalls && w.stall > 0, end: end, rc: http.NewResponseController(rw)}
	r = r.WithContext(ctx)
	if x.stalls {
		r.Body = &watchedBody{r.Body, x}
		rw = &watchedWriter{rw, x}
	}
	w.add(x)
	defer w.remove(x)
	next.ServeHTTP(rw, r)
}

// lasts tells streams and bodies that come in pieces from calls that answer at once.
func lasts(r *http.Request) bool {
	t := r.Header.Get("Content-Type")
	return strings.HasPrefix(t, "application/connect+") || strings.HasPrefix(t, "application/grpc") || strings.HasPrefix(r.URL.Path, "/v1/") ||
		r.Method == http.MethodPost && (r.ContentLength > smallBody || r.ContentLength < 0)
}

// bulk says of a stream whether it carries a body as fast as both sides can: one that waits for events may be still for days.
func bulk(path string) bool {
	switch path {
	case dsecv1connect.CommandServiceAttachProcedure, dsecv1connect.LogServiceReadProcedure, dsecv1connect.FileServiceWatchProcedure:
		return false
	}
	return true
}

func (w *watch) add(x *watched) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open[x] = struct{}{}
	if !w.running {
		w.running = true
		go w.run()
	}
}

func (w *watch) remove(x *watched) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, x)
}

func (w *watch) run() {
	t := time.NewTicker(w.tick)
	defer t.Stop()
	looked := time.Now()
	for range t.C {
		w.mu.Lock()
		if len(w.open) == 0 {
			w.running = false
			w.mu.Unlock()
			return
		}
		all := make([]*watched, 0, len(w.open))
		for x := range w.open {
			all = append(all, x)
		}
		w.mu.Unlock()
		now := time.Now()
		for _, x := range all {
			if err := x.stalled(now, w.stall); err != nil {
				x.finish(err)
			}
		}
		if now.Sub(looked) >= w.every {
			looked = now
			w.lookAtKeys(all)
		}
	}
}

// lookAtKeys ends the requests whose key opens nothing any more. A look that fails for another reason ends nothing.
func (w *watch) lookAtKeys(all []*watched) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	verdicts := map[string]error{}
	for _, x := range all {
		if x.key == "" {
			continue
		}
		err, ok := verdicts[x.key]
		if !ok {
			err = w.check(ctx, x.key)
			verdicts[x.key] = err
		}
		if errors.Is(err, rpc.ErrUnauthenticated) {
			x.finish(err)
		}
	}
}

func (x *watched) stalled(now time.Time, stall time.Duration) error {
	if !x.stalls {
		return nil
	}
	for what, since := range map[string]int64{"came from the client": x.reading.Load(), "was taken by the client": x.writing.Load()} {
		if since != 0 && now.Sub(time.Unix(0, since)) >= stall {
			return fmt.Errorf("no octet of the body %s for %v (gateway.stall); the call was ended: %w", what, stall, context.DeadlineExceeded)
		}
	}
	return nil
}

// finish ends a request with the error as its cause: what waits for its client is woken, and the answer gets a moment.
func (x *watched) finish(err error) {
	x.end(err)
	x.rc.SetReadDeadline(time.Unix(1, 0)) // of a connection that was taken over it fails, and the context ends that one
	until := time.Now().Add(lastWord)
	if x.writing.Load() != 0 {
		until = time.Unix(1, 0)
	}
	x.rc.SetWriteDeadline(until)
}

type watchedBody struct {
	io.ReadCloser
	x *watched
}

func (b *watchedBody) Read(p []byte) (int, error) {
	b.x.reading.Store(time.Now().UnixNano())
	n, err := b.ReadCloser.Read(p)
	b.x.reading.Store(0)
	return n, err
}

type watchedWriter struct {
	http.ResponseWriter
	x *watched
}

func (w *watchedWriter) Write(p []byte) (int, error) {
	w.x.writing.Store(time.Now().UnixNano())
	n, err := w.ResponseWriter.Write(p)
	w.x.writing.Store(0)
	return n, err
}

// Flush is what streams look for by type.
func (w *watchedWriter) Flush() { _ = w.FlushError() }

func (w *watchedWriter) FlushError() error {
	w.x.writing.Store(time.Now().UnixNano())
	defer w.x.writing.Store(0)
	return http.NewResponseController(w.ResponseWriter).Flush()
}

func (w *watchedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
