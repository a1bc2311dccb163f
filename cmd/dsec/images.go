package main

import (
	"fmt"
	"log/slog"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/oci"
	"github.com/dsec-dev/dsec/internal/store"
)

// imageSettings is the section [images] of the config file.
type imageSettings struct {
	Mirrors     map[string][]string `toml:"mirrors"`     // registry -> host[/prefix] asked before it
	Insecure    []string            `toml:"insecure"`    // hosts without TLS
	Recheck     string              `toml:"recheck"`     // duration
	Parallel    int                 `toml:"parallel"`    // layers converted at once
	Credentials string              `toml:"credentials"` // a docker config.json, for projects that have none of their own
}

func (p *places) images(cat *layer.Catalogue, st store.Store, f facts.Facts, logger *slog.Logger) (*oci.Images, error) {
	s := p.settings.Images
	cfg := oci.Config{Insecure: s.Insecure, Parallel: s.Parallel, Mirrors: map[string][]string{}}
	if err := setDuration(&cfg.Recheck, "images.recheck", s.Recheck); err != nil {
		return nil, err
	}
	for host, mirrors := range s.Mirrors {
		canonical, err := oci.CanonicalHost(host)
		if err != nil {
			return nil, fmt.Errorf("images.mirrors: %w", err)
		}
		cfg.Mirrors[canonical] = mirrors
	}
	if s.Credentials != "" {
		creds, err := oci.ReadDockerConfig(s.Credentials)
		if err != nil {
			return nil, fmt.Errorf("images.credentials: %w", err)
		}
		cfg.Credentials = creds
	}
	return oci.New(cfg, oci.Deps{Layers: cat, Store: st, Facts: f, Log: logger}), nil
}
