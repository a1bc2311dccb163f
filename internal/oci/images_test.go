package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"bytes"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/compression"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	ggcr "github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/store"
)

func TestParseRef(t *testing.T) {
	d := "sha256:" + strings.Repeat("ab", 32)
	for in, want := range map[string]struct{ ref, env string }{
		"python":                               {"docker.io/library/python:latest", "docker.io/library/python/latest"},
		"python:3.12-slim":                     {"docker.io/library/python:3.12-slim", "docker.io/library/python/3.12-slim"},
		"docker.io/library/python:3.12":        {"docker.io/library/python:3.12", "docker.io/library/python/3.12"},
		"index.docker.io/library/python":       {"docker.io/library/python:latest", "docker.io/library/python/latest"},
		"org/app":                              {"docker.io/org/app:latest", "docker.io/org/app/latest"},
		"ghcr.io/org/app:v1":                   {"ghcr.io/org/app:v1", "ghcr.io/org/app/v1"},
		"ghcr.io/org/app:v1@" + d:              {"ghcr.io/org/app@" + d, "ghcr.io/org/app/sha256-" + strings.Repeat("ab", 24)},
		"localhost:5000/app":                   {"localhost:5000/app:latest", "localhost.5000.h-b94b42cb65/app/latest"},
		"ghcr.io/a/b/c/d:X_1":                  {"ghcr.io/a/b/c/d:X_1", "ghcr.io/a/b.c.d.h-6e2c9f6a44/x_1.h-1bff2f4f70"},
		"x:sha256-" + strings.Repeat("ab", 24): {"docker.io/library/x:sha256-" + strings.Repeat("ab", 24), ""},
		"127.0.0.1:5000/a":                     {"127.0.0.1:5000/a:latest", ""},
	} {
		r, err := ParseRef(in)
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if r.String() != want.ref {
			t.Errorf("%s: got %s, want %s", in, r, want.ref)
		}
		again, err := ParseRef(r.String())
		if err != nil || again != r {
			t.Errorf("%s: %v is read again as %v (%v)", in, r, again, err)
		}
		env := r.EnvName()
		if want.env != "" && !strings.Contains(want.env, ".h-") && env != want.env {
			t.Errorf("%s: environment %s, want %s", in, env, want.env)
		}
		if strings.Contains(want.env, ".h-") && !strings.Contains(env, ".h-") {
			t.Errorf("%s: environment %s says less than the reference", in, env)
		}
	}
	for _, in := range []string{"", "UPPER/x", "a//b", "x@sha256:12", "x@md5:00", "http://x/y", "x:", "../x", "a/../b", "x y", strings.Repeat("a", 2000), "ghcr.io/-a", "x@" + d + "@" + d} {
		if r, err := ParseRef(in); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%.40q: got %v, %v", in, r, err)
		}
	}
}

func TestEnvNamesDiffer(t *testing.T) {
	seen := map[string]string{}
	for _, in := range []string{"a/b.c/d", "g.io/a/b/c", "g.io/a/b.c", "g.io/a/b__c", "g.io/a.b/c", "x:A", "x:a", "x:a.", "x:a-", "x:a_", "g.io:1/x", "g.io.1/x", "x:sha256-" + strings.Repeat("a", 48),
		"x@sha256:" + strings.Repeat("a", 64), "x:" + strings.Repeat("a", 100), "x:" + strings.Repeat("a", 101), "x:_", "x:__"} {
		r, err := ParseRef(in)
		if err != nil {
			t.Fatal(err)
		}
		n := r.EnvName()
		if other, twice := seen[n]; twice {
			t.Errorf("%s and %s are both %s", in, other, n)
		}
		seen[n] = in
		// One that looks like another's.
		if parts := strings.Split(n, "/"); strings.Contains(parts[len(parts)-1], ".h-") {
			if r, err := ParseRef("x:" + parts[len(parts)-1]); err == nil && r.EnvName() == n {
				t.Errorf("the tag of %s gives its name again", n)
			}
		}
	}
}

func FuzzParseRef(f *testing.F) {
	for _, s := range []string{"python", "a/b:c", "localhost:5000/x@sha256:" + strings.Repeat("0", 64), "[::1]:5000/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRef(s)
		if err != nil {
			return
		}
		if again, err := ParseRef(r.String()); err != nil || again != r {
			t.Fatalf("%q: %v is read again as %v (%v)", s, r, again, err)
		}
		r.EnvName()
	})
}

var two = [][]byte{
	tarOf(file{name: "etc/"}, file{name: "etc/passwd", data: "root:x:0:0::/:/bin/sh\n"}, file{name: "tmp/", mode: 0o1777}),
	tarOf(file{name: "app/"}, file{name: "app/main", data: "hello", mode: 0o755}),
}

