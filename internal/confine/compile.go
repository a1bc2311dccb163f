package confine

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Action is what a rule does with a call. The zero Action allows it.
type Action struct {
	errno unix.Errno
	kind  kind
}

type kind uint8

const (
	allow kind = iota
	refuse
	event
	kill
)

// Allow lets the call pass.
func Allow() Action { return Action{} }

// Refuse answers the call with an errno, quietly.
func Refuse(e unix.Errno) Action { return Action{errno: e, kind: refuse} }

// Event refuses a call that no honest tool makes: with a listener it is reported (and refused by whoever listens), else it
// is refused with EPERM.
func Event() Action { return Action{errno: unix.EPERM, kind: event} }

// Kill ends the process with SIGSYS.
func Kill() Action { return Action{kind: kill} }

// Cond tests the low 32 bits of an argument: what of it remains under Mask (0: all bits) is one of Values, or, with
// AnyBit, shares a bit with Values[0].
type Cond struct {
	Arg    int
	Mask   uint32
	Values []uint32
	AnyBit bool
}

// Rule decides about a call. All of When must hold; rules of one call are tried in order; a call that none decides passes.
type Rule struct {
	Call uint32
	When []Cond
	Do   Action
}

// Policy is a whole filter.
type Policy struct {
	Arch    uint32 // AUDIT_ARCH_*
	Foreign Action // calls of any other architecture
	X32     bool   // Arch is x86_64: numbers from 0x40000000 on are x32's, and foreign
	Known   uint32 // the first number that nobody looked at: from there on ENOSYS
	Rules   []Rule
}

// insn is a sock_filter.
type insn struct {
	code   uint16
	jt, jf uint8
	k      uint32
}

// block is code that ends every path with a return or, inside of one rule, with `next`, so that blocks can stand behind
// each other without labels.
type block []insn

const (
	ldAbs = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	and   = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
	jeq   = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	jge   = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
	jset  = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	ja    = unix.BPF_JMP | unix.BPF_JA
	ret   = unix.BPF_RET | unix.BPF_K
	next  = 0xffff // no instruction: stands for a jump to the end of its rule, where the next rule of the call begins

	offNumber = 0
	offArch   = 4
	offArgs   = 16 // little endian: the low half comes first
)

// jump makes "if test then yes else no". Conditional jumps reach 255 instructions; beyond, a plain jump helps.
func jump(code uint16, k uint32, yes, no block) block {
	b := make(block, 0, len(yes)+len(no)+2)
	if len(no) <= 255 {
		b = append(b, insn{code: code, k: k, jt: uint8(len(no))})
	} else {
		b = append(b, insn{code: code, k: k, jf: 1}, insn{code: ja, k: uint32(len(no))})
	}
	return append(append(b, no...), yes...)
}

// segment is a run of values, from first to the next segment's first, with one block.
type segment struct {
	first uint32
	code  block
}

// tree finds the segment of the accumulator's value by halving.
func tree(s []segment) block {
	return halve(s, func(i int) int { return i })
}

// callTree is tree for numbers of calls. At its installation the kernel goes through a filter once for each call that there is, so it
// is the calls that are halved.
func callTree(s []segment) block {
	const calls = 512
	return halve(s, func(i int) int { return int(min(s[i].first, calls)) })
}

// halve makes a tree whose branches have about the same room. Each segment has the room from its place to that of the next.
func halve(s []segment, place func(int) int) block {
	var part func(from, to int) block
	part = func(from, to int) block {
		if to-from == 1 {
			return s[from].code
		}
		end := place(to-1) + 1
		if to < len(s) {
			end = place(to)
		}
		m := from + 1
		for m < to-1 && 2*place(m) < place(from)+end {
			m++
		}
		if m > from+1 && 2*place(m)-place(from)-end > place(from)+end-2*place(m-1) {
			m--
		}
		return jump(jge, s[m].first, part(m, to), part(from, m))
	}
	return part(0, len(s))
}

