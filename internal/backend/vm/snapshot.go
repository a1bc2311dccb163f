package vm

import (
	"context"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// laidFiles are the files that every birth lays anew. In a snapshot they are left out unless the sandbox changed them.
var laidFiles = []string{"etc/hosts", "etc/hostname", "etc/resolv.conf"}

// Snapshot captures the sandbox's own changes as a layer.
func (x *instance) Snapshot(ctx context.Context) (string, error) {
	return "", sandbox.ErrUnsupported
}
