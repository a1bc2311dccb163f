package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// crash ends the host as kill -9 does: nothing of it takes effect any more, and the next one finds what is there.
func (r *rig) crash() {
	r.t.Helper()
	r.fuse.kill()
	r.restart()
}

func TestRestartLeavesCommandsRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		b := r.create("k", func(s *dsecv1.Spec) { s.Name = "box" })
		b.mustStart(t, "long", "echo", "a", ";", "sleep", "20s", ";", "echo", "b")
		b.mustStart(t, "down", "sleep", "3s", ";", "echo", "while down", ";", "exit", "7")
		if _, err := b.openSession(context.Background(), &sandbox.Session{Name: "s"}, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		r.fuse.kill()
		r.stop()
		time.Sleep(10 * time.Second)
		r.start()
		b = r.box("box")
		if o := b.mustWait(t, "down"); o.Code != 7 || b.output(t, "down") != "while down\n" {
			t.Fatalf("%+v %q", o, b.output(t, "down"))
		}
		if _, existed, err := b.start(context.Background(), &sandbox.Command{ID: "long", Argv: []string{"echo", "a", ";", "sleep", "20s", ";", "echo", "b"}}); !existed || err != nil {
			t.Fatal(existed, err)
		}
		if o := b.mustWait(t, "long"); o.Code != 0 || b.output(t, "long") != "a\nb\n" {
			t.Fatalf("%+v %q", o, b.output(t, "long"))
		}
		p, err := b.openSession(context.Background(), &sandbox.Session{Name: "s"}, nil)
		if err != nil || !p.Joined {
			t.Fatal(p, err)
		}
		r.restart()
		if got := r.box("box").output(t, "long"); got != "a\nb\n" {
			t.Fatalf("%q", got)
		}
	})
}

// A log that lost what lives, in whatever way, is no reason to end it: the host does not start, names the log and the way on.
func TestUnknownLivingRefuseTheStart(t *testing.T) {
	for name, lose := range map[string]func(t *testing.T, log string){
		"removed": func(t *testing.T, log string) {
			if err := os.RemoveAll(log); err != nil {
				t.Fatal(err)
			}
		},
		"overwritten": func(t *testing.T, log string) {
			files, err := filepath.Glob(log + "/*")
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range files {
				if st, err := os.Stat(f); err == nil && st.Mode().IsRegular() && st.Size() > 0 {
					if err := os.WriteFile(f, bytes.Repeat([]byte{0xa5}, int(st.Size())), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			forget := false
			r := newRig(t, fake.Options{}, func(c *Config, d *Deps) { c.ForgetUnknown, c.LogDir = forget, "/the/log" })
			b := r.create("k")
			b.mustStart(t, "run", "hang")
			r.stop()
			lose(t, r.dir+"/log")
			r.refusal = make(chan error, 1)
			r.start()
			err := <-r.refusal
			for _, want := range []string{"/the/log", "--forget-unknown", string(b.id)} {
				if !errors.Is(err, sandbox.ErrState) || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want it to name %s", err, want)
				}
			}
			if alive := r.world.Alive(); len(alive) != 1 {
				t.Fatalf("alive after a refused start: %v", alive)
			}
			r.refusal, forget = nil, true
			r.restart()
			if err := r.h.wait(context.Background()); err != nil {
				t.Fatal(err)
			}
			if alive := r.world.Alive(); len(alive) != 0 {
				t.Fatalf("alive although it was to be forgotten: %v", alive)
			}
		})
	}
}

func TestKeeperLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		b, c := r.create("k"), r.create("l")
		b.mustStart(t, "run", "hang")
		r.world.KillKeeper()
		for _, x := range []*box{b, c} {
			if err := x.waitEnd(context.Background()); err != nil {
				t.Fatal(err)
			}
			if s, cause := x.now(); s != sandbox.Failed || cause.Class != sandbox.ClassPlatform || cause.Reason != "keeper_lost" {
				t.Fatalf("%s %+v", s, cause)
			}
		}
		if o := b.mustWait(t, "run"); o.Kind != sandbox.Unknown {
			t.Fatalf("%+v", o)
		}
		// It is not run again by itself, nor when it is asked for again.
		s, existed, err := b.start(context.Background(), &sandbox.Command{ID: "run", Argv: []string{"hang"}})
		if err != nil || !existed || b.commandProto(s).State != "unknown" {
			t.Fatal(existed, err)
		}
		r.mustStop(b) // a failed one can be stopped
	})
}

func TestKeeperLostWhileTheHostWasDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, fake.Options{}, nil)
		b := r.create("k")
		b.mustStart(t, "run", "hang")
		b.mustStart(t, "done", "true")
		b.mustWait(t, "done")
		r.stop()
		r.world.KillKeeper()
		r.start()
		b = r.box(b.id)
		if err := b.waitEnd(context.Background()); err != nil {
			t.Fatal(err)
		}
		if s, cause := b.now(); s != sandbox.Failed || cause.Reason != "keeper_lost" {
			t.Fatalf("%s %+v", s, cause)
		}
		if o := b.mustWait(t, "run"); o.Kind != sandbox.Unknown {
			t.Fatalf("%+v", o)
		}
		if o := b.mustWait(t, "done"); o.Kind != sandbox.Exited {
			t.Fatalf("%+v", o)
		}
	})
}

// A start that was recorded and never reached the backend is void, and its ID is free again.
func TestNeverStartedIsVoid(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	rec := trajectory.Record{Kind: trajectory.KindStepStart, Step: "c", Payload: encode(tagCommand, r.h.canonicalCommand(&sandbox.Command{Argv: []string{"echo", "x"}}))}
	if _, err := b.append(rec); err != nil {
		t.Fatal(err)
	}
	r.crash()
	b = r.box(b.id)
	b.mustStart(t, "c", "echo", "other")
	b.mustWait(t, "c")
	if got := b.output(t, "c"); got != "other\n" {
		t.Fatalf("%q", got)
	}
	r.restart()
	if got := r.box(b.id).output(t, "c"); got != "other\n" {
		t.Fatalf("%q", got)
	}
}

func TestHalfMadeIsRemoved(t *testing.T) {
	hang := make(chan struct{})
	r := newRig(t, fake.Options{Hook: func(ctx context.Context, op fake.Op, _ sandbox.ID, _ string) error {
		if op == fake.OpCreated {
			select {
			case <-hang:
			default:
				close(hang)
				<-ctx.Done()
			}
		}
		return nil
	}}, nil)
	go r.h.create(context.Background(), createRequest("k"))
	<-hang
	if len(r.world.Alive()) != 1 {
		t.Fatal("not born")
	}
	r.crash()
	r.create("k")
	if n := len(r.world.Alive()); n != 1 {
		t.Fatalf("%d alive", n)
	}
}

func TestStopIsFinishedByTheNextHost(t *testing.T) {
	r := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, _ string) error { return nil }}, nil)
	b := r.create("k")
	blew := r.fuse.set(2, false) // the record of the beginning passes, the destroy does not
	r.h.end(b, cancelled)
	<-blew
	r.restart()
	b = r.box(b.id)
	if err := b.waitEnd(context.Background()); err != nil {
		t.Fatal(err)
	}
	if s, c := b.now(); s != sandbox.Stopped || c != cancelled {
		t.Fatalf("%s %+v", s, c)
	}
	if len(r.world.Alive()) != 0 {
		t.Fatal("left alive")
	}
}

// The crash test: a host is killed at random acts under a load of creates, commands, stdin, pauses and stops, and again while it
// recovers. No sandbox is lost or born twice, no command runs twice, no acknowledged record or octet is missing, nothing is left.
func TestCrashPoints(t *testing.T) {
	rounds := 60
	if testing.Short() {
		rounds = 15
	}
	for seed := range uint64(rounds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { crashRun(t, seed) })
		})
	}
}

// promise is what a client was told.
type promise struct {
	mu       sync.Mutex
	created  map[string]sandbox.ID          // by key
	started  map[string]bool                // "<key> <id>"
	ended    map[string]sandbox.Outcome     // "<key> <id>"
	output   map[string]string              // "<key> <id>"
	stopped  map[string]bool                // by key
	attempts map[string]map[string][]string // by key and id: argv
}

