package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

func TestB02DevStdout(t *testing.T) {
	t.Parallel()
	s := shared(t)
	const script = "echo a >/dev/stdout; echo b >/dev/stderr; echo c >/proc/self/fd/1"
	ways(t, s, nil, script, func(t *testing.T, way, stdout, stderr string, o *dsecv1.Outcome) {
		wantOut, wantErr := "a\nc\n", "b\n"
		if strings.HasPrefix(way, "terminal") {
			wantOut, wantErr = "a\nb\nc\n", ""
		}
		if stdout != wantOut || stderr != wantErr || o.Kind != "exited" || o.Code != 0 {
			t.Errorf("%s: %s, stdout %q, stderr %q", way, describeOutcome(o), stdout, stderr)
		}
	})
	sb := s.box(t)
	for _, user := range []string{"root", "nobody"} {
		c := shAs(user, "cat /dev/stdin")
		c.Stdin = []byte("x")
		want(t, exe(t, sb, c), 0, "x", "")
		ses, err := sb.Session(within(t), client.SessionOptions{User: user})
		if err != nil {
			t.Fatal(err)
		}
		r, err := ses.RunCmd(within(t), "cat /dev/stdin", client.Cmd{Stdin: []byte("x")})
		if err != nil {
			t.Fatal(err)
		}
		want(t, r, 0, "x", "")
	}
}

func TestB15LastBytes(t *testing.T) {
	t.Parallel()
	s := shared(t)
	n := 250 // the backends' suite has 1,000 of each
	if torture {
		n = 1000
	}
	cases := []struct {
		cmd  client.Cmd
		want string
	}{
		{client.Cmd{Argv: []string{"printf", "x"}}, "x"},
		{client.Cmd{Argv: []string{"head", "-c", "200000", "/dev/zero"}}, strings.Repeat("\x00", 200000)},
		{terminal(sh("seq 1 50; echo end"), 24, 80), numbers(50) + "end\r\n"},
	}
	sb := s.box(t)
	for _, c := range cases {
		each(8, n, func(int) {
			if r := exe(t, sb, c.cmd); string(r.Stdout) != c.want || !r.OK() {
				t.Errorf("%q: %s, %d octets", c.cmd.Argv, describeOutcome(r.Outcome), len(r.Stdout))
			}
		})
		// A reader that attaches sees the last octet before the end.
		each(8, n/10, func(int) {
			p, err := sb.Start(within(t), c.cmd)
			if err != nil {
				t.Error(err)
				return
			}
			var b bytes.Buffer
			if o, err := p.Stream(within(t), &b, io.Discard); err != nil || b.String() != c.want || o.Kind != "exited" {
				t.Errorf("attached %q: %v, %v, %d octets", c.cmd.Argv, o, err, b.Len())
			}
		})
	}
}

func TestB15LastBytesOverACrash(t *testing.T) {
	t.Parallel()
	s := own(t, "--keep")
	sb := s.box(t)
	var ids []string
	for i := range 8 {
		p, err := sb.Start(within(t), client.Cmd{ID: fmt.Sprintf("c%d", i), Argv: []string{"sh", "-c", "sleep 0.$(( $$ % 7 )); head -c 200000 /dev/zero; printf end"}})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, p.ID)
	}
	time.Sleep(200 * time.Millisecond)
	s.kill()
	time.Sleep(500 * time.Millisecond) // some end while nobody listens
	if err := s.begin(); err != nil {
		t.Fatal(err)
	}
	sb = s.client().Sandbox(sb.ID)
	for _, id := range ids {
		r, err := sb.Process(id).Wait(within(t))
		if err != nil {
			t.Fatal(err)
		}
		if !r.OK() || len(r.Stdout) != 200003 || !bytes.HasSuffix(r.Stdout, []byte("end")) {
			t.Errorf("%s: %s, %d octets", id, describeOutcome(r.Outcome), len(r.Stdout))
		}
	}
	if err := sb.Close(); err != nil {
		t.Error(err)
	}
	s.stopKept(t)
}

// each runs f n times, at most at once at a time.
func each(at, n int, f func(i int)) {
	var wg sync.WaitGroup
	slot := make(chan struct{}, at)
	for i := range n {
		slot <- struct{}{}
		wg.Go(func() { defer func() { <-slot }(); f(i) })
	}
	wg.Wait()
}

func numbers(n int) string {
	var b strings.Builder
	for i := 1; i <= n; i++ {
		fmt.Fprintf(&b, "%d\r\n", i)
	}
	return b.String()
}

