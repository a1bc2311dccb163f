package monitor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const token = "0123456789abcdef"

type host struct {
	dsecv1connect.UnimplementedHostServiceHandler
	mu     sync.Mutex
	status *dsecv1.HostStatusResponse // nil: unavailable
}

func (h *host) set(s *dsecv1.HostStatusResponse) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.status = s
}

func (h *host) Status(context.Context, *connect.Request[dsecv1.HostStatusRequest]) (*connect.Response[dsecv1.HostStatusResponse], error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.status == nil {
		return nil, fmt.Errorf("going down: %w", rpc.ErrUnavailable)
	}
	return connect.NewResponse(h.status), nil
}

func start(t *testing.T, s *dsecv1.HostStatusResponse) (*host, string) {
	t.Helper()
	h := &host{status: s}
	guard, err := rpc.ClusterGuard(token)
	if err != nil {
		t.Fatal(err)
	}
	edge := &rpc.Edge{Guard: guard}
	mux := http.NewServeMux()
	mux.Handle(dsecv1connect.NewHostServiceHandler(h, edge.Options()...))
	srv := httptest.NewServer(edge.Wrap(mux))
	t.Cleanup(srv.Close)
	return h, srv.URL
}

func watch(t *testing.T, addrs ...string) *Monitor {
	t.Helper()
	m, err := New(Config{Hosts: addrs, Peer: rpc.PeerConfig{Token: token}, Interval: 5 * time.Millisecond}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { m.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	<-m.Ready()
	return m
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 2000 {
		if f() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatal("never: " + what)
}

func TestPicture(t *testing.T) {
	a, addrA := start(t, &dsecv1.HostStatusResponse{Host: "hbbbbbbbb", Running: 3, SlotsFree: 7, MemoryTotal: 10, MemoryAvailable: 99, DiskFree: -1,
		Backends: []*dsecv1.Capabilities{{Backend: "container", Networks: []string{"none"}}}})
	b, addrB := start(t, &dsecv1.HostStatusResponse{Host: "haaaaaaaa", Draining: true})
	m := watch(t, addrA, addrB, "http://127.0.0.1:1")
	f := m.Fleet()
	if len(f.Hosts) != 2 || f.Hosts[0].ID != "haaaaaaaa" || !f.Hosts[0].Draining || f.Hosts[1].SlotsFree != 7 || f.Hosts[1].MemoryAvailable != 10 || f.Hosts[1].DiskFree != 0 {
		t.Fatalf("%+v", f)
	}
	if diff := cmp.Diff([]string{"http://127.0.0.1:1"}, f.Nameless); diff != "" {
		t.Error(diff)
	}
	if f.Hosts[1].Backends[0].Backend != "container" {
		t.Error("no backends")
	}
	up := func(id sandbox.HostID) bool { h, ok := m.Fleet().Find(id); return ok && h.Up }
	a.set(nil)
	eventually(t, "down", func() bool { return !up("hbbbbbbbb") })
	if _, ok := m.Peer("hbbbbbbbb"); !ok {
		t.Error("a host that is down is forgotten")
	}
	if !up("haaaaaaaa") {
		t.Error("its neighbour is down too")
	}
	a.set(&dsecv1.HostStatusResponse{Host: "hbbbbbbbb"})
	eventually(t, "up again", func() bool { return up("hbbbbbbbb") })
	b.set(&dsecv1.HostStatusResponse{Host: "hcccccccc"})
	eventually(t, "new identity", func() bool { _, ok := m.Fleet().Find("haaaaaaaa"); return up("hcccccccc") && !ok })
	b.set(&dsecv1.HostStatusResponse{Host: "hcccccccc", Protocol: 99})
	eventually(t, "other protocol", func() bool { return !up("hcccccccc") })
	b.set(&dsecv1.HostStatusResponse{Host: "not an id"})
	eventually(t, "hostile identity", func() bool { h, _ := m.Fleet().Find("hcccccccc"); return h != nil && h.Fault != "" && !h.Up })
}

func TestTwoHostsWithOneIdentity(t *testing.T) {
	_, a := start(t, &dsecv1.HostStatusResponse{Host: "haaaaaaaa"})
	_, b := start(t, &dsecv1.HostStatusResponse{Host: "haaaaaaaa"})
	m := watch(t, a, b)
	if f := m.Fleet(); len(f.Hosts) != 1 || !f.Hosts[0].Up {
		t.Errorf("%+v", f)
	}
}

func TestWrongTokenIsTold(t *testing.T) {
	_, a := start(t, &dsecv1.HostStatusResponse{Host: "haaaaaaaa"})
	m, err := New(Config{Hosts: []string{a}, Peer: rpc.PeerConfig{Token: "another token ..."}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.poll(context.Background(), m.slots[0]); !errors.Is(err, rpc.ErrUnauthenticated) {
		t.Error(err)
	}
}

func TestOneSlowPollIsNotDown(t *testing.T) {
	m, err := New(Config{Hosts: []string{"unix:/nowhere"}, Peer: rpc.PeerConfig{Token: token}}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1e9, 0)
	lost := fmt.Errorf("x: %w", rpc.ErrUnavailable)
	m.note(m.slots[0], &dsecv1.HostStatusResponse{Host: "haaaaaaaa"}, nil, now)
	for i, tc := range []struct {
		after time.Duration
		up    bool
	}{{100 * time.Millisecond, true}, {200 * time.Millisecond, true}, {300 * time.Millisecond, true}, {2900 * time.Millisecond, true}, {3 * time.Second, false}} {
		m.note(m.slots[0], nil, lost, now.Add(tc.after))
		if h, _ := m.Fleet().Find("haaaaaaaa"); h.Up != tc.up {
			t.Errorf("miss %d after %v: up is %v", i+1, tc.after, h.Up)
		}
	}
	m.note(m.slots[0], &dsecv1.HostStatusResponse{Host: "haaaaaaaa"}, nil, now.Add(time.Minute))
	for i, up := range []bool{true, true, false} {
		m.note(m.slots[0], nil, lost, now.Add(2*time.Minute))
		if h, _ := m.Fleet().Find("haaaaaaaa"); h.Up != up {
			t.Errorf("slow miss %d: up is %v", i+1, h.Up)
		}
	}
}

func TestBadConfig(t *testing.T) {
	for name, hosts := range map[string][]string{"none": nil, "twice": {"unix:/a", "unix:/a"}, "bad": {"host:1"}} {
		if _, err := New(Config{Hosts: hosts}, slog.New(slog.DiscardHandler)); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestMetrics(t *testing.T) {
	_, a := start(t, &dsecv1.HostStatusResponse{Host: "haaaaaaaa", Running: 2})
	m := watch(t, a, "http://127.0.0.1:1")
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(m)
	got, err := r.Gather()
	if err != nil || len(got) != 3 {
		t.Fatalf("%v, %v", got, err)
	}
}
