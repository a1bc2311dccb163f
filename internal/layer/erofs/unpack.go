package erofs

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Unpacked tells what [Image.Unpack] takes of a file system: octets, about, and inodes.
func (im *Image) Unpacked() (octets, inodes int64) {
	seen := map[*Inode]bool{}
	im.walk(func(in *Inode) {
		if seen[in] {
			return
		}
		seen[in] = true
		inodes++
		octets += inodeRoom + in.Data.Stored()
		if len(in.Xattrs) > 0 || len(in.Target) >= shortLink {
			octets += BlockSize
		}
		if in.IsDir() {
			octets += blocks(dirSize(append(in.Names(), ".", ".."))) * BlockSize
		}
	})
	return octets, inodes
}

// inodeRoom is what file systems take for a file beside its contents, in octets: 256 in ext4, 512 in xfs, more in the trees of btrfs.
const inodeRoom = 512

const shortLink = 60 // octets of a target that ext4 has no room for in the inode

// walk visits every name, a folder before what is in it.
func (im *Image) walk(visit func(in *Inode)) {
	todo := []*Inode{im.Root}
	for len(todo) > 0 {
		in := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		visit(in)
		for _, c := range in.Children {
			todo = append(todo, c)
		}
	}
}

// Unpack writes the tree into dir, an empty folder that nobody else writes to, as the kernel shows the mounted image: owners, modes, times,
// attributes, hard links, devices, holes. It needs root and /proc. Nothing is synced, and on an error what was written stays. going is asked
// before each name and each MiB of contents; its error ends the work.
//
// An error of the file system names the path and wraps the errno; what that file system can't hold wraps sandbox.ErrUnsupported.
func (im *Image) Unpack(dir *os.File, going func() error) (err error) {
	u := &unpacker{going: going, names: map[*Inode]int{}, stashed: map[*Inode]string{}, buf: make([]byte, bufferSize)}
	im.walk(func(in *Inode) { u.names[in]++ })
	if u.at, err = unix.Openat(int(dir.Fd()), ".", folderFlags, 0); err != nil {
		return fmt.Errorf("unpack into %s: %w", dir.Name(), err)
	}
	defer func() { unix.Close(u.at) }()
	stash := "links"
	for im.Root.Children[stash] != nil {
		stash += "-"
	}
	if err := unix.Mkdirat(u.at, stash, 0o700); err != nil {
		return fmt.Errorf("unpack: make the folder of links: %w", err)
	}
	if u.stash, err = unix.Openat(u.at, stash, folderFlags, 0); err != nil {
		return fmt.Errorf("unpack: open the folder of links: %w", err)
	}
	defer unix.Close(u.stash)
	if err := u.children(im.Root, ""); err != nil {
		return fmt.Errorf("unpack %w", err)
	}
	if err := unix.Unlinkat(u.at, stash, unix.AT_REMOVEDIR); err != nil {
		return fmt.Errorf("unpack: remove the folder of links: %w", err)
	}
	if err := dress(im.Root, inFolder(u.at, ".")); err != nil {
		return fmt.Errorf("unpack %q: %w", "/", err)
	}
	return nil
}

const folderFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC

// unpacker walks a tree with one descriptor, however deep it is: nobody else moves its folders, so ".." leads back.
type unpacker struct {
	going   func() error
	at      int            // the folder that is being filled
	names   map[*Inode]int // of a file, that are still to be made
	stash   int            // a folder of the files with several names, until their last one is made
	stashed map[*Inode]string
	buf     []byte
}

// enter makes another folder the one that is being filled.
func (u *unpacker) enter(name string) error {
	fd, err := unix.Openat(u.at, name, folderFlags, 0)
	if err != nil {
		return err
	}
	unix.Close(u.at)
	u.at = fd
	return nil
}

func (u *unpacker) children(in *Inode, path string) error {
	for _, name := range in.Names() {
		child, at := in.Children[name], path+"/"+name
		if child.IsDir() {
			if err := u.folder(child, name, at); err != nil {
				return err
			}
			continue
		}
		if err := u.name(child, name); err != nil {
			return fmt.Errorf("%.200q: %w", at, err)
		}
	}
	return nil
}

// folder makes a folder with all below it, and then gives it its times, which that changed.
func (u *unpacker) folder(in *Inode, name, path string) error {
	err := u.going()
	if err == nil {
		err = unix.Mkdirat(u.at, name, 0o700)
	}
	if err == nil {
		err = u.enter(name)
	}
	if err != nil {
		return fmt.Errorf("%.200q: %w", path, err)
	}
	if err := u.children(in, path); err != nil {
		return err
	}
	if err = dress(in, inFolder(u.at, ".")); err == nil {
		err = u.enter("..")
	}
	if err != nil {
		return fmt.Errorf("%.200q: %w", path, err)
	}
	return nil
}

