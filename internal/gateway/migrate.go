package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A move is carried from one host to another by a gateway, which decides nothing: the source gives the sandbox away in one act (Conclude), when
// the target has all of it. A gateway that dies leaves an arrival at the target; every gateway settles those by what the source says. IDs
// keep the name of their first host, which remembers to whom it gave a sandbox, and so on from host to host.

const (
	migrateTime = 15 * time.Minute // of one call; the sandbox stands still for most of it
	settleTime  = 2 * time.Minute  // of what follows when all has arrived: it goes on when the caller leaves
	settleEvery = 2 * time.Second
	settleAge   = 5 * time.Second // of an arrival that no gateway seems to be at
	maxHops     = 8               // from host to host
	maxHomes    = 100_000
)

// homes remembers where sandboxes are that are not on the host that their ID names.
type homes struct {
	mu  sync.Mutex
	all map[sandbox.ID]sandbox.HostID
}

func (h *homes) get(id sandbox.ID) (sandbox.HostID, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	at, ok := h.all[id]
	return at, ok
}

func (h *homes) put(id sandbox.ID, at sandbox.HostID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.all == nil || len(h.all) >= maxHomes {
		h.all = map[sandbox.ID]sandbox.HostID{}
	}
	if h.all[id] = at; at == id.Host() {
		delete(h.all, id)
	}
}

func (h *homes) drop(id sandbox.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.all, id)
}

// Migrate moves a sandbox to another host.
func (s sandboxes) Migrate(ctx context.Context, r *connect.Request[dsecv1.MigrateRequest]) (*connect.Response[dsecv1.MigrateResponse], error) {
	out, err := s.g.migrate(ctx, r.Msg)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	return connect.NewResponse(out), nil
}

func (g *Gateway) migrate(ctx context.Context, q *dsecv1.MigrateRequest) (*dsecv1.MigrateResponse, error) {
	to := sandbox.HostID("")
	if q.GetTo() != "" {
		id, err := sandbox.ParseHostID(q.GetTo())
		if err != nil {
			return nil, fmt.Errorf("to: %w", err)
		}
		to = id
	}
	g.ready(ctx)
	ref, p, err := g.surely(ctx, q.GetId())
	if err != nil {
		return nil, err
	}
	if to != "" {
		if _, ok := g.fleet.Peer(to); !ok {
			return nil, fmt.Errorf("to %s: no host of this gateway: %w", to, sandbox.ErrNotFound)
		}
	}
	got, err := send(ctx, g, p, &dsecv1.GetRequest{Id: ref}, true, p.Sandboxes.Get)
	if err != nil {
		return nil, err
	}
	at := sandbox.HostID(got.Msg.GetSandbox().GetHost())
	if to == at {
		return &dsecv1.MigrateResponse{Sandbox: got.Msg.GetSandbox(), From: string(at)}, nil
	}
	facts, err := send(ctx, g, p, &dsecv1.SurveyRequest{Sandbox: ref}, true, p.Moves.Survey)
	if err != nil {
		return nil, err
	}
	target, t, err := g.target(ctx, facts.Msg, to)
	if err != nil {
		return nil, err
	}
	sb, err := g.move(ctx, p, t, facts.Msg, target)
	if err != nil {
		return nil, err
	}
	return &dsecv1.MigrateResponse{Sandbox: sb, From: facts.Msg.GetHost()}, nil
}

