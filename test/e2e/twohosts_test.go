package e2e

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// Two hosts on one machine behind one gateway.
func TestTwoHosts(t *testing.T) {
	t.Parallel()
	hosts, g := apart(t, ownDir(t), 2)
	c := g.client()
	small := g.small(t)
	twoTellOf(t, c, "container")
	options := func(i int) client.Options {
		return client.Options{Layers: []string{small}, Job: "two", Key: fmt.Sprintf("k%d", i), Memory: 64 << 20, Disk: 32 << 20, Pids: 64, Labels: map[string]string{"n": fmt.Sprint(i % 2)}}
	}
	const n = 24
	boxes := make([]*client.Sandbox, n)
	each(4, n, func(i int) {
		var err error
		if boxes[i], err = c.RunContainer(within(t), options(i)); err != nil {
			t.Errorf("create: %v", err)
		}
	})
	if t.Failed() {
		return
	}
	on := map[string][]*client.Sandbox{}
	for _, sb := range boxes {
		on[sb.Data.Host] = append(on[sb.Data.Host], sb)
		if !strings.HasPrefix(sb.ID, sb.Data.Host+"-") {
			t.Errorf("ID %s does not carry its host %s", sb.ID, sb.Data.Host)
		}
	}
	if len(on) != 2 {
		t.Fatalf("placed on %d hosts", len(on))
	}
	for h, list := range on {
		if len(list) < n/6 {
			t.Errorf("only %d of %d on %s", len(list), n, h)
		}
	}
	t.Run("everybody is reached", func(t *testing.T) {
		each(4, n, func(i int) {
			r, err := boxes[i].Run(within(t), client.Cmd{ID: "step", Argv: []string{"sh", "-c", fmt.Sprintf("echo %d | tee /srv/me", i)}})
			if err != nil || string(r.Stdout) != fmt.Sprintf("%d\n", i) {
				t.Errorf("%d: %v, %v", i, r, err)
			}
		})
	})
	t.Run("forks are made beside it", func(t *testing.T) {
		parent := boxes[0]
		fork := func() ([]*client.Sandbox, error) {
			made, failed, err := g.client().Sandbox(parent.ID).Fork(within(t), 4, client.ForkOptions{Key: "fork"})
			if err == nil && len(failed) > 0 {
				err = fmt.Errorf("%d failed: %v", len(failed), failed[0])
			}
			return made, err
		}
		made, err := fork()
		must(t, err)
		again, err := fork()
		must(t, err)
		for i, f := range made {
			if f.Data.Host != parent.Data.Host || f.ID != again[i].ID {
				t.Errorf("fork %s is on %s, again %s; its parent is on %s", f.ID, f.Data.Host, again[i].ID, parent.Data.Host)
			}
			r, err := f.Run(within(t), client.Cmd{ID: "look", Argv: []string{"cat", "/srv/me"}})
			if err != nil || string(r.Stdout) != "0\n" {
				t.Errorf("fork %d has %v, %v", i, r, err)
			}
			must(t, f.Stop(within(t)))
		}
		var far *client.Sandbox
		for h, list := range on {
			if h != parent.Data.Host {
				far = list[0]
			}
		}
		held := options(0)
		held.Key, held.Name = "held/1", ""
		for range 64 { // until the key lies on the other host
			o := held
			o.Key = held.Key
			sb, err := c.RunContainer(within(t), o)
			must(t, err)
			if sb.Data.Host == far.Data.Host {
				_, _, err := c.Sandbox(parent.ID).Fork(within(t), 1, client.ForkOptions{Key: strings.TrimSuffix(held.Key, "/1")})
				if !errors.Is(err, client.ErrExists) {
					t.Errorf("a key that another host has: %v", err)
				}
				must(t, sb.Stop(within(t)))
				return
			}
			must(t, sb.Stop(within(t)))
			held.Key = "x" + held.Key
		}
		t.Error("no key of 64 was placed on the other host")
	})
	t.Run("keys place once", func(t *testing.T) {
		each(4, n, func(i int) {
			again, err := g.client().RunContainer(within(t), options(i))
			if err != nil || again.ID != boxes[i].ID {
				t.Errorf("%d again: %v, %v; want %s", i, again, err, boxes[i].ID)
			}
		})
		list, err := c.List(within(t), &dsecv1.Selector{Job: "two"})
		must(t, err)
		if len(list) != n {
			t.Errorf("%d listed, want %d", len(list), n)
		}
	})
	t.Run("names are unique over hosts", func(t *testing.T) {
		ids := map[string]bool{}
		var mu sync.Mutex
		refused := 0
		each(4, 8, func(i int) {
			o := options(100 + i)
			o.Name = "unique"
			sb, err := c.RunContainer(within(t), o)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				ids[sb.ID] = true
			case errors.Is(err, client.ErrExists):
				refused++
			default:
				t.Errorf("%v", err)
			}
		})
		if len(ids) != 1 || refused != 7 {
			t.Errorf("%d sandboxes of one name, %d refused", len(ids), refused)
		}
		sb, err := c.Get(within(t), "unique")
		must(t, err)
		if got := out(t, sb, "echo by name"); got != "by name\n" {
			t.Errorf("%q", got)
		}
		if b, err := g.dsec("exec", "unique", "--", "echo", "cli").Output(); err != nil || string(b) != "cli\n" {
			t.Errorf("%q, %v", b, err)
		}
		must(t, sb.Stop(within(t)))
		if _, err := c.Sandbox("unique").Exec(within(t), "true"); err == nil {
			t.Error("the name of an ended sandbox still leads to it")
		}
	})
	t.Run("pages over hosts", func(t *testing.T) {
		seen := map[string]int{}
		token, pages := "", 0
		for {
			r, err := c.Sandboxes.List(within(t), request(&dsecv1.ListRequest{Selector: &dsecv1.Selector{Job: "two"}, PageSize: 5, PageToken: token}))
			must(t, err)
			for _, sb := range r.Msg.Sandboxes {
				seen[sb.Id]++
			}
			pages++
			if token = r.Msg.NextPageToken; token == "" || pages > 30 {
				break
			}
		}
		if len(seen) != n || pages < n/5 {
			t.Errorf("%d sandboxes on %d pages", len(seen), pages)
		}
		for id, k := range seen {
			if k != 1 {
				t.Errorf("%s came %d times", id, k)
			}
		}
	})
	t.Run("group calls", func(t *testing.T) {
		r, err := c.PauseAll(within(t), &dsecv1.Selector{Labels: map[string]string{"n": "1"}}, "")
		must(t, err)
		if len(r.Sandboxes) != n/2 || len(r.Errors) > 0 {
			t.Errorf("paused %d, %v", len(r.Sandboxes), r.Errors)
		}
		list, err := c.List(within(t), &dsecv1.Selector{Job: "two", States: []string{"paused"}})
		must(t, err)
		if len(list) != n/2 {
			t.Errorf("%d are paused", len(list))
		}
		j, err := c.JobService.Resume(within(t), request(&dsecv1.ResumeJobRequest{Name: "two"}))
		must(t, err)
		if len(j.Msg.Errors) > 0 {
			t.Errorf("resume: %v", j.Msg.Errors)
		}
		job, err := c.JobService.Get(within(t), request(&dsecv1.GetJobRequest{Name: "two"}))
		must(t, err)
		if job.Msg.Job.Running != n || job.Msg.Job.Ended < 1 {
			t.Errorf("job %v", job.Msg.Job)
		}
	})
	t.Run("a batch over hosts", func(t *testing.T) {
		o := options(0)
		o.Key, o.Job = "batch", "batch"
		made, failed, err := c.RunContainers(within(t), o, 10, true)
		must(t, err)
		where := map[string]bool{}
		for _, sb := range made {
			where[sb.Data.Host] = true
		}
		if len(made) != 10 || len(failed) > 0 || len(where) != 2 {
			t.Errorf("%d made on %d hosts, %v", len(made), len(where), failed)
		}
		again, _, err := c.RunContainers(within(t), o, 10, true)
		must(t, err)
		for i, sb := range again {
			if i < len(made) && sb.ID != made[i].ID {
				t.Errorf("batch again: %s, want %s", sb.ID, made[i].ID)
			}
		}
		r, err := c.StopAll(within(t), &dsecv1.Selector{Job: "batch"})
		if err != nil || len(r.Errors) > 0 || len(r.Sandboxes) != 10 {
			t.Errorf("stop: %v, %v", r, err)
		}
	})
	t.Run("one host dies and comes back", func(t *testing.T) {
		dead := hosts[0]
		id := dead.instance()
		running, err := on[id][0].Start(within(t), sh("for i in 1 2 3 4; do echo $i; sleep 1; done"))
		must(t, err)
		dead.kill()
		// The others work, and new ones are made meanwhile.
		for other, list := range on {
			if other == id {
				continue
			}
			if got := out(t, list[0], "cat /srv/me"); got == "" {
				t.Error("the other host's sandbox does not answer")
			}
		}
		each(4, 6, func(i int) {
			sb, err := c.RunContainer(within(t), options(200+i))
			if err != nil {
				if !errors.Is(err, client.ErrUnavailable) { // whether it was made is not known: the dead one may have it
					t.Errorf("create with a dead host: %v", err)
				}
				return
			}
			if sb.Data.Host == id {
				t.Errorf("%s was placed on a dead host", sb.ID)
			}
		})
		_, err = on[id][1].Exec(within(t), "true")
		if !errors.Is(err, client.ErrUnavailable) {
			t.Errorf("a command on the dead host: %v", err)
		}
		l, err := c.Sandboxes.List(within(t), request(&dsecv1.ListRequest{Selector: &dsecv1.Selector{Job: "two"}, PageSize: 1000}))
		must(t, err)
		if len(l.Msg.Errors) == 0 {
			t.Error("the list does not say that a host is missing")
		}
		must(t, dead.begin())
		must(t, eventually(func() error {
			for i, sb := range on[id] {
				r, err := sb.Exec(within(t), "cat", "/srv/me")
				if err != nil {
					return err
				}
				if !r.OK() {
					return fmt.Errorf("%d: %s", i, describe(r))
				}
			}
			return nil
		}))
		r, err := running.Wait(within(t))
		must(t, err)
		want(t, r, 0, "1\n2\n3\n4\n", "")
	})
	t.Run("a host that ends gracefully leaves its sandboxes", func(t *testing.T) {
		h := hosts[1]
		if err := h.finish(syscall.SIGTERM); err != nil {
			t.Errorf("%v\n%s", err, h.tail())
		}
		if len(h.inside()) == 0 {
			t.Error("its sandboxes are gone")
		}
		must(t, h.begin())
		must(t, eventually(func() error {
			for _, sb := range on[h.instance()] {
				if r, err := sb.Exec(within(t), "true"); err != nil || !r.OK() {
					return fmt.Errorf("%v, %v", r, err)
				}
			}
			return nil
		}))
	})
	r, err := c.StopAll(within(t), &dsecv1.Selector{Job: "two"})
	must(t, err)
	if len(r.Errors) > 0 {
		t.Errorf("stop: %v", r.Errors)
	}
	for _, h := range hosts {
		must(t, eventually(func() error {
			if left := h.leftovers(); len(left) > 0 {
				return errors.New(strings.Join(left, "\n"))
			}
			return nil
		}))
	}
}

// twoTellOf waits until the gateway knows two hosts with a backend.
func twoTellOf(t testing.TB, c *client.Client, backend string) {
	t.Helper()
	must(t, eventually(func() error {
		caps, err := c.Sandboxes.Capabilities(within(t), request(&dsecv1.CapabilitiesRequest{}))
		if err != nil {
			return err
		}
		n := 0
		for _, b := range caps.Msg.Backends {
			if b.Backend == backend {
				n++
			}
		}
		if n != 2 {
			return fmt.Errorf("%d hosts tell of %s, want two", n, backend)
		}
		return nil
	}))
}
