package keeper

import (
	"crypto/sha256"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The end of a command does not overtake its last octets: they may come, and make the end due, while its streams are being looked at.
func TestEndDoesNotOvertakeOutput(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ends[i] = c.(*net.UnixConn)
	}
	l := &link{c: newConn(ends[0]), inflight: map[uint64]flight{}}
	stream := func(c *command) *stream {
		return &stream{cmd: c, headMax: 1000, sum: sha256.New(), end: -1, room: make(chan struct{}, 1)}
	}
	c := &command{b: &box{id: "b"}, id: "c"}
	c.out, c.err = stream(c), stream(c)

	c.err.mu.Lock() // holds the pump between the two streams
	type result struct {
		sent int
		left bool
		err  error
	}
	done := make(chan result)
	go func() {
		sent, left, err := c.pump(l)
		done <- result{sent, left, err}
	}()
	time.Sleep(50 * time.Millisecond) // it has seen that there is nothing of the first; one that has not makes the test weaker, not wrong
	c.out.mu.Lock()
	c.out.account([]byte("the last"))
	c.out.end = c.out.total
	c.out.finishLocked()
	c.out.mu.Unlock()
	c.mu.Lock()
	c.end = outPending
	c.mu.Unlock()
	c.err.mu.Unlock()
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	total := r.sent
	for range 3 {
		if total == 0 && c.endSent() {
			t.Fatal("the end was sent before the output")
		}
		sent, _, err := c.pump(l)
		if err != nil {
			t.Fatal(err)
		}
		total += sent
	}
	if total != len("the last") || !c.endSent() {
		t.Errorf("%d octets sent, end sent %v", total, c.endSent())
	}
}
