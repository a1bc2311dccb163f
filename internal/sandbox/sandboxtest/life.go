package sandboxtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func testPause(t *testing.T, e *Env) {
	e.skipUnless(t, e.level() != "", NoFreeze)
	t.Run("a paused sandbox stands still and goes on where it was", func(t *testing.T) {
		b := e.box(t)
		id := b.start(t, sh("i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo $i; sleep 0.01; done; echo end"))
		b.waitText(t, id, sandbox.Stdout, "3\n")
		b.pause(t)
		b.pause(t) // again: no change
		first := b.settled(id)
		time.Sleep(300 * time.Millisecond)
		if now := b.rec.text(id, sandbox.Stdout); now != first {
			t.Errorf("it wrote while paused: %q", strings.TrimPrefix(now, first))
		}
		b.resume(t)
		b.resume(t)
		eventually(t, func() bool { return b.rec.text(id, sandbox.Stdout) != first }, func() string { return "it does not go on" })
		b.out(t, "touch /tmp/stop")
		if r := b.wait(t, id); r.Kind != sandbox.Exited || !strings.HasSuffix(r.stdout, "end\n") {
			t.Errorf("%s", describe(r.Outcome))
		}
	})
	t.Run("time while paused does not count for a timeout", func(t *testing.T) {
		b := e.box(t)
		c := sh("sleep 0.2; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo done")
		c.Timeout = e.roomy(3 * time.Second)
		id := b.start(t, c)
		b.pause(t)
		time.Sleep(c.Timeout + 500*time.Millisecond)
		if b.rec.ended(id) {
			t.Fatal("it ended while paused")
		}
		b.resume(t)
		b.out(t, "touch /tmp/go")
		wantExit(t, b.wait(t, id), 0, "done\n")
	})
	t.Run("a paused sandbox can be destroyed", func(t *testing.T) {
		b := e.box(t)
		b.start(t, sh("sleep 300"))
		b.pause(t)
		b.destroy(t)
	})
	t.Run("a level that the backend does not have is refused", func(t *testing.T) {
		b := e.box(t)
		for _, l := range []sandbox.PauseLevel{sandbox.Frozen, sandbox.PagedOut, sandbox.Saved, "deep"} {
			if slices.Contains(e.Backend.Capabilities().PauseLevels, l) {
				continue
			}
			if err := b.inst.Pause(within(t), l); !errors.Is(err, sandbox.ErrUnsupported) {
				t.Errorf("pause %s: %v, want ErrUnsupported", l, err)
			}
		}
	})
}

// level is frozen where the backend has it, else the first that it has, or empty.
func (e *Env) level() sandbox.PauseLevel {
	levels := e.Backend.Capabilities().PauseLevels
	switch {
	case slices.Contains(levels, sandbox.Frozen):
		return sandbox.Frozen
	case len(levels) > 0:
		return levels[0]
	}
	return ""
}

func (b *box) pause(t testing.TB) {
	t.Helper()
	if err := b.inst.Pause(within(t), b.e.level()); err != nil {
		t.Fatalf("pause: %v", err)
	}
}

func (b *box) resume(t testing.TB) {
	t.Helper()
	if err := b.inst.Resume(within(t)); err != nil {
		t.Fatalf("resume: %v", err)
	}
}

// settled is what a paused command had written once the octets that were under way have come.
func (b *box) settled(cmd string) string {
	for last := ""; ; {
		now := b.rec.text(cmd, sandbox.Stdout)
		if now == last {
			return now
		}
		last = now
		time.Sleep(200 * time.Millisecond)
	}
}

func testDeadlines(t *testing.T, e *Env) {
	t.Run("at its deadline a sandbox ends with the reason, not earlier", func(t *testing.T) {
		b := e.box(t)
		id := b.start(t, sh("trap '' TERM; echo up; sleep 300"))
		at := time.Now().Add(e.roomy(2 * time.Second))
		if err := b.inst.SetDeadline(within(t), at); err != nil {
			t.Fatalf("set deadline: %v", err)
		}
		c, ok := b.rec.waitCause(Patience)
		if !ok || time.Now().Before(at) {
			t.Fatalf("end told %v, %v before the deadline", ok, time.Until(at))
		}
		if c.Class != sandbox.ClassLimit || c.Reason != "total" {
			t.Errorf("cause %+v, want limit, total", c)
		}
		if r := b.wait(t, id); r.Kind != sandbox.Killed || r.stdout != "up\n" {
			t.Errorf("its command: %s, %q; want killed", describe(r.Outcome), r.stdout)
		}
		if err := b.inst.Start(within(t), b.command(t, sh("exit 0"))); err == nil {
			t.Error("a sandbox that ended started a command")
		}
	})
	t.Run("a deadline can be moved and disarmed", func(t *testing.T) {
		b := e.box(t)
		soon := e.roomy(2 * time.Second)
		for _, at := range []time.Time{time.Now().Add(soon), time.Now().Add(time.Hour), time.Now().Add(soon), {}} {
			if err := b.inst.SetDeadline(within(t), at); err != nil {
				t.Fatalf("set deadline: %v", err)
			}
		}
		wantExit(t, b.run(t, sh(fmt.Sprintf("sleep %d; echo alive", int(soon.Seconds())+1))), 0, "alive\n")
	})
	t.Run("a deadline holds while the sandbox is paused", func(t *testing.T) {
		e.skipUnless(t, slices.Contains(e.Backend.Capabilities().PauseLevels, sandbox.Frozen), NoFreeze)
		b := e.box(t)
		b.start(t, sh("sleep 300"))
		b.pause(t)
		if err := b.inst.SetDeadline(within(t), time.Now().Add(time.Second)); err != nil {
			t.Fatalf("set deadline: %v", err)
		}
		if _, ok := b.rec.waitCause(Patience); !ok {
			t.Error("it did not end")
		}
	})
}

