package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// What is no file, or an empty one, is refused at once: to open a pipe would wait for who writes to it.
func TestImageThatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	pipe, empty := filepath.Join(dir, "pipe"), filepath.Join(dir, "empty")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{pipe: "is no file", dir: "is no file", "/dev/null": "is no file", empty: "holds nothing"} {
		for option, x := range map[string]machineFlags{"--machine": {Machine: path}, "--cdrom": {CDROM: path}} {
			r, _, err := x.openMachine(t.Context())
			if err == nil {
				r.Close()
			}
			if err == nil || !strings.Contains(err.Error(), option) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s %s: %v, want %q", option, path, err, want)
			}
		}
	}
}
