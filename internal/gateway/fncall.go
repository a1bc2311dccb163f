package gateway

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// calls is FnCallService. The gateway resolves the environments of languages; a host runs. A call with a key goes to the host that the key
// names, so that the host knows it again.
type calls struct{ g *Gateway }

var _ dsecv1connect.FnCallServiceHandler = calls{}

func (s calls) languages() (fncall.Languages, error) {
	if s.g.languages == nil {
		return nil, fmt.Errorf("function calls: this gateway has no languages: %w", sandbox.ErrUnsupported)
	}
	return s.g.languages, nil
}

// roots resolves the environments of programs.
func (s calls) roots(ctx context.Context, programs ...*dsecv1.CallProgram) ([]*dsecv1.CallRoot, error) {
	langs, err := s.languages()
	if err != nil {
		return nil, err
	}
	var roots []*dsecv1.CallRoot
	for _, p := range programs {
		if p == nil {
			return nil, fmt.Errorf("program: missing: %w", sandbox.ErrInvalid)
		}
		name, err := langs.Environment(p)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(roots, func(r *dsecv1.CallRoot) bool { return r.GetEnvironment() == name }) {
			continue
		}
		e, err := s.g.layers.Resolve(ctx, rpc.Project(ctx), name)
		if err != nil {
			return nil, fmt.Errorf("program: environment of language %s: %w", cmp.Or(p.GetLang(), "cmd"), err)
		}
		r := &dsecv1.CallRoot{Environment: name, Env: rpc.EnvVars(e.Spec.Env, nil)}
		for _, id := range e.Layers {
			r.Layers = append(r.Layers, string(id))
		}
		roots = append(roots, r)
	}
	return roots, nil
}

