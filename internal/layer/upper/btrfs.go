package upper

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// The ioctls of linux/btrfs.h (magic 0x94) that are used here.
const (
	btrfsResize       = 1<<30 | 4096<<16 | 0x94<<8 | 3
	btrfsSubvolCreate = 1<<30 | 4096<<16 | 0x94<<8 | 14
	btrfsSnapDestroy  = 1<<30 | 4096<<16 | 0x94<<8 | 15
	btrfsTreeSearch   = 3<<30 | 4096<<16 | 0x94<<8 | 17
	btrfsInoLookup    = 3<<30 | 4096<<16 | 0x94<<8 | 18
	btrfsSnapCreateV2 = 1<<30 | 4096<<16 | 0x94<<8 | 23
	btrfsWaitSync     = 1<<30 | 8<<16 | 0x94<<8 | 22
	btrfsStartSync    = 2<<30 | 8<<16 | 0x94<<8 | 24
	btrfsFSInfo       = 2<<30 | 1024<<16 | 0x94<<8 | 31
	btrfsQuotaCtl     = 3<<30 | 16<<16 | 0x94<<8 | 40
	btrfsQgroupCreate = 1<<30 | 16<<16 | 0x94<<8 | 42
	btrfsQgroupLimit  = 2<<30 | 48<<16 | 0x94<<8 | 43
	btrfsRescanWait   = 0x94<<8 | 46

	quotaEnable       = 1
	quotaEnableSimple = 4 // 6.7

	limitMaxReferenced = 1
	fsInfoGeneration   = 2

	firstFreeObject = 256
	rootTree        = 1
	quotaTree       = 8
	keyRootItem     = 132
	keyQgroupInfo   = 242
	keyQgroupLimit  = 244
)

func ioctl(fd uintptr, request uintptr, arg unsafe.Pointer) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(arg)); e != 0 {
		return e
	}
	return nil
}

// onFolder runs do with a descriptor of the folder.
func onFolder(path string, do func(fd uintptr) error) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	return do(uintptr(fd))
}

// subvolumes is the driver on a mounted btrfs.
type subvolumes struct {
	folders
	name  string
	mount string // unmounted by close when not empty
	made  string // the pool file, when this process made it
	at    int    // descriptor of the folder of the living
	notes []string
	dead  patience
}

// lay takes the folders below root. The descriptor that it opens is close's to close.
func (d *subvolumes) lay(root string) (err error) {
	if d.folders, err = newFolders(root); err != nil {
		return err
	}
	if d.at, err = unix.Open(d.live(""), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0); err != nil {
		return &os.PathError{Op: "open", Path: d.live(""), Err: err}
	}
	return nil
}

// patience passes on those numbers of quota groups that it was first given a while ago and, in the count of transactions, before the
// last one began. A subvolume's group comes into being before the subvolume does, so one without the other may be a birth; and the
// frees of a subvolume that is gone are counted at the end of their transaction. The kernel (seen: 6.12) aborts a transaction that
// misses a group, and the pool is read-only for all. The numbers are never used again.
type patience struct {
	mu    sync.Mutex
	since map[uint64]sighting
}

type sighting struct {
	at         time.Time
	generation uint64 // of the transaction that was begun last
}

const (
	birthTime  = 2 * time.Second
	commitTime = 10 * time.Second // two commits in that time let all go, so sweeps under load do not ask for more
)

// filter also returns those that wait for nothing but the end of a transaction, which may be half a minute away or, in a pool that
// nobody uses, never come: the caller commits first.
func (p *patience) filter(ids []uint64, now time.Time, generation uint64) (old, stuck []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := make(map[uint64]sighting, len(ids))
	for _, id := range ids {
		s, ok := p.since[id]
		if !ok {
			s = sighting{now, generation}
		}
		switch next[id] = s; {
		case now.Sub(s.at) < birthTime:
		case generation >= s.generation+2: // the next one begins while one still ends, the next but one does not
			old = append(old, id)
		case now.Sub(s.at) >= commitTime:
			stuck = append(stuck, id)
		}
	}
	p.since = next
	return old, stuck
}

// openSubvolumes takes the state folder's own file system, but only with quotas that are on already: they are the owner's
// choice, for all of that file system.
func openSubvolumes(cfg Config) (driver, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(cfg.State, &st); err != nil {
		return nil, fmt.Errorf("statfs %s: %w", cfg.State, err)
	}
	if uint32(st.Type) != unix.BTRFS_SUPER_MAGIC {
		return nil, fmt.Errorf("%s is not on btrfs: %w", cfg.State, sandbox.ErrUnsupported)
	}
	d := &subvolumes{name: DriverSubvolume, at: -1}
	if err := d.lay(filepath.Join(cfg.State, "subvolumes")); err != nil {
		return nil, err
	}
	return d, nil
}

