package vm_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/internal/vmm"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// nobody takes what happens and remembers the end.
type nobody struct {
	sandbox.Sink
	mu    sync.Mutex
	cause *sandbox.Cause
}

func (n *nobody) Output(context.Context, string, sandbox.StreamName, int64, []byte, bool) error {
	return nil
}
func (n *nobody) CommandEnded(context.Context, string, sandbox.Outcome) error { return nil }
func (n *nobody) SessionEnded(context.Context, string, sandbox.Outcome) error { return nil }
func (n *nobody) Denied(context.Context, string, string, string)              {}
func (n *nobody) Ended(_ context.Context, c sandbox.Cause) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cause = &c
	return nil
}

func (n *nobody) end() *sandbox.Cause {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cause
}

func small(e *vmtest.Env) *sandbox.Spec {
	s := &sandbox.Spec{Layers: []string{e.Layer}, Backend: "microvm", AllowDegraded: true, Env: []string{"PATH=/bin"},
		Resources: sandbox.Resources{Memory: 128 << 20, Disk: 64 << 20, Pids: 128}}
	if accelerated(e) {
		s.Resources.CPU = 1000 // one processor: nested machines of two do not always come up
	}
	s.Fill()
	return s
}

func accelerated(e *vmtest.Env) bool {
	return e.Backend.Capabilities().Features["accelerator"] == string(vmm.KVM)
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Clones of one template never give the same random numbers, whatever the kernel has, and none has the clock of the template.
func TestClonesAreUnlikeEachOther(t *testing.T) {
	e := vmtest.New(t)
	s := e.Suite()
	seen := map[string]bool{}
	for range 3 {
		b := sandboxtest.NewBox(t, s)
		got := b.Out(t, "head -c 16 /dev/urandom | od -An -tx1; head -c 16 /dev/random | od -An -tx1; cat /proc/sys/kernel/random/uuid")
		for line := range strings.Lines(got) {
			if seen[line] {
				t.Errorf("two clones gave %q", line)
			}
			seen[line] = true
		}
		now, err := strconv.ParseInt(strings.TrimSpace(b.Out(t, "date +%s")), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		if off := time.Since(time.Unix(now, 0)); off < -2*time.Second || off > 30*time.Second {
			t.Errorf("the clock is off by %v", off)
		}
	}
}

func TestTranslatedMachineMustBeAllowed(t *testing.T) {
	e := vmtest.New(t)
	if accelerated(e) {
		t.Skip("skip: machines are not translated here")
	}
	s := small(e)
	s.AllowDegraded = false
	_, err := e.Backend.Create(within(t), sandbox.NewID("htests"), s, &nobody{})
	if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "allow_degraded") || !strings.Contains(err.Error(), "tests are translated") {
		t.Errorf("%v; want ErrUnsupported with the reason and the way round", err)
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// kill -9 of a monitor: the sandbox ends by the platform, and its destroy leaves nothing.
func TestKilledMonitor(t *testing.T) {
	e := vmtest.New(t)
	sink := &nobody{}
	x, err := e.Backend.Create(within(t), sandbox.NewID("htests"), small(e), sink)
	if err != nil {
		t.Fatal(err)
	}
	list, err := warden.NewClient(e.Config.RunDir).List(within(t))
	if err != nil || len(list) != 1 {
		t.Fatalf("monitors: %v, %v", list, err)
	}
	if uid := owner(t, list[0].Pid); uid < e.Config.UIDBase || uid >= e.Config.UIDBase+uint32(e.Config.Slots) {
		t.Errorf("the monitor runs as uid %d", uid)
	}
	if err := unix.Kill(list[0].Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	sandboxtest.Eventually(t, func() bool { return sink.end() != nil }, func() string { return "no end was told" })
	if c := sink.end(); c.Class != sandbox.ClassPlatform || c.Reason != "monitor_ended" {
		t.Errorf("%+v", c)
	}
	if err := x.Start(within(t), &sandbox.Command{ID: "c", Argv: []string{"/bin/true"}}); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("start in a dead machine: %v", err)
	}
	if err := x.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func owner(t *testing.T, pid int) uint32 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat("/proc/"+strconv.Itoa(pid), &st); err != nil {
		t.Fatal(err)
	}
	return st.Uid
}

// A paused machine's monitor takes no processor time, and the state survives a restart of the host.
func TestPausedMachineStandsStill(t *testing.T) {
	e := vmtest.New(t)
	x, err := e.Backend.Create(within(t), sandbox.NewID("htests"), small(e), &nobody{})
	if err != nil {
		t.Fatal(err)
	}
	err = x.Pause(within(t), sandbox.Frozen)
	if c := e.Backend.Capabilities(); !slices.Contains(c.PauseLevels, sandbox.Frozen) {
		if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), c.Features["pause"]) {
			t.Errorf("pause of a driver that can't: %v, want ErrUnsupported with %q", err, c.Features["pause"])
		}
		if err := x.Start(within(t), command("c", "true")); err != nil {
			t.Errorf("after a refused pause: %v", err)
		}
		if err := x.Destroy(within(t)); err != nil {
			t.Fatal(err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	list, err := warden.NewClient(e.Config.RunDir).List(within(t))
	if err != nil || len(list) != 1 {
		t.Fatalf("monitors: %v, %v", list, err)
	}
	before := ticks(t, list[0].Pid)
	time.Sleep(500 * time.Millisecond)
	if used := ticks(t, list[0].Pid) - before; used > 5 {
		t.Errorf("%d ticks in half a second", used)
	}
	if err := x.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
}

func ticks(t *testing.T, pid int) (n int) {
	t.Helper()
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	for _, v := range f[11:13] {
		k, err := strconv.Atoi(v)
		if err != nil {
			t.Fatal(err)
		}
		n += k
	}
	return n
}

// The backend says what it is before anything starts.
func TestCapabilities(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) { c.Name = "vm" })
	c := e.Backend.Capabilities()
	if c.Backend != "vm" || c.Isolation != "high" || c.Features["accelerator"] != "tcg" || c.Features["degraded"] == "" || !strings.HasPrefix(c.Features["driver"], "qemu ") {
		t.Errorf("%+v", c)
	}
}

// A machine of network open reaches what lies outside under the host's address, and nothing of the host; its end leaves no device.
func TestNetworkOpen(t *testing.T) {
	w := containertest.NewWorld(t)
	lender := containertest.New(t, containertest.Options{Network: w.Config(t)})
	e := vmtest.NewWith(t, lender.Backend)
	if why := lender.Backend.NoNetworkOpen(); why != "" {
		t.Skipf("skip: no network open here: %s", why)
	}
	s := e.Suite()
	for range 2 { // the second one is a clone of a template that has been used
		b := sandboxtest.NewBox(t, s, func(s *sandbox.Spec) { s.Network = sandbox.NetworkOpen })
		if got := b.Out(t, "nc -w 10 "+w.Outside.String()+" 80 </dev/null"); strings.TrimSpace(got) != w.Host.String() {
			t.Errorf("outside saw %q, want the host's address", got)
		}
		if o, out := b.As(t, "root", "nc -w 5 "+w.Host.String()+" 80 </dev/null"); o.Code == 0 && out != "" {
			t.Errorf("the host answered %q", out)
		}
		if got := b.Out(t, "cat /etc/resolv.conf"); !strings.Contains(got, w.Outside.String()) {
			t.Errorf("resolvers %q", got)
		}
		if n := len(w.Devices(t)); n == 0 {
			t.Error("no device on the host")
		}
		if err := b.Instance().Destroy(within(t)); err != nil {
			t.Fatal(err)
		}
		sandboxtest.Eventually(t, func() bool { return len(w.Devices(t)) == 0 }, func() string { return "devices are left" })
	}
}

// A saved sandbox has no monitor, survives a restart of the host, and goes on where it was.
func TestSavedMachineGoesOn(t *testing.T) {
	e := vmtest.New(t)
	s := e.Suite()
	b := sandboxtest.NewBox(t, s)
	x := b.Instance()
	b.Out(t, "echo kept >/tmp/f")
	if err := x.Start(within(t), command("long", "i=0; while [ $i -lt 5000 ] && [ ! -e /tmp/stop ]; do i=$((i+1)); echo $i >/tmp/n; sleep 0.02; done")); err != nil {
		t.Fatal(err)
	}
	if err := x.Pause(within(t), sandbox.Saved); err != nil {
		t.Fatal(err)
	}
	if err := x.Pause(within(t), sandbox.Saved); err != nil {
		t.Errorf("again: %v", err)
	}
	if list, err := warden.NewClient(e.Config.RunDir).List(within(t)); err != nil || len(list) != 0 {
		t.Errorf("monitors of a saved sandbox: %v, %v", list, err)
	}
	if err := x.Start(within(t), command("no", "true")); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("start in a saved sandbox: %v", err)
	}
	if s, err := x.Stats(within(t)); err != nil || s.HostMemory != 0 {
		t.Errorf("stats: %+v, %v; want none of the host's memory", s, err)
	}
	if err := x.Resume(within(t)); err != nil {
		t.Fatal(err)
	}
	was := b.Out(t, "cat /tmp/f /tmp/n")
	if !strings.HasPrefix(was, "kept\n") {
		t.Errorf("%q", was)
	}
	sandboxtest.Eventually(t, func() bool { return b.Out(t, "cat /tmp/f /tmp/n") != was }, func() string { return "the command does not go on" })
	if err := x.Pause(within(t), sandbox.Saved); err != nil {
		t.Fatal(err)
	}
	if err := x.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestSavedMachineAndRestart(t *testing.T) {
	e := vmtest.New(t)
	id, spec := sandbox.NewID("htests"), small(e)
	x, err := e.Backend.Create(within(t), id, spec, &nobody{})
	if err != nil {
		t.Fatal(err)
	}
	if err := x.Pause(within(t), sandbox.Saved); err != nil {
		t.Fatal(err)
	}
	b := e.Restart(t)
	y, err := b.Recover(within(t), id, spec, x.Handle(), &nobody{})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Sweep(within(t), map[sandbox.ID]bool{id: true}); err != nil {
		t.Fatal(err)
	}
	if err := y.Resume(within(t)); err != nil {
		t.Fatal(err)
	}
	if err := y.Start(within(t), command("c", "true")); err != nil {
		t.Fatal(err)
	}
	// One of another version of QEMU, or of another kernel, is refused with the difference.
	if err := y.Pause(within(t), sandbox.Saved); err != nil {
		t.Fatal(err)
	}
	file := e.Config.StateDir + "/" + string(id) + ".saved.json"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(strings.Replace(string(text), `"version":"`, `"version":"0.`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := y.Resume(within(t)); !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "was saved by "+strings.Fields(e.Backend.Capabilities().Features["driver"])[0]+" 0.") {
		t.Errorf("a state of another QEMU: %v", err)
	}
	if err := y.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func command(id, text string) *sandbox.Command {
	return &sandbox.Command{ID: id, Argv: []string{"/bin/sh", "-c", text}, User: "root", Cwd: "/", OutputCap: 1 << 20}
}
