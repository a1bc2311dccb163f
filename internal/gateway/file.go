package gateway

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// files is FileService.
type files struct{ g *Gateway }

var _ dsecv1connect.FileServiceHandler = files{}

// sandboxOf is where a path names its sandbox; a missing path gets one, so that its error tells what is missing.
func sandboxOf(at **dsecv1.Path) *string {
	if *at == nil {
		*at = &dsecv1.Path{}
	}
	return &(*at).Sandbox
}

// step gives a changing call its key when the caller gave none, so that it may be sent again.
func step(s *string) {
	if *s == "" {
		*s = sandbox.NewKey()
	}
}

func (s files) Stat(ctx context.Context, r *connect.Request[dsecv1.StatRequest]) (*connect.Response[dsecv1.StatResponse], error) {
	return forward(ctx, s.g, r.Msg, sandboxOf(&r.Msg.At), true, func(p *rpc.Peer) unary[dsecv1.StatRequest, dsecv1.StatResponse] { return p.Files.Stat })
}

func (s files) MakeDir(ctx context.Context, r *connect.Request[dsecv1.MakeDirRequest]) (*connect.Response[dsecv1.MakeDirResponse], error) {
	step(&r.Msg.Step)
	return forward(ctx, s.g, r.Msg, sandboxOf(&r.Msg.At), true, func(p *rpc.Peer) unary[dsecv1.MakeDirRequest, dsecv1.MakeDirResponse] { return p.Files.MakeDir })
}

func (s files) Move(ctx context.Context, r *connect.Request[dsecv1.MoveRequest]) (*connect.Response[dsecv1.MoveResponse], error) {
	step(&r.Msg.Step)
	return forward(ctx, s.g, r.Msg, sandboxOf(&r.Msg.From), true, func(p *rpc.Peer) unary[dsecv1.MoveRequest, dsecv1.MoveResponse] { return p.Files.Move })
}

func (s files) Remove(ctx context.Context, r *connect.Request[dsecv1.RemoveRequest]) (*connect.Response[dsecv1.RemoveResponse], error) {
	step(&r.Msg.Step)
	return forward(ctx, s.g, r.Msg, sandboxOf(&r.Msg.At), true, func(p *rpc.Peer) unary[dsecv1.RemoveRequest, dsecv1.RemoveResponse] { return p.Files.Remove })
}

func (s files) List(ctx context.Context, r *connect.Request[dsecv1.ListFilesRequest], out *connect.ServerStream[dsecv1.ListFilesResponse]) error {
	return pass(ctx, s.g, r.Msg, sandboxOf(&r.Msg.At), out, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.ListFilesRequest]) (*connect.ServerStreamForClient[dsecv1.ListFilesResponse], error) {
		return p.FileStreams.List
	})
}

func (s files) Read(ctx context.Context, r *connect.Request[dsecv1.ReadRequest], out *connect.ServerStream[dsecv1.ReadResponse]) error {
	return pass(ctx, s.g, r.Msg, sandboxOf(&r.Msg.At), out, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.ReadRequest]) (*connect.ServerStreamForClient[dsecv1.ReadResponse], error) {
		return p.FileStreams.Read
	})
}

func (s files) Watch(ctx context.Context, r *connect.Request[dsecv1.WatchRequest], out *connect.ServerStream[dsecv1.WatchResponse]) error {
	return pass(ctx, s.g, r.Msg, sandboxOf(&r.Msg.At), out, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.WatchRequest]) (*connect.ServerStreamForClient[dsecv1.WatchResponse], error) {
		return p.FileStreams.Watch
	})
}

func (s files) Download(ctx context.Context, r *connect.Request[dsecv1.DownloadRequest], out *connect.ServerStream[dsecv1.DownloadResponse]) error {
	return pass(ctx, s.g, r.Msg, sandboxOf(&r.Msg.At), out, func(p *rpc.Peer) func(context.Context, *connect.Request[dsecv1.DownloadRequest]) (*connect.ServerStreamForClient[dsecv1.DownloadResponse], error) {
		return p.FileStreams.Download
	})
}

func (s files) Write(ctx context.Context, in *connect.ClientStream[dsecv1.WriteRequest]) (*connect.Response[dsecv1.WriteResponse], error) {
	return relay(ctx, s.g, in, func(q *dsecv1.WriteRequest) *string { step(&q.Step); return sandboxOf(&q.At) },
		func(p *rpc.Peer) func(context.Context) *connect.ClientStreamForClient[dsecv1.WriteRequest, dsecv1.WriteResponse] {
			return p.FileStreams.Write
		})
}

func (s files) Upload(ctx context.Context, in *connect.ClientStream[dsecv1.UploadRequest]) (*connect.Response[dsecv1.UploadResponse], error) {
	return relay(ctx, s.g, in, func(q *dsecv1.UploadRequest) *string { step(&q.Step); return sandboxOf(&q.At) },
		func(p *rpc.Peer) func(context.Context) *connect.ClientStreamForClient[dsecv1.UploadRequest, dsecv1.UploadResponse] {
			return p.FileStreams.Upload
		})
}

