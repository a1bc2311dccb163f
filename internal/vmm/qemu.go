package vmm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// QEMU is the driver for QEMU.
type QEMU struct {
	program  string
	firmware string // qboot, or empty for QEMU's own
	warden   *warden.Client
	features Features
	groups   []uint32 // that may open /dev/kvm
}

// QEMUConfig of the driver.
type QEMUConfig struct {
	Program string // empty: qemu-system-x86_64 of the path
	Verdict Verdict
	Warden  *warden.Client
}

var qemuVersion = regexp.MustCompile(`version (\d+\.\d+\.\d+)`)

// NewQEMU looks at the program. It starts nothing that stays.
func NewQEMU(ctx context.Context, c QEMUConfig) (*QEMU, error) {
	if c.Program == "" {
		c.Program = "qemu-system-x86_64"
	}
	p, err := exec.LookPath(c.Program)
	if err != nil {
		return nil, fmt.Errorf("QEMU: %w: %w", err, sandbox.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, p, "--version").Output()
	if err != nil {
		return nil, fmt.Errorf("QEMU: %s: %w", p, err)
	}
	v := qemuVersion.FindSubmatch(out)
	if v == nil {
		return nil, fmt.Errorf("QEMU: %s says no version: %w", p, sandbox.ErrUnsupported)
	}
	q := &QEMU{program: p, warden: c.Warden, features: Features{
		Driver: "qemu", Version: string(v[1]), Accelerator: TCG, Degraded: true, Template: true, Pause: true, Save: true, Display: true, Why: map[string]string{},
	}}
	if c.Verdict.Usable() {
		q.features.Accelerator, q.features.Degraded = KVM, false
		var st unix.Stat_t
		if unix.Stat("/dev/kvm", &st) == nil {
			q.groups = append(q.groups, st.Gid)
		}
	} else {
		q.features.Why["kvm"] = c.Verdict.Reason
	}
	for _, f := range []string{"/usr/share/qemu/qboot.rom", "/usr/share/seabios/qboot.rom"} {
		if _, err := os.Stat(f); err == nil {
			q.firmware = f
			break
		}
	}
	return q, nil
}

// Features of the driver.
func (q *QEMU) Features() Features { return q.features }

// NewMemory makes the memory of a template.
func (q *QEMU) NewMemory(_ string, size int64) (*os.File, error) {
	return NewMemory("dsec-template", size)
}

// refusedImage is what QEMU says of a disk that somebody brought.
var refusedImage = regexp.MustCompile(`"node-name":"below\d+".*?\}: ([^\n]+)`)

// hostKHz is the rate of the processor's time stamp counter: without it a translated guest measures it for a second, or for ever.
var hostKHz = sync.OnceValue(func() int {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "cpu MHz" {
			mhz, _ := strconv.ParseFloat(strings.TrimSpace(v), 64)
			return int(mhz * 1000)
		}
	}
	return 0
})

// builder collects a command line and the descriptors that it names.
type builder struct {
	argv  []string
	files []*os.File
	own   []*os.File // closed when the monitor has them
	sets  int        // of descriptors, by number
	// drives are the devices of disks, as QEMU calls them by path.
	drives []string
}

func (b *builder) add(words ...string) { b.argv = append(b.argv, words...) }

// fd passes a file and returns its number in the monitor.
func (b *builder) fd(f *os.File) int {
	b.files = append(b.files, f)
	return 2 + len(b.files)
}

// drive adds a disk's device, and names it so that it can be bounded: one of virtio on PCI is a bridge to the disk.
func (b *builder) drive(device string) {
	id := "drive" + strconv.Itoa(len(b.drives)+1)
	b.add("-device", device+",id="+id)
	path := "/machine/peripheral/" + id
	if strings.HasPrefix(device, "virtio-blk-pci") {
		path += "/virtio-backend"
	}
	b.drives = append(b.drives, path)
}

