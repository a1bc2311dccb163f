package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os/exec"
	"strings"
	"testing"
	"unicode"

	"github.com/dsec-dev/dsec/client"
)

// Whatever a client or a program inside put into a name: what the command line shows to people steers no terminal and has no lines of
// somebody else's making, and its JSON holds every character.
func TestHostileTextOnTheCommandLine(t *testing.T) {
	t.Parallel()
	s := shared(t)
	small := s.small(t)
	evil := "v\n\x1b]0;owned\x07\x1b[2J\x00\t\u202e\u0085"
	sb, err := s.client().RunContainer(within(t), client.Options{Layers: []string{small}, Labels: map[string]string{"evil": evil}, Job: "text", Memory: 64 << 20, Disk: 32 << 20})
	must(t, err)
	defer sb.Close()
	_, err = sb.Exec(within(t), "no\x1b[31m\nsuch")
	must(t, err)
	_, err = sb.Exec(within(t), "sh", "-c", "printf 'out\\033[31m\\001\\n'; mkdir -p '/srv/d'; mkfifo '/srv/d/f\x1b[31m\nx'")
	must(t, err)
	run := func(args ...string) string {
		t.Helper()
		b, err := s.dsec(args...).CombinedOutput()
		if _, failed := err.(*exec.ExitError); err != nil && !failed {
			t.Fatalf("%v: %v", args, err)
		}
		return string(b)
	}
	for _, args := range [][]string{
		{"ps", "--job", "text"}, {"inspect", sb.ID}, {"logs", sb.ID}, {"top", "--once"}, {"exec", sb.ID, "--", "no\x1b[31msuch"}, {"cp", sb.ID + ":/srv/d", t.TempDir()},
		{"exec", "no\x1b[31m\nsuch", "--", "true"}, {"create", "--layer", "x\x1b[31m\ny"}, {"ps", "--state", "a\x1b[31m"}, {"--bad\x1b[31m"}, {"stop", "x\x1b[31m"},
	} {
		for line := range strings.Lines(run(args...)) {
			if i := strings.IndexFunc(strings.TrimSuffix(line, "\n"), func(r rune) bool { return r != '\t' && !unicode.IsPrint(r) }); i >= 0 {
				t.Errorf("%q shows %q", args, line)
			}
		}
	}
	if n := strings.Count(run("ps", "--job", "text"), "\n"); n != 2 {
		t.Errorf("ps of one sandbox has %d lines: %q", n, run("ps", "--job", "text"))
	}
	var list []struct{ Labels map[string]string }
	if b := run("-o", "json", "ps", "--job", "text"); json.Unmarshal([]byte(b), &list) != nil || len(list) != 1 || list[0].Labels["evil"] != evil {
		t.Errorf("JSON: %q", b)
	}
	var top []struct {
		ID    string
		Stats map[string]any
	}
	if b := run("-o", "json", "top", "--once"); json.Unmarshal([]byte(b), &top) != nil || len(top) == 0 || top[0].ID == "" || len(top[0].Stats) == 0 {
		t.Errorf("top as JSON: %q", b)
	}
}

// An error names what was done and to what once, and does not say it again for every layer that it came through.
func TestErrorsSayThingsOnce(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	s.named(t, "odd", func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(tarOf(entry{name: "proc", kind: tar.TypeSymlink, link: "/x"}))), nil
	})
	for _, args := range [][]string{
		{"create", "--layer", "odd"}, {"create", "--layer", "nosuch"}, {"create", "--env", "nosuch"}, {"run", "--layer", "odd", "--", "true"}, {"stop", "nosuch"}, {"pause", "nosuch"},
		{"exec", "nosuch", "--", "true"}, {"exec", sb.ID, "--", "nosuch"}, {"exec", "-u", "nosuch", sb.ID, "--", "true"}, {"exec", "-w", "/nosuch", sb.ID, "--", "true"},
		{"cp", sb.ID + ":/nosuch", t.TempDir()}, {"cp", "/etc/hosts", sb.ID + ":/bin/sh/x"}, {"snapshot", sb.ID, "Bad Name"}, {"layer", "inspect", "nosuch"}, {"layer", "rollback", "odd", "9"},
		{"env", "create", "e", "--base", "nosuch"}, {"env", "inspect", "nosuch"}, {"key", "revoke", "nosuch"}, {"key", "create", "--project", "other"}, {"logs", "nosuch"},
		{"--url", "unix:/nosuch", "ps"}, {"--url", "http://127.0.0.1:1", "ps"}, {"up", "--state", "/proc/nosuch"}, {"up", "--state", s.state, "--run", t.TempDir(), "--listen", ""},
		{"up", "--state", t.TempDir(), "--run", t.TempDir(), "--listen", "127.0.0.1:99999"},
	} {
		b, err := s.dsec(args...).CombinedOutput()
		if err == nil {
			t.Errorf("%q succeeded: %s", args, b)
		}
		first, _, _ := strings.Cut(string(b), "\n")
		parts := strings.Split(strings.TrimPrefix(first, "dsec: "), ": ")
		for i, p := range parts[:len(parts)-1] {
			next := parts[i+1]
			verb, _, _ := strings.Cut(p, " ")
			again, _, _ := strings.Cut(next, " ")
			if p == next || verb == again && len(verb) > 3 || strings.HasPrefix(next, p+" ") {
				t.Errorf("%q says %q and then %q: %s", args, p, next, first)
			}
		}
	}
}
