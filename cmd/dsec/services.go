package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/calm"
	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/gateway"
	"github.com/dsec-dev/dsec/internal/guest/binary"
	"github.com/dsec-dev/dsec/internal/host"
	"github.com/dsec-dev/dsec/internal/iam"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/upper"
	"github.com/dsec-dev/dsec/internal/monitor"
	"github.com/dsec-dev/dsec/internal/obs"
	"github.com/dsec-dev/dsec/internal/oci"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/trace"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

func keeperMain(args []string) int { return keeper.Main(args) }

// keeperCmd only documents the command: main hands it over before anything is parsed, since the keeper has flags of its own.
type keeperCmd struct{}

func (keeperCmd) Run() error { return errors.New("the keeper is started by its host") }

// hostFlags are what a host needs beside its places.
type hostFlags struct {
	PoolSize   size     `help:"Size of the pool for sandboxes' own writes (default: 20g or half of what is free)." placeholder:"SIZE"`
	PoolDriver string   `help:"Force a pool driver: btrfs, btrfs-pool, project, ext4-image or tmpfs." placeholder:"NAME"`
	Stores     []string `name:"store" help:"Store of the layers: a folder or s3://BUCKET/PREFIX?endpoint=URL (docs/ops/config.md); repeat: the first is written (default: STATE/store)." placeholder:"STORE" sep:"none"`
	UIDBase    *uint32  `name:"uid-base" help:"First host uid for sandboxes; two hosts on one machine differ in it." placeholder:"N"`
	Slots      *int     `help:"Sandboxes that may live at once." placeholder:"N"`
	Forget     bool     `name:"forget-unknown" help:"End living sandboxes that the log does not know, instead of refusing to start."`
}

// machine is a host with all that runs for it.
type machine struct {
	host    *host.Host
	backend *container.Backend
	// runtimes are the same driver under OCI runtimes.
	runtimes []sandbox.Backend
	vms      []*vm.Backend
	trace    *trace.Source
	log      *trajectory.Log
	pool     *upper.Pool
	layers   *blob.Layers
	blobs    *blob.Supervisor // nil: layers that are not local are fetched whole
	guest    *os.File
	token    string
	id       sandbox.HostID
	logger   *slog.Logger
	calls    *obs.Calls
	local    *rpc.Local // where a gateway in this process looks for the host; may be nil
}

func openMachine(ctx context.Context, p *places, f *hostFlags, token string, reg *prometheus.Registry, logger *slog.Logger) (m *machine, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("a host needs root: it makes mounts, namespaces and cgroups (`dsec doctor` says what else)")
	}
	m = &machine{logger: logger, token: token}
	opened := m // what an error returns is nil
	defer func() {
		if err != nil {
			opened.close()
			if opened.pool != nil { // no Run of it has begun, and what lives keeps its own mounts
				err = errors.Join(err, opened.pool.Close())
			}
		}
	}()
	if m.id, err = identity(p.State); err != nil {
		return nil, err
	}
	st, err := openStore(p, f.Stores)
	if err != nil {
		return nil, err
	}
	lc := trajectory.Default(filepath.Join(p.State, "log"))
	if len(f.Stores)+len(p.settings.Store) > 0 { // the default lies on the log's own disk
		lc.Store, lc.Host = st, string(m.id)
		if err := setSize(&lc.Local, "host.log_local", p.settings.Host.LogLocal); err != nil {
			return nil, err
		}
	}
	if m.log, err = trajectory.Open(lc, logger); err != nil {
		return nil, err
	}
	if m.guest, err = binary.Open(); err != nil {
		return nil, err
	}
	cc, err := p.container(m.id, f, m.guest)
	if err != nil {
		return nil, err
	}
	hc, err := p.host(m.id)
	if err != nil {
		return nil, err
	}
	hc.ForgetUnknown, hc.LogDir = f.Forget, filepath.Join(p.State, "log")
	// After the settings were read, so that a slip in them leaves no mount behind.
	if m.pool, err = upper.Open(ctx, upper.Config{State: p.State, Driver: f.PoolDriver, Size: int64(f.PoolSize)}, logger); err != nil {
		return nil, err
	}
	if p.settings.Host.DiskReserve == "" {
		hc.DiskReserve = diskReserve(hc.DiskReserve, m.pool.Describe().Total)
	}
	layers, blobs, err := p.openLayers(m.id, f.Stores, st, cc, logger)
	if err != nil {
		return nil, err
	}
	m.layers = layers
	if m.blobs = blobs; blobs != nil {
		if err := reg.Register(blobFigures{blobs}); err != nil {
			return nil, err
		}
	}
	m.trace = trace.NewSource(logger)
	found, err := p.findRuntimes(ctx)
	if err != nil {
		return nil, err
	}
	cc.Told = runtimeFeatures(found)
	if m.backend, err = container.New(cc, container.Deps{Layers: layers, Uppers: m.pool, Log: logger, Trace: m.trace}); err != nil {
		return nil, err
	}
	if m.runtimes, err = openRuntimes(m.backend, found); err != nil {
		return nil, err
	}
	if m.vms, err = p.openVMs(ctx, m.id, cc, layers, m.backend, logger); err != nil {
		return nil, err
	}
	if m.calls, err = obs.NewCalls(reg, "host"); err != nil {
		return nil, err
	}
	m.host, err = host.New(hc, host.Deps{
		Backends: m.backends(),
		Log:      m.log, Disk: m.pool.Free, LogDisk: func() (int64, error) { return freeSpace(p.State) },
		Logger: logger, Registry: reg, TakeOver: takeOver(lc.Store, logger),
	})
	if err == nil {
		err = m.openCalls(p, reg, logger)
	}
	return m, err
}

