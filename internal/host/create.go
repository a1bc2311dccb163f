package host

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// entrypoint is the ID of the command that a sandbox's entrypoint runs as.
const entrypoint = "entrypoint"

// create makes a sandbox, or joins the one of the same key. It answers when the sandbox can take commands; when ctx ends before,
// the creation goes on and can be stopped by its key.
func (h *Host) create(ctx context.Context, req *dsecv1.HostCreateRequest) (_ *box, existed bool, err error) {
	if err := h.wait(ctx); err != nil {
		return nil, false, err
	}
	spec, err := rpc.Spec(req.GetSpec())
	if err != nil {
		return nil, false, fmt.Errorf("create: %w", err)
	}
	spec.Fill()
	if err := spec.Validate(); err != nil {
		return nil, false, fmt.Errorf("create: %w", err)
	}
	if len(spec.Entry) > 0 {
		c := &sandbox.Command{ID: entrypoint, Argv: spec.Entry}
		c.Fill(spec)
		if err := c.Validate(); err != nil {
			return nil, false, fmt.Errorf("create: entrypoint: %w", err)
		}
	}
	if p := rpc.Project(ctx); p != "" && p != spec.Project {
		return nil, false, fmt.Errorf("create: spec is of project %q, the call of %q: %w", spec.Project, p, sandbox.ErrDenied)
	}
	be, err := h.able(spec)
	if err != nil {
		return nil, false, fmt.Errorf("create: %w", err)
	}
	keyless := req.GetKeyless()
	req = h.canonicalCreate(req, spec)
	b := &box{
		h: h, id: sandbox.NewID(h.cfg.ID), traj: trajectory.ID{Project: spec.Project, Job: spec.Job, Key: spec.Key}, spec: spec,
		sum: req.RequestHash, state: sandbox.Creating, life: spec.Lifetime,
		history: newHistory(),
	}
	r := h.measure()
	h.mu.Lock()
	known, err := h.claim(b, r)
	h.mu.Unlock()
	switch {
	case err != nil:
		return nil, false, fmt.Errorf("create key %s in job %s: %w", spec.Key, spec.Job, err)
	case known != nil:
		b, existed, err := h.join(ctx, known, req)
		if keyless && ctx.Err() != nil {
			h.unheard(known)
		}
		return b, existed, err
	}
	deadline := time.Duration(req.GetRequest().GetDeadlineMs()) * time.Millisecond
	if deadline <= 0 || deadline > 10*time.Minute {
		deadline = createWait
	}
	if !h.goes(func() { h.birth(b, be, req, deadline) }) {
		h.unclaim(b)
		return nil, false, fmt.Errorf("create: host is shutting down: %w", rpc.ErrUnavailable)
	}
	err = b.settled(ctx)
	if keyless && ctx.Err() != nil {
		h.unheard(b)
	}
	if err != nil {
		return nil, false, fmt.Errorf("create %s (goes on; stop it by its key): %w", b.id, err)
	}
	return b, false, b.failure()
}

// unheardFor is how long a sandbox lives that nobody may know of: longer than a gateway tries to hear the answer of a create.
const unheardFor = 30 * time.Second

// unheard ends a sandbox that nobody can find, unless somebody turns out to know it: its client gave no key, and the gateway that asked for it
// went away before the answer. A gateway that lives asks again, or stops it by the key that it made up.
func (h *Host) unheard(b *box) {
	h.goes(func() {
		if b.settled(h.life) != nil || b.failure() != nil {
			return
		}
		b.mu.Lock()
		asked, last := b.asked, b.last
		b.mu.Unlock()
		wait := time.NewTimer(unheardFor)
		defer wait.Stop()
		select {
		case <-wait.C:
		case <-h.life.Done():
			return
		}
		b.mu.Lock()
		known := b.asked != asked || !b.last.Equal(last)
		b.mu.Unlock()
		if !known {
			h.end(b, sandbox.Cause{Class: sandbox.ClassClient, Reason: "cancelled", Detail: "its create had no key, and nobody heard the answer"})
		}
	})
}

