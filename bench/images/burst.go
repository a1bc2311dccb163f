package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// burst is what a trainer does at the start of a step: many sandboxes over many environments at once, each with a first command.
type burst struct {
	dir     string
	base    environment
	tree    string // the base's tar
	work    []string
	kit     string
	fan     []int // sandboxes of each environment
	command string
	size    burstSize
}

// burstSize is how many there are.
type burstSize struct{ images, boxes int }

// width is how many sandboxes live at once; archives are unpacked in as many.
func (s burstSize) width() int { return min(burstWidth, s.boxes) }

// unpacked is the pool in which every sandbox unpacks its archives, in octets.
func (s burstSize) unpacked() int64 { return 2<<30 + int64(s.width())*(workOctets+kitOctets)*3/2 }

// disk is what all of it takes at most, in octets: the archives, as blobs and folders too, the base, and that pool.
func (s burstSize) disk() int64 { return 2<<30 + int64(s.images)*4*workOctets + s.unpacked() }

const (
	burstWidth = 64
	workOctets = 50 << 20
	kitOctets  = 100 << 20
)

// fanOut spreads the sandboxes over the environments as the published system sees them: half of the images have three or fewer, a few
// have most.
func fanOut(images, boxes int) []int {
	fan := make([]int, images)
	left := boxes
	for i := range fan {
		fan[i] = 1 + 4*i/images // 1 to 4, the median 3
		left -= fan[i]
	}
	for i, share := images-1, left/2; left > 0; i, share = i-1, max(1, share/2) {
		n := min(share, left)
		fan[i] += n
		left -= n
	}
	return fan
}

func newBurst(ctx context.Context, dir, cache string, size burstSize) (*burst, error) {
	b := &burst{dir: dir, base: environments()[0], fan: fanOut(size.images, size.boxes), size: size}
	var err error
	if b.tree, err = b.base.tree(ctx, cache); err != nil {
		return nil, err
	}
	b.command = b.base.command + " && cat /task/0/* > /dev/null && test -d /kit"
	measure.Note("making %d workspaces of %d MiB and a tool kit of %d MiB", size.images, workOctets>>20, kitOctets>>20)
	for i := range size.images {
		path := filepath.Join(dir, fmt.Sprintf("work-%d.tar", i))
		if err := slice(b.tree, path, "task", i, workOctets); err != nil {
			return nil, err
		}
		b.work = append(b.work, path)
	}
	b.kit = filepath.Join(dir, "kit.tar")
	return b, slice(b.tree, b.kit, "kit", size.images, kitOctets)
}

// slice makes a tar of real files of another one, which nobody else has: every file ends with the number.
func slice(from, to, top string, number int, octets int64) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	r, w := tar.NewReader(in), tar.NewWriter(out)
	count, skip := 0, number*97
	var sum int64
	folder := func(name string) error {
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: 0o755})
	}
	if err := folder(top + "/"); err != nil {
		return err
	}
	for sum < octets {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg || h.Size == 0 || h.Size > 4<<20 {
			continue
		}
		if skip > 0 {
			skip--
			continue
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		data = fmt.Appendf(data, "\n%d\n", number)
		if count%200 == 0 {
			if err := folder(fmt.Sprintf("%s/%d/", top, count/200)); err != nil {
				return err
			}
		}
		err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("%s/%d/%d", top, count/200, count), Mode: 0o644, Size: int64(len(data))})
		if err == nil {
			_, err = w.Write(data)
		}
		if err != nil {
			return err
		}
		count++
		sum += int64(len(data))
	}
	return errors.Join(w.Close(), out.Close())
}

