package build

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func parse(t *testing.T, text string) (*File, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "dsec.toml")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return ReadFile(file)
}

func TestReadFile(t *testing.T) {
	f, err := parse(t, "name='a'\nfrom='image:python:3'\nuser='u'\n[env]\nA='b'\n[[step]]\nrun='''\nset -x\nmake\n'''\ntimeout='5m'\n[[step]]\ncopy='src'\nto='/w'\nexclude=['*.o']\n[[step]]\nenv={B='c'}\n")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for i := range f.Steps {
		got = append(got, f.Steps[i].String())
	}
	if d := cmp.Diff([]string{"run set -x ...", "copy src to /w", "env"}, got); d != "" {
		t.Error(d)
	}
	for text, word := range map[string]string{
		"":                   "from",
		"from='x'\nfrm='y'":  "frm",
		"from='x'\n[[step]]": "one of",
		"from='x'\n[[step]]\nrun='a'\ncopy='b'\nto='/c'":          "one of",
		"from='x'\n[[step]]\ncopy='../up'\nto='/c'":               "beside",
		"from='x'\n[[step]]\ncopy='/etc/passwd'\nto='/c'":         "beside",
		"from='x'\n[[step]]\ncopy='a'":                            "to",
		"from='x'\n[[step]]\ncopy='a'\nto='b'":                    "absolute",
		"from='x'\n[[step]]\ncopy='a'\nto='/b'\nexclude=['[']":    "exclude",
		"from='x'\n[[step]]\nrun='a'\nto='/b'":                    "belong to copy",
		"from='x'\n[[step]]\nkit='a'\ntimeout='5m'":               "timeout belongs",
		"from='x'\n[[step]]\nrun='a'\ntimeout='5'":                "timeout",
		"from='x'\n[[step]]\nworkdir='a'":                         "absolute",
		"from='x'\nkeep=['nothing']":                              "apt-lists",
		"from='x'\nnetwork='closed'":                              "none or open",
		"from=":                                                   "dsec.toml",
		"from='x'\n" + strings.Repeat("[[step]]\nrun='a'\n", 101): "at most 100",
	} {
		if _, err := parse(t, text); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: %v, want %q in it", text, err, word)
		}
	}
}

