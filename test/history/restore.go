package history

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// life is one sandbox of a trajectory: the first, or one that a restore made. An attempt of a restore counts for nothing until its record
// `restored`; what the log says in it is kept back till then.
type life struct {
	id      string
	from    int64 // seq of its create
	whole   bool  // it is the first, or complete
	over    bool
	call    string // of the restore
	baseSeq int64
	redos   []redo
	held    []*dsecv1.LogRecord // of an attempt
	opened  map[string]bool     // sessions that the attempt opened again
}

// redo is what a restore says that it did with a step.
type redo struct {
	rec     *dsecv1.LogRecord
	step    string
	seq     int64 // of the original's start
	state   string
	verdict string
	takes   bool
}

func readRedo(r *dsecv1.LogRecord) redo {
	var q struct {
		Seq       int64 `json:"seq,string"`
		TakesOver bool
		Verdict   string
	}
	_ = json.Unmarshal([]byte(r.GetRequestJson()), &q)
	return redo{rec: r, step: r.GetStep(), seq: q.Seq, state: r.GetState(), verdict: q.Verdict, takes: q.TakesOver}
}

// attempting is the restore that is under way, or nil.
func (s *story) attempting() *life {
	if n := len(s.lives); n > 0 && !s.lives[n-1].whole {
		return s.lives[n-1]
	}
	return nil
}

// current is the last sandbox that came to life.
func (s *story) current() *life {
	for _, l := range slices.Backward(s.lives) {
		if l.whole {
			return l
		}
	}
	return nil
}

func (s *story) lifeOf(id string) *life {
	for _, l := range s.lives {
		if l.id == id {
			return l
		}
	}
	return nil
}

// again takes in the create of a restore.
func (s *story) again(r *dsecv1.LogRecord) {
	if l := s.attempting(); l != nil && r.GetEpoch() == s.epoch { // the attempt before was given up without a word: its host died
		s.fail("restore", r.GetStep(), "created at %d while %s is being restored in the same epoch", r.GetSeq(), l.id)
	}
	if !s.over {
		s.fail("restore", r.GetStep(), "created at %d beside %s, which is %s", r.GetSeq(), s.current().id, s.state)
	}
	s.lives = append(s.lives, &life{id: r.GetStep(), from: r.GetSeq(), opened: map[string]bool{}})
}

// attempt takes in a record of a restore that is under way; false: it is none of it.
func (s *story) attempt(r *dsecv1.LogRecord) bool {
	l := s.attempting()
	if l == nil || r.GetKind() == "create" || r.GetKind() == "verdict" {
		return false
	}
	switch r.GetKind() {
	case "void", "create_failed":
		if r.GetStep() == l.id {
			l.whole, l.held = false, nil
			s.lives = slices.DeleteFunc(s.lives, func(o *life) bool { return o == l })
			s.given = append(s.given, l)
			return true
		}
	case "state":
		if r.GetState() != "running" {
			return true // creating, with its handle
		}
		if l.call == "" {
			s.fail("restore", l.id, "runs at %d and is not restored", r.GetSeq())
		}
		s.complete(l)
		return true
	case "restored":
		var q struct {
			ID      string `json:"id"`
			BaseSeq int64  `json:"baseSeq,string"`
		}
		_ = json.Unmarshal([]byte(r.GetRequestJson()), &q)
		l.call, l.baseSeq = q.ID, q.BaseSeq
		return true
	}
	l.held = append(l.held, r)
	return true
}

// complete takes in all that a restore did.
func (s *story) complete(l *life) {
	l.whole = true
	s.creates = append(s.creates, l.id)
	s.state, s.over = "running", false
	s.open = map[string]bool{}
	var at int64
	done := map[string]bool{}
	for _, r := range l.held {
		switch r.GetKind() {
		case "redo":
			d := readRedo(r)
			l.redos = append(l.redos, d)
			a := s.attemptAt(d.step, d.seq)
			switch {
			case a == nil:
				s.fail("restore", d.step, "redo at %d of a step that began at %d, where none did", r.GetSeq(), d.seq)
				continue
			case d.seq <= l.baseSeq:
				s.fail("restore", d.step, "redo at %d of a step that is in what was begun from, up to %d", r.GetSeq(), l.baseSeq)
			}
			if d.state == "started" || d.state == "running" {
				if done[d.step] {
					s.fail("restore", d.step, "done a second time at %d by one restore", r.GetSeq())
				}
				if done[d.step] = true; d.seq < at {
					s.fail("restore", d.step, "done again at %d behind one that began later", r.GetSeq())
				}
				at = d.seq
			}
			s.redone(l, a, d)
		case "session":
			s.open[r.GetStep()] = true
			l.opened[r.GetStep()] = true
		case "session_end":
			delete(s.open, r.GetStep())
		case "output":
			s.output(r)
		}
	}
	for step, all := range s.steps {
		for _, a := range all {
			s.decided(l, step, a)
		}
	}
	l.held = nil
}

func (s *story) attemptAt(step string, seq int64) *attempt {
	for _, a := range s.steps[step] {
		if a.start.GetSeq() == seq {
			return a
		}
	}
	return nil
}

