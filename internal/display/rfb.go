// Package display speaks RFB, the protocol of VNC, to a screen: pictures of it, keys and a pointer.
//
// It hides the protocol's messages and the names of keys. The server is a guest's and not trusted: sizes are bounded before anything is
// allocated, every rectangle must lie in the screen, and the caller's context bounds every wait. A Screen is for one caller at a time; there
// are no goroutines and no locks.
package display

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/png"
	"io"
	"net"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Bounds of what a server may say.
const (
	maxSide  = 8192
	maxArea  = 16 << 20 // pixels
	maxText  = 1 << 20  // of a clipboard, a name or a reason
	maxNoise = 10_000   // messages and rectangles before a whole picture has come
)

const (
	encRaw         = 0
	encDesktopSize = -223
)

// Screen is a connection to a display server.
type Screen struct {
	c    net.Conn
	r    *bufio.Reader
	w, h int          // pixels
	keep bool         // what is sent becomes the picture; else it is passed over
	img  *image.NRGBA // nil before the first pixel that is kept: a server that only says a size costs nothing
}

// Open does the handshake on a connection, which is the screen's from then on, also when it fails. Only servers without a password are taken:
// what guards the connection is the sandbox's wall.
func Open(ctx context.Context, c net.Conn) (*Screen, error) {
	s := &Screen{c: c, r: bufio.NewReaderSize(c, 64<<10)}
	err := s.within(ctx, s.handshake)
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("display: %w", err)
	}
	return s, nil
}

// Close ends the connection.
func (s *Screen) Close() error { return s.c.Close() }

// Size is the screen's, in pixels, as it was last told.
func (s *Screen) Size() (width, height int) { return s.w, s.h }

// within does something that ends with the context.
func (s *Screen) within(ctx context.Context, do func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { s.c.SetDeadline(time.Unix(1, 0)) })
	err := do()
	if !stop() && err != nil {
		return fmt.Errorf("%w: %w", ctx.Err(), err) // it says how far it came
	}
	if err != nil && !errors.Is(err, sandbox.ErrState) && !errors.Is(err, sandbox.ErrInvalid) { // of the connection, which is the guest's to break
		return fmt.Errorf("the display server ended the connection: %w: %w", err, sandbox.ErrState)
	}
	return err
}

func invalid(format string, a ...any) error {
	return fmt.Errorf("the display server said "+format+": %w", append(a, sandbox.ErrState)...)
}

func (s *Screen) read(n int) ([]byte, error) {
	p := make([]byte, n)
	if _, err := io.ReadFull(s.r, p); err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	return p, nil
}

// text reads a text with its length before it.
func (s *Screen) text() (string, error) {
	p, err := s.read(4)
	if err != nil {
		return "", err
	}
	n := binary.BigEndian.Uint32(p)
	if n > maxText {
		return "", invalid("a text of %d octets", n)
	}
	p, err = s.read(int(n))
	return string(p), err
}

func (s *Screen) handshake() error {
	p, err := s.read(12)
	if err != nil {
		return err
	}
	if string(p[:4]) != "RFB " || p[11] != '\n' {
		return invalid("%.12q, which is not RFB", p)
	}
	old := string(p[4:11]) < "003.007"
	answer := "RFB 003.008\n"
	if old {
		answer = "RFB 003.003\n"
	} else if string(p[4:11]) == "003.007" {
		answer = "RFB 003.007\n"
	}
	if _, err := s.c.Write([]byte(answer)); err != nil {
		return err
	}
	if err := s.security(old, answer == "RFB 003.008\n"); err != nil {
		return err
	}
	if _, err := s.c.Write([]byte{1}); err != nil { // shared: others may look on
		return err
	}
	if p, err = s.read(20); err != nil {
		return err
	}
	if err := s.resize(int(binary.BigEndian.Uint16(p)), int(binary.BigEndian.Uint16(p[2:]))); err != nil {
		return err
	}
	if _, err := s.text(); err != nil {
		return err
	}
	// 32 bits a pixel, little endian, red at 16, green at 8, blue at 0; then the encodings that we read.
	m := []byte{0, 0, 0, 0, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0}
	m = append(m, 2, 0, 0, 2)
	m = binary.BigEndian.AppendUint32(m, encRaw)
	m = binary.BigEndian.AppendUint32(m, 0xffffff21) // -223: tells a new size
	_, err = s.c.Write(m)
	return err
}

// security takes the kind without a password.
func (s *Screen) security(old, result bool) error {
	if old {
		p, err := s.read(4)
		if err != nil {
			return err
		}
		if k := binary.BigEndian.Uint32(p); k != 1 {
			return invalid("that it wants security kind %d, not none", k)
		}
		return nil
	}
	p, err := s.read(1)
	if err != nil {
		return err
	}
	if p[0] == 0 {
		why, err := s.text()
		if err != nil {
			return err
		}
		return invalid("no: %.200q", why)
	}
	kinds, err := s.read(int(p[0]))
	if err != nil {
		return err
	}
	none := false
	for _, k := range kinds {
		none = none || k == 1
	}
	if !none {
		return invalid("that it wants a password (security kinds %v); start it without", kinds)
	}
	if _, err := s.c.Write([]byte{1}); err != nil || !result {
		return err
	}
	if p, err = s.read(4); err != nil {
		return err
	}
	if binary.BigEndian.Uint32(p) != 0 {
		why, err := s.text()
		if err != nil {
			return err
		}
		return invalid("no: %.200q", why)
	}
	return nil
}