// takeOver fetches logs of lost hosts from the store that the host's own goes to; nil where it goes to none.
func takeOver(st store.Store, logger *slog.Logger) func(context.Context, string, string) (host.LostLog, error) {
	if st == nil {
		return nil
	}
	return func(ctx context.Context, id, dir string) (host.LostLog, error) {
		l, err := trajectory.TakeOver(ctx, st, id, dir, logger)
		if err != nil {
			return nil, err
		}
		return l, nil
	}
}

func (p *places) container(id sandbox.HostID, f *hostFlags, guest *os.File) (container.Config, error) {
	filter, events, err := confine.Container().CompileWatched()
	if err != nil {
		return container.Config{}, err
	}
	cc := container.Config{
		Instance: instance(id), Host: string(id), StateDir: filepath.Join(p.State, "container"), RunDir: filepath.Join(p.RunDir, "keeper-"+instance(id)),
		Guest: guest, Seccomp: filter, Events: events,
		LeaveDynmods: p.settings.Host.LeaveDynmods, NetnsPool: p.settings.Host.NetnsPool,
		Unpack: p.settings.Host.UnpackLayers || container.NoErofs() != nil,
	}
	if err := setSize(&cc.UnpackLimit, "host.unpack_limit", p.settings.Host.UnpackLimit); err != nil {
		return cc, err
	}
	if f.UIDBase != nil {
		if cc.UIDBase = *f.UIDBase; cc.UIDBase == 0 {
			return cc, fmt.Errorf("--uid-base 0: those below 65536 are the machine's own users; leave it out for the default: %w", sandbox.ErrInvalid)
		}
	}
	if f.Slots != nil {
		if cc.Slots = *f.Slots; cc.Slots < 1 {
			return cc, fmt.Errorf("--slots %d: at least 1; leave it out for the default: %w", cc.Slots, sandbox.ErrInvalid)
		}
	}
	cc.Network.Off = p.settings.Network.Off
	for _, r := range p.settings.Network.Ranges {
		prefix, err := netip.ParsePrefix(r)
		if err != nil {
			return cc, fmt.Errorf("network.ranges: %w", err)
		}
		cc.Network.Ranges = append(cc.Network.Ranges, prefix)
	}
	return cc, nil
}

