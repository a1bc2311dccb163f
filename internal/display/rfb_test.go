package display

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"image/color"
	"image/png"
	"io"
	"net"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// greeting is what a server without a password says, up to its name.
func greeting(w, h int) []byte {
	b := append([]byte("RFB 003.008\n"), 1, 1, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(w))
	b = binary.BigEndian.AppendUint16(b, uint16(h))
	b = append(b, make([]byte, 16)...)
	return append(b, 0, 0, 0, 2, 'x', 'y')
}

func rect(x, y, w, h int, enc int32, data []byte) []byte {
	var b []byte
	for _, v := range []int{x, y, w, h} {
		b = binary.BigEndian.AppendUint16(b, uint16(v))
	}
	return append(binary.BigEndian.AppendUint32(b, uint32(enc)), data...)
}

func update(n int, rects ...[]byte) []byte {
	b := binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(n))
	return append(b, bytes.Join(rects, nil)...)
}

// serve says script whatever it hears, then ends; heard is all that came after the client's setup.
func serve(t *testing.T, script []byte) (net.Conn, <-chan []byte) {
	near, far := net.Pipe()
	heard := make(chan []byte, 1)
	go func() {
		go func() { far.Write(script) }()
		b, _ := io.ReadAll(far)
		heard <- b
	}()
	t.Cleanup(func() { far.Close(); near.Close() })
	return near, heard
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestScreenshotOfSeveralUpdatesAndNewSize(t *testing.T) {
	blue, red := []byte{255, 0, 0, 0}, []byte{0, 0, 255, 0}
	script := bytes.Join([][]byte{greeting(4, 4), {2}, update(1, rect(0, 0, 2, 1, encDesktopSize, nil)),
		{3, 0, 0, 0, 0, 0, 0, 3, 'a', 'b', 'c'}, update(2, rect(0, 60000, 0, 5000, encRaw, nil), rect(60000, 0, 5000, 0, encRaw, nil)), update(1, rect(0, 0, 1, 1, encRaw, blue)), update(1, rect(1, 0, 1, 1, encRaw, red))}, nil)
	c, _ := serve(t, script)
	s, err := Open(within(t), c)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := s.Screenshot(within(t), &out); err != nil {
		t.Fatal(err)
	}
	img, err := png.Decode(&out)
	if err != nil {
		t.Fatal(err)
	}
	if w, h := img.Bounds().Dx(), img.Bounds().Dy(); w != 2 || h != 1 {
		t.Fatalf("a picture of %d by %d, want 2 by 1", w, h)
	}
	for x, want := range []color.NRGBA{{B: 255, A: 255}, {R: 255, A: 255}} {
		if got := color.NRGBAModel.Convert(img.At(x, 0)); got != want {
			t.Errorf("pixel %d is %v, want %v", x, got, want)
		}
	}
}

func TestHostileServers(t *testing.T) {
	for name, script := range map[string][]byte{
		"no RFB":             []byte("HTTP/1.1 400\r\n"),
		"a password":         append([]byte("RFB 003.008\n"), 1, 2),
		"refusal":            append([]byte("RFB 003.008\n"), 0, 0, 0, 0, 2, 'n', 'o'),
		"a long refusal":     append([]byte("RFB 003.008\n"), 0, 255, 255, 255, 255),
		"an old password":    append([]byte("RFB 003.003\n"), 0, 0, 0, 2),
		"no size":            greeting(0, 10),
		"a huge size":        greeting(65535, 65535),
		"too many pixels":    greeting(8192, 8192),
		"resize to huge":     append(greeting(2, 2), update(1, rect(0, 0, 65535, 65535, encDesktopSize, nil))...),
		"outside":            append(greeting(2, 2), update(1, rect(1, 1, 2, 2, encRaw, nil))...),
		"a huge rectangle":   append(greeting(2, 2), update(1, rect(0, 0, 65535, 65535, encRaw, nil))...),
		"an encoding":        append(greeting(2, 2), update(1, rect(0, 0, 2, 2, 7, nil))...),
		"many rectangles":    append(greeting(2, 2), update(65535)...),
		"an unknown message": append(greeting(2, 2), 99),
		"a long clipboard":   append(greeting(2, 2), 3, 0, 0, 0, 255, 255, 255, 255),
		"only bells":         append(greeting(2, 2), bytes.Repeat([]byte{2}, maxNoise)...),
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := serve(t, script)
			s, err := Open(within(t), c)
			if err == nil {
				err = s.Screenshot(within(t), io.Discard)
			}
			if !errors.Is(err, sandbox.ErrState) {
				t.Errorf("err = %v, want one of ErrState", err)
			}
		})
	}
}

