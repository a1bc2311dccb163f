package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
)

// A sandbox moves as what a save leaves: disk, state and what that fits. On the other host the files lie under the sandbox's ID, and Recover
// takes them as after a restart of the host daemon.

var (
	_ sandbox.Movable  = (*instance)(nil)
	_ sandbox.Receiver = (*Backend)(nil)
)

// needs is what another host must have to go on with a machine.
type needs struct {
	Fits      fits              `json:"fits"`
	CPU       cpuModel          `json:"cpu"`
	Handle    handle            `json:"handle"` // as it is where the machine comes from
	Resources sandbox.Resources `json:"resources"`
	Layers    []string          `json:"layers"`
	Volumes   []sandbox.Volume  `json:"volumes,omitempty"`
}

// cpuModel is what a guest may have learned of the processor, also a translated one: the rate of its clock.
type cpuModel struct {
	Name  string `json:"name"`
	Flags string `json:"flags"`
}

func readCPU() (c cpuModel, err error) {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return c, fmt.Errorf("model of the processor: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		k, v, _ := strings.Cut(line, ":")
		switch v = strings.TrimSpace(v); strings.TrimSpace(k) {
		case "model name":
			c.Name = v
		case "flags":
			c.Flags = v
		case "": // the other processors are alike
			return c, nil
		}
	}
	return c, nil
}

// differs names what is otherwise.
func (c cpuModel) differs(now cpuModel) string {
	if c.Name != now.Name {
		return fmt.Sprintf("its processor is a %q, this host's a %q", c.Name, now.Name)
	}
	lost := slices.DeleteFunc(strings.Fields(c.Flags), func(f string) bool { return slices.Contains(strings.Fields(now.Flags), f) })
	if len(lost) > 0 {
		return fmt.Sprintf("this host's processor lacks %s", strings.Join(lost[:min(len(lost), 8)], " "))
	}
	return ""
}

// Needs implements [sandbox.Movable].
func (x *instance) Needs(context.Context) ([]byte, int64, error) {
	refuse := func(why string) ([]byte, int64, error) {
		return nil, 0, fmt.Errorf("move %s: %s: %w", x.id, why, sandbox.ErrUnsupported)
	}
	f := x.b.driver.Features()
	switch {
	case x.h.Own:
		return refuse("it is a machine of an image of its own, whose firmware and files stay on this host")
	case x.h.Lent != nil:
		return refuse("its network is open, and its address and connections belong to this host")
	case f.Driver != "qemu":
		return refuse("what " + f.Driver + " saves names files of this host")
	case !slices.Contains(x.b.pauseLevels(), sandbox.Saved):
		return refuse(f.Why["pause"])
	}
	cpu, err := readCPU()
	if err != nil {
		return nil, 0, x.said("move", err)
	}
	size, err := x.b.disks.usage(x.name())
	if err != nil {
		return nil, 0, x.said("move", err)
	}
	text, err := json.Marshal(&needs{x.fits(), cpu, x.h, x.spec.Resources, x.spec.Layers, x.spec.Volumes})
	return text, size + x.h.Memory, x.said("move", err)
}

// The files of a moved sandbox.
const (
	movedDisk  = "disk"
	movedState = "state"
	movedFits  = "fits"
)

// movedPath is where a file of a moved sandbox lies.
func (b *Backend) movedPath(id sandbox.ID, name string) (string, error) {
	saved := filepath.Join(b.cfg.StateDir, string(id)+savedSuffix)
	switch name {
	case movedDisk:
		return b.disks.path(string(id)), nil
	case movedState:
		return saved, nil
	case movedFits:
		return saved + ".json", nil
	}
	return "", fmt.Errorf("a moved sandbox has no file %.40q: %w", name, sandbox.ErrInvalid)
}

// Luggage implements [sandbox.Movable].
func (x *instance) Luggage(context.Context) (list []sandbox.MovedFile, err error) {
	if !x.isSaved() {
		return nil, fmt.Errorf("move %s: it is not saved: %w", x.id, sandbox.ErrState)
	}
	for _, f := range [][2]string{{movedDisk, x.b.disks.path(x.name())}, {movedState, x.savedFile()}, {movedFits, x.savedFile() + ".json"}} {
		file, err := os.Open(f[1])
		if err != nil {
			for _, l := range list {
				l.File.Close()
			}
			return nil, x.said("move", err)
		}
		list = append(list, sandbox.MovedFile{Name: f[0], File: file})
	}
	return list, nil
}

func parseNeeds(text []byte) (n needs, err error) {
	if err = json.Unmarshal(text, &n); err != nil {
		return n, fmt.Errorf("what a moved sandbox needs is not of this version: %w: %w", err, sandbox.ErrInvalid)
	}
	return n, nil
}

