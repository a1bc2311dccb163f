package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// carrier makes the fake backend one whose saved sandboxes are files that another host can take: a file holds where the sandbox was saved so far.
type carrier struct {
	*fusedBackend
	world *fake.World
	dir   string
	host  sandbox.HostID
	why   string // why it takes nothing
	woken func() // before each resume
	asked func() // whether it takes one
}

type carried struct {
	sandbox.Instance
	c  *carrier
	id sandbox.ID
}

func (c *carrier) file(id sandbox.ID) string { return filepath.Join(c.dir, string(id)) }

func (c *carrier) Create(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (sandbox.Instance, error) {
	inst, err := c.fusedBackend.Create(ctx, id, spec, sink)
	return &carried{inst, c, id}, err
}

func (c *carrier) Recover(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, handle []byte, sink sandbox.Sink) (inst sandbox.Instance, err error) {
	_, serr := os.Stat(c.file(id))
	lives := false
	for _, a := range c.world.Alive() {
		lives = lives || a == id
	}
	if !lives && serr == nil {
		inst, err = c.fusedBackend.Create(ctx, id, spec, sink)
		if err == nil {
			err = inst.Pause(ctx, sandbox.Frozen)
		}
	} else {
		inst, err = c.fusedBackend.Recover(ctx, id, spec, handle, sink)
	}
	return &carried{inst, c, id}, err
}

func (c *carrier) Sweep(ctx context.Context, living map[sandbox.ID]bool) error {
	list, _ := os.ReadDir(c.dir)
	for _, f := range list {
		if !living[sandbox.ID(f.Name())] {
			os.Remove(filepath.Join(c.dir, f.Name()))
		}
	}
	return c.fusedBackend.Sweep(ctx, living)
}

func (x *carried) Pause(ctx context.Context, l sandbox.PauseLevel) error {
	if l == sandbox.Saved {
		was, _ := os.ReadFile(x.c.file(x.id) + ".memory")
		if err := os.WriteFile(x.c.file(x.id), append(was, string(x.c.host)+" "...), 0o600); err != nil {
			return err
		}
	}
	return x.Instance.Pause(ctx, l)
}

func (x *carried) Resume(ctx context.Context) error {
	err := os.Rename(x.c.file(x.id), x.c.file(x.id)+".memory")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if x.c.woken != nil {
		x.c.woken()
	}
	return x.Instance.Resume(ctx)
}

func (x *carried) Destroy(ctx context.Context) error {
	err := x.Instance.Destroy(ctx)
	if err == nil {
		os.Remove(x.c.file(x.id))
		os.Remove(x.c.file(x.id) + ".memory")
	}
	return err
}

func (x *carried) Needs(context.Context) ([]byte, int64, error) {
	return []byte("a machine"), 1 << 20, nil
}

func (x *carried) Luggage(context.Context) ([]sandbox.MovedFile, error) {
	f, err := os.Open(x.c.file(x.id))
	return []sandbox.MovedFile{{Name: "state", File: f}}, err
}

func (c *carrier) Admit(_ context.Context, needs []byte, _ int64) error {
	if c.asked != nil {
		c.asked()
	}
	if c.why != "" || string(needs) != "a machine" {
		return fmt.Errorf("%s: %w", c.why, sandbox.ErrUnsupported)
	}
	return nil
}

func (c *carrier) Unpack(_ context.Context, id sandbox.ID, _ string) (f *os.File, err error) {
	err = c.f.pass(func() error {
		f, err = os.Create(c.file(id))
		return err
	})
	return f, err
}

func (c *carrier) Keep(context.Context, sandbox.ID) error {
	return c.f.pass(func() error { return nil })
}

func (c *carrier) Claim(_ context.Context, id sandbox.ID, _ []byte) ([]byte, error) {
	return fmt.Appendf(nil, `{"ID":%q}`, id), c.f.pass(func() error { return nil })
}

func (c *carrier) Discard(_ context.Context, id sandbox.ID) error {
	return c.f.pass(func() error { os.Remove(c.file(id)); return nil })
}

// moves are two hosts, and a sandbox that goes between them.
type moves struct {
	t    *testing.T
	a, b *rig
	id   sandbox.ID
	n    int
	cut  context.CancelFunc // ends the stream from the source, as a gateway's death does
}

func newMoves(t *testing.T) *moves {
	start := func(id sandbox.HostID) *rig {
		r := rigOnly(t, id)
		r.config = func(_ *Config, d *Deps) {
			c := &carrier{fusedBackend: d.Backends["container"].(*fusedBackend), world: r.world, dir: filepath.Join(r.dir, "files"), host: id}
			if err := os.MkdirAll(c.dir, 0o700); err != nil {
				t.Fatal(err)
			}
			d.Backends["container"] = c
		}
		return r.begin()
	}
	m := &moves{t: t, a: start("hhome1"), b: start("haway1"), cut: func() {}}
	t.Cleanup(func() { m.cut() })
	b := m.a.create("k", func(s *dsecv1.Spec) { s.Name = "name" })
	m.id = b.id
	b.mustRun(t, "a", "echo", "one")
	b.mustOpen(t, "s")
	b.mustSay(t, "s", "b", "echo two")
	return m
}

func rigOnly(t *testing.T, id sandbox.HostID) *rig {
	return &rig{t: t, dir: t.TempDir(), id: id, world: fake.NewWorld(fake.Options{Capabilities: &sandbox.Capabilities{
		PauseLevels: []sandbox.PauseLevel{sandbox.Frozen, sandbox.Saved}, Networks: []string{"none"}, Sessions: true}})}
}

func (m *moves) nonce() string { return fmt.Sprintf("n%d", m.n) }

// carry brings all parts to the target, as a gateway does. The source waits then.
func (m *moves) carry(from, to *rig) error {
	m.cut()
	synctest.Wait()
	m.n++
	parts, sent := make(chan *dsecv1.MovePart), make(chan error, 1)
	ctx, cut := context.WithCancel(in("default"))
	m.cut = cut
	b, err := from.h.get(ctx, string(m.id))
	if err != nil {
		return err
	}
	go func() {
		defer close(parts)
		sent <- b.depart(ctx, &dsecv1.DepartRequest{Sandbox: string(m.id), Nonce: m.nonce(), To: string(to.id)}, func(p *dsecv1.MovePart) error {
			select {
			case parts <- p:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	err = to.h.arrive(ctx, func() (*dsecv1.MovePart, error) {
		if p, ok := <-parts; ok {
			return p, nil
		}
		return nil, sandbox.ErrInvalid
	})
	if err != nil {
		cut()
		return errors.Join(err, <-sent)
	}
	return nil
}

func (m *moves) conclude(from *rig, commit bool) (bool, error) {
	return from.h.conclude(in("default"), &dsecv1.ConcludeRequest{Sandbox: string(m.id), Nonce: m.nonce(), Commit: commit})
}

func (m *moves) settle(to *rig, take bool) error {
	_, err := to.h.settleMove(in("default"), &dsecv1.SettleRequest{Sandbox: string(m.id), Nonce: m.nonce(), Take: take})
	return err
}

// move is a whole move; the first error ends it, as the death of the gateway does.
func (m *moves) move(from, to *rig) error {
	defer func() { m.cut() }()
	if err := m.carry(from, to); err != nil {
		return err
	}
	moved, err := m.conclude(from, true)
	if err == nil && !moved {
		err = sandbox.ErrState
	}
	if err != nil {
		return err
	}
	return m.settle(to, true)
}

// tidy does what gateways do with moves that broke off.
func (m *moves) tidy(from, to *rig) {
	m.t.Helper()
	list, err := moveService{to.h}.Arrivals(in("default"), connect.NewRequest(&dsecv1.ArrivalsRequest{}))
	if err != nil {
		m.t.Fatal(err)
	}
	for range list.Msg.Arrivals {
		moved, err := m.conclude(from, false)
		if err == nil {
			err = m.settle(to, moved)
		}
		if err != nil {
			m.t.Fatal(err)
		}
	}
}

// whole checks that one host has the sandbox, with all of its log and memory, and that the other has nothing and says where it is; it answers the host.
func (m *moves) whole() *rig {
	m.t.Helper()
	var at, not *rig
	for _, r := range []*rig{m.a, m.b} {
		<-r.h.Ready()
		r.h.mu.Lock()
		b := r.h.boxes[m.id]
		r.h.mu.Unlock()
		switch {
		case b == nil:
			not = r
		case at != nil:
			m.t.Fatal("both hosts have it")
		default:
			at = r
		}
	}
	if at == nil {
		m.t.Fatal("no host has it")
	}
	b := at.box(m.id)
	b.mustRun(m.t, fmt.Sprintf("after-%d", m.n), "echo", "x")
	if got := b.output(m.t, "a") + b.output(m.t, "b"); got != "one\ntwo\n" {
		m.t.Fatalf("output %q", got)
	}
	for i, r := range at.records(b) {
		if r.Seq != uint64(i+1) {
			m.t.Fatalf("record %d is the %dth", r.Seq, i+1)
		}
	}
	b.mu.Lock()
	s := b.sessions["s"]
	open := s != nil && s.open
	b.mu.Unlock()
	if !open {
		m.t.Fatal("its session is gone")
	}
	if not != nil {
		time.Sleep(time.Second)
		files, _ := filepath.Glob(filepath.Join(not.dir, "files", "*"))
		if slices.Contains(not.world.Alive(), m.id) || len(files) > 0 {
			m.t.Fatalf("left on %s: %v, %v", not.id, not.world.Alive(), files)
		}
		if _, err := not.log.Stat(b.traj); !errors.Is(err, sandbox.ErrNotFound) {
			m.t.Fatalf("records left on %s: %v", not.id, err)
		}
	}
	return at
}

func TestMove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMoves(t)
		waits := make(chan error, 1)
		b := m.a.box(m.id)
		b.mustStart(t, "bg", "hang")
		s, _ := b.command(context.Background(), "bg")
		go func() { waits <- b.waitCommand(context.Background(), s, time.Minute) }()
		for i, way := range [][2]*rig{{m.a, m.b}, {m.b, m.a}, {m.a, m.b}} {
			from, to := way[0], way[1]
			if err := m.move(from, to); err != nil {
				t.Fatal(err)
			}
			if i == 0 {
				wantErr(t, <-waits, rpc.ErrMoved, "went to host haway1")
			}
			if m.whole() != to {
				t.Fatal("it did not go")
			}
			if err := m.settle(to, true); err != nil {
				t.Errorf("settled again: %v", err)
			}
			if moved, err := m.conclude(from, false); !moved || err != nil {
				t.Errorf("concluded again: %v, %v", moved, err)
			}
			_, err := from.h.get(in("default"), string(m.id))
			wantErr(t, err, rpc.ErrMoved, "went to host "+string(to.id))
			_, _, err = from.h.create(in("default"), createRequest("k"))
			wantErr(t, err, rpc.ErrMoved, "went to host "+string(to.id))
			for _, q := range []*dsecv1.FindKeyRequest{{Job: "j", Key: "k"}, {Name: "name"}, {Sandbox: string(m.id)}} {
				f, err := hostService{from.h}.FindKey(in("default"), connect.NewRequest(q))
				if err != nil || f.Msg.MovedTo != string(to.id) || f.Msg.Move != m.nonce() {
					t.Errorf("%v is found: %v, %v", q, f, err)
				}
			}
			m.a.restart()
			m.b.restart()
			if m.whole() != to {
				t.Fatal("after a restart it is elsewhere")
			}
		}
		for range 5 { // back at once, while what it left is being removed
			for _, way := range [][2]*rig{{m.b, m.a}, {m.a, m.b}} {
				if err := m.move(way[0], way[1]); err != nil {
					t.Fatal(err)
				}
			}
		}
		if m.whole() != m.b {
			t.Fatal("it is elsewhere")
		}
	})
}

func TestMoveIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMoves(t)
		b := m.a.box(m.id)
		refuse := func(want error, says string) {
			t.Helper()
			wantErr(t, m.carry(m.a, m.b), want, says)
			m.tidy(m.a, m.b)
			time.Sleep(time.Second)
			if m.whole() != m.a {
				t.Fatal("it went")
			}
			if s, _ := b.now(); s != sandbox.Running {
				t.Fatalf("it is %s", s)
			}
		}
		c := m.b.h.deps.Backends["container"].(*carrier)
		c.why = "it was saved by another"
		refuse(sandbox.ErrUnsupported, "it was saved by another")
		c.why = ""
		m.b.h.cfg.Version = "2"
		refuse(sandbox.ErrUnsupported, "runs dsec 2")
		m.b.h.cfg.Version = m.a.h.cfg.Version
		m.b.h.Drain(true)
		refuse(sandbox.ErrExhausted, "draining")
		m.b.h.Drain(false)
		other := m.b.create("other", func(s *dsecv1.Spec) { s.Name = "name" })
		refuse(sandbox.ErrExists, "name name")
		m.b.mustStop(other)
		b.forks.Lock()
		wantErr(t, m.carry(m.a, m.b), sandbox.ErrState, "being forked")
		b.forks.Unlock()
		b.mu.Lock()
		b.begin() // as a snapshot does
		b.mu.Unlock()
		wantErr(t, m.carry(m.a, m.b), sandbox.ErrState, "a call is at work in it")
		b.finished()
		if err := m.move(m.a, m.b); err != nil {
			t.Fatal(err)
		}
		m.whole()
	})
}

