package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/client"
)

// Layers of a store that is not local, on a host that unpacks them: they come whole, without a blob daemon, and are there after the host was
// killed.
func TestUnpackedLayersOfAFarStore(t *testing.T) {
	s := onDemand(t, newRemote(t), "[host]\nunpack_layers = true\n")
	big, sum := bigLayer(t, s, 3, 8)
	layers := []string{s.small(t), big}
	sb := s.box(t, func(o *client.Options) { o.Layers = layers })
	look := func(sb *client.Sandbox, when string) {
		t.Helper()
		if got := strings.Fields(out(t, sb, "sha256sum /srv/big"))[0]; got != sum {
			t.Errorf("%s: sum %s, want %s", when, got, sum)
		}
	}
	look(sb, "at first")
	if s.blobd() != 0 {
		t.Error("a blob daemon runs")
	}
	s.kill()
	must(t, s.begin())
	look(s.client().Sandbox(sb.ID), "after the host was killed")
	look(s.box(t, func(o *client.Options) { o.Layers = layers }), "in a second one")
	there, err := os.ReadDir(filepath.Join(s.state, "container", "unpacked"))
	if err != nil || len(there) != 2 {
		t.Errorf("unpacked: %v, %v; want the two layers", there, err)
	}
}
