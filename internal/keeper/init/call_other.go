//go:build !amd64

package initproc

var callImage []byte
