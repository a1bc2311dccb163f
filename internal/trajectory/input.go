package trajectory

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"strconv"
	"strings"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Bounds of a step's input, in octets.
const (
	MaxInline = 64 << 10 // up to here it lies in the record
	MaxInput  = 64 << 20 // up to here in a blob; above, only its hash is kept
)

// Kept says how much of an input is kept.
type Kept uint8

const (
	KeptInline Kept = 1 // in the record: Data
	KeptBlob   Kept = 2 // in a blob, by its hash
	KeptHash   Kept = 3 // only size and hash: the step cannot be done again from the log
)

func (k Kept) String() string {
	switch k {
	case KeptInline:
		return "inline"
	case KeptBlob:
		return "blob"
	case KeptHash:
		return "hash"
	}
	return "kept-" + strconv.Itoa(int(k))
}

// Input is the input octets of a step: by value or by content.
type Input struct {
	Kept   Kept
	Size   int64
	SHA256 [32]byte
	Data   []byte // inline only

	pin *pin
}

// pin keeps a blob alive between InputWriter.Finish and the record that names it.
type pin struct {
	l    *Log
	blob *blob
	held bool
}

const inputHeadLen = 8 + 32 + 4

// NewInput is the Input of data that is at hand; larger than MaxInline, it must go through an InputWriter.
func NewInput(data []byte) *Input {
	return &Input{Kept: KeptInline, Size: int64(len(data)), SHA256: sha256.Sum256(data), Data: data}
}

func (in *Input) check() error {
	switch {
	case in.Size < 0,
		in.Kept == KeptInline && (in.Size != int64(len(in.Data)) || in.Size > MaxInline),
		in.Kept != KeptInline && len(in.Data) > 0,
		in.Kept == 0, in.Kept > KeptHash:
		return fmt.Errorf("record input: kept %v, size %d, %d octets inline: %w", in.Kept, in.Size, len(in.Data), sandbox.ErrInvalid)
	case in.Kept == KeptBlob && (in.pin == nil || !in.pin.held):
		return fmt.Errorf("record input: its blob is not held (finish an InputWriter of this log, append once): %w", sandbox.ErrInvalid)
	}
	return nil
}

// Release gives up an input that goes into no record. It is idempotent, and a no-op once the input was appended.
func (in *Input) Release() {
	if in == nil || in.pin == nil {
		return
	}
	l := in.pin.l
	l.mu.Lock()
	dead := in.pin.held
	if dead {
		in.pin.held = false
		in.pin.blob.refs--
	}
	l.mu.Unlock()
	if dead {
		l.kick()
	}
}

// blob is an input in the side folder. Fields are under Log.mu.
type blob struct {
	sha  [32]byte
	size int64
	refs int // pins and records
	// sure is set when the content was synced or written by this Log: after a crash of the host an older one may be torn, so it is
	// written again rather than trusted.
	sure bool
}

func blobDir(sha [32]byte) string { return "blobs/" + hex.EncodeToString(sha[:1]) }
func blobName(sha [32]byte) string {
	return blobDir(sha) + "/" + hex.EncodeToString(sha[:])
}

// InputWriter takes the input octets of a step as they come: small ones in memory, larger ones to a temporary blob.
// It is for one goroutine. Finish or Abort must be called.
type InputWriter struct {
	l    *Log
	hash hash.Hash
	buf  []byte
	size int64
	f    File
	name string
	off  int64 // octets of f
	gone bool  // above MaxInput: only the hash goes on
	held int64 // octets counted against the limit
	err  error
}

// NewInputWriter begins an input.
func (l *Log) NewInputWriter() *InputWriter { return &InputWriter{l: l, hash: sha256.New()} }

// Write never fails for the input's size; ErrExhausted means that the disk has no room for the blob.
func (w *InputWriter) Write(p []byte) (int, error) {
	if w.err != nil {
		return 0, w.err
	}
	w.hash.Write(p)
	w.size += int64(len(p))
	if w.gone {
		return len(p), nil
	}
	if w.size > MaxInput {
		w.gone = true
		w.discard()
		return len(p), nil
	}
	w.buf = append(w.buf, p...)
	if len(w.buf) > MaxInline {
		if err := w.flush(); err != nil {
			w.err = err
			w.discard()
			return 0, err
		}
	}
	return len(p), nil
}

