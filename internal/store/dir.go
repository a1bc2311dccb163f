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
)

// Dir is a store in a folder.
type Dir struct {
	root string
}

var _ Store = (*Dir)(nil)

// NewDir opens the store in the folder, which is made when it is missing, and removes drafts that were left behind.
func NewDir(root string) (*Dir, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, fmt.Errorf("store folder: %w", err)
	}
	drafts := filepath.Join(root, draftFolder)
	if err := os.MkdirAll(drafts, 0o700); err != nil {
		return nil, fmt.Errorf("make store folder: %w", err)
	}
	entries, err := os.ReadDir(drafts)
	if err != nil {
		return nil, fmt.Errorf("list drafts: %w", err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > draftAge {
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
	f, err := os.CreateTemp(filepath.Join(d.root, draftFolder), "d-*")
	if err != nil {
		return nil, fmt.Errorf("create draft: %w", full(err))
	}
	return &draft{File: f, dir: d}, nil
}

func (w *draft) Write(p []byte) (int, error) {
	if err := w.room(len(p)); err != nil {
		return 0, err
	}
	n, err := w.File.Write(p)
	return n, full(err)
}

func (w *draft) WriteAt(p []byte, off int64) (int, error) {
	if err := w.room(len(p)); err != nil {
		return 0, err
	}
	n, err := w.File.WriteAt(p, off)
	return n, full(err)
}

// ReadFrom is hidden: os.File would copy past Write and its mapping of errors.
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
	if err := w.Chmod(0o444); err != nil {
		return fmt.Errorf("publish %s: %w", key, err)
	}
	name := w.Name()
	if err := w.Close(); err != nil { // an NFS server reports a full disk here
		return fmt.Errorf("close %s: %w", key, full(err))
	}
	w.done = true
	target := w.dir.file(key)
	if err := w.dir.makeParents(path.Dir(key)); err != nil {
		os.Remove(name)
		return fmt.Errorf("publish %s: %w", key, full(err))
	}
	if err := os.Rename(name, target); err != nil {
		os.Remove(name)
		return fmt.Errorf("publish %s: %w", key, full(err))
	}
	return syncDir(filepath.Dir(target))
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
func (d *Dir) makeParents(key string) error {
	if key == "." {
		return nil
	}
	if _, err := os.Stat(d.file(key)); err == nil {
		return nil
	}
	if err := d.makeParents(path.Dir(key)); err != nil {
		return err
	}
	if err := os.Mkdir(d.file(key), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return syncDir(filepath.Dir(d.file(key)))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	defer f.Close()
	// Some cluster file systems have no fsync of a folder; their rename is durable by itself.
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOTSUP) {
		return fmt.Errorf("sync folder: %w", full(err))
	}
	return nil
}

type reader struct {
	*os.File
	size int64
}

func (r *reader) Size() int64 { return r.size }

// Open opens an object.
func (d *Dir) Open(ctx context.Context, key string) (Reader, error) {
	if err := CheckKey(key); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := os.Open(d.file(key))
	if err != nil {
		return nil, fmt.Errorf("open object %s: %w", key, missing(err))
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = sandbox.ErrNotFound
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open object %s: %w", key, err)
	}
	return &reader{f, st.Size()}, nil
}

// Stat describes an object.
func (d *Dir) Stat(ctx context.Context, key string) (Info, error) {
	if err := CheckKey(key); err != nil {
		return Info{}, err
	}
	if err := ctx.Err(); err != nil {
		return Info{}, err
	}
	st, err := os.Lstat(d.file(key))
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
	entries, err := os.ReadDir(d.file(folder))
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
		info, err := e.Info()
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
	err := os.Remove(d.file(key))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete object %s: %w", key, err)
	}
	return syncDir(filepath.Dir(d.file(key)))
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
