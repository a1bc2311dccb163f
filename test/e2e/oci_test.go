package e2e

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// images is a registry in this process, with its blobs on the disk.
func images(t testing.TB) string {
	t.Helper()
	s := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0)), registry.WithBlobHandler(registry.NewDiskBlobHandler(ownDir(t)))))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

func ociLayer(t testing.TB, open func() (io.ReadCloser, error), o ...tarball.LayerOption) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(open, o...)
	must(t, err)
	return l
}

func ociImage(t testing.TB, edit func(*v1.ConfigFile), layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	must(t, err)
	c, err := img.ConfigFile()
	must(t, err)
	c = c.DeepCopy()
	c.OS, c.Architecture = "linux", runtime.GOARCH
	if edit != nil {
		edit(c)
	}
	img, err = mutate.ConfigFile(img, c)
	must(t, err)
	return img
}

// debianImage is the Debian tree as an image with an application on top.
var debianImage = func(t testing.TB) v1.Image {
	file, err := debianTar()
	must(t, err)
	base := ociLayer(t, func() (io.ReadCloser, error) { return os.Open(file) }, tarball.WithCompression(compression.None), tarball.WithMediaType(types.OCIUncompressedLayer))
	// No entry for /tmp and /home/alice: they stay as they are below.
	app := tarOf(entry{name: "app/", kind: '5'}, entry{name: "app/hello", mode: 0o755, data: "#!/bin/sh\necho hello $WHO from $(pwd) as $(id -un) \"$@\"\n"},
		entry{name: "tmp/left", data: "l"}, entry{name: "home/alice/note", data: "n"}, entry{name: "etc/.wh.motd"})
	return ociImage(t, func(c *v1.ConfigFile) {
		c.Config = v1.Config{User: "alice", Env: []string{"PATH=/app:/usr/bin:/bin", "WHO=world"}, WorkingDir: "/app", Entrypoint: []string{"/app/hello"}, Cmd: []string{"there"}, Labels: map[string]string{"a": "b"}}
	}, base, ociLayer(t, func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(app)), nil }))
}

func TestImages(t *testing.T) {
	t.Parallel()
	s := shared(t)
	host := images(t)
	img := debianImage(t)
	ref, err := name.ParseReference(host + "/lab/debian:v1")
	must(t, err)
	must(t, remote.Write(ref, img))

	// Eight at once name an image that nobody has imported.
	var wg sync.WaitGroup
	var boxes [8]*client.Sandbox
	for i := range boxes {
		wg.Add(1)
		go func() {
			defer wg.Done()
			sb, err := s.tryBox(t, func(o *client.Options) { o.Image, o.Memory = ref.String(), 512<<20 })
			if err != nil {
				t.Errorf("create: %v", err)
				return
			}
			boxes[i] = sb
		}()
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	sb := boxes[0]
	want(t, exe(t, sb, client.Cmd{Argv: []string{"hello", "x"}}), 0, "hello world from /app as alice x\n", "")
	want(t, exe(t, sb, client.Cmd{Argv: []string{"stat", "-c", "%n %a %U", "/tmp", "/home/alice", "/tmp/left"}}), 0, "/tmp 1777 root\n/home/alice 755 alice\n/tmp/left 644 root\n", "")
	want(t, exe(t, sb, sh("python3 -c 'import json, http.client; print(json.dumps(1))'; sudo -n id -u")), 0, "1\n0\n", "")
	for _, b := range boxes[1:] {
		if b.Data.Environment != sb.Data.Environment || len(b.Data.Layers) != len(sb.Data.Layers) {
			t.Errorf("%s is of %s %v, the first of %s %v", b.ID, b.Data.Environment, b.Data.Layers, sb.Data.Environment, sb.Data.Layers)
		}
	}
	// The image's own program, only when asked for.
	box := s.box(t, func(o *client.Options) { o.Image, o.ImageEntry = ref.String(), true })
	deadline := time.Now().Add(patience)
	for {
		must(t, box.Refresh(within(t)))
		if st := box.Data.State; st != "running" && st != "creating" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the sandbox outlives its entrypoint")
		}
		time.Sleep(20 * time.Millisecond)
	}
	if c := box.Data.Cause; c.Class != "task" {
		t.Errorf("cause %v", c)
	}

	// What is refused, and how it is told.
	for what, c := range map[string]struct {
		edit func(*client.Options)
		kind error
		word string
	}{
		"not there":       {func(o *client.Options) { o.Image = host + "/lab/none:v1" }, client.ErrNotFound, "lab/none"},
		"no reference":    {func(o *client.Options) { o.Image = "Not A/Ref" }, client.ErrInvalid, "python:3.12"},
		"both":            {func(o *client.Options) { o.Image, o.Layers = ref.String(), []string{s.small(t)} }, client.ErrInvalid, "give one"},
		"nobody answers":  {func(o *client.Options) { o.Image = "127.0.0.1:1/x:y" }, client.ErrUnavailable, "127.0.0.1:1"},
		"metadata server": {func(o *client.Options) { o.Image = "169.254.169.254/x:y" }, client.ErrDenied, "no registry"},
	} {
		_, err := s.tryBox(t, c.edit)
		if err == nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s: %v", what, err)
		}
	}
	arm := ociImage(t, func(c *v1.ConfigFile) { c.Architecture = "s390x" })
	other, err := name.ParseReference(host + "/lab/other:v1")
	must(t, err)
	must(t, remote.Write(other, arm))
	if _, err := s.tryBox(t, func(o *client.Options) { o.Image = other.String() }); !errors.Is(err, client.ErrUnsupported) || !strings.Contains(err.Error(), "linux/s390x") {
		t.Errorf("another machine's image: %v", err)
	}
}

