package keeper

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

func TestOutputCap(t *testing.T) {
	h := open(t)
	id := h.create()
	const cap = 100_000
	tail := sandbox.Tail(cap)
	for _, n := range []int64{0, 1, cap - tail, cap - 1, cap, cap + 1, 3*cap + 7} {
		r := h.run(id, &sandbox.Command{Argv: []string{"/bin/sh", "-c", fmt.Sprintf("yes 0123456789 | head -c %d", n)}, OutputCap: cap})
		want := bytes.Repeat([]byte("0123456789\n"), int(n/11+1))[:n]
		sum := sha256.Sum256(want)
		e := r.outcome.Stdout
		if e.Total != n || e.SHA256 != hex.EncodeToString(sum[:]) || e.Truncated != (n > cap) || e.Head != min(n, cap-tail) || e.Tail != min(tail, n-e.Head) {
			t.Errorf("%d octets: %+v", n, e)
		}
		kept := append(append([]byte(nil), want[:e.Head]...), want[n-e.Tail:]...)
		if !bytes.Equal(r.out, kept) {
			t.Errorf("%d octets: kept %d, want %d", n, len(r.out), len(kept))
		}
		if r.outcome.Code != 0 {
			t.Errorf("%d octets: %+v", n, r.outcome)
		}
	}
}

// B15: the last octets of a process that prints and exits at once.
func TestLastOctets(t *testing.T) {
	h := open(t)
	id := h.create()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 25 {
				if r := h.run(id, sh("printf x")); string(r.out) != "x" || r.outcome.Stdout.Total != 1 {
					t.Errorf("%q %+v", r.out, r.outcome)
				}
				if r := h.run(id, sh("head -c 200000 /dev/zero")); len(r.out) != 200000 {
					t.Errorf("%d octets", len(r.out))
				}
				c := sh("seq 1 50; echo end")
				c.Terminal = &sandbox.Size{Rows: 40, Cols: 100}
				if r := h.run(id, c); !strings.HasSuffix(string(r.out), "50\r\nend\r\n") || r.outcome.Code != 0 {
					t.Errorf("%q", r.out)
				}
			}
		})
	}
	wg.Wait()
}

// B42: a child that keeps the output holds up nothing; a timeout kills what escaped the process group.
func TestOutputHeldAndTimeout(t *testing.T) {
	h := open(t)
	id := h.create()
	for range 2 {
		r := h.run(id, sh("sleep 300 & echo hi"))
		if string(r.out) != "hi\n" || !r.outcome.OutputOpen || r.outcome.Kind != sandbox.Exited {
			t.Errorf("%q %+v", r.out, r.outcome)
		}
	}
	c := sh(`echo a; setsid sh -c 'trap "" TERM; sleep 400' & sleep 400`)
	c.Timeout = 3 * time.Second // enough to come to its last sleep
	r := h.run(id, c)
	if r.outcome.Kind != sandbox.TimedOut || string(r.out) != "a\n" {
		t.Errorf("%q %+v", r.out, r.outcome)
	}
	if d := r.outcome.Ended.Sub(r.outcome.Started); d < c.Timeout {
		t.Errorf("timed out after %v", d)
	}
	if r := h.run(id, sh("ps | grep -c 'sleep [3]00'; ps | grep -c 'sleep [4]00'")); string(r.out) != "2\n0\n" {
		t.Errorf("%q %q %+v", r.out, r.err, r.outcome)
	}
}

func TestLateOutput(t *testing.T) {
	h := open(t)
	id := h.create()
	r := h.run(id, sh("(sleep 2; echo late) & echo now"))
	if string(r.out) != "now\n" || !r.outcome.OutputOpen {
		t.Fatalf("%q %+v", r.out, r.outcome)
	}
	h.rec.until(t, "late output", func() bool { return string(r.late) == "late\n" })
}

// A process that outlives its command and writes without pause writes also in the moment in which the end is told.
func TestLateOutputComesAfterTheEnd(t *testing.T) {
	h := open(t)
	id := h.create()
	for range 5 {
		r := h.run(id, sh("(timeout 3 yes; timeout 1 yes >&2) & echo now; timeout 1 yes >&2 &"))
		h.rec.until(t, "late output", func() bool { return len(r.late) > 0 })
		if r.early {
			t.Fatal("late output came before the end")
		}
	}
}

