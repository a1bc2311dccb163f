package client

import (
	"context"

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
