// Package oci runs container sandboxes under an OCI runtime: crun, runc or gVisor's runsc, which users name crun, runc and gvisor.
//
// Everything that a sandbox has on the host (ids, upper, layers, network, groups, process 1 and its protocol) is the container driver's
// and the keeper's; a [Backend] is that driver with another birth: the keeper lays a bundle out of the composed root and the runtime
// starts process 1 in it. What this package hides is which runtimes there are and in which version, what the bundle's config.json must
// say to each of them, and what a sandbox under each of them can and can't do.
//
// Invariants:
//   - A runtime that is not there, or is too old, is a backend all the same in Runtimes, with the reason and the fix; it is never
//     replaced by another one.
//   - crun and runc make process 1 in the initial user namespace, as the keeper itself does; it joins the sandbox's own at its BIRTH.
//     runsc gets a user namespace of the sandbox's ids: neither its kernel nor its file proxy is root on the host.
//
// The package has no state but what was found, and so no locks.
package oci
