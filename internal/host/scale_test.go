package host

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/backend/fake"
)

// What the host holds for an idle sandbox and for one that has ended, and how long a start takes with a long log.
func BenchmarkHeld(b *testing.B) {
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc + m.StackInuse
	}
	r := newRig(b, fake.Options{}, nil)
	const n = 1000
	round := 0
	for b.Loop() {
		round++
		before := heap()
		var all []*box
		for i := range n {
			x := r.create(fmt.Sprintf("k%d-%d", round, i))
			x.mustStart(b, "c", "true")
			x.mustWait(b, "c")
			all = append(all, x)
		}
		b.ReportMetric(float64(heap()-before)/n/1024, "KiB/idle")
		for _, x := range all {
			r.mustStop(x)
		}
		b.ReportMetric(float64(heap()-before)/n/1024, "KiB/ended")
	}
	r.stop()
	r.start()
	start := time.Now() // the log is open
	if err := r.h.wait(context.Background()); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(time.Since(start).Milliseconds()), "ms/restart")
}
