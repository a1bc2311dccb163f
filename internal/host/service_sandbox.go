package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

var cancelled = sandbox.Cause{Class: sandbox.ClassClient, Reason: "cancelled"}

type sandboxService struct{ h *Host }

// Create is for gateways alone, which resolve environments and limits: they call HostService.Create.
func (s sandboxService) Create(context.Context, *connect.Request[dsecv1.CreateRequest]) (*connect.Response[dsecv1.CreateResponse], error) {
	return nil, fmt.Errorf("create: ask a gateway, which resolves environments and places sandboxes: %w", sandbox.ErrUnsupported)
}

func (s sandboxService) CreateBatch(context.Context, *connect.Request[dsecv1.CreateBatchRequest]) (*connect.Response[dsecv1.CreateBatchResponse], error) {
	return nil, fmt.Errorf("create: ask a gateway, which resolves environments and places sandboxes: %w", sandbox.ErrUnsupported)
}

func (s sandboxService) Get(ctx context.Context, req *connect.Request[dsecv1.GetRequest]) (*connect.Response[dsecv1.GetResponse], error) {
	b, err := s.h.get(ctx, req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.GetResponse{Sandbox: b.proto()}), nil
}

// Bounds of a page.
const (
	defaultPage = 100
	maxPage     = 1000
)

func pageSize(n int32) int {
	if n <= 0 {
		return defaultPage
	}
	return min(int(n), maxPage)
}

// List answers by ID; the page token is the last ID of the page before.
func (s sandboxService) List(ctx context.Context, req *connect.Request[dsecv1.ListRequest]) (*connect.Response[dsecv1.ListResponse], error) {
	if err := s.h.wait(ctx); err != nil {
		return nil, err
	}
	token, size := req.Msg.GetPageToken(), pageSize(req.Msg.GetPageSize())
	r := &dsecv1.ListResponse{}
	for _, b := range s.h.selected(ctx, req.Msg.GetSelector()) {
		if string(b.id) <= token {
			continue
		}
		if len(r.Sandboxes) == size {
			r.NextPageToken = r.Sandboxes[size-1].Id
			break
		}
		r.Sandboxes = append(r.Sandboxes, b.proto())
	}
	return connect.NewResponse(r), nil
}

// Stop ends one sandbox by ID, name or create key, or all that a selector matches.
func (s sandboxService) Stop(ctx context.Context, req *connect.Request[dsecv1.StopRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	m, h := req.Msg, s.h
	stop := func(b *box) error { return h.stop(ctx, b, cancelled) }
	switch {
	case m.GetSelector() != nil && (m.GetId() != "" || m.GetKey() != "" || m.GetName() != ""):
		return nil, fmt.Errorf("stop: give id, key, name or selector, one of them: %w", sandbox.ErrInvalid)
	case m.GetSelector() != nil:
		return s.group(ctx, m.GetSelector(), stop)
	case m.GetKey() != "":
		b, err := h.stopKey(ctx, trajectory.ID{Project: project(ctx), Job: jobName(m.GetJob()), Key: m.GetKey()})
		if err != nil || b == nil {
			return connect.NewResponse(&dsecv1.SelectorResult{}), err
		}
		return connect.NewResponse(&dsecv1.SelectorResult{Sandboxes: []*dsecv1.Sandbox{b.proto()}}), nil
	}
	ref := m.GetId()
	if ref == "" {
		ref = m.GetName()
	}
	return s.one(ctx, ref, stop)
}

func (s sandboxService) one(ctx context.Context, ref string, act func(*box) error) (*connect.Response[dsecv1.SelectorResult], error) {
	b, err := s.h.get(ctx, ref)
	if err != nil {
		return nil, err
	}
	if err := act(b); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.SelectorResult{Sandboxes: []*dsecv1.Sandbox{b.proto()}}), nil
}

func (s sandboxService) group(ctx context.Context, sel *dsecv1.Selector, act func(*box) error) (*connect.Response[dsecv1.SelectorResult], error) {
	if err := s.h.wait(ctx); err != nil {
		return nil, err
	}
	if err := checkSelector(sel); err != nil {
		return nil, err
	}
	// Names lead nowhere once their sandboxes have ended, so what is unknown is told from before the act.
	var unknown []*dsecv1.ItemError
	for i, id := range sel.GetIds() {
		if _, err := s.h.get(ctx, id); err != nil {
			unknown = append(unknown, &dsecv1.ItemError{Id: id, Code: rpc.CodeName(err), Message: err.Error(), Index: int32(i)})
		}
	}
	if sel.GetJob() != "" && len(sel.GetIds()) == 0 {
		unknown = s.h.arriving(scoped{project(ctx), jobName(sel.GetJob())})
	}
	r := each(s.h.selected(ctx, sel), act)
	r.Errors = append(r.Errors, unknown...)
	return connect.NewResponse(r), nil
}

func (s sandboxService) either(ctx context.Context, id string, sel *dsecv1.Selector, act func(*box) error) (*connect.Response[dsecv1.SelectorResult], error) {
	switch {
	case sel != nil && id != "":
		return nil, fmt.Errorf("id or selector: give one of them: %w", sandbox.ErrInvalid)
	case sel != nil:
		return s.group(ctx, sel, act)
	}
	return s.one(ctx, id, act)
}

