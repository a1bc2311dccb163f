package e2e

import (
	"archive/tar"
	"errors"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/client"
)

// Data sets are seen read-only, by many sandboxes, whatever the image has at their paths.
func TestVolumes(t *testing.T) {
	t.Parallel()
	s := shared(t)
	r, err := s.client().ImportLayer(within(t), "data/set", "test", strings.NewReader(string(tarOf(entry{name: "a", data: "one", uid: 1000}, entry{name: "sub/", kind: tar.TypeDir, mode: 0o750}, entry{name: "sub/b", data: "two"},
		entry{name: "su", mode: 0o4755, data: "x"}))))
	must(t, err)
	other := s.layer(t, tarOf(entry{name: "o", data: "other"}))
	base := s.layer(t, tarOf(entry{name: "mnt/", kind: tar.TypeDir}, entry{name: "mnt/hidden", data: "h"}, entry{name: "link", kind: tar.TypeSymlink, mode: 0o777, link: "mnt"}, entry{name: "file", data: "f"}))
	with := func(o *client.Options) {
		o.Layers = []string{s.small(t), base}
		o.Volumes = map[string]string{"/data/deep/er": r.Published, "/mnt": other}
	}
	sb := s.box(t, with)
	check := func(sb *client.Sandbox) {
		t.Helper()
		want(t, exe(t, sb, sh("cat /data/deep/er/a /data/deep/er/sub/b /mnt/o; ls /mnt; stat -c '%a %u' /data/deep/er/a /data/deep /data/deep/er/sub")), 0, "onetwoothero\n644 1000\n755 0\n750 0\n", "")
	}
	check(sb)
	if len(sb.Data.Volumes) != 2 || sb.Data.Volumes[0].Path != "/data/deep/er" || sb.Data.Volumes[0].Layer != r.Layer.Id {
		t.Errorf("told as %v", sb.Data.Volumes)
	}
	for _, script := range []string{"echo x > /data/deep/er/a", "rm /mnt/o", "touch /mnt/new", "chmod 777 /data/deep/er", "mv /mnt/o /tmp/", "umount /mnt", "mount -o remount,rw /mnt"} {
		if got := exe(t, sb, sh(script)); got.Outcome.Code == 0 {
			t.Errorf("%s: worked", script)
		}
	}
	check(sb)
	// The file calls see the same.
	b, err := sb.Files().ReadFile(within(t), "/data/deep/er/sub/b")
	if err != nil || string(b) != "two" {
		t.Errorf("read %q (%v)", b, err)
	}
	if err := sb.Files().WriteFile(within(t), "/mnt/o", []byte("x"), 0); err == nil {
		t.Error("the file call wrote into a volume")
	}
	// A snapshot has the places, not the contents.
	ref, err := sb.Snapshot(within(t), "")
	must(t, err)
	again := s.box(t, func(o *client.Options) { o.Layers = append(append([]string{}, sb.Data.Layers...), ref) })
	want(t, exe(t, again, sh("ls /data/deep/er; cat /mnt/hidden")), 0, "h", "")
	check(s.box(t, func(o *client.Options) {
		with(o)
		o.Layers = append(append([]string{}, sb.Data.Layers...), ref)
	}))
	for what, c := range map[string]struct {
		volumes map[string]string
		kind    error
		word    string
	}{
		"no layer":         {map[string]string{"/data": "data/none"}, client.ErrNotFound, "data/none"},
		"the root":         {map[string]string{"/": other}, client.ErrInvalid, "below the root"},
		"relative":         {map[string]string{"data": other}, client.ErrInvalid, "absolute"},
		"not clean":        {map[string]string{"/a/../b": other}, client.ErrInvalid, "clean"},
		"proc":             {map[string]string{"/proc/x": other}, client.ErrInvalid, "/proc"},
		"one in one":       {map[string]string{"/a": other, "/a/b": r.Published}, client.ErrInvalid, "in the other"},
		"a link":           {map[string]string{"/link/x": other}, client.ErrInvalid, "symbolic link"},
		"a file":           {map[string]string{"/file": other}, client.ErrInvalid, "no folder"},
		"below a file":     {map[string]string{"/file/x": other}, client.ErrInvalid, "no folder"},
		"a snapshot":       {map[string]string{"/data": ref}, client.ErrInvalid, "snapshot"},
		"not the tenant's": {map[string]string{"/data": "sha256:" + strings.Repeat("0", 64)}, client.ErrNotFound, "sha256:0"},
	} {
		_, err := s.tryBox(t, func(o *client.Options) { o.Layers, o.Volumes = []string{s.small(t), base}, c.volumes })
		if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.word) {
			t.Errorf("%s: %v", what, err)
		}
	}
	out, err := s.dsec("run", "--layer", s.small(t), "-v", "data/set@1:/data", "--", "cat", "/data/a").CombinedOutput()
	if err != nil || string(out) != "one" {
		t.Errorf("by the command: %s (%v)", out, err)
	}
}

// A host that was killed takes sandboxes back with their volumes, and lets the layers go when they are stopped.
func TestVolumesAfterACrash(t *testing.T) {
	t.Parallel()
	s := own(t)
	other := s.layer(t, tarOf(entry{name: "o", data: "other"}))
	sb := s.box(t, func(o *client.Options) { o.Volumes = map[string]string{"/data": other} })
	s.kill()
	must(t, s.begin())
	sb, err := s.client().Get(within(t), sb.ID)
	must(t, err)
	want(t, exe(t, sb, sh("cat /data/o")), 0, "other", "")
	if len(sb.Data.Volumes) != 1 || sb.Data.Volumes[0].Layer != other {
		t.Errorf("told as %v", sb.Data.Volumes)
	}
	must(t, sb.Stop(within(t)))
	again := s.box(t, func(o *client.Options) { o.Volumes = map[string]string{"/data": other} })
	want(t, exe(t, again, sh("cat /data/o")), 0, "other", "")
	must(t, again.Stop(within(t)))
}
