// Package host is the daemon of one machine: it owns the machine's sandboxes, has the last word on their admission, carries them
// through their life, keeps their log and takes them back after its own death.
//
// It hides which backend a sandbox has, the order of records and acts, timers, leases and recovery. What it promises is
// architecture in code:
//
//   - A record of what is about to happen is in the log before it happens: the create before the backend is asked, a step before
//     it starts, an end before it is acknowledged to the backend or told to a client. So a host that is killed at any moment finds
//     in the log everything that may have happened, and the backend says what of it did.
//   - A step is never run twice. Its ID is taken in memory before its record is written; after a restart a step without an end is
//     asked for at the backend: known ones go on, unknown ones are void and their ID is free again.
//   - Whatever was begun for a client goes on when the client leaves: acts run on the host's context with a bound of their own.
//   - A sandbox that moves to another host is one host's at every moment: a file says whose, and each step of a move is one rename of it.
//   - Readers never hold up writers: streams of output are read from the log at the reader's pace.
//
// One sandbox is one [box]; everything of it that changes is under box.mu. Host.mu guards the maps that find boxes, and jobs.
//
// Lock order: a turn of a move, box.forks, box.leaving, Host.mu, then box.mu. No I/O, no callback and no call of a backend or of the log happens
// under either of the last two.
package host
