package layer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// beside is another service, with facts of its own, on a store.
func beside(t testing.TB, st store.Store) *layer.Catalogue {
	c, _ := withFacts(t, st)
	return c
}

func withFacts(t testing.TB, st store.Store) (*layer.Catalogue, facts.Facts) {
	t.Helper()
	f, err := facts.OpenBolt(filepath.Join(t.TempDir(), "facts.db"))
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return layer.New(f, st), f
}

func swept(t testing.TB, c *layer.Catalogue, age time.Duration) error {
	_, err := c.Sweep(t.Context(), age)
	return err
}

// ageAll makes all that lies in a store's folder old.
func ageAll(t testing.TB, dir string, age time.Duration) {
	t.Helper()
	when := time.Now().Add(-age)
	filepath.Walk(dir, func(p string, info os.FileInfo, err error) error {
		if err == nil && info.Mode().IsRegular() {
			os.Chtimes(p, when, when) // may be gone by now
		}
		return nil
	})
}

func keys(t testing.TB, st store.Store, prefix string) (list []string) {
	t.Helper()
	must(t, st.List(t.Context(), prefix, func(i store.Info) bool { list = append(list, i.Key); return true }))
	return list
}

// Two services with facts of their own on one store: each removes what neither holds, at once or by its sweeps, and nothing that the other holds.
func TestTwoCataloguesOnOneStore(t *testing.T) {
	for what, wrap := range map[string]func(*store.Dir) store.Store{
		"local": func(d *store.Dir) store.Store { return d },
		"far":   func(d *store.Dir) store.Store { return far{d} },
	} {
		t.Run(what, func(t *testing.T) {
			ctx := t.Context()
			dir := filepath.Join(t.TempDir(), "store")
			d, err := store.NewDir(dir)
			must(t, err)
			st := wrap(d)
			a, b := beside(t, st), beside(t, st)
			mine := publish(t, a, "default", "x", "of both")
			must(t, swept(t, a, 6*time.Hour))
			same, only, third := publish(t, b, "default", "x", "of both"), publish(t, b, "default", "y", "of b"), publish(t, a, "default", "z", "of a")
			if mine.ID != same.ID {
				t.Fatal("not the same layer")
			}
			old := func() { ageAll(t, dir, 100*time.Hour) }
			both := func() {
				t.Helper()
				for _, c := range []*layer.Catalogue{a, b, a} {
					must(t, swept(t, c, 6*time.Hour))
				}
			}
			old()
			both()
			must(t, a.Verify(ctx, mine.ID), a.Verify(ctx, only.ID), b.Verify(ctx, third.ID))
			must(t, a.Remove(ctx, "default", "x"))
			old()
			both()
			must(t, b.Verify(ctx, same.ID))
			must(t, b.Remove(ctx, "default", "x"))
			if err := b.Verify(ctx, same.ID); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("a layer that nobody holds any more: %v", err)
			}
			must(t, a.Remove(ctx, "default", "z"))
			old()
			both()
			must(t, b.Verify(ctx, only.ID))
			must(t, b.Remove(ctx, "default", "y"))
			old()
			both()
			old()
			both()
			for _, prefix := range []string{"layers/", "blobs/", "held/", "removed/"} {
				if left := keys(t, st, prefix); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			}
		})
	}
}

