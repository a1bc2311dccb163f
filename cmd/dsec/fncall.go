package main

import (
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dsec-dev/dsec/internal/compat/sandboxfusion"
	"github.com/dsec-dev/dsec/internal/fncall"
	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// fnCallSettings are [fncall] of the config file.
type fnCallSettings struct {
	Languages []string `toml:"languages"` // files, after the built-in ones
	Places    int      `toml:"places"`    // runs at once; 0: the machine's processors
	Waiting   int      `toml:"waiting"`
	Rate      float64  `toml:"rate"`  // calls a second of one project
	Cache     string   `toml:"cache"` // size
	Warm      *int     `toml:"warm"`  // interpreters of mode warm that are kept ahead; none given: 8
	GPUs      []struct {
		Name   string   `toml:"name"`
		Places int      `toml:"places"` // calls that share it; 1 where none is given
		Nodes  []string `toml:"nodes"`  // character devices of the host
		Env    []string `toml:"env"`    // K=V of the calls that have it
	} `toml:"gpu"` // none: the cards that are found in /dev
}

// languages are those of gateway and host alike.
func (p *places) languages() (fncall.Languages, error) {
	return fncall.LoadLanguages(p.settings.FnCall.Languages...)
}

// openCalls makes the machine's function calls.
func (m *machine) openCalls(p *places, reg *prometheus.Registry, logger *slog.Logger) error {
	s := p.settings.FnCall
	gpus := fncall.ProbeGPUs("/dev")
	if len(s.GPUs) > 0 {
		gpus = nil
		for _, d := range s.GPUs {
			gpus = append(gpus, fncall.Device{Name: d.Name, Places: d.Places, Nodes: d.Nodes, Env: d.Env})
		}
	}
	if err := fncall.CheckDevices(gpus); err != nil {
		return fmt.Errorf("fncall.%w", err)
	}
	langs, err := p.languages()
	if err != nil {
		return err
	}
	runner, err := m.backend.Calls()
	if err != nil {
		return err
	}
	c := fncall.Config{Dir: filepath.Join(p.State, "fncall"), Host: string(m.id), Places: s.Places, Waiting: s.Waiting, Rate: s.Rate, GPUs: gpus, Standbys: 8}
	if s.Warm != nil {
		if c.Standbys = *s.Warm; c.Standbys < 0 || c.Standbys > keeper.MaxStandbys {
			return fmt.Errorf("fncall.warm %d: want 0 to %d: %w", c.Standbys, keeper.MaxStandbys, sandbox.ErrInvalid)
		}
	}
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
