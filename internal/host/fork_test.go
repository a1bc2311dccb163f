package host

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

func (r *rig) fork(q *dsecv1.ForkRequest) (*dsecv1.ForkResponse, error) {
	resp, err := sandboxService{r.h}.Fork(context.Background(), connect.NewRequest(q))
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}

func TestFork(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k", func(s *dsecv1.Spec) {
		s.Labels = map[string]string{"l": "1"}
		s.Env = []*dsecv1.EnvVar{{Name: "A", Value: "open"}, {Name: "TOKEN", Value: "create-secret", Secret: true}}
	})
	q := func() *dsecv1.ForkRequest {
		return &dsecv1.ForkRequest{Id: string(b.id), Count: 3, Key: "f", Labels: map[string]string{"m": "2"}, Env: []*dsecv1.EnvVar{{Name: "PW", Value: "fork-secret", Secret: true}}}
	}
	out, err := r.fork(q())
	if err != nil || len(out.Sandboxes) != 3 || len(out.Errors) != 0 {
		t.Fatal(out, err)
	}
	for i, s := range out.Sandboxes {
		f := r.box(sandbox.ID(s.Id))
		if !slices.Equal(f.spec.Layers, append(slices.Clone(b.spec.Layers), out.Layer)) {
			t.Errorf("layers %v on %v", f.spec.Layers, b.spec.Layers)
		}
		if s.Key != forkKey("f", i) || s.Job != b.spec.Job || s.Name != "" || s.Labels["l"] != "1" || s.Labels["m"] != "2" {
			t.Errorf("%v", s)
		}
		f.mustRun(t, "env", "env")
		if text := f.output(t, "env"); !strings.Contains(text, "A=open") || !strings.Contains(text, "TOKEN=create-secret") || !strings.Contains(text, "PW=fork-secret") {
			t.Errorf("environment %q", text)
		}
		for _, rec := range r.records(f) {
			if rec.Stream == 0 && bytes.Contains(rec.Payload, []byte("-secret")) {
				t.Fatalf("a secret lies in record %d (%v)", rec.Seq, rec.Kind)
			}
		}
	}
	again, err := r.fork(q())
	if err != nil || again.Layer != out.Layer || len(again.Sandboxes) != 3 {
		t.Fatal(again, err)
	}
	for i, s := range again.Sandboxes {
		if s.Id != out.Sandboxes[i].Id {
			t.Errorf("the same key made %s beside %s", s.Id, out.Sandboxes[i].Id)
		}
	}
	other := q()
	other.Labels = nil
	if out, err := r.fork(other); err != nil || len(out.Errors) != 3 || out.Errors[0].Code != "already_exists" {
		t.Errorf("the key with another request: %v, %v", out, err)
	}

	// The log has hashes alone: after a restart the values must be given.
	r.stop()
	r.start()
	b = r.box(b.id)
	if _, err := r.fork(&dsecv1.ForkRequest{Id: string(b.id)}); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), "TOKEN") {
		t.Errorf("secrets that are not known: %v", err)
	}
	out, err = r.fork(&dsecv1.ForkRequest{Id: string(b.id), Env: []*dsecv1.EnvVar{{Name: "TOKEN", Value: "again", Secret: true}}})
	if err != nil || len(out.Sandboxes) != 1 {
		t.Fatal(out, err)
	}
	f := r.box(sandbox.ID(out.Sandboxes[0].Id))
	f.mustRun(t, "env", "env")
	if text := f.output(t, "env"); !strings.Contains(text, "TOKEN=again") {
		t.Errorf("environment %q", text)
	}
}

func TestForkRefusals(t *testing.T) {
	r := newRig(t, fake.Options{}, nil)
	b := r.create("k")
	for _, c := range []struct {
		why  string
		q    *dsecv1.ForkRequest
		want error
	}{
		{"count below 0", &dsecv1.ForkRequest{Id: string(b.id), Count: -1}, sandbox.ErrInvalid},
		{"too many", &dsecv1.ForkRequest{Id: string(b.id), Count: maxForks + 1}, sandbox.ErrInvalid},
		{"long key", &dsecv1.ForkRequest{Id: string(b.id), Key: strings.Repeat("k", 1000)}, sandbox.ErrInvalid},
		{"not there", &dsecv1.ForkRequest{Id: "htest1-nothing"}, sandbox.ErrNotFound},
		{"bad environment", &dsecv1.ForkRequest{Id: string(b.id), Env: []*dsecv1.EnvVar{{Name: "A=B"}}}, sandbox.ErrInvalid},
		{"bad lifetime", &dsecv1.ForkRequest{Id: string(b.id), Lifetime: &dsecv1.Lifetime{OnIdle: "explode"}}, sandbox.ErrInvalid},
	} {
		before := len(r.records(b))
		if _, err := r.fork(c.q); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.why, err, c.want)
		}
		if n := len(r.records(b)); n != before {
			t.Errorf("%s: %d records of a call that was refused", c.why, n-before)
		}
	}
	r.h.end(b, sandbox.Cause{Class: sandbox.ClassClient, Reason: "stopped"})
	if err := b.waitEnd(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := r.fork(&dsecv1.ForkRequest{Id: string(b.id)}); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("of one that has ended: %v", err)
	}
}
