package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/pelletier/go-toml/v2"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/keeper"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/layer/erofs"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// A machine of the user's own image boots that, with no guest of ours inside: it has a screen, a console, pause and snapshots of its disk, and
// nothing else. Its environment is a layer that holds the image and OwnFile, which says what it is; a snapshot is a layer over it with what was
// changed. The image is read from the layer's own file system, so nothing of it is copied.

// OwnFile marks an environment as the image of a machine.
const OwnFile = ".dsec-machine.toml"

const (
	maxOwnFile = 64 << 10
	maxChanges = 32 // snapshots over each other
	changesFor = "changes-%d.qcow2"
	// copyingFile in the machine's folder says that it stands still for a snapshot, not for who paused it.
	copyingFile = "copying"
)

// OwnImage is what OwnFile says. Files are names in the environment's layers.
type OwnImage struct {
	Disk     string   `toml:"disk,omitempty"`     // raw or qcow2; empty: a blank one of the sandbox's limit
	Changes  []string `toml:"changes,omitempty"`  // qcow2, over it, lowest first: snapshots
	CDROM    string   `toml:"cdrom,omitempty"`    // ISO
	Firmware string   `toml:"firmware,omitempty"` // bios or uefi
	Bus      string   `toml:"bus,omitempty"`      // ahci, virtio or nvme
	Clock    string   `toml:"clock,omitempty"`    // utc or local
}

// ParseOwnImage reads OwnFile. Errors: ErrInvalid, naming what is wrong.
func ParseOwnImage(text []byte) (*OwnImage, error) {
	m := &OwnImage{Firmware: "bios", Bus: "ahci", Clock: "utc"}
	dec := toml.NewDecoder(strings.NewReader(string(text)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(m); err != nil {
		if strict := (*toml.StrictMissingError)(nil); errors.As(err, &strict) {
			return nil, fmt.Errorf("%s: unknown setting\n%s: %w", OwnFile, strict.String(), sandbox.ErrInvalid)
		}
		return nil, fmt.Errorf("%s: %w: %w", OwnFile, err, sandbox.ErrInvalid)
	}
	bad := func(format string, a ...any) (*OwnImage, error) {
		return nil, fmt.Errorf("%s: "+format+": %w", append(append([]any{OwnFile}, a...), sandbox.ErrInvalid)...)
	}
	for _, f := range append([]string{m.Disk, m.CDROM}, m.Changes...) {
		if f != "" && !fs.ValidPath(f) {
			return bad("file %.80q: want a path in the layer, without a slash at its begin", f)
		}
	}
	switch {
	case m.Disk == "" && m.CDROM == "":
		return bad("names neither disk nor cdrom")
	case len(m.Changes) > maxChanges:
		return bad("%d snapshots over each other: at most %d", len(m.Changes), maxChanges)
	case m.Firmware != "bios" && m.Firmware != "uefi":
		return bad("firmware %.20q: want bios or uefi", m.Firmware)
	case m.Bus != "ahci" && m.Bus != "virtio" && m.Bus != "nvme":
		return bad("bus %.20q: want ahci, virtio or nvme", m.Bus)
	case m.Clock != "utc" && m.Clock != "local":
		return bad("clock %.20q: want utc or local", m.Clock)
	}
	return m, nil
}

// marks remembers layers that are not the image of a machine: what a layer holds never changes.
type marks struct {
	mu   sync.Mutex
	none map[string]bool
}

const maxMarks = 4096

func (m *marks) may(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.none[id]
}

func (m *marks) not(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.none == nil || len(m.none) >= maxMarks {
		m.none = map[string]bool{}
	}
	m.none[id] = true
}

// ownLayers are the file systems of an environment's layers, the top one first.
type ownLayers []*os.File

func (l ownLayers) close() { closeAll(l) }

// open opens an ordinary file of the topmost layer that has it. No link is followed.
func (l ownLayers) open(name string) (*os.File, error) {
	how := &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS}
	for _, dir := range l {
		fd, err := unix.Openat2(int(dir.Fd()), name, how)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%.80q in the image's layer: %w: %w", name, err, sandbox.ErrInvalid)
		}
		f := os.NewFile(uintptr(fd), name)
		if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
			f.Close()
			return nil, fmt.Errorf("%.80q in the image's layer: is no file: %w", name, errors.Join(err, sandbox.ErrInvalid))
		}
		return f, nil
	}
	return nil, fmt.Errorf("%.80q is in none of the image's layers: %w: %w", name, fs.ErrNotExist, sandbox.ErrInvalid)
}

