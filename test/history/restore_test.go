package history_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory/crashfs"
	"github.com/dsec-dev/dsec/test/history"
)

// Sandboxes of one trajectory have folders of their own; at the path that clients name lies a link to that of the last.

func (s *sim) folderOf(id sandbox.ID) string { return filepath.Join(s.root, "inst", string(id)) }

// born lays down what a sandbox begins with: nothing, or the files of the snapshot that it is made of.
func (s *sim) born(id sandbox.ID, spec *sandbox.Spec) {
	dir := s.folderOf(id)
	err := os.MkdirAll(dir, 0o755)
	s.mu.Lock()
	from, some := s.snaps[spec.Layers[len(spec.Layers)-1]]
	s.mu.Unlock()
	if err == nil && some {
		err = os.CopyFS(dir, os.DirFS(from))
	}
	link := s.rootOf(spec.Key)
	if err == nil {
		err = os.Symlink(dir, link+".new")
	}
	if err == nil {
		err = os.Rename(link+".new", link)
	}
	if err != nil {
		s.t.Errorf("lay down the files of %s: %v", id, err)
	}
	lines := s.linesOf(s.filesOf(id, link), link)
	s.mu.Lock()
	s.based[id] = lines
	s.mu.Unlock()
}

func (s *sim) snap(id sandbox.ID) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	layer := fmt.Sprintf("sha256:%064x", 0xabc000+len(s.snaps))
	to := filepath.Join(s.root, "snap", fmt.Sprint(len(s.snaps)))
	if err := os.MkdirAll(to, 0o755); err != nil {
		s.t.Error(err)
	}
	if err := os.CopyFS(to, os.DirFS(s.folderOf(id))); err != nil {
		s.t.Error(err)
	}
	s.snaps[layer] = to
	return layer
}

// filesOf are the files of a sandbox, under the paths at which it has them.
func (s *sim) filesOf(id sandbox.ID, root string) map[string]string {
	dir := s.folderOf(id)
	all := map[string]string{}
	for p, text := range tree(dir) {
		all[root+strings.TrimPrefix(p, dir)] = text
	}
	return all
}

// linesOf counts the lines that steps appended.
func (s *sim) linesOf(files map[string]string, root string) map[string]int {
	n := map[string]int{}
	for _, line := range strings.Split(files[filepath.Join(root, "log")], "\n") {
		if step, ok := strings.CutSuffix(line, ";"); ok {
			n[step]++
		}
	}
	return n
}

// inherit loses the machine with its disk. Another host takes its log from the store, and dies in that now and then, and clients restore what
// they had.
func (s *sim) inherit(c *simClient, p *process) {
	from := s.rec.Now()
	s.mu.Lock()
	s.name, s.fs = heirID, crashfs.New(s.plan.seed+2)
	s.mu.Unlock()
	s.world.KillKeeper()
	s.die(p)
	s.rec.Fault(history.MachineLost, from)
	crash := s.intn(60)
	for i, box := range slices.Concat(s.boxes, s.boxes[:s.intn(3)]) {
		s.mu.Lock()
		fs := s.fs
		s.mu.Unlock()
		if i == 1 && crash > 0 {
			fs.CrashIn(crash)
		}
		c.id[box] = ""
		lost := string(hostID)
		if i >= len(s.boxes) { // once more, where it is now
			lost = ""
			s.given.Store(true)
			s.world.KillKeeper()
			pause(context.Background(), time.Second)
		}
		for range 20 { // until it lives, or nothing of it was left
			if c.restore(box, lost) || strings.Contains(c.why, "not found") {
				break
			}
		}
	}
	s.given.Store(true)
	for _, box := range s.boxes { // what was recorded is answered, and steps go on
		if c.id[box] == "" {
			continue
		}
		for _, a := range s.past(box) {
			c.send(a)
		}
		c.send(c.command(box, "behind", "echo behind"))
	}
	s.mu.Lock()
	s.fs.CrashIn(0)
	fate := s.host
	s.mu.Unlock()
	s.die(fate)
}

// past are commands of a box that some client was answered.
func (s *sim) past(box string) (out []act) {
	c := s.newClient(-2)
	seen := map[string]bool{}
	for _, call := range s.rec.History().Calls {
		if call.Box == box && call.Op == history.Command && call.Reply == history.Answered && strings.HasPrefix(call.Request, "echo ") && !seen[call.Step] && len(out) < 4 {
			seen[call.Step] = true
			out = append(out, c.command(box, call.Step, call.Request))
		}
	}
	return out
}

// restore asks for the sandbox of a box to be made again, and answers what it is asked.
func (c *simClient) restore(box, lost string) bool {
	q := &dsecv1.RestoreRequest{Job: "j", Key: box, LostHost: lost, AcceptTailLoss: !c.chance(4)}
	if id := c.id[box]; id != "" && c.chance(2) {
		q.Job, q.Key, q.Sandbox = "", "", id
	}
	if c.chance(2) {
		q.Policy = "warn"
	}
	for range 10 {
		c.calls++
		q.Id = fmt.Sprintf("r%d-%d-%s", c.n, c.calls, box)
		var last *dsecv1.RestoreResponse
		a := act{op: history.Restore, box: box, step: q.Id, request: restoreText(q), private: true, do: func(ctx context.Context, _ string) (string, int64, error) {
			r, err := c.Restores.Restore(ctx, connect.NewRequest(q))
			if err != nil {
				return "", 0, err
			}
			last = r.Msg
			switch last.GetState() {
			case "restoring":
				return "", 0, connect.NewError(connect.CodeUnavailable, fmt.Errorf("is being restored"))
			case "restored":
				return last.GetSandbox().GetId(), 0, nil
			}
			return last.GetState(), 0, nil
		}}
		if !c.send(a) {
			if q.AcceptTailLoss {
				c.id[box] = "" // another has restored it
				return false
			}
			q.AcceptTailLoss = true
			continue
		}
		if c.chance(4) {
			c.send(a) // the same call answers the same
		}
		switch last.GetState() {
		case "restored":
			c.id[box] = last.GetSandbox().GetId()
			return true
		case "diverged":
			q.Policy = "warn"
		case "asks":
			q.Skip, q.Repeat = nil, nil
			for _, s := range last.GetAsks() {
				if s.GetCanRepeat() && c.chance(2) {
					q.Repeat = append(q.Repeat, s.GetStep())
				} else {
					q.Skip = append(q.Skip, s.GetStep())
				}
			}
		}
	}
	return false
}

func restoreText(q *dsecv1.RestoreRequest) string {
	return fmt.Sprintf("restore %s skip %s repeat %s", map[bool]string{true: "warn", false: "strict"}[q.GetPolicy() == "warn"], strings.Join(q.GetSkip(), ","), strings.Join(q.GetRepeat(), ","))
}

var stepClasses = []*dsecv1.StartRequest{
	{}, {}, {Restore: "repeat"}, {Restore: "never"}, {Restore: "verify", Check: []string{"true"}}, {Restore: "verify", Check: []string{"false"}},
}

// classed gives a step one of the classes, by its name: who asks for it again asks for the same.
func classed(step string) *dsecv1.StartRequest {
	n := 0
	for _, r := range step {
		n = n*31 + int(r)
	}
	return stepClasses[((n%len(stepClasses))+len(stepClasses))%len(stepClasses)]
}
