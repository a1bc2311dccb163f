package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// CopyProgress is how far a Copy is.
type CopyProgress struct {
	Objects, Skipped int   // done, and of these: were there already
	Octets           int64 // read from the source
	Total            int   // objects
	Key              string
}

// copyParallel is how many objects a Copy moves at once.
const copyParallel = 4

// Copy copies objects and is resumed by doing it again: a key that dst has with the same size is left alone, and a store that shares chunks
// takes only those that it lacks. An object whose key is blobs/<hex> must have this sha256. progress may be nil; it is called one call at a
// time, at least once for each object.
func Copy(ctx context.Context, dst, src Store, keys []string, progress func(CopyProgress)) (CopyProgress, error) {
	var mu sync.Mutex
	done := CopyProgress{Total: len(keys)}
	tell := func(change func(*CopyProgress)) {
		mu.Lock()
		defer mu.Unlock()
		change(&done)
		if progress != nil {
			progress(done)
		}
	}
	g, run := errgroup.WithContext(ctx)
	g.SetLimit(copyParallel)
	for _, key := range keys {
		if run.Err() != nil {
			break
		}
		g.Go(func() error {
			skipped, err := copyOne(run, dst, src, key, func(n int) {
				tell(func(p *CopyProgress) { p.Octets += int64(n); p.Key = key })
			})
			if err != nil {
				return fmt.Errorf("copy %s: %w", key, err)
			}
			tell(func(p *CopyProgress) {
				p.Objects++
				p.Key = key
				if skipped {
					p.Skipped++
				}
			})
			return nil
		})
	}
	err := g.Wait()
	if err == nil {
		err = ctx.Err()
	}
	mu.Lock()
	defer mu.Unlock()
	return done, err
}

func copyOne(ctx context.Context, dst, src Store, key string, moved func(int)) (skipped bool, err error) {
	from, err := src.Stat(ctx, key)
	if err != nil {
		return false, err
	}
	to, err := dst.Stat(ctx, key)
	if err == nil && to.Size == from.Size {
		return true, nil
	}
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return false, err
	}
	r, err := src.Open(ctx, key)
	if err != nil {
		return false, err
	}
	defer r.Close()
	d, err := dst.Create(ctx)
	if err != nil {
		return false, err
	}
	defer d.Discard()
	var sum hash.Hash
	name, blob := strings.CutPrefix(key, "blobs/")
	if _, err := hex.DecodeString(name); blob && err == nil && len(name) == 64 {
		sum = sha256.New()
	}
	buf := make([]byte, 4<<20)
	for off := int64(0); off < r.Size(); {
		p := buf[:min(int64(len(buf)), r.Size()-off)]
		n, err := ReadAt(ctx, r, p, off)
		if n < len(p) {
			if err == nil || err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return false, err
		}
		if sum != nil {
			sum.Write(p)
		}
		if _, err := d.Write(p); err != nil {
			return false, err
		}
		off += int64(n)
		moved(n)
	}
	if sum != nil && hex.EncodeToString(sum.Sum(nil)) != name {
		return false, fmt.Errorf("the source's object does not have its digest: %w", sandbox.ErrLost)
	}
	return false, d.Publish(ctx, key)
}
