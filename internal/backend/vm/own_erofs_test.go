package vm

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// A host whose kernel has no EROFS starts machines all the same: guests mount their layers by their own kernel. It tells those of a user's image
// apart, which it can't open.
func TestOwnImageWithoutErofs(t *testing.T) {
	dir := t.TempDir()
	st, err := store.NewDir(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	c := layer.New(nil, st)
	l, err := blob.NewLayers(blob.LayersConfig{Dir: filepath.Join(dir, "layers")}, c, st, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	of := func(file string) string {
		tree := t.TempDir()
		if err := os.WriteFile(filepath.Join(tree, file), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
		d, err := c.ImportDir(t.Context(), "default", tree, layer.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return string(d.ID)
	}
	b := &Backend{layers: l}
	plain, own := of("file"), of(OwnFile)
	if err := b.unmarked(t.Context(), plain); err != nil || b.owns.may(plain) {
		t.Errorf("a plain layer: %v", err)
	}
	if err := b.unmarked(t.Context(), own); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("a machine's image: %v, want ErrUnsupported", err)
	}
}
