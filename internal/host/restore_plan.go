package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// plan is what a restore will do: everything that decides it is known from the records, so that a caller is asked before anything is done.
type plan struct {
	create   *dsecv1.HostCreateRequest // of the last sandbox; never changed
	base     base
	deeds    []*deed // after the base, by the seq of their starts
	events   []event // after the base, by seq
	last     uint64  // the last record that is there
	lastTime time.Time
	missing  []string // secrets that were not given
	notes    []string
}

// base is what a restore begins from.
type base struct {
	layers []string
	layer  string // of the snapshot; empty for what the first sandbox was made of
	seq    uint64 // of the snapshot's end
}

func (b base) name() string {
	if b.layer == "" {
		return "environment"
	}
	return b.layer
}

// deed is one recorded step.
type deed struct {
	key         string
	number      int64  // of its start among the starts of the trajectory, from 1
	seq         uint64 // of its start
	act         tag
	kind        string
	network     sandbox.NetworkMode // of its sandbox, during it
	session     string
	ended       bool // it has an end, which was not that of its sandbox
	unsure      bool // whether it was done, or how far, is not known
	killed      bool // it ended with its sandbox
	bodiless    bool // its input was not kept
	opaque      bool
	stated      sandbox.StepClass
	check       []string
	class       sandbox.StepClass // set by decide
	why         string
	skip        bool
	answered    bool
	superfluous bool // nothing is to be done, whoever asks
}

// can says whether it can be done again at all.
func (d *deed) can() bool { return !d.opaque && !d.bodiless }

type eventKind uint8

const (
	evStart eventKind = iota
	evEnd
	evStdin
	evSignal
	evSessionOpen
	evSessionClose
)

// event is a record that a restore follows.
type event struct {
	seq  uint64
	what eventKind
	d    *deed  // of steps
	name string // of sessions
}

// planner reads a trajectory.
type planner struct {
	p         *plan
	h         *Host
	o         *order
	foreign   uint64
	open      map[string]*deed
	running   map[*deed]bool
	sessions  map[string]bool
	network   sandbox.NetworkMode
	layers    []string // of the sandbox that the records are of
	created   uint64   // seq of the last create
	number    int64    // starts of steps so far
	restoring bool
	attempt   []event // ends of steps that a restore ran again, until it is complete
	stopping  bool
	snaps     map[*deed]bool // snapshots under way at whose start nothing ran, and nothing has started since
	secrets   map[string]bool
}

var planStory = trajectory.Except(trajectory.KindOutput, trajectory.KindVerdict)

// plan reads the records and decides.
func (h *Host) plan(ctx context.Context, old *box, o *order) (*plan, error) {
	pl := &planner{p: &plan{}, h: h, o: o, foreign: old.foreign, open: map[string]*deed{}, running: map[*deed]bool{}, sessions: map[string]bool{},
		snaps: map[*deed]bool{}, secrets: map[string]bool{}}
	q := trajectory.Query{Kinds: planStory}
	for {
		recs, next, err := h.deps.Log.Read(ctx, old.traj, q)
		for i := range recs {
			if err := pl.record(&recs[i]); err != nil {
				return nil, err
			}
		}
		switch {
		case errors.Is(err, sandbox.ErrLost) && next > q.From:
			pl.p.notes = append(pl.p.notes, fmt.Sprintf("record %d is lost: %v", next-1, err))
		case err != nil:
			return nil, err
		}
		if next <= max(q.From, 1) {
			break
		}
		q.From = next
	}
	if pl.p.create == nil {
		return nil, fmt.Errorf("the record of its creation is lost: %w", sandbox.ErrLost)
	}
	if len(pl.p.notes) > maxTold {
		pl.p.notes = pl.p.notes[:maxTold]
	}
	if err := pl.secret(pl.created, pl.p.create.GetSpec().GetEnv(), "the sandbox"); err != nil {
		return nil, err
	}
	pl.decide(h.classOf(old))
	pl.p.missing = sortedNames(pl.secrets)
	return pl.p, nil
}

