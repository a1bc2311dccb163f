package facts

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

var bucketName = []byte("facts-1")

// lockWait bounds the wait for another process that has the file open.
const lockWait = 5 * time.Second

// Bolt keeps facts in one file of this machine.
type Bolt struct {
	db *bbolt.DB
}

var _ Facts = (*Bolt)(nil)

// OpenBolt opens the file, which is made when it is missing. A file that another process has open is sandbox.ErrState.
func OpenBolt(file string) (*Bolt, error) {
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return nil, fmt.Errorf("open facts: %w", err)
	}
	made := file + madeSuffix
	if err := checkMade(file, made); err != nil {
		return nil, err
	}
	if err := sound(file); err != nil {
		return nil, lost(file, made, err)
	}
	db, err := bbolt.Open(file, 0o600, &bbolt.Options{Timeout: lockWait})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("open facts %s: another process has it open: %w", file, sandbox.ErrState)
	}
	if err != nil {
		return nil, lost(file, made, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(bucketName)
		return err
	})
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("open facts %s: %w", file, err)
	}
	if err := os.WriteFile(made, []byte("facts.db was made; without this file an empty one counts as new\n"), 0o600); err != nil {
		db.Close()
		return nil, fmt.Errorf("open facts: %w", err)
	}
	return &Bolt{db: db}, nil
}

// madeSuffix names the file beside the facts that says that there were some: a missing or empty file, which the library would take for a
// new one, is then a lost one.
const madeSuffix = ".made"

func checkMade(file, made string) error {
	st, err := os.Stat(file)
	switch {
	case err == nil && st.Size() > 0:
		return nil
	case err != nil && !os.IsNotExist(err):
		return fmt.Errorf("open facts: %w", err)
	}
	if _, err := os.Stat(made); os.IsNotExist(err) {
		return nil
	}
	what := "is empty"
	if err != nil {
		what = "is missing"
	}
	return fmt.Errorf("facts %s: the file %s, and there were projects, keys and names in it; bring a copy of it back, or remove %s to begin anew (layers and logs stay): %w", file, what, made, sandbox.ErrLost)
}

func lost(file, made string, err error) error {
	return fmt.Errorf("open facts %s: it is damaged (%v); bring a copy of it back, or remove it and %s to begin anew (projects, keys and names are then gone, layers and logs stay): %w", file, err, made, sandbox.ErrLost)
}

// sound reads all of a file once, without changing it: a broken page would end the process where it is met. A file that another process has
// open is left to that.
func sound(file string) (err error) {
	if st, err := os.Stat(file); err != nil || st.Size() == 0 {
		return nil
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // a file that is shorter than it says
	defer func() {
		if v := recover(); v != nil { // the library's way of telling; the lock that it leaves is one that others may share
			err = fmt.Errorf("%v", v)
		}
	}()
	db, err := bbolt.Open(file, 0o600, &bbolt.Options{Timeout: time.Millisecond, ReadOnly: true, PreLoadFreelist: true})
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil
	}
	if err != nil {
		return err
	}
	defer db.Close()
	return db.View(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketName)
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, v []byte) error {
			_, err := decode(k, v)
			return err
		})
	})
}

// Close closes the file.
func (b *Bolt) Close() error { return b.db.Close() }

// A stored value is its revision (8 octets, big-endian) and the value.
func decode(key, v []byte) (Fact, error) {
	if len(v) < 8 {
		return Fact{}, fmt.Errorf("fact %s: stored value of %d octets is broken", key, len(v))
	}
	return Fact{Key: string(key), Value: bytes.Clone(v[8:]), Revision: Revision(binary.BigEndian.Uint64(v))}, nil
}

// Get returns a fact.
func (b *Bolt) Get(ctx context.Context, key string) (Fact, error) {
	var f Fact
	if err := errors.Join(ctx.Err(), Check(key, nil)); err != nil {
		return f, err
	}
	err := b.db.View(func(tx *bbolt.Tx) error {
		v := tx.Bucket(bucketName).Get([]byte(key))
		if v == nil {
			return fmt.Errorf("fact %s: %w", key, sandbox.ErrNotFound)
		}
		var err error
		f, err = decode([]byte(key), v)
		return err
	})
	return f, err
}

// Put sets a fact.
func (b *Bolt) Put(ctx context.Context, key string, value []byte, expected Revision) (Revision, error) {
	if err := errors.Join(ctx.Err(), Check(key, value)); err != nil {
		return 0, err
	}
	var rev Revision
	err := b.db.Update(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(bucketName)
		if err := compare(bucket, key, expected); err != nil {
			return err
		}
		n, err := bucket.NextSequence()
		if err != nil {
			return err
		}
		rev = Revision(n)
		return bucket.Put([]byte(key), append(binary.BigEndian.AppendUint64(nil, n), value...))
	})
	if err != nil {
		return 0, fmt.Errorf("put fact %s: %w", key, full(err))
	}
	return rev, nil
}

// full makes what a full disk refuses an error that is no fault of ours.
func full(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w: %w", err, sandbox.ErrExhausted)
	}
	return err
}

func compare(bucket *bbolt.Bucket, key string, expected Revision) error {
	if expected == Any {
		return nil
	}
	have := Absent
	if v := bucket.Get([]byte(key)); v != nil {
		f, err := decode([]byte(key), v)
		if err != nil {
			return err
		}
		have = f.Revision
	}
	if have != expected {
		return fmt.Errorf("revision %d, expected %d: %w", have, expected, ErrConflict)
	}
	return nil
}

// Delete removes a fact.
func (b *Bolt) Delete(ctx context.Context, key string, expected Revision) error {
	if err := errors.Join(ctx.Err(), Check(key, nil)); err != nil {
		return err
	}
	err := b.db.Update(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(bucketName)
		if bucket.Get([]byte(key)) == nil {
			return sandbox.ErrNotFound
		}
		if err := compare(bucket, key, expected); err != nil {
			return err
		}
		return bucket.Delete([]byte(key))
	})
	if err != nil {
		return fmt.Errorf("delete fact %s: %w", key, full(err))
	}
	return nil
}

// List returns facts in the order of their keys.
func (b *Bolt) List(ctx context.Context, prefix, from string, limit int) ([]Fact, error) {
	var out []Fact
	err := b.db.View(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bucketName).Cursor()
		for k, v := c.Seek([]byte(max(prefix, from))); k != nil && bytes.HasPrefix(k, []byte(prefix)); k, v = c.Next() {
			if err := ctx.Err(); err != nil {
				return err
			}
			f, err := decode(k, v)
			if err != nil {
				return err
			}
			out = append(out, f)
			if limit > 0 && len(out) == limit {
				break
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list facts %s: %w", prefix, err)
	}
	return out, nil
}
