package vmm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// The part of qcow2 that we need: an empty image over another, and a look at one that somebody brings.
const (
	qcowMagic   = "QFI\xfb"
	qcowCluster = 64 << 10
	qcowHeader  = 104
	// qcowMapped is what one entry of the first table maps: a table of a cluster's size, of 8 octets a cluster.
	qcowMapped = qcowCluster / 8 * qcowCluster
	// MaxImage bounds a disk of the user's, in octets.
	MaxImage = 4 << 40
)

// Features of a header that we let QEMU read: how clusters are compressed (8) and divided (16). Not: 1 and 2, an image that was not closed or is
// broken; 4, contents in a file of another name.
const qcowFeatures = 8 | 16

// ImageSize is the size, in octets, of the disk that a file holds, and whether it is qcow2; any other is raw. A qcow2 that names other files is
// refused: they would be the host's.
func ImageSize(f *os.File) (size int64, qcow bool, err error) {
	st, err := f.Stat()
	if err != nil {
		return 0, false, err
	}
	h := make([]byte, qcowHeader)
	n, err := f.ReadAt(h, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, false, err
	}
	if n < 4 || string(h[:4]) != qcowMagic {
		size = (st.Size() + 511) &^ 511
		if size == 0 || size > MaxImage {
			err = fmt.Errorf("a disk of %d octets: 1 to %d: %w", st.Size(), int64(MaxImage), sandbox.ErrInvalid)
		} else {
			err = nil
		}
		return size, false, err
	}
	size, err = qcowSize(h[:n])
	return size, true, err
}

func qcowSize(h []byte) (int64, error) {
	bad := func(format string, a ...any) (int64, error) {
		return 0, fmt.Errorf("qcow2: "+format+": %w", append(a, sandbox.ErrInvalid)...)
	}
	if len(h) < 72 {
		return bad("a header of %d octets", len(h))
	}
	be := binary.BigEndian
	version, size := be.Uint32(h[4:]), be.Uint64(h[24:])
	switch {
	case version != 2 && version != 3:
		return bad("version %d, want 2 or 3", version)
	case be.Uint64(h[8:]) != 0:
		return bad("it names a file below it (backing file); make one that stands alone: qemu-img convert")
	case be.Uint32(h[32:]) != 0:
		return bad("it is encrypted")
	case size == 0 || size > MaxImage:
		return bad("a disk of %d octets: 1 to %d", size, int64(MaxImage))
	}
	if version == 3 {
		if len(h) < qcowHeader {
			return bad("a header of %d octets", len(h))
		}
		if f := be.Uint64(h[72:]); f&^qcowFeatures != 0 {
			return bad("features %#x: it was not closed, is broken or has its contents in another file; make it anew: qemu-img convert", f&^qcowFeatures)
		}
	}
	return int64(size), nil
}

// WriteOverlay makes an empty file an image of size octets that holds nothing: what is not written to it is read from the one below. The file has
// limit octets from then on, with a hole for what is not used yet; QEMU is told never to go beyond.
func WriteOverlay(f *os.File, size, limit int64) error {
	size = (size + 511) &^ 511
	if size <= 0 || size > MaxImage {
		return fmt.Errorf("image of %d octets: 1 to %d: %w", size, int64(MaxImage), sandbox.ErrInvalid)
	}
	entries := (size + qcowMapped - 1) / qcowMapped
	tables := (entries*8 + qcowCluster - 1) / qcowCluster
	used := 3 + tables // the header, the table of counts, its first block, the first table
	if min := (used + 4) * qcowCluster; limit < min {
		return fmt.Errorf("disk limit of %d octets: at least %d: %w", limit, min, sandbox.ErrInvalid)
	}
	be := binary.BigEndian
	h := make([]byte, qcowHeader+8) // and the end of the extensions
	copy(h, qcowMagic)
	be.PutUint32(h[4:], 3)
	be.PutUint32(h[20:], 16) // bits of a cluster
	be.PutUint64(h[24:], uint64(size))
	be.PutUint32(h[36:], uint32(entries))
	be.PutUint64(h[40:], 3*qcowCluster)
	be.PutUint64(h[48:], qcowCluster)
	be.PutUint32(h[56:], 1)
	be.PutUint32(h[96:], 4) // counts of 16 bits
	be.PutUint32(h[100:], qcowHeader)
	table := be.AppendUint64(nil, 2*qcowCluster)
	var counts []byte
	for range used {
		counts = be.AppendUint16(counts, 1)
	}
	err := f.Truncate(limit)
	for at, part := range [][]byte{h, table, counts} {
		_, e := f.WriteAt(part, int64(at)*qcowCluster)
		err = errors.Join(err, e)
	}
	return err
}
