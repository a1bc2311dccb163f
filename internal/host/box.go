package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// bell wakes everybody who waits for a change; it costs nothing while nobody does. Both methods need the lock of its owner.
type bell struct{ ch chan struct{} }

func (b *bell) wait() <-chan struct{} {
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

func (b *bell) ring() {
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}

// box is one sandbox.
type box struct {
	h    *Host
	id   sandbox.ID
	traj trajectory.ID
	spec *sandbox.Spec // as created; its lifetime is box.life
	sum  string        // keyed hash of the request
	seq  uint64        // of the create record

	epoch   atomic.Uint32       // of its trajectory: what its records carry
	call    string              // of the restore that made it; never changed once it is born
	foreign uint64              // records up to here were written by a lost host; never changed
	prev    *box                // whose trajectory it goes on with; never changed
	next    atomic.Pointer[box] // that goes on with its trajectory, or tries to
	whole   atomic.Bool         // of one that goes on with a trajectory: its restore is complete
	forks   sync.Mutex          // one fork at a time; taken before mu
	leaving sync.RWMutex        // held for reading while a record is written, for writing while the sandbox is given away; taken before mu
	given   bool                // under leaving: nothing is recorded here any more

	mu      sync.Mutex
	changed bell // state, and what waits for the number of acts
	state   sandbox.State
	level   sandbox.PauseLevel // while paused
	cause   sandbox.Cause
	err     error // of a create that failed; the box is in no map then
	inst    sandbox.Instance
	created time.Time
	over    time.Time // when it ended
	notes   map[string]string
	ending  bool               // end was asked for; the first asker's cause stands, but for platform's
	noted   bool               // the beginning of the end is recorded
	abort   context.CancelFunc // of a create under way
	// entering is set from the birth until the entrypoint was asked for.
	entering bool
	sealing  bool // a restore is being completed: ends of commands wait

	life   sandbox.Lifetime
	total  time.Time // deadline
	lease  time.Time // deadline by the job's lease whose action is stop; zero is none
	armed  time.Time // deadline that the backend was given last
	last   time.Time // last activity
	active int       // commands that run, requests and connections under way
	acts   int       // acts of the host under way: an end waits for them
	taking int       // events under way into the log: an end waits for them too
	shut   bool      // its last records are being written: no event comes after them
	asked  int       // creates that joined it
	timer  *time.Timer
	wakeAt time.Time // when timer fires

	away  *departure // to another host, under way
	moved error      // that it went to another host; the box is in no map then

	tracing tracing // of what its steps did

	summary *dsecv1.Summary // once it has ended; never changed
	verdicts

	*history // of what was asked of it; empty once it has ended: load reads it from the log then
	files    map[string]*fileConn
	denied   limiter
	conns    limiter // to ports, in the log
}

// history is what was asked of a sandbox.
type history struct {
	steps    map[string]*step
	order    []*step // commands, by seq
	sessions map[string]*session
	retries  int64            // starts under a key that had been started before
	redos    map[string]*redo // what a restore did again, by step
}

func newHistory() *history {
	return &history{steps: map[string]*step{}, sessions: map[string]*session{}, redos: map[string]*redo{}}
}

func (b *box) ended() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state.Ended()
}

// append writes records of the sandbox on the host's context: what is to be recorded does not depend on a client's patience.
// Outputs need be neither synced nor in the store by themselves: the record of their command's end comes behind them, and with it they are;
// nor need voids, without which a step counts as unknown. A store that does not answer holds an act up for shipWait, so that a sandbox can be
// stopped without it; the error is errUnshipped then, and the records are in the log.
func (b *box) append(recs ...trajectory.Record) (first uint64, err error) {
	d := b.spec.Durability
	if d == sandbox.DurabilityStore || recs[0].Kind == trajectory.KindOutput || recs[0].Kind == trajectory.KindVoid {
		d = sandbox.DurabilityProcess
	}
	return b.appendAs(d, recs...)
}

