package vmm_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/vmm"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
	"github.com/dsec-dev/dsec/test/firecracker"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "warden" {
		os.Exit(warden.Main(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == "firecracker" {
		os.Exit(firecracker.Main(os.Args[2:]))
	}
	if len(os.Args) > 1 && os.Args[1] == vmm.ProbeArg {
		switch os.Getenv("DSEC_TEST_PROBE") {
		case "hang":
			time.Sleep(time.Hour)
		case "garbage":
			os.Stdout.WriteString("KVM")
			os.Exit(0)
		}
		os.Exit(vmm.ProbeMain())
	}
	os.Exit(m.Run())
}

// The probe of this machine is whatever it is; it must be bounded, have a reason where it is no, and be remembered.
func TestProbeIsBoundedAndKept(t *testing.T) {
	file := filepath.Join(t.TempDir(), "verdict.json")
	v := vmm.Probe(t.Context(), []string{os.Args[0], vmm.ProbeArg}, file)
	t.Logf("verdict: %+v", v)
	switch v.KVM {
	case "native":
	case "emulated", "broken", "absent":
		if v.Reason == "" || v.Usable() {
			t.Errorf("%+v: want a reason, and not usable", v)
		}
	default:
		t.Errorf("verdict %q", v.KVM)
	}
	again := vmm.Probe(t.Context(), []string{"/nonexistent"}, file)
	if d := cmp.Diff(v, again); d != "" {
		t.Errorf("the verdict was not kept: %s", d)
	}
}

func TestProbeOfAHungGuest(t *testing.T) {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skip("skip: needs /dev/kvm")
	}
	t.Setenv("DSEC_TEST_PROBE", "garbage")
	if v := vmm.Probe(t.Context(), []string{os.Args[0], vmm.ProbeArg}, ""); v.KVM != "broken" {
		t.Errorf("a probe that says nothing: %+v", v)
	}
	if testing.Short() {
		t.Skip("skip: waits for a process that hangs")
	}
	t.Setenv("DSEC_TEST_PROBE", "hang")
	if v := vmm.Probe(t.Context(), []string{os.Args[0], vmm.ProbeArg}, ""); v.KVM != "broken" || v.Usable() {
		t.Errorf("a probe that hangs: %+v", v)
	}
}

// A verdict of another start of the machine counts for nothing.
func TestVerdictOfAnotherStart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "verdict.json")
	text, err := json.Marshal(map[string]any{"key": "other", "verdict": vmm.Verdict{KVM: "native"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DSEC_TEST_PROBE", "garbage")
	if v := vmm.Probe(t.Context(), []string{os.Args[0], vmm.ProbeArg}, file); v.Usable() {
		t.Errorf("taken from another start: %+v", v)
	}
}

// The second stage is run once for a start of the host, a monitor and a kernel; what it found is told again, also to who only asks.
func TestProbeBoot(t *testing.T) {
	file := filepath.Join(t.TempDir(), "boots.json")
	native := vmm.Verdict{KVM: "native", NsPerInsn: 1}
	f, k := vmm.Features{Driver: "firecracker", Version: "1.17.0"}, &vmm.Kernel{Sum: "one"}
	calls := 0
	fails := func(context.Context) error { calls++; return errors.New("no word of the guest") }
	works := func(context.Context) error { calls++; return nil }
	for _, step := range []struct {
		name   string
		v      vmm.Verdict
		f      vmm.Features
		k      *vmm.Kernel
		boot   func(context.Context) error
		usable bool
		calls  int
	}{
		{"a kernel that does not come up", native, f, k, fails, false, 2},
		{"again", native, f, k, works, false, 0},
		{"another kernel", native, f, &vmm.Kernel{Sum: "two"}, works, true, 1},
		{"again", native, f, &vmm.Kernel{Sum: "two"}, fails, true, 0},
		{"another version", native, vmm.Features{Driver: "firecracker", Version: "1.18.0"}, &vmm.Kernel{Sum: "two"}, fails, false, 2},
		{"another monitor", native, vmm.Features{Driver: "qemu", Version: "7.2.0"}, &vmm.Kernel{Sum: "two"}, works, true, 1},
	} {
		calls = 0
		v := vmm.ProbeBoot(t.Context(), file, step.v, step.f, step.k, step.boot)
		if v.Usable() != step.usable || calls != step.calls || v.Boots == nil || !step.usable && v.Why() == "" {
			t.Errorf("%s: %+v after %d boots, want usable %v after %d", step.name, v, calls, step.usable, step.calls)
		}
	}
	if v := vmm.KeptBoot(file, native, "firecracker"); v.Usable() || !strings.Contains(v.Why(), "no word of the guest") {
		t.Errorf("kept of Firecracker: %+v", v)
	}
	if v := vmm.KeptBoot(file, native, "qemu"); !v.Usable() || v.Boots == nil {
		t.Errorf("kept of QEMU: %+v", v)
	}
	if v := vmm.KeptBoot(file, native, "another"); v.Boots != nil {
		t.Errorf("kept of nobody: %+v", v)
	}
	// One that was interrupted says nothing about the host.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	file = filepath.Join(t.TempDir(), "boots.json")
	vmm.ProbeBoot(ctx, file, native, f, k, fails)
	if v := vmm.KeptBoot(file, native, "firecracker"); v.Boots != nil {
		t.Errorf("an interrupted one was kept: %+v", v)
	}
}
