package layer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	// maxVersions keeps a name's record below what one fact can hold.
	maxVersions = 1000
	maxAttempts = 100
)

var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?(/[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?){0,3}$`)

func bytesReader(b []byte) io.Reader { return bytes.NewReader(b) }

// ref is a name with a version, or an ID.
type ref struct {
	name string
	n    int // 0 is the current one
	id   ID
}

func (r ref) String() string {
	switch {
	case r.id != "":
		return string(r.id)
	case r.n > 0:
		return r.name + "@" + strconv.Itoa(r.n)
	}
	return r.name
}

func parseRef(what, s string) (ref, error) {
	if strings.HasPrefix(s, idPrefix) {
		id, err := ParseID(s)
		return ref{id: id}, err
	}
	name, version, versioned := strings.Cut(s, "@")
	r := ref{name: name}
	if !namePattern.MatchString(name) {
		return ref{}, fmt.Errorf("%s %.80q: want a name of up to 4 parts joined by / (a-z, 0-9, inner . _ -), as base/debian or base/debian@3: %w", what, s, sandbox.ErrInvalid)
	}
	if versioned {
		n, err := strconv.Atoi(version)
		if err != nil || n < 1 || strconv.Itoa(n) != version {
			return ref{}, fmt.Errorf("%s %.80q: want a version from 1 after @: %w", what, s, sandbox.ErrInvalid)
		}
		r.n = n
	}
	return r, nil
}

// CheckName checks a name without a version.
func CheckName(what, s string) error {
	r, err := parseRef(what, s)
	if err == nil && (r.id != "" || r.n != 0) {
		return fmt.Errorf("%s %.80q: want a name without a version: %w", what, s, sandbox.ErrInvalid)
	}
	return err
}

// lineage is the project and those above it, the nearest first: a project sees what they have.
func lineage(project string) []string {
	var out []string
	for p := project; p != ""; {
		out = append(out, p)
		i := strings.LastIndexByte(p, '/')
		p = p[:max(i, 0)]
	}
	return out
}

// record is what is kept of one name. A version, once given, never means something else and its number is never used again.
type record[T any] struct {
	Current  int          `json:"current"` // 0 when no version is left
	Last     int          `json:"last"`    // highest number ever given
	Versions []version[T] `json:"versions"`
}

type version[T any] struct {
	N       int       `json:"n"`
	Created time.Time `json:"created"`
	Value   T         `json:"value"`
}

func (r *record[T]) find(n int) (version[T], bool) {
	for _, v := range r.Versions {
		if v.N == n {
			return v, true
		}
	}
	return version[T]{}, false
}

func (r *record[T]) numbers() string {
	var s []string
	for _, v := range r.Versions {
		s = append(s, strconv.Itoa(v.N))
	}
	if len(s) > 10 {
		s = append(s[:3:3], append([]string{"..."}, s[len(s)-6:]...)...)
	}
	return strings.Join(s, ", ")
}

func (r *record[T]) drop(n int) {
	r.Versions = slices.DeleteFunc(r.Versions, func(v version[T]) bool { return v.N == n })
	if r.Current == n {
		r.Current = 0
		if k := len(r.Versions); k > 0 {
			r.Current = r.Versions[k-1].N
		}
	}
}

// shelf is the names of one kind.
type shelf[T any] struct {
	c    *Catalogue
	kind string // prefix of the keys and the word in errors
}

func (c *Catalogue) layerNames() shelf[namedLayer] { return shelf[namedLayer]{c, "layer"} }
func (c *Catalogue) environments() shelf[stored]   { return shelf[stored]{c, "environment"} }
func (s shelf[T]) prefix(project string) string    { return s.kind + ":" + project + ":" }
func (s shelf[T]) key(project, name string) string { return s.prefix(project) + name }

func (s shelf[T]) load(ctx context.Context, project, name string) (*record[T], facts.Revision, error) {
	f, err := s.c.facts.Get(ctx, s.key(project, name))
	if err != nil {
		return nil, facts.Absent, err
	}
	r, err := decodeRecord[T](f)
	return r, f.Revision, err
}

func decodeRecord[T any](f facts.Fact) (*record[T], error) {
	r := &record[T]{}
	if err := json.Unmarshal(f.Value, r); err != nil {
		return nil, fmt.Errorf("fact %s is broken: %w", f.Key, err)
	}
	return r, nil
}

// update changes a record; do may run several times and sees an empty one when there is none.
func (s shelf[T]) update(ctx context.Context, project, name string, do func(*record[T]) error) error {
	for range maxAttempts {
		r, rev, err := s.load(ctx, project, name)
		if errors.Is(err, sandbox.ErrNotFound) {
			r = &record[T]{}
		} else if err != nil {
			return err
		}
		if err := do(r); err != nil {
			return err
		}
		text, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if _, err = s.c.facts.Put(ctx, s.key(project, name), text, rev); !errors.Is(err, facts.ErrConflict) {
			return err
		}
	}
	return fmt.Errorf("%s %s: others change it without pause: %w", s.kind, name, facts.ErrConflict)
}

// add gives the next version to a value.
func (s shelf[T]) add(ctx context.Context, project, name string, value T) (int, error) {
	n := 0
	err := s.update(ctx, project, name, func(r *record[T]) error {
		if len(r.Versions) >= maxVersions {
			return fmt.Errorf("%s %s: has %d versions; remove old ones: %w", s.kind, name, len(r.Versions), sandbox.ErrExhausted)
		}
		r.Last++
		n = r.Last
		r.Current = n
		r.Versions = append(r.Versions, version[T]{N: n, Created: s.c.now().UTC(), Value: value})
		return nil
	})
	return n, err
}

// found is a version with where it was found.
type found[T any] struct {
	version[T]
	project string
	name    string
	current bool
}

// resolve finds a version in the project or the nearest one above it that has the name.
func (s shelf[T]) resolve(ctx context.Context, project string, r ref) (found[T], error) {
	for _, p := range lineage(project) {
		rec, _, err := s.load(ctx, p, r.name)
		if errors.Is(err, sandbox.ErrNotFound) || err == nil && len(rec.Versions) == 0 {
			continue
		}
		if err != nil {
			return found[T]{}, err
		}
		n := r.n
		if n == 0 {
			n = rec.Current
		}
		if v, ok := rec.find(n); ok {
			return found[T]{v, p, r.name, n == rec.Current}, nil
		}
		return found[T]{}, fmt.Errorf("%s %s in project %s: it has versions %s: %w", s.kind, r, p, rec.numbers(), sandbox.ErrNotFound)
	}
	near, err := s.nearest(ctx, project, r.name)
	if err != nil {
		return found[T]{}, err
	}
	hint := ""
	if len(near) > 0 {
		hint = "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return found[T]{}, fmt.Errorf("%s %s in project %s%s: %w", s.kind, r, project, hint, sandbox.ErrNotFound)
}

// nearest returns up to three names that look like the one asked for.
func (s shelf[T]) nearest(ctx context.Context, project, name string) ([]string, error) {
	type candidate struct {
		name string
		far  int
	}
	var all []candidate
	for _, p := range lineage(project) {
		list, err := s.list(ctx, p)
		if err != nil {
			return nil, err
		}
		for have := range list {
			far := distance(name, have)
			_, tail, nested := strings.Cut(have, "/")
			if nested {
				far = min(far, distance(name, tail)+1)
			}
			if far <= max(2, len(name)/3) {
				all = append(all, candidate{have, far})
			}
		}
	}
	slices.SortFunc(all, func(a, b candidate) int {
		if a.far != b.far {
			return a.far - b.far
		}
		return strings.Compare(a.name, b.name)
	})
	var out []string
	for _, c := range all {
		if !slices.Contains(out, c.name) && len(out) < 3 {
			out = append(out, c.name)
		}
	}
	return out, nil
}

// list returns the project's own records by name.
func (s shelf[T]) list(ctx context.Context, project string) (map[string]*record[T], error) {
	prefix := s.prefix(project)
	list, err := s.c.facts.List(ctx, prefix, "", 0)
	if err != nil {
		return nil, err
	}
	out := map[string]*record[T]{}
	for _, f := range list {
		r, err := decodeRecord[T](f)
		if err != nil {
			return nil, err
		}
		if len(r.Versions) > 0 {
			out[f.Key[len(prefix):]] = r
		}
	}
	return out, nil
}

// rollback makes an existing version the current one.
func (s shelf[T]) rollback(ctx context.Context, project, name string, n int) error {
	return s.update(ctx, project, name, func(r *record[T]) error {
		if _, ok := r.find(n); !ok {
			if len(r.Versions) == 0 {
				return fmt.Errorf("%s %s in project %s: %w", s.kind, name, project, sandbox.ErrNotFound)
			}
			return fmt.Errorf("%s %s@%d in project %s: it has versions %s: %w", s.kind, name, n, project, r.numbers(), sandbox.ErrNotFound)
		}
		r.Current = n
		return nil
	})
}

// distance is the number of single changes between two names (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
