package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// sink takes what happens in a sandbox into its log. Nil is given back only for what is in the log, or was before: the backend
// forgets it then.
type sink box

var _ sandbox.Sink = (*sink)(nil)

func (k *sink) box() *box { return (*box)(k) }

// take counts an event on its way into the log, until taken. It is false when the sandbox's last records are being written or are there:
// the event is dropped.
func (b *box) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.shut || b.state.Ended() {
		return false
	}
	b.taking++
	return true
}

func (b *box) taken() {
	b.mu.Lock()
	b.taking--
	if b.taking == 0 {
		b.changed.ring()
	}
	b.mu.Unlock()
}

// commandStep finds a command that an event is about. An unknown one was void, or is of a sandbox that has ended: the event is
// dropped, since nobody can ask for it.
func (k *sink) commandStep(cmd, what string) *step {
	b := k.box()
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.steps[cmd]
	if s == nil || s.act != tagCommand {
		if !b.state.Ended() {
			b.h.log.Warn("event of an unknown command", "sandbox", b.id, "command", cmd, "event", what)
		}
		return nil
	}
	return s
}

// Output implements [sandbox.Sink].
func (k *sink) Output(_ context.Context, cmd string, stream sandbox.StreamName, offset int64, data []byte, late bool) error {
	if stream != sandbox.Stdout && stream != sandbox.Stderr || offset < 0 {
		return fmt.Errorf("output of %s: stream %d at %d: %w", cmd, stream, offset, sandbox.ErrInvalid)
	}
	s, b := k.commandStep(cmd, "output"), k.box()
	if s == nil || !b.take() {
		return nil
	}
	defer b.taken()
	b.mu.Lock()
	next, dropped := s.next[stream], b.redos[cmd].hides()
	b.mu.Unlock()
	if dropped {
		return nil // the recorded output stands
	}
	if offset < next { // sent again after a restart
		if next-offset >= int64(len(data)) {
			return nil
		}
		data, offset = data[next-offset:], next
	}
	var one [1]trajectory.Record
	recs := one[:0]
	for at := offset; len(data) > 0; {
		n := min(len(data), trajectory.MaxOutput)
		r := trajectory.Record{Kind: trajectory.KindOutput, Step: s.stream(), Stream: stream, Offset: at, Payload: data[:n]}
		if late {
			r.Flags = trajectory.Late
		}
		recs = append(recs, r)
		data, at = data[n:], at+int64(n)
		offset = at
	}
	if len(recs) == 0 {
		return nil
	}
	if _, err := b.append(recs...); err != nil {
		return fmt.Errorf("record output of %s: %w", cmd, err)
	}
	b.mu.Lock()
	s.next[stream] = offset
	s.changed.ring()
	b.mu.Unlock()
	return nil
}

// CommandEnded implements [sandbox.Sink].
func (k *sink) CommandEnded(_ context.Context, cmd string, o sandbox.Outcome) error {
	s, b := k.commandStep(cmd, "end"), k.box()
	if s == nil || !b.take() {
		return nil
	}
	defer b.taken()
	if again, err := b.redoEnded(s, o); again {
		return err
	}
	b.mu.Lock()
	ended, noted := s.ended(), s.endNoted
	if o.Started.IsZero() {
		o.Started = s.started
	}
	if o.Ended.IsZero() {
		o.Ended = time.Now()
	}
	if !ended {
		s.ending, s.told = true, o
	}
	b.mu.Unlock()
	if ended {
		return nil
	}
	var err error
	if noted { // it was told before; the backend tells it again until it is acknowledged
		err = b.ship()
	} else {
		_, err = b.append(endRecord(cmd, o))
	}
	if err != nil {
		b.mu.Lock()
		s.endNoted = s.endNoted || errors.Is(err, errUnshipped)
		s.ending = s.endNoted
		b.mu.Unlock()
		return fmt.Errorf("record end of %s: %w", cmd, err)
	}
	b.traceEnd(s, o.Group) // before anybody hears of the end and begins another
	b.h.m.commands.WithLabelValues(string(o.Kind)).Inc()
	b.mu.Lock()
	if !s.ended() {
		s.finish(o)
		b.rest()
	}
	b.mu.Unlock()
	if cmd == entrypoint && len(b.spec.Entry) > 0 {
		b.entryEnded(o)
	}
	return nil
}

