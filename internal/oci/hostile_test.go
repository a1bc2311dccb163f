package oci

import (
	"archive/tar"
	"bytes"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

// A registry that means harm ends a pull with an error, within bounds, and leaves no layer.
func TestHostileRegistries(t *testing.T) {
	img := imageOf(t, nil, two...)
	to := func(part, where string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, part) {
				return false
			}
			w.Header().Set("Location", where)
			w.WriteHeader(http.StatusTemporaryRedirect)
			return true
		}
	}
	drip := func(part string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, q *http.Request) bool {
			if !strings.Contains(q.URL.Path, part) {
				return false
			}
			w.Header().Set("Content-Type", typeOCIManifest)
			for q.Context().Err() == nil {
				w.Write([]byte(" "))
				http.NewResponseController(w).Flush()
				time.Sleep(10 * time.Millisecond)
			}
			return true
		}
	}
	for what, bad := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"a manifest that is a file of this machine":   to("/manifests/", "file:///etc/passwd"),
		"blobs that are files of this machine":        to("/blobs/", "file:///etc/passwd"),
		"a manifest that is a socket of this machine": to("/manifests/", "unix:///run/dsec.sock"),
		"a manifest that leads to itself":             to("/manifests/", "/v2/x/manifests/1"),
		"blobs that lead nowhere":                     to("/blobs/", "http://169.254.169.254/latest/meta-data"),
		"a manifest without an end, in drops":         drip("/manifests/"),
	} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, Config{})
			r.Images.patience = 300 * time.Millisecond
			on := false
			r.serve(func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
					if !on || q.Method != http.MethodGet || !bad(w, q) {
						h.ServeHTTP(w, q)
					}
				})
			})
			ref := r.push("x:1", img)
			on = true
			began := time.Now()
			_, err := r.Pull(within(t), "default", Pull{Ref: ref})
			if err == nil || time.Since(began) > time.Minute {
				t.Errorf("%v after %v", err, time.Since(began))
			}
			r.nothing()
		})
	}
}

// nothing checks that no layer came of it.
func (r *rig) nothing() {
	r.t.Helper()
	if err := r.store.List(r.t.Context(), "layers/", func(i store.Info) bool {
		r.t.Errorf("%s is there", i.Key)
		return true
	}); err != nil {
		r.t.Error(err)
	}
}

// Layers that mean harm are refused with what is wrong, and touch nothing outside.
func TestHostileLayers(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	var deep []file
	for i := range 1200 {
		deep = append(deep, file{name: strings.Repeat("d/", i+1)})
	}
	var many []file
	for i := range 3000 {
		many = append(many, file{name: strings.Repeat("x", i%200+1) + string(rune('a'+i%26)) + strings.Repeat("y", i/200+1)})
	}
	for what, c := range map[string]struct {
		tar  []byte
		kind error
	}{
		"zeros without end":              {tarOf(file{name: "z", data: strings.Repeat("\x00", 64<<20)}), sandbox.ErrExhausted},
		"octets that compress to none":   {tarOf(file{name: "z", data: strings.Repeat("ab", 48<<20)}), sandbox.ErrExhausted},
		"many files":                     {tarOf(many...), sandbox.ErrExhausted},
		"folders without end":            {tarOf(deep...), sandbox.ErrInvalid},
		"a way out":                      {tarOf(file{name: "../../../../../../../../" + outside, data: "x"}), sandbox.ErrInvalid},
		"a way out in the middle":        {tarOf(file{name: "a/"}, file{name: "a/../../b", data: "x"}), sandbox.ErrInvalid},
		"through a link to the root":     {tarOf(file{name: "l", kind: tar.TypeSymlink, link: "/"}, file{name: "l" + outside, data: "x"}), sandbox.ErrInvalid},
		"through a link upwards":         {tarOf(file{name: "l", kind: tar.TypeSymlink, link: "../../.."}, file{name: "l/x", data: "x"}), sandbox.ErrInvalid},
		"a hard link to what is outside": {tarOf(file{name: "h", kind: tar.TypeLink, link: outside}), sandbox.ErrInvalid},
		"a hard link upwards":            {tarOf(file{name: "h", kind: tar.TypeLink, link: "../../../../etc/passwd"}), sandbox.ErrInvalid},
		"marks of the overlay": {tarOf(file{name: "d/", xattr: map[string]string{"trusted.overlay.redirect": "/etc"}},
			file{name: "f", data: strings.Repeat("ab", 48<<20)}), sandbox.ErrExhausted},
	} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, Config{Limits: layer.Limits{Bytes: 80 << 20, Holes: 16 << 20, Entries: 2000}}).serve(nil)
			_, err := r.Pull(within(t), "default", Pull{Ref: r.push("x:1", imageOf(t, nil, c.tar))})
			if !errors.Is(err, c.kind) {
				t.Errorf("%v, want %v", err, c.kind)
			}
			r.nothing()
		})
	}
	if b, err := os.ReadFile(outside); err != nil || !bytes.Equal(b, []byte("mine")) {
		t.Errorf("outside: %q, %v", b, err)
	}
}
