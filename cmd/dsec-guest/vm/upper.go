package main

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// xattrPrefix is how tar programs call a file's attributes.
const xattrPrefix = "SCHILY.xattr."

// sendUpper writes the sandbox's own files as they lie on the writable disk: with the marks and whiteouts of the overlay, which the host
// reads as it reads a container's. The host has frozen the sandbox.
func (m *machine) sendUpper(out io.Writer) error {
	m.mu.Lock()
	born := m.born != nil
	m.mu.Unlock()
	if !born {
		return errors.New("no sandbox was born here")
	}
	w := tar.NewWriter(out)
	links := map[uint64]string{}
	const root = "/upper/upper"
	err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(strings.TrimPrefix(path, root), "/")
		return sendEntry(w, path, rel, links)
	})
	return errors.Join(err, w.Close())
}

func sendEntry(w *tar.Writer, path, rel string, links map[uint64]string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	st := info.Sys().(*syscall.Stat_t)
	h := &tar.Header{Format: tar.FormatPAX, Name: rel, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid), ModTime: info.ModTime(), PAXRecords: map[string]string{}}
	if rel == "" {
		h.Name = "."
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(path); err != nil {
			return err
		}
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	case unix.S_IFCHR:
		h.Typeflag, h.Devmajor, h.Devminor = tar.TypeChar, int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	default:
		return nil // sockets
	}
	if h.Typeflag != tar.TypeDir && st.Nlink > 1 && h.Devmajor+h.Devminor == 0 {
		if first, ok := links[st.Ino]; ok && h.Typeflag != tar.TypeChar {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return w.WriteHeader(h)
		}
		links[st.Ino] = rel
	}
	if err := attributes(path, h); err != nil {
		return err
	}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.CopyN(w, f, h.Size)
	return err
}

func attributes(path string, h *tar.Header) error {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		if err == unix.ENOTSUP {
			return nil
		}
		return err
	}
	names := strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00")
	slices.Sort(names)
	for _, name := range names {
		if name == "" || strings.Contains(name, "=") {
			continue
		}
		v := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, v)
		if err == unix.ENODATA {
			continue
		}
		if err != nil {
			return err
		}
		h.PAXRecords[xattrPrefix+name] = string(v[:n])
	}
	return nil
}
