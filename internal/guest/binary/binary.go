// Package binary holds the built dsec-guest, the file server that runs inside sandboxes, and gives it as a file to execute.
//
// The folder dist is embedded as it is. `make build` puts the program there first; it is not committed, so a plain
// `go build ./cmd/dsec` of a clean clone works and embeds none. Then the file beside the running program serves.
package binary

import (
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/memfile"
)

// Name of the program, and of the one that is process 1 of virtual machines.
const (
	Name   = "dsec-guest"
	VMName = "dsec-guest-vm"
)

//go:embed all:dist
var dist embed.FS

// Open returns the program, open for reading and executing: a sealed memory file with the embedded octets (so that no sandbox and
// no tenant can change what others run), else the file beside the running program. The caller closes it.
func Open() (*os.File, error) { return open(Name) }

// OpenVM is Open for the process 1 of virtual machines.
func OpenVM() (*os.File, error) { return open(VMName) }

func open(name string) (*os.File, error) {
	f, err := dist.Open("dist/" + name)
	if err == nil {
		defer f.Close()
		return sealed(name, f)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open the embedded %s: %w", name, err)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find the running program: %w", err)
	}
	beside, err := os.Open(filepath.Join(filepath.Dir(self), name))
	if err != nil {
		return nil, fmt.Errorf("this build embeds no %s and %w: run `make build`, which builds and embeds it", name, err)
	}
	return beside, nil
}

// sealed copies a program into a memory file that nobody can change any more.
func sealed(name string, r io.Reader) (*os.File, error) {
	// MFD_EXEC is needed where vm.memfd_noexec is set, and unknown before Linux 6.3.
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if err == unix.EINVAL {
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("make a memory file for %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if _, err := io.Copy(f, r); err != nil {
		return nil, fmt.Errorf("fill the memory file of %s: %w", name, err)
	}
	if err := f.Chmod(0o755); err != nil {
		return nil, fmt.Errorf("make %s executable: %w", name, err)
	}
	if err := memfile.Seal(f.Fd()); err != nil {
		return nil, fmt.Errorf("seal %s: %w", name, err)
	}
	// A descriptor that may write keeps a program from being executed (ETXTBSY) on some kernels; this one may only read.
	ro, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("open the memory file of %s again: %w", name, err)
	}
	return ro, nil
}
