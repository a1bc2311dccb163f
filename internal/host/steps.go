package host

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

const stepOutput = 64 << 10 // octets of each stream that come with a step when the caller names none

// outputLimit reads the limit of a request.
func outputLimit(n int64) (int64, error) {
	switch {
	case n == 0:
		return stepOutput, nil
	case n == -1:
		return 0, nil
	case n < -1 || n > maxOutput:
		return 0, fmt.Errorf("output_limit %d: want 1 to %d octets, 0 for %d, -1 for none: %w", n, maxOutput, stepOutput, sandbox.ErrInvalid)
	}
	return n, nil
}

var stepKinds = trajectory.Kinds(trajectory.KindStepStart, trajectory.KindStepEnd, trajectory.KindVoid, trajectory.KindSignal, trajectory.KindRedo,
	trajectory.KindState, trajectory.KindCreate)

// walk yields the steps of a trajectory in the order of their ends, then those that have none yet. It reads the log page by page and
// holds only what is under way; outputs are read up to limit octets a stream.
func (b *box) walk(ctx context.Context, limit int64, requests bool, yield func(*dsecv1.Step) error) error {
	w := &walker{b: b, open: map[string]*dsecv1.Step{}, limit: limit, requests: requests, yield: yield, logs: map[string]string{}}
	open := w.open
	q := trajectory.Query{Kinds: stepKinds}
	until := b.end()
	for {
		recs, next, err := b.h.deps.Log.Read(ctx, b.traj, q)
		for i := range recs {
			if until > 0 && recs[i].Seq >= until {
				recs, next, err = nil, 0, nil
				break
			}
			if err := w.record(ctx, &recs[i]); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, sandbox.ErrLost):
			b.h.log.Error("read a trajectory", "trajectory", b.traj, "err", err)
		case err != nil:
			return err
		case next <= max(q.From, 1):
			rest := make([]*dsecv1.Step, 0, len(open))
			for _, s := range open {
				rest = append(rest, s)
			}
			slices.SortFunc(rest, func(a, b *dsecv1.Step) int { return int(a.Seq - b.Seq) })
			for _, s := range rest {
				if err := yield(s); err != nil {
					return err
				}
			}
			return nil
		}
		q.From = next
	}
}

// walker is where a walk through a trajectory is.
type walker struct {
	b        *box
	open     map[string]*dsecv1.Step
	limit    int64
	requests bool
	yield    func(*dsecv1.Step) error
	attempt  []trajectory.Record // of a restore that is not known to be complete
	logs     map[string]string   // streams of commands that restores took over, by step
}

// settle takes in what a restore that is complete did with steps whose ends are not known: its records tell of them from here on.
func (w *walker) settle(ctx context.Context) error {
	attempt := w.attempt
	w.attempt = nil
	for i := range attempt {
		r := &attempt[i]
		_, m, err := decode(r.Payload)
		d, ok := m.(*dsecv1.Redo)
		if err != nil || !ok || !d.GetTakesOver() {
			continue
		}
		if d.GetState() != redoEnded {
			start, err := w.b.recordAt(ctx, uint64(d.GetSeq()))
			if err != nil {
				return err
			}
			w.open[r.Step] = stepOf(&start, w.requests)
			w.logs[r.Step] = redoStream(r.Step, r.Epoch)
			continue
		}
		s := w.open[r.Step]
		if s == nil {
			continue
		}
		delete(w.open, r.Step)
		s.State, s.Outcome = "ended", d.GetOutcome()
		if err := w.outputs(ctx, s); err != nil {
			return err
		}
		if err := w.yield(s); err != nil {
			return err
		}
	}
	return nil
}

func (w *walker) outputs(ctx context.Context, s *dsecv1.Step) (err error) {
	if w.limit == 0 || s.Kind != "command" {
		return nil
	}
	name := cmp.Or(w.logs[s.Id], s.Id)
	if s.Stdout, err = w.b.headOf(ctx, name, sandbox.Stdout, min(w.limit, s.Outcome.GetStdout().GetTotal())); err != nil {
		return err
	}
	s.Stderr, err = w.b.headOf(ctx, name, sandbox.Stderr, min(w.limit, s.Outcome.GetStderr().GetTotal()))
	return err
}