func TestPull(t *testing.T) {
	r := newRig(t, Config{}).serve(nil)
	ref := r.push("org/app:v1", imageOf(t, func(c *v1.ConfigFile) {
		c.Config = v1.Config{User: "1000:100", Env: []string{"PATH=/app:/bin", "BROKEN", "A=b=c"}, WorkingDir: "/app", Entrypoint: []string{"/app/main"}, Cmd: []string{"-x"}, Labels: map[string]string{"k": "v"}}
	}, two...))
	var states sync.Map
	got := r.mustPull(Pull{Ref: ref, Progress: func(e Event) { states.Store(e.Layer+e.State, e) }})
	if got.Existed || len(got.Layers) != 2 || !strings.HasPrefix(got.Environment, "127.0.0.1.") {
		t.Errorf("pulled %+v", got)
	}
	e, err := r.layers.Resolve(within(t), "default", got.Environment)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"PATH=/app:/bin", "A=b=c"}, e.Spec.Env); d != "" || e.Spec.User != "1000:100" || e.Spec.Cwd != "/app" {
		t.Errorf("environment %+v: %s", e.Spec, d)
	}
	if i := e.Spec.Image; i == nil || i.Ref != ref || i.Digest != got.Digest || !cmp.Equal(i.Entrypoint, []string{"/app/main"}) || !cmp.Equal(i.Cmd, []string{"-x"}) || i.Labels["k"] != "v" {
		t.Errorf("image %+v", i)
	}
	// Again: nobody is asked.
	r.server.Close()
	again := r.mustPull(Pull{Ref: ref})
	if again.Environment != got.Environment || !again.Existed || !cmp.Equal(again.Layers, got.Layers) {
		t.Errorf("again: %+v", again)
	}
	if _, err := r.Pull(within(t), "default", Pull{Ref: ref, Policy: PullAlways}); err != nil {
		t.Errorf("always, within the time that a tag is believed: %v", err)
	}
	r.now = func() time.Time { return time.Now().Add(time.Hour) }
	if _, err := r.Pull(within(t), "default", Pull{Ref: ref, Policy: PullAlways}); !errors.Is(err, ErrRegistry) {
		t.Errorf("always, with the registry gone: %v", err)
	}
	// A project below sees it, one beside it does not.
	if _, err := r.Get(within(t), "default/team", ref); err != nil {
		t.Error(err)
	}
	if _, err := r.Get(within(t), "other", ref); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("another project: %v", err)
	}
	if err := r.Remove(within(t), "default", ref); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Get(within(t), "default", ref); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("after removal: %v", err)
	}
	if held, err := r.layers.Layers(within(t), "default"); err != nil || len(held) != 0 {
		t.Errorf("after removal %d layers are held (%v)", len(held), err)
	}
}

func TestTagMoves(t *testing.T) {
	var manifests atomic.Int64
	r := newRig(t, Config{}).serve(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.Method == http.MethodGet && strings.Contains(q.URL.Path, "/manifests/") {
				manifests.Add(1)
			}
			h.ServeHTTP(w, q)
		})
	})
	ref := r.push("app:v1", imageOf(t, nil, two...))
	first := r.mustPull(Pull{Ref: ref})
	r.push("app:v1", imageOf(t, nil, two[0], tarOf(file{name: "app/"}, file{name: "app/main", data: "newer"})))
	if got := r.mustPull(Pull{Ref: ref}); got.Environment != first.Environment {
		t.Errorf("missing took the moved tag: %+v", got)
	}
	asked := manifests.Load()
	for range 5 {
		if got := r.mustPull(Pull{Ref: ref, Policy: PullAlways}); got.Environment != first.Environment {
			t.Errorf("asked too early: %+v", got)
		}
	}
	if n := manifests.Load(); n != asked {
		t.Errorf("the registry was asked %d times within the time that a tag is believed", n-asked)
	}
	r.now = func() time.Time { return time.Now().Add(6 * time.Minute) }
	second := r.mustPull(Pull{Ref: ref, Policy: PullAlways})
	if second.Digest == first.Digest || second.Environment == first.Environment || second.Layers[0] != first.Layers[0] {
		t.Errorf("moved tag: first %+v, then %+v", first, second)
	}
	// Nothing new is no new version.
	r.now = func() time.Time { return time.Now().Add(20 * time.Minute) }
	if third := r.mustPull(Pull{Ref: ref, Policy: PullAlways}); third.Environment != second.Environment {
		t.Errorf("the same image became %s after %s", third.Environment, second.Environment)
	}
}

