package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/client"
)

// tty is a person's terminal in which dsec runs.
type tty struct {
	*os.File
	cmd *exec.Cmd

	mu   sync.Mutex
	seen bytes.Buffer
}

// inTerminal starts a command in a terminal of its own.
func inTerminal(t testing.TB, cmd *exec.Cmd, rows, cols uint16) *tty {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	must(t, err)
	fd := int(master.Fd())
	must(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	must(t, err)
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	must(t, err)
	x := &tty{File: master, cmd: cmd}
	x.size(t, rows, cols)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	cmd.Env = append(cmd.Env, "TERM=xterm")
	must(t, cmd.Start())
	slave.Close()
	var reading sync.WaitGroup
	reading.Go(func() {
		b := make([]byte, 4096)
		for {
			n, err := master.Read(b)
			x.mu.Lock()
			x.seen.Write(b[:n])
			x.mu.Unlock()
			if err != nil {
				return // the last of its users is gone
			}
		}
	})
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		master.Close()
		reading.Wait()
	})
	return x
}

func (x *tty) size(t testing.TB, rows, cols uint16) {
	t.Helper()
	must(t, unix.IoctlSetWinsize(int(x.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}))
}

func (x *tty) say(t testing.TB, text string) {
	t.Helper()
	_, err := x.WriteString(text)
	must(t, err)
}

func (x *tty) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.seen.String()
}

// until waits until the terminal showed a word so many times.
func (x *tty) until(t testing.TB, word string, times int) {
	t.Helper()
	must(t, eventually(func() error {
		if n := strings.Count(x.text(), word); n < times {
			return fmt.Errorf("%q was shown %d times in %q", word, n, x.text())
		}
		return nil
	}))
}

// code is the exit code of the command, which must end.
func (x *tty) code(t testing.TB) int {
	t.Helper()
	var ended *exec.ExitError
	if err := x.cmd.Wait(); err != nil && !errors.As(err, &ended) {
		t.Fatalf("%v; the terminal showed %q", err, x.text())
	}
	return x.cmd.ProcessState.ExitCode()
}

// What a person sees of `dsec shell` and `dsec top` in a terminal: its size from the first octet on, new sizes, keys that interrupt the program inside
// and not dsec, the shell's exit code; figures that are drawn anew until they are interrupted.
func TestTerminalsOfThePerson(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t, func(o *client.Options) { o.Name = "persons-terminal" })
	t.Run("shell", func(t *testing.T) {
		x := inTerminal(t, s.dsec("shell", sb.ID), 33, 99)
		x.say(t, "stty size\n")
		x.until(t, "33 99", 1)
		x.size(t, 41, 121)
		x.say(t, "until [ \"$(stty size)\" = '41 121' ]; do sleep 0.1; done; echo seen-$((6*7))\n")
		x.until(t, "seen-42", 1)
		x.say(t, "sleep 1000; echo interrupted-$((6*8))\n") // a shell drops the rest of a line that was interrupted, or goes on with it
		must(t, eventually(func() error {
			if got := out(t, sb, "ps -o args | grep -c '^sleep 1000' || true"); strings.TrimSpace(got) != "1" {
				return fmt.Errorf("%s sleeps", got)
			}
			return nil
		}))
		x.say(t, "\x03")
		must(t, eventually(func() error {
			if got := out(t, sb, "ps -o args | grep -c '^sleep 1000' || true"); strings.TrimSpace(got) != "0" {
				return fmt.Errorf("%s sleeps after the interrupt", got)
			}
			return nil
		}))
		x.say(t, "exit 3\n")
		if code := x.code(t); code != 3 {
			t.Errorf("exit code %d, want the shell's 3; the terminal showed %q", code, x.text())
		}
	})
	t.Run("top", func(t *testing.T) {
		x := inTerminal(t, s.dsec("top"), 40, 160)
		x.until(t, sb.ID, 2) // drawn and drawn again
		if !strings.Contains(x.text(), "MEMORY") {
			t.Errorf("%q", x.text())
		}
		x.say(t, "\x03")
		if code := x.code(t); code != 0 && code != 130 {
			t.Errorf("exit code %d after an interrupt", code)
		}
	})
}
