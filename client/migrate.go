package client

import (
	"context"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

const migrateTime = 15 * time.Minute // as a gateway gives it

// Migrate moves the sandbox of a machine (backends microvm and vm) to another host, or to one that fits where to is empty. It goes on there under its
// ID with its processes, sessions and commands; the call may be made again. It answers the host that it was on. Errors: ErrUnsupported where it, or
// any host, can't; ErrState while a call is at work in it; ErrExhausted where there is no room.
func (s *Sandbox) Migrate(ctx context.Context, to string) (from string, err error) {
	if _, ok := ctx.Deadline(); !ok { // memory and disk take their time
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, migrateTime)
		defer cancel()
	}
	r, err := call(ctx, s.c, s.c.Sandboxes.Migrate, &dsecv1.MigrateRequest{Id: s.ID, To: to})
	if err != nil {
		return "", err
	}
	s.Data = r.Sandbox
	return r.From, nil
}