// What is asked for while the sandbox is on its way waits, or ends the move.
func TestMoveAndOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMoves(t)
		b := m.a.box(m.id)
		if err := m.carry(m.a, m.b); err != nil {
			t.Fatal(err)
		}
		used := make(chan error, 1)
		go func() {
			_, err := b.use(context.Background())
			used <- err
		}()
		time.Sleep(time.Second)
		if moved, err := m.conclude(m.a, true); !moved || err != nil {
			t.Fatal(moved, err)
		}
		wantErr(t, <-used, rpc.ErrMoved, "went to host haway1")
		_, err := m.b.h.get(in("default"), string(m.id)) // nobody settled it
		wantErr(t, err, rpc.ErrUnavailable, "on its way here")
		_, err = m.b.h.stopKey(in("default"), b.traj)
		wantErr(t, err, rpc.ErrUnavailable, "on its way here")
		r, err := jobService{m.b.h}.Stop(in("default"), connect.NewRequest(&dsecv1.StopJobRequest{Name: "j"}))
		if err != nil || len(r.Msg.Errors) != 1 || r.Msg.Errors[0].Code != "unavailable" {
			t.Fatalf("a stop of its job: %v, %v", r, err)
		}
		m.tidy(m.a, m.b)
		if m.whole() != m.b {
			t.Fatal("it is not there")
		}
		// No word comes: it goes on where it is.
		if err := m.carry(m.b, m.a); err != nil {
			t.Fatal(err)
		}
		time.Sleep(concludeWait + time.Minute)
		if moved, err := m.conclude(m.b, true); moved || err != nil {
			t.Fatal(moved, err)
		}
		if s, _ := m.b.box(m.id).now(); s != sandbox.Running {
			t.Fatalf("it is %s", s)
		}
		m.tidy(m.b, m.a)
		if m.whole() != m.b {
			t.Fatal("it is not there")
		}
		// Something is recorded after it was sent.
		if err := m.carry(m.b, m.a); err != nil {
			t.Fatal(err)
		}
		if _, _, err := m.b.box(m.id).judge(context.Background(), &dsecv1.Verdict{Key: "v", Reward: new(float64)}); err != nil {
			t.Fatal(err)
		}
		if moved, err := m.conclude(m.b, true); moved || err != nil {
			t.Fatal(moved, err)
		}
		m.tidy(m.b, m.a)
		if m.whole() != m.b {
			t.Fatal("it is not there")
		}
		// It is stopped on its way.
		if err := m.carry(m.b, m.a); err != nil {
			t.Fatal(err)
		}
		m.b.mustStop(m.b.box(m.id))
		if moved, err := m.conclude(m.b, true); moved || err != nil {
			t.Fatal(moved, err)
		}
		m.tidy(m.b, m.a)
		if n := len(m.a.world.Alive()) + len(m.b.world.Alive()); n > 0 {
			t.Fatalf("%d live", n)
		}
	})
}

