package layer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// Layers go from one catalogue to another by way of a store that knows no facts, and only who can write into the other's store brings them in.
func TestPushAndPull(t *testing.T) {
	ctx := context.Background()
	a, adir := newCatalogue(t)
	b, bdir := newCatalogue(t)
	from, err := store.NewDir(filepath.Join(adir, "store"))
	must(t, err)
	to, err := store.NewDir(filepath.Join(bdir, "store"))
	must(t, err)
	depot, err := store.NewDir(filepath.Join(t.TempDir(), "depot"))
	must(t, err)
	v := publish(t, a, "default", "base/debian", "text")
	for range 2 {
		all, done, err := layer.Copy(ctx, depot, from, []layer.ID{v.ID}, false, nil)
		if err != nil || len(all) != 1 || all[0] != v.ID || done.Skipped != 0 {
			t.Fatalf("%v %+v %v", all, done, err)
		}
	}
	p := layer.Pushed{Kind: layer.PushedLayer, Name: "base/debian", Version: 1, Layers: []layer.ID{v.ID}}
	must(t, layer.WritePushed(ctx, depot, p))
	for _, ref := range []string{"base/debian", "base/debian@1"} {
		if got, err := layer.ReadPushed(ctx, depot, layer.PushedLayer, ref); err != nil || got.Layers[0] != v.ID {
			t.Errorf("%s: %+v %v", ref, got, err)
		}
	}
	for _, ref := range []string{"base/debian@2", "other", "../x", string(v.ID)} {
		if _, err := layer.ReadPushed(ctx, depot, layer.PushedLayer, ref); !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", ref, err)
		}
	}
	if _, _, err := layer.Copy(ctx, to, depot, []layer.ID{v.ID}, false, nil); err != nil {
		t.Fatal(err)
	}
	token := strings.Repeat("ab", 16)
	if err := b.Claim(ctx, "default", v.ID, token); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a claim that nobody left: %v", err)
	}
	must(t, layer.LeaveClaim(ctx, to, v.ID, token))
	for _, wrong := range []string{strings.Repeat("cd", 16), "", "../" + token, "*"} {
		if err := b.Claim(ctx, "default", v.ID, wrong); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("claim %q: %v", wrong, err)
		}
	}
	must(t, b.Claim(ctx, "default", v.ID, token))
	must(t, layer.DropClaim(ctx, to, v.ID, token))
	if _, err := b.Publish(ctx, "default", "base/debian", v.ID); err != nil {
		t.Error(err)
	}
	sweep(t, b)
	must(t, b.Verify(ctx, v.ID))
	// A name in a store that a catalogue serves holds its layers, too.
	must(t, layer.WritePushed(ctx, from, p))
	must(t, a.Remove(ctx, "default", "base/debian"))
	sweep(t, a)
	must(t, a.Verify(ctx, v.ID))
}

// A copy that breaks off leaves no layer in part, and is gone on with.
func TestCopyBreaksOff(t *testing.T) {
	ctx := context.Background()
	a, adir := newCatalogue(t)
	from, err := store.NewDir(filepath.Join(adir, "store"))
	must(t, err)
	v := publish(t, a, "default", "x", "text")
	for seed := range uint64(30) {
		inner, err := store.NewDir(filepath.Join(t.TempDir(), "s"))
		must(t, err)
		to := storetest.NewFaulty(inner, seed, nil, storetest.Faults{Errors: 0.15, Lost: 0.1})
		for {
			_, _, err := layer.Copy(ctx, to, from, []layer.ID{v.ID}, false, nil)
			c := layer.New(nil, inner)
			if _, derr := c.Descriptor(ctx, v.ID); derr == nil {
				must(t, c.Verify(ctx, v.ID))
			}
			if err == nil {
				break
			}
			if !errors.Is(err, storetest.ErrInjected) {
				t.Fatal(err)
			}
		}
		must(t, layer.New(nil, inner).Verify(ctx, v.ID))
	}
}

