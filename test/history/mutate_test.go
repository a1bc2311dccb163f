package history_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/test/history"
)

// copyOf is a history that may be changed.
func copyOf(h *history.History) *history.History {
	c := &history.History{Seed: h.Seed, Faults: slices.Clone(h.Faults), Boxes: map[string]*history.Box{}}
	for _, call := range h.Calls {
		one := *call
		c.Calls = append(c.Calls, &one)
	}
	for k, b := range h.Boxes {
		one := *b
		one.Log = nil
		for _, r := range b.Log {
			one.Log = append(one.Log, proto.CloneOf(r))
		}
		one.Births, one.Runs, one.Files = maps.Clone(b.Births), maps.Clone(b.Runs), maps.Clone(b.Files)
		c.Boxes[k] = &one
	}
	return c
}

// renumber hides a change of the log from whoever only counts.
func renumber(b *history.Box) {
	for i, r := range b.Log {
		r.Seq = int64(i) + 1
	}
}

// answered lists calls for steps that are owed and in the log, in a history without a loss.
func answered(h *history.History, op history.Op) (out []*history.Call) {
	for _, c := range h.Calls {
		if c.Reply == history.Answered && (op == "" || c.Op == op) && c.Op != history.Read && h.Boxes[c.Box].Log != nil {
			out = append(out, c)
		}
	}
	return out
}

func find(b *history.Box, match func(*dsecv1.LogRecord) bool) (at []int) {
	for i, r := range b.Log {
		if match(r) {
			at = append(at, i)
		}
	}
	return at
}

func kinds(step string, kinds ...string) func(*dsecv1.LogRecord) bool {
	return func(r *dsecv1.LogRecord) bool { return r.GetStep() == step && slices.Contains(kinds, r.GetKind()) }
}

func without(b *history.Box, at ...int) {
	for _, i := range slices.Backward(at) {
		b.Log = slices.Delete(b.Log, i, i+1)
	}
	renumber(b)
}

