package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	ggcrlayout "github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// load imports a local image as the command does.
func (r *rig) load(l *Local, ref string) (*Image, error) {
	ctx := within(r.t)
	missing, err := r.Missing(ctx, "default", l.DiffIDs)
	if err != nil {
		return nil, err
	}
	for i, d := range l.DiffIDs {
		for _, m := range missing {
			if m != d {
				continue
			}
			in, err := l.Layer(ctx, i)
			if err != nil {
				return nil, err
			}
			_, err = r.PushLayer(ctx, "default", d, in)
			in.Close()
			if err != nil {
				return nil, err
			}
			break
		}
	}
	return r.Put(ctx, "default", ref, l.Config, l.Digest)
}

func mustLoad(t *testing.T, r *rig, kind, file, tag, ref string) *Image {
	t.Helper()
	l, err := OpenLocal(within(t), kind, file, tag, "amd64")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if ref == "" {
		ref = l.Name
	}
	i, err := r.load(l, ref)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func TestLayoutFolder(t *testing.T) {
	dir := t.TempDir()
	p, err := ggcrlayout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	one, other := imageOf(t, nil, two...), imageOf(t, nil, two[1])
	for ref, img := range map[string]v1.Image{"docker.io/library/app:v1": one, "v2": other} {
		if err := p.AppendImage(img, ggcrlayout.WithAnnotations(map[string]string{annotationRef: ref})); err != nil {
			t.Fatal(err)
		}
	}
	r := newRig(t, Config{})
	got := mustLoad(t, r, "oci", dir, "v1", "")
	if d, _ := one.Digest(); got.Digest != d.String() || got.Ref != "docker.io/library/app:v1" || len(got.Layers) != 2 {
		t.Errorf("%+v", got)
	}
	// A create that names it asks no registry.
	if again, err := r.Pull(within(t), "default", Pull{Ref: "app:v1"}); err != nil || again.Environment != got.Environment {
		t.Errorf("by its short name: %+v, %v", again, err)
	}
	if _, err := OpenLayout(within(t), dir, "", "amd64"); !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), "v2") {
		t.Errorf("no tag of two: %v", err)
	}
	if _, err := OpenLayout(within(t), dir, "v3", "amd64"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("a tag that is not there: %v", err)
	}
	if _, err := OpenLayout(within(t), dir, "v2", "arm64"); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("for another machine: %v", err)
	}
	if kind, file, tag, ok := ParseLocal("oci:" + dir + ":v1"); kind != "oci" || file != dir || tag != "v1" || !ok {
		t.Errorf("parsed as %s %s %s %v", kind, file, tag, ok)
	}
	// A blob that was changed is not taken.
	layers, _ := one.Layers()
	d, _ := layers[0].Digest()
	file := filepath.Join(dir, "blobs/sha256", d.Hex)
	b, _ := os.ReadFile(file)
	b[len(b)/2] ^= 1
	os.WriteFile(file, b, 0o644)
	l, err := OpenLayout(within(t), dir, "v1", "amd64")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := newRig(t, Config{}).load(l, "x:1"); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a changed blob: %v", err)
	}
	// A link out of the folder is not followed.
	os.Remove(file)
	os.Symlink("/etc/passwd", file)
	if _, err := l.Layer(within(t), 0); err == nil {
		t.Error("a link out of the folder was opened")
	}
}

