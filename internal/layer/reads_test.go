package layer_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

func random(seed byte, n int) string {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return string(b)
}

// What was read lies in front: small files whole, of a large one the parts that were read.
func TestRelayoutRead(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	const chunk = erofs.ChunkSize
	big := random(1, 20*chunk+100)
	const hole = 64 << 10 // the least that is one
	holes := random(2, 10*hole)
	holes = holes[:2*hole] + strings.Repeat("\x00", 3*hole) + holes[5*hole:]
	d := importSplit(t, c, layer.Options{}, file("big", big), file("twin", big), file("holes", holes), file("cold", random(3, 3*chunk)), file("s1", "one"),
		file("s2", "two"), file("empty", ""), hardlink("link", "s2"), folder("d"), file("d/zeros", strings.Repeat("\x00", chunk)))
	before := shown(t, mountForm(t, dir, d.Forms[0]))
	// where finds the octets of a content in the form's file.
	where := func(f layer.Form, part string) int64 {
		t.Helper()
		b, err := os.ReadFile(blobPath(dir, f.Data.Digest))
		must(t, err)
		at := bytes.Index(b, []byte(part))
		if at < 0 {
			t.Fatal("not there")
		}
		return int64(at)
	}
	f := d.Forms[0]
	bigAt, holesAt := where(f, big[:4096]), where(f, holes[:4096])
	reads := []layer.Range{
		{where(f, "two"), 4096},
		{bigAt + 5*chunk + 100, chunk}, {bigAt + 20*chunk, 100}, // of the sixth, seventh and last chunk
		{holesAt + 2*hole + 10, 1}, // behind the hole
		{where(f, "one"), 1},
		{bigAt + 1, 1}, {-5, 10}, {f.Data.Size + 5, 1 << 62}, {0, -1},
	}
	paths, err := c.FilesAt(ctx, d.ID, f.Data.Digest, reads)
	must(t, err)
	if diff := cmp.Diff([]string{"link", "big", "holes", "s1"}, paths); diff != "" {
		t.Error(diff)
	}
	d, err = c.RelayoutRead(ctx, d.ID, f.Data.Digest, reads)
	must(t, err, c.Verify(ctx, d.ID))
	g := d.Forms[0]
	if want := int64(4096 + 3*chunk + 4096 + chunk + 4096); g.Data.Hot != want {
		t.Errorf("hot %d, want %d", g.Data.Hot, want)
	}
	if g.Data.Size != f.Data.Size {
		t.Errorf("%d octets, were %d", g.Data.Size, f.Data.Size)
	}
	for part, want := range map[string]int64{"two": 0, big[:4096]: 4096, big[5*chunk : 5*chunk+4096]: 4096 + chunk, big[20*chunk:]: 4096 + 3*chunk,
		holes[5*hole : 5*hole+4096]: 8192 + 3*chunk, "one": 8192 + 4*chunk} {
		if at := where(g, part); at != want {
			t.Errorf("%.4q at %d, want %d", part, at, want)
		}
	}
	if diff := cmp.Diff(before, shown(t, mountForm(t, dir, g))); diff != "" {
		t.Error(diff)
	}
	// Laid out anew once more, from what lies in parts now; most of the file is whole in front.
	at := where(g, big[8*chunk:8*chunk+4096])
	d, err = c.RelayoutRead(ctx, d.ID, g.Data.Digest, []layer.Range{{at, 12*chunk - 1}, {4096, 3 * chunk}, {where(g, big[chunk:chunk+4096]), 4 * chunk}, {where(g, big[7*chunk:7*chunk+4096]), 1}})
	must(t, err, c.Verify(ctx, d.ID))
	h := d.Forms[0]
	if where(h, big[:4096]) != 0 || where(h, big[19*chunk:]) != 19*chunk || h.Data.Hot != 20*chunk+4096 {
		t.Errorf("%+v, %d", h.Data, where(h, big[19*chunk:]))
	}
	if diff := cmp.Diff(before, shown(t, mountForm(t, dir, h))); diff != "" {
		t.Error(diff)
	}
	if _, err := c.RelayoutRead(ctx, d.ID, "sha256:"+strings.Repeat("0", 64), nil); !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}
	roundTrip(t, c, d.ID)
	// In front stays in front when it is merged.
	m, err := c.Merge(ctx, []layer.ID{d.ID})
	must(t, err)
	if m.ID != d.ID {
		t.Error("another layer")
	}
}
