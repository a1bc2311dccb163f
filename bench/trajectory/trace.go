package main

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/client"
)

// job is something real that a sandbox does.
type traceJob struct {
	name, script string
	env          map[string]string
	volatile     []string
}

const buildModule = "github.com/yuin/goldmark@v1.7.12"

// traced measures what traces add to the wall time of a build (a module and all it needs of the standard library, with a cold build
// cache) and of a test run in Python: with a trace and without, in turn, each in a fresh sandbox, whose end with the last look at its
// files counts. A build cache is not declared volatile: all of it is compared and hashed.
func traced(ctx context.Context, rounds int) (err error) {
	s, err := measure.StartEmpty(ctx, measure.Config{Pool: "6g"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Stop()) }()
	layers, err := traceLayers(ctx, s)
	if err != nil {
		return err
	}
	if err := tracedCommands(ctx, s, layers); err != nil {
		return err
	}
	jobs := []traceJob{
		{name: "build", script: "cd /srv/module && go build ./... 2>&1", env: map[string]string{"PATH": "/usr/local/go/bin:/usr/bin:/bin", "HOME": "/root", "GOCACHE": "/var/cache/go-build", "GOPROXY": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod"}},
		{name: "pytest", script: "cd /tmp && python3 -m pytest -q /srv/pytests 2>&1 | tail -3", env: map[string]string{"PATH": "/usr/bin:/bin", "HOME": "/root"}},
	}
	for _, j := range jobs { // the first of each reads the layers into memory
		if _, err := traceRun(ctx, s, layers, j, "off"); err != nil {
			return err
		}
	}
	worst := map[string]float64{}
	for _, j := range jobs {
		shares := map[string][]float64{}
		var plain measure.Sample
		before, err := traceRun(ctx, s, layers, j, "off")
		if err != nil {
			return err
		}
		plain.Add(before)
		for range rounds {
			for _, level := range []string{"light", "full"} {
				on, err := traceRun(ctx, s, layers, j, level)
				if err != nil {
					return err
				}
				after, err := traceRun(ctx, s, layers, j, "off")
				if err != nil {
					return err
				}
				plain.Add(after)
				shares[level] = append(shares[level], 100*(2*float64(on)/float64(before+after)-1))
				before = after
			}
		}
		measure.Print("traj.trace_"+j.name+"_plain", plain.Ms(50)/1000, "s")
		for _, level := range []string{"light", "full"} {
			m := measure.Median(shares[level])
			measure.Print("traj.trace_"+level+"_"+j.name, m, "%")
			worst[level] = max(worst[level], m)
		}
	}
	for _, level := range []string{"light", "full"} {
		measure.Print("traj.trace_"+level, worst[level], "%")
	}
	return nil
}

// tracedCommands measures a command that does nothing, back to back: each waits for the look at the one before it.
func tracedCommands(ctx context.Context, s *measure.Server, layers []string) error {
	levels := []string{"off", "light", "full"}
	var run []func(context.Context) (time.Duration, error)
	for _, level := range levels {
		b, err := s.Client.RunContainer(ctx, client.Options{Layers: layers, Trace: level})
		if err != nil {
			return err
		}
		defer b.Close()
		run = append(run, func(ctx context.Context) (time.Duration, error) {
			start := time.Now()
			r, err := b.Exec(ctx, "/bin/true")
			took := time.Since(start)
			if err == nil && !r.OK() {
				err = fmt.Errorf("true ended as %v", r.Outcome)
			}
			return took, err
		})
	}
	samples := make([]measure.Sample, len(levels))
	for round := range 6 {
		for i := range levels {
			got, err := measure.Sequence(ctx, 200, 0, run[i])
			if err != nil {
				return err
			}
			if round > 0 {
				samples[i].Join(got)
			}
		}
	}
	for i, level := range levels {
		measure.Print("traj.trace_exec_p50_"+level, samples[i].Ms(50), "ms")
	}
	return nil
}

// traceRun is the time from the command's start to the sandbox's end.
func traceRun(ctx context.Context, s *measure.Server, layers []string, j traceJob, level string) (time.Duration, error) {
	b, err := s.Client.RunContainer(ctx, client.Options{Layers: layers, Env: j.env, Trace: level, Volatile: j.volatile})
	if err != nil {
		return 0, err
	}
	start := time.Now()
	r, err := b.Run(ctx, client.Cmd{Argv: []string{"/bin/sh", "-c", j.script}, Timeout: 5 * time.Minute})
	if err == nil && !r.OK() {
		err = fmt.Errorf("%s: %v\n%s", j.name, r.Outcome, r.Stdout)
	}
	if serr := b.Stop(ctx); err == nil {
		err = serr
	}
	return time.Since(start), err
}

// traceLayers are a Debian tree with Python, the machine's Go, and what is built and tested.
func traceLayers(ctx context.Context, s *measure.Server) ([]string, error) {
	dsec := func(args ...string) error {
		cmd := exec.CommandContext(ctx, measure.Binary(), args...)
		cmd.Env = append(os.Environ(), "DSEC_URL="+s.URL(), "DSEC_KEY_FILE="+s.KeyFile())
		if b, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("dsec %s: %w: %s", strings.Join(args, " "), err, b)
		}
		return nil
	}
	base := []string{"layer", "build", "trace/base", "--debian", "bookworm", "--include", "python3,python3-pytest"}
	if t := os.Getenv("DSEC_BENCH_PYTHON"); t != "" {
		base = []string{"layer", "build", "trace/base", "--tar", t}
	}
	root, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	for _, args := range [][]string{base, {"layer", "build", "trace/go", "--dir", strings.TrimSpace(string(root)), "--at", "/usr/local/go"}} {
		if err := dsec(args...); err != nil {
			return nil, err
		}
	}
	work, err := traceWork(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := s.Client.ImportLayer(ctx, "trace/work", "bench", work); err != nil {
		return nil, err
	}
	return []string{"trace/base", "trace/go", "trace/work"}, nil
}

func traceWork(ctx context.Context) (io.Reader, error) {
	get := exec.CommandContext(ctx, "go", "mod", "download", "-json", buildModule)
	get.Dir = os.TempDir()
	out, err := get.Output()
	if err != nil {
		return nil, fmt.Errorf("go mod download %s: %w", buildModule, err)
	}
	var m struct{ Dir string }
	if err := json.Unmarshal(out, &m); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(name string, data []byte) error {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(data)), ModTime: time.Unix(1700000000, 0)}); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	}
	err = filepath.WalkDir(m.Dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(m.Dir, p)
		if err != nil {
			return err
		}
		return put("srv/module/"+rel, data)
	})
	if err != nil {
		return nil, err
	}
	if err := put("srv/pytests/test_work.py", []byte(pythonTests)); err != nil {
		return nil, err
	}
	return &b, w.Close()
}

// pythonTests are what a test run does: it computes, writes and reads files in folders of its own, and starts programs.
const pythonTests = `import hashlib, json, os, subprocess, sys
import pytest

@pytest.mark.parametrize("n", range(150))
def test_files(tmp_path, n):
    for i in range(10):
        (tmp_path / f"f{i}.json").write_text(json.dumps({"n": n, "i": i, "text": "x" * 200}))
    assert sum(json.loads(p.read_text())["i"] for p in tmp_path.iterdir()) == 45

@pytest.mark.parametrize("n", range(40))
def test_programs(tmp_path, n):
    out = subprocess.run([sys.executable, "-c", f"print({n} * 2)"], capture_output=True, text=True, cwd=tmp_path)
    assert out.stdout == f"{n * 2}\n"

@pytest.mark.parametrize("n", range(100))
def test_computes(n):
    h = b""
    for i in range(5000):
        h = hashlib.sha256(h + bytes([n])).digest()
    assert len(h) == 32
`
