package build

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// tree is what a copy step copies: one file under another name, or all below a folder.
type tree struct {
	root    string
	single  string // name of the one file
	exclude []string
}

func openTree(dir string, s *Step) (*tree, error) {
	t := &tree{root: filepath.Join(dir, s.Copy), exclude: s.Exclude}
	info, err := os.Stat(t.root)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		t.single = path.Base(filepath.ToSlash(s.Copy))
		if !strings.HasSuffix(s.To, "/") {
			t.single = path.Base(s.To)
		}
	}
	return t, nil
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
		info, err := os.Stat(t.root)
		if err != nil {
			return err
		}
		return each(t.root, t.single, info)
	}
	return filepath.WalkDir(t.root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(t.root, p)
		if err != nil || rel == "." {
			return err
		}
		rel = filepath.ToSlash(rel)
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
			return fmt.Errorf("copy %s: is neither file, folder nor link", p)
		}
		return each(p, rel, info)
	})
}

// hash is of names, modes and contents. Times are left out: a fresh checkout is the same tree.
func (t *tree) hash() (string, error) {
	h := sha256.New()
	err := t.walk(func(file, name string, info fs.FileInfo) error {
		fmt.Fprintf(h, "%q %o %d\n", name, info.Mode(), info.Size())
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(file)
			fmt.Fprintf(h, "%q\n", target)
			return err
		case info.Mode().IsRegular():
			f, err := os.Open(file)
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
			if target, err = os.Readlink(file); err != nil {
				return err
			}
		}
		h, err := tar.FileInfoHeader(info, target)
		if err != nil {
			return err
		}
		h.Name, h.Uid, h.Gid, h.Uname, h.Gname, h.Format = name, uid, gid, "", "", tar.FormatPAX
		if info.IsDir() {
			h.Name += "/"
		}
		if err := tw.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
			return err
		}
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		defer f.Close()
		if n, err := io.Copy(tw, io.LimitReader(f, h.Size)); err != nil || n != h.Size {
			return fmt.Errorf("copy %s: %d of %d octets: changed meanwhile? %w", file, n, h.Size, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return tw.Close()
}
