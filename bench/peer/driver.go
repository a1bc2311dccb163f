package peer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/bench/measure"
)

const imageName = "docker.io/library/dsec-bench:1"

// Row is a way of running the containers.
type Row string

// The rows.
const (
	AsInstalled Row = "as_installed"
	Equal       Row = "equal"
)

// driver makes containers with one runtime, inside the private mount namespace.
type driver struct {
	runtime, bin, dir string
	cgroups           string           // the containers' groups, in every hierarchy
	bundles           map[Row][]string // one for each that runs at once
	daemon            *exec.Cmd        // containerd
	socket            string           // its socket
	count             int              // names containers
	mu                sync.Mutex       // guards count
}

func (d *driver) prepare(ctx context.Context, width int) error {
	tree := filepath.Join(d.dir, "tree")
	if err := measure.Unpack(tree, 0); err != nil {
		return err
	}
	mapped := filepath.Join(d.dir, "mapped")
	if err := measure.Unpack(mapped, uidBase); err != nil {
		return err
	}
	spec := d.bin
	if d.runtime == "containerd" {
		if err := d.startDaemon(ctx); err != nil {
			return err
		}
		spec = "runc" // its default runtime
	}
	d.bundles = map[Row][]string{}
	for _, row := range []Row{AsInstalled, Equal} {
		for i := range width {
			b := filepath.Join(d.dir, string(row)+"-"+strconv.Itoa(i))
			if err := os.MkdirAll(filepath.Join(b, "rootfs"), 0o755); err != nil {
				return err
			}
			s, err := BaseSpec(spec, b)
			if err != nil {
				return err
			}
			root := tree
			if row == Equal {
				equal(s, d.cgroups+"/"+filepath.Base(b))
				root = filepath.Join(b, "rootfs")
			} else {
				s["linux"].(object)["cgroupsPath"] = d.cgroups + "/" + filepath.Base(b)
			}
			s["root"].(object)["path"] = root
			j, err := json.Marshal(s)
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(b, "config.json"), j, 0o644); err != nil {
				return err
			}
			d.bundles[row] = append(d.bundles[row], b)
		}
	}
	return nil
}

