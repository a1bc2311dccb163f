package e2e

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"sort"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/client"
)

func TestB03DeletionMarks(t *testing.T) {
	t.Parallel()
	s := shared(t)
	noHome := s.layer(t, tarOf(entry{name: "srv/", kind: tar.TypeDir}, entry{name: "srv/x", data: "x"}))
	withHome := s.layer(t, tarOf(entry{name: "data/", kind: tar.TypeDir}, entry{name: "data/gone.txt", data: "old"}, entry{name: "data/stays", data: "s"},
		entry{name: "data/sub/", kind: tar.TypeDir}, entry{name: "data/sub/below", data: "b"}))
	marks := s.layer(t, tarOf(entry{name: "data/", kind: tar.TypeDir}, entry{name: "data/.wh.gone.txt"}, entry{name: "data/kept", data: "k"}))
	again := s.layer(t, tarOf(entry{name: "data/", kind: tar.TypeDir}, entry{name: "data/.wh.gone.txt"}, entry{name: "data/.wh.never-was"}))
	opaque := s.layer(t, tarOf(entry{name: "data/", kind: tar.TypeDir}, entry{name: "data/.wh..wh..opq"}, entry{name: "data/only", data: "o"}))
	for _, c := range []struct {
		name   string
		layers []string
		want   []string
	}{
		{"nothing to delete", []string{noHome, marks}, []string{"kept"}},
		{"one to delete", []string{withHome, marks}, []string{"kept", "stays", "sub"}},
		{"marks twice", []string{withHome, marks, again}, []string{"kept", "stays", "sub"}},
		{"opaque over nothing", []string{noHome, opaque}, []string{"only"}},
		{"opaque over a folder", []string{withHome, opaque}, []string{"only"}},
		{"a mark over opaque", []string{withHome, opaque, marks}, []string{"kept", "only"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			sb := s.box(t, func(o *client.Options) { o.Layers = append([]string{s.small(t)}, c.layers...) })
			check := func(t *testing.T, sb *client.Sandbox) {
				t.Helper()
				for _, user := range []string{"root", "nobody"} {
					r := exe(t, sb, shAs(user, "ls -la /data | awk 'NR>1 && $9!=\".\" && $9!=\"..\" {print $9}'; cd / && tar c data | tar t | sed -n 's,^data/,,p' | grep -v / | sort"))
					if wantText := strings.Join(c.want, "\n") + "\n"; r.Outcome.Code != 0 || len(r.Stderr) > 0 || !strings.HasPrefix(string(r.Stdout), wantText) || strings.Contains(string(r.Stdout), "?") || strings.Contains(string(r.Stdout), "gone") {
						t.Errorf("as %s: %s", user, describe(r))
					}
					list, err := sb.FilesAs(user).List(within(t), "/data", 1)
					must(t, err)
					var got []string
					for _, e := range list {
						got = append(got, e.Path)
					}
					sort.Strings(got)
					if d := cmp.Diff(c.want, got); d != "" {
						t.Errorf("listed as %s: %s", user, d)
					}
				}
				var b bytes.Buffer
				if skipped, err := sb.Files().Download(within(t), "/data", &b); err != nil || len(skipped) > 0 {
					t.Errorf("download: %v, skipped %v", err, skipped)
				}
			}
			check(t, sb)
			// The same after a snapshot in which more was deleted and made again.
			out(t, sb, "echo n >/data/new; rm /data/new; rm -rf /data/sub; mkdir /data/sub; rmdir /data/sub; [ ! -e /srv/x ] || { rm /srv/x; echo again >/srv/x; }")
			ref, err := sb.Snapshot(within(t), "")
			must(t, err)
			var left []string
			for _, w := range c.want {
				if w != "sub" {
					left = append(left, w)
				}
			}
			c.want = left
			check(t, s.box(t, func(o *client.Options) { o.Layers = append(append([]string{}, sb.Data.Layers...), ref) }))
		})
	}
}

// netRaw is a file capability as the kernel stores it: version 2, effective, cap_net_raw.
var netRaw = string([]byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})

