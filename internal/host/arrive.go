package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// What arrives of a sandbox is kept without being one: its records are no box, its files belong to nobody, and a passage says "coming". When the
// source has given it away, two records are written after those that came, its state with the handle that it has here, and the one that names the
// move: from that one on it is this host's, and is taken in as after a restart.

// receiver is the backend that takes a sandbox.
func (h *Host) receiver(backend string) (sandbox.Backend, sandbox.Receiver, error) {
	be := h.deps.Backends[backend]
	if be == nil {
		return nil, nil, fmt.Errorf("host %s has no backend %.40s: %w", h.cfg.ID, backend, sandbox.ErrUnsupported)
	}
	r, ok := be.(sandbox.Receiver)
	if !ok {
		return nil, nil, fmt.Errorf("backend %s takes no sandboxes of other hosts: %w", backend, sandbox.ErrUnsupported)
	}
	return be, r, nil
}

// admitMove says whether this host could take a sandbox.
func (h *Host) admitMove(ctx context.Context, f *dsecv1.MoveFacts) error {
	if err := h.wait(ctx); err != nil {
		return err
	}
	id, err := sandbox.ParseID(f.GetSandbox())
	if err != nil {
		return err
	}
	_, recv, err := h.receiver(f.GetBackend())
	if err != nil {
		return err
	}
	if sandbox.Durability(f.GetDurability()) == sandbox.DurabilityStore && !h.deps.Log.Stores() {
		return fmt.Errorf("durability store: host %s keeps its log on its own disk alone; start it with --store: %w", h.cfg.ID, sandbox.ErrUnsupported)
	}
	traj := h.trajOf(ctx, f)
	r := h.measure()
	h.mu.Lock()
	other, named, j := h.keys[traj], h.names[scoped{traj.Project, f.GetName()}], h.jobs[scoped{traj.Project, traj.Job}]
	here, p := h.boxes[id], h.passages[id]
	expired := j != nil && !j.expired.IsZero()
	err = h.admit(r)
	h.mu.Unlock()
	switch {
	case h.fenced.Load():
		return fmt.Errorf("host %s was taken for lost: %w", h.cfg.ID, sandbox.ErrState)
	case f.GetVersion() != h.cfg.Version:
		return fmt.Errorf("host %s runs dsec %s, the sandbox's host %s: %w", h.cfg.ID, h.cfg.Version, f.GetVersion(), sandbox.ErrUnsupported)
	case here != nil:
		return fmt.Errorf("sandbox %s: host %s has it already: %w", id, h.cfg.ID, sandbox.ErrExists)
	case p != nil && p.Coming != nil && p.Coming.Here:
		return p.elsewhere(id)
	case other != nil:
		return fmt.Errorf("key %s of job %s: host %s has sandbox %s under it: %w", traj.Key, traj.Job, h.cfg.ID, other.id, sandbox.ErrExists)
	case named != nil && f.GetName() != "":
		return fmt.Errorf("name %s: host %s has sandbox %s under it: %w", f.GetName(), h.cfg.ID, named.id, sandbox.ErrExists)
	case expired:
		return fmt.Errorf("job %s has expired on host %s: %w", traj.Job, h.cfg.ID, sandbox.ErrState)
	case err != nil:
		return err
	case h.deps.Disk != nil && r.disk-f.GetSize() < h.cfg.DiskReserve:
		return fmt.Errorf("host %s: %d MiB of disk free, the sandbox takes up to %d and %d are kept free: %w", h.cfg.ID, r.disk>>20, f.GetSize()>>20, h.cfg.DiskReserve>>20, sandbox.ErrExhausted)
	}
	if err := recv.Admit(ctx, f.GetNeeds(), f.GetSize()); err != nil {
		return fmt.Errorf("host %s: %w", h.cfg.ID, err)
	}
	return nil
}

func (h *Host) trajOf(ctx context.Context, f *dsecv1.MoveFacts) trajectory.ID {
	return trajectory.ID{Project: project(ctx), Job: jobName(f.GetJob()), Key: f.GetKey()}
}

