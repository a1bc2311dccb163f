package trace

import (
	"net/netip"
	"time"
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
	Path string // as the process sees it; "" where it is longer than 512 octets
	At   time.Duration
	Pid  int64
}

// Connection is one that was asked for: whether it came about is not told.
type Connection struct {
	Kind string // tcp | udp | other
	To   netip.AddrPort
	At   time.Duration
	Pid  int64
}
