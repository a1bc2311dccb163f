package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// ParkName is the socket of the keeper's park in its run folder. It is not the host's connection: a mount that the keeper makes for a
// host may wait for a daemon whose connection is parked, and whoever starts that daemon again must not wait for the mount.
const ParkName = "park.sock"

const (
	opPark op = iota + 60
	opParked

	maxParked    = 16 // names
	maxParkConns = 16
	parkBound    = 10 * time.Second // of one call
)

type (
	parkRequest struct {
		Name string
		Note string
	}
	parkResponse struct{ Note string }
)

// park holds descriptors for others by name, so that they outlive the processes that use them.
type park struct {
	mu   sync.Mutex
	held map[string]parked
}

type parked struct {
	note string
	fds  []int
}

func (p *park) put(name, note string, fds []int) error {
	if name == "" || len(name) > 255 || len(note) > 1024 || len(fds) == 0 {
		return fmt.Errorf("park %.80q: want a name, a note of at most 1,024 octets and descriptors: %w", name, sandbox.ErrInvalid)
	}
	p.mu.Lock()
	old, ok := p.held[name]
	if !ok && len(p.held) >= maxParked {
		p.mu.Unlock()
		return fmt.Errorf("park %s: %d names are taken: %w", name, maxParked, sandbox.ErrExhausted)
	}
	p.held[name] = parked{note, fds}
	p.mu.Unlock()
	closeAll(old.fds)
	return nil
}

// get returns duplicates.
func (p *park) get(name string) (note string, fds []int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h, ok := p.held[name]
	if !ok {
		return "", nil, fmt.Errorf("parked %.80q: %w", name, sandbox.ErrNotFound)
	}
	for _, fd := range h.fds {
		n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			closeAll(fds)
			return "", nil, fmt.Errorf("parked %s: %w", name, err)
		}
		fds = append(fds, n)
	}
	return h.note, fds, nil
}

func (p *park) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range p.held {
		closeAll(h.fds)
	}
	clear(p.held)
}

// servePark answers until ctx ends or end is called, which lets go of all that is parked. The working folder is the run folder.
func (k *Keeper) servePark(ctx context.Context) (end func(), err error) {
	os.Remove(ParkName)
	old := unix.Umask(0o177)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: ParkName, Net: "unix"})
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	context.AfterFunc(ctx, func() { l.Close() })
	p := &park{held: map[string]parked{}}
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		room := make(chan struct{}, maxParkConns)
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
					return
				}
				time.Sleep(10 * time.Millisecond) // out of descriptors: wait, do not spin
				continue
			}
			if !confine.OwnPeer(c) {
				c.Close()
				continue
			}
			room <- struct{}{}
			wg.Add(1)
			go func() {
				defer wg.Done()
				defer func() { <-room }()
				c.SetDeadline(time.Now().Add(parkBound))
				p.talk(newConn(c))
			}()
		}
	}()
	return func() { l.Close(); wg.Wait(); p.close() }, nil
}

// talk answers one call.
func (p *park) talk(c *conn) {
	defer c.close()
	defer c.drop()
	f, err := c.read()
	if err != nil {
		return
	}
	var r parkRequest
	var resp parkResponse
	var fds []int
	err = decodeValue(f.body, &r)
	switch {
	case err != nil:
		closeAll(f.fds)
	case f.op == opPark:
		if err = p.put(r.Name, r.Note, f.fds); err != nil {
			closeAll(f.fds)
		}
	case f.op == opParked:
		closeAll(f.fds)
		resp.Note, fds, err = p.get(r.Name)
	default:
		closeAll(f.fds)
		err = fmt.Errorf("request %d: unknown to the park: %w", f.op, sandbox.ErrUnsupported)
	}
	if err != nil {
		c.write(kindResponse, f.op, f.num, func(b []byte) []byte { return append(append(b, codeOf(err)), err.Error()...) }, nil)
		return
	}
	c.write(kindResponse, f.op, f.num, func(b []byte) []byte { return appendValue(append(b, 0), &resp) }, nil, fds...)
	closeAll(fds)
}

// Park is the park of the keeper of a run folder. Descriptors that lie there live as long as the keeper.
type Park struct{ dir string }

// NewPark names the keeper's run folder. While no keeper runs there, calls fail with sandbox.ErrLost.
func NewPark(dir string) *Park { return &Park{dir} }

func (p *Park) call(ctx context.Context, o op, r parkRequest, files []*os.File) (note string, fds []int, err error) {
	d, err := os.Open(p.dir)
	if err != nil {
		return "", nil, fmt.Errorf("keeper: open run folder: %w: %w", sandbox.ErrLost, err)
	}
	defer d.Close()
	ctx, cancel := context.WithTimeout(ctx, parkBound)
	defer cancel()
	var dialer net.Dialer
	nc, err := dialer.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), ParkName))
	if err != nil {
		return "", nil, fmt.Errorf("keeper: dial its park: %w: %w", sandbox.ErrLost, err)
	}
	defer nc.Close()
	at, _ := ctx.Deadline()
	nc.SetDeadline(at)
	c := newConn(nc.(*net.UnixConn))
	defer c.drop()
	var out []int
	for _, f := range files {
		out = append(out, int(f.Fd()))
	}
	if err := c.write(kindRequest, o, 1, func(b []byte) []byte { return appendValue(b, &r) }, nil, out...); err != nil {
		return "", nil, fmt.Errorf("keeper: park: %w", err)
	}
	f, err := c.read()
	if err != nil {
		return "", nil, fmt.Errorf("keeper: park: %w", err)
	}
	if len(f.body) == 0 {
		closeAll(f.fds)
		return "", nil, fmt.Errorf("keeper: park: empty answer: %w", sandbox.ErrInvalid)
	}
	if f.body[0] != 0 {
		closeAll(f.fds)
		return "", nil, &remoteError{f.body[0], string(f.body[1:])}
	}
	var resp parkResponse
	if err := decodeValue(f.body[1:], &resp); err != nil {
		closeAll(f.fds)
		return "", nil, err
	}
	return resp.Note, f.fds, nil
}

// Park keeps descriptors under a name, in place of what was there. The caller's stay its own.
func (p *Park) Park(ctx context.Context, name, note string, files ...*os.File) error {
	_, fds, err := p.call(ctx, opPark, parkRequest{name, note}, files)
	closeAll(fds)
	return err
}

// Parked returns new descriptors of what is kept under a name; sandbox.ErrNotFound when nothing is.
func (p *Park) Parked(ctx context.Context, name string) (note string, files []*os.File, err error) {
	note, fds, err := p.call(ctx, opParked, parkRequest{Name: name}, nil)
	if err != nil {
		return "", nil, err
	}
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), name))
	}
	return note, files, nil
}
