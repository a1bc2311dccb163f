package layer

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	auxPrefix      = ".wh..wh." // other names of AUFS
	xattrPrefix    = "SCHILY.xattr."
)

// FromTar builds a layer from a tar stream (ustar, PAX or GNU; plain, gzip or zstd) with OCI whiteouts. A later entry replaces
// an earlier one of the same name. Names that leave the tree or go through a symbolic link are refused, a leading "/" is the
// tree's root. The errors of wrong input wrap sandbox.ErrInvalid and name the entry.
func FromTar(ctx context.Context, r io.Reader, out erofs.Output, opt Options) (*Built, error) {
	t := newTree(erofs.NewWriter(out), opt)
	if err := readTar(ctx, r, t); err != nil {
		return nil, err
	}
	built, err := t.finish()
	if err != nil {
		return nil, fmt.Errorf("tar: %w", err)
	}
	return built, nil
}

func readTar(ctx context.Context, r io.Reader, t *tree) error {
	plain, closer, err := decompress(&contextReader{ctx, r})
	if err != nil {
		return err
	}
	defer closer()
	end := &trailer{r: plain}
	im := &tarImport{tree: t, whiteouts: map[*erofs.Inode][]string{}}
	tr := tar.NewReader(end)
	last := ""
	for {
		hdr, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if last == "" && errors.Is(err, tar.ErrHeader) {
				return fmt.Errorf("tar: this is not a tar archive: %w", sandbox.ErrInvalid)
			}
			if last == "" && errors.Is(err, io.ErrUnexpectedEOF) {
				return fmt.Errorf("tar: this is not a tar archive, or was cut off in its first header: %w", sandbox.ErrInvalid)
			}
			if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
				err = fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
			}
			return fmt.Errorf("tar: after entry %.200q: %w", last, err)
		}
		last = hdr.Name
		if err := im.entry(hdr, tr); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("tar: %w", broken(err))
		}
		if _, err := io.Copy(io.Discard, tr); err != nil {
			return fmt.Errorf("tar: entry %.200q: %w", last, broken(err))
		}
		end.reset()
	}
	// archive/tar takes the stream's end for the archive's: one that was cut between two entries would pass for a whole one.
	if !end.marked() {
		return fmt.Errorf("tar: ends after entry %.200q without its end mark, so it was cut off: %w", last, sandbox.ErrInvalid)
	}
	// A sender may still be writing the padding of the last record.
	io.CopyN(io.Discard, end, 1<<20)
	im.mark()
	return nil
}

type tarImport struct {
	*tree
	whiteouts map[*erofs.Inode][]string // names removed from lower layers, by folder
	declared  int64                     // octets of sparse entries
}

// parts checks a name and splits it.
func parts(name string) ([]string, error) {
	if strings.IndexByte(name, 0) >= 0 {
		return nil, fmt.Errorf("entry %.200q: holds a NUL octet: %w", name, sandbox.ErrInvalid)
	}
	if len(name) > maxPath {
		return nil, fmt.Errorf("entry %.200q: name of %d octets, at most %d: %w", name, len(name), maxPath, sandbox.ErrInvalid)
	}
	var list []string
	for p := range strings.SplitSeq(name, "/") {
		switch {
		case p == "" || p == ".":
		case p == "..":
			return nil, fmt.Errorf("entry %.200q: \"..\" could leave the layer: %w", name, sandbox.ErrInvalid)
		case len(strings.TrimPrefix(p, whiteoutPrefix)) > 255:
			return nil, fmt.Errorf("entry %.200q: a part of %d octets, at most 255: %w", name, len(p), sandbox.ErrInvalid)
		default:
			list = append(list, p)
		}
	}
	return list, nil
}

