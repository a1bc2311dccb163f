// Package factstest is the contract of internal/facts as a suite that every implementation passes.
package factstest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Run runs the suite; open gives an empty set of facts for each part.
func Run(t *testing.T, open func(t *testing.T) facts.Facts) {
	t.Run("get and put", func(t *testing.T) { getAndPut(t, open(t)) })
	t.Run("revisions rise over a delete", func(t *testing.T) { rise(t, open(t)) })
	t.Run("list", func(t *testing.T) { list(t, open(t)) })
	t.Run("limits", func(t *testing.T) { limits(t, open(t)) })
	t.Run("one of many writers wins", func(t *testing.T) { race(t, open(t)) })
	t.Run("cancelled", func(t *testing.T) { cancelled(t, open(t)) })
}

func getAndPut(t *testing.T, f facts.Facts) {
	ctx := context.Background()
	if _, err := f.Get(ctx, "a"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("get of a missing key: %v", err)
	}
	if _, err := f.Put(ctx, "a", []byte("x"), 7); !errors.Is(err, facts.ErrConflict) || !errors.Is(err, sandbox.ErrState) {
		t.Errorf("put over a missing key with a revision: %v", err)
	}
	r1, err := f.Put(ctx, "a", []byte("1"), facts.Absent)
	if err != nil || r1 <= 0 {
		t.Fatalf("first put: %d %v", r1, err)
	}
	if _, err := f.Put(ctx, "a", []byte("x"), facts.Absent); !errors.Is(err, facts.ErrConflict) {
		t.Errorf("put of an existing key as absent: %v", err)
	}
	r2, err := f.Put(ctx, "a", []byte("2"), r1)
	if err != nil || r2 <= r1 {
		t.Fatalf("second put: %d after %d, %v", r2, r1, err)
	}
	if _, err := f.Put(ctx, "a", []byte("x"), r1); !errors.Is(err, facts.ErrConflict) {
		t.Errorf("put with an old revision: %v", err)
	}
	got, err := f.Get(ctx, "a")
	if d := cmp.Diff(facts.Fact{Key: "a", Value: []byte("2"), Revision: r2}, got); err != nil || d != "" {
		t.Errorf("get: %v %s", err, d)
	}
	got.Value[0] = 'z' // the caller owns what it got
	if again, _ := f.Get(ctx, "a"); string(again.Value) != "2" {
		t.Error("a caller's change reached the fact")
	}
	if _, err := f.Put(ctx, "a", nil, facts.Any); err != nil {
		t.Errorf("put with any: %v", err)
	}
	if got, err := f.Get(ctx, "a"); err != nil || len(got.Value) != 0 {
		t.Errorf("empty value: %q %v", got.Value, err)
	}
}

func rise(t *testing.T, f facts.Facts) {
	ctx := context.Background()
	r1, err := f.Put(ctx, "k", []byte("1"), facts.Absent)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Delete(ctx, "k", r1+1000); !errors.Is(err, facts.ErrConflict) {
		t.Errorf("delete with a wrong revision: %v", err)
	}
	if err := f.Delete(ctx, "k", r1); err != nil {
		t.Fatal(err)
	}
	for _, r := range []facts.Revision{r1, facts.Any} {
		if err := f.Delete(ctx, "k", r); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("delete of a missing key: %v", err)
		}
	}
	r2, err := f.Put(ctx, "k", []byte("2"), facts.Absent)
	if err != nil || r2 <= r1 {
		t.Errorf("revision %d after %d, %v", r2, r1, err)
	}
	if err := f.Delete(ctx, "k", facts.Any); err != nil {
		t.Error(err)
	}
}

func list(t *testing.T, f facts.Facts) {
	ctx := context.Background()
	keys := []string{"a", "b", "b/1", "b/2", "b/3", "b0", "c", "\xff", "\xff\xff"}
	for _, k := range keys {
		if _, err := f.Put(ctx, k, []byte("v"+k), facts.Absent); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		prefix, from string
		limit        int
		want         []string
	}{
		{"", "", 0, keys}, {"b/", "", 0, keys[2:5]}, {"b", "", 2, keys[1:3]}, {"b/", "b/2", 0, keys[3:5]}, {"b/", "a", 0, keys[2:5]},
		{"b/", "c", 0, nil}, {"none", "", 0, nil}, {"\xff", "", 0, keys[7:]}, {"", "b0", 1, keys[5:6]},
	} {
		got, err := f.List(ctx, c.prefix, c.from, c.limit)
		var names []string
		for _, g := range got {
			names = append(names, g.Key)
			if string(g.Value) != "v"+g.Key || g.Revision <= 0 {
				t.Errorf("%q: %+v", g.Key, g)
			}
		}
		if d := cmp.Diff(c.want, names); err != nil || d != "" {
			t.Errorf("list %q from %q limit %d: %v %s", c.prefix, c.from, c.limit, err, d)
		}
	}
}

func limits(t *testing.T, f facts.Facts) {
	ctx := context.Background()
	for _, k := range []string{"", "a\x00b", strings.Repeat("k", facts.MaxKey+1)} {
		if _, err := f.Put(ctx, k, nil, facts.Any); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("put %.10q: %v", k, err)
		}
		if _, err := f.Get(ctx, k); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("get %.10q: %v", k, err)
		}
	}
	if _, err := f.Put(ctx, strings.Repeat("k", facts.MaxKey), make([]byte, facts.MaxValue), facts.Absent); err != nil {
		t.Errorf("at the limits: %v", err)
	}
	if _, err := f.Put(ctx, "k", make([]byte, facts.MaxValue+1), facts.Absent); !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("value over the limit: %v", err)
	}
}

func race(t *testing.T, f facts.Facts) {
	ctx := context.Background()
	if _, err := f.Put(ctx, "n", []byte("0"), facts.Absent); err != nil {
		t.Fatal(err)
	}
	const writers, each = 8, 10
	var wg sync.WaitGroup
	errs := make(chan error, writers)
	for range writers {
		wg.Go(func() {
			for done := 0; done < each; {
				got, err := f.Get(ctx, "n")
				if err != nil {
					errs <- err
					return
				}
				n, _ := strconv.Atoi(string(got.Value))
				_, err = f.Put(ctx, "n", fmt.Append(nil, n+1), got.Revision)
				switch {
				case err == nil:
					done++
				case !errors.Is(err, facts.ErrConflict):
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	if got, err := f.Get(ctx, "n"); err != nil || string(got.Value) != strconv.Itoa(writers*each) {
		t.Errorf("%s after %d increments, %v", got.Value, writers*each, err)
	}
}

func cancelled(t *testing.T, f facts.Facts) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := f.Put(ctx, "a", nil, facts.Any); !errors.Is(err, context.Canceled) {
		t.Errorf("put: %v", err)
	}
	if _, err := f.Get(ctx, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("get: %v", err)
	}
}
