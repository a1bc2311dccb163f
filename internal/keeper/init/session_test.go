package initproc

import (
	"io"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/session"
	"github.com/dsec-dev/dsec/internal/guest/wire"
	"golang.org/x/sys/unix"
)

// A session as the keeper runs one: a holder and a shell of the same user, descriptors of each command held for as long as
// it runs.
func TestSession(t *testing.T) {
	needRoot(t)
	b := newBox(t, tree(t, "/bin/bash", "/bin/dash"), nil)
	for _, c := range []struct {
		shell, user string
		uid         int
	}{{"/bin/bash", "alice", 1000}, {"/bin/bash", "", 0}, {"/bin/dash", "alice", 1000}, {"/bin/sh", "nobody", 65534}} {
		t.Run(c.shell+" "+c.user, func(t *testing.T) {
			host, guest, err := wire.Pair()
			if err != nil {
				t.Fatal(err)
			}
			defer host.Close()
			host.SetDeadline(time.Now().Add(longest))
			holder := b.register()
			if err := b.conn.Send(wire.TStart, holder.id, wire.Start{User: c.user, Flags: wire.StartHolder}, guest); err != nil {
				t.Fatal(err)
			}
			unix.Close(guest)
			b.wait(holder.started)
			hold := func(files ...*os.File) []uint32 {
				t.Helper()
				var fds []int
				for _, f := range files {
					fds = append(fds, int(f.Fd()))
				}
				if err := host.WriteFrame(wire.Frame{Type: wire.THold, FDs: fds}); err != nil {
					t.Fatal(err)
				}
				f, err := host.ReadFrame()
				if err != nil {
					t.Fatal(err)
				}
				m, err := wire.DecodeHeld(f.Body)
				if err != nil || len(m.Numbers) != len(files) {
					t.Fatalf("%+v, %v", m, err)
				}
				return m.Numbers
			}
			pipe := func() (r, w *os.File) {
				t.Helper()
				r, w, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				r.Chown(base+c.uid, base+c.uid)
				return r, w
			}
			cr, cw := pipe()
			defer cw.Close()
			control := hold(cr)[0]
			cr.Close()
			null := must(os.OpenFile("/dev/null", os.O_RDWR, 0))(t, "null")
			defer null.Close()
			shell := b.register()
			n := int(null.Fd())
			if err := b.conn.Send(wire.TStart, shell.id, wire.Start{User: c.user, Argv: session.Argv(c.shell, int(holder.hello.PID), control)}, n, n, n); err != nil {
				t.Fatal(err)
			}
			b.wait(shell.started)
			if shell.failed != nil {
				t.Fatalf("%+v", shell.failed)
			}
			run := func(text, stdin string) (out string, code int, ended bool) {
				t.Helper()
				fd := must(unix.MemfdCreate("text", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING))(t, "memfd")
				m := os.NewFile(uintptr(fd), "text")
				m.WriteString(text)
				unix.FcntlInt(m.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)
				inR, inW := pipe()
				outR, outW := pipe()
				stR, stW := pipe()
				for _, f := range []*os.File{outR, stR} {
					f.SetReadDeadline(time.Now().Add(longest))
					defer f.Close()
				}
				k := hold(inR, outW, m, stW)
				for _, f := range []*os.File{inR, outW, m, stW} {
					f.Close()
				}
				io.WriteString(inW, stdin)
				inW.Close()
				cw.Write(session.Command{Stdin: k[0], Stdout: k[1], Stderr: k[1], Text: k[2], Status: k[3]}.Line())
				status := make(chan []byte, 1)
				go func() {
					b := make([]byte, session.MaxStatus)
					n, _ := stR.Read(b)
					status <- b[:n]
				}()
				select {
				case s := <-status:
					code, _ = session.Status(s)
				case <-shell.exited:
					code, ended = syscall.WaitStatus(shell.exit.Status).ExitStatus(), true
				}
				host.Send(wire.TDrop, 0, wire.Drop{Numbers: k})
				o, err := io.ReadAll(outR)
				if err != nil {
					t.Fatalf("%q: %v", text, err)
				}
				return string(o), code, ended
			}
			for _, s := range []struct {
				text, stdin, out string
				code             int
				ended            bool
			}{
				{"cd /tmp; X=1; echo $X; cat", "input", "1\ninput", 0, false},
				{"pwd; echo $X; false", "", "/tmp\n1\n", 1, false},
				{"echo a >/dev/stdout; echo b >/dev/stderr; echo $?", "", "a\nb\n0\n", 0, false},
				{"cat <<'EOF'\nhi\nEOF", "", "hi\n", 0, false},
				{"grep -E 'Sig(Blk|Ign)' /proc/self/status", "", "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n", 0, false},
				{"ls /proc/self/fd", "", "0\n1\n2\n3\n", 0, false},
				{"echo end; exit 3", "", "end\n", 3, true},
			} {
				out, code, ended := run(s.text, s.stdin)
				if out != s.out || code != s.code || ended != s.ended {
					t.Errorf("%q: %q, %d, %v; want %q, %d, %v", s.text, out, code, ended, s.out, s.code, s.ended)
				}
			}
			host.Close()
			b.wait(holder.exited)
		})
	}
}