// arrive keeps a sandbox that comes. Nothing of it is left after an error.
func (h *Host) arrive(ctx context.Context, next func() (*dsecv1.MovePart, error)) error {
	if err := h.wait(ctx); err != nil {
		return err
	}
	m, err := next()
	if err != nil {
		return err
	}
	begin := m.GetBegin()
	f := begin.GetFacts()
	id, err := sandbox.ParseID(f.GetSandbox())
	if err != nil {
		return fmt.Errorf("the first part: %w", err)
	}
	if err := sandbox.CheckKey("nonce", begin.GetNonce()); err != nil {
		return err
	}
	from, err := sandbox.ParseHostID(f.GetHost())
	if err != nil {
		return err
	}
	leave, err := h.turns.enter(ctx, id)
	if err != nil {
		return err
	}
	defer leave()
	if p := h.passageOf(h.trajOf(ctx, f)); p != nil && p.ID != id { // of a sandbox before in its trajectory, of which all must be gone
		leave, err := h.turns.enter(ctx, p.ID)
		if err != nil {
			return err
		}
		defer leave()
	}
	if was := h.passage(id).Coming; was != nil && !was.Here { // could not be removed
		if err := h.discard(ctx, id); err != nil {
			return err
		}
	}
	if err := h.admitMove(ctx, f); err != nil {
		return err
	}
	c := &coming{From: from, Nonce: begin.GetNonce(), Traj: h.trajOf(ctx, f), Backend: f.GetBackend(), Needs: f.GetNeeds(), Running: begin.GetRunning()}
	if f.GetSettings() != nil {
		if c.Job, err = proto.Marshal(f.GetSettings()); err != nil {
			return err
		}
	}
	p := h.passage(id)
	p.Coming = c
	if err := h.putPassage(p); err != nil {
		return err
	}
	h.mu.Lock()
	other := h.keys[c.Traj] // created before the passage was there; from now on creates of the key are refused
	if other == nil {
		h.jobOf(scoped{c.Traj.Project, c.Traj.Job}).living++ // its records stay while its job does
	}
	h.mu.Unlock()
	if other != nil {
		p = h.passage(id)
		p.Coming = nil
		err := fmt.Errorf("key %s of job %s: host %s has sandbox %s under it: %w", c.Traj.Key, c.Traj.Job, h.cfg.ID, other.id, sandbox.ErrExists)
		return errors.Join(err, h.putPassage(p))
	}
	if err = h.unpack(ctx, id, c, next); err == nil {
		all := *c
		all.Here = true
		p := h.passage(id)
		p.Coming, p.since = &all, time.Now()
		err = h.putPassage(p)
	}
	if err != nil {
		ctx, cancel := h.bounded(actWait)
		defer cancel()
		return errors.Join(fmt.Errorf("take %s from host %s: %w", id, from, err), h.discard(ctx, id))
	}
	return nil
}

// unpack takes all in and puts it on the disk.
func (h *Host) unpack(ctx context.Context, id sandbox.ID, c *coming, next func() (*dsecv1.MovePart, error)) error {
	_, recv, err := h.receiver(c.Backend)
	if err != nil {
		return err
	}
	if _, err := h.deps.Log.Stat(c.Traj); err == nil { // of a creation that failed: no box has it
		if err := h.deps.Log.Remove(ctx, c.Traj); err != nil {
			return err
		}
	}
	in := &inbound{next: next}
	d, end, err := h.copyRecords(ctx, in, c.Traj)
	if err != nil {
		return err
	}
	for in.held.GetFile() != nil {
		file := in.held.GetFile()
		if err := in.file(ctx, file, func() (*os.File, error) { return recv.Unpack(ctx, id, file.GetName()) }); err != nil {
			return fmt.Errorf("file %.40s: %w", file.GetName(), err)
		}
		if in.held, err = next(); err != nil {
			return err
		}
	}
	info, err := h.deps.Log.Stat(c.Traj)
	if err != nil {
		return err
	}
	if last := in.held.GetEnd().GetLastSeq(); in.held.GetEnd() == nil || last != info.LastSeq {
		return fmt.Errorf("its records end at %d, %d came (up to %d): %w", last, info.LastSeq, end.GetLastSeq(), sandbox.ErrLost)
	}
	if err := recv.Keep(ctx, id); err != nil {
		return err
	}
	if err := h.deps.Log.Sync(ctx); err != nil {
		return err
	}
	if d == sandbox.DurabilityStore {
		return h.deps.Log.Ship(ctx)
	}
	return nil
}

