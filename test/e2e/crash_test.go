package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

func kills() int {
	if torture {
		return 250
	}
	return 25
}

// Two forms, half of the kills each: all in one process, and host and gateway apart.
func TestCrashUp(t *testing.T) {
	t.Parallel()
	s := own(t, "--keep", "--pool-size", "2g")
	crash(t, s, []*service{s}, kills())
	s.stopKept(t)
}

func TestCrashApart(t *testing.T) {
	t.Parallel()
	dir := ownDir(t)
	host, gateway := apart(t, dir, 1)
	crash(t, gateway, append(host, gateway), kills())
}

// apart starts n hosts, each with folders and uids of its own and more settings where conf has them, and one gateway.
func apart(t testing.TB, dir string, n int, conf ...string) (hosts []*service, gateway *service) {
	t.Helper()
	token := filepath.Join(dir, "token")
	must(t, os.WriteFile(token, []byte("token-of-the-test-0123456789\n"), 0o600))
	store := filepath.Join(dir, "store")
	args := []string{"--token-file", token, "--store", store}
	for i := range n {
		h := newService(filepath.Join(dir, fmt.Sprintf("h%d", i)), "host", "--token-file", token, "--store", store, "--pool-size", "2g")
		h.conf = strings.Join(conf, "\n")
		hosts = append(hosts, h)
		args = append(args, "--host", "unix:"+h.socket())
		t.Cleanup(func() { // a host leaves its sandboxes; one that is asked to stop them ends it all
			_ = h.finish(os.Interrupt)
			h.args = append(h.args, "--stop-all")
			if err := h.begin(); err != nil {
				t.Error(err)
			}
			if err := errors.Join(h.finish(os.Interrupt), h.nothingLeft()); err != nil {
				t.Errorf("host: %v\n%s", err, h.tail())
			}
			if t.Failed() {
				t.Logf("log of the host:\n%s", h.tail())
			}
		})
		must(t, h.begin())
	}
	gateway = newService(filepath.Join(dir, "g"), "gateway", args...)
	t.Cleanup(func() {
		begin := time.Now()
		defer func() { t.Logf("gateway took %v to end", time.Since(begin)) }()
		if err := gateway.finish(os.Interrupt); err != nil {
			t.Errorf("gateway: %v\n%s", err, gateway.tail())
		}
	})
	must(t, gateway.begin())
	return hosts, gateway
}

// again repeats an idempotent call while the services are being killed.
func again(t testing.TB, what string, f func(ctx context.Context) error) error {
	deadline := time.Now().Add(2 * patience)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := f(ctx)
		cancel()
		if err == nil {
			return nil
		}
		var e *client.Error
		passing := errors.Is(err, client.ErrUnavailable) || errors.Is(err, client.ErrExhausted) || errors.Is(err, context.DeadlineExceeded) ||
			errors.As(err, &e) && (e.Code == "unavailable" || e.Code == "unknown" || e.Code == "canceled" || e.Code == "deadline_exceeded")
		if !passing || time.Now().After(deadline) {
			return fmt.Errorf("%s: %w", what, err)
		}
		time.Sleep(30 * time.Millisecond)
	}
}

// lived is what one worker knows of a sandbox: what was acknowledged to it must be true for ever.
type lived struct {
	id       string
	commands map[string]string // acknowledged ID -> its output
	doubtful map[string]bool   // answered "unknown"
	stopped  bool
}

// crash kills services at random moments under a load of creates, commands and stops through the gateway, and checks that nothing that
// was acknowledged is lost and nothing ran twice.
func crash(t *testing.T, gateway *service, victims []*service, n int) {
	rng := random(t)
	small := gateway.small(t)
	var all []*lived
	var mu sync.Mutex
	var stop, unknown, ran atomic.Int64
	var wg sync.WaitGroup
	for w := range 4 {
		r := rand.New(rand.NewPCG(rng.Uint64(), uint64(w)))
		wg.Go(func() {
			for i := 0; stop.Load() == 0 && !t.Failed(); i++ {
				l := &lived{commands: map[string]string{}, doubtful: map[string]bool{}}
				if err := live(t, gateway, l, r, small, fmt.Sprintf("w%d-%d", w, i), &stop); err != nil {
					t.Errorf("worker %d: %v", w, err)
					return
				}
				unknown.Add(int64(len(l.doubtful)))
				ran.Add(int64(len(l.commands)))
				mu.Lock()
				all = append(all, l)
				mu.Unlock()
			}
		})
	}
	wg.Go(func() { // clients that are killed: what they started goes on
		clientsDie(t, gateway, small, rand.New(rand.NewPCG(rng.Uint64(), 99)), &stop)
	})
	for i := range n {
		time.Sleep(time.Duration(50+rng.IntN(700)) * time.Millisecond)
		v := victims[rng.IntN(len(victims))]
		v.kill()
		time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond)
		if err := v.begin(); err != nil {
			t.Errorf("start after kill %d: %v", i+1, err)
			break
		}
		if t.Failed() {
			break
		}
	}
	stop.Store(1)
	wg.Wait()
	t.Logf("%d kills, %d sandboxes, %d commands acknowledged, %d answered unknown", n, len(all), ran.Load(), unknown.Load())
	if ran.Load() < int64(n) {
		t.Errorf("only %d commands: the load was no load", ran.Load())
	}
	// A start that was recorded but not yet handed over may be in doubt, once for each worker and kill at the very most.
	if unknown.Load() > int64(n) {
		t.Errorf("%d commands in doubt after %d kills", unknown.Load(), n)
	}
	for _, l := range all {
		l.check(t, gateway)
	}
	c := gateway.client()
	_ = again(t, "stop all", func(ctx context.Context) error {
		_, err := c.StopAll(ctx, &dsecv1.Selector{Labels: map[string]string{"test": "crash"}})
		return err
	})
	for _, v := range victims {
		if v.role == "gateway" {
			continue
		}
		if err := eventually(func() error {
			if left := v.leftovers(); len(left) > 0 {
				return errors.New(strings.Join(left, "\n"))
			}
			return nil
		}); err != nil {
			t.Errorf("left behind: %v", err)
		}
	}
}

