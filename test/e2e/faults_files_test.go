package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

// dsec runs the command line with the service's address.
func (s *service) dsec(args ...string) *exec.Cmd {
	cmd := exec.Command(binary, args...)
	cmd.Env = append(os.Environ(), "DSEC_URL=unix:"+s.socket(), "DSEC_KEY_FILE="+filepath.Join(s.run, "key"))
	return cmd
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// entries reads a tar into "type mode uid:gid mtime -> target" by name.
func entries(t testing.TB, r io.Reader) map[string]string {
	t.Helper()
	out := map[string]string{}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return out
		}
		must(t, err)
		out[strings.TrimSuffix(strings.TrimPrefix(h.Name, "./"), "/")] = fmt.Sprintf("%c %04o %d:%d %d %s", h.Typeflag, h.Mode, h.Uid, h.Gid, h.ModTime.Unix(), h.Linkname)
	}
}

func TestB12LinksInside(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	out(t, sb, "rmdir /var/run 2>/dev/null; ln -s /run /var/run; ln -s /etc /l; ln -s ../../../../../../etc /m; ln -s loop /loop; ln -s a2 /a1; ln -s a1 /a2")
	mark := "dsec-e2e-" + sb.ID
	f := sb.Files()
	must(t, f.WriteFile(within(t), "/var/run/app/x", []byte("x"), 0))
	must(t, f.WriteFile(within(t), "/l/"+mark, []byte("1"), 0))
	must(t, f.WriteFile(within(t), "/m/"+mark+"2", []byte("2"), 0))
	if got := out(t, sb, "cat /run/app/x /etc/"+mark+" /etc/"+mark+"2"); got != "x12" {
		t.Errorf("written through links: %q", got)
	}
	for _, p := range []string{"/run/app/x", "/etc/" + mark, "/etc/" + mark + "2"} {
		if _, err := os.Lstat(p); err == nil {
			t.Errorf("%s landed on the host", p)
		}
	}
	for _, p := range []string{"/loop", "/a1", "/loop/x", "/a1/b/c"} {
		_, err := f.ReadFile(within(t), p)
		errorText(t, err, strings.Split(p, "/")[1], "links")
		err = f.WriteFile(within(t), p, []byte("no"), 0)
		errorText(t, err, strings.Split(p, "/")[1])
	}
	up := treeOf(map[string]string{"d/one": "1", "d/deep/two": "2"})
	_, err := f.Upload(within(t), "/var/run", bytes.NewReader(up))
	must(t, err)
	if got := out(t, sb, "cat /run/d/one /run/d/deep/two"); got != "12" {
		t.Errorf("tree through a link: %q", got)
	}
	// A tar that brings a link and then writes through it stays inside too.
	_, err = f.Upload(within(t), "/srv", bytes.NewReader(tarOf(entry{name: "esc", kind: tar.TypeSymlink, link: "../../../../../../etc"}, entry{name: "esc/" + mark + "3", data: "3"})))
	if _, e := os.Lstat("/etc/" + mark + "3"); e == nil {
		t.Fatal("the upload reached the host")
	}
	t.Logf("upload through its own link: %v", err)
	_, err = f.Upload(within(t), "/srv", bytes.NewReader(tarOf(entry{name: "../../up-" + mark, data: "3"})))
	t.Logf("upload above its folder: %v", err)
	if _, e := os.Lstat("/up-" + mark); e == nil {
		t.Fatal("the upload reached the host")
	}

	t.Run("race", func(t *testing.T) {
		swaps := 2000
		if torture {
			swaps = 10000
		}
		out(t, sb, "mkdir -p /srv/race /srv/real")
		p, err := sb.Start(within(t), sh(fmt.Sprintf("cd /srv/race; i=0; while [ $i -lt %d ]; do rm -rf l; ln -s ../../../../../../etc l; rm -f l; mkdir l; i=$((i+1)); done; rm -rf l; true", swaps)))
		must(t, err)
		done := make(chan *client.Result, 1)
		go func() {
			r, _ := p.Wait(within(t))
			done <- r
		}()
		wrote, refused := 0, 0
		for i := 0; ; i++ {
			err := f.WriteFile(within(t), fmt.Sprintf("/srv/race/l/%s-%d", mark, i%8), []byte("race"), 0)
			if err == nil {
				wrote++
			} else {
				refused++
			}
			_, _ = f.Upload(within(t), "/srv/race/l", bytes.NewReader(tarOf(entry{name: mark + "-tar", data: "race"})))
			select {
			case r := <-done:
				if r == nil || !r.OK() {
					t.Errorf("the swapping command: %v", r)
				}
				if left, _ := filepath.Glob("/etc/" + mark + "*"); len(left) > 0 {
					t.Fatalf("on the host: %v", left)
				}
				t.Logf("%d written, %d refused", wrote, refused)
				return
			default:
			}
		}
	})
}

