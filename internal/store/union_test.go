package store_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
)

func TestUnionSuite(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store {
		_, url := server(t)
		return store.Union(open(t), newS3(t, s3Config(t, url)), open(t))
	}, storetest.Options{})
}

func TestUnion(t *testing.T) {
	ctx := t.Context()
	a, b := open(t), open(t)
	c := storetest.NewFaulty(open(t), 1, nil, storetest.Faults{})
	u := store.Union(a, b, c)
	put(t, u, "first", "1")
	put(t, b, "second", "2")
	put(t, c, "third", "3")
	put(t, c, "first", "hidden")
	for key, want := range map[string]string{"first": "1", "second": "2", "third": "3"} {
		if got, err := store.ReadAll(ctx, u, key, 10); err != nil || string(got) != want {
			t.Errorf("%s: %q %v", key, got, err)
		}
	}
	if _, err := b.Stat(ctx, "first"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("written to the second: %v", err)
	}
	var got []string
	if err := u.List(ctx, "", func(i store.Info) bool { got = append(got, fmt.Sprint(i.Key, i.Size)); return true }); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"first1", "second1", "third1"}, got); d != "" {
		t.Error(d)
	}
	if p, ok := u.Path("second"); !ok || filepath.Base(p) != "second" {
		t.Errorf("path %q %v", p, ok)
	}
	if _, ok := u.Path("third"); ok {
		t.Error("a path of what is no file")
	}
	c.Set(storetest.Faults{Down: true})
	if _, err := u.Open(ctx, "nowhere"); !errors.Is(err, storetest.ErrInjected) {
		t.Errorf("not found, though one store could not be asked: %v", err)
	}
	if got, err := store.ReadAll(ctx, u, "second", 10); err != nil || string(got) != "2" {
		t.Errorf("one that is there, while another store is down: %v", err)
	}
	if err := u.List(ctx, "", func(store.Info) bool { return true }); !errors.Is(err, storetest.ErrInjected) {
		t.Errorf("a list that lacks a store's: %v", err)
	}
}

func TestCopy(t *testing.T) {
	ctx := t.Context()
	_, url := server(t)
	src, dst := open(t), newS3(t, s3Config(t, url))
	var keys []string
	want := map[string][]byte{}
	for i := range 20 {
		b := storetest.Random(uint64(i), i*200<<10)
		sum := sha256.Sum256(b)
		key := "blobs/" + hex.EncodeToString(sum[:])
		want[key], keys = b, append(keys, key)
		put(t, src, key, string(b))
	}
	wrong := "blobs/" + strings.Repeat("ab", 32)
	put(t, src, wrong, "other octets")
	if _, err := store.Copy(ctx, dst, src, append(slices.Clone(keys[:8]), wrong), nil); !errors.Is(err, sandbox.ErrLost) {
		t.Errorf("an object with another digest: %v", err)
	}
	if _, err := dst.Stat(ctx, wrong); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("it was published: %v", err)
	}
	last := store.CopyProgress{}
	done, err := store.Copy(ctx, dst, src, keys, func(p store.CopyProgress) {
		if p.Objects < last.Objects || p.Octets < last.Octets {
			t.Errorf("progress goes back: %+v after %+v", p, last)
		}
		last = p
	})
	if err != nil || done.Objects != 20 || done.Skipped == 0 || done != last {
		t.Errorf("%+v %v, last told %+v", done, err, last)
	}
	if done, err = store.Copy(ctx, dst, src, keys, nil); err != nil || done.Skipped != 20 || done.Octets != 0 {
		t.Errorf("again: %+v %v", done, err)
	}
	back := open(t)
	if _, err := store.Copy(ctx, back, dst, keys, nil); err != nil {
		t.Fatal(err)
	}
	for key, b := range want {
		if got, err := store.ReadAll(ctx, back, key, 1<<30); err != nil || !bytes.Equal(got, b) {
			t.Errorf("%s: %v", key, err)
		}
	}
	if _, err := store.Copy(ctx, back, dst, []string{"none"}, nil); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("one that is not there: %v", err)
	}
}

func TestParse(t *testing.T) {
	_, url := server(t)
	dir := t.TempDir()
	creds := filepath.Join(dir, "creds")
	if err := os.WriteFile(creds, []byte("[default]\naws_access_key_id = "+storetest.AccessKey+"\naws_secret_access_key = "+storetest.SecretKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{filepath.Join(dir, "folder"), "s3://" + storetest.Bucket + "/pre/fix?path_style=true&timeout=5s&endpoint=" + url + "&credentials=" + creds} {
		s, err := store.Parse(name, dir)
		if err != nil {
			t.Fatal(err)
		}
		put(t, s, "a", "b")
		if again, err := store.Parse(name, ""); err != nil {
			t.Error(err)
		} else if got, err := store.ReadAll(t.Context(), again, "a", 10); err != nil || string(got) != "b" {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
	for _, name := range []string{"", "ftp://x", "s3://", "s3://key:secret@bucket/x", "s3://bucket/?secret_key=secret", "s3://bucket/?endpoint=secret@x", "s3://bucket/x#secret",
		"s3://bucket/x?endpoint=http://h&timeout=secret0", "s3://bucket/x?path_style=1", "s3://bucket/../x?endpoint=http://h"} {
		if _, err := store.Parse(name, ""); !errors.Is(err, sandbox.ErrInvalid) || strings.Contains(err.Error(), "key:secret") {
			t.Errorf("%q: %v", name, err)
		}
	}
}
