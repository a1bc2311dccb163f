package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

func (s sandboxes) Create(ctx context.Context, r *connect.Request[dsecv1.CreateRequest]) (*connect.Response[dsecv1.CreateResponse], error) {
	out, err := s.g.create(ctx, r.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(out), nil
}

// create makes one sandbox, or finds the one that its key made before.
func (g *Gateway) create(ctx context.Context, q *dsecv1.CreateRequest) (*dsecv1.CreateResponse, error) {
	limit, err := rpc.Milliseconds("deadline_ms", q.GetDeadlineMs())
	if err != nil {
		return nil, err
	}
	switch {
	case limit < 0:
		return nil, fmt.Errorf("deadline_ms %d: must not be negative; 0 takes 60,000: %w", q.GetDeadlineMs(), sandbox.ErrInvalid)
	case limit == 0:
		limit = createTime
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()

	nameless := q.Key == ""
	order := orderOf(q.Job, q.Key, q.Name)
	if q.Key == "" && q.Name == "" {
		order = "" // nobody can send it again, so load decides
	}
	hq, spec, err := g.resolve(ctx, q)
	if err != nil {
		return nil, err
	}
	g.ready(ctx)
	f := g.fleet.Fleet()
	req := &placement.Request{Order: order, Backend: spec.Backend, Network: spec.Network, OnIdle: spec.Lifetime.OnIdle, Disk: spec.Resources.Disk}
	g.recentMu.Lock()
	d := placement.Pick(f, req, &g.recent, time.Now(), g.random())
	g.recentMu.Unlock()
	if order != "" {
		if d.Hosts, err = g.known(ctx, f, d.Hosts, spec); err != nil {
			return nil, err
		}
	}
	out, tried, err := g.place(ctx, hq, d)
	if err == nil && ctx.Err() != nil && nameless {
		err = ctx.Err() // nobody waits for the answer any more
	}
	switch {
	case err == nil:
		return out, nil
	case !mayLive(err):
		return nil, err
	case nameless:
		g.abandonCreate(ctx, tried, spec)
		return nil, fmt.Errorf("create: %w (it had no key, so whatever comes of it is stopped)", err)
	case errors.Is(err, context.DeadlineExceeded):
		return nil, fmt.Errorf("create with key %s: no answer within its deadline of %v; it goes on: the same call again joins it, a stop by key %s of job %s ends it: %w",
			spec.Key, limit, spec.Key, spec.Job, err)
	}
	return nil, err
}

// mayLive reports whether a create that failed so may have made a sandbox all the same.
func mayLive(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || errors.Is(err, rpc.ErrUnavailable)
}

// How long and how often a host is asked to stop what an abandoned create may have made there.
const (
	abandonFor  = 2 * time.Minute
	abandonMost = 256 // at once; more wait for nothing and are left to their lifetimes
)

// abandonCreate stops what a create may have made whose client gave no key and got no answer: nobody could find it. A stop by key that
// comes before the birth prevents it.
func (g *Gateway) abandonCreate(ctx context.Context, host sandbox.HostID, spec *sandbox.Spec) {
	if host == "" {
		return
	}
	if g.abandoned.Add(1) > abandonMost {
		g.abandoned.Add(-1)
		g.log.Error("too many creates without a key were given up at once; what came of this one ends with its lifetime", "host", host, "key", spec.Key, "project", spec.Project)
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abandonFor)
	go func() {
		defer g.abandoned.Add(-1)
		defer cancel()
		for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
			err := fmt.Errorf("host %s: is gone: %w", host, rpc.ErrUnavailable)
			if p, ok := g.fleet.Peer(host); ok {
				_, err = p.Sandboxes.Stop(ctx, connect.NewRequest(&dsecv1.StopRequest{Job: spec.Job, Key: spec.Key, Name: spec.Name}))
				err = rpc.FromError(err)
			}
			if err == nil || errors.Is(err, sandbox.ErrNotFound) {
				return
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				g.log.Error("stop what a given up create made", "host", host, "key", spec.Key, "project", spec.Project, "err", err)
				return
			}
		}
	}()
}

// resolve makes the request of a host out of that of a client: names become layers, defaults are filled in, all is checked.
func (g *Gateway) resolve(ctx context.Context, q *dsecv1.CreateRequest) (*dsecv1.HostCreateRequest, *sandbox.Spec, error) {
	keyless := q.Key == ""
	if keyless {
		q.Key = sandbox.NewKey()
	}
	project := rpc.Project(ctx)
	res, err := rpc.Resources(q.GetResources())
	if err != nil {
		return nil, nil, err
	}
	life, err := rpc.Lifetime(q.GetLifetime())
	if err != nil {
		return nil, nil, err
	}
	env, secret, err := rpc.Env("env", q.GetEnv())
	if err != nil {
		return nil, nil, err
	}
	cwd, err := rpc.Octets("cwd", q.GetCwd(), q.GetCwdRaw())
	if err != nil {
		return nil, nil, err
	}
	runtime := q.GetRuntime()
	if runtime == "" && (q.GetBackend() == "" || q.GetBackend() == "container") {
		runtime = g.cfg.Runtime
	}
	backend, err := sandbox.BackendOf(q.GetBackend(), runtime)
	if err != nil {
		return nil, nil, err
	}
	spec := &sandbox.Spec{
		Project: project, Job: q.GetJob(), Key: q.GetKey(), Name: q.GetName(), Labels: q.GetLabels(), Backend: backend,
		User: q.GetUser(), Cwd: cwd, Hostname: q.GetHostname(), Entry: q.GetEntrypoint(), Resources: res, Lifetime: life,
		Network: sandbox.NetworkMode(q.GetNetwork()), AllowDegraded: q.GetAllowDegraded(), BestEffort: q.GetBestEffort(), NoNewPrivs: q.GetNoNewPrivs(), Durability: sandbox.Durability(q.GetDurability()),
		Trace: sandbox.TraceLevel(q.GetTrace()), Volatile: q.GetVolatilePaths(),
	}
	switch {
	case q.Environment != "" && len(q.Layers) > 0, q.Image != "" && (q.Environment != "" || len(q.Layers) > 0):
		return nil, nil, fmt.Errorf("environment, layers and image: give one of them: %w", sandbox.ErrInvalid)
	case q.Pull != "" && q.Image == "":
		return nil, nil, fmt.Errorf("pull %.40q: is about an image, and none is named: %w", q.Pull, sandbox.ErrInvalid)
	case q.Environment != "" || q.Image != "":
		e, err := g.environment(ctx, project, q)
		if err != nil {
			return nil, nil, err
		}
		if err := imageEntry(spec, q, &e); err != nil {
			return nil, nil, err
		}
		spec.EnvName = e.Ref()
		for _, id := range e.Layers {
			spec.Layers = append(spec.Layers, string(id))
		}
		env = sandbox.MergeEnv(e.Spec.Env, env)
		def := func(to *string, from string) {
			if *to == "" {
				*to = from
			}
		}
		def(&spec.User, e.Spec.User)
		def(&spec.Cwd, e.Spec.Cwd)
		spec.Resources = over(e.Spec.Resources, spec.Resources)
		spec.Volatile = slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(e.Spec.Volatile), spec.Volatile...))))
	case len(q.Layers) > 0:
		ids, err := g.layers.Compose(ctx, project, q.Layers)
		if err != nil {
			return nil, nil, err
		}
		for _, id := range ids {
			spec.Layers = append(spec.Layers, string(id))
		}
		env = sandbox.MergeEnv(nil, env)
	}
	spec.Env = env
	if spec.Volumes, err = g.volumes(ctx, project, q.GetVolumes()); err != nil {
		return nil, nil, err
	}
	spec.Fill()
	if err := spec.Validate(); err != nil {
		return nil, nil, err
	}
	hash, err := rpc.CreateHash(project, q)
	if err != nil {
		return nil, nil, err
	}
	return &dsecv1.HostCreateRequest{Spec: rpc.SpecProto(spec, secret), RequestHash: hash, Request: q, Keyless: keyless}, spec, nil
}

