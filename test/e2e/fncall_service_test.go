package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// publishShell makes the environment shell, which is busybox alone.
func publishShell(t *testing.T, s *service) {
	t.Helper()
	_, err := s.client().PublishEnvironment(within(t), &dsecv1.Environment{Name: "shell", Base: s.small(t)})
	must(t, err)
}

// shell is a call of a script in that environment.
func shell(script string) client.Call {
	return client.Call{Cmd: []string{"sh", "-c", script}, Environment: "shell", Limits: &dsecv1.CallLimits{CpuMs: 60_000, WallMs: 60_000}, Queue: 2 * time.Minute}
}

// TestCallsOfAKilledDaemon kills the daemon in the middle of 500 calls. Without another daemon everything of them ends by itself, and at its
// start the next one takes what is left away; keys then answer as if nothing had been.
func TestCallsOfAKilledDaemon(t *testing.T) {
	s := own(t)
	publishShell(t, s)
	s.conf = "[fncall]\nplaces = 64\n"
	must(t, s.finish(os.Interrupt))
	must(t, s.begin())
	var wg sync.WaitGroup
	var begun, answered atomic.Int64
	c := s.client()
	for i := range 500 {
		q := shell("echo x >/tmp/left; echo x >left; (setsid sleep 3131 &) ; sleep 3131")
		if i%4 == 0 {
			q = shell("echo $((6*7))")
		}
		q.Key, q.Job, q.Pooled = fmt.Sprint("k", i), "killed", i%2 == 0
		wg.Go(func() {
			begun.Add(1)
			if a, err := c.FnCall(context.Background(), q); err == nil && a.Verdict == "OK" {
				answered.Add(1)
			}
		})
	}
	must(t, eventually(func() error {
		if n := len(s.calls()); n < 64 {
			return fmt.Errorf("%d processes of calls", n)
		}
		return nil
	}))
	s.kill()
	wg.Wait()
	if n := begun.Load(); n != 500 {
		t.Fatalf("%d calls were made", n)
	}
	must(t, eventually(func() error {
		if left := s.calls(); len(left) > 0 {
			return fmt.Errorf("%d processes outlived the daemon: %v", len(left), left[0])
		}
		if left := s.leftovers(); len(left) > 0 {
			return errors.New(strings.Join(left, "\n"))
		}
		return nil
	}))
	must(t, s.begin())
	t.Logf("%d of 125 short calls were answered before the daemon was killed", answered.Load())
	c = s.client()
	for i := 0; i < 40; i += 4 { // whether it was answered or lost, the key has one answer now
		q := shell("echo $((6*7))")
		q.Key, q.Job, q.Pooled = fmt.Sprint("k", i), "killed", true
		a, err := c.FnCall(within(t), q)
		if err != nil || a.Verdict != "OK" || string(a.Result.Stdout) != "42\n" {
			t.Errorf("key %s: %v %v", q.Key, a, err)
		}
	}
	q := shell("echo another")
	q.Key, q.Job = "k0", "killed"
	if _, err := c.FnCall(within(t), q); !errors.Is(err, client.ErrExists) {
		t.Errorf("a key with another request: %v", err)
	}
}

// calls are the processes that function calls run, by their groups.
func (s *service) calls() (out []string) {
	for _, p := range processes() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.pid))
		if err == nil && strings.Contains(string(b), "dsec-"+s.instance()+"/") && strings.Contains(string(b), "/fncall-") {
			out = append(out, p.String())
		}
	}
	return out
}

// TestCallQueue fills a service with one place: another project has its turn, rates are kept, what can't wait is told so in time, and what
// is given up leaves its place to the next.
func TestCallQueue(t *testing.T) {
	s := newService(ownDir(t), "up", withDefaults(nil)...)
	s.conf = "[fncall]\nplaces = 1\nwaiting = 40\n"
	start(t, s)
	publishShell(t, s)
	_, err := s.client().PublishEnvironment(within(t), &dsecv1.Environment{Name: "fncall", Base: s.small(t)})
	must(t, err)
	c := s.client()
	// Every run takes a second of the only place.
	ctx, give := context.WithCancel(within(t))
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() { c.FnCall(ctx, shell("sleep 1")) })
	}
	must(t, eventually(func() error {
		if len(s.calls()) == 0 {
			return errors.New("none runs")
		}
		return nil
	}))
	// The facade answers 504 within its 8 s, in a shape that SandboxFusion's callers read; nothing of the call ran.
	begin := time.Now()
	r, err := http.NewRequest("POST", "http://dsec/run_code", bytes.NewReader([]byte(`{"code":"echo late","language":"bash"}`)))
	must(t, err)
	r.Header.Set("Authorization", "Bearer "+s.key())
	code, body := s.send(t, r)
	var told struct{ Detail string }
	if took := time.Since(begin); code != 504 || json.Unmarshal([]byte(body), &told) != nil || !strings.Contains(told.Detail, "no place within") || took > 20*time.Second {
		t.Errorf("a call that can't begin: %d %s after %v", code, body, took)
	}
	// A place further back than all that may wait is refused at once.
	var refused atomic.Int64
	for range 60 {
		wg.Go(func() {
			if _, err := c.FnCall(ctx, shell("sleep 1")); errors.Is(err, client.ErrExhausted) {
				refused.Add(1)
			}
		})
	}
	must(t, eventually(func() error {
		if refused.Load() == 0 {
			return errors.New("none is refused")
		}
		return nil
	}))
	give()
	wg.Wait()
	// All that were given up made room, as soon as the service has seen that they were.
	must(t, eventually(func() error {
		a, err := c.FnCall(within(t), shell("echo next"))
		if err == nil && (a.Verdict != "OK" || a.Queued > 3*time.Second) {
			t.Errorf("after them: %v", a)
		}
		return err
	}))
}

