package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

func openLog(dir string) (*trajectory.Log, error) {
	return trajectory.Open(trajectory.Default(dir), slog.New(slog.DiscardHandler))
}

func id(key string) trajectory.ID {
	return trajectory.ID{Project: "default", Job: "bench", Key: key}
}

// step is what a command with 1 KiB of output appends, payloads of the size that they have.
func step(i int, out []byte) []trajectory.Record {
	name := fmt.Sprint("step-", i)
	return []trajectory.Record{
		{Kind: trajectory.KindStepStart, Step: name, Payload: []byte(strings.Repeat("a", 60))},
		{Kind: trajectory.KindOutput, Step: name, Stream: sandbox.Stdout, Payload: out},
		{Kind: trajectory.KindStepEnd, Step: name, Payload: []byte(strings.Repeat("e", 180))},
	}
}

// fill appends steps to one trajectory.
func fill(ctx context.Context, l *trajectory.Log, key string, steps int) error {
	create := []trajectory.Record{{Kind: trajectory.KindCreate, Payload: []byte(strings.Repeat("c", 400))}}
	if _, err := l.Append(ctx, id(key), create, sandbox.DurabilityProcess); err != nil {
		return err
	}
	for i := range steps {
		// A line of a test run: neither zeros nor noise.
		out := fmt.Appendf(nil, "%-1024s", strings.Repeat(fmt.Sprintf("tests/test_%d.py::test_case_%d PASSED in 0.%02ds\n", i%50, i, i*7%100), 20))[:1024]
		for _, r := range step(i, out) {
			if _, err := l.Append(ctx, id(key), []trajectory.Record{r}, sandbox.DurabilityProcess); err != nil {
				return err
			}
		}
	}
	return nil
}

func writeAndDie(dir string, records int) {
	l, err := openLog(dir)
	ctx := context.Background()
	if err == nil {
		go l.Run(ctx)
		const keys = 64
		var g sync.WaitGroup
		for k := range keys {
			g.Go(func() {
				if ferr := fill(ctx, l, fmt.Sprint("k", k), records/3/keys); ferr != nil {
					err = ferr
				}
			})
		}
		g.Wait()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	unix.Kill(os.Getpid(), unix.SIGKILL)
}

// logAlone measures the log without what is around it.
func logAlone(ctx context.Context, records int) error {
	dir, err := os.MkdirTemp("", "dsec-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	l, err := openLog(filepath.Join(dir, "rate"))
	if err != nil {
		return err
	}
	run, stop := context.WithCancel(ctx)
	defer stop()
	var background sync.WaitGroup
	background.Go(func() { _ = l.Run(run) })
	const steps = 40000
	var took [2]time.Duration
	for i, writers := range []int{1, 8} {
		start := time.Now()
		var g sync.WaitGroup
		var failed error
		for w := range writers {
			g.Go(func() {
				if err := fill(ctx, l, fmt.Sprint(writers, "-", w), steps/writers); err != nil {
					failed = err
				}
			})
		}
		g.Wait()
		if failed != nil {
			return failed
		}
		took[i] = time.Since(start)
	}
	measure.Print("traj.append_rate", 3*steps/took[0].Seconds(), "/s")
	measure.Print("traj.append_rate8", 3*steps/took[1].Seconds(), "/s")
	stop()
	background.Wait()
	if err := l.Close(); err != nil {
		return err
	}
	// On the disk: as it is written, and once it is packed.
	if err := onDisk(ctx, filepath.Join(dir, "size")); err != nil {
		return err
	}
	crash := filepath.Join(dir, "crash")
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := exec.CommandContext(ctx, self, "-write", crash, "-records", fmt.Sprint(records))
	child.Stderr = os.Stderr
	if err := child.Run(); err == nil || child.ProcessState == nil || child.ProcessState.ExitCode() != -1 {
		return fmt.Errorf("the writer of the log did not die as it should: %w", err)
	}
	start := time.Now()
	l, err = openLog(crash)
	if err != nil {
		return err
	}
	opened := time.Since(start)
	n := 0
	for _, t := range l.Trajectories() {
		n += int(t.LastSeq)
	}
	if n < records*99/100 {
		return fmt.Errorf("found %d of %d records", n, records)
	}
	measure.Print("traj.recover_1m", opened.Seconds()*1e6/float64(n), "s")
	return l.Close()
}

func onDisk(ctx context.Context, dir string) error {
	l, err := openLog(dir)
	if err != nil {
		return err
	}
	const steps = 100000
	if err := fill(ctx, l, "k", steps); err != nil {
		return err
	}
	measure.Print("traj.bytes_per_step", float64(l.Space().Live)/steps, "B")
	if err := l.Close(); err != nil {
		return err
	}
	if l, err = openLog(dir); err != nil {
		return err
	}
	before := l.Space().Segments
	run, stop := context.WithCancel(ctx)
	var g sync.WaitGroup
	start := time.Now()
	g.Go(func() { _ = l.Run(run) })
	last, took := before, time.Duration(0)
	for same := 0; same < 20 && time.Since(start) < time.Minute; same++ { // until packing has come to an end
		time.Sleep(50 * time.Millisecond)
		if now := l.Space().Segments; now < last {
			last, took, same = now, time.Since(start), 0
		}
	}
	stop()
	g.Wait()
	spare := trajectory.Default(dir).SegmentBytes // empty, allocated ahead
	measure.Print("traj.bytes_per_step_packed", float64(last-spare)/steps, "B")
	measure.Note("%d MiB were packed to %d MiB in %v", (before-spare)>>20, (last-spare)>>20, took.Round(10*time.Millisecond))
	return l.Close()
}
