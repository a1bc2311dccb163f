package client

import (
	"context"
	"fmt"
	"net/url"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
)

// Screen uses a sandbox's screen as a person does.
type Screen struct {
	s    *Sandbox
	port uint32
}

// Screen is the sandbox's screen: its machine's own where it has one, else the display server (RFB without a password) at a port inside.
// Port 0 takes the machine's, else 5900.
func (s *Sandbox) Screen(port uint16) *Screen { return &Screen{s, uint32(port)} }

// Shot answers the screen as PNG, with its size in pixels.
func (x *Screen) Shot(ctx context.Context) (*dsecv1.ScreenshotResponse, error) {
	return call(ctx, x.s.c, x.s.c.DisplayService.Screenshot, &dsecv1.ScreenshotRequest{Sandbox: x.s.ID, Port: x.port})
}

// Act does 1 to 64 things in order, as one step under a key; the same key again does nothing. An empty key is made by the server.
func (x *Screen) Act(ctx context.Context, key string, acts ...*dsecv1.ScreenAct) error {
	_, err := call(ctx, x.s.c, x.s.c.DisplayService.Act, &dsecv1.ScreenActRequest{Sandbox: x.s.ID, Port: x.port, Step: key, Acts: acts})
	return err
}

// Keys presses keys together and lets them go: "ctrl", "s".
func (x *Screen) Keys(ctx context.Context, keys ...string) error {
	return x.Act(ctx, "", &dsecv1.ScreenAct{Keys: keys})
}

// Type types text, at most 4,096 octets.
func (x *Screen) Type(ctx context.Context, text string) error {
	return x.Act(ctx, "", &dsecv1.ScreenAct{Text: text})
}

// Click clicks left, middle or right at a place in pixels; with an empty button the pointer only moves.
func (x *Screen) Click(ctx context.Context, px, py int, button string) error {
	return x.Act(ctx, "", &dsecv1.ScreenAct{Pointer: &dsecv1.ScreenPointer{X: int32(px), Y: int32(py), Button: button}})
}

// Scroll turns the wheel at a place, down when positive.
func (x *Screen) Scroll(ctx context.Context, px, py, steps int) error {
	return x.Act(ctx, "", &dsecv1.ScreenAct{Scroll: &dsecv1.ScreenScroll{X: int32(px), Y: int32(py), Steps: int32(steps)}})
}

// ViewURL is where a browser shows the screen, and lets a person use it. With the key in it the address is as secret as the key; else the page asks
// for one. ErrInvalid for a client that speaks over a Unix socket, which no browser can.
func (x *Screen) ViewURL(withKey bool) (string, error) {
	c := x.s.c
	if c.base == unixBase {
		return "", fmt.Errorf("view of the screen: this client speaks over a Unix socket, which no browser can: give the gateway's http address (--url, DSEC_URL): %w", ErrInvalid)
	}
	at := c.base + "/v1/screens/" + url.PathEscape(x.s.ID)
	if x.port != 0 {
		at += fmt.Sprintf("?port=%d", x.port)
	}
	if withKey && c.key != "" {
		at += "#key=" + url.QueryEscape(c.key)
	}
	return at, nil
}

// Console is the end, at most 1 MiB, of what the sandbox's machine wrote on its serial console, also of one that has ended (by its ID).
func (s *Sandbox) Console(ctx context.Context) ([]byte, error) {
	r, err := call(ctx, s.c, s.c.DisplayService.Console, &dsecv1.ConsoleRequest{Sandbox: s.ID})
	if err != nil {
		return nil, err
	}
	return r.Text, nil
}