func (s sandboxService) Pause(ctx context.Context, req *connect.Request[dsecv1.PauseRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	level := pauseLevel(req.Msg.GetLevel())
	return s.either(ctx, req.Msg.GetId(), req.Msg.GetSelector(), func(b *box) error { return b.pause(ctx, level, "asked", false) })
}

func (s sandboxService) Resume(ctx context.Context, req *connect.Request[dsecv1.ResumeRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	return s.either(ctx, req.Msg.GetId(), req.Msg.GetSelector(), func(b *box) error { return b.resume(ctx, "asked") })
}

func (s sandboxService) SetLifetime(ctx context.Context, req *connect.Request[dsecv1.SetLifetimeRequest]) (*connect.Response[dsecv1.SetLifetimeResponse], error) {
	b, err := s.h.get(ctx, req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	if err := b.setLifetime(req.Msg.GetLifetime()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.SetLifetimeResponse{Sandbox: b.proto()}), nil
}

// Snapshot makes the layer; publishing it is the gateway's, which has the catalogue.
func (s sandboxService) Snapshot(ctx context.Context, req *connect.Request[dsecv1.SnapshotRequest]) (*connect.Response[dsecv1.SnapshotResponse], error) {
	b, err := s.h.get(ctx, req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	layer, _, err := b.snapshot(ctx, req.Msg.GetStep())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.SnapshotResponse{Layer: layer}), nil
}

// Stats neither wakes the sandbox nor counts as activity.
func (s sandboxService) Stats(ctx context.Context, req *connect.Request[dsecv1.StatsRequest]) (*connect.Response[dsecv1.StatsResponse], error) {
	b, err := s.h.get(ctx, req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	inst, err := b.running()
	if err != nil {
		return nil, err
	}
	st, err := inst.Stats(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(rpc.StatsProto(st)), nil
}

func (s sandboxService) Capabilities(ctx context.Context, _ *connect.Request[dsecv1.CapabilitiesRequest]) (*connect.Response[dsecv1.CapabilitiesResponse], error) {
	return connect.NewResponse(&dsecv1.CapabilitiesResponse{Backends: s.h.capabilities()}), nil
}

type logService struct{ h *Host }

// Bounds of one message of records.
const (
	batchRecords = 256
	batchOctets  = 1 << 20
	followPoll   = time.Second // how long a follower waits for a record before it looks whether the sandbox has ended
)

// Read streams a trajectory's records; with follow until the sandbox has ended and all is told. It wakes nothing.
func (s logService) Read(ctx context.Context, req *connect.Request[dsecv1.ReadLogRequest], stream *connect.ServerStream[dsecv1.ReadLogResponse]) (err error) {
	m, h := req.Msg, s.h
	if isCalls(trajectory.ID{Key: m.GetKey()}) {
		return s.readCalls(ctx, m, stream)
	}
	b, err := s.find(ctx, m)
	if err != nil {
		return err
	}
	defer func() { err = b.unlessMoved(err) }() // the log does not end here then
	q := trajectory.Query{From: uint64(max(1, m.GetFromSeq())), Limit: batchRecords}
	for {
		over := b.ended() // before the read: what comes after an end is told in the next round
		recs, next, err := h.deps.Log.Read(ctx, b.traj, q)
		until := b.end()
		if n := len(recs); until > 0 && n > 0 && recs[n-1].Seq >= until { // what follows is of the sandbox that went on
			recs = slices.DeleteFunc(recs, func(r trajectory.Record) bool { return r.Seq >= until })
			return sendRecords(stream, recs, m.GetOutput())
		}
		if serr := sendRecords(stream, recs, m.GetOutput()); serr != nil {
			return serr
		}
		moved := next > q.From
		q.From = next
		switch {
		case errors.Is(err, sandbox.ErrLost) && moved:
			lost := &dsecv1.LogRecord{Seq: int64(next - 1), Kind: "lost", RequestJson: strconv.Quote(text(err.Error()))}
			if err := stream.Send(&dsecv1.ReadLogResponse{Records: []*dsecv1.LogRecord{lost}}); err != nil {
				return err
			}
		case err != nil:
			return err
		case moved:
		case over || !m.GetFollow():
			return nil
		default:
			// The record of the end is in the log a moment before the sandbox counts as ended, and none comes after it: the
			// wait is bounded, so that a follower that met that moment looks again.
			wait, cancel := context.WithTimeout(ctx, followPoll)
			err := h.deps.Log.Wait(wait, b.traj, next)
			bounded := wait.Err() != nil && ctx.Err() == nil
			cancel()
			if err != nil && !bounded {
				return err
			}
		}
	}
}

func (s logService) find(ctx context.Context, m *dsecv1.ReadLogRequest) (*box, error) {
	if m.GetKey() == "" {
		return s.h.get(ctx, m.GetSandbox())
	}
	if m.GetSandbox() != "" {
		return nil, fmt.Errorf("sandbox or key: give one of them: %w", sandbox.ErrInvalid)
	}
	if err := s.h.wait(ctx); err != nil {
		return nil, err
	}
	id := trajectory.ID{Project: project(ctx), Job: jobName(m.GetJob()), Key: m.GetKey()}
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if b := s.h.keys[id]; b != nil {
		return b, nil
	}
	return nil, fmt.Errorf("key %.60q in job %.60q: %w", id.Key, id.Job, sandbox.ErrNotFound)
}

func sendRecords(stream *connect.ServerStream[dsecv1.ReadLogResponse], recs []trajectory.Record, output bool) error {
	r := &dsecv1.ReadLogResponse{}
	size := 0
	for i := range recs {
		p := logRecord(&recs[i], output)
		r.Records = append(r.Records, p)
		if size += len(p.Data) + len(p.RequestJson) + 200; size >= batchOctets {
			if err := stream.Send(r); err != nil {
				return err
			}
			r, size = &dsecv1.ReadLogResponse{}, 0
		}
	}
	if len(r.Records) == 0 {
		return nil
	}
	return stream.Send(r)
}
