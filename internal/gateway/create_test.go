package gateway

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

func TestCreateResolvesAndFillsTheSpec(t *testing.T) {
	c := newCluster(t, 1)
	_, err := c.Layers.PublishEnvironment(context.Background(), connect.NewRequest(&dsecv1.PublishEnvironmentRequest{Environment: &dsecv1.Environment{
		Name: "py", Base: "base", Env: []*dsecv1.EnvVar{{Name: "A", Value: "env"}, {Name: "B", Value: "env"}}, User: "1000", Cwd: "/work",
		Resources: &dsecv1.Resources{Memory: 64 << 20},
	}}))
	if err != nil {
		t.Fatal(err)
	}
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Environment: "py", Env: []*dsecv1.EnvVar{{Name: "B", ValueRaw: []byte{0xff}, Secret: true}}, Resources: &dsecv1.Resources{Pids: 99}})
	spec := c.hosts[0].specs[sb.Id]
	got := map[string]any{"env": spec.Environment, "layers": spec.Layers, "user": spec.User, "cwd": spec.Cwd, "memory": spec.Resources.Memory, "pids": spec.Resources.Pids,
		"disk": spec.Resources.Disk, "job": spec.Job, "network": spec.Network, "project": spec.Project, "total": spec.Lifetime.TotalMs}
	want := map[string]any{"env": "py@1", "layers": []string{c.base}, "user": "1000", "cwd": "/work", "memory": int64(64 << 20), "pids": int64(99),
		"disk": int64(10 << 30), "job": "-", "network": "none", "project": "default", "total": int64(24 * 3600 * 1000)}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if len(spec.Env) != 2 || string(spec.Env[1].ValueRaw) != "\xff" || !spec.Env[1].Secret || spec.Env[0].Secret {
		t.Errorf("%v", spec.Env)
	}
	for name, tc := range map[string]struct {
		q    *dsecv1.CreateRequest
		want error
		text string
	}{
		"unknown layer":       {&dsecv1.CreateRequest{Layers: []string{"bsae"}}, sandbox.ErrNotFound, "did you mean base"},
		"unknown environment": {&dsecv1.CreateRequest{Environment: "pyt"}, sandbox.ErrNotFound, "py"},
		"both":                {&dsecv1.CreateRequest{Environment: "py", Layers: []string{"base"}}, sandbox.ErrInvalid, "give one"},
		"tiny memory":         {&dsecv1.CreateRequest{Resources: &dsecv1.Resources{Memory: 1}}, sandbox.ErrInvalid, "memory"},
		"bad name":            {&dsecv1.CreateRequest{Name: "a\nb"}, sandbox.ErrInvalid, "name"},
		"bad network":         {&dsecv1.CreateRequest{Network: "mesh"}, sandbox.ErrInvalid, "network"},
		"backend":             {&dsecv1.CreateRequest{Backend: "vm"}, sandbox.ErrUnsupported, "vm"},
		"deadline":            {&dsecv1.CreateRequest{DeadlineMs: -1}, sandbox.ErrInvalid, "deadline"},
	} {
		if _, err := c.create(t, tc.q); !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.text) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSameKeyNeverMakesTwo(t *testing.T) {
	c := newCluster(t, 3)
	for i := range 20 {
		q := func() *dsecv1.CreateRequest { return &dsecv1.CreateRequest{Job: "j", Key: fmt.Sprintf("k%d", i)} }
		first := c.mustCreate(t, q())
		again, err := c.create(t, q())
		if err != nil || again.GetSandbox().GetId() != first.Id || !again.Existed {
			t.Fatalf("%v, %v", again, err)
		}
		other := q()
		other.User = "1000"
		if _, err := c.create(t, other); !errors.Is(err, sandbox.ErrExists) {
			t.Errorf("other request: %v", err)
		}
	}
	if c.total() != 20 {
		t.Errorf("%d sandboxes", c.total())
	}
}

