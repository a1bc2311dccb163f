package vmm_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/guest/mux"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

const testUID = 0x7fbf1000

// fcRig is a driver over a stand-in for the program.
type fcRig struct {
	w *warden.Client
	d *vmm.Firecracker
	k *vmm.Kernel
	n int
	t *testing.T
}

func newFirecracker(t *testing.T, version string) *fcRig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	// The monitor's user has to reach its folder.
	top, err := os.MkdirTemp("/tmp", "dsec-fc-")
	if err != nil {
		t.Fatal(err)
	}
	os.Chmod(top, 0o755)
	program := filepath.Join(top, "firecracker")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nexport DSEC_FAKE_FIRECRACKER_VERSION="+version+"\nexec "+filepath.Join(top, "test")+" firecracker \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(top, "test"), text, 0o755); err != nil {
		t.Fatal(err)
	}
	r := &fcRig{t: t}
	instance := fmt.Sprintf("f%d", os.Getpid())
	run := filepath.Join(top, "run")
	if r.w, err = warden.Spawn(t.Context(), os.Args[0], []string{"warden"}, run, instance); err != nil {
		t.Fatal(err)
	}
	os.Chmod(run, 0o711)
	t.Cleanup(func() {
		r.w.Shutdown(context.Background())
		for end := time.Now().Add(20 * time.Second); warden.Sweep(run, instance) != nil && time.Now().Before(end); {
			time.Sleep(5 * time.Millisecond)
		}
		os.RemoveAll(top)
	})
	r.d, err = vmm.NewFirecracker(t.Context(), vmm.FirecrackerConfig{Program: program, Verdict: vmm.Verdict{KVM: "native"}, Warden: r.w})
	if err != nil {
		t.Fatal(err)
	}
	kernel := t.TempDir()
	if err := os.WriteFile(filepath.Join(kernel, "vmlinux"), []byte("kernel"), 0o644); err != nil {
		t.Fatal(err)
	}
	if r.k, err = vmm.OpenKernel(kernel, strings.NewReader("guest")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.k.Close)
	return r
}

func (r *fcRig) spec(change ...func(*vmm.Spec)) *vmm.Spec {
	r.t.Helper()
	r.n++
	list, err := r.w.List(r.t.Context())
	if err != nil || len(list) > 10 {
		r.t.Fatalf("%d monitors, %v", len(list), err)
	}
	dir, err := os.MkdirTemp("/tmp", "dsec-fcvm-")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { os.RemoveAll(dir) })
	disk, err := os.CreateTemp(r.t.TempDir(), "")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { disk.Close() })
	disk.Chmod(0o666)
	s := &vmm.Spec{ID: fmt.Sprintf("fc-%d", r.n), Dir: dir, UID: testUID, Machine: "microvm", Kernel: r.k, CPUs: 1, Memory: 128 << 20,
		Disks: []vmm.Disk{{Serial: "upper", File: disk}}}
	for _, c := range change {
		c(s)
	}
	return s
}

// greet finds the guest of a machine.
func greet(t *testing.T, vm vmm.VM) (*mux.Session, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := vm.Agent(ctx)
	if err != nil {
		return nil, err
	}
	return mux.Host(ctx, c)
}

