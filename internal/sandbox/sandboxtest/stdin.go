package sandboxtest

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func testStdin(t *testing.T, e *Env) {
	t.Run("a command without input reads an end of file at once", func(t *testing.T) {
		wantExit(t, e.box(t).run(t, sh("cat; echo end")), 0, "end\n")
	})
	t.Run("input given at once arrives whole, also more than a pipe holds", func(t *testing.T) {
		b := e.box(t)
		in := bytes.Repeat([]byte("0123456789\x00\xff"), 50000)
		wantExit(t, b.run(t, sandbox.Command{Argv: []string{"/bin/cat"}, Stdin: in}), 0, string(in))
	})
	t.Run("a command that does not read its input ends all the same", func(t *testing.T) {
		b := e.box(t)
		wantExit(t, b.run(t, sandbox.Command{Argv: []string{"/bin/true"}, Stdin: make([]byte, 1<<20)}), 0, "")
	})
	t.Run("input by offset: what was taken is skipped, a gap is refused, the end closes", func(t *testing.T) {
		b := e.box(t)
		c := sandbox.Command{Argv: []string{"/bin/cat"}, Stdin: []byte("abc"), StdinOpen: true}
		id := b.start(t, c)
		write := func(offset int64, data string, eof bool, want int64) {
			t.Helper()
			if taken, err := b.inst.Stdin(within(t), id, offset, []byte(data), eof); err != nil || taken != want {
				t.Errorf("stdin at %d: taken %d, %v; want %d", offset, taken, err, want)
			}
		}
		write(3, "def", false, 6)
		write(3, "def", false, 6)
		write(4, "efgh", false, 8)
		if _, err := b.inst.Stdin(within(t), id, 20, []byte("x"), false); !errors.Is(err, sandbox.ErrState) {
			t.Errorf("a gap: %v, want ErrState", err)
		}
		b.waitText(t, id, sandbox.Stdout, "abcdefgh")
		write(8, "", true, 8)
		wantExit(t, b.wait(t, id), 0, "abcdefgh")
		if _, err := b.inst.Stdin(within(t), "never", 0, []byte("x"), false); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("an unknown command: %v, want ErrNotFound", err)
		}
	})
	t.Run("input to a command that does not read waits within the context", func(t *testing.T) {
		b := e.box(t)
		id := b.start(t, sandbox.Command{Argv: []string{"/bin/sleep", "300"}, StdinOpen: true})
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if taken, err := b.inst.Stdin(ctx, id, 0, []byte(strings.Repeat("x", 8<<20)), false); err == nil || taken >= 8<<20 {
			t.Errorf("8 MiB were taken (%d) by a command that does not read: %v", taken, err)
		}
		wantExit(t, b.run(t, sh("echo next")), 0, "next\n")
	})
}
