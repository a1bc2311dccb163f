package vm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/guest/vmwire"
	"github.com/dsec-dev/dsec/internal/layer"
	"github.com/dsec-dev/dsec/internal/sandbox"
	"github.com/dsec-dev/dsec/internal/vmm"
)

const (
	templatePrefix = "template-"
	// maxTemplates bounds what templates hold of the host's memory: each has that of a machine, of which the touched part counts.
	maxTemplates = 16
	maxMaking    = 2 // at once, whatever is asked for
	// A template that could not be made is not tried again for a while.
	templatePatience = time.Minute
)

// template is a machine that was booted for an environment, warmed up and saved: its memory is a sealed file of which each clone has a
// private mapping, its state a small file. Both are held by the warden, so that a host that comes back finds them.
type template struct {
	key    string
	memory *os.File
	state  *os.File
	image  layer.ID
	used   time.Time
}

// templates makes them, one at a time for each kind.
type templates struct {
	b *Backend

	mu     sync.Mutex
	have   map[string]*template
	busy   map[string]chan struct{}
	failed map[string]failure
	making chan struct{} // a place for each that is being made
}

type failure struct {
	err error
	at  time.Time
}

func newTemplates(b *Backend) *templates {
	return &templates{b: b, have: map[string]*template{}, busy: map[string]chan struct{}{}, failed: map[string]failure{}, making: make(chan struct{}, maxMaking)}
}

// owns reports whether a monitor or folder belongs to a template.
func (t *templates) owns(id string) bool { return strings.HasPrefix(id, templatePrefix) }

// key is what must be the same in a clone: the state fits no other machine. The monitor's version and the host's kernel are part of it.
func (t *templates) keyOf(s *vmm.Spec, image layer.ID) string {
	f := t.b.driver.Features()
	var u unix.Utsname
	unix.Uname(&u)
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %s|%s|%s|%d %d|%s|%s|%v %s", f.Driver, f.Version, f.Accelerator, s.Machine, s.Kernel.Sum, s.CPUs, s.Memory, image,
		unix.ByteSliceToString(u.Release[:]), s.Balloon, s.Append))
	return hex.EncodeToString(sum[:12])
}

// get returns the template for a machine, making it where there is none.
func (t *templates) get(ctx context.Context, s *vmm.Spec, image layer.ID) (*template, error) {
	// The disk's limit is not part of it: a guest reads its disk first when the sandbox is born. Its size is: the guest knows it.
	key := t.keyOf(s, image) + "-" + fmt.Sprint(diskMiB(s))
	if s.TapName != "" {
		key += "-net"
	}
	t.mu.Lock()
	for {
		if have := t.have[key]; have != nil {
			have.used = time.Now()
			t.mu.Unlock()
			return have, nil
		}
		if f, ok := t.failed[key]; ok && time.Since(f.at) < templatePatience {
			t.mu.Unlock()
			return nil, f.err
		}
		wait := t.busy[key]
		if wait == nil {
			break
		}
		t.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		t.mu.Lock()
	}
	done := make(chan struct{})
	t.busy[key] = done
	t.mu.Unlock()
	// Others wait for it too: it is seen through whatever becomes of this request.
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), birthBound)
	defer cancel()
	made, err := t.find(bound, key, image)
	if err != nil {
		select {
		case t.making <- struct{}{}:
			made, err = t.make(bound, key, s, image)
			<-t.making
		case <-bound.Done():
			err = bound.Err()
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.busy, key)
	close(done)
	if err != nil {
		t.failed[key] = failure{err, time.Now()}
		return nil, fmt.Errorf("template: %w", err)
	}
	delete(t.failed, key)
	t.evictLocked()
	t.have[key] = made
	t.b.flat.hold(image)
	return made, nil
}

func diskMiB(s *vmm.Spec) int64 {
	st, err := s.Disks[len(s.Disks)-1].File.Stat()
	if err != nil {
		return 0
	}
	return st.Size() >> 20
}

// evictLocked drops the one that was used longest ago. Its clones keep its memory as long as they need it.
func (t *templates) evictLocked() {
	for len(t.have) >= maxTemplates {
		var oldest *template
		for _, x := range t.have {
			if oldest == nil || x.used.Before(oldest.used) {
				oldest = x
			}
		}
		t.dropLocked(oldest)
	}
}

func (t *templates) dropLocked(x *template) {
	delete(t.have, x.key)
	vmm.Discard(x.memory)
	x.state.Close()
	t.b.flat.release(x.image)
	for _, name := range []string{x.key + "-memory", x.key + "-state"} {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		t.b.warden.Drop(ctx, name)
		cancel()
	}
}

// drop drops one whose clone did not come up: the next create makes another.
func (t *templates) drop(x *template) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.have[x.key] == x {
		t.dropLocked(x)
	}
}

// forget drops all that is known: the warden goes or has gone.
func (t *templates) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, x := range t.have {
		vmm.Discard(x.memory)
		x.state.Close()
		t.b.flat.release(x.image)
	}
	t.have, t.failed = map[string]*template{}, map[string]failure{}
}

