package host

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// A move gives a sandbox to another host. Here it is saved and held in state pausing, in which everybody waits, while its records and files go
// out. It is this host's until a passage that says "gone" is on the disk, which needs that the move is still under way and that nothing was recorded
// since; any failure before, also of this process, leaves it here, saved.

const (
	concludeWait = 10 * time.Minute // for the word that the target has it on its disk, while the stream is open
	movedPiece   = 1 << 20          // octets of a file in one message
	movedRecords = 256              // in one message, those that are lost included
)

// departure is a move of a box to another host that is under way; fields are under box.mu.
type departure struct {
	nonce   string
	to      sandbox.HostID
	running bool           // before
	last    uint64         // seq of the last record that was sent; 0 while not all is
	over    chan struct{}  // closed when it is under way no more
	giving  bool           // it is being given away: an end waits for what comes of that
	cause   *sandbox.Cause // of that end
}

// holds takes an end that was asked for while the sandbox is being given away.
func (d *departure) holds(c sandbox.Cause) bool {
	if d == nil || !d.giving {
		return false
	}
	if d.cause == nil {
		d.cause = &c
	}
	return true
}

// movable is the instance as one that can be moved.
func (b *box) movable() (sandbox.Movable, error) {
	inst, err := b.running()
	if err != nil {
		return nil, err
	}
	m, ok := inst.(sandbox.Movable)
	if !ok {
		return nil, fmt.Errorf("move %s: sandboxes of backend %s can't be moved, only machines (microvm, vm): %w", b.id, b.spec.Backend, sandbox.ErrUnsupported)
	}
	return m, nil
}

// survey tells what a target needs.
func (b *box) survey(ctx context.Context) (*dsecv1.MoveFacts, error) {
	m, err := b.movable()
	if err != nil {
		return nil, err
	}
	needs, size, err := m.Needs(ctx)
	if err != nil {
		return nil, err
	}
	f := &dsecv1.MoveFacts{
		Sandbox: string(b.id), Host: string(b.h.cfg.ID), Backend: b.spec.Backend, Job: b.spec.Job, Key: b.spec.Key, Name: b.spec.Name,
		Durability: string(b.spec.Durability), Size: size, Needs: needs, Network: string(b.spec.Network),
		Version: b.h.cfg.Version,
	}
	b.h.mu.Lock()
	j := b.h.jobs[scoped{b.spec.Project, b.spec.Job}]
	recorded := j != nil && j.recorded
	b.h.mu.Unlock()
	if recorded {
		f.Settings, err = b.h.jobProto(scoped{b.spec.Project, b.spec.Job})
	}
	return f, err
}

// depart saves the sandbox and sends all that it is. After an error it goes on here.
func (b *box) depart(ctx context.Context, q *dsecv1.DepartRequest, send func(*dsecv1.MovePart) error) error {
	if err := sandbox.CheckKey("nonce", q.GetNonce()); err != nil {
		return err
	}
	to, err := sandbox.ParseHostID(q.GetTo())
	if err != nil {
		return fmt.Errorf("to: %w", err)
	}
	if to == b.h.cfg.ID {
		return fmt.Errorf("to %s: is this host: %w", to, sandbox.ErrInvalid)
	}
	if !b.forks.TryLock() {
		return fmt.Errorf("move %s: it is being forked or moved; try again when that is over: %w", b.id, sandbox.ErrState)
	}
	defer b.forks.Unlock()
	facts, err := b.survey(ctx)
	if err != nil {
		return err
	}
	d := &departure{nonce: q.GetNonce(), to: to, over: make(chan struct{})}
	if err := b.standStill(ctx, d); err != nil {
		return err
	}
	b.closeFiles()
	err = send(&dsecv1.MovePart{Part: &dsecv1.MovePart_Begin{Begin: &dsecv1.MoveBegin{Nonce: d.nonce, Facts: facts, Running: d.running}}})
	var last uint64
	if err == nil {
		last, err = b.sendRecords(ctx, send)
	}
	if err == nil {
		err = b.sendFiles(ctx, send)
	}
	if err == nil {
		b.mu.Lock() // before the end is sent: the word that it arrived may be faster than what follows here
		d.last = last
		b.mu.Unlock()
		err = send(&dsecv1.MovePart{Part: &dsecv1.MovePart_End{End: &dsecv1.MoveEnd{LastSeq: last}}})
	}
	if err == nil {
		err = d.wait(ctx)
	}
	if err != nil {
		b.stay(d)
		return fmt.Errorf("move %s: %w", b.id, err)
	}
	return nil
}

