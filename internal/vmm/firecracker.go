package vmm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// Firecracker is the driver for Firecracker. It needs a KVM that works: there is nothing that it could be swapped for.
//
// The monitor opens everything by name, so each machine has a folder that is the monitor's own: with a jailer its whole world, without one
// where its sockets are. Files of the host's come there as mounts that only the monitor sees, or as descriptors that it opens again. A saved
// state remembers the names of disks, so these are the same for all machines: their places in the list.
type Firecracker struct {
	program  string
	jailer   string // empty: none
	warden   *warden.Client
	features Features
	groups   []uint32
}

// FirecrackerConfig of the driver.
type FirecrackerConfig struct {
	Program string // the operator's
	Jailer  string // the operator's, of the same version; empty: the monitor runs as a user of its own, but sees the host's files
	Verdict Verdict
	Warden  *warden.Client
}

var firecrackerVersion = regexp.MustCompile(`v?(\d+)\.(\d+)\.(\d+)(-[0-9A-Za-z.]+)?`)

// NewFirecracker looks at the programs and at what their version can do.
func NewFirecracker(ctx context.Context, c FirecrackerConfig) (*Firecracker, error) {
	if !c.Verdict.Usable() {
		return nil, fmt.Errorf("Firecracker: needs KVM: %s: %w", c.Verdict.Why(), sandbox.ErrUnsupported)
	}
	d := &Firecracker{warden: c.Warden}
	out, err := says(ctx, c.Program, &d.program)
	if err != nil {
		return nil, fmt.Errorf("Firecracker: %w", err)
	}
	if d.features, err = firecrackerFeatures(out); err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if unix.Stat("/dev/kvm", &st) == nil {
		d.groups = append(d.groups, st.Gid)
	}
	if c.Jailer == "" {
		d.features.Why["jail"] = "no jailer: the monitor is a user of its own in cgroups of its own, and sees the host's files"
		return d, nil
	}
	if out, err = says(ctx, c.Jailer, &d.jailer); err != nil {
		return nil, fmt.Errorf("jailer: %w", err)
	}
	v := firecrackerVersion.FindString(out)
	if strings.TrimPrefix(v, "v") != d.features.Version {
		return nil, fmt.Errorf("jailer: is of version %q, Firecracker of %q: %w", v, d.features.Version, sandbox.ErrUnsupported)
	}
	if !strings.Contains(filepath.Base(d.program), "firecracker") {
		return nil, fmt.Errorf("Firecracker: the jailer wants a program with that word in its name, not %s: %w", filepath.Base(d.program), sandbox.ErrUnsupported)
	}
	return d, nil
}

// says finds a program and asks it for its version.
func says(ctx context.Context, program string, at *string) (string, error) {
	p, err := exec.LookPath(program)
	if err == nil {
		p, err = filepath.Abs(p)
	}
	if err != nil {
		return "", fmt.Errorf("%w: %w", err, sandbox.ErrUnsupported)
	}
	*at = p
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, p, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", p, err)
	}
	return string(out), nil
}

// firecrackerFeatures is what differs by version, as data.
func firecrackerFeatures(out string) (Features, error) {
	v := firecrackerVersion.FindStringSubmatch(out)
	if v == nil {
		return Features{}, fmt.Errorf("Firecracker: says no version: %w", sandbox.ErrUnsupported)
	}
	f := Features{Driver: "firecracker", Version: strings.TrimPrefix(v[0], "v"), Accelerator: KVM, Template: true, Pause: true, Save: true, Behind: true, TapByName: true, NetRates: true, Why: map[string]string{
		"display": "Firecracker has no screen"}}
	var n [3]int
	for i := range n {
		n[i], _ = strconv.Atoi(v[i+1])
	}
	if n[0] < 1 || n[0] == 1 && n[1] < 16 {
		return f, fmt.Errorf("Firecracker %s: want 1.16.0 or newer: %w", f.Version, sandbox.ErrUnsupported)
	}
	// Up to 1.16.1 a machine that was paused without a snapshot never gets data over vsock again.
	if n[0] == 1 && n[1] == 16 && n[2] <= 1 {
		f.Pause = false
		f.Why["pause"] = "Firecracker " + f.Version + " loses the way to its guest in a pause without a snapshot"
	}
	// An image of a kernel that is not ELF is for what follows 1.16.
	f.ELF = n[0] == 1 && n[1] <= 16
	return f, nil
}