func (p *places) host(id sandbox.HostID) (host.Config, error) {
	hc, s := host.Default(), p.settings.Host
	hc.ID, hc.Dir, hc.Version = id, p.State, version
	if s.MaxSandboxes > 0 {
		hc.MaxSandboxes = s.MaxSandboxes
	}
	if s.MaxBirths > 0 {
		hc.MaxBirths = s.MaxBirths
	}
	err := errors.Join(setSize(&hc.MemoryReserve, "host.memory_reserve", s.MemoryReserve), setSize(&hc.DiskReserve, "host.disk_reserve", s.DiskReserve),
		setSize(&hc.LogReserve, "host.log_reserve", s.LogReserve), setDuration(&hc.Retention, "host.retention", s.Retention))
	return hc, err
}

// diskReserve is what of a pool stays free where the operator said nothing: the usual, but of a small pool a twentieth, or it would
// admit nothing. A total of 0 is the host's disk.
func diskReserve(usual, total int64) int64 {
	if total <= 0 {
		return usual
	}
	return min(usual, total/20)
}

func freeSpace(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// backends are those of this host, by their names.
func (m *machine) backends() map[string]sandbox.Backend {
	all := map[string]sandbox.Backend{"container": m.backend}
	for _, b := range m.runtimes {
		all[b.Capabilities().Backend] = b
	}
	for _, b := range m.vms {
		all[b.Capabilities().Backend] = b
	}
	return all
}

func (m *machine) close() {
	if m.log != nil {
		if err := m.log.Close(); err != nil {
			m.logger.Error("close the log", "err", err)
		}
	}
	if m.guest != nil {
		m.guest.Close()
	}
}

// serve runs the host until ctx ends. With stop, all sandboxes are stopped then and the keeper and the pool go too.
// It calls up when what lives was taken back.
func (m *machine) serve(ctx context.Context, stop bool, up func(), listeners ...net.Listener) error {
	guard, err := rpc.ClusterGuard(m.token)
	if err != nil {
		return err
	}
	edge := &rpc.Edge{Log: m.logger, Guard: guard, Observe: m.calls.Observe}
	handler := m.host.Handler(edge)
	server, err := rpc.NewServer(handler, rpc.ServerConfig{Log: m.logger})
	if err != nil {
		return err
	}
	if m.local != nil {
		m.local.Serve(handler)
	}
	// What the host needs outlives the host, so that it can stop its sandboxes; each part ends only when what uses it has.
	below, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	inner, run := errgroup.WithContext(below)
	defer func() { end(); _ = inner.Wait() }()
	inner.Go(func() error { return m.log.Run(run) })
	inner.Go(func() error { return m.pool.Run(run) })
	inner.Go(func() error { return m.backend.Run(run) })
	for _, b := range m.vms {
		inner.Go(func() error { return b.Run(run) })
	}
	inner.Go(func() error { return m.trace.Run(run) })
	if m.blobs != nil {
		inner.Go(func() error { return m.blobs.Run(run) })
	}
	if err := m.backend.WaitReady(ctx); err != nil {
		return err
	}
	inner.Go(func() error { return m.leaseLayers(run) })
	hostCtx, endHost := context.WithCancel(below)
	defer endHost()
	outer, both := errgroup.WithContext(hostCtx) // a host that refuses to start ends its server too
	outer.Go(func() error { return m.host.Run(both) })
	outer.Go(func() error { return server.Run(both, listeners...) })
	go func() {
		select {
		case <-m.host.Ready():
			up()
		case <-both.Done():
		}
	}()
	failed := make(chan error, 1)
	go func() { failed <- outer.Wait() }()
	select {
	case err = <-failed:
		return err
	case <-ctx.Done():
	case <-run.Done():
		err = context.Cause(run)
	}
	if stop {
		err = errors.Join(err, m.stopAll())
	}
	endHost()
	return errors.Join(err, <-failed)
}

// stopAll ends all sandboxes, then the keeper, and releases the pool.
func (m *machine) stopAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	err := errors.Join(m.host.StopAll(ctx), m.backend.Release(ctx))
	for _, b := range m.vms {
		err = errors.Join(err, b.Release(ctx))
	}
	if err == nil {
		m.endLease(ctx)
	}
	if m.blobs != nil { // after the keeper, whose mounts read through it
		err = errors.Join(err, m.blobs.Stop(ctx))
	}
	return err
}

