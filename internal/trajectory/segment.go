package trajectory

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	segmentHeaderLen = 64
	trailerLen       = 48
	rollLen          = headerLen

	segmentMagic = "dsectrj1"
	trailerMagic = "dsecseal"
	// footerMagic stands where a record could; as a header it has a body of 4 GiB, which none has.
	footerMagic = "\xff\xff\xff\xff\xff\xff\xff\xff"
)

var errFormat = errors.New("malformed")

// segmentHeader is the first 64 octets of a segment.
type segmentHeader struct {
	Num     uint64
	Created int64    // wall time, ns
	Boot    [16]byte // of the kernel whose monotonic time the records carry
	Nonce   uint32   // seed of the records' header checksums: what lay in the file before never looks valid
}

func (h segmentHeader) encode() []byte {
	b := make([]byte, segmentHeaderLen)
	copy(b, segmentMagic)
	le := binary.LittleEndian
	le.PutUint64(b[8:], h.Num)
	le.PutUint64(b[16:], uint64(h.Created))
	copy(b[24:], h.Boot[:])
	le.PutUint32(b[40:], h.Nonce)
	le.PutUint32(b[60:], crc32.Checksum(b[:60], castagnoli))
	return b
}

func decodeSegmentHeader(b []byte) (h segmentHeader, err error) {
	le := binary.LittleEndian
	if len(b) < segmentHeaderLen || string(b[:8]) != segmentMagic || le.Uint32(b[60:]) != crc32.Checksum(b[:60], castagnoli) {
		return h, fmt.Errorf("segment header: %w", errFormat)
	}
	h = segmentHeader{Num: le.Uint64(b[8:]), Created: int64(le.Uint64(b[16:])), Nonce: le.Uint32(b[40:])}
	copy(h.Boot[:], b[24:])
	return h, nil
}

// entry is what the index needs to know of a record. It comes from an append, from scanning a segment or from its footer.
type entry struct {
	kind   Kind
	size   int64  // octets in the segment, padding included
	off    int64  // of the record in the segment
	traj   uint64 // number
	seq    uint64 // of a bind: that of the trajectory's next record
	epoch  uint32 // of a bind
	id     ID     // of a bind
	stream sandbox.StreamName
	out    int64 // of output: its offset and length
	n      int64
	step   string // of output
	blob   *Input // input that is kept as a blob
}

// footer is the index of a segment in the making: one entry a record, in order, so that opening need not read the records.
type footer struct {
	buf   []byte
	local map[uint64]int // trajectory number -> place of its last bind
	next  []uint64       // seq of the next record, by place
	steps map[string]int
	n     int
}

func newFooter() *footer {
	return &footer{buf: []byte(footerMagic), local: map[uint64]int{}, steps: map[string]int{}}
}

const footerBlob = 0x80 // in the kind octet: a blob follows

// entryMax bounds what add appends for a record, its bind included.
func entryMax(id ID, r *Record) int64 {
	n := 32 + int64(len(id.Project)+len(id.Job)+len(id.Key)) + 32
	if r.Kind == KindOutput {
		n += 32 + int64(len(r.Step))
	}
	if r.Input != nil {
		n += 48
	}
	return n
}

