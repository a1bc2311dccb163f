package trajectory

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func sampleRecords() []Record {
	wall := time.Unix(1700000000, 123)
	return []Record{
		{Kind: KindCreate, Payload: []byte(`{"spec":1}`)},
		{Kind: KindStepStart, Step: "build", Epoch: 2, Input: NewInput([]byte("in")), Payload: []byte("req"), Wall: wall, Mono: 5},
		{Kind: KindStepStart, Step: "up", Input: &Input{Kept: KeptBlob, Size: 1 << 20, SHA256: [32]byte{1, 2}}, Payload: []byte{}},
		{Kind: KindOutput, Step: "build", Stream: sandbox.Stderr, Offset: 1 << 40, Flags: Late, Payload: bytes.Repeat([]byte{7}, 1000)},
		{Kind: KindStepEnd, Step: "build", Flags: Final, Payload: []byte{}},
	}
}

func TestRecordCodec(t *testing.T) {
	for i, r := range sampleRecords() {
		r.Seq = uint64(i) + 1
		b := appendRecord(nil, 42, 9, &r, bodyCRC(&r))
		if int64(len(b)) != recordLen(bodyLen(&r)) {
			t.Fatalf("record takes %d octets, recordLen says %d", len(b), recordLen(bodyLen(&r)))
		}
		traj, got, err := decodeRecord(b[:headerLen], b[headerLen:headerLen+bodyLen(&r)], 42)
		if err != nil || traj != 9 {
			t.Fatal(traj, err)
		}
		if r.Wall.IsZero() {
			r.Wall = time.Unix(0, 0)
		}
		if d := cmp.Diff(r, got, cmpopts.IgnoreUnexported(Input{}), cmpopts.EquateEmpty()); d != "" {
			t.Error(d)
		}
		if _, err := checkHeader(b, 43); err == nil {
			t.Error("another segment's nonce is taken")
		}
		for range 200 { // any changed bit is noticed
			c := bytes.Clone(b[:headerLen+bodyLen(&r)])
			c[rand.IntN(len(c))] ^= 1 << rand.IntN(8)
			if _, _, err := decodeRecord(c[:headerLen], c[headerLen:], 42); err == nil {
				t.Fatal("a damaged record is taken")
			}
		}
	}
}

// sampleSegment is a sealed segment with its records.
func sampleSegment() (b []byte, entries []entry) {
	h := segmentHeader{Num: 3, Nonce: 42}
	b = h.encode()
	f := newFooter()
	put := func(num uint64, r Record) {
		off := int64(len(b))
		b = appendRecord(b, h.Nonce, num, &r, bodyCRC(&r))
		e, err := entryOf(num, &r, off, int64(len(b))-off)
		if err != nil {
			panic(err)
		}
		f.add(&e)
		entries = append(entries, e)
	}
	for num := range uint64(3) {
		put(num+1, bindRecord(ID{"p", "j", fmt.Sprint(num)}, 1, 10*num+1))
	}
	for i, r := range sampleRecords() {
		for num := range uint64(3) {
			r.Seq = 10*num + uint64(i) + 1
			put(num+1, r)
		}
	}
	put(2, Record{Kind: kindRemove})
	put(0, Record{Kind: kindRoll})
	return append(b, f.seal(int64(len(b)), h)...), entries
}

var sameEntry = cmp.Options{cmp.AllowUnexported(entry{}), cmpopts.IgnoreUnexported(Input{})}

