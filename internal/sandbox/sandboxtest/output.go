package sandboxtest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func testOutput(t *testing.T, e *Env) {
	t.Run("stdout and stderr are kept apart, octet for octet", func(t *testing.T) {
		b := e.box(t)
		r := b.run(t, sh(`printf 'o\0\377'; printf 'e\n\r' >&2`))
		if r.stdout != "o\x00\xff" || r.stderr != "e\n\r" {
			t.Errorf("stdout %q, stderr %q", r.stdout, r.stderr)
		}
	})
	t.Run("B15: the last octets of a program that ends at once are never lost", func(t *testing.T) {
		b := e.box(t)
		for _, c := range []struct {
			name string
			cmd  sandbox.Command
			want int64
			tail string
		}{
			{"one octet", sandbox.Command{Argv: []string{"/bin/printf", "x"}}, 1, "x"},
			{"200,000 octets", sandbox.Command{Argv: []string{"/bin/head", "-c", "200000", "/dev/zero"}}, 200000, "\x00"},
		} {
			t.Run(c.name, func(t *testing.T) { b.repeat(t, e.times(1000), c.cmd, c.want, c.tail) })
		}
		t.Run("terminal", func(t *testing.T) {
			e.skipUnless(t, e.Backend.Capabilities().Terminal, NoTerminal)
			c := sh("seq 1 50; echo end")
			c.Terminal = &sandbox.Size{Rows: 24, Cols: 80}
			b.repeat(t, e.times(1000), c, 0, "end\r\n")
		})
	})
	t.Run("B33: up to the cap nothing is cut, beyond it the cut is told", func(t *testing.T) {
		b := e.box(t)
		const limit = 10000
		for _, n := range []int64{0, 1, limit - 1, limit, limit + 1, 10 * limit} {
			for _, stream := range []sandbox.StreamName{sandbox.Stdout, sandbox.Stderr} {
				t.Run(fmt.Sprintf("%d octets of stream %d", n, stream), func(t *testing.T) {
					text := fmt.Sprintf("seq 1 1000000 | head -c %d", n)
					if stream == sandbox.Stderr {
						text += " >&2"
					}
					c := sh(text + "; exit 3")
					c.OutputCap = limit
					r := b.run(t, c)
					if r.Kind != sandbox.Exited || r.Code != 3 {
						t.Fatalf("%s; want exited 3: the cap must not touch the command", describe(r.Outcome))
					}
					end, got := r.Stdout, r.stdout
					if stream == sandbox.Stderr {
						end, got = r.Stderr, r.stderr
					}
					whole := numbers(n)
					want := whole
					if n > limit {
						tail := sandbox.Tail(limit)
						want = whole[:limit-tail] + whole[n-tail:]
					}
					if end.Total != n || end.Truncated != (n > limit) || got != want {
						t.Errorf("end %+v with %d octets kept; want total %d, truncated %v, the first and last octets", end, len(got), n, n > limit)
					}
				})
			}
		}
	})
	t.Run("B33: 100 MB without a newline pass the cap and do not stop the command", func(t *testing.T) {
		b := e.box(t)
		c := sh("head -c 100000000 /dev/zero; echo done >&2")
		c.OutputCap = 1 << 20
		r := b.run(t, c)
		if r.Kind != sandbox.Exited || r.stderr != "done\n" || r.Stdout.Total != 100000000 || !r.Stdout.Truncated || len(r.stdout) != 1<<20 {
			t.Errorf("%s; stdout %+v, %d kept, stderr %q", describe(r.Outcome), r.Stdout, len(r.stdout), r.stderr)
		}
	})
	t.Run("a sink that refuses for a while gets everything once more, and nothing twice", func(t *testing.T) {
		b := e.box(t)
		b.rec.refuseNext(5)
		r := b.run(t, sh("seq 1 50000; seq 1 50000 >&2; exit 4"))
		if r.Code != 4 || r.stdout != r.stderr || !strings.HasSuffix(r.stdout, "\n50000\n") {
			t.Errorf("%s with %d and %d octets", describe(r.Outcome), len(r.stdout), len(r.stderr))
		}
	})
	t.Run("octets after the end are marked late and lie beyond it", func(t *testing.T) {
		b := e.box(t)
		r := b.run(t, sh("(while [ ! -e /tmp/go ]; do sleep 0.05; done; echo late) & echo early"))
		wantExit(t, r, 0, "early\n")
		if !r.OutputOpen || r.Stdout.Total != 6 {
			t.Errorf("%s, stdout %+v", describe(r.Outcome), r.Stdout)
		}
		id := fmt.Sprintf("c%d", b.n.Load())
		b.out(t, "touch /tmp/go")
		b.waitText(t, id, sandbox.Stdout, "early\nlate\n")
	})
	t.Run("B02: /dev/stdout, /dev/stderr and /dev/stdin can be opened, by every user", func(t *testing.T) {
		b := e.box(t)
		for _, user := range []string{"root", "nobody", "alice"} {
			c := sh("echo a >/dev/stdout; echo b >/dev/stderr; echo c >/proc/self/fd/1")
			c.User = user
			r := b.run(t, c)
			wantExit(t, r, 0, "a\nc\n")
			if r.stderr != "b\n" {
				t.Errorf("%s: stderr %q, want b", user, r.stderr)
			}
			c = sh("cat /dev/stdin")
			c.User, c.Stdin = user, []byte("x")
			wantExit(t, b.run(t, c), 0, "x")
		}
		t.Run("terminal", func(t *testing.T) {
			e.skipUnless(t, e.Backend.Capabilities().Terminal, NoTerminal)
			c := sh("echo a >/dev/stdout; echo b >/dev/stderr; echo c >/dev/tty")
			c.User, c.Terminal = "nobody", &sandbox.Size{Rows: 24, Cols: 80}
			wantExit(t, b.run(t, c), 0, "a\r\nb\r\nc\r\n")
		})
	})
	t.Run("two commands at once keep their output apart", func(t *testing.T) {
		b := e.box(t)
		one := b.start(t, sh("for i in 1 2 3 4 5 6 7 8; do echo one; sleep 0.01; done"))
		two := b.start(t, sh("for i in 1 2 3 4 5 6 7 8; do echo two; sleep 0.01; done"))
		wantExit(t, b.wait(t, one), 0, strings.Repeat("one\n", 8))
		wantExit(t, b.wait(t, two), 0, strings.Repeat("two\n", 8))
	})
}

