// Package store keeps bulk data: the stored forms of layers, their descriptors and sealed log segments.
//
// It hides where the octets lie and how: [Dir] is a folder on a local or a cluster file system (NFS, 3FS), [S3] a bucket in which
// large objects are chunks that all objects share, [Union] several stores as one. Objects are immutable and appear whole or not at
// all: a [Draft] is written beside them and published by one step (a rename after an fsync, a PUT of the manifest after its chunks), so
// neither a crash nor a full disk leaves half of one under its key. No locks are taken (cluster mounts keep them local to a node, S3 has
// none); two writers that publish one key must write the same octets, and the last one stands. The layouts and the protocol by which
// garbage goes are in docs/format/store.md.
//
// Locks, none of which is held over I/O: S3's and Dir's types state theirs.
package store

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"regexp"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Info describes an object.
type Info struct {
	Key      string
	Size     int64 // octets
	Modified time.Time
}

// Reader reads ranges of an object. It stays usable when the object is deleted.
type Reader interface {
	io.ReaderAt
	io.Closer
	Size() int64
}

// ContextReader is a Reader whose reads end with a context. What comes from far away is one.
type ContextReader interface {
	Reader
	ReadAtContext(ctx context.Context, p []byte, off int64) (int, error)
}

// ReadAt reads from r as io.ReaderAt does, and gives up with the context where r can.
func ReadAt(ctx context.Context, r Reader, p []byte, off int64) (int, error) {
	if c, ok := r.(ContextReader); ok {
		return c.ReadAtContext(ctx, p, off)
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	return r.ReadAt(p, off)
}

// Draft is an object that is being written. It may be written in any order. Exactly one of Publish and Discard ends it;
// Discard after Publish does nothing, so it can be deferred.
type Draft interface {
	io.Writer
	io.WriterAt
	io.ReaderAt
	Truncate(size int64) error
	// Publish makes the draft durable and then visible under the key, replacing what was there.
	Publish(ctx context.Context, key string) error
	Discard() error
}

// Store is a place for objects. Errors wrap sandbox.ErrNotFound for a key that has no object, sandbox.ErrInvalid for one that
// can't have any, sandbox.ErrExhausted when the place is full, sandbox.ErrDenied when it lets nobody in and sandbox.ErrLost when what it
// holds is damaged. Keys are never a prefix of each other at a "/" ("a" beside "a/b"): a folder can't hold both.
type Store interface {
	Create(ctx context.Context) (Draft, error)
	Open(ctx context.Context, key string) (Reader, error)
	Stat(ctx context.Context, key string) (Info, error)
	// List calls each for every key below the prefix, in order of keys, until it returns false.
	List(ctx context.Context, prefix string, each func(Info) bool) error
	// Delete removes an object; one that is not there is no error.
	Delete(ctx context.Context, key string) error
	// Path is where the object lies as a file of this machine, for the kernel to mount; false when it does not.
	Path(key string) (string, bool)
}

// Put publishes what r yields under the key.
func Put(ctx context.Context, s Store, key string, r io.Reader) error {
	d, err := s.Create(ctx)
	if err != nil {
		return err
	}
	defer d.Discard()
	if _, err := io.Copy(d, r); err != nil {
		return fmt.Errorf("write %s: %w", key, err)
	}
	return d.Publish(ctx, key)
}

// ReadAll reads a small object of at most limit octets.
func ReadAll(ctx context.Context, s Store, key string, limit int64) ([]byte, error) {
	r, err := s.Open(ctx, key)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	if r.Size() > limit {
		return nil, fmt.Errorf("object %s: %d octets, at most %d: %w", key, r.Size(), limit, sandbox.ErrInvalid)
	}
	b := make([]byte, r.Size())
	n, err := ReadAt(ctx, r, b, 0)
	if n < len(b) {
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, fmt.Errorf("read %s: %w", key, err)
	}
	return b, nil
}

var part = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$`)

// CheckKey checks a key: parts of letters, digits, "_", "-" and "." (not first), joined by "/".
func CheckKey(key string) error {
	if !fs.ValidPath(key) || key == "." || len(key) > 900 {
		return fmt.Errorf("store key %.80q: want relative parts joined by /: %w", key, sandbox.ErrInvalid)
	}
	for p := range strings.SplitSeq(key, "/") {
		if !part.MatchString(p) {
			return fmt.Errorf("store key %.80q: part %.80q has a character that is not allowed: %w", key, p, sandbox.ErrInvalid)
		}
	}
	return nil
}
