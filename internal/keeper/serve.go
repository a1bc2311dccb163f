package keeper

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/calm"
	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

const (
	maxRequests = 1024     // of one connection under way
	windowBytes = 32 << 20 // of output sent and not acknowledged
)

// link is a host's connection, seen from the keeper.
type link struct {
	k      *Keeper
	c      *conn
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup // requests under way and the pump
	slots  chan struct{}

	mu       sync.Mutex
	cancels  map[uint64]context.CancelFunc
	deliver  bool
	ready    []*box
	queued   map[*box]bool
	inflight map[uint64]flight
	bytes    int64
	next     uint64
	wake     chan struct{}
}

type flight struct {
	taken func()
	bytes int64
}

// serve takes connections. A new one is read only when nothing of the old one runs any more.
func (k *Keeper) serve(ctx context.Context, l *net.UnixListener) {
	var old *link
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				break
			}
			k.log.Error("accept", "err", err)
			time.Sleep(10 * time.Millisecond) // out of descriptors: wait, do not spin
			continue
		}
		if !confine.OwnPeer(c) {
			c.Close()
			continue
		}
		cc, err := calm.From(c)
		if err != nil {
			k.log.Error("take a connection", "err", err)
			continue
		}
		if old != nil {
			old.end()
		}
		n := &link{k: k, c: newConn(cc), slots: make(chan struct{}, maxRequests), cancels: map[uint64]context.CancelFunc{},
			queued: map[*box]bool{}, inflight: map[uint64]flight{}, wake: make(chan struct{}, 1)}
		n.ctx, n.cancel = context.WithCancel(ctx)
		n.work.Add(1)
		k.host.Add(1)
		go n.read()
		old = n
	}
	if old != nil {
		old.end()
	}
}

// end closes the connection and returns when nothing of it runs any more. Requests have bounds, so this has one.
func (l *link) end() {
	l.k.link.CompareAndSwap(l, nil)
	l.cancel()
	l.c.close()
	l.work.Wait()
}

func (l *link) read() {
	defer l.work.Done()
	defer l.k.calls.standbys.drop(func(*standbyKind) bool { return true })
	defer l.k.host.Add(-1)
	defer l.c.drop()
	defer l.cancel()
	hello := false
	for {
		f, err := l.c.read()
		if err != nil {
			l.k.link.CompareAndSwap(l, nil)
			l.c.close()
			return
		}
		switch f.kind {
		case kindAck:
			closeAll(f.fds)
			l.acked(f.num)
		case kindCancel:
			closeAll(f.fds)
			l.mu.Lock()
			if cancel := l.cancels[f.num]; cancel != nil {
				cancel()
			}
			l.mu.Unlock()
		case kindRequest:
			if !hello {
				if f.op != opHello {
					closeAll(f.fds)
					l.fail(f.num, f.op, fmt.Errorf("hello first: %w", sandbox.ErrState))
					continue
				}
				hello = true
			}
			l.request(f)
		default:
			closeAll(f.fds)
		}
	}
}

// request starts a request on a goroutine of its own. When too many are under way reading waits, and so the host.
func (l *link) request(f frame) {
	select {
	case l.slots <- struct{}{}:
	case <-l.ctx.Done():
		closeAll(f.fds)
		return
	}
	f.body = append([]byte(nil), f.body...)
	bound := callBound
	if len(f.body) >= 8 {
		if d := time.Duration(binary.LittleEndian.Uint64(f.body)); d > 0 && d < 10*time.Minute {
			bound = d
		}
		f.body = f.body[8:]
	}
	ctx, cancel := context.WithTimeout(l.ctx, bound)
	l.mu.Lock()
	l.cancels[f.num] = cancel
	l.mu.Unlock()
	l.work.Add(1)
	l.k.berths.stir()
	l.k.crew.run(func() {
		defer l.work.Done()
		defer l.k.berths.stir()
		defer func() {
			l.mu.Lock()
			delete(l.cancels, f.num)
			l.mu.Unlock()
			cancel()
			<-l.slots
		}()
		resp, fds, err := l.handle(ctx, f)
		closeAll(f.fds)
		if err != nil {
			closeAll(fds)
			l.fail(f.num, f.op, err)
			return
		}
		l.c.write(kindResponse, f.op, f.num, func(b []byte) []byte { return appendValue(append(b, 0), resp) }, nil, fds...)
		closeAll(fds)
		if f.op == opDestroy {
			l.k.berths.removed()
		}
	})
}

