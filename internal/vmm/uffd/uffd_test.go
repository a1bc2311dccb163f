package uffd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "monitor" {
		if err := monitor(); err != nil {
			fmt.Fprintln(os.Stderr, "monitor:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// newUffd makes a userfaultfd as a monitor does, with events for pages that are given back.
func newUffd() (int, error) {
	var fd uintptr
	var e unix.Errno
	if dev, err := unix.Open("/dev/userfaultfd", unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		fd, _, e = unix.Syscall(unix.SYS_IOCTL, uintptr(dev), 0xaa00, unix.O_CLOEXEC|unix.O_NONBLOCK)
		unix.Close(dev)
	} else {
		fd, _, e = unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0)
	}
	if e != 0 {
		return -1, e
	}
	api := struct{ api, features, ioctls uint64 }{0xaa, 1 << 3, 0} // UFFD_FEATURE_EVENT_REMOVE
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, 0xc018aa3f, uintptr(unsafe.Pointer(&api))); e != 0 {
		return -1, e
	}
	return int(fd), nil
}

func register(fd int, mem []byte) error {
	arg := struct{ at, size, mode, ioctls uint64 }{uint64(uintptr(unsafe.Pointer(&mem[0]))), uint64(len(mem)), 1, 0}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), 0xc020aa00, uintptr(unsafe.Pointer(&arg))); e != 0 {
		return e
	}
	return nil
}

const guestPages = 300

// pattern is what page i of the saved memory holds.
func pattern(i int) []byte { return bytes.Repeat([]byte{byte(i), byte(i >> 8), 0xa5, 1}, Page/4) }

// monitor is a process that has no memory but what is given to it: two regions, in the other order than in the file. Its lines on standard
// output say how far it is; it goes on when a line comes.
func monitor() error {
	c, err := net.Dial("unix", os.Args[2])
	if err != nil {
		return err
	}
	fd, err := newUffd()
	if err != nil {
		return err
	}
	mem, err := unix.Mmap(-1, 0, guestPages*Page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	if err := register(fd, mem); err != nil {
		return err
	}
	base := uint64(uintptr(unsafe.Pointer(&mem[0])))
	text, err := json.Marshal([]Region{{base, 100 * Page, 200 * Page, Page, Page}, {base + 100*Page, 200 * Page, 0, Page, Page}})
	if err != nil {
		return err
	}
	place := func(i int) int { return (i + 200) % guestPages } // of the file, for a page of ours
	u := c.(*net.UnixConn)
	// In parts: the descriptor comes with the second.
	if _, err := u.Write(text[:10]); err != nil {
		return err
	}
	if _, _, err := u.WriteMsgUnix(text[10:], unix.UnixRights(fd), nil); err != nil {
		return err
	}
	for i := range guestPages {
		if i%3 == 2 {
			continue // never touched
		}
		if !bytes.Equal(mem[i*Page:(i+1)*Page], pattern(place(i))) {
			return fmt.Errorf("page %d holds something else", i)
		}
	}
	fmt.Println("read")
	one := make([]byte, 1)
	if _, err := os.Stdin.Read(one); err != nil {
		return err
	}
	// What is given back is zero from then on, and what was written stays.
	copy(mem[40*Page:], "written")
	if err := unix.Madvise(mem[50*Page:60*Page], unix.MADV_DONTNEED); err != nil {
		return err
	}
	for i := 50; i < 60; i++ {
		if !bytes.Equal(mem[i*Page:(i+1)*Page], make([]byte, Page)) {
			return fmt.Errorf("page %d that was given back is not zero", i)
		}
	}
	if got := string(mem[40*Page : 40*Page+7]); got != "written" {
		return fmt.Errorf("what was written is %q", got)
	}
	if got := mem[62*Page : 63*Page]; !bytes.Equal(got, pattern(place(62))) {
		return errors.New("page 62 holds something else")
	}
	fmt.Println("gave back")
	os.Stdin.Read(one)
	return nil
}

type rig struct {
	m    *Memory
	l    *net.UnixListener
	sock string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	fd, err := newUffd()
	if err != nil {
		t.Skipf("skip: no userfaultfd here: %v", err)
	}
	unix.Close(fd)
	dir, err := os.MkdirTemp("", "dsec-uffd-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f, err := os.Create(filepath.Join(dir, "memory"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for i := range guestPages {
		if _, err := f.Write(pattern(i)); err != nil {
			t.Fatal(err)
		}
	}
	r := &rig{sock: filepath.Join(dir, "s")}
	if r.m, err = Open(f); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.m.Close(); err != nil {
			t.Error(err)
		}
	})
	if r.l, err = net.ListenUnix("unix", &net.UnixAddr{Name: r.sock, Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.l.Close() })
	return r
}

