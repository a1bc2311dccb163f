package host

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

// maxUntraced bounds the steps without a trace that one answer holds until its end.
const maxUntraced = 10_000

var traceKinds = trajectory.Kinds(trajectory.KindStepStart, trajectory.KindStepEnd, trajectory.KindVoid, trajectory.KindEvent)

// Trace streams what steps did.
func (s logService) Trace(ctx context.Context, req *connect.Request[dsecv1.TraceRequest], stream *connect.ServerStream[dsecv1.TraceResponse]) error {
	m := req.Msg
	b, err := s.find(ctx, &dsecv1.ReadLogRequest{Sandbox: m.GetSandbox(), Job: m.GetJob(), Key: m.GetKey()})
	if err != nil {
		return err
	}
	r := newTraceReader(b.spec.Trace, m)
	send := func(st *dsecv1.TraceStep) error { return stream.Send(&dsecv1.TraceResponse{Step: st}) }
	q := trajectory.Query{Kinds: traceKinds}
	for {
		recs, next, err := s.h.deps.Log.Read(ctx, b.traj, q)
		if until := b.end(); until > 0 { // what follows is of the sandbox that went on
			if i := slices.IndexFunc(recs, func(r trajectory.Record) bool { return r.Seq >= until }); i >= 0 {
				recs, next = recs[:i], q.From
			}
		}
		for i := range recs {
			if err := r.add(&recs[i], send); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, sandbox.ErrLost):
			s.h.log.Error("read a trajectory", "trajectory", b.traj, "err", err)
		case err != nil:
			return err
		case next <= max(q.From, 1):
			if err := r.rest(send); err != nil {
				return err
			}
			if r.file == "" {
				return nil
			}
			return stream.Send(&dsecv1.TraceResponse{File: r.history})
		}
		q.From = next
	}
}

// traceReader puts records together: a step, its end, what was refused to it, and what it did.
type traceReader struct {
	level   sandbox.TraceLevel
	step    string // asked for
	file    string // asked for
	number  int64
	open    map[string]*dsecv1.TraceStep
	history *dsecv1.FileHistory
	dropped int64
}

func newTraceReader(level sandbox.TraceLevel, m *dsecv1.TraceRequest) *traceReader {
	file := m.GetFile()
	if len(m.GetFileRaw()) > 0 {
		file = string(m.GetFileRaw())
	}
	return &traceReader{level: level, step: m.GetStep(), file: file, open: map[string]*dsecv1.TraceStep{},
		history: &dsecv1.FileHistory{Path: text(file), PathRaw: m.GetFileRaw(), ReadsTraced: level == sandbox.TraceFull}}
}

func (r *traceReader) add(rec *trajectory.Record, send func(*dsecv1.TraceStep) error) error {
	switch rec.Kind {
	case trajectory.KindVoid:
		delete(r.open, rec.Step)
		return nil
	case trajectory.KindStepStart:
		r.number++
		if len(r.open) >= maxUntraced {
			r.dropped++
			r.history.UntracedSteps++
			return nil
		}
		s := stepOf(rec, true)
		r.open[rec.Step] = &dsecv1.TraceStep{Number: r.number, Step: rec.Step, Seq: s.Seq, Kind: s.Kind, RequestJson: s.RequestJson}
		return nil
	}
	st := r.open[rec.Step]
	t, m, err := decode(rec.Payload)
	if err != nil || st == nil && t != tagTrace {
		return nil
	}
	switch m := m.(type) {
	case *dsecv1.Outcome:
		st.OutcomeJson = jsonOf(m)
	case *dsecv1.LogRecord:
		switch {
		case t == tagEvent && m.Kind == "denied" && len(st.Denials) < 64:
			st.Denials = append(st.Denials, m.RequestJson)
		case t == tagResult:
			st.OutcomeJson = jsonOf(m.GetOutcome())
		}
	case *dsecv1.StepTrace:
		if m.GetRedo() > 0 { // beside the first trace, which stands
			st = &dsecv1.TraceStep{Step: rec.Step, Number: m.GetNumber(), Seq: m.GetSeq(), Kind: "redo", Trace: m}
			if r.wanted(st) && r.file == "" {
				return send(st)
			}
			return nil
		}
		if st == nil { // a second one, of what was put off
			st = &dsecv1.TraceStep{Step: rec.Step, Number: m.GetNumber()}
		}
		delete(r.open, rec.Step)
		st.Trace = m
		m.Number, m.Seq = st.Number, st.Seq
		if touched := r.learn(st); r.wanted(st) && (r.file == "" || touched) {
			return send(st)
		}
	}
	return nil
}

func (r *traceReader) wanted(st *dsecv1.TraceStep) bool {
	if r.step == "" || st.Step == r.step {
		return true
	}
	n, err := strconv.ParseInt(r.step, 10, 64)
	return err == nil && st.Number == n
}

// rest yields the steps that have no trace, by number.
func (r *traceReader) rest(send func(*dsecv1.TraceStep) error) error {
	left := make([]*dsecv1.TraceStep, 0, len(r.open))
	for _, st := range r.open {
		left = append(left, st)
	}
	slices.SortFunc(left, func(a, b *dsecv1.TraceStep) int { return cmp.Compare(a.Number, b.Number) })
	for _, st := range left {
		r.history.UntracedSteps++
		switch {
		case r.level == sandbox.TraceOff || r.level == "":
			st.Untraced = "trace is off in this sandbox"
		case st.OutcomeJson == "":
			st.Untraced = "it has not ended"
		default:
			st.Untraced = "it ended with its sandbox, or while nobody could look"
		}
		if r.wanted(st) && r.file == "" {
			if err := send(st); err != nil {
				return err
			}
		}
	}
	return nil
}

// learn takes in what a step did to the file that is asked for; touched says that it did something.
func (r *traceReader) learn(st *dsecv1.TraceStep) (touched bool) {
	if r.file == "" {
		return false
	}
	t := st.Trace
	if t.GetFilesPartial() || t.GetMoreFiles() > 0 || t.GetDeferred() {
		r.history.UntracedSteps++
	}
	under := func(path, dir string) bool {
		return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
	}
	for _, v := range t.GetVolatilePaths() {
		if under(r.file, v) {
			r.history.VolatilePath, touched = v, true
		}
	}
	for _, f := range t.GetFiles() {
		p := octets(f.GetPath(), f.GetPathRaw())
		if under(p, r.file) || under(r.file, p) && (f.GetKind() == "removed" || f.GetReplaced()) {
			r.history.ChangedLast, r.history.ChangedLastNumber, touched = st.Step, st.Number, true
		}
	}
	for _, f := range t.GetReads() {
		if under(octets(f.GetPath(), f.GetPathRaw()), r.file) {
			touched = true
			if r.history.ReadFirst == "" {
				r.history.ReadFirst, r.history.ReadFirstNumber = st.Step, st.Number
			}
		}
	}
	return touched
}

func octets(text string, raw []byte) string {
	if len(raw) > 0 {
		return string(raw)
	}
	return text
}