// What a step's result depends on is in its name, and nothing else.
func TestCacheNames(t *testing.T) {
	b := func() *builder {
		return &builder{f: &File{}, stack: []string{"sha256:1"}, env: map[string]string{"A": "b", "C": "d"}, workdir: "/w"}
	}
	name := func(edit func(*builder, *Step)) string {
		x, s := b(), &Step{Run: "make"}
		edit(x, s)
		n, err := x.cacheName(s, "")
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	same := name(func(*builder, *Step) {})
	if n := name(func(*builder, *Step) {}); n != same || !strings.HasPrefix(n, "build/") {
		t.Errorf("%s and %s", same, n)
	}
	if n := name(func(_ *builder, s *Step) { s.Timeout = "5m" }); n != same {
		t.Error("a timeout changes the result")
	}
	seen := map[string]string{same: "the first"}
	for what, edit := range map[string]func(*builder, *Step){
		"text":      func(_ *builder, s *Step) { s.Run = "make all" },
		"layers":    func(b *builder, _ *Step) { b.stack = append(b.stack, "sha256:2") },
		"variables": func(b *builder, _ *Step) { b.env["A"] = "c" },
		"workdir":   func(b *builder, _ *Step) { b.workdir = "/" },
		"builder":   func(b *builder, _ *Step) { b.f.Builder = "u" },
		"network":   func(b *builder, _ *Step) { b.f.Network = "open" },
		"rules":     func(b *builder, _ *Step) { b.f.Keep = []string{"tmp"} },
	} {
		n := name(edit)
		if other, twice := seen[n]; twice {
			t.Errorf("%s gives the name of %s", what, other)
		}
		seen[n] = what
	}
}

// A folder that somebody else wrote copies nothing from outside of it, whatever its links say, and is no reason to wait.
func TestHostileTrees(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	secret := filepath.Join(outside, "secret")
	os.WriteFile(secret, []byte("mine"), 0o600)
	os.MkdirAll(filepath.Join(dir, "src/sub"), 0o755)
	os.WriteFile(filepath.Join(dir, "src/sub/a"), []byte("1"), 0o644)
	for name, to := range map[string]string{"file": secret, "folder": outside, "up": "..", "rel": "../" + filepath.Base(outside) + "/secret", "loop": "loop",
		"src/in": secret, "src/sub/up": "../../..", "inside": "src"} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"file", "folder", "folder/secret", "up", "rel", "loop", "fifo", "src/in", "src/sub/up"} {
		if tr, err := openTree(dir, &Step{Copy: name, To: "/w/"}); err == nil {
			h, err := tr.hash()
			t.Errorf("%s was opened: %s %v", name, h, err)
		}
	}
	// Links in a folder are copied as links; one that leads to a folder beside the build file is followed.
	for _, name := range []string{"src", "inside"} {
		tr, err := openTree(dir, &Step{Copy: name, To: "/w"})
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := tr.write(&b, 0, 0); err != nil || bytes.Contains(b.Bytes(), []byte("mine")) {
			t.Errorf("%s: %v, or what is outside", name, err)
		}
		var got []string
		for r := tar.NewReader(&b); ; {
			h, err := r.Next()
			if err != nil {
				break
			}
			got = append(got, h.Name+" "+h.Linkname)
		}
		if d := cmp.Diff([]string{"in " + secret, "sub/ ", "sub/a ", "sub/up ../../.."}, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
		// What turns into a link, or into what is waited for, between two looks is not read either.
		a := filepath.Join(dir, "src/sub/a")
		before, err := tr.hash()
		if err != nil {
			t.Fatal(err)
		}
		os.Remove(a)
		os.Symlink(secret, a)
		if f, err := tr.open("sub/a"); err == nil {
			f.Close()
			t.Error("a link to what is outside was opened")
		}
		os.Remove(a)
		syscall.Mkfifo(a, 0o644)
		if f, err := tr.open("sub/a"); err == nil {
			f.Close()
			t.Error("a FIFO was opened")
		}
		os.Remove(a)
		os.WriteFile(a, []byte("1"), 0o644)
		if after, err := tr.hash(); err != nil || after != before {
			t.Error("another hash of the same tree")
		}
		tr.close()
	}
}

func TestTrees(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"src/a": "1", "src/b.pyc": "2", "src/sub/c": "3", "src/.git/config": "4"} {
		os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755)
		os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)
	}
	os.Symlink("a", filepath.Join(dir, "src/link"))
	open := func(s Step) *tree {
		tr, err := openTree(dir, &s)
		if err != nil {
			t.Fatal(err)
		}
		return tr
	}
	list := func(tr *tree) (out []string) {
		var b bytes.Buffer
		if err := tr.write(&b, 7, 8); err != nil {
			t.Fatal(err)
		}
		for r := tar.NewReader(&b); ; {
			h, err := r.Next()
			if err == io.EOF {
				return
			}
			if err != nil || h.Uid != 7 || h.Gid != 8 {
				t.Fatalf("%+v %v", h, err)
			}
			out = append(out, h.Name)
		}
	}
	step := Step{Copy: "src", To: "/w", Exclude: []string{"*.pyc", ".git"}}
	if d := cmp.Diff([]string{"a", "link", "sub/", "sub/c"}, list(open(step))); d != "" {
		t.Error(d)
	}
	for to, want := range map[string][2]string{"/w/x": {"/w", "x"}, "/w/": {"/w", "a"}} {
		tr := open(Step{Copy: "src/a", To: to})
		if got := [2]string{tr.folder(to), list(tr)[0]}; got != want {
			t.Errorf("one file to %s: %v, want %v", to, got, want)
		}
	}
	hash := func() string {
		h, err := open(step).hash()
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	first := hash()
	now := os.Chtimes(filepath.Join(dir, "src/a"), fileTime, fileTime)
	if now != nil || hash() != first {
		t.Error("a file's time changes the tree")
	}
	os.WriteFile(filepath.Join(dir, "src/b.pyc"), []byte("other"), 0o644)
	if hash() != first {
		t.Error("an excluded file changes the tree")
	}
	for what, change := range map[string]func(){
		"contents": func() { os.WriteFile(filepath.Join(dir, "src/sub/c"), []byte("4"), 0o644) },
		"a mode":   func() { os.Chmod(filepath.Join(dir, "src/sub"), 0o700) },
		"a link":   func() { os.Remove(filepath.Join(dir, "src/link")); os.Symlink("b", filepath.Join(dir, "src/link")) },
		"a name":   func() { os.Rename(filepath.Join(dir, "src/a"), filepath.Join(dir, "src/z")) },
	} {
		before := hash()
		change()
		if hash() == before {
			t.Errorf("%s: the same tree", what)
		}
	}
}