// classOf is what the job of a sandbox says of commands that state no class.
func (h *Host) classOf(b *box) sandbox.StepClass {
	h.mu.Lock()
	defer h.mu.Unlock()
	if j := h.jobs[scoped{b.spec.Project, b.spec.Job}]; j != nil {
		return j.class
	}
	return ""
}

func (pl *planner) event(seq uint64, what eventKind, d *deed, name string) {
	pl.p.events = append(pl.p.events, event{seq, what, d, name})
}

// record takes in one record.
func (pl *planner) record(r *trajectory.Record) error {
	if r.Kind != trajectory.KindRedo && !pl.restoring {
		pl.p.last, pl.p.lastTime = r.Seq, r.Wall
	}
	if r.Kind == trajectory.KindStepStart {
		pl.number++
	}
	if r.Kind == trajectory.KindVoid {
		pl.void(r)
		return nil
	}
	t, m, err := decode(r.Payload)
	if err != nil {
		pl.p.notes = append(pl.p.notes, fmt.Sprintf("record %d: %v", r.Seq, err))
		return nil
	}
	switch m := m.(type) {
	case *dsecv1.HostCreateRequest:
		return pl.life(r, m)
	case *dsecv1.Redo:
		if d := pl.open[r.Step]; pl.restoring && d != nil && m.GetTakesOver() && m.GetState() == redoEnded {
			pl.attempt = append(pl.attempt, event{r.Seq, evEnd, d, ""})
		}
		return nil
	case *dsecv1.LogRecord:
		if t == tagState {
			pl.state(m)
			return nil
		}
	}
	if pl.restoring {
		return nil
	}
	switch m := m.(type) {
	case *dsecv1.StartRequest:
		d := pl.start(r, t)
		d.session, d.stated, d.check = m.GetSession(), sandbox.StepClass(m.GetRestore()), m.GetCheck()
		d.opaque = m.GetTerminal() != nil || r.Flags&trajectory.Opaque != 0
		d.bodiless = r.Input != nil && r.Input.Kept == trajectory.KeptHash
		return pl.secret(r.Seq, m.GetEnv(), "step "+r.Step)
	case *dsecv1.OpenSessionRequest:
		pl.sessions[r.Step] = true
		pl.busy()
		pl.event(r.Seq, evSessionOpen, nil, r.Step)
		return pl.secret(r.Seq, m.GetEnv(), "session "+r.Step)
	case *dsecv1.Outcome:
		if r.Kind == trajectory.KindSessionClose {
			pl.closed(r, m)
			return nil
		}
		pl.end(r, m)
	case *dsecv1.WriteStdinRequest:
		if d := pl.open[r.Step]; d != nil {
			d.bodiless = d.bodiless || r.Input != nil && r.Input.Kept == trajectory.KeptHash
			pl.event(r.Seq, evStdin, d, "")
		}
	case *dsecv1.SignalRequest:
		if d := pl.open[r.Step]; d != nil {
			pl.event(r.Seq, evSignal, d, "")
		}
	case *dsecv1.LogRecord:
		switch {
		case t == tagResult:
			pl.end(r, m.GetOutcome())
			pl.snapped(r, m)
		case t == tagEvent && m.GetKind() == "port":
			d := &deed{key: fmt.Sprintf("port-%d", r.Seq), seq: r.Seq, act: t, kind: "port", opaque: true, ended: true}
			pl.p.deeds = append(pl.p.deeds, d)
		}
	case *dsecv1.ResizeRequest, *dsecv1.SetLifetimeRequest, *dsecv1.Job, *dsecv1.Restored, *dsecv1.Recalled:
	default:
		if r.Kind == trajectory.KindStepStart { // else it tells of something, and is none
			pl.start(r, t)
		}
	}
	return nil
}

// life takes in the create of a sandbox.
func (pl *planner) life(r *trajectory.Record, m *dsecv1.HostCreateRequest) error {
	pl.p.create = m
	pl.network, pl.layers, pl.stopping = sandbox.NetworkMode(m.GetSpec().GetNetwork()), m.GetSpec().GetLayers(), false
	pl.restoring, pl.attempt = r.Epoch > 0 && r.Kind == trajectory.KindState && len(pl.p.base.layers) > 0, nil
	if !pl.restoring {
		pl.p.base = base{layers: pl.layers}
	}
	pl.created = r.Seq
	return nil
}