func (w *walker) record(ctx context.Context, r *trajectory.Record) error {
	open := w.open
	switch r.Kind {
	case trajectory.KindRedo:
		w.attempt = append(w.attempt, *r)
	case trajectory.KindState:
		t, m, err := decode(r.Payload)
		if l, ok := m.(*dsecv1.LogRecord); err == nil && ok && t == tagState && l.GetState() == string(sandbox.Running) {
			return w.settle(ctx)
		} else if t == tagCreate {
			w.attempt = nil
		}
	case trajectory.KindVoid:
		if _, err := sandbox.ParseID(r.Step); err == nil {
			w.attempt = nil
		}
		delete(open, r.Step)
	case trajectory.KindSignal:
		_, m, err := decode(r.Payload)
		if q, ok := m.(*dsecv1.SignalRequest); err == nil && ok && q.GetStep() != "" {
			s := stepOf(r, w.requests)
			s.Id = q.GetStep()
			open[s.Id] = s
		}
	case trajectory.KindStepStart:
		open[r.Step] = stepOf(r, w.requests)
	case trajectory.KindStepEnd:
		s := open[r.Step]
		if s == nil { // the record of its start is lost
			s = &dsecv1.Step{Id: r.Step}
		}
		delete(open, r.Step)
		if err := w.howEnded(ctx, r, s); err != nil {
			return err
		}
		return w.yield(s)
	}
	return nil
}

// stepOf is what the record of a step's start tells.
func stepOf(r *trajectory.Record, requests bool) *dsecv1.Step {
	s := &dsecv1.Step{Id: r.Step, Seq: int64(r.Seq), State: "running", Started: rpc.Timestamp(r.Wall), Opaque: r.Flags&trajectory.Opaque != 0}
	if in := r.Input; in != nil {
		s.InputSize, s.InputSha256, s.Input = in.Size, hex.EncodeToString(in.SHA256[:]), in.Kept.String()
	}
	t, m, err := decode(r.Payload)
	if err != nil {
		return s
	}
	s.Kind = t.name()
	switch m := m.(type) {
	case *dsecv1.StartRequest:
		s.Session, s.RequestHash = m.GetSession(), requestHash(m, r.Input)
	case *dsecv1.WriteRequest:
		if m.GetAppend() {
			s.Kind = "append"
		}
	}
	if requests {
		s.RequestJson = jsonOf(m)
	}
	return s
}

// howEnded fills in how a step ended.
func (w *walker) howEnded(ctx context.Context, r *trajectory.Record, s *dsecv1.Step) error {
	s.State = "ended"
	if in := r.Input; in != nil {
		s.InputSize, s.InputSha256, s.Input = in.Size, hex.EncodeToString(in.SHA256[:]), in.Kept.String()
	}
	_, m, err := decode(r.Payload)
	if err != nil {
		s.State = "unknown"
		return nil
	}
	switch m := m.(type) {
	case *dsecv1.Outcome:
		s.Outcome = m
	case *dsecv1.LogRecord:
		s.Outcome, s.Sha256, s.Length = m.GetOutcome(), m.GetSha256(), m.GetLength()
		if s.Kind == "snapshot" {
			s.Layer = m.GetStep()
		}
	}
	if s.Outcome.GetKind() == string(sandbox.Unknown) {
		s.State = "unknown"
	}
	return w.outputs(ctx, s)
}

// headOf reads the first n octets of a stream, as far as they are there without a gap or damage.
func (b *box) headOf(ctx context.Context, step string, stream sandbox.StreamName, n int64) ([]byte, error) {
	if n <= 0 {
		return nil, nil
	}
	p := make([]byte, n)
	got, err := b.h.deps.Log.ReadOutput(ctx, b.traj, step, stream, 0, p)
	var gap *trajectory.GapError
	if err != nil && err != io.EOF && !errors.As(err, &gap) && !errors.Is(err, sandbox.ErrLost) {
		return nil, err
	}
	return p[:got], nil
}

