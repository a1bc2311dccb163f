package oci

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Local is an image in a file or folder of this machine.
type Local struct {
	Name    string // reference that it carries; may be empty
	Digest  string // of its manifest; "" where there is none
	Config  []byte
	DiffIDs []string // of its layers, lowest first

	open  func(ctx context.Context, i int) (io.ReadCloser, error)
	close func() error
}

// Layer opens a layer: a tar, plain or compressed.
func (l *Local) Layer(ctx context.Context, i int) (io.ReadCloser, error) { return l.open(ctx, i) }

// Close frees what was opened.
func (l *Local) Close() error { return l.close() }

const (
	annotationRef        = "org.opencontainers.image.ref.name"
	annotationContainerd = "io.containerd.image.name"
)

// OpenLayout opens an OCI layout folder. The tag picks one of several images.
func OpenLayout(ctx context.Context, dir, tag, arch string) (*Local, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	src := &layout{root: root}
	out, err := src.image(ctx, tag, arch)
	if err != nil {
		root.Close()
		return nil, fmt.Errorf("OCI layout %s: %w", dir, err)
	}
	out.close = root.Close
	return out, nil
}

// layout is a source that reads a folder; links in it lead nowhere else.
type layout struct{ root *os.Root }

func (l *layout) file(name string, limit int64) ([]byte, error) {
	f, err := l.root.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%s: more than %d octets: %w", name, limit, sandbox.ErrInvalid)
	}
	return b, err
}

func (l *layout) image(ctx context.Context, tag, arch string) (*Local, error) {
	raw, err := l.file("index.json", maxManifest)
	if err != nil {
		return nil, err
	}
	var index document
	if err := decode("index.json", raw, &index); err != nil {
		return nil, err
	}
	var names []string
	list := index.Manifests[:0]
	for _, d := range index.Manifests {
		n := d.Annotations[annotationContainerd]
		if n == "" {
			n = d.Annotations[annotationRef]
		}
		if n != "" && !slices.Contains(names, n) {
			names = append(names, n)
		}
		if tag == "" || n == tag || d.Annotations[annotationRef] == tag || strings.HasSuffix(n, ":"+tag) {
			list = append(list, d)
		}
	}
	switch {
	case len(list) == 0 && tag != "":
		return nil, fmt.Errorf("no image %s; it has %s: %w", tag, cmp.Or(strings.Join(names, ", "), "images without a name (give none, and --name)"), sandbox.ErrNotFound)
	case len(list) == 0:
		return nil, fmt.Errorf("it has no images: %w", sandbox.ErrInvalid)
	case tag == "" && len(names) > 1:
		return nil, fmt.Errorf("it has several images, say which: %s: %w", strings.Join(names, ", "), sandbox.ErrInvalid)
	}
	first := list[0]
	var c *chosen
	if len(list) == 1 {
		c, err = choose(ctx, l, "", first.Digest, arch)
	} else {
		text, merr := json.Marshal(document{SchemaVersion: 2, Manifests: list})
		if merr != nil {
			return nil, merr
		}
		c, err = choose(ctx, &indexed{l, text}, "", "", arch)
	}
	if err != nil {
		return nil, err
	}
	out := &Local{Digest: c.digest, Config: c.rawConfig, DiffIDs: c.config.RootFS.DiffIDs}
	if len(names) > 0 {
		out.Name = first.Annotations[annotationContainerd]
		if r := first.Annotations[annotationRef]; out.Name == "" && strings.ContainsAny(r, ":/") {
			out.Name = r
		}
	}
	out.open = func(ctx context.Context, i int) (io.ReadCloser, error) {
		return l.blob(ctx, c.layers[i].Digest, c.layers[i].Size)
	}
	return out, nil
}

// indexed gives a source an index to begin with.
type indexed struct {
	*layout
	index []byte
}

