package host

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// end begins the end of a sandbox for the cause, unless it has begun. What follows runs in the background: waitEnd waits for it.
func (h *Host) end(b *box, cause sandbox.Cause) {
	b.mu.Lock()
	if b.away.holds(cause) {
		b.mu.Unlock()
		return
	}
	if b.ending || b.state.Ended() {
		if cause.Class == sandbox.ClassPlatform && !b.state.Ended() {
			b.cause = cause // the platform's own failure wins over what was asked for
		}
		b.mu.Unlock()
		return
	}
	b.ending, b.cause = true, cause
	creating := b.state == sandbox.Creating
	if creating {
		if b.abort != nil {
			b.abort()
		}
	} else {
		b.state = sandbox.Stopping
		b.stopTimer()
	}
	b.changed.ring()
	b.mu.Unlock()
	if !creating { // else the birth sees to it
		h.goes(func() { h.finish(b) })
	}
}

// waitEnd waits until nothing of the sandbox is left.
func (b *box) waitEnd(ctx context.Context) error {
	b.mu.Lock()
	for !b.state.Ended() {
		state := b.state
		if err := b.waitChange(ctx); err != nil {
			return fmt.Errorf("stop %s (is %s, goes on): %w", b.id, state, err)
		}
		b.mu.Lock()
	}
	err := b.moved
	b.mu.Unlock()
	return err
}

// finish frees everything of a sandbox whose state is stopping, and records its end. It gives up only when the host shuts down;
// the next one goes on from the record of the beginning.
func (h *Host) finish(b *box) {
	b.mu.Lock()
	cause, inst, noted := b.cause, b.inst, b.noted
	b.mu.Unlock()
	if !noted {
		if _, err := b.append(stateRecord(sandbox.Stopping, "", cause, nil)); err != nil {
			h.log.Error("record the beginning of an end", "sandbox", b.id, "err", err)
		}
	}
	b.closeFiles()
	b.traceLast()
	b.keepConsole(inst)
	teller, tells := inst.(interface{ Used() *sandbox.Stats }) // which saves it the question
	var used *sandbox.Stats
	if !tells {
		used = b.lastStats(inst)
	}
	if inst != nil && !h.destroy(b, inst) {
		return
	}
	if tells {
		used = teller.Used()
	}
	b.quiet()
	var ends map[string]sandbox.Outcome
	if e, ok := inst.(interface {
		Ends() map[string]sandbox.Outcome
	}); ok {
		ends = e.Ends()
	}
	state, cause, recs := b.endings(ends)
	h.record(b, append(recs, endOf(state, cause, b.sumUp(cause, used))))
	h.close(b, state, cause)
}

// destroy tries until it is done; false when the host shuts down before.
func (h *Host) destroy(b *box, inst sandbox.Instance) bool {
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 30*time.Second) {
		ctx, cancel := h.bounded(destroyWait)
		err := inst.Destroy(ctx)
		cancel()
		if err == nil {
			return true
		}
		if h.life.Err() != nil {
			return false
		}
		h.log.Error("destroy, will try again", "sandbox", b.id, "again", pause, "err", err)
		h.m.destroyErrors.Inc()
		select {
		case <-time.After(pause):
		case <-h.life.Done():
			return false
		}
	}
}

// quiet waits, bounded, until the acts under way in the sandbox have come back and recorded their ends, and the events under way are in
// the log.
func (b *box) quiet() {
	ctx, cancel := b.h.bounded(settleWait)
	defer cancel()
	b.mu.Lock()
	for b.acts > 0 || b.taking > 0 {
		if b.waitChange(ctx) != nil {
			b.h.log.Warn("acts under way in an ended sandbox", "sandbox", b.id)
			return
		}
		b.mu.Lock()
	}
	b.mu.Unlock()
}

