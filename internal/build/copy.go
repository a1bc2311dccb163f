package build

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
)

// tree is what a copy step copies: one file under another name, or all below a folder. Whatever links say, now or later, nothing outside
// of the build file's folder is read: who builds may not be who wrote the folder.
type tree struct {
	root    *os.Root // the folder that is copied, or the one file's build folder
	file    string   // the one file, in root
	single  string   // name that it gets
	exclude []string
}

func openTree(dir string, s *Step) (*tree, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	t := &tree{root: root, exclude: s.Exclude}
	info, err := root.Stat(s.Copy)
	switch {
	case err != nil:
		err = fmt.Errorf("copy %s: %w (links that leave the build file's folder are not followed)", s.Copy, err)
	case info.IsDir():
		t.root, err = root.OpenRoot(s.Copy)
		root.Close()
		root = t.root
	case !info.Mode().IsRegular():
		err = fmt.Errorf("copy %s: is neither file, folder nor link", s.Copy)
	default:
		t.file, t.single = s.Copy, path.Base(filepath.ToSlash(s.Copy))
		if !strings.HasSuffix(s.To, "/") {
			t.single = path.Base(s.To)
		}
	}
	if err != nil {
		if root != nil {
			root.Close()
		}
		return nil, err
	}
	return t, nil
}

func (t *tree) close() error { return t.root.Close() }

// open opens a regular file of the tree. One that was replaced by something else since is refused, and never waited for.
func (t *tree) open(file string) (*os.File, error) {
	f, err := t.root.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return nil, fmt.Errorf("copy %s: changed meanwhile", file)
	}
	return f, nil
}

// folder is where the tree is unpacked.
func (t *tree) folder(to string) string {
	if t.single != "" && !strings.HasSuffix(to, "/") {
		return path.Dir(to)
	}
	return path.Clean(to)
}

func (t *tree) left(rel string) bool {
	for _, p := range t.exclude {
		if ok, _ := path.Match(p, rel); ok {
			return true
		}
		if ok, _ := path.Match(p, path.Base(rel)); ok {
			return true
		}
	}
	return false
}

// walk calls each for every entry in order of names.
func (t *tree) walk(each func(file, name string, info fs.FileInfo) error) error {
	if t.single != "" {
		info, err := t.root.Stat(t.file)
		if err == nil && !info.Mode().IsRegular() {
			err = fmt.Errorf("copy %s: changed meanwhile", t.file)
		}
		if err != nil {
			return err
		}
		return each(t.file, t.single, info)
	}
	return fs.WalkDir(t.root.FS(), ".", func(rel string, d fs.DirEntry, err error) error {
		if err != nil || rel == "." {
			return err
		}
		if t.left(rel) {
			if d.IsDir() {
				return filepath.SkipDir
			}
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if k := info.Mode().Type(); k != 0 && k != fs.ModeDir && k != fs.ModeSymlink {
			return fmt.Errorf("copy %s: is neither file, folder nor link", rel)
		}
		return each(rel, rel, info)
	})
}

// hash is of names, modes and contents. Times are left out: a fresh checkout is the same tree.
func (t *tree) hash() (string, error) {
	h := sha256.New()
	err := t.walk(func(file, name string, info fs.FileInfo) error {
		fmt.Fprintf(h, "%q %o %d\n", name, info.Mode(), info.Size())
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := t.root.Readlink(file)
			fmt.Fprintf(h, "%q\n", target)
			return err
		case info.Mode().IsRegular():
			f, err := t.open(file)
			if err != nil {
				return err
			}
			defer f.Close()
			own := sha256.New()
			if _, err := io.Copy(own, f); err != nil {
				return err
			}
			fmt.Fprintf(h, "%x\n", own.Sum(nil))
		}
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

// write writes the tree as a tar whose entries belong to uid and gid.
func (t *tree) write(w io.Writer, uid, gid int) error {
	tw := tar.NewWriter(w)
	err := t.walk(func(file, name string, info fs.FileInfo) error {
		target := ""
		var err error
		if info.Mode()&fs.ModeSymlink != 0 {
			if target, err = t.root.Readlink(file); err != nil {
				return err
			}
		}
		h, err := EntryOf(info, name, target)
		if err != nil {
			return err
		}
		h.Uid, h.Gid, h.Uname, h.Gname = uid, gid, "", ""
		if err := WriteEntry(tw, h, func() (*os.File, error) { return t.open(file) }); err != nil {
			return fmt.Errorf("copy %s: %w", file, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

// EntryOf is a file's entry in an archive, under another name.
func EntryOf(info fs.FileInfo, name, target string) (*tar.Header, error) {
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return nil, err
	}
	h.Name, h.Format = name, tar.FormatPAX
	if info.IsDir() {
		h.Name += "/"
	}
	return h, nil
}

// WriteEntry writes an entry and, of an ordinary file, its octets; one that became shorter since is an error, and what was added to it is left out.
func WriteEntry(tw *tar.Writer, h *tar.Header, open func() (*os.File, error)) error {
	if err := tw.WriteHeader(h); err != nil || h.Typeflag != tar.TypeReg {
		return err
	}
	f, err := open()
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.CopyN(tw, f, h.Size)
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("it became shorter while it was read: %d of %d octets", n, h.Size)
	}
	return err
}
