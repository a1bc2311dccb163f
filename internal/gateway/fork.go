package gateway

import (
	"context"
	"fmt"
	"strconv"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Fork is the work of the host that has the sandbox. A key that the caller chose must not be another host's.
func (s sandboxes) Fork(ctx context.Context, r *connect.Request[dsecv1.ForkRequest]) (*connect.Response[dsecv1.ForkResponse], error) {
	q, g := r.Msg, s.g
	chosen := q.Key != ""
	if !chosen {
		q.Key = sandbox.NewKey()
	}
	id, p, err := g.surely(ctx, q.Id)
	if err != nil {
		return nil, err
	}
	q.Id = id
	if chosen && len(g.fleet.Fleet().Hosts) > 1 {
		if err := g.forkKeysFree(ctx, q, p); err != nil {
			return nil, err
		}
	}
	resp, err := send(ctx, g, p, q, true, p.Sandboxes.Fork)
	if err != nil {
		return nil, err
	}
	made, err := layer.ParseID(resp.Msg.GetLayer())
	if err != nil {
		return nil, fmt.Errorf("fork: the host answered: %w", err)
	}
	// Hosts know layers, not whose they are.
	if err := g.layers.Hold(ctx, rpc.Project(ctx), made); err != nil {
		return nil, fmt.Errorf("fork: its sandboxes are made and can be found by their keys %s/1 to %s/%d; holding their layer failed, repeat the call: %w", q.Key, q.Key, max(q.Count, 1), err)
	}
	return resp, nil
}

// forkKeysFree asks all hosts for the keys of the forks: a key makes one sandbox over all of them.
func (g *Gateway) forkKeysFree(ctx context.Context, q *dsecv1.ForkRequest, own *rpc.Peer) error {
	n := max(int(q.Count), 1)
	if n > maxBatch {
		return nil // the host refuses it
	}
	job := q.Job
	if job == "" {
		of, err := patient(ctx, g, own, true, func() (*connect.Response[dsecv1.GetResponse], error) {
			return own.Sandboxes.Get(ctx, connect.NewRequest(&dsecv1.GetRequest{Id: q.Id}))
		})
		if err != nil {
			return err
		}
		job = of.Msg.GetSandbox().GetJob()
	}
	f, errs := g.fleet.Fleet(), make([]error, n)
	err := eachOf(ctx, n, batchParallel, func(ctx context.Context, i int) {
		key := q.Key + "/" + strconv.Itoa(i+1)
		sb, p, err := g.find(ctx, f, finding{job: job, key: key})
		if err == nil && sb != nil && p.Addr != own.Addr {
			err = fmt.Errorf("key %s in job %s: sandbox %s on another host has it; choose another key: %w", key, job, sb.Id, sandbox.ErrExists)
		}
		errs[i] = err
	})
	for _, e := range append(errs, err) {
		if e != nil {
			return fmt.Errorf("fork: %w", e)
		}
	}
	return nil
}
