package layer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// maxDescriptor bounds a descriptor's JSON, in octets.
const maxDescriptor = 1 << 20

// Catalogue knows the layers, their names and the environments made of them.
type Catalogue struct {
	facts facts.Facts
	store store.Store
	now   func() time.Time
	read  recent

	// mu keeps the import of a layer apart from the removal of its last use in this process. Of the processes with one set of facts only one may
	// remove; those with facts of their own see each other's references (others.go).
	mu     sync.Mutex
	marked bool // the mark was left in this life
}

// New returns a catalogue on the facts and the store. A host has no facts (nil): its catalogue builds snapshots and finds images, and
// leaves names, and who may use what, to the gateways, which hold the layer for the project afterwards.
func New(f facts.Facts, s store.Store) *Catalogue {
	return &Catalogue{facts: f, store: s, now: time.Now}
}

// Hold makes the project one that may use a layer that another process has made for it, as a host does a snapshot.
func (c *Catalogue) Hold(ctx context.Context, project string, id ID) error {
	if err := sandbox.CheckProject(project); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.Descriptor(ctx, id); err != nil {
		return err
	}
	return c.hold(ctx, project, id)
}

// hold makes the project a holder of a layer that is there. The caller has mu.
func (c *Catalogue) hold(ctx context.Context, project string, id ID) error {
	if c.facts == nil {
		return nil
	}
	if err := c.holdOne(ctx, project, id); err != nil {
		return fmt.Errorf("keep layer %s: %w", id, err)
	}
	return nil
}

func (c *Catalogue) holdOne(ctx context.Context, project string, id ID) error {
	if !c.marked {
		if err := c.mark(ctx); err != nil {
			return err
		}
	}
	if _, err := c.facts.Get(ctx, heldKey(project, id)); err == nil {
		return nil // and so it has its reference
	} else if !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	me, err := c.identity(ctx)
	if err == nil {
		err = store.Put(ctx, c.store, referenceKey(me, id), strings.NewReader("{}"))
	}
	if err == nil {
		_, err = c.Descriptor(ctx, id) // whoever removes it from now on sees the reference
	}
	if err == nil {
		_, err = c.facts.Put(ctx, heldKey(project, id), nil, facts.Any)
	}
	return err
}

func descriptorKey(id ID) string { return "layers/" + id.Hex() + ".json" }
func heldKey(project string, id ID) string {
	return "held:" + project + ":" + id.Hex()
}

// ImportTar builds a layer from a tar stream (see [FromTar]) for the project. It has no name until Publish.
func (c *Catalogue) ImportTar(ctx context.Context, project string, r io.Reader, opt Options) (Descriptor, error) {
	return c.build(ctx, project, opt, func(t *tree) error { return readTar(ctx, r, t) })
}

// ImportDir builds a layer from a folder (see [FromDir]).
func (c *Catalogue) ImportDir(ctx context.Context, project, dir string, opt Options) (Descriptor, error) {
	return c.build(ctx, project, opt, func(t *tree) error { return readFolder(ctx, dir, t, false) })
}

// ImportUpper builds a snapshot from an overlay's upper folder (see [FromUpper]); opt.Parents are its lowers.
func (c *Catalogue) ImportUpper(ctx context.Context, project, upper string, opt Options) (Descriptor, error) {
	if len(opt.Parents) == 0 {
		return Descriptor{}, fmt.Errorf("snapshot of %q: name the layers it lies on: %w", upper, sandbox.ErrInvalid)
	}
	return c.build(ctx, project, opt, func(t *tree) error { return readFolder(ctx, upper, t, true) })
}

// build makes a layer of the tree that fill puts together, and holds it for the project.
func (c *Catalogue) build(ctx context.Context, project string, opt Options, fill func(*tree) error) (Descriptor, error) {
	if err := sandbox.CheckProject(project); err != nil {
		return Descriptor{}, err
	}
	for _, p := range opt.Parents {
		if _, err := c.held(ctx, project, p); err != nil {
			return Descriptor{}, fmt.Errorf("parent of the snapshot: %w", err)
		}
	}
	draft, err := c.newDraft(ctx, opt.Form)
	if err != nil {
		return Descriptor{}, fmt.Errorf("build layer: %w", err)
	}
	defer draft.discard()
	t := newTree(draft.image, opt)
	if err := fill(t); err != nil {
		return Descriptor{}, fmt.Errorf("build layer: %w", err)
	}
	built, form, err := draft.finish(ctx, t)
	if err != nil {
		return Descriptor{}, fmt.Errorf("build layer: %w", err)
	}
	return c.keep(ctx, project, draft, built, form, opt)
}

// keep publishes what was built and holds it for the project; with none, nobody holds it yet.
func (c *Catalogue) keep(ctx context.Context, project string, draft *formDraft, built *Built, form Form, opt Options) (Descriptor, error) {
	d, added, err := c.keepOne(ctx, project, draft, built, form, opt)
	if err != nil || !added {
		return d, err
	}
	return c.settle(ctx, d, form)
}

