package vmm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
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

// Firecracker is the driver for Firecracker. It needs a KVM that works: there is nothing that it could be swapped for.
type Firecracker struct {
	program  string
	warden   *warden.Client
	features Features
	groups   []uint32
}

// FirecrackerConfig of the driver.
type FirecrackerConfig struct {
	Program string // the operator's
	Args    []string
	Verdict Verdict
	Warden  *warden.Client
}

var firecrackerVersion = regexp.MustCompile(`v?(\d+)\.(\d+)\.(\d+)(-\S+)?`)

// NewFirecracker looks at the program and at what its version can do.
func NewFirecracker(ctx context.Context, c FirecrackerConfig) (*Firecracker, error) {
	if !c.Verdict.Usable() {
		return nil, fmt.Errorf("Firecracker: needs KVM: %s: %w", c.Verdict.Reason, sandbox.ErrUnsupported)
	}
	p, err := exec.LookPath(c.Program)
	if err != nil {
		return nil, fmt.Errorf("Firecracker: %w: %w", err, sandbox.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, p, append(c.Args, "--version")...).Output()
	if err != nil {
		return nil, fmt.Errorf("Firecracker: %s: %w", p, err)
	}
	f, err := firecrackerFeatures(string(out))
	if err != nil {
		return nil, err
	}
	d := &Firecracker{program: p, warden: c.Warden, features: f}
	var st unix.Stat_t
	if unix.Stat("/dev/kvm", &st) == nil {
		d.groups = append(d.groups, st.Gid)
	}
	return d, nil
}

// firecrackerFeatures is what differs by version, as data.
func firecrackerFeatures(out string) (Features, error) {
	v := firecrackerVersion.FindStringSubmatch(out)
	if v == nil {
		return Features{}, fmt.Errorf("Firecracker: says no version: %w", sandbox.ErrUnsupported)
	}
	f := Features{Driver: "firecracker", Version: strings.TrimPrefix(v[0], "v"), Accelerator: KVM, Template: true, Pause: true, Save: true, Why: map[string]string{
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
	return f, nil
}

// Features of the driver.
func (d *Firecracker) Features() Features { return d.features }

const (
	fcAPI   = "api.sock"
	fcVsock = "vsock.sock"
	// fcGuestPort is where process 1 listens.
	fcGuestPort = 1024
	fcBody      = 1 << 20
)

// DisksArgument names a machine's disks in order, for a guest whose disks have no serials.
const DisksArgument = "dsec.disks="

// Create starts Firecracker and boots the machine; with Incoming it waits for Load.
func (d *Firecracker) Create(ctx context.Context, s *Spec) (VM, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if s.Display || s.Machine != "microvm" {
		return nil, fmt.Errorf("machine %s: Firecracker has no screen and one kind of machine: %w", s.ID, sandbox.ErrUnsupported)
	}
	// It makes its sockets itself, so the folder is its own.
	if err := os.Chown(s.Dir, int(s.UID), int(s.UID)); err != nil {
		return nil, fmt.Errorf("machine %s: %w", s.ID, err)
	}
	b := &builder{}
	kernel, initrd := fdPath(b.fd(s.Kernel.Image)), fdPath(b.fd(s.Kernel.Initrd))
	var disks []string
	for _, k := range s.Disks {
		disks = append(disks, fdPath(b.fd(k.File)))
	}
	p := &warden.Process{
		ID: s.ID, Argv: []string{d.program, "--api-sock", filepath.Join(s.Dir, fcAPI), "--id", fcID(s.ID)}, Env: []string{"PATH=/usr/bin:/bin"}, UID: s.UID, GID: s.UID,
		Groups: d.groups, Netns: -1, Memory: s.Group.Memory, CPU: s.Group.CPU, Weight: s.Group.Weight, Pids: s.Group.Pids, Deadline: s.Deadline,
	}
	if s.Netns != nil {
		p.Netns = b.fd(s.Netns) - 3
	}
	pid, err := d.warden.Start(ctx, p, b.files...)
	if err != nil {
		return nil, err
	}
	vm := newFirecrackerVM(d, s.ID, s.Dir, s.UID, pid)
	if err = vm.ready(ctx); err == nil && !s.Incoming {
		err = vm.boot(ctx, s, kernel, initrd, disks)
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		return nil, fmt.Errorf("machine %s: %w", s.ID, errors.Join(err, vm.Kill(undo)))
	}
	return vm, nil
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
		var st unix.Stat_t
		if err := unix.Stat(dir, &st); err != nil {
			return nil, fmt.Errorf("find machine %s: %w", id, err)
		}
		vm := newFirecrackerVM(d, id, dir, st.Uid, a.Pid)
		return vm, vm.ready(ctx)
	}
	return nil, fmt.Errorf("machine %s: %w", id, sandbox.ErrLost)
}

// fcVM is a machine of Firecracker.
type fcVM struct {
	d       *Firecracker
	id, dir string
	uid     uint32
	pid     int
	http    *http.Client
	over    chan struct{}
	ending  sync.Once
	stop    context.CancelFunc
}

func newFirecrackerVM(d *Firecracker, id, dir string, uid uint32, pid int) *fcVM {
	v := &fcVM{d: d, id: id, dir: dir, uid: uid, pid: pid, over: make(chan struct{})}
	v.http = &http.Client{Transport: &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return v.dial(ctx, fcAPI) },
		MaxIdleConnsPerHost: 1, DisableCompression: true, MaxResponseHeaderBytes: 16 << 10,
	}}
	watch, stop := context.WithCancel(context.Background())
	v.stop = stop
	go v.watch(watch)
	return v
}

