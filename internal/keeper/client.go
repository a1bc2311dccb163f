package keeper

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dsec-dev/dsec/internal/calm"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// SocketName is the keeper's socket in its run folder.
const SocketName = "keeper.sock"

// DialOptions are what a host brings to a keeper.
type DialOptions struct {
	Host    string   // identity of the host, for the keeper's log
	Guest   *os.File // the dsec-guest program, for Files; nil leaves the one of an earlier host
	Handler Handler  // gets events after Deliver was called
}

// Client is a host's connection to its keeper. A lost connection is not mended: Done is closed and the host dials again.
// Every method is bounded by its context and, when that has no deadline, by 60 s. A context's end leaves the request's effect
// unknown: Known and List tell.
type Client struct {
	conn    *conn
	info    Info
	handler Handler
	ctx     context.Context // of event handlers; ends with the connection
	cancel  context.CancelCauseFunc
	next    atomic.Uint64

	mu     sync.Mutex
	calls  map[uint64]chan response // nil when the connection has ended
	queues map[sandbox.ID]*eventQueue
	wg     sync.WaitGroup
}

type response struct {
	body []byte
	fds  []int
	err  error
}

const callBound = 60 * time.Second

// Dial connects to the keeper of a run folder. A connection made earlier by another client ends.
func Dial(ctx context.Context, dir string, o DialOptions) (*Client, error) {
	// The path of a Unix socket is bounded at 107 octets; going through the folder's descriptor is not.
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("keeper: open run folder: %w", err)
	}
	defer d.Close()
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), SocketName))
	if err != nil {
		return nil, fmt.Errorf("keeper: dial %s: %w", filepath.Join(dir, SocketName), err)
	}
	return NewClient(ctx, c.(*net.UnixConn), o)
}

// NewClient greets the keeper at the far end of a connection, which it owns from now on.
func NewClient(ctx context.Context, u *net.UnixConn, o DialOptions) (*Client, error) {
	c, err := calm.From(u)
	if err != nil {
		return nil, fmt.Errorf("keeper: connection: %w", err)
	}
	cl := &Client{conn: newConn(c), handler: o.Handler, calls: map[uint64]chan response{}, queues: map[sandbox.ID]*eventQueue{}}
	cl.ctx, cl.cancel = context.WithCancelCause(context.Background())
	cl.wg.Add(1)
	go cl.readLoop()
	var fds []int
	if o.Guest != nil {
		fds = append(fds, int(o.Guest.Fd()))
	}
	if _, err := cl.call(ctx, opHello, &helloRequest{Version: ProtocolVersion, Host: o.Host}, &cl.info, fds...); err != nil {
		cl.Close()
		return nil, fmt.Errorf("keeper: hello: %w", err)
	}
	return cl, nil
}

// Info is what the keeper said of itself.
func (c *Client) Info() Info { return c.info }

// Close ends the connection and returns when no handler runs any more. The keeper and its sandboxes go on.
func (c *Client) Close() error {
	c.fail(errors.New("keeper: client closed"))
	c.wg.Wait()
	return nil
}

// Done is closed when the connection has ended; Err then says why.
func (c *Client) Done() <-chan struct{} { return c.ctx.Done() }

// Err is why the connection ended, wrapping sandbox.ErrLost, or nil.
func (c *Client) Err() error { return context.Cause(c.ctx) }

// Deliver starts the delivery of events to the handler: first all that an earlier host has not acknowledged. A host calls it
// when it has taken back what List returned.
func (c *Client) Deliver(ctx context.Context) error { return c.do(ctx, opDeliver, nil, nil) }

// Image is a layer to mount: an EROFS image and, where its contents lie apart, the file that is its extra device.
type Image struct {
	Meta *os.File // or what FolderMount made
	Data *os.File // nil: none
	// Direct reads past the page cache that belongs to the files, where the kernel can: EROFS has one of its own.
	Direct bool
}

// MountLayer mounts an image under an ID in the keeper's layer namespace. An ID that is mounted already is left as it is. The caller
// closes the files.
func (c *Client) MountLayer(ctx context.Context, id string, i Image) error {
	fds := []int{int(i.Meta.Fd())}
	if i.Data != nil {
		fds = append(fds, int(i.Data.Fd()))
	}
	fds, err := c.call(ctx, opMountLayer, &layerRequest{ID: id, File: i.Meta.Name(), Direct: i.Direct}, nil, fds...)
	closeAll(fds)
	return err
}

