package wire

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

type message interface{ Append([]byte) []byte }

// decoders has one row a body: a value with every field set, and its decoder.
var decoders = []struct {
	name   string
	value  message
	decode func([]byte) (message, error)
}{
	{"birth", Birth{UID: 365536, Ops: []string{Op("private"), OpFD("root", 0), Op("mask", "/proc/keys")}, Filter: make([]byte, 16),
		Caps: 1 << 40, Flags: BirthNoNewPrivs, Env: []string{"A=b", "G=\xff"}, Rlimits: []Rlimit{{Resource: 4}, {Resource: 7, Soft: 1, Hard: ^uint64(0)}}},
		func(b []byte) (message, error) { return DecodeBirth(b) }},
	{"start", Start{User: "nobody:adm", Cwd: "/tmp", Argv: []string{"sh", "-c", ""}, Env: []string{"X=1"}, Flags: StartTerminal | StartNotify, Rows: 24, Cols: 80},
		func(b []byte) (message, error) { return DecodeStart(b) }},
	{"prepare", Prepare{Ops: []string{Op("base"), OpFD("netns", 0), Op("mask", "/proc/kcore")}}, func(b []byte) (message, error) { return DecodePrepare(b) }},
	{"signal", Signal{Signal: 15, Group: true}, func(b []byte) (message, error) { return DecodeSignal(b) }},
	{"group", Group{Number: 7, Act: GroupStrike, Signal: 9}, func(b []byte) (message, error) { return DecodeGroup(b) }},
	{"resize", Resize{Rows: 50, Cols: 132}, func(b []byte) (message, error) { return DecodeResize(b) }},
	{"hello", Hello{Version: Version, Features: 7}, func(b []byte) (message, error) { return DecodeHello(b) }},
	{"started", Started{PID: 2, UID: 65534, GID: 65533}, func(b []byte) (message, error) { return DecodeStarted(b) }},
	{"failed", Failed{Stage: StageCwd, Errno: 2, Text: "cwd /nosuch: No such file or directory"}, func(b []byte) (message, error) { return DecodeFailed(b) }},
	{"exited", Exited{Status: -1, UserMicros: 1, SysMicros: 2, MaxResident: 1 << 40}, func(b []byte) (message, error) { return DecodeExited(b) }},
	{"drop", Drop{Numbers: []uint32{4, 9}}, func(b []byte) (message, error) { return DecodeDrop(b) }},
	{"held", Held{Numbers: []uint32{3}}, func(b []byte) (message, error) { return DecodeHeld(b) }},
}

func TestBodies(t *testing.T) {
	for _, d := range decoders {
		b := d.value.Append(nil)
		got, err := d.decode(b)
		if err != nil {
			t.Errorf("%s: %v", d.name, err)
			continue
		}
		if diff := cmp.Diff(d.value, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", d.name, diff)
		}
		if _, err := d.decode(append(b[:len(b):len(b)], 0)); !errors.Is(err, ErrFormat) {
			t.Errorf("%s with an octet more: %v", d.name, err)
		}
		for n := range b {
			if _, err := d.decode(b[:n]); !errors.Is(err, ErrFormat) {
				t.Errorf("%s cut to %d of %d octets: %v", d.name, n, len(b), err)
			}
		}
	}
}

func FuzzDecode(f *testing.F) {
	for i, d := range decoders {
		f.Add(byte(i), d.value.Append(nil))
	}
	f.Fuzz(func(t *testing.T, which byte, b []byte) {
		d := decoders[int(which)%len(decoders)]
		m, err := d.decode(b)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatalf("%s: %v is not ErrFormat", d.name, err)
			}
			return
		}
		again, err := d.decode(m.Append(nil))
		if err != nil {
			t.Fatalf("%s: own octets refused: %v", d.name, err)
		}
		if diff := cmp.Diff(m, again); diff != "" {
			t.Fatalf("%s changed:\n%s", d.name, diff)
		}
	})
}

func pair(t *testing.T) (host, guest *Conn) {
	t.Helper()
	host, fd, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	guest, err = NewGuestConn(fd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close(); guest.Close() })
	return host, guest
}