// Calls come as soon as the sandbox has arrived, before what it brought is settled: they are not taken for what it brought, nor ended twice.
func TestMoveAndCallsAtItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMoves(t)
		var call *step
		m.b.h.deps.Backends["container"].(*carrier).woken = func() {
			s, mine, err := m.b.box(m.id).claimStep(context.Background(), "call", tagWrite, [32]byte{})
			if !mine || err != nil {
				t.Error(mine, err)
			}
			call = s
		}
		if err := m.move(m.a, m.b); err != nil {
			t.Fatal(err)
		}
		if call.ended() {
			t.Fatalf("a call that had just begun has ended: %s", call.outcome.Kind)
		}
		m.b.box(m.id).giveUp(call, nil)
		m.a.h.deps.Backends["container"].(*carrier).woken = func() {
			m.a.h.end(m.a.box(m.id), sandbox.Cause{Class: sandbox.ClassClient, Reason: "asked"})
		}
		if err := m.move(m.b, m.a); err != nil {
			t.Fatal(err)
		}
		b := m.a.box(m.id)
		if err := b.waitEnd(context.Background()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		ends := 0
		for _, r := range m.a.records(b) {
			if _, m, err := decode(r.Payload); err == nil && r.Kind == trajectory.KindState && sandbox.State(m.(*dsecv1.LogRecord).GetState()).Ended() {
				ends++
			}
		}
		m.a.h.mu.Lock()
		living := m.a.h.jobs[scoped{b.spec.Project, b.spec.Job}].living
		m.a.h.mu.Unlock()
		if ends != 1 || living != 0 {
			t.Fatalf("%d ends, %d live", ends, living)
		}
	})
}

