package history

import (
	"fmt"
	"slices"
	"strings"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Minimal writes down what of a history is needed for a violation: calls and faults are left out as long as the same rule is broken by the
// same step; of the log, the records of that step and those that name the sandbox's life are shown.
func Minimal(h *History, v Violation) string {
	broken := func(h *History) bool {
		return slices.ContainsFunc(Check(h), func(w Violation) bool { return w.Rule == v.Rule && w.Box == v.Box && w.Step == v.Step })
	}
	small := *h
	for n := (len(small.Calls) + 1) / 2; n > 0; n /= 2 {
		for i := 0; i < len(small.Calls); {
			less := small
			less.Calls = slices.Concat(small.Calls[:i], small.Calls[min(len(small.Calls), i+n):])
			if broken(&less) {
				small = less
			} else {
				i += n
			}
		}
	}
	for i := 0; i < len(small.Faults); {
		less := small
		less.Faults = slices.Delete(slices.Clone(small.Faults), i, i+1)
		if broken(&less) {
			small = less
		} else {
			i++
		}
	}
	var out strings.Builder
	fmt.Fprintln(&out, v)
	calls := append(slices.Clone(small.Calls), others(h, v, small.Calls)...)
	slices.SortFunc(calls, func(a, b *Call) int { return int(a.Invoked - b.Invoked) })
	for _, c := range calls {
		fmt.Fprintf(&out, "  %v\n", c)
	}
	for _, f := range h.Faults {
		fmt.Fprintf(&out, "  fault %v\n", f)
	}
	if b := h.Boxes[v.Box]; b != nil {
		for _, r := range b.Log {
			if r.GetStep() == v.Step || r.GetKind() == "create" || r.GetKind() == "state" || r.GetKind() == "void" || v.Step == "" || v.Step == "files" || v.Step == "log" {
				fmt.Fprintf(&out, "  log %s\n", line(r))
			}
		}
		for ran, n := range b.Runs {
			if ran.Step == v.Step {
				fmt.Fprintf(&out, "  done %d times in %s\n", n, ran.ID)
			}
		}
	}
	return out.String()
}

// others are calls of the step that the violation does not need, but who looks for the cause does.
func others(h *History, v Violation, have []*Call) (out []*Call) {
	for _, c := range h.Calls {
		if c.Box == v.Box && c.Step == v.Step && !slices.Contains(have, c) {
			out = append(out, c)
		}
	}
	return out
}

func line(r *dsecv1.LogRecord) string {
	s := fmt.Sprintf("%d.%d %s %s", r.GetEpoch(), r.GetSeq(), r.GetKind(), r.GetStep())
	switch r.GetKind() {
	case "output":
		return s + fmt.Sprintf(" %s@%d+%d late %v", r.GetStream(), r.GetOffset(), r.GetLength(), r.GetLate())
	case "end", "session_end":
		o := r.GetOutcome()
		return s + fmt.Sprintf(" %s %d applied %d out %d err %d %s, %d octets", o.GetKind(), o.GetCode(), o.GetApplied(), o.GetStdout().GetTotal(), o.GetStderr().GetTotal(), o.GetError(), r.GetLength())
	case "state":
		return s + " " + r.GetState() + " " + r.GetCause().GetReason()
	case "create":
		return s
	}
	return s + " " + r.GetRequestJson()
}
