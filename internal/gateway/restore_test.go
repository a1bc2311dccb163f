package gateway

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// fakeRestores notes what hosts are asked, and goes on with sandboxes of hosts that are named lost.
type fakeRestores struct {
	h *fakeHost

	mu    sync.Mutex
	asked []*dsecv1.HostRestoreRequest

	store    map[string]*recorded // by key; under the host's lock, as recalled
	recalled []string
}

func (s *fakeRestores) Restore(ctx context.Context, r *connect.Request[dsecv1.HostRestoreRequest]) (*connect.Response[dsecv1.RestoreResponse], error) {
	s.mu.Lock()
	s.asked = append(s.asked, proto.CloneOf(r.Msg))
	s.mu.Unlock()
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	q := r.Msg.GetRequest()
	b := s.h.boxes[q.GetSandbox()]
	switch {
	case b == nil && r.Msg.GetLostHost() == "":
		return nil, fmt.Errorf("sandbox: %w", sandbox.ErrNotFound)
	case b == nil && r.Msg.GetSilentMs() >= 0:
		return nil, fmt.Errorf("name it as lost_host: %w", sandbox.ErrState)
	case b == nil:
		b = &dsecv1.Sandbox{Id: q.GetSandbox(), Project: rpc.Project(ctx), State: "failed", Host: string(s.h.id)}
		s.h.boxes[b.Id] = b
	}
	return connect.NewResponse(&dsecv1.RestoreResponse{Id: q.GetId(), State: "restored", Sandbox: b}), nil
}

// Recall knows in a lost host what the test put into recalls.
func (s *fakeRestores) Recall(ctx context.Context, r *connect.Request[dsecv1.RecallRequest]) (*connect.Response[dsecv1.RecallResponse], error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	s.recalled = append(s.recalled, r.Msg.GetLostHost()+" "+r.Msg.GetKey())
	for _, b := range s.h.boxes {
		if b.Job == r.Msg.GetJob() && b.Key == r.Msg.GetKey() {
			return connect.NewResponse(&dsecv1.RecallResponse{Sandbox: b}), nil
		}
	}
	if was := s.store[r.Msg.GetKey()]; was != nil {
		b := proto.CloneOf(was.box)
		b.State, b.Cause = "failed", &dsecv1.Cause{Class: "platform", Reason: "host_lost"}
		s.h.boxes[b.Id], s.h.hashes[b.Id], s.h.specs[b.Id] = b, was.hash, was.spec
		return connect.NewResponse(&dsecv1.RecallResponse{Sandbox: b}), nil
	}
	return nil, fmt.Errorf("key: %w", sandbox.ErrNotFound)
}

// recorded is what the store has of a sandbox of a lost host.
type recorded struct {
	box  *dsecv1.Sandbox
	hash string
	spec *dsecv1.Spec
}

func (s *fakeRestores) taken() []*dsecv1.HostRestoreRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.asked
	s.asked = nil
	return out
}

