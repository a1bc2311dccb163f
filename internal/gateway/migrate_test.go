package gateway

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

type fakeMoves struct {
	dsecv1connect.UnimplementedHostMoveServiceHandler
	h *fakeHost
}

func (s fakeMoves) Settle(_ context.Context, r *connect.Request[dsecv1.SettleRequest]) (*connect.Response[dsecv1.SettleResponse], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	if !r.Msg.Take {
		s.h.arrivals = nil
		return connect.NewResponse(&dsecv1.SettleResponse{}), nil
	}
	b := s.h.boxes[r.Msg.Sandbox]
	if b == nil {
		return nil, fmt.Errorf("nothing of that move is here: %w", sandbox.ErrNotFound)
	}
	return connect.NewResponse(&dsecv1.SettleResponse{Sandbox: b}), nil
}

func (s fakeMoves) Arrivals(context.Context, *connect.Request[dsecv1.ArrivalsRequest]) (*connect.Response[dsecv1.ArrivalsResponse], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	return connect.NewResponse(&dsecv1.ArrivalsResponse{Arrivals: s.h.arrivals}), nil
}

// give moves a sandbox from one host to another, behind the gateway's back.
func (h *fakeHost) give(id string, to *fakeHost) {
	h.mu.Lock()
	b, sum := h.boxes[id], h.hashes[id]
	delete(h.boxes, id)
	h.given[id] = &dsecv1.FindKeyResponse{Sandbox: b, MovedTo: string(to.id), Move: "n"}
	h.mu.Unlock()
	to.mu.Lock()
	defer to.mu.Unlock()
	to.boxes[id], to.hashes[id] = b, sum
}

func (h *fakeHost) forget(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.boxes, id)
}

// A host that gave a sandbox away remembers that for longer than the sandbox lives, and than the host that it went to: the key is free then, and
// the sandbox is where it was restored, or nowhere.
func TestMovedSandboxIsOver(t *testing.T) {
	c := newCluster(t, 3)
	get := func(id string) (*dsecv1.Sandbox, error) {
		c.g.homes.drop(sandbox.ID(id)) // another gateway
		r, err := c.Sandboxes.Get(t.Context(), connect.NewRequest(&dsecv1.GetRequest{Id: id}))
		if err != nil {
			return nil, rpc.FromError(err)
		}
		return r.Msg.GetSandbox(), nil
	}
	moved := func(key string) (id string, from, to, other *fakeHost) {
		id = c.mustCreate(t, &dsecv1.CreateRequest{Key: key}).Id
		from = c.host(id)
		for _, h := range c.hosts {
			if h != from {
				to, other = h, to
			}
		}
		from.give(id, to)
		if b, err := get(id); err != nil || b.Id != id {
			t.Fatal(b, err)
		}
		if b := c.mustCreate(t, &dsecv1.CreateRequest{Key: key}); b.Id != id {
			t.Fatalf("the key made %s beside %s", b.Id, id)
		}
		return id, from, to, other
	}
	for i := range 6 { // on the first host that a create asks, or not
		key := fmt.Sprint("k", i)
		id, _, to, _ := moved(key)
		to.forget(id)
		if _, err := get(id); !errors.Is(err, sandbox.ErrNotFound) {
			t.Fatalf("of one that is forgotten: %v", err)
		}
		if b := c.mustCreate(t, &dsecv1.CreateRequest{Key: key}); b.Id == id {
			t.Fatal("it is back")
		}
	}
	id, _, to, other := moved("lost")
	to.stop()
	eventually(t, "the host is down", func() bool {
		p, ok := c.g.fleet.Peer(to.id)
		return ok && !c.g.seemsUp(p)
	})
	if _, err := get(id); !errors.Is(err, rpc.ErrUnavailable) {
		t.Fatalf("its host may come back: %v", err)
	}
	other.mu.Lock()
	other.boxes[id] = &dsecv1.Sandbox{Id: id, Project: "default", Key: "lost", Host: string(other.id)}
	other.mu.Unlock()
	if b, err := get(id); err != nil || b.Host != string(other.id) {
		t.Fatalf("restored elsewhere: %v %v", b, err)
	}
	other.forget(id)
	c.g.cfg.LostAfter = time.Nanosecond
	if _, err := get(id); !errors.Is(err, sandbox.ErrNotFound) {
		t.Fatalf("its host was given up: %v", err)
	}
}

// What arrived of a sandbox whose source is gone waits for the source, and goes when the sandbox was restored elsewhere.
func TestArrivalOfALostHost(t *testing.T) {
	c := newCluster(t, 3)
	id := c.mustCreate(t, &dsecv1.CreateRequest{Key: "k"}).Id
	from := c.host(id)
	var to, other *fakeHost
	for _, h := range c.hosts {
		if h != from {
			to, other = h, to
		}
	}
	from.stop()
	eventually(t, "the host is down", func() bool {
		p, ok := c.g.fleet.Peer(from.id)
		return ok && !c.g.seemsUp(p)
	})
	to.mu.Lock()
	to.arrivals = []*dsecv1.Arrival{{Sandbox: id, Project: "default", Nonce: "n", From: string(from.id)}}
	to.mu.Unlock()
	p, _ := c.g.fleet.Peer(to.id)
	settle := func() (n int, err error) {
		err = c.g.settleArrivals(t.Context(), p, func(*dsecv1.Arrival) bool { return true })
		to.mu.Lock()
		defer to.mu.Unlock()
		return len(to.arrivals), err
	}
	if n, err := settle(); !errors.Is(err, rpc.ErrUnavailable) || n != 1 {
		t.Fatalf("while nobody knows: %v, %d", err, n)
	}
	other.mu.Lock()
	other.boxes[id] = &dsecv1.Sandbox{Id: id, Project: "default", Key: "k", Host: string(other.id)}
	other.mu.Unlock()
	if n, err := settle(); err != nil || n != 0 {
		t.Fatalf("restored elsewhere: %v, %d", err, n)
	}
}

// What hosts tell of single sandboxes of a group has codes that clients know.
func TestMovedIsNoCodeOfClients(t *testing.T) {
	if code := rpc.CodeName(fmt.Errorf("it went: %w", rpc.ErrMoved)); code != "unavailable" {
		t.Fatal(code)
	}
}