// watch tells of the monitor's end: a guest that ends, ends it.
func (v *fcVM) watch(ctx context.Context) {
	fd, err := unix.PidfdOpen(v.pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		v.ending.Do(func() { close(v.over) })
		return
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	context.AfterFunc(ctx, func() { f.SetReadDeadline(time.Unix(1, 0)) })
	raw, err := f.SyscallConn()
	if err == nil {
		raw.Read(func(fd uintptr) bool { // readable when it has ended
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, _ := unix.Poll(p, 0)
			return n > 0
		})
	}
	v.ending.Do(func() { close(v.over) })
}

// dial connects to a socket that the monitor made in its folder: it may have put anything there, so it must be a socket of its own.
func (v *fcVM) dial(ctx context.Context, name string) (net.Conn, error) {
	fd, err := unix.Open(filepath.Join(v.dir, name), unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK || st.Uid != v.uid {
		return nil, fmt.Errorf("%s is no socket of the monitor's: %w", name, sandbox.ErrDenied)
	}
	var d net.Dialer
	return d.DialContext(ctx, "unix", fdPath(fd))
}

// fcError is Firecracker's word on a request.
type fcError struct {
	Status int
	Fault  string
}

func (e *fcError) Error() string {
	return fmt.Sprintf("Firecracker: %s (status %d)", e.Fault, e.Status)
}

func (v *fcVM) call(ctx context.Context, method, path string, body, result any) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		r = bytes.NewReader(b)
	}
	q, err := http.NewRequestWithContext(ctx, method, "http://firecracker"+path, r)
	if err != nil {
		return err
	}
	q.Header.Set("Content-Type", "application/json")
	a, err := v.http.Do(q)
	if err != nil {
		return fmt.Errorf("machine %s: %s %s: %w", v.id, method, path, err)
	}
	defer a.Body.Close()
	text, err := io.ReadAll(io.LimitReader(a.Body, fcBody))
	if err != nil {
		return fmt.Errorf("machine %s: %s %s: %w", v.id, method, path, err)
	}
	if a.StatusCode >= 300 {
		var f struct {
			Fault string `json:"fault_message"`
		}
		json.Unmarshal(text, &f)
		if f.Fault == "" {
			f.Fault = string(text[:min(len(text), 300)])
		}
		return fmt.Errorf("machine %s: %s %s: %w", v.id, method, path, &fcError{a.StatusCode, f.Fault})
	}
	if result != nil {
		return json.Unmarshal(text, result)
	}
	return nil
}