// A restore goes to the host that has the sandbox; where that is gone, to one other, which alone goes on with it and answers for the old ID.
func TestRestoreFindsItsHost(t *testing.T) {
	c := newCluster(t, 3)
	ctx := t.Context()
	client := dsecv1connect.NewRestoreServiceClient(&http.Client{Transport: keyed(c.key)}, c.url)
	restore := func(q *dsecv1.RestoreRequest) (*dsecv1.RestoreResponse, error) {
		r, err := client.Restore(ctx, connect.NewRequest(q))
		if err != nil {
			return nil, rpc.FromError(err)
		}
		return r.Msg, nil
	}
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Layers: []string{c.base}, Job: "j", Key: "k"})
	mine := c.host(sb.Host)
	for _, q := range []*dsecv1.RestoreRequest{{Sandbox: sb.Id}, {Job: "j", Key: "k"}} {
		if r, err := restore(q); q.Sandbox != "" && (err != nil || r.State != "restored" || r.Id == "") {
			t.Fatal(r, err)
		}
		if asked := mine.restores.taken(); len(asked) != 1 || asked[0].LostHost != "" || asked[0].Request.Id == "" {
			t.Fatal(asked)
		}
	}
	for what, q := range map[string]*dsecv1.RestoreRequest{
		"give a sandbox": {Sandbox: sb.Id, Job: "j", Key: "k"}, "id": {Sandbox: "x"}, "lost_host": {Sandbox: sb.Id, LostHost: "?"}, "key": {Key: " "},
	} {
		if _, err := restore(q); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := restore(&dsecv1.RestoreRequest{Job: "j", Key: "nobody"}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("an unknown key: %v", err)
	}
	if _, err := restore(&dsecv1.RestoreRequest{Sandbox: sb.Id, LostHost: sb.Host}); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("a host that answers is lost: %v", err)
	}
	mine.stop()
	eventually(t, "the host is down", func() bool {
		p, ok := c.g.fleet.Peer(sandbox.HostID(sb.Host))
		return ok && !c.g.seemsUp(p)
	})
	if _, err := restore(&dsecv1.RestoreRequest{Sandbox: sb.Id}); !errors.Is(err, sandbox.ErrState) || !strings.Contains(err.Error(), "lost_host") {
		t.Fatalf("a host that is silent: %v", err)
	}
	if _, err := restore(&dsecv1.RestoreRequest{Job: "j", Key: "k"}); !errors.Is(err, rpc.ErrUnavailable) {
		t.Fatalf("by a key, with a host that is silent: %v", err)
	}
	if err := c.keys.CreateProject(ctx, "default/tenant"); err != nil {
		t.Fatal(err)
	}
	tenant := connect.NewRequest(&dsecv1.RestoreRequest{Sandbox: sb.Id, LostHost: sb.Host})
	tenant.Header().Set(rpc.HeaderProject, "default/tenant")
	if _, err := client.Restore(ctx, tenant); !errors.Is(rpc.FromError(err), sandbox.ErrDenied) {
		t.Errorf("a tenant gave up a host of all: %v", err)
	}
	for _, h := range c.hosts {
		h.restores.taken()
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if r, err := restore(&dsecv1.RestoreRequest{Sandbox: sb.Id, LostHost: sb.Host}); err != nil || r.State != "restored" {
				t.Error(r, err)
			}
		})
	}
	wg.Wait()
	served := 0
	for _, h := range c.hosts {
		if asked := h.restores.taken(); len(asked) > 0 {
			served++
			if asked[0].LostHost != sb.Host || asked[0].SilentMs != -1 {
				t.Error(asked[0])
			}
		}
	}
	if served != 1 {
		t.Errorf("%d hosts were asked to go on with one sandbox", served)
	}
	got, err := c.Sandboxes.Get(ctx, connect.NewRequest(&dsecv1.GetRequest{Id: sb.Id}))
	if err != nil || got.Msg.Sandbox.Host == sb.Host {
		t.Errorf("the old ID: %v, %v", got, err)
	}
}

