package layer

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Layers are held in facts, and their octets lie in a store. Two catalogues with facts of their own that write into one store do not see what the
// other one holds: each would remove the other's layers. So each leaves a mark in the store, catalogues/<id>, before it holds anything there, and one
// that finds another's mark removes nothing.
const (
	markFolder   = "catalogues/"
	identityFact = "catalogue:identity"
)

// identity is the name of the facts, made once.
func (c *Catalogue) identity(ctx context.Context) (string, error) {
	for range maxAttempts {
		f, err := c.facts.Get(ctx, identityFact)
		if err == nil {
			return string(f.Value), nil
		}
		if !errors.Is(err, sandbox.ErrNotFound) {
			return "", err
		}
		if _, err := c.facts.Put(ctx, identityFact, []byte(sandbox.NewKey()), facts.Absent); err != nil && !errors.Is(err, facts.ErrConflict) {
			return "", err
		}
	}
	return "", fmt.Errorf("identity of the catalogue: %w", facts.ErrConflict)
}

// mark leaves the mark, once in each life.
func (c *Catalogue) mark(ctx context.Context) error {
	if c.facts == nil || c.marked.Load() {
		return nil
	}
	id, err := c.identity(ctx)
	if err != nil {
		return err
	}
	key := markFolder + id
	if _, err = c.store.Stat(ctx, key); errors.Is(err, sandbox.ErrNotFound) {
		err = store.Put(ctx, c.store, key, strings.NewReader("{}"))
	}
	if err != nil {
		return fmt.Errorf("mark of the catalogue in the store: %w", err)
	}
	c.marked.Store(true)
	return nil
}

// sole fails when another catalogue writes into the store.
func (c *Catalogue) sole(ctx context.Context) error {
	id, err := c.identity(ctx)
	if err != nil {
		return err
	}
	other := ""
	if err := c.store.List(ctx, markFolder, func(i store.Info) bool {
		if i.Key != markFolder+id {
			other = i.Key
		}
		return other == ""
	}); err != nil {
		return err
	}
	if other != "" {
		return fmt.Errorf("another service with facts of its own keeps layers in this store, so none are removed: give each its own store, or delete %s if that service is gone: %w", other, sandbox.ErrState)
	}
	return nil
}
