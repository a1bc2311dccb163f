// Package memfile seals memory files (memfd_create(2)), which the kernel refuses for a moment now and then.
package memfile

import (
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long a page of a file may be held, beyond the 150 ms that the kernel itself waits for each try.
const patience = time.Second

// Seal makes a memory file immutable, with all seals. It fails with EBUSY while a shared mapping may write to it; the kernel says the same
// while anything holds a page of it for a moment, as what moves pages about on a busy machine does: that is waited for, a second at most.
func Seal(fd uintptr) error {
	err := seal(fd)
	for wait := time.Millisecond; err == unix.EBUSY && wait < patience; wait *= 2 {
		time.Sleep(wait)
		err = seal(fd)
	}
	return err
}

func seal(fd uintptr) error {
	_, err := unix.FcntlInt(fd, unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	return err
}
