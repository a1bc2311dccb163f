package confine

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// call is what a filter judges.
type call struct {
	arch, nr uint32
	args     [6]uint64
}

// simulate runs a filter as the kernel does, and counts the instructions that it took.
func simulate(t interface{ Fatalf(string, ...any) }, code []byte, c call) (verdict uint32, steps int) {
	var data [64]byte
	binary.NativeEndian.PutUint32(data[0:], c.nr)
	binary.NativeEndian.PutUint32(data[4:], c.arch)
	for i, a := range c.args {
		binary.NativeEndian.PutUint64(data[16+8*i:], a)
	}
	var acc uint32
	for pc := 0; ; pc++ {
		if 8*pc+8 > len(code) {
			t.Fatalf("ran over the end at %d", pc)
		}
		steps++
		op, jt, jf, k := binary.NativeEndian.Uint16(code[8*pc:]), int(code[8*pc+2]), int(code[8*pc+3]), binary.NativeEndian.Uint32(code[8*pc+4:])
		branch := func(yes bool) {
			if yes {
				pc += jt
			} else {
				pc += jf
			}
		}
		switch op {
		case ldAbs:
			acc = binary.NativeEndian.Uint32(data[k:])
		case and:
			acc &= k
		case jeq:
			branch(acc == k)
		case jge:
			branch(acc >= k)
		case jset:
			branch(acc&k != 0)
		case ja:
			pc += int(k)
		case ret:
			return k, steps
		default:
			t.Fatalf("instruction %d: %#x", pc, op)
		}
	}
}

// judge decides by the rules themselves, one after another.
func (p Policy) judge(c call, notify bool) uint32 {
	ret := func(a Action) uint32 {
		b, err := a.block(notify)
		if err != nil {
			panic(err)
		}
		return b[0].k
	}
	switch {
	case c.arch != p.Arch:
		return ret(p.Foreign)
	case p.X32 && c.nr == ^uint32(0):
		return unix.SECCOMP_RET_ALLOW
	case p.X32 && c.nr >= 0x40000000:
		return ret(p.Foreign)
	case p.Known != 0 && c.nr >= p.Known:
		return unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	}
rules:
	for _, r := range p.Rules {
		if r.Call != c.nr {
			continue
		}
		for _, w := range r.When {
			v := uint32(c.args[w.Arg])
			if w.Mask != 0 {
				v &= w.Mask
			}
			hit := false
			for _, x := range w.Values {
				hit = hit || v == x && !w.AnyBit || w.AnyBit && v&x != 0
			}
			if !hit {
				continue rules
			}
		}
		return ret(r.Do)
	}
	return unix.SECCOMP_RET_ALLOW
}

// interesting are values at and around those that a policy names.
func (p Policy) interesting() []uint32 {
	v := []uint32{0, 1, 0x3fffffff, 0x40000000, ^uint32(0), ^uint32(0) - 1, p.Known - 1, p.Known, p.Known + 1}
	for _, r := range p.Rules {
		v = append(v, r.Call-1, r.Call, r.Call+1)
		for _, w := range r.When {
			for _, x := range w.Values {
				v = append(v, x, x+1, x-1, x|0xffff0000)
			}
		}
	}
	return v
}

func (p Policy) check(t interface{ Fatalf(string, ...any) }, seed uint64, n int) (longest, insns int) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	vals := p.interesting()
	for _, notify := range []bool{false, true} {
		code, err := p.Compile(notify)
		if err != nil {
			t.Fatalf("%v", err)
		}
		insns = len(code) / 8
		for range n {
			c := call{arch: p.Arch, nr: vals[rnd.IntN(len(vals))]}
			if rnd.IntN(8) == 0 {
				c.arch = rnd.Uint32()
			}
			for i := range c.args {
				c.args[i] = uint64(vals[rnd.IntN(len(vals))]) | uint64(rnd.Uint32())<<32
			}
			got, steps := simulate(t, code, c)
			if want := p.judge(c, notify); got != want {
				t.Fatalf("%+v: filter says %#x, rules say %#x", c, got, want)
			}
			longest = max(longest, steps)
		}
	}
	return longest, insns
}

