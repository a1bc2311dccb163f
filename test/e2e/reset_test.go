package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

const (
	resetVar = "DSEC_RESET"      // a folder on a disk that outlives the machine
	toldVar  = "DSEC_RESET_TOLD" // a file with what the consoles of the machine's lives before showed
	lastVar  = "DSEC_RESET_LAST" // set: nobody resets this life
	told     = "# reset: "       // begins a line that tells a fact
)

// fact is something that was acknowledged, and so holds after a reset.
type fact struct {
	Box     string `json:"box,omitempty"`
	Stopped bool   `json:"stopped,omitempty"` // the box
	Command string `json:"command,omitempty"` // of the box
	Lines   int    `json:"lines,omitempty"`   // of its output's middle: see payload
	Code    int    `json:"code,omitempty"`
	Layer   string `json:"layer,omitempty"` // a snapshot of the box
	Sum     string `json:"sum,omitempty"`   // of the snapshot's /srv/data
	Call    string `json:"call,omitempty"`  // key of a function call
	Answer  string `json:"answer,omitempty"`
}

func (f fact) tell() {
	b, err := json.Marshal(f)
	if err != nil {
		panic(err)
	}
	fmt.Println(told + string(b))
}

// TestMachineReset is one life of a machine that test/kernels/reset.sh resets in the midst of the load: what earlier lives were told as done
// with durability host still is, of what they had nothing is in the way, and all works as before. State lies on a disk that stays, the run
// folder does not.
func TestMachineReset(t *testing.T) {
	dir := os.Getenv(resetVar)
	if dir == "" {
		t.Skip("skip: resets a machine, which is torture: make test-reset")
	}
	facts := earlier(t, os.Getenv(toldVar))
	s := newService(dir, "up", "--pool-size", "2g")
	s.run = filepath.Join(t.TempDir(), "run")
	must(t, s.begin())
	if !checkFacts(t, s, facts) {
		t.Fatalf("log of dsec:\n%s", s.tail())
	}
	fmt.Printf("# seen: %d facts of earlier lives hold\n", len(facts))
	if os.Getenv(lastVar) == "" {
		resetLoad(t, s)
		return
	}
	_, err := s.client().StopAll(within(t), &dsecv1.Selector{Job: "reset"})
	must(t, err)
	must(t, s.finish(syscall.SIGTERM))
	must(t, s.nothingLeft())
	if drafts := resetDrafts(dir); len(drafts) > 0 {
		t.Errorf("drafts: %v", drafts)
	}
}

// resetDrafts are files of the state that only something under way has.
func resetDrafts(dir string) (found []string) {
	filepath.WalkDir(filepath.Join(dir, "state"), func(path string, d os.DirEntry, err error) error {
		if err == nil && (strings.Contains(d.Name(), ".tmp") || strings.Contains(d.Name(), "draft-")) {
			found = append(found, path)
		}
		return nil
	})
	return found
}

// earlier reads the facts. The last line may be torn.
func earlier(t *testing.T, path string) (facts []fact) {
	if path == "" {
		return nil
	}
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	for in := bufio.NewScanner(f); in.Scan(); {
		_, text, ok := strings.Cut(in.Text(), told)
		var one fact
		if ok && json.Unmarshal([]byte(text), &one) == nil {
			facts = append(facts, one)
		}
	}
	return facts
}

// checkFacts also checks that what runs now is this life's alone.
func checkFacts(t *testing.T, s *service, facts []fact) bool {
	if left := s.leftovers(); len(left) > 0 {
		t.Errorf("in the way of new ones: %s", strings.Join(left, "\n"))
	}
	c := s.client()
	stopped := map[string]bool{}
	for _, f := range facts {
		if f.Stopped {
			stopped[f.Box] = true
		}
	}
	for _, f := range facts {
		var err error
		switch {
		case f.Call != "":
			err = f.checkCall(t, c)
		case f.Layer != "":
			err = f.checkLayer(t, c)
		case f.Command != "":
			err = f.checkCommand(t, c)
		default:
			err = f.checkBox(t, c, stopped[f.Box])
		}
		if err != nil {
			t.Errorf("%+v: %v", f, err)
		}
	}
	return !t.Failed()
}

func (f fact) checkBox(t *testing.T, c *client.Client, stopped bool) error {
	sb, err := c.Get(within(t), f.Box)
	if err != nil {
		return err
	}
	if state := sb.Data.State; stopped && state != "stopped" || state != "stopped" && (state != "failed" || sb.Data.Cause.GetClass() != "platform") {
		return fmt.Errorf("it is %s (%v)", state, sb.Data.Cause)
	}
	next, running := int64(1), map[string]int{}
	err = c.Log(within(t), &dsecv1.ReadLogRequest{Sandbox: f.Box, Output: true}, func(r *dsecv1.LogRecord) error {
		if r.Seq != next {
			return fmt.Errorf("record %d follows %d", r.Seq, next-1)
		}
		next++
		switch r.Kind {
		case "command":
			running[r.Step]++
		case "void":
			running[r.Step]--
		}
		return nil
	})
	for id, n := range running {
		if n > 1 {
			err = errors.Join(err, fmt.Errorf("command %s began %d times", id, n))
		}
	}
	return err
}

