package oci

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

const (
	sweepEvery = time.Hour
	sweepAge   = 24 * time.Hour
)

// Sweep frees what imports left that failed, and records of layers that are gone: both when they are older than age, which must be
// longer than any import takes. It answers how many layers and objects went.
func (im *Images) Sweep(ctx context.Context, age time.Duration) (int, error) {
	im.mu.Lock()
	busy := len(im.pulls) + len(im.layersF)
	im.mu.Unlock()
	if busy > 0 {
		return 0, nil // they hold layers that nothing refers to yet
	}
	before := im.now().Add(-age)
	type object struct {
		key string
		old bool
	}
	var objects []object
	recorded := map[string]bool{}
	if err := im.store.List(ctx, "oci/", func(i store.Info) bool {
		objects = append(objects, object{i.Key, i.Modified.Before(before)})
		recorded[i.Key] = true
		return true
	}); err != nil {
		return 0, fmt.Errorf("sweep images: %w", err)
	}
	mine := map[layer.ID]bool{}
	var lost []string // their hexadecimal digits
	for _, o := range objects {
		hex, ok := strings.CutSuffix(strings.TrimPrefix(o.key, "oci/"), ".json")
		if !ok {
			// Folders are written before their record: an import may have died between.
			if hex, ok = strings.CutSuffix(strings.TrimPrefix(o.key, "oci/"), ".folders"); ok && o.old && !recorded["oci/"+hex+".json"] {
				lost = append(lost, hex)
			}
			continue
		}
		r, err := im.peek(ctx, "sha256:"+hex)
		if err != nil {
			if o.old && errors.Is(err, sandbox.ErrNotFound) {
				lost = append(lost, hex)
			}
			continue
		}
		d, err := im.layers.Descriptor(ctx, r.Layer)
		switch {
		case errors.Is(err, sandbox.ErrNotFound):
			if o.old {
				lost = append(lost, hex)
			}
		case err != nil:
			return 0, fmt.Errorf("sweep images: %w", err)
		case d.Created.Before(before) && o.old:
			mine[r.Layer] = true
		}
	}
	n := 0
	for _, hex := range lost {
		for _, end := range []string{".json", ".folders"} {
			if err := im.store.Delete(ctx, "oci/"+hex+end); err != nil {
				return n, fmt.Errorf("sweep images: %w", err)
			}
		}
		n++
	}
	held, err := im.facts.List(ctx, "held:", "", 0)
	if err != nil {
		return n, fmt.Errorf("sweep images: %w", err)
	}
	type use struct {
		project string
		id      layer.ID
	}
	var candidates []use
	projects := map[string]bool{}
	for _, f := range held {
		project, hex, ok := strings.Cut(strings.TrimPrefix(f.Key, "held:"), ":")
		if id := layer.ID("sha256:" + hex); ok && mine[id] {
			candidates = append(candidates, use{project, id})
		}
		projects[project] = true
	}
	used := map[layer.ID]bool{}
	for p := range projects {
		all, err := im.layers.Environments(ctx, p)
		if err != nil {
			return n, fmt.Errorf("sweep images: %w", err)
		}
		for _, e := range all {
			for _, id := range e.Layers {
				used[id] = true
			}
		}
	}
	for _, c := range candidates {
		if used[c.id] {
			continue
		}
		// It looks again, and keeps what has a name or what a snapshot lies on.
		switch err := im.layers.Remove(ctx, c.project, string(c.id)); {
		case err == nil:
			n++
		case !errors.Is(err, sandbox.ErrState) && !errors.Is(err, sandbox.ErrNotFound):
			return n, fmt.Errorf("sweep images: %w", err)
		}
	}
	return n, nil
}
