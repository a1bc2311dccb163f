package keeper

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/guest/wire"
	"golang.org/x/sys/unix"
)

// berth is what every birth needs and what is the same for all: control groups, and in them a process 1 in namespaces of its own, with a
// network namespace, /dev, /proc and /sys. Nothing of a sandbox, of an image or of a range of ids is in it, and no limit yet.
type berth struct {
	grp   *group
	ctl   *wire.Conn // to process 1
	pid   int        // of process 1, our child
	netns *netns
}

// berths keeps some berths of the class that most sandboxes are of. A birth that finds none makes its own. What was taken is made again
// when the birth has ended, so as not to work against it; the first one that misses waits for a quiet moment or the end of a sandbox,
// since one that was just made has a first command.
type berths struct {
	ready chan *berth
	room  chan struct{} // one for each that is to be made
	num   atomic.Uint64 // names groups; those of an earlier keeper were swept
	last  atomic.Int64  // when something went on in the keeper, ns since the epoch
	end   chan struct{} // a sandbox was removed
}

const (
	quietTime = 3 * time.Millisecond  // without anything that goes on
	quietWait = 20 * time.Millisecond // for such a moment, at most
)

// stir tells that something goes on.
func (p *berths) stir() { p.last.Store(time.Now().UnixNano()) }

// removed tells that a sandbox has gone.
func (p *berths) removed() {
	select {
	case p.end <- struct{}{}:
	default:
	}
}

// awaitQuiet returns when it is quiet, a sandbox has gone, more than one berth misses, or it has waited for long enough.
func (p *berths) awaitQuiet(ctx context.Context) {
	select {
	case <-p.end: // an earlier one
	default:
	}
	for end := time.Now().Add(quietWait); len(p.ready) >= Berths-1; {
		rest := min(quietTime-time.Since(time.Unix(0, p.last.Load())), time.Until(end))
		if rest <= 0 {
			return
		}
		select {
		case <-time.After(max(rest, quietTime)):
		case <-p.end:
			return
		case <-ctx.Done():
			return
		}
	}
}

// Berths is how many groups of no sandbox a keeper has beside those of its sandboxes, at most.
const Berths = 4

func newBerths() *berths {
	p := &berths{ready: make(chan *berth, Berths), room: make(chan struct{}, Berths), end: make(chan struct{}, 1)}
	for range Berths {
		p.room <- struct{}{}
	}
	return p
}

