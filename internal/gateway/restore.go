package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/iam"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// restores is RestoreService. The host that has a trajectory makes its sandbox again; where that host is gone, another takes it over from
// the store. The work is a host's and goes on when a gateway dies: the same call through any gateway joins it.
type restores struct{ g *Gateway }

var _ dsecv1connect.RestoreServiceHandler = restores{}

func (s restores) Restore(ctx context.Context, r *connect.Request[dsecv1.RestoreRequest]) (*connect.Response[dsecv1.RestoreResponse], error) {
	q, g := r.Msg, s.g
	if q.Id == "" {
		q.Id = sandbox.NewKey()
	}
	if (q.Sandbox == "") == (q.Key == "") {
		return nil, fmt.Errorf("restore: give a sandbox's id, or job and key: %w", sandbox.ErrInvalid)
	}
	var lost sandbox.HostID
	if q.LostHost != "" {
		id, err := sandbox.ParseHostID(q.LostHost)
		if err != nil {
			return nil, fmt.Errorf("restore: lost_host: %w", err)
		}
		lost = id
	}
	g.ready(ctx)
	p, unsure, err := g.restorer(ctx, q, lost)
	if err != nil {
		return nil, err
	}
	hq := &dsecv1.HostRestoreRequest{Request: q}
	if p != nil {
		return g.restoreOn(ctx, p, hq)
	}
	if lost == "" {
		if q.Sandbox == "" {
			return nil, unsure
		}
		lost = sandbox.ID(q.Sandbox).Host()
	}
	return g.restoreLost(ctx, hq, lost)
}

func (g *Gateway) restoreOn(ctx context.Context, p *rpc.Peer, hq *dsecv1.HostRestoreRequest) (*connect.Response[dsecv1.RestoreResponse], error) {
	return send(ctx, g, p, hq, true, func(ctx context.Context, r *connect.Request[dsecv1.HostRestoreRequest]) (*connect.Response[dsecv1.RestoreResponse], error) {
		return p.Restores.Restore(ctx, r)
	})
}

// restorer is the host that has the trajectory; nil where none that answers has it, and then unsure says what could not be asked.
func (g *Gateway) restorer(ctx context.Context, q *dsecv1.RestoreRequest, lost sandbox.HostID) (p *rpc.Peer, unsure, err error) {
	if q.Sandbox == "" {
		if err := sandbox.CheckKey("key", q.Key); err != nil {
			return nil, nil, err
		}
		sb, p, err := g.findOrRecall(ctx, g.fleet.Fleet(), finding{job: q.Job, key: q.Key})
		switch {
		case err != nil && errors.Is(err, rpc.ErrUnavailable):
			return nil, err, nil
		case err != nil:
			return nil, nil, err
		case sb == nil && lost == "":
			return nil, nil, notFoundKey(q.Job, q.Key)
		case sb == nil:
			return nil, nil, nil
		}
		return p, nil, nil
	}
	id, perr := sandbox.ParseID(q.Sandbox)
	if perr != nil {
		return nil, nil, fmt.Errorf("restore: %w", perr)
	}
	if p, ok := g.fleet.Peer(id.Host()); ok && g.seemsUp(p) {
		if lost == id.Host() {
			return nil, nil, fmt.Errorf("restore: lost_host %s: it answers, so it is not lost: %w", lost, sandbox.ErrState)
		}
		if !g.hasMoved(p) {
			return p, nil, nil
		}
		if _, next, err := g.follow(ctx, finding{id: id}, p); err == nil && next != nil {
			p = next
		}
		return p, nil, nil
	}
	return g.movedTo(ctx, id), nil, nil
}

// movedTo finds the host that goes on with the trajectory of a sandbox whose own host is gone; nil where none that answers does.
func (g *Gateway) movedTo(ctx context.Context, id sandbox.ID) *rpc.Peer {
	f := g.fleet.Fleet()
	var up []sandbox.HostID
	for _, h := range f.Hosts {
		if h.Up && h.ID != id.Host() {
			up = append(up, h.ID)
		}
	}
	found := make([]*rpc.Peer, len(up))
	if each(ctx, len(up), func(ctx context.Context, i int) {
		resp, p, err := ask(ctx, g, up[i], g.askTime, func(ctx context.Context, p *rpc.Peer) (*connect.Response[dsecv1.FindKeyResponse], error) {
			return p.Host.FindKey(ctx, connect.NewRequest(&dsecv1.FindKeyRequest{Sandbox: string(id)}))
		})
		if err == nil && resp.Msg.GetSandbox().GetId() != "" && resp.Msg.GetMovedTo() == "" {
			found[i] = p
		}
	}) != nil {
		return nil
	}
	for _, p := range found {
		if p != nil {
			return p
		}
	}
	return nil
}

// restoreLost has a host take a trajectory over from one that is gone: the first in an order that the trajectory fixes, so that calls of
// several gateways meet on one host. Of two that meet on different hosts, the store decides.
func (g *Gateway) restoreLost(ctx context.Context, hq *dsecv1.HostRestoreRequest, lost sandbox.HostID) (*connect.Response[dsecv1.RestoreResponse], error) {
	q := hq.Request
	hq.LostHost = string(lost)
	f := g.fleet.Fleet()
	for _, h := range f.Hosts {
		if h.ID != lost {
			continue
		}
		if h.Up {
			return nil, fmt.Errorf("restore: host %s answers, so it is not lost: %w", lost, sandbox.ErrState)
		}
		if !h.At.IsZero() {
			hq.SilentMs = time.Since(h.At).Milliseconds()
		}
	}
	// Giving a host up ends what it has of every project, so that is said by who has them all, or by the operator's lost_after.
	switch project := rpc.Project(ctx); {
	case slices.Contains(g.lostHosts(f, time.Now()), lost):
		hq.SilentMs = -1
	case project == iam.DefaultProject && q.LostHost == string(lost):
		hq.SilentMs = -1
	case project != iam.DefaultProject && q.LostHost == string(lost):
		return nil, fmt.Errorf("restore: lost_host: a host holds sandboxes of all projects: want a key of project %s, not of %.200s: %w",
			iam.DefaultProject, project, sandbox.ErrDenied)
	case project != iam.DefaultProject:
		return nil, fmt.Errorf("restore: host %s does not answer (silent for %v), so whether the sandbox is gone is not known: wait until it is back, until the operator's gateway.lost_after is over, or until who holds a key of project %s gives it up: %w",
			lost, (time.Duration(hq.SilentMs) * time.Millisecond).Round(time.Second), iam.DefaultProject, sandbox.ErrState)
	}
	order := orderOf(q.Job, q.Key, "")
	if q.Sandbox != "" {
		order = "s/" + q.Sandbox
	}
	var last error
	for _, id := range placement.Order(f, order) {
		p, ok := g.fleet.Peer(id)
		if !ok || id == lost || !g.seemsUp(p) {
			continue
		}
		resp, err := g.restoreOn(ctx, p, hq)
		// Also what is full or can't: nothing of it is begun there.
		if err == nil || !errors.Is(err, sandbox.ErrUnsupported) {
			return resp, err
		}
		last = err
	}
	if last != nil {
		return nil, last
	}
	return nil, fmt.Errorf("restore: no host answers that could take over from %s: %w", lost, rpc.ErrUnavailable)
}