// A host that was full at the first attempt and is not at the second must not make a second sandbox.
func TestRetryFindsItBehindAHostThatWasFull(t *testing.T) {
	c := newCluster(t, 3)
	f := c.firstHost("j", "k", "")
	f.mu.Lock()
	f.slots = 0
	f.mu.Unlock()
	q := func() *dsecv1.CreateRequest { return &dsecv1.CreateRequest{Job: "j", Key: "k"} }
	first := c.mustCreate(t, q())
	if c.host(first.Id) == f {
		t.Fatal("the full host took it")
	}
	f.mu.Lock()
	f.slots = 10
	f.mu.Unlock()
	again, err := c.create(t, q())
	if err != nil || again.GetSandbox().GetId() != first.Id {
		t.Fatalf("%v, %v", again, err)
	}
}

// firstHost is the first in the order of a key or name.
func (c *cluster) firstHost(job, key, name string) *fakeHost {
	fleet := fleetOf(c)
	id := orderFirst(fleet, orderOf(job, key, name))
	for _, h := range c.hosts {
		if h.id == id {
			return h
		}
	}
	return nil
}

func TestUnreachableHostMakesAKeyedCreateUnknown(t *testing.T) {
	c := newCluster(t, 2)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Key: "k"})
	c.host(sb.Id).stop()
	if _, err := c.create(t, &dsecv1.CreateRequest{Key: "k"}); !errors.Is(err, rpc.ErrUnavailable) {
		t.Errorf("the host that has it is away: %v", err)
	}
	// Once it counts as down, the error tells the operator which host, since when, and what to do when it is lost for good.
	lost := c.host(sb.Id)
	for i := range 30 { // keys whose first host is the other one: it alone can be asked
		eventually(t, "the error names the lost host", func() bool {
			_, err := c.create(t, &dsecv1.CreateRequest{Key: fmt.Sprintf("other-%d", i)})
			if err == nil || !errors.Is(err, rpc.ErrUnavailable) {
				t.Fatalf("key other-%d: %v", i, err)
			}
			return strings.Contains(err.Error(), lost.addr) && (!strings.Contains(err.Error(), "not all hosts") || strings.Contains(err.Error(), "--host (or gateway.hosts) "+lost.addr) && strings.Contains(err.Error(), "silent for"))
		})
		if i == 2 {
			break
		}
	}
	if c.total() != 1 {
		t.Errorf("%d sandboxes", c.total())
	}
	// Without a key nothing can be double.
	eventually(t, "a create without a key goes to the other host", func() bool {
		r, err := c.create(t, &dsecv1.CreateRequest{})
		return err == nil && c.host(r.Sandbox.Id) != c.host(sb.Id)
	})
	c.host(sb.Id).run(t)
	eventually(t, "the retry finds it", func() bool {
		r, err := c.create(t, &dsecv1.CreateRequest{Key: "k"})
		return err == nil && r.Sandbox.Id == sb.Id && r.Existed
	})
}

// A create that nobody waits for any more leaves nothing that lives when its client gave no key to find it by, and says how to find it
// when it did.
func TestGivenUpCreateIsNotLeaked(t *testing.T) {
	for _, named := range []string{"", "a-name"} {
		c := newCluster(t, 2)
		late := make(chan struct{})
		for _, h := range c.hosts {
			h.late = late
		}
		living := func() (n int) {
			for _, h := range c.hosts {
				h.mu.Lock()
				for _, b := range h.boxes {
					if b.State == "running" {
						n++
					}
				}
				h.mu.Unlock()
			}
			return n
		}
		if err := c.outOfTime(t, &dsecv1.CreateRequest{Name: named}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("deadline: %v", err)
		}
		if named == "" {
			ctx, cancel := context.WithCancel(context.Background())
			before, ended := c.total(), make(chan error, 1)
			go func() {
				_, err := c.Sandboxes.Create(ctx, connect.NewRequest(&dsecv1.CreateRequest{Layers: []string{c.base}}))
				ended <- err
			}()
			eventually(t, "a create is under way", func() bool { return c.total() > before })
			cancel()
			if <-ended == nil {
				t.Error("a cancelled create succeeded")
			}
		}
		eventually(t, "what was given up is stopped", func() bool { return living() == 0 })
		if err := c.outOfTime(t, &dsecv1.CreateRequest{Key: "k"}); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "key k") {
			t.Errorf("with a key: %v", err)
		}
		close(late)
		if living() != 1 {
			t.Errorf("%d live, want the one with a key", living())
		}
	}
}

