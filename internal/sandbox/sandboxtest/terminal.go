package sandboxtest

import (
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func testTerminals(t *testing.T, e *Env) {
	e.skipUnless(t, e.Backend.Capabilities().Terminal, NoTerminal)
	term := func(rows, cols uint16, text string) sandbox.Command {
		c := sh(text)
		c.Terminal = &sandbox.Size{Rows: rows, Cols: cols}
		return c
	}
	t.Run("B41: the size is there from the first octet on, and never 0 0", func(t *testing.T) {
		b := e.box(t)
		wantExit(t, b.run(t, term(40, 100, "stty size")), 0, "40 100\r\n")
		wantExit(t, b.run(t, term(0, 0, "stty size")), 0, "24 80\r\n")
	})
	t.Run("B41: a new size comes with one SIGWINCH", func(t *testing.T) {
		b := e.box(t)
		id := b.start(t, term(40, 100, "trap 'echo winch; stty size' WINCH; echo ready; i=0; while [ $i -lt 600 ] && [ ! -e /tmp/done ]; do sleep 0.05; i=$((i+1)); done"))
		b.waitText(t, id, sandbox.Stdout, "ready")
		if err := b.inst.Resize(within(t), id, sandbox.Size{Rows: 50, Cols: 120}); err != nil {
			t.Fatalf("resize: %v", err)
		}
		b.waitText(t, id, sandbox.Stdout, "winch\r\n50 120\r\n")
		b.out(t, "touch /tmp/done")
		if r := b.wait(t, id); strings.Count(r.stdout, "winch") != 1 {
			t.Errorf("stdout %q, want one winch", r.stdout)
		}
	})
	t.Run("input is a terminal's: echoed, edited, and interrupting", func(t *testing.T) {
		b := e.box(t)
		c := term(24, 80, "trap 'echo INT' INT; read line; echo \"got $line\"; tty; sleep 300; echo after")
		c.StdinOpen = true
		id := b.start(t, c)
		if _, err := b.inst.Stdin(within(t), id, 0, []byte("ab\x7fc\n"), false); err != nil {
			t.Fatalf("stdin: %v", err)
		}
		b.waitText(t, id, sandbox.Stdout, "got ac\r\n/dev/pts/")
		// The key must meet the program, not the shell between two of them.
		eventually(t, func() bool { return b.out(t, "ps -o args | grep -c '^sleep 300' || true") == "1\n" }, func() string { return "no sleep" })
		if _, err := b.inst.Stdin(within(t), id, 5, []byte("\x03"), false); err != nil {
			t.Fatalf("stdin: %v", err)
		}
		b.waitText(t, id, sandbox.Stdout, "INT\r\nafter\r\n")
		if r := b.wait(t, id); r.Kind != sandbox.Exited || r.stderr != "" {
			t.Errorf("%s, stderr %q", describe(r.Outcome), r.stderr)
		}
	})
	t.Run("the end of input reaches a program that reads", func(t *testing.T) {
		b := e.box(t)
		c := term(24, 80, "stty -echo; echo ready; cat; echo end")
		c.StdinOpen = true
		id := b.start(t, c)
		b.waitText(t, id, sandbox.Stdout, "ready")
		if _, err := b.inst.Stdin(within(t), id, 0, []byte("x\n"), true); err != nil {
			t.Fatalf("stdin: %v", err)
		}
		if r := b.wait(t, id); r.Kind != sandbox.Exited || r.stdout != "ready\r\nx\r\nend\r\n" {
			t.Errorf("%s, stdout %q", describe(r.Outcome), r.stdout)
		}
	})
	t.Run("a terminal's timeout kills what hides behind it", func(t *testing.T) {
		b := e.box(t)
		c := term(24, 80, "trap '' HUP TERM INT; echo ready; while :; do sleep 0.1; done")
		c.Timeout = sandbox.OutputGrace * 5
		if r := b.run(t, c); r.Kind != sandbox.TimedOut || r.stdout != "ready\r\n" {
			t.Errorf("%s, stdout %q", describe(r.Outcome), r.stdout)
		}
	})
}
