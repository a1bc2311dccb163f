package trajectory

import (
	"encoding/binary"
	"go/ast"
	"go/parser"
	"go/token"
	"hash/crc32"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// touches are functions of os, unix and filepath that reach a file system.
var touches = regexp.MustCompile(`^(os|unix|syscall|filepath|ioutil)\.(Open|Create|Read|Write|Remove|Rename|Mkdir|Truncate|Link|Symlink|Chmod|Stat|Lstat|Fstat|Pread|Pwrite|Fsync|Fdatasync|Sync|Unlink|Fallocate|Flock|Ftruncate|Mmap|CopyFS|DirFS|Walk|Glob)`)

// apart are what is no file of a log's life: the kernel's boot ID, and the folder into which a lost host's log is fetched to be read.
var apart = map[string][]string{
	"log.go":      {"os.ReadFile"},
	"takeover.go": {"os.RemoveAll"},
}

// TestAllFilesGoThroughTheSeam: what does not go through FS can't crash in tests. fs.go is the seam.
func TestAllFilesGoThroughTheSeam(t *testing.T) {
	found := 0
	each(t, func(name string, f *ast.File) {
		ast.Inspect(f, func(n ast.Node) bool {
			s, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			x, ok := s.X.(*ast.Ident)
			if !ok || !touches.MatchString(x.Name+"."+s.Sel.Name) {
				return true
			}
			found++
			if call := x.Name + "." + s.Sel.Name; name != "fs.go" && !slices.Contains(apart[name], call) {
				t.Errorf("%s uses %s: files of the log go through FS, so that tests can crash at each write and sync", name, call)
			}
			return true
		})
	}, func(name string) bool { return !strings.HasSuffix(name, "_test.go") })
	if found < 8 {
		t.Errorf("only %d uses found, the seam's own included: the test sees nothing", found)
	}
}

// TestEveryDecoderIsFuzzed: octets of a disk or a store are read by functions that a fuzzer calls by name.
func TestEveryDecoderIsFuzzed(t *testing.T) {
	decoders, fuzzed := map[string]bool{}, map[string]bool{}
	each(t, func(name string, f *ast.File) {
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			switch {
			case !ok:
			case !strings.HasSuffix(name, "_test.go"):
				if strings.HasPrefix(fn.Name.Name, "decode") || fn.Name.Name == "scan" || fn.Name.Name == "openPacked" {
					decoders[fn.Name.Name] = true
				}
			case strings.HasPrefix(fn.Name.Name, "Fuzz"):
				ast.Inspect(fn, func(n ast.Node) bool {
					if c, ok := n.(*ast.CallExpr); ok {
						if id, ok := c.Fun.(*ast.Ident); ok {
							fuzzed[id.Name] = true
						}
					}
					return true
				})
			}
		}
	}, func(string) bool { return true })
	if len(decoders) < 9 {
		t.Errorf("only %d decoders found: %v", len(decoders), decoders)
	}
	for d := range decoders {
		if !fuzzed[d] {
			t.Errorf("%s is called by no fuzzer", d)
		}
	}
}

func each(t *testing.T, do func(name string, f *ast.File), want func(name string) bool) {
	t.Helper()
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if !want(name) {
			continue
		}
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, src, 0)
		if err != nil {
			t.Fatal(err)
		}
		do(name, f)
	}
}

// FuzzHeaders: what a header or trailer says is within bounds, also when its checksum was made right.
func FuzzHeaders(f *testing.F) {
	seg, pack := segmentHeader{Num: 7, Created: 9, Nonce: 3}, packHeader{Num: 7, Nonce: 3, Size: 4096}
	b, _ := sampleSegment()
	f.Add(seg.encode(), b[len(b)-trailerLen:])
	f.Add(pack.encode(), packIndex(nil, []block{{len: 100, stored: 40}}, 104, 9)[6:])
	f.Fuzz(func(t *testing.T, h, tr []byte) {
		if len(h) >= segmentHeaderLen {
			h = slices.Clone(h[:segmentHeaderLen])
			for _, magic := range []string{segmentMagic, packMagic} {
				copy(h, magic)
				binary.LittleEndian.PutUint32(h[60:], crc32.Checksum(h[:60], castagnoli))
				if s, err := decodeSegmentHeader(h); (err == nil) != (magic == segmentMagic) || err == nil && s.Nonce != binary.LittleEndian.Uint32(h[40:]) {
					t.Fatal(s, err)
				}
				if p, err := decodePackHeader(h); err == nil && (magic != packMagic || p.Size < segmentHeaderLen || p.Size > 1<<40 || p.Far < 0) {
					t.Fatal(p)
				}
			}
		}
		if len(tr) < trailerLen {
			return
		}
		tr = slices.Clone(tr[:trailerLen])
		for _, magic := range []string{trailerMagic, packEnd} {
			copy(tr[36:], magic)
			binary.LittleEndian.PutUint32(tr[32:], crc32.Checksum(tr[:32], castagnoli))
			if x, err := decodeTrailer(tr); err == nil && (magic != trailerMagic || x.off < segmentHeaderLen || x.len < 0 || x.off > 1<<40) {
				t.Fatal(x)
			}
			if at, n, count, _, err := decodePackTrailer(tr); err == nil && (magic != packEnd || at < segmentHeaderLen || n < 0 || count > uint64(n)) {
				t.Fatal(at, n, count)
			}
		}
	})
}
