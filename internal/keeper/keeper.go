package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/internal/calm"
	initproc "github.com/dsec-dev/dsec/internal/keeper/init"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// Keeper is the process's state.
type Keeper struct {
	cfg     Config
	log     *slog.Logger
	started time.Time

	cg            *cgroups
	slots         *slots
	spawner       *spawner
	netns         *netnsPool
	berths        *berths
	layers        *layers
	lowers        *lowers
	images        *images
	watcher       *watcher
	tmpl          *templates
	image         *os.File // process 1's program, a sealed memory file
	helper        int      // its descriptor
	overlayByPath bool
	features      map[string]string
	maskList      []mask         // guarded by mu
	events        map[string]int // memory files of filters for process 1, by content; guarded by mu
	crew          *crew
	calls         *calls
	recent        *recent               // files of groups that are kept open
	garbage       chan []int            // descriptors whose closing waits for the kernel
	dir           string                // the run folder
	runtimes      sync.Once             // of adoptOrphans
	laid          bool                  // programs was made; guarded by mu
	reserved      map[sandbox.ID]*netns // for births to come; guarded by mu
	ended         chan struct{}

	link atomic.Pointer[link] // the host's connection that gets events
	host atomic.Int64         // connections that are open
	stop context.CancelFunc

	mu    sync.Mutex
	boxes map[sandbox.ID]*box
	guest int // dsec-guest's program, or -1
}

const (
	lockName     = "lock"
	instanceName = "instance"
	stageVar     = "DSEC_KEEPER_STAGE"
)

// Main runs a keeper until it is told to stop, and returns the process's exit code. It replaces the process once by itself to get
// a mount namespace of its own.
func Main(args []string) int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := run(args, log); err != nil {
		log.Error("keeper", "err", err)
		return 1
	}
	return 0
}

func run(args []string, log *slog.Logger) error {
	cfg, err := parseFlags(args)
	if err != nil {
		return err
	}
	if os.Getenv(stageVar) == "" {
		runtime.LockOSThread()
		if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
			return err
		}
		if err := unix.Chdir(cfg.Dir); err != nil {
			return fmt.Errorf("enter run folder: %w", err)
		}
		var buf [unix.PathMax]byte
		n, err := unix.Getcwd(buf[:])
		if err != nil {
			return fmt.Errorf("run folder: %w", err)
		}
		if err := enterOwn(string(buf[:n-1])); err != nil { // the path without links
			return err
		}
		exe, err := unix.Open("/proc/self/exe", unix.O_PATH, 0)
		if err != nil {
			return err
		}
		env := append(os.Environ(), stageVar+"=2")
		return unix.Exec(fmt.Sprintf("/proc/self/fd/%d", exe), os.Args, env)
	}
	os.Unsetenv(stageVar)
	debug.SetGCPercent(300) // the heap is a few MiB: each collection costs more than what it frees
	debug.SetMemoryLimit(256 << 20)
	if err := calm.Watch(); err != nil {
		log.Warn("more CPU time than needed", "err", err)
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	k, err := New(cfg, log)
	if err != nil {
		return err
	}
	return k.Run(ctx)
}

// New makes a keeper. The process is alone in its mount namespace, and its working folder is the run folder.
func New(cfg Config, log *slog.Logger) (*Keeper, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Keeper{cfg: cfg, log: log, started: time.Now(), boxes: map[sandbox.ID]*box{}, guest: -1, features: map[string]string{}, events: map[string]int{},
		garbage: make(chan []int, 256), ended: make(chan struct{}), reserved: map[sandbox.ID]*netns{}, recent: newRecent(), crew: newCrew(), netns: newNetnsPool(cfg.NetnsPool), berths: newBerths()}, nil
}

