package sandbox

import (
	"context"
	"os"
)

// Movable is an [Instance] that another host can go on with.
type Movable interface {
	// Needs says what a host must have for it, in the backend's own words, and how many octets its files take at most. ErrUnsupported where it
	// can't be moved, with the reason.
	Needs(ctx context.Context) (needs []byte, size int64, err error)
	// Luggage opens what the sandbox is while it is paused at level Saved; the caller closes them. ErrState where it is not.
	Luggage(ctx context.Context) ([]MovedFile, error)
}

// MovedFile is a file of a saved sandbox.
type MovedFile struct {
	Name string
	File *os.File
}

// Receiver is a [Backend] that takes what another host saved.
type Receiver interface {
	// Admit says whether this host has what a sandbox needs: ErrUnsupported with the difference, ErrExhausted where there is no room.
	Admit(ctx context.Context, needs []byte, size int64) error
	// Unpack makes an empty file for one that arrives; the caller closes it.
	Unpack(ctx context.Context, id ID, name string) (*os.File, error)
	// Keep puts the files that arrived on the disk. Sweep leaves them while the ID is among the living.
	Keep(ctx context.Context, id ID) error
	// Claim answers the handle with which Recover then takes the sandbox, paused at level Saved. It may be called again.
	Claim(ctx context.Context, id ID, needs []byte) (handle []byte, err error)
	// Discard removes what of a sandbox arrived that does not come to live here. It is idempotent.
	Discard(ctx context.Context, id ID) error
}