func TestImageCommands(t *testing.T) {
	t.Parallel()
	s := shared(t)
	host := images(t)
	dir := t.TempDir()
	small, err := smallRoot()
	must(t, err)
	var refs []string
	for i := range 5 {
		mark := tarOf(entry{name: "mark", data: fmt.Sprint(i)})
		img := ociImage(t, nil, ociLayer(t, func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(small)), nil }), ociLayer(t, func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(mark)), nil }))
		ref, err := name.ParseReference(fmt.Sprintf("%s/bulk/i%d:v1", host, i))
		must(t, err)
		must(t, remote.Write(ref, img))
		refs = append(refs, ref.String())
	}
	run := func(code int, args ...string) string {
		t.Helper()
		var stdout, stderr bytes.Buffer
		cmd := s.dsec(args...)
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != code {
			t.Fatalf("dsec %q: %v, want code %d\n%s%s", args, err, code, stdout.String(), stderr.String())
		}
		return stdout.String()
	}
	list, report := filepath.Join(dir, "refs"), filepath.Join(dir, "report")
	must(t, os.WriteFile(list, []byte("# images\n"+strings.Join(append(refs, host+"/bulk/none:v1", refs[0]), "\n")+"\n"), 0o644))
	run(1, "image", "import", "--from", list, "--report", report, "--retries", "0")
	lines := func() (done, failed int) {
		b, err := os.ReadFile(report)
		must(t, err)
		for _, l := range strings.Split(strings.TrimSpace(string(b)), "\n") {
			var o struct{ Ref, Status, Environment, Code string }
			must(t, json.Unmarshal([]byte(l), &o))
			if o.Status == "done" && o.Environment != "" {
				done++
			} else if o.Status == "failed" && o.Code == "not_found" {
				failed++
			}
		}
		return
	}
	if done, failed := lines(); done != 5 || failed != 1 {
		t.Errorf("%d done, %d failed", done, failed)
	}
	// What is done is skipped, also behind a line that was cut off.
	f, err := os.OpenFile(report, os.O_APPEND|os.O_WRONLY, 0)
	must(t, err)
	f.WriteString(`{"ref":"x","sta`)
	f.Close()
	must(t, os.WriteFile(list, []byte(strings.Join(refs, "\n")), 0o644))
	run(0, "image", "import", "--from", list, "--report", report)
	b, _ := os.ReadFile(report)
	if n := strings.Count(string(b), "\n"); n != 7 {
		t.Errorf("%d lines after the second run:\n%s", n, b)
	}
	if out := run(0, "image", "ls", host+"/bulk"); strings.Count(out, "\n") != 6 {
		t.Errorf("listed:\n%s", out)
	}
	if out := run(0, "run", "--image", refs[3], "--", "cat", "/mark"); out != "3" {
		t.Errorf("ran %q", out)
	}
	env := strings.TrimSpace(strings.Split(strings.TrimSpace(run(0, "image", "ls", refs[2])), "\n")[1])
	env = strings.Fields(env)[2]

	// Out and in again, as a file and as a folder.
	archive, folder := filepath.Join(dir, "a.tar"), filepath.Join(dir, "l")
	if out := run(0, "env", "export", env, archive, "--ref", "example.com/back:v1"); !strings.Contains(out, env) || !strings.Contains(out, archive) {
		t.Errorf("exported: %q", out)
	}
	if out := run(0, "-o", "json", "env", "export", env, "oci:"+folder, "--ref", "example.com/folder:v1"); !json.Valid([]byte(out)) || strings.Contains(out, `"octets":0`) {
		t.Errorf("exported, as JSON: %q", out)
	}
	if _, err := s.dsec("image", "import", archive).Output(); err == nil {
		t.Error("an archive without its form was imported")
	}
	idx, err := layout.ImageIndexFromPath(folder)
	must(t, err)
	if m, err := idx.IndexManifest(); err != nil || len(m.Manifests) != 1 {
		t.Errorf("index %+v (%v)", m, err)
	}
	run(0, "image", "import", "docker-archive:"+archive)
	run(0, "image", "import", "oci:"+folder+":example.com/folder:v1", "--name", "localhost/again")
	for _, ref := range []string{"example.com/back:v1", "localhost/again"} {
		if out := run(0, "run", "--image", ref, "--", "cat", "/mark"); out != "2" {
			t.Errorf("%s: ran %q", ref, out)
		}
	}
	stdin, err := os.Open(archive)
	must(t, err)
	defer stdin.Close()
	cmd := s.dsec("image", "import", "docker-archive:-", "--name", "localhost/piped")
	cmd.Stdin = stdin
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("from standard input: %v %s", err, b)
	}
	for _, ref := range append(refs, "example.com/back:v1", "localhost/again", "localhost/piped") {
		run(0, "image", "rm", ref)
	}
	if out := run(0, "image", "ls", host+"/bulk"); strings.Count(out, "\n") != 1 {
		t.Errorf("left:\n%s", out)
	}
	run(125, "image", "rm", refs[0])
}

