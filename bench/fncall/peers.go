package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/bench/peer"
)

// figures are ours, to compare with.
type figures struct{ p50, rate float64 }

// apart measures the others from a process in a mount namespace of its own, without the cgroup2 tree that stands beside v1's: crun refuses
// such a layout.
func apart(ctx context.Context, ours figures) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--propagation", "private", "sh", "-c", `umount -l /sys/fs/cgroup/unified 2>/dev/null; exec "$@"`, "sh",
		self, "-ours-p50", strconv.FormatFloat(ours.p50, 'g', -1, 64), "-ours-rate", strconv.FormatFloat(ours.rate, 'g', -1, 64))
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

// peers measures other ways to run the same program, and how many times as long as a call each takes.
func peers(ctx context.Context, ours figures) error {
	dir, err := os.MkdirTemp("", "dsec-bench-peers-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	tree := filepath.Join(dir, "rootfs")
	if err := measure.Unpack(tree, 0); err != nil {
		return err
	}
	for _, d := range []string{"dev", "proc", "tmp"} {
		if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
			return err
		}
	}
	for _, p := range []struct {
		name string
		make func() (func(context.Context) error, func(), error)
	}{
		{"crun", func() (func(context.Context) error, func(), error) { return crun(dir) }},
		{"bwrap", func() (func(context.Context) error, func(), error) { return bubblewrap(tree) }},
		{"gojudge", func() (func(context.Context) error, func(), error) { return goJudge(ctx, dir, tree) }},
	} {
		one, end, err := p.make()
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if one == nil {
			continue
		}
		err = compare(ctx, p.name, one, ours)
		end()
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

func compare(ctx context.Context, name string, one func(context.Context) error, ours figures) error {
	for range 10 {
		if err := one(ctx); err != nil {
			return err
		}
	}
	got, err := measure.Sequence(ctx, 100, 0, func(ctx context.Context) (time.Duration, error) {
		start := time.Now()
		err := one(ctx)
		return time.Since(start), err
	})
	if err != nil {
		return err
	}
	const n = 200
	start := time.Now()
	if err := measure.Parallel(ctx, n, width, func(ctx context.Context, _ int) error { return one(ctx) }); err != nil {
		return err
	}
	theirs := n / time.Since(start).Seconds()
	measure.Print("fncall."+name+"_p50", got.Ms(50), "ms")
	measure.Print("fncall."+name+"_rate8", theirs, "/s")
	measure.Print("ratio.fncall_"+name+"_p50", got.Ms(50)/ours.p50, "x")
	measure.Print("ratio.fncall_"+name+"_rate8", ours.rate/theirs, "x")
	return nil
}

// crun runs a container as it proposes itself, with the same program.
func crun(dir string) (func(context.Context) error, func(), error) {
	bin, err := exec.LookPath("crun")
	if err != nil {
		measure.Note("crun is not installed")
		return nil, nil, nil
	}
	if _, err := peer.BaseSpec(bin, dir); err != nil {
		return nil, nil, err
	}
	state := filepath.Join(dir, "crun")
	var n atomic.Int64
	return func(ctx context.Context) error {
		return measure.Command(ctx, bin, "--root", state, "run", "--bundle", dir, "dsec-bench-fncall-"+strconv.FormatInt(n.Add(1), 10))
	}, func() {}, nil
}

func bubblewrap(tree string) (func(context.Context) error, func(), error) {
	bin, err := exec.LookPath("bwrap")
	if err != nil {
		measure.Note("bubblewrap is not installed")
		return nil, nil, nil
	}
	return func(ctx context.Context) error {
		return measure.Command(ctx, bin, "--ro-bind", tree, "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--unshare-all", "--die-with-parent", "--new-session", "/true")
	}, func() {}, nil
}

// goJudge asks the server that $DSEC_GO_JUDGE names.
func goJudge(ctx context.Context, dir, tree string) (func(context.Context) error, func(), error) {
	bin := os.Getenv("DSEC_GO_JUDGE")
	if bin == "" {
		measure.Note("DSEC_GO_JUDGE names no go-judge")
		return nil, nil, nil
	}
	const addr = "127.0.0.1:17317"
	server := exec.CommandContext(ctx, bin, "-http-addr", addr, "-dir", filepath.Join(dir, "gojudge"), "-silent")
	if err := server.Start(); err != nil {
		return nil, nil, err
	}
	end := func() {
		server.Process.Kill()
		server.Wait()
	}
	body, err := json.Marshal(map[string]any{"cmd": []any{map[string]any{
		"args": []string{"true"}, "env": []string{"PATH=/"}, "cpuLimit": 10_000_000_000, "clockLimit": 20_000_000_000, "memoryLimit": 512 << 20, "procLimit": 128,
		"files":  []any{map[string]any{"content": ""}, map[string]any{"name": "stdout", "max": 1 << 20}, map[string]any{"name": "stderr", "max": 1 << 20}},
		"copyIn": map[string]any{"true": map[string]any{"src": filepath.Join(tree, "true")}},
	}}})
	if err != nil {
		end()
		return nil, nil, err
	}
	hc := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: width}}
	one := func(ctx context.Context) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/run", bytes.NewReader(body))
		if err != nil {
			return err
		}
		r.Header.Set("Content-Type", "application/json")
		resp, err := hc.Do(r)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err == nil && !bytes.Contains(b, []byte(`"status":"Accepted"`)) {
			err = fmt.Errorf("answered %d: %.300s", resp.StatusCode, b)
		}
		return err
	}
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if err = one(ctx); err == nil {
			return one, end, nil
		}
		if time.Now().After(until) {
			end()
			return nil, nil, err
		}
	}
}
