package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// A trajectory of a lost host is copied into this host's log, record by record, with its times and epochs. A record `recalled` ends the
// copy: one without it is half, and is removed at the next start. Then its last sandbox ends here as lost, as after a crash of the
// machine, and a restore goes on as with any other that is gone.

// LostLog is what the store has of a lost host's log.
type LostLog interface {
	Read(ctx context.Context, id trajectory.ID, q trajectory.Query) (recs []trajectory.Record, next uint64, err error)
	OpenInput(in *trajectory.Input) (io.ReadCloser, error)
	Trajectories() []trajectory.Info
	// Take claims a trajectory for a host and answers whose it is.
	Take(ctx context.Context, id trajectory.ID, by string) (owner string, err error)
	Drop() error
}

const (
	lostKept  = 10 * time.Minute // a fetched log that nobody asks for
	lostFetch = 30 * time.Minute // to fetch one
	lostMost  = 8                // at once
	leaseWait = 10 * time.Second // beyond a lease, until its sandboxes are over for sure
)

// lostLogs are the logs of lost hosts that were fetched.
type lostLogs struct {
	mu  sync.Mutex
	all map[sandbox.HostID]*lostLog
}

type lostLog struct {
	ready chan struct{} // closed when log or err is set
	log   LostLog
	err   error
	ids   map[sandbox.ID]trajectory.ID

	copying sync.Mutex // one trajectory at a time
	users   int        // under lostLogs.mu
	timer   *time.Timer
}

func (h *Host) lostDir() string { return filepath.Join(h.cfg.Dir, "lost") }

// sweepLost removes what an earlier process fetched.
func (h *Host) sweepLost() {
	if err := os.RemoveAll(h.lostDir()); err != nil {
		h.log.Warn("remove the logs of lost hosts that were fetched", "err", err)
	}
}

// lostLog fetches the log of a lost host, once. release must be called.
func (h *Host) lostLog(ctx context.Context, id sandbox.HostID) (_ *lostLog, release func(), err error) {
	if h.deps.TakeOver == nil {
		return nil, nil, fmt.Errorf("host %s has no store from which it could fetch the log of %s; start it with --store: %w", h.cfg.ID, id, sandbox.ErrUnsupported)
	}
	h.gone.mu.Lock()
	l := h.gone.all[id]
	if l == nil {
		if len(h.gone.all) >= lostMost {
			h.gone.mu.Unlock()
			return nil, nil, fmt.Errorf("host %s has fetched the logs of %d lost hosts, at most %d at once; ask again later: %w", h.cfg.ID, lostMost, lostMost, sandbox.ErrExhausted)
		}
		l = &lostLog{ready: make(chan struct{})}
		if h.gone.all == nil {
			h.gone.all = map[sandbox.HostID]*lostLog{}
		}
		h.gone.all[id] = l
		if !h.goes(func() { h.fetchLost(id, l) }) {
			delete(h.gone.all, id)
			h.gone.mu.Unlock()
			return nil, nil, fmt.Errorf("host is shutting down: %w", rpc.ErrUnavailable)
		}
	}
	l.users++
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	h.gone.mu.Unlock()
	release = func() {
		h.gone.mu.Lock()
		defer h.gone.mu.Unlock()
		if l.users--; l.users == 0 && l.err == nil {
			l.timer = time.AfterFunc(lostKept, func() { h.dropLost(id, l) })
		}
	}
	select {
	case <-l.ready:
		if l.err != nil {
			release()
			return nil, nil, l.err
		}
		return l, release, nil
	case <-ctx.Done():
		release()
		return nil, nil, fmt.Errorf("the log of host %s is being fetched: %w", id, ctx.Err())
	}
}

func (h *Host) fetchLost(id sandbox.HostID, l *lostLog) {
	ctx, cancel := h.bounded(lostFetch)
	defer cancel()
	log, err := h.deps.TakeOver(ctx, string(id), filepath.Join(h.lostDir(), string(id)))
	if err == nil {
		l.log = log
		l.ids, err = h.idsOf(ctx, log)
	}
	h.gone.mu.Lock()
	l.err = err
	if err != nil {
		delete(h.gone.all, id) // who asks again tries again
	}
	h.gone.mu.Unlock()
	close(l.ready)
	if err == nil {
		h.log.Warn("took over the log of a lost host", "host", id, "sandboxes", len(l.ids))
	}
}

