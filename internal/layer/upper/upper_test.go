package upper_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer/upper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const poolSize = 512 << 20

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

func must(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// open opens a pool with the driver, or skips the test with the driver's own reason.
func open(t *testing.T, driver, state string) *upper.Pool {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root to mount")
	}
	p, err := upper.Open(context.Background(), upper.Config{State: state, Driver: driver, Size: poolSize}, quiet)
	if errors.Is(err, sandbox.ErrUnsupported) {
		t.Skipf("skip: driver %s: %v", driver, err)
	}
	must(t, err)
	return p
}

// state is a folder for a pool, below which nothing stays mounted after the test.
func state(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "dsec state")
	t.Cleanup(func() {
		text, _ := os.ReadFile("/proc/self/mountinfo")
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(strings.ReplaceAll(f[4], `\040`, " "), dir) {
				if !t.Failed() {
					t.Errorf("left mounted: %s", f[4])
				}
				unix.Unmount(strings.ReplaceAll(f[4], `\040`, " "), unix.MNT_DETACH)
			}
		}
	})
	return dir
}

// drivers that a state folder of any file system can have; TestStateOnBtrfs has the one that needs btrfs below it.
var drivers = []string{upper.DriverPool, upper.DriverProject, upper.DriverImage, upper.DriverTmpfs}

func eachDriver(t *testing.T, run func(t *testing.T, p *upper.Pool)) {
	for _, d := range drivers {
		t.Run(d, func(t *testing.T) {
			p := open(t, d, state(t))
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error)
			go func() { done <- p.Run(ctx) }()
			t.Cleanup(func() {
				list, err := p.List()
				must(t, err)
				for _, id := range list {
					must(t, p.Remove(context.Background(), id))
				}
				cancel()
				must(t, <-done, p.Close())
			})
			run(t, p)
		})
	}
}

// fill writes n octets that don't compress to a file and returns how many it took.
func fill(path string, n int) (written int, err error) {
	err = upper.AsWorkload(func() error {
		written, err = fillAsIs(path, n)
		return err
	})
	return written, err
}

func fillAsIs(path string, n int) (int, error) {
	f, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	b := make([]byte, 64<<10)
	x := uint32(1)
	written := 0
	for written < n {
		for i := range b {
			x = x*1664525 + 1013904223
			b[i] = byte(x >> 24)
		}
		k, err := f.Write(b)
		written += k
		if err != nil {
			return written, err
		}
	}
	return written, f.Sync()
}

func TestTheLimitHolds(t *testing.T) {
	eachDriver(t, func(t *testing.T, p *upper.Pool) {
		ctx := context.Background()
		const limit = 24 << 20
		a, err := p.Create(ctx, "a-1", upper.Request{Disk: limit})
		must(t, err)
		b, err := p.Create(ctx, "b-1", upper.Request{Disk: limit})
		must(t, err)
		n, err := fill(filepath.Join(a.Dir, "fill"), 4*limit)
		if !errors.Is(err, unix.EDQUOT) && !errors.Is(err, unix.ENOSPC) || n < limit*9/10 || n > limit*11/10 {
			t.Errorf("stopped at %d of a limit of %d: %v", n, limit, err)
		}
		if used, err := p.Usage("a-1"); err != nil || used < limit/2 && p.Describe().Driver != upper.DriverPool || used > limit*11/10 {
			t.Errorf("usage %d, %v", used, err)
		}
		if n, err := fill(filepath.Join(b.Dir, "fill"), limit/2); err != nil {
			t.Errorf("a neighbour's write of %d: %v", n, err)
		}
		must(t, os.Remove(filepath.Join(a.Dir, "fill")))
		if n, err := fill(filepath.Join(a.Dir, "again"), limit/2); err != nil {
			t.Errorf("after making room, at %d: %v", n, err)
		}
	})
}

