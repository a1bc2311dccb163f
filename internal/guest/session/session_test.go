package session

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

const longest = 10 * time.Second

// shell is a living shell; the test's process is the holder.
type shell struct {
	t       *testing.T
	cmd     *exec.Cmd
	control *os.File
	ended   chan struct{}
}

// result is what a command left. Ended: the shell ended with it.
type result struct {
	Code     int // exit code, or -signal
	Out, Err string
	Ended    bool
}

func pipe(t *testing.T) (r, w int) {
	t.Helper()
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	return p[0], p[1]
}

// file makes a file that knows the poller of our end of a pipe; the shell's end stays a bare descriptor.
func file(fd int) *os.File {
	unix.SetNonblock(fd, true)
	return os.NewFile(uintptr(fd), "pipe")
}

func open(t *testing.T, program []string, name string) *shell {
	t.Helper()
	r, w := pipe(t)
	argv := Argv(name, os.Getpid(), uint32(r))
	s := &shell{t: t, cmd: exec.Command(program[0], append(append([]string{}, program[1:]...), argv[1:]...)...), control: file(w), ended: make(chan struct{})}
	s.cmd.Dir = t.TempDir()
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { s.cmd.Wait(); close(s.ended) }()
	t.Cleanup(func() {
		s.cmd.Process.Kill()
		<-s.ended
		s.control.Close()
		unix.Close(r)
	})
	return s
}

func (s *shell) run(text string) result { return s.runWith(text, "") }

func (s *shell) runWith(text, stdin string) result {
	s.t.Helper()
	mem, err := unix.MemfdCreate("text", unix.MFD_CLOEXEC)
	if err != nil {
		s.t.Fatal(err)
	}
	m := os.NewFile(uintptr(mem), "text")
	defer m.Close()
	if _, err := m.WriteString(text); err != nil {
		s.t.Fatal(err)
	}
	inR, inW := pipe(s.t)
	outR, outW := pipe(s.t)
	errR, errW := pipe(s.t)
	stR, stW := pipe(s.t)
	in, out, er, st := file(inW), file(outR), file(errR), file(stR)
	defer func() {
		for _, f := range []*os.File{out, er, st} {
			f.Close()
		}
	}()
	for _, f := range []*os.File{out, er, st} {
		f.SetReadDeadline(time.Now().Add(longest))
	}
	go func() { io.WriteString(in, stdin); in.Close() }()
	s.control.SetWriteDeadline(time.Now().Add(longest))
	if _, err := s.control.Write(Command{uint32(inR), uint32(outW), uint32(errW), uint32(mem), uint32(stW)}.Line()); err != nil {
		return result{Code: -1000, Ended: true}
	}
	var o, e []byte
	var wg sync.WaitGroup
	wg.Go(func() { o, _ = io.ReadAll(out) })
	wg.Go(func() { e, _ = io.ReadAll(er) })
	status := make(chan []byte, 1)
	go func() {
		b := make([]byte, MaxStatus)
		n, _ := st.Read(b)
		status <- b[:n]
	}()
	var got result
	select {
	case b := <-status:
		var ok bool
		if got.Code, ok = Status(b); !ok {
			s.t.Fatalf("%q: status %q", text, b)
		}
	case <-s.ended:
		got.Ended = true
		ws := s.cmd.ProcessState.Sys().(syscall.WaitStatus)
		if got.Code = ws.ExitStatus(); ws.Signaled() {
			got.Code = -int(ws.Signal())
		}
	case <-time.After(longest):
		s.t.Fatalf("%.200q: no end", text)
	}
	for _, fd := range []int{inR, outW, errW, stW} {
		unix.Close(fd)
	}
	wg.Wait()
	got.Out, got.Err = string(o), string(e)
	return got
}

// TestMain marks what the test inherited itself: only what the shells leak shall be seen.
func TestMain(m *testing.M) {
	unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC)
	os.Exit(m.Run())
}