func (b *builder) listen(path string) (int, error) {
	f, err := listenUnix(path)
	if err != nil {
		return 0, err
	}
	b.own = append(b.own, f)
	return b.fd(f), nil
}

func (b *builder) close() {
	for _, f := range b.own {
		f.Close()
	}
	b.own = nil
}

const (
	agentSocket = "agent.sock"
	qmpSocket   = "qmp.sock"
	vncSocket   = "display" // a note, no socket
)

// Create starts QEMU. On an error nothing of it is left.
func (q *QEMU) Create(ctx context.Context, s *Spec) (VM, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	b := &builder{}
	defer b.close()
	if err := q.commandLine(b, s); err != nil {
		return nil, fmt.Errorf("machine %s: %w", s.ID, err)
	}
	p := &warden.Process{
		ID: s.ID, Argv: append([]string{q.program}, b.argv...), Env: []string{"PATH=/usr/bin:/bin", "HOME=/"}, UID: s.UID, GID: s.UID, Groups: q.groups,
		Netns: -1, Memory: s.Group.Memory, CPU: s.Group.CPU, Weight: s.Group.Weight, Pids: s.Group.Pids, Deadline: s.Deadline,
	}
	if s.Netns != nil {
		p.Netns = b.fd(s.Netns) - 3
	}
	pid, err := q.warden.Start(ctx, p, b.files...)
	if err != nil {
		return nil, err
	}
	b.close() // so that a QEMU which refuses its command line leaves nobody who listens
	vm := &qemuVM{q: q, id: s.ID, dir: s.Dir, pid: pid, display: s.Display}
	err = vm.connect(ctx)
	if err == nil {
		err = vm.bound(ctx, b.drives, s.Rates)
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		said := saidBy(undo, q.warden, s.ID)
		if bad := refusedImage.FindStringSubmatch(said); bad != nil && s.Image != nil {
			err = fmt.Errorf("QEMU does not take the image's disk: %s: %w", bad[1], sandbox.ErrInvalid)
		} else if said != "" {
			err = fmt.Errorf("%w: QEMU says: %s", err, said)
		}
		return nil, fmt.Errorf("machine %s: %w", s.ID, errors.Join(err, vm.Kill(undo)))
	}
	return vm, nil
}

