// Package gateway is the way in: it knows callers by their keys, resolves names, chooses hosts for new sandboxes and forwards everything
// else to the host that an ID names.
//
// It hides that there are many hosts. It keeps no state of its own: what it needs stands in the ID, in the fleet's picture, or is asked
// of hosts; where moved sandboxes are it remembers for speed alone. Any number of gateways may serve the same hosts, and one that is killed is
// replaced without loss. It holds no body as a whole: streams are passed on message by message, and a slow reader slows its writer.
//
// Invariants: a call reaches a host with the project that its key opens, and the host checks that the sandbox belongs to it. A call is
// sent twice to a host only when nothing of it was sent the first time, or when its key makes the second time harmless.
// Locks: recentMu and that of homes; nothing is called under either.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dsec-dev/dsec/api/dsec/v1/dsecv1connect"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/iam"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/obs"
	"github.com/dsec-dev/dsec/internal/oci"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Config is what an operator may turn.
type Config struct {
	Version string // of the software
	Role    string // "gateway" or "up", for InfoService
	// Domain is under which "<port>-<sandbox>.<domain>" reaches ports. Without one, that form works for IDs under any domain.
	Domain string
	// Stall ends a body of which no octet moved for so long; 0 is 60 s, below 0 never.
	Stall time.Duration
	// Runtime of containers whose create names none; "" is direct.
	Runtime string
	// NoVNC is the folder of noVNC's package, for the view of screens; "" is none.
	NoVNC string
	// OpenMetrics serves /metrics without a key.
	OpenMetrics bool
	// LostAfter is for how long a host must have been silent to be given up without a person: what it has is over then, see lost.go. 0 is never.
	LostAfter time.Duration
}

// Fleet is the picture of the hosts and the way to them.
type Fleet interface {
	Fleet() *placement.Fleet
	Peer(id sandbox.HostID) (*rpc.Peer, bool)
	Ready() <-chan struct{} // closed when every host was asked once
}

// Deps are what a gateway works with.
type Deps struct {
	Fleet  Fleet
	Keys   *iam.Keys
	Layers *layer.Catalogue
	Images *oci.Images // nil: creates name no images
	// Languages of function calls; nil: none are served.
	Languages fncall.Languages
	Log       *slog.Logger
	Registry  *prometheus.Registry // nil: no metrics
	// Facades add routes that speak other systems' protocols. Each gets the gateway's own handler, which it calls as a client would.
	Facades []func(mux *http.ServeMux, gateway http.Handler)
}

// Gateway serves the public API.
type Gateway struct {
	cfg       Config
	fleet     Fleet
	keys      *iam.Keys
	layers    *layer.Catalogue
	images    *oci.Images
	languages fncall.Languages
	log       *slog.Logger
	edge      *rpc.Edge
	handler   http.Handler
	ports     *ports
	watch     *watch
	random    func() *rand.Rand
	leaving   atomic.Bool
	// abandoned counts creates whose sandboxes are being stopped since nobody could find them.
	abandoned atomic.Int64
	askTime   time.Duration
	born      time.Time
	homes     homes

	recentMu sync.Mutex
	recent   placement.Recent
}

const (
	readyWait  = 5 * time.Second  // of a call that comes before the hosts have answered
	youth      = 30 * time.Second // of a gateway, in which calls wait so
	hostWait   = 10 * time.Second // for a host that was up a moment ago and refuses connections: it is being restarted
	callTime   = 30 * time.Minute // of a function call: its limits and its wait for a place have bounds of their own
	createTime = 60 * time.Second // default of CreateRequest.deadline_ms
	fanOut     = 64               // hosts asked at once by one call
)