// endings is how the sandbox and its open steps end. told is what the backend knows of commands that the end of the sandbox ended.
func (b *box) endings(told map[string]sandbox.Outcome) (sandbox.State, sandbox.Cause, []trajectory.Record) {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shut = true
	cause := b.cause
	kind := sandbox.Killed
	if cause.Class == sandbox.ClassPlatform {
		kind = sandbox.Unknown
	}
	var recs []trajectory.Record
	unknown := 0
	for _, s := range b.steps {
		if s.ended() {
			if s.outcome.Kind == sandbox.Unknown {
				unknown++
			}
			continue
		}
		o := sandbox.Outcome{Kind: kind, Started: s.started, Ended: now, Usage: sandbox.Usage{MemoryPeak: -1}}
		if kind == sandbox.Killed {
			o.Signal, o.Error = 9, "ended with its sandbox: "+strings.TrimSpace(string(cause.Class)+" "+cause.Reason)
		}
		if s.act == tagCommand {
			if t, ok := told[s.id]; ok {
				if kind == sandbox.Killed && t.Kind == sandbox.TimedOut {
					o.Kind, o.Error = t.Kind, ""
				}
				o.MemoryHit, o.PidsHit, o.DiskHit, o.Shared, o.Usage = t.MemoryHit, t.PidsHit, t.DiskHit, t.Shared, t.Usage
			}
			o.Stdout, o.Stderr = s.cut(sandbox.Stdout), s.cut(sandbox.Stderr)
		}
		if o.Kind == sandbox.Unknown {
			unknown++
		}
		if s.ending { // the backend's word for it is on its way into the log, or there and not in the store
			s.finish(s.told)
			continue
		}
		s.finish(o)
		b.h.m.commands.WithLabelValues(string(o.Kind)).Inc()
		recs = append(recs, endRecord(s.id, o))
	}
	for _, s := range b.sessions {
		if s.open && !s.closing {
			s.open, s.end = false, sandbox.Outcome{Kind: kind, Ended: now}
			recs = append(recs, trajectory.Record{Kind: trajectory.KindSessionClose, Step: s.name, Payload: encode(tagOutcome, rpc.OutcomeProto(s.end))})
		}
	}
	if cause.Class == sandbox.ClassPlatform {
		return sandbox.Failed, cause, recs
	}
	if unknown > 0 {
		cause = sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "unknown_step", Detail: fmt.Sprintf("%d steps; ended as %s %s", unknown, cause.Class, cause.Reason)}
	}
	return sandbox.Stopped, cause, recs
}

// record writes the last records of a sandbox. Space is reserved for them; a log that failed is told of and does not keep the
// sandbox's remains alive: the next host finds it gone.
func (h *Host) record(b *box, recs []trajectory.Record) {
	const chunk = 512
	for len(recs) > 0 {
		n := min(chunk, len(recs))
		if _, err := b.append(recs[:n]...); err != nil {
			h.log.Error("record an end", "sandbox", b.id, "err", err)
			return
		}
		recs = recs[n:]
	}
}

// close marks the sandbox ended and frees what the host held for it.
func (h *Host) close(b *box, state sandbox.State, cause sandbox.Cause) {
	now := time.Now()
	h.mu.Lock()
	h.freeName(b)
	delete(h.alive, b.id)
	if j := h.jobs[scoped{b.spec.Project, b.spec.Job}]; j != nil {
		j.left(now)
		j.ended++
	}
	h.mu.Unlock()
	h.m.ends.WithLabelValues(string(cause.Class)).Inc()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.state, b.cause, b.level, b.over = state, cause, "", now
	b.inst, b.abort = nil, nil
	b.stopTimer()
	// Who waits for a step still holds it; who comes later reads it from the log.
	for _, s := range b.steps {
		s.changed.ring()
	}
	b.history = newHistory()
	b.changed.ring()
}

// bury refuses a create with the key for tombstoneFor.
func (h *Host) bury(id trajectory.ID) {
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.tombs) >= maxTombs/2 {
		for k, until := range h.tombs {
			if now.After(until) || len(h.tombs) >= maxTombs {
				delete(h.tombs, k)
			}
		}
	}
	h.tombs[id] = now.Add(tombstoneFor)
}

// stopKey ends the sandbox of a create key, or keeps a create with that key from happening. It returns nil when there was none.
func (h *Host) stopKey(ctx context.Context, id trajectory.ID) (*box, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	if err := sandbox.CheckKey("key", id.Key); err != nil {
		return nil, err
	}
	h.mu.Lock()
	b, p := h.keys[id], h.crossed[id]
	h.mu.Unlock()
	if b == nil && p != nil && p.Coming != nil { // it may begin to live here, though nobody has it now
		return nil, p.elsewhere("")
	}
	if b == nil {
		h.bury(id)
		// A create may have come between the look and the grave.
		h.mu.Lock()
		b = h.keys[id]
		h.mu.Unlock()
		if b == nil {
			return nil, nil
		}
	}
	return b, h.stop(ctx, b, sandbox.Cause{Class: sandbox.ClassClient, Reason: "cancelled"})
}

// stop ends a sandbox and waits. Its cause is early while the sandbox was never handed out, else none: its client stopped it.
func (h *Host) stop(ctx context.Context, b *box, early sandbox.Cause) error {
	cause := sandbox.Cause{Class: sandbox.ClassNone, Reason: "stopped"}
	b.mu.Lock()
	if b.state == sandbox.Creating {
		cause = early
	}
	b.mu.Unlock()
	h.end(b, cause)
	return b.waitEnd(ctx)
}
