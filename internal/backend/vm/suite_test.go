package vm_test

import (
	"os"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

func TestMain(m *testing.M) {
	vmtest.Main()
	containertest.Main()
	os.Exit(m.Run())
}

func TestConformance(t *testing.T) {
	sandboxtest.Run(t, vmtest.New(t).Suite())
}
