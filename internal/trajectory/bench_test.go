package trajectory_test

import (
	"context"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

func benchLog(b *testing.B) (*trajectory.Log, trajectory.Config) {
	c := trajectory.Default(b.TempDir())
	l := open(b, c)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { l.Run(ctx); close(done) }()
	b.Cleanup(func() { cancel(); <-done })
	return l, c
}

// step is what one command appends: its start, 1 KiB of output, its end.
func step(i int, out []byte) []trajectory.Record {
	name := fmt.Sprint("step-", i)
	return []trajectory.Record{
		{Kind: trajectory.KindStepStart, Step: name, Payload: []byte(`{"id":"step","argv":["true"],"cwd":"/","user":"root"}`)},
		{Kind: trajectory.KindOutput, Step: name, Stream: sandbox.Stdout, Payload: out},
		{Kind: trajectory.KindStepEnd, Step: name, Payload: []byte(`{"kind":"exited","stdout":{"total":1024,"head":1024}}`)},
	}
}

func benchAppend(b *testing.B, d sandbox.Durability, callers int) {
	l, _ := benchLog(b)
	out := make([]byte, 1024)
	var n atomic.Int64
	b.SetParallelism(callers)
	b.RunParallel(func(pb *testing.PB) {
		key := fmt.Sprint("k", n.Add(1))
		add(b, l, key, create())
		for i := 0; pb.Next(); i++ {
			for _, r := range step(i, out) {
				if _, err := l.Append(context.Background(), testID(key), []trajectory.Record{r}, d); err != nil {
					b.Fatal(err)
				}
			}
		}
	})
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(3*b.N), "ns/record")
}

func BenchmarkStepProcess(b *testing.B)   { benchAppend(b, sandbox.DurabilityProcess, 1) }
func BenchmarkStepProcess32(b *testing.B) { benchAppend(b, sandbox.DurabilityProcess, 16) }
func BenchmarkStepHost(b *testing.B)      { benchAppend(b, sandbox.DurabilityHost, 1) }
func BenchmarkStepHost32(b *testing.B)    { benchAppend(b, sandbox.DurabilityHost, 16) }

func BenchmarkAppendOne(b *testing.B) {
	l, _ := benchLog(b)
	add(b, l, "k", create())
	recs := []trajectory.Record{{Kind: trajectory.KindStepEnd, Step: "s", Payload: make([]byte, 100)}}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := l.Append(context.Background(), testID("k"), recs, sandbox.DurabilityProcess); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRead(b *testing.B) {
	l, _ := benchLog(b)
	add(b, l, "k", create())
	for i := range 1000 {
		add(b, l, "k", step(i, make([]byte, 1024))...)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if _, _, err := l.Read(context.Background(), testID("k"), trajectory.Query{From: uint64(i%3000 + 1), Limit: 1}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkOpen1M opens a log of a million records, a third of them output of as many commands.
func BenchmarkOpen1M(b *testing.B) {
	l, c := benchLog(b)
	out := make([]byte, 64)
	for k := range 100 {
		add(b, l, fmt.Sprint(k), create())
		for i := range 3334 {
			add(b, l, fmt.Sprint(k), step(i, out)...)
		}
	}
	l.Close()
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		start := time.Now()
		l, err := trajectory.Open(c, quiet)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(time.Since(start).Seconds(), "s/open")
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/1000200, "B/record")
		l.Close()
	}
}