func TestManyAtOnceFetchOnce(t *testing.T) {
	var blobs sync.Map
	r := newRig(t, Config{}).serve(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.Method == http.MethodGet && strings.Contains(q.URL.Path, "/blobs/") {
				n, _ := blobs.LoadOrStore(q.URL.Path[strings.LastIndex(q.URL.Path, "/"):], new(atomic.Int64))
				n.(*atomic.Int64).Add(1)
				time.Sleep(10 * time.Millisecond)
			}
			h.ServeHTTP(w, q)
		})
	})
	img := imageOf(t, nil, two...)
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	var refs []string
	for i := range 6 {
		refs = append(refs, r.push(fmt.Sprintf("app%d:v1", i), img))
	}
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			project := []string{"default", "other"}[i%2]
			if _, err := r.Pull(within(t), project, Pull{Ref: refs[i%len(refs)]}); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	for _, l := range layers {
		d, _ := l.Digest()
		if n, ok := blobs.Load("/" + d.String()); !ok || n.(*atomic.Int64).Load() != 1 {
			t.Errorf("layer %s was fetched %v times", d, n)
		}
	}
}

func TestIndexAndArchitecture(t *testing.T) {
	r := newRig(t, Config{}).serve(nil)
	arm := imageOf(t, func(c *v1.ConfigFile) { c.Architecture = "arm64" }, two[0])
	amd := imageOf(t, nil, two...)
	push := func(tag string, adds ...mutate.IndexAddendum) string {
		ref, err := name.ParseReference(r.host + "/multi:" + tag)
		if err != nil {
			t.Fatal(err)
		}
		if err := ggcr.WriteIndex(ref, mutate.AppendManifests(empty.Index, adds...)); err != nil {
			t.Fatal(err)
		}
		return ref.String()
	}
	on := func(img mutate.Appendable, os, arch, variant string) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: os, Architecture: arch, Variant: variant}}}
	}
	digest := func(i v1.Image) string { d, _ := i.Digest(); return d.String() }
	if got := r.mustPull(Pull{Ref: push("both", on(arm, "linux", "arm64", "v8"), on(amd, "linux", "amd64", ""), on(arm, "unknown", "unknown", ""))}); got.Digest != digest(amd) {
		t.Errorf("picked %s", got.Digest)
	}
	newer := imageOf(t, func(c *v1.ConfigFile) { c.Author = "v3" }, two...)
	if got := r.mustPull(Pull{Ref: push("variants", on(newer, "linux", "amd64", "v3"), on(amd, "linux", "amd64", "v1"))}); got.Digest != digest(amd) {
		t.Errorf("picked %s of the variants", got.Digest)
	}
	nested := mutate.AppendManifests(empty.Index, on(amd, "linux", "amd64", ""))
	if got := r.mustPull(Pull{Ref: push("nested", mutate.IndexAddendum{Add: nested})}); got.Digest != digest(amd) {
		t.Errorf("picked %s of the nested index", got.Digest)
	}
	_, err := r.Pull(within(t), "default", Pull{Ref: push("none", on(arm, "linux", "arm64", "v8"), on(arm, "linux", "s390x", ""))})
	if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "linux/arm64/v8, linux/s390x") {
		t.Errorf("nothing fits: %v", err)
	}
	_, err = r.Pull(within(t), "default", Pull{Ref: r.push("single:arm", arm)})
	if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "linux/arm64") {
		t.Errorf("a single image of another machine: %v", err)
	}
	deep := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: nested})})})
	if _, err = r.Pull(within(t), "default", Pull{Ref: push("deep", mutate.IndexAddendum{Add: deep})}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("indexes without end: %v", err)
	}
}

func TestCompressions(t *testing.T) {
	r := newRig(t, Config{}).serve(nil)
	var layers []v1.Layer
	for _, o := range [][]tarball.LayerOption{{tarball.WithCompression(compression.GZip)}, {tarball.WithCompression(compression.ZStd), tarball.WithMediaType(types.OCILayerZStd)}, {tarball.WithCompression(compression.None), tarball.WithMediaType(types.OCIUncompressedLayer)}} {
		n := len(layers)
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(tarOf(file{name: fmt.Sprintf("f%d", n), data: strings.Repeat("x", 100000)}))), nil
		}, o...)
		if err != nil {
			t.Fatal(err)
		}
		layers = append(layers, l)
	}
	if got := r.mustPull(Pull{Ref: r.push("z:1", imageFrom(t, nil, layers...))}); len(got.Layers) != 3 {
		t.Errorf("%+v", got)
	}
}

func TestStackOfAnImage(t *testing.T) {
	r := newRig(t, Config{}).serve(nil)
	none := tarOf()
	got := r.mustPull(Pull{Ref: r.push("s:1", imageOf(t, nil, two[0], none, two[1], two[0], none))})
	if len(got.Layers) != 2 {
		t.Errorf("empty and repeated layers stay: %d", len(got.Layers))
	}
	if d, err := r.layers.Descriptor(within(t), got.Layers[1]); err != nil || d.Entries != 3 {
		t.Errorf("the layer that came again is not the highest: %+v (%v)", d, err)
	}
	if _, err := r.Pull(within(t), "default", Pull{Ref: r.push("s:2", imageOf(t, nil))}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("an image without layers: %v", err)
	}
}