// segments covers all 32-bit values: those of cases with their block, the others with rest. Equal neighbours become one.
func segments(cases map[uint32]block, rest block) []segment {
	keys := make([]uint32, 0, len(cases))
	for k := range cases {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	var s []segment
	add := func(first uint32, code block) {
		if n := len(s); n > 0 && s[n-1].first == first {
			s = s[:n-1]
		}
		if n := len(s); n == 0 || !slices.Equal(s[n-1].code, code) {
			s = append(s, segment{first, code})
		}
	}
	add(0, rest)
	for _, k := range keys {
		add(k, cases[k])
		if k != ^uint32(0) {
			add(k+1, rest)
		}
	}
	return s
}

func (a Action) block(notify bool) (block, error) {
	switch a.kind {
	case allow:
		return block{{code: ret, k: unix.SECCOMP_RET_ALLOW}}, nil
	case kill:
		return block{{code: ret, k: unix.SECCOMP_RET_KILL_PROCESS}}, nil
	case event:
		if notify {
			return block{{code: ret, k: unix.SECCOMP_RET_USER_NOTIF}}, nil
		}
	}
	if a.errno == 0 || a.errno > 4095 {
		return nil, fmt.Errorf("seccomp policy: refusal with errno %d", a.errno)
	}
	return block{{code: ret, k: unix.SECCOMP_RET_ERRNO | uint32(a.errno)}}, nil
}

// test makes "if c then yes else no".
func (c Cond) test(yes, no block) (block, error) {
	if c.Arg < 0 || c.Arg > 5 || len(c.Values) == 0 || c.AnyBit && len(c.Values) != 1 {
		return nil, fmt.Errorf("seccomp policy: bad condition %+v", c)
	}
	b := block{{code: ldAbs, k: uint32(offArgs + 8*c.Arg)}}
	if c.Mask != 0 {
		b = append(b, insn{code: and, k: c.Mask})
	}
	if c.AnyBit {
		return append(b, jump(jset, c.Values[0], yes, no)...), nil
	}
	if len(c.Values) == 1 {
		return append(b, jump(jeq, c.Values[0], yes, no)...), nil
	}
	cases := make(map[uint32]block, len(c.Values))
	for _, v := range c.Values {
		cases[v] = yes
	}
	return append(b, tree(fold(segments(cases, no)))...), nil
}

// Compile returns the filter as octets of sock_filter[], ready for BIRTH or seccomp(2). With notify, events go to the
// filter's listener.
func (p Policy) Compile(notify bool) ([]byte, error) {
	pass := block{{code: ret, k: unix.SECCOMP_RET_ALLOW}}
	calls := map[uint32]block{}
	// From the last rule to the first, so that each finds the code of what comes after it.
	for _, r := range slices.Backward(p.Rules) {
		if p.Known != 0 && r.Call >= p.Known {
			return nil, fmt.Errorf("seccomp policy: a rule for call %d, known are those below %d", r.Call, p.Known)
		}
		rest, ok := calls[r.Call]
		if !ok {
			rest = pass
		}
		do, err := r.Do.block(notify)
		if err != nil {
			return nil, err
		}
		for _, c := range slices.Backward(r.When) {
			if do, err = c.test(do, block{{code: next}}); err != nil {
				return nil, err
			}
		}
		for i := range do {
			if do[i].code == next {
				do[i] = insn{code: ja, k: uint32(len(do) - i - 1)}
			}
		}
		if len(r.When) == 0 {
			rest = nil // never reached
		}
		calls[r.Call] = append(do, rest...)
	}
	s := segments(calls, pass)
	foreign, err := p.Foreign.block(notify)
	if err != nil {
		return nil, err
	}
	if p.Known != 0 {
		unknown := block{{code: ret, k: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)}}
		if n := len(s); s[n-1].first == p.Known {
			s = s[:n-1]
		}
		s = append(s, segment{p.Known, unknown})
	}
	if p.X32 {
		s = append(s, segment{0x40000000, foreign})
		// A tracer skips a call by making its number -1 (strace's fault injection).
		s = append(s, segment{^uint32(0), pass})
	}
	slices.SortFunc(s, func(a, b segment) int { return cmp.Compare(a.first, b.first) })
	body := append(block{{code: ldAbs, k: offNumber}}, callTree(fold(s))...)
	code := share(append(block{{code: ldAbs, k: offArch}}, jump(jeq, p.Arch, body, foreign)...))
	if len(code) > 4096 {
		return nil, fmt.Errorf("seccomp policy: %d instructions, at most 4096", len(code))
	}
	out := make([]byte, 0, 8*len(code))
	for _, i := range code {
		out = binary.NativeEndian.AppendUint16(out, i.code)
		out = append(out, i.jt, i.jf)
		out = binary.NativeEndian.AppendUint32(out, i.k)
	}
	return out, nil
}

// CompileWatched returns two filters. events goes to the common parent of all commands, which asks its one listener about events;
// commands is theirs, and leaves events to that. Where nobody listens it refuses them still (ENOSYS), unless a tracer of the
// process lets them pass: use it only together with events.
func (p Policy) CompileWatched() (commands, events []byte, err error) {
	if commands, err = p.Compile(true); err != nil {
		return nil, nil, err
	}
	// Of the verdicts of several filters the kernel takes the strictest, of equals that of the filter added last: a question to a
	// listener that this filter has not. "Trace" is weaker than the question.
	for i := 0; i < len(commands); i += 8 {
		k := commands[i+4 : i+8]
		if binary.NativeEndian.Uint16(commands[i:]) == ret && binary.NativeEndian.Uint32(k) == unix.SECCOMP_RET_USER_NOTIF {
			binary.NativeEndian.PutUint32(k, unix.SECCOMP_RET_TRACE)
		}
	}
	events, err = p.events().Compile(true)
	return commands, events, err
}

// events is the policy that asks about events and lets everything else pass.
func (p Policy) events() Policy {
	asks := map[uint32]bool{}
	for _, r := range p.Rules {
		asks[r.Call] = asks[r.Call] || r.Do.kind == event
	}
	q := Policy{Arch: p.Arch, X32: p.X32}
	for i, r := range p.Rules {
		if !asks[r.Call] {
			continue
		}
		if r.Do.kind != event {
			r.Do = Allow()
			// It matters only where an event comes behind it.
			if !slices.ContainsFunc(p.Rules[i+1:], func(o Rule) bool { return o.Call == r.Call && o.Do.kind == event && !apart(r, o) }) {
				continue
			}
		}
		q.Rules = append(q.Rules, r)
	}
	return q
}

// apart reports that no call meets both rules, as far as that is plain to see.
func apart(a, b Rule) bool {
	for _, x := range a.When {
		for _, y := range b.When {
			if x.Arg == y.Arg && x.Mask == y.Mask && !x.AnyBit && !y.AnyBit &&
				!slices.ContainsFunc(x.Values, func(v uint32) bool { return slices.Contains(y.Values, v) }) {
				return true
			}
		}
	}
	return false
}
