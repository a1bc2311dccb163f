package container

import (
	"fmt"
	"slices"
	"sync"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// slotWidth is how many host uids a sandbox takes: 65,536 mapped ones and one that process 1 runs as, which no uid inside maps to.
const slotWidth = 65537

// Defaults of the uid range: systemd keeps 0x70000000 to 0x7FFDFFFF free of every allocation it knows of (its UIDS-GIDS.md), and
// no uid in it is negative for programs that still use a signed 32-bit number.
const (
	DefaultUIDBase = 0x70000000
	DefaultSlots   = 4000
)

// slots hands out uid ranges. A slot belongs to one living sandbox; it is released when nothing of that one is left, the network
// device included. The one released last is given first, since the keeper still has its user namespaces (two for each slot, dear to
// make); a sandbox of network open gets the one that has rested longest, so that connections tracked for its address are forgotten.
type slots struct {
	base  uint32
	count int

	mu   sync.Mutex
	used map[int]sandbox.ID
	free []int // the one released last is at the end
}

func newSlots(base uint32, count int) (*slots, error) {
	switch {
	case base < 65536:
		return nil, fmt.Errorf("--uid-base %d: those below 65536 are the machine's own users; take 65536 or more (default %d): %w", base, DefaultUIDBase, sandbox.ErrInvalid)
	case count < 1:
		return nil, fmt.Errorf("--slots %d: at least 1: %w", count, sandbox.ErrInvalid)
	case uint64(base)+uint64(count)*slotWidth > 1<<32-2:
		most := (1<<32 - 2 - uint64(base)) / slotWidth
		return nil, fmt.Errorf("--slots %d: a slot has %d uids, and from --uid-base %d on there is room for %d: %w", count, slotWidth, base, most, sandbox.ErrInvalid)
	}
	s := &slots{base: base, count: count, used: map[int]sandbox.ID{}}
	for n := count - 1; n >= 0; n-- {
		s.free = append(s.free, n)
	}
	return s, nil
}

// take gives a free slot to the sandbox: the one that rested longest, or the one released last.
func (s *slots) take(id sandbox.ID, rested bool) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.free) == 0 {
		return 0, fmt.Errorf("uid range: all %d slots are in use: %w", s.count, sandbox.ErrExhausted)
	}
	at := len(s.free) - 1
	if rested {
		at = 0
	}
	n := s.free[at]
	s.free = slices.Delete(s.free, at, at+1)
	s.used[n] = id
	return n, nil
}

// claim marks a slot as the sandbox's, for recovery. It is idempotent for the same sandbox.
func (s *slots) claim(n int, id sandbox.ID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n < 0 || n >= s.count {
		return fmt.Errorf("uid slot %d: outside of 0 to %d: %w", n, s.count-1, sandbox.ErrInvalid)
	}
	if holder, taken := s.used[n]; taken && holder != id {
		return fmt.Errorf("uid slot %d: held by %s: %w", n, holder, sandbox.ErrExists)
	}
	if i := slices.Index(s.free, n); i >= 0 {
		s.free = slices.Delete(s.free, i, i+1)
	}
	s.used[n] = id
	return nil
}

// release gives a slot back if the sandbox holds it.
func (s *slots) release(n int, id sandbox.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if holder, held := s.used[n]; held && holder == id {
		delete(s.used, n)
		s.free = append(s.free, n)
	}
}

func (s *slots) held() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.used)
}

func (s *slots) uid(n int) uint32 { return s.base + uint32(n)*slotWidth }

// of is the slot that starts at a host uid.
func (s *slots) of(uid uint32) (int, bool) {
	if uid < s.base || (uid-s.base)%slotWidth != 0 || int((uid-s.base)/slotWidth) >= s.count {
		return 0, false
	}
	return int((uid - s.base) / slotWidth), true
}

// names are the slots that are held and by whom.
func (s *slots) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for n, id := range s.used {
		out = append(out, fmt.Sprintf("uid slot %d of %s", n, id))
	}
	return out
}
