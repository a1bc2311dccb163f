// Package mux carries many streams over one octet stream between a host and the process 1 of a virtual machine: a serial port of virtio or
// a connection of vsock. docs/format/vm.md is its form.
//
// It hides framing, credit and the finding of each other after one side went away in the middle of a frame: a serial port has no
// connections, so the host begins with a HELLO that bears a number drawn for it, and drops what comes until that number comes back. The
// host opens streams; the guest answers, and opens only streams that carry a descriptor, which the host asked for.
//
// Invariants: what the far side sends is hostile and bounded (a breach ends the session); a stream that nobody reads holds at most Window
// octets and stops no other; a frame is written whole. Lock order: Session.mu before Stream.mu; neither is held during I/O.
package mux

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// Bounds of the form.
const (
	Window     = 256 << 10 // octets of a stream that may be under way
	MaxFrame   = 32 << 10  // octets of a body: what a virtio port takes at once
	MaxStreams = 1024
	MaxOpen    = 16 << 10 // octets of an OPEN's body

	headerSize = 12
	mark       = 0xd5 // second octet of each header: finds a header again after a cut
	guestBit   = 1 << 31
)

// Types of frames.
const (
	tHello  = 1
	tOpen   = 2
	tAccept = 3
	tData   = 4
	tEnd    = 5 // the sender writes no more
	tReset  = 6 // the stream is over; the body says why
	tWindow = 7 // u32 octets were read
)

var magic = [16]byte{'d', 's', 'e', 'c', 0xff, 0x00, 0xd5, 'm', 'u', 'x', 0x0d, 0x0a, 0x1a, 0x0a, 0, 1}

// Errors of sessions and streams.
var (
	ErrEnded   = errors.New("mux: session has ended")
	ErrFormat  = errors.New("mux: malformed frame")
	ErrRefused = errors.New("mux: refused")
)

// Session is one side's view of a conversation.
type Session struct {
	rw     io.ReadWriter
	host   bool
	nonce  [16]byte
	accept func(*Stream, []byte)
	done   chan struct{}

	wmu sync.Mutex
	out []byte

	mu      sync.Mutex
	streams map[uint32]*Stream
	next    uint32
	err     error
}

// Stream is an octet stream in both directions with half-close.
type Stream struct {
	s        *Session
	id       uint32
	accepted chan struct{} // of those we opened

	mu      sync.Mutex
	changed sync.Cond
	in      []byte // came and not read
	unread  int    // octets read and not yet credited
	eof     bool   // the far side writes no more
	ended   bool   // we write no more
	credit  int
	err     error
}

// Host finds the guest at the far end and returns a session. It closes rw when ctx ends first.
func Host(ctx context.Context, rw io.ReadWriteCloser) (*Session, error) {
	s := newSession(rw, true, nil)
	rand.Read(s.nonce[:])
	stop := context.AfterFunc(ctx, func() { rw.Close() })
	defer stop()
	found := make(chan struct{})
	var asking sync.WaitGroup
	asking.Go(func() { s.ask(ctx, found) })
	err := s.find()
	close(found)
	asking.Wait()
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("mux: find the guest: %w", err)
	}
	go s.read(nil)
	return s, nil
}

