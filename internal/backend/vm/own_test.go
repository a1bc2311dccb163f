package vm_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dsec-dev/dsec/internal/backend/vm"
	"github.com/dsec-dev/dsec/internal/backend/vm/vmtest"
	"github.com/dsec-dev/dsec/internal/display"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/sandbox/sandboxtest"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// bootSector is a program that a BIOS starts. On the screen and the serial port it says "hello" and how often this disk was booted, which it
// counts in the disk's second sector (E: that failed); then each key that it gets. w fills the disk until a write fails, which is F; p turns the machine off.
func bootSector() []byte {
	var c []byte
	labels, jumps := map[string]int{}, map[int]string{}
	put := func(b ...byte) { c = append(c, b...) }
	at := func(name string) { labels[name] = len(c) }
	to := func(op byte, name string) { put(op, 0); jumps[len(c)-1] = name } // short
	call := func(name string) { put(0xE8, 0, 0); jumps[-(len(c) - 2)] = name }

	put(0xFA, 0x31, 0xC0, 0x8E, 0xD8, 0x8E, 0xC0, 0x8E, 0xD0, 0xBC, 0x00, 0x7C, 0xFB) // cli; ds = es = ss = 0; sp = 7C00; sti
	put(0x88, 0x16, 0x00, 0x7B)                                                       // [7B00] = dl, the drive
	for _, r := range "hello " {
		put(0xB0, byte(r)) // al = r
		call("print")
	}
	transfer := func(ah byte) { // of sector 2 to or from 7E00
		put(0xB8, 0x01, ah, 0xBB, 0x00, 0x7E, 0xB9, 0x02, 0x00, 0xB6, 0x00, 0x8A, 0x16, 0x00, 0x7B, 0xCD, 0x13)
		to(0x72, "failed") // jc
	}
	transfer(2)
	put(0xFE, 0x06, 0x00, 0x7E) // inc byte [7E00]
	transfer(3)
	put(0xA0, 0x00, 0x7E, 0x04, '0') // al = [7E00] + '0'
	to(0xEB, "said")
	at("failed")
	put(0xB0, 'E')
	at("said")
	call("print")
	put(0xB0, '\n')
	call("print")
	at("key")
	put(0x31, 0xC0, 0xCD, 0x16) // ah = 0: wait for a key
	call("print")
	put(0x3C, 'p')
	to(0x74, "off")
	put(0x3C, 'w')
	to(0x75, "key")
	at("fill")                                                                  // a sector in each cluster of 64 KiB, by its number
	put(0x81, 0x06, 0x48, 0x7B, 0x80, 0x00)                                     // add word [7B48], 128
	put(0x83, 0x16, 0x4A, 0x7B, 0x00)                                           // adc word [7B4A], 0
	put(0xC7, 0x06, 0x40, 0x7B, 0x10, 0x00, 0xC7, 0x06, 0x42, 0x7B, 0x01, 0x00) // size, one sector
	put(0xC7, 0x06, 0x44, 0x7B, 0x00, 0x7E, 0xC7, 0x06, 0x46, 0x7B, 0x00, 0x00) // from 0:7E00
	put(0xBE, 0x40, 0x7B, 0xB8, 0x00, 0x43, 0x8A, 0x16, 0x00, 0x7B, 0xCD, 0x13) // si = it; extended write
	to(0x73, "fill")                                                            // jnc
	put(0xB0, 'F')
	call("print")
	to(0xEB, "key")
	at("off")
	put(0xBA, 0x04, 0x06, 0xB8, 0x00, 0x20, 0xEF) // out 0x604, 0x2000: ACPI's off
	to(0xEB, "key")
	at("print")
	put(0x50, 0xBA, 0xF8, 0x03, 0xEE, 0xB4, 0x0E, 0x31, 0xDB, 0xCD, 0x10, 0x58, 0xC3) // push ax; out 3F8, al; teletype; pop ax; ret
	for where, name := range jumps {
		if where < 0 {
			binary.LittleEndian.PutUint16(c[-where:], uint16(labels[name]-(-where+2)))
			continue
		}
		d := labels[name] - (where + 1)
		if d < -128 || d > 127 {
			panic("a jump too far: " + name)
		}
		c[where] = byte(int8(d))
	}
	if len(c) > 510 {
		panic("a program too long")
	}
	return append(append(c, make([]byte, 510-len(c))...), 0x55, 0xAA)
}

