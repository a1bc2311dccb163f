package store_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

// cutStore breaks reads off at an offset, and counts octets.
type cutStore struct {
	store.Store
	cut  int64 // 0: never
	slow time.Duration
	mu   sync.Mutex
	read int64
}

var errCut = errors.New("cut")

func (s *cutStore) Open(ctx context.Context, key string) (store.Reader, error) {
	r, err := s.Store.Open(ctx, key)
	if err != nil {
		return nil, err
	}
	return &cutReader{r, s}, nil
}

type cutReader struct {
	store.Reader
	s *cutStore
}

func (r *cutReader) ReadAt(p []byte, off int64) (int, error) {
	if r.s.cut > 0 && off+int64(len(p)) > r.s.cut {
		return 0, errCut
	}
	time.Sleep(r.s.slow)
	r.s.mu.Lock()
	r.s.read += int64(len(p))
	r.s.mu.Unlock()
	return r.Reader.ReadAt(p, off)
}

func blobOf(t *testing.T, s store.Store, seed uint64, size int) (key string, b []byte) {
	t.Helper()
	b = storetest.Random(seed, size)
	sum := sha256.Sum256(b)
	key = "blobs/" + hex.EncodeToString(sum[:])
	put(t, s, key, string(b))
	return key, b
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func drafts(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, ".drafts", "*"))
	must(t, err)
	return names
}

