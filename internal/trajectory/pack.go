package trajectory

import (
	"bytes"
	"container/list"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sort"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A sealed segment is packed: cut into blocks of whole records, each compressed on its own, so that one record costs one block to read.
// All that reads a segment reads a packed one as the octets that it was made of: offsets do not change.

const (
	packMagic   = "dsecpak1"
	packEnd     = "dsecpend"
	blockTarget = 64 << 10 // octets of records in a block; the last one may go beyond
	maxBlock    = blockTarget + maxBody + headerLen + 8
	cacheOctets = 16 << 20 // of blocks that were read, kept unpacked
)

// packHeader is the first 64 octets of a packed segment.
type packHeader struct {
	Num   uint64
	Nonce uint32 // of the segment
	Size  int64  // octets of the segment unpacked
	Far   int64  // octets of blocks, the first ones, that lie in the store alone; 0 all are here
}

func (h packHeader) encode() []byte {
	b := make([]byte, segmentHeaderLen)
	copy(b, packMagic)
	le := binary.LittleEndian
	le.PutUint64(b[8:], h.Num)
	le.PutUint32(b[16:], h.Nonce)
	le.PutUint64(b[24:], uint64(h.Size))
	le.PutUint64(b[32:], uint64(h.Far))
	le.PutUint32(b[60:], crc32.Checksum(b[:60], castagnoli))
	return b
}

func decodePackHeader(b []byte) (h packHeader, err error) {
	le := binary.LittleEndian
	if len(b) < segmentHeaderLen || string(b[:8]) != packMagic || le.Uint32(b[60:]) != crc32.Checksum(b[:60], castagnoli) {
		return h, fmt.Errorf("packed segment's header: %w", errFormat)
	}
	h = packHeader{Num: le.Uint64(b[8:]), Nonce: le.Uint32(b[16:]), Size: int64(le.Uint64(b[24:])), Far: int64(le.Uint64(b[32:]))}
	if h.Size < segmentHeaderLen || h.Size > 1<<40 || h.Far < 0 || h.Far > 1<<40 {
		return h, fmt.Errorf("packed segment's header: %w", errFormat)
	}
	return h, nil
}

// block is a run of a segment's octets.
type block struct {
	off    int64 // in the unpacked segment
	len    int64
	at     int64 // in the whole packed file
	stored int64
	crc    uint32 // of what is stored
}

// packIndex appends index and trailer, which begins where the blocks end.
func packIndex(b []byte, blocks []block, end int64, nonce uint32) []byte {
	var index []byte
	for _, k := range blocks {
		index = binary.AppendUvarint(index, uint64(k.len))
		index = binary.AppendUvarint(index, uint64(k.stored))
		index = binary.LittleEndian.AppendUint32(index, k.crc)
	}
	t := make([]byte, trailerLen)
	le := binary.LittleEndian
	le.PutUint64(t, uint64(end))
	le.PutUint64(t[8:], uint64(len(index)))
	le.PutUint64(t[16:], uint64(len(blocks)))
	le.PutUint32(t[24:], crc32.Checksum(index, castagnoli))
	le.PutUint32(t[28:], nonce)
	copy(t[36:], packEnd)
	le.PutUint32(t[32:], crc32.Checksum(t[:32], castagnoli))
	return append(append(b, index...), t...)
}

// decodePackTrailer returns where the index begins in the whole file, its length, the number of blocks and its checksum.
func decodePackTrailer(t []byte) (at, n int64, count uint64, crc uint32, err error) {
	le := binary.LittleEndian
	if len(t) != trailerLen || string(t[36:44]) != packEnd || le.Uint32(t[32:]) != crc32.Checksum(t[:32], castagnoli) {
		return 0, 0, 0, 0, fmt.Errorf("packed segment's trailer: %w", errFormat)
	}
	at, n, count, crc = int64(le.Uint64(t)), int64(le.Uint64(t[8:])), le.Uint64(t[16:]), le.Uint32(t[24:])
	if at < segmentHeaderLen || at > 1<<40 || n < 0 || n > 1<<30 || count > uint64(n) {
		return 0, 0, 0, 0, fmt.Errorf("packed segment's trailer: %w", errFormat)
	}
	return at, n, count, crc, nil
}

func decodePackIndex(b []byte, count uint64, end, size int64) ([]block, error) {
	d := &decoder{b: b}
	blocks := make([]block, 0, min(count, uint64(len(b)/6+1)))
	off, at := int64(0), int64(segmentHeaderLen)
	for len(d.b) > 0 && !d.bad {
		k := block{off: off, at: at}
		raw, stored := d.uvarint(), d.uvarint()
		crc := d.take(4)
		if d.bad || raw == 0 || raw > maxBlock || stored == 0 || stored > raw {
			return nil, fmt.Errorf("packed segment's index: block %d: %w", len(blocks), errFormat)
		}
		k.len, k.stored, k.crc = int64(raw), int64(stored), binary.LittleEndian.Uint32(crc)
		off, at = off+k.len, at+k.stored
		blocks = append(blocks, k)
	}
	if d.bad || uint64(len(blocks)) != count || off != size || at != end {
		return nil, fmt.Errorf("packed segment's index: %d blocks end at %d and %d: %w", len(blocks), off, at, errFormat)
	}
	return blocks, nil
}

// packed is a packed segment, as the File that it was made of.
type packed struct {
	file   File // what is here
	head   packHeader
	blocks []block
	cache  *blockCache
	far    func() (io.ReaderAt, error) // the whole file, in the store

	mu     sync.Mutex
	remote io.ReaderAt
}

// isPacked looks whether a file is a packed segment.
func isPacked(f io.ReaderAt) bool {
	b := make([]byte, len(packMagic))
	n, _ := f.ReadAt(b, 0)
	return n == len(b) && string(b) == packMagic
}

// openPacked reads the index. size is that of the file which is here.
func openPacked(f File, size int64, cache *blockCache, far func() (io.ReaderAt, error)) (*packed, error) {
	b := make([]byte, segmentHeaderLen)
	if size < segmentHeaderLen+trailerLen {
		return nil, fmt.Errorf("packed segment of %d octets: %w", size, errFormat)
	}
	if _, err := f.ReadAt(b, 0); err != nil {
		return nil, err
	}
	h, err := decodePackHeader(b)
	if err != nil {
		return nil, err
	}
	t := make([]byte, trailerLen)
	if _, err := f.ReadAt(t, size-trailerLen); err != nil {
		return nil, err
	}
	at, n, count, crc, err := decodePackTrailer(t)
	if err != nil {
		return nil, err
	}
	if at+n+trailerLen != size+h.Far || at-h.Far < segmentHeaderLen {
		return nil, fmt.Errorf("packed segment of %d octets: its index begins at %d: %w", size, at, errFormat)
	}
	index := make([]byte, n)
	if _, err := f.ReadAt(index, at-h.Far); err != nil {
		return nil, err
	}
	if crc32.Checksum(index, castagnoli) != crc {
		return nil, fmt.Errorf("packed segment's index: %w", errFormat)
	}
	blocks, err := decodePackIndex(index, count, at, h.Size)
	if err != nil {
		return nil, err
	}
	return &packed{file: f, head: h, blocks: blocks, cache: cache, far: far}, nil
}

var errFixed = errors.New("a packed segment does not change")

func (p *packed) Size() (int64, error)               { return p.head.Size, nil }
func (p *packed) Allocate(int64) error               { return errFixed }
func (p *packed) Truncate(int64) error               { return errFixed }
func (p *packed) WriteAt([]byte, int64) (int, error) { return 0, errFixed }
func (p *packed) Sync() error                        { return p.file.Sync() }

func (p *packed) Close() error {
	p.cache.drop(p)
	p.mu.Lock()
	c, ok := p.remote.(io.Closer)
	p.remote = nil
	p.mu.Unlock()
	err := p.file.Close()
	if ok {
		err = errors.Join(err, c.Close())
	}
	return err
}

// ReadAt reads octets of the unpacked segment. What does not unpack to what was packed is errTorn.
func (p *packed) ReadAt(b []byte, off int64) (n int, err error) {
	if off < 0 || off >= p.head.Size {
		return 0, io.EOF
	}
	i := sort.Search(len(p.blocks), func(i int) bool { return p.blocks[i].off+p.blocks[i].len > off })
	for n < len(b) {
		if i == len(p.blocks) {
			return n, io.EOF
		}
		data, err := p.unpack(i)
		if err != nil {
			return n, err
		}
		c := copy(b[n:], data[off-p.blocks[i].off:])
		n, off, i = n+c, off+int64(c), i+1
	}
	return n, nil
}

func (p *packed) unpack(i int) ([]byte, error) {
	if data := p.cache.get(p, i); data != nil {
		return data, nil
	}
	k := &p.blocks[i]
	here := k.at+k.stored > segmentHeaderLen+p.head.Far
	b, err := p.stored(k, here)
	if here && errors.Is(err, errTorn) && p.far != nil { // what rotted here may be whole in the store
		if sound, ferr := p.stored(k, false); ferr == nil {
			b, err = sound, nil
		}
	}
	if err != nil {
		return nil, err
	}
	if k.stored < k.len {
		if b, err = p.cache.unpack(b, k.len); err != nil {
			return nil, err
		}
	}
	p.cache.put(p, i, b)
	return b, nil
}

// stored reads a block as it is stored, here or in the store.
func (p *packed) stored(k *block, here bool) ([]byte, error) {
	b := make([]byte, k.stored)
	from, at := io.ReaderAt(p.file), k.at-p.head.Far
	if !here {
		var err error
		if from, err = p.whole(); err != nil {
			return nil, err
		}
		at = k.at
	}
	if n, err := from.ReadAt(b, at); err != nil && !(err == io.EOF && n == len(b)) {
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return nil, errTorn
		}
		return nil, err
	}
	if crc32.Checksum(b, castagnoli) != k.crc {
		return nil, errTorn
	}
	return b, nil
}

