package host

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trace"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// looker is a backend whose instances tell what steps did, each look taking some time.
type looker struct {
	sandbox.Backend
	look func() time.Duration

	mu   sync.Mutex
	asks []trace.Ask
}

func (l *looker) Create(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (sandbox.Instance, error) {
	i, err := l.Backend.Create(ctx, id, spec, sink)
	return l.wrap(i), err
}

func (l *looker) Recover(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, handle []byte, sink sandbox.Sink) (sandbox.Instance, error) {
	i, err := l.Backend.Recover(ctx, id, spec, handle, sink)
	return l.wrap(i), err
}

func (l *looker) wrap(i sandbox.Instance) sandbox.Instance {
	if i == nil {
		return nil
	}
	return lookedAt{i, l}
}

type lookedAt struct {
	sandbox.Instance
	l *looker
}

func (x lookedAt) TraceStep(_ context.Context, q trace.Ask) (*trace.Answer, error) {
	x.l.mu.Lock()
	x.l.asks = append(x.l.asks, q)
	x.l.mu.Unlock()
	d := x.l.look()
	time.Sleep(d)
	a := &trace.Answer{}
	if q.Files {
		a.Files = &trace.Files{Took: d, Visited: fewNames, Changes: []trace.Change{{Path: "/f\xff", Kind: trace.Created, After: trace.State{Type: "file", Size: 1}}}}
	}
	return a, nil
}

func tracedRig(t *testing.T, look func() time.Duration) (*rig, *looker) {
	l := &looker{look: look}
	r := newRig(t, fake.Options{}, func(_ *Config, d *Deps) {
		l.Backend = d.Backends["container"]
		d.Backends["container"] = l
	})
	return r, l
}

func light(s *dsecv1.Spec) { s.Trace = "light" }

// told are the traces of a sandbox, in order.
func (r *rig) told(b *box) (all []*dsecv1.StepTrace) {
	for _, rec := range r.records(b) {
		if rec.Kind == trajectory.KindEvent {
			if _, m, err := decode(rec.Payload); err == nil {
				if p, ok := m.(*dsecv1.StepTrace); ok {
					all = append(all, p)
				}
			}
		}
	}
	return all
}

func TestTraceIsRecordedAfterItsStep(t *testing.T) {
	r, l := tracedRig(t, func() time.Duration { return 0 })
	b, off := r.create("k", light), r.create("off")
	if got := []string{b.proto().Trace, off.proto().Trace}; !cmp.Equal(got, []string{"light", "off"}) {
		t.Errorf("their levels are told as %q", got)
	}
	for _, id := range []string{"a", "b"} {
		b.mustStart(t, id, "true")
		b.mustWait(t, id)
	}
	off.mustStart(t, "a", "true")
	off.mustWait(t, "a")
	r.mustStop(b)
	r.mustStop(off)
	all := r.told(b)
	if len(all) != 2 || all[0].Step != "a" || all[1].Step != "b" || all[1].Previous != "a" || all[0].Raced || all[0].Shared || string(all[0].Files[0].PathRaw) != "/f\xff" {
		t.Errorf("%v", all)
	}
	ended := map[string]bool{}
	recs := r.records(b)
	for i, rec := range recs {
		switch {
		case rec.Kind == trajectory.KindStepEnd:
			ended[rec.Step] = true
		case rec.Kind == trajectory.KindEvent && (!ended[rec.Step] || i == len(recs)-1):
			t.Errorf("record %d of %d: the trace of %s stands before its end or behind that of the sandbox", i, len(recs), rec.Step)
		}
	}
	if n := len(r.told(off)); n != 0 || len(l.asks) != 2 {
		t.Errorf("without a trace: %d told, %d asked", n, len(l.asks))
	}
	r.restart() // a trace is no start of its step
	b = r.box(b.id)
	hist, err := b.load(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for id, s := range hist.steps {
		if !s.ended() || s.outcome.Kind != sandbox.Exited || hist.retries != 0 {
			t.Errorf("step %s after the restart: %v, %d retries", id, s.outcome, hist.retries)
		}
	}
}

func TestTraceTellsWhatRanBeside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := tracedRig(t, func() time.Duration { return 10 * traceWait })
		b := r.create("k", light)
		b.mustStart(t, "long", "sleep", "1000")
		b.mustStart(t, "short", "true")
		b.mustWait(t, "short")
		b.mustWait(t, "long")
		synctest.Wait()
		start := time.Now()
		b.mustStart(t, "next", "true") // the look at the last one takes too long to wait for
		if d := time.Since(start); d > 2*traceWait {
			t.Errorf("a step waited %v", d)
		}
		b.mustWait(t, "next")
		r.mustStop(b)
		byStep := map[string]*dsecv1.StepTrace{}
		for _, p := range r.told(b) {
			if byStep[p.Step] == nil {
				byStep[p.Step] = p
			}
		}
		for step, want := range map[string][2]bool{"short": {true, false}, "long": {true, false}, "next": {false, false}} {
			if p := byStep[step]; p == nil || p.Shared != want[0] || p.Raced != want[1] {
				t.Errorf("%s: %v, want shared %v and raced %v", step, p, want[0], want[1])
			}
		}
	})
}

