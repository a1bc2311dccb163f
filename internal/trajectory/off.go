//go:build !dsec_nolog

package trajectory

// off is set in the build that bench/trajectory measures against: nothing is logged, and nothing survives. It is no user's choice.
const off = false
