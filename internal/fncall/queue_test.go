package fncall

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func TestQueueServesProjectsInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(1, 100)
		hold, err := q.take(t.Context(), "a", 1, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var order []string
		var wg sync.WaitGroup
		wait := func(project string, n int) {
			for i := range n {
				wg.Go(func() {
					release, err := q.take(t.Context(), project, 1, time.Minute)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					order = append(order, fmt.Sprint(project, i))
					mu.Unlock()
					release()
				})
				synctest.Wait()
			}
		}
		wait("a", 4)
		wait("b", 2)
		wait("c", 1)
		hold()
		wg.Wait()
		if d := cmp.Diff([]string{"a0", "b0", "c0", "a1", "b1", "a2", "a3"}, order); d != "" {
			t.Errorf("-want +got:\n%s", d)
		}
		if w, r := q.length(); w != 0 || r != 0 {
			t.Errorf("%d wait, %d run", w, r)
		}
	})
}

func TestQueueBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newQueue(2, 2)
		one, err := q.take(t.Context(), "a", 1, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		// A pair waits for both places, and who comes later waits behind it.
		got := make(chan string, 3)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			_, err := q.take(ctx, "a", 2, time.Hour)
			got <- fmt.Sprint("pair ", errors.Is(err, context.Canceled))
		}()
		synctest.Wait()
		start := time.Now()
		go func() {
			_, err := q.take(t.Context(), "a", 1, 5*time.Second)
			got <- fmt.Sprint("late ", errors.Is(err, sandbox.ErrExhausted), time.Since(start))
		}()
		synctest.Wait()
		if _, err := q.take(t.Context(), "b", 1, time.Second); !errors.Is(err, sandbox.ErrExhausted) {
			t.Errorf("a third waiter: %v", err)
		}
		if s := <-got; s != "late true 5s" {
			t.Errorf("%s", s)
		}
		cancel()
		if s := <-got; s != "pair true" {
			t.Errorf("%s", s)
		}
		one()
		release, err := q.take(t.Context(), "a", 9, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		if w, r := q.length(); w != 0 || r != 2 {
			t.Errorf("%d wait, %d run", w, r)
		}
		release()
	})
}

func TestRates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &rates{rate: 10, now: time.Now, by: map[string]*bucket{}}
		count := func(project string) (n int) {
			for r.allow(project, 1) == nil {
				n++
			}
			return n
		}
		if n := count("a"); n != 20 {
			t.Errorf("%d at first, want two seconds' worth", n)
		}
		time.Sleep(500 * time.Millisecond)
		if n := count("a"); n != 5 {
			t.Errorf("%d after half a second", n)
		}
		if n := count("b"); n != 20 {
			t.Errorf("%d of another project", n)
		}
	})
}

func TestGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if _, _, err := NewGPUs(nil).Take(t.Context(), "shared"); !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("without a device: %v", err)
		}
		g := NewGPUs([]Device{{Name: "mig", Places: 2}, {Name: "whole"}})
		if _, _, err := g.Take(t.Context(), "half"); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("mode half: %v", err)
		}
		take := func(mode string) (string, func()) {
			t.Helper()
			d, release, err := g.Take(t.Context(), mode)
			if err != nil {
				t.Fatal(err)
			}
			return d.Name, release
		}
		a, giveA := take("shared")
		b, giveB := take("shared")
		c, giveC := take("exclusive")
		if a != "mig" || b != "mig" || c != "whole" {
			t.Errorf("devices %s %s %s", a, b, c)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, _, err := g.Take(ctx, "shared"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a fourth: %v", err)
		}
		got := make(chan string)
		go func() {
			d, release, err := g.Take(t.Context(), "exclusive")
			got <- fmt.Sprint(d.Name, err)
			release()
		}()
		synctest.Wait()
		giveA() // one place of a shared device is no whole one
		giveA()
		synctest.Wait()
		giveB()
		if s := <-got; s != "mig<nil>" {
			t.Errorf("exclusive: %s", s)
		}
		giveC()
	})
}

// Cards are found by their devices, and a configuration that no call could be given is refused with the field.
func TestGPUDevices(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make devices")
	}
	dir := t.TempDir()
	node := func(name string) string {
		p := filepath.Join(dir, name)
		if err := unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
			t.Skipf("can't make a device: %v", err)
		}
		return p
	}
	if got := ProbeGPUs(dir); got != nil {
		t.Errorf("none: %v", got)
	}
	a, b, ctl := node("nvidia0"), node("nvidia1"), node("nvidiactl")
	file := filepath.Join(dir, "nvidia2")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	want := []Device{{Name: "nvidia0", Places: 1, Nodes: []string{a, ctl}}, {Name: "nvidia1", Places: 1, Nodes: []string{b, ctl}}}
	if d := cmp.Diff(want, ProbeGPUs(dir)); d != "" {
		t.Error(d)
	}
	if err := CheckDevices(want); err != nil {
		t.Error(err)
	}
	for field, list := range map[string][]Device{
		"gpu[0].name":   {{Nodes: []string{a}}},
		"gpu[1].name":   {{Name: "x", Nodes: []string{a}}, {Name: "x", Nodes: []string{b}}},
		"gpu[0].places": {{Name: "x", Places: -1, Nodes: []string{a}}},
		"gpu[0].nodes":  {{Name: "x"}},
		"gpu[1].nodes":  {{Name: "x", Nodes: []string{a}}, {Name: "y", Nodes: []string{file}}},
		"gpu[0].env":    {{Name: "x", Nodes: []string{a}, Env: []string{"no value"}}},
	} {
		if err := CheckDevices(list); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}