// requestHash is what a client compares its own request with before it takes a recorded result for it: docs/format/records.md. Empty
// where it can't know: the value of a secret, what was typed into a terminal.
func requestHash(q *dsecv1.StartRequest, in *trajectory.Input) string {
	if q.GetTerminal() != nil {
		return ""
	}
	var b []byte
	put := func(s string) {
		b = strconv.AppendInt(b, int64(len(s)), 10)
		b = append(b, ':')
		b = append(b, s...)
	}
	number := func(n int64) { put(strconv.FormatInt(n, 10)) }
	put("dsec-request-1")
	argv := q.GetArgv()
	if raw := q.GetArgvRaw(); len(raw) > 0 {
		argv = make([]string, len(raw))
		for i, r := range raw {
			argv[i] = string(r)
		}
	}
	number(int64(len(argv)))
	for _, a := range argv {
		put(a)
	}
	put(q.GetSession())
	put(q.GetText() + string(q.GetTextRaw()))
	number(int64(len(q.GetEnv())))
	for _, v := range q.GetEnv() {
		if v.GetSecret() {
			return ""
		}
		put(v.GetName() + string(v.GetNameRaw()) + "=" + v.GetValue() + string(v.GetValueRaw()))
	}
	put(q.GetCwd() + string(q.GetCwdRaw()))
	put(q.GetUser())
	if in == nil {
		put("")
	} else {
		put(hex.EncodeToString(in.SHA256[:]))
	}
	number(boolNumber(q.GetStdinOpen()))
	number(q.GetTimeoutMs())
	number(q.GetOutputCap())
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func boolNumber(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// rewardFilter reads a condition on a reward; nil takes all.
func rewardFilter(text string) (func(*dsecv1.Verdict) bool, error) {
	text = strings.TrimSpace(text)
	switch text {
	case "":
		return nil, nil
	case "none":
		return func(v *dsecv1.Verdict) bool { return v == nil || v.Reward == nil }, nil
	case "any":
		return func(v *dsecv1.Verdict) bool { return v != nil && v.Reward != nil }, nil
	}
	for _, op := range []struct {
		sign string
		ok   func(a, b float64) bool
	}{
		{">=", func(a, b float64) bool { return a >= b }}, {"<=", func(a, b float64) bool { return a <= b }},
		{"==", func(a, b float64) bool { return a == b }}, {"!=", func(a, b float64) bool { return a != b }},
		{">", func(a, b float64) bool { return a > b }}, {"<", func(a, b float64) bool { return a < b }},
		{"=", func(a, b float64) bool { return a == b }},
	} {
		rest, ok := strings.CutPrefix(text, op.sign)
		if !ok {
			continue
		}
		limit, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
		if err != nil || limit != limit {
			break
		}
		return func(v *dsecv1.Verdict) bool { return v != nil && v.Reward != nil && op.ok(*v.Reward, limit) }, nil
	}
	return nil, fmt.Errorf("reward %.40q: want >, >=, <, <=, == or != and a number, or none or any: %w", text, sandbox.ErrInvalid)
}

// matching lists the caller's sandboxes, ended ones too, whose trajectories a filter picks, by ID, and counts those that nothing but their labels
// left out.
func (h *Host) matching(ctx context.Context, f *dsecv1.TrajectoryFilter) (all []*box, left int64, err error) {
	if err := h.wait(ctx); err != nil {
		return nil, 0, err
	}
	reward, err := rewardFilter(f.GetReward())
	if err != nil {
		return nil, 0, err
	}
	all = h.selected(ctx, &dsecv1.Selector{Ids: f.GetSandboxes(), Job: f.GetJob(), Labels: f.GetLabels(), IncludeEnded: true})
	all = slices.DeleteFunc(all, func(b *box) bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		// Of a trajectory that was restored the last sandbox tells, unless another is named.
		if b.next.Load() != nil && !slices.Contains(f.GetSandboxes(), string(b.id)) && b.successor() != nil {
			return true
		}
		if f.GetEnded() && !b.state.Ended() || reward != nil && !reward(b.verdict) {
			return true
		}
		for _, l := range f.GetWithoutLabels() {
			if _, has := b.spec.Labels[l]; has {
				left++
				return true
			}
		}
		return false
	})
	return all, left, nil
}
