package sandbox

import (
	"fmt"
	"path"
	"sort"
	"strings"
	"time"
)

// Defaults, the same in every client and frozen in SPECIFICATION.md.
const (
	DefaultMemory    = 2 << 30  // octets
	DefaultDisk      = 10 << 30 // octets
	DefaultPids      = 4096
	DefaultIdle      = 30 * time.Minute
	DefaultTotal     = 24 * time.Hour
	DefaultOutputCap = 16 << 20 // octets a stream
	MaxOutputCap     = 1 << 30
	MaxTail          = 64 << 10 // T = min(MaxTail, C/2)
	MaxLongPoll      = 60 * time.Second
	OutputGrace      = 200 * time.Millisecond
	MaxLease         = 60 * time.Second

	MinMemory = 4 << 20 // below this the smallest static program does not start
	MinDisk   = 1 << 20
	MinPids   = 8
	MinCPU    = 10 // milli-CPU

	// Above these lies a mistake, and soon an overflow.
	MaxMemory = 1 << 50
	MaxDisk   = 1 << 50
	MaxPids   = 4 << 20     // the kernel has no more (linux/threads.h: PID_MAX_LIMIT)
	MaxCPU    = 1000 * 1000 // milli-CPU
)

// Limits that the kernel sets to execve; a request over them is refused with the number (linux/binfmts.h: MAX_ARG_STRLEN, and
// a quarter of the 8 MiB stack for all of them together).
const (
	MaxArgument  = 131072 - 1 // octets of one argument or environment entry, without its NUL
	MaxArguments = 2 << 20    // octets of all arguments and the environment, with their NULs and pointers
	MaxPath      = 4095       // octets of a path
)

// Resources bound one sandbox.
type Resources struct {
	Memory    int64 `json:"memory"`               // octets, swap included
	Disk      int64 `json:"disk"`                 // octets of its own writes
	Pids      int64 `json:"pids"`                 // processes and threads
	CPU       int64 `json:"cpu,omitempty"`        // cap in milli-CPU; 0 is no cap
	CPUWeight int64 `json:"cpu_weight,omitempty"` // 1 to 10,000; 0 is 100
}

// NetworkMode says what a sandbox may reach.
type NetworkMode string

const (
	NetworkNone NetworkMode = "none" // loopback only; ports inside are still reachable through the gateway
	NetworkOpen NetworkMode = "open" // NAT to the host's networks
)

// EndAction is what happens when a TTL or a lease runs out.
type EndAction string

const (
	EndStop  EndAction = "stop"
	EndPause EndAction = "pause"
	EndKeep  EndAction = "keep" // leases only
)

// Durability is when a step is acknowledged: see internal/trajectory.
type Durability string

const (
	DurabilityProcess Durability = "process" // in the page cache: survives a crash of dsec
	DurabilityHost    Durability = "host"    // on the host's disk: survives a crash of the host
	DurabilityStore   Durability = "store"   // also in the store: survives the loss of the host
)

// Lifetime bounds a sandbox in time. The idle clock stands still while it is paused, the total goes on.
type Lifetime struct {
	Idle    time.Duration `json:"idle"`
	Total   time.Duration `json:"total"`
	OnIdle  EndAction     `json:"on_idle"`  // stop or pause
	OnTotal EndAction     `json:"on_total"` // stop
}

// Spec is a create request with every default filled in and every name resolved: what a host is asked to make.
type Spec struct {
	Project   string            `json:"project"` // path, as in "default" or "org/team"
	Job       string            `json:"job"`     // "-" when none
	Key       string            `json:"key"`     // idempotency key, unique in (project, job)
	Name      string            `json:"name,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`
	Backend   string            `json:"backend"`            // "container"
	Layers    []string          `json:"layers"`             // layer IDs, lowest first
	EnvName   string            `json:"env_name,omitempty"` // name@version it was resolved from
	Env       []string          `json:"env,omitempty"`      // K=V octets, the environment's and the request's merged
	User      string            `json:"user,omitempty"`     // of commands that name none
	Cwd       string            `json:"cwd,omitempty"`
	Hostname  string            `json:"hostname,omitempty"`
	Entry     []string          `json:"entry,omitempty"` // started after birth when not empty; its end ends the sandbox
	Resources Resources         `json:"resources"`
	Lifetime  Lifetime          `json:"lifetime"`
	Network   NetworkMode       `json:"network"`
	// BestEffort puts the sandbox into the class that yields to latency-sensitive ones.
	BestEffort bool       `json:"best_effort,omitempty"`
	NoNewPrivs bool       `json:"no_new_privs,omitempty"`
	Durability Durability `json:"durability"`
	Volumes    []Volume   `json:"volumes,omitempty"`
	// AllowDegraded takes a machine that is translated, where the host has no hardware acceleration.
	AllowDegraded bool       `json:"allow_degraded,omitempty"`
	Trace         TraceLevel `json:"trace,omitempty"`
	// Volatile are clean absolute paths of caches and the like.
	Volatile []string `json:"volatile,omitempty"`
}

