package sandbox

import "errors"

// The sentinel errors. Packages wrap them with the act and its object, so that the text names the field and the fix;
// internal/rpc maps them to wire codes in one table.
var (
	ErrNotFound    = errors.New("not found")
	ErrExists      = errors.New("already exists")
	ErrInvalid     = errors.New("invalid")
	ErrState       = errors.New("wrong state")
	ErrExhausted   = errors.New("exhausted")
	ErrLost        = errors.New("lost")
	ErrDenied      = errors.New("denied")
	ErrUnsupported = errors.New("unsupported")
)
