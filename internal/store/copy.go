package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

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

// Copy copies objects and is resumed by doing it again: what dst has is left alone, a large object that broke off in a folder goes on where it
// did, and a store that shares chunks takes only those that it lacks. An object whose key is blobs/<hex> must have this sha256, in src and in dst, also
// what was there already: a folder's is read, a bucket's is compared by the digests of its chunks with what src has. Other objects of the same size count
// as the same. What was there is made young, so that no collector of garbage takes it for old while nothing names it yet. progress may be nil; it is
// called one call at a time, at least once for each object.
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

var errDigest = fmt.Errorf("the source's object does not have its digest: %w", sandbox.ErrLost)

func copyOne(ctx context.Context, dst, src Store, key string, moved func(int)) (skipped bool, err error) {
	from, err := src.Stat(ctx, key)
	if err != nil {
		return false, err
	}
	want := ""
	if name, blob := strings.CutPrefix(key, "blobs/"); blob && len(name) == 2*sha256.Size {
		if _, err := hex.DecodeString(name); err == nil {
			want = name
		}
	}
	to, err := dst.Stat(ctx, key)
	if err == nil && to.Size == from.Size {
		same := true
		if want != "" {
			if same, err = proved(ctx, dst, src, key, want); err != nil {
				return false, err
			}
		}
		if same {
			same, err = renewed(ctx, dst, to)
		}
		if same || err != nil {
			return same, err
		}
	} else if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return false, err
	}
	r, err := src.Open(ctx, key)
	if err != nil {
		return false, err
	}
	defer r.Close()
	for again := false; ; again = true {
		resumed, err := copyRest(ctx, dst, r, key, want, moved)
		if !resumed || again || !errors.Is(err, errDigest) {
			return false, err
		}
		// What was there of it may be what is wrong, and is gone now.
	}
}

// proved tells whether dst has the object blobs/<want> in whole, as far as that can be found out without fetching it from afar.
func proved(ctx context.Context, dst, src Store, key, want string) (bool, error) {
	switch d := dst.(type) {
	case prover:
		return d.proves(ctx, key, want)
	case comparer:
		r, err := src.Open(ctx, key)
		if err != nil {
			return false, err
		}
		defer r.Close()
		return d.equals(ctx, key, want, r)
	}
	return true, nil
}

// youngFor is how long an object that was just written counts as young to whoever copies: half of the shortest age of garbage.
const youngFor = 30 * time.Minute

// renewer is a store that can give an object the present time.
type renewer interface {
	renew(ctx context.Context, key string) error
}

// renewed makes an object young; false when it is gone, or can only be written again.
func renewed(ctx context.Context, s Store, i Info) (bool, error) {
	if time.Since(i.Modified) < youngFor {
		return true, nil
	}
	r, ok := s.(renewer)
	if !ok {
		return false, nil
	}
	if r.renew(ctx, i.Key) != nil {
		return false, ctx.Err() // it is written again, which tells what is wrong
	}
	return true, nil
}

func (d *Dir) renew(ctx context.Context, key string) error {
	now := time.Now()
	if err := patient(ctx, func() error { return os.Chtimes(d.file(key), now, now) }); err != nil {
		return fmt.Errorf("renew object %s: %w", key, missing(err))
	}
	return nil
}

// renew writes what lies under the key, a manifest or a small object, once more.
func (s *S3) renew(ctx context.Context, key string) error {
	o, err := s.get(ctx, key, 0, -1, maxManifest)
	if err == nil {
		err = s.put(ctx, key, o.body)
	}
	if err != nil {
		return fmt.Errorf("renew object %s: %w", key, err)
	}
	return nil
}

// copyRest copies what dst does not have yet of an object; resumed says that it had some.
func copyRest(ctx context.Context, dst Store, r Reader, key, want string, moved func(int)) (resumed bool, err error) {
	var d Draft
	have := int64(0)
	forget := func() {}
	if p, ok := dst.(resumer); ok && want != "" && r.Size() > copyPiece {
		var part partDraft
		if part, have, err = p.resume(ctx, want); err == nil {
			d, forget = part, part.forget
		}
	} else {
		d, err = dst.Create(ctx)
	}
	if err != nil {
		return false, err
	}
	defer func() {
		if err != nil && (errors.Is(err, errDigest) || errors.Is(err, sandbox.ErrExhausted)) {
			forget() // wrong octets, or octets on a full disk
		}
		d.Discard()
	}()
	if have > r.Size() {
		have = 0
	}
	if err := d.Truncate(have); err != nil {
		return false, err
	}
	resumed = have > 0
	sum := sha256.New()
	if resumed {
		if err := hashRange(ctx, sum, d, 0, have, nil); err != nil {
			return resumed, err
		}
	}
	err = hashRange(ctx, sum, r, have, r.Size(), func(p []byte, off int64) error {
		if _, err := d.WriteAt(p, off); err != nil {
			return err
		}
		moved(len(p))
		return nil
	})
	if err != nil {
		return resumed, err
	}
	if want != "" && hex.EncodeToString(sum.Sum(nil)) != want {
		return resumed, errDigest
	}
	return resumed, d.Publish(ctx, key)
}

const copyPiece = 4 << 20

// hashRange reads a range in pieces, adds them to the hash and passes them on; each may be nil.
func hashRange(ctx context.Context, h io.Writer, r io.ReaderAt, off, end int64, each func(p []byte, off int64) error) error {
	buf := make([]byte, max(0, min(copyPiece, end-off)))
	for off < end {
		p := buf[:min(int64(len(buf)), end-off)]
		n, err := readAt(ctx, r, p, off)
		if n < len(p) {
			if err == nil || err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		h.Write(p)
		if each != nil {
			if err := each(p, off); err != nil {
				return err
			}
		}
		off += int64(n)
	}
	return nil
}

func readAt(ctx context.Context, r io.ReaderAt, p []byte, off int64) (int, error) {
	if c, ok := r.(Reader); ok {
		return ReadAt(ctx, c, p, off)
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	return r.ReadAt(p, off)
}
