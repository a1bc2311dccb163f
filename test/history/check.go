package history

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Violation is a rule that a history breaks.
type Violation struct {
	Rule string
	Box  string
	Step string
	Text string
}

func (v Violation) String() string {
	return fmt.Sprintf("%s: %s/%s: %s", v.Rule, v.Box, v.Step, v.Text)
}

// group is all calls for one step of one sandbox.
type group struct {
	box      *Box
	id, step string
	line     bool // id stands for all sandboxes of the log
	op       Op
	calls    []*Call
	first    int64 // stamp of the first call
	acked    *Call // the first answer that is still owed
}

type checker struct {
	h       *History
	stories map[string]*story
	groups  []*group
	bad     []Violation
}

// Check returns what is wrong with a history, nothing if it keeps all promises.
func Check(h *History) []Violation {
	c := &checker{h: h, stories: map[string]*story{}}
	for _, key := range slices.Sorted(maps.Keys(h.Boxes)) {
		s := tell(h.Boxes[key])
		c.stories[key] = s
		c.bad = append(c.bad, s.bad...)
	}
	c.gather()
	for _, g := range c.groups {
		c.agree(g)
		c.unknown(g)
		c.recorded(g)
	}
	for _, key := range slices.Sorted(maps.Keys(h.Boxes)) {
		c.births(c.stories[key])
		c.runs(c.stories[key])
		c.files(c.stories[key])
		c.restores(c.stories[key])
	}
	c.reads()
	c.order()
	slices.SortStableFunc(c.bad, func(a, b Violation) int {
		return cmp.Or(strings.Compare(a.Rule, b.Rule), strings.Compare(a.Box, b.Box), strings.Compare(a.Step, b.Step))
	})
	return c.bad
}

func (c *checker) fail(g *group, rule, format string, args ...any) {
	c.bad = append(c.bad, Violation{rule, g.box.Key, g.step, fmt.Sprintf(format, args...)})
}

// owed says whether what a call was told must still hold: no fault since could take it.
// A box without a durability is promised nothing beyond the life of the machine.
func (c *checker) owed(b *Box, call *Call) bool {
	if call.Returned == 0 {
		return false
	}
	for _, f := range c.h.Faults {
		if f.loses(b.Durability) && call.Invoked < f.To { // an answer that is heard later may have been given before
			return false
		}
	}
	return true
}

// lossy says whether some record of the box may be gone.
func (c *checker) lossy(b *Box) bool {
	return slices.ContainsFunc(c.h.Faults, func(f Fault) bool { return f.loses(b.Durability) })
}

// space keeps apart what may have one name: steps share one, sessions have their own.
func space(op Op) string {
	switch op {
	case Session, Verdict, Stdin, Stop, Read, Create, Restore:
		return string(op)
	}
	return "step"
}

func (c *checker) gather() {
	type place struct{ id, space, step string }
	all := map[place]*group{}
	for _, call := range c.h.Calls {
		b := c.h.Boxes[call.Box]
		if b == nil || call.Op == Read {
			continue
		}
		p := place{call.ID, space(call.Op), call.Step}
		line := call.Op != Stop && slices.Contains(c.stories[call.Box].creates, call.ID)
		switch {
		case call.Op == Create || call.Op == Restore:
			p = place{call.Box, string(call.Op), call.Step}
		case line:
			p.id = c.stories[call.Box].creates[0]
		}
		g := all[p]
		if g == nil {
			g = &group{box: b, id: call.ID, step: call.Step, op: call.Op, first: call.Invoked, line: line}
			all[p] = g
			c.groups = append(c.groups, g)
		}
		g.calls = append(g.calls, call)
		g.first = min(g.first, call.Invoked)
		if call.Reply == Answered && c.owed(b, call) && (g.acked == nil || call.Returned < g.acked.Returned) {
			g.acked, g.op = call, call.Op
		}
	}
}

