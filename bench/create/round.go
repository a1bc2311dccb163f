package main

import (
	"context"
	"fmt"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/bench/peer"
)

// candidate is dsec under load.
type candidate struct{ *measure.Server }

// first makes a sandbox, runs the program and stops the sandbox; the time is that to the first result.
func (c candidate) first(ctx context.Context) (time.Duration, error) {
	start := time.Now()
	box, err := c.Client.RunContainer(ctx, c.Options())
	if err != nil {
		return 0, fmt.Errorf("create: %w", err)
	}
	r, err := box.Exec(ctx, "/true")
	took := time.Since(start)
	if err != nil {
		return 0, fmt.Errorf("true: %w", err)
	}
	if !r.OK() {
		return 0, fmt.Errorf("true ended as %v", r.Outcome)
	}
	if err := box.Stop(ctx); err != nil {
		return 0, fmt.Errorf("stop: %w", err)
	}
	return took, nil
}

func (c candidate) load(ctx context.Context, cycles int) error {
	return measure.Parallel(ctx, cycles, width, func(ctx context.Context, _ int) error {
		_, err := c.first(ctx)
		return err
	})
}

func (c candidate) round(ctx context.Context, r *result, cycles int) error {
	s, err := measure.Sequence(ctx, 200, 0, c.first)
	if err != nil {
		return err
	}
	r.first.Join(s)
	if s, err = measure.Sequence(ctx, 40, gap, c.first); err != nil {
		return err
	}
	r.gaps.Join(s)
	self := func() (time.Duration, error) { return measure.Self(), nil }
	up, keeper, err := c.Parts()
	if err != nil {
		return err
	}
	defer func() {
		if u, k, err := c.Parts(); err == nil {
			measure.Note("of the processes' CPU time: dsec up %.2f ms, keeper and sandboxes %.2f ms a cycle",
				measure.Ms(u-up)/float64(cycles), measure.Ms(k-keeper)/float64(cycles))
		}
	}()
	return r.window(ctx, cycles, c.CPU, self, func() (time.Duration, error) {
		start := time.Now()
		if err := c.load(ctx, cycles); err != nil {
			return 0, err
		}
		c.Settle() // what was taken from pools is there again
		return time.Since(start), nil
	})
}

// peerRound is a round of another runtime, with fewer cycles since each takes long.
func peerRound(ctx context.Context, p *peer.Peer, row peer.Row, r *result, rounds int) error {
	each := (100 + rounds - 1) / rounds // at least 100 in all
	times, _, err := p.Run(ctx, row, each, 1, 0)
	if err != nil {
		return err
	}
	r.first.Add(times...)
	if times, _, err = p.Run(ctx, row, 15, 1, gap); err != nil {
		return err
	}
	r.gaps.Add(times...)
	if p.Name != "containerd" {
		each *= 4
	}
	return r.window(ctx, each, p.CPU, p.Self, func() (time.Duration, error) {
		_, wall, err := p.Run(ctx, row, each, width, 0)
		return wall, err
	})
}

// window measures a run of cycles: the rate, and the CPU time until the kernel has cleaned up behind it, less what the machine spends
// when the candidate does nothing.
func (r *result) window(ctx context.Context, cycles int, group, client func() (time.Duration, error), load func() (time.Duration, error)) error {
	const idleFor, after = 1500 * time.Millisecond, 1500 * time.Millisecond
	var reads [4]measure.Reading
	take := func(i int) (err error) {
		reads[i], err = measure.Read(group, client)
		return err
	}
	time.Sleep(after) // what the turns before left to the kernel
	if err := take(0); err != nil {
		return err
	}
	time.Sleep(idleFor)
	if err := take(1); err != nil {
		return err
	}
	wall, err := load()
	if err != nil {
		return err
	}
	time.Sleep(after)
	if err := take(2); err != nil {
		return err
	}
	time.Sleep(idleFor)
	if err := take(3); err != nil {
		return err
	}
	// The quieter of the moments before and after: what else the machine does comes and goes.
	idle := reads[1].Since(reads[0])
	if later := reads[3].Since(reads[2]); later.Kernel+later.Machine < idle.Kernel+idle.Machine {
		idle = later
	}
	spent := reads[2].Since(reads[1]).Less(idle)
	measure.Note("idle: machine %.1f%%, kernel threads %.1f%%, candidate %.1f%% of one CPU (taken off); window %.1f s, %d cycles",
		share(idle.Machine, idle), share(idle.Kernel, idle), share(idle.Group, idle), wall.Seconds(), cycles)
	n := float64(cycles)
	r.rate = append(r.rate, n/wall.Seconds())
	r.cpu = append(r.cpu, spent.PerCycle(cycles))
	r.user = append(r.user, measure.Ms(spent.Group)/n)
	r.kernel = append(r.kernel, measure.Ms(spent.Kernel)/n)
	r.machine = append(r.machine, spent.MachinePerCycle(cycles))
	r.cycles += cycles
	return nil
}

func share(d time.Duration, of measure.CPU) float64 {
	if of.Wall <= 0 {
		return 0
	}
	return 100 * float64(d) / float64(of.Wall)
}
