package initproc

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestCallImageIsReproducible(t *testing.T) {
	if len(callImage) > 16<<10 {
		t.Errorf("the parent of calls has %d octets", len(callImage))
	}
	v, err := exec.Command("x86_64-linux-gnu-gcc", "--version").Output()
	if line, _, _ := strings.Cut(string(v), "\n"); err != nil || line != builtWith {
		t.Skipf("needs the compiler of the committed binary, %s", builtWith)
	}
	out := filepath.Join(t.TempDir(), "call")
	if b, err := exec.Command("sh", "src/build.sh", "amd64", out, "call").CombinedOutput(); err != nil {
		t.Fatalf("build.sh: %v\n%s", err, b)
	}
	if b, err := os.ReadFile(out); err != nil || !bytes.Equal(b, callImage) {
		t.Errorf("call_amd64 is not what build.sh makes of the source (%v): run go generate", err)
	}
}
