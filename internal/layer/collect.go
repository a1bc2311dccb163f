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

// holders lists the layers that any project holds, or a name in the store itself. With tidy, claims that nobody took are removed.
func (c *Catalogue) holders(ctx context.Context, tidy bool) (map[ID]bool, error) {
	list, err := c.facts.List(ctx, "held:", "", 0)
	if err != nil {
		return nil, err
	}
	out := map[ID]bool{}
	for _, f := range list {
		out[ID(idPrefix+f.Key[strings.LastIndexByte(f.Key, ':')+1:])] = true
	}
	return out, c.pushed(ctx, tidy, func(id ID) { out[id] = true })
}

// collect removes the layer's data when nothing holds it any more. The caller has mu.
func (c *Catalogue) collect(ctx context.Context, id ID) error {
	if err := c.sole(ctx); errors.Is(err, sandbox.ErrState) {
		return nil // sweeps tell
	} else if err != nil {
		return err
	}
	held, err := c.holders(ctx, true)
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
	g, err := c.sweep(ctx, age, false)
	return len(g.Layers) + g.Objects, err
}

// Garbage is what a Sweep removes.
type Garbage struct {
	Layers []Unused `json:"layers"` // nobody holds them
	// Objects that no layer needs, and their octets; stored ones, before what a bucket shares.
	Objects int   `json:"objects"`
	Octets  int64 `json:"octets"`
	// Forms that were replaced, in layers that stay; a later Sweep takes their objects.
	Forms int `json:"forms"`
}

// Unused is a layer that nobody holds.
type Unused struct {
	ID       ID        `json:"id"`
	Source   string    `json:"source"`
	Created  time.Time `json:"created"`
	Octets   int64     `json:"octets"`             // of its objects
	Deferred bool      `json:"deferred,omitempty"` // the objects stay for the grace of readers, or since a host's lease names the layer
}

// Unused tells what a Sweep with that age would remove now. It changes nothing.
func (c *Catalogue) Unused(ctx context.Context, age time.Duration) (Garbage, error) {
	return c.sweep(ctx, age, true)
}

func (c *Catalogue) sweep(ctx context.Context, age time.Duration, dry bool) (g Garbage, err error) {
	if c.facts == nil {
		return g, fmt.Errorf("sweep layers: needs the facts: %w", sandbox.ErrUnsupported)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !dry {
		if err := c.mark(ctx); err != nil {
			return g, fmt.Errorf("sweep layers: %w", err)
		}
	}
	if err := c.sole(ctx); err != nil {
		return g, fmt.Errorf("sweep layers: %w", err)
	}
	keep, err := c.holders(ctx, !dry)
	if err != nil {
		return g, fmt.Errorf("sweep layers: %w", err)
	}
	// Before anything is looked at: a host that takes a layer up later does so while its grace runs.
	leased, err := c.leased(ctx, !dry)
	if err != nil {
		return g, fmt.Errorf("sweep layers: %w", err)
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
		return g, fmt.Errorf("sweep layers: %w", err)
	}
	for len(parents) > 0 { // a parent may be a snapshot itself
		p := parents[len(parents)-1]
		parents = parents[:len(parents)-1]
		if old[p] {
			delete(old, p)
			parents = append(parents, found[p].Parents...)
		}
	}
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
			g.Layers = append(g.Layers, unused(d, !c.local(d)))
			if dry && !c.local(d) {
				use(d) // a removed layer's objects stay a while
			}
			if dry {
				continue
			}
			if _, err := c.erase(ctx, id); err != nil {
				return g, fmt.Errorf("sweep layers: %w", err)
			}
			continue
		}
		if !leased[id] { // a replaced form may be the one that is mounted
			over := c.now().Add(-graceFactor * age)
			before := len(d.Forms)
			if dry {
				d.Forms = notOver(d.Forms, over)
			} else if d, err = c.dropSuperseded(ctx, d, over); err != nil {
				return g, fmt.Errorf("sweep layers: %w", err)
			}
			g.Forms += before - len(d.Forms)
		}
		use(d)
	}
	if err := c.buried(ctx, c.now().Add(-graceFactor*age), leased, !dry, use); err != nil {
		return g, fmt.Errorf("sweep layers: %w", err)
	}
	var lost []string
	if err := c.store.List(ctx, "blobs/", func(i store.Info) bool {
		if !blobs[i.Key] && i.Modified.Before(before) {
			lost = append(lost, i.Key)
			g.Octets += i.Size
		}
		return true
	}); err != nil {
		return g, fmt.Errorf("sweep layers: %w", err)
	}
	for _, key := range lost {
		if dry {
			g.Objects++
			continue
		}
		// A push may have found it in the meantime, and made it young.
		if i, err := c.store.Stat(ctx, key); err == nil && !i.Modified.Before(before) || errors.Is(err, sandbox.ErrNotFound) {
			continue
		}
		if err := c.store.Delete(ctx, key); err != nil {
			return g, fmt.Errorf("sweep layers: %w", err)
		}
		g.Objects++
	}
	return g, nil
}

// dropSuperseded takes the forms out of a descriptor that have been replaced for long enough. Their objects go as any that
// nothing refers to.
func (c *Catalogue) dropSuperseded(ctx context.Context, d Descriptor, before time.Time) (Descriptor, error) {
	if len(notOver(d.Forms, before)) == len(d.Forms) {
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
	stay := notOver(now.Forms, before)
	if len(stay) == len(now.Forms) {
		return now, nil
	}
	now.Forms = stay
	return now, c.describe(ctx, now)
}

// notOver are the forms but those that were replaced before the time; all of them when that were none.
func notOver(forms []Form, before time.Time) []Form {
	stay := slices.DeleteFunc(slices.Clone(forms), func(f Form) bool { return f.Superseded != nil && f.Superseded.Before(before) })
	if len(stay) == 0 {
		return forms
	}
	return stay
}

func unused(d Descriptor, deferred bool) Unused {
	u := Unused{ID: d.ID, Source: d.Source, Created: d.Created, Deferred: deferred}
	for _, f := range d.Forms {
		u.Octets += f.Stored()
	}
	return u
}
