package sandboxtest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func testSurroundings(t *testing.T, e *Env) {
	t.Run("B34: no signal is blocked or ignored, and nothing else is inherited", func(t *testing.T) {
		b := e.box(t)
		ways := map[string]func(string) string{"pipes": func(text string) string { return b.out(t, text) }}
		if e.Backend.Capabilities().Terminal {
			ways["terminal"] = func(text string) string {
				c := sh(text)
				c.Terminal = &sandbox.Size{Rows: 24, Cols: 80}
				return strings.ReplaceAll(b.run(t, c).stdout, "\r\n", "\n")
			}
		}
		for name, run := range ways {
			// A program that the command is, not a child of a shell, so that no shell tidies up.
			text := "exec grep -E '^Sig(Blk|Ign):|^NoNewPrivs|^Umask' /proc/self/status"
			want := "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"
			if got := run(text); e.does(sandbox.FeatureOwnKernel) && !strings.Contains(got, "SigBlk") {
				// That kernel does not tell. What it does is seen by what a signal does, below.
				if !strings.Contains(got, "NoNewPrivs:\t0") {
					t.Errorf("%s: %q; want no_new_privs off", name, got)
				}
			} else if !strings.Contains(got, want) || !strings.Contains(got, "Umask:\t0022") || !strings.Contains(got, "NoNewPrivs:\t0") {
				t.Errorf("%s: %q; want empty signal masks, umask 0022, no_new_privs off", name, got)
			}
			if got := run("exec ls /proc/self/fd"); strings.Join(strings.Fields(got), " ") != "0 1 2 3" { // 3 is the folder itself
				t.Errorf("%s: open descriptors %q, want 0, 1, 2", name, got)
			}
			if got := run("exec awk '{print $19}' /proc/self/stat"); got != "0\n" {
				t.Errorf("%s: nice %q", name, got)
			}
		}
		if got := b.out(t, `yes | head -n 1`); got != "y\n" {
			t.Errorf("yes | head: %q", got)
		}
		wantExit(t, b.run(t, sh(`trap "echo T" PIPE; kill -PIPE $$`)), 0, "T\n")
	})
	t.Run("the host name and the loopback resolve", func(t *testing.T) {
		b := e.box(t, func(s *sandbox.Spec) { s.Hostname = "box-7" })
		if got := b.out(t, "hostname; cat /etc/hostname"); got != "box-7\nbox-7\n" {
			t.Errorf("B48: host name %q", got)
		}
		hosts := b.out(t, "cat /etc/hosts")
		for name, want := range map[string]string{"localhost": "127.0.0.1", "box-7": "127.", "extra.test": "192.0.2.7"} {
			if !slices.ContainsFunc(strings.Split(hosts, "\n"), func(l string) bool {
				f := strings.Fields(l)
				return len(f) > 1 && strings.HasPrefix(f[0], want) && slices.Contains(f[1:], name)
			}) {
				t.Errorf("B48: /etc/hosts does not give %s an address %s: %q", name, want, hosts)
			}
		}
		b.start(t, sh("httpd -f -p 80 -h /srv/base"))
		for _, name := range []string{"localhost", "box-7", "127.0.0.1"} {
			b.get(t, name, 80)
		}
	})
	t.Run("B41: /dev/shm and /tmp are open to all and as large as the limits", func(t *testing.T) {
		b := e.box(t, func(s *sandbox.Spec) { s.Resources.Disk, s.Resources.Memory = 512<<20, 512<<20 })
		if got := b.out(t, "stat -c %a /dev/shm /tmp"); got != "1777\n1777\n" {
			t.Errorf("modes %q, want 1777 twice", got)
		}
		if got := b.out(t, "dd if=/dev/zero of=/dev/shm/x bs=1M count=150 2>/dev/null; stat -c %s /dev/shm/x; rm /dev/shm/x"); got != "157286400\n" {
			t.Errorf("150 MiB in /dev/shm: %q", got)
		}
	})
	t.Run("the devices are those that programs need, and no more", func(t *testing.T) {
		b := e.box(t)
		got := b.out(t, "head -c 4 /dev/zero | od -An -tx1 | tr -d ' \\n'; head -c 8 /dev/urandom | wc -c; head -c 8 /dev/random | wc -c; echo x >/dev/null; (echo y >/dev/full) 2>/dev/null || echo full")
		if got != "000000008\n8\nfull\n" {
			t.Errorf("devices: %q", got)
		}
		r := b.run(t, sh("for d in /dev/*; do [ -b $d ] && echo $d; done; ls /dev/kmsg /dev/mem /dev/kvm /dev/fuse /dev/vsock 2>/dev/null; mknod /tmp/d b 8 0 2>/dev/null && head -c 1 /tmp/d && echo read; true"))
		wantExit(t, r, 0, "")
	})
	t.Run("what belongs to the host can't be changed or read", func(t *testing.T) {
		b := e.box(t)
		for _, text := range []string{
			"echo 1 >/proc/sys/kernel/panic",
			"echo b >/proc/sysrq-trigger",
			"mount -t tmpfs none /mnt",
			"mount -t proc none /proc",
			"umount /proc",
			"hostname other",
			"kill -9 1 && sleep 0.2 && [ -e /proc/1/status ] && exit 1", // sent to process 1 without effect, or refused
			"cat /proc/1/environ",
			"[ -n \"$(head -c 1 /proc/kcore)\" ]",
			"ls /proc/1/root/",
			"dmesg",
			"chroot / unshare -n true",
			"unshare -m true",
			"swapoff -a && false",
			"date -s 200001010000; [ $(date +%Y) = 2000 ]",
		} {
			if text == "dmesg" && e.does(sandbox.FeatureOwnKernel) {
				continue // nothing of the host's is in it
			}
			r := b.run(t, sh("("+text+") >/dev/null 2>&1"))
			if r.Kind != sandbox.Exited || r.Code == 0 {
				if strings.HasPrefix(text, "kill -9 1") && r.Kind == sandbox.Exited {
					continue // busybox has no errors for a signal that the kernel drops
				}
				t.Errorf("%s: %s; want a refusal", text, describe(r.Outcome))
			}
		}
		wantExit(t, b.run(t, sandbox.Command{Argv: []string{"/bin/echo", "alive"}}), 0, "alive\n")
	})
	t.Run("the limits are seen where runtimes look for them", func(t *testing.T) {
		b := e.box(t)
		got := b.out(t, "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/memory.max")
		if strings.TrimSpace(got) != "268435456" {
			t.Errorf("the memory limit reads %q, want 268435456", got)
		}
		if got := b.out(t, "nproc; ulimit -c"); !strings.HasSuffix(got, "\n0\n") {
			t.Errorf("nproc and core limit: %q", got)
		}
	})
	t.Run("network none has a loopback alone", func(t *testing.T) {
		b := e.box(t)
		if got := b.out(t, "ls /sys/class/net 2>/dev/null; awk -F: 'NR>2{gsub(/ /,\"\",$1);print $1}' /proc/net/dev"); strings.TrimSpace(got) != "lo" {
			t.Errorf("devices %q, want lo", got)
		}
		if r := b.run(t, sh("nc -w 5 192.0.2.1 80 </dev/null")); r.Code == 0 {
			t.Error("an address outside answered")
		}
	})
	t.Run("B46: privileged ports work for everyone, on both loopbacks", func(t *testing.T) {
		b := e.box(t)
		for i, user := range []string{"root", "alice", "nobody"} {
			for j, at := range []string{"127.0.0.1", "[::1]", "0.0.0.0"} {
				port := 80 + 10*i + j
				c := sh(fmt.Sprintf("exec httpd -f -p %s:%d -h /srv/base", at, port))
				c.User = user
				b.start(t, c)
				to := "127.0.0.1"
				if at == "[::1]" {
					to = "::1"
				}
				b.get(t, to, port)
			}
		}
	})
	t.Run("layers compose: files are changed, removed, renamed and made again", func(t *testing.T) {
		b := e.box(t)
		b.out(t, "rm /srv/base/removed; echo changed >/srv/base/kept; mv /srv/base/sub /srv/base/moved; mkdir /srv/base/sub; echo new >/srv/base/sub/other")
		if got := b.out(t, "cd /srv/base; ls; cat kept moved/inner; ls sub"); got != "kept\nmoved\nsub\nchanged\ninner\nother\n" {
			t.Errorf("%q", got)
		}
		b.out(t, "rm -r /srv/base/moved && mkdir /srv/base/moved && [ -z \"$(ls -A /srv/base/moved)\" ]")
		b.out(t, "chown alice:alice /srv/base/kept; ln /srv/base/kept /srv/base/hard; ln -s kept /srv/base/soft; mkfifo /srv/base/fifo; chmod 4755 /srv/base/kept")
		if got := b.out(t, "stat -c '%u:%g %a %h' /srv/base/kept"); got != "1000:1000 4755 2\n" {
			t.Errorf("%q", got)
		}
	})
}

// get fetches a file of the root from a server inside, by a command inside; the server may still be starting.
func (b *box) get(t testing.TB, host string, port int) {
	t.Helper()
	text := fmt.Sprintf(`printf 'GET /kept HTTP/1.0\r\n\r\n' | nc -w 10 %s %d`, host, port)
	var r result
	eventually(t, func() bool {
		r = b.run(t, sh(text))
		return strings.HasSuffix(r.stdout, "kept\n")
	}, func() string {
		return fmt.Sprintf("%s port %d: %s, %q, %q", host, port, describe(r.Outcome), r.stdout, r.stderr)
	})
}
