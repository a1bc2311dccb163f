package history_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// memStore is a bucket in memory that survives all hosts. odd draws what happens to a call: it takes a while, fails without an effect, or
// has its effect and its answer is lost.
type memStore struct {
	mu  *sync.Mutex
	all map[string][]byte
	odd func(changes bool) (wait time.Duration, before, after error)
}

func (m *memStore) act(ctx context.Context, changes bool, f func() error) error {
	wait, before, after := m.odd(changes)
	pause(ctx, wait)
	if err := errors.Join(before, ctx.Err()); err != nil {
		return err
	}
	m.mu.Lock()
	err := f()
	m.mu.Unlock()
	if err == nil {
		err = after
	}
	return err
}

type memDraft struct {
	bytes.Buffer
	m *memStore
}

func (d *memDraft) WriteAt([]byte, int64) (int, error) { return 0, errors.ErrUnsupported }
func (d *memDraft) ReadAt([]byte, int64) (int, error)  { return 0, errors.ErrUnsupported }
func (d *memDraft) Truncate(int64) error               { return errors.ErrUnsupported }
func (d *memDraft) Discard() error                     { return nil }
func (d *memDraft) Publish(ctx context.Context, key string) error {
	return d.m.act(ctx, true, func() error {
		d.m.all[key] = bytes.Clone(d.Bytes())
		return nil
	})
}

type memReader struct{ *bytes.Reader }

func (memReader) Close() error { return nil }

func (m *memStore) Create(context.Context) (store.Draft, error) { return &memDraft{m: m}, nil }

func (m *memStore) get(ctx context.Context, key string) (b []byte, err error) {
	err = m.act(ctx, false, func() error {
		var ok bool
		if b, ok = m.all[key]; !ok {
			return fmt.Errorf("object %s: %w", key, sandbox.ErrNotFound)
		}
		return nil
	})
	return b, err
}

func (m *memStore) Open(ctx context.Context, key string) (store.Reader, error) {
	b, err := m.get(ctx, key)
	if err != nil {
		return nil, err
	}
	return memReader{bytes.NewReader(b)}, nil
}

func (m *memStore) Stat(ctx context.Context, key string) (store.Info, error) {
	b, err := m.get(ctx, key)
	return store.Info{Key: key, Size: int64(len(b))}, err
}

func (m *memStore) List(ctx context.Context, prefix string, each func(store.Info) bool) error {
	var keys []store.Info
	err := m.act(ctx, false, func() error {
		for _, k := range slices.Sorted(maps.Keys(m.all)) {
			if strings.HasPrefix(k, prefix) {
				keys = append(keys, store.Info{Key: k, Size: int64(len(m.all[k]))})
			}
		}
		return nil
	})
	for _, k := range keys {
		if !each(k) {
			break
		}
	}
	return err
}

func (m *memStore) Delete(ctx context.Context, key string) error {
	return m.act(ctx, true, func() error {
		delete(m.all, key)
		return nil
	})
}

func (m *memStore) Path(string) (string, bool) { return "", false }

// memFacts are facts in memory that survive all gateways, and fail now and then.
type memFacts struct {
	mu   sync.Mutex
	all  map[string]facts.Fact
	last facts.Revision
	odd  func(changes bool) (wait time.Duration, before, after error)
}

func (m *memFacts) act(ctx context.Context, changes bool, f func() error) error {
	s := memStore{mu: new(sync.Mutex), odd: m.odd}
	return s.act(ctx, changes, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		return f()
	})
}

func (m *memFacts) Get(ctx context.Context, key string) (f facts.Fact, err error) {
	err = m.act(ctx, false, func() error {
		var ok bool
		if f, ok = m.all[key]; !ok {
			return fmt.Errorf("fact %s: %w", key, sandbox.ErrNotFound)
		}
		return nil
	})
	return f, err
}

func (m *memFacts) expect(key string, expected facts.Revision) error {
	if f := m.all[key]; expected != facts.Any && f.Revision != expected {
		return fmt.Errorf("fact %s: %w", key, facts.ErrConflict)
	}
	return nil
}

func (m *memFacts) Put(ctx context.Context, key string, value []byte, expected facts.Revision) (r facts.Revision, err error) {
	err = m.act(ctx, true, func() error {
		if err := m.expect(key, expected); err != nil {
			return err
		}
		m.last++
		r = m.last
		m.all[key] = facts.Fact{Key: key, Value: bytes.Clone(value), Revision: r}
		return nil
	})
	return r, err
}

func (m *memFacts) Delete(ctx context.Context, key string, expected facts.Revision) error {
	return m.act(ctx, true, func() error {
		if _, ok := m.all[key]; !ok {
			return fmt.Errorf("fact %s: %w", key, sandbox.ErrNotFound)
		}
		if err := m.expect(key, expected); err != nil {
			return err
		}
		m.last++
		delete(m.all, key)
		return nil
	})
}

func (m *memFacts) List(ctx context.Context, prefix, from string, limit int) (out []facts.Fact, err error) {
	err = m.act(ctx, false, func() error {
		for _, k := range slices.Sorted(maps.Keys(m.all)) {
			if strings.HasPrefix(k, prefix) && k >= from && (limit == 0 || len(out) < limit) {
				out = append(out, m.all[k])
			}
		}
		return nil
	})
	return out, err
}

// load takes what lies in a folder's store into memory.
func load(dir string) (map[string][]byte, error) {
	all := map[string][]byte{}
	st, err := store.NewDir(dir)
	if err != nil {
		return nil, err
	}
	err = st.List(context.Background(), "", func(i store.Info) bool {
		r, oerr := st.Open(context.Background(), i.Key)
		if oerr != nil {
			err = oerr
			return false
		}
		defer r.Close()
		b, rerr := io.ReadAll(io.NewSectionReader(r, 0, r.Size()))
		all[i.Key], err = b, errors.Join(err, rerr)
		return true
	})
	return all, err
}

// tree reads the files below a folder; folders end with a slash.
func tree(root string) map[string]string {
	all := map[string]string{}
	_ = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil || p == root:
		case d.IsDir():
			all[p+"/"] = ""
		default:
			b, _ := os.ReadFile(p)
			all[p] = string(b)
		}
		return nil
	})
	return all
}