func (i *indexed) manifest(ctx context.Context, tag, digest string) ([]byte, string, error) {
	if digest == "" {
		return i.index, typeOCIIndex, nil
	}
	return i.layout.manifest(ctx, tag, digest)
}

func (l *layout) manifest(_ context.Context, _, digest string) ([]byte, string, error) {
	if !digestPattern.MatchString(digest) {
		return nil, "", fmt.Errorf("manifest %.100q: want sha256 and 64 hexadecimal digits: %w", digest, sandbox.ErrInvalid)
	}
	raw, err := l.file(blobPath(digest), maxManifest)
	if err != nil {
		return nil, "", err
	}
	return raw, "", checkDocument("manifest", raw, digest)
}

func (l *layout) blob(_ context.Context, digest string, _ int64) (io.ReadCloser, error) {
	if !digestPattern.MatchString(digest) {
		return nil, fmt.Errorf("blob %.100q: want sha256 and 64 hexadecimal digits: %w", digest, sandbox.ErrInvalid)
	}
	return l.root.Open(blobPath(digest))
}

func blobPath(digest string) string { return "blobs/sha256/" + strings.TrimPrefix(digest, "sha256:") }

// member is where an entry of an archive lies.
type member struct {
	at, size int64
	link     string // to another entry
}

const maxMembers = 1 << 18

// OpenArchive opens what `docker save` wrote, of any age, compressed or not; "-" is standard input. The tag picks one of several images.
// A stream is first copied to a file, since its index comes last.
func OpenArchive(ctx context.Context, file, tag, arch string) (*Local, error) {
	in := os.Stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		in = f
	}
	f, err := seekable(in)
	if err != nil {
		in.Close()
		return nil, fmt.Errorf("archive %s: %w", file, err)
	}
	out, err := archive(f, tag, arch)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("archive %s: %w", file, err)
	}
	out.close = f.Close
	return out, nil
}

// seekable is the plain tar as a file that can be read anywhere.
func seekable(in *os.File) (*os.File, error) {
	info, err := in.Stat()
	if err != nil {
		return nil, err
	}
	head := make([]byte, 4)
	var r io.Reader = in
	if info.Mode().IsRegular() {
		if n, _ := in.ReadAt(head, 0); n < 4 || !bytes.HasPrefix(head, gzipMagic) && !bytes.HasPrefix(head, zstdMagic) {
			return in, nil
		}
	}
	plain, done, err := decompress(bufio.NewReader(r))
	if err != nil {
		return nil, err
	}
	defer done()
	tmp, err := os.CreateTemp("", "dsec-archive-*")
	if err != nil {
		return nil, err
	}
	os.Remove(tmp.Name())
	if _, err := io.Copy(tmp, plain); err != nil {
		tmp.Close()
		return nil, err
	}
	return tmp, in.Close()
}