// A service of an earlier version says only that it is there: nothing is removed beside it. One that is gone for good holds its layers until its mark is
// taken away.
func TestServicesThatAreGone(t *testing.T) {
	ctx := t.Context()
	dir := filepath.Join(t.TempDir(), "store")
	st, err := store.NewDir(dir)
	must(t, err)
	a, b := beside(t, st), beside(t, st)
	mine, other := publish(t, a, "default", "x", "a"), publish(t, b, "default", "x", "b")
	must(t, store.Put(ctx, st, "catalogues/earlier", strings.NewReader("{}")))
	must(t, a.Remove(ctx, "default", "x"))
	must(t, b.Verify(ctx, mine.ID)) // still there
	if _, err := a.Sweep(ctx, time.Hour); !errors.Is(err, sandbox.ErrState) || !strings.Contains(err.Error(), "catalogues/earlier") {
		t.Errorf("sweep: %v", err)
	}
	must(t, st.Delete(ctx, "catalogues/earlier"))
	ageAll(t, dir, 100*time.Hour)
	must(t, swept(t, a, time.Hour), b.Verify(ctx, other.ID))
	if err := a.Verify(ctx, mine.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a layer that nobody holds: %v", err)
	}
	// b is gone for good.
	own := strings.Split(keys(t, st, "held/")[0], "/")[1]
	must(t, st.Delete(ctx, "catalogues/"+own))
	must(t, swept(t, a, time.Hour))
	ageAll(t, dir, 100*time.Hour)
	must(t, swept(t, a, time.Hour), swept(t, a, time.Hour))
	if left := keys(t, st, "held/"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if err := a.Verify(ctx, other.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a layer of a service that is gone: %v", err)
	}
}

// A service that held layers before it left references, as after an upgrade, leaves them before anything of it can be taken for unheld.
func TestReferencesOfOldHolds(t *testing.T) {
	ctx := t.Context()
	dir := filepath.Join(t.TempDir(), "store")
	st, err := store.NewDir(dir)
	must(t, err)
	a := beside(t, st)
	v := publish(t, a, "default", "x", "text")
	for _, k := range append(keys(t, st, "held/"), keys(t, st, "catalogues/")...) {
		must(t, st.Delete(ctx, k))
	}
	must(t, swept(t, a, time.Hour))
	ageAll(t, dir, 100*time.Hour)
	b := beside(t, st)
	publish(t, b, "default", "y", "other")
	must(t, swept(t, b, time.Hour), swept(t, b, time.Hour), a.Verify(ctx, v.ID))
}

// hooked calls a function before each deletion, with its key; an error ends the caller there, as a crash would.
type hooked struct {
	store.Store
	before func(key string) error
}

func (h *hooked) Delete(ctx context.Context, key string) error {
	if h.before != nil {
		if err := h.before(key); err != nil {
			return err
		}
	}
	err := h.Store.Delete(ctx, key)
	if err == nil && h.before != nil {
		err = h.before(key + " done")
	}
	return err
}

// One service begins to hold a layer in the very moment in which the other removes it, at each point of that; and the remover may die there.
func TestHoldsThatMeetARemoval(t *testing.T) {
	ctx := t.Context()
	for _, point := range []string{"", " done"} {
		for _, dies := range []bool{false, true} {
			for _, sweeps := range []bool{false, true} {
				t.Run(fmt.Sprintf("after=%v,dies=%v,sweep=%v", point != "", dies, sweeps), func(t *testing.T) {
					dir := filepath.Join(t.TempDir(), "store")
					st, err := store.NewDir(dir)
					must(t, err)
					h := &hooked{Store: st}
					a, fa := withFacts(t, h)
					b := beside(t, st)
					v := publish(t, a, "default", "x", "text")
					publish(t, b, "default", "y", "other") // so that both are known
					died := errors.New("died")
					var held error
					h.before = func(key string) error {
						if key != "layers/"+v.ID.Hex()+".json"+point {
							return nil
						}
						held = b.Hold(ctx, "default", v.ID)
						if dies {
							return died
						}
						return nil
					}
					remove := func() error { return a.Remove(ctx, "default", "x") }
					if sweeps { // what an import left that nobody took
						must(t, fa.Delete(ctx, "held:default:"+v.ID.Hex(), facts.Any))
						ageAll(t, dir, 100*time.Hour)
						remove = func() error { _, err := a.Sweep(ctx, time.Hour); return err }
					}
					if err := remove(); (err != nil) != dies || dies && !errors.Is(err, died) {
						t.Fatalf("remove: %v", err)
					}
					h.before = nil
					must(t, swept(t, b, time.Hour))
					if held != nil && !errors.Is(held, sandbox.ErrNotFound) {
						t.Fatalf("hold: %v", held)
					}
					if held == nil {
						must(t, b.Verify(ctx, v.ID))
					}
					ageAll(t, dir, 100*time.Hour)
					must(t, swept(t, a, time.Hour), swept(t, b, time.Hour))
					if held == nil {
						must(t, b.Verify(ctx, v.ID))
					} else if _, err := b.Descriptor(ctx, v.ID); !errors.Is(err, sandbox.ErrNotFound) {
						t.Errorf("nobody holds it: %v", err)
					}
				})
			}
		}
	}
}

// dying ends a service at its n-th change of store and facts: that one and all later ones fail and change nothing, as after a kill.
type dying struct {
	left int // 0: it does not die
}

var errDied = errors.New("died")

func (d *dying) step() error {
	if d.left > 0 {
		if d.left--; d.left == 0 {
			d.left = -1
		}
	}
	if d.left < 0 {
		return errDied
	}
	return nil
}

type dyingStore struct {
	store.Store
	d *dying
}

func (s dyingStore) Create(ctx context.Context) (store.Draft, error) {
	d, err := s.Store.Create(ctx)
	return dyingDraft{d, s.d}, err
}

func (s dyingStore) Delete(ctx context.Context, key string) error {
	if err := s.d.step(); err != nil {
		return err
	}
	return s.Store.Delete(ctx, key)
}

type dyingDraft struct {
	store.Draft
	d *dying
}

func (w dyingDraft) Publish(ctx context.Context, key string) error {
	if err := w.d.step(); err != nil {
		return err
	}
	return w.Draft.Publish(ctx, key)
}

type dyingFacts struct {
	facts.Facts
	d *dying
}

func (f dyingFacts) Put(ctx context.Context, key string, value []byte, r facts.Revision) (facts.Revision, error) {
	if err := f.d.step(); err != nil {
		return 0, err
	}
	return f.Facts.Put(ctx, key, value, r)
}

func (f dyingFacts) Delete(ctx context.Context, key string, r facts.Revision) error {
	if err := f.d.step(); err != nil {
		return err
	}
	return f.Facts.Delete(ctx, key, r)
}

// Removals and sweeps end at each of their changes in turn: what is held stays whole, and later sweeps end where one that was left alone does.
func TestRemovalsThatDie(t *testing.T) {
	ctx := t.Context()
	const age = 6 * time.Hour
	every := 4
	if os.Getenv("DSEC_TORTURE") != "" {
		every = 1
	}
	offset := 0 // so that all are met, in one of the variants
	for what, wrap := range map[string]func(*store.Dir) store.Store{
		"local": func(d *store.Dir) store.Store { return d },
		"far":   func(d *store.Dir) store.Store { return far{d} },
	} {
		for _, others := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,others=%v", what, others), func(t *testing.T) {
				var control []string
				offset++
				for n := 0; ; n += max(1, min(every, n*every+offset%every)) { // 0, then one of the first, then each of so many
					dir := filepath.Join(t.TempDir(), "store")
					disk, err := store.NewDir(dir)
					must(t, err)
					st := wrap(disk)
					c, f := withFacts(t, st)
					if others {
						publish(t, beside(t, st), "default", "theirs", "of another service")
					}
					kept, base := publish(t, c, "default", "kept", "kept"), publish(t, c, "default", "base", "below a snapshot")
					gone := publish(t, c, "default", "gone", "gone")
					host := layer.New(nil, st) // a snapshot that no gateway took, and one that is held
					for i, text := range []string{"taken", "not taken"} {
						up := t.TempDir()
						must(t, os.WriteFile(filepath.Join(up, "s"), []byte(text), 0o644))
						for _, p := range []string{filepath.Join(up, "s"), up} { // so that each time it is the same
							must(t, os.Chtimes(p, time.Unix(1e9, 0), time.Unix(1e9, 0)))
						}
						snap, err := host.ImportUpper(ctx, "default", up, layer.Options{Parents: []layer.ID{base.ID}})
						must(t, err)
						if i == 0 {
							must(t, c.Hold(ctx, "default", snap.ID))
						}
					}
					must(t, store.Put(ctx, st, layer.BlobKey("sha256:"+strings.Repeat("ab", 32)), strings.NewReader("of an import that died")))
					must(t, layer.LeaveClaim(ctx, st, kept.ID, strings.Repeat("ab", 16)))
					ageAll(t, dir, 200*time.Hour)

					d := &dying{left: n}
					mortal := layer.New(dyingFacts{f, d}, dyingStore{st, d})
					err = mortal.Remove(ctx, "default", "gone")
					if err == nil {
						_, err = mortal.Sweep(ctx, age)
					}
					if err != nil && !errors.Is(err, errDied) {
						t.Fatalf("change %d: %v", n, err)
					}
					again := layer.New(f, st)
					must(t, again.Verify(ctx, kept.ID), again.Verify(ctx, base.ID))
					if err := again.Remove(ctx, "default", string(gone.ID)); err != nil && !errors.Is(err, sandbox.ErrNotFound) { // it may have lost its name alone
						if err := again.Remove(ctx, "default", "gone"); err != nil {
							t.Fatalf("change %d: %v", n, err)
						}
					}
					for range 3 {
						ageAll(t, dir, 200*time.Hour)
						must(t, swept(t, again, age))
					}
					must(t, again.Verify(ctx, kept.ID), again.Verify(ctx, base.ID))
					var left []string
					for _, prefix := range []string{"blobs/", "layers/", "removed/", "claims/"} {
						left = append(left, keys(t, st, prefix)...)
					}
					left = append(left, fmt.Sprint(len(keys(t, st, "held/")), " references"))
					if n == 0 {
						control = left
					} else if !slices.Equal(left, control) {
						t.Fatalf("change %d: left %q, want %q", n, left, control)
					}
					if n > 0 && d.left > 0 { // it came to its end
						if n < 8 {
							t.Errorf("only %d changes", n)
						}
						break
					}
				}
			})
		}
	}
}

