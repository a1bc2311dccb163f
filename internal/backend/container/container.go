package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/upper"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trace"
)

// Config of the driver. Two instances on one machine differ in all of Instance, StateDir, RunDir and the uid range.
type Config struct {
	Instance string // names everything on the host: 1 to 32 of a-z 0-9
	Host     string // identity of the host, for the keeper's log
	StateDir string // kept over a restart of the machine
	RunDir   string // gone with it; the keeper's socket and lock lie here
	// UIDBase is the first host uid for sandboxes, Slots how many there may be at once; zero: the defaults.
	UIDBase uint32
	Slots   int
	// Keeper is the program and the first arguments that make it a keeper; empty: this program with "keeper".
	Keeper []string
	// Guest is the file server for Files, which the keeper starts inside; nil refuses Files. The driver does not close it.
	Guest *os.File
	// Seccomp is the filter of commands (sock_filter[]); empty installs none.
	Seccomp []byte
	// Events is the filter of process 1 that asks about calls to report (keeper.Birth); empty reports none.
	Events []byte
	// LeaveDynmods leaves the cgroup2 mount as it is, instead of setting favordynmods.
	LeaveDynmods bool
	NetnsPool    int // network namespaces kept ready; 0 is the keeper's default
	// LayerIdle is how long an unused layer stays mounted; 0 is 10 minutes.
	LayerIdle time.Duration
	// Unpack has layers unpacked into folders of StateDir instead of being mounted as EROFS; a kernel without EROFS has it so in any case. Deps.Layers
	// must then give files of this machine alone: this process reads them. UnpackLimit is of all that is unpacked, in octets; 0 is 20 GiB.
	Unpack      bool
	UnpackLimit int64
	Network     NetworkConfig
	// Told are features of Capabilities that the driver does not know of itself.
	Told map[string]string
}

var instancePattern = regexp.MustCompile(`^[a-z0-9]{1,32}$`)

func (c *Config) fill() error {
	if !instancePattern.MatchString(c.Instance) {
		return fmt.Errorf("instance %q: want 1 to 32 of a-z 0-9: %w", c.Instance, sandbox.ErrInvalid)
	}
	if !filepath.IsAbs(c.StateDir) || !filepath.IsAbs(c.RunDir) {
		return fmt.Errorf("state folder %q, run folder %q: want absolute paths: %w", c.StateDir, c.RunDir, sandbox.ErrInvalid)
	}
	if c.UIDBase == 0 {
		c.UIDBase = DefaultUIDBase
	}
	if c.Slots == 0 {
		c.Slots = DefaultSlots
	}
	if c.LayerIdle == 0 {
		c.LayerIdle = 10 * time.Minute
	}
	if c.UnpackLimit == 0 {
		c.UnpackLimit = unpackLimit
	}
	if c.UnpackLimit < 0 {
		return fmt.Errorf("limit of unpacked layers %d: want octets above 0: %w", c.UnpackLimit, sandbox.ErrInvalid)
	}
	if len(c.Keeper) == 0 {
		exe, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find the running program: %w", err)
		}
		c.Keeper = []string{exe, "keeper"}
	}
	return nil
}

// Layers is what the driver needs of the catalogue.
type Layers interface {
	// Files opens a layer's EROFS image, wherever it lies; the driver closes it.
	Files(ctx context.Context, id layer.ID) (blob.LayerFiles, error)
	// Descriptor is a layer's; sandbox.ErrNotFound when the store has it no more.
	Descriptor(ctx context.Context, id layer.ID) (layer.Descriptor, error)
	// ImportUpper makes a layer of an overlay's upper folder.
	ImportUpper(ctx context.Context, project, upper string, opt layer.Options) (layer.Descriptor, error)
}

// Uppers is what the driver needs of the pool of writable folders; *upper.Pool has it.
type Uppers interface {
	Create(ctx context.Context, id string, r upper.Request) (upper.Upper, error)
	Remove(ctx context.Context, id string) error
	Usage(id string) (int64, error)
	List() ([]string, error)
	// Snapshot copies a living upper for a capture; sandbox.ErrUnsupported where the pool can't.
	Snapshot(id string) (dir string, release func() error, err error)
}

// Deps of the driver.
type Deps struct {
	Layers Layers
	Uppers Uppers
	Log    *slog.Logger
	Trace  *trace.Source // of what processes do; nil tells nothing of them
}

