package container

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// laid are the files that every birth lays anew. In a snapshot they are left out unless the sandbox changed them: a new sandbox
// has names of its own (fault B48).
var laid = []string{"etc/hosts", "etc/hostname", "etc/resolv.conf"}

// outside are the places of a root that never hold a sandbox's own files.
var outside = []string{"dev", "proc", "sys"}

// Snapshot captures the upper as it is while the sandbox stands still, so that no file is half-written and no rename half-done.
// Where the pool can copy an upper in a moment the capture reads the copy and the sandbox goes on; else it stands still for as long
// as the capture takes. Either way all that the overlay wrote is already in the upper's file system.
func (x *instance) Snapshot(ctx context.Context) (string, error) {
	c, err := x.use(ctx, "snapshot")
	if err != nil {
		return "", err
	}
	var h handle
	if err := json.Unmarshal(x.handle, &h); err != nil {
		return "", fmt.Errorf("snapshot of %s: read its handle: %w", x.id, err)
	}
	x.snapshots.Lock()
	defer x.snapshots.Unlock()
	thaw, err := x.standStill(ctx, c)
	if err != nil {
		return "", x.said("snapshot", err)
	}
	defer thaw()
	dir, release, err := x.b.uppers.Snapshot(string(x.id))
	switch {
	case err == nil:
		thaw()
		defer func() {
			if err := release(); err != nil {
				x.b.log.Error("release the copy of an upper", "sandbox", x.id, "err", err)
			}
		}()
	case errors.Is(err, sandbox.ErrUnsupported):
		dir = x.upper
	default:
		return "", x.said("snapshot", err)
	}
	d, err := x.b.layers.ImportUpper(ctx, x.spec.Project, dir, x.captureOptions(h, dir))
	if err != nil {
		return "", x.said("snapshot", err)
	}
	return string(d.ID), nil
}

// standStill freezes a sandbox that is not paused; thaw undoes that once.
func (x *instance) standStill(ctx context.Context, c *keeper.Client) (thaw func(), err error) {
	x.mu.Lock()
	frozen := x.frozen
	x.mu.Unlock()
	if frozen {
		return func() {}, nil
	}
	if err := c.Freeze(ctx, x.id); err != nil {
		return nil, err
	}
	return sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownBound)
		defer cancel()
		if err := c.Thaw(ctx, x.id); err != nil && !errors.Is(err, sandbox.ErrNotFound) { // a stop came between
			x.b.log.Error("thaw after a snapshot", "sandbox", x.id, "err", err)
		}
	}), nil
}

func (x *instance) captureOptions(h handle, dir string) layer.Options {
	opt := layer.Options{Exclude: append([]string(nil), outside...), Source: "snapshot of " + string(x.id)}
	now := laidFiles(dir)
	for file, sum := range h.Laid {
		if now[file] == sum {
			opt.Exclude = append(opt.Exclude, file)
		}
	}
	for _, p := range x.spec.Layers {
		opt.Parents = append(opt.Parents, layer.ID(p))
	}
	if h.Mapping == "shifted" {
		opt.Unshift = &layer.IDMap{Outside: x.b.slots.uid(x.slot), Inside: 0, Count: 65536}
	}
	return opt
}

// laidFiles are the hashes of what was laid at birth and is in the upper.
func laidFiles(upper string) map[string]string {
	root, err := unix.Open(upper, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(root)
	sums := map[string]string{}
	for _, name := range laid {
		if sum, ok := hashIn(root, name); ok {
			sums[name] = sum
		}
	}
	return sums
}

// hashIn hashes a small ordinary file below a folder that a tenant writes to: no link is followed and no FIFO waited for.
func hashIn(root int, name string) (string, bool) {
	fd, err := unix.Openat2(root, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return "", false
	}
	f := os.NewFile(uintptr(fd), strings.TrimSuffix(name, "/"))
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > 1<<20 {
		return "", false
	}
	h := sha256.New()
	if _, err := io.Copy(h, io.LimitReader(f, 1<<20)); err != nil {
		return "", false
	}
	return hex.EncodeToString(h.Sum(nil)), true
}
