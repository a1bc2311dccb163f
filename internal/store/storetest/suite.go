// Package storetest is what every store must do, as tests, and stores to test with: one that is slow and breaks, and a small S3 server.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Options say what a store is like.
type Options struct {
	// Retries lets an operation fail with ErrInjected and tries it again: the store is a Faulty.
	Retries bool
	// NoDeletedReads leaves out that a reader stays usable when its object is deleted.
	NoDeletedReads bool
	// Large is the size of the large object in octets; 0 is 9 MiB. Listing is the number of objects in the long list; 0 is 1100, more than a
	// page of S3.
	Large, Listing int
}

// Run tests the store that open makes anew for every test.
func Run(t *testing.T, open func(t *testing.T) store.Store, opt Options) {
	if opt.Large == 0 {
		opt.Large = 9 << 20
	}
	if opt.Listing == 0 {
		opt.Listing = 1100
	}
	for _, c := range []struct {
		name string
		f    func(*testing.T, store.Store, Options)
	}{
		{"PutOpenStatDelete", putOpenStatDelete}, {"Sizes", sizes}, {"RandomWrites", randomWrites}, {"DraftIsInvisible", draftIsInvisible},
		{"BrokenSource", brokenSource}, {"EndedDraft", endedDraft}, {"Replace", replace}, {"List", list}, {"WrongKeys", wrongKeys},
		{"Ended", ended}, {"ManyReaders", manyReaders}, {"ManyWriters", manyWriters}, {"LongList", longList},
	} {
		t.Run(c.name, func(t *testing.T) { c.f(t, open(t), opt) })
	}
}

// Random returns octets that don't compress, the same for the same seed.
func Random(seed uint64, n int) []byte {
	b := make([]byte, n)
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	rand.NewChaCha8(key).Read(b)
	return b
}

func again(t *testing.T, opt Options, f func() error) {
	t.Helper()
	err := f()
	for i := 0; opt.Retries && errors.Is(err, ErrInjected) && i < 100; i++ {
		err = f()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, s store.Store, opt Options, key string, b []byte) {
	t.Helper()
	again(t, opt, func() error { return store.Put(t.Context(), s, key, bytes.NewReader(b)) })
}

func open(t *testing.T, s store.Store, opt Options, key string) (r store.Reader) {
	t.Helper()
	again(t, opt, func() (err error) { r, err = s.Open(t.Context(), key); return err })
	t.Cleanup(func() { r.Close() })
	return r
}

func readAt(t *testing.T, r store.Reader, opt Options, n int, off int64) []byte {
	t.Helper()
	b := make([]byte, n)
	again(t, opt, func() error {
		got, err := store.ReadAt(t.Context(), r, b, off)
		if err == io.EOF {
			err = nil
		}
		if err == nil && got != min(n, int(max(r.Size()-off, 0))) {
			err = fmt.Errorf("%d octets at %d of %d", got, off, r.Size())
		}
		b = b[:cap(b)]
		if err == nil {
			b = b[:got]
		}
		return err
	})
	return b
}

func keys(t *testing.T, s store.Store, opt Options, prefix string) (out []string) {
	t.Helper()
	again(t, opt, func() error {
		out = nil
		return s.List(t.Context(), prefix, func(i store.Info) bool { out = append(out, i.Key); return true })
	})
	return out
}

func putOpenStatDelete(t *testing.T, s store.Store, opt Options) {
	ctx := t.Context()
	for name, b := range map[string][]byte{"small": []byte("hello"), "large": Random(1, opt.Large)} {
		key := "blobs/" + name
		put(t, s, opt, key, b)
		r := open(t, s, opt, key)
		if got := readAt(t, r, opt, 3, 2); !bytes.Equal(got, b[2:5]) || r.Size() != int64(len(b)) {
			t.Errorf("%s: range: %q, size %d", name, got, r.Size())
		}
		again(t, opt, func() error {
			i, err := s.Stat(ctx, key)
			if err == nil && (i.Size != int64(len(b)) || i.Key != key || time.Since(i.Modified).Abs() > time.Hour) {
				err = fmt.Errorf("stat: %+v", i)
			}
			return err
		})
		if p, ok := s.Path(key); ok {
			got, err := os.ReadFile(p)
			for i := 0; i < 50 && err != nil; i++ { // on a file system that fails at times
				got, err = os.ReadFile(p)
			}
			if err != nil || !bytes.Equal(got, b) {
				t.Errorf("%s: path %s: %d octets, %v", name, p, len(got), err)
			}
		}
		again(t, opt, func() error { return s.Delete(ctx, key) })
		again(t, opt, func() error { return s.Delete(ctx, key) })
		if _, err := s.Open(ctx, key); !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, ErrInjected) {
			t.Errorf("open of a deleted one: %v", err)
		}
		if _, err := s.Stat(ctx, key); !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, ErrInjected) {
			t.Errorf("stat of a deleted one: %v", err)
		}
		if !opt.NoDeletedReads {
			if got := readAt(t, r, opt, 4, 0); !bytes.Equal(got, b[:4]) {
				t.Errorf("%s: an open reader after delete: %q", name, got)
			}
		}
	}
	if _, err := s.Stat(ctx, "blobs"); !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, ErrInjected) {
		t.Errorf("stat of a folder: %v", err)
	}
}

