package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/test/history"
)

// historyKills is how many processes are killed in each of two forms; with DSEC_TORTURE it goes on for DSEC_TORTURE_FOR besides.
const historyKills = 50

func tortureFor() time.Duration {
	if !torture {
		return 0
	}
	if d, err := time.ParseDuration(os.Getenv("DSEC_TORTURE_FOR")); err == nil {
		return d
	}
	return 10 * time.Minute
}

// TestHistories kills a process of a service under a mixed load of commands, sessions and files, a hundred times: the whole service, a
// host, a gateway, a keeper or a client. Each time what the clients saw, what the logs tell and what was done in the sandboxes must agree, by
// the rules that simulated histories are held to (test/history).
func TestHistories(t *testing.T) {
	t.Run("up", func(t *testing.T) {
		t.Parallel()
		s := own(t, "--keep", "--pool-size", "2g")
		historyRuns(t, s, []victim{{s, "host", 5}, {nil, "client", 2}, {s, "keeper", 2}}, 1)
		s.stopKept(t)
	})
	t.Run("apart", func(t *testing.T) {
		t.Parallel()
		hosts, gateway := apart(t, ownDir(t), 1)
		historyRuns(t, gateway, []victim{{hosts[0], "host", 3}, {gateway, "gateway", 3}, {nil, "client", 2}, {hosts[0], "keeper", 2}}, 2)
	})
}

// victim is what may be killed: a service, its keeper, or a client.
type victim struct {
	s      *service
	kind   string
	weight int
}

func historyRuns(t *testing.T, s *service, victims []victim, offset uint64) {
	rng := random(t)
	layer := s.small(t)
	killed := map[string]int{}
	calls, answered := 0, 0
	until := time.Now().Add(tortureFor())
	for i := 0; (i < historyKills || time.Now().Before(until)) && !t.Failed(); i++ {
		r := &historyRun{t: t, s: s, layer: layer, name: fmt.Sprintf("h%d-%d", offset, i), rec: history.NewRecorder(seed), rng: rand.New(rand.NewPCG(rng.Uint64(), offset))}
		killed[r.run(pick(r.rng, victims))]++
		h := r.conclude()
		for _, c := range h.Calls {
			calls++
			if c.Reply == history.Answered {
				answered++
			}
		}
		bad := history.Check(h)
		for _, v := range bad[:min(len(bad), 10)] {
			t.Error(v)
		}
		if len(bad) > 0 {
			t.Errorf("run %d, made small:\n%s", i, history.Minimal(h, bad[0]))
			t.Errorf("again: DSEC_SEED=%d go test ./test/e2e -run %s", seed, t.Name())
		}
	}
	t.Logf("killed %v; %d calls, %d answered", killed, calls, answered)
	if answered < historyKills*5 {
		t.Errorf("only %d answers: the load was no load", answered)
	}
}

func pick(r *rand.Rand, victims []victim) victim {
	sum := 0
	for _, v := range victims {
		sum += v.weight
	}
	n := r.IntN(sum)
	for _, v := range victims {
		if n -= v.weight; n < 0 {
			return v
		}
	}
	return victims[0]
}

// historyRun is one kill under load.
type historyRun struct {
	t     *testing.T
	s     *service
	layer string
	name  string
	rec   *history.Recorder
	rng   *rand.Rand

	mu   sync.Mutex
	ids  map[string]string // sandboxes by key
	stop bool
}

func (r *historyRun) stopped() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stop
}

// run keeps three clients busy, kills, and waits for what they had begun. It returns what was killed.
func (r *historyRun) run(v victim) string {
	r.ids = map[string]string{}
	var wg sync.WaitGroup
	for n := range 3 {
		w := &historyWorker{r: r, n: n, rng: rand.New(rand.NewPCG(r.rng.Uint64(), uint64(n))), c: r.s.client(), box: fmt.Sprintf("%s-w%d", r.name, n), dies: v.kind == "client" && n == 0}
		wg.Go(w.work)
	}
	time.Sleep(time.Duration(50+r.rng.IntN(500)) * time.Millisecond)
	from := r.rec.Now()
	switch v.kind {
	case "host", "gateway":
		v.s.kill()
		time.Sleep(time.Duration(r.rng.IntN(100)) * time.Millisecond)
		must(r.t, v.s.begin())
		kind := history.HostKilled
		if v.kind == "gateway" {
			kind = history.GatewayKilled
		}
		r.rec.Fault(kind, from)
	case "keeper":
		if pid := v.s.keeper(); pid != 0 {
			must(r.t, syscall.Kill(pid, syscall.SIGKILL))
		}
		r.rec.Fault(history.KeeperKilled, from)
	}
	time.Sleep(150 * time.Millisecond)
	r.mu.Lock()
	r.stop = true
	r.mu.Unlock()
	wg.Wait()
	return v.kind
}

