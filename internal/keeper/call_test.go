package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const callUID = 0x70001000

func callFilter(t testing.TB) []byte {
	t.Helper()
	f, err := confine.FnCall().Compile(true)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (h *house) newCall(argv ...string) *Call {
	return &Call{Layers: []string{"base"}, UIDBase: callUID, Argv: argv, Env: []string{"PATH=/bin", "HOME=/box"}, CPU: 2 * time.Second, Wall: 4 * time.Second,
		Memory: 64 << 20, Pids: 64, Output: 64 << 10, FSize: 8 << 20, Disk: 16 << 20, Inodes: 100, Stack: 8 << 20, NoFile: 256, Filter: callFilter(h.t)}
}

func (h *house) call(r *Call, files ...*os.File) *CallEnd {
	h.t.Helper()
	e, fds, err := h.c.Call(within(h.t), r, files...)
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(h.cfg.Dir, LogName))
		h.t.Fatalf("call %q: %v\n%s", r.Argv, err, log)
	}
	for _, f := range fds {
		f.Close()
	}
	return e
}

// program compiles C without shared libraries.
func program(t testing.TB, source string) []byte {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("needs gcc")
	}
	dir := t.TempDir()
	src, out := filepath.Join(dir, "p.c"), filepath.Join(dir, "p")
	if err := os.WriteFile(src, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	if b, err := exec.Command("gcc", "-O1", "-w", "-static", "-pthread", "-o", out, src).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, b)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestCalls(t *testing.T) {
	h := open(t)
	for _, pooled := range []bool{false, true} {
		for _, c := range []struct {
			name   string
			argv   []string
			change func(*Call)
			want   CallEnd
		}{
			{"true", []string{"true"}, nil, CallEnd{}},
			{"exit code", []string{"sh", "-c", "exit 7"}, nil, CallEnd{Code: 7}},
			{"signal", []string{"sh", "-c", "kill -9 $$"}, nil, CallEnd{Signal: 9}},
			{"streams", []string{"sh", "-c", "cat; echo err >&2"}, func(r *Call) { r.Stdin = []byte("in") }, CallEnd{Stdout: []byte("in"), Stderr: []byte("err\n")}},
			{"no input", []string{"cat"}, nil, CallEnd{}},
			{"ids", []string{"sh", "-c", "id -u; id -g; pwd; hostname; grep -E 'Cap|NoNew' /proc/self/status | cut -f2 | sort -u"}, nil,
				CallEnd{Stdout: []byte("1000\n1000\n/box\nfncall\n0000000000000000\n1\n")}},
			{"streams by path", []string{"sh", "-c", "echo a >/dev/stdout; echo b >/dev/stderr; cat /dev/stdin"}, func(r *Call) { r.Stdin = []byte("x") },
				CallEnd{Stdout: []byte("a\nx"), Stderr: []byte("b\n")}},
			{"descriptors", []string{"sh", "-c", "echo /proc/self/fd/*"}, nil, CallEnd{Stdout: []byte("/proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 /proc/self/fd/3\n")}},
			{"processes", []string{"sh", "-c", "echo $$ /proc/[0-9]*"}, nil, CallEnd{Stdout: []byte("2 /proc/2\n")}},
			{"the root is read-only", []string{"sh", "-c", "touch /etc/x /bin/y /dev/z 2>/dev/null; echo $?; touch /tmp/a /dev/shm/b c; echo $?"}, nil, CallEnd{Stdout: []byte("1\n0\n")}},
			{"files come in and go out", []string{"sh", "-c", "cat d/in; ./run; echo out >d/out; ln -s /etc/passwd link"}, func(r *Call) {
				r.Files = []CallFile{{Path: "d/in", Data: []byte("1")}, {Path: "run", Data: []byte("#!/bin/sh\necho 2\n"), Exec: true}}
				r.Copy = []CallCopy{{Path: "d/out", Max: 10}, {Path: "nosuch", Max: 10}, {Path: "link", Max: 100}, {Path: "d", Max: 100}, {Path: "run", Max: 3}}
			}, CallEnd{Stdout: []byte("12\n"), Files: []CallCopied{{Data: []byte("out\n"), Size: 4}, {Err: "no such file or directory"}, {Err: errEscapes.Error()},
				{Err: "is no regular file"}, {Size: 17, Err: "has 17 octets, at most 3 were asked for"}}}},
			{"no program", []string{"nosuch"}, nil, CallEnd{Code: 127, NotBegun: "no such file or directory"}},
			{"no executable", []string{"/etc/passwd"}, nil, CallEnd{Code: 126, NotBegun: "permission denied"}},
			{"wall time", []string{"sleep", "10"}, func(r *Call) { r.Wall = 100 * time.Millisecond }, CallEnd{Signal: 9, WallOver: true}},
			{"CPU time", []string{"sh", "-c", "trap '' TERM XCPU; while :; do :; done"}, func(r *Call) { r.CPU = 100 * time.Millisecond }, CallEnd{Signal: 9, CPUOver: true}},
			{"output", []string{"yes"}, func(r *Call) { r.Output = 10000 }, CallEnd{Signal: 9, OutputOver: true, StdoutCut: true, Stdout: []byte(strings.Repeat("y\n", 5000))}},
			{"file size", []string{"dd", "if=/dev/zero", "of=x", "bs=1M", "count=9"}, nil, CallEnd{Signal: int(unix.SIGXFSZ)}},
			{"disk", []string{"sh", "-c", "for i in 1 2 3; do dd if=/dev/zero of=$i bs=1M count=7; done 2>/dev/null; echo $?"}, nil, CallEnd{Stdout: []byte("1\n")}},
			{"number of files", []string{"sh", "-c", "for i in $(seq 200); do mkdir $i 2>/dev/null || break; done; echo $i"}, nil, CallEnd{Stdout: []byte("101\n")}},
			{"processes limited", []string{"sh", "-c", "for i in $(seq 70); do sleep 3 & done 2>/dev/null"}, func(r *Call) { r.Pids = 20 }, CallEnd{Code: 2, PidsHit: true, Leftover: 19}},
			{"few descriptors", []string{"sh", "-c", "ulimit -n; exec 3</dev/null"}, func(r *Call) { r.NoFile = 4 }, CallEnd{Stdout: []byte("4\n")}},
			{"what is left dies", []string{"sh", "-c", "sleep 100 & (setsid sleep 100 &)"}, nil, CallEnd{Leftover: 2}},
			{"refused calls", []string{"unshare", "-n", "true"}, nil, CallEnd{Code: 1, Stderr: []byte("unshare: unshare(0x40000000): Operation not permitted\n"), EventsTotal: 1,
				Events: []CallEvent{{Arch: unix.AUDIT_ARCH_X86_64, Call: unix.SYS_UNSHARE, Arg0: unix.CLONE_NEWNET, Count: 1}}}},
		} {
			t.Run(fmt.Sprintf("%s pooled=%v", c.name, pooled), func(t *testing.T) {
				h := &house{t: t, dir: h.dir, cfg: h.cfg, c: h.c}
				r := h.newCall(c.argv...)
				r.Pooled = pooled
				if c.change != nil {
					c.change(r)
				}
				got := *h.call(r)
				if got.Memory < 0 || got.CPU < 0 || got.CPU > 3*time.Second || got.Wall < 0 {
					t.Errorf("figures: memory %d, CPU %v, wall %v", got.Memory, got.CPU, got.Wall)
				}
				if got.WallOver && got.Wall < r.Wall {
					t.Errorf("wall limit %v: over at %v", r.Wall, got.Wall)
				}
				if got.CPUOver && got.CPU < r.CPU {
					t.Errorf("CPU limit %v: over at %v", r.CPU, got.CPU)
				}
				got.Memory, got.CPU, got.Wall = 0, 0, 0
				if len(c.want.Events) > 0 {
					for i := range got.Events {
						got.Events[i].Arg1 = 0
					}
				}
				for i := range got.Files {
					if len(got.Files[i].Data) == 0 {
						got.Files[i].Data = nil
					}
				}
				if d := cmp.Diff(c.want, got); d != "" {
					t.Errorf("-want +got:\n%s", d)
				}
			})
		}
	}
}

