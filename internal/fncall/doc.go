// Package fncall runs function calls: small programs, each to its end in namespaces of its own, with an online judge's verdicts.
//
// It hides languages, compiling once for many inputs, the cache of files by content, the queue, the retry of failures of the platform and
// the idempotency of keys. How one process tree is confined and run is behind [Runner], which the keeper implements; what a call is on the
// wire stands in api/dsec/v1/fncall.proto, whose messages this package takes and gives.
//
// Invariants:
//   - An error means that the platform refused or failed before anything was judged; whatever a program does is a verdict. A failure of the
//     platform during a call is the verdict SYS, and only that is tried again.
//   - A run gets nothing but its program, its input and the read-only layers of its environment. What it leaves is gone at its end.
//   - Time of the queue, of copies and of the compiler is never a run's time.
//   - No more runs at once than the pool's size; a wait has a bound; the queue takes projects in turn.
//   - An answer under a key is recorded before it is given, and is given again without running anything.
//
// Lock order: Engine.mu, then the cache's. Nothing runs and no file is read under either.
package fncall
