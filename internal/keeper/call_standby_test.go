package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// heldCall is a call of a shell that opens a script of its own when it is up.
func (h *house) heldCall(script string, args ...string) *Call {
	r := h.newCall(append([]string{"sh", "main.sh"}, args...)...)
	r.Files, r.Hold, r.Standbys = []CallFile{{Path: "main.sh", Data: []byte(script)}}, "main.sh", 4
	return r
}

// waiting waits until there are n calls ahead.
func (h *house) waiting(n int) {
	h.t.Helper()
	for end := time.Now().Add(longest); ; time.Sleep(5 * time.Millisecond) {
		got, err := h.c.Standbys(within(h.t))
		if err != nil {
			h.t.Fatal(err)
		}
		if got == n {
			return
		}
		if time.Now().After(end) {
			h.t.Fatalf("%d calls wait ahead, want %d", got, n)
		}
	}
}

// again drops everything that waits: a host's calls end with its connection.
func (h *house) again() {
	h.t.Helper()
	h.c.Close()
	h.dial()
	h.waiting(0)
}

// callProcesses are those that this keeper's calls run.
func (h *house) callProcesses() (pids []string) {
	var uids []string
	for i := range 32 {
		uids = append(uids, fmt.Sprint(callUID+i))
	}
	out, _ := exec.Command("pgrep", "-u", strings.Join(uids, ",")).Output()
	for _, pid := range strings.Fields(string(out)) {
		if b, _ := os.ReadFile("/proc/" + pid + "/cgroup"); strings.Contains(string(b), "/dsec-"+h.cfg.Instance+"/") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// wake ends the sleep of so long that a call is in.
func (h *house) wake(long string) {
	h.t.Helper()
	for _, pid := range h.callProcesses() {
		if b, _ := os.ReadFile("/proc/" + pid + "/cmdline"); string(b) == "sleep\x00"+long+"\x00" {
			if err := exec.Command("kill", pid).Run(); err != nil {
				h.t.Fatal(err)
			}
			return
		}
	}
	h.t.Fatalf("no call sleeps for %s s", long)
}

func (h *house) noProcesses() {
	h.t.Helper()
	for end := time.Now().Add(longest); ; time.Sleep(10 * time.Millisecond) {
		left := h.callProcesses()
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			h.t.Fatalf("processes of calls are left: %v", left)
		}
	}
}

// What a call comes to is the same whether it was started when it was asked for or ahead, and as in a fresh one.
func TestStandbysAreAsFreshOnes(t *testing.T) {
	h := open(t)
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Chmod(0o444); err != nil { // as a cache's
		t.Fatal(err)
	}
	if _, err := file.WriteString(strings.Repeat("0123456789abcde\n", 100_000)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, script string
		change       func(*Call)
		files        []*os.File
		late         bool // it has more files, so it is never started ahead
	}{
		{name: "what it finds", script: "echo $0 $#; id; pwd; ls -ln . /tmp /dev/shm; stat -c '%a %u %g %F %s' main.sh; umask; env | sort; ulimit -a; cat /proc/self/fd/0 | wc -c; echo /proc/self/fd/*"},
		{name: "state", script: "grep -E 'Cap|NoNew|Seccomp|Sig|Groups|NSpid' /proc/self/status; cat /proc/self/limits; nice; cat /proc/self/oom_score_adj; echo $$ $PPID /proc/[0-9]*"},
		{name: "mounts", script: "cut -d' ' -f4- /proc/self/mountinfo | sed 's/[0-9]*:[0-9]*//'; cat /proc/net/dev | wc -l; hostname"},
		{name: "input", script: "cat; echo; stat -L -c %F /dev/stdin", change: func(r *Call) { r.Stdin = []byte("some input\nwithout end") }},
		{name: "no input", script: "cat; stat -L -c %F /dev/stdin"},
		{name: "long input", script: "wc -c; dd bs=1 count=1 2>/dev/null | wc -c; head -c 5 /dev/stdin", change: func(r *Call) { r.StdinFD = true }, files: []*os.File{file}},
		{name: "an input that can't be written", script: "echo x 2>&1 >/dev/stdin; cat", change: func(r *Call) { r.Stdin = []byte("in") }},
		{name: "exit code", script: "exit 42"},
		{name: "signal", script: "kill -SEGV $$"},
		{name: "streams", script: "echo a; echo b >&2; echo c >/dev/stdout; echo d >/dev/stderr"},
		{name: "too much", script: "exec yes", change: func(r *Call) { r.Output = 1000 }},
		{name: "leftovers", script: "sleep 100 & (setsid sleep 100 &)"},
		{name: "memory", script: "cat /dev/zero | tail -c 100000000 | wc -c; exit 3"},
		{name: "processes", script: "for i in $(seq 70); do sleep 3 & done 2>/dev/null", change: func(r *Call) { r.Pids = 20 }},
		{name: "a file beyond its size", script: "exec dd if=/dev/zero of=x bs=1M count=9"},
		{name: "files go out", script: "echo out >o; cat main.sh >>o", change: func(r *Call) {
			r.Copy = []CallCopy{{Path: "o", Max: 1000}, {Path: "main.sh", Max: 1000}, {Path: "none", Max: 1}}
		}},
		{name: "a refused call", script: "unshare -n true"},
		{name: "it reads itself", script: "tail -1 main.sh; wc -l <main.sh\n# end"},
		{name: "executable", script: "test -x main.sh && echo yes", change: func(r *Call) { r.Files[0].Exec = true }},
		{name: "by descriptor", change: func(r *Call) { r.Files[0].FD, r.Files[0].Data = true, nil }, files: []*os.File{file}},
		{name: "no octet", script: ""},
		{name: "long", script: strings.Repeat("# nothing\n", 100_000) + "echo end"},
		{name: "arguments", script: "echo \"$1-$2-$#\"", change: func(r *Call) { r.Argv = append(r.Argv, "", "a b\n") }},
		{name: "opened by several", script: "x", change: func(r *Call) { r.Argv = []string{"sh", "-c", "cat main.sh & cat main.sh; wait"} }},
		{name: "who opens it first is killed", script: "echo end", change: func(r *Call) {
			r.Argv = []string{"sh", "-c", "cat main.sh >/dev/null & p=$!; sleep 0.1; kill -9 $p 2>/dev/null; wait; . ./main.sh"}
		}},
		{name: "other files", script: "cat d/f; ls -R", change: func(r *Call) { r.Files = append(r.Files, CallFile{Path: "d/f", Data: []byte("f\n")}) }, late: true},
		{name: "it ends before its program", change: func(r *Call) { r.Argv = []string{"sh", "-c", "echo early; exit 9"} }, late: true},
		{name: "no such command", change: func(r *Call) { r.Argv = []string{"nosuch"} }, late: true},
	} {
		h.again()
		t.Run(c.name, func(t *testing.T) {
			h := &house{t: t, dir: h.dir, cfg: h.cfg, c: h.c}
			request := func() *Call {
				r := h.heldCall(c.script)
				r.Standbys = 1
				if c.change != nil {
					c.change(r)
				}
				return r
			}
			plain := func(e *CallEnd) CallEnd {
				x := *e
				x.CPU, x.Wall, x.Memory, x.Ahead = 0, 0, 0, false
				x.Leftover = min(x.Leftover, 15) // those that the limit kept from starting may be a few more or less
				for i := range x.Events {
					x.Events[i].Arg1 = 0
				}
				return x
			}
			fresh := request()
			fresh.Hold = ""
			want := plain(h.call(fresh, c.files...))
			for _, ahead := range []bool{false, true} {
				if ahead && c.late {
					break
				}
				if ahead {
					h.waiting(1)
				}
				got := h.call(request(), c.files...)
				if d := cmp.Diff(want, plain(got)); d != "" || got.Ahead != ahead {
					t.Errorf("ahead %v, want %v: -fresh +held:\n%s", got.Ahead, ahead, d)
				}
			}
		})
	}
	h.again()
	h.noProcesses()
}

// Times and their limits begin with the program: what the interpreter took is not the call's, whether it was up or not.
func TestStandbysCountFromTheProgram(t *testing.T) {
	h := open(t)
	slow := "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; sleep 0.25; . ./main.sh"
	for _, ahead := range []bool{false, true} {
		for _, c := range []struct {
			script    string
			cpu, wall bool
		}{{"true", false, false}, {"while :; do :; done", true, false}, {"sleep 30", false, true}} {
			if ahead {
				h.waiting(1)
			}
			r := h.heldCall(c.script)
			r.Argv, r.CPU, r.Wall, r.Standbys = []string{"sh", "-c", slow}, 100*time.Millisecond, 20*time.Second, 1
			if c.wall {
				r.Wall = 200 * time.Millisecond
			}
			e := h.call(r)
			if e.CPUOver != c.cpu || e.WallOver != c.wall || e.Ahead != ahead || !c.cpu && e.CPU > 80*time.Millisecond || c.cpu && e.CPU < r.CPU || c.wall && e.Wall < r.Wall {
				t.Errorf("%s, ahead %v: %+v", c.script, ahead, e)
			}
			if !ahead {
				h.again()
			}
		}
		if !ahead { // make the first that is ahead
			r := h.heldCall("true")
			r.Argv, r.CPU, r.Wall, r.Standbys = []string{"sh", "-c", slow}, 100*time.Millisecond, 20*time.Second, 1
			h.call(r)
		}
	}
}

// Standbys are bounded, go to calls of their kind alone, and end with their layer, with their host and with their keeper; one that died is
// no call's end.
func TestStandbysEnd(t *testing.T) {
	h := open(t)
	other := func() *Call {
		r := h.heldCall("echo $X")
		r.Env = append(r.Env, "X=other")
		return r
	}
	h.call(h.heldCall("true"))
	h.waiting(1)
	if e := h.call(other()); e.Ahead || string(e.Stdout) != "other\n" {
		t.Errorf("another environment: %+v", e)
	}
	h.waiting(2)
	if e := h.call(other()); !e.Ahead || string(e.Stdout) != "other\n" {
		t.Errorf("the same environment: %+v", e)
	}
	for i := range 6 {
		r := h.heldCall("true")
		r.Memory += int64(i) << 20
		h.call(r)
	}
	h.waiting(4) // as many as may be
	r := h.heldCall("true")
	r.Standbys = 0
	r.Env = append(r.Env, "SECRET=s")
	if e := h.call(r); e.Ahead {
		t.Error("a call that keeps none was started ahead")
	}
	if e := h.call(r); e.Ahead {
		t.Error("a call that keeps none left one behind")
	}
	for name, bad := range map[string]func(*Call){
		"no file":  func(r *Call) { r.Hold = "nosuch" },
		"a folder": func(r *Call) { r.Files[0].Path, r.Hold = "d/main.sh", "d/main.sh" },
		"too long": func(r *Call) { r.Files[0].Data, r.Disk = make([]byte, 1<<20), 1<<16 },
	} {
		r := h.heldCall("true")
		bad(r)
		if _, _, err := h.c.Call(within(t), r); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := h.c.CallPair(within(t), &CallPair{A: *h.heldCall("true"), B: *h.newCall("cat")}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("of a pair: %v", err)
	}

	// Killed from outside, as by a machine without memory.
	h.again()
	h.noProcesses()
	h.call(h.heldCall("true"))
	h.waiting(1)
	if err := exec.Command("kill", append([]string{"-9"}, h.callProcesses()...)...).Run(); err != nil {
		t.Fatal(err)
	}
	h.noProcesses()
	e, _, err := h.c.Call(within(t), h.heldCall("exit 5"))
	if errors.Is(err, sandbox.ErrLost) { // its caller tries again
		e, _, err = h.c.Call(within(t), h.heldCall("exit 5"))
	}
	if err != nil || e.Code != 5 {
		t.Errorf("after it was killed: %v %+v", err, e)
	}

	// Given up while its interpreter starts.
	ctx, cancel := context.WithTimeout(within(t), 50*time.Millisecond)
	r = h.heldCall("true")
	r.Argv = []string{"sh", "-c", "sleep 888; . ./main.sh"}
	if _, _, err := h.c.Call(ctx, r); err == nil {
		t.Error("given up: no error")
	}
	cancel()
	h.again()
	h.noProcesses()

	// Its layer is unmounted.
	h.call(h.heldCall("true"))
	h.waiting(1)
	if err := h.c.UnmountLayer(within(t), "base"); err != nil {
		t.Fatal(err)
	}
	h.waiting(0)
	h.noProcesses()
	if err := mountFile(within(t), h.c, "base", layerFile(t, nil)); err != nil {
		t.Fatal(err)
	}

	// Its host is gone.
	h.call(h.heldCall("true"))
	h.waiting(1)
	h.c.Close()
	h.noProcesses()
	h.dial()

	// Its keeper is killed.
	h.call(h.heldCall("true"))
	h.waiting(1)
	if err := exec.Command("kill", "-9", fmt.Sprint(h.c.Info().Pid)).Run(); err != nil {
		t.Fatal(err)
	}
	h.noProcesses()
	for end := time.Now().Add(longest); Sweep(h.cfg.Dir) != nil || len(leftGroups(h.cfg.Instance)) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("its groups can't be removed")
		}
	}
}

