package keeper

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func linkLayer(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	tree := filepath.Join(dir, "tree")
	os.MkdirAll(tree, 0o755)
	for _, l := range []string{"etc", "tmp"} {
		os.Symlink("../../../../../../"+l, filepath.Join(tree, l))
	}
	img := filepath.Join(dir, "links.erofs")
	if out, err := exec.Command("mkfs.erofs", "--quiet", img, tree).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	return img
}

// A host that dies loses no octet and no end: another takes them, from the first not acknowledged.
func TestHostComesBack(t *testing.T) {
	h := open(t)
	id := h.create()
	ctx := within(t)
	h.rec.mu.Lock()
	h.rec.refuse = func() error { return errors.New("the log is not there") }
	h.rec.mu.Unlock()
	c := sh("seq 1 200000; exit 9")
	c.ID, c.OutputCap = "c", 16<<20
	fill(c)
	if err := h.c.Start(ctx, id, c); err != nil {
		t.Fatal(err)
	}
	c2 := sh("echo quick")
	c2.ID = "c2"
	fill(c2)
	if err := h.c.Start(ctx, id, c2); err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond)
	h.c.Close()
	h.rec.mu.Lock()
	h.rec.refuse = nil
	h.rec.mu.Unlock()
	h.dial()
	l, err := h.c.List(ctx)
	if err != nil || len(l) != 1 || l[0].ID != id || len(l[0].Commands) != 2 || l[0].Birth.Hostname != "box" {
		t.Fatalf("%+v %v", l, err)
	}
	if err := h.c.Deliver(ctx); err != nil {
		t.Fatal(err)
	}
	r := h.rec.wait(t, id, "c")
	want, _ := exec.Command("seq", "1", "200000").Output()
	if string(r.out) != string(want) || r.outcome.Code != 9 || r.gaps {
		t.Errorf("%d octets of %d, %+v", len(r.out), len(want), r.outcome)
	}
	if r := h.rec.wait(t, id, "c2"); string(r.out) != "quick\n" {
		t.Errorf("%q", r.out)
	}
	// A second connection replaces the first, and what ran goes on.
	old := h.c
	h.dial()
	select {
	case <-old.Done():
		if !errors.Is(old.Err(), sandbox.ErrLost) {
			t.Error(old.Err())
		}
	case <-time.After(longest):
		t.Error("the old connection lives")
	}
	old.Close()
	if err := h.c.Deliver(ctx); err != nil {
		t.Fatal(err)
	}
	if r := h.run(id, sh("echo again")); string(r.out) != "again\n" {
		t.Errorf("%q", r.out)
	}
}

// A keeper that is killed takes its sandboxes with it, and the next removes what is left.
func TestKeeperKilled(t *testing.T) {
	h := open(t)
	id := h.create()
	c := sh("setsid sleep 12345 & sleep 12345")
	c.ID = "c"
	fill(c)
	if err := h.c.Start(within(t), id, c); err != nil {
		t.Fatal(err)
	}
	born, err := h.c.List(within(t))
	if err != nil || len(born) != 1 {
		t.Fatal(born, err)
	}
	if err := syscall.Kill(h.c.Info().Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-h.c.Done()
	bound := time.Now().Add(longest)
	for syscall.Kill(born[0].Born.Pid, 0) == nil && time.Now().Before(bound) {
		time.Sleep(time.Millisecond)
	}
	if syscall.Kill(born[0].Born.Pid, 0) == nil {
		t.Error("process 1 outlived its keeper")
	}
	for {
		err := Sweep(h.cfg.Dir)
		if err == nil {
			break
		}
		if !errors.Is(err, sandbox.ErrExists) || time.Now().After(bound) {
			t.Fatal(err)
		}
	}
	if l := leftGroups(h.cfg.Instance); len(l) > 0 {
		t.Errorf("left: %v", l)
	}
	if err := Spawn(within(t), "/proc/self/exe", []string{"keeper"}, h.cfg); err != nil {
		t.Fatal(err)
	}
	if err := Sweep(h.cfg.Dir); !errors.Is(err, sandbox.ErrExists) {
		t.Errorf("sweep of a living keeper: %v", err)
	}
	h.dial()
	if l, err := h.c.List(within(t)); err != nil || len(l) != 0 {
		t.Errorf("%v %v", l, err)
	}
}

func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Skipf("needs the go command: %v", err)
	}
	allowed := map[string]bool{"golang.org/x/sys/unix": true}
	for _, p := range []string{"internal/calm", "internal/keeper", "internal/keeper/init", "internal/memfile", "internal/sandbox", "internal/guest/wire", "internal/guest/session", "internal/confine"} {
		allowed["github.com/dsec-dev/dsec/"+p] = true
	}
	for _, p := range strings.Fields(string(out)) {
		if !allowed[p] {
			t.Errorf("the keeper imports %s", p)
		}
	}
}

// Hosts that come and go at any moment: every command runs once, and nothing of its output is missing.
func TestHostsComeAndGo(t *testing.T) {
	h := open(t)
	id := h.create()
	ctx := within(t)
	var mu sync.Mutex // guards h.c
	client := func() *Client {
		mu.Lock()
		defer mu.Unlock()
		return h.c
	}
	want, err := exec.Command("seq", "1", "3000").Output()
	if err != nil {
		t.Skip("needs seq")
	}
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			case <-time.After(time.Duration(1+i*7%23) * time.Millisecond):
			}
			old := client()
			c, err := Dial(ctx, h.cfg.Dir, DialOptions{Host: "test", Handler: h.rec})
			if err != nil {
				t.Error(err)
				return
			}
			if err := c.Deliver(ctx); err != nil {
				t.Error(err)
			}
			mu.Lock()
			h.c = c
			mu.Unlock()
			old.Close()
		}
	})
	var work sync.WaitGroup
	for w := range 4 {
		work.Go(func() {
			for i := range 15 {
				c := sh("echo x >>/tmp/count; seq 1 3000; exit 6")
				c.ID = fmt.Sprintf("w%d-%d", w, i)
				fill(c)
				for {
					err := client().Start(ctx, id, c)
					if err == nil {
						break
					}
					if ctx.Err() != nil {
						t.Errorf("start: %v", err)
						return
					}
					time.Sleep(time.Millisecond)
				}
				r := h.rec.wait(t, id, c.ID)
				if string(r.out) != string(want) || r.outcome.Code != 6 || r.gaps {
					t.Errorf("%s: %d octets of %d, gaps %v, %+v", c.ID, len(r.out), len(want), r.gaps, r.outcome)
				}
			}
		})
	}
	work.Wait()
	close(done)
	wg.Wait()
	if r := h.run(id, sh("wc -l </tmp/count")); string(r.out) != "60\n" {
		t.Errorf("60 commands ran %q times", r.out)
	}
}