func TestDockerArchives(t *testing.T) {
	dir := t.TempDir()
	img := imageOf(t, func(c *v1.ConfigFile) { c.Config.User = "u" }, two...)
	tag, _ := name.NewTag("org/app:v1")
	written := filepath.Join(dir, "new.tar")
	if err := tarball.WriteToFile(written, tag, img); err != nil {
		t.Fatal(err)
	}
	// What docker wrote before version 25: a folder a layer, a link where one comes again.
	config, _ := img.RawConfigFile()
	var conf map[string]any
	json.Unmarshal(config, &conf)
	ids := conf["rootfs"].(map[string]any)["diff_ids"].([]any)
	conf["rootfs"].(map[string]any)["diff_ids"] = append(ids, ids[0])
	config, _ = json.Marshal(conf)
	sum := fmt.Sprintf("%x", sha256.Sum256(config))
	manifest, _ := json.Marshal([]map[string]any{{"Config": sum + ".json", "RepoTags": []string{"org/old:v1"}, "Layers": []string{"aa/layer.tar", "bb/layer.tar", "cc/layer.tar"}}})
	old := filepath.Join(dir, "old.tar")
	b := tarOf(file{name: "aa/"}, file{name: "aa/VERSION", data: "1.0"}, file{name: "aa/layer.tar", data: string(two[0])}, file{name: "bb/layer.tar", data: string(two[1])},
		file{name: "cc/layer.tar", kind: tar.TypeSymlink, link: "../aa/layer.tar"}, file{name: sum + ".json", data: string(config)}, file{name: "manifest.json", data: string(manifest)}, file{name: "repositories", data: "{}"})
	os.WriteFile(old, b, 0o644)
	zipped := filepath.Join(dir, "old.tar.gz")
	os.WriteFile(zipped, gz(b), 0o644)

	r := newRig(t, Config{})
	got := mustLoad(t, r, "docker-archive", written, "", "")
	if got.Ref != "docker.io/org/app:v1" || len(got.Layers) != 2 {
		t.Errorf("%+v", got)
	}
	for _, f := range []string{old, zipped} {
		i := mustLoad(t, r, "docker-archive", f, "org/old:v1", "")
		if i.Digest != "sha256:"+sum || len(i.Layers) != 2 || i.Layers[1] != got.Layers[0] {
			t.Errorf("%s: %+v", f, i)
		}
	}
	for what, b := range map[string][]byte{
		"no archive":         []byte("hello, this is no tar at all, and it is longer than nothing"),
		"cut off":            b[:len(b)/2],
		"no manifest":        tarOf(file{name: "x", data: "y"}),
		"a layer is missing": tarOf(file{name: sum + ".json", data: string(config)}, file{name: "manifest.json", data: string(manifest)}),
		"links in a circle": tarOf(file{name: "aa/layer.tar", kind: tar.TypeSymlink, link: "../bb/layer.tar"}, file{name: "bb/layer.tar", kind: tar.TypeSymlink, link: "../aa/layer.tar"},
			file{name: sum + ".json", data: string(config)}, file{name: "manifest.json", data: string(manifest)}),
		"out of the archive": tarOf(file{name: "manifest.json", data: `[{"Config":"../../../etc/passwd","Layers":[]}]`}),
		"nothing":            nil,
	} {
		f := filepath.Join(dir, "bad.tar")
		os.WriteFile(f, b, 0o644)
		if _, err := OpenArchive(within(t), f, "", "amd64"); err == nil {
			t.Errorf("%s: was taken", what)
		}
	}
}

func TestPushIsChecked(t *testing.T) {
	r := newRig(t, Config{})
	ctx := within(t)
	id := digestOf(two[0])
	if _, err := r.PushLayer(ctx, "default", id, bytes.NewReader(two[1])); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("another tar: %v", err)
	}
	if _, err := r.PushLayer(ctx, "default", "sha256:x", bytes.NewReader(two[1])); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("no digest: %v", err)
	}
	if _, err := r.PushLayer(ctx, "default", id, bytes.NewReader(two[0])); err != nil {
		t.Fatal(err)
	}
	missing, err := r.Missing(ctx, "default", []string{id, digestOf(two[1])})
	if d := cmp.Diff([]string{digestOf(two[1])}, missing); err != nil || d != "" {
		t.Errorf("%s (%v)", d, err)
	}
	// Another project is not told that it is there, and has to bring it.
	if missing, err := r.Missing(ctx, "other", []string{id}); err != nil || len(missing) != 1 {
		t.Errorf("another project: %v (%v)", missing, err)
	}
	conf, _ := json.Marshal(config{OS: "linux", Architecture: "amd64", RootFS: rootFS{Type: "layers", DiffIDs: []string{id}}})
	if _, err := r.Put(ctx, "other", "x:1", conf, ""); !errors.Is(err, sandbox.ErrState) {
		t.Errorf("a config of layers that it does not have: %v", err)
	}
	if _, err := r.Put(ctx, "default", "x:1", conf, ""); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "{", "[]", `{"os":"windows"}`, `{"os":"linux","architecture":"amd64"}`} {
		if i, err := r.Put(ctx, "default", "x:2", []byte(bad), ""); err == nil {
			t.Errorf("config %q: %+v", bad, i)
		}
	}
}