// inbound reads what comes as records and files.
type inbound struct {
	next func() (*dsecv1.MovePart, error)
	held *dsecv1.MovePart // that ended the records
}

// Read answers the records that come next, whatever is asked for.
func (in *inbound) Read(_ context.Context, _ trajectory.ID, q trajectory.Query) ([]trajectory.Record, uint64, error) {
	from := max(q.From, 1)
	m, err := in.next()
	if err != nil {
		return nil, from, err
	}
	rs := m.GetRecords()
	if rs == nil {
		in.held = m
		return nil, from, nil
	}
	if rs.GetNext() <= from || rs.GetNext()-from > movedRecords {
		return nil, from, fmt.Errorf("records up to %d come after %d, at most %d at once: %w", rs.GetNext(), from, movedRecords, sandbox.ErrInvalid)
	}
	recs := make([]trajectory.Record, 0, len(rs.GetRecords()))
	for i, r := range rs.GetRecords() {
		if r.GetSeq() != from+uint64(i) || r.GetSeq() >= rs.GetNext() {
			return nil, from, fmt.Errorf("record %d comes where %d belongs: %w", r.GetSeq(), from+uint64(i), sandbox.ErrInvalid)
		}
		rec, err := recordOf(r)
		if err != nil {
			return nil, from, err
		}
		recs = append(recs, rec)
	}
	return recs, rs.GetNext(), nil
}

func recordOf(m *dsecv1.MoveRecord) (r trajectory.Record, err error) {
	if m.GetKind() > math.MaxUint8 || m.GetStream() > math.MaxUint8 || m.GetFlags() > math.MaxUint16 {
		return r, fmt.Errorf("record %d: kind %d, stream %d, flags %d: %w", m.GetSeq(), m.GetKind(), m.GetStream(), m.GetFlags(), sandbox.ErrInvalid)
	}
	r = trajectory.Record{Seq: m.GetSeq(), Epoch: m.GetEpoch(), Kind: trajectory.Kind(m.GetKind()), Stream: sandbox.StreamName(m.GetStream()), Flags: trajectory.Flags(m.GetFlags()),
		Step: string(m.GetStep()), Offset: m.GetOffset(), Wall: m.GetWall().AsTime(), Mono: time.Duration(m.GetMonoNs()), Payload: m.GetPayload()}
	if in := m.GetInput(); in != nil {
		if len(in.GetSha256()) != 32 || in.GetKept() > uint32(trajectory.KeptHash) {
			return r, fmt.Errorf("record %d: its input is kept %d with a digest of %d octets: %w", m.GetSeq(), in.GetKept(), len(in.GetSha256()), sandbox.ErrInvalid)
		}
		r.Input = &trajectory.Input{Kept: trajectory.Kept(in.GetKept()), Size: in.GetSize(), SHA256: [32]byte(in.GetSha256()), Data: in.GetData()}
	}
	return r, nil
}

// OpenInput reads the input that comes next.
func (in *inbound) OpenInput(of *trajectory.Input) (io.ReadCloser, error) {
	return &inputStream{next: in.next, of: of, hash: sha256.New()}, nil
}

type inputStream struct {
	next func() (*dsecv1.MovePart, error)
	of   *trajectory.Input
	rest []byte
	over bool
	hash hash.Hash
	size int64
}

