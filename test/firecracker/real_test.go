package firecracker_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// These tests drive the operator's Firecracker, so they run where KVM does: in a nested machine, by `make test-firecracker`. Lines that begin
// with "seen:" are for docs/ops/firecracker.md.

func TestMain(m *testing.M) {
	vmtest.Main()
	containertest.Main()
	os.Exit(m.Run())
}

// real makes a backend that uses the operator's programs.
func real(t *testing.T, change ...func(*vm.Config)) *vmtest.Env {
	t.Helper()
	if os.Getenv("DSEC_FIRECRACKER") == "" {
		t.Skip("skip: needs Firecracker (DSEC_FIRECRACKER, DSEC_JAILER): make test-firecracker")
	}
	return vmtest.New(t, change...)
}

func jailed(t *testing.T) {
	t.Helper()
	if os.Getenv("DSEC_FIRECRACKER") != "" && os.Getenv("DSEC_JAILER") == "" {
		t.Skip("skip: needs the jailer (DSEC_JAILER)")
	}
}

func TestConformance(t *testing.T) {
	e := real(t).Suite()
	if parts := os.Getenv("DSEC_PARTS"); parts != "" {
		e.Parts = strings.Split(parts, ",")
	}
	sandboxtest.Run(t, e)
}

// monitors are the pids of the living machines of sandboxes, oldest first.
func monitors(t *testing.T, e *vmtest.Env) (pids []int) {
	t.Helper()
	list, err := warden.NewClient(e.Config.RunDir).List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range list {
		if !a.Ended && !strings.HasPrefix(a.ID, "template-") {
			pids = append(pids, a.Pid)
		}
	}
	return pids
}

func proc(t *testing.T, pid int, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// pss is the proportional share of a process, in KiB.
func pss(t *testing.T, pid int) (n int) {
	t.Helper()
	for line := range strings.Lines(proc(t, pid, "smaps_rollup")) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "Pss:" {
			n, _ = strconv.Atoi(f[1])
		}
	}
	return n
}

// A jailed monitor is nobody, sees nothing of the host's but what its machine is made of, and is alone among processes.
func TestJail(t *testing.T) {
	jailed(t)
	e := real(t)
	b := sandboxtest.NewBox(t, e.Suite())
	b.Out(t, "true")
	pids := monitors(t, e)
	if len(pids) != 1 {
		t.Fatalf("monitors %v", pids)
	}
	pid := pids[0]
	status := map[string]string{}
	for line := range strings.Lines(proc(t, pid, "status")) {
		k, v, _ := strings.Cut(line, ":")
		status[k] = strings.Join(strings.Fields(v), " ")
	}
	uid := strings.Fields(status["Uid"])
	if n, _ := strconv.Atoi(uid[0]); uint32(n) < e.Config.UIDBase || uint32(n) >= e.Config.UIDBase+uint32(e.Config.Slots) || uid[0] != uid[1] || uid[0] != uid[2] || uid[0] != uid[3] {
		t.Errorf("uids %v", uid)
	}
	for _, c := range []string{"CapEff", "CapPrm", "CapInh", "CapAmb"} {
		if strings.Trim(status[c], "0") != "" {
			t.Errorf("%s %s", c, status[c])
		}
	}
	if f := strings.Fields(status["NSpid"]); len(f) != 2 || f[1] != "1" {
		t.Errorf("it is process %v", f)
	}
	for _, ns := range []string{"pid", "mnt", "ipc", "uts"} {
		mine, _ := os.Readlink("/proc/self/ns/" + ns)
		its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		if err != nil || mine == its {
			t.Errorf("namespace %s is %q, the host's %q, %v", ns, its, mine, err)
		}
	}
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", pid))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range list {
		names = append(names, f.Name())
	}
	for _, n := range names {
		if !slices.Contains([]string{"api.sock", "vsock.sock", "dev", "run", "state", "memory", filepath.Base(e.Config.Firecracker), "pages.sock", "firecracker.pid"}, n) && !strings.HasPrefix(n, "disk") {
			t.Errorf("it sees %q among %q", n, names)
		}
	}
	for line := range strings.Lines(proc(t, pid, "mounts")) {
		if at := strings.Fields(line)[1]; at != "/" && at != "/memory" && !strings.HasPrefix(at, "/disk") {
			t.Errorf("mounted in its jail: %s", line)
		}
	}
	// The other one's files are of another user.
	c := sandboxtest.NewBox(t, e.Suite())
	c.Out(t, "true")
	two := monitors(t, e)
	var st [2]unix.Stat_t
	for i, p := range two {
		if err := unix.Stat(fmt.Sprintf("/proc/%d/root", p), &st[i]); err != nil {
			t.Fatal(err)
		}
	}
	if len(two) != 2 || st[0].Uid == st[1].Uid || st[0].Mode&0o077 != 0 {
		t.Errorf("folders of %v: users %d and %d, mode %o", two, st[0].Uid, st[1].Uid, st[0].Mode)
	}
	if !strings.Contains(proc(t, pid, "cgroup"), "dsec-"+e.Config.Instance+"-vm/") {
		t.Errorf("cgroup %q", proc(t, pid, "cgroup"))
	}
}

