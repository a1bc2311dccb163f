package rpc

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"sync/atomic"
)

// Local is a host's handler in the process of its caller, as in `dsec up`: unary calls reach it without a connection, and pass the same
// guard, codec, services and error codes as they would over one. Streams and tunnels keep to the socket. The zero Local has no handler
// yet, and calls take the connection until Serve was called.
type Local struct {
	handler atomic.Pointer[http.Handler]
}

// Serve gives the handler.
func (l *Local) Serve(h http.Handler) { l.handler.Store(&h) }

func (l *Local) get() http.Handler {
	if l == nil {
		return nil
	}
	if h := l.handler.Load(); h != nil {
		return *h
	}
	return nil
}

// roundTrip calls the handler as the server would: with a context that ends with the caller's but has nothing else of it.
func roundTrip(h http.Handler, r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(context.Background())
	if d, ok := r.Context().Deadline(); ok {
		cancel()
		ctx, cancel = context.WithDeadline(context.Background(), d)
	}
	defer cancel()
	defer context.AfterFunc(r.Context(), cancel)()
	in := r.WithContext(ctx)
	in.Header = r.Header.Clone()
	in.RequestURI, in.RemoteAddr = r.URL.RequestURI(), "local"
	in.Proto, in.ProtoMajor, in.ProtoMinor = "HTTP/1.1", 1, 1
	if in.Body == nil {
		in.Body = http.NoBody
	}
	defer in.Body.Close()
	out := &recorded{header: http.Header{}}
	h.ServeHTTP(out, in)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	if out.code == 0 {
		out.code = http.StatusOK
	}
	return &http.Response{
		Status: http.StatusText(out.code), StatusCode: out.code, Proto: in.Proto, ProtoMajor: 1, ProtoMinor: 1,
		Header: out.header, Body: io.NopCloser(&out.body), ContentLength: int64(out.body.Len()), Request: r,
	}, nil
}

// recorded keeps an answer, which is one message.
type recorded struct {
	header http.Header
	body   bytes.Buffer
	code   int
}

func (a *recorded) Header() http.Header { return a.header }

func (a *recorded) WriteHeader(code int) {
	if a.code == 0 {
		a.code = code
	}
}

func (a *recorded) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(p)
}
