package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/client"
	"github.com/dsec-dev/dsec/internal/build"
)

type cpCmd struct {
	User string `short:"u" help:"User inside (name, uid or uid:gid)."`
	From string `arg:"" help:"SANDBOX:/path, or a local path, or - for standard input."`
	To   string `arg:"" help:"SANDBOX:/path, or a local path, or - for standard output. A path that ends in / or is a folder takes the source into it."`
}

func (x *cpCmd) Run(ctx context.Context, c *cli) error {
	fromID, fromPath, fromIn := splitRemote(x.From)
	toID, toPath, toIn := splitRemote(x.To)
	if fromIn == toIn {
		return errors.New("one side must be SANDBOX:/path, with a path from the root, and the other a local path (./a:b for one with a colon) or -")
	}
	cl, err := c.client(ctx)
	if err != nil {
		return err
	}
	if fromIn {
		return x.down(ctx, cl.Sandbox(fromID).FilesAs(x.User), fromPath)
	}
	return x.up(ctx, cl.Sandbox(toID).FilesAs(x.User), toPath)
}

func splitRemote(s string) (id, p string, remote bool) {
	id, p, ok := strings.Cut(s, ":")
	if !ok || !strings.HasPrefix(p, "/") || strings.Contains(id, "/") {
		return "", s, false
	}
	return id, p, true
}

func (x *cpCmd) up(ctx context.Context, f *client.Files, to string) error {
	if x.From == "-" {
		_, err := f.Write(ctx, to, os.Stdin, client.WriteOptions{Parents: true})
		return err
	}
	info, err := os.Stat(x.From)
	if err != nil {
		return err
	}
	if into(ctx, f, to) {
		to = path.Join(to, filepath.Base(x.From))
	}
	if !info.IsDir() {
		in, err := os.Open(x.From)
		if err != nil {
			return err
		}
		defer in.Close()
		_, err = f.Write(ctx, to, newMeter(in, info.Size()), client.WriteOptions{Mode: uint32(info.Mode().Perm()), Parents: true, Modified: info.ModTime()})
		return err
	}
	r, w := io.Pipe()
	go func() { w.CloseWithError(tarFolder(ctx, w, x.From)) }()
	defer r.Close()
	res, err := f.Upload(ctx, to, newMeter(r, -1))
	for _, s := range res.GetSkipped() {
		say("skipped %s", s)
	}
	return err
}

func into(ctx context.Context, f *client.Files, to string) bool {
	if strings.HasSuffix(to, "/") {
		return true
	}
	info, err := f.Stat(ctx, to, true)
	return err == nil && info.Type == "dir"
}

// tarFolder writes the folder's content as a tar whose names are relative to it.
func tarFolder(ctx context.Context, w io.Writer, dir string) error {
	return tarFolderAt(ctx, w, dir, "/")
}

// tarFolderAt puts the folder's content below a folder of the tar, whose parents belong to root.
func tarFolderAt(ctx context.Context, w io.Writer, dir, at string) error {
	t := tar.NewWriter(w)
	at = strings.Trim(path.Clean("/"+at), "/")
	for i, r := range at {
		if r == '/' {
			if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: at[:i] + "/", Mode: 0o755, Format: tar.FormatPAX}); err != nil {
				return err
			}
		}
	}
	links := map[[2]uint64]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		return tarEntry(t, p, path.Join(at, filepath.ToSlash(rel)), links)
	})
	if err != nil {
		return err
	}
	return t.Close()
}

func tarEntry(t *tar.Writer, p, name string, links map[[2]uint64]string) error {
	info, err := os.Lstat(p)
	if err != nil {
		return err
	}
	target := ""
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		if target, err = os.Readlink(p); err != nil {
			return err
		}
	case info.Mode()&fs.ModeSocket != 0:
		say("skipped %s: a socket", p)
		return nil
	}
	h, err := build.EntryOf(info, name, target)
	if err != nil {
		return err
	}
	if id, n := inode(info); n > 1 && info.Mode().IsRegular() {
		if first, ok := links[id]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return t.WriteHeader(h)
		}
		links[id] = name
	}
	if err := capability(p, h); err != nil {
		return err
	}
	if err := build.WriteEntry(t, h, func() (*os.File, error) { return os.Open(p) }); err != nil {
		return fmt.Errorf("%s: %w", p, err)
	}
	return nil
}

