package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// FromDir builds a layer from a folder. Links are not followed, other mounts below it are taken as empty folders, sockets and
// marks of an overlay are left out. A file that changes while it is read is an error.
func FromDir(ctx context.Context, dir string, out erofs.Output, opt Options) (*Built, error) {
	return buildFolder(ctx, dir, out, opt, false)
}

// FromUpper builds a snapshot from the upper folder of an overlay: whiteouts, opaque folders and redirect marks stay, what the
// overlay keeps for itself does not. Options.Parents must name the lowers, on which alone those marks are true.
func FromUpper(ctx context.Context, upper string, out erofs.Output, opt Options) (*Built, error) {
	return buildFolder(ctx, upper, out, opt, true)
}

func buildFolder(ctx context.Context, dir string, out erofs.Output, opt Options, upper bool) (*Built, error) {
	t := newTree(erofs.NewWriter(out), opt)
	if err := readFolder(ctx, dir, t, upper); err != nil {
		return nil, err
	}
	built, err := t.finish()
	if err != nil {
		return nil, fmt.Errorf("folder %q: %w", dir, err)
	}
	return built, nil
}

func readFolder(ctx context.Context, dir string, t *tree, upper bool) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open folder %q: %w", dir, refused(err))
	}
	root := os.NewFile(uintptr(fd), dir)
	defer root.Close()
	what := fmt.Sprintf("folder %q", dir)
	if upper { // where it lies is the host's affair; who reads this has a sandbox
		what = "its changes"
	}
	w := &walker{tree: t, ctx: ctx, upper: upper, links: map[[2]uint64]*erofs.Inode{}}
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, statMask, &st); err != nil {
		return fmt.Errorf("stat %s: %w", what, err)
	}
	w.mount = st.Mnt_id
	if err := w.attributes("", fd, &st, w.root); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if err := w.folder("", root, w.root, 0); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

const statMask = unix.STATX_BASIC_STATS | unix.STATX_MNT_ID

type walker struct {
	*tree
	ctx   context.Context
	upper bool
	mount uint64
	links map[[2]uint64]*erofs.Inode // by device and inode number, of files with several names
}

// folder takes in all entries of an open folder.
func (w *walker) folder(path string, dir *os.File, in *erofs.Inode, depth int) error {
	if depth > w.limits.Depth {
		return fmt.Errorf("entry %.200q: deeper than %d folders: %w", path, w.limits.Depth, sandbox.ErrInvalid)
	}
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return fmt.Errorf("list %q: %w", path, err)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		child := name
		if path != "" {
			child = path + "/" + name
		}
		if w.exclude[child] {
			continue
		}
		entry, err := w.entry(child, dir, name, depth)
		if err != nil {
			return err
		}
		if entry != nil {
			in.Children[name] = entry
		}
	}
	return nil
}

// entry takes in one name; nil leaves it out.
func (w *walker) entry(path string, dir *os.File, name string, depth int) (*erofs.Inode, error) {
	if len(path) > maxPath {
		return nil, fmt.Errorf("entry %.200q: path of %d octets, at most %d: %w", path, len(path), maxPath, sandbox.ErrInvalid)
	}
	// The descriptor pins the object, so that type, attributes and content are of one and the same.
	pin, err := unix.Openat(int(dir.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %q: %w", path, refused(err))
	}
	defer unix.Close(pin)
	var st unix.Statx_t
	if err := unix.Statx(pin, "", unix.AT_EMPTY_PATH, statMask, &st); err != nil {
		return nil, fmt.Errorf("stat %q: %w", path, err)
	}
	kind := uint32(st.Mode) & unix.S_IFMT
	if kind == unix.S_IFSOCK {
		w.skip(path, "a socket")
		return nil, nil
	}
	if err := w.count(path); err != nil {
		return nil, err
	}
	key := [2]uint64{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino}
	whiteout := kind == unix.S_IFCHR && st.Rdev_major == 0 && st.Rdev_minor == 0
	if whiteout {
		return newWhiteout(), nil // an overlay makes all of an upper's whiteouts links of one
	}
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		if in, ok := w.links[key]; ok {
			w.linked[in] = ""
			return in, nil
		}
	}
	in := &erofs.Inode{Mode: kind}
	if err := w.attributes(path, pin, &st, in); err != nil {
		return nil, err
	}
	switch kind {
	case unix.S_IFDIR:
		in.Children = map[string]*erofs.Inode{}
		if st.Mask&unix.STATX_MNT_ID != 0 && st.Mnt_id != w.mount {
			w.skip(path, "another mount; taken as an empty folder")
			break
		}
		sub, err := reopen(pin, path, unix.O_DIRECTORY)
		if err != nil {
			return nil, err
		}
		err = w.folder(path, sub, in, depth+1)
		sub.Close()
		if err != nil {
			return nil, err
		}
	case unix.S_IFREG:
		if err := w.file(path, pin, &st, in); err != nil {
			return nil, err
		}
	case unix.S_IFLNK:
		b := make([]byte, erofs.BlockSize)
		n, err := unix.Readlinkat(pin, "", b)
		if err != nil {
			return nil, fmt.Errorf("read link %q: %w", path, err)
		}
		in.Target = string(b[:n])
	case unix.S_IFCHR, unix.S_IFBLK:
		in.Major, in.Minor = st.Rdev_major, st.Rdev_minor
	case unix.S_IFIFO:
	}
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		w.links[key] = in
	}
	return in, nil
}

