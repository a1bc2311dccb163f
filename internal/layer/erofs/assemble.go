package erofs

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"slices"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// ChunkSize is the size of the pieces of an [Assembly], in octets. The kernel reads far more than a page around each page of a program that
// is missing; what it reads is a tenth less than what pieces of 64 KiB around it would be.
const ChunkSize = 1 << assemblyBits

const assemblyBits = 14

// MaxAssembly is the largest content that can be assembled, in octets.
const MaxAssembly = ChunkSize * minChunks

// Assembly is a content that is put together of chunks in any order, between other contents: so the parts of a large file that are
// read first can lie in front without the rest.
type Assembly struct {
	w    *Writer
	c    Content
	have []bool
	left int
}

// Assemble starts one of size octets, from 1 to MaxAssembly.
func (w *Writer) Assemble(size int64) (*Assembly, error) {
	if w.end {
		return nil, fmt.Errorf("content after the end of data: %w", sandbox.ErrState)
	}
	if size <= 0 || size > MaxAssembly {
		return nil, fmt.Errorf("content of %d octets, want 1 to %d: %w", size, int64(MaxAssembly), sandbox.ErrInvalid)
	}
	n := int((size + ChunkSize - 1) / ChunkSize)
	return &Assembly{w: w, c: Content{Size: size, chunks: make([]uint32, n), chunkBits: assemblyBits}, have: make([]bool, n), left: n}, nil
}

// Has says whether chunk number i is there.
func (a *Assembly) Has(i int) bool { return a.have[i] }

// Put writes chunk number i behind all that was written so far; zeros become a hole. Every chunk has ChunkSize octets but the last.
func (a *Assembly) Put(i int, p []byte) error {
	want := min(a.c.Size-int64(i)*ChunkSize, ChunkSize)
	if int64(len(p)) != want || a.have[i] {
		return fmt.Errorf("chunk %d of %d octets, want %d, once: %w", i, len(p), want, sandbox.ErrInvalid)
	}
	w := a.w
	a.c.chunks[i] = noBlock
	if len(bytes.TrimLeft(p, "\x00")) > 0 {
		n := blocks(want)
		if w.next+n >= noBlock {
			return fmt.Errorf("image over 16 TiB: %w", sandbox.ErrExhausted)
		}
		if rest := n*BlockSize - want; rest > 0 {
			p = append(slices.Clone(p), make([]byte, rest)...)
		}
		if _, err := w.data.WriteAt(p, w.next*BlockSize); err != nil {
			return fmt.Errorf("write content: %w", err)
		}
		a.c.chunks[i] = uint32(w.next)
		w.next += n
	}
	a.have[i] = true
	a.left--
	return nil
}

// End is the content, whose hash the caller knows.
func (a *Assembly) End(sum [sha256.Size]byte) (Content, error) {
	if a.left > 0 {
		return Content{}, fmt.Errorf("content without %d of its chunks: %w", a.left, sandbox.ErrState)
	}
	c := a.c
	c.Sum = sum
	inOne := c.chunks[0] != noBlock
	for i, b := range c.chunks {
		inOne = inOne && b == c.chunks[0]+uint32(i)*(ChunkSize/BlockSize)
	}
	if inOne {
		c.block, c.chunks, c.chunkBits = c.chunks[0], nil, assemblyBits
	}
	if _, ok := a.w.seen[sum]; !ok {
		a.w.seen[sum] = c
	}
	return c, nil
}

// Chunks tells, for each stored run of the content, where it lies in the file that holds contents and at which offset of the content.
func (c Content) Chunks(each func(at, offset, size int64)) {
	if c.chunks == nil {
		if c.Size > 0 {
			each(int64(c.block)*BlockSize, 0, c.Size)
		}
		return
	}
	for i, b := range c.chunks {
		if b != noBlock {
			offset := int64(i) << c.chunkBits
			each(int64(b)*BlockSize, offset, min(c.Size-offset, 1<<c.chunkBits))
		}
	}
}
