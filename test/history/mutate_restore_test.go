package history_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/test/history"
)

// lastLife is where a complete restore lies in a log: the index of its create and of the state that completes it.
func lastLife(b *history.Box) (from, to int, id string) {
	from, to = -1, -1
	for i, r := range b.Log {
		switch {
		case r.GetKind() == "create" && i > 0:
			from, id = i, r.GetStep()
		case r.GetKind() == "state" && r.GetState() == "running" && from >= 0 && to < from:
			to = i
		}
	}
	if to < from {
		return -1, -1, ""
	}
	return from, to, id
}

// redoOf finds a redo in the last restore.
func redoOf(b *history.Box, match func(*dsecv1.LogRecord) bool) int {
	from, to, _ := lastLife(b)
	for i := max(from, 0); i < to; i++ {
		if r := b.Log[i]; r.GetKind() == "redo" && match(r) {
			return i
		}
	}
	return -1
}

func state(s, verdict string) func(*dsecv1.LogRecord) bool {
	return func(r *dsecv1.LogRecord) bool {
		return r.GetState() == s && (verdict == "" || strings.Contains(r.GetRequestJson(), `"`+verdict+`"`))
	}
}

var restoreMutations = []struct {
	name  string
	rules []string
	do    func(h *history.History, b *history.Box) bool
}{
	{"a step is done twice in the restored sandbox", []string{"twice"}, func(_ *history.History, b *history.Box) bool {
		i := redoOf(b, state("started", ""))
		_, _, id := lastLife(b)
		if i < 0 {
			return false
		}
		b.Runs[history.Ran{ID: id, Step: b.Log[i].GetStep()}]++
		return true
	}},
	{"a step that was done again was not", []string{"twice"}, func(_ *history.History, b *history.Box) bool {
		i := redoOf(b, state("ended", "equal"))
		_, _, id := lastLife(b)
		if i < 0 || b.Log[i].GetOutcome().GetKind() != "exited" || b.Log[i].GetOutcome().GetError() != "" || b.Runs[history.Ran{ID: id, Step: b.Log[i].GetStep()}] == 0 {
			return false
		}
		delete(b.Runs, history.Ran{ID: id, Step: b.Log[i].GetStep()})
		return true
	}},
	{"a step that was left out was done", []string{"twice"}, func(h *history.History, b *history.Box) bool {
		i := redoOf(b, state("skipped", ""))
		_, _, id := lastLife(b)
		if i < 0 || lossy(h) {
			return false
		}
		b.Runs[history.Ran{ID: id, Step: b.Log[i].GetStep()}]++
		return true
	}},
	{"nothing says that a step was done again", []string{"restore", "twice"}, func(h *history.History, b *history.Box) bool {
		i := redoOf(b, state("started", ""))
		if i < 0 || lossy(h) {
			return false
		}
		step := b.Log[i].GetStep()
		b.Log = slices.DeleteFunc(b.Log, func(r *dsecv1.LogRecord) bool { return r.GetKind() == "redo" && r.GetStep() == step })
		renumber(b)
		return true
	}},
	{"a redo that came to something else counts as equal", []string{"restore"}, func(_ *history.History, b *history.Box) bool {
		i := redoOf(b, func(r *dsecv1.LogRecord) bool {
			return state("ended", "equal")(r) && r.GetOutcome().GetStdout() != nil
		})
		if i < 0 {
			return false
		}
		b.Log[i].Outcome.Code++
		return true
	}},
	{"a difference is told under policy strict and the sandbox stands", []string{"restore"}, func(h *history.History, b *history.Box) bool {
		i := redoOf(b, state("ended", "equal"))
		call := restoredBy(h, b)
		if i < 0 || call == nil || !strings.HasPrefix(call.Request, "restore strict") {
			return false
		}
		b.Log[i].RequestJson = strings.Replace(b.Log[i].RequestJson, "equal", "different", 1)
		return true
	}},
	{"steps are done again in another order", []string{"restore"}, func(_ *history.History, b *history.Box) bool {
		i := redoOf(b, state("started", ""))
		if i < 0 {
			return false
		}
		j := redoOf(b, func(r *dsecv1.LogRecord) bool {
			return r.GetState() == "started" && r.GetStep() != b.Log[i].GetStep()
		})
		if j < 0 {
			return false
		}
		b.Log[i], b.Log[j] = b.Log[j], b.Log[i]
		b.Log[i].MonoNs, b.Log[j].MonoNs = b.Log[j].MonoNs, b.Log[i].MonoNs
		renumber(b)
		return true
	}},
	{"a sandbox is restored beside one that lives", []string{"restore"}, func(_ *history.History, b *history.Box) bool {
		from, _, _ := lastLife(b)
		if from < 0 {
			return false
		}
		drop := from
		for i := from - 1; i > 0; i-- {
			if r := b.Log[i]; r.GetKind() == "state" && (r.GetState() == "failed" || r.GetState() == "stopped") {
				b.Log = slices.Delete(b.Log, i, i+1)
				renumber(b)
				return drop > 0
			}
		}
		return false
	}},
	{"restored without a call", []string{"restore"}, func(h *history.History, b *history.Box) bool {
		call := restoredBy(h, b)
		if call == nil {
			return false
		}
		h.Calls = slices.DeleteFunc(h.Calls, func(c *history.Call) bool { return c.Op == history.Restore && c.Step == call.Step })
		return true
	}},
	{"one call answers two sandboxes", []string{"restore", "lost", "answer"}, func(h *history.History, b *history.Box) bool {
		call := restoredBy(h, b)
		if call == nil || call.Reply != history.Answered {
			return false
		}
		call.Value = b.Log[0].GetStep()
		return true
	}},
	{"a step that is never done again was", []string{"restore"}, func(h *history.History, b *history.Box) bool {
		i := redoOf(b, state("started", ""))
		call := restoredBy(h, b)
		if i < 0 || call == nil || strings.Contains(call.Request, b.Log[i].GetStep()) {
			return false
		}
		for _, r := range b.Log {
			if r.GetKind() == "command" && strings.Contains(b.Log[i].GetRequestJson(), fmt.Sprintf("%q", fmt.Sprint(r.GetSeq()))) {
				r.RequestJson = `{"restore":"never"}`
				return true
			}
		}
		return false
	}},
	{"what was restored lacks a file", []string{"files"}, func(_ *history.History, b *history.Box) bool {
		i := redoOf(b, func(r *dsecv1.LogRecord) bool { return state("ended", "equal")(r) && r.GetOutcome().GetStdout() == nil })
		if i < 0 || b.Files == nil {
			return false
		}
		for p, text := range b.Files {
			if text != "" {
				delete(b.Files, p)
				return slices.ContainsFunc(history.Check(&history.History{Boxes: map[string]*history.Box{b.Key: b}}), func(v history.Violation) bool { return v.Rule == "files" })
			}
		}
		return false
	}},
}

