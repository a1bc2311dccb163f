// Package iam knows who may call: nested projects and the API keys that open them.
//
// It hides how keys are kept: a key's secret is random, only its hash is stored, and a found key is remembered for a short time in a
// bounded cache, so that a call costs no look-up. A key opens its project and every project below it.
//
// Keys of New are safe for concurrent use. No lock is held while facts are read.
package iam

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

const (
	prefix      = "dsec_"
	idLength    = 12
	remembered  = 5 * time.Second // how long a key that was revoked elsewhere may still work
	mostKnown   = 4096            // remembered keys
	keysPrefix  = "iam/keys/"
	projectsDir = "iam/projects/"

	// DefaultProject exists from the start.
	DefaultProject = "default"
)

var text32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// Key is what is known of an API key; its secret is shown once, when it is made.
type Key struct {
	ID      string    `json:"id"`
	Project string    `json:"project"`
	Note    string    `json:"note,omitempty"`
	Hash    []byte    `json:"hash"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires,omitzero"` // zero: never
	Revoked time.Time `json:"revoked,omitzero"`
}

// Identity is a caller whose key was verified.
type Identity struct {
	Project string // of the key; the call may be for one below it
	Key     string // ID of the key
}

// Keys verifies callers and manages keys and projects.
type Keys struct {
	facts facts.Facts
	now   func() time.Time

	mu    sync.Mutex
	known map[[sha256.Size]byte]entry // by hash of the secret
}

type entry struct {
	key   Key
	until time.Time
}

// New starts nothing.
func New(f facts.Facts) *Keys {
	return &Keys{facts: f, now: time.Now, known: map[[sha256.Size]byte]entry{}}
}

// CreateKey makes a key for a project that exists and returns its secret. A zero expires is never.
func (k *Keys) CreateKey(ctx context.Context, project, note string, expires time.Time) (secret string, key Key, err error) {
	if err := k.CheckProject(ctx, project); err != nil {
		return "", Key{}, err
	}
	if len(note) > 200 {
		return "", Key{}, fmt.Errorf("note: %d octets, at most 200: %w", len(note), sandbox.ErrInvalid)
	}
	if !expires.IsZero() && !expires.After(k.now()) {
		return "", Key{}, fmt.Errorf("expires %s: lies in the past: %w", expires.UTC().Format(time.RFC3339), sandbox.ErrInvalid)
	}
	id := randomText(10)[:idLength]
	secret = prefix + id + "_" + randomText(25)
	hash := sha256.Sum256([]byte(secret))
	key = Key{ID: id, Project: project, Note: note, Hash: hash[:], Created: k.now().UTC(), Expires: expires.UTC()}
	if expires.IsZero() {
		key.Expires = time.Time{}
	}
	if err := k.put(ctx, key, facts.Absent); err != nil {
		return "", Key{}, err
	}
	return secret, key, nil
}

// RevokeKey ends a key: at once in this process, within five seconds in others.
func (k *Keys) RevokeKey(ctx context.Context, id string) error {
	key, rev, err := k.get(ctx, id)
	if err != nil {
		return err
	}
	if !key.Revoked.IsZero() {
		return nil
	}
	key.Revoked = k.now().UTC()
	if err := k.put(ctx, key, rev); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for h, e := range k.known {
		if e.key.ID == id {
			delete(k.known, h)
		}
	}
	return nil
}

// ListKeys returns the keys of a project and of those below it, without their hashes.
func (k *Keys) ListKeys(ctx context.Context, project string) ([]Key, error) {
	list, err := k.facts.List(ctx, keysPrefix, "", 0)
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	var out []Key
	for _, f := range list {
		var key Key
		if err := json.Unmarshal(f.Value, &key); err != nil {
			return nil, fmt.Errorf("list keys: %s: %w", f.Key, err)
		}
		if project == "" || Within(project, key.Project) {
			key.Hash = nil
			out = append(out, key)
		}
	}
	return out, nil
}

// CreateProject makes a project; its parents come into being with it. One that exists is no error.
func (k *Keys) CreateProject(ctx context.Context, path string) error {
	if err := sandbox.CheckProject(path); err != nil {
		return err
	}
	labels := strings.Split(path, "/")
	for i := range labels {
		_, err := k.facts.Put(ctx, projectsDir+strings.Join(labels[:i+1], "/"), []byte("{}"), facts.Absent)
		if err != nil && !errors.Is(err, facts.ErrConflict) {
			return fmt.Errorf("create project %s: %w", path, err)
		}
	}
	return nil
}

// ListProjects returns the paths of all projects.
func (k *Keys) ListProjects(ctx context.Context) ([]string, error) {
	list, err := k.facts.List(ctx, projectsDir, "", 0)
	if err != nil {
		return nil, fmt.Errorf("list projects: %w", err)
	}
	out := []string{DefaultProject}
	for _, f := range list {
		if p := strings.TrimPrefix(f.Key, projectsDir); p != DefaultProject {
			out = append(out, p)
		}
	}
	return out, nil
}

// CheckProject reports whether a project exists: nil, ErrInvalid or ErrNotFound.
func (k *Keys) CheckProject(ctx context.Context, path string) error {
	if err := sandbox.CheckProject(path); err != nil {
		return err
	}
	if path == DefaultProject {
		return nil
	}
	if _, err := k.facts.Get(ctx, projectsDir+path); errors.Is(err, sandbox.ErrNotFound) {
		return fmt.Errorf("project %q: unknown; it comes into being with its first key (dsec key create --project %s): %w", path, path, sandbox.ErrNotFound)
	} else if err != nil {
		return fmt.Errorf("project %q: %w", path, err)
	}
	return nil
}

