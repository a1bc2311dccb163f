package host

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// deadline is the earlier of total TTL and lease, for the backend; mu is held. The total is set at its first use.
func (b *box) deadline() time.Time {
	if b.total.IsZero() {
		b.total = b.created.Add(b.life.Total)
	}
	if !b.lease.IsZero() && b.lease.Before(b.total) {
		return b.lease.Add(leaseSlack)
	}
	return b.total
}

// arm sees to it that the timer fires at the next limit; mu is held. A limit that moves away costs nothing: the timer fires too
// early and is armed again.
func (b *box) arm() {
	if b.ending || b.state.Ended() || b.state == sandbox.Creating {
		return
	}
	b.deadline()
	next := b.total
	if b.state == sandbox.Running && b.life.Idle > 0 {
		at := b.last.Add(b.life.Idle)
		if b.active > 0 {
			at = time.Now().Add(b.life.Idle)
		}
		if at.Before(next) {
			next = at
		}
	}
	if b.timer != nil && !b.wakeAt.After(next) {
		return // it fires before
	}
	b.wakeAt = next
	d := max(0, time.Until(next))
	if b.timer == nil {
		b.timer = time.AfterFunc(d, b.tick)
	} else {
		b.timer.Reset(d)
	}
}

func (b *box) stopTimer() {
	if b.timer != nil {
		b.timer.Stop()
		b.timer = nil
	}
}

// tick acts on a limit that is reached.
func (b *box) tick() {
	now := time.Now()
	b.mu.Lock()
	if b.timer == nil || b.ending || b.state.Ended() {
		b.mu.Unlock()
		return
	}
	total := !now.Before(b.total)
	idle := !total && b.state == sandbox.Running && b.active == 0 && b.life.Idle > 0 && !now.Before(b.last.Add(b.life.Idle))
	action := b.life.OnIdle
	b.timer = nil
	if !total && !idle {
		b.arm()
	}
	b.mu.Unlock()
	switch {
	case total:
		b.h.end(b, sandbox.Cause{Class: sandbox.ClassLimit, Reason: "total"})
	case idle && action == sandbox.EndPause:
		b.h.goes(func() { b.rested() })
	case idle:
		b.h.end(b, sandbox.Cause{Class: sandbox.ClassLimit, Reason: "idle"})
	}
}

// rested pauses an idle sandbox.
func (b *box) rested() {
	ctx, cancel := b.h.bounded(actWait)
	defer cancel()
	if err := b.pause(ctx, sandbox.Frozen, "idle", true); err != nil && b.h.life.Err() == nil {
		b.h.log.Error("pause an idle sandbox", "sandbox", b.id, "err", err)
		b.mu.Lock()
		b.last = time.Now() // try again one idle time later
		b.mu.Unlock()
	}
	b.mu.Lock()
	b.arm()
	b.mu.Unlock()
}

// setLifetime changes the lifetimes; zeros keep what is, and a new total counts from now.
func (b *box) setLifetime(p *dsecv1.Lifetime) error {
	l, err := rpc.Lifetime(p)
	if err != nil {
		return err
	}
	b.mu.Lock()
	if b.ending || b.state.Ended() {
		err := b.gone()
		b.mu.Unlock()
		return err
	}
	next := b.life
	b.begin()
	b.mu.Unlock()
	defer b.finished()
	merge(&next, l)
	check := *b.spec
	check.Lifetime = next
	if err := check.Validate(); err != nil {
		return err
	}
	if _, err := b.append(trajectory.Record{Kind: trajectory.KindPolicy, Payload: encode(tagPolicy, &dsecv1.SetLifetimeRequest{Lifetime: proto.CloneOf(p)})}); err != nil {
		return fmt.Errorf("set lifetime of %s: %w", b.id, err)
	}
	b.mu.Lock()
	merge(&b.life, l)
	if l.Total > 0 {
		b.total = time.Now().Add(l.Total)
	}
	b.stopTimer()
	b.arm()
	b.mu.Unlock()
	return b.armBackend()
}

func merge(to *sandbox.Lifetime, l sandbox.Lifetime) {
	if l.Idle != 0 {
		to.Idle = l.Idle
	}
	if l.Total != 0 {
		to.Total = l.Total
	}
	if l.OnIdle != "" {
		to.OnIdle = l.OnIdle
	}
	if l.OnTotal != "" {
		to.OnTotal = l.OnTotal
	}
}

