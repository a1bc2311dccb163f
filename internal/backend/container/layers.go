package container

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-dev/dsec/internal/blob"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
)

// layerMounts counts who uses a mounted layer. One mount per layer serves all sandboxes of the host, since a second one would be
// another superblock with a page cache of its own; it stays a while after its last user, since the next one is likely.
type layerMounts struct {
	mu     sync.Mutex
	byID   map[string]*layerMount
	now    func() time.Time
	closed int // generation: a new keeper has none of the old one's mounts
}

type layerMount struct {
	refs    int
	mounted bool
	busy    chan struct{} // closed when the mount or unmount under way is done; nil when none is
	idle    time.Time     // since when nobody uses it
}

func newLayerMounts() *layerMounts {
	return &layerMounts{byID: map[string]*layerMount{}, now: time.Now}
}

// adopt takes over what a keeper has mounted: what it has not is mounted at its next use.
func (m *layerMounts) adopt(ids []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed++
	for _, l := range m.byID {
		l.mounted = false
	}
	for _, id := range ids {
		l := m.byID[id]
		if l == nil {
			l = &layerMount{idle: m.now()}
			m.byID[id] = l
		}
		l.mounted = true
	}
}

// acquire mounts the layers where they are not and counts the caller as a user of each. On an error it is a user of none.
func (m *layerMounts) acquire(ctx context.Context, c *keeper.Client, layers layerFiles, ids []string) error {
	got := make([]bool, len(ids))
	// What is not mounted is mounted all at once, since each layer may wait for a store that is far.
	var g errgroup.Group
	g.SetLimit(acquireAtOnce)
	for i, id := range ids {
		if got[i] = m.take(id); got[i] {
			continue
		}
		g.Go(func() error {
			err := m.acquireOne(ctx, c, layers, id)
			got[i] = err == nil
			return err
		})
	}
	err := g.Wait()
	if err != nil {
		var mine []string
		for i, id := range ids {
			if got[i] {
				mine = append(mine, id)
			}
		}
		m.release(mine)
	}
	return err
}

const acquireAtOnce = 16

// take counts the caller as a user of a layer that is mounted; false when it is not.
func (m *layerMounts) take(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.byID[id]
	if l == nil || !l.mounted || l.busy != nil {
		return false
	}
	l.refs++
	return true
}

func (m *layerMounts) acquireOne(ctx context.Context, c *keeper.Client, layers layerFiles, id string) error {
	m.mu.Lock()
	for {
		l := m.byID[id]
		if l == nil {
			l = &layerMount{}
			m.byID[id] = l
		}
		if l.busy != nil {
			busy := l.busy
			m.mu.Unlock()
			select {
			case <-busy:
			case <-ctx.Done():
				return fmt.Errorf("wait for the mount of layer %s: %w", id, ctx.Err())
			}
			m.mu.Lock()
			continue // it may have failed for the other
		}
		if l.mounted {
			l.refs++
			m.mu.Unlock()
			return nil
		}
		busy := make(chan struct{})
		l.busy = busy
		generation := m.closed
		m.mu.Unlock()
		err := mountLayer(ctx, c, layers, id)
		m.mu.Lock()
		l.busy = nil
		close(busy)
		if err != nil {
			if l.refs == 0 && !l.mounted {
				delete(m.byID, id)
			}
			m.mu.Unlock()
			return err
		}
		if generation == m.closed {
			l.mounted = true
		}
	}
}

// layerFiles is what the keeper mounts: images of the catalogue, or folders into which they were unpacked.
type layerFiles interface {
	Files(ctx context.Context, id layer.ID) (blob.LayerFiles, error)
}

func mountLayer(ctx context.Context, c *keeper.Client, layers layerFiles, id string) error {
	f, err := layers.Files(ctx, layer.ID(id))
	if err != nil {
		return err
	}
	defer f.Close()
	return c.MountLayer(ctx, id, keeper.Image{Meta: f.Meta, Data: f.Data, Direct: f.Direct})
}

// hold counts a user of layers that are mounted already, for recovery; the sandbox's own mounts keep them alive in any case.
func (m *layerMounts) hold(ids []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range ids {
		l := m.byID[id]
		if l == nil {
			l = &layerMount{}
			m.byID[id] = l
		}
		l.refs++
	}
}

// inUse are the layers that are mounted or that a sandbox has.
func (m *layerMounts) inUse() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for id, l := range m.byID {
		if l.mounted || l.refs > 0 || l.busy != nil {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

func (m *layerMounts) release(ids []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range ids {
		if l := m.byID[id]; l != nil && l.refs > 0 {
			if l.refs--; l.refs == 0 {
				l.idle = m.now()
			}
		}
	}
}

// unmountIdle unmounts what nobody has used since the given time.
func (m *layerMounts) unmountIdle(ctx context.Context, c *keeper.Client, since time.Time) error {
	type target struct {
		id   string
		l    *layerMount
		busy chan struct{}
	}
	var targets []target
	m.mu.Lock()
	for id, l := range m.byID {
		if l.refs == 0 && l.busy == nil && l.idle.Before(since) {
			if !l.mounted {
				delete(m.byID, id)
				continue
			}
			l.busy = make(chan struct{})
			targets = append(targets, target{id, l, l.busy})
		}
	}
	m.mu.Unlock()
	var errs []error
	for _, t := range targets {
		err := c.UnmountLayer(ctx, t.id)
		if err != nil {
			errs = append(errs, err)
		}
		m.mu.Lock()
		t.l.busy = nil
		if err == nil {
			t.l.mounted = false
			if t.l.refs == 0 {
				delete(m.byID, t.id)
			}
		}
		close(t.busy)
		m.mu.Unlock()
	}
	return errors.Join(errs...)
}
