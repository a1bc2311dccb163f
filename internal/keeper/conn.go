package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// A frame between host and keeper: u32 length of the body, u8 kind, u8 number of descriptors, u16 op, u64 number, body.
// Requests are numbered by the host, events by the keeper; a response or an acknowledgement bears the number it answers.
const (
	frameHeader = 16
	maxBody     = 24 << 20 // a session command's text of 16 MiB fits
	maxFDs      = 8

	kindRequest  = 1
	kindResponse = 2
	kindEvent    = 3
	kindAck      = 4 // by the host: the event is in the log
	kindCancel   = 5 // by the host: nobody waits for the response any more
)

// op names a request; the numbers are part of the protocol.
type op uint16

const (
	opHello op = iota + 1
	opDeliver
	opMountLayer
	opUnmountLayer
	opLayers
	opCreate
	opDestroy
	opList
	opStart
	opKnown
	opStdin
	opSignal
	opResize
	opOpenSession
	opCloseSession
	opFiles
	opNetns
	opFreeze
	opThaw
	opDeadline
	opStats
	opShutdown
	opCall
	opCallPair
	opReserve
	opStandbys
)

// Events.
const (
	evOutput op = iota + 100
	evCommandEnded
	evSessionEnded
	evEnded
	evDenied
)

type frame struct {
	kind byte
	op   op
	num  uint64
	body []byte // valid until the next read
	fds  []int  // owned by the receiver
}

// conn is one end of the stream. Reads belong to one goroutine, writes may come from any.
type conn struct {
	c   socket
	in  []byte // unread octets are in[r:w]
	r   int
	w   int
	oob []byte
	fds []int

	mu  sync.Mutex // writes
	out []byte
}

// socket is a calm.Conn, or a net.UnixConn for what is said once.
type socket interface {
	io.WriteCloser
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
	WriteMsgUnix(b, oob []byte, addr *net.UnixAddr) (n, oobn int, err error)
}

func newConn(c socket) *conn {
	return &conn{c: c, in: make([]byte, 32<<10), oob: make([]byte, unix.CmsgSpace(4*maxFDs*4))}
}

func (c *conn) close() {
	c.c.Close()
}

// drop closes descriptors that came and belong to no frame that was handed out. For the reader, at its end.
func (c *conn) drop() {
	for _, fd := range c.fds {
		unix.Close(fd)
	}
	c.fds = nil
}

func (c *conn) fill(n int) error {
	for c.w-c.r < n {
		if c.r > 0 && (c.r == c.w || c.r+n > len(c.in)) {
			copy(c.in, c.in[c.r:c.w])
			c.w, c.r = c.w-c.r, 0
		}
		if n > len(c.in) {
			// The body is announced by a trusted peer and bounded by maxBody; grow with what has really come.
			size := min(n, max(2*len(c.in), 64<<10))
			if c.w < len(c.in) {
				size = len(c.in)
			}
			if size > len(c.in) {
				bigger := make([]byte, size)
				copy(bigger, c.in[c.r:c.w])
				c.w, c.r = c.w-c.r, 0
				c.in = bigger
			}
		}
		got, oobn, flags, _, err := c.c.ReadMsgUnix(c.in[c.w:], c.oob)
		if oobn > 0 {
			if err := c.rights(c.oob[:oobn]); err != nil {
				return err
			}
		}
		if flags&unix.MSG_CTRUNC != 0 {
			return errors.New("keeper: descriptors were cut off (limit of open files)")
		}
		if err != nil {
			return err
		}
		if got == 0 {
			return io.EOF
		}
		c.w += got
	}
	return nil
}

func (c *conn) rights(oob []byte) error {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("keeper: control message: %w", err)
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // credentials or the like
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
		}
		c.fds = append(c.fds, fds...)
	}
	if len(c.fds) > 64 {
		return errors.New("keeper: too many descriptors queued")
	}
	return nil
}

// read returns the next frame; its body is valid until the next call.
func (c *conn) read() (frame, error) {
	if cap(c.in) > 1<<20 && c.r == c.w {
		c.in, c.r, c.w = make([]byte, 32<<10), 0, 0
	}
	if err := c.fill(frameHeader); err != nil {
		return frame{}, err
	}
	h := c.in[c.r:]
	n := int(binary.LittleEndian.Uint32(h))
	f := frame{kind: h[4], op: op(binary.LittleEndian.Uint16(h[6:])), num: binary.LittleEndian.Uint64(h[8:])}
	nfds := int(h[5])
	if n > maxBody || nfds > maxFDs {
		return frame{}, fmt.Errorf("keeper: frame of %d octets and %d descriptors: %w", n, nfds, sandbox.ErrInvalid)
	}
	if err := c.fill(frameHeader + n); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return frame{}, err
	}
	f.body = c.in[c.r+frameHeader : c.r+frameHeader+n]
	c.r += frameHeader + n
	if nfds > len(c.fds) {
		return frame{}, fmt.Errorf("keeper: frame announces %d descriptors, %d came: %w", nfds, len(c.fds), sandbox.ErrInvalid)
	}
	if nfds > 0 {
		f.fds = append([]int(nil), c.fds[:nfds]...)
		c.fds = append(c.fds[:0], c.fds[nfds:]...)
	}
	return f, nil
}

// write sends one frame. head is encoded before tail, which is sent as it is; the caller keeps its descriptors.
func (c *conn) write(kind byte, o op, num uint64, head func([]byte) []byte, tail []byte, fds ...int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := append(c.out[:0], 0, 0, 0, 0, kind, byte(len(fds)))
	b = binary.LittleEndian.AppendUint16(b, uint16(o))
	b = binary.LittleEndian.AppendUint64(b, num)
	if head != nil {
		b = head(b)
	}
	b = append(b, tail...)
	binary.LittleEndian.PutUint32(b, uint32(len(b)-frameHeader))
	if c.out = b; cap(b) > 256<<10 {
		c.out = nil
	}
	if len(b)-frameHeader > maxBody {
		return fmt.Errorf("keeper: frame of %d octets, at most %d: %w", len(b), maxBody, sandbox.ErrInvalid)
	}
	if len(fds) == 0 {
		_, err := c.c.Write(b)
		return err
	}
	n, _, err := c.c.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	if err != nil {
		return err
	}
	if n < len(b) {
		_, err = c.c.Write(b[n:])
	}
	return err
}

// codes are the sentinel errors on the wire; the index is the number. New ones go to the end.
var codes = []error{nil, sandbox.ErrNotFound, sandbox.ErrExists, sandbox.ErrInvalid, sandbox.ErrState, sandbox.ErrExhausted,
	sandbox.ErrLost, sandbox.ErrDenied, sandbox.ErrUnsupported, os.ErrDeadlineExceeded}

const codeOther = 255

func codeOf(err error) byte {
	for i, s := range codes {
		if i > 0 && errors.Is(err, s) {
			return byte(i)
		}
	}
	return codeOther
}

// remoteError is an error that the other side met; it keeps the sentinel.
type remoteError struct {
	code byte
	text string
}

func (e *remoteError) Error() string { return e.text }

func (e *remoteError) Unwrap() error {
	if int(e.code) < len(codes) {
		return codes[e.code]
	}
	return nil
}
