package trace

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// overlay is a mounted overlay with two layers below.
type overlay struct {
	upper, at string
	stack     Stack
}

func newOverlay(t *testing.T, script string) overlay {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts an overlay")
	}
	dir := t.TempDir()
	o := overlay{upper: dir + "/upper", at: dir + "/at"}
	for _, d := range []string{"low0", "low1", "upper", "work", "at"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	sh(t, dir+"/low0", script)
	sh(t, dir+"/low1", "mkdir -p gone; mknod gone/x c 0 0; mkdir d2; echo upper one >d2/both")
	tmpfs := dir + "/tmp"
	if err := os.Mkdir(tmpfs, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("dsec-test", tmpfs, "tmpfs", 0, ""); err != nil { // an upper that is no overlay itself
		t.Skip("needs mounts: " + err.Error())
	}
	t.Cleanup(func() { unix.Unmount(tmpfs, unix.MNT_DETACH) })
	o.upper = tmpfs + "/upper"
	sh(t, tmpfs, "mkdir upper work")
	if err := unix.Mount("dsec-test", o.at, "overlay", 0, "lowerdir="+dir+"/low1:"+dir+"/low0,upperdir="+o.upper+",workdir="+tmpfs+"/work"); err != nil {
		t.Skip("needs overlayfs: " + err.Error())
	}
	t.Cleanup(func() { unix.Unmount(o.at, unix.MNT_DETACH) })
	for _, l := range []string{"low1", "low0"} {
		fd, err := unix.Open(filepath.Join(dir, l), unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		o.stack = append(o.stack, fd)
	}
	return o
}

func sh(t *testing.T, dir, script string) {
	t.Helper()
	c := exec.Command("/bin/sh", "-ec", script)
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}

func sum(s string) string { return fmt.Sprintf(" %x", sha256.Sum256([]byte(s)))[:9] }

// told shows changes in a line each.
func told(f Files) []string {
	out := []string{}
	state := func(s State) string {
		text := fmt.Sprintf("%s %04o %d", s.Type, s.Mode, s.Size)
		if s.SHA256 != nil {
			text += fmt.Sprintf(" %x", s.SHA256)[:9]
		}
		if s.Link != "" {
			text += " -> " + s.Link
		}
		return text
	}
	for _, c := range f.Changes {
		text := c.Kind + " " + c.Path
		if c.Kind != Created {
			text += " was " + state(c.Before)
		}
		if c.Kind != Removed {
			text += " is " + state(c.After)
		}
		if c.Replaced {
			text += " replaced"
		}
		if c.Earlier {
			text += " earlier"
		}
		out = append(out, text)
	}
	return out
}

const below = `mkdir -p d/sub gone cache/0a; echo low >f; echo a >d/a; echo b >d/sub/b; ln -s f l; echo x >gone/x; echo y >gone/y; mkdir -p d2; echo lower one >d2/both; chmod 644 f d/a d/sub/b`

func TestLook(t *testing.T) {
	for name, c := range map[string]struct {
		before, step string
		want         []string
	}{
		"nothing":                {"", "cat f >/dev/null", []string{}},
		"create":                 {"", "umask 022; echo hi >new; mkdir n; ln -s nowhere n/l; mkfifo n/p", []string{"created /n is dir 0755 0", "created /n/l is link 0000 0 -> nowhere", "created /n/p is fifo 0644 0", "created /new is file 0644 3" + sum("hi\n")}},
		"change below":           {"", "echo more >>f", []string{"changed /f was file 0644 4" + sum("low\n") + " is file 0644 9" + sum("low\nmore\n")}},
		"change of the upper":    {"echo one >u", "echo two >u", []string{"changed /u was file 0644 4 is file 0644 4" + sum("two\n")}},
		"the same again":         {"", "echo low >f", []string{}},
		"mode":                   {"", "chmod 600 d/a; chmod 700 d", []string{"changed /d was dir 0755 0 is dir 0700 0", "changed /d/a was file 0644 2" + sum("a\n") + " is file 0600 2" + sum("a\n")}},
		"remove below":           {"", "rm f l; rm -r d", []string{"removed /d was dir 0755 0", "removed /f was file 0644 4" + sum("low\n"), "removed /l was link 0000 0 -> f"}},
		"remove of the upper":    {"echo one >u; mkdir ud; echo x >ud/x", "rm -r u ud", []string{"removed /u was file 0644 4", "removed /ud was dir 0755 0", "removed /ud/x was file 0644 2"}},
		"replace by renaming":    {"", "echo low2 >t; mv t f", []string{"changed /f was file 0644 4" + sum("low\n") + " is file 0644 5" + sum("low2\n")}},
		"a link for a file":      {"", "rm f; ln -s d f", []string{"changed /f was file 0644 4" + sum("low\n") + " is link 0000 0 -> d"}},
		"a folder anew":          {"", "rm -r d; mkdir d; echo a >d/a", []string{"changed /d was dir 0755 0 is dir 0755 0 replaced"}},
		"a file that was hidden": {"", "echo x >gone/x", []string{"created /gone/x is file 0644 2" + sum("x\n")}},
		"made and removed":       {"", "echo x >t; rm t", []string{}},
		"removed and made again": {"rm f", "echo low >f", []string{"created /f is file 0644 4" + sum("low\n")}},
		"the upper one counts":   {"", "rm d2/both", []string{"removed /d2/both was file 0644 10" + sum("upper one\n")}},
		"a folder renamed":       {"mkdir u; echo x >u/x; sleep 0.05", "mv u v", []string{"removed /u was dir 0755 0", "removed /u/x was file 0644 2", "created /v is dir 0755 0", "created /v/x is file 0644 2" + sum("x\n")}},
	} {
		t.Run(name, func(t *testing.T) {
			o := newOverlay(t, "umask 022; "+below)
			sh(t, o.at, "umask 022; :;"+c.before)
			tree := NewTree(o.upper, o.stack, nil, nil, nil)
			from := time.Now()
			sh(t, o.at, "umask 022; "+c.step)
			f := tree.Look(context.Background(), from)
			if d := cmp.Diff(c.want, told(f)); d != "" {
				t.Error(d)
			}
			if f.Partial || f.More != 0 {
				t.Errorf("partial %v, %d more", f.Partial, f.More)
			}
			if again := tree.Look(context.Background(), time.Now()); len(again.Changes) != 0 {
				t.Errorf("told twice: %q", told(again))
			}
		})
	}
}

func TestLookKnowsWhatItToldBefore(t *testing.T) {
	o := newOverlay(t, "umask 022; "+below)
	tree := NewTree(o.upper, o.stack, []string{"/cache/"}, []string{"etc"}, nil)
	defer tree.Close()
	step := func(script string) Files {
		from := time.Now()
		sh(t, o.at, "umask 022; "+script)
		return tree.Look(context.Background(), from)
	}
	step("echo one >f; echo u >u")
	if d := cmp.Diff([]string{"changed /f was file 0644 4" + sum("one\n") + " is file 0644 4" + sum("two\n"), "removed /u was file 0644 2" + sum("u\n")}, told(step("echo two >f; rm u"))); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"removed /f was file 0644 4" + sum("two\n")}, told(step("rm f; mkdir -p etc; echo x >etc/x"))); d != "" {
		t.Error(d)
	}
	f := step("echo x >cache/0a/x; echo z >z")
	if d := cmp.Diff([]string{"created /z is file 0644 2" + sum("z\n")}, told(f)); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"/cache"}, f.Volatile); d != "" {
		t.Error(d)
	}
	if f := step(":"); f.Volatile != nil {
		t.Errorf("volatile told again: %q", f.Volatile)
	}
	sh(t, o.at, "echo late >late; sleep 0.06")
	if d := cmp.Diff([]string{"created /late is file 0644 5" + sum("late\n") + " earlier", "created /now is file 0644 4" + sum("now\n")}, told(step("echo now >now"))); d != "" {
		t.Error(d)
	}
}

