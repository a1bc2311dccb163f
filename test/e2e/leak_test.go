package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// usage is what a service itself holds, beside what its sandboxes have on the machine.
type usage struct {
	keeper, daemon int // descriptors
	threads        int // of the daemon and the keeper
}

func (s *service) usage() usage {
	s.mu.Lock()
	pid := s.cmd.Process.Pid
	s.mu.Unlock()
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	u := usage{keeper: s.held(), daemon: len(fds)}
	for _, p := range []int{pid, s.keeper()} {
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", p))
		u.threads += len(tasks)
	}
	return u
}

// Creations and stops that fail in every way leave nothing: processes, mounts, cgroups, network devices, folders, descriptors.
func TestNothingLeaks(t *testing.T) {
	t.Parallel()
	s := newService(ownDir(t), "up", "--pool-size", "512m")
	start(t, s)
	c := s.client()
	small := s.small(t)
	options := func(name string) client.Options {
		return client.Options{Layers: []string{small}, Job: "leaks", Labels: map[string]string{"case": name}, Memory: 96 << 20, Disk: 200 << 20, Pids: 100}
	}
	full := func() bool { // something of the pool is in use
		return len(s.uppers()) > 0
	}
	cases := []struct {
		name string
		run  func(t *testing.T, o client.Options)
	}{
		{"stop", func(t *testing.T, o client.Options) {
			each(4, 16, func(i int) {
				sb, err := c.RunContainer(within(t), o)
				if err != nil {
					t.Errorf("create: %v", err)
					return
				}
				if _, err := sb.Exec(within(t), "sh", "-c", "sleep 300 & (setsid sleep 300 &) ; echo x >/srv/x"); err != nil {
					t.Error(err)
				}
				if err := sb.Stop(within(t)); err != nil {
					t.Error(err)
				}
			})
		}},
		{"open network", func(t *testing.T, o client.Options) {
			o.Network = "open"
			each(4, 8, func(i int) {
				sb, err := c.RunContainer(within(t), o)
				if err != nil {
					t.Errorf("create: %v", err)
					return
				}
				if _, err := sb.Exec(within(t), "sh", "-c", "nc -l -p 80 >/dev/null 2>&1 & true"); err != nil {
					t.Error(err)
				}
				if err := sb.Stop(within(t)); err != nil {
					t.Error(err)
				}
			})
		}},
		{"failed creates", func(t *testing.T, o client.Options) {
			each(4, 16, func(i int) {
				bad := o
				switch i % 4 {
				case 0:
					bad.Layers = []string{"sha256:" + strings.Repeat("0", 64)}
				case 1:
					bad.Entrypoint = []string{"/no/entry"}
				case 2:
					bad.Entrypoint, bad.User = []string{"true"}, "nosuch"
				case 3:
					bad.Deadline, bad.Key = time.Millisecond, fmt.Sprintf("late-%d-%d", i, time.Now().UnixNano())
				}
				sb, err := c.RunContainer(within(t), bad)
				if err != nil && bad.Key != "" { // it may have come too late for us only
					if err := c.StopKey(within(t), bad.Job, bad.Key, ""); err != nil {
						t.Errorf("stop by key: %v", err)
					}
				}
				if err == nil {
					if i%4 != 3 {
						waitState(t, sb, "stopped", "failed")
					} else if err := sb.Stop(within(t)); err != nil {
						t.Error(err)
					}
				}
			})
		}},
		{"cancelled clients", func(t *testing.T, o client.Options) {
			each(4, 16, func(i int) {
				other := s.client()
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+i*3)*time.Millisecond)
				sb, err := other.RunContainer(ctx, o)
				if err == nil {
					_, _ = sb.Exec(ctx, "sleep", "300")
				}
				cancel()
			})
			_, err := c.StopAll(within(t), &dsecv1.Selector{Job: "leaks"})
			must(t, err)
			must(t, eventually(func() error { // one may still have been on its way
				list, err := c.List(within(t), &dsecv1.Selector{Job: "leaks"})
				if err != nil || len(list) == 0 {
					return err
				}
				_, err = c.StopAll(within(t), &dsecv1.Selector{Job: "leaks"})
				return errors.Join(err, fmt.Errorf("%d live", len(list)))
			}))
		}},
		{"fork bomb", func(t *testing.T, o client.Options) {
			sb, err := c.RunContainer(within(t), o)
			must(t, err)
			bomb := sh("f() { f | f & }; f; sleep 300")
			bomb.Timeout = 4 * time.Second
			p, err := sb.Start(within(t), bomb)
			must(t, err)
			time.Sleep(2 * time.Second)
			other, err := c.RunContainer(within(t), o)
			must(t, err)
			if got := out(t, other, "echo other"); got != "other\n" {
				t.Errorf("%q", got)
			}
			must(t, other.Stop(within(t)))
			if n := len(s.inside()); n > 100+20 {
				t.Errorf("%d processes over a limit of 100", n)
			}
			r, err := p.Wait(within(t))
			must(t, err)
			if !r.Outcome.PidsHit { // how the shells end that can't fork is their affair
				t.Errorf("%s; want the process limit marked", describe(r))
			}
			if got := out(t, sb, "echo alive"); got != "alive\n" {
				t.Errorf("%q", got)
			}
			_, err = sb.Start(within(t), sh("f() { f | f & }; f; sleep 300"))
			must(t, err)
			time.Sleep(time.Second)
			must(t, sb.Stop(within(t)))
		}},
		{"memory bomb", func(t *testing.T, o client.Options) {
			sb, err := c.RunContainer(within(t), o)
			must(t, err)
			r := exe(t, sb, sh("exec tail /dev/zero"))
			if r.Outcome.Kind != "out_of_memory" {
				t.Errorf("%s", describe(r))
			}
			r = exe(t, sb, sh("tail /dev/zero; echo the shell lives"))
			if !r.Outcome.MemoryHit {
				t.Errorf("%s; want the memory limit marked", describe(r))
			}
			if got := out(t, sb, "echo alive"); got != "alive\n" {
				t.Errorf("%q", got)
			}
			must(t, sb.Stop(within(t)))
		}},
		{"full disk", func(t *testing.T, o client.Options) {
			// Limits that together are more than the pool: the last ones meet a full pool, or are refused.
			var made []*client.Sandbox
			for i := range 4 {
				sb, err := c.RunContainer(within(t), o)
				if err != nil {
					if !errors.Is(err, client.ErrExhausted) {
						t.Errorf("create %d: %v", i, err)
					}
					if text := err.Error(); !strings.Contains(text, "disk") && !strings.Contains(text, "space") {
						t.Errorf("create %d: %v does not name the disk", i, err)
					}
					break
				}
				made = append(made, sb)
				r := exe(t, sb, sh("dd if=/dev/zero of=/srv/big bs=1M count=300; sync; exit 0"))
				if r.Outcome.Kind != "exited" {
					t.Errorf("%s", describe(r))
				}
			}
			// The log goes on, and a full disk can be emptied.
			if len(made) == 0 {
				t.Error("no sandbox was made")
				return
			}
			first := made[0]
			if got := out(t, first, "echo said"); got != "said\n" {
				t.Errorf("%q", got)
			}
			if r := exe(t, first, sh("rm /srv/big; sync; echo removed")); !r.OK() {
				t.Errorf("%s", describe(r))
			}
			for _, sb := range made {
				must(t, sb.Stop(within(t)))
			}
		}},
		{"disk limit of one", func(t *testing.T, o client.Options) {
			o.Disk = 16 << 20
			sb, err := c.RunContainer(within(t), o)
			must(t, err)
			r := exe(t, sb, sh("dd if=/dev/zero of=/srv/big bs=1M count=64; sync"))
			if !r.Outcome.DiskHit {
				t.Errorf("%s; want the disk limit marked", describe(r))
			}
			err = sb.Files().WriteFile(within(t), "/srv/more", make([]byte, 32<<20), 0)
			if !errors.Is(err, client.ErrExhausted) {
				t.Errorf("a write beyond the limit: %v", err)
			}
			must(t, sb.Stop(within(t)))
		}},
		{"sessions, terminals, files, watches", func(t *testing.T, o client.Options) {
			sb, err := c.RunContainer(within(t), o)
			must(t, err)
			for range 4 {
				_, err := sb.Session(within(t), client.SessionOptions{})
				must(t, err)
				tty := terminal(sh("sleep 300"), 24, 80)
				tty.StdinOpen = true
				p, err := sb.Start(within(t), tty)
				must(t, err)
				ctx, cancel := context.WithCancel(within(t))
				go func() { _, _ = p.Stream(ctx, discard{}, discard{}) }()
				go func() {
					_ = sb.Files().Watch(ctx, "/srv", true, func(*dsecv1.WatchResponse) bool { return true })
				}()
				time.Sleep(50 * time.Millisecond)
				cancel()
				must(t, sb.Files().WriteFile(within(t), "/srv/a/b/c", []byte("x"), 0))
			}
			must(t, sb.Pause(within(t)))
			must(t, sb.Stop(within(t)))
		}},
	}
	settle := func() error {
		if err := s.idle(); err != nil {
			return err
		}
		// The pool's file system gives room back in the background.
		if err := eventually(func() error {
			sb, err := c.RunContainer(within(t), options("settle"))
			if err != nil {
				return err
			}
			return sb.Stop(within(t))
		}); err != nil {
			return err
		}
		if err := s.idle(); err != nil {
			return err
		}
		if full() {
			return errors.New("uppers are left")
		}
		return nil
	}
	for _, k := range cases { // once to warm pools, caches and connections
		t.Run(k.name, func(t *testing.T) { k.run(t, options(k.name)) })
		if err := settle(); err != nil {
			t.Fatalf("%s: %v", k.name, err)
		}
	}
	before := s.usage()
	rounds := 1
	if torture {
		rounds = 50
	}
	for range rounds {
		for _, k := range cases {
			k.run(t, options(k.name))
			if err := settle(); err != nil {
				t.Fatalf("%s: %v", k.name, err)
			}
		}
	}
	var after usage
	err := eventually(func() error {
		after = s.usage()
		// Idle connections of the tests' clients are the daemon's descriptors too.
		if after.keeper > before.keeper+4 || after.daemon > before.daemon+16 || after.threads > before.threads+16 {
			return fmt.Errorf("grew from %+v to %+v", before, after)
		}
		return nil
	})
	t.Logf("%+v, then %+v", before, after)
	if err != nil {
		t.Error(err)
	}
}