func TestConnPairsDescriptorsWithFrames(t *testing.T) {
	host, guest := pair(t)
	var files []*os.File
	for _, text := range []string{"one", "two", "three"} {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		w.WriteString(text)
		w.Close()
		files = append(files, r)
	}
	big := bytes.Repeat([]byte("x"), 300<<10)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		host.WriteFrame(Frame{Type: TStart, ID: 1, Body: []byte("a"), FDs: []int{int(files[0].Fd())}})
		host.WriteFrame(Frame{Type: TPing, ID: 2})
		host.WriteFrame(Frame{Type: TStart, ID: 3, Body: big, FDs: []int{int(files[1].Fd()), int(files[2].Fd())}})
		host.Close()
	}()
	want := []struct {
		id   uint64
		body int
		fds  []string
	}{{1, 1, []string{"one"}}, {2, 0, nil}, {3, len(big), []string{"two", "three"}}}
	for _, w := range want {
		f, err := guest.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, fd := range f.FDs {
			b, err := io.ReadAll(os.NewFile(uintptr(fd), ""))
			if err != nil {
				t.Fatal(err)
			}
			texts = append(texts, string(b))
		}
		if f.ID != w.id || len(f.Body) != w.body || !cmp.Equal(texts, w.fds) {
			t.Errorf("frame %d: %d octets, %q; want %d, %d, %q", f.ID, len(f.Body), texts, w.id, w.body, w.fds)
		}
	}
	if _, err := guest.ReadFrame(); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
	<-sent
}

func TestConnRefusesHostileFrames(t *testing.T) {
	for name, raw := range map[string][]byte{
		"length over the bound":   {0, 0, 2, 0, 0x84, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"too many descriptors":    {0, 0, 0, 0, 0x82, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"descriptors not sent":    {0, 0, 0, 0, 0x82, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"end inside of a header":  {0, 0, 0},
		"end inside of a body":    {9, 0, 0, 0, 0x83, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1},
		"nothing but high octets": bytes.Repeat([]byte{0xff}, 64),
	} {
		host, fd, err := Pair()
		if err != nil {
			t.Fatal(err)
		}
		syscall.Write(fd, raw)
		syscall.Close(fd)
		if f, err := host.ReadFrame(); err == nil || err == io.EOF {
			t.Errorf("%s: got %+v, %v", name, f, err)
		}
		host.Close()
	}
}

func TestConnClosesDescriptorsOfBrokenFrames(t *testing.T) {
	host, fd, err := Pair()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	// A header that promises more than comes, with the pipe's write end: once both sides have let go of it, the pipe ends.
	f := Frame{Type: TFailed, FDs: []int{int(w.Fd())}, Body: make([]byte, 9)}
	if err := syscall.Sendmsg(fd, f.AppendHeader(nil), syscall.UnixRights(f.FDs...), nil, 0); err != nil {
		t.Fatal(err)
	}
	w.Close()
	syscall.Close(fd)
	if _, err := host.ReadFrame(); err != io.ErrUnexpectedEOF {
		t.Fatalf("got %v", err)
	}
	if b, err := io.ReadAll(r); err != nil || len(b) != 0 {
		t.Fatalf("pipe: %q, %v", b, err)
	}
}

func FuzzConn(f *testing.F) {
	f.Add((&Frame{Type: TExited, ID: 7, Body: make([]byte, 28)}).AppendHeader(nil))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) > 16<<10 {
			return // more than the socket's buffer would block
		}
		host, fd, err := Pair()
		if err != nil {
			t.Skip(err)
		}
		defer host.Close()
		syscall.Write(fd, raw)
		syscall.Close(fd)
		for {
			f, err := host.ReadFrame()
			if err != nil {
				return
			}
			f.CloseFDs()
		}
	})
}

func TestNames(t *testing.T) {
	for i := range 256 {
		s := Type(i).String()
		if s == "" || strings.HasPrefix(s, "type ") && s == strings.ToUpper(s) {
			t.Errorf("type %d: %q", i, s)
		}
	}
	if got, want := OpFD("move", 3, "/dev"), "move\x003\x00/dev"; got != want {
		t.Errorf("op %q, want %q", got, want)
	}
}
