package fncall

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// flightKey names a call under way.
type flightKey struct{ project, job, key string }

// flight is a call under way that has a key of its own: who asks with the same key waits for the same answer.
type flight struct {
	digest  [32]byte
	cancel  context.CancelFunc
	done    chan struct{} // closed when answer and err are there
	answer  []byte
	err     error
	waiters int
	given   bool // up by its key: the verdict is recorded
}

const madePrefix = "auto-"

// madeKey reports whether a key is one that the platform made: nobody asks with it again.
func madeKey(key string) bool { return strings.HasPrefix(key, madePrefix) }

// message is a response, made by its pointer.
type message[S any] interface {
	*S
	proto.Message
}

// once runs a call, or gives the answer that its key has.
func once[S any, P message[S]](ctx context.Context, e *Engine, project string, a asked, run func(context.Context) (P, error), sign func(r P, key string, recorded bool)) (P, error) {
	if a.job == "" {
		a.job = noJob
	}
	if err := sandbox.CheckKey("job", a.job); err != nil {
		return nil, err
	}
	own := a.key != ""
	if own {
		if err := sandbox.CheckKey("key", a.key); err != nil {
			return nil, err
		}
		if madeKey(a.key) {
			return nil, fmt.Errorf("key %.80q: keys that begin with %q are the platform's: %w", a.key, madePrefix, sandbox.ErrInvalid)
		}
	} else {
		a.key = madePrefix + sandbox.NewKey()
	}
	if e.deps.Jobs != nil {
		if err := e.deps.Jobs.Call(project, a.job); err != nil {
			return nil, err
		}
	}
	digest, _, err := a.digest(project)
	if err != nil {
		return nil, err
	}
	if !own {
		if err := e.rates.allow(project, a.n); err != nil {
			return nil, err
		}
		r, err := run(ctx)
		if err != nil {
			return nil, fmt.Errorf("call: %w", err)
		}
		if err := ctx.Err(); err != nil {
			return nil, err // nobody is there to be told
		}
		sign(r, a.key, false)
		b, err := deterministic.Marshal(r)
		if err == nil {
			err = e.records.add(ctx, project, &a, digest, b, false)
		}
		return r, err
	}
	name := flightKey{project, a.job, a.key}
	e.mu.Lock()
	f := e.flights[name]
	if f != nil && f.digest != digest {
		e.mu.Unlock()
		return nil, fmt.Errorf("call %s: its key is in use for another request: %w", a.key, sandbox.ErrExists)
	}
	recorded := f != nil
	if f == nil {
		// The call goes on for as long as anybody waits for it.
		life, cancel := context.WithCancel(context.WithoutCancel(ctx))
		f = &flight{digest: digest, cancel: cancel, done: make(chan struct{})}
		e.flights[name] = f
		go func() {
			defer cancel()
			var old bool
			f.answer, old, f.err = keyed(life, e, project, &a, digest, f, run, sign)
			if old {
				e.m.recorded.Inc()
			}
			e.mu.Lock()
			delete(e.flights, name)
			e.mu.Unlock()
			close(f.done)
		}()
	}
	f.waiters++
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		f.waiters--
		last := f.waiters == 0
		e.mu.Unlock()
		if last {
			f.cancel()
		}
	}()
	select {
	case <-f.done:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if f.err != nil {
		return nil, fmt.Errorf("call %s: %w", a.key, f.err)
	}
	r := P(new(S))
	if err := proto.Unmarshal(f.answer, r); err != nil {
		return nil, fmt.Errorf("call %s: its answer: %w: %w", a.key, err, sandbox.ErrLost)
	}
	if recorded {
		sign(r, a.key, true)
	}
	return r, nil
}

// keyed looks for the recorded answer of a key, or runs the call and records its answer.
func keyed[S any, P message[S]](ctx context.Context, e *Engine, project string, a *asked, digest [32]byte, f *flight, run func(context.Context) (P, error), sign func(P, string, bool)) (answer []byte, old bool, err error) {
	b, err := e.records.find(ctx, project, a, digest)
	if err != nil {
		return nil, false, err
	}
	if b != nil {
		r := P(new(S))
		if err := proto.Unmarshal(b, r); err != nil {
			return nil, false, fmt.Errorf("its recorded answer: %w: %w", err, sandbox.ErrLost)
		}
		sign(r, a.key, true)
		b, err = deterministic.Marshal(r)
		return b, true, err
	}
	if err := e.rates.allow(project, a.n); err != nil {
		return nil, false, err
	}
	r, err := run(ctx)
	if err != nil {
		return nil, false, err
	}
	e.mu.Lock()
	given := f.given
	e.mu.Unlock()
	if ctx.Err() != nil && !given {
		return nil, false, context.Cause(ctx)
	}
	sign(r, a.key, false)
	if b, err = deterministic.Marshal(r); err != nil {
		return nil, false, err
	}
	if failed(r) { // the platform's fault is no answer for good: the key may be asked again
		return b, false, nil
	}
	return b, false, e.records.add(context.WithoutCancel(ctx), project, a, digest, b, true)
}

// failed reports whether a response holds the verdict SYS.
func failed(r proto.Message) bool {
	type verdict interface{ GetVerdict() string }
	v, ok := r.(verdict)
	return ok && v.GetVerdict() == string(SYS)
}

// Cancel ends the call of a key.
func (e *Engine) Cancel(project, job, key string) error {
	if job == "" {
		job = noJob
	}
	e.mu.Lock()
	f := e.flights[flightKey{project, job, key}]
	if f != nil {
		f.given = true
	}
	e.mu.Unlock()
	if f == nil {
		return fmt.Errorf("call %.80q of job %.80q: none is under way: %w", key, job, sandbox.ErrNotFound)
	}
	f.cancel()
	return nil
}
