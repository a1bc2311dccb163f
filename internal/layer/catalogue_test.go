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

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

func newCatalogue(t testing.TB) (*layer.Catalogue, string) {
	t.Helper()
	dir := t.TempDir()
	f, err := facts.OpenBolt(filepath.Join(dir, "facts.db"))
	must(t, err)
	t.Cleanup(func() { f.Close() })
	s, err := store.NewDir(filepath.Join(dir, "store"))
	must(t, err)
	return layer.New(f, s), dir
}

// publish makes a layer with one file and names it.
func publish(t testing.TB, c *layer.Catalogue, project, name, text string) layer.Version {
	t.Helper()
	d, err := c.ImportTar(context.Background(), project, bytes.NewReader(archive(t, file("f", text))), layer.Options{Source: text})
	must(t, err)
	v, err := c.Publish(context.Background(), project, name, d.ID)
	must(t, err)
	return v
}

func objects(t testing.TB, dir string) []string {
	t.Helper()
	var out []string
	filepath.Walk(filepath.Join(dir, "store"), func(p string, info os.FileInfo, err error) error {
		if err == nil && info.Mode().IsRegular() && filepath.Base(filepath.Dir(p)) != "catalogues" && filepath.Base(filepath.Dir(filepath.Dir(p))) != "held" { // what the catalogue says of itself
			out = append(out, p)
		}
		return nil
	})
	return out
}

// sweep removes all that nothing refers to, however young.
func sweep(t testing.TB, c *layer.Catalogue) {
	t.Helper()
	_, err := c.Sweep(context.Background(), -time.Hour)
	must(t, err)
}

func TestVersionsRollbackAndRemove(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	v1, v2 := publish(t, c, "default", "base/debian", "one"), publish(t, c, "default", "base/debian", "two")
	if v1.N != 1 || v2.N != 2 || v1.ID == v2.ID {
		t.Fatalf("%+v %+v", v1, v2)
	}
	lookup := func(ref string) layer.ID {
		t.Helper()
		v, err := c.Lookup(ctx, "default", ref)
		must(t, err)
		return v.ID
	}
	if lookup("base/debian") != v2.ID || lookup("base/debian@1") != v1.ID || lookup(string(v1.ID)) != v1.ID {
		t.Error("lookup")
	}
	must(t, c.Rollback(ctx, "default", "base/debian", 1))
	if lookup("base/debian") != v1.ID {
		t.Error("rollback")
	}
	if v3 := publish(t, c, "default", "base/debian", "one"); v3.N != 3 || v3.ID != v1.ID {
		t.Errorf("the same tree again: %+v", v3)
	}
	form, err := c.Form(ctx, v1.ID)
	must(t, err)
	if b, err := os.ReadFile(blobPath(dir, form.Data.Digest)); err != nil || !bytes.Contains(b, []byte("one")) {
		t.Errorf("%d octets, %v", len(b), err)
	}
	must(t, c.Verify(ctx, v1.ID))

	must(t, c.Remove(ctx, "default", "base/debian@3"))
	must(t, c.Remove(ctx, "default", "base/debian@1"))
	if _, err := c.Form(ctx, v1.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("form of a removed layer: %v", err)
	}
	if lookup("base/debian") != v2.ID {
		t.Error("current after the removal of the current one")
	}
	must(t, c.Remove(ctx, "default", "base/debian"))
	sweep(t, c)
	if left := objects(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if v := publish(t, c, "default", "base/debian", "three"); v.N != 4 {
		t.Errorf("a number was used again: %+v", v)
	}
}

func TestLookupErrors(t *testing.T) {
	ctx := context.Background()
	c, _ := newCatalogue(t)
	publish(t, c, "default", "base/debian", "1")
	publish(t, c, "default", "base/debian", "2")
	publish(t, c, "default", "kits/go", "3")
	for ref, want := range map[string]struct {
		err  error
		text string
	}{
		"base/debain":                       {sandbox.ErrNotFound, "did you mean base/debian?"},
		"debian":                            {sandbox.ErrNotFound, "did you mean base/debian?"},
		"base/debian@7":                     {sandbox.ErrNotFound, "it has versions 1, 2"},
		"windows":                           {sandbox.ErrNotFound, "windows"},
		"Base/Debian":                       {sandbox.ErrInvalid, "Base/Debian"},
		"a/b/c/d/e":                         {sandbox.ErrInvalid, "4 parts"},
		"base/debian@0":                     {sandbox.ErrInvalid, "version from 1"},
		"x@01":                              {sandbox.ErrInvalid, "version from 1"},
		"x@":                                {sandbox.ErrInvalid, "version from 1"},
		"":                                  {sandbox.ErrInvalid, "want a name"},
		"a\nb":                              {sandbox.ErrInvalid, `a\nb`},
		"sha256:abc":                        {sandbox.ErrInvalid, "64 hexadecimal"},
		"sha256:" + strings.Repeat("a", 64): {sandbox.ErrNotFound, "project default"},
	} {
		_, err := c.Lookup(ctx, "default", ref)
		if !errors.Is(err, want.err) || !strings.Contains(fmt.Sprint(err), want.text) {
			t.Errorf("%q: %v", ref, err)
		}
	}
	if _, err := c.Resolve(ctx, "default", "none"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}
	if err := c.Rollback(ctx, "default", "base/debian", 9); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}
	if err := c.Remove(ctx, "default", "base/debian@9"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}
	for _, name := range []string{"x@1", "", "a//b", "sha256:" + strings.Repeat("a", 64)} {
		if _, err := c.Publish(ctx, "default", name, "sha256:"+layer.ID(strings.Repeat("a", 64))); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("publish %q: %v", name, err)
		}
	}
}