// dropLost frees a log that nobody has asked for.
func (h *Host) dropLost(id sandbox.HostID, l *lostLog) {
	h.gone.mu.Lock()
	unused := l.users == 0 && h.gone.all[id] == l
	if unused {
		delete(h.gone.all, id)
	}
	h.gone.mu.Unlock()
	if !unused {
		return
	}
	if err := l.log.Drop(); err != nil {
		h.log.Warn("remove the log of a lost host that was fetched", "host", id, "err", err)
	}
}

// dropAllLost frees all when the host ends.
func (h *Host) dropAllLost() {
	h.gone.mu.Lock()
	all := h.gone.all
	h.gone.all = nil
	h.gone.mu.Unlock()
	for id, l := range all {
		if l.timer != nil {
			l.timer.Stop()
		}
		if l.log != nil {
			if err := l.log.Drop(); err != nil {
				h.log.Warn("remove the log of a lost host that was fetched", "host", id, "err", err)
			}
		}
	}
}

// idsOf finds the sandboxes of a log.
func (h *Host) idsOf(ctx context.Context, log LostLog) (map[sandbox.ID]trajectory.ID, error) {
	ids := map[sandbox.ID]trajectory.ID{}
	for _, t := range log.Trajectories() {
		if t.ID.Key == "" {
			continue
		}
		q := trajectory.Query{Kinds: trajectory.Kinds(trajectory.KindCreate, trajectory.KindState)}
		for {
			recs, next, err := log.Read(ctx, t.ID, q)
			for _, r := range recs {
				if id, perr := sandbox.ParseID(r.Step); perr == nil && len(r.Payload) > 0 && tag(r.Payload[0]) == tagCreate {
					ids[id] = t.ID
				}
			}
			if err != nil && !errors.Is(err, sandbox.ErrLost) {
				return nil, err
			}
			if next <= max(q.From, 1) {
				break
			}
			q.From = next
		}
	}
	return ids, nil
}

// recallBox takes the sandbox that a restore names out of the log of a lost host.
func (h *Host) recallBox(ctx context.Context, hr *dsecv1.HostRestoreRequest) (*box, error) {
	q := hr.GetRequest()
	lost, err := sandbox.ParseHostID(hr.GetLostHost())
	if err != nil {
		return nil, fmt.Errorf("lost_host: %w", err)
	}
	if lost == h.cfg.ID {
		return nil, fmt.Errorf("lost_host %s: is this host, which is not lost: %w", lost, sandbox.ErrInvalid)
	}
	if err := h.mayTakeOver(ctx, hr, lost); err != nil {
		return nil, err
	}
	l, release, err := h.lostLog(ctx, lost)
	if errors.Is(err, sandbox.ErrNotFound) {
		// Not as if it had been asked and did not know the key: it was not shut out, and may live on.
		return nil, fmt.Errorf("host %s has no place in the store of host %s, so it can't be shut out: %w", lost, h.cfg.ID, sandbox.ErrState)
	}
	if err != nil {
		return nil, err
	}
	defer release()
	id := trajectory.ID{Project: project(ctx), Job: jobName(q.GetJob()), Key: q.GetKey()}
	if q.GetSandbox() != "" {
		known := false
		if id, known = l.ids[sandbox.ID(q.GetSandbox())]; !known || id.Project != project(ctx) {
			return nil, fmt.Errorf("sandbox %.60q: neither this host nor what the store has of host %s knows it: %w", q.GetSandbox(), lost, sandbox.ErrNotFound)
		}
	}
	if _, _, err := l.log.Read(ctx, id, trajectory.Query{Limit: 1}); errors.Is(err, sandbox.ErrNotFound) {
		return nil, fmt.Errorf("key %.60q in job %.60q: neither this host nor what the store has of host %s knows it: %w", id.Key, id.Job, lost, sandbox.ErrNotFound)
	}
	l.copying.Lock()
	defer l.copying.Unlock()
	h.mu.Lock()
	b := h.keys[id]
	h.mu.Unlock()
	if b != nil { // copied by a call that was faster
		return b, nil
	}
	return h.copyLost(ctx, l.log, id, lost)
}