// environment finds the environment that a create names, by itself or by the image it is made of.
func (g *Gateway) environment(ctx context.Context, project string, q *dsecv1.CreateRequest) (layer.Environment, error) {
	if q.Image != "" {
		return g.imageEnvironment(ctx, project, q.Image, q.Pull)
	}
	return g.layers.Resolve(ctx, project, q.Environment)
}

// volumes resolves the layers of volumes.
func (g *Gateway) volumes(ctx context.Context, project string, list []*dsecv1.Volume) ([]sandbox.Volume, error) {
	out := rpc.Volumes(list)
	if err := sandbox.CheckVolumes(out); err != nil {
		return nil, err
	}
	for i, v := range out {
		found, err := g.layers.Lookup(ctx, project, v.Layer)
		if err != nil {
			return nil, fmt.Errorf("volume at %s: %w", v.Path, err)
		}
		d, err := g.layers.Descriptor(ctx, found.ID)
		if err != nil {
			return nil, fmt.Errorf("volume at %s: %w", v.Path, err)
		}
		if len(d.Parents) > 0 {
			return nil, fmt.Errorf("volume at %s: layer %s is a snapshot, which means nothing without the layers that it lies on; import the data as a layer: %w", v.Path, v.Layer, sandbox.ErrInvalid)
		}
		out[i].Layer = string(found.ID)
	}
	return out, nil
}

