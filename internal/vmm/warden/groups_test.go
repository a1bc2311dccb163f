package warden

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Groups that the kernel holds for longer than a monitor's end waits go when it lets go, but not those of the next monitor of that name.
func TestGroupsThatTheKernelHolds(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	g, err := findGroups(fmt.Sprintf("dsec-held%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	if err := g.setup(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.remove(); err != nil {
			t.Error(err)
		}
	})
	defer func(was time.Duration) { removeBound = was }(removeBound)
	removeBound = 20 * time.Millisecond
	hold := func(id string) (letGo func()) {
		f, err := g.make(&Process{ID: id})
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		child := filepath.Join(g.dir("memory", id), "child")
		if err := os.Mkdir(child, 0o755); err != nil {
			t.Fatal(err)
		}
		g.removeOf(id)
		if _, err := os.Stat(child); err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := os.Remove(child); err != nil {
				t.Error(err)
			}
		}
	}
	gone := func(id string) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			g.mu.Lock()
			stale := g.stale[id]
			g.mu.Unlock()
			if _, err := os.Stat(g.dir("memory", id)); os.IsNotExist(err) && !stale {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the groups of %s stay", id)
			}
		}
	}
	hold("a")()
	gone("a")
	letGo := hold("b")
	if g.in2["memory"] { // there no other of that name begins before it is gone
		letGo()
		gone("b")
		return
	}
	f, err := g.make(&Process{ID: "b"})
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	letGo()
	time.Sleep(10 * removeBound)
	for _, d := range g.dirs("b") {
		if _, err := os.Stat(d); err != nil {
			t.Errorf("a group of a new monitor went: %v", err)
		}
	}
	g.removeOf("b")
	gone("b")
}
