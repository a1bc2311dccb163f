// Package keeper is the small process that spawns container sandboxes and outlives the host daemon, and the client that the host
// daemon uses to speak to it.
//
// It hides namespaces, cgroups, mounts, pipes and process 1. It holds what must not be lost when the host daemon dies: output
// that the host has not acknowledged, ends of commands, deadlines. An octet or an end leaves the keeper only when the host said
// that it is in the log; after a new Hello everything that was not acknowledged is sent again, from the first octet not taken.
//
// Invariants:
//   - The keeper imports nothing but the standard library, golang.org/x/sys and those packages of ours that hold to the same.
//   - One host connection at a time. After Hello was answered nothing of an older connection starts any more.
//   - Overlays are mounted detached and live only in a sandbox's own mount namespace; layers live in one pinned namespace.
//   - Every path inside a sandbox is resolved with openat2 from its root; what process 1 says is hostile input.
//   - A sandbox ends with its process 1, and process 1 ends with the keeper: its control stream closes.
//
// Lock order: Keeper.mu, then box.mu, then command.mu, then stream.mu. No callback and no blocking call under any of them,
// except non-blocking reads of a pipe under stream.mu.
package keeper
