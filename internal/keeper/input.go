package keeper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// input is a command's standard input. Its octets are numbered from 0; those given with the command are the first. A reader that
// has closed it takes everything: writing to it is no error, as for a shell's pipe.
type input struct {
	cap  int64 // the command's output cap, for its terminal
	busy chan struct{}

	mu     sync.Mutex // guards what follows; writes hold busy
	file   *os.File   // nil before a terminal is there
	given  []byte     // first octets, not yet written
	open   bool       // more comes by write
	taken  int64
	closed bool
	tty    bool
	own    bool          // the file is no output's too
	over   chan struct{} // closed when the command has ended
}

// A terminal's end of file is a character, which is lost when a program sets the terminal to another mode before it reads, as shells do that
// are just starting. So it is said again while the command lives, ever less often, as a pipe that was closed has its end at each read.
const (
	eofFirst = 250 * time.Millisecond
	eofLast  = 30 * time.Second
)

func newInput(f *os.File, req *sandbox.Command) *input {
	return &input{file: f, given: req.Stdin, open: req.StdinOpen || req.Terminal != nil, cap: req.OutputCap, busy: make(chan struct{}, 1), tty: req.Terminal != nil,
		over: make(chan struct{})}
}

func (in *input) attach(f *os.File) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.file = f
}

// first writes what was given with the command: at once when it fits into the pipe, else on a goroutine until it is taken.
func (in *input) first(b *box) {
	in.busy <- struct{}{}
	in.mu.Lock()
	data, f := in.given, in.file
	in.given = nil
	in.mu.Unlock()
	if len(data) <= 64<<10 {
		in.finishFirst(f, data)
		return
	}
	b.wait.Add(1)
	go func() {
		defer b.wait.Done()
		in.finishFirst(f, data)
	}()
}

func (in *input) finishFirst(f *os.File, data []byte) {
	defer func() { <-in.busy }()
	in.put(f, data)
	if !in.open {
		in.finish()
	}
}

// put writes until all is taken, the file's deadline passes or it is closed.
func (in *input) put(f *os.File, data []byte) (int, error) {
	n, err := f.Write(data)
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EIO) {
		n, err = len(data), nil // nobody reads any more
	}
	in.mu.Lock()
	in.taken += int64(n)
	in.mu.Unlock()
	return n, err
}

// finish says end of file.
func (in *input) finish() {
	in.mu.Lock()
	f, tty, was := in.file, in.tty, in.closed
	in.closed = true
	in.mu.Unlock()
	switch {
	case was || f == nil:
	case tty:
		f.SetWriteDeadline(time.Now().Add(eofFirst))
		f.Write([]byte{4}) // the terminal's end-of-file character
		go in.finishAgain(f)
	default:
		f.Close()
	}
}

// finishAgain says a terminal's end of file again until the command has ended.
func (in *input) finishAgain(f *os.File) {
	for wait := eofFirst; ; wait = min(2*wait, eofLast) {
		select {
		case <-in.over:
			return
		case <-time.After(wait):
		}
		f.SetWriteDeadline(time.Now().Add(eofFirst)) // nobody may read
		if _, err := f.Write([]byte{4}); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
	}
}

// write takes octets at an offset and returns the offset up to which all were taken; it waits 1 s at most for the reader.
func (in *input) write(ctx context.Context, off int64, data []byte, eof bool) (int64, error) {
	bound := time.Now().Add(time.Second)
	if at, ok := ctx.Deadline(); ok && at.Before(bound) {
		bound = at
	}
	select {
	case in.busy <- struct{}{}:
	case <-time.After(time.Until(bound)):
		return in.takenTo(), nil
	case <-ctx.Done():
		return in.takenTo(), nil
	}
	defer func() { <-in.busy }()
	in.mu.Lock()
	taken, f, closed := in.taken, in.file, in.closed
	in.mu.Unlock()
	end := off + int64(len(data))
	switch {
	case off < 0 || off > taken:
		return taken, fmt.Errorf("stdin at %d: %d octets were taken, so a gap: %w", off, taken, sandbox.ErrState)
	case end < taken || end == taken && (!eof || closed):
		return taken, nil // a resend
	case closed:
		return taken, fmt.Errorf("stdin at %d: it was closed at %d: %w", off, taken, sandbox.ErrState)
	case f == nil:
		return taken, fmt.Errorf("stdin: the command does not run yet: %w", sandbox.ErrState)
	}
	data = data[taken-off:]
	if len(data) > 0 {
		f.SetWriteDeadline(bound)
		n, err := in.put(f, data)
		f.SetWriteDeadline(time.Time{})
		taken += int64(n)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return taken, fmt.Errorf("stdin: %w: %w", err, sandbox.ErrState)
		}
		if n < len(data) {
			return taken, nil
		}
	}
	if eof {
		in.finish()
	}
	return taken, nil
}

func (in *input) takenTo() int64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.taken
}

// close ends it when the command has ended. A terminal's file is its output's too and stays.
func (in *input) close() {
	in.mu.Lock()
	f := in.file
	in.closed = true
	select {
	case <-in.over:
	default:
		close(in.over)
	}
	in.mu.Unlock()
	if f != nil && (!in.tty || in.own) {
		f.Close()
	}
}
