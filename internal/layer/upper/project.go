package upper

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Project quotas: linux/fs.h (struct fsxattr) and linux/quota.h (struct if_dqblk).
const (
	fsGetXattr = 2<<30 | 28<<16 | 'X'<<8 | 31
	fsSetXattr = 1<<30 | 28<<16 | 'X'<<8 | 32

	projectInherit = 0x200

	quotaProject = 2
	quotaGet     = 0x800007<<8 | quotaProject
	quotaSet     = 0x800008<<8 | quotaProject
	quotaBlocks  = 1 // QIF_BLIMITS
	quotaUnit    = 1024

	sysQuotactlFD = 443 // 5.14

	// Projects of ours are from firstProject on; an administrator's are small numbers.
	firstProject = 0x64730000
	lastProject  = 0x6473ffff
)

type fsxattr struct {
	Flags, ExtSize, Extents, Project, CowExtSize uint32
	_                                            [8]byte
}

type dqblk struct {
	HardBlocks, SoftBlocks, Space  uint64 // limits in KiB, space in octets
	HardInodes, SoftInodes, Inodes uint64
	BlockTime, InodeTime           uint64
	Valid, _                       uint32
}

// projects is the driver on a file system with project quotas on.
type projects struct {
	folders
	mu   sync.Mutex
	next uint32 // last project given
	used map[uint32]bool
}

func openProjects(cfg Config) (driver, error) {
	f, err := newFolders(filepath.Join(cfg.State, "projects"))
	if err != nil {
		return nil, err
	}
	// Each pool begins elsewhere, so that two on one file system do not try the same number at once.
	h := fnv.New32a()
	h.Write([]byte(f.root))
	d := &projects{folders: f, next: firstProject + h.Sum32()%(lastProject-firstProject), used: map[uint32]bool{}}
	// A kernel or a file system without quotas says so here; one where they are not on, when the first limit is set.
	if err := onFolder(f.root, func(fd uintptr) error { _, err := getQuota(fd, firstProject); return err }); err != nil {
		return nil, fmt.Errorf("the file system of %s has no project quotas: %w: %w", cfg.State, sandbox.ErrUnsupported, err)
	}
	for _, dir := range []string{f.live(""), f.trash("")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			p, err := projectOf(filepath.Join(dir, e.Name()))
			if err != nil {
				return nil, err
			}
			d.used[p] = true
		}
	}
	return d, nil
}

func getQuota(fd uintptr, project uint32) (dqblk, error) {
	var q dqblk
	_, _, e := unix.Syscall6(sysQuotactlFD, fd, quotaGet, uintptr(project), uintptr(unsafe.Pointer(&q)), 0, 0)
	if e != 0 && e != unix.ESRCH && e != unix.ENOENT { // no such project yet
		return q, e
	}
	return q, nil
}

func setQuota(fd uintptr, project uint32, limit int64) error {
	q := dqblk{HardBlocks: uint64((limit + quotaUnit - 1) / quotaUnit), Valid: quotaBlocks}
	if _, _, e := unix.Syscall6(sysQuotactlFD, fd, quotaSet, uintptr(project), uintptr(unsafe.Pointer(&q)), 0, 0); e != 0 {
		return e
	}
	return nil
}

func projectOf(path string) (uint32, error) {
	var x fsxattr
	err := onFolder(path, func(fd uintptr) error { return ioctl(fd, fsGetXattr, unsafe.Pointer(&x)) })
	return x.Project, err
}

// take finds a project that nobody uses: neither this pool nor another one on the file system, of a second host or of a dead one.
func (d *projects) take() (uint32, error) {
	for range lastProject - firstProject {
		project, ok := d.reserve()
		if !ok {
			break
		}
		var q dqblk
		err := onFolder(d.root, func(fd uintptr) (err error) {
			q, err = getQuota(fd, project)
			return err
		})
		if err == nil && q.HardBlocks == 0 && q.Space == 0 {
			return project, nil
		}
		d.give(project)
		if err != nil {
			return 0, fmt.Errorf("use of project %d: %w", project, err)
		}
	}
	return 0, fmt.Errorf("all project numbers are taken: %w", sandbox.ErrExhausted)
}

func (d *projects) reserve() (uint32, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for range lastProject - firstProject {
		if d.next++; d.next > lastProject {
			d.next = firstProject + 1
		}
		if !d.used[d.next] {
			d.used[d.next] = true
			return d.next, true
		}
	}
	return 0, false
}

func (d *projects) give(project uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.used, project)
}

func (d *projects) create(id string, r Request) (Upper, error) {
	project, err := d.take()
	if err != nil {
		return Upper{}, err
	}
	aside := d.making(fresh(id))
	if err := os.Mkdir(aside, 0o700); err != nil {
		d.give(project)
		return Upper{}, err
	}
	err = onFolder(aside, func(fd uintptr) error {
		if err := setQuota(fd, project, r.Disk); errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("project quotas are not on; mount the file system with prjquota: %w", sandbox.ErrUnsupported)
		} else if err != nil {
			return fmt.Errorf("limit project: %w: %w", sandbox.ErrUnsupported, err)
		}
		var x fsxattr
		if err := ioctl(fd, fsGetXattr, unsafe.Pointer(&x)); err != nil {
			return fmt.Errorf("project of a folder: %w: %w", sandbox.ErrUnsupported, err)
		}
		// Set on the parent of upper and work, which inherit it: with two projects a copy-up between them is EXDEV.
		x.Project, x.Flags = project, x.Flags|projectInherit
		if err := ioctl(fd, fsSetXattr, unsafe.Pointer(&x)); err != nil {
			return fmt.Errorf("project of a folder: %w: %w", sandbox.ErrUnsupported, err)
		}
		return subfolders(int(fd), aside)
	})
	if err == nil {
		err = d.place(aside, id)
	}
	if err != nil {
		d.give(project)
		return Upper{}, errors.Join(err, os.RemoveAll(aside))
	}
	return upperIn(id, d.live(id), r.Disk), nil
}

func (d *projects) quota(id string) (dqblk, error) {
	project, err := projectOf(d.live(id))
	if err != nil {
		return dqblk{}, err
	}
	var q dqblk
	err = onFolder(d.root, func(fd uintptr) error {
		q, err = getQuota(fd, project)
		return err
	})
	return q, err
}

func (d *projects) get(id string) (Upper, error) {
	q, err := d.quota(id)
	return upperIn(id, d.live(id), int64(q.HardBlocks)*quotaUnit), err
}

func (d *projects) usage(id string) (int64, error) {
	q, err := d.quota(id)
	return int64(q.Space), err
}

func (d *projects) remove(id string) error {
	_, err := d.toTrash(d.live(id), id)
	return err
}

func (d *projects) free() (int64, error) {
	n, _, err := available(d.root)
	return max(n-hostReserve, 0), err
}

func (d *projects) snapshot(string) (string, func() error, error) {
	return "", nil, noSnapshot(DriverProject)
}

func (d *projects) sweep(ctx context.Context) error {
	return d.sweepTrash(ctx, func(path string) error {
		project, err := projectOf(path)
		if err != nil {
			return err
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
		if project >= firstProject && project <= lastProject {
			if err := onFolder(d.root, func(fd uintptr) error { return setQuota(fd, project, 0) }); err != nil {
				return err
			}
		}
		d.give(project)
		return nil
	})
}

func (d *projects) close() error { return nil }

func (d *projects) abandon() error { return d.close() }

func (d *projects) describe() Description {
	return Description{Driver: DriverProject, Dir: d.root, Limit: "exact to a block; a write over it fails with EDQUOT or ENOSPC"}
}