// Whatever a look takes, looks take a small part of the time, and what was put off is told at the end.
func TestSlowLooksArePutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, l := tracedRig(t, func() time.Duration { return 100 * time.Millisecond })
		b := r.create("k", light)
		const steps = 300
		for i := range steps {
			id := string(rune('a'+i/26%26)) + string(rune('a'+i%26))
			b.mustStart(t, id, "sleep", "20")
			b.mustWait(t, id)
			time.Sleep(300 * time.Millisecond)
		}
		r.mustStop(b)
		files, deferred, covered := 0, 0, int64(0)
		for _, p := range r.told(b) {
			if p.Deferred {
				deferred++
				continue
			}
			files++
			covered += p.SinceStep
		}
		if files < 2 || files > steps/4 || deferred == 0 || covered != int64(deferred) && covered != int64(deferred)-1 {
			t.Errorf("%d looks at files, %d put off, %d made up for", files, deferred, covered)
		}
		if n := len(l.asks); n < steps || n > steps+1 {
			t.Errorf("%d questions of %d steps", n, steps)
		}
	})
}

func TestTraceOfABackendThatCant(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k", light)
	b.mustStart(t, "a", "true")
	b.mustWait(t, "a")
	if b.proto().Notes["trace"] == "" {
		t.Errorf("notes %v", b.proto().Notes)
	}
	r.mustStop(b)
	if n := len(r.told(b)); n != 0 {
		t.Errorf("%d traces", n)
	}
}