// entry is a gateway with what it stands on.
type entry struct {
	gateway *gateway.Gateway
	layers  *layer.Catalogue
	store   store.Store
	images  *oci.Images
	monitor *monitor.Monitor
	facts   *facts.Bolt
	logger  *slog.Logger
	server  *rpc.Server
}

type gatewayFlags struct {
	Listen   string   `help:"Address for clients beside the socket; empty for none." default:"127.0.0.1:7300"`
	TLSCert  string   `name:"tls-cert" help:"Certificate (PEM) for the address." type:"existingfile" placeholder:"FILE"`
	TLSKey   string   `name:"tls-key" help:"Its key (PEM)." type:"existingfile" placeholder:"FILE"`
	Metrics  bool     `name:"open-metrics" help:"Serve /metrics without a key."`
	HostAddr []string `name:"host" help:"Address of a host: unix:/path, http://host:port or https://host:port; repeat." placeholder:"ADDR" sep:"none"`
}

func openGateway(ctx context.Context, p *places, f *gatewayFlags, stores []string, role string, peer rpc.PeerConfig, reg *prometheus.Registry, logger *slog.Logger) (e *entry, err error) {
	db, err := facts.OpenBolt(filepath.Join(p.State, "facts.db"))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			db.Close()
		}
	}()
	e = &entry{logger: logger, facts: db}
	st, err := openStore(p, stores)
	if err != nil {
		return nil, err
	}
	keys := iam.New(e.facts)
	if err := keys.CreateProject(ctx, iam.DefaultProject); err != nil {
		return nil, err
	}
	if err := keys.EnsureFirst(ctx, filepath.Join(p.RunDir, "key")); err != nil {
		return nil, err
	}
	hosts := append(f.HostAddr, p.settings.Gateway.Hosts...)
	if len(hosts) == 0 {
		return nil, errors.New("--host: name at least one host")
	}
	if e.monitor, err = monitor.New(monitor.Config{Hosts: hosts, Peer: peer}, logger); err != nil {
		return nil, err
	}
	gc := gateway.Config{Version: version, Role: role, Domain: p.settings.Gateway.Domain, Runtime: p.settings.Gateway.Runtime, OpenMetrics: f.Metrics, NoVNC: p.noVNC()}
	if _, err := sandbox.BackendOf("container", gc.Runtime); err != nil {
		return nil, fmt.Errorf("gateway.runtime: %w", err)
	}
	if err := setDuration(&gc.Stall, "gateway.stall", p.settings.Gateway.Stall); err != nil {
		return nil, err
	}
	if err := setDuration(&gc.LostAfter, "gateway.lost_after", p.settings.Gateway.LostAfter); err != nil {
		return nil, err
	}
	if gc.LostAfter < 0 || gc.LostAfter > 0 && gc.LostAfter < time.Minute {
		return nil, fmt.Errorf("gateway.lost_after %v: at least 1m, since it ends all that a silent host has; leave it out to leave that to a person: %w", gc.LostAfter, sandbox.ErrInvalid)
	}
	if p.settings.Gateway.Stall != "" && gc.Stall <= 0 {
		gc.Stall = -1
	}
	e.layers, e.store = layer.New(e.facts, st), st
	if e.images, err = p.images(e.layers, st, e.facts, logger); err != nil {
		return nil, err
	}
	langs, err := p.languages()
	if err != nil {
		return nil, err
	}
	e.gateway, err = gateway.New(gc, gateway.Deps{Fleet: e.monitor, Keys: keys, Layers: e.layers, Images: e.images, Languages: langs, Log: logger, Registry: reg,
		Facades: []func(*http.ServeMux, http.Handler){sandboxFusion}})
	if err != nil {
		return nil, err
	}
	e.server, err = rpc.NewServer(e.gateway.Handler(), rpc.ServerConfig{CertFile: f.TLSCert, KeyFile: f.TLSKey, Log: logger})
	return e, err
}

func (e *entry) serve(ctx context.Context, listeners ...net.Listener) error {
	defer e.facts.Close()
	g, run := errgroup.WithContext(ctx)
	g.Go(func() error { return e.monitor.Run(run) })
	g.Go(func() error { return e.gateway.Run(run) })
	g.Go(func() error { return e.server.Run(run, listeners...) })
	g.Go(func() error { return e.sweep(run) })
	g.Go(func() error { return e.images.Run(run) })
	g.Go(func() error {
		<-run.Done()
		e.gateway.Leave()
		return nil
	})
	return g.Wait()
}