func TestB08SetuidAndCapabilities(t *testing.T) {
	t.Parallel()
	s := shared(t)
	own := s.layer(t, tarOf(
		entry{name: "a", mode: 0o4755, uid: 1000, gid: 1000, data: "a"},
		entry{name: "b", mode: 0o2755, gid: 42, data: "b"},
		entry{name: "c", mode: 0o755, data: "c", xattr: map[string]string{"security.capability": netRaw}},
		entry{name: "f/", kind: tar.TypeDir, mode: 0o3775, uid: 5, gid: 6},
	))
	const show = "stat -c '%n %a %u:%g' /a /b /c /f /tmp/d /tmp/e; getcap /c /tmp/e"
	const right = "/a 4755 1000:1000\n/b 2755 0:42\n/c 755 0:0\n/f 3775 5:6\n/tmp/d 4755 1000:1000\n/tmp/e 755 0:0\n/c cap_net_raw=ep\n/tmp/e cap_net_bind_service=ep\n"
	sb := s.debianBox(t, func(o *client.Options) { o.Layers = append(o.Layers, own) })
	out(t, sb, "cp /bin/true /tmp/d; cp /bin/true /tmp/e; chown 1000:1000 /tmp/d; chmod u+s /tmp/d; setcap cap_net_bind_service+ep /tmp/e")
	check := func(what string, sb *client.Sandbox) {
		t.Helper()
		if got := out(t, sb, show); got != right {
			t.Errorf("%s: %s", what, cmp.Diff(right, got))
		}
		// The capability works for who runs it, and only with that sandbox's own root id.
		want(t, exe(t, sb, shAs("alice", "/tmp/e && /tmp/d")), 0, "", "")
	}
	check("in the sandbox", sb)
	for i := range 3 { // a snapshot of a snapshot of a snapshot, each in another range of uids
		ref, err := sb.Snapshot(within(t), "")
		must(t, err)
		layers := append(append([]string{}, sb.Data.Layers...), ref)
		sb = s.debianBox(t, func(o *client.Options) { o.Layers = layers })
		check(fmt.Sprintf("snapshot %d", i+1), sb)
		out(t, sb, "touch /tmp/another")
	}
	// And through a tree down and up again, as root who keeps owners.
	var b bytes.Buffer
	if _, err := sb.Files().Download(within(t), "/f", &b); err != nil {
		t.Fatal(err)
	}
	var tree bytes.Buffer
	if _, err := sb.Files().Download(within(t), "/tmp", &tree); err != nil {
		t.Fatal(err)
	}
	found := entries(t, bytes.NewReader(tree.Bytes()))
	if !strings.Contains(found["d"], "4755 1000:1000") {
		t.Errorf("in the tar: %v", found)
	}
	again := s.layer(t, tree.Bytes())
	sb = s.debianBox(t, func(o *client.Options) { o.Layers = append(o.Layers, own, again) })
	if got := out(t, sb, "stat -c '%a %u:%g' /d /e; getcap /e"); got != "4755 1000:1000\n755 0:0\n/e cap_net_bind_service=ep\n" {
		t.Errorf("as a layer made of a tree: %q", got)
	}
}

