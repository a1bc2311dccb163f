// Package runtimes_test shows on a host with cgroup v2 alone what programs inside a sandbox see of its limits, and that the groups of
// commands are used again. test/kernels/run.sh runs it; elsewhere it skips.
package runtimes_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const patience = 2 * time.Minute

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "see" {
		see()
		return
	}
	containertest.Main()
	os.Exit(m.Run())
}

// see is what this program does inside a sandbox: it tells what a Go program finds of its limits.
func see() {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Printf("procs=%d cpus=%d\n", runtime.GOMAXPROCS(0), runtime.NumCPU())
	path := strings.TrimSpace(strings.TrimPrefix(string(own), "0::"))
	for line := range strings.Lines(string(info)) {
		before, after, _ := strings.Cut(line, " - ")
		f := strings.Fields(before)
		if !strings.HasPrefix(after, "cgroup2 ") {
			continue
		}
		dir := filepath.Join(f[4], strings.TrimPrefix(path, f[3])) // as every reader of the leaf does
		for _, name := range []string{"memory.max", "cpu.max"} {
			text, err := os.ReadFile(filepath.Join(dir, name))
			fmt.Printf("%s=%s", name, strings.TrimSuffix(string(text), "\n"))
			if err != nil {
				fmt.Print(err)
			}
			fmt.Println()
		}
	}
}

// TestDoctor records what this kernel has and fails when a container sandbox can't be had.
func TestDoctor(t *testing.T) {
	needV2(t)
	for _, c := range container.Doctor(t.Context(), t.TempDir(), false) {
		fmt.Printf("seen: %-40s %-5t %s\n", c.Feature, c.OK, c.Detail)
		if c.Needed && !c.OK {
			t.Errorf("%s: %s", c.Feature, c.Detail)
		}
	}
}

func needV2(t *testing.T) {
	t.Helper()
	have, _ := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
	for _, c := range []string{"memory", "pids", "cpu"} {
		if !strings.Contains(" "+strings.TrimSpace(string(have))+" ", " "+c+" ") {
			t.Skipf("skip: needs cgroup v2 controllers (%s is not among them); make test-kernels has them", c)
		}
	}
}

func TestRuntimesSeeTheLimit(t *testing.T) {
	needV2(t)
	tree := os.Getenv("DSEC_RUNTIMES")
	if tree == "" {
		t.Skip("skip: needs cgroup v2 controllers and a tree of runtimes in DSEC_RUNTIMES: make test-kernels has both")
	}
	e := containertest.New(t, containertest.Options{})
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "usr/bin/see"), self, 0o755); err != nil {
		t.Fatal(err)
	}
	d, err := e.Catalogue.ImportDir(t.Context(), "runtimes", tree, layer.Options{Source: "runtimes"})
	if err != nil {
		t.Fatal(err)
	}
	s := &sandbox.Spec{Layers: []string{string(d.ID)}, Env: []string{"PATH=/usr/bin:/bin"},
		Resources: sandbox.Resources{Memory: 1 << 30, Disk: 64 << 20, Pids: 512, CPU: 1000}}
	x, k := create(t, e, s)
	const gib = "1073741824"
	out := run(t, s, x, k, "see", "see", "see")
	fmt.Printf("seen: go: %s\n", strings.Join(strings.Fields(out), " "))
	for _, want := range []string{"memory.max=" + gib + "\n", "cpu.max=100000 100000\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("a Go program sees %q, want %q", out, want)
		}
	}
	// The Go runtime takes two at least, so a machine of two shows nothing here.
	if runtime.NumCPU() > 2 && !strings.Contains(out, "procs=2 ") {
		t.Errorf("a Go program under a limit of one CPU: %q, want procs=2", out)
	}
	if out := run(t, s, x, k, "node", "node", "-p", "process.constrainedMemory()"); strings.TrimSpace(out) != gib {
		t.Errorf("node sees a memory of %q, want %s", out, gib)
	} else {
		fmt.Printf("seen: node: memory %s", out)
	}
	heap, err := strconv.ParseInt(strings.TrimSpace(run(t, s, x, k, "heap", "node", "-p", "v8.getHeapStatistics().heap_size_limit")), 10, 64)
	if err != nil || heap > 1<<30 {
		t.Errorf("node's heap may grow to %d (%v), want below 1 GiB", heap, err)
	}
	fmt.Printf("seen: node: heap limit %d\n", heap)
	out = run(t, s, x, k, "java", "sh", "-c", "java -XX:+PrintFlagsFinal -version 2>/dev/null | awk '$2==\"MaxHeapSize\"{print $4}'; java -XshowSettings:system -version 2>&1 | grep -E 'Provider|CPU|Memory Limit|Available'")
	fmt.Printf("seen: java: %s\n", strings.Join(strings.Fields(out), " "))
	// A quarter of the limit.
	if first, _, _ := strings.Cut(out, "\n"); first != "268435456" {
		t.Errorf("java: a heap of at most %q, want 268435456; it says %q", first, out)
	}
	if !strings.Contains(out, "Memory Limit: 1.00G") {
		t.Errorf("java says %q, want a memory limit of 1.00G", out)
	}
}