func TestEnvBuild(t *testing.T) {
	t.Parallel()
	s := shared(t)
	s.debian(t)
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	dsec := func(args ...string) (string, string, int) {
		var stdout, stderr bytes.Buffer
		cmd := s.dsec(args...)
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		cmd.Run()
		return stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()
	}
	kit := func(text string) string {
		r, err := s.client().ImportLayer(within(t), "kit/eb", "test", bytes.NewReader(tarOf(entry{name: "opt/", kind: '5'}, entry{name: "opt/kit", data: text})))
		must(t, err)
		return r.Published
	}
	first := kit("one")
	write("src/main.py", "print('built')\n")
	write("src/sub/data", "d")
	write("src/skip.pyc", "x")
	file := `name = "eb/app"
from = "layer:base/debian"
builder = "root"
user = "alice"
workdir = "/srv/app"
kits = ["kit/eb"]
check = "test \"$(id -un)\" = alice; python3 /srv/app/main.py | grep -qx built; test ! -e /srv/app/skip.pyc"
[env]
GREETING = "hi"
[[step]]
run = """
test "$(pwd)" = /srv/app
echo $GREETING > made
touch /tmp/rubbish; mkdir -p /var/cache/apt/archives; touch /var/cache/apt/archives/x.deb /var/cache/apt/archives/keep.txt
mkdir -p /root/.cache/pip/a; id -un > who
"""
[[step]]
copy = "src"
to = "/srv/app"
owner = "alice"
exclude = ["*.pyc"]
[[step]]
env = { LATER = "yes" }
[[step]]
run = "test $LATER = yes; python3 main.py; chown alice made"
`
	write("dsec.toml", file)
	conf := filepath.Join(dir, "dsec.toml")
	out, log, code := dsec("env", "build", "-f", conf)
	if code != 0 || !strings.HasPrefix(out, "eb/app@1 ") || !strings.Contains(out, "3 steps executed, 0 found") || !strings.Contains(log, "built\n") {
		t.Fatalf("code %d\n%s%s", code, out, log)
	}
	sb := s.box(t, func(o *client.Options) { o.Environment, o.Memory = "eb/app", 512<<20 })
	want(t, exe(t, sb, sh("id -un; pwd; echo $GREETING $LATER; cat made who sub/data /opt/kit; stat -c '%U %a' main.py made .; ls /tmp /var/cache/apt/archives | grep -v '^$'")), 0,
		"alice\n/srv/app\nhi yes\nhi\nroot\ndonealice 644\nalice 644\nalice 755\n/tmp:\n/var/cache/apt/archives:\nkeep.txt\nlock\npartial\n", "")

	want(t, exe(t, sb, shAs("root", "test ! -e /root/.cache/pip/a && echo gone")), 0, "gone\n", "")

	// Nothing changed: nothing runs. A copied file changed: what is above it runs again.
	out, log, code = dsec("env", "build", "-f", conf)
	if code != 0 || !strings.Contains(out, "0 steps executed, 3 found") {
		t.Errorf("again: code %d\n%s%s", code, out, log)
	}
	write("src/sub/data", "e")
	out, log, code = dsec("env", "build", "-f", conf)
	if code != 0 || !strings.Contains(out, "2 steps executed, 1 found") {
		t.Errorf("with a changed file: code %d\n%s%s", code, out, log)
	}

	// The folder of the steps is the later user's also where a later step makes that account; one that the base has stays whose it is.
	for workdir, owner := range map[string]string{"/srv/deep/own": "bob", "/srv": "root"} {
		write("bob.toml", fmt.Sprintf("name = \"eb/bob\"\nfrom = \"layer:base/debian\"\nuser = \"bob\"\nworkdir = %q\ncheck = \"test $(stat -c %%U .) = %s -a $(stat -c %%U /srv) = root\"\n"+
			"[[step]]\nrun = \"touch first\"\n[[step]]\nrun = \"useradd -m bob\"\n[[step]]\nrun = \"test -e first; touch last\"\n", workdir, owner))
		if out, log, code := dsec("env", "build", "-f", filepath.Join(dir, "bob.toml")); code != 0 {
			t.Errorf("workdir %s: code %d\n%s%s", workdir, code, out, log)
		}
	}

	// A step that fails says where, shows its output and publishes nothing; so does a check.
	versions := func() int64 {
		r, err := s.client().LayerService.GetEnvironment(within(t), request(&dsecv1.GetEnvironmentRequest{Ref: "eb/app"}))
		must(t, err)
		return r.Msg.Environment.Version
	}
	before := versions()
	write("bad.toml", file+"[[step]]\nrun = \"echo so it goes >&2; exit 7\"\n")
	out, log, code = dsec("env", "build", "-f", filepath.Join(dir, "bad.toml"))
	if code != 1 || out != "" || !strings.Contains(log, "so it goes") || !strings.Contains(log, "step 5 (run echo so it goes >&2; exit 7) exited with 7") {
		t.Errorf("a failing step: code %d\n%s%s", code, out, log)
	}
	write("check.toml", strings.Replace(file, "grep -qx built", "grep -qx else", 1))
	out, log, code = dsec("env", "build", "-f", filepath.Join(dir, "check.toml"))
	if code != 1 || !strings.Contains(log, "check (") {
		t.Errorf("a failing check: code %d\n%s%s", code, out, log)
	}
	if v := versions(); v != before {
		t.Errorf("version %d after failures, %d before", v, before)
	}
	// Secrets are told.
	write("secret.toml", strings.Replace(file, `GREETING = "hi"`, "GREETING = \"hi\"\nHF_TOKEN = \"hf_abcdefghijklmnopqrstuvwxyz\"", 1)+
		"[[step]]\nrun = \"mkdir -p /srv/keys; printf -- '-----BEGIN OPENSSH PRIVATE KEY-----' > /srv/keys/id_ed25519; touch /srv/app/id_rsa\"\n")
	out, log, code = dsec("env", "build", "-f", filepath.Join(dir, "secret.toml"), "--name", "eb/secret", "--fail-secrets")
	if code == 0 || !strings.Contains(log, "variable HF_TOKEN") || !strings.Contains(log, "/srv/keys/id_ed25519") || strings.Contains(log, "/srv/app/id_rsa looks") {
		t.Errorf("secrets: code %d\n%s%s", code, out, log)
	}

	// Another version of the kit on all else.
	second := kit("two")
	old, err := s.client().LayerService.GetEnvironment(within(t), request(&dsecv1.GetEnvironmentRequest{Ref: "eb/app"}))
	must(t, err)
	if out, log, code := dsec("env", "upgrade", "eb/app", "--kit", second); code != 0 {
		t.Fatalf("upgrade: %s%s", out, log)
	}
	now, err := s.client().LayerService.GetEnvironment(within(t), request(&dsecv1.GetEnvironmentRequest{Ref: "eb/app"}))
	must(t, err)
	a, b := old.Msg.Environment.Layers, now.Msg.Environment.Layers
	if len(a) != len(b) || strings.Join(a[:len(a)-1], " ") != strings.Join(b[:len(b)-1], " ") || a[len(a)-1] == b[len(b)-1] {
		t.Errorf("upgrade from %v to %v", a, b)
	}
	if _, log, code := dsec("env", "upgrade", "eb/app", "--kit", "kit/none@1"); code == 0 || !strings.Contains(log, first[:strings.Index(first, "@")]) {
		t.Errorf("a kit that it does not have: %s", log)
	}
	if out, log, code := dsec("env", "alias", "eb/stable=eb/app@1"); code != 0 {
		t.Fatalf("alias: %s%s", out, log)
	}
	box := s.box(t, func(o *client.Options) { o.Environment, o.Memory = "eb/stable", 512<<20 })
	want(t, exe(t, box, sh("cat /opt/kit sub/data")), 0, "oned", "")
	// It goes out as an image, snapshots and all, and comes back as what it was.
	archive := filepath.Join(dir, "out.tar")
	if out, log, code := dsec("env", "export", "eb/app", archive, "--ref", "localhost/eb:v1"); code != 0 {
		t.Fatalf("export: %s%s", out, log)
	}
	if out, log, code := dsec("image", "import", "docker-archive:"+archive); code != 0 {
		t.Fatalf("import: %s%s", out, log)
	}
	back := s.box(t, func(o *client.Options) { o.Image, o.Memory = "localhost/eb:v1", 512<<20 })
	want(t, exe(t, back, sh("id -un; pwd; cat made who sub/data /opt/kit")), 0, "alice\n/srv/app\nhi\nroot\netwo", "")

}

