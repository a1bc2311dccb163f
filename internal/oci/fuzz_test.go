package oci

import (
	"bytes"
	"context"
	"io"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// memory is a source whose every manifest and blob are the same octets, whatever is asked for.
type memory struct{ manifestText, blobText []byte }

func (m memory) manifest(_ context.Context, _, digest string) ([]byte, string, error) {
	if digest != "" && digestOf(m.manifestText) != digest {
		return nil, "", sandbox.ErrNotFound
	}
	return m.manifestText, "", nil
}

func (m memory) blob(context.Context, string, int64) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(m.blobText)), nil
}

func FuzzManifest(f *testing.F) {
	config := []byte(`{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":[]}}`)
	f.Add([]byte(`{"schemaVersion":2,"config":{"digest":"`+digestOf(config)+`","size":2},"layers":[]}`), config)
	f.Add([]byte(`{"schemaVersion":2,"manifests":[{"digest":"sha256:x","platform":{"os":"linux","architecture":"amd64"}}]}`), config)
	f.Add([]byte(`{"schemaVersion":1}`), config)
	f.Fuzz(func(t *testing.T, manifest, config []byte) {
		c, err := choose(context.Background(), memory{manifest, config}, "t", "", "amd64")
		if err != nil {
			return
		}
		if len(c.layers) != len(c.config.RootFS.DiffIDs) || len(c.layers) > maxLayers {
			t.Fatalf("%d layers, %d in the config", len(c.layers), len(c.config.RootFS.DiffIDs))
		}
		for i, l := range c.layers {
			if !digestPattern.MatchString(l.Digest) || !digestPattern.MatchString(c.config.RootFS.DiffIDs[i]) || l.Size < 0 {
				t.Fatalf("layer %+v", l)
			}
		}
		if _, err := specOf(Ref{Host: "h", Repo: "r", Tag: "t"}, c, nil); err == nil && c.digest != digestOf(manifest) {
			t.Fatalf("digest %s", c.digest)
		}
	})
}

func FuzzFolders(f *testing.F) {
	f.Add(tarOf(file{name: "a/b/c", data: "x"}, file{name: "a/"}, file{name: "d/.wh.e"}, file{name: "f/.wh..wh..opq"}))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := newScan()
		s.Write(b)
		got, err := s.result()
		if err != nil {
			return
		}
		for p := range inherited([]folders{got, got}, got.Implicit) {
			if p == "" || p == "." || p[0] == '/' {
				t.Fatalf("folder %q", p)
			}
		}
	})
}
