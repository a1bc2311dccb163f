package build

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// File is a build file: see docs/images.md.
type File struct {
	Name  string   `toml:"name"`  // of the environment
	From  string   `toml:"from"`  // environment, image:REF or layer:REF
	Steps []Step   `toml:"step"`  // in order
	Kits  []string `toml:"kits"`  // layers on top of all steps: they can be replaced by `dsec env upgrade`
	Check string   `toml:"check"` // shell text that must exit with 0, as the run-time user, before the environment is published

	Env     map[string]string `toml:"env"`     // of the steps and at run time
	User    string            `toml:"user"`    // at run time; default what it is built from
	Workdir string            `toml:"workdir"` // of the steps and at run time
	Builder string            `toml:"builder"` // user of the run steps; default root
	Network string            `toml:"network"` // of the run steps and the check: none (default) or open
	Memory  int64             `toml:"memory"`  // octets, of the sandboxes that build
	Disk    int64             `toml:"disk"`
	Keep    []string          `toml:"keep"` // rules that do not apply

	dir string
}

// Step is one of Run, Copy, Kit, or a change of what holds for the steps after it.
type Step struct {
	Run     string            `toml:"run"`     // shell text
	Copy    string            `toml:"copy"`    // file or folder beside the build file
	To      string            `toml:"to"`      // of copy: a folder, or with one file its path
	Owner   string            `toml:"owner"`   // of copy: name or uid[:gid]; default root
	Exclude []string          `toml:"exclude"` // of copy: patterns of names or paths left out
	Kit     string            `toml:"kit"`     // layer laid on here
	Env     map[string]string `toml:"env"`
	Workdir string            `toml:"workdir"`
	User    string            `toml:"user"`    // at run time
	Timeout string            `toml:"timeout"` // of run
}

// ReadFile reads a build file; what it does not know is an error.
func ReadFile(file string) (*File, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	f := &File{}
	dec := toml.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(f); err != nil {
		var strict *toml.StrictMissingError
		var syntax *toml.DecodeError
		switch {
		case errors.As(err, &strict):
			return nil, fmt.Errorf("%s: unknown setting\n%s", file, strict.String())
		case errors.As(err, &syntax):
			return nil, fmt.Errorf("%s:\n%s", file, syntax.String())
		}
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if f.dir, err = filepath.Abs(filepath.Dir(file)); err != nil {
		return nil, err
	}
	if err := f.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return f, nil
}

const maxSteps = 100 // each with a change is a layer of a sandbox

func (f *File) check() error {
	switch {
	case f.From == "":
		return errors.New("from: name an environment, image:REF or layer:REF")
	case len(f.Steps) > maxSteps:
		return fmt.Errorf("%d steps, at most %d", len(f.Steps), maxSteps)
	case f.Network != "" && f.Network != "none" && f.Network != "open":
		return fmt.Errorf("network %q: want none or open", f.Network)
	case f.Workdir != "" && !path.IsAbs(f.Workdir):
		return fmt.Errorf("workdir %q: want an absolute path", f.Workdir)
	case f.Memory < 0 || f.Disk < 0:
		return errors.New("memory and disk: want octets")
	}
	for _, k := range f.Keep {
		if !isRule(k) {
			return fmt.Errorf("keep %q: want one of %s", k, strings.Join(ruleNames(), ", "))
		}
	}
	for i := range f.Steps {
		if err := f.Steps[i].check(f.dir); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return nil
}

func (s *Step) check(dir string) error {
	kinds := 0
	for _, is := range []bool{s.Run != "", s.Copy != "", s.Kit != "", len(s.Env) > 0, s.Workdir != "", s.User != ""} {
		if is {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		return errors.New("want one of run, copy, kit, env, workdir, user")
	case s.Copy == "" && (s.To != "" || s.Owner != "" || len(s.Exclude) > 0):
		return errors.New("to, owner and exclude belong to copy")
	case s.Copy != "" && (s.To == "" || !path.IsAbs(s.To)):
		return errors.New("copy: to: want an absolute path")
	case s.Run == "" && s.Timeout != "":
		return errors.New("timeout belongs to run")
	case s.Workdir != "" && !path.IsAbs(s.Workdir):
		return fmt.Errorf("workdir %q: want an absolute path", s.Workdir)
	}
	if s.Copy != "" && !filepath.IsLocal(s.Copy) {
		return fmt.Errorf("copy %q: want a path beside the build file", s.Copy)
	}
	for _, p := range s.Exclude {
		if _, err := path.Match(p, ""); err != nil {
			return fmt.Errorf("exclude %q: %w", p, err)
		}
	}
	if _, err := s.timeout(); err != nil {
		return fmt.Errorf("timeout: %w", err)
	}
	return nil
}

func (s *Step) timeout() (time.Duration, error) {
	if s.Timeout == "" {
		return 0, nil
	}
	return time.ParseDuration(s.Timeout)
}

// String is the step on one line, for people.
func (s *Step) String() string {
	switch {
	case s.Run != "":
		line, rest, more := strings.Cut(strings.TrimSpace(s.Run), "\n")
		if more && rest != "" {
			line += " ..."
		}
		return "run " + line
	case s.Copy != "":
		return "copy " + s.Copy + " to " + s.To
	case s.Kit != "":
		return "kit " + s.Kit
	case s.Workdir != "":
		return "workdir " + s.Workdir
	case s.User != "":
		return "user " + s.User
	}
	return "env"
}