func TestB19OddEntries(t *testing.T) {
	t.Parallel()
	s := shared(t)
	// A device node can't be made inside; one of a layer is there.
	dev := s.layer(t, tarOf(entry{name: "srv/", kind: tar.TypeDir}, entry{name: "srv/odd/", kind: tar.TypeDir}, entry{name: "srv/odd/dev", kind: tar.TypeChar, major: 1, minor: 3, mode: 0o666}))
	sb := s.box(t, func(o *client.Options) { o.Layers = []string{s.small(t), dev} })
	out(t, sb, `cd /srv/odd; echo f >file; ln -s nowhere dangling; ln -s self self; mkfifo fifo; mkdir -m 700 locked; echo s >locked/secret; printf x >"$(printf 'b\377d')"; chmod 755 .`)
	c := client.Cmd{Argv: []string{"nc", "-l", "-U", "/srv/odd/socket"}}
	if r := exe(t, sb, sh("nc --help 2>&1 | grep -q -- -U && echo yes")); !strings.Contains(string(r.Stdout), "yes") {
		c = client.Cmd{}
	}
	want := map[string]string{"file": "file", "dangling": "link nowhere", "self": "link self", "fifo": "fifo", "locked": "dir", "dev": "char", "b\xffd": "file"}
	if len(c.Argv) > 0 {
		p, err := sb.Start(within(t), c)
		must(t, err)
		defer p.Signal(within(t), 9)
		must(t, eventually(func() error { _, err := sb.Files().Stat(within(t), "/srv/odd/socket", false); return err }))
		want["socket"] = "socket"
	}
	for _, user := range []string{"root", "nobody"} {
		f := sb.FilesAs(user)
		list, err := f.List(within(t), "/srv/odd", 1)
		must(t, err)
		got := map[string]string{}
		for _, e := range list {
			name := e.Path
			if len(e.PathRaw) > 0 {
				name = string(e.PathRaw)
			}
			got[name] = strings.TrimSpace(e.Type + " " + e.Target)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("as %s: %s", user, d)
		}
		for name, kind := range want {
			info, err := f.Stat(within(t), "/srv/odd/"+name, false)
			if err != nil || info.Type != strings.Fields(kind)[0] {
				t.Errorf("stat %q as %s: %v, %v", name, user, info, err)
			}
		}
		deep, err := f.List(within(t), "/srv/odd", 5)
		must(t, err)
		wantDeep := len(want)
		if user == "root" {
			wantDeep++
		}
		marked, names := 0, map[string]bool{}
		for _, e := range deep {
			names[e.Path+string(e.PathRaw)] = true
			if e.Error != "" { // the folder once more, since its entry was sent before it could not be read
				marked++
				if e.Path != "locked" {
					t.Errorf("marked: %v", e)
				}
			}
		}
		if len(names) != wantDeep || user == "nobody" && marked != 1 {
			t.Errorf("deep as %s: %d entries, %d with an error; want %d", user, len(deep), marked, wantDeep)
		}
	}
	var b bytes.Buffer
	skipped, err := sb.Files().Download(within(t), "/srv/odd", &b)
	must(t, err)
	got := entries(t, &b)
	for _, name := range []string{"file", "dangling", "self", "fifo", "locked", "locked/secret", "dev", "b\xffd"} {
		if _, ok := got[name]; !ok {
			t.Errorf("the tree has no %q: %v", name, got)
		}
	}
	if _, ok := got["socket"]; ok || len(c.Argv) > 0 && !strings.Contains(strings.Join(skipped, " "), "socket") {
		t.Errorf("socket: skipped %q", skipped)
	}
	if len(skipped) != len(want)-7 {
		t.Errorf("skipped %q", skipped)
	}
}

