package iam

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/rpc"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

func open(t *testing.T) (*Keys, *facts.Bolt, *time.Time) {
	t.Helper()
	b, err := facts.OpenBolt(filepath.Join(t.TempDir(), "facts"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	k := New(b)
	now := time.Unix(1e9, 0)
	k.now = func() time.Time { return now }
	return k, b, &now
}

func TestKeyLife(t *testing.T) {
	ctx := context.Background()
	k, b, now := open(t)
	if _, _, err := k.CreateKey(ctx, "org/team", "", time.Time{}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("key of an unknown project: %v", err)
	}
	if err := k.CreateProject(ctx, "org/team"); err != nil {
		t.Fatal(err)
	}
	secret, key, err := k.CreateKey(ctx, "org/team", "trainer", now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	id, err := k.Verify(ctx, secret)
	if err != nil || id != (Identity{Project: "org/team", Key: key.ID}) {
		t.Fatalf("%v, %v", id, err)
	}
	list, err := b.List(ctx, "", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range list {
		if bytes.Contains(f.Value, []byte(secret[len(prefix)+idLength+1:])) {
			t.Error("the secret is stored")
		}
	}
	for name, wrong := range map[string]string{
		"none": "", "other text": "x", "prefix alone": "dsec_", "known id": secret[:len(secret)-1] + "!", "long": secret + strings.Repeat("a", 1000),
		"hostile id": "dsec_../../../.._x",
	} {
		if _, err := k.Verify(ctx, wrong); !errors.Is(err, rpc.ErrUnauthenticated) {
			t.Errorf("%s: %v", name, err)
		}
	}
	*now = now.Add(time.Hour)
	if _, err := k.Verify(ctx, secret); !errors.Is(err, rpc.ErrUnauthenticated) || !strings.Contains(err.Error(), "expired on 2001-09-09T02:46:40Z") {
		t.Errorf("expired: %v", err)
	}
	if _, _, err := k.CreateKey(ctx, DefaultProject, "", *now); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("key that is born expired: %v", err)
	}
}

func TestRevokedKeyStopsAtOnceHereAndSoonElsewhere(t *testing.T) {
	ctx := context.Background()
	here, b, now := open(t)
	there := New(b)
	there.now = here.now
	secret, key, err := here.CreateKey(ctx, DefaultProject, "", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []*Keys{here, there} {
		if _, err := k.Verify(ctx, secret); err != nil {
			t.Fatal(err)
		}
	}
	if err := here.RevokeKey(ctx, key.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := here.Verify(ctx, secret); !errors.Is(err, rpc.ErrUnauthenticated) || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("here: %v", err)
	}
	*now = now.Add(remembered + 1)
	if _, err := there.Verify(ctx, secret); !errors.Is(err, rpc.ErrUnauthenticated) {
		t.Errorf("there: %v", err)
	}
	list, err := here.ListKeys(ctx, "")
	if err != nil || len(list) != 1 || list[0].Revoked.IsZero() || list[0].Hash != nil {
		t.Errorf("%v, %v", list, err)
	}
}

func TestCacheIsBounded(t *testing.T) {
	ctx := context.Background()
	k, _, now := open(t)
	for i := range mostKnown + 10 {
		k.remember([32]byte{byte(i), byte(i >> 8)}, entry{until: now.Add(time.Hour)}, *now)
	}
	secret, _, err := k.CreateKey(ctx, DefaultProject, "", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.Verify(ctx, secret); err != nil {
		t.Fatal(err)
	}
	if len(k.known) > mostKnown {
		t.Errorf("%d keys remembered", len(k.known))
	}
}

func TestFirstKey(t *testing.T) {
	ctx := context.Background()
	k, _, _ := open(t)
	file := filepath.Join(t.TempDir(), "key")
	read := func() string {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		st, _ := os.Stat(file)
		if st.Mode().Perm() != 0o600 {
			t.Errorf("mode %v", st.Mode())
		}
		if _, err := k.Verify(ctx, strings.TrimSpace(string(b))); err != nil {
			t.Error(err)
		}
		return string(b)
	}
	if err := k.EnsureFirst(ctx, file); err != nil {
		t.Fatal(err)
	}
	one := read()
	if err := k.EnsureFirst(ctx, file); err != nil || read() != one {
		t.Errorf("a key that works was replaced: %v", err)
	}
	if err := os.WriteFile(file, []byte("stale"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := k.EnsureFirst(ctx, file); err != nil || read() == "stale" {
		t.Errorf("a stale key was kept: %v", err)
	}
}

func TestWithin(t *testing.T) {
	for _, tc := range []struct {
		outer, inner string
		want         bool
	}{{"a", "a", true}, {"a", "a/b", true}, {"a", "ab", false}, {"a/b", "a", false}} {
		if Within(tc.outer, tc.inner) != tc.want {
			t.Errorf("%s in %s", tc.inner, tc.outer)
		}
	}
	k, _, _ := open(t)
	for i := range 3 {
		if err := k.CreateProject(context.Background(), fmt.Sprintf("a/b%d", i)); err != nil {
			t.Fatal(err)
		}
	}
	if list, err := k.ListProjects(context.Background()); err != nil || len(list) != 5 {
		t.Errorf("%v, %v", list, err)
	}
}
