package vm_test

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// What a machine writes, sends and gets takes the time that its bounds say. Half of it is asked for: a bucket is full at the begin.
func TestRates(t *testing.T) {
	w := containertest.NewWorld(t)
	lender := containertest.New(t, containertest.Options{Network: w.Config(t)})
	if why := lender.Backend.NoNetworkOpen(); why != "" {
		t.Skipf("skip: no network open here: %s", why)
	}
	const disk, network, size = 4 << 20, 256 << 10, 384 << 10
	e := vmtest.NewWith(t, lender.Backend, func(c *vm.Config) {
		c.NoTemplates, c.Rates = true, vmm.Rates{Disk: disk, DiskOps: 1000, Network: network}
	})
	w.Answer(t, 81, func(c net.Conn) { c.Write(make([]byte, size)) })
	w.Answer(t, 82, func(c net.Conn) {
		io.CopyN(io.Discard, c, size)
		fmt.Fprintln(c, "got it")
	})
	b := sandboxtest.NewBox(t, e.Suite(), func(s *sandbox.Spec) { s.Network = sandbox.NetworkOpen })
	for name, c := range map[string]struct{ text, want string }{
		"disk": {"dd if=/dev/zero of=/tmp/f bs=1M count=6 2>/dev/null; sync; wc -c </tmp/f", "6291456"},
		"get":  {"nc -w 60 " + w.Outside.String() + " 81 </dev/null | wc -c", "393216"},
		"send": {"head -c 393216 /dev/zero | nc -w 60 " + w.Outside.String() + " 82", "got it"},
	} {
		began := time.Now()
		if got := b.Out(t, c.text); strings.TrimSpace(got) != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if took := time.Since(began); took < 750*time.Millisecond { // 1.5 seconds' worth
			t.Errorf("%s: took %v", name, took)
		}
	}
}

func TestRatesThatAreNone(t *testing.T) {
	for field, r := range map[string]vmm.Rates{"network_rate": {Network: 1000}, "disk_rate": {Disk: -1}, "disk_ops": {DiskOps: 1}} {
		_, err := vm.New(t.Context(), vm.Config{Name: "vm", Instance: "x", StateDir: "/nonexistent", RunDir: "/nonexistent", Rates: r}, vm.Deps{Log: slog.New(slog.DiscardHandler)})
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
}
