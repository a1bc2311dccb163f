package vm_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// kill -9 of a monitor, of the warden, or the end of the host without a farewell, at moments of a sandbox's life that nobody chose: what
// could be kept is kept, and what is destroyed leaves nothing.
func TestCrashAtAnyMoment(t *testing.T) {
	n := 3
	if os.Getenv("DSEC_TORTURE") != "" {
		n = 20
	}
	e := vmtest.New(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range n {
		what := []string{"monitor", "host", "warden"}[i%3]
		id, spec, sink := sandbox.NewID("htests"), small(e), &nobody{}
		type made struct {
			x   sandbox.Instance
			err error
		}
		done := make(chan made, 1)
		go func() {
			x, err := e.Backend.Create(within(t), id, spec, sink)
			if err == nil {
				x.Start(within(t), command("c", "while :; do echo x; done"))
			}
			done <- made{x, err}
		}()
		time.Sleep(time.Duration(r.Int64N(int64(3 * time.Second))))
		switch what {
		case "monitor":
			list, err := warden.NewClient(e.Config.RunDir).List(within(t))
			if err == nil && len(list) > 0 {
				unix.Kill(list[len(list)-1].Pid, unix.SIGKILL)
			}
		case "warden":
			if out, err := exec.Command("pgrep", "-f", "warden --dir "+e.Config.RunDir+" ").Output(); err == nil {
				pid, _ := strconv.Atoi(strings.TrimSpace(string(out)))
				if pid > 0 {
					unix.Kill(pid, unix.SIGKILL)
				}
			}
		}
		m := <-done
		if what == "host" && m.err == nil {
			b := e.Restart(t)
			var err error
			if m.x, err = b.Recover(within(t), id, spec, m.x.Handle(), sink); err != nil {
				t.Fatalf("%s: the sandbox was not kept: %v", what, err)
			}
			if known, err := m.x.Known(within(t), "c"); err != nil || !known {
				t.Errorf("%s: its command is not known: %v, %v", what, known, err)
			}
		}
		if m.err == nil {
			if err := m.x.Destroy(within(t)); err != nil {
				t.Errorf("%s: destroy: %v", what, err)
			}
		} else if errors.Is(m.err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", what, m.err)
		}
		var left []string
		sandboxtest.Eventually(t, func() bool { left = e.Left(t); return len(left) == 0 }, func() string { return what + ": left: " + strings.Join(left, ", ") })
	}
}
