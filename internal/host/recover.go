package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// story is what the log tells of a trajectory: of its last sandbox, and of those before that restores replaced.
type story struct {
	*history
	epoch   uint32
	before  []*story            // sandboxes that restores replaced, the oldest first; without history
	attempt []func(*story)      // what a restore that is not complete does; done when it is
	ids     map[sandbox.ID]bool // of all sandboxes, also of those that never came to life
	call    string              // of the restore that made it
	create  *dsecv1.HostCreateRequest
	id      sandbox.ID
	seq     uint64 // of the create
	created time.Time
	void    bool // the creation failed
	state   sandbox.State
	level   sandbox.PauseLevel
	cause   sandbox.Cause
	over    time.Time
	handle  []byte
	boot    string // machine start in which it was born
	changes []*dsecv1.Lifetime
	total   time.Time       // a deadline that was set later; zero is the create's
	loose   map[string]bool // sessions that were asked for and not told open
	summary *dsecv1.Summary
	foreign uint64  // records up to here are of a lost host, or of one that gave the sandbox away
	move    string  // nonce of the move by which it came last
	left    []*step // without an end when it was taken back: later ones are of calls that came since
	verdicts
}

// What of a trajectory is read: all but outputs, or what says whether its sandbox lives, which is all that is needed of most.
var (
	wholeStory = trajectory.Except(trajectory.KindOutput)
	lifeStory  = trajectory.Kinds(trajectory.KindCreate, trajectory.KindState, trajectory.KindPolicy, trajectory.KindVoid, trajectory.KindVerdict)
)

// tell reads a trajectory's records of some kinds, up to a seq (0: all). A record that the disk lost is skipped and told in the log.
func (h *Host) tell(ctx context.Context, id trajectory.ID, kinds trajectory.KindSet, until uint64) (*story, error) {
	st := &story{history: newHistory(), loose: map[string]bool{}, ids: map[sandbox.ID]bool{}}
	q := trajectory.Query{Kinds: kinds}
	for {
		recs, next, err := h.deps.Log.Read(ctx, id, q)
		for i := range recs {
			if until > 0 && recs[i].Seq >= until {
				return st, nil
			}
			if err := st.add(&recs[i]); err != nil {
				h.log.Error("read a record", "trajectory", id, "seq", recs[i].Seq, "err", err)
			}
		}
		switch {
		case errors.Is(err, sandbox.ErrLost):
			h.log.Error("read a trajectory", "trajectory", id, "err", err)
		case err != nil:
			return nil, fmt.Errorf("read trajectory %v: %w", id, err)
		case next <= max(q.From, 1):
			return st, nil
		}
		q.From = next
	}
}

// add takes in one record.
func (st *story) add(r *trajectory.Record) error {
	if r.Kind == trajectory.KindVoid {
		if sandbox.ID(r.Step) == st.id {
			st.giveUp()
		} else if s := st.steps[r.Step]; s != nil {
			delete(st.steps, r.Step)
			st.retries++
			for i := range st.order {
				if st.order[i] == s {
					st.order = append(st.order[:i], st.order[i+1:]...)
					break
				}
			}
		}
		return nil
	}
	t, m, err := decode(r.Payload)
	if err != nil {
		return err
	}
	if t != tagCreate && r.Epoch > st.epoch {
		st.epoch = r.Epoch
	}
	if st.restoring() && t != tagCreate && t != tagState && t != tagVerdict {
		st.attempt = append(st.attempt, func(st *story) { st.take(r, t, m) })
		return nil
	}
	st.take(r, t, m)
	return nil
}

