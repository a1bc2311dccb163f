package main

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/iotest"
)

// Copies are the same octets whatever is zero in them and however they come, and zeros take no room.
func TestHoles(t *testing.T) {
	block := bytes.Repeat([]byte("x"), holeBlock)
	none := make([]byte, 3*holeBlock)
	for name, want := range map[string][]byte{
		"empty":   {},
		"octet":   {0},
		"zeros":   none,
		"begin":   append(bytes.Clone(none), 'x'),
		"end":     append([]byte("x"), none...),
		"between": append(append(bytes.Clone(block), none...), block[:77]...),
		"full":    append(bytes.Clone(block), block...),
	} {
		for how, r := range map[string]io.Reader{"whole": bytes.NewReader(want), "half": iotest.HalfReader(bytes.NewReader(want)), "octets": iotest.OneByteReader(bytes.NewReader(want))} {
			f, err := os.Create(filepath.Join(t.TempDir(), "f"))
			if err != nil {
				t.Fatal(err)
			}
			if err := copyHoles(f, r); err != nil {
				t.Fatal(name, how, err)
			}
			if got, err := os.ReadFile(f.Name()); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s %s: %d octets, want %d: %v", name, how, len(got), len(want), err)
			}
			f.Close()
		}
	}
	// A sandbox sends a sparse file of 1 GiB in a tree.
	const size = 1 << 30
	pr, pw := io.Pipe()
	go func() {
		w := tar.NewWriter(pw)
		err := w.WriteHeader(&tar.Header{Name: "sparse", Typeflag: tar.TypeReg, Mode: 0o644, Size: size})
		for n := 0; n < size && err == nil; n += holeBlock {
			_, err = w.Write(zeros[:])
		}
		if err == nil {
			err = w.Close()
		}
		pw.CloseWithError(err)
	}()
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := untar(root, pr); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(filepath.Join(dir, "sparse"))
	if err != nil || st.Size() != size || st.Sys().(*syscall.Stat_t).Blocks*512 > 1<<20 {
		t.Errorf("%v %v", st, err)
	}
}
