package vm_test

import (
	"bytes"
	"context"
	"errors"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/display"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
)

// The screen of a vm, and of a clone of it, can be had as a picture with what the machine wrote; keys are taken, and a text that is broken off
// says how far it came. The sandbox has the console's device.
func TestScreenOfVM(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) { c.Name = "vm" })
	b := sandboxtest.NewBox(t, e.Suite())
	if o, _ := b.As(t, "root", "test -c /dev/tty1 && echo there >/dev/tty1"); o.Code != 0 {
		t.Error("the sandbox has no console")
	}
	c, err := b.Instance().(sandbox.Screened).VNC(within(t))
	if err != nil {
		t.Fatal(err)
	}
	scr, err := display.Open(within(t), c)
	if err != nil {
		t.Fatal(err)
	}
	defer scr.Close()
	var out bytes.Buffer
	if err := scr.Screenshot(within(t), &out); err != nil {
		t.Fatal(err)
	}
	img, err := png.Decode(&out)
	if err != nil {
		t.Fatal(err)
	}
	lit := 0
	for y := range img.Bounds().Dy() {
		for x := range img.Bounds().Dx() {
			if r, g, b, _ := img.At(x, y).RGBA(); r+g+b > 0 {
				lit++
			}
		}
	}
	if lit < 100 {
		t.Errorf("%d pixels of %v are lit: its firmware's text is not there", lit, img.Bounds())
	}
	if err := scr.Keys(within(t), "ctrl", "a"); err != nil {
		t.Error(err)
	}
	// A bound that falls into the typing; on a slow machine a short one falls before it.
	told := func(err error) bool { return strings.Contains(err.Error(), " of 2000 octets") }
	for bound := 300 * time.Millisecond; ; bound *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), bound)
		err = scr.Type(ctx, strings.Repeat("a", 2000))
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || told(err) || bound > 10*time.Second {
			break
		}
	}
	if !errors.Is(err, context.DeadlineExceeded) || !told(err) {
		t.Errorf("text that was broken off: %v", err)
	}
}

// Many who open a vm's screen at once are all greeted.
func TestScreensAtOnce(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) { c.Name = "vm" })
	m := boot(t, e, image(t, e, map[string][]byte{vm.OwnFile: []byte("disk = \"disk.img\"\n"), "disk.img": bootSector()}))
	ctx := within(t)
	var all sync.WaitGroup
	for range 32 {
		all.Go(func() {
			c, err := m.Instance.(sandbox.Screened).VNC(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			scr, err := display.Open(ctx, c)
			if err != nil {
				t.Error(err)
				return
			}
			scr.Close()
		})
	}
	all.Wait()
}

// A machine that does not come up is given up when its kernel has, and its create says what the console said.
func TestMachineThatDoesNotBoot(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) {
		f, err := os.Create(filepath.Join(t.TempDir(), "guest"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		if _, err := f.WriteString("no program"); err != nil {
			t.Fatal(err)
		}
		c.Guest, c.NoTemplates = f, true
	})
	if e.Config.Firecracker != "" {
		t.Skip("skip: of Firecracker the console's begin is kept")
	}
	_, err := e.Backend.Create(within(t), sandbox.NewID("htests"), small(e), &nobody{})
	if err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "Kernel panic") {
		t.Errorf("%v; want the kernel's own words, once it has given up", err)
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A microvm has no screen of its own, and says so.
func TestNoScreenOfMicroVM(t *testing.T) {
	e := vmtest.New(t)
	x, err := e.Backend.Create(within(t), sandbox.NewID("htests"), small(e), &nobody{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := x.(sandbox.Screened).VNC(within(t)); !errors.Is(err, sandbox.ErrUnsupported) {
		t.Errorf("%v, want ErrUnsupported", err)
	}
	if err := x.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
}
