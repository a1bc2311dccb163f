package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"reflect"
	"runtime"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Policies of a pull.
const (
	PullMissing = "missing" // ask the registry only when the image is not there
	PullAlways  = "always"  // ask what the tag means now, though at most once in Config.Recheck
)

const (
	maxPulls   = 1024 // under way or waiting
	pullTime   = 2 * time.Hour
	pullsAtAll = 32 // that talk to registries at once
)

// Config is what an operator may turn.
type Config struct {
	// Mirrors are asked before a registry: registry host -> host[/prefix] in order.
	Mirrors map[string][]string
	// Insecure are hosts (with or without a port) that may be talked to without TLS.
	Insecure []string
	// Recheck is how long a tag's meaning is believed under PullAlways; default 5 min.
	Recheck time.Duration
	// Parallel is how many layers are fetched and converted at once; default two a CPU and at least 8. A project has at most half of
	// them, of images as well, so that its slow registry does not hold up the others.
	Parallel int
	// Arch is of the images that are taken; default this machine's.
	Arch string
	// Limits of one layer.
	Limits layer.Limits
	// Credentials are shown to a registry when the project has none for it.
	Credentials map[string]Credential
}

// Deps are what Images work with.
type Deps struct {
	Layers *layer.Catalogue
	Store  store.Store
	Facts  facts.Facts
	Log    *slog.Logger
}

// Images knows the images that became environments, and makes more.
type Images struct {
	cfg         Config
	layers      *layer.Catalogue
	store       store.Store
	facts       facts.Facts
	log         *slog.Logger
	net         *network
	now         func() time.Time
	conversions *shares
	images      *shares
	pause       time.Duration // before a broken blob is taken up again; 0 is the default
	patience    time.Duration // with a manifest; 0 is the default

	mu      sync.Mutex
	base    context.Context // of pulls that outlive their caller; nil before Run
	work    sync.WaitGroup
	pulls   map[string]*flight[*Image]
	layersF map[string]*flight[*record]
}

// New starts nothing.
func New(cfg Config, d Deps) *Images {
	if cfg.Recheck <= 0 {
		cfg.Recheck = 5 * time.Minute
	}
	if cfg.Parallel <= 0 {
		cfg.Parallel = max(8, 2*runtime.GOMAXPROCS(0))
	}
	if cfg.Arch == "" {
		cfg.Arch = runtime.GOARCH
	}
	return &Images{cfg: cfg, layers: d.Layers, store: d.Store, facts: d.Facts, log: d.Log, net: newNetwork(cfg.Insecure), now: time.Now,
		conversions: newShares(cfg.Parallel), images: newShares(pullsAtAll),
		pulls: map[string]*flight[*Image]{}, layersF: map[string]*flight[*record]{}}
}

// Run lets pulls go on when their caller leaves, as a create does at its deadline, until ctx ends; then it ends them. It sweeps now and
// then.
func (im *Images) Run(ctx context.Context) error {
	im.mu.Lock()
	im.base = ctx
	im.mu.Unlock()
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			im.work.Wait()
			return nil
		case <-tick.C:
			if _, err := im.Sweep(ctx, sweepAge); err != nil && ctx.Err() == nil {
				im.log.Error("sweep images", "err", err)
			}
		}
	}
}

// flight is one piece of work that several may wait for.
type flight[T any] struct {
	done  chan struct{}
	value T
	err   error
}

