package layer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// LeaseTime is how long a host's lease on layers holds after its last renewal: longer than a host is away and comes back with its
// sandboxes.
const LeaseTime = 72 * time.Hour

// lease is an object leases/<holder>.json: what a host has mounted, so that gateways leave it.
type lease struct {
	Until  time.Time `json:"until"`
	Layers []ID      `json:"layers"`
}

func leaseKey(holder string) string { return "leases/" + holder + ".json" }

// Lease says that the holder, a host, uses these layers from now on for LeaseTime, in place of what it said before. No Sweep removes
// objects of theirs until then, also when their last name went. Without layers the lease ends.
func (c *Catalogue) Lease(ctx context.Context, holder string, ids []ID) error {
	if len(ids) == 0 {
		return c.store.Delete(ctx, leaseKey(holder))
	}
	text, err := json.Marshal(lease{Until: c.now().Add(LeaseTime), Layers: ids})
	if err != nil {
		return err
	}
	if err := store.Put(ctx, c.store, leaseKey(holder), bytesReader(text)); err != nil {
		return fmt.Errorf("lease of layers for %s: %w", holder, err)
	}
	return nil
}

// leased are the layers that a host uses. A lease that can't be read stops the caller: what it holds would look unused.
func (c *Catalogue) leased(ctx context.Context, tidy bool) (map[ID]bool, error) {
	out := map[ID]bool{}
	var over []string
	var failed error
	err := c.store.List(ctx, "leases/", func(i store.Info) bool {
		var l lease
		text, err := store.ReadAll(ctx, c.store, i.Key, 16<<20)
		if errors.Is(err, sandbox.ErrNotFound) {
			return true
		}
		if err == nil {
			err = json.Unmarshal(text, &l)
		}
		if err != nil {
			failed = fmt.Errorf("%s: %w", i.Key, err)
			return false
		}
		if l.Until.Before(c.now()) {
			over = append(over, i.Key)
			return true
		}
		for _, id := range l.Layers {
			out[id] = true
		}
		return true
	})
	if err := errors.Join(err, failed); err != nil {
		return nil, fmt.Errorf("leases of layers: %w", err)
	}
	if !tidy {
		return out, nil
	}
	for _, key := range over {
		if err := c.store.Delete(ctx, key); err != nil {
			return nil, fmt.Errorf("leases of layers: %w", err)
		}
	}
	return out, nil
}
