package fileserver

import (
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"golang.org/x/sys/unix"
)

func kindOf(mode uint32) filewire.Kind {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return filewire.File
	case unix.S_IFDIR:
		return filewire.Dir
	case unix.S_IFLNK:
		return filewire.Link
	case unix.S_IFIFO:
		return filewire.Fifo
	case unix.S_IFSOCK:
		return filewire.Socket
	case unix.S_IFCHR:
		return filewire.Char
	case unix.S_IFBLK:
		return filewire.Block
	}
	return filewire.Unknown
}

// info describes a file that was looked at; the target of a link is the caller's to fill.
func (s *server) info(path string, st *unix.Stat_t) filewire.Info {
	return filewire.Info{
		Path:     path,
		Kind:     kindOf(st.Mode),
		Mode:     st.Mode & 0o7777,
		UID:      st.Uid,
		GID:      st.Gid,
		Nlink:    uint32(st.Nlink),
		Inode:    st.Ino,
		Size:     max(st.Size, 0),
		Modified: time.Unix(st.Mtim.Unix()),
		Owner:    s.names.user(st.Uid),
		Group:    s.names.group(st.Gid),
	}
}

func (c *call) stat(r *filewire.Result) error {
	var st unix.Stat_t
	p := c.req.Path
	var err error
	if c.req.Flags&filewire.Follow != 0 {
		err = retry(func() error { return unix.Fstatat(unix.AT_FDCWD, p, &st, unix.AT_NO_AUTOMOUNT) })
		if err == unix.ENOENT {
			if target, e := readlinkat(unix.AT_FDCWD, p); e == nil {
				return refuse(filewire.NotFound, "link to "+quote(target)+", which isn't there")
			}
		}
	} else {
		err = lstatat(unix.AT_FDCWD, p, &st)
	}
	if err != nil {
		return err
	}
	c.s.names.refresh()
	i := c.s.info(p, &st)
	if i.Kind == filewire.Link {
		if i.Target, err = readlinkat(unix.AT_FDCWD, p); err != nil {
			i.Error = reason(err)
		}
	}
	r.Info = &i
	return nil
}

// list walks a folder in the order in which the file system gives it.
func (c *call) list() error {
	fd, err := openDir(c.req.Path)
	if err != nil {
		return err
	}
	c.s.names.refresh()
	depth := int(min(max(c.req.Depth, 1), filewire.MaxDepth))
	w := walker{ctx: c.ctx}
	w.visit = func(dir int, name, rel string, st *unix.Stat_t, level int) (bool, error) {
		i := c.s.info(rel, st)
		if i.Kind == filewire.Link {
			if i.Target, err = readlinkat(dir, name); err != nil {
				i.Error = reason(err)
			}
		}
		return i.Kind == filewire.Dir && level < depth, c.entry(&i)
	}
	w.trouble = func(rel string, err error) error {
		return c.entry(&filewire.Info{Path: rel, Error: reason(err)})
	}
	if err := w.dir(fd, "", 1); err != nil {
		return err
	}
	return c.flush()
}

func (c *call) entry(i *filewire.Info) error {
	if c.batch.AddInfo(i); c.batch.Full() {
		return c.flush()
	}
	return nil
}

// openDir opens the folder at a path, following links as the kernel does.
func openDir(path string) (int, error) {
	fd, err := openat(unix.AT_FDCWD, path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if err == unix.ENOTDIR && !strings.HasSuffix(path, "/") {
		var st unix.Stat_t
		if unix.Stat(path, &st) == nil {
			return -1, refuse(filewire.Invalid, "is a "+string(kindOf(st.Mode))+", not a folder")
		}
	}
	return fd, err
}
