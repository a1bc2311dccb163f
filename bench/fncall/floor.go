package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/internal/confine"
)

//go:embed floor/floor.c
var floorSource []byte

// floor is the program of floor/floor.c with what it needs.
type floor struct {
	dir    string
	groups []string // folders, removed at the end
}

func newFloor() (f *floor, err error) {
	f = &floor{}
	defer func() {
		if err != nil {
			f.close()
			err = fmt.Errorf("floor: %w", err)
		}
	}()
	if f.dir, err = os.MkdirTemp("", "dsec-bench-floor-"); err != nil {
		return nil, err
	}
	if err := os.Chmod(f.dir, 0o755); err != nil {
		return nil, err
	}
	if err := measure.Unpack(f.path("root"), 0); err != nil {
		return nil, err
	}
	for _, d := range []string{"dev", "proc", "tmp", "box"} {
		if err := os.MkdirAll(f.path("root/"+d), 0o755); err != nil {
			return nil, err
		}
	}
	filter, err := confine.FnCall().Compile(true)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(os.WriteFile(f.path("filter"), filter, 0o600), os.WriteFile(f.path("floor.c"), floorSource, 0o600)); err != nil {
		return nil, err
	}
	if out, err := exec.Command("gcc", "-O2", "-Wall", "-static", "-o", f.path("floor"), f.path("floor.c")).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("gcc: %w: %s", err, out)
	}
	return f, f.makeGroups()
}

// makeGroups makes the groups that a call is in: that of v2, and those of memory and processes where they are apart.
func (f *floor) makeGroups() error {
	root, err := measure.GroupRoot()
	if err != nil {
		return err
	}
	name := "dsec-bench-floor-" + strconv.Itoa(os.Getpid())
	for _, at := range []string{root, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids"} {
		if _, err := os.Stat(filepath.Join(at, "cgroup.procs")); err != nil {
			continue // in the v2 tree
		}
		dir := filepath.Join(at, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		f.groups = append(f.groups, dir)
	}
	return nil
}

func (f *floor) path(name string) string { return filepath.Join(f.dir, name) }

// measure gives the medians in ms of calls with network namespaces of their own, and with one for all.
func (f *floor) measure(ctx context.Context, count int) (own, shared float64, err error) {
	args := []string{f.path("root"), f.path("filter"), strconv.Itoa(count), "20"}
	for _, g := range f.groups {
		args = append(args, filepath.Join(g, "cgroup.procs"))
	}
	cmd := exec.CommandContext(ctx, f.path("floor"), args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return 0, 0, fmt.Errorf("floor: %w", err)
	}
	v, err := lines(out)
	if err != nil || len(v) != 2 {
		return 0, 0, fmt.Errorf("floor: printed %q", out)
	}
	return v[0], v[1], nil
}

func (f *floor) close() {
	for _, g := range f.groups {
		if err := measure.RemoveGroups(g); err != nil {
			measure.Note("remove %s: %v", g, err)
		}
	}
	os.RemoveAll(f.dir)
}
