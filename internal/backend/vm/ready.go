package vm

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	// readyPrefix is the host that the names of waiting machines have: no host has it.
	readyPrefix = "dsecwaiting"
	// maxKinds bounds the kinds of sandboxes for which machines wait.
	maxKinds = 4
	// readyAge is how long they wait for a create of their kind.
	readyAge = 10 * time.Minute
	warmName = "dsec-warm"
)

// readies are clones with a sandbox born in them, paused, that wait for a create of their kind: what a birth costs was paid before. None has
// run anything of a client, and each is given away once: clock and random numbers are renewed before that.
type readies struct {
	b *Backend
	// creates that run: machines are made ahead when there are none.
	creating atomic.Int32

	mu     sync.Mutex
	kinds  map[[32]byte]*kind
	done   chan struct{} // of the one who makes machines; nil: there is none
	cancel context.CancelFunc
	closed bool
}

type kind struct {
	spec   sandbox.Spec
	used   time.Time
	failed time.Time
	list   []*instance
}

func newReadies(b *Backend) *readies { return &readies{b: b, kinds: map[[32]byte]*kind{}} }

// kindOf is what of a specification a machine with its sandbox has.
func kindOf(s *sandbox.Spec) (key [32]byte, like sandbox.Spec) {
	like = sandbox.Spec{Layers: s.Layers, Env: s.Env, Hostname: s.Hostname, Resources: s.Resources, Network: s.Network, BestEffort: s.BestEffort,
		NoNewPrivs: s.NoNewPrivs, AllowDegraded: s.AllowDegraded, Backend: s.Backend, User: s.User, Cwd: s.Cwd}
	text, err := json.Marshal(like)
	if err != nil { // of plain data
		panic(err)
	}
	return sha256.Sum256(text), like
}

func (r *readies) serves(s *sandbox.Spec) bool {
	return r.b.cfg.Ready > 0 && !r.b.cfg.NoTemplates && r.b.driver.Features().Template && r.b.driver.Features().Pause && s.Network == sandbox.NetworkNone && len(s.Volumes) == 0
}

// take gives away a machine of the specification's kind, or nil.
func (r *readies) take(s *sandbox.Spec) *instance {
	if !r.serves(s) {
		return nil
	}
	key, _ := kindOf(s)
	r.mu.Lock()
	defer r.mu.Unlock()
	k := r.kinds[key]
	if k == nil || len(k.list) == 0 {
		return nil
	}
	x := k.list[len(k.list)-1]
	k.list = k.list[:len(k.list)-1]
	return x
}

// want has machines of a kind that was asked for be made.
func (r *readies) want(s *sandbox.Spec) {
	if !r.serves(s) {
		return
	}
	key, like := kindOf(s)
	var gone []*instance
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return
	}
	k := r.kinds[key]
	if k == nil {
		for len(r.kinds) >= maxKinds {
			var oldest [32]byte
			for n, x := range r.kinds {
				if r.kinds[oldest] == nil || x.used.Before(r.kinds[oldest].used) {
					oldest = n
				}
			}
			gone = append(gone, r.kinds[oldest].list...)
			delete(r.kinds, oldest)
		}
		k = &kind{spec: like}
		r.kinds[key] = k
	}
	k.used = time.Now()
	if r.done == nil {
		done := make(chan struct{})
		var ctx context.Context
		ctx, r.cancel = context.WithCancel(r.b.life)
		r.done = done
		r.b.work.Add(1)
		go func() {
			defer r.b.work.Done()
			defer close(done)
			r.keep(ctx)
		}()
	}
	r.mu.Unlock()
	r.dispose(gone)
}

