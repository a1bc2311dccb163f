package sandboxtest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// eat is a program of the root that takes so many MiB of memory and touches them: dd reads its whole block into one buffer.
func eat(mib int) []string {
	return []string{"/bin/dd", "if=/dev/zero", "of=/dev/null", fmt.Sprintf("bs=%dM", mib), "count=1"}
}

// endsByMemory runs a command over the memory limit in a sandbox that ends of it: both say so.
func (b *box) endsByMemory(t *testing.T, c sandbox.Command) {
	t.Helper()
	r := b.run(t, c)
	if r.Kind != sandbox.Killed && r.Kind != sandbox.OutOfMemory || !r.MemoryHit {
		t.Errorf("a program over the limit: %s; want it killed, with the memory hit marked", describe(r.Outcome))
	}
	cause, ok := b.rec.waitCause(Patience)
	if !ok || cause.Class != sandbox.ClassLimit || cause.Reason != "memory" {
		t.Errorf("the sandbox ended by %+v (%v); want limit(memory)", cause, ok)
	}
}

func testOutcomes(t *testing.T, e *Env) {
	t.Run("exit codes are exact", func(t *testing.T) {
		b := e.box(t)
		for _, code := range []int{0, 1, 2, 126, 127, 128, 130, 137, 143, 255} {
			wantExit(t, b.run(t, sh(fmt.Sprintf("exit %d", code))), code, "")
		}
	})
	t.Run("deaths by signal are exact and differ from exit codes", func(t *testing.T) {
		b := e.box(t)
		for _, sig := range []int{1, 2, 6, 9, 11, 13, 15} {
			r := b.run(t, sh(fmt.Sprintf("kill -%d $$", sig)))
			if r.Kind != sandbox.Signalled || r.Signal != sig || r.MemoryHit {
				t.Errorf("kill -%d: %s", sig, describe(r.Outcome))
			}
		}
	})
	t.Run("a timeout kills all of the command, keeps its output and says so", func(t *testing.T) {
		b := e.box(t)
		c := sh(`echo before; (setsid sh -c 'trap "" TERM INT HUP; echo child >/tmp/child; while :; do sleep 0.1; done' &) ; trap '' TERM; while :; do sleep 0.1; done`)
		c.Timeout = e.roomy(2 * time.Second)
		start := time.Now()
		r := b.run(t, c)
		if r.Kind != sandbox.TimedOut || r.stdout != "before\n" {
			t.Errorf("%s, stdout %q", describe(r.Outcome), r.stdout)
		}
		if d := time.Since(start); d < c.Timeout {
			t.Errorf("ended after %v, before its timeout of %v", d, c.Timeout)
		}
		if got := b.out(t, "cat /tmp/child; ps -o args | grep -c '[w]hile :' || true"); got != "child\n0\n" {
			t.Errorf("after the timeout: %q, want no process of the command alive", got)
		}
	})
	t.Run("B42: a timeout of one command does not hold up another", func(t *testing.T) {
		b := e.box(t)
		c := sh(`setsid sh -c 'trap "" TERM; sleep 300' & sleep 300`)
		c.Timeout = e.roomy(2 * time.Second)
		id := b.start(t, c)
		wantExit(t, b.run(t, sandbox.Command{Argv: []string{"/bin/echo", "next"}}), 0, "next\n")
		if b.rec.ended(id) {
			t.Error("the command with the timeout ended before the one that came later")
		}
		if r := b.wait(t, id); r.Kind != sandbox.TimedOut {
			t.Errorf("%s", describe(r.Outcome))
		}
		if got := b.out(t, "ps -o args | grep -c '[s]leep 300' || true"); got != "0\n" {
			t.Errorf("%s sleeps are alive", got)
		}
	})
	t.Run("B42: a child that keeps stdout does not hold up the end and lives on", func(t *testing.T) {
		b := e.box(t)
		for range 2 {
			r := b.run(t, sh("sleep 300 & echo hi"))
			wantExit(t, r, 0, "hi\n")
			if !r.OutputOpen {
				t.Errorf("the end does not say that output is still open: %s", describe(r.Outcome))
			}
		}
		if got := b.out(t, "ps -o args | grep -c '[s]leep 300'"); got != "2\n" {
			t.Errorf("%q background children live, want 2", got)
		}
	})
	t.Run("a server started in one step serves the next", func(t *testing.T) {
		b := e.box(t)
		r := b.run(t, sh("(while :; do date >/tmp/beat; sleep 0.05; done) >/dev/null 2>&1 &"))
		wantExit(t, r, 0, "")
		if r.OutputOpen {
			t.Error("output_open although nobody holds it")
		}
		b.out(t, "rm -f /tmp/beat; i=0; while [ ! -e /tmp/beat ]; do sleep 0.05; i=$((i+1)); [ $i -lt 600 ] || exit 1; done")
	})
	t.Run("B10: out of memory is told as such and nothing else is", func(t *testing.T) {
		b := e.box(t, func(s *sandbox.Spec) { s.Resources.Memory = 128 << 20 })
		if e.does(sandbox.FeatureMemoryEnds) {
			b.endsByMemory(t, sandbox.Command{Argv: eat(400)})
			b = e.box(t)
		}
		r := result{Outcome: sandbox.Outcome{Kind: sandbox.OutOfMemory, Signal: 9, MemoryHit: true}}
		if !e.does(sandbox.FeatureMemoryEnds) {
			r = b.run(t, sandbox.Command{Argv: eat(400)})
		}
		if r.Kind != sandbox.OutOfMemory || r.Signal != 9 || !r.MemoryHit {
			t.Errorf("a program over the limit: %s; want out_of_memory, signal 9", describe(r.Outcome))
		}
		for code, end := range map[int]string{0: "exit 0", 1: "exit 1"} {
			if e.does(sandbox.FeatureMemoryEnds) {
				break // nobody outlives it
			}
			r := b.run(t, sh(strings.Join(eat(400), " ")+" 2>/dev/null; "+end))
			if r.Kind != sandbox.Exited || r.Code != code || !r.MemoryHit {
				t.Errorf("a parent that ignores its killed child and does %q: %s; want exited %d with the memory hit marked", end, describe(r.Outcome), code)
			}
		}
		for text, want := range map[string]sandbox.Outcome{
			"exit 137":    {Kind: sandbox.Exited, Code: 137},
			"kill -6 $$":  {Kind: sandbox.Signalled, Signal: 6},
			"kill -9 $$":  {Kind: sandbox.Signalled, Signal: 9},
			"echo enough": {Kind: sandbox.Exited},
		} {
			r := b.run(t, sh(text))
			if r.Kind != want.Kind || r.Code != want.Code || r.Signal != want.Signal || r.MemoryHit {
				t.Errorf("%s: %s; want %s without a memory hit", text, describe(r.Outcome), describe(want))
			}
		}
	})
	t.Run("what a command used is told", func(t *testing.T) {
		b := e.box(t)
		r := b.run(t, sh("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"))
		if r.Usage.CPU <= 0 {
			t.Errorf("a loop of 200,000 turns used %v of CPU time", r.Usage.CPU)
		}
		if r.Started.IsZero() || r.Ended.Before(r.Started) {
			t.Errorf("started %v, ended %v", r.Started, r.Ended)
		}
		r = b.run(t, sandbox.Command{Argv: eat(50)})
		if p := r.Usage.MemoryPeak; p != -1 && (p < 50<<20 || p > 256<<20) {
			t.Errorf("a program that touches 50 MiB peaked at %d octets", p)
		}
	})
}