func TestB33OutputCap(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	c := s.client()
	const limit = 100_000
	tail := int64(limit / 2) // T = min(64 KiB, C/2)
	for _, n := range []int64{limit - 1, limit, limit + 1, 10 * limit} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			for _, stream := range []string{"stdout", "stderr"} {
				to := map[string]string{"stdout": "", "stderr": " >&2"}[stream]
				// Numbered octets, so that it shows which are kept.
				cmd := sh(fmt.Sprintf("yes 0123456789abcde | head -c %d%s; exit 7", n, to))
				cmd.OutputCap = limit
				r := exe(t, sb, cmd)
				end, data := r.Outcome.Stdout, r.Stdout
				if stream == "stderr" {
					end, data = r.Outcome.Stderr, r.Stderr
				}
				if r.Outcome.Kind != "exited" || r.Outcome.Code != 7 || end.GetTotal() != n || end.GetTruncated() != (n > limit) {
					t.Fatalf("%s: %s, %v", stream, describe(r), end)
				}
				full := strings.Repeat("0123456789abcde\n", int(n/16)+1)[:n]
				if n <= limit {
					if string(data) != full || end.Head+end.Tail != n {
						t.Errorf("%s: %d octets, %v; want all %d", stream, len(data), end, n)
					}
				} else {
					if end.Head+end.Tail != limit || end.Tail != tail || string(data) != full[:end.Head] {
						t.Errorf("%s: %d octets, %v", stream, len(data), end)
					}
					gap := readOutput(t, c, sb.ID, r.ID, stream, end.Head)
					if gap.GetGap().GetFrom() != end.Head || gap.GetGap().GetTo() != n-end.Tail {
						t.Errorf("%s: at the gap %v, want %d to %d", stream, gap.GetGap(), end.Head, n-end.Tail)
					}
					if got := readOutput(t, c, sb.ID, r.ID, stream, n-end.Tail); string(got.Data) != full[n-end.Tail:] || !got.End {
						t.Errorf("%s: tail of %d octets, end %v", stream, len(got.Data), got.End)
					}
				}
				for _, from := range []int64{0, limit - 5, limit + 100} {
					total, gaps := attachFrom(t, c, sb.ID, r.ID, stream, from)
					switch {
					case n <= limit:
						if total != max(0, n-from) || gaps != 0 {
							t.Errorf("%s attach from %d: %d octets, gap of %d", stream, from, total, gaps)
						}
					case total+gaps != max(0, n-from):
						t.Errorf("%s attach from %d: %d octets and a gap of %d, want %d together", stream, from, total, gaps, n-from)
					}
				}
			}
		})
	}
	t.Run("both streams at once", func(t *testing.T) {
		cmd := sh(fmt.Sprintf("head -c %d /dev/zero & head -c %d /dev/zero >&2; wait; exit 9", 10*limit, 3*limit))
		cmd.OutputCap = limit
		r := exe(t, sb, cmd)
		if r.Outcome.Code != 9 || r.Outcome.Stdout.GetTotal() != 10*limit || r.Outcome.Stderr.GetTotal() != 3*limit || !r.Outcome.Stdout.Truncated || !r.Outcome.Stderr.Truncated {
			t.Errorf("%s, %v, %v", describeOutcome(r.Outcome), r.Outcome.Stdout, r.Outcome.Stderr)
		}
	})
	t.Run("a line of 100 MB", func(t *testing.T) {
		r := exe(t, sb, sh("head -c 100000000 /dev/zero | tr '\\0' a; exit 3"))
		if r.Outcome.Code != 3 || r.Outcome.Stdout.GetTotal() != 100_000_000 || !r.Outcome.Stdout.GetTruncated() || r.Outcome.Stdout.Head+r.Outcome.Stdout.Tail != 16<<20 {
			t.Errorf("%s, %v", describeOutcome(r.Outcome), r.Outcome.Stdout)
		}
	})
}

func readOutput(t testing.TB, c *client.Client, sandbox, id, stream string, offset int64) *dsecv1.ReadOutputResponse {
	t.Helper()
	r, err := c.Commands.ReadOutput(within(t), connect.NewRequest(&dsecv1.ReadOutputRequest{Sandbox: sandbox, Id: id, Stream: stream, Offset: offset, Limit: 4 << 20}))
	if err != nil {
		t.Fatalf("read output: %v", err)
	}
	return r.Msg
}

// attachFrom reads a stream from an offset to its end and returns what came and what was told as a gap.
func attachFrom(t testing.TB, c *client.Client, sandbox, id, stream string, offset int64) (total, gaps int64) {
	t.Helper()
	q := &dsecv1.AttachRequest{Sandbox: sandbox, Id: id}
	if stream == "stdout" {
		q.StdoutOffset = offset
	} else {
		q.StderrOffset = offset
	}
	st, err := c.Commands.Attach(within(t), connect.NewRequest(q))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	at := offset
	for st.Receive() {
		switch e := st.Msg().Event.(type) {
		case *dsecv1.AttachResponse_Chunk:
			if e.Chunk.Stream != stream {
				continue
			}
			if e.Chunk.Offset != at {
				t.Errorf("%s: chunk at %d, expected %d", stream, e.Chunk.Offset, at)
			}
			total += int64(len(e.Chunk.Data))
			at = e.Chunk.Offset + int64(len(e.Chunk.Data))
		case *dsecv1.AttachResponse_Gap:
			if e.Gap.Stream == stream {
				gaps += e.Gap.To - e.Gap.From
				at = e.Gap.To
			}
		case *dsecv1.AttachResponse_Ended:
			return total, gaps
		}
	}
	t.Fatalf("attach: %v", st.Err())
	return 0, 0
}

