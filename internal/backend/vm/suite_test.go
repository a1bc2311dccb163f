package vm_test

import (
	"os"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/test/firecracker"
)

func TestMain(m *testing.M) {
	vmtest.Main()
	if len(os.Args) > 1 && os.Args[1] == "firecracker" {
		os.Exit(firecracker.Main(os.Args[2:]))
	}
	containertest.Main()
	os.Exit(m.Run())
}

// The whole suite takes some minutes on translated machines: `make torture` runs it, on both kinds of machine; `make test` runs what is about
// the machine rather than about what is the same in a container.
func TestConformance(t *testing.T) {
	e := vmtest.New(t).Suite()
	if os.Getenv("DSEC_TORTURE") == "" {
		e.Parts = []string{"session", "port", "snapshot", "recovery"}
	}
	sandboxtest.Run(t, e)
}

func TestConformanceOfVM(t *testing.T) {
	if os.Getenv("DSEC_TORTURE") == "" {
		t.Skip("skip: make torture runs it")
	}
	sandboxtest.Run(t, vmtest.New(t, func(c *vm.Config) { c.Name = "vm" }).Suite())
}
