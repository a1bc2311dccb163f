package vm

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/guest/vmwire"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// laidFiles are the files that every birth lays anew. In a snapshot they are left out unless the sandbox changed them: a new sandbox has names
// of its own.
var laidFiles = []string{"etc/hosts", "etc/hostname", "etc/resolv.conf"}

// outside are the places of a root that never hold a sandbox's own files.
var outside = []string{"dev", "proc", "sys"}

// Snapshot captures the sandbox's own changes as a layer. The guest sends its upper as an archive while its processes stand still; the host
// never mounts a file system that a guest has written. It is unpacked into a folder that nobody else sees, and read from there as a
// container's upper is.
func (x *instance) Snapshot(ctx context.Context) (string, error) {
	if err := x.take(ctx); err != nil {
		return "", x.said("snapshot", err)
	}
	defer func() { <-x.turn }()
	if x.h.Own {
		id, err := x.ownSnapshot(ctx)
		return id, x.said("snapshot", err)
	}
	if x.isFrozen() {
		return "", fmt.Errorf("snapshot of %s: it is frozen, resume it first: %w", x.id, sandbox.ErrState)
	}
	l, err := x.use(ctx, "snapshot")
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(x.b.cfg.StateDir, snapshotFolder)
	if err != nil {
		return "", x.said("snapshot", err)
	}
	defer os.RemoveAll(dir)
	if err := x.fetchUpper(ctx, l, dir); err != nil {
		return "", x.said("snapshot", err)
	}
	opt := layer.Options{Exclude: append([]string(nil), outside...), Source: "snapshot of " + string(x.id)}
	for file, sum := range x.h.Laid {
		if text, err := readBelow(dir, file); err == nil && hex.EncodeToString(text[:]) == sum {
			opt.Exclude = append(opt.Exclude, file)
		}
	}
	for _, p := range x.spec.Layers {
		opt.Parents = append(opt.Parents, layer.ID(p))
	}
	d, err := x.b.layers.ImportUpper(ctx, x.spec.Project, dir, opt)
	if err != nil {
		return "", x.said("snapshot", err)
	}
	return string(d.ID), nil
}

// fetchUpper unpacks what the guest sends while the sandbox stands still.
func (x *instance) fetchUpper(ctx context.Context, l *link, dir string) (err error) {
	if err := l.keeper.Freeze(ctx, x.inside()); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.keeper.Thaw(context.WithoutCancel(ctx), x.inside())) }()
	st, err := l.open(ctx, &vmwire.Request{Op: vmwire.OpUpper})
	if err != nil {
		return err
	}
	defer st.Close()
	stop := context.AfterFunc(ctx, func() { st.Close() })
	defer stop()
	// More than the disk holds is a lie, but for holes, which an archive writes out.
	limit := 2*x.h.Disk + 64<<20
	r := &io.LimitedReader{R: st, N: limit}
	if err := unpackUpper(tar.NewReader(r), dir); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if r.N <= 0 {
			return fmt.Errorf("the guest sends more than %d octets: %w", limit, sandbox.ErrExhausted)
		}
		return err
	}
	_, err = io.Copy(io.Discard, r)
	return err
}

// readBelow hashes a small ordinary file of an unpacked upper.
func readBelow(dir, name string) (sum [32]byte, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return sum, err
	}
	defer root.Close()
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 1<<20))
	return sha256.Sum256(text), err
}

// Bounds of an archive from a guest.
const (
	maxUpperEntries = 4 << 20
	maxUpperDepth   = 512
	maxXattr        = 64 << 10
)

const xattrPrefix = "SCHILY.xattr."

// unpacker writes an archive below a folder. The archive is hostile: names can't lead out, since each is opened from its own folder's
// descriptor without following links; of devices only whiteouts are made.
type unpacker struct {
	root  int
	times []folderTime
	n     int
}

type folderTime struct {
	name string
	at   [2]unix.Timespec
}

func unpackUpper(r *tar.Reader, dir string) error {
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	u := &unpacker{root: root}
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("archive of the guest: %w", err)
		}
		if u.n++; u.n > maxUpperEntries {
			return fmt.Errorf("archive of the guest: more than %d entries: %w", maxUpperEntries, sandbox.ErrExhausted)
		}
		if err := u.entry(h, r); err != nil {
			return fmt.Errorf("archive of the guest: %.200q: %w", h.Name, err)
		}
	}
	// A folder's time is that of its last change, so it is set when nothing is made in it any more.
	for i := len(u.times) - 1; i >= 0; i-- {
		t := u.times[i]
		fd, err := u.open(t.name, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		err = unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), t.at[:], 0)
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
	return nil
}