// ready waits until the monitor answers.
func (v *fcVM) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		err := v.call(ctx, http.MethodGet, "/version", nil, nil)
		if err == nil {
			return nil
		}
		if f := (*fcError)(nil); errors.As(err, &f) {
			return err
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-v.over:
			return fmt.Errorf("machine %s: its monitor ended: %w", v.id, sandbox.ErrLost)
		case <-ctx.Done():
			return err
		}
	}
}

func (v *fcVM) boot(ctx context.Context, s *Spec, kernel, initrd string, disks []string) error {
	var names []string
	for _, d := range s.Disks {
		names = append(names, d.Serial)
	}
	line := fmt.Sprintf("console=ttyS0 quiet panic=1 reboot=k dsec.vsock=%d %s%s", fcGuestPort, DisksArgument, strings.Join(names, ","))
	if s.Append != "" {
		line += " " + s.Append
	}
	type object = map[string]any
	cpus := s.CPUs
	if cpus > 1 && cpus%2 == 1 {
		cpus++ // it takes 1 or an even number
	}
	steps := []struct {
		path string
		body object
	}{
		{"/machine-config", object{"vcpu_count": cpus, "mem_size_mib": s.Memory >> 20, "smt": false, "track_dirty_pages": false}},
		{"/boot-source", object{"kernel_image_path": kernel, "initrd_path": initrd, "boot_args": line}},
		{"/entropy", object{}},
		{"/vsock", object{"guest_cid": 3, "uds_path": filepath.Join(v.dir, fcVsock)}},
	}
	for i, d := range s.Disks {
		id := "disk" + strconv.Itoa(i)
		steps = append(steps, struct {
			path string
			body object
		}{"/drives/" + id, object{"drive_id": id, "path_on_host": disks[i], "is_root_device": false, "is_read_only": d.ReadOnly}})
	}
	if s.TapName != "" {
		steps = append(steps, struct {
			path string
			body object
		}{"/network-interfaces/eth0", object{"iface_id": "eth0", "host_dev_name": s.TapName, "guest_mac": s.MAC}})
	}
	for _, p := range steps {
		if err := v.call(ctx, http.MethodPut, p.path, p.body, nil); err != nil {
			return err
		}
	}
	return v.call(ctx, http.MethodPut, "/actions", object{"action_type": "InstanceStart"}, nil)
}

func (v *fcVM) ID() string { return v.id }
func (v *fcVM) Pid() int   { return v.pid }

// Agent asks the monitor for the guest's port. A guest that does not listen yet ends the connection at once; one that stands still never
// answers, so each attempt is bounded.
func (v *fcVM) Agent(ctx context.Context) (net.Conn, error) {
	for {
		c, err := v.knock(ctx)
		if err == nil {
			return c, nil
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-v.over:
			return nil, fmt.Errorf("machine %s: its monitor ended: %w", v.id, sandbox.ErrLost)
		case <-ctx.Done():
			return nil, fmt.Errorf("machine %s: its guest does not answer (%v): %w", v.id, err, ctx.Err())
		}
	}
}

func (v *fcVM) knock(ctx context.Context) (net.Conn, error) {
	c, err := v.dial(ctx, fcVsock)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	fmt.Fprintf(c, "CONNECT %d\n", fcGuestPort)
	// Octet by octet: what follows the line is the guest's.
	var line []byte
	for one := make([]byte, 1); len(line) < 64; {
		if _, err := c.Read(one); err != nil {
			c.Close()
			return nil, fmt.Errorf("vsock: %w", err)
		}
		if one[0] == '\n' {
			break
		}
		line = append(line, one[0])
	}
	if !bytes.HasPrefix(line, []byte("OK ")) {
		c.Close()
		return nil, fmt.Errorf("vsock: the monitor says %.64q: %w", line, sandbox.ErrLost)
	}
	c.SetDeadline(time.Time{})
	return c, nil
}

