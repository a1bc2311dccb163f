package keeper

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// A birth from layers that were seen before lays its files into the upper; what a sandbox sees must be what the first one saw, whose
// files were laid through the overlay.
func TestBirthsOfOneImageAreAlike(t *testing.T) {
	h := open(t)
	for name, change := range map[string]string{
		"plain":             "",
		"no hosts":          "rm etc/hosts",
		"all three":         "printf 'box\\n' >etc/hostname; : >etc/resolv.conf; printf '1.2.3.4 x\\n' >etc/hosts; chmod 0600 etc/hosts",
		"links":             "rm etc/hosts; ln -s ../run/resolv etc/resolv.conf; ln -s ../srv/hosts etc/hosts; mkdir srv; echo 1.2.3.4 y >srv/hosts",
		"own etc":           "chmod 2751 etc; chown 5:6 etc",
		"attributes of etc": "setfattr -n user.a -v b etc",
		"etc is a link":     "mv etc else; ln -s else etc",
		"folders":           "rmdir proc sys; mkdir tmp; chmod 0700 tmp; ln -s tmp var; mkdir dev; chmod 0711 dev",
		"no etc":            "rm -r etc",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			tree := filepath.Join(dir, "tree")
			for _, d := range []string{"bin", "etc", "proc", "sys"} {
				if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			script := "cp /bin/busybox bin/; for a in sh ls find cat stat; do ln -s busybox bin/$a; done; echo '10.1.2.3 mirror' >etc/hosts; " + change
			cmd := exec.Command("sh", "-ec", script)
			cmd.Dir = tree
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Skipf("%s: %v %s", script, err, out)
			}
			img := filepath.Join(dir, "layer.erofs")
			if out, err := exec.Command("mkfs.erofs", "-Enosbcrc", img, tree).CombinedOutput(); err != nil {
				t.Skipf("mkfs.erofs: %v %s", err, out)
			}
			id := filepath.Base(filepath.Dir(dir)) + filepath.Base(dir)
			if err := mountFile(within(t), h.c, id, img); err != nil {
				t.Fatal(err)
			}
			var seen [3]string
			var laid [3]map[string]string
			for i := range seen {
				b := h.birth()
				b.Layers, b.UIDBase = []string{id}, 1_900_000_000 // one range, so that the second takes over the first's lowers
				b.Hosts, b.Resolv = []string{"9.9.9.9 nine"}, []string{"nameserver 8.8.8.8"}
				born, err := h.c.Create(within(t), b)
				if err != nil {
					t.Fatal(err)
				}
				laid[i] = born.Laid
				r := h.run(b.ID, &sandbox.Command{Argv: []string{"/bin/sh", "-c",
					"stat -c '%A %u %g %F %N' /* /etc/* /dev/shm; for f in hostname hosts resolv.conf; do echo = $f; cat /etc/$f; done; echo x >/etc/mine && cat /etc/mine"}})
				if seen[i] = string(r.out) + string(r.err); r.outcome == nil || r.outcome.Kind != sandbox.Exited || r.outcome.Code != 0 {
					t.Errorf("%+v\n%s", r.outcome, seen[i])
				}
				if err := h.c.Destroy(within(t), b.ID); err != nil {
					t.Fatal(err)
				}
			}
			for i := 1; i < len(seen); i++ {
				if d := cmp.Diff(seen[0], seen[i]); d != "" {
					t.Errorf("birth %d sees something else than the first:\n%s", i+1, d)
				}
				if d := cmp.Diff(laid[0], laid[i]); d != "" {
					t.Errorf("birth %d tells otherwise of what was laid than the first:\n%s", i+1, d)
				}
			}
			if len(laid[0]) == 0 {
				t.Error("nothing was laid")
			}
			if err := h.c.UnmountLayer(within(t), id); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// What an image has in the way of the folders and files that every sandbox gets is the image's fault, not the platform's.
func TestImageInTheWayIsInvalid(t *testing.T) {
	for name, change := range map[string]string{
		"etc is a file":           "echo x >etc",
		"etc is a dangling link":  "ln -s /nowhere/etc etc",
		"etc is a link in a ring": "ln -s etc etc",
		"tmp is a file":           "echo x >tmp",
		"proc is a dangling link": "ln -s nothing proc",
		"hosts is a folder":       "mkdir -p etc/hosts/x",
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			cmd := exec.Command("sh", "-ec", change)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v %s", err, out)
			}
			root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(root)
			if _, err := furnish(root, &Birth{Hostname: "box", UIDBase: uint32(os.Getuid())}); !errors.Is(err, sandbox.ErrInvalid) {
				t.Errorf("got %v, want an error of the input", err)
			}
		})
	}
}

// Mapped clones of layers are kept within a bound, used by one birth at a time, and not beyond their layer.
func TestLowersAreKeptAndDropped(t *testing.T) {
	needRoot(t)
	l := &layers{mounted: map[string]bool{"a": true, "b": true}}
	w := newLowers(l)
	fd := func() int {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return int(f.Fd())
	}
	a, b := fd(), fd()
	if rest := w.put(1, []string{"a", "b"}, []int{a, b}); len(rest) != 0 {
		t.Fatalf("left %v", rest)
	}
	got, err := w.take(1, []string{"b", "a"}, -1)
	if err != nil || got[0] != b || got[1] != a {
		t.Fatalf("took %v, %v; want %d %d", got, err, b, a)
	}
	if len(w.kept) != 0 || len(w.order) != 0 {
		t.Error("what was taken is still there")
	}
	l.mounted["b"] = false
	if rest := w.put(1, []string{"a", "b"}, []int{a, b}); len(rest) != 1 || rest[0] != b {
		t.Errorf("of an unmounted layer something was kept: %v", rest)
	}
	if fds := w.drop("a"); len(fds) != 1 || fds[0] != a || len(w.kept) != 0 {
		t.Errorf("dropped %v", fds)
	}
	for i := range keptLowers {
		w.put(uint32(i), []string{"a"}, []int{1000 + i})
	}
	if rest := w.put(keptLowers, []string{"a"}, []int{1}); len(rest) != 1 || rest[0] != 1000 {
		t.Errorf("beyond the bound %v goes", rest)
	}
	if rest := w.put(5, []string{"a"}, []int{2}); len(rest) != 1 || rest[0] != 2 {
		t.Errorf("a second one of a range was kept: %v", rest)
	}
}
