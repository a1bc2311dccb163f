package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// Config of a backend. Two on one machine differ in Name or Instance, in both folders and in the uid range.
type Config struct {
	Name     string // microvm or vm
	Instance string // names everything on the host: 1 to 24 of a-z 0-9
	Host     string // identity of the host
	StateDir string // disks
	RunDir   string // sockets, gone with a restart of the machine
	Kernel   string // folder of the guests' kernel (vmm.OpenKernel)
	// Guest is the program that is process 1 of the machines.
	Guest *os.File
	// Warden is the program and the first arguments that make it a warden; empty: this program with "warden".
	Warden []string
	// UIDBase is the first of Slots host uids that monitors run as.
	UIDBase uint32
	Slots   int
	// Seccomp and Events are the filters of commands and of process 1 of a sandbox (keeper.Birth).
	Seccomp, Events []byte
	// NoTemplates boots every machine.
	NoTemplates bool
	// Ready is how many clones with a sandbox in them wait for the next create of their kind, for each of the kinds that were last asked for;
	// 0: none. Each takes memory of the host as an idle sandbox does.
	Ready int
	QEMU  string // program; empty: of the path
	// Firecracker is the program of the backend microvm, instead of QEMU. It needs a KVM that works: without one there is no such backend.
	Firecracker string
	Jailer      string // of the same version; empty: none
	// Faults has a clone's memory come page by page, as it is touched, instead of by a mapping; Mapped gives images as memory that all machines
	// share instead of disks. Both are Firecracker's, and the second wants a kernel for guests that has them built in.
	Faults, Mapped bool
	// Rates bound each machine that is made from now on. Its network is counted in each direction.
	Rates vmm.Rates
	// NoReclaim has guests keep pages of files that nobody has used for a while. Else they look for them and give them up (DAMON), where their
	// kernel can.
	NoReclaim bool
}

// Defaults of the uid range: above that of containers, in what systemd keeps free (its UIDS-GIDS.md).
const (
	DefaultUIDBase = 0x7fb00000
	DefaultSlots   = 2000
)

// Layers is what the backend needs of the catalogue.
type Layers interface {
	Files(ctx context.Context, id layer.ID) (blob.LayerFiles, error)
	Flatten(ctx context.Context, ids []layer.ID) (layer.Descriptor, error)
	ImportUpper(ctx context.Context, project, upper string, opt layer.Options) (layer.Descriptor, error)
}

// Deps of the backend.
type Deps struct {
	Layers  Layers
	Network Network     // nil: no network "open"
	Verdict vmm.Verdict // of /dev/kvm
	Log     *slog.Logger
}

var instancePattern = regexp.MustCompile(`^[a-z0-9]{1,24}$`)

// Backend makes sandboxes in machines. It implements sandbox.Backend.
type Backend struct {
	cfg    Config
	layers Layers
	log    *slog.Logger
	kernel *vmm.Kernel
	warden *warden.Client
	driver vmm.Driver
	slots  *slots
	flat   *flats
	disks  *disks
	models *templates
	ready  *readies
	points points
	owns   marks
	net    Network

	life context.Context // of what serves sandboxes; ends with Run
	end  context.CancelFunc
	work sync.WaitGroup
	up   chan struct{} // closed when Run has begun

	mu    sync.Mutex
	boxes map[sandbox.ID]*instance

	called chan struct{} // a warden was called: Run watches it
}

var _ sandbox.Backend = (*Backend)(nil)