// redone takes in one redo and compares what it came to.
func (s *story) redone(l *life, a *attempt, d redo) {
	if d.state == "skipped" {
		return
	}
	if d.takes {
		s.taken[d.step] = true
		if d.state == "running" {
			a.end, a.out, a.next, a.gapped = nil, map[string][]byte{}, map[string]int64{}, false
			return
		}
		a.end = d.rec
		return
	}
	if d.state != "ended" {
		return
	}
	was, is := a.end.GetOutcome(), d.rec.GetOutcome()
	if d.verdict == "not_compared" || a.end == nil {
		return
	}
	same := was.GetKind() == is.GetKind() && was.GetCode() == is.GetCode() && was.GetSignal() == is.GetSignal()
	if a.op == Command {
		for _, p := range [][2]*dsecv1.StreamEnd{{was.GetStdout(), is.GetStdout()}, {was.GetStderr(), is.GetStderr()}} {
			same = same && p[0].GetTotal() == p[1].GetTotal() && (p[0].GetSha256() == "" || p[0].GetSha256() == p[1].GetSha256())
		}
		if same != (d.verdict == "equal") {
			s.fail("restore", d.step, "redo at %d is %s, and equal is %v: %v, now %v", d.rec.GetSeq(), d.verdict, same, was, is)
		}
	} else if failed := is.GetError() != ""; d.verdict == "equal" && failed != (was.GetCode() != 0) {
		s.fail("restore", d.step, "redo at %d is equal, and failed is %v, was %v", d.rec.GetSeq(), failed, was.GetCode() != 0)
	}
}

// decided holds that a complete restore did each step behind its base again or says that it skipped it, and does what its class says.
func (s *story) decided(l *life, step string, a *attempt) {
	var of []redo
	for _, d := range l.redos {
		if d.step == step && d.seq == a.start.GetSeq() {
			of = append(of, d)
		}
	}
	if a.void || a.op == Snapshot || a.op == Signal || a.start.GetSeq() <= l.baseSeq || a.start.GetSeq() > l.from {
		return
	}
	kind := a.end.GetOutcome().GetKind()
	if a.op != Command && (kind == "killed" || kind == "interrupted" || kind == "unknown" || a != s.steps[step][len(s.steps[step])-1]) {
		return // nothing of it stayed, or another beginning stands for it, or its caller decides
	}
	if len(of) == 0 {
		s.fail("restore", step, "%s was restored and says nothing of the step that began at %d", l.id, a.start.GetSeq())
		return
	}
	skipped := of[0].state == "skipped"
	var q struct {
		Restore string
		Check   []string
	}
	_ = json.Unmarshal([]byte(a.start.GetRequestJson()), &q)
	s.classes = append(s.classes, decision{l, step, q.Restore, skipped})
	if q.Restore == "verify" && len(q.Check) > 0 {
		s.checks++
	}
}

// decision is what a restore did with a step of a class.
type decision struct {
	l       *life
	step    string
	class   string
	skipped bool
}

// restores compares what the restores of a trajectory did with what was asked of them.
func (c *checker) restores(s *story) {
	calls := map[string]*Call{}
	for _, call := range c.h.Calls {
		if call.Op == Restore && call.Box == s.box.Key {
			calls[call.Step] = call
		}
	}
	for _, l := range s.lives {
		if l.call == "" {
			continue
		}
		g := &group{box: s.box, step: l.id}
		call := calls[l.call]
		if call == nil {
			c.fail(g, "restore", "restored by call %s, which nobody made", l.call)
			continue
		}
		if call.Reply == Answered && call.Value != l.id && s.lifeOf(call.Value) != nil {
			c.fail(g, "restore", "restored by %v", call)
		}
		for _, d := range l.redos {
			if d.verdict == "different" && strings.HasPrefix(call.Request, "restore strict") {
				c.fail(&group{box: s.box, step: d.step}, "restore", "came to something else, and %s stands: %v", l.id, call)
			}
		}
	}
	for _, d := range s.classes {
		call := calls[d.l.call]
		if call == nil {
			continue
		}
		g := &group{box: s.box, step: d.step}
		_, rest, _ := strings.Cut(call.Request, " skip ")
		skip, repeat, _ := strings.Cut(rest, " repeat ")
		said := func(list string) bool { return slices.Contains(strings.Split(list, ","), d.step) }
		switch {
		case said(skip) && !d.skipped:
			c.fail(g, "restore", "was to be skipped and was done again in %s", d.l.id)
		case said(repeat) && d.skipped:
			c.fail(g, "restore", "was to be done again and was skipped in %s", d.l.id)
		case said(skip), said(repeat):
		case d.class == "never" && !d.skipped:
			c.fail(g, "restore", "is never to be done again, and was in %s", d.l.id)
		case d.class == "repeat" && d.skipped:
			c.fail(g, "restore", "is to be done again, and was skipped in %s", d.l.id)
		}
	}
}

// expected says how often a step may have been done in a sandbox by the log: by its own beginnings there, and by a restore.
func (s *story) expected(id, step string) (may, must bool) {
	l := s.lifeOf(id)
	if l == nil {
		for _, g := range s.given { // an attempt that was given up: what it did is gone with it
			may = may || g.id == id
		}
		return may, false
	}
	until := int64(1) << 62
	for _, o := range s.lives {
		if o.from > l.from {
			until = min(until, o.from)
		}
	}
	for _, a := range s.steps[step] {
		if seq := a.start.GetSeq(); !a.void && seq > l.from && seq < until {
			may = true
		}
	}
	of := strings.TrimPrefix(step, "signal-") // a signal goes with its command
	for _, d := range l.redos {
		if d.state == "skipped" || d.step != step && d.step != of {
			continue
		}
		may = true
		if d.step == step && d.verdict == "equal" && !d.takes && d.rec.GetOutcome().GetKind() == "exited" && d.rec.GetOutcome().GetError() == "" {
			if a := s.attemptAt(step, d.seq); a != nil && (a.op == Command || a.op == Append) {
				must = true
			}
		}
	}
	return may, must
}

func (l *life) String() string { return fmt.Sprintf("%s from %d", l.id, l.from) }
