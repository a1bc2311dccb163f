package confine

import "slices"

// node is an instruction whose successors are known by what they do: equal nodes are one. no is also the next of an instruction
// that does not jump; -1 where there is none.
type node struct {
	code    uint16
	k       uint32
	yes, no int
}

// share makes a program that does the same with each path's common rest written once: the kernel translates a filter for every command,
// instruction by instruction, which took a quarter of a short one's time in process 1.
func share(b block) block {
	var nodes []node
	ids := map[node]int{}
	at := make([]int, len(b)) // instruction -> node
	for i := len(b) - 1; i >= 0; i-- {
		n := node{code: b[i].code, k: b[i].k, yes: -1, no: -1}
		switch n.code {
		case ret:
		case ja:
			at[i] = at[i+1+int(n.k)]
			continue
		case jeq, jge, jset:
			n.yes, n.no = at[i+1+int(b[i].jt)], at[i+1+int(b[i].jf)]
			if n.yes == n.no {
				at[i] = n.no
				continue
			}
		default: // what it computes may be of no use
			n.no = at[i+1]
			if c := nodes[n.no].code; c == ret || c == ldAbs {
				at[i] = n.no
				continue
			}
		}
		id, ok := ids[n]
		if !ok {
			id = len(nodes)
			nodes, ids[n] = append(nodes, n), id
		}
		at[i] = id
	}
	w := writer{nodes: nodes, pos: map[int]int{}}
	w.write(at[0])
	for i, j := 0, len(w.out)-1; i < j; i, j = i+1, j-1 {
		w.out[i], w.out[j] = w.out[j], w.out[i]
	}
	return w.out
}

// writer writes nodes from the last to the first, since all jumps go forward.
type writer struct {
	nodes []node
	out   block
	pos   map[int]int // node -> index in out
}

func (w *writer) write(id int) {
	if _, ok := w.pos[id]; ok {
		return
	}
	n := w.nodes[id]
	in := insn{code: n.code, k: n.k}
	switch {
	case n.code == ret:
	case n.yes < 0:
		w.write(n.no)
		if w.pos[n.no] != len(w.out)-1 {
			w.out = append(w.out, insn{code: ja, k: uint32(w.distance(n.no))})
		}
	default:
		w.write(n.yes)
		w.write(n.no)
		w.near(n.yes)
		w.near(n.no)
		in.jt, in.jf = uint8(w.distance(n.yes)), uint8(w.distance(n.no))
	}
	w.out = append(w.out, in)
	w.pos[id] = len(w.out) - 1
}

// distance is that from the instruction that comes next.
func (w *writer) distance(id int) int { return len(w.out) - 1 - w.pos[id] }

// near sees to it that conditional jumps reach a node, which they do not beyond 255 instructions.
func (w *writer) near(id int) {
	if w.distance(id) < 254 { // one more may be written before the jump
		return
	}
	in := insn{code: ja, k: uint32(w.distance(id))}
	if n := w.nodes[id]; n.code == ret {
		in = insn{code: ret, k: n.k}
	}
	w.out = append(w.out, in)
	w.pos[id] = len(w.out) - 1
}

// fold makes one segment of a run in which single values stand between segments of equal code: a test for equality each, instead of two
// for order. Few at a time, so that the tree stays one.
func fold(s []segment) []segment {
	const most = 3
	var out []segment
	for i := 0; i < len(s); {
		code, j := s[i].code, i
		for j+2 < len(s) && j-i < 2*most && s[j+2].first == s[j+1].first+1 && slices.Equal(s[j+2].code, s[i].code) {
			code = jump(jeq, s[j+1].first, s[j+1].code, code)
			j += 2
		}
		out = append(out, segment{s[i].first, code})
		i = j + 1
	}
	return out
}
