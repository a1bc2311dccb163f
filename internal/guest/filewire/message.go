package filewire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// Op is what a call asks for.
type Op uint8

const (
	OpStat     Op = 1
	OpList     Op = 2
	OpRead     Op = 3
	OpWrite    Op = 4
	OpMakeDir  Op = 5
	OpMove     Op = 6
	OpRemove   Op = 7
	OpWatch    Op = 8
	OpDownload Op = 9
	OpUpload   Op = 10
)

// Flags of a request.
const (
	Follow    uint32 = 1 << iota // stat: follow a link at the end of the path
	Parents                      // make missing parents
	Append                       // write: at the end
	SetMode                      // write: also change the mode of a file that exists
	Replace                      // move: over what is there
	Recursive                    // remove, watch
	MissingOK                    // remove
	KeepOwner                    // upload: owners of the tar
	HasTime                      // write: Modified is set
	allFlags  = 1<<iota - 1
)

// Request is the body of a Call. One form serves all operations; a field that an operation does not use is zero.
type Request struct {
	Op       Op
	Flags    uint32
	Mode     uint32
	Depth    uint32
	Offset   int64
	Length   int64
	Modified time.Time
	Path     string
	To       string
	Exclude  []string
}

// Kind of a file, as on the API's wire.
type Kind string

const (
	File    Kind = "file"
	Dir     Kind = "dir"
	Link    Kind = "link"
	Fifo    Kind = "fifo"
	Socket  Kind = "socket"
	Char    Kind = "char"
	Block   Kind = "block"
	Unknown Kind = ""
)

var kinds = [...]Kind{Unknown, File, Dir, Link, Fifo, Socket, Char, Block}

// Info describes a file. Path, Target, Owner and Group are octets.
type Info struct {
	Path     string
	Kind     Kind
	Mode     uint32 // permission bits with setuid, setgid and sticky
	UID, GID uint32
	Nlink    uint32
	Inode    uint64
	Size     int64
	Modified time.Time
	Target   string // of a link
	Owner    string // by the sandbox's /etc/passwd; empty where it names none
	Group    string
	Error    string // the entry could not be read; what is known is filled
}

// EventKind says what a watch saw.
type EventKind string

const (
	Ready     EventKind = "ready" // the watch is in place; first
	Created   EventKind = "created"
	Modified  EventKind = "modified"
	Removed   EventKind = "removed"
	MovedFrom EventKind = "moved_from"
	MovedTo   EventKind = "moved_to"
	Attrib    EventKind = "attrib"
	Overflow  EventKind = "overflow" // events were lost; Path names a folder that can't be watched, or is empty
)

var eventKinds = [...]EventKind{"", Ready, Created, Modified, Removed, MovedFrom, MovedTo, Attrib, Overflow}

// Event of a watch. Path is relative to the watched folder; empty for itself.
type Event struct {
	Kind EventKind
	Path string
}

// Item is the body of a GuestItem: entries or events.
type Item struct {
	Entries []Info
	Events  []Event
}

// Code of a Result.
type Code uint8

const (
	OK Code = iota
	NotFound
	Exists
	Invalid
	State
	Exhausted
	Denied
	Unsupported
	Interrupted // the body broke off
	Cancelled
	Internal
	lastCode = Internal
)

// Result is the end of a call.
type Result struct {
	Code    Code
	Errno   uint32 // the kernel's, 0 where none
	Text    string // reason, for a person
	Applied int64  // octets applied or sent
	Start   int64  // write: the size before
	Entries int64
	Info    *Info
	Skipped []string // path and reason
	Left    int64    // all that was skipped, listed or not
}

var errShort = errors.New("message ends in the middle")

type encoder []byte

func (e *encoder) u8(v uint8)   { *e = append(*e, v) }
func (e *encoder) u32(v uint32) { *e = binary.LittleEndian.AppendUint32(*e, v) }
func (e *encoder) u64(v uint64) { *e = binary.LittleEndian.AppendUint64(*e, v) }
func (e *encoder) str(s string) { e.u32(uint32(len(s))); *e = append(*e, s...) }
func (e *encoder) time(t time.Time) {
	e.u64(uint64(t.Unix()))
	e.u32(uint32(t.Nanosecond()))
}

type decoder struct {
	b   []byte
	err error
}

func (d *decoder) fail(err error) {
	if d.err == nil {
		d.err = err
	}
	d.b = nil
}

