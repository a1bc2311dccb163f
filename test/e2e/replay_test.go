package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// A log whose records were changed and sealed again with right checksums: replay names the step.
func TestReplayNamesWhatWasChanged(t *testing.T) {
	t.Parallel()
	s := own(t)
	layer := s.small(t)
	sb, err := s.client().RunContainer(within(t), client.Options{Layers: []string{layer}, Memory: 64 << 20, Disk: 32 << 20, Pids: 64})
	must(t, err)
	for _, c := range [][2]string{{"a", "echo 1 >/srv/f; echo total 5"}, {"b", "sha256sum /srv/f"}, {"c", "cat /srv/f; exit 3"}} {
		_, err := sb.Run(within(t), client.Cmd{ID: c[0], Argv: []string{"sh", "-c", c[1]}})
		must(t, err)
	}
	must(t, sb.Stop(within(t)))
	must(t, s.finish(os.Interrupt))
	dir := filepath.Join(s.state, "log")
	kept := filepath.Join(ownDir(t), "log")
	must(t, os.Rename(dir, kept))

	// outputs gives a step another output, and its end the hash of it.
	outputs := func(step string, change func([]byte) []byte) func(*trajectory.Record) bool {
		var now []byte
		return func(r *trajectory.Record) bool {
			switch {
			case r.Step != step:
			case r.Kind == trajectory.KindOutput:
				r.Payload = change(r.Payload)
				now = append(now, r.Payload...)
			case r.Kind == trajectory.KindStepEnd:
				edit(t, r, func(o *dsecv1.Outcome) { o.Stdout.Sha256 = fmt.Sprintf("%x", sha256.Sum256(now)) })
			}
			return true
		}
	}
	for _, c := range []struct {
		name, step string
		change     func(*trajectory.Record) bool // false drops
	}{
		{"nothing", "", func(*trajectory.Record) bool { return true }},
		{"an exit code", "c", func(r *trajectory.Record) bool {
			if r.Step == "c" && r.Kind == trajectory.KindStepEnd {
				edit(t, r, func(o *dsecv1.Outcome) { o.Code = 0 })
			}
			return true
		}},
		{"one digit of output", "a", outputs("a", func(b []byte) []byte { return bytes.Replace(b, []byte("5"), []byte("6"), 1) })},
		{"one file's hash", "b", outputs("b", func(b []byte) []byte { b[7] ^= 1; return b })},
		{"a dropped step", "b", func(r *trajectory.Record) bool { return r.Step != "a" }},
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
			must(t, s.finish(os.Interrupt))
			must(t, os.RemoveAll(dir))
		})
	}
	must(t, os.Rename(kept, dir))
	must(t, s.begin())
}

// edit changes the outcome that a record tells: docs/format/records.md.
func edit(t *testing.T, r *trajectory.Record, change func(*dsecv1.Outcome)) {
	t.Helper()
	o := &dsecv1.Outcome{}
	if r.Payload[0] != 'o' {
		t.Fatalf("end of %s: tag %c", r.Step, r.Payload[0])
	}
	must(t, proto.Unmarshal(r.Payload[1:], o))
	change(o)
	b, err := proto.Marshal(o)
	must(t, err)
	r.Payload = append([]byte{'o'}, b...)
}

// reseal writes a log anew, record by record.
func reseal(t *testing.T, from, to string, change func(*trajectory.Record) bool) {
	t.Helper()
	ctx := context.Background()
	open := func(dir string) *trajectory.Log {
		l, err := trajectory.Open(trajectory.Default(dir), slog.New(slog.DiscardHandler))
		must(t, err)
		return l
	}
	old, now := open(from), open(to)
	for _, info := range old.Trajectories() {
		for r, err := range old.Follow(ctx, info.ID, trajectory.Query{}) {
			must(t, err)
			last := r.Seq == info.LastSeq
			if change(&r) {
				_, err = now.Append(ctx, info.ID, []trajectory.Record{r}, sandbox.DurabilityProcess)
				must(t, err)
			}
			if last {
				break
			}
		}
	}
	must(t, old.Close())
	must(t, now.Close())
}
