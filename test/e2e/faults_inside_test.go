package e2e

import (
	"bytes"
	"fmt"
	"sort"
	"strings"
	"testing"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

func TestB37Environment(t *testing.T) {
	t.Parallel()
	s := shared(t)
	env := map[string]string{"A": "hello world", "B": "l1\nl2", "C": "x=y=z", "D": " $HOME ", "E": "", "F": `it's "q"`, "G": "\xff\xfe", "H": "`touch /tmp/p`$(touch /tmp/p)",
		"a;touch /tmp/p": "v", "1A": "digit", "a b": "space", "a-b": "dash", "n\nl": "newline name", "\xff": "octet name"}
	check := func(t *testing.T, way string, stdout []byte, skip func(name string) bool) {
		t.Helper()
		got := map[string]string{}
		for _, kv := range strings.Split(string(stdout), "\x00") {
			if k, v, ok := strings.Cut(kv, "="); ok {
				got[k] = v
			}
		}
		for k, v := range env {
			if skip != nil && skip(k) {
				continue
			}
			if w, ok := got[k]; !ok || w != v {
				t.Errorf("%s: %q is %q (there: %v), want %q", way, k, w, ok, v)
			}
		}
	}
	// A shell drops, or may drop, what is no name of a variable; everything else it must hand on.
	noName := func(n string) bool {
		return n == "" || strings.Trim(n, "ABCDEFGH") != ""
	}
	for _, user := range []string{"root", "nobody", "alice"} {
		sb := s.box(t)
		r := exe(t, sb, client.Cmd{Argv: []string{"env", "-0"}, Env: env, User: user})
		check(t, "command as "+user, r.Stdout, nil)
		r = exe(t, sb, terminal(client.Cmd{Argv: []string{"env", "-0"}, Env: env, User: user}, 24, 80))
		check(t, "terminal as "+user, bytes.ReplaceAll(r.Stdout, []byte("\r\n"), []byte("\n")), nil)
		made := s.box(t, func(o *client.Options) { o.Env, o.User = env, user })
		check(t, "at create as "+user, exe(t, made, client.Cmd{Argv: []string{"env", "-0"}}).Stdout, nil)
		ses := session(t, sb, client.SessionOptions{Env: env, User: user})
		r, err := ses.Run(within(t), "env -0")
		if err != nil {
			t.Fatal(err)
		}
		check(t, "session as "+user, r.Stdout, noName)
		ses = session(t, made, client.SessionOptions{})
		if r, err = ses.Run(within(t), "env -0"); err != nil {
			t.Fatal(err)
		}
		check(t, "session in such a sandbox as "+user, r.Stdout, noName)
		entry := s.box(t, func(o *client.Options) { o.Env, o.User, o.Entrypoint = env, user, []string{"env", "-0"} })
		if r, err = entry.Process("entrypoint").Wait(within(t)); err != nil {
			t.Fatal(err)
		}
		check(t, "entrypoint as "+user, r.Stdout, nil)
		for _, b := range []*client.Sandbox{sb, made} {
			if got := out(t, b, "ls /tmp"); got != "" {
				t.Errorf("something was executed: %s", got)
			}
		}
	}
	sb := s.box(t)
	t.Run("names that can't be are refused", func(t *testing.T) {
		for _, name := range []string{"", "x=y", "=", "nul\x00"} {
			bad := map[string]string{name: "v"}
			_, err := sb.Run(within(t), client.Cmd{Argv: []string{"true"}, Env: bad})
			errorText(t, err, "env")
			_, err = sb.Session(within(t), client.SessionOptions{Env: bad})
			errorText(t, err, "env")
			_, err = s.tryBox(t, func(o *client.Options) { o.Env = bad })
			errorText(t, err, "env")
		}
	})
	t.Run("long arguments", func(t *testing.T) {
		longest := strings.Repeat("x", 131071)
		r := exe(t, sb, client.Cmd{Argv: []string{"sh", "-c", "echo ${#0}", longest}})
		want(t, r, 0, "131071\n", "")
		_, err := sb.Run(within(t), client.Cmd{Argv: []string{"echo", longest + "x"}})
		errorText(t, err, "131072")
		_, err = sb.Run(within(t), client.Cmd{Argv: []string{"true"}, Env: map[string]string{"A": longest}})
		errorText(t, err, "131072")
		many := make([]string, 20)
		for i := range many {
			many[i] = longest
		}
		_, err = sb.Run(within(t), client.Cmd{Argv: append([]string{"echo"}, many...)})
		errorText(t, err, "argv", "2097152")
	})
	t.Run("a session command of 300 KB", func(t *testing.T) {
		ses := session(t, sb, client.SessionOptions{})
		r, err := ses.Run(within(t), "cat <<'EOF' | wc -c\n"+strings.Repeat(strings.Repeat("y", 99)+"\n", 3000)+"EOF\n")
		if err != nil {
			t.Fatal(err)
		}
		want(t, r, 0, "300000\n", "")
	})
}

func TestB41ShmAndTerminalSize(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.debianBox(t, func(o *client.Options) { o.Memory, o.Disk = 1<<30, 1<<30 })
	t.Run("shm", func(t *testing.T) {
		for _, user := range []string{"root", "nobody"} {
			r := exe(t, sb, shAs(user, "dd if=/dev/zero of=/dev/shm/x-$(id -u) bs=1M count=300 2>&1 | tail -1; stat -c '%a %s' /dev/shm /dev/shm/x-$(id -u) | tr '\\n' ' '; rm /dev/shm/x-$(id -u)"))
			if !strings.Contains(string(r.Stdout), "1777 ") || !strings.Contains(string(r.Stdout), "314572800") {
				t.Errorf("as %s: %s", user, describe(r))
			}
			r = exe(t, sb, client.Cmd{User: user, Argv: []string{"python3", "-c", `
import multiprocessing as m, multiprocessing.shared_memory as s
l = m.Lock()
x = s.SharedMemory(create=True, size=1<<20)
x.buf[5] = 7
y = s.SharedMemory(name=x.name)
print(y.buf[5], l.acquire())
y.close(); x.close(); x.unlink()
`}})
			want(t, r, 0, "7 True\n", "")
		}
	})
	t.Run("shm is charged to the sandbox", func(t *testing.T) {
		little := s.box(t, func(o *client.Options) { o.Memory, o.Disk = 128<<20, 1<<30 })
		r := exe(t, little, sh("dd if=/dev/zero of=/dev/shm/x bs=1M count=400; echo $?"))
		st, err := little.Stats(within(t))
		if err != nil {
			t.Fatal(err)
		}
		// Where it lies decides what stops it: memory, or the disk limit of a folder. It must not be the host's.
		disk := exe(t, little, sh("stat -c %s /dev/shm/x"))
		t.Logf("%s; memory %d, disk %d, %s", describe(r), st.Memory, st.Disk, disk.Stdout)
		if st.Memory > 128<<20 {
			t.Errorf("memory %d over the limit", st.Memory)
		}
	})
	for _, user := range []string{"root", "nobody"} {
		t.Run("terminal of "+user, func(t *testing.T) {
			c := terminal(shAs(user, "stty size; tput cols; n=0; trap 'n=$((n+1))' WINCH; echo ready; until read line; do :; done; stty size; echo $n"), 40, 100)
			c.StdinOpen, c.Env = true, map[string]string{"TERM": "xterm"}
			p, err := sb.Start(within(t), c)
			if err != nil {
				t.Fatal(err)
			}
			waitOutput(t, s, sb, p.ID, "ready")
			if err := p.Resize(within(t), 50, 120); err != nil {
				t.Fatal(err)
			}
			if err := p.Write(within(t), []byte("\n")); err != nil {
				t.Fatal(err)
			}
			r, err := p.Wait(within(t))
			if err != nil {
				t.Fatal(err)
			}
			got := strings.ReplaceAll(string(r.Stdout), "\r\n", "\n")
			if got != "40 100\n100\nready\n\n50 120\n1\n" {
				t.Errorf("%q", got)
			}
			for _, size := range [][2]uint32{{0, 0}} {
				r := exe(t, sb, terminal(shAs(user, "stty size"), size[0], size[1]))
				if string(r.Stdout) != "24 80\r\n" {
					t.Errorf("without a size: %q", r.Stdout)
				}
			}
		})
	}
}

// waitOutput waits until a command has written a word.
func waitOutput(t testing.TB, s *service, sb *client.Sandbox, id, word string) {
	t.Helper()
	err := eventually(func() error {
		r, err := peek(t, s, sb, id)
		if err != nil {
			return err
		}
		if !bytes.Contains(r, []byte(word)) {
			return fmt.Errorf("%q has no %q", r, word)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestB48OwnNameResolves(t *testing.T) {
	t.Parallel()
	s := shared(t)
	own := s.layer(t, tarOf(entry{name: "etc/", kind: '5'}, entry{name: "etc/hosts", data: "10.9.8.7 of-the-image\n"}))
	for _, network := range []string{"none", "open"} {
		for _, image := range []string{"without hosts", "with hosts"} {
			t.Run(network+" "+image, func(t *testing.T) {
				t.Parallel()
				sb := s.debianBox(t, func(o *client.Options) {
					o.Network, o.Hostname = network, "my-box"
					if image == "with hosts" {
						o.Layers = append(o.Layers, own)
					}
				})
				ses := session(t, sb, client.SessionOptions{User: "alice"})
				for way, run := range map[string]func(string) *client.Result{
					"root":    func(x string) *client.Result { return exe(t, sb, sh(x)) },
					"nobody":  func(x string) *client.Result { return exe(t, sb, shAs("nobody", x)) },
					"session": func(x string) *client.Result { return soon(t, ses, x) },
				} {
					r := run("hostname; getent hosts $(hostname) | awk '{print $2}'; getent ahosts localhost | awk '{print $1}' | sort -u | tr '\\n' ' '; echo; python3 -c 'import socket; print(socket.gethostbyname(socket.gethostname()))'")
					lines := strings.Split(string(r.Stdout), "\n")
					if len(lines) < 4 || lines[0] != "my-box" || lines[1] != "my-box" || !strings.Contains(lines[2], "127.0.0.1") || lines[3] == "" {
						t.Errorf("%s: %s", way, describe(r))
					}
				}
				if image == "with hosts" {
					if got := out(t, sb, "getent hosts of-the-image"); !strings.HasPrefix(got, "10.9.8.7") {
						t.Errorf("the image's line: %q", got)
					}
				}
				r := exe(t, sb, client.Cmd{Argv: []string{"python3", "-c", `
import socket, threading, time
for family, address in (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"):
    l = socket.socket(family); l.bind((address, 0)); l.listen()
    port = l.getsockname()[1]
    c = socket.create_connection(("localhost", port), 5); c.close(); l.close()
begin = time.monotonic(); socket.gethostbyname(socket.gethostname()); print(time.monotonic() - begin < 2)
`}})
				want(t, r, 0, "True\n", "")
				must(t, sb.Pause(within(t)))
				must(t, sb.Resume(within(t)))
				forks, failed, err := sb.Fork(within(t), 1, client.ForkOptions{})
				if err != nil || len(failed) > 0 {
					t.Fatalf("fork: %v %v", failed, err)
				}
				for what, b := range map[string]*client.Sandbox{"after a resume": sb, "a fork": forks[0]} {
					if got := out(t, b, "hostname; getent hosts $(hostname) | awk '{print $2}'"); got != "my-box\nmy-box\n" {
						t.Errorf("%s: %q", what, got)
					}
				}
				must(t, forks[0].Stop(within(t)))
				// A clone with another name resolves that one.
				ref, err := sb.Snapshot(within(t), "")
				if err != nil {
					t.Fatal(err)
				}
				clone := s.debianBox(t, func(o *client.Options) {
					o.Network, o.Hostname = network, "clone"
					o.Layers = append(sb.Data.Layers, ref)
				})
				if got := out(t, clone, "hostname; getent hosts clone | awk '{print $2}'"); got != "clone\nclone\n" {
					t.Errorf("clone: %q", got)
				}
			})
		}
	}
}

func TestB50Setuid(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.debianBox(t)
	entry := s.debianBox(t, func(o *client.Options) { o.User, o.Entrypoint = "alice", []string{"sudo", "id", "-u"} })
	r, err := entry.Process("entrypoint").Wait(within(t))
	if err != nil {
		t.Fatal(err)
	}
	want(t, r, 0, "0\n", "")
	ses := session(t, sb, client.SessionOptions{User: "alice"})
	for _, c := range []struct{ script, want string }{
		{"sudo id -u", "0\n"},
		{"su -c 'id -u'", "0\n"},
		{"sudo -u nobody id -un", "nobody\n"},
		{"ping -c1 -W5 127.0.0.1 | grep -c 'bytes from'", "1\n"},
	} {
		want(t, exe(t, sb, shAs("alice", c.script)), 0, c.want, "")
		r := exe(t, sb, terminal(shAs("alice", c.script), 24, 80))
		if !r.OK() || strings.ReplaceAll(string(r.Stdout), "\r", "") != c.want {
			t.Errorf("terminal, %s: %s", c.script, describe(r))
		}
		want(t, soon(t, ses, c.script), 0, c.want, "")
	}
	// That root is one of the sandbox's range.
	p, err := sb.Start(within(t), shAs("alice", "exec sudo sleep 60"))
	if err != nil {
		t.Fatal(err)
	}
	err = eventually(func() error {
		n := 0
		for _, q := range s.inside() {
			if q.args == "sleep 60" {
				n++
			}
		}
		if n == 0 {
			return fmt.Errorf("no sleep in the service's range of uids")
		}
		for _, q := range processes() {
			if q.args == "sleep 60" && q.uid == 0 && strings.Contains(cgroupOf(q.pid), s.instance()) {
				return fmt.Errorf("%s is the host's root", q)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	_ = p.Signal(within(t), 9)

	bound := s.debianBox(t, func(o *client.Options) { o.NoNewPrivs = true })
	if !bound.Data.NoNewPrivs {
		t.Error("the answer does not say that no_new_privs is on")
	}
	r = exe(t, bound, shAs("alice", "sudo id -u"))
	if r.OK() || !strings.Contains(string(r.Stderr), "sudo") || r.Outcome.Kind != "exited" {
		t.Errorf("with no_new_privs: %s", describe(r))
	}
	if got := out(t, bound, "grep NoNewPrivs /proc/self/status"); !strings.HasSuffix(got, "1\n") {
		t.Errorf("%q", got)
	}
}

// What else a process finds around it is the same in every way of running one.
func TestSurroundings(t *testing.T) {
	t.Parallel()
	s := shared(t)
	const script = `ls /dev | sort | tr '\n' ' '; echo; [ -w /dev/null ] && [ -r /dev/urandom ] && echo devices; cat /proc/1/comm; readlink /proc/self/ns/pid >/dev/null && echo ns
mkdir /tmp/d-$$ && rmdir /tmp/d-$$ && echo tmp; ls /sys/fs/cgroup >/dev/null && echo cgroup; echo $PATH | grep -q /bin && echo path; ulimit -n | awk '{print ($1 >= 4096)}'`
	var first string
	ways(t, s, nil, script, func(t *testing.T, way, stdout, stderr string, o *dsecv1.Outcome) {
		if first == "" {
			first = stdout
		}
		if stdout != first || stderr != "" || !strings.HasSuffix(stdout, "devices\ndsec-init\nns\ntmp\ncgroup\npath\n1\n") {
			t.Errorf("%s: %q %q, the first was %q", way, stdout, stderr, first)
		}
	})
	have := strings.Fields(strings.SplitN(first, "\n", 2)[0])
	sort.Strings(have)
	for _, w := range []string{"fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"} {
		if i := sort.SearchStrings(have, w); i == len(have) || have[i] != w {
			t.Errorf("/dev/%s is missing of %v", w, have)
		}
	}
}