// target finds a host that takes the sandbox: the one that is named, or the first that fits.
func (g *Gateway) target(ctx context.Context, f *dsecv1.MoveFacts, to sandbox.HostID) (sandbox.HostID, *rpc.Peer, error) {
	hosts := []sandbox.HostID{to}
	var why []string
	if to == "" {
		fleet := g.fleet.Fleet()
		if len(fleet.Hosts) < 2 {
			return "", nil, fmt.Errorf("this gateway has one host alone: %w", sandbox.ErrUnsupported)
		}
		d := placement.Pick(fleet, &placement.Request{Backend: f.GetBackend(), Network: sandbox.NetworkMode(f.GetNetwork()), Disk: f.GetSize()}, &placement.Recent{}, time.Now(), g.random())
		for _, r := range d.Refused {
			if r.Host != sandbox.HostID(f.GetHost()) {
				why = append(why, fmt.Sprintf("host %s %s", r.Host, r.Reason))
			}
		}
		hosts = d.Hosts
	}
	last := sandbox.ErrUnsupported
	for _, id := range hosts {
		p, ok := g.fleet.Peer(id)
		if !ok || id == sandbox.HostID(f.GetHost()) {
			continue
		}
		err := g.settleArrivals(ctx, p, func(a *dsecv1.Arrival) bool { return a.GetSandbox() == f.GetSandbox() })
		if err == nil {
			_, err = send(ctx, g, p, &dsecv1.AdmitRequest{Facts: f}, true, p.Moves.Admit)
		}
		if err == nil {
			return id, p, nil
		}
		if to != "" {
			return "", nil, err
		}
		if ctx.Err() != nil {
			return "", nil, ctx.Err()
		}
		last = err
		why = append(why, err.Error())
	}
	return "", nil, rpc.FromCode(rpc.CodeName(last), fmt.Sprintf("no host takes sandbox %s: %s", f.GetSandbox(), strings.Join(why, "; ")))
}

// move carries a sandbox from p to t, and answers it as it is there.
func (g *Gateway) move(ctx context.Context, p, t *rpc.Peer, f *dsecv1.MoveFacts, to sandbox.HostID) (*dsecv1.Sandbox, error) {
	nonce := sandbox.NewKey()
	conclude := &dsecv1.ConcludeRequest{Sandbox: f.GetSandbox(), Nonce: nonce}
	settle := &dsecv1.SettleRequest{Sandbox: f.GetSandbox(), Nonce: nonce}
	way, cut := context.WithCancel(ctx)
	defer cut()
	carried := g.carry(way, cut, p, t, &dsecv1.DepartRequest{Sandbox: f.GetSandbox(), Nonce: nonce, To: string(to)})
	// What follows is short, and done also when the caller has left.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTime)
	defer cancel()
	conclude.Commit = carried == nil
	done, err := send(ctx, g, p, conclude, true, p.Moves.Conclude)
	if err != nil {
		if carried != nil {
			return nil, carried
		}
		return nil, fmt.Errorf("all of sandbox %s is at host %s, whether %s gave it away is not known; the same call finishes that: %w", f.GetSandbox(), to, f.GetHost(), err)
	}
	settle.Take = done.Msg.GetMoved()
	out, err := send(ctx, g, t, settle, true, t.Moves.Settle)
	switch {
	case carried != nil:
		return nil, carried
	case !settle.Take:
		return nil, fmt.Errorf("sandbox %s changed or ended meanwhile, and was not moved: %w", f.GetSandbox(), sandbox.ErrState)
	}
	g.homes.put(sandbox.ID(f.GetSandbox()), to)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s is host %s's now; the next call for it begins there: %w", f.GetSandbox(), to, err)
	}
	return out.Msg.GetSandbox(), nil
}

// carry passes all parts on. Without an error the target has them on its disk, and the source waits for what is concluded until cut ends the context.
func (g *Gateway) carry(ctx context.Context, cut func(), p, t *rpc.Peer, q *dsecv1.DepartRequest) error {
	in, err := p.Moves.Depart(ctx, connect.NewRequest(q))
	if err != nil {
		return named(rpc.FromError(err), p, rpc.Unsent(err))
	}
	var out *connect.ClientStreamForClient[dsecv1.MovePart, dsecv1.ArriveResponse]
	for in.Receive() {
		if out == nil {
			out = t.Moves.Arrive(ctx)
		}
		if out.Send(in.Msg()) != nil || in.Msg().GetEnd() != nil {
			break // all was sent, or the target has answered; what, CloseAndReceive tells
		}
	}
	if err := in.Err(); err != nil {
		if out != nil {
			abandon(cut, out)
		}
		return named(rpc.FromError(err), p, false)
	}
	if out == nil {
		return fmt.Errorf("host at %s sent nothing: %w", p.Addr, rpc.ErrUnavailable)
	}
	if _, err := out.CloseAndReceive(); err != nil {
		return named(rpc.FromError(err), t, rpc.Unsent(err))
	}
	return nil
}