// wait waits until the move is concluded. A stream that breaks is that of a gateway that died.
func (d *departure) wait(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, concludeWait)
	defer cancel()
	select {
	case <-d.over:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("no word came that it arrived: %w", ctx.Err())
	}
}

// standStill saves the sandbox and holds it so. On an error it is as it was.
func (b *box) standStill(ctx context.Context, d *departure) (err error) {
	defer func() {
		if err != nil && d.running {
			b.again()
		}
	}()
	if err := b.idle(ctx); err != nil {
		return err
	}
	for {
		b.mu.Lock()
		switch {
		case b.ending || b.state.Ended():
			err := b.gone()
			b.mu.Unlock()
			return err
		case b.state == sandbox.Running:
			d.running = true
			b.mu.Unlock()
			if err := b.pause(ctx, sandbox.Saved, "moved", false); err != nil {
				return err
			}
			continue
		case b.state == sandbox.Paused && b.level != sandbox.Saved:
			err := b.deepen()
			if err != nil {
				return err
			}
			continue
		case b.state == sandbox.Paused && b.acts > 0:
			b.mu.Unlock()
			return b.busy()
		case b.state == sandbox.Paused:
			b.state, b.away = sandbox.Pausing, d
			b.changed.ring()
			b.mu.Unlock()
			return nil
		}
		if err := b.waitChange(ctx); err != nil {
			return fmt.Errorf("move %s: %w", b.id, err)
		}
	}
}

// idle waits, bounded, until no act is under way in the sandbox.
func (b *box) idle(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleWait)
	defer cancel()
	b.mu.Lock()
	for b.acts > 0 && b.state == sandbox.Running && !b.ending {
		if b.waitChange(ctx) != nil {
			return b.busy()
		}
		b.mu.Lock()
	}
	b.mu.Unlock()
	return nil
}

func (b *box) busy() error {
	return fmt.Errorf("move %s: a call is at work in it (a snapshot, a fork, files, a connection to a port or screen); try again when that is over: %w", b.id, sandbox.ErrState)
}

// deepen saves a sandbox that is frozen. mu is held, and not afterwards.
func (b *box) deepen() error {
	inst, was := b.inst, b.level
	b.state = sandbox.Pausing
	b.changed.ring()
	b.begin()
	b.mu.Unlock()
	err := b.turn(sandbox.Pausing, sandbox.Paused, sandbox.Paused, sandbox.Saved, "moved", func(ctx context.Context) error { return inst.Pause(ctx, sandbox.Saved) })
	b.finished()
	if err != nil {
		b.mu.Lock()
		if b.state == sandbox.Paused {
			b.level = was
		}
		b.mu.Unlock()
	}
	return err
}

// stay ends a move: the sandbox goes on here.
func (b *box) stay(d *departure) {
	b.mu.Lock()
	if b.away != d || d.giving {
		b.mu.Unlock()
		return
	}
	b.away = nil
	close(d.over)
	if b.state == sandbox.Pausing {
		b.state, b.level = sandbox.Paused, sandbox.Saved
		b.arm()
	}
	b.changed.ring()
	running := d.running
	b.mu.Unlock()
	if running {
		b.again()
	}
}

// again lets a sandbox run that was saved for a move which came to nothing.
func (b *box) again() {
	b.h.goes(func() {
		ctx, cancel := b.h.bounded(stateWait)
		defer cancel()
		if err := b.resume(ctx, "not_moved"); err != nil && b.h.life.Err() == nil && !errors.Is(err, sandbox.ErrState) { // it ended meanwhile
			b.h.log.Error("resume a sandbox that was not moved", "sandbox", b.id, "err", err)
		}
	})
}

// sendRecords sends the trajectory, and answers the seq of its last record.
func (b *box) sendRecords(ctx context.Context, send func(*dsecv1.MovePart) error) (last uint64, err error) {
	q := trajectory.Query{Limit: movedRecords}
	for {
		recs, next, err := b.h.deps.Log.Read(ctx, b.traj, q)
		if err != nil && !errors.Is(err, sandbox.ErrLost) {
			return 0, err
		}
		if next <= max(q.From, 1) {
			return next - 1, nil
		}
		m := &dsecv1.MoveRecords{Next: next}
		for i := range recs {
			m.Records = append(m.Records, movedRecord(&recs[i]))
		}
		if err := send(&dsecv1.MovePart{Part: &dsecv1.MovePart_Records{Records: m}}); err != nil {
			return 0, err
		}
		for i := range recs {
			if in := recs[i].Input; in != nil && in.Kept == trajectory.KeptBlob {
				if err := b.sendInput(in, send); err != nil {
					return 0, fmt.Errorf("input of record %d: %w", recs[i].Seq, err)
				}
			}
		}
		q.From = next
	}
}

