package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A host that does not answer may hold the sandbox of a key, so a create with that key is refused, for as long as it takes. Where the
// operator gave a time after which a silent host is lost (Config.LostAfter), creates and restores go on after it: another host shuts the
// silent one out of the store, which ends what it has should it return, and takes over what the store has of the key.

// lostHosts are those that have been silent for so long that they are lost. A host that never answered this gateway is not among them: its
// identity is not known.
func (g *Gateway) lostHosts(f *placement.Fleet, now time.Time) (lost []sandbox.HostID) {
	if g.cfg.LostAfter <= 0 {
		return nil
	}
	for _, h := range f.Hosts {
		if !h.Up && !h.At.IsZero() && now.Sub(h.At) > g.cfg.LostAfter {
			lost = append(lost, h.ID)
		}
	}
	return lost
}

func without(all, left []sandbox.HostID) []sandbox.HostID {
	if len(left) == 0 {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(id sandbox.HostID) bool { return slices.Contains(left, id) })
}

// recall has one host take over what lost hosts had of a key, and answers the sandbox, which has ended; nil where none of them had it. The
// host is the first of the list, so that gateways that ask at the same time meet there and creates of the key go there too.
func (g *Gateway) recall(ctx context.Context, hosts, lost []sandbox.HostID, what finding) (*dsecv1.Sandbox, *rpc.Peer, error) {
	for _, l := range lost {
		err := fmt.Errorf("no host answers that could take over from %s: %w", l, rpc.ErrUnavailable)
		for _, id := range hosts {
			p, ok := g.fleet.Peer(id)
			if !ok || id == l || !g.seemsUp(p) {
				continue
			}
			resp, rerr := send(ctx, g, p, &dsecv1.RecallRequest{LostHost: string(l), Job: what.job, Key: what.key}, true, p.Restores.Recall)
			if err = rerr; err == nil {
				return resp.Msg.GetSandbox(), p, nil
			}
			break
		}
		if !errors.Is(err, sandbox.ErrNotFound) {
			return nil, nil, fmt.Errorf("host %s has been silent for longer than lost_after, but what it had of %s can't be taken over: %w", l, what, err)
		}
	}
	return nil, nil, nil
}

// findOrRecall finds the sandbox of a key; what lost hosts had of it is taken over.
func (g *Gateway) findOrRecall(ctx context.Context, f *placement.Fleet, what finding) (*dsecv1.Sandbox, *rpc.Peer, error) {
	lost := g.lostHosts(f, time.Now())
	order := without(placement.Order(f, what.order()), lost)
	sb, p, err := g.findOn(ctx, f, order, what)
	if sb != nil || err != nil || len(lost) == 0 {
		return sb, p, err
	}
	return g.recall(ctx, order, lost, what)
}
