package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/guest/vmwire"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

const (
	birthBound = 3 * time.Minute // of a machine that boots under load; a clone takes a fraction of a second
	// guestMemory is what a machine has beside the sandbox's limit, for its kernel and what runs on our behalf, in octets.
	guestMemory = 96 << 20
	// monitorMemory is what the monitor may use beside its machine's memory, in octets: its code, its translations, its buffers.
	monitorMemory = 256 << 20
	monitorPids   = 64
	// deadlineGrace is how much later than the guest the warden ends a machine whose time is over: the guest tells how its commands ended.
	deadlineGrace = 10 * time.Second
	insideUIDs    = 1 << 20 // first uid of the sandbox in its guest
)

// undoing is what must be undone of a sandbox, newest first. What failed stays for the next attempt.
type undoing struct {
	turn  chan struct{} // one at a time
	steps []undoStep
}

type undoStep struct {
	what string
	undo func(context.Context) error
}

func newUndoing() undoing { return undoing{turn: make(chan struct{}, 1)} }

func (u *undoing) push(what string, undo func(context.Context) error) {
	u.turn <- struct{}{}
	u.steps = append(u.steps, undoStep{what, undo})
	<-u.turn
}

func (u *undoing) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	u.turn <- struct{}{}
	defer func() { <-u.turn }()
	for len(u.steps) > 0 {
		s := u.steps[len(u.steps)-1]
		if err := s.undo(ctx); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
		u.steps = u.steps[:len(u.steps)-1]
	}
	return nil
}

// machineMemory is a machine's memory for a sandbox's limit: of few sizes, so that templates serve many.
func machineMemory(limit int64) int64 { return (limit + guestMemory + 1<<25 - 1) >> 25 << 25 }

// processors of a machine. A translated one gains nothing by a second.
func (b *Backend) processors(r sandbox.Resources) int {
	if b.driver.Features().Accelerator != vmm.KVM {
		return 1
	}
	if r.CPU == 0 {
		return 2
	}
	return int(min(8, max(1, (r.CPU+999)/1000)))
}

// Create makes a machine with the sandbox in it: a clone of its environment's template where there is one.
func (b *Backend) Create(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (sandbox.Instance, error) {
	fail := func(err error) (sandbox.Instance, error) { return nil, fmt.Errorf("create %s: %w", id, err) }
	f := b.driver.Features()
	if f.Degraded && !spec.AllowDegraded {
		return fail(fmt.Errorf("backend %s: this host has no hardware acceleration: %s; allow_degraded takes it all the same: %w", b.cfg.Name, degradedWhy(f), sandbox.ErrUnsupported))
	}
	if !slices.Contains(b.Capabilities().Networks, string(spec.Network)) {
		return fail(fmt.Errorf("network %q: %s: %w", spec.Network, b.Capabilities().Features["network.open"], sandbox.ErrUnsupported))
	}
	if err := ctx.Err(); err != nil {
		return fail(err)
	}
	x, err := b.enter(id, spec, sink)
	if err != nil {
		return fail(err)
	}
	// What has begun is seen through to the end of a step and then undone, whatever became of the request.
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), birthBound)
	defer cancel()
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	own, layers, err := b.openOwn(bound, spec.Layers)
	if err == nil && own != nil {
		err = x.makeOwn(bound, own, layers)
	}
	b.ready.creating.Add(1)
	var from *instance
	if own != nil || err != nil {
		from = x
	} else if p := b.points.take(spec); p != nil {
		err = x.continueFrom(bound, p)
		from = x
	} else if from = b.ready.take(spec); from != nil {
		if err = b.adopt(bound, x, from); err != nil && bound.Err() == nil {
			b.log.Warn("a machine that waited can't be had: another is made", "sandbox", id, "err", err)
			if err = x.undo.run(bound); err == nil {
				from = nil
				x, err = b.enter(id, spec, sink)
			}
		}
	}
	if from == nil && err == nil {
		err = x.make(bound)
	}
	b.ready.creating.Add(-1)
	if x == nil {
		return fail(err)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		x.setState(undone)
		if e := x.undo.run(ctx); e != nil {
			b.log.Error("undo of a failed create", "sandbox", id, "err", e)
		}
		if ctx.Err() != nil {
			err = errors.Join(ctx.Err(), err)
		}
		return fail(err)
	}
	x.setState(living)
	x.serve()
	if own == nil {
		b.ready.want(spec)
	}
	return x, nil
}

