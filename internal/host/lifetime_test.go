package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

func idle(d time.Duration, action sandbox.EndAction) func(*dsecv1.Spec) {
	return func(s *dsecv1.Spec) {
		s.Lifetime = &dsecv1.Lifetime{IdleMs: d.Milliseconds(), OnIdle: string(action)}
	}
}

// endsAfter waits for the sandbox's end and checks when and why it came.
func endsAfter(t *testing.T, b *box, from time.Time, want time.Duration, class sandbox.Class, reason string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 48*time.Hour)
	defer cancel()
	if err := b.waitEnd(ctx); err != nil {
		t.Fatal(err)
	}
	if _, c := b.now(); c.Class != class || c.Reason != reason {
		t.Fatalf("cause %+v, want %s %s", c, class, reason)
	}
	b.mu.Lock()
	got := b.over.Sub(from)
	b.mu.Unlock()
	if got < want || got > want+time.Second {
		t.Fatalf("ended after %v, want %v", got, want)
	}
}

// B52: a sandbox that works is not idle; one that only left a server behind, or is only looked at, is.
func TestB52Idle(t *testing.T) {
	const limit = 10 * time.Second
	listen := func(sandbox.ID, uint16) (net.Conn, bool) {
		ours, theirs := net.Pipe()
		go func() {
			buf := make([]byte, 16)
			for {
				if _, err := theirs.Read(buf); err != nil {
					return
				}
			}
		}()
		return ours, true
	}
	for _, c := range []struct {
		name string
		use  func(t *testing.T, r *rig, b *box)
		want time.Duration
	}{
		{"attached command", func(t *testing.T, r *rig, b *box) {
			attachAll(t, b, b.mustStart(t, "c", "sleep", "40s"), 0, false)
		}, 50 * time.Second},
		{"detached command that is waited for", func(t *testing.T, r *rig, b *box) {
			b.mustStart(t, "c", "sleep", "40s")
			b.mustWait(t, "c")
		}, 50 * time.Second},
		{"port connection with one ping in 8 s", func(t *testing.T, r *rig, b *box) {
			conn, err := r.h.dialPort(context.Background(), b.id, 8080)
			if err != nil {
				t.Fatal(err)
			}
			for range 5 {
				time.Sleep(8 * time.Second)
				if _, err := conn.Write([]byte("ping")); err != nil {
					t.Fatal(err)
				}
			}
			conn.Close()
		}, 50 * time.Second},
		{"background server and nobody connected", func(t *testing.T, r *rig, b *box) {
			b.mustStart(t, "c", "late", "1h")
		}, limit},
		{"get, list, logs and wait", func(t *testing.T, r *rig, b *box) {
			s := b.mustStart(t, "c", "true")
			for range 6 {
				time.Sleep(3 * time.Second)
				if b.ended() {
					return
				}
				b.proto()
				r.h.selected(context.Background(), &dsecv1.Selector{Job: "j"})
				r.records(b)
				b.waitCommand(context.Background(), s, time.Second)
				b.listSessions(context.Background())
			}
		}, limit},
		{"open session alone", func(t *testing.T, r *rig, b *box) {
			if _, err := b.openSession(context.Background(), &sandbox.Session{Name: "s"}, nil); err != nil {
				t.Fatal(err)
			}
		}, limit},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, fake.Options{Listen: listen}, nil)
				b := r.create("k", idle(limit, sandbox.EndStop))
				start := time.Now()
				c.use(t, r, b)
				endsAfter(t, b, start, c.want, sandbox.ClassLimit, "idle")
			})
		})
	}
}

func TestTotal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		b := r.create("k", func(s *dsecv1.Spec) { s.Lifetime = &dsecv1.Lifetime{TotalMs: 60_000} })
		start := time.Now()
		if at := r.world.Deadline(b.id); at.Sub(start) != time.Minute {
			t.Fatalf("the backend's deadline is %v from now", at.Sub(start))
		}
		b.mustStart(t, "c", "hang")
		if err := b.pause(context.Background(), sandbox.Frozen, "asked", false); err != nil {
			t.Fatal(err)
		}
		endsAfter(t, b, start, time.Minute, sandbox.ClassLimit, "total")
		if o := b.mustWait(t, "c"); o.Kind != sandbox.Killed {
			t.Fatalf("%+v", o)
		}

		b = r.create("l", func(s *dsecv1.Spec) { s.Lifetime = &dsecv1.Lifetime{TotalMs: 60_000} })
		b.mustStart(t, "c", "hang")
		start = time.Now()
		time.Sleep(30 * time.Second)
		if err := b.setLifetime(&dsecv1.Lifetime{TotalMs: 100_000}); err != nil {
			t.Fatal(err)
		}
		r.restart() // what was set holds after a restart too
		b = r.box(b.id)
		endsAfter(t, b, start, 130*time.Second, sandbox.ClassLimit, "total")
	})
}

func TestIdlePausesAndUseWakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		b := r.create("k", idle(10*time.Second, sandbox.EndPause))
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if s, _ := b.now(); s != sandbox.Paused || !r.world.Frozen(b.id) {
			t.Fatalf("state %s", s)
		}
		time.Sleep(time.Hour) // the idle clock stands still
		b.proto()
		if s, _ := b.now(); s != sandbox.Paused {
			t.Fatalf("state %s", s)
		}
		b.mustStart(t, "c", "echo", "woken")
		b.mustWait(t, "c")
		if s, _ := b.now(); s != sandbox.Running || r.world.Frozen(b.id) {
			t.Fatalf("state %s", s)
		}
		time.Sleep(11 * time.Second)
		synctest.Wait()
		r.restart()
		b = r.box(b.id)
		if s, _ := b.now(); s != sandbox.Paused || !r.world.Frozen(b.id) {
			t.Fatalf("state %s after a restart", s)
		}
		wantErr(t, b.pause(context.Background(), sandbox.Saved, "asked", false), sandbox.ErrUnsupported, "saved")
		r.mustStop(b) // a paused one can be stopped
	})
}

func TestPauseThatHangsCanBeStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{Hook: func(ctx context.Context, op fake.Op, _ sandbox.ID, _ string) error {
			if op == fake.OpPause {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}}, nil)
		b := r.create("k")
		go b.pause(context.Background(), sandbox.Frozen, "asked", false)
		time.Sleep(time.Second)
		start := time.Now()
		r.mustStop(b)
		if d := time.Since(start); d > time.Minute {
			t.Fatalf("stop took %v", d)
		}
	})
}

func TestDestroyIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		r := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, _ string) error {
			if op == fake.OpDestroy {
				if tries++; tries < 5 {
					return errors.New("busy")
				}
			}
			return nil
		}}, nil)
		b := r.create("k")
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		wantErr(t, r.h.stop(ctx, b, cancelled), context.DeadlineExceeded, "goes on")
		if p := b.proto(); p.State != "stopping" {
			t.Fatalf("state %s", p.State)
		}
		r.mustStop(b)
		if tries != 5 || len(r.world.Alive()) != 0 {
			t.Fatalf("%d tries", tries)
		}
	})
}

func TestLease(t *testing.T) {
	for _, c := range []struct {
		action sandbox.EndAction
		want   sandbox.State
	}{{sandbox.EndStop, sandbox.Stopped}, {sandbox.EndPause, sandbox.Paused}, {sandbox.EndKeep, sandbox.Running}} {
		t.Run(string(c.action), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, fake.Options{}, nil)
				ctx := in("default")
				if _, err := r.h.putJob(ctx, &dsecv1.Job{Name: "j", LeaseMs: 20_000, OnLeaseEnd: string(c.action)}); err != nil {
					t.Fatal(err)
				}
				b, other := r.create("k"), r.create("o", func(s *dsecv1.Spec) { s.Job = "other" })
				b.mustStart(t, "c", "hang")
				for range 5 {
					time.Sleep(15 * time.Second)
					if _, err := r.h.renew(ctx, scoped{"default", "j"}); err != nil {
						t.Fatal(err)
					}
				}
				if s, _ := b.now(); s != sandbox.Running {
					t.Fatalf("state %s while renewed", s)
				}
				if c.action == sandbox.EndStop {
					if at := time.Until(r.world.Deadline(b.id)); at != 20*time.Second+leaseSlack {
						t.Fatalf("the backend's deadline is in %v", at)
					}
				}
				time.Sleep(21 * time.Second)
				synctest.Wait()
				s, cause := b.now()
				if s != c.want || (s == sandbox.Stopped && cause != sandbox.Cause{Class: sandbox.ClassClient, Reason: "lease"}) {
					t.Fatalf("%s %+v", s, cause)
				}
				if s, _ := other.now(); s != sandbox.Running {
					t.Fatalf("another job's sandbox is %s", s)
				}
				_, _, err := r.h.create(context.Background(), createRequest("late"))
				wantErr(t, err, sandbox.ErrState, "lease")
				if _, err := r.h.renew(ctx, scoped{"default", "j"}); err != nil {
					t.Fatal(err)
				}
				r.create("late")
			})
		})
	}
}

// The backend's deadline holds while the host is down, and says so when it is back.
func TestLeaseWhileTheHostIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		if _, err := r.h.putJob(in("default"), &dsecv1.Job{Name: "j", LeaseMs: 20_000}); err != nil {
			t.Fatal(err)
		}
		b := r.create("k")
		r.stop()
		time.Sleep(30 * time.Second)
		r.start()
		b = r.box(b.id)
		if err := b.waitEnd(context.Background()); err != nil {
			t.Fatal(err)
		}
		if _, cause := b.now(); cause.Class != sandbox.ClassClient || cause.Reason != "lease" {
			t.Errorf("%+v", cause)
		}
	})
}

