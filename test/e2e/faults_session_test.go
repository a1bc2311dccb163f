package e2e

import (
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/client"
)

// shells are those that sessions are tried with: the small image's sh (busybox), Debian's bash and dash.
func shells(t *testing.T, s *service, f func(t *testing.T, sb *client.Sandbox, shell string)) {
	small, debian := s.box(t), s.debianBox(t)
	for _, c := range []struct {
		name  string
		sb    *client.Sandbox
		shell string
	}{{"busybox", small, ""}, {"bash", debian, ""}, {"dash", debian, "/bin/dash"}} {
		t.Run(c.name, func(t *testing.T) { f(t, c.sb, c.shell) })
	}
}

func session(t testing.TB, sb *client.Sandbox, o client.SessionOptions) *client.Session {
	t.Helper()
	ses, err := sb.Session(within(t), o)
	if err != nil {
		t.Fatalf("open a session: %v", err)
	}
	return ses
}

// soon fails a session's command that took so long that it must have waited for something.
func soon(t testing.TB, ses *client.Session, text string) *client.Result {
	t.Helper()
	begin := time.Now()
	r, err := ses.RunCmd(within(t), text, client.Cmd{Timeout: patience})
	if err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	if took := time.Since(begin); took > patience/2 {
		t.Errorf("%q took %v", text, took)
	}
	return r
}

