package layer

import (
	"context"
	"sync"
	"time"
)

const (
	recentTime = 5 * time.Second // how long what another process did to a layer may be unseen
	recentMost = 1024
)

// recent keeps descriptors for a short time: each create reads those of its layers, and the store may be far. What decides how a layer
// is stacked does not change, and whether a project may use it is asked of the facts every time.
type recent struct {
	mu   sync.Mutex
	seen map[ID]sight
}

type sight struct {
	d     Descriptor
	until time.Time
}

// recent is Descriptor for the composition of layers; the answer's lists are not to be changed.
func (c *Catalogue) recent(ctx context.Context, id ID) (Descriptor, error) {
	now := c.now()
	c.read.mu.Lock()
	s, ok := c.read.seen[id]
	c.read.mu.Unlock()
	if ok && now.Before(s.until) {
		return s.d, nil
	}
	d, err := c.Descriptor(ctx, id)
	if err != nil {
		return d, err
	}
	c.read.mu.Lock()
	defer c.read.mu.Unlock()
	if c.read.seen == nil || len(c.read.seen) >= recentMost {
		c.read.seen = map[ID]sight{}
	}
	c.read.seen[id] = sight{d, now.Add(recentTime)}
	return d, nil
}

// forget is called when a descriptor was written or removed.
func (c *Catalogue) forget(id ID) {
	c.read.mu.Lock()
	delete(c.read.seen, id)
	c.read.mu.Unlock()
}
