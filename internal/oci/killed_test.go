package oci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/facts"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// mortal kills the process before its n-th change of store or facts.
type mortal struct{ left atomic.Int64 }

func (m *mortal) step() {
	if m.left.Add(-1) == 0 {
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

type mortalStore struct {
	store.Store
	*mortal
}

func (s mortalStore) Create(ctx context.Context) (store.Draft, error) {
	s.step()
	d, err := s.Store.Create(ctx)
	return mortalDraft{d, s.mortal}, err
}

func (s mortalStore) Delete(ctx context.Context, key string) error {
	s.step()
	return s.Store.Delete(ctx, key)
}

type mortalDraft struct {
	store.Draft
	*mortal
}

func (d mortalDraft) Publish(ctx context.Context, key string) error {
	d.step()
	return d.Draft.Publish(ctx, key)
}

type mortalFacts struct {
	facts.Facts
	*mortal
}

func (f mortalFacts) Put(ctx context.Context, key string, value []byte, r facts.Revision) (facts.Revision, error) {
	f.step()
	return f.Facts.Put(ctx, key, value, r)
}

func (f mortalFacts) Delete(ctx context.Context, key string, r facts.Revision) error {
	f.step()
	return f.Facts.Delete(ctx, key, r)
}

// importer is Images on a folder, whose process dies before the n-th change; 0: never.
func importer(t *testing.T, dir string, n int) *rig {
	t.Helper()
	db, err := facts.OpenBolt(filepath.Join(dir, "facts.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	disk, err := store.NewDir(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	m := &mortal{}
	m.left.Store(int64(n))
	st, f := store.Store(mortalStore{disk, m}), facts.Facts(mortalFacts{db, m})
	r := &rig{t: t, facts: f, store: st}
	r.Images = New(Config{Arch: "amd64", Parallel: 1}, Deps{Layers: layer.New(f, st), Store: st, Facts: f, Log: slog.New(slog.DiscardHandler)})
	return r
}

// close gives the facts back before the test's end.
func (r *rig) close() { r.facts.(mortalFacts).Facts.(*facts.Bolt).Close() }

// emptied makes all of long ago, removes the image and its environments if there are any, sweeps as a gateway does, and tells what is left.
func emptied(t *testing.T, dir, ref string) (left []string) {
	t.Helper()
	ctx := within(t)
	age := func() {
		when := time.Now().Add(-200 * time.Hour)
		filepath.WalkDir(filepath.Join(dir, "store"), func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				os.Chtimes(p, when, when)
			}
			return nil
		})
	}
	age()
	r := importer(t, dir, 0)
	defer r.close()
	r.now = func() time.Time { return time.Now().Add(200 * time.Hour) }
	if err := r.Remove(ctx, "default", ref); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		t.Error(err)
	}
	for range 3 { // each in its turn finds what the one before has left without a use
		age()
		_, err := r.Sweep(ctx, sweepAge)
		_, lerr := r.layers.Sweep(ctx, 6*time.Hour)
		if err := errors.Join(err, lerr); err != nil {
			t.Error(err)
		}
	}
	filepath.WalkDir(filepath.Join(dir, "store"), func(p string, d fs.DirEntry, err error) error {
		if rel, _ := filepath.Rel(filepath.Join(dir, "store"), p); err == nil && !d.IsDir() && !strings.HasPrefix(rel, "catalogues/") {
			left = append(left, rel)
		}
		return nil
	})
	for _, prefix := range []string{"held:", "image:"} {
		list, err := r.facts.List(ctx, prefix, "", 0)
		if err != nil {
			t.Error(err)
		}
		for _, f := range list {
			left = append(left, f.Key)
		}
	}
	return left
}

// A process that imports an image is killed before each of its changes in turn. A second import ends with the right image, also when the first process
// is never followed nothing of it stays for ever.
func TestImportIsKilledAtEveryStep(t *testing.T) {
	if dir := os.Getenv("DSEC_TEST_IMPORT"); dir != "" { // the process that is killed
		n, err := strconv.Atoi(os.Getenv("DSEC_TEST_STEP"))
		if err != nil {
			t.Fatal(err)
		}
		r := importer(t, dir, n)
		r.mustPull(Pull{Ref: os.Getenv("DSEC_TEST_REF")})
		return
	}
	reg := newRig(t, Config{}).serve(nil)
	// A layer with folders of its own, one that says nothing of them, one that hides: all ways that an import goes.
	tars := [][]byte{
		tarOf(file{name: "home/"}, file{name: "home/alice/", mode: 0o700, uid: 1000}, file{name: "home/alice/a", data: strings.Repeat("a", 9000)}),
		tarOf(file{name: "home/alice/note", data: "n"}),
		tarOf(file{name: "home/"}, file{name: "home/.wh.alice"}, file{name: "home/b", data: strings.Repeat("b", 5000)}),
	}
	many := append([][]byte(nil), tars...)
	for i := range 11 { // so that neighbours are merged
		many = append(many, tarOf(file{name: fmt.Sprintf("f%d", i), data: strings.Repeat("f", i)}))
	}
	for what, c := range map[string]struct {
		tars  [][]byte
		every int // how many steps are left out
	}{"few layers": {tars, 6}, "merged layers": {many, 1}} {
		t.Run(what, func(t *testing.T) {
			if os.Getenv("DSEC_TORTURE") != "" {
				c.every = 1
			} else if what == "merged layers" {
				t.Skip("skip: make torture runs it")
			}
			ref := reg.push(strings.ReplaceAll(what, " ", "-")+":1", imageOf(t, nil, c.tars...))
			control := importer(t, t.TempDir(), 0)
			want := control.mustPull(Pull{Ref: ref})
			points, ended := 0, false
			for n := 1; !ended; n += c.every {
				dir := t.TempDir()
				cmd := exec.Command(os.Args[0], "-test.run=^TestImportIsKilledAtEveryStep$")
				cmd.Env = append(os.Environ(), "DSEC_TEST_IMPORT="+dir, "DSEC_TEST_REF="+ref, fmt.Sprint("DSEC_TEST_STEP=", n))
				out, err := cmd.CombinedOutput()
				var x *exec.ExitError
				switch {
				case err == nil:
					ended = true
				case !errors.As(err, &x) || x.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL:
					t.Fatalf("step %d: %v\n%s", n, err, out)
				}
				points++
				alone := t.TempDir()
				if err := os.CopyFS(alone, os.DirFS(dir)); err != nil {
					t.Fatal(err)
				}
				if left := emptied(t, alone, ref); len(left) > 0 {
					t.Errorf("killed before step %d and never followed: left %q", n, left)
				}
				r := importer(t, dir, 0)
				got := r.mustPull(Pull{Ref: ref})
				if !cmp.Equal(got.Layers, want.Layers) || !strings.HasSuffix(got.Environment, "@1") {
					t.Errorf("killed before step %d: %s of %v, want version 1 of %v", n, got.Environment, got.Layers, want.Layers)
				}
				for _, id := range got.Layers {
					if err := r.layers.Verify(within(t), id); err != nil {
						t.Errorf("killed before step %d: %v", n, err)
					}
				}
				r.close()
				if left := emptied(t, dir, ref); len(left) > 0 {
					t.Errorf("killed before step %d, then imported and removed: left %q", n, left)
				}
				if t.Failed() {
					return
				}
			}
			if n := points * c.every; n < 25 {
				t.Errorf("only %d steps", n)
			}
		})
	}
}
