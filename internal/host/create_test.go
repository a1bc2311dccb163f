package host

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

func TestCreateExecStop(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	b.mustStart(t, "c1", "echo", "hello")
	if o := b.mustWait(t, "c1"); o.Kind != sandbox.Exited || o.Code != 0 {
		t.Fatalf("outcome %+v", o)
	}
	if got := b.output(t, "c1"); got != "hello\n" {
		t.Fatalf("output %q", got)
	}
	b.mustStart(t, "c2", "hang")
	r.mustStop(b)
	if s, c := b.now(); s != sandbox.Stopped || c.Class != sandbox.ClassNone {
		t.Fatalf("state %s, cause %+v", s, c)
	}
	if alive := r.world.Alive(); len(alive) != 0 {
		t.Fatalf("left: %v", alive)
	}
	// Record, outcomes and output stay readable; nothing can be started.
	if o := b.mustWait(t, "c2"); o.Kind != sandbox.Killed {
		t.Fatalf("outcome %+v", o)
	}
	if got := b.output(t, "c1"); got != "hello\n" {
		t.Fatalf("output %q", got)
	}
	_, _, err := b.start(context.Background(), &sandbox.Command{ID: "c3", Argv: []string{"true"}})
	wantErr(t, err, sandbox.ErrState, "stopped")
	s, existed, err := b.start(context.Background(), &sandbox.Command{ID: "c1", Argv: []string{"echo", "hello"}})
	if err != nil || !existed || !s.ended() {
		t.Fatalf("a recorded result is answered after the end too: %v %v", existed, err)
	}
	r.mustStop(b) // idempotent
}

func TestCreateKeysAndNames(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	named := func(n string) func(*dsecv1.Spec) { return func(s *dsecv1.Spec) { s.Name = n } }
	a := r.create("a", named("box"))
	again, existed, err := r.h.create(context.Background(), createRequest("a", named("box")))
	if err != nil || !existed || again != a {
		t.Fatalf("same key and request: %v %v %v", again, existed, err)
	}
	_, _, err = r.h.create(context.Background(), createRequest("a", named("other")))
	wantErr(t, err, sandbox.ErrExists, "name", "box", "other")
	_, _, err = r.h.create(context.Background(), createRequest("b", named("box")))
	wantErr(t, err, sandbox.ErrExists, "box", string(a.id))
	if _, err := r.h.get(context.Background(), "box"); err != nil {
		t.Fatal(err)
	}
	_, err = r.h.get(in("elsewhere"), string(a.id))
	wantErr(t, err, sandbox.ErrNotFound)
	r.mustStop(a)
	_, err = r.h.get(context.Background(), "box")
	wantErr(t, err, sandbox.ErrNotFound)
	r.create("b", named("box"))
	again, existed, err = r.h.create(context.Background(), createRequest("a", named("box")))
	if err != nil || !existed || again != a {
		t.Fatalf("the key of an ended sandbox answers that one: %v %v", existed, err)
	}
}

func TestCreateRefusals(t *testing.T) {
	limited := func(c *Config, d *Deps) {
		c.MaxSandboxes = 2
	}
	r := newRig(t, fake.Options{}, limited)
	r.create("1")
	r.create("2")
	_, _, err := r.h.create(context.Background(), createRequest("3"))
	wantErr(t, err, sandbox.ErrExhausted, "2 sandboxes, at most 2")

	low := newRig(t, fake.Options{}, func(c *Config, d *Deps) {
		d.Memory = func() (int64, int64, error) { return 8 << 30, 100 << 20, nil }
	})
	_, _, err = low.h.create(context.Background(), createRequest("1"))
	wantErr(t, err, sandbox.ErrExhausted, "100 MiB", "512 MiB")

	full := newRig(t, fake.Options{}, func(c *Config, d *Deps) {
		d.Disk = func() (int64, error) { return 5 << 20, nil }
	})
	_, _, err = full.h.create(context.Background(), createRequest("1"))
	wantErr(t, err, sandbox.ErrExhausted, "5 MiB of disk")

	caps := newRig(t, fake.Options{Capabilities: &sandbox.Capabilities{Networks: []string{"none"}}}, nil)
	_, _, err = caps.h.create(context.Background(), createRequest("1", func(s *dsecv1.Spec) { s.Network = "open" }))
	wantErr(t, err, sandbox.ErrUnsupported, "network")
	_, _, err = caps.h.create(context.Background(), createRequest("1", func(s *dsecv1.Spec) { s.Backend = "vm" }))
	wantErr(t, err, sandbox.ErrUnsupported, "vm")
}