// UnmountLayer removes a layer's mount; sandboxes that use it keep it alive. An ID that is not mounted is no error.
func (c *Client) UnmountLayer(ctx context.Context, id string) error {
	return c.do(ctx, opUnmountLayer, &layerRequest{ID: id}, nil)
}

// Layers are the mounted layers' IDs.
func (c *Client) Layers(ctx context.Context) ([]string, error) {
	var r layersResponse
	err := c.do(ctx, opLayers, nil, &r)
	return r.IDs, err
}

// Create makes a sandbox. On an error nothing of it is left. ErrExists when the ID lives.
func (c *Client) Create(ctx context.Context, b *Birth) (*Born, error) {
	// The keeper lives in another mount namespace, so the upper goes as a detached mount, which needs no name.
	parent, err := unix.OpenTree(unix.AT_FDCWD, filepath.Dir(b.UpperDir), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("keeper: create %s: open the folder of its upper: %w", b.ID, err)
	}
	defer unix.Close(parent)
	r := &Born{}
	fds, err := c.call(ctx, opCreate, b, r, parent)
	closeAll(fds)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Destroy ends a sandbox and returns when no process, mount, cgroup or namespace of it is left. Events of it that were not
// acknowledged are dropped. An unknown ID is no error.
func (c *Client) Destroy(ctx context.Context, id sandbox.ID) error {
	_, err := c.DestroyTelling(ctx, id)
	return err
}

// DestroyTelling is Destroy that answers how the commands ended that still ran; no event tells of them.
func (c *Client) DestroyTelling(ctx context.Context, id sandbox.ID) ([]CommandEnd, error) {
	end, err := c.End(ctx, id)
	return end.Ends, err
}

// End is Destroy that tells all that only the end of a sandbox knows.
func (c *Client) End(ctx context.Context, id sandbox.ID) (Destroyed, error) {
	var r Destroyed
	err := c.do(ctx, opDestroy, &boxRequest{id}, &r)
	return r, err
}

// Destroyed is what the end of a sandbox told. It is empty for one that was gone already.
type Destroyed struct {
	Ends []CommandEnd // of commands that still ran; no event tells of them
	Ran  bool         // a process was started in the sandbox, and the fields below are known
	CPU  time.Duration
	Peak int64 // of memory, octets, as in sandbox.Stats
}

// CommandEnd is the end of a command that its sandbox's end caused.
type CommandEnd struct {
	Command string
	Outcome sandbox.Outcome
}

// List returns every sandbox the keeper holds, ended ones too until Destroy.
func (c *Client) List(ctx context.Context) ([]Alive, error) {
	var r listResponse
	err := c.do(ctx, opList, nil, &r)
	return r.Boxes, err
}

// Start begins a command and returns when it runs or has failed to start; a failure is told by CommandEnded. The same ID again
// is a no-op for as long as the sandbox lives. A command of a session that is busy waits for its turn without bound.
func (c *Client) Start(ctx context.Context, id sandbox.ID, cmd *sandbox.Command) error {
	return c.do(ctx, opStart, &startRequest{id, *cmd}, nil)
}

// Known reports whether a command was ever started in a living sandbox.
func (c *Client) Known(ctx context.Context, id sandbox.ID, cmd string) (bool, error) {
	var r knownResponse
	err := c.do(ctx, opKnown, &commandRequest{id, cmd}, &r)
	return r.Known, err
}

// Stdin writes at an offset, counted from the first octet of Command.Stdin: octets below what was taken are skipped, a gap is ErrState, eof closes after the data. It returns
// the offset up to which octets were taken; the command may not read, so a context's end leaves it short.
func (c *Client) Stdin(ctx context.Context, id sandbox.ID, cmd string, offset int64, data []byte, eof bool) (taken int64, err error) {
	taken = offset
	for {
		part := data[:min(len(data), 256<<10)]
		var r stdinResponse
		if err := c.do(ctx, opStdin, &stdinRequest{id, cmd, offset, eof && len(part) == len(data), part}, &r); err != nil {
			return taken, err
		}
		taken = r.Taken
		skip := min(max(taken-offset, 0), int64(len(data)))
		data, offset = data[skip:], offset+skip
		if len(data) == 0 {
			return taken, nil
		}
	}
}

// Signal sends a signal to a command's process.
func (c *Client) Signal(ctx context.Context, id sandbox.ID, cmd string, sig int) error {
	return c.do(ctx, opSignal, &signalRequest{id, cmd, sig}, nil)
}

// Resize sets the size of a command's terminal.
func (c *Client) Resize(ctx context.Context, id sandbox.ID, cmd string, size sandbox.Size) error {
	return c.do(ctx, opResize, &resizeRequest{id, cmd, size}, nil)
}

// OpenSession starts a living shell; a name that lives is joined.
func (c *Client) OpenSession(ctx context.Context, id sandbox.ID, s *sandbox.Session) error {
	return c.do(ctx, opOpenSession, &sessionRequest{id, *s}, nil)
}

// CloseSession kills a session's shell and all it left in its group; SessionEnded follows.
func (c *Client) CloseSession(ctx context.Context, id sandbox.ID, name string) error {
	return c.do(ctx, opCloseSession, &commandRequest{id, name}, nil)
}

// Files starts a file server inside as the user and returns its stream. It ends when the stream is closed.
func (c *Client) Files(ctx context.Context, id sandbox.ID, user string) (net.Conn, error) {
	fds, err := c.call(ctx, opFiles, &filesRequest{Box: id, User: user}, nil)
	if err != nil {
		return nil, err
	}
	if len(fds) != 1 {
		closeAll(fds)
		return nil, fmt.Errorf("keeper: files: %d descriptors came: %w", len(fds), sandbox.ErrLost)
	}
	f := os.NewFile(uintptr(fds[0]), "files")
	defer f.Close()
	return net.FileConn(f)
}

// DialInside connects to a port on the loopback of a sandbox whose kernel is its own, through a program inside. ErrNotFound when nothing
// listens.
func (c *Client) DialInside(ctx context.Context, id sandbox.ID, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, fmt.Errorf("dial port 0: want 1 to 65535: %w", sandbox.ErrInvalid)
	}
	fds, err := c.call(ctx, opFiles, &filesRequest{Box: id, User: "65534:65534", Port: port}, nil)
	if err != nil {
		return nil, err
	}
	if len(fds) != 1 {
		closeAll(fds)
		return nil, fmt.Errorf("keeper: dial: %d descriptors came: %w", len(fds), sandbox.ErrLost)
	}
	f := os.NewFile(uintptr(fds[0]), "port")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	// The program says first whether it is connected; it is the sandbox's, so the word is bounded and trusted with nothing else.
	at, ok := ctx.Deadline()
	if bound := time.Now().Add(dialBound); !ok || at.After(bound) {
		at = bound
	}
	conn.SetReadDeadline(at)
	var word [1]byte
	if _, err := io.ReadFull(conn, word[:]); err != nil {
		conn.Close()
		return nil, fmt.Errorf("dial port %d: the program inside ended (%w): %w", port, err, sandbox.ErrState)
	}
	conn.SetReadDeadline(time.Time{})
	if word[0] != 0 {
		conn.Close()
		return nil, fmt.Errorf("dial port %d: nothing listens on 127.0.0.1 or ::1: %w", port, sandbox.ErrNotFound)
	}
	return conn, nil
}