// canonicalCreate is what the log keeps of a create, with the defaults filled in.
func (h *Host) canonicalCreate(req *dsecv1.HostCreateRequest, spec *sandbox.Spec) *dsecv1.HostCreateRequest {
	_, secret, _ := rpc.Env("env", req.GetSpec().GetEnv()) // was read before
	c := &dsecv1.HostCreateRequest{Spec: rpc.SpecProto(spec, secret)}
	h.hideSecrets(c.Spec.Env)
	if r := req.GetRequest(); r != nil {
		c.Request = proto.CloneOf(r)
		c.Request.DeadlineMs = 0 // about the call, not the sandbox
		h.hideSecrets(c.Request.Env)
	}
	hash := req.GetRequestHash()
	if hash == "" {
		// A client without a hash is compared by the resolved spec, in which a key that we made stands too.
		hash = string(encode(tagCreate, c))
	}
	c.RequestHash = h.mac("request", hash) // a plain hash would let secrets be guessed
	return c
}

// claim puts the box into the maps, unless its key or name is taken or the host has no room; mu is held.
func (h *Host) claim(b *box, r reading) (known *box, err error) {
	if known := h.keys[b.traj]; known != nil {
		return known, nil
	}
	if until, ok := h.tombs[b.traj]; ok && time.Now().Before(until) {
		return nil, fmt.Errorf("it was stopped before it was created: %w", sandbox.ErrState)
	}
	if p := h.crossed[b.traj]; p != nil {
		return nil, p.elsewhere("")
	}
	j, err := h.joinJob(b)
	if err != nil {
		return nil, err
	}
	name := scoped{b.spec.Project, b.spec.Name}
	if b.spec.Name != "" {
		if other := h.names[name]; other != nil {
			return nil, fmt.Errorf("name %s: taken by sandbox %s (key %s, job %s); stop it or choose another: %w", b.spec.Name, other.id, other.spec.Key, other.spec.Job, sandbox.ErrExists)
		}
	}
	if err := h.admit(r); err != nil {
		h.m.refused.Inc()
		return nil, err
	}
	h.boxes[b.id], h.alive[b.id], h.keys[b.traj] = b, b, b
	if b.spec.Name != "" {
		h.names[name] = b
	}
	h.creating++
	j.living++
	h.jobs[scoped{b.spec.Project, b.spec.Job}] = j
	b.lease = j.stopAt()
	b.created = time.Now()
	return nil, nil
}

// unclaim takes a creation that failed out of the maps: its key and name are free again.
func (h *Host) unclaim(b *box) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.boxes, b.id)
	delete(h.alive, b.id)
	delete(h.keys, b.traj)
	if p := b.prev; p != nil { // a restore that failed: the trajectory is again that of the sandbox before
		h.keys[b.traj] = p
		p.epoch.Store(b.epoch.Load())
		p.next.Store(nil)
	}
	h.freeName(b)
	h.creating--
	if j := h.jobs[scoped{b.spec.Project, b.spec.Job}]; j != nil {
		j.left(time.Now())
	}
}

func (h *Host) freeName(b *box) {
	name := scoped{b.spec.Project, b.spec.Name}
	if h.names[name] == b {
		delete(h.names, name)
	}
}

// join answers the sandbox of a known key once it is born, if the request is the same.
func (h *Host) join(ctx context.Context, b *box, req *dsecv1.HostCreateRequest) (*box, bool, error) {
	b.mu.Lock()
	b.asked++
	b.mu.Unlock()
	if b.sum != req.RequestHash && !h.sameCreate(ctx, b, req) {
		return nil, false, fmt.Errorf("create key %s in job %s: was used for sandbox %s with another request: %s: %w", b.spec.Key, b.spec.Job, b.id, h.createDifference(ctx, b, req), sandbox.ErrExists)
	}
	if err := b.settled(ctx); err != nil {
		return nil, false, fmt.Errorf("create %s (goes on; stop it by its key): %w", b.id, err)
	}
	return b, true, b.failure()
}

// sameCreate compares with a create that another host recorded, whose key for hashes is not here: by the requests, but for their secrets.
func (h *Host) sameCreate(ctx context.Context, b *box, req *dsecv1.HostCreateRequest) bool {
	b.mu.Lock()
	foreign := b.seq > 0 && b.seq <= b.foreign
	b.mu.Unlock()
	if !foreign {
		return false
	}
	was, _ := h.recordedCreate(ctx, b)
	return was.GetRequest() != nil && req.GetRequest() != nil && sameSecretly(was.Request, req.Request) == ""
}

