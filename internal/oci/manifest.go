package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Media types of what is read.
const (
	typeOCIIndex       = "application/vnd.oci.image.index.v1+json"
	typeOCIManifest    = "application/vnd.oci.image.manifest.v1+json"
	typeOCIConfig      = "application/vnd.oci.image.config.v1+json"
	typeOCILayer       = "application/vnd.oci.image.layer.v1.tar"
	typeDockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
	typeDockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	typeDockerConfig   = "application/vnd.docker.container.image.v1+json"
	typeDockerLayer    = "application/vnd.docker.image.rootfs.diff.tar"
	typeDockerForeign  = "application/vnd.docker.image.rootfs.foreign.diff.tar"
	typeOCIForeign     = "application/vnd.oci.image.layer.nondistributable.v1.tar"
)

const (
	maxLayers    = 512
	maxChildren  = 1024 // manifests of an index
	maxNesting   = 3    // indexes in indexes
	maxLayerSize = 1 << 40
)

// descriptor points to a blob.
type descriptor struct {
	MediaType   string            `json:"mediaType,omitempty"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Variant      string `json:"variant,omitempty"`
}

func (p platform) String() string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}

// document is a manifest or an index: which of them its fields tell.
type document struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType,omitempty"`
	Config        *descriptor  `json:"config,omitempty"`
	Layers        []descriptor `json:"layers,omitempty"`
	Manifests     []descriptor `json:"manifests,omitempty"`
}

// config is an image's config, as far as it is used.
type config struct {
	Created      *time.Time `json:"created,omitempty"`
	Architecture string     `json:"architecture"`
	OS           string     `json:"os"`
	Variant      string     `json:"variant,omitempty"`
	Config       runConfig  `json:"config"`
	RootFS       rootFS     `json:"rootfs"`
	History      []history  `json:"history,omitempty"`
}