// A large object that broke off goes on where it did; what was left of it is compared like all else, and does not stay when it is wrong.
func TestCopyGoesOnWhereItBrokeOff(t *testing.T) {
	ctx := t.Context()
	const size = 40 << 20
	for name, damage := range map[string]func(part string){
		"whole": func(string) {},
		"torn":  func(part string) { must(t, os.WriteFile(part, []byte("torn"), 0o600)) },
		"wrong": func(part string) {
			f, err := os.OpenFile(part, os.O_RDWR, 0)
			must(t, err)
			defer f.Close()
			_, err = f.WriteAt([]byte("other octets"), 5<<20)
			must(t, err)
		},
		"longer than the object": func(part string) { must(t, os.Truncate(part, size+1)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			dst, err := store.NewDir(dir)
			must(t, err)
			src := &cutStore{Store: open(t), cut: 25 << 20}
			key, b := blobOf(t, src, 7, size)
			if _, err := store.Copy(ctx, dst, src, []string{key}, nil); !errors.Is(err, errCut) {
				t.Fatal(err)
			}
			parts := drafts(t, dir)
			if len(parts) != 1 {
				t.Fatalf("left: %q", parts)
			}
			damage(parts[0])
			src.cut, src.read = 0, 0
			if _, err := store.Copy(ctx, dst, src, []string{key}, nil); err != nil {
				t.Fatal(err)
			}
			if name == "whole" && src.read > size-24<<20 {
				t.Errorf("%d octets read again of %d, though 24 MiB were there", src.read, size)
			}
			if got, err := store.ReadAll(ctx, dst, key, size); err != nil || !bytes.Equal(got, b) {
				t.Errorf("%d octets, %v", len(got), err)
			}
			if left := drafts(t, dir); len(left) != 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

// An object of the right size with other octets is copied again, where they can be looked at cheaply.
func TestCopyReplacesWhatRotted(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	dst, err := store.NewDir(dir)
	must(t, err)
	src := open(t)
	key, b := blobOf(t, src, 9, 9<<20)
	for _, size := range []int64{9 << 20, 5 << 20} { // of the same size, and shorter
		other := bytes.Repeat([]byte{1}, int(size))
		put(t, dst, key, string(other))
		if p, err := store.Copy(ctx, dst, src, []string{key}, nil); err != nil || p.Skipped != 0 {
			t.Fatalf("%+v %v", p, err)
		}
		if got, err := store.ReadAll(ctx, dst, key, 9<<20); err != nil || !bytes.Equal(got, b) {
			t.Error(err)
		}
	}
	if p, err := store.Copy(ctx, dst, src, []string{key}, nil); err != nil || p.Skipped != 1 {
		t.Fatalf("%+v %v", p, err)
	}
	// And the source's own rot goes nowhere.
	put(t, src, key, string(bytes.Repeat([]byte{2}, 9<<20)))
	must(t, dst.Delete(ctx, key))
	if _, err := store.Copy(ctx, dst, src, []string{key}, nil); !errors.Is(err, sandbox.ErrLost) {
		t.Errorf("rot of the source: %v", err)
	}
	if left := drafts(t, dir); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// What a copy finds there is young afterwards, in each kind of store, and not read again.
func TestCopyMakesYoung(t *testing.T) {
	ctx := t.Context()
	src := open(t)
	for _, size := range []int{100, 300 << 10, 3 << 20} {
		key, b := blobOf(t, src, uint64(size), size)
		dir := open(t)
		put(t, dir, key, string(b))
		path, _ := dir.Path(key)
		old := time.Now().Add(-3 * time.Hour)
		must(t, os.Chtimes(path, old, old))
		bucket := newBucket(t)
		bucket.Advance(-3 * time.Hour)
		s3 := newS3(t, s3Config(t, bucket.url))
		put(t, s3, key, string(b))
		bucket.Advance(3 * time.Hour)
		for name, dst := range map[string]store.Store{"folder": dir, "bucket": s3} {
			p, err := store.Copy(ctx, dst, src, []string{key}, nil)
			if err != nil || p.Skipped != 1 || p.Octets != 0 {
				t.Errorf("%s, %d: %+v %v", name, size, p, err)
			}
			if i, err := dst.Stat(ctx, key); err != nil || time.Since(i.Modified) > time.Hour || i.Size != int64(size) {
				t.Errorf("%s, %d: %+v %v", name, size, i, err)
			}
			if got, err := store.ReadAll(ctx, dst, key, 1<<30); err != nil || !bytes.Equal(got, b) {
				t.Errorf("%s, %d: %v", name, size, err)
			}
		}
	}
}

// Copies of one object by several processes at once, each killed now and then: in the end it is there, and nothing else.
func TestCopyIsKilled(t *testing.T) {
	if at := os.Getenv("DSEC_TEST_COPY"); at != "" { // the process that is killed
		from, to, key := filepath.Join(at, "from"), filepath.Join(at, "to"), os.Getenv("DSEC_TEST_KEY")
		a, err := store.NewDir(from)
		must(t, err)
		b, err := store.NewDir(to)
		must(t, err)
		_, err = store.Copy(t.Context(), b, &cutStore{Store: a, slow: 15 * time.Millisecond}, []string{key}, nil)
		must(t, err)
		return
	}
	at := t.TempDir()
	src, err := store.NewDir(filepath.Join(at, "from"))
	must(t, err)
	dst, err := store.NewDir(filepath.Join(at, "to"))
	must(t, err)
	const size = 64 << 20
	key, b := blobOf(t, src, 11, size)
	begin := func() *exec.Cmd {
		cmd := exec.Command(os.Args[0], "-test.run=^TestCopyIsKilled$")
		cmd.Env = append(os.Environ(), "DSEC_TEST_COPY="+at, "DSEC_TEST_KEY="+key)
		must(t, cmd.Start())
		return cmd
	}
	longest := func() (n int64) {
		for _, p := range drafts(t, filepath.Join(at, "to")) {
			if info, err := os.Stat(p); err == nil {
				n = max(n, info.Size())
			}
		}
		return n
	}
	there := func() bool { _, err := dst.Stat(t.Context(), key); return err == nil }
	for round := 0; !there(); round++ {
		if round > 12 {
			t.Fatal("it is never whole: it does not go on where it was")
		}
		before := longest()
		one, two := begin(), begin()
		for end := time.Now().Add(time.Minute); longest() < before+8<<20 && !there() && time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		}
		one.Process.Kill()
		two.Process.Kill()
		one.Wait()
		two.Wait()
	}
	last := begin()
	if err := last.Wait(); err != nil {
		t.Error(err)
	}
	if got, err := store.ReadAll(t.Context(), dst, key, size); err != nil || !bytes.Equal(got, b) {
		t.Errorf("%d octets, %v", len(got), err)
	}
	if left := drafts(t, filepath.Join(at, "to")); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}
