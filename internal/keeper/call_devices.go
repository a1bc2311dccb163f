package keeper

import (
	"fmt"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const maxCallDevices = 64

// inDev is where a call finds a device of the host, below its /dev: where the host has it, or by its name alone.
func inDev(node string) string {
	if at, ok := strings.CutPrefix(node, "/dev/"); ok {
		return at
	}
	return path.Base(node)
}

// checkDevices refuses what can't be a list of the host's character devices. Whether they are there shows when they are needed.
func checkDevices(nodes []string) error {
	if len(nodes) > maxCallDevices {
		return fmt.Errorf("%d devices, at most %d: %w", len(nodes), maxCallDevices, sandbox.ErrInvalid)
	}
	seen := map[string]bool{}
	for _, n := range nodes {
		at := inDev(n)
		switch {
		case !filepath.IsAbs(n) || filepath.Clean(n) != n || strings.ContainsRune(n, 0) || at == "." || at == "/" || len(n) > 200:
			return fmt.Errorf("device %.200q: want the clean absolute path of a device: %w", n, sandbox.ErrInvalid)
		case seen[at]:
			return fmt.Errorf("two devices would be /dev/%s: %w", at, sandbox.ErrInvalid)
		}
		seen[at] = true
	}
	return nil
}

// deviceDev makes a detached read-only /dev that has the given devices of the host beside what every one has. Nodes are made anew by their
// number: nothing else of the host's /dev can be reached through it.
func deviceDev(nodes []string) (fd int, err error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("/dev: %w", err)
	}
	defer unix.Close(fs)
	for _, o := range [][2]string{{"source", "dev"}, {"mode", "0755"}, {"size", "256k"}} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return -1, fsError(fs, "/dev", err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fsError(fs, "/dev", err)
	}
	fd, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, fmt.Errorf("/dev: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
			fd = -1
		}
	}()
	if err := fillDev(fd); err != nil {
		return fd, err
	}
	for _, n := range nodes {
		if err := copyDevice(fd, n); err != nil {
			return fd, err
		}
	}
	return fd, unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
}

func copyDevice(dev int, node string) error {
	var st unix.Stat_t
	if err := unix.Lstat(node, &st); err != nil {
		return fmt.Errorf("device %s: %w: %w", node, err, sandbox.ErrNotFound)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return fmt.Errorf("device %s: is no character device: %w", node, sandbox.ErrInvalid)
	}
	at := inDev(node)
	for i, c := range at {
		if c == '/' {
			if err := unix.Mkdirat(dev, at[:i], 0o755); err != nil && err != unix.EEXIST {
				return fmt.Errorf("device %s: %w", node, err)
			}
		}
	}
	return makeDevice(dev, at, st.Rdev)
}
