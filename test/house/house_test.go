// Package house holds the rules of the codebase as tests: who may import whom, a doc comment for every package, no catch-all packages.
package house

import (
	"encoding/json"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/dsec-dev/dsec"

type pkg struct {
	ImportPath string
	Dir        string
	Doc        string
	Imports    []string
	GoFiles    []string
}

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Doc,Imports,GoFiles", module+"/...")
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var list []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var p pkg
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		list = append(list, p)
	}
	if len(list) < 10 {
		t.Fatalf("only %d packages found", len(list))
	}
	return list
}

// ranks is the import order of ARCHITECTURE.md: a package imports only those of a lower rank, or its own folder's.
var ranks = []struct {
	prefix string
	rank   int
}{
	{"api/", 0},
	{"internal/calm", 1},
	{"internal/memfile", 1},
	{"internal/sandbox", 1},
	{"internal/sandbox/sandboxtest", 2},
	{"internal/store", 2},
	{"internal/facts", 2},
	{"internal/obs", 2},
	{"internal/confine", 2},
	{"internal/guest", 2},
	{"internal/display", 2},
	{"internal/placement", 2},
	{"internal/replay", 2},
	{"internal/trace", 2},
	{"internal/density", 2},
	{"internal/compat", 1},
	{"internal/layer", 3},
	{"internal/trajectory", 3},
	{"internal/oci", 4},
	{"internal/build", 4},
	{"internal/iam", 4},
	{"internal/job", 3},
	{"internal/rpc", 3},
	{"internal/fncall", 4},
	{"internal/keeper", 4},
	{"internal/vmm", 4},
	{"internal/blob", 4},
	{"internal/backend", 5},
	{"internal/host", 6},
	{"internal/monitor", 6},
	{"internal/gateway", 7},
	{"client", 1},
	{"cmd/dsec-guest", 8},
	{"cmd/dsec", 9},
	{"bench", 9},
	{"examples", 9},
	{"test", 9},
	{"scripts", 9},
}

// never are pairs that must not meet even though their ranks would allow it: they talk over api/.
var never = [][2]string{
	{"internal/gateway", "internal/host"},
	{"internal/gateway", "internal/backend"},
	{"internal/monitor", "internal/host"},
	{"internal/monitor", "internal/backend"},
	{"internal/host", "internal/backend"},
	{"internal/host", "internal/keeper"},
	{"client", "internal"},
}

func below(path, prefix string) bool {
	prefix = strings.TrimSuffix(prefix, "/")
	return path == prefix || strings.HasPrefix(path, prefix+"/")
}

func rank(path string) (prefix string, n int) {
	n = -1
	for _, r := range ranks {
		if below(path, r.prefix) && len(r.prefix) > len(prefix) {
			prefix, n = r.prefix, r.rank
		}
	}
	return prefix, n
}

func TestImportOrder(t *testing.T) {
	for _, p := range packages(t) {
		from := strings.TrimPrefix(p.ImportPath, module+"/")
		home, mine := rank(from)
		if mine < 0 {
			t.Errorf("%s has no place in the import order: add it to ranks and to ARCHITECTURE.md", from)
			continue
		}
		for _, i := range p.Imports {
			to, ours := strings.CutPrefix(i, module+"/")
			if !ours {
				continue
			}
			there, n := rank(to)
			if there != home && n >= mine {
				t.Errorf("%s imports %s, which is not below it", from, to)
			}
			for _, pair := range never {
				if below(from, pair[0]) && below(to, pair[1]) {
					t.Errorf("%s imports %s: they meet over api/ alone", from, to)
				}
			}
		}
	}
}

func TestPackagesSayWhatTheyHide(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) == 0 || strings.Contains(p.ImportPath, "/api/") {
			continue
		}
		docs := 0
		for _, f := range p.GoFiles {
			file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, f), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if file.Doc != nil {
				docs++
			}
		}
		if docs != 1 {
			t.Errorf("%s has %d package comments, want 1", p.ImportPath, docs)
		}
	}
}

