package host

import (
	"context"
	"slices"
	"sync"
	"testing"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// remembering is a backend that says it forks memory, and writes down what is asked of it.
type remembering struct {
	sandbox.Backend
	mu      sync.Mutex
	open    []sandbox.ForkKey
	points  int
	created []sandbox.ForkKey // while there was a point for them
}

func (r *remembering) Capabilities() sandbox.Capabilities {
	c := r.Backend.Capabilities()
	c.Fork = "memory"
	return c
}

func (r *remembering) Create(ctx context.Context, id sandbox.ID, spec *sandbox.Spec, sink sandbox.Sink) (sandbox.Instance, error) {
	k := sandbox.ForkKey{Project: spec.Project, Job: spec.Job, Key: spec.Key}
	r.mu.Lock()
	if slices.Contains(r.open, k) {
		r.created = append(r.created, k)
	}
	r.mu.Unlock()
	x, err := r.Backend.Create(ctx, id, spec, sink)
	if err != nil {
		return nil, err
	}
	return &forked{x, r}, nil
}

type forked struct {
	sandbox.Instance
	r *remembering
}

func (f *forked) Point(_ context.Context, keys []sandbox.ForkKey) (func(), error) {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	f.r.open, f.r.points = keys, f.r.points+1
	return func() {
		f.r.mu.Lock()
		defer f.r.mu.Unlock()
		f.r.open = nil
	}, nil
}

// Where the backend forks memory, each fork's create goes on from one point, which is given back; a call that is repeated takes none, also for more, and one
// that brings variables begins with files.
func TestForkOfMemoryHasOnePoint(t *testing.T) {
	be := &remembering{}
	r := newRig(t, fake.Options{}, func(_ *Config, d *Deps) {
		be.Backend = d.Backends["container"]
		d.Backends["container"] = be
	})
	b := r.create("k")
	for range 2 {
		out, err := r.fork(&dsecv1.ForkRequest{Id: string(b.id), Count: 3, Key: "f"})
		if err != nil || len(out.Sandboxes) != 3 {
			t.Fatal(out, err)
		}
	}
	// What an earlier call has not made begins with the snapshot's files: the memory has moved on.
	if out, err := r.fork(&dsecv1.ForkRequest{Id: string(b.id), Count: 4, Key: "f"}); err != nil || len(out.Sandboxes) != 4 {
		t.Fatal(out, err)
	}
	if _, err := r.fork(&dsecv1.ForkRequest{Id: string(b.id), Count: 2, Key: "g", Env: []*dsecv1.EnvVar{{Name: "A", Value: "b"}}}); err != nil {
		t.Fatal(err)
	}
	be.mu.Lock()
	defer be.mu.Unlock()
	var keys []string
	for _, k := range be.created {
		keys = append(keys, k.Key)
	}
	slices.Sort(keys)
	if be.points != 1 || !slices.Equal(keys, []string{"f/1", "f/2", "f/3"}) || be.open != nil {
		t.Errorf("%d points, creates from one: %v, still open: %v; want 1, three and none", be.points, keys, be.open)
	}
}
