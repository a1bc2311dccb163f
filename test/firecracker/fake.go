// Package firecracker is a stand-in for the Firecracker program, for tests without KVM: its control socket keeps the state machine and the
// error bodies of the real one (versions 1.16 and 1.17), its vsock does the handshake, and a guest inside answers as process 1 of a machine
// does. It hides that no machine runs. It is not proof that a machine would: only the real program is.
package firecracker

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/mux"
	"github.com/dsec-dev/dsec/internal/guest/vmwire"
)

// Version that the stand-in says it is, unless the environment says another.
const (
	Version    = "1.17.0"
	VersionVar = "DSEC_FAKE_FIRECRACKER_VERSION"
)

// states of the machine, in the words of the real one.
const (
	notStarted = "Not started"
	running    = "Running"
	paused     = "Paused"
)

type server struct {
	mu      sync.Mutex
	state   string
	config  map[string]json.RawMessage // by path
	vsock   net.Listener
	conns   map[net.Conn]bool
	thawed  chan struct{} // closed while the machine runs
	version string
}

// Main is the program.
func Main(args []string) int {
	version := os.Getenv(VersionVar)
	if version == "" {
		version = Version
	}
	api := ""
	for i, a := range args {
		switch a {
		case "--version":
			fmt.Printf("Firecracker v%s\n", version)
			return 0
		case "--api-sock":
			api = args[i+1]
		}
	}
	l, err := net.Listen("unix", api)
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		return 1
	}
	s := &server{state: notStarted, config: map[string]json.RawMessage{}, conns: map[net.Conn]bool{}, thawed: make(chan struct{}), version: version}
	http.Serve(l, s)
	return 1
}

// fault is an error in the form of the real one.
func fault(w http.ResponseWriter, text string, args ...any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadRequest)
	json.NewEncoder(w).Encode(map[string]string{"fault_message": fmt.Sprintf(text, args...)})
}

const (
	errStarted    = "The requested operation is not supported after starting the microVM."
	errNotStarted = "The requested operation is not supported before starting the microVM."
)

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 51200))
	if err != nil {
		fault(w, "%v", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	part, id, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	switch r.Method + " " + part {
	case "GET version":
		answer(w, map[string]string{"firecracker_version": s.version})
	case "GET vm": // of /vm/config: what it was told, by path; the real one has another form
		answer(w, s.config)
	case "GET ":
		answer(w, map[string]string{"state": s.state, "app_name": "Firecracker", "vmm_version": s.version, "id": "fake"})
	case "PUT machine-config", "PUT boot-source", "PUT drives", "PUT network-interfaces", "PUT vsock", "PUT entropy", "PUT balloon", "PUT pmem":
		s.configure(w, part, id, r.URL.Path, body)
	case "PATCH drives", "PATCH network-interfaces":
		s.change(w, part, r.URL.Path, body)
	case "PUT actions":
		s.action(w, body)
	case "PATCH vm":
		s.turn(w, body)
	case "PUT snapshot":
		if id == "create" {
			s.save(w, body)
		} else {
			s.load(w, body)
		}
	default:
		fault(w, "Invalid request method and/or path: %s %s.", r.Method, r.URL.Path)
	}
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v)
}

// fields are those that an object may and must have; others are refused, as serde does.
var fields = map[string]struct{ may, must string }{
	"machine-config":     {"vcpu_count mem_size_mib smt track_dirty_pages huge_pages cpu_template", "vcpu_count mem_size_mib"},
	"boot-source":        {"kernel_image_path initrd_path boot_args", "kernel_image_path"},
	"drives":             {"drive_id path_on_host is_root_device is_read_only cache_type io_engine rate_limiter partuuid socket", "drive_id is_root_device"},
	"network-interfaces": {"iface_id host_dev_name guest_mac mtu rx_rate_limiter tx_rate_limiter", "iface_id host_dev_name"},
	"vsock":              {"guest_cid uds_path vsock_id", "guest_cid uds_path"},
	"entropy":            {"rate_limiter", ""},
	"balloon":            {"amount_mib deflate_on_oom stats_polling_interval_s free_page_hinting free_page_reporting", "amount_mib deflate_on_oom"},
	"pmem":               {"id path_on_host root_device read_only rate_limiter", "id path_on_host"},
}

func (s *server) configure(w http.ResponseWriter, part, id, path string, body []byte) {
	var o map[string]any
	if err := json.Unmarshal(body, &o); err != nil {
		fault(w, "An error occurred when deserializing the json body of a request: %v.", err)
		return
	}
	f := fields[part]
	for k := range o {
		if !strings.Contains(" "+f.may+" ", " "+k+" ") {
			fault(w, "An error occurred when deserializing the json body of a request: unknown field `%s`.", k)
			return
		}
	}
	for _, k := range strings.Fields(f.must) {
		if _, ok := o[k]; !ok {
			fault(w, "An error occurred when deserializing the json body of a request: missing field `%s`.", k)
			return
		}
	}
	if s.state != notStarted {
		fault(w, errStarted)
		return
	}
	if err := s.checkObject(part, id, o); err != nil {
		fault(w, "%v", err)
		return
	}
	s.config[path] = body
	w.WriteHeader(http.StatusNoContent)
}

