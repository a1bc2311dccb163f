//go:build dsec_nolog

package trajectory

const off = true
