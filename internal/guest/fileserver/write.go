package fileserver

import (
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"golang.org/x/sys/unix"
)

// writeFile replaces in place, as `cat >` does. A new file renamed over the old one would be whole at any moment, but would lose
// hard links, owner, ACL and attributes, would need a writable folder, could not follow a link, and would replace /dev/null; a body
// that breaks off is told with what was applied and sent again.
func (c *call) writeFile(r *filewire.Result) error {
	fd, created, err := c.openForWrite()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	kind := kindOf(st.Mode)
	if kind == filewire.Block {
		return refuse(filewire.Denied, "is a block device")
	}
	appends := c.req.Flags&filewire.Append != 0
	if kind == filewire.File {
		if appends {
			if c.req.Offset >= 0 && st.Size != c.req.Offset {
				return refuse(filewire.State, "has "+strconv.FormatInt(st.Size, 10)+" octets, the append expects "+strconv.FormatInt(c.req.Offset, 10))
			}
			r.Start = st.Size
		} else if st.Size > 0 {
			if err := retry(func() error { return unix.Ftruncate(fd, 0) }); err != nil {
				return err
			}
		}
	}
	err = c.pour(fd, r)
	if kind == filewire.File {
		if e := c.finishFile(fd, created, st.Mode); err == nil {
			err = e
		}
	}
	if unix.Fstat(fd, &st) == nil {
		c.s.names.refresh()
		i := c.s.info(c.req.Path, &st)
		r.Info = &i
	}
	return err
}

// openForWrite opens what is there first: creating at once would be refused in a sticky folder for another's file
// (fs.protected_regular), and what was created must be known.
func (c *call) openForWrite() (fd int, created bool, err error) {
	flags := unix.O_WRONLY | unix.O_NONBLOCK | unix.O_NOCTTY
	if c.req.Flags&filewire.Append != 0 {
		flags |= unix.O_APPEND
	}
	p := c.req.Path
	fd, err = openat(unix.AT_FDCWD, p, flags, 0)
	if err != unix.ENOENT {
		return fd, false, err
	}
	if c.req.Flags&filewire.Append != 0 && c.req.Offset > 0 {
		return -1, false, refuse(filewire.State, "isn't there, the append expects "+strconv.FormatInt(c.req.Offset, 10)+" octets")
	}
	mode := c.mode(0o644)
	fd, err = openat(unix.AT_FDCWD, p, flags|unix.O_CREAT, mode&0o777)
	if err == unix.ENOENT && c.req.Flags&filewire.Parents != 0 {
		if i := strings.LastIndexByte(strings.TrimRight(p, "/"), '/'); i > 0 {
			if err := makeParents(p[:i]); err != nil {
				return -1, false, err
			}
			fd, err = openat(unix.AT_FDCWD, p, flags|unix.O_CREAT, mode&0o777)
		}
	}
	return fd, err == nil, err
}

func (c *call) mode(otherwise uint32) uint32 {
	if c.req.Mode == 0 {
		return otherwise
	}
	return c.req.Mode
}

// pour writes the body.
func (c *call) pour(fd int, r *filewire.Result) error {
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	for {
		n, rerr := c.Read(*p)
		if n > 0 {
			k, err := c.writeSome(fd, (*p)[:n])
			r.Applied += int64(k)
			if err != nil {
				return err
			}
		}
		if rerr == io.EOF {
			return nil
		}
		if rerr != nil {
			return rerr
		}
	}
}

func (c *call) writeSome(fd int, p []byte) (done int, err error) {
	deadline := time.Now().Add(quiet)
	for done < len(p) {
		if c.ctx.Err() != nil {
			return done, errBroken
		}
		n, err := unix.Write(fd, p[done:])
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			if err := waitFor(c.ctx, fd, unix.POLLOUT, deadline); err != nil {
				return done, err
			}
		case err != nil:
			return done, err
		case n <= 0:
			return done, io.ErrShortWrite
		default:
			done += n
			deadline = time.Now().Add(quiet)
		}
	}
	return done, nil
}

// finishFile sets what a write clears or must not touch before: mode and time. It runs after a break-off too, so that a new file
// is never left with another mode than asked for.
func (c *call) finishFile(fd int, created bool, had uint32) error {
	if created || c.req.Flags&filewire.SetMode != 0 {
		if err := retry(func() error { return unix.Fchmod(fd, c.mode(0o644)) }); err != nil {
			return at("mode", err)
		}
	}
	if c.req.Flags&filewire.HasTime == 0 {
		return nil
	}
	return at("time", setTime(fd, c.req.Modified))
}

// setTime sets the modification time of an open file.
func setTime(fd int, t time.Time) error {
	ts, err := timespec(t)
	if err != nil {
		return err
	}
	return retry(func() error {
		return unix.UtimesNanoAt(fd, "", []unix.Timespec{{Nsec: unix.UTIME_OMIT}, ts}, unix.AT_EMPTY_PATH)
	})
}

func timespec(t time.Time) (unix.Timespec, error) {
	return unix.TimeToTimespec(t)
}