// TestCommandGroups runs many commands, one after another and some at once, in one sandbox.
func TestCommandGroups(t *testing.T) {
	needV2(t)
	e := containertest.New(t, containertest.Options{})
	s := &sandbox.Spec{Layers: []string{e.Layer}, Env: []string{"PATH=/bin"},
		Resources: sandbox.Resources{Memory: 256 << 20, Disk: 32 << 20, Pids: 128, CPU: 1500, CPUWeight: 250}}
	x, k := create(t, e, s)
	groups := func() []string {
		dirs, err := filepath.Glob("/sys/fs/cgroup/dsec-" + e.Config.Instance + "/*/*/cmd-*")
		if err != nil {
			t.Fatal(err)
		}
		return dirs
	}
	for i := range 60 {
		run(t, s, x, k, fmt.Sprintf("c%d", i), "true")
	}
	if n := len(groups()); n == 0 || n > 8 {
		t.Errorf("60 commands one after another: %d groups, want a few that are used again", n)
	}
	var wg sync.WaitGroup
	for i := range 12 {
		id := fmt.Sprintf("p%d", i)
		start(t, s, x, id, "sleep", "0.2")
		wg.Go(func() { k.wait(t, id) })
	}
	wg.Wait()
	for i := range 20 {
		run(t, s, x, k, fmt.Sprintf("d%d", i), "true")
	}
	all := groups()
	fmt.Printf("seen: groups after 92 commands: %d\n", len(all))
	if len(all) == 0 || len(all) > 16 {
		t.Errorf("after 12 at once: %d groups", len(all))
	}
	for _, d := range append(all, filepath.Dir(all[0])) {
		for file, want := range map[string]string{"memory.max": "268435456", "cpu.max": "150000 100000", "cpu.weight": "250"} {
			got, err := os.ReadFile(filepath.Join(d, file))
			if err != nil || strings.TrimSpace(string(got)) != want {
				t.Errorf("%s/%s: %q (%v), want %s", d, file, got, err, want)
			}
		}
	}
	if got := run(t, s, x, k, "inside", "sh", "-c", `cd /sys/fs/cgroup$(sed s/0::// /proc/self/cgroup); cat memory.max cpu.max; (echo 1 >cpu.weight) 2>/dev/null || echo refused`); got != "268435456\n150000 100000\nrefused\n" {
		t.Errorf("inside: %q", got)
	}
}

// TestPeakPerStep: where the kernel can start a new maximum for a reader, each step has its own; elsewhere a step that did not raise
// the sandbox's maximum says that it is unknown.
func TestPeakPerStep(t *testing.T) {
	needV2(t)
	e := containertest.New(t, containertest.Options{})
	s := &sandbox.Spec{Layers: []string{e.Layer}, Env: []string{"PATH=/bin"}, Resources: sandbox.Resources{Memory: 256 << 20, Disk: 32 << 20, Pids: 128}}
	x, k := create(t, e, s)
	eat := func(id, size string) int64 {
		start(t, s, x, id, "dd", "if=/dev/zero", "of=/dev/null", "bs="+size, "count=1")
		return k.wait(t, id).Usage.MemoryPeak
	}
	large, small := eat("large", "100M"), eat("small", "20M")
	var u unix.Utsname
	unix.Uname(&u)
	fmt.Printf("seen: peak of a step of 100 MiB: %d, then of one of 20 MiB: %d\n", large, small)
	if large < 100<<20 || large > 140<<20 {
		t.Errorf("a step of 100 MiB peaked at %d", large)
	}
	if small != -1 && (small < 20<<20 || small > 60<<20) {
		t.Errorf("a step of 20 MiB after one of 100 peaked at %d, want its own figure or -1", small)
	}
}

