package host

import (
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

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