// ask sends HELLO until it is answered. A guest that still waits for the rest of a frame that was cut swallows it, so what follows is
// longer than any frame.
func (s *Session) ask(ctx context.Context, found chan struct{}) {
	hello := append(magic[:len(magic):len(magic)], s.nonce[:]...)
	for wait := 2 * time.Second; ; wait = min(2*wait, 30*time.Second) {
		if s.write(tHello, 0, hello) != nil {
			return
		}
		select {
		case <-found:
			return
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		if s.writeRaw(make([]byte, MaxFrame+headerSize)) != nil {
			return
		}
	}
}

// find drops what comes until the answer to our HELLO.
func (s *Session) find() error {
	want := append(magic[:len(magic):len(magic)], s.nonce[:]...)
	var have []byte
	buf := make([]byte, 4096)
	for {
		// One octet more would belong to the first frame: read no further than the answer can end.
		n, err := s.rw.Read(buf[:len(want)-overlap(have, want)])
		have = append(have, buf[:n]...)
		if bytes.HasSuffix(have, want) {
			return nil
		}
		if len(have) > 64<<10 {
			have = append(have[:0], have[len(have)-len(want):]...)
		}
		if err != nil {
			return err
		}
		if n == 0 {
			time.Sleep(time.Millisecond)
		}
	}
}

// overlap is how long an end of have is a begin of want.
func overlap(have, want []byte) int {
	for n := min(len(have), len(want)-1); n > 0; n-- {
		if bytes.HasSuffix(have, want[:n]) {
			return n
		}
	}
	return 0
}

// Serve is the guest's side: it answers each HELLO with a new session, ending the one before, until rw fails for good. A read that gives
// nothing is a port whose host is away: idle is called then and waits a moment. accept gets each stream that the host opens, on a
// goroutine of its own.
func Serve(rw io.ReadWriter, accept func(*Stream, []byte), idle func() error) error {
	r := &resync{r: rw, idle: idle}
	var s *Session
	end := func() {
		if s != nil {
			s.fail(ErrEnded)
			s = nil
		}
	}
	defer end()
	for {
		h, body, err := r.frame(MaxFrame)
		switch {
		case errors.Is(err, errAway):
			end()
			continue
		case err != nil:
			return err
		}
		if h.typ == tHello {
			if len(body) != 32 || !bytes.Equal(body[:16], magic[:]) {
				continue
			}
			if s == nil || !bytes.Equal(s.nonce[:], body[16:]) {
				end()
				s = newSession(rw, false, accept)
				copy(s.nonce[:], body[16:])
			}
			if s.write(tHello, 0, body) != nil {
				end()
			}
			continue
		}
		if s == nil {
			continue
		}
		if err := s.handle(h, body); err != nil {
			end()
		}
	}
}

func newSession(rw io.ReadWriter, host bool, accept func(*Stream, []byte)) *Session {
	s := &Session{rw: rw, host: host, accept: accept, done: make(chan struct{}), streams: map[uint32]*Stream{}, next: 1}
	if !host {
		s.next = guestBit
	}
	return s
}

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err is why the session ended.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close ends the session; it closes what carries it where that can be closed.
func (s *Session) Close() error {
	s.fail(ErrEnded)
	return nil
}

func (s *Session) fail(err error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err = err
	streams := s.streams
	s.streams = nil
	s.mu.Unlock()
	if c, ok := s.rw.(io.Closer); ok && s.host {
		c.Close()
	}
	for _, st := range streams {
		st.fail(fmt.Errorf("%w: %w", ErrEnded, err))
	}
	close(s.done)
}

// header of a frame.
type header struct {
	typ byte
	id  uint32
	n   int
}

func parse(b []byte) (h header, ok bool) {
	h = header{b[0], binary.LittleEndian.Uint32(b[4:]), int(binary.LittleEndian.Uint32(b[8:]))}
	return h, b[1] == mark && b[2] == 0 && b[3] == 0 && h.typ >= tHello && h.typ <= tWindow && h.n <= MaxFrame
}

// read is the host's loop: a malformed frame ends it.
func (s *Session) read(_ any) {
	var hb [headerSize]byte
	body := make([]byte, MaxFrame)
	for {
		if _, err := io.ReadFull(s.rw, hb[:]); err != nil {
			s.fail(err)
			return
		}
		h, ok := parse(hb[:])
		if !ok {
			s.fail(ErrFormat)
			return
		}
		if _, err := io.ReadFull(s.rw, body[:h.n]); err != nil {
			s.fail(err)
			return
		}
		if h.typ == tHello {
			continue // an answer to one of several that were asked
		}
		if err := s.handle(h, body[:h.n]); err != nil {
			s.fail(err)
			return
		}
	}
}

// handle takes one frame; an error is a breach.
func (s *Session) handle(h header, body []byte) error {
	if h.typ == tOpen {
		return s.opened(h.id, body)
	}
	s.mu.Lock()
	st := s.streams[h.id]
	s.mu.Unlock()
	if st == nil {
		return nil // of a stream that is over here
	}
	return st.handle(h.typ, body)
}

func (s *Session) opened(id uint32, body []byte) error {
	if s.host == (id&guestBit == 0) || len(body) > MaxOpen {
		return fmt.Errorf("%w: open of stream %d", ErrFormat, id)
	}
	st := s.stream(id)
	s.mu.Lock()
	switch {
	case s.err != nil:
		s.mu.Unlock()
		return nil
	case s.streams[id] != nil || len(s.streams) >= MaxStreams:
		s.mu.Unlock()
		return fmt.Errorf("%w: open of stream %d, %d are open", ErrFormat, id, len(s.streams))
	}
	s.streams[id] = st
	s.mu.Unlock()
	if s.host {
		return nil // it waits to be taken by its number
	}
	b := bytes.Clone(body)
	go s.accept(st, b)
	return nil
}

func (s *Session) stream(id uint32) *Stream {
	st := &Stream{s: s, id: id, credit: Window, accepted: make(chan struct{})}
	st.changed.L = &st.mu
	return st
}

func (s *Session) add() (*Stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return nil, fmt.Errorf("%w: %w", ErrEnded, s.err)
	}
	if len(s.streams) >= MaxStreams {
		return nil, fmt.Errorf("mux: %d streams are open", len(s.streams))
	}
	for s.streams[s.next] != nil || s.next&^guestBit == 0 {
		s.next = s.next&guestBit | (s.next+1)&^guestBit
	}
	st := s.stream(s.next)
	s.streams[st.id] = st
	s.next = s.next&guestBit | (s.next+1)&^guestBit
	return st, nil
}

