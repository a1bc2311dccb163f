package guest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Incomplete is the error of a write, append or upload that was begun, or was about to be, and did not end. It wraps the reason.
type Incomplete struct {
	Applied     int64 // octets of the body applied; -1 where the server could not say
	Start       int64 // write: the size before; -1 where nothing was begun
	Interrupted bool  // the body broke off, or its client went away; else the sandbox refused to go on
	Err         error
}

func (e *Incomplete) Error() string {
	if e.Applied < 0 {
		return fmt.Sprintf("%v (octets applied: unknown)", e.Err)
	}
	return fmt.Sprintf("%v (%d octets applied)", e.Err, e.Applied)
}

func (e *Incomplete) Unwrap() error { return e.Err }

var errInterrupted = errors.New("the body broke off")

var sentinels = map[filewire.Code]error{
	filewire.NotFound:    sandbox.ErrNotFound,
	filewire.Exists:      sandbox.ErrExists,
	filewire.Invalid:     sandbox.ErrInvalid,
	filewire.State:       sandbox.ErrState,
	filewire.Exhausted:   sandbox.ErrExhausted,
	filewire.Denied:      sandbox.ErrDenied,
	filewire.Unsupported: sandbox.ErrUnsupported,
	filewire.Interrupted: errInterrupted,
	filewire.Cancelled:   context.Canceled,
	filewire.Internal:    sandbox.ErrLost,
}

// failure is the error of a result, nil for OK.
func (c *call) failure(r *filewire.Result) error {
	if r.Code == filewire.OK {
		return nil
	}
	return fmt.Errorf("%s: %s: %w", c.act, printable(r.Text), sentinels[r.Code])
}

// printable makes a text of the guest's fit for a terminal and a log line.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

// CheckMode refuses a mode that was most likely written in decimal: 755 is 01363, whose sticky bit no file has and whose owner
// could not read a folder. dir says what the mode is for.
func CheckMode(mode uint32, dir bool) error {
	switch {
	case mode > 0o7777:
		return fmt.Errorf("mode %d: is %#o, beyond 07777: %w", mode, mode, sandbox.ErrInvalid)
	case mode&0o1000 != 0 && (!dir || mode&0o700 != 0o700):
		return fmt.Errorf("mode %d: is %#o with the sticky bit; a mode is octal, so 0755 is the number 493: %w", mode, mode, sandbox.ErrInvalid)
	}
	return nil
}
