package erofs

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// BlockSize is the size of a block in octets. It must not be above the page size of any host.
const BlockSize = 4096

const (
	blockBits = 12
	noBlock   = math.MaxUint32 // a chunk that is a hole

	// Holes are found in chunks of 64 KiB; in files over minChunks chunks the chunk grows, so that the chunk map stays small.
	minChunkBits = 16
	minChunks    = 1 << 20
	maxChunkBits = 24

	// MaxFile is the largest file, in octets of apparent size.
	MaxFile = 1 << 43

	bufferSize = 1 << 20
)

// Output is where an image is written: a file.
type Output interface {
	io.WriterAt
	Truncate(size int64) error
}

// Content is a file's content in the image.
type Content struct {
	Size int64
	Sum  [sha256.Size]byte // of all octets, holes read as zeros

	block     uint32   // of the first octet when there are no holes, in the file that holds contents
	chunks    []uint32 // block of each chunk when there are
	chunkBits uint8
	from      io.ReaderAt // of a content that was read: the file that holds it
}

// Stored is the space the content takes in the image, in octets.
func (c Content) Stored() int64 {
	if c.chunks == nil {
		return blocks(c.Size) * BlockSize
	}
	var n int64
	for i, b := range c.chunks {
		if b != noBlock {
			n += blocks(min(c.Size-int64(i)<<c.chunkBits, 1<<c.chunkBits)) * BlockSize
		}
	}
	return n
}

// Start is where the content's first octet lies in the file that holds contents; false when nothing of it is stored.
func (c Content) Start() (int64, bool) {
	if c.chunks == nil {
		return int64(c.block) * BlockSize, c.Size > 0
	}
	for _, b := range c.chunks {
		if b != noBlock {
			return int64(b) * BlockSize, true
		}
	}
	return 0, false
}

// Writer writes one image.
type Writer struct {
	out  Output
	data Output // of contents: out in the one-file form
	next int64  // first free block of data
	tag  string // of the second file; see EndData
	used int64  // blocks of the second file; 0 when there is none
	end  bool
	seen map[[sha256.Size]byte]Content
	buf  []byte
	zero []byte
}

// NewWriter starts an image on an empty file: the one-file form.
func NewWriter(out Output) *Writer {
	return &Writer{out: out, data: out, next: 1, seen: map[[sha256.Size]byte]Content{}}
}

// NewSplitWriter starts an image on two empty files: the contents of files go into data, all else into meta. Call EndData before
// Finish.
func NewSplitWriter(meta, data Output) *Writer {
	return &Writer{out: meta, data: data, seen: map[[sha256.Size]byte]Content{}}
}

// Split reports whether contents go into a file of their own.
func (w *Writer) Split() bool { return w.data != w.out }

// Size is how much of the file that holds contents is taken so far, in octets.
func (w *Writer) Size() int64 { return w.next * BlockSize }

// EndData cuts the second file to its size, which it returns. The caller digests it and names it with SetTag: the tag is part of
// meta, so that a digest of meta vouches for data too. After it no content can be added.
func (w *Writer) EndData() (int64, error) {
	if !w.Split() || w.end {
		return 0, fmt.Errorf("image: no second file, or ended before: %w", sandbox.ErrState)
	}
	if err := w.data.Truncate(w.next * BlockSize); err != nil {
		return 0, fmt.Errorf("cut data: %w", err)
	}
	w.end, w.used = true, w.next
	return w.used * BlockSize, nil
}

// SetTag names the second file, by convention with the hexadecimal digits of its sha256.
func (w *Writer) SetTag(tag string) error {
	if len(tag) == 0 || len(tag) > tagSize {
		return fmt.Errorf("image: tag of %d octets, want 1 to %d: %w", len(tag), tagSize, sandbox.ErrInvalid)
	}
	w.tag = tag
	return nil
}

func blocks(octets int64) int64 { return (octets + BlockSize - 1) / BlockSize }

// ErrHoles means that a content has more holes than it may.
var ErrHoles = errors.New("too many holes")

// Add reads exactly size octets of r into the image. It returns io.ErrUnexpectedEOF, wrapped, when r ends early.
func (w *Writer) Add(r io.Reader, size int64) (Content, error) {
	c, _, err := w.AddWithin(r, size, math.MaxInt64)
	return c, err
}

// AddWithin is Add for a content with at most so many octets of holes, of which it returns the number; ErrHoles when it has more.
func (w *Writer) AddWithin(r io.Reader, size, maxHoles int64) (c Content, holed int64, err error) {
	c, err = w.add(r, size, maxHoles, &holed)
	return c, holed, err
}

