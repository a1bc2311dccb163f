package host

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/guest"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// States of a redo record.
const (
	redoStarted = "started"
	redoRunning = "running" // it had no end, and is left running
	redoEnded   = "ended"
	redoSkipped = "skipped"
)

// Verdicts of a redo record.
const (
	redoEqual       = "equal"
	redoDifferent   = "different"
	redoNotCompared = "not_compared"
)

const (
	redoLeast = time.Minute // that a step done retrace may take, or ten times what it took
	checkWait = time.Minute
)

// errDiverged ends a restore under policy strict.
var errDiverged = errors.New("a step came to something else than recorded")

// redo is a command that a restore started again. Fields are under the box's lock.
type redo struct {
	takesOver bool // its key is answered by it: the original has no end, or ended with its sandbox
	over      bool
	started   time.Time
	early     *sandbox.Outcome // its end, when that came before the restore was complete
	done      chan struct{}    // closed then; nil once the host that did it is gone
}

// hides says whether its output is not kept: the recorded output stands.
func (r *redo) hides() bool { return r != nil && !r.takesOver }

// errSealing has the backend tell an end again in a moment.
var errSealing = fmt.Errorf("a restore is being completed: %w", rpc.ErrUnavailable)

// redoEnded takes the end of a command that a restore started again; false when it ends as any other.
func (b *box) redoEnded(s *step, o sandbox.Outcome) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.redos[s.id]
	switch {
	case r == nil, r.takesOver && b.state != sandbox.Creating:
		return false, nil
	case r.early != nil || b.state != sandbox.Creating:
		return true, nil // it was told before
	case b.sealing:
		return true, errSealing
	}
	r.early = &o
	close(r.done)
	return true, nil
}

// noteRedo records what was done retrace. It need not be safer than a crash of ours: the record that completes a restore makes all before it
// as safe as itself, and without that one they count for nothing.
func (b *box) noteRedo(step string, m *dsecv1.Redo) error {
	return b.noteAgain(trajectory.Record{Kind: trajectory.KindRedo, Step: step, Payload: encode(tagRedo, m)})
}

func (b *box) noteAgain(rec trajectory.Record) error {
	rec.Epoch = b.epoch.Load()
	_, err := b.h.deps.Log.Append(b.h.life, b.traj, []trajectory.Record{rec}, sandbox.DurabilityProcess)
	if err != nil {
		return fmt.Errorf("record what was done retrace: %w", err)
	}
	return nil
}

// restoring does a plan in a new sandbox.
type restoring struct {
	h    *Host
	a    *attempt
	b    *box
	p    *plan
	o    *order
	inst sandbox.Instance
	left []string // commands that are left running
}

