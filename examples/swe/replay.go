package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sort"
	"strings"
	"sync"
)

// report is what `dsec replay -o json` says of one step.
type report struct {
	Step, Kind, Verdict, Reason, What, Diff string
	Normalisers, Volatile                   []string
	Paths                                   int
	PathsBlind                              string `json:"paths_blind"`
}

// replayAll does the steps of all rollouts again. It fails unless every step comes to the same, but for times, durations and temporary
// names, and with the build cache as the only path that is not compared.
func replayAll(ctx context.Context, results []result) error {
	var ids []string
	for _, r := range results {
		ids = append(ids, r.sandboxes...)
	}
	var mu sync.Mutex
	var errs []error
	counts, used, volatile, blind := map[string]int{}, map[string]int{}, map[string]int{}, map[string]int{}
	paths := 0
	slots := make(chan struct{}, 2)
	var wg sync.WaitGroup
	for _, id := range ids {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			reports, err := replayOne(ctx, id)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
			}
			for _, r := range reports {
				counts[r.Verdict]++
				paths += r.Paths
				if r.PathsBlind != "" {
					blind[r.PathsBlind]++
				}
				for _, n := range r.Normalisers {
					used[n]++
				}
				for _, v := range r.Volatile {
					volatile[v]++
				}
				if r.Verdict != "equal" && r.Verdict != "equal after" {
					errs = append(errs, fmt.Errorf("%s step %s (%s): %s: %s\n%s%s", id, r.Step, r.Kind, r.Verdict, r.Reason, r.What, r.Diff))
				}
			}
		})
	}
	wg.Wait()
	fmt.Printf("replayed %d sandboxes: %s; normalisers: %s; %d changed paths compared; volatile: %s; paths not compared: %s\n", len(ids), tally(counts), tally(used), paths, tally(volatile), tally(blind))
	for n := range used {
		if !slices.Contains([]string{"time", "date", "duration", "temporary name"}, n) {
			errs = append(errs, fmt.Errorf("normaliser %s was needed", n))
		}
	}
	for v := range volatile {
		if v != goEnv["GOCACHE"] {
			errs = append(errs, fmt.Errorf("%s is volatile", v))
		}
	}
	return errors.Join(errs...)
}

func tally(m map[string]int) string {
	var out []string
	for k, n := range m {
		out = append(out, fmt.Sprintf("%d %s", n, k))
	}
	sort.Strings(out)
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ", ")
}

func replayOne(ctx context.Context, id string) (reports []report, err error) {
	_, here, _, _ := runtime.Caller(0)
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(here), "../../bin/dsec"), "replay", "-o", "json", id)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 {
		err = nil // the reports say what is different
	}
	if err != nil {
		return nil, fmt.Errorf("dsec replay %s: %w", id, err)
	}
	lines := bufio.NewScanner(&out)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var r report
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("dsec replay %s: %w", id, err)
		}
		reports = append(reports, r)
	}
	return reports, lines.Err()
}
