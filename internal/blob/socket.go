package blob

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Between the host and the daemon: a Unix stream socket, blobd.sock in the run folder, mode 0600, peers of the same user. A message is
// u32 length (little endian) and that much JSON; a descriptor comes with the first octet of its message. Requests are answered in
// order. A connection that says nothing stays: its end tells of the daemon's.
const (
	// SocketName is the daemon's socket in its run folder.
	SocketName = "blobd.sock"
	// ProtocolVersion is the version of the host's protocol with the daemon; a daemon of another one is replaced.
	ProtocolVersion = 1

	maxCall   = 64 << 10
	maxAnswer = 16 << 20
	maxConns  = 256
	callBound = 60 * time.Second
)

type call struct {
	Op      string `json:"op"` // hello, open, stats, reads, fuse, stop
	Data    *Data  `json:"data,omitempty"`
	Digest  string `json:"digest,omitempty"`
	Reset   bool   `json:"reset,omitempty"`
	Daemon  bool   `json:"daemon,omitempty"`  // open: never the local file, so that reads are seen
	Timeout int64  `json:"timeout,omitempty"` // nanoseconds
}

type answer struct {
	Code   string  `json:"code,omitempty"` // of the error
	Error  string  `json:"error,omitempty"`
	Hello  *Hello  `json:"hello,omitempty"`
	Name   string  `json:"name,omitempty"` // open: of the file on the FUSE file system; with a descriptor: none
	Stats  *Stats  `json:"stats,omitempty"`
	Ranges []Range `json:"ranges,omitempty"`
}

// Hello is what a daemon says of itself.
type Hello struct {
	Version int    `json:"version"`
	Pid     int    `json:"pid"`
	Mark    string `json:"mark"`
	Fuse    string `json:"fuse"`
}

var sentinels = map[string]error{
	"not_found": sandbox.ErrNotFound, "exists": sandbox.ErrExists, "invalid": sandbox.ErrInvalid, "state": sandbox.ErrState,
	"exhausted": sandbox.ErrExhausted, "lost": sandbox.ErrLost, "denied": sandbox.ErrDenied, "unsupported": sandbox.ErrUnsupported,
	"deadline": os.ErrDeadlineExceeded,
}

type remoteError struct {
	text string
	is   error
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.is }

func failure(err error) answer {
	a := answer{Code: "other", Error: err.Error()}
	for code, s := range sentinels {
		if errors.Is(err, s) {
			a.Code = code
		}
	}
	return a
}

func (s *Server) listen() (*net.UnixListener, error) {
	dir, err := os.Open(s.cfg.RunDir) // a socket's path is bounded at 107 octets; by a descriptor it is short
	if err != nil {
		return nil, fmt.Errorf("blobd: listen: %w", err)
	}
	defer dir.Close()
	name := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), SocketName)
	os.Remove(name)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("blobd: listen: %w", err)
	}
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(filepath.Join(s.cfg.RunDir, SocketName), 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("blobd: listen: %w", err)
	}
	return l, nil
}

func (s *Server) accept(l *net.UnixListener) {
	room := make(chan struct{}, maxConns)
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			s.log.Error("accept", "err", err)
			time.Sleep(10 * time.Millisecond) // out of descriptors: wait, do not spin
			continue
		}
		if !confine.OwnPeer(c) {
			c.Close()
			continue
		}
		select {
		case room <- struct{}{}:
		default:
			c.Close() // more than a host ever has
			continue
		}
		s.background(func(ctx context.Context) {
			defer func() { <-room }()
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			defer c.Close()
			s.talk(ctx, c)
		})
	}
}

