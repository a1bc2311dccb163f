package container

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// dialBound is how long a connection to a sandbox's own loopback may take when the caller sets no deadline. A listener whose
// backlog is full does not answer; nothing else on a loopback takes longer than a scheduling delay.
const dialBound = 10 * time.Second

// dialIn opens a TCP connection to a port on the loopback of a network namespace: 127.0.0.1 first, then ::1. The socket is made
// inside and used outside: a socket belongs to the namespace of its birth. No resolver and no proxy variable takes part.
func dialIn(ctx context.Context, ns int, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, fmt.Errorf("dial port 0: want 1 to 65535: %w", sandbox.ErrInvalid)
	}
	ctx, cancel := context.WithTimeout(ctx, dialBound)
	defer cancel()
	v4 := &unix.SockaddrInet4{Port: int(port), Addr: [4]byte{127, 0, 0, 1}}
	conn, err := dialAddr(ctx, ns, unix.AF_INET, v4)
	if err == nil {
		return conn, nil
	}
	v6 := &unix.SockaddrInet6{Port: int(port)}
	v6.Addr[15] = 1
	conn, err6 := dialAddr(ctx, ns, unix.AF_INET6, v6)
	if err6 == nil {
		return conn, nil
	}
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("dial port %d: nothing listens on 127.0.0.1 or ::1: %w", port, sandbox.ErrNotFound)
	}
	return nil, fmt.Errorf("dial port %d: %w", port, err)
}

func dialAddr(ctx context.Context, ns, family int, to unix.Sockaddr) (net.Conn, error) {
	fd := -1
	err := inNetns(ns, func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		return err
	})
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, err
	}
	err = unix.Connect(fd, to)
	if err != nil && err != unix.EINPROGRESS && err != unix.EINTR {
		unix.Close(fd)
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "tcp") // non-blocking, so it joins the poller
	defer f.Close()                     // net.FileConn takes a descriptor of its own
	if err != nil {
		if err := waitConnected(ctx, f); err != nil {
			return nil, err
		}
	}
	return net.FileConn(f)
}

// waitConnected waits until a non-blocking connect has ended.
func waitConnected(ctx context.Context, f *os.File) error {
	if d, ok := ctx.Deadline(); ok {
		if err := f.SetWriteDeadline(d); err != nil {
			return err
		}
	}
	stop := context.AfterFunc(ctx, func() { f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var result error
	err = raw.Write(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(p, 0)
		if err == unix.EINTR || (err == nil && n == 0) {
			return false
		}
		if err != nil {
			result = err
			return true
		}
		soerr, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			result = err
		} else if soerr != 0 {
			result = syscall.Errno(soerr)
		}
		return true
	})
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded): // the poller's clock was a moment ahead of the context's
		return context.DeadlineExceeded
	}
	return errors.Join(err, result)
}
