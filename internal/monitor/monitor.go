// Package monitor keeps a picture of the hosts: who they are, whether they answer, what they have free.
//
// The picture is soft: it is made by polling the configured addresses, kept in memory alone, and made again after a restart. Any number
// of monitors may run; they need not agree. Readers get immutable snapshots and never wait for a poll.
package monitor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Config says which hosts there are.
type Config struct {
	Hosts []string // addresses: unix:/path, http://host:port or https://host:port
	Peer  rpc.PeerConfig
	// Interval between two polls of a host (default 1 s), Timeout of one (default 2 s), and how many must fail in a row, over as many
	// intervals, until the host counts as down (default 3). The first failure of a host that was never seen counts at once.
	Interval, Timeout time.Duration
	Misses            int
}

func (c *Config) fill() {
	if c.Interval == 0 {
		c.Interval = time.Second
	}
	if c.Timeout == 0 {
		c.Timeout = 2 * time.Second
	}
	if c.Misses == 0 {
		c.Misses = 3
	}
}

// eager is how much more often a host is asked that refuses connections, for the first seconds.
const eager = 10

// Monitor polls hosts while Run runs.
type Monitor struct {
	cfg   Config
	log   *slog.Logger
	slots []*slot
	view  atomic.Pointer[view]
	first chan struct{} // closed when every address was tried once

	mu    sync.Mutex // guards the slots' fields; no I/O under it
	tried int
}

// slot is one configured address.
type slot struct {
	addr   string
	peer   *rpc.Peer
	host   placement.Host // of the last answer; no ID: none yet
	misses int
	tried  bool
}

type view struct {
	fleet placement.Fleet
	peers map[sandbox.HostID]*rpc.Peer
}

// New opens no connection.
func New(cfg Config, log *slog.Logger) (*Monitor, error) {
	cfg.fill()
	m := &Monitor{cfg: cfg, log: log, first: make(chan struct{})}
	for i, a := range cfg.Hosts {
		if slices.Contains(cfg.Hosts[:i], a) {
			return nil, fmt.Errorf("host address %s: stands twice in the list: %w", a, sandbox.ErrInvalid)
		}
		p, err := rpc.Dial(a, cfg.Peer)
		if err != nil {
			return nil, err
		}
		m.slots = append(m.slots, &slot{addr: a, peer: p, host: placement.Host{Addr: a, Fault: "not asked yet"}})
	}
	if len(m.slots) == 0 {
		return nil, fmt.Errorf("hosts: give the address of one at least: %w", sandbox.ErrInvalid)
	}
	m.publish()
	return m, nil
}

// Run polls until ctx is done.
func (m *Monitor) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, s := range m.slots {
		wg.Go(func() { m.watch(ctx, s) })
	}
	wg.Wait()
	for _, s := range m.slots {
		s.peer.Close()
	}
	return nil
}

// Ready is closed when every address was asked once, whatever came of it.
func (m *Monitor) Ready() <-chan struct{} { return m.first }

// Fleet is the picture now. It must not be changed.
func (m *Monitor) Fleet() *placement.Fleet { return &m.view.Load().fleet }

// Peer returns the client of a host that answered once.
func (m *Monitor) Peer(id sandbox.HostID) (*rpc.Peer, bool) {
	p, ok := m.view.Load().peers[id]
	return p, ok
}

func (m *Monitor) watch(ctx context.Context, s *slot) {
	for {
		start := time.Now()
		status, err := m.poll(ctx, s)
		if ctx.Err() != nil {
			return
		}
		m.note(s, status, err, time.Now())
		wait := m.cfg.Interval - time.Since(start)
		switch {
		case err == nil:
		case !errors.Is(err, rpc.ErrUnavailable):
			wait = m.cfg.Interval * 5 // it answers, but not to us: wrong token or version
		case s.misses < 5*eager:
			wait = m.cfg.Interval/eager - time.Since(start) // it is being started or restarted
		}
		// A tenth of chance keeps many monitors from asking in step.
		wait += time.Duration(rand.Int64N(int64(m.cfg.Interval)/10 + 1))
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(wait, m.cfg.Interval/10)):
		}
	}
}

func (m *Monitor) poll(ctx context.Context, s *slot) (*dsecv1.HostStatusResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Timeout)
	defer cancel()
	resp, err := s.peer.Host.Status(ctx, connect.NewRequest(&dsecv1.HostStatusRequest{}))
	if err != nil {
		return nil, rpc.FromError(err)
	}
	if _, err := sandbox.ParseHostID(resp.Msg.GetHost()); err != nil {
		return nil, fmt.Errorf("status of %s: %w", s.addr, err)
	}
	return resp.Msg, nil
}