// folder finds the folder of a path, making what is missing. It never goes through a link.
func (im *tarImport) folder(name string, path []string, create bool) (*erofs.Inode, error) {
	if len(path) > im.limits.Depth {
		return nil, fmt.Errorf("entry %.200q: deeper than %d folders: %w", name, im.limits.Depth, sandbox.ErrInvalid)
	}
	at := im.root
	for i, p := range path {
		child, ok := at.Children[p]
		if !ok {
			if !create {
				return nil, nil
			}
			if err := im.count(name); err != nil {
				return nil, err
			}
			child = newDir()
			if im.opt.Owner != nil {
				child.UID, child.GID = im.opt.Owner.UID, im.opt.Owner.GID
			}
			at.Children[p] = child
		}
		if !child.IsDir() {
			what := "not a folder"
			if child.Mode&unix.S_IFMT == unix.S_IFLNK {
				what = "a symbolic link"
			}
			return nil, fmt.Errorf("entry %.200q: %q is %s earlier in the archive: %w", name, strings.Join(path[:i+1], "/"), what, sandbox.ErrInvalid)
		}
		at = child
	}
	return at, nil
}

func (im *tarImport) entry(hdr *tar.Header, r io.Reader) error {
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	path, err := parts(hdr.Name)
	if err != nil {
		return err
	}
	for i := range path {
		if im.exclude[strings.Join(path[:i+1], "/")] {
			return nil
		}
	}
	if len(path) == 0 {
		if hdr.Typeflag != tar.TypeDir {
			return fmt.Errorf("entry %.200q: names the root, which must be a folder: %w", hdr.Name, sandbox.ErrInvalid)
		}
		return im.attributes(hdr, im.root)
	}
	for _, p := range path[:len(path)-1] {
		switch {
		case strings.HasPrefix(p, auxPrefix):
			im.skip(hdr.Name, "a name reserved by AUFS")
			return nil
		case strings.HasPrefix(p, whiteoutPrefix):
			return fmt.Errorf("entry %.200q: %q marks a removed name and can't be a folder: %w", hdr.Name, p, sandbox.ErrInvalid)
		}
	}
	dir, err := im.folder(hdr.Name, path[:len(path)-1], true)
	if err != nil {
		return err
	}
	base := path[len(path)-1]
	switch {
	case base == opaqueName:
		dir.Set(opaqueMark, []byte("y"))
		return nil
	case strings.HasPrefix(base, auxPrefix):
		im.skip(hdr.Name, "a name reserved by AUFS")
		return nil
	case strings.HasPrefix(base, whiteoutPrefix):
		gone := strings.TrimPrefix(base, whiteoutPrefix)
		if gone == "" || gone == "." || gone == ".." {
			return fmt.Errorf("entry %.200q: a whiteout of nothing: %w", hdr.Name, sandbox.ErrInvalid)
		}
		if err := im.count(hdr.Name); err != nil {
			return err
		}
		im.whiteouts[dir] = append(im.whiteouts[dir], gone)
		return nil
	}
	old, exists := dir.Children[base]
	if !exists {
		if err := im.count(hdr.Name); err != nil {
			return err
		}
	}
	if hdr.Typeflag == tar.TypeLink {
		in, err := im.target(hdr)
		if err != nil {
			return err
		}
		if exists && old.IsDir() {
			return fmt.Errorf("entry %.200q: a folder of that name came earlier: %w", hdr.Name, sandbox.ErrInvalid)
		}
		dir.Children[base] = in
		return nil
	}
	in := &erofs.Inode{}
	switch hdr.Typeflag {
	case tar.TypeReg, 0, tar.TypeCont, tar.TypeGNUSparse: // 0 is what V7 wrote
		in.Mode = unix.S_IFREG
	case tar.TypeDir:
		in.Mode = unix.S_IFDIR
		in.Children = map[string]*erofs.Inode{}
		if exists && old.IsDir() {
			in = old
			in.Xattrs = dropMarks(in.Xattrs)
		}
	case tar.TypeSymlink:
		in.Mode = unix.S_IFLNK
		in.Target = hdr.Linkname
		if in.Target == "" || len(in.Target) >= erofs.BlockSize || strings.IndexByte(in.Target, 0) >= 0 {
			return fmt.Errorf("entry %.200q: symbolic link to %d octets, want 1 to %d without NUL: %w", hdr.Name, len(in.Target), erofs.BlockSize-1, sandbox.ErrInvalid)
		}
	case tar.TypeChar:
		in.Mode = unix.S_IFCHR
	case tar.TypeBlock:
		in.Mode = unix.S_IFBLK
	case tar.TypeFifo:
		in.Mode = unix.S_IFIFO
	default:
		return fmt.Errorf("entry %.200q: type %q is not known: %w", hdr.Name, hdr.Typeflag, sandbox.ErrInvalid)
	}
	if exists && old.IsDir() && !in.IsDir() && len(old.Children) > 0 {
		return fmt.Errorf("entry %.200q: a folder of that name with entries came earlier: %w", hdr.Name, sandbox.ErrInvalid)
	}
	switch in.Mode & unix.S_IFMT {
	case unix.S_IFCHR, unix.S_IFBLK:
		// The kernel's own numbers have 12 and 20 bits.
		if hdr.Devmajor < 0 || hdr.Devmajor >= 1<<12 || hdr.Devminor < 0 || hdr.Devminor >= 1<<20 {
			return fmt.Errorf("entry %.200q: device %d:%d: %w", hdr.Name, hdr.Devmajor, hdr.Devminor, sandbox.ErrInvalid)
		}
		in.Major, in.Minor = uint32(hdr.Devmajor), uint32(hdr.Devminor)
		if in.IsWhiteout() {
			dir.Children[base] = newWhiteout()
			return nil
		}
	}
	if err := im.attributes(hdr, in); err != nil {
		return err
	}
	if in.Mode&unix.S_IFMT == unix.S_IFREG {
		// What a sparse entry declares is counted before it is read, which takes a second for each 1.5 GiB of holes.
		if sparse(hdr) {
			if im.declared += hdr.Size; im.declared > im.limits.Holes {
				return fmt.Errorf("entry %.200q: sparse files of over %d octets in all: %w", hdr.Name, im.limits.Holes, sandbox.ErrExhausted)
			}
		}
		if err := im.content(hdr.Name, in, r, hdr.Size); err != nil {
			return err
		}
	}
	dir.Children[base] = in
	return nil
}

