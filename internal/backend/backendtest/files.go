// Package backendtest holds the parts of the conformance suite of backends that need what lies above internal/sandbox.
package backendtest

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/guest"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

// Files is the part on files through the guest.
var Files = sandboxtest.Part{Name: "file", Run: testFiles}

func testFiles(t *testing.T, e *sandboxtest.Env) {
	open := func(t *testing.T, b *sandboxtest.Box, user string) *guest.Files {
		t.Helper()
		conn, err := b.Instance().Files(sandboxtest.Within(t), user)
		if errors.Is(err, sandbox.ErrUnsupported) {
			t.Skipf("skip: %s", sandboxtest.NoFiles)
		}
		if err != nil {
			t.Fatalf("files as %s: %v", user, err)
		}
		f := guest.NewFiles(conn)
		t.Cleanup(func() { f.Close() })
		return f
	}
	read := func(t *testing.T, f *guest.Files, path string, length int64) (string, error) {
		t.Helper()
		r, err := f.Read(sandboxtest.Within(t), path, 0, length)
		if err != nil {
			return "", err
		}
		defer r.Close()
		b, err := io.ReadAll(r)
		return string(b), err
	}
	t.Run("files are those of the sandbox, with the rights of the user", func(t *testing.T) {
		b := sandboxtest.NewBox(t, e)
		root, alice := open(t, b, "root"), open(t, b, "alice")
		if got, err := read(t, root, "/opt/locked/x", 0); err != nil || got != "x\n" {
			t.Errorf("root: %q, %v", got, err)
		}
		if _, err := read(t, alice, "/opt/locked/x", 0); !errors.Is(err, sandbox.ErrDenied) {
			t.Errorf("alice: %v, want ErrDenied", err)
		}
		b.Out(t, "echo by a command >/srv/base/kept")
		if got, err := read(t, root, "/srv/base/kept", 0); err != nil || got != "by a command\n" {
			t.Errorf("after a command: %q, %v", got, err)
		}
	})
	t.Run("B21: what is written belongs to the user, parents too", func(t *testing.T) {
		b := sandboxtest.NewBox(t, e)
		f := open(t, b, "alice")
		if _, err := f.Write(sandboxtest.Within(t), guest.WriteHeader{Path: "/home/alice/n1/n2/run.sh", Mode: 0o755, Parents: true, Size: -1}, strings.NewReader("#!/bin/sh\necho ran\n")); err != nil {
			t.Fatalf("write: %v", err)
		}
		if got := b.Out(t, "cd /home/alice; stat -c '%U %a' n1 n1/n2 n1/n2/run.sh; n1/n2/run.sh"); got != "alice 755\nalice 755\nalice 755\nran\n" {
			t.Errorf("%q", got)
		}
		if o, _ := b.As(t, "alice", "rm -r /home/alice/n1"); o.Kind != sandbox.Exited || o.Code != 0 {
			t.Errorf("alice can't remove what is hers: %+v", o)
		}
	})
	t.Run("B12: links are followed inside, never to the host", func(t *testing.T) {
		b := sandboxtest.NewBox(t, e)
		b.Out(t, "mkdir -p /var /run; ln -s /run /var/run; ln -s /etc /l; ln -s ../../../../../../etc /m; ln -s loop /loop")
		f := open(t, b, "root")
		mark := fmt.Sprintf("dsec-mark-%d", os.Getpid())
		for path, inside := range map[string]string{"/var/run/app/x": "/run/app/x", "/l/" + mark: "/etc/" + mark, "/m/" + mark + "2": "/etc/" + mark + "2"} {
			if _, err := f.Write(sandboxtest.Within(t), guest.WriteHeader{Path: path, Mode: 0o644, Parents: true, Size: -1}, strings.NewReader("here")); err != nil {
				t.Errorf("write %s: %v", path, err)
			}
			if got := b.Out(t, "cat "+inside); got != "here" {
				t.Errorf("%s did not arrive at %s: %q", path, inside, got)
			}
		}
		for _, host := range []string{"/etc/" + mark, "/etc/" + mark + "2"} {
			if _, err := os.Lstat(host); err == nil {
				t.Errorf("%s is on the host", host)
			}
		}
		if _, err := read(t, f, "/loop", 0); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a loop of links: %v; want a clear error", err)
		}
	})
	t.Run("B22: files whose size says nothing are read whole, endless ones to the length asked, and a FIFO waits within the context", func(t *testing.T) {
		b := sandboxtest.NewBox(t, e)
		b.Out(t, "mkfifo /tmp/fifo")
		f := open(t, b, "root")
		if got, err := read(t, f, "/proc/self/status", 0); err != nil || !strings.Contains(got, "\nUid:\t0\t") {
			t.Errorf("/proc/self/status: %.200q, %v", got, err)
		}
		if got, err := read(t, f, "/dev/zero", 1<<20); err != nil || got != strings.Repeat("\x00", 1<<20) {
			t.Errorf("/dev/zero: %d octets, %v", len(got), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if r, err := f.Read(ctx, "/tmp/fifo", 0, 0); err == nil {
			_, err = io.ReadAll(r)
			r.Close()
			if err == nil {
				t.Error("a FIFO without a writer was read")
			}
		}
		if got, err := read(t, f, "/srv/base/kept", 0); err != nil || got != "kept\n" {
			t.Errorf("the next call: %q, %v", got, err)
		}
		if _, err := read(t, f, "/srv/base", 0); err == nil {
			t.Error("a folder was read")
		}
	})
	t.Run("B19: a listing names everything, whatever it is", func(t *testing.T) {
		b := sandboxtest.NewBox(t, e)
		b.Out(t, "mkdir /tmp/d; cd /tmp/d; echo x >file; ln -s nowhere dangling; ln -s self self; mkfifo fifo; mkdir -m 700 closed; echo x >\"$(printf 'odd\\n\\377')\"")
		f := open(t, b, "nobody")
		got := map[string]guest.Kind{}
		if err := f.List(sandboxtest.Within(t), "/tmp/d", 1, func(l []guest.Info) error {
			for _, i := range l {
				got[strings.TrimPrefix(strings.TrimPrefix(i.Path, "/tmp/d"), "/")] = i.Kind
			}
			return nil
		}); err != nil {
			t.Fatalf("list: %v", err)
		}
		for name, kind := range map[string]guest.Kind{"file": guest.File, "dangling": guest.Link, "self": guest.Link, "fifo": guest.Fifo, "closed": guest.Dir, "odd\n\xff": guest.File} {
			if got[name] != kind {
				t.Errorf("%q is told as %q, want %q (all: %v)", name, got[name], kind, got)
			}
		}
	})
	t.Run("a tree goes down and up", func(t *testing.T) {
		b := sandboxtest.NewBox(t, e)
		f := open(t, b, "root")
		tree, err := f.Download(sandboxtest.Within(t), "/srv/base", nil)
		if err != nil {
			t.Fatalf("download: %v", err)
		}
		defer tree.Close()
		var text strings.Builder
		names := map[string]bool{}
		r := tar.NewReader(io.TeeReader(tree, &text))
		for {
			h, err := r.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("tar: %v", err)
			}
			names[h.Name] = true
		}
		io.Copy(&text, tree)
		if !names["kept"] || !names["sub/inner"] {
			t.Errorf("names in the tar: %v", names)
		}
		if _, err := f.Upload(sandboxtest.Within(t), guest.UploadHeader{Path: "/tmp/new", Parents: true}, strings.NewReader(text.String())); err != nil {
			t.Fatalf("upload: %v", err)
		}
		if got := b.Out(t, "cd /tmp/new; cat kept sub/inner; ls"); got != "kept\ninner\nkept\nremoved\nsub\n" {
			t.Errorf("%q", got)
		}
	})
	t.Run("an unknown user is refused by name, and a closed stream leaves no process", func(t *testing.T) {
		b := sandboxtest.NewBox(t, e)
		if conn, err := b.Instance().Files(sandboxtest.Within(t), "nosuch"); err == nil || errors.Is(err, sandbox.ErrUnsupported) {
			if err != nil {
				t.Skipf("skip: %s", sandboxtest.NoFiles)
			}
			conn.Close()
			t.Error("files as an unknown user")
		} else if !strings.Contains(err.Error(), "nosuch") {
			t.Errorf("%v; want the user's name", err)
		}
		for range 5 {
			open(t, b, "root").Close()
		}
		sandboxtest.Eventually(t, func() bool {
			s, err := b.Instance().Stats(sandboxtest.Within(t))
			return err == nil && s.Pids == 0
		}, func() string { return "file servers are left: " + b.Out(t, "ps") })
	})
}
