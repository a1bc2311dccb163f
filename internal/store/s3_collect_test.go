package store_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// bucket is a server with a clock that all its stores share.
type bucket struct {
	*storetest.MemoryS3
	url  string
	want map[string][]byte
}

func newBucket(t *testing.T) *bucket {
	m, url := server(t)
	return &bucket{m, url, map[string][]byte{}}
}

// open is another process with the store.
func (b *bucket) open(t *testing.T) *store.S3 {
	cfg := s3Config(t, b.url)
	cfg.Retries = 1
	s := newS3(t, cfg)
	s.SetClock(b.Now)
	return s
}

func (b *bucket) put(t *testing.T, s store.Store, key string, data []byte) {
	t.Helper()
	put(t, s, key, string(data))
	b.want[key] = data
}

// check reads all objects with a store that knows nothing.
func (b *bucket) check(t *testing.T, when string) {
	t.Helper()
	s := b.open(t)
	for key, want := range b.want {
		got, err := store.ReadAll(t.Context(), s, key, 1<<30)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %s: %d octets, %v", when, key, len(got), err)
		}
	}
}

func (b *bucket) collect(t *testing.T) store.Report {
	t.Helper()
	r, err := b.open(t).Collect(t.Context(), store.MinGrace, false)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestCollect(t *testing.T) {
	b := newBucket(t)
	s := b.open(t)
	kept, gone := storetest.Random(1, 20<<20), storetest.Random(2, 20<<20)
	b.put(t, s, "kept", kept)
	put(t, s, "gone", string(gone))
	mixed := append(append([]byte(nil), storetest.Random(3, 2<<20)...), storetest.Random(4, 12<<20)...)
	put(t, s, "mixed", string(mixed))
	b.put(t, s, "part", mixed[:2<<20]) // only this part of mixed's pack stays
	for _, key := range []string{"gone", "mixed"} {
		if err := s.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Collect(t.Context(), time.Minute, false); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a grace that is too short: %v", err)
	}
	if r := b.collect(t); r.Condemned+r.Removed > 0 || r.Objects != 2 {
		t.Errorf("young ones were touched: %+v", r)
	}
	full := b.Octets()
	b.Advance(3 * time.Hour)
	before := b.Requests()["PUT"] + b.Requests()["DELETE"]
	if r, err := b.open(t).Collect(t.Context(), store.MinGrace, true); err != nil || r.Condemned < 2 {
		t.Errorf("dry: %+v %v", r, err)
	}
	if b.Requests()["PUT"]+b.Requests()["DELETE"] != before {
		t.Error("a dry run wrote")
	}
	if r := b.collect(t); r.Condemned < 2 || r.Removed != 0 || r.Rewritten == 0 {
		t.Errorf("first run: %+v", r)
	}
	b.check(t, "condemned")
	old := b.open(t) // a reader from before the removal goes on after it
	part, err := old.Open(t.Context(), "part")
	if err != nil {
		t.Fatal(err)
	}
	if r := b.collect(t); r.Condemned+r.Removed != 0 {
		t.Errorf("at once again: %+v", r)
	}
	b.Advance(3 * time.Hour)
	if r := b.collect(t); r.Removed < 2 || r.Freed < 30<<20 {
		t.Errorf("second run: %+v", r)
	}
	b.check(t, "removed")
	buf := make([]byte, 1<<20)
	if _, err := part.ReadAt(buf, 0); err != nil || !bytes.Equal(buf, mixed[:1<<20]) {
		t.Errorf("a reader whose pack went: %v", err)
	}
	if n := b.Octets(); n > full-30<<20 {
		t.Errorf("%d octets of %d are left", n, full)
	}
	b.Advance(3 * time.Hour)
	if r := b.collect(t); r.Condemned+r.Removed+r.Rewritten != 0 || len(b.Names("some/where/.dead/")) != 0 {
		t.Errorf("it does not come to rest: %+v %v", r, b.Names("some/where/.dead/"))
	}
	// What went is stored anew by a process that still remembers it.
	b.put(t, s, "gone", gone)
	b.check(t, "stored again")
}

// A publisher that relied on a pack before it was condemned, and publishes after, loses nothing; one that takes too long notices.
func TestCollectBesideASlowPublisher(t *testing.T) {
	for _, late := range []time.Duration{0, 20 * time.Minute, 50 * time.Minute, 5 * time.Hour} {
		t.Run(late.String(), func(t *testing.T) {
			b := newBucket(t)
			data := storetest.Random(1, 6<<20)
			first := b.open(t)
			put(t, first, "a", string(data))
			if err := first.Delete(t.Context(), "a"); err != nil {
				t.Fatal(err)
			}
			b.Advance(3 * time.Hour)
			s := b.open(t)
			// The last step of the publisher, its manifest, is where time passes.
			var once sync.Once
			// It learns of the packs, then a collection condemns them while it works.
			draft, err := s.Create(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := draft.Write(append(append([]byte(nil), data...), storetest.Random(5, 1<<20)...)); err != nil {
				t.Fatal(err)
			}
			b.SetFault(func(op, key string) storetest.S3Fault {
				if op == "PUT" && strings.Contains(key, "/.packs/") {
					once.Do(func() {
						b.SetFault(nil)
						if r := b.collect(t); r.Condemned == 0 {
							t.Errorf("nothing condemned: %+v", r)
						}
						b.Advance(late)
						b.collect(t) // removes it, when grace has passed
					})
				}
				return storetest.S3Fault{}
			})
			if err := draft.Publish(t.Context(), "b"); err != nil {
				t.Fatal(err)
			}
			b.want["b"] = append(append([]byte(nil), data...), storetest.Random(5, 1<<20)...)
			b.check(t, "published")
			for range 3 {
				b.Advance(3 * time.Hour)
				b.collect(t)
				b.check(t, "collected")
			}
		})
	}
}

// Many small packs become few, once: nothing is lost on the way, also when a run ends at any of its writes, and it comes to rest.
func TestCollectMergesSmallPacks(t *testing.T) {
	for step := 0; ; step++ { // 0: none ends early
		b := newBucket(t)
		s := b.open(t)
		for i := range 24 { // of publications of their own
			b.put(t, s, fmt.Sprintf("small/%d", i), storetest.Random(uint64(100+i), 300<<10))
		}
		b.put(t, s, "large", storetest.Random(7, 5<<20))
		packs := func() int { return len(b.Names("some/where/.packs/")) - len(b.Names("some/where/.dead/")) }
		if packs() != 25 {
			t.Fatalf("%d packs: %v", packs(), b.Names(""))
		}
		b.Advance(3 * time.Hour)
		var mu sync.Mutex
		writes, crashed := 0, false
		b.SetFault(func(op, key string) (f storetest.S3Fault) {
			mu.Lock()
			defer mu.Unlock()
			if op == "PUT" || op == "DELETE" {
				if writes++; step > 0 && writes >= step {
					f.Status, f.Code, crashed = 403, "AccessDenied", true
				}
			}
			return f
		})
		r, err := b.open(t).Collect(t.Context(), store.MinGrace, false)
		b.SetFault(nil)
		if err != nil && !crashed {
			t.Fatal(err)
		}
		if step == 0 && (r.Merged != 24 || packs() != 2) {
			t.Errorf("%+v, %d packs", r, packs())
		}
		b.check(t, fmt.Sprintf("ended at write %d", step))
		for range 3 {
			b.Advance(3 * time.Hour)
			b.collect(t)
			b.check(t, fmt.Sprintf("ended at write %d, later", step))
		}
		b.Advance(3 * time.Hour)
		if step == 0 { // a reader finds out once for each pack that is gone, then knows
			s := b.open(t)
			for i := range 24 {
				r, err := s.Open(t.Context(), fmt.Sprintf("small/%d", i))
				if err != nil {
					t.Fatal(err)
				}
				buf := make([]byte, 100)
				for n := range 2 {
					before := b.Requests()
					if _, err := r.ReadAt(buf, 0); err != nil {
						t.Error(err)
					}
					now := b.Requests()
					if lists := now["LIST"] - before["LIST"]; lists > 0 && (i > 0 || n > 0) {
						t.Errorf("object %d, read %d: %d listings", i, n, lists)
					}
				}
			}
		}
		// Fewer than what is worth a merge may be left of a run that ended early.
		if r := b.collect(t); packs() > 17 || step == 0 && packs() != 2 || r.Merged+r.Condemned+r.Removed != 0 || len(b.Names("some/where/.dead/")) != 0 {
			t.Errorf("ended at write %d: %d packs in the end, %+v", step, packs(), r)
		}
		if step > 0 && !crashed {
			return
		}
		step += step / 2 // many of them are alike
	}
}

// A collection that ends at any of its writes, each time another, loses nothing, and the next ones finish it.
func TestCollectCrashes(t *testing.T) {
	for step := 1; ; step++ {
		b := newBucket(t)
		s := b.open(t)
		mixed := storetest.Random(4, 6<<20)
		put(t, s, "mixed", string(mixed))
		b.put(t, s, "part", mixed[:1<<20])
		put(t, s, "gone", string(storetest.Random(5, 2<<20)))
		b.put(t, s, "kept", storetest.Random(6, 1<<20))
		for _, key := range []string{"gone", "mixed"} {
			if err := s.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
		}
		crashed := false
		var mu sync.Mutex
		writes, done := 0, 0
		for round := range 4 {
			b.Advance(3 * time.Hour)
			b.SetFault(func(op, key string) (f storetest.S3Fault) {
				mu.Lock()
				defer mu.Unlock()
				if op != "PUT" && op != "DELETE" {
					return f
				}
				if writes++; writes >= step && writes < step+100 && !crashed || crashed && done == round {
					// From here on nothing of this run arrives. Of every second crash the deed is done, but not answered.
					crashed, done = true, round
					f.Status, f.Code = 403, "AccessDenied"
					if writes == step && step%2 == 0 {
						f = storetest.S3Fault{DropAfter: true}
					}
				}
				return f
			})
			_, err := b.open(t).Collect(t.Context(), store.MinGrace, false)
			if err != nil && !crashed {
				t.Fatal(err)
			}
			b.SetFault(nil)
			b.check(t, fmt.Sprintf("crash at write %d, round %d", step, round))
			if crashed && done == round && round > 0 {
				done = -1
			}
		}
		if !crashed {
			if step < 6 {
				t.Errorf("only %d writes", step)
			}
			break
		}
		for range 3 {
			b.Advance(3 * time.Hour)
			b.collect(t)
		}
		b.check(t, fmt.Sprintf("after a crash at write %d", step))
		if n := b.Octets(); n > 2<<20+100<<10 {
			t.Errorf("after a crash at write %d: %d octets are left: %v", step, n, b.Names(""))
		}
		if t.Failed() {
			break
		}
	}
}

// Publishers, deletions and several collections in any order, with time passing: what is published can be read.
func TestCollectBesidePublishers(t *testing.T) {
	b := newBucket(t)
	base := storetest.Random(1, 8<<20)
	var mu sync.Mutex
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				// One that took too long, as the clock jumps here, has to say so.
				if _, err := b.open(t).Collect(t.Context(), store.MinGrace, false); err != nil && !errors.Is(err, sandbox.ErrState) {
					t.Errorf("collect: %v", err)
				}
				b.Advance(15 * time.Minute)
			}
		})
	}
	var writers sync.WaitGroup
	for w := range 3 {
		s := b.open(t)
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 9))
			for i := range 25 {
				key := fmt.Sprintf("w/%d/%d", w, i%4)
				from := rng.IntN(5 << 20)
				data := append(append([]byte(nil), base[from:from+1<<20+rng.IntN(2<<20)]...), storetest.Random(uint64(w*100+i), 300<<10)...)
				if err := store.Put(t.Context(), s, key, bytes.NewReader(data)); err != nil {
					t.Errorf("put: %v", err)
					return
				}
				got, err := store.ReadAll(t.Context(), s, key, 1<<30)
				if err != nil || !bytes.Equal(got, data) {
					t.Errorf("%s: %d octets of %d, %v", key, len(got), len(data), err)
				}
				mu.Lock()
				b.want[key] = data
				mu.Unlock()
				if rng.IntN(4) == 0 {
					mu.Lock()
					delete(b.want, key)
					mu.Unlock()
					if err := s.Delete(t.Context(), key); err != nil {
						t.Errorf("delete: %v", err)
					}
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	wg.Wait()
	for range 3 {
		b.check(t, "in the end")
		b.Advance(3 * time.Hour)
		b.collect(t)
	}
	b.check(t, "collected")
}

func TestCollectStopsAtDamage(t *testing.T) {
	b := newBucket(t)
	s := b.open(t)
	put(t, s, "x", string(storetest.Random(1, 1<<20)))
	b.put(t, s, "y", storetest.Random(2, 1<<20))
	if err := s.Delete(t.Context(), "x"); err != nil {
		t.Fatal(err)
	}
	if err := b.Damage("some/where/y", 50); err != nil {
		t.Fatal(err)
	}
	b.Advance(3 * time.Hour)
	n := len(b.Names(""))
	if _, err := b.open(t).Collect(t.Context(), store.MinGrace, false); !errors.Is(err, sandbox.ErrLost) {
		t.Errorf("with a damaged manifest: %v", err)
	}
	if err := b.Damage("some/where/y", 50); err != nil {
		t.Fatal(err)
	}
	// A damaged index leaves its pack alone.
	for k := range b.Names("some/where/.index/") {
		if err := b.Damage(k, 60); err != nil {
			t.Fatal(err)
		}
	}
	r, err := b.open(t).Collect(t.Context(), store.MinGrace, false)
	if err != nil || len(r.Damaged) != 2 || r.Condemned != 0 || len(b.Names("")) != n {
		t.Errorf("%+v %v", r, err)
	}
	b.check(t, "with damaged indexes")
}
