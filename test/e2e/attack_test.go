package e2e

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// attacker is a layer with test/attack.
func (s *service) attacker(t testing.TB) string {
	t.Helper()
	program, err := attackProgram()
	must(t, err)
	return s.named(t, "test/attack", func() (io.ReadCloser, error) {
		data := tarOf(entry{name: "opt/attack", mode: 0o755, data: string(program)})
		return io.NopCloser(strings.NewReader(string(data))), nil
	})
}

var attackProgram = sync.OnceValues(func() ([]byte, error) {
	out := filepath.Join(scratch, "attack")
	cmd := exec.Command("go", "build", "-o", out, "./test/attack")
	cmd.Dir = repository()
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build attack: %w\n%s", err, b)
	}
	return os.ReadFile(out)
})

func (s *service) attackBox(t testing.TB, edit ...func(*client.Options)) *client.Sandbox {
	t.Helper()
	return s.debianBox(t, append([]func(*client.Options){func(o *client.Options) {
		o.Layers = []string{s.debian(t), s.attacker(t)}
	}}, edit...)...)
}

func attack(t *testing.T, sb *client.Sandbox, user string, args ...string) {
	t.Helper()
	r := exe(t, sb, client.Cmd{User: user, Argv: append([]string{"/opt/attack"}, args...)})
	for line := range strings.Lines(string(r.Stdout)) {
		if strings.Contains(line, "WRONG") {
			t.Errorf("as %s: %s", user, line)
		}
	}
	if !r.OK() {
		t.Errorf("as %s: %s, stderr %.2000q", user, describeOutcome(r.Outcome), r.Stderr)
	}
	t.Logf("as %s: %s", user, r.Stdout[strings.LastIndex(strings.TrimSpace(string(r.Stdout)), "\n")+1:])
}

// What a hostile program tries gets the answer that SECURITY.md promises, as root of the sandbox and as anybody else.
func TestAttacksFromInside(t *testing.T) {
	t.Parallel()
	s := shared(t)
	host := exec.Command("sleep", "600") // its number is none of the sandbox's
	must(t, host.Start())
	t.Cleanup(func() { host.Process.Kill(); host.Wait() })
	for _, user := range []string{"root", "alice", "12345:12345"} {
		for _, nnp := range []bool{false, true} {
			sb := s.attackBox(t, func(o *client.Options) { o.NoNewPrivs = nnp })
			attack(t, sb, user, "run", fmt.Sprint(host.Process.Pid))
			if r := exe(t, sb, sh("echo lives")); string(r.Stdout) != "lives\n" {
				t.Errorf("afterwards: %s", describe(r))
			}
			r := exe(t, sb, terminal(client.Cmd{User: user, Argv: []string{"/opt/attack", "run"}}, 24, 80))
			if !r.OK() {
				t.Errorf("on a terminal as %s: %s", user, r.Stdout)
			}
		}
	}
}

// A call that no honest tool makes is refused and stands in the log with its command.
func TestRefusedCallsAreLogged(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.attackBox(t)
	denied := func() (calls map[string]int) {
		calls = map[string]int{}
		must(t, s.client().Log(within(t), &dsecv1.ReadLogRequest{Sandbox: sb.ID}, func(r *dsecv1.LogRecord) error {
			if r.Kind == "denied" {
				calls[r.Step+" "+r.RequestJson]++
			}
			return nil
		}))
		return calls
	}
	exe(t, sb, client.Cmd{Argv: []string{"bash", "-c", "strace -f true; cp --reflink=auto /bin/true /tmp/t; dpkg -l; python3 -c 1"}})
	if got := denied(); len(got) != 0 {
		t.Errorf("honest tools: %v", got)
	}
	attack(t, sb, "alice", "run")
	ses := session(t, sb, client.SessionOptions{})
	inSession, err := ses.Run(within(t), "/opt/attack run")
	must(t, err)
	p, err := sb.Run(within(t), client.Cmd{ID: "swap", Argv: []string{"/opt/attack", "swap"}})
	must(t, err)
	if !p.OK() {
		t.Errorf("%s", describe(p))
	}
	must(t, eventually(func() error {
		got := denied()
		all := fmt.Sprint(got)
		for _, want := range []string{"EXT4_IOC_MOVE_EXT", "XFS_IOC_SWAPEXT", "open_by_handle_at", "kexec_load", "attack", "swap ", inSession.ID + " "} {
			if !strings.Contains(all, want) {
				return fmt.Errorf("no %s in %s", want, all)
			}
		}
		return nil
	}))
}

