package upper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// images is the driver with an ext4 of its own for each sandbox: live/<id>/{image,mount}. An image is allocated in full.
type images struct {
	folders
	mkfs string
}

const (
	imageOverhead = 1 << 20 // superblocks, bitmaps and the first folders of a small image
	mkfsTimeout   = 5 * time.Minute
)

func openImages(cfg Config) (driver, error) {
	mkfs, err := exec.LookPath("mkfs.ext4")
	if err != nil {
		return nil, fmt.Errorf("mkfs.ext4 is not installed (package e2fsprogs): %w", sandbox.ErrUnsupported)
	}
	f, err := newFolders(filepath.Join(cfg.State, "images"))
	return &images{f, mkfs}, err
}

func (d *images) create(id string, r Request) (Upper, error) {
	if _, err := os.Lstat(d.live(id)); err == nil {
		return Upper{}, sandbox.ErrExists
	}
	aside := d.making(fresh(id))
	if err := os.MkdirAll(filepath.Join(aside, "mount"), 0o700); err != nil {
		return Upper{}, err
	}
	err := d.fill(filepath.Join(aside, "image"), r.Disk)
	if err == nil {
		err = d.place(aside, id)
	}
	if err != nil {
		return Upper{}, errors.Join(err, os.RemoveAll(aside))
	}
	u, err := d.mount(id, r.Disk)
	if err != nil {
		return Upper{}, errors.Join(err, d.remove(id))
	}
	return u, nil
}

func (d *images) fill(image string, limit int64) error {
	// One inode for 16 KiB costs 1/64 of the image.
	if err := allocate(image, (limit+limit/48+imageOverhead)/4096*4096); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), mkfsTimeout)
	defer cancel()
	// No journal: an upper does not outlive a crash of the machine. nodiscard keeps the image's blocks.
	out, err := exec.CommandContext(ctx, d.mkfs, "-q", "-F", "-m", "0", "-b", "4096", "-i", "16384", "-I", "256", "-O", "^has_journal,^resize_inode",
		"-E", "nodiscard,lazy_itable_init=1", image).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mkfs.ext4: %w: %.500s", err, out)
	}
	return nil
}

// mount mounts an image where it belongs, unless it is.
func (d *images) mount(id string, limit int64) (Upper, error) {
	dir := filepath.Join(d.live(id), "mount")
	if limit == 0 {
		st, err := os.Stat(filepath.Join(d.live(id), "image"))
		if err != nil {
			return Upper{}, err
		}
		limit = (st.Size() - imageOverhead) / 49 * 48
	}
	kind, _, err := mountpoint(dir)
	if err != nil {
		return Upper{}, err
	}
	if kind == "" {
		dev, err := attachLoop(filepath.Join(d.live(id), "image"))
		if err != nil {
			return Upper{}, err
		}
		err = unix.Mount(dev.Name(), dir, "ext4", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, "nodiscard,errors=continue")
		dev.Close()
		if err != nil {
			return Upper{}, fmt.Errorf("mount image: %w", err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, "upper")); errors.Is(err, os.ErrNotExist) {
		if err := onFolder(dir, func(fd uintptr) error { return subfolders(int(fd), dir) }); err != nil {
			return Upper{}, err
		}
	}
	return upperIn(id, dir, limit), nil
}

func (d *images) get(id string) (Upper, error) {
	if _, err := os.Lstat(d.live(id)); err != nil {
		return Upper{}, err
	}
	return d.mount(id, 0)
}

func (d *images) remove(id string) error {
	if err := unix.Unmount(filepath.Join(d.live(id), "mount"), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	_, err := d.toTrash(d.live(id), id)
	return err
}

func (d *images) usage(id string) (int64, error) {
	dir := filepath.Join(d.live(id), "mount")
	if kind, _, err := mountpoint(dir); err != nil || kind == "" {
		if err == nil {
			err = os.ErrNotExist
		}
		return 0, err
	}
	return used(dir)
}

func (d *images) free() (int64, error) {
	n, _, err := available(d.root)
	return max(n-hostReserve, 0), err
}

func (d *images) snapshot(string) (string, func() error, error) {
	return "", nil, noSnapshot(DriverImage)
}

func (d *images) sweep(ctx context.Context) error { return d.sweepTrash(ctx, os.RemoveAll) }

func (d *images) close() error {
	list, err := d.list()
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range list {
		errs = append(errs, unmount(filepath.Join(d.live(id), "mount")))
	}
	return errors.Join(errs...)
}

func (d *images) abandon() error { return d.close() }

func (d *images) describe() Description {
	return Description{Driver: DriverImage, Dir: d.root,
		Limit: "about 3% off, as the image's own metadata counts; a write over it fails with ENOSPC; the limit is taken from the disk at once"}
}