// redo follows the records.
func (r *restoring) redo(ctx context.Context) error {
	for i := range r.p.events {
		if err := ctx.Err(); err != nil {
			return err
		}
		e := &r.p.events[i]
		if e.d != nil && (e.d.superfluous || e.d.skip && e.what != evStart) {
			continue
		}
		rec, err := r.b.recordAt(ctx, e.seq)
		if err != nil {
			return err
		}
		switch e.what {
		case evStart:
			err = r.start(ctx, e.d, &rec)
		case evEnd:
			err = r.end(ctx, e.d, &rec)
		case evStdin:
			err = r.stdin(ctx, e.d, &rec)
		case evSignal:
			err = r.signal(ctx, e.d, &rec)
		case evSessionOpen:
			err = r.openSession(ctx, &rec)
		case evSessionClose:
			err = r.closeSession(ctx, e.name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// differs tells of a step that came to something else; under policy strict that is the end.
func (r *restoring) differs(d *deed, how string) error {
	p := d.proto()
	p.Why = how
	r.a.change(func(a *dsecv1.RestoreResponse) {
		if a.Differing++; len(a.Diverged) < maxTold {
			a.Diverged = append(a.Diverged, p)
		}
	})
	if r.o.warn {
		return nil
	}
	return fmt.Errorf("step %s: %s: %w", d.key, how, errDiverged)
}

func (r *restoring) skipped(d *deed) error {
	d.skip = true
	r.a.change(func(a *dsecv1.RestoreResponse) { a.SkippedSteps++ })
	return r.b.noteRedo(d.key, &dsecv1.Redo{Seq: int64(d.seq), State: redoSkipped})
}

// start does what is done at the record of a step's start: commands start there. Steps with a body are done at their end, where it is.
func (r *restoring) start(ctx context.Context, d *deed, rec *trajectory.Record) error {
	if d.skip {
		return r.skipped(d)
	}
	if d.class == sandbox.ClassVerify {
		done, err := r.check(ctx, d)
		if err != nil {
			return err
		}
		if done {
			return r.skipped(d)
		}
	}
	if d.act != tagCommand {
		return nil
	}
	_, m, err := decode(rec.Payload)
	q, ok := m.(*dsecv1.StartRequest)
	if err != nil || !ok {
		return fmt.Errorf("step %s: its record can't be read: %w", d.key, sandbox.ErrLost)
	}
	for i, v := range q.GetEnv() {
		if v.GetSecret() {
			q.Env[i] = r.o.reveal(v)
		}
	}
	c, err := rpc.Command(q)
	if err != nil {
		return fmt.Errorf("step %s: %w", d.key, err)
	}
	if c.Stdin, err = r.octets(rec); err != nil {
		return fmt.Errorf("step %s: its standard input: %w", d.key, err)
	}
	c.ID = d.key
	c.Fill(r.b.spec)
	again := &redo{takesOver: !d.ended, done: make(chan struct{}), started: time.Now()}
	m2 := &dsecv1.Redo{Seq: int64(d.seq), State: redoStarted, TakesOver: again.takesOver}
	if again.takesOver {
		m2.State = redoRunning
		r.left = append(r.left, d.key)
		r.a.change(func(a *dsecv1.RestoreResponse) {
			if len(a.Running) < maxTold {
				a.Running = append(a.Running, d.key)
			}
		})
	}
	if err := r.b.noteRedo(d.key, m2); err != nil {
		return err
	}
	r.b.mu.Lock()
	r.b.redos[d.key] = again
	if s := r.b.steps[d.key]; s != nil && again.takesOver {
		s.open(r.b.epoch.Load(), time.Now())
	}
	r.b.mu.Unlock()
	actx, cancel := context.WithTimeout(ctx, actWait)
	defer cancel()
	if err := r.inst.Start(actx, c); err != nil {
		return fmt.Errorf("step %s: %w", d.key, err)
	}
	r.a.change(func(a *dsecv1.RestoreResponse) { a.RepeatedSteps++ })
	return nil
}

// octets reads the input of a record whole; it has 64 MiB at most.
func (r *restoring) octets(rec *trajectory.Record) ([]byte, error) {
	if rec.Input == nil {
		return nil, nil
	}
	in, err := r.h.deps.Log.OpenInput(rec.Input)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return io.ReadAll(in)
}

// check runs the check of a step: 0 says that it need not be done retrace, 1 that it must.
func (r *restoring) check(ctx context.Context, d *deed) (done bool, err error) {
	c := &sandbox.Command{ID: sandbox.NewKey(), Argv: d.check, Timeout: checkWait}
	c.Fill(r.b.spec)
	run := &redo{done: make(chan struct{})}
	r.b.mu.Lock()
	r.b.steps[c.ID], r.b.redos[c.ID] = &step{id: c.ID, act: tagCommand, state: over}, run
	r.b.mu.Unlock()
	defer func() {
		r.b.mu.Lock()
		delete(r.b.steps, c.ID)
		delete(r.b.redos, c.ID)
		r.b.mu.Unlock()
	}()
	actx, cancel := context.WithTimeout(ctx, actWait)
	defer cancel()
	if err := r.inst.Start(actx, c); err != nil {
		return false, fmt.Errorf("check of step %s: %w", d.key, err)
	}
	o, err := r.wait(ctx, run, checkWait+actWait)
	switch {
	case err != nil:
		return false, fmt.Errorf("check of step %s: %w", d.key, err)
	case o == nil:
		return false, fmt.Errorf("check of step %s: did not end: %w", d.key, sandbox.ErrState)
	}
	r.b.traceAgain(ctx, r.inst, retrace{group: o.Group, from: time.Now()})
	switch {
	case o.Kind == sandbox.Exited && o.Code == 0:
		return true, nil
	case o.Kind == sandbox.Exited && o.Code == 1:
		return false, nil
	}
	return false, fmt.Errorf("check of step %s: %s; it decides by 0 (need not be done retrace) or 1 (must be): say what is to be done by skip or repeat: %w", d.key, describe(*o), sandbox.ErrState)
}

// wait waits for the end of a command that was started again; nil when it does not end in time.
func (r *restoring) wait(ctx context.Context, again *redo, limit time.Duration) (*sandbox.Outcome, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-again.done:
	case <-timer.C:
		return nil, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	return again.early, nil
}

// end does what is done at the record of a step's end.
func (r *restoring) end(ctx context.Context, d *deed, rec *trajectory.Record) error {
	if d.act != tagCommand {
		return r.change(ctx, d, rec)
	}
	_, m, err := decode(rec.Payload)
	var was *dsecv1.Outcome
	switch m := m.(type) {
	case *dsecv1.Outcome:
		was = m
	case *dsecv1.Redo: // of a restore before: the step had no other end
		was = m.GetOutcome()
	}
	if err != nil || was == nil {
		return fmt.Errorf("step %s: the record of its end can't be read: %w", d.key, sandbox.ErrLost)
	}
	r.b.mu.Lock()
	run := r.b.redos[d.key]
	r.b.mu.Unlock()
	if run == nil {
		return nil // of a start that lies before what is restored from
	}
	if was.GetKind() == string(sandbox.Killed) && d.session != "" { // by the end of its session, which is told behind it
		if err := r.closeSession(ctx, d.session); err != nil {
			return err
		}
	}
	took := was.GetEnded().AsTime().Sub(was.GetStarted().AsTime())
	limit := max(redoLeast, 10*took)
	o, err := r.wait(ctx, run, limit)
	if err != nil {
		return err
	}
	if o == nil {
		if err := r.differs(d, fmt.Sprintf("did not end within %v, it took %v", limit, took.Round(time.Millisecond))); err != nil {
			return err
		}
		actx, cancel := context.WithTimeout(ctx, actWait)
		err := r.inst.Signal(actx, d.key, 9)
		cancel()
		if err != nil {
			return fmt.Errorf("step %s: end it: %w", d.key, err)
		}
		if o, err = r.wait(ctx, run, actWait); err != nil || o == nil {
			return errors.Join(fmt.Errorf("step %s: does not end: %w", d.key, sandbox.ErrState), err)
		}
	}
	r.b.traceAgain(ctx, r.inst, r.traced(d, run, o.Group))
	verdict, how := compareOutcomes(was, rpc.OutcomeProto(*o))
	if err := r.b.noteRedo(d.key, &dsecv1.Redo{Seq: int64(d.seq), State: redoEnded, Outcome: rpc.OutcomeProto(*o), Verdict: verdict, Differs: how}); err != nil {
		return err
	}
	r.b.mu.Lock()
	run.over = true
	r.b.mu.Unlock()
	if verdict == redoDifferent {
		return r.differs(d, how)
	}
	return nil
}

// traced is how the trace of a command that was done retrace begins.
func (r *restoring) traced(d *deed, run *redo, group string) retrace {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	e := retrace{step: d.key, number: d.number, seq: int64(d.seq), group: group, from: run.started}
	for _, o := range r.b.redos {
		// The other began before this one ended, and has not ended or did so after its start.
		e.shared = e.shared || o != run && o.done != nil && (o.early == nil || o.early.Ended.After(run.started))
	}
	return e
}

// compareOutcomes compares how a command ended and what it wrote.
func compareOutcomes(was, is *dsecv1.Outcome) (verdict, how string) {
	if k := sandbox.OutcomeKind(was.GetKind()); k == sandbox.Unknown || k == sandbox.Interrupted {
		return redoNotCompared, ""
	}
	if was.GetKind() != is.GetKind() || was.GetCode() != is.GetCode() || was.GetSignal() != is.GetSignal() {
		return redoDifferent, fmt.Sprintf("%s, now %s", describe(rpc.Outcome(was)), describe(rpc.Outcome(is)))
	}
	if k := sandbox.OutcomeKind(was.GetKind()); k != sandbox.Exited && k != sandbox.StartFailed && k != sandbox.SessionEnded {
		return redoNotCompared, "" // what it wrote before it was ended is a matter of time
	}
	for _, s := range []struct {
		name    string
		was, is *dsecv1.StreamEnd
	}{{"stdout", was.GetStdout(), is.GetStdout()}, {"stderr", was.GetStderr(), is.GetStderr()}} {
		switch {
		case s.was.GetTotal() != s.is.GetTotal():
			return redoDifferent, fmt.Sprintf("%s: %d octets, now %d", s.name, s.was.GetTotal(), s.is.GetTotal())
		case s.was.GetSha256() != s.is.GetSha256() && s.was.GetSha256() != "":
			return redoDifferent, fmt.Sprintf("%s: SHA-256 %s, now %s", s.name, s.was.GetSha256(), s.is.GetSha256())
		}
	}
	return redoEqual, ""
}

func (r *restoring) stdin(ctx context.Context, d *deed, rec *trajectory.Record) error {
	data, err := r.octets(rec)
	if err != nil {
		return fmt.Errorf("step %s: its standard input: %w", d.key, err)
	}
	_, m, err := decode(rec.Payload)
	q, ok := m.(*dsecv1.WriteStdinRequest)
	if err != nil || !ok {
		return fmt.Errorf("step %s: the record of its standard input can't be read: %w", d.key, sandbox.ErrLost)
	}
	actx, cancel := context.WithTimeout(ctx, fileWait)
	defer cancel()
	_, err = r.inst.Stdin(actx, d.key, rec.Offset, data, q.GetEof())
	if err != nil && !errors.Is(err, sandbox.ErrState) { // one that has ended before it read all is told by its end
		return fmt.Errorf("step %s: its standard input: %w", d.key, err)
	}
	return nil
}

func (r *restoring) signal(ctx context.Context, d *deed, rec *trajectory.Record) error {
	_, m, err := decode(rec.Payload)
	q, ok := m.(*dsecv1.SignalRequest)
	if err != nil || !ok {
		return fmt.Errorf("step %s: the record of a signal can't be read: %w", d.key, sandbox.ErrLost)
	}
	actx, cancel := context.WithTimeout(ctx, actWait)
	defer cancel()
	err = r.inst.Signal(actx, d.key, int(q.GetSignal()))
	if err != nil && !errors.Is(err, sandbox.ErrState) && !errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("step %s: signal: %w", d.key, err)
	}
	return nil
}

// openSession opens a session again under its name.
func (r *restoring) openSession(ctx context.Context, rec *trajectory.Record) error {
	_, m, err := decode(rec.Payload)
	q, ok := m.(*dsecv1.OpenSessionRequest)
	if err != nil || !ok {
		return fmt.Errorf("session %s: its record can't be read: %w", rec.Step, sandbox.ErrLost)
	}
	note := trajectory.Record{Kind: trajectory.KindRedo, Step: rec.Step, Payload: rec.Payload}
	if err := r.b.noteAgain(note); err != nil {
		return err
	}
	for i, v := range q.GetEnv() {
		if v.GetSecret() {
			q.Env[i] = r.o.reveal(v)
		}
	}
	s, _, err := rpc.Session(q)
	if err != nil {
		return fmt.Errorf("session %s: %w", rec.Step, err)
	}
	s.Name = rec.Step
	r.b.mu.Lock()
	r.b.sessions[s.Name] = &session{name: s.Name, shell: s.Shell, user: s.User, open: true, opened: time.Now()}
	r.b.mu.Unlock()
	actx, cancel := context.WithTimeout(ctx, actWait)
	defer cancel()
	if err := r.inst.OpenSession(actx, s); err != nil {
		return fmt.Errorf("session %s: open it again: %w", s.Name, err)
	}
	note.Payload = encode(tagEvent, &dsecv1.LogRecord{Kind: "session_opened"})
	return r.b.noteAgain(note)
}

// closeSession closes a session and waits, bounded, until it is told closed.
func (r *restoring) closeSession(ctx context.Context, name string) error {
	r.b.mu.Lock()
	s := r.b.sessions[name]
	open := s != nil && s.open
	r.b.mu.Unlock()
	if !open {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, closeWait)
	defer cancel()
	if err := r.inst.CloseSession(wait, name); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("session %s: close it: %w", name, err)
	}
	r.b.mu.Lock()
	for s.open {
		if r.b.waitChange(wait) != nil {
			return ctx.Err()
		}
		r.b.mu.Lock()
	}
	r.b.mu.Unlock()
	return nil
}

// change does a change of files again.
func (r *restoring) change(ctx context.Context, d *deed, rec *trajectory.Record) error {
	_, m, err := decode(rec.Payload)
	was, ok := m.(*dsecv1.LogRecord)
	if err != nil || !ok {
		return fmt.Errorf("step %s: the record of its end can't be read: %w", d.key, sandbox.ErrLost)
	}
	start, err := r.b.recordAt(ctx, d.seq)
	if err != nil {
		return err
	}
	actx, cancel := context.WithTimeout(ctx, max(fileWait, redoLeast))
	defer cancel()
	began := time.Now()
	err = r.changeFiles(actx, d, &start, rec, was)
	r.b.traceAgain(ctx, r.inst, retrace{step: d.key, number: d.number, seq: int64(d.seq), from: began})
	if err != nil && (unsure(err) || errors.Is(err, rpc.ErrUnavailable)) {
		return fmt.Errorf("step %s: %w", d.key, err)
	}
	code := ""
	if err != nil {
		code = rpc.CodeName(err)
	}
	verdict, how := redoEqual, ""
	switch {
	case d.unsure:
		verdict = redoNotCompared
	case code != was.GetKind():
		verdict, how = redoDifferent, fmt.Sprintf("came to %s, now %s: %v", cmp.Or(was.GetKind(), "ok"), cmp.Or(code, "ok"), err)
	}
	r.a.change(func(a *dsecv1.RestoreResponse) { a.RepeatedSteps++ })
	if err := r.b.noteRedo(d.key, &dsecv1.Redo{Seq: int64(d.seq), State: redoEnded, Outcome: &dsecv1.Outcome{Kind: string(sandbox.Exited), Error: code}, Verdict: verdict, Differs: text(how)}); err != nil {
		return err
	}
	if verdict == redoDifferent {
		return r.differs(d, how)
	}
	return nil
}

func (r *restoring) changeFiles(ctx context.Context, d *deed, start, end *trajectory.Record, was *dsecv1.LogRecord) error {
	_, m, err := decode(start.Payload)
	if err != nil {
		return err
	}
	var place *dsecv1.Path
	if q, ok := m.(interface{ GetAt() *dsecv1.Path }); ok {
		place = q.GetAt()
	} else if q, ok := m.(*dsecv1.MoveRequest); ok {
		place = q.GetFrom()
	}
	path, err := at(place)
	if err != nil {
		return err
	}
	f, release, err := r.b.fileServer(ctx, r.inst, place.GetUser())
	if err != nil {
		return err
	}
	defer release()
	var body io.Reader = bytes.NewReader(nil)
	if end.Input != nil {
		in, err := r.h.deps.Log.OpenInput(end.Input)
		if err != nil {
			return err
		}
		defer in.Close()
		body = in
	}
	switch q := m.(type) {
	case *dsecv1.WriteRequest:
		h := writeHeader(path, q)
		if h.Append && !d.unsure {
			h.StartOffset = was.GetOffset() // where it began
		}
		if d.unsure {
			h.Size = -1
		}
		_, err = f.Write(ctx, h, body)
	case *dsecv1.UploadRequest:
		_, err = f.Upload(ctx, guest.UploadHeader{Path: path, Parents: q.GetParents(), KeepOwner: q.GetKeepOwner()}, body)
	case *dsecv1.MakeDirRequest:
		_, err = f.MakeDir(ctx, path, q.GetMode(), q.GetParents())
	case *dsecv1.MoveRequest:
		var to string
		if to, err = rpc.Octets("to", q.GetTo(), q.GetToRaw()); err == nil {
			err = f.Move(ctx, path, to, q.GetReplace())
		}
	case *dsecv1.RemoveRequest:
		err = f.Remove(ctx, path, q.GetRecursive(), q.GetMissingOk())
	default:
		err = fmt.Errorf("step %s: of a kind that is not known: %w", d.key, sandbox.ErrLost)
	}
	return err
}

// seal completes a restore: from its last record on the new sandbox is the trajectory's.
func (r *restoring) seal(ctx context.Context) error {
	b := r.b
	b.traceRestored(ctx, r.inst)
	b.mu.Lock()
	if b.ending {
		err := b.gone()
		b.mu.Unlock()
		return err
	}
	b.sealing = true
	var ends []string
	for _, key := range r.left {
		if b.redos[key].early != nil {
			ends = append(ends, key)
		}
	}
	b.mu.Unlock()
	for _, key := range ends {
		b.mu.Lock()
		again, s := b.redos[key], b.steps[key]
		o := *again.early
		b.mu.Unlock()
		b.traceAgain(ctx, r.inst, retrace{step: key, seq: int64(s.seq), group: o.Group, from: s.started, shared: true})
		if err := b.noteRedo(key, &dsecv1.Redo{Seq: int64(s.seq), State: redoEnded, Outcome: rpc.OutcomeProto(o), TakesOver: again.takesOver, Verdict: redoNotCompared}); err != nil {
			return err
		}
		b.mu.Lock()
		again.over = true
		s.finish(o)
		b.mu.Unlock()
	}
	last := trajectory.Record{Kind: trajectory.KindRedo, Payload: encode(tagRestored, &dsecv1.Restored{Id: r.o.id, Base: r.p.base.name(), BaseSeq: int64(r.p.base.seq), LastSeq: int64(r.p.last)})}
	if _, err := b.append(last, stateRecord(sandbox.Running, "", sandbox.Cause{}, r.inst.Handle())); err != nil {
		return fmt.Errorf("record that it is complete: %w", err)
	}
	b.mu.Lock()
	for _, key := range r.left {
		if !b.redos[key].over {
			b.active++
		}
	}
	b.mu.Unlock()
	b.whole.Store(true)
	r.h.raise(b, r.inst)
	b.mu.Lock()
	s := b.steps[entrypoint]
	ended := len(b.spec.Entry) > 0 && s != nil && s.ended() && (b.redos[entrypoint] == nil || b.redos[entrypoint].over)
	var o sandbox.Outcome
	if ended {
		o = s.outcome
	}
	b.mu.Unlock()
	if ended {
		b.entryEnded(o)
	}
	return nil
}
