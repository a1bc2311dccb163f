package trajectory_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"path/filepath"
	"sync"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// A lost host's log is fetched once it is shut out; its trajectories go to one host each, with their times, epochs and inputs.
func TestTakeOver(t *testing.T) {
	ctx := context.Background()
	st, err := store.NewDir(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	config := func(host string) trajectory.Config {
		c := trajectory.Default(filepath.Join(t.TempDir(), "log"))
		c.SegmentBytes, c.Reserve, c.Store, c.Host = 64<<10, 32<<10, st, host
		return c
	}
	old := open(t, config("hlost01"))
	id := testID("k")
	big := bytes.Repeat([]byte("0123456789abcdef"), 8<<10)
	w := old.NewInputWriter()
	if _, err := w.Write(big); err != nil {
		t.Fatal(err)
	}
	in, err := w.Finish(sandbox.DurabilityStore)
	if err != nil {
		t.Fatal(err)
	}
	for i, rec := range []trajectory.Record{create(), {Kind: trajectory.KindStepStart, Step: "a", Input: in}, {Kind: trajectory.KindStepEnd, Step: "a", Epoch: 3}} {
		if _, err := old.Append(ctx, id, []trajectory.Record{rec}, sandbox.DurabilityStore); err != nil {
			t.Fatal(i, err)
		}
	}
	want := readAll(t, old, "k")
	if fenced, err := old.Fenced(ctx); fenced || err != nil {
		t.Fatal(fenced, err)
	}
	if _, err := trajectory.TakeOver(ctx, st, "hnone01", filepath.Join(t.TempDir(), "x"), quiet); !errors.Is(err, sandbox.ErrNotFound) {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "fetched")
	lost, err := trajectory.TakeOver(ctx, st, "hlost01", dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	if fenced, err := old.Fenced(ctx); !fenced || err != nil {
		t.Fatal("the lost host does not find out", fenced, err)
	}
	if _, err := old.Append(ctx, id, []trajectory.Record{{Kind: trajectory.KindStepStart, Step: "b", Epoch: 3}}, sandbox.DurabilityProcess); err == nil {
		t.Fatal("it takes records")
	}

	// Of many that want it at once at most one has it, and one has it in the end.
	var mu sync.Mutex
	owners := map[string]bool{}
	for round := 0; len(owners) == 0 && round < 50; round++ {
		var wg sync.WaitGroup
		for _, by := range []string{"ha00001", "hb00001", "hc00001"} {
			wg.Go(func() {
				owner, err := lost.Take(ctx, id, by)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					t.Error(err)
				} else if owner == by {
					owners[by] = true
				}
			})
			if round > 0 {
				wg.Wait()
			}
		}
		wg.Wait()
	}
	if len(owners) != 1 {
		t.Fatal(owners)
	}
	for by := range owners {
		if owner, err := lost.Take(ctx, id, by); err != nil || owner != by {
			t.Fatal("its own claim does not stand", owner, err)
		}
		if owner, err := lost.Take(ctx, id, "hother1"); err != nil || owner != by {
			t.Fatal(owner, err)
		}
	}

	next := open(t, config("hnext01"))
	recs, _, err := lost.Read(ctx, id, trajectory.Query{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range recs {
		if recs[i].Input, err = next.Keep(lost, recs[i].Input, sandbox.DurabilityStore); err != nil {
			t.Fatal(err)
		}
	}
	if err := next.Import(ctx, id, recs); err != nil {
		t.Fatal(err)
	}
	if err := next.Import(ctx, id, recs[:1]); !errors.Is(err, sandbox.ErrExists) {
		t.Fatal("imported twice", err)
	}
	got := readAll(t, next, "k")
	if len(got) != len(want) {
		t.Fatalf("%d records, want %d", len(got), len(want))
	}
	for i := range got {
		if got[i].Seq != want[i].Seq || got[i].Epoch != want[i].Epoch || !got[i].Wall.Equal(want[i].Wall) || got[i].Mono != want[i].Mono || got[i].Step != want[i].Step {
			t.Fatalf("%+v, want %+v", got[i], want[i])
		}
	}
	r, err := next.OpenInput(got[1].Input)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(r)
	r.Close()
	if err != nil || !bytes.Equal(data, big) {
		t.Fatal(len(data), err)
	}
	if err := lost.Drop(); err != nil {
		t.Fatal(err)
	}
	if all, _ := filepath.Glob(dir + "/*"); len(all) > 0 {
		t.Fatal("left behind", all)
	}
	// The new host's own place in the store has the input too.
	if err := next.Ship(ctx); err != nil {
		t.Fatal(err)
	}
	again, err := trajectory.TakeOver(ctx, st, "hnext01", dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Drop()
	recs, _, err = again.Read(ctx, id, trajectory.Query{})
	if err != nil || len(recs) != len(want) {
		t.Fatal(len(recs), err)
	}
	if r, err = again.OpenInput(recs[1].Input); err != nil {
		t.Fatal(err)
	}
	if data, err = io.ReadAll(r); err != nil || !bytes.Equal(data, big) {
		t.Fatal(len(data), err)
	}
	r.Close()
}