// bootableISO is a CD with the program, which El Torito starts without an emulated disk.
func bootableISO() []byte {
	const sector = 2048
	iso := make([]byte, 24*sector)
	volume := func(n int, kind byte) []byte {
		v := iso[n*sector:]
		v[0], v[6] = kind, 1
		copy(v[1:], "CD001")
		return v
	}
	volume(16, 1)
	v := volume(17, 0)
	copy(v[7:], "EL TORITO SPECIFICATION")
	binary.LittleEndian.PutUint32(v[71:], 19)
	volume(18, 255)
	catalog := iso[19*sector:]
	catalog[0], catalog[30], catalog[31] = 1, 0x55, 0xAA
	sum := uint16(0)
	for i := 0; i < 32; i += 2 {
		sum += binary.LittleEndian.Uint16(catalog[i:])
	}
	binary.LittleEndian.PutUint16(catalog[28:], -sum)
	catalog[32] = 0x88
	binary.LittleEndian.PutUint16(catalog[38:], 4) // sectors of 512
	binary.LittleEndian.PutUint32(catalog[40:], 20)
	copy(iso[20*sector:], bootSector())
	return iso
}

// image makes a layer of files.
func image(t *testing.T, e *vmtest.Env, files map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
		if name == "disk.img" { // a disk that has more than the sandbox may write
			if err := os.Truncate(filepath.Join(dir, name), 256<<20); err != nil {
				t.Fatal(err)
			}
		}
	}
	d, err := e.Catalogue.ImportDir(t.Context(), "default", dir, layer.Options{Source: "image"})
	if err != nil {
		t.Fatal(err)
	}
	return string(d.ID)
}

// machineOf is a sandbox of an image, with its console.
type machineOf struct {
	sandbox.Instance
	id   sandbox.ID
	spec *sandbox.Spec
	sink *nobody
}

