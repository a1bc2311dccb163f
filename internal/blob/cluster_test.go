package blob

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/store"
)

// A store on a cluster's file system, which is FUSE as 3FS is: the kernel mounts the store's own files, unless that file system takes part in
// passthrough, as other such programs do; then layers come through the daemon.
func TestStoreOnAClusterFileSystem(t *testing.T) {
	for what, passthrough := range map[string]bool{"mounted straight": false, "refused by the kernel": true} {
		t.Run(what, func(t *testing.T) {
			h := newHouse(t, 0, func(*SupervisorConfig) {})
			at := filepath.Join(h.dir, "store")
			back := diskDir(t)
			root, err := fs.NewLoopbackRoot(back)
			do(t, err)
			o := &fs.Options{MountOptions: fuse.MountOptions{DirectMountStrict: true, FsName: "dsec-cluster", MaxWrite: 1 << 20}}
			if !passthrough {
				o.DisabledCapabilities = fuse.CAP_PASSTHROUGH
			}
			server, err := fs.Mount(at, root, o)
			do(t, err)
			t.Cleanup(func() {
				for range 50 {
					if server.Unmount() == nil {
						return
					}
					time.Sleep(100 * time.Millisecond)
				}
				unix.Unmount(at, unix.MNT_DETACH)
			})
			st, err := store.NewDir(at)
			do(t, err)
			c, id, content := importTree(t, st, layer.FormSplit)
			l, err := NewLayers(LayersConfig{Dir: filepath.Join(h.dir, "layers")}, c, st, h, discard())
			do(t, err)
			f, err := l.Files(context.Background(), id)
			do(t, err)
			if l.noFile {
				t.Skip("skip: this kernel mounts no EROFS from files")
			}
			straight := filepath.Dir(f.Meta.Name()) == filepath.Join(at, "blobs")
			if straight == passthrough {
				t.Errorf("metadata %s", f.Meta.Name())
			}
			tree := mountImage(t, f.Meta.Name(), f.Data)
			if b, err := os.ReadFile(filepath.Join(tree, "f")); err != nil || !bytes.Equal(b, content) {
				t.Errorf("wrong octets, %v", err)
			}
			do(t, f.Close())
			do(t, unix.Unmount(tree, unix.MNT_DETACH))
		})
	}
}
