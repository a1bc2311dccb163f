package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// maxHeldMeta is how large metadata may be to be read into memory at once, in octets.
const maxHeldMeta = 1 << 30

// source is a stored layer that is being read, without a mount. Everything that is read of it is checked against its digests.
type source struct {
	d       Descriptor
	hot     int64        // octets in front of the contents
	root    *erofs.Inode // the canonical tree; contents have readers
	readers []store.Reader
}

func (s *source) close() {
	for _, r := range s.readers {
		r.Close()
	}
}

// source opens a layer's first whole form.
func (c *Catalogue) source(ctx context.Context, id ID) (*source, error) {
	return c.sourceOf(ctx, id, "")
}

// sourceOf opens the form with these contents; "" is any.
func (c *Catalogue) sourceOf(ctx context.Context, id ID, data string) (*source, error) {
	d, err := c.Descriptor(ctx, id)
	if err != nil {
		return nil, err
	}
	s := &source{d: d}
	err = fmt.Errorf("has no form that can be read: %w", sandbox.ErrUnsupported)
	if data != "" {
		err = fmt.Errorf("has no contents %.80s: %w", data, sandbox.ErrNotFound)
	}
	for _, f := range d.Forms {
		if data != "" && (f.Data == nil || f.Data.Digest != data) {
			continue
		}
		if err = c.openForm(ctx, f, s); err == nil {
			return s, nil
		}
		s.close()
		s.readers = nil
		if ctx.Err() != nil {
			break
		}
	}
	return nil, fmt.Errorf("read layer %s: %w", id, err)
}

func (c *Catalogue) openForm(ctx context.Context, f Form, s *source) error {
	if err := f.check(); err != nil {
		return err
	}
	open := func(digest string, size int64) (store.Reader, error) {
		r, err := c.store.Open(ctx, BlobKey(digest))
		if err != nil {
			return nil, err
		}
		s.readers = append(s.readers, r)
		if r.Size() != size {
			return nil, fmt.Errorf("object %s has %d octets, want %d: %w", digest, r.Size(), size, sandbox.ErrLost)
		}
		return r, nil
	}
	image, err := open(f.Digest, f.Size)
	if err != nil {
		return err
	}
	var meta, data io.ReaderAt = image, nil
	if f.Kind == FormSplit && f.Size <= maxHeldMeta {
		// The tree is read in small pieces all over it.
		b, err := io.ReadAll(&contextReader{ctx, io.NewSectionReader(image, 0, f.Size)})
		if err != nil {
			return err
		}
		if got := digestText(sha256.Sum256(b)); got != f.Digest {
			return fmt.Errorf("image has digest %s, want %s: %w", got, f.Digest, sandbox.ErrLost)
		}
		meta = bytes.NewReader(b)
	} else if got, _, err := digestOf(ctx, image, f.Size); err != nil || got != f.Digest {
		return errors.Join(err, fmt.Errorf("image has digest %s, want %s: %w", got, f.Digest, sandbox.ErrLost))
	}
	if f.Data != nil {
		units, err := store.ReadAll(ctx, c.store, BlobKey(f.Data.Units), 32*f.Data.UnitCount())
		if err != nil {
			return err
		}
		if got := digestText(sha256.Sum256(units)); got != f.Data.Units {
			return fmt.Errorf("unit table has digest %s, want %s: %w", got, f.Data.Units, sandbox.ErrLost)
		}
		r, err := open(f.Data.Digest, f.Data.Size)
		if err != nil {
			return err
		}
		data = &checked{ctx: ctx, from: r, size: f.Data.Size, units: units}
	}
	im, err := erofs.Open(meta, data)
	if err != nil {
		return err
	}
	if f.Data == nil && im.Data != 0 || f.Data != nil && (im.Data != f.Data.Size || im.Tag != ID(f.Data.Digest).Hex()) {
		return fmt.Errorf("image names other contents than its form: %w", sandbox.ErrLost)
	}
	unmarkFolders(im.Root)
	s.root = im.Root
	if f.Data != nil {
		s.hot = f.Data.Hot
	}
	return nil
}

// unmarkFolders takes back what markFolders did.
func unmarkFolders(dir *erofs.Inode) {
	for i, x := range dir.Xattrs {
		if x.Name == originMark {
			dir.Xattrs = append(dir.Xattrs[:i:i], dir.Xattrs[i+1:]...)
			break
		}
	}
	for _, c := range dir.Children {
		if c.IsDir() {
			unmarkFolders(c)
		}
	}
}

// checked reads a file of contents by units and gives nothing of one whose hash is wrong.
type checked struct {
	ctx   context.Context
	from  io.ReaderAt
	size  int64
	units []byte

	mu   sync.Mutex
	unit int64 // that buf holds, +1
	buf  []byte
}

func (c *checked) ReadAt(p []byte, off int64) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	done := 0
	for done < len(p) {
		at := off + int64(done)
		if at >= c.size {
			return done, io.EOF
		}
		if err := c.load(at / UnitSize); err != nil {
			return done, err
		}
		done += copy(p[done:], c.buf[at%UnitSize:])
	}
	return done, nil
}

func (c *checked) load(unit int64) error {
	if c.unit == unit+1 {
		return nil
	}
	if err := c.ctx.Err(); err != nil {
		return err
	}
	c.unit = 0
	if cap(c.buf) < UnitSize {
		c.buf = make([]byte, UnitSize)
	}
	c.buf = c.buf[:min(UnitSize, c.size-unit*UnitSize)]
	if n, err := c.from.ReadAt(c.buf, unit*UnitSize); n < len(c.buf) {
		return fmt.Errorf("read contents: %d of %d octets: %w", n, len(c.buf), errors.Join(err, io.ErrUnexpectedEOF))
	}
	if sum := sha256.Sum256(c.buf); !bytes.Equal(sum[:], c.units[32*unit:][:32]) {
		return fmt.Errorf("read contents: unit %d is not what was written: %w", unit, sandbox.ErrLost)
	}
	c.unit = unit + 1
	return nil
}

// linkedIn finds the inodes with several names in a tree, as hashTree wants them.
func linkedIn(root *erofs.Inode) map[*erofs.Inode]string {
	once := map[*erofs.Inode]bool{}
	many := map[*erofs.Inode]string{}
	var walk func(dir *erofs.Inode)
	walk = func(dir *erofs.Inode) {
		for _, c := range dir.Children {
			switch {
			case c.IsDir():
				walk(c)
			case once[c]:
				many[c] = ""
			default:
				once[c] = true
			}
		}
	}
	walk(root)
	return many
}

// eachFile visits the regular files of a tree, each inode once, in the order of paths.
func eachFile(root *erofs.Inode, visit func(path string, in *erofs.Inode) error) error {
	done := map[*erofs.Inode]bool{}
	var walk func(dir *erofs.Inode, at string) error
	walk = func(dir *erofs.Inode, at string) error {
		for _, n := range dir.Names() {
			in := dir.Children[n]
			path := n
			if at != "" {
				path = at + "/" + n
			}
			var err error
			switch {
			case in.IsDir():
				err = walk(in, path)
			case in.Mode&unix.S_IFMT == unix.S_IFREG && !done[in]:
				done[in] = true
				err = visit(path, in)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	return walk(root, "")
}

// noLimits is for trees that were built within limits.
var noLimits = Limits{Entries: 1 << 40, Bytes: 1 << 60, Depth: 1 << 30, Xattrs: 1 << 40}