func runBurst(ctx context.Context, cache string, size burstSize) (err error) {
	if size.images < 1 || size.boxes < 4*size.images {
		return fmt.Errorf("%d sandboxes over %d environments: at least four for each, for the fan-out", size.boxes, size.images)
	}
	if os.Geteuid() != 0 {
		return errors.New("benchmarks need root, as the host does")
	}
	dir, err := os.MkdirTemp("", "dsec-bench-burst-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	need := size.disk()
	if free := int64(st.Bavail) * st.Bsize; free < need {
		return fmt.Errorf("%s: %d GiB are free, the burst needs %d", dir, free>>30, need>>30)
	}
	b, err := newBurst(ctx, dir, cache, size)
	if err != nil {
		return err
	}
	pull, err := b.pull(ctx)
	if err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	demand, err := b.demand(ctx)
	if err != nil {
		return fmt.Errorf("on demand: %w", err)
	}
	layers, archives, err := b.archives(ctx)
	if err != nil {
		return fmt.Errorf("archives: %w", err)
	}
	for _, x := range []struct {
		name string
		f    figure
	}{{"burst.pull", pull}, {"burst.demand", demand}, {"burst.archives", archives}, {"burst.layers", layers}} {
		measure.Print(x.name+".s", x.f.seconds, "s")
		measure.Print(x.name+".fetched", x.f.fetched/mb, "MB")
		measure.Print(x.name+".written", x.f.written/mb, "MB")
	}
	measure.Print("burst.pull_over_demand", pull.seconds/demand.seconds, "x")
	measure.Print("burst.written_share", demand.written/pull.written, "")
	measure.Print("burst.archives_over_layers", archives.seconds/layers.seconds, "x")
	measure.Print("burst.archives_written_share", layers.written/archives.written, "")
	return nil
}

// order gives the environment of each sandbox, mixed as they come.
func (b *burst) order() []int {
	var out []int
	for left := append([]int(nil), b.fan...); len(out) < b.size.boxes; {
		for i := range left {
			if left[i] > 0 {
				left[i]--
				out = append(out, i)
			}
		}
	}
	return out
}

// pull fetches each image once and unpacks it, layers that images share once, and starts the sandboxes on overlays of the folders.
func (b *burst) pull(ctx context.Context) (figure, error) {
	l := new(link)
	blobs := filepath.Join(b.dir, "registry")
	if err := os.Mkdir(blobs, 0o700); err != nil {
		return figure{}, err
	}
	defer os.RemoveAll(blobs)
	r := newRegistry(blobs, l)
	defer r.server.Close()
	if err := r.push(ctx, "base", b.tree); err != nil {
		return figure{}, err
	}
	for i, w := range b.work {
		if err := r.push(ctx, fmt.Sprint("work-", i), w); err != nil {
			return figure{}, err
		}
	}
	if err := r.push(ctx, "kit", b.kit); err != nil {
		return figure{}, err
	}
	l.set(speeds[0].latency, speeds[0].rate)
	defer l.set(0, 0)
	root := filepath.Join(b.dir, "pulled")
	defer os.RemoveAll(root)
	measure.Note("%d sandboxes over %d images, pulled", b.size.boxes, b.size.images)
	return start(b.dir, l, false, func() error {
		var once sync.Map
		get := func(image string) (string, error) {
			v, _ := once.LoadOrStore(image, sync.OnceValues(func() (string, error) {
				to := filepath.Join(root, image)
				if err := os.MkdirAll(to, 0o755); err != nil {
					return "", err
				}
				return to, r.pull(ctx, image, to)
			}))
			return v.(func() (string, error))()
		}
		order := b.order()
		return measure.Parallel(ctx, len(order), b.size.width(), counted(func(ctx context.Context, n int) error {
			var lowers []string
			for _, image := range []string{"kit", fmt.Sprint("work-", order[n]), "base"} {
				dir, err := get(image)
				if err != nil {
					return err
				}
				lowers = append(lowers, dir)
			}
			return onOverlay(ctx, lowers, filepath.Join(root, fmt.Sprint("box-", n)), b.command)
		}))
	}, nil)
}

// counted numbers the calls of a parallel run.
func counted(do func(context.Context, int) error) func(context.Context, int) error {
	var mu sync.Mutex
	next := 0
	return func(ctx context.Context, _ int) error {
		mu.Lock()
		n := next
		next++
		mu.Unlock()
		return do(ctx, n)
	}
}

// onOverlay runs a command on an overlay of folders.
func onOverlay(ctx context.Context, lowers []string, dir, command string) error {
	for _, d := range []string{"upper", "scratch", "tree"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	const script = `mount -t overlay overlay -o "lowerdir=$1,upperdir=$0/upper,workdir=$0/scratch" "$0/tree" && mount --bind /dev "$0/tree/dev" &&
mount -t proc proc "$0/tree/proc" && exec chroot "$0/tree" sh -c "$2"`
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--pid", "--fork", "--propagation", "private", "sh", "-c", script, dir, strings.Join(lowers, ":"), command)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, tail(string(out)))
	}
	return nil
}

// demand has all layers in an S3 store behind the link, and nothing on the host.
func (b *burst) demand(ctx context.Context) (f figure, err error) {
	l := new(link)
	objects := filepath.Join(b.dir, "s3")
	if err := os.Mkdir(objects, 0o700); err != nil {
		return f, err
	}
	defer os.RemoveAll(objects)
	s3 := httptest.NewServer(l.wrap(storetest.NewS3(objects)))
	defer s3.Close()
	far := "s3://" + storetest.Bucket + "/bench?endpoint=" + s3.URL + "&path_style=true"
	server, err := measure.StartEmpty(ctx, measure.Config{Pool: pool, Args: []string{"--store", far}, Env: credentials})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	base, work, kit, err := b.imports(ctx, server)
	if err != nil {
		return f, err
	}
	if err := profile(ctx, server, base, b.base.command, far); err != nil {
		return f, err
	}
	if err := server.Restart(ctx, func() error { return forget(server.Dir) }); err != nil {
		return f, err
	}
	l.set(speeds[0].latency, speeds[0].rate)
	measure.Note("%d sandboxes over %d environments, on demand", b.size.boxes, b.size.images)
	order := b.order()
	f, err = start(server.Dir, l, false, func() error {
		return measure.Parallel(ctx, len(order), b.size.width(), counted(func(ctx context.Context, n int) error {
			return b.box(ctx, server, []string{base, work[order[n]], kit}, nil)
		}))
	}, func() error { return flushed(ctx, server) })
	l.set(0, 0)
	return f, err
}

func (b *burst) imports(ctx context.Context, s *measure.Server) (base string, work []string, kit string, err error) {
	if base, err = importTar(ctx, s, b.tree); err != nil {
		return "", nil, "", err
	}
	for _, w := range b.work {
		id, err := importTar(ctx, s, w)
		if err != nil {
			return "", nil, "", err
		}
		work = append(work, id)
	}
	kit, err = importTar(ctx, s, b.kit)
	return base, work, kit, err
}

// box makes a sandbox, lays archives into it if there are any, does the command and stops it.
func (b *burst) box(ctx context.Context, s *measure.Server, layers, archives []string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	box, err := s.Client.RunContainer(ctx, client.Options{Layers: layers, Disk: 1 << 30})
	if err != nil {
		return err
	}
	err = func() error {
		for _, a := range archives {
			f, err := os.Open(a)
			if err != nil {
				return err
			}
			_, err = box.Files().Upload(ctx, "/", f)
			f.Close()
			if err != nil {
				return err
			}
		}
		r, err := box.Exec(ctx, "/bin/sh", "-c", b.command)
		if err == nil && !r.OK() {
			err = fmt.Errorf("the command ended as %v: %s", r.Outcome, tail(string(bytes.Join([][]byte{r.Stdout, r.Stderr}, nil))))
		}
		return err
	}()
	return errors.Join(err, box.Stop(ctx))
}

// archives compares layers with tar archives that every sandbox unpacks. The base is local in both; of the layers nothing else is warm.
func (b *burst) archives(ctx context.Context) (layers, archives figure, err error) {
	server, err := measure.StartEmpty(ctx, measure.Config{Pool: fmt.Sprintf("%dm", b.size.unpacked()>>20)})
	if err != nil {
		return layers, archives, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	base, work, kit, err := b.imports(ctx, server)
	if err != nil {
		return layers, archives, err
	}
	measure.Note("%d sandboxes with layers, and with archives", b.size.width())
	layers, err = start(server.Dir, new(link), false, func() error {
		return measure.Parallel(ctx, b.size.width(), b.size.width(), counted(func(ctx context.Context, n int) error {
			return b.box(ctx, server, []string{base, work[n%len(work)], kit}, nil)
		}))
	}, nil)
	if err != nil {
		return layers, archives, err
	}
	archives, err = start(server.Dir, new(link), false, func() error {
		return measure.Parallel(ctx, b.size.width(), b.size.width(), counted(func(ctx context.Context, n int) error {
			return b.box(ctx, server, []string{base}, []string{b.work[n%len(b.work)], b.kit})
		}))
	}, nil)
	return layers, archives, err
}