// appendAs is append with another durability on this machine.
func (b *box) appendAs(d sandbox.Durability, recs ...trajectory.Record) (first uint64, err error) {
	b.leaving.RLock()
	defer b.leaving.RUnlock()
	if b.given {
		return 0, fmt.Errorf("record of sandbox %s: it went to another host: %w", b.id, rpc.ErrMoved)
	}
	for i := range recs {
		recs[i].Epoch = b.epoch.Load()
	}
	first, err = b.h.deps.Log.Append(b.h.life, b.traj, recs, d)
	if err == nil && b.spec.Durability == sandbox.DurabilityStore && recs[0].Kind != trajectory.KindOutput && recs[0].Kind != trajectory.KindVoid {
		err = b.ship()
	}
	if err != nil {
		b.h.m.logErrors.Inc()
	}
	return first, err
}

// errUnshipped says that records are in the log and were not seen in the store in time.
var errUnshipped = fmt.Errorf("the store did not take it in time: %w", rpc.ErrUnavailable)

// ship waits, bounded, until what was recorded is in the store.
func (b *box) ship() error {
	ctx, cancel := b.h.bounded(shipWait)
	defer cancel()
	err := b.h.deps.Log.Ship(ctx)
	if err != nil && ctx.Err() != nil && b.h.life.Err() == nil {
		return errors.Join(errUnshipped, err)
	}
	return err
}

// lateSync says whether the record of a command's start need not be on the disk before the command runs: with durability host, and without
// a network, nothing of what it does outlives a crash of the machine. It must be there before anybody is told that it runs, or what came of
// it; the record of its end, which comes behind it, sees to the latter.
func (b *box) lateSync() bool {
	return b.spec.Durability == sandbox.DurabilityHost && (b.spec.Network == sandbox.NetworkNone || b.spec.Network == "")
}

// firm puts the record of a command's start on the disk, unless it or that of its end is.
func (b *box) firm(ctx context.Context, s *step) error {
	b.mu.Lock()
	loose := s.loose && !s.ended()
	b.mu.Unlock()
	if !loose {
		return nil
	}
	if err := b.h.deps.Log.Sync(ctx); err != nil {
		return fmt.Errorf("start %s: sync its record: %w", s.id, err)
	}
	b.mu.Lock()
	s.loose = false
	b.mu.Unlock()
	return nil
}

func stateRecord(s sandbox.State, level sandbox.PauseLevel, c sandbox.Cause, handle []byte) trajectory.Record {
	m := &dsecv1.LogRecord{State: string(s), Step: string(level), Cause: rpc.CauseProto(c), Data: handle}
	if handle != nil {
		m.Sha256 = bootID()
	}
	r := trajectory.Record{Kind: trajectory.KindState, Payload: encode(tagState, m)}
	if s == sandbox.Stopping || s.Ended() {
		r.Flags = trajectory.Final
	}
	return r
}

// begin counts an act of the host in the sandbox, which an end waits for; mu is held.
func (b *box) begin() { b.acts++ }

func (b *box) finished() {
	b.mu.Lock()
	b.acts--
	if b.acts == 0 {
		b.changed.ring()
	}
	b.mu.Unlock()
}

// use wakes the sandbox if need be and counts the caller as active until done. It is also an act.
func (b *box) use(ctx context.Context) (sandbox.Instance, error) {
	ctx, cancel := context.WithTimeout(ctx, stateWait)
	defer cancel()
	b.mu.Lock()
	for {
		switch {
		case b.state == sandbox.Running && !b.ending:
			b.active++
			b.begin()
			inst := b.inst
			b.mu.Unlock()
			return inst, nil
		case b.ending || b.state.Ended():
			err := b.gone()
			b.mu.Unlock()
			return nil, err
		case b.state == sandbox.Paused:
			b.mu.Unlock()
			if err := b.resume(ctx, "woken"); err != nil {
				return nil, err
			}
			b.mu.Lock()
		default:
			if err := b.waitChange(ctx); err != nil {
				return nil, fmt.Errorf("sandbox %s is %s: %w", b.id, b.state, err)
			}
			b.mu.Lock()
		}
	}
}