// The same as plain HTTP, with raw bodies.

const (
	bodyChunk = 256 << 10 // octets of a body in one message
	bodyTime  = rpc.StreamDeadline
)

// query reads the parameters of a plain request; one that is not known is refused, like a field that is not known.
type query struct {
	v   url.Values
	err error
}

func parseQuery(r *http.Request, known ...string) *query {
	q := &query{}
	q.v, q.err = url.ParseQuery(r.URL.RawQuery)
	if q.err != nil {
		q.err = fmt.Errorf("query: %w: %w", q.err, sandbox.ErrInvalid)
		return q
	}
	for k, list := range q.v {
		switch {
		case !slices.Contains(known, k):
			q.fail("parameter %q: not known here; want %s", k, strings.Join(known, ", "))
		case len(list) > 1:
			q.fail("parameter %q: given %d times", k, len(list))
		}
	}
	return q
}

func (q *query) fail(format string, args ...any) {
	if q.err == nil {
		q.err = fmt.Errorf(format+": %w", append(args, sandbox.ErrInvalid)...)
	}
}

func (q *query) number(k string, base int) int64 {
	s := q.v.Get(k)
	if s == "" {
		return 0
	}
	n, err := strconv.ParseInt(s, base, 64)
	if err != nil {
		q.fail("parameter %s=%.40q: want a number (base %d)", k, s, base)
	}
	return n
}

func (q *query) flag(k string) bool {
	if !q.v.Has(k) {
		return false
	}
	s := q.v.Get(k)
	b, err := strconv.ParseBool(s)
	if err != nil && s != "" {
		q.fail("parameter %s=%.40q: want true or false", k, s)
	}
	return b || s == ""
}

func (q *query) path(r *http.Request) *dsecv1.Path {
	p := &dsecv1.Path{Sandbox: r.PathValue("sandbox"), User: q.v.Get("user")}
	if q.v.Get("path") == "" {
		q.fail("parameter path: missing; want ?path=/absolute/path")
	}
	p.Path, p.PathRaw = rpc.Twin(q.v.Get("path"))
	return p
}

// plain frames a plain request: deadline, one log line, one observation.
func (g *Gateway) plain(w http.ResponseWriter, r *http.Request, what string, f func(ctx context.Context) error) {
	start := time.Now()
	ctx, cancel := context.WithTimeout(r.Context(), bodyTime)
	defer cancel()
	err := f(ctx)
	g.edge.Done(what, err, start)
	if err != nil {
		g.edge.Fail(w, r, what, err, start)
	}
}

// download copies a host's stream to a body. Once something was written, a failure breaks the connection: the caller must see that it
// did not get all.
func download[S any](ctx context.Context, g *Gateway, w http.ResponseWriter, p *rpc.Peer, open func() (*connect.ServerStreamForClient[S], error), take func(*S, bool) []byte) error {
	first := true
	rc := http.NewResponseController(w)
	err := pump(ctx, g, p, open, func(m *S) error {
		b := take(m, first)
		first = false
		if len(b) == 0 {
			return nil
		}
		if _, err := w.Write(b); err != nil {
			return fmt.Errorf("write body: %w: %w", err, context.Canceled)
		}
		if len(b) < bodyChunk/2 {
			return rc.Flush() // a short piece is all that there is for now
		}
		return nil
	})
	if err != nil && !first {
		g.log.LogAttrs(ctx, slog.LevelInfo, "body broken off", slog.String("err", err.Error()), slog.String("project", rpc.Project(ctx)))
		panic(http.ErrAbortHandler)
	}
	return err
}

func (g *Gateway) readFile(w http.ResponseWriter, r *http.Request) {
	g.plain(w, r, "GET /v1/files", func(ctx context.Context) error {
		q := parseQuery(r, "path", "user", "offset", "length")
		m := &dsecv1.ReadRequest{At: q.path(r), Offset: q.number("offset", 10), Length: q.number("length", 10)}
		if q.err != nil {
			return q.err
		}
		id, p, err := g.surely(ctx, m.At.Sandbox)
		if err != nil {
			return err
		}
		m.At.Sandbox = id
		h := w.Header()
		h.Set("Content-Type", "application/octet-stream")
		h.Set("X-Content-Type-Options", "nosniff")
		return download(ctx, g, w, p, func() (*connect.ServerStreamForClient[dsecv1.ReadResponse], error) {
			return p.FileStreams.Read(ctx, connect.NewRequest(m))
		}, func(m *dsecv1.ReadResponse, first bool) []byte {
			if i := m.GetInfo(); first && i != nil {
				h.Set("Dsec-File-Size", strconv.FormatInt(i.GetSize(), 10))
				h.Set("Dsec-File-Mode", strconv.FormatUint(uint64(i.GetMode()), 8))
				if t := i.GetModified(); t != nil {
					h.Set("Last-Modified", t.AsTime().UTC().Format(http.TimeFormat))
				}
			}
			return m.GetData()
		})
	})
}