// B02, B41: reopened standard streams, for root and others.
func TestStandardStreams(t *testing.T) {
	h := open(t)
	id := h.create()
	for _, user := range []string{"root", "nobody", "alice", "1234:5"} {
		c := sh("echo a >/dev/stdout; echo b >/dev/stderr; echo c >/proc/self/fd/1")
		c.User = user
		if r := h.run(id, c); string(r.out) != "a\nc\n" || string(r.err) != "b\n" || r.outcome.Code != 0 {
			t.Errorf("%s: %q %q %+v", user, r.out, r.err, r.outcome)
		}
		c = &sandbox.Command{Argv: []string{"/bin/cat", "/dev/stdin"}, User: user, Stdin: []byte("x")}
		if r := h.run(id, c); string(r.out) != "x" {
			t.Errorf("%s: %q %q", user, r.out, r.err)
		}
	}
	c := sh("stty size; echo $TERM >/dev/null; until stty size | grep -q '50 120'; do sleep 0.1; done; stty size")
	c.Terminal = &sandbox.Size{Rows: 40, Cols: 100}
	c.ID = "tty"
	fill(c)
	if err := h.c.Start(within(t), id, c); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Resize(within(t), id, "tty", sandbox.Size{Rows: 50, Cols: 120}); err != nil {
		t.Fatal(err)
	}
	if r := h.rec.wait(t, id, "tty"); !strings.HasSuffix(string(r.out), "50 120\r\n") {
		t.Errorf("%q", r.out)
	}
}

func TestStdin(t *testing.T) {
	h := open(t)
	id := h.create()
	big := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	if r := h.run(id, &sandbox.Command{Argv: []string{"/bin/wc", "-c"}, Stdin: big}); string(r.out) != "1600000\n" {
		t.Errorf("%q", r.out)
	}
	if r := h.run(id, &sandbox.Command{Argv: []string{"/bin/true"}, Stdin: big}); r.outcome.Code != 0 {
		t.Errorf("%+v", r.outcome)
	}
	c := &sandbox.Command{ID: "in", Argv: []string{"/bin/cat"}, Stdin: []byte("ab"), StdinOpen: true}
	fill(c)
	ctx := within(t)
	if err := h.c.Start(ctx, id, c); err != nil {
		t.Fatal(err)
	}
	if n, err := h.c.Stdin(ctx, id, "in", 1, []byte("bcd"), false); n != 4 || err != nil {
		t.Errorf("%d %v", n, err)
	}
	if _, err := h.c.Stdin(ctx, id, "in", 5, []byte("x"), false); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("gap: %v", err)
	}
	if n, err := h.c.Stdin(ctx, id, "in", 4, []byte("e\n"), true); n != 6 || err != nil {
		t.Errorf("%d %v", n, err)
	}
	if r := h.rec.wait(t, id, "in"); string(r.out) != "abcde\n" {
		t.Errorf("%q", r.out)
	}
}

// B10, B36: how commands end.
func TestOutcomes(t *testing.T) {
	h := open(t)
	b := h.birth()
	b.Resources = sandbox.Resources{Memory: 48 << 20, Pids: 24}
	if _, err := h.c.Create(within(t), b); err != nil {
		t.Fatal(err)
	}
	hog := "exec awk 'BEGIN{s=\"0123456789abcdef\"; while(1) s=s s}'"
	for _, c := range []struct {
		name string
		cmd  *sandbox.Command
		want sandbox.Outcome
	}{
		{"exit 137", sh("exit 137"), sandbox.Outcome{Kind: sandbox.Exited, Code: 137}},
		{"abort", sh("kill -6 $$"), sandbox.Outcome{Kind: sandbox.Signalled, Signal: 6}},
		{"kill itself", sh("kill -9 $$"), sandbox.Outcome{Kind: sandbox.Signalled, Signal: 9}},
		{"out of memory", sh(hog), sandbox.Outcome{Kind: sandbox.OutOfMemory, Signal: 9, MemoryHit: true}},
		{"child out of memory", sh("sh -c '" + strings.ReplaceAll(hog, "'", `'\''`) + "'; exit 0"), sandbox.Outcome{Kind: sandbox.Exited, MemoryHit: true}},
		{"after it", sh("exit 3"), sandbox.Outcome{Kind: sandbox.Exited, Code: 3}},
		{"fork bomb", sh("i=0; while [ $i -lt 40 ]; do sleep 1 & i=$((i+1)); done 2>/dev/null; exit 4"), sandbox.Outcome{Kind: sandbox.Exited, Code: 2, PidsHit: true}},
		{"no program", &sandbox.Command{Argv: []string{"nosuch"}}, sandbox.Outcome{Kind: sandbox.StartFailed}},
		{"no cwd", &sandbox.Command{Argv: []string{"/bin/true"}, Cwd: "/nosuch"}, sandbox.Outcome{Kind: sandbox.StartFailed}},
		{"no user", &sandbox.Command{Argv: []string{"/bin/true"}, User: "nosuch"}, sandbox.Outcome{Kind: sandbox.StartFailed}},
	} {
		r := h.run(b.ID, c.cmd)
		o := *r.outcome
		if c.name == "fork bomb" {
			if !o.PidsHit {
				t.Errorf("%s: %+v", c.name, o)
			}
			time.Sleep(1200 * time.Millisecond) // its sleeps end, so that the next can fork
			continue
		}
		if o.Kind != c.want.Kind || o.Code != c.want.Code || o.Signal != c.want.Signal || o.MemoryHit != c.want.MemoryHit || (o.Kind == sandbox.StartFailed) != (o.Error != "") {
			t.Errorf("%s: %+v", c.name, o)
		}
	}
}