// dialBound is how long a connection inside a sandbox may take.
const dialBound = 10 * time.Second

// Netns returns the sandbox's network namespace, to dial in it or to move a veth there.
func (c *Client) Netns(ctx context.Context, id sandbox.ID) (*os.File, error) {
	fds, err := c.call(ctx, opNetns, &boxRequest{id}, nil)
	if err != nil {
		return nil, err
	}
	if len(fds) != 1 {
		closeAll(fds)
		return nil, fmt.Errorf("keeper: netns: %d descriptors came: %w", len(fds), sandbox.ErrLost)
	}
	return os.NewFile(uintptr(fds[0]), "netns"), nil
}

// Reserve returns the network namespace that the sandbox will have whose birth comes next under the ID: for a runtime that looks at what
// is in it once, at its start. Destroy gives it back when no birth comes.
func (c *Client) Reserve(ctx context.Context, id sandbox.ID) (*os.File, error) {
	fds, err := c.call(ctx, opReserve, &boxRequest{id}, nil)
	if err != nil {
		return nil, err
	}
	if len(fds) != 1 {
		closeAll(fds)
		return nil, fmt.Errorf("keeper: reserve: %d descriptors came: %w", len(fds), sandbox.ErrLost)
	}
	return os.NewFile(uintptr(fds[0]), "netns"), nil
}