func (d *decoder) take(n int) []byte {
	if d.err != nil || n > len(d.b) {
		d.fail(errShort)
		return nil
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) u8() uint8 {
	if b := d.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) u32() uint32 {
	if b := d.take(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) u64() uint64 {
	if b := d.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// size is a number that is never negative.
func (d *decoder) size() int64 {
	v := d.u64()
	if v > math.MaxInt64 {
		d.fail(fmt.Errorf("size %d is out of range", v))
		return 0
	}
	return int64(v)
}

func (d *decoder) time() time.Time {
	sec, nsec := int64(d.u64()), d.u32()
	if nsec >= 1e9 {
		d.fail(fmt.Errorf("time with %d nanoseconds", nsec))
		return time.Time{}
	}
	// What a protobuf timestamp can say: years 1 to 9999. A file may claim any time; it is clipped.
	const lowest, highest = -62135596800, 253402300799
	if d.err != nil {
		return time.Time{}
	}
	return time.Unix(min(max(sec, lowest), highest), int64(nsec))
}

// str reads octets without a NUL, at most limit of them.
func (d *decoder) str(limit int) string {
	n := d.u32()
	if d.err == nil && n > uint32(limit) {
		d.fail(fmt.Errorf("string of %d octets, at most %d", n, limit))
	}
	s := string(d.take(int(n)))
	if strings.IndexByte(s, 0) >= 0 {
		d.fail(errors.New("string holds a NUL octet"))
		return ""
	}
	return s
}

func (d *decoder) end() error {
	if d.err == nil && len(d.b) > 0 {
		d.fail(fmt.Errorf("%d octets too many", len(d.b)))
	}
	return d.err
}

// maxExclude bounds the patterns of a download.
const maxExclude = 256

// Encode gives the body of a Call.
func (r *Request) Encode() []byte {
	var e encoder
	e.u8(uint8(r.Op))
	e.u32(r.Flags)
	e.u32(r.Mode)
	e.u32(r.Depth)
	e.u64(uint64(r.Offset))
	e.u64(uint64(r.Length))
	e.time(r.Modified)
	e.str(r.Path)
	e.str(r.To)
	e.u32(uint32(len(r.Exclude)))
	for _, x := range r.Exclude {
		e.str(x)
	}
	return e
}

// DecodeRequest reads the body of a Call.
func DecodeRequest(b []byte) (*Request, error) {
	d := decoder{b: b}
	r := &Request{Op: Op(d.u8()), Flags: d.u32(), Mode: d.u32(), Depth: d.u32(), Offset: int64(d.u64()), Length: int64(d.u64())}
	r.Modified = d.time()
	r.Path, r.To = d.str(MaxPath), d.str(MaxPath)
	n := d.u32()
	if n > maxExclude {
		d.fail(fmt.Errorf("%d patterns, at most %d", n, maxExclude))
	}
	for i := uint32(0); i < n && d.err == nil; i++ {
		r.Exclude = append(r.Exclude, d.str(MaxPath))
	}
	if err := d.end(); err != nil {
		return nil, err
	}
	switch {
	case r.Op < OpStat || r.Op > OpUpload:
		return nil, fmt.Errorf("operation %d is not known", r.Op)
	case r.Flags&^allFlags != 0:
		return nil, fmt.Errorf("flags %#x are not known", r.Flags&^allFlags)
	case r.Path == "" || r.Path[0] != '/':
		return nil, errors.New("path is not absolute")
	case r.Op == OpMove && (r.To == "" || r.To[0] != '/'):
		return nil, errors.New("new path is not absolute")
	case r.Mode > 0o7777:
		return nil, fmt.Errorf("mode %#o has bits beyond 07777", r.Mode)
	case r.Length < 0, r.Offset < -1:
		return nil, errors.New("offset or length is negative")
	}
	if r.Flags&HasTime == 0 {
		r.Modified = time.Time{}
	}
	return r, nil
}

func index[T comparable](list []T, v T) uint8 {
	for i, x := range list {
		if x == v {
			return uint8(i)
		}
	}
	return 0
}

func clip(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return s
}

const maxName = 64 // octets of a user's or group's name; longer ones are not told

func (e *encoder) info(i *Info) {
	e.u8(index(kinds[:], i.Kind))
	e.u32(i.Mode)
	e.u32(i.UID)
	e.u32(i.GID)
	e.u32(i.Nlink)
	e.u64(i.Inode)
	e.u64(uint64(i.Size))
	e.time(i.Modified)
	e.str(clip(i.Owner, maxName))
	e.str(clip(i.Group, maxName))
	e.str(clip(i.Target, MaxPath))
	e.str(clip(i.Error, 256))
	e.str(i.Path)
}

// infoSize is the least that an Info takes, so that a count can be checked before anything is made.
const infoSize = 1 + 4*4 + 8*2 + 12 + 5*4

func (d *decoder) info() (i Info) {
	k := d.u8()
	if int(k) >= len(kinds) {
		d.fail(fmt.Errorf("kind %d of a file is not known", k))
		return i
	}
	i.Kind = kinds[k]
	i.Mode, i.UID, i.GID, i.Nlink = d.u32(), d.u32(), d.u32(), d.u32()
	i.Inode, i.Size, i.Modified = d.u64(), d.size(), d.time()
	i.Owner, i.Group = d.str(maxName), d.str(maxName)
	i.Target, i.Error, i.Path = d.str(MaxPath), d.str(256), d.str(MaxRelative)
	if i.Mode > 0o7777 {
		d.fail(fmt.Errorf("mode %#o has bits beyond 07777", i.Mode))
	}
	return i
}

// Batch gathers entries or events into bodies of GuestItem.
type Batch struct {
	e     encoder
	n     uint32
	event bool
}

func (b *Batch) begin(event bool) {
	if b.n == 0 {
		b.event = event
		b.e = append(b.e[:0], make([]byte, 5)...)
	}
	b.n++
}

// AddInfo adds an entry. A batch holds entries or events, not both.
func (b *Batch) AddInfo(i *Info) { b.begin(false); b.e.info(i) }

// AddEvent adds an event.
func (b *Batch) AddEvent(ev Event) {
	b.begin(true)
	b.e.u8(index(eventKinds[:], ev.Kind))
	b.e.str(ev.Path)
}

// Full says that the batch should be sent.
func (b *Batch) Full() bool { return len(b.e) > 24<<10 }

// Bytes returns the body and empties the batch; nil when nothing is inside. The body is valid until the next Add.
func (b *Batch) Bytes() []byte {
	if b.n == 0 {
		return nil
	}
	b.e[0] = 1
	if b.event {
		b.e[0] = 2
	}
	binary.LittleEndian.PutUint32(b.e[1:], b.n)
	b.n = 0
	return b.e
}

// DecodeItem reads the body of a GuestItem.
func DecodeItem(b []byte) (*Item, error) {
	d := decoder{b: b}
	kind, n := d.u8(), int64(d.u32())
	it := &Item{}
	switch kind {
	case 1:
		if n*infoSize > int64(len(d.b)) {
			return nil, fmt.Errorf("%d entries claimed in %d octets", n, len(d.b))
		}
		for ; n > 0 && d.err == nil; n-- {
			it.Entries = append(it.Entries, d.info())
		}
	case 2:
		if n*5 > int64(len(d.b)) {
			return nil, fmt.Errorf("%d events claimed in %d octets", n, len(d.b))
		}
		for ; n > 0 && d.err == nil; n-- {
			k := d.u8()
			if k == 0 || int(k) >= len(eventKinds) {
				return nil, fmt.Errorf("kind %d of an event is not known", k)
			}
			it.Events = append(it.Events, Event{Kind: eventKinds[k], Path: d.str(MaxRelative)})
		}
	default:
		return nil, fmt.Errorf("kind %d of an item is not known", kind)
	}
	if err := d.end(); err != nil {
		return nil, err
	}
	return it, nil
}

// maxSkip bounds one line about what was left out.
const maxSkip = 1024

// Encode gives the body of a GuestResult.
func (r *Result) Encode() []byte {
	var e encoder
	e.u8(uint8(r.Code))
	e.u32(r.Errno)
	e.str(clip(strings.ReplaceAll(r.Text, "\x00", "?"), 2048))
	e.u64(uint64(r.Applied))
	e.u64(uint64(r.Start))
	e.u64(uint64(r.Entries))
	e.u64(uint64(r.Left))
	if r.Info != nil {
		e.u8(1)
		e.info(r.Info)
	} else {
		e.u8(0)
	}
	at := len(e)
	e.u32(0)
	n := 0
	for _, s := range r.Skipped {
		s = clip(s, maxSkip)
		if n == MaxSkipped || len(e)+len(s)+4 > MaxBody {
			break
		}
		e.str(s)
		n++
	}
	binary.LittleEndian.PutUint32(e[at:], uint32(n))
	return e
}

// DecodeResult reads the body of a GuestResult.
func DecodeResult(b []byte) (*Result, error) {
	d := decoder{b: b}
	r := &Result{Code: Code(d.u8()), Errno: d.u32(), Text: d.str(2048)}
	r.Applied, r.Start, r.Entries, r.Left = d.size(), d.size(), d.size(), d.size()
	switch d.u8() {
	case 0:
	case 1:
		i := d.info()
		r.Info = &i
	default:
		d.fail(errors.New("mark of an info is neither 0 nor 1"))
	}
	n := d.u32()
	if n > MaxSkipped {
		d.fail(fmt.Errorf("%d lines about what was left out, at most %d", n, MaxSkipped))
	}
	for ; n > 0 && d.err == nil; n-- {
		r.Skipped = append(r.Skipped, d.str(maxSkip))
	}
	if r.Code > lastCode {
		d.fail(fmt.Errorf("result code %d is not known", r.Code))
	}
	if err := d.end(); err != nil {
		return nil, err
	}
	return r, nil
}

// HelloBody gives the body of Hello.
func HelloBody(uid, gid uint32) []byte {
	var e encoder
	e.u32(Version)
	e.u32(0)
	e.u32(uid)
	e.u32(gid)
	return e
}

// ParseHello reads the body of Hello.
func ParseHello(b []byte) (version, uid, gid uint32, err error) {
	d := decoder{b: b}
	version = d.u32()
	d.u32()
	uid, gid = d.u32(), d.u32()
	return version, uid, gid, d.err
}
