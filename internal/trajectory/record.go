package trajectory

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// ID names a trajectory: the rollout Key in a Job of a Project. The key is the idempotency key of the sandbox's create.
type ID struct {
	Project string `json:"project"`
	Job     string `json:"job"`
	Key     string `json:"key"`
}

func (id ID) String() string { return id.Project + " " + id.Job + " " + id.Key }

func (id ID) compare(o ID) int {
	if c := strings.Compare(id.Project, o.Project); c != 0 {
		return c
	}
	if c := strings.Compare(id.Job, o.Job); c != 0 {
		return c
	}
	return strings.Compare(id.Key, o.Key)
}

// Kind says what a record tells.
type Kind uint8

const (
	KindCreate       Kind = 1  // first record of a trajectory: the resolved Spec
	KindState        Kind = 2  // the sandbox paused, resumed, stopped or failed, with its cause
	KindStepStart    Kind = 3  // a step is about to run: its canonical request, and its input bytes
	KindOutput       Kind = 4  // octets of a stream of a command at their offset
	KindStepEnd      Kind = 5  // the Outcome of a step
	KindVoid         Kind = 6  // a started step that is proven never to have run
	KindSessionOpen  Kind = 7  // a session was asked for
	KindSessionClose Kind = 8  // a session is gone
	KindStdin        Kind = 9  // octets written to a command's stdin, at an offset
	KindSignal       Kind = 10 // a signal sent to a command
	KindResize       Kind = 11 // a terminal's new size
	KindEvent        Kind = 12 // something seen, such as a denial
	KindRedo         Kind = 13 // a step executed again by restore; refers to the original
	KindPolicy       Kind = 14 // a change of limits, TTL or network policy
	KindVerdict      Kind = 15 // what a grader says of the trajectory

	kindLast Kind = 15

	// Records of the log's own, never shown.
	kindBind   Kind = 28 // gives a trajectory number its ID and epoch; the first of each trajectory in each segment
	kindRemove Kind = 29 // the trajectory is removed
	kindRoll   Kind = 30 // the log goes on in the next segment
)

var kindNames = [...]string{"", "create", "state", "step-start", "step-output", "step-end", "void", "session-open", "session-close",
	"stdin", "signal", "resize", "event", "redo", "policy", "verdict"}

func (k Kind) String() string {
	if k >= 1 && k <= kindLast {
		return kindNames[k]
	}
	return fmt.Sprintf("kind-%d", uint8(k))
}

// KindSet is a set of kinds; zero means all.
type KindSet uint32

// Kinds makes a set.
func Kinds(ks ...Kind) KindSet {
	var s KindSet
	for _, k := range ks {
		s |= 1 << k
	}
	return s
}

// Except is the set of all kinds but these.
func Except(ks ...Kind) KindSet { return ^Kinds(ks...) }

func (s KindSet) has(k Kind) bool { return s == 0 || s&(1<<k) != 0 }

// Flags of a record.
type Flags uint16

const (
	// Late marks output after the command's end.
	Late Flags = 1 << 0
	// Final lets a record use the reserve of a full disk: it tells an end. StepEnd, Void and SessionClose always may.
	Final Flags = 1 << 1
	// Opaque marks a step that cannot be done again from its record, such as terminal or port traffic.
	Opaque Flags = 1 << 2
)

const flagsKnown = Late | Final | Opaque

// Record is one entry of a trajectory. Append sets Seq, Wall and Mono. Slices of a record that was read belong to the reader.
type Record struct {
	Seq     uint64
	Epoch   uint32 // grows by one with each restore or migration
	Kind    Kind
	Stream  sandbox.StreamName // of output
	Flags   Flags
	Step    string        // the step key, command ID or session name; empty where the sandbox itself is meant
	Offset  int64         // of output and stdin, in octets
	Wall    time.Time     // set back or forward whenever the host's clock is
	Mono    time.Duration // monotonic since the host booted; comparable within one boot
	Input   *Input        // input octets of the step, if any
	Payload []byte        // encoded by the caller; for output the octets themselves
}

// Bounds of one record, in octets.
const (
	MaxPayload = 24 << 20 // the longest text of a command with its environment, encoded
	MaxOutput  = 256 << 10
	MaxStep    = 255
	maxBody    = MaxPayload + MaxInline + 4096
)