// Run serves until ctx ends or a host says shutdown; then everything in every sandbox is killed.
func (k *Keeper) Run(ctx context.Context) error {
	ctx, k.stop = context.WithCancel(ctx)
	defer k.stop()
	defer close(k.ended)
	lock, err := lockDir(".")
	if err != nil {
		return err
	}
	defer lock.Close()
	if k.dir, err = os.Getwd(); err != nil {
		return err
	}
	if err := os.WriteFile(instanceName, []byte(k.cfg.Instance), 0o600); err != nil {
		return err
	}
	if err := k.prepare(); err != nil {
		return err
	}
	endPark, err := k.servePark(ctx)
	if err != nil {
		return err
	}
	defer endPark()
	os.Remove(SocketName)
	old := unix.Umask(0o177)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: SocketName, Net: "unix"})
	unix.Umask(old)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	var wg sync.WaitGroup
	wg.Add(7)
	go func() { defer wg.Done(); k.endLonely(ctx) }()
	go func() { defer wg.Done(); k.watcher.run(ctx) }()
	go func() { defer wg.Done(); k.netns.run(ctx, k.log) }()
	go func() { defer wg.Done(); k.calls.netns.run(ctx, k.log) }()
	go func() { defer wg.Done(); k.calls.standbys.run(ctx) }()
	go func() { defer wg.Done(); k.berths.run(ctx, k, k.log) }()
	go func() { defer wg.Done(); k.collect(ctx) }()
	go func() { <-ctx.Done(); l.Close() }()
	k.log.Info("keeper serves", "dir", k.cfg.Dir, "instance", k.cfg.Instance, "pid", os.Getpid())
	k.serve(ctx, l)
	err = k.destroyAll()
	k.calls.standbys.close()
	k.calls.roots.close()
	k.calls.pool.close()
	wg.Wait()
	k.slots.close()
	k.spawner.close()
	end := time.Now().Add(5 * time.Second)
	unix.Rmdir(filepath.Join(k.cg.v2, k.cg.name)) // the keeper itself is in it: what stays is removed by the next sweep
	return errors.Join(err, k.leaveCgroups(end))
}

// endLonely ends a keeper that has nothing to keep: no sandbox, and for a while no host, as when its host was killed and never started again.
func (k *Keeper) endLonely(ctx context.Context) {
	seen := time.Now()
	for {
		select {
		case <-time.After(k.cfg.Lonely / 8):
		case <-ctx.Done():
			return
		}
		k.mu.Lock()
		boxes := len(k.boxes)
		k.mu.Unlock()
		switch {
		case k.host.Load() > 0 || boxes > 0:
			seen = time.Now()
		case time.Since(seen) > k.cfg.Lonely:
			k.log.Info("there is no host and no sandbox: the keeper ends", "after", k.cfg.Lonely)
			k.stop()
			return
		}
	}
}

func (k *Keeper) leaveCgroups(end time.Time) error {
	if err := os.WriteFile(filepath.Join(k.cg.v2, "cgroup.procs"), []byte("0"), 0); err != nil {
		return nil // the next sweep removes it
	}
	return k.cg.removeTree(end)
}

func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("a keeper of this run folder lives (lock): %w", sandbox.ErrExists)
	}
	return f, nil
}

// prepare probes the kernel and makes what all sandboxes share.
func (k *Keeper) prepare() error {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	if k.cg, err = findCgroups("dsec-"+k.cfg.Instance, string(info)); err != nil {
		return err
	}
	if err := errors.Join(k.cg.sweep(10*time.Second), sweepBundles(k.dir)); err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	if err := k.cg.setup(); err != nil {
		return fmt.Errorf("set up cgroups: %w", err)
	}
	k.dynmods()
	image, err := initproc.Open()
	if err != nil {
		return err
	}
	k.image, k.helper = image, int(image.Fd())
	k.slots = newSlots(k.helper, k.log)
	if err := mkdir("layers"); err != nil {
		return err
	}
	if k.layers, err = newLayers("layers"); err != nil {
		return err
	}
	k.lowers, k.images = newLowers(k.layers), newImages()
	k.calls = newCalls(k)
	if k.tmpl, err = makeTemplates(".", k.cg); err != nil {
		return err
	}
	if k.watcher, err = newWatcher(k.log); err != nil {
		return err
	}
	k.spawner = newSpawner(k.cg, k.helper, k.tmpl, k.log)
	k.overlayByPath = !probeOverlay(".")
	k.features["cgroup"] = "hybrid"
	if k.cg.pure() {
		k.features["cgroup"] = "v2"
	}
	k.features["overlay_fd"] = "yes"
	if k.overlayByPath {
		k.features["overlay_fd"] = "no: this kernel's overlayfs takes lowers by path alone (before about 6.13)"
	}
	return nil
}