// treeText describes a folder of this machine as "type mode mtime -> target" by path.
func treeText(t testing.TB, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	must(t, filepath.Walk(dir, func(p string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		text := fmt.Sprintf("%v %d", info.Mode(), info.ModTime().Unix())
		if info.Mode()&os.ModeSymlink != 0 {
			target, _ := os.Readlink(p)
			text = "link -> " + target // its mode and time are nobody's business
		}
		if info.Mode().IsRegular() {
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			text += fmt.Sprintf(" %d octets, %d links", len(b), info.Sys().(*syscall.Stat_t).Nlink)
		}
		out[rel] = text
		return nil
	}))
	return out
}

func TestB21TreesUpAndDown(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	dir := ownDir(t)
	old := time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC)
	script := filepath.Join(dir, "run.sh")
	must(t, os.WriteFile(script, []byte("#!/bin/sh\necho ran\n"), 0o755))
	must(t, os.Chtimes(script, old, old))

	t.Run("a file as alice", func(t *testing.T) {
		if b, err := s.dsec("cp", "-u", "alice", script, sb.ID+":/home/alice/n1/n2/").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, b)
		}
		r := exe(t, sb, client.Cmd{User: "alice", Argv: []string{"sh", "-c", "cd; stat -c '%n %a %U %Y' n1 n1/n2 n1/n2/run.sh; n1/n2/run.sh; rm -r n1; ls"}})
		lines := strings.Split(string(r.Stdout), "\n")
		if len(lines) < 4 || !strings.HasPrefix(lines[0], "n1 755 alice ") || !strings.HasPrefix(lines[1], "n1/n2 755 alice ") ||
			lines[2] != fmt.Sprintf("n1/n2/run.sh 755 alice %d", old.Unix()) || lines[3] != "ran" || !r.OK() {
			t.Errorf("%s", describe(r))
		}
	})
	t.Run("a tree", func(t *testing.T) {
		tree := filepath.Join(dir, "tree")
		long := strings.Repeat("n", 200)
		deep := filepath.Join(tree, strings.Repeat("p", 130), strings.Repeat("q", 130), strings.Repeat("r", 130))
		must(t, os.MkdirAll(deep, 0o755))
		must(t, os.MkdirAll(filepath.Join(tree, "empty"), 0o755))
		must(t, os.MkdirAll(filepath.Join(tree, "closed"), 0o700))
		for name, mode := range map[string]os.FileMode{"a": 0o644, "secret": 0o600, "run": 0o755, long: 0o640, "closed/in": 0o444, "with\nnewline": 0o644, "b\xffd": 0o644, " spaces ": 0o644, "-dash": 0o644, "ünï": 0o644} {
			must(t, os.WriteFile(filepath.Join(tree, name), []byte(name), mode))
			must(t, os.Chtimes(filepath.Join(tree, name), old, old))
		}
		must(t, os.WriteFile(filepath.Join(deep, "end"), []byte("deep"), 0o644))
		must(t, os.Symlink("a", filepath.Join(tree, "link")))
		must(t, os.Symlink("/nowhere/"+long, filepath.Join(tree, "dangling")))
		must(t, os.Link(filepath.Join(tree, "a"), filepath.Join(tree, "hard")))
		must(t, os.Chtimes(filepath.Join(tree, "empty"), old, old))
		for _, user := range []string{"root", "alice"} {
			to := "/tmp/up-" + user
			if b, err := s.dsec("cp", "-u", user, tree, sb.ID+":"+to).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, b)
			}
			if got := strings.TrimSpace(out(t, sb, "find "+to+" ! -user "+user+" | wc -l")); got != "0" {
				t.Errorf("%s entries are not of %s", got, user)
			}
			back := filepath.Join(dir, "back-"+user)
			if b, err := s.dsec("cp", "-u", user, sb.ID+":"+to, back).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, b)
			}
			wantTree, got := treeText(t, tree), treeText(t, back)
			for _, m := range []map[string]string{wantTree, got} {
				delete(m, ".") // the folder itself may be newer
			}
			if d := cmp.Diff(wantTree, got); d != "" {
				t.Errorf("as %s: %s", user, d)
			}
			want(t, exe(t, sb, shAs(user, "rm -r "+to)), 0, "", "")
		}
	})
	t.Run("modes", func(t *testing.T) {
		for mode, right := range map[string]string{"0755": "755", "755": "755", "0600": "600", "4755": "4755"} {
			status, body := s.put(t, sb.ID, url.Values{"path": {"/tmp/mode-" + mode}, "mode": {mode}}, "x")
			if got := strings.TrimSpace(out(t, sb, "stat -c %a /tmp/mode-"+mode)); status != 200 || got != right {
				t.Errorf("mode=%s: %d %s, made %s", mode, status, body, got)
			}
		}
		for _, mode := range []string{"493", "0o755", "rwxr-xr-x", "-1", "99999", "0x1ff", "888"} {
			if status, body := s.put(t, sb.ID, url.Values{"path": {"/tmp/never"}, "mode": {mode}}, "x"); status != 400 || !strings.Contains(body, "mode") {
				t.Errorf("mode=%s: %d %s", mode, status, body)
			}
		}
	})
	t.Run("other names of the wire", func(t *testing.T) {
		for _, q := range []url.Values{{"path": {"/tmp/x"}, "mod": {"0644"}}, {"file": {"/tmp/x"}}, {"path": {"relative"}}, {}} {
			if status, body := s.put(t, sb.ID, q, "x"); status != 400 {
				t.Errorf("%v: %d %s", q, status, body)
			}
		}
	})
}