func TestGroups(t *testing.T) {
	for _, c := range []struct {
		sizes []int64
		n     int
		want  []int
	}{
		{[]int64{9, 1, 1, 9}, 3, []int{1, 2, 1}},
		{[]int64{1, 2, 3}, 3, []int{1, 1, 1}},
		{[]int64{100, 1, 1, 1, 1, 50}, 2, []int{1, 5}},
		{nil, 3, []int{}},
	} {
		if d := cmp.Diff(c.want, groups(c.sizes, c.n)); d != "" {
			t.Errorf("%v: %s", c.sizes, d)
		}
	}
}

// basic is a registry that wants a name and a password.
func basic(user, secret string, seen *atomic.Int64) func(http.Handler) http.Handler {
	return func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.Header.Get("Authorization") != "" && seen != nil {
				seen.Add(1)
			}
			if u, s, ok := q.BasicAuth(); !ok || u != user || s != secret {
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			h.ServeHTTP(w, q)
		})
	}
}

func TestCredentials(t *testing.T) {
	r := newRig(t, Config{}).serve(basic("u", "right", nil))
	ref := r.push("p:1", imageOf(t, nil, two...), &authn.Basic{Username: "u", Password: "right"})
	if _, err := r.Pull(within(t), "default", Pull{Ref: ref}); !errors.Is(err, sandbox.ErrDenied) || !strings.Contains(err.Error(), "dsec image login") {
		t.Errorf("without a credential: %v", err)
	}
	_, err := r.Pull(within(t), "default", Pull{Ref: ref, Credential: Credential{"u", "wr0ng-secret"}})
	if !errors.Is(err, sandbox.ErrDenied) || strings.Contains(err.Error(), "wr0ng") {
		t.Errorf("with a wrong one: %v", err)
	}
	if err := r.PutCredential(within(t), "default", r.host, Credential{"u", "right"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Pull(within(t), "other", Pull{Ref: ref}); !errors.Is(err, sandbox.ErrDenied) {
		t.Errorf("another project used it: %v", err)
	}
	got, err := r.Pull(within(t), "default/team", Pull{Ref: ref})
	if err != nil {
		t.Fatalf("a project below: %v", err)
	}
	// What one project may read is not another's because it lies in the same store.
	if _, err := r.Pull(within(t), "other", Pull{Ref: ref}); !errors.Is(err, sandbox.ErrDenied) {
		t.Errorf("another project got %s: %v", got.Environment, err)
	}
	list, err := r.Credentials(within(t), "default")
	if err != nil || len(list) != 1 || list[0].Host != r.host || list[0].Username != "u" {
		t.Errorf("list %+v (%v)", list, err)
	}
	if err := r.RemoveCredential(within(t), "default", r.host); err != nil {
		t.Fatal(err)
	}
	if err := r.RemoveCredential(within(t), "default", r.host); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("removed twice: %v", err)
	}
}

// token is a registry with a token server of its own, as Docker Hub's.
func TestTokenServer(t *testing.T) {
	var asked atomic.Int64
	r := newRig(t, Config{})
	r.serve(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.URL.Path == "/token" {
				asked.Add(1)
				if u, s, ok := q.BasicAuth(); !ok || u != "u" || s != "right" {
					w.WriteHeader(http.StatusUnauthorized)
					return
				}
				fmt.Fprintf(w, `{"token":"tok-%s"}`, q.URL.Query().Get("scope"))
				return
			}
			if !strings.HasPrefix(q.Header.Get("Authorization"), "Bearer tok-repository:") {
				w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="s"`, q.Host))
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			h.ServeHTTP(w, q)
		})
	})
	ref := r.push("p:1", imageOf(t, nil, two...), &authn.Basic{Username: "u", Password: "right"})
	before := asked.Load()
	r.mustPull(Pull{Ref: ref, Credential: Credential{"u", "right"}})
	if n := asked.Load() - before; n != 1 {
		t.Errorf("%d tokens for one pull", n)
	}
}

func TestCredentialsStayWithTheirRegistry(t *testing.T) {
	var leaked atomic.Int64
	thief := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Header.Get("Authorization") != "" {
			leaked.Add(1)
		}
		w.WriteHeader(http.StatusNotFound)
	}))
	defer thief.Close()
	for what, wrap := range map[string]func(http.ResponseWriter, *http.Request) bool{
		"a realm elsewhere": func(w http.ResponseWriter, q *http.Request) bool {
			w.Header().Set("WWW-Authenticate", `Bearer realm="`+strings.Replace(thief.URL, "127.0.0.1", "localhost", 1)+`/token",service="s"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		},
		"a redirect of blobs": func(w http.ResponseWriter, q *http.Request) bool {
			if _, _, ok := q.BasicAuth(); !ok {
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				w.WriteHeader(http.StatusUnauthorized)
				return true
			}
			if strings.Contains(q.URL.Path, "/blobs/") || strings.Contains(q.URL.Path, "/manifests/") {
				http.Redirect(w, q, strings.Replace(thief.URL, "127.0.0.1", "localhost", 1)+q.URL.Path, http.StatusTemporaryRedirect)
				return true
			}
			return false
		},
	} {
		r := newRig(t, Config{}).serve(func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
				if q.Method == http.MethodGet && !wrap(w, q) {
					h.ServeHTTP(w, q)
				}
			})
		})
		if _, err := r.Pull(within(t), "default", Pull{Ref: r.host + "/p:1", Credential: Credential{"u", "s3cret"}}); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: %v", what, err)
		}
		if n := leaked.Load(); n != 0 {
			t.Errorf("%s: the credential was shown %d times to another host", what, n)
		}
	}
}