func (q *QEMU) commandLine(b *builder, s *Spec) error {
	bus := "pci"
	if s.Machine == "microvm" {
		bus = "device"
	}
	reboot := "shutdown" // ours never does
	if s.Image != nil {
		reboot = "reset"
	}
	b.add("-nodefaults", "-no-user-config", "-display", "none", "-name", "dsec-"+s.ID,
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		// A machine that ends stays as it is: its console can still be read.
		"-action", "reboot="+reboot+",shutdown=pause,panic=pause")
	cpu := "max"
	if q.features.Accelerator == KVM {
		b.add("-accel", "kvm")
		cpu = "host"
	} else {
		b.add("-accel", "tcg,tb-size=16")
	}
	switch s.Machine {
	case "microvm":
		// pic and pit off cost nothing; without rtc the kernel's clock spins for more than a second.
		b.add("-M", "microvm,rtc=on,pit=off,pic=off,memory-backend=mem")
	case "q35":
		firmware := ""
		if s.Image != nil {
			firmware = b.image(s.Image)
		}
		b.add("-M", "q35,memory-backend=mem"+firmware)
	default:
		return fmt.Errorf("machine type %q: %w", s.Machine, sandbox.ErrInvalid)
	}
	if q.firmware != "" && !s.Display && s.Image == nil {
		b.add("-bios", q.firmware)
	}
	b.add("-cpu", cpu, "-smp", strconv.Itoa(s.CPUs), "-m", strconv.FormatInt(s.Memory>>20, 10)+"M")
	mem := fmt.Sprintf("id=mem,size=%d", s.Memory)
	if f := s.Backing.File; f != nil {
		share := "on"
		if s.Backing.Private {
			share = "off"
		}
		b.add("-object", fmt.Sprintf("memory-backend-file,%s,mem-path=/proc/self/fd/%d,share=%s", mem, b.fd(f), share))
	} else {
		b.add("-object", "memory-backend-ram,"+mem)
	}
	if s.Image == nil {
		if err := q.boot(b, s, bus); err != nil {
			return err
		}
	}
	control, err := b.listen(filepath.Join(s.Dir, qmpSocket))
	if err != nil {
		return err
	}
	b.add("-chardev", fmt.Sprintf("socket,id=qmp,fd=%d,server=on,wait=off", control), "-mon", "chardev=qmp,mode=control",
		"-chardev", "ringbuf,id=console,size="+consoleRing, "-serial", "chardev:console")
	for _, d := range s.Disks {
		b.sets++
		set, mode := b.sets, "read-only=off,discard=unmap"
		if d.ReadOnly {
			mode = "read-only=on"
		}
		b.add("-add-fd", fmt.Sprintf("fd=%d,set=%d", b.fd(d.File), set),
			"-blockdev", fmt.Sprintf("node-name=disk%d,driver=raw,%s,cache.direct=off,file.driver=file,file.filename=/dev/fdset/%d,file.locking=off", set, mode, set))
		b.drive(fmt.Sprintf("virtio-blk-%s,drive=disk%d,serial=%s", bus, set, d.Serial))
	}
	if s.Tap != nil {
		b.add("-netdev", fmt.Sprintf("tap,id=net,fd=%d", b.fd(s.Tap)), "-device", "virtio-net-"+bus+",netdev=net,mac="+s.MAC)
	}
	if s.Display {
		if err := markDisplay(s.Dir); err != nil {
			return err
		}
		b.add("-vga", "std", "-vnc", "none")
		if s.Image == nil { // what others bring has no drivers for these; it has a tablet and the board's own keyboard
			b.add("-device", "virtio-tablet-pci", "-device", "virtio-keyboard-pci")
		}
	}
	if s.Balloon {
		// The last device, so that the others have the places that they have without it. A page that was given back and is used again holds what
		// it held at the begin: zeros, or in a clone what the template had there. A guest that counts on free pages staying as they are (that
		// poisons them, or zeroes them at their end instead of their begin) gives none back where the device can't promise that.
		b.add("-device", "virtio-balloon-"+bus+",free-page-reporting=on,deflate-on-oom=on,page-poison=off")
	}
	if s.Incoming {
		b.add("-incoming", "defer")
	}
	return nil
}

// boot gives the machine our kernel, and a way to our guest.
func (q *QEMU) boot(b *builder, s *Spec, bus string) error {
	agent, err := b.listen(filepath.Join(s.Dir, agentSocket))
	if err != nil {
		return err
	}
	b.add("-device", "virtio-serial-"+bus+",max_ports=2", "-chardev", fmt.Sprintf("socket,id=agent,fd=%d,server=on,wait=off", agent),
		"-device", "virtserialport,chardev=agent,name=dsec.0", "-device", "virtio-rng-"+bus)
	k := s.Kernel
	b.add("-kernel", fmt.Sprintf("/proc/self/fd/%d", b.fd(k.Image)), "-initrd", fmt.Sprintf("/proc/self/fd/%d", b.fd(k.Initrd)))
	line := []string{"console=ttyS0", "quiet", "panic=-1", "reboot=t"}
	if q.features.Accelerator == TCG {
		line = append(line, "no_timer_check", "tsc=reliable", "mitigations=off")
		if khz := hostKHz(); khz > 0 {
			line = append(line, "tsc_early_khz="+strconv.Itoa(khz))
		}
	}
	if s.Display {
		line = append(line, "consoleblank=0", "dsec.screen=1")
		if !s.Kernel.ELF() {
			// The text console stays on the screen: a driver for graphics would take it away and show what a display server draws alone. A
			// kernel that is entered directly was not told of a screen with text, so it has none.
			line = append(line, "nomodeset")
		}
	}
	if s.Append != "" {
		line = append(line, s.Append)
	}
	b.add("-append", strings.Join(line, " "))
	return nil
}