// change is of a device of a machine that was started or loaded. A limiter that is given takes the place of the one that was.
func (s *server) change(w http.ResponseWriter, part, path string, body []byte) {
	var o map[string]any
	if err := json.Unmarshal(body, &o); err != nil {
		fault(w, "An error occurred when deserializing the json body of a request: %v.", err)
		return
	}
	may := map[string]string{"drives": " drive_id path_on_host rate_limiter ", "network-interfaces": " iface_id rx_rate_limiter tx_rate_limiter "}[part]
	for k := range o {
		if !strings.Contains(may, " "+k+" ") {
			fault(w, "An error occurred when deserializing the json body of a request: unknown field `%s`.", k)
			return
		}
	}
	if s.state == notStarted {
		fault(w, errNotStarted)
		return
	}
	s.config[path] = body
	w.WriteHeader(http.StatusNoContent)
}

func (s *server) checkObject(part, id string, o map[string]any) error {
	switch part {
	case "machine-config":
		n, _ := o["vcpu_count"].(float64)
		if n < 1 || n > 32 || n > 1 && int(n)%2 == 1 {
			return errors.New("The vCPU number is invalid! The vCPU number can only be 1 or an even number when SMT is enabled.")
		}
		if m, _ := o["mem_size_mib"].(float64); m < 1 {
			return errors.New("The memory size (MiB) is invalid.")
		}
	case "boot-source":
		for _, k := range []string{"kernel_image_path", "initrd_path"} {
			p, given := o[k].(string)
			if !given {
				continue
			}
			f, err := os.Open(p)
			if err != nil {
				return fmt.Errorf("Boot source error: The kernel file cannot be opened: %w", err)
			}
			f.Close()
		}
	case "drives", "pmem":
		if o["drive_id"] != id && o["id"] != id {
			return errors.New("The id from the path does not match the id from the body!")
		}
		p, _ := o["path_on_host"].(string)
		mode := os.O_RDWR
		if o["is_read_only"] == true || o["read_only"] == true {
			mode = os.O_RDONLY
		}
		f, err := os.OpenFile(p, mode, 0)
		if err != nil {
			return fmt.Errorf("Drive error: Unable to create the virtio block device: Virtio backend error: Error manipulating the backing file: %w %s", err, p)
		}
		f.Close()
	case "vsock":
		if c, _ := o["guest_cid"].(float64); c < 3 {
			return errors.New("Vsock error: guest_cid must be at least 3")
		}
	}
	return nil
}

func (s *server) action(w http.ResponseWriter, body []byte) {
	var a struct {
		Type string `json:"action_type"`
	}
	json.Unmarshal(body, &a)
	switch a.Type {
	case "InstanceStart":
	case "FlushMetrics", "SendCtrlAltDel":
		if s.state == notStarted {
			fault(w, errNotStarted)
			return
		}
		if a.Type == "SendCtrlAltDel" {
			os.Exit(0)
		}
		w.WriteHeader(http.StatusNoContent)
		return
	default:
		fault(w, "An error occurred when deserializing the json body of a request: unknown variant `%s`.", a.Type)
		return
	}
	if s.state != notStarted {
		fault(w, errStarted)
		return
	}
	if s.config["/boot-source"] == nil {
		fault(w, "Cannot start microvm without kernel configuration.")
		return
	}
	var v struct {
		Path string `json:"uds_path"`
	}
	json.Unmarshal(s.config["/vsock"], &v)
	if v.Path != "" {
		if err := s.listen(v.Path); err != nil {
			fault(w, "Vsock error: %v", err)
			return
		}
	}
	s.state = running
	close(s.thawed)
	w.WriteHeader(http.StatusNoContent)
}

// listen opens the machine's vsock. A file at its path is an error, as with the real one.
func (s *server) listen(path string) error {
	l, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("Cannot create backend for vsock device: UnixBind(%w)", err)
	}
	s.vsock = l
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go s.guest(c)
		}
	}()
	return nil
}

// guest answers one connection that the host makes to it. While the machine is paused nothing answers at all.
func (s *server) guest(c net.Conn) {
	defer c.Close()
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil {
		return
	}
	s.mu.Lock()
	thawed := s.thawed
	s.mu.Unlock()
	<-thawed
	var port int
	if _, err := fmt.Sscanf(line, "CONNECT %d\n", &port); err != nil || port != 1024 {
		return // nobody listens: the end, without a word
	}
	s.mu.Lock()
	s.conns[c] = true
	s.mu.Unlock()
	fmt.Fprintf(c, "OK %d\n", 1073741824)
	mux.Serve(struct {
		io.Reader
		io.Writer
	}{r, c}, s.answerHost, func() error { return io.EOF })
}