// payload is the output of a command, which tells its ID in its first line and can be known in advance.
func payload(id string, n int) string {
	return id + "\n" + strings.Repeat("0123456789abcde\n", n) + "end " + id + "\n"
}

func live(t testing.TB, s *service, l *lived, r *rand.Rand, layer, key string, stop *atomic.Int64) error {
	c := s.client()
	var sb *client.Sandbox
	err := again(t, "create "+key, func(ctx context.Context) (err error) {
		sb, err = c.RunContainer(ctx, client.Options{Runtime: os.Getenv(runtimeVar), Layers: []string{layer}, Job: "crash", Key: key, Memory: 64 << 20, Disk: 32 << 20, Pids: 64, Labels: map[string]string{"test": "crash"}})
		return err
	})
	if err != nil {
		return err
	}
	l.id = sb.ID
	for j := range 1 + r.IntN(6) {
		if stop.Load() != 0 {
			break
		}
		id, n := fmt.Sprintf("%s-c%d", key, j), r.IntN(3000)
		script := fmt.Sprintf("echo %s >>/srv/ran; echo %s; i=0; yes 0123456789abcde | head -n %d; sleep 0.%d; echo end %s; exit %d", id, id, n, r.IntN(4), id, j)
		var res *client.Result
		err := again(t, "command "+id, func(ctx context.Context) (err error) {
			res, err = sb.Run(ctx, client.Cmd{ID: id, Argv: []string{"sh", "-c", script}})
			return err
		})
		if err != nil {
			return err
		}
		switch {
		case res.Outcome.Kind == "unknown":
			l.doubtful[id] = true
		case res.Outcome.Kind != "exited" || int(res.Outcome.Code) != j || string(res.Stdout) != payload(id, n):
			return fmt.Errorf("command %s: %s, %d octets and %v told, stderr %.200q, want %d and exit %d; %s", id, describeOutcome(res.Outcome), len(res.Stdout), res.Outcome.Stdout, res.Stderr,
				len(payload(id, n)), j, l.told(t, s, id))
		default:
			l.commands[id] = payload(id, n)
		}
	}
	if err := l.once(t, s); err != nil {
		return err
	}
	if r.IntN(3) > 0 {
		err := again(t, "stop "+key, sb.Stop)
		if err != nil {
			return err
		}
		l.stopped = true
	}
	return nil
}

// told is what the service says of a command afterwards, for a failure's text.
func (l *lived) told(t testing.TB, s *service, id string) string {
	var b strings.Builder
	err := again(t, "ask again", func(ctx context.Context) error {
		b.Reset()
		r, err := s.client().Sandbox(l.id).Process(id).Wait(ctx)
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "asked again: %s, %d octets; log:", describeOutcome(r.Outcome), len(r.Stdout))
		return s.client().Log(ctx, &dsecv1.ReadLogRequest{Sandbox: l.id, Output: true}, func(r *dsecv1.LogRecord) error {
			if r.Step == id {
				fmt.Fprintf(&b, " %d %s", r.Seq, r.Kind)
				if r.Kind == "output" {
					fmt.Fprintf(&b, " %s@%d+%d", r.Stream, r.Offset, r.Length)
				}
			} else if r.Step == "" {
				fmt.Fprintf(&b, " %d (%s %s)", r.Seq, r.Kind, r.State)
			}
			return nil
		})
	})
	return fmt.Sprint(b.String(), " ", err)
}

