package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestPreempt is a short form of examples/preempt: a trainer of the Python SDK is killed three times, and the service under it. Rewards and
// files are those of a run that nobody disturbed, and each step was done once.
func TestPreempt(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	rollouts, kills := "8", "3"
	if torture {
		rollouts, kills = "64", "10"
	}
	s := newService("", "up") // for its uids, which no other service of this run has
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "python3", filepath.Join(repository(), "examples", "preempt", "run.py"), "--dsec", binary, "--rollouts", rollouts, "--kills", kills,
		"--seed", fmt.Sprint(random(t).Uint32()), "--", "--uid-base", fmt.Sprint(s.uid), "--slots", fmt.Sprint(slots))
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil || !strings.Contains(string(out), "was done once") {
		t.Fatal(err)
	}
	// The service tells the ends of its sandboxes and goes; the last of their processes is then still being reaped.
	must(t, eventually(func() error {
		if left := s.inside(); len(left) > 0 {
			return fmt.Errorf("left behind: %v", left)
		}
		return nil
	}))
}
