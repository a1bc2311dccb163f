package blob

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Data is a blob: a layer's contents, as its descriptor tells.
type Data struct {
	Digest string `json:"digest"`        // "sha256:<hex>" of all octets, which lie in the store as blobs/<hex>
	Size   int64  `json:"size"`          // octets
	Units  string `json:"units"`         // "sha256:<hex>" of the list of the units' digests, the object blobs/<hex>
	Hot    int64  `json:"hot,omitempty"` // octets in front that are worth fetching at once
}

const (
	// UnitSize is how much is fetched at once and checked by one digest, in octets; the last unit may be short.
	UnitSize = 1 << 20
	// MaxSize bounds a blob, in octets. Its list of units then has 8 MiB.
	MaxSize = 1 << 38

	digestSize = sha256.Size
	prefix     = "sha256:"
)

func (d Data) check() error {
	if _, err := hexOf(d.Digest); err != nil {
		return fmt.Errorf("blob: %w", err)
	}
	if _, err := hexOf(d.Units); err != nil {
		return fmt.Errorf("blob %s: list of units: %w", d.Digest, err)
	}
	if d.Size < 1 || d.Size > MaxSize {
		return fmt.Errorf("blob %s: size %d: want 1 to %d octets: %w", d.Digest, d.Size, int64(MaxSize), sandbox.ErrInvalid)
	}
	if d.Hot < 0 || d.Hot > d.Size {
		return fmt.Errorf("blob %s: hot %d: want 0 to its size: %w", d.Digest, d.Hot, sandbox.ErrInvalid)
	}
	return nil
}

// count is the number of units.
func (d Data) count() int { return int((d.Size + UnitSize - 1) / UnitSize) }

// unitLen is the length of unit i, in octets.
func (d Data) unitLen(i int) int { return int(min(UnitSize, d.Size-int64(i)*UnitSize)) }

func hexOf(digest string) (string, error) {
	h, ok := strings.CutPrefix(digest, prefix)
	if ok && len(h) == 2*digestSize && h == strings.ToLower(h) {
		if _, err := hex.DecodeString(h); err == nil {
			return h, nil
		}
	}
	return "", fmt.Errorf("digest %.80q: want sha256: and 64 lower-case hex digits: %w", digest, sandbox.ErrInvalid)
}

func key(digest string) string { return "blobs/" + strings.TrimPrefix(digest, prefix) }

// nodeOf is the node of a blob, from its digest alone: a daemon that takes over knows the numbers that the kernel holds.
func nodeOf(h string) uint64 {
	b, err := hex.DecodeString(h[:16])
	if err != nil {
		return 0
	}
	if n := binary.BigEndian.Uint64(b); n > rootNode {
		return n
	}
	return rootNode + 1
}

func markOf(text string) []byte {
	h := sha256.Sum256([]byte(text))
	return h[:8]
}
