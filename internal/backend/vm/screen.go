package vm

import (
	"context"
	"fmt"
	"net"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// hasScreen says whether the backend's machines have a screen, keyboard and pointer.
func (b *Backend) hasScreen() bool { return b.cfg.Name == "vm" && b.driver.Features().Display }

// VNC implements sandbox.Screened: QEMU's own server, which listens nowhere, on one end of a socket pair.
func (x *instance) VNC(ctx context.Context) (net.Conn, error) {
	if !x.b.hasScreen() {
		return nil, fmt.Errorf("screen of %s: its machine has none: %w", x.id, sandbox.ErrUnsupported)
	}
	if x.h.Own {
		if !x.isLiving() || x.isFrozen() {
			return nil, fmt.Errorf("screen of %s: it does not run: %w", x.id, sandbox.ErrState)
		}
	} else if _, err := x.use(ctx, "screen"); err != nil {
		return nil, err
	}
	d, ok := x.vm.Display()
	if !ok {
		return nil, fmt.Errorf("screen of %s: its machine was made without one: %w", x.id, sandbox.ErrUnsupported)
	}
	c, err := d.VNC(ctx)
	if err != nil {
		return nil, x.said("screen", err)
	}
	return c, nil
}

// Console implements sandbox.Consoled. It asks the monitor, never the guest, so it answers for a machine that hangs, crashed or is paused.
func (x *instance) Console(ctx context.Context) ([]byte, error) {
	if err := x.take(ctx); err != nil { // a save ends the monitor, a resume starts one
		return nil, x.said("console", err)
	}
	defer func() { <-x.turn }()
	if x.vm == nil || x.isSaved() {
		return vmm.KeptConsole(x.dir()), nil
	}
	return []byte(x.vm.Console(ctx)), nil
}