// put writes a file by plain HTTP.
func (s *service) put(t testing.TB, sandbox string, q url.Values, body string) (int, string) {
	t.Helper()
	r, err := http.NewRequest("PUT", "http://dsec/v1/files/"+url.PathEscape(sandbox)+"?"+q.Encode(), strings.NewReader(body))
	must(t, err)
	r.Header.Set("X-API-Key", s.key())
	return s.send(t, r)
}

func (s *service) get(t testing.TB, sandbox string, q url.Values) (int, string, error) {
	t.Helper()
	r, err := http.NewRequest("GET", "http://dsec/v1/files/"+url.PathEscape(sandbox)+"?"+q.Encode(), nil)
	must(t, err)
	r.Header.Set("X-API-Key", s.key())
	tr := s.transport()
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr, Timeout: patience}).Do(r)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if n := resp.ContentLength; err == nil && n >= 0 && n != int64(len(b)) {
		err = fmt.Errorf("announced %d octets, sent %d", n, len(b))
	}
	return resp.StatusCode, string(b), err
}

func TestB22FilesWithoutASize(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	for _, user := range []string{"root", "nobody"} {
		f := sb.FilesAs(user)
		for _, p := range []string{"/proc/self/status", "/proc/cpuinfo", "/proc/self/maps"} {
			b, err := f.ReadFile(within(t), p)
			if err != nil || len(b) < 200 {
				t.Errorf("%s as %s: %d octets, %v", p, user, len(b), err)
			}
			status, body, err := s.get(t, sb.ID, url.Values{"path": {p}, "user": {user}})
			if err != nil || status != 200 || len(body) < 200 {
				t.Errorf("GET %s as %s: %d, %d octets, %v", p, user, status, len(body), err)
			}
		}
		if b, err := f.ReadFile(within(t), "/proc/self/status"); err == nil {
			uid := map[string]string{"root": "0", "nobody": "65534"}[user]
			if !strings.Contains(string(b), "Uid:\t"+uid+"\t") {
				t.Errorf("the reader of %s is another user: %q", user, b)
			}
		}
		var zeros bytes.Buffer
		n, err := f.Read(within(t), "/dev/zero", 0, 1<<20, &zeros)
		if err != nil || n != 1<<20 || strings.Trim(zeros.String(), "\x00") != "" {
			t.Errorf("/dev/zero: %d octets, %v", n, err)
		}
		if _, body, err := s.get(t, sb.ID, url.Values{"path": {"/dev/zero"}, "length": {"1048576"}}); err != nil || len(body) != 1<<20 {
			t.Errorf("GET /dev/zero: %d octets, %v", len(body), err)
		}
		_, err = f.ReadFile(within(t), "/etc")
		errorText(t, err, "/etc", "folder")
		list, err := f.List(within(t), "/proc", 1)
		if err != nil || len(list) < 10 {
			t.Errorf("list /proc: %d entries, %v", len(list), err)
		}
		list, err = f.List(within(t), "/proc", 3)
		if err != nil || len(list) < 100 {
			t.Errorf("list /proc three deep: %d entries, %v", len(list), err)
		}
	}
	f := sb.Files()
	t.Run("a FIFO without a writer", func(t *testing.T) {
		out(t, sb, "mkfifo /tmp/fifo")
		ctx, cancel := context.WithTimeout(within(t), 2*time.Second)
		defer cancel()
		begin := time.Now()
		_, err := f.Read(ctx, "/tmp/fifo", 0, 0, io.Discard)
		if err == nil {
			t.Error("no error")
		}
		if took := time.Since(begin); took > patience {
			t.Errorf("took %v", took)
		}
		if b, err := f.ReadFile(within(t), "/etc/passwd"); err != nil || len(b) == 0 {
			t.Errorf("the next call: %v", err)
		}
		// Nor may a write wait for a reader.
		ctx, cancel = context.WithTimeout(within(t), 2*time.Second)
		defer cancel()
		_, err = f.Write(ctx, "/tmp/fifo", strings.NewReader("x"), client.WriteOptions{})
		t.Logf("write to a FIFO without a reader: %v", err)
		if b, err := f.ReadFile(within(t), "/etc/passwd"); err != nil || len(b) == 0 {
			t.Errorf("the next call: %v", err)
		}
	})
	t.Run("growing and shrinking", func(t *testing.T) {
		out(t, sb, "head -c 3000000 /dev/zero >/tmp/g; head -c 3000000 /dev/zero >/tmp/t")
		p, err := sb.Start(within(t), sh("while :; do head -c 100000 /dev/zero >>/tmp/g; done"))
		must(t, err)
		q, err := sb.Start(within(t), sh("while :; do : >/tmp/t; head -c 3000000 /dev/zero >/tmp/t; done"))
		must(t, err)
		for range 10 {
			status, body, err := s.get(t, sb.ID, url.Values{"path": {"/tmp/g"}, "length": {"4000000"}})
			if err != nil || status != 200 || len(body) < 3000000 {
				t.Errorf("growing: %d, %d octets, %v", status, len(body), err)
			}
			if _, err := f.ReadFile(within(t), "/tmp/t"); err != nil {
				t.Errorf("shrinking: %v", err)
			}
			// By HTTP a file that shrank may break the connection where a length was announced; it must not hang.
			if _, _, err := s.get(t, sb.ID, url.Values{"path": {"/tmp/t"}}); errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("shrinking: %v", err)
			}
		}
		_ = p.Signal(within(t), 9)
		_ = q.Signal(within(t), 9)
	})
}