// throughImages makes an image of layers over busybox and runs check in a sandbox of it, then again after it went out as an archive and came
// back, and after all its layers were merged by that they are too many.
func throughImages(t *testing.T, s *service, layers [][]byte, check func(t *testing.T, sb *client.Sandbox)) {
	t.Helper()
	host := images(t)
	small, err := smallRoot()
	must(t, err)
	list := append([][]byte{small}, layers...)
	dir := t.TempDir()
	for _, way := range []string{"as it is", "many layers"} {
		t.Run(way, func(t *testing.T) {
			if way == "many layers" {
				// Each layer's neighbours are so small that all of them become few.
				for i := range 14 {
					list = append(list, tarOf(entry{name: "filler/", kind: tar.TypeDir}, entry{name: fmt.Sprintf("filler/%d", i), data: "f"}))
				}
			}
			var made []v1.Layer
			for _, b := range list {
				made = append(made, ociLayer(t, func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil }))
			}
			ref, err := name.ParseReference(fmt.Sprintf("%s/faults/%d:v1", host, len(list)))
			must(t, err)
			must(t, remote.Write(ref, ociImage(t, nil, made...)))
			sb := s.box(t, func(o *client.Options) { o.Image = ref.String() })
			if n := len(sb.Data.Layers); n > 12 {
				t.Errorf("%d layers", n)
			}
			check(t, sb)
			archive := filepath.Join(dir, strings.ReplaceAll(way, " ", "-")+".tar")
			again := "localhost/faults/" + strings.ToLower(t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]) + fmt.Sprint(time.Now().UnixNano())
			for _, args := range [][]string{{"env", "export", sb.Data.Environment, archive}, {"image", "import", "docker-archive:" + archive, "--name", again}} {
				if b, err := s.dsec(args...).CombinedOutput(); err != nil {
					t.Fatalf("dsec %q: %v %s", args, err, b)
				}
			}
			back := s.box(t, func(o *client.Options) { o.Image = again })
			if d := cmp.Diff(sb.Data.Layers, back.Data.Layers); d != "" {
				t.Errorf("layers after an export: %s", d)
			}
			check(t, back)
		})
	}
}