const headerLen = 64

// Offsets in a record's header; all numbers are little-endian.
const (
	hCRC     = 0  // CRC32C of the header's other 60 octets, seeded with the segment's nonce
	hBodyLen = 4  // octets of the body
	hBodyCRC = 8  // CRC32C of the body
	hEpoch   = 12 // epoch of the trajectory
	hTraj    = 16 // number of the trajectory
	hSeq     = 24
	hWall    = 32 // ns since 1970
	hMono    = 40 // ns since boot
	hOffset  = 48
	hKind    = 56
	hStream  = 57
	hFlags   = 58
	hStepLen = 60
	hInput   = 62 // how the input is kept
	hZero    = 63
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errTorn says that no valid record lies at a place: the log's end, or damage.
var errTorn = errors.New("no valid record")

// recordLen is what a record with such a body takes in a segment: records begin at multiples of 8.
func recordLen(body int) int64 { return int64(headerLen+body+7) &^ 7 }

func bodyLen(r *Record) int {
	n := len(r.Step) + len(r.Payload)
	if r.Input != nil {
		n += inputHeadLen + len(r.Input.Data)
	}
	return n
}

// appendBody appends step, input and payload, the part of a record that does not depend on its place.
func appendBody(b []byte, r *Record) []byte {
	b = append(b, r.Step...)
	if in := r.Input; in != nil {
		b = binary.LittleEndian.AppendUint64(b, uint64(in.Size))
		b = append(b, in.SHA256[:]...)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(in.Data)))
		b = append(b, in.Data...)
	}
	return append(b, r.Payload...)
}

func bodyCRC(r *Record) uint32 {
	c := crc32.Update(0, castagnoli, []byte(r.Step))
	if in := r.Input; in != nil {
		var h [inputHeadLen]byte
		binary.LittleEndian.PutUint64(h[:], uint64(in.Size))
		copy(h[8:], in.SHA256[:])
		binary.LittleEndian.PutUint32(h[40:], uint32(len(in.Data)))
		c = crc32.Update(c, castagnoli, h[:])
		c = crc32.Update(c, castagnoli, in.Data)
	}
	return crc32.Update(c, castagnoli, r.Payload)
}

// appendRecord appends the whole record with its padding.
func appendRecord(b []byte, nonce uint32, traj uint64, r *Record, crc uint32) []byte {
	var h [headerLen]byte
	n := bodyLen(r)
	le := binary.LittleEndian
	le.PutUint32(h[hBodyLen:], uint32(n))
	le.PutUint32(h[hBodyCRC:], crc)
	le.PutUint32(h[hEpoch:], r.Epoch)
	le.PutUint64(h[hTraj:], traj)
	le.PutUint64(h[hSeq:], r.Seq)
	if !r.Wall.IsZero() {
		le.PutUint64(h[hWall:], uint64(r.Wall.UnixNano()))
	}
	le.PutUint64(h[hMono:], uint64(r.Mono))
	le.PutUint64(h[hOffset:], uint64(r.Offset))
	h[hKind] = byte(r.Kind)
	h[hStream] = byte(r.Stream)
	le.PutUint16(h[hFlags:], uint16(r.Flags))
	le.PutUint16(h[hStepLen:], uint16(len(r.Step)))
	if r.Input != nil {
		h[hInput] = byte(r.Input.Kept)
	}
	le.PutUint32(h[hCRC:], crc32.Update(nonce, castagnoli, h[4:]))
	b = append(b, h[:]...)
	b = appendBody(b, r)
	for pad := recordLen(n) - int64(headerLen+n); pad > 0; pad-- {
		b = append(b, 0)
	}
	return b
}

// checkHeader validates a header and returns the body's length.
func checkHeader(h []byte, nonce uint32) (int, error) {
	le := binary.LittleEndian
	if len(h) < headerLen || le.Uint32(h[hCRC:]) != crc32.Update(nonce, castagnoli, h[4:headerLen]) {
		return 0, errTorn
	}
	n := le.Uint32(h[hBodyLen:])
	if n > maxBody {
		return 0, errTorn
	}
	return int(n), nil
}

