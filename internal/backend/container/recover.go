package container

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"

	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Recover takes a sandbox back that a previous process of this host made.
func (b *Backend) Recover(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, text []byte, sink sandbox.Sink) (sandbox.Instance, error) {
	var h handle
	d := json.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&h); err != nil {
		return nil, fmt.Errorf("recover %s: its handle is not one of ours (%v): %w", id, err, sandbox.ErrInvalid)
	}
	if h.Version != handleVersion || h.Slot < 0 || h.Slot >= b.cfg.Slots || !filepath.IsAbs(h.Upper) {
		return nil, fmt.Errorf("recover %s: its handle is of version %d, slot %d, upper %q: %w", id, h.Version, h.Slot, h.Upper, sandbox.ErrInvalid)
	}
	c, err := b.link(ctx)
	if err != nil {
		return nil, fmt.Errorf("recover %s: %w", id, err)
	}
	alive, ok, err := b.takeFound(ctx, c, id)
	if err != nil {
		return nil, fmt.Errorf("recover %s: %w", id, err)
	}
	x := &instance{
		b: b, id: id, spec: spec, sink: sink, slot: h.Slot, upper: h.Upper, limit: h.Limit, note: h.Note, ifindex: h.Ifindex, handle: bytes.Clone(text), state: living,
		frozen: alive.Frozen, ownKernel: h.OwnKernel,
	}
	if ok && b.slots.uid(h.Slot) != alive.Birth.UIDBase {
		return nil, fmt.Errorf("recover %s: its handle says uid slot %d, the keeper uid %d: %w", id, h.Slot, alive.Birth.UIDBase, sandbox.ErrInvalid)
	}
	if err := b.register(x); err != nil {
		return nil, fmt.Errorf("recover %w", err)
	}
	x.undo.push("forget the sandbox", func(context.Context) error { b.unregister(x); return nil })
	if err := b.slots.claim(h.Slot, id); err == nil {
		x.undo.push("release uid slot", func(context.Context) error { b.slots.release(h.Slot, id); return nil })
	} else if ok {
		x.undo.runAll(ctx)
		return nil, fmt.Errorf("recover %s: %w", id, err)
	}
	x.undo.push("remove upper", func(ctx context.Context) error { return b.uppers.Remove(ctx, string(id)) })
	if ok {
		used := mountedLayers(spec)
		b.mounts.hold(used)
		x.undo.push("release layers", func(context.Context) error { b.mounts.release(used); return nil })
	}
	if h.Ifindex != 0 {
		// The rules may have been flushed while nobody looked, and a resolver is served by this process.
		if err := b.net.setUp(); err != nil && ok {
			b.log.Error("network open of a recovered sandbox", "sandbox", id, "err", err)
		}
		x.undo.push("wait for the network device's end", func(ctx context.Context) error { return b.net.waitGone(ctx, h.Ifindex) })
	}
	x.undo.push("end processes", x.endProcesses)
	if !ok {
		x.setState(undone)
		if err := x.undo.run(ctx); err != nil {
			return nil, fmt.Errorf("recover %s: remove its remains: %w", id, err)
		}
		return nil, fmt.Errorf("recover %s: its keeper died: %w", id, sandbox.ErrLost)
	}
	x.groups = alive.Born.Group
	x.beginTrace(ctx)
	return x, nil
}

// takeFound says whether the keeper holds the sandbox. The list of all is asked once, not once for each.
func (b *Backend) takeFound(ctx context.Context, c *keeper.Client, id sandbox.ID) (keeper.Alive, bool, error) {
	b.mu.Lock()
	a, ok := b.found[id]
	known := b.found != nil
	b.mu.Unlock()
	if ok || known {
		return a, ok, nil
	}
	alive, err := c.List(ctx)
	if err != nil {
		return a, false, err
	}
	for _, a := range alive {
		if a.ID == id {
			return a, true, nil
		}
	}
	return a, false, nil
}