type served struct {
	stats Stats
	err   error
}

// start starts a monitor and serves it.
func (r *rig) start(t *testing.T) (cmd *exec.Cmd, in io.Writer, next func() string, end chan served) {
	t.Helper()
	cmd = exec.Command(os.Args[0], "monitor", r.sock)
	cmd.Stderr = os.Stderr
	w, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	r.l.SetDeadline(time.Now().Add(20 * time.Second))
	c, err := r.l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	end = make(chan served, 1)
	go func() {
		s, err := r.m.Serve(t.Context(), c)
		end <- served{s, err}
	}()
	next = func() string {
		buf := make([]byte, 64)
		n, _ := out.Read(buf)
		return strings.TrimSpace(string(buf[:n]))
	}
	return cmd, w, next, end
}

func wait(t *testing.T, end chan served) served {
	t.Helper()
	select {
	case s := <-end:
		return s
	case <-time.After(20 * time.Second):
		t.Fatal("Serve does not end")
	}
	return served{}
}

func TestServe(t *testing.T) {
	r := newRig(t)
	_, in, next, end := r.start(t)
	if got := next(); got != "read" {
		t.Fatalf("the monitor says %q", got)
	}
	io.WriteString(in, "\n")
	if got := next(); got != "gave back" {
		t.Fatalf("the monitor says %q", got)
	}
	io.WriteString(in, "\n")
	s := wait(t, end)
	if s.err != nil {
		t.Fatal(s.err)
	}
	if s.stats.Removed != 10 || s.stats.Faults < 200 || s.stats.Faults > guestPages+20 || s.stats.Ahead != 0 {
		t.Errorf("%+v", s.stats)
	}
	// The next one gets what this one needed before it asks.
	_, in, next, end = r.start(t)
	if got := next(); got != "read" {
		t.Fatalf("the monitor says %q", got)
	}
	io.WriteString(in, "\n")
	next()
	io.WriteString(in, "\n")
	if s = wait(t, end); s.err != nil || s.stats.Ahead < 190 || s.stats.Faults > 60 {
		t.Errorf("the second one: %+v, %v", s.stats, s.err)
	}
}

// A monitor that is killed ends its server, and no other's.
func TestServeKilledMonitor(t *testing.T) {
	r := newRig(t)
	first, _, next, end := r.start(t)
	_, in2, next2, end2 := r.start(t)
	if a, b := next(), next2(); a != "read" || b != "read" {
		t.Fatalf("the monitors say %q, %q", a, b)
	}
	first.Process.Kill()
	if s := wait(t, end); s.err != nil {
		t.Errorf("a killed monitor's: %v", s.err)
	}
	io.WriteString(in2, "\n")
	if got := next2(); got != "gave back" {
		t.Errorf("the other one says %q", got)
	}
	io.WriteString(in2, "\n")
	wait(t, end2)
}

func TestServeEndsWithContext(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	near, far := socketpair(t)
	fd, err := newUffd()
	if err != nil {
		t.Fatal(err)
	}
	text, _ := json.Marshal([]Region{{Base: 1 << 30, Size: Page, PageSize: Page}})
	if _, _, err := far.WriteMsgUnix(text, unix.UnixRights(fd), nil); err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	end := make(chan served, 1)
	go func() {
		s, err := r.m.Serve(ctx, near)
		end <- served{s, err}
	}()
	time.Sleep(20 * time.Millisecond)
	cancel()
	if s := wait(t, end); !errors.Is(s.err, context.Canceled) {
		t.Errorf("%v, want that it was cancelled", s.err)
	}
}

func socketpair(t *testing.T) (near, far *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var out [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		out[i] = c.(*net.UnixConn)
	}
	return out[0], out[1]
}