func TestCreateGetListRemove(t *testing.T) {
	eachDriver(t, func(t *testing.T, p *upper.Pool) {
		ctx := context.Background()
		a, err := p.Create(ctx, "a", upper.Request{Disk: 16 << 20})
		must(t, err)
		if st, err := os.Stat(a.Dir); err != nil || st.Mode().Perm() != 0o755 || st.Sys().(*syscall.Stat_t).Uid != 0 {
			t.Errorf("%v %v", st, err)
		}
		if _, err := p.Create(ctx, "a", upper.Request{Disk: 16 << 20}); !errors.Is(err, sandbox.ErrExists) {
			t.Errorf("twice: %v", err)
		}
		must(t, os.WriteFile(filepath.Join(a.Dir, "f"), []byte("x"), 0o644))
		got, err := p.Get("a")
		if err != nil || got.Dir != a.Dir || got.Work != a.Work || got.Limit < a.Limit*9/10 || got.Limit > a.Limit*11/10 {
			t.Errorf("%+v %v, made %+v", got, err, a)
		}
		_, err = p.Create(ctx, "b", upper.Request{Disk: 16 << 20})
		must(t, err)
		list, err := p.List()
		if d := cmp.Diff([]string{"a", "b"}, list); err != nil || d != "" {
			t.Errorf("%v %s", err, d)
		}
		must(t, p.Remove(ctx, "a"), p.Remove(ctx, "a"))
		if _, err := p.Get("a"); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("get of a removed one: %v", err)
		}
		if _, err := p.Usage("a"); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("usage of a removed one: %v", err)
		}
		again, err := p.Create(ctx, "a", upper.Request{Disk: 16 << 20})
		must(t, err)
		if entries, err := os.ReadDir(again.Dir); err != nil || len(entries) != 0 {
			t.Errorf("a new one holds %v, %v", entries, err)
		}
		if n, err := p.Free(); err != nil || n <= 0 {
			t.Errorf("free %d, %v", n, err)
		}
		for _, id := range []string{"", "..", "a/b", "A", ".x", strings.Repeat("a", 200)} {
			if _, err := p.Create(ctx, id, upper.Request{Disk: 16 << 20}); !errors.Is(err, sandbox.ErrInvalid) {
				t.Errorf("create %q: %v", id, err)
			}
			if err := p.Remove(ctx, id); !errors.Is(err, sandbox.ErrInvalid) {
				t.Errorf("remove %q: %v", id, err)
			}
		}
		if _, err := p.Create(ctx, "small", upper.Request{Disk: 10}); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("a tiny limit: %v", err)
		}
	})
}

// An overlay works on every driver's upper: removed, renamed and opaque folders.
func TestOverlayOnUpper(t *testing.T) {
	eachDriver(t, func(t *testing.T, p *upper.Pool) {
		u, err := p.Create(context.Background(), "a", upper.Request{Disk: 32 << 20})
		must(t, err)
		lower, merged := t.TempDir(), filepath.Join(t.TempDir(), "dsec-merged")
		must(t, os.MkdirAll(lower+"/d/e", 0o755), os.WriteFile(lower+"/d/e/f", []byte("x"), 0o644), os.WriteFile(lower+"/g", []byte("y"), 0o644), os.Mkdir(merged, 0o755))
		opt := "lowerdir=" + lower + ",upperdir=" + strings.ReplaceAll(u.Dir, ",", `\,`) + ",workdir=" + u.Work + ",redirect_dir=on,volatile"
		must(t, unix.Mount("overlay", merged, "overlay", 0, opt))
		defer unix.Unmount(merged, unix.MNT_DETACH)
		must(t, os.Rename(merged+"/d", merged+"/moved"), os.Remove(merged+"/g"), os.WriteFile(merged+"/moved/e/f", []byte("z"), 0o600))
		if b, err := os.ReadFile(merged + "/moved/e/f"); err != nil || string(b) != "z" {
			t.Errorf("%q %v", b, err)
		}
		if _, err := os.Stat(merged + "/g"); !os.IsNotExist(err) {
			t.Error(err)
		}
		dir, release, err := p.Snapshot("a")
		if !p.Describe().Snapshots {
			if !errors.Is(err, sandbox.ErrUnsupported) {
				t.Errorf("snapshot: %v", err)
			}
			return
		}
		must(t, err, os.WriteFile(merged+"/moved/e/f", []byte("later"), 0o600))
		if b, err := os.ReadFile(dir + "/moved/e/f"); err != nil || string(b) != "z" {
			t.Errorf("the snapshot has %q, %v", b, err)
		}
		must(t, release())
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("the snapshot stays: %v", err)
		}
	})
}