// openOwn opens the layers of an environment that is a machine's image; nil where it is none. Whether a layer has the mark is remembered.
func (b *Backend) openOwn(ctx context.Context, layers []string) (*OwnImage, ownLayers, error) {
	if len(layers) == 0 || !b.owns.may(layers[len(layers)-1]) {
		return nil, nil, nil
	}
	var list ownLayers
	mount := func(id string) error {
		f, err := b.layers.Files(ctx, layer.ID(id))
		if err != nil {
			return err
		}
		defer f.Close()
		dir, err := keeper.MountLayer(f.Meta, f.Data, f.Direct)
		if err == nil {
			list = append(list, dir)
		}
		return err
	}
	top := layers[len(layers)-1]
	if err := mount(top); errors.Is(err, unix.ENODEV) { // this kernel has no EROFS, which a guest mounts by its own
		return nil, nil, b.unmarked(ctx, top)
	} else if err != nil {
		return nil, nil, err
	}
	f, err := list.open(OwnFile)
	if errors.Is(err, fs.ErrNotExist) {
		list.close()
		b.owns.not(top)
		return nil, nil, nil
	}
	var text []byte
	if err == nil {
		text, err = io.ReadAll(io.LimitReader(f, maxOwnFile))
		f.Close()
	}
	var m *OwnImage
	if err == nil {
		m, err = ParseOwnImage(text)
	}
	for i := len(layers) - 2; i >= 0 && err == nil; i-- {
		err = mount(layers[i])
	}
	if err != nil {
		list.close()
		return nil, nil, err
	}
	return m, list, nil
}

// unmarked says, without a mount, that a layer is not the image of a machine: the files of one could not be opened here.
func (b *Backend) unmarked(ctx context.Context, id string) error {
	f, err := b.layers.Files(ctx, layer.ID(id))
	if err != nil {
		return err
	}
	defer f.Close()
	im, err := erofs.Open(f.Meta, nil) // names alone are read
	if err != nil {
		return fmt.Errorf("layer %s: %w", id, err)
	}
	if im.Root.Children[OwnFile] != nil {
		return fmt.Errorf("the environment is the image of a machine (%s), whose files are read through EROFS, and the host's kernel has none: %w", OwnFile, sandbox.ErrUnsupported)
	}
	b.owns.not(id)
	return nil
}

// open opens the files of the image, for the machine.
func (m *OwnImage) open(l ownLayers) (_ *vmm.Image, err error) {
	im := &vmm.Image{Bus: m.Bus, LocalClock: m.Clock == "local"}
	defer func() {
		if err != nil {
			im.Close()
		}
	}()
	names := m.Changes
	if m.Disk != "" {
		names = append([]string{m.Disk}, names...)
	}
	for i, name := range names {
		f, err := l.open(name)
		if err != nil {
			return nil, err
		}
		im.Below = append(im.Below, f)
		size, qcow, err := vmm.ImageSize(f)
		if err == nil && i > 0 && !qcow {
			err = fmt.Errorf("is no qcow2: %w", sandbox.ErrInvalid)
		}
		if err != nil {
			return nil, fmt.Errorf("%.80q in the image's layer: %w", name, err)
		}
		if i == 0 {
			im.Raw = !qcow
		}
		im.Size = size
	}
	if m.CDROM != "" {
		if im.CDROM, err = l.open(m.CDROM); err != nil {
			return nil, err
		}
	}
	return im, nil
}

// firmwareFiles are where Debian and others have OVMF: the code and the variables of a new machine.
var firmwareFiles = [][2]string{{"/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"}, {"/usr/share/OVMF/OVMF_CODE.fd", "/usr/share/OVMF/OVMF_VARS.fd"},
	{"/usr/share/edk2/x64/OVMF_CODE.4m.fd", "/usr/share/edk2/x64/OVMF_VARS.4m.fd"}}

const varsFile = "uefi-variables"

// addFirmware gives the machine UEFI with variables of its own, which live as long as its folder.
func addFirmware(im *vmm.Image, dir string) error {
	for _, pair := range firmwareFiles {
		code, err := os.Open(pair[0])
		if err != nil {
			continue
		}
		im.Code = code
		at := filepath.Join(dir, varsFile)
		if _, err := os.Stat(at); errors.Is(err, fs.ErrNotExist) {
			text, err := os.ReadFile(pair[1])
			if err == nil {
				err = os.WriteFile(at, text, 0o600)
			}
			if err != nil {
				return fmt.Errorf("variables of UEFI: %w", err)
			}
		}
		im.Vars, err = os.OpenFile(at, os.O_RDWR, 0)
		return err
	}
	return fmt.Errorf("firmware uefi: this host has none (package ovmf): %w", sandbox.ErrUnsupported)
}

