// Package calm keeps a process from being woken for nothing: by its sockets ([Conn]) and by the runtime's watch thread ([Watch]).
//
// A Conn is a connected Unix stream socket whose process is woken by what comes in, and not each time that the peer has read: the
// runtime's poller asks for room to write on every socket that it knows, and the kernel tells it at every read of the peer. Of a small
// request and its answer that is two threads woken for nothing, a tenth of what a command costs.
//
// It hides two epoll descriptors. The runtime polls the first, which looks at the socket for reading alone; the second is made when a
// write finds no room for the first time. It uses the standard library and x/sys only, because the keeper imports it.
//
// Invariants: the socket's descriptor is used under mu and closed under its lock, so that a number that was given anew is never used;
// calls under it do not block. One reader and one writer at a time, as on a [net.Conn] whose octets are to stay in order: rmu and wmu
// see to it. Lock order: rmu or wmu, then omu, then mu.
package calm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Conn is a net.Conn. Its other methods are those of [net.UnixConn].
type Conn struct {
	local, remote net.Addr

	mu     sync.RWMutex
	fd     int
	closed bool

	rmu  sync.Mutex
	in   *gate
	read transfer
	recv func(uintptr) bool // read, for the poller

	wmu   sync.Mutex
	write transfer
	send  func(uintptr) bool

	omu sync.Mutex
	out *gate // nil until a write found no room
	wby time.Time
}

// transfer is what a system call was asked for and what came of it.
type transfer struct {
	p, oob         []byte
	n, oobn, flags int
	err            error
}

// gate is an epoll descriptor that the runtime polls.
type gate struct {
	f   *os.File
	raw syscall.RawConn
}

func newGate(fd int, events uint32) (*gate, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if err := unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events}); err != nil {
		unix.Close(ep)
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	if err := unix.SetNonblock(ep, true); err != nil { // os.NewFile takes it for something that can be polled
		unix.Close(ep)
		return nil, os.NewSyscallError("fcntl", err)
	}
	f := os.NewFile(uintptr(ep), "socket")
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &gate{f, raw}, nil
}

// New takes over a connected stream socket, also after an error.
func New(fd int) (*Conn, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("watch a socket: %w", err)
	}
	in, err := newGate(fd, unix.EPOLLIN|unix.EPOLLRDHUP)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("watch a socket: %w", err)
	}
	c := &Conn{fd: fd, in: in, local: &net.UnixAddr{Net: "unix"}, remote: &net.UnixAddr{Net: "unix"}}
	c.recv = func(uintptr) bool {
		c.mu.RLock()
		defer c.mu.RUnlock()
		return c.read.do(c, recvmsg)
	}
	c.send = func(uintptr) bool {
		c.mu.RLock()
		defer c.mu.RUnlock()
		return c.write.do(c, sendmsg)
	}
	return c, nil
}

