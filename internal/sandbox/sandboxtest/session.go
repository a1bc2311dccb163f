package sandboxtest

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func testSessions(t *testing.T, e *Env) {
	e.skipUnless(t, e.Backend.Capabilities().Sessions, NoSessions)
	open := func(t *testing.T, b *box, s sandbox.Session) string {
		t.Helper()
		if s.Name == "" {
			s.Name = fmt.Sprintf("s%d", b.n.Add(1))
		}
		if s.Cwd == "" {
			s.Cwd = b.spec.Cwd
		}
		if s.User == "" {
			s.User = b.spec.User
		}
		if err := b.inst.OpenSession(within(t), &s); err != nil {
			t.Fatalf("open session %s: %v", s.Name, err)
		}
		return s.Name
	}
	say := func(t *testing.T, b *box, session, text string) result {
		t.Helper()
		return b.run(t, sandbox.Command{Session: session, Text: text})
	}
	t.Run("folder, variables, functions and options stay from one command to the next", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{Env: []string{"FROM=session"}, Cwd: "/tmp"})
		wantExit(t, say(t, b, s, "pwd; echo $FROM"), 0, "/tmp\nsession\n")
		wantExit(t, say(t, b, s, "cd /srv/base; X=1; export Y=2; f() { echo f$1; }; set -f"), 0, "")
		wantExit(t, say(t, b, s, "pwd; echo $X $Y *; f 3; sh -c 'echo $X-$Y'; exitcode() { return 9; }; exitcode"), 9, "/srv/base\n1 2 *\nf3\n-2\n")
		r := say(t, b, s, "echo out; echo err >&2; false")
		if r.Code != 1 || r.stdout != "out\n" || r.stderr != "err\n" {
			t.Errorf("%s, stdout %q, stderr %q", describe(r.Outcome), r.stdout, r.stderr)
		}
	})
	t.Run("sessions are apart from each other and from commands", func(t *testing.T) {
		b := e.box(t)
		one, two := open(t, b, sandbox.Session{}), open(t, b, sandbox.Session{User: "alice", Cwd: "/home/alice"})
		say(t, b, one, "V=one; cd /tmp")
		wantExit(t, say(t, b, two, "echo \"$V\" $(id -u); pwd"), 0, " 1000\n/home/alice\n")
		wantExit(t, say(t, b, one, "echo $V $(id -u); pwd"), 0, "one 0\n/tmp\n")
	})
	t.Run("opening a known session joins it", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{Name: "known"})
		say(t, b, s, "V=kept")
		open(t, b, sandbox.Session{Name: "known"})
		wantExit(t, say(t, b, s, "echo $V"), 0, "kept\n")
	})
	t.Run("B05: texts that end oddly do not hang or end the session", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{})
		for _, c := range []struct {
			text, stdout string
			code         int
		}{
			{"cat <<'EOF'\nhi\nEOF", "hi\n", 0},
			{"echo a # note", "a\n", 0},
			{"cat <<X\n1\nX\necho 2", "1\n2\n", 0},
			{"", "", 0},
			{"\n\n", "", 0},
			{"# only a note", "", 0},
			{"echo one;\n", "one\n", 0},
			{"echo a &&\necho b", "a\nb\n", 0},
			{"printf '%s' '}'", "}", 0},
		} {
			wantExit(t, say(t, b, s, c.text), c.code, c.stdout)
		}
		if r := say(t, b, s, `echo b \`); r.Code != 0 || (r.stdout != "b \\\n" && r.stdout != "b\n") {
			t.Errorf("backslash at the end: %s, %q", describe(r.Outcome), r.stdout)
		}
		for _, text := range []string{"echo 'c", "if true", "echo $(", "}", "for", "case x in"} {
			r := say(t, b, s, text)
			if r.Kind != sandbox.Exited || r.Code != 2 || r.stdout != "" || r.stderr == "" {
				t.Errorf("%q: %s, stdout %q, stderr %q; want a syntax error with exit 2", text, describe(r.Outcome), r.stdout, r.stderr)
			}
			if r.SessionEnd {
				t.Fatalf("%q ended the session", text)
			}
		}
		wantExit(t, say(t, b, s, "echo ok"), 0, "ok\n")
	})
	t.Run("B17: a shell that ends says how, and what follows is refused at once", func(t *testing.T) {
		b := e.box(t)
		for _, c := range []struct {
			text, stdout string
			kind         sandbox.OutcomeKind
			code, signal int
		}{
			{"set -e; false", "", sandbox.Exited, 1, 0},
			{"echo before; exit 3", "before\n", sandbox.Exited, 3, 0},
			{"exec sh -c 'exit 5'", "", sandbox.Exited, 5, 0},
			{"kill -9 $$", "", sandbox.Signalled, 0, 9},
		} {
			t.Run(c.text, func(t *testing.T) {
				s := open(t, b, sandbox.Session{})
				r := say(t, b, s, c.text)
				if r.Kind != c.kind || r.Code != c.code || r.Signal != c.signal || r.stdout != c.stdout || !r.SessionEnd {
					t.Errorf("%s, stdout %q; want %s %d %d with the session's end marked", describe(r.Outcome), r.stdout, c.kind, c.code, c.signal)
				}
				if _, ok := b.rec.waitSession(s, Patience); !ok {
					t.Error("the session's end was not told")
				}
				// Either refused before it starts or ended as session_ended; never a wait, never another shell unasked.
				next := b.command(t, sandbox.Command{Session: s, Text: "echo next"})
				err := b.inst.Start(within(t), next)
				if err == nil {
					if r := b.wait(t, next.ID); r.Kind != sandbox.SessionEnded || r.stdout != "" {
						t.Errorf("the next command: %s, %q", describe(r.Outcome), r.stdout)
					}
				} else if !errors.Is(err, sandbox.ErrState) && !errors.Is(err, sandbox.ErrNotFound) {
					t.Errorf("the next command: %v", err)
				}
				open(t, b, sandbox.Session{Name: s})
				wantExit(t, say(t, b, s, "echo new $V"), 0, "new\n")
			})
		}
	})
	t.Run("set -e stays an option of the shell", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{})
		wantExit(t, say(t, b, s, "set -e; echo a"), 0, "a\n")
		wantExit(t, say(t, b, s, "false || echo b"), 0, "b\n")
		if r := say(t, b, s, "echo c; false; echo d"); r.Code != 1 || r.stdout != "c\n" || !r.SessionEnd {
			t.Errorf("%s, %q", describe(r.Outcome), r.stdout)
		}
	})
	t.Run("B37: a text of 300 KB runs", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{})
		wantExit(t, say(t, b, s, "X='"+strings.Repeat("y", 300<<10)+"'; echo ${#X}"), 0, fmt.Sprintln(300<<10))
	})
	t.Run("a command's own input is empty, and its output is not the shell's", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{})
		wantExit(t, say(t, b, s, "cat; echo end"), 0, "end\n")
		wantExit(t, say(t, b, s, "exec >/tmp/elsewhere; echo hidden"), 0, "")
		r := say(t, b, s, "echo shown")
		if r.Kind != sandbox.Exited || r.Code != 0 {
			t.Errorf("after exec >file: %s", describe(r.Outcome))
		}
	})
	t.Run("output that looks like an end is only output", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{})
		wantExit(t, say(t, b, s, "printf 'exit 0\\n__END__ 0\\n\\0\\n'; (exit 6)"), 6, "exit 0\n__END__ 0\n\x00\n")
	})
	t.Run("jobs of the shell live on between commands and can be waited for", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{})
		say(t, b, s, "sh -c 'while [ ! -e /tmp/go ]; do sleep 0.05; done; exit 4' >/dev/null 2>&1 & P=$!")
		wantExit(t, say(t, b, s, "touch /tmp/go; wait $P"), 4, "")
	})
	t.Run("a timeout kills what the command started; an idle shell and earlier jobs live on", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{})
		say(t, b, s, "V=kept; sleep 301 >/dev/null 2>&1 &")
		r := b.run(t, sandbox.Command{Session: s, Text: "setsid sleep 302 & sleep 303; echo after", Timeout: time.Second})
		if r.Kind != sandbox.TimedOut || r.SessionEnd {
			t.Errorf("%s; want timed_out with the session alive", describe(r.Outcome))
		}
		wantExit(t, say(t, b, s, "echo $V; ps -o args | grep -c '[s]leep 30[23]'; ps -o args | grep -c '[s]leep 301'"), 0, "kept\n0\n1\n")
	})
	t.Run("a timeout of a shell that is itself busy ends the session, said so", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{})
		r := b.run(t, sandbox.Command{Session: s, Text: "trap '' TERM INT; while :; do :; done", Timeout: time.Second})
		if r.Kind != sandbox.TimedOut || !r.SessionEnd {
			t.Errorf("%s; want timed_out with the session's end marked", describe(r.Outcome))
		}
		if _, ok := b.rec.waitSession(s, Patience); !ok {
			t.Error("the session's end was not told")
		}
	})
	t.Run("closing a session kills its shell and its jobs", func(t *testing.T) {
		b := e.box(t)
		s := open(t, b, sandbox.Session{})
		say(t, b, s, "setsid sleep 304 >/dev/null 2>&1 &")
		busy := b.start(t, sandbox.Command{Session: s, Text: "sleep 305"})
		if err := b.inst.CloseSession(within(t), s); err != nil {
			t.Fatalf("close: %v", err)
		}
		if _, ok := b.rec.waitSession(s, Patience); !ok {
			t.Error("the session's end was not told")
		}
		if r := b.wait(t, busy); r.Kind != sandbox.Killed && r.Kind != sandbox.Signalled {
			t.Errorf("the running command: %s, want killed", describe(r.Outcome))
		}
		if got := b.out(t, "ps -o args | grep -c '[s]leep 30[45]' || true"); got != "0\n" {
			t.Errorf("%q processes of the session live", got)
		}
	})
	t.Run("a shell that is not there fails to open with its name", func(t *testing.T) {
		b := e.box(t)
		err := b.inst.OpenSession(within(t), &sandbox.Session{Name: "x", Shell: "/no/shell", Cwd: "/", User: "root"})
		if err == nil || !strings.Contains(err.Error(), "/no/shell") {
			t.Errorf("%v; want an error that names the shell", err)
		}
	})
}
