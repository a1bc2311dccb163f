// Package house holds the rules of the codebase as tests: who may import whom, a doc comment for every package, no catch-all packages.
package house

import (
	"encoding/json"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
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