// New starts nothing.
func New(cfg Config, d Deps) (*Gateway, error) {
	if cfg.Role == "" {
		cfg.Role = "gateway"
	}
	if cfg.Stall == 0 {
		cfg.Stall = defaultStall
	}
	cfg.Domain = strings.ToLower(strings.Trim(cfg.Domain, "."))
	g := &Gateway{cfg: cfg, fleet: d.Fleet, keys: d.Keys, layers: d.Layers, images: d.Images, languages: d.Languages, log: d.Log, askTime: askTime, born: time.Now()}
	g.random = func() *rand.Rand { return rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())) }
	g.edge = &rpc.Edge{Log: d.Log, Guard: g.guard, Deadline: map[string]time.Duration{
		dsecv1connect.SandboxServiceSnapshotProcedure:    15 * time.Minute,
		dsecv1connect.SandboxServiceMigrateProcedure:     migrateTime,
		dsecv1connect.SandboxServiceCreateBatchProcedure: 15 * time.Minute,
		dsecv1connect.ImageServicePutImageProcedure:      15 * time.Minute,
		dsecv1connect.RestoreServiceRestoreProcedure:     5 * time.Minute, // above its own wait
		dsecv1connect.SandboxServiceCreateProcedure:      5 * time.Minute, // above the request's own deadline
		dsecv1connect.FnCallServiceRunProcedure:          callTime,
		dsecv1connect.FnCallServiceRunBatchProcedure:     callTime,
		dsecv1connect.FnCallServiceRunPairProcedure:      callTime,
	}}
	if d.Registry != nil {
		calls, err := obs.NewCalls(d.Registry, "gateway")
		if err != nil {
			return nil, err
		}
		g.edge.Observe = calls.Observe
		if c, ok := d.Fleet.(prometheus.Collector); ok {
			if err := d.Registry.Register(c); err != nil {
				return nil, fmt.Errorf("register metrics of the fleet: %w", err)
			}
		}
	}
	g.ports = newPorts(g)
	g.watch = &watch{check: d.Keys.Check, tick: watchTick, every: keyEvery, stall: cfg.Stall, open: map[*watched]struct{}{}}
	mux := http.NewServeMux()
	opts := g.edge.Options()
	mux.Handle(dsecv1connect.NewInfoServiceHandler(info{g: g}, opts...))
	mux.Handle(dsecv1connect.NewSandboxServiceHandler(sandboxes{g: g}, opts...))
	mux.Handle(dsecv1connect.NewCommandServiceHandler(commands{g: g}, opts...))
	mux.Handle(dsecv1connect.NewFileServiceHandler(files{g: g}, opts...))
	mux.Handle(dsecv1connect.NewDisplayServiceHandler(displays{g: g}, opts...))
	mux.Handle(dsecv1connect.NewLogServiceHandler(logs{g: g}, opts...))
	mux.Handle(dsecv1connect.NewJobServiceHandler(jobs{g: g}, opts...))
	mux.Handle(dsecv1connect.NewFnCallServiceHandler(calls{g: g}, opts...))
	mux.Handle(dsecv1connect.NewRestoreServiceHandler(restores{g: g}, opts...))
	mux.Handle(dsecv1connect.NewLayerServiceHandler(layers{g: g}, opts...))
	mux.Handle(dsecv1connect.NewImageServiceHandler(images{g: g}, opts...))
	mux.Handle(dsecv1connect.NewIamServiceHandler(keys{g: g}, opts...))
	mux.HandleFunc("GET "+garbagePath, g.garbage)
	mux.HandleFunc("GET /v1/files/{sandbox}", g.readFile)
	mux.HandleFunc("PUT /v1/files/{sandbox}", g.writeFile)
	mux.HandleFunc("GET /v1/trees/{sandbox}", g.readTree)
	mux.HandleFunc("PUT /v1/trees/{sandbox}", g.writeTree)
	mux.HandleFunc("PUT /v1/layers", g.putLayer)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", g.readyz)
	if d.Registry != nil {
		mux.Handle("GET /metrics", obs.Handler(d.Registry))
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		rpc.WriteError(w, fmt.Errorf("%s %.200q: nothing is here; see docs/http.md: %w", r.Method, r.URL.Path, sandbox.ErrNotFound))
	})
	plain := g.edge.Wrap(g.watch.wrap(mux))
	views := http.NewServeMux() // their key comes as those of ports do, and some need none
	newScreens(g).routes(views)
	facades := http.NewServeMux()
	for _, add := range d.Facades {
		add(facades, plain)
	}
	g.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Ports come first and not through the mux, which answers odd paths with a redirect: paths there are the application's.
		if t, ok := g.ports.target(r); ok {
			g.ports.serve(w, r, t)
			return
		}
		for _, mux := range []*http.ServeMux{views, facades} {
			if _, pattern := mux.Handler(r); pattern != "" {
				mux.ServeHTTP(w, r)
				return
			}
		}
		plain.ServeHTTP(w, r)
	})
	return g, nil
}