func TestSignalAndKnown(t *testing.T) {
	h := open(t)
	id := h.create()
	ctx := within(t)
	c := sh("trap 'echo got; exit 5' USR1; echo ready; while :; do sleep 0.05; done")
	c.ID = "sig"
	fill(c)
	for range 2 { // the second is a no-op
		if err := h.c.Start(ctx, id, c); err != nil {
			t.Fatal(err)
		}
	}
	h.rec.until(t, "ready", func() bool { return string(h.rec.get(id, "sig").out) == "ready\n" })
	if err := h.c.Signal(ctx, id, "sig", int(unix.SIGUSR1)); err != nil {
		t.Fatal(err)
	}
	if r := h.rec.wait(t, id, "sig"); string(r.out) != "ready\ngot\n" || r.outcome.Code != 5 {
		t.Errorf("%q %+v", r.out, r.outcome)
	}
	for cmd, want := range map[string]bool{"sig": true, "other": false} {
		if got, err := h.c.Known(ctx, id, cmd); got != want || err != nil {
			t.Errorf("%s: %v %v", cmd, got, err)
		}
	}
	if err := h.c.Start(ctx, id, c); err != nil {
		t.Error(err)
	}
	if err := h.c.Signal(ctx, id, "sig", 15); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("after the end: %v", err)
	}
}

func TestFreezeStopsClocks(t *testing.T) {
	h := open(t)
	id := h.create()
	ctx := within(t)
	c := sh("sleep 2; echo done")
	c.ID, c.Timeout = "slow", 3*time.Second
	fill(c)
	if err := h.c.Start(ctx, id, c); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Freeze(ctx, id); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Start(ctx, id, &sandbox.Command{ID: "no", Argv: []string{"/bin/true"}, Cwd: "/"}); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("start while frozen: %v", err)
	}
	time.Sleep(c.Timeout + 200*time.Millisecond)
	if h.rec.get(id, "slow").outcome != nil {
		t.Error("it ran on")
	}
	if err := h.c.Thaw(ctx, id); err != nil {
		t.Fatal(err)
	}
	if r := h.rec.wait(t, id, "slow"); r.outcome.Kind != sandbox.Exited || string(r.out) != "done\n" {
		t.Errorf("%q %+v", r.out, r.outcome)
	}
}

func TestDestroyFrozen(t *testing.T) {
	h := open(t)
	id := h.create()
	c := sh("sleep 100")
	c.ID = "c"
	fill(c)
	ctx := within(t)
	if err := h.c.Start(ctx, id, c); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Freeze(ctx, id); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Destroy(ctx, id); err != nil {
		t.Fatal(err)
	}
}

func TestDeadline(t *testing.T) {
	h := open(t)
	id := h.create()
	ctx := within(t)
	c := sh("echo x; sleep 100")
	c.ID = "long"
	fill(c)
	if err := h.c.Start(ctx, id, c); err != nil {
		t.Fatal(err)
	}
	h.rec.until(t, "output", func() bool { return string(h.rec.get(id, "long").out) == "x\n" })
	cause := sandbox.Cause{Class: sandbox.ClassLimit, Reason: "total"}
	if err := h.c.SetDeadline(ctx, id, DeadlineTotal, time.Now().Add(100*time.Millisecond), cause); err != nil {
		t.Fatal(err)
	}
	if r := h.rec.wait(t, id, "long"); r.outcome.Kind != sandbox.Killed || string(r.out) != "x\n" {
		t.Errorf("%q %+v", r.out, r.outcome)
	}
	h.rec.until(t, "end", func() bool { return h.rec.ended[id] == cause })
	if err := h.c.Start(ctx, id, &sandbox.Command{ID: "no", Argv: []string{"/bin/true"}, Cwd: "/"}); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("start after the end: %v", err)
	}
}