// Volume is a layer that is mounted read-only at a path of the sandbox.
type Volume struct {
	Layer string `json:"layer"` // ID
	Path  string `json:"path"`  // absolute and clean
}

// MaxVolumes bounds the volumes of one sandbox.
const MaxVolumes = 32

// Fill sets the defaults of what is zero.
func (s *Spec) Fill() {
	set(&s.Project, "default")
	set(&s.Job, "-")
	set(&s.Backend, "container")
	set(&s.User, "root")
	set(&s.Cwd, "/")
	set(&s.Hostname, "sandbox")
	set(&s.Network, NetworkNone)
	set(&s.Durability, DurabilityProcess)
	set(&s.Trace, DefaultTrace)
	set(&s.Resources.Memory, DefaultMemory)
	set(&s.Resources.Disk, DefaultDisk)
	set(&s.Resources.Pids, DefaultPids)
	set(&s.Resources.CPUWeight, 100)
	set(&s.Lifetime.Idle, DefaultIdle)
	set(&s.Lifetime.Total, DefaultTotal)
	set(&s.Lifetime.OnIdle, EndStop)
	set(&s.Lifetime.OnTotal, EndStop)
	if s.Key == "" {
		s.Key = NewKey()
	}
}

func set[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// Validate checks a filled Spec; the error names the field and the fix and wraps ErrInvalid or ErrUnsupported.
func (s *Spec) Validate() error {
	if err := CheckProject(s.Project); err != nil {
		return err
	}
	if err := CheckKey("job", s.Job); err != nil {
		return err
	}
	if err := CheckKey("key", s.Key); err != nil {
		return err
	}
	if s.Name != "" {
		if err := CheckName(s.Name); err != nil {
			return err
		}
	}
	if err := checkLabels(s.Labels); err != nil {
		return err
	}
	if len(s.Layers) == 0 {
		return fmt.Errorf("environment or layers: name at least one layer: %w", ErrInvalid)
	}
	if err := CheckEnv("env", s.Env); err != nil {
		return err
	}
	if err := CheckPath("cwd", s.Cwd); err != nil {
		return err
	}
	if !isLabel(s.Hostname) {
		return fmt.Errorf("hostname %.80q: want a DNS label: %w", s.Hostname, ErrInvalid)
	}
	if s.Network != NetworkNone && s.Network != NetworkOpen {
		return fmt.Errorf("network %.80q: want none or open: %w", s.Network, ErrInvalid)
	}
	if s.Durability != DurabilityProcess && s.Durability != DurabilityHost && s.Durability != DurabilityStore {
		return fmt.Errorf("durability %.80q: want process, host or store: %w", s.Durability, ErrUnsupported)
	}
	if err := s.Lifetime.validate(); err != nil {
		return err
	}
	if err := CheckVolumes(s.Volumes); err != nil {
		return err
	}
	if err := s.Trace.Check(); err != nil {
		return err
	}
	if err := CheckVolatile(s.Volatile); err != nil {
		return err
	}
	return s.Resources.validate()
}

// CheckVolumes checks that volumes lie apart from each other and from what every sandbox has.
func CheckVolumes(list []Volume) error {
	if len(list) > MaxVolumes {
		return fmt.Errorf("volumes: %d given, at most %d: %w", len(list), MaxVolumes, ErrInvalid)
	}
	within := func(p, dir string) bool { return p == dir || strings.HasPrefix(p, dir+"/") }
	for i, v := range list {
		if err := CheckPath("volume", v.Path); err != nil {
			return err
		}
		if v.Path == "/" || path.Clean(v.Path) != v.Path {
			return fmt.Errorf("volume at %.80q: want a clean path below the root, as /data: %w", v.Path, ErrInvalid)
		}
		for name := range strings.SplitSeq(v.Path, "/") {
			if len(name) > 255 { // no file system has such a name
				return fmt.Errorf("volume at %.80q: a part of %d octets, at most 255: %w", v.Path, len(name), ErrInvalid)
			}
		}
		for _, own := range []string{"/proc", "/sys", "/dev"} {
			if within(v.Path, own) {
				return fmt.Errorf("volume at %.80q: %s is the sandbox's own: %w", v.Path, own, ErrInvalid)
			}
		}
		for _, w := range list[:i] {
			if within(v.Path, w.Path) || within(w.Path, v.Path) {
				return fmt.Errorf("volumes at %.80q and %.80q: one lies in the other: %w", w.Path, v.Path, ErrInvalid)
			}
		}
	}
	return nil
}

func (l Lifetime) validate() error {
	switch {
	case l.Idle < 0 || l.Total < 0:
		return fmt.Errorf("idle or total lifetime: must not be negative: %w", ErrInvalid)
	case l.Total > 0 && l.Total > 30*24*time.Hour:
		return fmt.Errorf("total lifetime %v: at most 720h: %w", l.Total, ErrInvalid)
	case l.OnIdle != EndStop && l.OnIdle != EndPause:
		return fmt.Errorf("on_idle %.80q: want stop or pause: %w", l.OnIdle, ErrInvalid)
	case l.OnTotal != EndStop:
		return fmt.Errorf("on_total %.80q: only stop: %w", l.OnTotal, ErrInvalid)
	}
	return nil
}

func (r Resources) validate() error {
	switch {
	case r.Memory < MinMemory:
		return fmt.Errorf("memory %d: at least %d octets, or nothing starts: %w", r.Memory, MinMemory, ErrInvalid)
	case r.Disk < MinDisk:
		return fmt.Errorf("disk %d: at least %d octets: %w", r.Disk, MinDisk, ErrInvalid)
	case r.Pids < MinPids:
		return fmt.Errorf("pids %d: at least %d, or nothing starts: %w", r.Pids, MinPids, ErrInvalid)
	case r.Memory > MaxMemory:
		return fmt.Errorf("memory %d: at most %d octets: %w", r.Memory, int64(MaxMemory), ErrInvalid)
	case r.Disk > MaxDisk:
		return fmt.Errorf("disk %d: at most %d octets: %w", r.Disk, int64(MaxDisk), ErrInvalid)
	case r.Pids > MaxPids:
		return fmt.Errorf("pids %d: at most %d, the kernel has no more: %w", r.Pids, MaxPids, ErrInvalid)
	case r.CPU > MaxCPU:
		return fmt.Errorf("cpu %d: at most %d milli-CPU, or 0 for no cap: %w", r.CPU, MaxCPU, ErrInvalid)
	case r.CPU != 0 && r.CPU < MinCPU:
		return fmt.Errorf("cpu %d: at least %d milli-CPU, or 0 for no cap: %w", r.CPU, MinCPU, ErrInvalid)
	case r.CPUWeight < 1 || r.CPUWeight > 10000:
		return fmt.Errorf("cpu_weight %d: 1 to 10000: %w", r.CPUWeight, ErrInvalid)
	}
	return nil
}

// CheckProject checks a project path: DNS labels joined by "/", at most 8 deep.
func CheckProject(p string) error {
	parts := strings.Split(p, "/")
	if len(parts) > 8 {
		return fmt.Errorf("project %.80q: at most 8 levels: %w", p, ErrInvalid)
	}
	for _, l := range parts {
		if !isLabel(l) {
			return fmt.Errorf("project %.80q: want DNS labels joined by /: %w", p, ErrInvalid)
		}
	}
	return nil
}

func checkLabels(labels map[string]string) error {
	if len(labels) > 64 {
		return fmt.Errorf("labels: %d given, at most 64: %w", len(labels), ErrInvalid)
	}
	for k, v := range labels {
		if err := CheckKey("label", k); err != nil {
			return err
		}
		if len(v) > 1024 {
			return fmt.Errorf("label %s: value of %d octets, at most 1024: %w", k, len(v), ErrInvalid)
		}
	}
	return nil
}

// CheckEnv checks K=V entries: a name may hold any octet but "=" and NUL and must not be empty.
func CheckEnv(field string, env []string) error {
	for _, kv := range env {
		k, _, ok := strings.Cut(kv, "=")
		switch {
		case !ok || k == "":
			return fmt.Errorf("%s: entry %.40q: want NAME=value with a name: %w", field, kv, ErrInvalid)
		case strings.IndexByte(kv, 0) >= 0:
			return fmt.Errorf("%s: %.40q: holds a NUL octet: %w", field, k, ErrInvalid)
		case len(kv) > MaxArgument:
			return fmt.Errorf("%s: %.40q is %d octets with its name; the kernel takes fewer than %d: %w", field, k, len(kv), MaxArgument+1, ErrInvalid)
		}
	}
	return nil
}

// CheckPath checks a path inside a sandbox: absolute, no NUL, at most MaxPath octets. It may hold any other octet.
func CheckPath(field, p string) error {
	switch {
	case p == "" || p[0] != '/':
		return fmt.Errorf("%s %.80q: want an absolute path: %w", field, p, ErrInvalid)
	case strings.IndexByte(p, 0) >= 0:
		return fmt.Errorf("%s %.80q: holds a NUL octet: %w", field, p, ErrInvalid)
	case len(p) > MaxPath:
		return fmt.Errorf("%s: %d octets, at most %d: %w", field, len(p), MaxPath, ErrInvalid)
	}
	return nil
}

// MergeEnv lays the entries of over on those of base: a later entry with the same name replaces an earlier one. The result is
// sorted, so that the same request gives the same octets.
func MergeEnv(base, over []string) []string {
	m := map[string]string{}
	for _, list := range [][]string{base, over} {
		for _, kv := range list {
			k, _, _ := strings.Cut(kv, "=")
			m[k] = kv
		}
	}
	out := make([]string, 0, len(m))
	for _, kv := range m {
		out = append(out, kv)
	}
	sort.Strings(out)
	return out
}