// mayTakeOver says whether a host may be taken for lost: its caller vouches for it, or all that lives there has a lease that is over.
func (h *Host) mayTakeOver(ctx context.Context, hr *dsecv1.HostRestoreRequest, lost sandbox.HostID) error {
	if hr.GetSilentMs() < 0 {
		return nil
	}
	silent := time.Duration(hr.GetSilentMs()) * time.Millisecond
	h.mu.Lock()
	defer h.mu.Unlock()
	j := h.jobs[scoped{project(ctx), jobName(hr.GetRequest().GetJob())}]
	if j != nil && j.lease > 0 && j.action == sandbox.EndStop && silent > j.lease+leaseSlack+leaseWait {
		return nil
	}
	return fmt.Errorf("host %s does not answer (silent for %v), so whether the sandbox is gone is not known: wait until it is back, or name it as lost_host when it is gone for good: %w",
		lost, silent.Round(time.Second), sandbox.ErrState)
}

// copyLost copies a trajectory and ends its last sandbox.
func (h *Host) copyLost(ctx context.Context, log LostLog, id trajectory.ID, lost sandbox.HostID) (_ *box, err error) {
	owner, err := log.Take(ctx, id, string(h.cfg.ID))
	if err != nil {
		return nil, err
	}
	if owner != string(h.cfg.ID) {
		return nil, fmt.Errorf("key %s of job %s: host %s goes on with it; ask again: %w", id.Key, id.Job, owner, rpc.ErrUnavailable)
	}
	h.mu.Lock()
	j := h.jobs[scoped{id.Project, id.Job}]
	expired := j != nil && !j.expired.IsZero()
	h.mu.Unlock()
	if expired {
		return nil, fmt.Errorf("job %s has expired: %w", id.Job, sandbox.ErrState)
	}
	end, err := h.recallPassage(ctx, id, lost)
	if err != nil {
		return nil, err
	}
	done := false
	defer func() { err = errors.Join(err, end(done)) }()
	if _, err := h.deps.Log.Stat(id); err == nil { // what a failed copy or creation left
		if err := h.deps.Log.Remove(h.life, id); err != nil {
			return nil, err
		}
	}
	defer func() {
		if !done {
			err = errors.Join(err, h.deps.Log.Remove(h.life, id))
		}
	}()
	durability, last, err := h.copyRecords(ctx, log, id)
	if err != nil {
		return nil, err
	}
	info, err := h.deps.Log.Stat(id)
	if err != nil {
		return nil, err
	}
	last.Host = string(lost)
	mark := trajectory.Record{Kind: trajectory.KindEvent, Epoch: info.Epoch + 1, Payload: encode(tagRecalled, last)}
	if _, err := h.deps.Log.Append(h.life, id, []trajectory.Record{mark}, durability); err != nil {
		return nil, fmt.Errorf("record the copy of %v: %w", id, err)
	}
	st, err := h.tell(ctx, id, wholeStory, 0)
	if err != nil {
		return nil, err
	}
	if st.create == nil || st.void {
		return nil, fmt.Errorf("key %s of job %s: host %s lost its creation, or it never came to life: %w", id.Key, id.Job, lost, sandbox.ErrNotFound)
	}
	done = true
	return h.endLost(ctx, id, st, lost)
}

// recordSource is where records are copied from.
type recordSource interface {
	Read(ctx context.Context, id trajectory.ID, q trajectory.Query) (recs []trajectory.Record, next uint64, err error)
	OpenInput(in *trajectory.Input) (io.ReadCloser, error)
}

