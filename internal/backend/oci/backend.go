package oci

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// BackendName is the name of the backend that runs containers under a runtime: what a create with that runtime asks a host for.
func BackendName(runtime string) string {
	name, err := sandbox.BackendOf("container", runtime)
	if err != nil {
		return "container/" + runtime // New refuses it
	}
	return name
}

// Backend is the container driver with births by a runtime.
type Backend struct {
	driver  *container.Backend
	runtime Runtime
}

var _ sandbox.Backend = (*Backend)(nil)

// New makes a backend of a runtime that was found. ErrUnsupported with the reason when it can't be used.
func New(driver *container.Backend, r Runtime) (*Backend, error) {
	if r.Reason != "" {
		return nil, fmt.Errorf("runtime %s: %s: %w", r.Name, r.Reason, sandbox.ErrUnsupported)
	}
	if _, ok := known[r.Name]; !ok {
		return nil, fmt.Errorf("runtime %.40q: want one of %q: %w", r.Name, Names(), sandbox.ErrUnsupported)
	}
	return &Backend{driver: driver, runtime: r}, nil
}

// Features of Capabilities that say what else gVisor does otherwise.
const (
	NoStepMemory = "step_memory"  // no memory figure for a step
	NoStepPids   = "session_pids" // a session's command that met the process limit is not marked
	NoPressure   = "pressure"     // no pressure files inside
	NoSaved      = "pause_saved"  // no pause level saved
)

// Capabilities of the runtime: the driver's, and what is otherwise.
func (b *Backend) Capabilities() sandbox.Capabilities {
	c := b.driver.Capabilities()
	c.Backend = BackendName(b.runtime.Name)
	c.Features = maps.Clone(c.Features)
	c.Features["runtime"] = b.runtime.Version + " (" + b.runtime.Program + ")"
	if b.runtime.Name == GVisor {
		c.Isolation = "high"
		maps.Copy(c.Features, map[string]string{
			sandbox.FeatureOwnKernel:  "gVisor's: dmesg and /proc/version tell",
			sandbox.FeatureMemoryEnds: "a program over the limit ends the whole sandbox, limit(memory); gVisor itself may use 64 MiB beyond it",
			sandbox.FeatureDiskLate:   "late: a sync inside does not reach the pool, so use is told after a minute or so",
			sandbox.FeatureNoSpecial:  "FIFOs and sockets live in gVisor's memory and are not in a snapshot",
			NoStepMemory:              "no: pages of all programs belong to gVisor's one file",
			NoStepPids:                "no: in a session a refused fork is an error in the program alone",
			NoPressure:                "no: gVisor has none",
			NoSaved:                   "no: gVisor can't save a program whose streams are pipes of the host's",
			"denied":                  "no: calls are gVisor's own, there is no filter to report from",
		})
	}
	return c
}

// Create makes a sandbox under the runtime.
func (b *Backend) Create(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (sandbox.Instance, error) {
	if c := b.Capabilities(); !slices.Contains(c.Networks, string(spec.Network)) {
		return nil, fmt.Errorf("create %s: network %q: %s has %q (%s): %w", id, spec.Network, c.Backend, c.Networks, c.Features["network_"+string(spec.Network)], sandbox.ErrUnsupported)
	}
	r := &container.Runtime{
		Name: b.runtime.Name, OwnKernel: b.runtime.Name == GVisor,
		Birth: func(uid uint32) (*keeper.Runtime, error) { return b.runtime.birth(spec, uid) },
	}
	return b.driver.CreateUnder(ctx, id, spec, sink, r)
}

// Recover takes a sandbox back; its handle says how it was made.
func (b *Backend) Recover(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, handle []byte, sink sandbox.Sink) (sandbox.Instance, error) {
	return b.driver.Recover(ctx, id, spec, handle, sink)
}

// Sweep is the driver's: all its sandboxes are in one keeper.
func (b *Backend) Sweep(ctx context.Context, living map[sandbox.ID]bool) error {
	return b.driver.Sweep(ctx, living)
}
