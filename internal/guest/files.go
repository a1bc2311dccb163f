package guest

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/fileserver"
	"github.com/dsec-dev/dsec/internal/guest/filewire"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// The words of the protocol.
type (
	Info      = filewire.Info
	Kind      = filewire.Kind
	Event     = filewire.Event
	EventKind = filewire.EventKind
)

// Kinds of files.
const (
	File   = filewire.File
	Dir    = filewire.Dir
	Link   = filewire.Link
	Fifo   = filewire.Fifo
	Socket = filewire.Socket
	Char   = filewire.Char
	Block  = filewire.Block
)

// Kinds of events.
const (
	Ready     = filewire.Ready
	Created   = filewire.Created
	Modified  = filewire.Modified
	Removed   = filewire.Removed
	MovedFrom = filewire.MovedFrom
	MovedTo   = filewire.MovedTo
	Attrib    = filewire.Attrib
	Overflow  = filewire.Overflow
)

// breakOffWait bounds how long a broken-off body waits for the server to say what it applied.
const breakOffWait = 5 * time.Second

// ServeFiles answers calls on conn as the calling process, until the other end closes (nil) or ctx ends. It closes conn and
// returns when its calls have ended, or 5 s later where the kernel holds one.
func ServeFiles(ctx context.Context, conn io.ReadWriteCloser) error {
	return fileserver.Serve(ctx, conn)
}

// Files is a client of the file server in one sandbox, acting as the one user it was started for. All methods may be called at
// once; more than filewire.MaxCalls wait for their turn. Paths are absolute octets, resolved inside as a command there would.
// Errors name act, path and the kernel's reason and wrap a sentinel of internal/sandbox; a lost connection is ErrLost.
type Files struct {
	conn  io.ReadWriteCloser
	out   chan []byte
	slots chan struct{}
	wake  chan struct{} // a cancel waits to be sent
	gone  chan struct{}

	mu      sync.Mutex
	calls   map[uint64]*call
	cancels []uint64
	next    uint64
	err     error
}

// NewFiles speaks the protocol over conn, which it owns from now on. Its two goroutines end with Close or with the connection.
func NewFiles(conn io.ReadWriteCloser) *Files {
	f := &Files{
		conn:  conn,
		out:   make(chan []byte, 4),
		slots: make(chan struct{}, filewire.MaxCalls),
		wake:  make(chan struct{}, 1),
		gone:  make(chan struct{}),
		calls: map[uint64]*call{},
	}
	go f.readAll()
	go f.writeAll()
	return f
}

// Close ends the connection; running calls end with ErrLost. It is idempotent.
func (f *Files) Close() error {
	f.fail(fmt.Errorf("file connection closed: %w", sandbox.ErrLost))
	return nil
}

// Done is closed when the connection is over; Err then says why.
func (f *Files) Done() <-chan struct{} { return f.gone }

// Err is why the connection is over, nil while it stands.
func (f *Files) Err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// Calls is how many calls are under way: the owner closes a connection that was idle for a while.
func (f *Files) Calls() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.calls)
}

func (f *Files) fail(err error) {
	f.mu.Lock()
	first := f.err == nil
	if first {
		f.err = err
		close(f.gone)
	}
	f.mu.Unlock()
	if first {
		f.conn.Close()
	}
}

func (f *Files) writeAll() {
	for {
		var frame []byte
		select {
		case <-f.gone:
			return
		case frame = <-f.out:
		case <-f.wake:
			f.mu.Lock()
			ids := f.cancels
			f.cancels = nil
			f.mu.Unlock()
			for _, id := range ids {
				frame = append(frame, filewire.Frame(filewire.Cancel, 0, id, nil)...)
			}
		}
		if _, err := f.conn.Write(frame); err != nil {
			f.fail(fmt.Errorf("file server in the sandbox is gone (%v): %w", err, sandbox.ErrLost))
			return
		}
		if cap(frame) == filewire.HeaderSize+filewire.MaxData {
			frame = frame[:cap(frame)]
			bodies.Put(&frame)
		}
	}
}

