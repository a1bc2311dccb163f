package keeper

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// denyRecorder notes refused calls.
type denyRecorder struct {
	*recorder
	got chan denial
}

func (r *denyRecorder) Denied(_ context.Context, _ sandbox.ID, cmd, call, detail string) {
	r.got <- denial{cmd, call, detail}
}

// swapper builds a program that asks for an extent swap as often as told and prints how many got EPERM.
func swapper(t *testing.T, dir string) {
	src := filepath.Join(t.TempDir(), "x.c")
	os.WriteFile(src, []byte(`#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
int main(int n, char **v) {
	int ok = 0;
	prctl(PR_SET_NAME, "sw\nap\"");
	for (int i = 0; i < atoi(v[1]); i++)
		ok += ioctl(0, 0xc028660ful, 0) < 0 && errno == EPERM;
	printf("%d\n", ok);
}
`), 0o644)
	if out, err := exec.Command("gcc", "-static", "-o", filepath.Join(dir, "swap"), src).CombinedOutput(); err != nil {
		t.Skipf("needs a static libc: %s", out)
	}
}

func TestDeniedCallsAreTold(t *testing.T) {
	h := open(t)
	rec := &denyRecorder{recorder: h.rec, got: make(chan denial, 1000)}
	h.c.Close()
	var err error
	if h.c, err = Dial(within(t), h.cfg.Dir, DialOptions{Host: "test", Handler: rec}); err != nil {
		t.Fatal(err)
	}
	if err := h.c.Deliver(within(t)); err != nil {
		t.Fatal(err)
	}
	birth := h.birth()
	if birth.Seccomp, birth.Events, err = confine.Container().CompileWatched(); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(birth.UpperDir, "opt"), 0o755); err != nil {
		t.Fatal(err)
	}
	swapper(t, filepath.Join(birth.UpperDir, "opt"))
	if _, err := h.c.Create(within(t), birth); err != nil {
		t.Fatal(err)
	}
	o := h.run(birth.ID, &sandbox.Command{ID: "one", Argv: []string{"/opt/swap", "1"}, User: "alice"}).outcome
	if o.Kind != sandbox.Exited || o.Code != 0 {
		t.Fatalf("%+v", o)
	}
	select {
	case d := <-rec.got:
		if want := (denial{"one", "ioctl EXT4_IOC_MOVE_EXT", `by "sw\nap\""`}); d != want {
			t.Errorf("told %+v, want %+v", d, want)
		}
	case <-time.After(longest):
		t.Fatal("nothing was told")
	}
	// A flood is answered in full; what is not told one by one is counted.
	if text := string(h.run(birth.ID, &sandbox.Command{ID: "many", Argv: []string{"/opt/swap", "120"}}).out); text != "120\n" {
		t.Errorf("%q of 120 were refused with EPERM", text)
	}
	h.run(birth.ID, &sandbox.Command{ID: "last", Argv: []string{"/opt/swap", "1"}})
	told := 0
	for last := false; !last; {
		select {
		case d := <-rec.got:
			told++
			if _, more, ok := strings.Cut(d.detail, ", after "); ok {
				n, err := strconv.Atoi(strings.TrimSuffix(more, " more"))
				if err != nil {
					t.Fatal(d)
				}
				told += n
			}
			last = d.cmd == "last"
		case <-time.After(longest):
			t.Fatal("the last was not told")
		}
	}
	if told != 121 {
		t.Errorf("%d were told or counted, of 121", told)
	}
	if err := h.c.Destroy(within(t), birth.ID); err != nil {
		t.Fatal(err)
	}
}
