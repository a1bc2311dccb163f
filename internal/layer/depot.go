package layer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// Kinds of what is pushed.
const (
	PushedLayer       = "layer"
	PushedEnvironment = "environment"
)

// Pushed is a name in a store itself, for those who share the store but no facts: `dsec layer push` writes it after all layers that it names,
// as pushed/<kind>s/<name>/_<version>.json and, for the latest, _current.json. The layers of a name stay as long as the name.
type Pushed struct {
	Kind    string    `json:"kind"`
	Name    string    `json:"name"`
	Version int64     `json:"version"`
	Time    time.Time `json:"time"`
	Layers  []ID      `json:"layers"` // lowest first; with the parents of snapshots
	// Of an environment: its message as JSON, and the layers that its references meant.
	Environment json.RawMessage `json:"environment,omitempty"`
	Refs        map[string]ID   `json:"refs,omitempty"`
}

const (
	pushedFolder = "pushed/"
	claimFolder  = "claims/"
	claimAge     = 24 * time.Hour
)

// PushedKey is where the name, with its version or not, is in a store.
func PushedKey(kind, s string) (string, error) {
	r, err := parseRef(kind, s)
	if err != nil {
		return "", err
	}
	if r.id != "" {
		return "", fmt.Errorf("%s %.80q: want a name: %w", kind, s, sandbox.ErrInvalid)
	}
	file := "_current.json"
	if r.n > 0 {
		file = "_" + strconv.Itoa(r.n) + ".json"
	}
	return pushedFolder + kind + "s/" + r.name + "/" + file, nil
}

// WritePushed writes the name into the store.
func WritePushed(ctx context.Context, s store.Store, p Pushed) error {
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	for _, ref := range []string{p.Name + "@" + strconv.FormatInt(p.Version, 10), p.Name} {
		key, err := PushedKey(p.Kind, ref)
		if err != nil {
			return err
		}
		if err := store.Put(ctx, s, key, bytesReader(text)); err != nil {
			return fmt.Errorf("push %s %s: %w", p.Kind, ref, err)
		}
	}
	return nil
}

// RemovePushed takes a name out of the store, or one version of it; the latest of those that are left is current then. Layers that no other name
// holds go with a later sweep.
func RemovePushed(ctx context.Context, s store.Store, kind, ref string) error {
	r, err := parseRef(kind, ref)
	if err != nil {
		return err
	}
	if r.id != "" {
		return fmt.Errorf("%s %.80q: want a name: %w", kind, ref, sandbox.ErrInvalid)
	}
	folder := pushedFolder + kind + "s/" + r.name + "/"
	latest, found := 0, false
	var gone []string
	if err := s.List(ctx, folder, func(i store.Info) bool {
		file := strings.TrimPrefix(i.Key, folder)
		n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(file, "_"), ".json"))
		switch {
		case err != nil || n <= 0: // _current.json, and names below this one
		case r.n == 0 || n == r.n:
			gone, found = append(gone, i.Key), true
		default:
			latest = max(latest, n)
		}
		return true
	}); err != nil {
		return err
	}
	if !found {
		return fmt.Errorf("%s %s is not among what was pushed to the store: %w", kind, ref, sandbox.ErrNotFound)
	}
	// The current one first: a name never means a version that is gone.
	current := folder + "_current.json"
	if latest == 0 {
		err = s.Delete(ctx, current)
	} else {
		var text []byte
		if text, err = store.ReadAll(ctx, s, folder+"_"+strconv.Itoa(latest)+".json", maxDescriptor); err == nil {
			err = store.Put(ctx, s, current, bytesReader(text))
		}
	}
	if err != nil {
		return err
	}
	for _, key := range gone {
		if err := s.Delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}