// settleArrivals ends moves to a host that nobody ended: as their sources say, which end those that they have not given away.
func (g *Gateway) settleArrivals(ctx context.Context, t *rpc.Peer, which func(*dsecv1.Arrival) bool) error {
	list, err := send(ctx, g, t, &dsecv1.ArrivalsRequest{}, true, t.Moves.Arrivals)
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range list.Msg.GetArrivals() {
		if !which(a) {
			continue
		}
		ctx := rpc.WithProject(ctx, a.GetProject())
		p, ok := g.fleet.Peer(sandbox.HostID(a.GetFrom()))
		if (!ok || !g.seemsUp(p)) && g.movedTo(ctx, sandbox.ID(a.GetSandbox())) != nil { // restored from what the source recorded, which was shut out
			if _, err := send(ctx, g, t, &dsecv1.SettleRequest{Sandbox: a.GetSandbox(), Nonce: a.GetNonce()}, true, t.Moves.Settle); err != nil {
				errs = append(errs, fmt.Errorf("discard what came of sandbox %s: %w", a.GetSandbox(), err))
			}
			continue
		}
		if !ok {
			errs = append(errs, fmt.Errorf("sandbox %s came to host at %s from %s, which alone knows whose it is: %w", a.GetSandbox(), t.Addr, a.GetFrom(), rpc.ErrUnavailable))
			continue
		}
		done, err := send(ctx, g, p, &dsecv1.ConcludeRequest{Sandbox: a.GetSandbox(), Nonce: a.GetNonce()}, true, p.Moves.Conclude)
		if err == nil {
			_, err = send(ctx, g, t, &dsecv1.SettleRequest{Sandbox: a.GetSandbox(), Nonce: a.GetNonce(), Take: done.Msg.GetMoved()}, true, t.Moves.Settle)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("settle the move of sandbox %s: %w", a.GetSandbox(), err))
		}
	}
	return errors.Join(errs...)
}

// Run settles moves whose gateways died, until the context ends.
func (g *Gateway) Run(ctx context.Context) error {
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		for _, h := range g.fleet.Fleet().Hosts {
			t, ok := g.fleet.Peer(h.ID)
			if !ok || !h.Up || h.Arrivals == 0 {
				continue
			}
			one, cancel := context.WithTimeout(ctx, settleTime)
			err := g.settleArrivals(one, t, func(a *dsecv1.Arrival) bool { return time.Duration(a.GetAgeMs())*time.Millisecond > settleAge })
			cancel()
			if err != nil && ctx.Err() == nil {
				g.log.Warn("settle moves to a host", "host", h.ID, "err", err)
			}
		}
	}
}

// errOver says that the host to which a sandbox went does not know it any more, or was given up.
var errOver = errors.New("it is over")

