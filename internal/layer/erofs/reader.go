package erofs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Bounds of what a reader holds in memory, whatever an image says. A build's own bounds are below them.
const (
	maxNames      = 4 << 20
	maxNameOctets = 512 << 20
	maxXattrTotal = 256 << 20
	maxChunkTotal = 64 << 20 // entries of chunk maps
)

// Image is an image that was read. Its contents are read when they are asked for.
type Image struct {
	Root *Inode
	UUID [16]byte
	Tag  string // of the second file; "" when the image has none
	Data int64  // octets of the second file
}

// Open reads the tree of an image that a [Writer] wrote; data is the second file, nil when there is none. Hard links become names of
// one *Inode. Nothing is trusted: an image that is broken or that uses what no Writer writes is an error that wraps
// sandbox.ErrInvalid, and what is held in memory is bounded. The readers stay in use for contents: see [Content.Reader].
func Open(meta, data io.ReaderAt) (*Image, error) {
	r := &reader{meta: &cached{from: meta}, raw: meta, data: data, inodes: map[uint64]*Inode{}}
	im, err := r.open()
	if err != nil {
		return nil, fmt.Errorf("read image: %w", err)
	}
	return im, nil
}

type reader struct {
	meta   *cached
	raw    io.ReaderAt
	data   io.ReaderAt
	inodes map[uint64]*Inode

	metaStart int64
	blocks    int64 // of the first file
	device    int64 // blocks of the second
	names     int
	octets    int
	xattrs    int
	chunks    int64
}

func wrong(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, sandbox.ErrInvalid)...)
}

func (r *reader) open() (*Image, error) {
	block := make([]byte, BlockSize)
	if err := r.meta.read(block, 0); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	b := block[superOffset:]
	if le.Uint32(b[0:]) != magic || b[12] != blockBits {
		return nil, wrong("no image with blocks of %d octets", BlockSize)
	}
	want := le.Uint32(b[4:])
	le.PutUint32(b[4:], 0)
	if le.Uint32(b[8:])&compatChecksum == 0 || want != ^crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) {
		return nil, wrong("the superblock's checksum")
	}
	incompat := le.Uint32(b[80:])
	if incompat&^uint32(incompatChunked|incompatDevices) != 0 {
		return nil, wrong("features %#x are not known", incompat)
	}
	im := &Image{UUID: [16]byte(b[48:64])}
	r.blocks, r.metaStart = int64(le.Uint32(b[36:])), int64(le.Uint32(b[40:]))*BlockSize
	if devices := le.Uint16(b[86:]); incompat&incompatDevices != 0 {
		if devices != 1 || le.Uint16(b[88:]) != deviceSlot {
			return nil, wrong("%d extra devices", devices)
		}
		slot := block[deviceSlot*deviceSize:]
		im.Tag = string(bytes.TrimRight(slot[:tagSize], "\x00"))
		r.device = int64(le.Uint32(slot[tagSize:]))
		im.Data = r.device * BlockSize
	}
	var err error
	if im.Root, err = r.inode(uint64(le.Uint16(b[14:])), "", 0); err != nil {
		return nil, err
	}
	if !im.Root.IsDir() {
		return nil, wrong("the root is no folder")
	}
	return im, nil
}

// inode reads one inode and, of a folder, all below it.
func (r *reader) inode(nid uint64, path string, depth int) (*Inode, error) {
	if depth > maxDepth {
		return nil, wrong("%.200q: deeper than %d folders", path, maxDepth)
	}
	if in, ok := r.inodes[nid]; ok {
		if in.IsDir() {
			return nil, wrong("%.200q: a folder with two names", path)
		}
		return in, nil
	}
	in, err := r.one(nid, path)
	if err != nil {
		return nil, fmt.Errorf("%.200q: %w", path, err)
	}
	r.inodes[nid] = in
	for _, e := range in.layout.entries {
		child := path + "/" + e.name
		if in.Children[e.name], err = r.inode(e.nid, child, depth+1); err != nil {
			return nil, err
		}
	}
	in.layout.entries = nil
	return in, nil
}

