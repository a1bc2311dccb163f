package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/client"
)

// Uids of a service's sandboxes: ranges that do not meet those of another service on this machine.
const (
	uidsPerBox = 65536
	slots      = 300
	firstUID   = 0x10000000
)

var services atomic.Uint32

// service is one `dsec up`, `dsec host` or `dsec gateway`.
type service struct {
	role  string // up | host | gateway
	dir   string
	state string
	run   string
	uid   uint32 // first of its sandboxes' uids
	args  []string
	env   []string
	conf  string // more of its settings

	mu  sync.Mutex
	cmd *exec.Cmd
	end chan error
}

// newService prepares folders and arguments; begin starts it.
func newService(dir, role string, args ...string) *service {
	n := services.Add(1)
	s := &service{role: role, dir: dir, state: filepath.Join(dir, "state"), run: filepath.Join(dir, "run"), args: args,
		uid: firstUID + (n-1)*slots*uidsPerBox}
	return s
}

func (s *service) argv() []string {
	args := []string{s.role, "--state", s.state, "--run", s.run}
	if s.role != "gateway" {
		args = append(args, "--uid-base", fmt.Sprint(s.uid), "--slots", fmt.Sprint(slots), "--config", filepath.Join(s.dir, "conf"))
	}
	if s.role != "host" {
		args = append(args, "--listen", "")
	}
	return append(args, s.args...)
}

func (s *service) logFile() string { return filepath.Join(s.dir, "log") }

func (s *service) socket() string {
	if s.role == "host" {
		return filepath.Join(s.run, "host.sock")
	}
	return filepath.Join(s.run, "dsec.sock")
}

// begin starts the service and waits until it answers.
func (s *service) begin() error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	if s.role != "gateway" {
		// A range of its own: the built-in ones may be taken by other hosts of this machine.
		n := int(s.uid-firstUID)/(slots*uidsPerBox) + os.Getpid()*8
		conf := fmt.Sprintf("[network]\nranges = [%q]\n%s", fmt.Sprintf("10.%d.%d.0/22", 64+n>>6&63, n<<2&255), s.conf)
		if err := os.WriteFile(filepath.Join(s.dir, "conf"), []byte(conf), 0o600); err != nil {
			return err
		}
	}
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	before := 0
	if b, err := os.ReadFile(s.logFile()); err == nil {
		before = len(b)
	}
	cmd := exec.Command(binary, s.argv()...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), s.env...)
	// Its keeper must not get a signal that the terminal sends to the tests.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	end := make(chan error, 1)
	go func() { end <- cmd.Wait() }()
	s.mu.Lock()
	s.cmd, s.end = cmd, end
	s.mu.Unlock()
	deadline := time.Now().Add(patience)
	for time.Now().Before(deadline) {
		select {
		case err := <-end:
			end <- err
			return fmt.Errorf("dsec %s ended: %v\n%s", s.role, err, s.tail())
		case <-time.After(20 * time.Millisecond):
		}
		b, err := os.ReadFile(s.logFile())
		ready := s.role == "gateway" || err == nil && len(b) > before && bytes.Contains(b[before:], []byte("host is ready"))
		if ready && s.answers() {
			return nil
		}
	}
	return fmt.Errorf("dsec %s does not answer\n%s", s.role, s.tail())
}

func (s *service) answers() bool {
	c, err := net.Dial("unix", s.socket())
	if err != nil {
		return false
	}
	c.Close()
	if s.role == "host" {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "GET", "http://dsec/readyz", nil)
	if err != nil {
		return false
	}
	resp, err := (&http.Client{Transport: s.transport()}).Do(r)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

func (s *service) transport() *http.Transport {
	return &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64, IdleConnTimeout: 5 * time.Second, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", s.socket())
	}}
}

// tail is the end of the service's log.
func (s *service) tail() string {
	b, _ := os.ReadFile(s.logFile())
	if len(b) > 6000 {
		b = b[len(b)-6000:]
	}
	return string(b)
}

// kill ends the process at once, as a crash does, and waits until it is gone.
func (s *service) kill() {
	s.mu.Lock()
	cmd, end := s.cmd, s.end
	s.mu.Unlock()
	if cmd == nil {
		return
	}
	_ = cmd.Process.Kill()
	err := <-end
	end <- err
}

