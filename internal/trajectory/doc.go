// Package trajectory is the ordered log of a host: what was asked of every sandbox, what came out and how it ended, in the order
// in which it happened. It is the truth; whatever else the host keeps is a checkpoint of it.
//
// It hides segment files, group commit, torn tails, the reserve for a full disk, the in-memory index, retention and the blobs of
// large inputs. Records of many trajectories are interleaved in one write-ahead log of preallocated segments and are read by
// trajectory. Their meaning stays with the caller: payloads are opaque, only outputs are understood, so that a stream can be read
// at an offset. docs/format/trajectory.md describes the bytes.
//
// Invariants
//   - The seq of a trajectory's records counts from 1 without gaps; log order is seq order.
//   - Append returns after write(2) (durability process) or after fdatasync (host). Nothing acknowledged lies in user space.
//   - The log survives as a prefix: a crash may cut its unsynced end but never takes a record out of the middle. So a record
//     acknowledged with durability host makes all before it durable too, those of other trajectories included.
//   - A segment is synced before the next one, and sealed (index footer) in order. What a footer covers is never cut again; a
//     record that rots in there is an ErrLost for its reader, not the end of the log.
//   - A failed write or sync is final: the log refuses everything after it, since the kernel may have dropped the pages. Open
//     again to go on.
//   - A reader sees a record once it is written, maybe before it is synced. Who promises durability host to a client answers after
//     Append, not on what it read.
//
// Sealed segments are packed (pack.go), copied to the store and, under pressure, read from there (far.go). For durability store the tail
// of the log goes there in batches, guarded by an epoch (ship.go).
//
// Lock order: formMu, sealMu, epochMu, allocMu, blobMu, then mu. No I/O happens under mu. Callers of Append write and sync themselves, one leading for all
// that wait (a channel hand-over costs more than the write); Run only does what can wait: sealing, allocating ahead, retention.
package trajectory
