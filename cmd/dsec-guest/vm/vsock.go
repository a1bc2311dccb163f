package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/guest/mux"
)

// argument is a word of the kernel's command line, without its prefix.
func argument(prefix string) (string, bool) {
	text, _ := os.ReadFile("/proc/cmdline")
	for _, w := range strings.Fields(string(text)) {
		if v, ok := strings.CutPrefix(w, prefix); ok {
			return v, true
		}
	}
	return "", false
}

// vsockPort is the port that the kernel's command line names, or 0.
func vsockPort() int {
	v, _ := argument("dsec.vsock=")
	n, _ := strconv.Atoi(v)
	return n
}

// serveVsock listens for the host. A new connection takes the place of the one before: the host redials when that is gone.
func (m *machine) serveVsock(port int) error {
	l, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("vsock: %w", err)
	}
	if err := unix.Bind(l, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: uint32(port)}); err != nil {
		return fmt.Errorf("vsock port %d: %w", port, err)
	}
	if err := unix.Listen(l, 8); err != nil {
		return err
	}
	for {
		fd, from, err := unix.Accept4(l, unix.SOCK_CLOEXEC)
		if err == unix.EINTR || err == unix.ECONNABORTED {
			continue
		}
		if err != nil {
			return fmt.Errorf("vsock: accept: %w", err)
		}
		// Only the host: with a vsock loopback a process of the machine could come by.
		if a, ok := from.(*unix.SockaddrVM); !ok || a.CID != unix.VMADDR_CID_HOST {
			unix.Close(fd)
			continue
		}
		go func() {
			defer unix.Close(fd)
			mux.Serve(blocking(fd), m.accept, func() error { return io.EOF })
		}()
	}
}