func (s *Server) talk(ctx context.Context, c *net.UnixConn) {
	for {
		var head [4]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return
		}
		n := binary.LittleEndian.Uint32(head[:])
		if n > maxCall {
			return
		}
		c.SetReadDeadline(time.Now().Add(5 * time.Second)) // the rest of a message that has begun
		text := make([]byte, n)
		if _, err := io.ReadFull(c, text); err != nil {
			return
		}
		c.SetReadDeadline(time.Time{})
		var q call
		var a answer
		var file *os.File
		if err := json.Unmarshal(text, &q); err != nil {
			a = failure(fmt.Errorf("blobd: call: %v: %w", err, sandbox.ErrInvalid))
		} else if a, file, err = s.handle(ctx, q); err != nil {
			a = failure(err)
		}
		c.SetWriteDeadline(time.Now().Add(10 * time.Second))
		err := writeMessage(c, a, file)
		if file != nil {
			file.Close()
		}
		if err != nil {
			return
		}
		if q.Op == "stop" && a.Error == "" {
			s.stop()
			return
		}
	}
}

func (s *Server) handle(ctx context.Context, q call) (a answer, file *os.File, err error) {
	bound := callBound
	if q.Timeout > 0 {
		bound = min(bound, time.Duration(q.Timeout))
	}
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	switch q.Op {
	case "hello":
		a.Hello = &Hello{Version: ProtocolVersion, Pid: os.Getpid(), Mark: s.cfg.Mark, Fuse: s.cfg.Fuse}
	case "open":
		if q.Data == nil {
			return a, nil, fmt.Errorf("blobd: open: no blob is named: %w", sandbox.ErrInvalid)
		}
		b, err := s.register(ctx, *q.Data)
		if err != nil {
			return a, nil, err
		}
		b.used.Store(time.Now().UnixNano())
		if !q.Daemon {
			if file = b.local(); file != nil {
				return a, file, nil
			}
		}
		if q.Data.Hot > 0 {
			b.startPrefetch(q.Data.Hot)
		}
		a.Name = b.hex
	case "stats":
		st := s.stats()
		a.Stats = &st
	case "reads":
		h, err := hexOf(q.Digest)
		if err != nil {
			return a, nil, err
		}
		b := s.node(nodeOf(h))
		if b == nil || b.hex != h {
			return a, nil, fmt.Errorf("blob %s: %w", q.Digest, sandbox.ErrNotFound)
		}
		a.Ranges = b.log.take(q.Reset)
	case "fuse": // for a park
		fd, err := unix.FcntlInt(uintptr(s.conn.fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return a, nil, fmt.Errorf("blobd: fuse: %w", err)
		}
		return a, os.NewFile(uintptr(fd), "/dev/fuse"), nil
	case "stop":
	default:
		return a, nil, fmt.Errorf("blobd: call %.40q: %w", q.Op, sandbox.ErrUnsupported)
	}
	return a, nil, nil
}

func writeMessage(c *net.UnixConn, v any, file *os.File) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	out := binary.LittleEndian.AppendUint32(make([]byte, 0, 4+len(text)), uint32(len(text)))
	out = append(out, text...)
	if file == nil {
		_, err := c.Write(out)
		return err
	}
	n, _, err := c.WriteMsgUnix(out, unix.UnixRights(int(file.Fd())), nil)
	if err == nil && n < len(out) {
		_, err = c.Write(out[n:])
	}
	return err
}

// Client speaks to a daemon. One call at a time; every call is bounded by its context and by 60 s.
type Client struct {
	c *net.UnixConn
}

// Dial connects to the daemon of a run folder.
func Dial(ctx context.Context, runDir string) (*Client, error) {
	dir, err := os.Open(runDir)
	if err != nil {
		return nil, fmt.Errorf("blobd: open run folder: %w", err)
	}
	defer dir.Close()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), SocketName))
	if err != nil {
		return nil, fmt.Errorf("blobd: dial: %w", err)
	}
	return &Client{c.(*net.UnixConn)}, nil
}

// Close ends the connection.
func (c *Client) Close() error { return c.c.Close() }

