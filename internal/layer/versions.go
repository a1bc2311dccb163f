package layer

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

type namedLayer struct {
	ID     ID     `json:"id"`
	Source string `json:"source,omitempty"`
}

// Version is a named layer.
type Version struct {
	Project string
	Name    string // without the version
	N       int
	ID      ID
	Source  string
	Created time.Time
	Current bool
}

// Ref is name@N.
func (v Version) Ref() string { return v.Name + "@" + strconv.Itoa(v.N) }

// Publish gives a layer that the project may use the name's next version, which becomes the current one.
func (c *Catalogue) Publish(ctx context.Context, project, name string, id ID) (Version, error) {
	if err := errors.Join(sandbox.CheckProject(project), CheckName("layer name", name)); err != nil {
		return Version{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.held(ctx, project, id); err != nil {
		return Version{}, err
	}
	d, err := c.Descriptor(ctx, id)
	if err != nil {
		return Version{}, err
	}
	// The project holds it itself from now on, so that one above may drop it.
	if err := c.hold(ctx, project, id); err != nil {
		return Version{}, fmt.Errorf("publish layer %s: %w", name, err)
	}
	n, err := c.layerNames().add(ctx, project, name, namedLayer{ID: id, Source: d.Source})
	if err != nil {
		return Version{}, fmt.Errorf("publish layer %s: %w", name, err)
	}
	return Version{Project: project, Name: name, N: n, ID: id, Source: d.Source, Created: c.now().UTC(), Current: true}, nil
}

// Lookup resolves name, name@N or an ID for the project; an ID gives a Version without a name.
func (c *Catalogue) Lookup(ctx context.Context, project, s string) (Version, error) {
	r, err := parseRef("layer", s)
	if err != nil {
		return Version{}, err
	}
	if r.id != "" {
		p, err := c.held(ctx, project, r.id)
		return Version{Project: p, ID: r.id}, err
	}
	f, err := c.layerNames().resolve(ctx, project, r)
	if err != nil {
		return Version{}, err
	}
	return Version{f.project, f.name, f.N, f.Value.ID, f.Value.Source, f.Created, f.current}, nil
}

// Versions lists all named layers of the project itself, by name and number.
func (c *Catalogue) Versions(ctx context.Context, project string) ([]Version, error) {
	records, err := c.layerNames().list(ctx, project)
	if err != nil {
		return nil, fmt.Errorf("list layers: %w", err)
	}
	var out []Version
	for name, r := range records {
		for _, v := range r.Versions {
			out = append(out, Version{project, name, v.N, v.Value.ID, v.Value.Source, v.Created, v.N == r.Current})
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

// Rollback makes version n the current one of the name. Environments that were published keep what they resolved to.
func (c *Catalogue) Rollback(ctx context.Context, project, name string, n int) error {
	if err := CheckName("layer name", name); err != nil {
		return err
	}
	return c.layerNames().rollback(ctx, project, name, n)
}

// Remove removes a version (name@N), all versions of a name (name) or a layer without a name (its ID). It refuses with
// sandbox.ErrState, naming the user, while an environment or a snapshot uses the layer. The data goes with its last use.
func (c *Catalogue) Remove(ctx context.Context, project, s string) error {
	r, err := parseRef("layer", s)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.id != "" {
		if _, err := c.facts.Get(ctx, heldKey(project, r.id)); err != nil {
			if errors.Is(err, sandbox.ErrNotFound) {
				err = fmt.Errorf("layer %s in project %s: %w", r.id, project, sandbox.ErrNotFound)
			}
			return err
		}
		return c.release(ctx, project, s, r.id)
	}
	records := c.layerNames()
	rec, _, err := records.load(ctx, project, r.name)
	if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return err
	}
	if err != nil || len(rec.Versions) == 0 || r.n != 0 && !has(rec, r.n) {
		if _, err := records.resolve(ctx, project, r); err != nil {
			return err
		}
		return fmt.Errorf("layer %s: belongs to a project above %s; remove it there: %w", s, project, sandbox.ErrDenied)
	}
	var drop []version[namedLayer]
	for _, v := range rec.Versions {
		if r.n == 0 || v.N == r.n {
			drop = append(drop, v)
		}
	}
	for _, v := range drop {
		if err := c.unused(ctx, project, r.name+"@"+strconv.Itoa(v.N), v.Value.ID); err != nil {
			return err
		}
	}
	for _, v := range drop {
		if err := records.update(ctx, project, r.name, func(r *record[namedLayer]) error { r.drop(v.N); return nil }); err != nil {
			return fmt.Errorf("remove layer %s: %w", s, err)
		}
		// An environment that another process published meanwhile is seen here, or its publication sees the removal.
		if err := c.unused(ctx, project, r.name+"@"+strconv.Itoa(v.N), v.Value.ID); err != nil {
			back := records.update(ctx, project, r.name, func(r *record[namedLayer]) error {
				if !has(r, v.N) {
					r.Versions = append(r.Versions, v)
					sort.Slice(r.Versions, func(i, j int) bool { return r.Versions[i].N < r.Versions[j].N })
					r.Current = max(r.Current, v.N)
				}
				return nil
			})
			return errors.Join(err, back)
		}
		if err := c.release(ctx, project, s, v.Value.ID); err != nil && !errors.Is(err, errNamed) {
			return err
		}
	}
	return nil
}

func has[T any](r *record[T], n int) bool {
	_, ok := r.find(n)
	return ok
}

var errNamed = fmt.Errorf("still has a name: %w", sandbox.ErrState)

// release lets the project drop a layer that it has no name and no use for. The caller has mu.
func (c *Catalogue) release(ctx context.Context, project, what string, id ID) error {
	versions, err := c.Versions(ctx, project)
	if err != nil {
		return err
	}
	for _, v := range versions {
		if v.ID == id {
			return fmt.Errorf("remove layer %s: it is %s: %w", what, v.Ref(), errNamed)
		}
	}
	if err := c.unused(ctx, project, what, id); err != nil {
		return err
	}
	if err := c.facts.Delete(ctx, heldKey(project, id), facts.Any); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("remove layer %s: %w", what, err)
	}
	if err := c.collect(ctx, id); err != nil {
		return fmt.Errorf("remove layer %s: free its data: %w", what, err)
	}
	return nil
}

// unused refuses when an environment of the project or one below it, or a snapshot that one of them holds, needs the layer.
func (c *Catalogue) unused(ctx context.Context, project, what string, id ID) error {
	list, err := c.facts.List(ctx, "environment:"+project, "", 0)
	if err != nil {
		return err
	}
	for _, f := range list {
		owner, name, ok := below(project, "environment:", f.Key)
		if !ok {
			continue
		}
		r, err := decodeRecord[stored](f)
		if err != nil {
			return err
		}
		for _, v := range r.Versions {
			for _, l := range v.Value.Layers {
				if l == id {
					return fmt.Errorf("remove layer %s: environment %s@%d of project %s uses it; remove that first: %w", what, name, v.N, owner, sandbox.ErrState)
				}
			}
		}
	}
	list, err = c.facts.List(ctx, "held:"+project, "", 0)
	if err != nil {
		return err
	}
	for _, f := range list {
		owner, digits, ok := below(project, "held:", f.Key)
		if !ok {
			continue
		}
		d, err := c.Descriptor(ctx, ID(idPrefix+digits))
		if errors.Is(err, sandbox.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		for _, p := range d.Parents {
			if p == id {
				return fmt.Errorf("remove layer %s: snapshot %s of project %s lies on it; remove that first: %w", what, d.ID, owner, sandbox.ErrState)
			}
		}
	}
	return nil
}

// below splits a key when it belongs to the project or one below it.
func below(project, prefix, key string) (owner, name string, ok bool) {
	owner, name, ok = strings.Cut(strings.TrimPrefix(key, prefix), ":")
	return owner, name, ok && (owner == project || strings.HasPrefix(owner, project+"/"))
}