func TestB34SignalMasks(t *testing.T) {
	t.Parallel()
	s := shared(t)
	const script = "grep -E 'Sig(Blk|Ign)' /proc/self/status | tr -d '\\t'; umask; cat /proc/self/oom_score_adj; awk '{print $19}' /proc/self/stat; ls -1 /proc/self/fd"
	// ls itself opens the folder as its lowest free descriptor.
	ways(t, s, nil, script, func(t *testing.T, way, stdout, stderr string, o *dsecv1.Outcome) {
		want := "SigBlk:0000000000000000\nSigIgn:0000000000000000\n0022\n0\n0\n0\n1\n2\n3\n"
		if stdout != want || stderr != "" {
			t.Errorf("%s: %q, %q; want %q", way, stdout, stderr, want)
		}
	})
	sb := s.debianBox(t)
	r := exe(t, sb, client.Cmd{Argv: []string{"bash", "-c", "yes | head -1; echo ${PIPESTATUS[0]}"}})
	want(t, r, 0, "y\n141\n", "")
	want(t, exe(t, sb, sh(`trap "echo T" PIPE; kill -PIPE $$`)), 0, "T\n", "")
	ses, err := sb.Session(within(t), client.SessionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if r, err = ses.Run(within(t), "yes | head -1; echo ${PIPESTATUS[0]}"); err != nil {
		t.Fatal(err)
	}
	want(t, r, 0, "y\n141\n", "")
	if r, err = ses.Run(within(t), `trap "echo T" PIPE; kill -PIPE $$`); err != nil {
		t.Fatal(err)
	}
	want(t, r, 0, "T\n", "")
}

func TestB36StartFailures(t *testing.T) {
	t.Parallel()
	s := shared(t)
	arm := "\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 9) + "\x02\x00\xb7\x00\x01\x00\x00\x00" + strings.Repeat("\x00", 40)
	extra := s.layer(t, tarOf(
		entry{name: "opt/", kind: '5'},
		entry{name: "opt/script", data: "#!/bin/sh\necho no\n"},
		entry{name: "opt/badinterp", mode: 0o755, data: "#!/no/interp\necho no\n"},
		entry{name: "opt/locked/", kind: '5', mode: 0o700},
	))
	layers := func(o *client.Options) { o.Layers = []string{s.small(t), extra} }
	sb := s.box(t, layers)
	// Not in the layer: a layer of another machine's programs is refused when the sandbox is made.
	if err := sb.Files().WriteFile(within(t), "/opt/arm64", []byte(arm), 0o755); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name  string
		cmd   client.Cmd
		words []string
	}{
		{"no such program", client.Cmd{Argv: []string{"nosuch"}}, []string{"nosuch"}},
		{"no such path", client.Cmd{Argv: []string{"/no/such"}}, []string{"/no/such", "not found"}},
		{"not executable", client.Cmd{Argv: []string{"/opt/script"}}, []string{"/opt/script", "not executable"}},
		{"interpreter missing", client.Cmd{Argv: []string{"/opt/badinterp"}}, []string{"/opt/badinterp", "/no/interp"}},
		{"folder", client.Cmd{Argv: []string{"/opt"}}, []string{"/opt"}},
		{"another machine's program", client.Cmd{Argv: []string{"/opt/arm64"}}, []string{"/opt/arm64", "aarch64"}},
		{"cwd missing", client.Cmd{Argv: []string{"true"}, Cwd: "/no/cwd"}, []string{"/no/cwd", "not found"}},
		{"cwd a file", client.Cmd{Argv: []string{"true"}, Cwd: "/etc/passwd"}, []string{"/etc/passwd", "not a folder"}},
		{"cwd unreadable", client.Cmd{Argv: []string{"true"}, Cwd: "/opt/locked", User: "nobody"}, []string{"/opt/locked", "permission denied"}},
		{"no such user", client.Cmd{Argv: []string{"true"}, User: "nosuch"}, []string{"nosuch", "user"}},
	}
	for _, c := range cases {
		for _, tty := range []bool{false, true} {
			cmd := c.cmd
			if tty {
				cmd = terminal(cmd, 24, 80)
			}
			r := exe(t, sb, cmd)
			if r.Outcome.Kind != "start_failed" {
				t.Errorf("%s: %s", c.name, describe(r))
				continue
			}
			for _, w := range c.words {
				if !strings.Contains(strings.ToLower(r.Outcome.Error), strings.ToLower(w)) {
					t.Errorf("%s: error %q does not name %q", c.name, r.Outcome.Error, w)
				}
			}
		}
	}
	t.Run("in a shell it is the shell's own text", func(t *testing.T) {
		r := exe(t, sb, sh("nosuch"))
		if r.Outcome.Kind != "exited" || r.Outcome.Code != 127 || !strings.Contains(string(r.Stderr), "nosuch") {
			t.Errorf("%s", describe(r))
		}
	})
	t.Run("a sandbox with such a cwd", func(t *testing.T) {
		bad, err := s.tryBox(t, layers, func(o *client.Options) { o.Cwd = "/no/cwd" })
		if err != nil {
			errorText(t, err, "/no/cwd")
			return
		}
		r := exe(t, bad, client.Cmd{Argv: []string{"true"}})
		if r.Outcome.Kind != "start_failed" || !strings.Contains(r.Outcome.Error, "/no/cwd") {
			t.Errorf("%s", describe(r))
		}
		if _, err := bad.Session(within(t), client.SessionOptions{}); err == nil {
			t.Error("a session opened")
		} else {
			errorText(t, err, "/no/cwd")
		}
	})
	t.Run("a session of such a user or cwd", func(t *testing.T) {
		_, err := sb.Session(within(t), client.SessionOptions{User: "nosuch"})
		errorText(t, err, "nosuch")
		_, err = sb.Session(within(t), client.SessionOptions{Cwd: "/no/cwd"})
		errorText(t, err, "/no/cwd")
		_, err = sb.Session(within(t), client.SessionOptions{Shell: "/no/shell"})
		errorText(t, err, "/no/shell")
	})
	t.Run("an entrypoint", func(t *testing.T) {
		e := s.box(t, layers, func(o *client.Options) { o.Entrypoint = []string{"/no/entry"} })
		r, err := e.Process("entrypoint").Wait(within(t))
		if err != nil {
			t.Fatal(err)
		}
		if r.Outcome.Kind != "start_failed" || !strings.Contains(r.Outcome.Error, "/no/entry") {
			t.Errorf("%s", describe(r))
		}
		waitState(t, e, "stopped", "failed")
		if e.Data.Cause.GetClass() != "task" {
			t.Errorf("cause %v, want task", e.Data.Cause)
		}
	})
}