// mutations change a history so that one promise is broken; each reports whether there was anything to change.
var mutations = []struct {
	name  string
	rules []string // one of which must find it
	do    func(h *history.History, c *history.Call) bool
	op    history.Op // of the calls that it is done for
}{
	{"a record is dropped and leaves a gap", []string{"order"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		at := find(b, kinds(c.Step, "command"))
		b.Log = slices.Delete(b.Log, at[0], at[0]+1)
		return true
	}, history.Command},
	{"an acknowledged step is lost whole", []string{"lost"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		without(b, find(b, func(r *dsecv1.LogRecord) bool { return r.GetStep() == c.Step })...)
		return true
	}, history.Command},
	{"the end of an acknowledged step is lost", []string{"lost", "grammar"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		without(b, find(b, kinds(c.Step, "end"))...)
		return true
	}, history.Command},
	{"an acknowledged write is lost whole", []string{"lost"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		without(b, find(b, func(r *dsecv1.LogRecord) bool { return r.GetStep() == c.Step })...)
		return true
	}, history.Write},
	{"an acknowledged creation is lost", []string{"lost", "grammar"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		without(b, find(b, kinds(c.ID, "create"))...)
		return true
	}, history.Create},
	{"octets of output are lost", []string{"octets"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		at := find(b, func(r *dsecv1.LogRecord) bool { return kinds(c.Step, "output")(r) && !r.GetLate() })
		if len(at) == 0 {
			return false
		}
		without(b, at[len(at)-1])
		return true
	}, history.Command},
	{"output is there twice", []string{"octets"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		at := find(b, kinds(c.Step, "output"))
		if len(at) == 0 {
			return false
		}
		b.Log = slices.Insert(b.Log, at[0]+1, proto.CloneOf(b.Log[at[0]]))
		renumber(b)
		return true
	}, history.Command},
	{"output moves up", []string{"octets"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		at := find(b, func(r *dsecv1.LogRecord) bool { return kinds(c.Step, "output")(r) && !r.GetLate() })
		if len(at) == 0 {
			return false
		}
		b.Log[at[0]].Offset += 3
		return true
	}, history.Command},
	{"one octet of output changes", []string{"octets", "answer"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		at := find(b, func(r *dsecv1.LogRecord) bool { return kinds(c.Step, "output")(r) && !r.GetLate() })
		if len(at) == 0 {
			return false
		}
		b.Log[at[0]].Data[0]++
		return true
	}, history.Command},
	{"the exit code changes", []string{"answer"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		b.Log[find(b, kinds(c.Step, "end"))[0]].Outcome.Code++
		return true
	}, history.Command},
	{"a step begins again", []string{"twice"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		again := []*dsecv1.LogRecord{proto.CloneOf(b.Log[find(b, kinds(c.Step, "command"))[0]]), proto.CloneOf(b.Log[find(b, kinds(c.Step, "end"))[0]])}
		at := find(b, kinds(c.Step, "end"))[0] + 1
		b.Log = slices.Insert(b.Log, at, again...)
		renumber(b)
		return true
	}, history.Command},
	{"a finished write begins again", []string{"twice"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		ends := find(b, kinds(c.Step, "end"))
		at := ends[len(ends)-1]
		b.Log = slices.Insert(b.Log, at+1, proto.CloneOf(b.Log[find(b, kinds(c.Step, "write"))[0]]), proto.CloneOf(b.Log[at]))
		renumber(b)
		return true
	}, history.Write},
	{"an end is there twice", []string{"grammar"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		at := find(b, kinds(c.Step, "end"))[0]
		b.Log = slices.Insert(b.Log, at+1, proto.CloneOf(b.Log[at]))
		renumber(b)
		return true
	}, history.Command},
	{"an end comes before its start", []string{"grammar"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		i, j := find(b, kinds(c.Step, "command"))[0], find(b, kinds(c.Step, "end"))[0]
		b.Log[i], b.Log[j] = b.Log[j], b.Log[i]
		b.Log[i].MonoNs, b.Log[j].MonoNs = b.Log[j].MonoNs, b.Log[i].MonoNs
		renumber(b)
		return true
	}, history.Command},
	{"an earlier epoch comes back", []string{"order"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		for _, r := range b.Log[:find(b, kinds(c.Step, "end"))[0]] {
			r.Epoch++
		}
		return true
	}, history.Command},
	{"a step that was answered later is moved before what was answered earlier", []string{"order"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		mine := func(r *dsecv1.LogRecord) bool { return r.GetStep() == c.Step }
		first := -1
		for i, r := range b.Log {
			if i > 1 && !mine(r) && r.GetKind() == "command" && slices.ContainsFunc(h.Calls, func(o *history.Call) bool {
				return o.Box == c.Box && o.Step == r.GetStep() && o.Reply == history.Answered && o.Returned < firstAsked(h, c)
			}) {
				first = i
				break
			}
		}
		if first < 0 || first > find(b, mine)[0] {
			return false
		}
		at := b.Log[first].MonoNs
		var moved []*dsecv1.LogRecord
		for _, i := range find(b, mine) {
			b.Log[i].MonoNs = at
			moved = append(moved, b.Log[i])
		}
		b.Log = slices.DeleteFunc(b.Log, mine)
		b.Log = slices.Insert(b.Log, first, moved...)
		renumber(b)
		return true
	}, history.Command},
	{"a step ran twice", []string{"twice"}, func(h *history.History, c *history.Call) bool {
		h.Boxes[c.Box].Runs[history.Ran{ID: c.ID, Step: c.Step}] = 2
		return true
	}, history.Command},
	{"an answered step never ran", []string{"twice"}, func(h *history.History, c *history.Call) bool {
		ran := history.Ran{ID: c.ID, Step: c.Step}
		if h.Boxes[c.Box].Runs[ran] == 0 || c.Value[:7] != "exited " || !h.Boxes[c.Box].Seen[c.ID] {
			return false
		}
		delete(h.Boxes[c.Box].Runs, ran)
		return true
	}, history.Command},
	{"a step ran that nobody asked for", []string{"twice"}, func(h *history.History, c *history.Call) bool {
		h.Boxes[c.Box].Runs[history.Ran{ID: c.ID, Step: "nobody"}] = 1
		return true
	}, history.Command},
	{"a step ran whose record says that it never began", []string{"twice"}, func(h *history.History, c *history.Call) bool {
		h.Calls = append(h.Calls, &history.Call{Box: c.Box, ID: c.ID, Op: history.Command, Step: "ghost", Request: "x", Invoked: 1})
		h.Boxes[c.Box].Runs[history.Ran{ID: c.ID, Step: "ghost"}] = 1
		return true
	}, history.Command},
	{"an append is there twice", []string{"twice"}, func(h *history.History, c *history.Call) bool {
		h.Boxes[c.Box].Runs[history.Ran{ID: c.ID, Step: c.Step}] = 2
		return true
	}, history.Append},
	{"two sandboxes answer one create key", []string{"answer", "lost"}, func(h *history.History, c *history.Call) bool {
		more := *c
		more.ID, more.Value, more.Invoked, more.Returned = "hother-aaaaaaaaaaaaaaaa", "hother-aaaaaaaaaaaaaaaa", 1<<40, 1<<40+1
		h.Calls = append(h.Calls, &more)
		return true
	}, history.Create},
	{"a sandbox is born twice", []string{"twice"}, func(h *history.History, c *history.Call) bool {
		h.Boxes[c.Box].Births[c.ID] = 2
		return true
	}, history.Create},
	{"another request under the key is answered", []string{"conflict"}, func(h *history.History, c *history.Call) bool {
		if c.Op == history.Stdin { // many writes go under one key
			return false
		}
		more := *c
		more.Request, more.Invoked, more.Returned = "another", 1<<40, 1<<40+1
		h.Calls = append(h.Calls, &more)
		return true
	}, ""},
	{"the same request is refused as another", []string{"conflict"}, func(h *history.History, c *history.Call) bool {
		id := c.ID + "x"
		h.Calls = append(h.Calls, &history.Call{Box: c.Box, ID: id, Op: c.Op, Step: c.Step, Request: c.Request, Invoked: 1 << 40, Returned: 1<<40 + 1, Reply: history.Conflict})
		return true
	}, history.Command},
	{"another answer for the same step", []string{"answer"}, func(h *history.History, c *history.Call) bool {
		more := *c
		more.Value, more.Invoked, more.Returned = c.Value+"x", 1<<40, 1<<40+1
		h.Calls = append(h.Calls, &more)
		return true
	}, history.Command},
	{"an answered step is unknown later", []string{"unknown"}, func(h *history.History, c *history.Call) bool {
		more := *c
		more.Reply, more.Value, more.Invoked, more.Returned = history.Unknown, "", 1<<40, 1<<40+1
		h.Calls = append(h.Calls, &more)
		return true
	}, ""},
	{"a step is unknown although nothing failed", []string{"unknown"}, func(h *history.History, c *history.Call) bool {
		h.Faults = nil
		h.Calls = append(h.Calls, &history.Call{Box: c.Box, ID: c.ID, Op: history.Command, Step: "new", Request: "x", Invoked: 1 << 40, Returned: 1<<40 + 1, Reply: history.Unknown})
		return true
	}, history.Command},
	{"records that were read are gone", []string{"lost"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		h.Calls = append(h.Calls, &history.Call{Box: c.Box, Op: history.Read, Step: "log", Invoked: 1 << 40, Returned: 1<<40 + 1, Reply: history.Answered,
			N: int64(len(b.Log) + 1), Value: history.LogDigest(b.Log)})
		return true
	}, history.Create},
	{"records that were read have changed", []string{"lost"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		h.Calls = append(h.Calls, &history.Call{Box: c.Box, Op: history.Read, Step: "log", Invoked: 1 << 40, Returned: 1<<40 + 1, Reply: history.Answered,
			N: int64(len(b.Log)), Value: history.LogDigest(b.Log)})
		b.Log[len(b.Log)-1].MonoNs++
		return true
	}, history.Create},
	{"a session opens twice", []string{"twice"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		at := find(b, kinds(c.Step, "session"))[0]
		b.Log = slices.Insert(b.Log, at+1, proto.CloneOf(b.Log[at]))
		renumber(b)
		return true
	}, history.Session},
	{"a session is lost", []string{"lost"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		without(b, find(b, kinds(c.Step, "session", "session_opened", "session_end"))...)
		return true
	}, history.Session},
	{"octets of stdin are lost", []string{"lost", "octets"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		at := find(b, func(r *dsecv1.LogRecord) bool { return kinds(c.Step, "stdin")(r) && r.GetLength() > 0 })
		if len(at) == 0 || c.N == 0 {
			return false
		}
		without(b, at[0])
		return true
	}, history.Stdin},
	{"octets of stdin are there twice", []string{"octets"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		at := find(b, func(r *dsecv1.LogRecord) bool { return kinds(c.Step, "stdin")(r) && r.GetLength() > 0 })
		if len(at) == 0 {
			return false
		}
		b.Log = slices.Insert(b.Log, at[0]+1, proto.CloneOf(b.Log[at[0]]))
		renumber(b)
		return true
	}, history.Stdin},
	{"a file has other octets than the log says", []string{"files"}, func(h *history.History, c *history.Call) bool {
		certain := history.Certain(h.Boxes[c.Box]) // nothing else is compared
		if len(certain) == 0 {
			return false
		}
		h.Boxes[c.Box].Files[certain[0]] += "x"
		return true
	}, ""},
	{"a file is there that the log does not know", []string{"files"}, func(h *history.History, c *history.Call) bool {
		if h.Boxes[c.Box].Files == nil || h.Boxes[c.Box].ID != c.ID {
			return false
		}
		h.Boxes[c.Box].Files[h.Boxes[c.Box].Root+"/stray"] = "x"
		return true
	}, history.Create},
	{"a sandbox works on after its stop", []string{"grammar", "lost"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		last := proto.CloneOf(b.Log[len(b.Log)-1])
		last.Kind, last.Step = "stdin", "nobody"
		b.Log = append(b.Log, last)
		renumber(b)
		return true
	}, history.Stop},
	{"time runs backwards between two logs of one host", []string{"order"}, func(h *history.History, c *history.Call) bool {
		b := h.Boxes[c.Box]
		other := slices.ContainsFunc(h.Calls, func(o *history.Call) bool {
			return o.Box != c.Box && o.Reply == history.Answered && o.Op == history.Command && o.Returned < firstAsked(h, c)
		})
		if !other {
			return false
		}
		for _, r := range b.Log {
			r.MonoNs = 0
		}
		return true
	}, history.Command},
}

