package blob

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Park holds descriptors outside of this process, in one that outlives it: the keeper.
type Park interface {
	// Park keeps descriptors under a name, in place of what was there. The caller's stay its own.
	Park(ctx context.Context, name, note string, files ...*os.File) error
	// Parked returns new descriptors of what is kept; sandbox.ErrNotFound when nothing is. Both fail with sandbox.ErrLost while there
	// is no keeper.
	Parked(ctx context.Context, name string) (note string, files []*os.File, err error)
}

// parkName is the connection and the mount in the park; the note is their mark.
const parkName = "blobd"

// SupervisorConfig is what a host knows of its daemon.
type SupervisorConfig struct {
	Config
	Program []string // the program and the first arguments that make it a daemon
	Stores  []string // what the daemon opens
	Group   string   // cgroup of the daemon in the v2 tree; empty: none
	Eager   bool     // start the daemon at once, not at the first need
	LogFile string   // of the daemon; empty: blobd.log in the run folder
}

// Supervisor is the host's side: it starts the daemon when it is first needed or at once, and again within milliseconds when it died, and takes
// over one that lives. Reads that wait when a daemon dies are answered by the next one.
type Supervisor struct {
	cfg  SupervisorConfig
	park Park
	log  *slog.Logger

	start chan struct{} // closed at the first need
	once  sync.Once

	mu      sync.Mutex
	ready   chan struct{} // closed while a daemon answers; replaced when it died
	up      bool
	mount   *os.File
	failure error // why there is no daemon, or nil
	ended   bool
	stopped bool // Stop was called: a daemon that ends is not started again
	starts  int
}

// NewSupervisor makes a supervisor. It starts nothing.
func NewSupervisor(cfg SupervisorConfig, park Park, log *slog.Logger) (*Supervisor, error) {
	if err := cfg.Config.fill(); err != nil {
		return nil, err
	}
	if len(cfg.Program) == 0 || park == nil {
		return nil, fmt.Errorf("blobd: no program or no keeper for it: %w", sandbox.ErrInvalid)
	}
	if cfg.LogFile == "" {
		cfg.LogFile = filepath.Join(cfg.RunDir, "blobd.log")
	}
	cfg.Mark = ""
	cfg.Mark = fmt.Sprintf("%x", markOf(fmt.Sprintf("%d %+v %q %q", ProtocolVersion, cfg.Config, cfg.Stores, cfg.Program)))
	return &Supervisor{cfg: cfg, park: park, log: log, start: make(chan struct{}), ready: make(chan struct{})}, nil
}

const (
	startBound  = 15 * time.Second // of a daemon's start, with the end of the one before
	steadyAfter = 10 * time.Second // a daemon that lived so long is started again at once
	keeperPoll  = 20 * time.Millisecond
	parkPoll    = time.Second
	firstWait   = 20 * time.Millisecond
	longestWait = 5 * time.Second
)

// Run supervises until ctx ends; the daemon goes on then. See Stop.
func (s *Supervisor) Run(ctx context.Context) error {
	defer s.finish()
	if !s.needed(ctx) {
		return nil
	}
	wait := time.Duration(0)
	for {
		began := time.Now()
		err := s.watch(ctx)
		if ctx.Err() != nil || s.isStopped() {
			return nil
		}
		s.setDown(err)
		if errors.Is(err, sandbox.ErrLost) && time.Since(began) < keeperPoll { // no keeper yet
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(keeperPoll):
			}
			continue
		}
		if time.Since(began) > steadyAfter {
			wait = 0
		}
		s.log.Error("blobd ended; it is started again", "err", err, "pause", wait)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		wait = min(max(2*wait, firstWait), longestWait)
	}
}

func (s *Supervisor) isStopped() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopped
}