func TestEnvironments(t *testing.T) {
	ctx := context.Background()
	c, _ := newCatalogue(t)
	base, work, kit := publish(t, c, "default", "base/debian", "b"), publish(t, c, "default", "work/chi", "w"), publish(t, c, "default", "kits/go", "k")
	spec := layer.EnvironmentSpec{Base: "base/debian", Workspace: "work/chi@1", Kits: []string{string(kit.ID)}, Env: []string{"A=1"}, User: "root", Cwd: "/work"}
	e, err := c.PublishEnvironment(ctx, "default", "chi", spec)
	must(t, err)
	if d := cmp.Diff([]layer.ID{base.ID, work.ID, kit.ID}, e.Layers); d != "" || e.Ref() != "chi@1" || e.Spec.Base != "base/debian@1" {
		t.Errorf("%+v %s", e, d)
	}
	base2 := publish(t, c, "default", "base/debian", "b2")
	got, err := c.Resolve(ctx, "default", "chi")
	must(t, err)
	e.Created = got.Created
	if d := cmp.Diff(e, got); d != "" {
		t.Errorf("a published environment follows its names: %s", d)
	}
	e2, err := c.PublishEnvironment(ctx, "default", "chi", spec)
	must(t, err)
	if e2.N != 2 || e2.Layers[0] != base2.ID {
		t.Errorf("%+v", e2)
	}
	must(t, c.RollbackEnvironment(ctx, "default", "chi", 1))
	if got, _ := c.Resolve(ctx, "default", "chi"); got.N != 1 {
		t.Errorf("%+v", got)
	}
	list, err := c.Environments(ctx, "default")
	if err != nil || len(list) != 2 || !list[0].Current || list[1].Current {
		t.Errorf("%+v %v", list, err)
	}

	for _, ref := range []string{"base/debian@1", "base/debian", "kits/go", "work/chi@1"} {
		if err := c.Remove(ctx, "default", ref); !errors.Is(err, sandbox.ErrState) || !strings.Contains(err.Error(), "environment chi@") {
			t.Errorf("remove %s: %v", ref, err)
		}
	}
	must(t, c.RemoveEnvironment(ctx, "default", "chi@1"), c.Remove(ctx, "default", "base/debian@1"))
	must(t, c.RemoveEnvironment(ctx, "default", "chi"), c.Remove(ctx, "default", "base/debian"))
	if _, err := c.Resolve(ctx, "default", "chi"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}

	for name, s := range map[string]layer.EnvironmentSpec{
		"base": {}, "same": {Base: "kits/go", Workspace: string(kit.ID)}, "env": {Base: "kits/go", Env: []string{"=x"}},
		"cwd": {Base: "kits/go", Cwd: "rel"}, "memory": {Base: "kits/go", Resources: sandbox.Resources{Memory: 1}},
	} {
		if _, err := c.PublishEnvironment(ctx, "default", "x", s); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.PublishEnvironment(ctx, "default", "x", layer.EnvironmentSpec{Base: "kits/goo"}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}
}

func TestProjects(t *testing.T) {
	ctx := context.Background()
	c, _ := newCatalogue(t)
	v := publish(t, c, "org", "base", "b")
	_, err := c.PublishEnvironment(ctx, "org/team", "env", layer.EnvironmentSpec{Base: "base"})
	must(t, err)
	for _, ref := range []string{"base", string(v.ID)} {
		for _, p := range []string{"other", "organ", "org2/team"} {
			if _, err := c.Lookup(ctx, p, ref); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("project %s sees %s: %v", p, ref, err)
			}
		}
	}
	if err := c.Remove(ctx, "org", "base"); !errors.Is(err, sandbox.ErrState) || !strings.Contains(err.Error(), "env@1 of project org/team") {
		t.Errorf("a layer that a project below uses: %v", err)
	}
	if err := c.Remove(ctx, "org/team", "base"); !errors.Is(err, sandbox.ErrDenied) {
		t.Errorf("removal of what is above: %v", err)
	}
	// Two projects with one tree: each may drop it, the data goes with the last.
	w := publish(t, c, "other", "mine", "b")
	if w.ID != v.ID {
		t.Fatal("not the same layer")
	}
	must(t, c.RemoveEnvironment(ctx, "org/team", "env"), c.Remove(ctx, "org", "base"))
	if err := c.Verify(ctx, w.ID); err != nil {
		t.Error(err)
	}
	must(t, c.Remove(ctx, "other", "mine"))
	if _, err := c.Form(ctx, w.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}
}