// The compiled filter says what the rules say, for the real policy and for drawn ones.
func TestCompileAgreesWithRules(t *testing.T) {
	p := Container()
	longest, insns := p.check(t, 7, 200_000)
	t.Logf("%d instructions, at most %d taken for one call", insns, longest)
	if longest > 50 {
		t.Errorf("%d instructions for one call: the tree is no tree", longest)
	}
	rapid.Check(t, func(rt *rapid.T) {
		p := Policy{Arch: unix.AUDIT_ARCH_X86_64, Foreign: Kill(), X32: rapid.Bool().Draw(rt, "x32")}
		actions := []Action{Allow(), Refuse(unix.EPERM), Refuse(unix.ENOSYS), Event(), Kill()}
		for range rapid.IntRange(0, 60).Draw(rt, "rules") {
			r := Rule{Call: uint32(rapid.SampledFrom([]int{0, 1, 2, 3, 9, 10, 50, 200, 201, 202, 399}).Draw(rt, "call")), Do: rapid.SampledFrom(actions).Draw(rt, "do")}
			for range rapid.IntRange(0, 2).Draw(rt, "conditions") {
				w := Cond{Arg: rapid.IntRange(0, 5).Draw(rt, "arg"), Mask: rapid.SampledFrom([]uint32{0, 0xff, 0xffff}).Draw(rt, "mask")}
				w.Values = rapid.SliceOfN(rapid.Uint32Range(0, 20), 1, 8).Draw(rt, "values")
				if w.AnyBit = rapid.Bool().Draw(rt, "bits"); w.AnyBit {
					w.Values = w.Values[:1]
				}
				r.When = append(r.When, w)
			}
			p.Rules = append(p.Rules, r)
		}
		if rapid.Bool().Draw(rt, "known") {
			p.Known = 400
		}
		p.check(rt, rapid.Uint64().Draw(rt, "seed"), 200)
	})
}

func TestCompileRefusesBadPolicies(t *testing.T) {
	for name, p := range map[string]Policy{
		"refusal without an errno": {Rules: []Rule{{Do: Refuse(0)}}},
		"argument 6":               {Rules: []Rule{{When: []Cond{{Arg: 6, Values: []uint32{1}}}}}},
		"no values":                {Rules: []Rule{{When: []Cond{{}}}}},
		"rule for unknown call":    {Known: 10, Rules: []Rule{{Call: 10, Do: Refuse(unix.EPERM)}}},
	} {
		if _, err := p.Compile(false); err == nil {
			t.Errorf("%s: compiled", name)
		}
	}
	big := Policy{Foreign: Kill()}
	for i := range uint32(6000) {
		big.Rules = append(big.Rules, Rule{Call: 2 * i, Do: Refuse(unix.EPERM)})
	}
	if _, err := big.Compile(false); err == nil {
		t.Error("a filter of more than 4096 instructions compiled")
	}
}

func TestListsAreSound(t *testing.T) {
	if Caps != 0xa00c25fb {
		t.Errorf("capabilities %#x", Caps)
	}
	seen := map[string]bool{}
	for _, m := range append(Masks(), ReadOnly()...) {
		if seen[m] {
			t.Errorf("%s twice", m)
		}
		seen[m] = true
	}
	for _, l := range Rlimits() {
		if l.Soft > l.Hard {
			t.Errorf("%+v", l)
		}
	}
}

func ExamplePolicy_Compile() {
	code, err := Container().Compile(false)
	fmt.Println(len(code)%8, len(code) < 8*600, err)
	// Output: 0 true <nil>
}

// The two filters together decide as the one with a listener does: events are asked about, the rest is the same.
func TestCompileWatched(t *testing.T) {
	p := Container()
	commands, events, err := p.CompileWatched()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d instructions for commands, %d for events", len(commands)/8, len(events)/8)
	if len(events) >= 128*8 {
		t.Errorf("process 1 takes fewer than 128 instructions")
	}
	strict := func(v uint32) int32 { return int32(v & unix.SECCOMP_RET_ACTION_FULL) } // as the kernel compares
	rnd, vals, asked := rand.New(rand.NewPCG(1, 2)), p.interesting(), 0
	for range 200_000 {
		c := call{arch: p.Arch, nr: vals[rnd.IntN(len(vals))]}
		for i := range c.args {
			c.args[i] = uint64(vals[rnd.IntN(len(vals))])
		}
		newer, _ := simulate(t, commands, c)
		older, _ := simulate(t, events, c)
		got := newer
		if strict(older) < strict(newer) {
			got = older
		}
		if want := p.judge(c, true); got != want {
			t.Fatalf("%+v: %#x and %#x, want %#x", c, newer, older, want)
		}
		if got == unix.SECCOMP_RET_USER_NOTIF {
			asked++
			if newer == unix.SECCOMP_RET_ALLOW {
				t.Fatalf("%+v passes where nobody listens", c)
			}
		}
	}
	if asked == 0 {
		t.Error("no event among the calls")
	}
}
