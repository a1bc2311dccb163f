package container

import (
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Whatever is taken, claimed and released: no two living sandboxes hold one uid, and a full range is refused.
func TestSlotsAreNeverShared(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.IntRange(1, 6).Draw(t, "count")
		s, err := newSlots(DefaultUIDBase, count)
		if err != nil {
			t.Fatal(err)
		}
		holder := map[int]sandbox.ID{}
		host := sandbox.NewHostID()
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			id := sandbox.NewID(host)
			switch rapid.IntRange(0, 2).Draw(t, "act") {
			case 0:
				n, err := s.take(id, rapid.Bool().Draw(t, "rested"))
				if len(holder) == count {
					if !errors.Is(err, sandbox.ErrExhausted) {
						t.Fatalf("take with all held: %v", err)
					}
					continue
				}
				if err != nil || holder[n] != "" {
					t.Fatalf("take gave %d held by %q, %v", n, holder[n], err)
				}
				holder[n] = id
			case 1:
				n := rapid.IntRange(0, count-1).Draw(t, "slot")
				err := s.claim(n, id)
				if (err == nil) != (holder[n] == "") {
					t.Fatalf("claim of %d held by %q: %v", n, holder[n], err)
				}
				if err == nil {
					holder[n] = id
				}
			case 2:
				n := rapid.IntRange(0, count-1).Draw(t, "slot")
				s.release(n, id) // not the holder: without effect
				if holder[n] != "" {
					s.release(n, holder[n])
				}
				delete(holder, n)
			}
			if s.held() != len(holder) {
				t.Fatalf("%d held, want %d", s.held(), len(holder))
			}
		}
	})
}

func TestSlotsRange(t *testing.T) {
	s, err := newSlots(DefaultUIDBase, DefaultSlots)
	if err != nil {
		t.Fatal(err)
	}
	if last := s.uid(DefaultSlots-1) + slotWidth - 1; last > 0x7ffdffff {
		t.Errorf("the default range ends at %#x, beyond what systemd leaves free", last)
	}
	for _, n := range []int{0, 1, DefaultSlots - 1} {
		if got, ok := s.of(s.uid(n)); !ok || got != n {
			t.Errorf("of(uid(%d)) = %d, %v", n, got, ok)
		}
	}
	if _, ok := s.of(s.uid(1) + 5); ok {
		t.Error("a uid inside a slot counts as its start")
	}
	for _, bad := range []struct {
		base  uint32
		count int
	}{{1000, 1}, {DefaultUIDBase, 0}, {4294900000, 2}} {
		if _, err := newSlots(bad.base, bad.count); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("newSlots(%d, %d): %v, want ErrInvalid", bad.base, bad.count, err)
		}
	}
}
