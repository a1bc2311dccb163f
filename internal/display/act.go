package display

import (
	"context"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Bounds of one act.
const (
	MaxKeys   = 8
	MaxTyped  = 4096 // octets
	MaxScroll = 100
	keyHold   = 15 * time.Millisecond
)

// named are keysyms of X by lower-case name.
var named = map[string]uint32{"backspace": 0xff08, "tab": 0xff09, "return": 0xff0d, "enter": 0xff0d, "ret": 0xff0d, "escape": 0xff1b, "esc": 0xff1b,
	"delete": 0xffff, "insert": 0xff63, "home": 0xff50, "left": 0xff51, "up": 0xff52, "right": 0xff53, "down": 0xff54, "pageup": 0xff55, "page_up": 0xff55,
	"pagedown": 0xff56, "page_down": 0xff56, "end": 0xff57, "print": 0xff61, "menu": 0xff67, "shift": 0xffe1, "ctrl": 0xffe3, "control": 0xffe3,
	"capslock": 0xffe5, "meta": 0xffe7, "alt": 0xffe9, "super": 0xffeb, "win": 0xffeb, "space": 0x20, "plus": '+', "minus": '-'}

// keysym is X's number of a key's name: a named key, F1 to F24, or one character.
func keysym(name string) (uint32, error) {
	if r, n := utf8.DecodeRuneInString(name); n == len(name) && n > 0 && r != utf8.RuneError {
		return symOf(r)
	}
	low := strings.ToLower(name)
	if k, ok := named[low]; ok {
		return k, nil
	}
	if f, err := strconv.Atoi(strings.TrimPrefix(low, "f")); err == nil && low[0] == 'f' && f >= 1 && f <= 24 {
		return 0xffbd + uint32(f), nil
	}
	return 0, fmt.Errorf("key %.40q: want one character or a name such as ctrl, Return or F1: %w", name, sandbox.ErrInvalid)
}

func symOf(r rune) (uint32, error) {
	switch {
	case r == '\n' || r == '\r':
		return 0xff0d, nil
	case r == '\t':
		return 0xff09, nil
	case unicode.IsControl(r) || r == utf8.RuneError:
		return 0, fmt.Errorf("text: %q can't be typed: %w", r, sandbox.ErrInvalid)
	case r <= 0xff:
		return uint32(r), nil
	}
	return 0x01000000 | uint32(r), nil
}

// CheckKeys refuses what Keys does not take.
func CheckKeys(keys []string) error {
	if len(keys) == 0 || len(keys) > MaxKeys {
		return fmt.Errorf("keys: %d at once, 1 to %d: %w", len(keys), MaxKeys, sandbox.ErrInvalid)
	}
	for _, k := range keys {
		if _, err := keysym(k); err != nil {
			return err
		}
	}
	return nil
}

// CheckText refuses what Type does not take.
func CheckText(text string) error {
	if len(text) > MaxTyped {
		return fmt.Errorf("text of %d octets: at most %d at once: %w", len(text), MaxTyped, sandbox.ErrInvalid)
	}
	for _, r := range text {
		if _, err := symOf(r); err != nil {
			return err
		}
	}
	return nil
}

// buttons are the bits of RFB's mask.
var buttons = map[string]byte{"": 0, "left": 1, "middle": 2, "right": 4}

// CheckButton refuses what is no button's name; the empty one is none.
func CheckButton(b string) error {
	if _, ok := buttons[b]; !ok {
		return fmt.Errorf("button %.40q: want left, middle or right: %w", b, sandbox.ErrInvalid)
	}
	return nil
}

func (s *Screen) key(sym uint32, down bool) error {
	m := []byte{4, 0, 0, 0}
	if down {
		m[1] = 1
	}
	_, err := s.c.Write(binary.BigEndian.AppendUint32(m, sym))
	return err
}

func pause(ctx context.Context, t time.Duration) error {
	select {
	case <-time.After(t):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// press holds keys together and lets them go in reverse.
func (s *Screen) press(ctx context.Context, syms []uint32) error {
	for _, k := range syms {
		if err := s.key(k, true); err != nil {
			return err
		}
	}
	err := pause(ctx, keyHold)
	for i := range syms {
		if e := s.key(syms[len(syms)-1-i], false); err == nil {
			err = e
		}
	}
	if err != nil {
		return err
	}
	return pause(ctx, keyHold)
}

// Keys presses keys together and lets them go.
func (s *Screen) Keys(ctx context.Context, keys ...string) error {
	if err := CheckKeys(keys); err != nil {
		return err
	}
	syms := make([]uint32, len(keys))
	for i, k := range keys {
		syms[i], _ = keysym(k)
	}
	return s.within(ctx, func() error { return s.press(ctx, syms) })
}

// Type types text.
func (s *Screen) Type(ctx context.Context, text string) error {
	if err := CheckText(text); err != nil {
		return err
	}
	return s.within(ctx, func() error {
		for i, r := range text {
			sym, _ := symOf(r)
			syms := []uint32{sym}
			if unicode.IsUpper(r) || r < 0x80 && strings.ContainsRune(`~!@#$%^&*()_+{}|:"<>?`, r) {
				syms = []uint32{named["shift"], sym} // servers that think in keys, as QEMU's, want it held
			}
			if err := s.press(ctx, syms); err != nil {
				return fmt.Errorf("after %d of %d octets: %w", i, len(text), err)
			}
		}
		return nil
	})
}

func (s *Screen) point(mask byte, x, y int) error {
	m := []byte{5, mask}
	m = binary.BigEndian.AppendUint16(m, uint16(x))
	_, err := s.c.Write(binary.BigEndian.AppendUint16(m, uint16(y)))
	return err
}

func (s *Screen) inside(x, y int) error {
	if w, h := s.Size(); x < 0 || y < 0 || x >= w || y >= h {
		return fmt.Errorf("%d, %d is outside the screen of %d by %d: %w", x, y, w, h, sandbox.ErrInvalid)
	}
	return nil
}

// Click moves the pointer and clicks a button there; without a button it moves alone.
func (s *Screen) Click(ctx context.Context, x, y int, button string, clicks int) error {
	if err := CheckButton(button); err != nil {
		return err
	}
	if err := s.inside(x, y); err != nil {
		return err
	}
	return s.within(ctx, func() error {
		err := s.point(0, x, y)
		for i := 0; i < clicks && button != "" && err == nil; i++ {
			err = s.tap(ctx, buttons[button], x, y)
		}
		return err
	})
}

// tap presses a button and lets it go.
func (s *Screen) tap(ctx context.Context, mask byte, x, y int) error {
	if err := s.point(mask, x, y); err != nil {
		return err
	}
	err := pause(ctx, keyHold)
	if e := s.point(0, x, y); err == nil {
		err = e
	}
	if err != nil {
		return err
	}
	return pause(ctx, keyHold)
}

// Drag holds a button from one place to another.
func (s *Screen) Drag(ctx context.Context, x, y, toX, toY int, button string) error {
	if err := CheckButton(button); err != nil {
		return err
	}
	if err := s.inside(x, y); err != nil {
		return err
	}
	if err := s.inside(toX, toY); err != nil {
		return err
	}
	const steps = 10
	return s.within(ctx, func() error {
		mask := buttons[button]
		err := s.point(0, x, y)
		for i := 0; i <= steps && err == nil; i++ {
			if err = s.point(mask, x+(toX-x)*i/steps, y+(toY-y)*i/steps); err == nil {
				err = pause(ctx, keyHold)
			}
		}
		if e := s.point(0, toX, toY); err == nil {
			err = e
		}
		return err
	})
}

// Scroll turns the wheel at a place, down when positive.
func (s *Screen) Scroll(ctx context.Context, x, y, steps int) error {
	if err := s.inside(x, y); err != nil {
		return err
	}
	mask := byte(16)
	if steps < 0 {
		mask, steps = 8, -steps
	}
	if steps > MaxScroll {
		return fmt.Errorf("scroll by %d steps: at most %d: %w", steps, MaxScroll, sandbox.ErrInvalid)
	}
	return s.within(ctx, func() error {
		for i := range steps {
			if err := s.tap(ctx, mask, x, y); err != nil {
				return fmt.Errorf("after %d of %d steps: %w", i, steps, err)
			}
		}
		return nil
	})
}
