package host

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

func TestDifference(t *testing.T) {
	base := func() *dsecv1.StartRequest {
		return &dsecv1.StartRequest{Argv: []string{"a", "b"}, Env: []*dsecv1.EnvVar{{Name: "X", Value: "1"}}, Cwd: "/", Terminal: &dsecv1.Terminal{Rows: 1, Cols: 2}, TimeoutMs: 5}
	}
	for _, c := range []struct {
		change func(*dsecv1.StartRequest)
		want   string
	}{
		{func(r *dsecv1.StartRequest) {}, ""},
		{func(r *dsecv1.StartRequest) { r.Argv[1] = "c" }, `argv[1]: "b", now "c"`},
		{func(r *dsecv1.StartRequest) { r.Argv = r.Argv[:1] }, "argv: 2 entries, now 1"},
		{func(r *dsecv1.StartRequest) { r.Env[0].Value = "2" }, `env[0]: value: "1", now "2"`},
		{func(r *dsecv1.StartRequest) { r.Cwd, r.CwdRaw = "", []byte{0xff} }, `cwd: "/", now unset`},
		{func(r *dsecv1.StartRequest) { r.Terminal = nil }, "terminal: set, now unset"},
		{func(r *dsecv1.StartRequest) { r.Terminal.Cols = 9 }, "terminal.cols: 2, now 9"},
		{func(r *dsecv1.StartRequest) { r.TimeoutMs = 6; r.User = "u" }, `user: unset, now "u"`},
	} {
		is := base()
		c.change(is)
		if diff := cmp.Diff(c.want, difference(base(), is)); diff != "" {
			t.Error(diff)
		}
	}
}

// A stop of a sandbox with a step whose end nobody saw is the platform's fault, whoever asked for it.
func TestUnknownStepMakesThePlatformTheCause(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	if _, err := b.append(trajectory.Record{Kind: trajectory.KindStepStart, Step: "m", Payload: encode(tagMakeDir, &dsecv1.MakeDirRequest{At: b.canonicalPath("/x", "")})}); err != nil {
		t.Fatal(err)
	}
	r.crash()
	b = r.box(b.id)
	_, _, err := b.change(context.Background(), "m", tagMakeDir, &dsecv1.MakeDirRequest{At: b.canonicalPath("/x", "")}, "", nil)
	wantErr(t, err, sandbox.ErrLost, "not done again")
	r.mustStop(b)
	if s, c := b.now(); s != sandbox.Stopped || c.Class != sandbox.ClassPlatform || c.Reason != "unknown_step" {
		t.Fatalf("%s %+v", s, c)
	}
}

func TestTerminalIsOpaque(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	if _, _, err := b.start(context.Background(), &sandbox.Command{ID: "c", Argv: []string{"size"}, Terminal: &sandbox.Size{Rows: 40, Cols: 100}}); err != nil {
		t.Fatal(err)
	}
	b.mustWait(t, "c")
	if got := b.output(t, "c"); got != "40 100\n" {
		t.Fatalf("%q", got)
	}
	for _, rec := range r.records(b) {
		if rec.Kind == trajectory.KindStepStart && rec.Flags&trajectory.Opaque == 0 {
			t.Fatal("a terminal's step can't be done again, and its record does not say so")
		}
	}
}

func TestBadEntrypoint(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	_, _, err := r.h.create(context.Background(), createRequest("k", func(s *dsecv1.Spec) { s.Entrypoint = []string{"a\x00b"} }))
	wantErr(t, err, sandbox.ErrInvalid, "entrypoint", "argv[0]")
}

// Whatever lies in a record, reading it back neither panics nor hangs.
func FuzzStory(f *testing.F) {
	f.Add(uint8(trajectory.KindStepStart), "c", encode(tagCommand, &dsecv1.StartRequest{Argv: []string{"a"}}))
	f.Add(uint8(trajectory.KindState), "", encode(tagState, &dsecv1.LogRecord{State: "running", Data: []byte("h")}))
	f.Add(uint8(trajectory.KindStepEnd), "c", encode(tagOutcome, &dsecv1.Outcome{Kind: "exited"}))
	f.Add(uint8(trajectory.KindSessionClose), "s", encode(tagOutcome, &dsecv1.Outcome{Kind: "start_failed"}))
	f.Fuzz(func(t *testing.T, kind uint8, step string, payload []byte) {
		st := &story{history: newHistory(), loose: map[string]bool{}}
		for _, s := range []string{step, "c", step} {
			r := trajectory.Record{Seq: 1, Kind: trajectory.Kind(kind), Step: s, Payload: payload, Wall: time.Unix(1, 0)}
			st.add(&r)
			logRecord(&r, true)
		}
		if st.create != nil {
			(&Host{cfg: Config{ID: testHost}}).retell(trajectory.ID{}, st)
		}
	})
}

func TestDifferenceOfMaps(t *testing.T) {
	labels := func(m map[string]string) *dsecv1.CreateRequest { return &dsecv1.CreateRequest{Labels: m} }
	for want, q := range map[string][2]map[string]string{
		`labels["a"]: "1", now "2"`:   {{"a": "1", "b": "1"}, {"a": "2", "b": "2"}},
		`labels["b"]: unset, now "2"`: {{"a": "1"}, {"a": "1", "b": "2"}},
		`labels["a"]: "1", now unset`: {{"a": "1"}, nil},
		"":                            {{"a": "1"}, {"a": "1"}},
	} {
		if got := difference(labels(q[0]), labels(q[1])); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
