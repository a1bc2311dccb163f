package fncall

import (
	"container/list"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Cache keeps files by their content, each for one owner, in a folder of a bounded size: the ones that were used least lately go. A file
// that is open when it goes can still be read.
type Cache struct {
	dir string
	max int64

	mu   sync.Mutex
	size int64
	by   map[string]*list.Element
	used *list.List // of *kept, the latest first
}

type kept struct {
	name string
	size int64
}

var contentPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

// OpenCache takes over a folder, or makes it. What is in it and is no file of a cache is removed.
func OpenCache(dir string, max int64) (*Cache, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("cache of function calls: %w", err)
	}
	c := &Cache{dir: dir, max: max, by: map[string]*list.Element{}, used: list.New()}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("cache of function calls: %w", err)
	}
	for _, e := range entries {
		i, err := e.Info()
		owner, content, ok := strings.Cut(e.Name(), "-")
		if err != nil || !ok || len(owner) != 16 || !contentPattern.MatchString(content) {
			os.Remove(filepath.Join(dir, e.Name()))
			continue
		}
		if i.Mode().Perm() != 0o444 { // of an earlier version
			if err := os.Chmod(filepath.Join(dir, e.Name()), 0o444); err != nil {
				return nil, fmt.Errorf("cache of function calls: %w", err)
			}
		}
		c.add(e.Name(), i.Size())
	}
	return c, c.evict()
}

func cacheName(owner, content string) string {
	sum := sha256.Sum256([]byte(owner))
	return hex.EncodeToString(sum[:8]) + "-" + content
}

func (c *Cache) add(name string, size int64) {
	if e := c.by[name]; e != nil {
		c.used.MoveToFront(e)
		return
	}
	c.by[name] = c.used.PushFront(&kept{name, size})
	c.size += size
}

// evict removes what is too much.
func (c *Cache) evict() error {
	var errs []error
	for {
		c.mu.Lock()
		last := c.used.Back()
		if c.size <= c.max || last == nil {
			c.mu.Unlock()
			return errors.Join(errs...)
		}
		k := last.Value.(*kept)
		c.used.Remove(last)
		delete(c.by, k.name)
		c.size -= k.size
		c.mu.Unlock()
		if err := os.Remove(filepath.Join(c.dir, k.name)); err != nil && !os.IsNotExist(err) {
			errs = append(errs, err)
		}
	}
}

// Put keeps what r gives, at most max octets, and returns its content's name.
func (c *Cache) Put(owner string, r io.Reader, max int64) (content string, size int64, err error) {
	defer func() {
		if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
			err = fmt.Errorf("%w: %w", err, sandbox.ErrExhausted)
		}
	}()
	f, err := os.CreateTemp(c.dir, "new-*")
	if err != nil {
		return "", 0, fmt.Errorf("keep a file: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	h := sha256.New()
	size, err = io.Copy(io.MultiWriter(f, h), io.LimitReader(r, max+1))
	switch {
	case err != nil:
		return "", 0, fmt.Errorf("keep a file: %w", err)
	case size > max || size > c.max:
		return "", 0, fmt.Errorf("keep a file: more than %d octets: %w", min(max, c.max), sandbox.ErrExhausted)
	}
	// A call whose standard input it is opens it as /dev/stdin; others come to it through the folder alone, which is closed to them.
	if err := f.Chmod(0o444); err != nil {
		return "", 0, fmt.Errorf("keep a file: %w", err)
	}
	content = hex.EncodeToString(h.Sum(nil))
	name := cacheName(owner, content)
	if err := os.Rename(f.Name(), filepath.Join(c.dir, name)); err != nil {
		return "", 0, fmt.Errorf("keep a file: %w", err)
	}
	c.mu.Lock()
	c.add(name, size)
	c.mu.Unlock()
	return content, size, c.evict()
}

// Open opens a file of an owner.
func (c *Cache) Open(owner, content string) (*os.File, error) {
	if !contentPattern.MatchString(content) {
		return nil, fmt.Errorf("content %.80q: want a SHA-256 in hex: %w", content, sandbox.ErrInvalid)
	}
	name := cacheName(owner, content)
	f, err := os.Open(filepath.Join(c.dir, name))
	if os.IsNotExist(err) {
		return nil, fmt.Errorf("content %s: was never kept, or had to make room: %w", content, sandbox.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("content %s: %w", content, err)
	}
	c.mu.Lock()
	if e := c.by[name]; e != nil {
		c.used.MoveToFront(e)
	}
	c.mu.Unlock()
	return f, nil
}
