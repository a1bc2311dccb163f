package gateway

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// sandboxes is SandboxService.
type sandboxes struct{ g *Gateway }

var _ dsecv1connect.SandboxServiceHandler = sandboxes{}

func (s sandboxes) Get(ctx context.Context, r *connect.Request[dsecv1.GetRequest]) (*connect.Response[dsecv1.GetResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Id, true, func(p *rpc.Peer) unary[dsecv1.GetRequest, dsecv1.GetResponse] { return p.Sandboxes.Get })
}

func (s sandboxes) SetLifetime(ctx context.Context, r *connect.Request[dsecv1.SetLifetimeRequest]) (*connect.Response[dsecv1.SetLifetimeResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Id, true, func(p *rpc.Peer) unary[dsecv1.SetLifetimeRequest, dsecv1.SetLifetimeResponse] {
		return p.Sandboxes.SetLifetime
	})
}

func (s sandboxes) Stats(ctx context.Context, r *connect.Request[dsecv1.StatsRequest]) (*connect.Response[dsecv1.StatsResponse], error) {
	return forward(ctx, s.g, r.Msg, &r.Msg.Id, true, func(p *rpc.Peer) unary[dsecv1.StatsRequest, dsecv1.StatsResponse] { return p.Sandboxes.Stats })
}

// Snapshot lets the host make the layer and gives it its name here, where the names are kept.
func (s sandboxes) Snapshot(ctx context.Context, r *connect.Request[dsecv1.SnapshotRequest]) (*connect.Response[dsecv1.SnapshotResponse], error) {
	name := r.Msg.Publish
	if name != "" {
		if err := layer.CheckName("publish", name); err != nil {
			return nil, err
		}
	}
	if r.Msg.Step == "" {
		r.Msg.Step = sandbox.NewKey()
	}
	r.Msg.Publish = ""
	resp, err := forward(ctx, s.g, r.Msg, &r.Msg.Id, true, func(p *rpc.Peer) unary[dsecv1.SnapshotRequest, dsecv1.SnapshotResponse] { return p.Sandboxes.Snapshot })
	if err != nil {
		return nil, err
	}
	id, err := layer.ParseID(resp.Msg.GetLayer())
	if err != nil {
		return nil, fmt.Errorf("snapshot: the host answered: %w", err)
	}
	// Hosts know layers, not whose they are.
	if err := s.g.layers.Hold(ctx, rpc.Project(ctx), id); err != nil || name == "" {
		return resp, err
	}
	// A call that is sent again must not make a second version.
	if v, err := s.g.layers.Lookup(ctx, rpc.Project(ctx), name); err == nil && v.ID == id && v.Project == rpc.Project(ctx) {
		resp.Msg.Published = v.Ref()
		return resp, nil
	}
	v, err := s.g.layers.Publish(ctx, rpc.Project(ctx), name, id)
	if err != nil {
		return nil, fmt.Errorf("snapshot is layer %s, but has no name: %w", id, err)
	}
	resp.Msg.Published = v.Ref()
	return resp, nil
}

// Capabilities tells what each host's backends can do.
func (s sandboxes) Capabilities(ctx context.Context, _ *connect.Request[dsecv1.CapabilitiesRequest]) (*connect.Response[dsecv1.CapabilitiesResponse], error) {
	s.g.ready(ctx)
	out := &dsecv1.CapabilitiesResponse{}
	for _, h := range s.g.fleet.Fleet().Hosts {
		for _, c := range h.Backends {
			out.Backends = append(out.Backends, rpc.CapabilitiesProto(c, h.ID))
		}
	}
	return connect.NewResponse(out), nil
}

const (
	defaultPage = 100
	maxPage     = 1000
)

// cursor is a page token: where the list goes on. Hosts are listed in the order of their IDs, so that one that joins or leaves shifts no
// page of another.
type cursor struct {
	Host  sandbox.HostID `json:"h"`
	Token string         `json:"t,omitempty"`
}