// shells are those that are here.
func shells(t *testing.T, do func(t *testing.T, name string, open func(t *testing.T) *shell)) {
	for _, c := range []struct {
		title, name string
		program     []string
	}{
		{"bash", "/bin/bash", []string{"/bin/bash"}},
		{"bash as sh", "/bin/sh", []string{"/bin/bash", "--posix"}},
		{"bash in posix mode", "/bin/bash", []string{"/bin/bash", "--posix"}},
		{"dash", "/bin/sh", []string{"/bin/dash"}},
		{"busybox", "/bin/sh", []string{"/bin/busybox", "ash"}},
	} {
		if _, err := os.Stat(c.program[0]); err != nil {
			continue
		}
		t.Run(c.title, func(t *testing.T) {
			do(t, c.title, func(t *testing.T) *shell { return open(t, c.program, c.name) })
		})
	}
}

func TestOddTexts(t *testing.T) {
	shells(t, func(t *testing.T, name string, open func(t *testing.T) *shell) {
		s := open(t)
		for _, c := range []struct {
			text  string
			code  int
			out   string
			noErr bool
		}{
			{"cat <<'EOF'\nhi\nEOF", 0, "hi\n", true},
			{"echo a # note", 0, "a\n", true},
			{`echo b \`, 0, "b \\\n", true},
			{"echo 'c", 2, "", false},
			{"if true", 2, "", false},
			{"cat <<X\n1\nX\necho 2", 0, "1\n2\n", true},
			{"", 0, "", true},
			{"\n\n# nothing", 0, "", true},
			{"echo $?; false", 1, "0\n", true},
			{"echo $?", 0, "1\n", true},
			{"}", 2, "", false},
			{"done; done", 2, "", false},
			{"echo x; )", 2, "", false},
			{"nosuchprogram", 127, "", false},
			{"/etc/passwd", 126, "", false},
			{"echo $((1/0))", -1, "", false},
			{"echo ${x!bad}", -1, "", false},
			{"cat /nosuch </nosuch", -1, "", false},
			{"(exit 7)", 7, "", true},
			{"sh -c 'kill -9 $$'", 137, "", false},
			{"break; echo on", -2, "", false},
			{"continue; echo on", -2, "", false},
			{"echo 'l1\nl2'; printf %s 'no newline'", 0, "l1\nl2\nno newline", true},
			{"echo ok", 0, "ok\n", true},
		} {
			got := s.run(c.text)
			if got.Ended && c.code == -1 && strings.Contains(name, "posix") || got.Ended && c.code == -1 && name == "bash as sh" {
				s = open(t) // POSIX: an error of an expansion ends a shell that isn't interactive
				continue
			}
			if c.code == -2 {
				if got.Ended {
					t.Errorf("%q ended the session: %+v", c.text, got)
				}
				continue
			}
			if got.Ended {
				t.Fatalf("%q ended the session: %+v", c.text, got)
			}
			if c.text == "echo x; )" { // some read line by line, some word by word
				got.Out = ""
			}
			if c.code >= 0 && got.Code != c.code || c.code < 0 && got.Code == 0 || got.Out != c.out || c.noErr && got.Err != "" {
				t.Errorf("%q: %+v, want %d, %q", c.text, got, c.code, c.out)
			}
			if !c.noErr && got.Err == "" && got.Code != 0 && got.Code != 137 {
				t.Errorf("%q: no text: %+v", c.text, got)
			}
		}
	})
}

func TestEnds(t *testing.T) {
	shells(t, func(t *testing.T, name string, open func(t *testing.T) *shell) {
		for _, c := range []struct {
			text string
			want result
		}{
			{"set -e; false", result{Code: 1, Ended: true}},
			{"echo before; exit 3", result{Code: 3, Out: "before\n", Ended: true}},
			{"exec sh -c 'exit 5'", result{Code: 5, Ended: true}},
			{"exec sh -c 'echo by; exit 5'", result{Code: 5, Out: "by\n", Ended: true}},
			{"kill -9 $$", result{Code: -9, Ended: true}},
			{"trap 'exit 4' EXIT; exit 3", result{Code: 4, Ended: true}},
		} {
			s := open(t)
			if diff := cmp.Diff(c.want, s.run(c.text)); diff != "" {
				t.Errorf("%q (-want +got)\n%s", c.text, diff)
			}
		}
		s := open(t)
		if got := s.run("set -e"); got.Ended {
			t.Fatalf("set -e alone: %+v", got)
		}
		if got := s.run("true; false || echo kept"); got.Ended || got.Out != "kept\n" {
			t.Errorf("%+v", got)
		}
		if strings.HasPrefix(name, "bash") && name != "bash as sh" {
			if got := s.run("false && echo no"); got.Ended || got.Code != 1 {
				t.Errorf("a list that may fail: %+v", got)
			}
		}
		if got := s.run("echo on; false; echo no"); !got.Ended || got.Code != 1 || got.Out != "on\n" {
			t.Errorf("%+v", got)
		}
	})
}

func TestStateStays(t *testing.T) {
	shells(t, func(t *testing.T, name string, open func(t *testing.T) *shell) {
		s := open(t)
		step := func(text, want string) {
			t.Helper()
			if got := s.run(text); got.Ended || got.Out != want {
				t.Errorf("%q: %+v, want %q", text, got, want)
			}
		}
		step("mkdir sub; cd sub; A='a  b'; export B=2; f() { echo \"f $1\"; }; set -- x 'y z'; alias l='echo alias'", "")
		step("pwd | sed 's,.*/,,'; echo \"$A\"; sh -c 'echo $B'; f 1; echo $# \"$2\"", "sub\na  b\n2\nf 1\n2 y z\n")
		if name != "bash as sh" {
			step("l", "alias\n")
		}
		step("set -f; umask 077", "")
		step("echo *; umask; set +f", "*\n0077\n")
		step("sleep 300 >/dev/null 2>&1 & echo", "\n")
		step("jobs >j; grep -c Running j; kill $!; wait $! 2>/dev/null; echo $?", "1\n143\n")
		step("exec 5>kept; echo to five >&5", "")
		step("echo more >&5; cat kept", "to five\nmore\n")
		step("exec 5>&-; set -C", "")
		step("echo noclobber", "noclobber\n")
		step("set +C; set -a; Z=1", "")
		step("sh -c 'echo $Z'; set +a", "1\n")
		step("IFS=:; v=a:b; printf '%s|' $v", "a|b|")
		step("IFS=' \t\n'; trap 'echo trapped' USR1", "")
		step("kill -USR1 $$", "trapped\n")
		step("read() { echo mine; }; printf() { echo mine; }; echo set", "set\n")
		step("unset -f read printf; echo unset", "unset\n")
		if name == "bash" { // elsewhere the name of a special builtin is refused, and that ends the shell
			step("eval() { echo mine; }; eval", "mine\n")
			step("unset -f eval; echo unset", "unset\n")
		}
		step("set -x; echo traced", "traced\n")
		step("set +x", "")
		if name != "bash in posix mode" { // there it ends the shell
			step("true; return 2>/dev/null; echo after", map[bool]string{true: "after\n"}[name == "bash"])
		}
		step("exec >/dev/null; echo lost", "")
		step("echo found", "found\n")
		step("echo $0", map[bool]string{true: "bash\n", false: "sh\n"}[name == "bash" || name == "bash in posix mode"])
	})
}

func TestInput(t *testing.T) {
	shells(t, func(t *testing.T, name string, open func(t *testing.T) *shell) {
		s := open(t)
		if got := s.runWith("read a; echo \"<$a>\"; cat", "one\ntwo\nthree"); got.Out != "<one>\ntwo\nthree" {
			t.Errorf("%+v", got)
		}
		if got := s.run("cat; echo empty"); got.Out != "empty\n" {
			t.Errorf("%+v", got)
		}
		big := strings.Repeat("# "+strings.Repeat("x", 98)+"\n", 3000) + "echo \"" + strings.Repeat("y", 1000) + "\" | wc -c\n"
		if got := s.run(big); strings.TrimSpace(got.Out) != "1001" {
			t.Errorf("300 KB: %d octets out, %+v", len(got.Out), got.Code)
		}
		word := strings.Repeat("z", 300_000)
		if got := s.run("v=" + word + "; echo ${#v}"); got.Out != "300000\n" {
			t.Errorf("long word: %.100q", got.Out)
		}
		if got := s.run("set -a"); got.Code != 0 {
			t.Errorf("%+v", got)
		}
		if got := s.run("unset v; /bin/true\n# " + word); got.Code != 0 {
			t.Errorf("long text with allexport: %d %.100q", got.Code, got.Err)
		}
		if got := s.run("set +a; printf '\\377\\001' | od -An -tx1; echo '\xff\x80' | od -An -tx1"); got.Out != " ff 01\n ff 80 0a\n" {
			t.Errorf("octets: %+v", got)
		}
	})
}

// Children see their three descriptors and nothing of the session's.
func TestChildrenInheritNothing(t *testing.T) {
	shells(t, func(t *testing.T, name string, open func(t *testing.T) *shell) {
		s := open(t)
		for _, text := range []string{"ls /proc/self/fd", "f() { ls /proc/self/fd; }; f", "cat <<X | sh -c 'ls /proc/self/fd'\nh\nX", "sh -c 'exec ls /proc/self/fd' & wait"} {
			if got := s.run(text); got.Out != "0\n1\n2\n3\n" {
				t.Errorf("%q: %+v", text, got)
			}
		}
		got := s.run("sleep 300 >/dev/null 2>&1 </dev/null & echo $!")
		child := "/proc/" + strings.TrimSpace(got.Out)
		var fds []string
		var err error
		// At first it is the shell's copy, then the loader has libraries open.
		for end := time.Now().Add(longest); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if fds, err = filepath.Glob(child + "/fd/*"); len(fds) == 3 || name == "busybox" {
				break
			}
		}
		if err != nil || len(fds) != 3 && name != "busybox" { // whose sleep is the shell itself
			t.Errorf("a background child has %v", fds)
		}
		if got := s.run("ls -l /proc/$$/fd | grep -c pipe"); strings.TrimSpace(got.Out) == "0" {
			t.Errorf("%+v", got)
		}
		// Between commands the shell has nothing of them either.
		deadline := time.Now().Add(longest)
		for {
			fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", s.cmd.Process.Pid))
			pipes := 0
			for _, f := range fds {
				if l, _ := os.Readlink(f); strings.HasPrefix(l, "pipe:") {
					pipes++
				}
			}
			if pipes <= 1 { // the control pipe, being read
				break
			}
			if time.Now().After(deadline) {
				out, _ := exec.Command("ls", "-l", fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid)).Output()
				t.Errorf("%d pipes stay open in the shell\n%s", pipes, out)
				break
			}
			time.Sleep(time.Millisecond)
		}
		s.run("kill $!")
	})
}

func TestStatus(t *testing.T) {
	for _, c := range []struct {
		in   string
		code int
		ok   bool
	}{{"0\n", 0, true}, {"255\n", 255, true}, {"7\nmore", 7, true}, {"", 0, false}, {"7", 0, false}, {"256\n", 256, false}, {"-1\n", 0, false}, {"1e1\n", 0, false}, {"\n", 0, false}, {"0007\n", 0, false}} {
		code, ok := Status([]byte(c.in))
		if ok != c.ok || ok && code != c.code {
			t.Errorf("%q: %d, %v", c.in, code, ok)
		}
	}
	if got := (Command{3, 4, 5, 6, 7}).Line(); !bytes.Equal(got, []byte("3 4 5 6 7\n")) {
		t.Errorf("%q", got)
	}
}