// Read reads to the end of the input, and compares it with the record's digest there.
func (s *inputStream) Read(p []byte) (int, error) {
	for len(s.rest) == 0 && !s.over {
		m, err := s.next()
		if err != nil {
			return 0, err
		}
		d := m.GetData()
		if d == nil {
			return 0, fmt.Errorf("an input breaks off: %w", sandbox.ErrInvalid)
		}
		s.rest, s.over = d.GetData(), d.GetLast()
		s.hash.Write(s.rest)
		s.size += int64(len(s.rest))
		if d.GetLost() {
			return 0, sandbox.ErrLost
		}
		if s.over && (s.size != s.of.Size || !bytes.Equal(s.hash.Sum(nil), s.of.SHA256[:])) {
			return 0, fmt.Errorf("an input of %d octets came as %d others: %w", s.of.Size, s.size, sandbox.ErrInvalid)
		}
	}
	if len(s.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

func (s *inputStream) Close() error { return nil }

// file writes a file that comes.
func (in *inbound) file(ctx context.Context, m *dsecv1.MoveFile, open func() (*os.File, error)) (err error) {
	if m.GetSize() < 0 {
		return fmt.Errorf("size %d: %w", m.GetSize(), sandbox.ErrInvalid)
	}
	f, err := open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := f.Truncate(m.GetSize()); err != nil {
		return err
	}
	sum := sha256.New()
	for {
		part, err := in.next()
		if err != nil {
			return err
		}
		d := part.GetData()
		switch {
		case d == nil:
			return fmt.Errorf("it breaks off: %w", sandbox.ErrInvalid)
		case d.GetLast():
			if !bytes.Equal(sum.Sum(nil), d.GetSha256()) {
				return fmt.Errorf("it came otherwise than it was sent: %w", sandbox.ErrLost)
			}
			return nil
		case d.GetOffset() < 0 || d.GetOffset() > m.GetSize()-int64(len(d.GetData())):
			return fmt.Errorf("octets at %d of %d: %w", d.GetOffset(), m.GetSize(), sandbox.ErrInvalid)
		}
		addPiece(sum, d.GetOffset(), d.GetData())
		if _, err := f.WriteAt(d.GetData(), d.GetOffset()); err != nil {
			if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
				err = fmt.Errorf("%w: %w", err, sandbox.ErrExhausted)
			}
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// discard removes what arrived. The caller has the turn.
func (h *Host) discard(ctx context.Context, id sandbox.ID) error {
	p := h.passage(id)
	c := p.Coming
	if c == nil {
		return nil
	}
	if _, recv, err := h.receiver(c.Backend); err == nil {
		if err := recv.Discard(ctx, id); err != nil {
			return err
		}
	}
	if err := h.deps.Log.Remove(ctx, c.Traj); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	p.Coming = nil
	if err := h.putPassage(p); err != nil {
		return err
	}
	h.mu.Lock()
	h.jobOf(scoped{c.Traj.Project, c.Traj.Job}).left(time.Now())
	h.mu.Unlock()
	return nil
}

// settleMove makes what arrived the sandbox, or removes it.
func (h *Host) settleMove(ctx context.Context, q *dsecv1.SettleRequest) (*box, error) {
	if err := h.wait(ctx); err != nil {
		return nil, err
	}
	id := sandbox.ID(q.GetSandbox())
	leave, err := h.turns.enter(ctx, id)
	if err != nil {
		return nil, err
	}
	defer leave()
	h.mu.Lock()
	b := h.boxes[id]
	h.mu.Unlock()
	if b != nil && b.spec.Project != project(ctx) {
		b = nil
	}
	c := h.passage(id).Coming
	mine := c != nil && c.Nonce == q.GetNonce() && c.Traj.Project == project(ctx)
	switch {
	case !q.GetTake() && b != nil && mine:
		return nil, fmt.Errorf("sandbox %s: lives here: %w", id, sandbox.ErrState)
	case !q.GetTake() && mine:
		ctx, cancel := h.bounded(actWait)
		defer cancel()
		return nil, h.discard(ctx, id)
	case !q.GetTake():
		return nil, nil
	case b != nil:
		return b, nil
	case !mine || !c.Here:
		return nil, fmt.Errorf("sandbox %s: nothing of that move is here: %w", id, sandbox.ErrNotFound)
	}
	return h.take(id, c)
}

// take makes what arrived the sandbox. It goes on when its caller leaves: from the record of the move on there is no way back.
func (h *Host) take(id sandbox.ID, c *coming) (*box, error) {
	ctx, cancel := h.bounded(2 * time.Minute)
	defer cancel()
	be, recv, err := h.receiver(c.Backend)
	if err != nil {
		return nil, err
	}
	h.keepJob(ctx, c)
	handle, err := recv.Claim(ctx, id, c.Needs)
	if err != nil {
		return nil, fmt.Errorf("take %s: %w", id, err)
	}
	if err := h.recordMove(ctx, c, handle); err != nil {
		return nil, fmt.Errorf("take %s: record it: %w", id, err)
	}
	st, err := h.tell(ctx, c.Traj, wholeStory, 0)
	if err != nil {
		return nil, err
	}
	b, err := h.retell(c.Traj, st)
	if err != nil {
		return nil, err
	}
	o := orphan{b, st, be}
	if err := h.prepare(o); err != nil {
		return nil, err
	}
	inst, err := h.reclaim(ctx, o)
	if err != nil && !errors.Is(err, sandbox.ErrLost) { // who asks again tries again
		return nil, fmt.Errorf("take %s: %w", id, err)
	}
	if err != nil {
		h.log.Error("recover a sandbox that was moved", "sandbox", id, "err", err)
		h.lost(o, err)
	} else {
		b.inst = inst
		if n, ok := inst.(interface{ Notes() map[string]string }); ok {
			b.notes = n.Notes()
		}
	}
	h.mu.Lock()
	j := h.jobOf(scoped{c.Traj.Project, c.Traj.Job})
	j.living--                           // adopt counts it
	if j.lease > 0 && j.until.IsZero() { // it was nobody's here
		h.lease(j)
	}
	b.lease = j.stopAt()
	h.mu.Unlock()
	h.adopt(b)
	if err := h.forgetPassages(c.Traj); err != nil { // the record decides: the next host forgets it
		h.log.Error("forget a move", "sandbox", id, "err", err)
	}
	if b.spec.Durability == sandbox.DurabilityStore {
		if err := b.ship(); err != nil {
			h.log.Warn("the record of a move is not in the store yet", "sandbox", id, "err", err)
		}
	}
	if c.Running && inst != nil {
		if err := b.resume(ctx, "moved"); err != nil {
			h.log.Error("resume a sandbox that was moved", "sandbox", id, "err", err)
		}
	}
	if inst == nil {
		h.settle(o)
		return b, nil
	}
	h.settleLiving(o, inst)
	return b, nil
}

// keepJob gives the sandbox's job the settings that it has at the source, where this host does not know it.
func (h *Host) keepJob(ctx context.Context, c *coming) {
	h.mu.Lock()
	j := h.jobs[scoped{c.Traj.Project, c.Traj.Job}]
	known := j != nil && j.recorded
	h.mu.Unlock()
	if known || len(c.Job) == 0 {
		return
	}
	m := &dsecv1.Job{}
	err := proto.Unmarshal(c.Job, m)
	if err == nil {
		_, err = h.putJob(rpc.WithProject(ctx, c.Traj.Project), m)
	}
	if err != nil {
		h.log.Warn("settings of a moved sandbox's job", "job", c.Traj.Job, "err", err)
	}
}

// recordMove writes that the sandbox is this host's, durably.
func (h *Host) recordMove(ctx context.Context, c *coming, handle []byte) error {
	info, err := h.deps.Log.Stat(c.Traj)
	if err != nil {
		return err
	}
	state := stateRecord(sandbox.Paused, sandbox.Saved, sandbox.Cause{Reason: "moved"}, handle)
	end := trajectory.Record{Kind: trajectory.KindEvent, Payload: encode(tagRecalled, &dsecv1.Recalled{Host: string(c.From), LastSeq: int64(info.LastSeq), LastTime: rpc.Timestamp(time.Now()), Move: c.Nonce})}
	state.Epoch, end.Epoch = info.Epoch+1, info.Epoch+1
	_, err = h.deps.Log.Append(ctx, c.Traj, []trajectory.Record{state, end}, sandbox.DurabilityHost)
	return err
}
