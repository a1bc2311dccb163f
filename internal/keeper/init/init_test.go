package initproc

import (
	"bytes"
	"encoding/binary"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/guest/wire"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// builtWith is the compiler of the committed binary.
const builtWith = "x86_64-linux-gnu-gcc (Debian 12.2.0-14+deb12u1) 12.2.0"

func TestImageIsReproducible(t *testing.T) {
	if len(image) > 40<<10 {
		t.Errorf("process 1 has %d octets", len(image))
	}
	v, err := exec.Command("x86_64-linux-gnu-gcc", "--version").Output()
	if line, _, _ := strings.Cut(string(v), "\n"); err != nil || line != builtWith {
		t.Skipf("needs the compiler of the committed binary, %s", builtWith)
	}
	out := filepath.Join(t.TempDir(), "init")
	if b, err := exec.Command("sh", "src/build.sh", "amd64", out).CombinedOutput(); err != nil {
		t.Fatalf("build.sh: %v\n%s", err, b)
	}
	if b, err := os.ReadFile(out); err != nil || !bytes.Equal(b, image) {
		t.Errorf("init_amd64 is not what build.sh makes of the source (%v): run go generate", err)
	}
}

func TestCommands(t *testing.T) {
	b := newBox(t, tree(t), nil)
	for _, c := range []struct {
		name  string
		start wire.Start
		stdin string
		want  result
	}{
		{"exit code", wire.Start{Argv: []string{"sh", "-c", "echo out; echo err >&2; exit 3"}}, "", result{3, "out\n", "err\n"}},
		{"stdin", wire.Start{Argv: []string{"cat"}}, "x", result{0, "x", ""}},
		{"signal", wire.Start{Argv: []string{"sh", "-c", "kill -9 $$"}}, "", result{-9, "", ""}},
		{"arguments as they are", wire.Start{Argv: []string{"printf", "%s|", "a b", "", "$HOME", "\xff", "l1\nl2"}}, "", result{0, "a b||$HOME|\xff|l1\nl2|", ""}},
		{"process 1 is the parent, session and group are its own", wire.Start{Argv: []string{"sh", "-c", `set -- $(cat /proc/self/stat); echo $PPID; cut -d' ' -f5,6 /proc/$$/stat; echo $$`}}, "", result{}},
		{"absolute script", wire.Start{Argv: []string{"/work/ok.sh"}}, "", result{0, "script\n", ""}},
		{"relative program", wire.Start{Argv: []string{"./ok.sh"}, Cwd: "/work"}, "", result{0, "script\n", ""}},
		{"PATH of the command", wire.Start{Argv: []string{"ok.sh"}, Env: []string{"PATH=/nosuch:/work:/bin"}}, "", result{0, "script\n", ""}},
		{"home is the default cwd", wire.Start{Argv: []string{"pwd"}, User: "alice"}, "", result{0, "/home/alice\n", ""}},
		{"no home", wire.Start{Argv: []string{"pwd"}, User: "nobody"}, "", result{0, "/\n", ""}},
		{"root", wire.Start{Argv: []string{"id"}}, "", result{0, "uid=0(root) gid=0(root) groups=0(root)\n", ""}},
		{"user's groups", wire.Start{Argv: []string{"id"}, User: "alice"}, "", result{0, "uid=1000(alice) gid=1000(alice) groups=4(adm),44(video),1000(alice)\n", ""}},
		{"user by number", wire.Start{Argv: []string{"id"}, User: "1000"}, "", result{0, "uid=1000(alice) gid=1000(alice) groups=4(adm),44(video),1000(alice)\n", ""}},
		{"number without an entry", wire.Start{Argv: []string{"grep", "-E", "^(Uid|Gid|Groups)", "/proc/self/status"}, User: "4711"}, "", result{0, "Uid:\t4711\t4711\t4711\t4711\nGid:\t0\t0\t0\t0\nGroups:\t0 \n", ""}},
		{"a name of digits goes first", wire.Start{Argv: []string{"grep", "-E", "^(Uid|Gid|Groups)", "/proc/self/status"}, User: "1234"}, "", result{0, "Uid:\t50\t50\t50\t50\nGid:\t51\t51\t51\t51\nGroups:\t51 \n", ""}},
		{"user and group", wire.Start{Argv: []string{"id"}, User: "alice:video"}, "", result{0, "uid=1000(alice) gid=44(video) groups=44(video)\n", ""}},
		{"numbers", wire.Start{Argv: []string{"grep", "-E", "^(Uid|Gid|Groups)", "/proc/self/status"}, User: "7:9"}, "", result{0, "Uid:\t7\t7\t7\t7\nGid:\t9\t9\t9\t9\nGroups:\t9 \n", ""}},
		{"environment of root", wire.Start{Argv: []string{"env"}, Env: []string{"BASE=2", "D= $HOME ", "E=", "G=\xff"}}, "",
			result{0, "LANG=C\nBASE=2\nD= $HOME \nE=\nG=\xff\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nHOME=/root\nUSER=root\nLOGNAME=root\n", ""}},
		{"environment of alice", wire.Start{User: "alice", Argv: []string{"env"}, Env: []string{"HOME=/tmp", "PATH=/bin"}}, "",
			result{0, "LANG=C\nBASE=1\nHOME=/tmp\nPATH=/bin\nUSER=alice\nLOGNAME=alice\n", ""}},
		{"the longest argument", wire.Start{Argv: []string{"sh", "-c", `echo ${#1}`, "sh", strings.Repeat("x", 131071)}}, "", result{0, "131071\n", ""}},
		{"signals, mask, umask, nice, descriptors", wire.Start{Argv: []string{"sh", "-c",
			`grep -E 'Sig(Blk|Ign)|Groups' /proc/self/status; umask; ls /proc/self/fd | tr '\n' ' '; cut -d' ' -f19 /proc/self/stat; cat /proc/self/oom_score_adj`}}, "",
			result{0, "Groups:\t0 \nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n0022\n0 1 2 3 0\n0\n", ""}},
		{"capabilities of root", wire.Start{Argv: []string{"grep", "-E", "Cap|NoNew", "/proc/self/status"}}, "",
			result{0, "CapInh:\t0000000000000000\nCapPrm:\t00000000a00c25fb\nCapEff:\t00000000a00c25fb\nCapBnd:\t00000000a00c25fb\nCapAmb:\t0000000000000000\nNoNewPrivs:\t0\n", ""}},
		{"capabilities of alice", wire.Start{User: "alice", Argv: []string{"grep", "Cap", "/proc/self/status"}}, "",
			result{0, "CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t00000000a00c25fb\nCapAmb:\t0000000000000000\n", ""}},
		{"limits", wire.Start{Argv: []string{"sh", "-c", "ulimit -c; ulimit -Sn"}}, "", result{0, "0\n1024\n", ""}},
		{"pipes opened by path as root", wire.Start{Argv: []string{"sh", "-c", "echo a >/dev/stdout; echo b >/dev/stderr; echo c >/proc/self/fd/1; cat /dev/stdin"}}, "x", result{0, "a\nc\nx", "b\n"}},
		{"pipes opened by path as nobody", wire.Start{User: "nobody", Argv: []string{"sh", "-c", "echo a >/dev/stdout; echo b >/dev/stderr; echo c >/proc/self/fd/1; cat /dev/stdin"}}, "x", result{0, "a\nc\nx", "b\n"}},
		{"hostname", wire.Start{Argv: []string{"hostname"}}, "", result{0, "box\n", ""}},
		{"masks", wire.Start{Argv: []string{"sh", "-c", "wc -c </proc/keys; ls -A /proc/acpi /proc/scsi 2>/dev/null | grep -v :; echo 1 > /proc/sys/vm/drop_caches"}}, "",
			result{1, "0\n", "sh: can't create /proc/sys/vm/drop_caches: Read-only file system\n"}},
		{"no host mounts", wire.Start{Argv: []string{"sh", "-c", "cut -d' ' -f2 /proc/mounts | sort -u | grep -v ^/proc | tr '\n' ' '"}}, "", result{0, "/ /dev /dev/pts ", ""}},
		{"pipe signals", wire.Start{Argv: []string{"sh", "-c", `trap "echo T" PIPE; kill -PIPE $$`}}, "", result{0, "T\n", ""}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := b.start(c.start, -1)
			if p.failed != nil {
				t.Fatalf("not started: %+v", *p.failed)
			}
			got := p.finish(c.stdin)
			if strings.HasPrefix(c.name, "process 1 is the parent") {
				f := strings.Fields(got.Out)
				if len(f) != 4 || f[0] != "1" || f[1] != f[3] || f[2] != f[3] {
					t.Errorf("parent, group, session, pid: %v", f)
				}
				return
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

func TestStartFailures(t *testing.T) {
	b := newBox(t, tree(t), nil)
	argv := func(a ...string) wire.Start { return wire.Start{Argv: a} }
	cwd := func(d, u string) wire.Start { return wire.Start{Argv: []string{"true"}, Cwd: d, User: u} }
	user := func(u string) wire.Start { return wire.Start{Argv: []string{"true"}, User: u} }
	for _, c := range []struct {
		name  string
		start wire.Start
		want  wire.Failed
	}{
		{"no program", argv("nosuch"), wire.Failed{Stage: wire.StageProgram, Errno: 2, Text: "program nosuch: not found in PATH (/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)"}},
		{"no program at a path", argv("/no/such"), wire.Failed{Stage: wire.StageProgram, Errno: 2, Text: "program /no/such: not found"}},
		{"path through a file", argv("/work/ok.sh/x"), wire.Failed{Stage: wire.StageProgram, Errno: 20, Text: "program /work/ok.sh/x: not a folder"}},
		{"not executable", argv("/work/noexec.sh"), wire.Failed{Stage: wire.StageProgram, Errno: 13, Text: "program /work/noexec.sh: not executable (mode 0644)"}},
		{"not executable in PATH", wire.Start{Argv: []string{"noexec.sh"}, Env: []string{"PATH=/work:/bin"}}, wire.Failed{Stage: wire.StageProgram, Errno: 13, Text: "program /work/noexec.sh: not executable (mode 0644)"}},
		{"no interpreter", argv("/work/nointerp"), wire.Failed{Stage: wire.StageProgram, Errno: 2, Text: "program /work/nointerp: its interpreter /no/interp: not found"}},
		{"no interpreter in PATH", wire.Start{Argv: []string{"nointerp"}, Env: []string{"PATH=/work:/bin"}}, wire.Failed{Stage: wire.StageProgram, Errno: 2, Text: "program /work/nointerp: its interpreter /no/interp: not found"}},
		{"carriage return", argv("/work/crlf"), wire.Failed{Stage: wire.StageProgram, Errno: 2, Text: "program /work/crlf: its interpreter /bin/sh\\r: not found (the script's lines end with a carriage return)"}},
		{"no loader", argv("/work/noloader"), wire.Failed{Stage: wire.StageProgram, Errno: 2, Text: "program /work/noloader: its loader /nib64/ld-linux-x86-64.so.2: not found"}},
		{"folder", argv("/tmp"), wire.Failed{Stage: wire.StageProgram, Errno: 21, Text: "program /tmp: is a folder"}},
		{"device", argv("/dev/null"), wire.Failed{Stage: wire.StageProgram, Errno: 13, Text: "program /dev/null: is not a regular file"}},
		{"other machine", argv("/work/arm"), wire.Failed{Stage: wire.StageExec, Errno: 8, Text: "program /work/arm: built for aarch64, this is x86_64"}},
		{"no format", argv("/work/noformat"), wire.Failed{Stage: wire.StageExec, Errno: 8, Text: "program /work/noformat: exec format error: neither an ELF program nor a script with #!"}},
		{"empty file", argv("/work/empty"), wire.Failed{Stage: wire.StageExec, Errno: 8, Text: "program /work/empty: exec format error: the file is empty"}},
		{"empty argv", argv(), wire.Failed{Stage: wire.StageProgram, Errno: 22, Text: "no program: argv is empty"}},
		{"empty name", argv(""), wire.Failed{Stage: wire.StageProgram, Errno: 2, Text: "program : not found in PATH (/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)"}},
		{"argument too long", argv("true", "a", strings.Repeat("x", 131072)), wire.Failed{Stage: wire.StageExec, Errno: 7, Text: "program true: argument 2 has 131072 octets; with its end at most 131072 are allowed"}},
		{"cwd missing", cwd("/nosuch", ""), wire.Failed{Stage: wire.StageCwd, Errno: 2, Text: "cwd /nosuch: not found"}},
		{"cwd a file", cwd("/etc/passwd", ""), wire.Failed{Stage: wire.StageCwd, Errno: 20, Text: "cwd /etc/passwd: not a folder"}},
		{"cwd closed", cwd("/closed", "alice"), wire.Failed{Stage: wire.StageCwd, Errno: 13, Text: "cwd /closed: permission denied for uid 1000"}},
		{"cwd of process 1's descriptors", cwd("/proc/1/cwd", ""), wire.Failed{Stage: wire.StageCwd, Errno: 13, Text: "cwd /proc/1/cwd: permission denied for uid 0"}},
		{"cwd a descriptor", cwd("/proc/self/fd/5", ""), wire.Failed{Stage: wire.StageCwd, Errno: 2, Text: "cwd /proc/self/fd/5: not found"}},
		{"user", user("nosuch"), wire.Failed{Stage: wire.StageUser, Errno: 2, Text: "user nosuch: not in /etc/passwd"}},
		{"user with a bad entry", user("bad"), wire.Failed{Stage: wire.StageUser, Errno: 2, Text: "user bad: not in /etc/passwd"}},
		{"group", user("alice:nosuch"), wire.Failed{Stage: wire.StageUser, Errno: 2, Text: "group nosuch: not in /etc/group"}},
		{"empty group", user("alice:"), wire.Failed{Stage: wire.StageUser, Errno: 22, Text: "user alice:: the group is empty"}},
		{"negative", user("-1"), wire.Failed{Stage: wire.StageUser, Errno: 2, Text: "user -1: not in /etc/passwd"}},
		{"uid outside", user("65536"), wire.Failed{Stage: wire.StageUser, Errno: 22, Text: "user 65536:0: outside the sandbox's 65536 ids"}},
		{"environment without a name", wire.Start{Argv: []string{"true"}, Env: []string{"A=b", "=x"}}, wire.Failed{Stage: wire.StageExec, Errno: 22, Text: "environment entry 1 (=x): no name before '='"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := b.start(c.start, -1)
			if p.failed == nil {
				t.Fatalf("started: %+v", p.finish(""))
			}
			if diff := cmp.Diff(c.want, *p.failed); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
	if got := b.sh("echo alive"); got.Out != "alive\n" {
		t.Errorf("afterwards: %+v", got)
	}
}

// A file of the image may be anything; process 1 reads it without harm to itself.
func TestHostilePasswd(t *testing.T) {
	b := newBox(t, tree(t), nil)
	for _, c := range []struct{ name, make, want string }{
		{"FIFO", "mkfifo /etc/passwd", "not in /etc/passwd"},
		{"folder", "mkdir /etc/passwd", "not in /etc/passwd"},
		{"device", "ln -s /dev/zero /etc/passwd", "not in /etc/passwd"},
		{"process 1's memory", "ln -s /proc/1/mem /etc/passwd", "not in /etc/passwd"},
		{"a magic link", "ln -s /proc/self/fd/0 /etc/passwd", "not in /etc/passwd"},
		{"a loop", "ln -s passwd /etc/passwd", "not in /etc/passwd"},
		{"huge line", "head -c 3000000 /dev/zero | tr '\\0' a >/etc/passwd", "not in /etc/passwd"},
		{"NULs", "head -c 3000 /dev/zero >/etc/passwd", "not in /etc/passwd"},
		{"many lines", "yes bob:x:1:1::/: | head -n 200000 >/etc/passwd", "not in /etc/passwd"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := b.sh("rm -rf /etc/passwd; " + c.make); got.Code != 0 {
				t.Fatalf("%+v", got)
			}
			p := b.start(wire.Start{Argv: []string{"true"}, User: "alice"}, -1)
			if p.failed == nil || !strings.Contains(p.failed.Text, c.want) {
				t.Errorf("%+v", p.failed)
			}
			if got := b.run(wire.Start{Argv: []string{"grep", "^Uid", "/proc/self/status"}, User: "1000"}); got.Out != "Uid:\t1000\t1000\t1000\t1000\n" {
				t.Errorf("by number: %+v", got)
			}
		})
	}
}

// What process 1 remembers of a user holds only for the files that it was read from.
func TestUserIsRememberedForItsFiles(t *testing.T) {
	b := newBox(t, tree(t), nil)
	id := func(user string) string {
		t.Helper()
		return b.run(wire.Start{Argv: []string{"id"}, User: user}).Out
	}
	want := "uid=1000(alice) gid=1000(alice) groups=4(adm),44(video),1000(alice)\n"
	for _, c := range []struct{ change, want string }{
		{"sed -i s/:1000:1000:/:1001:1000:/ /etc/passwd", "uid=1001(alice) gid=1000(alice) groups=4(adm),44(video),1000(alice)\n"},
		{"printf 'alice:x:1002:1000::/:\n' >/etc/passwd; printf 'alice:x:1003:1000::/:\n' >/etc/passwd", "uid=1003(alice) gid=1000(alice) groups=4(adm),44(video),1000(alice)\n"},
		{"printf 'video:x:45:alice\n' >/etc/group", "uid=1003(alice) gid=1000 groups=45(video),1000\n"},
	} {
		time.Sleep(3200 * time.Millisecond) // files of a moment ago are read each time
		for range 2 {
			if got := id("alice"); got != want {
				t.Errorf("before %q: %q, want %q", c.change, got, want)
			}
		}
		if got := id("alice:4"); !strings.Contains(got, " gid=4") {
			t.Errorf("another group: %q", got)
		}
		if got := id("alice"); got != want {
			t.Errorf("after another group: %q, want %q", got, want)
		}
		if got := b.sh(c.change); got.Code != 0 {
			t.Fatalf("%s: %+v", c.change, got)
		}
		if got := id("alice"); got != c.want {
			t.Errorf("after %q: %q, want %q", c.change, got, c.want)
		}
		want = c.want
	}
}

func TestWorkloadCannotTouchProcess1(t *testing.T) {
	b := newBox(t, tree(t), nil)
	for _, script := range []string{"cat /proc/1/environ", "ls /proc/1/fd", "readlink /proc/1/exe", "cat /proc/1/maps", "echo 0 >/proc/1/oom_score_adj",
		"ls /proc/1/root/", "nsenter -t 1 -m true", "renice 5 1", "mount -t tmpfs none /tmp", "chroot /proc/1/root true", "hostname x"} {
		if got := b.sh(script); got.Code == 0 || got.Out != "" {
			t.Errorf("%s: %+v", script, got)
		}
	}
	if got := b.sh("for s in $(seq 1 64); do kill -$s 1 2>/dev/null; done; echo on"); got.Out != "on\n" {
		t.Errorf("%+v", got)
	}
	if got := b.sh("grep -E '^(Uid|Groups|CapEff)' /proc/1/status; ls -ld /proc/1 | cut -d' ' -f5-8"); !strings.Contains(got.Out, "Uid:\t65534\t65534\t65534\t65534") {
		t.Errorf("%+v", got)
	}
}

func TestReaping(t *testing.T) {
	b := newBox(t, tree(t), nil)
	if got := b.sh("for i in $(seq 50); do (sh -c 'sleep 0.01; exit 7' &) ; done; exit 4"); got.Code != 4 {
		t.Errorf("%+v", got)
	}
	deadline := time.Now().Add(longest)
	for {
		got := b.sh("ps -o stat,comm | grep -c ^Z")
		if strings.TrimSpace(got.Out) == "0" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("zombies stay: %s", got.Out)
		}
	}
	var all []*proc
	for i := range 60 {
		all = append(all, b.start(wire.Start{Argv: []string{"sh", "-c", "exit $1", "sh", string(rune('0' + i%10))}}, -1))
	}
	for i, p := range all {
		if got := p.finish(""); got.Code != i%10 {
			t.Errorf("command %d: %+v", i, got)
		}
	}
}

func TestSignals(t *testing.T) {
	b := newBox(t, tree(t), nil)
	for _, group := range []bool{false, true} {
		p := b.start(wire.Start{Argv: []string{"sh", "-c", "trap 'echo got; exit 9' TERM; (echo ready; exec sleep 100) & wait"}}, -1)
		buf := make([]byte, 6)
		if _, err := io.ReadFull(p.out, buf); err != nil {
			t.Fatal(err)
		}
		b.conn.Send(wire.TSignal, p.id, wire.Signal{Signal: 15, Group: group})
		if !group { // sleep holds the pipes
			b.wait(p.exited)
			if got := unix.WaitStatus(p.exit.Status).ExitStatus(); got != 9 {
				t.Errorf("exit %d", got)
			}
			continue
		}
		if got := p.finish(""); got.Code != 9 || got.Out != "got\n" {
			t.Errorf("%+v", got)
		}
	}
	b.conn.Send(wire.TSignal, 1, wire.Signal{Signal: 9}) // ended
	b.conn.Send(wire.TSignal, 999, wire.Signal{Signal: 9})
	p := b.register()
	b.conn.Send(wire.TPing, p.id, nil)
	b.wait(p.exited)
}

func TestTerminal(t *testing.T) {
	b := newBox(t, tree(t), nil)
	for _, user := range []string{"", "alice"} {
		p := b.start(wire.Start{User: user, Flags: wire.StartTerminal, Rows: 40, Cols: 100, Argv: []string{"sh", "-c",
			"stty size; tty; echo a >/dev/tty; echo b >/dev/stdout; stat -c '%U %g %a' $(tty); echo $TERM; trap 'stty size; exit 5' WINCH; read x; echo $x; while :; do sleep 0.1; done"}}, -1)
		if p.failed != nil {
			t.Fatalf("%+v", p.failed)
		}
		want := map[string]string{"": "root", "alice": "alice"}[user]
		read := func(until string) string {
			var all []byte
			buf := make([]byte, 1024)
			p.master.SetReadDeadline(time.Now().Add(longest))
			for !bytes.Contains(all, []byte(until)) {
				n, err := p.master.Read(buf)
				if err != nil {
					t.Fatalf("%v after %q", err, all)
				}
				all = append(all, buf[:n]...)
			}
			return string(all)
		}
		if got := read("xterm-256color\r\n"); !strings.HasPrefix(got, "40 100\r\n/dev/pts/0\r\na\r\nb\r\n"+want+" 5 620\r\nxterm") {
			t.Errorf("as %q: %q", user, got)
		}
		io.WriteString(p.master, "hello\n")
		read("hello\r\nhello\r\n")
		unix.IoctlSetWinsize(int(p.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 50, Col: 120})
		read("50 120\r\n")
		b.wait(p.exited)
		if got := unix.WaitStatus(p.exit.Status).ExitStatus(); got != 5 {
			t.Errorf("exit %d", got)
		}
		p.master.Close()
	}
	p := b.start(wire.Start{Flags: wire.StartTerminal, Argv: []string{"stty", "size"}}, -1)
	p.master.SetReadDeadline(time.Now().Add(longest))
	if text, _ := io.ReadAll(p.master); string(text) != "24 80\r\n" { // it ends with EIO
		t.Errorf("size where none was given: %q", text)
	}
	b.wait(p.exited)
}

func TestCgroup(t *testing.T) {
	root := "/sys/fs/cgroup/unified"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	dir, err := os.MkdirTemp(root, "dsec-init-test-")
	if err != nil {
		t.Skipf("needs a cgroup v2 tree: %v", err)
	}
	cmd := filepath.Join(dir, "cmd-1")
	os.Mkdir(cmd, 0o755)
	t.Cleanup(func() {
		for end := time.Now().Add(longest); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if os.Remove(cmd); os.Remove(dir) == nil {
				return
			}
		}
		t.Errorf("%s stays", dir)
	})
	b := newBox(t, tree(t), nil) // after the above: its end comes before
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(b.pid)), 0); err != nil {
		t.Skipf("needs a cgroup v2 tree: %v", err)
	}
	fd := must(unix.Open(cmd, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0))(t, "cgroup")
	defer unix.Close(fd)
	p := b.start(wire.Start{Argv: []string{"true"}}, fd)
	if p.failed == nil || p.failed.Stage != wire.StageCgroup || p.failed.Errno != 13 {
		t.Errorf("into a group that process 1 may not write: %+v", p.failed)
	}
	for _, d := range []string{dir, cmd} {
		os.Chown(filepath.Join(d, "cgroup.procs"), base+65536, -1)
	}
	for flags, want := range map[uint32]string{0: filepath.Base(dir) + "/cmd-1", wire.StartCgroupNS: "0::/\n"} {
		p := b.start(wire.Start{Argv: []string{"grep", "^0:", "/proc/self/cgroup"}, Flags: flags}, fd)
		if p.failed != nil {
			t.Fatalf("%+v", p.failed)
		}
		if got := p.finish(""); !strings.Contains(got.Out, want) {
			t.Errorf("flags %d: %+v", flags, got)
		}
	}
	p = b.start(wire.Start{Argv: []string{"sh", "-c", "setsid sleep 100 & sleep 100"}}, fd)
	if err := os.WriteFile(filepath.Join(cmd, "cgroup.kill"), []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	if got := p.finish(""); got.Code != -9 {
		t.Errorf("killed: %+v", got)
	}
}

func TestBirthFailures(t *testing.T) {
	needRoot(t)
	for _, c := range []struct {
		name string
		ops  []string
		want string
	}{
		{"unknown", []string{wire.Op("nosuch", "x")}, "birth: nosuch x: invalid argument"},
		{"descriptor that isn't there", []string{wire.OpFD("root", 7)}, "birth: root 7: bad descriptor"},
		{"target through a link", []string{wire.Op("private"), wire.OpFD("root", 0), wire.Op("proc", "/link")}, "birth: proc /link: too many links, or a link where none may be"},
		{"target missing", []string{wire.Op("private"), wire.OpFD("root", 0), wire.Op("proc", "/nosuch")}, "birth: proc /nosuch: not found"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			os.Symlink("/proc", filepath.Join(dir, "link"))
			fd := must(unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC))(t, "open_tree")
			defer unix.Close(fd)
			conn, _ := spawn(t)
			if err := conn.Send(wire.TBirth, 0, wire.Birth{UID: base + 65536, Ops: c.ops}, fd); err != nil {
				t.Fatal(err)
			}
			conn.SetDeadline(time.Now().Add(longest))
			f, err := conn.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			m, err := wire.DecodeFailed(f.Body)
			if err != nil || m.Stage != wire.StageBirth || m.Text != c.want {
				t.Errorf("%+v, %v", m, err)
			}
			if _, err := conn.ReadFrame(); err != io.EOF {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

// A holder keeps descriptors that the commands of its user, and only they, can open.
func TestHolder(t *testing.T) {
	b := newBox(t, tree(t), nil)
	host, guest, err := wire.Pair()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })
	p := b.register()
	if err := b.conn.Send(wire.TStart, p.id, wire.Start{User: "alice", Flags: wire.StartHolder}, guest); err != nil {
		t.Fatal(err)
	}
	unix.Close(guest)
	b.wait(p.started)
	if p.failed != nil {
		t.Fatalf("%+v", p.failed)
	}
	host.SetDeadline(time.Now().Add(longest))
	hold := func(id uint64, fds ...int) []uint32 {
		t.Helper()
		if err := host.WriteFrame(wire.Frame{Type: wire.THold, ID: id, FDs: fds}); err != nil {
			t.Fatal(err)
		}
		f, err := host.ReadFrame()
		if err != nil || f.Type != wire.THeld || f.ID != id {
			t.Fatalf("%+v, %v", f, err)
		}
		m, err := wire.DecodeHeld(f.Body)
		if err != nil || len(m.Numbers) != len(fds) {
			t.Fatalf("%+v, %v", m, err)
		}
		return m.Numbers
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	r.Chown(base+1000, base+1000)
	n := hold(7, int(r.Fd()), int(w.Fd()))
	w.Close()
	path := "/proc/" + strconv.Itoa(int(p.hello.PID)) + "/fd/"
	end := path + strconv.Itoa(int(n[1]))
	if got := b.run(wire.Start{User: "alice", Argv: []string{"sh", "-c", "echo hello >" + end}}); got.Code != 0 {
		t.Errorf("%+v", got)
	}
	if got := b.run(wire.Start{User: "nobody", Argv: []string{"sh", "-c", "echo other >" + end}}); got.Code == 0 {
		t.Errorf("another user: %+v", got)
	}
	if got := b.run(wire.Start{User: "alice", Argv: []string{"sh", "-c", "ls " + path + " | tr '\\n' ' '; tr '\\0' ' ' </proc/" + strconv.Itoa(int(p.hello.PID)) + "/environ; cat /proc/" + strconv.Itoa(int(p.hello.PID)) + "/comm"}}); !strings.HasPrefix(got.Out, "0 1 2 3 4 5 LANG=C BASE=1 ") || !strings.HasSuffix(got.Out, "dsec-holder\n") {
		t.Errorf("%+v", got)
	}
	host.Send(wire.TDrop, 0, wire.Drop{Numbers: n})
	r.SetReadDeadline(time.Now().Add(longest))
	if out, err := io.ReadAll(r); err != nil || string(out) != "hello\n" {
		t.Errorf("the pipe after the drop: %q, %v", out, err)
	}
	if again := hold(8, int(r.Fd())); again[0] != n[0] {
		t.Errorf("numbers %v, then %v", n, again)
	}
	host.Close()
	b.wait(p.exited)
	if p.exit.Status != 0 {
		t.Errorf("holder's end: %+v", p.exit)
	}
}

func TestFilterAndNoNewPrivs(t *testing.T) {
	code, err := confine.Container().Compile(false)
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t, tree(t), func(m *wire.Birth) { m.Filter, m.Flags = code, wire.BirthNoNewPrivs })
	status := wire.Start{Argv: []string{"grep", "-E", "^(Seccomp|NoNew)", "/proc/self/status"}}
	if got := b.run(status); got.Out != "NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n" {
		t.Errorf("%+v", got)
	}
	status.Flags = wire.StartNoFilter
	if got := b.run(status); !strings.Contains(got.Out, "Seccomp:\t0\n") {
		t.Errorf("%+v", got)
	}
	if got := b.sh("unshare -U true"); got.Code == 0 || !strings.Contains(got.Err, "not permitted") {
		t.Errorf("%+v", got)
	}
	root := tree(t)
	i386 := append([]byte("\x7fELF\x01\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x03\x00"), make([]byte, 100)...)
	if err := os.WriteFile(filepath.Join(root, "bin/old"), i386, 0o755); err != nil {
		t.Fatal(err)
	}
	b = newBox(t, root, func(m *wire.Birth) { m.Filter = code })
	for _, name := range []string{"/bin/old", "old"} {
		p := b.start(wire.Start{Argv: []string{name}}, -1)
		want := wire.Failed{Stage: wire.StageExec, Errno: 8, Text: "program /bin/old: a 32-bit program (i386); sandboxes run those for x86_64 alone"}
		if p.failed == nil || *p.failed != want {
			t.Errorf("a 32-bit program: %+v", p.failed)
		}
	}
	status.Flags = 0
	if got := b.run(status); got.Out != "NoNewPrivs:\t0\nSeccomp:\t2\nSeccomp_filters:\t1\n" {
		t.Errorf("%+v", got)
	}
}

// With a listener, a call that no honest tool makes waits for the host's word.
func TestListener(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("needs gcc")
	}
	root := tree(t)
	src := filepath.Join(t.TempDir(), "x.c")
	os.WriteFile(src, []byte(`#include <sys/ioctl.h>
#include <errno.h>
int main(void) { return ioctl(0, 0xc028660ful, 0) < 0 ? errno : 0; }
`), 0o644)
	if out, err := exec.Command("gcc", "-static", "-o", filepath.Join(root, "bin/swap"), src).CombinedOutput(); err != nil {
		t.Skipf("needs a static libc: %s", out)
	}
	code, err := confine.Container().Compile(true)
	if err != nil {
		t.Fatal(err)
	}
	b := newBox(t, root, func(m *wire.Birth) { m.Filter = code })
	p := b.start(wire.Start{Argv: []string{"swap"}, User: "alice", Flags: wire.StartNotify}, -1)
	if p.failed != nil || p.listener < 0 {
		t.Fatalf("%+v, listener %d", p.failed, p.listener)
	}
	defer unix.Close(p.listener)
	if n, err := poll(p.listener); n != 1 {
		t.Fatalf("%d, %v", n, err)
	}
	var req [80]byte // seccomp_notif: id, pid, flags, data
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(p.listener), 0xc0502100, uintptr(unsafe.Pointer(&req))); e != 0 {
		t.Fatal(e)
	}
	if nr := binary.NativeEndian.Uint32(req[16:]); nr != unix.SYS_IOCTL {
		t.Errorf("event for call %d", nr)
	}
	var answer [24]byte // seccomp_notif_resp: id, val, error, flags
	copy(answer[:8], req[:8])
	refused := -int32(unix.EPERM)
	binary.NativeEndian.PutUint32(answer[16:], uint32(refused))
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(p.listener), 0xc0182101, uintptr(unsafe.Pointer(&answer))); e != 0 {
		t.Fatal(e)
	}
	if got := p.finish(""); got.Code != int(unix.EPERM) {
		t.Errorf("%+v", got)
	}
}

func TestStreamEndEndsTheSandbox(t *testing.T) {
	b := newBox(t, tree(t), nil)
	p := b.start(wire.Start{Argv: []string{"sleep", "1000"}}, -1)
	b.conn.Close()
	if n, err := poll(p.pidfd); n != 1 {
		t.Errorf("the command outlived the stream: %d, %v", n, err)
	}
}

// poll waits until the descriptor can be read. The runtime's own signals may interrupt the call.
func poll(fd int) (n int, err error) {
	for end := time.Now().Add(longest); time.Now().Before(end); {
		n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(time.Until(end).Milliseconds())+1)
		if err != unix.EINTR {
			break
		}
	}
	return n, err
}

func TestResidentMemory(t *testing.T) {
	b := newBox(t, tree(t), nil)
	for range 20 {
		b.run(wire.Start{Argv: []string{"true"}, Env: []string{"BIG=" + strings.Repeat("x", 100_000)}})
	}
	text, err := os.ReadFile("/proc/" + strconv.Itoa(b.pid) + "/smaps_rollup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); f[0] == "Anonymous:" {
			t.Logf("%s KiB", f[1])
			if n, _ := strconv.Atoi(f[1]); n > 64 {
				t.Errorf("process 1 holds %d KiB of its own", n)
			}
		}
	}
}

