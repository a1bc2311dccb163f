package sandbox

import "time"

// OutcomeKind says how a command ended.
type OutcomeKind string

const (
	Exited       OutcomeKind = "exited"        // Code is the exit code
	Signalled    OutcomeKind = "signalled"     // Signal is the number
	TimedOut     OutcomeKind = "timed_out"     // its deadline passed and all of it was killed
	OutOfMemory  OutcomeKind = "out_of_memory" // the kernel killed its main process for memory
	StartFailed  OutcomeKind = "start_failed"  // no process ran: Error names program, cwd or user and the reason
	SessionEnded OutcomeKind = "session_ended" // the session's shell ended before the command could run
	Killed       OutcomeKind = "killed"        // ended by the platform on request: stop of the sandbox or session
	Interrupted  OutcomeKind = "interrupted"   // a body broke off: Applied octets were taken
	Unknown      OutcomeKind = "unknown"       // started, and its end was not seen; never run again by itself
)

// Outcome is how a step ended and what it used. It is a value, not an error: whatever a command does is its own affair.
type Outcome struct {
	Kind       OutcomeKind `json:"kind"`
	Code       int         `json:"code,omitempty"`
	Signal     int         `json:"signal,omitempty"`
	Error      string      `json:"error,omitempty"`
	MemoryHit  bool        `json:"memory_hit,omitempty"`  // a process of the step met the memory limit, whoever died of it
	PidsHit    bool        `json:"pids_hit,omitempty"`    // the process limit refused a fork during the step
	DiskHit    bool        `json:"disk_hit,omitempty"`    // the disk was full at the step's end
	OutputOpen bool        `json:"output_open,omitempty"` // a child still held stdout or stderr when the end was reported
	SessionEnd bool        `json:"session_end,omitempty"` // the session's shell ended with this command
	Shared     bool        `json:"shared,omitempty"`      // figures include other work in the same group or at the same time

	Stdout StreamEnd `json:"stdout"`
	Stderr StreamEnd `json:"stderr"`
	Usage  Usage     `json:"usage"`

	Started time.Time `json:"started"`
	Ended   time.Time `json:"ended"`

	// Group names the group of processes that it ran in to the backend; it is no part of the record.
	Group string `json:"-"`
}

// StreamEnd describes a stream of a command at its end. The first Head and the last Tail octets are kept; a read in
// [Head, Total-Tail) answers those two offsets. Truncated is Head+Tail < Total.
type StreamEnd struct {
	Total     int64  `json:"total"`
	Head      int64  `json:"head"`
	Tail      int64  `json:"tail"`
	Truncated bool   `json:"truncated,omitempty"`
	SHA256    string `json:"sha256,omitempty"` // of all octets up to Total, hex
}

// Usage is what a step or a sandbox used.
type Usage struct {
	CPU        time.Duration `json:"cpu"`         // user and system time
	MemoryPeak int64         `json:"memory_peak"` // octets; -1 where the kernel can't tell
}
