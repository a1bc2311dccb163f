package erofs

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	magic       = 0xE0F5E1E2
	superOffset = 1024
	superSize   = 128

	compatChecksum   = 0x1
	compatMtime      = 0x2
	incompatChunked  = 0x4
	incompatDevices  = 0x8
	chunkIndexes     = 0x20 // of a chunk format: entries of 8 octets, which name a device
	deviceSlot       = 9    // of the table of devices, right behind the superblock, in units of deviceSize
	deviceSize       = 128
	tagSize          = 64
	inodeSize        = 64 // the extended form: 32-bit ids and a time of its own
	slot             = 32 // unit of node numbers
	direntSize       = 12
	layoutPlain      = 0
	layoutInline     = 2
	layoutChunks     = 4
	formatExtended   = 1
	maxName          = 255
	maxDepth         = 4096
	firstInodeOffset = 64 // node number 0 would be inode number 0, which readers of folders skip
)

// layout is where Finish puts an inode and what belongs to it.
type layout struct {
	kind   uint16
	at     int64 // offset in the inode area
	block  int64 // of a folder's or link's whole blocks
	blocks int64
	size   int64
	xattrs []byte
	names  []string // of a folder, with "." and ".."
	parent *Inode

	entries []dirent // of a folder that is being read
}

// Finish writes the metadata of the tree and the superblock, and cuts the file to the image's size, which it returns. The
// caller syncs. It may be called once.
func (w *Writer) Finish(root *Inode, uuid [16]byte) (int64, error) {
	if root == nil || !root.IsDir() {
		return 0, fmt.Errorf("image: the root must be a folder: %w", sandbox.ErrInvalid)
	}
	if w.Split() && (!w.end || w.used > 0 && w.tag == "") {
		return 0, fmt.Errorf("image: data has not been ended and named: %w", sandbox.ErrState)
	}
	f := &finisher{w: w}
	if err := f.collect(root, root, "", 0); err != nil {
		return 0, err
	}
	f.place()
	if f.metaBlock+blocks(f.metaSize) >= noBlock {
		return 0, fmt.Errorf("image over 16 TiB: %w", sandbox.ErrExhausted)
	}
	if err := f.write(); err != nil {
		return 0, err
	}
	total := f.metaBlock + blocks(f.metaSize)
	if err := w.out.Truncate(total * BlockSize); err != nil {
		return 0, fmt.Errorf("cut image: %w", err)
	}
	if _, err := w.out.WriteAt(f.super(root, total, uuid), 0); err != nil {
		return 0, fmt.Errorf("write superblock: %w", err)
	}
	if !w.Split() {
		w.next = total
	}
	return total * BlockSize, nil
}

type finisher struct {
	w         *Writer
	inodes    []*Inode // in the order of first visit, the root first: its number has only 16 bits
	chunked   bool
	dirBlock  int64
	metaBlock int64
	metaSize  int64
}

// collect lists the inodes, counts links and works out the sizes.
func (f *finisher) collect(in, parent *Inode, path string, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%.200q: deeper than %d folders: %w", path, maxDepth, sandbox.ErrInvalid)
	}
	if in.links > 0 {
		if in.IsDir() {
			return fmt.Errorf("%q: a folder with two names: %w", path, sandbox.ErrInvalid)
		}
		in.links++
		return nil
	}
	in.links = 1
	f.inodes = append(f.inodes, in)
	l := &in.layout
	var err error
	if l.xattrs, err = encodeXattrs(in.Xattrs); err != nil {
		return fmt.Errorf("%q: %w", path, err)
	}
	switch in.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		l.size = in.Data.Size
		if in.Data.chunks != nil || f.w.Split() && l.size > 0 {
			l.kind = layoutChunks
			f.chunked = true
		}
	case unix.S_IFLNK:
		l.size = int64(len(in.Target))
		if l.size == 0 || l.size >= BlockSize {
			return fmt.Errorf("%q: link target of %d octets: %w", path, l.size, sandbox.ErrInvalid)
		}
	case unix.S_IFDIR:
		in.links = 2
		l.parent = parent
		l.names = append(in.Names(), ".", "..")
		sortNames(l.names)
		l.size = dirSize(l.names)
		for _, name := range in.Names() {
			if len(name) == 0 || len(name) > maxName || name == "." || name == ".." {
				return fmt.Errorf("%q: name %.80q can't be in an image: %w", path, name, sandbox.ErrInvalid)
			}
			child := in.Children[name]
			if child.IsDir() {
				in.links++
			}
			if err := f.collect(child, in, path+"/"+name, depth+1); err != nil {
				return err
			}
		}
	case unix.S_IFCHR, unix.S_IFBLK, unix.S_IFIFO, unix.S_IFSOCK:
	default:
		return fmt.Errorf("%q: file type %#o: %w", path, in.Mode, sandbox.ErrInvalid)
	}
	return nil
}

