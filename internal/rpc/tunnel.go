package rpc

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// The tunnel to a port inside a sandbox: an HTTP/1.1 upgrade on the host's ordinary listener, then octets in both directions.
// Each side may close its half; the other half goes on.
const (
	tunnelPath     = "/v1/dial/"
	screenPath     = "/v1/screen/"
	tunnelProtocol = "dsec-tcp"
	tunnelDial     = 15 * time.Second // to the port inside, a wake-up of the sandbox included
)

// PortDialer connects to a TCP port inside a sandbox.
type PortDialer func(ctx context.Context, id sandbox.ID, port uint16) (net.Conn, error)

// TunnelPattern is where Tunnel belongs in a host's http.ServeMux, behind Edge.Wrap.
const TunnelPattern = "POST " + tunnelPath + "{sandbox}/{port}"

// ScreenPattern is where TunnelScreen belongs.
const ScreenPattern = "POST " + screenPath + "{sandbox}/{port}"

// TunnelScreen is the host's half of the tunnel to a screen, which carries RFB: port 0 is the machine's own, else the display server at the port.
func (e *Edge) TunnelScreen(dial PortDialer) http.Handler { return e.tunnel(dial, ScreenPort) }

// Tunnel is the host's half. dial gets a context that is bounded for the dialling; the connection that it returns is closed when
// either side has ended, or when the server shuts down.
func (e *Edge) Tunnel(dial PortDialer) http.Handler { return e.tunnel(dial, Port) }

func (e *Edge) tunnel(dial PortDialer, parse func(string) (uint16, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		inside, err := openInside(r, dial, parse)
		if err != nil {
			e.Fail(w, r, "tunnel", err, start)
			e.Done("tunnel", err, start)
			return
		}
		defer inside.Close()
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			e.Fail(w, r, "tunnel", fmt.Errorf("tunnel: want HTTP/1.1: %w: %w", err, sandbox.ErrInvalid), start)
			return
		}
		defer conn.Close()
		conn.SetDeadline(time.Time{})
		if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+tunnelProtocol+"\r\n\r\n"); err != nil {
			return
		}
		outer := withRest(conn, rw.Reader)
		stop := context.AfterFunc(r.Context(), func() { conn.Close(); inside.Close() })
		defer stop()
		Splice(outer, inside)
		e.Done("tunnel", nil, start)
	})
}

func openInside(r *http.Request, dial PortDialer, parse func(string) (uint16, error)) (net.Conn, error) {
	id, err := sandbox.ParseID(r.PathValue("sandbox"))
	if err != nil {
		return nil, err
	}
	port, err := parse(r.PathValue("port"))
	if err != nil {
		return nil, err
	}
	if r.Header.Get("Upgrade") != tunnelProtocol {
		return nil, fmt.Errorf("tunnel: want the header Upgrade: %s: %w", tunnelProtocol, sandbox.ErrInvalid)
	}
	ctx, cancel := context.WithTimeout(r.Context(), tunnelDial)
	defer cancel()
	return dial(ctx, id, port)
}

// Port reads a TCP port, 1 to 65535.
func Port(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("port %.20q: want 1 to 65535: %w", s, sandbox.ErrInvalid)
	}
	return uint16(n), nil
}

// ScreenPort reads the port of a screen: 0, also when empty, is the machine's own.
func ScreenPort(s string) (uint16, error) {
	if s == "" || s == "0" {
		return 0, nil
	}
	return Port(s)
}

// DialPort is the gateway's half: a connection to a TCP port inside a sandbox of this host. The context bounds the dialling only.
func (p *Peer) DialPort(ctx context.Context, id sandbox.ID, port uint16) (net.Conn, error) {
	return p.tunnel(ctx, fmt.Sprintf("%s%s/%d", tunnelPath, id, port), fmt.Sprintf("dial port %d of %s", port, id))
}

// DialScreen connects to a screen of a sandbox of this host as DialPort does to a port.
func (p *Peer) DialScreen(ctx context.Context, id sandbox.ID, port uint16) (net.Conn, error) {
	return p.tunnel(ctx, fmt.Sprintf("%s%s/%d", screenPath, id, port), fmt.Sprintf("dial the screen of %s", id))
}

func (p *Peer) tunnel(ctx context.Context, path, what string) (net.Conn, error) {
	conn, err := p.dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("dial host %s: %w: %w", p.Addr, err, ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, tunnelDial+dialTime)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	c, err := p.upgrade(ctx, conn, path, what)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		if ctx.Err() != nil {
			err = fmt.Errorf("%s: %w", what, ctx.Err())
		}
		return nil, err
	}
	conn.SetDeadline(time.Time{})
	return c, nil
}

func (p *Peer) upgrade(ctx context.Context, conn net.Conn, path, what string) (net.Conn, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "POST %s HTTP/1.1\r\nHost: dsec-host\r\nConnection: Upgrade\r\nUpgrade: %s\r\n%s: %s\r\n%s: %s\r\n",
		path, tunnelProtocol, HeaderProtocol, protocolText, HeaderCluster, p.token)
	if project := Project(ctx); project != "" {
		fmt.Fprintf(&b, "%s: %s\r\n", HeaderProject, project)
	}
	b.WriteString("Content-Length: 0\r\n\r\n")
	if _, err := io.WriteString(conn, b.String()); err != nil {
		return nil, fmt.Errorf("%s: %w: %w", what, err, ErrUnavailable)
	}
	br := bufio.NewReaderSize(conn, 4096)
	resp, err := http.ReadResponse(br, &http.Request{Method: http.MethodPost})
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", what, err, ErrUnavailable)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		return nil, readError(resp.StatusCode, body)
	}
	return withRest(conn, br), nil
}

// halfCloser is a connection that can end its sending half.
type halfCloser interface{ CloseWrite() error }

// restConn gives back what was read ahead.
type restConn struct {
	net.Conn
	rest []byte
}

func withRest(c net.Conn, br *bufio.Reader) net.Conn {
	n := br.Buffered()
	if n == 0 {
		return c
	}
	rest, _ := br.Peek(n)
	return &restConn{Conn: c, rest: append([]byte(nil), rest...)}
}

func (c *restConn) Read(b []byte) (int, error) {
	if len(c.rest) > 0 {
		n := copy(b, c.rest)
		c.rest = c.rest[n:]
		return n, nil
	}
	return c.Conn.Read(b)
}

func (c *restConn) CloseWrite() error {
	if h, ok := c.Conn.(halfCloser); ok {
		return h.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Splice copies both directions until both have ended. An end in one direction is passed on and the other goes on; a failure, or
// an end that can't be passed on, ends both. It closes neither.
func Splice(a, b net.Conn) {
	var wg sync.WaitGroup
	one := func(dst, src net.Conn) {
		_, err := io.Copy(dst, src)
		if h, ok := dst.(halfCloser); err == nil && ok && h.CloseWrite() == nil {
			return
		}
		past := time.Unix(1, 0)
		dst.SetDeadline(past)
		src.SetDeadline(past)
	}
	wg.Go(func() { one(a, b) })
	one(b, a)
	wg.Wait()
}