// noGuest is said of everything that a guest of ours would do.
func (x *instance) noGuest(act string) error {
	return fmt.Errorf("%s in %s: it is a machine of an image of its own, without a guest of ours: it has screen, console, pause and snapshots alone: %w", act, x.id, sandbox.ErrUnsupported)
}

// checkOwn refuses what such a machine can't be given.
func (x *instance) checkOwn() error {
	s := x.spec
	for what, given := range map[string]bool{
		"network " + string(s.Network) + ": nothing in it knows its address": s.Network != sandbox.NetworkNone,
		"volumes":    len(s.Volumes) > 0,
		"entrypoint": len(s.Entry) > 0,
		"backend " + x.b.cfg.Name + ": it boots on vm": x.b.cfg.Name != "vm",
	} {
		if given {
			return fmt.Errorf("the environment is the image of a machine (%s), which has no %s: %w", OwnFile, what, sandbox.ErrUnsupported)
		}
	}
	return nil
}

// makeOwn makes a machine of the user's image. What it opens it closes.
func (x *instance) makeOwn(ctx context.Context, m *OwnImage, l ownLayers) (err error) {
	b := x.b
	defer l.close()
	if err := x.checkOwn(); err != nil {
		return err
	}
	if err := b.call(ctx); err != nil {
		return err
	}
	if x.h.Slot, err = b.slots.take(x.id); err != nil {
		return err
	}
	x.undo.push("release uid slot", func(context.Context) error { b.slots.release(x.h.Slot, x.id); return nil })
	x.h.Version, x.h.Own, x.h.Layer = handleVersion, true, x.spec.Layers[len(x.spec.Layers)-1]
	b.flat.hold(layer.ID(x.h.Layer))
	x.undo.push("release the image", func(context.Context) error { b.flat.release(layer.ID(x.h.Layer)); return nil })
	x.h.Disk, x.h.Memory = x.spec.Resources.Disk, max(64<<20, x.spec.Resources.Memory>>21<<21)
	x.undo.push("remove the disk", func(context.Context) error { return b.disks.remove(x.name()) })
	x.undo.push("remove the saved state", func(context.Context) error { return x.dropSaved() })
	im, err := m.open(l)
	if err != nil {
		return err
	}
	top, err := b.disks.overlay(x.name(), im.Size, x.h.Disk)
	if err != nil {
		im.Close()
		return err
	}
	im.Top = top
	if err := x.makeFolder(); err != nil {
		im.Close()
		return err
	}
	s, err := x.ownMachine(m, im)
	if err != nil {
		return err
	}
	defer im.Close()
	x.undo.push("remove what it saves", func(context.Context) error { return os.RemoveAll(s.Store) })
	if total := x.spec.Lifetime.Total; total > 0 {
		x.deadline = time.Now().Add(total)
		s.Deadline = x.deadline
	}
	x.undo.push("end the machine", x.endMachine)
	if x.vm, err = b.driver.Create(ctx, s); err != nil {
		return err
	}
	x.handle, err = json.Marshal(x.h)
	return err
}

// ownMachine is the machine, the same each time. The image's files become its; they are closed on an error.
func (x *instance) ownMachine(m *OwnImage, im *vmm.Image) (*vmm.Spec, error) {
	b := x.b
	im.Limit = x.h.Disk
	if m.Firmware == "uefi" {
		if err := addFirmware(im, x.dir()); err != nil {
			im.Close()
			return nil, err
		}
	}
	s := x.monitorSpec()
	s.Image, s.Display, s.CPUs = im, b.hasScreen(), b.processors(x.spec.Resources)
	return s, nil
}

// ownAgain is ownMachine for a saved one.
func (x *instance) ownAgain(ctx context.Context) (*vmm.Spec, error) {
	m, l, err := x.b.openOwn(ctx, x.spec.Layers)
	if err != nil {
		return nil, err
	}
	defer l.close()
	if m == nil {
		return nil, fmt.Errorf("its layer is the image of no machine: %w", sandbox.ErrLost)
	}
	im, err := m.open(l)
	if err != nil {
		return nil, err
	}
	if im.Top, err = x.b.disks.open(x.name()); err != nil {
		im.Close()
		return nil, err
	}
	return x.ownMachine(m, im)
}

