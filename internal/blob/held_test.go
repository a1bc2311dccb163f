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

// A reader that found nothing joins a flight after the one that brought the unit has landed: nothing is fetched twice, and what is held is
// counted once.
func TestLateReaders(t *testing.T) {
	st := newTrouble()
	content := random(4*UnitSize, 73)
	d := st.add(content)
	r := newRig(t, st, nil)
	r.open(d)
	h, err := hexOf(d.Digest)
	do(t, err)
	b := r.server.blobs[nodeOf(h)]
	for i := range d.count() {
		for range 3 {
			f := b.join(i, false)
			<-f.done
			do(t, f.err)
			for { // it has landed
				b.flightMu.Lock()
				under := b.flights[i] == f
				b.flightMu.Unlock()
				if !under {
					break
				}
				time.Sleep(time.Millisecond)
			}
			if !b.hold(i, f.data) && b.peek(i) != nil {
				t.Fatal("a unit that is held has no room")
			}
		}
	}
	if n, _ := st.count(key(d.Digest)); n != d.count() {
		t.Errorf("%d reads of the store for %d units", n, d.count())
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		s, err := r.client.Stats(t.Context())
		do(t, err)
		if s.Held == 0 {
			break
		} else if time.Now().After(end) {
			t.Fatalf("%d octets are held and never written", s.Held)
		}
	}
}