func (f *Files) readAll() {
	err := f.readFrames(bufio.NewReaderSize(f.conn, 64<<10))
	switch {
	case errors.Is(err, errVersion):
		err = fmt.Errorf("%w: %w", err, sandbox.ErrUnsupported)
	case err == io.EOF:
		err = fmt.Errorf("file server in the sandbox ended: %w", sandbox.ErrLost)
	default:
		err = fmt.Errorf("file server in the sandbox: %w: %w", err, sandbox.ErrLost)
	}
	f.fail(err)
}

var errVersion = errors.New("the file server speaks another version")

// readFrames takes frames until the stream ends or breaks a rule. It never waits for a consumer: what a call may have under way
// is bounded by its window.
func (f *Files) readFrames(r io.Reader) error {
	scratch := make([]byte, filewire.MaxBody)
	h, body, err := filewire.ReadFrame(r, scratch)
	if err != nil {
		return err
	}
	if h.Type != filewire.Hello {
		return fmt.Errorf("first frame has type %#x, not Hello", h.Type)
	}
	version, _, _, err := filewire.ParseHello(body)
	if err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	if version != filewire.Version {
		return fmt.Errorf("%w: %d, this host %d", errVersion, version, filewire.Version)
	}
	for {
		h, body, err := filewire.ReadFrame(r, scratch)
		if err != nil {
			return err
		}
		f.mu.Lock()
		c := f.calls[h.ID]
		f.mu.Unlock()
		if c == nil {
			return fmt.Errorf("frame of type %#x for call %d, which does not run", h.Type, h.ID)
		}
		if err := c.take(h, body); err != nil {
			return fmt.Errorf("call %d: %w", h.ID, err)
		}
		if h.Type == filewire.GuestResult {
			f.mu.Lock()
			delete(f.calls, h.ID)
			f.mu.Unlock()
			<-f.slots
		}
	}
}

// call is one running operation. Exactly one goroutine consumes it.
type call struct {
	f    *Files
	ctx  context.Context
	id   uint64
	op   filewire.Op
	act  string // act and path, for errors
	wake chan struct{}

	mu        sync.Mutex
	queue     filewire.Queue
	send      int // window left towards the guest
	abandoned bool
	result    *filewire.Result
}

func (f *Files) start(ctx context.Context, act string, req *filewire.Request) (*call, error) {
	if err := cmp.Or(ctx.Err(), f.Err()); err != nil { // not by chance, where a frame could be queued nevertheless
		return nil, fmt.Errorf("%s: %w", act, err)
	}
	select {
	case f.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("%s: %w", act, ctx.Err())
	case <-f.gone:
		return nil, fmt.Errorf("%s: %w", act, f.Err())
	}
	c := &call{f: f, ctx: ctx, op: req.Op, act: act, wake: make(chan struct{}, 1), send: filewire.Window}
	f.mu.Lock()
	f.next++
	c.id = f.next
	f.calls[c.id] = c
	f.mu.Unlock()
	select {
	case f.out <- filewire.Frame(filewire.Call, 0, c.id, req.Encode()):
		return c, nil
	case <-f.gone:
		return nil, fmt.Errorf("%s: %w", act, f.Err())
	case <-ctx.Done():
		// The guest never heard of it: nothing will answer.
		f.mu.Lock()
		delete(f.calls, c.id)
		f.mu.Unlock()
		<-f.slots
		return nil, fmt.Errorf("%s: %w", act, ctx.Err())
	}
}

