package store_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// Reads that leave comparing to the caller bring the same octets as the others, from compressed and plain chunks, alone and at once, and
// beside reads that are given up.
func TestS3UncheckedReads(t *testing.T) {
	m, url := server(t)
	s := newS3(t, s3Config(t, url))
	a := append(storetest.Random(1, 5<<20), bytes.Repeat([]byte("all work and no play\n"), 100_000)...)
	a = append(a, storetest.Random(2, 3<<20+17)...)
	put(t, s, "a", string(a))
	put(t, s, "small", "abc")
	put(t, s, "empty", "")
	cold := newS3(t, s3Config(t, url))
	for _, key := range []string{"small", "empty"} {
		r, err := cold.Open(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 10)
		if n, err := store.ReadAtUnchecked(t.Context(), r, buf, 0); err != io.EOF || int64(n) != r.Size() {
			t.Errorf("%s: %d octets, %v", key, n, err)
		}
	}
	r, err := cold.Open(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	var readers sync.WaitGroup
	for i := range 8 {
		readers.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(i), 3))
			for range 30 {
				off := rnd.Int64N(int64(len(a)))
				buf := make([]byte, rnd.IntN(2<<20)+1)
				ctx, cancel := context.WithCancel(t.Context())
				if rnd.IntN(4) == 0 {
					go cancel()
				}
				n, err := store.ReadAtUnchecked(ctx, r, buf, off)
				gaveUp := ctx.Err() != nil
				cancel()
				want := a[off:min(off+int64(len(buf)), int64(len(a)))]
				switch {
				case err != nil && err != io.EOF:
					if !gaveUp || !errors.Is(err, context.Canceled) {
						t.Errorf("read of %d at %d: %v", len(buf), off, err)
					}
				case !bytes.Equal(buf[:n], want):
					t.Errorf("read of %d at %d: other octets", len(buf), off)
				}
			}
		})
	}
	readers.Wait()
	if n, err := store.ReadAtUnchecked(t.Context(), r, make([]byte, 1), int64(len(a))); n != 0 || err != io.EOF {
		t.Errorf("behind the end: %d, %v", n, err)
	}
	// A pack that lies: the read brings wrong octets or an error, the checked one then says what is wrong.
	for k := range m.Names("some/where/.packs/") {
		if err := m.Damage(k, 1<<20); err != nil {
			t.Fatal(err)
		}
	}
	buf := make([]byte, len(a))
	n, err := store.ReadAtUnchecked(t.Context(), newReader(t, s3Config(t, url), "a"), buf[:4<<20], 0)
	if err == nil && bytes.Equal(buf[:n], a[:n]) {
		t.Error("damage was not met")
	}
}

func newReader(t *testing.T, cfg store.S3Config, key string) store.Reader {
	t.Helper()
	r, err := newS3(t, cfg).Open(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return r
}
