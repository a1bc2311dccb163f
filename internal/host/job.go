package host

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

const (
	noJob = "-"
	// keptName is how long the name of an expired job is refused.
	keptName = 30 * 24 * time.Hour
	// leaseSlack is by how much the backend's deadline for a lease is later than ours: it is for hosts that are down, and must not
	// fire while a renewal is on its way to a thousand sandboxes.
	leaseSlack   = 2 * time.Second
	minLease     = time.Second
	maxRetention = 365 * 24 * time.Hour
	groupAtOnce  = 32 // sandboxes that a group call works on at once
)

// job is a group of sandboxes as this host knows it; fields are under Host.mu.
type job struct {
	project, name string
	lease         time.Duration
	action        sandbox.EndAction
	until         time.Time // end of the lease; zero when none runs
	timer         *time.Timer
	retention     time.Duration // 0 is the host's
	living        int
	ended         int
	last          time.Time         // when its last sandbox ended
	expired       time.Time         // when its records were removed; zero while they are there
	recorded      bool              // has a trajectory of its own
	class         sandbox.StepClass // of commands that state none; empty is decided by their network
}

func (j *job) traj() trajectory.ID { return trajectory.ID{Project: j.project, Job: j.name} }

func (j *job) left(now time.Time) {
	j.living--
	j.last = now
}

// stopAt is when the lease stops the job's sandboxes; zero when it does not.
func (j *job) stopAt() time.Time {
	if j.action == sandbox.EndStop {
		return j.until
	}
	return time.Time{}
}

func (j *job) stopTimer() {
	if j.timer != nil {
		j.timer.Stop()
		j.timer = nil
	}
}

// joinJob finds the job of a new sandbox, or makes it; mu is held. The caller puts it into the map.
func (h *Host) joinJob(b *box) (*job, error) {
	j := h.jobs[scoped{b.spec.Project, b.spec.Job}]
	switch {
	case j == nil:
		return &job{project: b.spec.Project, name: b.spec.Job, last: time.Now()}, nil
	case !j.expired.IsZero():
		return nil, fmt.Errorf("job %s: expired at %s, its name and keys are not used again; choose another: %w", j.name, j.expired.UTC().Format(time.RFC3339), sandbox.ErrState)
	case j.lease > 0 && j.until.IsZero():
		return nil, fmt.Errorf("job %s: its lease has ended; renew it: %w", j.name, sandbox.ErrState)
	}
	return j, nil
}

// putJob sets lease and retention of a job.
func (h *Host) putJob(ctx context.Context, p *dsecv1.Job) (*dsecv1.Job, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	lease, err := rpc.Milliseconds("job.lease_ms", p.GetLeaseMs())
	if err != nil {
		return nil, err
	}
	retention, err := rpc.Milliseconds("job.retention_ms", p.GetRetentionMs())
	if err != nil {
		return nil, err
	}
	action := sandbox.EndAction(cmp.Or(p.GetOnLeaseEnd(), string(sandbox.EndStop)))
	if err := sandbox.CheckKey("job.name", p.GetName()); err != nil {
		return nil, err
	}
	switch {
	case p.GetName() == noJob:
		return nil, fmt.Errorf("job.name %q: stands for no job and has no lease or retention: %w", noJob, sandbox.ErrInvalid)
	case lease != 0 && (lease < minLease || lease > sandbox.MaxLease):
		return nil, fmt.Errorf("job.lease_ms %d: want %d to %d, or 0 for none: %w", p.GetLeaseMs(), minLease.Milliseconds(), sandbox.MaxLease.Milliseconds(), sandbox.ErrInvalid)
	case action != sandbox.EndStop && action != sandbox.EndPause && action != sandbox.EndKeep:
		return nil, fmt.Errorf("job.on_lease_end %q: want stop, pause or keep: %w", action, sandbox.ErrInvalid)
	case p.GetRestore() != "" && p.GetRestore() != string(sandbox.ClassRepeat) && p.GetRestore() != string(sandbox.ClassNever):
		return nil, fmt.Errorf("job.restore %.40q: want repeat or never: %w", p.GetRestore(), sandbox.ErrInvalid)
	case retention < 0 || retention > maxRetention:
		return nil, fmt.Errorf("job.retention_ms %d: want 0 to %d: %w", p.GetRetentionMs(), maxRetention.Milliseconds(), sandbox.ErrInvalid)
	}
	name := scoped{project(ctx), p.GetName()}
	h.mu.Lock()
	j := h.jobs[name]
	if j == nil {
		j = &job{project: name.project, name: name.name, last: time.Now()}
		h.jobs[name] = j
	}
	if !j.expired.IsZero() {
		h.mu.Unlock()
		return nil, fmt.Errorf("job %s: expired, its name is not used again: %w", j.name, sandbox.ErrState)
	}
	kind := trajectory.KindPolicy
	if !j.recorded {
		kind = trajectory.KindCreate
	}
	h.mu.Unlock()
	rec := trajectory.Record{Kind: kind, Payload: encode(tagJob, &dsecv1.Job{Name: j.name, Project: j.project, LeaseMs: p.GetLeaseMs(), OnLeaseEnd: string(action), RetentionMs: p.GetRetentionMs(), Restore: p.GetRestore()})}
	if err := h.appendJob(j, rec); err != nil {
		return nil, err
	}
	h.mu.Lock()
	j.lease, j.action, j.retention, j.recorded, j.class = lease, action, retention, true, sandbox.StepClass(p.GetRestore())
	h.mu.Unlock()
	return h.renew(ctx, name)
}