func TestNoWayToTheMachinesOwnAddresses(t *testing.T) {
	n := newNetwork(nil)
	for _, host := range []string{"169.254.169.254", "[fe80::1]", "0.0.0.0", "224.0.0.1"} {
		q, _ := http.NewRequest(http.MethodGet, "https://"+host+"/v2/", nil)
		if _, err := (bound{n, host}).RoundTrip(q); !errors.Is(err, sandbox.ErrDenied) {
			t.Errorf("%s: %v", host, err)
		}
	}
	for _, u := range []string{"http://registry.example/v2/", "http://10.0.0.1:5000/v2/", "http://x.local/v2/"} {
		q, _ := http.NewRequest(http.MethodGet, u, nil)
		if _, err := (bound{n, q.URL.Host}).RoundTrip(q); !errors.Is(err, sandbox.ErrDenied) || !strings.Contains(err.Error(), "TLS") {
			t.Errorf("%s: %v", u, err)
		}
	}
	q, _ := http.NewRequest(http.MethodGet, "http://127.0.0.1:1/v2/", nil)
	if _, err := (bound{n, "registry.example"}).RoundTrip(q); !errors.Is(err, sandbox.ErrDenied) {
		t.Errorf("a registry that leads here: %v", err)
	}
}

func TestRateLimit(t *testing.T) {
	var refused atomic.Int64
	r := newRig(t, Config{}).serve(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.Method == http.MethodGet && refused.Add(1)%2 == 1 {
				w.Header().Set("Retry-After", "0")
				w.WriteHeader([]int{http.StatusTooManyRequests, http.StatusServiceUnavailable}[refused.Load()/2%2])
				return
			}
			h.ServeHTTP(w, q)
		})
	})
	r.mustPull(Pull{Ref: r.push("p:1", imageOf(t, nil, two...))})
	if refused.Load() < 6 {
		t.Errorf("only %d requests", refused.Load())
	}
}

func TestRateLimitBeyondPatience(t *testing.T) {
	r := newRig(t, Config{}).serve(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if strings.Contains(q.URL.Path, "/manifests/") && q.Method == http.MethodGet {
				w.Header().Set("Retry-After", "3600")
				w.WriteHeader(http.StatusTooManyRequests)
				return
			}
			h.ServeHTTP(w, q)
		})
	})
	if _, err := r.Pull(within(t), "default", Pull{Ref: r.push("p:1", imageOf(t, nil, two...))}); !errors.Is(err, sandbox.ErrExhausted) || !strings.Contains(err.Error(), "1h0m0s") {
		t.Errorf("got %v", err)
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for in, want := range map[string]time.Duration{"7": 7 * time.Second, "": 0, "-3": 0, "x": 0, "Fri, 02 Jan 2026 03:04:35 GMT": 30 * time.Second, "Fri, 02 Jan 2026 03:04:00 GMT": 0, "99999999999": 0} {
		if got := retryAfter(in, now); got != want {
			t.Errorf("%q: %v, want %v", in, got, want)
		}
	}
}

// breaking cuts answers with blobs after some octets and knows ranges, unless told otherwise.
func breaking(after int, ranges bool, cuts *atomic.Int64) func(http.Handler) http.Handler {
	return func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.Method != http.MethodGet || !strings.Contains(q.URL.Path, "/blobs/") {
				h.ServeHTTP(w, q)
				return
			}
			rec := httptest.NewRecorder()
			plain := q.Clone(q.Context())
			plain.Header.Del("Range")
			h.ServeHTTP(rec, plain)
			body, from := rec.Body.Bytes(), 0
			if ranges {
				fmt.Sscanf(q.Header.Get("Range"), "bytes=%d-", &from)
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(body)-from))
			if from > 0 {
				w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(body)-1, len(body)))
				w.WriteHeader(http.StatusPartialContent)
			}
			rest := body[from:]
			limit := after
			if !ranges { // gets further each time
				limit = after * int(cuts.Load()+1)
			}
			if len(rest) > limit {
				w.Write(rest[:limit])
				w.(http.Flusher).Flush()
				cuts.Add(1)
				panic(http.ErrAbortHandler)
			}
			w.Write(rest)
		})
	}
}

