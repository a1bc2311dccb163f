package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// disks makes the machines' writable disks: files with an ext4 in them, sparse, of the size that leaves room for the limit. mkfs runs once
// for each size; its result is copied, which is a few hundred KiB.
type disks struct {
	dir  string
	mkfs string

	mu sync.Mutex // one mkfs at a time
}

const (
	diskSuffix   = ".disk"
	masterPrefix = "master-"
	// snapshotFolder begins the name of a folder that a snapshot gathers what it keeps in.
	snapshotFolder = "snapshot-"
	mkfsTimeout    = time.Minute
	// What ext4 needs beside its inode tables, in octets.
	diskOverhead = 2 << 20
)

func newDisks(dir string) (*disks, error) {
	for _, p := range []string{"mkfs.ext4", "/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"} {
		if at, err := exec.LookPath(p); err == nil {
			return &disks{dir: dir, mkfs: at}, nil
		}
	}
	return nil, fmt.Errorf("mkfs.ext4 is not installed (package e2fsprogs): %w", sandbox.ErrUnsupported)
}

func (d *disks) path(id string) string { return filepath.Join(d.dir, id+diskSuffix) }

// diskSize is the size of a file whose file system holds limit octets: one inode for 16 KiB costs 1/64 of it.
func diskSize(limit int64) int64 { return (limit + limit/48 + diskOverhead + 1<<20 - 1) >> 20 << 20 }

// create makes a disk and opens it.
func (d *disks) create(ctx context.Context, id string, limit int64) (*os.File, error) {
	return d.createSize(ctx, id, diskSize(limit))
}

// createSize makes a disk whose file has size octets.
func (d *disks) createSize(ctx context.Context, id string, size int64) (*os.File, error) {
	master, err := d.master(ctx, size)
	if err != nil {
		return nil, fmt.Errorf("writable disk: %w", err)
	}
	defer master.Close()
	return d.createFrom(id, master)
}

// copy is a disk as it is now, in a file without a name.
func (d *disks) copy(id string) (*os.File, error) {
	from, err := os.Open(d.path(id))
	if err != nil {
		return nil, fmt.Errorf("copy the disk: %w", err)
	}
	defer from.Close()
	at := d.path(id) + ".new" // a sweep would remove it
	f, err := os.OpenFile(at, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("copy the disk: %w", err)
	}
	if err := errors.Join(os.Remove(at), copySparse(f, from)); err != nil {
		f.Close()
		return nil, fmt.Errorf("copy the disk: %w", err)
	}
	return f, nil
}

// createFrom makes a disk with what a file holds.
func (d *disks) createFrom(id string, master *os.File) (*os.File, error) {
	f, err := os.OpenFile(d.path(id), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("writable disk: %w", err)
	}
	if err := copySparse(f, master); err != nil {
		f.Close()
		os.Remove(d.path(id))
		return nil, fmt.Errorf("writable disk: %w", err)
	}
	return f, nil
}

// overlay makes an empty image of size octets over another, which takes limit octets at most; with size 0 a blank disk that fits into them.
func (d *disks) overlay(id string, size, limit int64) (*os.File, error) {
	if size == 0 {
		size = (limit - limit/64 - 1<<20) >> 20 << 20
	}
	f, err := os.OpenFile(d.path(id), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		if err = vmm.WriteOverlay(f, size, limit); err != nil {
			f.Close()
			os.Remove(d.path(id))
		}
	}
	if err != nil {
		return nil, fmt.Errorf("writable disk: %w", err)
	}
	return f, nil
}

func (d *disks) open(id string) (*os.File, error) { return os.OpenFile(d.path(id), os.O_RDWR, 0) }

func (d *disks) remove(id string) error {
	if err := os.Remove(d.path(id)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("writable disk: %w", err)
	}
	return nil
}

// usage is what the disk takes on the host, in octets.
func (d *disks) usage(id string) (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(d.path(id), &st); err != nil {
		return 0, fmt.Errorf("writable disk: %w", err)
	}
	return st.Blocks * 512, nil
}

func (d *disks) list() (ids []string, err error) {
	list, err := os.ReadDir(d.dir)
	for _, e := range list {
		if id, ok := strings.CutSuffix(e.Name(), diskSuffix); ok {
			ids = append(ids, id)
		}
	}
	return ids, err
}

func (d *disks) sweep(keep map[string]bool) error {
	ids, err := d.list()
	errs := []error{err}
	for _, id := range ids {
		if !keep[id] {
			errs = append(errs, d.remove(id))
		}
	}
	states, _ := filepath.Glob(filepath.Join(d.dir, "*"+savedSuffix+"*"))
	for _, f := range states {
		id, _, _ := strings.Cut(filepath.Base(f), savedSuffix)
		if !keep[id] {
			errs = append(errs, os.Remove(f))
		}
	}
	snapshots, _ := filepath.Glob(filepath.Join(d.dir, snapshotFolder+"*")) // that were broken off
	for _, f := range snapshots {
		errs = append(errs, os.RemoveAll(f))
	}
	list, _ := filepath.Glob(filepath.Join(d.dir, "*.new"))
	for _, f := range list {
		errs = append(errs, os.Remove(f))
	}
	return errors.Join(errs...)
}

// master is an empty disk of a size.
func (d *disks) master(ctx context.Context, size int64) (*os.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	at := filepath.Join(d.dir, masterPrefix+strconv.FormatInt(size>>20, 10))
	if f, err := os.Open(at); err == nil {
		return f, nil
	}
	tmp := at + ".new"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	defer os.Remove(tmp)
	err = f.Truncate(size)
	f.Close()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), mkfsTimeout)
	defer cancel()
	// No journal: a machine's disk does not outlive a crash of the host.
	out, err := exec.CommandContext(ctx, d.mkfs, "-q", "-F", "-m", "0", "-b", "4096", "-i", "16384", "-I", "256", "-O", "^has_journal,^resize_inode",
		"-E", "nodiscard,lazy_itable_init=1", tmp).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("mkfs.ext4: %w: %.500s", err, out)
	}
	if err := os.Rename(tmp, at); err != nil {
		return nil, err
	}
	return os.Open(at)
}

// copySparse copies what a file holds and leaves its holes. On a full disk the error is ErrExhausted.
func copySparse(to, from *os.File) error {
	st, err := from.Stat()
	if err != nil {
		return err
	}
	if err := to.Truncate(st.Size()); err != nil {
		return err
	}
	if unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil {
		return nil
	}
	for at := int64(0); at < st.Size(); {
		begin, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return nil
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(from.Fd()), begin, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		out := begin
		for begin < end {
			n, err := unix.CopyFileRange(int(from.Fd()), &begin, int(to.Fd()), &out, int(min(end-begin, 1<<30)), 0)
			if errors.Is(err, unix.ENOSPC) {
				err = fmt.Errorf("%w: %w", err, sandbox.ErrExhausted)
			}
			if err != nil {
				return err
			}
			if n == 0 {
				return errors.New("copy a disk: nothing was copied")
			}
		}
		at = end
	}
	return nil
}