// dynmods makes joining a cgroup cheap for a process that has just been born: 0.06 ms instead of up to 8 after a pause.
func (k *Keeper) dynmods() {
	if k.cfg.LeaveDynmods {
		k.features["favordynmods"] = "no: left as it is by configuration"
		return
	}
	fs, err := unix.Fspick(unix.AT_FDCWD, k.cg.v2, unix.FSPICK_CLOEXEC)
	if err == nil {
		if err = unix.FsconfigSetFlag(fs, "favordynmods"); err == nil {
			err = unix.FsconfigReconfigure(fs)
		}
		unix.Close(fs)
	}
	k.features["favordynmods"] = "yes"
	if err != nil {
		k.features["favordynmods"] = "no: " + err.Error()
		k.log.Warn("cgroup2 without favordynmods: births wait for the kernel", "err", err)
	}
}

// collect closes descriptors of detached mounts away from births: each waits for an RCU grace period.
func (k *Keeper) collect(ctx context.Context) {
	for {
		select {
		case fds := <-k.garbage:
			closeAll(fds)
		case <-ctx.Done():
			return
		}
	}
}

func (k *Keeper) discard(fds []int) {
	select {
	case k.garbage <- fds:
	default:
		closeAll(fds)
	}
}

// box returns a living or ended sandbox.
func (k *Keeper) box(id sandbox.ID) (*box, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	b := k.boxes[id]
	if b == nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	return b, nil
}

func (k *Keeper) all() []*box {
	k.mu.Lock()
	defer k.mu.Unlock()
	bs := make([]*box, 0, len(k.boxes))
	for _, b := range k.boxes {
		bs = append(bs, b)
	}
	return bs
}

func (k *Keeper) destroyAll() error {
	var wg sync.WaitGroup
	errs := make(chan error, 1)
	for _, b := range k.all() {
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			if _, err := k.destroy(ctx, b.id); err != nil {
				select {
				case errs <- err:
				default:
				}
			}
		}()
	}
	wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}

func (g *cgroups) removeTree(end time.Time) error {
	for _, c := range g.limits {
		if err := rmTree(filepath.Join(g.v1[c], g.name), end); err != nil {
			return err
		}
	}
	for _, at := range g.shown {
		if err := rmTree(filepath.Join(at, g.name), end); err != nil {
			return err
		}
	}
	return rmTree(filepath.Join(g.v2, g.name), end)
}

// sweep kills and removes what a dead keeper of the same instance left. The caller holds the run folder's lock.
func (g *cgroups) sweep(within time.Duration) error {
	top := filepath.Join(g.v2, g.name)
	for _, class := range []string{classLS, classBE, "keeper"} {
		writeFile(filepath.Join(top, class, "cgroup.kill"), "1")
	}
	end := time.Now().Add(within)
	return errors.Join(g.removeTree(end), g.removeOuter(end))
}

// Sweep removes what a dead keeper left on the host: processes, and with them their mounts and namespaces, and cgroups. ErrExists
// when the keeper of the run folder lives. A run folder that no keeper ever had is no error.
func Sweep(dir string) error {
	if _, err := os.Stat(dir); os.IsNotExist(err) {
		return nil
	}
	lock, err := lockDir(dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	name, err := os.ReadFile(filepath.Join(dir, instanceName))
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if !instancePattern.Match(name) {
		return fmt.Errorf("keeper sweep: instance %q: %w", name, sandbox.ErrInvalid)
	}
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	g, err := findCgroups("dsec-"+string(name), string(info))
	if err != nil {
		return err
	}
	os.Remove(filepath.Join(dir, SocketName))
	return errors.Join(g.sweep(10*time.Second), sweepBundles(dir))
}