// Backend is the driver. It implements sandbox.Backend.
type Backend struct {
	cfg     Config
	layers  Layers
	uppers  Uppers
	log     *slog.Logger
	trace   *trace.Source
	names   trace.Budget // that all traced sandboxes remember
	slots   *slots
	net     *network
	mounts  *layerMounts
	files   layerFiles // what mounts has mounted: layers, or unpacked
	folders *unpacked
	noErofs error // why layers are unpacked; nil where they are not

	mu      sync.Mutex
	client  *keeper.Client // nil while there is no connection
	changed chan struct{}  // closed and replaced when client changes
	failure error          // why there is none for good: Run has ended
	boxes   map[sandbox.ID]*instance
	found   map[sandbox.ID]keeper.Alive // what the keeper held when we came, until taken back or swept
	lent    map[int]bool                // slots of namespaces that other backends have, see Lend
	swept   bool                        // Sweep was called: unknown events belong to nobody
	// delivering is set when events were asked for; a new connection asks again.
	delivering bool
	released   bool        // the keeper was told to end
	keeper     keeper.Info // of the last connection
}

var _ sandbox.Backend = (*Backend)(nil)

// New makes a driver and probes the kernel for network open. It starts nothing.
func New(cfg Config, deps Deps) (*Backend, error) {
	if err := cfg.fill(); err != nil {
		return nil, fmt.Errorf("container: %w", err)
	}
	s, err := newSlots(cfg.UIDBase, cfg.Slots)
	if err != nil {
		return nil, fmt.Errorf("container: %w", err)
	}
	for _, dir := range []string{cfg.StateDir, cfg.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("container: make folder: %w", err)
		}
	}
	n, err := newNetwork(cfg.Network, cfg.Instance, cfg.StateDir, cfg.Slots, deps.Log)
	if err != nil {
		return nil, fmt.Errorf("container: %w", err)
	}
	b := &Backend{
		cfg: cfg, layers: deps.Layers, uppers: deps.Uppers, log: deps.Log, trace: deps.Trace, names: trace.Budget{Most: 1 << 20}, slots: s, net: n,
		mounts: newLayerMounts(), changed: make(chan struct{}), boxes: map[sandbox.ID]*instance{}, files: deps.Layers, noErofs: whyUnpack(cfg.Unpack),
	}
	limit := cfg.UnpackLimit
	if b.noErofs == nil {
		limit = 0
	}
	if b.folders, err = newUnpacked(filepath.Join(cfg.StateDir, "unpacked"), limit, deps.Layers, b.foldersInUse, deps.Log); err != nil {
		return nil, fmt.Errorf("container: %w", err)
	}
	if b.noErofs != nil {
		b.files = b.folders
		deps.Log.Warn("layers are unpacked into folders", "folder", b.folders.dir, "why", b.noErofs)
	}
	return b, nil
}

// foldersInUse are the layers whose folder must stay: what is mounted, and what sandboxes have that were not taken back yet.
func (b *Backend) foldersInUse() map[string]bool {
	used := map[string]bool{}
	for _, id := range b.mounts.inUse() {
		used[id] = true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, a := range b.found {
		for _, id := range a.Birth.Layers {
			used[id] = true
		}
		for _, v := range a.Birth.Volumes {
			used[v.Layer] = true
		}
	}
	return used
}

// Capabilities of the driver. Features is complete once the keeper has answered.
func (b *Backend) Capabilities() sandbox.Capabilities {
	c := sandbox.Capabilities{
		Backend: "container", Isolation: "medium", PauseLevels: []sandbox.PauseLevel{sandbox.Frozen},
		Networks: []string{string(sandbox.NetworkNone)}, Fork: "files", Snapshot: true, Terminal: true, Sessions: true, Ports: true,
		Features: b.net.told(),
	}
	if b.net.reason == "" {
		c.Networks = append(c.Networks, string(sandbox.NetworkOpen))
	} else {
		c.Features["network_open"] = b.net.reason
	}
	if b.cfg.Guest == nil {
		c.Features["files"] = "no guest program was built"
	}
	if b.noErofs != nil {
		c.Features["layers_unpacked"] = b.noErofs.Error()
	}
	maps.Copy(c.Features, b.cfg.Told)
	b.mu.Lock()
	maps.Copy(c.Features, b.keeper.Features)
	b.mu.Unlock()
	return c
}

// instance returns a living sandbox of ours.
func (b *Backend) instance(id sandbox.ID) *instance {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.boxes[id]
}

// register reserves the ID for the instance.
func (b *Backend) register(x *instance) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.boxes[x.id] != nil {
		return fmt.Errorf("sandbox %s: %w", x.id, sandbox.ErrExists)
	}
	b.boxes[x.id] = x
	return nil
}

