package keeper

import (
	"errors"
	"fmt"
	"path"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// makeDisk mounts the file system of a call, attached nowhere: folders work, tmp and shm with one bound of octets and files.
func makeDisk(size, inodes int64, uid int) (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	for _, o := range [][2]string{{"size", strconv.FormatInt(size, 10)}, {"nr_inodes", strconv.FormatInt(inodes+4, 10)}, {"mode", "0755"}} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return -1, fsError(fs, "tmpfs", err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fsError(fs, "tmpfs", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID)
	if err != nil {
		return -1, err
	}
	err = errors.Join(unix.Mkdirat(fd, "work", 0o755), unix.Fchownat(fd, "work", uid, uid, 0),
		unix.Mkdirat(fd, "tmp", 0o777), unix.Fchmodat(fd, "tmp", 0o1777, 0), unix.Mkdirat(fd, "shm", 0o777), unix.Fchmodat(fd, "shm", 0o1777, 0))
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// lay writes those files of a call that are meant. Nothing of its program runs yet, so what is in the way is a file of the same request.
func (x *running) lay(fds []int, meant func(path string) bool) error {
	if len(x.r.Files) == 0 {
		return nil
	}
	uid := int(x.g.uid)
	made := map[string]bool{".": true}
	var folder func(p string) error
	folder = func(p string) error {
		if made[p] {
			return nil
		}
		if err := folder(path.Dir(p)); err != nil {
			return err
		}
		if err := unix.Mkdirat(x.disk, "work/"+p, 0o755); err != nil {
			return err
		}
		made[p] = true
		return unix.Fchownat(x.disk, "work/"+p, uid, uid, unix.AT_SYMLINK_NOFOLLOW)
	}
	for _, f := range x.r.Files {
		from := -1
		if f.FD {
			from, fds = fds[0], fds[1:]
		}
		if !meant(f.Path) {
			continue
		}
		err := folder(path.Dir(f.Path))
		if err == nil {
			err = x.layOne(f, from)
		}
		switch {
		case errors.Is(err, unix.ENOSPC):
			return fmt.Errorf("lay %.80q: the files are more than the call's limits of disk and files: %w", f.Path, sandbox.ErrInvalid)
		case errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENAMETOOLONG):
			return fmt.Errorf("lay %.80q: %w: %w", f.Path, err, sandbox.ErrInvalid)
		case err != nil:
			return fmt.Errorf("lay %.80q: %w", f.Path, err)
		}
	}
	return nil
}

func (x *running) layOne(f CallFile, from int) error {
	fd := x.source
	if fd < 0 || f.Path != x.r.Hold {
		var err error
		if fd, err = x.newFile(f.Path); err != nil {
			return err
		}
	} else {
		x.source = -1
	}
	defer unix.Close(fd)
	for data := f.Data; len(data) > 0; {
		n, err := unix.Write(fd, data)
		if err != nil && err != unix.EINTR {
			return err
		}
		data = data[max(n, 0):]
	}
	if from >= 0 {
		if err := copyFile(fd, from); err != nil {
			return err
		}
	}
	if f.Exec {
		if err := unix.Fchmod(fd, 0o755); err != nil {
			return err
		}
	}
	return unix.Fchown(fd, int(x.g.uid), int(x.g.uid))
}

func (x *running) newFile(path string) (int, error) {
	return unix.Openat(x.disk, "work/"+path, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
}

// copyFile writes a file's octets to another, empty one, whose offset stays at its beginning.
func copyFile(to, from int) error {
	for at := int64(0); ; {
		n, err := unix.Sendfile(to, from, &at, 1<<20)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			_, err := unix.Seek(to, 0, unix.SEEK_SET)
			return err
		}
	}
}

// copyOut reads what the call asked for. Nothing of it runs any more, so nothing moves.
func (x *running) copyOut(end *CallEnd) (fds []int) {
	room := int64(8 << 20)
	for _, c := range x.r.Copy {
		o := CallCopied{}
		fd, err := x.openOut(c.Path)
		var st unix.Stat_t
		if err == nil {
			err = unix.Fstat(fd, &st)
		}
		switch {
		case err == unix.ELOOP || err == unix.EXDEV:
			o.Err = errEscapes.Error()
		case err != nil:
			o.Err = err.Error()
		case st.Mode&unix.S_IFMT != unix.S_IFREG:
			o.Err = "is no regular file"
		case st.Size > c.Max:
			o.Size, o.Err = st.Size, fmt.Sprintf("has %d octets, at most %d were asked for", st.Size, c.Max)
		case st.Size > callInline && len(fds) < maxFDs:
			o.Size, o.Exec, o.FD = st.Size, st.Mode&0o111 != 0, true
			fds = append(fds, fd)
			fd = -1
		case st.Size > room:
			o.Size, o.Err = st.Size, "there are more and longer files than fit into one answer"
		default:
			o.Size, o.Exec = st.Size, st.Mode&0o111 != 0
			room -= st.Size
			o.Data = make([]byte, st.Size)
			for at := 0; at < len(o.Data); {
				n, err := unix.Pread(fd, o.Data[at:], int64(at))
				if err == unix.EINTR {
					continue
				}
				if err != nil || n == 0 {
					o.Err = fmt.Sprintf("read: %v", err)
					break
				}
				at += n
			}
		}
		if fd >= 0 {
			unix.Close(fd)
		}
		end.Files = append(end.Files, o)
	}
	return fds
}

func (x *running) openOut(p string) (int, error) {
	return unix.Openat2(x.disk, "work/"+p, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOFOLLOW | unix.O_NOCTTY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV})
}
