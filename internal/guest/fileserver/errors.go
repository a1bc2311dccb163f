package fileserver

import (
	"context"
	"errors"
	"strconv"
	"syscall"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"golang.org/x/sys/unix"
)

// fault is an error with a code of its own.
type fault struct {
	code filewire.Code
	text string
}

func (f *fault) Error() string { return f.text }

func refuse(code filewire.Code, text string) error { return &fault{code, text} }

// at puts an object before an error; the code stays that of the error.
type atError struct {
	object string
	err    error
}

func (e *atError) Error() string { return e.object + ": " + reason(e.err) }
func (e *atError) Unwrap() error { return e.err }

func at(object string, err error) error {
	if err == nil {
		return nil
	}
	return &atError{object, err}
}

// quote makes a path fit for a message.
func quote(p string) string {
	if len(p) > 200 {
		p = p[:100] + "..." + p[len(p)-97:]
	}
	return strconv.Quote(p)
}

// reason is the kernel's, with a hint where its own words mislead.
func reason(err error) string {
	var e syscall.Errno
	if errors.As(err, &e) && err == error(e) {
		switch e {
		case unix.ELOOP:
			return "too many levels of symbolic links (links in a loop?)"
		case unix.ENXIO:
			return "nothing is at the other end (a socket, or a FIFO that nobody reads)"
		case unix.EXDEV:
			return "lies on another file system: copy it, then remove it"
		case unix.EDQUOT:
			return "disk limit reached"
		}
	}
	return err.Error()
}

// codeOf sorts the kernel's errors.
func codeOf(e syscall.Errno) filewire.Code {
	switch e {
	case unix.ENOENT:
		return filewire.NotFound
	case unix.EEXIST, unix.ENOTEMPTY:
		return filewire.Exists
	case unix.EACCES, unix.EPERM, unix.EROFS:
		return filewire.Denied
	case unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EFBIG, unix.EMLINK, unix.EAGAIN:
		return filewire.Exhausted
	case unix.ELOOP, unix.ENAMETOOLONG, unix.EISDIR, unix.ENOTDIR, unix.EINVAL, unix.ESPIPE, unix.EILSEQ, unix.EOVERFLOW:
		return filewire.Invalid
	case unix.ETXTBSY, unix.EBUSY, unix.ENXIO, unix.ENODEV, unix.EPIPE, unix.ESTALE:
		return filewire.State
	case unix.EXDEV, unix.EOPNOTSUPP, unix.ENOSYS, unix.ENOTTY:
		return filewire.Unsupported
	}
	return filewire.Internal
}

// fill puts an error into a result.
func fill(r *filewire.Result, err error) {
	if err == nil {
		return
	}
	r.Text = reason(err)
	var f *fault
	var e syscall.Errno
	switch {
	case errors.Is(err, errBroken):
		r.Code = filewire.Interrupted
	case errors.Is(err, context.Canceled):
		r.Code = filewire.Cancelled
	case errors.As(err, &f):
		r.Code = f.code
	case errors.As(err, &e):
		r.Code, r.Errno = codeOf(e), uint32(e)
	default:
		r.Code = filewire.Internal
	}
}

// skips gathers what a transfer left out, bounded.
type skips struct {
	lines []string
	size  int
	total int64
}

func (s *skips) add(path, why string) {
	s.total++
	line := quote(path) + ": " + why
	if len(s.lines) < filewire.MaxSkipped && s.size+len(line) < 48<<10 {
		s.lines = append(s.lines, line)
		s.size += len(line)
	}
}

// retry runs a call again when a signal cut it short: the runtime's own signals do that on network and user-space file systems.
func retry(f func() error) error {
	for {
		err := f()
		if err != unix.EINTR {
			return err
		}
	}
}

func openat(dir int, name string, flags int, mode uint32) (fd int, err error) {
	err = retry(func() error {
		fd, err = unix.Openat(dir, name, flags|unix.O_CLOEXEC, mode)
		return err
	})
	return fd, err
}

func lstatat(dir int, name string, st *unix.Stat_t) error {
	return retry(func() error {
		return unix.Fstatat(dir, name, st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT)
	})
}

func readlinkat(dir int, name string) (string, error) {
	b := make([]byte, filewire.MaxPath+1)
	n := 0
	err := retry(func() (err error) { n, err = unix.Readlinkat(dir, name, b); return err })
	if err != nil {
		return "", err
	}
	return string(b[:min(n, filewire.MaxPath)]), nil
}
