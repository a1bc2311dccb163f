package layer_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A layer that was composed a moment ago is not read again, and one that was removed since is not found.
func TestComposeRemembersDescriptors(t *testing.T) {
	ctx := context.Background()
	c, dir := newCatalogue(t)
	v := publish(t, c, "default", "base/debian", "one")
	refs := []string{v.Ref()}
	_, err := c.Compose(ctx, "default", refs)
	must(t, err)
	for _, p := range objects(t, dir) {
		if strings.HasSuffix(p, ".json") {
			must(t, os.Rename(p, p+"-away"))
		}
	}
	_, err = c.Compose(ctx, "default", refs)
	must(t, err)
	for _, p := range objects(t, dir) {
		if back, ok := strings.CutSuffix(p, "-away"); ok {
			must(t, os.Rename(p, back))
		}
	}
	must(t, c.Remove(ctx, "default", v.Ref()))
	if _, err := c.Compose(ctx, "default", refs); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("after its removal: %v", err)
	}
}

func BenchmarkCompose(b *testing.B) {
	c, _ := newCatalogue(b)
	refs := []string{publish(b, c, "default", "base/debian", "one").Ref()}
	for b.Loop() {
		_, err := c.Compose(context.Background(), "default", refs)
		must(b, err)
	}
}
