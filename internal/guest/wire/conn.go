package wire

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/internal/calm"
)

func closeFD(fd int) { _ = syscall.Close(fd) }

// Conn carries frames over a Unix stream socket. ReadFrame is for one goroutine at a time; WriteFrame for any number.
type Conn struct {
	c   *calm.Conn
	max int // octets of a body that is read

	// Read side. buf is small: most frames of a guest fit, and a thousand idle sandboxes have one each.
	buf        [256]byte
	start, end int
	fds        []int // came, and belong to frames not yet read

	mu   sync.Mutex
	wbuf []byte
	werr error // a frame was half written: the stream can't be used any more
}

// NewHostConn takes over fd, the host's end of a stream to a guest. Bodies read are bounded by MaxToHost.
func NewHostConn(fd int) (*Conn, error) { return newConn(fd, MaxToHost) }

// NewGuestConn takes over fd, the guest's end. Bodies read are bounded by MaxToGuest.
func NewGuestConn(fd int) (*Conn, error) { return newConn(fd, MaxToGuest) }

func newConn(fd, max int) (*Conn, error) {
	c, err := calm.New(fd)
	if err != nil {
		return nil, fmt.Errorf("guest stream: %w", err)
	}
	return &Conn{c: c, max: max}, nil
}

// Pair returns a new connection for the host and a descriptor (close on exec) for the guest's end.
func Pair() (*Conn, int, error) {
	p, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("socketpair: %w", err)
	}
	c, err := NewHostConn(p[0])
	if err != nil {
		closeFD(p[1])
		return nil, -1, err
	}
	return c, p[1], nil
}

// SetDeadline bounds reads and writes; zero is none.
func (c *Conn) SetDeadline(t time.Time) error { return c.c.SetDeadline(t) }

// SetWriteDeadline bounds writes. A frame that is cut by it makes the Conn unusable for more.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.c.SetWriteDeadline(t) }

// SetReadDeadline bounds reads.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.c.SetReadDeadline(t) }

// Close ends the connection and unblocks both sides. Descriptors that came without a complete frame are closed by the
// reader, or here where none is running: call it after the reader has returned, or let the reader see the end.
func (c *Conn) Close() error { return c.c.Close() }

// ReadFrame reads the next frame. io.EOF is a stream that ended between frames. After any error the Conn can't be read
// again, and no descriptor that came is left open.
func (c *Conn) ReadFrame() (Frame, error) {
	f, err := c.readFrame()
	if err != nil {
		f.CloseFDs()
		for _, fd := range c.fds {
			closeFD(fd)
		}
		c.fds = nil
		return Frame{}, err
	}
	return f, nil
}

func (c *Conn) readFrame() (Frame, error) {
	var hb [HeaderSize]byte
	if err := c.readFull(hb[:], true); err != nil {
		return Frame{}, err
	}
	h, err := parseHeader(hb[:], c.max)
	if err != nil {
		return Frame{}, err
	}
	f := Frame{Type: h.typ, Flags: h.flags, ID: h.id}
	if h.length > 0 {
		f.Body = make([]byte, h.length)
		if err := c.readFull(f.Body, false); err != nil {
			return Frame{}, err
		}
	}
	if h.nfds > len(c.fds) {
		return Frame{}, fmt.Errorf("%w: %s names %d descriptors, %d came", ErrFormat, h.typ, h.nfds, len(c.fds))
	}
	if h.nfds > 0 {
		f.FDs = append([]int(nil), c.fds[:h.nfds]...)
		c.fds = append(c.fds[:0], c.fds[h.nfds:]...)
		if len(c.fds) == 0 {
			c.fds = nil
		}
	}
	return f, nil
}

// readFull fills p. The end of the stream before the first octet is io.EOF where clean says so.
func (c *Conn) readFull(p []byte, clean bool) error {
	for n := 0; n < len(p); {
		if c.start < c.end {
			m := copy(p[n:], c.buf[c.start:c.end])
			c.start += m
			n += m
			continue
		}
		var oob [512]byte // CMSG_SPACE of MaxFDs descriptors and what a peer might add
		dst := c.buf[:]
		direct := len(p)-n > len(c.buf)
		if direct {
			dst = p[n:]
		}
		m, on, flags, _, err := c.c.ReadMsgUnix(dst, oob[:])
		if on > 0 {
			if e := c.takeFDs(oob[:on]); e != nil && err == nil {
				err = e
			}
		}
		if errors.Is(err, io.EOF) || err == nil && m == 0 { // net wraps it here
			if clean && n == 0 {
				return io.EOF
			}
			return io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		if flags&syscall.MSG_CTRUNC != 0 {
			return fmt.Errorf("%w: descriptors cut off", ErrFormat)
		}
		if direct {
			n += m
		} else {
			c.start, c.end = 0, m
		}
	}
	return nil
}

func (c *Conn) takeFDs(oob []byte) error {
	msgs, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("%w: control message: %v", ErrFormat, err)
	}
	for i := range msgs {
		fds, err := syscall.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // credentials and the like are not ours
		}
		c.fds = append(c.fds, fds...)
	}
	if len(c.fds) > maxQueuedFD {
		return fmt.Errorf("%w: too many descriptors", ErrFormat)
	}
	return nil
}

// WriteFrame writes a frame; the descriptors stay the caller's. It blocks while the peer doesn't read, until the
// deadline or Close.
func (c *Conn) WriteFrame(f Frame) error {
	if len(f.FDs) > MaxFDs {
		return fmt.Errorf("%w: %s with %d descriptors, at most %d", ErrFormat, f.Type, len(f.FDs), MaxFDs)
	}
	if len(f.Body) > MaxToGuest {
		return fmt.Errorf("%w: %s of %d octets, at most %d", ErrFormat, f.Type, len(f.Body), MaxToGuest)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.werr != nil {
		return c.werr
	}
	b := f.AppendHeader(c.wbuf[:0])
	b = append(b, f.Body...)
	if cap(b) <= 4096 {
		c.wbuf = b[:0]
	}
	var oob []byte
	if len(f.FDs) > 0 {
		oob = syscall.UnixRights(f.FDs...)
	}
	n := 0
	for n < len(b) {
		m, _, err := c.c.WriteMsgUnix(b[n:], oob, nil)
		n += m
		oob = nil
		if err != nil {
			if n > 0 {
				c.werr = fmt.Errorf("guest stream: frame half written: %w", err)
			}
			return err
		}
	}
	return nil
}

// Send writes a frame whose body is a message of this package.
func (c *Conn) Send(t Type, id uint64, m interface{ Append([]byte) []byte }, fds ...int) error {
	f := Frame{Type: t, ID: id, FDs: fds}
	if m != nil {
		f.Body = m.Append(nil)
	}
	return c.WriteFrame(f)
}