func (w *InputWriter) flush() error {
	if err := w.l.holdSpace(int64(len(w.buf))); err != nil {
		return fmt.Errorf("write input: %w", err)
	}
	w.held += int64(len(w.buf))
	if w.f == nil {
		w.name = "blobs/tmp-" + strconv.FormatUint(w.l.temp.Add(1), 10)
		f, err := w.l.fs.Create(w.name)
		if err != nil {
			return exhausted("write input", err)
		}
		w.f = f
	}
	if _, err := w.f.WriteAt(w.buf, w.off); err != nil {
		return exhausted("write input", err)
	}
	w.off += int64(len(w.buf))
	w.buf = w.buf[:0]
	return nil
}

func exhausted(act string, err error) error {
	if noSpace(err) {
		return fmt.Errorf("%s: %w: %w", act, err, sandbox.ErrExhausted)
	}
	return fmt.Errorf("%s: %w", act, err)
}

func (w *InputWriter) discard() {
	w.buf = nil
	if w.f != nil {
		w.f.Close()
		w.l.fs.Remove(w.name) // else Open sweeps it
		w.f = nil
	}
	w.l.holdSpace(-w.held)
	w.held = 0
}

// Abort gives the input up.
func (w *InputWriter) Abort() {
	if w.err == nil {
		w.err = fmt.Errorf("input was finished or given up: %w", sandbox.ErrState)
		w.discard()
	}
}

// Finish ends the input. With durability host its blob is on the disk when it returns. The Input belongs into one record, or must
// be released.
func (w *InputWriter) Finish(d sandbox.Durability) (*Input, error) {
	if w.err != nil {
		return nil, w.err
	}
	w.err = fmt.Errorf("input was finished or given up: %w", sandbox.ErrState)
	in := &Input{Size: w.size}
	w.hash.Sum(in.SHA256[:0])
	switch {
	case w.gone:
		in.Kept = KeptHash
		return in, nil
	case w.f == nil:
		in.Kept, in.Data = KeptInline, w.buf
		return in, nil
	}
	in.Kept = KeptBlob
	if len(w.buf) > 0 {
		if err := w.flush(); err != nil {
			w.discard()
			return nil, err
		}
	}
	synced := d != sandbox.DurabilityProcess
	if synced {
		if err := w.f.Sync(); err != nil {
			w.discard()
			return nil, fmt.Errorf("sync input: %w", err)
		}
	}
	b, err := w.l.keepBlob(in, w, synced)
	if err != nil {
		w.discard()
		return nil, err
	}
	in.pin = &pin{l: w.l, blob: b, held: true}
	if d == sandbox.DurabilityStore { // now that nothing removes it
		if err := w.l.shipBlob(in); err != nil {
			in.Release()
			return nil, err
		}
	}
	return in, nil
}

// keepBlob moves the writer's file to its place and pins it.
func (l *Log) keepBlob(in *Input, w *InputWriter, synced bool) (*blob, error) {
	l.blobMu.Lock()
	defer l.blobMu.Unlock()
	l.mu.Lock()
	b := l.blobs[in.SHA256]
	known := b != nil && b.sure && !synced
	fresh := b == nil
	if fresh {
		b = &blob{sha: in.SHA256, size: in.Size}
		l.blobs[in.SHA256] = b
	}
	b.refs++
	l.mu.Unlock()
	if known {
		w.discard()
		return b, nil
	}
	var err error
	if !fresh && !synced {
		err, synced = w.f.Sync(), true // it takes the place of one that may be on the disk and promised
	}
	if err == nil {
		err = l.placeBlob(in.SHA256, w.name, synced)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		if b.refs--; fresh {
			delete(l.blobs, in.SHA256)
		}
		return nil, exhausted("keep input", err)
	}
	w.f.Close()
	w.f = nil
	if !fresh {
		l.blobBytes -= w.held // replaced one of the same size
	}
	w.held = 0
	b.sure = true
	return b, nil
}