// What a restore does again has a trace of its own beside the first one, which stands; it is told of no later step, and no check is told of any.
func TestRestoreTracesWhatItDoesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := time.Duration(0)
		r, l := tracedRig(t, func() time.Duration { return slow })
		ctx := context.Background()
		old := r.create("k", light)
		old.mustRun(t, "a", "true")
		verify := &sandbox.Command{ID: "b", Argv: []string{"sleep", "1s"}, Class: sandbox.ClassVerify, Check: []string{"exit", "1"}}
		if _, _, err := old.start(ctx, verify); err != nil {
			t.Fatal(err)
		}
		old.mustWait(t, "b")
		old.mustRun(t, "c", "true")
		old.mustStart(t, "bg", "echo", "up", ";", "hang")
		r.loseKeeper(old)
		restore := func(slowly bool) (*box, []*dsecv1.StepTrace) {
			t.Helper()
			if slow = 0; slowly {
				slow = 50 * time.Millisecond
			}
			r.look(l)
			b, _ := r.mustRestore("k", func(q *dsecv1.RestoreRequest) { q.Repeat = []string{"*"} })
			slow = 0
			var again []*dsecv1.StepTrace
			for _, p := range r.told(b) {
				if p.Redo == int64(b.epoch.Load()) {
					again = append(again, p)
				}
			}
			return b, again
		}
		b, again := restore(false)
		if len(again) != 3 {
			t.Fatalf("of three steps that were done again and ended: %v", again)
		}
		for i, want := range []string{"a", "b", "c"} {
			if p := again[i]; p.Step != want || p.Number != int64(i+1) || p.Seq == 0 || p.Redo != 1 || p.Deferred || len(p.Files) != 1 || p.Shared || p.Previous != "" {
				t.Errorf("%s: %v", want, p)
			}
		}
		if asks := r.look(l); len(asks) != 5 { // and one of the check, which brings no files, and the last of all
			t.Errorf("asked: %+v", asks)
		}
		b.mustRun(t, "d", "true")
		r.loseKeeper(b)
		b, again = restore(true)
		if len(again) != 5 || again[0].Deferred || !again[2].Deferred || !again[3].Deferred || !again[3].Shared || again[4].SinceStep != 1 || again[4].Step != "d" {
			t.Errorf("with looks that take long: %v", again)
		}
		r.mustStop(b)

		first := map[string]int{}
		for _, p := range r.told(b) {
			if p.Redo == 0 {
				first[p.Step]++
			}
		}
		if d := cmp.Diff(map[string]int{"a": 1, "b": 1, "c": 1, "d": 1}, first); d != "" {
			t.Errorf("first traces: %s", d)
		}
		// Read, each stands beside the first, and none hides what has no trace.
		reader := newTraceReader(sandbox.TraceLight, &dsecv1.TraceRequest{})
		kinds := map[string][]string{}
		send := func(s *dsecv1.TraceStep) error {
			kinds[s.Step] = append(kinds[s.Step], s.Kind)
			return nil
		}
		for _, rec := range r.records(b) {
			if err := reader.add(&rec, send); err != nil {
				t.Fatal(err)
			}
		}
		if err := reader.rest(send); err != nil {
			t.Fatal(err)
		}
		want := map[string][]string{"a": {"command", "redo", "redo"}, "b": {"command", "redo", "redo"}, "c": {"command", "redo", "redo"}, "d": {"command", "redo", "redo"}, "bg": {"command"}}
		if d := cmp.Diff(want, kinds); d != "" {
			t.Error(d)
		}
	})
}

// look takes what a backend was asked so far.
func (r *rig) look(l *looker) []trace.Ask {
	l.mu.Lock()
	defer l.mu.Unlock()
	asks := l.asks
	l.asks = nil
	return asks
}

// What was refused to a step is told with it, bounded, whether it was traced or not, and not with the next one.
func TestTraceTellsWhatWasRefused(t *testing.T) {
	for _, level := range []string{"light", "off"} {
		r, _ := tracedRig(t, func() time.Duration { return 0 })
		b := r.create("k", func(s *dsecv1.Spec) { s.Trace = level })
		b.mustStart(t, "a", "hang")
		for range 3 {
			(*sink)(b).Denied(context.Background(), "a", "mount", "/proc")
		}
		if err := b.signal(context.Background(), "a", 9, ""); err != nil {
			t.Fatal(err)
		}
		b.mustWait(t, "a")
		b.mustRun(t, "b", "true")
		r.mustStop(b)
		reader := newTraceReader(sandbox.TraceLevel(level), &dsecv1.TraceRequest{})
		refused := map[string]int{}
		send := func(s *dsecv1.TraceStep) error { refused[s.Step] = len(s.Denials); return nil }
		for _, rec := range r.records(b) {
			if err := reader.add(&rec, send); err != nil {
				t.Fatal(err)
			}
		}
		if err := reader.rest(send); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(map[string]int{"a": 3, "b": 0}, refused); d != "" {
			t.Errorf("%s: %s", level, d)
		}
	}
}