func (b *box) entryEnded(o sandbox.Outcome) {
	b.h.end(b, sandbox.Cause{Class: sandbox.ClassTask, Reason: "entrypoint", Detail: describe(o)})
}

// describe is an outcome for a person.
func describe(o sandbox.Outcome) string {
	switch o.Kind {
	case sandbox.Exited:
		return fmt.Sprintf("exited with %d", o.Code)
	case sandbox.Signalled:
		return fmt.Sprintf("ended by signal %d", o.Signal)
	case sandbox.StartFailed:
		return "did not start: " + o.Error
	}
	return string(o.Kind)
}

// SessionEnded implements [sandbox.Sink]. An end that the backend tells and one that the host concludes may meet; one is recorded.
func (k *sink) SessionEnded(_ context.Context, name string, o sandbox.Outcome) error {
	b := k.box()
	if !b.take() {
		return nil
	}
	defer b.taken()
	b.mu.Lock()
	s := b.sessions[name]
	for s != nil && s.open && s.closing {
		if err := b.waitChange(b.h.life); err != nil {
			return fmt.Errorf("record end of session %s: %w", name, err)
		}
		b.mu.Lock()
		s = b.sessions[name]
	}
	open := s != nil && s.open
	if open {
		s.closing = true
	}
	b.mu.Unlock()
	if !open {
		return nil
	}
	if o.Ended.IsZero() {
		o.Ended = time.Now()
	}
	_, err := b.append(trajectory.Record{Kind: trajectory.KindSessionClose, Step: name, Payload: encode(tagOutcome, rpc.OutcomeProto(o))})
	b.mu.Lock()
	s.closing = false
	if err == nil {
		s.open, s.end = false, o
	}
	b.changed.ring()
	b.mu.Unlock()
	if err != nil {
		return fmt.Errorf("record end of session %s: %w", name, err)
	}
	return nil
}

// Ended implements [sandbox.Sink].
func (k *sink) Ended(_ context.Context, c sandbox.Cause) error {
	b := k.box()
	b.mu.Lock()
	now := time.Now()
	total := b.total
	if total.IsZero() {
		total = b.created.Add(b.life.Total)
	}
	if c.Class == sandbox.ClassLimit && c.Reason == "total" && now.Before(total) {
		// The backend knows one deadline for both, and a host that comes back has begun the lease anew.
		c = sandbox.Cause{Class: sandbox.ClassClient, Reason: "lease"}
	}
	recorded := b.ending || b.state.Ended() || b.state == sandbox.Creating
	b.mu.Unlock()
	if !recorded {
		if _, err := b.append(stateRecord(sandbox.Stopping, "", c, nil)); err != nil {
			return fmt.Errorf("record the end of %s: %w", b.id, err)
		}
		b.mu.Lock()
		b.noted = true
		b.mu.Unlock()
	}
	b.h.end(b, c)
	return nil
}

// Denied implements [sandbox.Sink].
func (k *sink) Denied(_ context.Context, cmd, call, detail string) {
	b := k.box()
	b.mu.Lock()
	held, ok := b.denied.allow(time.Now())
	b.mu.Unlock()
	b.h.m.denied.Inc()
	if !ok || !b.take() {
		return
	}
	defer b.taken()
	m := &dsecv1.LogRecord{Kind: "denied", Step: text(cmd), RequestJson: jsonText(text(call), text(detail), held)}
	if _, err := b.append(trajectory.Record{Kind: trajectory.KindEvent, Step: cmd, Payload: encode(tagEvent, m)}); err != nil {
		b.h.log.Warn("record a denied call", "sandbox", b.id, "call", call, "err", err)
	}
}
