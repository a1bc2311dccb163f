package host

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
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

// A host that is killed at any point of a restore leaves nothing of it, and the same call restores: never are there two sandboxes.
func TestRestoreCrashes(t *testing.T) {
	for n := 1; n <= 40; n++ {
		late := n%2 == 0
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, fake.Options{}, nil)
			old := r.create("k")
			old.mustRun(t, "a", "echo", "one")
			old.mustOpen(t, "s")
			old.mustSay(t, "s", "b", "echo two")
			old.mustStart(t, "bg", "hang")
			r.mustStop(old)
			call := func() (*dsecv1.RestoreResponse, error) {
				return r.restore("k", func(q *dsecv1.HostRestoreRequest) { q.Request.Id = "call" })
			}
			blew := r.fuse.set((n+1)/2, late)
			answered := make(chan error, 1)
			go func() {
				_, err := call()
				answered <- err
			}()
			whole := false
			select {
			case <-blew:
			case err := <-answered:
				whole = err == nil // it has fewer acts
			}
			r.fuse.kill()
			r.restart()
			resp, err := call()
			if err != nil || resp.State != "restored" {
				t.Fatalf("at %d: %v, %v", n, resp, err)
			}
			time.Sleep(time.Second)
			alive := r.world.Alive()
			if len(alive) != 1 || string(alive[0]) != resp.Sandbox.Id {
				t.Fatalf("at %d: alive %v, restored %s (whole %v)", n, alive, resp.Sandbox.Id, whole)
			}
			b := r.box(alive[0])
			if got := b.output(t, "a") + b.output(t, "b"); got != "one\ntwo\n" {
				t.Fatalf("at %d: %q", n, got)
			}
			b.mustRun(t, "after", "echo", "x")
			r.restart()
			if got := r.box(b.id).output(t, "after"); got != "x\n" {
				t.Fatal(got)
			}
			runs := r.world.Runs()
			for _, id := range []string{"a", "b", "bg"} {
				if got := runs[string(b.id)+" "+id]; got != 1 {
					t.Fatalf("at %d: %s ran %d times in %s", n, id, got, b.id)
				}
			}
		})
	}
}

