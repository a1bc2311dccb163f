// Package facts is the small, durable state that outlives hosts and that all gateways share: projects, keys, quotas, names and
// versions of layers and environments.
//
// It hides which database holds them: [Bolt] on one machine, etcd for many. A fact is a key with a value and a revision; every
// change names the revision it expects, so that two writers never overwrite each other unseen. Nothing on the path that
// creates a sandbox writes here. Every implementation passes factstest.Run.
package facts

import (
	"context"
	"fmt"
	"strings"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Revision orders the changes of one key: a later change has a higher one, also when the key was deleted in between.
type Revision int64

const (
	// Absent expects that the key does not exist.
	Absent Revision = 0
	// Any expects nothing.
	Any Revision = -1
)

// ErrConflict says that the key's revision is not the expected one. It wraps sandbox.ErrState.
var ErrConflict = fmt.Errorf("changed meanwhile: %w", sandbox.ErrState)

// Limits of a fact, in octets, and of one list. etcd refuses requests over 1.5 MiB.
const (
	MaxKey   = 1024
	MaxValue = 1 << 20
)

// Fact is one key with its value.
type Fact struct {
	Key      string
	Value    []byte
	Revision Revision
}

// Facts is a set of facts. All calls are linearizable.
type Facts interface {
	// Get returns a fact, or an error that wraps sandbox.ErrNotFound.
	Get(ctx context.Context, key string) (Fact, error)
	// Put sets the value when the key's revision is the expected one, else it returns ErrConflict. It is durable on return.
	Put(ctx context.Context, key string, value []byte, expected Revision) (Revision, error)
	// Delete removes the key when its revision is the expected one. A key that is missing is sandbox.ErrNotFound.
	Delete(ctx context.Context, key string, expected Revision) error
	// List returns at most limit facts (0: all) whose keys have the prefix and are not below from, in the order of keys.
	List(ctx context.Context, prefix, from string, limit int) ([]Fact, error)
}

// Check checks a key and a value against the limits.
func Check(key string, value []byte) error {
	switch {
	case key == "" || len(key) > MaxKey || strings.IndexByte(key, 0) >= 0:
		return fmt.Errorf("fact key %.80q: want 1 to %d octets without NUL: %w", key, MaxKey, sandbox.ErrInvalid)
	case len(value) > MaxValue:
		return fmt.Errorf("fact %s: value of %d octets, at most %d: %w", key, len(value), MaxValue, sandbox.ErrExhausted)
	}
	return nil
}
