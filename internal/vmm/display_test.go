package vmm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image/png"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	backend "github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
	"github.com/dsec-dev/dsec/internal/vmm/warden"
)

// A machine with a screen is seen, typed to and pointed at, and speaks VNC; what no keyboard has is refused before anything is typed.
func TestScreenKeysAndPointer(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("skip: needs root")
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		t.Skip("skip: needs QEMU (package qemu-system-x86)")
	}
	folder := backend.FindKernel("/var/lib/dsec")
	if folder == "" {
		t.Skip("skip: needs a kernel for guests (make guest-kernel, or DSEC_GUEST_KERNEL)")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	run, instance := t.TempDir(), fmt.Sprintf("d%d", os.Getpid())
	w, err := warden.Spawn(ctx, os.Args[0], []string{"warden"}, run, instance)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		w.Shutdown(context.Background())
		for end := time.Now().Add(20 * time.Second); warden.Sweep(run, instance) != nil && time.Now().Before(end); {
			time.Sleep(5 * time.Millisecond)
		}
	}()
	q, err := vmm.NewQEMU(ctx, vmm.QEMUConfig{Verdict: vmm.Verdict{KVM: "absent", Reason: "tests are translated"}, Warden: w})
	if err != nil {
		t.Fatal(err)
	}
	k, err := vmm.OpenKernel(folder, strings.NewReader("#!/none\n")) // no process 1: the screen is the firmware's and the kernel's
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	vm, err := q.Create(ctx, &vmm.Spec{ID: "screen", Dir: t.TempDir(), UID: testUID, Machine: "q35", Kernel: k, CPUs: 1, Memory: 128 << 20, Display: true})
	if err != nil {
		t.Fatal(err)
	}
	d, ok := vm.Display()
	if !ok {
		t.Fatal("no display")
	}
	var shot bytes.Buffer
	if err := d.Screenshot(ctx, &shot); err != nil {
		t.Fatal(err)
	}
	im, err := png.Decode(&shot)
	if err != nil || im.Bounds().Dx() < 320 || im.Bounds().Dy() < 200 {
		t.Errorf("screenshot: %v, %v", im, err)
	}
	if err := errors.Join(d.Keys(ctx, "ctrl", "a"), d.Type(ctx, "Echo \"x\" > /t_1;\n"), d.Pointer(ctx, 16384, 32767, "left"), d.Pointer(ctx, 0, 0), d.Scroll(ctx, -2), d.Scroll(ctx, 2)); err != nil {
		t.Error(err)
	}
	for name, err := range map[string]error{
		"a letter that no key has": d.Type(ctx, "ünï"), "a key that there is not": d.Keys(ctx, "nosuchkey"), "no key": d.Keys(ctx), "a name with more in it": d.Keys(ctx, `a","x`),
		"a place outside": d.Pointer(ctx, 40000, 0), "a button that there is not": d.Pointer(ctx, 1, 1, "ninth"), "scroll without end": d.Scroll(ctx, 1<<20),
	} {
		if !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	c, err := d.VNC(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	hello := make([]byte, 12)
	if _, err := io.ReadFull(c, hello); err != nil || !strings.HasPrefix(string(hello), "RFB 003.") {
		t.Errorf("VNC says %q, %v", hello, err)
	}
	if err := vm.Kill(ctx); err != nil {
		t.Error(err)
	}
}
