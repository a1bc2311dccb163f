// Package filewire is the file protocol between the host and the file server inside a sandbox: frames, messages and the bounded
// queue of a call. docs/format/files.md states it; both ends use this package. It hides the octets; every decoder takes hostile
// input: a length, a count or a number out of its bounds is an error, never a panic and never an allocation of the size claimed.
//
// It imports nothing but the standard library's smallest packages, because the server inside a sandbox is made of it.
package filewire

import (
	"encoding/binary"
	"fmt"
	"io"
)

// Version of the protocol; the server says it in Hello.
const Version = 1

const (
	HeaderSize = 16       // octets of a frame's header
	MaxData    = 64 << 10 // octets of data in one frame
	MaxBody    = 80 << 10 // octets of any frame's body
	// Window is how much of one call may be under way in one direction before the receiver grants more. A frame costs its body
	// and its header, so that many small frames are bounded too.
	Window = 256 << 10
	// MaxCalls is how many calls may run at once on a connection.
	MaxCalls = 32
	// MaxPath bounds a path in a request (the kernel's own limit), MaxRelative one in an answer, which may lie deeper.
	MaxPath     = 4095
	MaxRelative = 32 << 10
	// MaxSkipped bounds the list of what was left out; the total is told beside it.
	MaxSkipped = 500
	// MaxDepth is how many folders deep a walk goes; what lies deeper is told.
	MaxDepth = 500
)

// Type of a frame. The first group goes from host to guest, the second from guest to host.
type Type uint8

const (
	Call   Type = 1 // a Request
	Data   Type = 2 // octets of the call's body
	End    Type = 3 // the body ends; flag BrokenOff: not where it should
	Credit Type = 4 // u32: so much more may be sent to the host
	Cancel Type = 5 // the host wants no more of the call; the Result still follows

	Hello       Type = 0x81 // u32 version, u32 features, u32 uid, u32 gid
	GuestData   Type = 0x82 // octets
	GuestItem   Type = 0x83 // an Item
	GuestCredit Type = 0x84 // u32: so much more may be sent to the guest
	GuestResult Type = 0x85 // a Result; the last frame of a call
)

// BrokenOff is the flag of an End whose body did not come to its end.
const BrokenOff = 1

// Header of a frame.
type Header struct {
	Length uint32
	Type   Type
	Flags  uint16
	ID     uint64
}

// Cost is what a frame with n octets of body takes from the window.
func Cost(n int) int { return n + HeaderSize }

// Put writes the header into the first HeaderSize octets of b.
func (h Header) Put(b []byte) {
	binary.LittleEndian.PutUint32(b, h.Length)
	b[4], b[5] = byte(h.Type), 0
	binary.LittleEndian.PutUint16(b[6:], h.Flags)
	binary.LittleEndian.PutUint64(b[8:], h.ID)
}

// Frame returns a whole frame.
func Frame(t Type, flags uint16, id uint64, body []byte) []byte {
	b := make([]byte, HeaderSize, HeaderSize+len(body))
	Header{Length: uint32(len(body)), Type: t, Flags: flags, ID: id}.Put(b)
	return append(b, body...)
}

// ReadFrame reads one frame; the body lies in scratch, which has MaxBody octets and is used again by the next call.
func ReadFrame(r io.Reader, scratch []byte) (Header, []byte, error) {
	var b [HeaderSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return Header{}, nil, err
	}
	h := Header{
		Length: binary.LittleEndian.Uint32(b[:]),
		Type:   Type(b[4]),
		Flags:  binary.LittleEndian.Uint16(b[6:]),
		ID:     binary.LittleEndian.Uint64(b[8:]),
	}
	if h.Length > MaxBody || int(h.Length) > len(scratch) {
		return h, nil, fmt.Errorf("frame of type %#x claims %d octets, at most %d", h.Type, h.Length, MaxBody)
	}
	if b[5] != 0 {
		return h, nil, fmt.Errorf("frame of type %#x announces %d descriptors; files carry none", h.Type, b[5])
	}
	body := scratch[:h.Length]
	if _, err := io.ReadFull(r, body); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return h, nil, err
	}
	return h, body, nil
}

// U32 is a body of one number.
func U32(v uint32) []byte { return binary.LittleEndian.AppendUint32(nil, v) }

// ParseU32 reads such a body.
func ParseU32(b []byte) (uint32, error) {
	if len(b) != 4 {
		return 0, fmt.Errorf("body of %d octets, want 4", len(b))
	}
	return binary.LittleEndian.Uint32(b), nil
}