func (v *fcVM) patch(ctx context.Context, state string) error {
	return v.call(ctx, http.MethodPatch, "/vm", map[string]string{"state": state}, nil)
}

func (v *fcVM) Pause(ctx context.Context) error  { return v.patch(ctx, "Paused") }
func (v *fcVM) Resume(ctx context.Context) error { return v.patch(ctx, "Resumed") }

func (v *fcVM) Status(ctx context.Context) (string, error) {
	var r struct {
		State string `json:"state"`
	}
	if err := v.call(ctx, http.MethodGet, "/", nil, &r); err != nil {
		select {
		case <-v.over:
			return "", fmt.Errorf("machine %s: its monitor ended: %w", v.id, sandbox.ErrLost)
		default:
			return "", err
		}
	}
	switch r.State {
	case "Running":
		return "running", nil
	case "Paused":
		return "paused", nil
	case "Not started":
		return "loading", nil
	}
	return "ended: " + cutText(r.State, 40), nil
}

func cutText(s string, n int) string { return s[:min(len(s), n)] }

// Save and Load go by files in the monitor's folder: it opens them by their paths.
func (v *fcVM) Save(context.Context, *os.File, bool) error {
	return fmt.Errorf("machine %s: Firecracker saves into files of its own folder: %w", v.id, sandbox.ErrUnsupported)
}

// SaveTo saves the state and the memory of a paused machine into two new files of its folder.
func (v *fcVM) SaveTo(ctx context.Context, state, memory string) error {
	for _, f := range []string{state, memory} {
		if filepath.Base(f) != f {
			return fmt.Errorf("snapshot file %q: want a plain name: %w", f, sandbox.ErrInvalid)
		}
		// A stale one is merged into, which gives clones that do not live.
		if err := os.Remove(filepath.Join(v.dir, f)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return v.call(ctx, http.MethodPut, "/snapshot/create", map[string]string{"snapshot_type": "Full", "snapshot_path": filepath.Join(v.dir, state), "mem_file_path": filepath.Join(v.dir, memory)}, nil)
}

func (v *fcVM) Load(context.Context, *os.File, bool) error {
	return fmt.Errorf("machine %s: Firecracker loads from files of its own folder: %w", v.id, sandbox.ErrUnsupported)
}

// LoadFrom fills a machine that was made with Incoming, by a private mapping of the memory file; it is paused then. A load that fails ends the
// monitor.
func (v *fcVM) LoadFrom(ctx context.Context, state, memory string) error {
	return v.call(ctx, http.MethodPut, "/snapshot/load", map[string]any{
		"snapshot_path": state, "mem_backend": map[string]string{"backend_type": "File", "backend_path": memory}, "resume_vm": false,
		"vsock_override": map[string]string{"uds_path": filepath.Join(v.dir, fcVsock)},
	}, nil)
}

func (v *fcVM) Over() <-chan struct{} { return v.over }

// Console is what the guest wrote: it goes to the monitor's standard output, of which the warden keeps the begin.
func (v *fcVM) Console(ctx context.Context) string {
	list, err := v.d.warden.List(ctx)
	if err != nil {
		return ""
	}
	for _, a := range list {
		if a.ID == v.id {
			return a.Said
		}
	}
	return ""
}

func (v *fcVM) Display() (Display, bool) { return nil, false }

func (v *fcVM) Release() {
	v.stop()
	v.http.CloseIdleConnections()
}

func (v *fcVM) Kill(ctx context.Context) error {
	if err := v.d.warden.Kill(ctx, v.id); err != nil {
		return fmt.Errorf("end machine %s: %w", v.id, err)
	}
	if err := v.d.warden.Forget(ctx, v.id); err != nil {
		return fmt.Errorf("end machine %s: %w", v.id, err)
	}
	v.stop()
	v.http.CloseIdleConnections()
	for _, f := range []string{fcAPI, fcVsock} {
		os.Remove(filepath.Join(v.dir, f))
	}
	return nil
}

var (
	_ Driver = (*Firecracker)(nil)
	_ Driver = (*QEMU)(nil)
)
