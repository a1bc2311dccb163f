package keeper

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"os"
	"sync"
	"syscall"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

const (
	streamHeld = 1 << 20  // octets held for the host before the command has to wait
	segmentMax = 64 << 10 // octets sent at once
	lateMax    = 1 << 20  // octets kept of what comes after the end
)

// segment is a run of octets that waits for the host's word.
type segment struct {
	offset int64
	data   []byte
	late   bool
	acked  bool
}

// stream is one output of a command. Octets below cap-tail go out as they come; of the rest the last tail octets are kept in a
// ring and go out at the end, so that up to cap nothing is cut. What comes after the end goes on, flagged late, with a bound of its own.
type stream struct {
	cmd  *command
	name sandbox.StreamName
	file *os.File // nil when nothing is read any more
	raw  syscall.RawConn

	mu       sync.Mutex
	total    int64 // octets read that belong to the command
	headMax  int64
	tailMax  int64
	tail     []byte // ring of the last octets above headMax
	tailPos  int    // where the next octet of the full ring goes
	sum      hash.Hash
	end      int64 // octets that belong to the command, once known; -1 before
	late     int64 // octets read after the end
	lateKept int64
	eof      bool
	finished bool   // total has reached end
	digest   string // of all octets up to end

	queue  []*segment // not acknowledged, in order
	held   int64      // octets in queue
	sent   int        // segments of queue that this connection got
	room   chan struct{}
	tty    bool
	closed bool
}

func newStream(c *command, name sandbox.StreamName, f *os.File, limit int64) (*stream, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	t := sandbox.Tail(limit)
	return &stream{cmd: c, name: name, file: f, raw: raw, headMax: limit - t, tailMax: t, sum: sha256.New(), end: -1, room: make(chan struct{}, 1)}, nil
}

// buffers lend space for one read; an idle stream has none.
var buffers = sync.Pool{New: func() any { return new([segmentMax]byte) }}

// read takes octets until the end of the file or close. It runs on a goroutine of its own, parked in the poller while idle.
func (s *stream) read() {
	for {
		more := false
		err := s.raw.Read(func(fd uintptr) bool {
			s.mu.Lock()
			if s.held >= streamHeld && !s.closed {
				s.mu.Unlock()
				more = true
				return true // wait for room below, outside the poller
			}
			n, err := s.take(int(fd))
			done := s.finishLocked()
			s.mu.Unlock()
			if n > 0 || done {
				s.cmd.streamChanged(done)
			}
			if err == unix.EAGAIN {
				return false
			}
			more = err == nil && n > 0
			return true
		})
		if err != nil || !more {
			break
		}
		s.mu.Lock()
		full := s.held >= streamHeld && !s.closed
		s.mu.Unlock()
		if full {
			<-s.room
		}
	}
	s.mu.Lock()
	s.eof = true
	if s.end < 0 || s.end > s.total {
		s.end = s.total // nothing more can come
	}
	done := s.finishLocked()
	f := s.file
	s.file = nil
	s.mu.Unlock()
	f.Close()
	s.cmd.streamEOF(s, done)
}

// take reads once and accounts for it. The caller holds mu.
func (s *stream) take(fd int) (int, error) {
	buf := buffers.Get().(*[segmentMax]byte)
	defer buffers.Put(buf)
	p := buf[:]
	if s.end >= 0 && s.total < s.end {
		p = p[:min(int64(len(p)), s.end-s.total)] // octets after the end are another matter
	}
	var n int
	var err error
	for last := !s.tty; ; {
		n, err = unix.Read(fd, p)
		if err == unix.EIO && !last {
			last = true // it looks for octets before it looks whether the other side is closed: some may have come in between
			continue
		}
		if err != unix.EINTR {
			break
		}
	}
	if err == unix.EIO {
		return 0, nil // a terminal nobody has open any more
	}
	if err != nil || n <= 0 {
		return 0, err
	}
	s.account(p[:n])
	return n, nil
}

