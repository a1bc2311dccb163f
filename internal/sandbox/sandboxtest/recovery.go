package sandboxtest

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func testRecovery(t *testing.T, e *Env) {
	e.skipUnless(t, e.Restart != nil, NoRestart)
	// restart kills the daemon and starts another one, which takes back the boxes and sweeps.
	restart := func(t *testing.T, boxes ...*box) {
		t.Helper()
		for _, b := range boxes {
			b.rec.die()
		}
		e.Backend = e.Restart(t)
		living := map[sandbox.ID]bool{}
		for _, b := range boxes {
			b.rec.revive()
			inst, err := e.Backend.Recover(within(t), b.id, b.spec, b.inst.Handle(), b.rec)
			if err != nil {
				t.Fatalf("recover %s: %v", b.id, err)
			}
			b.inst = inst
			living[b.id] = true
		}
		if err := e.Backend.Sweep(within(t), living); err != nil {
			t.Fatalf("sweep: %v", err)
		}
	}
	t.Run("B15: commands go on while the daemon is away, and no octet and no end is lost or doubled", func(t *testing.T) {
		b := e.box(t)
		long := b.start(t, sh("i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo line $i; [ $((i%100)) != 0 ] || sleep 0.05; done; exit 5"))
		short := b.start(t, sh("sleep 0.3; echo x >>/tmp/count; echo short; exit 6"))
		b.waitText(t, long, sandbox.Stdout, "line 100\n")
		b.rec.die()
		time.Sleep(600 * time.Millisecond) // the short one ends with nobody there
		restart(t, b)
		wantExit(t, b.wait(t, short), 6, "short\n")
		var want strings.Builder
		for i := 1; i <= 3000; i++ {
			want.WriteString("line " + strconv.Itoa(i) + "\n")
		}
		wantExit(t, b.wait(t, long), 5, want.String())
		if got := b.out(t, "cat /tmp/count"); got != "x\n" {
			t.Errorf("a command ran again: %q", got)
		}
		for id, want := range map[string]bool{long: true, short: true, "never": false} {
			if got, err := b.inst.Known(within(t), id); err != nil || got != want {
				t.Errorf("Known(%s) = %v, %v; want %v", id, got, err, want)
			}
		}
	})
	t.Run("sessions, terminals, input and pause go on", func(t *testing.T) {
		b := e.box(t)
		c := sandbox.Command{Argv: []string{"/bin/cat"}, Stdin: []byte("ab"), StdinOpen: true}
		cat := b.start(t, c)
		b.waitText(t, cat, sandbox.Stdout, "ab")
		sessions := e.Backend.Capabilities().Sessions
		if sessions {
			if err := b.inst.OpenSession(within(t), &sandbox.Session{Name: "s", Cwd: "/tmp", User: "root"}); err != nil {
				t.Fatalf("open session: %v", err)
			}
			b.run(t, sandbox.Command{Session: "s", Text: "V=kept"})
		}
		restart(t, b)
		if _, err := b.inst.Stdin(within(t), cat, 1, []byte("bcd"), true); err != nil {
			t.Errorf("stdin: %v", err)
		}
		wantExit(t, b.wait(t, cat), 0, "abcd")
		if sessions {
			wantExit(t, b.run(t, sandbox.Command{Session: "s", Text: "echo $V; pwd"}), 0, "kept\n/tmp\n")
		}
		if e.level() == "" {
			return
		}
		b.pause(t)
		restart(t, b)
		b.resume(t)
		wantExit(t, b.run(t, sh("echo awake")), 0, "awake\n")
	})
	t.Run("a deadline and a timeout hold while the daemon is away", func(t *testing.T) {
		b, gone := e.box(t), e.box(t)
		c := sh("echo up; sleep 300")
		c.Timeout = e.roomy(time.Second)
		id := b.start(t, c)
		if err := gone.inst.SetDeadline(within(t), time.Now().Add(c.Timeout)); err != nil {
			t.Fatalf("set deadline: %v", err)
		}
		b.rec.die()
		gone.rec.die()
		time.Sleep(c.Timeout + 500*time.Millisecond)
		restart(t, b, gone)
		if r := b.wait(t, id); r.Kind != sandbox.TimedOut || r.stdout != "up\n" {
			t.Errorf("%s, %q", describe(r.Outcome), r.stdout)
		}
		if cause, ok := gone.rec.waitCause(Patience); !ok || cause.Reason != "total" {
			t.Errorf("deadline: told %v, %+v", ok, cause)
		}
	})
	t.Run("B39: what belongs to none of the living is swept, and nothing else", func(t *testing.T) {
		var before []string
		if e.Left != nil {
			before = e.Left(t)
		}
		kept, lost := e.box(t), e.box(t)
		kept.start(t, sh("sleep 306"))
		lost.start(t, sh("sleep 307"))
		restart(t, kept)
		if got := kept.out(t, "ps -o args | grep -c '[s]leep 306'"); got != "1\n" {
			t.Errorf("the living one lost its process: %q", got)
		}
		if _, err := e.Backend.Recover(within(t), lost.id, lost.spec, lost.inst.Handle(), lost.rec); !errors.Is(err, sandbox.ErrLost) {
			t.Errorf("recovery of a swept sandbox: %v, want ErrLost", err)
		}
		lost.endOnce.Do(func() {}) // its instance belongs to the dead daemon
		kept.destroy(t)
		e.nothingLeft(t, before)
	})
	t.Run("a handle that makes no sense is refused", func(t *testing.T) {
		for _, h := range [][]byte{nil, {}, []byte("x"), []byte(`{"slot":-1}`), []byte(`{"version":99}`)} {
			if _, err := e.Backend.Recover(within(t), sandbox.NewID(e.Host), e.spec(), h, newRecorder()); err == nil {
				t.Errorf("handle %q was taken", h)
			}
		}
	})
}
