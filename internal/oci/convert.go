package oci

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// maxStream bounds a layer's tar, in octets: contents are bounded by layer.Limits, headers and padding by this.
const maxStream = 512 << 30

// record says which layer a tar became. It is the object oci/<hex of its digest>.json.
type record struct {
	DiffID   string   `json:"diff_id"`
	Layer    layer.ID `json:"layer"`
	Entries  int64    `json:"entries"`
	Bytes    int64    `json:"bytes"`
	Implicit bool     `json:"implicit,omitempty"` // it has folders without an entry of their own
}

const maxRecord = 64 << 10

func recordKey(diffID string) string { return "oci/" + strings.TrimPrefix(diffID, "sha256:") + ".json" }
func foldersKey(diffID string) string {
	return "oci/" + strings.TrimPrefix(diffID, "sha256:") + ".folders"
}

// blobOf is how one layer's octets are read: compressed or not.
type blobOf struct {
	digest string // of the octets as they come; "" when nothing vouches for them
	diffID string // of the tar
	// again is set on a layer of ours that is read as a tar again: its octets are not those that diffID is of.
	again bool
	arch  string // of its programs, as the config says
	open  func(ctx context.Context) (io.ReadCloser, error)
}

// find looks for a layer that was converted before and makes the project one that may use it.
func (im *Images) find(ctx context.Context, project, diffID string) (*record, error) {
	r, err := im.peek(ctx, diffID)
	if err != nil {
		return nil, err
	}
	// Its data may have been collected since; Hold finds out.
	if err := im.layers.Hold(ctx, project, r.Layer); err != nil {
		return nil, err
	}
	return r, nil
}

func (im *Images) peek(ctx context.Context, diffID string) (*record, error) {
	text, err := store.ReadAll(ctx, im.store, recordKey(diffID), maxRecord)
	if err != nil {
		return nil, err
	}
	r := &record{}
	if err := json.Unmarshal(text, r); err != nil || r.DiffID != diffID {
		return nil, fmt.Errorf("record of layer %s is broken: %w", diffID, sandbox.ErrNotFound) // converted again
	}
	return r, nil
}

// convert makes a layer of a tar and keeps its record. With folders it is a copy whose folders without an entry get these attributes.
func (im *Images) convert(ctx context.Context, project string, t blobOf, fix map[string]folder, progress func(int64)) (*record, error) {
	body, err := t.open(ctx)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	outer := &counted{r: body, hash: sha256.New(), progress: progress}
	plain, done, err := decompress(outer)
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", t.digest, err)
	}
	defer done()
	inner := &counted{r: plain, hash: sha256.New(), limit: maxStream}
	diffID := ""
	held := &holdZeros{r: inner, buf: make([]byte, 128<<10), verify: func() error {
		// What follows the compressed data belongs to the blob too.
		if _, err := io.Copy(io.Discard, outer); err != nil {
			return err
		}
		if got := outer.digest(); t.digest != "" && got != t.digest {
			return fmt.Errorf("layer %s: its octets have digest %s: %w", t.digest, got, sandbox.ErrInvalid)
		}
		if diffID = inner.digest(); t.again {
			diffID = t.diffID
		}
		if diffID != t.diffID {
			return fmt.Errorf("layer %s: its tar has digest %s, the config says %s: %w", t.digest, diffID, t.diffID, sandbox.ErrInvalid)
		}
		return nil
	}}
	scan := newScan()
	defer scan.stop()
	var in io.Reader = io.TeeReader(held, scan)
	if len(fix) > 0 {
		head, err := header(fix)
		if err != nil {
			return nil, err
		}
		in = io.MultiReader(bytes.NewReader(head), in)
	}
	d, err := im.layers.ImportTar(ctx, project, in, layer.Options{Source: "oci " + t.diffID, Limits: im.cfg.Limits, Arch: t.arch, Unheld: true})
	if err != nil {
		if held.err != nil && held.err != io.EOF {
			err = held.err // what the registry did wrong, not how it looked as a tar
		}
		return nil, fmt.Errorf("layer %s: %w", orDigest(t), err)
	}
	if _, err := io.Copy(io.Discard, in); err != nil { // what follows the tar's end is part of the digests
		return nil, fmt.Errorf("layer %s: %w", orDigest(t), err)
	}
	found, err := scan.result()
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", orDigest(t), err)
	}
	entries := d.Entries
	if d.Opaque { // it hides all below, also when it has nothing else
		entries++
	}
	r := &record{DiffID: diffID, Layer: d.ID, Entries: entries, Bytes: d.Bytes, Implicit: len(found.Implicit) > 0}
	if len(fix) > 0 {
		r.DiffID, r.Implicit = fixedID(diffID, fix), false
	} else if err := im.putFolders(ctx, diffID, found); err != nil {
		return nil, err
	}
	return r, im.keep(ctx, project, r)
}

func orDigest(t blobOf) string {
	if t.digest != "" {
		return t.digest
	}
	return t.diffID
}

