// Package vm is the backend of virtual machines: each sandbox is alone in a machine with a kernel of its own. Two backends are made of it,
// microvm and vm, which differ in the machine that they ask a driver of internal/vmm for.
//
// It hides how a machine comes to its files (the environment as one read-only image, a writable disk with the sandbox's limit), how its guest
// is found again, and templates: an environment is booted once, and what starts later is a clone of that memory. Inside the machine process 1
// runs a keeper with one sandbox, and the host speaks the keeper's protocol with it: so commands, sessions, output that is kept until it is
// in the log, and timeouts are those of containers.
//
// Invariants: everything that comes from a guest is hostile, it is checked in guard.go before a sink sees it; a deadline holds in the
// warden even when guest and host do not answer; whatever a create made is on a stack that undoes it. Locks: Backend.mu before instance.mu;
// neither is held during I/O. instance.turn (pause, resume, save, snapshot, one at a time) comes before both.
package vm
