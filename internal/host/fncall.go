package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// UseCalls makes the host serve function calls. It is called once, before Run.
func (h *Host) UseCalls(e *fncall.Engine) { h.calls = e }

// CallJobs is how the engine of function calls asks about jobs.
func (h *Host) CallJobs() fncall.Jobs { return callJobs{h} }

type callJobs struct{ h *Host }

// Call implements fncall.Jobs.
func (c callJobs) Call(project, name string) error {
	h := c.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.draining || h.closed {
		return fmt.Errorf("function call: the host takes nothing new: %w", sandbox.ErrExhausted)
	}
	j := h.jobs[scoped{project, name}]
	switch {
	case j == nil:
		h.jobs[scoped{project, name}] = &job{project: project, name: name, last: time.Now()}
	case !j.expired.IsZero():
		return fmt.Errorf("job %s: expired at %s, its name and keys are not used again; choose another: %w", name, j.expired.UTC().Format(time.RFC3339), sandbox.ErrState)
	default:
		j.last = time.Now()
	}
	return nil
}

// isCalls reports whether a trajectory is a stream of function calls.
func isCalls(id trajectory.ID) bool { return strings.HasPrefix(id.Key, fncall.Stream) }

// rereadCalls takes a job back whose calls were recorded.
func (h *Host) rereadCalls(id trajectory.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if j := h.jobOf(scoped{id.Project, id.Job}); j.last.IsZero() {
		j.last = time.Now()
	}
}

// expireCalls removes the streams of calls without a job whose day is over for as long as records are kept, and lets the engine forget what
// it knows of all that were removed.
func (h *Host) expireCalls(ctx context.Context, now time.Time) error {
	if h.calls == nil {
		return nil
	}
	var old []trajectory.ID
	there := map[trajectory.ID]bool{}
	for _, t := range h.deps.Log.Trajectories() {
		if !isCalls(t.ID) {
			continue
		}
		there[t.ID] = true
		if day, ok := fncall.StreamDay(t.ID); ok && now.Sub(day.AddDate(0, 0, 1)) > h.cfg.Retention {
			old = append(old, t.ID)
			there[t.ID] = false
		}
	}
	err := h.deps.Log.Remove(ctx, old...)
	h.calls.Forget(func(id trajectory.ID) bool { return !there[id] })
	return err
}

type fnCallService struct{ h *Host }

var _ dsecv1connect.FnCallServiceHandler = fnCallService{}

func (s fnCallService) engine(ctx context.Context) (*fncall.Engine, error) {
	if s.h.calls == nil {
		return nil, fmt.Errorf("function calls: this host runs none: %w", sandbox.ErrUnsupported)
	}
	return s.h.calls, s.h.wait(ctx)
}

// call does a call of the engine and wraps its answer.
func call[Q, S any](ctx context.Context, s fnCallService, req *connect.Request[Q], do func(*fncall.Engine, *Q) (*S, error)) (*connect.Response[S], error) {
	e, err := s.engine(ctx)
	if err != nil {
		return nil, err
	}
	r, err := do(e, req.Msg)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil && errors.Is(err, context.Canceled) {
			err = cause
		}
		return nil, err
	}
	return connect.NewResponse(r), nil
}

func (s fnCallService) Run(ctx context.Context, req *connect.Request[dsecv1.RunCallRequest]) (*connect.Response[dsecv1.RunCallResponse], error) {
	return call(ctx, s, req, func(e *fncall.Engine, q *dsecv1.RunCallRequest) (*dsecv1.RunCallResponse, error) {
		return e.Run(ctx, project(ctx), q)
	})
}

func (s fnCallService) RunBatch(ctx context.Context, req *connect.Request[dsecv1.RunCallBatchRequest]) (*connect.Response[dsecv1.RunCallBatchResponse], error) {
	return call(ctx, s, req, func(e *fncall.Engine, q *dsecv1.RunCallBatchRequest) (*dsecv1.RunCallBatchResponse, error) {
		return e.RunBatch(ctx, project(ctx), q)
	})
}

func (s fnCallService) RunPair(ctx context.Context, req *connect.Request[dsecv1.RunCallPairRequest]) (*connect.Response[dsecv1.RunCallPairResponse], error) {
	return call(ctx, s, req, func(e *fncall.Engine, q *dsecv1.RunCallPairRequest) (*dsecv1.RunCallPairResponse, error) {
		return e.RunPair(ctx, project(ctx), q)
	})
}

func (s fnCallService) PutFile(ctx context.Context, req *connect.Request[dsecv1.PutCallFileRequest]) (*connect.Response[dsecv1.PutCallFileResponse], error) {
	return call(ctx, s, req, func(e *fncall.Engine, q *dsecv1.PutCallFileRequest) (*dsecv1.PutCallFileResponse, error) {
		content, err := e.PutFile(project(ctx), q.GetData())
		return &dsecv1.PutCallFileResponse{Content: content}, err
	})
}

func (s fnCallService) GetFile(ctx context.Context, req *connect.Request[dsecv1.GetCallFileRequest]) (*connect.Response[dsecv1.GetCallFileResponse], error) {
	return call(ctx, s, req, func(e *fncall.Engine, q *dsecv1.GetCallFileRequest) (*dsecv1.GetCallFileResponse, error) {
		data, err := e.GetFile(project(ctx), q.GetContent())
		return &dsecv1.GetCallFileResponse{Data: data}, err
	})
}

func (s fnCallService) Cancel(ctx context.Context, req *connect.Request[dsecv1.CancelCallRequest]) (*connect.Response[dsecv1.CancelCallResponse], error) {
	return call(ctx, s, req, func(e *fncall.Engine, q *dsecv1.CancelCallRequest) (*dsecv1.CancelCallResponse, error) {
		return &dsecv1.CancelCallResponse{}, e.Cancel(project(ctx), q.GetJob(), q.GetKey())
	})
}

func (s fnCallService) Languages(ctx context.Context, req *connect.Request[dsecv1.ListCallLanguagesRequest]) (*connect.Response[dsecv1.ListCallLanguagesResponse], error) {
	return call(ctx, s, req, func(e *fncall.Engine, _ *dsecv1.ListCallLanguagesRequest) (*dsecv1.ListCallLanguagesResponse, error) {
		return e.Languages().Proto()
	})
}
