package keeper

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// heldBound is how long a command may take until it opens the file that is held: one that loads a framework takes a while.
const heldBound = 2 * time.Minute

// hold makes the file that is held, empty, with a mark on it that keeps who opens it waiting.
func (x *running) hold() (err error) {
	if x.source, err = x.newFile(x.r.Hold); err != nil {
		return fmt.Errorf("make %.80q: %w", x.r.Hold, err)
	}
	if err := unix.Fchown(x.source, int(x.g.uid), int(x.g.uid)); err != nil {
		return fmt.Errorf("make %.80q: %w", x.r.Hold, err)
	}
	x.mark, err = unix.FanotifyInit(unix.FAN_CLASS_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_CLOEXEC)
	switch {
	case err == unix.EMFILE: // a user has a bound of its own for these (fs.fanotify.max_user_groups)
		return fmt.Errorf("hold its program: too many are held: %w", sandbox.ErrExhausted)
	case err != nil:
		return fmt.Errorf("hold its program: this kernel has no permission events of fanotify: %w: %w", err, sandbox.ErrUnsupported)
	}
	x.mine = append(x.mine, x.mark)
	if err := unix.FanotifyMark(x.mark, unix.FAN_MARK_ADD, unix.FAN_OPEN_PERM, x.disk, "work/"+x.r.Hold); err != nil {
		return fmt.Errorf("hold its program: this kernel has no permission events of fanotify: %w: %w", err, sandbox.ErrUnsupported)
	}
	return nil
}

// held waits until the command has opened the file that is held, or has ended before.
func (x *running) held(ctx context.Context) error {
	x.ctl.SetReadDeadline(time.Now().Add(heldBound))
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { x.ctl.SetReadDeadline(time.Unix(1, 0)); close(cut) })
	told, err := x.hear()
	if !stop() {
		<-cut
	}
	switch {
	case err == nil && len(told) == 1:
		return nil
	case err == nil && len(told) == reportSize:
		x.early = told
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("wait for its command to start: %w", ctx.Err())
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("its command did not open %.80q within %v, so it can't be started before its program is there: %w", x.r.Hold, heldBound, sandbox.ErrUnsupported)
	}
	return fmt.Errorf("its process 1 tells nothing (%v): %w", err, sandbox.ErrLost)
}

// over says that one that waits for its program has ended.
func (x *running) over() (over bool) {
	c, err := x.ctl.SyscallConn()
	if err != nil {
		return true
	}
	err = c.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		over = err == nil && n > 0
	})
	return over || err != nil
}

// release gives a held call its program, and its input where it was made ahead, and lets it go on. When that fails the call is ended.
func (x *running) release(r *Call, fds []int) (err error) {
	x.r = r
	if x.early != nil { // it never came to its program
		return nil
	}
	defer func() {
		if err != nil {
			x.abandon()
		}
	}()
	if r.StdinFD {
		if x.input >= 0 {
			err = copyFile(x.input, fds[0])
		}
		fds = fds[1:]
	}
	if x.input >= 0 && err == nil {
		err = sealWith(x.input, r.Stdin)
	}
	if err != nil {
		return fmt.Errorf("standard input: %w", err)
	}
	if err := x.lay(fds, func(path string) bool { return path == r.Hold }); err != nil {
		return err
	}
	b := binary.LittleEndian.AppendUint64(nil, uint64(r.CPU))
	if _, err := x.ctl.Write(binary.LittleEndian.AppendUint64(b, uint64(r.Wall))); err != nil {
		return fmt.Errorf("tell its process 1: %w: %w", err, sandbox.ErrLost)
	}
	return nil
}

// abandon ends a call that nobody waits for.
func (x *running) abandon() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	x.wait(ctx)
}
