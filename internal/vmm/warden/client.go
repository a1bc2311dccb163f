package warden

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Client reaches the warden of a run folder; it holds no connection.
type Client struct{ dir string }

// NewClient is a client of the folder's warden, which need not live yet.
func NewClient(dir string) *Client { return &Client{dir} }

// Spawn starts a warden for the folder where none answers, and returns when one does. exe and args make this program a warden.
func Spawn(ctx context.Context, exe string, args []string, dir, instance string) (*Client, error) {
	c := NewClient(dir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("warden: run folder: %w", err)
	}
	if _, err := c.List(ctx); err == nil {
		return c, nil
	}
	log, err := os.OpenFile(filepath.Join(dir, LogName), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("warden: log: %w", err)
	}
	defer log.Close()
	begin := func() (chan error, error) {
		cmd := exec.Command(exe, append(append([]string(nil), args...), "--dir", dir, "--instance", instance)...)
		cmd.Stdout, cmd.Stderr, cmd.Dir = log, log, "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			return nil, fmt.Errorf("warden: start: %w", err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		return ended, nil
	}
	ended, err := begin()
	if err != nil {
		return nil, err
	}
	for {
		if _, err = c.List(ctx); err == nil {
			return c, nil
		}
		select {
		case e := <-ended:
			// Another one may have been faster.
			if _, err := c.List(ctx); err == nil {
				return c, nil
			}
			var code *exec.ExitError
			if !errors.As(e, &code) || code.ExitCode() != exitLocked {
				return nil, fmt.Errorf("warden: ended at its start (%v); see %s: %w", e, log.Name(), err)
			}
			// The lock is with a sweep of what a dead warden left.
			if ended, err = begin(); err != nil {
				return nil, err
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("warden: not ready (%v): %w", err, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (c *Client) dial(ctx context.Context) (*net.UnixConn, error) {
	d, err := os.Open(c.dir)
	if err != nil {
		return nil, fmt.Errorf("warden: %w", err)
	}
	defer d.Close()
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), SocketName))
	if err != nil {
		return nil, fmt.Errorf("warden: %w: %w", err, sandbox.ErrLost)
	}
	return conn.(*net.UnixConn), nil
}

func (c *Client) call(ctx context.Context, r *request, files ...*os.File) (answer, []*os.File, error) {
	var a answer
	conn, err := c.dial(ctx)
	if err != nil {
		return a, nil, err
	}
	defer conn.Close()
	if at, ok := ctx.Deadline(); ok {
		conn.SetDeadline(at)
	} else {
		conn.SetDeadline(time.Now().Add(callBound + killBound))
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := send(conn, r, files); err != nil {
		return a, nil, fmt.Errorf("warden: %s: %w: %w", r.Op, err, sandbox.ErrLost)
	}
	out, err := receive(conn, &a)
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
		if s := sentinels[a.Code]; s != nil {
			err = &remote{a.Error, s}
		}
	} else if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("warden: %s: %w", r.Op, ctx.Err())
		} else { // it died over it
			err = fmt.Errorf("warden: %s: %w: %w", r.Op, err, sandbox.ErrLost)
		}
	}
	if err != nil {
		for _, f := range out {
			f.Close()
		}
		return a, nil, err
	}
	return a, out, nil
}

type remote struct {
	text string
	kind error
}

func (e *remote) Error() string { return e.text }
func (e *remote) Unwrap() error { return e.kind }

// Start starts a monitor and returns its pid. ErrExists while one of the ID is remembered.
func (c *Client) Start(ctx context.Context, p *Process, files ...*os.File) (int, error) {
	a, _, err := c.call(ctx, &request{Op: "start", Process: p}, files...)
	return a.Pid, err
}

// Kill ends a monitor and returns when no process and no cgroup of it is left. An unknown one is no error.
func (c *Client) Kill(ctx context.Context, id string) error {
	_, _, err := c.call(ctx, &request{Op: "kill", ID: id})
	return err
}

// Forget drops the memory of a monitor that has ended; its ID may be used again.
func (c *Client) Forget(ctx context.Context, id string) error {
	_, _, err := c.call(ctx, &request{Op: "forget", ID: id})
	return err
}

// SetDeadline has the monitor killed at a time, also while the host is away; zero disarms.
func (c *Client) SetDeadline(ctx context.Context, id string, at time.Time) error {
	_, _, err := c.call(ctx, &request{Op: "deadline", ID: id, At: at})
	return err
}

// List are the monitors that live or are remembered, oldest first.
func (c *Client) List(ctx context.Context) ([]Alive, error) {
	a, _, err := c.call(ctx, &request{Op: "list"})
	return a.List, err
}

// Pages has the warden answer for the memory of a monitor that connects to the listener, from a memory file that must not change.
func (c *Client) Pages(ctx context.Context, id string, listener, memory *os.File) error {
	_, _, err := c.call(ctx, &request{Op: "pages", ID: id}, listener, memory)
	return err
}

// Hold leaves a descriptor with the warden under a name, as long as it lives.
func (c *Client) Hold(ctx context.Context, name string, f *os.File) error {
	_, _, err := c.call(ctx, &request{Op: "hold", ID: name}, f)
	return err
}

// Held returns a new descriptor of what was left; ErrNotFound when nothing was.
func (c *Client) Held(ctx context.Context, name string) (*os.File, error) {
	_, files, err := c.call(ctx, &request{Op: "held", ID: name})
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		for _, f := range files {
			f.Close()
		}
		return nil, fmt.Errorf("warden: %d files came: %w", len(files), sandbox.ErrLost)
	}
	return files[0], nil
}

// Drop closes what was left under a name.
func (c *Client) Drop(ctx context.Context, name string) error {
	_, _, err := c.call(ctx, &request{Op: "drop", ID: name})
	return err
}

// Shutdown ends all monitors and the warden.
func (c *Client) Shutdown(ctx context.Context) error {
	_, _, err := c.call(ctx, &request{Op: "shutdown"})
	return err
}

// Watch calls ended for each monitor that ends, first for those that have, until ctx ends or the connection is lost.
func (c *Client) Watch(ctx context.Context, ended func(Alive)) error {
	conn, err := c.dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := send(conn, &request{Op: "watch"}, nil); err != nil {
		return err
	}
	for s := bufio.NewScanner(conn); s.Scan(); {
		var a Alive
		if err := json.Unmarshal(s.Bytes(), &a); err != nil {
			return fmt.Errorf("warden: watch: %w", err)
		}
		ended(a)
	}
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("warden: watch: %w", sandbox.ErrLost)
}

// Sweep removes what a dead warden left; where another one lives by now, that did so at its start. It waits for one that is dying: its
// lock is held a moment longer than it answers, by a monitor that it was about to start.
func (c *Client) Sweep(ctx context.Context, instance string) error {
	for end := time.Now().Add(killBound); ; {
		err := Sweep(c.dir, instance)
		if !errors.Is(err, sandbox.ErrExists) {
			return err
		}
		if _, lost := c.List(ctx); lost == nil {
			return nil
		}
		if time.Now().After(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("warden: sweep: %w", ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Sweep removes what a dead warden left. ErrExists when it lives.
func Sweep(dir, instance string) error {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	l, err := lock(dir)
	if err != nil {
		return err
	}
	defer l.Close()
	g, err := findGroups("dsec-" + instance + "-vm")
	if err != nil {
		return err
	}
	return g.sweep()
}