// Sweeps of the store run all the time while layers are pushed into it whose objects lie there from long ago, named by nobody: each push that says it
// is done has put down a whole layer, and it stays.
func TestSweepsDuringPushes(t *testing.T) {
	ctx := context.Background()
	a, adir := newCatalogue(t)
	from, err := store.NewDir(filepath.Join(adir, "store"))
	must(t, err)
	b, bdir := newCatalogue(t)
	inner, err := store.NewDir(filepath.Join(bdir, "store"))
	must(t, err)
	var ids []layer.ID
	for i := range 6 {
		ids = append(ids, publish(t, a, "default", fmt.Sprintf("l/%d", i), fmt.Sprintf("text %d", i)).ID)
	}
	const age = 6 * time.Hour
	stop := make(chan struct{})
	var sweeps sync.WaitGroup
	for range 2 {
		sweeps.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := b.Sweep(ctx, age); err != nil {
					t.Errorf("sweep: %v", err)
					return
				}
			}
		})
	}
	var pushes sync.WaitGroup
	for i, id := range ids {
		pushes.Go(func() {
			to := storetest.NewFaulty(inner, uint64(i), nil, storetest.Faults{Stalls: 0.5, Stall: 3 * time.Millisecond})
			name := fmt.Sprintf("l/%d", i)
			for range 12 {
				_, _, err := layer.Copy(ctx, to, from, []layer.ID{id}, false, nil)
				if err == nil {
					err = layer.WritePushed(ctx, to, layer.Pushed{Kind: layer.PushedLayer, Name: name, Version: 1, Layers: []layer.ID{id}})
				}
				if err == nil {
					time.Sleep(5 * time.Millisecond)
					err = layer.New(nil, inner).Verify(ctx, id)
				}
				if err != nil {
					t.Errorf("push of %s: %v", name, err)
					return
				}
				// All of it is forgotten, and what lies there is of long ago.
				if err := layer.RemovePushed(ctx, inner, layer.PushedLayer, name); err != nil {
					t.Error(err)
				}
				d, err := layer.New(nil, inner).Descriptor(ctx, id)
				if err != nil {
					t.Error(err)
					return
				}
				old := time.Now().Add(-2 * age)
				if path, ok := inner.Path("layers/" + id.Hex() + ".json"); ok {
					os.Remove(path)
				}
				for _, f := range d.Forms {
					keys := []string{layer.BlobKey(f.Digest)}
					if f.Data != nil {
						keys = append(keys, layer.BlobKey(f.Data.Digest), layer.BlobKey(f.Data.Units))
					}
					for _, k := range keys {
						if path, ok := inner.Path(k); ok {
							os.Chtimes(path, old, old)
						}
					}
				}
			}
		})
	}
	pushes.Wait()
	close(stop)
	sweeps.Wait()
}

// What a store has of a layer is compared where that is asked for: what is wrong is brought again, and a form that only this store has must be right.
func TestCopyChecks(t *testing.T) {
	ctx := context.Background()
	a, adir := newCatalogue(t)
	from, err := store.NewDir(filepath.Join(adir, "store"))
	must(t, err)
	v, err := a.ImportTar(ctx, "default", bytes.NewReader(archive(t, file("f", strings.Repeat("text", 5000)), file("g", strings.Repeat("more", 5000)))), layer.Options{})
	must(t, err)
	dir := filepath.Join(t.TempDir(), "s")
	to, err := store.NewDir(dir)
	must(t, err)
	c := layer.New(nil, to)
	copied := func(check bool) (store.CopyProgress, error) {
		_, p, err := layer.Copy(ctx, to, from, []layer.ID{v.ID}, check, nil)
		return p, err
	}
	_, err = copied(false)
	must(t, err, c.Verify(ctx, v.ID))
	d, err := c.Descriptor(ctx, v.ID)
	must(t, err)
	spoil := func(digest string) {
		t.Helper()
		path, _ := to.Path(layer.BlobKey(digest))
		b, err := os.ReadFile(path)
		must(t, err)
		b[len(b)/2] ^= 1
		must(t, os.Chmod(path, 0o600), os.WriteFile(path, b, 0o600))
	}
	for _, digest := range []string{d.Forms[0].Digest, d.Forms[0].Data.Digest, d.Forms[0].Data.Units} {
		spoil(digest)
		if p, err := copied(false); err != nil || p.Total != 0 || c.Verify(ctx, v.ID) == nil {
			t.Errorf("not asked to compare: %+v %v", p, err)
		}
		if p, err := copied(true); err != nil || p.Total != 3 || p.Skipped != 2 {
			t.Errorf("asked to compare: %+v %v", p, err)
		}
		must(t, c.Verify(ctx, v.ID))
	}
	// Laid out anew there: the source can't mend it.
	d, err = c.Relayout(ctx, v.ID, []string{"/g"})
	must(t, err)
	_, err = copied(true)
	must(t, err)
	spoil(d.Forms[0].Digest)
	if _, err := copied(true); !errors.Is(err, sandbox.ErrLost) {
		t.Errorf("a damaged form that the source does not have: %v", err)
	}
}