// sortNames puts the two dots, which were appended to a sorted list, where the octets' order wants them.
func sortNames(names []string) {
	for i := len(names) - 2; i < len(names); i++ {
		for j := i; j > 0 && names[j] < names[j-1]; j-- {
			names[j], names[j-1] = names[j-1], names[j]
		}
	}
}

// place gives every inode its number and every folder its blocks.
func (f *finisher) place() {
	f.dirBlock = f.w.next
	if f.w.Split() {
		f.dirBlock = 1
	}
	next := f.dirBlock
	at := int64(firstInodeOffset)
	for _, in := range f.inodes {
		l := &in.layout
		at = align(at, slot)
		body := int64(inodeSize + len(l.xattrs))
		if at%BlockSize+inodeSize > BlockSize {
			at = align(at, BlockSize)
		}
		extra := int64(0)
		switch {
		case in.IsDir() || in.Mode&unix.S_IFMT == unix.S_IFLNK:
			// The last part of a folder, or a link's target, lies behind the inode when it fits into one block there.
			tail := l.size % BlockSize
			switch {
			case tail == 0:
			case (at+body)%BlockSize+tail <= BlockSize:
				l.kind = layoutInline
			case body%BlockSize+tail <= BlockSize:
				at = align(at, BlockSize)
				l.kind = layoutInline
			}
			if l.kind == layoutInline {
				extra = tail
				l.blocks = l.size / BlockSize
			} else {
				l.blocks = blocks(l.size)
			}
			l.block = next
			next += l.blocks
		case l.kind == layoutChunks:
			extra = int64(len(f.chunkMap(in, body)))
		}
		l.at = at
		in.nid = uint64(at / slot)
		at += body + extra
	}
	f.metaBlock = next
	// fsck.erofs (1.5) reads an attribute header behind every inode, also where there is none and the image ends.
	f.metaSize = at + xattrHeader
}

func align(n, to int64) int64 { return (n + to - 1) / to * to }

// write puts out the folders' blocks and the inode area, each in order.
func (f *finisher) write() error {
	dirs := &sequence{out: f.w.out, at: f.dirBlock * BlockSize}
	meta := &sequence{out: f.w.out, at: f.metaBlock * BlockSize}
	metaStart := meta.at
	for i, in := range f.inodes {
		l := &in.layout
		var content []byte
		switch in.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			content = encodeDir(in)
		case unix.S_IFLNK:
			content = []byte(in.Target)
		}
		whole := content
		var tail []byte
		if l.kind == layoutInline {
			whole, tail = content[:l.blocks*BlockSize], content[l.blocks*BlockSize:]
		}
		if len(whole) > 0 {
			if err := dirs.write(whole); err != nil {
				return err
			}
			if err := dirs.pad(l.block*BlockSize + l.blocks*BlockSize); err != nil {
				return err
			}
		}
		if err := meta.pad(metaStart + l.at); err != nil {
			return err
		}
		if err := meta.write(f.inode(in, uint32(i+1))); err != nil {
			return err
		}
		if err := meta.write(l.xattrs); err != nil {
			return err
		}
		if err := meta.write(tail); err != nil {
			return err
		}
		if l.kind == layoutChunks {
			if err := meta.write(f.chunkMap(in, int64(inodeSize+len(l.xattrs)))); err != nil {
				return err
			}
		}
		l.names, l.xattrs = nil, nil
	}
	if err := meta.pad(metaStart + blocks(f.metaSize)*BlockSize); err != nil {
		return err
	}
	if err := dirs.flush(); err != nil {
		return err
	}
	return meta.flush()
}

// chunkMap is what follows an inode whose content lies in chunks; before are the octets of inode and attributes. In the two-file
// form a file without holes is one chunk as long as it needs.
func (f *finisher) chunkMap(in *Inode, before int64) []byte {
	le := binary.LittleEndian
	chunks := in.Data.chunks
	if !f.w.Split() {
		b := make([]byte, 0, 4*len(chunks))
		for _, c := range chunks {
			b = le.AppendUint32(b, c)
		}
		return b
	}
	if chunks == nil {
		chunks = []uint32{in.Data.block}
	}
	b := make([]byte, align(before, 8)-before, 4+8*len(chunks))
	for _, c := range chunks {
		device := uint16(1)
		if c == noBlock {
			device = 0
		}
		b = le.AppendUint16(b, 0)
		b = le.AppendUint16(b, device)
		b = le.AppendUint32(b, c)
	}
	return b
}

// chunkFormat is the chunk's size as a power of two blocks, and the entries' kind.
func (f *finisher) chunkFormat(c Content) uint16 {
	switch {
	case !f.w.Split():
		return uint16(c.chunkBits - blockBits)
	case c.chunks != nil:
		return uint16(c.chunkBits-blockBits) | chunkIndexes
	}
	n := uint16(0)
	for c.Size > BlockSize<<n {
		n++
	}
	return n | chunkIndexes
}

