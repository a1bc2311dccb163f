package confine

import (
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// OwnPeer reports whether the process that opened the other end of a local socket runs as this one's user. The modes of our sockets say the same.
func OwnPeer(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	ok := false
	raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		ok = err == nil && int(cred.Uid) == os.Getuid()
	})
	return ok
}
