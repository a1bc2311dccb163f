package rpc

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// The protocol versions that this software speaks, and the headers of every call.
const (
	Protocol    = 1 // spoken
	ProtocolMin = 1 // oldest that is served

	HeaderProtocol = "Dsec-Protocol" // a client's version; without it the client is taken as one of this version
	HeaderProject  = "Dsec-Project"  // project path: between gateway and host; from a client, a project below its key's
	HeaderCluster  = "Dsec-Cluster"  // the cluster token, between gateway and host
)

// Deadlines of a call whose client gave none, and the longest that a client may ask for.
const (
	DefaultCallDeadline = 90 * time.Second // above the longest long poll
	MaxCallDeadline     = 30 * time.Minute
	StreamDeadline      = 24 * time.Hour
)

// Octets of one message.
const (
	MaxRequestMessage = 40 << 20  // text and stdin of a command have 16 MiB each
	MaxAnswerMessage  = 192 << 20 // two streams of 16 MiB, as octets and as text with each octet replaced by three
)

// Guard decides about a caller by the headers of its request, before the body is read; path is the URL's. The context that it
// returns goes to the service.
type Guard func(ctx context.Context, path string, h http.Header) (context.Context, error)

// Edge is what every call passes on its way to a service: protocol version, guard, deadline, panic to "internal", one log line
// for a failed call, and an observation.
type Edge struct {
	Log   *slog.Logger
	Guard Guard // nil lets everybody in
	// Observe is told of every call that reached a service; procedure is one of a bounded set. May be nil.
	Observe func(procedure, code string, took time.Duration)
	// Deadline gives unary procedures another default than DefaultCallDeadline.
	Deadline map[string]time.Duration

	quiet  quiet
	direct map[string]connect.UnaryFunc // of the services made with Options, by procedure
}

// Options are the handler options for every service behind the edge, made before the handler that is given to Wrap.
func (e *Edge) Options() []connect.HandlerOption {
	if e.direct == nil {
		e.direct = map[string]connect.UnaryFunc{}
	}
	return []connect.HandlerOption{
		connect.WithConditionalHandlerOptions(func(spec connect.Spec) []connect.HandlerOption {
			return []connect.HandlerOption{connect.WithInterceptors(&calls{e, spec.Procedure})}
		}),
		connect.WithReadMaxBytes(MaxRequestMessage),
		// Compressed requests are understood; answers are not compressed: it costs more CPU than the rest of a call.
		connect.WithCompressMinBytes(1 << 40),
		connect.WithCodec(strictJSON{"json"}),
		connect.WithCodec(strictJSON{"json; charset=utf-8"}),
	}
}

// Fail answers a failed plain HTTP request and logs it.
func (e *Edge) Fail(w http.ResponseWriter, r *http.Request, what string, err error, start time.Time) {
	if why := ended(r.Context()); why != nil {
		err = why
	}
	e.note(r.Context(), what, err, start)
	WriteError(w, err)
}

// Done observes a plain HTTP request; what is one of a bounded set.
func (e *Edge) Done(what string, err error, start time.Time) { e.observe(what, err, start) }

var (
	protocolText  = strconv.Itoa(Protocol)
	protocolValue = []string{protocolText}
)

func checkProtocol(h http.Header) error {
	v := h[HeaderProtocol]
	if len(v) == 0 || v[0] == protocolText {
		return nil
	}
	n, err := strconv.Atoi(v[0])
	switch {
	case err != nil:
		return fmt.Errorf("%s %.40q: want a number: %w", HeaderProtocol, v[0], sandbox.ErrInvalid)
	case n < ProtocolMin:
		return fmt.Errorf("client speaks protocol %d, this server %d to %d: upgrade the client: %w", n, ProtocolMin, Protocol, sandbox.ErrState)
	case n > Protocol:
		return fmt.Errorf("client speaks protocol %d, this server %d to %d: upgrade the server, or use an older client: %w", n, ProtocolMin, Protocol, sandbox.ErrState)
	}
	return nil
}

func (e *Edge) observe(procedure string, err error, start time.Time) {
	if e.Observe == nil {
		return
	}
	code := "ok"
	if err != nil {
		code = CodeName(err)
	}
	e.Observe(procedure, code, time.Since(start))
}

// note is the one log line of a failed call. What the caller did wrong is information; what we failed at is an error. Behind a gateway
// only the latter is logged, since the gateway logs the call.
func (e *Edge) note(ctx context.Context, procedure string, err error, start time.Time) {
	level := slog.LevelInfo
	code := Code(err)
	switch code {
	case connect.CodeCanceled:
		level = slog.LevelDebug
	case connect.CodeInternal, connect.CodeUnknown, connect.CodeDataLoss:
		level = slog.LevelError
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded, connect.CodeResourceExhausted:
		level = slog.LevelWarn
	}
	if level < slog.LevelError && ctx.Value(insideKey{}) != nil {
		level = slog.LevelDebug
	}
	if e.Log == nil || !e.Log.Enabled(ctx, level) {
		return
	}
	tell, left := e.quiet.admit(procedure, code, time.Now())
	if !tell {
		return
	}
	attrs := []slog.Attr{slog.String("call", procedure), slog.String("code", code.String()), slog.String("err", err.Error())}
	if p := Project(ctx); p != "" {
		attrs = append(attrs, slog.String("project", p))
	}
	if !start.IsZero() {
		attrs = append(attrs, slog.Duration("took", time.Since(start)))
	}
	if left > 0 {
		attrs = append(attrs, slog.Int("left_out", left)) // of the same procedure and code since the last line
	}
	e.Log.LogAttrs(ctx, level, "call failed", attrs...)
}

