package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/client"
)

// refusedStart begins a service that must refuse, and returns why.
func (s *service) refusedStart(t testing.TB, want ...string) {
	t.Helper()
	err := s.begin()
	if err == nil {
		t.Fatalf("it started with %v, want a refusal", s.argv())
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the refusal does not name %q: %v", w, err)
		}
	}
}

// What a start can't take back it leaves alone: living sandboxes outlast a start with another log, another range of uids or fewer slots.
func TestStartLeavesTheLiving(t *testing.T) {
	t.Parallel()
	s := own(t, "--keep")
	small := s.small(t)
	var boxes []*client.Sandbox
	for range 3 {
		sb, err := s.client().RunContainer(within(t), client.Options{Layers: []string{small}, Memory: 64 << 20, Disk: 32 << 20, Pids: 64})
		must(t, err)
		boxes = append(boxes, sb)
	}
	must(t, s.finish(os.Interrupt))
	uid, args := s.uid, s.args

	s.uid = uid + 3*uidsPerBox
	s.refusedStart(t, "--uid-base", fmt.Sprint(uid), fmt.Sprint(s.uid))
	s.uid = uid
	s.args = append(args, "--slots", "1")
	s.refusedStart(t, "--slots 1", fmt.Sprintf("--slots %d", slots))
	s.args = args
	log := filepath.Join(s.state, "log")
	must(t, os.Rename(log, log+".away"))
	s.refusedStart(t, "log", log, "--forget-unknown", "3 living sandboxes")
	must(t, os.RemoveAll(log))
	must(t, os.Rename(log+".away", log))

	must(t, s.begin())
	for _, sb := range boxes {
		r, err := s.client().Sandbox(sb.ID).Exec(within(t), "echo", "alive")
		if err != nil || string(r.Stdout) != "alive\n" {
			t.Errorf("%s after the refused starts: %v %v", sb.ID, r, err)
		}
	}
	// The operator's word ends them.
	must(t, s.finish(os.Interrupt))
	must(t, os.RemoveAll(log))
	s.args = append(withoutFlag(args, "--keep"), "--forget-unknown")
	must(t, s.begin())
	if left := s.inside(); len(left) > 0 {
		t.Errorf("after --forget-unknown: %v", left)
	}
}

func withoutFlag(args []string, flag string) []string {
	var out []string
	for _, a := range args {
		if a != flag {
			out = append(out, a)
		}
	}
	return out
}

// A range that can't be is refused before anything is made.
func TestUIDRangeIsChecked(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	for _, c := range []struct{ uid, slots, want string }{
		{"0", "10", "--uid-base 0"},
		{"1000", "10", "--uid-base 1000"},
		{"65535", "1", "--uid-base 65535"},
		{"4294900000", "2", "--uid-base 4294900000"},
		{"65536", "65535", "--slots 65535"},
		{"65536", "0", "--slots 0"},
		{"65536", "-1", "--slots -1"},
	} {
		s := newService(ownDir(t), "host")
		s.args = []string{"--uid-base", c.uid, "--slots=" + c.slots, "--token-file", s.writeToken(t)}
		s.refusedStart(t, c.want)
		must(t, s.nothingLeft())
	}
}

func (s *service) writeToken(t testing.TB) string {
	t.Helper()
	must(t, os.MkdirAll(s.dir, 0o700))
	file := filepath.Join(s.dir, "token")
	must(t, os.WriteFile(file, []byte("0123456789abcdef0123456789abcdef\n"), 0o600))
	return file
}