// sparse says whether an entry's size is not what the archive holds of it.
func sparse(hdr *tar.Header) bool {
	if hdr.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for _, k := range []string{"GNU.sparse.realsize", "GNU.sparse.size", "GNU.sparse.map", "GNU.sparse.major"} {
		if hdr.PAXRecords[k] != "" {
			return true
		}
	}
	return false
}

// dropMarks keeps an opaque mark when a folder's own entry comes after it.
func dropMarks(list []erofs.Xattr) []erofs.Xattr {
	for _, x := range list {
		if x.Name == opaqueMark {
			return []erofs.Xattr{x}
		}
	}
	return nil
}

// target finds the inode that a hard link names.
func (im *tarImport) target(hdr *tar.Header) (*erofs.Inode, error) {
	path, err := parts(hdr.Linkname)
	if err != nil {
		return nil, fmt.Errorf("entry %.200q: link: %w", hdr.Name, err)
	}
	if len(path) > 0 {
		dir, err := im.folder(hdr.Linkname, path[:len(path)-1], false)
		if err != nil {
			return nil, fmt.Errorf("entry %.200q: link: %w", hdr.Name, err)
		}
		if dir != nil {
			if in, ok := dir.Children[path[len(path)-1]]; ok {
				if in.IsDir() {
					return nil, fmt.Errorf("entry %.200q: hard link to the folder %.200q: %w", hdr.Name, hdr.Linkname, sandbox.ErrInvalid)
				}
				im.linked[in] = ""
				return in, nil
			}
		}
	}
	return nil, fmt.Errorf("entry %.200q: hard link to %.200q, which is not in the archive before it: %w", hdr.Name, hdr.Linkname, sandbox.ErrInvalid)
}