// hashOf identifies a request with a key, before anything is resolved.
func hashOf(key string, q proto.Message) (string, error) {
	if key == "" {
		return "", nil
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(q)
	if err != nil {
		return "", fmt.Errorf("call: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// order is the order in which hosts are tried: by the key, or any where there is none, those that answer first.
func (s calls) order(f *placement.Fleet, project, job, key string) []sandbox.HostID {
	type scored struct {
		id    sandbox.HostID
		up    bool
		score uint64
	}
	all := make([]scored, 0, len(f.Hosts))
	r := s.g.random()
	for _, h := range f.Hosts {
		x := scored{id: h.ID, up: h.Up, score: r.Uint64()}
		if key != "" {
			sum := fnv.New64a()
			fmt.Fprintf(sum, "%s\x00%s\x00%s\x00%s", project, job, key, h.ID)
			x.score = sum.Sum64()
		}
		all = append(all, x)
	}
	slices.SortFunc(all, func(a, b scored) int {
		if a.up != b.up && key == "" {
			if a.up {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.score, b.score)
	})
	var ids []sandbox.HostID
	for _, x := range all {
		ids = append(ids, x.id)
	}
	return ids
}

// place sends a call to a host. One without a key may go to another when nothing was sent to the first, or when that takes nothing more.
func placeCall[Q, S any](ctx context.Context, s calls, job, key string, q *Q, of func(*rpc.Peer) unary[Q, S]) (*connect.Response[S], error) {
	s.g.ready(ctx)
	f := s.g.fleet.Fleet()
	var last error
	for _, id := range s.order(f, rpc.Project(ctx), job, key) {
		p, ok := s.g.fleet.Peer(id)
		if !ok {
			continue
		}
		// Calls change nothing outside themselves, so one may be sent again.
		resp, err := send(ctx, s.g, p, q, true, of(p))
		if err == nil {
			return resp, nil
		}
		last = err
		again := errors.Is(err, rpc.ErrUnavailable) || errors.Is(err, sandbox.ErrExhausted)
		if key != "" || !again || ctx.Err() != nil {
			return nil, err
		}
	}
	if last == nil {
		last = fmt.Errorf("no host answers (%d configured): %w", len(f.Hosts)+len(f.Nameless), rpc.ErrUnavailable)
	}
	return nil, last
}

func (s calls) Run(ctx context.Context, r *connect.Request[dsecv1.RunCallRequest]) (*connect.Response[dsecv1.RunCallResponse], error) {
	q := r.Msg
	var err error
	if q.Roots, q.RequestHash = nil, ""; q.Key != "" {
		if q.RequestHash, err = hashOf(q.Key, q); err != nil {
			return nil, err
		}
	}
	if q.Roots, err = s.roots(ctx, q.GetProgram()); err != nil {
		return nil, err
	}
	return placeCall(ctx, s, q.Job, q.Key, q, func(p *rpc.Peer) unary[dsecv1.RunCallRequest, dsecv1.RunCallResponse] { return p.Calls.Run })
}

func (s calls) RunBatch(ctx context.Context, r *connect.Request[dsecv1.RunCallBatchRequest]) (*connect.Response[dsecv1.RunCallBatchResponse], error) {
	q := r.Msg
	var err error
	if q.Roots, q.RequestHash = nil, ""; q.Key != "" {
		if q.RequestHash, err = hashOf(q.Key, q); err != nil {
			return nil, err
		}
	}
	if q.Roots, err = s.roots(ctx, q.GetProgram()); err != nil {
		return nil, err
	}
	return placeCall(ctx, s, q.Job, q.Key, q, func(p *rpc.Peer) unary[dsecv1.RunCallBatchRequest, dsecv1.RunCallBatchResponse] {
		return p.Calls.RunBatch
	})
}

func (s calls) RunPair(ctx context.Context, r *connect.Request[dsecv1.RunCallPairRequest]) (*connect.Response[dsecv1.RunCallPairResponse], error) {
	q := r.Msg
	var err error
	if q.Roots, q.RequestHash = nil, ""; q.Key != "" {
		if q.RequestHash, err = hashOf(q.Key, q); err != nil {
			return nil, err
		}
	}
	if q.Roots, err = s.roots(ctx, q.GetProgram().GetProgram(), q.GetInteractor().GetProgram()); err != nil {
		return nil, err
	}
	return placeCall(ctx, s, q.Job, q.Key, q, func(p *rpc.Peer) unary[dsecv1.RunCallPairRequest, dsecv1.RunCallPairResponse] {
		return p.Calls.RunPair
	})
}

// PutFile gives a file to all hosts, since a call may run on any.
func (s calls) PutFile(ctx context.Context, r *connect.Request[dsecv1.PutCallFileRequest]) (*connect.Response[dsecv1.PutCallFileResponse], error) {
	answers, errs, err := everywhere(ctx, s.g, 0, func(ctx context.Context, p *rpc.Peer) (*dsecv1.PutCallFileResponse, error) {
		resp, err := p.Calls.PutFile(ctx, connect.NewRequest(r.Msg))
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	})
	if err == nil && len(errs) > 0 {
		err = fmt.Errorf("put file: %w", rpc.FromCode(errs[0].Code, errs[0].Message))
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(answers[0]), nil
}

// GetFile asks all hosts: what a call kept lies where it ran.
func (s calls) GetFile(ctx context.Context, r *connect.Request[dsecv1.GetCallFileRequest]) (*connect.Response[dsecv1.GetCallFileResponse], error) {
	return whoHas(ctx, s.g, 0, r.Msg, func(p *rpc.Peer) unary[dsecv1.GetCallFileRequest, dsecv1.GetCallFileResponse] { return p.Calls.GetFile },
		fmt.Sprintf("content %.80s: was never kept, or had to make room", r.Msg.GetContent()))
}

func (s calls) Cancel(ctx context.Context, r *connect.Request[dsecv1.CancelCallRequest]) (*connect.Response[dsecv1.CancelCallResponse], error) {
	return whoHas(ctx, s.g, s.g.askTime, r.Msg, func(p *rpc.Peer) unary[dsecv1.CancelCallRequest, dsecv1.CancelCallResponse] { return p.Calls.Cancel },
		fmt.Sprintf("call %.80q: none is under way", r.Msg.GetKey()))
}

// whoHas asks all hosts for what one of them may have. Only when all say so, it is not found.
func whoHas[Q, S any](ctx context.Context, g *Gateway, limit time.Duration, q *Q, of func(*rpc.Peer) unary[Q, S], missing string) (*connect.Response[S], error) {
	answers, errs, err := everywhere(ctx, g, limit, func(ctx context.Context, p *rpc.Peer) (*S, error) {
		resp, err := of(p)(ctx, connect.NewRequest(q))
		if errors.Is(rpc.FromError(err), sandbox.ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	})
	if err != nil {
		return nil, err
	}
	for _, a := range answers {
		if a != nil {
			return connect.NewResponse(a), nil
		}
	}
	if len(errs) > 0 {
		return nil, rpc.FromCode(errs[0].Code, errs[0].Message)
	}
	return nil, fmt.Errorf("%s: %w", missing, sandbox.ErrNotFound)
}

// Languages tells which there are, and which can't be used since their environment is missing.
func (s calls) Languages(ctx context.Context, _ *connect.Request[dsecv1.ListCallLanguagesRequest]) (*connect.Response[dsecv1.ListCallLanguagesResponse], error) {
	langs, err := s.languages()
	if err != nil {
		return nil, err
	}
	r, err := langs.Proto()
	if err != nil {
		return nil, err
	}
	missing := map[string]string{}
	for _, l := range r.Languages {
		why, known := missing[l.Environment]
		if !known {
			if _, err := s.g.layers.Resolve(ctx, rpc.Project(ctx), l.Environment); err != nil {
				why = err.Error()
			}
			missing[l.Environment] = why
		}
		l.Missing = why
	}
	return connect.NewResponse(r), nil
}
