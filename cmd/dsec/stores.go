package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/dsec-dev/dsec/internal/store"
)

// storeNames are the stores of a service, as names that mean the same from any folder: those of the flags, else those of the config file, else a
// folder in its state. The first is written.
func (p *places) storeNames(flags []string) ([]string, error) {
	names := flags
	if len(names) == 0 {
		for i, s := range p.settings.Store {
			if s.At == "" {
				return nil, fmt.Errorf("%s: store %d: at: name a folder or s3://BUCKET/PREFIX", p.Conf, i+1)
			}
			names = append(names, s.At)
		}
	}
	if len(names) == 0 {
		names = []string{filepath.Join(p.State, "store")}
	}
	out := make([]string, len(names))
	for i, n := range names {
		var err error
		if out[i], err = store.Absolute(n); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// existing refuses a folder that is not there: a wrong name would else make an empty store in its place.
func existing(name string) error {
	if strings.Contains(name, "://") {
		return nil
	}
	if f, err := os.Stat(name); err != nil {
		return fmt.Errorf("store: %w", err)
	} else if !f.IsDir() {
		return fmt.Errorf("store %s: no folder", name)
	}
	return nil
}

// ownFolder refuses a folder that is not the services' store.
func ownFolder(name string) error {
	if err := existing(name); err != nil {
		return fmt.Errorf("%w; give --local as the --store of `dsec up`, or STATE/store", err)
	}
	return nil
}

// openStores opens stores as one. local is where they keep drafts and copies of indexes.
func openStores(names []string, local string) (store.Store, error) {
	if local != "" {
		if err := os.MkdirAll(local, 0o700); err != nil {
			return nil, err
		}
	}
	var all []store.Store
	for _, n := range names {
		s, err := store.Parse(n, local)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return store.Union(all[0], all[1:]...), nil
}

func openStore(p *places, flags []string) (store.Store, error) {
	names, err := p.storeNames(flags)
	if err != nil {
		return nil, err
	}
	return openStores(names, filepath.Join(p.State, "spool"))
}
