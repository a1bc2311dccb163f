package vm

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

// A fork by memory: the machine stands still while its state, its memory and a copy of its disk are taken. The memory then becomes that of a
// template with one use, so that all forks have private mappings of one file: it is taken apart from the state where that lies behind it, else
// a machine that never runs is loaded with it.

// point is where forks go on from. Its files have no names.
type point struct {
	from   handle
	inside sandbox.ID
	image  layer.ID
	disk   *os.File
	like   template
}

// points are those that creates are awaited for.
type points struct {
	mu   sync.Mutex
	open map[sandbox.ForkKey]*point
}

func (p *points) take(s *sandbox.Spec) *point {
	key := sandbox.ForkKey{Project: s.Project, Job: s.Job, Key: s.Key}
	p.mu.Lock()
	defer p.mu.Unlock()
	at := p.open[key]
	delete(p.open, key)
	return at
}

// forks says whether machines can be forked with their memory.
func (b *Backend) forks() bool {
	f := b.driver.Features()
	return f.Template && f.Save && (f.Pause || f.Behind) // a pause in which is saved is another one than a driver may not have
}

// Point implements sandbox.Forked.
func (x *instance) Point(ctx context.Context, keys []sandbox.ForkKey) (release func(), err error) {
	if !x.b.forks() {
		return nil, fmt.Errorf("fork the memory of %s: this driver can't: %w", x.id, sandbox.ErrUnsupported)
	}
	if x.h.Own {
		return nil, x.noGuest("fork")
	}
	if len(x.spec.Volumes) > 0 {
		return nil, fmt.Errorf("fork the memory of %s: it has volumes: %w", x.id, sandbox.ErrUnsupported)
	}
	p := &point{from: x.h, inside: x.inside(), image: layer.ID(x.h.Layer)}
	stream, err := memoryFile("dsec-fork")
	if err != nil {
		return nil, x.said("fork", err)
	}
	defer stream.Close()
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveBound)
	defer cancel()
	if err := x.capture(bound, p, stream); err != nil {
		return nil, x.said("fork", errors.Join(err, p.close(x.b)))
	}
	x.b.flat.hold(p.image)
	carry := x.carry
	if x.b.driver.Features().Behind {
		carry = x.divide
	}
	if err := carry(bound, p, stream); err != nil {
		x.b.flat.release(p.image)
		return nil, x.said("fork", errors.Join(err, p.close(x.b)))
	}
	x.b.points.mu.Lock()
	for _, k := range keys {
		x.b.points.open[k] = p
	}
	x.b.points.mu.Unlock()
	return sync.OnceFunc(func() {
		x.b.points.mu.Lock()
		for _, k := range keys {
			if x.b.points.open[k] == p {
				delete(x.b.points.open, k)
			}
		}
		x.b.points.mu.Unlock()
		x.b.flat.release(p.image)
		if err := p.close(x.b); err != nil {
			x.b.log.Error("close a point of forks", "sandbox", x.id, "err", err)
		}
	}), nil
}

func (p *point) close(*Backend) error {
	var errs []error
	for _, f := range []*os.File{p.disk, p.like.state} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	vmm.Discard(p.like.memory)
	return errors.Join(errs...)
}

func memoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memory file: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Chmod(0o444); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// capture takes state, memory and disk in one pause; the sandbox goes on afterwards, whatever came of it.
func (x *instance) capture(ctx context.Context, p *point, stream *os.File) (err error) {
	if err := x.take(ctx); err != nil {
		return err
	}
	defer func() { <-x.turn }()
	if x.isFrozen() {
		return fmt.Errorf("it is frozen, resume it first: %w", sandbox.ErrState)
	}
	if err := x.freeze(ctx); err != nil {
		return err
	}
	defer func() {
		if e := x.vm.Resume(ctx); e != nil {
			err = errors.Join(err, e)
			return
		}
		x.setFrozen(false)
		if e := x.wake(ctx); e != nil {
			x.setFrozen(true)
			err = errors.Join(err, e)
		}
	}()
	if err := x.vm.Save(ctx, stream, false); err != nil {
		return err
	}
	if x.b.driver.Features().Behind {
		x.unlink() // the guest is found again when it runs
	}
	p.disk, err = x.b.disks.copy(x.name())
	return err
}

// divide makes a template of what was saved as memory with the state behind it.
func (x *instance) divide(_ context.Context, p *point, stream *os.File) (err error) {
	if p.like.memory, err = x.b.driver.NewMemory(x.b.cfg.RunDir, x.h.Memory); err != nil {
		return err
	}
	if p.like.state, err = memoryFile("dsec-state"); err != nil {
		return err
	}
	return errors.Join(
		vmm.CopySparse(p.like.memory, stream, 0), p.like.memory.Truncate(x.h.Memory), vmm.CopySparse(p.like.state, stream, x.h.Memory),
		vmm.Seal(p.like.memory), vmm.Seal(p.like.state))
}