func openPoolFile(ctx context.Context, cfg Config, log *slog.Logger) (driver, error) {
	mount, file := filepath.Join(cfg.State, "pool"), filepath.Join(cfg.State, "pool.btrfs")
	if err := os.MkdirAll(mount, 0o700); err != nil {
		return nil, fmt.Errorf("make pool folder: %w", err)
	}
	d := &subvolumes{name: DriverPool, mount: mount, at: -1}
	kind, source, err := mountpoint(mount)
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	if kind == "" {
		fresh, err := mountPool(ctx, cfg, file, mount, log)
		if err != nil {
			return nil, err
		}
		if fresh {
			d.made = file
		}
	} else {
		if kind != "btrfs" {
			return nil, fmt.Errorf("%s: %s of type %s is mounted there: %w", mount, source, kind, sandbox.ErrState)
		}
		if dev, err := findLoop(file); err != nil || dev != source {
			return nil, fmt.Errorf("%s: %s is mounted there, not the pool file (%s, %v): %w", mount, source, dev, err, sandbox.ErrState)
		}
		log.Info("pool was mounted already", "mount", mount, "device", source)
	}
	if err := d.setUp(); err != nil {
		return nil, errors.Join(err, d.abandon())
	}
	if err := d.grow(cfg, file); err != nil {
		// The pool as it was goes on.
		d.notes = append(d.notes, err.Error())
	}
	return d, nil
}

func (d *subvolumes) setUp() error {
	if err := os.Chmod(d.mount, 0o700); err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	return onFolder(d.mount, func(fd uintptr) error {
		simple := [2]uint64{quotaEnableSimple}
		serr := ioctl(fd, btrfsQuotaCtl, unsafe.Pointer(&simple))
		if serr != nil {
			ordinary := [2]uint64{quotaEnable}
			if err := ioctl(fd, btrfsQuotaCtl, unsafe.Pointer(&ordinary)); err != nil {
				return fmt.Errorf("enable quotas: %w: %w", sandbox.ErrUnsupported, err)
			}
			if err := ioctl(fd, btrfsRescanWait, nil); err != nil {
				return fmt.Errorf("count for quotas: %w", err)
			}
			d.notes = append(d.notes, fmt.Sprintf("ordinary quota groups, dearer than simple ones (%v)", serr))
		}
		return d.lay(d.mount)
	})
}

func poolSize(cfg Config) (int64, error) {
	if cfg.Size != 0 {
		return cfg.Size / poolStep * poolStep, nil
	}
	free, _, err := available(cfg.State)
	if err != nil {
		return 0, err
	}
	size := min(int64(defaultPoolSize), free/2) / poolStep * poolStep
	if size < minPoolSize {
		return 0, fmt.Errorf("pool: %d octets are free on the file system of %s; half of them is less than %d: %w", free, cfg.State, minPoolSize, sandbox.ErrExhausted)
	}
	return size, nil
}

// mountPool mounts the pool file, which is made when it is missing or broken.
func mountPool(ctx context.Context, cfg Config, file, mount string, log *slog.Logger) (bool, error) {
	for attempt := 0; ; attempt++ {
		fresh, err := makePool(ctx, cfg, file)
		if err != nil {
			return false, err
		}
		dev, err := attachLoop(file)
		if err == nil {
			// nodiscard: since 6.2 btrfs discards by itself where it can, and a loop device turns that into holes in the file.
			err = unix.Mount(dev.Name(), mount, "btrfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOATIME, "nodiscard")
			dev.Close() // a mount holds the device; without one this detaches it
		}
		if err == nil {
			return fresh, nil
		}
		if errors.Is(err, unix.ENODEV) {
			err = fmt.Errorf("this kernel has no btrfs: %w: %w", sandbox.ErrUnsupported, err)
		}
		if fresh {
			return false, errors.Join(fmt.Errorf("mount pool: %w", err), os.Remove(file))
		}
		if attempt > 0 || !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EIO) && !errors.Is(err, unix.EUCLEAN) {
			return false, fmt.Errorf("mount pool: %w", err)
		}
		// After a crash of the machine: the uppers in it are lost with their sandboxes.
		log.Warn("pool file can't be mounted and is made anew", "file", file, "error", err)
		if err := os.Remove(file); err != nil {
			return false, fmt.Errorf("remove broken pool: %w", err)
		}
	}
}