// agree holds that one key stands for one request and one result, rules "conflict" and "answer".
func (c *checker) agree(g *group) {
	var taken *Call
	for _, call := range g.calls {
		switch call.Reply {
		case Answered, Unknown:
			if !c.owed(g.box, call) || g.op == Stdin {
				continue
			}
			if taken != nil && (taken.Request != call.Request || taken.Op != call.Op) {
				c.fail(g, "conflict", "two requests were taken under one key: %v and %v", taken, call)
			}
			taken = call
			a := g.acked
			if call.Reply != Answered || call.Value == a.Value && (g.op != Create || call.ID == a.ID) {
				continue
			}
			s := c.stories[g.box.Key]
			if g.op == Create {
				x, y := s.lifeOf(a.ID), s.lifeOf(call.ID)
				if x != nil && y != nil && (call.Invoked < a.Returned || y.from >= x.from) {
					continue // it was restored meanwhile
				}
			} else if s.taken[g.step] {
				continue // what ran runs again
			}
			c.fail(g, "answer", "two answers: %v and %v", a, call)
		case Conflict:
			other := slices.ContainsFunc(c.h.Calls, func(o *Call) bool { // also of a sandbox of the trajectory that the log has lost
				return (slices.Contains(g.calls, o) || c.lossy(&Box{}) && o.Box == call.Box) && o.Step == call.Step && space(o.Op) == space(call.Op) && (o.Request != call.Request || o.Op != call.Op) && o.Invoked < call.Returned
			})
			if !other {
				c.fail(g, "conflict", "refused for another request, and there was none: %v", call)
			}
		}
	}
}

// unknown holds that a step whose end was told is never unknown, and that none is without a reason.
func (c *checker) unknown(g *group) {
	for _, call := range g.calls {
		if call.Reply != Unknown || c.stories[g.box.Key].taken[g.step] {
			continue
		}
		if a := g.acked; a != nil && a.Returned < call.Invoked {
			c.fail(g, "unknown", "was answered before: %v, then %v", a, call)
		}
		if a := g.acked; a != nil && call.Returned < a.Invoked && g.op != Write && g.op != Append && g.op != Upload && c.owed(g.box, call) {
			c.fail(g, "unknown", "was told as unknown, then answered: %v, then %v", call, a)
		}
		why := slices.ContainsFunc(c.h.Faults, func(f Fault) bool {
			// A sandbox without its keeper is asked until the host has heard of that.
			return f.severs() && (f.To > g.first || f.Kind == KeeperKilled) && f.From < call.Returned
		})
		if !why {
			c.fail(g, "unknown", "nothing had failed since it was asked for: %v", call)
		}
	}
}

// recorded holds that what was answered is in the log, as it was answered: rule "lost".
func (c *checker) recorded(g *group) {
	call := g.acked
	if call == nil || g.box.Log == nil {
		return
	}
	s := c.stories[g.box.Key]
	has := func(what string, kind string, f func(*dsecv1.LogRecord) bool) {
		if !slices.ContainsFunc(g.box.Log, func(r *dsecv1.LogRecord) bool { return r.GetKind() == kind && f(r) }) {
			c.fail(g, "lost", "no record of %s: %v", what, call)
		}
	}
	switch g.op {
	case Create:
		if !slices.Contains(s.creates, call.ID) {
			c.fail(g, "lost", "no record of the creation: %v", call)
		}
	case Session:
		has("the session", "session", func(r *dsecv1.LogRecord) bool { return r.GetStep() == call.Step })
	case Verdict:
		has("the verdict", "verdict", func(r *dsecv1.LogRecord) bool { return true })
	case Signal:
		has("the signal", "signal", func(r *dsecv1.LogRecord) bool {
			return strings.Contains(r.GetRequestJson(), fmt.Sprintf("%q", call.Step))
		})
	case Restore:
		if l := s.lifeOf(call.Value); (call.Value != "asks" && call.Value != "diverged") && (l == nil || l.call != call.Step) {
			c.fail(g, "lost", "no record of the restore: %v", call)
		}
	case Stop:
		l := s.lifeOf(call.ID)
		if l == nil || !l.over {
			c.fail(g, "lost", "the sandbox is %s after %v", s.state, call)
		}
	case Stdin:
		for _, call := range g.calls {
			if a := s.last(g.step); call.Reply == Answered && c.owed(g.box, call) && (a == nil || a.stdin < call.N) {
				c.fail(g, "lost", "the log has less than the octets that were taken: %v", call)
			}
		}
	default:
		c.stepRecorded(g, s, call)
	}
}