// Files and trees of any size pass, by the SDK and by plain HTTP, and no process of ours holds them whole.
func TestLargeFile(t *testing.T) {
	t.Parallel()
	size, pool := int64(200<<20), "1g"
	if torture {
		size, pool = 10<<30, "24g"
	}
	const held = 128 << 20 // octets that a daemon may take for it, whatever the size
	s := own(t, "--pool-size", pool)
	sb := s.box(t, func(o *client.Options) { o.Memory, o.Disk = 64<<20, size+(64<<20) })
	f := sb.Files()
	whole := func() io.Reader { return io.LimitReader(counting{new(int64)}, size) }
	q := url.Values{"path": {"/srv/big"}}
	archive := func() io.Reader {
		var head bytes.Buffer
		must(t, tar.NewWriter(&head).WriteHeader(&tar.Header{Name: "big", Mode: 0o644, Size: size, Format: tar.FormatPAX}))
		return io.MultiReader(&head, whole(), bytes.NewReader(make([]byte, -size&511+1024)))
	}
	plain := func(method string, body io.Reader) (int64, error) {
		r, err := http.NewRequestWithContext(forLong(t), method, "http://dsec/v1/files/"+sb.ID+"?"+q.Encode(), body)
		must(t, err)
		r.Header.Set("X-API-Key", s.key())
		tr := s.transport()
		defer tr.CloseIdleConnections()
		resp, err := tr.RoundTrip(r)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		n, err := io.Copy(io.Discard, resp.Body)
		if resp.StatusCode != http.StatusOK {
			err = errors.Join(err, errors.New(resp.Status))
		}
		return n, err
	}
	before := s.resident(t)
	for _, way := range []struct {
		name string
		up   func() error
		down func() (int64, error)
	}{
		{"SDK", func() error { _, err := f.Write(forLong(t), "/srv/big", whole(), client.WriteOptions{}); return err },
			func() (int64, error) { return f.Read(forLong(t), "/srv/big", 0, 0, io.Discard) }},
		{"plain HTTP", func() error { _, err := plain("PUT", whole()); return err },
			func() (int64, error) { return plain("GET", nil) }},
		{"tree", func() error { _, err := f.Upload(forLong(t), "/srv", archive()); return err },
			func() (int64, error) {
				var n octets
				_, err := f.Download(forLong(t), "/srv", &n)
				return int64(n) &^ (1<<20 - 1), err // without the headers
			}},
	} {
		must(t, way.up())
		if got := strings.TrimSpace(out(t, sb, "stat -c %s /srv/big")); got != strconv.FormatInt(size, 10) {
			t.Errorf("%s: size %s, want %d", way.name, got, size)
		}
		if n, err := way.down(); err != nil || n != size {
			t.Errorf("%s: read %d octets, %v", way.name, n, err)
		}
		out(t, sb, "rm /srv/big")
	}
	after := s.resident(t)
	t.Logf("%d octets each way, three times: the most memory was %v, before it %v", size, after, before)
	for name, n := range after {
		if n > before[name]+held {
			t.Errorf("%s took %d MiB for a file of %d MiB", name, (n-before[name])>>20, size>>20)
		}
	}
}

