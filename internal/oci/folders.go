package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// A tar may name tmp/x without an entry for tmp. Engines that unpack one layer over the other leave the folder that is there as it
// is. In an overlay the layer's own folder decides, so it must be given the attributes of the one below it, or /tmp would no
// longer be open to all. What a layer says about folders is kept beside its record, for those that come on top of it.

// folder is the attributes of a folder.
type folder struct {
	Mode   int64             `json:"m"` // permission bits with setuid, setgid and sticky
	UID    int               `json:"u,omitempty"`
	GID    int               `json:"g,omitempty"`
	Xattrs map[string]string `json:"x,omitempty"`
}

func (f folder) plain() bool {
	return f.Mode == 0o755 && f.UID == 0 && f.GID == 0 && len(f.Xattrs) == 0
}

// folders is what a layer says about them.
type folders struct {
	Own      map[string]folder `json:"own,omitempty"`
	Implicit []string          `json:"implicit,omitempty"`
	Gone     []string          `json:"gone,omitempty"`   // whiteouts
	Opaque   []string          `json:"opaque,omitempty"` // folders that hide what is below them
}

const (
	maxFolders       = 1 << 20
	maxFolderOctets  = 64 << 20 // of their names
	maxFolderObject  = 128 << 20
	xattrRecord      = "SCHILY.xattr."
	whiteoutPrefix   = ".wh."
	opaqueMark       = ".wh..wh..opq"
	overlayNamespace = "trusted.overlay."
)

// scan reads a copy of a tar for its folders while it is converted.
type scan struct {
	w    *io.PipeWriter
	done chan struct{}
	out  folders
	err  error
}

func newScan() *scan {
	r, w := io.Pipe()
	s := &scan{w: w, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		s.err = s.read(r)
		io.Copy(io.Discard, r) // so that the other reader goes on
	}()
	return s
}

func (s *scan) Write(p []byte) (int, error) { return s.w.Write(p) }

func (s *scan) stop() {
	s.w.Close()
	<-s.done
}

func (s *scan) result() (folders, error) {
	s.stop()
	return s.out, s.err
}

func (s *scan) read(r io.Reader) error {
	s.out.Own = map[string]folder{}
	implicit := map[string]bool{}
	octets := 0
	count := func(p string) error {
		if octets += len(p); octets > maxFolderOctets || len(s.out.Own)+len(implicit)+len(s.out.Gone)+len(s.out.Opaque) > maxFolders {
			return fmt.Errorf("more than %d folders and whiteouts, or %d octets of their names: %w", maxFolders, maxFolderOctets, sandbox.ErrExhausted)
		}
		return nil
	}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err != nil {
			break // at the end, or where the conversion fails as well
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		dir, base := path.Split(name)
		for d := path.Dir(name); d != "." && !implicit[d]; d = path.Dir(d) {
			if _, own := s.out.Own[d]; own {
				break // and those above it
			}
			if err := count(d); err != nil {
				return err
			}
			implicit[d] = true
		}
		switch {
		case base == opaqueMark:
			err = count(dir)
			s.out.Opaque = append(s.out.Opaque, strings.TrimSuffix(dir, "/"))
		case strings.HasPrefix(base, whiteoutPrefix):
			err = count(name)
			s.out.Gone = append(s.out.Gone, dir+strings.TrimPrefix(base, whiteoutPrefix))
		case h.Typeflag == tar.TypeDir:
			err = count(name)
			delete(implicit, name)
			s.out.Own[name] = folderOf(h)
		}
		if err != nil {
			return err
		}
	}
	s.out.Implicit = slices.Sorted(maps.Keys(implicit))
	return nil
}

func folderOf(h *tar.Header) folder {
	f := folder{Mode: h.Mode & 0o7777, UID: h.Uid, GID: h.Gid}
	for k, v := range h.PAXRecords {
		if n, ok := strings.CutPrefix(k, xattrRecord); ok && !strings.HasPrefix(n, overlayNamespace) {
			if f.Xattrs == nil {
				f.Xattrs = map[string]string{}
			}
			f.Xattrs[n] = v
		}
	}
	return f
}

// inherited finds what the folders of a layer without an entry of their own must look like, from the layers below it, the lowest
// first. Those that come out plain are left out, since that is how they are made.
func inherited(below []folders, implicit []string) map[string]folder {
	type marks struct{ gone, opaque map[string]bool }
	hidden := make([]marks, len(below))
	for i := range below {
		hidden[i] = marks{set(below[i].Gone), set(below[i].Opaque)}
	}
	// hides reports whether a layer removes what lower ones have at the path.
	hides := func(m marks, p string) bool {
		for at := p; at != "."; at = path.Dir(at) {
			if m.gone[at] || at != p && m.opaque[at] {
				return true
			}
		}
		return m.opaque["."] || m.opaque[""]
	}
	out := map[string]folder{}
	for _, p := range implicit {
		for i := len(below) - 1; i >= 0; i-- {
			if f, ok := below[i].Own[p]; ok {
				if !f.plain() {
					out[p] = f
				}
				break
			}
			if hides(hidden[i], p) {
				break
			}
		}
	}
	return out
}

func set(list []string) map[string]bool {
	m := make(map[string]bool, len(list))
	for _, s := range list {
		m[s] = true
	}
	return m
}

// header is the entries of folders, as the beginning of a tar.
func header(fix map[string]folder) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, p := range slices.Sorted(maps.Keys(fix)) {
		f := fix[p]
		h := &tar.Header{Typeflag: tar.TypeDir, Name: p + "/", Mode: f.Mode, Uid: f.UID, Gid: f.GID, Format: tar.FormatPAX}
		for k, v := range f.Xattrs {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords[xattrRecord+k] = v
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, fmt.Errorf("folder %.200q: %w", p, err)
		}
	}
	return b.Bytes(), w.Flush()
}

func (im *Images) putFolders(ctx context.Context, diffID string, f folders) error {
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return err
	}
	defer z.Close()
	if err := store.Put(ctx, im.store, foldersKey(diffID), bytes.NewReader(z.EncodeAll(text, nil))); err != nil {
		return fmt.Errorf("keep folders of layer %s: %w", diffID, err)
	}
	return nil
}

func (im *Images) foldersOf(ctx context.Context, diffID string) (folders, error) {
	var f folders
	text, err := store.ReadAll(ctx, im.store, foldersKey(diffID), maxFolderObject)
	if errors.Is(err, sandbox.ErrNotFound) {
		return f, fmt.Errorf("folders of layer %s: %w", diffID, err)
	}
	if err != nil {
		return f, err
	}
	z, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*maxFolderObject))
	if err != nil {
		return f, err
	}
	defer z.Close()
	if text, err = z.DecodeAll(text, nil); err == nil {
		err = json.Unmarshal(text, &f)
	}
	if err != nil {
		return f, fmt.Errorf("folders of layer %s are broken: %w", diffID, err)
	}
	return f, nil
}
