// Package uffd answers for the memory of machines that were started from a saved state without it (userfaultfd(2)): each page is copied
// into a machine when its guest first touches it. It hides the monitor's way of handing over its memory, and learns: what the first machine of
// a memory needed at its start the next ones get at once.
//
// Invariants: a monitor is hostile. What it says of its memory is held against the size of ours, what it hands over must be a userfaultfd, and
// nothing that it does can block anything but its own machine. A page that the machine gave back (balloon) is zero from then on.
//
// Lock order: Memory.mu alone; it is not held during a system call.
package uffd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Bounds.
const (
	Page         = 4096
	maxRegions   = 64
	maxHandshake = 64 << 10 // octets
	// HandshakeBound is how long a monitor may take from its connection to its word.
	HandshakeBound = 30 * time.Second
	learning       = 3 * time.Second // of a machine's first pages
	maxPending     = 4096            // faults that wait for an event to be read
)

// Numbers of the kernel's interface (include/uapi/linux/userfaultfd.h).
const (
	eventFault  = 0x12
	eventRemove = 0x15
	messageSize = 32
	ioctlCopy   = 0xc028aa03
	ioctlZero   = 0xc020aa04
)

// Memory is what a saved machine's memory held.
type Memory struct {
	data []byte

	mu  sync.Mutex
	hot []uint64 // bits: pages that machines needed at their start
}

// Open maps a memory file that nobody changes any more.
func Open(f *os.File) (*Memory, error) {
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("memory of a machine: %w", err)
	}
	size := st.Size()
	if size <= 0 || size%Page != 0 || size > 1<<40 {
		return nil, fmt.Errorf("memory of a machine: %d octets: %w", size, sandbox.ErrInvalid)
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("memory of a machine: map: %w", err)
	}
	return &Memory{data: data, hot: make([]uint64, (size/Page+63)/64)}, nil
}

// Close unmaps it. No Serve may be under way.
func (m *Memory) Close() error { return unix.Munmap(m.data) }

// Region of a machine's memory, in the monitor's words. One field's name is wrong there: it is of octets as the other.
type Region struct {
	Base     uint64 `json:"base_host_virt_addr"`
	Size     uint64 `json:"size"`
	Offset   uint64 `json:"offset"`
	PageSize uint64 `json:"page_size"`
	PageKiB  uint64 `json:"page_size_kib"`
}

// Stats of a machine's faults.
type Stats struct {
	Faults  int64 // pages that it waited for
	Ahead   int64 // pages that it got before it asked
	Removed int64 // pages that it gave back
}

// Serve answers for a machine until its monitor, which holds the other end of the connection, is gone or the context ends. An error leaves a
// machine that stands still for ever: its monitor should be ended.
func (m *Memory) Serve(ctx context.Context, conn *net.UnixConn) (Stats, error) {
	conn.SetReadDeadline(time.Now().Add(HandshakeBound))
	regions, fd, err := handshake(conn)
	if err != nil {
		return Stats{}, fmt.Errorf("memory of a machine: %w", err)
	}
	conn.SetReadDeadline(time.Time{})
	s := &server{m: m, f: os.NewFile(uintptr(fd), "userfaultfd"), regions: regions, gone: make([]uint64, len(m.hot)), until: time.Now().Add(learning)}
	defer s.f.Close()
	if err := m.check(regions); err != nil {
		return s.stats, fmt.Errorf("memory of a machine: %w", err)
	}
	over := make(chan struct{})
	go func() {
		// The monitor says nothing more: what comes is its end.
		conn.Read(make([]byte, 1))
		close(over)
		s.f.SetReadDeadline(time.Unix(1, 0))
	}()
	defer func() { conn.Close(); <-over }()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err = s.ahead(); err == nil {
		err = s.answer()
	}
	select {
	case <-over:
		return s.stats, ctx.Err()
	default:
		return s.stats, fmt.Errorf("memory of a machine: %w", err)
	}
}