type dirent struct {
	name string
	nid  uint64
}

func (r *reader) one(nid uint64, path string) (*Inode, error) {
	if nid > uint64(r.blocks)*BlockSize/slot {
		return nil, wrong("node number %d", nid)
	}
	at := r.metaStart + int64(nid)*slot
	b := make([]byte, inodeSize)
	if err := r.meta.read(b, at); err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	format := le.Uint16(b[0:])
	if format&formatExtended == 0 || format>>4 != 0 {
		return nil, wrong("inode format %#x", format)
	}
	kind := format >> 1
	size := int64(le.Uint64(b[8:]))
	start := le.Uint32(b[16:])
	in := &Inode{Mode: uint32(le.Uint16(b[4:])), UID: le.Uint32(b[24:]), GID: le.Uint32(b[28:]), Sec: int64(le.Uint64(b[32:])), Nsec: le.Uint32(b[40:])}
	if in.Nsec >= 1e9 {
		return nil, wrong("time with %d ns", in.Nsec)
	}
	after := at + inodeSize
	if n := int64(le.Uint16(b[2:])); n > 0 {
		area := make([]byte, xattrHeader+4*(n-1))
		if err := r.meta.read(area, after); err != nil {
			return nil, err
		}
		after += int64(len(area))
		if r.xattrs += len(area); r.xattrs > maxXattrTotal {
			return nil, wrong("attributes over %d octets", maxXattrTotal)
		}
		var err error
		if in.Xattrs, err = decodeXattrs(area); err != nil {
			return nil, err
		}
	}
	switch in.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if size < 0 || size > MaxFile {
			return nil, wrong("file of %d octets", size)
		}
		return in, r.content(in, kind, size, start, after)
	case unix.S_IFLNK:
		if size <= 0 || size >= BlockSize {
			return nil, wrong("link target of %d octets", size)
		}
		b, err := r.inlined(kind, size, start, after)
		if err == nil && bytes.IndexByte(b, 0) >= 0 {
			err = wrong("link target with a NUL octet")
		}
		in.Target = string(b)
		return in, err
	case unix.S_IFDIR:
		if size <= 0 || size > maxNameOctets {
			return nil, wrong("folder of %d octets", size)
		}
		b, err := r.inlined(kind, size, start, after)
		if err != nil {
			return nil, err
		}
		in.Children = map[string]*Inode{}
		in.layout.entries, err = r.decodeDir(b)
		return in, err
	case unix.S_IFCHR, unix.S_IFBLK:
		in.Major, in.Minor = start>>8&0xfff, start&0xff|start>>12&0xfff00
		return in, nil
	case unix.S_IFIFO, unix.S_IFSOCK:
		return in, nil
	}
	return nil, wrong("file type %#o", in.Mode)
}

// inlined reads the octets of a folder or link: whole blocks from start on, and behind the inode the rest.
func (r *reader) inlined(kind uint16, size int64, start uint32, after int64) ([]byte, error) {
	if kind != layoutPlain && kind != layoutInline {
		return nil, wrong("layout %d of a folder or link", kind)
	}
	whole := size
	if kind == layoutInline {
		whole -= size % BlockSize
	}
	if int64(start)+blocks(whole) > r.blocks && whole > 0 {
		return nil, wrong("blocks from %d on", start)
	}
	// An image that claims more than its file holds fails before memory is taken for it.
	if whole > 0 {
		if err := r.meta.read(make([]byte, 1), int64(start)*BlockSize+whole-1); err != nil {
			return nil, err
		}
	}
	b := make([]byte, size)
	if err := r.meta.read(b[:whole], int64(start)*BlockSize); err != nil {
		return nil, err
	}
	return b, r.meta.read(b[whole:], after)
}