// armBackend gives the backend the deadline, where it holds while the host is down.
func (b *box) armBackend() error {
	b.mu.Lock()
	at, inst := b.deadline(), b.inst
	if inst == nil || at.Equal(b.armed) {
		b.mu.Unlock()
		return nil
	}
	b.armed = at
	b.mu.Unlock()
	ctx, cancel := b.h.bounded(actWait)
	defer cancel()
	if err := inst.SetDeadline(ctx, at); err != nil {
		b.mu.Lock()
		b.armed = time.Time{}
		b.mu.Unlock()
		return fmt.Errorf("arm deadline of %s: %w", b.id, err)
	}
	return nil
}

// pause freezes a running sandbox. With idle it does so only while nobody uses it.
func (b *box) pause(ctx context.Context, level sandbox.PauseLevel, reason string, idle bool) error {
	if err := b.h.ableToPause(b.spec, level); err != nil {
		return err
	}
	b.mu.Lock()
	for {
		switch {
		case b.ending || b.state.Ended():
			err := b.gone()
			b.mu.Unlock()
			return err
		case b.state == sandbox.Paused:
			b.mu.Unlock()
			return nil
		case b.state == sandbox.Running:
			if idle && b.active > 0 {
				b.mu.Unlock()
				return nil
			}
			b.state = sandbox.Pausing
			inst := b.inst
			b.changed.ring()
			b.drain()
			if b.state != sandbox.Pausing { // an end overtook it
				err := b.gone()
				b.mu.Unlock()
				return err
			}
			b.begin()
			b.mu.Unlock()
			defer b.finished()
			return b.turn(sandbox.Pausing, sandbox.Paused, sandbox.Running, level, reason, func(ctx context.Context) error { return inst.Pause(ctx, level) })
		}
		if err := b.waitChange(ctx); err != nil {
			return fmt.Errorf("pause %s: %w", b.id, err)
		}
		b.mu.Lock()
	}
}

// drain waits, bounded, until the acts under way in a sandbox that is to be frozen have come back: a command between its record and its
// start would be refused, a change of files cut in two. New ones wait for the state. What takes longer, as a large body, stands still
// while the sandbox does. mu is held.
func (b *box) drain() {
	ctx, cancel := b.h.bounded(drainWait)
	defer cancel()
	for b.acts > 0 && b.state == sandbox.Pausing {
		err := b.waitChange(ctx)
		b.mu.Lock()
		if err != nil {
			return
		}
	}
}

// resume thaws a paused sandbox.
func (b *box) resume(ctx context.Context, reason string) error {
	b.mu.Lock()
	for {
		switch {
		case b.ending || b.state.Ended():
			err := b.gone()
			b.mu.Unlock()
			return err
		case b.state == sandbox.Running:
			b.last = time.Now()
			b.mu.Unlock()
			return nil
		case b.state == sandbox.Paused:
			b.state = sandbox.Resuming
			inst, level := b.inst, b.level
			b.begin()
			b.changed.ring()
			b.mu.Unlock()
			defer b.finished()
			return b.turn(sandbox.Resuming, sandbox.Running, sandbox.Paused, level, reason, inst.Resume)
		}
		if err := b.waitChange(ctx); err != nil {
			return fmt.Errorf("resume %s: %w", b.id, err)
		}
		b.mu.Lock()
	}
}

// turn carries a sandbox from one state to another through a state of its own that the caller has set. Both are recorded, so that
// a host that was killed between them knows what to finish. A failure goes back.
func (b *box) turn(through, to, back sandbox.State, level sandbox.PauseLevel, reason string, act func(context.Context) error) error {
	ctx, cancel := b.h.bounded(actWait)
	defer cancel()
	cause := sandbox.Cause{Reason: reason}
	_, err := b.append(stateRecord(through, level, cause, nil))
	if err == nil {
		err = act(ctx)
	}
	if err == nil {
		_, err = b.append(stateRecord(to, level, cause, nil))
	} else if b.h.life.Err() == nil {
		b.append(stateRecord(back, level, cause, nil)) // the error that is told is the first
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state != through { // an end overtook it
		if err == nil {
			err = b.gone()
		}
		return err
	}
	if err != nil {
		to = back
	}
	b.state, b.level = to, ""
	if to == sandbox.Paused {
		b.level = level
	} else {
		b.last = time.Now()
	}
	b.arm()
	b.changed.ring()
	if err != nil {
		return fmt.Errorf("%s %s: %w", through, b.id, err)
	}
	return nil
}

func (h *Host) ableToPause(s *sandbox.Spec, level sandbox.PauseLevel) error {
	c := h.deps.Backends[s.Backend].Capabilities()
	for _, l := range c.PauseLevels {
		if l == level {
			return nil
		}
	}
	return fmt.Errorf("pause level %q: backend %s has %q: %w", level, s.Backend, c.PauseLevels, sandbox.ErrUnsupported)
}