func TestExportAndBack(t *testing.T) {
	r := newRig(t, Config{}).serve(nil)
	ref := r.push("app:v1", imageOf(t, func(c *v1.ConfigFile) {
		c.Config = v1.Config{User: "1000", Env: []string{"A=b"}, WorkingDir: "/app", Entrypoint: []string{"/app/main"}, Cmd: []string{"x"}, Labels: map[string]string{"l": "m"}}
	}, append(append([][]byte{}, two...), tarOf(file{name: "app/"}, file{name: "app/.wh.main"}, file{name: "etc/"}, file{name: "etc/.wh..wh..opq"}, file{name: "etc/hard", data: "h"},
		file{name: "etc/link", kind: tar.TypeLink, link: "etc/hard"}, file{name: "bin/", mode: 0o755}, file{name: "bin/su", mode: 0o4755, uid: 7, data: "s", xattr: map[string]string{"security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"}}))...))
	first := r.mustPull(Pull{Ref: ref})
	dir := t.TempDir()
	archive := filepath.Join(dir, "out.tar")
	var again bytes.Buffer
	f, err := os.Create(archive)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Export(within(t), "default", first.Environment, "example.com/out:v1", io.MultiWriter(f, &again)); err != nil {
		t.Fatal(err)
	}
	f.Close()
	var twice bytes.Buffer
	if err := r.Export(within(t), "default", first.Environment, "example.com/out:v1", &twice); err != nil || !bytes.Equal(twice.Bytes(), again.Bytes()) {
		t.Errorf("the second export differs (%v)", err)
	}
	// go-containerregistry accepts it as an archive and, unpacked, as a layout.
	img, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Image(img); err != nil {
		t.Error(err)
	}
	folder := filepath.Join(dir, "layout")
	unpack(t, folder, again.Bytes())
	idx, err := ggcrlayout.ImageIndexFromPath(folder)
	if err != nil {
		t.Fatal(err)
	}
	im, err := idx.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	one, err := idx.Image(im.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := one.Layers()
	if err != nil || len(layers) != 3 {
		t.Fatalf("%d layers (%v)", len(layers), err)
	}
	for _, l := range layers {
		rc, err := l.Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		h := sha256.New()
		io.Copy(h, rc)
		rc.Close()
		if d, err := l.DiffID(); err != nil || d.Hex != fmt.Sprintf("%x", h.Sum(nil)) {
			t.Errorf("layer %v: its octets have %x (%v)", d, h.Sum(nil), err)
		}
	}
	for _, way := range []struct{ kind, file string }{{"docker-archive", archive}, {"oci", folder}} {
		fresh := newRig(t, Config{})
		i := mustLoad(t, fresh, way.kind, way.file, "", "")
		if d := cmp.Diff(first.Layers, i.Layers); d != "" || i.Ref != "example.com/out:v1" {
			t.Errorf("%s: %s, %s", way.kind, i.Ref, d)
		}
		want := first.Config
		want.Ref, want.Digest = i.Config.Ref, i.Config.Digest
		if d := cmp.Diff(want, i.Config); d != "" {
			t.Errorf("%s: config: %s", way.kind, d)
		}
		e, err := fresh.layers.Resolve(within(t), "default", i.Environment)
		if err != nil || e.Spec.User != "1000" || e.Spec.Cwd != "/app" || !cmp.Equal(e.Spec.Env, []string{"A=b"}) {
			t.Errorf("%s: %+v (%v)", way.kind, e.Spec, err)
		}
	}
	if err := r.Export(within(t), "other", first.Environment, "", io.Discard); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("another project exported it: %v", err)
	}
}

func unpack(t *testing.T, dir string, b []byte) {
	t.Helper()
	for tr := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		p := filepath.Join(dir, h.Name)
		if h.Typeflag == tar.TypeDir {
			err = os.MkdirAll(p, 0o755)
		} else {
			data, _ := io.ReadAll(tr)
			err = os.WriteFile(p, data, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestManyLayersBecomeTwelve(t *testing.T) {
	r := newRig(t, Config{}).serve(nil)
	var tars [][]byte
	for i := range 40 {
		tars = append(tars, tarOf(file{name: fmt.Sprintf("f%d", i), data: strings.Repeat("x", 1000*(i%7+1))}, file{name: "same", data: fmt.Sprint(i)}))
	}
	tars[0] = tarOf(file{name: "big", data: strings.Repeat("y", 5<<20)}, file{name: "tmp/", mode: 0o1777})
	got := r.mustPull(Pull{Ref: r.push("many:1", imageOf(t, nil, tars...))})
	if len(got.Layers) != maxStack {
		t.Errorf("%d layers", len(got.Layers))
	}
	single := r.mustPull(Pull{Ref: r.push("one:1", imageOf(t, nil, tars[0]))})
	if single.Layers[0] != got.Layers[0] {
		t.Error("the large layer was merged, so nobody shares it")
	}
	before, err := r.layers.Layers(within(t), "default")
	if err != nil {
		t.Fatal(err)
	}
	// The same layers under another name are not merged again.
	again := r.mustPull(Pull{Ref: r.push("many:2", imageOf(t, func(c *v1.ConfigFile) { c.Author = "x" }, tars...))})
	after, err := r.layers.Layers(within(t), "default")
	if err != nil || !cmp.Equal(again.Layers, got.Layers) || len(after) != len(before) {
		t.Errorf("%d layers before, %d after (%v)", len(before), len(after), err)
	}
}

func FuzzArchive(f *testing.F) {
	f.Add(tarOf(file{name: "manifest.json", data: `[{"Config":"c","Layers":["l"]}]`}, file{name: "c", data: `{"rootfs":{"diff_ids":[]}}`}))
	f.Fuzz(func(t *testing.T, b []byte) {
		file := filepath.Join(t.TempDir(), "a")
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if l, err := OpenArchive(context.Background(), file, "", "amd64"); err == nil {
			for i := range l.DiffIDs {
				if r, err := l.Layer(context.Background(), i); err == nil {
					io.Copy(io.Discard, r)
					r.Close()
				}
			}
			l.Close()
		}
	})
}