func (r *reader) decodeDir(b []byte) ([]dirent, error) {
	var list []dirent
	dots := 0
	last := ""
	for len(b) > 0 {
		block := b[:min(BlockSize, len(b))]
		b = b[len(block):]
		if len(block) < direntSize {
			return nil, wrong("folder's block of %d octets", len(block))
		}
		le := binary.LittleEndian
		first := int(le.Uint16(block[8:]))
		if first < direntSize || first%direntSize != 0 || first > len(block) {
			return nil, wrong("folder's first name at %d", first)
		}
		count := first / direntSize
		for i := range count {
			e := block[i*direntSize:]
			from, to := int(le.Uint16(e[8:])), len(block)
			if i+1 < count {
				to = int(le.Uint16(block[(i+1)*direntSize+8:]))
			}
			if from < first || to < from || to > len(block) {
				return nil, wrong("folder's name at %d to %d", from, to)
			}
			name := block[from:to]
			if i+1 == count {
				name = bytes.TrimRight(name, "\x00")
			}
			if len(name) == 0 || len(name) > maxName || bytes.IndexByte(name, 0) >= 0 || bytes.IndexByte(name, '/') >= 0 {
				return nil, wrong("folder's name %.80q", name)
			}
			s := string(name)
			if s <= last {
				return nil, wrong("folder's names %.80q and %.80q are out of order", last, s)
			}
			last = s
			if s == "." || s == ".." {
				dots++
				continue
			}
			r.names++
			r.octets += len(name)
			if r.names > maxNames || r.octets > maxNameOctets {
				return nil, wrong("over %d names or %d octets of names", maxNames, maxNameOctets)
			}
			list = append(list, dirent{s, le.Uint64(e)})
		}
	}
	if dots != 2 {
		return nil, wrong("folder without . and ..")
	}
	return list, nil
}

// content finds where a file's octets are.
func (r *reader) content(in *Inode, kind uint16, size int64, start uint32, after int64) error {
	c := &in.Data
	c.Size = size
	if size == 0 {
		return nil
	}
	switch kind {
	case layoutPlain:
		if int64(start)+blocks(size) > r.blocks {
			return wrong("blocks from %d on", start)
		}
		c.block, c.from = start, r.raw
		return nil
	case layoutChunks:
	default:
		return wrong("layout %d of a file", kind)
	}
	indexes := start&chunkIndexes != 0
	bits := start&0x1f + blockBits
	if start&^uint32(chunkIndexes|0x1f) != 0 || bits > 43 {
		return wrong("chunk format %#x", start)
	}
	entry := int64(4)
	limit := r.blocks
	c.from = r.raw
	if indexes {
		entry, limit = 8, r.device
		after = align(after, 8)
		c.from = r.data
	}
	count := (size + 1<<bits - 1) >> bits
	if r.chunks += count; count > maxChunkTotal || r.chunks > maxChunkTotal {
		return wrong("chunk maps over %d entries", maxChunkTotal)
	}
	if err := r.meta.read(make([]byte, 1), after+count*entry-1); err != nil {
		return err
	}
	b := make([]byte, count*entry)
	if err := r.meta.read(b, after); err != nil {
		return err
	}
	c.chunkBits = uint8(bits)
	c.chunks = make([]uint32, count)
	for i := range c.chunks {
		e := b[int64(i)*entry:]
		address := binary.LittleEndian.Uint32(e[entry-4:])
		c.chunks[i] = address
		if address == noBlock {
			continue
		}
		if indexes && (binary.LittleEndian.Uint16(e) != 0 || binary.LittleEndian.Uint16(e[2:]) != 1) {
			return wrong("chunk %d of device %d", i, binary.LittleEndian.Uint16(e[2:]))
		}
		if int64(address)+blocks(min(size-int64(i)<<bits, 1<<bits)) > limit {
			return wrong("chunk %d at block %d", i, address)
		}
	}
	if indexes && count == 1 && c.chunks[0] != noBlock {
		c.block, c.chunks, c.chunkBits = c.chunks[0], nil, 0
	}
	return nil
}