// take takes in one record that was decoded.
func (st *story) take(r *trajectory.Record, t tag, m proto.Message) {
	switch m := m.(type) {
	case *dsecv1.HostCreateRequest:
		st.begin(r, m)
	case *dsecv1.Redo:
		st.redone(r, m)
	case *dsecv1.Restored:
		st.call = m.GetId()
	case *dsecv1.Recalled:
		st.foreign, st.move = r.Seq, m.GetMove()
	case *dsecv1.Verdict:
		st.note(m, r.Seq, r.Wall)
	case *dsecv1.SetLifetimeRequest:
		st.changes = append(st.changes, m.GetLifetime())
		if ms := m.GetLifetime().GetTotalMs(); ms > 0 {
			st.total = r.Wall.Add(time.Duration(ms) * time.Millisecond)
		}
	case *dsecv1.StartRequest:
		s := &step{id: r.Step, act: t, sum: digest(classless(r.Payload, m), r.Input), seq: r.Seq, state: working, started: r.Wall,
			session: m.GetSession(), terminal: m.GetTerminal() != nil, stdinEOF: !m.GetStdinOpen()}
		if r.Input != nil {
			s.stdin = r.Input.Size
		}
		s.taken = s.stdin
		st.steps[s.id] = s
		st.order = append(st.order, s)
	case *dsecv1.OpenSessionRequest:
		st.sessions[r.Step] = &session{name: r.Step, shell: m.GetShell(), user: m.GetUser(), open: true, opened: r.Wall}
		st.loose[r.Step] = true
	case *dsecv1.Outcome:
		st.end(r, m, nil)
	case *dsecv1.WriteStdinRequest:
		if s := st.steps[r.Step]; s != nil {
			s.stdinEOF = s.stdinEOF || m.GetEof()
			if r.Input != nil {
				s.stdin = max(s.stdin, r.Offset+r.Input.Size)
			}
		}
	case *dsecv1.SignalRequest:
		if key := m.GetStep(); key != "" {
			st.steps[key] = &step{id: key, act: t, sum: digest(r.Payload, nil), seq: r.Seq, state: working, started: r.Wall}
		}
	case *dsecv1.ResizeRequest, *dsecv1.Job, *dsecv1.StepTrace:
	case *dsecv1.LogRecord:
		switch t {
		case tagState:
			st.turn(r, m)
		case tagResult:
			st.end(r, m.GetOutcome(), m)
		case tagEvent:
			if m.GetKind() == "session_opened" {
				delete(st.loose, r.Step)
			}
		}
	default: // the start of a step that is no command
		s := st.steps[r.Step]
		if s == nil {
			s = &step{id: r.Step, act: t, sum: digest(r.Payload, r.Input), seq: r.Seq}
			st.steps[r.Step] = s
		} else {
			st.retries++
		}
		s.state, s.started = working, r.Wall
	}
}

func (st *story) end(r *trajectory.Record, o *dsecv1.Outcome, result *dsecv1.LogRecord) {
	if r.Kind == trajectory.KindSessionClose {
		s := st.sessions[r.Step]
		if s == nil {
			return
		}
		s.open, s.end = false, rpc.Outcome(o)
		if delete(st.loose, r.Step); s.end.Kind == sandbox.StartFailed {
			delete(st.sessions, r.Step)
		}
		return
	}
	if s := st.steps[r.Step]; s != nil {
		s.state, s.outcome, s.result = over, rpc.Outcome(o), result
		s.endsAt = [3]int64{sandbox.Stdout: s.outcome.Stdout.Total, sandbox.Stderr: s.outcome.Stderr.Total}
	}
}

func (st *story) turn(r *trajectory.Record, m *dsecv1.LogRecord) {
	to := sandbox.State(m.GetState())
	if st.state.Ended() || st.state == sandbox.Stopping && !to.Ended() && to != sandbox.Stopping {
		return // an end is never taken back
	}
	if to == sandbox.Running && st.restoring() {
		attempt := st.attempt
		st.attempt = nil
		st.state = to
		for _, do := range attempt {
			do(st)
		}
	}
	st.state, st.level = to, sandbox.PauseLevel(m.GetStep())
	if to == sandbox.Running {
		st.level = ""
	}
	if to == sandbox.Stopping || to.Ended() {
		st.cause, st.over, st.summary = rpc.Cause(m.GetCause()), r.Wall, m.GetSummary()
	}
	if len(m.GetData()) > 0 {
		st.handle, st.boot = m.GetData(), m.GetSha256()
	}
}

// box makes the sandbox of a story.
func (h *Host) retell(id trajectory.ID, st *story) (*box, error) {
	spec, err := rpc.Spec(st.create.GetSpec())
	if err != nil {
		return nil, err
	}
	if _, err := sandbox.ParseID(string(st.id)); err != nil {
		return nil, err
	}
	b := &box{
		h: h, id: st.id, traj: id, spec: spec, sum: st.create.GetRequestHash(), seq: st.seq, state: st.state, level: st.level, cause: st.cause,
		created: st.created, over: st.over, life: spec.Lifetime, total: st.total, last: time.Now(), history: newHistory(),
		summary: st.summary, verdicts: st.verdicts, call: st.call, foreign: st.foreign,
	}
	b.epoch.Store(st.epoch)
	for _, c := range st.changes {
		if l, err := rpc.Lifetime(c); err == nil { // was valid when it was recorded
			merge(&b.life, l)
		}
	}
	if !st.state.Ended() {
		b.over = time.Time{}
		b.history = st.history
	}
	return b, h.retellBefore(b, st)
}

