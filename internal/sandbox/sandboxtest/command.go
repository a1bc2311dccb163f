package sandboxtest

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func testCommands(t *testing.T, e *Env) {
	t.Run("arguments arrive octet for octet", func(t *testing.T) {
		b := e.box(t)
		args := []string{"a b", "", "new\nline", `quo"te'`, "$HOME", "*", "\xff\xfe", "-n", "\\", "ünï"}
		r := b.run(t, sandbox.Command{Argv: append([]string{"/bin/printf", `%s\0`}, args...)})
		wantExit(t, r, 0, strings.Join(args, "\x00")+"\x00")
	})
	t.Run("B37: environment values arrive octet for octet, names are never executed", func(t *testing.T) {
		b := e.box(t, func(s *sandbox.Spec) { s.Env = append(s.Env, "OVER=below", "BASE=b") })
		env := []string{"A=hello world", "B=l1\nl2", "C=x=y=z", "D= $HOME ", "E=", `F=it's "q"`, "G=\xff", "a;touch /tmp/p=1", "1A=2", "OVER=above"}
		r := b.run(t, sandbox.Command{Argv: []string{"/bin/env", "-0"}, Env: env})
		got := map[string]int{}
		for _, kv := range strings.Split(strings.TrimSuffix(r.stdout, "\x00"), "\x00") {
			got[kv]++
		}
		for _, kv := range append(env, "BASE=b", "HOME=/root") {
			if got[kv] != 1 {
				t.Errorf("%q came %d times in %q", kv, got[kv], r.stdout)
			}
		}
		if got["OVER=below"] != 0 {
			t.Error("the sandbox's value came beside the command's")
		}
		if b.out(t, "ls /tmp") != "" {
			t.Error("a name was executed")
		}
	})
	t.Run("B37: an argument as long as the kernel takes arrives", func(t *testing.T) {
		b := e.box(t)
		r := b.run(t, sandbox.Command{Argv: []string{"/bin/sh", "-c", `printf %s ${#1}`, "sh", strings.Repeat("x", sandbox.MaxArgument)}})
		wantExit(t, r, 0, fmt.Sprint(sandbox.MaxArgument))
	})
	t.Run("program names are found through PATH", func(t *testing.T) {
		b := e.box(t)
		wantExit(t, b.run(t, sandbox.Command{Argv: []string{"echo", "found"}}), 0, "found\n")
		r := b.run(t, sandbox.Command{Argv: []string{"tool"}, Env: []string{"PATH=/tmp/none"}})
		wantStartFailed(t, r, "tool")
	})
	t.Run("a command runs in its folder, whatever octets name it", func(t *testing.T) {
		b := e.box(t)
		dir := "/tmp/new\nline \xff"
		b.run(t, sandbox.Command{Argv: []string{"/bin/mkdir", dir}})
		wantExit(t, b.run(t, sandbox.Command{Argv: []string{"/bin/pwd"}, Cwd: dir}), 0, dir+"\n")
	})
	t.Run("a command runs as its user, by name or number", func(t *testing.T) {
		b := e.box(t)
		for user, want := range map[string]string{
			"root": "0 0", "alice": "1000 1000", "nobody": "65534 65534", "1000": "1000 1000", "1234:77": "1234 77", "0": "0 0",
		} {
			r := b.run(t, sandbox.Command{Argv: []string{"/bin/sh", "-c", "echo $(id -u) $(id -g)"}, User: user})
			if r.stdout != want+"\n" {
				t.Errorf("user %s: %s, ids %q, want %q (stderr %q)", user, describe(r.Outcome), r.stdout, want, r.stderr)
			}
		}
		r := b.run(t, sandbox.Command{Argv: []string{"/bin/cat", "/opt/locked/x"}, User: "alice"})
		if r.Code != 1 || !strings.Contains(r.stderr, "ermission denied") {
			t.Errorf("alice reads root's folder: %s, %q", describe(r.Outcome), r.stderr)
		}
	})
	t.Run("B36: a failure to start names its object and reason and looks like nothing else", func(t *testing.T) {
		b := e.box(t)
		for _, c := range []struct {
			name string
			cmd  sandbox.Command
			want string
		}{
			{"no such program", sandbox.Command{Argv: []string{"nosuch"}}, "nosuch"},
			{"no such path", sandbox.Command{Argv: []string{"/bin/nosuch"}}, "/bin/nosuch"},
			{"not executable", sandbox.Command{Argv: []string{"/opt/plain"}}, "/opt/plain"},
			{"no such interpreter", sandbox.Command{Argv: []string{"/opt/badinterp"}}, "/opt/badinterp"},
			{"a folder", sandbox.Command{Argv: []string{"/bin"}}, "/bin"},
			{"cwd missing", sandbox.Command{Argv: []string{"/bin/true"}, Cwd: "/no/where"}, "/no/where"},
			{"cwd a file", sandbox.Command{Argv: []string{"/bin/true"}, Cwd: "/etc/hosts"}, "/etc/hosts"},
			{"cwd closed", sandbox.Command{Argv: []string{"/bin/true"}, Cwd: "/opt/locked", User: "alice"}, "/opt/locked"},
			{"no such user", sandbox.Command{Argv: []string{"/bin/true"}, User: "nosuch"}, "nosuch"},
		} {
			t.Run(c.name, func(t *testing.T) { wantStartFailed(t, b.run(t, c.cmd), c.want) })
		}
		wantExit(t, b.run(t, sandbox.Command{Argv: []string{"/bin/sh", "-c", "nosuch"}}), 127, "")
	})
	t.Run("B36: a sandbox's default folder that is missing fails its commands, not the sandbox", func(t *testing.T) {
		b := e.box(t, func(s *sandbox.Spec) { s.Cwd = "/not/there" })
		wantStartFailed(t, b.run(t, sandbox.Command{Argv: []string{"/bin/true"}}), "/not/there")
		wantExit(t, b.run(t, sandbox.Command{Argv: []string{"/bin/true"}, Cwd: "/"}), 0, "")
	})
	t.Run("a command is never run twice under one ID", func(t *testing.T) {
		b := e.box(t)
		c := b.command(t, sh("echo x >>/tmp/count; sleep 0.2; cat /tmp/count"))
		for range 3 {
			if err := b.inst.Start(within(t), c); err != nil {
				t.Fatalf("start: %v", err)
			}
		}
		wantExit(t, b.wait(t, c.ID), 0, "x\n")
		if err := b.inst.Start(within(t), c); err != nil {
			t.Fatalf("start after the end: %v", err)
		}
		if got := b.out(t, "cat /tmp/count"); got != "x\n" {
			t.Errorf("it ran again: %q", got)
		}
		for id, want := range map[string]bool{c.ID: true, "never": false} {
			if got, err := b.inst.Known(within(t), id); err != nil || got != want {
				t.Errorf("Known(%s) = %v, %v; want %v", id, got, err, want)
			}
		}
	})
	t.Run("a signal reaches the command", func(t *testing.T) {
		b := e.box(t)
		id := b.start(t, sh("trap 'echo got; exit 7' USR1; echo ready; while :; do sleep 0.05; done"))
		b.waitText(t, id, sandbox.Stdout, "ready")
		if err := b.inst.Signal(within(t), id, 10); err != nil {
			t.Fatalf("signal: %v", err)
		}
		wantExit(t, b.wait(t, id), 7, "ready\ngot\n")
		if err := b.inst.Signal(within(t), "never", 15); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("signal to an unknown command: %v, want ErrNotFound", err)
		}
		if err := b.inst.Signal(within(t), id, 15); err != nil && !errors.Is(err, sandbox.ErrState) {
			t.Errorf("signal to an ended command: %v, want nothing or ErrState", err)
		}
	})
}

func wantStartFailed(t testing.TB, r result, object string) {
	t.Helper()
	if r.Kind != sandbox.StartFailed || !strings.Contains(r.Error, object) || r.Error == object {
		t.Errorf("%s; want start_failed that names %q and the reason", describe(r.Outcome), object)
	}
	if r.stdout != "" || r.stderr != "" || r.Code != 0 {
		t.Errorf("a failed start has stdout %q, stderr %q, code %d", r.stdout, r.stderr, r.Code)
	}
}
