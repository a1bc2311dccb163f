package fncall

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// TestPrecedence holds the order of the verdicts for all combinations of what may be true of a run.
func TestPrecedence(t *testing.T) {
	set := map[Verdict][]func(*Facts){
		SYS: {func(f *Facts) { f.Failure = "x" }}, Cancelled: {func(f *Facts) { f.Cancelled = true }}, SEC: {func(f *Facts) { f.Filter = true }},
		OLE: {func(f *Facts) { f.Output = true }, func(f *Facts) { f.Signal = int(unix.SIGXFSZ) }}, MLE: {func(f *Facts) { f.OOM = true }},
		TLE: {func(f *Facts) { f.CPUOver = true }, func(f *Facts) { f.WallOver = true }, func(f *Facts) { f.CPU = 2 * time.Second }, func(f *Facts) { f.Wall = 5 * time.Second }},
		SIG: {func(f *Facts) { f.Signal = 11 }, func(f *Facts) { f.Signal = 9 }}, RE: {func(f *Facts) { f.Code = 3 }}, OK: {func(*Facts) {}},
	}
	l := Limits{CPU: time.Second, Wall: 4 * time.Second}
	rapid.Check(t, func(t *rapid.T) {
		var f Facts
		want := len(Precedence) - 1
		// From the least to the first, so that a signal of a limit stands over another.
		for i, v := range slices.Backward(Precedence) {
			if ways := set[v]; len(ways) > 0 && rapid.Bool().Draw(t, string(v)) {
				rapid.SampledFrom(ways).Draw(t, "way")(&f)
				want = i
			}
		}
		got, limit := Judge(f, l)
		if got != Precedence[want] {
			t.Fatalf("%+v: %s, want %s", f, got, Precedence[want])
		}
		if (got == TLE || got == OLE) != (limit != "") {
			t.Fatalf("%s with limit %q", got, limit)
		}
	})
}

func TestJudgeTellsLimits(t *testing.T) {
	l := Limits{CPU: time.Second, Wall: 4 * time.Second}
	for _, c := range []struct {
		f    Facts
		want string
	}{
		{Facts{CPUOver: true, Signal: 9}, "TLE cpu"}, {Facts{WallOver: true, Signal: 9}, "TLE wall"}, {Facts{CPUOver: true, WallOver: true}, "TLE cpu"},
		{Facts{CPU: 1100 * time.Millisecond}, "TLE cpu"}, {Facts{CPU: 900 * time.Millisecond}, "OK "}, {Facts{Signal: int(unix.SIGXFSZ)}, "OLE file_size"},
		{Facts{Output: true, Signal: 9, OOM: true}, "OLE output"}, {Facts{Code: 137}, "RE "}, {Facts{Signal: 9}, "SIG "}, {Facts{OOM: true}, "MLE "},
	} {
		v, limit := Judge(c.f, l)
		if got := string(v) + " " + limit; got != c.want {
			t.Errorf("%+v: %s, want %s", c.f, got, c.want)
		}
	}
}