// upload sends a body to a host, a piece at a time, and answers with the response as JSON.
func upload[Q, S any](ctx context.Context, r *http.Request, p *rpc.Peer, open func(context.Context) *connect.ClientStreamForClient[Q, S], message func(data []byte, first bool) *Q) (*S, error) {
	ctx, cut := context.WithCancel(ctx)
	defer cut()
	out := open(ctx)
	buf := make([]byte, bodyChunk)
	for first, end := true, false; !end; first = false {
		n, err := fill(r.Body, buf)
		if end = err == io.EOF; err != nil && !end {
			abandon(cut, out)
			return nil, fmt.Errorf("read body: %w: %w", err, context.Canceled)
		}
		if first || n > 0 {
			if out.Send(message(buf[:n], first)) != nil {
				break // the host has answered
			}
		}
	}
	resp, err := out.CloseAndReceive()
	if err != nil {
		return nil, named(rpc.FromError(err), p, rpc.Unsent(err))
	}
	return resp.Msg, nil
}

// fill reads until buf is full. Unlike io.ReadFull it tells the end of a body from one that broke off, which is io.ErrUnexpectedEOF too.
func fill(r io.Reader, buf []byte) (n int, err error) {
	for n < len(buf) && err == nil {
		var k int
		k, err = r.Read(buf[n:])
		n += k
	}
	return n, err
}

func writeJSON(w http.ResponseWriter, m proto.Message) error {
	b, err := protojson.Marshal(m)
	if err != nil {
		return fmt.Errorf("answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Write(append(b, '\n'))
	return nil
}

func (g *Gateway) writeFile(w http.ResponseWriter, r *http.Request) {
	g.plain(w, r, "PUT /v1/files", func(ctx context.Context) error {
		q := parseQuery(r, "path", "user", "step", "mode", "parents", "append", "start_offset")
		m := &dsecv1.WriteRequest{At: q.path(r), Step: q.v.Get("step"), Mode: uint32(q.number("mode", 8)), SetMode: q.v.Has("mode"), Parents: q.flag("parents"),
			Append: q.flag("append"), StartOffset: q.number("start_offset", 10), Size: max(0, r.ContentLength)}
		if m.Append && !q.v.Has("start_offset") {
			m.StartOffset = -1
		}
		if q.err != nil {
			return q.err
		}
		step(&m.Step)
		id, p, err := g.surely(ctx, m.At.Sandbox)
		if err != nil {
			return err
		}
		m.At.Sandbox = id
		resp, err := upload(ctx, r, p, p.FileStreams.Write, func(data []byte, first bool) *dsecv1.WriteRequest {
			if first {
				m.Data = data
				return m
			}
			return &dsecv1.WriteRequest{Data: data}
		})
		if err != nil {
			return err
		}
		return writeJSON(w, resp)
	})
}

func (g *Gateway) readTree(w http.ResponseWriter, r *http.Request) {
	g.plain(w, r, "GET /v1/trees", func(ctx context.Context) error {
		q := parseQuery(r, "path", "user", "exclude")
		m := &dsecv1.DownloadRequest{At: q.path(r)}
		if x := q.v.Get("exclude"); x != "" {
			m.Exclude = strings.Split(x, ",")
		}
		if q.err != nil {
			return q.err
		}
		id, p, err := g.surely(ctx, m.At.Sandbox)
		if err != nil {
			return err
		}
		m.At.Sandbox = id
		h := w.Header()
		h.Set("Content-Type", "application/x-tar")
		h.Set("Trailer", "Dsec-Skipped")
		return download(ctx, g, w, p, func() (*connect.ServerStreamForClient[dsecv1.DownloadResponse], error) {
			return p.FileStreams.Download(ctx, connect.NewRequest(m))
		}, func(m *dsecv1.DownloadResponse, _ bool) []byte {
			if n := len(m.GetSkipped()); n > 0 {
				text := m.GetSkipped()[0]
				if n > 1 {
					text = fmt.Sprintf("%s, and %d more", text, n-1)
				}
				h.Set("Dsec-Skipped", strconv.QuoteToASCII(text))
			}
			return m.GetData()
		})
	})
}

func (g *Gateway) writeTree(w http.ResponseWriter, r *http.Request) {
	g.plain(w, r, "PUT /v1/trees", func(ctx context.Context) error {
		q := parseQuery(r, "path", "user", "step", "parents", "keep_owner")
		m := &dsecv1.UploadRequest{At: q.path(r), Step: q.v.Get("step"), Parents: q.flag("parents"), KeepOwner: q.flag("keep_owner")}
		if q.err != nil {
			return q.err
		}
		step(&m.Step)
		id, p, err := g.surely(ctx, m.At.Sandbox)
		if err != nil {
			return err
		}
		m.At.Sandbox = id
		resp, err := upload(ctx, r, p, p.FileStreams.Upload, func(data []byte, first bool) *dsecv1.UploadRequest {
			if first {
				m.Data = data
				return m
			}
			return &dsecv1.UploadRequest{Data: data}
		})
		if err != nil {
			return err
		}
		return writeJSON(w, resp)
	})
}
