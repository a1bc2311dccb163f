package trajectory

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
)

// For the tests of this folder alone.

// Maintain does what Run does, once.
func (l *Log) Maintain(ctx context.Context) error {
	return errors.Join(l.maintain(ctx), l.tidy(ctx))
}

// sign sets the lengths' and checksums' fields of a header to what they must be.
func sign(h, body []byte) []byte {
	h = bytes.Clone(h)
	le := binary.LittleEndian
	le.PutUint32(h[hBodyLen:], uint32(len(body)))
	le.PutUint32(h[hBodyCRC:], crc32.Checksum(body, castagnoli))
	le.PutUint32(h[hCRC:], crc32.Update(0, castagnoli, h[4:headerLen]))
	return h
}

// Hurry makes records that go to the store wait for no others.
func (l *Log) Hurry() { l.gather = 0 }
