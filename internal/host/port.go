package host

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
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
	return h.dialInside(ctx, id, fmt.Sprintf(`"port":%d`, port), func(inst sandbox.Instance) (net.Conn, error) { return inst.Dial(ctx, port) })
}

// dialInside has a connection of a sandbox that counts as activity of it. what is put on record.
func (h *Host) dialInside(ctx context.Context, id sandbox.ID, what string, dial func(sandbox.Instance) (net.Conn, error)) (net.Conn, error) {
	b, err := h.get(ctx, string(id))
	if err != nil {
		return nil, err
	}
	inst, err := b.use(ctx)
	if err != nil {
		return nil, err
	}
	c, err := dial(inst)
	if err != nil {
		b.done()
		return nil, err
	}
	b.noteConn(what)
	b.finished() // an end does not wait for it: it breaks off with the sandbox
	return &portConn{Conn: c, done: func() {
		b.mu.Lock()
		b.rest()
		b.mu.Unlock()
	}}, nil
}

// noteConn records that there was traffic to a port, which can't be done again. A flood of connections is counted, not recorded.
func (b *box) noteConn(what string) {
	b.mu.Lock()
	held, ok := b.conns.allow(time.Now())
	b.mu.Unlock()
	if !ok {
		return
	}
	m := &dsecv1.LogRecord{Kind: "port", RequestJson: fmt.Sprintf(`{%s,"not_recorded_before":%d}`, what, held)}
	if _, err := b.append(trajectory.Record{Kind: trajectory.KindEvent, Flags: trajectory.Opaque, Payload: encode(tagEvent, m)}); err != nil {
		b.h.log.Warn("record a port connection", "sandbox", b.id, "what", what, "err", err)
	}
}