func (c *checker) stepRecorded(g *group, s *story, call *Call) {
	a := s.last(g.step)
	switch {
	case a == nil:
		c.fail(g, "lost", "no record of %v", call)
	case s.taken[g.step]: // its key is answered by what runs again
	case a.op != call.Op:
		c.fail(g, "lost", "the log has a %s: %v", a.op, call)
	case a.end == nil:
		c.fail(g, "lost", "no record of its end: %v", call)
	case a.end.GetOutcome().GetKind() == "unknown":
		c.fail(g, "lost", "the log does not know its end: %v", call)
	case call.Op == Command:
		o := a.end.GetOutcome()
		if v := CommandValue(o, a.out["stdout"], a.out["stderr"]); v != call.Value && !o.GetStdout().GetTruncated() && !o.GetStderr().GetTruncated() {
			c.fail(g, "answer", "the log says %s: %v", v, call)
		}
	default:
		if failed := a.end.GetOutcome().GetCode() != 0; failed != strings.HasPrefix(call.Value, "error ") {
			c.fail(g, "answer", "the log says failed %v: %v", failed, call)
		}
	}
}

// births holds that one key makes one sandbox.
func (c *checker) births(s *story) {
	known := map[string]bool{}
	for _, r := range s.box.Log {
		if r.GetKind() == "create" {
			known[r.GetStep()] = true
		}
	}
	for id, n := range s.box.Births {
		g := &group{box: s.box, step: id}
		if n > 1 {
			c.fail(g, "twice", "was born %d times", n)
		}
		if !known[id] && !c.lossy(s.box) && s.box.Log != nil {
			c.fail(g, "lost", "was born, and no record says so")
		}
	}
}

// runs compares what was really done with the log: rule "twice".
func (c *checker) runs(s *story) {
	b := s.box
	asked, any := map[Ran]bool{}, map[string]bool{}
	for _, call := range c.h.Calls {
		if call.Box == b.Key {
			asked[Ran{call.ID, call.Step}], any[call.Step] = true, true
		}
	}
	checks := map[string]int{}
	for ran, n := range b.Runs {
		g := &group{box: b, id: ran.ID, step: ran.Step}
		again := s.lifeOf(ran.ID) != nil && s.lives[0].id != ran.ID || slices.ContainsFunc(s.given, func(l *life) bool { return l.id == ran.ID })
		may, _ := s.expected(ran.ID, ran.Step)
		switch {
		case n > 1:
			c.fail(g, "twice", "was done %d times in %s", n, ran.ID)
		case c.lossy(&Box{}) && s.lifeOf(ran.ID) == nil: // of whom the log says nothing more
		case n > 0 && again && !any[ran.Step]:
			checks[ran.ID]++
		case n > 0 && again && !may && !c.lossy(&Box{}):
			c.fail(g, "twice", "was done in %s, and the log says neither that it began there nor that it was done again", ran.ID)
		case again:
		case n > 0 && !asked[ran]:
			c.fail(g, "twice", "was done in %s and nobody had asked for it", ran.ID)
		case n > 0 && s.begun(ran.Step) == 0 && !c.lossy(&Box{}): // what dies with its machine needs no record
			c.fail(g, "twice", "was done in %s, and the log says that it never began", ran.ID)
		}
	}
	for id, n := range checks {
		if l := s.lifeOf(id); l != nil && n > s.checks {
			c.fail(&group{box: b, id: id}, "twice", "%d commands were done in %s that nobody had asked for, and %d checks", n, id, s.checks)
		}
	}
	for _, l := range s.lives {
		for _, d := range l.redos {
			if _, must := s.expected(l.id, d.step); must && b.Seen[l.id] && b.Runs[Ran{l.id, d.step}] == 0 {
				c.fail(&group{box: b, id: l.id, step: d.step}, "twice", "was done again in %s by the log, and it was not", l.id)
			}
		}
	}
	for _, g := range c.groups {
		if g.box != b || g.acked == nil || !b.Seen[g.id] {
			continue
		}
		did := (g.op == Append || g.op == Signal) && g.acked.Value == "ok" || g.op == Command && strings.HasPrefix(g.acked.Value, "exited ")
		n := b.Runs[Ran{g.id, g.step}]
		if g.line {
			for _, id := range s.creates {
				n += b.Runs[Ran{id, g.step}]
			}
		}
		if did && n == 0 {
			c.fail(g, "twice", "was answered and never done: %v", g.acked)
		}
	}
}