// enter makes an instance of the ID known.
func (b *Backend) enter(id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (*instance, error) {
	x := newInstance(b, id, spec, sink)
	if err := b.register(x); err != nil {
		return nil, err
	}
	x.undo.push("forget the sandbox", func(context.Context) error { b.unregister(x); return nil })
	return x, nil
}

// make takes what the sandbox needs, in the order that the end undoes.
func (x *instance) make(ctx context.Context) (err error) {
	b := x.b
	if err := b.call(ctx); err != nil {
		return err
	}
	if x.h.Slot, err = b.slots.take(x.id); err != nil {
		return err
	}
	x.undo.push("release uid slot", func(context.Context) error { b.slots.release(x.h.Slot, x.id); return nil })
	image, files, err := b.openImage(ctx, x.spec.Layers)
	if err != nil {
		return err
	}
	x.undo.push("release the image", func(context.Context) error { b.flat.release(image); return nil })
	x.h.Version, x.h.Layer, x.h.Disk, x.h.Memory = handleVersion, string(image), x.spec.Resources.Disk, machineMemory(x.spec.Resources.Memory)
	x.h.Balloon = true // what was made and saved before there was one goes on without it
	x.undo.push("remove the disk", func(context.Context) error { return b.disks.remove(x.name()) })
	x.undo.push("remove the saved state", func(context.Context) error { return x.dropSaved() })
	disk, err := b.disks.create(ctx, x.name(), x.spec.Resources.Disk)
	if err != nil {
		files.Close()
		return err
	}
	s, err := x.machine(ctx, files, disk)
	if err != nil {
		return err
	}
	defer func() { closeDisks(s.Disks) }()
	x.undo.push("remove what it saves", func(context.Context) error { return os.RemoveAll(s.Store) })
	if err := x.makeFolder(); err != nil {
		return err
	}
	if total := x.spec.Lifetime.Total; total > 0 {
		x.deadline = time.Now().Add(total)
		s.Deadline = x.deadline.Add(deadlineGrace)
	}
	if x.spec.Network == sandbox.NetworkOpen {
		way, err := x.openNetwork(ctx)
		if err != nil {
			return err
		}
		defer way.close()
		way.into(s)
	}
	x.undo.push("end the machine", x.endMachine)
	began := time.Now()
	if err := x.start(ctx, s); err != nil {
		return err
	}
	up := time.Since(began)
	if x.handle, err = json.Marshal(x.h); err != nil {
		return err
	}
	err = x.bear(ctx)
	b.log.Debug("machine made", "sandbox", x.id, "clone", x.h.Template != "", "up", up, "all", time.Since(began), "err", err)
	return err
}

// machine is the machine that the sandbox has: the same each time, so that a state that was saved fits. The files become its.
func (x *instance) machine(ctx context.Context, image blob.LayerFiles, disk *os.File) (*vmm.Spec, error) {
	b := x.b
	disks := layerDisks(x.h.Layer, image)
	for _, v := range x.spec.Volumes {
		f, err := b.layers.Files(ctx, layer.ID(v.Layer))
		if err != nil {
			closeDisks(append(disks, vmm.Disk{File: disk}))
			return nil, err
		}
		disks = append(disks, layerDisks(v.Layer, f)...)
	}
	s := x.monitorSpec()
	if !b.cfg.NoReclaim {
		s.Append = vmm.ReclaimArgument
	}
	s.Kernel, s.Disks = b.kernel, append(b.mapped(disks), vmm.Disk{Serial: "upper", File: disk})
	return s, nil
}

// monitorSpec is the machine without what it boots.
func (x *instance) monitorSpec() *vmm.Spec {
	b := x.b
	s := &vmm.Spec{
		ID: x.name(), Dir: x.dir(), UID: b.cfg.UIDBase + uint32(x.h.Slot), Machine: b.machine(), CPUs: b.processors(x.spec.Resources),
		Display: b.hasScreen(), Memory: x.h.Memory, Balloon: x.h.Balloon, Rates: b.cfg.Rates, Store: b.store(x.name()),
		Group: vmm.Group{Memory: x.h.Memory + monitorMemory, CPU: x.spec.Resources.CPU, Weight: x.spec.Resources.CPUWeight, Pids: monitorPids},
	}
	if x.spec.BestEffort {
		s.Group.Weight = max(1, s.Group.Weight/16)
	}
	return s
}

// start starts the machine: as a clone where a template fits, else it boots.
func (x *instance) start(ctx context.Context, s *vmm.Spec) error {
	b := x.b
	if len(x.spec.Volumes) == 0 && !b.cfg.NoTemplates && b.driver.Features().Template {
		t, err := b.models.get(ctx, s, layer.ID(x.h.Layer))
		if err != nil && ctx.Err() != nil {
			return err
		}
		if err == nil {
			if err = x.clone(ctx, s, t); err == nil || ctx.Err() != nil {
				x.h.Template = t.key
				return err
			}
			b.models.drop(t)
			if x.vm != nil {
				err = errors.Join(err, x.vm.Kill(ctx))
			}
			x.vm, s.Backing, s.Incoming, s.From = nil, vmm.Memory{}, false, nil
		}
		b.log.Warn("no template: the machine boots", "sandbox", x.id, "err", err)
	}
	vm, err := b.driver.Create(ctx, s)
	if err != nil {
		return err
	}
	x.vm = vm
	return x.greet(ctx)
}

// bear has the guest make the sandbox, then opens the way for commands.
func (x *instance) bear(ctx context.Context) error {
	r := x.spec.Resources
	birth := &keeper.Birth{
		ID: x.inside(), UIDBase: insideUIDs, Hostname: x.spec.Hostname, Resources: r, Network: x.spec.Network, Env: x.spec.Env,
		NoNewPrivs: x.spec.NoNewPrivs, Seccomp: x.b.cfg.Seccomp, Events: x.b.cfg.Events, Volumes: x.spec.Volumes,
	}
	birth.Resources.CPU, birth.Resources.CPUWeight = 0, 100 // the monitor's group holds these
	var n *vmwire.Network
	if x.h.Lent != nil {
		birth.Resolv = x.h.Lent.Resolv
		n = &vmwire.Network{Address: guestAddress, Gateway: guestGateway, MTU: x.h.Lent.MTU}
	}
	laid, err := x.link.bear(ctx, birth, x.h.Layer, n)
	if err != nil {
		return err
	}
	x.h.Laid = laid
	if x.handle, err = json.Marshal(x.h); err != nil {
		return err
	}
	if err := x.link.openKeeper(ctx, x); err != nil {
		return err
	}
	if !x.deadline.IsZero() {
		return x.link.keeper.SetDeadline(ctx, x.inside(), keeper.DeadlineTotal, x.deadline, totalCause)
	}
	return nil
}

func (x *instance) dir() string { return filepath.Join(x.b.cfg.RunDir, x.name()) }

func (x *instance) makeFolder() error {
	x.undo.push("remove the folder", func(context.Context) error { return os.RemoveAll(x.dir()) })
	if err := os.Mkdir(x.dir(), 0o700); err != nil {
		return fmt.Errorf("folder of the machine: %w", err)
	}
	return nil
}

func closeDisks(list []vmm.Disk) {
	for _, d := range list {
		d.File.Close()
	}
}

const maxTail = 1200 // octets of a console in an error

// consoleTail is the end of what a guest wrote, for an error.
func consoleTail(ctx context.Context, vm vmm.VM) string {
	text := strings.TrimSpace(strings.ToValidUTF8(vm.Console(ctx), "?"))
	if len(text) > maxTail {
		text = strings.ToValidUTF8("... "+text[len(text)-maxTail:], "")
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' || r == 0x7f {
			return -1
		}
		return r
	}, text)
}