func TestB24HardLinks(t *testing.T) {
	t.Parallel()
	s := shared(t)
	big := strings.Repeat("0123456789abcdef", 5<<20/16)
	low := tarOf(
		entry{name: "h/", kind: tar.TypeDir},
		entry{name: "h/f1", data: big},
		entry{name: "h/f2", kind: tar.TypeLink, link: "h/f1"},
		entry{name: "h/f3", kind: tar.TypeLink, link: "h/f1"},
		entry{name: "h/s", kind: tar.TypeSymlink, link: "f1"},
		entry{name: "h/s2", kind: tar.TypeLink, link: "h/s"},
		entry{name: "h/p", kind: tar.TypeFifo},
		entry{name: "h/p2", kind: tar.TypeLink, link: "h/p"},
	)
	r, err := s.client().ImportLayer(within(t), "", "test", bytes.NewReader(low))
	must(t, err)
	if r.Layer.Octets != int64(len(big)) || r.Layer.Forms[0].Size > 2*int64(len(big)) {
		t.Errorf("%d octets of content in %d stored, want one copy of %d", r.Layer.Octets, r.Layer.Forms[0].Size, len(big))
	}
	l1 := r.Layer.Id
	l2 := s.layer(t, tarOf(entry{name: "h/", kind: tar.TypeDir}, entry{name: "h/f2", data: "new"}, entry{name: "h/.wh.f3"}))
	sb := s.box(t, func(o *client.Options) { o.Layers = []string{s.small(t), l1} })
	if got := out(t, sb, "cd /h; stat -c '%h' f1 f2 f3 | tr '\\n' ' '; [ $(stat -c %i f1) = $(stat -c %i f3) ] && echo same; readlink s2; stat -c '%F %h' p2"); got != "3 3 3 same\nf1\nfifo 2\n" {
		t.Errorf("lower: %q", got)
	}
	top := func(layers []string) {
		t.Helper()
		sb := s.box(t, func(o *client.Options) { o.Layers = layers })
		got := out(t, sb, "cd /h; head -c 16 f1; wc -c <f1 | tr '\\n' ' '; cat f2; [ -e f3 ] || echo ' gone'; readlink s2; ls")
		if got != fmt.Sprintf("0123456789abcdef%d new gone\nf1\nf1\nf2\np\np2\ns\ns2\n", len(big)) {
			t.Errorf("top: %q", got)
		}
	}
	top([]string{s.small(t), l1, l2})
	// The same when a sandbox does it, and its snapshot is stacked.
	out(t, sb, "cd /h; rm f2 f3; printf new >f2")
	ref, err := sb.Snapshot(within(t), "")
	must(t, err)
	top(append(append([]string{}, sb.Data.Layers...), ref))
	// Links that a sandbox makes are links in its snapshot.
	mk := s.box(t)
	out(t, mk, "mkdir /k; cd /k; head -c 1000000 /dev/zero >a; ln a b; mkdir d; ln a d/c; ln -s a s; ln s s2")
	ref, err = mk.Snapshot(within(t), "")
	must(t, err)
	mk2 := s.box(t, func(o *client.Options) { o.Layers = append(append([]string{}, mk.Data.Layers...), ref) })
	if got := out(t, mk2, "cd /k; stat -c %h a b d/c s s2 | tr '\\n' ' '"); got != "3 3 3 2 2 " {
		t.Errorf("links of a snapshot: %q", got)
	}
	var b bytes.Buffer
	_, err = mk2.Files().Download(within(t), "/k", &b)
	must(t, err)
	links := 0
	for _, e := range entries(t, &b) {
		if e[0] == tar.TypeLink {
			links++
		}
	}
	if links < 2 {
		t.Errorf("%d links in the tree, want at least 2", links)
	}
	for _, bad := range []struct {
		name string
		data []byte
		word string
	}{
		{"before its target", tarOf(entry{name: "x", kind: tar.TypeLink, link: "y"}, entry{name: "y", data: "y"}), "x"},
		{"of nothing", tarOf(entry{name: "x", kind: tar.TypeLink, link: "nothing"}), "nothing"},
		{"of a folder", tarOf(entry{name: "d/", kind: tar.TypeDir}, entry{name: "x", kind: tar.TypeLink, link: "d"}), "x"},
		{"above the root", tarOf(entry{name: "../x", data: "x"}), ".."},
		{"cut off", low[:len(low)-200000], ""},
	} {
		_, err := s.client().ImportLayer(within(t), "", "test", bytes.NewReader(bad.data))
		if err == nil {
			t.Errorf("link %s: was taken", bad.name)
			continue
		}
		errorText(t, err, bad.word)
		if !errors.Is(err, client.ErrInvalid) {
			t.Errorf("link %s: %v; want an invalid argument", bad.name, err)
		}
	}
}

