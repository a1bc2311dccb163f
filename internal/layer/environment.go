package layer

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// MaxStack is how many layers one sandbox may have. Each costs a lookup of names that do not exist; overlayfs ends at 500.
const MaxStack = 128

const maxKits = 64

// EnvironmentSpec says what an environment is made of. References are name, name@N or an ID.
type EnvironmentSpec struct {
	Base      string   `json:"base"`
	Workspace string   `json:"workspace,omitempty"` // on top of the base
	Kits      []string `json:"kits,omitempty"`      // on top of the workspace, in this order
	// Defaults of the sandboxes made of it; zero values mean the platform's.
	Env       []string          `json:"env,omitempty"`
	User      string            `json:"user,omitempty"`
	Cwd       string            `json:"cwd,omitempty"`
	Resources sandbox.Resources `json:"resources,omitzero"`
	// Volatile are paths of caches and the like, which a comparison of two sandboxes passes over.
	Volatile []string `json:"volatile,omitempty"`
	// Image is set on one that was made of an OCI image.
	Image *ImageFacts `json:"image,omitempty"`
}

// ImageFacts is what an OCI image says of how it is meant to be run. Nothing of it is started unless asked.
type ImageFacts struct {
	Ref        string            `json:"ref"`    // in full, as docker.io/library/python:3.12
	Digest     string            `json:"digest"` // of the manifest; of the config where there was none
	Arch       string            `json:"arch,omitempty"`
	Entrypoint []string          `json:"entrypoint,omitempty"`
	Cmd        []string          `json:"cmd,omitempty"`
	Labels     map[string]string `json:"labels,omitempty"`
}

type stored struct {
	Spec   EnvironmentSpec `json:"spec"` // as published, with versions filled in
	Layers []ID            `json:"layers"`
	Arch   string          `json:"arch"`
}

// Environment is a published version of one.
type Environment struct {
	Project string
	Name    string // without the version
	N       int
	Spec    EnvironmentSpec // references with the version that they had at publication
	Layers  []ID            // lowest first
	Arch    string
	Created time.Time
	Current bool
}

// Ref is name@N.
func (e Environment) Ref() string { return e.Name + "@" + strconv.Itoa(e.N) }

// maxVolatile bounds what is compared with every path of a tree.
const maxVolatile = 64

func (s *EnvironmentSpec) validate() error {
	switch {
	case s.Base == "":
		return fmt.Errorf("environment: base: name a layer: %w", sandbox.ErrInvalid)
	case len(s.Kits) > maxKits:
		return fmt.Errorf("environment: kits: %d given, at most %d: %w", len(s.Kits), maxKits, sandbox.ErrInvalid)
	case len(s.User) > 256 || strings.ContainsAny(s.User, "\x00\n"):
		return fmt.Errorf("environment: user %.80q: want a name or number: %w", s.User, sandbox.ErrInvalid)
	}
	if err := sandbox.CheckEnv("environment: env", s.Env); err != nil {
		return err
	}
	if s.Cwd != "" {
		if err := sandbox.CheckPath("environment: cwd", s.Cwd); err != nil {
			return err
		}
	}
	if len(s.Volatile) > maxVolatile {
		return fmt.Errorf("environment: volatile_paths: %d given, at most %d: %w", len(s.Volatile), maxVolatile, sandbox.ErrInvalid)
	}
	for i, p := range s.Volatile {
		if err := sandbox.CheckPath(fmt.Sprintf("environment: volatile_paths[%d]", i), p); err != nil {
			return err
		}
		switch clean := path.Clean(p); {
		case clean == "/":
			return fmt.Errorf("environment: volatile_paths[%d]: all of the tree can't be volatile: %w", i, sandbox.ErrInvalid)
		case clean != p:
			return fmt.Errorf("environment: volatile_paths[%d] %.80q: write it as %.80q: %w", i, p, clean, sandbox.ErrInvalid)
		}
	}
	for _, f := range []struct {
		name string
		have int64
		min  int64
	}{
		{"memory", s.Resources.Memory, sandbox.MinMemory}, {"disk", s.Resources.Disk, sandbox.MinDisk}, {"pids", s.Resources.Pids, sandbox.MinPids},
		{"cpu", s.Resources.CPU, sandbox.MinCPU}, {"cpu_weight", s.Resources.CPUWeight, 1},
	} {
		if f.have != 0 && f.have < f.min {
			return fmt.Errorf("environment: %s %d: at least %d, or 0 for the default: %w", f.name, f.have, f.min, sandbox.ErrInvalid)
		}
	}
	return nil
}

// Compose resolves references, lowest first, to the stack of layers that a sandbox gets. A snapshot brings the layers it was
// taken on, and is refused on others.
func (c *Catalogue) Compose(ctx context.Context, project string, refs []string) ([]ID, error) {
	layers, _, _, err := c.compose(ctx, project, refs)
	return layers, err
}