func TestLanguages(t *testing.T) {
	all, err := LoadLanguages()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"cmd", "bash", "python", "c", "cpp", "go"} {
		if all[n] == nil {
			t.Errorf("no %s", n)
		}
	}
	if got := all["c"].command([]string{"-g", "-Wall"}); !strings.Contains(strings.Join(got, " "), "main.c -g -Wall -lm") {
		t.Errorf("compile command %q", got)
	}
	file := filepath.Join(t.TempDir(), "l.toml")
	for _, c := range []struct{ text, want string }{
		{"[language.my]\nenvironment = \"e\"\nsource = \"a\"\nrun = [\"x\"]\nlimits = { cpu = \"3s\", memory = \"1g\" }\n", ""},
		{"[language.my]\nenvironment = \"e\"\nsource = \"../a\"\nrun = [\"x\"]\n", "below the work folder"},
		{"[language.my]\nenvironment = \"e\"\nsource = \"a\"\nrun = [\"x\"]\ncolour = 1\n", "colour"},
		{"[language.my]\nsource = \"a\"\nrun = [\"x\"]\n", "environment"},
		{"[language.my]\nenvironment = \"e\"\nsource = \"d/a\"\nrun = [\"x\"]\nwarm = true\n", "warm"},
		{"[language.my]\nenvironment = \"e\"\nsource = \"a\"\nrun = [\"x\"]\nwarm = true\ncompile = [\"cc\"]\nartifacts = [\"b\"]\n", "warm"},
		{"[language.my]\nenvironment = \"e\"\nsource = \"a\"\nrun = [\"x\"]\ncompile = [\"cc\"]\n", "artifacts"},
		{"[language.my]\nenvironment = \"e\"\nsource = \"a\"\nrun = [\"x\"]\nlimits = { cpu = \"3\" }\n", "duration"},
		{"[language.my]\nenvironment = \"e\"\nsource = \"a\"\nrun = [\"x\"]\nlimits = { memory = \"3x\" }\n", "size"},
	} {
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		all, err := LoadLanguages(file)
		switch {
		case c.want == "" && (err != nil || all["my"] == nil || all["c"] == nil):
			t.Errorf("%s: %v", c.text, err)
		case c.want != "" && (!errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %s", c.text, err, c.want)
		}
	}
}

func TestCheckPath(t *testing.T) {
	for p, ok := range map[string]bool{"a": true, "a/b.c": true, "": false, "/a": false, "a/../b": false, "..": false, "a//b": false, "./a": false, "a/": false,
		"a\x00b": false, strings.Repeat("x", 256): false} {
		if err := CheckPath(p); (err == nil) != ok {
			t.Errorf("%q: %v", p, err)
		}
	}
}

func TestCache(t *testing.T) {
	dir := t.TempDir()
	c, err := OpenCache(dir, 100)
	if err != nil {
		t.Fatal(err)
	}
	put := func(owner, text string) string {
		t.Helper()
		n, _, err := c.Put(owner, strings.NewReader(text), 1000)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	have := func(owner, content string) bool {
		f, err := c.Open(owner, content)
		if err == nil {
			f.Close()
		}
		return err == nil
	}
	a, b := put("p", strings.Repeat("a", 40)), put("p", strings.Repeat("b", 40))
	if !have("p", a) || have("q", a) {
		t.Error("a file is its owner's alone")
	}
	third := put("p", strings.Repeat("c", 40)) // b was used least lately
	if diff := cmp.Diff([]bool{true, false, true}, []bool{have("p", a), have("p", b), have("p", third)}); diff != "" {
		t.Errorf("after an eviction: %s", diff)
	}
	if _, _, err := c.Put("p", strings.NewReader(strings.Repeat("d", 101)), 1000); !errors.Is(err, sandbox.ErrExhausted) {
		t.Errorf("longer than the cache: %v", err)
	}
	for name := range c.by {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Mode().Perm() != 0o444 {
			t.Errorf("a program can't open its input by name: %v %v", st.Mode(), err)
		}
	}
	if _, err := c.Open("p", "../x"); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a path: %v", err)
	}
	os.WriteFile(filepath.Join(dir, "new-123"), []byte("half"), 0o600)
	if c, err = OpenCache(dir, 60); err != nil {
		t.Fatal(err)
	}
	left, _ := os.ReadDir(dir)
	if len(left) != 1 || c.size != 40 {
		t.Errorf("opened again with room for one: %d files, %d octets", len(left), c.size)
	}
}

// A full disk is told as such, leaves nothing half written, and what was kept before can still be read.
func TestFullCache(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("needs root to mount: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	c, err := OpenCache(dir, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	kept, _, err := c.Put("p", strings.NewReader("kept"), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Put("p", bytes.NewReader(make([]byte, 2<<20)), 4<<20); !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), "no space") {
		t.Errorf("2 MiB on 1 MiB: %v", err)
	}
	if list, _ := os.ReadDir(dir); len(list) != 1 {
		t.Errorf("left: %v", list)
	}
	f, err := c.Open("p", kept)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, _, err := c.Put("p", bytes.NewReader(make([]byte, 512<<10)), 4<<20); err != nil {
		t.Errorf("what fits: %v", err)
	}
}