var fileTime = time.Unix(1, 0)

func TestPlaces(t *testing.T) {
	at := places([]string{"apt-lists"}, []string{"/home/a", "/home/b"})
	for p, is := range map[string]bool{"/tmp": true, "/home/b/.cache/pip": true, "/home/a/.cache/pip": true, "/var/lib/apt/lists": false, "/home/a": true} {
		if _, ok := at[p]; ok != is {
			t.Errorf("%s: %v", p, ok)
		}
	}
	if d := cmp.Diff([]string{""}, at["/tmp"]); d != "" {
		t.Error(d)
	}
}

func TestSecrets(t *testing.T) {
	got := SecretVars(map[string]string{"PATH": "/bin", "HF_TOKEN": "x", "KEYS": "ghp_" + strings.Repeat("a", 36), "PASSWORD": "", "MONKEY": "banana", "DB_PASSWD": "y"})
	var names []string
	for _, s := range got {
		names = append(names, s.Where)
	}
	if d := cmp.Diff([]string{"variable DB_PASSWD", "variable HF_TOKEN", "variable KEYS"}, names); d != "" {
		t.Error(d)
	}
	for p, text := range map[string]string{
		"/home/a/.ssh/id_ed25519": "-----BEGIN OPENSSH PRIVATE KEY-----", "/x/server.pem": "-----BEGIN RSA PRIVATE KEY-----", "/home/a/.netrc": "machine a login b password c",
		"/home/u/.npmrc": "//r/:_authToken=x", "/home/a/.docker/config.json": `{"auths":{"a":{"auth":"x"}}}`, "/app/.env": "export API_KEY=abc",
	} {
		if why, look := suspicious(p); why == "" || look != nil && !look.MatchString(text) {
			t.Errorf("%s is not seen", p)
		}
	}
	for p, text := range map[string]string{"/etc/ssl/certs/ca.pem": "-----BEGIN CERTIFICATE-----", "/app/.env": "PORT=80\nTOKEN=\n", "/home/a/.docker/config.json": "{}", "/a/id_rsa.pub": "ssh-rsa", "/etc/passwd": "root"} {
		if why, look := suspicious(p); why != "" && (look == nil || look.MatchString(text)) {
			t.Errorf("%s passes for a secret: %s", p, why)
		}
	}
}

func TestTail(t *testing.T) {
	var all bytes.Buffer
	x := &tail{w: &all}
	for i := range 1000 {
		io.WriteString(x, strings.Repeat(string(rune('a'+i%26)), 99)+"\n")
	}
	if all.Len() != 100000 || len(x.String()) != maxTail || !strings.HasSuffix(all.String(), x.String()) {
		t.Errorf("%d octets passed, %d kept", all.Len(), len(x.String()))
	}
}

func TestAccountsOfHostileFiles(t *testing.T) {
	for line, want := range map[string]struct {
		home     string
		uid, gid int
		fails    bool
	}{
		"a:x:1000:1001:A:/home/a:/bin/sh":      {"/home/a", 1000, 1001, false},
		"a:x:1000:1001:A:/home/\x00a:/bin/sh":  {"", 1000, 1001, false},
		"a:x:1000:1001:A:home/a:/bin/sh":       {"", 1000, 1001, false},
		"a:x:1000:1001:A::/bin/sh":             {"", 1000, 1001, false},
		"a:x:-1:0:A:/home/a:/bin/sh":           {fails: true},
		"a:x:0:-5:A:/home/a:/bin/sh":           {fails: true},
		"a:x:4294967295:0:A:/home/a:/bin/sh":   {fails: true},
		"a:x:0:4294967295:A:/home/a:/bin/sh":   {fails: true},
		"a:x:99999999999:0:A:/home/a:/bin/sh":  {fails: true},
		"a:x:10\x0000:0:A:/home/a:/bin/sh":     {fails: true},
		"a\x00:x:1000:1001:A:/home/a:/bin/sh":  {fails: true},
		"a:x:1000":                             {fails: true},
		"b:x:7:7:B:/b:\na:x:5:6:A:/home/a:/sh": {"/home/a", 5, 6, false},
	} {
		home, uid, gid, err := lookup("root:x:0:0:root:/root:/bin/sh\n"+line+"\n", "a")
		if (err != nil) != want.fails || home != want.home || uid != want.uid || gid != want.gid {
			t.Errorf("%q: %q %d:%d, %v; want %+v", line, home, uid, gid, err, want)
		}
	}
}
