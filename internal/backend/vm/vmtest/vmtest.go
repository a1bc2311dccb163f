// Package vmtest makes a backend of virtual machines ready for tests: the root file system of the containers' tests as a layer, a catalogue,
// a kernel and a backend with a warden of its own. What a machine lacks for that is said by a skip.
package vmtest

import (
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
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/backend/backendtest"
	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/vmm"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// Main lets the test program be the warden when it is started as one.
func Main() {
	if len(os.Args) > 1 && os.Args[1] == "warden" {
		os.Exit(warden.Main(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == vmm.ProbeArg {
		os.Exit(vmm.ProbeMain())
	}
}

// Kernel finds a folder with a kernel for guests.
func Kernel(t testing.TB) string {
	t.Helper()
	for _, at := range vm.KernelFolders("/var/lib/dsec") {
		for _, name := range []string{"vmlinux", "vmlinuz"} {
			if _, err := os.Stat(filepath.Join(at, name)); err == nil {
				return at
			}
		}
	}
	t.Skip("skip: needs a kernel for guests (make guest-kernel, or DSEC_GUEST_KERNEL)")
	return ""
}

var program = sync.OnceValues(func() (*os.File, error) {
	if self, err := os.Executable(); err == nil { // one that was brought along, where nothing can be built
		if f, err := os.Open(filepath.Join(filepath.Dir(self), "dsec-guest-vm")); err == nil {
			return f, nil
		}
	}
	dir, err := os.MkdirTemp("", "dsec-test-guest-vm-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "dsec-guest-vm")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", file, "github.com/dsec-dev/dsec/cmd/dsec-guest/vm")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build dsec-guest-vm: %w: %s", err, out)
	}
	return os.Open(file)
})

// Guest builds process 1 of machines once for the test program.
func Guest(t testing.TB) *os.File {
	t.Helper()
	f, err := program()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Env is a backend with all below it.
type Env struct {
	Backend   *vm.Backend
	Catalogue *layer.Catalogue
	Layers    *blob.Layers
	Layer     string
	Config    vm.Config

	Network vm.Network
	Verdict vmm.Verdict // of /dev/kvm

	log  *slog.Logger
	stop func()
}

var number struct {
	sync.Mutex
	n int
}

func do(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// New makes a backend of an instance of its own. At the test's end its warden is told to end, and everything is removed.
func New(t testing.TB, change ...func(*vm.Config)) *Env {
	t.Helper()
	return NewWith(t, nil, change...)
}

// firecracker has the operator's program run machines where the environment names one: make test-firecracker.
func firecracker(c *vm.Config) {
	c.Firecracker, c.Jailer = os.Getenv("DSEC_FIRECRACKER"), os.Getenv("DSEC_JAILER")
}

// NewWith is New with a lender of networks.
func NewWith(t testing.TB, network vm.Network, change ...func(*vm.Config)) *Env {
	t.Helper()
	change = append([]func(*vm.Config){firecracker}, change...)
	probe := vm.Config{Name: "microvm"}
	for _, c := range change {
		c(&probe)
	}
	if probe.Name != "microvm" {
		probe.Firecracker = ""
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil && probe.Firecracker == "" {
		t.Skip("skip: needs QEMU (package qemu-system-x86)")
	}
	root := containertest.Root(t)
	kernel := Kernel(t)
	dir := t.TempDir()
	number.Lock()
	number.n++
	instance := fmt.Sprintf("t%dx%d", os.Getpid(), number.n)
	number.Unlock()
	e := &Env{Network: network, log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Verdict: vmm.Verdict{KVM: "absent", Reason: "tests are translated everywhere"}}
	if probe.Firecracker != "" {
		e.Verdict = vmm.Probe(t.Context(), []string{os.Args[0], vmm.ProbeArg}, "")
	}
	s, err := store.NewDir(filepath.Join(dir, "store"))
	do(t, err)
	f, err := facts.OpenBolt(filepath.Join(dir, "facts"))
	do(t, err)
	t.Cleanup(func() { f.Close() })
	e.Catalogue = layer.New(f, s)
	e.Layers, err = blob.NewLayers(blob.LayersConfig{Dir: filepath.Join(dir, "layers")}, e.Catalogue, s, nil, e.log)
	do(t, err)
	d, err := e.Catalogue.ImportDir(t.Context(), "default", root, layer.Options{Source: "busybox"})
	do(t, err)
	e.Layer = string(d.ID)
	filter, err := confine.Container().Compile(false)
	do(t, err)
	e.Config = vm.Config{
		Name: "microvm", Instance: instance, Host: "test", StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Kernel: kernel,
		Guest: Guest(t), Warden: []string{os.Args[0], "warden"}, Seccomp: filter,
		UIDBase: vm.DefaultUIDBase + uint32(os.Getpid()%1000)*100, Slots: 100,
	}
	for _, c := range change {
		c(&e.Config)
	}
	t.Cleanup(func() { e.end(t) })
	e.start(t)
	return e
}

func (e *Env) start(t testing.TB) {
	t.Helper()
	b, err := vm.New(t.Context(), e.Config, vm.Deps{Layers: e.Layers, Network: e.Network, Verdict: e.Verdict, Log: e.log})
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
	do(t, b.WaitReady(t.Context()))
}

// Restart drops the backend without a farewell and makes another one over the same state.
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
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	if err := e.Backend.Sweep(ctx, nil); err != nil {
		t.Errorf("sweep: %v", err)
	}
	if err := e.Backend.Release(ctx); err != nil {
		t.Errorf("release: %v", err)
	}
	e.stop()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := warden.Sweep(e.Config.RunDir, e.Config.Instance)
		if err == nil {
			break
		}
		if !errors.Is(err, sandbox.ErrExists) || time.Now().After(end) {
			t.Errorf("the warden does not end: %v", err)
			break
		}
	}
	if t.Failed() {
		log, _ := os.ReadFile(filepath.Join(e.Config.RunDir, warden.LogName))
		t.Logf("the warden's log:\n%s", log)
	}
}

// Suite is what the conformance suite needs.
func (e *Env) Suite() *sandboxtest.Env {
	return &sandboxtest.Env{
		Backend: degraded{e.Backend}, Host: sandbox.NewHostID(), Layers: []string{e.Layer}, Left: e.Left, Few: true,
		Restart: func(t testing.TB) sandbox.Backend { return degraded{e.Restart(t)} },
		More:    []sandboxtest.Part{backendtest.Files, backendtest.Layers(e.Catalogue, containertest.Busybox)},
	}
}

// degraded lets the suite's sandboxes be translated.
type degraded struct{ sandbox.Backend }

func (d degraded) Create(ctx context.Context, id sandbox.ID, s *sandbox.Spec, sink sandbox.Sink) (sandbox.Instance, error) {
	c := *s
	c.AllowDegraded = true
	if d.Capabilities().Features["accelerator"] == string(vmm.KVM) {
		c.Resources.CPU = 1000 // nested machines of two processors do not always come up
	}
	return d.Backend.Create(ctx, id, &c, sink)
}

// Left names what is on the host for sandboxes of the instance.
func (e *Env) Left(t testing.TB) []string {
	t.Helper()
	out := e.Backend.Held()
	dirs, err := os.ReadDir(e.Config.RunDir)
	do(t, err)
	for _, d := range dirs {
		if d.IsDir() && !strings.HasPrefix(d.Name(), "template-") {
			out = append(out, "folder "+d.Name())
		}
	}
	name := "dsec-" + e.Config.Instance + "-vm"
	procs, err := os.ReadDir("/proc")
	do(t, err)
	for _, p := range procs {
		groups, err := os.ReadFile(filepath.Join("/proc", p.Name(), "cgroup"))
		if err == nil && strings.Contains(string(groups), "/"+name+"/") && !strings.Contains(string(groups), "/template-") {
			out = append(out, "process "+p.Name())
		}
	}
	for _, top := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/cpu"} {
		dirs, _ := os.ReadDir(filepath.Join(top, name))
		for _, d := range dirs {
			if d.IsDir() && !strings.HasPrefix(d.Name(), "template-") {
				out = append(out, "cgroup "+filepath.Join(top, name, d.Name()))
			}
		}
	}
	slices.Sort(out)
	return out
}