// orphan is a sandbox that lived when the last host died.
type orphan struct {
	b  *box
	st *story
	be sandbox.Backend
}

// recover takes back what the last host left.
func (h *Host) recover(ctx context.Context) error {
	start := time.Now()
	if err := h.rereadPassages(); err != nil {
		return err
	}
	orphans, half, known, err := h.reread(ctx)
	if err != nil {
		return err
	}
	if err := h.checkUnknown(ctx, known); err != nil {
		return err
	}
	h.reship(ctx)
	for _, b := range half {
		b.fail(fmt.Errorf("create %s: the host ended before the sandbox was born: %w", b.id, sandbox.ErrLost))
	}
	living, err := h.takeBack(ctx, orphans)
	if err != nil {
		return err
	}
	h.tidyPassages(ctx, living)
	for name, be := range h.deps.Backends {
		if err := h.sweep(ctx, name, be, living); err != nil {
			return err
		}
	}
	for _, o := range orphans {
		h.settle(o)
	}
	h.mu.Lock()
	var leased []scoped
	for n, j := range h.jobs {
		if j.expired.IsZero() && j.lease > 0 {
			h.lease(j)
			leased = append(leased, n)
		}
	}
	h.mu.Unlock()
	for _, n := range leased {
		h.mu.Lock()
		at := h.jobs[n].stopAt()
		h.mu.Unlock()
		h.armJob(n, at)
	}
	h.log.Info("host is ready", "living", len(living), "half_made", len(half), "took", time.Since(start))
	return nil
}

// reship puts into the store what the last host recorded of sandboxes with durability store and may not have got there: it is answered
// from now on.
func (h *Host) reship(ctx context.Context) {
	h.mu.Lock()
	some := false
	for _, b := range h.boxes {
		some = some || b.spec.Durability == sandbox.DurabilityStore
	}
	h.mu.Unlock()
	if !some || !h.deps.Log.Stores() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, shipWait)
	defer cancel()
	h.unshipped.Store(true)
	if err := h.deps.Log.Ship(ctx); err != nil {
		h.log.Warn("ship what the last host recorded; nothing of it is answered before", "err", err)
		return
	}
	h.unshipped.Store(false)
}