func TestB05OddLastLines(t *testing.T) {
	t.Parallel()
	shells(t, shared(t), func(t *testing.T, sb *client.Sandbox, shell string) {
		ses := session(t, sb, client.SessionOptions{Shell: shell})
		for _, c := range []struct{ text, want string }{
			{"cat <<'EOF'\nhi\nEOF", "hi\n"},
			{"cat <<'EOF'\nhi\nEOF\n", "hi\n"},
			{"cat <<-EOF\n\thi\n\tEOF", "hi\n"},
			{"echo a # note", "a\n"},
			{"# only a note", ""},
			{"", ""},
			{"\n\n", ""},
			{"echo x &", "x\n"},
			{"echo x; ", "x\n"},
			{"(echo y)", "y\n"},
			{"{ echo y; }", "y\n"},
			{"cat <<X\n1\nX\necho 2", "1\n2\n"},
			{"cat <<A <<B\n1\nA\n2\nB", "2\n"},
			{"echo 'two\nlines'", "two\nlines\n"},
			{"f() {\necho in f\n}", ""},
			{"f", "in f\n"},
			{"echo end \\\n  of line", "end of line\n"},
		} {
			r := soon(t, ses, c.text)
			if r.Outcome.Kind != "exited" || r.Outcome.Code != 0 || r.Outcome.SessionEnd || string(r.Stdout) != c.want {
				t.Errorf("%q: %s; want %q", c.text, describe(r), c.want)
			}
		}
		// A backslash at the very end joins nothing: shells differ in whether it stays.
		if r := soon(t, ses, `echo b \`); !r.OK() || strings.TrimRight(string(r.Stdout), "\n \\") != "b" {
			t.Errorf("backslash: %s", describe(r))
		}
		for _, text := range []string{"echo 'c", `echo "c`, "if true", "while true; do", "echo $((1+", "fi", "a ( b", "case x in", "f() {"} {
			r := soon(t, ses, text)
			if r.Outcome.Kind != "exited" || r.Outcome.Code != 2 || len(r.Stderr) == 0 || len(r.Stdout) != 0 {
				t.Errorf("%q: %s; want a syntax error with exit 2", text, describe(r))
			}
			if r.Outcome.SessionEnd {
				t.Errorf("%q ended the session", text)
				ses = session(t, sb, client.SessionOptions{Shell: shell})
			}
		}
		// A here-document without its end takes the rest.
		if r := soon(t, ses, "cat <<EOF\nrest"); string(r.Stdout) != "rest\n" && string(r.Stdout) != "rest" {
			t.Errorf("here-document without an end: %s", describe(r))
		}
		want(t, soon(t, ses, "echo ok"), 0, "ok\n", "")
	})
}

func TestB17SessionEnds(t *testing.T) {
	t.Parallel()
	shells(t, shared(t), func(t *testing.T, sb *client.Sandbox, shell string) {
		for _, c := range []struct {
			text   string
			stdout string
			code   int
			signal int
		}{
			{"set -e; false", "", 1, 0},
			{"set -e\necho before\nfalse\necho after", "before\n", 1, 0},
			{"echo before; exit 3", "before\n", 3, 0},
			{"exit", "", 0, 0},
			{"exec sh -c 'exit 5'", "", 5, 0},
			{"exec sh -c 'echo replaced; exit 6'", "replaced\n", 6, 0},
			{"kill -9 $$", "", 0, 9},
			{"echo x; kill -TERM $$; sleep 5", "x\n", 0, 15},
			{"set -u; : $nosuch_variable", "", -1, 0},
		} {
			ses := session(t, sb, client.SessionOptions{Shell: shell})
			r := soon(t, ses, c.text)
			o := r.Outcome
			switch {
			case c.code < 0: // what an unset variable does is the shell's choice; it must be told, whatever it is
				if !o.SessionEnd {
					continue
				}
			case c.signal == 15 && !o.SessionEnd: // an interactive shell may ignore TERM
				continue
			case !o.SessionEnd:
				t.Errorf("%q: %s; want session_end", c.text, describe(r))
			case c.signal == 0 && (o.Kind != "exited" && o.Kind != "session_ended" || int(o.Code) != c.code):
				t.Errorf("%q: %s; want code %d", c.text, describe(r), c.code)
			case c.signal != 0 && int(o.Signal) != c.signal:
				t.Errorf("%q: %s; want signal %d", c.text, describe(r), c.signal)
			}
			if string(r.Stdout) != c.stdout {
				t.Errorf("%q: stdout %q, want %q", c.text, r.Stdout, c.stdout)
			}
			begin := time.Now()
			next, err := ses.Run(within(t), "echo next")
			switch {
			case err != nil:
				errorText(t, err, "session", "ended")
			case next.Outcome.Kind != "session_ended":
				t.Errorf("after %q: %s; want session ended", c.text, describe(next))
			}
			if took := time.Since(begin); took > patience/2 {
				t.Errorf("after %q: the refusal took %v", c.text, took)
			}
			// The name starts a new one, and says so.
			again := session(t, sb, client.SessionOptions{Name: ses.Name, Shell: shell})
			want(t, soon(t, again, "echo new"), 0, "new\n", "")
		}
	})
}

// A session keeps what a shell keeps, over many commands and users.
func TestSessionsKeepTheirState(t *testing.T) {
	t.Parallel()
	shells(t, shared(t), func(t *testing.T, sb *client.Sandbox, shell string) {
		ses := session(t, sb, client.SessionOptions{Shell: shell, User: "alice", Env: map[string]string{"A": "of the session"}})
		for _, c := range []struct{ text, want string }{
			{"cd /usr; B=2; export C=3; umask 077", ""},
			{"pwd; echo $A $B $C; umask; sh -c 'echo $B$C'", "/usr\nof the session 2 3\n0077\n3\n"},
			{"(sleep 30) & echo started", "started\n"},
			{"jobs >/tmp/j-$$; grep -c Running /tmp/j-$$; kill $! && echo found; wait; echo $?", "1\nfound\n0\n"},
			{"id -u", "1000\n"},
		} {
			if r := soon(t, ses, c.text); string(r.Stdout) != c.want {
				t.Errorf("%q: %s; want %q", c.text, describe(r), c.want)
			}
		}
		other := session(t, sb, client.SessionOptions{Shell: shell})
		want(t, soon(t, other, "pwd; echo \"[$B]\""), 0, "/\n[]\n", "")
	})
}
