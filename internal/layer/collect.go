package layer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// holders lists the layers that any project holds, or a name in the store itself.
func (c *Catalogue) holders(ctx context.Context) (map[ID]bool, error) {
	list, err := c.facts.List(ctx, "held:", "", 0)
	if err != nil {
		return nil, err
	}
	out := map[ID]bool{}
	for _, f := range list {
		out[ID(idPrefix+f.Key[strings.LastIndexByte(f.Key, ':')+1:])] = true
	}
	return out, c.pushed(ctx, func(id ID) { out[id] = true })
}

// collect removes the layer's data when nothing holds it any more. The caller has mu.
func (c *Catalogue) collect(ctx context.Context, id ID) error {
	held, err := c.holders(ctx)
	if err != nil || held[id] {
		return err
	}
	return c.erase(ctx, id)
}

func (c *Catalogue) erase(ctx context.Context, id ID) error {
	d, err := c.Descriptor(ctx, id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer c.forget(id)
	if err := c.store.Delete(ctx, descriptorKey(id)); err != nil {
		return err
	}
	for _, f := range d.Forms {
		// The image carries the layer's ID, so no other layer has the same. Contents may be another's too: they are left to Sweep.
		if err := c.store.Delete(ctx, BlobKey(f.Digest)); err != nil {
			return err
		}
	}
	return nil
}

// Sweep removes data that nothing refers to and that is older than age: what an import left that died between its steps, and
// snapshots that nobody took. It returns how many objects went. The age must be longer than any import takes.
func (c *Catalogue) Sweep(ctx context.Context, age time.Duration) (int, error) {
	if c.facts == nil {
		return 0, fmt.Errorf("sweep layers: needs the facts: %w", sandbox.ErrUnsupported)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	keep, err := c.holders(ctx)
	if err != nil {
		return 0, fmt.Errorf("sweep layers: %w", err)
	}
	var parents []ID
	found := map[ID]Descriptor{}
	old := map[ID]bool{}
	before := c.now().Add(-age)
	var failed error
	err = c.store.List(ctx, "layers/", func(i store.Info) bool {
		id := ID(idPrefix + strings.TrimSuffix(strings.TrimPrefix(i.Key, "layers/"), ".json"))
		d, err := c.Descriptor(ctx, id)
		if errors.Is(err, sandbox.ErrNotFound) {
			return true
		}
		if err != nil {
			// A broken descriptor stops it: its blobs would look unused.
			failed = err
			return false
		}
		found[id] = d
		if keep[id] || i.Modified.After(before) {
			parents = append(parents, d.Parents...)
		} else {
			old[id] = true
		}
		return true
	})
	if err := errors.Join(err, failed); err != nil {
		return 0, fmt.Errorf("sweep layers: %w", err)
	}
	for len(parents) > 0 { // a parent may be a snapshot itself
		p := parents[len(parents)-1]
		parents = parents[:len(parents)-1]
		if old[p] {
			delete(old, p)
			parents = append(parents, found[p].Parents...)
		}
	}
	n := 0
	blobs := map[string]bool{}
	for id, d := range found {
		if old[id] {
			if err := c.erase(ctx, id); err != nil {
				return n, fmt.Errorf("sweep layers: %w", err)
			}
			n++
			continue
		}
		if d, err = c.dropSuperseded(ctx, d, before); err != nil {
			return n, fmt.Errorf("sweep layers: %w", err)
		}
		for _, f := range d.Forms {
			for _, b := range f.blobs() {
				blobs[b.key] = true
			}
		}
	}
	var lost []string
	if err := c.store.List(ctx, "blobs/", func(i store.Info) bool {
		if !blobs[i.Key] && i.Modified.Before(before) {
			lost = append(lost, i.Key)
		}
		return true
	}); err != nil {
		return n, fmt.Errorf("sweep layers: %w", err)
	}
	for _, key := range lost {
		if err := c.store.Delete(ctx, key); err != nil {
			return n, fmt.Errorf("sweep layers: %w", err)
		}
		n++
	}
	return n, nil
}

// dropSuperseded takes the forms out of a descriptor that have been replaced for long enough. Their objects go as any that
// nothing refers to.
func (c *Catalogue) dropSuperseded(ctx context.Context, d Descriptor, before time.Time) (Descriptor, error) {
	stay := slices.DeleteFunc(slices.Clone(d.Forms), func(f Form) bool { return f.Superseded != nil && f.Superseded.Before(before) })
	if len(stay) == len(d.Forms) || len(stay) == 0 {
		return d, nil
	}
	d.Forms = stay
	return d, c.describe(ctx, d)
}