// forLong is a context for what moves much.
func forLong(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience)
	t.Cleanup(cancel)
	return ctx
}

// resident is the most memory that the service's processes had at once since it was asked for last.
func (s *service) resident(t testing.TB) map[string]int64 {
	t.Helper()
	s.mu.Lock()
	pids := map[string]int{"dsec up": s.cmd.Process.Pid, "keeper": s.keeper()}
	s.mu.Unlock()
	out := map[string]int64{}
	for name, pid := range pids {
		dir := fmt.Sprintf("/proc/%d/", pid)
		b, err := os.ReadFile(dir + "status")
		must(t, err)
		for line := range strings.Lines(string(b)) {
			var kib int64
			if n, _ := fmt.Sscanf(line, "VmHWM: %d kB", &kib); n == 1 {
				out[name] = kib << 10
			}
		}
		must(t, os.WriteFile(dir+"clear_refs", []byte("5"), 0)) // the mark falls back to what it has now
	}
	return out
}

// octets counts what is written.
type octets int64

func (n *octets) Write(p []byte) (int, error) { *n += octets(len(p)); return len(p), nil }

// counting is an endless reader of changing octets.
type counting struct{ n *int64 }

func (c counting) Read(p []byte) (int, error) {
	for i := range p {
		*c.n++
		p[i] = byte(*c.n >> 8)
	}
	return len(p), nil
}

// Watches, moves, removals and steps of files, by the SDK and as another user.
func TestFileCalls(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	f := sb.FilesAs("alice")
	must(t, f.MakeDir(within(t), "/home/alice/a/b", true))
	var seen []string
	var mu sync.Mutex
	ready := make(chan struct{})
	ctx, cancel := context.WithCancel(within(t))
	done := make(chan error, 1)
	go func() {
		done <- f.Watch(ctx, "/home/alice", true, func(e *dsecv1.WatchResponse) bool {
			mu.Lock()
			defer mu.Unlock()
			if e.Kind == "ready" {
				close(ready)
			}
			seen = append(seen, e.Kind+" "+e.Path)
			return true
		})
	}()
	<-ready
	must(t, f.WriteFile(within(t), "/home/alice/a/b/c", []byte("1"), 0))
	must(t, f.Move(within(t), "/home/alice/a/b/c", "/home/alice/a/d"))
	err := f.Remove(within(t), "/home/alice/a", false)
	errorText(t, err, "/home/alice/a", "empty")
	must(t, f.Remove(within(t), "/home/alice/a", true))
	must(t, eventually(func() error {
		mu.Lock()
		defer mu.Unlock()
		text := strings.Join(seen, "\n")
		for _, w := range []string{"created", "moved_from", "moved_to", "removed"} {
			if !strings.Contains(text, w) {
				return fmt.Errorf("no %s in %q", w, text)
			}
		}
		return nil
	}))
	cancel()
	<-done
	for _, p := range []string{"/root/x", "/etc/x", "/proc/sysrq-trigger"} {
		if err := f.WriteFile(within(t), p, []byte("x"), 0); err == nil {
			t.Errorf("alice wrote %s", p)
		} else {
			errorText(t, err, p)
		}
	}
	// The same step touches nothing the second time, and another body under it is refused.
	w := func(body string) (bool, error) {
		r, err := f.Write(within(t), "/home/alice/once", strings.NewReader(body), client.WriteOptions{Step: "w1"})
		if err != nil {
			return false, err
		}
		return r.Existed, nil
	}
	if existed, err := w("first"); err != nil || existed {
		t.Fatalf("%v, %v", existed, err)
	}
	out(t, sb, "echo later >/home/alice/once")
	if existed, err := w("first"); err != nil || !existed {
		t.Errorf("again: %v, %v", existed, err)
	}
	if _, err := w("other"); !errors.Is(err, client.ErrExists) {
		t.Errorf("another body: %v", err)
	}
	if got := out(t, sb, "cat /home/alice/once"); got != "later\n" {
		t.Errorf("the file holds %q", got)
	}
	names := []string{"new\nline", "sp ace", "b\xffd", "ü", "-rf", strings.Repeat("l", 255)}
	for _, n := range names {
		must(t, f.WriteFile(within(t), "/home/alice/"+n, []byte(n), 0))
		if b, err := f.ReadFile(within(t), "/home/alice/"+n); err != nil || string(b) != n {
			t.Errorf("%q: %q, %v", n, b, err)
		}
	}
	sort.Strings(names)
}