func (s *server) answerHost(st *mux.Stream, body []byte) {
	s.mu.Lock()
	thawed := s.thawed
	s.mu.Unlock()
	<-thawed
	var q vmwire.Request
	json.Unmarshal(body, &q)
	st.Accept()
	a := vmwire.Answer{Version: vmwire.Version}
	if q.Op != vmwire.OpHello && q.Op != vmwire.OpRenew {
		a.Error = "the stand-in has no sandbox"
	}
	b, _ := json.Marshal(a)
	st.Write(b)
	st.CloseWrite()
}

func (s *server) turn(w http.ResponseWriter, body []byte) {
	var a struct {
		State string `json:"state"`
	}
	json.Unmarshal(body, &a)
	if s.state == notStarted {
		fault(w, errNotStarted)
		return
	}
	switch {
	case a.State == paused && s.state == running:
		s.state, s.thawed = paused, make(chan struct{})
	case a.State == "Resumed" && s.state == paused:
		s.state = running
		close(s.thawed)
	case a.State != paused && a.State != "Resumed":
		fault(w, "An error occurred when deserializing the json body of a request: unknown variant `%s`, expected `Paused` or `Resumed`.", a.State)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

type snapshotRequest struct {
	Type   string `json:"snapshot_type"`
	State  string `json:"snapshot_path"`
	Memory string `json:"mem_file_path"`
	From   struct {
		Type string `json:"backend_type"`
		Path string `json:"backend_path"`
	} `json:"mem_backend"`
	Resume bool `json:"resume_vm"`
	Vsock  struct {
		Path string `json:"uds_path"`
	} `json:"vsock_override"`
}

const snapshotMark = "stand-in snapshot "

func (s *server) save(w http.ResponseWriter, body []byte) {
	var q snapshotRequest
	json.Unmarshal(body, &q)
	switch s.state {
	case notStarted:
		fault(w, errNotStarted)
		return
	case running:
		fault(w, "Cannot create snapshot: Operation not allowed: save/restore unavailable while running")
		return
	}
	var m struct {
		Size int64 `json:"mem_size_mib"`
	}
	json.Unmarshal(s.config["/machine-config"], &m)
	if q.Type != "Full" && q.Type != "Diff" {
		fault(w, "An error occurred when deserializing the json body of a request: unknown variant `%s`.", q.Type)
		return
	}
	for f, size := range map[string]int64{q.State: 0, q.Memory: m.Size << 20} {
		if err := saveFile(f, snapshotMark+s.version, size); err != nil {
			fault(w, "Create snapshot error: %v", err)
			return
		}
	}
	// It breaks every connection; listeners stay.
	for c := range s.conns {
		c.Close()
		delete(s.conns, c)
	}
	w.WriteHeader(http.StatusNoContent)
}

// saveFile writes a file of a snapshot as the real one does: one that is there and has the right size is written into.
func saveFile(path, text string, size int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || st.Size() != size {
		if err := errors.Join(err, f.Truncate(0), f.Truncate(size)); err != nil {
			return err
		}
	}
	_, err = f.WriteAt([]byte(text), 0)
	return err
}

func (s *server) load(w http.ResponseWriter, body []byte) {
	var q snapshotRequest
	json.Unmarshal(body, &q)
	if s.state != notStarted || len(s.config) > 0 {
		fault(w, "Load snapshot error: Loading a microVM snapshot not allowed after configuring boot-specific resources.")
		return
	}
	bad := func(text string, args ...any) {
		fault(w, "Load snapshot error: "+text, args...)
		// A load that fails ends the process, after its answer.
		if f, ok := w.(http.Flusher); ok {
			f.Flush()
		}
		time.AfterFunc(10*time.Millisecond, func() { os.Exit(1) })
	}
	if q.From.Type != "File" {
		bad("Failed to restore from snapshot: the stand-in has no memory that faults")
		return
	}
	for _, f := range []string{q.State, q.From.Path} {
		text, err := begin(f)
		if err != nil {
			bad("Failed to restore from snapshot: %v", err)
			return
		}
		if text != snapshotMark+s.version {
			bad("Failed to restore from snapshot: Failed to get snapshot state from file: CRC validation failed")
			return
		}
	}
	if err := s.listen(q.Vsock.Path); err != nil {
		bad("Failed to restore from snapshot: %v", err)
		return
	}
	s.state = paused
	if q.Resume {
		s.state = running
		close(s.thawed)
	}
	w.WriteHeader(http.StatusNoContent)
}

// begin is as much of a file as the mark is long.
func begin(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 64))
	return strings.TrimRight(string(text), "\x00"), err
}
