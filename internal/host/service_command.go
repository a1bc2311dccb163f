package host

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

type commandService struct{ h *Host }

func (s commandService) Start(ctx context.Context, req *connect.Request[dsecv1.StartRequest]) (*connect.Response[dsecv1.StartResponse], error) {
	m := req.Msg
	b, err := s.h.told(ctx, m.GetSandbox())
	if err != nil {
		return nil, err
	}
	c, err := rpc.Command(m)
	if err != nil {
		return nil, err
	}
	wait, err := longPoll(m.GetWaitMs(), 0)
	if err != nil {
		return nil, err
	}
	st, existed, err := b.start(ctx, c)
	if err != nil {
		return nil, err
	}
	if err := b.waitCommand(ctx, st, wait); err != nil {
		return nil, err
	}
	if err := b.firm(ctx, st); err != nil {
		return nil, err
	}
	r := &dsecv1.StartResponse{Command: b.commandProto(st), Existed: existed}
	r.Command.Argv, r.Command.ArgvRaw = rpc.TwinLists(c.Argv)
	r.Command.Text, r.Command.TextRaw = rpc.Twin(c.Text)
	if wait > 0 {
		limit := m.GetOutputLimit()
		if limit == 0 {
			limit = defaultOutput
		}
		if r.Stdout, r.Stderr, err = b.head(ctx, st, limit); err != nil {
			return nil, err
		}
		if m.GetTextOutput() {
			r.StdoutText, r.StderrText = rpc.Text(r.Stdout), rpc.Text(r.Stderr)
		}
	}
	return connect.NewResponse(r), nil
}

// longPoll reads a wait; it is cut at the longest that is served.
func longPoll(ms int64, unset time.Duration) (time.Duration, error) {
	d, err := rpc.Milliseconds("wait_ms", ms)
	switch {
	case err != nil:
		return 0, err
	case d < 0:
		return 0, fmt.Errorf("wait_ms %d: must not be negative: %w", ms, sandbox.ErrInvalid)
	case d == 0:
		return unset, nil
	}
	return min(d, sandbox.MaxLongPoll), nil
}

func (s commandService) command(ctx context.Context, ref, id string) (*box, *step, error) {
	b, err := s.h.told(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	st, err := b.command(ctx, id)
	return b, st, err
}

func (s commandService) Wait(ctx context.Context, req *connect.Request[dsecv1.WaitRequest]) (*connect.Response[dsecv1.WaitResponse], error) {
	m := req.Msg
	b, st, err := s.command(ctx, m.GetSandbox(), m.GetId())
	if err != nil {
		return nil, err
	}
	wait, err := longPoll(m.GetWaitMs(), sandbox.MaxLongPoll)
	if err != nil {
		return nil, err
	}
	if err := b.waitCommand(ctx, st, wait); err != nil {
		return nil, err
	}
	if err := b.firm(ctx, st); err != nil {
		return nil, err
	}
	r := &dsecv1.WaitResponse{Command: b.commandProto(st)}
	if r.Stdout, r.Stderr, err = b.head(ctx, st, m.GetOutputLimit()); err != nil {
		return nil, err
	}
	if m.GetTextOutput() {
		r.StdoutText, r.StderrText = rpc.Text(r.Stdout), rpc.Text(r.Stderr)
	}
	return connect.NewResponse(r), nil
}

func (s commandService) Attach(ctx context.Context, req *connect.Request[dsecv1.AttachRequest], stream *connect.ServerStream[dsecv1.AttachResponse]) error {
	m := req.Msg
	b, st, err := s.command(ctx, m.GetSandbox(), m.GetId())
	if err != nil {
		return err
	}
	if err := b.firm(ctx, st); err != nil {
		return err
	}
	return b.attach(ctx, st, m.GetStdoutOffset(), m.GetStderrOffset(), m.GetLate(), stream.Send)
}

func (s commandService) ReadOutput(ctx context.Context, req *connect.Request[dsecv1.ReadOutputRequest]) (*connect.Response[dsecv1.ReadOutputResponse], error) {
	m := req.Msg
	b, st, err := s.command(ctx, m.GetSandbox(), m.GetId())
	if err != nil {
		return nil, err
	}
	stream, err := parseStream(m.GetStream())
	if err != nil {
		return nil, err
	}
	r, err := b.readOutput(ctx, st, stream, m.GetOffset(), m.GetLimit())
	if err != nil {
		return nil, err
	}
	if m.GetTextOutput() {
		r.Text = rpc.Text(r.Data)
	}
	return connect.NewResponse(r), nil
}

func (s commandService) WriteStdin(ctx context.Context, req *connect.Request[dsecv1.WriteStdinRequest]) (*connect.Response[dsecv1.WriteStdinResponse], error) {
	m := req.Msg
	b, err := s.h.told(ctx, m.GetSandbox())
	if err != nil {
		return nil, err
	}
	taken, err := b.writeStdin(ctx, m.GetId(), m.GetOffset(), m.GetData(), m.GetEof())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.WriteStdinResponse{Taken: taken}), nil
}