func TestSnapshots(t *testing.T) {
	ctx := context.Background()
	c, _ := newCatalogue(t)
	base, other := publish(t, c, "default", "base", "b"), publish(t, c, "default", "other", "o")
	upper := t.TempDir()
	if _, err := c.ImportUpper(ctx, "default", upper, layer.Options{}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("without parents: %v", err)
	}
	s1, err := c.ImportUpper(ctx, "default", upper, layer.Options{Parents: []layer.ID{base.ID}})
	must(t, err)
	s2, err := c.ImportUpper(ctx, "default", upper, layer.Options{Parents: []layer.ID{other.ID}})
	must(t, err)
	if s1.ID == s2.ID {
		t.Error("the same changes on other layers are the same layer")
	}
	top, err := c.ImportUpper(ctx, "default", upper, layer.Options{Parents: []layer.ID{base.ID, s1.ID}})
	must(t, err)
	for _, refs := range [][]string{{string(top.ID)}, {"base", string(s1.ID), string(top.ID)}} {
		got, err := c.Compose(ctx, "default", refs)
		if d := cmp.Diff([]layer.ID{base.ID, s1.ID, top.ID}, got); err != nil || d != "" {
			t.Errorf("%v: %v %s", refs, err, d)
		}
	}
	if _, err := c.Compose(ctx, "default", []string{"other", string(s1.ID)}); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), "snapshot taken on other layers") {
		t.Error(err)
	}
	if err := c.Remove(ctx, "default", "base"); !errors.Is(err, sandbox.ErrState) || !strings.Contains(err.Error(), "snapshot sha256:") {
		t.Errorf("a layer with a snapshot on it: %v", err)
	}
	_, err = c.Publish(ctx, "default", "snap", top.ID)
	must(t, err)
	if err := c.Remove(ctx, "default", string(top.ID)); !errors.Is(err, sandbox.ErrState) || !strings.Contains(err.Error(), "it is snap@1") {
		t.Errorf("by ID with a name: %v", err)
	}
	must(t, c.Remove(ctx, "default", "snap"), c.Remove(ctx, "default", string(s1.ID)), c.Remove(ctx, "default", "base"))
}

func TestFailedBuildLeavesNothing(t *testing.T) {
	c, dir := newCatalogue(t)
	good := archive(t, file("a", strings.Repeat("x", 5000)))
	if _, err := c.ImportTar(context.Background(), "default", bytes.NewReader(good[:2000]), layer.Options{}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Error(err)
	}
	if left := objects(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func TestManyPublishAtOnce(t *testing.T) {
	c, _ := newCatalogue(t)
	data := archive(t, file("f", "x"))
	var wg sync.WaitGroup
	numbers := make([]int, 8)
	for i := range numbers {
		wg.Go(func() {
			d, err := c.ImportTar(context.Background(), "default", bytes.NewReader(data), layer.Options{})
			if err != nil {
				t.Error(err)
				return
			}
			v, err := c.Publish(context.Background(), "default", "a", d.ID)
			if err != nil {
				t.Error(err)
			}
			numbers[i] = v.N
		})
	}
	wg.Wait()
	seen := map[int]bool{}
	for _, n := range numbers {
		if n < 1 || n > 8 || seen[n] {
			t.Errorf("%v", numbers)
		}
		seen[n] = true
	}
}

// A host makes snapshots without the facts; the gateway holds them for the project. What nobody took is swept.
func TestHostsMakeAndGatewaysHold(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	base := publish(t, c, "default", "base", "b")
	s, err := store.NewDir(filepath.Join(dir, "store"))
	must(t, err)
	host := layer.New(nil, s)
	write(t, dir+"/u1/f", "1")
	write(t, dir+"/u2/f", "2")
	taken, err := host.ImportUpper(ctx, "default", dir+"/u1", layer.Options{Parents: []layer.ID{base.ID}})
	must(t, err)
	lost, err := host.ImportUpper(ctx, "default", dir+"/u2", layer.Options{Parents: []layer.ID{base.ID}})
	must(t, err)
	if _, err := c.Lookup(ctx, "default", string(taken.ID)); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("before it is held: %v", err)
	}
	must(t, c.Hold(ctx, "default", taken.ID))
	if err := c.Hold(ctx, "default", layer.ID("sha256:"+strings.Repeat("a", 64))); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("hold of nothing: %v", err)
	}
	must(t, store.Put(ctx, s, "blobs/"+strings.Repeat("b", 64), strings.NewReader("an import that died")))
	if n, err := c.Sweep(ctx, time.Hour); err != nil || n != 0 {
		t.Errorf("young ones: %d %v", n, err)
	}
	if n, err := c.Sweep(ctx, -time.Hour); err != nil || n != 5 { // a snapshot, its image, contents and unit table, and the blob
		t.Errorf("%d %v", n, err)
	}
	for _, id := range []layer.ID{base.ID, taken.ID} {
		if err := c.Verify(ctx, id); err != nil {
			t.Error(err)
		}
	}
	if _, err := c.Form(ctx, lost.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}
	if got, err := c.Compose(ctx, "default", []string{string(taken.ID)}); err != nil || len(got) != 2 {
		t.Errorf("%v %v", got, err)
	}
}