func firstAsked(h *history.History, c *history.Call) int64 {
	first := c.Invoked
	for _, o := range h.Calls {
		if o.Box == c.Box && o.Step == c.Step {
			first = min(first, o.Invoked)
		}
	}
	return first
}

// TestMutated breaks true histories in one place each: every broken one must be refused, by a rule that is about it.
func TestMutated(t *testing.T) {
	done := map[string]int{}
	for seed := uint64(1); seed <= 60; seed++ {
		p := drawn(seed)
		p.moved = false
		h, _ := inBubble(t, p)
		if bad := history.Check(h); len(bad) > 0 {
			t.Fatalf("seed %d: a true history is refused: %v", seed, bad)
		}
		if slices.ContainsFunc(h.Faults, func(f history.Fault) bool { return f.Kind == history.PowerLost || f.Kind == history.KeeperKilled }) {
			continue // what is not owed may be lost
		}
		for _, m := range mutations {
			for i, c := range answered(h, m.op) {
				if i == 3 {
					break
				}
				broken := copyOf(h)
				at := slices.Index(h.Calls, c)
				if !m.do(broken, broken.Calls[at]) {
					continue
				}
				done[m.name]++
				bad := history.Check(broken)
				if !slices.ContainsFunc(bad, func(v history.Violation) bool { return slices.Contains(m.rules, v.Rule) }) {
					t.Errorf("seed %d, %v: %s: not refused: %v", seed, c, m.name, bad)
				}
			}
		}
	}
	for _, m := range mutations {
		if done[m.name] == 0 {
			t.Errorf("%s: was never tried", m.name)
		}
	}
	t.Log(fmt.Sprint(done))
}