// handshake takes the monitor's word and its descriptor, which come in one message as a rule.
func handshake(conn *net.UnixConn) (regions []Region, fd int, err error) {
	fd = -1
	defer func() {
		if err != nil && fd >= 0 {
			unix.Close(fd)
		}
	}()
	var text []byte
	part, oob := make([]byte, 16<<10), make([]byte, unix.CmsgSpace(4*4))
	for {
		n, on, flags, _, err := conn.ReadMsgUnix(part, oob)
		list, e := rights(oob[:on])
		for _, d := range list {
			if fd >= 0 {
				unix.Close(d)
				e = errors.Join(e, fmt.Errorf("more than one descriptor: %w", sandbox.ErrInvalid))
				continue
			}
			fd = d
		}
		switch {
		case errors.Is(err, io.EOF) || err == nil && n == 0:
			return nil, fd, fmt.Errorf("the monitor left before its word: %w", sandbox.ErrLost)
		case err != nil || e != nil:
			return nil, fd, errors.Join(err, e)
		case flags&unix.MSG_CTRUNC != 0 || len(text)+n > maxHandshake:
			return nil, fd, fmt.Errorf("the monitor's word is too long: %w", sandbox.ErrInvalid)
		}
		text = append(text, part[:n]...)
		if fd < 0 || json.Unmarshal(text, &regions) != nil {
			continue
		}
		break
	}
	at, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil || !strings.Contains(at, "[userfaultfd]") {
		return nil, fd, fmt.Errorf("the monitor's descriptor is %q, no userfaultfd (%v): %w", at, err, sandbox.ErrInvalid)
	}
	return regions, fd, unix.SetNonblock(fd, true)
}

func rights(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	for i := range msgs {
		list, e := unix.ParseUnixRights(&msgs[i])
		err = errors.Join(err, e)
		for _, d := range list {
			unix.CloseOnExec(d)
			fds = append(fds, d)
		}
	}
	return fds, err
}

// check holds what a monitor says of its memory against what there is.
func (m *Memory) check(regions []Region) error {
	if len(regions) == 0 || len(regions) > maxRegions {
		return fmt.Errorf("%d regions: 1 to %d: %w", len(regions), maxRegions, sandbox.ErrInvalid)
	}
	all := uint64(len(m.data))
	for _, r := range regions {
		switch {
		case r.PageSize != 0 && r.PageSize != Page:
			return fmt.Errorf("pages of %d octets: %w", r.PageSize, sandbox.ErrUnsupported)
		case r.Base%Page != 0 || r.Size%Page != 0 || r.Offset%Page != 0 || r.Size == 0 || r.Base+r.Size < r.Base:
			return fmt.Errorf("region of %d octets at %#x: %w", r.Size, r.Base, sandbox.ErrInvalid)
		case r.Offset > all || r.Size > all-r.Offset:
			return fmt.Errorf("region of %d octets from %d on of %d: %w", r.Size, r.Offset, all, sandbox.ErrInvalid)
		}
	}
	return nil
}

// server is one machine's.
type server struct {
	m       *Memory
	f       *os.File
	regions []Region
	gone    []uint64 // bits: pages that the machine gave back
	until   time.Time
	pending []uint64 // addresses of faults to be tried again
	stats   Stats
}

// errAgain says that the machine's memory is changing: events have to be read first.
var errAgain = errors.New("memory is changing")

// answer reads what happens and answers, until the descriptor or the machine is gone.
func (s *server) answer() error {
	buf := make([]byte, 64*messageSize)
	for {
		n, err := s.f.Read(buf)
		if err != nil {
			return fmt.Errorf("events: %w", err)
		}
		again := s.pending
		s.pending = nil
		for msg := buf[:n]; len(msg) >= messageSize; msg = msg[messageSize:] {
			switch msg[0] {
			case eventFault:
				again = append(again, *(*uint64)(unsafe.Pointer(&msg[16])))
			case eventRemove:
				s.remove(*(*uint64)(unsafe.Pointer(&msg[8])), *(*uint64)(unsafe.Pointer(&msg[16])))
			}
		}
		for _, at := range again {
			err := s.fault(at &^ (Page - 1))
			if errors.Is(err, errAgain) && len(s.pending) < maxPending {
				s.pending = append(s.pending, at)
			} else if err != nil {
				return err
			}
		}
	}
}

