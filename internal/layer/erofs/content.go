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

	block     uint32   // of the first octet when there are no holes
	chunks    []uint32 // block of each chunk when there are
	chunkBits uint8
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

// Writer writes one image.
type Writer struct {
	out  Output
	next int64 // first free block
	seen map[[sha256.Size]byte]Content
	buf  []byte
	zero []byte
}

// NewWriter starts an image on an empty file.
func NewWriter(out Output) *Writer {
	return &Writer{out: out, next: 1, seen: map[[sha256.Size]byte]Content{}}
}

// Size is how much of the file is taken so far, in octets.
func (w *Writer) Size() int64 { return w.next * BlockSize }

func blocks(octets int64) int64 { return (octets + BlockSize - 1) / BlockSize }

// Add reads exactly size octets of r into the image. It returns io.ErrUnexpectedEOF, wrapped, when r ends early.
func (w *Writer) Add(r io.Reader, size int64) (Content, error) {
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
			if _, err := w.out.WriteAt(w.buf[from:end], w.next*BlockSize); err != nil {
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