// conclude reads what is left.
func (r *historyRun) conclude() *history.History {
	c := r.s.client()
	h := r.rec.History()
	for key, id := range r.ids {
		sb := c.Sandbox(id)
		if err := again(r.t, "get "+id, sb.Refresh); err != nil {
			r.t.Errorf("lost: %v", err)
			continue
		}
		b := &history.Box{Key: key, Host: sb.Data.Host, Durability: history.Process, Runs: map[history.Ran]int{}, Seen: map[string]bool{}}
		h.Boxes[key] = b
		if sb.Data.State == "running" {
			r.count(sb, b)
		}
		err := again(r.t, "read the log of "+id, func(ctx context.Context) error {
			b.Log = nil
			return c.Log(ctx, &dsecv1.ReadLogRequest{Sandbox: id, Output: true}, func(rec *dsecv1.LogRecord) error {
				b.Log = append(b.Log, rec)
				return nil
			})
		})
		if err != nil {
			r.t.Error(err)
		}
	}
	err := again(r.t, "stop all", func(ctx context.Context) error {
		_, err := c.StopAll(ctx, &dsecv1.Selector{Labels: map[string]string{"run": r.name}})
		return err
	})
	if err != nil {
		r.t.Error(err)
	}
	return h
}

// count reads inside how often each step was done.
func (r *historyRun) count(sb *client.Sandbox, b *history.Box) {
	for _, file := range []string{"/srv/ran", "/srv/log"} {
		var text []byte
		err := again(r.t, "read "+file, func(ctx context.Context) (err error) {
			text, err = sb.Files().ReadFile(ctx, file)
			if errors.Is(err, client.ErrNotFound) && strings.Contains(err.Error(), file) {
				text, err = nil, nil
			}
			return err
		})
		if errors.Is(err, client.ErrState) {
			return // it has ended meanwhile
		}
		if err != nil {
			r.t.Error(err)
			return
		}
		for _, line := range strings.Split(string(text), "\n") {
			if step, ok := strings.CutSuffix(line, ";"); ok {
				b.Runs[history.Ran{ID: sb.ID, Step: step}]++
			}
		}
	}
	b.Seen[sb.ID] = true
}

// historyWorker is one client with a sandbox of its own.
type historyWorker struct {
	r    *historyRun
	n    int
	rng  *rand.Rand
	c    *client.Client
	box  string
	sb   *client.Sandbox
	dies bool // what it asks for is asked by programs that are killed
	old  []func()

	session *client.Session
}

func (w *historyWorker) work() {
	created := w.ask(history.Create, "", "create", func(ctx context.Context) (string, error) {
		sb, err := w.c.RunContainer(ctx, client.Options{Layers: []string{w.r.layer}, Job: "histories", Key: w.box, Memory: 64 << 20, Disk: 32 << 20, Pids: 64, Labels: map[string]string{"run": w.r.name}})
		if err != nil {
			return "", err
		}
		w.sb = sb
		return sb.ID, nil
	})
	if !created {
		return
	}
	w.r.mu.Lock()
	w.r.ids[w.box] = w.sb.ID
	w.r.mu.Unlock()
	opened := false
	for i := 0; !w.r.stopped(); i++ {
		step := fmt.Sprintf("%s-%d", w.box, i)
		if len(w.old) > 0 && w.rng.IntN(5) == 0 {
			w.old[w.rng.IntN(len(w.old))]()
			continue
		}
		var act func()
		switch kind := w.rng.IntN(8); {
		case w.dies && kind < 4:
			act = w.dying(step)
		case kind < 4:
			script := fmt.Sprintf("echo '%s;' >>/srv/ran; i=%d; while [ $i -gt 0 ]; do echo line $i; i=$((i-1)); done; sleep 0.%d; echo no >&2; exit %d", step, w.rng.IntN(200), w.rng.IntN(3), w.rng.IntN(4))
			act = w.command(step, script)
		case kind == 4:
			if !opened {
				opened = w.ask(history.Session, "s", "open", func(ctx context.Context) (string, error) {
					t, err := w.sb.Session(ctx, client.SessionOptions{Name: "s"})
					w.session = t
					return "open", err
				})
			}
			if !opened {
				continue
			}
			act = w.inSession(step)
		case kind == 5:
			act = w.write(history.Append, "/srv/log", step, step+";\n")
		case kind == 6:
			act = w.write(history.Write, fmt.Sprintf("/srv/f%d", i%3), step, strings.Repeat(step+" ", 1+w.rng.IntN(3000)))
		default:
			dir := fmt.Sprintf("/srv/d%d", i)
			act = w.command(step, fmt.Sprintf("mkdir %s && echo '%s;' >>/srv/ran && echo $(ls -d /srv/d*)", dir, step))
		}
		act()
		w.old = append(w.old, act)
	}
	if len(w.old) > 0 {
		w.old[0]() // once more, when all is calm
	}
}

