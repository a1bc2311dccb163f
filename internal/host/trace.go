package host

import (
	"context"
	"errors"
	"maps"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trace"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// tracer is what an instance has that can tell what its steps did.
type tracer interface {
	// TraceStep tells of a step that has ended what was not told before. One call at a time.
	TraceStep(ctx context.Context, q trace.Ask) (*trace.Answer, error)
}

const (
	// traceWait bounds how long a step waits for the look at what the one before it did. A look at a small upper takes less than a
	// millisecond, mostly while the client makes up its mind; the bound is for a host that is short of CPU.
	traceWait = 200 * time.Millisecond
	// traceTime bounds one look, and twice that the wait for the last ones at a sandbox's end.
	traceTime = 3 * time.Second
	maxTraces = 1024 // steps that wait to be looked at
	// Where comparing files takes longer than slowLook, it is put off until slowShare times as long has passed since the last time: so it
	// takes a twentieth of the time at most, whatever a sandbox does.
	slowLook  = 20 * time.Millisecond
	fewNames  = 2000 // for which it is not put off: there it is the machine that is slow
	slowShare = 20
)

// tracing is what is under way of a sandbox's traces. Fields are under the box's lock.
type tracing struct {
	live     map[*step]bool // steps that run; true: others ran at the same time
	starts   int            // steps that were begun
	queue    []ended
	busy     bool // somebody works at the queue
	putOff   int64
	lastOff  string // the last step whose files were put off
	took     time.Duration
	looked   time.Time // when files were compared last
	closing  bool
	previous string // step that was told last
	left     int64  // steps that found no room
}

// ended is a step that waits to be looked at.
type ended struct {
	step   string
	group  string
	from   time.Time
	shared bool
	starts int
	half   bool // the host was not there when it began
}

func (b *box) traced() bool {
	return b.spec.Trace == sandbox.TraceLight || b.spec.Trace == sandbox.TraceFull
}

// traceBegin is called before a step is done: it waits, bounded, until what came before it was looked at.
func (b *box) traceBegin(s *step) {
	if !b.traced() {
		return
	}
	ctx, cancel := context.WithTimeout(b.h.life, traceWait)
	defer cancel()
	b.mu.Lock()
	for (b.tracing.busy || len(b.tracing.queue) > 0) && len(b.tracing.live) == 0 && !b.tracing.closing {
		if b.waitChange(ctx) != nil {
			b.mu.Lock()
			break
		}
		b.mu.Lock()
	}
	t := &b.tracing
	if t.live == nil {
		t.live = map[*step]bool{}
	}
	shared := len(t.live) > 0
	for o := range t.live {
		t.live[o] = true
	}
	t.live[s] = shared
	t.starts++
	b.mu.Unlock()
}

// traceEnd is called when a step's end is recorded.
func (b *box) traceEnd(s *step, group string) {
	if !b.traced() {
		return
	}
	b.mu.Lock()
	t := &b.tracing
	shared, known := t.live[s]
	delete(t.live, s)
	switch {
	case b.inst == nil || t.closing:
		b.mu.Unlock()
		return
	case len(t.queue) >= maxTraces:
		t.left++
		b.mu.Unlock()
		return
	}
	t.queue = append(t.queue, ended{step: s.id, group: group, from: s.started, shared: shared, starts: t.starts, half: !known})
	idle := !t.busy
	t.busy = true
	b.mu.Unlock()
	if idle && !b.h.goes(b.lookAtEnded) {
		b.mu.Lock()
		t.busy, t.queue = false, nil
		b.changed.ring()
		b.mu.Unlock()
	}
}

// lookAtEnded works the queue off.
func (b *box) lookAtEnded() {
	for {
		b.mu.Lock()
		t := &b.tracing
		if len(t.queue) == 0 {
			t.busy = false
			b.changed.ring()
			b.mu.Unlock()
			return
		}
		e := t.queue[0]
		t.queue = t.queue[1:]
		// What several steps did that have ended by now is seen at once.
		files := len(t.queue) == 0 && (t.closing || t.took < slowLook || time.Since(t.looked) > slowShare*t.took)
		inst := b.inst
		b.mu.Unlock()
		b.lookAt(inst, e, files)
	}
}

// lookAt asks what a step did and records it.
func (b *box) lookAt(inst sandbox.Instance, e ended, files bool) {
	x, ok := inst.(tracer)
	if !ok {
		return
	}
	ctx, cancel := b.h.bounded(traceTime)
	defer cancel()
	began := time.Now()
	a, err := x.TraceStep(ctx, trace.Ask{From: e.from, Group: e.group, Files: files})
	if err != nil {
		if !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrLost) && b.h.life.Err() == nil {
			b.h.log.Warn("look at what a step did", "sandbox", b.id, "step", e.step, "err", err)
		}
		return
	}
	p := traceProto(a, began)
	p.Step, p.Level, p.Shared = text(e.step), string(b.spec.Trace), e.shared
	if e.half {
		p.Lacking = append(p.Lacking, "processes: the host was started again during the step")
	}
	b.mu.Lock()
	t := &b.tracing
	p.Raced = t.starts != e.starts && !e.shared
	t.told(p, a, files, e.step)
	b.mu.Unlock()
	b.recordTrace(e.step, p)
}