// makePool makes the file under another name first, so that one without a file system is never mounted.
func makePool(ctx context.Context, cfg Config, file string) (bool, error) {
	if _, err := os.Stat(file); err == nil {
		return false, nil
	}
	size, err := poolSize(cfg)
	if err != nil {
		return false, err
	}
	tool, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		return false, fmt.Errorf("mkfs.btrfs is not installed (package btrfs-progs): %w", sandbox.ErrUnsupported)
	}
	half := file + ".new"
	if err := os.Remove(half); err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, fmt.Errorf("pool: %w", err)
	}
	if err := allocate(half, size); err != nil {
		os.Remove(half)
		return false, fmt.Errorf("pool: %w", err)
	}
	// -K: do not discard, that would make holes. The pool does not outlive a disk, so one copy of its metadata is enough.
	out, err := exec.CommandContext(ctx, tool, "-q", "-f", "-K", "-L", "dsec-pool", "-m", "single", "-d", "single", half).CombinedOutput()
	if err != nil {
		os.Remove(half)
		return false, fmt.Errorf("mkfs.btrfs: %w: %.500s", err, out)
	}
	var st unix.Stat_t
	if err := unix.Stat(half, &st); err != nil {
		return false, fmt.Errorf("pool: %w", err)
	}
	if st.Blocks*512 < size {
		os.Remove(half)
		return false, fmt.Errorf("pool: %d of %d octets have a place on disk; its file system makes holes: %w", st.Blocks*512, size, sandbox.ErrUnsupported)
	}
	if err := os.Rename(half, file); err != nil {
		return false, fmt.Errorf("pool: %w", err)
	}
	return true, nil
}

// grow makes the pool as large as configured; it never shrinks.
func (d *subvolumes) grow(cfg Config, file string) error {
	st, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	want := cfg.Size / poolStep * poolStep
	if want > st.Size() {
		if err := allocate(file, want); err != nil {
			return fmt.Errorf("grow pool: %w", err)
		}
	} else if want != 0 && want < st.Size() {
		d.notes = append(d.notes, fmt.Sprintf("the pool has %d octets and does not shrink to %d", st.Size(), want))
	}
	dev, err := findLoop(file)
	if err != nil || dev == "" {
		return fmt.Errorf("grow pool: its loop device is not found (%v): %w", err, sandbox.ErrState)
	}
	f, err := os.OpenFile(dev, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("grow pool: %w", err)
	}
	defer f.Close()
	// Also when an earlier process died in between: both do nothing when there is nothing to do.
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return fmt.Errorf("grow pool: %w", err)
	}
	return onFolder(d.mount, func(fd uintptr) error {
		arg := volumeArgs("max")
		if err := ioctl(fd, btrfsResize, unsafe.Pointer(&arg)); err != nil {
			return fmt.Errorf("grow pool: %w", err)
		}
		return nil
	})
}

// volumeArgs is struct btrfs_ioctl_vol_args.
func volumeArgs(name string) [4096]byte {
	var b [4096]byte
	copy(b[8:4095], name)
	return b
}

// create makes the subvolume where it is to lie: a rename of one costs as much as the making. What a process leaves half-made when it
// dies is listed as an upper that no sandbox has.
func (d *subvolumes) create(id string, r Request) (Upper, error) {
	arg := volumeArgs(id)
	if err := ioctl(uintptr(d.at), btrfsSubvolCreate, unsafe.Pointer(&arg)); err != nil {
		if errors.Is(err, unix.EEXIST) {
			return Upper{}, sandbox.ErrExists
		}
		return Upper{}, fmt.Errorf("make subvolume: %w", err)
	}
	if err := d.furnish(id, r); err != nil {
		return Upper{}, errors.Join(err, d.destroy(id))
	}
	return upperIn(id, d.live(id), r.Disk), nil
}

func (d *subvolumes) furnish(id string, r Request) error {
	fd, err := unix.Openat(d.at, id, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: d.live(id), Err: err}
	}
	defer unix.Close(fd)
	// struct btrfs_ioctl_qgroup_limit_args; group 0 is the subvolume's own.
	limit := [6]uint64{0, limitMaxReferenced, uint64(r.Disk)}
	if err := ioctl(uintptr(fd), btrfsQgroupLimit, unsafe.Pointer(&limit)); err != nil {
		return fmt.Errorf("limit subvolume: %w: %w", sandbox.ErrUnsupported, err)
	}
	return subfolders(fd, d.live(id))
}

