package host

import (
	"context"
	"net"
	"sync"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// portConn is a connection to a port inside; it counts as activity until it is closed.
type portConn struct {
	net.Conn
	once sync.Once
	done func()
}

func (c *portConn) Close() error {
	c.once.Do(c.done)
	return c.Conn.Close()
}

// CloseWrite ends our half, where the connection can.
func (c *portConn) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return net.ErrClosed
}

// dialPort connects to a port inside a sandbox, waking it.
func (h *Host) dialPort(ctx context.Context, id sandbox.ID, port uint16) (net.Conn, error) {
	b, err := h.get(ctx, string(id))
	if err != nil {
		return nil, err
	}
	inst, err := b.use(ctx)
	if err != nil {
		return nil, err
	}
	c, err := inst.Dial(ctx, port)
	if err != nil {
		b.done()
		return nil, err
	}
	b.finished() // an end does not wait for it: it breaks off with the sandbox
	return &portConn{Conn: c, done: func() {
		b.mu.Lock()
		b.rest()
		b.mu.Unlock()
	}}, nil
}
