package keeper

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/guest/wire"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// find returns a command that has not ended.
func (b *box) find(id string) (*command, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.cmds[id]
	if c == nil {
		if _, ok := b.known[keyOf(id)]; ok {
			return nil, fmt.Errorf("command %s has ended: %w", id, sandbox.ErrState)
		}
		return nil, fmt.Errorf("command %s: %w", id, sandbox.ErrNotFound)
	}
	return c, nil
}

func (b *box) signal(id string, sig int) error {
	if sig < 1 || sig > 64 {
		return fmt.Errorf("signal %d: want 1 to 64: %w", sig, sandbox.ErrInvalid)
	}
	c, err := b.find(id)
	if err != nil {
		return err
	}
	if c.session != "" {
		return c.place.signal(c, sig)
	}
	c.mu.Lock()
	ended := c.exited
	c.mu.Unlock()
	if ended {
		return fmt.Errorf("signal: command %s has ended: %w", id, sandbox.ErrState)
	}
	if err := b.tell(wire.TSignal, c.num, wire.Signal{Signal: int32(sig)}); err != nil {
		return fmt.Errorf("signal %s: %w", id, err)
	}
	return nil
}

func (b *box) resize(id string, size sandbox.Size) error {
	c, err := b.find(id)
	if err != nil {
		return err
	}
	c.mu.Lock()
	s, relay := c.out, c.relay
	c.mu.Unlock()
	if relay {
		if err := b.tell(wire.TResize, c.num, wire.Resize{Rows: size.Rows, Cols: size.Cols}); err != nil {
			return fmt.Errorf("resize %s: %w", id, err)
		}
		return nil
	}
	if s == nil || !s.tty {
		return fmt.Errorf("resize: command %s has no terminal: %w", id, sandbox.ErrState)
	}
	var e error
	err = s.raw.Control(func(fd uintptr) {
		e = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
	})
	if err := errors.Join(err, e); err != nil {
		return fmt.Errorf("resize %s: %w", id, err)
	}
	return nil
}

func (b *box) stdin(ctx context.Context, r *stdinRequest) (int64, error) {
	c, err := b.find(r.Cmd)
	if err != nil {
		return 0, err
	}
	c.mu.Lock()
	in := c.in
	c.mu.Unlock()
	if in == nil {
		return 0, fmt.Errorf("stdin of %s: it was not opened: %w", r.Cmd, sandbox.ErrState)
	}
	return in.write(ctx, r.Offset, r.Data, r.EOF)
}

func (c *command) closeStdin() {
	c.mu.Lock()
	in := c.in
	c.mu.Unlock()
	if in != nil {
		in.close()
	}
}
