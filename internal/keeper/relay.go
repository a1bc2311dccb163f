package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// The protocol passes descriptors, which a stream into a virtual machine can't carry. Two relays stand in its way, one at each end: a
// descriptor that the keeper answers goes as a stream of its own beside, whose number follows its frame as u32, and comes out as one end
// of a socket pair. The near end trusts nothing that comes: kinds, sizes and what is under way are bounded.

// Far is the stream between two relays and the means to send others beside it.
type Far interface {
	io.ReadWriteCloser
	// Offer opens a stream beside; Take is the other side of that.
	Offer() (uint32, Half, error)
	Take(id uint32) (Half, error)
}

// Half is a stream that can be ended in one direction.
type Half interface {
	io.ReadWriteCloser
	CloseWrite() error
}

// Bounds of what a guest's keeper may have under way at its host. The keeper's own are below them.
const (
	relayEvents  = 64 << 10
	relayOctets  = windowBytes + 4<<20
	relayBody    = 4 << 20
	relayStreams = 2
)

// RelayInside carries the frames of a keeper to a far host until either ends. It owns both.
func RelayInside(keeper *net.UnixConn, far Far) error {
	defer keeper.Close()
	defer far.Close()
	go func() {
		io.Copy(keeper, far) // the host sends no descriptors
		keeper.Close()
	}()
	c := newConn(keeper)
	defer c.drop()
	for {
		f, err := c.read()
		if err != nil {
			return err
		}
		var ids []byte
		for _, fd := range f.fds {
			var id uint32
			if err == nil {
				id, err = offer(far, fd)
			} else {
				unix.Close(fd)
			}
			ids = binary.LittleEndian.AppendUint32(ids, id)
		}
		if err != nil {
			return err
		}
		b := appendHeader(nil, f, len(f.fds))
		if _, err := far.Write(append(append(b, f.body...), ids...)); err != nil {
			return err
		}
	}
}

// offer sends a socket as a stream beside; anything else goes as 0.
func offer(far Far, fd int) (uint32, error) {
	f := os.NewFile(uintptr(fd), "sent")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return 0, nil
	}
	id, st, err := far.Offer()
	if err != nil {
		c.Close()
		return 0, err
	}
	go Splice(st, c.(*net.UnixConn))
	return id, nil
}

func appendHeader(b []byte, f frame, nfds int) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(f.body)))
	b = append(b, f.kind, byte(nfds))
	b = binary.LittleEndian.AppendUint16(b, uint16(f.op))
	return binary.LittleEndian.AppendUint64(b, f.num)
}

// RelayNear carries frames between a client of ours and a keeper far away until either ends, and returns why. It owns both.
func RelayNear(client *net.UnixConn, far Far) error {
	r := &nearRelay{far: far, client: newConn(client), under: map[uint64]int{}}
	defer client.Close()
	defer far.Close()
	var wg sync.WaitGroup
	wg.Go(func() {
		r.out()
		far.Close()
	})
	err := r.in()
	client.Close()
	wg.Wait()
	return err
}

type nearRelay struct {
	far    Far
	client *conn

	mu     sync.Mutex
	under  map[uint64]int // octets of events that are not acknowledged, by number
	octets int
}

// out carries the client's frames. Descriptors among them have no meaning far away.
func (r *nearRelay) out() {
	defer r.client.drop()
	for {
		f, err := r.client.read()
		if err != nil {
			return
		}
		closeAll(f.fds)
		if f.kind == kindAck {
			r.mu.Lock()
			r.octets -= r.under[f.num]
			delete(r.under, f.num)
			r.mu.Unlock()
		}
		if _, err := r.far.Write(append(appendHeader(nil, f, 0), f.body...)); err != nil {
			return
		}
	}
}

func (r *nearRelay) in() error {
	var hb [frameHeader]byte
	for {
		if _, err := io.ReadFull(r.far, hb[:]); err != nil {
			return err
		}
		n, nfds := int(binary.LittleEndian.Uint32(hb[:])), int(hb[5])
		f := frame{kind: hb[4], op: op(binary.LittleEndian.Uint16(hb[6:])), num: binary.LittleEndian.Uint64(hb[8:])}
		if n > relayBody || nfds > relayStreams || f.kind != kindResponse && f.kind != kindEvent || f.kind == kindEvent && nfds > 0 {
			return fmt.Errorf("keeper in a guest: frame of kind %d, %d octets, %d descriptors: %w", f.kind, n, nfds, sandbox.ErrInvalid)
		}
		if f.kind == kindEvent {
			if err := r.count(f.num, n); err != nil {
				return err
			}
		}
		body, err := readBody(r.far, n)
		if err != nil {
			return err
		}
		f.body = body
		var fds []int
		for range nfds {
			var id [4]byte
			if _, err = io.ReadFull(r.far, id[:]); err != nil {
				break
			}
			var fd int
			if fd, err = r.take(binary.LittleEndian.Uint32(id[:])); err != nil {
				break
			}
			fds = append(fds, fd)
		}
		if err == nil {
			err = r.client.write(f.kind, f.op, f.num, nil, f.body, fds...)
		}
		closeAll(fds)
		if err != nil {
			return err
		}
	}
}

// readBody grows with what really comes.
func readBody(from io.Reader, n int) ([]byte, error) {
	var b []byte
	for len(b) < n {
		part := min(n-len(b), 64<<10)
		at := len(b)
		b = append(b, make([]byte, part)...)
		if _, err := io.ReadFull(from, b[at:]); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func (r *nearRelay) count(num uint64, n int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.under[num]; ok || len(r.under) >= relayEvents || r.octets+n > relayOctets {
		return fmt.Errorf("keeper in a guest: event %d, with %d of %d octets not acknowledged: %w", num, len(r.under), r.octets, sandbox.ErrExhausted)
	}
	r.under[num] = n + 1
	r.octets += n + 1
	return nil
}

// take makes a descriptor of a stream beside.
func (r *nearRelay) take(id uint32) (int, error) {
	st, err := r.far.Take(id)
	if err != nil {
		return -1, err
	}
	c, fd, err := Socketpair()
	if err != nil {
		st.Close()
		return -1, err
	}
	go Splice(st, c)
	return fd, nil
}

// Socketpair returns a connection and a descriptor of its other end.
func Socketpair() (*net.UnixConn, int, error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("socketpair: %w", err)
	}
	f := os.NewFile(uintptr(p[0]), "pair")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		unix.Close(p[1])
		return nil, -1, fmt.Errorf("socketpair: %w", err)
	}
	return c.(*net.UnixConn), p[1], nil
}

// Splice carries octets both ways until both directions have ended, and closes both.
func Splice(a, b Half) {
	var wg sync.WaitGroup
	wg.Go(func() { carry(a, b) })
	carry(b, a)
	wg.Wait()
	a.Close()
	b.Close()
}

func carry(to, from Half) {
	if _, err := io.Copy(to, from); err != nil && !errors.Is(err, io.EOF) {
		to.Close()
		from.Close()
		return
	}
	to.CloseWrite()
}
