package fncall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// fakeRunner runs nothing, as its program says: "cc" makes the artifact out of the source; "echo" gives its input back; "exit N"; "wait"
// until it is given up; "break N" fails N times.
type fakeRunner struct {
	mu       sync.Mutex
	runs     map[string]int
	latest   *Exec
	seen     func(*Exec) // may be nil
	broken   atomic.Int64
	now, top atomic.Int64 // at once
}

func (f *fakeRunner) Exec(ctx context.Context, e *Exec) (*Exit, error) {
	f.top.Store(max(f.top.Load(), f.now.Add(1)))
	defer f.now.Add(-1)
	f.mu.Lock()
	if f.runs == nil {
		f.runs = map[string]int{}
	}
	f.runs[e.Argv[0]]++
	if f.latest = e; f.seen != nil {
		f.seen(e)
	}
	f.mu.Unlock()
	x := &Exit{}
	arg := func() (n int) { fmt.Sscan(e.Argv[1], &n); return n }
	switch e.Argv[0] {
	case "cc":
		src := string(e.Files[0].Data)
		if strings.Contains(src, "error") {
			x.Code, x.Stderr = 1, []byte("it is wrong")
		}
		x.Files = []Copied{{Path: "main", Data: []byte("made of " + src), Exec: true}}
	case "./main":
		b, err := io.ReadAll(e.Files[0].From)
		if err != nil {
			return nil, err
		}
		x.Stdout = append(b, e.Stdin...)
	case "echo":
		x.Stdout = e.Stdin
	case "exit":
		x.Code = arg()
	case "wait":
		<-ctx.Done()
		x.Cancelled = true
	case "break":
		if f.broken.Add(1) <= int64(arg()) {
			return nil, fmt.Errorf("the keeper went away: %w", sandbox.ErrLost)
		}
	case "sleep":
		time.Sleep(20 * time.Millisecond)
	}
	return x, nil
}

func (f *fakeRunner) Pair(ctx context.Context, a, b *Exec) (x, y *Exit, first int, err error) {
	x, err = f.Exec(ctx, a)
	if err == nil {
		y, err = f.Exec(ctx, b)
	}
	return x, y, 1, err
}

func (f *fakeRunner) Standbys(context.Context) (int, error) { return 3, nil }

type rig struct {
	t   *testing.T
	e   *Engine
	f   *fakeRunner
	log *trajectory.Log
}

var testLanguages = Languages{
	"cmd": {Name: "cmd", Environment: "env"},
	"cc":  {Name: "cc", Environment: "env", Source: "main.x", Compile: []string{"cc", "{source}"}, Artifacts: []string{"main"}, Run: []string{"./main"}},
	"py":  {Name: "py", Environment: "env", Source: "main.py", Run: []string{"echo"}, Warm: true},
}