func TestB03DeletionMarksInImages(t *testing.T) {
	t.Parallel()
	throughImages(t, shared(t), [][]byte{
		tarOf(entry{name: "data/", kind: tar.TypeDir}, entry{name: "data/gone", data: "g"}, entry{name: "data/old/", kind: tar.TypeDir}, entry{name: "data/old/x", data: "x"}),
		tarOf(entry{name: "data/", kind: tar.TypeDir}, entry{name: "data/.wh.gone"}, entry{name: "data/.wh.never"}, entry{name: "data/kept", data: "k"},
			entry{name: "data/old/", kind: tar.TypeDir}, entry{name: "data/old/.wh..wh..opq"}, entry{name: "data/old/y", data: "y"}, entry{name: "none/.wh.x"}),
	}, func(t *testing.T, sb *client.Sandbox) {
		want(t, exe(t, sb, sh("ls -a /data /data/old /none 2>&1 | grep -v '^\\.'")), 0, "/data:\nkept\nold\n\n/data/old:\ny\n\n/none:\n", "")
		want(t, exe(t, sb, sh("tar c data none | tar t | sort")), 0, "data/\ndata/kept\ndata/old/\ndata/old/y\nnone/\n", "")
	})
}

func TestB08OwnersInImages(t *testing.T) {
	t.Parallel()
	throughImages(t, shared(t), [][]byte{tarOf(
		entry{name: "a", mode: 0o4755, uid: 1000, gid: 1000, data: "a"}, entry{name: "b", mode: 0o2755, gid: 42, data: "b"},
		entry{name: "c", mode: 0o755, data: "c", xattr: map[string]string{"security.capability": netRaw}}, entry{name: "f/", kind: tar.TypeDir, mode: 0o3775, uid: 5, gid: 6}),
	}, func(t *testing.T, sb *client.Sandbox) {
		want(t, exe(t, sb, sh("stat -c '%n %a %u:%g' /a /b /c /f")), 0, "/a 4755 1000:1000\n/b 2755 0:42\n/c 755 0:0\n/f 3775 5:6\n", "")
		// What a file capability is inside: version 2, as in the image, whatever range of uids the sandbox has.
		var tree bytes.Buffer
		if _, err := sb.Files().Download(within(t), "/c", &tree); err != nil {
			t.Fatal(err)
		}
		h, err := tar.NewReader(&tree).Next()
		if err != nil || h.PAXRecords["SCHILY.xattr.security.capability"] != netRaw {
			t.Errorf("capability of /c: %+v (%v)", h, err)
		}
	})
}

