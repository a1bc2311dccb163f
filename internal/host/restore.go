package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// A restore makes a sandbox that is gone again, under a new ID and the next epoch of its trajectory. Its records, in order: the create of
// the new sandbox (a state record), its handle in state creating, a redo record for what is done again, and, when all is done, `restored`
// and the state running. Until that last one the attempt counts for nothing: a host that dies in it, a step that came to something else
// under policy strict, or any failure leaves a void, and the trajectory is that of the sandbox before. Nobody can use the new sandbox
// before it is complete, so there is never a second living one.

// Bounds of a restore.
const (
	answerKept = 10 * time.Minute // the result of a call is remembered for its repetition
	maxAnswers = 100_000          // steps that a caller may answer for
	maxTold    = 1000             // steps of one kind that an answer names
	maxSecrets = 1024
	every      = "*" // in skip and repeat: all that is asked about
)

// attempt is one call of restore that was begun.
type attempt struct {
	id   string
	done chan struct{}

	mu   sync.Mutex
	resp *dsecv1.RestoreResponse
	err  error
	over time.Time
}

// change changes what is answered.
func (a *attempt) change(f func(r *dsecv1.RestoreResponse)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f(a.resp)
}

func (a *attempt) answer() (*dsecv1.RestoreResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil {
		return nil, a.err
	}
	return proto.CloneOf(a.resp), nil
}

// order is a request that was read.
type order struct {
	id      string
	warn    bool
	accept  bool
	skip    map[string]bool
	repeat  map[string]bool
	secrets map[string]string
	wait    time.Duration
}

func readOrder(q *dsecv1.RestoreRequest) (*order, error) {
	o := &order{id: cmp.Or(q.GetId(), sandbox.NewKey()), accept: q.GetAcceptTailLoss(), skip: map[string]bool{}, repeat: map[string]bool{}, secrets: map[string]string{}}
	if err := sandbox.CheckKey("id", o.id); err != nil {
		return nil, err
	}
	switch q.GetPolicy() {
	case "", "strict":
	case "warn":
		o.warn = true
	default:
		return nil, fmt.Errorf("policy %.40q: want strict or warn: %w", q.GetPolicy(), sandbox.ErrInvalid)
	}
	if n := len(q.GetSkip()) + len(q.GetRepeat()); n > maxAnswers {
		return nil, fmt.Errorf("skip and repeat: %d steps, at most %d: %w", n, maxAnswers, sandbox.ErrInvalid)
	}
	for _, k := range q.GetSkip() {
		o.skip[k] = true
	}
	for _, k := range q.GetRepeat() {
		if o.skip[k] {
			return nil, fmt.Errorf("step %.200q: stands in skip and in repeat: %w", k, sandbox.ErrInvalid)
		}
		o.repeat[k] = true
	}
	if n := len(q.GetSecrets()); n > maxSecrets {
		return nil, fmt.Errorf("secrets: %d, at most %d: %w", n, maxSecrets, sandbox.ErrInvalid)
	}
	for _, v := range q.GetSecrets() {
		o.secrets[nameOf(v)] = v.GetValue() + string(v.GetValueRaw())
	}
	wait, err := longPoll(q.GetWaitMs(), sandbox.MaxLongPoll)
	o.wait = wait
	return o, err
}

func nameOf(v *dsecv1.EnvVar) string { return v.GetName() + string(v.GetNameRaw()) }

// successor is the sandbox that went on with this one's trajectory; nil while none has.
func (b *box) successor() *box {
	if n := b.next.Load(); n != nil && n.whole.Load() {
		return n
	}
	return nil
}

// latest is the last sandbox of the trajectory.
func (b *box) latest() *box {
	for n := b.successor(); n != nil; n = b.successor() {
		b = n
	}
	return b
}