// recordedCreate reads the create of a sandbox; why tells that it can't.
func (h *Host) recordedCreate(ctx context.Context, b *box) (was *dsecv1.HostCreateRequest, why string) {
	b.mu.Lock()
	seq := b.seq
	b.mu.Unlock()
	if seq == 0 {
		return nil, "its record is being written"
	}
	recs, _, err := h.deps.Log.Read(ctx, b.traj, trajectory.Query{From: seq, Limit: 1})
	if err != nil || len(recs) == 0 {
		return nil, "its record can't be read"
	}
	_, m, err := decode(recs[0].Payload)
	was, ok := m.(*dsecv1.HostCreateRequest)
	if err != nil || !ok {
		return nil, "its record can't be read"
	}
	return was, ""
}

func (h *Host) createDifference(ctx context.Context, b *box, req *dsecv1.HostCreateRequest) string {
	was, why := h.recordedCreate(ctx, b)
	if was == nil {
		return why
	}
	if was.Request != nil && req.Request != nil {
		if d := difference(was.Request, req.Request); d != "" {
			return d
		}
	}
	if d := difference(was.Spec, req.Spec); d != "" {
		return d
	}
	return "another request hash"
}

// settled waits until the creation has come to an end, whichever, and its entrypoint was asked for: who makes a sandbox with one finds
// the command.
func (b *box) settled(ctx context.Context) error {
	b.mu.Lock()
	for (b.state == sandbox.Creating || b.entering) && b.err == nil {
		if err := b.waitChange(ctx); err != nil {
			return err
		}
		b.mu.Lock()
	}
	b.mu.Unlock()
	return nil
}

func (b *box) failure() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// birth carries a creation through. It owns the box until the state is no longer creating.
func (h *Host) birth(b *box, be sandbox.Backend, req *dsecv1.HostCreateRequest, deadline time.Duration) {
	start := time.Now()
	ctx, cancel := h.bounded(deadline)
	defer cancel()
	b.mu.Lock()
	b.abort = cancel
	stopped := b.ending
	b.mu.Unlock()
	if stopped {
		cancel()
	}
	inst, err := h.bear(ctx, b, be, req, sandbox.Running)
	switch {
	case err == nil:
		h.m.creates.WithLabelValues("ok").Inc()
		h.m.createTime.Observe(time.Since(start).Seconds())
		h.raise(b, inst)
	case h.stillborn(b, err):
	default:
		h.m.creates.WithLabelValues("failed").Inc()
		b.fail(err)
	}
}

// bear records the create, asks the backend and records the birth and the state after it. After an error nothing of the sandbox is left.
func (h *Host) bear(ctx context.Context, b *box, be sandbox.Backend, req *dsecv1.HostCreateRequest, to sandbox.State) (sandbox.Instance, error) {
	if err := h.births.Acquire(ctx, 1); err != nil {
		return nil, fmt.Errorf("create %s: waiting for %d others: %w: %w", b.id, h.cfg.MaxBirths, err, sandbox.ErrExhausted)
	}
	defer h.births.Release(1)
	rec := trajectory.Record{Kind: trajectory.KindCreate, Step: string(b.id), Payload: encode(tagCreate, req)}
	if _, err := h.deps.Log.Stat(b.traj); err == nil {
		rec.Kind = trajectory.KindState // a creation under this key failed before; a trajectory has one record of kind create
	}
	seq, err := b.append(rec)
	if err != nil {
		return nil, fmt.Errorf("create %s: record it: %w", b.id, err)
	}
	b.mu.Lock()
	b.seq = seq
	b.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("create %s: %w", b.id, err)
	}
	inst, err := be.Create(ctx, b.id, b.spec, (*sink)(b))
	if err != nil {
		if strings.HasPrefix(err.Error(), "create "+string(b.id)) {
			return nil, err // a backend names the act itself
		}
		return nil, fmt.Errorf("create %s: %w", b.id, err)
	}
	b.mu.Lock()
	if n, ok := inst.(interface{ Notes() map[string]string }); ok {
		b.notes = n.Notes()
	}
	b.noteTrace(inst)
	at := b.deadline()
	b.armed = b.total // the backend's Create armed the total
	b.mu.Unlock()
	if !at.Equal(b.total) {
		if err := inst.SetDeadline(ctx, at); err != nil {
			h.log.Warn("arm the lease in the backend", "sandbox", b.id, "err", err)
		} else {
			b.mu.Lock()
			b.armed = at
			b.mu.Unlock()
		}
	}
	if _, err := b.append(stateRecord(to, "", sandbox.Cause{}, inst.Handle())); err != nil {
		err = fmt.Errorf("create %s: record its birth: %w", b.id, err)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyWait)
		defer cancel()
		return nil, errors.Join(err, inst.Destroy(ctx))
	}
	return inst, nil
}

