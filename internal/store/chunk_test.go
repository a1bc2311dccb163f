package store

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func cuts(t interface{ Fatal(...any) }, c *cutting, r io.Reader) (sums []digest, sizes []int, all []byte) {
	if err := c.split(r, func(b []byte) error {
		sums, sizes, all = append(sums, sha256.Sum256(b)), append(sizes, len(b)), append(all, b...)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return sums, sizes, all
}

func TestCutting(t *testing.T) {
	c := newCutting(4<<10, 16<<10, 64<<10)
	rapid.Check(t, func(t *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		b := make([]byte, rapid.IntRange(0, 1<<20).Draw(t, "size"))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		if rapid.Bool().Draw(t, "zeros") {
			clear(b[len(b)/3 : len(b)/2])
		}
		sums, sizes, all := cuts(t, c, bytes.NewReader(b))
		if !bytes.Equal(all, b) {
			t.Fatal("the chunks are not the whole")
		}
		for i, n := range sizes {
			if n > c.max || n < c.min && i < len(sizes)-1 {
				t.Fatal("a chunk of ", n)
			}
		}
		// The same octets are cut in the same way, however they come.
		again, _, _ := cuts(t, c, iotest.HalfReader(bytes.NewReader(b)))
		if len(again) != len(sums) {
			t.Fatal("cut in another way")
		}
		// An insertion moves the cuts near it only.
		if len(b) < 256<<10 {
			return
		}
		at := rng.IntN(len(b))
		changed := append(append(append([]byte(nil), b[:at]...), 1, 2, 3), b[at:]...)
		other, _, _ := cuts(t, c, bytes.NewReader(changed))
		have := map[digest]bool{}
		for _, s := range sums {
			have[s] = true
		}
		new := 0
		for _, s := range other {
			if !have[s] {
				new++
			}
		}
		if new > 16 {
			t.Fatal(new, " of ", len(other), " chunks are new after three octets")
		}
	})
	want := errors.New("cut")
	if err := c.split(iotest.ErrReader(want), func([]byte) error { return nil }); !errors.Is(err, want) {
		t.Error(err)
	}
	if err := c.split(bytes.NewReader(make([]byte, 10)), func([]byte) error { return want }); !errors.Is(err, want) {
		t.Error(err)
	}
}

// How objects are cut is part of what is stored: other cuts would share nothing with it.
func TestCutsStayTheSame(t *testing.T) {
	var key [32]byte
	b := make([]byte, 3<<20)
	rand.NewChaCha8(key).Read(b)
	_, sizes, _ := cuts(t, newCutting(chunkMin, chunkAvg, chunkMax), bytes.NewReader(b))
	if d := cmp.Diff([]int{299467, 262509, 271668, 372957, 265239, 390955, 322908, 298446, 276942, 202028, 182609}, sizes); d != "" {
		t.Error(d)
	}
}

func BenchmarkCutting(b *testing.B) {
	data := make([]byte, 16<<20)
	rand.NewChaCha8([32]byte{}).Read(data)
	c := newCutting(chunkMin, chunkAvg, chunkMax)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		c.split(bytes.NewReader(data), func([]byte) error { return nil })
	}
}