func (f *footer) add(e *entry) {
	k := byte(e.kind)
	if e.blob != nil {
		k |= footerBlob
	}
	b := append(f.buf, k)
	b = binary.AppendUvarint(b, uint64(e.size/8))
	switch e.kind {
	case kindBind:
		f.local[e.traj] = len(f.next)
		f.next = append(f.next, e.seq)
		b = binary.AppendUvarint(b, e.traj)
		b = binary.AppendUvarint(b, e.seq)
		b = binary.AppendUvarint(b, uint64(e.epoch))
		b = appendString(b, e.id.Project)
		b = appendString(b, e.id.Job)
		b = appendString(b, e.id.Key)
	case kindRemove:
		b = binary.AppendUvarint(b, e.traj)
	case kindRoll:
	default:
		b = binary.AppendUvarint(b, uint64(f.local[e.traj]))
		if e.kind == KindOutput {
			b = append(b, byte(e.stream))
			b = binary.AppendUvarint(b, uint64(e.out))
			b = binary.AppendUvarint(b, uint64(e.n))
			i, ok := f.steps[e.step]
			if !ok {
				i = len(f.steps)
				f.steps[e.step] = i
			}
			b = binary.AppendUvarint(b, uint64(i))
			if !ok {
				b = appendString(b, e.step)
			}
		}
	}
	if e.blob != nil {
		b = append(b, e.blob.SHA256[:]...)
		b = binary.AppendUvarint(b, uint64(e.blob.Size))
	}
	f.buf = b
	f.n++
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// seal returns the footer with its trailer, to be written at off, where the records end.
func (f *footer) seal(off int64, h segmentHeader) []byte {
	b := bytes.Clone(f.buf)
	le := binary.LittleEndian
	t := make([]byte, trailerLen)
	le.PutUint64(t[0:], uint64(off))
	le.PutUint64(t[8:], uint64(len(b)))
	le.PutUint64(t[16:], uint64(f.n))
	le.PutUint32(t[24:], crc32.Checksum(b, castagnoli))
	le.PutUint32(t[28:], h.Nonce) // so that a rotten header does not cost the segment
	copy(t[36:], trailerMagic)
	le.PutUint32(t[32:], crc32.Checksum(t[:32], castagnoli))
	return append(b, t...)
}

// trailer is the last 48 octets of a sealed segment.
type trailer struct {
	off, len int64 // of the footer
	n        uint64
	crc      uint32
	nonce    uint32
}

func decodeTrailer(b []byte) (t trailer, err error) {
	le := binary.LittleEndian
	if len(b) != trailerLen || string(b[36:44]) != trailerMagic || le.Uint32(b[32:]) != crc32.Checksum(b[:32], castagnoli) {
		return t, fmt.Errorf("segment trailer: %w", errFormat)
	}
	t = trailer{off: int64(le.Uint64(b)), len: int64(le.Uint64(b[8:])), n: le.Uint64(b[16:]), crc: le.Uint32(b[24:]), nonce: le.Uint32(b[28:])}
	if t.off < segmentHeaderLen || t.len < int64(len(footerMagic)) || t.off > 1<<40 || t.len > 1<<40 {
		return t, fmt.Errorf("segment trailer: %w", errFormat)
	}
	return t, nil
}

// decodeFooter yields the entries of a footer whose records end at end.
func decodeFooter(b []byte, end int64, yield func(*entry) error) error {
	if !bytes.HasPrefix(b, []byte(footerMagic)) {
		return fmt.Errorf("segment footer: %w", errFormat)
	}
	d := &decoder{b: b[len(footerMagic):]}
	type bound struct{ traj, next uint64 }
	var table []bound
	var steps []string
	off := int64(segmentHeaderLen)
	for len(d.b) > 0 && !d.bad {
		k := d.octet()
		e := entry{kind: Kind(k &^ footerBlob), off: off}
		size := d.uvarint()
		if size < headerLen/8 || size > maxBody {
			return fmt.Errorf("segment footer: size of a record: %w", errFormat)
		}
		e.size = int64(size) * 8
		switch {
		case e.kind == kindBind:
			e.traj, e.seq, e.epoch = d.uvarint(), d.uvarint(), uint32(d.uvarint())
			e.id = ID{d.string(), d.string(), d.string()}
			table = append(table, bound{e.traj, e.seq})
		case e.kind == kindRemove:
			e.traj = d.uvarint()
		case e.kind == kindRoll:
		case e.kind >= 1 && e.kind <= kindLast:
			i := d.uvarint()
			if i >= uint64(len(table)) {
				return fmt.Errorf("segment footer: trajectory of a record: %w", errFormat)
			}
			e.traj, e.seq = table[i].traj, table[i].next
			table[i].next++
			if e.kind == KindOutput {
				e.stream, e.out, e.n = sandbox.StreamName(d.octet()), int64(d.uvarint()), int64(d.uvarint())
				switch i := d.uvarint(); {
				case i < uint64(len(steps)):
					e.step = steps[i]
				case i == uint64(len(steps)):
					e.step = d.string()
					steps = append(steps, e.step)
				default:
					d.bad = true
				}
				if e.out < 0 || e.n <= 0 || e.n > MaxOutput || e.out+e.n < 0 {
					d.bad = true
				}
			}
		default:
			d.bad = true
		}
		if k&footerBlob != 0 {
			e.blob = &Input{Kept: KeptBlob}
			copy(e.blob.SHA256[:], d.take(32))
			e.blob.Size = int64(d.uvarint())
		}
		if off += e.size; d.bad || off > end {
			return fmt.Errorf("segment footer: entry %d: %w", len(table), errFormat)
		}
		if err := yield(&e); err != nil {
			return err
		}
	}
	if d.bad || off != end {
		return fmt.Errorf("segment footer: records end at %d, not %d: %w", off, end, errFormat)
	}
	return nil
}

// decoder takes values off b; after a short read it is bad and yields zeros.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n uint64) []byte {
	if d.bad || n > uint64(len(d.b)) {
		d.bad = true
		return nil
	}
	v := d.b[:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) octet() byte {
	if v := d.take(1); v != nil {
		return v[0]
	}
	return 0
}

func (d *decoder) uvarint() uint64 {
	v, n := binary.Uvarint(d.b)
	if d.bad || n <= 0 {
		d.bad = true
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) string() string { return string(d.take(d.uvarint())) }

// The log's own records: a bind's payload is the ID, its Seq that of the next record; a removal has the trajectory's number alone.

func bindRecord(id ID, epoch uint32, next uint64) Record {
	b := appendString(nil, id.Project)
	b = appendString(b, id.Job)
	return Record{Kind: kindBind, Epoch: epoch, Seq: next, Payload: appendString(b, id.Key)}
}

func bindLen(id ID) int64 {
	return recordLen(len(id.Project) + len(id.Job) + len(id.Key) + 15)
}

// entryOf makes the index entry of a decoded record.
func entryOf(traj uint64, r *Record, off, size int64) (entry, error) {
	e := entry{kind: r.Kind, size: size, off: off, traj: traj, seq: r.Seq}
	switch {
	case r.Kind == kindBind:
		d := &decoder{b: r.Payload}
		e.id, e.epoch = ID{d.string(), d.string(), d.string()}, r.Epoch
		if d.bad || len(d.b) > 0 {
			return e, errTorn
		}
	case r.Kind == kindRemove, r.Kind == kindRoll:
	case r.Kind > kindLast:
		return e, errTorn
	case r.Kind == KindOutput:
		e.stream, e.out, e.n, e.step = r.Stream, r.Offset, int64(len(r.Payload)), r.Step
		if e.n == 0 || e.n > MaxOutput || e.out+e.n < 0 {
			return e, errTorn
		}
	}
	if r.Input != nil && r.Input.Kept == KeptBlob {
		e.blob = &Input{Kept: KeptBlob, SHA256: r.Input.SHA256, Size: r.Input.Size}
	}
	return e, nil
}

// scan reads the records of an unsealed segment up to the first that is not valid, which is where the log was cut. It returns
// where they end and whether the last one says that the log goes on in the next segment. Only errors of the device or of yield
// are returned.
func scan(f io.ReaderAt, size int64, nonce uint32, yield func(*entry, *Record) error) (end int64, rolled bool, err error) {
	end = segmentHeaderLen
	in := bufio.NewReaderSize(io.NewSectionReader(f, end, max(0, size-end)), int(min(1<<20, max(4096, size))))
	var h [headerLen]byte
	var body []byte
	for !rolled {
		if _, err := io.ReadFull(in, h[:]); err != nil {
			return end, false, shortIsEnd(err)
		}
		n, err := checkHeader(h[:], nonce)
		if err != nil {
			return end, false, nil
		}
		total := recordLen(n)
		if total-headerLen > int64(cap(body)) {
			if end+total > size {
				return end, false, nil
			}
			body = make([]byte, total-headerLen)
		}
		body = body[:total-headerLen]
		if _, err := io.ReadFull(in, body); err != nil {
			return end, false, shortIsEnd(err)
		}
		traj, r, err := decodeRecord(h[:], body[:n], nonce)
		if err != nil {
			return end, false, nil
		}
		e, err := entryOf(traj, &r, end, total)
		if err != nil {
			return end, false, nil
		}
		if err := yield(&e, &r); err != nil {
			return end, false, err
		}
		end += total
		rolled = r.Kind == kindRoll
	}
	return end, rolled, nil
}

func shortIsEnd(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return nil
	}
	return err
}