func (l *link) fail(num uint64, o op, err error) {
	l.c.write(kindResponse, o, num, func(b []byte) []byte { return append(append(b, codeOf(err)), err.Error()...) }, nil)
}

// handle does one request. The frame's descriptors are closed by the caller unless it sets them to -1.
func (l *link) handle(ctx context.Context, f frame) (resp any, fds []int, err error) {
	defer func() {
		// A fault in one request must not take a thousand sandboxes down.
		if p := recover(); p != nil {
			l.k.log.Error("panic in request", "op", f.op, "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("keeper: panic in request %d: %v", f.op, p)
		}
	}()
	k := l.k
	switch f.op {
	case opHello:
		return l.hello(f)
	case opDeliver:
		l.startDelivery()
		return nil, nil, nil
	case opMountLayer:
		var r layerRequest
		if err := decodeValue(f.body, &r); err != nil {
			return nil, nil, err
		}
		if len(f.fds) < 1 || len(f.fds) > 2 {
			return nil, nil, fmt.Errorf("mount layer: want the descriptors of its file or two files: %w", sandbox.ErrInvalid)
		}
		return nil, nil, k.layers.mount(ctx, r.ID, f.fds, r.Direct)
	case opUnmountLayer:
		var r layerRequest
		if err := decodeValue(f.body, &r); err != nil {
			return nil, nil, err
		}
		return nil, nil, k.unmountLayer(r.ID)
	case opLayers:
		return &layersResponse{k.layers.list()}, nil, nil
	case opCreate:
		var b Birth
		if err := decodeValue(f.body, &b); err != nil {
			return nil, nil, err
		}
		if len(f.fds) != 1 {
			return nil, nil, fmt.Errorf("create: want the descriptor of the upper's folder: %w", sandbox.ErrInvalid)
		}
		parent := f.fds[0]
		f.fds[0] = -1
		born, err := k.create(ctx, &b, parent)
		return born, nil, err
	case opReserve:
		var r boxRequest
		if err := decodeValue(f.body, &r); err != nil {
			return nil, nil, err
		}
		fd, err := k.reserve(ctx, r.Box)
		if err != nil {
			return nil, nil, fmt.Errorf("reserve for %s: %w", r.Box, err)
		}
		return nil, []int{fd}, nil
	case opList:
		return k.list(), nil, nil
	case opCall:
		var r Call
		if err := decodeValue(f.body, &r); err != nil {
			return nil, nil, err
		}
		end, fds, err := k.calls.run(ctx, &r, f.fds, nil)
		if err != nil {
			return nil, nil, err
		}
		return end, fds, nil
	case opCallPair:
		var r CallPair
		if err := decodeValue(f.body, &r); err != nil {
			return nil, nil, err
		}
		end, fds, err := k.calls.pair(ctx, &r, f.fds)
		if err != nil {
			return nil, nil, err
		}
		return end, fds, nil
	case opStandbys:
		return &standbysResponse{k.calls.standbys.count()}, nil, nil
	case opShutdown:
		k.stop()
		return nil, nil, nil
	}
	return l.handleBox(ctx, f)
}

func (l *link) handleBox(ctx context.Context, f frame) (resp any, fds []int, err error) {
	k := l.k
	switch f.op {
	case opDestroy:
		var r boxRequest
		if err := decodeValue(f.body, &r); err != nil {
			return nil, nil, err
		}
		end, err := k.destroy(ctx, r.Box)
		if err != nil || len(end.Ends) == 0 && !end.Ran {
			return nil, nil, err
		}
		return &end, nil, nil
	case opStart:
		var r startRequest
		b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, b.start(ctx, &r.Command)
	case opKnown:
		var r commandRequest
		b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
		if err != nil {
			return nil, nil, err
		}
		return &knownResponse{b.knows(r.Cmd)}, nil, nil
	case opStdin:
		var r stdinRequest
		b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
		if err != nil {
			return nil, nil, err
		}
		taken, err := b.stdin(ctx, &r)
		return &stdinResponse{taken}, nil, err
	case opSignal:
		var r signalRequest
		b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, b.signal(r.Cmd, r.Signal)
	case opResize:
		var r resizeRequest
		b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, b.resize(r.Cmd, r.Size)
	case opOpenSession:
		var r sessionRequest
		b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, b.openSession(ctx, &r.Session)
	case opCloseSession:
		var r commandRequest
		b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, b.closeSession(r.Cmd)
	case opFiles:
		var r filesRequest
		b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
		if err != nil {
			return nil, nil, err
		}
		fd, err := b.files(ctx, r.User, r.Port)
		if err != nil {
			return nil, nil, err
		}
		return nil, []int{fd}, nil
	case opDeadline:
		var r deadlineRequest
		b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
		if err != nil {
			return nil, nil, err
		}
		return nil, nil, b.setDeadline(r.Kind, r.At, r.Cause)
	}
	var r boxRequest
	b, err := l.decodeFor(f, &r, func() sandbox.ID { return r.Box })
	if err != nil {
		return nil, nil, err
	}
	switch f.op {
	case opNetns:
		fd, err := b.lendNetns()
		if err != nil {
			return nil, nil, fmt.Errorf("network namespace of %s: %w", b.id, err)
		}
		return nil, []int{fd}, nil
	case opFreeze:
		return nil, nil, b.freeze(true)
	case opThaw:
		return nil, nil, b.freeze(false)
	case opStats:
		s, err := b.figures()
		return &s, nil, err
	}
	return nil, nil, fmt.Errorf("request %d: unknown to this keeper: %w", f.op, sandbox.ErrUnsupported)
}

func (l *link) decodeFor(f frame, r any, id func() sandbox.ID) (*box, error) {
	if err := decodeValue(f.body, r); err != nil {
		return nil, err
	}
	return l.k.box(id())
}

func (l *link) hello(f frame) (any, []int, error) {
	var r helloRequest
	if err := decodeValue(f.body, &r); err != nil {
		return nil, nil, err
	}
	if r.Version == 0 || r.Version > ProtocolVersion {
		return nil, nil, fmt.Errorf("protocol version %d: this keeper speaks 1 to %d: %w", r.Version, ProtocolVersion, sandbox.ErrUnsupported)
	}
	if len(f.fds) > 0 {
		l.k.mu.Lock()
		old := l.k.guest
		l.k.guest, f.fds[0] = f.fds[0], -1
		l.k.mu.Unlock()
		if old >= 0 {
			unix.Close(old)
		}
	}
	return &Info{Version: ProtocolVersion, Pid: os.Getpid(), Instance: l.k.cfg.Instance, Started: l.k.started, Features: l.k.features}, nil, nil
}

// startDelivery sends everything that is not acknowledged, and from now on what comes.
func (l *link) startDelivery() {
	l.mu.Lock()
	if l.deliver {
		l.mu.Unlock()
		return
	}
	l.deliver = true
	l.mu.Unlock()
	for _, b := range l.k.all() {
		b.rewind()
	}
	l.k.link.Store(l)
	if l.ctx.Err() != nil {
		l.k.link.CompareAndSwap(l, nil)
		return
	}
	for _, b := range l.k.all() {
		l.add(b)
	}
	l.work.Add(1)
	go l.pump()
}

// add queues a sandbox that has something to send.
func (l *link) add(b *box) {
	l.mu.Lock()
	if !l.queued[b] {
		l.queued[b] = true
		l.ready = append(l.ready, b)
	}
	l.mu.Unlock()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (k *Keeper) changed(b *box) {
	if l := k.link.Load(); l != nil {
		l.add(b)
	}
}

// pump sends events, sandbox by sandbox in turn, as long as the host's window has room.
func (l *link) pump() {
	defer l.work.Done()
	for {
		l.mu.Lock()
		var b *box
		if len(l.ready) > 0 && l.bytes < windowBytes {
			b = l.ready[0]
			l.ready = l.ready[1:]
			delete(l.queued, b)
		}
		l.mu.Unlock()
		if b == nil {
			select {
			case <-l.wake:
			case <-l.ctx.Done():
				return
			}
			continue
		}
		more, err := b.pump(l)
		if err != nil {
			l.c.close() // the reader ends the rest
			return
		}
		if more {
			l.add(b)
		}
	}
}

// send sends an event; taken is called when the host has acknowledged it.
func (l *link) send(o op, body any, data []byte, taken func()) error {
	l.mu.Lock()
	l.next++
	num := l.next
	l.inflight[num] = flight{taken, int64(len(data))}
	l.bytes += int64(len(data))
	l.mu.Unlock()
	return l.c.write(kindEvent, o, num, func(b []byte) []byte { return appendValue(b, body) }, data)
}

func (l *link) acked(num uint64) {
	l.mu.Lock()
	f, ok := l.inflight[num]
	delete(l.inflight, num)
	full := l.bytes >= windowBytes
	l.bytes -= f.bytes
	full = full && l.bytes < windowBytes
	l.mu.Unlock()
	if ok {
		f.taken()
	}
	if full {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}