// freezeOwn stops the machine.
func (x *instance) freezeOwn(ctx context.Context) error {
	if !x.isLiving() {
		return fmt.Errorf("it has ended: %w", sandbox.ErrState)
	}
	if err := x.vm.Pause(ctx); err != nil {
		return err
	}
	x.setFrozen(true)
	return x.armWarden(ctx, 0)
}

// watchOwn tells when the machine ends by itself: nothing else is heard of it.
func (x *instance) watchOwn(ctx context.Context) {
	for ctx.Err() == nil {
		x.mu.Lock()
		changed, frozen, s := x.changed, x.frozen, x.state
		x.mu.Unlock()
		if s == dead || s == destroyed {
			return
		}
		var over <-chan struct{}
		if !frozen {
			over = x.vm.Over()
		}
		select {
		case <-changed:
		case <-over:
			if x.machineOver(ctx) {
				return
			}
			select {
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
		case <-ctx.Done():
		}
	}
}

// ownEnd is the cause of a machine's end that its own system made.
func ownEnd(status, console string) sandbox.Cause {
	switch strings.TrimPrefix(status, "ended: ") {
	case "shutdown":
		return sandbox.Cause{Class: sandbox.ClassTask, Reason: "powered_off", Detail: console}
	case "guest-panicked":
		return sandbox.Cause{Class: sandbox.ClassTask, Reason: "guest_panicked", Detail: console}
	}
	return sandbox.Cause{Class: sandbox.ClassPlatform, Reason: "guest_ended", Detail: "the machine " + status + ": " + console}
}

// ownSnapshot captures what the machine has changed of its disk. It stands still meanwhile; a system that runs finds the disk as after a power cut,
// so let it sync, or shut down, before.
func (x *instance) ownSnapshot(ctx context.Context) (_ string, err error) {
	m, l, err := x.b.openOwn(ctx, x.spec.Layers)
	if err != nil {
		return "", err
	}
	defer l.close()
	if m == nil {
		return "", fmt.Errorf("its layer is the image of no machine: %w", sandbox.ErrLost)
	}
	if len(m.Changes) >= maxChanges {
		return "", fmt.Errorf("%d snapshots lie over each other already: %w", len(m.Changes), sandbox.ErrExhausted)
	}
	dir, err := os.MkdirTemp(x.b.cfg.StateDir, snapshotFolder)
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	name := fmt.Sprintf(changesFor, len(m.Changes)+1)
	if err := x.copyChanges(ctx, filepath.Join(dir, name)); err != nil {
		return "", err
	}
	m.Changes = append(m.Changes, name)
	text, err := toml.Marshal(m)
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, OwnFile), text, 0o644); err != nil {
		return "", err
	}
	opt := layer.Options{Source: "snapshot of " + string(x.id)}
	for _, p := range x.spec.Layers {
		opt.Parents = append(opt.Parents, layer.ID(p))
	}
	d, err := x.b.layers.ImportUpper(ctx, x.spec.Project, dir, opt)
	if err != nil {
		return "", err
	}
	return string(d.ID), nil
}

func (x *instance) copying() string { return filepath.Join(x.dir(), copyingFile) }

// endCopying lets a machine go on that the last host stopped for a snapshot, and says whether it did.
func (x *instance) endCopying(ctx context.Context) (bool, error) {
	if _, err := os.Stat(x.copying()); err != nil {
		return false, nil
	}
	if err := x.vm.Resume(ctx); err != nil {
		return false, err
	}
	return true, os.Remove(x.copying())
}

// copyChanges copies the disk's changes while the machine stands still: QEMU has then written what it holds.
func (x *instance) copyChanges(ctx context.Context, to string) (err error) {
	if !x.isFrozen() {
		if err := os.WriteFile(x.copying(), nil, 0o600); err != nil {
			return err
		}
		if err := x.vm.Pause(ctx); err != nil {
			return errors.Join(err, os.Remove(x.copying()))
		}
		defer func() { err = errors.Join(err, x.vm.Resume(context.WithoutCancel(ctx)), os.Remove(x.copying())) }()
	}
	from, err := x.b.disks.open(x.name())
	if err != nil {
		return err
	}
	defer from.Close()
	f, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(copySparse(f, from), f.Close())
}
