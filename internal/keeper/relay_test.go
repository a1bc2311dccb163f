package keeper

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// wayFar is a stream to a guest whose other end the test has, with streams beside it.
type wayFar struct {
	net.Conn
	beside map[uint32]*net.UnixConn
}

func (w *wayFar) Offer() (uint32, Half, error) { return 0, nil, errors.New("no") }
func (w *wayFar) Take(id uint32) (Half, error) {
	if c := w.beside[id]; c != nil {
		return c, nil
	}
	return nil, sandbox.ErrInvalid
}

// relayRig relays between a client's end and a guest's end that the test plays.
func relayRig(t *testing.T, beside map[uint32]*net.UnixConn) (client *conn, guest net.Conn, end chan error) {
	t.Helper()
	near, fd, err := Socketpair()
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "client")
	c, err := net.FileConn(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	a, b := net.Pipe()
	end = make(chan error, 1)
	go func() { end <- RelayNear(near, &wayFar{a, beside}) }()
	t.Cleanup(func() { c.Close(); b.Close() })
	return newConn(c.(*net.UnixConn)), b, end
}

func frameOf(kind byte, o op, num uint64, nfds int, body []byte) []byte {
	f := frame{kind: kind, op: o, num: num, body: body}
	return append(appendHeader(nil, f, nfds), body...)
}

func ended(t *testing.T, end chan error) error {
	t.Helper()
	select {
	case err := <-end:
		return err
	case <-time.After(longest):
		t.Fatal("the relay goes on")
		return nil
	}
}

// What a guest's keeper may not send ends the relay: kinds of the host's, frames that are too long, descriptors with events, streams that
// were not offered, one number twice.
func TestRelayEndsAtABreach(t *testing.T) {
	long := frameOf(kindResponse, opStats, 1, 0, nil)
	binary.LittleEndian.PutUint32(long, relayBody+1)
	event := frameOf(kindEvent, evEnded, 7, 0, []byte("x"))
	for name, octets := range map[string][]byte{
		"a request":               frameOf(kindRequest, opStart, 1, 0, nil),
		"an acknowledgement":      frameOf(kindAck, 0, 1, 0, nil),
		"a long frame":            long,
		"many descriptors":        frameOf(kindResponse, opFiles, 1, relayStreams+1, nil),
		"an event's descriptor":   frameOf(kindEvent, evEnded, 1, 1, nil),
		"one number twice":        append(event, event...),
		"a stream nobody offered": append(frameOf(kindResponse, opFiles, 1, 1, []byte{0}), 9, 0, 0, 0x80),
	} {
		t.Run(name, func(t *testing.T) {
			client, guest, end := relayRig(t, nil)
			go func() {
				for {
					f, err := client.read()
					if err != nil {
						return
					}
					closeAll(f.fds)
				}
			}()
			guest.SetDeadline(time.Now().Add(longest))
			go guest.Write(octets)
			if err := ended(t, end); err == nil || errors.Is(err, io.EOF) {
				t.Errorf("%v, want the breach", err)
			}
		})
	}
}

// Events that the host has not taken are bounded; those that it took are forgotten.
func TestRelayBoundsWhatIsUnderWay(t *testing.T) {
	r := &nearRelay{under: map[uint64]int{}}
	num := uint64(0)
	for r.count(num, 1<<20) == nil {
		if num++; num > 1000 {
			t.Fatal("a GiB is under way")
		}
	}
	if num < windowBytes>>20 {
		t.Errorf("only %d MiB may be under way, the keeper's own window is %d", num, windowBytes>>20)
	}
	r = &nearRelay{under: map[uint64]int{}}
	for num = 0; r.count(num, 0) == nil; num++ {
		if num > 1<<20 {
			t.Fatal("events without end are under way")
		}
	}
}

// A descriptor becomes a stream beside, and a descriptor again.
func TestRelayCarriesADescriptor(t *testing.T) {
	beside, fd, err := Socketpair()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	client, guest, end := relayRig(t, map[uint32]*net.UnixConn{1<<31 | 5: beside})
	go guest.Write(append(frameOf(kindResponse, opFiles, 3, 1, []byte{0}), 5, 0, 0, 0x80))
	f, err := client.read()
	if err != nil || f.num != 3 || len(f.fds) != 1 {
		t.Fatalf("%+v, %v", f, err)
	}
	if _, err := unix.Write(f.fds[0], []byte("over there")); err != nil {
		t.Fatal(err)
	}
	unix.Shutdown(f.fds[0], unix.SHUT_WR)
	buf := make([]byte, 64)
	n, err := unix.Read(fd, buf)
	if err != nil || string(buf[:n]) != "over there" {
		t.Errorf("%q, %v", buf[:max(n, 0)], err)
	}
	closeAll(f.fds)
	client.close()
	ended(t, end)
}