// keep makes what misses, one after another, and ends what waited too long, until there is neither.
func (r *readies) keep(ctx context.Context) {
	for {
		r.mu.Lock()
		var short *kind
		var gone []*instance
		for key, k := range r.kinds {
			if time.Since(k.used) > readyAge || ctx.Err() != nil {
				gone = append(gone, k.list...)
				delete(r.kinds, key)
				continue
			}
			if len(k.list) < r.b.cfg.Ready && time.Since(k.failed) > templatePatience && short == nil {
				short = k
			}
		}
		if len(r.kinds) == 0 && len(gone) == 0 {
			r.cancel()
			r.done = nil
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		r.dispose(gone)
		if short == nil || r.creating.Load() > 0 {
			pause := 50 * time.Millisecond
			if short == nil {
				pause = time.Second
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
			continue
		}
		x, err := r.make(ctx, &short.spec)
		r.mu.Lock()
		if err != nil {
			short.failed = time.Now()
		} else if r.kindLocked(short) {
			short.list, x = append(short.list, x), nil
		}
		r.mu.Unlock()
		if err != nil && ctx.Err() == nil {
			r.b.log.Warn("no machine waits for the next create", "err", err)
		} else if x != nil && err == nil {
			r.dispose([]*instance{x})
		}
	}
}

func (r *readies) kindLocked(k *kind) bool {
	for _, x := range r.kinds {
		if x == k {
			return true
		}
	}
	return false
}

// make makes a clone with a sandbox in it, runs a program there, so that what a command needs is translated, and pauses it.
func (r *readies) make(ctx context.Context, spec *sandbox.Spec) (*instance, error) {
	b := r.b
	ctx, cancel := context.WithTimeout(ctx, birthBound)
	defer cancel()
	ended := make(quiet, 1)
	x := newInstance(b, sandbox.NewID(readyPrefix), spec, ended)
	err := x.make(ctx)
	if err == nil && x.h.Template == "" {
		err = errors.New("it booted")
	}
	if err == nil {
		err = b.warden.SetDeadline(ctx, x.name(), time.Now().Add(readyAge+birthBound))
	}
	if err == nil {
		cmd := &sandbox.Command{ID: warmName, Argv: []string{"/bin/sh", "-c", ":"}, Cwd: "/", User: "root", OutputCap: 4096, Timeout: 5 * time.Second}
		if err = x.link.keeper.Start(ctx, x.inside(), cmd); err == nil {
			select {
			case <-ended:
			case <-time.After(6 * time.Second):
				err = errors.New("its first command does not end")
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
	}
	if err == nil {
		err = x.vm.Pause(ctx)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a machine ahead: %w", err), x.abandon(ctx))
	}
	return x, nil
}

// quiet is the sink of a sandbox that nobody has yet.
type quiet chan struct{}

func (quiet) Output(context.Context, string, sandbox.StreamName, int64, []byte, bool) error {
	return nil
}

func (q quiet) CommandEnded(context.Context, string, sandbox.Outcome) error {
	select {
	case q <- struct{}{}:
	default:
	}
	return nil
}
func (quiet) SessionEnded(context.Context, string, sandbox.Outcome) error { return nil }
func (quiet) Denied(context.Context, string, string, string)              {}
func (quiet) Ended(context.Context, sandbox.Cause) error                  { return nil }

// abandon ends a machine that nobody has.
func (x *instance) abandon(ctx context.Context) error {
	x.link.close()
	x.setState(undone)
	return x.undo.run(ctx)
}

func (r *readies) dispose(list []*instance) {
	for _, x := range list {
		if err := x.abandon(context.Background()); err != nil {
			r.b.log.Error("end a machine that waited", "machine", x.name(), "err", err)
		}
	}
}

// names adds the names of the machines that wait.
func (r *readies) names(to map[string]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range r.kinds {
		for _, x := range k.list {
			to[x.name()] = true
		}
	}
}

// Waiting are the names of the machines that wait for a create.
func (b *Backend) Waiting() []string {
	names := map[string]bool{}
	b.ready.names(names)
	return slices.Sorted(maps.Keys(names))
}

// drain ends all that wait, for good.
func (r *readies) drain(ctx context.Context) error {
	r.mu.Lock()
	r.closed = true
	done := r.done
	if done != nil {
		r.cancel() // who makes them ends them
	}
	r.mu.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("end the machines that wait: %w", ctx.Err())
	}
}

// adopt makes a machine that waited the sandbox's. On an error nothing of it is left.
func (b *Backend) adopt(ctx context.Context, x, from *instance) (err error) {
	began := time.Now()
	x.h = from.h
	x.h.Machine, x.h.Inside = from.name(), from.inside()
	if err := b.slots.give(x.h.Slot, from.id, x.id); err != nil {
		return errors.Join(err, from.abandon(ctx))
	}
	from.cancel()
	x.remains()
	x.undo.push("end the machine", x.endMachine)
	x.vm = from.vm
	from.link.owner.Store(x)
	x.setLink(from.link)
	if total := x.spec.Lifetime.Total; total > 0 {
		x.deadline = time.Now().Add(total)
	}
	if x.handle, err = json.Marshal(x.h); err != nil {
		return err
	}
	if err := x.vm.Resume(ctx); err != nil {
		return err
	}
	if err := x.link.renew(ctx, true); err != nil {
		return err
	}
	if x.deadline.IsZero() {
		err = x.armWarden(ctx, 0)
	} else {
		err = x.arm(ctx, x.link)
	}
	b.log.Debug("machine adopted", "sandbox", x.id, "machine", x.name(), "all", time.Since(began), "err", err)
	return err
}

// remains pushes what undoes what a sandbox that is there has on the host, but for its machine and network.
func (x *instance) remains() {
	b := x.b
	x.undo.push("release uid slot", func(context.Context) error { b.slots.release(x.h.Slot, x.id); return nil })
	x.undo.push("release the image", func(context.Context) error { b.flat.release(layer.ID(x.h.Layer)); return nil })
	x.undo.push("remove the disk", func(context.Context) error { return b.disks.remove(x.name()) })
	x.undo.push("remove the saved state", func(context.Context) error { return x.dropSaved() })
	x.undo.push("remove what it saves", func(context.Context) error { return os.RemoveAll(b.store(x.name())) })
	x.undo.push("remove the folder", func(context.Context) error { return os.RemoveAll(x.dir()) })
}

// owner hands what a guest tells to the instance that has it.
type owner struct{ atomic.Pointer[instance] }

// Output implements keeper.Handler.
func (o *owner) Output(ctx context.Context, id sandbox.ID, cmd string, stream sandbox.StreamName, offset int64, data []byte, late bool) error {
	return o.Load().Output(ctx, id, cmd, stream, offset, data, late)
}

// CommandEnded implements keeper.Handler.
func (o *owner) CommandEnded(ctx context.Context, id sandbox.ID, cmd string, out sandbox.Outcome) error {
	return o.Load().CommandEnded(ctx, id, cmd, out)
}

// SessionEnded implements keeper.Handler.
func (o *owner) SessionEnded(ctx context.Context, id sandbox.ID, session string, out sandbox.Outcome) error {
	return o.Load().SessionEnded(ctx, id, session, out)
}

// Ended implements keeper.Handler.
func (o *owner) Ended(ctx context.Context, id sandbox.ID, c sandbox.Cause) error {
	return o.Load().Ended(ctx, id, c)
}

// Denied implements keeper.Handler.
func (o *owner) Denied(ctx context.Context, id sandbox.ID, cmd, call, detail string) {
	o.Load().Denied(ctx, id, cmd, call, detail)
}
