// Package blob is the blob daemon, which gives the kernel the contents of layers that lie elsewhere, and the host's side of it.
//
// It hides how contents come: a [Server] answers reads of files on a FUSE file system of its own, which is mounted but attached to no
// folder; EROFS takes such a file for the data of a layer. A file is fetched from the store in units of 1 MiB, each once, when it is
// read, and is kept in a local cache. A [Supervisor] runs in the host, starts the daemon when it is first needed and again when it
// dies, and hands out the descriptors.
//
// Invariants:
//   - No octet is served before its unit's digest was compared with the blob's list of units, once in each life of the daemon.
//   - A read ends: with the right octets, or with EIO at its deadline. The deadline is the daemon's; while no daemon lives, reads wait.
//   - Reads that a daemon had taken when it was killed are asked again of the next one (FUSE_NOTIFY_RESEND), since the keeper
//     holds the descriptor of the connection. Nodes are numbered by digest, and what a node is lies in the run folder, so the next one
//     needs no memory of the last.
//   - The daemon opens no file on its own file system: killed in the middle of that, it could end only after its successor's answer.
//   - The cache holds nothing that can't be fetched again. A file that was handed out whole is never punched, only unlinked, and only
//     when nobody has it open.
//
// Lock order: Server.mu, then blob.mu. blob.mu is held over reads of the cache file, by readers shared.
package blob