// Features of the driver.
func (d *Firecracker) Features() Features { return d.features }

const (
	fcAPI   = "api.sock"
	fcVsock = "vsock.sock"
	fcPages = "pages.sock" // of who serves faults
	fcState = "state"
	fcSaved = "saved" // begin of the names of what is being saved
	// fcRoot is a link in the machine's folder, which is the host's, to the monitor's own.
	fcRoot    = "root"
	fcNetwork = "eth0"
	// fcGuestPort is where process 1 listens.
	fcGuestPort = 1024
	fcBody      = 1 << 20
)

// Words of a guest's command line: disks have no serials, so both name them in order. The second are those that are memory.
const (
	DisksArgument  = "dsec.disks="
	MappedArgument = "dsec.mapped="
	// ReclaimArgument has the guest give up pages of files that nobody uses, in Spec.Append.
	ReclaimArgument = "dsec.reclaim=1"
)

// NewMemory makes the memory of a template. In a jail it has to come by a mount, which wants a name: so it lies in dir until Discard.
func (d *Firecracker) NewMemory(dir string, size int64) (*os.File, error) {
	if d.jailer == "" {
		return NewMemory("dsec-template", size)
	}
	f, err := os.CreateTemp(dir, MemoryPrefix)
	if err != nil {
		return nil, fmt.Errorf("memory file: %w", err)
	}
	if err := errors.Join(f.Truncate(size), f.Chmod(0o666)); err != nil {
		return nil, fmt.Errorf("memory file: %w", errors.Join(err, Discard(f)))
	}
	return f, nil
}

// fcFiles are what a monitor gets at its start, under the names that it knows them by.
type fcFiles struct {
	builder
	d     *Firecracker
	uid   uint32
	root  string // the monitor's own folder
	binds []warden.Bind
	make  []string // files of the monitor's folder on which mounts will lie
}

// inside is the monitor's name for a file in its own folder.
func (d *Firecracker) inside(name string) string {
	if d.jailer != "" {
		return "/" + name
	}
	return fdPath(3) + "/" + name // its folder is the first descriptor
}

// give gives a file of the host's and returns the monitor's name for it.
func (b *fcFiles) give(name string, f *os.File) string {
	n := b.fd(f)
	if b.d.jailer == "" {
		return fdPath(n)
	}
	b.binds = append(b.binds, warden.Bind{File: n - 3, At: filepath.Join(b.root, name)})
	b.make = append(b.make, name)
	return "/" + name
}