func (c *Client) call(ctx context.Context, q call) (answer, *os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, callBound)
	defer cancel()
	at, _ := ctx.Deadline()
	q.Timeout = int64(time.Until(at))
	c.c.SetDeadline(at)
	defer c.c.SetDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { c.c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	a, f, err := c.exchange(q)
	if err != nil {
		c.c.Close() // a late answer would be taken for that of the next call
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return a, nil, fmt.Errorf("blobd: %s: %w", q.Op, err)
	}
	if a.Error != "" {
		if f != nil {
			f.Close()
		}
		return a, nil, &remoteError{a.Error, sentinels[a.Code]}
	}
	return a, f, nil
}

func (c *Client) exchange(q call) (a answer, file *os.File, err error) {
	if err := writeMessage(c.c, q, nil); err != nil {
		return a, nil, err
	}
	head, oob := make([]byte, 4), make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := c.c.ReadMsgUnix(head, oob)
	if oobn > 0 {
		file = received(oob[:oobn])
	}
	defer func() {
		if err != nil && file != nil {
			file.Close()
			file = nil
		}
	}()
	if err == nil && n == 0 {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && n < len(head) {
		_, err = io.ReadFull(c.c, head[n:])
	}
	if err != nil {
		return a, file, err
	}
	size := binary.LittleEndian.Uint32(head)
	if size > maxAnswer {
		return a, file, fmt.Errorf("answer of %d octets: %w", size, sandbox.ErrInvalid)
	}
	text := make([]byte, size)
	if _, err = io.ReadFull(c.c, text); err != nil {
		return a, file, err
	}
	err = json.Unmarshal(text, &a)
	return a, file, err
}

// received takes the first descriptor of a control message.
func received(oob []byte) *os.File {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	var file *os.File
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			if file == nil {
				file = os.NewFile(uintptr(fd), "blob")
			} else {
				unix.Close(fd)
			}
		}
	}
	return file
}

// Hello asks the daemon who it is.
func (c *Client) Hello(ctx context.Context) (Hello, error) {
	a, _, err := c.call(ctx, call{Op: "hello"})
	if err == nil && a.Hello == nil {
		err = errors.New("blobd: hello: no answer")
	}
	if err != nil {
		return Hello{}, err
	}
	return *a.Hello, nil
}

// Open makes a blob known to the daemon and opens it: the local file when the cache has all of it, else the file on the daemon's file
// system, below its mount.
func (c *Client) Open(ctx context.Context, mount *os.File, d Data) (*os.File, error) {
	return c.open(ctx, mount, call{Op: "open", Data: &d})
}

// OpenSeen opens a blob through the daemon in any case, so that Reads tells what was read.
func (c *Client) OpenSeen(ctx context.Context, mount *os.File, d Data) (*os.File, error) {
	return c.open(ctx, mount, call{Op: "open", Data: &d, Daemon: true})
}

func (c *Client) open(ctx context.Context, mount *os.File, q call) (*os.File, error) {
	a, file, err := c.call(ctx, q)
	if err != nil || file != nil {
		return file, err
	}
	fd, err := unix.Openat(int(mount.Fd()), a.Name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open blob %s: %w", q.Data.Digest, err)
	}
	return os.NewFile(uintptr(fd), "blob "+a.Name), nil
}

// Stats are the daemon's figures.
func (c *Client) Stats(ctx context.Context) (Stats, error) {
	a, _, err := c.call(ctx, call{Op: "stats"})
	if err == nil && a.Stats == nil {
		err = errors.New("blobd: stats: no answer")
	}
	if err != nil {
		return Stats{}, err
	}
	return *a.Stats, nil
}

// Reads are the parts of a blob that were read through the daemon, in the order of their first reads; reset forgets them.
func (c *Client) Reads(ctx context.Context, digest string, reset bool) ([]Range, error) {
	a, _, err := c.call(ctx, call{Op: "reads", Digest: digest, Reset: reset})
	return a.Ranges, err
}

// Stop ends the daemon; reads under way wait for the next one.
func (c *Client) Stop(ctx context.Context) error {
	_, _, err := c.call(ctx, call{Op: "stop"})
	return err
}