func (b *Backend) unregister(x *instance) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.boxes[x.id] == x {
		delete(b.boxes, x.id)
		delete(b.found, x.id)
	}
}

// link is the connection to the keeper; it waits for one within the context.
func (b *Backend) link(ctx context.Context) (*keeper.Client, error) {
	for {
		b.mu.Lock()
		client, changed, failure := b.client, b.changed, b.failure
		b.mu.Unlock()
		if client != nil {
			return client, nil
		}
		if failure != nil {
			return nil, failure
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for the keeper: %w", ctx.Err())
		}
	}
}

// WaitReady returns when the keeper answers, or why it never will.
func (b *Backend) WaitReady(ctx context.Context) error {
	_, err := b.link(ctx)
	return err
}

func (b *Backend) setClient(c *keeper.Client, failure error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.client, b.failure = c, failure
	close(b.changed)
	b.changed = make(chan struct{})
}

// Times of Run.
const (
	connectBound = 30 * time.Second // a keeper that starts and sweeps what a dead one left
	tidyEvery    = time.Minute
	reportBound  = 10 * time.Minute // how long a sink is asked to take the word that a sandbox is lost
)

// Run holds the connection to the keeper and starts one where there is none, until the context ends; keeper and sandboxes then go
// on. It returns an error only when the first connection can't be made.
func (b *Backend) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	defer b.net.close()
	defer b.folders.close()
	wg.Add(1)
	go func() {
		defer wg.Done()
		b.tidy(ctx)
	}()
	for first := true; ; {
		client, err := b.connect(ctx)
		if err == nil {
			if err = b.took(ctx, client, first, &wg); err != nil {
				client.Close()
				client = nil
			}
		}
		switch {
		case ctx.Err() != nil:
			b.setClient(nil, fmt.Errorf("container: driver has ended: %w", sandbox.ErrState))
			if client != nil {
				client.Close()
			}
			return nil
		case err != nil && first:
			b.setClient(nil, fmt.Errorf("container: %w", err))
			return fmt.Errorf("container: %w", err)
		case err != nil:
			b.log.Error("no keeper", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(2 * time.Second):
			}
			continue
		}
		first = false
		b.setClient(client, nil)
		select {
		case <-ctx.Done():
		case <-client.Done():
		}
		if b.isReleased() {
			b.setClient(nil, fmt.Errorf("container: released: %w", sandbox.ErrState))
			client.Close()
			return nil
		}
		if ctx.Err() == nil {
			b.log.Error("connection to the keeper lost", "err", client.Err())
		}
		b.setClient(nil, nil)
		client.Close()
	}
}

func (b *Backend) isReleased() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.released
}