// needed waits until somebody wants a blob, or finds that an earlier host's daemon or its connection is there.
func (s *Supervisor) needed(ctx context.Context) bool {
	for {
		if s.lives(ctx) {
			return true
		}
		t := time.NewTimer(keeperPoll)
		if s.keeperAnswers(ctx) {
			t.Stop() // and has nothing of ours
			if s.cfg.Eager {
				return true
			}
			t = time.NewTimer(time.Hour)
		}
		select {
		case <-s.start:
			t.Stop()
			return true
		case <-ctx.Done():
			t.Stop()
			return false
		case <-t.C:
		}
	}
}

func (s *Supervisor) keeperAnswers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	_, files, err := s.park.Parked(ctx, parkName)
	closeFiles(files)
	return !errors.Is(err, sandbox.ErrLost)
}

func (s *Supervisor) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.failure = fmt.Errorf("blobd: its supervisor has ended: %w", sandbox.ErrState)
	if !s.up {
		close(s.ready)
		s.up = true
	}
	if s.mount != nil {
		s.mount.Close()
		s.mount = nil
	}
}

func (s *Supervisor) setDown(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.up {
		s.ready, s.up = make(chan struct{}), false
	}
	s.failure = err
}

func (s *Supervisor) setUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failure = nil
	if !s.up {
		close(s.ready)
		s.up = true
	}
}

// lives reports whether a daemon answers, or its connection is parked.
func (s *Supervisor) lives(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	if _, files, err := s.park.Parked(ctx, parkName); err == nil {
		closeFiles(files)
		return true // a daemon that died with its host: reads may wait
	}
	c, err := Dial(ctx, s.cfg.RunDir)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// watch connects to the daemon, which it starts when none serves the connection, and returns when it has ended.
func (s *Supervisor) watch(ctx context.Context) error {
	mark, fuse, err := s.connection(ctx)
	if err != nil {
		return err
	}
	c, err := s.reach(ctx, mark, fuse)
	// Not kept: a process that has the connection and waits for an answer on it could not be ended, were the daemon dead too.
	fuse.Close()
	if err != nil {
		return err
	}
	defer c.Close()
	s.setUp()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	for {
		c.c.SetReadDeadline(time.Now().Add(parkPoll))
		var b [1]byte
		_, err := c.c.Read(b[:]) // it says nothing: this ends with it
		if !errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil {
			return fmt.Errorf("blobd: connection: %w", err)
		}
		if err := s.parkAgain(ctx, mark); err != nil {
			s.log.Warn("blobd: its connection is not parked", "err", err)
		}
	}
}

// parkAgain gives the connection to a keeper that came in place of one that died.
func (s *Supervisor) parkAgain(ctx context.Context, mark string) error {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	_, files, err := s.park.Parked(ctx, parkName)
	closeFiles(files)
	if err == nil || errors.Is(err, sandbox.ErrLost) || !errors.Is(err, sandbox.ErrNotFound) {
		return nil // the next look tells
	}
	c, err := Dial(ctx, s.cfg.RunDir)
	if err != nil {
		return err
	}
	defer c.Close()
	_, fuse, err := c.call(ctx, call{Op: "fuse"})
	if err != nil {
		return err
	}
	if fuse == nil {
		return fmt.Errorf("blobd: no descriptor came: %w", sandbox.ErrInvalid)
	}
	defer fuse.Close()
	s.mu.Lock()
	mount := s.mount
	s.mu.Unlock()
	return s.park.Park(ctx, parkName, mark, fuse, mount)
}

// connection returns the parked FUSE connection, or makes a file system and parks it.
func (s *Supervisor) connection(ctx context.Context) (mark string, fuse *os.File, err error) {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	mark, files, err := s.park.Parked(ctx, parkName)
	if err == nil && len(files) == 2 {
		s.setMount(files[1])
		return mark, files[0], nil
	}
	closeFiles(files)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return "", nil, fmt.Errorf("blobd: parked connection: %w", err)
	}
	fuse, mount, err := Mount()
	if err != nil {
		return "", nil, err
	}
	mark = sandbox.NewKey()
	if err := s.park.Park(ctx, parkName, mark, fuse, mount); err != nil {
		fuse.Close()
		mount.Close()
		return "", nil, fmt.Errorf("blobd: park the connection: %w", err)
	}
	s.setMount(mount)
	return mark, fuse, nil
}

