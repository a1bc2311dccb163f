package blob

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Probe makes a FUSE file system as the daemon's, attached to nothing, and lets it go. It reports whether the kernel can ask a new daemon
// for what a killed one had taken (6.9 and later); where it can't, reads that were under way at its death fail.
func Probe() (resend bool, err error) {
	fuse, mount, err := Mount()
	if err != nil {
		return false, err
	}
	defer fuse.Close()
	defer mount.Close()
	poll := []unix.PollFd{{Fd: int32(fuse.Fd()), Events: unix.POLLIN}}
	if n, err := unix.Poll(poll, int(time.Second/time.Millisecond)); err != nil || n == 0 {
		return false, fmt.Errorf("fuse: the kernel says nothing (%v)", err)
	}
	buf := make([]byte, requestBuffer)
	n, err := unix.Read(int(fuse.Fd()), buf)
	if err != nil {
		return false, fmt.Errorf("fuse: %w", err)
	}
	r, err := parseRequest(buf[:n])
	if err != nil || r.op != opInit {
		return false, fmt.Errorf("fuse: the first request is no INIT (%v)", err)
	}
	_, resend, err = initReply(r.body)
	return resend, err
}
