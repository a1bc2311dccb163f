package host

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// What a lost host had of a key is taken over for a create: the same create answers its sandbox, which has ended, another is refused, and a key
// that it did not know stays free. The lost host ends what it has.
func TestRecallForACreate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st, err := store.NewDir(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		ctx := context.Background()
		a, b := rigOn(t, "hlost01", st), rigOn(t, "hnext01", st)
		secret := func(s *dsecv1.Spec) {
			durable(s)
			s.Env = []*dsecv1.EnvVar{{Name: "TOKEN", Value: "s3cret", Secret: true}}
		}
		ask := func(key string, change ...func(*dsecv1.Spec)) *dsecv1.HostCreateRequest {
			q := createRequest(key, change...) // as a gateway asks
			hash, err := rpc.CreateHash("default", q.Request)
			if err != nil {
				t.Fatal(err)
			}
			q.RequestHash = hash
			return q
		}
		old, _, err := a.h.create(ctx, ask("k", secret))
		if err != nil {
			t.Fatal(err)
		}
		old.mustRun(t, "a", "echo", "one")
		recall := func(r *rig, key string) (*dsecv1.Sandbox, error) {
			resp, err := restoreService{r.h}.Recall(rpc.WithProject(ctx, "default"), connect.NewRequest(&dsecv1.RecallRequest{LostHost: "hlost01", Job: "j", Key: key}))
			if err != nil {
				return nil, err
			}
			return resp.Msg.GetSandbox(), nil
		}
		if _, err := recall(b, "new"); err == nil {
			t.Fatal("a key that nobody knows was found")
		}
		for range 2 {
			sb, err := recall(b, "k")
			if err != nil || sb.GetId() != string(old.id) || sb.GetState() != "failed" || sb.GetCause().GetReason() != "host_lost" {
				t.Fatal(sb, err)
			}
		}
		again, existed, err := b.h.create(ctx, ask("k", secret))
		if err != nil || !existed || again.id != old.id {
			t.Fatal("the same create does not answer the sandbox of the lost host", existed, err)
		}
		_, _, err = b.h.create(ctx, ask("k", secret, func(s *dsecv1.Spec) { s.Env = append(s.Env, &dsecv1.EnvVar{Name: "X", Value: "y"}) }))
		wantErr(t, err, sandbox.ErrExists, "env")
		b.restart()
		if again, existed, err := b.h.create(ctx, ask("k", secret)); err != nil || !existed || again.id != old.id {
			t.Fatal("after a restart", existed, err)
		}
		if fresh, existed, err := b.h.create(ctx, ask("new")); err != nil || existed || fresh.id.Host() != "hnext01" {
			t.Fatal(existed, err)
		}
		if got := b.box(old.id).output(t, "a"); got != "one\n" {
			t.Fatalf("%q", got)
		}
		// The lost host was only silent: it learns that it was given up, and ends what it has.
		if err := old.waitEnd(ctx); err != nil {
			t.Fatal(err)
		}
		_, err = hostService{a.h}.FindKey(rpc.WithProject(ctx, "default"), connect.NewRequest(&dsecv1.FindKeyRequest{Job: "j", Key: "k"}))
		wantErr(t, err, sandbox.ErrNotFound, "taken for lost") // else its old sandbox would be taken for that of the key
		if n := len(a.world.Alive()); n != 0 {
			t.Fatalf("%d sandboxes of a host that was given up live", n)
		}
		// Without the store nothing can be taken over, and nothing is guessed.
		c := rigOn(t, "hpoor01", nil)
		_, err = recall(c, "k")
		wantErr(t, err, sandbox.ErrUnsupported, "--store")
		_, err = restoreService{b.h}.Recall(rpc.WithProject(ctx, "default"), connect.NewRequest(&dsecv1.RecallRequest{LostHost: "hnever1", Job: "j", Key: "x"}))
		wantErr(t, err, sandbox.ErrState, "can't be shut out")
	})
}

// A sandbox whose client gave no key, and whose gateway went away before the answer, is ended; one that anybody knows is not.
func TestUnheardCreate(t *testing.T) {
	for _, c := range []struct {
		name   string
		when   time.Duration // the gateway dies; a birth takes 100 ms
		after  func(r *rig, b *box)
		keyed  bool
		living bool
	}{
		{name: "before the birth", when: 10 * time.Millisecond},
		{name: "keyed", when: 10 * time.Millisecond, keyed: true, living: true},
		{name: "heard", when: time.Second, living: true},
		{name: "asked for again", when: 10 * time.Millisecond, living: true, after: func(r *rig, b *box) {
			q := createRequest("k")
			q.Keyless = true
			if again, existed, err := r.h.create(context.Background(), q); err != nil || !existed || again.id != b.id {
				r.t.Fatal(existed, err)
			}
		}},
		{name: "used", when: 10 * time.Millisecond, living: true, after: func(r *rig, b *box) { b.mustRun(r.t, "a", "true") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, fake.Options{}, func(_ *Config, d *Deps) { d.Backends["container"] = slowBirth{d.Backends["container"]} })
				ctx, cancel := context.WithTimeout(context.Background(), c.when)
				defer cancel()
				q := createRequest("k")
				q.Keyless = !c.keyed
				_, _, _ = r.h.create(ctx, q)
				time.Sleep(time.Second)
				b := r.h.keys[trajectory.ID{Project: "default", Job: "j", Key: "k"}]
				if b == nil {
					t.Fatal("the create did not go on")
				}
				if c.after != nil {
					c.after(r, b)
				}
				time.Sleep(unheardFor + time.Second)
				state, cause := b.now()
				if state.Ended() == c.living || state.Ended() && (cause.Class != sandbox.ClassClient || cause.Reason != "cancelled") {
					t.Errorf("%s, %v", state, cause)
				}
				if n := len(r.world.Alive()); n != 0 != c.living {
					t.Errorf("%d live", n)
				}
			})
		})
	}
}

type slowBirth struct{ sandbox.Backend }

func (s slowBirth) Create(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (sandbox.Instance, error) {
	select {
	case <-time.After(100 * time.Millisecond):
	case <-ctx.Done():
		return nil, fmt.Errorf("birth: %w", ctx.Err())
	}
	return s.Backend.Create(ctx, id, spec, sink)
}