// finish ends the service by a signal and returns its error.
func (s *service) finish(sig os.Signal) error {
	s.mu.Lock()
	cmd, end := s.cmd, s.end
	s.cmd = nil
	s.mu.Unlock()
	if cmd == nil {
		return nil
	}
	_ = cmd.Process.Signal(sig)
	select {
	case err := <-end:
		return err
	case <-time.After(patience):
		_ = cmd.Process.Kill()
		<-end
		return fmt.Errorf("it did not end within %v of the signal", patience)
	}
}

func (s *service) key() string {
	b, err := os.ReadFile(filepath.Join(s.run, "key"))
	if err != nil {
		panic(err)
	}
	return strings.TrimSpace(string(b))
}

// client connects anew, as another program would.
func (s *service) client() *client.Client {
	c, err := client.New(client.Config{URL: "unix:" + s.socket(), Key: s.key(), HTTP: &http.Client{Transport: s.transport()}})
	if err != nil {
		panic(err)
	}
	return c
}

// start begins a service for one test and ends it, with a check that nothing is left.
func start(t testing.TB, s *service) *service {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	t.Cleanup(func() {
		if err := s.finish(syscall.SIGTERM); err != nil {
			t.Errorf("dsec %s at its end: %v\n%s", s.role, err, s.tail())
		}
		if err := s.nothingLeft(); err != nil {
			t.Errorf("dsec %s has ended: %v\n%s", s.role, err, s.tail())
		}
		if t.Failed() {
			t.Logf("log of dsec %s:\n%s", s.role, s.tail())
		}
	})
	if err := s.begin(); err != nil {
		t.Fatal(err)
	}
	return s
}

// own is a `dsec up` for one test.
func own(t testing.TB, args ...string) *service {
	t.Helper()
	return start(t, newService(ownDir(t), "up", withDefaults(args)...))
}

func withDefaults(args []string) []string {
	for _, a := range args {
		if a == "--pool-size" {
			return args
		}
	}
	return append(args, "--pool-size", "1g")
}

// ownDir is a folder on the disk that is removed with the test; its path is short, for sockets.
func ownDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp(scratch, "s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

var common struct {
	once    sync.Once
	service *service
	err     error
}

// shared is the `dsec up` that most tests use.
func shared(t testing.TB) *service {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	common.once.Do(func() {
		s := newService(filepath.Join(scratch, "shared"), "up", "--pool-size", "6g")
		common.service, common.err = s, s.begin()
	})
	if common.err != nil {
		t.Fatal(common.err)
	}
	return common.service
}

// sharedEnd checks that the tests' sandboxes left nothing behind, then that the service itself leaves nothing.
func sharedEnd() error {
	s := common.service
	if s == nil {
		return nil
	}
	idle := s.idle()
	err := errors.Join(idle, s.finish(syscall.SIGTERM), s.nothingLeft())
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, s.tail())
	}
	return err
}

// post makes a call as curl does and returns status and body.
func (s *service) post(t testing.TB, method, body string, header ...string) (int, string) {
	t.Helper()
	r, err := http.NewRequest("POST", "http://dsec/dsec.v1."+method, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer "+s.key())
	return s.send(t, r, header...)
}

func (s *service) send(t testing.TB, r *http.Request, header ...string) (int, string) {
	t.Helper()
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			r.Host = header[i+1]
			continue
		}
		r.Header.Set(header[i], header[i+1])
		if header[i+1] == "" {
			r.Header.Del(header[i])
		}
	}
	tr := s.transport()
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr, Timeout: patience, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := c.Do(r)
	if err != nil {
		t.Fatalf("%s %s: %v", r.Method, r.URL, err)
	}
	defer resp.Body.Close()
	b, err := readAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", r.Method, r.URL, err)
	}
	return resp.StatusCode, string(b)
}

// wireError is the body of an error answer.
type wireError struct{ Code, Message string }

func parseError(t testing.TB, body string) wireError {
	t.Helper()
	var e wireError
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		t.Fatalf("not an error answer: %q", body)
	}
	return e
}
