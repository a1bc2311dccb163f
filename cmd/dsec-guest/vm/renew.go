package main

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/guest/vmwire"
)

// The kernel's ioctls on /dev/random (include/uapi/linux/random.h), which x/sys does not name.
const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

// renew makes this machine unlike the one whose saved state it was started from: what the kernel gives out as random depends on fresh
// octets of the host's from here on, and the clock is right. A kernel with VMGENID does the first by itself, Debian's cloud kernel does not.
func renew(r *vmwire.Request) error {
	if len(r.Entropy) > 0 {
		if err := reseed(r.Entropy); err != nil {
			return err
		}
	}
	if r.Now > 0 {
		if off := time.Until(time.Unix(0, r.Now)).Abs(); off > 2*time.Millisecond {
			ts := unix.NsecToTimespec(r.Now)
			if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
				return fmt.Errorf("set the clock: %w", err)
			}
		}
	}
	return nil
}

// renewID gives the sandbox of a fork another machine-id, where it has one. The sandbox wrote its tree: no link is followed.
func renewID(pid int) error {
	root, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("machine-id: %w", err)
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, "etc/machine-id", &unix.OpenHow{Flags: unix.O_RDWR | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return nil // it has none, or a link
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size < 32 || st.Size > 33 {
		return nil // not of the form
	}
	id := make([]byte, 16)
	rand.Read(id)
	if _, err := unix.Pwrite(fd, hex.AppendEncode(nil, id), 0); err != nil {
		return fmt.Errorf("machine-id: %w", err)
	}
	return nil
}

func reseed(entropy []byte) error {
	fd, err := unix.Open("/dev/urandom", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if len(entropy) > 512 {
		entropy = entropy[:512]
	}
	// struct rand_pool_info: bits, octets, then these.
	buf := binary.NativeEndian.AppendUint32(nil, uint32(8*len(entropy)))
	buf = binary.NativeEndian.AppendUint32(buf, uint32(len(entropy)))
	buf = append(buf, entropy...)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), rndAddEntropy, uintptr(unsafe.Pointer(&buf[0]))); e != 0 {
		return fmt.Errorf("add entropy: %w", e)
	}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), rndReseedCRNG, 0); e != 0 {
		return fmt.Errorf("reseed: %w", e)
	}
	return nil
}
