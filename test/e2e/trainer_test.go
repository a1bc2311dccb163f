package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/client"
)

// A trainer that is killed and started again, while the service is killed too: each step runs once, what was done is answered from the
// record, with every durability.
func TestTrainerStartsAgain(t *testing.T) {
	t.Parallel()
	store := filepath.Join(ownDir(t), "store")
	s := own(t, "--keep", "--pool-size", "1g", "--store", store)
	layer := s.small(t)
	for _, durability := range []string{"process", "host", "store"} {
		t.Run(durability, func(t *testing.T) {
			name := "train-" + durability
			const steps = 12
			var last *client.Sandbox
			for life := range 3 {
				c := s.client() // a new process of the trainer
				job, err := c.OpenJob(within(t), name, 0, "")
				must(t, err)
				if life > 0 {
					_, err = job.Resume(within(t))
					must(t, err)
				}
				sb, err := job.RunContainer(within(t), client.Options{Layers: []string{layer}, Key: "r1", Memory: 64 << 20, Disk: 32 << 20, Pids: 64, Durability: durability})
				must(t, err)
				for i := range (life + 1) * steps / 3 {
					cmd := client.Cmd{ID: fmt.Sprint("s", i), Env: map[string]string{"B": "2", "A": "1"}, Argv: []string{"sh", "-c", "echo >>/srv/runs; wc -l </srv/runs"}}
					r, err := sb.Run(within(t), cmd)
					must(t, err)
					if got := strings.TrimSpace(string(r.Stdout)); got != fmt.Sprint(i+1) {
						t.Fatalf("life %d: step %d ran as number %s", life, i, got)
					}
				}
				if life > 0 { // another request under a key that was learned is refused as ever
					if _, err := sb.Run(within(t), client.Cmd{ID: "s0", Argv: []string{"true"}}); !errors.Is(err, client.ErrExists) {
						t.Fatal(err)
					}
				}
				last = sb
				s.kill()
				must(t, s.begin())
			}
			c := s.client()
			sb := c.Sandbox(last.ID)
			must(t, sb.Stop(within(t)))
			must(t, sb.Verdict(within(t), 0.5, map[string]any{"grader": "e2e"}))
			must(t, sb.Refresh(within(t)))
			if sum := sb.Data.Summary; sum.GetSteps() != steps || sum.GetFailed() != 0 || sb.Data.Verdict.GetReward() != 0.5 || sum.GetCpuUs() == 0 {
				t.Errorf("summary %v, verdict %v", sum, sb.Data.Verdict)
			}
			var rows bytes.Buffer
			must(t, c.Export(within(t), client.ExportOptions{Job: name, Reward: ">0"}, &rows))
			if n := strings.Count(rows.String(), "\n"); n != steps {
				t.Errorf("%d rows", n)
			}
		})
	}
	s.stopKept(t)
}
