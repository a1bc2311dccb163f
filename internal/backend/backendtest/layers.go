package backendtest

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

// Layers is the part on what layers say of their files. busybox finds the static program of the suite's root.
func Layers(c *layer.Catalogue, busybox func(testing.TB) string) sandboxtest.Part {
	return sandboxtest.Part{Name: "layers", Run: func(t *testing.T, e *sandboxtest.Env) { testLayers(t, e, c, busybox(t)) }}
}

// setsNetBind is a file capability as kernels write it: revision 2, effective, cap_net_bind_service (bit 10).
var setsNetBind = string([]byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})

func testLayers(t *testing.T, e *sandboxtest.Env, c *layer.Catalogue, busybox string) {
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	dir := func(name string, mode int64) *tar.Header {
		return &tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: mode}
	}
	hard := func(name, to string) *tar.Header {
		return &tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to}
	}
	content := map[string]string{"l/f1": strings.Repeat("0123456789abcdef", 5<<20/16), "busybox-raw": string(program), "l/f2": "new"}
	of := func(headers ...*tar.Header) string {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range headers {
			h.Format = tar.FormatPAX
			body := ""
			if h.Typeflag == 0 {
				if h.Typeflag = tar.TypeReg; !strings.Contains(h.Name, ".wh.") {
					body = h.Name
				}
				if c, ok := content[h.Name]; ok {
					body = c
				}
				if h.Size = int64(len(body)); h.Mode == 0 {
					h.Mode = 0o644
				}
			}
			if err := w.WriteHeader(h); err != nil {
				t.Fatal(err)
			}
			io.WriteString(w, body)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		d, err := c.ImportTar(sandboxtest.Within(t), "default", &b, layer.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return string(d.ID)
	}
	stack := []string{
		of(dir("data", 0o755), &tar.Header{Name: "data/gone"}, dir("data/old", 0o755), &tar.Header{Name: "data/old/x"}),
		of(dir("data", 0o755), &tar.Header{Name: "data/.wh.gone"}, &tar.Header{Name: "data/.wh.never"}, &tar.Header{Name: "data/kept"},
			dir("data/old", 0o755), &tar.Header{Name: "data/old/.wh..wh..opq"}, &tar.Header{Name: "data/old/y"}, dir("none", 0o755), &tar.Header{Name: "none/.wh.x"}),
		of(&tar.Header{Name: "a", Mode: 0o4755, Uid: 1000, Gid: 1000}, &tar.Header{Name: "b", Mode: 0o2755, Gid: 42}, dir("f", 0o3775),
			&tar.Header{Name: "busybox-raw", Mode: 0o755, PAXRecords: map[string]string{"SCHILY.xattr.security.capability": setsNetBind}}),
		of(dir("l", 0o755), &tar.Header{Name: "l/f1"}, hard("l/f2", "l/f1"), hard("l/f3", "l/f1"), &tar.Header{Typeflag: tar.TypeSymlink, Name: "l/s", Linkname: "f1", Mode: 0o777},
			hard("l/s2", "l/s"), &tar.Header{Typeflag: tar.TypeFifo, Name: "l/p", Mode: 0o644}, hard("l/p2", "l/p"), &tar.Header{Name: "l/k1"}, hard("l/k2", "l/k1")),
		of(dir("l", 0o755), &tar.Header{Typeflag: tar.TypeReg, Name: "l/f2", Size: 0, Mode: 0o644}, &tar.Header{Name: "l/.wh.f3"}),
	}
	look := func(t *testing.T, b *sandboxtest.Box) {
		t.Run("B03: deletion marks show as nothing, also where there was nothing to delete", func(t *testing.T) {
			if got, want := b.Out(t, "ls -a /data /data/old /none | grep -v '^\\.'; ls -la /data /none >/dev/null; cd /; tar c data none | tar t | sort"),
				"/data:\nkept\nold\n\n/data/old:\ny\n\n/none:\ndata/\ndata/kept\ndata/old/\ndata/old/y\nnone/\n"; got != want {
				t.Errorf("%q, want %q", got, want)
			}
		})
		t.Run("B08: setuid bits, owners and file capabilities are the layer's", func(t *testing.T) {
			if got, want := b.Out(t, "stat -c '%n %a %u:%g' /a /b /f"), "/a 4755 1000:1000\n/b 2755 0:42\n/f 3775 0:0\n"; got != want {
				t.Errorf("%q, want %q", got, want)
			}
			if o, got := b.As(t, "alice", "/busybox-raw grep CapEff /proc/self/status"); o.Kind != sandbox.Exited || o.Code != 0 || strings.TrimSpace(got) != "CapEff:\t0000000000000400" {
				t.Errorf("the capability of a file: %q, %+v", got, o)
			}
		})
		t.Run("B24: hard links are one file, and what a later layer replaces or removes leaves the others", func(t *testing.T) {
			if got, want := b.Out(t, "cd /l; ls | tr '\\n' ' '; stat -c %s f1 f2; head -c 4 f1; readlink s; readlink s2; test -p p2 && echo pipe; test k1 -ef k2 && stat -c %h k1"),
				"f1 f2 k1 k2 p p2 s s2 5242880\n0\n0123f1\nf1\npipe\n2\n"; got != want {
				t.Errorf("%q, want %q", got, want)
			}
		})
	}
	b := sandboxtest.NewBox(t, e, func(s *sandbox.Spec) { s.Layers = append(s.Layers, stack...) })
	look(t, b)
	if !e.Backend.Capabilities().Snapshot {
		return
	}
	t.Run("the same from a snapshot over it", func(t *testing.T) {
		b.Out(t, "echo n >/data/new; rm /data/new; echo x >/srv/x")
		id, err := b.Instance().Snapshot(sandboxtest.Within(t))
		if err != nil {
			t.Fatal(err)
		}
		look(t, sandboxtest.NewBox(t, e, func(s *sandbox.Spec) { s.Layers = append(append(s.Layers, slices.Clone(stack)...), id) }))
	})
}
