package main

import (
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dsec-dev/dsec/internal/compat/sandboxfusion"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// fnCallSettings are [fncall] of the config file.
type fnCallSettings struct {
	Languages []string `toml:"languages"` // files, after the built-in ones
	Places    int      `toml:"places"`    // runs at once; 0: the machine's processors
	Waiting   int      `toml:"waiting"`
	Rate      float64  `toml:"rate"`  // calls a second of one project
	Cache     string   `toml:"cache"` // size
	GPUs      []struct {
		Name   string `toml:"name"`
		Places int    `toml:"places"`
	} `toml:"gpu"`
}

// languages are those of gateway and host alike.
func (p *places) languages() (fncall.Languages, error) {
	return fncall.LoadLanguages(p.settings.FnCall.Languages...)
}

// openCalls makes the machine's function calls.
func (m *machine) openCalls(p *places, reg *prometheus.Registry, logger *slog.Logger) error {
	s := p.settings.FnCall
	if len(s.GPUs) > 0 {
		return fmt.Errorf("fncall.gpu: devices can be scheduled but not yet given to a call: %w", sandbox.ErrUnsupported)
	}
	langs, err := p.languages()
	if err != nil {
		return err
	}
	runner, err := m.backend.Calls()
	if err != nil {
		return err
	}
	c := fncall.Config{Dir: filepath.Join(p.State, "fncall"), Host: string(m.id), Places: s.Places, Waiting: s.Waiting, Rate: s.Rate}
	if err := setSize(&c.CacheSize, "fncall.cache", s.Cache); err != nil {
		return err
	}
	e, err := fncall.New(c, fncall.Deps{Runner: runner, Languages: langs, Log: m.log, Jobs: m.host.CallJobs(), Logger: logger, Registry: reg})
	if err != nil {
		return err
	}
	m.host.UseCalls(e)
	return nil
}

// sandboxFusion lets trainers that were written for SandboxFusion make function calls.
func sandboxFusion(mux *http.ServeMux, gateway http.Handler) {
	sandboxfusion.New(sandboxfusion.Over(gateway)).Register(mux)
}
