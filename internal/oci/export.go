package oci

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Export writes an environment as a tar that is both an OCI layout and what `docker load` takes. Layers are plain tars with the same
// octets each time, so that an import of it finds the layers that are there. Tag is the reference it carries; may be empty.
func (im *Images) Export(ctx context.Context, project, environment, tag string, w io.Writer) error {
	e, err := im.layers.Resolve(ctx, project, environment)
	if err != nil {
		return err
	}
	if tag != "" {
		r, err := ParseRef(tag)
		if err != nil {
			return err
		}
		if r.Tag == "" {
			return fmt.Errorf("ref %.200q: an export can't have a digest chosen for it; give a tag: %w", tag, sandbox.ErrInvalid)
		}
		tag = r.String()
	}
	ids := e.Layers
	var layers []descriptor
	for _, id := range ids {
		// The size stands before the octets, so each layer is written twice: once to be measured.
		c := &measure{hash: sha256.New()}
		if err := im.layers.WriteTar(ctx, id, c); err != nil {
			return fmt.Errorf("export environment %s: %w", e.Ref(), err)
		}
		layers = append(layers, descriptor{MediaType: typeOCILayer, Digest: c.digest(), Size: c.n})
	}
	created := e.Created.UTC().Truncate(time.Second)
	conf := config{Created: &created, OS: "linux", Architecture: e.Arch, RootFS: rootFS{Type: "layers"},
		Config: runConfig{User: e.Spec.User, Env: e.Spec.Env, WorkingDir: e.Spec.Cwd}}
	if conf.Architecture == layer.AnyArch {
		conf.Architecture = im.cfg.Arch
	}
	if i := e.Spec.Image; i != nil {
		conf.Config.Entrypoint, conf.Config.Cmd, conf.Config.Labels = i.Entrypoint, i.Cmd, i.Labels
	}
	for i, l := range layers {
		conf.RootFS.DiffIDs = append(conf.RootFS.DiffIDs, l.Digest)
		conf.History = append(conf.History, history{Created: &created, CreatedBy: "dsec layer " + string(ids[i])})
	}
	rawConfig, err := json.Marshal(conf)
	if err != nil {
		return err
	}
	confDesc := descriptor{MediaType: typeOCIConfig, Digest: digestOf(rawConfig), Size: int64(len(rawConfig))}
	manifest, err := json.Marshal(document{SchemaVersion: 2, MediaType: typeOCIManifest, Config: &confDesc, Layers: layers})
	if err != nil {
		return err
	}
	entry := descriptor{MediaType: typeOCIManifest, Digest: digestOf(manifest), Size: int64(len(manifest)),
		Platform: &platform{OS: "linux", Architecture: conf.Architecture}}
	tags := []string{}
	if tag != "" {
		entry.Annotations = map[string]string{annotationRef: tag, annotationContainerd: tag}
		tags = append(tags, tag)
	}
	index, err := json.Marshal(document{SchemaVersion: 2, MediaType: typeOCIIndex, Manifests: []descriptor{entry}})
	if err != nil {
		return err
	}
	var files []string
	for _, l := range layers {
		files = append(files, blobPath(l.Digest))
	}
	docker, err := json.Marshal([]map[string]any{{"Config": blobPath(confDesc.Digest), "RepoTags": tags, "Layers": files}})
	if err != nil {
		return err
	}

	tw := tar.NewWriter(w)
	head := func(h *tar.Header) error {
		h.ModTime, h.Format = created, tar.FormatPAX
		return tw.WriteHeader(h)
	}
	put := func(name string, b []byte) error {
		if err := head(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(b))}); err != nil {
			return err
		}
		_, err := tw.Write(b)
		return err
	}
	for _, d := range []string{"blobs/", "blobs/sha256/"} {
		if err := head(&tar.Header{Typeflag: tar.TypeDir, Name: d, Mode: 0o755}); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		name string
		data []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)}, {"index.json", index}, {"manifest.json", docker},
		{blobPath(confDesc.Digest), rawConfig}, {blobPath(entry.Digest), manifest},
	} {
		if err := put(f.name, f.data); err != nil {
			return err
		}
	}
	written := map[string]bool{}
	for i, l := range layers {
		if written[l.Digest] {
			continue
		}
		written[l.Digest] = true
		if err := head(&tar.Header{Typeflag: tar.TypeReg, Name: blobPath(l.Digest), Mode: 0o644, Size: l.Size}); err != nil {
			return err
		}
		if err := im.layers.WriteTar(ctx, ids[i], tw); err != nil {
			return fmt.Errorf("export environment %s: %w", e.Ref(), err)
		}
	}
	return tw.Close()
}

type measure struct {
	hash interface {
		io.Writer
		Sum([]byte) []byte
	}
	n int64
}

func (m *measure) Write(p []byte) (int, error) {
	m.n += int64(len(p))
	return m.hash.Write(p)
}

func (m *measure) digest() string { return fmt.Sprintf("sha256:%x", m.hash.Sum(nil)) }