func BenchmarkBirthAndEnd(b *testing.B) {
	needRoot(b)
	dir, ns := tree(b), userns(b)
	defer unix.Close(ns)
	for b.Loop() {
		conn, p := spawn(b)
		root := must(unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC))(b, "open_tree")
		dev := devTree(b)
		conn.Send(wire.TBirth, 0, wire.Birth{UID: base + 65536, Ops: birthOps(), Caps: confine.Caps}, root, dev, ns)
		if f, err := conn.ReadFrame(); err != nil || f.Type != wire.THello {
			b.Fatal(f, err)
		}
		unix.Close(root)
		unix.Close(dev)
		conn.Close()
		p.Wait()
	}
}

func BenchmarkCommand(b *testing.B) {
	code, err := confine.Container().Compile(false)
	if err != nil {
		b.Fatal(err)
	}
	for _, filter := range []bool{false, true} {
		b.Run(map[bool]string{false: "bare", true: "filter"}[filter], func(b *testing.B) {
			dir, program := tree(b), "/bin/true"
			// A program without a libc, where it can be made: of busybox's start most is its own.
			src := filepath.Join(b.TempDir(), "nothing.s")
			os.WriteFile(src, []byte(".globl _start\n_start: mov $231, %eax\n xor %edi, %edi\n syscall\n"), 0o644)
			if exec.Command("gcc", "-nostdlib", "-static", "-o", filepath.Join(dir, "bin/nothing"), src).Run() == nil {
				program = "/bin/nothing"
			}
			x := newBox(b, dir, func(m *wire.Birth) {
				if filter {
					m.Filter = code
				}
			})
			null := must(os.OpenFile("/dev/null", os.O_RDWR, 0))(b, "null")
			defer null.Close()
			fd := int(null.Fd())
			for b.Loop() {
				p := x.register()
				x.conn.Send(wire.TStart, p.id, wire.Start{Argv: []string{program}, Cwd: "/"}, fd, fd, fd)
				x.wait(p.exited)
				unix.Close(p.pidfd)
			}
		})
	}
}

// Setuid programs give the sandbox's root, unless no_new_privs was asked for.
func TestSetuid(t *testing.T) {
	needRoot(t)
	root := tree(t, "/bin/dash")
	suid := filepath.Join(root, "bin/suid")
	copyFile(t, "/bin/dash", suid)
	os.Chown(suid, base, base)
	os.Chmod(suid, 0o755|os.ModeSetuid)
	for flags, want := range map[uint32]string{0: "Uid:\t1000\t0\t0\t0\n", wire.BirthNoNewPrivs: "Uid:\t1000\t1000\t1000\t1000\n"} {
		b := newBox(t, root, func(m *wire.Birth) { m.Flags = flags })
		got := b.run(wire.Start{User: "alice", Argv: []string{"suid", "-p", "-c", "while read a b; do case $a in Uid:) echo \"$a\t$b\";; esac; done </proc/self/status"}})
		if got.Out != want {
			if strings.HasSuffix(got.Out, "1000\n") && flags == 0 {
				t.Skip("needs temporary files on a mount without nosuid")
			}
			t.Errorf("flags %d: %+v, want %q", flags, got, want)
		}
	}
}