func (f *finisher) inode(in *Inode, ino uint32) []byte {
	l := &in.layout
	b := make([]byte, inodeSize)
	le := binary.LittleEndian
	le.PutUint16(b[0:], formatExtended|l.kind<<1)
	if n := len(l.xattrs); n > 0 {
		le.PutUint16(b[2:], uint16((n-xattrHeader)/4+1))
	}
	le.PutUint16(b[4:], uint16(in.Mode))
	le.PutUint64(b[8:], uint64(l.size))
	switch in.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if l.kind == layoutChunks {
			le.PutUint16(b[16:], f.chunkFormat(in.Data))
		} else if l.size > 0 {
			le.PutUint32(b[16:], in.Data.block)
		}
	case unix.S_IFDIR, unix.S_IFLNK:
		if l.blocks > 0 {
			le.PutUint32(b[16:], uint32(l.block))
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		// The kernel's new_encode_dev.
		le.PutUint32(b[16:], in.Minor&0xff|in.Major<<8|(in.Minor&^0xff)<<12)
	}
	le.PutUint32(b[20:], ino)
	le.PutUint32(b[24:], in.UID)
	le.PutUint32(b[28:], in.GID)
	le.PutUint64(b[32:], uint64(in.Sec))
	le.PutUint32(b[40:], in.Nsec)
	le.PutUint32(b[44:], in.links)
	return b
}

// dirRuns calls emit for each block of a folder with the names in it and the octets they take.
func dirRuns(names []string, emit func(names []string, used int)) {
	from, used := 0, 0
	for i, n := range names {
		need := direntSize + len(n)
		if used+need > BlockSize {
			emit(names[from:i], used)
			from, used = i, 0
		}
		used += need
	}
	emit(names[from:], used)
}

func dirSize(names []string) int64 {
	var size, last int64
	dirRuns(names, func(_ []string, used int) {
		size += BlockSize
		last = int64(used)
	})
	return size - BlockSize + last
}

func encodeDir(in *Inode) []byte {
	l := &in.layout
	b := make([]byte, 0, l.size)
	dirRuns(l.names, func(names []string, used int) {
		for len(b)%BlockSize != 0 {
			b = append(b, 0)
		}
		offset := direntSize * len(names)
		for _, n := range names {
			child := in.Children[n]
			switch n {
			case ".":
				child = in
			case "..":
				child = l.parent
			}
			b = binary.LittleEndian.AppendUint64(b, child.nid)
			b = binary.LittleEndian.AppendUint16(b, uint16(offset))
			b = append(b, fileType(child.Mode), 0)
			offset += len(n)
		}
		for _, n := range names {
			b = append(b, n...)
		}
	})
	return b
}

func (f *finisher) super(root *Inode, total int64, uuid [16]byte) []byte {
	block := make([]byte, BlockSize)
	b := block[superOffset:]
	le := binary.LittleEndian
	le.PutUint32(b[0:], magic)
	le.PutUint32(b[8:], compatChecksum|compatMtime)
	b[12] = blockBits
	le.PutUint16(b[14:], uint16(root.nid))
	le.PutUint64(b[16:], uint64(len(f.inodes)))
	le.PutUint32(b[36:], uint32(total))
	le.PutUint32(b[40:], uint32(f.metaBlock))
	copy(b[48:64], uuid[:])
	incompat := uint32(0)
	if f.chunked {
		incompat |= incompatChunked
	}
	if f.w.used > 0 {
		incompat |= incompatDevices
		le.PutUint16(b[86:], 1)
		le.PutUint16(b[88:], deviceSlot)
		slot := block[deviceSlot*deviceSize:]
		copy(slot[:tagSize], f.w.tag)
		le.PutUint32(slot[tagSize:], uint32(f.w.used))
		// Behind all that meta has, so that no address means both. Nothing uses it: chunks name the device.
		le.PutUint32(slot[tagSize+4:], uint32(total))
	}
	le.PutUint32(b[80:], incompat)
	// The kernel's crc32c has no final inversion.
	le.PutUint32(b[4:], ^crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return block
}

// sequence writes forward from an offset through a buffer.
type sequence struct {
	out io.WriterAt
	at  int64 // of the buffer's first octet
	buf []byte
}

func (s *sequence) write(p []byte) error {
	s.buf = append(s.buf, p...)
	if len(s.buf) < bufferSize {
		return nil
	}
	return s.flush()
}

// pad writes zeros up to an offset of the file.
func (s *sequence) pad(to int64) error {
	n := to - s.at - int64(len(s.buf))
	if n < 0 {
		panic("erofs: metadata overlaps")
	}
	return s.write(make([]byte, n))
}

func (s *sequence) flush() error {
	if len(s.buf) == 0 {
		return nil
	}
	if _, err := s.out.WriteAt(s.buf, s.at); err != nil {
		return fmt.Errorf("write metadata: %w", err)
	}
	s.at += int64(len(s.buf))
	s.buf = s.buf[:0]
	return nil
}
