package gateway

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/placement"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// finding is what a sandbox is looked for by: a key in a job, or the name of a living one.
type finding struct {
	job, key, name string
	id             sandbox.ID // of one that may have moved; alone
}

func (f finding) String() string {
	if f.id != "" {
		return string(f.id)
	}
	if f.key == "" {
		return "name " + f.name
	}
	return "key " + f.key + " of job " + jobOf(f.job)
}

// order is the text that fixes the order of hosts.
func (f finding) order() string { return orderOf(f.job, f.key, f.name) }

func orderOf(job, key, name string) string {
	if name != "" {
		return "n/" + name
	}
	return "k/" + jobOf(job) + "/" + key
}

func jobOf(job string) string {
	if job == "" {
		return "-"
	}
	return job
}

func notFoundKey(job, key string) error {
	return fmt.Errorf("sandbox with key %s in job %s: no host knows it: %w", key, jobOf(job), sandbox.ErrNotFound)
}

const (
	askTime  = 5 * time.Second // of a question to one host of many
	downTime = time.Second     // of anything to a host that seems down, when others are asked too
)

// ask makes a call on one host of many, so that one that hangs does not hold up the answer of the others: with a limit (0: none of its own),
// and a short one when it seems down. A host that lets the limit pass is unavailable.
func ask[S any](ctx context.Context, g *Gateway, id sandbox.HostID, limit time.Duration, call func(context.Context, *rpc.Peer) (S, error)) (out S, p *rpc.Peer, err error) {
	p, ok := g.fleet.Peer(id)
	if !ok {
		return out, nil, fmt.Errorf("host %s: is gone: %w", id, rpc.ErrUnavailable)
	}
	if !g.seemsUp(p) {
		limit = downTime
	}
	one := ctx
	if limit > 0 {
		var cancel context.CancelFunc
		one, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	out, err = patient(one, g, p, false, func() (S, error) { return call(one, p) })
	if err == nil {
		return out, p, nil
	}
	if ctx.Err() == nil && (one.Err() != nil || errors.Is(err, context.DeadlineExceeded)) {
		err = fmt.Errorf("host at %s: no answer within %v: %w", p.Addr, limit, rpc.ErrUnavailable)
	}
	return out, p, err
}

// find asks hosts in the order of the name or key: the first alone, since it is most likely there, then all others at once. It returns
// nil when every host answered that it does not know it. A host that can't be asked makes the result unknown: ErrUnavailable.
func (g *Gateway) find(ctx context.Context, f *placement.Fleet, what finding) (*dsecv1.Sandbox, *rpc.Peer, error) {
	return g.findOn(ctx, f, placement.Order(f, what.order()), what)
}

func (g *Gateway) findOn(ctx context.Context, f *placement.Fleet, order []sandbox.HostID, what finding) (*dsecv1.Sandbox, *rpc.Peer, error) {
	unknown := len(f.Nameless) > 0
	missing := append([]string(nil), f.Nameless...)
	if len(order) == 0 {
		return nil, nil, fmt.Errorf("find %s: no host answers: %w", what, rpc.ErrUnavailable)
	}
	type answer struct {
		sb   *dsecv1.Sandbox
		peer *rpc.Peer
		err  error
	}
	query := func(ctx context.Context, id sandbox.HostID) (a answer) {
		var resp *connect.Response[dsecv1.FindKeyResponse]
		resp, a.peer, a.err = ask(ctx, g, id, g.askTime, func(ctx context.Context, p *rpc.Peer) (*connect.Response[dsecv1.FindKeyResponse], error) {
			return p.Host.FindKey(ctx, connect.NewRequest(&dsecv1.FindKeyRequest{Job: what.job, Key: what.key, Name: what.name}))
		})
		if a.err == nil && resp.Msg.GetMovedTo() != "" {
			if a.sb, a.peer, a.err = g.follow(ctx, what, a.peer); a.sb == nil && a.err == nil {
				a.err = sandbox.ErrNotFound
			}
			return a
		}
		if a.err == nil {
			a.sb = resp.Msg.GetSandbox()
		}
		return a
	}
	take := func(a answer) (bool, error) {
		switch {
		case a.err == nil && a.sb.GetId() != "":
			return true, nil
		case a.err == nil || errors.Is(a.err, sandbox.ErrNotFound):
			return false, nil
		case errors.Is(a.err, rpc.ErrUnavailable):
			unknown = true
			missing = append(missing, a.err.Error())
			return false, nil
		}
		return false, a.err
	}
	first := query(ctx, order[0])
	if ok, err := take(first); ok || err != nil {
		return first.sb, first.peer, err
	}
	answers := make([]answer, len(order)-1)
	if err := each(ctx, len(answers), func(ctx context.Context, i int) { answers[i] = query(ctx, order[i+1]) }); err != nil {
		return nil, nil, err
	}
	for _, a := range answers {
		if ok, err := take(a); ok || err != nil {
			return a.sb, a.peer, err
		}
	}
	if unknown {
		return nil, nil, fmt.Errorf("find %s: not all hosts could be asked (%s), so whether it exists is not known; repeat the call. %s: %w", what, firstOf(missing), whatToDo(f, time.Now()), rpc.ErrUnavailable)
	}
	return nil, nil, nil
}

// whatToDo tells the operator how to go on without the hosts that do not answer: only a person knows whether one is lost for good.
func whatToDo(f *placement.Fleet, now time.Time) string {
	var gone []string
	for _, h := range f.Hosts {
		switch {
		case h.Up:
		case h.At.IsZero():
			gone = append(gone, h.Addr)
		default:
			gone = append(gone, fmt.Sprintf("%s (%s, silent for %v)", h.Addr, h.ID, now.Sub(h.At).Round(time.Second)))
		}
	}
	for _, a := range f.Nameless {
		gone = append(gone, a+" (never answered this gateway)")
	}
	if len(gone) == 0 {
		return "The host that did not answer was there a moment ago"
	}
	return "If it is lost for good, start the gateways without --host (or gateway.hosts) " + firstOf(gone) +
		": its sandboxes are given up by that; docs/ops/config.md says what to do when it comes back, and how gateway.lost_after gives up hosts by itself. A create without key and name goes elsewhere meanwhile"
}

func firstOf(list []string) string {
	if len(list) > 1 {
		return fmt.Sprintf("%s, and %d more", list[0], len(list)-1)
	}
	return list[0]
}

// each runs f for 0 to n-1, fanOut at once, and waits for all. It fails when ctx ends before all have begun.
func each(ctx context.Context, n int, f func(ctx context.Context, i int)) error {
	return eachOf(ctx, n, fanOut, f)
}

func eachOf(ctx context.Context, n, parallel int, f func(ctx context.Context, i int)) error {
	if n == 1 {
		f(ctx, 0)
		return nil
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, parallel)
	for i := range n {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		wg.Go(func() {
			defer func() { <-slots }()
			f(ctx, i)
		})
	}
	return nil
}

// everywhere asks all hosts at once, each for the limit (0: as long as the call may last). What can't be asked is told as ItemErrors: by the host's ID, or its address when it never told one.
func everywhere[S any](ctx context.Context, g *Gateway, limit time.Duration, call func(context.Context, *rpc.Peer) (S, error)) (answers []S, errs []*dsecv1.ItemError, err error) {
	g.ready(ctx)
	f := g.fleet.Fleet()
	if len(f.Hosts) == 0 {
		return nil, nil, fmt.Errorf("no host answers (%d configured): %w", len(f.Nameless), rpc.ErrUnavailable)
	}
	all := make([]S, len(f.Hosts))
	failed := make([]error, len(f.Hosts))
	err = each(ctx, len(f.Hosts), func(ctx context.Context, i int) {
		all[i], _, failed[i] = ask(ctx, g, f.Hosts[i].ID, limit, call)
	})
	if err != nil {
		return nil, nil, err
	}
	for i, e := range failed {
		if e == nil {
			answers = append(answers, all[i])
		} else {
			errs = append(errs, itemError(string(f.Hosts[i].ID), e))
		}
	}
	for _, a := range f.Nameless {
		errs = append(errs, itemError(a, fmt.Errorf("host at %s: did not answer so far: %w", a, rpc.ErrUnavailable)))
	}
	return answers, errs, nil
}

func itemError(id string, err error) *dsecv1.ItemError {
	return &dsecv1.ItemError{Id: id, Code: rpc.CodeName(err), Message: err.Error()}
}
