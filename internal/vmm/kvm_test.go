package vmm_test

import (
	"encoding/json"
	"os"
	"path/filepath"
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
