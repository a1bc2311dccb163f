package vmm

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/memfile"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Kernel is a kernel for guests with the initramfs that goes with it.
type Kernel struct {
	Image   *os.File
	Initrd  *os.File // a memory file
	Release string
	Sum     string // of both, hex: part of what makes a saved state fit
}

// guestModules are what a guest needs of a kernel that has it as modules, each with what it depends on.
var guestModules = []string{"virtio_mmio", "virtio_pci", "virtio_console", "virtio_blk", "virtio_net", "virtio-rng", "virtio_balloon", "erofs", "overlay",
	"ext4", "crc32c_generic", "crc32c-intel", "vmw_vsock_virtio_transport"}

// OpenKernel opens the kernel of a folder: vmlinux (ELF, entered directly) or vmlinuz, and below modules/<release> or lib/modules/<release>
// its modules, if it has any. guest is the program that becomes process 1.
func OpenKernel(dir string, guest io.Reader) (k *Kernel, err error) {
	k = &Kernel{}
	defer func() {
		if err != nil {
			k.Close()
			k = nil
		}
	}()
	for _, name := range []string{"vmlinux", "vmlinuz"} {
		if k.Image, err = os.Open(filepath.Join(dir, name)); err == nil {
			break
		}
	}
	if err != nil {
		return k, fmt.Errorf("guest kernel: no vmlinux or vmlinuz in %s: %w: %w", dir, err, sandbox.ErrUnsupported)
	}
	var modules string
	for _, at := range []string{"modules", "lib/modules"} {
		list, e := os.ReadDir(filepath.Join(dir, at))
		for _, d := range list {
			if _, e2 := os.Stat(filepath.Join(dir, at, d.Name(), "modules.dep")); e == nil && e2 == nil {
				modules, k.Release = filepath.Join(dir, at, d.Name()), d.Name()
			}
		}
	}
	if text, e := os.ReadFile(filepath.Join(dir, "release")); e == nil {
		k.Release = strings.TrimSpace(string(text))
	}
	var c cpio
	c.folder("dev")
	c.node("dev/console", 0o600, 5, 1)
	if modules != "" {
		if err = addModules(&c, modules); err != nil {
			return k, fmt.Errorf("guest kernel: %w", err)
		}
	}
	program, err := io.ReadAll(io.LimitReader(guest, 64<<20))
	if err != nil {
		return k, fmt.Errorf("guest program: %w", err)
	}
	c.file("init", 0o755, program)
	c.end()
	if k.Initrd, err = memoryFile("dsec-initrd", c.buf.Bytes()); err != nil {
		return k, err
	}
	h := sha256.New()
	if _, err = io.Copy(h, io.NewSectionReader(k.Image, 0, 1<<40)); err != nil {
		return k, fmt.Errorf("guest kernel: %w", err)
	}
	h.Write(c.buf.Bytes())
	k.Sum = hex.EncodeToString(h.Sum(nil))
	// A monitor's user opens it again by its descriptor's name: that wants a file that all may read.
	if st, e := k.Image.Stat(); e == nil && st.Mode()&0o004 == 0 {
		text, e := io.ReadAll(io.NewSectionReader(k.Image, 0, 1<<40))
		if e != nil {
			return k, e
		}
		f, e := memoryFile("dsec-kernel", text)
		if e != nil {
			return k, e
		}
		k.Image.Close()
		k.Image = f
	}
	return k, nil
}

// Close closes the files.
func (k *Kernel) Close() {
	for _, f := range []*os.File{k.Image, k.Initrd} {
		if f != nil {
			f.Close()
		}
	}
}

// addModules adds modules so that the order of their names is that of loading.
func addModules(c *cpio, dir string) error {
	deps := map[string][]string{}
	byName := map[string]string{}
	text, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		file, list, _ := strings.Cut(strings.TrimSpace(line), ":")
		deps[file] = strings.Fields(list)
		name, _, _ := strings.Cut(filepath.Base(file), ".ko")
		byName[strings.ReplaceAll(name, "-", "_")] = file
	}
	var order []string
	for _, m := range guestModules {
		file, ok := byName[strings.ReplaceAll(m, "-", "_")]
		if !ok {
			continue // built in, or the kernel has none: what needs it says so
		}
		need := slices.Clone(deps[file])
		slices.Reverse(need)
		for _, f := range append(need, file) {
			if !slices.Contains(order, f) {
				order = append(order, f)
			}
		}
	}
	c.folder("modules")
	for i, f := range order {
		if !strings.HasSuffix(f, ".ko") {
			return fmt.Errorf("module %s is compressed: unpack the modules first (xz -d, zstd -d): %w", f, sandbox.ErrUnsupported)
		}
		b, err := os.ReadFile(filepath.Join(dir, f))
		if err != nil {
			return err
		}
		c.file(fmt.Sprintf("modules/%03d-%s", i, filepath.Base(f)), 0o644, b)
	}
	return nil
}