// note takes the result of one poll into the picture and logs what changed.
func (m *Monitor) note(s *slot, status *dsecv1.HostStatusResponse, err error, now time.Time) {
	m.mu.Lock()
	was, before := s.host.Up, s.host.ID
	if err == nil {
		s.misses = 0
		s.host = describe(s.addr, status, now)
		if other := m.twin(s); other != "" {
			s.host.Up, s.host.Fault = false, fmt.Sprintf("answers with the identity of %s; two hosts must not share a state folder", other)
		}
	} else {
		s.misses++
		s.host.Fault = err.Error()
		long := now.Sub(s.host.At) >= time.Duration(m.cfg.Misses)*m.cfg.Interval
		if s.misses >= m.cfg.Misses && long || s.host.ID == "" {
			s.host.Up = false
		}
	}
	is := s.host
	if !s.tried {
		s.tried = true
		if m.tried++; m.tried == len(m.slots) {
			defer close(m.first)
		}
	}
	m.publish()
	m.mu.Unlock()

	switch {
	case is.Up && !was:
		m.log.Info("host is up", "host", is.ID, "addr", s.addr, "version", is.Version)
	case !is.Up && (was || s.misses == 1 && before == ""):
		m.log.Warn("host is down", "host", is.ID, "addr", s.addr, "err", is.Fault)
	}
	if before != "" && before != is.ID {
		m.log.Warn("host has another identity than before; its sandboxes are lost", "addr", s.addr, "was", before, "host", is.ID)
	}
}

// twin is the address of another slot with the same identity that is up.
func (m *Monitor) twin(s *slot) string {
	for _, o := range m.slots {
		if o != s && o.host.ID == s.host.ID && o.host.Up {
			return o.addr
		}
	}
	return ""
}

// publish makes the snapshot; mu is held, but by New.
func (m *Monitor) publish() {
	v := &view{peers: map[sandbox.HostID]*rpc.Peer{}}
	for _, s := range m.slots {
		if s.host.ID == "" {
			v.fleet.Nameless = append(v.fleet.Nameless, s.addr)
			continue
		}
		if _, ok := v.peers[s.host.ID]; ok && !s.host.Up {
			continue
		}
		v.peers[s.host.ID] = s.peer
		v.fleet.Hosts = slices.DeleteFunc(v.fleet.Hosts, func(h placement.Host) bool { return h.ID == s.host.ID })
		v.fleet.Hosts = append(v.fleet.Hosts, s.host)
	}
	slices.SortFunc(v.fleet.Hosts, func(a, b placement.Host) int { return strings.Compare(string(a.ID), string(b.ID)) })
	m.view.Store(v)
}

// describe takes a host's word for what it has; counts below zero are none.
func describe(addr string, s *dsecv1.HostStatusResponse, now time.Time) placement.Host {
	h := placement.Host{
		ID: sandbox.HostID(s.GetHost()), Addr: addr, Version: s.GetVersion(), Protocol: int(s.GetProtocol()), Up: true, At: now, Draining: s.GetDraining(),
		Running: max(0, s.GetRunning()), Creating: max(0, s.GetCreating()), SlotsFree: max(0, s.GetSlotsFree()),
		MemoryTotal: max(0, s.GetMemoryTotal()), MemoryAvailable: max(0, min(s.GetMemoryAvailable(), s.GetMemoryTotal())),
		DiskFree: max(0, s.GetDiskFree()), LogFree: max(0, s.GetLogFree()), Load: s.GetLoad(), Arrivals: s.GetArrivals(), Moved: s.GetMoved(), Doctor: s.GetDoctor(),
	}
	for _, c := range s.GetBackends() {
		h.Backends = append(h.Backends, rpc.Capabilities(c))
	}
	if p := int(s.GetProtocol()); p != 0 && (p < rpc.ProtocolMin || p > rpc.Protocol) {
		side := "upgrade the host"
		if p > rpc.Protocol {
			side = "upgrade this gateway"
		}
		h.Up, h.Fault = false, fmt.Sprintf("speaks protocol %d, this gateway %d to %d: %s", p, rpc.ProtocolMin, rpc.Protocol, side)
	}
	return h
}

var (
	hostsDesc   = prometheus.NewDesc("dsec_hosts", "Hosts by whether they answer.", []string{"state"}, nil)
	runningDesc = prometheus.NewDesc("dsec_fleet_sandboxes", "Living sandboxes on all hosts that answer.", nil, nil)
	slotsDesc   = prometheus.NewDesc("dsec_fleet_slots_free", "Sandboxes that the hosts would still take.", nil, nil)
)

// Describe and Collect make the picture metrics.
func (m *Monitor) Describe(ch chan<- *prometheus.Desc) {
	ch <- hostsDesc
	ch <- runningDesc
	ch <- slotsDesc
}

// Collect is Describe's other half.
func (m *Monitor) Collect(ch chan<- prometheus.Metric) {
	f := m.Fleet()
	state := map[string]float64{"up": 0, "down": float64(len(f.Nameless)), "draining": 0}
	var running, slots float64
	for _, h := range f.Hosts {
		switch {
		case !h.Up:
			state["down"]++
			continue
		case h.Draining:
			state["draining"]++
		default:
			state["up"]++
			slots += float64(h.SlotsFree)
		}
		running += float64(h.Running + h.Creating)
	}
	for s, n := range state {
		ch <- prometheus.MustNewConstMetric(hostsDesc, prometheus.GaugeValue, n, s)
	}
	ch <- prometheus.MustNewConstMetric(runningDesc, prometheus.GaugeValue, running)
	ch <- prometheus.MustNewConstMetric(slotsDesc, prometheus.GaugeValue, slots)
}
