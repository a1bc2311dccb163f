package container_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/backend/container/containertest"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

func unpacked(c *container.Config) {
	c.Unpack, c.UIDBase = true, container.DefaultUIDBase+1000*65537 // beside an instance that mounts them
}

// What the suite says of layers and snapshots holds on folders too. All of it runs on them with DSEC_UNPACK=1.
func TestConformanceUnpacked(t *testing.T) {
	e := containertest.New(t, containertest.Options{Guest: containertest.Guest(t), Config: unpacked})
	s := e.Suite()
	s.Parts = []string{"layers", "snapshot"}
	sandboxtest.Run(t, s)
}

// look tells what a sandbox sees of /every and of a volume of it, and then of changes that copy files up, replace folders and rename them.
const look = `show() {
	find "$1" ! -type d -exec stat -c '%n|%F|%a|%u:%g|%s|%h|%y|%t:%T' {} + | sort
	find "$1" -type d -exec stat -c '%n|%a|%u:%g|%y' {} + | sort
	find "$1" -type f -exec md5sum {} + | sort
	find "$1" -type l -exec readlink {} +
}
show /every; show /data/every
cd /every
test file -ef sub/hard && echo one file
cat null 2>&1; /data/every/able 2>&1; touch /data/every/x 2>&1
echo more >>file; stat -c '%h %s' file hard sub/hard
chmod 600 group; rm hard able; mkdir able; mv sub moved; rm -r new; mkdir new; ls -la moved new | grep -v total | wc -l
chown 9:9 sparse; stat -c '%s %u' sparse
find . | sort`

// A tree of every type, over a layer that it hides parts of, is the same to programs whether its layers are mounted or unpacked; in sandboxes,
// as a volume and in function calls; after the host went away and came back, too.
func TestSandboxesOnUnpackedLayers(t *testing.T) {
	if err := container.NoErofs(); err != nil {
		t.Skipf("skip: no EROFS here: %v", err)
	}
	see := func(e *containertest.Env) string {
		s := spec(e)
		for _, text := range [][]byte{container.BelowEveryType(), container.EveryType()} {
			d, err := e.Catalogue.ImportTar(t.Context(), "default", bytes.NewReader(text), layer.Options{})
			if err != nil {
				t.Fatal(err)
			}
			s.Layers = append(s.Layers, string(d.ID))
		}
		s.Volumes = []sandbox.Volume{{Layer: s.Layers[2], Path: "/data"}}
		id, x, k := create(t, e, s)
		start(t, s, x, "wait", "while [ ! -e /tmp/go ]; do sleep 0.02; done")
		b := e.Restart(t)
		x, err := b.Recover(t.Context(), id, s, x.Handle(), k)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Sweep(t.Context(), map[sandbox.ID]bool{id: true}); err != nil {
			t.Fatal(err)
		}
		_, out := run(t, s, x, k, "look", look+"; touch /tmp/go")
		k.until(t, "end of wait", func() bool { _, ok := k.ends["wait"]; return ok })
		destroy(t, x)
		calls, err := e.Backend.Calls()
		if err != nil {
			t.Fatal(err)
		}
		end, err := calls.Exec(t.Context(), &fncall.Exec{Layers: s.Layers, Env: []string{"PATH=/bin"}, Limits: fncall.DefaultLimits(),
			Argv: []string{"/bin/sh", "-c", "cat /every/file; find /every ! -type d -exec stat -c '%n|%F|%a|%s|%h|%y' {} + | sort; touch /every/x"}})
		if err != nil {
			t.Fatal(err)
		}
		return out + "call: " + string(end.Stdout) + string(end.Stderr)
	}
	mounted, folders := containertest.New(t, containertest.Options{}), containertest.New(t, containertest.Options{Config: unpacked})
	want, got := see(mounted), see(folders)
	if d := cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")); d != "" {
		t.Errorf("mounted -, unpacked +:\n%s", d)
	}
	for _, part := range []string{"one file\n", "/data/every/odd\n", "call: a file\n", "Read-only file system"} {
		if !strings.Contains(want, part) {
			t.Errorf("nothing of %q in\n%s", part, want)
		}
	}
	if strings.Contains(want, "\n/every/new/below") || strings.Contains(want, "\n/every/sub/gone") {
		t.Errorf("what a layer hides is seen:\n%s", want)
	}
	there, err := os.ReadDir(filepath.Join(folders.Config.StateDir, "unpacked"))
	if err != nil || len(there) != 3 {
		t.Errorf("unpacked: %v, %v", there, err)
	}
	if why := folders.Backend.Capabilities().Features["layers_unpacked"]; why == "" {
		t.Error("it is not told that layers are unpacked")
	}
	info, _ := os.ReadFile("/proc/self/mountinfo")
	if bytes.Contains(info, []byte(folders.Config.StateDir)) {
		t.Errorf("a mount shows on the host:\n%s", info)
	}
}

// One instance changes from mounted layers to folders and back while a sandbox lives: what is in use stays, what is not goes.
func TestUnpackingSwitchedOnAndOff(t *testing.T) {
	if err := container.NoErofs(); err != nil {
		t.Skipf("skip: no EROFS here: %v", err)
	}
	e := containertest.New(t, containertest.Options{Config: unpacked})
	s := spec(e)
	id, x, k := create(t, e, s)
	folder := filepath.Join(e.Config.StateDir, "unpacked", e.Layer)
	if _, err := os.Stat(folder); err != nil {
		t.Fatal(err)
	}
	e.Config.Unpack = false
	e.Config.LayerIdle = 1
	b := e.Restart(t)
	container.Tidy(t.Context(), e.Backend) // before what lives was taken back
	x, err := b.Recover(t.Context(), id, s, x.Handle(), k)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Sweep(t.Context(), map[sandbox.ID]bool{id: true}); err != nil {
		t.Fatal(err)
	}
	container.Tidy(t.Context(), e.Backend)
	if o, out := run(t, s, x, k, "c", "cat /srv/base/kept"); out != "kept\n" {
		t.Errorf("after the switch: %+v, %q", o, out)
	}
	destroy(t, x)
	container.Tidy(t.Context(), e.Backend)
	if _, err := os.Stat(folder); !os.IsNotExist(err) {
		t.Errorf("the folder stays without a use: %v", err)
	}
	_, y, k := create(t, e, s)
	if o, out := run(t, s, y, k, "c", "cat /srv/base/kept"); out != "kept\n" {
		t.Errorf("mounted again: %+v, %q", o, out)
	}
	if !slices.Equal(e.Backend.LayersInUse(), []string{e.Layer}) {
		t.Errorf("in use: %v", e.Backend.LayersInUse())
	}
}