// TestCallCancelRaces cancels calls at any moment between before they are sent and after their end: each is answered as cancelled or as what
// it is, the key says the same for ever, and nothing stays.
func TestCallCancelRaces(t *testing.T) {
	s := shared(t)
	publishShell(t, s)
	c := s.client()
	r := random(t)
	var wg sync.WaitGroup
	var cancelled, whole atomic.Int64
	for i := range 60 {
		q := shell("sleep 0.05; echo done")
		q.Key, q.Job = fmt.Sprint("race", i), "race"
		wait := time.Duration(r.IntN(400)) * time.Millisecond
		wg.Go(func() {
			go func() {
				time.Sleep(wait)
				if err := c.CancelCall(within(t), q.Job, q.Key); err != nil && !errors.Is(err, client.ErrNotFound) {
					t.Errorf("cancel: %v", err)
				}
			}()
			a, err := c.FnCall(within(t), q)
			if err != nil {
				t.Errorf("%s: %v", q.Key, err)
				return
			}
			switch {
			case a.Verdict == "CANCELLED":
				cancelled.Add(1)
			case a.Verdict == "OK" && string(a.Result.Stdout) == "done\n":
				whole.Add(1)
			default:
				t.Errorf("%s: %s", q.Key, a.Verdict)
			}
			b, err := c.FnCall(within(t), q)
			if err != nil || b.Verdict != a.Verdict || !b.Recorded {
				t.Errorf("%s: again %v %v, was %s", q.Key, b, err, a.Verdict)
			}
		})
	}
	wg.Wait()
	t.Logf("%d cancelled, %d ended by themselves", cancelled.Load(), whole.Load())
	must(t, s.idle())
}

// TestSandboxFusionBadBodies sends what is no request: always a refusal in JSON that says what, never an answer of a program, never 504 or 5xx.
func TestSandboxFusionBadBodies(t *testing.T) {
	s := shared(t)
	deep := strings.Repeat(`{"a":`, 20_000) + "1" + strings.Repeat("}", 20_000)
	for _, body := range []string{"", "{", "null", "[]", "3", `"x"`, `{"code":1,"language":"python"}`, `{"code":null,"language":"python"}`, `{"code":"1"}`,
		`{"code":"1","language":["python"]}`, `{"code":"1","language":"python","run_timeout":"x"}`, `{"code":"1","language":"python","run_timeout":-1}`,
		`{"code":"1","language":"python","run_timeout":1e999}`, `{"code":"1","language":"python","files":[]}`, `{"code":"1","language":"python","files":{"../x":"aGk="}}`,
		`{"code":"1","language":"python","files":{"/etc/x":"aGk="}}`, `{"code":"1","language":"python","files":{"":"aGk="}}`, `{"code":"1","language":"python","files":{"a\u0000b":"aGk="}}`,
		`{"code":"1","language":"python","files":{"a":"*"}}`, `{"code":"1","language":"python","fetch_files":["../../etc/passwd"]}`, `{"code":"1","language":"python","fetch_files":"x"}`,
		"\xff\xfe", deep} {
		r, err := http.NewRequest("POST", "http://dsec/run_code", strings.NewReader(body))
		must(t, err)
		r.Header.Set("Authorization", "Bearer "+s.key())
		code, answer := s.send(t, r)
		var told struct{ Detail string }
		if code < 400 || code > 499 || json.Unmarshal([]byte(answer), &told) != nil || told.Detail == "" {
			t.Errorf("%.80q: %d %.200s", body, code, answer)
		}
	}
}