func (f *flight[T]) wait(ctx context.Context) (T, error) {
	select {
	case <-f.done:
		return f.value, f.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// Event is a step of a pull.
type Event struct {
	Layer       string // digest
	State       string // waiting, converting, there, done
	Done, Total int64  // octets, compressed
}

// Image is one that became an environment.
type Image struct {
	Ref         string           `json:"ref"`
	Digest      string           `json:"digest"`
	Environment string           `json:"environment"` // name@version
	Config      layer.ImageFacts `json:"config"`
	Checked     time.Time        `json:"checked"`
	Octets      int64            `json:"octets"`
	Layers      []layer.ID       `json:"-"`
	Existed     bool             `json:"-"` // no layer was converted
}

// Pull says what to pull.
type Pull struct {
	Ref    string
	Policy string // PullMissing when empty
	// Credential is shown to the reference's own registry instead of the kept one, and not kept.
	Credential Credential
	// Progress is told of steps, from several goroutines. May be nil.
	Progress func(Event)
}

func factKey(project string, r Ref) string { return "image:" + project + ":" + r.String() }

// Pull makes an environment of an image for the project and answers it. When the caller leaves, the work goes on, so that the same
// call later finds it done.
func (im *Images) Pull(ctx context.Context, project string, p Pull) (*Image, error) {
	if err := sandbox.CheckProject(project); err != nil {
		return nil, err
	}
	r, err := ParseRef(p.Ref)
	if err != nil {
		return nil, err
	}
	switch p.Policy {
	case "", PullMissing, PullAlways:
	default:
		return nil, fmt.Errorf("pull %.40q: want missing or always: %w", p.Policy, sandbox.ErrInvalid)
	}
	if got, err := im.get(ctx, project, r); err == nil {
		if p.Policy != PullAlways || r.Digest != "" || im.now().Sub(got.Checked) < im.cfg.Recheck {
			got.Existed = true
			return got, nil
		}
	} else if !errors.Is(err, sandbox.ErrNotFound) {
		return nil, err
	}
	if loopbackName(r.Host) { // made by an import from a file
		return nil, fmt.Errorf("image %s: was not imported, and localhost is no registry; give its port, or import it: %w", r, sandbox.ErrNotFound)
	}
	if p.Credential != (Credential{}) || p.Progress != nil {
		// Seen and paid for by this caller alone.
		return im.pull(ctx, project, r, p)
	}
	f, err := im.background(factKey(project, r), func(ctx context.Context) (*Image, error) { return im.pull(ctx, project, r, p) })
	if err != nil {
		return nil, err
	}
	got, err := f.wait(ctx)
	if err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("image %s: still being imported; the same call later goes on: %w", r, ctx.Err())
	}
	return got, err
}

func loopbackName(host string) bool { return host == "localhost" }

// background joins or begins a pull that outlives its caller.
func (im *Images) background(key string, do func(context.Context) (*Image, error)) (*flight[*Image], error) {
	im.mu.Lock()
	defer im.mu.Unlock()
	if f, ok := im.pulls[key]; ok {
		return f, nil
	}
	if len(im.pulls) >= maxPulls {
		return nil, fmt.Errorf("pull: %d are under way or waiting: %w", len(im.pulls), sandbox.ErrExhausted)
	}
	base := im.base
	if base == nil {
		base = context.Background()
	}
	if base.Err() != nil {
		return nil, fmt.Errorf("pull: going down: %w", ErrRegistry)
	}
	f := &flight[*Image]{done: make(chan struct{})}
	im.pulls[key] = f
	im.work.Add(1)
	go func() {
		defer im.work.Done()
		ctx, cancel := context.WithTimeout(base, pullTime)
		defer cancel()
		f.value, f.err = do(ctx)
		im.mu.Lock()
		delete(im.pulls, key)
		im.mu.Unlock()
		close(f.done)
	}()
	return f, nil
}

func (im *Images) pull(ctx context.Context, project string, r Ref, p Pull) (*Image, error) {
	done, err := im.images.take(ctx, project)
	if err != nil {
		return nil, err
	}
	defer done()
	own := im.credential(ctx, project)
	src, err := newRemote(im.net, r, im.cfg.Mirrors[r.Host], func(host string) (Credential, error) {
		if host == r.Host && p.Credential != (Credential{}) {
			return p.Credential, nil
		}
		return own(host)
	})
	if err != nil {
		return nil, err
	}
	if im.pause > 0 {
		src.pause = im.pause
	}
	if im.patience > 0 {
		src.patience = im.patience
	}
	c, err := choose(ctx, src, r.Tag, r.Digest, im.cfg.Arch)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", r, err)
	}
	var list []blobOf
	for i, l := range c.layers {
		list = append(list, blobOf{digest: l.Digest, arch: c.config.Architecture, diffID: c.config.RootFS.DiffIDs[i], open: func(ctx context.Context) (io.ReadCloser, error) { return src.blob(ctx, l.Digest, l.Size) }})
	}
	tell := p.Progress
	if tell == nil {
		tell = func(Event) {}
	}
	records, existed, err := im.convertAll(ctx, project, list, func(i int, state string, done int64) {
		tell(Event{Layer: c.layers[i].Digest, State: state, Done: done, Total: c.layers[i].Size})
	})
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", r, err)
	}
	out, err := im.publish(ctx, project, r, c, records)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", r, err)
	}
	out.Existed = existed
	return out, nil
}

