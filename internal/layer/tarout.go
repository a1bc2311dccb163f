package layer

import (
	"archive/tar"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// WriteTar writes a layer as a tar archive in the form of OCI: removed names as .wh.name, opaque folders with .wh..wh..opq. The octets
// follow from the layer's ID alone, and a layer that is built from the archive has the same ID, save for a snapshot in which folders
// were renamed: these are written whole. A layer with what such an archive can't say is refused with sandbox.ErrUnsupported.
func (c *Catalogue) WriteTar(ctx context.Context, id ID, w io.Writer) error {
	root, list, err := c.alone(ctx, id)
	defer func() {
		for _, s := range list {
			s.close()
		}
	}()
	if err != nil {
		return fmt.Errorf("write tar: %w", err)
	}
	if err := writeTar(ctx, root, w); err != nil {
		return fmt.Errorf("write tar of layer %s: %w", id, err)
	}
	return nil
}

// WriteFlatTar writes what a sandbox on these layers, lowest first, would see, as one archive without whiteouts.
func (c *Catalogue) WriteFlatTar(ctx context.Context, ids []ID, w io.Writer) error {
	list, err := c.sources(ctx, ids)
	defer func() {
		for _, s := range list {
			s.close()
		}
	}()
	if err != nil {
		return fmt.Errorf("write tar: %w", err)
	}
	root, err := mergeTrees(list, false)
	if err != nil {
		return fmt.Errorf("write tar: %w", err)
	}
	if err := writeTar(ctx, root, w); err != nil {
		return fmt.Errorf("write tar of %d layers: %w", len(ids), err)
	}
	return nil
}

func writeTar(ctx context.Context, root *erofs.Inode, out io.Writer) error {
	sink := &sink{w: out}
	w := &tarWriter{ctx: ctx, w: tar.NewWriter(sink), sink: sink, first: map[*erofs.Inode]string{}, buf: make([]byte, 1<<20)}
	if err := w.header("./", root); err != nil {
		return err
	}
	if err := w.folder("", root); err != nil {
		return err
	}
	return w.w.Close()
}

type tarWriter struct {
	ctx   context.Context
	w     *tar.Writer
	sink  *sink
	first map[*erofs.Inode]string
	buf   []byte
}

func (w *tarWriter) folder(at string, dir *erofs.Inode) error {
	if isOpaque(dir) {
		if err := w.mark(at + opaqueName); err != nil {
			return err
		}
	}
	for _, name := range dir.Names() {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		in, path := dir.Children[name], at+name
		switch {
		case in.IsWhiteout():
			if err := w.mark(at + whiteoutPrefix + name); err != nil {
				return err
			}
			continue
		case strings.HasPrefix(name, whiteoutPrefix):
			return fmt.Errorf("entry %.200q: such a name marks a removed file in an archive: %w", path, sandbox.ErrUnsupported)
		case in.IsDir():
			if err := w.header(path+"/", in); err != nil {
				return err
			}
			if err := w.folder(path+"/", in); err != nil {
				return err
			}
			continue
		}
		if first, ok := w.first[in]; ok {
			if err := w.put(&tar.Header{Typeflag: tar.TypeLink, Name: path, Linkname: first, ModTime: time.Unix(0, 0)}); err != nil {
				return err
			}
			continue
		}
		w.first[in] = path
		if err := w.header(path, in); err != nil {
			return err
		}
		if in.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		from := in.Data.Reader()
		if from == nil {
			return fmt.Errorf("entry %.200q: its content is not there: %w", path, sandbox.ErrLost)
		}
		// Neither side's own way of copying: the buffer is one unit of the store.
		if _, err := io.CopyBuffer(struct{ io.Writer }{w.w}, struct{ io.Reader }{&contextReader{w.ctx, from}}, w.buf); err != nil {
			return fmt.Errorf("entry %.200q: %w", path, err)
		}
	}
	return nil
}

// sink remembers that its writer failed, which is another thing than a header that can't be written.
type sink struct {
	w   io.Writer
	err error
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	if err != nil {
		s.err = err
	}
	return n, err
}

func (w *tarWriter) put(h *tar.Header) error {
	h.Format = tar.FormatPAX
	err := w.w.WriteHeader(h)
	switch {
	case err == nil:
		return nil
	case w.sink.err != nil:
		return w.sink.err
	}
	return fmt.Errorf("entry %.200q: %w: %w", h.Name, sandbox.ErrUnsupported, err)
}

// mark writes the empty file that stands for a removal.
func (w *tarWriter) mark(name string) error {
	return w.put(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, ModTime: time.Unix(0, 0)})
}

func (w *tarWriter) header(name string, in *erofs.Inode) error {
	h := &tar.Header{
		Name: name, Mode: int64(in.Mode & 0o7777), Uid: int(in.UID), Gid: int(in.GID),
		ModTime: time.Unix(in.Sec, int64(in.Nsec)), PAXRecords: map[string]string{},
	}
	switch in.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, in.Data.Size
	case unix.S_IFDIR:
		h.Typeflag = tar.TypeDir
	case unix.S_IFLNK:
		h.Typeflag, h.Linkname = tar.TypeSymlink, in.Target
	case unix.S_IFCHR:
		h.Typeflag, h.Devmajor, h.Devminor = tar.TypeChar, int64(in.Major), int64(in.Minor)
	case unix.S_IFBLK:
		h.Typeflag, h.Devmajor, h.Devminor = tar.TypeBlock, int64(in.Major), int64(in.Minor)
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	default:
		return fmt.Errorf("entry %.200q: type %#o: %w", name, in.Mode, sandbox.ErrUnsupported)
	}
	for _, x := range in.Xattrs {
		if strings.HasPrefix(x.Name, overlayPrefix) {
			continue
		}
		if strings.ContainsAny(x.Name, "=\x00") {
			return fmt.Errorf("entry %.200q: attribute %.80q can't be in an archive: %w", name, x.Name, sandbox.ErrUnsupported)
		}
		h.PAXRecords[xattrPrefix+x.Name] = string(x.Value)
	}
	return w.put(h)
}
