package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// The encodings of docs/format/store.md. All numbers are big-endian. What is decoded comes over the network and is hostile.
const (
	manifestMagic = "DSECMAN1"
	indexMagic    = "DSECIDX1"
	packMagic     = "DSECPAK1"

	manifestHead = 8 + 8 + 4 + 4
	indexHead    = 8 + 16 + 8 + 4
	entrySize    = 32 + 4 + 4 + 4 + 4
	// Bounds of what is decoded: a manifest of 4 Mi chunks is an object of 1 TiB.
	maxChunks    = 4 << 20
	maxPackOctet = 256 << 20
	maxChunkLen  = 8 << 20
)

type digest [32]byte
type packID [16]byte

func (p packID) String() string { return hex.EncodeToString(p[:]) }

func parsePackID(s string) (p packID, ok bool) {
	if len(s) != 2*len(p) {
		return p, false
	}
	_, err := hex.Decode(p[:], []byte(s))
	return p, err == nil && p.String() == s
}

// place is where a chunk's stored octets are.
type place struct {
	pack        packID
	off, stored uint32
}

// chunk is one of an object. Stored raw when stored equals length, as zstd otherwise.
type chunk struct {
	sum    digest
	length uint32
	place
}

type manifest struct {
	size   int64
	chunks []chunk
}

func (m *manifest) encode() []byte {
	var packs []packID
	number := map[packID]uint32{}
	for _, c := range m.chunks {
		if _, ok := number[c.pack]; !ok {
			number[c.pack] = uint32(len(packs))
			packs = append(packs, c.pack)
		}
	}
	b := make([]byte, 0, manifestHead+16*len(packs)+entrySize*len(m.chunks)+32)
	b = append(b, manifestMagic...)
	b = binary.BigEndian.AppendUint64(b, uint64(m.size))
	b = binary.BigEndian.AppendUint32(b, uint32(len(packs)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(m.chunks)))
	for _, p := range packs {
		b = append(b, p[:]...)
	}
	for _, c := range m.chunks {
		b = appendEntry(b, c, number[c.pack])
	}
	return seal(b)
}

func appendEntry(b []byte, c chunk, pack uint32) []byte {
	b = append(b, c.sum[:]...)
	for _, v := range [4]uint32{c.length, pack, c.off, c.stored} {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	return b
}

func entry(b []byte) (c chunk, pack uint32) {
	copy(c.sum[:], b)
	c.length, pack = binary.BigEndian.Uint32(b[32:]), binary.BigEndian.Uint32(b[36:])
	c.off, c.stored = binary.BigEndian.Uint32(b[40:]), binary.BigEndian.Uint32(b[44:])
	return c, pack
}

func (c *chunk) check() error {
	if c.length == 0 || c.length > maxChunkLen || c.stored == 0 || c.stored > c.length || int64(c.off)+int64(c.stored) > maxPackOctet || c.off < uint32(len(packMagic)) {
		return fmt.Errorf("a chunk of %d octets at %d+%d", c.length, c.off, c.stored)
	}
	return nil
}

func seal(b []byte) []byte {
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

func unseal(b []byte) ([]byte, bool) {
	if len(b) < 32 {
		return nil, false
	}
	body := b[:len(b)-32]
	sum := sha256.Sum256(body)
	return body, bytes.Equal(sum[:], b[len(body):])
}

func broken(what, format string, a ...any) error {
	return fmt.Errorf("%s is damaged: %s: %w", what, fmt.Sprintf(format, a...), sandbox.ErrLost)
}

// manifestSize reads the object's size from the first octets of a manifest; false when it is none.
func manifestSize(head []byte) (int64, bool) {
	if len(head) < manifestHead || string(head[:8]) != manifestMagic {
		return 0, false
	}
	n := int64(binary.BigEndian.Uint64(head[8:]))
	return n, n >= 0
}

func decodeManifest(b []byte) (*manifest, error) {
	body, ok := unseal(b)
	if !ok || len(body) < manifestHead || string(body[:8]) != manifestMagic {
		return nil, broken("manifest", "%d octets do not match their digest", len(b))
	}
	size := binary.BigEndian.Uint64(body[8:])
	packs, count := int64(binary.BigEndian.Uint32(body[16:])), int64(binary.BigEndian.Uint32(body[20:]))
	if count > maxChunks || packs > count || int64(len(body)) != manifestHead+16*packs+entrySize*count {
		return nil, broken("manifest", "%d packs and %d chunks in %d octets", packs, count, len(b))
	}
	names := make([]packID, packs)
	at := body[manifestHead:]
	for i := range names {
		copy(names[i][:], at)
		at = at[16:]
	}
	m := &manifest{size: int64(size), chunks: make([]chunk, count)}
	sum := uint64(0)
	for i := range m.chunks {
		c, n := entry(at)
		at = at[entrySize:]
		if err := c.check(); err != nil {
			return nil, broken("manifest", "%v", err)
		}
		if int64(n) >= packs {
			return nil, broken("manifest", "pack %d of %d", n, packs)
		}
		c.pack = names[n]
		m.chunks[i] = c
		sum += uint64(c.length)
	}
	if sum != size {
		return nil, broken("manifest", "chunks of %d octets for %d", sum, size)
	}
	return m, nil
}

// encodeIndex lists the chunks of one pack of the size.
func encodeIndex(p packID, size int64, chunks []chunk) []byte {
	b := make([]byte, 0, indexHead+entrySize*len(chunks)+32)
	b = append(b, indexMagic...)
	b = append(b, p[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(size))
	b = binary.BigEndian.AppendUint32(b, uint32(len(chunks)))
	for _, c := range chunks {
		b = appendEntry(b, c, 0)
	}
	return seal(b)
}

func decodeIndex(b []byte, want packID) (size int64, chunks []chunk, err error) {
	what := "index of pack " + want.String()
	body, ok := unseal(b)
	if !ok || len(body) < indexHead || string(body[:8]) != indexMagic || !bytes.Equal(body[8:24], want[:]) {
		return 0, nil, broken(what, "%d octets do not match their digest or their name", len(b))
	}
	total, count := binary.BigEndian.Uint64(body[24:]), int64(binary.BigEndian.Uint32(body[32:]))
	if total > maxPackOctet || count > maxChunks || int64(len(body)) != indexHead+entrySize*count {
		return 0, nil, broken(what, "%d chunks in %d octets", count, len(b))
	}
	chunks = make([]chunk, count)
	for i := range chunks {
		c, _ := entry(body[indexHead+entrySize*i:])
		if err := c.check(); err != nil || uint64(c.off)+uint64(c.stored) > total {
			return 0, nil, broken(what, "chunk at %d+%d of %d: %v", c.off, c.stored, total, err)
		}
		c.pack = want
		chunks[i] = c
	}
	return int64(total), chunks, nil
}
