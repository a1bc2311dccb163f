package host

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

func (r *rig) restore(key string, change func(*dsecv1.HostRestoreRequest)) (*dsecv1.RestoreResponse, error) {
	q := &dsecv1.HostRestoreRequest{Request: &dsecv1.RestoreRequest{Job: "j", Key: key}}
	if change != nil {
		change(q)
	}
	return r.h.restore(context.Background(), q)
}

// mustRestore restores and gives the new sandbox.
func (r *rig) mustRestore(key string, change func(*dsecv1.RestoreRequest)) (*box, *dsecv1.RestoreResponse) {
	r.t.Helper()
	resp, err := r.restore(key, func(q *dsecv1.HostRestoreRequest) {
		if change != nil {
			change(q.Request)
		}
	})
	if err != nil {
		r.t.Fatal(err)
	}
	if resp.State != "restored" {
		r.t.Fatalf("came to %v", resp)
	}
	return r.box(sandbox.ID(resp.Sandbox.Id)), resp
}

func (r *rig) loseKeeper(boxes ...*box) {
	r.t.Helper()
	r.world.KillKeeper()
	for _, b := range boxes {
		if err := b.waitEnd(context.Background()); err != nil {
			r.t.Fatal(err)
		}
	}
}

func (b *box) mustRun(t testing.TB, id string, argv ...string) {
	t.Helper()
	b.mustStart(t, id, argv...)
	b.mustWait(t, id)
}

func (b *box) mustSay(t testing.TB, session, id, text string) {
	t.Helper()
	if _, _, err := b.start(context.Background(), &sandbox.Command{ID: id, Session: session, Text: text}); err != nil {
		t.Fatal(err)
	}
	b.mustWait(t, id)
}

func (b *box) mustOpen(t testing.TB, name string) {
	t.Helper()
	if _, err := b.openSession(context.Background(), &sandbox.Session{Name: name}, nil); err != nil {
		t.Fatal(err)
	}
}

