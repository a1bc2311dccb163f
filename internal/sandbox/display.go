package sandbox

import (
	"context"
	"net"
)

// Screened is an [Instance] that may have a screen of its own.
type Screened interface {
	// VNC connects to the screen by the protocol of RFB, without a password. ErrUnsupported where this sandbox has none.
	VNC(ctx context.Context) (net.Conn, error)
}

// Consoled is an [Instance] with a serial console, on which its kernel and firmware write.
type Consoled interface {
	// Console is the end of what was written, at most 1 MiB. It needs no guest that answers, and wakes nothing.
	Console(ctx context.Context) ([]byte, error)
}
