package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

func TestB39CancelledCreates(t *testing.T) {
	t.Parallel()
	s := own(t)
	rng := random(t)
	const n = 500
	small := s.small(t)
	options := func(i int) client.Options {
		return client.Options{Layers: []string{small}, Job: "cancelled", Key: fmt.Sprintf("k%d", i), Name: fmt.Sprintf("n%d", i), Memory: 64 << 20, Disk: 32 << 20, Pids: 64}
	}
	cuts := make([]time.Duration, n)
	for i := range cuts {
		cuts[i] = time.Duration(rng.IntN(60_000)) * time.Microsecond
	}
	stopped := make([]bool, n)
	each(8, n, func(i int) {
		c := s.client() // a connection of its own, which is closed
		ctx, cancel := context.WithTimeout(context.Background(), cuts[i])
		defer cancel()
		_, err := c.RunContainer(ctx, options(i))
		if i%2 == 0 {
			o := options(i)
			late, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			serr := c.StopKey(late, o.Job, o.Key, o.Name)
			if serr != nil && !errors.Is(serr, client.ErrNotFound) {
				t.Errorf("stop %s: %v (the create: %v)", o.Key, serr, err)
			}
			stopped[i] = true
		}
	})
	c := s.client()
	time.Sleep(5 * time.Second) // nothing that was stopped may be born later
	list, err := c.List(within(t), &dsecv1.Selector{Job: "cancelled"})
	must(t, err)
	living := map[string]int{}
	for _, sb := range list {
		living[sb.Data.Key]++
		if sb.Data.State != "running" {
			t.Errorf("%s is %s", sb.Data.Key, sb.Data.State)
		}
	}
	for i := range n {
		key := options(i).Key
		if stopped[i] && living[key] > 0 {
			t.Errorf("%s was stopped and lives", key)
		}
		if living[key] > 1 {
			t.Errorf("%s has %d sandboxes", key, living[key])
		}
	}
	if got := len(s.inside()); got != len(list) {
		t.Errorf("%d processes for %d sandboxes: %v", got, len(list), s.leftovers())
	}
	// Again with the same keys: that sandbox, or a fresh one, never two. A stopped key may be refused for a while.
	each(8, n, func(i int) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		sb, err := c.RunContainer(ctx, options(i))
		switch {
		case err == nil:
			if r, err := sb.Exec(ctx, "true"); err == nil && !r.OK() {
				t.Errorf("again %d: %s", i, describe(r))
			} else if err != nil && !stopped[i] {
				t.Errorf("again %d: %v", i, err)
			}
		case !stopped[i]:
			t.Errorf("again %d: %v", i, err)
		}
	})
	list, err = c.List(within(t), &dsecv1.Selector{Job: "cancelled"})
	must(t, err)
	seen := map[string]bool{}
	for _, sb := range list {
		if seen[sb.Data.Key] {
			t.Errorf("two of %s", sb.Data.Key)
		}
		seen[sb.Data.Key] = true
	}
	r, err := c.StopAll(within(t), &dsecv1.Selector{Job: "cancelled"})
	must(t, err)
	if len(r.Errors) > 0 {
		t.Errorf("stop: %v", r.Errors)
	}
	if err := s.idle(); err != nil {
		t.Error(err)
	}
}

