package fileserver

import (
	"strconv"
	"strings"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"golang.org/x/sys/unix"
)

// makeParents makes a folder and those above it as 0755. Links on the way are followed by the kernel.
func makeParents(p string) error {
	err := retry(func() error { return unix.Mkdir(p, 0o755) })
	if err == nil {
		return nil
	}
	var st unix.Stat_t
	serr := unix.Stat(p, &st)
	if serr == nil {
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return at(quote(p), unix.ENOTDIR)
		}
		return nil
	}
	if err == unix.EEXIST { // a link that leads nowhere
		return at(quote(p), serr)
	}
	i := strings.LastIndexByte(strings.TrimRight(p, "/"), '/')
	if err != unix.ENOENT || i <= 0 {
		return at(quote(p), err)
	}
	if err := makeParents(p[:i]); err != nil {
		return err
	}
	err = retry(func() error { return unix.Mkdir(p, 0o755) })
	if err != nil && (err != unix.EEXIST || unix.Stat(p, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR) {
		return at(quote(p), err)
	}
	return nil
}

func (c *call) makeDir(r *filewire.Result) error {
	p, mode := c.req.Path, c.mode(0o755)
	parents := c.req.Flags&filewire.Parents != 0
	err := retry(func() error { return unix.Mkdir(p, mode) })
	if err == unix.ENOENT && parents {
		if i := strings.LastIndexByte(strings.TrimRight(p, "/"), '/'); i > 0 {
			if err := makeParents(p[:i]); err != nil {
				return err
			}
			err = retry(func() error { return unix.Mkdir(p, mode) })
		}
	}
	made := err == nil
	var st unix.Stat_t
	serr := retry(func() error { return unix.Stat(p, &st) })
	switch {
	case err != nil && (!parents || serr != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR):
		return err
	case serr != nil:
		return serr
	}
	// Plain bits came with mkdir; a chmod then would only drop the setgid bit that a folder takes from its parent.
	if made && (mode&0o7000 != 0 || st.Mode&0o777 != mode) {
		if mode&0o7000 == 0 {
			mode |= st.Mode & unix.S_ISGID
		}
		if err := retry(func() error { return unix.Chmod(p, mode) }); err != nil {
			return at("mode", err)
		}
		if err := unix.Stat(p, &st); err != nil {
			return err
		}
	}
	c.s.names.refresh()
	i := c.s.info(p, &st)
	r.Info = &i
	return nil
}

func (c *call) move() error {
	from, to := c.req.Path, c.req.To
	if c.req.Flags&filewire.Replace != 0 {
		return retry(func() error { return unix.Rename(from, to) })
	}
	err := retry(func() error {
		return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	})
	if err == unix.EINVAL || err == unix.ENOSYS {
		// The file system may not know the flag; a folder moved into itself fails again.
		var st unix.Stat_t
		if e := lstatat(unix.AT_FDCWD, to, &st); e == nil {
			return unix.EEXIST
		} else if e != unix.ENOENT {
			return e
		}
		err = retry(func() error { return unix.Rename(from, to) })
	}
	return err
}

// remove takes the last name literally: a link is removed, not what it leads to.
func (c *call) remove() error {
	p := strings.TrimRight(c.req.Path, "/")
	base := p[strings.LastIndexByte(p, '/')+1:]
	if p == "" || base == "." || base == ".." {
		return refuse(filewire.Invalid, "must end in a name that can be removed")
	}
	dir := p[:len(p)-len(base)]
	fd, err := openDir(dir)
	if err == nil {
		d := remover{call: c}
		err = d.entry(fd, base, c.req.Flags&filewire.Recursive != 0, 0)
		unix.Close(fd)
	}
	if err == unix.ENOENT && c.req.Flags&filewire.MissingOK != 0 {
		return nil
	}
	return err
}

// remover removes a tree depth first and holds a descriptor for each level. A folder that lies too deep is moved up first.
type remover struct {
	call  *call
	top   int // the folder that was asked for
	moved int
}

// lift is the depth at which a folder is moved up.
const lift = 200

func (d *remover) entry(dir int, name string, recursive bool, level int) error {
	if err := d.call.ctx.Err(); err != nil {
		return err
	}
	err := retry(func() error { return unix.Unlinkat(dir, name, 0) })
	if err == nil || err == unix.ENOENT {
		return err
	}
	// Linux says EISDIR for a folder, POSIX EPERM.
	var st unix.Stat_t
	if serr := lstatat(dir, name, &st); serr != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return err
	}
	err = retry(func() error { return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR) })
	if err == nil || !recursive || err != unix.ENOTEMPTY && err != unix.EEXIST {
		if err == unix.ENOTEMPTY || err == unix.EEXIST {
			return refuse(filewire.Exists, "is a folder that is not empty: ask for recursive")
		}
		return err
	}
	if level >= lift {
		return d.liftUp(dir, name)
	}
	for {
		fd, err := openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return at(quote(name), err)
		}
		if level == 0 {
			d.top = fd
		}
		err = d.inside(fd, level)
		unix.Close(fd)
		if err != nil {
			return err
		}
		// Entries made meanwhile are removed in another round.
		err = retry(func() error { return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR) })
		if err != unix.ENOTEMPTY && err != unix.EEXIST {
			return err
		}
	}
}

func (d *remover) inside(fd, level int) error {
	buf := make([]byte, 8<<10)
	names := make([]string, 0, 64)
	for {
		n := 0
		err := retry(func() (err error) { n, err = unix.ReadDirent(fd, buf); return err })
		if err != nil {
			return err
		}
		if n <= 0 {
			return nil
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names[:0])
		for _, name := range names {
			if err := d.entry(fd, name, true, level+1); err != nil && err != unix.ENOENT {
				return at(quote(name), err)
			}
		}
	}
}

// liftUp moves a folder to the top of the tree; the next round there finds it.
func (d *remover) liftUp(dir int, name string) error {
	for {
		d.moved++
		err := unix.Renameat2(dir, name, d.top, ".dsec-removed-"+strconv.Itoa(d.moved), unix.RENAME_NOREPLACE)
		if err != unix.EEXIST {
			return err
		}
		if err := d.call.ctx.Err(); err != nil {
			return err
		}
	}
}