// TestFooterAgrees: a footer and a scan tell the same.
func TestFooterAgrees(t *testing.T) {
	b, want := sampleSegment()
	var h segmentHeader
	foot, end, err := readFooter(file{b}, int64(len(b)), &h)
	if err != nil || foot == nil || h.Nonce != 42 {
		t.Fatal(foot, err)
	}
	var fromFooter, fromScan []entry
	if err := decodeFooter(foot, end, func(e *entry) error { fromFooter = append(fromFooter, *e); return nil }); err != nil {
		t.Fatal(err)
	}
	scanEnd, rolled, err := scan(file{b}, int64(len(b)), 42, func(e *entry, _ *Record) error { fromScan = append(fromScan, *e); return nil })
	if err != nil || !rolled || scanEnd != end {
		t.Fatal(scanEnd, rolled, err)
	}
	for i := range want {
		switch want[i].kind { // a footer keeps no more than the index needs
		case kindRemove, kindRoll:
			want[i].seq = 0
		}
	}
	if d := cmp.Diff(want, fromFooter, sameEntry); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff(want, fromScan, sameEntry); d != "" {
		t.Error(d)
	}
}

// file makes octets a File for reading.
type file struct{ b []byte }

func (f file) ReadAt(p []byte, off int64) (int, error) { return bytes.NewReader(f.b).ReadAt(p, off) }
func (f file) WriteAt([]byte, int64) (int, error)      { panic("read only") }
func (f file) Close() error                            { return nil }
func (f file) Size() (int64, error)                    { return int64(len(f.b)), nil }
func (f file) Allocate(int64) error                    { panic("read only") }
func (f file) Truncate(int64) error                    { panic("read only") }
func (f file) Sync() error                             { panic("read only") }

// FuzzScan feeds arbitrary records: it never panics and yields only what decodes again to the same.
func FuzzScan(f *testing.F) {
	b, _ := sampleSegment()
	f.Add(b[segmentHeaderLen:])
	f.Add(b[segmentHeaderLen : len(b)/2])
	f.Add([]byte(footerMagic))
	f.Fuzz(func(t *testing.T, tail []byte) {
		b := append(segmentHeader{Nonce: 42}.encode(), tail...)
		at := int64(segmentHeaderLen)
		end, _, err := scan(file{b}, int64(len(b)), 42, func(e *entry, r *Record) error {
			if e.off != at || e.size < headerLen || e.size%8 != 0 {
				t.Fatalf("record at %d of %d octets, want it at %d", e.off, e.size, at)
			}
			at += e.size
			Format(new(bytes.Buffer), r)
			return nil
		})
		if err != nil || end != at || end > max(int64(len(b)), at) {
			t.Fatal(end, at, err)
		}
	})
}

// FuzzDecodeRecord goes past the checksums, so that the fuzzer reaches the decoder itself.
func FuzzDecodeRecord(f *testing.F) {
	for _, r := range sampleRecords() {
		b := appendRecord(nil, 0, 1, &r, bodyCRC(&r))
		f.Add(b[:headerLen], b[headerLen:headerLen+bodyLen(&r)])
	}
	f.Fuzz(func(t *testing.T, h, body []byte) {
		if len(h) < headerLen || len(body) > maxBody {
			return
		}
		h = sign(h[:headerLen], body)
		_, r, err := decodeRecord(h, body, 0)
		if err != nil {
			return
		}
		if got := appendBody(nil, &r); !bytes.Equal(got, body) {
			t.Fatalf("body %x encodes as %x", body, got)
		}
		entryOf(1, &r, 64, 64)
		Format(new(bytes.Buffer), &r)
	})
}

// FuzzFooter feeds arbitrary footers: bounded, never a panic.
func FuzzFooter(f *testing.F) {
	b, _ := sampleSegment()
	var h segmentHeader
	foot, end, _ := readFooter(file{b}, int64(len(b)), &h)
	f.Add(foot, end)
	f.Fuzz(func(t *testing.T, foot []byte, end int64) {
		n := 0
		decodeFooter(foot, end, func(e *entry) error {
			if n++; n > len(foot) {
				t.Fatal("more entries than octets")
			}
			return nil
		})
		readFooter(file{foot}, int64(len(foot)), &h)
		decodeSegmentHeader(foot)
	})
}