func TestStats(t *testing.T) {
	h := open(t)
	id := h.create()
	h.run(id, sh("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"))
	s, err := h.c.Stats(within(t), id)
	if err != nil || s.CPU <= 0 || s.Memory <= 0 || s.Pids != 0 {
		t.Errorf("%+v %v", s, err)
	}
}

func TestSessions(t *testing.T) {
	h := open(t)
	id := h.create()
	ctx := within(t)
	if err := h.c.OpenSession(ctx, id, &sandbox.Session{Name: "s", Env: []string{"A=1"}, Cwd: "/tmp"}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		text, out string
		code      int
	}{
		{"pwd; echo $A", "/tmp\n1\n", 0},
		{"cd /etc; B=2; f() { echo f$1; }", "", 0},
		{"pwd; echo $B; f 3", "/etc\n2\nf3\n", 0},
		{"cat <<'EOF'\nhi\nEOF", "hi\n", 0},
		{"false", "", 1},
		{"echo 'c", "", 2},
		{"sleep 200 & echo bg", "bg\n", 0},
		{"kill -0 $! && echo alive; echo x >/dev/stdout", "alive\nx\n", 0},
	} {
		r := h.run(id, &sandbox.Command{Session: "s", Text: c.text})
		if string(r.out) != c.out || r.outcome.Kind != sandbox.Exited || r.outcome.Code != c.code || r.outcome.SessionEnd {
			t.Errorf("%q: %q %q %+v", c.text, r.out, r.err, r.outcome)
		}
	}
	// A timeout kills what the command started, not the session nor what was there.
	r := h.run(id, &sandbox.Command{Session: "s", Text: "echo a; setsid sleep 500; echo b", Timeout: 3 * time.Second})
	if r.outcome.Kind != sandbox.TimedOut || r.outcome.SessionEnd || !strings.HasPrefix(string(r.out), "a\n") {
		t.Errorf("%q %+v", r.out, r.outcome)
	}
	if r := h.run(id, &sandbox.Command{Session: "s", Text: "echo $B; ps | grep -c 'sleep [2]00'; ps | grep -c 'sleep [5]00'"}); string(r.out) != "2\n1\n0\n" {
		t.Errorf("%q %q", r.out, r.err)
	}
	// B17: the shell ends with the command.
	r = h.run(id, &sandbox.Command{Session: "s", Text: "echo before; exit 3"})
	if string(r.out) != "before\n" || r.outcome.Code != 3 || !r.outcome.SessionEnd {
		t.Errorf("%q %+v", r.out, r.outcome)
	}
	h.rec.until(t, "session's end", func() bool { _, ok := h.rec.sessions[string(id)+" s"]; return ok })
	if err := h.c.Start(ctx, id, &sandbox.Command{ID: "next", Session: "s", Text: "echo"}); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("after the end: %v", err)
	}
	// A shell that is busy itself is killed.
	if err := h.c.OpenSession(ctx, id, &sandbox.Session{Name: "t", Cwd: "/", User: "alice"}); err != nil {
		t.Fatal(err)
	}
	if r := h.run(id, &sandbox.Command{Session: "t", Text: "id -u; echo y >/dev/stdout"}); string(r.out) != "1000\ny\n" {
		t.Errorf("%q %q", r.out, r.err)
	}
	r = h.run(id, &sandbox.Command{Session: "t", Text: "while :; do :; done", Timeout: 200 * time.Millisecond})
	if r.outcome.Kind != sandbox.TimedOut || !r.outcome.SessionEnd {
		t.Errorf("%+v", r.outcome)
	}
	if err := h.c.OpenSession(ctx, id, &sandbox.Session{Name: "u", Cwd: "/", Shell: "/bin/nosuch"}); err == nil {
		t.Error("opened a session without a shell")
	}
}