// A create whose key a silent host may hold is refused until the operator's lost_after is over. Then another host takes over what the store has
// of that host: a key that it knew answers its sandbox, which has ended; another makes a new one. It is never guessed, and nothing is made twice.
func TestLostAfter(t *testing.T) {
	c := newCluster(t, 3)
	ctx := t.Context()
	kept := c.mustCreate(t, &dsecv1.CreateRequest{Layers: []string{c.base}, Job: "j", Key: "kept"})
	gone := c.host(kept.Host)
	gone.mu.Lock()
	was := &recorded{box: proto.CloneOf(gone.boxes[kept.Id]), hash: gone.hashes[kept.Id], spec: gone.specs[kept.Id]}
	gone.mu.Unlock()
	for _, h := range c.hosts {
		h.mu.Lock()
		h.restores.store = map[string]*recorded{"kept": was}
		h.mu.Unlock()
	}
	gone.stop()
	eventually(t, "the host is down", func() bool {
		p, ok := c.g.fleet.Peer(sandbox.HostID(kept.Host))
		return ok && !c.g.seemsUp(p)
	})
	create := func(key string, change ...func(*dsecv1.CreateRequest)) (*dsecv1.CreateResponse, error) {
		q := &dsecv1.CreateRequest{Layers: []string{c.base}, Job: "j", Key: key}
		for _, f := range change {
			f(q)
		}
		r, err := c.Sandboxes.Create(ctx, connect.NewRequest(q))
		if err != nil {
			return nil, rpc.FromError(err)
		}
		return r.Msg, nil
	}
	recalls := func() (all []string) {
		for _, h := range c.hosts {
			h.mu.Lock()
			all = append(all, h.restores.recalled...)
			h.restores.recalled = nil
			h.mu.Unlock()
		}
		return all
	}
	for _, after := range []time.Duration{0, time.Hour} {
		c.g.cfg.LostAfter = after
		for _, key := range []string{"kept", "new"} {
			if r, err := create(key); !errors.Is(err, rpc.ErrUnavailable) || !strings.Contains(err.Error(), "lost_after") {
				t.Fatalf("lost_after %v, key %s: %v %v", after, key, r, err)
			}
		}
	}
	restore := dsecv1connect.NewRestoreServiceClient(&http.Client{Transport: keyed(c.key)}, c.url)
	if err := c.keys.CreateProject(ctx, "default/tenant"); err != nil {
		t.Fatal(err)
	}
	tenant := connect.NewRequest(&dsecv1.RestoreRequest{Sandbox: kept.Id, Job: "leased"})
	tenant.Header().Set(rpc.HeaderProject, "default/tenant")
	if _, err := restore.Restore(ctx, tenant); !errors.Is(rpc.FromError(err), sandbox.ErrState) {
		t.Errorf("a tenant gave up a host of all by a lease of its own: %v", err)
	}
	for _, h := range c.hosts {
		if n := len(h.restores.taken()); n > 0 {
			t.Errorf("%d hosts were asked to go on for a tenant", n)
		}
	}
	if r := recalls(); len(r) > 0 {
		t.Fatalf("before its time: %q", r)
	}

	c.g.cfg.LostAfter = time.Nanosecond
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids := map[string]string{}
	for range 8 {
		for _, key := range []string{"kept", "new", "other"} {
			wg.Go(func() {
				r, err := create(key)
				if err != nil {
					t.Error(key, err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				if id := r.Sandbox.Id; ids[key] != "" && ids[key] != id {
					t.Errorf("key %s made %s and %s", key, ids[key], id)
				}
				if ids[key] = r.Sandbox.Id; key == "kept" && (r.Sandbox.Id != kept.Id || r.Sandbox.State != "failed" || !r.Existed) {
					t.Errorf("a key of the lost host: %v", r)
				}
				if key != "kept" && r.Sandbox.State != "running" {
					t.Errorf("a new key: %v", r)
				}
			})
		}
	}
	wg.Wait()
	if r := recalls(); len(r) == 0 || !strings.HasPrefix(r[0], kept.Host+" ") {
		t.Errorf("%q", r)
	}
	if _, err := create("kept", func(q *dsecv1.CreateRequest) { q.User = "other" }); !errors.Is(err, sandbox.ErrExists) {
		t.Errorf("another request under a key of the lost host: %v", err)
	}
	_, _ = restore.Restore(ctx, connect.NewRequest(&dsecv1.RestoreRequest{Job: "j", Key: "kept"})) // the fake host restores by ID alone
	asked := 0
	for _, h := range c.hosts {
		asked += len(h.restores.taken())
	}
	if asked != 1 {
		t.Errorf("a restore by key reached %d hosts", asked)
	}
	if _, err := restore.Restore(ctx, connect.NewRequest(&dsecv1.RestoreRequest{Job: "j", Key: "nobody"})); !errors.Is(rpc.FromError(err), sandbox.ErrNotFound) {
		t.Errorf("a restore by a key that nobody had: %v", err)
	}
}