func (pl *planner) state(m *dsecv1.LogRecord) {
	switch s := sandbox.State(m.GetState()); {
	case s == sandbox.Running && pl.restoring:
		pl.restoring = false
		for _, e := range pl.attempt {
			e.d.ended, e.d.unsure = true, false
			delete(pl.running, e.d)
			pl.p.events = append(pl.p.events, e)
		}
		pl.attempt = nil
	case s == sandbox.Stopping || s.Ended():
		pl.stopping = true
	}
}

func (pl *planner) void(r *trajectory.Record) {
	if _, err := sandbox.ParseID(r.Step); err == nil {
		pl.restoring, pl.attempt = false, nil
		pl.stopping = true
		return
	}
	d := pl.open[r.Step]
	if d == nil {
		return
	}
	d.superfluous = true
	delete(pl.open, r.Step)
	delete(pl.running, d)
}

// busy says that something runs: no snapshot under way holds all of it.
func (pl *planner) busy() { clear(pl.snaps) }

func (pl *planner) start(r *trajectory.Record, t tag) *deed {
	if was := pl.open[r.Step]; was != nil && was.act == t && (was.unsure || !was.ended) {
		was.superfluous = true // a body that was sent again
		delete(pl.running, was)
	}
	quiet := len(pl.running) == 0 && len(pl.sessions) == 0
	d := &deed{key: r.Step, number: pl.number, seq: r.Seq, act: t, kind: t.name(), network: pl.network, opaque: t == tagScreen}
	pl.busy()
	if t == tagSnapshot {
		if quiet {
			pl.snaps[d] = true
		}
	} else {
		pl.running[d] = true
	}
	pl.open[r.Step] = d
	pl.p.deeds = append(pl.p.deeds, d)
	pl.event(r.Seq, evStart, d, "")
	return d
}

func (pl *planner) end(r *trajectory.Record, o *dsecv1.Outcome) {
	d := pl.open[r.Step]
	if d == nil {
		return
	}
	kind := sandbox.OutcomeKind(o.GetKind())
	if d.act != tagCommand {
		delete(pl.running, d)
		d.bodiless = d.bodiless || r.Input != nil && r.Input.Kept == trajectory.KeptHash
		d.unsure = kind == sandbox.Unknown || kind == sandbox.Interrupted
		d.killed = kind == sandbox.Killed && pl.stopping
		d.ended = !d.killed
		if kind != sandbox.Interrupted && kind != sandbox.Unknown { // else it may be sent again
			delete(pl.open, r.Step)
		}
		pl.event(r.Seq, evEnd, d, "")
		return
	}
	d.unsure, d.killed = kind == sandbox.Unknown, kind == sandbox.Killed && pl.stopping
	if d.unsure || d.killed {
		return // it runs as long as the sandbox does
	}
	d.ended = true
	delete(pl.open, r.Step)
	delete(pl.running, d)
	pl.event(r.Seq, evEnd, d, "")
}

func (pl *planner) closed(r *trajectory.Record, o *dsecv1.Outcome) {
	if pl.stopping {
		return // with its sandbox: a restore opens it again
	}
	delete(pl.sessions, r.Step)
	if sandbox.OutcomeKind(o.GetKind()) != sandbox.StartFailed {
		pl.event(r.Seq, evSessionClose, nil, r.Step)
		return
	}
	for i := len(pl.p.events) - 1; i >= 0; i-- { // it never was open
		if e := pl.p.events[i]; e.what == evSessionOpen && e.name == r.Step {
			pl.p.events = slices.Delete(pl.p.events, i, i+1)
			return
		}
	}
}

// snapped takes a snapshot that ended well as what to begin from, when nothing ran since its start: what runs is not in it.
func (pl *planner) snapped(r *trajectory.Record, m *dsecv1.LogRecord) {
	var d *deed
	for s := range pl.snaps {
		if s.key == r.Step {
			d = s
		}
	}
	if d == nil {
		return
	}
	delete(pl.snaps, d)
	layer := m.GetStep()
	if o := m.GetOutcome(); layer == "" || o.GetKind() != string(sandbox.Exited) || o.GetCode() != 0 {
		return
	}
	pl.p.base = base{layers: append(slices.Clone(pl.layers), layer), layer: layer, seq: r.Seq}
	pl.p.deeds, pl.p.events = nil, nil
	clear(pl.open)
	clear(pl.secrets)
}

