package upper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Names of the drivers, in the order in which they are tried.
const (
	DriverSubvolume = "btrfs"      // the state folder's own btrfs
	DriverPool      = "btrfs-pool" // a btrfs in a pool file
	DriverProject   = "project"    // project quotas
	DriverImage     = "ext4-image"
	DriverTmpfs     = "tmpfs"
)

var order = []string{DriverSubvolume, DriverPool, DriverProject, DriverImage, DriverTmpfs}

const (
	defaultPoolSize = 20 << 30
	minPoolSize     = 256 << 20
	poolStep        = 16 << 20
	// hostReserve of the state folder's file system stays free of pool files and images: the log must be able to grow.
	hostReserve = 512 << 20
)

// Config of a pool.
type Config struct {
	// State is the folder in which all lies. The pool is mounted at State/pool.
	State string
	// Driver forces one; empty takes the first that works.
	Driver string
	// Size of the pool file in octets; 0 is 20 GiB or half of what is free, whichever is less. A larger one than before
	// grows the pool, a smaller one is ignored.
	Size int64
}

// Validate checks the configuration.
func (c *Config) Validate() error {
	if !filepath.IsAbs(c.State) {
		return fmt.Errorf("pool: state folder %q: want an absolute path: %w", c.State, sandbox.ErrInvalid)
	}
	if c.Size != 0 && c.Size < minPoolSize {
		return fmt.Errorf("pool: size %d: at least %d octets, or 0 for the default: %w", c.Size, minPoolSize, sandbox.ErrInvalid)
	}
	for _, d := range order {
		if c.Driver == "" || c.Driver == d {
			return nil
		}
	}
	return fmt.Errorf("pool: driver %q: want one of %s: %w", c.Driver, strings.Join(order, ", "), sandbox.ErrInvalid)
}

// Request is what an upper is asked to hold.
type Request struct {
	Disk   int64 // limit in octets
	Memory int64 // the sandbox's memory limit in octets, of which tmpfs takes at most half; 0 is none
}

// Upper is a writable folder for an overlay.
type Upper struct {
	ID    string
	Dir   string // upperdir
	Work  string // workdir
	Limit int64  // octets that hold; may be below the request
	Note  string // for people, when the limit is not the one asked for
}

// Description says what a pool is.
type Description struct {
	Driver    string
	Dir       string // where the uppers lie
	Total     int64  // octets, 0 when it is the host's disk
	Snapshots bool   // Snapshot works on a living upper
	Limit     string // how exactly the limit holds, for people
	Notes     []string
}

// driver is one way to keep limits.
type driver interface {
	create(id string, r Request) (Upper, error)
	get(id string) (Upper, error)
	remove(id string) error
	usage(id string) (int64, error)
	list() ([]string, error)
	free() (int64, error)
	snapshot(id string) (string, func() error, error)
	sweep(ctx context.Context) error // the slow parts of removals; may be called at any time
	close() error
	abandon() error // after a probe that failed: close, and take back the space that opening took
	describe() Description
}

// Pool hands out uppers. Its methods may be called from many goroutines.
type Pool struct {
	d     driver
	log   *slog.Logger
	lock  *os.File
	notes []string
	kick  chan struct{}
}

const (
	lockName   = "pool.lock"
	driverName = "pool.driver"
	probeID    = "dsec-probe"
	// probeLimit is small, but above what an ext4 image needs for itself.
	probeLimit = 8 << 20
)

// lockWait is how long the lock of a process that was killed may be held: a child that it was starting has it until its own program runs.
const lockWait = time.Second

func lockState(state string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(state, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	for end := time.Now().Add(lockWait); ; time.Sleep(5 * time.Millisecond) {
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			return f, nil
		}
		if time.Now().After(end) {
			f.Close()
			return nil, fmt.Errorf("open pool in %s: another process has it open: %w", state, sandbox.ErrState)
		}
	}
}

// Open makes or finds the pool in the state folder and shows that its limit holds. The error wraps sandbox.ErrState when
// another process has it open for longer than a second, and sandbox.ErrUnsupported or sandbox.ErrExhausted, with each driver's reason, when
// none works.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (*Pool, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.State, 0o700); err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	// Mounts are found again by their path as the kernel shows it.
	state, err := filepath.EvalSymlinks(cfg.State)
	if err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	cfg.State = state
	lock, err := lockState(state)
	if err != nil {
		return nil, err
	}
	p := &Pool{log: log, lock: lock, kick: make(chan struct{}, 1)}
	var causes []error
	for _, name := range p.preferred(state) {
		if cfg.Driver != "" && cfg.Driver != name {
			continue
		}
		d, err := openDriver(ctx, name, cfg, log)
		if err == nil {
			if err = p.probe(d); err != nil {
				err = errors.Join(err, d.abandon())
			}
		}
		if err == nil {
			p.d = d
			p.wake()
			if err := os.WriteFile(filepath.Join(state, driverName), []byte(name+"\n"), 0o600); err != nil {
				return nil, errors.Join(fmt.Errorf("open pool: %w", err), p.Close())
			}
			return p, nil
		}
		if ctx.Err() != nil {
			lock.Close()
			return nil, ctx.Err()
		}
		causes = append(causes, fmt.Errorf("%s: %w", name, err))
		p.notes = append(p.notes, fmt.Sprintf("not %s: %v", name, err))
	}
	lock.Close()
	return nil, fmt.Errorf("open pool in %s: no way to limit a sandbox's disk works here: %w", state, errors.Join(causes...))
}