func restoredBy(h *history.History, b *history.Box) *history.Call {
	from, to, _ := lastLife(b)
	for i := max(from, 0); i < to; i++ {
		if b.Log[i].GetKind() != "restored" {
			continue
		}
		for _, c := range h.Calls {
			if c.Op == history.Restore && strings.Contains(b.Log[i].GetRequestJson(), `"`+c.Step+`"`) {
				return c
			}
		}
	}
	return nil
}

func lossy(h *history.History) bool {
	return slices.ContainsFunc(h.Faults, func(f history.Fault) bool {
		return f.Kind == history.PowerLost || f.Kind == history.MachineLost
	})
}

// TestMutatedRestores breaks histories in which sandboxes were restored, in one place each.
func TestMutatedRestores(t *testing.T) {
	done, restored := map[string]int{}, 0
	for seed := uint64(1); seed <= 200; seed++ {
		h, _ := inBubble(t, drawn(seed))
		if bad := history.Check(h); len(bad) > 0 {
			t.Fatalf("seed %d: a true history is refused: %v", seed, bad)
		}
		for key, b := range h.Boxes {
			if from, _, _ := lastLife(b); from < 0 {
				continue
			}
			restored++
			for _, m := range restoreMutations {
				broken := copyOf(h)
				if done[m.name] == 20 || !m.do(broken, broken.Boxes[key]) {
					continue
				}
				done[m.name]++
				bad := history.Check(broken)
				if !slices.ContainsFunc(bad, func(v history.Violation) bool { return slices.Contains(m.rules, v.Rule) }) {
					t.Errorf("seed %d, %s: %s: not refused: %v\n%s", seed, key, m.name, bad, history.Minimal(broken, history.Violation{Box: key}))
				}
			}
		}
	}
	for _, m := range restoreMutations {
		if done[m.name] == 0 {
			t.Errorf("%s: was never tried", m.name)
		}
	}
	t.Log(restored, "trajectories with restores;", fmt.Sprint(done))
}