func (c cursor) String() string {
	b, _ := json.Marshal(c)
	return base64.RawURLEncoding.EncodeToString(b)
}

func parseCursor(s string) (c cursor, err error) {
	if s == "" {
		return c, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil || len(s) > 4096 {
		return c, fmt.Errorf("page_token %.40q: not one of ours: %w", s, sandbox.ErrInvalid)
	}
	return c, nil
}

func pageSize(n int32) (int32, error) {
	switch {
	case n < 0 || n > maxPage:
		return 0, fmt.Errorf("page_size %d: want 1 to %d, or 0 for %d: %w", n, maxPage, defaultPage, sandbox.ErrInvalid)
	case n == 0:
		return defaultPage, nil
	}
	return n, nil
}

// List goes through the hosts one after the other. A host that can't be asked is told, and what it holds is missing.
func (s sandboxes) List(ctx context.Context, r *connect.Request[dsecv1.ListRequest]) (*connect.Response[dsecv1.ListResponse], error) {
	size, err := pageSize(r.Msg.GetPageSize())
	if err != nil {
		return nil, err
	}
	at, err := parseCursor(r.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	if err := checkStates(r.Msg.GetSelector().GetStates()); err != nil {
		return nil, err
	}
	s.g.ready(ctx)
	f := s.g.fleet.Fleet()
	if len(f.Hosts) == 0 {
		return nil, fmt.Errorf("list: no host answers: %w", rpc.ErrUnavailable)
	}
	out := &dsecv1.ListResponse{}
	if r.Msg.GetPageToken() == "" {
		for _, a := range f.Nameless {
			out.Errors = append(out.Errors, itemError(a, fmt.Errorf("host at %s: did not answer so far: %w", a, rpc.ErrUnavailable)))
		}
	}
	for i, h := range f.Hosts {
		if h.ID < at.Host {
			continue
		}
		token := ""
		if h.ID == at.Host {
			token = at.Token
		}
		for {
			q := proto.Clone(r.Msg).(*dsecv1.ListRequest)
			q.PageSize, q.PageToken = size-int32(len(out.Sandboxes)), token
			resp, _, err := ask(ctx, s.g, h.ID, s.g.askTime, func(ctx context.Context, p *rpc.Peer) (*connect.Response[dsecv1.ListResponse], error) {
				return p.Sandboxes.List(ctx, connect.NewRequest(q))
			})
			if err != nil {
				if !errors.Is(err, rpc.ErrUnavailable) {
					return nil, err
				}
				out.Errors = append(out.Errors, itemError(string(h.ID), err))
				break
			}
			out.Sandboxes = append(out.Sandboxes, resp.Msg.GetSandboxes()...)
			token = resp.Msg.GetNextPageToken()
			if token == "" || int32(len(out.Sandboxes)) >= size {
				break
			}
		}
		if int32(len(out.Sandboxes)) >= size {
			switch {
			case token != "":
				out.NextPageToken = cursor{h.ID, token}.String()
			case i+1 < len(f.Hosts):
				out.NextPageToken = cursor{Host: f.Hosts[i+1].ID}.String()
			}
			break
		}
	}
	return connect.NewResponse(out), nil
}

func (s sandboxes) Stop(ctx context.Context, r *connect.Request[dsecv1.StopRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	out, err := s.g.stop(ctx, r.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(out), nil
}

func (g *Gateway) stop(ctx context.Context, q *dsecv1.StopRequest) (*dsecv1.SelectorResult, error) {
	given := 0
	for _, set := range []bool{q.Id != "", q.Key != "", q.Selector != nil} {
		if set {
			given++
		}
	}
	if given == 0 && q.Name != "" {
		q.Id, q.Name, given = q.Name, "", 1
	}
	if given != 1 {
		return nil, fmt.Errorf("stop: give an id or name, or a key with its job, or a selector: %w", sandbox.ErrInvalid)
	}
	switch {
	case q.Id != "":
		resp, err := forward(ctx, g, q, &q.Id, true, func(p *rpc.Peer) unary[dsecv1.StopRequest, dsecv1.SelectorResult] { return p.Sandboxes.Stop })
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	case q.Key != "":
		if err := sandbox.CheckKey("key", q.Key); err != nil {
			return nil, err
		}
		// All hosts are told: the one that has the sandbox stops it, the others refuse a create with that key for a while, so that one
		// on its way can't be born after this.
		return g.selectorCall(ctx, nil, func(ctx context.Context, p *rpc.Peer, _ *dsecv1.Selector) (*connect.Response[dsecv1.SelectorResult], error) {
			return p.Sandboxes.Stop(ctx, connect.NewRequest(q))
		})
	}
	return g.selectorCall(ctx, q.Selector, func(ctx context.Context, p *rpc.Peer, sel *dsecv1.Selector) (*connect.Response[dsecv1.SelectorResult], error) {
		return p.Sandboxes.Stop(ctx, connect.NewRequest(&dsecv1.StopRequest{Selector: sel}))
	})
}

func (s sandboxes) Pause(ctx context.Context, r *connect.Request[dsecv1.PauseRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	q := r.Msg
	if err := one(q.Id, q.Selector); err != nil {
		return nil, fmt.Errorf("pause: %w", err)
	}
	if q.Id != "" {
		return forward(ctx, s.g, q, &q.Id, true, func(p *rpc.Peer) unary[dsecv1.PauseRequest, dsecv1.SelectorResult] { return p.Sandboxes.Pause })
	}
	return response(s.g.selectorCall(ctx, q.Selector, func(ctx context.Context, p *rpc.Peer, sel *dsecv1.Selector) (*connect.Response[dsecv1.SelectorResult], error) {
		return p.Sandboxes.Pause(ctx, connect.NewRequest(&dsecv1.PauseRequest{Selector: sel, Level: q.Level}))
	}))
}

func (s sandboxes) Resume(ctx context.Context, r *connect.Request[dsecv1.ResumeRequest]) (*connect.Response[dsecv1.SelectorResult], error) {
	q := r.Msg
	if err := one(q.Id, q.Selector); err != nil {
		return nil, fmt.Errorf("resume: %w", err)
	}
	if q.Id != "" {
		return forward(ctx, s.g, q, &q.Id, true, func(p *rpc.Peer) unary[dsecv1.ResumeRequest, dsecv1.SelectorResult] { return p.Sandboxes.Resume })
	}
	return response(s.g.selectorCall(ctx, q.Selector, func(ctx context.Context, p *rpc.Peer, sel *dsecv1.Selector) (*connect.Response[dsecv1.SelectorResult], error) {
		return p.Sandboxes.Resume(ctx, connect.NewRequest(&dsecv1.ResumeRequest{Selector: sel}))
	}))
}

func response[S any](m *S, err error) (*connect.Response[S], error) {
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(m), nil
}

func one(id string, sel *dsecv1.Selector) error {
	if (id != "") == (sel != nil) {
		return fmt.Errorf("give an id or name, or a selector: %w", sandbox.ErrInvalid)
	}
	return nil
}

// selectorCall makes a group call on all hosts at once and adds up what they answer. A selector by IDs or names goes only where they are.
func (g *Gateway) selectorCall(ctx context.Context, sel *dsecv1.Selector, call func(context.Context, *rpc.Peer, *dsecv1.Selector) (*connect.Response[dsecv1.SelectorResult], error)) (*dsecv1.SelectorResult, error) {
	if sel != nil {
		if err := checkSelector(sel); err != nil {
			return nil, err
		}
		if len(sel.Ids) > 0 {
			return g.byIDs(ctx, sel, call)
		}
	}
	answers, errs, err := everywhere(ctx, g, 0, func(ctx context.Context, p *rpc.Peer) (*dsecv1.SelectorResult, error) {
		resp, err := call(ctx, p, sel)
		if err != nil {
			return nil, err
		}
		return resp.Msg, nil
	})
	if err != nil {
		return nil, err
	}
	return merge(answers, errs, len(answers) == 0)
}

// merge adds up; when no host answered at all, the first reason is the error of the call.
func merge(answers []*dsecv1.SelectorResult, errs []*dsecv1.ItemError, none bool) (*dsecv1.SelectorResult, error) {
	if none && len(errs) > 0 {
		return nil, rpc.FromCode(errs[0].Code, errs[0].Message)
	}
	out := &dsecv1.SelectorResult{}
	for _, a := range answers {
		out.Sandboxes = append(out.Sandboxes, a.GetSandboxes()...)
		out.Errors = append(out.Errors, a.GetErrors()...)
	}
	out.Errors = append(out.Errors, errs...)
	return out, nil
}

const maxSelected = 10000

func checkSelector(s *dsecv1.Selector) error {
	switch {
	case len(s.Ids) == 0 && s.Job == "" && len(s.Labels) == 0 && len(s.States) == 0:
		return fmt.Errorf("selector: is empty and would match everything; set ids, job, labels or states: %w", sandbox.ErrInvalid)
	case len(s.Ids) > maxSelected:
		return fmt.Errorf("selector.ids: %d given, at most %d: %w", len(s.Ids), maxSelected, sandbox.ErrInvalid)
	}
	return checkStates(s.States)
}

func checkStates(states []string) error {
	for _, st := range states {
		if !slices.Contains([]sandbox.State{sandbox.Creating, sandbox.Running, sandbox.Pausing, sandbox.Paused, sandbox.Resuming, sandbox.Stopping, sandbox.Stopped, sandbox.Failed}, sandbox.State(st)) {
			return fmt.Errorf("selector.states %.80q: no state of a sandbox (creating, running, pausing, paused, resuming, stopping, stopped, failed): %w", st, sandbox.ErrInvalid)
		}
	}
	return nil
}

func (g *Gateway) byIDs(ctx context.Context, sel *dsecv1.Selector, call func(context.Context, *rpc.Peer, *dsecv1.Selector) (*connect.Response[dsecv1.SelectorResult], error)) (*dsecv1.SelectorResult, error) {
	peers, refs := make([]*rpc.Peer, len(sel.Ids)), make([]string, len(sel.Ids))
	failed := make([]error, len(sel.Ids))
	if err := each(ctx, len(sel.Ids), func(ctx context.Context, i int) {
		refs[i], peers[i], failed[i] = g.surely(ctx, sel.Ids[i])
	}); err != nil {
		return nil, err
	}
	var errs []*dsecv1.ItemError
	var order []*rpc.Peer
	groups := map[*rpc.Peer][]string{}
	for i := range sel.Ids {
		if failed[i] != nil {
			errs = append(errs, itemError(sel.Ids[i], failed[i]))
			continue
		}
		if groups[peers[i]] == nil {
			order = append(order, peers[i])
		}
		groups[peers[i]] = append(groups[peers[i]], refs[i])
	}
	answers, lost := make([]*dsecv1.SelectorResult, len(order)), make([]error, len(order))
	if err := each(ctx, len(order), func(ctx context.Context, i int) {
		part := proto.Clone(sel).(*dsecv1.Selector)
		part.Ids = groups[order[i]]
		resp, err := call(ctx, order[i], part)
		if err != nil {
			lost[i] = named(rpc.FromError(err), order[i], rpc.Unsent(err))
			return
		}
		answers[i] = resp.Msg
	}); err != nil {
		return nil, err
	}
	for i, e := range lost {
		if e != nil {
			for _, ref := range groups[order[i]] {
				errs = append(errs, itemError(ref, e))
			}
		}
	}
	return merge(slices.DeleteFunc(answers, func(a *dsecv1.SelectorResult) bool { return a == nil }), errs, false)
}
