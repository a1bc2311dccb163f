package keeper

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// lowers keeps detached clones of layers whose ids are mapped for a range of host ids: ranges are used again and again, the one released
// last first, and an overlay clones what it is given for itself. A clone that is made anew costs a birth a hop to the layers' thread,
// two calls, and at its end a grace period of the kernel.
type lowers struct {
	layers *layers

	mu    sync.Mutex
	kept  map[lowerKey]int // descriptors that nobody uses
	order []lowerKey       // the one kept longest first
}

type lowerKey struct {
	base uint32
	id   string
}

const keptLowers = 128

func newLowers(l *layers) *lowers { return &lowers{layers: l, kept: map[lowerKey]int{}} }

// take returns clones for a birth, in the order of ids; they are the caller's until put. user is the namespace of the range's ids.
func (w *lowers) take(base uint32, ids []string, user int) ([]int, error) {
	fds := make([]int, len(ids))
	var missing []string
	w.mu.Lock()
	for i, id := range ids {
		k := lowerKey{base, id}
		fd, ok := w.kept[k]
		if !ok {
			fds[i] = -1
			missing = append(missing, id)
			continue
		}
		fds[i] = fd
		w.forget(k)
	}
	w.mu.Unlock()
	if len(missing) == 0 {
		return fds, nil
	}
	made, err := w.layers.clones(missing)
	if err != nil {
		closeAll(only(fds))
		return nil, err
	}
	for i := range fds {
		if fds[i] >= 0 {
			continue
		}
		fds[i], made = made[0], made[1:]
		if err := idmap(fds[i], user); err != nil {
			closeAll(append(only(fds), made...))
			if err == unix.EINVAL {
				err = fmt.Errorf("its file system can't be id-mapped; a layer that was unpacked needs a state folder on ext4, xfs or btrfs: %w", err)
			}
			return nil, fmt.Errorf("map ids of layer %s: %w", ids[i], err)
		}
	}
	return fds, nil
}

// put takes clones back and returns those that it has no place for, which the caller closes.
func (w *lowers) put(base uint32, ids []string, fds []int) (rest []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, id := range ids {
		k := lowerKey{base, id}
		if _, have := w.kept[k]; have || !w.layers.has(id) {
			rest = append(rest, fds[i])
			continue
		}
		if len(w.order) >= keptLowers {
			old := w.order[0]
			rest = append(rest, w.kept[old])
			w.forget(old)
		}
		w.kept[k] = fds[i]
		w.order = append(w.order, k)
	}
	return rest
}

// forget removes an entry. The caller holds mu.
func (w *lowers) forget(k lowerKey) {
	delete(w.kept, k)
	for i, o := range w.order {
		if o == k {
			w.order = append(w.order[:i], w.order[i+1:]...)
			return
		}
	}
}

// drop returns the clones of a layer that was unmounted; the caller closes them.
func (w *lowers) drop(id string) (fds []int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for k, fd := range w.kept {
		if k.id == id {
			fds = append(fds, fd)
			w.forget(k)
		}
	}
	return fds
}

func (l *layers) has(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mounted[id]
}

// unmountLayer unmounts a layer and what was kept of it.
func (k *Keeper) unmountLayer(id string) error {
	err := k.layers.unmount(id)
	closeAll(k.lowers.drop(id))
	k.calls.standbys.dropLayer(id)
	k.calls.roots.dropLayer(id)
	return err
}

// only is the descriptors that are there.
func only(fds []int) (there []int) {
	for _, fd := range fds {
		if fd >= 0 {
			there = append(there, fd)
		}
	}
	return there
}
