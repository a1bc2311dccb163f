package vm_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// standIn makes a program that does for Firecracker until something is to run in a machine, or one that says its version alone.
func standIn(t *testing.T, version string, works bool) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "dsec-fc-") // the monitor's user has to reach it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	text := "#!/bin/sh\nexport DSEC_FAKE_FIRECRACKER_VERSION=" + version + "\nexec " + dir + "/test firecracker \"$@\"\n"
	if !works {
		text = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Firecracker v" + version + "' && exit 0\necho no machine today >&2\nexit 3\n"
	}
	for name, data := range map[string][]byte{"test": self, "firecracker": []byte(text)} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "firecracker")
}

// Who asks for Firecracker gets it or the reason, and never another monitor; a machine is tried before it is believed in.
func TestFirecrackerIsNeverSwapped(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	if os.Getenv("DSEC_FIRECRACKER") != "" {
		t.Skip("skip: the stand-in is for where no real one is")
	}
	native := vmm.Verdict{KVM: "native", NsPerInsn: 1}
	for name, c := range map[string]struct {
		verdict vmm.Verdict
		program string
		reason  string // empty: it is taken
		levels  []sandbox.PauseLevel
	}{
		"KVM that emulates":      {vmm.Verdict{KVM: "emulated", Reason: "an instruction takes 280 ns"}, standIn(t, "1.17.0", true), "280 ns", nil},
		"no KVM":                 {vmm.Verdict{KVM: "absent", Reason: "/dev/kvm: no such file"}, standIn(t, "1.17.0", true), "no such file", nil},
		"no program":             {native, "/nonexistent/firecracker", "no such file", nil},
		"an old program":         {native, standIn(t, "1.12.0", true), "want 1.16.0", nil},
		"machines that fail":     {native, standIn(t, "1.17.0", false), "no machine today", nil},
		"a good one":             {native, standIn(t, "1.17.0", true), "", []sandbox.PauseLevel{sandbox.Frozen, sandbox.Saved}},
		"one that may not pause": {native, standIn(t, "1.16.1", true), "", []sandbox.PauseLevel{sandbox.Saved}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			kernel := filepath.Join(dir, "kernel")
			if err := errors.Join(os.Mkdir(kernel, 0o755), os.WriteFile(kernel+"/vmlinux", []byte("\x7fELF"), 0o644)); err != nil {
				t.Fatal(err)
			}
			cfg := vm.Config{Name: "microvm", Instance: "swap", Host: "test", StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"),
				Kernel: kernel, Guest: vmtest.Guest(t), Warden: []string{os.Args[0], "warden"}, Firecracker: c.program}
			b, err := vm.New(t.Context(), cfg, vm.Deps{Verdict: c.verdict, Log: slog.New(slog.DiscardHandler)})
			if list, _ := os.ReadDir(filepath.Join(dir, "run")); slices.ContainsFunc(list, func(e os.DirEntry) bool { return e.IsDir() }) {
				t.Errorf("the trial left %v", list)
			}
			if c.reason != "" {
				if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), c.reason) || !strings.Contains(err.Error(), "Firecracker") {
					t.Errorf("%v; want ErrUnsupported with %q", err, c.reason)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := b.Capabilities()
			if !slices.Equal(got.PauseLevels, c.levels) || !strings.HasPrefix(got.Features["driver"], "firecracker 1.") || got.Features["accelerator"] != "kvm" || got.Features["degraded"] != "" {
				t.Errorf("%+v", got)
			}
			if got.Fork != "memory" {
				t.Errorf("forks with %q, want memory: a fork saves, which every version can", got.Fork)
			}
			if (got.Features["pause"] == "") != slices.Contains(c.levels, sandbox.Frozen) {
				t.Errorf("pause levels %v, because %q", got.PauseLevels, got.Features["pause"])
			}
		})
	}
}