// Three services make, hold, remove and sweep the same few layers all the time, in a store in which everything is old: what one of them holds is whole.
func TestServicesBesideEachOther(t *testing.T) {
	ctx := t.Context()
	dir := filepath.Join(t.TempDir(), "store")
	inner, err := store.NewDir(dir)
	must(t, err)
	rounds := 25
	if os.Getenv("DSEC_TORTURE") != "" {
		rounds = 1000
	}
	var all sync.WaitGroup
	stop := make(chan struct{})
	var aging sync.WaitGroup
	aging.Go(func() { // of descriptors and references alone: objects that no descriptor names yet must be young
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				ageAll(t, filepath.Join(dir, "layers"), 20*time.Hour)
				ageAll(t, filepath.Join(dir, "held"), 20*time.Hour)
			}
		}
	})
	for s := range 3 {
		st := storetest.NewFaulty(inner, uint64(s), nil, storetest.Faults{Stalls: 0.3, Stall: 2 * time.Millisecond})
		c := beside(t, st)
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(s), 7))
			for round := range rounds {
				name, text := fmt.Sprintf("l%d", rng.IntN(3)), fmt.Sprintf("text %d", rng.IntN(3))
				d, err := c.ImportTar(ctx, "default", bytes.NewReader(archive(t, file("f", text))), layer.Options{})
				if err == nil {
					err = waitVerified(ctx, c, d.ID)
				}
				for try := 0; err == nil; try++ { // another one may be removing it, and is about to put it back
					if _, err = c.Publish(ctx, "default", name, d.ID); err == nil || !errors.Is(err, sandbox.ErrNotFound) || try > 100 {
						break
					}
					err = waitVerified(ctx, c, d.ID)
				}
				if err != nil {
					t.Errorf("service %d, round %d: %v", s, round, err)
					return
				}
				if _, err := c.Sweep(ctx, 10*time.Hour); err != nil {
					t.Errorf("service %d, round %d: sweep: %v", s, round, err)
					return
				}
				if err := waitVerified(ctx, c, d.ID); err != nil {
					t.Errorf("service %d, round %d: %v", s, round, err)
					return
				}
				if err := c.Remove(ctx, "default", name); err != nil {
					t.Errorf("service %d, round %d: remove: %v", s, round, err)
					return
				}
			}
		})
	}
	all.Wait()
	close(stop)
	aging.Wait()
}

// waitVerified looks at a layer that the catalogue holds. Another one that removes it in this moment puts it back.
func waitVerified(ctx context.Context, c *layer.Catalogue, id layer.ID) error {
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if err := c.Verify(ctx, id); err == nil || !errors.Is(err, sandbox.ErrNotFound) || time.Now().After(end) {
			return err
		}
	}
}
