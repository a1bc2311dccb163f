// Idle measures what a sandbox costs that does nothing, and how fast others are made beside many of them. See docs/ops/bench.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/client"
)

func main() {
	flag.Parse()
	n := 1000
	if a := flag.Arg(0); a != "" {
		var err error
		if n, err = strconv.Atoi(a); err != nil || n < 1 {
			fmt.Fprintf(os.Stderr, "bench idle: %q: want the number of sandboxes\n", a)
			os.Exit(2)
		}
	}
	ctx, cancel := measure.Context()
	defer cancel()
	if err := run(ctx, n); err != nil {
		fmt.Fprintln(os.Stderr, "bench idle:", err)
		os.Exit(1)
	}
}

const width = 8

// use is the memory in use at a moment, in KiB.
type use struct {
	free   int64
	kernel map[string]int64
	up     int64
	keeper int64
	inside int64 // process 1 of all sandboxes
}

var kernelFields = []string{"Slab", "KernelStack", "PageTables", "Percpu", "AnonPages"}

func look(s *measure.Server) (u use, err error) {
	time.Sleep(2 * time.Second) // what the kernel frees late
	if err := measure.DropCaches(); err != nil {
		return u, err
	}
	free, err := measure.MemInfo("MemFree")
	if err != nil {
		return u, err
	}
	u.free = free["MemFree"]
	if u.kernel, err = measure.MemInfo(kernelFields...); err != nil {
		return u, err
	}
	up, keeper, inside, err := s.Pids()
	if err != nil {
		return u, err
	}
	u.up, u.keeper = measure.Resident(up), measure.Resident(keeper)
	for _, p := range inside {
		u.inside += measure.Resident(p)
	}
	return u, nil
}

func run(ctx context.Context, n int) (err error) {
	s, err := measure.Start(ctx, fmt.Sprintf("%dm", 2048+n/2))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Stop()) }()
	cycle := func(ctx context.Context) (time.Duration, error) {
		start := time.Now()
		b, err := s.Client.RunContainer(ctx, s.Options())
		if err != nil {
			return 0, err
		}
		r, err := b.Exec(ctx, "/true")
		took := time.Since(start)
		if err == nil && !r.OK() {
			err = fmt.Errorf("true ended as %v", r.Outcome)
		}
		return took, errors.Join(err, b.Stop(ctx))
	}
	// What is made once is made before the first look.
	if err := measure.Parallel(ctx, 64, width, func(ctx context.Context, _ int) error { _, err := cycle(ctx); return err }); err != nil {
		return err
	}
	alone, err := measure.Sequence(ctx, 100, 0, cycle)
	if err != nil {
		return err
	}
	before, err := look(s)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var boxes []*client.Sandbox
	start := time.Now()
	err = measure.Parallel(ctx, n, width, func(ctx context.Context, _ int) error {
		b, err := s.Client.RunContainer(ctx, s.Options())
		if err == nil {
			mu.Lock()
			boxes = append(boxes, b)
			mu.Unlock()
		}
		return err
	})
	if err != nil {
		return err
	}
	made := time.Since(start)
	after, err := look(s)
	if err != nil {
		return err
	}
	among, err := measure.Sequence(ctx, 100, 0, cycle)
	if err != nil {
		return err
	}
	start = time.Now()
	err = measure.Parallel(ctx, n, width, func(ctx context.Context, _ int) error {
		mu.Lock()
		b := boxes[len(boxes)-1]
		boxes = boxes[:len(boxes)-1]
		mu.Unlock()
		return b.Stop(ctx)
	})
	if err != nil {
		return err
	}
	stopped := time.Since(start)

	each := func(kib int64) float64 { return float64(kib) / float64(n) }
	measure.Print("idle.mem_kib", each(before.free-after.free), "KiB")
	kernel := int64(0)
	for _, f := range kernelFields[:4] {
		kernel += after.kernel[f] - before.kernel[f]
	}
	measure.Print("idle.kernel_kib", each(kernel), "KiB")
	for _, f := range kernelFields {
		measure.Note("of it %s: %.1f KiB", f, each(after.kernel[f]-before.kernel[f]))
	}
	measure.Print("idle.user_kib", each(after.up+after.keeper+after.inside-before.up-before.keeper-before.inside), "KiB")
	measure.Print("idle.user_up_kib", each(after.up-before.up), "KiB")
	measure.Print("idle.user_keeper_kib", each(after.keeper-before.keeper), "KiB")
	measure.Print("idle.user_init_kib", each(after.inside-before.inside), "KiB")
	measure.Print("idle.daemons_mib", float64(after.up+after.keeper)/1024, "MiB")
	measure.Print("idle.create_p50", among.Ms(50), "ms")
	measure.Print("idle.create_p50_alone", alone.Ms(50), "ms")
	measure.Print("idle.create_rate8", float64(n)/made.Seconds(), "/s")
	measure.Print("idle.stop_rate8", float64(n)/stopped.Seconds(), "/s")
	return nil
}
