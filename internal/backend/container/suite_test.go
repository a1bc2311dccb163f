package container_test

import (
	"os"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

func TestMain(m *testing.M) {
	containertest.Main()
	os.Exit(m.Run())
}

func TestConformance(t *testing.T) {
	sandboxtest.Run(t, containertest.New(t, containertest.Options{Guest: containertest.Guest(t)}).Suite())
}