// end is the seq at which the records of another sandbox begin; 0 while there is none.
func (b *box) end() uint64 {
	n := b.successor()
	if n == nil {
		return 0
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.seq
}

// chains adds to sandboxes those whose trajectories they went on with.
func chains(boxes []*box) []*box {
	seen := map[*box]bool{}
	var all []*box
	for _, b := range boxes {
		for ; b != nil && !seen[b]; b = b.prev {
			seen[b] = true
			all = append(all, b)
		}
	}
	return all
}

// restore makes the sandbox of a trajectory again, joins a call that does, or answers what it came to.
func (h *Host) restore(ctx context.Context, hr *dsecv1.HostRestoreRequest) (*dsecv1.RestoreResponse, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	q := hr.GetRequest()
	o, err := readOrder(q)
	if err != nil {
		return nil, fmt.Errorf("restore: %w", err)
	}
	b, err := h.find1(ctx, q)
	if errors.Is(err, sandbox.ErrNotFound) && hr.GetLostHost() != "" {
		b, err = h.recallBox(ctx, hr)
	}
	if err != nil {
		return nil, fmt.Errorf("restore: %w", err)
	}
	b = b.latest()
	b.mu.Lock()
	ending := (b.ending || b.state == sandbox.Stopping) && !b.state.Ended()
	b.mu.Unlock()
	if ending {
		soon, cancel := context.WithTimeout(ctx, o.wait)
		_ = b.waitEnd(soon) // else it is told that it is stopping
		cancel()
	}
	a, err := h.attempt(b, o)
	if err != nil {
		return nil, fmt.Errorf("restore: %w", err)
	}
	timer := time.NewTimer(o.wait)
	defer timer.Stop()
	select {
	case <-a.done:
	case <-timer.C:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return a.answer()
}

// find1 finds a sandbox of the trajectory that a restore names.
func (h *Host) find1(ctx context.Context, q *dsecv1.RestoreRequest) (*box, error) {
	switch {
	case (q.GetSandbox() == "") == (q.GetKey() == ""):
		return nil, fmt.Errorf("give a sandbox's id, or job and key: %w", sandbox.ErrInvalid)
	case q.GetSandbox() != "":
		return h.get(ctx, q.GetSandbox())
	}
	id := trajectory.ID{Project: project(ctx), Job: jobName(q.GetJob()), Key: q.GetKey()}
	h.mu.Lock()
	defer h.mu.Unlock()
	if j := h.jobs[scoped{id.Project, id.Job}]; j != nil && !j.expired.IsZero() {
		return nil, fmt.Errorf("key %.60q: job %s has expired, its records are gone: %w", id.Key, id.Job, sandbox.ErrState)
	}
	if b := h.keys[id]; b != nil {
		return b, nil
	}
	return nil, fmt.Errorf("key %.60q in job %.60q: %w", id.Key, id.Job, sandbox.ErrNotFound)
}

// attempt begins a restore, or finds the one with that ID.
func (h *Host) attempt(b *box, o *order) (*attempt, error) {
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, a := range h.restores {
		a.mu.Lock()
		if !a.over.IsZero() && now.Sub(a.over) > answerKept {
			delete(h.restores, id)
		}
		a.mu.Unlock()
	}
	if a := h.restores[b.traj]; a != nil {
		a.mu.Lock()
		over := !a.over.IsZero()
		a.mu.Unlock()
		switch {
		case a.id == o.id:
			return a, nil
		case !over:
			return nil, fmt.Errorf("sandbox %s: is being restored by call %s; join it by that id: %w", b.id, a.id, sandbox.ErrState)
		}
	}
	b.mu.Lock()
	state, asked := b.state, b.ending
	b.mu.Unlock()
	for e := b; e != nil; e = e.prev {
		if e.call != o.id { // no order is without an ID
			continue
		}
		// The host that gave its answer is gone. What it made is the answer, also where that has ended since: nothing is made twice.
		a := &attempt{id: o.id, done: make(chan struct{}), resp: &dsecv1.RestoreResponse{Id: o.id, State: "restored", Epoch: int64(e.epoch.Load())}}
		go func() { // the lock of the host is held
			a.change(func(r *dsecv1.RestoreResponse) { r.Sandbox = e.proto() })
			close(a.done)
		}()
		return a, nil
	}
	if !state.Ended() {
		if asked {
			state = sandbox.Stopping
		}
		return nil, fmt.Errorf("sandbox %s (key %s of job %s) lives, it is %s: only one that is gone is restored: %w", b.id, b.spec.Key, b.spec.Job, state, sandbox.ErrState)
	}
	if h.closed {
		return nil, fmt.Errorf("host is shutting down: %w", rpc.ErrUnavailable)
	}
	a := &attempt{id: o.id, done: make(chan struct{}), resp: &dsecv1.RestoreResponse{Id: o.id, State: "restoring"}}
	h.restores[b.traj] = a
	h.wg.Go(func() {
		err := h.carry(a, b, o)
		a.mu.Lock()
		if a.over = time.Now(); err != nil {
			a.err = fmt.Errorf("restore %s: %w", b.id, err)
		}
		a.mu.Unlock()
		close(a.done)
		if err != nil && h.life.Err() == nil {
			h.log.Warn("restore", "sandbox", b.id, "err", err)
		}
	})
	return a, nil
}

// carry carries a restore through. What it came to stands in the attempt's answer.
func (h *Host) carry(a *attempt, old *box, o *order) error {
	ctx, cancel := context.WithCancel(h.life)
	defer cancel()
	p, err := h.plan(ctx, old, o)
	if err != nil {
		return err
	}
	a.change(func(r *dsecv1.RestoreResponse) {
		r.Base, r.LastSeq, r.LastTime = p.base.name(), int64(p.last), rpc.Timestamp(p.lastTime)
		r.Steps = int64(p.todo())
		r.Notes = p.notes
	})
	if h.mayLack(old) && !o.accept {
		return fmt.Errorf("its durability is %s, so records behind %d (%s), the last one that is there, may be lost with its host; accept_tail_loss goes on without them: %w",
			old.spec.Durability, p.last, p.lastTime.UTC().Format(time.RFC3339), sandbox.ErrState)
	}
	if asks := p.asks(); len(asks) > 0 || len(p.missing) > 0 {
		a.change(func(r *dsecv1.RestoreResponse) {
			r.State, r.Asks, r.Asked, r.Secrets = "asks", asks[:min(len(asks), maxTold)], int64(len(asks)), p.missing
		})
		return nil
	}
	b, req, be, err := h.heir(ctx, old, p, o)
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.abort = cancel
	b.mu.Unlock()
	r := &restoring{h: h, a: a, b: b, p: p, o: o}
	inst, err := h.bear(ctx, b, be, req, sandbox.Creating)
	if err == nil {
		r.inst = inst
		if err = r.redo(ctx); err == nil {
			err = r.seal(ctx)
		}
		if err != nil && h.life.Err() == nil {
			b.closeFiles()
			clean, stop := context.WithTimeout(context.WithoutCancel(ctx), destroyWait)
			err = errors.Join(err, inst.Destroy(clean))
			stop()
		}
	}
	if err != nil {
		b.mu.Lock()
		if b.ending {
			err = errors.Join(fmt.Errorf("it was stopped meanwhile (%s %s): %w", b.cause.Class, b.cause.Reason, sandbox.ErrState), err)
		}
		b.mu.Unlock()
		b.fail(fmt.Errorf("restore of %s: %w", old.id, err))
		if errors.Is(err, errDiverged) {
			a.change(func(r *dsecv1.RestoreResponse) { r.State = "diverged" })
			return nil
		}
		return err
	}
	a.change(func(r *dsecv1.RestoreResponse) {
		r.State, r.Sandbox, r.Epoch = "restored", b.proto(), int64(b.epoch.Load())
	})
	return nil
}

// mayLack says whether the end of what was acknowledged may be missing in the log: the host was lost, and had not promised more.
func (h *Host) mayLack(old *box) bool {
	old.mu.Lock()
	defer old.mu.Unlock()
	if old.cause.Reason != "host_lost" {
		return false
	}
	if old.foreign > 0 && old.call == "" {
		return old.spec.Durability != sandbox.DurabilityStore
	}
	return old.spec.Durability == sandbox.DurabilityProcess
}

// heir is the sandbox that is to go on in the trajectory, in the maps, with all that was asked of those before.
func (h *Host) heir(ctx context.Context, old *box, p *plan, o *order) (*box, *dsecv1.HostCreateRequest, sandbox.Backend, error) {
	req := proto.CloneOf(p.create)
	req.Spec.Layers = p.base.layers
	hash := old.sum
	for _, list := range [][]*dsecv1.EnvVar{req.Spec.GetEnv(), req.Request.GetEnv()} {
		for i, v := range list {
			if v.GetSecret() {
				list[i] = o.reveal(v)
			}
		}
	}
	if old.foreign > 0 && req.Request != nil { // its hash was made with the key of the lost host
		plain, err := rpc.CreateHash(old.spec.Project, req.Request)
		if err != nil {
			return nil, nil, nil, err
		}
		hash = h.mac("request", plain)
	}
	spec, err := rpc.Spec(req.Spec)
	if err != nil {
		return nil, nil, nil, err
	}
	spec.Lifetime = old.life
	spec.Fill()
	if err := spec.Validate(); err != nil {
		return nil, nil, nil, err
	}
	be, err := h.able(spec)
	if err != nil {
		return nil, nil, nil, err
	}
	canon := h.canonicalCreate(req, spec)
	canon.RequestHash = hash
	st, err := h.tell(ctx, old.traj, wholeStory, 0)
	if err != nil {
		return nil, nil, nil, err
	}
	if err := h.measureStreams(old.traj, st.history); err != nil {
		return nil, nil, nil, err
	}
	info, err := h.deps.Log.Stat(old.traj)
	if err != nil {
		return nil, nil, nil, err
	}
	b := &box{
		h: h, id: sandbox.NewID(h.cfg.ID), traj: old.traj, spec: spec, sum: hash, state: sandbox.Creating, life: spec.Lifetime,
		history: st.history, verdicts: st.verdicts, prev: old, call: o.id, foreign: old.foreign,
	}
	b.epoch.Store(info.Epoch + 1)
	r := h.measure()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.keys[old.traj] != old {
		return nil, nil, nil, fmt.Errorf("its records were removed meanwhile: %w", sandbox.ErrNotFound)
	}
	delete(h.keys, old.traj)
	tomb, buried := h.tombs[old.traj]
	delete(h.tombs, old.traj) // a stop of the key was of the sandbox before
	if _, err := h.claim(b, r); err != nil {
		if h.keys[old.traj] = old; buried {
			h.tombs[old.traj] = tomb
		}
		return nil, nil, nil, err
	}
	old.next.Store(b)
	return b, canon, be, nil
}

// reveal is a secret entry with the value that was given for it.
func (o *order) reveal(v *dsecv1.EnvVar) *dsecv1.EnvVar {
	out := &dsecv1.EnvVar{Name: v.GetName(), NameRaw: v.GetNameRaw(), Secret: true}
	out.Value, out.ValueRaw = rpc.Twin(o.secrets[nameOf(v)])
	return out
}

// measureStreams sets where the recorded streams of commands end.
func (h *Host) measureStreams(id trajectory.ID, hist *history) error {
	for _, s := range hist.steps {
		if s.act != tagCommand {
			continue
		}
		for _, stream := range bothStreams {
			ss, err := h.deps.Log.StreamState(id, s.stream(), stream)
			if err != nil {
				return fmt.Errorf("state of the output of %s: %w", s.id, err)
			}
			s.next[stream] = ss.End
		}
	}
	return nil
}

// The story of a trajectory that was restored.

// restoring says whether a restore was begun that is not known to be complete.
func (st *story) restoring() bool { return st.state == sandbox.Creating && len(st.before) > 0 }

// restored says whether more than the records of its life tell what a trajectory is: which calls restored it, and what came from a lost host.
func (st *story) restored(here sandbox.HostID) bool {
	for id := range st.ids {
		if len(st.ids) > 1 || id.Host() != here {
			return true
		}
	}
	return false
}

// begin takes in the create of a sandbox: the first, one after a creation that failed, or one that goes on with the trajectory.
func (st *story) begin(r *trajectory.Record, m *dsecv1.HostCreateRequest) {
	if st.create != nil && r.Epoch > st.epoch && !st.void {
		if st.restoring() {
			st.giveUp()
		}
		old := *st
		old.history, old.before, old.ids = nil, nil, nil
		*st = story{history: st.history, epoch: r.Epoch, before: append(st.before, &old), ids: st.ids, verdicts: st.verdicts, foreign: st.foreign}
	} else {
		*st = story{history: newHistory(), epoch: r.Epoch, ids: st.ids}
	}
	st.loose, st.create, st.id, st.seq, st.created, st.state = map[string]bool{}, m, sandbox.ID(r.Step), r.Seq, r.Wall, sandbox.Creating
	if st.ids == nil {
		st.ids = map[sandbox.ID]bool{}
	}
	st.ids[st.id] = true
}

// giveUp takes in that the last creation never came to anything.
func (st *story) giveUp() {
	n := len(st.before) - 1
	if n < 0 {
		st.void = true
		return
	}
	was := *st
	*st = *was.before[n]
	st.history, st.before, st.ids, st.verdicts, st.epoch = was.history, was.before[:n], was.ids, was.verdicts, was.epoch
}

// redone takes in what a complete restore did with a step.
func (st *story) redone(r *trajectory.Record, m *dsecv1.Redo) {
	s := st.steps[r.Step]
	if s == nil || m.GetState() == redoSkipped {
		return
	}
	if s.act == tagCommand {
		again := st.redos[r.Step]
		if again == nil || m.GetState() != redoEnded {
			again = &redo{takesOver: m.GetTakesOver()}
			st.redos[r.Step] = again
		}
		again.over = m.GetState() == redoEnded
	}
	if !m.GetTakesOver() {
		return
	}
	if m.GetState() != redoEnded {
		s.open(r.Epoch, r.Wall)
		return
	}
	st.end(r, m.GetOutcome(), nil)
}

// open makes a step whose end is not known one that runs again; its streams in the log are new ones.
func (s *step) open(epoch uint32, at time.Time) {
	s.state, s.outcome, s.result, s.started = working, sandbox.Outcome{}, nil, at
	s.log, s.next, s.endsAt = redoStream(s.id, epoch), [3]int64{}, [3]int64{}
}

// redoStream is the name under which the log has the streams of a command that runs again; no step key has a "~".
func redoStream(id string, epoch uint32) string { return fmt.Sprintf("%s~%d", id, epoch) }

// retellBefore makes the sandboxes that restores replaced.
func (h *Host) retellBefore(b *box, st *story) error {
	last := b
	b.whole.Store(!st.restoring() && len(st.before) > 0)
	for _, e := range slices.Backward(st.before) {
		spec, err := rpc.Spec(e.create.GetSpec())
		if err != nil {
			return err
		}
		p := &box{h: h, id: e.id, traj: b.traj, spec: spec, sum: e.create.GetRequestHash(), seq: e.seq, state: e.state, cause: e.cause, created: e.created,
			over: e.over, life: spec.Lifetime, history: newHistory(), summary: e.summary, verdicts: e.verdicts, call: e.call, foreign: e.foreign}
		p.epoch.Store(e.epoch)
		p.whole.Store(e.call != "")
		p.next.Store(last)
		last.prev, last = p, p
	}
	return nil
}

// sameSecretly compares requests of which one was recorded by another host, whose key for secrets is not here: their values are left out.
func sameSecretly(was, is proto.Message) string {
	was, is = proto.Clone(was), proto.Clone(is)
	for _, m := range []proto.Message{was, is} {
		if q, ok := m.(interface{ GetEnv() []*dsecv1.EnvVar }); ok {
			for _, v := range q.GetEnv() {
				if v.GetSecret() {
					v.Value, v.ValueRaw = "", nil
				}
			}
		}
	}
	return difference(was, is)
}

func sortedNames(set map[string]bool) []string { return slices.Sorted(maps.Keys(set)) }

// hashed says whether the value of a secret entry is the keyed hash that a log holds.
func hashed(value string) bool { return strings.HasPrefix(value, "hmac-sha256:") }