// preferred is the order, with the driver that was taken last time first: its uppers are there.
func (p *Pool) preferred(state string) []string {
	b, err := os.ReadFile(filepath.Join(state, driverName))
	last := strings.TrimSpace(string(b))
	i := slices.Index(order, last)
	if err != nil || i <= 0 {
		return order
	}
	p.notes = append(p.notes, last+" was taken before; remove "+filepath.Join(state, driverName)+" to choose anew")
	return append([]string{last}, slices.Delete(slices.Clone(order), i, i+1)...)
}

func openDriver(ctx context.Context, name string, cfg Config, log *slog.Logger) (driver, error) {
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("needs root: %w", sandbox.ErrDenied)
	}
	switch name {
	case DriverSubvolume:
		return openSubvolumes(cfg)
	case DriverPool:
		return openPoolFile(ctx, cfg, log)
	case DriverProject:
		return openProjects(cfg)
	case DriverImage:
		return openImages(cfg)
	}
	return openTmpfs(cfg)
}

// probe writes past a limit and makes what an overlay needs.
func (p *Pool) probe(d driver) error {
	if _, err := d.get(probeID); err == nil {
		if err := d.remove(probeID); err != nil {
			return err
		}
	}
	u, err := d.create(probeID, Request{Disk: probeLimit})
	if err != nil {
		return err
	}
	err = errors.Join(probeOverlay(u), asWorkload(func() error { return probeFull(u) }))
	return errors.Join(err, d.remove(probeID))
}

func probeOverlay(u Upper) error {
	if err := unix.Setxattr(u.Dir, "trusted.overlay.opaque", []byte("y"), 0); err != nil {
		return fmt.Errorf("can't hold an overlay's marks: %w: %w", sandbox.ErrUnsupported, err)
	}
	if err := unix.Mknod(filepath.Join(u.Dir, "whiteout"), unix.S_IFCHR, 0); err != nil {
		return fmt.Errorf("can't hold an overlay's whiteouts: %w: %w", sandbox.ErrUnsupported, err)
	}
	return nil
}