// raise makes a born sandbox usable.
func (h *Host) raise(b *box, inst sandbox.Instance) {
	h.mu.Lock()
	h.creating--
	h.mu.Unlock()
	b.mu.Lock()
	b.inst, b.state, b.abort, b.sealing = inst, sandbox.Running, nil, false
	b.entering = len(b.spec.Entry) > 0 && !b.ending
	b.last = time.Now()
	b.arm()
	cause, stop := b.cause, b.ending
	moved := !b.deadline().Equal(b.armed) // the lease was renewed while it was being born
	b.changed.ring()
	b.mu.Unlock()
	if moved && !stop {
		h.goes(func() {
			if err := b.armBackend(); err != nil && h.life.Err() == nil {
				h.log.Warn("arm a lease", "sandbox", b.id, "err", err)
			}
		})
	}
	if stop { // asked for while it was being born
		b.mu.Lock()
		b.ending = false
		b.mu.Unlock()
		h.end(b, cause)
		return
	}
	if len(b.spec.Entry) > 0 {
		h.startEntry(b)
	}
}

func (h *Host) startEntry(b *box) {
	defer func() {
		b.mu.Lock()
		b.entering = false
		b.changed.ring()
		b.mu.Unlock()
	}()
	ctx, cancel := h.bounded(actWait)
	defer cancel()
	_, _, err := b.start(ctx, &sandbox.Command{ID: entrypoint, Argv: b.spec.Entry})
	if err != nil && h.life.Err() == nil {
		h.end(b, sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "entrypoint", Detail: err.Error()})
	}
}

// stillborn ends a creation that was stopped before there was anything: the key stays with the ended sandbox.
func (h *Host) stillborn(b *box, err error) bool {
	b.mu.Lock()
	stop, recorded, cause := b.ending, b.seq != 0, b.cause
	b.mu.Unlock()
	if !stop || h.life.Err() != nil {
		return false
	}
	if recorded {
		if _, aerr := b.append(endOf(sandbox.Stopped, cause, b.sumUp(cause, nil))); aerr != nil {
			h.log.Error("record a stopped creation", "sandbox", b.id, "err", aerr)
		}
	} else {
		// Nothing was recorded: the key goes into the tombstones, which is what a stop of an unknown key leaves.
		b.fail(fmt.Errorf("create %s: stopped before it was created: %w", b.id, sandbox.ErrState))
		h.bury(b.traj)
		return true
	}
	h.m.creates.WithLabelValues("stopped").Inc()
	h.log.Debug("creation stopped", "sandbox", b.id, "err", err)
	h.mu.Lock()
	h.creating--
	h.mu.Unlock()
	h.close(b, sandbox.Stopped, cause)
	return true
}

// fail gives a creation up: what was recorded is void and the key is free again.
func (b *box) fail(err error) {
	h := b.h
	b.mu.Lock()
	recorded := b.seq != 0
	b.mu.Unlock()
	if recorded && h.life.Err() == nil {
		_, aerr := b.append(trajectory.Record{Kind: trajectory.KindVoid, Step: string(b.id), Payload: encode(tagEvent, &dsecv1.LogRecord{Kind: "create_failed", RequestJson: text(err.Error())})})
		if aerr != nil {
			h.log.Error("record a failed creation", "sandbox", b.id, "err", aerr)
		}
	}
	h.unclaim(b) // before anybody hears of it: who tries again finds the key free
	b.mu.Lock()
	b.err, b.abort, b.ending = err, nil, true
	b.state, b.over = sandbox.Failed, time.Now()
	b.cause = sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "create", Detail: err.Error()}
	b.changed.ring()
	b.mu.Unlock()
}
