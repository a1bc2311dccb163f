package firecracker_test

import (
	"os"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

func TestMain(m *testing.M) {
	vmtest.Main()
	containertest.Main()
	os.Exit(m.Run())
}

// real has a backend use the operator's programs.
func real(t *testing.T) func(*vm.Config) {
	t.Helper()
	program := os.Getenv("DSEC_FIRECRACKER")
	if program == "" {
		t.Skip("skip: needs Firecracker (DSEC_FIRECRACKER, DSEC_JAILER): make test-firecracker")
	}
	return func(c *vm.Config) {
		c.Firecracker, c.Jailer = program, os.Getenv("DSEC_JAILER")
	}
}

func TestConformance(t *testing.T) {
	sandboxtest.Run(t, vmtest.New(t, real(t)).Suite())
}