func (d *driver) startDaemon(ctx context.Context) error {
	d.socket = filepath.Join(d.dir, "c.sock")
	config := fmt.Sprintf("version = 2\nroot = %q\nstate = %q\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.snapshotter.v1.btrfs\", \"io.containerd.snapshotter.v1.zfs\", \"io.containerd.snapshotter.v1.devmapper\", \"io.containerd.snapshotter.v1.aufs\", \"io.containerd.internal.v1.opt\", \"io.containerd.tracing.processor.v1.otlp\", \"io.containerd.internal.v1.tracing\"]\n[grpc]\naddress = %q\n[debug]\nlevel = \"error\"\n",
		filepath.Join(d.dir, "root"), filepath.Join(d.dir, "state"), d.socket)
	file := filepath.Join(d.dir, "config.toml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return err
	}
	d.daemon = exec.Command("containerd", "--config", file)
	log, err := os.Create(filepath.Join(d.dir, "containerd.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	d.daemon.Stdout, d.daemon.Stderr = log, log
	if err := d.daemon.Start(); err != nil {
		d.daemon = nil
		return err
	}
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := measure.Command(ctx, "ctr", "-a", d.socket, "version")
		if err == nil {
			break
		}
		if time.Now().After(end) {
			text, _ := os.ReadFile(log.Name())
			return fmt.Errorf("containerd does not answer: %w: %.500s", err, text)
		}
	}
	layer, err := measure.Tar()
	if err != nil {
		return err
	}
	archive, err := image(imageName, layer)
	if err != nil {
		return err
	}
	file = filepath.Join(d.dir, "image.tar")
	if err := os.WriteFile(file, archive, 0o600); err != nil {
		return err
	}
	return measure.Command(ctx, "ctr", "-a", d.socket, "image", "import", file)
}

func (d *driver) stop() {
	if d.daemon != nil {
		d.daemon.Process.Signal(syscall.SIGTERM)
		d.daemon.Wait()
	}
}

// cycle makes a container, runs the program in it and removes it. slot is one of those that run at once.
func (d *driver) cycle(ctx context.Context, row Row, slot int) error {
	bundle := d.bundles[row][slot]
	d.mu.Lock()
	d.count++
	id := fmt.Sprintf("dsec-bench-%d-%d", os.Getpid(), d.count)
	d.mu.Unlock()
	if row == Equal {
		if err := d.mount(bundle); err != nil {
			return err
		}
		defer d.unmount(bundle)
	}
	if d.runtime != "containerd" {
		return measure.Command(ctx, d.bin, "--root", filepath.Join(d.dir, "run"), "run", "-b", bundle, id)
	}
	if row == Equal {
		return measure.Command(ctx, "ctr", "-a", d.socket, "run", "--rm", "--config", filepath.Join(bundle, "config.json"), id)
	}
	return measure.Command(ctx, "ctr", "-a", d.socket, "run", "--rm", imageName, id, "/true")
}

// mount lays a fresh overlay over the mapped tree.
func (d *driver) mount(bundle string) error {
	upper, work := filepath.Join(bundle, "upper"), filepath.Join(bundle, "work")
	for _, p := range []string{upper, work} {
		if err := os.Mkdir(p, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chown(upper, uidBase, uidBase); err != nil {
		return err
	}
	err := unix.Mount("overlay", filepath.Join(bundle, "rootfs"), "overlay", 0,
		"lowerdir="+filepath.Join(d.dir, "mapped")+",upperdir="+upper+",workdir="+work+",volatile")
	if err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	return nil
}

func (d *driver) unmount(bundle string) {
	unix.Unmount(filepath.Join(bundle, "rootfs"), unix.MNT_DETACH)
	os.RemoveAll(filepath.Join(bundle, "upper"))
	os.RemoveAll(filepath.Join(bundle, "work"))
}

// order is one line to a driver's process, answer one from it.
type order struct {
	Row   Row           `json:"row"`
	Count int           `json:"count"`
	Width int           `json:"width"` // at once
	Every time.Duration `json:"every"` // a cycle begins; 0: at once
}

type answer struct {
	Times []time.Duration `json:"times"`
	Wall  time.Duration   `json:"wall"`
	Self  time.Duration   `json:"self"` // CPU time of the driver's process, the load client
	Err   string          `json:"err"`
}

func (d *driver) work(ctx context.Context, o order) (a answer) {
	self, start := measure.Self(), time.Now()
	var mu sync.Mutex
	var wg sync.WaitGroup
	left := o.Count
	for slot := range o.Width {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				mu.Lock()
				stop := left <= 0 || a.Err != "" || ctx.Err() != nil
				left--
				mu.Unlock()
				if stop {
					return
				}
				t := time.Now()
				err := d.cycle(ctx, o.Row, slot)
				took := time.Since(t)
				mu.Lock()
				a.Times = append(a.Times, took)
				if err != nil {
					a.Err = err.Error()
				}
				mu.Unlock()
				if rest := o.Every - took; rest > 0 {
					time.Sleep(rest)
				}
			}
		}()
	}
	wg.Wait()
	a.Wall, a.Self = time.Since(start), measure.Self()-self
	if err := ctx.Err(); err != nil && a.Err == "" {
		a.Err = err.Error()
	}
	return a
}

// Main is the driver's process when this program was started as one; ok is false otherwise.
func Main(args []string) (ok bool, err error) {
	if len(args) != 5 || args[0] != "peer" {
		return false, nil
	}
	width, err := strconv.Atoi(args[4])
	if err != nil {
		return true, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return true, err
	}
	if args[1] == "crun" {
		if err := unix.Unmount("/sys/fs/cgroup/unified", unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return true, fmt.Errorf("unmount the second hierarchy: %w", err)
		}
	}
	d := &driver{runtime: args[1], bin: args[1], dir: args[2], cgroups: args[3]}
	defer d.stop()
	out := json.NewEncoder(os.Stdout)
	if err := d.prepare(ctx, width); err != nil {
		return true, errors.Join(err, out.Encode(answer{Err: err.Error()}))
	}
	if err := out.Encode(answer{}); err != nil {
		return true, err
	}
	orders := make(chan order)
	go func() {
		defer cancel() // the end of the input stops what runs
		defer close(orders)
		in := json.NewDecoder(bufio.NewReader(os.Stdin))
		for {
			var o order
			if err := in.Decode(&o); err != nil {
				return
			}
			orders <- o
		}
	}()
	for o := range orders {
		if err := out.Encode(d.work(ctx, o)); err != nil && !errors.Is(err, io.ErrClosedPipe) {
			return true, err
		}
	}
	return true, nil
}