// waitChange waits for a change with mu held, and returns without it.
func (b *box) waitChange(ctx context.Context) error {
	ch := b.changed.wait()
	b.mu.Unlock()
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// gone says why nothing can be asked of the sandbox any more; mu is held.
func (b *box) gone() error {
	if b.moved != nil {
		return b.moved
	}
	state := b.state
	if !state.Ended() {
		state = sandbox.Stopping
	}
	return fmt.Errorf("sandbox %s is %s (%s %s): %w", b.id, state, b.cause.Class, b.cause.Reason, sandbox.ErrState)
}

// done gives back what use took.
func (b *box) done() {
	b.mu.Lock()
	b.rest()
	b.acts--
	if b.acts == 0 {
		b.changed.ring()
	}
	b.mu.Unlock()
}

// rest ends one activity; mu is held.
func (b *box) rest() {
	b.active--
	b.last = time.Now()
	if b.active == 0 {
		b.arm()
	}
}

// running returns the instance without waking the sandbox or counting as activity.
func (b *box) running() (sandbox.Instance, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.inst == nil || b.ending {
		if b.state == sandbox.Creating && !b.ending {
			return nil, fmt.Errorf("sandbox %s is %s: %w", b.id, b.state, sandbox.ErrState)
		}
		return nil, b.gone()
	}
	return b.inst, nil
}

// proto describes the sandbox.
func (b *box) proto() *dsecv1.Sandbox {
	s := b.spec
	p := &dsecv1.Sandbox{
		Id: string(b.id), Name: s.Name, Project: s.Project, Job: s.Job, Key: s.Key, Labels: s.Labels, Backend: s.Backend,
		Environment: s.EnvName, Layers: s.Layers, Volumes: rpc.VolumesProto(s.Volumes), Resources: rpc.ResourcesProto(s.Resources), Network: string(s.Network),
		User: s.User, Hostname: s.Hostname, Host: string(b.h.cfg.ID), Durability: string(s.Durability), NoNewPrivs: s.NoNewPrivs,
		Epoch: int64(b.epoch.Load()), Trace: cmp.Or(string(s.Trace), string(sandbox.TraceOff)),
	}
	if n := b.successor(); n != nil {
		p.Next, p.Epoch = string(n.id), int64(b.epoch.Load())
	}
	p.Cwd, _ = rpc.Twin(s.Cwd)
	b.mu.Lock()
	defer b.mu.Unlock()
	p.State, p.PauseLevel, p.Cause = string(b.state), string(b.level), rpc.CauseProto(b.cause)
	if b.ending && !b.state.Ended() {
		p.State = string(sandbox.Stopping)
	}
	p.Lifetime = rpc.LifetimeProto(b.life)
	p.Created, p.Ended = rpc.Timestamp(b.created), rpc.Timestamp(b.over)
	p.Notes = maps.Clone(b.notes)
	p.Summary, p.Verdict = b.summary, b.verdict
	if !b.state.Ended() {
		p.TotalDeadline = rpc.Timestamp(b.total)
		if b.state == sandbox.Running && b.active == 0 && b.life.Idle > 0 {
			p.IdleDeadline = rpc.Timestamp(b.last.Add(b.life.Idle))
		}
	}
	return p
}

// limiter lets a burst pass and counts what it holds back.
type limiter struct {
	tokens float64
	at     time.Time
	held   int64
}

func (l *limiter) allow(now time.Time) (held int64, ok bool) {
	const rate, burst = 10, 50
	if l.at.IsZero() {
		l.tokens = burst
	} else {
		l.tokens = min(burst, l.tokens+now.Sub(l.at).Seconds()*rate)
	}
	l.at = now
	if l.tokens < 1 {
		l.held++
		return 0, false
	}
	l.tokens--
	held, l.held = l.held, 0
	return held, true
}