// Open opens a stream and waits until the guest took or refused it. ErrRefused then has the guest's reason.
func (s *Session) Open(ctx context.Context, body []byte) (*Stream, error) {
	if len(body) > MaxOpen {
		return nil, fmt.Errorf("mux: open with %d octets, at most %d", len(body), MaxOpen)
	}
	st, err := s.add()
	if err != nil {
		return nil, err
	}
	if err := s.write(tOpen, st.id, body); err != nil {
		s.fail(err)
		return nil, err
	}
	select {
	case <-st.accepted:
		st.mu.Lock()
		err := st.err
		st.mu.Unlock()
		if err != nil {
			return nil, err
		}
		return st, nil
	case <-s.done:
		return nil, fmt.Errorf("%w: %w", ErrEnded, s.Err())
	case <-ctx.Done():
		st.Reset("given up")
		return nil, ctx.Err()
	}
}

// Offer opens a stream from the guest's side; the host takes it by its number.
func (s *Session) Offer() (*Stream, error) {
	st, err := s.add()
	if err != nil {
		return nil, err
	}
	if err := s.write(tOpen, st.id, nil); err != nil {
		return nil, err
	}
	return st, nil
}

// Take returns a stream that the guest offered.
func (s *Session) Take(id uint32) (*Stream, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.streams[id]; st != nil && id&guestBit != 0 {
		return st, nil
	}
	return nil, fmt.Errorf("%w: stream %d was not offered", ErrFormat, id)
}

func (s *Session) write(typ byte, id uint32, body []byte) error {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	b := append(s.out[:0], typ, mark, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, id)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
	s.out = append(b, body...)
	_, err := s.rw.Write(s.out)
	return err
}

func (s *Session) writeRaw(b []byte) error {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	_, err := s.rw.Write(b)
	return err
}

// Session is what the stream belongs to.
func (st *Stream) Session() *Session { return st.s }

// ID is the stream's number.
func (st *Stream) ID() uint32 { return st.id }

// Accept tells the host that the stream is taken.
func (st *Stream) Accept() error { return st.s.write(tAccept, st.id, nil) }