func (f fact) checkCommand(t *testing.T, c *client.Client) error {
	r, err := c.Sandbox(f.Box).Process(f.Command).Wait(within(t))
	if err != nil {
		return err
	}
	if r.Outcome.Kind != "exited" || int(r.Outcome.Code) != f.Code || string(r.Stdout) != payload(f.Command, f.Lines) {
		return fmt.Errorf("it has %d octets and %s", len(r.Stdout), describeOutcome(r.Outcome))
	}
	return nil
}

func (f fact) checkLayer(t *testing.T, c *client.Client) error {
	sb, err := c.RunContainer(within(t), resetOptions("base/small", f.Layer))
	if err != nil {
		return err
	}
	r, err := sb.Run(within(t), client.Cmd{Argv: []string{"md5sum", "/srv/data"}})
	if err == nil && !strings.HasPrefix(string(r.Stdout), f.Sum) {
		err = fmt.Errorf("its file has the sum %.40q %.200q", r.Stdout, r.Stderr)
	}
	return errors.Join(err, sb.Stop(within(t)))
}

func (f fact) checkCall(t *testing.T, c *client.Client) error {
	a, err := c.FnCall(within(t), resetCall(f.Call, f.Answer))
	if err != nil {
		return err
	}
	// Calls are kept by the host's memory until it writes: a reset may undo the last ones, which run again then.
	if !a.Result.OK() || string(a.Result.Stdout) != f.Answer+"\n" {
		return fmt.Errorf("its key answers %q, %s, recorded %v", a.Result.Stdout, a.Verdict, a.Recorded)
	}
	return nil
}

func resetCall(key, answer string) client.Call {
	q := shell("echo " + answer)
	q.Job, q.Key = "reset", key
	return q
}

func resetOptions(layers ...string) client.Options {
	return client.Options{Layers: layers, Job: "reset", Memory: 64 << 20, Disk: 200 << 20, Pids: 64, Durability: "host"}
}

// resetLoad does everything at once until the machine is reset.
func resetLoad(t *testing.T, s *service) {
	small := s.small(t)
	publishShell(t, s)
	life := time.Now().UnixNano()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for w := range 3 {
		rng := rand.New(rand.NewPCG(uint64(life), uint64(w)))
		wg.Go(func() {
			for i := 0; ctx.Err() == nil && !t.Failed(); i++ {
				if err := resetBox(ctx, s.client(), rng, small, fmt.Sprintf("r%d-%d-%d", life, w, i)); err != nil && ctx.Err() == nil {
					t.Errorf("worker %d: %v", w, err)
				}
			}
		})
	}
	wg.Go(func() {
		for i := 0; ctx.Err() == nil && !t.Failed(); i++ {
			key, answer := fmt.Sprintf("c%d-%d", life, i), fmt.Sprint(i*7)
			if _, err := s.client().FnCall(ctx, resetCall(key, answer)); err != nil {
				if ctx.Err() == nil {
					t.Errorf("call: %v", err)
				}
				return
			}
			fact{Call: key, Answer: answer}.tell()
		}
	})
	wg.Wait()
	if !t.Failed() {
		t.Error("nobody reset the machine")
	}
	t.Logf("log of dsec:\n%s", s.tail())
}

// resetBox is the life of a sandbox, each step of which is told once it is acknowledged.
func resetBox(ctx context.Context, c *client.Client, rng *rand.Rand, layer, key string) error {
	o := resetOptions(layer)
	o.Key = key
	sb, err := c.RunContainer(ctx, o)
	if err != nil {
		return err
	}
	fact{Box: sb.ID}.tell()
	for j := range 2 + rng.IntN(4) {
		id, n := fmt.Sprintf("%s-%d", key, j), rng.IntN(2000)
		script := fmt.Sprintf("echo %s; yes 0123456789abcde | head -n %d; echo end %s; exit %d", id, n, id, j)
		r, err := sb.Run(ctx, client.Cmd{ID: id, Argv: []string{"sh", "-c", script}})
		if err != nil {
			return err
		}
		if string(r.Stdout) != payload(id, n) {
			return fmt.Errorf("command %s: %d octets", id, len(r.Stdout))
		}
		fact{Box: sb.ID, Command: id, Lines: n, Code: j}.tell()
	}
	if rng.IntN(3) == 0 {
		r, err := sb.Run(ctx, client.Cmd{Argv: []string{"sh", "-c", fmt.Sprintf("head -c %d /dev/urandom >/srv/data; md5sum /srv/data", rng.IntN(30<<20))}})
		if err != nil {
			return err
		}
		sum, _, _ := strings.Cut(string(r.Stdout), " ")
		ref, err := sb.Snapshot(ctx, "")
		if err != nil {
			return err
		}
		fact{Box: sb.ID, Layer: ref, Sum: sum}.tell()
	}
	if rng.IntN(2) == 0 {
		return nil // it is there when the machine is reset
	}
	if err := sb.Stop(ctx); err != nil {
		return err
	}
	fact{Box: sb.ID, Stopped: true}.tell()
	return nil
}