func testLimits(t *testing.T, e *Env) {
	t.Run("a fork bomb stays in its sandbox, is marked and leaves no process", func(t *testing.T) {
		b, other := e.box(t), e.box(t)
		long := 1
		if e.Few { // each fork costs more
			long = 6
		}
		c := sh(fmt.Sprintf("f() { f | f & }; f; sleep %d; echo survived", long))
		c.Timeout = 10 * time.Second
		id := b.start(t, c)
		wantExit(t, other.run(t, sh("echo other")), 0, "other\n")
		r := b.wait(t, id)
		if !r.PidsHit {
			t.Errorf("%s; want the process limit marked", describe(r.Outcome))
		}
		if s, err := b.inst.Stats(within(t)); err != nil || s.Pids > b.spec.Resources.Pids {
			t.Errorf("stats %+v, %v", s, err)
		}
	})
	t.Run("threads of honest programs fit", func(t *testing.T) {
		b := e.box(t)
		r := b.run(t, sh("i=0; while [ $i -lt 300 ]; do /bin/true; i=$((i+1)); done; for i in $(seq 60); do sleep 0.2 & done; wait; echo ok"))
		wantExit(t, r, 0, "ok\n")
		if r.PidsHit {
			t.Error("the process limit is marked although nothing met it")
		}
	})
	t.Run("a memory bomb stays in its sandbox", func(t *testing.T) {
		b, other := e.box(t, func(s *sandbox.Spec) { s.Resources.Memory = 64 << 20 }), e.box(t)
		if e.does(sandbox.FeatureMemoryEnds) {
			b.endsByMemory(t, sandbox.Command{Argv: eat(500)})
			wantExit(t, other.run(t, sandbox.Command{Argv: eat(100)}), 0, "")
			return
		}
		r := b.run(t, sandbox.Command{Argv: eat(500)})
		if r.Kind != sandbox.OutOfMemory {
			t.Errorf("%s", describe(r.Outcome))
		}
		wantExit(t, b.run(t, sh("echo alive")), 0, "alive\n")
		wantExit(t, other.run(t, sandbox.Command{Argv: eat(100)}), 0, "")
		if s, err := b.inst.Stats(within(t)); err != nil || s.OOMKills < 1 {
			t.Errorf("stats %+v, %v; want the kill counted", s, err)
		}
	})
	t.Run("the disk limit holds, is marked, and room comes back", func(t *testing.T) {
		b := e.box(t, func(s *sandbox.Spec) { s.Resources.Disk = 16 << 20 })
		r := b.run(t, sh("dd if=/dev/zero of=/srv/big bs=1M count=64 2>&1; sync; [ $(stat -c %s /srv/big) -lt 20000000 ]"))
		if r.Code != 0 || !strings.Contains(strings.ToLower(r.stdout), "quota") && !strings.Contains(strings.ToLower(r.stdout), "space") {
			t.Errorf("64 MiB into 16: %s, %q", describe(r.Outcome), r.stdout)
		}
		if !r.DiskHit {
			t.Errorf("%s; want the full disk marked", describe(r.Outcome))
		}
		// A file system that accounts in transactions gives room back at the next one.
		eventually(t, func() bool {
			return b.run(t, sh("rm -f /srv/big; sync; dd if=/dev/zero of=/srv/small bs=1M count=4 2>/dev/null")).Code == 0
		}, func() string { return "no room came back" })
	})
	t.Run("disk use is told", func(t *testing.T) {
		b := e.box(t)
		s, err := b.inst.Stats(within(t))
		if err != nil {
			t.Fatalf("stats: %v", err)
		}
		e.skipUnless(t, s.Disk >= 0, NoDiskUse)
		b.out(t, "dd if=/dev/urandom of=/srv/file bs=1M count=8 2>/dev/null; sync")
		if e.does(sandbox.FeatureDiskLate) {
			syscall.Sync() // what the host does by itself, later
		}
		eventually(t, func() bool {
			now, err := b.inst.Stats(within(t))
			return err == nil && now.Disk >= s.Disk+8<<20
		}, func() string { return "8 MiB written do not show in the use" })
	})
	t.Run("stats tell memory, CPU time and processes", func(t *testing.T) {
		b := e.box(t)
		id := b.start(t, sh("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; echo up; sleep 300"))
		b.waitText(t, id, sandbox.Stdout, "up")
		s, err := b.inst.Stats(within(t))
		if err != nil || s.Memory <= 0 || s.Memory > b.spec.Resources.Memory || s.CPU <= 0 || s.Pids < 1 {
			t.Errorf("stats %+v, %v", s, err)
		}
	})
}