// What a standby leaves running beside it while it waits is ended, and no call is answered by it.
func TestStandbysSleep(t *testing.T) {
	h := open(t)
	r := h.heldCall("exit 3")
	r.Argv = []string{"sh", "-c", "(while :; do :; done) & . ./main.sh"}
	for range 2 {
		if e := h.call(r); e.Code != 3 || e.Ahead {
			t.Errorf("%+v", e)
		}
		h.waiting(1)
		h.noProcesses()
	}
}

// Requests of many kinds leave no more behind than are kept.
func TestKindsAreBounded(t *testing.T) {
	k := &Keeper{}
	k.host.Store(1)
	s := newStandbys(&calls{k: k})
	s.running = runtime.NumCPU() // make none
	for i := range 1000 {
		s.pop(&Call{Memory: int64(i)}, i%5)
	}
	if len(s.kinds) > 4 || s.n > 4 || s.n == 0 {
		t.Errorf("%d kinds with %d", len(s.kinds), s.n)
	}
}

// Those that nobody asks for go after a while.
func TestIdleStandbys(t *testing.T) {
	s := newStandbys(nil)
	now := time.Now()
	for i, age := range []time.Duration{time.Second, standbyIdle / 2, standbyIdle + time.Second} {
		s.kinds[[32]byte{byte(i)}] = &standbyKind{used: now.Add(-age), list: []*standby{{}, {}}}
		s.n += 2
	}
	s.dropIdle(now)
	if len(s.kinds) != 2 || s.n != 4 || s.kinds[[32]byte{2}] != nil {
		t.Errorf("%d kinds with %d", len(s.kinds), s.n)
	}
}

