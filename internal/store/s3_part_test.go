package store_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

func spooled(t *testing.T, cfg store.S3Config) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(cfg.Spool, "*"))
	must(t, err)
	return names
}

// A copy of a large object into a bucket that broke off while it was fetched goes on where it did, in another process too; what was left is compared like
// all else.
func TestCopyIntoABucketGoesOn(t *testing.T) {
	ctx := t.Context()
	const size = 40 << 20
	for name, damage := range map[string]func(part string){
		"whole":     func(string) {},
		"torn":      func(part string) { must(t, os.WriteFile(part, []byte("torn"), 0o600)) },
		"longer":    func(part string) { must(t, os.Truncate(part, size+1)) },
		"another's": func(part string) { must(t, os.Chmod(part, 0o666)) }, // whoever could write it
		"wrong": func(part string) {
			f, err := os.OpenFile(part, os.O_RDWR, 0)
			must(t, err)
			defer f.Close()
			_, err = f.WriteAt([]byte("other octets"), 5<<20)
			must(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, url := server(t)
			cfg := s3Config(t, url)
			src := &cutStore{Store: open(t), cut: 25 << 20}
			key, b := blobOf(t, src, 7, size)
			if _, err := store.Copy(ctx, newS3(t, cfg), src, []string{key}, nil); !errors.Is(err, errCut) {
				t.Fatal(err)
			}
			parts := spooled(t, cfg)
			if len(parts) != 1 {
				t.Fatalf("left: %q", parts)
			}
			damage(parts[0])
			src.cut, src.read = 0, 0
			dst := newS3(t, cfg)
			if _, err := store.Copy(ctx, dst, src, []string{key}, nil); err != nil {
				t.Fatal(err)
			}
			if name == "whole" && src.read > size-24<<20 {
				t.Errorf("%d octets read again of %d, though 24 MiB were there", src.read, size)
			}
			if got, err := store.ReadAll(ctx, dst, key, size); err != nil || !bytes.Equal(got, b) {
				t.Errorf("%d octets, %v", len(got), err)
			}
			left := spooled(t, cfg)
			if name == "another's" { // that of another user goes when its user sweeps it
				if len(left) != 1 || left[0] != parts[0] {
					t.Errorf("left: %q", left)
				}
			} else if len(left) != 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

// One that broke off while it was sent reads nothing again, and sends only what had not arrived.
func TestCopyIntoABucketGoesOnSending(t *testing.T) {
	ctx := t.Context()
	m, url := server(t)
	cfg := s3Config(t, url)
	src := &cutStore{Store: open(t)}
	const size = 70 << 20
	key, b := blobOf(t, src, 8, size)
	var packs atomic.Int32
	m.SetFault(func(op, key string) (f storetest.S3Fault) {
		if op == "PUT" && strings.Contains(key, "/.packs/") && packs.Add(1) > 3 {
			f.Status, f.Code = 403, "AccessDenied"
		}
		return f
	})
	if _, err := store.Copy(ctx, newS3(t, cfg), src, []string{key}, nil); !errors.Is(err, sandbox.ErrDenied) {
		t.Fatal(err)
	}
	m.SetFault(nil)
	there := m.Octets()
	src.read = 0
	dst := newS3(t, cfg)
	if _, err := store.Copy(ctx, dst, src, []string{key}, nil); err != nil {
		t.Fatal(err)
	}
	if src.read != 0 {
		t.Errorf("%d octets were read again", src.read)
	}
	if sent := dst.Traffic().Sent; there < 30<<20 || sent > size-there+1<<20 {
		t.Errorf("%d octets were there, %d of %d sent again", there, sent, size)
	}
	if got, err := store.ReadAll(ctx, dst, key, size); err != nil || !bytes.Equal(got, b) {
		t.Errorf("%d octets, %v", len(got), err)
	}
	if left := spooled(t, cfg); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
}

// What nobody goes on with stays for a day; other users' files and other names are left alone.
func TestSpoolIsSwept(t *testing.T) {
	_, url := server(t)
	cfg := s3Config(t, url)
	make := func(name string, mode os.FileMode, age time.Duration) string {
		p := filepath.Join(cfg.Spool, name)
		must(t, os.WriteFile(p, []byte("x"), mode))
		must(t, os.Chmod(p, mode))
		when := time.Now().Add(-age)
		must(t, os.Chtimes(p, when, when))
		return p
	}
	old := make("dsec-part-aa-bb-1", 0o600, 25*time.Hour)
	stay := []string{make("dsec-part-aa-bb-2", 0o600, time.Hour), make("dsec-part-aa-bb-3", 0o644, 25*time.Hour), make("other", 0o600, 25*time.Hour)}
	must(t, os.Symlink("other", filepath.Join(cfg.Spool, "dsec-part-link")))
	newS3(t, cfg)
	if _, err := os.Stat(old); err == nil {
		t.Error("an old part stays")
	}
	for _, p := range stay {
		if _, err := os.Stat(p); err != nil {
			t.Error(err)
		}
	}
}

// What a bucket has under a digest is compared with it before it counts as copied: other octets of the same size, and chunks that are gone, are sent again;
// also where source and bucket cut differently, and where the source is a bucket itself.
func TestCopyComparesWhatABucketHas(t *testing.T) {
	ctx := t.Context()
	for _, size := range []int{100, 200 << 10, 9 << 20} {
		m, url := server(t)
		dst := newS3(t, s3Config(t, url))
		src := &cutStore{Store: open(t)}
		key, b := blobOf(t, src, uint64(size), size)
		check := func(what string, skipped int) {
			t.Helper()
			p, err := store.Copy(ctx, dst, src, []string{key}, nil)
			if err != nil || p.Skipped != skipped {
				t.Errorf("%s, %d octets: %+v %v, want %d skipped", what, size, p, err, skipped)
			}
			if got, err := store.ReadAll(ctx, newS3(t, s3Config(t, url)), key, 1<<30); err != nil || !bytes.Equal(got, b) {
				t.Errorf("%s, %d octets: %v", what, size, err)
			}
		}
		put(t, dst, key, string(storetest.Random(99, size)))
		check("other octets", 0)
		check("the same", 1)
		other := append([]byte(nil), b...)
		other[size/2] ^= 1
		put(t, dst, key, string(other))
		check("one octet", 0)
		check("the same again", 1)
		if size <= 256<<10 {
			continue
		}
		for name := range m.Names("some/where/.packs/") { // by hand, or by another program
			m.Remove(name)
		}
		dst = newS3(t, s3Config(t, url))
		check("packs are gone", 0)
		check("the same in the end", 1)

		// From bucket to bucket nothing is fetched.
		_, url2 := server(t)
		second := newS3(t, s3Config(t, url2))
		if p, err := store.Copy(ctx, second, dst, []string{key}, nil); err != nil || p.Skipped != 0 {
			t.Errorf("%+v %v", p, err)
		}
		before := dst.Traffic().Received
		if p, err := store.Copy(ctx, second, dst, []string{key}, nil); err != nil || p.Skipped != 1 {
			t.Errorf("%+v %v", p, err)
		}
		if got := dst.Traffic().Received - before; got > 1<<20 {
			t.Errorf("%d octets were fetched to compare", got)
		}
	}
	// Rot of the source is told, not passed on.
	_, url := server(t)
	dst := newS3(t, s3Config(t, url))
	src := open(t)
	key, b := blobOf(t, src, 3, 3<<20)
	put(t, dst, key, string(b))
	put(t, src, key, string(storetest.Random(4, 3<<20)))
	sum := sha256.Sum256(b)
	if _, err := store.Copy(ctx, dst, src, []string{"blobs/" + hex.EncodeToString(sum[:])}, nil); !errors.Is(err, sandbox.ErrLost) {
		t.Errorf("rot of the source: %v", err)
	}
	if got, err := store.ReadAll(ctx, dst, key, 1<<30); err != nil || !bytes.Equal(got, b) {
		t.Error(err)
	}
}