// appendJob writes a record of a job. Two calls at once may both want to create its trajectory: the second goes on as a change.
func (h *Host) appendJob(j *job, rec trajectory.Record) error {
	_, err := h.deps.Log.Append(h.life, j.traj(), []trajectory.Record{rec}, sandbox.DurabilityProcess)
	if err != nil && rec.Kind == trajectory.KindCreate {
		if _, serr := h.deps.Log.Stat(j.traj()); serr == nil {
			rec.Kind = trajectory.KindPolicy
			_, err = h.deps.Log.Append(h.life, j.traj(), []trajectory.Record{rec}, sandbox.DurabilityProcess)
		}
	}
	if err != nil {
		return fmt.Errorf("record job %s: %w", j.name, err)
	}
	return nil
}

// renew starts the lease anew. Renewals are not recorded: after a restart every lease begins anew, since nobody could renew it.
func (h *Host) renew(ctx context.Context, name scoped) (*dsecv1.Job, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	h.mu.Lock()
	j := h.jobs[name]
	if j == nil || !j.expired.IsZero() {
		h.mu.Unlock()
		return nil, fmt.Errorf("job %.60q: %w", name.name, sandbox.ErrNotFound)
	}
	h.lease(j)
	at := j.stopAt()
	h.mu.Unlock()
	h.armJob(name, at)
	return h.jobProto(name)
}

// lease starts or ends the lease's clock; mu is held.
func (h *Host) lease(j *job) {
	j.stopTimer()
	j.until = time.Time{}
	if j.lease > 0 && !h.closed {
		j.until = time.Now().Add(j.lease)
		j.timer = time.AfterFunc(j.lease, func() { h.leaseOver(j) })
	}
}

// armJob takes the lease's end to the job's sandboxes and their backends.
func (h *Host) armJob(name scoped, at time.Time) {
	var g errgroup.Group
	g.SetLimit(8)
	for _, b := range h.find(inJob(name)) {
		b.mu.Lock()
		same := b.lease.Equal(at)
		b.lease = at
		b.mu.Unlock()
		if same {
			continue
		}
		g.Go(func() error {
			if err := b.armBackend(); err != nil && h.life.Err() == nil {
				h.log.Warn("arm a lease", "sandbox", b.id, "err", err)
			}
			return nil
		})
	}
	g.Wait()
}

func inJob(name scoped) func(*box) bool {
	return func(b *box) bool { return b.spec.Project == name.project && b.spec.Job == name.name }
}

// leaseOver does what a lease that ran out says.
func (h *Host) leaseOver(j *job) {
	h.mu.Lock()
	if h.closed || j.until.IsZero() || time.Now().Before(j.until) {
		h.mu.Unlock()
		return
	}
	j.until, j.timer = time.Time{}, nil
	action, name := j.action, scoped{j.project, j.name}
	h.mu.Unlock()
	h.m.leases.WithLabelValues(string(action)).Inc()
	for _, b := range h.find(inJob(name)) {
		switch action {
		case sandbox.EndStop:
			h.end(b, sandbox.Cause{Class: sandbox.ClassClient, Reason: "lease"})
		case sandbox.EndPause:
			h.goes(func() {
				ctx, cancel := h.bounded(stateWait)
				defer cancel()
				if err := b.pause(ctx, sandbox.Frozen, "lease", false); err != nil && h.life.Err() == nil {
					h.log.Warn("pause at the end of a lease", "sandbox", b.id, "err", err)
				}
			})
		}
	}
}

