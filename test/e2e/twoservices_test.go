package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// Two services, each with facts and a host of its own, on one store: both make the same environment at the same time and sandboxes of it; what one removes the
// other keeps; what both removed is gone, and comes again.
func TestTwoServicesOnOneStore(t *testing.T) {
	t.Parallel()
	t.Run("folder", func(t *testing.T) {
		t.Parallel()
		where := []string{"--store", filepath.Join(ownDir(t), "store")}
		twoServices(t, own(t, where...), own(t, where...), func(*testing.T) {})
	})
	t.Run("bucket", func(t *testing.T) {
		t.Parallel()
		r := newRemote(t)
		a, b := onDemand(t, r, ""), onDemand(t, r, "")
		twoServices(t, a, b, func(t *testing.T) {
			for range 2 { // one condemns, the next removes
				r.Advance(3 * time.Hour)
				var both sync.WaitGroup
				for _, s := range []*service{a, b} {
					both.Go(func() {
						cmd := s.dsec("gc", r.args[1], "--grace", "2h")
						cmd.Env = append(cmd.Env, r.env...)
						if b, err := cmd.CombinedOutput(); err != nil {
							t.Errorf("gc: %v %s", err, b)
						}
					})
				}
				both.Wait()
			}
		})
	})
}

func twoServices(t *testing.T, a, b *service, collect func(*testing.T)) {
	t.Helper()
	both := []*service{a, b}
	data := storetest.Random(41, 12<<20)
	sum := sumOf(data)
	tree := tarOf(entry{name: "srv/big", data: string(data)})
	publish := func(s *service) (string, error) {
		r, err := s.client().ImportLayer(within(t), "ws/big", "test", bytes.NewReader(tree))
		if err == nil {
			_, err = s.client().PublishEnvironment(within(t), &dsecv1.Environment{Name: "env", Base: "base/small", Workspace: "ws/big"})
		}
		return r.GetLayer().GetId(), err
	}
	a.small(t)
	b.small(t)
	options := func(o *client.Options) { o.Environment = "env" }
	sumIn := func(sb *client.Sandbox) error {
		r, err := sb.Run(within(t), sh("sha256sum /srv/big"))
		if err == nil && (!r.OK() || strings.Fields(string(r.Stdout))[0] != sum) {
			err = fmt.Errorf("%s, want sum %s", describe(r), sum)
		}
		return err
	}
	read := func(sb *client.Sandbox) {
		t.Helper()
		if err := sumIn(sb); err != nil {
			t.Error(err)
		}
	}
	var ids [2]string
	each(2, 2, func(i int) { // at the same time
		var err error
		if ids[i], err = publish(both[i]); err != nil {
			t.Error(err)
		}
	})
	if t.Failed() || ids[0] != ids[1] {
		t.Fatalf("layers %v", ids)
	}
	each(6, 6, func(i int) {
		sb, err := both[i%2].tryBox(t, options)
		if err == nil {
			err = errors.Join(sumIn(sb), sb.Stop(within(t)))
		}
		if err != nil {
			t.Error(err)
		}
	})
	late := b.box(t, options) // it reads when the other has removed all
	remove := func(s *service) {
		for _, args := range [][]string{{"env", "rm", "env"}, {"layer", "rm", "ws/big"}, {"layer", "rm", "base/small"}} {
			if b, err := s.dsec(args...).CombinedOutput(); err != nil {
				t.Errorf("dsec %v: %v %s", args, err, b)
			}
		}
	}
	remove(a)
	collect(t)
	if _, err := a.client().GetLayer(within(t), ids[0]); err == nil {
		t.Error("a layer that was removed is still the project's")
	}
	read(late)
	read(b.box(t, options))
	must(t, late.Stop(within(t)))
	remove(b)
	collect(t)
	a.small(t)
	if id, err := publish(a); err != nil || id != ids[0] {
		t.Errorf("made again: %s, %v", id, err)
	}
	read(a.box(t, options))
	if _, err := b.client().GetLayer(within(t), ids[0]); err == nil {
		t.Error("a layer that the other service made again is this one's")
	}
}
