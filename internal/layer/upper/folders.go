package upper

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// folders is the layout that all drivers share: live/<id>/{upper,work}, making/ for what is not complete and for snapshots,
// both of this process alone, and trash/ for what is to be removed.
type folders struct {
	root string
}

func newFolders(root string) (folders, error) {
	f := folders{root}
	for _, d := range []string{root, f.live(""), f.making(""), f.trash("")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return f, fmt.Errorf("make %s: %w", d, err)
		}
	}
	// What an earlier process was making when it died.
	entries, err := os.ReadDir(f.making(""))
	if err != nil {
		return f, fmt.Errorf("list %s: %w", f.making(""), err)
	}
	for _, e := range entries {
		if err := os.Rename(f.making(e.Name()), f.trash(e.Name())); err != nil {
			return f, fmt.Errorf("clear %s: %w", f.making(""), err)
		}
	}
	return f, nil
}

func (f folders) live(id string) string     { return filepath.Join(f.root, "live", id) }
func (f folders) making(name string) string { return filepath.Join(f.root, "making", name) }
func (f folders) trash(name string) string  { return filepath.Join(f.root, "trash", name) }

// fresh is a name that was never used.
func fresh(id string) string {
	b := make([]byte, 8)
	rand.Read(b)
	return id + "." + hex.EncodeToString(b)
}

// toTrash moves a folder out of live or making.
func (f folders) toTrash(path, id string) (string, error) {
	to := f.trash(fresh(id))
	return to, os.Rename(path, to)
}

// place moves what was made aside to its ID.
func (f folders) place(aside, id string) error {
	err := unix.Renameat2(unix.AT_FDCWD, aside, unix.AT_FDCWD, f.live(id), unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) { // a file system without the flag
		if _, serr := os.Lstat(f.live(id)); serr == nil {
			return sandbox.ErrExists
		}
		err = os.Rename(aside, f.live(id))
	}
	if errors.Is(err, unix.EEXIST) {
		return sandbox.ErrExists
	}
	return err
}

func (f folders) list() ([]string, error) {
	entries, err := os.ReadDir(f.live(""))
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if e.Name() != probeID {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// subfolders makes upper and work in the folder at, whose path is for errors. The mode of upper becomes that of the sandbox's root.
func subfolders(at int, dir string) error {
	for _, s := range []struct {
		name string
		mode uint32
	}{{"upper", 0o755}, {"work", 0o700}} {
		if err := unix.Mkdirat(at, s.name, s.mode); err != nil {
			return &os.PathError{Op: "mkdir", Path: filepath.Join(dir, s.name), Err: err}
		}
		var st unix.Stat_t
		if unix.Fstatat(at, s.name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&0o7777 == s.mode {
			continue
		}
		if err := unix.Fchmodat(at, s.name, s.mode, 0); err != nil { // whatever the umask
			return &os.PathError{Op: "chmod", Path: filepath.Join(dir, s.name), Err: err}
		}
	}
	return nil
}

func upperIn(id, dir string, limit int64) Upper {
	return Upper{ID: id, Dir: filepath.Join(dir, "upper"), Work: filepath.Join(dir, "work"), Limit: limit}
}

// sweepTrash removes what lies in the trash. discard takes one entry away.
func (f folders) sweepTrash(ctx context.Context, discard func(path string) error) error {
	entries, err := os.ReadDir(f.trash(""))
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := discard(f.trash(e.Name())); err != nil && len(errs) < 10 {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// available is what the file system has left for root.
func available(path string) (free, total int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, 0, fmt.Errorf("statfs %s: %w", path, err)
	}
	return int64(st.Bavail) * st.Bsize, int64(st.Blocks) * st.Bsize, nil
}

func used(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, err
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize, nil
}

func noSnapshot(driver string) error {
	return fmt.Errorf("driver %s has none: %w", driver, sandbox.ErrUnsupported)
}