func TestCallFilterKills(t *testing.T) {
	h := open(t)
	for name, source := range map[string]string{
		"int 0x80":   `int main(){ int r; __asm__ volatile("int $0x80":"=a"(r):"a"(20)); return 0; }`,
		"x32":        `#include <unistd.h>` + "\n" + `int main(){ syscall(0x40000000+39); return 0; }`,
		"of a child": `#include <unistd.h>` + "\n" + `#include <sys/wait.h>` + "\n" + `int main(){ if(!fork()) syscall(0x40000000+39); wait(0); return 0; }`,
	} {
		r := h.newCall("./p")
		r.Files = []CallFile{{Path: "p", Data: program(t, source), Exec: true}}
		if e := h.call(r); !e.Filter || e.Signal == 0 {
			t.Errorf("%s: %+v", name, e)
		}
	}
	// A signal of its own making is no work of the filter's.
	r := h.newCall("sh", "-c", "kill -SYS $$")
	if e := h.call(r); e.Filter || e.Signal != int(unix.SIGSYS) {
		t.Errorf("own SIGSYS: %+v", e)
	}
}

func TestCallMemory(t *testing.T) {
	h := open(t)
	grow := program(t, `#include <stdlib.h>
#include <string.h>
int main(int c, char **v){ long n = atol(v[1]); char *p = malloc(n<<20); memset(p, 1, n<<20); return p[5]-1; }`)
	for _, c := range []struct {
		mib  string
		over bool
	}{{"20", false}, {"200", true}, {"40", false}, {"1", false}} {
		r := h.newCall("./p", c.mib)
		r.Files = []CallFile{{Path: "p", Data: grow, Exec: true}}
		e := h.call(r)
		if e.OOM != c.over || !c.over && e.Code+e.Signal != 0 {
			t.Errorf("%s MiB of 64: %+v", c.mib, e)
		}
		var n int64
		fmt.Sscan(c.mib, &n)
		if !c.over && (e.Memory < n<<20 || e.Memory > (n+8)<<20) {
			t.Errorf("%s MiB: reported %d", c.mib, e.Memory)
		}
	}
	// The parent lives on and says that all is well.
	r := h.newCall("sh", "-c", "./p 200; exit 0")
	r.Files = []CallFile{{Path: "p", Data: grow, Exec: true}}
	if e := h.call(r); !e.OOM || e.Code != 0 {
		t.Errorf("out of memory of a child: %+v", e)
	}
}