func boot(t *testing.T, e *vmtest.Env, layers ...string) *machineOf {
	t.Helper()
	m := &machineOf{id: sandbox.NewID("htests"), spec: small(e), sink: &nobody{}}
	m.spec.Backend, m.spec.Layers, m.spec.Resources.Disk = "vm", layers, 4<<20
	x, err := e.Backend.Create(within(t), m.id, m.spec, m.sink)
	if err != nil {
		t.Fatal(err)
	}
	m.Instance = x
	t.Cleanup(func() {
		if err := m.Destroy(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return m
}

func (m *machineOf) text(t *testing.T) string {
	t.Helper()
	b, err := m.Instance.(sandbox.Consoled).Console(within(t))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// says waits until the console ends so.
func (m *machineOf) says(t *testing.T, end string) {
	t.Helper()
	sandboxtest.Eventually(t, func() bool { return strings.HasSuffix(m.text(t), end) }, func() string { return "the console says " + m.text(t) + ", want it to end with " + end })
}

func (m *machineOf) screen(t *testing.T) *display.Screen {
	t.Helper()
	c, err := m.Instance.(sandbox.Screened).VNC(within(t))
	if err != nil {
		t.Fatal(err)
	}
	s, err := display.Open(within(t), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func (m *machineOf) key(t *testing.T, k string) {
	t.Helper()
	if err := m.screen(t).Keys(within(t), k); err != nil {
		t.Fatal(err)
	}
}

// An image of the user's own boots from its layer, which stays as it was: what the machine writes goes to a disk of its own, up to the limit. It
// is paused at both levels, and a snapshot of its disk is a layer that others start from. What would need a guest of ours is refused with the reason.
func TestImageOfTheUsersOwn(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) { c.Name, c.Rates = "vm", vmm.Rates{Disk: 64 << 20, DiskOps: 1000} })
	disk := image(t, e, map[string][]byte{vm.OwnFile: []byte("disk = \"disk.img\"\n"), "disk.img": bootSector()})
	m := boot(t, e, disk)
	m.says(t, "hello 1\n")
	for what, err := range map[string]error{
		"command": m.Start(within(t), command("c", "true")),
		"session": m.OpenSession(within(t), &sandbox.Session{Name: "s"}),
		"files":   second(m.Files(within(t), "root")),
		"port":    second(m.Dial(within(t), 80)),
	} {
		if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), "without a guest of ours") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if known, err := m.Known(within(t), "c"); known || err != nil {
		t.Errorf("a command that was refused: %v, %v; want that it is not known", known, err)
	}
	m.key(t, "a")
	m.says(t, "hello 1\na")
	if err := m.screen(t).Screenshot(within(t), &bytes.Buffer{}); err != nil {
		t.Error(err)
	}
	for _, level := range []sandbox.PauseLevel{sandbox.Frozen, sandbox.Saved} {
		if err := m.Pause(within(t), level); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Instance.(sandbox.Screened).VNC(within(t)); !errors.Is(err, sandbox.ErrState) {
			t.Errorf("screen of one that is %s: %v", level, err)
		}
		if got := m.text(t); !strings.HasSuffix(got, "hello 1\na") {
			t.Errorf("console of one that is %s: %q", level, got)
		}
		if _, err := m.Stats(within(t)); err != nil {
			t.Errorf("stats of one that is %s: %v", level, err)
		}
	}
	snap, err := m.Snapshot(within(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Resume(within(t)); err != nil {
		t.Fatal(err)
	}
	m.key(t, "b")
	sandboxtest.Eventually(t, func() bool { return strings.HasSuffix(m.text(t), "b") }, func() string { return "after a saved pause the console says " + m.text(t) })
	next := boot(t, e, disk, snap)
	next.says(t, "hello 2\n")
	next.key(t, "w")
	next.says(t, "hello 2\nwF")
	if st, err := next.Stats(within(t)); err != nil || st.Disk > 4<<20 || st.Memory == 0 {
		t.Errorf("%+v, %v; want at most the limit", st, err)
	}
	cd := boot(t, e, image(t, e, map[string][]byte{vm.OwnFile: []byte("cdrom = \"cd.iso\"\nbus = \"nvme\"\n"), "cd.iso": bootableISO()}))
	cd.says(t, "hello E\n")
	for _, x := range []*machineOf{cd, next} {
		if err := x.Destroy(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	again := e.Restart(t) // the host's daemon comes back and finds it
	taken, err := again.Recover(within(t), m.id, m.spec, m.Handle(), m.sink)
	if err != nil {
		t.Fatal(err)
	}
	m.Instance = taken
	m.key(t, "p")
	sandboxtest.Eventually(t, func() bool { return m.sink.end() != nil }, func() string { return "no end was told" })
	if err := m.Destroy(within(t)); err != nil {
		t.Fatal(err)
	}
	if left := e.Left(t); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if c := m.sink.end(); c.Class != sandbox.ClassTask || c.Reason != "powered_off" || !strings.Contains(c.Detail, "hello 1") {
		t.Errorf("%+v", c)
	}
}

// A host that ends in the middle of a snapshot leaves a machine that stands still, which the next one lets go on, and a copy, which it removes.
func TestSnapshotBrokenOff(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) { c.Name = "vm" })
	m := boot(t, e, image(t, e, map[string][]byte{vm.OwnFile: []byte("disk = \"disk.img\"\n"), "disk.img": bootSector()}))
	m.says(t, "hello 1\n")
	if err := m.Pause(within(t), sandbox.Frozen); err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(e.Config.StateDir, "snapshot-1")
	note := filepath.Join(e.Config.RunDir, string(m.id), "copying")
	if err := errors.Join(os.WriteFile(note, nil, 0o600), os.Mkdir(left, 0o700), os.WriteFile(filepath.Join(left, "changes-1.qcow2"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	again := e.Restart(t)
	taken, err := again.Recover(within(t), m.id, m.spec, m.Handle(), m.sink)
	if err != nil {
		t.Fatal(err)
	}
	m.Instance = taken
	if err := again.Sweep(within(t), map[sandbox.ID]bool{m.id: true}); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{left, note} {
		if _, err := os.Stat(f); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is there: %v", f, err)
		}
	}
	m.key(t, "a")
	m.says(t, "hello 1\na")
	if _, err := m.Snapshot(within(t)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(note); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after a snapshot its note is there: %v", err)
	}
}

// With UEFI the machine has OVMF and variables of its own, which says on the console that the CD is none of its kind.
func TestImageWithUEFI(t *testing.T) {
	if os.Getenv("DSEC_TORTURE") == "" {
		t.Skip("skip: long; make torture")
	}
	if _, err := os.Stat("/usr/share/OVMF"); err != nil {
		t.Skip("skip: needs OVMF (package ovmf)")
	}
	e := vmtest.New(t, func(c *vm.Config) { c.Name = "vm" })
	m := boot(t, e, image(t, e, map[string][]byte{vm.OwnFile: []byte("disk = \"disk.img\"\nbus = \"virtio\"\nfirmware = \"uefi\"\n"), "disk.img": bootSector()}))
	sandboxtest.Eventually(t, func() bool { return strings.Contains(m.text(t), "BdsDxe: ") }, func() string { return "the console says " + m.text(t) })
}

// An environment is the image of a machine only where it says so; what it says is checked, and what such a machine can't have is refused before
// anything starts.
func TestOwnFile(t *testing.T) {
	for text, want := range map[string]string{
		`disk = "d.img"`:    "",
		`cdrom = "a/b.iso"`: "",
		`disk = "d"` + "\nchanges = [\"c.qcow2\"]\n": "",
		``:                     "neither disk nor cdrom",
		`disk = "/etc/shadow"`: "path in the layer",
		`disk = "../d"`:        "path in the layer",
		`disk = "d"` + "\nchanges = [\"../../c\"]\n": "path in the layer",
		`disk = "d"` + "\nfirmware = \"coreboot\"\n": "firmware",
		`disk = "d"` + "\nbus = \"scsi\"\n":          "bus",
		`disk = "d"` + "\nclock = \"moon\"\n":        "clock",
		`disk = "d"` + "\nargs = \"-cpu host\"\n":    "unknown setting",
		`disk = `: vm.OwnFile,
		`disk = "d"` + "\nchanges = [" + strings.Repeat(`"c",`, 40) + "]\n": "snapshots over each other",
	} {
		m, err := vm.ParseOwnImage([]byte(text))
		if want == "" && (err != nil || m.Bus != "ahci" || m.Firmware != "bios" || m.Clock != "utc") {
			t.Errorf("%q: %+v, %v", text, m, err)
		}
		if want != "" && (!errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want ErrInvalid with %q", text, err, want)
		}
	}
}

func TestImageThatIsRefused(t *testing.T) {
	e := vmtest.New(t, func(c *vm.Config) { c.Name = "vm" })
	own := []byte("disk = \"disk.qcow2\"\n")
	backed := append([]byte("QFI\xfb\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x02\x00"), make([]byte, 100)...)
	broken := append([]byte("QFI\xfb\x00\x00\x00\x03"), make([]byte, 100)...) // with clusters of one octet
	broken[30], broken[103] = 1, 104
	good := image(t, e, map[string][]byte{vm.OwnFile: own, "disk.qcow2": bootSector()})
	for what, x := range map[string]struct {
		layer  string
		change func(*sandbox.Spec)
		want   error
		text   string
	}{
		"no file":      {image(t, e, map[string][]byte{vm.OwnFile: own}), nil, sandbox.ErrInvalid, "disk.qcow2"},
		"by QEMU":      {image(t, e, map[string][]byte{vm.OwnFile: own, "disk.qcow2": broken}), nil, sandbox.ErrInvalid, "cluster size"},
		"other files":  {image(t, e, map[string][]byte{vm.OwnFile: own, "disk.qcow2": backed}), nil, sandbox.ErrInvalid, "backing file"},
		"wrong":        {image(t, e, map[string][]byte{vm.OwnFile: []byte("disk = 3")}), nil, sandbox.ErrInvalid, vm.OwnFile},
		"volumes":      {good, func(s *sandbox.Spec) { s.Volumes = []sandbox.Volume{{Path: "/v", Layer: e.Layer}} }, sandbox.ErrUnsupported, "volumes"},
		"entrypoint":   {good, func(s *sandbox.Spec) { s.Entry = []string{"sh"} }, sandbox.ErrUnsupported, "entrypoint"},
		"a small disk": {good, func(s *sandbox.Spec) { s.Resources.Disk = 256 << 10 }, sandbox.ErrInvalid, "disk limit"},
	} {
		s := small(e)
		s.Backend, s.Layers = "vm", []string{x.layer}
		if x.change != nil {
			x.change(s)
		}
		if _, err := e.Backend.Create(within(t), sandbox.NewID("htests"), s, &nobody{}); !errors.Is(err, x.want) || !strings.Contains(err.Error(), x.text) || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want %v with %q", what, err, x.want, x.text)
		}
		if left := e.Left(t); len(left) > 0 {
			t.Errorf("%s: left: %v", what, left)
		}
	}
}

func second[T any](_ T, err error) error { return err }