func TestManyAtOnce(t *testing.T) {
	eachDriver(t, func(t *testing.T, p *upper.Pool) {
		n := 20
		if p.Describe().Driver == upper.DriverImage {
			n = 4
		}
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				for round := range 3 {
					id := fmt.Sprintf("s%d-%d", i, round)
					u, err := p.Create(context.Background(), id, upper.Request{Disk: 16 << 20})
					if err == nil {
						err = os.WriteFile(filepath.Join(u.Dir, "f"), []byte(id), 0o600)
					}
					if err == nil && round < 2 {
						err = p.Remove(context.Background(), id)
					}
					if err != nil {
						t.Errorf("%s: %v", id, err)
					}
				}
			})
		}
		wg.Wait()
		if list, err := p.List(); err != nil || len(list) != n {
			t.Errorf("%v %v", list, err)
		}
	})
}

// A daemon that died leaves its mounts: the next one finds the uppers, and what was half made or half removed goes.
func TestRestart(t *testing.T) {
	for _, d := range drivers {
		t.Run(d, func(t *testing.T) {
			ctx, dir := context.Background(), state(t)
			p := open(t, d, dir)
			u, err := p.Create(ctx, "keep", upper.Request{Disk: 16 << 20})
			must(t, err, os.WriteFile(filepath.Join(u.Dir, "f"), []byte("x"), 0o600))
			if _, err := upper.Open(ctx, upper.Config{State: dir, Driver: d}, quiet); !errors.Is(err, sandbox.ErrState) {
				t.Errorf("a second one: %v", err)
			}
			if p.Describe().Snapshots {
				_, _, err := p.Snapshot("keep")
				must(t, err)
			}
			upper.Kill(p) // as a kill -9 of the daemon: locks go, mounts stay

			p = open(t, d, dir)
			got, err := p.Get("keep")
			must(t, err)
			if b, err := os.ReadFile(filepath.Join(got.Dir, "f")); err != nil || string(b) != "x" {
				t.Errorf("%q %v", b, err)
			}
			if list, err := p.List(); err != nil || len(list) != 1 {
				t.Errorf("%v %v", list, err)
			}
			must(t, upper.Sweep(p))
			root := p.Describe().Dir
			for _, sub := range []string{"making", "trash"} {
				if left, err := os.ReadDir(filepath.Join(root, sub)); err != nil || len(left) != 0 {
					t.Errorf("%s: %v %v", sub, left, err)
				}
			}
			if d == upper.DriverTmpfs {
				must(t, p.Remove(ctx, "keep"))
			}
			must(t, p.Close())

			// After a clean end.
			p = open(t, d, dir)
			if d != upper.DriverTmpfs {
				got, err := p.Get("keep")
				must(t, err)
				if b, err := os.ReadFile(filepath.Join(got.Dir, "f")); err != nil || string(b) != "x" {
					t.Errorf("%q %v", b, err)
				}
				must(t, p.Remove(ctx, "keep"))
			}
			must(t, p.Close())
		})
	}
}

// A host that ends leaves its sandboxes: their overlays go on, and the next host finds the same file system.
func TestRestartUnderLiveOverlays(t *testing.T) {
	for _, d := range []string{upper.DriverPool, upper.DriverImage} {
		t.Run(d, func(t *testing.T) {
			ctx, dir := context.Background(), state(t)
			p := open(t, d, dir)
			u, err := p.Create(ctx, "a", upper.Request{Disk: 16 << 20})
			must(t, err)
			lower, merged := t.TempDir(), filepath.Join(t.TempDir(), "dsec-merged")
			must(t, os.Mkdir(merged, 0o755), unix.Mount("overlay", merged, "overlay", 0, "lowerdir="+lower+",upperdir="+u.Dir+",workdir="+u.Work+",volatile"))
			gone := false
			defer func() {
				if !gone {
					unix.Unmount(merged, unix.MNT_DETACH)
				}
			}()
			must(t, os.WriteFile(merged+"/before", []byte("1"), 0o600), p.Close(), os.WriteFile(merged+"/between", []byte("2"), 0o600))
			p = open(t, d, dir)
			u, err = p.Get("a")
			must(t, err, os.WriteFile(merged+"/after", []byte("3"), 0o600))
			for name, want := range map[string]string{"before": "1", "between": "2", "after": "3"} {
				if b, err := os.ReadFile(filepath.Join(u.Dir, name)); err != nil || string(b) != want {
					t.Errorf("%s: %q %v", name, b, err)
				}
			}
			must(t, unix.Unmount(merged, 0))
			gone = true
			must(t, p.Remove(ctx, "a"), upper.Sweep(p), p.Close())
		})
	}
}