func TestHostile(t *testing.T) {
	h := open(t)
	for name, change := range map[string]func(*Birth){
		"layer":    func(b *Birth) { b.Layers = []string{"nosuch"} },
		"hostname": func(b *Birth) { b.Hostname = "a\nb" },
		"upper":    func(b *Birth) { b.UpperDir = "/nosuch/upper" },
		"uid":      func(b *Birth) { b.UIDBase = 0 },
		"filter":   func(b *Birth) { b.Seccomp = []byte{1, 2, 3} },
	} {
		b := h.birth()
		change(b)
		if _, err := h.c.Create(within(t), b); err == nil {
			t.Errorf("%s: created", name)
		}
	}
	// A link as /etc must not lead out.
	if err := mountFile(within(t), h.c, "links", linkLayer(t)); err != nil {
		t.Fatal(err)
	}
	b := h.birth()
	b.Layers = []string{"base", "links"}
	before, _ := os.ReadFile("/etc/hosts")
	_, err := h.c.Create(within(t), b)
	after, _ := os.ReadFile("/etc/hosts")
	if !bytes.Equal(before, after) {
		t.Fatal("the host's /etc/hosts was written")
	}
	t.Logf("a root with links out: %v", err)
	if l, err := h.c.List(within(t)); err != nil || len(l) > 1 {
		t.Errorf("%v %v", l, err)
	}
}

func TestFiles(t *testing.T) {
	h := open(t)
	id := h.create()
	ctx := within(t)
	if _, err := h.c.Files(ctx, id, "root"); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("without a program: %v", err)
	}
	// A stand-in that answers one line over descriptor 1.
	path := h.dir + "/guest"
	if err := os.WriteFile(path, []byte("#!/bin/sh\nread x <&1; echo \"$x $(id -u)\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h.c.Close()
	if h.c, err = Dial(ctx, h.cfg.Dir, DialOptions{Host: "test", Handler: h.rec, Guest: f}); err != nil {
		t.Fatal(err)
	}
	for user, want := range map[string]string{"root": "hi 0\n", "alice": "hi 1000\n"} {
		c, err := h.c.Files(ctx, id, user)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(longest))
		io.WriteString(c, "hi\n")
		got, err := io.ReadAll(c)
		if string(got) != want || err != nil {
			t.Errorf("%s: %q %v", user, got, err)
		}
		c.Close()
	}
	if _, err := h.c.Files(ctx, id, "nosuch"); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("unknown user: %v", err)
	}
	if l, err := h.c.List(ctx); err != nil || len(l) != 1 || len(l[0].Commands) != 0 {
		t.Errorf("%+v %v", l, err)
	}
}

// Creates that are cut, and stops at any moment, leave nothing (the check is in close).
func TestCancelledCreates(t *testing.T) {
	h := open(t)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 12 {
				b := h.birth()
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+(w*12+i)%40)*time.Millisecond)
				_, err := h.c.Create(ctx, b)
				cancel()
				if err == nil && i%2 == 0 {
					continue // shutdown takes it
				}
				if err := h.c.Destroy(within(t), b.ID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// Commands under way when the sandbox is destroyed end or vanish; nothing hangs.
func TestDestroyUnderLoad(t *testing.T) {
	h := open(t)
	for range 8 {
		id := h.create()
		ctx := within(t)
		if err := h.c.OpenSession(ctx, id, &sandbox.Session{Name: "s", Cwd: "/"}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for {
					c := sh("yes")
					fill(c)
					if h.c.Start(ctx, id, c) != nil {
						return
					}
					c = &sandbox.Command{Session: "s", Text: "sleep 0.01"}
					fill(c)
					if h.c.Start(ctx, id, c) != nil {
						return
					}
				}
			})
		}
		time.Sleep(30 * time.Millisecond)
		if err := h.c.Destroy(ctx, id); err != nil {
			t.Error(err)
		}
		wg.Wait()
	}
}

// A terminal's end of file reaches also a program that changes the mode of its terminal before it reads, and reads more than once.
func TestEndOfATerminal(t *testing.T) {
	h := open(t)
	id := h.create()
	for _, text := range []string{
		"cat; echo over",
		"sleep 0.4; stty -icanon; sleep 0.1; stty icanon; cat; echo over",
		"cat; cat; cat; echo over",
		"exec sh -i",
	} {
		c := sh(text)
		c.ID, c.Terminal = sandbox.NewKey(), &sandbox.Size{Rows: 40, Cols: 100}
		fill(c)
		if err := h.c.Start(within(t), id, c); err != nil {
			t.Fatal(err)
		}
		if n, err := h.c.Stdin(within(t), id, c.ID, 0, []byte("echo said\n"), true); err != nil || n != 10 {
			t.Fatal(n, err)
		}
		if r := h.rec.wait(t, id, c.ID); !strings.Contains(string(r.out), "said\r\n") || r.outcome.Kind != sandbox.Exited {
			t.Errorf("%s: %q %+v", text, r.out, r.outcome)
		}
	}
}
