package layer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer/erofs"
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

	// mu keeps the import of a layer apart from the removal of its last use in this process. Of several processes with one
	// store, only one may remove.
	mu sync.Mutex
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

func (c *Catalogue) hold(ctx context.Context, project string, id ID) error {
	if c.facts == nil {
		return nil
	}
	if _, err := c.facts.Put(ctx, heldKey(project, id), nil, facts.Any); err != nil {
		return fmt.Errorf("keep layer %s: %w", id, err)
	}
	return nil
}

func blobKey(digest string) string { return "blobs/" + ID(digest).Hex() }
func descriptorKey(id ID) string   { return "layers/" + id.Hex() + ".json" }
func heldKey(project string, id ID) string {
	return "held:" + project + ":" + id.Hex()
}

// ImportTar builds a layer from a tar stream (see [FromTar]) for the project. It has no name until Publish.
func (c *Catalogue) ImportTar(ctx context.Context, project string, r io.Reader, opt Options) (Descriptor, error) {
	return c.build(ctx, project, opt, func(out erofs.Output) (*Built, error) { return FromTar(ctx, r, out, opt) })
}

// ImportDir builds a layer from a folder (see [FromDir]).
func (c *Catalogue) ImportDir(ctx context.Context, project, dir string, opt Options) (Descriptor, error) {
	return c.build(ctx, project, opt, func(out erofs.Output) (*Built, error) { return FromDir(ctx, dir, out, opt) })
}

// ImportUpper builds a snapshot from an overlay's upper folder (see [FromUpper]); opt.Parents are its lowers.
func (c *Catalogue) ImportUpper(ctx context.Context, project, upper string, opt Options) (Descriptor, error) {
	if len(opt.Parents) == 0 {
		return Descriptor{}, fmt.Errorf("snapshot of %q: name the layers it lies on: %w", upper, sandbox.ErrInvalid)
	}
	return c.build(ctx, project, opt, func(out erofs.Output) (*Built, error) { return FromUpper(ctx, upper, out, opt) })
}

func (c *Catalogue) build(ctx context.Context, project string, opt Options, make func(erofs.Output) (*Built, error)) (Descriptor, error) {
	if err := sandbox.CheckProject(project); err != nil {
		return Descriptor{}, err
	}
	for _, p := range opt.Parents {
		if _, err := c.held(ctx, project, p); err != nil {
			return Descriptor{}, fmt.Errorf("parent of the snapshot: %w", err)
		}
	}
	draft, err := c.store.Create(ctx)
	if err != nil {
		return Descriptor{}, fmt.Errorf("build layer: %w", err)
	}
	defer draft.Discard()
	built, err := make(draft)
	if err != nil {
		return Descriptor{}, fmt.Errorf("build layer: %w", err)
	}
	digest, err := digestOf(ctx, draft, built.Size)
	if err != nil {
		return Descriptor{}, fmt.Errorf("build layer: %w", err)
	}
	d := Descriptor{
		ID: built.ID, Arch: built.Arch, Forms: []Form{{Kind: FormEROFS, Digest: digest, Size: built.Size}}, Parents: opt.Parents,
		Created: c.now().UTC(), Source: opt.Source, Entries: built.Entries, Bytes: built.Bytes,
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.hold(ctx, project, d.ID); err != nil {
		return Descriptor{}, err
	}
	old, err := c.Descriptor(ctx, d.ID)
	if err == nil {
		if _, err := c.LayerPath(ctx, d.ID); err == nil {
			// The same tree is there already. Written again it is young, so that no Sweep takes it before somebody holds it.
			return old, c.describe(ctx, old)
		}
	} else if !errors.Is(err, sandbox.ErrNotFound) {
		return Descriptor{}, err
	}
	if err := draft.Publish(ctx, blobKey(digest)); err != nil {
		return Descriptor{}, fmt.Errorf("keep layer %s: %w", d.ID, err)
	}
	if err := c.describe(ctx, d); err != nil {
		return Descriptor{}, err
	}
	for _, f := range old.Forms { // an image that was found broken
		if f.Digest != digest {
			if err := c.store.Delete(ctx, blobKey(f.Digest)); err != nil {
				return Descriptor{}, fmt.Errorf("keep layer %s: %w", d.ID, err)
			}
		}
	}
	return d, nil
}

func (c *Catalogue) describe(ctx context.Context, d Descriptor) error {
	text, err := json.Marshal(d)
	if err == nil {
		err = store.Put(ctx, c.store, descriptorKey(d.ID), bytesReader(text))
	}
	if err != nil {
		return fmt.Errorf("keep layer %s: %w", d.ID, err)
	}
	return nil
}

func digestOf(ctx context.Context, r io.ReaderAt, size int64) (string, error) {
	h := sha256.New()
	n, err := io.CopyBuffer(h, &contextReader{ctx, io.NewSectionReader(r, 0, size)}, make([]byte, 1<<20))
	if err != nil {
		return "", fmt.Errorf("digest of the image: %w", err)
	}
	if n != size {
		return "", fmt.Errorf("digest of the image: %d of %d octets", n, size)
	}
	return idPrefix + hex.EncodeToString(h.Sum(nil)), nil
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

// LayerPath is the layer's EROFS image as a file of this machine.
func (c *Catalogue) LayerPath(ctx context.Context, id ID) (string, error) {
	d, err := c.Descriptor(ctx, id)
	if err != nil {
		return "", err
	}
	for _, f := range d.Forms {
		if f.Kind != FormEROFS {
			continue
		}
		path, ok := c.store.Path(blobKey(f.Digest))
		if !ok {
			return "", fmt.Errorf("layer %s: its store has no local files: %w", id, sandbox.ErrUnsupported)
		}
		info, err := c.store.Stat(ctx, blobKey(f.Digest))
		if err != nil {
			return "", fmt.Errorf("layer %s: its image: %w", id, err)
		}
		if info.Size != f.Size {
			return "", fmt.Errorf("layer %s: its image has %d octets, want %d: %w", id, info.Size, f.Size, sandbox.ErrLost)
		}
		return path, nil
	}
	return "", fmt.Errorf("layer %s: has no form that can be mounted: %w", id, sandbox.ErrUnsupported)
}

// Verify reads the layer's image and compares it with its digest; a difference wraps sandbox.ErrLost.
func (c *Catalogue) Verify(ctx context.Context, id ID) error {
	d, err := c.Descriptor(ctx, id)
	if err != nil {
		return err
	}
	for _, f := range d.Forms {
		r, err := c.store.Open(ctx, blobKey(f.Digest))
		if err != nil {
			return fmt.Errorf("verify layer %s: %w", id, err)
		}
		got, err := digestOf(ctx, r, r.Size())
		r.Close()
		if err != nil {
			return fmt.Errorf("verify layer %s: %w", id, err)
		}
		if got != f.Digest {
			return fmt.Errorf("verify layer %s: form %s has digest %s, want %s: %w", id, f.Kind, got, f.Digest, sandbox.ErrLost)
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