// outOfTime returns the error of a create that a host has begun when its deadline comes: one that came before that is tried with a longer one.
func (c *cluster) outOfTime(t *testing.T, q *dsecv1.CreateRequest) error {
	t.Helper()
	for before, ms := c.total(), int64(50); ; ms *= 2 {
		q.DeadlineMs = ms
		if _, err := c.create(t, q); c.total() > before || ms > 60_000 {
			return err
		}
	}
}

func TestAnswerLostAfterTheSandboxWasMade(t *testing.T) {
	c := newCluster(t, 3)
	for _, h := range c.hosts {
		h.failNext = fmt.Errorf("going down: %w", rpc.ErrUnavailable)
	}
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Key: "k"}) // the gateway's own retry joins it
	if c.total() != 1 {
		t.Errorf("%d sandboxes, %v", c.total(), sb)
	}
}

func TestNamesAreUniqueAndResolved(t *testing.T) {
	c := newCluster(t, 3)
	for i := range 12 {
		name := fmt.Sprintf("box-%d", i)
		sb := c.mustCreate(t, &dsecv1.CreateRequest{Name: name, Key: fmt.Sprint(i)})
		if _, err := c.create(t, &dsecv1.CreateRequest{Name: name, Key: "other"}); !errors.Is(err, sandbox.ErrExists) {
			t.Errorf("second %s: %v", name, err)
		}
		got, err := c.Sandboxes.Get(context.Background(), connect.NewRequest(&dsecv1.GetRequest{Id: name}))
		if err != nil || got.Msg.Sandbox.Id != sb.Id {
			t.Fatalf("%v, %v", got, err)
		}
	}
	_, err := c.Sandboxes.Get(context.Background(), connect.NewRequest(&dsecv1.GetRequest{Id: "nobody"}))
	if !errors.Is(rpc.FromError(err), sandbox.ErrNotFound) {
		t.Errorf("unknown name: %v", err)
	}
	for _, bad := range []string{"", "A B", "../x", "hzzzzzzzz-aaaaaaaaaaaaaaaa"} {
		_, err := c.Sandboxes.Get(context.Background(), connect.NewRequest(&dsecv1.GetRequest{Id: bad}))
		if err := rpc.FromError(err); !errors.Is(err, sandbox.ErrInvalid) && !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestExhaustedHostsAreNamed(t *testing.T) {
	c := newCluster(t, 2)
	for _, h := range c.hosts {
		h.mu.Lock()
		h.slots = 0
		h.mu.Unlock()
	}
	_, err := c.create(t, &dsecv1.CreateRequest{})
	if !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), "haaaaaaaa") || !strings.Contains(err.Error(), "hbbbbbbbb") {
		t.Error(err)
	}
}

