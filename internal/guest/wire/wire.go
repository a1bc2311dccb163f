// Package wire is the guest protocol (docs/format/guest.md) as Go values: frames, their bodies, and a connection that
// carries frames and descriptors. Both ends of the protocol that are written in Go use it; process 1 of a container
// (internal/keeper/init) speaks the same octets from C.
//
// It hides the octet layout, the pairing of descriptors with frames, and the bounds. Everything that a guest sends is
// hostile: decoders check every length and count against what is there, never allocate more than they were given, and
// refuse trailing octets. It uses the standard library and x/sys only, because the keeper imports it.
//
// Lock order: a Conn has one lock for writing; reading is for one goroutine at a time and takes no lock.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Version is the protocol's number in BIRTH and HELLO.
const Version = 1

// Bounds of a frame.
const (
	HeaderSize  = 16
	MaxToGuest  = 4 << 20  // octets of a body from the host
	MaxToHost   = 64 << 10 // octets of a body from the guest
	MaxFDs      = 16       // descriptors of one frame
	maxQueuedFD = 64       // descriptors that came before their frame was complete; more ends the connection
)

// Type is a frame's type.
type Type uint8

// Frame types. Those with the high bit come from the guest.
const (
	TBirth  Type = 1  // Birth
	TStart  Type = 2  // Start
	TSignal Type = 3  // Signal
	TPing   Type = 4  // no body
	TSpawn  Type = 5  // to a spawner: clone a process 1; two descriptors, its stream and its group; no body
	TGroup  Type = 6  // Group
	TResize Type = 7  // Resize
	THold   Type = 16 // to a holder: keep the frame's descriptors; no body
	TDrop   Type = 17 // to a holder: Drop

	TPrepare Type = 9 // Prepare, before BIRTH

	THello    Type = 0x81 // Hello
	TStarted  Type = 0x82 // Started
	TFailed   Type = 0x83 // Failed
	TExited   Type = 0x84 // Exited
	TPong     Type = 0x85 // no body
	TListener Type = 0x86 // no body; one descriptor: a command's seccomp listener, before its STARTED
	TSpawned  Type = 0x87 // from a spawner: i32, the process's number or the negative error
	TGrouped  Type = 0x88 // u32: the answer to Group, with its id
	THeld     Type = 0x90 // from a holder: Held
)

// String returns the type's name in the format's text.
func (t Type) String() string {
	switch t {
	case TBirth:
		return "BIRTH"
	case TStart:
		return "START"
	case TSignal:
		return "SIGNAL"
	case TPing:
		return "PING"
	case TSpawn:
		return "SPAWN"
	case TPrepare:
		return "PREPARE"
	case TSpawned:
		return "SPAWNED"
	case TGroup:
		return "GROUP"
	case TGrouped:
		return "GROUPED"
	case TResize:
		return "RESIZE"
	case THold:
		return "HOLD"
	case TDrop:
		return "DROP"
	case THello:
		return "HELLO"
	case TStarted:
		return "STARTED"
	case TFailed:
		return "FAILED"
	case TExited:
		return "EXITED"
	case TPong:
		return "PONG"
	case TListener:
		return "LISTENER"
	case THeld:
		return "HELD"
	}
	return fmt.Sprintf("type %#x", uint8(t))
}

// ErrFormat is wrapped by every error about octets that are not the protocol.
var ErrFormat = errors.New("guest protocol")

// Frame is one frame. A Frame that was read owns its descriptors: the receiver closes them (CloseFDs).
type Frame struct {
	Type  Type
	Flags uint16
	ID    uint64
	Body  []byte
	FDs   []int
}

// CloseFDs closes the frame's descriptors.
func (f *Frame) CloseFDs() {
	for _, fd := range f.FDs {
		closeFD(fd)
	}
	f.FDs = nil
}

// AppendHeader appends the frame's header.
func (f *Frame) AppendHeader(b []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(f.Body)))
	b = append(b, byte(f.Type), byte(len(f.FDs)))
	b = binary.LittleEndian.AppendUint16(b, f.Flags)
	return binary.LittleEndian.AppendUint64(b, f.ID)
}

// header is a decoded header.
type header struct {
	length uint32
	typ    Type
	nfds   int
	flags  uint16
	id     uint64
}

func parseHeader(b []byte, max int) (header, error) {
	h := header{
		length: binary.LittleEndian.Uint32(b), typ: Type(b[4]), nfds: int(b[5]),
		flags: binary.LittleEndian.Uint16(b[6:]), id: binary.LittleEndian.Uint64(b[8:]),
	}
	if int64(h.length) > int64(max) {
		return h, fmt.Errorf("%w: %s of %d octets, at most %d", ErrFormat, h.typ, h.length, max)
	}
	if h.nfds > MaxFDs {
		return h, fmt.Errorf("%w: %s with %d descriptors, at most %d", ErrFormat, h.typ, h.nfds, MaxFDs)
	}
	return h, nil
}

// reader decodes a body; the first error stays.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(what string) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s", ErrFormat, what)
	}
}

func (r *reader) take(n int, what string) []byte {
	if r.err != nil {
		return nil
	}
	if n > len(r.b) {
		r.fail("short " + what)
		return nil
	}
	v := r.b[:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) u16(what string) uint16 {
	if v := r.take(2, what); v != nil {
		return binary.LittleEndian.Uint16(v)
	}
	return 0
}

func (r *reader) u32(what string) uint32 {
	if v := r.take(4, what); v != nil {
		return binary.LittleEndian.Uint32(v)
	}
	return 0
}

func (r *reader) u64(what string) uint64 {
	if v := r.take(8, what); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

// blob is a str that may hold NUL.
func (r *reader) blob(what string) []byte {
	n := r.u32(what)
	if int64(n) > int64(len(r.b)) {
		r.fail("short " + what)
		return nil
	}
	return r.take(int(n), what)
}

// str is a str without NUL; NUL separates the fields of a birth op, which uses blob.
func (r *reader) str(what string) string {
	v := r.blob(what)
	for _, c := range v {
		if c == 0 {
			r.fail("NUL in " + what)
			return ""
		}
	}
	return string(v)
}

// count reads the number of elements that take at least size octets each, so that a count never makes us allocate more
// than the body is long.
func (r *reader) count(size int, what string) int {
	n := r.u32(what)
	if int64(n)*int64(size) > int64(len(r.b)) {
		r.fail("count of " + what)
		return 0
	}
	return int(n)
}

func (r *reader) list(what string) []string {
	n := r.count(4, what)
	if r.err != nil || n == 0 {
		return nil
	}
	v := make([]string, 0, n)
	for range n {
		v = append(v, r.str(what))
	}
	return v
}

// end refuses trailing octets.
func (r *reader) end() error {
	if r.err == nil && len(r.b) != 0 {
		r.fail("octets after the body")
	}
	return r.err
}

func appendU32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func appendU64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func appendStr[T string | []byte](b []byte, s T) []byte {
	return append(appendU32(b, uint32(len(s))), s...)
}

func appendList(b []byte, l []string) []byte {
	b = appendU32(b, uint32(len(l)))
	for _, s := range l {
		b = appendStr(b, s)
	}
	return b
}
