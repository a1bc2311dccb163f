package vmm

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// The end of a console is kept, whatever it came in, and the file never has more than twice that.
func TestConsoleIsBounded(t *testing.T) {
	dir := t.TempDir()
	if got := KeptConsole(dir); len(got) != 0 {
		t.Errorf("of nothing: %q", got)
	}
	var all []byte
	for i := range 50 {
		part := bytes.Repeat([]byte{byte('a' + i%26)}, consolePart-i)
		all = append(all, part...)
		if err := keepConsole(dir, part); err != nil {
			t.Fatal(err)
		}
		if got, want := KeptConsole(dir), all[max(0, len(all)-MaxConsole):]; !bytes.Equal(got, want) {
			t.Fatalf("after %d parts: %d octets that are not the last %d", i+1, len(got), len(want))
		}
		if st, err := os.Stat(filepath.Join(dir, consoleFile)); err != nil || st.Size() > 2*MaxConsole+consolePart {
			t.Fatalf("%v, %v", st, err)
		}
	}
	if list, _ := os.ReadDir(dir); len(list) != 1 {
		t.Errorf("left: %v", list)
	}
}
