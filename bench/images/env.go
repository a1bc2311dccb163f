package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/dsec-dev/dsec/bench/measure"
)

// environment is a real image with the first thing that an agent would do in it. What it does needs no compiling that the image
// could have spared: caches are warm in the tree.
type environment struct {
	name     string
	packages string
	module   string // Go module "path@version" that is copied to /srv/module
	hooks    []string
	command  string
}

// environments are made of Debian's packages, as teams make theirs.
func environments() []environment {
	return []environment{
		{
			name:     "python",
			packages: "python3,python3-pip,python3-requests,python3-numpy,git,build-essential,ca-certificates",
			command:  "python3 -c 'import json, http.client, asyncio, sqlite3, requests; print(1)'",
		},
		{
			name:     "go",
			packages: "golang-go,git,build-essential,ca-certificates",
			module:   "github.com/go-chi/chi/v5@v5.0.12",
			hooks:    []string{`chroot "$1" sh -c "cd /srv/module && HOME=/root go test -count=1 -run TestMuxBasic . && HOME=/root go build ./..."`},
			command:  "cd /srv/module && HOME=/root go build ./...",
		},
		{
			name:     "node",
			packages: "nodejs,node-typescript,git,build-essential,ca-certificates",
			command:  `node -e 'const ts = require("typescript"); console.log(ts.transpileModule("let a: number = 1", {}).outputText)'`,
		},
	}
}

const suite = "bookworm"

// tree is the environment's tar, made once and kept in the folder.
func (e environment) tree(ctx context.Context, dir string) (string, error) {
	recipe, err := json.Marshal([]any{suite, e.packages, e.module, e.hooks})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(recipe)
	path := filepath.Join(dir, e.name+"-"+hex.EncodeToString(sum[:6])+".tar")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	measure.Note("making the %s environment of Debian packages", e.name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	args := []string{"--mode=root", "--variant=minbase", "--include=" + e.packages, "--quiet"}
	if e.module != "" {
		from, err := download(ctx, e.module)
		if err != nil {
			return "", err
		}
		args = append(args, fmt.Sprintf(`--customize-hook=mkdir -p "$1/srv/module" && cp -r --no-preserve=mode %s/. "$1/srv/module"`, from))
	}
	for _, h := range e.hooks {
		args = append(args, "--customize-hook="+h)
	}
	// What packages leave behind that no image would have.
	args = append(args, `--customize-hook=rm -rf "$1/var/cache/apt"/*.bin "$1/var/lib/apt/lists"/*`, suite, path+".new.tar")
	defer os.Remove(path + ".new.tar")
	cmd := exec.CommandContext(ctx, "mmdebstrap", args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mmdebstrap of %s: %w\n%s", e.name, err, tail(string(out)))
	}
	return path, os.Rename(path+".new.tar", path)
}

// download fetches a module and returns its folder.
func download(ctx context.Context, module string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", module)
	cmd.Dir = os.TempDir()
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("download %s: %w %s", module, err, tail(string(out)))
	}
	var m struct{ Dir string }
	if err := json.Unmarshal(out, &m); err != nil || m.Dir == "" {
		return "", fmt.Errorf("download %s: %s", module, tail(string(out)))
	}
	return m.Dir, nil
}

func tail(s string) string {
	s = strings.TrimSpace(s)
	if len(s) > 2000 {
		s = "..." + s[len(s)-2000:]
	}
	return s
}
