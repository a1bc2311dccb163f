package layer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// graceFactor is how many times the age of a Sweep what sandboxes may have mounted stays after its removal: with an age of 6 hours a
// day, which is as long as a sandbox lives by default. A host of a far store reads on demand until then.
const graceFactor = 4

func removedKey(id ID) string { return "removed/" + id.Hex() + ".json" }

// local says whether the objects are files that stay readable to who has them open, as those of this machine's own file systems do.
func (c *Catalogue) local(d Descriptor) bool {
	if len(d.Forms) == 0 {
		return false
	}
	path, ok := c.store.Path(BlobKey(d.Forms[0].Digest))
	var st unix.Statfs_t
	if !ok || unix.Statfs(filepath.Dir(path), &st) != nil {
		return false
	}
	switch uint32(st.Type) {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.TMPFS_MAGIC, unix.F2FS_SUPER_MAGIC, unix.OVERLAYFS_SUPER_MAGIC, 0x2fc12fc1: // ZFS
		return true
	}
	return false
}

// bury notes that a layer's objects are to stay for the grace after its removal.
func (c *Catalogue) bury(ctx context.Context, d Descriptor) error {
	text, err := json.Marshal(d)
	if err != nil {
		return err
	}
	return store.Put(ctx, c.store, removedKey(d.ID), bytesReader(text))
}

// buried calls each for layers that were removed after the time or that a host uses, and, with tidy, forgets the others.
func (c *Catalogue) buried(ctx context.Context, after time.Time, leased map[ID]bool, tidy bool, each func(Descriptor)) error {
	var over []string
	var failed error
	if err := c.store.List(ctx, "removed/", func(i store.Info) bool {
		id := ID(idPrefix + strings.TrimSuffix(strings.TrimPrefix(i.Key, "removed/"), ".json"))
		if i.Modified.Before(after) && !leased[id] {
			over = append(over, i.Key)
			return true
		}
		var d Descriptor
		text, err := store.ReadAll(ctx, c.store, i.Key, maxDescriptor)
		if err == nil {
			err = json.Unmarshal(text, &d)
		}
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			failed = fmt.Errorf("%s: %w", strings.TrimPrefix(i.Key, "removed/"), err)
			return false
		}
		each(d)
		return true
	}); err != nil || failed != nil {
		return errors.Join(err, failed)
	}
	if !tidy {
		return nil
	}
	for _, key := range over {
		if err := c.store.Delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}

// exhume puts the descriptors of held layers back that are among the removed ones alone: who removed them died before it saw that they are held.
func (c *Catalogue) exhume(ctx context.Context, held map[ID]bool) error {
	var lost []ID
	if err := c.store.List(ctx, "removed/", func(i store.Info) bool {
		if id := ID(idPrefix + strings.TrimSuffix(strings.TrimPrefix(i.Key, "removed/"), ".json")); held[id] {
			lost = append(lost, id)
		}
		return true
	}); err != nil {
		return err
	}
	for _, id := range lost {
		if _, err := c.Descriptor(ctx, id); !errors.Is(err, sandbox.ErrNotFound) {
			if err != nil {
				return err
			}
			continue
		}
		var d Descriptor
		text, err := store.ReadAll(ctx, c.store, removedKey(id), maxDescriptor)
		if errors.Is(err, sandbox.ErrNotFound) {
			continue
		}
		if err == nil {
			err = json.Unmarshal(text, &d)
		}
		if err != nil {
			return fmt.Errorf("removed layer %s: %w", id, err)
		}
		if d.ID != id || !c.anyWhole(ctx, d) {
			continue // nothing is left of it
		}
		if err := c.describe(ctx, d); err != nil {
			return err
		}
	}
	return nil
}

// free removes the objects of a layer that is gone at once, where nobody else can need them: no other layer has them, and they are
// not so young that another process may be about to say that one has.
func (c *Catalogue) free(ctx context.Context, d Descriptor, before time.Time) error {
	mine := map[string]bool{}
	for _, f := range d.Forms {
		for _, b := range f.blobs() {
			mine[b.key] = true
		}
	}
	var failed error
	if err := c.store.List(ctx, "layers/", func(i store.Info) bool {
		other, err := c.Descriptor(ctx, ID(idPrefix+strings.TrimSuffix(strings.TrimPrefix(i.Key, "layers/"), ".json")))
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			failed = err
			return false
		}
		for _, f := range other.Forms {
			for _, b := range f.blobs() {
				delete(mine, b.key)
			}
		}
		return true
	}); err != nil || failed != nil {
		return errors.Join(err, failed)
	}
	for key := range mine {
		info, err := c.store.Stat(ctx, key)
		if errors.Is(err, sandbox.ErrNotFound) || err == nil && info.Modified.After(before) {
			continue
		}
		if err == nil {
			err = c.store.Delete(ctx, key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
