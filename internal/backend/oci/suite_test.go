package oci_test

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/oci"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

func TestMain(m *testing.M) {
	containertest.Main()
	os.Exit(m.Run())
}

// found is a runtime of this machine; a test of one that is not there is skipped with the reason.
func found(t testing.TB, name string) oci.Runtime {
	t.Helper()
	_, file, _, _ := runtime.Caller(0)
	bin := filepath.Join(filepath.Dir(file), "../../../bin")
	for _, r := range oci.Find(t.Context(), oci.Config{Beside: bin}) {
		if r.Name == name {
			if r.Reason != "" {
				t.Skipf("skip: runtime %s: %s", name, r.Reason)
			}
			return r
		}
	}
	t.Fatalf("no runtime %s is known", name)
	return oci.Runtime{}
}

// under is a driver whose births are the runtime's.
type under struct {
	*containertest.Env
	backend *oci.Backend
	r       oci.Runtime
}

func newUnder(t testing.TB, name string, o containertest.Options) *under {
	t.Helper()
	u := &under{r: found(t, name)}
	if o.Guest == nil {
		o.Guest = containertest.Guest(t)
	}
	u.Env = containertest.New(t, o)
	u.wrap(t)
	return u
}

func (u *under) wrap(t testing.TB) {
	t.Helper()
	b, err := oci.New(u.Env.Backend, u.r)
	if err != nil {
		t.Fatal(err)
	}
	u.backend = b
}

func (u *under) suite() *sandboxtest.Env {
	s := u.Env.Suite()
	s.Backend = u.backend
	s.Few = u.r.Name == oci.GVisor
	s.Restart = func(t testing.TB) sandbox.Backend {
		u.Env.Restart(t)
		u.wrap(t)
		return u.backend
	}
	return s
}

func TestConformance(t *testing.T) {
	for _, name := range oci.Names() {
		t.Run(name, func(t *testing.T) {
			if name == "runc" && os.Getenv("DSEC_TORTURE") == "" {
				t.Skip("skip: it goes crun's ways; make torture runs it")
			}
			sandboxtest.Run(t, newUnder(t, name, containertest.Options{}).suite())
		})
	}
}