// ReadPushed reads a name from the store.
func ReadPushed(ctx context.Context, s store.Store, kind, ref string) (Pushed, error) {
	var p Pushed
	key, err := PushedKey(kind, ref)
	if err != nil {
		return p, err
	}
	text, err := store.ReadAll(ctx, s, key, maxDescriptor)
	if errors.Is(err, sandbox.ErrNotFound) {
		return p, fmt.Errorf("%s %s is not among what was pushed to the store: %w", kind, ref, sandbox.ErrNotFound)
	}
	if err != nil {
		return p, err
	}
	if err := json.Unmarshal(text, &p); err != nil {
		return p, fmt.Errorf("%s: %v: %w", key, err, sandbox.ErrInvalid)
	}
	if CheckName(kind, p.Name) != nil || p.Kind != kind || len(p.Layers) == 0 || len(p.Layers) > 500 {
		return p, fmt.Errorf("%s: not a pushed %s: %w", key, kind, sandbox.ErrInvalid)
	}
	for _, id := range p.Layers {
		if _, err := ParseID(string(id)); err != nil {
			return p, fmt.Errorf("%s: %w", key, err)
		}
	}
	return p, nil
}

// Copy copies layers between stores, with the parents of snapshots, and returns all of them, parents first. A layer whose descriptor dst has, and whose
// objects with their sizes, is only made young again: a descriptor is written after its objects were compared with their digests. With check they
// are compared once more (see [store.Copy]), and what is wrong is brought again. One that broke off is gone on with. A descriptor follows its objects, so
// that none is there in part.
func Copy(ctx context.Context, dst, src store.Store, ids []ID, check bool, progress func(store.CopyProgress)) ([]ID, store.CopyProgress, error) {
	from, to := New(nil, src), New(nil, dst)
	var all []ID
	seen := map[ID]bool{}
	var keys []string
	var descriptors []Descriptor
	var walk func([]ID, int) error
	walk = func(ids []ID, depth int) error {
		if depth > 100 {
			return fmt.Errorf("layers: more than 100 snapshots on each other: %w", sandbox.ErrInvalid)
		}
		for _, id := range ids {
			if seen[id] {
				continue
			}
			seen[id] = true
			d, err := from.Descriptor(ctx, id)
			if err != nil {
				return err
			}
			if err := walk(d.Parents, depth+1); err != nil {
				return err
			}
			all = append(all, id)
			if old, err := to.Descriptor(ctx, id); err == nil && to.anyWhole(ctx, old) {
				descriptors = append(descriptors, old)
				if check {
					again, err := to.compared(ctx, old, d)
					if err != nil {
						return err
					}
					keys = append(keys, again...)
				}
				continue
			} else if err != nil && !errors.Is(err, sandbox.ErrNotFound) {
				return err
			}
			var forms []Form
			for _, f := range d.Forms {
				if f.Superseded != nil {
					continue
				}
				if err := f.check(); err != nil {
					return fmt.Errorf("layer %s: %w", id, err)
				}
				forms = append(forms, f)
				for _, b := range f.blobs() {
					keys = append(keys, b.key)
				}
			}
			if d.Forms = forms; len(forms) == 0 {
				return fmt.Errorf("layer %s: has no form: %w", id, sandbox.ErrLost)
			}
			descriptors = append(descriptors, d)
		}
		return nil
	}
	if err := walk(ids, 0); err != nil {
		return nil, store.CopyProgress{}, err
	}
	done := store.CopyProgress{}
	for try := 1; ; try++ {
		var err error
		if done, err = store.Copy(ctx, dst, src, keys, progress); err != nil {
			return nil, done, err
		}
		for _, d := range descriptors {
			// The copy took long: another one may have brought the layer, or laid it out anew.
			now, err := to.Descriptor(ctx, d.ID)
			switch {
			case err == nil && to.anyWhole(ctx, now):
				_, err = to.touch(ctx, now, to.wholeForms(ctx, now))
			case err == nil || errors.Is(err, sandbox.ErrNotFound):
				err = to.describe(ctx, d)
			}
			if err != nil {
				return nil, done, err
			}
		}
		// A copy that took longer than the age of garbage may have lost its first objects before a descriptor named them.
		keys = nil
		for _, d := range descriptors {
			now, err := to.Descriptor(ctx, d.ID)
			if err == nil && to.anyWhole(ctx, now) {
				continue
			}
			for _, f := range d.Forms {
				for _, b := range f.blobs() {
					keys = append(keys, b.key)
				}
			}
		}
		if len(keys) == 0 {
			return all, done, nil
		}
		if try == copyTries {
			return nil, done, fmt.Errorf("copy layers: their objects are removed as fast as they come: %w", sandbox.ErrState)
		}
	}
}