// take handles a frame for the call; an error is a breach that ends the connection.
func (c *call) take(h filewire.Header, body []byte) error {
	var result *filewire.Result
	var credit uint32
	var err error
	switch h.Type {
	case filewire.GuestData:
		if c.op != filewire.OpRead && c.op != filewire.OpDownload {
			return errors.New("octets for an operation that has none")
		}
	case filewire.GuestItem:
		if c.op != filewire.OpRead && c.op != filewire.OpList && c.op != filewire.OpWatch {
			return errors.New("entries for an operation that has none")
		}
	case filewire.GuestCredit:
		if credit, err = filewire.ParseU32(body); err != nil {
			return fmt.Errorf("credit: %w", err)
		}
		if credit == 0 {
			return errors.New("credit of nothing")
		}
	case filewire.GuestResult:
		if result, err = filewire.DecodeResult(body); err != nil {
			return fmt.Errorf("result: %w", err)
		}
	default:
		return fmt.Errorf("frame type %#x is not known", h.Type)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case result != nil:
		c.result = result
	case h.Type == filewire.GuestCredit:
		if int64(c.send)+int64(credit) > filewire.Window {
			return fmt.Errorf("credit of %d passes over the window", credit)
		}
		c.send += int(credit)
	default: // of an abandoned call it is only counted
		if err := c.queue.Push(h.Type, body); err != nil {
			return err
		}
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
	return nil
}

// await blocks until ready says so (asked under the lock), the context ends or the connection is gone. A result that came before
// either still counts.
func (c *call) await(ctx context.Context, ready func() bool) error {
	for {
		c.mu.Lock()
		ok := ready()
		c.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-c.wake:
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", c.act, context.Cause(ctx))
		case <-c.f.gone:
			c.mu.Lock()
			ok := ready()
			c.mu.Unlock()
			if ok {
				return nil
			}
			return fmt.Errorf("%s: %w", c.act, c.f.Err())
		}
	}
}

// abandon ends the host's interest: the guest is told, later frames are dropped. After the result it does nothing.
func (c *call) abandon() {
	c.mu.Lock()
	ended := c.result != nil || c.abandoned
	c.abandoned = true
	c.queue.Drop()
	c.mu.Unlock()
	if ended {
		return
	}
	c.f.mu.Lock()
	c.f.cancels = append(c.f.cancels, c.id)
	c.f.mu.Unlock()
	select {
	case c.f.wake <- struct{}{}:
	default:
	}
}

// finish waits for the result and turns it into an error.
func (c *call) finish() (*filewire.Result, error) {
	if err := c.await(c.ctx, func() bool { return c.result != nil }); err != nil {
		c.abandon()
		return nil, err
	}
	return c.result, c.failure(c.result)
}

// grant gives credit for what was consumed; called by the consumer.
func (c *call) grant() {
	c.mu.Lock()
	n := c.queue.Grant()
	if c.result != nil {
		n = 0
	}
	c.mu.Unlock()
	if n == 0 {
		return
	}
	select {
	case c.f.out <- filewire.Frame(filewire.Credit, 0, c.id, filewire.U32(n)):
	case <-c.f.gone:
	case <-c.ctx.Done():
	}
}

// item waits for the next item; nil when the result is there and nothing else.
func (c *call) item() (*filewire.Item, error) {
	err := c.await(c.ctx, func() bool {
		_, ok := c.queue.Front()
		return ok || c.result != nil
	})
	if err != nil {
		c.abandon()
		return nil, err
	}
	c.mu.Lock()
	t, ok := c.queue.Front()
	var body []byte
	if ok {
		body = c.queue.TakeAll()
	}
	c.mu.Unlock()
	if !ok {
		return nil, nil
	}
	c.grant()
	var it *filewire.Item
	if t != filewire.GuestItem {
		err = fmt.Errorf("frame type %#x where entries belong", t)
	} else {
		it, err = filewire.DecodeItem(body)
	}
	if err != nil {
		err = fmt.Errorf("%s: file server in the sandbox: %w: %w", c.act, err, sandbox.ErrLost)
		c.f.fail(err)
		return nil, err
	}
	return it, nil
}

// simple runs a call that has neither body nor stream.
func (f *Files) simple(ctx context.Context, act string, req *filewire.Request) (*filewire.Result, error) {
	c, err := f.start(ctx, act, req)
	if err != nil {
		return nil, err
	}
	return c.finish()
}

func flag(on bool, f uint32) uint32 {
	if on {
		return f
	}
	return 0
}

// checkPath refuses what the protocol can't carry.
func checkPath(act, p string) error {
	if err := sandbox.CheckPath("path", p); err != nil {
		return fmt.Errorf("%s: %w", act, err)
	}
	return nil
}