func crashRun(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 7))
	r := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, _ string) error {
		time.Sleep(time.Millisecond) // lets others in between
		return nil
	}}, nil)
	p := &promise{created: map[string]sandbox.ID{}, started: map[string]bool{}, ended: map[string]sandbox.Outcome{}, output: map[string]string{},
		stopped: map[string]bool{}, attempts: map[string]map[string][]string{}}
	for life := range 4 {
		blew := r.fuse.set(1+rnd.IntN(120), rnd.IntN(2) == 0)
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for c := range 4 {
			seed := rnd.Uint64()
			wg.Go(func() { client(ctx, r, p, c, life, rand.New(rand.NewPCG(seed, 1))) })
		}
		select {
		case <-blew:
		case <-time.After(time.Minute):
			r.fuse.kill()
		}
		cancel()
		wg.Wait()
		// The next host may be killed in the middle of its recovery too.
		r.stop()
		if rnd.IntN(2) == 0 {
			r.start()
			r.fuse.set(1+rnd.IntN(10), rnd.IntN(2) == 0)
			time.Sleep(time.Second)
			r.fuse.kill()
			r.stop()
		}
		r.start()
	}
	if err := r.h.wait(context.Background()); err != nil {
		t.Fatal(err)
	}
	for key, id := range p.created {
		for cmd, argv := range p.attempts[key] {
			if b, err := r.h.get(context.Background(), string(id)); err == nil && argv[0] == "cat" {
				b.writeStdin(context.Background(), cmd, 0, []byte("abcdef"), true)
			}
		}
	}
	time.Sleep(time.Minute) // what runs ends
	for key, id := range p.created {
		b, err := r.h.get(context.Background(), string(id))
		for cmd, argv := range p.attempts[key] {
			if err != nil || argv[0] != "cat" {
				continue
			}
			if s, err := b.command(context.Background(), cmd); err == nil && s.ended() && s.outcome.Kind == sandbox.Exited && b.output(t, cmd) != "abcdef" {
				t.Errorf("stdin of %s %s came out as %q", key, cmd, b.output(t, cmd))
			}
		}
	}
	check(t, r, p)
	t.Log(tally(r, p))
}

func client(ctx context.Context, r *rig, p *promise, c, life int, rnd *rand.Rand) {
	h := r.h
	for n := 0; ctx.Err() == nil; n++ {
		time.Sleep(time.Millisecond) // else the bubble's time stands still
		key := fmt.Sprintf("k%d-%d-%d", c, life, rnd.IntN(3+n/20))
		if life > 0 && rnd.IntN(2) == 0 {
			key = fmt.Sprintf("k%d-%d-%d", c, life-1, rnd.IntN(3))
		}
		b, _, err := h.create(ctx, createRequest(key))
		if err != nil {
			continue
		}
		p.mu.Lock()
		p.created[key] = b.id
		if p.attempts[key] == nil {
			p.attempts[key] = map[string][]string{}
		}
		p.mu.Unlock()
		switch rnd.IntN(10) {
		case 0:
			if h.stop(ctx, b, cancelled) == nil {
				p.mu.Lock()
				p.stopped[key] = true
				p.mu.Unlock()
			}
		case 1:
			b.pause(ctx, sandbox.Frozen, "asked", false)
		default:
			id := fmt.Sprintf("c%d", rnd.IntN(12))
			p.mu.Lock()
			argv := p.attempts[key][id]
			if argv == nil {
				argv = [][]string{{"echo", key, id}, {"sleep", "2ms", ";", "echo", key, id}, {"print", "70000"}, {"exit", "3"}, {"cat"}}[rnd.IntN(5)]
				p.attempts[key][id] = argv
			}
			p.mu.Unlock()
			s, _, err := b.start(ctx, &sandbox.Command{ID: id, Argv: argv, StdinOpen: argv[0] == "cat"})
			if err != nil {
				continue
			}
			if argv[0] == "cat" { // a client that resends what was not acknowledged
				if b.writeStdin(ctx, id, 0, []byte("abc"), false); rnd.IntN(2) == 0 {
					b.writeStdin(ctx, id, 0, []byte("abcdef"), true)
				}
			}
			p.mu.Lock()
			p.started[key+" "+id] = true
			p.mu.Unlock()
			if b.waitCommand(ctx, s, time.Second) != nil {
				continue
			}
			b.mu.Lock()
			ended, o := s.ended(), s.outcome
			b.mu.Unlock()
			out, _, err := b.head(ctx, s, maxOutput)
			if ended && err == nil && !r.fuse.isDead() {
				p.mu.Lock()
				p.ended[key+" "+id], p.output[key+" "+id] = o, string(out)
				p.mu.Unlock()
			}
		}
	}
}

func check(t *testing.T, r *rig, p *promise) {
	t.Helper()
	for k, n := range r.world.Runs() {
		if n != 1 {
			t.Errorf("%s ran %d times", k, n)
		}
	}
	for id, n := range r.world.Births() {
		if n != 1 {
			t.Errorf("%s was born %d times", id, n)
		}
	}
	living := map[sandbox.ID]bool{}
	for key, id := range p.created {
		b, err := r.h.get(context.Background(), string(id))
		if err != nil {
			t.Errorf("sandbox %s of key %s was acknowledged and is lost: %v", id, key, err)
			continue
		}
		state, _ := b.now()
		if !state.Ended() {
			living[id] = true
		}
		if p.stopped[key] && state != sandbox.Stopped {
			t.Errorf("%s was stopped and is %s", id, state)
		}
		if state == sandbox.Failed {
			t.Errorf("%s failed: %+v", id, b.cause)
		}
		for cmd := range p.attempts[key] {
			checkCommand(t, b, key+" "+cmd, cmd, p)
		}
		checkRecords(t, r, b)
	}
	for _, b := range r.h.find(func(*box) bool { return true }) {
		living[b.id] = true
	}
	alive := r.world.Alive()
	if len(alive) != len(living) {
		t.Errorf("%d sandboxes there, %d known", len(alive), len(living))
	}
	for _, id := range alive {
		if !living[id] {
			t.Errorf("%s is there and not known", id)
		}
	}
}

