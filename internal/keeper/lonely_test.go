package keeper

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A keeper whose host went away ends when it keeps nothing, and only then; a host in time finds it as it was.
func TestLonelyKeeperEnds(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	h := &house{t: t, dir: dir, rec: newRecorder(), cfg: Config{Dir: filepath.Join(dir, "run"), Lonely: 2 * time.Second, // so long may the test take to come back to it
		Instance: fmt.Sprintf("t%dx%d", os.Getpid(), instances.Add(1))}}
	if err := Spawn(within(t), "/proc/self/exe", []string{"keeper"}, h.cfg); err != nil {
		t.Fatal(err)
	}
	h.dial()
	ended := func() bool {
		lock, err := lockDir(h.cfg.Dir)
		if err == nil {
			lock.Close()
		}
		return err == nil
	}
	t.Cleanup(func() {
		if !ended() {
			h.dial()
			h.c.Shutdown(context.Background())
		}
	})
	if err := mountFile(within(t), h.c, "base", layerFile(t, nil)); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Deliver(within(t)); err != nil {
		t.Fatal(err)
	}
	time.Sleep(h.cfg.Lonely + time.Second)
	if ended() {
		t.Fatal("it ended under its host")
	}
	id := h.create()
	h.c.Close()
	time.Sleep(h.cfg.Lonely + time.Second)
	if ended() {
		t.Fatal("it ended with a sandbox")
	}
	h.dial()
	if err := h.c.Deliver(within(t)); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Destroy(within(t), id); err != nil {
		t.Fatal(err)
	}
	h.c.Close()
	for end := time.Now().Add(longest); !ended(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not end")
		}
	}
	for _, g := range leftGroups(h.cfg.Instance) {
		t.Errorf("left: cgroup %s", g)
	}
}
