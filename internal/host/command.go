package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// step is something that was asked of a sandbox and is done once: a command, a change of files, a snapshot, a signal with a key.
// Fields from changed on are under the box's lock.
type step struct {
	id  string
	act tag
	sum [32]byte // of the canonical request and its input

	changed bell
	seq     uint64 // of its start; 0 while it is being recorded
	state   stepState
	err     error // why it was not begun: the step is in no map then
	outcome sandbox.Outcome
	result  *dsecv1.LogRecord // what else a resend answers; nil for commands

	// Of commands.
	started  time.Time
	session  string
	terminal bool
	next     [3]int64 // offset behind the last octet in the log, by stream
	endsAt   [3]int64 // next when the command ended: what follows is late
	stdin    int64    // octets recorded
	stdinEOF bool
	taken    int64  // octets that the backend took
	log      string // name of its streams in the log where that is not its ID
	doubt    bool   // the backend could not say whether it runs
	ending   bool   // its end, told, is being recorded
	told     sandbox.Outcome
	endNoted bool // its end is in the log, and not yet in the store
	loose    bool // the record of its start may not be on the disk
}

// maxSteps bounds what one sandbox can make the host remember: 100 MiB or so.
const maxSteps = 1 << 18

type stepState uint8

const (
	beginning stepState = iota // being recorded or started
	working
	over
	voided
)

func (s *step) ended() bool { return s.state == over }

// stream is the name of its streams in the log.
func (s *step) stream() string { return cmp.Or(s.log, s.id) }

// finish sets the outcome and wakes who waits; the box's lock is held.
func (s *step) finish(o sandbox.Outcome) {
	s.state, s.outcome, s.doubt = over, o, false
	s.endsAt = s.next
	s.changed.ring()
}

// cut describes a stream of a command that was ended by us: what is in the log is all there is.
func (s *step) cut(stream sandbox.StreamName) sandbox.StreamEnd {
	return sandbox.StreamEnd{Total: s.next[stream], Head: s.next[stream]}
}

func endRecord(id string, o sandbox.Outcome) trajectory.Record {
	return trajectory.Record{Kind: trajectory.KindStepEnd, Step: id, Payload: encode(tagOutcome, rpc.OutcomeProto(o))}
}

// canonicalCommand is what the log keeps of a command: all that decides what it does, its stdin apart.
func (h *Host) canonicalCommand(c *sandbox.Command) *dsecv1.StartRequest {
	p := rpc.StartRequest(c)
	p.Id, p.Stdin = "", nil
	h.hideSecrets(p.Env)
	return p
}

// classless is the payload of a command without what it says of a restore: that is no part of what a key stands for. It is cleared in
// the request.
func classless(payload []byte, q *dsecv1.StartRequest) []byte {
	if q.GetRestore() == "" && len(q.GetCheck()) == 0 {
		return payload
	}
	q.Restore, q.Check = "", nil
	return encode(tagCommand, q)
}

