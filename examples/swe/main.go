// Command swe is the example of dsec's main job: software-engineering rollouts. It makes real bug-fix tasks from pairs of released
// versions of Go modules, lets scripted agents work on each, honest ones and cheats, grades every result in a second clean sandbox and prints
// a table. Its exit code is 0 only if every agent got the reward that it deserves.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/dsec-dev/dsec/client"
)

func main() {
	var only string
	var rounds, parallel int
	var again bool
	var on place
	flag.StringVar(&only, "task", "", "only this task")
	flag.IntVar(&rounds, "rounds", 2, "how often each agent works on each task")
	flag.IntVar(&parallel, "parallel", 3, "rollouts at once")
	flag.StringVar(&on.backend, "backend", "container", "where agents work and are graded: container, microvm or vm; environments are prepared in containers")
	flag.BoolVar(&on.degraded, "allow-degraded", false, "take machines without hardware acceleration")
	flag.BoolVar(&again, "replay", false, "do every recorded step again afterwards, in fresh sandboxes, and compare")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, on, only, rounds, parallel, again); err != nil {
		fmt.Fprintln(os.Stderr, "swe:", err)
		os.Exit(1)
	}
}

// place is the kind of sandbox that rollouts get.
type place struct {
	backend  string
	degraded bool
}

func (p place) options(o client.Options) client.Options {
	o.Backend, o.AllowDegraded = p.backend, p.degraded
	return o
}

func run(ctx context.Context, on place, only string, rounds, parallel int, again bool) error {
	c, err := client.Connect(ctx, client.Config{Timeout: testBound + time.Minute})
	if err != nil {
		return err
	}
	start := time.Now()
	if err := prepareShared(ctx, c); err != nil {
		return err
	}
	var ready []*task
	for _, t := range tasks {
		if only != "" && only != t.name {
			continue
		}
		if err := t.prepare(ctx, c); err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
		fmt.Printf("%-11s fail-to-pass %d, pass-to-pass %d, ready after %.0f s\n", t.name, len(t.failToPass), len(t.passToPass), time.Since(start).Seconds())
		ready = append(ready, t)
	}
	// The job's lease ends every sandbox within a minute if this program dies.
	job, err := c.OpenJob(ctx, fmt.Sprintf("swe-%d", time.Now().Unix()), time.Minute, "stop")
	if err != nil {
		return err
	}
	defer job.Close()
	results := rollouts(ctx, c, on, job.Name, ready, rounds, parallel)
	print(results)
	fmt.Printf("%d rollouts in %.0f s with preparation\n", len(results), time.Since(start).Seconds())
	if err := verdict(results); err != nil || !again {
		return err
	}
	return replayAll(ctx, results)
}

// result is one rollout: what an agent did on a task and what it earned.
type result struct {
	task, agent string
	round       int
	reward      float64
	steps       int
	wall, cpu   time.Duration
	peak        int64
	class       string
	trajectory  string
	sandboxes   []string // the agent's and the grader's
	err         error
}

func rollouts(ctx context.Context, c *client.Client, on place, job string, tasks []*task, rounds, parallel int) []result {
	var results []result
	for round := 1; round <= rounds; round++ {
		for _, t := range tasks {
			for _, a := range agents {
				results = append(results, result{task: t.name, agent: a.name, round: round})
			}
		}
	}
	byName := map[string]*task{}
	for _, t := range tasks {
		byName[t.name] = t
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallel)
	for i := range results {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			rollout(ctx, c, on, job, byName[results[i].task], &results[i])
		})
	}
	wg.Wait()
	return results
}

func print(results []result) {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "TASK\tAGENT\tREWARD\tSTEPS\tWALL\tCPU\tPEAK\tCLASS\tTRAJECTORY")
	for _, r := range results {
		note := r.class
		if r.err != nil {
			note += ": " + strings.ReplaceAll(r.err.Error(), "\n", " ")
		}
		fmt.Fprintf(w, "%s\t%s\t%.0f\t%d\t%.1fs\t%.1fs\t%dM\t%s\t%s\n", r.task, r.agent, r.reward, r.steps, r.wall.Seconds(), r.cpu.Seconds(), r.peak>>20, note, r.trajectory)
	}
	w.Flush()
}

// verdict holds the rewards against what each agent deserves: only the true fix earns 1.
func verdict(results []result) error {
	var wrong []error
	for _, r := range results {
		want := 0.0
		if r.agent == "fix" {
			want = 1
		}
		if r.err != nil || r.reward != want {
			wrong = append(wrong, fmt.Errorf("%s %s: reward %.0f, deserves %.0f (%v)", r.task, r.agent, r.reward, want, r.err))
		}
	}
	return errors.Join(wrong...)
}