func TestFailedCreateFreesItsKey(t *testing.T) {
	fail := true
	r := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, _ string) error {
		if op == fake.OpCreated && fail {
			return errors.New("mount failed")
		}
		return nil
	}}, nil)
	for range 2 {
		if _, _, err := r.h.create(context.Background(), createRequest("k")); err == nil {
			t.Fatal("create succeeded")
		}
	}
	if len(r.world.Alive()) != 0 || r.h.count().living != 0 {
		t.Fatal("remains of a failed create")
	}
	r.restart()
	fail = false
	b := r.create("k")
	r.restart()
	if s, _ := r.box(b.id).now(); s != sandbox.Running {
		t.Fatalf("state %s", s)
	}
}

// B39: a create cut by its client is listed and can be stopped, or is gone; a stop that arrives first wins.
func TestB39CancelledCreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{Hook: func(ctx context.Context, op fake.Op, _ sandbox.ID, _ string) error {
			if op == fake.OpCreate {
				select {
				case <-time.After(30 * time.Millisecond):
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			return nil
		}}, nil)
		var wg sync.WaitGroup
		rnd := rand.New(rand.NewPCG(1, 2))
		for i := range 500 {
			cut := time.Duration(rnd.IntN(60)) * time.Millisecond
			key := fmt.Sprintf("k%d", i)
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), cut)
				defer cancel()
				r.h.create(ctx, createRequest(key, func(s *dsecv1.Spec) { s.Name = key }))
				if i%2 == 0 {
					if _, err := r.h.stopKey(context.Background(), trajectory.ID{Project: "default", Job: "j", Key: key}); err != nil {
						t.Errorf("stop by key: %v", err)
					}
				}
			})
		}
		wg.Wait()
		time.Sleep(5 * time.Second)
		living := r.h.find(func(*box) bool { return true })
		if len(living) != 250 || len(r.world.Alive()) != 250 {
			t.Fatalf("%d listed, %d there, want 250", len(living), len(r.world.Alive()))
		}
		for _, n := range r.world.Births() {
			if n != 1 {
				t.Fatal("born twice")
			}
		}
		for i := range 500 { // the same key again gives that sandbox or a fresh one, never two
			key := fmt.Sprintf("k%d", i)
			b, existed, err := r.h.create(context.Background(), createRequest(key, func(s *dsecv1.Spec) { s.Name = key }))
			if i%2 == 1 && (err != nil || !existed) {
				t.Fatalf("%s: %v %v %v", key, b, existed, err)
			}
		}
		if err := r.h.StopAll(context.Background()); err != nil {
			t.Fatal(err)
		}
		if n := len(r.world.Alive()); n != 0 {
			t.Fatalf("%d left", n)
		}
	})
}

func TestTombstone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		id := trajectory.ID{Project: "default", Job: "j", Key: "k"}
		if b, err := r.h.stopKey(context.Background(), id); b != nil || err != nil {
			t.Fatal(b, err)
		}
		_, _, err := r.h.create(context.Background(), createRequest("k"))
		wantErr(t, err, sandbox.ErrState)
		r.create("other")
		time.Sleep(61 * time.Second)
		r.create("k")
	})
}

func TestEntrypointEndsSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		b := r.create("k", func(s *dsecv1.Spec) { s.Entrypoint = []string{"sleep", "5s", ";", "exit", "3"} })
		time.Sleep(6 * time.Second)
		synctest.Wait()
		s, c := b.now()
		if s != sandbox.Stopped || c.Class != sandbox.ClassTask || c.Detail != "exited with 3" {
			t.Fatalf("%s %+v", s, c)
		}
	})
}
