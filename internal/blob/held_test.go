package blob

import (
	"testing"
	"time"
)

// What was fetched is held in memory within a bound, and is in the cache once reads are over, or when the daemon ends.
func TestUnitsAreWrittenLater(t *testing.T) {
	st := newTrouble()
	content := random(40*UnitSize+5000, 71)
	d := st.add(content)
	r := newRig(t, st, func(c *Config) { c.Limit = 64 * UnitSize; c.Deadline = 20 * time.Second })
	f := r.open(d)
	stats := func() Stats {
		s, err := r.client.Stats(t.Context())
		do(t, err)
		return s
	}
	buf := make([]byte, 3*UnitSize)
	for off := int64(0); off < d.Size; off += int64(len(buf)) {
		n := min(int64(len(buf)), d.Size-off)
		_, err := f.ReadAt(buf[:n], off)
		do(t, err)
		if s := stats(); s.Held > 8*UnitSize {
			t.Fatalf("%d octets are held, at most %d may be", s.Held, 8*UnitSize)
		}
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if s := stats(); s.Held == 0 && s.Cached == s.Fetched && s.Fetched == d.Size {
			break
		} else if time.Now().After(end) {
			t.Fatalf("held %d, cached %d of %d", s.Held, s.Cached, s.Fetched)
		}
	}
	other := random(6*UnitSize, 72)
	o := st.add(other)
	g := r.open(o)
	same(t, g, other)
	before, _ := st.count(key(o.Digest))
	r.restart() // with all of it in memory
	same(t, g, other)
	if after, _ := st.count(key(o.Digest)); after != before {
		t.Errorf("%d reads of the store after the restart", after-before)
	}
}
