// Package rpc is the edge of every daemon: listeners, the errors' wire codes, the conversions between wire messages and the
// vocabulary of internal/sandbox, what is checked of each call before it reaches a service, the client side between gateway and
// host, and both halves of the tunnel to a port inside a sandbox.
//
// It hides the wire library: services take and return messages and errors of internal/sandbox, and only this package knows
// which code an error has. The table is in errors.go and is read in both directions.
//
// Invariants: every call has a deadline when it reaches a service; no call reaches a service before its caller and its protocol
// version were checked, which happens before its body is read; a failed call is logged once, here. Nothing in the package reads
// the proxy variables of the environment: traffic to hosts and sandboxes never takes a detour.
package rpc