func TestAttacksOnNeighbours(t *testing.T) {
	t.Parallel()
	s := shared(t)
	name := fmt.Sprintf("dsec-attack-%d", os.Getpid())
	// What the host itself offers.
	tcp, err := net.Listen("tcp", "0.0.0.0:0")
	must(t, err)
	defer tcp.Close()
	abstract, err := net.Listen("unix", "@"+name+"-host")
	must(t, err)
	defer abstract.Close()
	port := tcp.Addr().(*net.TCPAddr).Port
	list, err := net.InterfaceAddrs()
	must(t, err)
	for _, network := range []string{"none", "open"} {
		victim := s.attackBox(t, func(o *client.Options) { o.Network = network })
		p, err := victim.Start(within(t), client.Cmd{Argv: []string{"/opt/attack", "leave", name}})
		must(t, err)
		var left string
		must(t, eventually(func() error {
			b, err := peek(t, s, victim, p.ID)
			if left = string(b); err == nil && !strings.Contains(left, "left") {
				return fmt.Errorf("not yet: %q", b)
			}
			return err
		}))
		targets := []string{"unix:" + name, "unix:" + name + "-host", fmt.Sprintf("tcp:127.0.0.1:%d", port), "tcp:169.254.169.254:80", "tcp:127.0.0.1:7654",
			fmt.Sprintf("tcp:[::1]:%d", port)}
		for _, a := range list {
			if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
				targets = append(targets, fmt.Sprintf("tcp:%s:%d", n.IP, port))
			}
		}
		for _, f := range strings.Fields(strings.Trim(left, "[]\n")) {
			if ip, _, err := net.ParseCIDR(strings.Trim(f, "[]")); err == nil && ip.To4() != nil && !ip.IsLoopback() {
				targets = append(targets, fmt.Sprintf("tcp:%s:7654", ip))
			}
		}
		thief := s.attackBox(t, func(o *client.Options) { o.Network = network })
		for _, user := range []string{"root", "alice"} {
			attack(t, thief, user, "look", name)
			attack(t, thief, user, append([]string{"reach"}, targets...)...)
		}
	}
}

// What eats without end is stopped by its own sandbox's limits and named; neighbours go on.
func TestBombs(t *testing.T) {
	t.Parallel()
	s := shared(t)
	neighbour := s.box(t)
	alive := func(what string) {
		t.Helper()
		if r := exe(t, neighbour, sh("echo lives; : > /tmp/x; sleep 0 & wait")); string(r.Stdout) != "lives\n" {
			t.Errorf("the neighbour during %s: %s", what, describe(r))
		}
	}
	t.Run("processes", func(t *testing.T) {
		sb := s.box(t, func(o *client.Options) { o.Pids = 64 })
		p, err := sb.Start(within(t), client.Cmd{Argv: []string{"sh", "-c", "b() { b | b & }; b; sleep 1; while :; do (:) & done"}, Timeout: 6 * time.Second, OutputCap: 4096})
		must(t, err)
		alive("the fork bomb")
		r, err := p.Wait(within(t))
		must(t, err)
		if o := r.Outcome; !o.PidsHit || o.Kind != "timed_out" && o.Kind != "exited" {
			t.Errorf("%s", describe(r))
		}
		must(t, eventually(func() error { // its orphans die with its group or of the limit
			r, err := sb.Run(within(t), sh("echo again"))
			if err == nil && string(r.Stdout) != "again\n" {
				err = fmt.Errorf("%s", describe(r))
			}
			return err
		}))
	})
	t.Run("memory", func(t *testing.T) {
		sb := s.box(t, func(o *client.Options) { o.Memory = 64 << 20 })
		r := exe(t, sb, client.Cmd{Argv: []string{"tail", "/dev/zero"}, Timeout: patience})
		if r.Outcome.Kind != "out_of_memory" {
			t.Errorf("%s", describe(r))
		}
		alive("the memory bomb")
		want(t, exe(t, sb, sh("echo again")), 0, "again\n", "")
	})
	t.Run("disk", func(t *testing.T) {
		sb := s.box(t, func(o *client.Options) { o.Disk = 32 << 20 })
		r := exe(t, sb, sh("dd if=/dev/urandom of=/tmp/x bs=1M count=80 2>&1; echo code $?; stat -c %s /tmp/x"))
		if !strings.Contains(string(r.Stdout), "code 1") || !strings.Contains(string(r.Stdout), "quota") && !strings.Contains(string(r.Stdout), "o space left") {
			t.Errorf("%s", describe(r))
		}
		alive("the disk bomb")
		want(t, exe(t, sb, sh("rm /tmp/x && echo again > /tmp/y && cat /tmp/y")), 0, "again\n", "")
	})
	t.Run("files", func(t *testing.T) {
		sb := s.box(t, func(o *client.Options) { o.Disk = 8 << 20 })
		r := exe(t, sb, client.Cmd{Argv: []string{"sh", "-c", "i=0; while [ $i -lt 200000 ] && : > /tmp/$i-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; do i=$((i+1)); done 2>/dev/null; echo $i"}, Timeout: 45 * time.Second})
		t.Logf("empty files on 8 MiB: %s", describe(r))
		if strings.TrimSpace(string(r.Stdout)) == "200000" {
			t.Errorf("200,000 files on a disk of 8 MiB")
		}
		alive("the bomb of files")
	})
	t.Run("output", func(t *testing.T) {
		sb := s.box(t)
		r := exe(t, sb, client.Cmd{Argv: []string{"sh", "-c", "yes | head -c 100000000; echo done >&2"}, OutputCap: 65536, Timeout: patience})
		if r.Outcome.Kind != "exited" || len(r.Stdout) > 65536 || string(r.Stderr) != "done\n" {
			t.Errorf("%d octets, %s", len(r.Stdout), describeOutcome(r.Outcome))
		}
		alive("the bomb of output")
	})
}