func TestSilentAndTruncatedServersEndWithTheContext(t *testing.T) {
	whole := append(greeting(2, 2), update(1, rect(0, 0, 2, 2, encRaw, make([]byte, 16)))...)
	for n := range whole {
		near, far := net.Pipe()
		go io.Copy(io.Discard, far)
		go far.Write(whole[:n])
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		s, err := Open(ctx, near)
		if err == nil {
			err = s.Screenshot(ctx, io.Discard)
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %d octets: err = %v, want the deadline's", n, err)
		}
		cancel()
		far.Close()
		near.Close()
	}
}

func TestWhatIsSent(t *testing.T) {
	c, heard := serve(t, greeting(100, 50))
	s, err := Open(within(t), c)
	if err != nil {
		t.Fatal(err)
	}
	ctx := within(t)
	for _, err := range []error{s.Keys(ctx, "ctrl", "F1"), s.Type(ctx, "A\né€"), s.Click(ctx, 7, 8, "right", 1), s.Scroll(ctx, 1, 2, -1)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{s.Click(ctx, 100, 0, "left", 1), s.Click(ctx, 0, -1, "left", 1), s.Click(ctx, 0, 0, "fourth", 1), s.Keys(ctx), s.Keys(ctx, "nokey"),
		s.Keys(ctx, "f"+"99"), s.Type(ctx, "a\x00"), s.Type(ctx, string(make([]byte, MaxTyped+1))), s.Scroll(ctx, 0, 0, MaxScroll+1), s.Drag(ctx, 0, 0, 0, 50, "left")} {
		if !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("err = %v, want ErrInvalid", err)
		}
	}
	s.Close()
	got := <-heard
	got = got[12+1+1+20+4+8:] // version, security, shared, pixel format, encodings
	key := func(down byte, sym uint32) []byte { return binary.BigEndian.AppendUint32([]byte{4, down, 0, 0}, sym) }
	want := bytes.Join([][]byte{
		key(1, 0xffe3), key(1, 0xffbe), key(0, 0xffbe), key(0, 0xffe3),
		key(1, 0xffe1), key(1, 'A'), key(0, 'A'), key(0, 0xffe1), key(1, 0xff0d), key(0, 0xff0d), key(1, 0xe9), key(0, 0xe9), key(1, 0x010020ac), key(0, 0x010020ac),
		{5, 0, 0, 7, 0, 8}, {5, 4, 0, 7, 0, 8}, {5, 0, 0, 7, 0, 8},
		{5, 8, 0, 1, 0, 2}, {5, 0, 0, 1, 0, 2},
	}, nil)
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// A server that hangs up, wherever, is the guest's fault and none of ours; and a size alone, which acts look at too, takes no memory.
func TestServersThatHangUp(t *testing.T) {
	whole := append(greeting(2, 2), update(1, rect(0, 0, 2, 2, encRaw, make([]byte, 16)))...)
	for n := range whole {
		for name, do := range map[string]func(*Screen) error{
			"picture": func(s *Screen) error { return s.Screenshot(within(t), io.Discard) },
			"act":     func(s *Screen) error { return errors.Join(s.Keys(within(t), "a"), s.Sync(within(t))) },
		} {
			near, far := net.Pipe()
			go io.Copy(io.Discard, far)
			go func() {
				far.Write(whole[:n])
				far.Close()
			}()
			s, err := Open(within(t), near)
			if err == nil {
				err = do(s)
			}
			if !errors.Is(err, sandbox.ErrState) {
				t.Errorf("%s after %d octets: err = %v, want one of ErrState", name, n, err)
			}
			near.Close()
		}
	}
	const side = 64
	c, _ := serve(t, append(greeting(side, side), update(1, rect(0, 0, side, side, encRaw, make([]byte, 4*side*side)))...))
	s, err := Open(within(t), c)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Sync(within(t)); err != nil || s.img != nil {
		t.Errorf("a picture that nobody wants: %v, kept: %v", err, s.img != nil)
	}
	if w, h := s.Size(); w != side || h != side {
		t.Errorf("%d by %d", w, h)
	}
}