// name makes a name of a file. One with several names is made in the stash, and leaves it with its last.
func (u *unpacker) name(in *Inode, name string) error {
	if err := u.going(); err != nil {
		return err
	}
	at, made := u.stashed[in]
	if !made && u.names[in] == 1 {
		return u.file(in, u.at, name)
	}
	if !made {
		at = strconv.Itoa(len(u.stashed))
		u.stashed[in] = at
		if err := u.file(in, u.stash, at); err != nil {
			return err
		}
	}
	if u.names[in]--; u.names[in] == 0 {
		return unix.Renameat(u.stash, at, u.at, name)
	}
	err := unix.Linkat(u.stash, at, u.at, name, 0)
	if err == unix.EMLINK {
		err = fmt.Errorf("more names than a file may have on this file system: %w: %w", err, sandbox.ErrUnsupported)
	}
	return err
}

// file makes a file of any type but a folder.
func (u *unpacker) file(in *Inode, folder int, name string) (err error) {
	switch kind := in.Mode & unix.S_IFMT; kind {
	case unix.S_IFREG:
		err = u.regular(in, folder, name)
	case unix.S_IFLNK:
		err = unix.Symlinkat(in.Target, folder, name)
	default:
		err = unix.Mknodat(folder, name, kind|0o600, int(unix.Mkdev(in.Major, in.Minor)))
	}
	if err != nil {
		return err
	}
	return dress(in, inFolder(folder, name))
}

func (u *unpacker) regular(in *Inode, folder int, name string) error {
	fd, err := unix.Openat(folder, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	return errors.Join(u.fill(f, in.Data), f.Close())
}

// fill writes a content; what is a hole in the image stays one.
func (u *unpacker) fill(f *os.File, c Content) error {
	r := c.Reader()
	if r == nil {
		return wrong("contents in a second file, and none was given")
	}
	if err := f.Truncate(c.Size); err != nil {
		return err
	}
	return c.runs(func(off, n int64) error {
		for ; n > 0; n, off = n-bufferSize, off+bufferSize {
			if err := u.going(); err != nil {
				return err
			}
			part := u.buf[:min(n, bufferSize)]
			if k, err := r.ReadAt(part, off); k < len(part) {
				return err
			}
			if _, err := f.WriteAt(part, off); err != nil {
				return err
			}
		}
		return nil
	})
}

// runs calls each with where octets of a content are stored, in order; between them are holes.
func (c Content) runs(each func(off, n int64) error) error {
	if c.chunks == nil {
		return each(0, c.Size)
	}
	for from := 0; from < len(c.chunks); from++ {
		to := from
		for to < len(c.chunks) && c.chunks[to] != noBlock {
			to++
		}
		if to == from {
			continue
		}
		off := int64(from) << c.chunkBits
		if err := each(off, min(c.Size, int64(to)<<c.chunkBits)-off); err != nil {
			return err
		}
		from = to
	}
	return nil
}

func inFolder(fd int, name string) string { return "/proc/self/fd/" + strconv.Itoa(fd) + "/" + name }

// dress gives a file what it has beside its contents. The order counts: a new owner takes capabilities and setuid away, and everything but
// the time changes the time.
func dress(in *Inode, path string) error {
	if err := unix.Lchown(path, possibleID(in.UID), possibleID(in.GID)); err != nil {
		return fmt.Errorf("owner %d:%d: %w", in.UID, in.GID, err)
	}
	for _, x := range in.Xattrs {
		if !hasAttributes(in.Mode, x.Name) {
			continue
		}
		if err := unix.Lsetxattr(path, x.Name, x.Value, 0); err != nil {
			return attributeError(in, x, err)
		}
	}
	if in.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Chmod(path, in.Mode&0o7777); err != nil {
			return fmt.Errorf("mode %#o: %w", in.Mode&0o7777, err)
		}
	}
	time := unix.Timespec{Sec: in.Sec, Nsec: int64(in.Nsec)}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{time, time}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("time %d: %w", in.Sec, err)
	}
	return nil
}

// possibleID is the id itself but for the one that means "leave the owner": that would make the file root's.
func possibleID(id uint32) int { return int(min(id, math.MaxUint32-1)) }

// hasAttributes says whether the kernel lets a file of this type have such an attribute. An image may hold others, which nobody can read.
func hasAttributes(mode uint32, name string) bool {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFDIR:
		return true
	case unix.S_IFLNK:
		return !strings.HasPrefix(name, "user.") && !strings.HasPrefix(name, "system.")
	}
	return !strings.HasPrefix(name, "user.")
}

// attributeError tells a full disk from what a file system can't hold: ext4 has 4 KiB for all attributes of a file, and says ENOSPC.
func attributeError(in *Inode, x Xattr, err error) error {
	total := 0
	for _, x := range in.Xattrs {
		total += len(x.Name) + len(x.Value)
	}
	if errors.Is(err, unix.ENOSPC) && total < BlockSize/2 || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("attribute %.80q: %w", x.Name, err)
	}
	return fmt.Errorf("attribute %.80q: %v: the file's attributes have %d octets, which the file system of this folder can't hold (xfs and btrfs hold most): %w",
		x.Name, err, total, sandbox.ErrUnsupported)
}
