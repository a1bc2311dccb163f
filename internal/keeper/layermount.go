package keeper

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
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

// FolderMount makes a mount of a folder that is attached nowhere: read-only and without devices, but with setuid and programs, as a layer's
// is, whatever the mount that the folder lies on says. It stands for a layer that was unpacked there: [Client.MountLayer] takes it as the image.
func FolderMount(dir string) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, fmt.Errorf("mount folder %s: %w", dir, err)
	}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV, Attr_clr: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOEXEC, Propagation: unix.MS_PRIVATE})
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("mount folder %s read-only: %w", dir, err)
	}
	return os.NewFile(uintptr(fd), dir), nil
}
