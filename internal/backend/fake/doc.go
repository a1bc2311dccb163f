// Package fake is a backend of behaving fakes, for the tests of host, gateway and cluster: sandboxes, commands, sessions and
// ports exist in memory, obey the contract of [sandbox.Backend] and can be made to wait, fail or crash by a hook.
//
// A [World] stands for what outlives a host daemon (the keeper and its sandboxes); [World.Connect] gives a Backend, as a host
// that says Hello gets one, and fences those given before: their calls fail and their sinks get nothing any more. What was not
// taken by a sink is kept and sent again to the next one.
//
// Programs are words, no shell: see run.go. Time is package time, so that the fake works in a synctest bubble.
//
// Lock order: World.mu alone; no callback runs under it.
package fake