func TestB52IdleLimit(t *testing.T) {
	t.Parallel()
	s := shared(t)
	const idle = 5 * time.Second
	box := func(t *testing.T, layer func(testing.TB) string) *client.Sandbox {
		return s.box(t, func(o *client.Options) { o.Layers, o.Idle, o.Memory = []string{layer(t)}, idle, 512<<20 })
	}
	// lasted waits for the end and tells how long after its last activity it came.
	lasted := func(t *testing.T, sb *client.Sandbox, last time.Time) {
		t.Helper()
		waitState(t, sb, "stopped", "failed")
		if sb.Data.Cause.GetClass() != "limit" || sb.Data.Cause.GetReason() != "idle" {
			t.Errorf("cause %v, want limit, idle", sb.Data.Cause)
		}
		if after := sb.Data.Ended.AsTime().Sub(last); after < idle-100*time.Millisecond {
			t.Errorf("ended %v after the last activity, want %v", after, idle)
		}
	}
	alive := func(t *testing.T, sb *client.Sandbox) {
		t.Helper()
		must(t, sb.Refresh(within(t)))
		if sb.Data.State != "running" {
			t.Fatalf("%s (%v) while it worked", sb.Data.State, sb.Data.Cause)
		}
	}
	t.Run("attached command", func(t *testing.T) {
		t.Parallel()
		sb := box(t, s.small)
		p, err := sb.Start(within(t), client.Cmd{Argv: []string{"sleep", "12"}})
		must(t, err)
		if o, err := p.Stream(within(t), discard{}, discard{}); err != nil || o.Kind != "exited" || o.Code != 0 {
			t.Fatalf("%v, %v", o, err)
		}
		last := time.Now()
		alive(t, sb)
		lasted(t, sb, last)
	})
	t.Run("detached command", func(t *testing.T) {
		t.Parallel()
		sb := box(t, s.small)
		p, err := sb.Start(within(t), client.Cmd{Argv: []string{"sleep", "12"}})
		must(t, err)
		time.Sleep(9 * time.Second) // nobody asks
		alive(t, sb)
		r, err := p.Wait(within(t))
		must(t, err)
		if !r.OK() {
			t.Fatalf("%s", describe(r))
		}
		lasted(t, sb, r.Outcome.Ended.AsTime())
	})
	t.Run("command in a session", func(t *testing.T) {
		t.Parallel()
		sb := box(t, s.small)
		ses := session(t, sb, client.SessionOptions{})
		r, err := ses.Run(within(t), "sleep 9")
		must(t, err)
		alive(t, sb)
		lasted(t, sb, r.Outcome.Ended.AsTime()) // an open session alone is no activity
	})
	t.Run("a WebSocket", func(t *testing.T) {
		t.Parallel()
		sb := box(t, s.debian)
		serve(t, sb, "root", "127.0.0.1", 8080)
		// The server runs behind a command that has ended.
		list, err := sb.ListCommands(within(t))
		must(t, err)
		for _, c := range list {
			if c.State == "running" {
				must(t, sb.Process(c.Id).Signal(within(t), 9))
			}
		}
		if r := exe(t, sb, client.Cmd{Argv: []string{"sh", "-c", "python3 -c \"$0\" 127.0.0.1 8081 >/dev/null 2>&1 & sleep 2", echoServer}}); !r.OK() {
			t.Fatalf("%s", describe(r))
		}
		ctx := within(t)
		w, _, err := websocket.Dial(ctx, "ws://dsec/", &websocket.DialOptions{Host: "8081-" + sb.ID + ".boxes.test", HTTPHeader: http.Header{"X-Api-Key": {s.key()}},
			HTTPClient: &http.Client{Transport: s.transport()}})
		must(t, err)
		read := w.CloseRead(ctx)
		time.Sleep(4 * time.Second)
		must(t, w.Ping(read))
		time.Sleep(5 * time.Second)
		alive(t, sb)
		last := time.Now()
		_ = w.CloseNow()
		lasted(t, sb, last)
	})
	t.Run("only a background server", func(t *testing.T) {
		t.Parallel()
		sb := box(t, s.small)
		r := exe(t, sb, sh("sleep 3600 >/dev/null 2>&1 & echo started"))
		lasted(t, sb, r.Outcome.Ended.AsTime())
	})
	t.Run("only get, list, logs and wait", func(t *testing.T) {
		t.Parallel()
		sb := box(t, s.small)
		r := exe(t, sb, sh("echo once"))
		c := s.client()
		deadline := time.Now().Add(patience)
		for time.Now().Before(deadline) {
			must(t, sb.Refresh(within(t)))
			if sb.Data.State != "running" {
				break
			}
			_, err := c.List(within(t), &dsecv1.Selector{Labels: sb.Data.Labels})
			must(t, err)
			must(t, c.Log(within(t), &dsecv1.ReadLogRequest{Sandbox: sb.ID, Output: true}, func(*dsecv1.LogRecord) error { return nil }))
			_, err = sb.Process(r.ID).Wait(within(t))
			must(t, err)
			_, err = sb.ListCommands(within(t))
			must(t, err)
			time.Sleep(300 * time.Millisecond)
		}
		lasted(t, sb, r.Outcome.Ended.AsTime())
	})
	t.Run("pause at the end instead, and wake", func(t *testing.T) {
		t.Parallel()
		sb := s.box(t, func(o *client.Options) { o.Idle, o.OnIdle = idle, "pause" })
		out(t, sb, "echo kept >/tmp/x")
		waitState(t, sb, "paused")
		time.Sleep(idle + time.Second) // the idle clock stands still
		must(t, sb.Refresh(within(t)))
		if sb.Data.State != "paused" {
			t.Errorf("%s", sb.Data.State)
		}
		if got := out(t, sb, "cat /tmp/x"); got != "kept\n" {
			t.Errorf("%q", got)
		}
		must(t, sb.Refresh(within(t)))
		if sb.Data.State != "running" {
			t.Errorf("after a command it is %s", sb.Data.State)
		}
	})
	t.Run("total", func(t *testing.T) {
		t.Parallel()
		begin := time.Now()
		sb := s.box(t, func(o *client.Options) { o.Total = 8 * time.Second })
		r, err := sb.Exec(within(t), "sleep", "300")
		must(t, err)
		if r.Outcome.Kind != "killed" || time.Since(begin) < 8*time.Second {
			t.Errorf("%s after %v", describe(r), time.Since(begin))
		}
		waitState(t, sb, "stopped", "failed")
		if sb.Data.Cause.GetReason() != "total" {
			t.Errorf("cause %v", sb.Data.Cause)
		}
	})
	t.Run("limits that are set later", func(t *testing.T) {
		t.Parallel()
		begin := time.Now()
		longer := s.box(t, func(o *client.Options) { o.Idle = idle })
		must(t, longer.SetLifetime(within(t), time.Hour, 0))
		shorter := s.box(t)
		must(t, shorter.SetLifetime(within(t), 0, 3*time.Second))
		waitState(t, shorter, "stopped", "failed")
		if shorter.Data.Cause.GetReason() != "total" {
			t.Errorf("cause %v", shorter.Data.Cause)
		}
		time.Sleep(time.Until(begin.Add(idle + 2*time.Second)))
		alive(t, longer)
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// A job's lease ends its sandboxes when its client dies, and not before.
func TestLease(t *testing.T) {
	t.Parallel()
	s := shared(t)
	c := s.client()
	const lease = 9 * time.Second
	job, err := c.OpenJob(within(t), "leased", lease, "stop")
	must(t, err)
	sb := s.box(t, func(o *client.Options) { o.Job = "leased" })
	time.Sleep(lease + 3*time.Second)
	must(t, sb.Refresh(within(t)))
	if sb.Data.State != "running" {
		t.Fatalf("%s while its client renews", sb.Data.State)
	}
	job.Detach()
	last := time.Now()
	waitState(t, sb, "stopped")
	if sb.Data.Cause.GetClass() != "client" || sb.Data.Cause.GetReason() != "lease" {
		t.Errorf("cause %v, want client, lease", sb.Data.Cause)
	}
	if took := time.Since(last); took < lease/3 { // the last renewal was at most that long before
		t.Errorf("ended %v after the last renewal", took)
	}
}

// The same create and the same command at the same time from many clients make one.
func TestKeysAtOnce(t *testing.T) {
	t.Parallel()
	s := shared(t)
	small, key := s.small(t), fmt.Sprintf("at-once-%d", time.Now().UnixNano())
	var mu sync.Mutex
	ids := map[string]bool{}
	each(8, 24, func(int) {
		sb, err := s.client().RunContainer(within(t), client.Options{Layers: []string{small}, Key: key, Name: "at-once", Memory: 64 << 20})
		if err != nil {
			t.Errorf("create: %v", err)
			return
		}
		if _, err := sb.Run(within(t), client.Cmd{ID: "same", Argv: []string{"sh", "-c", "echo x >>/tmp/ran"}}); err != nil {
			t.Errorf("command: %v", err)
		}
		mu.Lock()
		ids[sb.ID] = true
		mu.Unlock()
	})
	if len(ids) != 1 {
		t.Fatalf("%d sandboxes of one key: %v", len(ids), ids)
	}
	sb := s.client().Sandbox("at-once")
	if got := out(t, sb, "cat /tmp/ran"); got != "x\n" {
		t.Errorf("one command ran %d times", strings.Count(got, "x"))
	}
	_, err := sb.Run(within(t), client.Cmd{ID: "same", Argv: []string{"sh", "-c", "echo y"}})
	if !errors.Is(err, client.ErrExists) {
		t.Errorf("another command under the ID: %v", err)
	}
	errorText(t, err, "argv")
	_, err = s.client().RunContainer(within(t), client.Options{Layers: []string{small}, Key: key, Name: "at-once", Memory: 128 << 20})
	if !errors.Is(err, client.ErrExists) {
		t.Errorf("another create under the key: %v", err)
	}
	errorText(t, err, "memory")
	_, err = s.client().RunContainer(within(t), client.Options{Layers: []string{small}, Key: "other", Name: "at-once", Memory: 64 << 20})
	if !errors.Is(err, client.ErrExists) {
		t.Errorf("another create with the name: %v", err)
	}
	must(t, sb.Close())
}