// page is a page's place in the memory.
func (s *server) page(addr uint64) (int, bool) {
	for _, r := range s.regions {
		if addr >= r.Base && addr-r.Base < r.Size {
			return int((r.Offset + addr - r.Base) / Page), true
		}
	}
	return 0, false
}

func (s *server) remove(from, to uint64) {
	for _, r := range s.regions {
		lo, hi := max(from, r.Base), min(to, r.Base+r.Size)
		for at := lo; at < hi; at += Page {
			p := (r.Offset + at - r.Base) / Page
			s.gone[p/64] |= 1 << (p % 64)
			s.stats.Removed++
		}
	}
}

func (s *server) fault(at uint64) error {
	p, ok := s.page(at)
	if !ok {
		return fmt.Errorf("a fault at %#x, which is in no region: %w", at, sandbox.ErrInvalid)
	}
	s.stats.Faults++
	if s.gone[p/64]&(1<<(p%64)) != 0 {
		return s.zero(at)
	}
	if time.Now().Before(s.until) {
		s.m.mu.Lock()
		s.m.hot[p/64] |= 1 << (p % 64)
		s.m.mu.Unlock()
	}
	_, err := s.copy(at, p, 1)
	return err
}

// copy gives n pages. It returns how many were given before the first that there was already.
func (s *server) copy(at uint64, page, n int) (given int, err error) {
	arg := struct {
		to, from, size, mode uint64
		copied               int64
	}{at, uint64(uintptr(unsafe.Pointer(&s.m.data[page*Page]))), uint64(n * Page), 0, 0}
	e := s.ioctl(ioctlCopy, unsafe.Pointer(&arg))
	if arg.copied > 0 {
		given = int(arg.copied / Page)
	}
	return given, e
}

func (s *server) zero(at uint64) error {
	arg := struct {
		at, size, mode uint64
		done           int64
	}{at, Page, 0, 0}
	return s.ioctl(ioctlZero, unsafe.Pointer(&arg))
}

// ioctl takes a page that is there for one that was given, and a machine that is gone for its end.
func (s *server) ioctl(call uintptr, arg unsafe.Pointer) error {
	c, err := s.f.SyscallConn()
	if err != nil {
		return err
	}
	var e unix.Errno
	if err := c.Control(func(fd uintptr) { _, _, e = unix.Syscall(unix.SYS_IOCTL, fd, call, uintptr(arg)) }); err != nil {
		return err
	}
	switch e {
	case 0, unix.EEXIST:
		return nil
	case unix.EAGAIN:
		return errAgain
	}
	return fmt.Errorf("give a page: %w", e)
}

// ahead gives what earlier machines of this memory needed at their start, in runs.
func (s *server) ahead() error {
	s.m.mu.Lock()
	hot := append([]uint64(nil), s.m.hot...)
	s.m.mu.Unlock()
	is := func(p uint64) bool { return hot[p/64]&(1<<(p%64)) != 0 }
	for _, r := range s.regions {
		first, end := r.Offset/Page, (r.Offset+r.Size)/Page
		for p := first; p < end; {
			if !is(p) {
				p++
				continue
			}
			q := p + 1
			for q < end && q-p < 512 && is(q) {
				q++
			}
			n, err := s.copy(r.Base+(p-first)*Page, int(p), int(q-p))
			s.stats.Ahead += int64(n)
			switch {
			case errors.Is(err, errAgain): // it comes when it is asked for
				p = q
			case err != nil:
				return err
			case n == 0: // this one is there
				p++
			default:
				p += uint64(n)
			}
		}
	}
	return nil
}