func (e *Edge) caught(ctx context.Context, procedure string, v any) error {
	if v == http.ErrAbortHandler {
		panic(v)
	}
	if e.Log != nil {
		e.Log.LogAttrs(ctx, slog.LevelError, "panic in a call", slog.String("call", procedure), slog.Any("panic", v), slog.String("stack", string(debug.Stack())))
	}
	return fmt.Errorf("%s: internal failure; the server's log has the details", procedure)
}

func (e *Edge) bounded(ctx context.Context, procedure string, stream bool) (context.Context, context.CancelFunc) {
	if stream {
		return context.WithTimeout(ctx, StreamDeadline)
	}
	if _, ok := ctx.Deadline(); ok {
		return context.WithTimeout(ctx, MaxCallDeadline)
	}
	if d, ok := e.Deadline[procedure]; ok {
		return context.WithTimeout(ctx, d)
	}
	return context.WithTimeout(ctx, DefaultCallDeadline)
}

// calls is the Edge as the interceptor of one procedure.
type calls struct {
	edge      *Edge
	procedure string
}

func (c *calls) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	e, procedure := c.edge, c.procedure
	call := func(ctx context.Context, req connect.AnyRequest) (resp connect.AnyResponse, err error) {
		start := time.Now()
		defer func() {
			if v := recover(); v != nil {
				resp, err = nil, e.caught(ctx, procedure, v)
			}
			if err != nil {
				resp, err = nil, e.settle(ctx, procedure, err, start)
			}
			e.observe(procedure, err, start)
		}()
		ctx, cancel := e.bounded(ctx, procedure, false)
		defer cancel()
		return next(ctx, req)
	}
	e.direct[procedure] = call
	return call
}

func (c *calls) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	e, procedure := c.edge, c.procedure
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		start := time.Now()
		defer func() {
			if v := recover(); v != nil {
				err = e.caught(ctx, procedure, v)
			}
			if why := ended(ctx); why != nil {
				err = why
			}
			err = overLimit(err)
			if err != nil {
				err = e.settle(ctx, procedure, err, start)
			}
			e.observe(procedure, err, start)
		}()
		ctx, cancel := e.bounded(ctx, procedure, true)
		defer cancel()
		return next(ctx, conn)
	}
}

func (c *calls) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// ended is why a call was ended from outside of it: the cause that somebody gave when its context was cancelled.
func ended(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	if why := context.Cause(ctx); why != nil && !errors.Is(ctx.Err(), why) {
		return why
	}
	return nil
}

func (e *Edge) settle(ctx context.Context, procedure string, err error, start time.Time) error {
	e.note(ctx, procedure, FromError(err), start)
	return Error(err)
}

type (
	projectKey struct{}
	insideKey  struct{} // marks a call that came from a gateway
)

// WithProject says for which project the calls made with the context are.
func WithProject(ctx context.Context, project string) context.Context {
	return context.WithValue(ctx, projectKey{}, project)
}

// Project is the project of a call, on both sides; "" when there is none.
func Project(ctx context.Context) string {
	p, _ := ctx.Value(projectKey{}).(string)
	return p
}

const infoPath = "/dsec.v1.InfoService/"

// ClusterGuard lets in who shows the cluster token, and InfoService without one. A call's project is taken from its header.
func ClusterGuard(token string) (Guard, error) {
	if len(token) < 16 {
		return nil, fmt.Errorf("cluster token of %d characters: want 16 or more: %w", len(token), sandbox.ErrInvalid)
	}
	want := []byte(token)
	return func(ctx context.Context, path string, h http.Header) (context.Context, error) {
		if strings.HasPrefix(path, infoPath) || path == "/healthz" {
			return ctx, nil
		}
		if subtle.ConstantTimeCompare([]byte(first(h, HeaderCluster)), want) != 1 {
			return ctx, fmt.Errorf("cluster token: missing or wrong; hosts are reached through a gateway: %w", ErrUnauthenticated)
		}
		ctx = context.WithValue(ctx, insideKey{}, true)
		if p := first(h, HeaderProject); p != "" {
			if err := sandbox.CheckProject(p); err != nil {
				return ctx, err
			}
			ctx = WithProject(ctx, p)
		}
		return ctx, nil
	}, nil
}

// first reads a header whose name is in canonical form, without canonicalising it again.
func first(h http.Header, name string) string {
	if v := h[name]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// strictJSON refuses fields that it does not know: a misspelt limit must not be a limit that is not there.
type strictJSON struct{ name string }

func (c strictJSON) Name() string   { return c.name }
func (c strictJSON) IsBinary() bool { return false }

func (c strictJSON) Marshal(m any) ([]byte, error) { return c.MarshalAppend(nil, m) }

func (c strictJSON) MarshalAppend(b []byte, m any) ([]byte, error) {
	pm, ok := m.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no message", m)
	}
	return protojson.MarshalOptions{}.MarshalAppend(b, pm)
}

func (c strictJSON) Unmarshal(b []byte, m any) error {
	pm, ok := m.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no message", m)
	}
	if len(b) == 0 {
		return errors.New("empty body: want a JSON object, {} at least")
	}
	return protojson.Unmarshal(b, pm)
}