// sweep removes what belongs to no living sandbox. It is tried a few times: what is left behind would never be found again.
func (h *Host) sweep(ctx context.Context, name string, be sandbox.Backend, living map[sandbox.ID]bool) error {
	var err error
	for range 3 {
		if err = be.Sweep(ctx, living); err == nil || ctx.Err() != nil {
			break
		}
		h.log.Error("sweep, will try again", "backend", name, "err", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
	if err != nil {
		return fmt.Errorf("sweep backend %s: %w", name, err)
	}
	return nil
}

// holder is a backend that can tell what lives before it is swept.
type holder interface {
	Holds(ctx context.Context) ([]sandbox.ID, error)
}

// checkUnknown refuses to go on when sandboxes live that the log does not know: the sweep would end them. A create is recorded before its
// sandbox is born, so this is never the trace of a crash of ours.
func (h *Host) checkUnknown(ctx context.Context, known map[sandbox.ID]bool) error {
	for name, be := range h.deps.Backends {
		k, ok := be.(holder)
		if !ok {
			continue
		}
		held, err := k.Holds(ctx)
		if err != nil {
			return fmt.Errorf("list what lives in backend %s: %w", name, err)
		}
		held = slices.DeleteFunc(slices.Clone(held), func(id sandbox.ID) bool { return known[id] })
		if len(held) == 0 {
			continue
		}
		slices.Sort(held)
		some := fmt.Sprint(held[:min(len(held), 5)])
		if len(held) > 5 {
			some += fmt.Sprintf(" and %d more", len(held)-5)
		}
		if h.cfg.ForgetUnknown {
			h.log.Warn("living sandboxes that the log does not know are ended, as --forget-unknown says", "backend", name, "count", len(held), "sandboxes", some, "log", h.cfg.LogDir)
			continue
		}
		return fmt.Errorf("%d living sandboxes are unknown to the log in %s: %s; it was removed, damaged or is another's. Bring the right log back, or end these sandboxes by a start with --forget-unknown: %w",
			len(held), h.cfg.LogDir, some, sandbox.ErrState)
	}
	return nil
}

// reread makes boxes and jobs of the log. known are all sandboxes that it tells of, also those that never came to life.
func (h *Host) reread(ctx context.Context) (orphans []orphan, half []*box, known map[sandbox.ID]bool, err error) {
	known = map[sandbox.ID]bool{}
	var mu sync.Mutex
	var g errgroup.Group
	g.SetLimit(runtime.GOMAXPROCS(0))
	for _, t := range h.deps.Log.Trajectories() {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error {
			if t.ID.Key == "" {
				return h.rereadJob(ctx, t.ID)
			}
			if isCalls(t.ID) {
				h.rereadCalls(t.ID)
				return nil
			}
			b, st, err := h.rereadBox(ctx, t.ID)
			if err == nil && st != nil {
				mu.Lock()
				maps.Copy(known, st.ids)
				mu.Unlock()
			}
			if err != nil || b == nil {
				return err
			}
			h.adopt(b)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case st.state.Ended():
			case st.state == sandbox.Creating || st.handle == nil:
				half = append(half, b)
			default:
				orphans = append(orphans, orphan{b, st, h.deps.Backends[b.spec.Backend]})
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, nil, nil, err
	}
	return orphans, half, known, ctx.Err()
}

// rereadBox makes a box of a trajectory; nil where there is no sandbox to speak of. The story is nil where the log does not know one.
func (h *Host) rereadBox(ctx context.Context, id trajectory.ID) (*box, *story, error) {
	st, err := h.tell(ctx, id, lifeStory, 0)
	p := h.passageOf(id)
	if err == nil && !st.void && (!st.state.Ended() || st.restored(h.cfg.ID) || p != nil) {
		st, err = h.tell(ctx, id, wholeStory, 0)
	}
	switch {
	case err != nil:
		return nil, nil, err
	case st.create == nil:
		h.log.Error("a trajectory has lost its create record", "trajectory", id)
		return nil, nil, nil
	case st.void:
		return nil, st, nil
	case p != nil && !p.arrived(st.move):
		return nil, st, h.rereadPassage(ctx, id, p)
	case st.id.Host() != h.cfg.ID && st.foreign == 0: // a copy of a lost host's records that was broken off
		h.log.Warn("remove the half copy of a lost host's records", "trajectory", id)
		return nil, st, h.deps.Log.Remove(ctx, id)
	}
	b, err := h.retell(id, st)
	if err != nil {
		h.log.Error("a trajectory can't be taken back", "trajectory", id, "err", err)
		return nil, nil, nil
	}
	return b, st, nil
}

func (h *Host) rereadJob(ctx context.Context, id trajectory.ID) error {
	recs, _, err := h.deps.Log.Read(ctx, id, trajectory.Query{})
	if err != nil && !errors.Is(err, sandbox.ErrLost) {
		return fmt.Errorf("read job %s: %w", id.Job, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	j := h.jobOf(scoped{id.Project, id.Job})
	j.recorded = true
	for _, r := range recs {
		_, m, err := decode(r.Payload)
		switch m := m.(type) {
		case *dsecv1.Job:
			j.lease, j.retention = time.Duration(m.GetLeaseMs())*time.Millisecond, time.Duration(m.GetRetentionMs())*time.Millisecond
			j.action, j.class = sandbox.EndAction(m.GetOnLeaseEnd()), sandbox.StepClass(m.GetRestore())
		case *dsecv1.LogRecord:
			if m.GetKind() == "expired" {
				j.expired = rpc.Time(m.GetTime())
			}
		default:
			h.log.Error("read a job's record", "job", id.Job, "seq", r.Seq, "err", err)
		}
		if j.last.Before(r.Wall) {
			j.last = r.Wall
		}
	}
	return nil
}

// jobOf finds or makes a job; mu is held.
func (h *Host) jobOf(n scoped) *job {
	j := h.jobs[n]
	if j == nil {
		j = &job{project: n.project, name: n.name}
		h.jobs[n] = j
	}
	return j
}

// adopt puts a box of the log into the maps.
func (h *Host) adopt(b *box) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.boxes[b.id], h.keys[b.traj] = b, b
	j := h.jobOf(scoped{b.spec.Project, b.spec.Job})
	for e := b.prev; e != nil; e = e.prev {
		h.boxes[e.id] = e
		j.ended++
	}
	if b.state.Ended() {
		if j.last.Before(b.over) {
			j.last = b.over
		}
		j.ended++
		return
	}
	j.living++
	h.alive[b.id] = b
	if b.state == sandbox.Creating {
		h.creating++
	}
	if b.spec.Name != "" {
		h.names[scoped{b.spec.Project, b.spec.Name}] = b
	}
}

// takeBack asks the backends for the sandboxes that lived. Events come from then on.
func (h *Host) takeBack(ctx context.Context, orphans []orphan) (map[sandbox.ID]bool, error) {
	var mu sync.Mutex
	living := map[sandbox.ID]bool{}
	var g errgroup.Group
	g.SetLimit(16)
	for _, o := range orphans {
		g.Go(func() error {
			if err := h.prepare(o); err != nil {
				return err
			}
			inst, err := h.reclaim(ctx, o)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				h.lost(o, err)
				return nil
			}
			o.b.mu.Lock()
			o.b.inst = inst
			if n, ok := inst.(interface{ Notes() map[string]string }); ok {
				o.b.notes = n.Notes()
			}
			o.b.mu.Unlock()
			mu.Lock()
			living[o.b.id] = true
			mu.Unlock()
			return nil
		})
	}
	return living, g.Wait()
}

// prepare sets what events are compared with.
func (h *Host) prepare(o orphan) error {
	o.st.left = nil
	for _, s := range o.st.steps {
		if !s.ended() {
			o.st.left = append(o.st.left, s)
		}
		if s.act != tagCommand {
			continue
		}
		for _, stream := range bothStreams {
			ss, err := h.deps.Log.StreamState(o.b.traj, s.stream(), stream)
			if err != nil {
				return fmt.Errorf("state of the output of %s: %w", s.id, err)
			}
			s.next[stream] = ss.End
		}
		if s.ended() {
			continue
		}
		o.b.active++
	}
	return nil
}

func (h *Host) reclaim(ctx context.Context, o orphan) (sandbox.Instance, error) {
	if o.be == nil {
		return nil, fmt.Errorf("recover %s: this host has no backend %s any more: %w", o.b.id, o.b.spec.Backend, sandbox.ErrLost)
	}
	var err error
	for pause := 100 * time.Millisecond; pause < 2*time.Second; pause *= 4 {
		var inst sandbox.Instance
		actx, cancel := context.WithTimeout(ctx, actWait)
		inst, err = o.be.Recover(actx, o.b.id, o.b.spec, o.st.handle, (*sink)(o.b))
		cancel()
		if err == nil || errors.Is(err, sandbox.ErrLost) || ctx.Err() != nil {
			return inst, err
		}
		h.log.Error("recover a sandbox, will try again", "sandbox", o.b.id, "err", err)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
	return nil, err
}

// lost ends a sandbox that did not outlive the last host.
func (h *Host) lost(o orphan, err error) {
	c := sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "keeper_lost", Detail: err.Error()}
	if o.st.boot != "" && o.st.boot != bootID() {
		c.Reason = "host_lost"
	}
	o.b.mu.Lock()
	if o.b.state == sandbox.Stopping || o.b.ending {
		c = o.b.cause // its end had begun; nothing is lost by that
	}
	o.b.state, o.b.ending, o.b.cause, o.b.inst = sandbox.Stopping, true, c, nil
	o.b.mu.Unlock()
}

// settle brings a sandbox that was taken back into a state of its own: steps are known or void, turns are finished.
func (h *Host) settle(o orphan) {
	b := o.b
	b.mu.Lock()
	inst, stopping := b.inst, b.state == sandbox.Stopping
	if stopping {
		b.ending = true
	}
	b.mu.Unlock()
	if stopping {
		h.unknown(o)
		h.goes(func() { h.finish(b) })
		return
	}
	h.settleLiving(o, inst)
}

// settleLiving is settle for one that lives. Calls may have come already, so it leaves alone what the log did not tell of.
func (h *Host) settleLiving(o orphan, inst sandbox.Instance) {
	b := o.b
	h.settleSteps(o, inst)
	h.settleSessions(o, inst)
	b.mu.Lock()
	ending, state, level := b.ending, b.state, b.level
	if !ending {
		b.arm()
	}
	b.mu.Unlock()
	if ending {
		return // an event was faster
	}
	if err := b.armBackend(); err != nil {
		h.log.Warn("arm the deadline in the backend", "sandbox", b.id, "err", err)
	}
	if state != o.st.state {
		state = "" // a turn that a call has begun
	}
	var err error
	switch state {
	case sandbox.Pausing:
		err = b.turn(sandbox.Pausing, sandbox.Paused, sandbox.Running, level, "recovered", func(ctx context.Context) error { return inst.Pause(ctx, level) })
	case sandbox.Resuming:
		err = b.turn(sandbox.Resuming, sandbox.Running, sandbox.Paused, level, "recovered", inst.Resume)
	}
	if err != nil {
		h.log.Error("finish a turn of the last host", "sandbox", b.id, "err", err)
	}
	h.settleEntry(b)
}

// settleEntry starts an entrypoint that was not started, and ends the sandbox of one that has ended.
func (h *Host) settleEntry(b *box) {
	if len(b.spec.Entry) == 0 {
		return
	}
	b.mu.Lock()
	s := b.steps[entrypoint]
	ended := s != nil && s.ended()
	var o sandbox.Outcome
	if ended {
		o = s.outcome
	}
	b.mu.Unlock()
	switch {
	case s == nil:
		h.goes(func() { h.startEntry(b) })
	case ended:
		b.entryEnded(o)
	}
}

// unknown marks the steps without an end that are no commands: whether they were done died with the last host.
func (h *Host) unknown(o orphan) {
	for _, s := range o.st.left {
		o.b.mu.Lock()
		open := !s.ended() && s.act != tagCommand
		o.b.mu.Unlock()
		if !open {
			continue
		}
		_, err := o.b.endStep(s, &dsecv1.LogRecord{Outcome: &dsecv1.Outcome{Kind: string(sandbox.Unknown)}}, nil, nil)
		if err != nil {
			h.log.Error("record an unknown end", "sandbox", o.b.id, "step", s.id, "err", err)
		}
	}
}

func (h *Host) settleSteps(o orphan, inst sandbox.Instance) {
	h.unknown(o)
	b := o.b
	b.mu.Lock()
	var open []*step
	for _, s := range o.st.left {
		if !s.ended() && s.act == tagCommand {
			open = append(open, s)
		}
	}
	b.mu.Unlock()
	for _, s := range open {
		ctx, cancel := h.bounded(actWait)
		known, err := inst.Known(ctx, s.id)
		cancel()
		switch {
		case err != nil:
			b.mu.Lock()
			if !s.ended() {
				s.state, s.doubt = beginning, true
			}
			b.mu.Unlock()
			h.goes(func() { b.resolve(s, inst, err) })
		case !known:
			if err := b.void(s, nil); err != nil {
				h.log.Error("record a step that was never started", "sandbox", b.id, "step", s.id, "err", err)
			}
			b.mu.Lock()
			b.rest()
			b.mu.Unlock()
		}
	}
}

// settleSessions closes sessions that were asked for and never told open.
func (h *Host) settleSessions(o orphan, inst sandbox.Instance) {
	for name := range o.st.loose {
		ctx, cancel := h.bounded(actWait)
		err := inst.CloseSession(ctx, name)
		cancel()
		if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			h.log.Warn("close a session of the last host", "sandbox", o.b.id, "session", name, "err", err)
		}
		if err := (*sink)(o.b).SessionEnded(h.life, name, sandbox.Outcome{Kind: sandbox.StartFailed, Error: "the host ended while it was opened"}); err != nil {
			h.log.Error("record the end of a session", "sandbox", o.b.id, "session", name, "err", err)
		}
		o.b.mu.Lock()
		delete(o.b.sessions, name)
		o.b.mu.Unlock()
	}
}

// bootID names the start of the machine: it tells a machine that was lost from a keeper that was.
var bootID = sync.OnceValue(func() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
})
