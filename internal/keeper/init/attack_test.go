package initproc

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/guest/wire"
)

// Root inside (with sys_ptrace) and another process of the command's own user try to get at process 1, and at commands in
// the time between their change of user and their exec, while they run in process 1's memory.
func TestNobodyInsideReachesProcess1(t *testing.T) {
	needRoot(t)
	root := tree(t)
	if out, err := exec.Command("gcc", "-O1", "-static", "-o", filepath.Join(root, "bin/attack"), "testdata/attack.c").CombinedOutput(); err != nil {
		t.Skipf("needs gcc and a static libc: %v %s", err, out)
	}
	os.Chown(filepath.Join(root, "bin/attack"), base, base)
	for _, user := range []string{"", "alice"} {
		b := newBox(t, root, nil)
		attack := b.start(wire.Start{User: user, Argv: []string{"attack", "1500"}}, -1)
		if attack.failed != nil {
			t.Fatalf("%+v", attack.failed)
		}
		// A long PATH keeps commands before their exec for longer.
		path := "PATH=" + strings.Repeat("/nosuch:", 400) + "/bin"
		for {
			select {
			case <-attack.exited:
			default:
				p := b.start(wire.Start{User: "alice", Argv: []string{"true"}, Env: []string{path}}, -1)
				if p.failed != nil {
					t.Fatalf("%+v", p.failed)
				}
				b.wait(p.exited)
				for _, f := range []*os.File{p.stdin, p.out, p.err} {
					f.Close()
				}
				continue
			}
			break
		}
		got := attack.finish("")
		if got.Code != 0 || got.Out != "seen 1\n" {
			t.Errorf("as %q: %+v", user, got)
		}
	}
}
