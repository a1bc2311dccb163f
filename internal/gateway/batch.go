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
	"github.com/dsec-dev/dsec/internal/rpc"
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
	made, errs := make([]*dsecv1.CreateResponse, n), make([]error, n)
	work, giveUp := context.WithCancel(ctx)
	defer giveUp()
	var failed atomic.Bool
	stopped := eachOf(work, n, batchParallel, func(ctx context.Context, i int) {
		if r.Msg.All && failed.Load() {
			errs[i] = context.Canceled
			return
		}
		one := proto.Clone(q).(*dsecv1.CreateRequest)
		one.Key = q.Key + "/" + strconv.Itoa(i+1)
		made[i], errs[i] = s.g.create(ctx, one)
		if errs[i] != nil && r.Msg.All && !failed.Swap(true) {
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
		if errs[i] == nil { // not begun
			errs[i] = stopped
		}
		if r.Msg.All && errors.Is(errs[i], context.Canceled) && failed.Load() {
			continue // given up because of another, which is told
		}
		e := itemError(q.Key+"/"+strconv.Itoa(i+1), errs[i])
		e.Index = int32(i)
		out.Errors = append(out.Errors, e)
	}
	if !r.Msg.All || len(out.Sandboxes) == n {
		return connect.NewResponse(out), nil
	}
	left := s.g.undoBatch(ctx, q, made, errs)
	why := ctx.Err()
	if len(out.Errors) > 0 {
		why = rpc.FromCode(out.Errors[0].Code, out.Errors[0].Message)
	}
	err := fmt.Errorf("create batch %s: %d of %d were made and are stopped again: %w", q.Key, len(out.Sandboxes), n, why)
	if left != nil {
		err = fmt.Errorf("create batch %s: %d of %d were made; stopping them failed (%v): %w", q.Key, len(out.Sandboxes), n, left, why)
	}
	return nil, err
}

// undoBatch stops what an all-or-nothing batch has begun: what was made by its ID, what may have been made by its key.
func (g *Gateway) undoBatch(ctx context.Context, q *dsecv1.CreateRequest, made []*dsecv1.CreateResponse, errs []error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	left := make([]error, len(made))
	stopped := eachOf(ctx, len(made), batchParallel, func(ctx context.Context, i int) {
		if made[i] == nil && errs[i] == nil {
			return // never begun
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