func (x *cpCmd) down(ctx context.Context, f *client.Files, from string) error {
	info, err := f.Stat(ctx, from, true)
	if err != nil {
		return err
	}
	if x.To == "-" {
		_, err := f.Read(ctx, from, 0, 0, os.Stdout)
		return err
	}
	to := x.To
	if st, err := os.Stat(to); strings.HasSuffix(to, "/") || err == nil && st.IsDir() {
		to = filepath.Join(to, path.Base(from))
	}
	if info.Type != "dir" {
		return downFile(ctx, f, from, to, fs.FileMode(info.Mode&0o777), info.Modified.AsTime())
	}
	return downTree(ctx, f, from, to)
}

// downFile writes beside the target and renames, so that a broken transfer leaves no half file under its name.
func downFile(ctx context.Context, f *client.Files, from, to string, mode fs.FileMode, modified time.Time) error {
	out, err := os.CreateTemp(filepath.Dir(to), ".dsec-*")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	h := &holes{f: out}
	if _, err := f.Read(ctx, from, 0, 0, h); err != nil {
		out.Close()
		return err
	}
	if err := errors.Join(h.finish(), out.Chmod(mode), out.Close(), os.Chtimes(out.Name(), modified, modified)); err != nil {
		return err
	}
	return os.Rename(out.Name(), to)
}

func downTree(ctx context.Context, f *client.Files, from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(to)
	if err != nil {
		return err
	}
	defer root.Close()
	r, w := io.Pipe()
	var skipped []string
	go func() {
		s, err := f.Download(ctx, from, w)
		skipped = s
		w.CloseWithError(err)
	}()
	err = untar(root, newMeter(r, -1))
	r.CloseWithError(err)
	for _, s := range skipped {
		say("skipped %s", s)
	}
	return err
}

// untar lays a tar from a sandbox, which is hostile, below root: nothing can land outside of it.
func untar(root *os.Root, r io.Reader) error {
	t := tar.NewReader(r)
	type dir struct {
		name string
		h    *tar.Header
	}
	var dirs []dir
	for {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		name := filepath.FromSlash(path.Clean(strings.TrimLeft(h.Name, "/")))
		if !filepath.IsLocal(name) {
			return fmt.Errorf("entry %q leaves the folder", h.Name)
		}
		if h.Typeflag == tar.TypeDir {
			if err := root.MkdirAll(name, 0o700|h.FileInfo().Mode().Perm()); err != nil {
				return err
			}
			dirs = append(dirs, dir{name, h})
			continue
		}
		if err := untarEntry(root, t, name, h); err != nil {
			return fmt.Errorf("%s: %w", h.Name, err)
		}
	}
	// Modes and times of folders last, since what is made in them changes the times and may need to be allowed.
	for i := len(dirs) - 1; i >= 0; i-- {
		d := dirs[i]
		if err := errors.Join(root.Chmod(d.name, d.h.FileInfo().Mode().Perm()), root.Chtimes(d.name, d.h.ModTime, d.h.ModTime)); err != nil {
			return err
		}
	}
	return nil
}

func untarEntry(root *os.Root, t *tar.Reader, name string, h *tar.Header) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	_ = root.Remove(name)
	switch h.Typeflag {
	case tar.TypeReg:
		f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, h.FileInfo().Mode().Perm())
		if err != nil {
			return err
		}
		return errors.Join(copyHoles(f, t), f.Chmod(h.FileInfo().Mode().Perm()), f.Close(), root.Chtimes(name, h.ModTime, h.ModTime))
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return root.Link(filepath.FromSlash(path.Clean(h.Linkname)), name)
	}
	say("skipped %s: a device or FIFO", h.Name)
	return nil
}