func (d *subvolumes) get(id string) (Upper, error) {
	var limit int64
	err := onFolder(d.live(id), func(fd uintptr) error {
		tree, err := treeOf(fd)
		if err != nil {
			return err
		}
		return search(fd, quotaTree, keyQgroupLimit, tree, tree, func(_, _ uint64, item []byte) {
			if len(item) >= 16 {
				limit = int64(binary.LittleEndian.Uint64(item[8:])) // flags, max_rfer, ...
			}
		})
	})
	return upperIn(id, d.live(id), limit), err
}

// remove deletes at once, also in a full pool: the kernel keeps some room for deletions. The trash is for what it refuses.
func (d *subvolumes) remove(id string) error {
	err := d.destroy(id)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return err
	}
	if _, terr := d.toTrash(d.live(id), id); terr != nil {
		return errors.Join(err, terr)
	}
	return nil // sweep tries again and reports
}

// destroy deletes a living subvolume; the kernel frees its space in the background.
func (d *subvolumes) destroy(id string) error {
	arg := volumeArgs(id)
	if err := ioctl(uintptr(d.at), btrfsSnapDestroy, unsafe.Pointer(&arg)); err != nil {
		return &os.PathError{Op: "delete subvolume", Path: d.live(id), Err: err}
	}
	return nil
}

// discard deletes a subvolume anywhere; one that is not there is no error.
func (d *subvolumes) discard(path string) error {
	return onFolder(filepath.Dir(path), func(fd uintptr) error {
		arg := volumeArgs(filepath.Base(path))
		if err := ioctl(fd, btrfsSnapDestroy, unsafe.Pointer(&arg)); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("delete subvolume %s: %w", path, err)
		}
		return nil
	})
}

func (d *subvolumes) usage(id string) (int64, error) {
	var n int64
	err := onFolder(d.live(id), func(fd uintptr) error {
		tree, err := treeOf(fd)
		if err != nil {
			return err
		}
		return search(fd, quotaTree, keyQgroupInfo, tree, tree, func(_, _ uint64, item []byte) {
			if len(item) >= 16 {
				n = int64(binary.LittleEndian.Uint64(item[8:])) // generation, rfer, ...
			}
		})
	})
	return n, err
}

func (d *subvolumes) free() (int64, error) {
	n, _, err := available(d.root)
	return n, err
}

// snapshot is not marked read-only: such a subvolume can't be moved, and a restart moves what is left into the trash.
func (d *subvolumes) snapshot(id string) (string, func() error, error) {
	aside := d.making(fresh(id))
	err := onFolder(d.live(id), func(source uintptr) error {
		return onFolder(d.making(""), func(fd uintptr) error {
			var arg [4096]byte // struct btrfs_ioctl_vol_args_v2
			binary.NativeEndian.PutUint64(arg[0:], uint64(source))
			copy(arg[56:4095], filepath.Base(aside))
			return ioctl(fd, btrfsSnapCreateV2, unsafe.Pointer(&arg))
		})
	})
	if err != nil {
		return "", nil, err
	}
	return filepath.Join(aside, "upper"), func() error { return d.discard(aside) }, nil
}

func (d *subvolumes) sweep(ctx context.Context) error { return d.sweepTrash(ctx, d.discard) }

// tidy removes the quota groups of subvolumes that are gone: before 6.12 the kernel keeps them, and each makes every commit longer.
// It reads all that there are.
func (d *subvolumes) tidy(ctx context.Context) error {
	return onFolder(d.root, func(fd uintptr) error {
		generation, err := generation(fd) // first: what is read below is at least as new
		if err != nil {
			return err
		}
		alive, err := roots(fd)
		if err != nil {
			return err
		}
		var orphans []uint64
		if err := search(fd, quotaTree, keyQgroupInfo, firstFreeObject, 1<<48-1, func(_, offset uint64, _ []byte) {
			if !alive[offset] {
				orphans = append(orphans, offset)
			}
		}); err != nil {
			return err
		}
		dead, stuck := d.dead.filter(orphans, time.Now(), generation)
		if len(stuck) > 0 {
			if err := commit(fd); err != nil {
				return err
			}
			if alive, err = roots(fd); err != nil { // what was being born is born now
				return err
			}
			dead = append(dead, slices.DeleteFunc(stuck, func(id uint64) bool { return alive[id] })...)
		}
		for _, id := range dead {
			arg := [2]uint64{0, id}                                // create = 0
			_ = ioctl(fd, btrfsQgroupCreate, unsafe.Pointer(&arg)) // busy while a snapshot has its extents: another time
		}
		return ctx.Err()
	})
}

// roots are the subvolumes there are.
func roots(fd uintptr) (map[uint64]bool, error) {
	alive := map[uint64]bool{}
	return alive, search(fd, rootTree, keyRootItem, 0, math.MaxUint64, func(object, _ uint64, _ []byte) { alive[object] = true })
}

