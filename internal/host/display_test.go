package host

import (
	"bytes"
	"context"
	"fmt"
	"image"
	"image/png"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	dsecv1 "github.com/dsec-dev/dsec/api/dsec/v1"
	"github.com/dsec-dev/dsec/internal/backend/fake"
	"github.com/dsec-dev/dsec/internal/display"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A real display server shows what was typed, once, and a real program reads it.
func TestScreen(t *testing.T) {
	for _, p := range []string{"Xvnc", "xterm"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("no %s: apt-get install tigervnc-standalone-server xterm", p)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr, port := l.Addr().String(), l.Addr().(*net.TCPAddr).Port
	l.Close()
	name := fmt.Sprintf(":%d", port)
	run := func(argv ...string) {
		c := exec.Command(argv[0], argv[1:]...)
		c.Env = append(os.Environ(), "DISPLAY="+name)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Process.Kill(); c.Wait() })
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(50 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("never: ", what)
			}
		}
	}
	run("Xvnc", name, "-rfbport", fmt.Sprint(port), "-localhost", "-SecurityTypes", "None", "-geometry", "420x300", "-nolisten", "tcp")
	until("Xvnc listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	file := filepath.Join(t.TempDir(), "typed")
	run("xterm", "-geometry", "60x18+0+0", "-e", "sh", "-c", "echo ready > "+file+".ready; cat > "+file)
	until("xterm runs", func() bool { _, err := os.Stat(file + ".ready"); return err == nil })

	r := newRig(t, fake.Options{Listen: func(_ sandbox.ID, p uint16) (net.Conn, bool) {
		if p != screenPort {
			return nil, false
		}
		c, err := net.Dial("tcp", addr)
		return c, err == nil
	}}, nil)
	b := r.create("k")
	s, ctx := displayService{b.h}, in("default")
	shot := func() []byte {
		t.Helper()
		m, err := s.Screenshot(ctx, connect.NewRequest(&dsecv1.ScreenshotRequest{Sandbox: string(b.id)}))
		if err != nil {
			t.Fatal(err)
		}
		img, err := png.Decode(bytes.NewReader(m.Msg.Png))
		if err != nil || img.Bounds().Dx() != 420 || img.Bounds().Dy() != 300 {
			t.Fatalf("%v, %v", img.Bounds(), err)
		}
		return m.Msg.Png
	}
	before := shot()
	act := func(step string, acts ...*dsecv1.ScreenAct) (*connect.Response[dsecv1.ScreenActResponse], error) {
		return s.Act(context.WithoutCancel(ctx), connect.NewRequest(&dsecv1.ScreenActRequest{Sandbox: string(b.id), Step: step, Acts: acts}))
	}
	for i := range 2 {
		m, err := act("s1", &dsecv1.ScreenAct{Pointer: &dsecv1.ScreenPointer{X: 100, Y: 200, Button: "left"}}, &dsecv1.ScreenAct{Text: "Hello, Screen!\n"})
		if err != nil || m.Msg.Existed != (i == 1) {
			t.Fatalf("%v %v", m, err)
		}
	}
	var after []byte
	until("the text is seen in its line", func() bool { after = shot(); return changed(t, before, after, image.Rect(0, 0, 420, 40)) > 50 })
	if dir := os.Getenv("DSEC_TEST_SHOTS"); dir != "" {
		os.WriteFile(filepath.Join(dir, "before.png"), before, 0o644)
		os.WriteFile(filepath.Join(dir, "after.png"), after, 0o644)
	}
	if _, err := act("s1b", &dsecv1.ScreenAct{Keys: []string{"ctrl", "d"}}); err != nil {
		t.Fatal(err)
	}
	until("the text arrives", func() bool { p, _ := os.ReadFile(file); return string(p) == "Hello, Screen!\n" })
	_, err = act("s2")
	wantErr(t, err, sandbox.ErrInvalid, "acts")
	_, err = act("s3", &dsecv1.ScreenAct{})
	wantErr(t, err, sandbox.ErrInvalid, "exactly one")
	_, err = s.Screenshot(ctx, connect.NewRequest(&dsecv1.ScreenshotRequest{Sandbox: string(b.id), Port: 5901}))
	wantErr(t, err, sandbox.ErrNotFound)
	// The screen itself, for a caller that speaks RFB: it keeps the sandbox from being idle, and is on record as what can't be done again.
	c, err := r.h.dialScreen(ctx, b.id, 0)
	if err != nil {
		t.Fatal(err)
	}
	near, err := display.Open(context.WithoutCancel(ctx), c)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := near.Screenshot(context.WithoutCancel(ctx), &out); err != nil || out.Len() == 0 {
		t.Errorf("%d octets, %v", out.Len(), err)
	}
	near.Close()
	var kinds []string
	for _, rec := range r.records(b) {
		if tg, m, err := decode(rec.Payload); err == nil {
			switch m := m.(type) {
			case *dsecv1.ScreenActRequest:
				kinds = append(kinds, fmt.Sprint(tg.name(), " ", m.Acts[len(m.Acts)-1].Text))
			case *dsecv1.LogRecord:
				if m.Kind == "port" {
					kinds = append(kinds, m.RequestJson)
				}
				if m.Kind == "screenshot" && len(m.Sha256) == 64 && m.Length > 0 {
					kinds = append(kinds, m.Kind)
				}
			}
		}
	}
	if got := fmt.Sprintf("%q", slices.Compact(kinds)); got != `["screenshot" "screen Hello, Screen!\n" "screenshot" "screen " "{\"screen\":true,\"port\":0,\"not_recorded_before\":0}"]` {
		t.Errorf("recorded: %s", got)
	}
}

