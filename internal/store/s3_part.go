package store

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// spoolPrefix is before the names of drafts in the spool that a copy can go on with.
const spoolPrefix = "dsec-part-"

func (s *S3) spool() string {
	if s.cfg.Spool == "" {
		return os.TempDir()
	}
	return s.cfg.Spool
}

// resume goes on with a draft in the spool. It has a name there, so that what was fetched for it outlives this process; others go with theirs.
func (s *S3) resume(ctx context.Context, sum string) (partDraft, int64, error) {
	stem := partStem(spoolPrefix, sum)
	f, have, kept, err := resumeIn(ctx, s.spool(), stem, ours)
	if err != nil {
		return nil, 0, err
	}
	return &s3Part{s3Draft: &s3Draft{&draft{File: f, at: have, end: have}, s}, stem: stem, gone: !kept}, have, nil
}

// s3Part is a draft that is kept when it breaks off, while it is filled or sent.
type s3Part struct {
	*s3Draft
	stem string
	gone bool
}

func (p *s3Part) Publish(ctx context.Context, key string) error {
	name := p.Name()
	err := p.s3Draft.Publish(ctx, key)
	if err == nil {
		os.Remove(name)
		sweepParts(p.s.spool(), p.stem, ours)
	}
	return err
}

func (p *s3Part) forget() { p.gone = true }

func (p *s3Part) Discard() error { return p.draft.leave(p.gone) }

// sweepSpool removes drafts that nobody went on with for a day.
func (s *S3) sweepSpool() {
	entries, err := os.ReadDir(s.spool())
	if err != nil {
		return // a draft will tell
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), spoolPrefix) {
			continue
		}
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() && ours(info) && time.Since(info.ModTime()) > draftAge {
			os.Remove(filepath.Join(s.spool(), e.Name()))
		}
	}
}

// comparer is a store that knows digests of the pieces of its objects.
type comparer interface {
	// equals tells whether the object is made of the same octets as r, whose sha256 must be the sum (hex), and all of it is there.
	equals(ctx context.Context, key, sum string, r Reader) (bool, error)
}

// equals compares the digests of the manifest with r, and looks for the chunks in the packs that may be relied on. What a pack has is not read: who reads
// it compares it, and the server vouches for it until then.
func (s *S3) equals(ctx context.Context, key, sum string, r Reader) (bool, error) {
	m, o, err := s.manifest(ctx, key)
	if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrLost) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if m == nil {
		return s.equalsRaw(ctx, o, sum, r)
	}
	if m.size != r.Size() {
		return false, nil
	}
	same, err := sameChunks(ctx, m, sum, r)
	if !same || err != nil {
		return false, err
	}
	if err := s.refreshAfter(ctx, s.now().Add(-publishLimit/10)); err != nil {
		return false, err
	}
	for _, c := range s.known.moved(m.chunks) {
		if alive, _ := s.known.alive([]chunk{c}); alive {
			continue
		}
		if _, ok := s.known.find(c.sum); !ok {
			return false, nil
		}
	}
	return true, nil
}

// equalsRaw compares a small object; a large one without a manifest is another program's, and is written again.
func (s *S3) equalsRaw(ctx context.Context, o stored, sum string, r Reader) (bool, error) {
	if int64(len(o.body)) != o.total {
		return false, nil
	}
	whole := sha256.New()
	if err := hashRange(ctx, whole, r, 0, r.Size(), nil); err != nil {
		return false, err
	}
	if hex.EncodeToString(whole.Sum(nil)) != sum {
		return false, errDigest
	}
	own := sha256.Sum256(o.body)
	return hex.EncodeToString(own[:]) == sum, nil
}

// sameChunks tells whether r is made of the manifest's chunks.
func sameChunks(ctx context.Context, m *manifest, sum string, r Reader) (bool, error) {
	if far, ok := r.(*s3Reader); ok && len(far.chunks) == len(m.chunks) {
		same := true
		for i, c := range m.chunks {
			same = same && c.sum == far.chunks[i].sum && c.length == far.chunks[i].length
		}
		if same {
			return true, nil // without a fetch
		}
	}
	whole := sha256.New()
	at, same := int64(0), true
	for _, c := range m.chunks {
		one := sha256.New()
		if err := hashRange(ctx, io.MultiWriter(whole, one), r, at, at+int64(c.length), nil); err != nil {
			return false, err
		}
		at += int64(c.length)
		same = same && bytes.Equal(one.Sum(nil), c.sum[:])
	}
	if hex.EncodeToString(whole.Sum(nil)) != sum {
		return false, errDigest
	}
	return same, nil
}
