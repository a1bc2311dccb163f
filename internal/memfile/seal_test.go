package memfile

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A page of a memory file that somebody holds for a while keeps it from being sealed; it is sealed when the page is free.
func TestSealWaitsForPages(t *testing.T) {
	fd, err := unix.MemfdCreate("dsec-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "dsec-test")
	defer f.Close()
	if _, err := f.WriteAt(make([]byte, 4096), 0); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	var from int64
	if n, err := unix.Splice(int(f.Fd()), &from, int(w.Fd()), nil, 4096, 0); n != 4096 || err != nil { // the pipe holds the page
		t.Fatal(n, err)
	}
	go func() {
		time.Sleep(600 * time.Millisecond) // longer than the kernel itself waits
		r.Read(make([]byte, 4096))
	}()
	if err := Seal(f.Fd()); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("y"), 0); err == nil {
		t.Error("it can be written")
	}
}