// keep writes the record of a layer, then has the project hold it: Sweep finds by its record what a project holds and no image needs.
func (im *Images) keep(ctx context.Context, project string, r *record) error {
	if err := im.putRecord(ctx, r); err != nil {
		return err
	}
	err := im.layers.Hold(ctx, project, r.Layer)
	if errors.Is(err, sandbox.ErrNotFound) {
		err = fmt.Errorf("%w: %w", errRemoved, err)
	}
	return err
}

// errRemoved says that a layer which was there before it was made here lost its last holder in between.
var errRemoved = errors.New("removed while it was imported; try again")

// remade makes a layer again when it was removed in between, a few times.
func remade[T any](make func() (T, error)) (T, error) {
	for range 3 {
		if v, err := make(); !errors.Is(err, errRemoved) {
			return v, err
		}
	}
	return make()
}

func (im *Images) putRecord(ctx context.Context, r *record) error {
	text, err := json.Marshal(r)
	if err == nil {
		err = store.Put(ctx, im.store, recordKey(r.DiffID), bytes.NewReader(text))
	}
	if err != nil {
		return fmt.Errorf("keep record of layer %s: %w", r.DiffID, err)
	}
	return nil
}

// counted hashes and bounds what is read.
type counted struct {
	r        io.Reader
	hash     hash.Hash
	n, limit int64
	progress func(int64)
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.hash.Write(p[:n])
	c.n += int64(n)
	if c.progress != nil && n > 0 {
		c.progress(int64(n))
	}
	if c.limit > 0 && c.n > c.limit {
		return 0, fmt.Errorf("more than %d octets: %w", c.limit, sandbox.ErrExhausted)
	}
	return n, err
}

func (c *counted) digest() string { return "sha256:" + hex.EncodeToString(c.hash.Sum(nil)) }

var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

func decompress(r io.Reader) (io.Reader, func(), error) {
	b := bufio.NewReaderSize(r, 128<<10)
	head, err := b.Peek(4)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	switch {
	case bytes.HasPrefix(head, gzipMagic):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, nil, fmt.Errorf("gzip: %w: %w", sandbox.ErrInvalid, err)
		}
		return broken{z}, func() { z.Close() }, nil
	case bytes.HasPrefix(head, zstdMagic):
		// The window bounds what a frame may make the decoder hold.
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20), zstd.WithDecoderMaxMemory(256<<20))
		if err != nil {
			return nil, nil, fmt.Errorf("zstd: %w: %w", sandbox.ErrInvalid, err)
		}
		return broken{z}, z.Close, nil
	}
	return b, func() {}, nil
}

// broken calls compressed data that can't be read invalid, and leaves the errors of where it comes from as they are.
type broken struct{ r io.Reader }

func (b broken) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	switch {
	case errors.Is(err, gzip.ErrChecksum), errors.Is(err, gzip.ErrHeader), errors.Is(err, zstd.ErrWindowSizeExceeded), errors.Is(err, zstd.ErrCRCMismatch),
		errors.Is(err, zstd.ErrMagicMismatch), errors.Is(err, zstd.ErrWindowSizeTooSmall), errors.Is(err, zstd.ErrDecoderSizeExceeded), errors.Is(err, io.ErrUnexpectedEOF):
		err = fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
	}
	return n, err
}

// holdZeros withholds zeros until something else follows or, at the end, verify has agreed: a tar ends with zeros, so its reader
// does not see the end of one that is not what it was said to be.
type holdZeros struct {
	r      io.Reader
	verify func() error
	buf    []byte
	before int64 // zeros to give out before data
	data   []byte
	kept   int64
	err    error // after data
}

func (h *holdZeros) Read(p []byte) (int, error) {
	for {
		switch {
		case len(p) == 0:
			return 0, nil
		case h.before > 0:
			n := int(min(int64(len(p)), h.before))
			clear(p[:n])
			h.before -= int64(n)
			return n, nil
		case len(h.data) > 0:
			n := copy(p, h.data)
			h.data = h.data[n:]
			return n, nil
		case h.err != nil:
			return 0, h.err
		}
		n, err := io.ReadFull(h.r, h.buf)
		b := bytes.TrimRight(h.buf[:n], "\x00")
		if len(b) > 0 {
			h.before, h.data, h.kept = h.kept, b, int64(n-len(b))
		} else {
			h.kept += int64(n)
		}
		switch {
		case err == io.EOF || err == io.ErrUnexpectedEOF:
			if h.err = h.verify(); h.err == nil {
				h.err = io.EOF
				if len(h.data) == 0 {
					h.before += h.kept
				} else { // after the data
					h.data = append(bytes.Clone(h.data), make([]byte, h.kept)...)
				}
				h.kept = 0
			}
		case err != nil:
			h.err = err
		}
	}
}

// fixedID names the copy of a layer with other attributes of its folders.
func fixedID(diffID string, fix map[string]folder) string {
	h := sha256.New()
	fmt.Fprintf(h, "dsec folders\n%s\n", diffID)
	for _, p := range slices.Sorted(maps.Keys(fix)) {
		text, _ := json.Marshal(fix[p])
		fmt.Fprintf(h, "%q %s\n", p, text)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil))
}
