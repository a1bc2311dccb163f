package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/client"
)

const crowdJob = "crowd"

// crowd makes n clones of one template that all live at once: each answers once and is paused then. Some are woken again by a command, and
// all are stopped by one call, after which nothing of them may be left.
func crowd(ctx context.Context, prefix string, n, wakes int) (err error) {
	s, end, err := warm(ctx, "crowd", "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	free := available()
	answers := &measure.Sample{}
	boxes := make([]*client.Sandbox, 0, n)
	began := time.Now()
	for i := range n {
		b, took, err := member(ctx, s)
		if err != nil {
			return fmt.Errorf("clone %d of %d: %w", i+1, n, err)
		}
		boxes = append(boxes, b)
		answers.Add(took)
		if len(boxes)%50 == 0 {
			measure.Note("crowd: %d clones answered and were paused, %.0f s, %d MiB taken", len(boxes), time.Since(began).Seconds(), (free-available())>>20)
		}
	}
	took := time.Since(began)
	used := free - available()
	list, err := s.Client.List(ctx, &dsecv1.Selector{Job: crowdJob, States: []string{"paused"}})
	if err != nil {
		return err
	}
	pids := monitors(s.Dir)
	if len(list) != n || len(pids) != n {
		return fmt.Errorf("%d clones were made: %d are paused, %d monitors live", n, len(list), len(pids))
	}
	measure.Print(prefix+".crowd", float64(n), "clones")
	measure.Print(prefix+".crowd_time", took.Seconds(), "s")
	measure.Print(prefix+".crowd_answer", answers.Percentile(50).Seconds(), "s")
	measure.Print(prefix+".crowd_answer_p99", answers.Percentile(99).Seconds(), "s")
	var pss int64
	for _, pid := range pids {
		pss += memoryOf(pid)
	}
	measure.Print(prefix+".crowd_mem", float64(pss)/float64(n)/(1<<20), "MiB")
	measure.Print(prefix+".crowd_used", float64(used)/float64(n)/(1<<20), "MiB") // of the machine, with all that goes with a sandbox
	woken := &measure.Sample{}
	for _, i := range rand.Perm(n)[:min(wakes, n)] {
		began := time.Now()
		if err := says(ctx, boxes[i], "awake"); err != nil {
			return fmt.Errorf("wake clone %d: %w", i, err)
		}
		woken.Add(time.Since(began))
		if err := pause(ctx, s, boxes[i]); err != nil {
			return fmt.Errorf("pause clone %d again: %w", i, err)
		}
	}
	measure.Print(prefix+".crowd_wake", woken.Percentile(50).Seconds(), "s")
	at := time.Now()
	r, err := s.Client.StopAll(ctx, &dsecv1.Selector{Job: crowdJob})
	if err != nil {
		return fmt.Errorf("stop all: %w", err)
	}
	if len(r.Errors) > 0 {
		return fmt.Errorf("stop all: %d of %d failed, as %s: %s", len(r.Errors), n, r.Errors[0].Id, r.Errors[0].Message)
	}
	measure.Print(prefix+".crowd_stop", time.Since(at).Seconds(), "s")
	return left(ctx, s)
}

// member makes one clone that has answered and is paused.
func member(ctx context.Context, s *measure.Server) (*client.Sandbox, time.Duration, error) {
	o := options(s)
	o.Job, o.Deadline = crowdJob, time.Hour
	b, took, err := first(ctx, s, o)
	if err != nil {
		return nil, 0, err
	}
	return b, took, pause(ctx, s, b)
}

// left is an error that names what a server's sandboxes have left: monitors, folders of machines, control groups, taps.
func left(ctx context.Context, s *measure.Server) error {
	var out []string
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(100 * time.Millisecond) { // a monitor that has ended is still to be reaped
		if out = remains(s.Dir); len(out) == 0 {
			break
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d things are left: %s", len(out), strings.Join(out[:min(10, len(out))], ", "))
		}
	}
	list, err := s.Client.List(ctx, &dsecv1.Selector{Job: crowdJob})
	if err == nil && len(list) > 0 {
		err = fmt.Errorf("%d of the sandboxes are alive, as %s", len(list), list[0].ID)
	}
	if err == nil {
		measure.Note("crowd: nothing is left")
	}
	return err
}

func remains(dir string) (out []string) {
	folders, _ := filepath.Glob(filepath.Join(dir, "run", "*vm-*", "*"))
	groups, _ := filepath.Glob("/sys/fs/cgroup/dsec-*-vm*/*")
	old, _ := filepath.Glob("/sys/fs/cgroup/memory/dsec-*-vm*/*")
	for _, f := range slices.Concat(folders, groups, old) {
		if st, err := os.Stat(f); err == nil && st.IsDir() && !strings.HasPrefix(filepath.Base(f), "template-") {
			out = append(out, f)
		}
	}
	return out
}

// available is the machine's free memory, in octets.
func available() (n int64) {
	text, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(text)) {
		if _, err := fmt.Sscanf(line, "MemAvailable: %d kB", &n); err == nil {
			return n << 10
		}
	}
	return 0
}