// A machine's console is read while it lives, without waking it, and from the record after its end, also by a later host. What has none says so.
func TestConsole(t *testing.T) {
	big := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	small := []byte("\x1b[2JKernel panic\xff\n")
	var ids sync.Map
	r := newRig(t, fake.Options{Console: func(id sandbox.ID) []byte { v, _ := ids.Load(id); text, _ := v.([]byte); return text }}, nil)
	ask := func(b *box) (*dsecv1.ConsoleResponse, error) {
		m, err := displayService{r.h}.Console(in("default"), connect.NewRequest(&dsecv1.ConsoleRequest{Sandbox: string(b.id)}))
		if err != nil {
			return nil, err
		}
		return m.Msg, nil
	}
	var boxes []*box
	for i, text := range [][]byte{small, big, nil} {
		b := r.create(fmt.Sprint("k", i))
		ids.Store(b.id, text)
		boxes = append(boxes, b)
		if m, err := ask(b); err != nil || !bytes.Equal(m.Text, text) || m.Ended {
			t.Errorf("%d: %d octets, %v", i, len(m.GetText()), err)
		}
		r.h.end(b, sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "guest_ended"})
		if err := b.waitEnd(in("default")); err != nil {
			t.Fatal(err)
		}
		ids.Delete(b.id)
	}
	for range 2 {
		for i, text := range [][]byte{small, big} {
			if m, err := ask(r.box(boxes[i].id)); err != nil || !bytes.Equal(m.Text, text) || !m.Ended {
				t.Errorf("%d, ended: %d octets, %v", i, len(m.GetText()), err)
			}
		}
		_, err := ask(r.box(boxes[2].id))
		wantErr(t, err, sandbox.ErrNotFound, "nothing is on record")
		r.restart()
	}
	plain := newRig(t, fake.Options{}, nil)
	b := plain.create("k")
	_, err := displayService{plain.h}.Console(in("default"), connect.NewRequest(&dsecv1.ConsoleRequest{Sandbox: string(b.id)}))
	wantErr(t, err, sandbox.ErrUnsupported)
}

// changed counts the pixels of an area in which two pictures differ.
func changed(t *testing.T, a, b []byte, in image.Rectangle) (n int) {
	t.Helper()
	x, err := png.Decode(bytes.NewReader(a))
	if err != nil {
		t.Fatal(err)
	}
	y, err := png.Decode(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	for py := in.Min.Y; py < in.Max.Y; py++ {
		for px := in.Min.X; px < in.Max.X; px++ {
			if x.At(px, py) != y.At(px, py) {
				n++
			}
		}
	}
	return n
}
