package vm

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A guest that was taken over can say what it likes. What it says of itself is believed, as a container's keeper is believed, but only in the
// form that it may have: kinds, sizes, times and the amount of output are bounded here, and it can speak of its own sandbox alone.

// budget bounds the output of one command.
type budget struct {
	left [3]int64 // octets, by stream
}

const (
	maxDetail = 4 << 10
	// What a command's process may write after its end is capped on its own, and octets come again after a new connection.
	budgetSlack = 1 << 20
)

func newBudget(limit int64) *budget {
	n := 3*limit + budgetSlack
	return &budget{left: [3]int64{0, n, n}}
}

func (x *instance) mine(id sandbox.ID, what string) error {
	if id != x.inside() {
		return fmt.Errorf("guest of %s: %s of %.60q: %w", x.id, what, id, sandbox.ErrInvalid)
	}
	return nil
}

// mineSince tells the ID of a command from what the guest calls it. It is false for one of before the fork, which goes on for itself.
func (x *instance) mineSince(cmd string) (string, bool) { return strings.CutPrefix(cmd, x.h.Mark) }

// spend takes octets of a command's budget. A command that nobody here started has that of the largest.
func (x *instance) spend(cmd string, stream sandbox.StreamName, n int) error {
	if stream != sandbox.Stdout && stream != sandbox.Stderr {
		return fmt.Errorf("guest of %s: stream %d of %.80q: %w", x.id, stream, cmd, sandbox.ErrInvalid)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	b := x.budgets[cmd]
	if b == nil {
		if len(x.budgets) > 2*maxRunning {
			return fmt.Errorf("guest of %s: output of %d commands: %w", x.id, len(x.budgets), sandbox.ErrExhausted)
		}
		b = newBudget(sandbox.MaxOutputCap)
		x.budgets[cmd] = b
	}
	if b.left[stream] -= int64(n); b.left[stream] < 0 {
		return fmt.Errorf("guest of %s: more output of %.80q than its cap: %w", x.id, cmd, sandbox.ErrExhausted)
	}
	return nil
}

// maxRunning is how many commands of a sandbox are remembered at once, as in the keeper.
const maxRunning = 4096

// Output implements keeper.Handler.
func (x *instance) Output(ctx context.Context, id sandbox.ID, cmd string, stream sandbox.StreamName, offset int64, data []byte, late bool) error {
	err := x.mine(id, "output")
	cmd, ok := x.mineSince(cmd)
	if err == nil && !ok {
		return nil
	}
	if err == nil && (offset < 0 || offset > 1<<50) {
		err = fmt.Errorf("guest of %s: output at %d: %w", x.id, offset, sandbox.ErrInvalid)
	}
	if err == nil {
		err = x.spend(cmd, stream, len(data))
	}
	if err != nil {
		x.distrust(err)
		return nil
	}
	return x.sink.Output(ctx, cmd, stream, offset, data, late)
}

// CommandEnded implements keeper.Handler.
func (x *instance) CommandEnded(ctx context.Context, id sandbox.ID, cmd string, o sandbox.Outcome) error {
	if err := x.mine(id, "end"); err != nil {
		x.distrust(err)
		return nil
	}
	cmd, ok := x.mineSince(cmd)
	if !ok {
		return nil
	}
	x.mu.Lock()
	began := x.began[cmd]
	x.mu.Unlock()
	o = checkOutcome(o, began, time.Now())
	if o.Kind != sandbox.StartFailed {
		o.DiskHit = x.diskFull(ctx)
	}
	if err := x.sink.CommandEnded(ctx, cmd, o); err != nil {
		return err
	}
	x.mu.Lock()
	delete(x.began, cmd)
	if b := x.budgets[cmd]; b != nil && len(x.budgets) > maxRunning {
		delete(x.budgets, cmd)
	}
	x.mu.Unlock()
	return nil
}

// SessionEnded implements keeper.Handler.
func (x *instance) SessionEnded(ctx context.Context, id sandbox.ID, session string, o sandbox.Outcome) error {
	if err := x.mine(id, "end of a session"); err != nil {
		x.distrust(err)
		return nil
	}
	return x.sink.SessionEnded(ctx, session, checkOutcome(o, time.Time{}, time.Now()))
}

// Ended implements keeper.Handler.
func (x *instance) Ended(ctx context.Context, id sandbox.ID, c sandbox.Cause) error {
	if err := x.mine(id, "end of the sandbox"); err != nil {
		x.distrust(err)
		return nil
	}
	switch c.Class {
	case sandbox.ClassLimit, sandbox.ClassClient, sandbox.ClassTask, sandbox.ClassPlatform, sandbox.ClassNone:
	default:
		c.Class = sandbox.ClassPlatform
	}
	c.Reason, c.Detail = cut(c.Reason, 80), cut(c.Detail, maxDetail)
	if !x.tell() {
		return nil
	}
	err := x.sink.Ended(ctx, c)
	x.toldEnd(err == nil)
	return err
}

// Denied implements keeper.Handler.
func (x *instance) Denied(ctx context.Context, id sandbox.ID, cmd, call, detail string) {
	if cmd, ok := x.mineSince(cmd); ok && x.mine(id, "denial") == nil {
		x.sink.Denied(ctx, cut(cmd, 200), cut(call, 80), cut(detail, maxDetail))
	}
}

func cut(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "?")
}

// checkOutcome brings an end into the form that it may have. Its times are within those that the host saw.
func checkOutcome(o sandbox.Outcome, began, now time.Time) sandbox.Outcome {
	switch o.Kind {
	case sandbox.Exited, sandbox.Signalled, sandbox.TimedOut, sandbox.OutOfMemory, sandbox.StartFailed, sandbox.SessionEnded, sandbox.Killed:
	default:
		o = sandbox.Outcome{Kind: sandbox.Unknown, Error: "its guest told of no end that there can be", Started: o.Started}
	}
	o.Code, o.Signal = min(max(o.Code, 0), 255), min(max(o.Signal, 0), 64)
	if len(o.Error) > maxDetail {
		o.Error = o.Error[:maxDetail]
	}
	if began.IsZero() || began.After(now) {
		began = now.Add(-30 * 24 * time.Hour)
	}
	if o.Started.Before(began) || o.Started.After(now) {
		o.Started = began
	}
	if o.Ended.Before(o.Started) || o.Ended.After(now) {
		o.Ended = now
	}
	o.Usage.CPU = min(max(o.Usage.CPU, 0), 365*24*time.Hour)
	if o.Usage.MemoryPeak < 0 || o.Usage.MemoryPeak > sandbox.MaxMemory {
		o.Usage.MemoryPeak = -1
	}
	for _, e := range []*sandbox.StreamEnd{&o.Stdout, &o.Stderr} {
		*e = checkStream(*e)
	}
	return o
}

func checkStream(e sandbox.StreamEnd) sandbox.StreamEnd {
	e.Total = min(max(e.Total, 0), 1<<50)
	e.Head = min(max(e.Head, 0), e.Total)
	e.Tail = min(max(e.Tail, 0), e.Total-e.Head)
	e.Truncated = e.Head+e.Tail < e.Total
	if b, err := hex.DecodeString(e.SHA256); err != nil || len(b) != 32 {
		e.SHA256 = ""
	}
	return e
}