// Source or target is killed at each of its acts in a move, and the gateway with it: the sandbox is whole on one host, and nothing is on the other.
func TestMoveCrashes(t *testing.T) {
	went, acts := map[bool]int{}, 36
	if os.Getenv("DSEC_TORTURE") != "" {
		acts = 80 // also such as a move does not have
	}
	for n := 1; n <= acts; n++ {
		late, target := n%2 == 0, n%4 > 1
		synctest.Test(t, func(t *testing.T) {
			m := newMoves(t)
			victim, other := m.a, m.b
			if target {
				victim, other = m.b, m.a
			}
			victim.fuse.set((n+3)/4, late)
			err := m.move(m.a, m.b)
			victim.fuse.kill()
			victim.restart()
			if n%3 == 0 {
				other.restart()
			}
			m.tidy(m.a, m.b)
			at := m.whole()
			if err == nil && at != m.b {
				t.Fatalf("at %d: a move that was answered did not happen", n)
			}
			went[at == m.b]++
			m.a.restart()
			m.b.restart()
			if m.whole() != at {
				t.Fatalf("at %d: it is elsewhere after a restart", n)
			}
			to := m.a
			if at == m.a {
				to = m.b
			}
			if err := m.move(at, to); err != nil {
				t.Fatalf("at %d: the next move: %v", n, err)
			}
			if m.whole() != to {
				t.Fatalf("at %d: the next move went elsewhere", n)
			}
		})
	}
	if went[true] == 0 || went[false] == 0 {
		t.Errorf("it went %d times, and stayed %d times: want both", went[true], went[false])
	}
}

