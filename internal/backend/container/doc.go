// Package container is the direct driver of container sandboxes: it gives each sandbox its uid slot, its upper, its layers and its
// network, and lets the keeper (internal/keeper) bear and hold it.
//
// It hides the keeper's connection, and everything on the host that a sandbox needs besides processes. What it knows of a sandbox
// lies in the sandbox's handle; the rest is asked of the keeper, the pool of uppers and the kernel, so a restarted host daemon has
// no state of ours to lose.
//
// Invariants:
//   - A uid slot belongs to one living sandbox; its network address and device name follow from it.
//   - What is taken for a sandbox is pushed on its teardown before it is taken, and released newest first: the keeper's part
//     (processes, mounts, cgroups, namespaces), the device that goes with the namespace, layers, upper, slot, the ID itself.
//   - Events for a sandbox that this process has not taken back yet are refused, and so kept by the keeper, until Sweep said that
//     there are no more to come.
//   - A keeper that died took its sandboxes with it: each is reported as ended, its remains go when it is destroyed.
//   - A layer's folder, where layers are unpacked, stays while the layer is mounted or a living sandbox has it.
//
// Lock order: unpacked.mu, then Backend.mu, then instance.mu; layerMounts.mu and slots.mu are leaves. No call to the keeper, the pool or a
// sink, and no I/O, under any of them.
package container