func (c *Catalogue) compose(ctx context.Context, project string, refs []string) (stack []ID, arch string, fixed []string, err error) {
	arch = AnyArch
	archFrom := ""
	from := map[ID]string{}
	for _, s := range refs {
		v, err := c.Lookup(ctx, project, s)
		if err != nil {
			return nil, "", nil, err
		}
		d, err := c.recent(ctx, v.ID)
		if err != nil {
			return nil, "", nil, fmt.Errorf("layer %s: %w", s, err)
		}
		if len(d.Parents) > 0 {
			if len(stack) == 0 {
				stack = slices.Clone(d.Parents)
				for _, p := range d.Parents {
					from[p] = "below " + s
				}
			} else if !slices.Equal(stack, d.Parents) {
				return nil, "", nil, fmt.Errorf("layer %s: is a snapshot taken on other layers than those below it here; use it alone or rebuild it: %w", s, sandbox.ErrInvalid)
			}
		}
		if d.Opaque {
			stack = nil
		}
		if other, twice := from[d.ID]; twice {
			return nil, "", nil, fmt.Errorf("layer %s: is the same as %s: %w", s, other, sandbox.ErrInvalid)
		}
		from[d.ID] = s
		stack = append(stack, d.ID)
		if len(stack) > MaxStack {
			return nil, "", nil, fmt.Errorf("layer %s: makes %d layers, at most %d; build one layer from them: %w", s, len(stack), MaxStack, sandbox.ErrExhausted)
		}
		archs := []string{d.Arch}
		for _, p := range d.Parents {
			below, err := c.recent(ctx, p)
			if err != nil {
				return nil, "", nil, fmt.Errorf("layer %s: lies on %w", s, err)
			}
			archs = append(archs, below.Arch)
		}
		for _, a := range archs {
			switch {
			case a == AnyArch || a == arch:
			case arch == AnyArch:
				arch, archFrom = a, s
			default:
				return nil, "", nil, fmt.Errorf("layer %s: holds programs for %s, layer %s for %s: %w", s, a, archFrom, arch, sandbox.ErrInvalid)
			}
		}
		if v.Name != "" {
			s = v.Ref()
		}
		fixed = append(fixed, s)
	}
	return stack, arch, fixed, nil
}

// PublishEnvironment resolves the references and gives the name its next version, which becomes the current one. What it
// resolved to stays, whatever the layers' names mean later.
func (c *Catalogue) PublishEnvironment(ctx context.Context, project, name string, spec EnvironmentSpec) (Environment, error) {
	if err := errors.Join(sandbox.CheckProject(project), CheckName("environment name", name), spec.validate()); err != nil {
		return Environment{}, err
	}
	refs := []string{spec.Base}
	if spec.Workspace != "" {
		refs = append(refs, spec.Workspace)
	}
	refs = append(refs, spec.Kits...)
	layers, arch, fixed, err := c.compose(ctx, project, refs)
	if err != nil {
		return Environment{}, fmt.Errorf("publish environment %s: %w", name, err)
	}
	spec.Base, fixed = fixed[0], fixed[1:]
	if spec.Workspace != "" {
		spec.Workspace, fixed = fixed[0], fixed[1:]
	}
	spec.Kits = fixed
	value := stored{Spec: spec, Layers: layers, Arch: arch}
	n, err := c.environments().add(ctx, project, name, value)
	if err != nil {
		return Environment{}, fmt.Errorf("publish environment %s: %w", name, err)
	}
	// A layer that another process removed meanwhile is missing now; else its removal sees this environment.
	for _, id := range layers {
		if _, err := c.held(ctx, project, id); err != nil {
			undo := c.environments().update(ctx, project, name, func(r *record[stored]) error { r.drop(n); return nil })
			return Environment{}, errors.Join(fmt.Errorf("publish environment %s: %w", name, err), undo)
		}
	}
	return Environment{Project: project, Name: name, N: n, Spec: spec, Layers: layers, Arch: arch, Created: c.now().UTC(), Current: true}, nil
}

// Resolve finds an environment by name or name@N in the project or one above it.
func (c *Catalogue) Resolve(ctx context.Context, project, s string) (Environment, error) {
	r, err := parseRef("environment", s)
	if err != nil {
		return Environment{}, err
	}
	if r.id != "" {
		return Environment{}, fmt.Errorf("environment %s: is a layer's id; name an environment, or give layers: %w", s, sandbox.ErrInvalid)
	}
	f, err := c.environments().resolve(ctx, project, r)
	if err != nil {
		return Environment{}, err
	}
	return environmentOf(f), nil
}

func environmentOf(f found[stored]) Environment {
	v := f.Value
	return Environment{f.project, f.name, f.N, v.Spec, v.Layers, v.Arch, f.Created, f.current}
}

// Environments lists all versions of the project's own environments, by name and number.
func (c *Catalogue) Environments(ctx context.Context, project string) ([]Environment, error) {
	records, err := c.environments().list(ctx, project)
	if err != nil {
		return nil, fmt.Errorf("list environments: %w", err)
	}
	var out []Environment
	for name, r := range records {
		for _, v := range r.Versions {
			out = append(out, environmentOf(found[stored]{v, project, name, v.N == r.Current}))
		}
	}
	sort.Slice(out, func(i, j int) bool {
		if out[i].Name != out[j].Name {
			return out[i].Name < out[j].Name
		}
		return out[i].N < out[j].N
	})
	return out, nil
}

// RollbackEnvironment makes version n the current one of the name.
func (c *Catalogue) RollbackEnvironment(ctx context.Context, project, name string, n int) error {
	if err := CheckName("environment name", name); err != nil {
		return err
	}
	return c.environments().rollback(ctx, project, name, n)
}

// RemoveEnvironment removes a version (name@N) or all of a name. Sandboxes made of it go on.
func (c *Catalogue) RemoveEnvironment(ctx context.Context, project, s string) error {
	r, err := parseRef("environment", s)
	if err != nil {
		return err
	}
	f, err := c.environments().resolve(ctx, project, r)
	if err != nil {
		return err
	}
	if f.project != project {
		return fmt.Errorf("environment %s: belongs to project %s; remove it there: %w", s, f.project, sandbox.ErrDenied)
	}
	err = c.environments().update(ctx, project, r.name, func(rec *record[stored]) error {
		if r.n == 0 {
			rec.Versions, rec.Current = nil, 0
			return nil
		}
		rec.drop(r.n)
		return nil
	})
	if err != nil {
		return fmt.Errorf("remove environment %s: %w", s, err)
	}
	return nil
}