// A sandbox that moved away comes back under the ID of a restore: what its first ID left here says nothing any more, also while it is not settled.
func TestMoveBackAfterARestore(t *testing.T) {
	for _, cut := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := newMoves(t)
			if err := m.move(m.a, m.b); err != nil {
				t.Fatal(err)
			}
			first := m.id
			m.b.mustStop(m.b.box(first))
			b, _ := m.b.mustRestore("k", nil)
			m.id = b.id
			if err := m.carry(m.b, m.a); err != nil {
				t.Fatal(err)
			}
			if moved, err := m.conclude(m.b, true); !moved || err != nil {
				t.Fatal(moved, err)
			}
			if cut {
				m.a.restart()
				<-m.a.h.Ready()
			}
			if err := m.settle(m.a, true); err != nil {
				t.Fatal(err)
			}
			m.cut()
			for range 2 {
				if m.whole() != m.a {
					t.Fatal("it is elsewhere")
				}
				if e := m.a.box(first); !e.ended() {
					t.Fatal("its first one goes on")
				}
				m.a.restart()
				m.n++
			}
		})
	}
}

// Who repeats a create or a command on the host where a sandbox went finds what was made, also after a restore before, and with secrets: their
// hashes are of the key of the host that recorded them.
func TestMoveAndRepeatedRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMoves(t)
		named := func(s *dsecv1.Spec) { s.Name = "name" }
		say := func(b *box, word string) (existed bool, err error) {
			_, existed, err = b.start(context.Background(), &sandbox.Command{ID: "secret", Argv: []string{"echo", word}, Env: []string{"TOKEN=s3cret"}, SecretEnv: []string{"TOKEN"}})
			return existed, err
		}
		m.a.mustStop(m.a.box(m.id))
		again, _ := m.a.mustRestore("k", nil)
		m.id = again.id
		for _, way := range [][2]*rig{{m.a, m.b}, {m.b, m.a}} {
			if _, err := say(way[0].box(m.id), "x"); err != nil {
				t.Fatal(err)
			}
			way[0].box(m.id).mustWait(t, "secret")
			if err := m.move(way[0], way[1]); err != nil {
				t.Fatal(err)
			}
			b := way[1].box(m.id)
			if existed, err := say(b, "x"); !existed || err != nil {
				t.Errorf("the same command: %v, %v", existed, err)
			}
			if _, err := say(b, "y"); !errors.Is(err, sandbox.ErrExists) {
				t.Errorf("another command: %v", err)
			}
			if again = way[1].create("k", named); again.id != m.id {
				t.Errorf("the key leads to %s", again.id)
			}
			_, _, err := way[1].h.create(context.Background(), createRequest("k"))
			wantErr(t, err, sandbox.ErrExists, "another request")
		}
	})
}

