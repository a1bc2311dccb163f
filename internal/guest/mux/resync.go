package mux

import (
	"errors"
	"io"
)

// errAway says that the host went away: nothing that came before belongs to what comes next.
var errAway = errors.New("mux: host is away")

// resync reads frames from a port without connections: what is no header is skipped octet by octet.
type resync struct {
	r    io.Reader
	idle func() error

	buf        [headerSize + MaxFrame]byte
	start, end int
}

// frame returns the next frame; its body is valid until the next call.
func (r *resync) frame(max int) (header, []byte, error) {
	for {
		if err := r.fill(headerSize); err != nil {
			return header{}, nil, err
		}
		h, ok := parse(r.buf[r.start:r.end])
		if !ok || h.n > max {
			r.start++
			continue
		}
		if err := r.fill(headerSize + h.n); err != nil {
			return header{}, nil, err
		}
		body := r.buf[r.start+headerSize : r.start+headerSize+h.n]
		r.start += headerSize + h.n
		return h, body, nil
	}
}

// fill has at least n octets in the buffer.
func (r *resync) fill(n int) error {
	for r.end-r.start < n {
		if r.start > 0 && r.start+n > len(r.buf) || r.start == r.end {
			copy(r.buf[:], r.buf[r.start:r.end])
			r.end, r.start = r.end-r.start, 0
		}
		m, err := r.r.Read(r.buf[r.end:])
		r.end += m
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if m == 0 {
			r.start, r.end = 0, 0
			if err := r.idle(); err != nil {
				return err
			}
			return errAway
		}
	}
	return nil
}