func testPorts(t *testing.T, e *Env) {
	e.skipUnless(t, e.Backend.Capabilities().Ports, NoPorts)
	t.Run("B46: a server on any port and either loopback is reached, also with network none", func(t *testing.T) {
		b := e.box(t)
		for _, at := range []struct {
			listen string
			port   uint16
		}{{"127.0.0.1", 8080}, {"0.0.0.0", 49983}, {"[::1]", 44772}, {"[::]", 22}, {"127.0.0.1", 1}} {
			b.start(t, sh(fmt.Sprintf("exec httpd -f -p %s:%d -h /srv/base", at.listen, at.port)))
			if got := b.fetch(t, at.port); !strings.HasSuffix(got, "kept\n") {
				t.Errorf("port %d on %s: %q", at.port, at.listen, got)
			}
		}
	})
	t.Run("a port that nobody listens on is refused at once", func(t *testing.T) {
		b := e.box(t)
		if c, err := b.inst.Dial(within(t), 4444); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("%v, %v; want ErrNotFound", c, err)
		}
	})
	t.Run("a megabyte passes both ways", func(t *testing.T) {
		b := e.box(t)
		b.start(t, sh("nc -l -p 9000 -e cat"))
		var conn io.ReadWriteCloser
		eventually(t, func() bool {
			c, err := b.inst.Dial(within(t), 9000)
			conn = c
			return err == nil
		}, func() string { return "no connection" })
		defer conn.Close()
		sent := strings.Repeat("0123456789abcdef", 1<<16)
		go io.WriteString(conn, sent)
		got := make([]byte, len(sent))
		if _, err := io.ReadFull(conn, got); err != nil || string(got) != sent {
			t.Errorf("what came back differs: %v", err)
		}
	})
}

func (b *box) fetch(t testing.TB, port uint16) string {
	t.Helper()
	var got []byte
	eventually(t, func() bool {
		c, err := b.inst.Dial(within(t), port)
		if err != nil {
			return false
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(Patience))
		fmt.Fprint(c, "GET /kept HTTP/1.0\r\n\r\n")
		got, err = io.ReadAll(c)
		return err == nil
	}, func() string { return fmt.Sprintf("port %d can't be reached", port) })
	return string(got)
}