// A pause that meets a command between its record and its start waits for it; the next one wakes the sandbox.
func TestPauseLetsACommandStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var frozen atomic.Bool
		r := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, _ string) error {
			switch op {
			case fake.OpPause:
				frozen.Store(true)
			case fake.OpResume:
				frozen.Store(false)
			case fake.OpStart:
				time.Sleep(100 * time.Millisecond)
				if frozen.Load() {
					return fmt.Errorf("the sandbox is frozen: %w", sandbox.ErrState)
				}
			}
			return nil
		}}, nil)
		b := r.create("k")
		for n := range 3 {
			go func() {
				time.Sleep(50 * time.Millisecond)
				if err := b.pause(context.Background(), sandbox.Frozen, "asked", false); err != nil {
					t.Error(err)
				}
			}()
			b.mustStart(t, fmt.Sprint("c", n), "true")
			time.Sleep(time.Second)
			if s, _ := b.now(); s != sandbox.Paused {
				t.Errorf("is %s", s)
			}
		}
		r.mustStop(b)
	})
}

// What does not come back in time is frozen with its sandbox: a pause is bounded.
func TestPauseDoesNotWaitForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		r := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, _ string) error {
			if op == fake.OpStart {
				<-hang
			}
			return nil
		}}, nil)
		b := r.create("k")
		started := make(chan struct{})
		go func() {
			defer close(started)
			b.start(context.Background(), &sandbox.Command{ID: "c", Argv: []string{"true"}})
		}()
		synctest.Wait()
		start := time.Now()
		if err := b.pause(context.Background(), sandbox.Frozen, "asked", false); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != drainWait {
			t.Errorf("the pause took %v", d)
		}
		close(hang)
		<-started
		r.mustStop(b)
	})
}

func TestBadJobs(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	for _, j := range []*dsecv1.Job{
		{Name: "-"}, {Name: ""}, {Name: "a\nb"}, {Name: "j", LeaseMs: 60_001}, {Name: "j", LeaseMs: -1}, {Name: "j", OnLeaseEnd: "explode"},
		{Name: "j", RetentionMs: -5},
	} {
		if _, err := r.h.putJob(in("default"), j); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%v: %v", j, err)
		}
	}
	_, err := r.h.renew(in("default"), scoped{"default", "nosuch"})
	wantErr(t, err, sandbox.ErrNotFound)
}

func TestRetention(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		noJobs := func(s *dsecv1.Spec) { s.Job = "" }
		a, b, loose := r.create("a"), r.create("b"), r.create("l", noJobs)
		r.mustStop(a)
		r.mustStop(loose)
		time.Sleep(23 * time.Hour)
		if err := b.setLifetime(&dsecv1.Lifetime{IdleMs: -1, TotalMs: 48 * 3600 * 1000}); err != nil {
			// b idled out after 30 minutes, as it should have
			wantErr(t, err, sandbox.ErrState)
		}
		if _, err := r.h.get(context.Background(), string(a.id)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Hour)
		for _, x := range []*box{a, b, loose} {
			if _, err := r.h.get(context.Background(), string(x.id)); !errors.Is(err, sandbox.ErrNotFound) {
				t.Fatalf("%s: %v", x.id, err)
			}
		}
		_, _, err := r.h.create(context.Background(), createRequest("a"))
		wantErr(t, err, sandbox.ErrState, "expired")
		r.restart()
		_, _, err = r.h.create(context.Background(), createRequest("new"))
		wantErr(t, err, sandbox.ErrState, "expired")
		r.create("l", noJobs) // in no job an expired key becomes unknown
		for _, i := range r.log.Trajectories() {
			if i.ID.Job == "j" && i.ID.Key != "" {
				t.Fatalf("records of %v are left", i.ID)
			}
		}
		time.Sleep(31 * 24 * time.Hour)
		r.create("a")
	})
}

func TestJobWithALivingSandboxDoesNotExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		a := r.create("a")
		r.create("b", func(s *dsecv1.Spec) {
			s.Lifetime = &dsecv1.Lifetime{IdleMs: -1, TotalMs: 30 * 24 * 3600 * 1000}
		})
		r.mustStop(a)
		time.Sleep(72 * time.Hour)
		if _, err := r.h.get(context.Background(), string(a.id)); err != nil {
			t.Fatal(err)
		}
		if recs := r.records(a); len(recs) == 0 || recs[0].Kind != trajectory.KindCreate {
			t.Fatal("records are gone")
		}
	})
}
