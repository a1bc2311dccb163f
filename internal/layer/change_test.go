package layer_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// slowDescriptors is a store whose descriptors are published late, as a far one's are.
type slowDescriptors struct{ store.Store }

type slowDraft struct{ store.Draft }

func (s slowDescriptors) Create(ctx context.Context) (store.Draft, error) {
	d, err := s.Store.Create(ctx)
	return slowDraft{d}, err
}

func (d slowDraft) Publish(ctx context.Context, key string) error {
	if strings.HasPrefix(key, "layers/") {
		time.Sleep(rand.N(60 * time.Millisecond))
	}
	return d.Draft.Publish(ctx, key)
}

// Several processes change one layer at once: two lay it out anew, one after another, others import it again. No form is lost.
func TestDescriptorsChangedAtOnce(t *testing.T) {
	dir := t.TempDir()
	db, err := facts.OpenBolt(filepath.Join(dir, "facts.db"))
	must(t, err)
	defer db.Close()
	st, err := store.NewDir(filepath.Join(dir, "store"))
	must(t, err)
	process := func() *layer.Catalogue { return layer.New(db, slowDescriptors{st}) }
	var entries []entry
	for i := range 8 {
		entries = append(entries, file(string(rune('a'+i)), random(byte(i+1), 40<<10)))
	}
	data := archive(t, entries...)
	first := process()
	d, err := first.ImportTar(t.Context(), "default", bytes.NewReader(data), layer.Options{Form: layer.FormSplit})
	must(t, err)
	from := d.Forms[0].Data.Digest
	var layouts, imports sync.WaitGroup
	done := make(chan struct{})
	made := make(chan string, 100)
	for p := range 3 {
		layouts.Go(func() {
			c := process()
			for i := range 2 {
				for try := 0; ; try++ {
					_, err := c.RelayoutRead(t.Context(), d.ID, from, []layer.Range{{Off: int64(p*2+i) * 40 << 10, Len: 40 << 10}})
					if errors.Is(err, sandbox.ErrExhausted) && try < 20 {
						continue // it may be lost, and that is told
					}
					if err != nil {
						t.Error(err)
						return
					}
					break
				}
				made <- "" // how many; which they are is looked at below
			}
		})
	}
	for range 2 {
		imports.Go(func() {
			c := process()
			for {
				select {
				case <-done:
					return
				default:
				}
				time.Sleep(rand.N(200 * time.Millisecond))
				if _, err := c.ImportTar(context.Background(), "default", bytes.NewReader(data), layer.Options{}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	layouts.Wait()
	close(done)
	imports.Wait()
	now, err := first.Descriptor(t.Context(), d.ID)
	must(t, err)
	must(t, first.Verify(t.Context(), d.ID))
	if len(now.Forms) != len(made) && len(now.Forms) != len(made)+1 { // one of them may be as it was first
		t.Errorf("%d forms are left of %d and the first", len(now.Forms), len(made))
	}
	superseded := 0
	for _, f := range now.Forms {
		if f.Superseded != nil {
			superseded++
		}
	}
	if superseded != len(now.Forms)-1 {
		t.Errorf("%d of %d forms are superseded, want all but one", superseded, len(now.Forms))
	}
}
