package sandbox

import (
	"fmt"
	"slices"
	"strings"
)

// runtimes are what container sandboxes can run under, as clients name them: direct is dsec's own way, the others are OCI runtimes.
// Capabilities say which of them a host has.
var runtimes = []string{"direct", "crun", "runc", "gvisor"}

// BackendOf is the name of the backend that a client's backend and runtime amount to: "container" under "gvisor" is "container/gvisor".
// Both may be empty.
func BackendOf(backend, runtime string) (string, error) {
	switch {
	case runtime == "":
		return backend, nil
	case !slices.Contains(runtimes, runtime):
		return "", fmt.Errorf("runtime %.40q: want %s: %w", runtime, strings.Join(runtimes, ", "), ErrInvalid)
	case backend != "" && backend != "container":
		return "", fmt.Errorf("runtime %s: backend %.40q has no runtimes; leave one of them out: %w", runtime, backend, ErrInvalid)
	case runtime == "direct":
		return "container", nil
	}
	return "container/" + runtime, nil
}

// RuntimeOf is the runtime in a backend's name; "" when it has none.
func RuntimeOf(backend string) string {
	r, _ := strings.CutPrefix(backend, "container/")
	if r == backend {
		return ""
	}
	return r
}

// RuntimeFeature is the feature of the backend container that says what a host knows of a runtime: its version, or why it has it not.
func RuntimeFeature(runtime string) string { return "runtime_" + runtime }

// Features by which a backend says that it does something otherwise than a container of dsec's own; the text is for people. What each
// means is held by the conformance suite.
const (
	// FeatureMemoryEnds: a program over the memory limit ends the whole sandbox, limit(memory).
	FeatureMemoryEnds = "memory_ends_sandbox"
	// FeatureOwnKernel: the kernel inside is not the host's. It tells of itself what it likes, and shows less of a process.
	FeatureOwnKernel = "own_kernel"
	// FeatureDiskLate: a sync inside does not reach the host's disk, so use is told when the host writes by itself, after a minute or so.
	FeatureDiskLate = "disk_use"
	// FeatureNoSpecial: FIFOs and sockets are not in a snapshot.
	FeatureNoSpecial = "snapshot_special"
)

// NoBackend says why a host has no backend of a name, from what its Capabilities tell; never empty.
func NoBackend(backend string, all []Capabilities) string {
	if r := RuntimeOf(backend); r != "" {
		for _, c := range all {
			if why := c.Features[RuntimeFeature(r)]; c.Backend == "container" && why != "" {
				return fmt.Sprintf("can't use the runtime %q: %s", r, why)
			}
		}
	}
	names := make([]string, 0, len(all))
	for _, c := range all {
		names = append(names, c.Backend)
	}
	slices.Sort(names)
	return fmt.Sprintf("has no backend %q (it has %s)", backend, strings.Join(names, ", "))
}
