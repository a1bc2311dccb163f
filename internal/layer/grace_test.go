package layer_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// far is a store whose objects are no files of this machine.
type far struct{ *store.Dir }

func (far) Path(string) (string, bool) { return "", false }

// aged sets the time of all objects below a folder of the store.
func aged(t testing.TB, dir, under string, age time.Duration) {
	t.Helper()
	when := time.Now().Add(-age)
	for _, p := range objects(t, dir) {
		if strings.HasPrefix(p, filepath.Join(dir, "store", under)+"/") {
			must(t, os.Chtimes(p, when, when))
		}
	}
}

func TestRemovedLayersStayForTheirReaders(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	f, err := facts.OpenBolt(filepath.Join(dir, "facts.db"))
	must(t, err)
	defer f.Close()
	s, err := store.NewDir(filepath.Join(dir, "store"))
	must(t, err)
	c := layer.New(f, far{s})
	data := archive(t, file("f", strings.Repeat("text", 5000)))
	d, err := c.ImportTar(ctx, "default", bytes.NewReader(data), layer.Options{})
	must(t, err)
	aged(t, dir, "blobs", 48*time.Hour)
	must(t, c.Remove(ctx, "default", string(d.ID)))
	if _, err := c.Form(ctx, d.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a removed layer: %v", err)
	}
	for _, age := range []time.Duration{0, 3 * time.Hour} { // of the removal
		aged(t, dir, "removed", age)
		_, err := c.Sweep(ctx, time.Hour)
		must(t, err)
		for _, digest := range []string{d.Forms[0].Digest, d.Forms[0].Data.Digest, d.Forms[0].Data.Units} {
			if _, err := os.Stat(blobPath(dir, digest)); err != nil {
				t.Errorf("%v after the removal: %v", age, err)
			}
		}
	}
	// Imported again meanwhile it is a layer like any other.
	again, err := c.ImportTar(ctx, "default", bytes.NewReader(data), layer.Options{})
	must(t, err)
	aged(t, dir, "blobs", 48*time.Hour)
	aged(t, dir, "removed", 5*time.Hour)
	_, err = c.Sweep(ctx, time.Hour)
	must(t, err, c.Verify(ctx, again.ID))
	must(t, c.Remove(ctx, "default", string(d.ID)))
	aged(t, dir, "removed", 5*time.Hour)
	_, err = c.Sweep(ctx, time.Hour)
	must(t, err)
	if left := objects(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// What a host says it has mounted stays, however long ago it was removed or replaced; a lease that ran out holds nothing.
func TestLeasesKeepLayers(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	f, err := facts.OpenBolt(filepath.Join(dir, "facts.db"))
	must(t, err)
	defer f.Close()
	s, err := store.NewDir(filepath.Join(dir, "store"))
	must(t, err)
	c := layer.New(f, far{s})
	d, err := c.ImportTar(ctx, "default", bytes.NewReader(archive(t, file("f", strings.Repeat("text", 5000)))), layer.Options{})
	must(t, err)
	// A host has no facts.
	must(t, layer.New(nil, far{s}).Lease(ctx, "h1", []layer.ID{d.ID}), c.Remove(ctx, "default", string(d.ID)))
	sweep := func() {
		aged(t, dir, "blobs", 480*time.Hour)
		aged(t, dir, "removed", 480*time.Hour)
		_, err := c.Sweep(ctx, time.Hour)
		must(t, err)
	}
	whole := func() bool {
		for _, digest := range []string{d.Forms[0].Digest, d.Forms[0].Data.Digest, d.Forms[0].Data.Units} {
			if _, err := os.Stat(blobPath(dir, digest)); err != nil {
				return false
			}
		}
		return true
	}
	for range 3 {
		if sweep(); !whole() {
			t.Fatal("a layer in use lost its objects")
		}
	}
	must(t, os.WriteFile(filepath.Join(dir, "store", "leases", "h2.json"), []byte("{"), 0o600))
	aged(t, dir, "removed", 480*time.Hour)
	if _, err := c.Sweep(ctx, time.Hour); err == nil {
		t.Error("a lease that can't be read was passed over")
	}
	over := fmt.Sprintf(`{"until":"2001-01-01T00:00:00Z","layers":[%q]}`, d.ID)
	must(t, os.WriteFile(filepath.Join(dir, "store", "leases", "h2.json"), []byte(over), 0o600), c.Lease(ctx, "h1", nil))
	sweep()
	if left := objects(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// Local files give back their space at once, save what another layer has too or what is very young.
func TestRemovalFreesLocalSpace(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	text := strings.Repeat("text", 5000)
	a := importSplit(t, c, layer.Options{}, file("f", text))
	b := importSplit(t, c, layer.Options{}, file("g", text))
	aged(t, dir, "blobs", 2*time.Hour)
	must(t, c.Remove(ctx, "default", string(a.ID)), c.Verify(ctx, b.ID))
	if left := objects(t, dir); len(left) != 4 {
		t.Errorf("left: %v", left)
	}
	young := importSplit(t, c, layer.Options{}, file("h", "other"))
	must(t, c.Remove(ctx, "default", string(b.ID)))
	if left := objects(t, dir); len(left) != 4 {
		t.Errorf("left: %v", left)
	}
	must(t, c.Remove(ctx, "default", string(young.ID)))
	if left := objects(t, dir); len(left) != 3 {
		t.Errorf("left: %v", left)
	}
	sweep(t, c)
	if left := objects(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}
