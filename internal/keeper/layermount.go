package keeper

import (
	"fmt"
	"os"
)

// MountLayer makes a mount of a layer's files that is attached nowhere, and returns it as a folder. It goes when nothing holds it or a file in it.
func MountLayer(meta, data *os.File, direct bool) (*os.File, error) {
	fds := []int{int(meta.Fd())}
	if data != nil {
		fds = append(fds, int(data.Fd()))
	}
	fd, err := openLayer(fds, direct)
	if err != nil {
		return nil, fmt.Errorf("mount a layer: %w", err)
	}
	return os.NewFile(uintptr(fd), "layer"), nil
}
