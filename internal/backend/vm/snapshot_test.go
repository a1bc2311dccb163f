package vm

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func archive(t testing.TB, entries ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		h.Format = tar.FormatPAX
		body := []byte("body")
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(body))
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			w.Write(body)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// A guest that was taken over sends an archive that leads out of its folder, by every way there is.
func TestArchiveCantLeadOut(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	dir := func(name string) *tar.Header {
		return &tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755}
	}
	file := func(name string) *tar.Header { return &tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644} }
	link := func(name, to string) *tar.Header {
		return &tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
	}
	hard := func(name, to string) *tar.Header {
		return &tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to}
	}
	for name, entries := range map[string][]*tar.Header{
		"parent":                    {file("../evil")},
		"absolute":                  {file("/evil")},
		"parent inside":             {dir("a"), file("a/../../evil")},
		"through a link":            {link("a", ".."), file("a/evil")},
		"through a link to /":       {link("a", "/"), file("a/evil")},
		"a link replaced":           {link("evil", "../evil"), file("evil")},
		"hard link out":             {hard("a", "../secret")},
		"hard link by link":         {link("a", ".."), hard("b", "a/secret")},
		"folder over a link":        {link("a", ".."), dir("a"), file("a/evil")},
		"twice":                     {file("a"), file("a")},
		"type that nobody sends":    {{Typeflag: tar.TypeBlock, Name: "sda", Devmajor: 8}},
		"root that is no folder":    {{Typeflag: tar.TypeReg, Name: "."}},
		"file below what is a file": {file("a"), file("a/b")},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			in := filepath.Join(top, "in")
			os.Mkdir(in, 0o700)
			os.WriteFile(filepath.Join(top, "secret"), []byte("secret"), 0o600)
			if err := unpackUpper(tar.NewReader(bytes.NewReader(archive(t, entries...))), in); err == nil {
				t.Error("it was taken")
			}
			list, _ := os.ReadDir(top)
			if len(list) != 2 {
				t.Errorf("beside the folder lies %v", list)
			}
			if st, err := os.Stat(filepath.Join(top, "secret")); err != nil || st.Sys() == nil || st.Size() != 6 {
				t.Errorf("the secret: %v, %v", st, err)
			}
		})
	}
}

func TestArchiveKeepsWhatAnUpperHas(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	in := t.TempDir()
	b := archive(t,
		&tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755},
		&tar.Header{Typeflag: tar.TypeDir, Name: "d/", Mode: 0o1777, PAXRecords: map[string]string{xattrPrefix + "trusted.overlay.opaque": "y", xattrPrefix + "security.selinux": "x"}},
		&tar.Header{Typeflag: tar.TypeReg, Name: "d/f", Mode: 0o4755, Uid: 1000, Gid: 1001},
		&tar.Header{Typeflag: tar.TypeLink, Name: "d/g", Linkname: "d/f"},
		&tar.Header{Typeflag: tar.TypeChar, Name: "gone", Mode: 0},
		&tar.Header{Typeflag: tar.TypeChar, Name: "mem", Devmajor: 1, Devminor: 1, Mode: 0o666},
		&tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o600},
		&tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "/nowhere"})
	if err := unpackUpper(tar.NewReader(bytes.NewReader(b)), in); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(in, "d/g"), &st); err != nil || st.Mode != unix.S_IFREG|0o4755 || st.Uid != 1000 || st.Gid != 1001 || st.Nlink != 2 {
		t.Errorf("file: %+v, %v", st, err)
	}
	if err := unix.Lstat(filepath.Join(in, "gone"), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
		t.Errorf("whiteout: %+v, %v", st, err)
	}
	if err := unix.Lstat(filepath.Join(in, "mem"), &st); err == nil {
		t.Error("a device was made")
	}
	v := make([]byte, 8)
	if n, err := unix.Lgetxattr(filepath.Join(in, "d"), "trusted.overlay.opaque", v); err != nil || string(v[:n]) != "y" {
		t.Errorf("mark: %q, %v", v[:max(n, 0)], err)
	}
}