// waitState waits until a sandbox has one of the states.
func waitState(t testing.TB, sb *client.Sandbox, states ...string) {
	t.Helper()
	err := eventually(func() error {
		if err := sb.Refresh(within(t)); err != nil {
			return err
		}
		for _, s := range states {
			if sb.Data.State == s {
				return nil
			}
		}
		return fmt.Errorf("%s is %s, want %v", sb.ID, sb.Data.State, states)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestB42OpenOutputHoldsNothingUp(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	for range 2 {
		r := exe(t, sb, sh("sleep 300 & echo hi"))
		want(t, r, 0, "hi\n", "")
		if !r.Outcome.OutputOpen {
			t.Errorf("%s; want output_open", describe(r))
		}
	}
	if n := strings.TrimSpace(out(t, sb, "ps -o args | grep -c '^sleep 300'")); n != "2" {
		t.Errorf("%s of 2 sleeps live", n)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var next atomic.Int64 // commands of another client that have ended
	wg.Go(func() {
		other := s.client().Sandbox(sb.ID)
		for {
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			r, err := other.Exec(ctx, "echo", "next")
			cancel()
			if err != nil || string(r.Stdout) != "next\n" {
				t.Errorf("echo next: %v", err)
				return
			}
			next.Add(1)
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	for range 2 {
		cmd := sh(`setsid sh -c 'trap "" TERM; sleep 301' & sleep 302`)
		cmd.Timeout = 3 * time.Second
		begin, before := time.Now(), next.Load()
		r := exe(t, sb, cmd)
		if took := time.Since(begin); r.Outcome.Kind != "timed_out" || took < cmd.Timeout {
			t.Errorf("%s after %v", describe(r), took)
		}
		if n := next.Load() - before; n < 2 { // one may have been under way when this began
			t.Errorf("%d commands of another client ended meanwhile: they were held up by the timeout", n)
		}
		if left := strings.TrimSpace(out(t, sb, "ps -o args | grep -E '^sleep 30[12]' || true")); left != "" {
			t.Errorf("left after the timeout: %s", left)
		}
	}
	close(stop)
	wg.Wait()
	if n := strings.TrimSpace(out(t, sb, "ps -o args | grep -c '^sleep 300'")); n != "2" {
		t.Errorf("%s of 2 older sleeps live", n)
	}
}