// asWorkload runs f without the capability by which a host's root writes past ext4's and XFS's quotas. In a sandbox root has it not.
func asWorkload(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends, and its lack with it
		h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var c [2]unix.CapUserData
		if err := unix.Capget(&h, &c[0]); err != nil {
			done <- fmt.Errorf("read capabilities: %w", err)
			return
		}
		c[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
		if err := unix.Capset(&h, &c[0]); err != nil {
			done <- fmt.Errorf("give up CAP_SYS_RESOURCE: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

func probeFull(u Upper) error {
	f, err := os.Create(filepath.Join(u.Dir, "fill"))
	if err != nil {
		return fmt.Errorf("probe the limit: %w", err)
	}
	defer f.Close()
	b := make([]byte, 256<<10)
	for i := range b {
		b[i] = byte(i * i >> 3)
	}
	for written := int64(0); written <= 3*probeLimit; {
		n, err := f.Write(b)
		written += int64(n)
		if errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.ENOSPC) {
			if written < probeLimit/2 || written > probeLimit+probeLimit/2 {
				return fmt.Errorf("a limit of %d octets held at %d: %w", probeLimit, written, sandbox.ErrUnsupported)
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("probe the limit: %w", err)
		}
	}
	return fmt.Errorf("a limit of %d octets does not hold: %w", probeLimit, sandbox.ErrUnsupported)
}

// isID is ^[a-z0-9][a-z0-9.-]{0,100}$.
func isID(s string) bool {
	if len(s) < 1 || len(s) > 101 || s[0] == '.' || s[0] == '-' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '.' && c != '-' {
			return false
		}
	}
	return true
}

// CheckID checks an upper's name: that of its sandbox.
func CheckID(id string) error {
	if !isID(id) {
		return fmt.Errorf("upper %.80q: want a-z, 0-9, - and .: %w", id, sandbox.ErrInvalid)
	}
	return nil
}

// Create makes an empty upper. The error wraps sandbox.ErrExists for an ID that is there and sandbox.ErrExhausted when the pool
// is full.
func (p *Pool) Create(ctx context.Context, id string, r Request) (Upper, error) {
	if err := errors.Join(ctx.Err(), CheckID(id)); err != nil {
		return Upper{}, err
	}
	if r.Disk < sandbox.MinDisk {
		return Upper{}, fmt.Errorf("upper %s: disk %d: at least %d octets: %w", id, r.Disk, sandbox.MinDisk, sandbox.ErrInvalid)
	}
	u, err := p.d.create(id, r)
	if err != nil {
		return Upper{}, fmt.Errorf("create upper %s: %w", id, full(err))
	}
	return u, nil
}

// Get finds an upper that was made before, perhaps by an earlier process.
func (p *Pool) Get(id string) (Upper, error) {
	if err := CheckID(id); err != nil {
		return Upper{}, err
	}
	u, err := p.d.get(id)
	if err != nil {
		return Upper{}, fmt.Errorf("upper %s: %w", id, missing(err))
	}
	return u, nil
}

// Remove removes an upper at once; its space comes back a little later. One that is not there is no error.
func (p *Pool) Remove(ctx context.Context, id string) error {
	if err := errors.Join(ctx.Err(), CheckID(id)); err != nil {
		return err
	}
	if err := p.d.remove(id); err != nil && !errors.Is(missing(err), sandbox.ErrNotFound) {
		return fmt.Errorf("remove upper %s: %w", id, err)
	}
	p.wake()
	return nil
}

// Usage is what an upper takes, in octets. On btrfs it lags by up to one commit (30 s); the limit does not.
func (p *Pool) Usage(id string) (int64, error) {
	if err := CheckID(id); err != nil {
		return 0, err
	}
	n, err := p.d.usage(id)
	if err != nil {
		return 0, fmt.Errorf("usage of upper %s: %w", id, missing(err))
	}
	return n, nil
}

// List names all uppers, also those that an earlier process left.
func (p *Pool) List() ([]string, error) {
	list, err := p.d.list()
	if err != nil {
		return nil, fmt.Errorf("list uppers: %w", err)
	}
	sort.Strings(list)
	return list, nil
}

// Free is how many octets sandboxes can still write before the pool is full. Limits may sum up to more than that.
func (p *Pool) Free() (int64, error) {
	n, err := p.d.free()
	if err != nil {
		return 0, fmt.Errorf("free space of the pool: %w", err)
	}
	return n, nil
}

// Snapshot freezes the content of a living upper: dir is a copy of its Dir, not to be written, until release. Where
// Description.Snapshots is false the error wraps sandbox.ErrUnsupported; the sandbox must then be paused for a capture.
func (p *Pool) Snapshot(id string) (dir string, release func() error, err error) {
	if err := CheckID(id); err != nil {
		return "", nil, err
	}
	dir, release, err = p.d.snapshot(id)
	if err != nil {
		return "", nil, fmt.Errorf("snapshot of upper %s: %w", id, full(missing(err)))
	}
	return dir, release, nil
}

// Describe says what the pool is and why no better one was taken.
func (p *Pool) Describe() Description {
	d := p.d.describe()
	d.Notes = append(append([]string{}, p.notes...), d.Notes...)
	return d
}

func (p *Pool) wake() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

const (
	sweepEvery = time.Minute
	sweepWait  = 200 * time.Millisecond // gathers removals
	tidyEvery  = 5 * time.Second
)

// tidier is a driver with work behind removals that frees no space and costs the more the more uppers there are.
type tidier interface {
	tidy(ctx context.Context) error // may be called at any time
}

// Run does the slow parts of removals until the context ends.
func (p *Pool) Run(ctx context.Context) error {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	t, tidies := p.d.(tidier)
	later := time.NewTimer(tidyEvery)
	defer later.Stop()
	armed := true
	swept := func() error {
		if !armed {
			armed = true
			later.Reset(tidyEvery)
		}
		return p.d.sweep(ctx)
	}
	for {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-later.C:
			armed = false
			if tidies {
				err = t.tidy(ctx)
			}
		case <-ticker.C:
			err = swept()
		case <-p.kick:
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(sweepWait):
			}
			err = swept()
		}
		if err != nil && ctx.Err() == nil {
			p.log.Warn("sweep removed uppers", "error", err)
		}
	}
}

// Close unmounts the pool and detaches its loop device. What living sandboxes still use stays with them, and the next Open
// finds it. Run must have returned.
func (p *Pool) Close() error {
	err := p.d.close()
	if cerr := p.lock.Close(); cerr != nil {
		err = errors.Join(err, cerr)
	}
	if err != nil {
		return fmt.Errorf("close pool: %w", err)
	}
	return nil
}

func full(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("%w: %w", sandbox.ErrExhausted, err)
	}
	return err
}

func missing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: %w", sandbox.ErrNotFound, err)
	}
	return err
}
