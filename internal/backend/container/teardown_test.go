package container

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Fault B39: what undoes a cancelled create does not run on the cancelled context; a step that fails is tried again together
// with what lies below it, and no step runs again after it succeeded.
func TestTeardown(t *testing.T) {
	var got []string
	broken := true
	var td teardown
	step := func(name string, fail bool) {
		td.push(name, func(ctx context.Context) error {
			if err := ctx.Err(); err != nil {
				t.Errorf("%s ran on a context that is over: %v", name, err)
			}
			got = append(got, name)
			if fail && broken {
				return errors.New("busy")
			}
			return nil
		})
	}
	step("slot", false)
	step("upper", true)
	step("mount", false)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := td.run(ctx); err == nil {
		t.Fatal("a failing step was not reported")
	}
	broken = false
	if err := td.run(ctx); err != nil {
		t.Fatal(err)
	}
	if err := td.run(ctx); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"mount", "upper", "upper", "slot"}, got); d != "" {
		t.Errorf("steps (-want +got):\n%s", d)
	}
}
