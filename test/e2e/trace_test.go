package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// traceOf waits for the traces of so many steps.
func traceOf(t *testing.T, sb *client.Sandbox, steps int) map[string]*dsecv1.StepTrace {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		tr, err := sb.Trace(within(t), client.TraceOptions{})
		must(t, err)
		out := map[string]*dsecv1.StepTrace{}
		for _, s := range tr.Steps {
			if s.Trace != nil {
				out[s.Step] = s.Trace
			}
		}
		if len(out) >= steps {
			return out
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d steps were traced", len(out), steps)
		}
	}
}

func change(t *testing.T, tr *dsecv1.StepTrace, path string) *dsecv1.FileChange {
	t.Helper()
	for _, f := range tr.GetFiles() {
		if f.Path == path {
			return f
		}
	}
	t.Errorf("step %s: %s is not told: %v", tr.GetStep(), path, tr.GetFiles())
	return &dsecv1.FileChange{}
}

func TestTraceTellsWhatStepsDid(t *testing.T) {
	t.Parallel()
	s := own(t)
	layer := s.small(t)
	sb, err := s.client().RunContainer(within(t), client.Options{Layers: []string{layer}, Memory: 128 << 20, Disk: 64 << 20, Pids: 64, Trace: "full", Volatile: []string{"/cache"}})
	must(t, err)
	run := func(id, text string) {
		t.Helper()
		_, err := sb.Run(within(t), client.Cmd{ID: id, Argv: []string{"sh", "-c", text}})
		must(t, err)
	}
	run("make", "echo one >/srv/f; mkdir /srv/d; ln -s f /srv/l; mkdir -p /cache/x")
	run("look", "cat /srv/f >/dev/null; echo x >/cache/x/y")
	_, err = sb.Files().Write(within(t), "/srv/f", strings.NewReader("two\n"), client.WriteOptions{Step: "write"})
	must(t, err)
	run("drop", "rm -r /srv/d /srv/l; chmod 600 /srv/f")
	run("many", "mkdir /srv/many; cd /srv/many; i=0; while [ $i -lt 700 ]; do : >$i; i=$((i+1)); done")
	traceOf(t, sb, 5)
	s.kill() // what was remembered of its files goes with it
	must(t, s.begin())
	for row, err := range s.client().Rows(within(t), client.ExportOptions{}) { // a trace is no new start of its step
		must(t, err)
		if row["state"] != "ended" {
			t.Errorf("after the host's restart: %v", row)
		}
	}
	run("after", "echo three >/srv/f")
	tr := traceOf(t, sb, 6)

	if f := change(t, tr["make"], "/srv/f"); f.Kind != "created" || f.After.GetSize() != 4 || len(f.After.GetSha256()) != 32 {
		t.Errorf("%v", f)
	}
	if f := change(t, tr["make"], "/srv/l"); f.After.GetType() != "link" || f.After.GetLink() != "f" {
		t.Errorf("%v", f)
	}
	if n := len(tr["look"].GetFiles()); n != 0 || len(tr["look"].GetVolatilePaths()) != 1 {
		t.Errorf("look: %v", tr["look"])
	}
	if f := change(t, tr["write"], "/srv/f"); f.Kind != "changed" || f.Before.GetSize() != 4 || string(f.Before.GetSha256()) == string(f.After.GetSha256()) {
		t.Errorf("%v", f)
	}
	if f := change(t, tr["drop"], "/srv/f"); f.Before.GetMode() == f.After.GetMode() || f.After.GetMode() != 0o600 {
		t.Errorf("%v", f)
	}
	if f := change(t, tr["drop"], "/srv/l"); f.Kind != "removed" || f.Before.GetLink() != "f" {
		t.Errorf("%v", f)
	}
	if m := tr["many"]; int64(len(m.GetFiles()))+m.GetMoreFiles() != 701 || m.GetMoreFiles() == 0 {
		t.Errorf("many: %d told, %d more", len(m.GetFiles()), m.GetMoreFiles())
	}
	if f := change(t, tr["after"], "/srv/f"); f.Kind != "changed" {
		t.Errorf("%v", f)
	}

	file, err := sb.Trace(within(t), client.TraceOptions{File: "/srv/f"})
	must(t, err)
	if file.File.GetChangedLast() != "after" || file.File.GetChangedLastNumber() != 6 {
		t.Errorf("%v", file.File)
	}
	if v, err := sb.Trace(within(t), client.TraceOptions{File: "/cache/x/y"}); err != nil || v.File.GetVolatilePath() != "/cache" {
		t.Errorf("%v %v", v, err)
	}
	if len(tr["look"].GetLacking()) > 0 {
		t.Skipf("processes are not told here: %q", tr["look"].GetLacking())
	}
	if p := tr["look"].GetProcesses(); len(p) == 0 || p[0].GetArgv()[0] != "sh" || !p[0].GetEnded() {
		t.Errorf("processes: %v", p)
	}
	if file.File.GetReadFirst() != "look" {
		t.Errorf("%v", file.File)
	}
	third, err := sb.Trace(within(t), client.TraceOptions{Step: "3"})
	must(t, err)
	if len(third.Steps) != 1 || third.Steps[0].Step != "write" {
		t.Errorf("%v", third.Steps)
	}
	out, err := s.dsec("trace", "show", sb.ID, "--step", "drop").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "- /srv/l") {
		t.Errorf("%v %s", err, out)
	}

	// What a restore does again is not told of the step after it.
	must(t, sb.Stop(within(t)))
	again, err := s.client().Restore(within(t), sb.ID, client.RestoreOptions{})
	must(t, err)
	if again.State != "restored" {
		t.Fatalf("%v", again)
	}
	sb = again.Sandbox
	run("next", "echo 1 >/srv/new")
	next := traceOf(t, sb, 7)["next"]
	if change(t, next, "/srv/new"); len(next.GetFiles()) != 1 || len(next.GetProcesses()) != 1 {
		t.Errorf("after a restore: %v", next)
	}
	file, err = sb.Trace(within(t), client.TraceOptions{File: "/srv/f"})
	must(t, err)
	if file.File.GetChangedLast() != "after" {
		t.Errorf("after a restore: %v", file.File)
	}
}

