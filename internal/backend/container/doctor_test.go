package container

import (
	"strings"
	"testing"
)

// Every check says what it saw, and how to mend it where it failed; nothing is left behind.
func TestDoctor(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	seen := map[string]bool{}
	for _, c := range Doctor(t.Context(), dir) {
		t.Logf("%-5v needed=%-5v %s: %s | %s", c.OK, c.Needed, c.Feature, c.Detail, c.Fix)
		if seen[c.Feature] {
			t.Errorf("%s is told twice", c.Feature)
		}
		seen[c.Feature] = true
		if strings.TrimSpace(c.Detail) == "" {
			t.Errorf("%s: says nothing", c.Feature)
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
	if left, err := entries(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the state folder: %v, %v", left, err)
	}
}
