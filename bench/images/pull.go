package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"
)

// registryServer is a registry behind the link, with blobs on the disk.
type registryServer struct {
	server *httptest.Server
	link   *link
}

func newRegistry(dir string, l *link) *registryServer {
	h := registry.New(registry.WithBlobHandler(registry.NewDiskBlobHandler(dir)), registry.Logger(log.New(io.Discard, "", 0)))
	return &registryServer{httptest.NewServer(l.wrap(h)), l}
}

func (r *registryServer) ref(image string) (name.Reference, error) {
	return name.ParseReference(strings.TrimPrefix(r.server.URL, "http://")+"/bench/"+image+":latest", name.Insecure)
}

// push stores a tar as an image of one gzip layer, as a registry has it. The compressed layer is kept beside the tar: making it takes longer
// than most of what is measured.
func (r *registryServer) push(ctx context.Context, image, tree string) error {
	packed := tree + ".gz"
	if _, err := os.Stat(packed); err != nil {
		if err := compress(packed, tree); err != nil {
			return err
		}
	}
	layer, err := tarball.LayerFromFile(packed)
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	ref, err := r.ref(image)
	if err != nil {
		return err
	}
	return remote.Write(ref, img, remote.WithContext(ctx))
}

func compress(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to + ".new")
	if err != nil {
		return err
	}
	defer os.Remove(to + ".new")
	z, err := gzip.NewWriterLevel(out, gzip.BestSpeed) // the registry library's own choice
	if err == nil {
		_, err = io.Copy(z, in)
	}
	if err == nil {
		err = z.Close()
	}
	if err = errors.Join(err, out.Close()); err != nil {
		return err
	}
	return os.Rename(to+".new", to)
}

// pull fetches an image and unpacks its layers into a folder, as an engine does before the first command.
func (r *registryServer) pull(ctx context.Context, image, dir string) error {
	ref, err := r.ref(image)
	if err != nil {
		return err
	}
	img, err := remote.Image(ref, remote.WithContext(ctx))
	if err != nil {
		return err
	}
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	for _, l := range layers {
		if err := unpackLayer(l, dir); err != nil {
			return err
		}
	}
	return nil
}

func unpackLayer(l v1.Layer, dir string) error {
	in, err := l.Uncompressed()
	if err != nil {
		return err
	}
	defer in.Close()
	return unpack(in, dir)
}

// unpack lays the entries of a tar down; the archive is our own.
func unpack(in io.Reader, dir string) error {
	type stamp struct {
		path string
		h    *tar.Header
	}
	var folders []stamp
	t := tar.NewReader(in)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		path := filepath.Join(dir, h.Name)
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(path, 0o755)
			folders = append(folders, stamp{path, h})
		case tar.TypeReg:
			err = unpackFile(path, t)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, path)
		case tar.TypeLink:
			err = os.Link(filepath.Join(dir, h.Linkname), path)
		case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
			kind := map[byte]uint32{tar.TypeChar: unix.S_IFCHR, tar.TypeBlock: unix.S_IFBLK, tar.TypeFifo: unix.S_IFIFO}[h.Typeflag]
			err = unix.Mknod(path, kind|0o600, int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))))
		}
		if err == nil && h.Typeflag != tar.TypeLink {
			err = attributes(path, h)
		}
		if err != nil {
			return fmt.Errorf("unpack %s: %w", h.Name, err)
		}
	}
	for _, f := range folders {
		if err := os.Chtimes(f.path, f.h.ModTime, f.h.ModTime); err != nil {
			return err
		}
	}
	return nil
}

func unpackFile(path string, r io.Reader) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}

func attributes(path string, h *tar.Header) error {
	if err := os.Lchown(path, h.Uid, h.Gid); err != nil || h.Typeflag == tar.TypeSymlink {
		return err
	}
	if err := os.Chmod(path, h.FileInfo().Mode()); err != nil {
		return err
	}
	return os.Chtimes(path, h.ModTime, h.ModTime)
}

// inFolder runs a command in an unpacked tree.
func inFolder(ctx context.Context, dir, command string) error {
	const script = `mount --bind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec chroot "$0" sh -c "$1"`
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--pid", "--fork", "--propagation", "private", "sh", "-c", script, dir, command)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, tail(string(out)))
	}
	return nil
}