func (b *box) recordTrace(step string, p *dsecv1.StepTrace) {
	b.mu.Lock()
	p.Previous, b.tracing.previous = b.tracing.previous, p.Step
	b.mu.Unlock()
	if _, err := b.append(trajectory.Record{Kind: trajectory.KindEvent, Step: step, Payload: encode(tagTrace, p)}); err != nil && b.h.life.Err() == nil {
		b.h.log.Warn("record what a step did", "sandbox", b.id, "step", step, "err", err)
	}
}

// traceLast waits, bounded, until all steps that have ended were looked at, and makes up for what was put off. No step is looked at after
// it.
func (b *box) traceLast() {
	if !b.traced() {
		return
	}
	ctx, cancel := b.h.bounded(2 * traceTime)
	defer cancel()
	b.mu.Lock()
	b.tracing.closing = true
	for b.tracing.busy {
		if b.waitChange(ctx) != nil {
			return
		}
		b.mu.Lock()
	}
	off, step, inst := b.tracing.putOff, b.tracing.lastOff, b.inst
	b.mu.Unlock()
	x, ok := inst.(tracer)
	if off == 0 || !ok {
		return
	}
	began := time.Now()
	a, err := x.TraceStep(ctx, trace.Ask{From: began, Files: true})
	if err != nil || a.Files == nil {
		return
	}
	p := traceProto(&trace.Answer{Files: a.Files}, began)
	p.Step, p.Level, p.SinceStep = text(step), string(b.spec.Trace), off-1
	for _, f := range p.Files {
		f.Earlier = false
	}
	b.recordTrace(step, p)
}

// retrace is a step that a restore did again.
type retrace struct {
	step   string // "" of a check: what it did is taken in and not recorded
	number int64
	seq    int64 // of the original's start
	group  string
	from   time.Time
	shared bool
}

// traceAgain records, bounded, what a step did that a restore did again, beside its first trace, so that it is not told of a later one. The
// same rule as for other steps puts off looks that take long.
func (b *box) traceAgain(ctx context.Context, inst sandbox.Instance, e retrace) {
	x, ok := inst.(tracer)
	if !ok || !b.traced() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, traceTime)
	defer cancel()
	b.mu.Lock()
	t := &b.tracing
	files := e.step != "" && (t.took < slowLook || time.Since(t.looked) > slowShare*t.took)
	b.mu.Unlock()
	b.lookAgain(ctx, x, e, files)
}

// traceRestored takes in what nobody looked at when a restore is done: the next step is not to be told of it.
func (b *box) traceRestored(ctx context.Context, inst sandbox.Instance) {
	x, ok := inst.(tracer)
	if !ok || !b.traced() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, traceTime)
	defer cancel()
	b.mu.Lock()
	e := retrace{from: time.Now()}
	if b.tracing.putOff > 0 {
		e.step = b.tracing.lastOff
		b.tracing.putOff-- // it is that step's own look, and of those before it
	}
	b.mu.Unlock()
	b.lookAgain(ctx, x, e, true)
}