func TestFirecrackerLife(t *testing.T) {
	r := newFirecracker(t, "1.17.0")
	vm, err := r.d.Create(t.Context(), r.spec())
	if err != nil {
		t.Fatal(err)
	}
	s, err := greet(t, vm)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, step := range []struct {
		act  func(context.Context) error
		want string
	}{{vm.Pause, "paused"}, {vm.Pause, "paused"}, {vm.Resume, "running"}, {vm.Resume, "running"}} {
		if err := step.act(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got, err := vm.Status(t.Context()); err != nil || got != step.want {
			t.Errorf("status %q, %v; want %q", got, err, step.want)
		}
	}
	if err := vm.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := vm.Kill(t.Context()); err != nil {
		t.Errorf("kill again: %v", err)
	}
	if _, err := r.d.Find(t.Context(), vm.ID(), "/tmp"); !errors.Is(err, sandbox.ErrLost) {
		t.Errorf("find a dead machine: %v, want ErrLost", err)
	}
}

// What is saved with shared memory is what clones start from; what is saved alone goes on alone.
func TestFirecrackerSnapshotAndClone(t *testing.T) {
	r := newFirecracker(t, "1.17.0")
	memory, err := r.d.NewMemory(t.TempDir(), 128<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer vmm.Discard(memory)
	state, alone := tempFile(t), tempFile(t)
	vm, err := r.d.Create(t.Context(), r.spec(func(s *vmm.Spec) { s.Backing.File = memory }))
	if err != nil {
		t.Fatal(err)
	}
	old, err := greet(t, vm)
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.Save(t.Context(), state, true); err == nil {
		t.Error("a running machine was saved")
	}
	if err := errors.Join(vm.Pause(t.Context()), vm.Save(t.Context(), state, true), vm.Save(t.Context(), alone, false), vm.Resume(t.Context())); err != nil {
		t.Fatal(err)
	}
	select {
	case <-old.Done(): // a snapshot breaks each connection
	case <-time.After(10 * time.Second):
		t.Error("the connection outlived the snapshot")
	}
	if s, err := greet(t, vm); err != nil {
		t.Errorf("dial again: %v", err)
	} else {
		s.Close()
	}
	if err := errors.Join(vm.Kill(t.Context()), vmm.Seal(memory)); err != nil {
		t.Fatal(err)
	}
	shared := func(s *vmm.Spec) {
		s.Incoming, s.From, s.Backing = true, state, vmm.Memory{File: memory, Private: true}
	}
	for name, change := range map[string]func(*vmm.Spec){"first clone": shared, "second clone": shared, "alone": func(s *vmm.Spec) { s.Incoming, s.From = true, alone }} {
		c, err := r.d.Create(t.Context(), r.spec(change))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Load(t.Context(), nil, false); err != nil {
			t.Fatal(err)
		}
		if st, err := c.Status(t.Context()); err != nil || st != "paused" {
			t.Errorf("%s: a loaded machine is %q, %v", name, st, err)
		}
		if err := c.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		s, err := greet(t, c)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else {
			s.Close()
		}
	}
	// One that is broken ends its monitor, and says why.
	state.WriteAt([]byte("short"), 0)
	c, err := r.d.Create(t.Context(), r.spec(shared))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Load(t.Context(), nil, true); err == nil || !strings.Contains(err.Error(), "CRC") {
		t.Errorf("a broken snapshot: %v", err)
	}
	select {
	case <-c.Over():
	case <-time.After(10 * time.Second):
		t.Error("its monitor lives on")
	}
}

func tempFile(t *testing.T) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// A monitor that was taken over leaves something else where what it saved should be.
func TestFirecrackerSavedMustBeItsOwn(t *testing.T) {
	r := newFirecracker(t, "1.17.0")
	s := r.spec()
	vm, err := r.d.Create(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	if err := vm.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(s.Dir, "root")
	if err := os.Mkdir(filepath.Join(root, "saved.state"), 0o755); err != nil {
		t.Fatal(err)
	}
	os.WriteFile(filepath.Join(root, "saved.state", "x"), nil, 0o644)
	if err := vm.Save(t.Context(), tempFile(t), false); err == nil {
		t.Error("a folder was taken for a state")
	}
}

func TestFirecrackerRefusals(t *testing.T) {
	r := newFirecracker(t, "1.17.0")
	for name, c := range map[string]struct {
		change func(*vmm.Spec)
		want   error
		text   string
	}{
		"no kernel":  {func(s *vmm.Spec) { s.Kernel = nil }, sandbox.ErrInvalid, "kernel"},
		"as root":    {func(s *vmm.Spec) { s.UID = 0 }, sandbox.ErrInvalid, "root"},
		"a screen":   {func(s *vmm.Spec) { s.Display = true }, sandbox.ErrUnsupported, "screen"},
		"odd memory": {func(s *vmm.Spec) { s.Memory++ }, sandbox.ErrInvalid, "memory"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := r.d.Create(t.Context(), r.spec(c.change))
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v; want %v that names %q", err, c.want, c.text)
			}
		})
	}
	if list, err := r.w.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("monitors are left: %v, %v", list, err)
	}
}

