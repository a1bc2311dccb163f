// VM measures the backend microvm: machines that boot, clones of a template, what each costs in memory and when idle, waking, and a command
// in an open session; beside plain QEMU that boots the same kernel. See docs/ops/vms.md for what each line means. The guests' kernel is found
// as a host finds it (DSEC_GUEST_KERNEL).
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/vmm"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == vmm.ProbeArg {
		os.Exit(vmm.ProbeMain())
	}
	cold := flag.Int("cold", 5, "machines that boot, one after another")
	clones := flag.Int("clones", 20, "clones that live at once")
	execs := flag.Int("execs", 200, "commands in an open session")
	prefix := flag.String("prefix", "vm", "begin of the lines' names")
	flag.StringVar(&settings, "settings", "", "more lines for [vm] of the config, separated by semicolons")
	withPlain := flag.Bool("plain", true, "measure plain QEMU beside, where there is Debian's kernel")
	many := flag.Int("crowd", 0, "clones of one template that live at once, each paused once it has answered; measures this alone")
	wakes := flag.Int("wakes", 40, "clones of -crowd that are woken again")
	flag.BoolVar(&ready, "ready", true, "a machine waits for the next create; without, vm.clone is of clones that are made on demand")
	debian := flag.String("debian", "", "folder with Debian's kernel: measures with it, too, as PREFIX.debian, and plain QEMU with it, as PREFIX.plain")
	flag.Float64Var(&cpus, "cpu", 0, "CPUs of each sandbox, 0 for no cap")
	flag.Parse()
	ctx, cancel := measure.Context()
	defer cancel()
	if strings.Contains(settings, "firecracker") {
		ready = false // its clones are measured as they are made
	}
	if *many > 0 {
		if err := crowd(ctx, *prefix, *many, *wakes); err != nil {
			fmt.Fprintln(os.Stderr, "bench vm:", err)
			os.Exit(1)
		}
		return
	}
	n := counts{cold: *cold, clones: *clones, execs: *execs}
	err := run(ctx, *prefix, n)
	if err == nil && *debian != "" {
		if err = os.Setenv("DSEC_GUEST_KERNEL", *debian); err == nil {
			err = run(ctx, *prefix+".debian", n)
		}
		if err == nil && *withPlain {
			err = plainAll(ctx, *prefix+".plain", *debian, n)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench vm:", err)
		os.Exit(1)
	}
}

const memory = 128 << 20

var (
	settings string
	ready    bool
	cpus     float64
)

type counts struct{ cold, clones, execs int }

func run(ctx context.Context, prefix string, n counts) error {
	if vm.FindKernel("/var/lib/dsec") == "" {
		measure.Note("vm: no kernel for guests (make guest-kernel, or DSEC_GUEST_KERNEL): nothing to measure")
		return nil
	}
	boots, err := bootAll(ctx, n.cold)
	if err != nil {
		return err
	}
	measure.Print(prefix+".cold", boots.Percentile(50).Seconds(), "s")
	return cloneAll(ctx, prefix, boots, n)
}

// warm starts a server and has it make its template; what names the measurement in the remark on that.
func warm(ctx context.Context, what, more string) (s *measure.Server, end func() error, err error) {
	s, end, err = server(ctx, more)
	if err != nil {
		return nil, nil, err
	}
	b, took, err := first(ctx, s, options(s))
	if err == nil {
		measure.Note("%s: the first sandbox, with its template, took %.2f s", what, took.Seconds())
		err = b.Stop(ctx)
	}
	if err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return s, end, nil
}

// server starts one with more lines of [vm].
func server(ctx context.Context, more string) (s *measure.Server, end func() error, err error) {
	f, err := os.CreateTemp("", "dsec-bench-*.toml")
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	if _, err := f.WriteString("[vm]\n" + more + "\n" + strings.ReplaceAll(settings, ";", "\n") + "\n"); err != nil {
		return nil, nil, err
	}
	s, err = measure.StartEmpty(ctx, measure.Config{Pool: "2g", Args: []string{"--config", f.Name()}})
	if err != nil {
		os.Remove(f.Name())
		return nil, nil, err
	}
	end = func() error { return errors.Join(s.Stop(), os.Remove(f.Name())) }
	tree, err := measure.Tar()
	if err == nil {
		m, e := s.Client.ImportLayer(ctx, "base/bench", "bench", bytes.NewReader(tree))
		if err = e; err == nil {
			s.Layer = m.Layer.Id
		}
	}
	if err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return s, end, nil
}