func TestCallPair(t *testing.T) {
	h := open(t)
	for _, c := range []struct {
		name, a, b string
		want       CallPairEnd
	}{
		{"talk", "read x; echo got $x; read y; exit $y", "echo hi; read x; test \"$x\" = 'got hi' || exit 9; echo 4; cat >/dev/null; sleep 1", CallPairEnd{A: CallEnd{Code: 4}}},
		{"an early end is seen", "exec 1>&-; sleep 1.5; exit 3", "cat; exit 5", CallPairEnd{A: CallEnd{Code: 3}, B: CallEnd{Code: 5}, First: 1}},
		{"SIGPIPE", "exit 0", "sleep 1; while :; do echo x || exit 7; done", CallPairEnd{B: CallEnd{Signal: int(unix.SIGPIPE)}}},
	} {
		e, _, err := h.c.CallPair(within(t), &CallPair{A: *h.newCall("sh", "-c", c.a), B: *h.newCall("sh", "-c", c.b)})
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, x := range []*CallEnd{&e.A, &e.B} {
			x.CPU, x.Wall, x.Memory, x.Stderr = 0, 0, 0, nil
		}
		if d := cmp.Diff(c.want, *e); d != "" {
			t.Errorf("%s: -want +got:\n%s", c.name, d)
		}
	}
}

func TestCallCancelled(t *testing.T) {
	h := open(t)
	ctx, cancel := context.WithTimeout(within(t), 50*time.Millisecond)
	defer cancel()
	if _, _, err := h.c.Call(ctx, h.newCall("sh", "-c", "sleep 777 & sleep 777")); err == nil {
		t.Fatal("no error")
	}
	for end := time.Now().Add(longest); ; time.Sleep(10 * time.Millisecond) {
		if out, _ := exec.Command("pgrep", "-fx", "sleep 777").Output(); len(out) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("what was cancelled runs on")
		}
	}
}

