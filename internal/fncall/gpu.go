package fncall

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// GPUs hands out devices: whole ones to one call at a time, shared ones (such as the instances of a card that is divided) to as many as
// each has places.
type GPUs struct {
	mu      sync.Mutex
	devices []*device
	changed chan struct{} // closed and replaced when a place becomes free
}

// Device is one to hand out. Places above 1 make it a shared one.
type Device struct {
	Name   string
	Places int
}

type device struct {
	Device
	used      int
	exclusive bool
}

// NewGPUs makes the pool of a host's devices; none is a host without.
func NewGPUs(list []Device) *GPUs {
	g := &GPUs{changed: make(chan struct{})}
	for _, d := range list {
		d.Places = max(1, d.Places)
		g.devices = append(g.devices, &device{Device: d})
	}
	return g
}

// Take waits for a device: mode "shared" for a place on one, "exclusive" for one that nobody else has.
func (g *GPUs) Take(ctx context.Context, mode string) (name string, release func(), err error) {
	if mode != "shared" && mode != "exclusive" {
		return "", nil, fmt.Errorf("gpu %.40q: want shared or exclusive: %w", mode, sandbox.ErrInvalid)
	}
	if len(g.devices) == 0 {
		return "", nil, fmt.Errorf("gpu %s: this host has none: %w", mode, sandbox.ErrUnsupported)
	}
	for {
		g.mu.Lock()
		if d := g.fit(mode); d != nil {
			d.used++
			d.exclusive = mode == "exclusive"
			g.mu.Unlock()
			return d.Name, sync.OnceFunc(func() { g.give(d) }), nil
		}
		changed := g.changed
		g.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return "", nil, fmt.Errorf("gpu %s: all are taken: %w", mode, ctx.Err())
		}
	}
}

// fit finds a device; mu is held. Shared calls fill the fullest first, so that whole devices stay free for the others.
func (g *GPUs) fit(mode string) *device {
	var best *device
	for _, d := range g.devices {
		switch {
		case d.exclusive, mode == "exclusive" && d.used > 0, d.used >= d.Places:
		case best == nil || mode == "shared" && d.used > best.used || mode == "exclusive" && d.Places < best.Places:
			best = d
		}
	}
	return best
}

func (g *GPUs) give(d *device) {
	g.mu.Lock()
	defer g.mu.Unlock()
	d.used--
	d.exclusive = false
	close(g.changed)
	g.changed = make(chan struct{})
}

// Names are those of all devices.
func (g *GPUs) Names() (names []string) {
	for _, d := range g.devices {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	return names
}
