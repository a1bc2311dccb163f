package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Names of runtimes as users give them.
const (
	Crun   = "crun"
	Runc   = "runc"
	GVisor = "gvisor"
)

// Names are all runtimes, in the order in which they are told.
func Names() []string { return []string{Crun, Runc, GVisor} }

// Runtime is a runtime as it was found on this host.
type Runtime struct {
	Name    string
	Program string // absolute path; empty: not found
	Version string // as it says itself
	// Reason says why it can't be used, and what to do; empty: it can.
	Reason string
}

// Config says where runtimes are.
type Config struct {
	// Programs are paths by name that go before what is found: in PATH, and, for runsc, beside this program.
	Programs map[string]string
	// Beside is the folder that is looked through after PATH; empty: that of this program.
	Beside string
}

// known is what is known of each runtime.
var known = map[string]struct {
	kind, program, fix string
	least              []int
}{
	Crun:   {keeper.RuntimeCrun, "crun", "apt-get install crun", []int{1, 8}},
	Runc:   {keeper.RuntimeRunc, "runc", "apt-get install runc", []int{1, 1}},
	GVisor: {keeper.RuntimeRunsc, "runsc", "make runsc builds it into bin/; another one is named by runtimes.gvisor in the config file", []int{20260101}},
}

const versionBound = 10 * time.Second

// Find looks for all runtimes. It starts each once, to ask for its version.
func Find(ctx context.Context, c Config) []Runtime {
	all := make([]Runtime, 0, len(known))
	for _, name := range Names() {
		all = append(all, find(ctx, name, c))
	}
	return all
}

// Fix says how to get a runtime.
func Fix(name string) string { return known[name].fix }

func find(ctx context.Context, name string, c Config) Runtime {
	k, r := known[name], Runtime{Name: name}
	path, err := locate(k.program, c.Programs[name], c.Beside)
	if err != nil {
		r.Reason = fmt.Sprintf("%v (%s)", err, k.fix)
		return r
	}
	r.Program = path
	if r.Version, err = version(ctx, path); err != nil {
		r.Reason = fmt.Sprintf("%s --version: %v (%s)", path, err, k.fix)
		return r
	}
	if !atLeast(numbers(r.Version), k.least) {
		r.Reason = fmt.Sprintf("%s is version %q, older than %s, the least that is known to work (%s)", path, r.Version, dotted(k.least), k.fix)
	}
	return r
}

func locate(program, given, beside string) (string, error) {
	if given != "" {
		if !filepath.IsAbs(given) {
			return "", fmt.Errorf("%s: want an absolute path: %w", given, sandbox.ErrInvalid)
		}
		if st, err := os.Stat(given); err != nil || !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
			return "", fmt.Errorf("%s is no program", given)
		}
		return given, nil
	}
	if p, err := exec.LookPath(program); err == nil && filepath.IsAbs(p) {
		return p, nil
	}
	if beside == "" {
		self, err := os.Executable()
		if err != nil {
			return "", fmt.Errorf("find the running program: %w", err)
		}
		beside = filepath.Dir(self)
	}
	p := filepath.Join(beside, program)
	if st, err := os.Stat(p); err != nil || !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
		return "", fmt.Errorf("no %s in PATH or %s", program, beside)
	}
	return p, nil
}

// version is the first line of what a program says of itself.
func version(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, versionBound)
	defer cancel()
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Stdout, cmd.WaitDelay = &limited{&out, 4096}, time.Second
	if err := cmd.Run(); err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(out.String(), "\n")
	if line = strings.TrimSpace(line); line == "" {
		return "", errors.New("it says nothing")
	}
	return line, nil
}

// limited keeps the first octets and drops the rest.
type limited struct {
	b    *bytes.Buffer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	l.b.Write(p[:n])
	return len(p), nil
}

var digits = regexp.MustCompile(`\d+(\.\d+)*`)

// numbers are those of the first version in a text: 1.8.1, or 20260905.0; nil: none is told.
func numbers(text string) []int {
	var out []int
	for n := range strings.SplitSeq(digits.FindString(text), ".") {
		v, err := strconv.Atoi(n)
		if err != nil {
			return nil
		}
		out = append(out, v)
	}
	return out
}

// atLeast compares versions. One that is not told (a build from the module) is taken at its word.
func atLeast(v, least []int) bool {
	for i, n := range least {
		switch {
		case v == nil:
			return true
		case i >= len(v) || v[i] < n:
			return false
		case v[i] > n:
			return true
		}
	}
	return true
}

func dotted(v []int) string {
	s := make([]string, len(v))
	for i, n := range v {
		s[i] = strconv.Itoa(n)
	}
	return strings.Join(s, ".")
}