func TestB24HardLinksInImages(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("0123456789abcdef", 5<<20/16)
	throughImages(t, shared(t), [][]byte{
		tarOf(entry{name: "l/", kind: tar.TypeDir}, entry{name: "l/f1", data: big}, entry{name: "l/f2", kind: tar.TypeLink, link: "l/f1"}, entry{name: "l/f3", kind: tar.TypeLink, link: "l/f1"},
			entry{name: "l/s", kind: tar.TypeSymlink, mode: 0o777, link: "f1"}, entry{name: "l/s2", kind: tar.TypeLink, link: "l/s"}, entry{name: "l/p", kind: tar.TypeFifo}, entry{name: "l/p2", kind: tar.TypeLink, link: "l/p"},
			entry{name: "l/k1", data: "k"}, entry{name: "l/k2", kind: tar.TypeLink, link: "l/k1"}),
		tarOf(entry{name: "l/", kind: tar.TypeDir}, entry{name: "l/f2", data: "new"}, entry{name: "l/.wh.f3"}),
	}, func(t *testing.T, sb *client.Sandbox) {
		want(t, exe(t, sb, sh("cd /l; ls | tr '\\n' ' '; stat -c %s f1 f2; cat f2; readlink s; readlink s2; test -p p2 && echo pipe; test k1 -ef k2 && stat -c %h k1")), 0,
			"f1 f2 k1 k2 p p2 s s2 5242880\n3\nnewf1\nf1\npipe\n2\n", "")
	})
	// A link before its target names the entry.
	bad := tarOf(entry{name: "late", kind: tar.TypeLink, link: "target"}, entry{name: "target", data: "t"})
	host := images(t)
	ref, err := name.ParseReference(host + "/faults/bad:v1")
	must(t, err)
	must(t, remote.Write(ref, ociImage(t, nil, ociLayer(t, func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(bad)), nil }))))
	if _, err := shared(t).tryBox(t, func(o *client.Options) { o.Image = ref.String() }); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), `"late"`) {
		t.Errorf("a link before its target: %v", err)
	}
}

