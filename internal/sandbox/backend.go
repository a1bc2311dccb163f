package sandbox

import (
	"context"
	"io"
	"net"
	"time"
)

// Capabilities is what a backend can do, as data: gateway and placement refuse with it before anything starts.
type Capabilities struct {
	Backend     string       `json:"backend"`
	Isolation   string       `json:"isolation"` // low, medium, high
	PauseLevels []PauseLevel `json:"pause_levels"`
	Networks    []string     `json:"networks"`
	Fork        string       `json:"fork,omitempty"` // files, memory or empty
	Snapshot    bool         `json:"snapshot"`
	Terminal    bool         `json:"terminal"`
	Sessions    bool         `json:"sessions"`
	Ports       bool         `json:"ports"`
	// Features names what the host lacks or does otherwise, with the reason, for doctor and status.
	Features map[string]string `json:"features,omitempty"`
}

// Backend makes sandboxes of one kind. Every method is bounded by its context and safe for concurrent use. An error means that
// the platform failed and that nothing of the attempt is left.
type Backend interface {
	Capabilities() Capabilities
	// Create makes a sandbox and returns when it can take commands. It arms the spec's total lifetime as SetDeadline does. Events go
	// to sink until Destroy.
	Create(ctx context.Context, id ID, spec *Spec, sink Sink) (Instance, error)
	// Recover takes back every sandbox that outlived a previous host daemon, by the handles that Instance.Handle gave.
	// A handle whose sandbox is gone yields ErrLost and its remains are removed. Unacknowledged output and ends are sent again.
	Recover(ctx context.Context, id ID, spec *Spec, handle []byte, sink Sink) (Instance, error)
	// Sweep removes everything of this host instance that belongs to none of the living: half-made sandboxes above all.
	Sweep(ctx context.Context, living map[ID]bool) error
}

// Sink receives what happens in a sandbox. An event counts as taken once the method returned nil; until then it is kept and sent
// again, also after a restart. Calls for one command come in order.
type Sink interface {
	// Output delivers octets of a stream at their offset. late marks octets after the command's end.
	Output(ctx context.Context, cmd string, stream StreamName, offset int64, data []byte, late bool) error
	// CommandEnded delivers the end of a command, after all octets that belong to it.
	CommandEnded(ctx context.Context, cmd string, o Outcome) error
	// SessionEnded says that a session's shell is gone.
	SessionEnded(ctx context.Context, session string, o Outcome) error
	// Ended says that the sandbox is gone or unusable: its process 1, its keeper or its deadline.
	Ended(ctx context.Context, c Cause) error
	// Denied reports a call that the confinement refused and that no honest tool makes.
	Denied(ctx context.Context, cmd, call, detail string)
}

// Session is a request for a living shell.
type Session struct {
	Name  string   `json:"name"`
	Shell string   `json:"shell,omitempty"` // default: the image's /bin/bash, else /bin/sh
	Env   []string `json:"env,omitempty"`
	Cwd   string   `json:"cwd,omitempty"`
	User  string   `json:"user,omitempty"`
}

// Instance is one living sandbox of a backend.
type Instance interface {
	// Handle is what Recover needs after a restart; small, and stable for the life of the sandbox.
	Handle() []byte
	// Start begins a command and returns when it runs or has failed to start (then CommandEnded with StartFailed follows).
	// The same ID again is a no-op while the backend remembers it. cmd is filled and valid.
	Start(ctx context.Context, cmd *Command) error
	// Known reports whether the backend has ever started the command: after a restart it decides between "running or ended" and
	// "never started".
	Known(ctx context.Context, cmd string) (bool, error)
	// Stdin writes at an offset; octets below what was taken are skipped, a gap is ErrState. eof closes it after the data.
	Stdin(ctx context.Context, cmd string, offset int64, data []byte, eof bool) (taken int64, err error)
	Signal(ctx context.Context, cmd string, sig int) error
	Resize(ctx context.Context, cmd string, size Size) error
	OpenSession(ctx context.Context, s *Session) error
	CloseSession(ctx context.Context, name string) error
	// Files connects to a file server inside, acting as the user (name or uid[:gid]); it speaks internal/guest's file protocol.
	Files(ctx context.Context, user string) (io.ReadWriteCloser, error)
	// Dial opens a TCP connection to a port inside, on its loopback.
	Dial(ctx context.Context, port uint16) (net.Conn, error)
	Pause(ctx context.Context, level PauseLevel) error
	Resume(ctx context.Context) error
	// SetDeadline arms the total TTL where it holds without this process; zero disarms.
	SetDeadline(ctx context.Context, at time.Time) error
	Stats(ctx context.Context) (Stats, error)
	// Snapshot captures the sandbox's own changes as a new layer and returns its ID.
	Snapshot(ctx context.Context) (layer string, err error)
	// Destroy ends everything and returns when no process, mount, cgroup, namespace or file is left. It is idempotent.
	Destroy(ctx context.Context) error
}

// Stats is what a sandbox uses now.
type Stats struct {
	Memory     int64         `json:"memory"`      // octets
	MemoryPeak int64         `json:"memory_peak"` // octets; -1 unknown
	CPU        time.Duration `json:"cpu"`
	Pids       int64         `json:"pids"`
	Disk       int64         `json:"disk"` // octets of its own writes; -1 unknown
	OOMKills   int64         `json:"oom_kills"`
	// HostMemory is what a machine holds of its host's memory now, its monitor included, in octets: what it shares is counted in parts. 0: it is
	// no machine, or none lives (saved).
	HostMemory int64 `json:"host_memory,omitempty"`
}