// A monitor that was taken over puts a link to another's socket where its own was.
func TestFirecrackerSocketMustBeItsOwn(t *testing.T) {
	r := newFirecracker(t, "1.17.0")
	s := r.spec()
	vm, err := r.d.Create(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	at := filepath.Join(s.Dir, "root", "vsock.sock")
	other := filepath.Join(s.Dir, "root", "api.sock")
	os.Remove(at)
	if err := os.Symlink(other, at); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if c, err := vm.Agent(ctx); err == nil {
		c.Close()
		t.Error("a link was followed")
	}
	os.Remove(at)
	if err := unix.Mkfifo(at, 0o666); err != nil {
		t.Fatal(err)
	}
	ctx2, cancel2 := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel2()
	if c, err := vm.Agent(ctx2); err == nil {
		c.Close()
		t.Error("a FIFO was taken for a socket")
	}
}

func TestFirecrackerByVersion(t *testing.T) {
	for version, pause := range map[string]bool{"1.16.1": false, "1.17.0-dev": true, "2.0.0": true} {
		if f := newFirecracker(t, version).d.Features(); f.Pause != pause || f.Degraded || (f.Why["pause"] == "") != pause {
			t.Errorf("%s: %+v, want pause %v", version, f, pause)
		}
	}
	_, err := vmm.NewFirecracker(t.Context(), vmm.FirecrackerConfig{Program: "/bin/true", Verdict: vmm.Verdict{KVM: "emulated", Reason: "an instruction takes 280 ns"}})
	if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "280 ns") {
		t.Errorf("without KVM: %v; want ErrUnsupported with the reason", err)
	}
}

// The bounds of a machine are those of who starts it: a state that is loaded gets them, and loses what the saved one had.
func TestFirecrackerRates(t *testing.T) {
	r := newFirecracker(t, "1.17.0")
	state := tempFile(t)
	bounds := vmm.Rates{Disk: 5 << 20, DiskOps: 100, Network: 1 << 20}
	tapped := func(s *vmm.Spec) { s.TapName, s.MAC = "tap0", "02:00:00:00:00:01" }
	s := r.spec(tapped, func(s *vmm.Spec) { s.Rates = bounds })
	m, err := r.d.Create(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	limited := map[string]map[string]string{
		"/drives/disk0":            {"rate_limiter": `{"bandwidth":{"refill_time":100,"size":524288},"ops":{"refill_time":100,"size":10}}`},
		"/network-interfaces/eth0": {"rx_rate_limiter": `{"bandwidth":{"refill_time":100,"size":104857},"ops":{"refill_time":0,"size":0}}`},
	}
	limited["/network-interfaces/eth0"]["tx_rate_limiter"] = limited["/network-interfaces/eth0"]["rx_rate_limiter"]
	wantConfig(t, s, limited)
	if err := errors.Join(m.Pause(t.Context()), m.Save(t.Context(), state, false), m.Kill(t.Context())); err != nil {
		t.Fatal(err)
	}
	free := map[string]map[string]string{}
	for path, o := range limited {
		free[path] = map[string]string{}
		for k := range o {
			free[path][k] = `{"bandwidth":{"refill_time":0,"size":0},"ops":{"refill_time":0,"size":0}}`
		}
	}
	for _, c := range []struct {
		rates vmm.Rates
		want  map[string]map[string]string
	}{{bounds, limited}, {vmm.Rates{}, free}} {
		s := r.spec(tapped, func(s *vmm.Spec) { s.Rates, s.Incoming, s.From = c.rates, true, state })
		m, err := r.d.Create(t.Context(), s)
		if err == nil {
			err = m.Load(t.Context(), nil, false)
		}
		if err != nil {
			t.Fatal(err)
		}
		wantConfig(t, s, c.want)
	}
}

// wantConfig compares what the stand-in was told of a machine's devices.
func wantConfig(t *testing.T, s *vmm.Spec, want map[string]map[string]string) {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", filepath.Join(s.Dir, "root", "api.sock"))
	}}}
	defer c.CloseIdleConnections()
	a, err := c.Get("http://firecracker/vm/config")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Body.Close()
	var got map[string]map[string]json.RawMessage
	if err := json.NewDecoder(a.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	for path, o := range want {
		for field, text := range o {
			if string(got[path][field]) != text {
				t.Errorf("%s: %s is %s, want %s", path, field, got[path][field], text)
			}
		}
	}
}
