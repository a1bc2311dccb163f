package keeper

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"golang.org/x/sys/unix"
)

// inRoot opens a path of the image, which is hostile: it can't lead out, and nothing waits.
func inRoot(fd int, path string, flags int, mode uint32) (int, error) {
	flags |= unix.O_CLOEXEC
	if flags&unix.O_PATH == 0 {
		flags |= unix.O_NOCTTY
	}
	for range 16 {
		f, err := unix.Openat2(fd, path, &unix.OpenHow{Flags: uint64(flags), Mode: uint64(mode),
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
		if err != unix.EAGAIN && err != unix.EINTR {
			return f, err
		}
	}
	return -1, unix.EAGAIN
}

// furnished are the folders that programs take for granted.
var furnished = []struct {
	name string
	mode uint32
}{{"proc", 0o755}, {"sys", 0o755}, {"tmp", 0o1777}, {"etc", 0o755}}

// laidFiles are the files of /etc that are laid.
var laidFiles = []string{"hostname", "hosts", "resolv.conf"}

// textOf is the text of a laid file; hosts is the image's.
func textOf(name string, b *Birth, hosts string) string {
	switch name {
	case "hostname":
		return b.Hostname + "\n"
	case "hosts":
		return hostsFile(hosts, b)
	}
	return lines(b.Resolv)
}

func sum(text string) string {
	s := sha256.Sum256([]byte(text))
	return hex.EncodeToString(s[:])
}

// furnishUpper makes /dev/shm in the empty upper, before the overlay is there: through it the image's /dev would first be copied up.
// What the image has in /dev is not seen in any case: a mount covers it. Where the image is known the rest is made here too.
func furnishUpper(parent int, name string, b *Birth, im *image) (laid map[string]string, err error) {
	upper, err := unix.Openat(parent, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(upper)
	uid := int(b.UIDBase)
	for _, d := range []string{"dev", "dev/shm"} {
		if err := unix.Mkdirat(upper, d, 0o755); err != nil {
			return nil, err
		}
		if err := unix.Fchownat(upper, d, uid, uid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, err
		}
	}
	if err := unix.Fchmodat(upper, "dev/shm", 0o1777, 0); err != nil {
		return nil, err
	}
	if im == nil {
		return nil, nil
	}
	return im.furnish(upper, b)
}

// furnish makes in a fresh root what programs take for granted and an image may lack. Owners are the sandbox's root. It returns
// the files that it wrote with the hashes of their texts.
func furnish(fd int, b *Birth) (laid map[string]string, err error) {
	for _, d := range furnished {
		if err := makeDir(fd, "/", d.name, d.mode, int(b.UIDBase)); err != nil {
			return nil, fmt.Errorf("make /%s: %w", d.name, imageFault(err))
		}
	}
	hosts := readIn(fd, "/etc/hosts")
	etc, err := inRoot(fd, "/etc", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("open /etc: %w", imageFault(err))
	}
	defer unix.Close(etc)
	laid = map[string]string{}
	for _, name := range laidFiles {
		text := textOf(name, b, hosts)
		wrote, err := layFile(fd, etc, name, text, int(b.UIDBase))
		if err != nil {
			return nil, fmt.Errorf("write /etc/%s: %w", name, imageFault(err))
		}
		if wrote {
			laid["etc/"+name] = sum(text)
		}
	}
	return laid, nil
}

// imageFault tells what an image brings about by the kind of file that it has at a name from what the machine fails at.
func imageFault(err error) error {
	switch err {
	case unix.ENOTDIR, unix.EISDIR, unix.EEXIST, unix.ELOOP:
		return fmt.Errorf("the image has something else there: %w: %w", err, sandbox.ErrInvalid)
	}
	return err
}

func makeDir(fd int, dir, name string, mode uint32, uid int) error {
	full := filepath.Join(dir, name)
	var st unix.Stat_t
	have, err := inRoot(fd, full, unix.O_PATH, 0)
	if err == nil {
		err = unix.Fstat(have, &st)
		unix.Close(have)
		if err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			return nil // its mode is the image's affair
		}
		return unix.ENOTDIR
	}
	if err != unix.ENOENT {
		return err
	}
	at, err := inRoot(fd, dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	if err := unix.Mkdirat(at, name, mode&0o777); err != nil {
		return err // a dangling link ends here, naming the path
	}
	if err := unix.Fchownat(at, name, uid, uid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if mode&^0o777 != 0 {
		// The name was made in this moment in a root that nobody else sees.
		return unix.Fchmodat(at, name, mode, 0)
	}
	return nil
}

const maxEtcFile = 1 << 20

// readIn reads a small ordinary file of the image; anything else counts as empty.
func readIn(fd int, path string) string {
	f, err := inRoot(fd, path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(f)
	var st unix.Stat_t
	if unix.Fstat(f, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > maxEtcFile {
		return ""
	}
	buf := make([]byte, st.Size)
	n := 0
	for n < len(buf) {
		m, err := unix.Read(f, buf[n:])
		if err != nil || m <= 0 {
			break
		}
		n += m
	}
	return string(buf[:n])
}

// layFile replaces a file of /etc, which at is, by one with the text, unless that is what it holds; it reports whether it did.
func layFile(fd, at int, name, text string, uid int) (bool, error) {
	var st unix.Stat_t
	err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == int64(len(text)) && readIn(fd, "/etc/"+name) == text:
		return false, nil
	case err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return false, unix.EISDIR
	case err == nil: // a link (resolv.conf of systemd) or a file: a new one costs less than a copy up
		if err := unix.Unlinkat(at, name, 0); err != nil {
			return false, err
		}
	case err != unix.ENOENT:
		return false, err
	}
	return true, writeNew(at, name, text, uid)
}

// writeNew makes a file in a folder that nobody else sees yet.
func writeNew(dir int, name, text string, uid int) error {
	f, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return err
	}
	defer unix.Close(f)
	if len(text) > 0 {
		if _, err := unix.Write(f, []byte(text)); err != nil {
			return err
		}
	}
	return unix.Fchown(f, uid, uid)
}

// hostsFile keeps the image's lines and adds loopback, the own name and the request's lines.
func hostsFile(image string, b *Birth) string {
	var s strings.Builder
	s.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n")
	if b.Hostname != "" {
		s.WriteString("127.0.1.1\t" + b.Hostname + "\n")
	}
	for _, l := range b.Hosts {
		s.WriteString(l + "\n")
	}
	for l := range strings.SplitSeq(image, "\n") {
		f := strings.Fields(l)
		if len(f) == 2 && f[1] == "localhost" || len(f) == 0 {
			continue
		}
		s.WriteString(l + "\n")
	}
	return s.String()
}

func lines(ls []string) string {
	if len(ls) == 0 {
		return ""
	}
	return strings.Join(ls, "\n") + "\n"
}
