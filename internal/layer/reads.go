package layer

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Range is a part of a layer's contents, in octets.
type Range struct {
	Off int64 `json:"off"`
	Len int64 `json:"len"`
}

const maxRanges = 1 << 20

// FilesAt names the files whose contents were read, in the order of the reads, which are parts of the contents with the digest data.
// Of several files with one content the first by name is told.
func (c *Catalogue) FilesAt(ctx context.Context, id ID, data string, reads []Range) ([]string, error) {
	s, err := c.sourceOf(ctx, id, data)
	if err != nil {
		return nil, err
	}
	defer s.close()
	var out []string
	for _, p := range partsRead(s.root, reads) {
		out = append(out, p.path)
	}
	return out, nil
}

// RelayoutRead stores a layer anew, like Relayout, with what was read in front: whole files, and of large ones of which little was read
// those parts alone. The reads are parts of the contents with the digest data, in their order.
func (c *Catalogue) RelayoutRead(ctx context.Context, id ID, data string, reads []Range) (Descriptor, error) {
	d, err := c.relayout(ctx, id, data, func(root *erofs.Inode) []part { return partsRead(root, reads) })
	if err != nil {
		return Descriptor{}, fmt.Errorf("lay out layer %s: %w", id, err)
	}
	return d, nil
}

// wholeChunks is the size of a file, in chunks, up to which it is never taken apart.
const wholeChunks = 4

// part is a file that lies in front, or some chunks of it.
type part struct {
	path   string
	in     *erofs.Inode
	chunks []int // ascending; nil is all
}

func wholeFiles(list []*erofs.Inode) []part {
	var out []part
	for _, in := range list {
		out = append(out, part{in: in})
	}
	return out
}

// partsRead finds what was read of which file.
func partsRead(root *erofs.Inode, reads []Range) []part {
	type extent struct {
		at, end int64 // in the contents
		offset  int64 // of at in the file
		file    int
	}
	var files []part
	var extents []extent
	known := map[int64]bool{} // contents that several files have
	eachFile(root, func(path string, in *erofs.Inode) error {
		at, stored := in.Data.Start()
		if !stored || known[at] {
			return nil
		}
		known[at] = true
		in.Data.Chunks(func(at, offset, size int64) { extents = append(extents, extent{at, at + size, offset, len(files)}) })
		files = append(files, part{path: path, in: in})
		return nil
	})
	slices.SortFunc(extents, func(a, b extent) int { return cmp.Compare(a.at, b.at) })
	chunks := map[int]map[int]bool{}
	var order []int
	for _, r := range reads[:min(len(reads), maxRanges)] {
		if r.Off < 0 || r.Len <= 0 {
			continue
		}
		end := r.Off + min(r.Len, maxObject)
		// The ends ascend too, save where contents share a chunk, which no Writer does.
		i, _ := slices.BinarySearchFunc(extents, r.Off, func(e extent, off int64) int { return cmp.Compare(e.end, off+1) })
		for ; i < len(extents) && extents[i].at < end; i++ {
			e := extents[i]
			if chunks[e.file] == nil {
				chunks[e.file] = map[int]bool{}
				order = append(order, e.file)
			}
			first := (e.offset + max(0, r.Off-e.at)) / erofs.ChunkSize
			last := (e.offset + min(end, e.end) - e.at - 1) / erofs.ChunkSize
			for n := first; n <= last; n++ {
				chunks[e.file][int(n)] = true
			}
		}
	}
	var out []part
	for _, i := range order {
		p := files[i]
		all := (p.in.Data.Size + erofs.ChunkSize - 1) / erofs.ChunkSize
		if n := int64(len(chunks[i])); all > wholeChunks && n*16 < all*15 && p.in.Data.Size <= erofs.MaxAssembly {
			for c := range chunks[i] {
				p.chunks = append(p.chunks, c)
			}
			slices.Sort(p.chunks)
		}
		out = append(out, p)
	}
	return out
}

// adopt fills a tree with one that was read; its contents are taken over, the parts that are hot first.
func (t *tree) adopt(ctx context.Context, root *erofs.Inode, hot []part) (front int64, err error) {
	t.root = root
	t.linked = linkedIn(root)
	here := map[*erofs.Inode]string{}
	eachFile(root, func(path string, in *erofs.Inode) error {
		here[in] = path
		return nil
	})
	done := map[*erofs.Inode]bool{}
	whole := func(path string, in *erofs.Inode) error {
		if done[in] {
			return nil
		}
		done[in] = true
		from := in.Data.Reader()
		if from == nil {
			return fmt.Errorf("entry %.200q: its content is not there: %w", path, sandbox.ErrLost)
		}
		return t.content(path, in, &contextReader{ctx, from}, in.Data.Size)
	}
	type pending struct {
		path string
		in   *erofs.Inode
		a    *erofs.Assembly
	}
	var later []pending
	buf := make([]byte, erofs.ChunkSize)
	start := t.image.Size()
	for _, p := range hot {
		path, ok := here[p.in]
		switch {
		case !ok || done[p.in]:
			continue
		case p.chunks == nil:
			if err := whole(path, p.in); err != nil {
				return 0, err
			}
			continue
		}
		done[p.in] = true
		a, err := t.image.Assemble(p.in.Data.Size)
		if err != nil {
			return 0, err
		}
		for _, i := range p.chunks {
			if err := copyChunk(ctx, a, p.in.Data, i, buf, nil); err != nil {
				return 0, fmt.Errorf("entry %.200q: %w", path, err)
			}
		}
		later = append(later, pending{path, p.in, a})
	}
	front = t.image.Size() - start
	for _, p := range later {
		h := sha256.New()
		size := p.in.Data.Size
		for i := 0; int64(i)*erofs.ChunkSize < size; i++ {
			if err := copyChunk(ctx, p.a, p.in.Data, i, buf, h); err != nil {
				return 0, fmt.Errorf("entry %.200q: %w", p.path, err)
			}
			if i == 0 {
				t.note(p.in, buf[:min(size, 20)])
			}
		}
		if p.in.Data, err = p.a.End([sha256.Size]byte(h.Sum(nil))); err != nil {
			return 0, err
		}
		t.bytes += size
	}
	return front, eachFile(root, whole)
}

// copyChunk reads one chunk and puts it into the assembly where it is not there; hash, when given, gets its octets.
func copyChunk(ctx context.Context, a *erofs.Assembly, c erofs.Content, i int, buf []byte, hash io.Writer) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	at := int64(i) * erofs.ChunkSize
	b := buf[:min(erofs.ChunkSize, c.Size-at)]
	from := c.Reader()
	if from == nil {
		return fmt.Errorf("its content is not there: %w", sandbox.ErrLost)
	}
	if n, err := from.ReadAt(b, at); n < len(b) {
		return errors.Join(err, io.ErrUnexpectedEOF)
	}
	if hash != nil {
		hash.Write(b)
	}
	if a.Has(i) {
		return nil
	}
	return a.Put(i, b)
}
