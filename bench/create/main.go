// Create measures how fast sandboxes are made and what they cost, beside crun, runc and containerd on the same root file system, with
// all candidates' rounds taking turns. See docs/ops/bench.md for what each line means.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/bench/peer"
)

func main() {
	if ok, err := peer.Main(os.Args[1:]); ok {
		exit(err)
	}
	rounds := flag.Int("rounds", 3, "times that every candidate has its turn; figures are medians over them")
	cycles := flag.Int("cycles", 2000, "create + true + stop in one window, 8 at once")
	peers := flag.String("peers", "crun,runc,containerd", "runtimes to compare with; empty for none")
	flag.Parse()
	ctx, cancel := measure.Context()
	defer cancel()
	exit(run(ctx, *rounds, *cycles, *peers))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench create:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

const (
	width = 8
	gap   = 100 * time.Millisecond
)

// result is what one candidate showed, a value for each round.
type result struct {
	first, gaps        measure.Sample // create to first result
	rate, cpu, machine []float64
	user, kernel       []float64 // cpu taken apart
	cycles             int
}

func (r *result) print(name string) {
	measure.Print(name+".p50", r.first.Ms(50), "ms")
	measure.Print(name+".p99", r.first.Ms(99), "ms")
	measure.Print(name+".rate8", measure.Median(r.rate), "/s")
	measure.Print(name+".cpu", measure.Median(r.cpu), "ms")
	measure.Print(name+".cpu_processes", measure.Median(r.user), "ms")
	measure.Print(name+".cpu_kernel", measure.Median(r.kernel), "ms")
	measure.Print(name+".cpu_machine", measure.Median(r.machine), "ms")
	measure.Print(name+".gap_p50", r.gaps.Ms(50), "ms")
}

func run(ctx context.Context, rounds, cycles int, names string) (err error) {
	server, err := measure.Start(ctx, "4g")
	if err != nil {
		return err
	}
	s := candidate{server}
	defer func() { err = errors.Join(err, s.Stop()) }()
	var others []*peer.Peer
	defer func() {
		for _, p := range others {
			err = errors.Join(err, p.Stop())
		}
	}()
	for _, n := range strings.FieldsFunc(names, func(r rune) bool { return r == ',' }) {
		pkg, ok := peer.Runtimes()[n]
		if !ok {
			return fmt.Errorf("-peers %q: not one of crun, runc, containerd", n)
		}
		p, err := peer.Start(n, width)
		if err != nil {
			return fmt.Errorf("%w (Debian package %s)", err, pkg)
		}
		others = append(others, p)
	}
	ours := &result{}
	theirs := map[string]*result{}
	if err := s.load(ctx, 64); err != nil { // caches and pools are warm, also the peers'
		return err
	}
	for _, p := range others {
		for _, row := range []peer.Row{peer.AsInstalled, peer.Equal} {
			theirs[p.Name+"."+string(row)] = &result{}
			if _, _, err := p.Run(ctx, row, width, width, 0); err != nil {
				return err
			}
		}
	}
	for round := range rounds {
		measure.Note("round %d of %d", round+1, rounds)
		if err := s.round(ctx, ours, cycles); err != nil {
			return err
		}
		for _, p := range others {
			for _, row := range []peer.Row{peer.AsInstalled, peer.Equal} {
				if err := peerRound(ctx, p, row, theirs[p.Name+"."+string(row)], rounds); err != nil {
					return err
				}
			}
		}
	}
	ours.print("create")
	measure.Note("create: %d cycles in each of %d windows", cycles, rounds)
	for _, p := range others {
		for _, row := range []peer.Row{peer.AsInstalled, peer.Equal} {
			name := p.Name + "." + string(row)
			measure.Note("%s: %d cycles; its p50, p99 and gap_p50 are of a whole run with removal", name, theirs[name].cycles)
			theirs[name].print(name)
		}
		r := theirs[p.Name+"."+string(peer.Equal)]
		measure.Print("ratio.rate_vs_"+p.Name, measure.Median(ours.rate)/measure.Median(r.rate), "x")
		measure.Print("ratio.cpu_vs_"+p.Name, measure.Median(r.cpu)/measure.Median(ours.cpu), "x")
	}
	return nil
}