// whole is the segment in the store.
func (p *packed) whole() (io.ReaderAt, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.remote != nil {
		return p.remote, nil
	}
	if p.far == nil {
		return nil, fmt.Errorf("read segment %s: it lies in the store, and this log has none: %w", segmentName(uint32(p.head.Num)), sandbox.ErrUnsupported)
	}
	r, err := p.far()
	if err == nil {
		p.remote = r
	}
	return r, err
}

// newUnpacker is for one goroutine at a time.
func newUnpacker() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxBlock+maxBlock/2), zstd.WithDecoderLowmem(true))
}

// unpackBlock is the octets that were packed; another number of them is errTorn.
func unpackBlock(d *zstd.Decoder, b []byte, n int64) ([]byte, error) {
	out, err := d.DecodeAll(b, make([]byte, 0, n))
	if err != nil || int64(len(out)) != n {
		return nil, errTorn
	}
	return out, nil
}

// blockCache keeps blocks that were read lately, of all segments.
type blockCache struct {
	mu   sync.Mutex
	all  map[blockKey]*list.Element
	used list.List // of *cachedBlock, the latest in front
	size int64

	unpackers sync.Pool // of *zstd.Decoder
}

func (c *blockCache) unpack(b []byte, n int64) ([]byte, error) {
	d, _ := c.unpackers.Get().(*zstd.Decoder)
	if d == nil {
		var err error
		if d, err = newUnpacker(); err != nil {
			return nil, err
		}
	}
	defer c.unpackers.Put(d)
	return unpackBlock(d, b, n)
}