func (s *stream) account(p []byte) {
	if s.end >= 0 && s.total >= s.end {
		off := s.end + s.late
		s.late += int64(len(p))
		keep := min(int64(len(p)), lateMax-s.lateKept)
		s.lateKept += max(0, keep)
		if keep > 0 {
			s.push(off, p[:keep], true)
		}
		return
	}
	s.sum.Write(p)
	off := s.total
	s.total += int64(len(p))
	if off < s.headMax {
		n := min(int64(len(p)), s.headMax-off)
		s.push(off, p[:n], false)
		p = p[n:]
	}
	if int64(len(p)) > s.tailMax {
		p = p[int64(len(p))-s.tailMax:]
	}
	if grow := min(int(s.tailMax)-len(s.tail), len(p)); grow > 0 {
		s.tail = append(s.tail, p[:grow]...)
		p = p[grow:]
	}
	for len(p) > 0 {
		n := copy(s.tail[s.tailPos:], p)
		p = p[n:]
		s.tailPos = (s.tailPos + n) % len(s.tail)
	}
}

// push queues octets for the host. The last segment grows as long as it was not sent.
func (s *stream) push(off int64, p []byte, late bool) {
	s.held += int64(len(p))
	if n := len(s.queue); n > s.sent {
		last := s.queue[n-1]
		if last.late == late && last.offset+int64(len(last.data)) == off && len(last.data)+len(p) <= segmentMax {
			last.data = append(last.data, p...)
			return
		}
	}
	s.queue = append(s.queue, &segment{offset: off, data: append([]byte(nil), p...), late: late})
}

// finishLocked closes the account once all octets that belong to the command were read; it reports whether it did so now.
func (s *stream) finishLocked() bool {
	if s.finished || s.end < 0 || s.total < s.end {
		return false
	}
	s.finished = true
	s.digest = hex.EncodeToString(s.sum.Sum(nil))
	s.sum = nil
	if len(s.tail) > 0 {
		t := append(append([]byte(nil), s.tail[s.tailPos:]...), s.tail[:s.tailPos]...)
		s.push(s.total-int64(len(t)), t, false)
	}
	s.tail = nil
	return true
}

// fixEnd says that what is in the pipe now is the last that belongs to the command. It reports whether the account is closed.
func (s *stream) fixEnd() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end >= 0 {
		return false
	}
	if s.file != nil && s.tty {
		s.raw.Control(func(fd uintptr) { s.drain(int(fd)) })
	}
	s.end = s.total
	if s.file != nil && !s.tty {
		s.raw.Control(func(fd uintptr) {
			if n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil && n > 0 {
				s.end += int64(n)
			}
		})
	}
	return s.finishLocked()
}

// drain takes what a terminal holds: the kernel tells the length of a part of that only. The caller holds mu.
func (s *stream) drain(fd int) {
	for from := s.total; s.total-from < terminalHeld; {
		if n, err := s.take(fd); err != nil || n <= 0 {
			return
		}
	}
}

// terminalHeld is more than a terminal holds in octets: 8 KiB, and 4 KiB that can be read.
const terminalHeld = 16 << 10

// next returns the next segment to send, or nil. What is late waits until the end was sent: before that nobody could tell whose it is.
func (s *stream) next(ended bool) *segment {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent >= len(s.queue) || s.queue[s.sent].late && !ended {
		return nil
	}
	g := s.queue[s.sent]
	s.sent++
	return g
}

func (s *stream) unsent() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent < len(s.queue)
}

// ack frees what the host has taken.
func (s *stream) ack(g *segment) {
	s.mu.Lock()
	g.acked = true
	for len(s.queue) > 0 && s.queue[0].acked {
		s.held -= int64(len(s.queue[0].data))
		s.queue = s.queue[1:]
		s.sent--
	}
	if len(s.queue) == 0 {
		s.queue = nil
	}
	s.mu.Unlock()
	select {
	case s.room <- struct{}{}:
	default:
	}
}

// rewind makes everything that was not acknowledged unsent, for a new connection.
func (s *stream) rewind() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = 0
}

// idle reports whether everything is read and acknowledged.
func (s *stream) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.eof && len(s.queue) == 0
}

// ackedTo is the offset up to which the host has all octets.
func (s *stream) ackedTo() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) > 0 {
		return s.queue[0].offset
	}
	return min(s.total, s.headMax)
}

// close ends reading; what is queued stays.
func (s *stream) close() {
	s.mu.Lock()
	s.closed = true
	f := s.file
	s.mu.Unlock()
	if f != nil {
		f.Close()
	}
	select {
	case s.room <- struct{}{}:
	default:
	}
}

func (s *stream) result() (sandbox.StreamEnd, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := sandbox.StreamEnd{Total: s.total, SHA256: s.digest}
	e.Head = min(s.total, s.headMax)
	e.Tail = min(s.tailMax, s.total-e.Head)
	e.Truncated = e.Head+e.Tail < e.Total
	return e, !s.eof
}