func sizes(t *testing.T, s store.Store, opt Options) {
	rng := rand.New(rand.NewPCG(7, 7))
	for _, n := range []int{0, 1, 4095, 4096, 256<<10 - 1, 256 << 10, 256<<10 + 1, 1 << 20, 5<<20 + 17} {
		b := Random(uint64(n), n)
		if n > 1<<20 {
			clear(b[1<<20 : 3<<20]) // chunks that are the same, and compress
		}
		key := fmt.Sprintf("n/%d", n)
		put(t, s, opt, key, b)
		r := open(t, s, opt, key)
		if r.Size() != int64(n) {
			t.Errorf("%d octets: size %d", n, r.Size())
		}
		if got := readAt(t, r, opt, n+10, 0); !bytes.Equal(got, b) {
			t.Errorf("%d octets: all of it differs", n)
		}
		if got := readAt(t, r, opt, 10, int64(n)); len(got) != 0 {
			t.Errorf("%d octets: %d behind the end", n, len(got))
		}
		for range 20 {
			off := rng.IntN(n + 1)
			m := rng.IntN(min(n-off, 1<<20) + 1)
			if got := readAt(t, r, opt, m, int64(off)); !bytes.Equal(got, b[off:off+m]) {
				t.Errorf("%d octets: %d at %d differ", n, m, off)
			}
		}
		if _, err := r.ReadAt(make([]byte, 1), -1); err == nil {
			t.Errorf("%d octets: read at -1", n)
		}
	}
	var got []int64
	again(t, opt, func() error {
		got = nil
		return s.List(t.Context(), "n/", func(i store.Info) bool { got = append(got, i.Size); return true })
	})
	slices.Sort(got)
	if d := cmp.Diff([]int64{0, 1, 4095, 4096, 256<<10 - 1, 256 << 10, 256<<10 + 1, 1 << 20, 5<<20 + 17}, got); d != "" {
		t.Errorf("sizes in the list: %s", d)
	}
}

func randomWrites(t *testing.T, s store.Store, opt Options) {
	want := Random(3, 2<<20)
	var d store.Draft
	again(t, opt, func() (err error) { d, err = s.Create(t.Context()); return err })
	defer d.Discard()
	const piece = 64 << 10
	for _, i := range rand.New(rand.NewPCG(1, 2)).Perm(len(want) / piece) {
		if _, err := d.WriteAt(want[i*piece:(i+1)*piece], int64(i*piece)); err != nil {
			t.Fatal(err)
		}
	}
	back := make([]byte, 1000)
	if _, err := d.ReadAt(back, 12345); err != nil || !bytes.Equal(back, want[12345:13345]) {
		t.Errorf("read back from the draft: %v", err)
	}
	if err := d.Truncate(1<<20 + 5); err != nil {
		t.Fatal(err)
	}
	again(t, opt, func() error { return publish(t, s, d, "r/w", 1<<20+5) })
	if got := readAt(t, open(t, s, opt, "r/w"), opt, 2<<20, 0); !bytes.Equal(got, want[:1<<20+5]) {
		t.Errorf("%d octets differ", len(got))
	}
}

