package blob

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's FUSE protocol, as far as a file system needs it that has one folder with files that never change (linux/fuse.h).
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opOpen        = 14
	opRead        = 15
	opStatfs      = 17
	opRelease     = 18
	opInit        = 26
	opOpendir     = 27
	opReaddir     = 28
	opReleasedir  = 29
	opAccess      = 34
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42

	rootNode = 1

	initAsyncRead  = 1 << 0
	initAsyncDIO   = 1 << 15
	initMaxPages   = 1 << 22
	initExt        = 1 << 30
	initHasResend  = 1 << (39 - 32) // flags2
	openDirectIO   = 1 << 0
	openKeepCache  = 1 << 1
	openNoFlush    = 1 << 5
	notifyResend   = 7
	devClone       = 0x8004e500 // FUSE_DEV_IOC_CLONE
	headerIn       = 40
	headerOut      = 16
	maxRead        = 1 << 20
	requestBuffer  = 64 << 10 // of one request; ours have names and numbers alone
	attrSeconds    = 1 << 30  // nothing ever changes
	kernelMajor    = 7
	kernelMinor    = 41
	maxBackground  = 256
	blockSize      = 4096
	maxReadPages   = maxRead / 4096
	initReplyOctet = 64
)

var le = binary.LittleEndian

// request is one request of the kernel; body is valid until its answer.
type request struct {
	op     uint32
	unique uint64
	node   uint64
	pid    uint32
	body   []byte
}

func parseRequest(b []byte) (request, error) {
	if len(b) < headerIn || int(le.Uint32(b)) != len(b) {
		return request{}, fmt.Errorf("fuse: request of %d octets says otherwise", len(b))
	}
	return request{op: le.Uint32(b[4:]), unique: le.Uint64(b[8:]), node: le.Uint64(b[16:]), pid: le.Uint32(b[32:]), body: b[headerIn:]}, nil
}

// connection is one process's end of the FUSE connection.
type connection struct {
	fd   int
	stop int // event descriptor that ends the readers
}

// reply answers a request; buf has headerOut octets of room before the n octets of the body.
func (c *connection) reply(unique uint64, errno syscall.Errno, buf []byte) error {
	le.PutUint32(buf[0:], uint32(len(buf)))
	le.PutUint32(buf[4:], uint32(-int32(errno)))
	le.PutUint64(buf[8:], unique)
	for {
		_, err := unix.Write(c.fd, buf)
		switch err {
		case unix.EINTR, unix.EAGAIN:
			continue
		case unix.ENOENT, nil: // ENOENT: nobody waits for the answer any more
			return nil
		}
		return fmt.Errorf("fuse: answer: %w", err)
	}
}

func (c *connection) fail(unique uint64, errno syscall.Errno) error {
	var h [headerOut]byte
	return c.reply(unique, errno, h[:])
}

// body returns a buffer for an answer of n octets and the part of it that is the body.
func body(n int) (buf, out []byte) {
	buf = make([]byte, headerOut+n)
	return buf, buf[headerOut:]
}

// next reads a request into buf; false when the connection has ended or was told to.
func (c *connection) next(buf []byte) ([]byte, bool, error) {
	for {
		n, err := unix.Read(c.fd, buf)
		switch {
		case err == nil && n == 0:
			return nil, false, nil
		case err == nil:
			return buf[:n], true, nil
		case err == unix.EINTR, err == unix.ENOENT: // ENOENT: the request was interrupted while it was read
			continue
		case err == unix.ENODEV: // unmounted
			return nil, false, nil
		case err != unix.EAGAIN:
			return nil, false, fmt.Errorf("fuse: read: %w", err)
		}
		poll := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}, {Fd: int32(c.stop), Events: unix.POLLIN}}
		if _, err := unix.Poll(poll, -1); err != nil && err != unix.EINTR {
			return nil, false, fmt.Errorf("fuse: wait: %w", err)
		}
		if poll[1].Revents != 0 {
			return nil, false, nil
		}
	}
}