// imageEntry makes the image's own program the sandbox's entrypoint when the create asks for it.
func imageEntry(spec *sandbox.Spec, q *dsecv1.CreateRequest, e *layer.Environment) error {
	if !q.ImageEntrypoint {
		return nil
	}
	i := e.Spec.Image
	switch {
	case len(spec.Entry) > 0:
		return fmt.Errorf("entrypoint and image_entrypoint: give one of them: %w", sandbox.ErrInvalid)
	case i == nil || len(i.Entrypoint)+len(i.Cmd) == 0:
		return fmt.Errorf("image_entrypoint: environment %s has none: %w", e.Ref(), sandbox.ErrInvalid)
	}
	spec.Entry = append(append([]string{}, i.Entrypoint...), i.Cmd...)
	return nil
}

// over lays the limits of a request on an environment's.
func over(env, req sandbox.Resources) sandbox.Resources {
	for _, f := range []struct {
		to   *int64
		from int64
	}{{&req.Memory, env.Memory}, {&req.Disk, env.Disk}, {&req.Pids, env.Pids}, {&req.CPU, env.CPU}, {&req.CPUWeight, env.CPUWeight}} {
		if *f.to == 0 {
			*f.to = f.from
		}
	}
	return req
}

// known puts the host that already has the key or name in front. A name is unique and a key makes one sandbox over all hosts, so all are
// asked, and one that can't be asked makes the create fail rather than place twice. The first host in order is left out: it
// compares by itself when the create reaches it.
func (g *Gateway) known(ctx context.Context, f *placement.Fleet, hosts []sandbox.HostID, spec *sandbox.Spec) ([]sandbox.HostID, error) {
	if len(f.Hosts) < 2 && len(f.Nameless) == 0 {
		return hosts, nil
	}
	lost := g.lostHosts(f, time.Now())
	living := without(placement.Order(f, orderOf(spec.Job, spec.Key, spec.Name)), lost)
	order := living
	if len(hosts) > 0 && len(order) > 0 && order[0] == hosts[0] {
		order = order[1:]
	}
	wants := []finding{{job: spec.Job, key: spec.Key}}
	if spec.Name != "" {
		wants = append(wants, finding{name: spec.Name})
	}
	for _, w := range wants {
		if len(order) == 0 {
			if len(f.Nameless) > 0 {
				return nil, fmt.Errorf("create with %s: %s did not answer so far, so whether it was made is not known; repeat the call. %s: %w", w, firstOf(f.Nameless), whatToDo(f, time.Now()), rpc.ErrUnavailable)
			}
			break
		}
		sb, p, err := g.findOn(ctx, f, order, w)
		if err != nil {
			return nil, fmt.Errorf("create: %w", err)
		}
		if sb == nil {
			continue
		}
		return only(f, p, hosts), nil
	}
	if len(lost) == 0 {
		return hosts, nil
	}
	// The host that creates comes first among those that may take over, so that both are one.
	sb, p, err := g.recall(ctx, append(slices.Clone(hosts), living...), lost, wants[0])
	if err != nil {
		return nil, fmt.Errorf("create: %w", err)
	}
	if sb != nil {
		return only(f, p, hosts), nil
	}
	return hosts, nil
}