// stepsOf is what a walk yields last of each step.
func (b *box) stepsOf(t testing.TB) map[string]*dsecv1.Step {
	t.Helper()
	all := map[string]*dsecv1.Step{}
	if err := b.walk(context.Background(), 1<<20, false, func(s *dsecv1.Step) error { all[s.Id] = s; return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}

// A sandbox that is gone is made again: its steps are done again in order, its keys and the old ID answer what was recorded, what ran runs
// again, and all that outlives a restart of the host. It can be done over and over.
func TestRestore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		ctx := context.Background()
		old := r.create("k")
		old.mustRun(t, "a", "echo", "one")
		old.mustRun(t, "b", "exit", "3")
		if _, _, err := old.start(ctx, &sandbox.Command{ID: "c", Argv: []string{"cat"}, Stdin: []byte("in"), StdinOpen: true}); err != nil {
			t.Fatal(err)
		}
		if _, err := old.writeStdin(ctx, "c", 2, []byte(" and more"), true); err != nil {
			t.Fatal(err)
		}
		old.mustWait(t, "c")
		old.mustOpen(t, "shell")
		old.mustSay(t, "shell", "s1", "echo said")
		old.mustRun(t, "cut", "sleep", "5s")
		if _, _, err := old.start(ctx, &sandbox.Command{ID: "timed", Argv: []string{"hang"}, Timeout: time.Second}); err != nil {
			t.Fatal(err)
		}
		old.mustWait(t, "timed")
		old.mustStart(t, "server", "echo", "up", ";", "hang")
		time.Sleep(time.Second)
		r.loseKeeper(old)

		resp, err := r.restore("k", nil)
		if err != nil || resp.State != "asks" || len(resp.Asks) != 1 || resp.Asks[0].Step != "server" || !resp.Asks[0].CanRepeat {
			t.Fatal(resp, err)
		}
		if len(r.world.Alive()) != 0 {
			t.Fatal("a restore that asks left a sandbox")
		}
		last := old
		for n := range 3 {
			b, resp := r.mustRestore("k", func(q *dsecv1.RestoreRequest) { q.Repeat = []string{"server"} })
			if b.id == last.id || resp.Epoch != int64(n+1) || resp.Base != "environment" || len(resp.Diverged) > 0 || !slices.Equal(resp.Running, []string{"server"}) {
				t.Fatal(resp)
			}
			runs := r.world.Runs()
			for _, id := range []string{"a", "b", "c", "s1", "cut", "timed", "server"} {
				if got := runs[string(b.id)+" "+id]; got != 1 {
					t.Fatalf("%s ran %d times", id, got)
				}
			}
			check := func() {
				t.Helper()
				b, old := r.box(b.id), r.box(old.id)
				for _, x := range []*box{b, old} {
					if got := x.output(t, "a") + x.output(t, "c") + x.output(t, "s1"); got != "one\nin and moresaid\n" {
						t.Fatalf("%s answers %q", x.id, got)
					}
				}
				if o := old.mustWait(t, "server"); o.Kind != sandbox.Unknown {
					t.Fatalf("the old ID answers %v", o)
				}
				if s, existed, err := b.start(ctx, &sandbox.Command{ID: "a", Argv: []string{"echo", "one"}}); err != nil || !existed || s.outcome.Code != 0 {
					t.Fatal(existed, err)
				}
				_, _, err := b.start(ctx, &sandbox.Command{ID: "a", Argv: []string{"echo", "two"}})
				wantErr(t, err, sandbox.ErrExists, "argv[1]")
				s, existed, err := b.start(ctx, &sandbox.Command{ID: "server", Argv: []string{"echo", "up", ";", "hang"}})
				if err != nil || !existed || b.commandProto(s).State != "running" || b.output(t, "server") != "up\n" {
					t.Fatal(existed, err, b.commandProto(s), b.output(t, "server"))
				}
				if joined, err := b.openSession(ctx, &sandbox.Session{Name: "shell"}, nil); err != nil || !joined.Joined {
					t.Fatal(joined, err)
				}
				if again, existed, err := r.h.create(ctx, createRequest("k")); err != nil || !existed || again.id != b.id {
					t.Fatal(existed, err)
				}
				if p := old.proto(); p.Next == "" || p.State != "failed" {
					t.Fatal(p)
				}
				all, was := b.stepsOf(t), old.stepsOf(t)
				if all["a"].GetState() != "ended" || string(all["c"].GetStdout()) != "in and more" || all["server"].GetState() != "running" || was["server"].GetState() != "unknown" {
					t.Fatal(all, was)
				}
			}
			time.Sleep(time.Second)
			check()
			b.mustSay(t, "shell", fmt.Sprint("after", n), "echo after")
			r.restart()
			time.Sleep(time.Second)
			check()
			b = r.box(b.id)
			for _, e := range []string{"a", "server"} {
				if n := r.world.Runs()[string(b.id)+" "+e]; n != 1 {
					t.Fatalf("%s ran %d times", e, n)
				}
			}
			_, err := r.restore("k", nil)
			wantErr(t, err, sandbox.ErrState, string(b.id), "lives")
			if n == 2 { // its end is that of the key from now on
				if err := b.signal(ctx, "server", 15, ""); err != nil {
					t.Fatal(err)
				}
				if o := b.mustWait(t, "server"); o.Kind != sandbox.Signalled {
					t.Fatal(o)
				}
			}
			r.loseKeeper(b)
			last, old = b, r.box(old.id)
		}
		all := last.stepsOf(t)
		for n := range 3 {
			if string(all[fmt.Sprint("after", n)].GetStdout()) != "after\n" {
				t.Fatalf("what was done after restore %d: %v", n, all)
			}
		}
		if s := all["server"]; s.GetOutcome().GetKind() != "signalled" || string(s.Stdout) != "up\n" {
			t.Fatal(s)
		}
		// It ended, so nobody need be asked.
		b, _ := r.mustRestore("k", nil)
		if s, _, err := b.start(ctx, &sandbox.Command{ID: "server", Argv: []string{"echo", "up", ";", "hang"}}); err != nil || b.commandProto(s).Outcome.GetKind() != "signalled" {
			t.Fatal(err)
		}
		r.mustStop(b)
		r.restart()
		if got := r.box(b.id).output(t, "a"); got != "one\n" {
			t.Fatal(got)
		}
	})
}