// resend asks the kernel for all that a dead process had taken and not answered. Before 6.9 it can't.
func (c *connection) resend() error {
	var h [headerOut]byte
	le.PutUint32(h[0:], headerOut)
	le.PutUint32(h[4:], notifyResend)
	if _, err := unix.Write(c.fd, h[:]); err != nil {
		return fmt.Errorf("fuse: ask again for what is under way: %w", err)
	}
	return nil
}

// clone opens the connection a second time. What is read through it ends with an error when it is closed, as at this process's death,
// and the connection goes on.
func clone(fd int) (int, error) {
	n, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open /dev/fuse: %w", err)
	}
	from := uint32(fd)
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(n), devClone, uintptr(unsafe.Pointer(&from))); e != 0 {
		unix.Close(n)
		return -1, fmt.Errorf("clone the fuse connection: %w", e)
	}
	return n, nil
}

func putAttr(b []byte, node uint64, size int64, mode uint32) {
	le.PutUint64(b[0:], node)
	le.PutUint64(b[8:], uint64(size))
	le.PutUint64(b[16:], uint64(size+511)/512)
	le.PutUint32(b[60:], mode)
	le.PutUint32(b[64:], 1)
	le.PutUint32(b[80:], blockSize)
}

func initReply(in []byte) (out []byte, resend bool, err error) {
	if len(in) < 16 {
		return nil, false, errors.New("fuse: short INIT")
	}
	major, minor, flags := le.Uint32(in), le.Uint32(in[4:]), le.Uint32(in[12:])
	if major != kernelMajor || minor < 31 {
		return nil, false, fmt.Errorf("fuse: the kernel speaks %d.%d, want %d.31 or newer", major, minor, kernelMajor)
	}
	flags2 := uint32(0)
	if flags&initExt != 0 && len(in) >= 20 {
		flags2 = le.Uint32(in[16:])
	}
	out = make([]byte, initReplyOctet)
	le.PutUint32(out[0:], kernelMajor)
	le.PutUint32(out[4:], min(minor, kernelMinor))
	le.PutUint32(out[8:], maxRead)
	le.PutUint32(out[12:], flags&(initAsyncRead|initAsyncDIO|initMaxPages|initExt))
	le.PutUint16(out[16:], maxBackground)
	le.PutUint16(out[18:], maxBackground*3/4)
	le.PutUint32(out[20:], 4096) // writes: none
	le.PutUint32(out[24:], 1)
	le.PutUint16(out[28:], maxReadPages)
	le.PutUint32(out[32:], flags2&initHasResend)
	return out, flags2&initHasResend != 0, nil
}

// Mount makes a FUSE file system and returns its connection, for a [Server], and the mount, which is attached to no folder and ends
// with the last descriptor of it and of files on it.
func Mount() (fuse, mount *os.File, err error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open /dev/fuse: %w", err)
	}
	fuse = os.NewFile(uintptr(fd), "/dev/fuse")
	defer func() {
		if err != nil {
			fuse.Close()
		}
	}()
	fs, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, nil, fmt.Errorf("fuse file system: %w", err)
	}
	defer unix.Close(fs)
	options := [][2]string{{"source", "dsec-blobs"}, {"subtype", "dsec"}, {"fd", fmt.Sprint(fd)}, {"rootmode", "40000"}, {"user_id", "0"},
		{"group_id", "0"}, {"max_read", fmt.Sprint(maxRead)}}
	for _, o := range options {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return nil, nil, fmt.Errorf("fuse option %s: %w", o[0], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, nil, fmt.Errorf("mount fuse: %w", err)
	}
	m, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, nil, fmt.Errorf("mount fuse: %w", err)
	}
	return fuse, os.NewFile(uintptr(m), "dsec-blobs"), nil
}

// buffers are those of answers to reads.
var buffers = sync.Pool{New: func() any { b := make([]byte, headerOut+maxRead); return &b }}
