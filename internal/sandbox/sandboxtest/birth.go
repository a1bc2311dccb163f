package sandboxtest

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func testBirth(t *testing.T, e *Env) {
	t.Run("a new sandbox takes commands at once and its handle is stable", func(t *testing.T) {
		b := e.box(t)
		h := bytes.Clone(b.inst.Handle())
		if len(h) > 4096 {
			t.Errorf("handle of %d octets; want a small one", len(h))
		}
		wantExit(t, b.run(t, sandbox.Command{Argv: []string{"/bin/echo", "hi"}}), 0, "hi\n")
		if !bytes.Equal(h, b.inst.Handle()) {
			t.Error("the handle changed")
		}
	})
	t.Run("two sandboxes see nothing of each other", func(t *testing.T) {
		a, b := e.box(t), e.box(t)
		a.out(t, "echo secret >/tmp/mine; echo more >/dev/shm/mine; echo changed >/srv/base/kept; sleep 1000 & ")
		if got := b.out(t, "ls /tmp /dev/shm; cat /srv/base/kept; ps | grep -c '[s]leep 1000' || true"); strings.Contains(got, "mine") || !strings.Contains(got, "kept\n0") {
			t.Errorf("the other sandbox sees %q", got)
		}
	})
	t.Run("a sandbox's ID can't be born twice", func(t *testing.T) {
		b := e.box(t)
		if _, err := e.Backend.Create(within(t), b.id, b.spec, newRecorder()); !errors.Is(err, sandbox.ErrExists) {
			t.Errorf("second birth of a living ID: %v, want ErrExists", err)
		}
		wantExit(t, b.run(t, sh("exit 0")), 0, "")
	})
	t.Run("an unknown layer is refused by its name", func(t *testing.T) {
		s := e.spec()
		unknown := "sha256:" + strings.Repeat("ab", 32)
		s.Layers = append(s.Layers, unknown)
		_, err := e.Backend.Create(within(t), sandbox.NewID(e.Host), s, newRecorder())
		if !errors.Is(err, sandbox.ErrNotFound) || !strings.Contains(err.Error(), unknown) {
			t.Errorf("%v; want ErrNotFound that names the layer", err)
		}
	})
	t.Run("network open is refused before birth where the backend has none", func(t *testing.T) {
		for _, n := range e.Backend.Capabilities().Networks {
			if n == string(sandbox.NetworkOpen) {
				t.Skip("skip: the backend has network open")
			}
		}
		s := e.spec(func(s *sandbox.Spec) { s.Network = sandbox.NetworkOpen })
		if _, err := e.Backend.Create(within(t), sandbox.NewID(e.Host), s, newRecorder()); !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("%v, want ErrUnsupported", err)
		}
	})
	t.Run("many are born at once, each with its own files and ends", func(t *testing.T) {
		n := e.times(40)
		var wg sync.WaitGroup
		slot := make(chan struct{}, 8)
		for range n {
			wg.Add(1)
			slot <- struct{}{}
			go func() {
				defer wg.Done()
				defer func() { <-slot }()
				e.bornAndGone(t)
			}()
		}
		wg.Wait()
	})
	t.Run("B39: a create that its client gave up leaves nothing", func(t *testing.T) {
		var before []string
		if e.Left != nil {
			before = e.Left(t)
		}
		for i := range e.times(60) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%20)*500*time.Microsecond)
			id, rec := sandbox.NewID(e.Host), newRecorder()
			inst, err := e.Backend.Create(ctx, id, e.spec(), rec)
			cancel()
			if err == nil { // it was faster; then it lives like any other
				if err := inst.Destroy(within(t)); err != nil {
					t.Fatalf("destroy: %v", err)
				}
			}
		}
		e.nothingLeft(t, before)
	})
}

// bornAndGone is one life, with errors only reported: it runs on goroutines of their own.
func (e *Env) bornAndGone(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	b := &box{e: e, id: sandbox.NewID(e.Host), spec: e.spec(), rec: newRecorder()}
	inst, err := e.Backend.Create(ctx, b.id, b.spec, b.rec)
	if err != nil {
		t.Errorf("create: %v", err)
		return
	}
	b.inst = inst
	defer b.destroy(t)
	c := sh("echo $$ >/tmp/x; cat /srv/base/kept")
	c.ID = "only"
	c.Fill(b.spec)
	if err := inst.Start(ctx, &c); err != nil {
		t.Errorf("start: %v", err)
		return
	}
	o, ok := b.rec.waitEnd(c.ID, Patience)
	if !ok || o.Kind != sandbox.Exited || o.Code != 0 || b.rec.text(c.ID, sandbox.Stdout) != "kept\n" {
		t.Errorf("end seen: %v, %s, stdout %q", ok, describe(o), b.rec.text(c.ID, sandbox.Stdout))
	}
}