// A build that begins with an image keeps what the image says.
func TestEnvBuildFromAnImage(t *testing.T) {
	t.Parallel()
	s := shared(t)
	host := images(t)
	small, err := smallRoot()
	must(t, err)
	ref, err := name.ParseReference(host + "/base/small:v1")
	must(t, err)
	must(t, remote.Write(ref, ociImage(t, func(c *v1.ConfigFile) {
		c.Config = v1.Config{Env: []string{"PATH=/bin", "FROM=image"}, WorkingDir: "/srv", Entrypoint: []string{"sh"}, Cmd: []string{"-c", "true"}}
	}, ociLayer(t, func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(small)), nil }))))
	conf := filepath.Join(t.TempDir(), "dsec.toml")
	must(t, os.WriteFile(conf, []byte("name='eb/image'\nfrom='image:"+ref.String()+"'\ncheck='test $FROM$MORE = imageyes'\n[[step]]\nenv={MORE='yes'}\n[[step]]\nrun='pwd >/made; exit'\n"), 0o644))
	if b, err := s.dsec("env", "build", "-f", conf).CombinedOutput(); err != nil {
		t.Fatalf("build: %v %s", err, b)
	}
	sb := s.box(t, func(o *client.Options) { o.Environment = "eb/image" })
	want(t, exe(t, sb, sh("cat /made; pwd; echo $FROM $MORE")), 0, "/srv\n/srv\nimage yes\n", "")
	r, err := s.client().LayerService.GetEnvironment(within(t), request(&dsecv1.GetEnvironmentRequest{Ref: "eb/image"}))
	must(t, err)
	if i := r.Msg.Environment.Image; i.GetRef() != ref.String() || len(i.Entrypoint) != 1 || len(i.Cmd) != 2 {
		t.Errorf("image %v", i)
	}
	// Many at once, by one call.
	made, failed, err := s.client().RunContainers(within(t), client.Options{Image: ref.String(), Memory: 64 << 20, Disk: 16 << 20}, 20, true)
	must(t, err)
	for _, sb := range made {
		t.Cleanup(func() { sb.Close() })
	}
	if len(made) != 20 || len(failed) != 0 {
		t.Errorf("%d made, %d failed", len(made), len(failed))
	}
}