func movedRecord(r *trajectory.Record) *dsecv1.MoveRecord {
	m := &dsecv1.MoveRecord{Seq: r.Seq, Epoch: r.Epoch, Wall: timestamppb.New(r.Wall), MonoNs: int64(r.Mono), Kind: uint32(r.Kind), Stream: uint32(r.Stream), Flags: uint32(r.Flags),
		Offset: r.Offset, Step: []byte(r.Step), Payload: r.Payload}
	if in := r.Input; in != nil {
		m.Input = &dsecv1.MoveInput{Kept: uint32(in.Kept), Size: in.Size, Sha256: in.SHA256[:], Data: in.Data}
	}
	return m
}

func sendData(send func(*dsecv1.MovePart) error, d *dsecv1.MoveData) error {
	return send(&dsecv1.MovePart{Part: &dsecv1.MovePart_Data{Data: d}})
}

func (b *box) sendInput(in *trajectory.Input, send func(*dsecv1.MovePart) error) error {
	r, err := b.h.deps.Log.OpenInput(in)
	if err == nil {
		defer r.Close()
		for {
			p := make([]byte, movedPiece)
			n, rerr := io.ReadFull(r, p)
			if n > 0 {
				if err := sendData(send, &dsecv1.MoveData{Data: p[:n]}); err != nil {
					return err
				}
			}
			if rerr == io.EOF || rerr == io.ErrUnexpectedEOF {
				return sendData(send, &dsecv1.MoveData{Last: true})
			}
			if rerr != nil {
				err = rerr
				break
			}
		}
	}
	if errors.Is(err, sandbox.ErrLost) {
		return sendData(send, &dsecv1.MoveData{Last: true, Lost: true})
	}
	return err
}

func (b *box) sendFiles(ctx context.Context, send func(*dsecv1.MovePart) error) error {
	m, err := b.movable()
	if err != nil {
		return err
	}
	list, err := m.Luggage(ctx)
	if err != nil {
		return err
	}
	defer func() {
		for _, f := range list {
			f.File.Close()
		}
	}()
	for _, f := range list {
		if err := sendFile(ctx, f, send); err != nil {
			return fmt.Errorf("file %s: %w", f.Name, err)
		}
	}
	return nil
}

// sendFile sends what a file holds, without its holes.
func sendFile(ctx context.Context, f sandbox.MovedFile, send func(*dsecv1.MovePart) error) error {
	st, err := f.File.Stat()
	if err != nil {
		return err
	}
	if err := send(&dsecv1.MovePart{Part: &dsecv1.MovePart_File{File: &dsecv1.MoveFile{Name: f.Name, Size: st.Size()}}}); err != nil {
		return err
	}
	sum := sha256.New()
	err = extents(f.File, st.Size(), func(at, end int64) error {
		for at < end {
			if err := ctx.Err(); err != nil {
				return err
			}
			p := make([]byte, min(movedPiece, end-at))
			if _, err := f.File.ReadAt(p, at); err != nil {
				return err
			}
			addPiece(sum, at, p)
			if err := sendData(send, &dsecv1.MoveData{Offset: at, Data: p}); err != nil {
				return err
			}
			at += int64(len(p))
		}
		return nil
	})
	if err != nil {
		return err
	}
	return sendData(send, &dsecv1.MoveData{Last: true, Sha256: sum.Sum(nil)})
}

// addPiece takes a piece of a file into its digest.
func addPiece(sum io.Writer, at int64, data []byte) {
	var head [16]byte
	binary.BigEndian.PutUint64(head[:], uint64(at))
	binary.BigEndian.PutUint64(head[8:], uint64(len(data)))
	sum.Write(head[:])
	sum.Write(data)
}

// extents calls f for all that a file holds between its holes.
func extents(f *os.File, size int64, do func(at, end int64) error) error {
	for at := int64(0); at < size; {
		begin, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return nil
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(f.Fd()), begin, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if err := do(begin, min(end, size)); err != nil {
			return err
		}
		at = end
	}
	return nil
}

// errDoubt says that a disk failed between two states: the sandbox stands still until the next start of the host reads what the disk has.
var errDoubt = fmt.Errorf("whether it was given away is on a disk that failed; start this host again: %w", rpc.ErrUnavailable)