func checkCommand(t *testing.T, b *box, name, cmd string, p *promise) {
	t.Helper()
	s, err := b.command(context.Background(), cmd)
	if err != nil {
		if p.started[name] {
			t.Errorf("command %s was acknowledged and is lost: %v", name, err)
		}
		return
	}
	b.mu.Lock()
	ended, o := s.ended(), s.outcome
	b.mu.Unlock()
	if !ended {
		t.Errorf("command %s has no end", name)
		return
	}
	was, ok := p.ended[name]
	if !ok {
		return
	}
	if was.Kind != o.Kind || was.Code != o.Code {
		t.Errorf("command %s was told as %s %d and is %s %d", name, was.Kind, was.Code, o.Kind, o.Code)
	}
	if got := b.output(t, cmd); got != p.output[name] {
		t.Errorf("command %s: output of %d octets was told, %d are there", name, len(p.output[name]), len(got))
	}
}

// checkRecords holds a trajectory to its rules: no gaps, a start before its output and end, one end a start.
func checkRecords(t *testing.T, r *rig, b *box) {
	t.Helper()
	open, ends := map[string]bool{}, map[string]int{}
	for i, rec := range r.records(b) {
		if rec.Seq != uint64(i+1) {
			t.Errorf("%s: record %d has seq %d", b.id, i+1, rec.Seq)
		}
		switch rec.Kind {
		case trajectory.KindStepStart:
			if open[rec.Step] {
				t.Errorf("%s: %s was started twice", b.id, rec.Step)
			}
			open[rec.Step] = true
		case trajectory.KindVoid:
			delete(open, rec.Step)
		case trajectory.KindOutput:
			if !open[rec.Step] {
				t.Errorf("%s: output of %s before its start", b.id, rec.Step)
			}
		case trajectory.KindStepEnd:
			if ends[rec.Step]++; ends[rec.Step] > 1 || !open[rec.Step] {
				t.Errorf("%s: %d ends of %s", b.id, ends[rec.Step], rec.Step)
			}
		}
	}
}

func TestUnknownBackendErrorKeepsTheStepOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fail := true
		r := newRig(t, fake.Options{Hook: func(_ context.Context, op fake.Op, _ sandbox.ID, arg string) error {
			if op == fake.OpStarted && fail && arg == "c" { // it runs, and the answer is lost
				fail = false
				return errors.New("connection reset")
			}
			if op == fake.OpStart && arg == "d" {
				return errors.New("no memory")
			}
			return nil
		}}, nil)
		b := r.create("k")
		b.mustStart(t, "c", "echo", "x")
		b.mustWait(t, "c")
		_, _, err := b.start(context.Background(), &sandbox.Command{ID: "d", Argv: []string{"true"}})
		if err == nil {
			t.Fatal("started")
		}
		if _, err := b.command(context.Background(), "d"); !errors.Is(err, sandbox.ErrNotFound) {
			t.Fatalf("the ID of a void step is taken: %v", err)
		}
		if n := r.world.Runs()[string(b.id)+" c"]; n != 1 {
			t.Fatalf("ran %d times", n)
		}
		time.Sleep(31 * time.Minute) // the void one does not count as activity
		if s, c := b.now(); s != sandbox.Stopped || c.Reason != "idle" {
			t.Fatalf("%s %+v", s, c)
		}
	})
}

// tally says how much a crash run did, so that a run that does nothing is seen.
func tally(r *rig, p *promise) string {
	voids := 0
	for _, id := range p.created {
		if b, err := r.h.get(context.Background(), string(id)); err == nil {
			for _, rec := range r.records(b) {
				if rec.Kind == trajectory.KindVoid {
					voids++
				}
			}
		}
	}
	return fmt.Sprintf("%d sandboxes, %d born, %d commands run, %d told ended, %d stops told, %d void",
		len(p.created), len(r.world.Births()), len(r.world.Runs()), len(p.ended), len(p.stopped), voids)
}