func TestBrokenStreamsGoOn(t *testing.T) {
	noise := make([]byte, 200000)
	x := uint32(1)
	for i := range noise {
		x = x*1664525 + 1013904223
		noise[i] = byte(x >> 24)
	}
	for _, ranges := range []bool{true, false} {
		var cuts atomic.Int64
		r := newRig(t, Config{}).serve(breaking(40000, ranges, &cuts))
		got := r.mustPull(Pull{Ref: r.push("p:1", imageOf(t, nil, tarOf(file{name: "noise", data: string(noise)})))})
		if cuts.Load() < 3 {
			t.Errorf("ranges %v: only %d cuts", ranges, cuts.Load())
		}
		if d, err := r.layers.Descriptor(within(t), got.Layers[0]); err != nil || d.Bytes != int64(len(noise)) {
			t.Errorf("ranges %v: %+v (%v)", ranges, d, err)
		}
	}
}

func TestStreamThatNeverGoesOn(t *testing.T) {
	var cuts atomic.Int64
	r := newRig(t, Config{}).serve(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.Method == http.MethodGet && strings.Contains(q.URL.Path, "/blobs/") && q.Header.Get("Range") != "" {
				panic(http.ErrAbortHandler)
			}
			breaking(100, true, &cuts)(h).ServeHTTP(w, q)
		})
	})
	_, err := r.Pull(within(t), "default", Pull{Ref: r.push("p:1", imageOf(t, nil, two...))})
	if !errors.Is(err, ErrRegistry) {
		t.Errorf("got %v", err)
	}
	if held, err := r.layers.Layers(within(t), "default"); err != nil || len(held) > 0 {
		t.Errorf("%d layers of half a stream (%v)", len(held), err)
	}
}

// tampered changes what the registry answers.
func tampered(part string, edit func([]byte) []byte) func(http.Handler) http.Handler {
	return func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.Method != http.MethodGet || !strings.Contains(q.URL.Path, part) {
				h.ServeHTTP(w, q)
				return
			}
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, q)
			body := edit(rec.Body.Bytes())
			for k, v := range rec.Header() {
				w.Header()[k] = v
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			w.WriteHeader(rec.Code)
			w.Write(body)
		})
	}
}