// jobProto describes a job.
func (h *Host) jobProto(name scoped) (*dsecv1.Job, error) {
	h.mu.Lock()
	j := h.jobs[name]
	if j == nil || !j.expired.IsZero() {
		h.mu.Unlock()
		return nil, fmt.Errorf("job %.60q: %w", name.name, sandbox.ErrNotFound)
	}
	p := &dsecv1.Job{
		Name: j.name, Project: j.project, LeaseMs: j.lease.Milliseconds(), OnLeaseEnd: string(j.action),
		LeaseUntil: rpc.Timestamp(j.until), RetentionMs: cmp.Or(j.retention, h.cfg.Retention).Milliseconds(),
	}
	p.Ended, p.Restore = int32(j.ended), string(j.class)
	var all []*box
	for _, b := range h.alive {
		if inJob(name)(b) {
			all = append(all, b)
		}
	}
	h.mu.Unlock()
	for _, b := range all {
		b.mu.Lock()
		switch {
		case b.state.Ended():
			// it ended just now
		case b.state == sandbox.Paused || b.state == sandbox.Pausing:
			p.Paused++
		default:
			p.Running++
		}
		b.mu.Unlock()
	}
	return p, nil
}

func (h *Host) listJobs(ctx context.Context) ([]*dsecv1.Job, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	p := project(ctx)
	var names []scoped
	h.mu.Lock()
	for n, j := range h.jobs {
		if n.project == p && j.expired.IsZero() {
			names = append(names, n)
		}
	}
	h.mu.Unlock()
	slices.SortFunc(names, func(a, b scoped) int { return cmp.Compare(a.name, b.name) })
	jobs := make([]*dsecv1.Job, 0, len(names))
	for _, n := range names {
		if j, err := h.jobProto(n); err == nil { // else it has just expired
			jobs = append(jobs, j)
		}
	}
	return jobs, nil
}

// selected lists the caller's boxes that match, ordered by ID. Ended ones are in only when asked for.
func (h *Host) selected(ctx context.Context, s *dsecv1.Selector) []*box {
	p := project(ctx)
	ids := map[string]bool{}
	for _, id := range s.GetIds() {
		ids[id] = true
	}
	h.mu.Lock()
	from := h.alive
	if s.GetIncludeEnded() || len(s.GetStates()) > 0 {
		from = h.boxes
	}
	all := make([]*box, 0, len(h.alive))
	for _, b := range from {
		if b.spec.Project == p {
			all = append(all, b)
		}
	}
	h.mu.Unlock()
	match := func(b *box) bool {
		if len(ids) > 0 && !ids[string(b.id)] && (b.spec.Name == "" || !ids[b.spec.Name]) {
			return false
		}
		if s.GetJob() != "" && b.spec.Job != s.GetJob() {
			return false
		}
		for k, v := range s.GetLabels() {
			if w, ok := b.spec.Labels[k]; !ok || w != v {
				return false
			}
		}
		b.mu.Lock()
		state := b.state
		if b.ending && !state.Ended() {
			state = sandbox.Stopping
		}
		b.mu.Unlock()
		if len(s.GetStates()) > 0 {
			return slices.Contains(s.GetStates(), string(state))
		}
		return !state.Ended() || s.GetIncludeEnded()
	}
	out := all[:0]
	for _, b := range all {
		if match(b) {
			out = append(out, b)
		}
	}
	slices.SortFunc(out, func(a, b *box) int { return cmp.Compare(a.id, b.id) })
	return out
}

// checkSelector refuses a change of everything.
func checkSelector(s *dsecv1.Selector) error {
	if len(s.GetIds()) == 0 && s.GetJob() == "" && len(s.GetLabels()) == 0 && len(s.GetStates()) == 0 {
		return fmt.Errorf("selector: set ids, job, labels or states: %w", sandbox.ErrInvalid)
	}
	return nil
}

