package container

import (
	"context"
	"errors"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// errNotTaken answers events of a sandbox that was not taken back yet; the keeper keeps them.
var errNotTaken = errors.New("container: the sandbox is not taken back yet")

// sinkOf is where the events of a sandbox go: nil when they are owed to nobody.
func (b *Backend) sinkOf(id sandbox.ID) (*instance, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if x := b.boxes[id]; x != nil {
		return x, nil
	}
	if _, waiting := b.found[id]; waiting && !b.swept {
		return nil, errNotTaken
	}
	return nil, nil
}

// Output, CommandEnded, SessionEnded, Ended and Denied make the driver the keeper's handler.
func (b *Backend) Output(ctx context.Context, id sandbox.ID, cmd string, stream sandbox.StreamName, offset int64, data []byte, late bool) error {
	x, err := b.sinkOf(id)
	if x == nil {
		return err
	}
	return x.sink.Output(ctx, cmd, stream, offset, data, late)
}

func (b *Backend) CommandEnded(ctx context.Context, id sandbox.ID, cmd string, o sandbox.Outcome) error {
	x, err := b.sinkOf(id)
	if x == nil {
		return err
	}
	o.DiskHit = o.DiskHit || x.diskHit()
	return x.sink.CommandEnded(ctx, cmd, o)
}

func (b *Backend) SessionEnded(ctx context.Context, id sandbox.ID, session string, o sandbox.Outcome) error {
	x, err := b.sinkOf(id)
	if x == nil {
		return err
	}
	return x.sink.SessionEnded(ctx, session, o)
}

func (b *Backend) Ended(ctx context.Context, id sandbox.ID, c sandbox.Cause) error {
	x, err := b.sinkOf(id)
	if x == nil {
		return err
	}
	return x.sink.Ended(ctx, c)
}

func (b *Backend) Denied(ctx context.Context, id sandbox.ID, cmd, call, detail string) {
	if x, _ := b.sinkOf(id); x != nil {
		x.sink.Denied(ctx, cmd, call, detail)
	}
}