func TestWrongOctetsAreNeverTaken(t *testing.T) {
	img := imageOf(t, nil, two...)
	layers, _ := img.Layers()
	first, _ := layers[0].Digest()
	size, _ := layers[0].Size()
	conf, _ := img.ConfigName()
	manifest, _ := img.Digest()
	// A gzip stream that holds another tar, of the length that was said.
	other := imageOf(t, nil, tarOf(file{name: "evil", data: "x"}))
	ol, _ := other.Layers()
	rc, _ := ol[0].Compressed()
	evil, _ := io.ReadAll(rc)
	for what, c := range map[string]struct {
		part string
		edit func([]byte) []byte
		ref  string
	}{
		"a layer's octet": {first.String(), func(b []byte) []byte { b = bytes.Clone(b); b[len(b)/2] ^= 1; return b }, ":1"},
		"another layer": {first.String(), func(b []byte) []byte {
			return append(bytes.Clone(evil), make([]byte, max(0, int(size)-len(evil)))...)[:size]
		}, ":1"},
		"a longer layer":       {first.String(), func(b []byte) []byte { return append(bytes.Clone(b), 0) }, ":1"},
		"a config":             {conf.String(), func(b []byte) []byte { return bytes.Replace(b, []byte("amd64"), []byte("amd46"), 1) }, ":1"},
		"a pinned manifest":    {manifest.String(), func(b []byte) []byte { return append(bytes.Clone(b), '\n') }, "@" + manifest.String()},
		"no JSON":              {"/manifests/", func([]byte) []byte { return []byte("<html>") }, ":1"},
		"a manifest too long":  {"/manifests/", func(b []byte) []byte { return append(b, bytes.Repeat([]byte(" "), 5<<20)...) }, ":1"},
		"a manifest of no end": {"/manifests/", func(b []byte) []byte { return append(b, bytes.Repeat([]byte(" "), 20<<20)...) }, ":1"},
		"a schema-1 manifest":  {"/manifests/", func([]byte) []byte { return []byte(`{"schemaVersion":1,"name":"x","fsLayers":[]}`) }, ":1"},
		"an artifact": {"/manifests/", func(b []byte) []byte {
			return bytes.Replace(b, []byte("application/vnd.docker.container.image.v1+json"), []byte("application/vnd.example.thing.of.some.kind+json"), 1)
		}, ":1"},
		"fewer layers": {"/manifests/", func(b []byte) []byte {
			i := bytes.Index(b, []byte(`"layers":[`)) + len(`"layers":[`)
			j := bytes.Index(b[i:], []byte("},{")) + i
			return append(bytes.Clone(b[:i]), b[j+2:]...)
		}, ":1"},
		"a size below 0": {"/manifests/", func(b []byte) []byte { return bytes.ReplaceAll(b, []byte(`"size":`), []byte(`"size":-`)) }, ":1"},
		"a digest of no kind": {"/manifests/", func(b []byte) []byte {
			return bytes.ReplaceAll(b, []byte(first.String()), []byte("sha256:../../etc/passwd"))
		}, ":1"},
	} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, Config{})
			on := false
			r.serve(func(h http.Handler) http.Handler {
				bad := tampered(c.part, c.edit)(h)
				return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
					if on {
						bad.ServeHTTP(w, q)
					} else {
						h.ServeHTTP(w, q)
					}
				})
			})
			r.push("p:1", img)
			on = true
			_, err := r.Pull(within(t), "default", Pull{Ref: r.host + "/p" + c.ref})
			if err == nil {
				t.Fatal("was taken")
			}
			if !errors.Is(err, sandbox.ErrInvalid) && !errors.Is(err, sandbox.ErrUnsupported) && !errors.Is(err, ErrRegistry) {
				t.Errorf("kind of %v", err)
			}
			t.Log(err)
			on = false
			if got := r.mustPull(Pull{Ref: r.host + "/p:1"}); got.Digest != manifest.String() {
				t.Errorf("afterwards: %+v", got)
			}
			held, err := r.layers.Layers(within(t), "default")
			if err != nil || len(held) != 2 {
				t.Errorf("%d layers are held afterwards (%v)", len(held), err)
			}
		})
	}
}

func TestMirrors(t *testing.T) {
	var seen, direct atomic.Int64
	r := newRig(t, Config{Mirrors: map[string][]string{}}).serve(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			direct.Add(1)
			h.ServeHTTP(w, q)
		})
	})
	mirror := newRig(t, Config{}).serve(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.Header.Get("Authorization") != "" {
				seen.Add(1)
			}
			h.ServeHTTP(w, q)
		})
	})
	img := imageOf(t, nil, two...)
	ref := r.push("org/app:1", img)
	mirror.push("hub/org/app:1", img)
	dead := httptest.NewServer(nil)
	dead.Close()
	r.cfg.Mirrors[r.host] = []string{strings.TrimPrefix(dead.URL, "http://"), mirror.host + "/hub"}
	before := direct.Load()
	r.mustPull(Pull{Ref: ref, Credential: Credential{"u", "s"}})
	if direct.Load() != before || seen.Load() != 0 {
		t.Errorf("%d requests to the registry itself, %d with its credential to the mirror", direct.Load()-before, seen.Load())
	}
	// What no mirror has comes from the registry.
	r.mustPull(Pull{Ref: r.push("org/other:1", imageOf(t, nil, two[1]))})
	if direct.Load() == before {
		t.Error("nobody asked the registry")
	}
	if _, err := r.Pull(within(t), "default", Pull{Ref: r.host + "/org/none:1"}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("what nobody has: %v", err)
	}
}

func TestCallerLeavesPullGoesOn(t *testing.T) {
	release := make(chan struct{})
	r := newRig(t, Config{}).serve(func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
			if q.Method == http.MethodGet && strings.Contains(q.URL.Path, "/blobs/") {
				<-release
			}
			h.ServeHTTP(w, q)
		})
	})
	ref := r.push("p:1", imageOf(t, nil, two...))
	run, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(run) }()
	ctx, cancel := context.WithCancel(context.Background())
	go cancel()
	if _, err := r.Pull(ctx, "default", Pull{Ref: ref}); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	close(release)
	r.mustPull(Pull{Ref: ref})
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := r.Pull(within(t), "default", Pull{Ref: r.host + "/q:1"}); !errors.Is(err, ErrRegistry) {
		t.Errorf("after the end: %v", err)
	}
}

