package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"sort"
	"strings"
	"time"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

const (
	repo      = "/work/repo"
	baseLayer = "swe/base"
	goLayer   = "swe/go"
)

// task is a bug fix: the code of a release, and the tests of the next one, of which some fail on it.
type task struct {
	name, module, old, new string
	// only limits the tests of a package, by a pattern of its folder: the others measure time.
	only map[string]string
	// mute names a test that prints in another order each time: its verdict is read and its output left out, as nothing could say of a
	// replay whether it came to the same.
	mute string

	oldFiles, newFiles     map[string]file // by path in the module
	env                    string
	failToPass, passToPass []string // "package/Test"
}

type file struct {
	data []byte
	mode fs.FileMode
}

var tasks = []*task{
	{name: "chi", module: "github.com/go-chi/chi/v5", old: "v5.2.1", new: "v5.2.2", only: map[string]string{"middleware": "^(TestRedirectSlashes|TestStripSlashes)$"},
		mute: "TestWalker"}, // it prints routes in the order of a map
	{name: "shellwords", module: "github.com/mattn/go-shellwords", old: "v1.0.11", new: "v1.0.12"},
	{name: "goldmark", module: "github.com/yuin/goldmark", old: "v1.7.12", new: "v1.7.13"},
}

// prepareShared makes the layers that all tasks share, once: a Debian base and the machine's own Go as a tool kit.
func prepareShared(ctx context.Context, c *client.Client) error {
	if !exists(ctx, c, baseLayer) {
		if err := dsec(ctx, "layer", "build", baseLayer, "--debian", "bookworm"); err != nil {
			return err
		}
	}
	if exists(ctx, c, goLayer) {
		return nil
	}
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("go env GOROOT: %w", err)
	}
	return dsec(ctx, "layer", "build", goLayer, "--dir", strings.TrimSpace(string(root)), "--at", "/usr/local/go")
}

func exists(ctx context.Context, c *client.Client, ref string) bool {
	_, err := c.GetLayer(ctx, ref)
	return err == nil
}

// dsec calls the command line as a person would.
func dsec(ctx context.Context, args ...string) error {
	_, here, _, _ := runtime.Caller(0)
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(here), "../../bin/dsec"), args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("dsec %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

func isTest(name string) bool {
	return strings.HasSuffix(name, "_test.go") || strings.Contains(name, "testdata/") || strings.HasPrefix(name, "_test/")
}

// prepare fetches both releases, builds the environment with a warm build cache, and finds out which tests fail before and pass after.
func (t *task) prepare(ctx context.Context, c *client.Client) error {
	var err error
	if t.oldFiles, err = release(ctx, t.module, t.old); err != nil {
		return err
	}
	if t.newFiles, err = release(ctx, t.module, t.new); err != nil {
		return err
	}
	if err := t.environment(ctx, c); err != nil {
		return err
	}
	before, err := t.measure(ctx, c, t.oldFiles)
	if err != nil {
		return fmt.Errorf("tests before the fix: %w", err)
	}
	after, err := t.measure(ctx, c, t.newFiles)
	if err != nil {
		return fmt.Errorf("tests after the fix: %w", err)
	}
	for name, ok := range after {
		was, known := before[name]
		switch {
		case ok && known && !was:
			t.failToPass = append(t.failToPass, name)
		case ok && was:
			t.passToPass = append(t.passToPass, name)
		}
	}
	sort.Strings(t.failToPass)
	sort.Strings(t.passToPass)
	if len(t.failToPass) == 0 {
		return fmt.Errorf("no test fails before and passes after: no task")
	}
	return nil
}

// release reads a version of a module as the module proxy serves it.
func release(ctx context.Context, module, version string) (map[string]file, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module+"@"+version)
	cmd.Dir = os.TempDir()
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go mod download %s@%s: %w", module, version, err)
	}
	var m struct{ Dir string }
	if err := json.Unmarshal(out, &m); err != nil {
		return nil, err
	}
	files := map[string]file{}
	err = filepath.WalkDir(m.Dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(p)
		rel, _ := filepath.Rel(m.Dir, p)
		files[rel] = file{data, 0o644}
		return err
	})
	return files, err
}

// environment composes base, workspace (the old release) and Go, builds its tests once inside, and keeps what that left in the build
// cache as one more layer: a snapshot.
func (t *task) environment(ctx context.Context, c *client.Client) error {
	src, warm := "swe/"+t.name+"-src", "swe/"+t.name+"-warm"
	if _, err := c.ImportLayer(ctx, src, "release "+t.old, tarOf("work/repo/", t.oldFiles)); err != nil {
		return err
	}
	sb, err := c.RunContainer(ctx, client.Options{Layers: []string{baseLayer, src, goLayer}, Env: goEnv, Cwd: repo, Labels: map[string]string{"swe": "prepare"}})
	if err != nil {
		return err
	}
	defer sb.Close()
	r, err := sb.Run(ctx, client.Cmd{Argv: []string{"/usr/local/go/bin/go", "test", "-run", "^$", "./..."}, Timeout: 5 * time.Minute})
	if err != nil {
		return err
	}
	if !r.OK() {
		return fmt.Errorf("warming the build cache: %s\n%s%s", r.Outcome, r.Stdout, r.Stderr)
	}
	snap, err := sb.Snapshot(ctx, warm)
	if err != nil {
		return err
	}
	e := &dsecv1.Environment{Name: "swe-" + t.name, Base: baseLayer, Workspace: src, Kits: []string{goLayer, snap}, Cwd: repo, VolatilePaths: []string{goEnv["GOCACHE"]}}
	for k, v := range goEnv {
		e.Env = append(e.Env, &dsecv1.EnvVar{Name: k, Value: v})
	}
	if e, err = c.PublishEnvironment(ctx, e); err != nil {
		return err
	}
	t.env = fmt.Sprintf("%s@%d", e.Name, e.Version)
	return nil
}

