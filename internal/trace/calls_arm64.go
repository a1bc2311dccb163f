package trace

// calls are the numbers of system calls, and where their registers are kept.
var calls = struct {
	number, second string // members of pt_regs
	at             int16  // octets behind the second
	opens          []int32
	connect        int32
}{"syscallno", "regs", 8, []int32{56, 437}, 203}
