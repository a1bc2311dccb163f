package facts_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/facts"
)

const sector = 512

// TestPowerLossDuringAChange tears every change as a loss of power may: of what is written before the file's first sync any sectors are on the
// disk, then of the page that makes it count. The file then opens, with all that was acknowledged and the change whole or not at all.
func TestPowerLossDuringAChange(t *testing.T) {
	ctx := context.Background()
	rng := rand.New(rand.NewPCG(1, 2))
	file := filepath.Join(t.TempDir(), "facts.db")
	b, err := facts.OpenBolt(file)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	read := func(b *facts.Bolt) map[string]string {
		list, err := b.List(ctx, "", "", 0)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]string{}
		for _, f := range list {
			all[f.Key] = string(f.Value)
		}
		return all
	}
	image := func() []byte {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	meta := int64(2 * os.Getpagesize())
	torn := func(before, after []byte, from, to int64, keep float64) []byte {
		for at := from; at < min(to, int64(len(after))); at += sector {
			if rng.Float64() < keep {
				copy(before[at:], after[at:at+sector])
			}
		}
		return before
	}
	var kept, gone int
	for i := range 60 {
		was, old := read(b), image()
		if key := fmt.Sprint("k", rng.IntN(12)); i%5 == 4 && was[key] != "" {
			err = b.Delete(ctx, key, facts.Any)
		} else {
			_, err = b.Put(ctx, key, bytes.Repeat([]byte{byte('a' + i%26)}, 1+rng.IntN(9000)), facts.Any)
		}
		if err != nil {
			t.Fatal(err)
		}
		is, now := read(b), image()
		for try := range 6 {
			disk := append(bytes.Clone(old), make([]byte, len(now)-len(old))...) // its size is synced before it is used
			if try < 3 {
				disk = torn(disk, now, meta, int64(len(now)), rng.Float64())
			} else {
				disk = torn(disk, now, meta, int64(len(now)), 1)
				disk = torn(disk, now, 0, meta, 0.5)
			}
			crashed := filepath.Join(t.TempDir(), "facts.db")
			if err := os.WriteFile(crashed, disk, 0o600); err != nil {
				t.Fatal(err)
			}
			c, err := facts.OpenBolt(crashed)
			if err != nil {
				t.Fatalf("change %d, try %d: %v", i, try, err)
			}
			got := read(c)
			c.Close()
			switch {
			case cmp.Equal(got, was):
				gone++
			case try >= 3 && cmp.Equal(got, is):
				kept++
			default:
				t.Fatalf("change %d, try %d: neither before nor after: %s", i, try, cmp.Diff(was, got))
			}
		}
	}
	if kept == 0 || gone == 0 {
		t.Fatalf("%d changes were there and %d were not", kept, gone)
	}
}