var goEnv = map[string]string{
	"PATH": "/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	"HOME": "/root", "GOCACHE": "/root/.cache/go-build", "GOFLAGS": "-count=1", "GOPROXY": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0",
}

func tarOf(prefix string, files map[string]file) io.Reader {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	names := make([]string, 0, len(files))
	for n := range files {
		names = append(names, n)
	}
	sort.Strings(names)
	for _, n := range names {
		f := files[n]
		w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: prefix + n, Mode: int64(f.mode), Size: int64(len(f.data)), ModTime: time.Unix(1700000000, 0)})
		w.Write(f.data)
	}
	w.Close()
	return &b
}

// measure runs the new release's tests over some code in a clean sandbox and answers which passed.
func (t *task) measure(ctx context.Context, c *client.Client, code map[string]file) (map[string]bool, error) {
	sb, err := c.RunContainer(ctx, client.Options{Environment: t.env, Labels: map[string]string{"swe": "measure"}})
	if err != nil {
		return nil, err
	}
	defer sb.Close()
	return t.test(ctx, sb, code)
}

// test lays code and the new release's tests into a sandbox and reads the verdict of each test by name from `go test -json`.
func (t *task) test(ctx context.Context, sb *client.Sandbox, code map[string]file) (map[string]bool, error) {
	tree := map[string]file{}
	for n, f := range code {
		if !isTest(n) {
			tree[n] = f
		}
	}
	for n, f := range t.newFiles {
		if isTest(n) {
			tree[n] = f
		}
	}
	f := sb.Files()
	if err := f.Remove(ctx, repo, true); err != nil {
		return nil, err
	}
	if _, err := f.Upload(ctx, repo, tarOf("", tree)); err != nil {
		return nil, err
	}
	passed := map[string]bool{}
	for _, part := range t.parts(tree) {
		argv := append([]string{"/bin/sh", "-c", t.script(), "sh"}, part...)
		r, err := sb.Run(ctx, client.Cmd{Argv: argv, Cwd: repo, Timeout: testBound})
		if err != nil {
			return nil, err
		}
		readVerdicts(r.Stdout, passed)
	}
	return passed, nil
}

// testBound is what an agent's step or a task's tests take at the most, also in a machine that is translated.
const testBound = 20 * time.Minute

// script runs `go test -json` with its arguments and takes from the output what is another each time and tells nothing: where a panic's
// values lay in memory, the numbers of goroutines, and what a mute test prints. The verdicts are events of their own.
func (t *task) script() string {
	edits := []string{`s/0x[0-9a-f]+/0x_/g`, `s/goroutine [0-9]+/goroutine _/g`}
	if t.mute != "" {
		edits = append(edits, `/"Action":"output".*"Test":"`+t.mute+`"/d`)
	}
	return `/usr/local/go/bin/go test -json -p 1 -skip '` + timed.String() + `' "$@" | sed -E -e '` + strings.Join(edits, `' -e '`) + `'`
}

// parts are the argument lists of `go test`: all packages at once, and apart those of which only some tests count.
func (t *task) parts(tree map[string]file) [][]string {
	dirs := map[string]bool{}
	for n := range tree {
		if strings.HasSuffix(n, "_test.go") && !strings.HasPrefix(n, "_") {
			dirs[filepath.Dir(n)] = true
		}
	}
	var all []string
	var parts [][]string
	for d := range dirs {
		if pattern, ok := t.only[d]; ok {
			parts = append(parts, []string{"-run", pattern, "./" + d})
		} else {
			all = append(all, "./"+d)
		}
	}
	sort.Strings(all)
	sort.Slice(parts, func(i, j int) bool { return parts[i][2] < parts[j][2] })
	return append(parts, all)
}

var (
	testName = regexp.MustCompile(`^(Test|Example|Fuzz)\w*$`)
	// timed tests measure the machine, so their verdict is no part of a task.
	timed = regexp.MustCompile(`Performance|Timing|Timeout`)
)

// readVerdicts takes the pass and fail events of whole tests. A test without an event did not run, whatever the exit code was.
func readVerdicts(stream []byte, passed map[string]bool) {
	for line := range bytes.Lines(stream) {
		var e struct{ Action, Package, Test string }
		if json.Unmarshal(line, &e) != nil || !testName.MatchString(e.Test) || timed.MatchString(e.Test) {
			continue
		}
		switch e.Action {
		case "pass", "fail":
			passed[e.Package+"."+e.Test] = e.Action == "pass"
		}
	}
}