// Handler serves the public API: Connect, gRPC and plain HTTP.
func (g *Gateway) Handler() http.Handler { return g.handler }

// Leave makes /readyz fail, so that no new callers are sent here before a shutdown.
func (g *Gateway) Leave() { g.leaving.Store(true) }

func (g *Gateway) readyz(w http.ResponseWriter, r *http.Request) {
	f := g.fleet.Fleet()
	up := 0
	for _, h := range f.Hosts {
		if h.Up {
			up++
		}
	}
	switch {
	case g.leaving.Load():
		http.Error(w, "going down", http.StatusServiceUnavailable)
	case up == 0:
		http.Error(w, "no host answers", http.StatusServiceUnavailable)
	default:
		fmt.Fprintf(w, "ok: %d of %d hosts answer\n", up, len(f.Hosts)+len(f.Nameless))
	}
}

// guard lets in who shows a key; who asks for a project below the key's gets it.
func (g *Gateway) guard(ctx context.Context, path string, h http.Header) (context.Context, error) {
	if strings.HasPrefix(path, "/"+dsecv1connect.InfoServiceName+"/") || path == "/healthz" || path == "/readyz" || path == "/metrics" && g.cfg.OpenMetrics {
		return ctx, nil
	}
	if path == "/metrics" || path == garbagePath {
		return ctx, g.operator(ctx, keyOf(h))
	}
	return g.admit(ctx, keyOf(h), h.Get(rpc.HeaderProject))
}

// operator lets in the keys of the first project alone: figures of the whole fleet are no business of a project below it.
func (g *Gateway) operator(ctx context.Context, secret string) error {
	id, err := g.keys.Verify(ctx, secret)
	if err == nil && id.Project != iam.DefaultProject {
		err = fmt.Errorf("metrics and garbage tell of all projects: want a key of project %s, not of %.200s (for metrics alone: or a gateway with --open-metrics): %w", iam.DefaultProject, id.Project, sandbox.ErrDenied)
	}
	return err
}

func (g *Gateway) admit(ctx context.Context, secret, project string) (context.Context, error) {
	id, err := g.keys.Verify(ctx, secret)
	if err != nil {
		return ctx, err
	}
	ctx = context.WithValue(ctx, callerKey{}, id.Key)
	if project != "" && project != id.Project {
		if !iam.Within(id.Project, project) {
			return ctx, fmt.Errorf("project %.200q: the key is for %s and those below it: %w", project, id.Project, sandbox.ErrDenied)
		}
		if err := g.keys.CheckProject(ctx, project); err != nil {
			return ctx, err
		}
		return rpc.WithProject(ctx, project), nil
	}
	return rpc.WithProject(ctx, id.Project), nil
}

// keyOf finds the key in a request's headers; "" when there is none.
func keyOf(h http.Header) string {
	if k := h.Get("X-Api-Key"); k != "" {
		return k
	}
	return bearer(h)
}

func bearer(h http.Header) string {
	scheme, key, ok := strings.Cut(h.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "bearer") {
		return ""
	}
	return strings.TrimSpace(key)
}

