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
	d, err := c.erase(ctx, id)
	if err != nil || d.ID == "" || !c.local(d) {
		return err
	}
	return c.free(ctx, d, c.now().Add(-youngest))
}

// youngest is the age below which an object may belong to an import that has not said so yet.
const youngest = time.Hour

// erase takes a layer away and returns what it was; nothing when there was none. Its objects are left: to Sweep, for who may read them
// still, or because other layers have the same contents.
func (c *Catalogue) erase(ctx context.Context, id ID) (Descriptor, error) {
	d, err := c.Descriptor(ctx, id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return Descriptor{}, nil
	}
	if err != nil {
		return d, err
	}
	defer c.forget(id)
	if !c.local(d) {
		if err := c.bury(ctx, d); err != nil {
			return d, err
		}
	}
	return d, c.store.Delete(ctx, descriptorKey(id))
}

// Sweep removes data that nothing refers to and that is older than age: what an import left that died between its steps, and
// snapshots that nobody took. What hosts may have mounted from a far store stays for four times the age after its removal, and as long as
// a host's lease names it. It returns how many objects went. The age must be longer than any import takes.
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
	// Before anything is looked at: a host that takes a layer up later does so while its grace runs.
	leased, err := c.leased(ctx)
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
	use := func(d Descriptor) {
		for _, f := range d.Forms {
			for _, b := range f.blobs() {
				blobs[b.key] = true
			}
		}
	}
	for id, d := range found {
		if old[id] {
			if _, err := c.erase(ctx, id); err != nil {
				return n, fmt.Errorf("sweep layers: %w", err)
			}
			n++
			continue
		}
		if !leased[id] { // a replaced form may be the one that is mounted
			if d, err = c.dropSuperseded(ctx, d, c.now().Add(-graceFactor*age)); err != nil {
				return n, fmt.Errorf("sweep layers: %w", err)
			}
		}
		use(d)
	}
	if err := c.buried(ctx, c.now().Add(-graceFactor*age), leased, use); err != nil {
		return n, fmt.Errorf("sweep layers: %w", err)
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
	// As it is now: the list was made some time ago.
	now, err := c.Descriptor(ctx, d.ID)
	if errors.Is(err, sandbox.ErrNotFound) {
		return d, nil
	}
	if err != nil {
		return d, err
	}
	stay = slices.DeleteFunc(slices.Clone(now.Forms), func(f Form) bool { return f.Superseded != nil && f.Superseded.Before(before) })
	if len(stay) == len(now.Forms) || len(stay) == 0 {
		return now, nil
	}
	now.Forms = stay
	return now, c.describe(ctx, now)
}
