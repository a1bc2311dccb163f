package layer_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"

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
		all, done, err := layer.Copy(ctx, depot, from, []layer.ID{v.ID}, nil)
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
	if _, _, err := layer.Copy(ctx, to, depot, []layer.ID{v.ID}, nil); err != nil {
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
			_, _, err := layer.Copy(ctx, to, from, []layer.ID{v.ID}, nil)
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
