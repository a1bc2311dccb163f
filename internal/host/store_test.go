package host

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// shakyStore is a store that can be away.
type shakyStore struct {
	store.Store
	away atomic.Bool
}

func (s *shakyStore) Create(ctx context.Context) (store.Draft, error) {
	if s.away.Load() {
		return nil, errors.New("the store is away")
	}
	return s.Store.Create(ctx)
}

func durable(s *dsecv1.Spec) { s.Durability = "store" }

func TestStoreDurabilityNeedsAStore(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	_, _, err := r.h.create(context.Background(), createRequest("k", durable))
	wantErr(t, err, sandbox.ErrUnsupported, "--store")
}

// While the store is away nothing is acknowledged, a sandbox can be stopped, and what is done is done once; then all goes on.
func TestStoreThatIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, err := store.NewDir(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		st := &shakyStore{Store: dir}
		r := rigOn(t, testHost, st)
		b := r.create("k", durable)
		b.mustStart(t, "a", "cat")
		b.mustWait(t, "a")

		st.away.Store(true)
		ctx := context.Background()
		if _, _, err := b.start(ctx, &sandbox.Command{ID: "b", Argv: []string{"cat"}}); !errors.Is(err, errUnshipped) {
			t.Fatalf("started with the store away: %v", err)
		}
		if n := r.world.Runs()[string(b.id)+" b"]; n != 0 {
			t.Fatalf("ran %d times", n)
		}
		st.away.Store(false)
		b.mustStart(t, "b", "cat")
		if o := b.mustWait(t, "b"); o.Kind != sandbox.Exited {
			t.Fatalf("%v", o)
		}
		if n := r.world.Runs()[string(b.id)+" b"]; n != 1 {
			t.Fatalf("ran %d times", n)
		}
		// Starts, voids and ends alternate, and each end is there once.
		var kinds []trajectory.Kind
		for _, rec := range r.records(b) {
			if rec.Step == "b" && rec.Kind != trajectory.KindOutput {
				kinds = append(kinds, rec.Kind)
			}
		}
		if len(kinds) != 4 || kinds[1] != trajectory.KindVoid || kinds[3] != trajectory.KindStepEnd {
			t.Fatalf("%v", kinds)
		}
		st.away.Store(true)
		r.mustStop(b)
		if state, cause := b.now(); state != sandbox.Stopped || cause.Class != sandbox.ClassNone {
			t.Fatal(state, cause)
		}
		st.away.Store(false)
	})
}