// Layers that nobody holds are removed once they are old enough that no import or create can be about to use them.
const (
	sweepEvery = time.Hour
	sweepAge   = 6 * time.Hour
	// What a sweep deletes in a bucket is given back a day or two later; each collection reads all manifests.
	collectEvery = 6 * time.Hour
	collectGrace = 24 * time.Hour
)

func (e *entry) sweep(ctx context.Context) error {
	tick, collect := time.NewTicker(sweepEvery), time.NewTicker(collectEvery)
	defer tick.Stop()
	defer collect.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if _, err := e.layers.Sweep(ctx, sweepAge); err != nil && ctx.Err() == nil {
				e.logger.Error("sweep layers", "err", err)
			}
		case <-collect.C:
			r, ok, err := store.Collect(ctx, e.store, collectGrace, false)
			if err != nil && ctx.Err() == nil {
				e.logger.Error("collect the store", "err", err)
			} else if ok && (r.Condemned+r.Removed > 0 || len(r.Damaged) > 0) {
				e.logger.Info("store collected", "condemned", r.Condemned, "removed", r.Removed, "freed", r.Freed, "copied", r.Copied, "damaged", r.Damaged)
			}
		}
	}
}

// open prepares folders, settings and the logger of a service.
func (p *places) open() (*slog.Logger, error) {
	if err := p.load(); err != nil {
		return nil, err
	}
	for _, d := range []string{p.State, p.RunDir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	// A service's heap is a few MiB and its garbage mostly short-lived messages: collecting it a third as often costs little memory.
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(300)
	}
	logger, err := obs.NewLogger(os.Stderr, p.LogLevel, p.LogForm)
	if err != nil {
		return nil, err
	}
	if err := calm.Watch(); err != nil {
		logger.Debug("more CPU time than needed", "err", err)
	}
	return logger, nil
}

type upCmd struct {
	places
	hostFlags
	gatewayFlags
	Keep bool `help:"Leave keeper and sandboxes running when this ends; the next start takes them back."`
}

// Run serves gateway, monitor and host of one machine in one process; they talk through the interfaces that separate processes use.
func (x *upCmd) Run(ctx context.Context) error {
	logger, err := x.open()
	if err != nil {
		return err
	}
	token, err := clusterToken("", x.State)
	if err != nil {
		return err
	}
	reg := obs.NewRegistry()
	// The machine comes last: it mounts the pool, which a start that fails must not leave behind.
	inside := "unix:" + filepath.Join(x.RunDir, "host.sock")
	hostListener, err := rpc.Listen(inside)
	if err != nil {
		return err
	}
	defer hostListener.Close()
	listeners, err := listen(filepath.Join(x.RunDir, "dsec.sock"), x.Listen)
	if err != nil {
		return err
	}
	for _, l := range listeners {
		defer l.Close()
	}
	x.HostAddr = append(x.HostAddr, inside)
	local := new(rpc.Local)
	peer := rpc.PeerConfig{Token: token, Local: map[string]*rpc.Local{inside: local}}
	e, err := openGateway(ctx, &x.places, &x.gatewayFlags, x.Stores, "up", peer, reg, logger)
	if err != nil {
		return err
	}
	m, err := openMachine(ctx, &x.places, &x.hostFlags, token, reg, logger)
	if err != nil {
		e.facts.Close()
		return err
	}
	defer m.close()
	m.local = local
	up := func() {
		logger.Info("dsec is up", "host", m.id, "socket", filepath.Join(x.RunDir, "dsec.sock"), "address", x.Listen, "key_file", filepath.Join(x.RunDir, "key"), "pool", m.pool.Describe().Driver)
	}
	g, run := errgroup.WithContext(ctx)
	g.Go(func() error { return m.serve(run, !x.Keep, up, hostListener) })
	g.Go(func() error { return e.serve(run, listeners...) })
	err = g.Wait()
	if !x.Keep {
		err = errors.Join(err, m.pool.Close())
	}
	if err == nil {
		logger.Info("dsec has ended", "sandboxes_kept", x.Keep)
	}
	return err
}

