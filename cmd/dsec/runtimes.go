package main

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/dsec-dev/dsec/internal/backend/container"
	"github.com/dsec-dev/dsec/internal/backend/oci"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// findRuntimes looks for OCI runtimes, and refuses settings that name an unknown one.
func (p *places) findRuntimes(ctx context.Context) ([]oci.Runtime, error) {
	for _, name := range slices.Sorted(maps.Keys(p.settings.Runtimes)) {
		if !slices.Contains(oci.Names(), name) {
			return nil, fmt.Errorf("runtimes.%s: known are %q: %w", name, oci.Names(), sandbox.ErrInvalid)
		}
	}
	return oci.Find(ctx, oci.Config{Programs: p.settings.Runtimes}), nil
}

// runtimeFeatures is what the backend container tells of runtimes: those that are not there are refused with it.
func runtimeFeatures(found []oci.Runtime) map[string]string {
	f := map[string]string{}
	for _, r := range found {
		f[sandbox.RuntimeFeature(r.Name)] = r.Version
		if r.Reason != "" {
			f[sandbox.RuntimeFeature(r.Name)] = r.Reason
		}
	}
	return f
}

// runtimeChecks is what doctor says of them.
func (p *places) runtimeChecks(ctx context.Context) []container.Check {
	found, err := p.findRuntimes(ctx)
	if err != nil {
		return []container.Check{{Feature: "runtimes", Detail: err.Error(), Fix: "correct the config file"}}
	}
	var checks []container.Check
	for _, r := range found {
		c := container.Check{Feature: "runtime " + r.Name, OK: r.Reason == "", Detail: r.Version + " (" + r.Program + ")"}
		if !c.OK {
			c.Detail, c.Fix = r.Reason, oci.Fix(r.Name)
		}
		checks = append(checks, c)
	}
	return checks
}

// openRuntimes makes a backend of each runtime that can be used.
func openRuntimes(driver *container.Backend, found []oci.Runtime) ([]sandbox.Backend, error) {
	var all []sandbox.Backend
	for _, r := range found {
		if r.Reason != "" {
			continue
		}
		b, err := oci.New(driver, r)
		if err != nil {
			return nil, err
		}
		all = append(all, b)
	}
	return all, nil
}