// A key that the target gives to another sandbox while one is taken in stays that one's.
func TestMoveAndCreateOfItsKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMoves(t)
		var other *box
		m.b.h.deps.Backends["container"].(*carrier).asked = func() { other = m.b.create("k") }
		wantErr(t, m.move(m.a, m.b), sandbox.ErrExists, "key k")
		other.mustRun(t, "c", "echo", "x")
		m.b.mustStop(other)
		if n := len(m.b.records(other)); n < 5 {
			t.Fatalf("%d records are left of it", n)
		}
		m.a.box(m.id).mustRun(t, "d", "echo", "x")
	})
}

// Octets that came otherwise than they were sent are found, and nothing of them is kept.
func TestMoveComparesWhatCame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMoves(t)
		b := m.a.box(m.id)
		m.n++
		var parts []*dsecv1.MovePart
		ctx, cut := context.WithCancel(in("default"))
		defer cut()
		err := b.depart(ctx, &dsecv1.DepartRequest{Sandbox: string(m.id), Nonce: m.nonce(), To: "haway1"}, func(p *dsecv1.MovePart) error {
			if parts = append(parts, p); p.GetEnd() != nil {
				cut()
			}
			return nil
		})
		wantErr(t, err, context.Canceled, "no word came")
		broken := 0
		for i := range parts {
			for _, change := range []string{"lost", "doubled", "changed", "endless"} {
				send := append(append([]*dsecv1.MovePart{}, parts[:i]...), parts[i+1:]...)
				switch {
				case change == "doubled":
					send = append(append(append([]*dsecv1.MovePart{}, parts[:i+1]...), parts[i]), parts[i+1:]...)
				case change == "changed":
					d := parts[i].GetData()
					if d == nil || len(d.Data) == 0 {
						continue
					}
					other := &dsecv1.MovePart{Part: &dsecv1.MovePart_Data{Data: &dsecv1.MoveData{Offset: d.Offset, Data: []byte(strings.ToUpper(string(d.Data)))}}}
					send = append(append(append([]*dsecv1.MovePart{}, parts[:i]...), other), parts[i+1:]...)
				}
				if change == "endless" {
					if parts[i].GetRecords() == nil {
						continue
					}
					other := proto.CloneOf(parts[i])
					other.GetRecords().Next = 1 << 60
					send = append(append(append([]*dsecv1.MovePart{}, parts[:i]...), other), parts[i+1:]...)
				}
				at := 0
				err := m.b.h.arrive(in("default"), func() (*dsecv1.MovePart, error) {
					if at++; at > len(send) {
						return nil, sandbox.ErrInvalid
					}
					return send[at-1], nil
				})
				if err == nil && change == "doubled" && i == len(parts)-1 {
					m.n++ // what follows the end is not read
					continue
				}
				if err == nil {
					t.Errorf("part %d (%T) %s: taken", i, parts[i].Part, change)
				}
				broken++
				files, _ := filepath.Glob(filepath.Join(m.b.dir, "files", "*"))
				if _, serr := m.b.log.Stat(b.traj); !errors.Is(serr, sandbox.ErrNotFound) || len(files) > 0 {
					t.Errorf("part %d %s: left %v, %v", i, change, serr, files)
				}
			}
		}
		if broken < 6 {
			t.Errorf("%d of %d parts were broken", broken, len(parts))
		}
	})
}
