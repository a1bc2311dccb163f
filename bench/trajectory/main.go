// Trajectory measures the log: what it costs a command, what it takes on the disk, how fast it opens after a crash and how fast a new client
// learns what was done. See docs/ops/bench.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/client"
)

func main() {
	rounds := flag.Int("rounds", 3, "times that commands are measured with and without the log, in turn")
	steps := flag.Int("steps", 20000, "recorded steps that a new client learns")
	records := flag.Int("records", 1_000_000, "records of the log that is opened after a crash")
	write := flag.String("write", "", "write a log of so many records into this folder and die (used by the benchmark itself)")
	traces := flag.Int("traces", 2, "times that a build and a test run are measured with each trace and without, in turn")
	alone := flag.Bool("trace", false, "measure traces alone")
	flag.Parse()
	if *write != "" {
		writeAndDie(*write, *records)
	}
	ctx, cancel := measure.Context()
	defer cancel()
	if err := run(ctx, *rounds, *steps, *records, *traces, *alone); err != nil {
		fmt.Fprintln(os.Stderr, "bench trajectory:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, rounds, steps, records, traces int, alone bool) error {
	if alone {
		return traced(ctx, traces)
	}
	if err := logAlone(ctx, records); err != nil {
		return err
	}
	if err := overhead(ctx, rounds); err != nil {
		return err
	}
	if err := fastForward(ctx, steps); err != nil {
		return err
	}
	return traced(ctx, traces)
}

// overhead compares commands with the log and without, and with durability host, server by server in turn.
func overhead(ctx context.Context, rounds int) error {
	plain, err := filepath.Abs(measure.Binary())
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "dsec-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	without := filepath.Join(dir, "dsec")
	build := exec.CommandContext(ctx, "go", "build", "-tags", "dsec_nolog", "-o", without, "./cmd/dsec")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build without the log: %w: %s", err, b)
	}
	defer os.Setenv("DSEC", plain)
	var on, off, host measure.Sample
	for range rounds {
		for _, m := range []struct {
			bin        string
			durability string
			to         *measure.Sample
			also       *measure.Sample
		}{{plain, "process", &on, &host}, {without, "process", &off, nil}} {
			os.Setenv("DSEC", m.bin)
			if err := commands(ctx, m.to, m.also); err != nil {
				return err
			}
		}
	}
	measure.Print("traj.exec_p50", on.Ms(50), "ms")
	measure.Print("traj.exec_p50_off", off.Ms(50), "ms")
	measure.Print("traj.exec_overhead", 100*(on.Ms(50)/off.Ms(50)-1), "%")
	measure.Print("traj.host_ack", host.Ms(50)-on.Ms(50), "ms")
	return nil
}

// commands runs a command again and again in a server of its own; also takes those of a sandbox with durability host, in turn.
func commands(ctx context.Context, to, also *measure.Sample) (err error) {
	s, err := measure.Start(ctx, "1g")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Stop()) }()
	box := func(durability string) (func(context.Context) (time.Duration, error), error) {
		o := s.Options()
		o.Durability = durability
		b, err := s.Client.RunContainer(ctx, o)
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) (time.Duration, error) {
			start := time.Now()
			r, err := b.Exec(ctx, "/true")
			took := time.Since(start)
			if err == nil && !r.OK() {
				err = fmt.Errorf("true ended as %v", r.Outcome)
			}
			return took, err
		}, nil
	}
	process, err := box("process")
	if err != nil {
		return err
	}
	host, err := box("host")
	if err != nil {
		return err
	}
	if _, err := measure.Sequence(ctx, 300, 0, process); err != nil {
		return err
	}
	for range 5 {
		got, err := measure.Sequence(ctx, 300, 0, process)
		if err != nil {
			return err
		}
		to.Join(got)
		if also == nil {
			continue
		}
		if got, err = measure.Sequence(ctx, 300, 0, host); err != nil {
			return err
		}
		also.Join(got)
	}
	return nil
}

// fastForward records steps with 1 KiB of output each and lets new clients learn them, all at once and one by one.
func fastForward(ctx context.Context, steps int) (err error) {
	const boxes, job = 8, "bench-fastforward"
	s, err := measure.Start(ctx, "2g")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Stop()) }()
	var all []*client.Sandbox
	for i := range boxes {
		o := s.Options()
		o.Job, o.Key = job, fmt.Sprint("k", i)
		b, err := s.Client.RunContainer(ctx, o)
		if err != nil {
			return err
		}
		all = append(all, b)
	}
	cmd := func(i int) client.Cmd {
		return client.Cmd{ID: fmt.Sprint("step-", i), Argv: []string{"/bin/busybox", "printf", "%1024s", ""}}
	}
	next := make([]int, boxes)
	err = measure.Parallel(ctx, steps, boxes, func(ctx context.Context, slot int) error {
		i := next[slot]
		next[slot]++
		r, err := all[slot].Run(ctx, cmd(i))
		if err == nil && (!r.OK() || len(r.Stdout) != 1024) {
			err = fmt.Errorf("step ended as %v with %d octets", r.Outcome, len(r.Stdout))
		}
		return err
	})
	if err != nil {
		return err
	}
	var rates []float64
	for range 5 {
		c, err := client.Connect(ctx, client.Config{URL: s.URL(), KeyFile: s.KeyFile()})
		if err != nil {
			return err
		}
		start := time.Now()
		n, err := c.FastForward(ctx, job)
		if err != nil {
			return err
		}
		if n != steps {
			return fmt.Errorf("learned %d of %d steps", n, steps)
		}
		rates = append(rates, float64(n)/time.Since(start).Seconds())
		done := 0
		start = time.Now()
		for slot, b := range all {
			for i := range next[slot] {
				if r, err := c.Sandbox(b.ID).Run(ctx, cmd(i)); err != nil || len(r.Stdout) != 1024 {
					return fmt.Errorf("step %d: %v %w", i, r, err)
				}
				done++
			}
		}
		measure.Note("%d recorded steps were answered in %v", done, time.Since(start).Round(time.Millisecond))
	}
	measure.Print("traj.fastforward_rate", measure.Median(rates), "/s")
	start, n := time.Now(), min(2000, next[0])
	for i := range n {
		if _, err := all[0].Run(ctx, cmd(i)); err != nil {
			return err
		}
	}
	measure.Print("traj.fastforward_single", float64(n)/time.Since(start).Seconds(), "/s")
	return nil
}
