package store_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
	"github.com/dsec-dev/dsec/internal/store/storetest"
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

func TestDir(t *testing.T) {
	storetest.Run(t, func(t *testing.T) store.Store { return open(t) }, storetest.Options{})
}

// A store that fails now and then gives its errors on, and works when it is asked again.
func TestFaulty(t *testing.T) {
	var all storetest.FaultCounts
	storetest.Run(t, func(t *testing.T) store.Store {
		s := storetest.NewFaulty(open(t), 1, &storetest.Link{Latency: 50 * time.Microsecond, Rate: 1 << 30},
			storetest.Faults{Errors: 0.1, Lost: 0.05, Short: 0.1, Stalls: 0.02, Stall: time.Millisecond})
		t.Cleanup(func() {
			c := s.Counts()
			all.Errors, all.Short, all.Lost, all.Stalls = all.Errors+c.Errors, all.Short+c.Short, all.Lost+c.Lost, all.Stalls+c.Stalls
		})
		return s
	}, storetest.Options{Retries: true})
	if all.Errors == 0 || all.Short == 0 || all.Lost == 0 || all.Stalls == 0 {
		t.Errorf("not all faults came: %+v", all)
	}
}

func TestDraftsLeaveNoFiles(t *testing.T) {
	s := open(t)
	if err := store.Put(t.Context(), s, "x", io.MultiReader(strings.NewReader("abc"), errReader{})); err == nil {
		t.Error("a broken source was published")
	}
	put(t, s, "a/b", "x")
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

// Drafts of processes that were killed go when the store is opened next, those of living ones stay.
func TestDraftsOfKilledProcessesGo(t *testing.T) {
	if at := os.Getenv("DSEC_TEST_DRAFT"); at != "" { // a process that is killed
		s, err := store.NewDir(at)
		must(t, err)
		d, err := s.Create(t.Context())
		must(t, err)
		_, err = d.Write([]byte("half of it"))
		must(t, err)
		fmt.Println("written")
		time.Sleep(time.Minute)
		return
	}
	at := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestDraftsOfKilledProcessesGo$")
	cmd.Env = append(os.Environ(), "DSEC_TEST_DRAFT="+at)
	said, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	_, err = io.ReadFull(said, make([]byte, len("written")))
	must(t, err)
	old := time.Now().Add(-2 * time.Minute)
	reopen := func() *store.Dir {
		for _, p := range drafts(t, at) {
			must(t, os.Chtimes(p, old, old))
		}
		s, err := store.NewDir(at)
		must(t, err)
		return s
	}
	reopen()
	if n := len(drafts(t, at)); n != 1 {
		t.Errorf("while its writer lives: %d drafts", n)
	}
	must(t, cmd.Process.Kill())
	cmd.Wait()
	s := reopen()
	if left := drafts(t, at); len(left) != 0 {
		t.Errorf("left: %q", left)
	}
	d, err := s.Create(t.Context())
	must(t, err)
	_, err = d.Write([]byte("whole"))
	must(t, err)
	reopen() // by another one of the same machine
	must(t, d.Publish(t.Context(), "a"))
	if b, err := store.ReadAll(t.Context(), s, "a", 100); err != nil || string(b) != "whole" {
		t.Errorf("%q %v", b, err)
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
