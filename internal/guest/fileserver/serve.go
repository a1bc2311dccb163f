// Package fileserver is the file server inside a sandbox: it does what the host asks with the plain system calls of the process it
// runs in, so the sandbox's own root, namespaces, cgroup and user decide what is possible. It hides frames, credits and the kernel's
// odd files. Invariants: the reader of the connection never waits for a call; nothing is held whole; whatever waits looks at the
// call's context. No lock is held during I/O but server.wmu, which orders frames.
//
// It is linked into cmd/dsec-guest, so it imports little: no net, no internal/sandbox.
package fileserver

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/filewire"
)

// endWait bounds how long Serve waits for calls that the kernel holds (a dead network file system) when the connection is over.
const endWait = 5 * time.Second

type server struct {
	conn  io.ReadWriteCloser
	names *names

	wmu sync.Mutex // one frame at a time

	mu    sync.Mutex
	calls map[uint64]*call
	group sync.WaitGroup
}

// Serve answers calls until the other end closes (nil), breaks the protocol or ctx ends. It closes conn.
func Serve(ctx context.Context, conn io.ReadWriteCloser) error {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	s := &server{conn: conn, names: newNames("/etc/passwd", "/etc/group"), calls: map[uint64]*call{}}
	err := s.run(ctx)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	stop()
	cancel()
	conn.Close()
	ended := make(chan struct{})
	go func() { s.group.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(endWait):
	}
	// A host that closes with answers unread, or amid one, resets the stream: that is how it goes away.
	if err == io.EOF || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		return nil
	}
	return err
}

func (s *server) run(ctx context.Context) error {
	hello := filewire.HelloBody(uint32(os.Geteuid()), uint32(os.Getegid()))
	if err := s.write(filewire.Frame(filewire.Hello, 0, 0, hello)); err != nil {
		return err
	}
	r := bufio.NewReaderSize(s.conn, 16<<10)
	scratch := make([]byte, filewire.MaxBody)
	for {
		h, body, err := filewire.ReadFrame(r, scratch)
		if err != nil {
			return err
		}
		if err := s.take(ctx, h, body); err != nil {
			return err
		}
	}
}

// take handles one frame from the host.
func (s *server) take(ctx context.Context, h filewire.Header, body []byte) error {
	s.mu.Lock()
	c := s.calls[h.ID]
	running := len(s.calls)
	s.mu.Unlock()
	if h.Type == filewire.Call {
		switch {
		case c != nil:
			return errors.New("call number used twice")
		case running >= filewire.MaxCalls:
			return errors.New("more calls at once than allowed")
		}
		req, err := filewire.DecodeRequest(body)
		if err != nil {
			r := filewire.Result{Code: filewire.Invalid, Text: err.Error()}
			return s.write(filewire.Frame(filewire.GuestResult, 0, h.ID, r.Encode()))
		}
		s.begin(ctx, h.ID, req)
		return nil
	}
	if c == nil {
		return nil // it ended while the frame was under way
	}
	switch h.Type {
	case filewire.Data:
		return c.data(body)
	case filewire.End:
		c.end(h.Flags&filewire.BrokenOff != 0)
	case filewire.Credit:
		n, err := filewire.ParseU32(body)
		if err != nil {
			return err
		}
		return c.credit(n)
	case filewire.Cancel:
		c.cancel()
	default:
		return errors.New("frame type is not known")
	}
	return nil
}

func (s *server) begin(ctx context.Context, id uint64, req *filewire.Request) {
	c := &call{s: s, id: id, req: req, wake: make(chan struct{}, 1), window: filewire.Window}
	c.ctx, c.cancel = context.WithCancel(ctx)
	s.mu.Lock()
	s.calls[id] = c
	s.mu.Unlock()
	s.group.Add(1)
	go func() {
		defer s.group.Done()
		defer c.cancel()
		r := c.run()
		s.mu.Lock()
		delete(s.calls, id)
		s.mu.Unlock()
		// A failed write shows in the reader, which ends everything.
		_ = s.write(filewire.Frame(filewire.GuestResult, 0, id, r.Encode()))
	}()
}