// What a tree up can't lay down is told, to the SDK and on the command line, and again when the same step is sent again.
func TestUploadTellsWhatItSkipped(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.box(t)
	data := tarOf(entry{name: "ok", data: "fine"}, entry{name: "dev\xff", kind: tar.TypeChar, major: 1, minor: 3}, entry{name: "odd", kind: 'Z'})
	for range 2 {
		r, err := http.NewRequest("PUT", "http://dsec/v1/trees/"+sb.ID+"?path=/srv/up&parents&step=tree-1", bytes.NewReader(data))
		must(t, err)
		r.Header.Set("Authorization", "Bearer "+s.key())
		code, body := s.send(t, r)
		var out struct{ Skipped []string }
		must(t, json.Unmarshal([]byte(body), &out))
		if code != 200 || len(out.Skipped) != 2 || !strings.Contains(out.Skipped[0], "dev") || !strings.Contains(out.Skipped[1], "odd") {
			t.Errorf("%d %s", code, body)
		}
	}
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "ok"), []byte("x"), 0o644))
	must(t, unix.Mknod(filepath.Join(dir, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	b, err := s.dsec("cp", dir, sb.ID+":/srv/cli").CombinedOutput()
	if err != nil || !strings.Contains(string(b), "skipped") || !strings.Contains(string(b), "null") {
		t.Errorf("dsec cp: %v %s", err, b)
	}
}

// A layer comes in as a plain body, of any size, under a name or without one; what is no tar or broke off leaves nothing under the name.
func TestPutLayer(t *testing.T) {
	t.Parallel()
	s := shared(t)
	put := func(query string, body io.Reader) (int, string) {
		t.Helper()
		r, err := http.NewRequest("PUT", "http://dsec/v1/layers"+query, body)
		must(t, err)
		r.Header.Set("Authorization", "Bearer "+s.key())
		return s.send(t, r)
	}
	data := tarOf(entry{name: "srv/", kind: tar.TypeDir}, entry{name: "srv/put", data: strings.Repeat("x", 3<<20)})
	var out struct {
		Layer     struct{ ID string }
		Published string
		Existed   bool
	}
	code, body := put("?name=put/one&source=a+test", bytes.NewReader(data))
	must(t, json.Unmarshal([]byte(body), &out))
	if code != 200 || out.Published != "put/one@1" || out.Layer.ID != s.layer(t, data) {
		t.Fatalf("%d %s", code, body)
	}
	if code, body = put("", bytes.NewReader(data)); code != 200 || !strings.Contains(body, `"existed":true`) {
		t.Errorf("again: %d %s", code, body)
	}
	for query, want := range map[string]string{"?name=Bad%20Name": "publish", "?nmae=x": "nmae", "?name=put/two": "tar"} {
		if code, body := put(query, strings.NewReader(strings.Repeat("no tar", 1000))); code != 400 || !strings.Contains(body, want) {
			t.Errorf("%s: %d %s", query, code, body)
		}
	}
	if _, err := s.client().LayerService.GetLayer(within(t), connect.NewRequest(&dsecv1.GetLayerRequest{Ref: "put/two"})); err == nil {
		t.Error("what is no tar has a name")
	}
}