func (im *tarImport) attributes(hdr *tar.Header, in *erofs.Inode) error {
	in.Mode = in.Mode&unix.S_IFMT | uint32(hdr.Mode)&0o7777
	if in.Mode&unix.S_IFMT == unix.S_IFLNK {
		in.Mode = unix.S_IFLNK | 0o777 // as every file system makes it, whatever the archive says
	}
	if hdr.Uid < 0 || hdr.Gid < 0 || int64(hdr.Uid) >= 1<<32-1 || int64(hdr.Gid) >= 1<<32-1 {
		return fmt.Errorf("entry %.200q: owner %d:%d: %w", hdr.Name, hdr.Uid, hdr.Gid, sandbox.ErrInvalid)
	}
	in.UID, in.GID = uint32(hdr.Uid), uint32(hdr.Gid)
	if !hdr.ModTime.IsZero() {
		in.Sec, in.Nsec = hdr.ModTime.Unix(), uint32(hdr.ModTime.Nanosecond())
	}
	for key, value := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrPrefix)
		if !ok {
			continue
		}
		if strings.HasPrefix(name, overlayPrefix) {
			// A mark that points elsewhere would let an archive show what lower layers hide; opaque alone says what a
			// whiteout says too.
			if name == opaqueMark && value == "y" && in.IsDir() {
				in.Set(opaqueMark, []byte("y"))
			} else {
				im.skip(hdr.Name, "attribute "+name)
			}
			continue
		}
		if err := im.setXattr(hdr.Name, in, name, []byte(value)); err != nil {
			return err
		}
	}
	return im.own(hdr.Name, in)
}

// mark turns the whiteouts into the overlay's form. They speak of lower layers alone: where this one has the name as well, it
// stays, and a folder hides what lies below it.
func (im *tarImport) mark() {
	for dir, names := range im.whiteouts {
		for _, n := range names {
			switch in, ok := dir.Children[n]; {
			case !ok:
				dir.Children[n] = newWhiteout()
			case in.IsDir():
				in.Set(opaqueMark, []byte("y"))
			}
		}
	}
}

// contextReader ends a read when the context does, between reads.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// trailer remembers whether the last octets read since reset were an archive's end mark: at least one block of zeros. Behind
// an entry less than a block of padding can come.
type trailer struct {
	r    io.Reader
	last [512]byte
	n    int64
}

func (t *trailer) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	b := p[:n]
	t.n += int64(n)
	if len(b) >= len(t.last) {
		copy(t.last[:], b[len(b)-len(t.last):])
	} else if n > 0 {
		copy(t.last[:], t.last[n:])
		copy(t.last[len(t.last)-n:], b)
	}
	return n, err
}

func (t *trailer) reset() { t.n = 0 }

func (t *trailer) marked() bool {
	return t.n >= 512 && t.last == [512]byte{}
}

var (
	gzipMagic = []byte{0x1f, 0x8b}
	zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}
)

// decompress recognises gzip and zstd by their first octets.
func decompress(r io.Reader) (io.Reader, func(), error) {
	b := bufio.NewReaderSize(r, 256<<10)
	head, err := b.Peek(4)
	if err != nil && err != io.EOF {
		return nil, nil, fmt.Errorf("tar: read: %w", err)
	}
	switch {
	case bytes.HasPrefix(head, gzipMagic):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, nil, fmt.Errorf("tar: gzip: %w: %w", sandbox.ErrInvalid, err)
		}
		return z, func() { z.Close() }, nil
	case bytes.HasPrefix(head, zstdMagic):
		// The window bounds what a frame may make the decoder hold.
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20), zstd.WithDecoderMaxMemory(256<<20))
		if err != nil {
			return nil, nil, fmt.Errorf("tar: zstd: %w: %w", sandbox.ErrInvalid, err)
		}
		return z, z.Close, nil
	}
	return b, func() {}, nil
}