// From takes over a connection of the runtime's, also after an error.
func From(u *net.UnixConn) (*Conn, error) {
	defer u.Close()
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd, ferr := -1, error(nil)
	if err := raw.Control(func(s uintptr) { fd, ferr = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, err
	}
	if ferr != nil {
		return nil, os.NewSyscallError("fcntl", ferr)
	}
	c, err := New(fd)
	if err != nil {
		return nil, err
	}
	c.local, c.remote = u.LocalAddr(), u.RemoteAddr()
	return c, nil
}

// do is a call that does not block; false says that the socket is not ready. The caller holds mu.
func (t *transfer) do(c *Conn, call func(fd int, t *transfer) error) bool {
	if c.closed {
		t.err = net.ErrClosed
		return true
	}
	for {
		switch t.err = call(c.fd, t); t.err {
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			return true
		}
	}
}

func recvmsg(fd int, t *transfer) (err error) {
	if t.oob == nil { // cheaper
		t.n, err = unix.Read(fd, t.p)
		return err
	}
	t.n, t.oobn, t.flags, _, err = unix.Recvmsg(fd, t.p, t.oob, unix.MSG_CMSG_CLOEXEC)
	return err
}

func sendmsg(fd int, t *transfer) (err error) {
	if t.oob == nil {
		t.n, err = unix.Write(fd, t.p)
		return err
	}
	t.n, err = unix.SendmsgN(fd, t.p, t.oob, nil, unix.MSG_NOSIGNAL)
	return err
}

func (c *Conn) fault(op string, err error) error {
	c.mu.RLock()
	if c.closed {
		err = net.ErrClosed
	}
	c.mu.RUnlock()
	if _, ok := err.(syscall.Errno); ok {
		err = os.NewSyscallError(op, err)
	}
	return &net.OpError{Op: op, Net: "unix", Source: c.local, Addr: c.remote, Err: err}
}

// receive waits for octets.
func (c *Conn) receive(p, oob []byte) (n, oobn, flags int, err error) {
	c.rmu.Lock()
	defer c.rmu.Unlock()
	c.read = transfer{p: p, oob: oob}
	err = c.in.raw.Read(c.recv)
	t := c.read
	c.read = transfer{}
	if err == nil {
		err = t.err
	}
	if err != nil {
		return 0, 0, 0, c.fault("read", err)
	}
	if t.n == 0 && len(p) > 0 {
		return 0, t.oobn, t.flags, io.EOF
	}
	return t.n, t.oobn, t.flags, nil
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	n, _, _, err := c.receive(p, nil)
	return n, err
}

// ReadMsgUnix reads octets and control messages; descriptors that come close on exec. The address is nil.
func (c *Conn) ReadMsgUnix(p, oob []byte) (n, oobn, flags int, _ *net.UnixAddr, err error) {
	n, oobn, flags, err = c.receive(p, oob)
	return n, oobn, flags, nil, err
}

// transmit sends all of p, oob with its first octet. It returns how many octets were sent.
func (c *Conn) transmit(p, oob []byte) (sent int, err error) {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	defer func() { c.write = transfer{} }()
	for sent < len(p) {
		c.write = transfer{p: p[sent:], oob: oob}
		if !c.send(0) {
			out, err := c.gateOut()
			if err == nil {
				err = out.raw.Read(c.send)
			}
			if err != nil {
				return sent, c.fault("write", err)
			}
		}
		if err := c.write.err; err != nil {
			return sent, c.fault("write", err)
		}
		sent += c.write.n
		oob = nil
	}
	return sent, nil
}

// gateOut is what a write waits at.
func (c *Conn) gateOut() (*gate, error) {
	c.omu.Lock()
	defer c.omu.Unlock()
	if c.out != nil {
		return c.out, nil
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed {
		return nil, net.ErrClosed
	}
	out, err := newGate(c.fd, unix.EPOLLOUT)
	if err != nil {
		return nil, err
	}
	if err := out.f.SetReadDeadline(c.wby); err != nil {
		out.f.Close()
		return nil, err
	}
	c.out = out
	return out, nil
}

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (int, error) { return c.transmit(p, nil) }

// WriteMsgUnix sends all octets of p, and oob with the first. There must be one, and addr nil.
func (c *Conn) WriteMsgUnix(p, oob []byte, _ *net.UnixAddr) (n, oobn int, err error) {
	if n, err = c.transmit(p, oob); n > 0 {
		oobn = len(oob)
	}
	return n, oobn, err
}

// Close ends calls that wait.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return net.ErrClosed
	}
	c.closed = true
	err := unix.Close(c.fd)
	c.mu.Unlock()
	// These wait for calls that use them, which take mu. A gate that is being made is seen here, or its maker sees closed.
	c.in.f.Close()
	c.omu.Lock()
	out := c.out
	c.omu.Unlock()
	if out != nil {
		out.f.Close()
	}
	return err
}

// CloseWrite lets the peer read to an end.
func (c *Conn) CloseWrite() error {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.closed {
		return net.ErrClosed
	}
	if err := unix.Shutdown(c.fd, unix.SHUT_WR); err != nil {
		return c.fault("shutdown", err)
	}
	return nil
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.in.f.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.omu.Lock()
	defer c.omu.Unlock()
	c.wby = t
	if c.out != nil {
		return c.out.f.SetReadDeadline(t)
	}
	return nil
}

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// Listener accepts calm connections.
type Listener struct{ net.Listener }

// Accept implements net.Listener.
func (l Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if u, ok := c.(*net.UnixConn); ok {
		return From(u)
	}
	return c, nil
}
