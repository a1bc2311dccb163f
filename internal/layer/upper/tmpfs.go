package upper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// tmpfs is the driver that keeps uppers in memory: a mount for each at live/<id>.
type tmpfs struct {
	folders
}

func openTmpfs(cfg Config) (driver, error) {
	f, err := newFolders(filepath.Join(cfg.State, "tmpfs"))
	return &tmpfs{f}, err
}

func (d *tmpfs) create(id string, r Request) (Upper, error) {
	limit, note := r.Disk, ""
	// What is written counts as the writer's memory, so with more than half of it the disk would end the sandbox.
	if half := r.Memory / 2; r.Memory > 0 && limit > half {
		note = fmt.Sprintf("disk is memory here: %d octets, half of the memory limit, instead of %d", half, limit)
		limit = half
	}
	dir := d.live(id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		if errors.Is(err, os.ErrExist) {
			return Upper{}, sandbox.ErrExists
		}
		return Upper{}, err
	}
	err := unix.Mount("dsec", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, "mode=0700,size="+strconv.FormatInt(limit, 10))
	if err != nil {
		return Upper{}, errors.Join(fmt.Errorf("mount tmpfs: %w", err), os.Remove(dir))
	}
	if err := onFolder(dir, func(fd uintptr) error { return subfolders(int(fd), dir) }); err != nil {
		return Upper{}, errors.Join(err, d.remove(id))
	}
	u := upperIn(id, dir, limit)
	u.Note = note
	return u, nil
}

func (d *tmpfs) get(id string) (Upper, error) {
	kind, _, err := mountpoint(d.live(id))
	if err != nil {
		return Upper{}, err
	}
	if kind != "tmpfs" {
		if _, err := os.Lstat(d.live(id)); err != nil {
			return Upper{}, err
		}
		return Upper{}, fmt.Errorf("its memory is gone: %w", sandbox.ErrLost)
	}
	_, total, err := available(d.live(id))
	return upperIn(id, d.live(id), total), err
}

func (d *tmpfs) remove(id string) error {
	if err := unix.Unmount(d.live(id), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return os.Remove(d.live(id))
}

func (d *tmpfs) usage(id string) (int64, error) {
	if _, err := d.get(id); err != nil {
		return 0, err
	}
	return used(d.live(id))
}

// free is half of the memory that the machine could give: the other half is what the programs need.
func (d *tmpfs) free() (int64, error) {
	n, err := availableMemory()
	return n / 2, err
}

func availableMemory() (int64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	var kib int64
	for line := range strings.Lines(string(text)) {
		if _, err := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); err == nil {
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("no MemAvailable in /proc/meminfo: %w", sandbox.ErrUnsupported)
}

func (d *tmpfs) snapshot(string) (string, func() error, error) {
	return "", nil, noSnapshot(DriverTmpfs)
}

func (d *tmpfs) sweep(context.Context) error { return nil }

// close leaves the mounts: an upper is lost with its own.
func (d *tmpfs) close() error { return nil }

func (d *tmpfs) abandon() error { return d.close() }

func (d *tmpfs) describe() Description {
	return Description{Driver: DriverTmpfs, Dir: d.root, Limit: "exact, but it is memory: at most half of the sandbox's memory limit"}
}
