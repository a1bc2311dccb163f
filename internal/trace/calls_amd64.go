package trace

// calls are the numbers of system calls, and where their registers are kept.
var calls = struct {
	number, second string // members of pt_regs
	at             int16  // octets behind the second
	opens          []int32
	connect        int32
}{"orig_ax", "si", 0, []int32{257, 2, 437}, 42}
