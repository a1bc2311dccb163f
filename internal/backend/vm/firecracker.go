package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// newDriver is the driver that the backend is configured for. Firecracker is never swapped for another.
func (b *Backend) newDriver(ctx context.Context, v vmm.Verdict) (vmm.Driver, error) {
	if b.cfg.Firecracker == "" || b.cfg.Name != "microvm" {
		return vmm.NewQEMU(ctx, vmm.QEMUConfig{Program: b.cfg.QEMU, Verdict: v, Warden: b.warden})
	}
	d, err := vmm.NewFirecracker(ctx, vmm.FirecrackerConfig{Program: b.cfg.Firecracker, Jailer: b.cfg.Jailer, Verdict: v, Warden: b.warden})
	if err != nil {
		return nil, fmt.Errorf("%w; without [vm] firecracker this backend is QEMU's", err)
	}
	return d, nil
}

// BootsFile keeps what the second stage of the probe found, in a backend's state folder.
func BootsFile(state string) string { return filepath.Join(state, "boots.json") }

const (
	tryID     = "try-kvm"
	tryMemory = 128 << 20 // octets
	// tryBound is for a machine to boot and answer. One that hangs says nothing, and costs this once until the host is started anew.
	tryBound = 20 * time.Second
)

// tryBoot is the second stage of the probe: whether the kernel for guests comes up under KVM with this monitor. What was found is kept for as
// long as host, monitor and kernel are the same. Under QEMU a machine that does not is translated from then on; Firecracker is refused.
func (b *Backend) tryBoot(ctx context.Context, v vmm.Verdict) error {
	f := b.driver.Features()
	if f.Accelerator != vmm.KVM || v.Boots != nil {
		return nil
	}
	v = vmm.ProbeBoot(ctx, BootsFile(b.cfg.StateDir), v, f, b.kernel, b.bootOnce)
	if v.Usable() {
		return nil
	}
	b.log.Error("KVM runs guests, but not these", "err", v.Why())
	var err error
	b.driver, err = b.newDriver(ctx, v)
	return err
}

// bootOnce boots a machine without any disk, hears its guest and ends it.
func (b *Backend) bootOnce(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, tryBound)
	defer cancel()
	if _, err := b.warden.List(ctx); err != nil {
		if err := b.call(ctx); err != nil {
			return err
		}
		// There was none, and there may be nothing for one to do.
		defer func() { err = errors.Join(err, b.endWarden(context.WithoutCancel(ctx))) }()
	}
	slot, err := b.slots.take(tryID)
	if err != nil {
		return err
	}
	defer b.slots.release(slot, tryID)
	dir := filepath.Join(b.cfg.RunDir, tryID)
	if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700)); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := errors.Join(b.warden.Kill(ctx, tryID), b.warden.Forget(ctx, tryID)); err != nil { // of a host that died over it
		return err
	}
	vm, err := b.driver.Create(ctx, &vmm.Spec{
		ID: tryID, Dir: dir, UID: b.cfg.UIDBase + uint32(slot), Machine: b.machine(), Kernel: b.kernel, CPUs: 1, Memory: tryMemory,
		Group: vmm.Group{Memory: tryMemory + monitorMemory, Pids: monitorPids}, Deadline: time.Now().Add(tryBound),
	})
	if err != nil {
		return err
	}
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		err = errors.Join(err, vm.Kill(undo))
	}()
	l, err := dialGuest(ctx, vm)
	if err != nil {
		return err
	}
	defer l.close()
	_, err = l.greet(ctx)
	return err
}

// pauseLevels are those that the driver has.
func (b *Backend) pauseLevels() []sandbox.PauseLevel {
	if !b.driver.Features().Pause {
		return []sandbox.PauseLevel{sandbox.Saved}
	}
	return []sandbox.PauseLevel{sandbox.Frozen, sandbox.Saved}
}

// mapped has images come as memory where that was asked for.
func (b *Backend) mapped(disks []vmm.Disk) []vmm.Disk {
	for i := range disks {
		disks[i].Mapped = b.cfg.Mapped
	}
	return disks
}

const storeSuffix = ".store"

// store is the folder of a machine's monitor on the file system of the saved states.
func (b *Backend) store(id string) string { return filepath.Join(b.cfg.StateDir, id+storeSuffix) }

func (b *Backend) stores() []string {
	list, _ := filepath.Glob(filepath.Join(b.cfg.StateDir, "*"+storeSuffix))
	for i, f := range list {
		list[i] = strings.TrimSuffix(filepath.Base(f), storeSuffix)
	}
	return list
}

// sweepStores removes the folders of machines that are no more.
func (b *Backend) sweepStores(keep map[string]bool) error {
	var errs []error
	for _, id := range b.stores() {
		if !keep[id] && !b.models.owns(id) {
			errs = append(errs, os.RemoveAll(b.store(id)))
		}
	}
	return errors.Join(errs...)
}

// sweepMemories removes the memories of templates when no warden lives any more that would hold them.
func (b *Backend) sweepMemories(ctx context.Context) error {
	if _, err := b.warden.List(ctx); err == nil {
		return nil
	}
	list, _ := filepath.Glob(filepath.Join(b.cfg.RunDir, vmm.MemoryPrefix+"*"))
	var errs []error
	for _, f := range list {
		if err := os.Remove(f); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