func TestB26UpperIsUsedAgain(t *testing.T) {
	t.Parallel()
	s := own(t, "--keep")
	mk := func(name string) *client.Sandbox {
		return s.box(t, func(o *client.Options) { o.Name = name; o.Key = "key-" + name })
	}
	a, b := mk("first"), mk("second")
	write := sh("head -c 100000000 /dev/urandom >/srv/data; md5sum </srv/data")
	sum := string(exe(t, a, write).Stdout)

	t.Run("snapshot, pause and resume while it runs", func(t *testing.T) {
		p, err := a.Start(within(t), sh("i=0; while :; do echo $i >/srv/count-$((i%50)); i=$((i+1)); done"))
		must(t, err)
		for range 3 {
			must(t, a.Pause(within(t)))
			ref, err := a.Snapshot(within(t), "")
			must(t, err)
			must(t, a.Resume(within(t)))
			sb := s.box(t, func(o *client.Options) { o.Layers = append(append([]string{}, a.Data.Layers...), ref) })
			if got := out(t, sb, "md5sum </srv/data; ls /srv | wc -l"); !strings.HasPrefix(got, sum) {
				t.Errorf("the snapshot holds %q, want %q", got, sum)
			}
			must(t, sb.Close())
		}
		must(t, p.Signal(within(t), 9))
	})
	t.Run("host killed", func(t *testing.T) {
		p, err := b.Start(within(t), client.Cmd{ID: "writer", Argv: []string{"sh", "-c", "head -c 100000000 /dev/zero >/srv/data; echo done; sleep 3600"}})
		must(t, err)
		s.kill()
		must(t, s.begin())
		a, b = s.client().Sandbox(a.ID), s.client().Sandbox(b.ID)
		if got := out(t, a, "md5sum </srv/data; echo more >/srv/more; cat /srv/more"); got != sum+"more\n" {
			t.Errorf("after the restart: %q", got)
		}
		waitOutput(t, s, b, p.ID, "done")
		if _, err := a.Snapshot(within(t), ""); err != nil {
			t.Errorf("snapshot after the restart: %v", err)
		}
	})
	t.Run("host and keeper killed", func(t *testing.T) {
		s.kill()
		must(t, syscall.Kill(s.keeper(), syscall.SIGKILL))
		must(t, s.begin())
		c := s.client()
		for _, id := range []string{a.ID, b.ID} {
			sb := c.Sandbox(id)
			waitState(t, sb, "failed")
			if sb.Data.Cause.GetClass() != "platform" {
				t.Errorf("cause %v, want platform", sb.Data.Cause)
			}
			if _, err := sb.Exec(within(t), "true"); err == nil {
				t.Errorf("%s took a command", id)
			}
		}
		if err := s.idle(); err != nil {
			t.Error(err)
		}
		// The names are free again, and new sandboxes work.
		for _, name := range []string{"first", "second"} {
			sb := s.box(t, func(o *client.Options) { o.Name = name })
			if got := out(t, sb, "ls /srv; echo x >/srv/x; cat /srv/x"); got != "x\n" {
				t.Errorf("a new %s: %q", name, got)
			}
			must(t, sb.Close())
		}
	})
	t.Run("keeper killed under a living host", func(t *testing.T) {
		sb := s.box(t, func(o *client.Options) { o.Name = "third" })
		p, err := sb.Start(within(t), sh("sleep 3600"))
		must(t, err)
		must(t, syscall.Kill(s.keeper(), syscall.SIGKILL))
		waitState(t, sb, "failed")
		if sb.Data.Cause.GetClass() != "platform" {
			t.Errorf("cause %v, want platform", sb.Data.Cause)
		}
		r, err := p.Wait(within(t))
		if err != nil || r.Outcome.Kind != "unknown" {
			t.Errorf("its command: %v, %v; want unknown", r, err)
		}
		if err := s.idle(); err != nil {
			t.Error(err)
		}
		must(t, eventually(func() error {
			n, err := s.tryBox(t, func(o *client.Options) { o.Name = "third" })
			if err != nil {
				return err
			}
			if got := out(t, n, "echo up"); got != "up\n" {
				return fmt.Errorf("%q", got)
			}
			return n.Close()
		}))
	})
	s.stopKept(t)
}

// stopKept ends a service that was begun with --keep, with all that it holds.
func (s *service) stopKept(t testing.TB) {
	t.Helper()
	if err := s.finish(syscall.SIGTERM); err != nil {
		t.Errorf("end with --keep: %v", err)
	}
	s.args = without(s.args, "--keep")
	must(t, s.begin()) // the test's cleanup ends it
}

// A path that no layer holds, or folders too deep, refuse a snapshot by name; the sandbox goes on, and without them it can be taken.
func TestSnapshotOfPathsThatAreTooLong(t *testing.T) {
	t.Parallel()
	s := shared(t)
	sb := s.debianBox(t)
	for _, c := range []struct {
		name, part  string
		deep, limit int
	}{{"long", strings.Repeat("d", 200), 100, 16384}, {"deep", "d", 1100, 1024}} {
		dig := fmt.Sprintf("import os\nos.makedirs('/srv/%s'); os.chdir('/srv/%[1]s')\nfor i in range(%d):\n  os.mkdir('%s'); os.chdir('%[3]s')\n", c.name, c.deep, c.part)
		if r := exe(t, sb, client.Cmd{Argv: []string{"python3", "-c", dig}}); !r.OK() {
			t.Fatalf("%s: %s", c.name, describe(r))
		}
		_, err := sb.Snapshot(within(t), "")
		if !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%s: %v, want invalid", c.name, err)
		}
		errorText(t, err, sb.ID, "srv/"+c.name+"/"+c.part[:1], fmt.Sprint(c.limit))
		if text := err.Error(); len(text) > 500 || strings.Contains(text, s.state) || strings.Count(text, sb.ID) > 1 {
			t.Errorf("%s: too long, twice the same, or the host's own folders: %v", c.name, text)
		}
		out(t, sb, "rm -rf /srv/"+c.name)
		if _, err := sb.Snapshot(within(t), ""); err != nil {
			t.Errorf("without it: %v", err)
		}
	}
}