// publish takes an answer that was lost after the deed for what it is.
func publish(t *testing.T, s store.Store, d store.Draft, key string, size int64) error {
	err := d.Publish(t.Context(), key)
	if errors.Is(err, sandbox.ErrState) {
		if i, serr := s.Stat(t.Context(), key); serr == nil && i.Size == size {
			return nil
		} else if serr != nil {
			return serr
		}
	}
	return err
}

func draftIsInvisible(t *testing.T, s store.Store, opt Options) {
	var d store.Draft
	again(t, opt, func() (err error) { d, err = s.Create(t.Context()); return err })
	if _, err := d.Write(Random(1, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if got := keys(t, s, opt, ""); len(got) != 0 {
		t.Errorf("visible: %v", got)
	}
	if err := d.Discard(); err != nil {
		t.Error(err)
	}
	if err := d.Discard(); err != nil {
		t.Errorf("second discard: %v", err)
	}
	if err := d.Publish(t.Context(), "x"); !errors.Is(err, sandbox.ErrState) && !errors.Is(err, ErrInjected) {
		t.Errorf("publish after discard: %v", err)
	}
	if got := keys(t, s, opt, ""); len(got) != 0 {
		t.Errorf("visible after discard: %v", got)
	}
}

func brokenSource(t *testing.T, s store.Store, opt Options) {
	cut := errors.New("cut")
	err := store.Put(t.Context(), s, "x", io.MultiReader(bytes.NewReader(Random(1, 1<<20)), errorReader{cut}))
	if !errors.Is(err, cut) && !errors.Is(err, ErrInjected) {
		t.Errorf("a broken source: %v", err)
	}
	if got := keys(t, s, opt, ""); len(got) != 0 {
		t.Errorf("visible: %v", got)
	}
}

type errorReader struct{ error }

func (e errorReader) Read([]byte) (int, error) { return 0, e.error }

func endedDraft(t *testing.T, s store.Store, opt Options) {
	var d store.Draft
	again(t, opt, func() (err error) { d, err = s.Create(t.Context()); return err })
	io.WriteString(d, "text")
	if err := d.Publish(t.Context(), "../x"); !errors.Is(err, sandbox.ErrInvalid) && !errors.Is(err, ErrInjected) {
		t.Errorf("publish under a wrong key: %v", err)
	}
	again(t, opt, func() error { return publish(t, s, d, "x", 4) })
	if err := d.Publish(t.Context(), "y"); !errors.Is(err, sandbox.ErrState) && !errors.Is(err, ErrInjected) {
		t.Errorf("second publish: %v", err)
	}
	if err := d.Discard(); err != nil {
		t.Errorf("discard after publish: %v", err)
	}
	if got := keys(t, s, opt, ""); !slices.Equal(got, []string{"x"}) {
		t.Errorf("keys %v", got)
	}
}

func replace(t *testing.T, s store.Store, opt Options) {
	a, b := Random(1, 700<<10), Random(2, 600<<10)
	for _, c := range [][2][]byte{{a, b}, {[]byte("small"), b}, {a, []byte("small")}, {[]byte("small"), []byte("other")}} {
		put(t, s, opt, "k/x", c[0])
		old := open(t, s, opt, "k/x")
		put(t, s, opt, "k/x", c[1])
		if got := readAt(t, open(t, s, opt, "k/x"), opt, 1<<20, 0); !bytes.Equal(got, c[1]) {
			t.Errorf("%d octets after %d: differ", len(c[1]), len(c[0]))
		}
		if !opt.NoDeletedReads {
			if got := readAt(t, old, opt, 1<<20, 0); !bytes.Equal(got, c[0]) {
				t.Errorf("%d octets under %d: the older reader sees others", len(c[0]), len(c[1]))
			}
		}
	}
}

func list(t *testing.T, s store.Store, opt Options) {
	all := []string{"a", "layers/aa.json", "layers/ab.json", "layers/b/c", "layers0", "z/y/x"}
	for i, k := range all {
		b := []byte(k)
		if i == 2 {
			b = Random(2, 300<<10)
		}
		put(t, s, opt, k, b)
	}
	for prefix, want := range map[string][]string{
		"": all, "layers/": all[1:4], "layers/a": all[1:3], "layers": all[1:5], "z/y/x": {"z/y/x"}, "no/such": nil, "layers/b/": {"layers/b/c"},
	} {
		if d := cmp.Diff(want, keys(t, s, opt, prefix)); d != "" {
			t.Errorf("%q: %s", prefix, d)
		}
	}
	n := 0
	again(t, opt, func() error {
		n = 0
		return s.List(t.Context(), "", func(store.Info) bool { n++; return n < 2 })
	})
	if n != 2 {
		t.Errorf("stopped after %d", n)
	}
}

func longList(t *testing.T, s store.Store, opt Options) {
	var want []string
	for i := range opt.Listing {
		want = append(want, fmt.Sprintf("p/%04d", i))
	}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < len(want); i += 8 {
				for try := 0; ; try++ {
					err := store.Put(t.Context(), s, want[i], strings.NewReader("x"))
					if err == nil {
						break
					}
					if !opt.Retries || try > 100 {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	if got := keys(t, s, opt, "p/"); !slices.Equal(got, want) {
		t.Errorf("%d keys", len(got))
	}
}

func wrongKeys(t *testing.T, s store.Store, _ Options) {
	ctx := t.Context()
	for _, k := range []string{"", ".", "..", "a/../b", "/a", "a//b", ".drafts/x", ".packs/00", "a/", "a b", "a\x00", "a\nb", "a\\b", "ä", strings.Repeat("a", 300)} {
		wrong := func(act string, err error) {
			if !errors.Is(err, sandbox.ErrInvalid) && !errors.Is(err, ErrInjected) {
				t.Errorf("%s %q: %v", act, k, err)
			}
		}
		wrong("put", store.Put(ctx, s, k, strings.NewReader("")))
		_, err := s.Open(ctx, k)
		wrong("open", err)
		_, err = s.Stat(ctx, k)
		wrong("stat", err)
		wrong("delete", s.Delete(ctx, k))
		if _, ok := s.Path(k); ok {
			t.Errorf("path %q", k)
		}
	}
}

func ended(t *testing.T, s store.Store, opt Options) {
	put(t, s, opt, "x", Random(1, 400<<10))
	r := open(t, s, opt, "x")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := store.ReadAt(ctx, r, make([]byte, 10), 0)
	errs := map[string]error{"read": err, "put": store.Put(ctx, s, "y", strings.NewReader("y")), "delete": s.Delete(ctx, "x"),
		"list": s.List(ctx, "", func(store.Info) bool { return true })}
	_, errs["open"] = s.Open(ctx, "x")
	_, errs["stat"] = s.Stat(ctx, "x")
	_, errs["create"] = s.Create(ctx)
	for act, err := range errs {
		if !errors.Is(err, context.Canceled) && !errors.Is(err, ErrInjected) {
			t.Errorf("%s with an ended context: %v", act, err)
		}
	}
	if got := keys(t, s, opt, ""); !slices.Equal(got, []string{"x"}) {
		t.Errorf("keys %v", got)
	}
}

func manyReaders(t *testing.T, s store.Store, opt Options) {
	b := Random(9, opt.Large)
	put(t, s, opt, "x", b)
	r := open(t, s, opt, "x")
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 0))
			buf := make([]byte, 1<<20)
			for range 10 {
				off := rng.IntN(len(b))
				n := min(len(buf), len(b)-off)
				for try := 0; ; try++ {
					_, err := store.ReadAt(t.Context(), r, buf[:n], int64(off))
					if err != nil && opt.Retries && try < 100 {
						continue
					}
					if err != nil && err != io.EOF || !bytes.Equal(buf[:n], b[off:off+n]) {
						t.Errorf("%d at %d: %v", n, off, err)
					}
					break
				}
			}
		})
	}
	wg.Wait()
}

func manyWriters(t *testing.T, s store.Store, opt Options) {
	b := Random(9, 3<<20)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for _, key := range []string{"same", fmt.Sprintf("own/%d", w)} {
				for try := 0; ; try++ {
					err := store.Put(t.Context(), s, key, bytes.NewReader(b))
					if err == nil {
						break
					}
					if !opt.Retries || try > 100 {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	for _, key := range []string{"same", "own/0", "own/1", "own/2", "own/3"} {
		if got := readAt(t, open(t, s, opt, key), opt, len(b), 0); !bytes.Equal(got, b) {
			t.Errorf("%s differs", key)
		}
	}
}
