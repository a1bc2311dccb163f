// Package guest is the host's end of the file protocol that runs inside a sandbox (docs/format/files.md): [Files] is the client,
// [ServeFiles] the server, which cmd/dsec-guest runs in the sandbox's namespaces and cgroup as the user asked for.
//
// It hides frames, credits and cancelling. Invariants: whatever the server sends is hostile and bounded (a breach ends the
// connection with ErrLost); a call that nobody reads holds at most filewire.Window octets and stops no other; nothing is held
// whole. The only lock order is Files.mu before call.mu, and neither is held during I/O.
package guest
