package keeper

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// berthsOf are the groups that the instance's keeper has in the v2 hierarchy, each with its process 1.
func berthsOf(instance string) map[string]int {
	all := map[string]int{}
	for _, p := range []string{"/sys/fs/cgroup/dsec-", "/sys/fs/cgroup/unified/dsec-"} {
		groups, _ := filepath.Glob(p + instance + "/*/s-*")
		for _, g := range groups {
			for _, in := range []string{"", "init"} { // where limits are in version 2 it has a group of its own
				text, err := os.ReadFile(filepath.Join(g, in, "cgroup.procs"))
				if pid, _ := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && pid > 0 {
					all[g] = pid
				}
			}
		}
	}
	return all
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(longest); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never came: %s", what)
		}
	}
}

// Berths are made again after each birth, are no sandboxes, and are never more than said.
func TestBerthsAreRefilled(t *testing.T) {
	h := open(t)
	full := func(alive int) func() bool {
		return func() bool { return len(berthsOf(h.cfg.Instance)) == Berths+alive }
	}
	eventually(t, "berths at the start", full(0))
	if l, err := h.c.List(within(t)); err != nil || len(l) != 0 {
		t.Fatalf("sandboxes listed before any was made: %v, %v", l, err)
	}
	var ids []sandbox.ID
	for range Berths + 2 {
		ids = append(ids, h.create())
	}
	eventually(t, "berths beside sandboxes", full(len(ids)))
	for _, id := range ids {
		if err := h.c.Destroy(within(t), id); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "berths after the last end", full(0))
}

// A process 1 that waits for its sandbox may die: its berth is not given.
func TestDeadBerthsAreNotGiven(t *testing.T) {
	h := open(t)
	var was map[string]int
	eventually(t, "berths", func() bool {
		was = berthsOf(h.cfg.Instance)
		for _, pid := range was {
			if pid <= 0 {
				return false
			}
		}
		return len(was) == Berths
	})
	for _, pid := range was {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the end of a process 1", func() bool {
			text, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
			return len(text) == 0 || strings.Contains(string(text), ") Z ")
		})
	}
	for range Berths + 1 {
		if r := h.run(h.create(), sh("echo hi")); string(r.out) != "hi\n" {
			t.Errorf("%q %+v", r.out, r.outcome)
		}
	}
	for at := range was {
		if _, err := os.Stat(at); err == nil {
			t.Errorf("the group of a dead process 1 is there: %s", at)
		}
	}
}

// What lies below a sandbox's root is nothing of the host's, and the sandbox sees no mount of it.
func TestNothingBelowTheRoot(t *testing.T) {
	h := open(t)
	id := h.create()
	r := h.run(id, sh("cat /proc/self/mountinfo"))
	var at []string
	for line := range strings.Lines(string(r.out)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			t.Fatalf("mountinfo: %q", line)
		}
		if f[4] == "/" && !strings.Contains(line, " - overlay ") {
			t.Errorf("the root is not the sandbox's: %q", line)
		}
		if strings.Contains(line, h.dir) || strings.Contains(f[4], "drop") {
			t.Errorf("a mount of the host's: %q", line)
		}
		at = append(at, f[4])
	}
	for _, want := range []string{"/", "/dev", "/dev/pts", "/dev/shm", "/proc", "/proc/sys", "/sys"} {
		if !slices.Contains(at, want) {
			t.Errorf("nothing is mounted at %s: %q", want, at)
		}
	}
	// Seen from outside, below the root there is the base alone, with the upper's folder, which waits for its end out of reach.
	l, err := h.c.List(within(t))
	if err != nil || len(l) != 1 {
		t.Fatalf("%v, %v", l, err)
	}
	if l[0].Born.Group == "" {
		t.Error("the sandbox's group is not told")
	}
	if pid := berthsOf(h.cfg.Instance)[l[0].Born.Group]; pid != l[0].Born.Pid {
		t.Errorf("process 1 is %d, in the group told there is %d", l[0].Born.Pid, pid)
	}
}

// The first berth that misses waits for a quiet moment, others do not.
func TestBerthsWaitForQuiet(t *testing.T) {
	for _, c := range []struct {
		name    string
		ready   int
		every   time.Duration // something goes on; 0: nothing
		removed time.Duration // a sandbox has gone then; 0: none
		stale   bool          // one had gone before
		from    time.Duration
		to      time.Duration
	}{
		{"quiet", Berths - 1, 0, 0, false, quietTime, quietTime},
		{"stirred all the time", Berths - 1, time.Millisecond, 0, false, quietWait, quietWait + quietTime},
		{"a sandbox goes", Berths - 1, time.Millisecond, 7 * time.Millisecond, false, 7 * time.Millisecond, 7 * time.Millisecond},
		{"a sandbox had gone", Berths - 1, 0, 0, true, quietTime, quietTime},
		{"two miss", Berths - 2, time.Millisecond, 0, false, 0, 0},
		{"all miss", 0, time.Millisecond, 0, false, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newBerths()
				for range c.ready {
					p.ready <- &berth{}
				}
				if c.stale {
					p.removed()
				}
				p.stir()
				ctx, cancel := context.WithCancel(t.Context())
				var stirring sync.WaitGroup
				if c.every > 0 {
					stirring.Go(func() {
						for ctx.Err() == nil {
							time.Sleep(c.every)
							p.stir()
						}
					})
				}
				if c.removed > 0 {
					time.AfterFunc(c.removed, p.removed)
				}
				start := time.Now()
				p.awaitQuiet(ctx)
				took := time.Since(start)
				cancel()
				stirring.Wait()
				if took < c.from || took > c.to {
					t.Errorf("waited %v, want %v to %v", took, c.from, c.to)
				}
			})
		})
	}
}
