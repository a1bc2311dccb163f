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