// New looks for a monitor and a kernel: ErrUnsupported with the reason where there is none. It starts nothing.
func New(ctx context.Context, cfg Config, deps Deps) (*Backend, error) {
	if cfg.Name != "microvm" && cfg.Name != "vm" {
		return nil, fmt.Errorf("backend %q: want microvm or vm: %w", cfg.Name, sandbox.ErrInvalid)
	}
	fail := func(err error) (*Backend, error) { return nil, fmt.Errorf("%s: %w", cfg.Name, err) }
	if !instancePattern.MatchString(cfg.Instance) || !filepath.IsAbs(cfg.StateDir) || !filepath.IsAbs(cfg.RunDir) {
		return fail(fmt.Errorf("instance %q, folders %q and %q: %w", cfg.Instance, cfg.StateDir, cfg.RunDir, sandbox.ErrInvalid))
	}
	if cfg.UIDBase == 0 {
		cfg.UIDBase = DefaultUIDBase
	}
	if cfg.Slots == 0 {
		cfg.Slots = DefaultSlots
	}
	if err := checkRates(cfg.Rates); err != nil {
		return fail(err)
	}
	if len(cfg.Warden) == 0 {
		exe, err := os.Executable()
		if err != nil {
			return fail(err)
		}
		cfg.Warden = []string{exe, "warden"}
	}
	if cfg.Guest == nil {
		return fail(fmt.Errorf("this build has no dsec-guest-vm: %w", sandbox.ErrUnsupported))
	}
	for _, d := range []string{cfg.StateDir, cfg.RunDir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return fail(err)
		}
	}
	b := &Backend{cfg: cfg, layers: deps.Layers, log: deps.Log.With("backend", cfg.Name), warden: warden.NewClient(cfg.RunDir), slots: newSlots(cfg.Slots),
		net: deps.Network, boxes: map[sandbox.ID]*instance{}, up: make(chan struct{}), called: make(chan struct{}, 1)}
	var err error
	if b.driver, err = b.newDriver(ctx, deps.Verdict); err != nil {
		return fail(err)
	}
	guest, err := vmm.Reopen(cfg.Guest)
	if err != nil {
		return fail(err)
	}
	defer guest.Close()
	if b.kernel, err = vmm.OpenKernel(cfg.Kernel, guest); err != nil {
		return fail(err)
	}
	if err := b.tryBoot(ctx, deps.Verdict); err != nil {
		b.kernel.Close()
		return fail(err)
	}
	b.flat = newFlats(deps.Layers)
	if b.disks, err = newDisks(cfg.StateDir); err != nil {
		b.kernel.Close()
		return fail(err)
	}
	b.models = newTemplates(b)
	b.ready = newReadies(b)
	b.points.open = map[sandbox.ForkKey]*point{}
	b.life, b.end = context.WithCancel(context.Background())
	return b, nil
}

// machine is the machine type that the backend asks for.
func (b *Backend) machine() string {
	if b.cfg.Name == "vm" {
		return "q35"
	}
	return "microvm"
}

// Capabilities of the backend.
func (b *Backend) Capabilities() sandbox.Capabilities {
	f := b.driver.Features()
	c := sandbox.Capabilities{
		Backend: b.cfg.Name, Isolation: "high", PauseLevels: b.pauseLevels(), Networks: []string{string(sandbox.NetworkNone)},
		Fork: "files", Snapshot: true, Terminal: true, Sessions: true, Ports: true,
		Features: map[string]string{"driver": f.Driver + " " + f.Version, "accelerator": string(f.Accelerator), "kernel": b.kernel.Release},
	}
	if f.Degraded {
		c.Features["degraded"] = degradedWhy(f)
	}
	if b.forks() {
		c.Fork = "memory"
	}
	if why := b.noNetworkOpen(); why != "" {
		c.Features["network.open"] = why
	} else {
		c.Networks = append(c.Networks, string(sandbox.NetworkOpen))
	}
	maps.Copy(c.Features, f.Why)
	return c
}

func degradedWhy(f vmm.Features) string {
	why := f.Why["kvm"]
	if why == "" {
		why = "no hardware acceleration"
	}
	return string(f.Accelerator) + ": about ten times slower, and QEMU does not treat it as a wall by itself (" + why + ")"
}

// Run serves until the context ends; machines go on.
func (b *Backend) Run(ctx context.Context) error {
	close(b.up)
	defer b.kernel.Close()
	for ctx.Err() == nil {
		if _, err := os.Stat(filepath.Join(b.cfg.RunDir, warden.SocketName)); err == nil {
			if err := b.warden.Watch(ctx, b.monitorEnded); err != nil {
				b.lostWarden(ctx)
			}
		}
		select {
		case <-ctx.Done():
		case <-b.called:
		case <-time.After(2 * time.Second):
		}
	}
	b.end()
	b.work.Wait()
	return nil
}