// What honest programs do works under the confinement, as root and as a plain user.
func TestHonestToolsWork(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.attackBox(t, func(o *client.Options) { o.Disk = 1 << 30 })
	for _, user := range []string{"root", "alice"} {
		check := func(name, script, wants string) {
			t.Helper()
			r := exe(t, sb, client.Cmd{User: user, Argv: []string{"bash", "-c", script}, Timeout: patience})
			if !r.OK() || !strings.Contains(string(r.Stdout), wants) {
				t.Errorf("%s as %s: %s", name, user, describe(r))
			}
		}
		check("strace", "strace -f -o /tmp/trace-$UID sh -c '/bin/true; :' && grep -c execve /tmp/trace-$UID && echo traced", "traced")
		check("gdb", "gdb -q -batch -ex starti -ex 'print $rip != 0' -ex continue --args /bin/true 2>&1", "exited normally")
		check("gdb attaches", "sleep 30 & p=$!; gdb -q -batch -p $p -ex 'info proc' 2>&1 | grep -o \"process $p\"; kill $p; echo ended", "process ")
		check("kill across commands", "sleep 60 & p=$!; kill -TERM $p; wait $p; echo $?", "143")
		check("ping", "ping -c 1 -W 20 127.0.0.1", "1 received")
		check("sudo", "sudo -n id -u", "0\n")
		check("multiprocessing", `python3 -c 'import multiprocessing as m
print(sum(m.Pool(2).map(abs, range(-5, 0))))'`, "15")
		check("tar with links and times", "cd $(mktemp -d) && mkdir d && echo x > d/a && ln d/a d/b && ln -s a d/c && tar cf t.tar d && mkdir o && tar xf t.tar -C o && cat o/d/c && stat -c %h o/d/b", "2")
		check("cp --reflink=auto", "cd $(mktemp -d) && cp --reflink=auto /bin/true t && ./t && echo copied", "copied")
		check("standard input by path", "cat /dev/stdin && cat < /proc/self/fd/0 && echo nothing", "nothing")
		check("setarch", "setarch -R true && echo fixed", "fixed")
		check("unlinked temporary file by descriptor", "exec 7> /tmp/u-$UID; rm /tmp/u-$UID; echo hi >&7; cat /proc/self/fd/7", "hi")
	}
	r := exe(t, sb, client.Cmd{Argv: []string{"bash", "-c", `set -e; cd $(mktemp -d); mkdir -p p/DEBIAN p/usr/bin; printf 'Package: probe\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n' > p/DEBIAN/control
printf '#!/bin/sh\necho installed\n' > p/usr/bin/probe; chmod 755 p/usr/bin/probe; dpkg-deb -b p probe.deb >/dev/null; dpkg -i probe.deb >/dev/null; probe; dpkg -r probe >/dev/null`}, Timeout: patience})
	if string(r.Stdout) != "installed\n" {
		t.Errorf("dpkg: %s", describe(r))
	}
	// One command's processes can be signalled and traced by another's.
	p, err := sb.Start(within(t), client.Cmd{User: "alice", Argv: []string{"sleep", "100"}})
	must(t, err)
	r = exe(t, sb, client.Cmd{User: "alice", Argv: []string{"bash", "-c", "timeout 20 strace -p $(pgrep -x sleep) 2>&1 | head -1; pkill -x -USR1 sleep"}})
	if !strings.Contains(string(r.Stdout)+string(r.Stderr), "attached") {
		t.Errorf("strace of another command: %s", describe(r))
	}
	if r, err = p.Wait(within(t)); err != nil || r.Outcome.Signal != 10 {
		t.Errorf("a signal from another command: %v %v", describe(r), err)
	}
}