// Clones of one template share its memory, each draws other random numbers and has the right time, however their memory comes.
func TestClones(t *testing.T) {
	for name, change := range map[string]func(*vm.Config){
		"by file":           func(*vm.Config) {},
		"by faults":         func(c *vm.Config) { c.Faults = true },
		"of a mapped image": func(c *vm.Config) { c.Mapped = true },
	} {
		t.Run(name, func(t *testing.T) {
			if name == "by faults" {
				jailed(t)
			}
			e := real(t, change)
			s := e.Suite()
			seen := map[string]bool{}
			var boxes []*sandboxtest.Box
			for range 5 {
				began := time.Now()
				b := sandboxtest.NewBox(t, s)
				got := b.Out(t, "head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid")
				t.Logf("seen: clone %s: %.2f s to its first result", name, time.Since(began).Seconds())
				boxes = append(boxes, b)
				for line := range strings.Lines(got) {
					if seen[line] {
						t.Errorf("two clones gave %q", line)
					}
					seen[line] = true
				}
				now, err := strconv.ParseInt(strings.TrimSpace(b.Out(t, "date +%s")), 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				if off := time.Since(time.Unix(now, 0)); off < -2*time.Second || off > 30*time.Second {
					t.Errorf("the clock is off by %v", off)
				}
			}
			mapped := boxes[0].Out(t, "cat /proc/cmdline")
			if strings.Contains(mapped, "dsec.mapped=") != (name == "of a mapped image") {
				t.Errorf("command line %q", mapped)
			}
			sum := 0
			pids := monitors(t, e)
			if len(pids) != len(boxes) {
				t.Fatalf("%d monitors of %d clones", len(pids), len(boxes))
			}
			for _, pid := range pids {
				sum += pss(t, pid)
			}
			t.Logf("seen: clone %s: %.1f MiB of proportional share each of %d", name, float64(sum)/1024/float64(len(pids)), len(pids))
			if sum/len(pids) > 64<<10 {
				t.Errorf("%d KiB each: they share nothing", sum/len(pids))
			}
		})
	}
}

// What a machine's programs free goes back to the host.
func TestMemoryComesBack(t *testing.T) {
	e := real(t)
	b := sandboxtest.NewBox(t, e.Suite())
	b.Out(t, "true")
	pid := monitors(t, e)[0]
	before := pss(t, pid)
	b.Out(t, "head -c 60000000 /dev/urandom >/dev/shm/f")
	full := pss(t, pid)
	if full-before < 50<<10 {
		t.Fatalf("60 MB more in the machine made %d KiB of %d", full, before)
	}
	b.Out(t, "rm /dev/shm/f")
	var now int
	sandboxtest.Eventually(t, func() bool { now = pss(t, pid); return now-before < 30<<10 }, func() string {
		return fmt.Sprintf("%d KiB before, %d with a file, %d after its end", before, full, now)
	})
	t.Logf("seen: memory: %d MiB before, %d with a file of 57 MiB, %d after its end", before>>10, full>>10, now>>10)
}

// A warden that is killed takes its machines with it, also jailed ones and those whose memory it served.
func TestDeadWardenTakesMachines(t *testing.T) {
	jailed(t)
	for name, faults := range map[string]bool{"by file": false, "by faults": true} {
		t.Run(name, func(t *testing.T) {
			e := real(t, func(c *vm.Config) { c.Faults = faults })
			b := sandboxtest.NewBox(t, e.Suite())
			b.Out(t, "true")
			pid := monitors(t, e)[0]
			w := wardenOf(t, e)
			if err := unix.Kill(w, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			sandboxtest.Eventually(t, func() bool { return unix.Kill(pid, 0) != nil }, func() string { return "the monitor lives on" })
			if err := b.Instance().Destroy(t.Context()); err != nil {
				t.Fatal(err)
			}
			sandboxtest.Eventually(t, func() bool { return len(e.Left(t)) == 0 }, func() string { return strings.Join(e.Left(t), ", ") })
		})
	}
}

func wardenOf(t *testing.T, e *vmtest.Env) int {
	t.Helper()
	procs, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		text, _ := os.ReadFile("/proc/" + p.Name() + "/cmdline")
		if args := bytes.Split(text, []byte{0}); len(args) > 4 && string(args[1]) == "warden" && string(args[3]) == e.Config.RunDir {
			pid, _ := strconv.Atoi(p.Name())
			return pid
		}
	}
	t.Fatal("no warden")
	return 0
}