func TestFormat(t *testing.T) {
	r := Record{Seq: 7, Kind: KindOutput, Step: "s 1", Stream: sandbox.Stdout, Offset: 3, Flags: Late,
		Payload: []byte("ok\tß\n\x1b[31mred\xff\nend"), Wall: time.Unix(0, 1500)}
	var b bytes.Buffer
	if err := Format(&b, &r); err != nil {
		t.Fatal(err)
	}
	want := "     7  00:00:00.000001  step-output \"s 1\" stdout +3 (19) late\n" +
		"        | ok\tß\n        | \\x1b[31mred\\xff\n        | end\n"
	if d := cmp.Diff(want, b.String()); d != "" {
		t.Error(d)
	}
	b.Reset()
	Format(&b, &Record{Seq: 8, Kind: KindStepEnd, Step: "s", Payload: []byte(`{"kind": "exited"}`), Wall: time.Unix(0, 0)})
	if d := cmp.Diff("     8  00:00:00.000000  step-end s\n        {\"kind\":\"exited\"}\n", b.String()); d != "" {
		t.Error(d)
	}
}

func FuzzPackIndex(f *testing.F) {
	b := packIndex(nil, []block{{len: 100, stored: 40, crc: 7}, {len: 80, stored: 80}}, 64+120, 9)
	f.Add(b[:len(b)-trailerLen], uint64(2), int64(184), int64(180))
	f.Fuzz(func(t *testing.T, b []byte, count uint64, end, size int64) {
		blocks, err := decodePackIndex(b, count, end, size)
		if err != nil {
			return
		}
		off, at := int64(0), int64(segmentHeaderLen)
		for _, k := range blocks {
			if k.off != off || k.at != at || k.len <= 0 || k.stored <= 0 || k.stored > k.len {
				t.Fatalf("%+v", k)
			}
			off, at = off+k.len, at+k.stored
		}
	})
}

// FuzzPacked opens whatever lies in a file as a packed segment, and reads all of it.
func FuzzPacked(f *testing.F) {
	raw := bytes.Repeat([]byte("octets of a segment "), 20)
	whole := append(packHeader{Num: 1, Nonce: 2, Size: int64(len(raw))}.encode(), raw...)
	f.Add(packIndex(whole, []block{{len: int64(len(raw)), stored: int64(len(raw)), crc: crc32.Checksum(raw, castagnoli)}}, int64(len(whole)), 2))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := openPacked(memFile{bytes.NewReader(b)}, int64(len(b)), newBlockCache(), nil)
		if err != nil {
			return
		}
		buf := make([]byte, 4096)
		for off := int64(0); off < min(p.head.Size, 1<<20); off += int64(len(buf)) {
			if n, err := p.ReadAt(buf, off); err == nil && n != len(buf) {
				t.Fatalf("%d octets at %d", n, off)
			}
		}
	})
}

type memFile struct{ *bytes.Reader }

func (memFile) WriteAt([]byte, int64) (int, error) { return 0, errFixed }
func (memFile) Close() error                       { return nil }
func (f memFile) Size() (int64, error)             { return f.Reader.Size(), nil }
func (memFile) Allocate(int64) error               { return errFixed }
func (memFile) Truncate(int64) error               { return errFixed }
func (memFile) Sync() error                        { return nil }

func FuzzTail(f *testing.F) {
	b, err := encodeTail(3, 4, []uint32{1, 2}, []piece{{1, 0, []byte("abc")}, {2, 64, []byte("def")}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		living, pieces, err := decodeTail(b)
		if err != nil {
			return
		}
		again, err := encodeTail(1, 1, living, pieces)
		if err != nil {
			t.Fatal(err)
		}
		if l, p, err := decodeTail(again); err != nil || len(l) != len(living) || len(p) != len(pieces) {
			t.Fatal(err)
		}
	})
}

func FuzzEpoch(f *testing.F) {
	f.Add(string(epoch{N: 3}.encode()))
	f.Fuzz(func(t *testing.T, s string) {
		if e, err := decodeEpoch(s); err == nil {
			if again, err := decodeEpoch(string(e.encode())); err != nil || again != e {
				t.Fatal(again, err)
			}
		}
	})
}
