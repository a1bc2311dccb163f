package vm_test

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// waiting are the monitors of machines that wait for a create.
func waiting(t *testing.T, e *vmtest.Env) (out []warden.Alive) {
	t.Helper()
	list, err := warden.NewClient(e.Config.RunDir).List(within(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range list {
		if strings.HasPrefix(a.ID, "dsecwaiting-") && !a.Ended {
			out = append(out, a)
		}
	}
	return out
}

// A machine that waited is like one that is made, it is given away once and survives a restart of the host; one that died is passed over.
func TestMachinesThatWait(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) { c.Ready = 1 })
	if e.Backend.Capabilities().Features["pause"] != "" {
		t.Skip("skip: this driver can't pause")
	}
	s := e.Suite()
	name := func(b *sandboxtest.Box) string { return string(b.Instance().Handle()) }
	first := sandboxtest.NewBox(t, s)
	if strings.Contains(name(first), "dsecwaiting-") {
		t.Errorf("nothing waited, and its handle is %s", name(first))
	}
	fill := func() string {
		t.Helper()
		for end := time.Now().Add(6 * time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if list := e.Backend.Waiting(); len(list) == 1 {
				return list[0]
			}
		}
		t.Fatal("no machine waits")
		return ""
	}
	boxes, seen := []*sandboxtest.Box{first}, map[string]bool{}
	const draw = "head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid"
	for line := range strings.Lines(first.Out(t, draw)) {
		seen[line] = true
	}
	for range 2 {
		m := fill()
		b := sandboxtest.NewBox(t, s)
		boxes = append(boxes, b)
		if !strings.Contains(name(b), m) {
			t.Errorf("%s waited, and the handle is %s", m, name(b))
		}
		for line := range strings.Lines(b.Out(t, draw)) {
			if seen[line] {
				t.Errorf("two machines gave %q", line)
			}
			seen[line] = true
		}
		if got := b.Out(t, "ls -A /tmp; echo kept >/tmp/f; cat /tmp/f"); got != "kept\n" {
			t.Errorf("%q", got)
		}
	}
	// One that died meanwhile is passed over.
	m := fill()
	for _, a := range waiting(t, e) {
		if a.ID == m {
			if err := unix.Kill(a.Pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	id := sandbox.NewID("htests")
	x, err := e.Backend.Create(within(t), id, small(e), &nobody{})
	if err != nil {
		t.Fatal(err)
	}
	if err := x.Start(within(t), command("c", "true")); err != nil {
		t.Fatal(err)
	}
	for _, b := range boxes {
		if err := b.Instance().Destroy(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	// The one who has a machine that waited finds it again.
	spec, sink := small(e), &nobody{}
	again := e.Restart(t)
	z, err := again.Recover(within(t), id, spec, x.Handle(), sink)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Sweep(within(t), map[sandbox.ID]bool{id: true}); err != nil {
		t.Fatal(err)
	}
	if known, err := z.Known(within(t), "c"); err != nil || !known {
		t.Errorf("its command after a restart: %v, %v", known, err)
	}
	if list := waiting(t, e); len(list) > 1 {
		t.Errorf("after a restart: %v, want at most that of the sandbox", list)
	}
	if err := z.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
