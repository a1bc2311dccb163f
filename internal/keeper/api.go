package keeper

import (
	"context"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// ProtocolVersion is the version of the protocol between host and keeper. Bodies grow at their end only: an older side skips
// what it does not know and a newer one reads zero for what is missing, so that a new host takes over an old keeper.
const ProtocolVersion = 1

// Config is how a keeper runs. The host gives it once, at start.
type Config struct {
	Dir      string // run folder: socket, lock, log; its name is the instance's
	Instance string // names cgroups on the host: "dsec-<instance>"; lower-case letters and digits
	// Lonely is how long a keeper without sandboxes waits for a host before it ends; 0 is 2 minutes.
	Lonely time.Duration
	// LeaveDynmods keeps the cgroup2 mount as it is; otherwise favordynmods is set where the kernel has it.
	LeaveDynmods bool
	NetnsPool    int // network namespaces kept ready; 0 is 16
}

// Info is what a keeper says of itself and of its kernel after Hello.
type Info struct {
	Version  uint32
	Pid      int
	Instance string
	Started  time.Time
	Features map[string]string // feature name -> "yes" or the reason why not
}

// Birth is a request for a sandbox.
type Birth struct {
	ID     sandbox.ID
	Layers []string // mounted layer IDs, lowest first
	// UpperDir and WorkDir are empty folders on one file system with one parent, owned by root; with mapping "shifted" the
	// keeper gives the upper to UIDBase.
	UpperDir string
	WorkDir  string
	// UIDBase is the first of 65,536 host ids of the sandbox; process 1 itself runs as UIDBase+65536, so a slot is 65,537 wide.
	UIDBase    uint32
	Hostname   string
	Resources  sandbox.Resources
	Network    sandbox.NetworkMode // None and Open get the same bare namespace; the host adds a veth by Client.Netns
	Env        []string            // base environment of commands
	BestEffort bool
	NoNewPrivs bool
	NoSuid     bool
	Hosts      []string // lines added to /etc/hosts
	Resolv     []string // lines of /etc/resolv.conf; none leaves it empty
	Seccomp    []byte   // sock_filter[] for commands; none installs none
	// Caps is the bounding and permitted set of commands (bit mask by capability number); 0 is DefaultCaps.
	Caps     uint64
	Deadline time.Time // total TTL; zero is none
	Lease    time.Time // end of the lease; zero is none
	// Events is a sock_filter[] of fewer than 128 instructions that asks about calls of commands, all of which are refused and told to
	// the handler; none asks about nothing.
	Events []byte
	// Volumes are mounted layers that are seen read-only at their paths.
	Volumes []sandbox.Volume
	// Runtime starts process 1 in a container of its own making; nil: the keeper does.
	Runtime *Runtime
}

// Runtime is an OCI runtime and what it is to make of a birth.
type Runtime struct {
	Kind    string // RuntimeCrun, RuntimeRunc or RuntimeRunsc
	Program string // absolute path
	// Config is the bundle's config.json. In its text "@BUNDLE@" stands for the bundle's folder, in which the keeper lays: rootfs (the
	// composed root), shm, dev and sys (what every sandbox has there), netns, programs (with dsec-init) and v0, v1, ... (volumes).
	Config []byte
}

// Kinds of runtimes.
const (
	RuntimeCrun  = "crun"
	RuntimeRunc  = "runc"
	RuntimeRunsc = "runsc" // gVisor: the sandbox has a kernel of its own
)

// DefaultCaps are the capabilities of a command run as root: chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap,
// net_bind_service, net_raw, sys_chroot, sys_ptrace, audit_write and setfcap. They hold in the sandbox's user
// namespace alone; the mount, network and pid namespaces are not its own.
const DefaultCaps = 1<<0 | 1<<1 | 1<<3 | 1<<4 | 1<<5 | 1<<6 | 1<<7 | 1<<8 | 1<<10 | 1<<13 | 1<<18 | 1<<19 | 1<<29 | 1<<31

// Born is the answer to Birth.
type Born struct {
	Pid      int    // of process 1, on the host
	Mapping  string // "idmap" or "shifted": whether the upper on disk holds the sandbox's own ids or the host's
	Shm      string // "upper": /dev/shm is a folder of the sandbox's own; "tmpfs" where the kernel can't
	ProcessU uint32 // host uid of process 1
	// Laid are the files that the birth wrote into the upper, by path from the root ("etc/hosts"), with their SHA-256 in hex; none
	// from a keeper of before this field.
	Laid map[string]string
	// Group is the folder of the sandbox's group in the version 2 hierarchy: groups are made ahead and are not named after a sandbox.
	Group string
}

// Alive is a sandbox that the keeper holds, for recovery.
type Alive struct {
	ID       sandbox.ID
	Born     Born
	Birth    Birth // without Seccomp and Events
	Frozen   bool
	Ended    *sandbox.Cause // set when it ended and the host has not called Destroy
	Commands []Running
	Sessions []string
}

// Running is a command the keeper remembers: it runs, or its end or output is not acknowledged.
type Running struct {
	ID      string
	Session string
	Ended   bool
	Stdout  int64 // octets acknowledged
	Stderr  int64
	Stdin   int64 // octets taken
}

// Handler receives what happens in sandboxes. An event counts as taken once the method returned nil; on an error the client
// calls again after a pause. Events of one sandbox come in order, one at a time; those of different sandboxes in parallel.
type Handler interface {
	Output(ctx context.Context, id sandbox.ID, cmd string, stream sandbox.StreamName, offset int64, data []byte, late bool) error
	CommandEnded(ctx context.Context, id sandbox.ID, cmd string, o sandbox.Outcome) error
	SessionEnded(ctx context.Context, id sandbox.ID, session string, o sandbox.Outcome) error
	Ended(ctx context.Context, id sandbox.ID, c sandbox.Cause) error
	Denied(ctx context.Context, id sandbox.ID, cmd, call, detail string)
}