func (s *server) write(frame []byte) error {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	_, err := s.conn.Write(frame)
	return err
}

// call is one operation, run by one goroutine.
type call struct {
	s      *server
	id     uint64
	req    *filewire.Request
	ctx    context.Context
	cancel context.CancelFunc
	wake   chan struct{}
	batch  filewire.Batch
	skips  skips

	mu     sync.Mutex
	queue  filewire.Queue
	window int // left towards the host
	ended  bool
	broken bool
}

func (c *call) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *call) data(body []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return errors.New("data after the end of a body")
	}
	err := c.queue.Push(filewire.Data, body)
	c.signal()
	return err
}

// brokenGrace is how long a call whose body broke off may still apply what came before.
const brokenGrace = time.Second

func (c *call) end(broken bool) {
	c.mu.Lock()
	first := broken && !c.broken
	c.ended = true
	c.broken = c.broken || broken
	c.mu.Unlock()
	if first {
		time.AfterFunc(brokenGrace, c.cancel)
	}
	c.signal()
}

func (c *call) credit(n uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if int64(c.window)+int64(n) > filewire.Window {
		return errors.New("credit passes over the window")
	}
	c.window += int(n)
	c.signal()
	return nil
}

var errBroken = errors.New("the body broke off")

// Read gives the call's body.
func (c *call) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		c.mu.Lock()
		n := c.queue.Take(p)
		grant := c.queue.Grant()
		ended, broken := c.ended, c.broken
		c.mu.Unlock()
		if grant > 0 && !ended {
			if err := c.s.write(filewire.Frame(filewire.GuestCredit, 0, c.id, filewire.U32(grant))); err != nil {
				return n, errBroken
			}
		}
		switch {
		case n > 0:
			return n, nil
		case broken:
			return 0, errBroken
		case ended:
			return 0, io.EOF
		}
		select {
		case <-c.wake:
		case <-c.ctx.Done():
			return 0, errBroken
		}
	}
}

// send sends a frame whose body lies behind HeaderSize free octets, waiting for the window.
func (c *call) send(t filewire.Type, frame []byte) error {
	n := len(frame) - filewire.HeaderSize
	for {
		c.mu.Lock()
		ok := c.window >= filewire.Cost(n)
		if ok {
			c.window -= filewire.Cost(n)
		}
		c.mu.Unlock()
		if ok {
			break
		}
		select {
		case <-c.wake:
		case <-c.ctx.Done():
			return c.ctx.Err()
		}
	}
	if err := c.ctx.Err(); err != nil {
		return err
	}
	filewire.Header{Length: uint32(n), Type: t, ID: c.id}.Put(frame)
	return c.s.write(frame)
}

// flush sends what the batch holds.
func (c *call) flush() error {
	b := c.batch.Bytes()
	if b == nil {
		return nil
	}
	return c.send(filewire.GuestItem, append(make([]byte, filewire.HeaderSize, filewire.HeaderSize+len(b)), b...))
}

func (c *call) run() *filewire.Result {
	r := &filewire.Result{}
	var err error
	switch c.req.Op {
	case filewire.OpStat:
		err = c.stat(r)
	case filewire.OpList:
		err = c.list()
	case filewire.OpRead:
		err = c.read(r)
	case filewire.OpWrite:
		err = c.writeFile(r)
	case filewire.OpMakeDir:
		err = c.makeDir(r)
	case filewire.OpMove:
		err = c.move()
	case filewire.OpRemove:
		err = c.remove()
	case filewire.OpWatch:
		err = c.watch()
	case filewire.OpDownload:
		err = c.download(r)
	case filewire.OpUpload:
		err = c.upload(r)
	}
	r.Skipped, r.Left = c.skips.lines, c.skips.total
	fill(r, err)
	return r
}

// buffers hold one frame of data each.
var buffers = sync.Pool{New: func() any { b := make([]byte, filewire.HeaderSize+filewire.MaxData); return &b }}
