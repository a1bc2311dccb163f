package initproc

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/guest/wire"
	"golang.org/x/sys/unix"
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

// A START that isn't one is refused, and process 1 lives on.
func TestMalformedStarts(t *testing.T) {
	b := newBox(t, tree(t), nil)
	null := must(os.OpenFile("/dev/null", os.O_RDWR, 0))(t, "null")
	defer null.Close()
	fd := int(null.Fd())
	rnd := rand.New(rand.NewPCG(3, 4))
	valid := wire.Start{User: "alice", Cwd: "/tmp", Argv: []string{"true", "x"}, Env: []string{"A=b", "PATH=/bin"}, Rows: 1}.Append(nil)
	started := 0
	for i := range 3000 {
		body := append([]byte(nil), valid...)
		for range rnd.IntN(4) {
			body[rnd.IntN(len(body))] ^= 1 << rnd.IntN(8)
		}
		body = body[:len(body)-rnd.IntN(2)*rnd.IntN(len(body))]
		if rnd.IntN(8) == 0 {
			body = append(body, byte(i))
		}
		fds := []int{fd, fd, fd}[:3-rnd.IntN(2)*rnd.IntN(3)]
		p := b.register()
		if err := b.conn.WriteFrame(wire.Frame{Type: wire.TStart, ID: p.id, Body: body, FDs: fds}); err != nil {
			t.Fatal(err)
		}
		b.wait(p.started)
		if p.failed == nil {
			started++
			b.wait(p.exited)
			unix.Close(p.pidfd)
			if p.master != nil {
				p.master.Close()
			}
			if p.listener >= 0 {
				unix.Close(p.listener)
			}
		} else if p.failed.Text == "" || p.failed.Stage < wire.StageUser || p.failed.Stage > wire.StageConfine {
			t.Fatalf("%q: %+v", body, *p.failed)
		}
	}
	if started == 0 || started == 3000 {
		t.Errorf("%d of 3000 started", started)
	}
	p := b.register() // its answer: the last frame is done with
	b.conn.Send(wire.TPing, p.id, nil)
	b.wait(p.exited)
	// Nothing was kept.
	if open, err := os.ReadDir("/proc/" + strconv.Itoa(b.pid) + "/fd"); err != nil || len(open) > 7 {
		out, _ := exec.Command("ls", "-l", "/proc/"+strconv.Itoa(b.pid)+"/fd").Output()
		t.Errorf("process 1 has %d descriptors, %v\n%s", len(open), err, out)
	}
}
