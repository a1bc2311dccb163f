package fncall

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Language is how code of a language is compiled and run. In a file it is a table [language.NAME]; docs/fncall.md tells of each field.
type Language struct {
	Name string `toml:"-"`
	// Environment is that of its compiler and run time, name or name@version.
	Environment string `toml:"environment"`
	// Source is the file that the code becomes.
	Source string `toml:"source"`
	// Compile is the compiler's command; none for languages that have none. "{source}" is the source file, "{args}", alone in an argument,
	// the call's compile_args.
	Compile []string `toml:"compile"`
	// Artifacts are the files that compiling makes and that a run gets instead of the source.
	Artifacts []string `toml:"artifacts"`
	// Run is the command that runs it; the input's args follow.
	Run []string `toml:"run"`
	// Warm says that Run opens Source when it is up, so that it may be started before there is a program.
	Warm bool     `toml:"warm"`
	Env  []string `toml:"env"` // NAME=VALUE
	// CompileEnv is added for the compiler.
	CompileEnv []string `toml:"compile_env"`
	// Limits and CompileLimits replace the platform's defaults.
	Limits        LimitsFile `toml:"limits"`
	CompileLimits LimitsFile `toml:"compile_limits"`
}

// LimitsFile is Limits as it stands in a file: durations as text ("2s"), sizes as text ("256m") or octets.
type LimitsFile struct {
	CPU       string `toml:"cpu"`
	Wall      string `toml:"wall"`
	Memory    string `toml:"memory"`
	Processes int    `toml:"processes"`
	Output    string `toml:"output"`
	FileSize  string `toml:"file_size"`
	Disk      string `toml:"disk"`
	Files     int    `toml:"files"`
	Stack     string `toml:"stack"`
	OpenFiles int    `toml:"open_files"`
}

// Limits reads the file's form.
func (f LimitsFile) Limits() (l Limits, err error) {
	duration := func(name, s string, to *time.Duration) {
		if s == "" {
			return
		}
		d, e := time.ParseDuration(s)
		if e != nil || d <= 0 {
			err = errors.Join(err, fmt.Errorf("%s %q: want a duration such as 2s: %w", name, s, sandbox.ErrInvalid))
		}
		*to = d
	}
	size := func(name, s string, to *int64) {
		if s == "" {
			return
		}
		n, e := parseSize(s)
		if e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", name, e))
		}
		*to = n
	}
	duration("cpu", f.CPU, &l.CPU)
	duration("wall", f.Wall, &l.Wall)
	size("memory", f.Memory, &l.Memory)
	size("output", f.Output, &l.Output)
	size("file_size", f.FileSize, &l.FileSize)
	size("disk", f.Disk, &l.Disk)
	size("stack", f.Stack, &l.Stack)
	l.Processes, l.Files, l.OpenFiles = f.Processes, f.Files, f.OpenFiles
	return l, err
}

func parseSize(s string) (int64, error) {
	var n int64
	var unit string
	if k, _ := fmt.Sscanf(s, "%d%s", &n, &unit); k < 1 || n <= 0 {
		return 0, fmt.Errorf("%q: want a size such as 256m: %w", s, sandbox.ErrInvalid)
	}
	shift, ok := map[string]uint{"": 0, "k": 10, "m": 20, "g": 30}[strings.ToLower(unit)]
	if !ok || n > 1<<(62-shift) {
		return 0, fmt.Errorf("%q: want a size such as 256m: %w", s, sandbox.ErrInvalid)
	}
	return n << shift, nil
}

//go:embed languages.toml
var builtin []byte

// Languages are languages by name.
type Languages map[string]*Language

// LoadLanguages reads the built-in ones, then files, in order: a later table of a name replaces the earlier.
func LoadLanguages(files ...string) (Languages, error) {
	all := Languages{}
	if err := all.read("built-in languages", builtin); err != nil {
		return nil, err
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, fmt.Errorf("languages: %w", err)
		}
		if err := all.read(f, text); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func (all Languages) read(from string, text []byte) error {
	var file struct {
		Language map[string]*Language `toml:"language"`
	}
	d := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields()
	if err := d.Decode(&file); err != nil {
		var strict *toml.StrictMissingError
		if errors.As(err, &strict) {
			return fmt.Errorf("%s: %s: %w", from, strict.String(), sandbox.ErrInvalid)
		}
		return fmt.Errorf("%s: %w: %w", from, err, sandbox.ErrInvalid)
	}
	for name, l := range file.Language {
		l.Name = name
		if err := l.check(); err != nil {
			return fmt.Errorf("%s: language %s: %w", from, name, err)
		}
		all[name] = l
	}
	return nil
}

var languageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+#._-]{0,31}$`)

func (l *Language) check() error {
	switch {
	case !languageName.MatchString(l.Name):
		return fmt.Errorf("want a name of a-z 0-9 + # . _ -: %w", sandbox.ErrInvalid)
	case l.Environment == "":
		return fmt.Errorf("environment: missing: %w", sandbox.ErrInvalid)
	case len(l.Compile) > 0 && len(l.Artifacts) == 0:
		return fmt.Errorf("artifacts: compile is set, and nothing of it is named: %w", sandbox.ErrInvalid)
	case l.Warm && (len(l.Compile) > 0 || l.Source == "" || strings.ContainsRune(l.Source, '/')):
		return fmt.Errorf("warm: is for languages without a compiler whose source lies in the work folder itself: %w", sandbox.ErrInvalid)
	case l.Name != "cmd" && (l.Source == "" || len(l.Run) == 0):
		return fmt.Errorf("source and run: missing: %w", sandbox.ErrInvalid)
	}
	for _, p := range append([]string{l.Source}, l.Artifacts...) {
		if p != "" {
			if err := CheckPath(p); err != nil {
				return err
			}
		}
	}
	if _, err := l.Limits.Limits(); err != nil {
		return fmt.Errorf("limits.%w", err)
	}
	if _, err := l.CompileLimits.Limits(); err != nil {
		return fmt.Errorf("compile_limits.%w", err)
	}
	return errors.Join(sandbox.CheckEnv("env", l.Env), sandbox.CheckEnv("compile_env", l.CompileEnv))
}

// CheckPath refuses what is no clean path below the work folder.
func CheckPath(p string) error {
	bad := p == "" || len(p) > 1024 || strings.HasPrefix(p, "/") || strings.ContainsRune(p, 0)
	for part := range strings.SplitSeq(p, "/") {
		bad = bad || part == "" || part == "." || part == ".." || len(part) > 255
	}
	if bad {
		return fmt.Errorf("path %.80q: want one below the work folder, without \".\", \"..\" and empty parts: %w", p, sandbox.ErrInvalid)
	}
	return nil
}

// command replaces the placeholders of a compile command.
func (l *Language) command(args []string) []string {
	var out []string
	for _, a := range l.Compile {
		if a == "{args}" {
			out = append(out, args...)
			continue
		}
		out = append(out, strings.ReplaceAll(a, "{source}", l.Source))
	}
	return out
}
