package layer_test

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// What is told to go is what goes, and telling it changes nothing: a layer that nobody holds, objects of an import that died, claims and
// leases that are over; on stores whose objects are files of this machine and on others.
func TestUnusedIsWhatASweepRemoves(t *testing.T) {
	for what, wrap := range map[string]func(*store.Dir) store.Store{
		"local": func(d *store.Dir) store.Store { return d },
		"far":   func(d *store.Dir) store.Store { return far{d} },
	} {
		t.Run(what, func(t *testing.T) {
			dir := t.TempDir()
			f, err := facts.OpenBolt(filepath.Join(dir, "facts.db"))
			must(t, err)
			defer f.Close()
			d, err := store.NewDir(filepath.Join(dir, "store"))
			must(t, err)
			st := wrap(d)
			c := layer.New(f, st)
			held, err := c.ImportTar(t.Context(), "default", bytes.NewReader(archive(t, file("f", strings.Repeat("held", 5000)))), layer.Options{})
			must(t, err)
			// A host's snapshot that no gateway took, with a parent that only it needs.
			host := layer.New(nil, st)
			loose, err := host.ImportTar(t.Context(), "default", bytes.NewReader(archive(t, file("f", strings.Repeat("loose", 5000)))), layer.Options{Source: "nobody"})
			must(t, err)
			must(t, store.Put(t.Context(), st, layer.BlobKey("sha256:"+strings.Repeat("ab", 32)), strings.NewReader("of an import that died")))
			must(t, layer.LeaveClaim(t.Context(), st, held.ID, strings.Repeat("ab", 16)))
			must(t, store.Put(t.Context(), st, "leases/gone.json", strings.NewReader(`{"until":"2020-01-01T00:00:00Z","layers":["`+string(loose.ID)+`"]}`)))
			for _, under := range []string{"layers", "blobs", "claims", "leases"} {
				aged(t, dir, under, 48*time.Hour)
			}
			state := func() map[string]string {
				m := map[string]string{}
				for _, p := range objects(t, dir) {
					b, err := os.ReadFile(p)
					must(t, err)
					m[p] = string(b)
				}
				return m
			}
			before := state()
			g, err := c.Unused(t.Context(), time.Hour)
			must(t, err)
			if after := state(); !maps.Equal(before, after) {
				t.Error("telling changed the store")
			}
			if len(g.Layers) != 1 || g.Layers[0].ID != loose.ID || g.Layers[0].Source != "nobody" || g.Layers[0].Octets == 0 || g.Layers[0].Deferred != (what == "far") {
				t.Errorf("%+v", g.Layers)
			}
			if want := map[string]int{"local": 4, "far": 1}[what]; g.Objects != want || g.Octets == 0 {
				t.Errorf("%d objects, %d octets; want %d", g.Objects, g.Octets, want)
			}
			n, err := c.Sweep(t.Context(), time.Hour)
			must(t, err, c.Verify(t.Context(), held.ID))
			if n != len(g.Layers)+g.Objects {
				t.Errorf("%d went, %d were told", n, len(g.Layers)+g.Objects)
			}
			if again, err := c.Unused(t.Context(), time.Hour); err != nil || len(again.Layers)+again.Objects != 0 {
				t.Errorf("after the sweep: %+v, %v", again, err)
			}
		})
	}
}

// A pushed name, or a version of it, can be taken out of a store again; what is current then is the latest that is left.
func TestRemovePushed(t *testing.T) {
	st, err := store.NewDir(t.TempDir())
	must(t, err)
	id := layer.ID("sha256:" + strings.Repeat("12", 32))
	push := func(name string, n int64) {
		must(t, layer.WritePushed(t.Context(), st, layer.Pushed{Kind: layer.PushedLayer, Name: name, Version: n, Layers: []layer.ID{id}}))
	}
	remove := func(ref string) error { return layer.RemovePushed(t.Context(), st, layer.PushedLayer, ref) }
	current := func(name string) int64 {
		p, err := layer.ReadPushed(t.Context(), st, layer.PushedLayer, name)
		if errors.Is(err, sandbox.ErrNotFound) {
			return 0
		}
		must(t, err)
		return p.Version
	}
	for n := range int64(12) {
		push("a", n+1)
	}
	push("a/b", 3)
	for _, step := range []struct {
		ref  string
		want int64
		err  error
	}{
		{"a@5", 12, nil}, {"a@12", 11, nil}, {"a@12", 11, sandbox.ErrNotFound}, {"c", 0, sandbox.ErrNotFound}, {"../a", 0, sandbox.ErrInvalid},
		{string(id), 0, sandbox.ErrInvalid}, {"a", 0, nil}, {"a", 0, sandbox.ErrNotFound},
	} {
		if err := remove(step.ref); !errors.Is(err, step.err) {
			t.Errorf("%s: %v, want %v", step.ref, err, step.err)
		}
		if strings.HasPrefix(step.ref, "a") && current("a") != step.want {
			t.Errorf("after %s: version %d, want %d", step.ref, current("a"), step.want)
		}
	}
	if current("a/b") != 3 {
		t.Error("a name below it went too")
	}
	var left []string
	must(t, st.List(t.Context(), "pushed/", func(i store.Info) bool { left = append(left, i.Key); return true }))
	if !slices.Equal(left, []string{"pushed/layers/a/b/_3.json", "pushed/layers/a/b/_current.json"}) {
		t.Errorf("left: %v", left)
	}
}