func newRig(t *testing.T, change func(*Config, *Deps)) *rig {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	l, err := trajectory.Open(trajectory.Default(t.TempDir()), log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	r := &rig{t: t, f: &fakeRunner{}, log: l}
	c, d := Config{Dir: t.TempDir(), Places: 2}, Deps{Runner: r.f, Languages: testLanguages, Log: l, Logger: log}
	if change != nil {
		change(&c, &d)
	}
	if r.e, err = New(c, d); err != nil {
		t.Fatal(err)
	}
	return r
}

func roots() []*dsecv1.CallRoot {
	return []*dsecv1.CallRoot{{Environment: "env", Layers: []string{"base"}}}
}

func cmd(key string, argv ...string) *dsecv1.RunCallRequest {
	return &dsecv1.RunCallRequest{Key: key, Job: "j", Program: &dsecv1.CallProgram{Cmd: argv}, Input: &dsecv1.CallInput{Stdin: "in"}, Roots: roots()}
}

func (r *rig) run(q *dsecv1.RunCallRequest) *dsecv1.RunCallResponse {
	r.t.Helper()
	a, err := r.e.Run(r.t.Context(), "p", q)
	if err != nil {
		r.t.Fatal(err)
	}
	return a
}

func TestRunAndRetry(t *testing.T) {
	r := newRig(t, nil)
	if a := r.run(cmd("", "echo")); a.Verdict != "OK" || a.Result.Stdout != "in" || a.Compile != nil || !strings.HasPrefix(a.Key, madePrefix) {
		t.Errorf("echo: %v", a)
	}
	if a := r.run(cmd("", "exit", "3")); a.Verdict != "RE" || a.Result.Code != 3 {
		t.Errorf("exit 3: %v", a)
	}
	if n := r.f.runs["exit"]; n != 1 {
		t.Errorf("a program's own failure was tried %d times", n)
	}
	if a := r.run(cmd("", "break", "2")); a.Verdict != "OK" {
		t.Errorf("two failures of the platform: %v", a)
	}
	r.f.broken.Store(0)
	if a := r.run(cmd("", "break", "99")); a.Verdict != "SYS" || !strings.Contains(a.Result.Error, "keeper") {
		t.Errorf("failures without end: %v", a)
	}
	for name, q := range map[string]*dsecv1.RunCallRequest{
		"no program":  {Program: &dsecv1.CallProgram{}, Roots: roots()},
		"no language": {Program: &dsecv1.CallProgram{Lang: "nosuch", Code: "x"}, Roots: roots()},
		"no root":     {Program: &dsecv1.CallProgram{Cmd: []string{"echo"}}},
		"mode":        {Program: &dsecv1.CallProgram{Cmd: []string{"echo"}}, Roots: roots(), Mode: "hot"},
		"limits":      {Program: &dsecv1.CallProgram{Cmd: []string{"echo"}}, Roots: roots(), Limits: &dsecv1.CallLimits{Memory: 5}},
		"own key":     {Key: madePrefix + "x", Program: &dsecv1.CallProgram{Cmd: []string{"echo"}}, Roots: roots()},
		"path":        {Program: &dsecv1.CallProgram{Cmd: []string{"echo"}, Files: []*dsecv1.CallFile{{Path: "../x"}}}, Roots: roots()},
	} {
		if a, err := r.e.Run(t.Context(), "p", q); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v %v", name, a, err)
		}
	}
	q := cmd("", "echo")
	q.Gpu = "shared"
	if _, err := r.e.Run(t.Context(), "p", q); !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "has none") {
		t.Errorf("gpu: %v", err)
	}
}

