package store

import "time"

// SetClock makes the store take another time for now.
func (s *S3) SetClock(now func() time.Time) { s.now = now }

const PublishLimit = publishLimit

// DecodeAny decodes hostile octets in every way.
func DecodeAny(b []byte) {
	sealed := seal(append([]byte(nil), b...))
	for _, b := range [][]byte{b, sealed} {
		_, _ = manifestSize(b)
		if m, err := decodeManifest(b); err == nil {
			back, err := decodeManifest(m.encode())
			if err != nil || back.size != m.size || len(back.chunks) != len(m.chunks) {
				panic("a manifest does not survive")
			}
		}
		var p packID
		if len(b) >= 24 {
			copy(p[:], b[8:24])
		}
		_, _, _ = decodeIndex(b, p)
	}
}