// What only the caller can decide is asked for before anything is done; classes that are stated, or the job's, decide it.
func TestRestoreClasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		ctx := context.Background()
		open := func(s *dsecv1.Spec) { s.Network = "open" }
		old := r.create("k", open)
		start := func(c sandbox.Command) {
			t.Helper()
			if _, _, err := old.start(ctx, &c); err != nil {
				t.Fatal(err)
			}
			old.mustWait(t, c.ID)
		}
		start(sandbox.Command{ID: "net", Argv: []string{"echo", "posted"}})
		start(sandbox.Command{ID: "safe", Argv: []string{"echo", "read"}, Class: sandbox.ClassRepeat})
		start(sandbox.Command{ID: "done", Argv: []string{"echo", "x"}, Class: sandbox.ClassVerify, Check: []string{"true"}})
		start(sandbox.Command{ID: "undone", Argv: []string{"echo", "y"}, Class: sandbox.ClassVerify, Check: []string{"exit", "1"}})
		start(sandbox.Command{ID: "tty", Argv: []string{"size"}, Terminal: &sandbox.Size{Rows: 1, Cols: 2}})
		_, _, err := old.start(ctx, &sandbox.Command{ID: "bad", Argv: []string{"true"}, Class: sandbox.ClassVerify})
		wantErr(t, err, sandbox.ErrInvalid, "check")
		// The class is no part of what a key stands for.
		if _, existed, err := old.start(ctx, &sandbox.Command{ID: "safe", Argv: []string{"echo", "read"}}); err != nil || !existed {
			t.Fatal(existed, err)
		}
		r.loseKeeper(old)
		r.restart()
		old = r.box(old.id)
		if _, existed, err := old.start(ctx, &sandbox.Command{ID: "safe", Argv: []string{"echo", "read"}, Class: sandbox.ClassNever}); err != nil || !existed {
			t.Fatal(existed, err)
		}

		resp, err := r.restore("k", nil)
		if err != nil || resp.State != "asks" || len(resp.Asks) != 2 || resp.Asks[0].Step != "net" || resp.Asks[1].Step != "tty" || resp.Asks[1].CanRepeat {
			t.Fatal(resp, err)
		}
		resp, err = r.restore("k", func(q *dsecv1.HostRestoreRequest) { q.Request.Repeat = []string{"*"} })
		if err != nil || resp.State != "asks" || len(resp.Asks) != 1 || resp.Asks[0].Step != "tty" {
			t.Fatal("what can't be done again is asked about", resp, err)
		}
		b, resp := r.mustRestore("k", func(q *dsecv1.RestoreRequest) { q.Skip, q.Repeat = []string{"tty"}, []string{"net"} })
		if resp.RepeatedSteps != 3 || resp.SkippedSteps != 2 {
			t.Fatal(resp)
		}
		runs := r.world.Runs()
		for id, want := range map[string]int{"net": 1, "safe": 1, "done": 0, "undone": 1, "tty": 0} {
			if got := runs[string(b.id)+" "+id]; got != want {
				t.Errorf("%s ran %d times, want %d", id, got, want)
			}
		}
		if got := b.output(t, "tty"); got != "1 2\n" {
			t.Errorf("a skipped step answers %q", got)
		}
		r.loseKeeper(b)
		// The job's class.
		if _, err := r.h.putJob(ctx, &dsecv1.Job{Name: "j", Restore: "sometimes"}); err == nil {
			t.Error("a class that is none was taken")
		}
		if _, err := r.h.putJob(ctx, &dsecv1.Job{Name: "j", Restore: "repeat"}); err != nil {
			t.Fatal(err)
		}
		r.restart()
		b, _ = r.mustRestore("k", func(q *dsecv1.RestoreRequest) { q.Skip = []string{"*"} })
		if n := r.world.Runs()[string(b.id)+" net"]; n != 1 {
			t.Errorf("net ran %d times", n)
		}
	})
}

