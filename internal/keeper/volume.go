package keeper

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// composeVolumes makes the places of a birth's volumes in its root and returns a detached, read-only clone of each layer, in order.
func (k *Keeper) composeVolumes(b *Birth, sl slot, root int) ([]int, error) {
	ids := make([]string, len(b.Volumes))
	for i, v := range b.Volumes {
		ids[i] = v.Layer
		if err := volumePlace(root, v.Path, int(b.UIDBase)); err != nil {
			return nil, fmt.Errorf("volume at %s: %w", v.Path, err)
		}
	}
	fds, err := k.layers.clones(ids)
	if err != nil {
		return nil, err
	}
	for i, fd := range fds {
		err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
			Attr_set:  unix.MOUNT_ATTR_IDMAP | unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID,
			Userns_fd: uint64(sl.user)})
		if err != nil {
			closeAll(fds)
			return nil, fmt.Errorf("volume at %s: map ids: %w", b.Volumes[i].Path, err)
		}
	}
	return fds, nil
}

// volumePlace makes the folders of a path that are missing. Process 1 attaches there without following links, so none may be on the
// way.
func volumePlace(root int, p string, uid int) error {
	at := "/"
	for name := range strings.SplitSeq(strings.TrimPrefix(p, "/"), "/") {
		err := makeDir(root, at, name, 0o755, uid)
		at = path.Join(at, name)
		if err == unix.ENOTDIR || err == unix.EEXIST {
			return fmt.Errorf("%s is no folder in the image: %w", at, sandbox.ErrInvalid)
		}
		if err != nil {
			return fmt.Errorf("make %s: %w", at, imageFault(err))
		}
	}
	fd, err := unix.Openat2(root, strings.TrimPrefix(p, "/"), &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS})
	if errors.Is(err, unix.ELOOP) {
		return fmt.Errorf("the path goes through a symbolic link of the image: %w", sandbox.ErrInvalid)
	}
	if err != nil {
		return err
	}
	return unix.Close(fd)
}
