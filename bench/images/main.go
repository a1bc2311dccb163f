// Images measures how long it takes from an image in a far store to the first useful command in it, and what is fetched and written on the
// way: pulled and unpacked whole as container engines do, local, and on demand. See docs/ops/bench.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/client"
)

func main() {
	rounds := flag.Int("rounds", 3, "times that everything is measured; figures are medians over them")
	cache := flag.String("cache", "bin/images", "folder that keeps the environments' tars")
	many := flag.Bool("burst", false, "many sandboxes over many environments instead")
	var size burstSize
	flag.IntVar(&size.boxes, "boxes", 500, "sandboxes of the burst")
	flag.IntVar(&size.images, "images", 50, "environments of the burst")
	only := flag.String("only", "", "one environment: python, go or node")
	hot := flag.Bool("hot", false, "only local, and on demand with hot files first over the fast link; says where time and octets went")
	flag.Parse()
	ctx, cancel := measure.Context()
	defer cancel()
	err := error(nil)
	if *many {
		err = runBurst(ctx, *cache, size)
	} else {
		err = run(ctx, plan{rounds: *rounds, hotOnly: *hot}, *cache, *only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench images:", err)
		os.Exit(1)
	}
}

// speed is a link between store and host.
type speed struct {
	name    string
	latency time.Duration
	rate    int64 // octets/s
}

var speeds = []speed{{"fast", time.Millisecond, 1e9}, {"slow", 10 * time.Millisecond, 100e6}}

// plan is what is measured of each environment.
type plan struct {
	rounds  int
	hotOnly bool
}

func run(ctx context.Context, p plan, cache, only string) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("benchmarks need root, as the host does")
	}
	dir, err := os.MkdirTemp("", "dsec-bench-images-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var all []*subject
	for _, e := range environments() {
		if only != "" && e.name != only {
			continue
		}
		one, err := measureOne(ctx, e, filepath.Join(dir, e.name), cache, p)
		if err != nil {
			return fmt.Errorf("%s: %w", e.name, err)
		}
		all = append(all, one)
		one.print()
	}
	worst(all, p.hotOnly)
	return nil
}

// figure is one start: time to the end of the first useful command, and octets fetched over the link and written to the disk until all is
// on it.
type figure struct {
	seconds, fetched, written float64
	machine, self             time.Duration // CPU time of all, and of this process, which is the far store too
}

// sample are figures of one kind, one each round.
type sample []figure

func (s sample) median() figure {
	pick := func(of func(figure) float64) float64 {
		var v []float64
		for _, f := range s {
			v = append(v, of(f))
		}
		return measure.Median(v)
	}
	return figure{seconds: pick(func(f figure) float64 { return f.seconds }), fetched: pick(func(f figure) float64 { return f.fetched }),
		written: pick(func(f figure) float64 { return f.written })}
}

// start measures what do takes. The page cache is empty before, unless it is to be warm. settle, where there is one, returns when all that was
// fetched has been written.
func start(dir string, l *link, warm bool, do, settle func() error) (f figure, err error) {
	if warm {
		unix.Sync()
	} else if err := measure.DropCaches(); err != nil {
		return f, err
	}
	octets := l.octets.Load()
	sectors, err := written(dir)
	if err != nil {
		return f, err
	}
	busy, err := measure.Busy()
	if err != nil {
		return f, err
	}
	own, begin := measure.Self(), time.Now()
	if err := do(); err != nil {
		return f, err
	}
	f.seconds = time.Since(begin).Seconds()
	f.self = measure.Self() - own
	if f.machine, err = measure.Busy(); err != nil {
		return f, err
	}
	f.machine -= busy
	f.fetched = float64(l.octets.Load() - octets)
	if settle != nil {
		if err := settle(); err != nil {
			return f, err
		}
	}
	// btrfs of the pool is a file system of its own, so all are synced.
	unix.Sync()
	after, err := written(dir)
	f.written = float64(after-sectors) * 512
	return f, err
}

// written is how many sectors of 512 octets the disk of a folder has been given since boot.
func written(dir string) (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, err
	}
	b, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/stat", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if err != nil {
		return 0, fmt.Errorf("the folder for temporary files must lie on a disk whose writes the kernel counts: %w", err)
	}
	var reads, merged, sectors, ms, writes, wmerged, out int64
	if _, err := fmt.Sscan(string(b), &reads, &merged, &sectors, &ms, &writes, &wmerged, &out); err != nil {
		return 0, err
	}
	return out, nil
}

// command makes a sandbox of the layer and does the environment's first useful command.
func command(ctx context.Context, s *measure.Server, layer, text string) error {
	begin := time.Now()
	b, err := s.Client.RunContainer(ctx, client.Options{Layers: []string{layer}})
	if err != nil {
		return err
	}
	lastCreate = time.Since(begin)
	r, err := b.Exec(ctx, "/bin/sh", "-c", text)
	if err == nil && !r.OK() {
		err = fmt.Errorf("the command ended as %v: %s", r.Outcome, tail(string(r.Stdout)+string(r.Stderr)))
	}
	if err != nil {
		return errors.Join(err, b.Stop(ctx))
	}
	ended = append(ended, b)
	return nil
}

// lastCreate is how long the last create of a sandbox took, its command apart.
var lastCreate time.Duration

// ended are sandboxes that are stopped once they are not looked at any more.
var ended []*client.Sandbox

func stopEnded(ctx context.Context) error {
	var err error
	for _, b := range ended {
		err = errors.Join(err, b.Stop(ctx))
	}
	ended = nil
	return err
}
