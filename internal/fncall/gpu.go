package fncall

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// GPUs hands out devices: whole ones to one call at a time, shared ones (such as the instances of a card that is divided) to as many as
// each has places.
type GPUs struct {
	mu      sync.Mutex
	devices []*device
	waiting []*gpuWait // in the order in which they came
}

type gpuWait struct {
	mode string
	got  chan *device // of one
}

const maxGPUWaits = 4096

// Device is one to hand out. Places above 1 make it a shared one.
type Device struct {
	Name   string
	Places int
	Nodes  []string // paths of the host's character devices that a call gets with it
	Env    []string // K=V that a call gets with it, such as which of a card's instances is meant
}

type device struct {
	Device
	used      int
	exclusive bool
}

// NewGPUs makes the pool of a host's devices; none is a host without.
func NewGPUs(list []Device) *GPUs {
	g := &GPUs{}
	for _, d := range list {
		d.Places = max(1, d.Places)
		g.devices = append(g.devices, &device{Device: d})
	}
	return g
}

// Take waits for a device: mode "shared" for a place on one, "exclusive" for one that nobody else has.
func (g *GPUs) Take(ctx context.Context, mode string) (d Device, release func(), err error) {
	if mode != "shared" && mode != "exclusive" {
		return Device{}, nil, fmt.Errorf("gpu %.40q: want shared or exclusive: %w", mode, sandbox.ErrInvalid)
	}
	if len(g.devices) == 0 {
		return Device{}, nil, fmt.Errorf("gpu %s: this host has none: %w", mode, sandbox.ErrUnsupported)
	}
	w := &gpuWait{mode: mode, got: make(chan *device, 1)}
	g.mu.Lock()
	if len(g.waiting) >= maxGPUWaits {
		g.mu.Unlock()
		return Device{}, nil, fmt.Errorf("gpu %s: %d calls wait already: %w", mode, maxGPUWaits, sandbox.ErrExhausted)
	}
	g.waiting = append(g.waiting, w)
	g.hand()
	g.mu.Unlock()
	select {
	case dev := <-w.got:
		return dev.Device, sync.OnceFunc(func() { g.give(dev) }), nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	g.waiting = slices.DeleteFunc(g.waiting, func(o *gpuWait) bool { return o == w })
	select {
	case dev := <-w.got: // just now
		g.release(dev)
	default:
	}
	g.hand() // those behind it may fit
	g.mu.Unlock()
	return Device{}, nil, fmt.Errorf("gpu %s: all are taken: %w", mode, ctx.Err())
}

// hand gives devices to those that wait, in the order in which they came: one that does not fit holds up those behind it, or a stream of
// shared calls would never leave a device whole. mu is held.
func (g *GPUs) hand() {
	for len(g.waiting) > 0 {
		w := g.waiting[0]
		d := g.fit(w.mode)
		if d == nil {
			return
		}
		d.used++
		d.exclusive = w.mode == "exclusive"
		g.waiting = g.waiting[1:]
		w.got <- d
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
	g.release(d)
	g.hand()
}

func (g *GPUs) release(d *device) {
	d.used--
	d.exclusive = false
}

// ProbeGPUs finds the cards of a machine by their devices in a folder (/dev). Each is one device with one place; a card that is divided
// must be configured.
func ProbeGPUs(dev string) (list []Device) {
	cards, _ := filepath.Glob(filepath.Join(dev, "nvidia[0-9]*"))
	slices.Sort(cards)
	var common []string
	for _, n := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"} {
		if p := filepath.Join(dev, n); isDevice(p) {
			common = append(common, p)
		}
	}
	for _, c := range cards {
		if isDevice(c) {
			list = append(list, Device{Name: filepath.Base(c), Places: 1, Nodes: append([]string{c}, common...)})
		}
	}
	return list
}

func isDevice(path string) bool {
	st, err := os.Lstat(path)
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}

// CheckDevices refuses a configuration that no call could be given.
func CheckDevices(list []Device) error {
	names := map[string]bool{}
	for i, d := range list {
		switch {
		case d.Name == "" || names[d.Name]:
			return fmt.Errorf("gpu[%d].name %.40q: want a name that no other has: %w", i, d.Name, sandbox.ErrInvalid)
		case d.Places < 0:
			return fmt.Errorf("gpu[%d].places %d: want 1 or more: %w", i, d.Places, sandbox.ErrInvalid)
		case len(d.Nodes) == 0:
			return fmt.Errorf("gpu[%d].nodes: want the paths of its devices: %w", i, sandbox.ErrInvalid)
		}
		names[d.Name] = true
		for _, n := range d.Nodes {
			if !isDevice(n) {
				return fmt.Errorf("gpu[%d].nodes: %s is no character device: %w", i, n, sandbox.ErrInvalid)
			}
		}
		if err := sandbox.CheckEnv(fmt.Sprintf("gpu[%d].env", i), d.Env); err != nil {
			return err
		}
	}
	return nil
}

// Names are those of all devices.
func (g *GPUs) Names() (names []string) {
	for _, d := range g.devices {
		names = append(names, d.Name)
	}
	slices.Sort(names)
	return names
}