// A monitor that was taken over says what it likes.
func TestServeHostileMonitor(t *testing.T) {
	r := newRig(t)
	null := func() int {
		fd, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	good := func() int {
		fd, err := newUffd()
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	for name, c := range map[string]struct {
		text string
		fds  func() []int
		want error
	}{
		"no descriptor":        {`[{"base_host_virt_addr":4096,"size":4096,"offset":0}]`, func() []int { return nil }, sandbox.ErrLost},
		"another file":         {`[{"base_host_virt_addr":4096,"size":4096,"offset":0}]`, func() []int { return []int{null()} }, sandbox.ErrInvalid},
		"two descriptors":      {`[{"base_host_virt_addr":4096,"size":4096,"offset":0}]`, func() []int { return []int{good(), null()} }, sandbox.ErrInvalid},
		"no region":            {`[]`, func() []int { return []int{good()} }, sandbox.ErrInvalid},
		"beyond the memory":    {`[{"base_host_virt_addr":4096,"size":4096,"offset":1228800}]`, func() []int { return []int{good()} }, sandbox.ErrInvalid},
		"larger than all":      {`[{"base_host_virt_addr":4096,"size":1232896,"offset":0}]`, func() []int { return []int{good()} }, sandbox.ErrInvalid},
		"sum wraps":            {`[{"base_host_virt_addr":18446744073709547520,"size":8192,"offset":0}]`, func() []int { return []int{good()} }, sandbox.ErrInvalid},
		"offset wraps":         {`[{"base_host_virt_addr":4096,"size":8192,"offset":18446744073709547520}]`, func() []int { return []int{good()} }, sandbox.ErrInvalid},
		"not on a page":        {`[{"base_host_virt_addr":4097,"size":4096,"offset":0}]`, func() []int { return []int{good()} }, sandbox.ErrInvalid},
		"large pages":          {`[{"base_host_virt_addr":0,"size":2097152,"offset":0,"page_size":2097152}]`, func() []int { return []int{good()} }, sandbox.ErrUnsupported},
		"never an end":         {"[" + strings.Repeat(" ", maxHandshake), func() []int { return []int{good()} }, sandbox.ErrInvalid},
		"many regions":         {"[" + strings.Repeat(`{"base_host_virt_addr":4096,"size":4096,"offset":0},`, 65) + `{"size":4096}]`, func() []int { return []int{good()} }, sandbox.ErrInvalid},
		"no JSON and its end":  {`nonsense`, func() []int { return []int{good()} }, sandbox.ErrLost},
		"a region that is not": {`[{"base_host_virt_addr":4096,"size":0,"offset":0}]`, func() []int { return []int{good()} }, sandbox.ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			near, far := socketpair(t)
			fds := c.fds()
			go func() {
				var oob []byte
				if len(fds) > 0 {
					oob = unix.UnixRights(fds...)
				}
				far.SetWriteDeadline(time.Now().Add(10 * time.Second))
				far.WriteMsgUnix([]byte(c.text[:1]), oob, nil)
				far.Write([]byte(c.text[1:]))
				for _, fd := range fds {
					unix.Close(fd)
				}
				far.CloseWrite()
			}()
			end := make(chan served, 1)
			go func() {
				s, err := r.m.Serve(t.Context(), near)
				end <- served{s, err}
			}()
			if s := wait(t, end); !errors.Is(s.err, c.want) {
				t.Errorf("%v, want %v", s.err, c.want)
			}
		})
	}
}

func FuzzCheck(f *testing.F) {
	f.Add([]byte(`[{"base_host_virt_addr":4096,"size":4096,"offset":0,"page_size":4096}]`))
	f.Add([]byte(`[{"base_host_virt_addr":18446744073709547520,"size":8192,"offset":4096}]`))
	m := &Memory{data: make([]byte, 16*Page)}
	f.Fuzz(func(t *testing.T, text []byte) {
		var regions []Region
		if json.Unmarshal(text, &regions) != nil || m.check(regions) != nil {
			return
		}
		s := &server{m: m, regions: regions, gone: make([]uint64, 1)}
		for _, r := range regions {
			for _, at := range []uint64{r.Base, r.Base + r.Size - Page} {
				if p, ok := s.page(at); !ok || p < 0 || p >= 16 {
					t.Errorf("%+v: page %d, %v", r, p, ok)
				}
			}
			s.remove(0, ^uint64(0))
		}
	})
}