// A device that a call is given is there when its interpreter starts, so what drives it is loaded ahead; no other call has that interpreter.
func TestStandbysWithDevices(t *testing.T) {
	h := open(t)
	node := fakeDevice(t, "gpu0")
	load := "x=$(head -c 3 /dev/gpu0 2>/dev/null | wc -c); . ./main.sh"
	request := func(devices ...string) *Call {
		r := h.heldCall("echo $x; head -c 4 /dev/gpu0 2>/dev/null | wc -c")
		r.Argv, r.Devices = []string{"sh", "-c", load}, devices
		return r
	}
	for _, want := range []bool{false, true} {
		if e := h.call(request(node)); e.Ahead != want || string(e.Stdout) != "3\n4\n" {
			t.Errorf("with its device: %+v %s", e, e.Stdout)
		}
		h.waiting(1)
	}
	if e := h.call(request()); e.Ahead || string(e.Stdout) != "0\n0\n" {
		t.Errorf("without: %+v %s", e, e.Stdout)
	}
}

// While a call has a card alone nothing waits with that card but what this call takes, and what is to be made is made afterwards.
func TestStandbysOfACardTakenWhole(t *testing.T) {
	h := open(t)
	node := fakeDevice(t, "gpu0")
	call := func(card, env, script string, alone bool) *Call {
		r := h.heldCall(script)
		r.Env, r.Devices, r.Card, r.Alone = append(r.Env, "KIND="+env), []string{node}, card, alone
		return r
	}
	ahead := func(r *Call, want bool) {
		t.Helper()
		if e := h.call(r); e.Ahead != want || e.Code != 0 {
			t.Errorf("ahead %v, want %v: %+v", e.Ahead, want, e)
		}
	}
	for _, c := range []struct{ card, env string }{{"a", "mine"}, {"a", "other"}, {"b", "mine"}, {"", "none"}} {
		ahead(call(c.card, c.env, "exit 0", false), false)
	}
	h.waiting(4)
	ended := make(chan *CallEnd, 1)
	go func() {
		r := call("a", "mine", "sleep 6464; exit 0", true)
		r.Wall = longest
		ended <- h.call(r)
	}()
	h.waiting(2) // those of the other card and of none
	for _, c := range []struct{ card, env string }{{"b", "mine"}, {"", "none"}} {
		ahead(call(c.card, c.env, "exit 0", false), true)
	}
	h.waiting(2)
	select {
	case e := <-ended:
		t.Fatalf("it was over before it was looked at: %+v", e)
	default:
	}
	h.wake("6464")
	if e := <-ended; !e.Ahead || e.Code != 0 {
		t.Errorf("what waited for a call of its kind: %+v", e)
	}
	h.waiting(3) // the next of its kind too
	ahead(call("a", "other", "exit 0", false), false)
	h.waiting(4)
	r := h.newCall("true") // one that takes none ends all
	r.Devices, r.Card, r.Alone = []string{node}, "a", true
	if e := h.call(r); e.Code != 0 {
		t.Errorf("%+v", e)
	}
	h.waiting(2)
	r.Card = ""
	if _, _, err := h.c.Call(within(t), r); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("alone without a card: %v", err)
	}
}
