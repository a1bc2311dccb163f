package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/guest/vmwire"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// flats makes one image of an environment's layers: a machine has few places for disks, and layers that lie on each other would each
// be a file system of its own in every guest. It remembers which image belongs to which layers and how many machines use it.
type flats struct {
	layers Layers

	mu    sync.Mutex
	known map[string]layer.ID // of the layers, joined
	users map[layer.ID]int
	busy  map[string]chan struct{}
}

const maxFlats = 256

func newFlats(l Layers) *flats {
	return &flats{layers: l, known: map[string]layer.ID{}, users: map[layer.ID]int{}, busy: map[string]chan struct{}{}}
}

// take returns the image of the layers and counts a user of it.
func (f *flats) take(ctx context.Context, layers []string) (layer.ID, error) {
	key := strings.Join(layers, "/")
	f.mu.Lock()
	for {
		if id, ok := f.known[key]; ok {
			f.users[id]++
			f.mu.Unlock()
			return id, nil
		}
		wait := f.busy[key]
		if wait == nil {
			break
		}
		f.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return "", ctx.Err()
		}
		f.mu.Lock()
	}
	done := make(chan struct{})
	f.busy[key] = done
	f.mu.Unlock()
	id, err := f.make(ctx, layers)
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.busy, key)
	close(done)
	if err != nil {
		return "", err
	}
	for k, old := range f.known {
		if len(f.known) < maxFlats {
			break
		}
		if f.users[old] == 0 {
			delete(f.known, k)
		}
	}
	f.known[key] = id
	f.users[id]++
	return id, nil
}

func (f *flats) make(ctx context.Context, layers []string) (layer.ID, error) {
	ids := make([]layer.ID, len(layers))
	for i, l := range layers {
		ids[i] = layer.ID(l)
	}
	d, err := f.layers.Flatten(ctx, ids)
	if err != nil {
		return "", err
	}
	return d.ID, nil
}

// hold counts a user of an image that is known to be used, for recovery.
func (f *flats) hold(id layer.ID) {
	f.mu.Lock()
	f.users[id]++
	f.mu.Unlock()
}

func (f *flats) release(id layer.ID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users[id]--; f.users[id] <= 0 {
		delete(f.users, id)
	}
}

// drop forgets an image that could not be opened: it was collected since.
func (f *flats) drop(id layer.ID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, v := range f.known {
		if v == id {
			delete(f.known, k)
		}
	}
}

func (f *flats) inUse() (out []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id := range f.users {
		out = append(out, string(id))
	}
	slices.Sort(out)
	return out
}

// openImage takes the image of an environment's layers with its files; one that was collected meanwhile is made again.
func (b *Backend) openImage(ctx context.Context, layers []string) (layer.ID, blob.LayerFiles, error) {
	for again := false; ; again = true {
		id, err := b.flat.take(ctx, layers)
		if err != nil {
			return "", blob.LayerFiles{}, err
		}
		files, err := b.layers.Files(ctx, id)
		if err == nil {
			return id, files, nil
		}
		b.flat.release(id)
		b.flat.drop(id)
		if again || !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrLost) {
			return "", files, fmt.Errorf("image of the environment: %w", err)
		}
	}
}

// layerDisks are the disks of a layer's files.
func layerDisks(id string, f blob.LayerFiles) []vmm.Disk {
	out := []vmm.Disk{{Serial: vmwire.Serial(id, false), File: f.Meta, ReadOnly: true}}
	if f.Data != nil {
		out = append(out, vmm.Disk{Serial: vmwire.Serial(id, true), File: f.Data, ReadOnly: true})
	}
	return out
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