// only is the host of a peer: it alone decides, joins, or names the difference.
func only(f *placement.Fleet, p *rpc.Peer, hosts []sandbox.HostID) []sandbox.HostID {
	for _, h := range f.Hosts {
		if h.Addr == p.Addr {
			return []sandbox.HostID{h.ID}
		}
	}
	return hosts
}

// place sends the create to one host after the other until one takes it; it answers also which it tried last.
func (g *Gateway) place(ctx context.Context, hq *dsecv1.HostCreateRequest, d placement.Decision) (*dsecv1.CreateResponse, sandbox.HostID, error) {
	var full []error
	for _, id := range d.Hosts {
		p, ok := g.fleet.Peer(id)
		if !ok {
			continue
		}
		resp, err := patient(ctx, g, p, true, func() (*connect.Response[dsecv1.CreateResponse], error) {
			return p.Host.Create(ctx, connect.NewRequest(hq))
		})
		switch {
		case err == nil:
			if !resp.Msg.GetExisted() {
				g.recentMu.Lock()
				g.recent.Add(id, time.Now())
				g.recentMu.Unlock()
			}
			return resp.Msg, id, nil
		case errors.Is(err, sandbox.ErrExhausted):
			full = append(full, fmt.Errorf("host %s: %w", id, err))
		case errors.Is(err, rpc.ErrUnavailable) && g.seemsUp(p):
			// It may have had the sandbox of the key, and given it away.
			_, next, ferr := g.follow(ctx, finding{job: hq.Spec.Job, key: hq.Spec.Key}, p)
			if errors.Is(ferr, errOver) { // the key is free, on any host that did not give it away
				full = append(full, ferr)
				continue
			}
			if ferr != nil || next == nil {
				return nil, id, err
			}
			resp, err := send(ctx, g, next, hq, true, next.Host.Create)
			if err != nil {
				return nil, id, err
			}
			return resp.Msg, id, nil
		default:
			// Also a host that went away: it may have made the sandbox, so no other is tried. The key finds it later.
			return nil, id, err
		}
	}
	return nil, "", refusal(d.Refused, full)
}

// refusal says why no host took a create: why each did not, and the most hopeful of the reasons as the code.
func refusal(refused []placement.Refused, full []error) error {
	var why []string
	for _, e := range full {
		why = append(why, e.Error())
	}
	for _, r := range refused {
		why = append(why, fmt.Sprintf("host %s %s", r.Host, r.Reason))
	}
	if len(why) > 8 {
		why = append(why[:8], fmt.Sprintf("and %d more", len(why)-8))
	}
	text := strings.Join(why, "; ")
	has := func(want error) bool {
		return slices.ContainsFunc(refused, func(r placement.Refused) bool { return errors.Is(r.Err, want) })
	}
	switch {
	case len(full) > 0 || has(sandbox.ErrExhausted):
		return fmt.Errorf("create: no host takes it now: %s: %w", text, sandbox.ErrExhausted)
	case has(sandbox.ErrLost):
		return fmt.Errorf("create: no host that could take it answers: %s: %w", text, rpc.ErrUnavailable)
	case len(refused) > 0:
		return fmt.Errorf("create: no host is able to: %s: %w", text, sandbox.ErrUnsupported)
	}
	return fmt.Errorf("create: no host answers: %w", rpc.ErrUnavailable)
}
