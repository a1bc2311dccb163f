package calm

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const longest = 20 * time.Second

// pair is two ends, the second one of the runtime's.
func pair(t *testing.T) (*Conn, *net.UnixConn) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	far, err := net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	c, err := Listener{l}.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); far.Close() })
	far.SetDeadline(time.Now().Add(longest))
	c.SetDeadline(time.Now().Add(longest))
	return c.(*Conn), far
}

// More than the socket holds goes both ways, whole and in order, with readers that are slow to begin.
func TestOctetsBothWays(t *testing.T) {
	c, far := pair(t)
	want := make([]byte, 8<<20)
	for i := range want {
		want[i] = byte(i * 7 >> 3)
	}
	var wg sync.WaitGroup
	for _, w := range []net.Conn{c, far} {
		wg.Go(func() {
			if n, err := w.Write(want); n != len(want) || err != nil {
				t.Errorf("wrote %d: %v", n, err)
			}
			if err := w.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
				t.Error(err)
			}
		})
	}
	time.Sleep(20 * time.Millisecond)
	for _, r := range []net.Conn{c, far} {
		wg.Go(func() {
			got, err := io.ReadAll(r)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("read %d octets: %v", len(got), err)
			}
		})
	}
	wg.Wait()
}

// One octet at a time, each waited for: no wake-up is lost.
func TestNoWakeupIsLost(t *testing.T) {
	c, far := pair(t)
	go io.Copy(far, far)
	var b [1]byte
	for i := range 20000 {
		b[0] = byte(i)
		if _, err := c.Write(b[:]); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, b[:]); err != nil || b[0] != byte(i) {
			t.Fatalf("octet %d: %d, %v", i, b[0], err)
		}
	}
}

func TestDescriptorsComeWithTheirOctet(t *testing.T) {
	c, far := pair(t)
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if n, oobn, err := c.WriteMsgUnix([]byte("x"), unix.UnixRights(int(f.Fd())), nil); n != 1 || oobn == 0 || err != nil {
		t.Fatal(n, oobn, err)
	}
	var b, oob [64]byte
	n, oobn, _, _, err := far.ReadMsgUnix(b[:], oob[:])
	if n != 1 || err != nil || oobn == 0 {
		t.Fatal(n, oobn, err)
	}
	// And back, whence it must come close on exec.
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		t.Fatal(err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	if _, _, err := far.WriteMsgUnix([]byte("y"), unix.UnixRights(fds[0]), nil); err != nil {
		t.Fatal(err)
	}
	n, oobn, _, _, err = c.ReadMsgUnix(b[:], oob[:])
	if n != 1 || b[0] != 'y' || err != nil {
		t.Fatal(n, err)
	}
	msgs, err = unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		t.Fatal(err)
	}
	back, err := unix.ParseUnixRights(&msgs[0])
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(back[0])
	if flags, err := unix.FcntlInt(uintptr(back[0]), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, %v", flags, err)
	}
}

// Deadlines and Close end whatever waits, in either direction, with net's errors.
func TestWaitsEnd(t *testing.T) {
	full := func(c *Conn) error { _, err := c.Write(make([]byte, 32<<20)); return err }
	empty := func(c *Conn) error { _, err := c.Read(make([]byte, 1)); return err }
	for name, wait := range map[string]func(*Conn) error{"read": empty, "write": full} {
		t.Run(name+" past its deadline", func(t *testing.T) {
			c, _ := pair(t)
			c.SetDeadline(time.Now().Add(10 * time.Millisecond))
			err := wait(c)
			var ne net.Error
			if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &ne) || !ne.Timeout() {
				t.Errorf("%v", err)
			}
		})
		t.Run(name+" whose deadline moves to the past", func(t *testing.T) {
			c, _ := pair(t)
			time.AfterFunc(10*time.Millisecond, func() { c.SetDeadline(time.Unix(1, 0)) })
			if err := wait(c); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%v", err)
			}
			if name == "read" { // and can be taken back
				c.SetDeadline(time.Now().Add(10 * time.Millisecond))
				if err := wait(c); !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("%v", err)
				}
			}
		})
		t.Run(name+" of a connection that is closed", func(t *testing.T) {
			c, _ := pair(t)
			time.AfterFunc(10*time.Millisecond, func() { c.Close() })
			if err := wait(c); !errors.Is(err, net.ErrClosed) {
				t.Errorf("%v", err)
			}
			if err := wait(c); !errors.Is(err, net.ErrClosed) {
				t.Errorf("again: %v", err)
			}
			if err := c.Close(); !errors.Is(err, net.ErrClosed) {
				t.Errorf("closed twice: %v", err)
			}
		})
		t.Run(name+" whose peer goes", func(t *testing.T) {
			c, far := pair(t)
			time.AfterFunc(10*time.Millisecond, func() { far.Close() })
			err := wait(c)
			if name == "read" && err != io.EOF || name == "write" && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("%v", err)
			}
		})
	}
}

// Many connections that are closed under their readers and writers leave no descriptor.
func TestNoDescriptorIsLeft(t *testing.T) {
	count := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("no /proc")
		}
		return len(fds)
	}
	before := count()
	for range 50 {
		p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		a, err := New(p[0])
		if err != nil {
			t.Fatal(err)
		}
		b, err := New(p[1])
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() { a.Write(make([]byte, 4<<20)) })
		wg.Go(func() { io.Copy(io.Discard, b) })
		wg.Go(func() { a.Read(make([]byte, 1)) })
		time.Sleep(time.Millisecond)
		a.Close()
		b.Close()
		wg.Wait()
	}
	if after := count(); after > before+2 { // the runtime's poller may have come
		t.Errorf("%d descriptors, then %d", before, after)
	}
}

// The point of it all: a process that only waits for an answer sleeps while its peer reads the request.
func TestRoomToWriteWakesNobody(t *testing.T) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[1])
	c, err := New(p[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	// What the runtime polls, polled by us.
	look := []unix.PollFd{{Fd: int32(c.in.f.Fd()), Events: unix.POLLIN}}
	var b [8]byte
	if _, err := unix.Read(p[1], b[:]); err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Poll(look, 20); n > 0 || err != nil && err != unix.EINTR {
		t.Errorf("woken: %d, %v", n, err)
	}
	if _, err := unix.Write(p[1], []byte("y")); err != nil {
		t.Fatal(err)
	}
	n, err := unix.Poll(look, int(longest.Milliseconds()))
	for err == unix.EINTR { // by a signal of the runtime's
		n, err = unix.Poll(look, int(longest.Milliseconds()))
	}
	if n != 1 || err != nil {
		t.Errorf("not woken: %d, %v", n, err)
	}
}