func TestLookIsBounded(t *testing.T) {
	o := newOverlay(t, "umask 022; "+below)
	b := &Budget{Most: 900}
	tree := NewTree(o.upper, o.stack, nil, nil, b)
	from := time.Now()
	sh(t, o.at, "mkdir many; cd many; seq 800 | xargs touch")
	f := tree.Look(context.Background(), from)
	if len(f.Changes) != MaxChanges || f.More != 801-MaxChanges || f.Partial {
		t.Errorf("%d told, %d more, partial %v", len(f.Changes), f.More, f.Partial)
	}
	sh(t, o.at, "cd many; seq 801 1800 | xargs touch")
	f = tree.Look(context.Background(), from)
	if !f.Partial || len(tree.known) > 900 || b.used.Load() > 900 {
		t.Errorf("partial %v, %d remembered", f.Partial, len(tree.known))
	}
	tree.visits = 300
	if f = tree.Look(context.Background(), time.Now()); !f.Partial || f.Visited > 300 {
		t.Errorf("partial %v, %d visited", f.Partial, f.Visited)
	}
	tree.Close()
	if b.used.Load() != 0 {
		t.Errorf("%d left of the budget", b.used.Load())
	}
	sh(t, o.at, "rm -r many; dd if=/dev/zero of=big bs=1M count=17 2>/dev/null")
	tree = NewTree(t.TempDir(), o.stack, nil, nil, nil)
	tree.dir = o.upper
	if f = tree.Look(context.Background(), from); len(f.Changes) != 1 || f.Unhashed != 1 || f.Changes[0].After.SHA256 != nil || f.Hashed != 0 {
		t.Errorf("a large file: %q, %d unhashed", told(f), f.Unhashed)
	}
}