// WaitReady returns when Run has begun.
func (b *Backend) WaitReady(ctx context.Context) error {
	select {
	case <-b.up:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// call has a warden live.
func (b *Backend) call(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if _, err := warden.Spawn(ctx, b.cfg.Warden[0], b.cfg.Warden[1:], b.cfg.RunDir, b.cfg.Instance); err != nil {
		return err
	}
	select {
	case b.called <- struct{}{}:
	default:
	}
	return nil
}

// monitorEnded is told of each monitor that ended.
func (b *Backend) monitorEnded(a warden.Alive) {
	b.mu.Lock()
	var x *instance
	for _, y := range b.boxes {
		if y.name() == a.ID {
			x = y
		}
	}
	b.mu.Unlock()
	if x != nil {
		x.monitorEnded(a)
	}
}

// lostWarden ends the sandboxes whose monitors are gone: when a warden dies, its monitors do, and another one knows none of them.
func (b *Backend) lostWarden(ctx context.Context) {
	list, _ := b.warden.List(ctx)
	if ctx.Err() != nil {
		return
	}
	lives := map[string]bool{}
	for _, a := range list {
		lives[a.ID] = !a.Ended
	}
	b.mu.Lock()
	boxes := slices.Collect(maps.Values(b.boxes))
	b.mu.Unlock()
	for _, x := range boxes {
		if x.isLiving() && !x.isSaved() && !x.isSaving() && !lives[x.name()] {
			x.ended(sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "keeper_lost", Detail: "the process that holds the machines of this host died"})
		}
	}
}

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
	}
}

// Sweep ends and removes everything of this instance that belongs to none of the living.
func (b *Backend) Sweep(ctx context.Context, living map[sandbox.ID]bool) error {
	keep := map[string]bool{}
	for id := range living {
		keep[string(id)] = true
	}
	b.mu.Lock()
	for id, x := range b.boxes {
		keep[string(id)], keep[x.name()] = true, true
	}
	b.mu.Unlock()
	b.ready.names(keep)
	var errs []error
	list, err := b.warden.List(ctx)
	if errors.Is(err, sandbox.ErrLost) {
		// No warden lives; what a dead one left is its cgroups.
		err = b.warden.Sweep(ctx, b.cfg.Instance)
	}
	errs = append(errs, err)
	for _, a := range list {
		if keep[a.ID] || b.models.owns(a.ID) {
			continue
		}
		errs = append(errs, b.warden.Kill(ctx, a.ID), b.warden.Forget(ctx, a.ID))
	}
	dirs, err := os.ReadDir(b.cfg.RunDir)
	errs = append(errs, err)
	for _, d := range dirs {
		if d.IsDir() && !keep[d.Name()] && !b.models.owns(d.Name()) {
			errs = append(errs, os.RemoveAll(filepath.Join(b.cfg.RunDir, d.Name())))
		}
	}
	errs = append(errs, b.disks.sweep(keep), b.sweepStores(keep), b.sweepMemories(ctx))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: sweep: %w", b.cfg.Name, err)
	}
	return nil
}

// Release ends the warden and with it templates. It is refused while sandboxes live.
func (b *Backend) Release(ctx context.Context) error {
	b.mu.Lock()
	n := len(b.boxes)
	b.mu.Unlock()
	if n > 0 {
		return fmt.Errorf("%s: %d sandboxes live: %w", b.cfg.Name, n, sandbox.ErrState)
	}
	err := b.ready.drain(ctx)
	b.models.forget()
	return errors.Join(err, b.endWarden(ctx), b.sweepMemories(ctx))
}

// endWarden ends the warden and returns when nothing of it is left.
func (b *Backend) endWarden(ctx context.Context) error {
	err := b.warden.Shutdown(ctx)
	if errors.Is(err, sandbox.ErrLost) {
		err = nil
	}
	// It tells that it ends and then does: its cgroups are gone after that.
	for end := time.Now().Add(20 * time.Second); err == nil; {
		err = warden.Sweep(b.cfg.RunDir, b.cfg.Instance)
		if err == nil || !errors.Is(err, sandbox.ErrExists) || time.Now().After(end) {
			break
		}
		err = nil
		time.Sleep(5 * time.Millisecond)
	}
	return err
}

// LayersInUse are the layers that machines have as disks.
func (b *Backend) LayersInUse() []string { return b.flat.inUse() }

