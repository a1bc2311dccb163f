package host

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// reading is what the machine had free a moment ago: reading it for each create would cost more than the rest of admission.
type reading struct {
	at                        time.Time
	memoryTotal, memory, disk int64
	log                       int64 // what the log can take; -1 unknown
	logShort                  bool
	memoryErr, diskErr        error
}

const readingAge = 200 * time.Millisecond

// measure reads memory and disk, at most every readingAge.
func (h *Host) measure() reading {
	h.mu.Lock()
	r := h.mem
	h.mu.Unlock()
	if !r.at.IsZero() && time.Since(r.at) < readingAge {
		return r
	}
	r = reading{at: time.Now(), disk: -1}
	r.memoryTotal, r.memory, r.memoryErr = h.deps.Memory()
	if h.deps.Disk != nil {
		r.disk, r.diskErr = h.deps.Disk()
	}
	space := h.deps.Log.Space()
	r.log, r.logShort = -1, space.Short
	if h.deps.LogDisk != nil {
		free, err := h.deps.LogDisk()
		if err != nil && r.diskErr == nil {
			r.diskErr = err
		}
		r.log = free + space.Ready
	}
	h.mu.Lock()
	h.mem = r
	h.mu.Unlock()
	return r
}

// admit says whether one more sandbox may be made; mu is held.
func (h *Host) admit(r reading) error {
	refuse := func(format string, a ...any) error {
		return fmt.Errorf("host %s: "+format+": %w", append(append([]any{h.cfg.ID}, a...), sandbox.ErrExhausted)...)
	}
	switch {
	case h.closed:
		return refuse("shutting down")
	case h.draining:
		return refuse("draining: takes no new sandboxes")
	case len(h.alive) >= h.cfg.MaxSandboxes:
		return refuse("%d sandboxes, at most %d", len(h.alive), h.cfg.MaxSandboxes)
	case h.creating >= h.cfg.MaxBirths+h.cfg.MaxWaiting:
		return refuse("%d creates under way, at most %d", h.creating, h.cfg.MaxBirths+h.cfg.MaxWaiting)
	case r.memoryErr != nil:
		return fmt.Errorf("host %s: read memory: %w", h.cfg.ID, r.memoryErr)
	case r.memory < h.cfg.MemoryReserve:
		return refuse("%d MiB of memory available, %d MiB are kept free", r.memory>>20, h.cfg.MemoryReserve>>20)
	case r.diskErr != nil:
		return fmt.Errorf("host %s: read free disk: %w", h.cfg.ID, r.diskErr)
	case h.deps.Disk != nil && r.disk < h.cfg.DiskReserve:
		return refuse("%d MiB of disk free for sandboxes, %d MiB are kept free; stop some, give a larger --pool-size or a lower host.disk_reserve", r.disk>>20, h.cfg.DiskReserve>>20)
	case r.logShort:
		return refuse("the log's disk is full, what is left is kept for ends")
	case r.log >= 0 && r.log < h.cfg.LogReserve:
		return refuse("%d MiB of log space free, %d MiB are kept free", r.log>>20, h.cfg.LogReserve>>20)
	}
	return nil
}

const spaceEvery = 5 * time.Second // between two looks at the space of log and disk

// tellSpace says in the daemon's log when log or disk run short, once, and when they have room again. It returns what is short now.
func (h *Host) tellSpace(was string) string {
	r := h.measure()
	var short []string
	if r.logShort || r.log >= 0 && r.log < h.cfg.LogReserve {
		short = append(short, "log")
	}
	if h.deps.Disk != nil && r.diskErr == nil && r.disk < h.cfg.DiskReserve {
		short = append(short, "disk")
	}
	is := strings.Join(short, " and ")
	switch {
	case is == was:
	case is == "":
		h.log.Info("there is room again: new sandboxes are taken", "was_short", was)
	default:
		h.log.Warn("space runs short: no new sandboxes are taken", "short", is, "log_free", r.log, "log_reserve", h.cfg.LogReserve, "disk_free", r.disk, "disk_reserve", h.cfg.DiskReserve)
	}
	return is
}