// TestWays records which of two ways a birth took.
func TestWays(t *testing.T) {
	needV2(t)
	e := containertest.New(t, containertest.Options{})
	s := &sandbox.Spec{Layers: []string{e.Layer}, Env: []string{"PATH=/bin"}, Resources: sandbox.Resources{Memory: 256 << 20, Disk: 32 << 20, Pids: 128}}
	x, k := create(t, e, s)
	shm := strings.TrimSpace(run(t, s, x, k, "shm", "stat", "-f", "-c", "%T", "/dev/shm"))
	run(t, s, x, k, "file", "sh", "-c", "touch /srv/made-as-root && chown 1000:1000 /srv/made-as-root")
	var owners []string
	filepath.WalkDir(e.Uppers.Describe().Dir, func(path string, _ os.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil && filepath.Base(path) == "made-as-root" && unix.Lstat(path, &st) == nil {
			owners = append(owners, strconv.Itoa(int(st.Uid)))
		}
		return nil
	})
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	d := e.Uppers.Describe()
	fmt.Printf("seen: way: /dev/shm is %s; an inner 1000 lies on disk as %v; %d loop devices in use; uppers by %s: %s\n", shm, owners, len(loops), d.Driver, d.Limit)
	for _, n := range d.Notes {
		fmt.Printf("seen: way: %s\n", n)
	}
	if len(owners) != 1 || owners[0] != "1000" {
		t.Errorf("owners on disk: %v, want 1000: id-mapped mounts are in every kernel that is tested here", owners)
	}
}

func create(t *testing.T, e *containertest.Env, s *sandbox.Spec) (sandbox.Instance, *sink) {
	t.Helper()
	s.Fill()
	k := &sink{ends: map[string]chan sandbox.Outcome{}}
	x, err := e.Backend.Create(t.Context(), sandbox.NewID(sandbox.NewHostID()), s, k)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := x.Destroy(ctx); err != nil {
			t.Errorf("destroy: %v", err)
		}
	})
	return x, k
}

func start(t testing.TB, s *sandbox.Spec, x sandbox.Instance, id string, argv ...string) {
	t.Helper()
	c := &sandbox.Command{ID: id, Argv: argv}
	c.Fill(s)
	if err := x.Start(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

// run runs a command to its exit with 0 and returns what it wrote.
func run(t testing.TB, s *sandbox.Spec, x sandbox.Instance, k *sink, id string, argv ...string) string {
	t.Helper()
	start(t, s, x, id, argv...)
	o := k.wait(t, id)
	k.mu.Lock()
	out := k.out.String()
	k.out.Reset()
	k.mu.Unlock()
	if o.Kind != sandbox.Exited || o.Code != 0 {
		t.Errorf("%q: %+v; output %q", argv, o, out)
	}
	return out
}

// sink keeps ends and output.
type sink struct {
	mu   sync.Mutex
	ends map[string]chan sandbox.Outcome
	out  strings.Builder
}

func (s *sink) end(cmd string) chan sandbox.Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ends[cmd] == nil {
		s.ends[cmd] = make(chan sandbox.Outcome, 1)
	}
	return s.ends[cmd]
}

func (s *sink) wait(t testing.TB, cmd string) sandbox.Outcome {
	t.Helper()
	select {
	case o := <-s.end(cmd):
		return o
	case <-time.After(patience):
		t.Errorf("%s did not end", cmd)
		return sandbox.Outcome{}
	}
}

func (s *sink) Output(_ context.Context, _ string, _ sandbox.StreamName, _ int64, data []byte, _ bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out.Write(data)
	return nil
}

func (s *sink) CommandEnded(_ context.Context, cmd string, o sandbox.Outcome) error {
	s.end(cmd) <- o
	return nil
}

func (s *sink) SessionEnded(context.Context, string, sandbox.Outcome) error { return nil }
func (s *sink) Ended(context.Context, sandbox.Cause) error                  { return nil }
func (s *sink) Denied(context.Context, string, string, string)              {}
