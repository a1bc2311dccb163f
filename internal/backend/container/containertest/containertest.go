// Package containertest makes the container driver ready for tests: a root file system of busybox as a layer, a catalogue, a pool
// of uppers and a driver with a keeper of its own. It needs root and says so by a skip.
package containertest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/backend/backendtest"
	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/upper"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/internal/store"
)

// Main lets the test program be the keeper when it is started as one. Every TestMain of a package that uses [New] calls it first.
func Main() {
	if len(os.Args) > 1 && os.Args[1] == "keeper" {
		os.Exit(keeper.Main(os.Args[2:]))
	}
}

// Busybox finds a static busybox.
func Busybox(t testing.TB) string {
	t.Helper()
	for _, p := range []string{"/bin/busybox", "/usr/bin/busybox"} {
		out, err := exec.Command(p, "--list").Output()
		if err == nil && len(out) > 0 {
			return p
		}
	}
	t.Skip("skip: needs a static busybox (package busybox-static)")
	return ""
}

// Root writes the root file system that sandboxtest.Root describes into a new folder.
func Root(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	bb := Busybox(t)
	dir := t.TempDir()
	for path, mode := range map[string]os.FileMode{
		"bin": 0o755, "etc": 0o755, "root": 0o700, "home/alice": 0o755, "srv/base/sub": 0o755, "opt/locked": 0o700, "mnt": 0o755,
		"tmp": 0o777 | os.ModeSticky, "usr/bin": 0o755,
	} {
		do(t, os.MkdirAll(filepath.Join(dir, path), 0o755))
		do(t, os.Chmod(filepath.Join(dir, path), mode))
	}
	do(t, os.Chown(filepath.Join(dir, "home/alice"), 1000, 1000))
	program, err := os.ReadFile(bb)
	do(t, err)
	do(t, os.WriteFile(filepath.Join(dir, "bin/busybox"), program, 0o755))
	list, err := exec.Command(bb, "--list").Output()
	do(t, err)
	for _, name := range strings.Fields(string(list)) {
		if name != "busybox" {
			do(t, os.Symlink("busybox", filepath.Join(dir, "bin", name)))
		}
	}
	files := map[string]string{
		"/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n",
		"/etc/group":  "root:x:0:\ntty:x:5:\nalice:x:1000:\nnogroup:x:65534:\n",
	}
	for path, text := range sandboxtest.Root {
		files[path] = text
	}
	for path, text := range files {
		do(t, os.WriteFile(filepath.Join(dir, path), []byte(text), 0o644))
	}
	do(t, os.Chmod(filepath.Join(dir, "opt/badinterp"), 0o755))
	return dir
}

func do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Env is a driver with all below it.
type Env struct {
	Backend   *container.Backend
	Catalogue *layer.Catalogue
	Layers    *blob.Layers
	Uppers    *upper.Pool
	Layer     string // of Root
	Config    container.Config

	log  *slog.Logger
	stop func()
}

// Options of [New].
type Options struct {
	Network container.NetworkConfig
	Guest   *os.File
	Driver  string                  // of the pool of uppers; empty: the best that works
	Config  func(*container.Config) // changes what New chose
}

var number = struct {
	sync.Mutex
	n int
}{}

// New makes a driver of an instance of its own. At the test's end the keeper is told to end, and everything is removed.
func New(t testing.TB, o Options) *Env {
	t.Helper()
	root := Root(t)
	dir := t.TempDir()
	number.Lock()
	number.n++
	instance := fmt.Sprintf("t%dx%d", os.Getpid(), number.n)
	number.Unlock()
	e := &Env{log: slog.New(slog.NewTextHandler(&lines{t: t}, nil))}
	s, err := store.NewDir(filepath.Join(dir, "store"))
	do(t, err)
	f, err := facts.OpenBolt(filepath.Join(dir, "facts"))
	do(t, err)
	t.Cleanup(func() { f.Close() })
	e.Catalogue = layer.New(f, s)
	if e.Layers, err = blob.NewLayers(blob.LayersConfig{Dir: filepath.Join(dir, "layers")}, e.Catalogue, s, nil, e.log); err != nil {
		t.Fatal(err)
	}
	d, err := e.Catalogue.ImportDir(t.Context(), "default", root, layer.Options{Source: "busybox"})
	do(t, err)
	e.Layer = string(d.ID)
	e.openPool(t, filepath.Join(dir, "uppers"), o.Driver)
	filter, err := confine.Container().Compile(false)
	do(t, err)
	e.Config = container.Config{
		Seccomp:  filter,
		Instance: instance, Host: "test", StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Slots: 256,
		Keeper: []string{os.Args[0], "keeper"}, Guest: o.Guest, Network: o.Network,
	}
	e.Config.Unpack = os.Getenv("DSEC_UNPACK") != "" // as on a kernel without EROFS, see docs/ops/kernels.md
	if o.Config != nil {
		o.Config(&e.Config)
	}
	t.Cleanup(func() { e.end(t) })
	e.start(t)
	return e
}

// openPool makes a small pool of uppers.
func (e *Env) openPool(t testing.TB, dir, driver string) {
	t.Helper()
	pool, err := upper.Open(t.Context(), upper.Config{State: dir, Driver: driver, Size: 1 << 30}, e.log)
	do(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- pool.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-done, pool.Close()); err != nil {
			t.Errorf("pool of uppers: %v", err)
		}
	})
	e.Uppers = pool
}