// run makes berths until ctx ends, then drops those that are left.
func (p *berths) run(ctx context.Context, k *Keeper, log *slog.Logger) {
	for {
		select {
		case <-p.room:
		case <-ctx.Done():
			for {
				select {
				case bt := <-p.ready:
					k.dropBerth(bt)
				default:
					return
				}
			}
		}
		p.awaitQuiet(ctx)
		bt, err := k.makeBerth(ctx, classLS)
		if err != nil {
			p.room <- struct{}{}
			if ctx.Err() == nil {
				log.Error("make a berth ahead", "err", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			continue
		}
		p.ready <- bt
	}
}

// takeBerth returns a berth; again is called when the birth has ended.
func (k *Keeper) takeBerth(ctx context.Context, class string) (bt *berth, again func(), err error) {
	for class == classLS {
		select {
		case bt := <-k.berths.ready:
			if bt.lives() {
				return bt, func() { k.berths.room <- struct{}{} }, nil
			}
			k.log.Warn("a process 1 that was made ahead has ended", "group", bt.grp.id)
			k.dropBerth(bt)
			k.berths.room <- struct{}{}
			continue
		default:
		}
		break
	}
	bt, err = k.makeBerth(ctx, class)
	return bt, func() {}, err
}

// makeBerth makes a berth. What it made before an error is gone.
func (k *Keeper) makeBerth(ctx context.Context, class string) (bt *berth, err error) {
	bt = &berth{grp: &group{g: k.cg, class: class, id: "s-" + strconv.FormatUint(k.berths.num.Add(1), 10), files: k.recent.files(), flat: !k.cg.pure()}}
	defer func() {
		if err != nil {
			k.dropBerth(bt)
			bt = nil
		}
	}()
	if err := bt.grp.make(); err != nil {
		return bt, err
	}
	if err := bt.spawn(k.spawner); err != nil {
		return bt, err
	}
	if bt.netns, err = k.netns.take(ctx); err != nil {
		return bt, err
	}
	if err := bt.grp.attach(bt.pid); err != nil {
		return bt, err
	}
	return bt, bt.prepare(k)
}

// spawn clones process 1.
func (bt *berth) spawn(s *spawner) error {
	ctl, far, err := wire.Pair()
	if err != nil {
		return err
	}
	defer unix.Close(far)
	at, err := bt.grp.open(bt.grp.cradle()...)
	if err != nil {
		ctl.Close()
		return err
	}
	defer unix.Close(at)
	// No cgroup namespace by the clone: it would be rooted at the keeper's group, and with nsdelegate (systemd's mounts) process 1 could
	// then clone nothing into the groups of its commands. See group.cradle.
	pid, err := s.spawn(far, at)
	if err != nil {
		ctl.Close()
		return fmt.Errorf("clone process 1: %w", err)
	}
	bt.ctl, bt.pid = ctl, pid
	return nil
}

// prepare has process 1 do what needs no sandbox. Whether it could shows at the birth.
func (bt *berth) prepare(k *Keeper) error {
	o := &ops{}
	defer o.close()
	if k.cg.pure() {
		dir, path := bt.grp.at("", "init", "cgroup.procs")
		fd, err := unix.Openat(dir, path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open cgroup %s: %w", path, err)
		}
		o.mine = append(o.mine, fd)
		o.fd("cgroup", fd)
	}
	o.fd("netns", bt.netns.fd)
	for _, p := range k.cg.places() {
		to := "/sys/fs/cgroup"
		if p.at != "" {
			to += "/" + p.at
		}
		if err := o.move(to)(cloneRO(bt.grp.at(p.ctrl))); err != nil {
			return err
		}
	}
	o.do("proc", "/proc")
	for _, m := range k.masks() {
		o.do("mask", m.path, m.kind)
	}
	for _, m := range confine.ReadOnly() {
		o.do("ro", m)
	}
	if err := bt.ctl.SetDeadline(time.Now().Add(birthBound)); err != nil {
		return err
	}
	if err := bt.ctl.Send(wire.TPrepare, 0, wire.Prepare{Ops: o.list}, o.fds...); err != nil {
		return fmt.Errorf("send PREPARE: %w", err)
	}
	return nil
}

// mask is a path that is hidden; kind is what process 1 is told of it.
type mask struct{ path, kind string }

// masks are what is hidden of /proc: of the policy's list what this kernel has and a sandbox could open.
func (k *Keeper) masks() []mask {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.maskList == nil {
		k.maskList = []mask{}
		for _, m := range confine.Masks() {
			var st unix.Stat_t
			if unix.Lstat(m, &st) != nil {
				continue
			}
			// What belongs to the machine's root and is open to nobody else is out of reach already: that uid is not mapped in the
			// sandbox, so no capability of its root holds for the file. A bind over it would cost each birth and each end.
			if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Uid == 0 && st.Mode&0o077 == 0 {
				continue
			}
			kind := "file"
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				kind = "folder"
			}
			k.maskList = append(k.maskList, mask{m, kind})
		}
	}
	return k.maskList
}

// ops gathers operations of process 1 with their descriptors.
type ops struct {
	list []string
	fds  []int
	mine []int // of fds
}

func (o *ops) do(verb string, args ...string) { o.list = append(o.list, wire.Op(verb, args...)) }

// fd adds an operation on a descriptor, which stays the caller's.
func (o *ops) fd(verb string, fd int, args ...string) {
	o.list = append(o.list, wire.OpFD(verb, len(o.fds), args...))
	o.fds = append(o.fds, fd)
}

// move adds the attachment of a mount that was just made for it.
func (o *ops) move(to string) func(fd int, err error) error {
	return func(fd int, err error) error {
		if err != nil {
			return err
		}
		o.mine = append(o.mine, fd)
		o.fd("move", fd, to)
		return nil
	}
}

func (o *ops) close() { closeAll(o.mine) }

// lives reports whether process 1 still runs.
func (bt *berth) lives() bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, bt.pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && info.Signo == 0
}

// dropBerth ends a berth that no birth took.
func (k *Keeper) dropBerth(bt *berth) {
	if bt.pid != 0 {
		bt.ctl.Close()
		unix.Kill(bt.pid, unix.SIGKILL)
		reap(bt.pid)
	}
	bt.grp.files.closeAll()
	if err := bt.grp.remove(bt.grp.names(), 5*time.Second); err != nil {
		k.log.Error("remove a berth", "group", bt.grp.id, "err", err)
	}
	if bt.netns != nil && !k.netns.give(bt.netns) {
		k.discard(append(bt.netns.files, bt.netns.fd))
	}
}
