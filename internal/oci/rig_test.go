package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	ggcr "github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/store"
)

// rig is Images on a store and facts of their own, and a registry in this process.
type rig struct {
	*Images
	t      *testing.T
	facts  facts.Facts
	store  store.Store
	server *httptest.Server
	host   string
}

func newRig(t *testing.T, cfg Config) *rig {
	t.Helper()
	dir := t.TempDir()
	db, err := facts.OpenBolt(filepath.Join(dir, "facts.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	st, err := store.NewDir(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, facts: db, store: st}
	if cfg.Arch == "" {
		cfg.Arch = "amd64"
	}
	r.Images = New(cfg, Deps{Layers: layer.New(db, st), Store: st, Facts: db, Log: slog.New(slog.DiscardHandler)})
	r.Images.pause = time.Millisecond
	return r
}

// serve starts the registry; wrap may stand in front of it.
func (r *rig) serve(wrap func(http.Handler) http.Handler) *rig {
	h := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	if wrap != nil {
		h = wrap(h)
	}
	r.server = httptest.NewServer(h)
	r.t.Cleanup(r.server.Close)
	r.host = strings.TrimPrefix(r.server.URL, "http://")
	return r
}

type file struct {
	name  string
	kind  byte // 0: from the name
	mode  int64
	uid   int
	data  string
	link  string
	xattr map[string]string
}

func tarOf(files ...file) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Typeflag: f.kind, Mode: f.mode, Uid: f.uid, Linkname: f.link, ModTime: time.Unix(1700000000, 0), Format: tar.FormatPAX}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
			if strings.HasSuffix(f.name, "/") {
				h.Typeflag = tar.TypeDir
			}
		}
		if h.Mode == 0 {
			h.Mode = 0o644
			if h.Typeflag == tar.TypeSymlink {
				h.Mode = 0o777
			}
			if h.Typeflag == tar.TypeDir {
				h.Mode = 0o755
			}
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(f.data))
		}
		for k, v := range f.xattr {
			if h.PAXRecords == nil {
				h.PAXRecords = map[string]string{}
			}
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(h); err != nil {
			panic(err)
		}
		io.WriteString(w, f.data[:h.Size])
	}
	w.Close()
	return b.Bytes()
}

func imageOf(t testing.TB, edit func(*v1.ConfigFile), tars ...[]byte) v1.Image {
	t.Helper()
	var layers []v1.Layer
	for _, b := range tars {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
		if err != nil {
			t.Fatal(err)
		}
		layers = append(layers, l)
	}
	return imageFrom(t, edit, layers...)
}

func imageFrom(t testing.TB, edit func(*v1.ConfigFile), layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", "amd64"
	if edit != nil {
		edit(c)
	}
	if img, err = mutate.ConfigFile(img, c); err != nil {
		t.Fatal(err)
	}
	return img
}

// push writes an image to the registry and answers its reference.
func (r *rig) push(repo string, img v1.Image, auth ...authn.Authenticator) string {
	r.t.Helper()
	ref, err := name.ParseReference(r.host + "/" + repo)
	if err != nil {
		r.t.Fatal(err)
	}
	opts := []ggcr.Option{}
	if len(auth) > 0 {
		opts = append(opts, ggcr.WithAuth(auth[0]))
	}
	if err := ggcr.Write(ref, img, opts...); err != nil {
		r.t.Fatal(err)
	}
	return ref.String()
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func (r *rig) mustPull(p Pull) *Image {
	r.t.Helper()
	i, err := r.Pull(within(r.t), "default", p)
	if err != nil {
		r.t.Fatal(err)
	}
	return i
}