// generation is the number of the transaction that was begun last.
func generation(fd uintptr) (uint64, error) {
	var info [1024]byte // struct btrfs_ioctl_fs_info_args: ..., flags at 48, generation at 56
	binary.NativeEndian.PutUint64(info[48:], fsInfoGeneration)
	if err := ioctl(fd, btrfsFSInfo, unsafe.Pointer(&info)); err != nil {
		return 0, fmt.Errorf("read the pool's generation: %w", err)
	}
	return binary.NativeEndian.Uint64(info[56:]), nil
}

// commit ends the transaction that runs, without writing back what files hold.
func commit(fd uintptr) error {
	var transaction uint64
	err := ioctl(fd, btrfsStartSync, unsafe.Pointer(&transaction))
	if err == nil {
		err = ioctl(fd, btrfsWaitSync, unsafe.Pointer(&transaction))
	}
	if err != nil {
		return fmt.Errorf("commit in the pool: %w", err)
	}
	return nil
}

func (d *subvolumes) close() error {
	if d.at >= 0 {
		unix.Close(d.at)
		d.at = -1
	}
	if d.mount == "" {
		return nil
	}
	return unmount(d.mount)
}

func (d *subvolumes) abandon() error {
	err := d.close()
	if d.made != "" {
		err = errors.Join(err, os.Remove(d.made))
	}
	return err
}

func unmount(path string) error {
	err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EBUSY) {
		// A sandbox or a shell is in it: it goes when they do, and the loop device with it.
		err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
	}
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return nil
}

func (d *subvolumes) describe() Description {
	_, total, _ := available(d.root)
	limit := "exact, file contents and metadata; a write over it fails with EDQUOT"
	return Description{Driver: d.name, Dir: d.root, Total: total, Snapshots: true, Limit: limit, Notes: d.notes}
}

// treeOf is the number of the subvolume that a folder is in.
func treeOf(fd uintptr) (uint64, error) {
	var arg [4096]byte // struct btrfs_ioctl_ino_lookup_args: treeid, objectid, name
	binary.NativeEndian.PutUint64(arg[8:], firstFreeObject)
	if err := ioctl(fd, btrfsInoLookup, unsafe.Pointer(&arg)); err != nil {
		return 0, fmt.Errorf("find subvolume: %w", err)
	}
	return binary.NativeEndian.Uint64(arg[0:]), nil
}

// search calls each for the items of one type in a tree. For the quota tree the range is of offsets (the group), for the root
// tree of objects.
func search(fd uintptr, tree uint64, kind uint32, low, high uint64, each func(object, offset uint64, item []byte)) error {
	byObject := tree == rootTree
	minObject, maxObject, minOffset, maxOffset := uint64(0), uint64(0), low, high
	if byObject {
		minObject, maxObject, minOffset, maxOffset = low, high, 0, math.MaxUint64
	}
	minType := kind
	const keySize, headerSize = 104, 32
	for {
		// struct btrfs_ioctl_search_key: tree, objects, offsets, transactions (from, to), types, count.
		var arg [4096]byte
		ne := binary.NativeEndian
		for i, v := range []uint64{tree, minObject, maxObject, minOffset, maxOffset, 0, math.MaxUint64} {
			ne.PutUint64(arg[8*i:], v)
		}
		ne.PutUint32(arg[56:], minType)
		ne.PutUint32(arg[60:], kind)
		ne.PutUint32(arg[64:], 4096)
		if err := ioctl(fd, btrfsTreeSearch, unsafe.Pointer(&arg)); err != nil {
			return fmt.Errorf("search tree %d: %w", tree, err)
		}
		n := ne.Uint32(arg[64:])
		if n == 0 {
			return nil
		}
		at := keySize
		for range n {
			if at+headerSize > len(arg) {
				return nil
			}
			// struct btrfs_ioctl_search_header: transaction, object, offset, type, length.
			object, offset := ne.Uint64(arg[at+8:]), ne.Uint64(arg[at+16:])
			got, size := ne.Uint32(arg[at+24:]), int(ne.Uint32(arg[at+28:]))
			at += headerSize
			if at+size > len(arg) {
				return nil
			}
			// The range is of whole keys, so items of other types lie between its ends.
			if got == kind {
				each(object, offset, arg[at:at+size])
			}
			at += size
			minObject, minType, minOffset = object, got, offset+1
		}
		if minOffset == 0 { // the last offset there is
			if minType++; minType > 255 {
				minObject, minType = minObject+1, 0
			}
		}
	}
}
