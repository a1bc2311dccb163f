package trace

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a program that was started.
type Process struct {
	Pid, Parent int64         // as the host numbers them
	At          time.Duration // since the machine's boot
	Args        []string      // octets; as many as fit into 512
	Octets      int64         // of all arguments
	Ended       bool          // seen; then:
	CPU         time.Duration
	Code        int
	Signal      int
}

// Read is a file that was opened for reading, once a step.
type Read struct {
	Path string // from the root of the sandbox; "..." in front where that is too far
	At   time.Duration
	Pid  int64
}

// Connection is one that was asked for.
type Connection struct {
	To    netip.AddrPort
	Error int // of the call: an errno, 0, or EINPROGRESS where it did not wait
	At    time.Duration
	Pid   int64
}

// Ask is a question about a step that has just ended.
type Ask struct {
	From  time.Time // when it began
	Group string    // that its processes ran in, as the backend calls it; "" of steps without
	Files bool      // compare files too
}

// Answer is what there is to say of a step.
type Answer struct {
	Files    *Files // nil where it was not asked for, or can't be told
	Seen     *Seen  // nil where the kernel does not tell
	Pressure *Pressure
	Lacking  []string // what can't be told, each with the reason
}

// Pressure is the time in which some process of the sandbox waited, since it was last asked for.
type Pressure struct{ CPU, Memory, IO time.Duration }

// SinceBoot is the clock that events carry.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
		return 0
	}
	return time.Duration(t.Nano())
}
