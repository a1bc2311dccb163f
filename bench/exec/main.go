// Exec measures commands in a sandbox that is there already, through the API, and process 1 alone. See docs/ops/bench.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/client"
)

func main() {
	rounds := flag.Int("rounds", 3, "times that everything is measured; rates and CPU times are medians over them")
	count := flag.Int("commands", 3000, "commands in one window, 8 at once")
	flag.Parse()
	ctx, cancel := measure.Context()
	defer cancel()
	if err := run(ctx, *rounds, *count); err != nil {
		fmt.Fprintln(os.Stderr, "bench exec:", err)
		os.Exit(1)
	}
}

const (
	width = 8
	gap   = 100 * time.Millisecond
)

func run(ctx context.Context, rounds, count int) (err error) {
	s, err := measure.Start(ctx, "2g")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Stop()) }()
	f, err := newFloor()
	if err != nil {
		return err
	}
	defer f.close()
	var boxes []*client.Sandbox
	for range width {
		b, err := s.Client.RunContainer(ctx, s.Options())
		if err != nil {
			return err
		}
		boxes = append(boxes, b)
	}
	one := func(b *client.Sandbox) func(context.Context) (time.Duration, error) {
		return func(ctx context.Context) (time.Duration, error) {
			start := time.Now()
			r, err := b.Exec(ctx, "/true")
			took := time.Since(start)
			if err == nil && !r.OK() {
				err = fmt.Errorf("true ended as %v", r.Outcome)
			}
			return took, err
		}
	}
	load := func(n int) (time.Duration, error) {
		start := time.Now()
		err := measure.Parallel(ctx, n, width, func(ctx context.Context, slot int) error {
			_, err := one(boxes[slot])(ctx)
			return err
		})
		return time.Since(start), err
	}
	if _, err := load(400); err != nil {
		return err
	}
	var steps, gaps, floor, floorGaps measure.Sample
	var rates, cpu, up, keeper []float64
	for range rounds {
		for _, m := range []struct {
			to    *measure.Sample
			n     int
			every time.Duration
			do    func(context.Context) (time.Duration, error)
		}{{&steps, 1000, 0, one(boxes[0])}, {&gaps, 50, gap, one(boxes[0])}, {&floor, 1000, 0, f.step}, {&floorGaps, 30, gap, f.step}} {
			got, err := measure.Sequence(ctx, m.n, m.every, m.do)
			if err != nil {
				return err
			}
			m.to.Join(got)
		}
		upBefore, keeperBefore, err := s.Parts()
		if err != nil {
			return err
		}
		wall, err := load(count)
		if err != nil {
			return err
		}
		upAfter, keeperAfter, err := s.Parts()
		if err != nil {
			return err
		}
		n := float64(count)
		rates = append(rates, n/wall.Seconds())
		up = append(up, measure.Ms(upAfter-upBefore)/n)
		keeper = append(keeper, measure.Ms(keeperAfter-keeperBefore)/n)
		cpu = append(cpu, measure.Ms(upAfter-upBefore+keeperAfter-keeperBefore)/n)
	}
	measure.Print("exec.p50", steps.Ms(50), "ms")
	measure.Print("exec.p99", steps.Ms(99), "ms")
	measure.Print("exec.rate8", measure.Median(rates), "/s")
	measure.Print("exec.cpu", measure.Median(cpu), "ms")
	measure.Print("exec.cpu_up", measure.Median(up), "ms")
	measure.Print("exec.cpu_keeper", measure.Median(keeper), "ms")
	measure.Print("exec.gap_p50", gaps.Ms(50), "ms")
	measure.Print("exec.floor", floor.Ms(50), "ms")
	measure.Print("exec.floor_gap_p50", floorGaps.Ms(50), "ms")
	measure.Print("ratio.exec_vs_floor", steps.Ms(50)/floor.Ms(50), "x")
	return nil
}