func (b *box) lookAgain(ctx context.Context, x tracer, e retrace, files bool) {
	began := time.Now()
	a, err := x.TraceStep(ctx, trace.Ask{From: e.from, Group: e.group, Files: files})
	if err != nil {
		if ctx.Err() == nil && !errors.Is(err, sandbox.ErrNotFound) && !errors.Is(err, sandbox.ErrLost) {
			b.h.log.Warn("look at what was done retrace", "sandbox", b.id, "step", e.step, "err", err)
		}
		return
	}
	if e.step == "" {
		return
	}
	p := traceProto(a, began)
	p.Step, p.Level, p.Shared, p.Redo, p.Number, p.Seq = text(e.step), string(b.spec.Trace), e.shared, int64(b.epoch.Load()), e.number, e.seq
	b.mu.Lock()
	b.tracing.told(p, a, files, e.step)
	b.mu.Unlock()
	if err := b.noteAgain(trajectory.Record{Kind: trajectory.KindEvent, Step: e.step, Payload: encode(tagTrace, p)}); err != nil && b.h.life.Err() == nil {
		b.h.log.Warn("record what was done retrace", "sandbox", b.id, "step", e.step, "err", err)
	}
}

// told says in a trace of which steps it tells the files, and remembers how long the look took.
func (t *tracing) told(p *dsecv1.StepTrace, a *trace.Answer, files bool, step string) {
	switch {
	case !files:
		p.Deferred = true
		t.putOff++
		t.lastOff = step
	case a.Files != nil:
		p.SinceStep, t.putOff, t.lastOff = t.putOff, 0, ""
		t.took, t.looked = a.Files.Took, time.Now()
		if a.Files.Visited < fewNames {
			t.took = 0
		}
	}
}

func traceProto(a *trace.Answer, now time.Time) *dsecv1.StepTrace {
	p := &dsecv1.StepTrace{ReadBytes: -1, WriteBytes: -1, Lacking: a.Lacking}
	if f := a.Files; f != nil {
		p.MoreFiles, p.FilesPartial, p.SameFiles, p.UnhashedFiles, p.VolatilePaths, p.TookUs = f.More, f.Partial, f.Same, f.Unhashed, f.Volatile, f.Took.Microseconds()
		for _, c := range f.Changes {
			m := &dsecv1.FileChange{Kind: c.Kind, Replaced: c.Replaced, Earlier: c.Earlier}
			m.Path, m.PathRaw = rpc.Twin(c.Path)
			if c.Kind != trace.Created {
				m.Before = stateProto(c.Before)
			}
			if c.Kind != trace.Removed {
				m.After = stateProto(c.After)
			}
			p.Files = append(p.Files, m)
		}
	}
	if s := a.Seen; s != nil {
		p.MoreProcesses, p.MoreReads, p.MoreConnections, p.LostEvents = s.MoreProcesses, s.MoreReads, s.MoreConns, s.Lost
		p.ReadBytes, p.WriteBytes = s.ReadBytes, s.WriteBytes
		boot := now.Add(-trace.SinceBoot())
		for _, x := range s.Processes {
			m := &dsecv1.TracedProcess{Pid: x.Pid, Parent: x.Parent, ArgvOctets: x.Octets, Ended: x.Ended, CpuUs: x.CPU.Microseconds(),
				Code: int32(x.Code), Signal: int32(x.Signal), Time: rpc.Timestamp(boot.Add(x.At))}
			for _, arg := range x.Args {
				m.Argv = append(m.Argv, text(arg))
			}
			p.Processes = append(p.Processes, m)
		}
		for _, x := range s.Reads {
			m := &dsecv1.FileRead{Pid: x.Pid}
			m.Path, m.PathRaw = rpc.Twin(x.Path)
			p.Reads = append(p.Reads, m)
		}
		for _, x := range s.Connections {
			p.Connections = append(p.Connections, &dsecv1.Connection{Address: x.To.String(), Pid: x.Pid, Error: int32(x.Error)})
		}
	}
	if x := a.Pressure; x != nil {
		p.Pressure = &dsecv1.Pressure{CpuUs: x.CPU.Microseconds(), MemoryUs: x.Memory.Microseconds(), IoUs: x.IO.Microseconds()}
	}
	return p
}

func stateProto(s trace.State) *dsecv1.PathState {
	m := &dsecv1.PathState{Type: s.Type, Mode: int32(s.Mode), Size: s.Size, Sha256: s.SHA256}
	m.Link, m.LinkRaw = rpc.Twin(s.Link)
	return m
}

// noteTrace says of a sandbox that is to be traced that its backend can't; mu is held.
func (b *box) noteTrace(inst sandbox.Instance) {
	if _, ok := inst.(tracer); ok || !b.traced() {
		return
	}
	notes := map[string]string{"trace": "backend " + b.spec.Backend + " does not tell what steps do"}
	maps.Copy(notes, b.notes)
	b.notes = notes
}