func TestHoldZeros(t *testing.T) {
	bad := errors.New("bad")
	for _, in := range [][]byte{nil, {0}, {1}, {0, 0, 1, 0, 0}, bytes.Repeat([]byte{0}, 5000), append(bytes.Repeat([]byte{0}, 3000), 7), append(bytes.Repeat([]byte{7}, 3000), 0, 0, 0), bytes.Repeat([]byte{0, 1, 0}, 999)} {
		for _, size := range []int{1, 3, 512, 4096} {
			h := &holdZeros{r: bytes.NewReader(in), buf: make([]byte, size), verify: func() error { return nil }}
			got, err := io.ReadAll(h)
			if err != nil || !bytes.Equal(got, in) {
				t.Errorf("%d octets by %d: got %d (%v)", len(in), size, len(got), err)
			}
			h = &holdZeros{r: bytes.NewReader(in), buf: make([]byte, size), verify: func() error { return bad }}
			got, err = io.ReadAll(h)
			if err != bad || !bytes.Equal(got, bytes.TrimRight(in, "\x00")) {
				t.Errorf("%d octets by %d, not what they should be: got %d (%v)", len(in), size, len(got), err)
			}
		}
	}
}

func TestSweep(t *testing.T) {
	r := newRig(t, Config{}).serve(nil)
	ctx := within(t)
	kept := r.mustPull(Pull{Ref: r.push("kept:1", imageOf(t, nil, two[0]))})
	// An import whose second layer is broken leaves the first.
	img := imageOf(t, nil, tarOf(file{name: "only", data: "x"}), []byte("this is no tar, but long enough to be looked at as if it were one, "+strings.Repeat("x", 600)))
	if _, err := r.Pull(ctx, "default", Pull{Ref: r.push("bad:1", img)}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
	count := func() int {
		held, err := r.layers.Layers(ctx, "default")
		if err != nil {
			t.Fatal(err)
		}
		return len(held)
	}
	before := count()
	if n, err := r.Sweep(ctx, time.Hour); err != nil || n != 0 || count() != before {
		t.Errorf("what is young went: %d (%v)", n, err)
	}
	r.now = func() time.Time { return time.Now().Add(2 * time.Hour) }
	if _, err := r.Sweep(ctx, time.Hour); err != nil || count() != 1 {
		t.Errorf("%d layers are held (%v)", count(), err)
	}
	if again := r.mustPull(Pull{Ref: r.host + "/kept:1"}); again.Environment != kept.Environment {
		t.Errorf("%+v", again)
	}
	if err := r.Remove(ctx, "default", r.host+"/kept:1"); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Sweep(ctx, time.Hour); err != nil {
		t.Fatal(err)
	}
	var left []string
	if err := r.store.List(ctx, "oci/", func(i store.Info) bool { left = append(left, i.Key); return true }); err != nil || len(left) != 0 {
		t.Errorf("%q are left (%v)", left, err)
	}
	if got := r.mustPull(Pull{Ref: r.host + "/kept:1"}); !cmp.Equal(got.Layers, kept.Layers) {
		t.Errorf("imported again: %+v", got)
	}
}

// What machine an image is for its config says, whatever lies in its layers as data.
func TestDataOfOtherMachines(t *testing.T) {
	elf := func(machine byte) string {
		b := make([]byte, 64)
		copy(b, "\x7fELF\x02\x01\x01")
		b[16], b[18] = 2, machine
		return string(b)
	}
	const amd64, arm64 = 62, 183
	r := newRig(t, Config{}).serve(nil)
	got := r.mustPull(Pull{Ref: r.push("mixed:1", imageOf(t, nil, tarOf(file{name: "bin/a", mode: 0o755, data: elf(amd64)}), tarOf(file{name: "data/b", mode: 0o755, data: elf(arm64)}, file{name: "data/c", mode: 0o755, data: elf(arm64)}), tarOf(file{name: "text"})))})
	var archs []string
	for _, id := range got.Layers {
		d, err := r.layers.Descriptor(within(t), id)
		if err != nil {
			t.Fatal(err)
		}
		archs = append(archs, d.Arch)
	}
	if d := cmp.Diff([]string{"amd64", "amd64", "any"}, archs); d != "" {
		t.Error(d)
	}
}

func TestSlowConnections(t *testing.T) {
	b := &blobReader{since: time.Now().Add(-2 * stallTime), at: slowOctets - 1}
	if !b.slow() || b.slow() {
		t.Error("too little in a stretch is slow, and a new stretch begins")
	}
	b = &blobReader{since: time.Now().Add(-2 * stallTime), at: slowOctets}
	if b.slow() {
		t.Error("enough in a stretch is slow")
	}
}

func TestShares(t *testing.T) {
	s := newShares(4)
	ctx := within(t)
	var done []func()
	take := func(project string) {
		d, err := s.take(ctx, project)
		if err != nil {
			t.Fatal(err)
		}
		done = append(done, d)
	}
	take("a")
	take("a")
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if _, err := s.take(short, "a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a third place of four: %v", err)
	}
	take("b")
	take("b")
	for _, d := range done {
		d()
	}
	if len(s.own) != 0 {
		t.Errorf("%d projects are remembered", len(s.own))
	}
}