// convertAll converts the layers of an image, several at once, each once.
func (im *Images) convertAll(ctx context.Context, project string, list []blobOf, tell func(i int, state string, done int64)) ([]*record, bool, error) {
	out := make([]*record, len(list))
	existed := true
	var mu sync.Mutex
	g, run := errgroup.WithContext(ctx)
	g.SetLimit(2 * im.cfg.Parallel) // those that wait for another image's conversion take no slot
	for i, t := range list {
		g.Go(func() error {
			r, there, err := im.once(run, project, t, nil, func(state string, done int64) { tell(i, state, done) })
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			out[i] = r
			existed = existed && there
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, false, err
	}
	// Folders that a layer has without saying so look like those below.
	var below []folders
	var read bool
	for i, r := range out {
		if !r.Implicit {
			continue
		}
		if !read {
			read = true
			for _, o := range out {
				f, err := im.foldersOf(ctx, o.DiffID)
				if err != nil {
					return nil, false, err
				}
				below = append(below, f)
			}
		}
		fix := inherited(below[:i], below[i].Implicit)
		if len(fix) == 0 {
			continue
		}
		fixed, there, err := im.once(ctx, project, list[i], fix, func(state string, done int64) { tell(i, state, done) })
		if err != nil {
			return nil, false, err
		}
		out[i] = fixed
		existed = existed && there
	}
	return out, existed, nil
}

// once converts a layer unless it was, or joins who does.
func (im *Images) once(ctx context.Context, project string, t blobOf, fix map[string]folder, tell func(state string, done int64)) (*record, bool, error) {
	id := t.diffID
	if len(fix) > 0 {
		id = fixedID(t.diffID, fix)
	}
	waited := false
	for {
		r, err := im.find(ctx, project, id)
		if err == nil {
			tell("there", 0)
			return r, !waited, nil
		}
		if !errors.Is(err, sandbox.ErrNotFound) {
			return nil, false, err
		}
		im.mu.Lock()
		f, busy := im.layersF[id]
		if !busy {
			f = &flight[*record]{done: make(chan struct{})}
			im.layersF[id] = f
		}
		im.mu.Unlock()
		if busy {
			tell("waiting", 0)
			waited = true
			if _, err := f.wait(ctx); err != nil && ctx.Err() != nil {
				return nil, false, err
			}
			continue // what another could not get, this one may
		}
		f.value, f.err = im.slot(ctx, project, t, fix, tell)
		im.mu.Lock()
		delete(im.layersF, id)
		im.mu.Unlock()
		close(f.done)
		if f.err == nil {
			tell("done", 0)
		}
		return f.value, false, f.err
	}
}

func (im *Images) slot(ctx context.Context, project string, t blobOf, fix map[string]folder, tell func(state string, done int64)) (*record, error) {
	done, err := im.conversions.take(ctx, project)
	if err != nil {
		return nil, err
	}
	defer done()
	var n, told int64
	tell("converting", 0)
	return remade(func() (*record, error) {
		return im.convert(ctx, project, t, fix, func(k int64) {
			if n += k; n-told >= 1<<20 {
				told = n
				tell("converting", n)
			}
		})
	})
}

// publish makes the environment, or finds that it has not changed.
func (im *Images) publish(ctx context.Context, project string, r Ref, c *chosen, records []*record) (*Image, error) {
	ids, octets, err := im.stack(ctx, project, records)
	if err != nil {
		return nil, err
	}
	spec, err := specOf(r, c, ids)
	if err != nil {
		return nil, err
	}
	out := &Image{Ref: r.String(), Digest: c.digest, Config: *spec.Image, Checked: im.now().UTC(), Octets: octets}
	old, err := im.published(ctx, project, r)
	if err != nil {
		return nil, err
	}
	if old != nil && slices.Equal(old.Layers, ids) && same(old.Spec, spec) {
		out.Environment, out.Layers = old.Ref(), old.Layers
	} else {
		e, err := im.layers.PublishEnvironment(ctx, project, r.EnvName(), spec)
		if err != nil {
			return nil, err
		}
		out.Environment, out.Layers = e.Ref(), e.Layers
	}
	text, err := json.Marshal(out)
	if err != nil {
		return nil, err
	}
	if _, err := im.facts.Put(ctx, factKey(project, r), text, facts.Any); err != nil {
		return nil, fmt.Errorf("keep image: %w", err)
	}
	return out, nil
}

// published finds the environment that the image is now; nil when there is none. An import that died before it kept the image may have left one.
func (im *Images) published(ctx context.Context, project string, r Ref) (*layer.Environment, error) {
	ref := r.EnvName()
	old, err := im.get(ctx, project, r)
	if err == nil {
		ref = old.Environment
	} else if !errors.Is(err, sandbox.ErrNotFound) {
		return nil, err
	}
	e, err := im.layers.Resolve(ctx, project, ref)
	if errors.Is(err, sandbox.ErrNotFound) || err == nil && old == nil && e.Project != project {
		return nil, nil
	}
	return &e, err
}

func same(a, b layer.EnvironmentSpec) bool {
	return slices.Equal(a.Env, b.Env) && a.User == b.User && a.Cwd == b.Cwd && reflect.DeepEqual(a.Image, b.Image)
}

// specOf makes an image's config the defaults of an environment.
func specOf(r Ref, c *chosen, ids []layer.ID) (layer.EnvironmentSpec, error) {
	run := c.config.Config
	spec := layer.EnvironmentSpec{User: run.User, Cwd: run.WorkingDir, Image: &layer.ImageFacts{
		Ref: r.String(), Digest: c.digest, Arch: c.config.Architecture, Entrypoint: run.Entrypoint, Cmd: run.Cmd, Labels: run.Labels,
	}}
	for i, id := range ids {
		if i == 0 {
			spec.Base = string(id)
		} else {
			spec.Kits = append(spec.Kits, string(id))
		}
	}
	if spec.Cwd != "" && !strings.HasPrefix(spec.Cwd, "/") {
		spec.Cwd = "/" + spec.Cwd
	}
	for _, kv := range run.Env {
		if k, _, ok := strings.Cut(kv, "="); ok && k != "" { // docker takes others for a value of its own environment
			spec.Env = append(spec.Env, kv)
		}
	}
	if n := len(run.Entrypoint) + len(run.Cmd) + len(run.Labels); n > 4096 {
		return spec, fmt.Errorf("config: %d words of entrypoint, command and labels, at most 4096: %w", n, sandbox.ErrInvalid)
	}
	return spec, sandbox.CheckEnv("config: Env", spec.Env)
}

// get finds an image that is there, with its environment.
func (im *Images) get(ctx context.Context, project string, r Ref) (*Image, error) {
	var nothing error
	for p := project; p != ""; p = parent(p) {
		f, err := im.facts.Get(ctx, factKey(p, r))
		if errors.Is(err, sandbox.ErrNotFound) {
			nothing = sandbox.ErrNotFound // the key of the fact says nothing to who asks
			continue
		}
		if err != nil {
			return nil, err
		}
		out := &Image{}
		if err := json.Unmarshal(f.Value, out); err != nil {
			return nil, fmt.Errorf("fact %s is broken: %w", f.Key, err)
		}
		e, err := im.layers.Resolve(ctx, p, out.Environment)
		if err != nil {
			nothing = err // somebody removed the environment
			continue
		}
		out.Layers = e.Layers
		return out, nil
	}
	return nil, fmt.Errorf("image %s in project %s: %w", r, project, nothing)
}

func parent(project string) string {
	return project[:max(0, strings.LastIndexByte(project, '/'))]
}

// Get answers an image that is there; it asks no registry.
func (im *Images) Get(ctx context.Context, project, ref string) (*Image, error) {
	r, err := ParseRef(ref)
	if err != nil {
		return nil, err
	}
	return im.get(ctx, project, r)
}

// List answers the project's own images by reference.
func (im *Images) List(ctx context.Context, project, prefix string) ([]*Image, error) {
	list, err := im.facts.List(ctx, "image:"+project+":", "", 0)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	var out []*Image
	for _, f := range list {
		i := &Image{}
		if err := json.Unmarshal(f.Value, i); err != nil {
			return nil, fmt.Errorf("fact %s is broken: %w", f.Key, err)
		}
		if strings.HasPrefix(i.Ref, prefix) {
			out = append(out, i)
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Ref < out[j].Ref })
	return out, nil
}

// Remove removes an image's environment and those of its layers that nothing else of the project uses.
func (im *Images) Remove(ctx context.Context, project, ref string) error {
	r, err := ParseRef(ref)
	if err != nil {
		return err
	}
	_, err = im.facts.Get(ctx, factKey(project, r))
	found := err == nil
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	// Every version that the reference ever became, also those of imports that died before they kept the image.
	var ids []layer.ID
	all, err := im.layers.Environments(ctx, project)
	if err != nil {
		return err
	}
	used := map[layer.ID]bool{}
	for _, e := range all {
		if e.Name == r.EnvName() && e.Spec.Image != nil && e.Spec.Image.Ref == r.String() {
			found = true
			ids = append(ids, e.Layers...)
			if err := im.layers.RemoveEnvironment(ctx, project, e.Ref()); err != nil {
				return err
			}
			continue
		}
		for _, id := range e.Layers {
			used[id] = true
		}
	}
	if !found {
		return fmt.Errorf("image %s in project %s: %w", r, project, sandbox.ErrNotFound)
	}
	if err := im.facts.Delete(ctx, factKey(project, r), facts.Any); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		if used[id] {
			continue // as most layers of most images are; to ask costs a look at everything
		}
		err := im.layers.Remove(ctx, project, string(id))
		if err != nil && !errors.Is(err, sandbox.ErrState) && !errors.Is(err, sandbox.ErrNotFound) {
			return err
		}
	}
	return nil
}