// An image that was imported into a store that is not local starts with a small part of it fetched; so does a volume, and an export reads it
// back whole.
func TestImagesOnDemand(t *testing.T) {
	s := onDemand(t, newRemote(t), "")
	host := images(t)
	ref, err := name.ParseReference(host + "/lab/debian:v1")
	must(t, err)
	must(t, remote.Write(ref, debianImage(t)))
	if b, err := s.dsec("image", "import", ref.String()).CombinedOutput(); err != nil {
		t.Fatalf("import: %v %s", err, b)
	}
	data, sum := bigLayer(t, s, 7, 24)
	sb := s.box(t, func(o *client.Options) {
		o.Image, o.Memory, o.Volumes = ref.String(), 512<<20, map[string]string{"/data": data}
	})
	want(t, exe(t, sb, sh("python3 -c 'import json, http.client; print(1)'")), 0, "1\n", "")
	r, err := s.client().ImageService.GetImage(within(t), request(&dsecv1.GetImageRequest{Ref: ref.String()}))
	must(t, err)
	fetched := s.blobStats(t).Fetched
	t.Logf("%d of %d octets were fetched for a first python", fetched, r.Msg.Image.Octets)
	if fetched == 0 || fetched > r.Msg.Image.Octets/2 {
		t.Errorf("%d of %d octets were fetched", fetched, r.Msg.Image.Octets)
	}
	if got := strings.Fields(out(t, sb, "sha256sum /data/srv/big"))[0]; got != sum {
		t.Errorf("volume: sum %s, want %s", got, sum)
	}
	h := sha256.New()
	if err := s.client().ExportImage(within(t), r.Msg.Image.Environment, "localhost/x:v1", h); err != nil {
		t.Error(err)
	}
	again := sha256.New()
	if err := s.client().ExportImage(within(t), r.Msg.Image.Environment, "localhost/x:v1", again); err != nil || !bytes.Equal(h.Sum(nil), again.Sum(nil)) {
		t.Errorf("two exports differ (%v)", err)
	}
}

// A mirror of the config file is asked for a registry that nobody reaches, with the credentials of a docker config.
func TestImageSettings(t *testing.T) {
	t.Parallel()
	registryOf := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if u, p, _ := q.BasicAuth(); q.Method == http.MethodGet && (u != "u" || p != "pass") {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		mirror.ServeHTTP(w, q)
	}))
	t.Cleanup(registryOf.Close)
	host := strings.TrimPrefix(registryOf.URL, "http://")
	small, err := smallRoot()
	must(t, err)
	ref, err := name.ParseReference(host + "/hub/lab/small:v1")
	must(t, err)
	must(t, remote.Write(ref, ociImage(t, nil, ociLayer(t, func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(small)), nil })), remote.WithAuth(&authn.Basic{Username: "u", Password: "pass"})))
	docker := filepath.Join(t.TempDir(), "config.json")
	must(t, os.WriteFile(docker, []byte(`{"auths":{"`+host+`":{"auth":"dTpwYXNz"}}}`), 0o600))
	s := newService(ownDir(t), "up", withDefaults(nil)...)
	s.conf = fmt.Sprintf("[images]\nmirrors = { \"registry.invalid\" = [\"%s/hub\"] }\nrecheck = \"1m\"\nparallel = 2\ncredentials = \"%s\"\n", host, docker)
	start(t, s)
	sb := s.box(t, func(o *client.Options) { o.Image = "registry.invalid/lab/small:v1" })
	if got := out(t, sb, "echo hello"); got != "hello\n" {
		t.Errorf("hello: %q", got)
	}
	must(t, sb.Stop(within(t)))
}

var mirror = registry.New(registry.Logger(log.New(io.Discard, "", 0)))
