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
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// fcVM is a machine of Firecracker.
type fcVM struct {
	d       *Firecracker
	id, dir string
	root    string // the monitor's own folder: hostile
	uid     uint32
	pid     int
	start   fcStart
	http    *http.Client
	over    chan struct{}
	ending  sync.Once
	stop    context.CancelFunc
}

func newFirecrackerVM(d *Firecracker, id, dir, root string, uid uint32, pid int) *fcVM {
	v := &fcVM{d: d, id: id, dir: dir, root: root, uid: uid, pid: pid, over: make(chan struct{})}
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
	fd, err := unix.Open(filepath.Join(v.root, name), unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
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

func (v *fcVM) boot(ctx context.Context, s *Spec, n fcStart) error {
	type object = map[string]any
	type step struct {
		path string
		body object
	}
	var names, mapped []string
	var disks []step
	for i, d := range s.Disks {
		id := "disk" + strconv.Itoa(i)
		if d.memory() {
			mapped = append(mapped, d.Serial)
			disks = append(disks, step{"/pmem/" + id, object{"id": id, "path_on_host": n.disks[i], "root_device": false, "read_only": true}})
			continue
		}
		names = append(names, d.Serial)
		drive := object{"drive_id": id, "path_on_host": n.disks[i], "is_root_device": false, "is_read_only": d.ReadOnly}
		if s.Rates.Disk > 0 || s.Rates.DiskOps > 0 {
			drive["rate_limiter"] = limiter(s.Rates.Disk, s.Rates.DiskOps)
		}
		disks = append(disks, step{"/drives/" + id, drive})
	}
	// A panic ends the machine at once. Nothing is typed on its serial port, whose driver would be asked for ten times a second.
	line := fmt.Sprintf("console=ttyS0 quiet panic=-1 reboot=k dsec.vsock=%d %s%s", fcGuestPort, DisksArgument, strings.Join(names, ","))
	if len(mapped) > 0 {
		line += " " + MappedArgument + strings.Join(mapped, ",")
	}
	if s.Append != "" {
		line += " " + s.Append
	}
	cpus := s.CPUs
	if cpus > 1 && cpus%2 == 1 {
		cpus++ // it takes 1 or an even number
	}
	steps := append([]step{
		{"/machine-config", object{"vcpu_count": cpus, "mem_size_mib": s.Memory >> 20, "smt": false, "track_dirty_pages": false}},
		{"/boot-source", object{"kernel_image_path": n.kernel, "initrd_path": n.initrd, "boot_args": line}},
		{"/entropy", object{}},
		{"/vsock", object{"guest_cid": 3, "uds_path": v.d.inside(fcVsock)}},
	}, disks...)
	if s.Balloon { // what a guest frees goes back to the host by itself
		steps = append(steps, step{"/balloon", object{"amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 0, "free_page_reporting": true}})
	}
	if s.TapName != "" {
		device := object{"iface_id": fcNetwork, "host_dev_name": s.TapName, "guest_mac": s.MAC}
		if s.Rates.Network > 0 {
			device["rx_rate_limiter"], device["tx_rate_limiter"] = limiter(s.Rates.Network, 0), limiter(s.Rates.Network, 0)
		}
		steps = append(steps, step{"/network-interfaces/" + fcNetwork, device})
	}
	for _, p := range steps {
		if err := v.call(ctx, http.MethodPut, p.path, p.body, nil); err != nil {
			return err
		}
	}
	if err := v.call(ctx, http.MethodPut, "/actions", object{"action_type": "InstanceStart"}, nil); err != nil {
		return err
	}
	for _, name := range []string{"kernel", "initrd"} { // they are in its memory now
		os.Remove(filepath.Join(v.root, name))
	}
	return nil
}

// limiter is Firecracker's form of what a device may move in a second; 0: no bound, also where there was one before.
func limiter(octets, requests int64) map[string]any {
	bucket := func(n int64) map[string]int64 {
		if n == 0 {
			return map[string]int64{"size": 0, "refill_time": 0}
		}
		return map[string]int64{"size": max(1, n/10), "refill_time": 100} // ms: what comes at once is a tenth of a second's, as with QEMU
	}
	return map[string]any{"bandwidth": bucket(octets), "ops": bucket(requests)}
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
	return os.RemoveAll(v.root)
}

var (
	_ Driver = (*Firecracker)(nil)
	_ Driver = (*QEMU)(nil)
)
