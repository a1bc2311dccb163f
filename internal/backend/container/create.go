package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer/upper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// handleVersion is the version of the handle's form.
const handleVersion = 1

// handle is what a restarted daemon needs of a sandbox beyond what the keeper says.
type handle struct {
	Version int               `json:"version"`
	Slot    int               `json:"slot"`
	Upper   string            `json:"upper"`
	Limit   int64             `json:"limit"`          // of the upper, octets
	Mapping string            `json:"mapping"`        // "idmap" or "shifted": whose ids the upper holds on disk
	Note    string            `json:"note,omitempty"` // what of the upper is otherwise than asked
	Ifindex int               `json:"ifindex,omitempty"`
	Laid    map[string]string `json:"laid,omitempty"` // file that was laid at birth -> sha256
	// Runtime is that which made it, OwnKernel whether its kernel is not the host's.
	Runtime   string `json:"runtime,omitempty"`
	OwnKernel bool   `json:"own_kernel,omitempty"`
}

// Runtime makes process 1 of a sandbox instead of the keeper (internal/backend/oci).
type Runtime struct {
	Name string
	// OwnKernel: the kernel inside is not the host's. Its loopback is then reached from within alone, and calls are not the host's to
	// filter.
	OwnKernel bool
	// Birth makes what the keeper must know, for the first of the sandbox's host ids.
	Birth func(uid uint32) (*keeper.Runtime, error)
}

// birthBound is how long a birth may take, whatever became of its request: giving up half-way would leave it to others to find
// out how far it came.
const birthBound = 30 * time.Second

// Create makes a sandbox. A request that is given up is seen through to the end of the step under way and then undone.
func (b *Backend) Create(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (sandbox.Instance, error) {
	return b.CreateUnder(ctx, id, spec, sink, nil)
}

// CreateUnder is Create with process 1 made by a runtime; nil: by the keeper.
func (b *Backend) CreateUnder(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink, r *Runtime) (sandbox.Instance, error) {
	open := spec.Network == sandbox.NetworkOpen
	if open && b.net.reason != "" {
		return nil, fmt.Errorf("create %s: %w", id, b.net.refuse())
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("create %s: %w", id, err)
	}
	c, err := b.link(ctx)
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", id, err)
	}
	if err := b.deliverOnce(ctx, c); err != nil {
		return nil, fmt.Errorf("create %s: %w", id, err)
	}
	x := &instance{b: b, id: id, spec: spec, sink: sink, slot: -1, state: creating, runtime: r}
	if err := b.register(x); err != nil {
		return nil, fmt.Errorf("create %w", err)
	}
	x.undo.push("forget the sandbox", func(context.Context) error { b.unregister(x); return nil })
	if err := x.make(ctx, c, open); err != nil {
		x.setState(undone)
		if e := x.undo.run(ctx); e != nil {
			// It stays registered, so that its ID and slot are not given again; tidy tries on, and a sweep does.
			b.log.Error("undo of a failed create", "sandbox", id, "err", e)
		}
		if said := (keeperSaid{}); errors.As(err, &said) {
			return nil, said.error // names act and sandbox already
		}
		return nil, fmt.Errorf("create %s: %w", id, err)
	}
	x.setState(living)
	x.beginTrace(ctx)
	return x, nil
}

// keeperSaid is the keeper's own word on a birth.
type keeperSaid struct{ error }

func (k keeperSaid) Unwrap() error { return k.error }

// deliverOnce asks for events when the first sandbox is made and nobody has swept: a host that had none has nothing to take back.
func (b *Backend) deliverOnce(ctx context.Context, c *keeper.Client) error {
	b.mu.Lock()
	first := !b.swept && !b.delivering
	b.delivering = true
	b.mu.Unlock()
	if !first {
		return nil
	}
	return c.Deliver(ctx)
}

// mountedLayers are all that a sandbox has mounted: its stack and its volumes.
func mountedLayers(s *sandbox.Spec) []string {
	if len(s.Volumes) == 0 {
		return s.Layers
	}
	out := append([]string{}, s.Layers...)
	for _, v := range s.Volumes {
		out = append(out, v.Layer)
	}
	return out
}

