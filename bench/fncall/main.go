// Fncall measures function calls through the API: one request a call, fresh namespaces, and beside them the least that such a call can take
// and other programs that do the like. See docs/ops/bench.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/client"
)

func main() {
	rounds := flag.Int("rounds", 3, "times that everything is measured; rates and CPU times are medians over them")
	count := flag.Int("calls", 1500, "calls in one window, 8 at once")
	env := flag.String("env", "", "tar of an environment with python3 and g++ (scripts/fncall_env.sh makes it); without it those lines are left out")
	others := flag.Bool("peers", true, "measure crun, bubblewrap and $DSEC_GO_JUDGE beside")
	var ours figures
	flag.Float64Var(&ours.p50, "ours-p50", 0, "measure the others alone and compare with this (used by itself)")
	flag.Float64Var(&ours.rate, "ours-rate", 0, "with -ours-p50")
	flag.Parse()
	ctx, cancel := measure.Context()
	defer cancel()
	if ours.p50 > 0 {
		if err := peers(ctx, ours); err != nil {
			fmt.Fprintln(os.Stderr, "bench fncall:", err)
			os.Exit(1)
		}
		return
	}
	if err := run(ctx, *rounds, *count, *env, *others); err != nil {
		fmt.Fprintln(os.Stderr, "bench fncall:", err)
		os.Exit(1)
	}
}

const width = 8

// caller does one call after another of one kind.
type caller struct {
	c    *client.Client
	call client.Call
}

func (x caller) once(ctx context.Context) (time.Duration, error) {
	start := time.Now()
	a, err := x.c.FnCall(ctx, x.call)
	took := time.Since(start)
	if err == nil && a.Verdict != "OK" {
		err = fmt.Errorf("call ended as %s: %v", a.Verdict, a.Result)
	}
	return took, err
}

func (x caller) load(ctx context.Context, n int) (time.Duration, error) {
	start := time.Now()
	err := measure.Parallel(ctx, n, width, func(ctx context.Context, _ int) error {
		_, err := x.once(ctx)
		return err
	})
	return time.Since(start), err
}

func run(ctx context.Context, rounds, count int, env string, withPeers bool) (err error) {
	s, err := measure.Start(ctx, "2g")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Stop()) }()
	if err := publish(ctx, s, s.Layer); err != nil {
		return err
	}
	f, err := newFloor()
	if err != nil {
		return err
	}
	defer f.close()
	fresh := caller{s.Client, client.Call{Cmd: []string{"/true"}}}
	pooled := fresh
	pooled.call.Pooled = true
	for _, x := range []caller{fresh, pooled} {
		if _, err := x.load(ctx, 200); err != nil {
			return err
		}
	}
	var steps, pools measure.Sample
	var rates, cpu, poolRates, floors, shared []float64
	for range rounds {
		for _, m := range []struct {
			to *measure.Sample
			x  caller
		}{{&steps, fresh}, {&pools, pooled}} {
			got, err := measure.Sequence(ctx, 300, 0, m.x.once)
			if err != nil {
				return err
			}
			m.to.Join(got)
		}
		a, b, err := f.measure(ctx, 300)
		if err != nil {
			return err
		}
		floors, shared = append(floors, a), append(shared, b)
		before, err := s.CPU()
		if err != nil {
			return err
		}
		wall, err := fresh.load(ctx, count)
		if err != nil {
			return err
		}
		after, err := s.CPU()
		if err != nil {
			return err
		}
		rates, cpu = append(rates, float64(count)/wall.Seconds()), append(cpu, measure.Ms(after-before)/float64(count))
		if wall, err = pooled.load(ctx, count/2); err != nil {
			return err
		}
		poolRates = append(poolRates, float64(count/2)/wall.Seconds())
	}
	floor := measure.Median(floors)
	measure.Print("fncall.p50", steps.Ms(50), "ms")
	measure.Print("fncall.p99", steps.Ms(99), "ms")
	measure.Print("fncall.rate8", measure.Median(rates), "/s")
	measure.Print("fncall.cpu", measure.Median(cpu), "ms")
	measure.Print("fncall.floor", floor, "ms")
	measure.Print("fncall.floor_shared_net", measure.Median(shared), "ms")
	measure.Print("fncall.over_floor", steps.Ms(50)/floor, "x")
	measure.Print("fncall.pooled_p50", pools.Ms(50), "ms")
	measure.Print("fncall.pooled_rate8", measure.Median(poolRates), "/s")
	if env != "" {
		if err := languages(ctx, s, env); err != nil {
			return err
		}
	}
	if withPeers {
		return apart(ctx, figures{steps.Ms(50), measure.Median(rates)})
	}
	return nil
}