// TestPrefix: what a loss of power leaves of one sandbox of a host says what it must leave of the others.
func TestPrefix(t *testing.T) {
	record := func(seq, mono int64, kind, step string) *dsecv1.LogRecord {
		r := &dsecv1.LogRecord{Seq: seq, MonoNs: mono, Kind: kind, Step: step}
		if kind == "end" {
			r.Outcome = &dsecv1.Outcome{Kind: "exited", Stdout: &dsecv1.StreamEnd{}, Stderr: &dsecv1.StreamEnd{}}
		}
		return r
	}
	box := func(key string, at int64) *history.Box {
		return &history.Box{Key: key, Host: "h", Durability: history.Process, Log: []*dsecv1.LogRecord{
			record(1, at, "create", key), record(2, at+1, "command", "s"), record(3, at+2, "end", "s")}}
	}
	call := func(key string, from int64) *history.Call {
		return &history.Call{Box: key, ID: key, Op: history.Command, Step: "s", Request: "r", Invoked: from, Returned: from + 1, Reply: history.Answered, Value: history.CommandValue(&dsecv1.Outcome{Kind: "exited"}, nil, nil)}
	}
	h := &history.History{Calls: []*history.Call{call("a", 1), call("b", 3)}, Faults: []history.Fault{{Kind: history.PowerLost, From: 5, To: 6}},
		Boxes: map[string]*history.Box{"a": box("a", 0), "b": box("b", 10)}}
	if bad := history.Check(h); len(bad) > 0 {
		t.Fatalf("a true history is refused: %v", bad)
	}
	gone := copyOf(h)
	gone.Boxes["b"].Log = gone.Boxes["b"].Log[:1] // the later one may be lost
	if bad := history.Check(gone); len(bad) > 0 {
		t.Fatalf("a true history is refused: %v", bad)
	}
	gone = copyOf(h)
	gone.Boxes["a"].Log = gone.Boxes["a"].Log[:1] // not the earlier one alone
	if bad := history.Check(gone); !slices.ContainsFunc(bad, func(v history.Violation) bool { return v.Rule == "prefix" }) {
		t.Fatalf("not refused: %v", bad)
	}
}
