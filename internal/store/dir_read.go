package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	// Reads end at multiples of this: what a cluster file system serves with one request of its own.
	readUnit = 1 << 20
	// The waits between attempts sum up to about ten seconds.
	firstWait, longestWait, attempts = 20 * time.Millisecond, 2 * time.Second, 12
)

// passing tells an error that a cluster file system gives while it mends itself.
func passing(err error) bool {
	for _, e := range []error{syscall.EIO, syscall.ENOTCONN, syscall.ESTALE, syscall.ETIMEDOUT, syscall.EAGAIN, syscall.EHOSTDOWN, syscall.ECONNRESET} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// patient runs f again as long as it fails with what may pass, and time is left.
func patient(ctx context.Context, f func() error) error {
	wait := firstWait
	for i := 1; ; i++ {
		err := f()
		if err == nil || i == attempts || !passing(err) {
			return err
		}
		select {
		case <-time.After(wait/2 + rand.N(wait/2)):
		case <-ctx.Done():
			return err
		}
		wait = min(2*wait, longestWait)
	}
}

// reader reads a file. A handle that the file system has lost is replaced by a new one of the same name, if that still is the same file.
type reader struct {
	name string
	size int64
	id   fs.FileInfo
	file atomic.Pointer[os.File]
}

func (d *Dir) open(ctx context.Context, key string) (*reader, error) {
	r := &reader{name: d.file(key)}
	err := patient(ctx, func() error {
		f, err := os.Open(r.name)
		if err != nil {
			return err
		}
		if r.id, err = f.Stat(); err == nil {
			r.size, err = length(f)
		}
		if err == nil && !r.id.Mode().IsRegular() {
			err = sandbox.ErrNotFound
		}
		if err != nil {
			f.Close()
			return err
		}
		r.file.Store(f)
		return nil
	})
	return r, err
}

// length asks for the length itself, not for one that this machine remembers.
func length(f *os.File) (int64, error) {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_FORCE_SYNC, unix.STATX_SIZE, &st)
	return int64(st.Size), err
}

func (r *reader) Size() int64 { return r.size }

func (r *reader) Close() error { return r.file.Load().Close() }

func (r *reader) ReadAt(p []byte, off int64) (int, error) {
	return r.ReadAtContext(context.Background(), p, off)
}

// ReadAtContext reads in pieces that end at multiples of 1 MiB.
func (r *reader) ReadAtContext(ctx context.Context, p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, fmt.Errorf("read at %d: %w", off, sandbox.ErrInvalid)
	}
	if off >= r.size {
		return 0, io.EOF
	}
	if int64(len(p)) > r.size-off {
		p, err = p[:r.size-off], io.EOF
	}
	for n < len(p) {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		at := off + int64(n)
		end := min(int64(len(p)), int64(n)+readUnit-at%readUnit)
		got, err := r.piece(ctx, p[n:end], at)
		n += got
		if err != nil {
			return n, err
		}
	}
	return n, err
}

// piece fills p, which lies inside the file, or fails.
func (r *reader) piece(ctx context.Context, p []byte, off int64) (n int, err error) {
	err = patient(ctx, func() error {
		f := r.file.Load()
		got, err := f.ReadAt(p[n:], off+int64(n))
		n += got
		switch {
		case n == len(p):
			return nil
		case err == io.EOF:
			// The file is shorter than it was: a length that was remembered wrongly, which passes, or damage.
			return fmt.Errorf("%s ends at %d of %d octets: %w: %w", r.name, off+int64(n), r.size, io.ErrUnexpectedEOF, syscall.EAGAIN)
		case passing(err):
			r.reopen(f)
		}
		return err
	})
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("%w: %w", err, sandbox.ErrLost)
	}
	return n, err
}

// reopen replaces the handle that failed. Reads under way on it go on; it is closed when the garbage collector finds it.
func (r *reader) reopen(failed *os.File) {
	f, err := os.Open(r.name)
	if err != nil {
		return
	}
	if st, err := f.Stat(); err != nil || !os.SameFile(st, r.id) || !r.file.CompareAndSwap(failed, f) {
		f.Close()
	}
}
