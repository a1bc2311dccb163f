package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// maxStack is how many layers an image has at most afterwards: each costs every lookup of a name that does not exist.
const maxStack = 12

// stack makes the records of an image, the lowest first, what a sandbox mounts.
func (im *Images) stack(ctx context.Context, project string, records []*record) ([]layer.ID, int64, error) {
	var list []*record
	seen := map[layer.ID]bool{}
	for i := len(records) - 1; i >= 0; i-- {
		r := records[i]
		// A layer that comes again decides for all that it names, so what it was further down can't be seen.
		if r.Entries == 0 || seen[r.Layer] {
			continue
		}
		seen[r.Layer] = true
		list = append([]*record{r}, list...)
	}
	if len(list) == 0 && len(records) > 0 {
		list = records[len(records)-1:]
	}
	if len(list) == 0 {
		return nil, 0, fmt.Errorf("it has no layers: %w", sandbox.ErrInvalid)
	}
	var octets int64
	sizes := make([]int64, len(list))
	for i, r := range list {
		octets += r.Bytes
		sizes[i] = r.Bytes + 512*r.Entries
	}
	var ids []layer.ID
	for _, g := range groups(sizes, maxStack) {
		var part []layer.ID
		for _, r := range list[:g] {
			part = append(part, r.Layer)
		}
		list = list[g:]
		if len(part) == 1 {
			ids = append(ids, part[0])
			continue
		}
		id, err := im.merged(ctx, project, part)
		if err != nil {
			return nil, 0, err
		}
		ids = append(ids, id)
	}
	// Merging may have made the same layer twice.
	for i := len(ids) - 1; i >= 0; i-- {
		for j := range i {
			if ids[j] == ids[i] {
				ids = append(ids[:j], ids[j+1:]...)
				i--
				break
			}
		}
	}
	return ids, octets, nil
}

// groups cuts a list into at most n neighbourhoods and answers their lengths: again and again the two neighbours that are smallest
// together become one, so that the large layers, which other images share, stay as they are.
func groups(sizes []int64, n int) []int {
	type group struct {
		len  int
		size int64
	}
	var list []group
	for _, s := range sizes {
		list = append(list, group{1, s})
	}
	for len(list) > n {
		best := 0
		for i := 1; i+1 < len(list); i++ {
			if list[i].size+list[i+1].size < list[best].size+list[best+1].size {
				best = i
			}
		}
		list[best] = group{list[best].len + list[best+1].len, list[best].size + list[best+1].size}
		list = append(list[:best+1], list[best+2:]...)
	}
	out := make([]int, len(list))
	for i, g := range list {
		out[i] = g.len
	}
	return out
}

// merged is one layer of several, kept like a converted one.
func (im *Images) merged(ctx context.Context, project string, ids []layer.ID) (layer.ID, error) {
	h := sha256.New()
	h.Write([]byte("dsec merged\n"))
	for _, id := range ids {
		h.Write([]byte(id + "\n"))
	}
	key := "sha256:" + hex.EncodeToString(h.Sum(nil))
	r, err := im.find(ctx, project, key)
	if err == nil {
		return r.Layer, nil
	}
	if !errors.Is(err, sandbox.ErrNotFound) {
		return "", err
	}
	return remade(func() (layer.ID, error) {
		d, err := im.layers.Merge(ctx, ids)
		if err != nil {
			return "", fmt.Errorf("merge %d small layers: %w", len(ids), err)
		}
		return d.ID, im.keep(ctx, project, &record{DiffID: key, Layer: d.ID, Entries: d.Entries, Bytes: d.Bytes})
	})
}
