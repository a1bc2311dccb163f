package upper

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	loopAttempts  = 64
	noCopyOnWrite = 0x00800000 // FS_NOCOW_FL of linux/fs.h
)

// attachLoop gives the file a loop device, or finds the one it has: two for one file would destroy what is on it. The device
// detaches itself when its last user is gone; until it is mounted that is the returned file.
func attachLoop(file string) (*os.File, error) {
	if dev, err := findLoop(file); err != nil || dev != "" {
		if err != nil {
			return nil, err
		}
		f, err := os.OpenFile(dev, os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", dev, err)
		}
		return f, nil
	}
	backing, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer backing.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("no loop devices: %w: %w", sandbox.ErrUnsupported, err)
	}
	defer control.Close()
	for range loopAttempts {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("get a loop device: %w: %w", sandbox.ErrUnsupported, err)
		}
		dev, err := os.OpenFile("/dev/loop"+strconv.Itoa(n), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("open loop device %d: %w: %w", n, sandbox.ErrUnsupported, err)
		}
		// Direct: what is in the page cache of the file system on it need not be in the backing file's as well.
		c := unix.LoopConfig{Fd: uint32(backing.Fd())}
		c.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
		copy(c.Info.File_name[:], filepath.Base(file))
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &c)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) { // EBUSY: another process took it
			return nil, fmt.Errorf("attach loop device %d: %w: %w", n, sandbox.ErrUnsupported, err)
		}
	}
	return nil, fmt.Errorf("get a loop device: all are taken at once: %w", sandbox.ErrExhausted)
}

// findLoop returns the loop device whose backing file this is.
func findLoop(file string) (string, error) {
	want, err := os.Stat(file)
	if err != nil {
		return "", err
	}
	list, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return "", err
	}
	for _, l := range list {
		name, err := os.ReadFile(l)
		if err != nil {
			continue // detached meanwhile
		}
		dev := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(l)))
		if strings.TrimSuffix(string(name), "\n") == file {
			return dev, nil
		}
		// The name is as the attaching process saw it; the inode is what counts.
		f, err := os.Open(dev)
		if err != nil {
			continue
		}
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		f.Close()
		if st, ok := want.Sys().(*syscall.Stat_t); ok && err == nil && info.Device == st.Dev && info.Inode == st.Ino {
			return dev, nil
		}
	}
	return "", nil
}

// mountpoint reports what is mounted at a path: its type and source.
func mountpoint(path string) (kind, source string, err error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", "", err
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		// ID parent major:minor root mountpoint options optional... - type source superoptions
		before, after, ok := strings.Cut(s.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if ok && len(left) > 4 && len(right) > 1 && unescape(left[4]) == path {
			kind, source = right[0], unescape(right[1]) // the last one is on top
		}
	}
	return kind, source, s.Err()
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// allocate makes or grows a file so that every octet has its place on disk, or refuses and leaves it as it was.
func allocate(file string, size int64) error {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	old := st.Size()
	if old == 0 {
		// On btrfs a file that is copied on write has no place of its own; elsewhere the flag does not exist.
		if flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS); err == nil {
			unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(flags|noCopyOnWrite))
		}
	}
	if size <= old {
		return nil
	}
	free, _, err := available(filepath.Dir(file))
	if err != nil {
		return err
	}
	if size-old > free-hostReserve {
		return fmt.Errorf("%s: %d octets more do not fit: %d are free and %d of these stay so; set a smaller size or free some: %w", file, size-old, free, int64(hostReserve), sandbox.ErrExhausted)
	}
	if err := unix.Fallocate(int(f.Fd()), 0, old, size-old); err != nil {
		f.Truncate(old)
		if errors.Is(err, unix.EOPNOTSUPP) {
			return fmt.Errorf("%s: its file system can't allocate ahead: %w: %w", file, sandbox.ErrUnsupported, err)
		}
		return fmt.Errorf("allocate %s: %w", file, full(err))
	}
	return f.Sync()
}
