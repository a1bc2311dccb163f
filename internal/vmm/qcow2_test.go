package vmm

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

func file(t *testing.T, text string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	return f
}

// What we write is what QEMU's own tool takes without a complaint, of any size; and we read it as it does.
func TestOverlayIsQCOW2(t *testing.T) {
	for _, size := range []int64{512, 1 << 20, qcowMapped, qcowMapped + 512, 300 << 30, MaxImage} {
		f := file(t, "")
		if err := WriteOverlay(f, size, 2<<20); err != nil {
			t.Fatal(err)
		}
		got, qcow, err := ImageSize(f)
		if err != nil || !qcow || got != size {
			t.Errorf("%d: read back %d, %v, %v", size, got, qcow, err)
		}
		img, err := exec.LookPath("qemu-img")
		if err != nil {
			continue
		}
		out, err := exec.Command(img, "check", "--output=json", "-f", "qcow2", f.Name()).CombinedOutput()
		var r struct {
			Errors  int `json:"check-errors"`
			Leaks   int `json:"leaks"`
			Corrupt int `json:"corruptions"`
		}
		if err != nil || json.Unmarshal(out, &r) != nil || r.Errors+r.Leaks+r.Corrupt != 0 {
			t.Errorf("%d: %v: %s", size, err, out)
		}
		out, err = exec.Command(img, "info", "--output=json", "-f", "qcow2", f.Name()).CombinedOutput()
		var info struct {
			Size int64 `json:"virtual-size"`
		}
		if err != nil || json.Unmarshal(out, &info) != nil || info.Size != size {
			t.Errorf("%d: %v: %s", size, err, out)
		}
	}
	for _, bad := range [][2]int64{{0, 1 << 30}, {MaxImage + 1, 1 << 30}, {1 << 20, 1 << 16}} {
		if err := WriteOverlay(file(t, ""), bad[0], bad[1]); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

// An image that would have QEMU read other files is refused, with what to do.
func TestImagesThatNameOtherFiles(t *testing.T) {
	good := file(t, "")
	if err := WriteOverlay(good, 1<<20, 1<<20); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(h []byte){
		"backing file": func(h []byte) { binary.BigEndian.PutUint64(h[8:], 200) },
		"another file": func(h []byte) { binary.BigEndian.PutUint64(h[72:], 4) },
		"not closed":   func(h []byte) { binary.BigEndian.PutUint64(h[72:], 1) },
		"encrypted":    func(h []byte) { binary.BigEndian.PutUint32(h[32:], 2) },
		"version":      func(h []byte) { binary.BigEndian.PutUint32(h[4:], 4) },
		"octets":       func(h []byte) { binary.BigEndian.PutUint64(h[24:], 1<<60) },
	} {
		h := make([]byte, 512)
		if _, err := good.ReadAt(h, 0); err != nil {
			t.Fatal(err)
		}
		change(h)
		if _, _, err := ImageSize(file(t, string(h))); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, _, err := ImageSize(file(t, qcowMagic)); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a header that breaks off: %v", err)
	}
	if _, _, err := ImageSize(file(t, "")); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("an empty disk: %v", err)
	}
	if size, qcow, err := ImageSize(file(t, "raw")); err != nil || qcow || size != 512 {
		t.Errorf("raw: %d %v %v", size, qcow, err)
	}
}

// A header that somebody brings is never more than an error.
func FuzzImageSize(f *testing.F) {
	f.Add([]byte(qcowMagic))
	f.Fuzz(func(t *testing.T, h []byte) {
		if size, err := qcowSize(h); err == nil && (size <= 0 || size > MaxImage) {
			t.Errorf("%d", size)
		}
	})
}