func TestKeys(t *testing.T) {
	r := newRig(t, nil)
	first := r.run(cmd("k", "echo"))
	again := r.run(cmd("k", "echo"))
	if first.Recorded || !again.Recorded || again.Result.Stdout != "in" || r.f.runs["echo"] != 1 {
		t.Errorf("the same key again: %v, %d runs", again, r.f.runs["echo"])
	}
	if _, err := r.e.Run(t.Context(), "p", cmd("k", "exit", "1")); !errors.Is(err, sandbox.ErrExists) {
		t.Errorf("the key with another request: %v", err)
	}
	other := cmd("k", "echo")
	other.Job = "j2"
	if a := r.run(other); a.Recorded {
		t.Error("another job's key answered")
	}
	// A new engine on the same log knows the key.
	e, err := New(Config{Dir: t.TempDir(), Places: 1}, Deps{Runner: r.f, Languages: testLanguages, Log: r.log, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	if a, err := e.Run(t.Context(), "p", cmd("k", "echo")); err != nil || !a.Recorded || a.Result.Stdout != "in" {
		t.Errorf("after a restart: %v %v", a, err)
	}
	// What the platform failed at is no answer for good.
	r.f.broken.Store(0)
	if a := r.run(cmd("b", "break", "3")); a.Verdict != "SYS" {
		t.Errorf("broken: %v", a)
	}
	if a := r.run(cmd("b", "break", "3")); a.Verdict != "OK" || a.Recorded {
		t.Errorf("asked again after SYS: %v", a)
	}
}

func TestRecords(t *testing.T) {
	r := newRig(t, nil)
	r.run(cmd("k", "echo"))
	q := cmd("h", "echo")
	q.HashOnly = true
	q.Program.Files = []*dsecv1.CallFile{{Path: "f", Text: "very private"}}
	r.run(q)
	recs, _, err := r.log.Read(t.Context(), trajectory.ID{Project: "p", Job: "j", Key: Stream}, trajectory.Query{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, x := range recs {
		s := x.Kind.String() + " " + x.Step
		if x.Input != nil {
			s += " " + x.Input.Kept.String()
		}
		if strings.Contains(string(x.Payload), "very private") || x.Input != nil && strings.Contains(string(x.Input.Data), "very private") {
			s += " leaks"
		}
		got = append(got, s)
	}
	if d := cmp.Diff([]string{"create ", "step-start k inline", "step-end k", "step-start h hash", "step-end h"}, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

func TestOneFlightAndCancel(t *testing.T) {
	r := newRig(t, nil)
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			if a, err := r.e.Run(t.Context(), "p", cmd("s", "sleep")); err != nil || a.Verdict != "OK" {
				t.Errorf("%v %v", a, err)
			}
		})
	}
	wg.Wait()
	if n := r.f.runs["sleep"]; n != 1 {
		t.Errorf("%d runs of one key", n)
	}
	// By its key.
	done := make(chan *dsecv1.RunCallResponse, 1)
	go func() {
		a, err := r.e.Run(t.Context(), "p", cmd("w", "wait"))
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	for end := time.Now().Add(10 * time.Second); r.e.Cancel("p", "j", "w") != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the call never began")
		}
	}
	if a := <-done; a.GetVerdict() != "CANCELLED" {
		t.Errorf("cancelled: %v", a)
	}
	if a := r.run(cmd("w", "wait")); a.Verdict != "CANCELLED" || !a.Recorded {
		t.Errorf("the key of a cancelled call: %v", a)
	}
	if err := r.e.Cancel("p", "j", "w"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("cancel of what is over: %v", err)
	}
	// By its client's going away: nothing is recorded.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := r.e.Run(ctx, "p", cmd("gone", "wait")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the client is gone: %v", err)
	}
}

func TestCompileOnceAndBatch(t *testing.T) {
	r := newRig(t, nil)
	var inputs []*dsecv1.CallInput
	for i := range 10 {
		inputs = append(inputs, &dsecv1.CallInput{Id: fmt.Sprint(i), Stdin: fmt.Sprint(":", i)})
	}
	q := &dsecv1.RunCallBatchRequest{Program: &dsecv1.CallProgram{Lang: "cc", Code: "x"}, Inputs: inputs, Roots: roots()}
	a, err := r.e.RunBatch(t.Context(), "p", q)
	if err != nil || a.Verdict != "OK" || len(a.Results) != 10 {
		t.Fatalf("%v %v", a, err)
	}
	for i, x := range a.Results {
		if want := fmt.Sprint("made of x:", i); x.Stdout != want || x.Id != fmt.Sprint(i) {
			t.Errorf("input %d: %q", i, x.Stdout)
		}
	}
	if r.f.runs["cc"] != 1 || r.f.top.Load() > 2 {
		t.Errorf("%d compilations, %d runs at once with 2 places", r.f.runs["cc"], r.f.top.Load())
	}
	one := r.run(&dsecv1.RunCallRequest{Program: &dsecv1.CallProgram{Lang: "cc", Code: "x"}, Roots: roots()})
	if !one.Compile.GetCached() || r.f.runs["cc"] != 1 {
		t.Errorf("the same program again: %v", one.Compile)
	}
	bad := r.run(&dsecv1.RunCallRequest{Program: &dsecv1.CallProgram{Lang: "cc", Code: "error"}, Roots: roots()})
	if bad.Verdict != "CE" || bad.Result != nil || bad.Compile.Stderr != "it is wrong" {
		t.Errorf("a program that does not compile: %v", bad)
	}
	q = &dsecv1.RunCallBatchRequest{Program: &dsecv1.CallProgram{Cmd: []string{"exit", "1"}}, Inputs: inputs, Roots: roots(), StopEarly: true}
	if a, err = r.e.RunBatch(t.Context(), "p", q); err != nil || a.Verdict != "RE" || a.Results[9].Verdict == "OK" {
		t.Errorf("stopped early: %v %v", a, err)
	}
}

func TestPairAndFiles(t *testing.T) {
	r := newRig(t, nil)
	q := &dsecv1.RunCallPairRequest{Program: &dsecv1.CallSide{Program: &dsecv1.CallProgram{Cmd: []string{"exit", "2"}}},
		Interactor: &dsecv1.CallSide{Program: &dsecv1.CallProgram{Cmd: []string{"echo"}}}, Roots: roots()}
	a, err := r.e.RunPair(t.Context(), "p", q)
	if err != nil || a.Program.Verdict != "RE" || a.Interactor.Verdict != "OK" || a.FirstEnded != "interactor" {
		t.Errorf("%v %v", a, err)
	}
	content, err := r.e.PutFile("p", []byte("kept"))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := r.e.GetFile("p", content); err != nil || string(b) != "kept" {
		t.Errorf("%q %v", b, err)
	}
	if _, err := r.e.GetFile("other", content); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("another project's file: %v", err)
	}
	run := cmd("", "echo")
	run.Input = &dsecv1.CallInput{StdinContent: strings.Repeat("0", 64)}
	if _, err := r.e.Run(t.Context(), "p", run); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("input that was never kept: %v", err)
	}
}