func (s *Screen) resize(w, h int) error {
	if w < 1 || h < 1 || w > maxSide || h > maxSide || w*h > maxArea {
		return invalid("a size of %d by %d; each side is 1 to %d, %d pixels in all at most", w, h, maxSide, maxArea)
	}
	if s.w != w || s.h != h {
		s.w, s.h, s.img = w, h, nil
	}
	return nil
}

// picture is where pixels go.
func (s *Screen) picture() *image.NRGBA {
	if s.img == nil {
		s.img = image.NewNRGBA(image.Rect(0, 0, s.w, s.h))
		for i := 3; i < len(s.img.Pix); i += 4 {
			s.img.Pix[i] = 255
		}
	}
	return s.img
}

// Screenshot writes the whole screen as PNG. Errors: ErrState for a server that breaks the protocol.
func (s *Screen) Screenshot(ctx context.Context, w io.Writer) error {
	s.keep = true
	err := s.within(ctx, s.refresh)
	s.keep = false
	if err == nil {
		err = (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(w, s.img)
	}
	if err != nil {
		return fmt.Errorf("screenshot: %w", err)
	}
	return nil
}

// refresh asks for the whole picture until one has come in the size that is now the screen's.
func (s *Screen) refresh() error {
	ask := true
	got := 0 // pixels of the picture asked for; a server may send it in several updates
	for range maxNoise {
		if ask {
			w, h := s.Size()
			m := []byte{3, 0, 0, 0, 0, 0}
			m = binary.BigEndian.AppendUint16(m, uint16(w))
			m = binary.BigEndian.AppendUint16(m, uint16(h))
			if _, err := s.c.Write(m); err != nil {
				return err
			}
			ask, got = false, 0
		}
		kind, err := s.r.ReadByte()
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		switch kind {
		case 0:
			n, resized, err := s.update()
			if err != nil {
				return err
			}
			ask = resized
			got += n
			if w, h := s.Size(); !resized && got >= w*h {
				return nil
			}
		case 1: // colours of a palette, which we did not ask for
			p, err := s.read(5)
			if err == nil {
				_, err = s.r.Discard(6 * int(binary.BigEndian.Uint16(p[3:])))
			}
			if err != nil {
				return err
			}
		case 2: // bell
		case 3: // clipboard
			if _, err := s.read(3); err != nil {
				return err
			}
			if _, err := s.text(); err != nil {
				return err
			}
		default:
			return invalid("a message of unknown kind %d", kind)
		}
	}
	return invalid("%d messages without a whole picture", maxNoise)
}

// update reads one update; n is the number of pixels in it.
func (s *Screen) update() (n int, resized bool, err error) {
	p, err := s.read(3)
	if err != nil {
		return 0, false, err
	}
	count := int(binary.BigEndian.Uint16(p[1:]))
	if count > maxNoise {
		return 0, false, invalid("an update of %d rectangles", count)
	}
	for range count {
		if p, err = s.read(12); err != nil {
			return 0, false, err
		}
		x, y := int(binary.BigEndian.Uint16(p)), int(binary.BigEndian.Uint16(p[2:]))
		w, h := int(binary.BigEndian.Uint16(p[4:])), int(binary.BigEndian.Uint16(p[6:]))
		switch enc := int32(binary.BigEndian.Uint32(p[8:])); enc {
		case encDesktopSize:
			if err := s.resize(w, h); err != nil {
				return 0, false, err
			}
			resized = true
		case encRaw:
			if !image.Rect(x, y, x+w, y+h).In(image.Rect(0, 0, s.w, s.h)) {
				return 0, false, invalid("a rectangle of %d by %d at %d, %d, outside its screen", w, h, x, y)
			}
			if w == 0 || h == 0 {
				continue // has no place, wherever it says that it lies
			}
			n += w * h
			if !s.keep {
				for range h {
					if _, err := s.r.Discard(4 * w); err != nil {
						return 0, false, fmt.Errorf("read: %w", err)
					}
				}
				continue
			}
			img, line := s.picture(), make([]byte, 4*w)
			for r := range h {
				if _, err := io.ReadFull(s.r, line); err != nil {
					return 0, false, fmt.Errorf("read: %w", err)
				}
				out := img.Pix[img.PixOffset(x, y+r):]
				for i := 0; i < len(line); i += 4 {
					out[i], out[i+1], out[i+2] = line[i+2], line[i+1], line[i]
				}
			}
		default:
			return 0, false, invalid("a rectangle in encoding %d, which was not asked for", enc)
		}
	}
	return n, resized, nil
}

// Sync returns when the server has taken what was sent before.
func (s *Screen) Sync(ctx context.Context) error {
	if err := s.within(ctx, s.refresh); err != nil {
		return fmt.Errorf("screen: %w", err)
	}
	return nil
}
