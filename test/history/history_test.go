package history_test

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/test/history"
)

var (
	seedFlag  = flag.Uint64("history.seed", 0, "run this simulated history alone")
	countFlag = flag.Int("history.count", 0, "how many simulated histories; with a seed, how often it is run")
)

func count() int {
	switch {
	case *countFlag > 0:
		return *countFlag
	case *seedFlag > 0:
		return 50
	case testing.Short():
		return 100
	}
	return 2000
}

// TestSimulated runs seeded histories: a real gateway and host over the fake backend, in virtual time, whose processes, machine, disk,
// keeper and store fail at moments that the seed draws. All must keep the rules.
func TestSimulated(t *testing.T) {
	base, until := uint64(1), time.Time{}
	if for_ := os.Getenv("DSEC_TORTURE_FOR"); os.Getenv("DSEC_TORTURE") != "" {
		base = uint64(time.Now().UnixNano()) >> 10
		d, err := time.ParseDuration(for_)
		if err != nil {
			d = 10 * time.Minute
		}
		until = time.Now().Add(d)
	}
	total := int64(count())
	var next, calls, faults, answered, ran atomic.Int64
	for w := range 2 {
		t.Run(fmt.Sprint("worker", w), func(t *testing.T) {
			t.Parallel()
			for !t.Failed() {
				n := next.Add(1) - 1
				if until.IsZero() && n >= total || !until.IsZero() && time.Now().After(until) {
					return
				}
				p := drawn(base + uint64(n))
				if *seedFlag > 0 {
					p = drawn(*seedFlag)
				}
				p.verbose = testing.Verbose() && *seedFlag > 0
				h, _ := inBubble(t, p)
				ran.Add(1)
				calls.Add(int64(len(h.Calls)))
				faults.Add(int64(len(h.Faults)))
				for _, c := range h.Calls {
					if c.Reply == history.Answered {
						answered.Add(1)
					}
				}
				report(t, h)
			}
		})
	}
	t.Cleanup(func() {
		t.Logf("%d histories, %d calls, %d answered, %d faults", ran.Load(), calls.Load(), answered.Load(), faults.Load())
	})
}

// TestEveryPoint crashes one history at each write and sync of its host's file system, by a kill and by a loss of power.
func TestEveryPoint(t *testing.T) {
	for _, seed := range []uint64{3, 8} {
		base := plan{seed: seed, clients: 1, steps: 7, quietNet: true, crashAt: 1 << 30}
		h, ops := inBubble(t, base)
		report(t, h)
		if ops < 50 {
			t.Fatalf("only %d writes and syncs", ops)
		}
		for _, power := range []bool{false, true} {
			t.Run(fmt.Sprintf("seed %d power %v", seed, power), func(t *testing.T) {
				t.Parallel()
				for at := 1; at <= ops && !t.Failed(); at++ {
					p := base
					p.crashAt, p.power = at, power
					h, _ := inBubble(t, p)
					report(t, h)
					if t.Failed() {
						t.Errorf("crashed at write or sync %d of %d", at, ops)
					}
				}
			})
		}
	}
}

func report(t *testing.T, h *history.History) {
	t.Helper()
	bad := history.Check(h)
	if len(bad) == 0 {
		return
	}
	for i, v := range bad {
		if i == 10 {
			t.Errorf("and %d more", len(bad)-i)
			break
		}
		t.Error(v)
	}
	t.Errorf("the history, made small:\n%s", history.Minimal(h, bad[0]))
	t.Errorf("again: go test ./test/history -run TestSimulated -history.seed=%s -history.count=50", strconv.FormatUint(h.Seed, 10))
}
