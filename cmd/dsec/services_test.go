package main

import "testing"

func TestDiskReserveLeavesASmallPoolUsable(t *testing.T) {
	for _, c := range []struct{ total, want int64 }{
		{0, 512 << 20}, {256 << 20, 256 << 20 / 20}, {512 << 20, 512 << 20 / 20}, {10 << 30, 512 << 20}, {1 << 40, 512 << 20},
	} {
		if got := diskReserve(512<<20, c.total); got != c.want {
			t.Errorf("of a pool of %d: %d, want %d", c.total, got, c.want)
		}
	}
}