// A sandbox of a host whose disk is gone is made again on another, from what the store has.
func TestRestoreOfALostHost(t *testing.T) {
	for _, durability := range []string{"store", "process"} {
		t.Run(durability, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st, err := store.NewDir(t.TempDir())
				if err != nil {
					t.Fatal(err)
				}
				ctx := context.Background()
				rigs := map[sandbox.HostID]*rig{}
				for _, id := range []sandbox.HostID{"hlost01", "hnext01", "hthird1"} {
					r := &rig{t: t, dir: t.TempDir(), world: fake.NewWorld(fake.Options{}), store: st, id: id}
					r.start()
					t.Cleanup(func() {
						r.stop()
						r.world.Close()
						time.Sleep(20 * time.Millisecond)
					})
					rigs[id] = r
				}
				a, next, third := rigs["hlost01"], rigs["hnext01"], rigs["hthird1"]
				spec := func(s *dsecv1.Spec) {
					s.Durability = durability
					s.Env = []*dsecv1.EnvVar{{Name: "TOKEN", Value: "s3cret", Secret: true}}
				}
				old := a.create("k", spec)
				big := bytes.Repeat([]byte("0123456789abcdef"), 8<<10)
				if durability == "process" {
					big = big[:1<<10] // what is larger is not in the store
				}
				if _, _, err := old.start(ctx, &sandbox.Command{ID: "in", Argv: []string{"cat"}, Stdin: big}); err != nil {
					t.Fatal(err)
				}
				old.mustWait(t, "in")
				old.mustRun(t, "a", "echo", "one")
				old.mustStart(t, "bg", "echo", "up", ";", "hang")
				time.Sleep(time.Second)
				if durability == "process" { // what is sealed is in the store
					if err := a.log.Ship(ctx); err != nil {
						t.Fatal(err)
					}
				}
				a.world.KillKeeper()
				a.fuse.kill() // the machine is gone, and its disk
				call := func(r *rig, change func(*dsecv1.HostRestoreRequest)) (*dsecv1.RestoreResponse, error) {
					return r.h.restore(ctx, &dsecv1.HostRestoreRequest{LostHost: "hlost01", SilentMs: -1, Request: func() *dsecv1.RestoreRequest {
						q := &dsecv1.HostRestoreRequest{Request: &dsecv1.RestoreRequest{Sandbox: string(old.id)}}
						change(q)
						return q.Request
					}()})
				}
				_, err = next.h.restore(ctx, &dsecv1.HostRestoreRequest{LostHost: "hlost01", SilentMs: 1000, Request: &dsecv1.RestoreRequest{Sandbox: string(old.id)}})
				wantErr(t, err, sandbox.ErrState, "hlost01", "lost_host")
				all := func(q *dsecv1.HostRestoreRequest) {
					q.Request.Secrets = []*dsecv1.EnvVar{{Name: "TOKEN", Value: "s3cret"}}
					q.Request.Repeat = []string{"bg"}
				}
				if durability == "process" {
					_, err = call(next, all)
					wantErr(t, err, sandbox.ErrState, "accept_tail_loss", "record")
				}
				resp, err := call(next, func(q *dsecv1.HostRestoreRequest) { all(q); q.Request.AcceptTailLoss = true })
				if err != nil || resp.State != "restored" || resp.Sandbox.Host != "hnext01" {
					t.Fatal(resp, err)
				}
				_, err = call(third, all)
				wantErr(t, err, rpc.ErrUnavailable, "hnext01") // and not twice
				check := func() {
					t.Helper()
					b, was := next.box(sandbox.ID(resp.Sandbox.Id)), next.box(old.id)
					for _, x := range []*box{b, was} {
						if got := x.output(t, "a"); got != "one\n" || len(x.output(t, "in")) != len(big) {
							t.Fatalf("%s answers %q", x.id, got)
						}
					}
					if s, cause := was.now(); s != sandbox.Failed || cause.Reason != "host_lost" {
						t.Fatal(s, cause)
					}
					q := createRequest("k", spec) // as a gateway asks
					if q.RequestHash, err = rpc.CreateHash("default", q.Request); err != nil {
						t.Fatal(err)
					}
					if _, existed, err := next.h.create(ctx, q); err != nil || !existed {
						t.Fatal("the same create does not join it", existed, err)
					}
					s, existed, err := b.start(ctx, &sandbox.Command{ID: "bg", Argv: []string{"echo", "up", ";", "hang"}})
					if err != nil || !existed || b.commandProto(s).State != "running" || b.output(t, "bg") != "up\n" {
						t.Fatal(existed, err, b.output(t, "bg"))
					}
				}
				check()
				next.restart()
				time.Sleep(time.Second)
				check()
				// Ended, it is as much of a lost host's as before: another restart forgets neither the call nor where its records came from.
				next.world.KillKeeper()
				if err := next.box(sandbox.ID(resp.Sandbox.Id)).waitEnd(ctx); err != nil {
					t.Fatal(err)
				}
				next.restart()
				if b := next.box(sandbox.ID(resp.Sandbox.Id)); b.call == "" || b.foreign == 0 || next.box(old.id).latest() != b {
					t.Fatalf("call %q, records of a lost host up to %d", b.call, b.foreign)
				}
				again, err := call(next, all)
				if err != nil || again.State != "restored" {
					t.Fatal(again, err)
				}
				// The lost host returns: its log does not open.
				if durability == "store" {
					a.stop()
					cfg := trajectory.Default(a.dir + "/log")
					cfg.SegmentBytes, cfg.Reserve, cfg.Store, cfg.Host = 4<<20, 1<<20, st, "hlost01"
					if _, err := trajectory.Open(cfg, next.h.log); err == nil {
						t.Fatal("the log of a host that was taken for lost opens")
					}
				}
			})
		})
	}
}

