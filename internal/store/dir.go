package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	draftFolder = ".drafts" // can't be a key
	// A draft that nobody wrote for this long belongs to a process that died.
	draftAge = 24 * time.Hour
	// A draft younger than this may be one that is not locked yet.
	draftYoung = 5 * time.Second
	// Before the mark of the machine in a draft's name, when it is not part of a copy.
	draftPrefix = "d-"
)

// Dir is a store in a folder, which may be on a cluster file system (docs/format/store.md says what it needs of one). An error that such a
// file system gives while one of its servers is replaced is waited out, for about ten seconds; only a failed fsync is final, since what it should
// have written is gone. Dir has no locks.
type Dir struct {
	root string
}

var _ Store = (*Dir)(nil)

// NewDir opens the store in the folder, which is made when it is missing, and removes drafts that were left behind: at
// once those of this machine's processes that died, others when they are a day old.
func NewDir(root string) (*Dir, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("store folder: %w", err)
	}
	drafts := filepath.Join(root, draftFolder)
	ctx := context.Background()
	if err := patient(ctx, func() error { return os.MkdirAll(drafts, 0o700) }); err != nil {
		return nil, fmt.Errorf("make store folder: %w", err)
	}
	var entries []fs.DirEntry
	if err := patient(ctx, func() (err error) {
		entries, err = os.ReadDir(drafts)
		return err
	}); err != nil {
		return nil, fmt.Errorf("list drafts: %w", err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err == nil && (time.Since(info.ModTime()) > draftAge || time.Since(info.ModTime()) > draftYoung && orphaned(drafts, e.Name())) {
			os.Remove(filepath.Join(drafts, e.Name()))
		}
	}
	return &Dir{root: root}, nil
}

func (d *Dir) file(key string) string { return filepath.Join(d.root, filepath.FromSlash(key)) }

// Path gives the object's file, whether it exists or not.
func (d *Dir) Path(key string) (string, bool) {
	if CheckKey(key) != nil {
		return "", false
	}
	return d.file(key), true
}

type draft struct {
	*os.File
	dir     *Dir
	done    bool
	unknown int64 // octets written since the free space was looked at
	at, end int64 // where Write goes on, and the length so far
}

const (
	// Free space of the file system that drafts do not touch: at most reserve, and no more than a twentieth of all.
	reserve    = 1 << 30
	checkEvery = 64 << 20
)

// room refuses to fill the file system to the last octet: others on it must go on.
func (w *draft) room(n int) error {
	w.unknown += int64(n)
	if w.unknown < checkEvery {
		return nil
	}
	w.unknown = 0
	var st syscall.Statfs_t
	if err := syscall.Fstatfs(int(w.Fd()), &st); err != nil {
		return nil // the write will tell
	}
	keep := min(reserve, int64(st.Blocks)*st.Bsize/20)
	if free := int64(st.Bavail) * st.Bsize; free < keep+checkEvery {
		return fmt.Errorf("store: %d octets are free on its file system and %d of these stay so: %w", free, keep, sandbox.ErrExhausted)
	}
	return nil
}

// Create starts a draft.
func (d *Dir) Create(ctx context.Context) (Draft, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var f *os.File
	err := patient(ctx, func() (err error) {
		f, err = os.CreateTemp(filepath.Join(d.root, draftFolder), draftPrefix+machine()+"-*")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create draft: %w", full(err))
	}
	// Where there are no locks its age tells that nobody writes it any more.
	syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	return &draft{File: f, dir: d}, nil
}

func (w *draft) Write(p []byte) (int, error) {
	n, err := w.WriteAt(p, w.at)
	w.at += int64(n)
	return n, err
}

func (w *draft) WriteAt(p []byte, off int64) (int, error) {
	if err := w.room(len(p)); err != nil {
		return 0, err
	}
	done := 0
	err := patient(context.Background(), func() error {
		n, err := w.File.WriteAt(p[done:], off+int64(done))
		done += n
		return err
	})
	w.end = max(w.end, off+int64(done))
	return done, full(err)
}

func (w *draft) Truncate(size int64) error {
	err := patient(context.Background(), func() error { return w.File.Truncate(size) })
	if err == nil {
		w.end = size
	}
	return full(err)
}

// WriteString and ReadFrom of os.File would go past Write.
func (w *draft) WriteString(s string) (int, error) { return w.Write([]byte(s)) }

func (w *draft) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{w}, r)
}

func (w *draft) Publish(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if w.done {
		return fmt.Errorf("publish %s: the draft has ended: %w", key, sandbox.ErrState)
	}
	if err := w.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", key, full(err))
	}
	if err := w.settled(ctx); err != nil {
		return fmt.Errorf("publish %s: %w", key, err)
	}
	if err := patient(ctx, func() error { return w.Chmod(0o444) }); err != nil {
		return fmt.Errorf("publish %s: %w", key, err)
	}
	name := w.Name()
	if err := w.Close(); err != nil { // an NFS server reports a full disk here
		return fmt.Errorf("close %s: %w", key, full(err))
	}
	w.done = true
	err := w.dir.makeParents(ctx, path.Dir(key))
	if err == nil {
		err = w.dir.rename(ctx, name, w.dir.file(key), w.end)
	}
	if err != nil {
		os.Remove(name)
		return fmt.Errorf("publish %s: %w", key, full(err))
	}
	return syncDir(ctx, filepath.Dir(w.dir.file(key)))
}

