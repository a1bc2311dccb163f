package fileserver

import (
	"context"
	"os"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"golang.org/x/sys/unix"
)

// quiet bounds the wait for a FIFO's writer or a device's next octets, where the host's deadline does not end it before.
const quiet = 30 * time.Second

func (c *call) read(r *filewire.Result) error {
	fd, err := openat(unix.AT_FDCWD, c.req.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	kind := kindOf(st.Mode)
	if kind == filewire.Dir {
		return refuse(filewire.Invalid, "is a folder: list or download it")
	}
	seekable := kind == filewire.File || kind == filewire.Block
	if c.req.Offset > 0 {
		if _, err := unix.Seek(fd, c.req.Offset, unix.SEEK_SET); err != nil {
			return at("offset", err)
		}
	}
	c.s.names.refresh()
	i := c.s.info(c.req.Path, &st)
	c.batch.AddInfo(&i)
	if err := c.flush(); err != nil {
		return err
	}
	// The end is that of the moment of opening: a file that grows as fast as it is read would never end. A size of 0 says nothing
	// (all of /proc); if such a file shows a size after its first octets, that one counts.
	left := c.req.Length
	if seekable && st.Size > 0 {
		rest := max(st.Size-c.req.Offset, 0)
		if left == 0 || left > rest {
			left = rest
		}
		if left == 0 {
			return nil
		}
	}
	unsure := seekable && st.Size == 0
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	for {
		want := filewire.MaxData
		if left > 0 {
			want = int(min(int64(want), left))
		}
		n, err := c.readSome(fd, kind, (*p)[filewire.HeaderSize:filewire.HeaderSize+want])
		if err != nil {
			return err
		}
		if n == 0 {
			return nil
		}
		if err := c.send(filewire.GuestData, (*p)[:filewire.HeaderSize+n]); err != nil {
			return err
		}
		r.Applied += int64(n)
		if left > 0 {
			if left -= int64(n); left == 0 {
				return nil
			}
		}
		if unsure {
			unsure = false
			if unix.Fstat(fd, &st) == nil && st.Size > 0 && c.req.Length == 0 {
				if left = st.Size - c.req.Offset - r.Applied; left <= 0 {
					return nil
				}
			}
		}
	}
}

// readSome reads what is there; 0 is the end.
func (c *call) readSome(fd int, kind filewire.Kind, p []byte) (int, error) {
	deadline := time.Now().Add(quiet)
	for {
		if kind == filewire.Fifo {
			// Without a writer a read says "end" at once, which is not the end of what nobody has written yet.
			if err := waitFor(c.ctx, fd, unix.POLLIN, deadline); err != nil {
				return 0, err
			}
		}
		n, err := unix.Read(fd, p)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			if err := waitFor(c.ctx, fd, unix.POLLIN, deadline); err != nil {
				return 0, err
			}
		case err != nil:
			return 0, err
		default:
			return max(n, 0), nil
		}
		if err := c.ctx.Err(); err != nil {
			return 0, err
		}
	}
}

// waitFor waits until a descriptor is ready or hung up. A cancel wakes it at once, so that no FIFO stays open behind a call.
func waitFor(ctx context.Context, fd int, events int16, deadline time.Time) error {
	fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
	if n, err := unix.Poll(fds, 0); err == nil && n > 0 {
		return nil
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return err
	}
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
		close(woken)
	})
	defer func() {
		if !stop() {
			<-woken // it may still hold the number of a descriptor that is about to be closed
		}
		unix.Close(wake)
	}()
	fds = append(fds, unix.PollFd{Fd: int32(wake), Events: unix.POLLIN})
	for {
		left := time.Until(deadline)
		if left <= 0 {
			return refuse(filewire.State, "nothing came or went for "+quiet.String()+" (a FIFO whose other end nobody has open?)")
		}
		n, err := unix.Poll(fds, int(left/time.Millisecond)+1)
		switch {
		case err != nil && err != unix.EINTR:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil && n > 0:
			return nil
		}
	}
}

// isRoot says whether owners may be given away.
func isRoot() bool { return os.Geteuid() == 0 }
