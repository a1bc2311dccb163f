package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// defaultForm is the one that is built when Options name none.
const defaultForm = FormSplit

const maxObject = 1 << 44 // octets: what 32-bit block numbers reach

// check says whether the form, which was read from a store, is one that this program knows and makes sense.
func (f Form) check() error {
	if _, err := ParseID(f.Digest); err != nil {
		return fmt.Errorf("form %.40q: %w", f.Kind, err)
	}
	if f.Size < erofs.BlockSize || f.Size > maxObject {
		return fmt.Errorf("form %.40q: size %d: %w", f.Kind, f.Size, sandbox.ErrInvalid)
	}
	switch d := f.Data; {
	case f.Kind == FormEROFS && d == nil || f.Kind == FormSplit && d == nil:
		return nil
	case f.Kind == FormSplit:
		if d.Size <= 0 || d.Size > maxObject || d.Size%erofs.BlockSize != 0 || d.Hot < 0 || d.Hot > d.Size {
			return fmt.Errorf("form %s: data of %d octets, %d of them hot: %w", f.Kind, d.Size, d.Hot, sandbox.ErrInvalid)
		}
		for _, s := range []string{d.Digest, d.Units} {
			if _, err := ParseID(s); err != nil {
				return fmt.Errorf("form %s: data: %w", f.Kind, err)
			}
		}
		return nil
	}
	return fmt.Errorf("form %.40q is not known: %w", f.Kind, sandbox.ErrUnsupported)
}

type blob struct {
	key    string
	digest string
	size   int64
	what   string
}

// blobs are the form's objects, in the order in which they are published.
func (f Form) blobs() []blob {
	var list []blob
	if d := f.Data; d != nil {
		list = append(list, blob{BlobKey(d.Units), d.Units, 32 * d.UnitCount(), "unit table"}, blob{BlobKey(d.Digest), d.Digest, d.Size, "contents"})
	}
	return append(list, blob{BlobKey(f.Digest), f.Digest, f.Size, "image"})
}

// Stored is the space that all the form's objects take, in octets.
func (f Form) Stored() int64 {
	var n int64
	for _, b := range f.blobs() {
		n += b.size
	}
	return n
}

// whole looks at whether all objects of a form are there, with the right sizes.
func (c *Catalogue) whole(ctx context.Context, f Form) error {
	if err := f.check(); err != nil {
		return err
	}
	for _, b := range f.blobs() {
		info, err := c.store.Stat(ctx, b.key)
		if err != nil {
			return fmt.Errorf("its %s: %w", b.what, err)
		}
		if info.Size != b.size {
			return fmt.Errorf("its %s has %d octets, want %d: %w", b.what, info.Size, b.size, sandbox.ErrLost)
		}
	}
	return nil
}

func (c *Catalogue) wholeForms(ctx context.Context, d Descriptor) []Form {
	var list []Form
	for _, f := range d.Forms {
		if c.whole(ctx, f) == nil {
			list = append(list, f)
		}
	}
	return list
}

// inFront puts a new form before those there are, which are superseded from now on.
func inFront(f Form, old []Form, now time.Time) []Form {
	now = now.UTC()
	list := []Form{f}
	for _, o := range old {
		if o.Digest == f.Digest {
			continue
		}
		if o.Superseded == nil {
			o.Superseded = &now
		}
		list = append(list, o)
	}
	return list
}

// verify reads all objects of a form.
func (c *Catalogue) verify(ctx context.Context, f Form) error {
	if err := f.check(); err != nil {
		return err
	}
	for _, b := range f.blobs() {
		r, err := c.store.Open(ctx, b.key)
		if err != nil {
			return fmt.Errorf("%s: %w", b.what, err)
		}
		if r.Size() != b.size {
			r.Close()
			return fmt.Errorf("%s has %d octets, want %d: %w", b.what, r.Size(), b.size, sandbox.ErrLost)
		}
		got, units, err := digestOf(ctx, r, b.size)
		r.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", b.what, err)
		}
		if got != b.digest {
			return fmt.Errorf("%s has digest %s, want %s: %w", b.what, got, b.digest, sandbox.ErrLost)
		}
		if d := f.Data; d != nil && b.digest == d.Digest {
			if sum := digestText(sha256.Sum256(units)); sum != d.Units {
				return fmt.Errorf("%s: its units have digest %s, want %s: %w", b.what, sum, d.Units, sandbox.ErrLost)
			}
		}
	}
	return nil
}

