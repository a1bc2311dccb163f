package vm_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// hostMemory is what a sandbox's machine holds, in MiB.
func hostMemory(t *testing.T, b *sandboxtest.Box) int64 {
	t.Helper()
	s, err := b.Instance().Stats(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return s.HostMemory >> 20
}

// What a clone frees goes back to the host, and the template is as it was: another clone of it comes up, and fresh memory is zeros although it
// held the template's pages meanwhile.
func TestMemoryComesBack(t *testing.T) { memoryComesBack(t, vmtest.New(t)) }

func TestMemoryComesBackOfVM(t *testing.T) {
	if os.Getenv("DSEC_TORTURE") == "" {
		t.Skip("skip: make torture runs it")
	}
	memoryComesBack(t, vmtest.New(t, func(c *vm.Config) { c.Name = "vm" }))
}

func memoryComesBack(t *testing.T, e *vmtest.Env) {
	t.Helper()
	suite := e.Suite()
	b := sandboxtest.NewBox(t, suite, func(s *sandbox.Spec) { s.Resources.Memory = 256 << 20 })
	if !strings.Contains(string(b.Instance().Handle()), `"template"`) {
		t.Fatal("the machine is no clone")
	}
	before := hostMemory(t, b)
	if before < 5 {
		t.Fatalf("it holds %d MiB", before)
	}
	b.Out(t, "head -c 125829120 /dev/zero >/dev/shm/f")
	full := hostMemory(t, b)
	if full < before+100 {
		t.Fatalf("%d MiB, with 120 MiB more in it %d", before, full)
	}
	b.Out(t, "rm /dev/shm/f")
	var now int64
	sandboxtest.Eventually(t, func() bool { now = hostMemory(t, b); return now < full-80 }, func() string {
		return fmt.Sprintf("%d MiB before, %d with a file of 120, %d after its end", before, full, now)
	})
	t.Logf("%d MiB before, %d with a file of 120, %d after its end", before, full, now)
	if got := b.Out(t, "head -c 33554432 /dev/zero >/dev/shm/g; tr -d '\\0' </dev/shm/g | wc -c"); strings.TrimSpace(got) != "0" {
		t.Errorf("32 MiB of zeros hold %s other octets", got)
	}
	other := sandboxtest.NewBox(t, suite, func(s *sandbox.Spec) { s.Resources.Memory = 256 << 20 })
	if got := other.Out(t, "echo up"); got != "up\n" {
		t.Errorf("another clone says %q", got)
	}
	if log, _ := os.ReadFile(e.Config.RunDir + "/" + warden.LogName); strings.Contains(string(log), "no memory back") {
		t.Errorf("the warden's log:\n%s", log)
	}
}

// A machine gives back what it has of files that nobody reads for two minutes.
func TestReclaim(t *testing.T) {
	if os.Getenv("DSEC_TORTURE") == "" {
		t.Skip("skip: make torture runs it")
	}
	e := vmtest.New(t, func(c *vm.Config) { c.NoTemplates = true })
	b := sandboxtest.NewBox(t, e.Suite(), func(s *sandbox.Spec) { s.Resources.Memory, s.Resources.Disk = 256<<20, 256<<20 })
	b.Out(t, "head -c 83886080 /dev/zero >/tmp/f; sync; cat /tmp/f >/dev/null")
	full := hostMemory(t, b)
	var now int64
	for end := time.Now().Add(20 * time.Minute); ; time.Sleep(time.Second) {
		if now = hostMemory(t, b); now < full-50 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d MiB, and %d long after the last read of a file of 80", full, now)
		}
	}
	t.Logf("%d MiB, and %d after a while without a read of a file of 80", full, now)
	if got := b.Out(t, "tr -d '\\0' </tmp/f | wc -c"); strings.TrimSpace(got) != "0" {
		t.Errorf("the file has %s other octets", got)
	}
}