// cpio writes the archive of an initramfs ("newc").
type cpio struct {
	buf bytes.Buffer
	ino int
}

func (c *cpio) entry(name string, mode, major, minor int, data []byte) {
	c.ino++
	fmt.Fprintf(&c.buf, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", c.ino, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0)
	c.buf.WriteString(name + "\x00")
	c.pad()
	c.buf.Write(data)
	c.pad()
}

func (c *cpio) pad() {
	for c.buf.Len()%4 != 0 {
		c.buf.WriteByte(0)
	}
}

func (c *cpio) folder(name string) { c.entry(name, unix.S_IFDIR|0o755, 0, 0, nil) }
func (c *cpio) file(name string, mode int, data []byte) {
	c.entry(name, unix.S_IFREG|mode, 0, 0, data)
}
func (c *cpio) node(name string, mode, major, minor int) {
	c.entry(name, unix.S_IFCHR|mode, major, minor, nil)
}
func (c *cpio) end() {
	c.entry("TRAILER!!!", 0, 0, 0, nil)
	for c.buf.Len()%512 != 0 {
		c.buf.WriteByte(0)
	}
}

// memoryFile makes a sealed memory file that every user may read by its descriptor.
func memoryFile(name string, data []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memory file: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(0o444), Seal(f)); err != nil {
		f.Close()
		return nil, fmt.Errorf("memory file: %w", err)
	}
	return f, nil
}

// NewMemory makes the memory of a template: all may map it, and when it is sealed nobody can change it any more.
func NewMemory(name string, size int64) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memory file: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := errors.Join(f.Truncate(size), f.Chmod(0o666)); err != nil {
		f.Close()
		return nil, fmt.Errorf("memory file: %w", err)
	}
	return f, nil
}

// MemoryPrefix begins the names of memory files that have one.
const MemoryPrefix = "memory-"

// Seal makes a memory file immutable. Shared writable mappings must be gone: it fails with EBUSY while the template's machine lives. One that
// has a name is root's, and nobody else may write it from then on.
func Seal(f *os.File) error {
	err := memfile.Seal(f.Fd())
	if err == unix.EINVAL {
		return f.Chmod(0o444)
	}
	return err
}

// Discard closes a memory file and removes its name where it has one. Machines that have it mapped keep it.
func Discard(f *os.File) error {
	if f == nil {
		return nil
	}
	var errs []error
	if at, err := os.Readlink(fdPath(int(f.Fd()))); err == nil && strings.HasPrefix(filepath.Base(at), MemoryPrefix) {
		var here, there unix.Stat_t
		if unix.Fstat(int(f.Fd()), &here) == nil && unix.Lstat(at, &there) == nil && here.Ino == there.Ino && here.Dev == there.Dev {
			errs = append(errs, os.Remove(at))
		}
	}
	return errors.Join(append(errs, f.Close())...)
}

// ELF reports whether the kernel is one that is entered directly.
func (k *Kernel) ELF() bool {
	magic := make([]byte, 4)
	k.Image.ReadAt(magic, 0)
	return string(magic) == "\x7fELF"
}

// CopySparse copies what a file holds from an offset on to the begin of another, and leaves its holes and pages of zeros.
func CopySparse(to, from *os.File, offset int64) error {
	st, err := from.Stat()
	if err != nil {
		return err
	}
	buf := make([]byte, 1<<20)
	zero := make([]byte, 4096)
	for at := offset; at < st.Size(); {
		begin, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(int(from.Fd()), begin, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		for at = max(begin, offset); at < end; {
			n, err := from.ReadAt(buf[:min(int64(len(buf)), end-at)], at)
			if n == 0 {
				return fmt.Errorf("copy: %w", errors.Join(err, io.ErrUnexpectedEOF))
			}
			if err := writePages(to, buf[:n], at-offset, zero); err != nil {
				return err
			}
			at += int64(n)
		}
	}
	if have, err := to.Stat(); err != nil || have.Size() >= st.Size()-offset {
		return err
	}
	return to.Truncate(st.Size() - offset)
}

// writePages writes the pages that are not all zero, each run of them at once.
func writePages(to *os.File, data []byte, at int64, zero []byte) error {
	for i := 0; i < len(data); {
		j := i
		for j < len(data) && !bytes.Equal(data[j:min(j+len(zero), len(data))], zero[:min(len(zero), len(data)-j)]) {
			j += len(zero)
		}
		j = min(j, len(data))
		if j > i {
			if _, err := to.WriteAt(data[i:j], at+int64(i)); err != nil {
				return err
			}
		}
		i = j
		for i < len(data) && bytes.Equal(data[i:min(i+len(zero), len(data))], zero[:min(len(zero), len(data)-i)]) {
			i += len(zero)
		}
	}
	return nil
}

// Reopen returns the file with an offset of its own, at its begin.
func Reopen(f *os.File) (*os.File, error) {
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
}