func (s commandService) Signal(ctx context.Context, req *connect.Request[dsecv1.SignalRequest]) (*connect.Response[dsecv1.SignalResponse], error) {
	m := req.Msg
	b, err := s.h.told(ctx, m.GetSandbox())
	if err != nil {
		return nil, err
	}
	sig, err := signalNumber(m.GetSignal(), m.GetName())
	if err != nil {
		return nil, err
	}
	if err := b.signal(ctx, m.GetId(), sig, m.GetStep()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.SignalResponse{}), nil
}

// signalNumber takes a number or a name, with or without SIG.
func signalNumber(n int32, name string) (int, error) {
	switch {
	case n != 0 && name != "":
		return 0, fmt.Errorf("signal or name: give one of them: %w", sandbox.ErrInvalid)
	case name != "":
		if v, err := strconv.Atoi(name); err == nil {
			n = int32(v)
			break
		}
		up := strings.ToUpper(name)
		if !strings.HasPrefix(up, "SIG") {
			up = "SIG" + up
		}
		sig := unix.SignalNum(up)
		if sig == 0 {
			return 0, fmt.Errorf("name %.20q: no signal of Linux: %w", name, sandbox.ErrInvalid)
		}
		return int(sig), nil
	}
	if n < 1 || n > 64 {
		return 0, fmt.Errorf("signal %d: want 1 to 64, or a name: %w", n, sandbox.ErrInvalid)
	}
	return int(n), nil
}

func (s commandService) Resize(ctx context.Context, req *connect.Request[dsecv1.ResizeRequest]) (*connect.Response[dsecv1.ResizeResponse], error) {
	m := req.Msg
	b, err := s.h.told(ctx, m.GetSandbox())
	if err != nil {
		return nil, err
	}
	size, err := rpc.Size(m.GetSize())
	if err != nil {
		return nil, err
	}
	if size == nil || size.Rows == 0 || size.Cols == 0 {
		return nil, fmt.Errorf("size: want rows and cols, 1 to 65535: %w", sandbox.ErrInvalid)
	}
	if err := b.resize(ctx, m.GetId(), *size); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ResizeResponse{}), nil
}

// List answers in the order of the starts; the page token is the seq of the last one before.
func (s commandService) List(ctx context.Context, req *connect.Request[dsecv1.ListCommandsRequest]) (*connect.Response[dsecv1.ListCommandsResponse], error) {
	m := req.Msg
	b, err := s.h.told(ctx, m.GetSandbox())
	if err != nil {
		return nil, err
	}
	var after uint64
	if t := m.GetPageToken(); t != "" {
		if after, err = strconv.ParseUint(t, 10, 64); err != nil {
			return nil, fmt.Errorf("page_token %.40q: not one that this server gave: %w", t, sandbox.ErrInvalid)
		}
	}
	hist, err := b.load(ctx)
	if err != nil {
		return nil, err
	}
	size := pageSize(m.GetPageSize())
	b.mu.Lock()
	var page []*step
	more := false
	for _, st := range hist.order {
		if st.seq <= after || (m.GetRunningOnly() && st.ended()) {
			continue
		}
		if len(page) == size {
			more = true
			break
		}
		page = append(page, st)
	}
	b.mu.Unlock()
	r := &dsecv1.ListCommandsResponse{}
	for _, st := range page {
		if err := b.firm(ctx, st); err != nil {
			return nil, err
		}
		p := b.commandProto(st)
		if rec, err := b.recordAt(ctx, st.seq); err == nil { // a lost record leaves the command without its words
			if _, was, err := decode(rec.Payload); err == nil {
				if c, ok := was.(*dsecv1.StartRequest); ok {
					p.Argv, p.ArgvRaw, p.Text, p.TextRaw = c.Argv, c.ArgvRaw, c.Text, c.TextRaw
				}
			}
		}
		r.Commands = append(r.Commands, p)
	}
	if more {
		r.NextPageToken = strconv.FormatUint(page[size-1].seq, 10)
	}
	return connect.NewResponse(r), nil
}

func (s commandService) OpenSession(ctx context.Context, req *connect.Request[dsecv1.OpenSessionRequest]) (*connect.Response[dsecv1.OpenSessionResponse], error) {
	b, err := s.h.told(ctx, req.Msg.GetSandbox())
	if err != nil {
		return nil, err
	}
	se, secret, err := rpc.Session(req.Msg)
	if err != nil {
		return nil, err
	}
	r, err := b.openSession(ctx, se, secret)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(r), nil
}

func (s commandService) CloseSession(ctx context.Context, req *connect.Request[dsecv1.CloseSessionRequest]) (*connect.Response[dsecv1.CloseSessionResponse], error) {
	b, err := s.h.told(ctx, req.Msg.GetSandbox())
	if err != nil {
		return nil, err
	}
	se, err := b.closeSession(ctx, req.Msg.GetName())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.CloseSessionResponse{Session: se}), nil
}

func (s commandService) ListSessions(ctx context.Context, req *connect.Request[dsecv1.ListSessionsRequest]) (*connect.Response[dsecv1.ListSessionsResponse], error) {
	b, err := s.h.told(ctx, req.Msg.GetSandbox())
	if err != nil {
		return nil, err
	}
	all, err := b.listSessions(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ListSessionsResponse{Sessions: all}), nil
}