// ready waits in the first moments of a gateway: until the hosts were asked once, and while none of them answers, which start at the same
// time as this in one process. Later it does not wait.
func (g *Gateway) ready(ctx context.Context) {
	if time.Since(g.born) > youth {
		return
	}
	until := time.NewTimer(readyWait)
	defer until.Stop()
	select {
	case <-g.fleet.Ready():
	case <-until.C:
		return
	case <-ctx.Done():
		return
	}
	for len(g.fleet.Fleet().Hosts) == 0 {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-until.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// locate finds the host of a sandbox by its ID or name. The answered reference is what to send to it.
func (g *Gateway) locate(ctx context.Context, ref string) (string, *rpc.Peer, error) {
	if id, err := sandbox.ParseID(ref); err == nil {
		p, err := g.peerOf(ctx, id)
		return ref, p, err
	}
	if ref == "" {
		return "", nil, fmt.Errorf("sandbox: give its id or name: %w", sandbox.ErrInvalid)
	}
	if err := sandbox.CheckName(ref); err != nil {
		return "", nil, fmt.Errorf("sandbox %.80q: is neither an id nor a name: %w", ref, sandbox.ErrInvalid)
	}
	g.ready(ctx)
	f := g.fleet.Fleet()
	if len(f.Hosts) == 1 && len(f.Nameless) == 0 {
		p, _ := g.fleet.Peer(f.Hosts[0].ID)
		return ref, p, nil // the only host resolves it itself
	}
	sb, p, err := g.find(ctx, f, finding{name: ref})
	if err != nil {
		return "", nil, err
	}
	if sb == nil {
		return "", nil, fmt.Errorf("sandbox %s: no living sandbox of the project has that name: %w", ref, sandbox.ErrNotFound)
	}
	return sb.GetId(), p, nil
}

func (g *Gateway) peerOf(ctx context.Context, id sandbox.ID) (*rpc.Peer, error) {
	host := id.Host()
	if at, ok := g.homes.get(id); ok {
		host = at
	}
	p, ok := g.fleet.Peer(host)
	if !ok {
		g.ready(ctx)
		p, ok = g.fleet.Peer(host)
	}
	if ok && g.seemsUp(p) {
		return p, nil
	}
	// It may have been restored elsewhere: who goes on with it also answers for it.
	if moved := g.movedTo(ctx, id); moved != nil {
		return moved, nil
	}
	if ok {
		return p, nil
	}
	if f := g.fleet.Fleet(); len(f.Nameless) > 0 {
		return nil, fmt.Errorf("sandbox %s: its host %s is not known yet, and %s did not answer so far: %w", id, host, strings.Join(f.Nameless, ", "), rpc.ErrUnavailable)
	}
	return nil, fmt.Errorf("sandbox %s: its host %s does not belong to this cluster: %w", id, host, sandbox.ErrNotFound)
}

// seemsUp reports whether the host of a peer answered lately.
func (g *Gateway) seemsUp(p *rpc.Peer) bool {
	for _, h := range g.fleet.Fleet().Hosts {
		if h.Addr == p.Addr {
			return h.Up
		}
	}
	return true
}

// patient calls a host again while it refuses connections, as in a restart, for up to hostWait. What was sent is sent again only
// when the call allows it.
func patient[S any](ctx context.Context, g *Gateway, p *rpc.Peer, again bool, call func() (S, error)) (S, error) {
	until := time.Now().Add(hostWait)
	for pause := 25 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		out, err := call()
		if err == nil {
			return out, nil
		}
		unsent := rpc.Unsent(err)
		err = rpc.FromError(err)
		if !errors.Is(err, rpc.ErrUnavailable) || !unsent && !again || !time.Now().Before(until) || !g.seemsUp(p) {
			return out, named(err, p, unsent)
		}
		select {
		case <-ctx.Done():
			return out, named(err, p, unsent)
		case <-time.After(pause):
		}
	}
}

// named puts the host into an error that is about reaching it.
func named(err error, p *rpc.Peer, unsent bool) error {
	if errors.Is(err, rpc.ErrMoved) {
		return fmt.Errorf("%v: %w", err, rpc.ErrUnavailable)
	}
	if !errors.Is(err, rpc.ErrUnavailable) {
		return err
	}
	if unsent {
		return fmt.Errorf("host at %s does not answer (%v); nothing was sent: %w", p.Addr, err, rpc.ErrUnavailable)
	}
	return fmt.Errorf("host at %s went away during the call (%v); whether it had an effect is not known, the same call is safe to repeat: %w", p.Addr, err, rpc.ErrUnavailable)
}
