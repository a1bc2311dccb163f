package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/display"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/trajectory"
)

const (
	screenPort = 5900 // of a display server inside, when none is named
	screenWait = 2 * time.Minute
	shotWait   = 30 * time.Second
	maxActs    = 64
	maxShot    = 32 << 20 // octets of a PNG: an answer holds 40 MiB
)

type displayService struct{ h *Host }

// A picture takes up to 64 MiB here, and a guest decides when it ends.
const maxScreens = 8

// screen waits for its turn among the calls that hold a picture.
func (h *Host) screen(ctx context.Context) (release func(), err error) {
	if err := h.screens.Acquire(ctx, 1); err != nil {
		return nil, fmt.Errorf("screen: waiting for %d others: %w: %w", maxScreens, err, sandbox.ErrExhausted)
	}
	return func() { h.screens.Release(1) }, nil
}

// openScreen connects to a sandbox's screen and greets its server.
func openScreen(ctx context.Context, inst sandbox.Instance, port uint32) (*display.Screen, error) {
	c, err := connectScreen(ctx, inst, port)
	if err != nil {
		return nil, err
	}
	return display.Open(ctx, c)
}

// connectScreen connects to a sandbox's screen: its machine's own, else the display server at a port inside.
func connectScreen(ctx context.Context, inst sandbox.Instance, port uint32) (c net.Conn, err error) {
	err = sandbox.ErrUnsupported
	if s, ok := inst.(sandbox.Screened); ok && port == 0 {
		c, err = s.VNC(ctx)
	}
	if errors.Is(err, sandbox.ErrUnsupported) {
		if port == 0 {
			port = screenPort
		}
		c, err = inst.Dial(ctx, uint16(port))
	}
	if err != nil {
		return nil, fmt.Errorf("screen: %w", err)
	}
	return c, nil
}

// dialScreen gives a caller the screen itself, for as long as it wants. What goes over it is not recorded.
func (h *Host) dialScreen(ctx context.Context, id sandbox.ID, port uint16) (net.Conn, error) {
	return h.dialInside(ctx, id, fmt.Sprintf(`"screen":true,"port":%d`, port), func(inst sandbox.Instance) (net.Conn, error) {
		return connectScreen(ctx, inst, uint32(port))
	})
}

func checkScreenPort(port uint32) error {
	if port > 65535 {
		return fmt.Errorf("port %d: want 1 to 65535, or 0: %w", port, sandbox.ErrInvalid)
	}
	return nil
}

func (s displayService) Screenshot(ctx context.Context, req *connect.Request[dsecv1.ScreenshotRequest]) (*connect.Response[dsecv1.ScreenshotResponse], error) {
	m := req.Msg
	b, err := s.h.told(ctx, m.GetSandbox())
	if err != nil {
		return nil, err
	}
	if err := checkScreenPort(m.GetPort()); err != nil {
		return nil, err
	}
	inst, err := b.use(ctx)
	if err != nil {
		return nil, err
	}
	defer b.done()
	ctx, cancel := context.WithTimeout(ctx, shotWait)
	defer cancel()
	release, err := s.h.screen(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	scr, err := openScreen(ctx, inst, m.GetPort())
	if err != nil {
		return nil, err
	}
	defer scr.Close()
	var out bytes.Buffer
	if err := scr.Screenshot(ctx, &out); err != nil {
		return nil, err
	}
	if out.Len() > maxShot {
		return nil, fmt.Errorf("screenshot of %d octets: at most %d: %w", out.Len(), maxShot, sandbox.ErrExhausted)
	}
	r := &dsecv1.ScreenshotResponse{Png: out.Bytes(), Sha256: fmt.Sprintf("%x", sha256.Sum256(out.Bytes()))}
	w, h := scr.Size()
	r.Width, r.Height = int32(w), int32(h)
	note := &dsecv1.LogRecord{Kind: "screenshot", Length: int64(out.Len()), Sha256: r.Sha256, RequestJson: fmt.Sprintf(`{"port":%d,"width":%d,"height":%d}`, m.GetPort(), w, h)}
	if _, err := b.append(trajectory.Record{Kind: trajectory.KindEvent, Payload: encode(tagEvent, note)}); err != nil {
		return nil, fmt.Errorf("screenshot: record it: %w", err)
	}
	return connect.NewResponse(r), nil
}

// checkAct refuses what can be refused without the screen.
func checkAct(a *dsecv1.ScreenAct) error {
	n := 0
	if len(a.GetKeys()) > 0 {
		n++
		if err := display.CheckKeys(a.Keys); err != nil {
			return err
		}
	}
	if a.GetText() != "" {
		n++
		if err := display.CheckText(a.Text); err != nil {
			return err
		}
	}
	if p := a.GetPointer(); p != nil {
		n++
		if err := display.CheckButton(p.GetButton()); err != nil {
			return err
		}
		if p.GetClicks() < 0 || p.GetClicks() > 3 {
			return fmt.Errorf("pointer: %d clicks, at most 3: %w", p.GetClicks(), sandbox.ErrInvalid)
		}
		if p.GetDrag() && p.GetButton() == "" {
			return fmt.Errorf("pointer: a drag wants a button: %w", sandbox.ErrInvalid)
		}
	}
	if c := a.GetScroll(); c != nil {
		n++
		if c.GetSteps() > display.MaxScroll || c.GetSteps() < -display.MaxScroll {
			return fmt.Errorf("scroll by %d steps: at most %d: %w", c.GetSteps(), display.MaxScroll, sandbox.ErrInvalid)
		}
	}
	if n != 1 {
		return fmt.Errorf("want exactly one of keys, text, pointer and scroll, not %d: %w", n, sandbox.ErrInvalid)
	}
	return nil
}

func doAct(ctx context.Context, s *display.Screen, a *dsecv1.ScreenAct) error {
	p, c := a.GetPointer(), a.GetScroll()
	switch {
	case len(a.GetKeys()) > 0:
		return s.Keys(ctx, a.Keys...)
	case a.GetText() != "":
		return s.Type(ctx, a.Text)
	case p.GetDrag():
		return s.Drag(ctx, int(p.X), int(p.Y), int(p.ToX), int(p.ToY), p.Button)
	case p != nil:
		return s.Click(ctx, int(p.X), int(p.Y), p.Button, int(max(1, p.Clicks)))
	}
	return s.Scroll(ctx, int(c.GetX()), int(c.GetY()), int(c.GetSteps()))
}

func (s displayService) Act(ctx context.Context, req *connect.Request[dsecv1.ScreenActRequest]) (*connect.Response[dsecv1.ScreenActResponse], error) {
	m := req.Msg
	b, err := s.h.told(ctx, m.GetSandbox())
	if err != nil {
		return nil, err
	}
	if err := checkScreenPort(m.GetPort()); err != nil {
		return nil, err
	}
	if n := len(m.GetActs()); n == 0 || n > maxActs {
		return nil, fmt.Errorf("%d acts: 1 to %d: %w", n, maxActs, sandbox.ErrInvalid)
	}
	for i, a := range m.Acts {
		if err := checkAct(a); err != nil {
			return nil, fmt.Errorf("acts[%d]: %w", i, err)
		}
	}
	key := m.GetStep()
	if key == "" {
		key = sandbox.NewKey()
	}
	var scr *display.Screen
	_, existed, err := b.once(ctx, key, tagScreen, &dsecv1.ScreenActRequest{Port: m.GetPort(), Acts: m.Acts}, screenWait,
		func(ctx context.Context, inst sandbox.Instance) (func(), error) {
			ctx, cancel := context.WithTimeout(ctx, shotWait)
			defer cancel()
			release, err := s.h.screen(ctx)
			if err != nil {
				return nil, err
			}
			if scr, err = openScreen(ctx, inst, m.GetPort()); err != nil {
				release()
				return nil, err
			}
			return func() { scr.Close(); release() }, nil
		}, func(ctx context.Context, _ sandbox.Instance) (*dsecv1.LogRecord, error) {
			for i, a := range m.Acts {
				if err := doAct(ctx, scr, a); err != nil {
					return nil, fmt.Errorf("acts[%d]: %w", i, err)
				}
			}
			// The server reads in order, so a picture that it answers says that it has taken what came before.
			return nil, scr.Sync(ctx)
		})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&dsecv1.ScreenActResponse{Existed: existed}), nil
}

