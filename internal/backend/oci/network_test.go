package oci_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/oci"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

// Network open under each runtime, over a restart of the daemon: the outside is reached in the host's name, the host itself is not, and the
// device ends with the sandbox. Host and outside are namespaces of the test.
func TestNetworkOpen(t *testing.T) {
	for _, name := range oci.Names() {
		t.Run(name, func(t *testing.T) {
			w := containertest.NewWorld(t)
			u := newUnder(t, name, containertest.Options{Network: w.Config(t)})
			if c := u.backend.Capabilities(); !slices.Contains(c.Networks, string(sandbox.NetworkOpen)) {
				t.Skipf("skip: no network open on this kernel: %v", c.Features)
			}
			before := u.left(t)
			s := u.spec()
			s.Network = sandbox.NetworkOpen
			id, k := sandbox.NewID(sandbox.NewHostID()), newSink()
			x, err := u.backend.Create(sandboxtest.Within(t), id, s, k)
			if err != nil {
				t.Fatal(err)
			}
			run := func(cmd, text string) (sandbox.Outcome, string) {
				t.Helper()
				was := k.out.Len()
				c := &sandbox.Command{ID: cmd, Argv: []string{"/bin/sh", "-c", text}}
				c.Fill(s)
				if err := x.Start(sandboxtest.Within(t), c); err != nil {
					t.Fatal(err)
				}
				var o sandbox.Outcome
				k.until(t, "end of "+cmd, func() (ok bool) { o, ok = k.ends[cmd]; return ok })
				return o, k.out.String()[was:]
			}
			fetch := "nc -w 10 " + w.Outside.String() + " 80 </dev/null; "
			if _, out := run("c1", fetch+"cat /etc/resolv.conf"); out != w.Host.String()+"\nnameserver "+w.Outside.String()+"\n" {
				t.Errorf("from inside: %q", out)
			}
			if o, out := run("c2", "nc -w 10 "+w.Host.String()+" 80 </dev/null"); o.Code == 0 && strings.TrimSpace(out) != "" {
				t.Errorf("a service of the host was reached: %q", out)
			}
			if got := w.Devices(t); len(got) != 1 {
				t.Errorf("devices of sandboxes: %v, want one", got)
			}
			u.Env.Restart(t)
			u.wrap(t)
			if x, err = u.backend.Recover(sandboxtest.Within(t), id, s, x.Handle(), k); err != nil {
				t.Fatal(err)
			}
			if err := u.backend.Sweep(sandboxtest.Within(t), map[sandbox.ID]bool{id: true}); err != nil {
				t.Fatal(err)
			}
			if _, out := run("c4", fetch); !strings.Contains(out, w.Host.String()) {
				t.Errorf("after a restart the outside is not reached: %q", out)
			}
			if c, err := x.Dial(sandboxtest.Within(t), 81); err == nil {
				c.Close()
				t.Error("a port that nobody listens on was reached")
			} else if !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("a port that nobody listens on: %v, want ErrNotFound", err)
			}
			destroy(t, x)
			if got := w.Devices(t); len(got) != 0 {
				t.Errorf("devices after destroy: %v", got)
			}
			u.same(t, before)
		})
	}
}