// conclude decides a move: the sandbox is given away, or stays for good as far as this move is concerned.
func (h *Host) conclude(ctx context.Context, q *dsecv1.ConcludeRequest) (moved bool, err error) {
	if err := h.wait(ctx); err != nil { // what is remembered was not read yet
		return false, err
	}
	id := sandbox.ID(q.GetSandbox())
	if h.gave(id, q.GetNonce()) {
		return true, nil
	}
	leave, err := h.turns.enter(ctx, id)
	if err != nil {
		return false, err
	}
	defer func() { leave() }()
	if h.gave(id, q.GetNonce()) {
		return true, nil
	}
	h.mu.Lock()
	b := h.boxes[id]
	h.mu.Unlock()
	if b == nil || b.spec.Project != project(ctx) {
		return false, nil
	}
	b.mu.Lock()
	d := b.away
	if d == nil || d.nonce != q.GetNonce() {
		b.mu.Unlock()
		return false, nil
	}
	if d.giving {
		b.mu.Unlock()
		return false, fmt.Errorf("sandbox %s: %w", b.id, errDoubt)
	}
	d.giving = q.GetCommit() && d.last > 0 && b.state == sandbox.Pausing && !b.ending
	giving := d.giving
	b.mu.Unlock()
	if giving {
		moved, err = b.give(d)
	}
	if moved {
		over := leave // of the turn: it must not come back before all of it is gone
		if h.goes(func() { defer over(); b.clear() }) {
			leave = func() {}
		}
		return true, nil
	}
	if errors.Is(err, errDoubt) {
		return false, err
	}
	b.mu.Lock()
	d.giving = false
	cause := d.cause
	if cause != nil {
		d.running = false
	}
	b.mu.Unlock()
	b.stay(d)
	if cause != nil {
		h.end(b, *cause)
	}
	return false, err
}

// gave says whether a sandbox was given away by that move.
func (h *Host) gave(id sandbox.ID, nonce string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.passages[id]
	return p != nil && p.Gone != nil && p.Gone.Nonce == nonce
}

// give gives the sandbox away, unless something was recorded since it was sent.
func (b *box) give(d *departure) (moved bool, err error) {
	h := b.h
	b.leaving.Lock()
	defer b.leaving.Unlock()
	info, err := h.deps.Log.Stat(b.traj)
	if err != nil || info.LastSeq != d.last {
		return false, err
	}
	p := h.passage(b.id)
	g := &gone{To: d.to, Nonce: d.nonce, Traj: b.traj, Name: b.spec.Name, At: time.Now()}
	for e := b.prev; e != nil; e = e.prev {
		g.Before = append(g.Before, e.id)
	}
	p.Gone, p.Coming = g, nil
	if err := h.putPassage(p); err != nil {
		if back := h.putPassage(&passage{ID: b.id}); back != nil {
			return false, errors.Join(errDoubt, err, back)
		}
		return false, err
	}
	b.given = true
	b.leave(d, p.elsewhere(b.id))
	return true, nil
}

// leave takes the sandbox out of this host's memory.
func (b *box) leave(d *departure, why error) {
	h, now := b.h, time.Now()
	h.mu.Lock()
	j := h.jobs[scoped{b.spec.Project, b.spec.Job}]
	delete(h.boxes, b.id)
	for e := b.prev; e != nil; e = e.prev {
		delete(h.boxes, e.id)
		if j != nil {
			j.ended--
		}
	}
	delete(h.alive, b.id)
	delete(h.keys, b.traj)
	h.freeName(b)
	if j != nil {
		j.left(now)
	}
	h.mu.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.moved, b.shut, b.away = why, true, nil
	b.state, b.cause, b.over = sandbox.Stopped, sandbox.Cause{Class: sandbox.ClassNone, Reason: "moved", Detail: "to host " + string(d.to)}, now
	close(d.over)
	b.stopTimer()
	for _, s := range b.steps {
		s.changed.ring()
	}
	b.changed.ring()
}

// clear removes what is left of a sandbox that was given away. What a host that is killed meanwhile leaves, the next one removes.
func (b *box) clear() {
	b.mu.Lock()
	inst := b.inst
	b.mu.Unlock()
	if inst != nil && !b.h.destroy(b, inst) {
		return
	}
	if err := b.h.deps.Log.Remove(b.h.life, b.traj); err != nil && b.h.life.Err() == nil {
		b.h.log.Error("remove the records of a sandbox that was moved", "sandbox", b.id, "err", err)
	}
	b.h.loaded.drop(b)
}

// unlessMoved is err, or that the sandbox went to another host.
func (b *box) unlessMoved(err error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return cmp.Or(b.moved, err)
}