func TestRestoreSecrets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		ctx := context.Background()
		secret := func(s *dsecv1.Spec) { s.Env = []*dsecv1.EnvVar{{Name: "TOKEN", Value: "s3cret", Secret: true}} }
		old := r.create("k", secret)
		if _, _, err := old.start(ctx, &sandbox.Command{ID: "a", Argv: []string{"env"}, Env: []string{"PW=pw"}, SecretEnv: []string{"PW"}}); err != nil {
			t.Fatal(err)
		}
		old.mustWait(t, "a")
		r.loseKeeper(old)
		resp, err := r.restore("k", nil)
		if err != nil || resp.State != "asks" || !slices.Equal(resp.Secrets, []string{"PW", "TOKEN"}) {
			t.Fatal(resp, err)
		}
		given := func(pw string) func(q *dsecv1.HostRestoreRequest) {
			return func(q *dsecv1.HostRestoreRequest) {
				q.Request.Secrets = []*dsecv1.EnvVar{{Name: "TOKEN", Value: "s3cret"}, {Name: "PW", Value: pw}}
			}
		}
		_, err = r.restore("k", given("wrong"))
		wantErr(t, err, sandbox.ErrInvalid, "PW")
		resp, err = r.restore("k", given("pw"))
		if err != nil || resp.State != "restored" || len(resp.Diverged) > 0 {
			t.Fatal(resp, err)
		}
		b := r.box(sandbox.ID(resp.Sandbox.Id))
		for _, rec := range r.records(b) {
			if rec.Kind != trajectory.KindOutput && bytes.Contains(rec.Payload, []byte("s3cret")) {
				t.Fatalf("a secret lies in record %d (%v)", rec.Seq, rec.Kind)
			}
		}
		if _, existed, err := r.h.create(ctx, createRequest("k", secret)); err != nil || !existed {
			t.Fatal(existed, err)
		}
		b.mustRun(t, "new", "env")
		if got := b.output(t, "new"); !strings.Contains(got, "TOKEN=s3cret") {
			t.Fatal(got)
		}
	})
}

// A step that comes to something else ends a strict restore, of which nothing is left; with warn it is told.
func TestRestoreThatDiverges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		old := r.create("k", func(s *dsecv1.Spec) { s.Name = "n" })
		old.mustRun(t, "a", "echo", "same")
		old.mustRun(t, "who", "id")
		old.mustRun(t, "z", "echo", "last")
		r.loseKeeper(old)
		for range 2 {
			resp, err := r.restore("k", nil)
			if err != nil || resp.State != "diverged" || len(resp.Diverged) != 1 || resp.Diverged[0].Step != "who" || !strings.Contains(resp.Diverged[0].Why, "stdout") || resp.Sandbox != nil {
				t.Fatal(resp, err)
			}
			if alive := r.world.Alive(); len(alive) > 0 {
				t.Fatal("left behind", alive)
			}
			if p := r.box(old.id).proto(); p.Next != "" {
				t.Fatal(p)
			}
			r.restart()
		}
		b, resp := r.mustRestore("k", func(q *dsecv1.RestoreRequest) { q.Policy = "warn" })
		if resp.Differing != 1 || r.world.Runs()[string(b.id)+" z"] != 1 {
			t.Fatal(resp)
		}
		if got := b.output(t, "who"); got != string(old.id)+"\n" {
			t.Fatalf("the key answers %q, not what was recorded", got)
		}
		if found, err := r.h.get(context.Background(), "n"); err != nil || found.id != b.id {
			t.Fatal("its name does not lead to it", err)
		}
		kinds := map[string]int{}
		for _, rec := range r.records(b) {
			if rec.Kind == trajectory.KindRedo {
				if _, m, err := decode(rec.Payload); err == nil {
					if d, ok := m.(*dsecv1.Redo); ok {
						kinds[d.Verdict]++
					}
				}
			}
		}
		if kinds[redoDifferent] != 3 || kinds[redoEqual] != 4 {
			t.Fatal(kinds)
		}
	})
}