// Within reports whether a project is outer or lies below it.
func Within(outer, project string) bool {
	return project == outer || strings.HasPrefix(project, outer+"/")
}

// Verify finds the caller by its secret. The errors wrap rpc.ErrUnauthenticated and say what is wrong with the key, but not
// whether a wrong secret came near a right one.
func (k *Keys) Verify(ctx context.Context, secret string) (Identity, error) {
	if secret == "" {
		return Identity{}, fmt.Errorf("API key: missing; send it as \"Authorization: Bearer KEY\" or \"X-API-Key: KEY\": %w", rpc.ErrUnauthenticated)
	}
	hash := sha256.Sum256([]byte(secret))
	now := k.now()
	k.mu.Lock()
	e, ok := k.known[hash]
	k.mu.Unlock()
	if !ok || now.After(e.until) {
		key, err := k.lookup(ctx, secret, hash)
		if err != nil {
			return Identity{}, err
		}
		e = entry{key: key, until: now.Add(remembered)}
		k.remember(hash, e, now)
	}
	if err := k.expired(e.key, now); err != nil {
		return Identity{}, err
	}
	return Identity{Project: e.key.Project, Key: e.key.ID}, nil
}

// Check looks at a key that was verified before: for calls that last. The errors are those of Verify.
func (k *Keys) Check(ctx context.Context, id string) error {
	key, _, err := k.get(ctx, id)
	switch {
	case errors.Is(err, sandbox.ErrNotFound):
		return fmt.Errorf("API key %s: not known here: %w", id, rpc.ErrUnauthenticated)
	case err != nil:
		return err
	case !key.Revoked.IsZero():
		return revoked(key)
	}
	return k.expired(key, k.now())
}

func revoked(key Key) error {
	return fmt.Errorf("API key %s: revoked on %s: %w", key.ID, key.Revoked.Format(time.RFC3339), rpc.ErrUnauthenticated)
}

func (k *Keys) expired(key Key, now time.Time) error {
	if key.Expires.IsZero() || now.Before(key.Expires) {
		return nil
	}
	return fmt.Errorf("API key %s: expired on %s; make a new one (dsec key create): %w", key.ID, key.Expires.Format(time.RFC3339), rpc.ErrUnauthenticated)
}

func (k *Keys) lookup(ctx context.Context, secret string, hash [sha256.Size]byte) (Key, error) {
	wrong := fmt.Errorf("API key: not known here: %w", rpc.ErrUnauthenticated)
	rest, ok := strings.CutPrefix(secret, prefix)
	id, _, ok2 := strings.Cut(rest, "_")
	if !ok || !ok2 || len(id) != idLength || len(secret) > 100 {
		return Key{}, wrong
	}
	key, _, err := k.get(ctx, id)
	if errors.Is(err, sandbox.ErrNotFound) || errors.Is(err, sandbox.ErrInvalid) {
		return Key{}, wrong
	}
	if err != nil {
		return Key{}, err
	}
	if subtle.ConstantTimeCompare(hash[:], key.Hash) != 1 {
		return Key{}, wrong
	}
	if !key.Revoked.IsZero() {
		return Key{}, revoked(key)
	}
	return key, nil
}

func (k *Keys) remember(hash [sha256.Size]byte, e entry, now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.known) >= mostKnown {
		for h, o := range k.known {
			if now.After(o.until) {
				delete(k.known, h)
			}
		}
	}
	for h := range k.known {
		if len(k.known) < mostKnown {
			break
		}
		delete(k.known, h)
	}
	k.known[hash] = e
}

func (k *Keys) get(ctx context.Context, id string) (Key, facts.Revision, error) {
	if len(id) != idLength {
		return Key{}, 0, fmt.Errorf("key id %.20q: want %d characters: %w", id, idLength, sandbox.ErrInvalid)
	}
	f, err := k.facts.Get(ctx, keysPrefix+id)
	if err != nil {
		return Key{}, 0, fmt.Errorf("key %s: %w", id, err)
	}
	var key Key
	if err := json.Unmarshal(f.Value, &key); err != nil {
		return Key{}, 0, fmt.Errorf("key %s: %w", id, err)
	}
	return key, f.Revision, nil
}

func (k *Keys) put(ctx context.Context, key Key, rev facts.Revision) error {
	b, err := json.Marshal(key)
	if err == nil {
		_, err = k.facts.Put(ctx, keysPrefix+key.ID, b, rev)
	}
	if err != nil {
		return fmt.Errorf("key %s: %w", key.ID, err)
	}
	return nil
}

func randomText(octets int) string {
	b := make([]byte, octets)
	rand.Read(b)
	return text32.EncodeToString(b)
}

// EnsureFirst makes sure that the file holds a key that works: it is left alone when it does, else a key for the default project is
// made and written with mode 0600.
func (k *Keys) EnsureFirst(ctx context.Context, file string) error {
	if b, err := os.ReadFile(file); err == nil {
		_, err := k.Verify(ctx, strings.TrimSpace(string(b)))
		if err == nil {
			return os.Chmod(file, 0o600)
		}
		if !errors.Is(err, rpc.ErrUnauthenticated) {
			return err
		}
	}
	secret, _, err := k.CreateKey(ctx, DefaultProject, "first key", time.Time{})
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(file), ".key") // made with 0600
	if err != nil {
		return fmt.Errorf("write first key: %w", err)
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(secret + "\n")
	if err == nil {
		err = tmp.Sync()
	}
	err = errors.Join(err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), file)
	}
	if err != nil {
		return fmt.Errorf("write first key: %w", err)
	}
	return nil
}
