package container

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Every check says what it saw, and how to mend it where it failed; nothing is left behind.
func TestDoctor(t *testing.T) {
	needRoot(t)
	dir := filepath.Join(t.TempDir(), "not", "there") // as on a machine that never ran a host
	seen := map[string]bool{}
	for _, c := range Doctor(t.Context(), dir, false) {
		t.Logf("%-5v needed=%-5v %s: %s | %s", c.OK, c.Needed, c.Feature, c.Detail, c.Fix)
		if seen[c.Feature] {
			t.Errorf("%s is told twice", c.Feature)
		}
		seen[c.Feature] = true
		if strings.TrimSpace(c.Detail) == "" {
			t.Errorf("%s: says nothing", c.Feature)
		}
		if c.Detail == "yes" || c.Detail == "no" {
			t.Errorf("%s: says %s where it should say what was seen", c.Feature, c.Detail)
		}
		if !c.OK && c.Needed && c.Fix == "" {
			t.Errorf("%s: failed without a way to mend it", c.Feature)
		}
	}
	for _, f := range []string{"root", "layers (EROFS)", "overlay", "cgroups", "disk limits", "network open", "landlock", "open files"} {
		if !seen[f] {
			t.Errorf("nothing is said of %s", f)
		}
	}
	if _, err := os.Lstat(filepath.Dir(dir)); !os.IsNotExist(err) {
		t.Errorf("the state folder is left behind: %v", err)
	}
}

// A kernel without EROFS is no failure: doctor says which way is taken, what it costs and what would be better, and tries it.
func TestDoctorWithoutErofs(t *testing.T) {
	needRoot(t)
	d := &doctor{ctx: t.Context(), dir: t.TempDir(), userns: -1, noErofs: unix.ENODEV}
	d.userNamespace()
	defer func() { unix.Close(d.userns) }()
	d.erofs()
	if len(d.checks) != 3 {
		t.Fatalf("%+v", d.checks)
	}
	way, tried := d.checks[1], d.checks[2]
	if way.OK || way.Needed || !strings.Contains(way.Detail, "unpacked into a folder") || !strings.Contains(way.Detail, unix.ENODEV.Error()) || !strings.Contains(way.Fix, "erofs") {
		t.Errorf("%+v", way)
	}
	if !tried.OK || !tried.Needed {
		t.Errorf("%+v", tried)
	}
}
