package vmm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Bounds of what a program does with a screen at once.
const (
	maxKeys       = 8
	maxTyped      = 4096
	maxScroll     = 100
	maxScreenshot = 64 << 20
	keyHold       = 20 * time.Millisecond
)

// Display is the machine's screen.
func (v *qemuVM) Display() (Display, bool) {
	if !v.display {
		return nil, false
	}
	return (*qemuDisplay)(v), true
}

type qemuDisplay qemuVM

func (d *qemuDisplay) vm() *qemuVM { return (*qemuVM)(d) }

// Screenshot has QEMU write the PNG into a memory file that it is given: it can open none of its own.
func (d *qemuDisplay) Screenshot(ctx context.Context, w io.Writer) error {
	fd, err := unix.MemfdCreate("dsec-screen", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("screenshot: %w", err)
	}
	f := os.NewFile(uintptr(fd), "screen")
	defer f.Close()
	out, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_WRONLY, 0) // QEMU wants exactly the mode that it would open with
	if err != nil {
		return fmt.Errorf("screenshot: %w", err)
	}
	defer out.Close()
	var set struct {
		ID int `json:"fdset-id"`
	}
	v := d.vm()
	if err := v.do(ctx, "add-fd", nil, &set, out); err != nil {
		return fmt.Errorf("screenshot: %w", err)
	}
	defer v.do(context.WithoutCancel(ctx), "remove-fd", map[string]int{"fdset-id": set.ID}, nil)
	if err := v.do(ctx, "screendump", map[string]string{"filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "format": "png"}, nil); err != nil {
		return fmt.Errorf("screenshot: %w", err)
	}
	n, err := f.Seek(0, io.SeekEnd)
	if err == nil && n > maxScreenshot {
		err = fmt.Errorf("%d octets: %w", n, sandbox.ErrExhausted)
	}
	if err == nil {
		_, err = io.Copy(w, io.NewSectionReader(f, 0, n))
	}
	if err != nil {
		return fmt.Errorf("screenshot: %w", err)
	}
	return nil
}

type keyValue struct {
	Type string `json:"type"`
	Data string `json:"data"`
}

func checkKey(k string) error {
	if k == "" || len(k) > 32 || strings.Trim(k, "abcdefghijklmnopqrstuvwxyz0123456789_") != "" {
		return fmt.Errorf("key %.40q: want a name such as a, ret, ctrl or f1: %w", k, sandbox.ErrInvalid)
	}
	return nil
}

func (d *qemuDisplay) Keys(ctx context.Context, keys ...string) error {
	if len(keys) == 0 || len(keys) > maxKeys {
		return fmt.Errorf("keys: %d at once, 1 to %d: %w", len(keys), maxKeys, sandbox.ErrInvalid)
	}
	var list []keyValue
	for _, k := range keys {
		if err := checkKey(k); err != nil {
			return err
		}
		list = append(list, keyValue{"qcode", k})
	}
	err := d.vm().do(ctx, "send-key", map[string]any{"keys": list, "hold-time": keyHold.Milliseconds()}, nil)
	if q := (*qmpError)(nil); errors.As(err, &q) {
		return fmt.Errorf("keys %q: %s: %w", keys, q.Desc, sandbox.ErrInvalid)
	}
	if err != nil {
		return err
	}
	return pause(ctx, 2*keyHold) // the release, and a moment for the guest to tell it from the next
}

