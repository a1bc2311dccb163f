package facts

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Facts that are gone, in whatever way, are no new facts: the file does not open, and the error says what to do.
func TestLostFactsAreNotNew(t *testing.T) {
	for name, lose := range map[string]func(file string, size int64) error{
		"removed":     func(file string, _ int64) error { return os.Remove(file) },
		"emptied":     func(file string, _ int64) error { return os.Truncate(file, 0) },
		"zeros":       func(file string, size int64) error { return os.WriteFile(file, make([]byte, size), 0o600) },
		"cut":         func(file string, size int64) error { return os.Truncate(file, 4096) },
		"other":       func(file string, _ int64) error { return os.WriteFile(file, []byte("nothing of ours"), 0o600) },
		"broken page": func(file string, size int64) error { return scribble(file, 2*4096, size) },
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "facts.db")
			b, err := OpenBolt(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, k := range []string{"a", "b", "c"} {
				if _, err := b.Put(context.Background(), k, []byte(strings.Repeat(k, 3000)), Absent); err != nil {
					t.Fatal(err)
				}
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
			st, err := os.Stat(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := lose(file, st.Size()); err != nil {
				t.Fatal(err)
			}
			for range 2 { // a start that was refused changes nothing
				b, err = OpenBolt(file)
				if err == nil {
					b.Close()
					t.Fatal("it opens")
				}
				if !errors.Is(err, sandbox.ErrLost) || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), "begin anew") {
					t.Fatal(err)
				}
			}
			// As it says.
			os.Remove(file)
			if err := os.Remove(file + madeSuffix); err != nil {
				t.Fatal(err)
			}
			if b, err = OpenBolt(file); err != nil {
				t.Fatal(err)
			}
			b.Close()
		})
	}
}

func scribble(file string, from, to int64) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt([]byte(strings.Repeat("\xa5", int(to-from))), from)
	return err
}