func testSnapshots(t *testing.T, e *Env) {
	e.skipUnless(t, e.Backend.Capabilities().Snapshot, NoSnapshot)
	t.Run("B08, B26: changes become a layer from which new sandboxes start, while the old one goes on", func(t *testing.T) {
		b := e.box(t)
		b.out(t, `cd /srv/base; rm removed; echo changed >kept; mv sub moved; mkdir sub; echo new >sub/other
			echo s >/tmp/suid; chown alice:alice /tmp/suid; chmod 4755 /tmp/suid; ln /tmp/suid /tmp/hard; ln -s nowhere /tmp/dangling
			mkfifo /tmp/fifo; echo shm >/dev/shm/x; touch -d '2001-02-03 00:00:00' /tmp/old; printf 'odd' >"/tmp/$(printf 'a\nb\377')"`)
		bg := b.start(t, sh("i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); sleep 0.01; done; echo went on"))
		layer, err := b.inst.Snapshot(within(t))
		if err != nil {
			t.Fatalf("snapshot: %v", err)
		}
		b.out(t, "echo later >/tmp/later; touch /tmp/stop")
		wantExit(t, b.wait(t, bg), 0, "went on\n")
		n := e.box(t, func(s *sandbox.Spec) { s.Layers, s.Hostname = append(s.Layers, layer), "second" })
		if got := n.out(t, "cd /srv/base; ls; cat kept moved/inner sub/other; ls sub moved"); got != "kept\nmoved\nsub\nchanged\ninner\nnew\nmoved:\ninner\n\nsub:\nother\n" {
			t.Errorf("files of the layer: %q", got)
		}
		want := "4755 1000:1000 2\nfifo\nnowhere\n981158400\n"
		if e.does(sandbox.FeatureNoSpecial) {
			want = "4755 1000:1000 2\nnone\nnowhere\n981158400\n"
		}
		if got := n.out(t, "cd /tmp; stat -c '%a %u:%g %h' suid; stat -c %F fifo 2>/dev/null || echo none; readlink dangling; stat -c %Y old; ls | wc -l"); !strings.HasPrefix(got, want) || strings.Contains(n.out(t, "ls /tmp"), "later") {
			t.Errorf("attributes in the layer: %q", got)
		}
		if got := n.out(t, "hostname; cat /etc/hostname; grep -c second /etc/hosts; grep -c extra.test /etc/hosts; stat -c %a /tmp"); got != "second\nsecond\n1\n1\n1777\n" {
			t.Errorf("B48: names of the new sandbox: %q", got)
		}
		// A second one, on top of the first.
		n.out(t, "echo third >/srv/base/third; rm /srv/base/moved/inner")
		second, err := n.inst.Snapshot(within(t))
		if err != nil {
			t.Fatalf("snapshot of a sandbox with a snapshot below: %v", err)
		}
		m := e.box(t, func(s *sandbox.Spec) { s.Layers = append(s.Layers, layer, second) })
		if got := m.out(t, "cd /srv/base; cat third kept; ls moved"); got != "third\nchanged\n" {
			t.Errorf("files of two layers: %q", got)
		}
	})
	t.Run("the same changes give the same layer", func(t *testing.T) {
		var ids []string
		for range 2 {
			b := e.box(t)
			b.out(t, "echo same >/srv/file; touch -d '2001-02-03 00:00:00' /srv/file /srv")
			id, err := b.inst.Snapshot(within(t))
			if err != nil {
				t.Fatalf("snapshot: %v", err)
			}
			again, err := b.inst.Snapshot(within(t))
			if err != nil || again != id {
				t.Errorf("a second snapshot without a change: %s, %v; the first was %s", again, err, id)
			}
			ids = append(ids, id)
		}
		if ids[0] == "" {
			t.Error("no ID")
		}
	})
}

func testEnds(t *testing.T, e *Env) {
	t.Run("destroy ends every process, whatever it ignores and wherever it hides, and can be called again and at once", func(t *testing.T) {
		var before []string
		if e.Left != nil {
			before = e.Left(t)
		}
		b := e.box(t)
		id := b.start(t, sh(`trap '' TERM INT HUP; for i in 1 2 3; do (setsid sh -c 'trap "" TERM; sleep 300' &); done; dd if=/dev/zero of=/srv/x bs=1M count=4 2>/dev/null; echo up; sleep 300`))
		b.waitText(t, id, sandbox.Stdout, "up")
		var wg sync.WaitGroup
		for range 3 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				ctx, cancel := context.WithTimeout(context.Background(), Patience)
				defer cancel()
				if err := b.inst.Destroy(ctx); err != nil {
					t.Errorf("destroy: %v", err)
				}
			}()
		}
		wg.Wait()
		e.nothingLeft(t, before)
		calls := map[string]error{
			"start":  b.inst.Start(within(t), b.command(t, sh("exit 0"))),
			"signal": b.inst.Signal(within(t), id, 9),
		}
		if l := e.level(); l != "" {
			calls["pause"] = b.inst.Pause(within(t), l)
		}
		for what, err := range calls {
			if !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrState) && !errors.Is(err, sandbox.ErrLost) {
				t.Errorf("%s after destroy: %v", what, err)
			}
		}
	})
	t.Run("a sandbox with a full disk, no memory and no processes left is destroyed all the same", func(t *testing.T) {
		var before []string
		if e.Left != nil {
			before = e.Left(t)
		}
		b := e.box(t, func(s *sandbox.Spec) { s.Resources.Memory, s.Resources.Disk, s.Resources.Pids = 32<<20, 8<<20, 24 })
		b.run(t, sh("dd if=/dev/zero of=/srv/x bs=1M count=64 2>/dev/null; true"))
		c := sh("f() { f | f & }; f; dd if=/dev/zero of=/dev/null bs=200M count=1; sleep 300")
		c.Timeout = 3 * time.Second
		b.start(t, c)
		time.Sleep(500 * time.Millisecond)
		b.destroy(t)
		e.nothingLeft(t, before)
	})
	t.Run("events are not owed after destroy", func(t *testing.T) {
		b := e.box(t)
		b.start(t, sh("while :; do echo x; done"))
		b.destroy(t)
	})
}
