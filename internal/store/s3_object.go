package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sort"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// maxManifest bounds what is read as one, in octets.
const maxManifest = manifestHead + (16+entrySize)*maxChunks + 32

// Open reads the object's manifest, or all of it when it is small.
func (s *S3) Open(ctx context.Context, key string) (Reader, error) {
	if err := CheckKey(key); err != nil {
		return nil, err
	}
	m, o, err := s.manifest(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("open object %s: %w", key, err)
	}
	r := &s3Reader{s: s, key: key, size: o.total}
	switch {
	case m != nil:
		r.size, r.chunks = m.size, m.chunks
		r.ends = make([]int64, len(m.chunks))
		end := int64(0)
		for i := range m.chunks {
			end += int64(m.chunks[i].length)
			r.ends[i] = end
		}
	case int64(len(o.body)) == o.total:
		r.small = o.body
	}
	return r, nil
}

// manifest reads what lies under the key: its manifest or, when it has none, at least its first rawMax octets.
func (s *S3) manifest(ctx context.Context, key string) (*manifest, stored, error) {
	for again := false; ; again = true {
		// Most manifests, and all raw objects that this package writes, come with one request.
		o, err := s.get(ctx, key, 0, rawMax, 0)
		if err != nil && errors.Is(err, errRange) {
			o, err = s.get(ctx, key, 0, -1, rawMax)
		}
		if err != nil {
			return nil, o, err
		}
		if _, ok := manifestSize(o.body); !ok {
			return nil, o, nil
		}
		if int64(len(o.body)) < o.total {
			if o, err = s.get(ctx, key, 0, -1, maxManifest); err != nil {
				return nil, o, err
			}
		}
		m, err := decodeManifest(o.body)
		if err == nil || again {
			return m, o, err
		}
	}
}

// head tells the size that the object under the key has for who reads it.
func (s *S3) head(ctx context.Context, key string) (Info, error) {
	o, err := s.get(ctx, key, 0, manifestHead, 0)
	if err != nil && errors.Is(err, errRange) {
		o, err = s.get(ctx, key, 0, -1, rawMax)
	}
	if err != nil {
		return Info{}, err
	}
	i := Info{Key: key, Size: o.total, Modified: o.modified}
	if n, ok := manifestSize(o.body); ok {
		i.Size = n
	}
	return i, nil
}

// Stat describes an object.
func (s *S3) Stat(ctx context.Context, key string) (Info, error) {
	if err := CheckKey(key); err != nil {
		return Info{}, err
	}
	i, err := s.head(ctx, key)
	if err != nil {
		return Info{}, fmt.Errorf("stat object %s: %w", key, err)
	}
	return i, nil
}

// List lists objects; each that might be a manifest costs a request for its size, many of which are made at once.
func (s *S3) List(ctx context.Context, prefix string, each func(Info) bool) error {
	if prefix != "" && prefix[0] == '.' {
		return fmt.Errorf("list %.80q: %w", prefix, sandbox.ErrInvalid)
	}
	const batch = 256
	var page []Info
	flush := func() (bool, error) {
		gone := make([]bool, len(page))
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(16)
		for i := range page {
			if page[i].Size < manifestHead+32 {
				continue
			}
			g.Go(func() error {
				info, err := s.head(ctx, page[i].Key)
				if errors.Is(err, sandbox.ErrNotFound) {
					gone[i] = true
					return nil
				}
				page[i].Size = info.Size
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return false, err
		}
		for i := range page {
			if !gone[i] && !each(page[i]) {
				return false, nil
			}
		}
		page = page[:0]
		return true, nil
	}
	more, failed := true, error(nil)
	err := s.names(ctx, prefix, func(i Info) bool {
		if page = append(page, i); len(page) == batch {
			more, failed = flush()
		}
		return more && failed == nil
	})
	if err == nil && failed == nil && more {
		_, failed = flush()
	}
	if err := errors.Join(err, failed); err != nil {
		return fmt.Errorf("list %s: %w", prefix, err)
	}
	return nil
}

// names lists keys with their stored sizes.
func (s *S3) names(ctx context.Context, prefix string, each func(Info) bool) error {
	after := ""
	if prefix == "" {
		after = "/" // what is this package's own begins with ".", which comes before; no key begins so
	}
	return s.list(ctx, prefix, after, func(i Info) bool {
		if CheckKey(i.Key) != nil {
			return true // not ours
		}
		return each(i)
	})
}

// Delete removes the object; its chunks stay until Collect finds that nothing names them.
func (s *S3) Delete(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if err := s.remove(ctx, key); err != nil {
		return fmt.Errorf("delete object %s: %w", key, err)
	}
	return nil
}

// s3Reader reads an object: from memory (small), by chunks, or as it lies there when something else put it into the bucket.
type s3Reader struct {
	s      *S3
	key    string
	size   int64
	small  []byte
	chunks []chunk
	ends   []int64
}

func (r *s3Reader) Size() int64  { return r.size }
func (r *s3Reader) Close() error { return nil }

// ReadAt is ReadAtContext with the time that the attempts of one read can take.
func (r *s3Reader) ReadAt(p []byte, off int64) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*r.s.cfg.Timeout+time.Duration(len(p)/(256<<10))*time.Second)
	defer cancel()
	return r.ReadAtContext(ctx, p, off)
}

// window bounds the chunks that one read holds at once, in octets.
const window = 8 << 20

func (r *s3Reader) ReadAtContext(ctx context.Context, p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, fmt.Errorf("read %s at %d: %w", r.key, off, sandbox.ErrInvalid)
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	var end error
	if off >= r.size {
		return 0, io.EOF
	}
	if int64(len(p)) > r.size-off {
		p, end = p[:r.size-off], io.EOF
	}
	for n < len(p) {
		part := p[n:min(len(p), n+window)]
		got, err := r.piece(ctx, part, off+int64(n))
		n += got
		if err != nil {
			return n, fmt.Errorf("read %s at %d: %w", r.key, off, err)
		}
	}
	return n, end
}

// piece fills p, which lies inside the object.
func (r *s3Reader) piece(ctx context.Context, p []byte, off int64) (int, error) {
	if r.small != nil {
		return copy(p, r.small[off:]), nil
	}
	if r.chunks == nil {
		o, err := r.s.get(ctx, r.key, off, int64(len(p)), 0)
		if err == nil && len(o.body) < len(p) {
			err = fmt.Errorf("it shrank: %w", sandbox.ErrLost)
		}
		return copy(p, o.body), err
	}
	first := sort.Search(len(r.ends), func(i int) bool { return r.ends[i] > off })
	last := first
	for last < len(r.ends) && r.ends[last] < off+int64(len(p)) {
		last++
	}
	list := r.s.known.moved(r.chunks[first : last+1])
	data, err := r.s.read(ctx, list)
	if err != nil {
		return 0, err
	}
	n := 0
	for i, b := range data {
		start := r.ends[first+i] - int64(list[i].length)
		n += copy(p[n:], b[max(off-start, 0):])
	}
	return n, nil
}