// connect dials the keeper and starts one where none answers.
func (b *Backend) connect(ctx context.Context) (*keeper.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, connectBound)
	defer cancel()
	o := keeper.DialOptions{Host: b.cfg.Host, Guest: b.cfg.Guest, Handler: b}
	for {
		client, err := keeper.Dial(ctx, b.cfg.RunDir, o)
		if err == nil {
			return client, nil
		}
		// Nobody listens: what a dead one left goes first. One that is about to end or to listen holds the lock.
		swept := keeper.Sweep(b.cfg.RunDir)
		if swept == nil {
			break
		}
		if !errors.Is(swept, sandbox.ErrExists) || ctx.Err() != nil {
			return nil, fmt.Errorf("keeper does not answer (%w), and its remains can't be removed: %w", err, swept)
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	err := keeper.Spawn(ctx, b.cfg.Keeper[0], b.cfg.Keeper[1:], keeper.Config{
		Dir: b.cfg.RunDir, Instance: b.cfg.Instance, LeaveDynmods: b.cfg.LeaveDynmods, NetnsPool: b.cfg.NetnsPool,
	})
	if err != nil {
		return nil, err
	}
	return keeper.Dial(ctx, b.cfg.RunDir, o)
}

// took looks at the keeper of a new connection: another one than before means that its sandboxes are gone.
func (b *Backend) took(run context.Context, c *keeper.Client, first bool, wg *sync.WaitGroup) error {
	ctx, cancel := context.WithTimeout(run, connectBound)
	defer cancel()
	mounted, err := c.Layers(ctx)
	if err != nil {
		return fmt.Errorf("list mounted layers: %w", err)
	}
	if first {
		// Without this list events of sandboxes that wait to be taken back would count as owed to nobody.
		alive, err := c.List(ctx)
		if err != nil {
			return fmt.Errorf("list living sandboxes: %w", err)
		}
		if err := b.checkRange(alive); err != nil {
			return err
		}
		b.foundAlive(alive)
	}
	info := c.Info()
	b.mu.Lock()
	same := b.keeper.Pid == info.Pid && b.keeper.Started.Equal(info.Started)
	b.keeper = info
	deliver := b.delivering
	b.mu.Unlock()
	if !first && !same {
		b.log.Error("the keeper died; its sandboxes are gone", "keeper", info.Pid)
		b.keeperLost(run, wg)
	}
	if first || !same {
		b.mounts.adopt(mounted)
	}
	if deliver {
		if err := c.Deliver(ctx); err != nil {
			return fmt.Errorf("ask for events: %w", err)
		}
	}
	return nil
}

// uidsName is the file in the state folder that says which uid range the last start used.
const uidsName = "uids"

// checkRange refuses to go on when a sandbox lives outside of the configured uid range: it could neither be taken back nor be told
// apart from those of others. Else the range is noted, for the error of a later start.
func (b *Backend) checkRange(alive []keeper.Alive) error {
	file := filepath.Join(b.cfg.StateDir, uidsName)
	for _, a := range alive {
		if _, ok := b.slots.of(a.Birth.UIDBase); ok {
			continue
		}
		was := fmt.Sprintf("it has the uids from %d on", a.Birth.UIDBase)
		if text, err := os.ReadFile(file); err == nil && len(text) < 200 {
			was = "they were started with " + strings.TrimSpace(string(text))
		}
		return fmt.Errorf("sandbox %s lives outside of --uid-base %d --slots %d, as do perhaps others; %s. Start with that, or stop them first: %w",
			a.ID, b.cfg.UIDBase, b.cfg.Slots, was, sandbox.ErrState)
	}
	text := fmt.Sprintf("--uid-base %d --slots %d\n", b.cfg.UIDBase, b.cfg.Slots)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return fmt.Errorf("note the uid range: %w", err)
	}
	return nil
}

// foundAlive notes what lives, above all its uid slots, before anything is made.
func (b *Backend) foundAlive(alive []keeper.Alive) {
	found := map[sandbox.ID]keeper.Alive{}
	for _, a := range alive {
		found[a.ID] = a
		if n, ok := b.slots.of(a.Birth.UIDBase); ok {
			if err := b.slots.claim(n, a.ID); err != nil {
				b.log.Error("two living sandboxes hold one uid slot", "sandbox", a.ID, "err", err)
			}
		}
	}
	b.mu.Lock()
	b.found = found
	b.mu.Unlock()
}

// keeperLost marks every sandbox as gone and tells the sinks until they take it.
func (b *Backend) keeperLost(ctx context.Context, wg *sync.WaitGroup) {
	b.mu.Lock()
	b.found = nil
	var lost []*instance
	for _, x := range b.boxes {
		lost = append(lost, x)
	}
	b.mu.Unlock()
	for _, x := range lost {
		if !x.lose() {
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx, cancel := context.WithTimeout(ctx, reportBound)
			defer cancel()
			cause := sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "keeper_lost", Detail: "the process that holds the sandboxes of this host died"}
			for pause := 50 * time.Millisecond; x.sink.Ended(ctx, cause) != nil; pause = min(2*pause, 5*time.Second) {
				select {
				case <-ctx.Done():
					b.log.Error("loss of a sandbox could not be reported", "sandbox", x.id)
					return
				case <-time.After(pause):
				}
			}
		}()
	}
}

// tidy unmounts layers that nobody used for a while, removes folders of layers, and tries again what a failed create could not undo.
func (b *Backend) tidy(ctx context.Context) {
	if err := b.folders.sweep(); err != nil {
		b.log.Error("remove half-unpacked layers", "err", err)
	}
	t := time.NewTicker(tidyEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			b.tidyOnce(ctx, now)
		}
	}
}

func (b *Backend) tidyOnce(ctx context.Context, now time.Time) {
	b.mu.Lock()
	c := b.client
	b.mu.Unlock()
	if c != nil {
		if err := b.mounts.unmountIdle(ctx, c, now.Add(-b.cfg.LayerIdle)); err != nil {
			b.log.Error("unmount idle layers", "err", err)
		}
		if err := b.folders.tidy(ctx, now); err != nil {
			b.log.Error("remove unpacked layers", "err", err)
		}
	}
	b.retryUndone(ctx)
}