// reopen opens what an O_PATH descriptor pins. /proc gives a way to it that no rename can change.
func reopen(pin int, path string, flags int) (*os.File, error) {
	fd, err := unix.Open(procPath(pin), flags|unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOATIME, 0)
	if errors.Is(err, unix.EPERM) { // O_NOATIME is for owners
		fd, err = unix.Open(procPath(pin), flags|unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open %q: %w", path, refused(err))
	}
	return os.NewFile(uintptr(fd), path), nil
}

func procPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

func (w *walker) file(path string, pin int, st *unix.Statx_t, in *erofs.Inode) error {
	f, err := reopen(pin, path, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := w.content(path, in, &contextReader{w.ctx, f}, int64(st.Size)); err != nil {
		return changed(path, err)
	}
	var after unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS, &after); err != nil {
		return fmt.Errorf("stat %q: %w", path, err)
	}
	if after.Size != st.Size || after.Mtime != st.Mtime {
		return fmt.Errorf("entry %q: changed while it was read: %w", path, sandbox.ErrState)
	}
	return nil
}

func changed(path string, err error) error {
	if errors.Is(broken(err), sandbox.ErrInvalid) {
		return fmt.Errorf("entry %q: became shorter while it was read: %w", path, sandbox.ErrState)
	}
	return err
}

// attributes fills in everything but content and children.
func (w *walker) attributes(path string, fd int, st *unix.Statx_t, in *erofs.Inode) error {
	in.Mode = in.Mode&unix.S_IFMT | uint32(st.Mode)&0o7777
	in.UID, in.GID = st.Uid, st.Gid
	in.Sec, in.Nsec = st.Mtime.Sec, st.Mtime.Nsec
	names, err := listXattrs(fd)
	if err != nil {
		return fmt.Errorf("list attributes of %q: %w", path, err)
	}
	for _, name := range names {
		mark := strings.HasPrefix(name, overlayPrefix)
		keep := !mark || w.upper && in.IsDir() && (name == opaqueMark || name == redirectMark)
		if w.upper && name == metacopyMark {
			return fmt.Errorf("entry %q: holds no content of its own (metacopy); mount the overlay without it: %w", path, sandbox.ErrUnsupported)
		}
		if !keep {
			continue
		}
		value, err := getXattr(fd, name)
		if errors.Is(err, unix.ENODATA) {
			continue // removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("read attribute %s of %q: %w", name, path, err)
		}
		if name == opaqueMark {
			if string(value) == "y" {
				in.Set(opaqueMark, value)
			}
			continue // "x" is the origin mark of newer kernels
		}
		if err := w.setXattr(path, in, name, value); err != nil {
			return err
		}
	}
	return w.own(path, in)
}

// The calls on names are used over /proc because those on descriptors refuse O_PATH, and a link has no other descriptor.
func listXattrs(fd int) ([]string, error) {
	buf := make([]byte, 1024)
	for {
		n, err := unix.Listxattr(procPath(fd), buf)
		switch {
		case errors.Is(err, unix.ERANGE):
			buf = make([]byte, 64<<10)
			continue
		case errors.Is(err, unix.ENOTSUP):
			return nil, nil
		case err != nil:
			return nil, err
		}
		var names []string
		for b := range bytes.SplitSeq(buf[:n], []byte{0}) {
			if len(b) > 0 {
				names = append(names, string(b))
			}
		}
		return names, nil
	}
}

func getXattr(fd int, name string) ([]byte, error) {
	buf := make([]byte, 256)
	n, err := unix.Getxattr(procPath(fd), name, buf)
	if errors.Is(err, unix.ERANGE) {
		buf = make([]byte, 64<<10)
		n, err = unix.Getxattr(procPath(fd), name, buf)
	}
	if err != nil {
		return nil, err
	}
	return bytes.Clone(buf[:n]), nil
}

func refused(err error) error {
	switch {
	case errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: %w", sandbox.ErrDenied, err)
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("%w: %w", sandbox.ErrNotFound, err)
	case errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP):
		return fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
	}
	return err
}