// settled waits until the file has the length that was written: some file systems know it only some time after the fsync.
func (w *draft) settled(ctx context.Context) error {
	return patient(ctx, func() error {
		n, err := length(w.File)
		if err == nil && n != w.end {
			err = fmt.Errorf("the file has %d octets after %d were written: %w", n, w.end, syscall.EAGAIN)
		}
		return err
	})
}

// rename moves a draft to its place. One whose answer was lost has been done; the new name can then stay hidden for some seconds, as the kernel
// remembers that there was none.
func (d *Dir) rename(ctx context.Context, from, to string, size int64) error {
	return patient(ctx, func() error {
		err := os.Rename(from, to)
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		// Already at the first attempt: the kernel itself repeats a rename that failed with ESTALE.
		if st, err := os.Stat(to); err == nil && st.Size() == size {
			return nil
		}
		return fmt.Errorf("%w, and not yet there under its new name: %w", err, syscall.EAGAIN)
	})
}

func (w *draft) Discard() error {
	if w.done {
		return nil
	}
	w.done = true
	w.Close()
	if err := os.Remove(w.Name()); err != nil {
		return fmt.Errorf("discard draft: %w", err)
	}
	return nil
}

// makeParents makes the folders of a key durable one by one.
func (d *Dir) makeParents(ctx context.Context, key string) error {
	if key == "." {
		return nil
	}
	if _, err := os.Stat(d.file(key)); err == nil {
		return nil
	}
	if err := d.makeParents(ctx, path.Dir(key)); err != nil {
		return err
	}
	if err := patient(ctx, func() error { return os.Mkdir(d.file(key), 0o700) }); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(ctx, filepath.Dir(d.file(key)))
}

func syncDir(ctx context.Context, dir string) error {
	err := patient(ctx, func() error {
		f, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer f.Close()
		// Some cluster file systems have no fsync of a folder; their rename is durable by itself.
		if err := f.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOTSUP) && !errors.Is(err, syscall.ENOSYS) {
			return full(err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	return nil
}

// Open opens an object.
func (d *Dir) Open(ctx context.Context, key string) (Reader, error) {
	if err := CheckKey(key); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r, err := d.open(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("open object %s: %w", key, missing(err))
	}
	return r, nil
}

// Stat describes an object.
func (d *Dir) Stat(ctx context.Context, key string) (Info, error) {
	if err := CheckKey(key); err != nil {
		return Info{}, err
	}
	if err := ctx.Err(); err != nil {
		return Info{}, err
	}
	var st fs.FileInfo
	err := patient(ctx, func() (err error) {
		st, err = os.Lstat(d.file(key))
		return err
	})
	if err == nil && !st.Mode().IsRegular() {
		err = sandbox.ErrNotFound
	}
	if err != nil {
		return Info{}, fmt.Errorf("stat object %s: %w", key, missing(err))
	}
	return Info{Key: key, Size: st.Size(), Modified: st.ModTime()}, nil
}

// List walks the folders; the prefix may end inside a part.
func (d *Dir) List(ctx context.Context, prefix string, each func(Info) bool) error {
	top := path.Dir(prefix)
	if strings.HasSuffix(prefix, "/") {
		top = strings.TrimSuffix(prefix, "/")
	}
	if prefix == "" {
		top = "."
	}
	if top != "." {
		if err := CheckKey(top); err != nil {
			return err
		}
	}
	_, err := d.walk(ctx, top, prefix, each)
	return err
}

func (d *Dir) walk(ctx context.Context, folder, prefix string, each func(Info) bool) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	var entries []fs.DirEntry
	err := patient(ctx, func() (err error) {
		entries, err = os.ReadDir(d.file(folder))
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("list %s: %w", folder, err)
	}
	// Keys are ordered as whole strings: "a.b" comes before "a/b".
	keyOf := func(e os.DirEntry) string {
		k := e.Name()
		if folder != "." {
			k = folder + "/" + k
		}
		if e.IsDir() {
			k += "/"
		}
		return k
	}
	sort.Slice(entries, func(i, j int) bool { return keyOf(entries[i]) < keyOf(entries[j]) })
	for _, e := range entries {
		key := keyOf(e)
		if strings.HasPrefix(e.Name(), ".") || !strings.HasPrefix(key, prefix) && !strings.HasPrefix(prefix, key) {
			continue
		}
		if e.IsDir() {
			more, err := d.walk(ctx, strings.TrimSuffix(key, "/"), prefix, each)
			if !more || err != nil {
				return more, err
			}
			continue
		}
		var info fs.FileInfo
		err := patient(ctx, func() (err error) {
			info, err = e.Info()
			return err
		})
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted meanwhile
		}
		if err != nil {
			return false, fmt.Errorf("list %s: %w", key, err)
		}
		if info.Mode().IsRegular() && strings.HasPrefix(key, prefix) &&
			!each(Info{Key: key, Size: info.Size(), Modified: info.ModTime()}) {
			return false, nil
		}
	}
	return true, nil
}

// Delete removes an object.
func (d *Dir) Delete(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err := patient(ctx, func() error { return os.Remove(d.file(key)) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete object %s: %w", key, err)
	}
	return syncDir(ctx, filepath.Dir(d.file(key)))
}

func missing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w", sandbox.ErrNotFound)
	}
	return err
}

// full marks errors of a full disk.
func full(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EFBIG) {
		return fmt.Errorf("%w: %w", sandbox.ErrExhausted, err)
	}
	return err
}
