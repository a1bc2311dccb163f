package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/client"
)

type screenCmd struct {
	Shot   screenShotCmd   `cmd:"" help:"Save the screen as PNG."`
	Type   screenTypeCmd   `cmd:"" help:"Type text."`
	Key    screenKeyCmd    `cmd:"" help:"Press keys together and let them go."`
	Click  screenClickCmd  `cmd:"" help:"Click at a place."`
	Move   screenMoveCmd   `cmd:"" help:"Move the pointer."`
	Drag   screenDragCmd   `cmd:"" help:"Hold a button from one place to another."`
	Scroll screenScrollCmd `cmd:"" help:"Turn the wheel at a place."`
	View   screenViewCmd   `cmd:"" help:"Print the address at which a browser shows the screen."`
}

// onScreen names the screen of a command.
type onScreen struct {
	ID   string `arg:"" help:"ID or name of the sandbox."`
	Port uint16 `help:"Port of the display server inside; 0: the machine's own screen, else 5900." default:"0"`
	Step string `help:"Key of the step: the same again does nothing." placeholder:"KEY"`
}

func (o onScreen) screen(ctx context.Context, c *cli) (*client.Screen, error) {
	cl, err := c.client(ctx)
	if err != nil {
		return nil, err
	}
	return cl.Sandbox(o.ID).Screen(o.Port), nil
}

func (o onScreen) act(ctx context.Context, c *cli, a *dsecv1.ScreenAct) error {
	s, err := o.screen(ctx, c)
	if err != nil {
		return err
	}
	return s.Act(ctx, o.Step, a)
}

type screenShotCmd struct {
	onScreen
	File string `arg:"" optional:"" help:"File to write; - is standard output." default:"screen.png"`
}

func (x *screenShotCmd) Run(ctx context.Context, c *cli) error {
	s, err := x.screen(ctx, c)
	if err != nil {
		return err
	}
	r, err := s.Shot(ctx)
	if err != nil {
		return err
	}
	if x.File == "-" {
		_, err = os.Stdout.Write(r.Png)
		return err
	}
	if err := os.WriteFile(x.File, r.Png, 0o644); err != nil {
		return err
	}
	fmt.Printf("%s %dx%d\n", x.File, r.Width, r.Height)
	return nil
}

type screenTypeCmd struct {
	onScreen
	Text string `arg:"" help:"Text, at most 4,096 octets."`
}

func (x *screenTypeCmd) Run(ctx context.Context, c *cli) error {
	return x.act(ctx, c, &dsecv1.ScreenAct{Text: x.Text})
}

type screenKeyCmd struct {
	onScreen
	Keys []string `arg:"" help:"Names such as ctrl, Return, F1, or characters."`
}

func (x *screenKeyCmd) Run(ctx context.Context, c *cli) error {
	return x.act(ctx, c, &dsecv1.ScreenAct{Keys: x.Keys})
}

type screenClickCmd struct {
	onScreen
	X      int32  `arg:"" help:"Pixels from the left."`
	Y      int32  `arg:"" help:"Pixels from the top."`
	Button string `enum:"left,middle,right" default:"left" help:"left, middle or right."`
	Clicks int32  `default:"1" help:"1 to 3."`
}

func (x *screenClickCmd) Run(ctx context.Context, c *cli) error {
	return x.act(ctx, c, &dsecv1.ScreenAct{Pointer: &dsecv1.ScreenPointer{X: x.X, Y: x.Y, Button: x.Button, Clicks: x.Clicks}})
}

type screenMoveCmd struct {
	onScreen
	X int32 `arg:"" help:"Pixels from the left."`
	Y int32 `arg:"" help:"Pixels from the top."`
}

func (x *screenMoveCmd) Run(ctx context.Context, c *cli) error {
	return x.act(ctx, c, &dsecv1.ScreenAct{Pointer: &dsecv1.ScreenPointer{X: x.X, Y: x.Y}})
}

type screenDragCmd struct {
	onScreen
	X   int32 `arg:"" help:"From: pixels from the left."`
	Y   int32 `arg:"" help:"From: pixels from the top."`
	ToX int32 `arg:"" help:"To: pixels from the left."`
	ToY int32 `arg:"" help:"To: pixels from the top."`
}

func (x *screenDragCmd) Run(ctx context.Context, c *cli) error {
	return x.act(ctx, c, &dsecv1.ScreenAct{Pointer: &dsecv1.ScreenPointer{X: x.X, Y: x.Y, Button: "left", Drag: true, ToX: x.ToX, ToY: x.ToY}})
}

type screenScrollCmd struct {
	onScreen
	X     int32 `arg:"" help:"Pixels from the left."`
	Y     int32 `arg:"" help:"Pixels from the top."`
	Steps int32 `arg:"" help:"Steps of the wheel, down when positive."`
}

func (x *screenScrollCmd) Run(ctx context.Context, c *cli) error {
	return x.act(ctx, c, &dsecv1.ScreenAct{Scroll: &dsecv1.ScreenScroll{X: x.X, Y: x.Y, Steps: x.Steps}})
}

type screenViewCmd struct {
	onScreen
	WithKey bool `name:"with-key" help:"With the API key in the address, which is then as secret as the key. Else the page asks for it."`
}

func (x *screenViewCmd) Run(ctx context.Context, c *cli) error {
	s, err := x.screen(ctx, c)
	if err != nil {
		return err
	}
	at, err := s.ViewURL(x.WithKey)
	if err != nil {
		return err
	}
	fmt.Println(at)
	return nil
}

// noVNC is the folder of noVNC's package: the config's, DSEC_NOVNC, in the state folder, what `make novnc` leaves, Debian's. Empty: none.
func (p *places) noVNC() string {
	if at := p.settings.Gateway.NoVNC; at != "" {
		return at
	}
	list := []string{os.Getenv("DSEC_NOVNC"), filepath.Join(p.State, "novnc")}
	if cache, err := os.UserCacheDir(); err == nil {
		list = append(list, filepath.Join(cache, "dsec", "novnc"))
	}
	for _, at := range append(list, "/usr/share/novnc") {
		if at == "" {
			continue
		}
		if _, err := os.Stat(filepath.Join(at, "core", "rfb.js")); err == nil {
			return at
		}
	}
	return ""
}
