package calm

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSecond(t *testing.T) {
	for _, c := range []struct {
		pid  int
		tids []int
		want int
	}{
		{100, []int{100}, 0},
		{100, nil, 0},
		{100, []int{100, 101, 102}, 101},
		{100, []int{103, 102, 100}, 102},
		{32760, []int{5, 7, 300, 32760}, 5}, // numbers began anew
		{32760, []int{5, 32760, 32766}, 32766},
		{4194303, []int{4194303, 300, 301}, 300},
	} {
		if got := second(c.pid, c.tids); got != c.want {
			t.Errorf("second(%d, %v) = %d, want %d", c.pid, c.tids, got, c.want)
		}
	}
}

// TestWatch finds by what threads do which one watches the others: of those that have nothing to do it alone wakes again and again.
func TestWatch(t *testing.T) {
	if err := Watch(); err != nil {
		if os.Geteuid() != 0 {
			t.Skipf("needs root: %v", err)
		}
		t.Fatal(err)
	}
	slow := []string{}
	tids := threads(t)
	for _, tid := range tids {
		if read(t, tid, "timerslack_ns") == watchSlack {
			slow = append(slow, tid)
		}
	}
	if len(slow) != 1 || slow[0] == strconv.Itoa(os.Getpid()) {
		t.Fatalf("threads that sleep longer: %v of %v, want one that is not the first", slow, tids)
	}
	before := map[string]int{}
	for _, tid := range tids {
		before[tid] = waits(t, tid)
	}
	// One goroutine computes, without a call that could wait: other threads that work are parked.
	for end, n := time.Now().Add(500*time.Millisecond), 0; time.Now().Before(end); n++ {
	}
	most, woke := "", map[string]int{}
	for _, tid := range tids {
		woke[tid] = waits(t, tid) - before[tid]
		if most == "" || woke[tid] > woke[most] {
			most = tid
		}
	}
	if diff := cmp.Diff(slow[0], most); diff != "" {
		t.Errorf("thread that watches (-slowed +waking): %s\nwakes of each: %v", diff, woke)
	}
}

func threads(t *testing.T) (tids []string) {
	t.Helper()
	es, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		tids = append(tids, e.Name())
	}
	return tids
}

func read(t *testing.T, tid, file string) string {
	t.Helper()
	b, err := os.ReadFile("/proc/" + tid + "/" + file)
	if os.IsNotExist(err) {
		return "" // it ended
	}
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// waits is how often the thread has slept.
func waits(t *testing.T, tid string) int {
	t.Helper()
	for line := range strings.Lines(read(t, tid, "status")) {
		if v, ok := strings.CutPrefix(line, "voluntary_ctxt_switches:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(v))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	return 0
}
