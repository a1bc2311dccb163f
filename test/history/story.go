package history

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// attempt is one beginning of a step in the log, with what came of it.
type attempt struct {
	op           Op
	start, end   *dsecv1.LogRecord
	void, gapped bool
	out          map[string][]byte // by stream, up to the end
	next         map[string]int64
	stdin        int64
}

func (a *attempt) open() bool { return a.end == nil && !a.void }

// again says whether a step that ended so may begin once more under its key: a body that replaces, or that carries its place.
func (a *attempt) again() bool {
	kind := a.end.GetOutcome().GetKind()
	return (a.op == Write || a.op == Append || a.op == Upload) && (kind == "interrupted" || kind == "unknown")
}

// story is what one log says.
type story struct {
	box      *Box
	bad      []Violation
	steps    map[string][]*attempt
	order    []string // of steps, by first start
	creates  []string // sandboxes whose creation is not void
	sessions map[string]int
	open     map[string]bool // sessions
	state    string
	over     bool
	epoch    int64
	lives    []*life // those of attempts that were given up are in given
	given    []*life
	taken    map[string]bool // steps whose keys a restore answers by what runs again
	classes  []decision
	checks   int // that restores may have made
}

// last is a step's last beginning that is not void.
func (s *story) last(step string) *attempt {
	for _, a := range slices.Backward(s.steps[step]) {
		if !a.void {
			return a
		}
	}
	return nil
}

// begun counts the beginnings that are not void.
func (s *story) begun(step string) (n int) {
	for _, a := range s.steps[step] {
		if !a.void {
			n++
		}
	}
	return n
}

func (s *story) fail(rule, step, format string, args ...any) {
	s.bad = append(s.bad, Violation{rule, s.box.Key, step, fmt.Sprintf(format, args...)})
}

var stepOps = map[string]Op{"command": Command, "write": Write, "append": Append, "upload": Upload, "makedir": MakeDir, "move": Move, "remove": Remove, "snapshot": Snapshot}

// tell reads a log by its grammar, rules "order", "grammar" and "octets".
func tell(b *Box) *story {
	s := &story{box: b, steps: map[string][]*attempt{}, sessions: map[string]int{}, open: map[string]bool{}, taken: map[string]bool{}}
	var epoch, mono int64
	for i, r := range b.Log {
		if r.GetSeq() != int64(i)+1 {
			s.fail("order", r.GetStep(), "record %d has seq %d", i+1, r.GetSeq())
		}
		switch {
		case r.GetEpoch() < epoch:
			s.fail("order", r.GetStep(), "record %d is of epoch %d after %d", r.GetSeq(), r.GetEpoch(), epoch)
		case r.GetEpoch() == epoch && r.GetMonoNs() < mono:
			s.fail("order", r.GetStep(), "record %d is %d ns earlier than the one before", r.GetSeq(), mono-r.GetMonoNs())
		}
		epoch, mono = r.GetEpoch(), r.GetMonoNs()
		s.take(r)
		s.epoch = epoch
	}
	return s
}

func (s *story) take(r *dsecv1.LogRecord) {
	step := r.GetStep()
	if s.attempt(r) {
		return
	}
	if s.over && r.GetKind() != "recalled" && r.GetKind() != "verdict" && r.GetKind() != "create" {
		s.fail("grammar", step, "%s at %d follows the end of the sandbox", r.GetKind(), r.GetSeq())
	}
	if r.GetSeq() == 1 && r.GetKind() != "create" {
		s.fail("grammar", step, "the first record is %s", r.GetKind())
	}
	if op, ok := stepOps[r.GetKind()]; ok {
		s.start(r, op, step)
		return
	}
	switch r.GetKind() {
	case "create":
		if len(s.creates) > 0 {
			if r.GetEpoch() == s.epoch {
				s.fail("twice", step, "created again at %d as %s after %s", r.GetSeq(), step, s.creates[0])
			}
			s.again(r)
			return
		}
		s.lives = append(s.lives, &life{id: step, from: r.GetSeq(), whole: true})
		s.creates = append(s.creates, step)
		s.state, s.over = "creating", false
	case "void", "create_failed":
		s.void(r)
	case "state":
		s.turn(r)
	case "output":
		s.output(r)
	case "end":
		s.end(r)
	case "stdin":
		if a := s.last(step); a == nil {
			s.fail("grammar", step, "stdin at %d of a command without a start", r.GetSeq())
		} else if r.GetOffset() != a.stdin {
			s.fail("octets", step, "stdin at %d begins at octet %d, the one before ended at %d", r.GetSeq(), r.GetOffset(), a.stdin)
		} else {
			a.stdin += r.GetLength()
		}
	case "signal":
		var q struct{ Step string }
		if _ = json.Unmarshal([]byte(r.GetRequestJson()), &q); q.Step != "" {
			s.start(r, Signal, q.Step)
		}
	case "session":
		if s.open[step] {
			s.fail("twice", step, "session opened at %d while it is open", r.GetSeq())
		}
		s.open[step] = true
		s.sessions[step]++
	case "session_end":
		if !s.open[step] {
			s.fail("grammar", step, "session ended at %d while it is not open", r.GetSeq())
		}
		delete(s.open, step)
	}
}