// compared are the objects of a layer that are to be compared with those of the same layer in another store. Forms that only this store has, as after it
// laid the layer out anew, are read here.
func (c *Catalogue) compared(ctx context.Context, mine, other Descriptor) (keys []string, err error) {
	for _, f := range mine.Forms {
		if f.Superseded != nil {
			continue
		}
		if !slices.ContainsFunc(other.Forms, func(o Form) bool { return o.Digest == f.Digest }) {
			if err := c.verify(ctx, f); err != nil {
				return nil, fmt.Errorf("layer %s, laid out anew in the store that is written: %w", mine.ID, err)
			}
			continue
		}
		for _, b := range f.blobs() {
			keys = append(keys, b.key)
		}
	}
	return keys, nil
}

// copyTries is how often a Copy brings objects again that went meanwhile.
const copyTries = 4

func (c *Catalogue) anyWhole(ctx context.Context, d Descriptor) bool {
	for _, f := range d.Forms {
		if f.Superseded == nil && c.whole(ctx, f) == nil {
			return true
		}
	}
	return false
}

var tokenPattern = regexp.MustCompile(`^[0-9a-f]{32}$`)

func claimKey(id ID, token string) string { return claimFolder + id.Hex() + "/" + token }

// LeaveClaim writes into a store that whoever knows the token may hold the layer. Who can write into the store can read all layers
// anyway.
func LeaveClaim(ctx context.Context, s store.Store, id ID, token string) error {
	return store.Put(ctx, s, claimKey(id, token), strings.NewReader("{}"))
}

// DropClaim takes it back.
func DropClaim(ctx context.Context, s store.Store, id ID, token string) error {
	return s.Delete(ctx, claimKey(id, token))
}

// Claim makes the project a holder of a layer that was copied into the store, if such a claim is there.
func (c *Catalogue) Claim(ctx context.Context, project string, id ID, token string) error {
	if _, err := ParseID(string(id)); err != nil {
		return err
	}
	none := fmt.Errorf("layer %s in project %s: %w", id, project, sandbox.ErrNotFound)
	if !tokenPattern.MatchString(token) {
		return none
	}
	info, err := c.store.Stat(ctx, claimKey(id, token))
	if errors.Is(err, sandbox.ErrNotFound) || err == nil && c.now().Sub(info.Modified) > claimAge {
		return none
	}
	if err != nil {
		return err
	}
	return c.Hold(ctx, project, id)
}

// pushed lists the layers that names in the store itself name, and with tidy removes claims that nobody took.
func (c *Catalogue) pushed(ctx context.Context, tidy bool, hold func(ID)) error {
	var failed error
	err := c.store.List(ctx, pushedFolder, func(i store.Info) bool {
		text, err := store.ReadAll(ctx, c.store, i.Key, maxDescriptor)
		var p Pushed
		switch {
		case errors.Is(err, sandbox.ErrNotFound):
			return true
		case err == nil:
			err = json.Unmarshal(text, &p)
		}
		if err != nil {
			failed = fmt.Errorf("%s: %w", i.Key, err)
			return false
		}
		for _, id := range p.Layers {
			hold(id)
		}
		return true
	})
	if err := errors.Join(err, failed); err != nil || !tidy {
		return err
	}
	var old []string
	if err := c.store.List(ctx, claimFolder, func(i store.Info) bool {
		if c.now().Sub(i.Modified) > claimAge {
			old = append(old, i.Key)
		}
		return true
	}); err != nil {
		return err
	}
	for _, key := range old {
		if err := c.store.Delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}