// start makes a driver and runs it.
func (e *Env) start(t testing.TB) {
	t.Helper()
	b, err := container.New(e.Config, container.Deps{Layers: e.Layers, Uppers: e.Uppers, Log: e.log})
	do(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.Run(ctx) }()
	e.Backend = b
	e.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	wait, enough := context.WithTimeout(t.Context(), 3*time.Minute)
	defer enough()
	if err := b.WaitReady(wait); err != nil {
		log, _ := os.ReadFile(filepath.Join(e.Config.RunDir, keeper.LogName))
		t.Fatalf("%v; the keeper says:\n%s", err, log)
	}
}

// Restart drops the driver without a farewell and makes another one over the same state.
func (e *Env) Restart(t testing.TB) sandbox.Backend {
	t.Helper()
	e.stop()
	e.start(t)
	return e.Backend
}

func (e *Env) end(t testing.TB) {
	if e.Backend == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	if err := e.Backend.Sweep(ctx, nil); err != nil {
		t.Errorf("sweep: %v", err)
	}
	if err := e.Backend.Release(ctx); err != nil {
		t.Errorf("release: %v", err)
	}
	e.stop()
	// The keeper tells that it ends and then does; its lock is free when it has.
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := keeper.Sweep(e.Config.RunDir)
		if err == nil {
			break
		}
		if !errors.Is(err, sandbox.ErrExists) || time.Now().After(end) {
			t.Errorf("the keeper does not end: %v", err)
			break
		}
	}
	if t.Failed() {
		log, _ := os.ReadFile(filepath.Join(e.Config.RunDir, keeper.LogName))
		if len(log) > 8<<10 {
			log = log[len(log)-8<<10:]
		}
		t.Logf("the keeper's log:\n%s", log)
	}
}

// Suite is what the conformance suite needs.
func (e *Env) Suite() *sandboxtest.Env {
	return &sandboxtest.Env{
		Backend: e.Backend, Host: sandbox.NewHostID(), Layers: []string{e.Layer}, Restart: e.Restart, Left: e.Left,
		More: []sandboxtest.Part{backendtest.Files, backendtest.Layers(e.Catalogue, Busybox)},
	}
}

// Left names what is on the host for sandboxes of the instance.
func (e *Env) Left(t testing.TB) []string {
	t.Helper()
	var out []string
	name := "dsec-" + e.Config.Instance
	for _, top := range cgroupMounts(t) {
		var dirs []string
		for _, class := range []string{"ls", "be"} {
			entries, _ := os.ReadDir(filepath.Join(top, name, class))
			for _, d := range entries {
				if d.IsDir() {
					dirs = append(dirs, "cgroup "+filepath.Join(top, name, class, d.Name()))
				}
			}
		}
		if len(dirs) > keeper.Berths { // so many are of no sandbox yet
			out = append(out, dirs...)
		}
	}
	procs, err := os.ReadDir("/proc")
	do(t, err)
	var ahead []string
	for _, p := range procs {
		groups, err := os.ReadFile(filepath.Join("/proc", p.Name(), "cgroup"))
		if err == nil && (strings.Contains(string(groups), "/"+name+"/ls/") || strings.Contains(string(groups), "/"+name+"/be/")) {
			cmd, _ := os.ReadFile(filepath.Join("/proc", p.Name(), "cmdline"))
			line := fmt.Sprintf("process %s %q", p.Name(), strings.ReplaceAll(string(cmd), "\x00", " "))
			var st syscall.Stat_t
			if string(cmd) == "dsec-init\x00" && syscall.Stat(filepath.Join("/proc", p.Name()), &st) == nil && st.Uid == 0 {
				ahead = append(ahead, line) // process 1 of no sandbox yet
				continue
			}
			out = append(out, line)
		}
	}
	if len(ahead) > keeper.Berths {
		out = append(out, ahead...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	do(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, e.Config.RunDir) {
			out = append(out, "mount "+strings.TrimSpace(line))
		}
	}
	ids, err := e.Uppers.List()
	do(t, err)
	for _, id := range ids {
		out = append(out, "upper of "+id)
	}
	out = append(out, e.Backend.Held()...)
	slices.Sort(out)
	return out
}

func cgroupMounts(t testing.TB) []string {
	t.Helper()
	f, err := os.Open("/proc/self/mountinfo")
	do(t, err)
	defer f.Close()
	var out []string
	for s := bufio.NewScanner(f); s.Scan(); {
		before, after, _ := strings.Cut(s.Text(), " - ")
		if strings.HasPrefix(after, "cgroup") {
			out = append(out, strings.Fields(before)[4])
		}
	}
	return out
}

// lines puts the driver's log into the test's.
type lines struct {
	t  testing.TB
	mu sync.Mutex
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(os.Stderr, "%s: %s", l.t.Name(), p)
	return len(p), nil
}

var guest = sync.OnceValues(func() (*os.File, error) {
	// A test program that was built elsewhere brings its guest, as in test/kernels.
	if self, err := os.Executable(); err == nil {
		if f, err := os.Open(filepath.Join(filepath.Dir(self), "dsec-guest")); err == nil {
			return f, nil
		}
	}
	dir, err := os.MkdirTemp("", "dsec-test-guest-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) // the descriptor keeps the file
	file := filepath.Join(dir, "dsec-guest")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", file, "github.com/dsec-dev/dsec/cmd/dsec-guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build dsec-guest: %w: %s", err, out)
	}
	return os.Open(file)
})

// Guest builds the file server once for the test program.
func Guest(t testing.TB) *os.File {
	t.Helper()
	f, err := guest()
	do(t, err)
	return f
}