func archive(f *os.File, tag, arch string) (*Local, error) {
	members := map[string]member{}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	tr := tar.NewReader(f)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
		}
		if len(members) >= maxMembers {
			return nil, fmt.Errorf("more than %d entries: %w", maxMembers, sandbox.ErrInvalid)
		}
		name := path.Clean("/" + h.Name)[1:]
		switch h.Typeflag {
		case tar.TypeReg, 0:
			at, err := f.Seek(0, io.SeekCurrent) // the reader reads no further than the header
			if err != nil {
				return nil, err
			}
			members[name] = member{at: at, size: h.Size}
		case tar.TypeSymlink:
			members[name] = member{link: path.Clean("/" + path.Join(path.Dir(name), h.Linkname))[1:]}
		case tar.TypeLink:
			members[name] = member{link: path.Clean("/" + h.Linkname)[1:]}
		}
	}
	find := func(name string) (member, error) {
		at := path.Clean("/" + name)[1:]
		for range 8 {
			m, ok := members[at]
			if !ok {
				return m, fmt.Errorf("entry %.200q is missing: %w", name, sandbox.ErrInvalid)
			}
			if m.link == "" {
				return m, nil
			}
			at = m.link
		}
		return member{}, fmt.Errorf("entry %.200q: links in a circle: %w", name, sandbox.ErrInvalid)
	}
	read := func(name string) ([]byte, error) {
		m, err := find(name)
		if err != nil {
			return nil, err
		}
		if m.size > maxManifest {
			return nil, fmt.Errorf("entry %.200q: %d octets, at most %d: %w", name, m.size, maxManifest, sandbox.ErrInvalid)
		}
		b := make([]byte, m.size)
		_, err = f.ReadAt(b, m.at)
		return b, err
	}
	text, err := read("manifest.json")
	if err != nil {
		return nil, fmt.Errorf("no archive of `docker save` (for an OCI layout unpack it and use oci:FOLDER): %w", err)
	}
	var list []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := decode("manifest.json", text, &list); err != nil {
		return nil, err
	}
	var names []string
	pick := -1
	for i, m := range list {
		names = append(names, m.RepoTags...)
		for _, t := range m.RepoTags {
			if tag != "" && (t == tag || strings.HasSuffix(t, ":"+tag)) && pick < 0 {
				pick = i
			}
		}
	}
	switch {
	case len(list) == 0:
		return nil, fmt.Errorf("it has no images: %w", sandbox.ErrInvalid)
	case tag == "" && len(list) == 1:
		pick = 0
	case tag == "":
		return nil, fmt.Errorf("it has several images, say which: %s: %w", strings.Join(names, ", "), sandbox.ErrInvalid)
	case pick < 0:
		return nil, fmt.Errorf("no image %s; it has %s: %w", tag, cmp.Or(strings.Join(names, ", "), "images without a name (give none, and --name)"), sandbox.ErrNotFound)
	}
	m := list[pick]
	out := &Local{}
	if len(m.RepoTags) > 0 {
		out.Name = m.RepoTags[0]
	}
	if out.Config, err = read(m.Config); err != nil {
		return nil, err
	}
	c, err := parseConfig(out.Config, arch)
	if err != nil {
		return nil, err
	}
	if len(c.RootFS.DiffIDs) != len(m.Layers) {
		return nil, fmt.Errorf("manifest.json lists %d layers, the config %d: %w", len(m.Layers), len(c.RootFS.DiffIDs), sandbox.ErrInvalid)
	}
	out.DiffIDs = c.RootFS.DiffIDs
	for _, name := range m.Layers {
		if _, err := find(name); err != nil {
			return nil, err
		}
	}
	out.open = func(_ context.Context, i int) (io.ReadCloser, error) {
		at, err := find(m.Layers[i])
		if err != nil {
			return nil, err
		}
		return io.NopCloser(io.NewSectionReader(f, at.at, at.size)), nil
	}
	return out, nil
}

// ParseLocal splits oci:FOLDER[:tag] and docker-archive:FILE[:ref]; ok is false for a reference of a registry.
func ParseLocal(s string) (kind, file, tag string, ok bool) {
	kind, rest, found := strings.Cut(s, ":")
	if !found || kind != "oci" && kind != "docker-archive" {
		return "", "", "", false
	}
	if _, err := os.Stat(rest); err == nil || rest == "-" {
		return kind, rest, "", true
	}
	for i := 0; i < len(rest); i++ { // the shortest prefix that exists: a tag may hold colons, as host:5000/app:v1
		if rest[i] == ':' {
			if _, err := os.Stat(rest[:i]); err == nil {
				return kind, rest[:i], rest[i+1:], true
			}
		}
	}
	return kind, rest, "", true
}

// OpenLocal opens what ParseLocal found.
func OpenLocal(ctx context.Context, kind, file, tag, arch string) (*Local, error) {
	switch kind {
	case "oci":
		return OpenLayout(ctx, file, tag, arch)
	case "docker-archive":
		return OpenArchive(ctx, file, tag, arch)
	}
	return nil, errors.New("want oci:FOLDER or docker-archive:FILE")
}