// Find takes a machine back.
func (q *QEMU) Find(ctx context.Context, id, dir string) (VM, error) {
	list, err := q.warden.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("find machine %s: %w", id, err)
	}
	for _, a := range list {
		if a.ID != id || a.Ended {
			continue
		}
		_, e := os.Stat(filepath.Join(dir, vncSocket))
		vm := &qemuVM{q: q, id: id, dir: dir, pid: a.Pid, display: e == nil}
		return vm, vm.connect(ctx)
	}
	return nil, fmt.Errorf("machine %s: %w", id, sandbox.ErrLost)
}

// qemuVM is a machine of QEMU.
type qemuVM struct {
	q       *QEMU
	id, dir string
	pid     int
	display bool
	console sync.Mutex // one reader of the console at a time

	mu  sync.Mutex
	ctl *qmp
}

func (v *qemuVM) ID() string { return v.id }
func (v *qemuVM) Pid() int   { return v.pid }

func (v *qemuVM) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	c, err := dialQMP(ctx, filepath.Join(v.dir, qmpSocket))
	if err != nil {
		return err
	}
	v.mu.Lock()
	v.ctl = c
	v.mu.Unlock()
	return nil
}

// bound bounds the machine's disks, all together. Room that it gives back is not counted.
func (v *qemuVM) bound(ctx context.Context, drives []string, r Rates) error {
	if r.Disk == 0 && r.DiskOps == 0 {
		return nil
	}
	for _, id := range drives {
		err := v.do(ctx, "block_set_io_throttle", map[string]any{"id": id, "group": "machine",
			"bps": r.Disk, "bps_rd": 0, "bps_wr": 0, "iops": r.DiskOps, "iops_rd": 0, "iops_wr": 0}, nil)
		if err != nil {
			return err
		}
	}
	return nil
}

// control is the connection, made anew when it was lost.
func (v *qemuVM) control(ctx context.Context) (*qmp, error) {
	v.mu.Lock()
	c := v.ctl
	v.mu.Unlock()
	if c != nil && c.failure() == nil {
		return c, nil
	}
	if err := v.connect(ctx); err != nil {
		return nil, fmt.Errorf("machine %s: %w: %w", v.id, err, sandbox.ErrLost)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.ctl, nil
}

func (v *qemuVM) do(ctx context.Context, name string, args, result any, file ...*os.File) error {
	c, err := v.control(ctx)
	if err != nil {
		return err
	}
	if err := c.do(ctx, name, args, result, file...); err != nil {
		return fmt.Errorf("machine %s: %w", v.id, err)
	}
	return nil
}

func (v *qemuVM) Agent(ctx context.Context) (net.Conn, error) {
	return dialUnix(ctx, filepath.Join(v.dir, agentSocket))
}

func (v *qemuVM) Pause(ctx context.Context) error  { return v.do(ctx, "stop", nil, nil) }
func (v *qemuVM) Resume(ctx context.Context) error { return v.do(ctx, "cont", nil, nil) }

func (v *qemuVM) Status(ctx context.Context) (string, error) {
	var r struct{ Status string }
	if err := v.do(ctx, "query-status", nil, &r); err != nil {
		return "", err
	}
	switch r.Status {
	case "running":
		return "running", nil
	case "paused", "prelaunch":
		return "paused", nil
	case "postmigrate", "finish-migrate":
		return "saved", nil
	case "inmigrate":
		return "loading", nil
	}
	return "ended: " + r.Status, nil
}

type capability struct {
	Capability string `json:"capability"`
	State      bool   `json:"state"`
}

// prepareState sets how the state goes and passes its file.
func (v *qemuVM) prepareState(ctx context.Context, f *os.File, shared bool) error {
	caps := map[string]any{"capabilities": []capability{{"x-ignore-shared", shared}, {"events", true}}}
	if err := v.do(ctx, "migrate-set-capabilities", caps, nil); err != nil {
		return err
	}
	// No pre-copy: the machine stands still, and nothing is gained by being slow.
	if err := v.do(ctx, "migrate-set-parameters", map[string]any{"max-bandwidth": int64(64 << 30)}, nil); err != nil {
		return err
	}
	return v.do(ctx, "getfd", map[string]string{"fdname": "state"}, nil, f)
}

func (v *qemuVM) Save(ctx context.Context, to *os.File, shared bool) error {
	if err := v.prepareState(ctx, to, shared); err != nil {
		return err
	}
	if err := v.do(ctx, "migrate", map[string]string{"uri": "fd:state"}, nil); err != nil {
		return err
	}
	if err := v.migrated(ctx); err != nil {
		return err
	}
	return v.finalized(ctx)
}

// finalized waits until QEMU lets a machine go on whose state it has written: it tells that it has a moment before.
func (v *qemuVM) finalized(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		var r struct{ Status string }
		if err := v.do(ctx, "query-status", nil, &r); err != nil || r.Status != "finish-migrate" {
			return err
		}
		if err := pause(ctx, wait); err != nil {
			return fmt.Errorf("machine %s: its state is not finished: %w", v.id, err)
		}
	}
}