func decodeXattrs(b []byte) ([]Xattr, error) {
	if b[4] != 0 {
		return nil, wrong("shared attributes")
	}
	b = b[xattrHeader:]
	var list []Xattr
	for len(b) >= 4 {
		n, index, size := int(b[0]), b[1], int(binary.LittleEndian.Uint16(b[2:]))
		used := (4 + n + size + 3) &^ 3
		if used > len(b) {
			return nil, wrong("attribute of %d octets", n+size)
		}
		prefix, whole := "", false
		for _, ns := range namespaces {
			if ns.index == index {
				prefix, whole = ns.prefix, ns.whole
			}
		}
		name := string(b[4 : 4+n])
		if prefix == "" || whole != (n == 0) || strings.IndexByte(name, 0) >= 0 {
			return nil, wrong("attribute %.40q of namespace %d", name, index)
		}
		list = append(list, Xattr{prefix + name, bytes.Clone(b[4+n : 4+n+size])})
		b = b[used:]
	}
	if len(b) != 0 {
		return nil, wrong("attributes end in the middle")
	}
	sort.Slice(list, func(i, j int) bool { return list[i].Name < list[j].Name })
	for i := 1; i < len(list); i++ {
		if list[i].Name == list[i-1].Name {
			return nil, wrong("attribute %.40q twice", list[i].Name)
		}
	}
	return list, nil
}

// Reader reads a content of an image that was opened, holes as zeros. It needs the image's files, and is nil for a content that was
// only written.
func (c Content) Reader() *io.SectionReader {
	if c.Size == 0 {
		return io.NewSectionReader(bytes.NewReader(nil), 0, 0)
	}
	if _, stored := c.Start(); stored && c.from == nil {
		return nil
	}
	return io.NewSectionReader(contentReader{c}, 0, c.Size)
}

type contentReader struct{ c Content }

func (r contentReader) ReadAt(p []byte, off int64) (int, error) {
	c := r.c
	if off < 0 {
		return 0, fmt.Errorf("read content at %d: %w", off, sandbox.ErrInvalid)
	}
	done := 0
	for done < len(p) {
		at := off + int64(done)
		if at >= c.Size {
			return done, io.EOF
		}
		part := p[done:min(int64(len(p)), int64(done)+c.Size-at)]
		from := int64(c.block)*BlockSize + at
		if c.chunks != nil {
			i := at >> c.chunkBits
			within := at - i<<c.chunkBits
			part = part[:min(int64(len(part)), 1<<c.chunkBits-within)]
			if c.chunks[i] == noBlock {
				clear(part)
				done += len(part)
				continue
			}
			from = int64(c.chunks[i])*BlockSize + within
		}
		n, err := c.from.ReadAt(part, from)
		done += n
		if n < len(part) {
			if err == nil || errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF // the file is shorter than its image says
			}
			return done, fmt.Errorf("read content: %w", err)
		}
	}
	return done, nil
}

// cached reads through a small cache of pages: inodes lie beside each other.
type cached struct {
	from  io.ReaderAt
	pages [64]page
}

type page struct {
	at   int64 // offset / pageSize + 1; 0 is empty
	data []byte
}

const pageSize = 16 << 10

func (c *cached) read(p []byte, off int64) error {
	for len(p) > 0 {
		if off < 0 {
			return wrong("offset %d", off)
		}
		n := off / pageSize
		pg := &c.pages[n%int64(len(c.pages))]
		if pg.at != n+1 {
			if pg.data == nil {
				pg.data = make([]byte, pageSize)
			}
			pg.at = 0
			k, err := c.from.ReadAt(pg.data[:pageSize], n*pageSize)
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			clear(pg.data[k:])
			pg.at = n + 1
			if k < pageSize { // the file's last page: keep what there is
				pg.data = pg.data[:k]
			} else {
				pg.data = pg.data[:pageSize]
			}
		}
		within := int(off % pageSize)
		if within >= len(pg.data) {
			return fmt.Errorf("offset %d is behind the end: %w", off, sandbox.ErrInvalid)
		}
		k := copy(p, pg.data[within:])
		p = p[k:]
		off += int64(k)
	}
	return nil
}