// each does something with every box, several at once, and tells each that failed.
func each(boxes []*box, act func(*box) error) *dsecv1.SelectorResult {
	r := &dsecv1.SelectorResult{Sandboxes: make([]*dsecv1.Sandbox, len(boxes))}
	errs := make([]error, len(boxes))
	var g errgroup.Group
	g.SetLimit(groupAtOnce)
	for i, b := range boxes {
		g.Go(func() error {
			errs[i] = act(b)
			r.Sandboxes[i] = b.proto()
			return nil
		})
	}
	g.Wait()
	for i, err := range errs {
		if err != nil {
			r.Errors = append(r.Errors, &dsecv1.ItemError{Id: string(boxes[i].id), Code: rpc.CodeName(err), Message: err.Error(), Index: int32(i)})
		}
	}
	return r
}

// expire removes the records of jobs whose retention is over, each job as a whole; in job "-" each sandbox is a whole.
func (h *Host) expire(ctx context.Context) {
	now := time.Now()
	h.mu.Lock()
	for id, until := range h.tombs {
		if now.After(until) {
			delete(h.tombs, id)
		}
	}
	var over []*job
	for n, j := range h.jobs {
		switch keep := cmp.Or(j.retention, h.cfg.Retention); {
		case !j.expired.IsZero():
			if now.Sub(j.expired) > keptName {
				delete(h.jobs, n)
				h.removeLater(ctx, j.traj())
			}
		case j.name != noJob && j.living == 0 && j.until.IsZero() && now.Sub(j.last) > keep:
			j.expired = now
			over = append(over, j)
		}
	}
	h.mu.Unlock()
	h.expirePassages(now)
	h.mu.Lock()
	var loose []*box
	for _, b := range h.boxes {
		if b.spec.Job == noJob && b.next.Load() == nil && b.overSince(now) > h.cfg.Retention {
			loose = append(loose, b)
		}
	}
	h.mu.Unlock()
	for _, j := range over {
		if err := h.expireJob(ctx, j, now); err != nil && h.life.Err() == nil {
			h.log.Error("expire a job", "job", j.name, "err", err)
		}
	}
	if err := h.forget(ctx, loose); err != nil && h.life.Err() == nil {
		h.log.Error("expire sandboxes", "err", err)
	}
	if err := h.expireCalls(ctx, now); err != nil && h.life.Err() == nil {
		h.log.Error("expire function calls", "err", err)
	}
}

func (b *box) overSince(now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.state.Ended() {
		return 0
	}
	return now.Sub(b.over)
}

func (h *Host) removeLater(ctx context.Context, id trajectory.ID) {
	h.wg.Go(func() {
		if err := h.deps.Log.Remove(ctx, id); err != nil && h.life.Err() == nil {
			h.log.Error("remove the name of an expired job", "job", id.Job, "err", err)
		}
	})
}

// expireJob records that the name is used up, then removes the job's records.
func (h *Host) expireJob(ctx context.Context, j *job, now time.Time) error {
	h.mu.Lock()
	kind := trajectory.KindPolicy
	if !j.recorded {
		kind = trajectory.KindCreate
	}
	j.recorded = true
	var boxes []*box
	for _, b := range h.boxes {
		if inJob(scoped{j.project, j.name})(b) {
			boxes = append(boxes, b)
		}
	}
	h.mu.Unlock()
	rec := trajectory.Record{Kind: kind, Payload: encode(tagEvent, &dsecv1.LogRecord{Kind: "expired", Time: rpc.Timestamp(now)})}
	if err := h.appendJob(j, rec); err != nil {
		return err
	}
	if err := h.forget(ctx, boxes); err != nil {
		return err
	}
	var rest []trajectory.ID // creations that failed left no box
	for _, t := range h.deps.Log.Trajectories() {
		if t.ID.Project == j.project && t.ID.Job == j.name && t.ID.Key != "" {
			rest = append(rest, t.ID)
		}
	}
	return h.deps.Log.Remove(ctx, rest...)
}

// forget removes ended sandboxes with their records.
func (h *Host) forget(ctx context.Context, boxes []*box) error {
	if len(boxes) == 0 {
		return nil
	}
	boxes = chains(boxes)
	var ids []trajectory.ID
	for _, b := range boxes {
		if b.next.Load() == nil {
			ids = append(ids, b.traj)
		}
	}
	if err := h.deps.Log.Remove(ctx, ids...); err != nil {
		return err
	}
	h.mu.Lock()
	for _, b := range boxes {
		delete(h.boxes, b.id)
		if h.keys[b.traj] == b {
			delete(h.keys, b.traj)
		}
		if j := h.jobs[scoped{b.spec.Project, b.spec.Job}]; j != nil {
			j.ended--
		}
		h.loaded.drop(b)
	}
	h.mu.Unlock()
	return nil
}