func TestPoolFile(t *testing.T) {
	dir := state(t)
	p := open(t, upper.DriverPool, dir)
	file := filepath.Join(dir, "pool.btrfs")
	whole := func(size int64) {
		t.Helper()
		var st unix.Stat_t
		must(t, unix.Stat(file, &st))
		if st.Size != size || st.Blocks*512 < size {
			t.Errorf("%d octets with %d on disk, want %d", st.Size, st.Blocks*512, size)
		}
	}
	whole(poolSize)
	if st, err := os.Stat(filepath.Join(dir, "pool")); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v %v", st, err)
	}
	text, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, strings.ReplaceAll(dir, " ", `\040`)) && (!strings.Contains(line, "nosuid,nodev") || strings.Contains(line, "discard=")) {
			t.Errorf("mounted as %s", line)
		}
	}
	// Writing and deleting must not make holes in the file.
	u, err := p.Create(context.Background(), "a", upper.Request{Disk: 128 << 20})
	must(t, err)
	if _, err := fill(filepath.Join(u.Dir, "f"), 100<<20); err != nil {
		t.Fatal(err)
	}
	must(t, p.Remove(context.Background(), "a"), upper.Sweep(p), exec.Command("sync", "-f", filepath.Join(dir, "pool")).Run())
	whole(poolSize)
	must(t, p.Close())

	p, err = upper.Open(context.Background(), upper.Config{State: dir, Driver: upper.DriverPool, Size: poolSize + 256<<20}, quiet)
	must(t, err)
	whole(poolSize + 256<<20)
	if d := p.Describe(); d.Total != poolSize+256<<20 {
		t.Errorf("grown: %+v", d)
	}
	must(t, p.Close())
	p = open(t, upper.DriverPool, dir) // asks for less
	if d := p.Describe(); !strings.Contains(strings.Join(d.Notes, "\n"), "does not shrink") {
		t.Errorf("%+v", d)
	}
	must(t, p.Close())
	if out, err := exec.Command("losetup", "-j", file).Output(); err == nil && len(out) > 0 {
		t.Errorf("still attached: %s", out)
	}

	// A pool that can't be mounted is made anew.
	must(t, os.WriteFile(file, make([]byte, 1<<20), 0o600))
	p = open(t, upper.DriverPool, dir)
	whole(poolSize)
	must(t, p.Close())
}

// A state folder that is on btrfs itself: its own subvolumes with either kind of quota, and a pool file on it.
func TestStateOnBtrfs(t *testing.T) {
	outer := state(t)
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root to mount")
	}
	ctx := context.Background()
	p, err := upper.Open(ctx, upper.Config{State: outer, Driver: upper.DriverPool, Size: 1536 << 20}, quiet)
	if errors.Is(err, sandbox.ErrUnsupported) || errors.Is(err, sandbox.ErrExhausted) {
		t.Skipf("skip: no btrfs to try it on: %v", err)
	}
	must(t, err)
	defer p.Close()
	root := p.Describe().Dir
	try := func(name, driver, want string) {
		t.Run(name, func(t *testing.T) {
			in, err := upper.Open(ctx, upper.Config{State: filepath.Join(root, name), Driver: driver, Size: 256 << 20}, quiet)
			must(t, err)
			defer in.Close()
			u, err := in.Create(ctx, "a", upper.Request{Disk: 24 << 20})
			must(t, err)
			if n, err := fill(filepath.Join(u.Dir, "f"), 50<<20); !errors.Is(err, unix.EDQUOT) || n > 24<<20 || n < 20<<20 {
				t.Errorf("stopped at %d: %v", n, err)
			}
			if d := in.Describe(); d.Driver != want {
				t.Errorf("%+v", d)
			}
			must(t, in.Remove(ctx, "a"), upper.Sweep(in))
		})
	}
	try("simple", "", upper.DriverSubvolume)
	try("pool", upper.DriverPool, upper.DriverPool)
	must(t, exec.Command("btrfs", "quota", "disable", root).Run(), exec.Command("btrfs", "quota", "enable", root).Run())
	exec.Command("btrfs", "quota", "rescan", "-w", root).Run()
	try("ordinary", upper.DriverSubvolume, upper.DriverSubvolume)
	must(t, exec.Command("btrfs", "quota", "disable", root).Run())
	if in, err := upper.Open(ctx, upper.Config{State: filepath.Join(root, "off"), Driver: upper.DriverSubvolume}, quiet); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("without quotas: %v", err)
		if err == nil {
			in.Close()
		}
	}
}

