package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// Recover takes a sandbox back whose machine outlived the host daemon. One that its deadline ended meanwhile is taken back too, to be told.
func (b *Backend) Recover(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, text []byte, sink sandbox.Sink) (sandbox.Instance, error) {
	fail := func(err error) (sandbox.Instance, error) { return nil, fmt.Errorf("recover %s: %w", id, err) }
	h, err := parseHandle(text, b.cfg.Slots)
	if err != nil {
		return fail(err)
	}
	x := newInstance(b, id, spec, sink)
	x.h, x.handle = h, bytes.Clone(text)
	monitor, err := b.monitor(ctx, x.name())
	if err != nil {
		return fail(err)
	}
	if err := b.register(x); err != nil {
		return fail(err)
	}
	x.undo.push("forget the sandbox", func(context.Context) error { b.unregister(x); return nil })
	if err := b.slots.claim(h.Slot, id); err != nil {
		x.undo.run(ctx)
		return fail(err)
	}
	b.flat.hold(layer.ID(h.Layer))
	x.remains()
	if h.Lent != nil && b.net != nil {
		if err := b.net.Lending(id, *h.Lent); err != nil {
			b.log.Error("network open of a recovered sandbox", "sandbox", id, "err", err)
		}
		x.undo.push("take back the network", func(ctx context.Context) error { return b.net.TakeBack(ctx, id, *h.Lent) })
	}
	x.undo.push("end the machine", x.endMachine)
	if monitor != nil && monitor.Ended && monitor.Why == "deadline" {
		x.setState(living)
		x.ended(totalCause)
		return x, nil
	}
	if err = b.takeBack(ctx, x, monitor); err != nil {
		x.setState(undone)
		if e := x.undo.run(ctx); e != nil {
			return fail(fmt.Errorf("remove its remains: %w", e))
		}
		return fail(err)
	}
	x.setState(living)
	x.serve()
	return x, nil
}

// monitor is what the warden knows of a sandbox's monitor; nil when it knows nothing.
func (b *Backend) monitor(ctx context.Context, name string) (*warden.Alive, error) {
	list, err := b.warden.List(ctx)
	if errors.Is(err, sandbox.ErrLost) || errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, a := range list {
		if a.ID == name {
			return &a, nil
		}
	}
	return nil, nil
}

func (b *Backend) takeBack(ctx context.Context, x *instance, monitor *warden.Alive) error {
	if x.hasSaved() { // it has not run since: a state is whole before its machine ends, and goes before one that loaded it runs
		if monitor != nil {
			if err := b.warden.Kill(ctx, x.name()); err != nil {
				return err
			}
			if err := b.warden.Forget(ctx, x.name()); err != nil {
				return err
			}
		}
		x.frozen, x.saved = true, true
		return nil
	}
	if err := x.dropSaved(); err != nil { // of a save that was broken off: its machine lives
		return err
	}
	if monitor == nil || monitor.Ended {
		return fmt.Errorf("its machine is gone: %w", sandbox.ErrLost)
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	vm, err := b.driver.Find(ctx, x.name(), x.dir())
	if err != nil {
		return err
	}
	x.vm = vm
	s, err := vm.Status(ctx)
	if err != nil {
		return err
	}
	switch s {
	case "running": // its guest is found by the one that keeps the conversation
		if err := os.Remove(x.copying()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	case "saved": // its host was killed in a save
		x.frozen = true
	case "paused":
		goesOn, err := x.endCopying(ctx)
		if err != nil {
			return err
		}
		x.frozen = !goesOn
	default:
		return fmt.Errorf("its machine %s: %w", s, sandbox.ErrLost)
	}
	return nil
}
