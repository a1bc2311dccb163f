//go:build !amd64

package initproc

// image is empty: src has no entry and clone for this machine yet (src/sys_<arch>.h).
var image []byte