func TestRestoreRefusals(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	ctx := context.Background()
	b := r.create("k")
	_, err := r.restore("k", nil)
	wantErr(t, err, sandbox.ErrState, string(b.id), "lives")
	_, err = r.restore("other", nil)
	wantErr(t, err, sandbox.ErrNotFound, "other")
	_, err = r.h.restore(in("elsewhere"), &dsecv1.HostRestoreRequest{Request: &dsecv1.RestoreRequest{Sandbox: string(b.id)}})
	wantErr(t, err, sandbox.ErrNotFound)
	for what, change := range map[string]func(*dsecv1.RestoreRequest){
		"policy":        func(q *dsecv1.RestoreRequest) { q.Policy = "lenient" },
		"skip and in":   func(q *dsecv1.RestoreRequest) { q.Skip, q.Repeat = []string{"x"}, []string{"x"} },
		"at most":       func(q *dsecv1.RestoreRequest) { q.Skip = make([]string, maxAnswers+1) },
		"id":            func(q *dsecv1.RestoreRequest) { q.Id = "a b" },
		"job and key":   func(q *dsecv1.RestoreRequest) { q.Sandbox = string(b.id) },
		"secrets: 1025": func(q *dsecv1.RestoreRequest) { q.Secrets = make([]*dsecv1.EnvVar, maxSecrets+1) },
		"wait":          func(q *dsecv1.RestoreRequest) { q.WaitMs = -1 },
	} {
		_, err := r.restore("k", func(q *dsecv1.HostRestoreRequest) { change(q.Request) })
		wantErr(t, err, sandbox.ErrInvalid, what)
	}
	_, err = r.restore("gone", func(q *dsecv1.HostRestoreRequest) { q.LostHost, q.SilentMs = "hother1", -1 })
	wantErr(t, err, sandbox.ErrUnsupported, "--store")
	r.mustStop(b)
	// A layer that is gone: the backend refuses, and all is as before.
	failed := false
	r2 := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, _ string) error {
		if op == fake.OpCreate && failed {
			return fmt.Errorf("layer sha256:00: %w", sandbox.ErrNotFound)
		}
		return nil
	}}, nil)
	b2 := r2.create("k")
	r2.mustStop(b2)
	failed = true
	_, err = r2.restore("k", nil)
	wantErr(t, err, sandbox.ErrNotFound, "layer")
	failed = false
	r2.mustRestore("k", nil)
	// An expired job.
	if _, err := r.h.removeLogs(ctx, "j", 0); err != nil {
		t.Fatal(err)
	}
	_, err = r.restore("k", nil)
	wantErr(t, err, sandbox.ErrState, "expired")
}

// It begins from the last snapshot at which nothing ran.
func TestRestoreFromASnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		ctx := context.Background()
		old := r.create("k")
		old.mustRun(t, "a", "echo", "a")
		layer, _, err := old.snapshot(ctx, "snap")
		if err != nil {
			t.Fatal(err)
		}
		old.mustRun(t, "b", "echo", "b")
		old.mustOpen(t, "s")
		if _, _, err := old.snapshot(ctx, "later"); err != nil { // with a shell open: what it holds would be missing
			t.Fatal(err)
		}
		old.mustSay(t, "s", "c", "echo c")
		r.loseKeeper(old)
		b, resp := r.mustRestore("k", nil)
		if resp.Base != layer || !slices.Equal(b.spec.Layers, append(slices.Clone(old.spec.Layers), layer)) {
			t.Fatal(resp, b.spec.Layers)
		}
		runs := r.world.Runs()
		for id, want := range map[string]int{"a": 0, "b": 1, "c": 1} {
			if got := runs[string(b.id)+" "+id]; got != want {
				t.Errorf("%s ran %d times, want %d", id, got, want)
			}
		}
		if got := b.output(t, "a"); got != "a\n" {
			t.Errorf("%q", got)
		}
		if again, _, err := b.snapshot(ctx, "snap"); err != nil || again != layer {
			t.Errorf("%s, %v", again, err)
		}
		if _, err := b.closeSession(ctx, "s"); err != nil {
			t.Fatal(err)
		}
		b.mustRun(t, "d", "echo", "d")
		second, _, err := b.snapshot(ctx, "snap2")
		if err != nil {
			t.Fatal(err)
		}
		r.loseKeeper(b)
		b2, _ := r.mustRestore("k", nil)
		if !slices.Equal(b2.spec.Layers, append(slices.Clone(b.spec.Layers), second)) || len(r.world.Runs()) == 0 || r.world.Runs()[string(b2.id)+" d"] != 0 {
			t.Fatal(b2.spec.Layers)
		}
	})
}