func publish(ctx context.Context, s *measure.Server, layer string) error {
	if _, err := s.Client.PublishEnvironment(ctx, &dsecv1.Environment{Name: "fncall", Base: layer}); err != nil {
		return fmt.Errorf("publish the environment: %w", err)
	}
	return nil
}

// languages measures an interpreter's start and a compiler with 20 inputs.
func languages(ctx context.Context, s *measure.Server, file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	made, err := s.Client.ImportLayer(ctx, "base/fncall-languages", filepath.Base(file), f)
	if err != nil {
		return err
	}
	if err := publish(ctx, s, made.Layer.Id); err != nil {
		return err
	}
	python := caller{s.Client, client.Call{Lang: "python", Code: "print(sum(range(1000)))\n"}}
	for range 3 {
		if _, err := python.once(ctx); err != nil {
			return err
		}
	}
	got, err := measure.Sequence(ctx, 60, 0, python.once)
	if err != nil {
		return err
	}
	measure.Print("fncall.python_p50", got.Ms(50), "ms")
	if err := warm(ctx, python); err != nil {
		return err
	}
	var inputs []*dsecv1.CallInput
	for i := range 20 {
		inputs = append(inputs, &dsecv1.CallInput{Stdin: fmt.Sprint(i, " ", i+1, "\n")})
	}
	var batches measure.Sample
	for i := range 4 {
		code := fmt.Sprintf("#include <iostream>\nint main(){ long a,b; std::cin>>a>>b; std::cout<<a+b<<'\\n'; return 0; } // %d\n", i)
		start := time.Now()
		a, err := s.Client.FnCallBatch(ctx, client.Call{Lang: "cpp", Code: code}, inputs, false)
		if err != nil {
			return err
		}
		if a.Verdict != "OK" {
			return fmt.Errorf("C++: %s: %s", a.Verdict, a.Compile.Stderr)
		}
		if i > 0 { // the first brings the compiler into memory
			batches.Add(time.Since(start))
		}
	}
	measure.Print("fncall.cpp_20_inputs", batches.Ms(50), "ms")
	return nil
}

// warm compares calls that find an interpreter that is up with fresh ones, in turns, each after a pause in which another can be made.
func warm(ctx context.Context, fresh caller) error {
	up := fresh
	up.call.Warm = true
	var of [2]measure.Sample
	ahead := 0
	for range 6 {
		for i, x := range []caller{fresh, up} {
			got, err := measure.Sequence(ctx, 12, 100*time.Millisecond, func(ctx context.Context) (time.Duration, error) {
				start := time.Now()
				a, err := x.c.FnCall(ctx, x.call)
				took := time.Since(start)
				if err == nil && a.Result != nil && a.Result.Warm {
					ahead++
				}
				return took, err
			})
			if err != nil {
				return err
			}
			of[i].Join(got)
		}
	}
	measure.Print("fncall.python_gap_p50", of[0].Ms(50), "ms")
	measure.Print("fncall.python_warm", of[1].Ms(50), "ms")
	measure.Print("fncall.python_warm_found", float64(ahead)/72, "x")
	return nil
}

// lines are the numbers that a program prints.
func lines(out []byte) (v []float64, err error) {
	for f := range strings.FieldsSeq(string(out)) {
		var x float64
		if _, err := fmt.Sscan(f, &x); err != nil {
			return nil, err
		}
		v = append(v, x)
	}
	return v, nil
}