type expired struct{}

func (expired) Call(_, job string) error {
	return fmt.Errorf("job %s: expired: %w", job, sandbox.ErrState)
}

func TestExpiredJob(t *testing.T) {
	r := newRig(t, func(_ *Config, d *Deps) { d.Jobs = expired{} })
	if _, err := r.e.Run(t.Context(), "p", cmd("k", "echo")); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("%v", err)
	}
}

// A call that asks for a device has that one alone, with its environment; the compiler has none.
func TestGPUCalls(t *testing.T) {
	r := newRig(t, func(c *Config, _ *Deps) {
		c.Places = 8
		c.GPUs = []Device{{Name: "a", Nodes: []string{"/dev/a0", "/dev/ctl"}, Env: []string{"WHICH=a"}}, {Name: "mig", Places: 2, Nodes: []string{"/dev/b0"}, Env: []string{"WHICH=b"}}}
	})
	for mode, want := range map[string][]string{"exclusive": {"/dev/a0", "/dev/ctl"}, "shared": {"/dev/a0", "/dev/ctl"}, "": nil} {
		q := cmd("", "echo")
		q.Gpu = mode
		r.run(q)
		r.f.mu.Lock()
		x := r.f.latest
		r.f.mu.Unlock()
		if mode == "shared" { // either fits while both are free
			if len(x.Devices) == 0 || !slices.ContainsFunc(x.Env, func(kv string) bool { return strings.HasPrefix(kv, "WHICH=") }) {
				t.Errorf("shared: %v %v", x.Devices, x.Env)
			}
			continue
		}
		if d := cmp.Diff(want, x.Devices); d != "" {
			t.Errorf("%q: %s", mode, d)
		}
		if slices.Contains(x.Env, "WHICH=a") != (mode == "exclusive") {
			t.Errorf("%q: environment %v", mode, x.Env)
		}
	}
	compiled := 0
	r.f.seen = func(e *Exec) {
		if e.Argv[0] == "cc" {
			compiled++
			if len(e.Devices) > 0 {
				t.Errorf("the compiler has %v", e.Devices)
			}
		}
	}
	r.run(&dsecv1.RunCallRequest{Program: &dsecv1.CallProgram{Lang: "cc", Code: "x"}, Roots: roots(), Gpu: "shared"})
	if x := r.f.latest; compiled != 1 || len(x.Devices) == 0 {
		t.Errorf("compiled %d times, ran with %v", compiled, x.Devices)
	}
}