// An image whose files are not what a birth expects leads nowhere: it is refused by name, or what it names lies inside.
func TestHostileImages(t *testing.T) {
	t.Parallel()
	s := shared(t)
	canary := filepath.Join(ownDir(t), "canary")
	must(t, os.WriteFile(canary, []byte("the host's\n"), 0o644))
	before, err := os.ReadDir("/etc")
	must(t, err)
	small := s.small(t)
	link := func(name, to string) entry {
		return entry{name: name, kind: '2', mode: 0o777, link: to}
	}
	fifo := func(name string) entry { return entry{name: name, kind: '6', mode: 0o666} }
	long := strings.Repeat("x", 1<<16)
	for _, c := range []struct {
		name    string
		entries []entry
		refused string // what the refusal names; "" when it is born
	}{
		{"proc is a link", []entry{link("proc", "/tmp")}, "/proc"},
		{"dev is a link", []entry{link("dev", "/etc")}, ""},
		{"sys is a link to itself", []entry{link("sys", "sys")}, "/sys"},
		{"proc is a file", []entry{{name: "proc", data: "x"}}, "/proc"},
		{"sys is a FIFO", []entry{fifo("sys")}, "/sys"},
		{"etc leads outside", []entry{{name: "etc/.wh..wh..opq"}, link("etc", filepath.Dir(canary))}, "/etc"},
		{"etc leads up", []entry{link("etc", "../../../../etc")}, "/etc"},
		{"hosts leads outside", []entry{link("etc/hosts", canary), link("etc/resolv.conf", canary), link("etc/hostname", canary)}, ""},
		{"hosts is a FIFO", []entry{fifo("etc/hosts"), fifo("etc/resolv.conf"), fifo("etc/hostname")}, ""},
		{"passwd is a FIFO", []entry{fifo("etc/passwd"), fifo("etc/group")}, ""},
		{"passwd is a folder", []entry{{name: "etc/passwd/", kind: '5'}, {name: "etc/group/", kind: '5'}}, ""},
		{"passwd leads outside", []entry{link("etc/passwd", canary)}, ""},
		{"passwd leads to process 1", []entry{link("etc/passwd", "/proc/1/environ")}, ""},
		{"passwd leads to a device", []entry{link("etc/passwd", "/dev/zero")}, ""},
		{"passwd is hostile", []entry{{name: "etc/passwd", data: long + ":\x00\nroot:x:-1:-1:::/bin/sh\nroot:x:4294967295:0::/:\nroot:x:99999999999:0\n:::::\nalice"}}, ""},
		{"group is hostile", []entry{{name: "etc/group", data: strings.Repeat("g:x:5:root,root,"+long+"\n", 20)}}, ""},
		{"shm is a link", []entry{link("dev/shm", canary)}, ""},
		{"devices", []entry{{name: "srv/mem", kind: '3', mode: 0o666, major: 1, minor: 1}, {name: "srv/disk", kind: '4', mode: 0o666, major: 8}}, ""},
		{"hosts is a folder", []entry{{name: "etc/hosts/", kind: '5'}}, "hosts"},
	} {
		t.Run(c.name, func(t *testing.T) {
			in, err := s.client().ImportLayer(within(t), "", "test", strings.NewReader(string(tarOf(c.entries...))))
			if err != nil {
				t.Logf("refused as a layer: %v", err)
				return
			}
			sb, err := s.tryBox(t, func(o *client.Options) { o.Layers = []string{small, in.Layer.Id} })
			if c.refused != "" {
				errorText(t, err, c.refused)
				t.Logf("refused: %v", err)
				return
			}
			must(t, err)
			r := exe(t, sb, client.Cmd{User: "0:0", Argv: []string{"/bin/busybox", "sh", "-c", "echo born; cat /etc/hosts; for f in /srv/mem /srv/disk; do [ ! -e $f ] || head -c 1 $f; done; ls /dev"}, Env: map[string]string{"PATH": "/bin"}, Timeout: patience})
			if !strings.HasPrefix(string(r.Stdout), "born\n") || strings.Contains(string(r.Stdout), "the host's") || !strings.Contains(string(r.Stdout), "urandom") {
				t.Errorf("%s", describe(r))
			}
			if strings.Contains(c.name, "devices") && strings.Count(string(r.Stderr), "ermission denied") != 2 {
				t.Errorf("device nodes of an image: %s", describe(r))
			}
			// A name that the image fakes is refused or found inside; it never hangs.
			if r, err := sb.Run(within(t), client.Cmd{User: "alice", Argv: []string{"/bin/busybox", "id"}, Timeout: patience}); err == nil {
				t.Logf("id of alice: %s", describe(r))
			}
		})
	}
	if b, err := os.ReadFile(canary); err != nil || string(b) != "the host's\n" {
		t.Errorf("the host's file now: %q %v", b, err)
	}
	if left, _ := os.ReadDir(filepath.Dir(canary)); len(left) != 1 {
		t.Errorf("something was made beside the host's file: %v", left)
	}
	if after, err := os.ReadDir("/etc"); err != nil || len(after) != len(before) {
		t.Errorf("the host's /etc had %d entries, now %d", len(before), len(after))
	}
}