func (v *qemuVM) Load(ctx context.Context, from *os.File, shared bool) error {
	if err := v.prepareState(ctx, from, shared); err != nil {
		return err
	}
	// It would run at once: the guest's memory must first be made its own.
	if err := v.do(ctx, "stop", nil, nil); err != nil {
		return err
	}
	if err := v.do(ctx, "migrate-incoming", map[string]string{"uri": "fd:state"}, nil); err != nil {
		return err
	}
	return v.migrated(ctx)
}

// migrated waits for the end of a save or load.
func (v *qemuVM) migrated(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	c, err := v.control(ctx)
	if err != nil {
		return err
	}
	var status string
	err = c.wait(ctx, func(e event) bool {
		if e.Event != "MIGRATION" {
			return false
		}
		var d struct{ Status string }
		json.Unmarshal(e.Data, &d)
		status = d.Status
		return status == "completed" || status == "failed" || status == "cancelled"
	})
	if err != nil {
		return fmt.Errorf("machine %s: its state: %w", v.id, err)
	}
	if status != "completed" {
		var r struct {
			Desc string `json:"error-desc"`
		}
		v.do(ctx, "query-migrate", nil, &r)
		return fmt.Errorf("machine %s: its state: %s: %s", v.id, status, r.Desc)
	}
	return nil
}

// gone is what Over returns while there is no connection.
func gone() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

func (v *qemuVM) Over() <-chan struct{} {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ctl == nil {
		return gone()
	}
	return v.ctl.over
}

func (v *qemuVM) Release() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ctl != nil {
		v.ctl.close()
	}
}

func (v *qemuVM) Kill(ctx context.Context) error {
	v.mu.Lock()
	c := v.ctl
	v.mu.Unlock()
	if c != nil {
		c.close()
	}
	if err := v.q.warden.Kill(ctx, v.id); err != nil {
		return fmt.Errorf("end machine %s: %w", v.id, err)
	}
	if err := v.q.warden.Forget(ctx, v.id); err != nil {
		return fmt.Errorf("end machine %s: %w", v.id, err)
	}
	for _, s := range []string{agentSocket, qmpSocket, vncSocket} {
		os.Remove(filepath.Join(v.dir, s))
	}
	return nil
}

func splitPath(p string) (dir, name string) { return filepath.Dir(p), filepath.Base(p) }