// Whatever lies in a trajectory, planning a restore of it neither panics nor hangs.
func FuzzPlan(f *testing.F) {
	create := encode(tagCreate, &dsecv1.HostCreateRequest{Spec: &dsecv1.Spec{Layers: []string{"l"}, Env: []*dsecv1.EnvVar{{Name: "A", Value: "b", Secret: true}}}})
	f.Add(uint8(trajectory.KindRedo), "c", uint32(1), encode(tagRedo, &dsecv1.Redo{State: redoEnded, TakesOver: true, Outcome: &dsecv1.Outcome{Kind: "exited"}}))
	f.Add(uint8(trajectory.KindRedo), "", uint32(1), encode(tagRestored, &dsecv1.Restored{Id: "x"}))
	f.Add(uint8(trajectory.KindEvent), "", uint32(1), encode(tagRecalled, &dsecv1.Recalled{Host: "h"}))
	f.Add(uint8(trajectory.KindState), "hlost01-aaaaaaaaaaaaaaaa", uint32(2), create)
	f.Add(uint8(trajectory.KindVoid), "hlost01-aaaaaaaaaaaaaaaa", uint32(2), []byte{})
	f.Add(uint8(trajectory.KindStepEnd), "c", uint32(0), encode(tagResult, &dsecv1.LogRecord{Step: "sha256:1", Outcome: &dsecv1.Outcome{Kind: "exited"}}))
	f.Add(uint8(trajectory.KindStepStart), "c", uint32(0), encode(tagSnapshot, &dsecv1.SnapshotRequest{}))
	f.Add(uint8(trajectory.KindSessionOpen), "s", uint32(0), encode(tagSession, &dsecv1.OpenSessionRequest{Shell: "/bin/sh"}))
	f.Fuzz(func(t *testing.T, kind uint8, name string, epoch uint32, payload []byte) {
		r := trajectory.Record{Kind: trajectory.Kind(kind), Step: name, Epoch: epoch, Payload: payload, Wall: time.Unix(1, 0)}
		state := trajectory.Record{Kind: trajectory.KindState, Epoch: epoch, Payload: encode(tagState, &dsecv1.LogRecord{State: "running", Data: []byte("h")})}
		command := trajectory.Record{Kind: trajectory.KindStepStart, Step: "c", Epoch: epoch, Payload: encode(tagCommand, &dsecv1.StartRequest{Argv: []string{"a"}})}
		first := trajectory.Record{Kind: trajectory.KindCreate, Step: "hlost01-bbbbbbbbbbbbbbbb", Payload: create}
		h := &Host{cfg: Config{ID: testHost}, secret: make([]byte, 32)}
		pl := &planner{p: &plan{}, h: h, o: &order{secrets: map[string]string{"A": "b"}}, open: map[string]*deed{}, running: map[*deed]bool{},
			sessions: map[string]bool{}, snaps: map[*deed]bool{}, secrets: map[string]bool{}}
		st := &story{history: newHistory(), loose: map[string]bool{}}
		var seq uint64
		for _, x := range []trajectory.Record{first, state, command, r, r, state, r, command, r} {
			seq++
			x.Seq = seq
			_ = pl.record(&x)
			_ = st.add(&x)
		}
		pl.decide("")
		pl.p.asks()
		if st.create != nil {
			_, _ = h.retell(trajectory.ID{}, st)
		}
	})
}

// What was copied from a lost host and not restored yet, because its caller is asked first, outlives restarts, and still says that its end
// may be missing.
func TestCopyOfALostHostIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, err := store.NewDir(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		ctx := context.Background()
		mk := func(id sandbox.HostID) *rig {
			r := &rig{t: t, dir: t.TempDir(), world: fake.NewWorld(fake.Options{}), store: st, id: id}
			r.start()
			t.Cleanup(func() {
				r.stop()
				r.world.Close()
				time.Sleep(20 * time.Millisecond)
			})
			return r
		}
		a, b := mk("hlost01"), mk("hnext01")
		old := a.create("k", func(s *dsecv1.Spec) {
			s.Durability = "host"
			s.Env = []*dsecv1.EnvVar{{Name: "TOKEN", Value: "s3cret", Secret: true}}
		})
		old.mustRun(t, "a", "echo", "one")
		if err := a.log.Ship(ctx); err != nil {
			t.Fatal(err)
		}
		a.world.KillKeeper()
		a.fuse.kill()
		ask := func(tail bool, secrets ...*dsecv1.EnvVar) (*dsecv1.RestoreResponse, error) {
			return b.h.restore(ctx, &dsecv1.HostRestoreRequest{LostHost: "hlost01", SilentMs: -1,
				Request: &dsecv1.RestoreRequest{Sandbox: string(old.id), AcceptTailLoss: tail, Secrets: secrets}})
		}
		if resp, err := ask(true); err != nil || resp.State != "asks" || len(resp.Secrets) != 1 {
			t.Fatal(resp, err)
		}
		for range 2 {
			b.restart()
			time.Sleep(time.Second)
			x := b.box(old.id) // it is there, without a look into the store
			if got := x.output(t, "a"); got != "one\n" || x.foreign == 0 {
				t.Fatalf("%q, records of a lost host up to %d", got, x.foreign)
			}
		}
		token := &dsecv1.EnvVar{Name: "TOKEN", Value: "s3cret", Secret: true}
		_, err = ask(false, token)
		wantErr(t, err, sandbox.ErrState, "accept_tail_loss")
		if resp, err := ask(true, token); err != nil || resp.State != "restored" {
			t.Fatal(resp, err)
		}
	})
}