// follow finds where a sandbox is that a host did not have, or had no longer: nil where no host says that it was given to another. What was given
// and not yet taken is taken. Where it is no more, the error is errOver and ErrNotFound.
func (g *Gateway) follow(ctx context.Context, what finding, p *rpc.Peer) (*dsecv1.Sandbox, *rpc.Peer, error) {
	first, id := p, what.id
	for range maxHops {
		resp, err := send(ctx, g, p, &dsecv1.FindKeyRequest{Job: what.job, Key: what.key, Name: what.name, Sandbox: string(what.id)}, true, p.Host.FindKey)
		if p != first && errors.Is(err, sandbox.ErrNotFound) {
			addr := p.Addr
			if p = g.movedTo(ctx, id); p == nil { // nobody restored it
				return nil, nil, fmt.Errorf("sandbox %s went to host at %s: %w: %w", what, addr, errOver, err)
			}
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		to := sandbox.HostID(resp.Msg.GetMovedTo())
		id = sandbox.ID(resp.Msg.GetSandbox().GetId())
		if to == "" {
			if p == first {
				return nil, nil, nil
			}
			g.homes.put(id, sandbox.HostID(resp.Msg.GetSandbox().GetHost()))
			return resp.Msg.GetSandbox(), p, nil
		}
		next, ok := g.fleet.Peer(to)
		if !ok || !g.seemsUp(next) {
			if p = g.movedTo(ctx, id); p == nil { // nobody restored it
				return nil, nil, g.wentAway(id, to, ok)
			}
			continue
		}
		_, err = send(ctx, g, next, &dsecv1.SettleRequest{Sandbox: string(id), Nonce: resp.Msg.GetMove(), Take: true}, true, next.Moves.Settle)
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) { // it was taken and has moved on, or is over and forgotten
			return nil, nil, err
		}
		p = next
	}
	return nil, nil, fmt.Errorf("sandbox %s went from host to host %d times: %w", what, maxHops, rpc.ErrUnavailable)
}

// wentAway says that a sandbox went to a host that can't be asked.
func (g *Gateway) wentAway(id sandbox.ID, to sandbox.HostID, known bool) error {
	f := g.fleet.Fleet()
	if !known && len(f.Nameless) == 0 || slices.Contains(g.lostHosts(f, time.Now()), to) {
		return fmt.Errorf("sandbox %s went to host %s, which was given up: %w: %w", id, to, errOver, sandbox.ErrNotFound)
	}
	return fmt.Errorf("sandbox %s went to host %s, which does not answer: %w", id, to, rpc.ErrUnavailable)
}

// astray says where the sandbox is when a host's answer means that it is elsewhere; else the error that is to be told.
func (g *Gateway) astray(ctx context.Context, ref string, p *rpc.Peer, err error) (*rpc.Peer, error) {
	id, perr := sandbox.ParseID(ref)
	may := errors.Is(err, rpc.ErrUnavailable) || errors.Is(err, sandbox.ErrNotFound) && g.hasMoved(p) // not found are also files and the like
	if perr != nil || !may || ctx.Err() != nil || !g.seemsUp(p) {
		return nil, err
	}
	if at, ok := g.homes.get(id); ok { // it may have moved on, or back
		if q, ok := g.fleet.Peer(at); ok && q.Addr == p.Addr {
			g.homes.drop(id)
		}
	}
	_, next, ferr := g.follow(ctx, finding{id: id}, p)
	if errors.Is(ferr, errOver) {
		err = ferr
	}
	return next, err
}

// surely is locate for calls that can't be sent again to where a sandbox went: the host is asked before.
func (g *Gateway) surely(ctx context.Context, ref string) (string, *rpc.Peer, error) {
	ref, p, err := g.locate(ctx, ref)
	if err != nil {
		return ref, p, err
	}
	id, perr := sandbox.ParseID(ref)
	if perr != nil || !g.hasMoved(p) {
		return ref, p, nil
	}
	_, next, err := g.follow(ctx, finding{id: id}, p)
	switch {
	case errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, errOver):
		return ref, p, nil // the call itself tells
	case err != nil:
		return "", nil, err
	case next != nil:
		return ref, next, nil
	}
	return ref, p, nil
}

// hasMoved says whether a host gave any sandbox away.
func (g *Gateway) hasMoved(p *rpc.Peer) bool {
	for _, h := range g.fleet.Fleet().Hosts {
		if h.Addr == p.Addr {
			return h.Moved > 0
		}
	}
	return false
}
