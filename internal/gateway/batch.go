package gateway

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	maxBatch      = 10000
	batchParallel = 32 // creates of one batch at once; the hosts bound what they work on themselves
	undoTime      = 60 * time.Second
)

// CreateBatch makes count sandboxes with the keys K/1 to K/N.
func (s sandboxes) CreateBatch(ctx context.Context, r *connect.Request[dsecv1.CreateBatchRequest]) (*connect.Response[dsecv1.CreateBatchResponse], error) {
	q, n := r.Msg.GetRequest(), int(r.Msg.GetCount())
	switch {
	case q == nil:
		return nil, fmt.Errorf("request: missing: %w", sandbox.ErrInvalid)
	case n < 1 || n > maxBatch:
		return nil, fmt.Errorf("count %d: want 1 to %d: %w", n, maxBatch, sandbox.ErrInvalid)
	case q.Name != "" && n > 1:
		return nil, fmt.Errorf("name %q: %d sandboxes can't have one name; leave it empty, keys and labels tell them apart: %w", q.Name, n, sandbox.ErrInvalid)
	}
	if q.Key == "" {
		q.Key = sandbox.NewKey()
	}
	if err := sandbox.CheckKey("key", q.Key+"/"+strconv.Itoa(n)); err != nil {
		return nil, err
	}
	// What every item would be refused for is told once.
	if _, _, err := s.g.resolve(ctx, proto.Clone(q).(*dsecv1.CreateRequest)); err != nil {
		return nil, err
	}
	made, errs, begun := make([]*dsecv1.CreateResponse, n), make([]error, n), make([]bool, n)
	work, giveUp := context.WithCancel(ctx)
	defer giveUp()
	var failed atomic.Bool
	var first error // for which the others were given up
	stopped := eachOf(work, n, batchParallel, func(ctx context.Context, i int) {
		if r.Msg.All && failed.Load() {
			errs[i] = context.Canceled
			return
		}
		begun[i] = true
		one := proto.Clone(q).(*dsecv1.CreateRequest)
		one.Key = q.Key + "/" + strconv.Itoa(i+1)
		made[i], errs[i] = s.g.create(ctx, one)
		if errs[i] != nil && r.Msg.All && !failed.Swap(true) {
			first = errs[i]
			giveUp()
		}
	})
	if ctx.Err() != nil && !r.Msg.All {
		return nil, fmt.Errorf("create batch %s: what was made so far can be found by its job and keys: %w", q.Key, ctx.Err())
	}
	out := &dsecv1.CreateBatchResponse{}
	for i := range n {
		if made[i] != nil {
			out.Sandboxes = append(out.Sandboxes, made[i].GetSandbox())
			continue
		}
		if r.Msg.All {
			continue // one error is told for all
		}
		if errs[i] == nil { // not begun
			errs[i] = stopped
		}
		e := itemError(q.Key+"/"+strconv.Itoa(i+1), errs[i])
		e.Index = int32(i)
		out.Errors = append(out.Errors, e)
	}
	half := halfBatch(made)
	if !r.Msg.All || len(out.Sandboxes) == n && half == nil {
		return connect.NewResponse(out), nil
	}
	left := s.g.undoBatch(ctx, q, made, begun)
	why := ctx.Err()
	switch {
	case half != nil:
		why = half
	case first != nil:
		why = first
	}
	err := fmt.Errorf("create batch %s: %d of %d were made and are stopped again; to try again takes another key: %w", q.Key, len(out.Sandboxes), n, why)
	if left != nil {
		err = fmt.Errorf("create batch %s: %d of %d were made; stopping them failed (%v): %w", q.Key, len(out.Sandboxes), n, left, why)
	}
	return nil, err
}

// halfBatch says why all that were made do not make a whole: some are of an earlier try and have ended, as an all-or-nothing batch that
// failed leaves them, others are new. A batch that was whole once stays the recorded result, whatever has ended of it since.
func halfBatch(made []*dsecv1.CreateResponse) error {
	ended, fresh := "", false
	for _, m := range made {
		switch {
		case m == nil:
		case !m.GetExisted():
			fresh = true
		case sandbox.State(m.GetSandbox().GetState()).Ended() || m.GetSandbox().GetState() == string(sandbox.Stopping):
			ended = m.GetSandbox().GetId()
		}
	}
	if ended == "" || !fresh {
		return nil
	}
	return fmt.Errorf("sandbox %s of an earlier try under this key has ended: %w", ended, sandbox.ErrState)
}

// undoBatch stops what an all-or-nothing batch has begun: what was made by its ID, what may have been made by its key.
func (g *Gateway) undoBatch(ctx context.Context, q *dsecv1.CreateRequest, made []*dsecv1.CreateResponse, begun []bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	left := make([]error, len(made))
	stopped := eachOf(ctx, len(made), batchParallel, func(ctx context.Context, i int) {
		if !begun[i] {
			return
		}
		if made[i] != nil && made[i].GetExisted() {
			return // an earlier call's
		}
		stop := &dsecv1.StopRequest{Job: q.Job, Key: q.Key + "/" + strconv.Itoa(i+1)}
		if made[i] != nil {
			stop = &dsecv1.StopRequest{Id: made[i].GetSandbox().GetId()}
		}
		_, left[i] = g.stop(ctx, stop)
	})
	return errors.Join(append(left, stopped)...)
}
