package keeper

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

var filters = sync.OnceValue(func() (f struct {
	commands, events []byte
	err              error
}) {
	f.commands, f.events, f.err = confine.Container().CompileWatched()
	return f
})

// confined is a birth as the container driver asks for it.
func (h *house) confined(b *testing.B) *Birth {
	birth, f := h.birth(), filters()
	if f.err != nil {
		b.Error(f.err)
	}
	birth.Seccomp, birth.Events = f.commands, f.events
	return birth
}

// cpu is the processor time of the keeper and of all its sandboxes.
func (h *house) cpu(b *testing.B) time.Duration {
	b.Helper()
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		b.Fatal(err)
	}
	g, err := findCgroups("dsec-"+h.cfg.Instance, string(info))
	if err != nil {
		b.Fatal(err)
	}
	us, err := readKey(filepath.Join(g.v2, g.name, "cpu.stat"), "usage_usec")
	if err != nil {
		b.Fatal(err)
	}
	return time.Duration(us) * time.Microsecond
}

// least measures the processor time of a cycle in windows, and tells the least and the tenth of a hundred: other load of the machine makes
// the same work cost more.
type least struct {
	h       *house
	b       *testing.B
	n       int
	from    time.Duration
	windows []time.Duration
}

const leastCycles = 20

func (h *house) least(b *testing.B) *least { return &least{h: h, b: b, from: h.cpu(b)} }

func (l *least) cycle() {
	if l.n++; l.n%leastCycles == 0 {
		now := l.h.cpu(l.b)
		l.windows = append(l.windows, now-l.from)
		l.from = now
	}
}

func (l *least) report() {
	if len(l.windows) == 0 {
		return
	}
	slices.Sort(l.windows)
	l.b.ReportMetric(float64(l.windows[len(l.windows)/10].Microseconds())/leastCycles, "p10-us/op")
	l.b.ReportMetric(float64(l.windows[0].Microseconds())/leastCycles, "least-us/op")
}

func BenchmarkHello(b *testing.B) {
	h := open(b)
	ctx := within(b)
	b.ResetTimer()
	for range b.N {
		if _, err := h.c.Layers(ctx); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCreateDestroy(b *testing.B) {
	h := open(b)
	before := h.cpu(b)
	for b.Loop() {
		birth := h.confined(b)
		if _, err := h.c.Create(within(b), birth); err != nil {
			b.Fatal(err)
		}
		if err := h.c.Destroy(within(b), birth.ID); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((h.cpu(b)-before).Microseconds())/float64(b.N), "cpu-us/op")
}

func BenchmarkCreateTrueDestroy(b *testing.B) {
	h := open(b)
	before, l := h.cpu(b), h.least(b)
	for b.Loop() {
		l.cycle()
		birth := h.confined(b)
		if _, err := h.c.Create(within(b), birth); err != nil {
			b.Fatal(err)
		}
		h.run(birth.ID, &sandbox.Command{Argv: []string{"/bin/true"}})
		if err := h.c.Destroy(within(b), birth.ID); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((h.cpu(b)-before).Microseconds())/float64(b.N), "cpu-us/op")
	l.report()
}

func BenchmarkExec(b *testing.B) {
	h := open(b)
	birth := h.confined(b)
	id := birth.ID
	if _, err := h.c.Create(within(b), birth); err != nil {
		b.Fatal(err)
	}
	before, l := h.cpu(b), h.least(b)
	for b.Loop() {
		l.cycle()
		h.run(id, &sandbox.Command{Argv: []string{"/bin/true"}})
	}
	b.ReportMetric(float64((h.cpu(b)-before).Microseconds())/float64(b.N), "cpu-us/op")
	l.report()
}

// BenchmarkExecGap runs commands 30 ms apart, as agents do: some costs of the kernel show only then.
func BenchmarkExecGap(b *testing.B) {
	h := open(b)
	birth := h.confined(b)
	id := birth.ID
	if _, err := h.c.Create(within(b), birth); err != nil {
		b.Fatal(err)
	}
	var spent time.Duration
	for range b.N {
		time.Sleep(30 * time.Millisecond)
		t := time.Now()
		h.run(id, &sandbox.Command{Argv: []string{"/bin/true"}})
		spent += time.Since(t)
	}
	b.ReportMetric(float64(spent.Microseconds())/float64(b.N), "us/exec")
}

func BenchmarkParallel8(b *testing.B) {
	h := open(b)
	before := h.cpu(b)
	b.SetParallelism(4)
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			birth := h.confined(b)
			if _, err := h.c.Create(within(b), birth); err != nil {
				b.Error(err)
				return
			}
			h.run(birth.ID, &sandbox.Command{Argv: []string{"/bin/true"}})
			if err := h.c.Destroy(within(b), birth.ID); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric(float64((h.cpu(b)-before).Microseconds())/float64(b.N), "cpu-us/op")
}

// BenchmarkIdle reports what an idle sandbox costs in the keeper.
func BenchmarkIdle(b *testing.B) {
	h := open(b)
	before := h.resident(b)
	for range b.N {
		if _, err := h.c.Create(within(b), h.birth()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(h.resident(b)-before)/float64(b.N)/1024, "keeper-KiB/sandbox")
	b.ReportMetric(float64(before)/1024/1024, "keeper-MiB-empty")
}

func (h *house) resident(b *testing.B) int64 {
	b.Helper()
	data, err := os.ReadFile("/proc/" + strconv.Itoa(h.c.Info().Pid) + "/statm")
	if err != nil {
		b.Fatal(err)
	}
	pages, _ := strconv.ParseInt(strings.Fields(string(data))[1], 10, 64)
	return pages * int64(os.Getpagesize())
}