// secret checks the secrets of a request: one that is not given is asked for, another value than the recorded one is refused.
func (pl *planner) secret(seq uint64, vars []*dsecv1.EnvVar, of string) error {
	for _, v := range vars {
		if !v.GetSecret() {
			continue
		}
		name := nameOf(v)
		value, given := pl.o.secrets[name]
		switch {
		case !given:
			pl.secrets[name] = true
		case seq <= pl.foreign || !hashed(v.GetValue()): // the key lay on the lost host
		case pl.h.mac(name, value) != v.GetValue():
			return fmt.Errorf("secret %s of %s: another value than the recorded one: %w", name, of, sandbox.ErrInvalid)
		}
	}
	return nil
}

// quiet says whether what a command did in such a network stayed inside its sandbox, or only read.
func quiet(n sandbox.NetworkMode) bool {
	return n == "" || n == sandbox.NetworkNone || n == "mirrors"
}

// decide gives each step its class, and what becomes of it. job is the class of commands that state none.
func (pl *planner) decide(job sandbox.StepClass) {
	for _, d := range pl.p.deeds {
		d.classify(job)
		if d.superfluous {
			continue
		}
		all := d.class == sandbox.ClassNever
		switch {
		case pl.o.skip[d.key] || all && pl.o.skip[every]:
			d.skip, d.answered = true, true
		case (pl.o.repeat[d.key] || all && pl.o.repeat[every]) && d.can():
			d.class, d.answered = sandbox.ClassRepeat, true
		}
	}
}

func (d *deed) classify(job sandbox.StepClass) {
	set := func(c sandbox.StepClass, why string) { d.class, d.why = c, why }
	switch {
	case d.act == tagSnapshot:
		set(sandbox.ClassNever, "its layer is kept")
		d.superfluous = true
	case d.killed && d.act != tagCommand:
		set(sandbox.ClassNever, "it ended with its sandbox")
		d.superfluous = true
	case d.kind == "port":
		set(sandbox.ClassNever, "what went over a connection to a port is not recorded")
	case d.act == tagScreen:
		set(sandbox.ClassNever, "what the screen showed when it was done can't be had again")
	case d.opaque:
		set(sandbox.ClassNever, "it had a terminal: what was typed is not recorded")
	case d.bodiless:
		set(sandbox.ClassNever, "its input was not kept")
	case d.stated != "":
		set(d.stated, "stated")
	case d.act != tagCommand && d.unsure:
		set(sandbox.ClassNever, "how far it came is not known")
	case d.act != tagCommand && !d.ended:
		set(sandbox.ClassNever, "its end was not seen")
	case d.act != tagCommand:
		set(sandbox.ClassRepeat, "it changes files alone")
	case !d.ended && !d.killed:
		set(sandbox.ClassNever, "its end was not seen")
	case job != "":
		set(job, "the job's")
	case quiet(d.network):
		set(sandbox.ClassRepeat, "the sandbox had no network")
	default:
		set(sandbox.ClassNever, fmt.Sprintf("the sandbox had network %s", d.network))
	}
}

// asks are the steps that only the caller can decide about.
func (p *plan) asks() (list []*dsecv1.RestoredStep) {
	for _, d := range p.deeds {
		if d.class == sandbox.ClassNever && !d.answered && !d.superfluous {
			list = append(list, d.proto())
		}
	}
	return list
}

func (p *plan) todo() (n int) {
	for _, d := range p.deeds {
		if !d.superfluous {
			n++
		}
	}
	return n
}

func (d *deed) proto() *dsecv1.RestoredStep {
	return &dsecv1.RestoredStep{Step: d.key, Seq: int64(d.seq), Kind: d.kind, Class: string(d.class), Why: d.why, CanRepeat: d.can()}
}