func digestText(sum [sha256.Size]byte) string { return idPrefix + hex.EncodeToString(sum[:]) }

// digestOf reads an object once and returns its digest and the sha256 of each of its units. Both hashes run at the same time.
func digestOf(ctx context.Context, r io.ReaderAt, size int64) (digest string, units []byte, err error) {
	h := sha256.New()
	var bufs [2][]byte
	var hashing sync.WaitGroup
	defer hashing.Wait()
	for at, n := int64(0), 0; at < size; n++ {
		if err := ctx.Err(); err != nil {
			return "", nil, err
		}
		buf := &bufs[n%2]
		if *buf == nil {
			*buf = make([]byte, min(UnitSize, size))
		}
		part := (*buf)[:min(UnitSize, size-at)]
		if n, err := r.ReadAt(part, at); n < len(part) {
			if err == nil || errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return "", nil, fmt.Errorf("digest: read %d of %d octets: %w", at+int64(n), size, err)
		}
		hashing.Wait() // for the other buffer
		hashing.Go(func() { h.Write(part) })
		sum := sha256.Sum256(part)
		units = append(units, sum[:]...)
		at += int64(len(part))
	}
	hashing.Wait()
	return digestText([sha256.Size]byte(h.Sum(nil))), units, nil
}

// formDraft is a form that is being written.
type formDraft struct {
	c     *Catalogue
	image *erofs.Writer
	meta  store.Draft
	data  store.Draft // nil in the one-file form
	form  Form
	units []byte
}

func (c *Catalogue) newDraft(ctx context.Context, kind string) (*formDraft, error) {
	if kind == "" {
		kind = defaultForm
	}
	d := &formDraft{c: c, form: Form{Kind: kind}}
	if kind != FormEROFS && kind != FormSplit {
		return nil, fmt.Errorf("form %.40q: want %s or %s: %w", kind, FormEROFS, FormSplit, sandbox.ErrInvalid)
	}
	var err error
	if d.meta, err = c.store.Create(ctx); err != nil {
		return nil, err
	}
	if kind == FormEROFS {
		d.image = erofs.NewWriter(d.meta)
		return d, nil
	}
	if d.data, err = c.store.Create(ctx); err != nil {
		d.discard()
		return nil, err
	}
	d.image = erofs.NewSplitWriter(d.meta, d.data)
	return d, nil
}

func (d *formDraft) discard() {
	d.meta.Discard()
	if d.data != nil {
		d.data.Discard()
	}
}

// finish lays out the tree, whose contents lie in the draft's image, and returns the form.
func (d *formDraft) finish(ctx context.Context, t *tree) (*Built, Form, error) {
	var hot int64
	if len(t.opt.Hot) > 0 && d.image.Split() {
		var err error
		if hot, err = d.moveHot(ctx, t); err != nil {
			return nil, Form{}, err
		}
	}
	return d.finishOrdered(ctx, t, hot)
}

// finishOrdered is finish for contents that lie in their final order.
func (d *formDraft) finishOrdered(ctx context.Context, t *tree, hot int64) (*Built, Form, error) {
	built, err := t.seal()
	if err != nil {
		return nil, Form{}, err
	}
	if d.image.Split() {
		if err := d.finishData(ctx, hot); err != nil {
			return nil, Form{}, err
		}
	}
	if err := t.write(built); err != nil {
		return nil, Form{}, err
	}
	d.form.Size = built.Size
	if d.form.Digest, _, err = digestOf(ctx, d.meta, built.Size); err != nil {
		return nil, Form{}, err
	}
	return built, d.form, nil
}

func (d *formDraft) finishData(ctx context.Context, hot int64) error {
	size, err := d.image.EndData()
	if err != nil || size == 0 {
		return err
	}
	digest, units, err := digestOf(ctx, d.data, size)
	if err != nil {
		return err
	}
	d.units = units
	d.form.Data = &Data{Digest: digest, Size: size, Units: digestText(sha256.Sum256(units)), Hot: hot}
	return d.image.SetTag(ID(digest).Hex())
}

// publish makes the form's objects visible: what the image needs before it.
func (d *formDraft) publish(ctx context.Context) error {
	if f := d.form.Data; f != nil {
		if err := store.Put(ctx, d.c.store, BlobKey(f.Units), bytes.NewReader(d.units)); err != nil {
			return err
		}
		if err := d.data.Publish(ctx, BlobKey(f.Digest)); err != nil {
			return err
		}
	}
	return d.meta.Publish(ctx, BlobKey(d.form.Digest))
}