// ask calls until there is an answer, and notes each call. It reports whether the answer was a result.
func (w *historyWorker) ask(op history.Op, step, request string, do func(context.Context) (string, error)) bool {
	for deadline := time.Now().Add(2 * patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		call := history.Call{Client: w.n, Box: w.box, Op: op, Step: step, Request: request}
		if op != history.Create {
			call.ID = w.sb.ID
		}
		noted := w.r.rec.Invoke(call)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		value, err := do(ctx)
		cancel()
		reply := history.Answered
		var e *client.Error
		switch {
		case err == nil:
		case errors.Is(err, errUnknownEnd):
			reply, value = history.Unknown, ""
		case errors.As(err, &e):
			reply, value = history.Judge(op, e.Code, e.Message)
		default:
			reply, value = history.Lost, ""
		}
		if err != nil {
			noted.Note = err.Error()
		}
		if op == history.Create && reply == history.Answered {
			noted.ID = value
		}
		if reply == history.Lost {
			continue
		}
		w.r.rec.Return(noted, reply, value)
		return reply == history.Answered
	}
	w.r.t.Errorf("%s %s/%s: no answer within %v", op, w.box, step, 2*patience)
	return false
}

var errUnknownEnd = errors.New("the command's end is unknown")

func valueOf(res *client.Result, err error) (string, error) {
	switch {
	case err != nil:
		return "", err
	case res.Outcome.Kind == "unknown":
		return "", errUnknownEnd
	}
	return history.CommandValue(res.Outcome, res.Stdout, res.Stderr), nil
}

func (w *historyWorker) command(step, script string) func() {
	return w.start(step, script, client.Cmd{ID: step, Argv: []string{"sh", "-c", script}})
}

func (w *historyWorker) start(step, request string, cmd client.Cmd) func() {
	return func() {
		w.ask(history.Command, step, request, func(ctx context.Context) (string, error) {
			if w.rng.IntN(3) > 0 {
				return valueOf(w.sb.Run(ctx, cmd))
			}
			p, err := w.sb.Start(ctx, cmd)
			if err != nil {
				return "", err
			}
			var stdout, stderr bytes.Buffer
			o, err := p.Stream(ctx, &stdout, &stderr)
			return valueOf(&client.Result{Stdout: stdout.Bytes(), Stderr: stderr.Bytes(), Outcome: o}, err)
		})
	}
}

// dying lets a program ask, which is killed, and asks again itself.
func (w *historyWorker) dying(step string) func() {
	script := fmt.Sprintf("echo '%s;' >>/srv/ran; sleep 0.2; echo done", step)
	again := w.start(step, script, client.Cmd{ID: step, Argv: []string{"sh", "-c", script}, StdinOpen: true}) // as the program asks
	return func() {
		w.r.rec.Invoke(history.Call{Client: w.n, Box: w.box, ID: w.sb.ID, Op: history.Command, Step: step, Request: script, Note: "by a program that is killed"})
		cmd := w.r.s.dsec("exec", "--step", step, w.sb.ID, "--", "sh", "-c", script)
		if err := cmd.Start(); err != nil {
			w.r.t.Error(err)
			return
		}
		from := w.r.rec.Now()
		time.Sleep(time.Duration(w.rng.IntN(300)) * time.Millisecond)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		w.r.rec.Fault(history.GatewayKilled, from) // severs no step either
		again()
	}
}

func (w *historyWorker) inSession(step string) func() {
	text := fmt.Sprintf("n=$((n+1)); echo '%s;' >>/srv/ran; echo $n", step)
	return func() {
		w.ask(history.Command, step, "s: "+text, func(ctx context.Context) (string, error) {
			return valueOf(w.session.RunCmd(ctx, text, client.Cmd{ID: step}))
		})
	}
}

func (w *historyWorker) write(op history.Op, file, step, text string) func() {
	return func() {
		w.ask(op, step, fmt.Sprint(file, " ", text), func(ctx context.Context) (string, error) {
			o := client.WriteOptions{Step: step, Append: op == history.Append}
			if o.Append {
				o.Start = -1
			}
			_, err := w.sb.Files().Write(ctx, file, strings.NewReader(text), o)
			return "ok", err
		})
	}
}
