package sandbox

// State is where a sandbox is in its life. A paused or failed sandbox can always be stopped.
type State string

const (
	Creating State = "creating"
	Running  State = "running"
	Pausing  State = "pausing"
	Paused   State = "paused"
	Resuming State = "resuming"
	Stopping State = "stopping"
	Stopped  State = "stopped"
	Failed   State = "failed"
)

// Ended reports whether nothing of the sandbox is left but its record and log.
func (s State) Ended() bool { return s == Stopped || s == Failed }

// PauseLevel says how much of a paused sandbox stays in memory. Only Frozen exists so far; Capabilities says what a backend has.
type PauseLevel string

const (
	Frozen   PauseLevel = "frozen"
	PagedOut PauseLevel = "paged_out"
	Saved    PauseLevel = "saved"
)

// Class says why a sandbox ended or became unusable. Platform wins over all others; a command's exit code never sets it.
type Class string

const (
	ClassNone     Class = "none"     // its client stopped it
	ClassClient   Class = "client"   // lease, cancelled, preempted
	ClassLimit    Class = "limit"    // idle, total, disk, memory that ended the sandbox
	ClassTask     Class = "task"     // its entrypoint ended
	ClassPlatform Class = "platform" // host lost, image, capacity, internal
)

// Cause is a class with the particular reason, as in {limit, "idle"}.
type Cause struct {
	Class  Class  `json:"class"`
	Reason string `json:"reason,omitempty"`
	Detail string `json:"detail,omitempty"`
}
