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

// collect removes the layer's data when nothing holds it any more. The caller has mu.
func (c *Catalogue) collect(ctx context.Context, id ID) error {
	held, others, err := c.inUse(ctx, id)
	if errors.Is(err, sandbox.ErrState) {
		return nil // sweeps tell
	}
	if err != nil || held {
		return err
	}
	d, err := c.erase(ctx, id, others)
	if err != nil || d.ID == "" {
		return err
	}
	back, err := c.putBack(ctx, []Descriptor{d})
	if err != nil || back[id] || others || !c.local(d) {
		return err
	}
	return c.free(ctx, d, c.now().Add(-youngest))
}

// inUse tells whether anybody holds the layer, and whether there are others who might. The reference of a layer that no project of these facts
// holds any more is taken away.
func (c *Catalogue) inUse(ctx context.Context, id ID) (held, others bool, err error) {
	own, err := c.own(ctx)
	if err != nil || own[id] {
		return own[id], false, err
	}
	me, err := c.identity(ctx)
	if err == nil {
		err = c.store.Delete(ctx, referenceKey(me, id))
	}
	if err != nil {
		return false, false, err
	}
	list, err := c.beside(ctx)
	if err != nil {
		return false, false, err
	}
	if held, err = c.heldBeside(ctx, list, id); err == nil && !held {
		err = c.pushed(ctx, true, func(p ID) { held = held || p == id })
	}
	return held, len(list) > 0, err
}

// youngest is the age below which an object may belong to an import that has not said so yet.
const youngest = time.Hour

// erase takes a layer away and returns what it was; nothing when there was none. Its objects are left: to Sweep, for who may read them
// still, or because other layers have the same contents. What is shared with other catalogues, or far away, is noted as removed first.
func (c *Catalogue) erase(ctx context.Context, id ID, shared bool) (Descriptor, error) {
	d, err := c.Descriptor(ctx, id)
	if errors.Is(err, sandbox.ErrNotFound) {
		return Descriptor{}, nil
	}
	if err != nil {
		return d, err
	}
	defer c.forget(id)
	if shared || !c.local(d) {
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
	h, err := c.holders(ctx, !dry)
	if err != nil {
		return g, fmt.Errorf("sweep layers: %w", err)
	}
	if !dry {
		if err := c.exhume(ctx, h.all); err != nil {
			return g, fmt.Errorf("sweep layers: %w", err)
		}
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
		if h.all[id] || i.Modified.After(before) {
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
	var gone []Descriptor
	var young []ID // after all
	for id, d := range found {
		if old[id] {
			deferred := !h.alone || !c.local(d)
			g.Layers = append(g.Layers, unused(d, deferred))
			if dry {
				if deferred {
					use(d) // a removed layer's objects stay a while
				}
				continue
			}
			// Somebody may have made it young meanwhile, to hold it.
			now, err := c.store.Stat(ctx, descriptorKey(id))
			if errors.Is(err, sandbox.ErrNotFound) || err == nil && now.Modified.After(before) {
				young = append(young, id)
				use(d)
				continue
			}
			var was Descriptor
			if err == nil {
				was, err = c.erase(ctx, id, !h.alone)
			}
			if err != nil {
				return g, fmt.Errorf("sweep layers: %w", err)
			}
			if was.ID != "" {
				gone = append(gone, was)
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
	back, err := c.putBack(ctx, gone)
	if err != nil {
		return g, fmt.Errorf("sweep layers: %w", err)
	}
	for id := range back {
		use(found[id])
	}
	g.Layers = slices.DeleteFunc(g.Layers, func(u Unused) bool { return back[u.ID] || slices.Contains(young, u.ID) })
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