func listen(socket, address string) ([]net.Listener, error) {
	l, err := rpc.Listen("unix:" + socket)
	if err != nil {
		return nil, err
	}
	out := []net.Listener{l}
	if address != "" {
		t, err := rpc.Listen(address)
		if err != nil {
			l.Close()
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}

type gatewayCmd struct {
	places
	gatewayFlags
	Stores    []string `name:"store" help:"Store of the layers, as the hosts have it: a folder or s3://BUCKET/PREFIX?endpoint=URL; repeat: the first is written (default: STATE/store)." placeholder:"STORE" sep:"none"`
	TokenFile string   `help:"File with the token that gateways and hosts share." type:"existingfile" required:""`
}

// Run serves a gateway with its monitor.
func (x *gatewayCmd) Run(ctx context.Context) error {
	logger, err := x.open()
	if err != nil {
		return err
	}
	token, err := clusterToken(x.TokenFile, x.State)
	if err != nil {
		return err
	}
	e, err := openGateway(ctx, &x.places, &x.gatewayFlags, x.Stores, "gateway", rpc.PeerConfig{Token: token}, obs.NewRegistry(), logger)
	if err != nil {
		return err
	}
	listeners, err := listen(filepath.Join(x.RunDir, "dsec.sock"), x.Listen)
	if err != nil {
		return err
	}
	logger.Info("gateway is up", "socket", filepath.Join(x.RunDir, "dsec.sock"), "address", x.Listen, "key_file", filepath.Join(x.RunDir, "key"),
		"hosts", strings.Join(append(x.HostAddr, x.settings.Gateway.Hosts...), " "))
	return e.serve(ctx, listeners...)
}

type hostCmd struct {
	places
	hostFlags
	Listen    string `help:"Address for gateways (default: unix:RUN/host.sock)." placeholder:"ADDR"`
	TokenFile string `help:"File with the token that gateways and hosts share." type:"existingfile" required:""`
	StopAll   bool   `help:"Stop all sandboxes when this ends; otherwise they and the keeper go on and the next start takes them back."`
}

// Run serves a host.
func (x *hostCmd) Run(ctx context.Context) error {
	logger, err := x.open()
	if err != nil {
		return err
	}
	token, err := clusterToken(x.TokenFile, x.State)
	if err != nil {
		return err
	}
	if x.Listen == "" {
		x.Listen = "unix:" + filepath.Join(x.RunDir, "host.sock")
	}
	l, err := rpc.Listen(x.Listen)
	if err != nil {
		return err
	}
	m, err := openMachine(ctx, &x.places, &x.hostFlags, token, obs.NewRegistry(), logger)
	if err != nil {
		l.Close()
		return err
	}
	defer m.close()
	up := func() {
		logger.Info("host is up", "host", m.id, "listen", x.Listen, "pool", m.pool.Describe().Driver)
	}
	err = m.serve(ctx, x.StopAll, up, l)
	if x.StopAll {
		err = errors.Join(err, m.pool.Close())
	}
	return err
}

type monitorCmd struct {
	HostAddr  []string `name:"host" help:"Address of a host; repeat." placeholder:"ADDR" required:"" sep:"none"`
	TokenFile string   `help:"File with the token that gateways and hosts share." type:"existingfile" required:""`
	Once      bool     `help:"Print once and end."`
}

// Run polls the hosts and prints what they report.
func (x *monitorCmd) Run(ctx context.Context) error {
	token, err := clusterToken(x.TokenFile, "")
	if err != nil {
		return err
	}
	mon, err := monitor.New(monitor.Config{Hosts: x.HostAddr, Peer: rpc.PeerConfig{Token: token}}, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	run, end := context.WithCancel(ctx)
	defer end()
	done := make(chan error, 1)
	go func() { done <- mon.Run(run) }()
	<-mon.Ready()
	for {
		printFleet(mon.Fleet())
		if x.Once {
			end()
			return <-done
		}
		select {
		case <-ctx.Done():
			return <-done
		case <-time.After(2 * time.Second):
		}
	}
}