// One call makes one sandbox: it answers the same after the host was restarted, after that sandbox has ended, and after another call has
// restored once more.
func TestRestoreCallIsAnsweredOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		old := r.create("k")
		old.mustRun(t, "a", "echo", "one")
		r.loseKeeper(old)
		call := func(id string) func(*dsecv1.RestoreRequest) {
			return func(q *dsecv1.RestoreRequest) { q.Id = id }
		}
		first, _ := r.mustRestore("k", call("first"))
		r.loseKeeper(first)
		again := func(id string, want sandbox.ID) {
			t.Helper()
			if b, _ := r.mustRestore("k", call(id)); b.id != want {
				t.Fatalf("call %s answers %s, want %s", id, b.id, want)
			}
		}
		again("first", first.id)
		r.restart()
		again("first", first.id)
		second, _ := r.mustRestore("k", call("second"))
		if second.id == first.id {
			t.Fatal("another call restores nothing")
		}
		again("first", first.id)
		r.restart()
		again("first", first.id)
		again("second", second.id)
		if alive := r.world.Alive(); len(alive) != 1 || alive[0] != second.id {
			t.Fatal(alive)
		}
	})
}

// A copy of a lost host's records that is broken off at any point is no sandbox, and the same call restores.
func TestRestoreOfALostHostCrashes(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for n := range 12 {
		synctest.Test(t, func(t *testing.T) {
			st, err := store.NewDir(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			ctx := context.Background()
			mk := func(id sandbox.HostID) *rig {
				r := &rig{t: t, dir: t.TempDir(), world: fake.NewWorld(fake.Options{}), store: st, id: id}
				r.start()
				t.Cleanup(func() {
					r.stop()
					r.world.Close()
					time.Sleep(20 * time.Millisecond)
				})
				return r
			}
			a, b := mk("hlost01"), mk("hnext01")
			old := a.create("k", durable)
			for i := range 5 {
				old.mustRun(t, fmt.Sprint("s", i), "echo", fmt.Sprint(i))
			}
			a.world.KillKeeper()
			a.fuse.kill()
			call := func() (*dsecv1.RestoreResponse, error) {
				return b.h.restore(ctx, &dsecv1.HostRestoreRequest{LostHost: "hlost01", SilentMs: -1, Request: &dsecv1.RestoreRequest{Sandbox: string(old.id), Id: "call"}})
			}
			blew := b.fuse.set(1+rnd.IntN(16), n%2 == 0)
			answered := make(chan struct{})
			go func() {
				call()
				close(answered)
			}()
			select {
			case <-blew:
			case <-answered:
			}
			b.fuse.kill()
			b.restart()
			resp, err := call()
			if err != nil || resp.State != "restored" {
				t.Fatal(resp, err)
			}
			time.Sleep(time.Second)
			if alive := b.world.Alive(); len(alive) != 1 || string(alive[0]) != resp.Sandbox.Id {
				t.Fatal(alive, resp.Sandbox.Id)
			}
			x := b.box(sandbox.ID(resp.Sandbox.Id))
			for i := range 5 {
				if got := x.output(t, fmt.Sprint("s", i)); got != fmt.Sprintf("%d\n", i) {
					t.Fatal(got)
				}
			}
		})
	}
}
