// Package trace says what a step of a sandbox did: which paths it changed, which programs it started, what it read and wrote, and, when
// asked for all, which files it read and which connections it asked for.
//
// It hides where that comes from. Changes come from the overlay's upper, which is compared with what was remembered of it when the step has
// ended ([Tree]): no event tells of an overlay's creations, removals and renames. Processes come from small programs in the kernel
// ([Kernel]), put together without a compiler, that leave at once outside of watched sandboxes; a process is known by the group it runs in
// when its program starts, never by its number afterwards. Where the kernel has no BPF, [Open] says so and the rest goes on without it.
//
// What a sandbox does is hostile: names are octets, nothing below an upper is followed or waited for, and names, octets hashed, events and
// time are bounded, each with a count of what was left out.
//
// Lock order: Kernel.mu, then Watch.mu.
package trace