// copyIn gives what a memory file holds, which can't be mounted. Without a jail it is given as it is.
func (b *fcFiles) copyIn(name string, f *os.File, from int64) (string, error) {
	if b.d.jailer == "" && from == 0 {
		return b.give(name, f), readable(f, b.uid, false)
	}
	to, err := os.OpenFile(filepath.Join(b.root, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return "", err
	}
	defer to.Close()
	if err := errors.Join(CopySparse(to, f, from), to.Chmod(0o444)); err != nil {
		return "", err
	}
	return b.d.inside(name), nil
}

// readable lets the monitor's user open a file again: it must have the right to.
func readable(f *os.File, uid uint32, write bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	switch {
	case write && (st.Uid != uid || st.Mode&0o600 != 0o600):
		return errors.Join(f.Chown(int(uid), int(uid)), f.Chmod(0o600))
	case !write && st.Mode&0o004 == 0 && st.Uid != uid:
		if st.Uid != 0 || st.Mode&unix.S_IFMT != unix.S_IFREG {
			return fmt.Errorf("%s is not open to the monitor's user: %w", f.Name(), sandbox.ErrUnsupported)
		}
		return f.Chmod(os.FileMode(st.Mode&0o777 | 0o444)) // it lies where only root comes
	}
	return nil
}

// fcStart is what the monitor is told after its start.
type fcStart struct {
	kernel, initrd string
	disks          []string // files
	drives         []string // IDs of those that are no memory
	network        bool
	rates          Rates
	memory, state  string
	pages          bool // memory comes by faults
}

// Create starts Firecracker and boots the machine; with Incoming it waits for Load.
func (d *Firecracker) Create(ctx context.Context, s *Spec) (VM, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if s.Display || s.Machine != "microvm" {
		return nil, fmt.Errorf("machine %s: Firecracker has no screen and one kind of machine: %w", s.ID, sandbox.ErrUnsupported)
	}
	b := &fcFiles{d: d, uid: s.UID}
	defer b.close()
	var n fcStart
	err := d.prepare(b, s, &n)
	if err != nil {
		return nil, fmt.Errorf("machine %s: %w", s.ID, err)
	}
	p := &warden.Process{
		ID: s.ID, Env: []string{"PATH=/usr/bin:/bin"}, UID: s.UID, GID: s.UID, Groups: d.groups, Netns: -1,
		Memory: s.Group.Memory, CPU: s.Group.CPU, Weight: s.Group.Weight, Pids: s.Group.Pids, Deadline: s.Deadline,
	}
	own := []string{"--api-sock", d.inside(fcAPI), "--level", "Warning", "--id", fcID(s.ID)}
	if d.jailer == "" {
		p.Argv = append([]string{d.program}, own...)
	} else {
		// The warden's cgroups and namespaces are its own: of version 1 without any group the jailer makes none.
		p.Argv = append([]string{d.jailer, "--id", fcID(s.ID), "--exec-file", d.program, "--uid", fmt.Sprint(s.UID), "--gid", fmt.Sprint(s.UID),
			"--cgroup-version", "1", "--chroot-base-dir", b.base(s), "--"}, own[:4]...)
		p.Jail, p.Binds = true, b.binds
	}
	if s.Netns != nil {
		p.Netns = b.fd(s.Netns) - 3
	}
	if n.pages {
		if err := d.servePages(ctx, b, s); err != nil {
			return nil, fmt.Errorf("machine %s: %w", s.ID, err)
		}
	}
	pid, err := d.warden.Start(ctx, p, b.files...)
	if err != nil {
		return nil, err
	}
	vm := newFirecrackerVM(d, s.ID, s.Dir, b.root, s.UID, pid)
	vm.start = n
	if err = vm.ready(ctx); err == nil && !s.Incoming {
		err = vm.boot(ctx, s, n)
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		if said := saidBy(undo, d.warden, s.ID); said != "" {
			err = fmt.Errorf("%w: it says: %s", err, said)
		}
		return nil, fmt.Errorf("machine %s: %w", s.ID, errors.Join(err, vm.Kill(undo)))
	}
	return vm, nil
}

// saidBy ends a monitor and returns what it wrote.
func saidBy(ctx context.Context, w *warden.Client, id string) string {
	w.Kill(ctx, id)
	list, err := w.List(ctx)
	if err != nil {
		return ""
	}
	for _, a := range list {
		if a.ID == id {
			return strings.TrimSpace(a.Said)
		}
	}
	return ""
}

func (b *fcFiles) base(s *Spec) string {
	if s.Store != "" {
		return s.Store
	}
	return s.Dir
}

// prepare makes the monitor's folder and collects what it gets.
func (d *Firecracker) prepare(b *fcFiles, s *Spec, n *fcStart) error {
	b.root = filepath.Join(b.base(s), "firecracker")
	if d.jailer != "" { // the jailer's rule for the name
		b.root = filepath.Join(b.base(s), filepath.Base(d.program), fcID(s.ID), "root")
	}
	if err := errors.Join(os.RemoveAll(b.root), os.MkdirAll(b.root, 0o700)); err != nil {
		return err
	}
	if err := os.Chown(b.root, int(s.UID), int(s.UID)); err != nil {
		return err
	}
	link := filepath.Join(s.Dir, fcRoot)
	os.Remove(link)
	if err := os.Symlink(b.root, link); err != nil {
		return err
	}
	root, err := os.Open(b.root)
	if err != nil {
		return err
	}
	b.own = append(b.own, root)
	b.fd(root)
	n.network, n.rates = s.TapName != "", s.Rates
	for i, k := range s.Disks {
		if err := readable(k.File, s.UID, !k.ReadOnly); err != nil {
			return fmt.Errorf("disk %s: %w", k.Serial, err)
		}
		id := "disk" + strconv.Itoa(i)
		n.disks = append(n.disks, b.give(id, k.File))
		if !k.memory() {
			n.drives = append(n.drives, id)
		}
	}
	if s.Incoming {
		err = d.prepareLoad(b, s, n)
	} else {
		err = d.prepareBoot(b, s, n)
	}
	if err != nil {
		return err
	}
	for _, name := range b.make {
		f, err := os.OpenFile(filepath.Join(b.root, name), os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		f.Close()
	}
	return nil
}

func (d *Firecracker) prepareBoot(b *fcFiles, s *Spec, n *fcStart) (err error) {
	if d.features.ELF && !s.Kernel.ELF() {
		return fmt.Errorf("Firecracker %s boots no vmlinuz, an ELF vmlinux alone: %w", d.features.Version, sandbox.ErrUnsupported)
	}
	if n.kernel, err = b.copyIn("kernel", s.Kernel.Image, 0); err != nil {
		return fmt.Errorf("kernel: %w", err)
	}
	if n.initrd, err = b.copyIn("initrd", s.Kernel.Initrd, 0); err != nil {
		return fmt.Errorf("initramfs: %w", err)
	}
	if s.Backing.File != nil && !s.Backing.Private {
		n.memory = b.give("memory", s.Backing.File)
	}
	return nil
}

func (d *Firecracker) prepareLoad(b *fcFiles, s *Spec, n *fcStart) (err error) {
	if s.From == nil {
		return fmt.Errorf("nothing to load is named: %w", sandbox.ErrInvalid)
	}
	memory, at := s.Backing.File, int64(0)
	if memory == nil { // the state lies behind the memory
		memory, at = s.From, s.Memory
	}
	if err := readable(memory, s.UID, false); err != nil {
		return fmt.Errorf("memory: %w", err)
	}
	if n.state, err = b.copyIn(fcState, s.From, at); err != nil {
		return fmt.Errorf("state: %w", err)
	}
	if n.pages = s.Backing.Faults; !n.pages {
		n.memory = b.give("memory", memory)
	}
	return nil
}

// servePages has the warden answer for the memory that a machine does not have yet.
func (d *Firecracker) servePages(ctx context.Context, b *fcFiles, s *Spec) error {
	at := filepath.Join(b.root, fcPages)
	l, err := listenUnix(at)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := os.Lchown(at, int(s.UID), int(s.UID)); err != nil {
		return err
	}
	return d.warden.Pages(ctx, s.ID, l, s.Backing.File)
}

func fdPath(n int) string { return "/proc/self/fd/" + strconv.Itoa(n) }

// fcID is a machine's name for Firecracker: letters, digits and hyphens, at most 64.
func fcID(id string) string {
	out := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' {
			return r
		}
		return '-'
	}, id)
	return out[:min(len(out), 64)]
}

// Find takes a machine back.
func (d *Firecracker) Find(ctx context.Context, id, dir string) (VM, error) {
	list, err := d.warden.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("find machine %s: %w", id, err)
	}
	for _, a := range list {
		if a.ID != id || a.Ended {
			continue
		}
		root, err := os.Readlink(filepath.Join(dir, fcRoot))
		var st unix.Stat_t
		if err == nil {
			err = unix.Stat(root, &st)
		}
		if err != nil {
			return nil, fmt.Errorf("find machine %s: %w", id, err)
		}
		vm := newFirecrackerVM(d, id, dir, root, st.Uid, a.Pid)
		return vm, vm.ready(ctx)
	}
	return nil, fmt.Errorf("machine %s: %w", id, sandbox.ErrLost)
}