func (l *Log) placeBlob(sha [32]byte, temp string, synced bool) error {
	if err := l.fs.Mkdir(blobDir(sha)); err != nil {
		return err
	}
	if err := l.fs.Rename(temp, blobName(sha)); err != nil {
		return err
	}
	if !synced {
		return nil
	}
	if err := l.fs.SyncDir(blobDir(sha)); err != nil {
		return err
	}
	return l.fs.SyncDir("blobs")
}

// OpenInput reads the octets of a record's input. The reader checks the hash at the end and yields ErrLost if it differs.
// ErrUnsupported: only the hash was kept.
func (l *Log) OpenInput(in *Input) (io.ReadCloser, error) {
	switch in.Kept {
	case KeptInline:
		return io.NopCloser(bytes.NewReader(in.Data)), nil
	case KeptHash:
		return nil, fmt.Errorf("open input %x: %d octets, only their hash was kept: %w", in.SHA256, in.Size, sandbox.ErrUnsupported)
	}
	f, err := l.fs.Open(blobName(in.SHA256))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open input %x: its blob is gone: %w", in.SHA256, sandbox.ErrLost)
	}
	if err != nil {
		return nil, fmt.Errorf("open input %x: %w", in.SHA256, err)
	}
	return &inputReader{f: f, in: in, hash: sha256.New()}, nil
}

type inputReader struct {
	f    File
	in   *Input
	hash hash.Hash
	off  int64
}

func (r *inputReader) Read(p []byte) (int, error) {
	n, err := r.f.ReadAt(p[:min(int64(len(p)), r.in.Size-r.off)], r.off)
	r.hash.Write(p[:n])
	r.off += int64(n)
	if err == io.EOF || r.off == r.in.Size {
		if r.off < r.in.Size || [32]byte(r.hash.Sum(nil)) != r.in.SHA256 {
			return 0, fmt.Errorf("read input %x: the blob is damaged: %w", r.in.SHA256, sandbox.ErrLost)
		}
		if n == 0 {
			return 0, io.EOF
		}
		err = nil
	}
	return n, err
}

func (r *inputReader) Close() error { return r.f.Close() }

// sweepBlobs removes what no record names: remains of a crash. It runs in Open, after the index is loaded.
func (l *Log) sweepBlobs() error {
	if err := l.fs.Mkdir("blobs"); err != nil {
		return err
	}
	for _, b := range l.blobs {
		l.blobBytes += b.size
	}
	dirs, err := l.fs.List("blobs")
	if err != nil {
		return err
	}
	for _, d := range dirs {
		if strings.HasPrefix(d, "tmp-") {
			if err := l.fs.Remove("blobs/" + d); err != nil {
				return err
			}
			continue
		}
		names, err := l.fs.List("blobs/" + d)
		if err != nil {
			return err
		}
		for _, n := range names {
			raw, err := hex.DecodeString(n)
			if err != nil || len(raw) != 32 {
				continue // not ours
			}
			b := l.blobs[[32]byte(raw)]
			if b != nil && b.refs > 0 {
				continue
			}
			if err := l.fs.Remove("blobs/" + d + "/" + n); err != nil {
				return err
			}
		}
	}
	return nil
}

// dropBlobs removes the blobs that lost their last reference.
func (l *Log) dropBlobs(ctx context.Context) error {
	l.blobMu.Lock()
	defer l.blobMu.Unlock()
	l.mu.Lock()
	var dead []*blob
	for _, b := range l.blobs {
		if b.refs <= 0 {
			dead = append(dead, b)
		}
	}
	lsn := l.written
	l.mu.Unlock()
	if len(dead) == 0 {
		return nil
	}
	// The removals must be on the disk before what they removed goes.
	if err := l.sync(ctx, lsn); err != nil {
		return err
	}
	for _, b := range dead {
		if err := l.unshipBlob(ctx, b.sha); err != nil {
			return err
		}
		if err := l.fs.Remove(blobName(b.sha)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove blob: %w", err)
		}
		l.mu.Lock()
		delete(l.blobs, b.sha)
		l.blobBytes -= b.size
		l.mu.Unlock()
	}
	return nil
}