// find asks the warden for what an earlier host left.
func (t *templates) find(ctx context.Context, key string, image layer.ID) (*template, error) {
	m, err := t.b.warden.Held(ctx, key+"-memory")
	if err != nil {
		return nil, err
	}
	s, err := t.b.warden.Held(ctx, key+"-state")
	if err != nil {
		m.Close()
		return nil, err
	}
	return &template{key: key, memory: m, state: s, image: image, used: time.Now()}, nil
}

// make boots a machine, warms it up and saves it.
func (t *templates) make(ctx context.Context, key string, like *vmm.Spec, image layer.ID) (_ *template, err error) {
	b := t.b
	id := templatePrefix + key
	slot, err := b.slots.take(sandbox.ID(id))
	if err != nil {
		return nil, err
	}
	defer b.slots.release(slot, sandbox.ID(id))
	dir := filepath.Join(b.cfg.RunDir, id)
	os.RemoveAll(dir)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	// One of an earlier host that died over it has no use.
	if err := errors.Join(b.warden.Kill(ctx, id), b.warden.Forget(ctx, id)); err != nil {
		return nil, err
	}
	b.disks.remove(id)
	last := len(like.Disks) - 1
	size, err := like.Disks[last].File.Stat()
	if err != nil {
		return nil, err
	}
	disk, err := b.disks.createSize(ctx, id, size.Size())
	if err != nil {
		return nil, err
	}
	defer b.disks.remove(id)
	defer disk.Close()
	s := *like
	s.ID, s.Dir, s.UID, s.Deadline = id, dir, b.cfg.UIDBase+uint32(slot), time.Now().Add(birthBound+time.Minute)
	s.Disks = append(append([]vmm.Disk{}, like.Disks[:last]...), vmm.Disk{Serial: "upper", File: disk})
	s.Group.CPU, s.Rates = 0, vmm.Rates{}
	s.Store = b.store(id)
	defer os.RemoveAll(s.Store)
	if s.TapName != "" {
		// A namespace of its own, from which nothing leads out.
		way, err := b.newWay(slot)
		if err != nil {
			return nil, err
		}
		defer way.close()
		way.into(&s)
	}
	x := &template{key: key, image: image, used: time.Now()}
	defer func() {
		if err != nil {
			for _, f := range []*os.File{x.memory, x.state} {
				vmm.Discard(f)
			}
		}
	}()
	if x.memory, err = b.driver.NewMemory(b.cfg.RunDir, s.Memory); err != nil {
		return nil, err
	}
	s.Backing = vmm.Memory{File: x.memory}
	vm, err := b.driver.Create(ctx, &s)
	if err != nil {
		return nil, err
	}
	defer vm.Kill(context.WithoutCancel(ctx))
	if err := warmUp(ctx, vm, string(image)); err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("dsec-state", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memory file: %w", err)
	}
	x.state = os.NewFile(uintptr(fd), "state")
	if err := x.state.Chmod(0o444); err != nil {
		return nil, err
	}
	if err := errors.Join(vm.Pause(ctx), vm.Save(ctx, x.state, true), vm.Kill(ctx)); err != nil {
		return nil, err
	}
	// Nobody maps it any more that could write: no monitor can change what its siblings start from.
	if err := errors.Join(vmm.Seal(x.memory), vmm.Seal(x.state)); err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	if err := errors.Join(b.warden.Hold(ctx, key+"-memory", x.memory), b.warden.Hold(ctx, key+"-state", x.state)); err != nil {
		return nil, err
	}
	b.log.Info("template made", "template", key, "took", time.Since(x.used).Round(time.Millisecond))
	x.used = time.Now()
	return x, nil
}

// warmUp has a guest do what its clones need done, and lets go of it.
func warmUp(ctx context.Context, vm vmm.VM, image string) error {
	l, err := dialGuest(ctx, vm)
	if err != nil {
		return err
	}
	defer l.close()
	if _, err := l.greet(ctx); err != nil {
		return err
	}
	if _, err := l.call(ctx, &vmwire.Request{Op: vmwire.OpPrepare, Layer: image}, nil); err != nil {
		return fmt.Errorf("%w; its console says: %s", err, consoleTail(context.WithoutCancel(ctx), vm))
	}
	return nil
}

// clone starts the machine from a template's memory. Before anything of a sandbox is in it, its clock and its random numbers are renewed.
func (x *instance) clone(ctx context.Context, s *vmm.Spec, t *template) error {
	state, err := vmm.Reopen(t.state)
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	defer state.Close()
	s.Backing, s.Incoming, s.From = vmm.Memory{File: t.memory, Private: true, Faults: x.b.cfg.Faults}, true, state
	vm, err := x.b.driver.Create(ctx, s)
	if err != nil {
		return err
	}
	x.vm = vm
	if err := vm.Load(ctx, state, true); err != nil {
		return err
	}
	if err := vm.Resume(ctx); err != nil {
		return err
	}
	return x.greet(ctx)
}