func (s *story) start(r *dsecv1.LogRecord, op Op, step string) {
	if a := s.last(step); a != nil && (a.open() || !a.again()) {
		s.fail("twice", step, "begun at %d, which is in the log since %d", r.GetSeq(), a.start.GetSeq())
	}
	if s.steps[step] == nil {
		s.order = append(s.order, step)
	}
	a := &attempt{op: op, start: r, out: map[string][]byte{}, next: map[string]int64{}}
	if op == Command {
		a.stdin = r.GetLength()
	}
	s.steps[step] = append(s.steps[step], a)
}

func (s *story) void(r *dsecv1.LogRecord) {
	if n := len(s.creates); n > 0 && s.creates[n-1] == r.GetStep() {
		if s.state != "creating" {
			s.fail("grammar", r.GetStep(), "the creation is void at %d, and the sandbox was %s", r.GetSeq(), s.state)
		}
		s.creates = s.creates[:n-1]
		if l := s.current(); l != nil && l.id == r.GetStep() {
			s.lives = s.lives[:len(s.lives)-1]
		}
		return
	}
	a := s.last(r.GetStep())
	if a == nil || !a.open() {
		s.fail("grammar", r.GetStep(), "void at %d of nothing that is under way", r.GetSeq())
		return
	}
	if len(a.next) > 0 {
		s.fail("grammar", r.GetStep(), "void at %d of a step that has printed", r.GetSeq())
	}
	a.void = true
}

func (s *story) turn(r *dsecv1.LogRecord) {
	was := s.state
	s.state = r.GetState()
	s.over = s.state == "stopped" || s.state == "failed"
	if was == "stopping" && !s.over && s.state != "stopping" {
		s.fail("grammar", "", "%s at %d takes the end back", s.state, r.GetSeq())
	}
	if !s.over {
		return
	}
	if l := s.current(); l != nil {
		l.over = true
	}
	for step, all := range s.steps {
		if all[len(all)-1].open() {
			s.fail("grammar", step, "the sandbox ended at %d and the step did not", r.GetSeq())
		}
	}
	for name := range s.open {
		s.fail("grammar", name, "the sandbox ended at %d and the session did not", r.GetSeq())
	}
}

func (s *story) output(r *dsecv1.LogRecord) {
	step, _, _ := strings.Cut(r.GetStep(), "~") // behind it, the epoch of one that runs again
	stream := r.GetStream()
	a := s.last(step)
	switch {
	case a == nil:
		s.fail("grammar", step, "output at %d of a command without a start", r.GetSeq())
		return
	case r.GetLate() != (a.end != nil):
		s.fail("grammar", step, "output at %d is late: %v, ended: %v", r.GetSeq(), r.GetLate(), a.end != nil)
	case int64(len(r.GetData())) != r.GetLength():
		s.fail("octets", step, "output at %d of %d octets has %d", r.GetSeq(), r.GetLength(), len(r.GetData()))
	case r.GetOffset() < a.next[stream]:
		s.fail("octets", step, "%s at %d begins at octet %d, before the end of what came before, %d", stream, r.GetSeq(), r.GetOffset(), a.next[stream])
	case r.GetOffset() > a.next[stream]:
		a.gapped = true
	}
	a.next[stream] = r.GetOffset() + r.GetLength()
	if a.end == nil {
		a.out[stream] = append(a.out[stream], r.GetData()...)
	}
}

func (s *story) end(r *dsecv1.LogRecord) {
	step := r.GetStep()
	a := s.last(step)
	if a == nil || !a.open() {
		s.fail("grammar", step, "end at %d of nothing that is under way", r.GetSeq())
		return
	}
	a.end = r
	if a.op != Command {
		return
	}
	o := r.GetOutcome()
	for stream, e := range map[string]*dsecv1.StreamEnd{"stdout": o.GetStdout(), "stderr": o.GetStderr()} {
		got := int64(len(a.out[stream]))
		switch {
		case e.GetTruncated():
		case got != e.GetTotal() || a.gapped:
			s.fail("octets", step, "%s has %d octets in the log, its end at %d says %d", stream, got, r.GetSeq(), e.GetTotal())
		case e.GetSha256() != "":
			if sum := sha256.Sum256(a.out[stream]); hex.EncodeToString(sum[:]) != e.GetSha256() {
				s.fail("octets", step, "%s has another hash in the log than its end at %d says", stream, r.GetSeq())
			}
		}
	}
}
