package vmm

import (
	"testing"
	"time"
)

// A busy machine takes the processor away while the probe's loop runs, which must not look like emulation; emulation is slow each time.
func TestBusyMachineIsNoEmulation(t *testing.T) {
	const ms = time.Millisecond
	for name, c := range map[string]struct {
		took []time.Duration // the last for all that follow
		runs int
		slow bool
	}{
		"native":             {[]time.Duration{2 * ms}, 1, false},
		"native, taken away": {[]time.Duration{60 * ms, 46 * ms, 24 * ms, 2 * ms}, 4, false},
		"emulated":           {[]time.Duration{113 * ms}, 10, true},
		"emulated and busy":  {[]time.Duration{1200 * ms, 400 * ms, 113 * ms}, 2, true},
		"very slow":          {[]time.Duration{3000 * ms}, 1, true},
	} {
		var l loopTimes
		runs := 1
		for l.add(c.took[min(runs, len(c.took))-1]) {
			runs++
		}
		if runs != c.runs || (l.best > maxNsPerInsn) != c.slow {
			t.Errorf("%s: %d runs, %.0f ns an instruction; want %d, too slow %v", name, runs, l.best, c.runs, c.slow)
		}
	}
}
