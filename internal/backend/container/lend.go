package container

import (
	"context"
	"fmt"
	"maps"
	"os"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Lent is a way out of the host, as a sandbox of network "open" has it, in a network namespace of another backend's: a device eth0 with an
// address, under the same rules. It takes a uid slot, which stands for the address.
type Lent struct {
	Slot    int      `json:"slot"`
	Ifindex int      `json:"ifindex"` // of the host's side
	MTU     int      `json:"mtu"`
	Resolv  []string `json:"-"` // lines of resolv.conf
}

// NoNetworkOpen is why the host offers no network "open"; empty when it does.
func (b *Backend) NoNetworkOpen() string { return b.net.reason }

// Lend gives a namespace a way out. On an error nothing is left but in the namespace.
func (b *Backend) Lend(ctx context.Context, id sandbox.ID, ns *os.File) (l Lent, err error) {
	if err := b.net.setUp(); err != nil {
		return l, err
	}
	if l.Slot, err = b.slots.take(id, true); err != nil {
		return l, err
	}
	b.noteLent(l.Slot, true)
	if l.Ifindex, err = b.net.enter(ctx, int(ns.Fd()), l.Slot); err != nil {
		b.noteLent(l.Slot, false)
		b.slots.release(l.Slot, id)
		return l, err
	}
	l.MTU, l.Resolv = b.net.mtu, b.net.resolv()
	return l, nil
}

// Lending notes what was lent before a restart. It comes before Sweep.
func (b *Backend) Lending(id sandbox.ID, l Lent) error {
	if err := b.slots.claim(l.Slot, id); err != nil {
		return err
	}
	b.noteLent(l.Slot, true)
	return b.net.setUp() // the rules may have been flushed while nobody looked, and a resolver is served by this process
}

// TakeBack waits until the device is gone, which the end of its namespace makes, and frees the slot. It is idempotent.
func (b *Backend) TakeBack(ctx context.Context, id sandbox.ID, l Lent) error {
	if err := b.net.waitGone(ctx, l.Ifindex); err != nil {
		return fmt.Errorf("network device of %s: %w", id, err)
	}
	b.noteLent(l.Slot, false)
	b.slots.release(l.Slot, id)
	return nil
}

func (b *Backend) noteLent(slot int, on bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := maps.Clone(b.lent)
	if next == nil {
		next = map[int]bool{}
	}
	if next[slot] = on; !on {
		delete(next, slot)
	}
	b.lent = next
}