// open opens a name of the tree without following any link.
func (u *unpacker) open(name string, flags int) (int, error) {
	if name == "" {
		name = "."
	}
	return unix.Openat2(u.root, name, &unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC | unix.O_NOFOLLOW),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
}

func cleanName(name string) (string, error) {
	name = strings.TrimSuffix(name, "/")
	if name == "." || name == "" {
		return "", nil
	}
	if strings.Count(name, "/") >= maxUpperDepth || path.Clean(name) != name || strings.HasPrefix(name, "/") || name == ".." || strings.HasPrefix(name, "../") {
		return "", fmt.Errorf("not a name below a root: %w", sandbox.ErrInvalid)
	}
	return name, nil
}

func (u *unpacker) entry(h *tar.Header, body io.Reader) error {
	name, err := cleanName(h.Name)
	if err != nil {
		return err
	}
	at := [2]unix.Timespec{unix.NsecToTimespec(h.ModTime.UnixNano()), unix.NsecToTimespec(h.ModTime.UnixNano())}
	if name == "" {
		if h.Typeflag != tar.TypeDir {
			return sandbox.ErrInvalid
		}
		u.times = append(u.times, folderTime{"", at})
		return u.dress(u.root, ".", h)
	}
	parent, err := u.open(path.Dir(name), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	base := path.Base(name)
	switch h.Typeflag {
	case tar.TypeDir:
		if err := unix.Mkdirat(parent, base, 0o700); err != nil {
			return err
		}
		u.times = append(u.times, folderTime{name, at})
		return u.dress(parent, base, h)
	case tar.TypeReg:
		if err := writeFile(parent, base, h.Size, body); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if err := unix.Symlinkat(h.Linkname, parent, base); err != nil {
			return err
		}
	case tar.TypeFifo:
		if err := unix.Mknodat(parent, base, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
	case tar.TypeChar:
		if h.Devmajor != 0 || h.Devminor != 0 {
			return nil // no sandbox can make one that works; the overlay's whiteouts are 0, 0
		}
		return unix.Mknodat(parent, base, unix.S_IFCHR, 0)
	case tar.TypeLink:
		return u.link(h.Linkname, parent, base)
	default:
		return fmt.Errorf("type %q: %w", h.Typeflag, sandbox.ErrInvalid)
	}
	if err := u.dress(parent, base, h); err != nil {
		return err
	}
	return unix.UtimesNanoAt(parent, base, at[:], unix.AT_SYMLINK_NOFOLLOW)
}

func writeFile(parent int, base string, size int64, body io.Reader) error {
	fd, err := unix.Openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), base)
	_, err = io.CopyN(f, body, size)
	return errors.Join(err, f.Close())
}

func (u *unpacker) link(target string, parent int, base string) error {
	target, err := cleanName(target)
	if err != nil || target == "" {
		return fmt.Errorf("link to %.200q: %w", target, errors.Join(err, sandbox.ErrInvalid))
	}
	from, err := u.open(path.Dir(target), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	return unix.Linkat(from, path.Base(target), parent, base, 0)
}

// dress sets owner, attributes and mode, in the order in which none undoes another.
func (u *unpacker) dress(parent int, base string, h *tar.Header) error {
	if err := unix.Fchownat(parent, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	at := filepath.Join(fmt.Sprintf("/proc/self/fd/%d", parent), base)
	if base == "." {
		at = fmt.Sprintf("/proc/self/fd/%d/.", parent)
	}
	for k, v := range h.PAXRecords {
		name, ok := strings.CutPrefix(k, xattrPrefix)
		if !ok {
			continue
		}
		if len(name) > 255 || len(v) > maxXattr {
			return fmt.Errorf("attribute %.80q of %d octets: %w", name, len(v), sandbox.ErrInvalid)
		}
		if !strings.HasPrefix(name, "trusted.overlay.") && !strings.HasPrefix(name, "user.") && !strings.HasPrefix(name, "security.capability") &&
			!strings.HasPrefix(name, "system.posix_acl_") {
			continue // of the guest's own kernel, or of a security module
		}
		if err := unix.Lsetxattr(at, name, []byte(v), 0); err != nil {
			return fmt.Errorf("attribute %s: %w", name, err)
		}
	}
	if h.Typeflag == tar.TypeSymlink {
		return nil
	}
	return unix.Fchmodat(parent, base, uint32(h.Mode)&0o7777, 0)
}