func TestCallsAtOnceAndParentDies(t *testing.T) {
	h := open(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for j := range 20 {
				r := h.newCall("sh", "-c", fmt.Sprintf("echo %d-%d", i, j))
				e, _, err := h.c.Call(within(t), r)
				if err != nil || string(e.Stdout) != fmt.Sprintf("%d-%d\n", i, j) {
					t.Errorf("call %d-%d: %v %+v", i, j, err, e)
					return
				}
			}
		})
	}
	wg.Wait()
	// The parent of the environment is killed: the next call has a new one.
	keeper := h.c.Info().Pid
	out, err := exec.Command("pgrep", "-P", fmt.Sprint(keeper), "-x", "dsec-calls").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range strings.Fields(string(out)) {
		if err := exec.Command("kill", "-9", pid).Run(); err != nil {
			t.Fatal(err)
		}
	}
	// One that is given to the dying parent is lost; its caller may try again.
	e, _, err := h.c.Call(within(t), h.newCall("echo", "again"))
	if errors.Is(err, sandbox.ErrLost) {
		e, _, err = h.c.Call(within(t), h.newCall("echo", "again"))
	}
	if err != nil || string(e.Stdout) != "again\n" {
		t.Errorf("after the parent's death: %v %+v", err, e)
	}
}

func BenchmarkCall(b *testing.B) {
	for _, mode := range []string{"fresh", "pooled"} {
		b.Run(mode, func(b *testing.B) {
			h := open(b)
			r := h.newCall("./p")
			r.Pooled = mode == "pooled"
			r.Files = []CallFile{{Path: "p", Data: tiny(b), Exec: true}}
			h.call(r)
			for b.Loop() {
				h.call(r)
			}
		})
	}
}

// tiny is a program that ends at once, without a libc.
func tiny(t testing.TB) []byte {
	dir := t.TempDir()
	src, out := filepath.Join(dir, "t.c"), filepath.Join(dir, "t")
	text := "void _start(void){__asm__ volatile(\"syscall\"::\"a\"(231),\"D\"(0));}\n"
	if err := os.WriteFile(src, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if b, err := exec.Command("gcc", "-Os", "-static", "-nostdlib", "-o", out, src).CombinedOutput(); err != nil {
		t.Skipf("needs gcc: %v %s", err, b)
	}
	p, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// fakeDevice is /dev/zero or, as gpu1, /dev/full under another name.
func fakeDevice(t *testing.T, name string) string {
	t.Helper()
	p, minor := filepath.Join(t.TempDir(), name), uint32(5)
	if name == "gpu1" {
		minor = 7
	}
	if err := unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(1, minor))); err != nil {
		t.Skipf("can't make a device: %v", err)
	}
	return p
}

// A call finds the devices that it is given, and no other call does: neither one without nor one of another device, in either mode.
func TestCallDevices(t *testing.T) {
	h := open(t)
	dir := t.TempDir()
	zero, full := fakeDevice(t, "gpu0"), fakeDevice(t, "gpu1") // they answer alike at a read, and otherwise at a write
	run := func(pooled bool, script string, devices ...string) string {
		t.Helper()
		r := h.newCall("sh", "-c", script)
		r.Devices, r.Pooled = devices, pooled
		e := h.call(r)
		if e.Code != 0 {
			t.Errorf("%v: exit %d: %s", devices, e.Code, e.Stderr)
		}
		return string(e.Stdout)
	}
	list := "cd /dev; ls | grep gpu | tr '\\n' ' '; echo"
	for _, pooled := range []bool{false, true} {
		if got := run(pooled, list); got != "\n" {
			t.Errorf("without a device: %q", got)
		}
		if got := run(pooled, list+"; head -c 3 /dev/gpu0 | wc -c; echo x >/dev/gpu0 && echo written; touch /dev/x 2>/dev/null || echo fixed", zero); got != "gpu0 \n3\nwritten\nfixed\n" {
			t.Errorf("gpu0: %q", got)
		}
		if got := run(pooled, list+"; echo x 2>/dev/null >/dev/gpu1 || echo full", full); got != "gpu1 \nfull\n" {
			t.Errorf("gpu1: %q", got)
		}
		if got := run(pooled, list, zero, full); got != "gpu0 gpu1 \n" {
			t.Errorf("both: %q", got)
		}
	}
	if got := run(false, "head -c 2 /dev/null | wc -c; ls -l /dev/fd >/dev/null && echo fd; echo a >/dev/shm/a && cat /dev/shm/a", zero); got != "0\nfd\na\n" {
		t.Errorf("the rest of /dev: %q", got)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range [][]string{{"gpu0"}, {dir + "/../gpu0"}, {zero, zero}, {"/"}, {file}, {filepath.Join(dir, "gone")}, make([]string, maxCallDevices+1)} {
		r := h.newCall("true")
		r.Devices = bad
		if _, _, err := h.c.Call(within(t), r); !errors.Is(err, sandbox.ErrInvalid) && !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("%.80q: %v", bad, err)
		}
	}
}
