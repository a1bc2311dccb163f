package main

import (
	"bytes"
	"io"
	"os"
)

// holes writes a new file and leaves out blocks of zeros: a sparse file of a sandbox, which may claim to be far larger than any disk, takes
// no more room here than there. finish gives the file its size.
type holes struct {
	f  *os.File
	at int64
}

const holeBlock = 64 << 10 // octets; what is compared with zeros at once

var zeros [holeBlock]byte

func (h *holes) Write(p []byte) (n int, err error) {
	for n < len(p) {
		end := min(len(p), n+holeBlock-int(h.at%holeBlock)) // to the next block of the file
		part := p[n:end]
		if !bytes.Equal(part, zeros[:len(part)]) {
			w, err := h.f.WriteAt(part, h.at)
			n, h.at = n+w, h.at+int64(w)
			if err != nil {
				return n, err
			}
			continue
		}
		n, h.at = end, h.at+int64(len(part))
	}
	return n, nil
}

func (h *holes) finish() error { return h.f.Truncate(h.at) }

// copyHoles writes what r yields into a new file.
func copyHoles(f *os.File, r io.Reader) error {
	h := &holes{f: f}
	if _, err := io.CopyBuffer(h, r, make([]byte, 4*holeBlock)); err != nil {
		return err
	}
	return h.finish()
}
