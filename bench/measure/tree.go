package measure

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// True is the smallest program that ends with 0: no libc, no dynamic loader, one system call. What a libc's start costs differs
// from machine to machine and is not what is measured here.
func True() ([]byte, error) {
	var code []byte
	var machine uint16
	switch runtime.GOARCH {
	case "amd64":
		machine = 62
		code = []byte{0x31, 0xff, 0xb8, 231, 0, 0, 0, 0x0f, 0x05} // xor edi,edi; mov eax,exit_group; syscall
	case "arm64":
		machine = 183
		code = []byte{0x00, 0x00, 0x80, 0xd2, 0xc8, 0x0b, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4} // mov x0,0; mov x8,94; svc 0
	default:
		return nil, fmt.Errorf("no program for %s", runtime.GOARCH)
	}
	const base, headers = 0x400000, 64 + 56
	b := append([]byte{0x7f, 'E', 'L', 'F', 2, 1, 1}, make([]byte, 9)...)
	le := binary.LittleEndian
	b = le.AppendUint16(b, 2) // executable
	b = le.AppendUint16(b, machine)
	b = le.AppendUint32(b, 1)
	b = le.AppendUint64(b, base+headers) // entry
	b = le.AppendUint64(b, 64)           // program headers
	b = le.AppendUint64(b, 0)
	b = le.AppendUint32(b, 0)
	for _, v := range []uint16{64, 56, 1, 64, 0, 0} {
		b = le.AppendUint16(b, v)
	}
	b = le.AppendUint32(b, 1) // load
	b = le.AppendUint32(b, 5) // read, execute
	size := uint64(headers + len(code))
	for _, v := range []uint64{0, base, base, size, size, 0x1000} {
		b = le.AppendUint64(b, v)
	}
	return append(b, code...), nil
}

// entry is one file of the root file system.
type entry struct {
	name string
	mode int64 // with the kind: a folder ends with "/", a link has a target
	data []byte
	link string
}

func entries() ([]entry, error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return nil, fmt.Errorf("busybox is not installed (package busybox-static): %w", err)
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return nil, err
	}
	quick, err := True()
	if err != nil {
		return nil, err
	}
	list := []entry{
		{name: "bin/", mode: 0o755}, {name: "dev/", mode: 0o755}, {name: "etc/", mode: 0o755}, {name: "proc/", mode: 0o755},
		{name: "root/", mode: 0o700}, {name: "run/", mode: 0o755}, {name: "sys/", mode: 0o755}, {name: "tmp/", mode: 0o1777},
		{name: "etc/passwd", mode: 0o644, data: []byte("root:x:0:0:root:/root:/bin/sh\n")},
		{name: "etc/group", mode: 0o644, data: []byte("root:x:0:\n")},
		{name: "bin/busybox", mode: 0o755, data: program},
		{name: "true", mode: 0o755, data: quick},
	}
	for _, a := range []string{"sh", "ls", "cat", "sleep", "true", "echo"} {
		list = append(list, entry{name: "bin/" + a, mode: 0o777, link: "busybox"})
	}
	slices.SortFunc(list, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	return list, nil
}

// Tar is the root file system as a tar stream: a static busybox and /true.
func Tar() ([]byte, error) {
	list, err := entries()
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, e := range list {
		h := &tar.Header{Name: e.name, Mode: e.mode, Size: int64(len(e.data)), Typeflag: tar.TypeReg}
		switch {
		case strings.HasSuffix(e.name, "/"):
			h.Typeflag = tar.TypeDir
		case e.link != "":
			h.Typeflag, h.Linkname = tar.TypeSymlink, e.link
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := io.Copy(w, bytes.NewReader(e.data)); err != nil {
			return nil, err
		}
	}
	err = w.Close()
	return out.Bytes(), err
}

// Unpack lays the root file system into a folder, owned by uid.
func Unpack(dir string, uid int) error {
	list, err := entries()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.Lchown(dir, uid, uid); err != nil {
		return err
	}
	for _, e := range list {
		p := filepath.Join(dir, e.name)
		switch {
		case strings.HasSuffix(e.name, "/"):
			err = os.Mkdir(p, 0o755)
		case e.link != "":
			err = os.Symlink(e.link, p)
		default:
			err = os.WriteFile(p, e.data, 0o755)
		}
		if err == nil {
			err = os.Lchown(p, uid, uid)
		}
		if err == nil && e.link == "" {
			mode := os.FileMode(e.mode & 0o777)
			if e.mode&0o1000 != 0 {
				mode |= os.ModeSticky
			}
			err = os.Chmod(p, mode)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
