// Package initproc holds process 1 of containers: a libc-free program in C, built ahead and committed (init_amd64), so that
// `go build` needs no C compiler. src/init.c says what it does and what it relies on; docs/format/guest.md is its protocol.
//
// src/build.sh makes the binary; a test rebuilds it where the compiler of the committed one is there and compares.
package initproc

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/memfile"
)

// Open returns process 1's program as a sealed memfd (close on exec): nobody can write to it, neither the workload by way
// of /proc/<pid>/exe. Start it from /proc/self/fd/<n> with the guest stream as descriptor 3 and argv[0] "dsec-init".
func Open() (*os.File, error) {
	if len(image) == 0 {
		return nil, fmt.Errorf("process 1's program for %s: %w", runtime.GOARCH, errors.ErrUnsupported)
	}
	return sealed("dsec-init", image)
}

func sealed(name string, program []byte) (*os.File, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_EXEC)
	if err == unix.EINVAL { // before 6.3
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, fmt.Errorf("program %s: memfd: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.Write(program); err != nil {
		f.Close()
		return nil, fmt.Errorf("program %s: %w", name, err)
	}
	if err := memfile.Seal(f.Fd()); err != nil {
		f.Close()
		return nil, fmt.Errorf("program %s: seal: %w", name, err)
	}
	return f, nil
}
