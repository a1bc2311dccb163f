package vmm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// qmp is a connection to QEMU's control socket. QEMU is no friend: its guest may have taken it over, so answers are bounded.
type qmp struct {
	c  *net.UnixConn
	mu sync.Mutex // one command at a time

	state  sync.Mutex
	err    error
	answer chan reply
	events chan event // the newest; old ones are dropped
	done   chan struct{}
	over   chan struct{} // closed when the guest has ended, and with done
	ending sync.Once
	next   int
}

type reply struct {
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	ID int `json:"id"`
}

type event struct {
	Event string          `json:"event"`
	Data  json.RawMessage `json:"data"`
}

const (
	qmpLine  = 4 << 20
	qmpBound = 30 * time.Second
)

// qmpError is QEMU's word on a command.
type qmpError struct{ Class, Desc string }

func (e *qmpError) Error() string { return "QEMU: " + e.Desc }

// dialQMP connects, waiting until QEMU listens, and greets.
func dialQMP(ctx context.Context, path string) (*qmp, error) {
	c, err := dialUnix(ctx, path)
	if err != nil {
		return nil, err
	}
	q := &qmp{c: c, answer: make(chan reply, 1), events: make(chan event, 64), done: make(chan struct{}), over: make(chan struct{})}
	go q.read()
	if err := q.do(ctx, "qmp_capabilities", nil, nil); err != nil {
		q.close()
		return nil, err
	}
	return q, nil
}

func (q *qmp) close() { q.c.Close() }

func (q *qmp) fail(err error) {
	q.state.Lock()
	defer q.state.Unlock()
	if q.err == nil {
		q.err = err
		close(q.done)
		q.ending.Do(func() { close(q.over) })
	}
}

func (q *qmp) failure() error {
	q.state.Lock()
	defer q.state.Unlock()
	return q.err
}

func (q *qmp) read() {
	defer q.c.Close()
	s := bufio.NewScanner(q.c)
	s.Buffer(make([]byte, 4096), qmpLine)
	for s.Scan() {
		var m struct {
			event
			reply
		}
		if err := json.Unmarshal(s.Bytes(), &m); err != nil {
			q.fail(fmt.Errorf("QEMU's control socket: %w", err))
			return
		}
		switch {
		case m.Event != "":
			if m.Event == "SHUTDOWN" || m.Event == "GUEST_PANICKED" {
				q.ending.Do(func() { close(q.over) })
			}
			for {
				select {
				case q.events <- m.event:
				default:
					select {
					case <-q.events:
					default:
					}
					continue
				}
				break
			}
		case m.Return != nil || m.Error != nil:
			select {
			case q.answer <- m.reply:
			default: // to nothing that was asked
			}
		}
	}
	err := s.Err()
	if err == nil {
		err = errors.New("closed")
	}
	q.fail(fmt.Errorf("QEMU's control socket: %w: %w", err, sandbox.ErrLost))
}

// do runs a command. file goes along as a descriptor, for getfd.
func (q *qmp) do(ctx context.Context, name string, args, result any, file ...*os.File) error {
	ctx, cancel := context.WithTimeout(ctx, qmpBound)
	defer cancel()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.next++
	b, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        int    `json:"id"`
	}{name, args, q.next})
	if err != nil {
		return err
	}
	var oob []byte
	if len(file) > 0 {
		oob = unix.UnixRights(int(file[0].Fd()))
	}
	at, _ := ctx.Deadline()
	q.c.SetWriteDeadline(at)
	_, _, err = q.c.WriteMsgUnix(append(b, '\n'), oob, nil)
	runtime.KeepAlive(file)
	if err != nil {
		q.fail(fmt.Errorf("QEMU's control socket: %w: %w", err, sandbox.ErrLost))
		q.close()
		return q.failure()
	}
	for {
		select {
		case r := <-q.answer:
			if r.ID != q.next {
				continue // of a command that was given up
			}
			if r.Error != nil {
				return fmt.Errorf("%s: %w", name, &qmpError{r.Error.Class, r.Error.Desc})
			}
			if result != nil {
				return json.Unmarshal(r.Return, result)
			}
			return nil
		case <-q.done:
			return fmt.Errorf("%s: %w", name, q.failure())
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", name, ctx.Err())
		}
	}
}

// wait returns the next event that ok takes.
func (q *qmp) wait(ctx context.Context, ok func(event) bool) error {
	for {
		select {
		case e := <-q.events:
			if ok(e) {
				return nil
			}
		case <-q.done:
			return q.failure()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// dialUnix connects to a socket in a folder whose path may be longer than a socket's may.
func dialUnix(ctx context.Context, path string) (*net.UnixConn, error) {
	dir, name := splitPath(path)
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name))
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// listenUnix makes a listening socket and returns its descriptor's file; the socket stays in the folder.
func listenUnix(path string) (*os.File, error) {
	dir, name := splitPath(path)
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	os.Remove(path)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), name), Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	defer l.Close()
	return l.File()
}