func (s *Supervisor) setMount(f *os.File) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mount != nil {
		s.mount.Close()
	}
	s.mount = f
}

// reach dials the daemon that serves the connection. One of other settings, or of a connection that is gone, is replaced.
func (s *Supervisor) reach(ctx context.Context, mark string, fuse *os.File) (*Client, error) {
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	if c, err := Dial(ctx, s.cfg.RunDir); err == nil {
		h, err := c.Hello(ctx)
		if err == nil && h.Version == ProtocolVersion && h.Mark == s.cfg.Mark && h.Fuse == mark {
			return c, nil
		}
		if err == nil {
			err = c.Stop(ctx)
		}
		c.Close()
		if err != nil {
			return nil, fmt.Errorf("blobd: end the one of before: %w", err)
		}
	}
	ended, err := s.spawn(mark, fuse)
	if err != nil {
		return nil, err
	}
	for {
		c, err := Dial(ctx, s.cfg.RunDir)
		if err == nil {
			h, err := c.Hello(ctx)
			if err == nil && h.Mark == s.cfg.Mark && h.Fuse == mark {
				return c, nil
			}
			c.Close() // the one before is about to end
		}
		select {
		case err := <-ended:
			return nil, fmt.Errorf("blobd: ended at its start (%v); see %s: %w", err, s.cfg.LogFile, sandbox.ErrLost)
		case <-ctx.Done():
			return nil, fmt.Errorf("blobd: does not answer; see %s: %w", s.cfg.LogFile, ctx.Err())
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func (s *Supervisor) spawn(mark string, fuse *os.File) (<-chan error, error) {
	if err := os.MkdirAll(s.cfg.RunDir, 0o700); err != nil {
		return nil, fmt.Errorf("blobd: make run folder: %w", err)
	}
	log, err := os.OpenFile(s.cfg.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("blobd: open log: %w", err)
	}
	defer log.Close()
	c := s.cfg.Config
	c.Fuse = mark
	cmd := exec.Command(s.cfg.Program[0], append(append([]string(nil), s.cfg.Program[1:]...), c.flags(s.cfg.Stores, s.cfg.Group)...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{fuse}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("blobd: start %s: %w", s.cfg.Program[0], err)
	}
	s.mu.Lock()
	s.starts++
	s.mu.Unlock()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // reaps it when it dies before this process does
	return ended, nil
}

// wait returns a connection to the daemon and its mount, which the caller closes; it asks for a daemon.
func (s *Supervisor) wait(ctx context.Context) (*Client, *os.File, error) {
	s.once.Do(func() { close(s.start) })
	for {
		s.mu.Lock()
		ready, failure, ended := s.ready, s.failure, s.ended
		s.mu.Unlock()
		if ended {
			return nil, nil, failure
		}
		select {
		case <-ready:
		case <-ctx.Done():
			if failure == nil {
				failure = ctx.Err()
			}
			return nil, nil, fmt.Errorf("wait for blobd: %w", failure)
		}
		s.mu.Lock()
		var mount *os.File
		if s.mount != nil {
			if fd, err := unix.FcntlInt(s.mount.Fd(), unix.F_DUPFD_CLOEXEC, 3); err == nil {
				mount = os.NewFile(uintptr(fd), s.mount.Name())
			}
		}
		s.mu.Unlock()
		if mount == nil {
			continue
		}
		c, err := Dial(ctx, s.cfg.RunDir)
		if err == nil {
			return c, mount, nil
		}
		mount.Close()
		select { // it died just now
		case <-ctx.Done():
			return nil, nil, err
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Open opens a blob, through the daemon or as a local file when its cache has all of it. Errors are the store's, sandbox.ErrNotFound
// among them, or the context's.
func (s *Supervisor) Open(ctx context.Context, d Data) (*os.File, error) {
	return s.open(ctx, d, false)
}

// OpenSeen opens a blob through the daemon in any case, so that Reads tells what was read.
func (s *Supervisor) OpenSeen(ctx context.Context, d Data) (*os.File, error) {
	return s.open(ctx, d, true)
}

func (s *Supervisor) open(ctx context.Context, d Data, seen bool) (f *os.File, err error) {
	err = s.with(ctx, func(c *Client, mount *os.File) error {
		f, err = c.open(ctx, mount, call{Op: "open", Data: &d, Daemon: seen})
		return err
	})
	return f, err
}

// with calls f, and again when the daemon died meanwhile.
func (s *Supervisor) with(ctx context.Context, f func(*Client, *os.File) error) error {
	ctx, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	for {
		c, mount, err := s.wait(ctx)
		if err != nil {
			return err
		}
		err = f(c, mount)
		c.Close()
		mount.Close()
		var remote *remoteError
		if err == nil || errors.As(err, &remote) || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Reads are the parts of a blob that were read through the daemon since it started, in the order of their first reads; reset forgets
// them.
func (s *Supervisor) Reads(ctx context.Context, digest string, reset bool) (out []Range, err error) {
	err = s.with(ctx, func(c *Client, _ *os.File) error {
		out, err = c.Reads(ctx, digest, reset)
		return err
	})
	return out, err
}

// Stats are the daemon's figures, and how often one was started; the zero value while none was needed yet.
func (s *Supervisor) Stats(ctx context.Context) (st Stats, starts int, err error) {
	s.mu.Lock()
	up, starts := s.up && !s.ended, s.starts
	s.mu.Unlock()
	if !up {
		return st, starts, nil
	}
	c, err := Dial(ctx, s.cfg.RunDir)
	if err != nil {
		return st, starts, err
	}
	defer c.Close()
	st, err = c.Stats(ctx)
	return st, starts, err
}

// Stop ends the daemon of a run folder, if one lives, and removes what it left on the machine except its cache. For a host that ends
// with its sandboxes, after the keeper has let go of the connection.
func (s *Supervisor) Stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, startBound)
	defer cancel()
	if c, err := Dial(ctx, s.cfg.RunDir); err == nil {
		process := -1
		if h, err := c.Hello(ctx); err == nil {
			process, _ = unix.PidfdOpen(h.Pid, 0)
		}
		err := c.Stop(ctx)
		c.Close()
		var remote *remoteError
		if errors.As(err, &remote) {
			return err
		}
		if process >= 0 {
			at, _ := ctx.Deadline()
			unix.Poll([]unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}, int(time.Until(at)/time.Millisecond))
			unix.Close(process)
		}
	}
	// It may end by itself, when nobody has its file system any more. Its end is told by its lock.
	f, err := os.OpenFile(filepath.Join(s.cfg.RunDir, lockName), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("blobd: stop: %w", err)
	}
	defer f.Close()
	for unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("blobd: it does not end: %w", ctx.Err())
		case <-time.After(2 * time.Millisecond):
		}
	}
	for _, name := range []string{SocketName, plainName} {
		os.Remove(filepath.Join(s.cfg.RunDir, name))
	}
	os.RemoveAll(filepath.Join(s.cfg.RunDir, nodesName))
	if s.cfg.Group != "" {
		if dir, err := groupDir(s.cfg.Group); err == nil {
			os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0) // heirs of daemons that were killed may still wait
			for range 400 {                                                 // the process may still be on its way out
				if err := unix.Rmdir(dir); err != unix.EBUSY {
					break
				}
				time.Sleep(5 * time.Millisecond)
			}
		}
	}
	return nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