func (w *Writer) add(r io.Reader, size, maxHoles int64, holed *int64) (Content, error) {
	if w.end {
		return Content{}, fmt.Errorf("content after the end of data: %w", sandbox.ErrState)
	}
	if size < 0 || size > MaxFile {
		return Content{}, fmt.Errorf("content of %d octets, at most %d: %w", size, int64(MaxFile), sandbox.ErrInvalid)
	}
	bits := uint8(minChunkBits)
	for bits < maxChunkBits && size>>bits > minChunks {
		bits++
	}
	chunk := int64(1) << bits
	if int64(len(w.buf)) < max(bufferSize, chunk) {
		w.buf = make([]byte, max(bufferSize, chunk))
		w.zero = make([]byte, max(bufferSize, chunk))
	}

	c := Content{Size: size, chunkBits: bits, block: uint32(w.next)}
	start := w.next
	hash := sha256.New()
	var chunks []uint32
	holes := false
	for done := int64(0); done < size; {
		part := w.buf[:min(int64(len(w.buf)), size-done)]
		if _, err := io.ReadFull(r, part); err != nil {
			w.next = start
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return Content{}, fmt.Errorf("read content: %w", err)
		}
		hash.Write(part)
		done += int64(len(part))
		// Neighbouring chunks that are not holes go out in one write.
		from := 0
		flush := func(to int) error {
			if to == from {
				return nil
			}
			// Only the file's last chunk is not whole blocks; what follows it in the buffer is padding.
			end := int(blocks(int64(to))) * BlockSize
			clear(w.buf[to:end])
			if w.next+blocks(int64(to-from)) >= noBlock {
				return fmt.Errorf("image over 16 TiB: %w", sandbox.ErrExhausted)
			}
			if _, err := w.data.WriteAt(w.buf[from:end], w.next*BlockSize); err != nil {
				return fmt.Errorf("write content: %w", err)
			}
			w.next += int64(end-from) / BlockSize
			return nil
		}
		for at := 0; at < len(part); at += int(chunk) {
			end := min(at+int(chunk), len(part))
			if bytes.Equal(part[at:end], w.zero[:end-at]) {
				if err := flush(at); err != nil {
					w.next = start
					return Content{}, err
				}
				from = end
				holes = true
				chunks = append(chunks, noBlock)
				if *holed += int64(end - at); *holed > maxHoles {
					w.next = start
					return Content{}, ErrHoles
				}
			} else {
				chunks = append(chunks, uint32(w.next+blocks(int64(at-from))))
			}
		}
		if err := flush(len(part)); err != nil {
			w.next = start
			return Content{}, err
		}
	}
	if holes {
		c.chunks = chunks
	}
	hash.Sum(c.Sum[:0])
	if old, ok := w.seen[c.Sum]; ok {
		w.next = start // the same octets are there already: give the blocks back
		return old, nil
	}
	w.seen[c.Sum] = c
	return c, nil
}

// Copy takes over a content of another image, or of this image's earlier file, that stores it in from. Nothing is hashed again.
func (w *Writer) Copy(from io.ReaderAt, c Content) (Content, error) {
	if w.end {
		return Content{}, fmt.Errorf("content after the end of data: %w", sandbox.ErrState)
	}
	if c.Sum == [sha256.Size]byte{} {
		return Content{}, fmt.Errorf("copy of a content whose hash is not known: %w", sandbox.ErrState)
	}
	if old, ok := w.seen[c.Sum]; ok {
		return old, nil
	}
	if w.buf == nil {
		w.buf = make([]byte, bufferSize)
		w.zero = make([]byte, bufferSize)
	}
	start := w.next
	out := c
	out.block = uint32(w.next)
	copyRun := func(block uint32, octets int64) error {
		for at, end := int64(block)*BlockSize, (int64(block)+blocks(octets))*BlockSize; at < end; {
			part := w.buf[:min(bufferSize, end-at)]
			if n, err := from.ReadAt(part, at); n < len(part) {
				if err == nil || errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF
				}
				return fmt.Errorf("read content: %w", err)
			}
			if w.next+int64(len(part))/BlockSize >= noBlock {
				return fmt.Errorf("image over 16 TiB: %w", sandbox.ErrExhausted)
			}
			if _, err := w.data.WriteAt(part, w.next*BlockSize); err != nil {
				return fmt.Errorf("write content: %w", err)
			}
			w.next += int64(len(part)) / BlockSize
			at += int64(len(part))
		}
		return nil
	}
	var err error
	if c.chunks == nil {
		err = copyRun(c.block, c.Size)
	} else {
		out.chunks = make([]uint32, len(c.chunks))
		for i, b := range c.chunks {
			out.chunks[i] = noBlock
			if b == noBlock || err != nil {
				continue
			}
			out.chunks[i] = uint32(w.next)
			err = copyRun(b, min(c.Size-int64(i)<<c.chunkBits, 1<<c.chunkBits))
		}
	}
	if err != nil {
		w.next = start
		return Content{}, err
	}
	w.seen[c.Sum] = out
	return out, nil
}