// carry makes a template of what was saved as one stream.
func (x *instance) carry(ctx context.Context, p *point, stream *os.File) (err error) {
	b := x.b
	id := string(sandbox.NewID(readyPrefix))
	slot, err := b.slots.take(sandbox.ID(id))
	if err != nil {
		return err
	}
	defer b.slots.release(slot, sandbox.ID(id))
	dir := filepath.Join(b.cfg.RunDir, id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	files, err := b.layers.Files(ctx, p.image)
	if err != nil {
		return err
	}
	// It is as the machine was, so that the state fits, and never runs: nothing is written.
	disk, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", p.disk.Fd()), os.O_RDWR, 0)
	if err != nil {
		files.Close()
		return err
	}
	s, err := x.machine(ctx, files, disk)
	if err != nil {
		return err
	}
	defer func() { closeDisks(s.Disks) }()
	s.ID, s.Dir, s.UID, s.Deadline, s.Group.CPU, s.Incoming, s.From = id, dir, b.cfg.UIDBase+uint32(slot), time.Now().Add(saveBound), 0, true, stream
	s.Store = b.store(id)
	defer os.RemoveAll(s.Store)
	if x.h.Lent != nil {
		way, err := b.newWay(slot)
		if err != nil {
			return err
		}
		defer way.close()
		way.into(s)
	}
	if p.like.memory, err = b.driver.NewMemory(b.cfg.RunDir, s.Memory); err != nil {
		return err
	}
	s.Backing = vmm.Memory{File: p.like.memory}
	vm, err := b.driver.Create(ctx, s)
	if err != nil {
		return err
	}
	defer vm.Kill(context.WithoutCancel(ctx))
	if p.like.state, err = memoryFile("dsec-state"); err != nil {
		return err
	}
	from, err := vmm.Reopen(stream)
	if err != nil {
		return err
	}
	defer from.Close()
	if err := vm.Load(ctx, from, false); err != nil {
		return err
	}
	if err := errors.Join(vm.Save(ctx, p.like.state, true), vm.Kill(ctx)); err != nil {
		return err
	}
	if err := errors.Join(vmm.Seal(p.like.memory), vmm.Seal(p.like.state)); err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	return nil
}

// continueFrom makes the machine go on from a point.
func (x *instance) continueFrom(ctx context.Context, p *point) (err error) {
	b := x.b
	began := time.Now()
	if err := b.call(ctx); err != nil {
		return err
	}
	slot, err := b.slots.take(x.id)
	if err != nil {
		return err
	}
	x.h = handle{Version: handleVersion, Slot: slot, Layer: p.from.Layer, Disk: p.from.Disk, Memory: p.from.Memory, Inside: p.inside, Mark: "f" + rand.Text()[:8] + ":", Laid: p.from.Laid, Template: "fork", Balloon: p.from.Balloon}
	b.flat.hold(p.image)
	x.remains()
	files, err := b.layers.Files(ctx, p.image)
	if err != nil {
		return err
	}
	disk, err := b.disks.createFrom(x.name(), p.disk)
	if err != nil {
		files.Close()
		return err
	}
	s, err := x.machine(ctx, files, disk)
	if err != nil {
		return err
	}
	defer func() { closeDisks(s.Disks) }()
	if err := os.Mkdir(x.dir(), 0o700); err != nil {
		return fmt.Errorf("folder of the machine: %w", err)
	}
	if total := x.spec.Lifetime.Total; total > 0 {
		x.deadline = time.Now().Add(total)
		s.Deadline = x.deadline.Add(deadlineGrace)
	}
	if p.from.Lent != nil {
		way, err := x.openNetwork(ctx)
		if err != nil {
			return err
		}
		defer way.close()
		way.into(s)
	}
	x.undo.push("end the machine", x.endMachine)
	if err := x.clone(ctx, s, &p.like); err != nil {
		return err
	}
	if err := x.link.openKeeper(ctx, x); err != nil {
		return err
	}
	if x.handle, err = json.Marshal(x.h); err != nil {
		return err
	}
	if err := x.arm(ctx, x.link); err != nil {
		return err
	}
	if err := x.link.keeper.Thaw(ctx, x.inside()); err != nil {
		return err
	}
	b.log.Debug("machine forked", "sandbox", x.id, "inside", x.inside(), "all", time.Since(began))
	return nil
}