type runConfig struct {
	User       string            `json:"User,omitempty"`
	Env        []string          `json:"Env,omitempty"`
	Entrypoint []string          `json:"Entrypoint,omitempty"`
	Cmd        []string          `json:"Cmd,omitempty"`
	WorkingDir string            `json:"WorkingDir,omitempty"`
	Labels     map[string]string `json:"Labels,omitempty"`
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

type history struct {
	Created    *time.Time `json:"created,omitempty"`
	CreatedBy  string     `json:"created_by,omitempty"`
	EmptyLayer bool       `json:"empty_layer,omitempty"`
}

// chosen is the one image that a reference means here.
type chosen struct {
	digest    string // of its manifest
	config    config
	rawConfig []byte
	layers    []descriptor
}

func decode(what string, raw []byte, to any) error {
	if err := json.Unmarshal(raw, to); err != nil {
		return fmt.Errorf("%s is no JSON of that kind (%.200v): %w", what, err, sandbox.ErrInvalid)
	}
	return nil
}

func (d descriptor) check(what string, limit int64) error {
	if !digestPattern.MatchString(d.Digest) {
		return fmt.Errorf("%s: digest %.100q: want sha256 and 64 hexadecimal digits: %w", what, d.Digest, sandbox.ErrInvalid)
	}
	if d.Size < 0 || d.Size > limit {
		return fmt.Errorf("%s %s: states %d octets, at most %d: %w", what, d.Digest, d.Size, limit, sandbox.ErrInvalid)
	}
	return nil
}

// choose follows indexes to the image for the architecture.
func choose(ctx context.Context, src source, tag, digest, arch string) (*chosen, error) {
	var have []string
	var fitting []descriptor
	raw, _, err := src.manifest(ctx, tag, digest)
	if err != nil {
		return nil, err
	}
	digest = digestOf(raw)
	for depth := 0; ; depth++ {
		var doc document
		if err := decode("manifest "+digest, raw, &doc); err != nil {
			return nil, err
		}
		if len(doc.Manifests) == 0 {
			return image(ctx, src, digest, doc, arch)
		}
		if depth >= maxNesting {
			return nil, fmt.Errorf("index %s: indexes nest more than %d deep: %w", digest, maxNesting, sandbox.ErrInvalid)
		}
		if len(doc.Manifests) > maxChildren {
			return nil, fmt.Errorf("index %s: lists %d manifests, at most %d: %w", digest, len(doc.Manifests), maxChildren, sandbox.ErrInvalid)
		}
		have, fitting = nil, nil
		for _, d := range doc.Manifests {
			if err := d.check("manifest", maxManifest); err != nil {
				return nil, err
			}
			switch {
			case d.Platform == nil || d.Platform.Architecture == "":
				// An index of indexes, or of a builder that says nothing: looked into when nothing fits by name.
				fitting = append(fitting, d)
			case d.Platform.OS == "unknown": // attestations
			default:
				have = append(have, d.Platform.String())
				if d.Platform.OS == "linux" && d.Platform.Architecture == arch {
					fitting = append(fitting, d)
				}
			}
		}
		sort.SliceStable(fitting, func(i, j int) bool { return preference(fitting[i]) < preference(fitting[j]) })
		if len(fitting) == 0 {
			slices.Sort(have)
			return nil, fmt.Errorf("image has no linux/%s, only %s: %w", arch, strings.Join(slices.Compact(have), ", "), sandbox.ErrUnsupported)
		}
		digest = fitting[0].Digest
		if raw, _, err = src.manifest(ctx, "", digest); err != nil {
			return nil, err
		}
	}
}

// preference orders what fits: the plain variant first, since an image for a newer one may not run here.
func preference(d descriptor) int {
	switch {
	case d.Platform == nil || d.Platform.Architecture == "":
		return 9
	case d.Platform.Variant == "", d.Platform.Architecture == "amd64" && d.Platform.Variant == "v1", d.Platform.Architecture == "arm64" && d.Platform.Variant == "v8":
		return 0
	}
	return 5
}

func image(ctx context.Context, src source, digest string, doc document, arch string) (*chosen, error) {
	switch {
	case doc.SchemaVersion == 1:
		return nil, fmt.Errorf("manifest %s: schema 1, which registries stopped serving; push the image again with a current docker: %w", digest, sandbox.ErrUnsupported)
	case doc.Config == nil:
		return nil, fmt.Errorf("manifest %s: has no config, so it is no image: %w", digest, sandbox.ErrInvalid)
	case doc.Config.MediaType != typeOCIConfig && doc.Config.MediaType != typeDockerConfig && doc.Config.MediaType != "":
		return nil, fmt.Errorf("manifest %s: holds %.80q, no image: %w", digest, doc.Config.MediaType, sandbox.ErrUnsupported)
	}
	if err := doc.Config.check("config", maxManifest); err != nil {
		return nil, err
	}
	r, err := src.blob(ctx, doc.Config.Digest, doc.Config.Size)
	if err != nil {
		return nil, err
	}
	raw, err := io.ReadAll(io.LimitReader(r, maxManifest+1))
	r.Close()
	if err == nil {
		err = checkDocument("config", raw, doc.Config.Digest)
	}
	if err != nil {
		return nil, fmt.Errorf("config of manifest %s: %w", digest, err)
	}
	c := &chosen{digest: digest, layers: doc.Layers, rawConfig: raw}
	if c.config, err = parseConfig(raw, arch); err != nil {
		return nil, err
	}
	if len(c.layers) != len(c.config.RootFS.DiffIDs) {
		return nil, fmt.Errorf("manifest %s: lists %d layers, its config %d: %w", digest, len(c.layers), len(c.config.RootFS.DiffIDs), sandbox.ErrInvalid)
	}
	for _, l := range c.layers {
		if err := l.check("layer", maxLayerSize); err != nil {
			return nil, err
		}
		if !layerType(l.MediaType) {
			return nil, fmt.Errorf("layer %s: media type %.80q is not known (want a tar, plain, gzip or zstd): %w", l.Digest, l.MediaType, sandbox.ErrUnsupported)
		}
	}
	return c, nil
}

// layerType accepts the types of tars; how it is compressed is seen from the octets.
func layerType(s string) bool {
	base := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(s, "+gzip"), "+zstd"), ".gzip")
	return s == "" || slices.Contains([]string{typeOCILayer, typeDockerLayer, typeDockerForeign, typeOCIForeign}, base)
}

func parseConfig(raw []byte, arch string) (config, error) {
	var c config
	if err := decode("config", raw, &c); err != nil {
		return c, err
	}
	if c.OS != "" && c.OS != "linux" || c.Architecture != "" && c.Architecture != arch {
		return c, fmt.Errorf("image is for %s, this platform runs linux/%s: %w", platform{c.OS, c.Architecture, c.Variant}, arch, sandbox.ErrUnsupported)
	}
	if len(c.RootFS.DiffIDs) > maxLayers {
		return c, fmt.Errorf("config: %d layers, at most %d: %w", len(c.RootFS.DiffIDs), maxLayers, sandbox.ErrInvalid)
	}
	for _, d := range c.RootFS.DiffIDs {
		if !digestPattern.MatchString(d) {
			return c, fmt.Errorf("config: layer %.100q: want sha256 and 64 hexadecimal digits: %w", d, sandbox.ErrInvalid)
		}
	}
	return c, nil
}