func TestBatch(t *testing.T) {
	c := newCluster(t, 3)
	batch := func(q *dsecv1.CreateBatchRequest) (*dsecv1.CreateBatchResponse, error) {
		if q.Request != nil {
			q.Request.Layers = []string{"base"}
		}
		r, err := c.Sandboxes.CreateBatch(context.Background(), connect.NewRequest(q))
		if err != nil {
			return nil, rpc.FromError(err)
		}
		return r.Msg, nil
	}
	out, err := batch(&dsecv1.CreateBatchRequest{Request: &dsecv1.CreateRequest{Job: "j", Key: "K"}, Count: 60})
	if err != nil || len(out.Sandboxes) != 60 || len(out.Errors) != 0 {
		t.Fatalf("%v, %v", out, err)
	}
	keys := map[string]bool{}
	for _, sb := range out.Sandboxes {
		keys[sb.Key] = true
	}
	for i := range 60 {
		if !keys[fmt.Sprintf("K/%d", i+1)] {
			t.Errorf("no key K/%d", i+1)
		}
	}
	for _, h := range c.hosts {
		if h.creates < 8 {
			t.Errorf("%s made %d of 60", h.id, h.creates)
		}
	}
	again, err := batch(&dsecv1.CreateBatchRequest{Request: &dsecv1.CreateRequest{Job: "j", Key: "K"}, Count: 60})
	if err != nil || len(again.Sandboxes) != 60 || c.total() != 60 {
		t.Fatalf("repeated: %d, %v", c.total(), err)
	}
	for _, h := range c.hosts {
		h.mu.Lock()
		h.slots = 5
		h.mu.Unlock()
	}
	some, err := batch(&dsecv1.CreateBatchRequest{Request: &dsecv1.CreateRequest{Job: "j", Key: "S"}, Count: 20})
	if err != nil || len(some.Sandboxes) != 15 || len(some.Errors) != 5 || some.Errors[0].Code != "resource_exhausted" || !strings.HasPrefix(some.Errors[0].Id, "S/") {
		t.Fatalf("some: %v, %v", some, err)
	}
	for _, h := range c.hosts {
		h.mu.Lock()
		h.slots = 5
		h.mu.Unlock()
	}
	if _, err := batch(&dsecv1.CreateBatchRequest{Request: &dsecv1.CreateRequest{Job: "j", Key: "A"}, Count: 20, All: true}); !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("all: %v", err)
	}
	for _, h := range c.hosts {
		h.mu.Lock()
		for _, b := range h.boxes {
			if strings.HasPrefix(b.Key, "A/") && b.State == "running" {
				t.Errorf("%s runs though not all could be made", b.Key)
			}
		}
		h.mu.Unlock()
	}
	// The same again does not pass off what was stopped as made, and keeps nothing new.
	for _, h := range c.hosts {
		h.mu.Lock()
		h.slots = 100
		h.mu.Unlock()
	}
	if again, err := batch(&dsecv1.CreateBatchRequest{Request: &dsecv1.CreateRequest{Job: "j", Key: "A"}, Count: 20, All: true}); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("all, repeated: %v, %v", again, err)
	}
	for _, h := range c.hosts {
		h.mu.Lock()
		for _, b := range h.boxes {
			if strings.HasPrefix(b.Key, "A/") && b.State == "running" {
				t.Errorf("%s runs after the second try", b.Key)
			}
		}
		h.mu.Unlock()
	}
	for name, q := range map[string]*dsecv1.CreateBatchRequest{
		"none": {Request: &dsecv1.CreateRequest{}}, "many": {Request: &dsecv1.CreateRequest{}, Count: maxBatch + 1}, "no request": {Count: 1},
		"name": {Request: &dsecv1.CreateRequest{Name: "x"}, Count: 2}, "key": {Request: &dsecv1.CreateRequest{Key: strings.Repeat("k", 199)}, Count: 2},
	} {
		if _, err := batch(q); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Fault B39: a stop by key reaches the create that is on its way.
func TestStopByKey(t *testing.T) {
	c := newCluster(t, 3)
	sb := c.mustCreate(t, &dsecv1.CreateRequest{Job: "j", Key: "k"})
	stop := func(q *dsecv1.StopRequest) (*dsecv1.SelectorResult, error) {
		r, err := c.Sandboxes.Stop(context.Background(), connect.NewRequest(q))
		if err != nil {
			return nil, rpc.FromError(err)
		}
		return r.Msg, nil
	}
	r, err := stop(&dsecv1.StopRequest{Job: "j", Key: "k"})
	if err != nil || len(r.Sandboxes) != 1 || r.Sandboxes[0].Id != sb.Id {
		t.Fatalf("%v, %v", r, err)
	}
	if r, err := stop(&dsecv1.StopRequest{Job: "j", Key: "later"}); err != nil || len(r.Sandboxes) != 0 {
		t.Fatalf("%v, %v", r, err)
	}
	if _, err := c.create(t, &dsecv1.CreateRequest{Job: "j", Key: "later"}); err == nil {
		t.Error("born after its stop")
	}
	for name, q := range map[string]*dsecv1.StopRequest{"nothing": {}, "two": {Id: "a", Key: "k"}, "everything": {Selector: &dsecv1.Selector{}},
		"state": {Selector: &dsecv1.Selector{States: []string{"sleepy"}}}} {
		if _, err := stop(q); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestConcurrentCreatesOfOneKey(t *testing.T) {
	c := newCluster(t, 3)
	var wg sync.WaitGroup
	ids := make([]string, 16)
	for i := range ids {
		wg.Go(func() {
			if r, err := c.create(t, &dsecv1.CreateRequest{Key: "one"}); err == nil {
				ids[i] = r.Sandbox.Id
			} else {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("%s and %s", id, ids[0])
		}
	}
}