// once checks inside the sandbox that each command ran once.
func (l *lived) once(t testing.TB, s *service) error {
	sb := s.client().Sandbox(l.id)
	var b []byte
	err := again(t, "read what ran", func(ctx context.Context) (err error) {
		b, err = sb.Files().ReadFile(ctx, "/srv/ran")
		if errors.Is(err, client.ErrNotFound) && len(l.commands) == 0 {
			err = nil
		}
		return err
	})
	if err != nil {
		return err
	}
	count := map[string]int{}
	for _, id := range strings.Fields(string(b)) {
		count[id]++
	}
	for id, n := range count {
		if n > 1 {
			return fmt.Errorf("command %s ran %d times", id, n)
		}
		if _, ok := l.commands[id]; !ok && !l.doubtful[id] {
			return fmt.Errorf("command %s ran and nobody asked for it", id)
		}
	}
	for id := range l.commands {
		if count[id] != 1 {
			return fmt.Errorf("command %s was acknowledged and ran %d times", id, count[id])
		}
	}
	return nil
}

// check compares what the service tells in the end with what it acknowledged.
func (l *lived) check(t testing.TB, s *service) {
	t.Helper()
	c := s.client()
	sb, err := c.Get(within(t), l.id)
	if err != nil {
		t.Errorf("lost: %v", err)
		return
	}
	if l.stopped != (sb.Data.State == "stopped") || !l.stopped && sb.Data.State != "running" {
		t.Errorf("%s is %s (%v), stopped %v", l.id, sb.Data.State, sb.Data.Cause, l.stopped)
	}
	if !l.stopped {
		if err := l.once(t, s); err != nil {
			t.Error(err)
		}
	}
	for id, want := range l.commands {
		r, err := sb.Process(id).Wait(within(t))
		if err != nil || r.Outcome.Kind != "exited" || string(r.Stdout) != want {
			t.Errorf("command %s afterwards: %v, %v", id, r, err)
		}
	}
	next := int64(1)
	started, ended := map[string]int{}, map[string]int{}
	octets := map[string]int{}
	err = c.Log(within(t), &dsecv1.ReadLogRequest{Sandbox: l.id, Output: true}, func(r *dsecv1.LogRecord) error {
		if r.Seq != next {
			return fmt.Errorf("record %d follows %d", r.Seq, next-1)
		}
		next++
		switch r.Kind {
		case "command":
			started[r.Step]++
		case "void": // the one before never reached the sandbox; a resend began it
			started[r.Step]--
		case "end":
			ended[r.Step]++
		case "output":
			octets[r.Step] += len(r.Data)
		}
		return nil
	})
	if err != nil {
		t.Errorf("log of %s: %v", l.id, err)
	}
	for id, want := range l.commands {
		if started[id] != 1 || ended[id] != 1 || octets[id] != len(want) {
			t.Errorf("log of %s: command %s started %d times, ended %d times, %d octets of %d", l.id, id, started[id], ended[id], octets[id], len(want))
			t.Log(l.told(t, s, id))
		}
	}
}

// clientsDie starts commands by the command line and kills the client before they end.
func clientsDie(t *testing.T, s *service, layer string, r *rand.Rand, stop *atomic.Int64) {
	c := s.client()
	var sb *client.Sandbox
	err := again(t, "create", func(ctx context.Context) (err error) {
		sb, err = c.RunContainer(ctx, client.Options{Runtime: os.Getenv(runtimeVar), Layers: []string{layer}, Job: "crash", Key: "clients", Memory: 64 << 20, Disk: 32 << 20, Pids: 64, Labels: map[string]string{"test": "crash"}})
		return err
	})
	if err != nil {
		t.Error(err)
		return
	}
	for i := 0; stop.Load() == 0 && !t.Failed(); i++ {
		id := fmt.Sprintf("cut-%d", i)
		cmd := s.dsec("exec", "--step", id, sb.ID, "--", "sh", "-c", "echo "+id+" >>/srv/ran; sleep 0.6; echo done")
		if err := cmd.Start(); err != nil {
			t.Error(err)
			return
		}
		time.Sleep(time.Duration(r.IntN(500)) * time.Millisecond)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		var res *client.Result
		err := again(t, "wait for "+id, func(ctx context.Context) (err error) {
			res, err = sb.Process(id).Wait(ctx)
			if errors.Is(err, client.ErrNotFound) {
				res, err = nil, nil // the client died before it had asked
			}
			return err
		})
		if err != nil {
			t.Error(err)
			return
		}
		if res != nil && res.Outcome.Kind != "unknown" && (res.Outcome.Kind != "exited" || string(res.Stdout) != "done\n") {
			t.Errorf("%s, whose client died: %s", id, describe(res))
		}
	}
	err = again(t, "read what ran", func(ctx context.Context) error {
		b, err := sb.Files().ReadFile(ctx, "/srv/ran")
		if err != nil && !errors.Is(err, client.ErrNotFound) {
			return err
		}
		seen := map[string]bool{}
		for _, id := range strings.Fields(string(b)) {
			if seen[id] {
				t.Errorf("%s ran twice", id)
			}
			seen[id] = true
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