// Mode warm holds a language's source, lets nothing of one call wait for another, and is refused where it can't be.
func TestWarmCalls(t *testing.T) {
	registry := prometheus.NewRegistry()
	r := newRig(t, func(c *Config, d *Deps) {
		c.Standbys, d.Registry = 5, registry
		c.GPUs = []Device{{Name: "a", Nodes: []string{"/dev/a0"}, Env: []string{"WHICH=a"}}}
	})
	py := func(change func(*dsecv1.RunCallRequest)) *dsecv1.RunCallRequest {
		q := &dsecv1.RunCallRequest{Mode: "warm", Program: &dsecv1.CallProgram{Lang: "py", Code: "x"}, Input: &dsecv1.CallInput{}, Roots: roots()}
		change(q)
		return q
	}
	for _, c := range []struct {
		name     string
		change   func(*dsecv1.RunCallRequest)
		hold     string
		standbys int
	}{
		{"plain", func(*dsecv1.RunCallRequest) {}, "main.py", 5},
		{"with an input", func(q *dsecv1.RunCallRequest) { q.Input.Stdin = "in" }, "main.py", 5},
		{"with a device", func(q *dsecv1.RunCallRequest) { q.Gpu = "exclusive" }, "main.py", 5},
		{"with arguments", func(q *dsecv1.RunCallRequest) { q.Input.Args = []string{"a"} }, "main.py", 0},
		{"with a variable", func(q *dsecv1.RunCallRequest) { q.Input.Env = []*dsecv1.EnvVar{{Name: "A", Value: "secret"}} }, "", 0},
		{"with a file that may be taken for a module", func(q *dsecv1.RunCallRequest) { q.Program.Files = []*dsecv1.CallFile{{Path: "os.py", Text: "x"}} }, "", 0},
		{"with an input's file", func(q *dsecv1.RunCallRequest) { q.Input.Files = []*dsecv1.CallFile{{Path: "os.py", Text: "x"}} }, "", 0},
		{"fresh", func(q *dsecv1.RunCallRequest) { q.Mode = "" }, "", 0},
	} {
		r.run(py(c.change))
		x := r.f.latest
		if x.Hold != c.hold || x.Standbys != c.standbys || x.Pooled {
			t.Errorf("%s: hold %q, standbys %d", c.name, x.Hold, x.Standbys)
		}
		if alone := c.name == "with a device"; x.Alone != alone || (x.Card == "a") != alone {
			t.Errorf("%s: card %q, alone %v", c.name, x.Card, x.Alone)
		}
	}
	refused := func(e *Engine, q *dsecv1.RunCallRequest, kind error, says string) {
		t.Helper()
		if _, err := e.Run(t.Context(), "p", q); !errors.Is(err, kind) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
	refused(r.e, py(func(q *dsecv1.RunCallRequest) { q.Program.Lang = "cc" }), sandbox.ErrUnsupported, "not for language cc")
	refused(r.e, py(func(q *dsecv1.RunCallRequest) { q.Mode = "pooled and warm" }), sandbox.ErrInvalid, "want fresh, pooled or warm")
	refused(newRig(t, nil).e, py(func(*dsecv1.RunCallRequest) {}), sandbox.ErrUnsupported, "keeps no interpreters")
	pair := &dsecv1.RunCallPairRequest{Mode: "warm", Program: &dsecv1.CallSide{Program: &dsecv1.CallProgram{Lang: "py", Code: "x"}},
		Interactor: &dsecv1.CallSide{Program: &dsecv1.CallProgram{Lang: "py", Code: "x"}}, Roots: roots()}
	if _, err := r.e.RunPair(t.Context(), "p", pair); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("a pair: %v", err)
	}
	told, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range told {
		for _, m := range f.GetMetric() {
			got[f.GetName()] += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	want := map[string]float64{"dsec_fncall_runs_total": 8, "dsec_fncall_retries_total": 0, "dsec_fncall_queue_seconds": 0, "dsec_fncall_recorded_total": 0, "dsec_fncall_warm_total": 7,
		"dsec_fncall_standbys": 3, "dsec_fncall_waiting": 0, "dsec_fncall_running": 0}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("metrics: %s", d)
	}
}

// Calls that wait for a device keep no others from running, and are served in the order in which they came.
func TestWaitingForAGPU(t *testing.T) {
	r := newRig(t, func(c *Config, _ *Deps) {
		c.Places = 2
		c.GPUs = []Device{{Name: "a", Places: 2, Nodes: []string{"/dev/a0"}}}
	})
	_, give, err := r.e.gpus.Take(t.Context(), "shared")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var order []string
	for i, mode := range []string{"exclusive", "shared", "shared"} {
		wg.Go(func() {
			q := cmd("", "echo")
			q.Gpu, q.QueueMs = mode, 30_000
			a, err := r.e.Run(t.Context(), "p", q)
			if err != nil || a.Verdict != "OK" {
				t.Errorf("%s: %v %v", mode, a, err)
			}
			mu.Lock()
			order = append(order, mode)
			mu.Unlock()
		})
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			r.e.gpus.mu.Lock()
			n := len(r.e.gpus.waiting)
			r.e.gpus.mu.Unlock()
			if n == i+1 { // a place is free, but the first in the row wants the whole device
				break
			} else if time.Now().After(end) {
				t.Fatalf("%d wait, want %d", n, i+1)
			}
		}
	}
	r.run(cmd("", "echo"))
	r.run(cmd("", "echo"))
	give()
	wg.Wait()
	if len(order) != 3 {
		t.Errorf("ended: %v", order)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, give, _ = r.e.gpus.Take(t.Context(), "exclusive")
	if _, _, err := r.e.gpus.Take(ctx, "shared"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("given up: %v", err)
	}
	give()
	if d := r.e.gpus.devices[0]; d.used != 0 || len(r.e.gpus.waiting) != 0 {
		t.Errorf("left: %d used, %d wait", d.used, len(r.e.gpus.waiting))
	}
}

// Files of calls are opened when their call has a place: thousands that wait hold none. And what a name of a few octets brings is bounded.
func TestKeptFilesAreBounded(t *testing.T) {
	r := newRig(t, nil)
	content, err := r.e.PutFile("p", make([]byte, 1<<20))
	if err != nil {
		t.Fatal(err)
	}
	q := cmd("", "echo")
	for i := range 200 {
		q.Program.Files = append(q.Program.Files, &dsecv1.CallFile{Path: fmt.Sprint("f", i), Content: content})
	}
	if _, err := r.e.Run(t.Context(), "p", q); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), "than the disk") {
		t.Errorf("200 MiB by name on a disk of 128 MiB: %v", err)
	}
	q.Limits = &dsecv1.CallLimits{Disk: 1 << 30}
	ctx, cancel := context.WithCancel(t.Context())
	_, release, err := r.e.place(ctx, &job{project: "p", bound: time.Minute}, 2, "")
	if err != nil {
		t.Fatal(err)
	}
	before := openFiles(t)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() { r.e.Run(ctx, "p", q) })
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if waiting, _ := r.e.queue.length(); waiting == 20 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("they never waited")
		}
	}
	if n := openFiles(t); n > before+20 {
		t.Errorf("20 calls that wait hold %d files open", n-before)
	}
	cancel()
	wg.Wait()
	release()
	if a := r.run(q); a.Verdict != "OK" {
		t.Errorf("in the end: %v", a)
	}
	if n := openFiles(t); n > before+20 {
		t.Errorf("%d files stay open", n-before)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip(err)
	}
	return len(list)
}

// More and longer outputs than an answer holds cost the call nothing but those.
func TestAnswersAreBounded(t *testing.T) {
	r := newRig(t, nil)
	in := &input{}
	x := &Exit{Facts: Facts{Memory: -1}, Stdout: make([]byte, 4<<20)}
	for i := range 4 {
		path := fmt.Sprint("o", i)
		in.outputs = append(in.outputs, &dsecv1.CallOutput{Path: path, Keep: i == 3})
		x.Files = append(x.Files, Copied{Path: path, Data: make([]byte, 7<<20)})
	}
	a, err := r.e.result(x, DefaultLimits(), in, "p", maxAnswer)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range a.Files {
		got = append(got, f.Path)
	}
	if d := cmp.Diff([]string{"o0", "o1", "o3"}, got); d != "" || a.Verdict != "OK" || !strings.Contains(a.Error, `output "o2": there are more`) || strings.Contains(a.Error, "o1") {
		t.Errorf("%s %q\n%s", a.Verdict, a.Error, d)
	}
}
