package binary

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSealedProgramRunsAndCannotBeChanged(t *testing.T) {
	src, err := os.Open("/bin/true")
	if err != nil {
		t.Skip("no /bin/true on this machine")
	}
	defer src.Close()
	f, err := sealed("true", src)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write([]byte("x")); err == nil {
		t.Error("the sealed program could be written")
	}
	if w, err := os.OpenFile("/proc/self/fd/"+itoa(f.Fd()), os.O_RDWR, 0); err == nil {
		if _, err := w.Write([]byte("x")); err == nil {
			t.Error("the sealed program could be opened again and written")
		}
		w.Close()
	}
	cmd := exec.Command("/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{f}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("run the sealed program: %v %s", err, out)
	}
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil || seals&unix.F_SEAL_WRITE == 0 {
		t.Errorf("seals %#x, %v", seals, err)
	}
}

func itoa(n uintptr) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + string(rune('0'+n%10))
}

func TestOpenTellsWhatToDo(t *testing.T) {
	f, err := Open()
	if err == nil {
		f.Close()
		t.Skip("a dsec-guest is embedded in this build")
	}
	if !strings.Contains(err.Error(), "make build") {
		t.Errorf("the error names no way out: %v", err)
	}
}