// Held names what the backend holds for sandboxes.
func (b *Backend) Held() []string {
	out := b.slots.names()
	b.mu.Lock()
	for id := range b.boxes {
		out = append(out, "sandbox "+string(id))
	}
	b.mu.Unlock()
	disks, err := b.disks.list()
	if err != nil {
		out = append(out, err.Error())
	}
	waits := map[string]bool{}
	b.ready.names(waits)
	for _, d := range disks {
		if !waits[d] {
			out = append(out, "disk of "+d)
		}
	}
	for _, id := range b.stores() {
		if !b.models.owns(id) && !waits[id] {
			out = append(out, "store of "+id)
		}
	}
	list, err := b.warden.List(context.Background())
	if err == nil {
		for _, a := range list {
			if !b.models.owns(a.ID) && !waits[a.ID] {
				out = append(out, "monitor "+a.ID)
			}
		}
	}
	slices.Sort(out)
	return out
}

// handle is what a restarted daemon needs of a machine.
type handle struct {
	Version  int               `json:"version"`
	Slot     int               `json:"slot"`
	Memory   int64             `json:"memory"` // of the machine, octets
	Disk     int64             `json:"disk"`   // limit of its writable disk
	Layer    string            `json:"layer"`  // the flat image
	Template string            `json:"template,omitempty"`
	Machine  string            `json:"machine,omitempty"` // its name, where that is not the sandbox's ID
	Inside   sandbox.ID        `json:"inside,omitempty"`  // the ID that its guest knows the sandbox by, where that is another one
	Lent     *container.Lent   `json:"lent,omitempty"`
	Balloon  bool              `json:"balloon,omitempty"` // it has that device
	Own      bool              `json:"own,omitempty"`     // boots an image of its own: no guest of ours
	Mark     string            `json:"mark,omitempty"`    // before the IDs of a fork's commands in its guest, which knows those of before
	Laid     map[string]string `json:"laid,omitempty"`
}

const (
	handleVersion = 1
	maxMark       = 16
)

func (h handle) check(slots int) error {
	if h.Machine != "" && (filepath.Base(h.Machine) != h.Machine || strings.HasPrefix(h.Machine, ".")) {
		return fmt.Errorf("its handle names the machine %.80q: %w", h.Machine, sandbox.ErrInvalid)
	}
	if len(h.Mark) > maxMark {
		return fmt.Errorf("its handle has a mark of %d octets: %w", len(h.Mark), sandbox.ErrInvalid)
	}
	if h.Version != handleVersion || h.Slot < 0 || h.Slot >= slots || h.Layer == "" {
		return fmt.Errorf("its handle is of version %d, slot %d, layer %q: %w", h.Version, h.Slot, h.Layer, sandbox.ErrInvalid)
	}
	return nil
}

func parseHandle(text []byte, slots int) (h handle, err error) {
	if err := json.Unmarshal(text, &h); err != nil {
		return h, fmt.Errorf("its handle is not one of ours (%v): %w", err, sandbox.ErrInvalid)
	}
	return h, h.check(slots)
}

// slots hands out the uids of monitors.
type slots struct {
	mu   sync.Mutex
	used map[int]sandbox.ID
	n    int
	next int
}

func newSlots(n int) *slots { return &slots{n: n, used: map[int]sandbox.ID{}} }

func (s *slots) take(id sandbox.ID) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range s.n {
		k := s.next
		s.next = (s.next + 1) % s.n
		if _, ok := s.used[k]; !ok {
			s.used[k] = id
			return k, nil
		}
	}
	return 0, fmt.Errorf("uids of monitors: all %d are in use: %w", s.n, sandbox.ErrExhausted)
}

func (s *slots) claim(k int, id sandbox.ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if have, ok := s.used[k]; ok && have != id {
		return fmt.Errorf("uid slot %d belongs to %s: %w", k, have, sandbox.ErrExists)
	}
	s.used[k] = id
	return nil
}

// give makes a slot another's.
func (s *slots) give(k int, from, to sandbox.ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used[k] != from {
		return fmt.Errorf("uid slot %d belongs to %q: %w", k, s.used[k], sandbox.ErrState)
	}
	s.used[k] = to
	return nil
}

func (s *slots) release(k int, id sandbox.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used[k] == id {
		delete(s.used, k)
	}
}

func (s *slots) names() (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, id := range s.used {
		if !strings.HasPrefix(string(id), templatePrefix) && !strings.HasPrefix(string(id), readyPrefix+"-") {
			out = append(out, fmt.Sprintf("uid slot %d of %s", k, id))
		}
	}
	return out
}