type blockKey struct {
	p *packed
	i int
}

type cachedBlock struct {
	key  blockKey
	data []byte
}

func newBlockCache() *blockCache { return &blockCache{all: map[blockKey]*list.Element{}} }

func (c *blockCache) get(p *packed, i int) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.all[blockKey{p, i}]
	if e == nil {
		return nil
	}
	c.used.MoveToFront(e)
	return e.Value.(*cachedBlock).data
}

func (c *blockCache) put(p *packed, i int, data []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	k := blockKey{p, i}
	if c.all[k] != nil {
		return
	}
	c.all[k] = c.used.PushFront(&cachedBlock{k, data})
	c.size += int64(len(data))
	for c.size > cacheOctets && c.used.Len() > 1 {
		c.remove(c.used.Back())
	}
}

func (c *blockCache) remove(e *list.Element) {
	b := c.used.Remove(e).(*cachedBlock)
	delete(c.all, b.key)
	c.size -= int64(len(b.data))
}

func (c *blockCache) drop(p *packed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, e := range c.all {
		if k.p == p {
			c.remove(e)
		}
	}
}

// writePacked writes the packed form of a sealed segment and syncs it.
func writePacked(s *segment, f File) (size int64, err error) {
	head := s.header // readers have the segment's
	foot, end, err := readFooter(s.file, s.size, &head)
	if err == nil && foot == nil {
		err = errDamaged
	}
	if err != nil {
		return 0, err
	}
	// Blocks end where records end; the footer has its own, which stays here when the records go to the store.
	var cuts []int64
	last := int64(0)
	err = decodeFooter(foot, end, func(e *entry) error {
		if at := e.off + e.size; at-last >= blockTarget {
			cuts, last = append(cuts, at), at
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	if last < end {
		cuts = append(cuts, end)
	}
	for at := end + blockTarget; at < s.size; at += blockTarget {
		cuts = append(cuts, at)
	}
	cuts = append(cuts, s.size)
	z, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
	if err != nil {
		return 0, err
	}
	defer z.Close()
	out := bytes.NewBuffer(packHeader{Num: uint64(s.num), Nonce: s.header.Nonce, Size: s.size}.encode())
	flushed := int64(0)
	flush := func() error {
		if _, err := f.WriteAt(out.Bytes(), flushed); err != nil {
			return err
		}
		flushed += int64(out.Len())
		out.Reset()
		return nil
	}
	var blocks []block
	var raw, small []byte
	from, at := int64(0), int64(segmentHeaderLen)
	for _, to := range cuts {
		n := to - from
		if int64(cap(raw)) < n {
			raw = make([]byte, n)
		}
		raw = raw[:n]
		if _, err := s.file.ReadAt(raw, from); err != nil {
			return 0, err
		}
		b := raw
		if small = z.EncodeAll(raw, small[:0]); len(small) < len(raw) {
			b = small
		}
		blocks = append(blocks, block{off: from, len: n, at: at, stored: int64(len(b)), crc: crc32.Checksum(b, castagnoli)})
		out.Write(b)
		from, at = to, at+int64(len(b))
		if out.Len() > 1<<20 {
			if err := flush(); err != nil {
				return 0, err
			}
		}
	}
	out.Write(packIndex(nil, blocks, at, s.header.Nonce))
	if err := flush(); err != nil {
		return 0, err
	}
	return flushed, f.Sync()
}

// pack replaces a sealed segment by its packed form: written aside, synced, renamed over it.
func (l *Log) pack(s *segment) error {
	return l.replace(s, func(f File) (int64, error) { return writePacked(s, f) })
}

// replace puts a file of another form, which write makes and syncs, in the place of a segment's. What it reads as is the same.
func (l *Log) replace(s *segment, write func(File) (int64, error)) error {
	name := fmt.Sprintf("%08x.tmp", s.num)
	f, err := l.fs.Create(name)
	if err != nil {
		return err
	}
	var p *packed
	size, err := write(f)
	if err == nil {
		p, err = openPacked(f, size, l.cache, l.remote(s.num))
	}
	if err == nil {
		err = l.fs.Rename(name, segmentName(s.num))
	}
	if err != nil {
		f.Close()
		return errors.Join(err, l.fs.Remove(name))
	}
	l.mu.Lock()
	old := s.file.retire()
	s.file, s.disk, s.packed, s.far = &handle{File: p}, size, true, p.head.Far > 0
	l.mu.Unlock()
	if old != nil {
		old.Close()
	}
	return l.fs.SyncDir(".")
}

// packNext is the oldest segment that is to be packed; mu is held.
func (l *Log) packNext() *segment {
	for _, s := range l.sealedByAge() {
		if !s.packed && !s.skip {
			return s
		}
	}
	return nil
}

// packFull packs the sealed segments. One that can't be is left as it is.
func (l *Log) packFull(stop func() bool) error {
	l.formMu.Lock()
	defer l.formMu.Unlock()
	for !stop() {
		l.mu.Lock()
		s := l.packNext()
		l.mu.Unlock()
		if s == nil {
			return nil
		}
		switch err := l.pack(s); {
		case errors.Is(err, errDamaged) || errors.Is(err, errFormat):
			l.log.Error("trajectory log: a segment is damaged and stays as it is", "segment", s.num, "err", err)
			l.mu.Lock()
			s.skip = true
			l.mu.Unlock()
		case noSpace(err):
			return nil // what takes no room is to be found elsewhere
		case err != nil:
			return fmt.Errorf("pack segment %s: %w", segmentName(s.num), err)
		}
	}
	return nil
}