// make takes what the sandbox needs, in the order that teardown undoes.
func (x *instance) make(ctx context.Context, c *keeper.Client, open bool) (err error) {
	b := x.b
	if x.slot, err = b.slots.take(x.id, open); err != nil {
		return err
	}
	x.undo.push("release uid slot", func(context.Context) error { b.slots.release(x.slot, x.id); return nil })

	x.undo.push("remove upper", func(ctx context.Context) error { return b.uppers.Remove(ctx, string(x.id)) })
	u, err := b.uppers.Create(ctx, string(x.id), upper.Request{Disk: x.spec.Resources.Disk, Memory: x.spec.Resources.Memory})
	if err != nil {
		return err
	}
	x.upper, x.limit, x.note = u.Dir, u.Limit, u.Note

	used := mountedLayers(x.spec)
	if err := b.mounts.acquire(ctx, c, b.files, used); err != nil {
		return err
	}
	x.undo.push("release layers", func(context.Context) error { b.mounts.release(used); return nil })

	birth := &keeper.Birth{
		ID: x.id, Layers: x.spec.Layers, UpperDir: u.Dir, WorkDir: u.Work, UIDBase: b.slots.uid(x.slot),
		Hostname: x.spec.Hostname, Resources: x.spec.Resources, Network: x.spec.Network, Env: x.spec.Env,
		BestEffort: x.spec.BestEffort, NoNewPrivs: x.spec.NoNewPrivs, Seccomp: b.cfg.Seccomp, Events: b.cfg.Events,
		Volumes: x.spec.Volumes,
	}
	if r := x.runtime; r != nil {
		if birth.Runtime, err = r.Birth(birth.UIDBase); err != nil {
			return err
		}
		if x.ownKernel = r.OwnKernel; r.OwnKernel {
			// Root inside may not trace whoever it likes: to that kernel process 1 is a process like others.
			birth.Caps, birth.Events = keeper.DefaultCaps&^(1<<unix.CAP_SYS_PTRACE), nil
			if birth.Seccomp, err = confine.OwnKernel().Compile(false); err != nil {
				return err
			}
		}
	}
	if open {
		if err := b.net.setUp(); err != nil {
			return err
		}
		birth.Resolv = b.net.resolv()
		x.undo.push("wait for the network device's end", func(ctx context.Context) error { return b.net.waitGone(ctx, x.ifindex) })
	}
	x.undo.push("end processes", x.endProcesses)
	if total := x.spec.Lifetime.Total; total > 0 {
		birth.Deadline = time.Now().Add(total)
	}
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), birthBound)
	defer cancel()
	if open && x.ownKernel { // it looks at its devices once, at its start
		if err := x.enterNetwork(bound, c.Reserve); err != nil {
			return err
		}
	}
	x.room.Store(x.limit)
	x.disk.Store(time.Now().UnixNano()) // nothing is in the upper yet
	born, err := c.Create(bound, birth)
	if err != nil {
		return keeperSaid{err}
	}
	if open && !x.ownKernel {
		if err := x.enterNetwork(bound, c.Netns); err != nil {
			return err
		}
	}
	x.groups = born.Group
	sums := born.Laid
	if len(sums) == 0 { // a keeper of an earlier version does not tell
		sums = laidFiles(u.Dir)
	}
	h := handle{
		Version: handleVersion, Slot: x.slot, Upper: u.Dir, Limit: u.Limit, Note: u.Note, Mapping: born.Mapping, Ifindex: x.ifindex, Laid: sums,
		OwnKernel: x.ownKernel,
	}
	if x.runtime != nil {
		h.Runtime = x.runtime.Name
	}
	x.handle, err = json.Marshal(h)
	if err != nil {
		return err
	}
	return ctx.Err()
}

// enterNetwork gives the new namespace its device.
func (x *instance) enterNetwork(ctx context.Context, netns func(context.Context, sandbox.ID) (*os.File, error)) error {
	ns, err := netns(ctx, x.id)
	if err != nil {
		return err
	}
	defer ns.Close()
	x.ifindex, err = x.b.net.enter(ctx, int(ns.Fd()), x.slot)
	return err
}

// endProcesses has the keeper remove all of its part.
func (x *instance) endProcesses(ctx context.Context) error {
	c, err := x.b.link(ctx)
	if err != nil {
		return err
	}
	end, err := c.End(ctx, x.id)
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(end.Ends) > 0 {
		x.ends = map[string]sandbox.Outcome{}
		for _, e := range end.Ends {
			x.ends[e.Command] = e.Outcome
		}
	}
	if end.Ran {
		x.used = &sandbox.Stats{CPU: end.CPU, MemoryPeak: end.Peak, Disk: -1}
	}
	return err
}
