package rpc

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
)

// Local is a host in the process of its caller, as in `dsec up`: its unary services are called with the messages themselves, behind the
// same protocol check, guard, deadline, observation and error codes as over a connection. Streams and tunnels keep to the socket. The
// zero Local has no handler yet, and calls take the connection until Serve was called.
//
// A message belongs to both sides then: neither changes a request after it was sent or an answer after it was given.
type Local struct {
	front atomic.Pointer[front]
}

// Serve gives the handler, which must be one that [Edge.Wrap] returned.
func (l *Local) Serve(h http.Handler) {
	if f, ok := h.(*front); ok {
		l.front.Store(f)
	}
}

// find returns the service's function for a procedure, if it is here.
func (l *Local) find(procedure string) (*front, connect.UnaryFunc) {
	if l == nil {
		return nil, nil
	}
	f := l.front.Load()
	if f == nil {
		return nil, nil
	}
	return f, f.direct[procedure]
}

// front is a handler behind an edge: the HTTP way in, and the direct one to the unary procedures that were made with the edge's options.
type front struct {
	edge   *Edge
	next   http.Handler
	refuse *connect.ErrorWriter
	direct map[string]connect.UnaryFunc
}

// Wrap puts version check and guard in front of a handler, which may serve plain HTTP and services alike.
func (e *Edge) Wrap(next http.Handler) http.Handler {
	return &front{edge: e, next: next, refuse: connect.NewErrorWriter(), direct: maps.Clone(e.direct)}
}

func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header()[HeaderProtocol] = protocolValue
	ctx, err := f.edge.admit(r.Context(), r.URL.Path, r.Header)
	if err == nil {
		if err = bounded(r); err != nil {
			f.edge.note(ctx, r.URL.Path, err, time.Time{})
		}
	}
	if err != nil {
		if f.refuse.IsSupported(r) {
			f.refuse.Write(w, r, Error(err))
		} else {
			WriteError(w, err)
		}
		return
	}
	if ctx != r.Context() {
		r = r.WithContext(ctx)
	}
	f.next.ServeHTTP(w, r)
}

// call is a unary call without a connection. Its error is what [FromError] makes of one that came over a connection.
func (f *front) call(ctx context.Context, to connect.UnaryFunc, req connect.AnyRequest) (connect.AnyResponse, error) {
	ctx, err := f.edge.admit(ctx, req.Spec().Procedure, req.Header())
	if err != nil {
		return nil, coded(Code(err), err.Error())
	}
	resp, err := to(ctx, req)
	if err != nil {
		var ce *connect.Error
		if errors.As(err, &ce) {
			return nil, coded(ce.Code(), ce.Message())
		}
		return nil, coded(Code(err), err.Error())
	}
	return resp, nil
}

// admit checks protocol and guard; a refusal is logged.
func (e *Edge) admit(ctx context.Context, path string, h http.Header) (context.Context, error) {
	inner, err := ctx, checkProtocol(h)
	if err == nil && e.Guard != nil {
		inner, err = e.Guard(ctx, path, h)
	}
	if err != nil {
		e.note(ctx, path, err, time.Time{})
		return ctx, err
	}
	return inner, nil
}