func TestPoolThatDoesNotFit(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	dir := state(t)
	_, err := upper.Open(context.Background(), upper.Config{State: dir, Driver: upper.DriverPool, Size: 1 << 50}, quiet)
	if !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), "do not fit") {
		t.Errorf("got %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "pool.btrfs*")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// The quota groups of removed uppers must not pile up: each makes commits longer.
func TestQuotaGroupsGo(t *testing.T) {
	p := open(t, upper.DriverPool, state(t))
	defer p.Close()
	for i := range 30 {
		id := fmt.Sprint("s", i)
		_, err := p.Create(context.Background(), id, upper.Request{Disk: 16 << 20})
		must(t, err, p.Remove(context.Background(), id))
	}
	deadline := time.Now().Add(60 * time.Second) // the kernel's cleaner works when it likes
	for {
		must(t, exec.Command("btrfs", "filesystem", "sync", p.Describe().Dir).Run(), upper.Sweep(p))
		out, err := exec.Command("btrfs", "qgroup", "show", "--raw", p.Describe().Dir).Output()
		if err != nil {
			t.Skipf("skip: btrfs qgroup show: %v", err)
		}
		if n := strings.Count(string(out), "0/"); n <= 2 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("%d groups are left:\n%s", n, out)
		}
		time.Sleep(500 * time.Millisecond)
	}
}

func TestTmpfsTakesHalfOfTheMemory(t *testing.T) {
	p := open(t, upper.DriverTmpfs, state(t))
	defer p.Close()
	u, err := p.Create(context.Background(), "a", upper.Request{Disk: 1 << 30, Memory: 64 << 20})
	must(t, err)
	defer p.Remove(context.Background(), "a")
	if u.Limit != 32<<20 || !strings.Contains(u.Note, "half of the memory limit") {
		t.Errorf("%+v", u)
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []upper.Config{{}, {State: "rel"}, {State: "/x", Size: 5}, {State: "/x", Size: -1}, {State: "/x", Driver: "zfs"}} {
		if err := c.Validate(); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

// A pool that is full to the brim can be emptied: what lies in it is removed at once, though nothing can be written any more.
func TestRemoveFromAFullPool(t *testing.T) {
	p := open(t, upper.DriverPool, state(t))
	t.Cleanup(func() { must(t, p.Close()) })
	var ids, dirs []string
	for n := range 3 {
		id := fmt.Sprint("full-", n)
		u, err := p.Create(context.Background(), id, upper.Request{Disk: poolSize})
		must(t, err)
		ids, dirs = append(ids, id), append(dirs, u.Dir)
	}
	for _, dir := range dirs {
		f, err := os.Create(filepath.Join(dir, "data"))
		block := make([]byte, 1<<20)
		for err == nil {
			_, err = f.Write(block)
		}
		f.Close()
		// Small files take what is left for the file system's own use.
		for k := 0; k < 100_000 && os.WriteFile(filepath.Join(dir, fmt.Sprint("small-", k)), block[:2000], 0o600) == nil; k++ {
		}
	}
	for _, id := range ids {
		if err := p.Remove(context.Background(), id); err != nil {
			t.Errorf("remove %s: %v", id, err)
		}
	}
	if left, err := p.List(); err != nil || len(left) > 0 {
		t.Errorf("%v %v", left, err)
	}
}

// The sweep must not take the quota group of an upper that is being born: its limit would fail, or be lost.
func TestSweepBesideBirths(t *testing.T) {
	p := open(t, upper.DriverPool, state(t))
	defer p.Close()
	stop := make(chan struct{})
	var sweeps sync.WaitGroup
	for range 2 {
		sweeps.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					if err := upper.Sweep(p); err != nil {
						t.Errorf("sweep: %v", err)
						return
					}
				}
			}
		})
	}
	var births sync.WaitGroup
	for i := range 4 {
		births.Go(func() {
			for round := range 600 {
				id := fmt.Sprintf("s%d-%d", i, round)
				if _, err := p.Create(context.Background(), id, upper.Request{Disk: 16 << 20}); err != nil {
					t.Errorf("%s: %v", id, err)
					return
				}
				must(t, p.Remove(context.Background(), id))
			}
		})
	}
	births.Wait()
	close(stop)
	sweeps.Wait()
}
