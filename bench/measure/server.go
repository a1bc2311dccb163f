package measure

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/client"
)

// Server is a `dsec up` on folders of its own.
type Server struct {
	Dir    string // temporary, holds state and run
	Client *client.Client
	Layer  string // the root file system's

	cfg   Config
	bin   string
	cmd   *exec.Cmd
	group *Group // of dsec up; the keeper moves itself into one of its own
	done  chan error
	log   bytes.Buffer
}

// Context ends at SIGINT and SIGTERM.
func Context() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
}

// Binary is the program under test: $DSEC, else bin/dsec below the working folder.
func Binary() string {
	if p := os.Getenv("DSEC"); p != "" {
		return p
	}
	return "bin/dsec"
}

// Config says how a server runs.
type Config struct {
	Pool string   // size, such as "4g"
	Args []string // further arguments of dsec up
	Env  []string // further environment
}

// Start starts a server with a pool of that size ("4g") and puts the root file system into it as a layer.
func Start(ctx context.Context, pool string) (*Server, error) {
	s, err := StartEmpty(ctx, Config{Pool: pool})
	if err != nil {
		return nil, err
	}
	if err := s.importTree(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// StartEmpty starts a server without any layer.
func StartEmpty(ctx context.Context, cfg Config) (s *Server, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("benchmarks need root, as the host does")
	}
	s = &Server{cfg: cfg}
	if s.bin, err = filepath.Abs(Binary()); err != nil {
		return nil, err
	}
	if s.Dir, err = os.MkdirTemp("", "dsec-bench-"); err != nil {
		return nil, err
	}
	if err := s.start(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// Restart ends the server, calls between, and starts it again on the same folders.
func (s *Server) Restart(ctx context.Context, between func() error) error {
	if err := s.end(); err != nil {
		return err
	}
	if err := between(); err != nil {
		return err
	}
	return s.start(ctx)
}

func (s *Server) start(ctx context.Context) (err error) {
	s.done, s.log = make(chan error, 1), bytes.Buffer{}
	if s.group, err = NewGroup("up"); err != nil {
		return err
	}
	at, err := s.group.Open()
	if err != nil {
		return err
	}
	defer at.Close()
	args := []string{"up", "--state", s.path("state"), "--run", s.path("run"), "--pool-size", s.cfg.Pool, "--listen", "", "--log-level", "warn"}
	s.cmd = exec.Command(s.bin, append(args, s.cfg.Args...)...)
	s.cmd.Stdout, s.cmd.Stderr = &s.log, &s.log
	s.cmd.Env = append(os.Environ(), s.cfg.Env...)
	// A process group of its own: an interrupt from the terminal is passed on by us, once.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, UseCgroupFD: true, CgroupFD: int(at.Fd())}
	if err := s.cmd.Start(); err != nil {
		s.cmd = nil
		return err
	}
	cmd, done := s.cmd, s.done
	go func() { done <- cmd.Wait() }()
	s.Client, err = s.connect(ctx)
	return err
}

func (s *Server) importTree(ctx context.Context) error {
	tree, err := Tar()
	if err != nil {
		return err
	}
	made, err := s.Client.ImportLayer(ctx, "base/bench", "bench", bytes.NewReader(tree))
	if err != nil {
		return fmt.Errorf("import the root file system: %w", err)
	}
	s.Layer = made.Layer.Id
	return nil
}

func (s *Server) path(name string) string { return filepath.Join(s.Dir, name) }

func (s *Server) connect(ctx context.Context) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		c, err := client.Connect(ctx, client.Config{URL: "unix:" + s.path("run/dsec.sock"), KeyFile: s.path("run/key")})
		if err == nil {
			return c, nil
		}
		select {
		case end := <-s.done:
			s.done <- end
			return nil, fmt.Errorf("dsec up ended (%v): %s", end, tail(s.log.String()))
		case <-ctx.Done():
			return nil, fmt.Errorf("dsec up is not ready: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Options of a sandbox on the root file system, with the platform's default limits.
func (s *Server) Options() client.Options { return client.Options{Layers: []string{s.Layer}} }

// keeper is the group in which the keeper and all sandboxes are.
func (s *Server) keeper() (*Group, error) {
	id, err := os.ReadFile(s.path("state/host-id"))
	if err != nil {
		return nil, err
	}
	root, err := GroupRoot()
	if err != nil {
		return nil, err
	}
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return -1
	}, string(id))
	return &Group{filepath.Join(root, "dsec-"+name)}, nil
}

// CPU is the time used by dsec up, its keeper and all sandboxes so far.
func (s *Server) CPU() (time.Duration, error) {
	a, b, err := s.Parts()
	return a + b, err
}

// Parts is CPU taken apart: dsec up, and the keeper with all sandboxes.
func (s *Server) Parts() (up, keeper time.Duration, err error) {
	if up, err = s.group.CPU(); err != nil {
		return 0, 0, err
	}
	k, err := s.keeper()
	if err != nil {
		return 0, 0, err
	}
	keeper, err = k.CPU()
	return up, keeper, err
}

// Pids are dsec up and, second, its keeper; the others are of sandboxes.
func (s *Server) Pids() (up, keeper int, others []int, err error) {
	k, err := s.keeper()
	if err != nil {
		return 0, 0, nil, err
	}
	for _, p := range k.Pids() {
		if exe, _ := os.Readlink("/proc/" + strconv.Itoa(p) + "/exe"); exe == s.bin {
			keeper = p
		} else {
			others = append(others, p)
		}
	}
	return s.cmd.Process.Pid, keeper, others, nil
}

// Settle returns when the server has done what it does in the background (its pools are full again), at the latest after a while.
func (s *Server) Settle() {
	const look = 10 * time.Millisecond
	before, err := s.CPU()
	for end := time.Now().Add(5 * time.Second); err == nil && time.Now().Before(end); {
		time.Sleep(look)
		var now time.Duration
		now, err = s.CPU()
		if now-before < look/20 {
			return
		}
		before = now
	}
}

// Log is what the server wrote since it started.
func (s *Server) Log() string { return s.log.String() }

// Stop stops all sandboxes and the server, and removes its folders.
func (s *Server) Stop() error {
	err := s.end()
	if s.Dir != "" {
		unmountBelow(s.Dir)
		err = errors.Join(err, os.RemoveAll(s.Dir))
	}
	return err
}

// end stops all sandboxes and the server.
func (s *Server) end() error {
	var errs []error
	var keeper *Group
	if s.cmd != nil {
		keeper, _ = s.keeper()
		s.cmd.Process.Signal(syscall.SIGINT)
		select {
		case err := <-s.done:
			if err != nil {
				Note("dsec up ended with %v: %s", err, tail(s.log.String()))
			}
		case <-time.After(2 * time.Minute):
			s.cmd.Process.Kill()
			errs = append(errs, fmt.Errorf("dsec up did not end: %s", tail(s.log.String())))
		}
	}
	if keeper != nil {
		if _, err := os.Stat(keeper.Path); err == nil {
			errs = append(errs, fmt.Errorf("dsec up left %s", keeper.Path), keeper.Remove())
		}
	}
	if s.group != nil {
		errs = append(errs, s.group.Remove())
	}
	s.cmd, s.group = nil, nil
	return errors.Join(errs...)
}

// unmountBelow detaches what a server that died left mounted.
func unmountBelow(dir string) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return
	}
	lines := strings.Split(string(b), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if f := strings.Fields(lines[i]); len(f) > 1 && strings.HasPrefix(f[1], dir+"/") {
			syscall.Unmount(f[1], syscall.MNT_DETACH)
		}
	}
}

func tail(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > 2000 {
		s = "..." + s[len(s)-2000:]
	}
	return s
}

// URL is the server's address.
func (s *Server) URL() string { return "unix:" + s.path("run/dsec.sock") }

// KeyFile holds the first key.
func (s *Server) KeyFile() string { return s.path("run/key") }
