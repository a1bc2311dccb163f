package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// A saved sandbox is two files beside its disk: the machine's state with its memory, and what it fits. No monitor lives meanwhile.

const (
	savedSuffix = ".saved"
	saveBound   = 5 * time.Minute
)

// fits is what must be the same for a saved state to be loaded.
type fits struct {
	Driver  string `json:"driver"`
	Version string `json:"version"`
	Accel   string `json:"accelerator"`
	Machine string `json:"machine"`
	Kernel  string `json:"kernel"` // hash of the guests' kernel and initramfs
	Host    string `json:"host"`   // the host's kernel
	CPUs    int    `json:"cpus"`
	Memory  int64  `json:"memory"`
}

func (x *instance) fits() fits { return x.b.fits(x.spec.Resources, x.h.Memory) }

// fits is what a machine for these resources, with that memory in octets, is saved with here.
func (b *Backend) fits(r sandbox.Resources, memory int64) fits {
	f := b.driver.Features()
	var u unix.Utsname
	unix.Uname(&u)
	return fits{f.Driver, f.Version, string(f.Accelerator), b.machine(), b.kernel.Sum, unix.ByteSliceToString(u.Release[:]), b.processors(r), memory}
}

// differs names what is otherwise.
func (f fits) differs(now fits) string {
	switch {
	case f.Driver != now.Driver || f.Version != now.Version:
		return fmt.Sprintf("it was saved by %s %s, this host has %s %s", f.Driver, f.Version, now.Driver, now.Version)
	case f.Accel != now.Accel:
		return fmt.Sprintf("it was saved under %s, this host has %s", f.Accel, now.Accel)
	case f.Kernel != now.Kernel:
		return "it was saved with another kernel for guests"
	case f.Accel == string(vmm.KVM) && f.Host != now.Host:
		return fmt.Sprintf("it was saved under the host kernel %s, this one is %s", f.Host, now.Host)
	case f.Machine != now.Machine || f.CPUs != now.CPUs || f.Memory != now.Memory:
		return "its machine was another one"
	}
	return ""
}

func (x *instance) savedFile() string {
	return filepath.Join(x.b.cfg.StateDir, string(x.id)+savedSuffix)
}

func (x *instance) hasSaved() bool {
	_, err := os.Stat(x.savedFile() + ".json") // written last
	return err == nil
}

// dropSaved removes the state. While the first file stays the second does: it still can be woken.
func (x *instance) dropSaved() error {
	for _, f := range []string{x.savedFile() + ".json", x.savedFile()} {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("saved state: %w", err)
		}
	}
	return nil
}

func (x *instance) isSaved() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.saved
}

func (x *instance) isSaving() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.saving
}

func (x *instance) setSaved(saved, saving bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.saved, x.saving = saved, saving
	x.ringLocked()
}

// save writes the frozen machine to a file and ends its monitor. The guest stands still, so its disk is as its memory believes. On an error the
// machine goes on being frozen.
func (x *instance) save(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveBound)
	defer cancel()
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("save: %w", err), x.dropSaved())
		}
	}()
	f, err := os.OpenFile(x.savedFile(), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := x.vm.Save(ctx, f, false); err != nil {
		return err
	}
	text, err := json.Marshal(x.fits())
	if err != nil {
		return err
	}
	tmp := x.savedFile() + ".json.new"
	if err := errors.Join(os.WriteFile(tmp, text, 0o600), os.Rename(tmp, x.savedFile()+".json")); err != nil {
		return err
	}
	x.setSaved(false, true)
	x.unlink()
	x.vm.Console(ctx) // kept in the machine's folder
	if err := x.vm.Kill(ctx); err != nil {
		x.setSaved(false, false)
		return err
	}
	x.setSaved(true, false)
	return nil
}

// again is the machine as it was made.
func (x *instance) again(ctx context.Context) (*vmm.Spec, error) {
	if x.h.Own {
		return x.ownAgain(ctx)
	}
	files, err := x.b.layers.Files(ctx, layer.ID(x.h.Layer))
	if err != nil {
		return nil, err
	}
	disk, err := x.b.disks.open(x.name())
	if err != nil {
		files.Close()
		return nil, err
	}
	return x.machine(ctx, files, disk)
}

// load starts a monitor with the saved state; the machine is frozen then.
func (x *instance) load(ctx context.Context) error {
	var was fits
	text, err := os.ReadFile(x.savedFile() + ".json")
	if err == nil {
		err = json.Unmarshal(text, &was)
	}
	if err != nil {
		return fmt.Errorf("saved state: %w: %w", err, sandbox.ErrLost)
	}
	if why := was.differs(x.fits()); why != "" {
		return fmt.Errorf("saved state: %s: %w", why, sandbox.ErrUnsupported)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveBound)
	defer cancel()
	if err := x.b.call(ctx); err != nil {
		return err
	}
	if err := os.Mkdir(x.dir(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	s, err := x.again(ctx)
	if err != nil {
		return err
	}
	defer closeDisks(s.Disks)
	if s.Image != nil {
		defer s.Image.Close()
	}
	s.Incoming = true
	x.mu.Lock()
	s.Deadline = x.deadline
	x.mu.Unlock()
	f, err := os.Open(x.savedFile())
	if err != nil {
		return err
	}
	defer f.Close()
	s.From = f
	vm, err := x.b.driver.Create(ctx, s)
	if err != nil {
		return err
	}
	if err := vm.Load(ctx, f, false); err != nil {
		return errors.Join(err, vm.Kill(ctx))
	}
	// Before it runs: a state that stays would be taken for the sandbox's after the machine's end, over a disk that has changed since.
	err = x.dropSaved()
	if err != nil && x.hasSaved() {
		return errors.Join(err, vm.Kill(ctx))
	}
	if err != nil {
		x.b.log.Error("remove a saved state", "sandbox", x.id, "err", err)
	}
	x.vm = vm
	x.setSaved(false, false)
	return nil
}
