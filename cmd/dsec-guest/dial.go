package main

import (
	"os"
	"strconv"
	"sync"
	"syscall"
)

// dial connects the stream to a port on the loopback, 127.0.0.1 first, then ::1. It says one octet, 0 when it is connected and 1 when
// nothing listens, and then carries octets until both sides have ended.
func dial(stream int, port string) error {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return os.NewSyscallError("port "+port, syscall.EINVAL)
	}
	to, err := connect(int(n))
	if err != nil {
		_, err := syscall.Write(stream, []byte{1})
		return err
	}
	if _, err := syscall.Write(stream, []byte{0}); err != nil {
		return err
	}
	var both sync.WaitGroup
	both.Go(func() { carry(to, stream) })
	both.Go(func() { carry(stream, to) })
	both.Wait()
	return nil
}

func connect(port int) (int, error) {
	six := &syscall.SockaddrInet6{Port: port}
	six.Addr[15] = 1
	var last error
	for _, at := range []struct {
		family int
		to     syscall.Sockaddr
	}{{syscall.AF_INET, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}}, {syscall.AF_INET6, six}} {
		fd, err := syscall.Socket(at.family, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err == nil {
			if err = syscall.Connect(fd, at.to); err == nil {
				syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
				return fd, nil
			}
			syscall.Close(fd)
		}
		last = err
	}
	return -1, last
}

// carry takes octets from one to the other until the end, and passes that on. One that takes no more ends the other's sending too.
func carry(to, from int) {
	buf := make([]byte, 64<<10)
	for {
		n, err := syscall.Read(from, buf)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		for b := buf[:n]; len(b) > 0; {
			m, err := syscall.Write(to, b)
			if err == syscall.EINTR {
				continue
			}
			if err != nil {
				syscall.Shutdown(from, syscall.SHUT_RD)
				return
			}
			b = b[m:]
		}
	}
	syscall.Shutdown(to, syscall.SHUT_WR)
}