func TestNoCatchAllPackages(t *testing.T) {
	for _, p := range packages(t) {
		name := filepath.Base(p.ImportPath)
		if slices.Contains([]string{"utils", "util", "common", "shared", "helper", "helpers", "types", "misc"}, name) {
			t.Errorf("%s: name it after what it is about", p.ImportPath)
		}
	}
}

// A file over 800 lines says why in its first lines ("long:"), or is cut along a seam.
func TestLongFilesSayWhy(t *testing.T) {
	for _, p := range packages(t) {
		for _, f := range p.GoFiles {
			if strings.HasSuffix(f, ".pb.go") || strings.HasSuffix(f, ".connect.go") {
				continue
			}
			b, err := os.ReadFile(filepath.Join(p.Dir, f))
			if err != nil {
				t.Fatal(err)
			}
			head, _, _ := strings.Cut(string(b), "import")
			if n := strings.Count(string(b), "\n"); n > 800 && !strings.Contains(head, "long:") {
				t.Errorf("%s/%s has %d lines: cut it along a seam, or say why in its head", p.ImportPath, f, n)
			}
		}
	}
}

// faults are the numbers of the list of faults that users of such systems reported, by their kind: E exec and output, S sessions, F files, R what a process finds
// around it, N ports and network, C life cycle, L layers, J function calls.
var faults = map[string][]string{
	"E": {"02", "15", "33", "34", "36", "42"},
	"S": {"05", "17"},
	"F": {"12", "19", "21", "22"},
	"R": {"37", "41", "48", "50"},
	"N": {"46", "47"},
	"C": {"39", "52"},
	"L": {"03", "08", "24", "26"},
	"J": {"10", "28", "30"},
}

// Each fault has a test of the whole program that names it: a function, or for function calls cases of the table of verdicts.
func TestFaultsHaveTests(t *testing.T) {
	found := map[string]bool{}
	names := regexp.MustCompile(`(?m)^func TestB(\d\d)[A-Z]|\{name: "B(\d\d) `)
	for _, b := range read(t, "../e2e/*_test.go") {
		for _, m := range names.FindAllStringSubmatch(b, -1) {
			found[m[1]+m[2]] = true
		}
	}
	for kind, numbers := range faults {
		for _, n := range numbers {
			if !found[n] {
				t.Errorf("fault B%s of kind %s has no test in test/e2e", n, kind)
			}
		}
	}
}

// A document that says which test shows a promise names tests that are there.
func TestNamedTestsExist(t *testing.T) {
	there := map[string]bool{}
	defined := regexp.MustCompile(`(?m)^(?:func ((?:Test|Fuzz)\w+)\(|(?:async )?def (test_\w+)\()`)
	err := filepath.WalkDir("../..", func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(p, "_test.go") && !strings.HasPrefix(d.Name(), "test_") {
			return err
		}
		b, err := os.ReadFile(p)
		for _, m := range defined.FindAllStringSubmatch(string(b), -1) {
			there[m[1]+m[2]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`\b(?:(?:Test|Fuzz)[A-Z]\w*|test_[a-z_]+)\b`)
	for file, b := range read(t, "../../docs/*.md", "../../docs/*/*.md", "../../SPECIFICATION.md", "../../SECURITY.md") {
		for _, n := range named.FindAllString(b, -1) {
			if !there[n] && n != "test_python" { // that is a script
				t.Errorf("%s names %s, which is not there", filepath.Base(file), n)
			}
		}
	}
}

func read(t *testing.T, patterns ...string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, p := range patterns {
		files, err := filepath.Glob(p)
		if err != nil || len(files) == 0 && !strings.Contains(p, "*") {
			t.Fatalf("%s: %v", p, err)
		}
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			out[f] = string(b)
		}
	}
	return out
}