// retryUndone destroys sandboxes whose create failed and whose undo failed too.
func (b *Backend) retryUndone(ctx context.Context) {
	b.mu.Lock()
	var undone []*instance
	for _, x := range b.boxes {
		if x.isUndone() {
			undone = append(undone, x)
		}
	}
	b.mu.Unlock()
	for _, x := range undone {
		if err := x.undo.run(ctx); err != nil {
			b.log.Error("remains of a failed create", "sandbox", x.id, "err", err)
		}
	}
}

// Holds lists the sandboxes that live in the keeper.
func (b *Backend) Holds(ctx context.Context) ([]sandbox.ID, error) {
	c, err := b.link(ctx)
	if err != nil {
		return nil, err
	}
	alive, err := c.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list living sandboxes: %w", err)
	}
	var ids []sandbox.ID
	for _, a := range alive {
		ids = append(ids, a.ID)
	}
	return ids, nil
}

// Sweep destroys everything of this instance that belongs to none of the living, and from then on takes events.
func (b *Backend) Sweep(ctx context.Context, living map[sandbox.ID]bool) error {
	c, err := b.link(ctx)
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	keep := maps.Clone(living)
	if keep == nil {
		keep = map[sandbox.ID]bool{}
	}
	slotsInUse := map[int]bool{}
	b.mu.Lock()
	for id, x := range b.boxes { // what is being made now too
		keep[id] = true
		slotsInUse[x.slot] = true
	}
	maps.Copy(slotsInUse, b.lent)
	b.mu.Unlock()
	var errs []error
	alive, err := c.List(ctx)
	if err != nil {
		errs = append(errs, err)
	}
	for _, a := range alive {
		n, ours := b.slots.of(a.Birth.UIDBase)
		if keep[a.ID] {
			slotsInUse[n] = ours
			continue
		}
		if err := c.Destroy(ctx, a.ID); err != nil {
			errs = append(errs, err)
			continue
		}
		if ours {
			b.slots.release(n, a.ID)
		}
	}
	uppers, err := b.uppers.List()
	if err != nil {
		errs = append(errs, fmt.Errorf("list uppers: %w", err))
	}
	for _, name := range uppers {
		id := sandbox.ID(name)
		if keep[id] || b.instance(id) != nil {
			continue
		}
		// The keeper lists what lives; one that it was still making or had begun to destroy when its host went away holds its
		// upper all the same, and an upper does not go from under a mount.
		if err := c.Destroy(ctx, id); err != nil {
			errs = append(errs, err)
			continue
		}
		if err := b.uppers.Remove(ctx, name); err != nil {
			errs = append(errs, fmt.Errorf("remove upper of %s: %w", id, err))
		}
	}
	errs = append(errs, b.net.sweep(slotsInUse))
	b.mu.Lock()
	b.swept, b.delivering, b.found = true, true, nil
	b.mu.Unlock()
	errs = append(errs, c.Deliver(ctx))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	return nil
}

// Release takes away what the instance keeps on the host for its sandboxes: the keeper, mounted layers, rules and range of the
// network. It is refused while sandboxes live, and Run ends after it.
func (b *Backend) Release(ctx context.Context) error {
	b.mu.Lock()
	n := len(b.boxes)
	b.mu.Unlock()
	if n > 0 {
		return fmt.Errorf("container: %d sandboxes live: %w", n, sandbox.ErrState)
	}
	c, err := b.link(ctx)
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.released = true
	b.mu.Unlock()
	// The network first: the keeper's end ends Run, which lets go of what release needs.
	released := b.net.release()
	err = c.Shutdown(ctx)
	if errors.Is(err, sandbox.ErrLost) {
		err = nil // it ended before it answered
	}
	return errors.Join(released, err)
}

// Keeper is what the keeper said of itself at the last connection; zero before the first.
func (b *Backend) Keeper() keeper.Info {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.keeper
}

// LayersInUse are the layers that are mounted here, in order of their IDs: others must not remove their contents.
func (b *Backend) LayersInUse() []string { return b.mounts.inUse() }

// Held names what the driver itself holds for sandboxes: registered ones, uid slots and network devices.
func (b *Backend) Held() []string {
	out := b.slots.names()
	b.mu.Lock()
	for id := range b.boxes {
		out = append(out, "sandbox "+string(id))
	}
	b.mu.Unlock()
	links, err := b.net.left(nil)
	if err != nil {
		out = append(out, err.Error())
	}
	for _, l := range links {
		out = append(out, "network device "+l.Attrs().Name)
	}
	return out
}