// copyRecords copies all records; what is missing leaves a mark, so that the others keep their numbers.
func (h *Host) copyRecords(ctx context.Context, log recordSource, id trajectory.ID) (d sandbox.Durability, end *dsecv1.Recalled, err error) {
	end, d = &dsecv1.Recalled{}, sandbox.DurabilityProcess
	q := trajectory.Query{Limit: 256}
	var epoch uint32
	for {
		recs, next, err := log.Read(ctx, id, q)
		if err != nil && !errors.Is(err, sandbox.ErrLost) {
			return d, nil, err
		}
		if len(recs) > 0 && recs[0].Kind == trajectory.KindCreate && q.From <= 1 {
			if _, m, derr := decode(recs[0].Payload); derr == nil {
				if c, ok := m.(*dsecv1.HostCreateRequest); ok {
					d = sandbox.Durability(c.GetSpec().GetDurability())
				}
			}
		}
		if d == sandbox.DurabilityStore && !h.deps.Log.Stores() {
			return d, nil, fmt.Errorf("durability store: host %s keeps its log on its own disk alone; start it with --store: %w", h.cfg.ID, sandbox.ErrUnsupported)
		}
		for i := range recs {
			epoch = max(epoch, recs[i].Epoch)
			if recs[i].Input, err = h.deps.Log.Keep(log, recs[i].Input, d); err != nil {
				return d, nil, fmt.Errorf("copy the input of record %d: %w", recs[i].Seq, err)
			}
			end.LastSeq, end.LastTime = int64(recs[i].Seq), rpc.Timestamp(recs[i].Wall)
		}
		at := max(q.From, 1) + uint64(len(recs))
		if len(recs) > 0 {
			if err := h.deps.Log.Import(h.life, id, recs); err != nil {
				return d, nil, err
			}
		}
		for ; at < next; at++ { // lost
			if at == 1 {
				return d, nil, fmt.Errorf("the record of its creation is lost: %w", sandbox.ErrLost)
			}
			if len(end.Missing) < maxTold {
				end.Missing = append(end.Missing, int64(at))
			}
			mark := trajectory.Record{Seq: at, Epoch: epoch, Kind: trajectory.KindEvent, Payload: encode(tagEvent, &dsecv1.LogRecord{Kind: "lost"})}
			if err := h.deps.Log.Import(h.life, id, []trajectory.Record{mark}); err != nil {
				return d, nil, err
			}
		}
		if next <= max(q.From, 1) {
			if end.LastSeq == 0 {
				return d, nil, fmt.Errorf("key %s of job %s: %w", id.Key, id.Job, sandbox.ErrNotFound)
			}
			return d, end, nil
		}
		q.From = next
	}
}

// endLost takes a copied trajectory in: its last sandbox, unless it had ended, ends as lost.
func (h *Host) endLost(ctx context.Context, id trajectory.ID, st *story, lost sandbox.HostID) (*box, error) {
	if st.restoring() {
		st.giveUp() // an attempt of the lost host
	}
	b, err := h.retell(id, st)
	if err != nil {
		return nil, err
	}
	over := st.state.Ended()
	o := orphan{b: b, st: st}
	if !over {
		b.state, b.ending = sandbox.Stopping, true
		b.cause = sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "host_lost", Detail: "host " + string(lost) + " is gone; its records were taken from the store"}
		if err := h.prepare(o); err != nil {
			return nil, err
		}
	}
	h.mu.Lock()
	h.boxes[b.id], h.keys[id] = b, b
	for e := b.prev; e != nil; e = e.prev {
		h.boxes[e.id] = e
	}
	j := h.jobOf(scoped{id.Project, id.Job})
	if over {
		j.ended++
		j.last = time.Now()
	} else {
		h.alive[b.id] = b
		j.living++
	}
	h.mu.Unlock()
	if over {
		return b, nil
	}
	h.settle(o)
	return b, b.waitEnd(ctx)
}

// lookForFence ends all sandboxes when another host has taken this one for lost: what they do is recorded nowhere any more, and they may be
// restored elsewhere.
func (h *Host) lookForFence() {
	h.mu.Lock()
	busy := h.looking || len(h.alive) == 0
	h.looking = h.looking || !busy
	h.mu.Unlock()
	if busy || !h.deps.Log.Stores() {
		h.doneLooking(busy)
		return
	}
	if !h.goes(func() {
		defer h.doneLooking(false)
		ctx, cancel := h.bounded(shipWait)
		defer cancel()
		fenced, err := h.deps.Log.Fenced(ctx)
		if err != nil && h.life.Err() == nil {
			h.log.Debug("look whether the place in the store is still this host's", "err", err)
		}
		if !fenced {
			return
		}
		h.fenced.Store(true)
		all := h.find(func(*box) bool { return true })
		h.log.Error("another has taken this host for lost: its sandboxes are ended", "sandboxes", len(all))
		h.Drain(true)
		for _, b := range all {
			h.end(b, sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "host_lost", Detail: "another host took this one's place in the store"})
		}
	}) {
		h.doneLooking(false)
	}
}

func (h *Host) doneLooking(wasBusy bool) {
	if wasBusy {
		return
	}
	h.mu.Lock()
	h.looking = false
	h.mu.Unlock()
}