// keepOne is keep; added says that the layer was there and has got another form.
func (c *Catalogue) keepOne(ctx context.Context, project string, draft *formDraft, built *Built, form Form, opt Options) (d Descriptor, added bool, err error) {
	d = Descriptor{
		ID: built.ID, Arch: built.Arch, Forms: []Form{form}, Parents: opt.Parents, Opaque: built.Opaque,
		Created: c.now().UTC(), Source: opt.Source, Entries: built.Entries, Bytes: built.Bytes,
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	// Held last: who dies before has left nothing that a sweep does not take, and what was just written is too young for one.
	defer func() {
		if err != nil || project == "" || opt.Unheld {
			return
		}
		if err = c.hold(ctx, project, d.ID); errors.Is(err, sandbox.ErrNotFound) { // removed by another service in this moment: it was of old
			if err = c.describe(ctx, d); err == nil {
				err = c.hold(ctx, project, d.ID)
			}
		}
	}()
	old, err := c.Descriptor(ctx, d.ID)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return Descriptor{}, false, err
	}
	if err == nil {
		whole := c.wholeForms(ctx, old)
		if len(whole) > 0 && (opt.Form == "" || whole[0].Kind == opt.Form) && len(opt.Hot) == 0 {
			// The same tree is there already. Written again it is young, so that no Sweep takes it before somebody holds it.
			d, err = c.touch(ctx, old, whole)
			return d, false, err
		}
		d.Created, d.Source = old.Created, old.Source
		d.Forms = inFront(form, whole, c.now())
		added = true
	}
	if err := draft.publish(ctx); err != nil {
		return Descriptor{}, false, fmt.Errorf("keep layer %s: %w", d.ID, err)
	}
	if err := c.describe(ctx, d); err != nil {
		return Descriptor{}, false, err
	}
	// Another process may have removed the last layer with these contents before it could see this one.
	if err := c.whole(ctx, form); err != nil {
		return Descriptor{}, false, fmt.Errorf("keep layer %s: %w; try again", d.ID, err)
	}
	return d, added, c.dropBroken(ctx, old, d)
}

// dropBroken removes the images of forms that d has no more since they were found broken.
func (c *Catalogue) dropBroken(ctx context.Context, old, d Descriptor) error {
	stay := map[string]bool{}
	for _, f := range d.Forms {
		stay[f.Digest] = true
	}
	for _, f := range old.Forms {
		if !stay[f.Digest] {
			if err := c.store.Delete(ctx, BlobKey(f.Digest)); err != nil {
				return fmt.Errorf("keep layer %s: %w", d.ID, err)
			}
		}
	}
	return nil
}

func (c *Catalogue) describe(ctx context.Context, d Descriptor) error {
	defer c.forget(d.ID)
	text, err := json.Marshal(d)
	if err == nil {
		err = store.Put(ctx, c.store, descriptorKey(d.ID), bytesReader(text))
	}
	if err != nil {
		return fmt.Errorf("keep layer %s: %w", d.ID, err)
	}
	return nil
}

// Descriptor describes a layer, whichever project holds it.
func (c *Catalogue) Descriptor(ctx context.Context, id ID) (Descriptor, error) {
	var d Descriptor
	if _, err := ParseID(string(id)); err != nil {
		return d, err
	}
	text, err := store.ReadAll(ctx, c.store, descriptorKey(id), maxDescriptor)
	if errors.Is(err, sandbox.ErrNotFound) {
		return d, fmt.Errorf("layer %s: %w", id, sandbox.ErrNotFound)
	}
	if err != nil {
		return d, fmt.Errorf("layer %s: %w", id, err)
	}
	if err := json.Unmarshal(text, &d); err != nil || d.ID != id {
		return d, fmt.Errorf("layer %s: its descriptor is broken (%v)", id, err)
	}
	return d, nil
}

// Form is the stored form that is to be mounted. Its objects lie in the store under [BlobKey] of their digests.
func (c *Catalogue) Form(ctx context.Context, id ID) (Form, error) {
	d, err := c.Descriptor(ctx, id)
	if err != nil {
		return Form{}, err
	}
	for _, f := range d.Forms {
		if f.check() == nil {
			return f, nil
		}
	}
	return Form{}, fmt.Errorf("layer %s: has no form that can be mounted: %w", id, sandbox.ErrUnsupported)
}

// Verify reads all that is stored of the layer and compares it with its digests; a difference wraps sandbox.ErrLost.
func (c *Catalogue) Verify(ctx context.Context, id ID) error {
	d, err := c.Descriptor(ctx, id)
	if err != nil {
		return err
	}
	for _, f := range d.Forms {
		if err := c.verify(ctx, f); err != nil {
			return fmt.Errorf("verify layer %s: form %s: %w", id, f.Kind, err)
		}
	}
	return nil
}

// held checks that the project or one above it may use the layer, and returns which.
func (c *Catalogue) held(ctx context.Context, project string, id ID) (string, error) {
	if _, err := ParseID(string(id)); err != nil {
		return "", err
	}
	if c.facts == nil {
		return project, nil
	}
	for _, p := range lineage(project) {
		_, err := c.facts.Get(ctx, heldKey(p, id))
		if err == nil {
			return p, nil
		}
		if !errors.Is(err, sandbox.ErrNotFound) {
			return "", err
		}
	}
	return "", fmt.Errorf("layer %s in project %s: %w", id, project, sandbox.ErrNotFound)
}

// Layers lists the descriptors of all layers that the project itself holds, named or not.
func (c *Catalogue) Layers(ctx context.Context, project string) ([]Descriptor, error) {
	prefix := "held:" + project + ":"
	list, err := c.facts.List(ctx, prefix, "", 0)
	if err != nil {
		return nil, fmt.Errorf("list layers: %w", err)
	}
	var out []Descriptor
	for _, f := range list {
		d, err := c.Descriptor(ctx, ID(idPrefix+f.Key[len(prefix):]))
		if errors.Is(err, sandbox.ErrNotFound) {
			continue // an import that died before its descriptor
		}
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}