func pause(ctx context.Context, t time.Duration) error {
	select {
	case <-time.After(t):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// keysOf are the keys of a character on an American keyboard.
func keysOf(r rune) ([]string, bool) {
	plain := map[rune]string{'\n': "ret", '\t': "tab", ' ': "spc", '-': "minus", '=': "equal", '[': "bracket_left", ']': "bracket_right", ';': "semicolon",
		'\'': "apostrophe", '`': "grave_accent", '\\': "backslash", ',': "comma", '.': "dot", '/': "slash"}
	shifted := map[rune]string{'!': "1", '@': "2", '#': "3", '$': "4", '%': "5", '^': "6", '&': "7", '*': "8", '(': "9", ')': "0", '_': "minus", '+': "equal",
		'{': "bracket_left", '}': "bracket_right", ':': "semicolon", '"': "apostrophe", '~': "grave_accent", '|': "backslash", '<': "comma", '>': "dot", '?': "slash"}
	switch {
	case r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
		return []string{string(r)}, true
	case r >= 'A' && r <= 'Z':
		return []string{"shift", strings.ToLower(string(r))}, true
	}
	if k, ok := plain[r]; ok {
		return []string{k}, true
	}
	if k, ok := shifted[r]; ok {
		return []string{"shift", k}, true
	}
	return nil, false
}

func (d *qemuDisplay) Type(ctx context.Context, text string) error {
	if len(text) > maxTyped {
		return fmt.Errorf("text of %d octets: at most %d at once: %w", len(text), maxTyped, sandbox.ErrInvalid)
	}
	for _, r := range text {
		if _, ok := keysOf(r); !ok {
			return fmt.Errorf("text: %q is on no key of an American keyboard: %w", r, sandbox.ErrInvalid)
		}
	}
	for _, r := range text {
		keys, _ := keysOf(r)
		if err := d.Keys(ctx, keys...); err != nil {
			return err
		}
	}
	return nil
}

type inputEvent struct {
	Type string         `json:"type"`
	Data map[string]any `json:"data"`
}

var pointerButtons = []string{"left", "middle", "right"}

func (d *qemuDisplay) Pointer(ctx context.Context, x, y int, buttons ...string) error {
	if x < 0 || x > 32767 || y < 0 || y > 32767 {
		return fmt.Errorf("pointer at %d, %d: each 0 to 32767: %w", x, y, sandbox.ErrInvalid)
	}
	events := []inputEvent{{"abs", map[string]any{"axis": "x", "value": x}}, {"abs", map[string]any{"axis": "y", "value": y}}}
	held := map[string]bool{}
	for _, b := range buttons {
		held[b] = true
	}
	for _, b := range pointerButtons {
		events = append(events, inputEvent{"btn", map[string]any{"button": b, "down": held[b]}})
		delete(held, b)
	}
	for b := range held {
		return fmt.Errorf("button %.40q: want %q: %w", b, pointerButtons, sandbox.ErrInvalid)
	}
	return d.vm().do(ctx, "input-send-event", map[string]any{"events": events}, nil)
}

func (d *qemuDisplay) Scroll(ctx context.Context, steps int) error {
	button := "wheel-down"
	if steps < 0 {
		button, steps = "wheel-up", -steps
	}
	if steps > maxScroll {
		return fmt.Errorf("scroll by %d steps: at most %d: %w", steps, maxScroll, sandbox.ErrInvalid)
	}
	for range steps {
		for _, down := range []bool{true, false} {
			e := []inputEvent{{"btn", map[string]any{"button": button, "down": down}}}
			if err := d.vm().do(ctx, "input-send-event", map[string]any{"events": e}, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

var vncClients atomic.Uint64

// VNC hands QEMU one end of a socket pair for a client of its VNC server, which listens nowhere.
func (d *qemuDisplay) VNC(ctx context.Context) (net.Conn, error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("VNC: %w", err)
	}
	far, near := os.NewFile(uintptr(p[1]), "vnc"), os.NewFile(uintptr(p[0]), "vnc")
	defer far.Close()
	defer near.Close()
	v := d.vm()
	name := fmt.Sprintf("vnc%d", vncClients.Add(1)) // a second of one name would take the first's place
	if err := v.do(ctx, "getfd", map[string]string{"fdname": name}, nil, far); err != nil {
		return nil, fmt.Errorf("VNC: %w", err)
	}
	if err := v.do(ctx, "add_client", map[string]any{"protocol": "vnc", "fdname": name, "skipauth": true}, nil); err != nil {
		v.do(context.WithoutCancel(ctx), "closefd", map[string]string{"fdname": name}, nil)
		return nil, fmt.Errorf("VNC: %w", err)
	}
	c, err := net.FileConn(near)
	if err != nil {
		return nil, fmt.Errorf("VNC: %w", err)
	}
	return c, nil
}

// markDisplay leaves a note for Find that the machine has a screen.
func markDisplay(dir string) error {
	return os.WriteFile(filepath.Join(dir, vncSocket), nil, 0o600)
}