// able checks a spec against what its backend can do, before anything starts.
func (h *Host) able(s *sandbox.Spec) (sandbox.Backend, error) {
	be := h.deps.Backends[s.Backend]
	if be == nil {
		var all []sandbox.Capabilities
		for name, other := range h.deps.Backends {
			c := other.Capabilities()
			c.Backend = name
			all = append(all, c)
		}
		return nil, fmt.Errorf("backend %.40q: host %s %s: %w", s.Backend, h.cfg.ID, sandbox.NoBackend(s.Backend, all), sandbox.ErrUnsupported)
	}
	c := be.Capabilities()
	if !slices.Contains(c.Networks, string(s.Network)) {
		return nil, fmt.Errorf("network %q: backend %s on host %s has %q (%s): %w", s.Network, s.Backend, h.cfg.ID, c.Networks, c.Features["network."+string(s.Network)], sandbox.ErrUnsupported)
	}
	if s.Lifetime.OnIdle == sandbox.EndPause && !slices.Contains(c.PauseLevels, sandbox.Frozen) {
		return nil, fmt.Errorf("on_idle pause: backend %s can't pause: %w", s.Backend, sandbox.ErrUnsupported)
	}
	if s.Durability == sandbox.DurabilityStore && !h.deps.Log.Stores() {
		return nil, fmt.Errorf("durability store: host %s keeps its log on its own disk alone; start it with --store: %w", h.cfg.ID, sandbox.ErrUnsupported)
	}
	return be, nil
}

// readMemory reads the machine's memory in octets.
func readMemory() (total, available int64, err error) {
	// By hand: os.ReadFile has the runtime's poller watch the file, which wakes a thread for nothing.
	fd, err := unix.Open("/proc/meminfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, 0, fmt.Errorf("open /proc/meminfo: %w", err)
	}
	defer unix.Close(fd)
	data := make([]byte, 4096)
	n, err := unix.Read(fd, data)
	for err == unix.EINTR {
		n, err = unix.Read(fd, data)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("read /proc/meminfo: %w", err)
	}
	data = data[:n]
	field := func(name string) int64 {
		_, rest, _ := bytes.Cut(data, []byte(name+":"))
		line, _, _ := bytes.Cut(rest, []byte("kB"))
		n, perr := strconv.ParseInt(string(bytes.TrimSpace(line)), 10, 64)
		if perr != nil && err == nil {
			err = fmt.Errorf("/proc/meminfo: %s: %w", name, perr)
		}
		return n << 10
	}
	total, available = field("MemTotal"), field("MemAvailable")
	return total, available, err
}

// Status is what gateways are told of the host.
type Status struct {
	Running, Creating, Slots                        int64
	MemoryTotal, MemoryAvailable, DiskFree, LogFree int64
	Load                                            float64
	Arrivals, Moved                                 int64 // by moves: not known how they ended, and gone
	Draining                                        bool
}

func (h *Host) status() Status {
	r := h.measure()
	s := Status{MemoryTotal: r.memoryTotal, MemoryAvailable: r.memory, DiskFree: r.disk, LogFree: r.log, Load: loadAverage()}
	h.mu.Lock()
	defer h.mu.Unlock()
	s.Running, s.Creating, s.Draining = int64(len(h.alive)-h.creating), int64(h.creating), h.draining
	s.Arrivals, s.Moved = h.countPassages()
	s.Slots = int64(max(0, h.cfg.MaxSandboxes-len(h.alive)))
	if h.admit(r) != nil {
		s.Slots = 0
	}
	return s
}

func loadAverage() float64 {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := bytes.Cut(data, []byte(" "))
	f, _ := strconv.ParseFloat(string(first), 64) // zero is as good as any guess
	return f
}