func options(s *measure.Server) client.Options {
	o := s.Options()
	o.Backend, o.AllowDegraded, o.Memory, o.Disk, o.Deadline = "microvm", true, memory, 1<<30, 15*time.Minute
	o.CPU = cpus
	return o
}

// first makes a sandbox and runs a command in it.
func first(ctx context.Context, s *measure.Server, o client.Options) (*client.Sandbox, time.Duration, error) {
	began := time.Now()
	b, err := s.Client.RunContainer(ctx, o)
	if err != nil {
		return nil, 0, err
	}
	if err := says(ctx, b, "up"); err != nil {
		return nil, 0, errors.Join(err, b.Stop(ctx))
	}
	return b, time.Since(began), nil
}

// says has a sandbox echo a word.
func says(ctx context.Context, b *client.Sandbox, word string) error {
	r, err := b.Exec(ctx, "/bin/echo", word)
	if err == nil && string(r.Stdout) != word+"\n" {
		err = fmt.Errorf("a command ended as %v with %q", r.Outcome, r.Stdout)
	}
	return err
}

// bootAll makes sandboxes whose machines boot.
func bootAll(ctx context.Context, n int) (out *measure.Sample, err error) {
	s, end, err := server(ctx, "no_templates = true")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, end()) }()
	out = &measure.Sample{}
	for i := range n + 1 {
		b, took, err := first(ctx, s, options(s))
		if err != nil {
			return nil, err
		}
		if i > 0 { // the first one makes files that the others find
			out.Add(took)
		}
		if err := b.Stop(ctx); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// cloneAll makes clones that stay, and measures what they cost.
func cloneAll(ctx context.Context, prefix string, cold *measure.Sample, n counts) (err error) {
	more := ""
	if ready {
		if err := made(ctx, prefix, cold, min(n.clones, 10)); err != nil {
			return err
		}
		more = "ready = 1"
	}
	s, end, err := warm(ctx, "vm", more)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	clones, filled := &measure.Sample{}, &measure.Sample{}
	var boxes []*client.Sandbox
	defer func() {
		for _, b := range boxes {
			err = errors.Join(err, b.Stop(ctx))
		}
	}()
	var pids []int // of the clones' monitors
	for range n.clones {
		if ready {
			var took time.Duration
			// The one that waits is the next clone's; that it is made anew is not this clone's.
			if pids, took, err = fill(ctx, s, len(boxes)); err != nil {
				return err
			}
			filled.Add(took)
		}
		b, took, err := first(ctx, s, options(s))
		if err != nil {
			return err
		}
		boxes = append(boxes, b)
		clones.Add(took)
	}
	if ready {
		// What each of these had cost before: a machine that waits is made when another one was taken.
		measure.Print(prefix+".clone_ahead", filled.Percentile(50).Seconds(), "s")
		if _, _, err := fill(ctx, s, len(boxes)); err != nil {
			return err
		}
	} else {
		pids = monitors(s.Dir)
	}
	measure.Print(prefix+".clone", clones.Percentile(50).Seconds(), "s")
	measure.Print(prefix+".clone_p90", clones.Percentile(90).Seconds(), "s")
	measure.Print(prefix+".clone_over_cold", clones.Percentile(50).Seconds()/cold.Percentile(50).Seconds(), "x")
	if len(pids) != len(boxes) {
		return fmt.Errorf("%d clones have %d monitors", len(boxes), len(pids))
	}
	rest(prefix, "clone_mem", pids)
	if err := wake(ctx, s, prefix, boxes); err != nil {
		return err
	}
	return session(ctx, prefix, boxes[0], n.execs)
}

// rest measures what machines cost that have nothing to do.
func rest(prefix, memory string, pids []int) {
	pss := 0.0
	for _, pid := range pids {
		pss += float64(memoryOf(pid)) / (1 << 20)
	}
	measure.Print(prefix+"."+memory, pss/float64(len(pids)), "MiB")
	before, at := cpuOf(pids), time.Now()
	time.Sleep(10 * time.Second)
	measure.Print(prefix+".idle_cpu", 100*(cpuOf(pids)-before).Seconds()/time.Since(at).Seconds()/float64(len(pids)), "%")
}

// made measures clones that are made when they are asked for.
func made(ctx context.Context, prefix string, cold *measure.Sample, n int) (err error) {
	s, end, err := server(ctx, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	out := &measure.Sample{}
	for i := range n + 1 {
		b, took, err := first(ctx, s, options(s))
		if err != nil {
			return err
		}
		if i > 0 {
			out.Add(took)
		}
		if err := b.Stop(ctx); err != nil {
			return err
		}
	}
	measure.Print(prefix+".clone_made", out.Percentile(50).Seconds(), "s")
	measure.Print(prefix+".clone_made_over_cold", out.Percentile(50).Seconds()/cold.Percentile(50).Seconds(), "x")
	return nil
}

// fill waits until a machine waits and stands still, and returns the monitors of the living sandboxes and of it, and how long that took.
func fill(ctx context.Context, s *measure.Server, living int) ([]int, time.Duration, error) {
	began := time.Now()
	for {
		pids := monitors(s.Dir)
		before := cpuOf(pids)
		at := time.Since(began)
		young := false // it is being made: its birth takes more
		for _, pid := range pids {
			young = young || cpuOf([]int{pid}) < 300*time.Millisecond && at < 10*time.Second
		}
		select {
		case <-time.After(400 * time.Millisecond):
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
		// All others are idle and take less than a tick now and then.
		if len(pids) == living+1 && !young && cpuOf(pids)-before <= 10*time.Millisecond {
			return pids, at, nil
		}
		if time.Since(began) > 2*time.Minute {
			return nil, 0, fmt.Errorf("%d monitors run and %d sandboxes live: no machine waits", len(pids), living)
		}
	}
}

func wake(ctx context.Context, s *measure.Server, prefix string, boxes []*client.Sandbox) error {
	woken := &measure.Sample{}
	for _, b := range boxes[:min(len(boxes), 10)] {
		if err := pause(ctx, s, b); err != nil {
			return err
		}
		began := time.Now()
		if err := says(ctx, b, "awake"); err != nil {
			return err
		}
		woken.Add(time.Since(began))
	}
	measure.Print(prefix+".wake", woken.Percentile(50).Seconds(), "s")
	return nil
}

// pause takes the level that the monitor has.
func pause(ctx context.Context, s *measure.Server, b *client.Sandbox) error {
	err := b.Pause(ctx)
	if connect.CodeOf(err) != connect.CodeUnimplemented {
		return err
	}
	q := connect.NewRequest(&dsecv1.PauseRequest{Id: b.ID, Level: "saved"})
	r, err := s.Client.Sandboxes.Pause(ctx, q)
	if err == nil && len(r.Msg.Errors) > 0 {
		err = errors.New(r.Msg.Errors[0].Message)
	}
	return err
}

func session(ctx context.Context, prefix string, b *client.Sandbox, n int) error {
	o, err := b.Session(ctx, client.SessionOptions{Name: "bench"})
	if err != nil {
		return err
	}
	took := &measure.Sample{}
	for i := range n + 10 {
		began := time.Now()
		if _, err := o.Run(ctx, ":"); err != nil {
			return err
		}
		if i >= 10 {
			took.Add(time.Since(began))
		}
	}
	measure.Print(prefix+".exec_p50", took.Ms(50), "ms")
	measure.Print(prefix+".exec_p99", took.Ms(99), "ms")
	return nil
}

// monitors are the processes of QEMU or Firecracker whose machines have their folders below the folder: those of sandboxes, and of what waits
// for one.
func monitors(dir string) (pids []int) {
	list, _ := os.ReadDir(filepath.Join(dir, "run"))
	names := map[string]bool{}
	for _, e := range list {
		machines, _ := os.ReadDir(filepath.Join(dir, "run", e.Name()))
		for _, m := range machines {
			names["dsec-"+m.Name()], names[m.Name()] = m.IsDir(), m.IsDir()
		}
	}
	procs, _ := os.ReadDir("/proc")
	for _, p := range procs {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		text, _ := os.ReadFile("/proc/" + p.Name() + "/cmdline")
		for _, arg := range strings.Split(string(text), "\x00") {
			if names[arg] && (strings.Contains(string(text), "qemu") || strings.Contains(string(text), "firecracker")) {
				pids = append(pids, pid)
				break
			}
		}
	}
	return pids
}

// memoryOf is the proportional share of a process, in octets.
func memoryOf(pid int) (n int64) {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "Pss:" {
			k, _ := strconv.ParseInt(f[1], 10, 64)
			n += k << 10
		}
	}
	return n
}

func cpuOf(pids []int) (sum time.Duration) {
	for _, pid := range pids {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		f := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		if len(f) < 13 {
			continue
		}
		for _, v := range f[11:13] {
			n, _ := strconv.ParseInt(v, 10, 64)
			sum += time.Duration(n) * 10 * time.Millisecond // USER_HZ is 100
		}
	}
	return sum
}
