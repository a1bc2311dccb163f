package oci

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Missing answers which of the layers the project can't use yet.
func (im *Images) Missing(ctx context.Context, project string, diffIDs []string) ([]string, error) {
	if len(diffIDs) > maxLayers {
		return nil, fmt.Errorf("diff_ids: %d given, at most %d: %w", len(diffIDs), maxLayers, sandbox.ErrInvalid)
	}
	if err := sandbox.CheckProject(project); err != nil {
		return nil, err
	}
	var out []string
	for _, d := range diffIDs {
		if !digestPattern.MatchString(d) {
			return nil, fmt.Errorf("diff_ids: %.100q: want sha256 and 64 hexadecimal digits: %w", d, sandbox.ErrInvalid)
		}
		// Only what the project holds already is left out: a push does not tell what others have.
		r, err := im.peek(ctx, d)
		if err == nil {
			_, err = im.layers.Lookup(ctx, project, string(r.Layer))
		}
		switch {
		case errors.Is(err, sandbox.ErrNotFound):
			out = append(out, d)
		case err != nil:
			return nil, err
		}
	}
	return out, nil
}

// PushLayer converts a layer that a client sends: a tar, plain or compressed, whose digest when plain is diffID.
func (im *Images) PushLayer(ctx context.Context, project, diffID string, body io.Reader) (string, error) {
	if !digestPattern.MatchString(diffID) {
		return "", fmt.Errorf("diff_id %.100q: want sha256 and 64 hexadecimal digits: %w", diffID, sandbox.ErrInvalid)
	}
	if err := sandbox.CheckProject(project); err != nil {
		return "", err
	}
	done, err := im.conversions.take(ctx, project)
	if err != nil {
		return "", err
	}
	defer done()
	r, err := im.convert(ctx, project, blobOf{diffID: diffID, arch: im.cfg.Arch, open: func(context.Context) (io.ReadCloser, error) { return io.NopCloser(body), nil }}, nil, nil)
	if err != nil {
		return "", err
	}
	return string(r.Layer), nil
}

// Put makes an environment of a config whose layers were pushed. The digest is of the manifest it came with; without one the config's
// stands for it.
func (im *Images) Put(ctx context.Context, project, ref string, rawConfig []byte, digest string) (*Image, error) {
	r, err := ParseRef(ref)
	if err != nil {
		return nil, err
	}
	if err := checkDocument("config", rawConfig, ""); err != nil {
		return nil, err
	}
	if digest == "" {
		digest = digestOf(rawConfig)
	}
	if !digestPattern.MatchString(digest) || r.Digest != "" && r.Digest != digest {
		return nil, fmt.Errorf("digest %.100q: want that of the manifest, as the reference has it: %w", digest, sandbox.ErrInvalid)
	}
	c := &chosen{digest: digest, rawConfig: rawConfig}
	if c.config, err = parseConfig(rawConfig, im.cfg.Arch); err != nil {
		return nil, err
	}
	missing, err := im.Missing(ctx, project, c.config.RootFS.DiffIDs)
	if err != nil {
		return nil, err
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("image %s: push its layers first; %d are missing, the first is %s: %w", r, len(missing), missing[0], sandbox.ErrState)
	}
	var list []blobOf
	for _, d := range c.config.RootFS.DiffIDs {
		list = append(list, blobOf{diffID: d, arch: c.config.Architecture, again: true, open: func(ctx context.Context) (io.ReadCloser, error) { return im.stored(ctx, d) }})
	}
	records, existed, err := im.convertAll(ctx, project, list, func(int, string, int64) {})
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", r, err)
	}
	out, err := im.publish(ctx, project, r, c, records)
	if err != nil {
		return nil, fmt.Errorf("image %s: %w", r, err)
	}
	out.Existed = existed
	return out, nil
}

// stored reads a layer that was converted as a tar again, without the folders that the layer has no entry for: a copy of it gives them
// other attributes.
func (im *Images) stored(ctx context.Context, diffID string) (io.ReadCloser, error) {
	r, err := im.peek(ctx, diffID)
	if err != nil {
		return nil, err
	}
	f, err := im.foldersOf(ctx, diffID)
	if err != nil {
		return nil, err
	}
	drop := set(f.Implicit)
	whole, in := io.Pipe()
	out, cut := io.Pipe()
	go func() { in.CloseWithError(im.layers.WriteTar(ctx, r.Layer, in)) }()
	go func() {
		err := dropFolders(cut, whole, drop)
		whole.CloseWithError(err)
		cut.CloseWithError(err)
	}()
	return out, nil
}

func dropFolders(w io.Writer, r io.Reader, drop map[string]bool) error {
	tr, tw := tar.NewReader(r), tar.NewWriter(w)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			if _, err := io.Copy(io.Discard, r); err != nil {
				return err
			}
			return tw.Close()
		}
		if err != nil {
			return err
		}
		if h.Typeflag == tar.TypeDir && drop[path.Clean("/" + h.Name)[1:]] {
			continue
		}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if _, err := io.Copy(tw, tr); err != nil {
			return err
		}
	}
}
