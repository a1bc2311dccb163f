package vm_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

// Forks go on with the processes and files of one point, each by itself, and never with its random numbers or its machine-id.
func TestForkOfMemory(t *testing.T) {
	e := vmtest.New(t)
	s := e.Suite()
	b := sandboxtest.NewBox(t, s)
	x := b.Instance()
	fork, ok := x.(sandbox.Forked)
	if !ok {
		t.Fatalf("%T can't be forked", x)
	}
	keys := []sandbox.ForkKey{{Project: "default", Job: "j", Key: "f/1"}, {Project: "default", Job: "j", Key: "f/2"}}
	if e.Backend.Capabilities().Fork != "memory" {
		if _, err := fork.Point(within(t), keys); !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("%v, want ErrUnsupported", err)
		}
		return
	}
	b.As(t, "root", "echo 0123456789abcdef0123456789abcdef >/etc/machine-id; echo kept >/tmp/f")
	// A process that counts and draws: its memory is what a snapshot of files does not have.
	if err := x.Start(within(t), command("long", "i=0; while [ $i -lt 100000 ] && [ ! -e /tmp/stop ]; do i=$((i+1)); echo $i >/tmp/n; "+
		"head -c 8 /dev/urandom | od -An -tx1 >>/tmp/draws; sleep 0.05; done")); err != nil {
		t.Fatal(err)
	}
	count := func(b *sandboxtest.Box) (n int) {
		fmt.Sscan(b.Out(t, "while n=$(cat /tmp/n) && [ -z \"$n\" ]; do sleep 0.01; done; echo $n"), &n) // it is rewritten all the time
		return n
	}
	sandboxtest.Eventually(t, func() bool { return count(b) > 3 }, func() string { return "the command does not count" })
	at := count(b)
	lines := strings.Count(b.Out(t, "cat /tmp/draws"), "\n")
	release, err := fork.Point(within(t), keys)
	if err != nil {
		t.Fatal(err)
	}
	b.Out(t, "echo later >/tmp/later")
	forks := []*sandboxtest.Box{b}
	for _, k := range keys {
		f := sandboxtest.NewBox(t, s, func(s *sandbox.Spec) { s.Project, s.Job, s.Key = k.Project, k.Job, k.Key })
		if !strings.Contains(string(f.Instance().Handle()), `"inside":"`) {
			t.Fatalf("%s is no fork: %s", k.Key, f.Instance().Handle())
		}
		forks = append(forks, f)
	}
	release()
	drawn, ids := map[string]int{}, map[string]bool{}
	for i, f := range forks {
		n := count(f)
		if n < at {
			t.Errorf("box %d counts from %d, want from %d", i, n, at)
		}
		sandboxtest.Eventually(t, func() bool { return count(f) > n+3 }, func() string { return fmt.Sprintf("the command of box %d does not go on", i) })
		if got := f.Out(t, "cat /tmp/f"); got != "kept\n" {
			t.Errorf("box %d: %q", i, got)
		}
		_, got := f.As(t, "root", "cat /etc/machine-id; cat /tmp/later")
		id, rest, _ := strings.Cut(got, "\n")
		if ids[id] || len(id) != 32 {
			t.Errorf("box %d has the machine-id %q", i, id)
		}
		if ids[id] = true; (strings.TrimSpace(rest) == "later") != (i == 0) {
			t.Errorf("box %d: a file made after the fork: %q", i, rest)
		}
		for at, line := range strings.Split(strings.TrimSpace(f.Out(t, "cat /tmp/draws")), "\n") {
			if at >= lines+2 { // what was drawn before the fork is the same in all
				drawn[line]++
			}
		}
		for line := range strings.Lines(f.Out(t, "head -c 16 /dev/urandom | od -An -tx1; head -c 16 /dev/random | od -An -tx1")) {
			drawn[line]++
		}
	}
	for line, n := range drawn {
		if n > 1 {
			t.Errorf("%d boxes drew %q", n, line)
		}
	}
	if len(drawn) < 15 {
		t.Errorf("only %d draws", len(drawn))
	}
	forks[1].Out(t, "echo mine >/tmp/mine")
	for _, i := range []int{0, 2} {
		if got := forks[i].Out(t, "ls /tmp"); strings.Contains(got, "mine") {
			t.Errorf("box %d has a file of box 1", i)
		}
	}
	// A fork can be forked, and what it was made from may go first.
	if err := x.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
	again := sandbox.ForkKey{Project: "default", Job: "j", Key: "g/1"}
	release, err = forks[1].Instance().(sandbox.Forked).Point(within(t), []sandbox.ForkKey{again})
	if err != nil {
		t.Fatal(err)
	}
	g := sandboxtest.NewBox(t, s, func(s *sandbox.Spec) { s.Project, s.Job, s.Key = again.Project, again.Job, again.Key })
	release()
	if got := g.Out(t, "cat /tmp/mine"); got != "mine\n" {
		t.Errorf("the fork of a fork: %q", got)
	}
	for _, f := range append(forks[1:], g) {
		if err := f.Instance().Destroy(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