// numbers are the first n octets of the lines 1, 2, 3 and so on.
func numbers(n int64) string {
	var s strings.Builder
	for i := 1; int64(s.Len()) < n; i++ {
		fmt.Fprintln(&s, i)
	}
	return s.String()[:n]
}

// repeat runs a command many times, 8 at once; want 0 leaves the length open.
func (b *box) repeat(t *testing.T, times int, c sandbox.Command, want int64, tail string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*Patience)
	defer cancel()
	var wg sync.WaitGroup
	slot := make(chan struct{}, 8)
	for range times {
		wg.Add(1)
		slot <- struct{}{}
		go func() {
			defer wg.Done()
			defer func() { <-slot }()
			c := c
			c.ID = fmt.Sprintf("c%d", b.n.Add(1))
			c.Fill(b.spec)
			if err := b.inst.Start(ctx, &c); err != nil {
				t.Errorf("start: %v", err)
				return
			}
			o, ok := b.rec.waitEnd(c.ID, Patience)
			got := b.rec.text(c.ID, sandbox.Stdout)
			if !ok || o.Kind != sandbox.Exited || o.Code != 0 || (want > 0 && int64(len(got)) != want) || !strings.HasSuffix(got, tail) {
				t.Errorf("end seen %v: %s with %d octets, the last %q", ok, describe(o), len(got), got[max(0, len(got)-10):])
			}
		}()
	}
	wg.Wait()
}