// Freeze stops every process of the sandbox and the clocks of its commands' timeouts; it returns when all stand still.
func (c *Client) Freeze(ctx context.Context, id sandbox.ID) error {
	return c.do(ctx, opFreeze, &boxRequest{id}, nil)
}

// Thaw undoes Freeze.
func (c *Client) Thaw(ctx context.Context, id sandbox.ID) error {
	return c.do(ctx, opThaw, &boxRequest{id}, nil)
}

// SetDeadline arms the end of a sandbox where it holds without the host: at that time everything in it is killed, its commands
// end as Killed, and Ended with the cause follows. The zero time disarms.
func (c *Client) SetDeadline(ctx context.Context, id sandbox.ID, kind DeadlineKind, at time.Time, cause sandbox.Cause) error {
	return c.do(ctx, opDeadline, &deadlineRequest{id, kind, at, cause}, nil)
}

// Stats is what a sandbox uses now; Disk is -1, which the host knows.
func (c *Client) Stats(ctx context.Context, id sandbox.ID) (sandbox.Stats, error) {
	var r sandbox.Stats
	err := c.do(ctx, opStats, &boxRequest{id}, &r)
	return r, err
}

// Shutdown destroys every sandbox and ends the keeper.
func (c *Client) Shutdown(ctx context.Context) error { return c.do(ctx, opShutdown, nil, nil) }

func (c *Client) do(ctx context.Context, o op, req, resp any) error {
	fds, err := c.call(ctx, o, req, resp)
	closeAll(fds)
	return err
}

// call sends a request and waits for its response.
func (c *Client) call(ctx context.Context, o op, req, resp any, fds ...int) ([]int, error) {
	bound := callBound
	if at, ok := ctx.Deadline(); ok {
		bound = time.Until(at)
	} else {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callBound)
		defer cancel()
	}
	if bound <= 0 {
		return nil, context.DeadlineExceeded
	}
	num := c.next.Add(1)
	ch := make(chan response, 1)
	c.mu.Lock()
	if c.calls == nil {
		c.mu.Unlock()
		return nil, c.Err()
	}
	c.calls[num] = ch
	c.mu.Unlock()
	err := c.conn.write(kindRequest, o, num, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint64(b, uint64(bound))
		return appendValue(b, req)
	}, nil, fds...)
	if err != nil {
		c.fail(err)
		return nil, c.Err()
	}
	select {
	case r := <-ch:
		if r.err != nil {
			return nil, r.err
		}
		if resp != nil && len(r.body) > 0 { // nothing to tell, or a keeper of before there was
			if err := decodeValue(r.body, resp); err != nil {
				closeAll(r.fds)
				return nil, err
			}
		}
		return r.fds, nil
	case <-ctx.Done():
		c.mu.Lock()
		delete(c.calls, num)
		c.mu.Unlock()
		select {
		case r := <-ch: // it came in the same moment
			closeAll(r.fds)
		default:
		}
		c.conn.write(kindCancel, o, num, nil, nil)
		return nil, ctx.Err()
	}
}

// fail ends the connection once.
func (c *Client) fail(err error) {
	c.cancel(fmt.Errorf("keeper connection: %w: %w", err, sandbox.ErrLost))
	c.conn.close()
	c.mu.Lock()
	calls := c.calls
	c.calls = nil
	c.mu.Unlock()
	for _, ch := range calls {
		ch <- response{err: c.Err()}
	}
}