// decodeRecord decodes the header and body of a record; the record's slices are parts of body.
func decodeRecord(h, body []byte, nonce uint32) (traj uint64, r Record, err error) {
	n, err := checkHeader(h, nonce)
	if err != nil {
		return 0, r, err
	}
	le := binary.LittleEndian
	if n != len(body) || crc32.Checksum(body, castagnoli) != le.Uint32(h[hBodyCRC:]) {
		return 0, r, errTorn
	}
	r = Record{
		Seq:    le.Uint64(h[hSeq:]),
		Epoch:  le.Uint32(h[hEpoch:]),
		Kind:   Kind(h[hKind]),
		Stream: sandbox.StreamName(h[hStream]),
		Flags:  Flags(le.Uint16(h[hFlags:])),
		Offset: int64(le.Uint64(h[hOffset:])),
		Wall:   time.Unix(0, int64(le.Uint64(h[hWall:]))),
		Mono:   time.Duration(le.Uint64(h[hMono:])),
	}
	step := int(le.Uint16(h[hStepLen:]))
	if step > len(body) || r.Kind == 0 || r.Kind > kindRoll || r.Offset < 0 {
		return 0, r, errTorn
	}
	r.Step, body = string(body[:step]), body[step:]
	if kept := Kept(h[hInput]); kept != 0 {
		if len(body) < inputHeadLen || kept > KeptHash {
			return 0, r, errTorn
		}
		in := &Input{Kept: kept, Size: int64(le.Uint64(body))}
		copy(in.SHA256[:], body[8:])
		inline := le.Uint32(body[40:])
		body = body[inputHeadLen:]
		if in.Size < 0 || uint64(inline) > uint64(len(body)) || (kept == KeptInline) != (int64(inline) == in.Size) && inline != 0 {
			return 0, r, errTorn
		}
		in.Data, body = body[:inline:inline], body[inline:]
		r.Input = in
	}
	r.Payload = body
	return le.Uint64(h[hTraj:]), r, nil
}

// check validates what a caller wants to append.
func (r *Record) check() error {
	switch {
	case r.Kind == 0 || r.Kind > kindLast:
		return fmt.Errorf("record kind %d: not one of the known: %w", r.Kind, sandbox.ErrInvalid)
	case len(r.Step) > MaxStep:
		return fmt.Errorf("record step %.40q: %d octets, at most %d: %w", r.Step, len(r.Step), MaxStep, sandbox.ErrInvalid)
	case len(r.Payload) > MaxPayload:
		return fmt.Errorf("record payload: %d octets, at most %d (put input bytes into Input): %w", len(r.Payload), MaxPayload, sandbox.ErrInvalid)
	case r.Flags&^flagsKnown != 0:
		return fmt.Errorf("record flags %#x: not known: %w", r.Flags, sandbox.ErrInvalid)
	case r.Offset < 0:
		return fmt.Errorf("record offset %d: must not be negative: %w", r.Offset, sandbox.ErrInvalid)
	}
	if r.Input != nil {
		if err := r.Input.check(); err != nil {
			return err
		}
	}
	if r.Kind != KindOutput {
		return nil
	}
	switch {
	case r.Stream != sandbox.Stdout && r.Stream != sandbox.Stderr:
		return fmt.Errorf("output stream %d: want stdout or stderr: %w", r.Stream, sandbox.ErrInvalid)
	case len(r.Payload) == 0 || len(r.Payload) > MaxOutput:
		return fmt.Errorf("output of %s: %d octets, want 1 to %d: %w", r.Step, len(r.Payload), MaxOutput, sandbox.ErrInvalid)
	case r.Offset > math.MaxInt64-MaxOutput:
		return fmt.Errorf("output of %s: offset %d is beyond any stream: %w", r.Step, r.Offset, sandbox.ErrInvalid)
	case r.Input != nil:
		return fmt.Errorf("output of %s: has no input: %w", r.Step, sandbox.ErrInvalid)
	}
	return nil
}

// final reports whether the record may use the reserve.
func (r *Record) final() bool {
	switch r.Kind {
	case KindStepEnd, KindVoid, KindSessionClose, kindRemove:
		return true
	}
	return r.Flags&Final != 0
}
