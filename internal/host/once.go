package host

import (
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

// once does a step that is no command, once under its key: its start is recorded, then it is done, then its end is recorded. The
// same key and request again answer the recorded end. act runs on the host's context, bounded by d. What prepare fails at is no
// step: nothing is recorded and the key stays free. prepare may be nil.
func (b *box) once(ctx context.Context, key string, t tag, req proto.Message, d time.Duration, prepare func(context.Context, sandbox.Instance) (release func(), err error), act func(context.Context, sandbox.Instance) (*dsecv1.LogRecord, error)) (r *dsecv1.LogRecord, existed bool, err error) {
	if err := sandbox.CheckKey("step", key); err != nil {
		return nil, false, err
	}
	payload := encode(t, req)
	sum := digest(payload, nil)
	s, mine, err := b.claimStep(ctx, key, t, sum)
	if err != nil {
		return nil, false, err
	}
	if !mine {
		if err := b.same(ctx, s, t, sum, req, nil); err != nil {
			return nil, false, err
		}
		r, err := b.recorded(ctx, s)
		return r, true, err
	}
	inst, err := b.use(ctx)
	if err != nil {
		b.giveUp(s, err)
		return nil, false, err
	}
	defer b.done()
	if prepare != nil {
		release, err := prepare(ctx, inst)
		if err != nil {
			b.giveUp(s, err)
			return nil, false, err
		}
		defer release()
	}
	if err := b.beginStep(s, payload); err != nil {
		return nil, false, err
	}
	actx, cancel := b.h.bounded(d)
	defer cancel()
	r, err = act(actx, inst)
	r, err = b.endStep(s, r, nil, err)
	return r, false, err
}

// beginStep records the start of a claimed step.
func (b *box) beginStep(s *step, payload []byte) error {
	b.traceBegin(s)
	s.started = time.Now()
	seq, err := b.append(trajectory.Record{Kind: trajectory.KindStepStart, Step: s.id, Payload: payload})
	if err != nil {
		err = fmt.Errorf("step %s: record it: %w", s.id, err)
		if errors.Is(err, errUnshipped) {
			return b.void(s, err)
		}
		b.giveUp(s, err)
		return err
	}
	b.mu.Lock()
	s.seq, s.state = seq, working
	s.changed.ring()
	b.mu.Unlock()
	return nil
}

// endStep records how a step ended and what a resend answers. A refusal of the sandbox, such as a missing path, is the step's
// result; a lost connection leaves it unknown.
func (b *box) endStep(s *step, r *dsecv1.LogRecord, in *trajectory.Input, err error) (*dsecv1.LogRecord, error) {
	if r == nil {
		r = &dsecv1.LogRecord{}
	}
	o := sandbox.Outcome{Kind: sandbox.Exited, Started: s.started, Ended: time.Now(), Usage: sandbox.Usage{MemoryPeak: -1}}
	applied := r.GetOutcome().GetApplied()
	switch {
	case r.GetOutcome().GetKind() != "":
		o.Kind = sandbox.OutcomeKind(r.Outcome.Kind)
	case err != nil && unsure(err):
		o.Kind = sandbox.Unknown
	}
	if err != nil && unsure(err) {
		// Its sandbox was ended under it, by who may: nothing is left of which its effect could be unknown, and it is not the platform's fault.
		if gone := b.endedByOthers(); gone != nil {
			err = fmt.Errorf("step %s: %w", s.id, gone)
			if o.Kind == sandbox.Unknown {
				o.Kind = sandbox.Killed
			}
		}
	}
	if err != nil {
		o.Error = text(err.Error())
		r.Kind = rpc.CodeName(err)
		if o.Kind == sandbox.Exited || o.Kind == sandbox.Killed {
			o.Code = 1
		}
	}
	r.Outcome = rpc.OutcomeProto(o)
	r.Outcome.Applied = applied
	if in != nil {
		r.Length, r.Sha256 = in.Size, fmt.Sprintf("%x", in.SHA256)
	}
	_, aerr := b.append(trajectory.Record{Kind: trajectory.KindStepEnd, Step: s.id, Input: in, Payload: encode(tagResult, r)})
	b.h.m.steps.WithLabelValues(s.act.name()).Inc()
	if aerr != nil {
		// The step is done and its end is not recorded: a restarted host calls it unknown, and so do we.
		o.Kind = sandbox.Unknown
		r.Outcome.Kind = string(o.Kind)
		err = errors.Join(err, fmt.Errorf("step %s: record its end: %w", s.id, aerr))
	}
	b.traceEnd(s, "")
	b.mu.Lock()
	if !s.ended() {
		s.result = r
		s.finish(o)
	}
	b.mu.Unlock()
	return r, err
}

// endedByOthers is the error of a sandbox that ends or has ended for a cause other than the platform's; else nil.
func (b *box) endedByOthers() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if (b.ending || b.state.Ended()) && b.cause.Class != sandbox.ClassPlatform {
		return b.gone()
	}
	return nil
}

// unsure says whether an error leaves open if the step was done.
func unsure(err error) bool {
	return errors.Is(err, sandbox.ErrLost) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// recorded waits for a step's end and answers it.
func (b *box) recorded(ctx context.Context, s *step) (*dsecv1.LogRecord, error) {
	b.mu.Lock()
	for s.state == beginning || s.state == working {
		if err := b.waitStep(ctx, s); err != nil {
			return nil, fmt.Errorf("step %s is under way: %w", s.id, err)
		}
	}
	r, o, err := s.result, s.outcome, s.err
	b.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case o.Kind == sandbox.Unknown:
		return r, fmt.Errorf("step %s: was begun and its end was not seen; it is not done again: %w", s.id, sandbox.ErrLost)
	case o.Kind == sandbox.Killed:
		return r, fmt.Errorf("step %s: its sandbox ended before it did: %w", s.id, sandbox.ErrState)
	case o.Kind == sandbox.Interrupted:
		return r, fmt.Errorf("step %s: was interrupted: %s: %w", s.id, o.Error, sandbox.ErrState)
	case o.Code != 0:
		return r, rpc.FromCode(r.GetKind(), o.Error)
	}
	return r, nil
}