// claimStep takes an ID for a step, or finds the step that has it. Who claims must settle it: commit, or give up.
func (b *box) claimStep(ctx context.Context, id string, act tag, sum [32]byte) (s *step, mine bool, err error) {
	hist, err := b.load(ctx)
	if err != nil {
		return nil, false, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if s := hist.steps[id]; s != nil {
		return s, false, nil
	}
	if b.ending || b.state.Ended() {
		return nil, false, b.gone()
	}
	if len(b.steps) >= maxSteps {
		return nil, false, fmt.Errorf("step %s: sandbox %s has had %d steps, the most that one may have: %w", id, b.id, maxSteps, sandbox.ErrExhausted)
	}
	s = &step{id: id, act: act, sum: sum}
	b.steps[id] = s
	return s, true, nil
}

// giveUp frees the ID of a step that was not begun.
func (b *box) giveUp(s *step, err error) {
	b.mu.Lock()
	if b.steps[s.id] == s {
		delete(b.steps, s.id)
	}
	s.state, s.err = voided, err
	delete(b.tracing.live, s)
	s.changed.ring()
	b.mu.Unlock()
}

// begun waits until the step's start is recorded and done, or was given up.
func (b *box) begun(ctx context.Context, s *step) error {
	b.mu.Lock()
	for s.state == beginning {
		if err := b.waitStep(ctx, s); err != nil {
			return err
		}
	}
	err := s.err
	b.mu.Unlock()
	return err
}

// waitStep waits for a change of the step. The lock is held before, and after unless there is an error.
func (b *box) waitStep(ctx context.Context, s *step) error {
	ch := s.changed.wait()
	b.mu.Unlock()
	select {
	case <-ch:
		b.mu.Lock()
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// same checks that a step that was found is the one that is asked for; the error names the first difference.
func (b *box) same(ctx context.Context, s *step, act tag, sum [32]byte, req proto.Message, in *trajectory.Input) error {
	if s.act == act && s.sum == sum {
		return nil
	}
	exists := func(what string) error {
		return fmt.Errorf("step %s of sandbox %s: was used for another request: %s: %w", s.id, b.id, what, sandbox.ErrExists)
	}
	if s.act != act {
		return exists(fmt.Sprintf("a %s, now a %s", s.act.name(), act.name()))
	}
	b.mu.Lock()
	seq := s.seq
	b.mu.Unlock()
	rec, err := b.recordAt(ctx, seq)
	if err != nil {
		return exists("its record can't be read")
	}
	_, was, err := decode(rec.Payload)
	if err != nil {
		return exists("its record can't be read")
	}
	compare := difference
	if seq <= b.foreign {
		compare = sameSecretly
	}
	if d := compare(was, req); d != "" {
		return exists(d)
	}
	return inputDifference(rec.Input, in, exists)
}

// inputDifference compares inputs by length and hash; nil when they are the same, and the digests differ by an older encoding.
func inputDifference(was, is *trajectory.Input, exists func(string) error) error {
	var a, b trajectory.Input
	if was != nil {
		a = *was
	}
	if is != nil {
		b = *is
	}
	switch {
	case a.Size != b.Size:
		return exists(fmt.Sprintf("input of %d octets, now %d", a.Size, b.Size))
	case a.Size > 0 && a.SHA256 != b.SHA256:
		return exists(fmt.Sprintf("input with SHA-256 %x, now %x", a.SHA256, b.SHA256))
	}
	return nil
}

// recordAt reads one record of the sandbox.
func (b *box) recordAt(ctx context.Context, seq uint64) (trajectory.Record, error) {
	if seq == 0 {
		return trajectory.Record{}, fmt.Errorf("record: not written: %w", sandbox.ErrNotFound)
	}
	recs, _, err := b.h.deps.Log.Read(ctx, b.traj, trajectory.Query{From: seq, Limit: 1})
	if err == nil && len(recs) == 0 {
		err = fmt.Errorf("record %d: %w", seq, sandbox.ErrNotFound)
	}
	if err != nil {
		return trajectory.Record{}, err
	}
	return recs[0], nil
}

// input keeps octets for a record: small ones in it, larger ones beside it.
func (b *box) input(data []byte) (*trajectory.Input, error) {
	switch {
	case len(data) == 0:
		return nil, nil
	case len(data) <= trajectory.MaxInline:
		return trajectory.NewInput(data), nil
	}
	w := b.h.deps.Log.NewInputWriter()
	if _, err := w.Write(data); err != nil {
		w.Abort()
		return nil, err
	}
	return w.Finish(b.spec.Durability)
}

// start begins a command, or finds the one with its ID and the same request. It answers when the command runs or has failed to
// start. c is filled here.
func (b *box) start(ctx context.Context, c *sandbox.Command) (s *step, existed bool, err error) {
	if c.ID == "" {
		c.ID = sandbox.NewKey()
	}
	c.Fill(b.spec)
	if err := c.Validate(); err != nil {
		return nil, false, err
	}
	if c.Terminal != nil || c.Session != "" {
		caps := b.h.deps.Backends[b.spec.Backend].Capabilities()
		if (c.Terminal != nil && !caps.Terminal) || (c.Session != "" && !caps.Sessions) {
			return nil, false, fmt.Errorf("command %s: backend %s has no terminals or sessions: %w", c.ID, b.spec.Backend, sandbox.ErrUnsupported)
		}
	}
	in, err := b.input(c.Stdin)
	if err != nil {
		return nil, false, fmt.Errorf("command %s: keep its stdin: %w", c.ID, err)
	}
	defer in.Release()
	req := b.h.canonicalCommand(c)
	payload := encode(tagCommand, req)
	sum := digest(classless(payload, req), in)
	s, mine, err := b.claimStep(ctx, c.ID, tagCommand, sum)
	if err != nil {
		return nil, false, err
	}
	if !mine {
		if err := b.begun(ctx, s); err != nil {
			return nil, false, err
		}
		if err := b.same(ctx, s, tagCommand, sum, req, in); err != nil {
			return nil, false, err
		}
		return s, true, nil
	}
	inst, err := b.use(ctx)
	if err != nil {
		b.giveUp(s, err)
		return nil, false, err
	}
	defer b.finished()
	rec := trajectory.Record{Kind: trajectory.KindStepStart, Step: c.ID, Input: in, Payload: payload}
	if c.Terminal != nil {
		rec.Flags = trajectory.Opaque // what is typed and when can't be done again
	}
	if err := b.launch(s, c, inst, rec); err != nil {
		b.mu.Lock()
		if !s.doubt {
			b.rest()
		}
		b.mu.Unlock()
		return nil, false, err
	}
	return s, false, nil
}

// launch records a command's start and starts it. From use to the command's end it counts as activity.
func (b *box) launch(s *step, c *sandbox.Command, inst sandbox.Instance, rec trajectory.Record) error {
	b.traceBegin(s)
	s.started, s.session, s.terminal = time.Now(), c.Session, c.Terminal != nil
	s.stdin, s.taken, s.stdinEOF = int64(len(c.Stdin)), int64(len(c.Stdin)), !c.StdinOpen
	d, late := b.spec.Durability, b.lateSync()
	if late || d == sandbox.DurabilityStore {
		d = sandbox.DurabilityProcess
	}
	seq, err := b.appendAs(d, rec)
	if err != nil {
		err = fmt.Errorf("start %s: record it: %w", s.id, err)
		if errors.Is(err, errUnshipped) {
			return b.void(s, err)
		}
		b.giveUp(s, err)
		return err
	}
	b.mu.Lock()
	s.seq, s.loose = seq, late
	b.order = append(b.order, s)
	b.mu.Unlock()
	ctx, cancel := b.h.bounded(actWait)
	defer cancel()
	if err := inst.Start(ctx, c); err != nil {
		return b.doubtful(s, inst, fmt.Errorf("start %s: %w", s.id, err))
	}
	b.mu.Lock()
	if s.state == beginning { // else its end was faster
		s.state = working
		s.changed.ring()
	}
	b.mu.Unlock()
	return nil
}

// doubtful settles a start that failed at the platform: the backend says whether the command runs nevertheless.
func (b *box) doubtful(s *step, inst sandbox.Instance, err error) error {
	ctx, cancel := b.h.bounded(actWait)
	defer cancel()
	known, kerr := inst.Known(ctx, s.id)
	switch {
	case kerr == nil && known:
		b.mu.Lock()
		if s.state == beginning {
			s.state = working
			s.changed.ring()
		}
		b.mu.Unlock()
		return nil
	case kerr == nil:
		return b.void(s, err)
	}
	b.mu.Lock()
	s.doubt = s.state == beginning // nobody is told that it runs, and its ID is not given out again
	doubt, ending := s.doubt, b.ending || b.state.Ended()
	gone := b.gone()
	b.mu.Unlock()
	switch {
	case !doubt:
		return nil // its end came
	case ending:
		return fmt.Errorf("start %s: %w", s.id, gone) // the sandbox's end settles it
	}
	b.h.goes(func() { b.resolve(s, inst, err) })
	return errors.Join(err, kerr)
}

// void records that a step never ran, and frees its ID.
func (b *box) void(s *step, err error) error {
	if _, aerr := b.append(trajectory.Record{Kind: trajectory.KindVoid, Step: s.id}); aerr != nil {
		err = errors.Join(err, aerr)
	}
	b.mu.Lock()
	b.unlist(s)
	b.retries++ // whoever asked sends it again
	b.mu.Unlock()
	b.giveUp(s, err)
	return err
}

// unlist takes a command out of the order; the lock is held.
func (b *box) unlist(s *step) {
	for i := len(b.order) - 1; i >= 0; i-- {
		if b.order[i] == s {
			b.order = append(b.order[:i], b.order[i+1:]...)
			return
		}
	}
}

// resolve asks until the backend says whether a command runs, or the sandbox or the host ends.
func (b *box) resolve(s *step, inst sandbox.Instance, cause error) {
	for {
		select {
		case <-time.After(time.Second):
		case <-b.h.life.Done():
			return
		}
		b.mu.Lock()
		open := s.state == beginning && s.doubt && !b.ending
		b.mu.Unlock()
		if !open {
			return
		}
		ctx, cancel := b.h.bounded(actWait)
		known, err := inst.Known(ctx, s.id)
		cancel()
		if err != nil {
			continue
		}
		b.mu.Lock()
		open = s.state == beginning && s.doubt
		s.doubt = false
		if open && known {
			s.state = working
			s.changed.ring()
		}
		b.mu.Unlock()
		if open && !known {
			b.void(s, cause)
			b.mu.Lock()
			b.rest()
			b.mu.Unlock()
		}
		return
	}
}

// waitCommand waits for a command's end, or d.
func (b *box) waitCommand(ctx context.Context, s *step, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, min(d, sandbox.MaxLongPoll))
	defer cancel()
	b.mu.Lock()
	for (s.state == beginning || s.state == working) && b.moved == nil {
		if err := b.waitStep(ctx, s); err != nil {
			if errors.Is(err, context.DeadlineExceeded) {
				return nil // the answer says that it still runs
			}
			return err
		}
	}
	err := cmp.Or(b.moved, s.err) // what is answered is read where it is now
	b.mu.Unlock()
	return err
}

// commandProto describes a command as it stands.
func (b *box) commandProto(s *step) *dsecv1.Command {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := &dsecv1.Command{Id: s.id, Seq: int64(s.seq), State: "running", Session: s.session, Terminal: s.terminal, StdinTaken: s.taken, Started: rpc.Timestamp(s.started)}
	if s.ended() {
		p.State = "ended"
		if s.outcome.Kind == sandbox.Unknown {
			p.State = "unknown"
		}
		p.Outcome = rpc.OutcomeProto(s.outcome)
		if !s.outcome.Started.IsZero() {
			p.Started = p.Outcome.Started
		}
	}
	return p
}

// command finds a command by its ID.
func (b *box) command(ctx context.Context, id string) (*step, error) {
	hist, err := b.load(ctx)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	s := hist.steps[id]
	b.mu.Unlock()
	if s == nil || s.act != tagCommand {
		return nil, fmt.Errorf("command %.80q of sandbox %s: %w", id, b.id, sandbox.ErrNotFound)
	}
	return s, nil
}

// writeStdin takes octets at an offset. They are recorded before the backend gets them; what was recorded before is not again.
func (b *box) writeStdin(ctx context.Context, id string, offset int64, data []byte, eof bool) (int64, error) {
	s, err := b.command(ctx, id)
	if err != nil {
		return 0, err
	}
	if err := b.begun(ctx, s); err != nil {
		return 0, err
	}
	inst, err := b.use(ctx)
	if err != nil {
		return 0, err
	}
	defer b.done()
	b.mu.Lock()
	have, closed, ended := s.stdin, s.stdinEOF, s.ended()
	b.mu.Unlock()
	end := offset + int64(len(data))
	switch {
	case offset < 0:
		return 0, fmt.Errorf("stdin of %s at %d: must not be negative: %w", id, offset, sandbox.ErrInvalid)
	case offset > have:
		return 0, fmt.Errorf("stdin of %s at %d: %d octets were taken so far, go on from there: %w", id, offset, have, sandbox.ErrState)
	case ended && end > have:
		return 0, fmt.Errorf("stdin of %s: the command has ended: %w", id, sandbox.ErrState)
	case closed && end > have:
		return 0, fmt.Errorf("stdin of %s: was closed at %d: %w", id, have, sandbox.ErrState)
	case ended:
		return have, nil
	}
	if end > have || (eof && !closed) {
		if err := b.recordStdin(s, have, data[have-offset:], eof); err != nil {
			return 0, err
		}
	}
	actx, cancel := b.h.bounded(actWait)
	defer cancel()
	stop := context.AfterFunc(ctx, cancel) // a full pipe: the client may stop waiting
	defer stop()
	taken, err := inst.Stdin(actx, id, offset, data, eof)
	if err != nil {
		return 0, fmt.Errorf("stdin of %s: %w", id, err)
	}
	b.mu.Lock()
	s.taken = max(s.taken, taken)
	b.mu.Unlock()
	return taken, nil
}

func (b *box) recordStdin(s *step, offset int64, data []byte, eof bool) error {
	in, err := b.input(data)
	if err != nil {
		return fmt.Errorf("stdin of %s: keep it: %w", s.id, err)
	}
	defer in.Release()
	// The place is taken before it is written: of two writers at one offset the second waits at the backend or is told.
	b.mu.Lock()
	if s.stdin != offset {
		b.mu.Unlock()
		return fmt.Errorf("stdin of %s at %d: written by another call at the same time: %w", s.id, offset, sandbox.ErrState)
	}
	s.stdin += int64(len(data))
	s.stdinEOF = s.stdinEOF || eof
	b.mu.Unlock()
	_, err = b.append(trajectory.Record{Kind: trajectory.KindStdin, Step: s.id, Offset: offset, Input: in, Payload: encode(tagStdin, &dsecv1.WriteStdinRequest{Eof: eof})})
	if err != nil {
		b.mu.Lock()
		s.stdin, s.stdinEOF = offset, false
		b.mu.Unlock()
		return fmt.Errorf("stdin of %s: record it: %w", s.id, err)
	}
	return nil
}

// signal sends a signal. With a step key it is a step of its own: it is sent once, and its end is recorded.
func (b *box) signal(ctx context.Context, id string, sig int, key string) error {
	s, err := b.command(ctx, id)
	if err != nil {
		return err
	}
	if err := b.begun(ctx, s); err != nil {
		return err
	}
	req := &dsecv1.SignalRequest{Id: id, Signal: int32(sig), Step: key}
	payload := encode(tagSignal, req)
	var mark *step
	if key != "" {
		if err := sandbox.CheckKey("step", key); err != nil {
			return err
		}
		var mine bool
		mark, mine, err = b.claimStep(ctx, key, tagSignal, digest(payload, nil))
		if err != nil {
			return err
		}
		if !mine {
			if err := b.begun(ctx, mark); err != nil {
				return err
			}
			if err := b.same(ctx, mark, tagSignal, digest(payload, nil), req, nil); err != nil {
				return err
			}
			_, err := b.recorded(ctx, mark)
			return err
		}
	}
	err = b.act(ctx, s, func(ctx context.Context, inst sandbox.Instance) error {
		seq, err := b.append(trajectory.Record{Kind: trajectory.KindSignal, Step: id, Payload: payload})
		if err != nil {
			err = fmt.Errorf("record it: %w", err)
			if mark != nil && errors.Is(err, errUnshipped) {
				return b.void(mark, err)
			}
			return err
		}
		if mark == nil {
			return inst.Signal(ctx, id, sig)
		}
		b.mu.Lock()
		mark.seq, mark.state, mark.started = seq, working, time.Now()
		mark.changed.ring()
		b.mu.Unlock()
		_, err = b.endStep(mark, nil, nil, inst.Signal(ctx, id, sig))
		return err
	})
	if err != nil {
		err = fmt.Errorf("signal %d to %s: %w", sig, id, err)
	}
	if mark != nil && err != nil {
		b.mu.Lock()
		unsent := mark.state == beginning
		b.mu.Unlock()
		if unsent {
			b.giveUp(mark, err)
		}
	}
	return err
}

// resize changes a terminal's size.
func (b *box) resize(ctx context.Context, id string, size sandbox.Size) error {
	s, err := b.command(ctx, id)
	if err != nil {
		return err
	}
	if err := b.begun(ctx, s); err != nil {
		return err
	}
	if !s.terminal {
		return fmt.Errorf("resize %s: has no terminal: %w", id, sandbox.ErrState)
	}
	err = b.act(ctx, s, func(ctx context.Context, inst sandbox.Instance) error {
		if _, err := b.append(trajectory.Record{Kind: trajectory.KindResize, Step: id, Payload: encode(tagResize, &dsecv1.ResizeRequest{Id: id, Size: rpc.SizeProto(&size)})}); err != nil {
			return fmt.Errorf("record it: %w", err)
		}
		return inst.Resize(ctx, id, size)
	})
	if err != nil {
		return fmt.Errorf("resize %s: %w", id, err)
	}
	return nil
}

// act does something to a running command.
func (b *box) act(ctx context.Context, s *step, do func(context.Context, sandbox.Instance) error) error {
	inst, err := b.use(ctx)
	if err != nil {
		return err
	}
	defer b.done()
	b.mu.Lock()
	ended := s.ended()
	b.mu.Unlock()
	if ended {
		return fmt.Errorf("the command has ended: %w", sandbox.ErrState)
	}
	actx, cancel := b.h.bounded(actWait)
	defer cancel()
	return do(actx, inst)
}