// As TestReplayNamesWhatWasChanged, of what only a trace can tell: a file that nobody reads, and a step whose effect nobody sees.
func TestReplayComparesWhatWasTraced(t *testing.T) {
	t.Parallel()
	s := own(t)
	layer := s.small(t)
	sb, err := s.client().RunContainer(within(t), client.Options{Layers: []string{layer}, Memory: 64 << 20, Disk: 32 << 20, Pids: 64, Trace: "light", Volatile: []string{"/cache"}})
	must(t, err)
	for _, c := range [][2]string{{"a", "echo 1 >/srv/f; mkdir -p /cache; cat /proc/sys/kernel/random/uuid >/cache/u"}, {"b", "echo 2 >/srv/g"}, {"c", "echo 3 >/srv/h"}} {
		_, err := sb.Run(within(t), client.Cmd{ID: c[0], Argv: []string{"sh", "-c", c[1]}})
		must(t, err)
	}
	traceOf(t, sb, 3)
	must(t, sb.Stop(within(t)))
	must(t, s.finish(os.Interrupt))
	dir := filepath.Join(s.state, "log")
	kept := filepath.Join(ownDir(t), "log")
	must(t, os.Rename(dir, kept))
	for _, c := range []struct {
		name, step string
		change     func(*trajectory.Record) bool
	}{
		{"nothing", "", func(*trajectory.Record) bool { return true }},
		{"a file's hash", "b", func(r *trajectory.Record) bool {
			if r.Step == "b" && len(r.Payload) > 0 && r.Payload[0] == 'P' {
				m := &dsecv1.StepTrace{}
				must(t, proto.Unmarshal(r.Payload[1:], m))
				m.Files[0].After.Sha256[0] ^= 1
				b, err := proto.Marshal(m)
				must(t, err)
				r.Payload = append([]byte{'P'}, b...)
			}
			return true
		}},
		{"a dropped step", "b", func(r *trajectory.Record) bool { return r.Step != "b" }},
	} {
		t.Run(c.name, func(t *testing.T) {
			reseal(t, kept, dir, c.change)
			must(t, s.begin())
			out, err := s.dsec("replay", sb.ID).CombinedOutput()
			code := 0
			if x, ok := err.(*exec.ExitError); ok {
				code = x.ExitCode()
			}
			named := regexp.MustCompile(` ([a-c]) +different`).FindSubmatch(out)
			if (code != 0) != (c.step != "") || c.step == "" && named != nil || c.step != "" && (named == nil || string(named[1]) != c.step) {
				t.Errorf("code %d: %s", code, out)
			}
			if c.step == "" && !strings.Contains(string(out), "3 changed paths compared; volatile, not compared: /cache") {
				t.Errorf("%s", out)
			}
			must(t, s.finish(os.Interrupt))
			must(t, os.RemoveAll(dir))
		})
	}
	must(t, os.Rename(kept, dir))
	must(t, s.begin())
}