func (st *Stream) handle(typ byte, body []byte) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	switch typ {
	case tAccept:
		select {
		case <-st.accepted:
			return fmt.Errorf("%w: stream %d accepted twice", ErrFormat, st.id)
		default:
			close(st.accepted)
		}
	case tData:
		if st.eof || len(st.in)+st.unread+len(body) > Window {
			return fmt.Errorf("%w: stream %d sends more than its window", ErrFormat, st.id)
		}
		st.in = append(st.in, body...)
	case tEnd:
		st.eof = true
		st.dropLocked()
	case tReset:
		if len(body) > 4096 {
			body = body[:4096]
		}
		st.failLocked(fmt.Errorf("%w: %s", ErrRefused, body))
		st.s.forget(st)
	case tWindow:
		if len(body) != 4 {
			return fmt.Errorf("%w: window of stream %d", ErrFormat, st.id)
		}
		n := binary.LittleEndian.Uint32(body)
		if n > Window || st.credit+int(n) > Window {
			return fmt.Errorf("%w: stream %d credits more than was sent", ErrFormat, st.id)
		}
		st.credit += int(n)
	}
	st.changed.Broadcast()
	return nil
}

func (st *Stream) fail(err error) {
	st.mu.Lock()
	st.failLocked(err)
	st.mu.Unlock()
}

func (st *Stream) failLocked(err error) {
	if st.err == nil {
		st.err = err
	}
	select {
	case <-st.accepted:
	default:
		close(st.accepted)
	}
	st.changed.Broadcast()
}

// dropLocked forgets a stream that both sides have ended.
func (st *Stream) dropLocked() {
	if st.eof && st.ended {
		st.s.forget(st)
	}
}

// forget is called under Stream.mu: the session's lock comes first, so it is taken on a goroutine of its own.
func (s *Session) forget(st *Stream) {
	go func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.streams[st.id] == st {
			delete(s.streams, st.id)
		}
	}()
}

// Read reads what came. io.EOF after the far side has ended its half.
func (st *Stream) Read(p []byte) (int, error) {
	st.mu.Lock()
	for len(st.in) == 0 && !st.eof && st.err == nil {
		st.changed.Wait()
	}
	if len(st.in) == 0 {
		err := st.err
		if st.eof {
			err = io.EOF
		}
		st.mu.Unlock()
		return 0, err
	}
	n := copy(p, st.in)
	st.in = st.in[n:]
	if len(st.in) == 0 {
		st.in = nil
	}
	st.unread += n
	give := 0
	if st.unread >= Window/4 && !st.eof {
		give, st.unread = st.unread, 0
	}
	st.mu.Unlock()
	if give > 0 {
		if err := st.s.write(tWindow, st.id, binary.LittleEndian.AppendUint32(nil, uint32(give))); err != nil {
			return n, nil // the next read tells
		}
	}
	return n, nil
}

// Write writes p, waiting for credit.
func (st *Stream) Write(p []byte) (done int, err error) {
	for len(p) > 0 {
		st.mu.Lock()
		for st.credit == 0 && st.err == nil && !st.ended {
			st.changed.Wait()
		}
		switch {
		case st.err != nil:
			err = st.err
		case st.ended:
			err = io.ErrClosedPipe
		}
		n := min(len(p), st.credit, MaxFrame)
		st.credit -= n
		st.mu.Unlock()
		if err != nil {
			return done, err
		}
		if err := st.s.write(tData, st.id, p[:n]); err != nil {
			return done, err
		}
		p, done = p[n:], done+n
	}
	return done, nil
}

// CloseWrite ends our half.
func (st *Stream) CloseWrite() error {
	st.mu.Lock()
	if st.ended || st.err != nil {
		st.mu.Unlock()
		return nil
	}
	st.ended = true
	st.changed.Broadcast()
	st.dropLocked()
	st.mu.Unlock()
	return st.s.write(tEnd, st.id, nil)
}

// Reset ends the stream in both directions with a reason for the far side.
func (st *Stream) Reset(why string) {
	st.mu.Lock()
	over := st.err != nil || st.eof && st.ended
	st.failLocked(io.ErrClosedPipe)
	st.mu.Unlock()
	st.s.forget(st)
	if !over {
		if len(why) > 4096 {
			why = why[:4096]
		}
		st.s.write(tReset, st.id, []byte(why))
	}
}

// Close ends the stream: what is not read is dropped.
func (st *Stream) Close() error {
	st.Reset("closed")
	return nil
}
