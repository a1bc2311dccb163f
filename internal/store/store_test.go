package store_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

func open(t *testing.T) *store.Dir {
	t.Helper()
	d, err := store.NewDir(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func put(t *testing.T, s store.Store, key, text string) {
	t.Helper()
	if err := store.Put(context.Background(), s, key, strings.NewReader(text)); err != nil {
		t.Fatal(err)
	}
}

func TestPutOpenStatDelete(t *testing.T) {
	ctx, s := context.Background(), open(t)
	put(t, s, "blobs/ab", "hello")
	r, err := s.Open(ctx, "blobs/ab")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b := make([]byte, 3)
	if _, err := r.ReadAt(b, 2); err != nil || string(b) != "llo" || r.Size() != 5 {
		t.Errorf("range: %q %v size %d", b, err, r.Size())
	}
	if i, err := s.Stat(ctx, "blobs/ab"); err != nil || i.Size != 5 || i.Key != "blobs/ab" {
		t.Errorf("stat: %+v %v", i, err)
	}
	p, ok := s.Path("blobs/ab")
	if text, err := os.ReadFile(p); !ok || err != nil || string(text) != "hello" {
		t.Errorf("path: %q %v %q %v", p, ok, text, err)
	}
	if err := s.Delete(ctx, "blobs/ab"); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(ctx, "blobs/ab"); err != nil {
		t.Errorf("second delete: %v", err)
	}
	if _, err := s.Open(ctx, "blobs/ab"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("open of a deleted one: %v", err)
	}
	if _, err := s.Stat(ctx, "blobs"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("stat of a folder: %v", err)
	}
	if _, err := r.ReadAt(b, 0); err != nil || string(b) != "hel" {
		t.Errorf("an open reader after delete: %q %v", b, err)
	}
}

func TestDraftIsInvisibleUntilPublished(t *testing.T) {
	ctx, s := context.Background(), open(t)
	d, err := s.Create(ctx)
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(d, "half")
	var keys []string
	s.List(ctx, "", func(i store.Info) bool { keys = append(keys, i.Key); return true })
	if len(keys) != 0 {
		t.Errorf("visible: %v", keys)
	}
	if err := d.Discard(); err != nil {
		t.Error(err)
	}
	if err := d.Publish(ctx, "x"); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("publish after discard: %v", err)
	}
	failing := io.MultiReader(strings.NewReader("abc"), errReader{})
	if err := store.Put(ctx, s, "x", failing); err == nil {
		t.Error("a broken source was published")
	}
	if left, _ := filepath.Glob(filepath.Join(mustPath(t, s), ".drafts", "*")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("cut") }

func mustPath(t *testing.T, s *store.Dir) string {
	p, ok := s.Path("x")
	if !ok {
		t.Fatal("no path")
	}
	return filepath.Dir(p)
}

func TestList(t *testing.T) {
	ctx, s := context.Background(), open(t)
	all := []string{"a", "layers/aa.json", "layers/ab.json", "layers/b/c", "layers0", "z/y/x"}
	for _, k := range all {
		put(t, s, k, k)
	}
	for prefix, want := range map[string][]string{
		"": all, "layers/": all[1:4], "layers/a": all[1:3], "layers": all[1:5], "z/y/x": {"z/y/x"}, "no/such": nil, "layers/b/": {"layers/b/c"},
	} {
		var got []string
		if err := s.List(ctx, prefix, func(i store.Info) bool { got = append(got, i.Key); return true }); err != nil {
			t.Errorf("%q: %v", prefix, err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%q: %s", prefix, d)
		}
	}
	n := 0
	s.List(ctx, "", func(store.Info) bool { n++; return n < 2 })
	if n != 2 {
		t.Errorf("stopped after %d", n)
	}
}

func TestWrongKeys(t *testing.T) {
	ctx, s := context.Background(), open(t)
	for _, k := range []string{"", ".", "..", "a/../b", "/a", "a//b", ".drafts/x", "a/", "a b", "a\x00", "a\nb", strings.Repeat("a", 300)} {
		if err := store.Put(ctx, s, k, strings.NewReader("")); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("put %q: %v", k, err)
		}
		if _, err := s.Open(ctx, k); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("open %q: %v", k, err)
		}
		if err := s.Delete(ctx, k); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("delete %q: %v", k, err)
		}
		if _, ok := s.Path(k); ok {
			t.Errorf("path %q", k)
		}
	}
}

func TestOldDraftsAreSweptAndYoungOnesKept(t *testing.T) {
	root := t.TempDir()
	if _, err := store.NewDir(root); err != nil {
		t.Fatal(err)
	}
	old, young := filepath.Join(root, ".drafts/d-old"), filepath.Join(root, ".drafts/d-young")
	for _, p := range []string{old, young} {
		if err := os.WriteFile(p, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	past := time.Now().Add(-48 * time.Hour)
	os.Chtimes(old, past, past)
	if _, err := store.NewDir(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(old); err == nil {
		t.Error("the old draft is still there")
	}
	if _, err := os.Stat(young); err != nil {
		t.Error("a draft that may be in use was removed")
	}
}

func TestAFullDiskIsNoticedBeforeItIsFull(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dsec-small")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("dsec", dir, "tmpfs", 0, "size=256m"); err != nil {
		t.Skipf("skip: needs root to mount: %v", err)
	}
	defer syscall.Unmount(dir, syscall.MNT_DETACH)
	s, err := store.NewDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Put(context.Background(), s, "big", io.LimitReader(zeros{}, 1<<30)); !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("got %v", err)
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil || int64(st.Bfree)*st.Bsize < 250<<20 {
		t.Errorf("%d octets are free after it: %v", int64(st.Bfree)*st.Bsize, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
