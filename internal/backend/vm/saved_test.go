package vm_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

// A saved state that can't be removed is no longer the sandbox's once its machine runs: so it does not run, and can be woken later.
func TestSavedStateThatStays(t *testing.T) {
	e := vmtest.New(t)
	id := sandbox.NewID("htests")
	x, err := e.Backend.Create(within(t), id, small(e), &nobody{})
	if err != nil {
		t.Fatal(err)
	}
	if err := x.Pause(within(t), sandbox.Saved); err != nil {
		t.Fatal(err)
	}
	file := e.Config.StateDir + "/" + string(id) + ".saved.json"
	if err := unix.Mount(file, file, "", unix.MS_BIND, ""); err != nil { // a file on which something is mounted stays
		t.Skipf("skip: mount: %v", err)
	}
	err = x.Resume(within(t))
	if e := unix.Unmount(file, unix.MNT_DETACH); e != nil {
		t.Fatal(e)
	}
	if err == nil || !strings.Contains(err.Error(), "saved state") {
		t.Errorf("resume with a state that stays: %v", err)
	}
	if err := x.Start(within(t), command("no", "true")); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("start after a resume that failed: %v", err)
	}
	if err := x.Resume(within(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the state of a machine that runs: %v", err)
	}
	if err := x.Start(within(t), command("c", "true")); err != nil {
		t.Fatal(err)
	}
	if err := x.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A resume that is broken off, wherever, leaves the sandbox frozen, and the next one wakes it.
func TestResumeThatIsBrokenOff(t *testing.T) {
	e := vmtest.New(t)
	s := e.Suite()
	b := sandboxtest.NewBox(t, s)
	x := b.Instance()
	if err := x.Pause(within(t), sandbox.Frozen); errors.Is(err, sandbox.ErrUnsupported) {
		t.Skip("skip: this driver can't pause")
	} else if err != nil {
		t.Fatal(err)
	}
	failed := 0
	for bound := 500 * time.Microsecond; ; bound = bound * 3 / 2 {
		ctx, cancel := context.WithTimeout(t.Context(), bound)
		err := x.Resume(ctx)
		cancel()
		if err == nil {
			break
		}
		failed++
		if err := x.Start(within(t), command("no", "true")); !errors.Is(err, sandbox.ErrState) {
			t.Fatalf("start after a resume that failed: %v", err)
		}
	}
	t.Logf("%d were broken off", failed)
	if got := b.Out(t, "echo awake"); got != "awake\n" {
		t.Errorf("%q", got)
	}
}

// A host that is killed in a save or in a resume leaves a machine that does not run beside a state, or half of one: the sandbox is whole in one of both.
func TestSavedMachineOfAKilledHost(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) { c.Firecracker, c.Jailer, c.NoTemplates = "", "", true })
	id, spec := sandbox.NewID("htests"), small(e)
	x, err := e.Backend.Create(within(t), id, spec, &nobody{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		level sandbox.PauseLevel
		half  func(context.Context, sandbox.Instance) error
	}{{"resume", sandbox.Saved, vm.HalfLoad}, {"save", sandbox.Frozen, vm.HalfSave}} {
		if err := x.Pause(within(t), c.level); err != nil {
			t.Fatal(err)
		}
		if err := c.half(within(t), x); err != nil {
			t.Fatal(err)
		}
		if x, err = e.Restart(t).Recover(within(t), id, spec, x.Handle(), &nobody{}); err != nil {
			t.Fatalf("killed in a %s: %v", c.name, err)
		}
		if err := x.Resume(within(t)); err != nil {
			t.Fatalf("killed in a %s: %v", c.name, err)
		}
		if err := x.Start(within(t), command(c.name, "true")); err != nil {
			t.Fatalf("killed in a %s: %v", c.name, err)
		}
	}
	if err := x.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