// Admit implements [sandbox.Receiver].
func (b *Backend) Admit(ctx context.Context, text []byte, size int64) error {
	fail := func(why string, kind error) error { return fmt.Errorf("backend %s: %s: %w", b.cfg.Name, why, kind) }
	n, err := parseNeeds(text)
	if err != nil {
		return err
	}
	cpu, err := readCPU()
	if err != nil {
		return err
	}
	if why := n.Fits.differs(b.fits(n.Resources, n.Handle.Memory)); why != "" {
		return fail(why, sandbox.ErrUnsupported)
	}
	if why := n.CPU.differs(cpu); why != "" {
		return fail(why, sandbox.ErrUnsupported)
	}
	if n.Handle.Own || n.Handle.Lent != nil {
		return fail("it has what can't be moved", sandbox.ErrUnsupported)
	}
	if err := b.hasLayers(ctx, &n); err != nil {
		return fmt.Errorf("backend %s: %w", b.cfg.Name, err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(b.cfg.StateDir, &st); err != nil {
		return fmt.Errorf("free disk of %s: %w", b.cfg.Name, err)
	}
	if free := int64(st.Bavail) * int64(st.Bsize); free < size {
		return fail(fmt.Sprintf("%d MiB of disk free, the sandbox takes up to %d", free>>20, size>>20), sandbox.ErrExhausted)
	}
	return nil
}

// hasLayers opens the layers that a moved machine has as disks.
func (b *Backend) hasLayers(ctx context.Context, n *needs) error {
	image, files, err := b.openImage(ctx, n.Layers)
	if err != nil {
		return fmt.Errorf("its layers: %w", err)
	}
	files.Close()
	b.flat.release(image)
	if string(image) != n.Handle.Layer {
		return fmt.Errorf("its layers are image %s here, it has %s: %w", image, n.Handle.Layer, sandbox.ErrUnsupported)
	}
	for _, v := range n.Volumes {
		files, err := b.layers.Files(ctx, layer.ID(v.Layer))
		if err != nil {
			return fmt.Errorf("its volume at %s: %w", v.Path, err)
		}
		files.Close()
	}
	return nil
}

// Unpack implements [sandbox.Receiver].
func (b *Backend) Unpack(_ context.Context, id sandbox.ID, name string) (*os.File, error) {
	at, err := b.movedPath(id, name)
	if err != nil {
		return nil, err
	}
	return os.OpenFile(at, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
}

// Keep implements [sandbox.Receiver].
func (b *Backend) Keep(_ context.Context, id sandbox.ID) error {
	var list []string
	for _, name := range []string{movedDisk, movedState, movedFits} {
		at, err := b.movedPath(id, name)
		if err != nil {
			return err
		}
		list = append(list, at)
	}
	for _, at := range append(list, b.cfg.StateDir) {
		f, err := os.Open(at)
		if err == nil {
			err = errors.Join(f.Sync(), f.Close())
		}
		if err != nil {
			return fmt.Errorf("keep what arrived of %s: %w", id, err)
		}
	}
	return nil
}

// Claim implements [sandbox.Receiver].
func (b *Backend) Claim(_ context.Context, id sandbox.ID, text []byte) ([]byte, error) {
	n, err := parseNeeds(text)
	if err != nil {
		return nil, err
	}
	h := n.Handle
	if h.Inside == "" {
		h.Inside = id
	}
	h.Machine, h.Version = "", handleVersion
	if h.Slot, err = b.slots.takeOnce(id); err != nil {
		return nil, err
	}
	if err := h.check(b.cfg.Slots); err != nil {
		b.slots.release(h.Slot, id)
		return nil, err
	}
	return json.Marshal(h)
}

// takeOnce is take for one that may have taken before.
func (s *slots) takeOnce(id sandbox.ID) (int, error) {
	s.mu.Lock()
	for k, of := range s.used {
		if of == id {
			s.mu.Unlock()
			return k, nil
		}
	}
	s.mu.Unlock()
	return s.take(id)
}

// Discard implements [sandbox.Receiver].
func (b *Backend) Discard(_ context.Context, id sandbox.ID) error {
	var errs []error
	for _, name := range []string{movedFits, movedState, movedDisk} {
		at, err := b.movedPath(id, name)
		if err == nil {
			err = os.Remove(at)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("discard what arrived of %s: %w", id, err))
		}
	}
	if slot, err := b.slots.takeOnce(id); err == nil {
		b.slots.release(slot, id)
	}
	return errors.Join(errs...)
}
