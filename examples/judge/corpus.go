package main

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"go/build/constraint"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// program is one of Go's own test programs: it must exit with 0 and print what stands in want.
type program struct {
	path string // below the test folder
	code []byte
	want []byte
}

func (p *program) file() string { return filepath.Base(p.path) }

// skips is a list of "path<tab>reason": programs that need more than a program gets, such as the go tool at run time.
//
//go:embed skip.tsv
var skips string

// collect returns the programs whose action is "// run", by path, and why others with that action are left out.
func collect(root string) (all []*program, skipped map[string]string, err error) {
	reasons, err := parseSkips(skips)
	if err != nil {
		return nil, nil, err
	}
	skipped = map[string]string{}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" {
			return err
		}
		code, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		action, when := header(code)
		if action != "run" {
			return nil
		}
		reason := reasons[rel]
		delete(reasons, rel)
		switch {
		case reason != "":
			skipped[rel] = reason
		case strings.Contains(filepath.Dir(rel), ".dir"):
			skipped[rel] = "is a part of another test"
		case when != nil && !when.Eval(built):
			skipped[rel] = "is not for this machine: " + when.String()
		default:
			want, err := os.ReadFile(strings.TrimSuffix(path, ".go") + ".out")
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			all = append(all, &program{rel, code, want})
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	// A list that names what is no more hides that something was never run.
	for path := range reasons {
		return nil, nil, fmt.Errorf("skip.tsv: %s is no program with the action run: take its line away", path)
	}
	slices.SortFunc(all, func(a, b *program) int { return strings.Compare(a.path, b.path) })
	return all, skipped, nil
}

// header reads a test's first lines: build constraints, then its action.
func header(code []byte) (action string, when constraint.Expr) {
	for line := range bytes.Lines(code) {
		text := strings.TrimSpace(string(line))
		if expr, err := constraint.Parse(text); err == nil {
			when = expr
			continue
		}
		if text == "" {
			continue
		}
		action, _ = strings.CutPrefix(text, "// ")
		break
	}
	// A constraint may also follow the action.
	for line := range bytes.Lines(code) {
		text := strings.TrimSpace(string(line))
		if strings.HasPrefix(text, "package ") {
			break
		}
		if expr, err := constraint.Parse(text); err == nil {
			when = expr
		}
	}
	return action, when
}

// built says whether a tag holds for programs that are compiled here, which is without cgo.
func built(tag string) bool {
	return slices.Contains([]string{runtime.GOOS, runtime.GOARCH, "unix", "gc"}, tag) || strings.HasPrefix(tag, "go1.")
}

func parseSkips(text string) (map[string]string, error) {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		path, reason, ok := strings.Cut(line, "\t")
		if !ok || reason == "" {
			return nil, fmt.Errorf("skip.tsv: %q: want path, tab, reason", line)
		}
		out[path] = reason
	}
	return out, nil
}

// sample takes n of them, the same ones each time, with as many that have a golden output as there are up to a third.
func sample(all []*program, n int) []*program {
	if n <= 0 || n >= len(all) {
		return all
	}
	r := rand.New(rand.NewPCG(20261130, 1))
	shuffled := slices.Clone(all)
	r.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	golden := slices.DeleteFunc(slices.Clone(shuffled), func(p *program) bool { return len(p.want) == 0 })
	picked := golden[:min(len(golden), n/3)]
	for _, p := range shuffled {
		if len(picked) == n {
			break
		}
		if len(p.want) == 0 {
			picked = append(picked, p)
		}
	}
	slices.SortFunc(picked, func(a, b *program) int { return strings.Compare(a.path, b.path) })
	return picked
}