// reads holds that what a reader saw of a log never changes. A reader may see what is not on the disk yet, so a loss of power excuses it.
func (c *checker) reads() {
	for _, call := range c.h.Calls {
		b := c.h.Boxes[call.Box]
		if call.Op != Read || call.Reply != Answered || b == nil || b.Log == nil || !c.owed(&Box{}, call) {
			continue
		}
		g := &group{box: b, step: "log"}
		switch {
		case call.N > int64(len(b.Log)):
			c.fail(g, "lost", "%d records were read, and %d are there: %v", call.N, len(b.Log), call)
		case LogDigest(b.Log[:call.N]) != call.Value:
			c.fail(g, "lost", "the first %d records have changed since %v", call.N, call)
		}
	}
}

// order holds that what was answered before another was asked for comes before it: in a log by seq, between the logs of one host by
// time, and what a crash left of the later one comes with all of the earlier one.
func (c *checker) order() {
	type done struct {
		g *group
		a *attempt
	}
	var all []done
	for _, g := range c.groups {
		if space(g.op) != "step" {
			continue
		}
		if a := c.stories[g.box.Key].last(g.step); a != nil && g.line {
			all = append(all, done{g, a})
		}
	}
	for _, x := range all {
		if x.g.acked == nil || x.a.end == nil {
			continue
		}
		for _, y := range all {
			if x.g == y.g || x.g.acked.Returned >= y.g.first || x.g.box.Host != y.g.box.Host {
				continue
			}
			if c.stories[x.g.box.Key].taken[x.g.step] {
				continue
			}
			start := c.stories[y.g.box.Key].steps[y.g.step][0].start
			switch {
			case x.g.box == y.g.box && x.a.end.GetSeq() > start.GetSeq():
				c.fail(y.g, "order", "begins at %d, and %s, which was answered before it was asked for, ends at %d", start.GetSeq(), x.g.step, x.a.end.GetSeq())
			case x.g.box != y.g.box && x.a.end.GetMonoNs() > start.GetMonoNs():
				c.fail(y.g, "order", "begins earlier than %s/%s ends, which was answered before it was asked for", x.g.box.Key, x.g.step)
			}
		}
	}
	for _, f := range c.h.Faults {
		if f.Kind != PowerLost && f.Kind != MachineLost {
			continue
		}
		for _, y := range all {
			late := slices.ContainsFunc(y.g.calls, func(o *Call) bool { return o.Returned == 0 || o.Returned > f.From })
			if !late {
				c.prefix(f, y.g)
			}
		}
	}
}

// prefix: y was in the log before the fault and is now; so must be what was answered before y was asked for, whatever its durability.
func (c *checker) prefix(f Fault, y *group) {
	for _, x := range c.h.Calls {
		b := c.h.Boxes[x.Box]
		if b == nil || b.Host != y.box.Host || x.Reply != Answered || x.Returned >= y.first || space(x.Op) != "step" {
			continue
		}
		if slices.ContainsFunc(c.h.Faults, func(g Fault) bool { return g.loses("") && x.Invoked < g.To && g.From < y.first }) {
			continue // was lost before y was asked for
		}
		if a := c.stories[x.Box].last(x.Step); (a == nil || a.end == nil) && !c.stories[x.Box].taken[x.Step] {
			c.fail(&group{box: b, step: x.Step}, "prefix", "is gone with %v, and %s/%s, which was asked for later, is there: %v", f, y.box.Key, y.step, x)
			return
		}
	}
}