const (
	consoleWait = 10 * time.Second
	consoleKind = "console" // of the event that keeps it
)

func (s displayService) Console(ctx context.Context, req *connect.Request[dsecv1.ConsoleRequest]) (*connect.Response[dsecv1.ConsoleResponse], error) {
	b, err := s.h.told(ctx, req.Msg.GetSandbox())
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	inst, ended := b.inst, b.state.Ended()
	b.mu.Unlock()
	var text []byte
	if ended {
		text, err = b.keptConsole(ctx)
	} else {
		text, err = consoleOf(ctx, inst)
	}
	if err != nil {
		return nil, fmt.Errorf("console of %s: %w", b.id, err)
	}
	return connect.NewResponse(&dsecv1.ConsoleResponse{Text: text, Ended: ended}), nil
}

func consoleOf(ctx context.Context, inst sandbox.Instance) ([]byte, error) {
	c, ok := inst.(sandbox.Consoled)
	if !ok {
		return nil, fmt.Errorf("its backend has none, or it is not up yet: %w", sandbox.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(ctx, consoleWait)
	defer cancel()
	return c.Console(ctx)
}

// keepConsole puts the console of a sandbox that ends on record: its machine goes, and what it said last may be all that tells why.
func (b *box) keepConsole(inst sandbox.Instance) {
	ctx, cancel := b.h.bounded(consoleWait)
	defer cancel()
	text, err := consoleOf(ctx, inst)
	if errors.Is(err, sandbox.ErrUnsupported) || err == nil && len(text) == 0 {
		return
	}
	var in *trajectory.Input
	if err == nil {
		in, err = b.input(text)
	}
	if err == nil {
		_, err = b.append(trajectory.Record{Kind: trajectory.KindEvent, Input: in, Payload: encode(tagEvent, &dsecv1.LogRecord{Kind: consoleKind})})
	}
	if err != nil {
		b.h.log.Warn("keep the console of an ended sandbox", "sandbox", b.id, "err", err)
	}
}

// keptConsole finds the console on record.
func (b *box) keptConsole(ctx context.Context) (text []byte, err error) {
	var at *trajectory.Input
	for q := (trajectory.Query{From: 1, Limit: batchRecords}); ; {
		recs, next, err := b.h.deps.Log.Read(ctx, b.traj, q)
		for i := range recs {
			if recs[i].Kind != trajectory.KindEvent || recs[i].Input == nil {
				continue
			}
			if _, m, err := decode(recs[i].Payload); err == nil {
				if e, ok := m.(*dsecv1.LogRecord); ok && e.Kind == consoleKind {
					at = recs[i].Input
				}
			}
		}
		if err != nil {
			return nil, err
		}
		if next <= q.From {
			break
		}
		q.From = next
	}
	if at == nil {
		return nil, fmt.Errorf("nothing is on record of it: %w", sandbox.ErrNotFound)
	}
	in, err := b.h.deps.Log.OpenInput(at)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	return io.ReadAll(in)
}
