package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

const (
	maxForks     = 1000 // of one call
	forkParallel = 32   // creates of one call at once; births bound themselves
)

// Fork makes sandboxes that begin with the files of a living one: a snapshot, once under its key, and a create for each on top of it. The
// call can be repeated: both are known by their keys. Where the backend forks memory they go on with its processes, too; the snapshot is then
// what a restore begins with. A request with an environment of its own begins with files alone: no process would have it. So does what a
// repeated call makes, because an earlier one broke off or asked for fewer: the sandbox has moved on since its snapshot.
func (s sandboxService) Fork(ctx context.Context, req *connect.Request[dsecv1.ForkRequest]) (*connect.Response[dsecv1.ForkResponse], error) {
	q, h := req.Msg, s.h
	n := max(int(q.GetCount()), 1)
	if q.GetCount() < 0 || n > maxForks {
		return nil, fmt.Errorf("count %d: want 1 to %d: %w", q.GetCount(), maxForks, sandbox.ErrInvalid)
	}
	key := q.GetKey()
	if key == "" {
		key = sandbox.NewKey()
	}
	if err := sandbox.CheckKey("key", forkKey(key, n-1)); err != nil {
		return nil, err
	}
	b, err := h.get(ctx, q.GetId())
	if err != nil {
		return nil, err
	}
	spec, err := b.forkSpec(ctx, q)
	if err != nil {
		return nil, fmt.Errorf("fork of %s: %w", b.id, err)
	}
	b.forks.Lock() // the same call at once: its creates must not come before the first one's point
	defer b.forks.Unlock()
	layer, existed, err := b.snapshot(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("fork: %w", err)
	}
	spec.Layers = append(spec.Layers, layer)
	if len(q.GetEnv()) == 0 && !existed { // the memory of now is not that of the snapshot's time
		release, err := b.point(ctx, spec, key, n)
		if err != nil {
			return nil, fmt.Errorf("fork: %w", err)
		}
		defer release()
	}
	made, errs := make([]*dsecv1.Sandbox, n), make([]error, n)
	var g errgroup.Group
	g.SetLimit(forkParallel)
	for i := range n {
		g.Go(func() error {
			one := proto.CloneOf(spec)
			one.Key = forkKey(key, i)
			f, _, err := h.create(ctx, &dsecv1.HostCreateRequest{Spec: one})
			if errs[i] = err; err == nil {
				made[i] = f.proto()
			}
			return nil
		})
	}
	g.Wait()
	out := &dsecv1.ForkResponse{Layer: layer}
	for i := range n {
		if errs[i] != nil {
			out.Errors = append(out.Errors, &dsecv1.ItemError{Id: forkKey(key, i), Code: rpc.CodeName(errs[i]), Message: errs[i].Error(), Index: int32(i)})
			continue
		}
		out.Sandboxes = append(out.Sandboxes, made[i])
	}
	return connect.NewResponse(out), nil
}

// point has the creates that follow go on from the sandbox's memory, where its backend can and any of them is not there yet.
func (b *box) point(ctx context.Context, spec *dsecv1.Spec, key string, n int) (release func(), err error) {
	release = func() {}
	var keys []sandbox.ForkKey
	b.h.mu.Lock()
	for i := range n {
		k := sandbox.ForkKey{Project: spec.GetProject(), Job: spec.GetJob(), Key: forkKey(key, i)}
		if b.h.keys[trajectory.ID(k)] == nil {
			keys = append(keys, k)
		}
	}
	b.h.mu.Unlock()
	be := b.h.deps.Backends[b.spec.Backend]
	if len(keys) == 0 || be == nil || be.Capabilities().Fork != "memory" {
		return release, nil
	}
	inst, err := b.use(ctx)
	if err != nil {
		return release, err
	}
	defer b.done()
	f, ok := inst.(sandbox.Forked)
	if !ok {
		return release, nil
	}
	r, err := f.Point(ctx, keys)
	if errors.Is(err, sandbox.ErrUnsupported) {
		return release, nil // files then: the answer's notes tell
	}
	if err != nil {
		return release, err
	}
	return r, nil
}

func forkKey(key string, i int) string { return key + "/" + strconv.Itoa(i+1) }

// forkSpec is what the forks have in common: the specification of the sandbox with what the request changes.
func (b *box) forkSpec(ctx context.Context, q *dsecv1.ForkRequest) (*dsecv1.Spec, error) {
	life, err := rpc.Lifetime(q.GetLifetime())
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	all := b.life
	b.mu.Unlock()
	merge(&all, life)
	extra, secret, err := rpc.Env("env", q.GetEnv())
	if err != nil {
		return nil, err
	}
	hidden, err := b.secretNames(ctx)
	if err != nil {
		return nil, err
	}
	spec := *b.spec
	spec.Name, spec.Lifetime, spec.Layers = "", all, slices.Clone(b.spec.Layers)
	if q.GetJob() != "" {
		spec.Job = q.GetJob()
	}
	spec.Labels = maps.Clone(b.spec.Labels)
	for k, v := range q.GetLabels() {
		if spec.Labels == nil {
			spec.Labels = map[string]string{}
		}
		spec.Labels[k] = v
	}
	spec.Env = sandbox.MergeEnv(b.spec.Env, extra)
	given := map[string]bool{} // as what a variable was given here, it is from now on
	for _, kv := range extra {
		name, _, _ := strings.Cut(kv, "=")
		given[name] = true
	}
	var lost []string
	for _, kv := range spec.Env {
		name, value, _ := strings.Cut(kv, "=")
		if !hidden[name] || given[name] {
			continue
		}
		secret = append(secret, name)
		if hashed(value) {
			lost = append(lost, name)
		}
	}
	if len(lost) > 0 {
		return nil, fmt.Errorf("env: the values of the secrets %s are not known here since the host was started again; give them in env: %w", strings.Join(lost, ", "), sandbox.ErrInvalid)
	}
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	return rpc.SpecProto(&spec, secret), nil
}

// secretNames are the variables of the sandbox's environment whose values the log must not hold. The create's record tells.
func (b *box) secretNames(ctx context.Context) (map[string]bool, error) {
	b.mu.Lock()
	seq := b.seq
	b.mu.Unlock()
	recs, _, err := b.h.deps.Log.Read(ctx, b.traj, trajectory.Query{From: seq, Limit: 1})
	if err != nil {
		return nil, err
	}
	if len(recs) == 0 || recs[0].Seq != seq {
		return nil, fmt.Errorf("record %d of its create is not there: %w", seq, sandbox.ErrNotFound)
	}
	_, m, err := decode(recs[0].Payload)
	if err != nil {
		return nil, err
	}
	was, ok := m.(*dsecv1.HostCreateRequest)
	if !ok {
		return nil, fmt.Errorf("record %d is not that of its create", seq)
	}
	names := map[string]bool{}
	for _, v := range was.GetSpec().GetEnv() {
		if v.GetSecret() {
			names[nameOf(v)] = true
		}
	}
	return names, nil
}