func (c *Client) readLoop() {
	defer c.wg.Done()
	defer c.conn.drop()
	for {
		f, err := c.conn.read()
		if err != nil {
			c.fail(err)
			return
		}
		switch f.kind {
		case kindResponse:
			c.respond(f)
		case kindEvent:
			closeAll(f.fds)
			if err := c.event(f); err != nil {
				c.fail(err)
				return
			}
		default:
			closeAll(f.fds)
		}
	}
}

func (c *Client) respond(f frame) {
	c.mu.Lock()
	ch := c.calls[f.num]
	delete(c.calls, f.num)
	c.mu.Unlock()
	if ch == nil {
		closeAll(f.fds)
		return
	}
	r := response{fds: f.fds}
	switch {
	case len(f.body) == 0:
		r.err = fmt.Errorf("keeper: empty response: %w", sandbox.ErrLost)
	case f.body[0] != 0:
		r.err = &remoteError{f.body[0], string(f.body[1:])}
	default:
		r.body = append([]byte(nil), f.body[1:]...)
	}
	ch <- r
}

// eventQueue orders the events of one sandbox. Its length is bounded by the keeper, which sends only so much unacknowledged.
type eventQueue struct {
	events []func(context.Context) error
	nums   []uint64
}

func (c *Client) event(f frame) error {
	id, call, err := c.decodeEvent(f)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls == nil {
		return nil
	}
	q := c.queues[id]
	if q == nil {
		q = &eventQueue{}
		c.queues[id] = q
		c.wg.Add(1)
		go c.deliver(id, q)
	}
	q.events = append(q.events, call)
	q.nums = append(q.nums, f.num)
	return nil
}

func (c *Client) decodeEvent(f frame) (sandbox.ID, func(context.Context) error, error) {
	switch f.op {
	case evOutput:
		var e outputEvent
		if len(f.body) < 4 {
			return "", nil, fmt.Errorf("keeper: short output event: %w", sandbox.ErrInvalid)
		}
		n := int(binary.LittleEndian.Uint32(f.body)) + 4
		if n > len(f.body) {
			return "", nil, fmt.Errorf("keeper: short output event: %w", sandbox.ErrInvalid)
		}
		if err := decodeValue(f.body[:n], &e); err != nil {
			return "", nil, err
		}
		data := append([]byte(nil), f.body[n:]...)
		return e.Box, func(ctx context.Context) error {
			return c.handler.Output(ctx, e.Box, e.Cmd, e.Stream, e.Offset, data, e.Late)
		}, nil
	case evCommandEnded:
		var e endEvent
		err := decodeValue(f.body, &e)
		return e.Box, func(ctx context.Context) error { return c.handler.CommandEnded(ctx, e.Box, e.Name, e.Outcome) }, err
	case evSessionEnded:
		var e endEvent
		err := decodeValue(f.body, &e)
		return e.Box, func(ctx context.Context) error { return c.handler.SessionEnded(ctx, e.Box, e.Name, e.Outcome) }, err
	case evEnded:
		var e endedEvent
		err := decodeValue(f.body, &e)
		return e.Box, func(ctx context.Context) error { return c.handler.Ended(ctx, e.Box, e.Cause) }, err
	case evDenied:
		var e deniedEvent
		err := decodeValue(f.body, &e)
		return e.Box, func(ctx context.Context) error {
			c.handler.Denied(ctx, e.Box, e.Cmd, e.Call, e.Detail)
			return nil
		}, err
	}
	return "", func(context.Context) error { return nil }, nil // of a newer keeper: taken
}

// deliver calls the handler for the events of one sandbox in order and acknowledges each; it ends when none is left.
func (c *Client) deliver(id sandbox.ID, q *eventQueue) {
	defer c.wg.Done()
	for {
		c.mu.Lock()
		if len(q.events) == 0 || c.calls == nil {
			delete(c.queues, id)
			c.mu.Unlock()
			return
		}
		call, num := q.events[0], q.nums[0]
		q.events, q.nums = q.events[1:], q.nums[1:]
		c.mu.Unlock()
		for pause := 20 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
			if c.handler == nil || call(c.ctx) == nil {
				break
			}
			select {
			case <-c.ctx.Done():
				return
			case <-time.After(pause):
			}
		}
		if err := c.conn.write(kindAck, 0, num, nil, nil); err != nil {
			c.fail(err)
			return
		}
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
