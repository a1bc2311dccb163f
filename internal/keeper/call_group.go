package keeper

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// callGroup is the groups of one call with a uid, used by one call after the other: what a call leaves in it are counters, of which
// differences are taken, and page cache, which the next is not charged for.
type callGroup struct {
	k     *Keeper
	n     int
	name  string
	uid   uint32
	group int   // folder in the v2 tree, to clone into
	stat  int   // its cpu.stat
	tasks []int // cgroup.procs of v1 groups
	// The files of counters.
	oom, pids, peak, usage int
	user                   int // its user namespace for pooled calls; -1: none yet
	memory, processes      int64
	base                   struct{ oom, pids, usage int64 }
	peakReset              bool
	spent                  bool
}

// callGroups keeps groups between calls.
type callGroups struct {
	k    *Keeper
	mu   sync.Mutex
	free []*callGroup
	next int
	back []int // numbers whose groups were removed
}

const (
	keptCallGroups = 64
	// dirtyCall is how much page cache a group may keep charged: one with more is given up, so that it does not stand in the way of a
	// small limit.
	dirtyCall   = 64 << 20
	callAdvance = 512 << 10
)

func newCallGroups(k *Keeper) *callGroups { return &callGroups{k: k} }

// take returns groups with the limits of a call.
func (p *callGroups) take(r *Call) (*callGroup, error) {
	p.mu.Lock()
	var g *callGroup
	if n := len(p.free); n > 0 {
		g, p.free = p.free[n-1], p.free[:n-1]
	} else {
		n := p.next
		if b := len(p.back); b > 0 {
			n, p.back = p.back[b-1], p.back[:b-1]
		} else if p.next++; n >= CallUIDs {
			p.next--
			p.mu.Unlock()
			return nil, fmt.Errorf("%d run at once: %w", CallUIDs, sandbox.ErrExhausted)
		}
		g = &callGroup{k: p.k, n: n, name: "fncall-" + strconv.Itoa(n), group: -1, stat: -1, oom: -1, pids: -1, peak: -1, usage: -1, user: -1}
	}
	p.mu.Unlock()
	err := g.ready(r)
	if err != nil {
		p.give(g, false)
		return nil, fmt.Errorf("groups: %w", err)
	}
	return g, nil
}

// give takes groups back; clean says that nothing lives in them and that they may be used again.
func (p *callGroups) give(g *callGroup, clean bool) {
	keep := clean && !g.spent && (!g.k.cg.pure() || g.peakReset)
	if keep {
		u, err := preadNumber(g.usage)
		keep = err == nil && u < dirtyCall
	}
	if keep {
		p.mu.Lock()
		keep = len(p.free) < keptCallGroups
		if keep {
			p.free = append(p.free, g)
		}
		p.mu.Unlock()
	}
	if keep {
		return
	}
	if clean {
		p.remove(g)
		return
	}
	go p.remove(g) // what is in it may take a while to die
}

func (p *callGroups) remove(g *callGroup) {
	end := time.Now().Add(30 * time.Second)
	g.closeFiles()
	c := g.k.cg
	dir := group{g: c, class: classLS, id: g.name}
	err := rmdirRetry(dir.v2(), end)
	for _, ctrl := range g.controllers() {
		// Page cache that is charged to it keeps what the kernel has of it, until that is reclaimed; to empty it here would take long.
		if e := rmdirRetry(dir.v1(ctrl), end); e != nil && err == nil {
			err = e
		}
	}
	if err != nil {
		g.k.log.Error("remove the groups of a call", "err", err)
		return // the number is lost; the next keeper's sweep removes them
	}
	p.mu.Lock()
	p.back = append(p.back, g.n)
	p.mu.Unlock()
}

// close removes all groups that are kept.
func (p *callGroups) close() {
	p.mu.Lock()
	all := p.free
	p.free = nil
	p.mu.Unlock()
	for _, g := range all {
		p.remove(g)
	}
}

func (g *callGroup) closeFiles() {
	closeAll(only(append([]int{g.group, g.stat, g.oom, g.pids, g.peak, g.usage, g.user}, g.tasks...)))
	g.group, g.stat, g.oom, g.pids, g.peak, g.usage, g.user, g.tasks = -1, -1, -1, -1, -1, -1, -1, nil
}

// controllers are those of v1 that a call's processes are put into.
func (g *callGroup) controllers() (on []string) {
	for _, c := range []string{"memory", "pids"} {
		if !g.k.cg.in2[c] {
			on = append(on, c)
		}
	}
	return on
}

// make makes the groups and opens their files.
func (g *callGroup) make() error {
	b := group{g: g.k.cg, class: classLS, id: g.name}
	if err := b.mkdir(""); err != nil {
		return err
	}
	for _, c := range g.controllers() {
		if err := b.mkdir(c); err != nil {
			return err
		}
	}
	var err error
	if g.group, err = b.open(); err != nil {
		return err
	}
	open := func(to *int, flags int, ctrl, file string) {
		if err != nil {
			return
		}
		dir, path := b.atOf(ctrl, file)
		if *to, err = unix.Openat(dir, path, flags|unix.O_CLOEXEC, 0); err != nil {
			*to, err = -1, fmt.Errorf("open %s: %w", path, err)
		}
	}
	open(&g.stat, unix.O_RDONLY, "", "cpu.stat")
	open(&g.pids, unix.O_RDONLY, "pids", "pids.events")
	if g.k.cg.pure() {
		open(&g.oom, unix.O_RDONLY, "memory", "memory.events")
		open(&g.usage, unix.O_RDONLY, "memory", "memory.current")
		open(&g.peak, unix.O_RDWR, "memory", "memory.peak")
		if err != nil && g.usage >= 0 { // before 6.12 the file can't be written to, before 5.19 there is none
			err = nil
			open(&g.peak, unix.O_RDONLY, "memory", "memory.peak")
			err = nil
		}
		if err == nil {
			if e := b.write("0", "", "memory.swap.max"); e != nil && !errors.Is(e, os.ErrNotExist) {
				err = e
			}
		}
	} else {
		open(&g.oom, unix.O_RDONLY, "memory", "memory.oom_control")
		open(&g.usage, unix.O_RDONLY, "memory", "memory.usage_in_bytes")
		open(&g.peak, unix.O_RDWR, "memory", "memory.max_usage_in_bytes")
	}
	for _, c := range g.controllers() {
		fd := -1
		open(&fd, unix.O_WRONLY, c, "cgroup.procs")
		if fd >= 0 {
			g.tasks = append(g.tasks, fd)
		}
	}
	return err
}

// ready makes the groups fit for the next call.
func (g *callGroup) ready(r *Call) error {
	if uid := r.UIDBase + uint32(g.n); uid != g.uid {
		g.uid = uid
		if g.user >= 0 {
			unix.Close(g.user)
			g.user = -1
		}
	}
	if g.group < 0 {
		if err := g.make(); err != nil {
			return err
		}
	}
	b := group{g: g.k.cg, class: classLS, id: g.name}
	if g.memory != r.Memory {
		if err := g.limitMemory(&b, r.Memory); err != nil {
			return err
		}
		g.memory = r.Memory
	}
	if g.processes != r.Pids {
		dir, path := b.atOf("pids", "pids.max")
		if err := writeFileAt(dir, path, strconv.FormatInt(r.Pids, 10)); err != nil {
			return err
		}
		g.processes = r.Pids
	}
	var err error
	if g.base.oom, err = preadKey(g.oom, "oom_kill"); err != nil {
		return err
	}
	if g.base.pids, err = preadKey(g.pids, "max"); err != nil {
		return err
	}
	if g.base.usage, err = preadNumber(g.usage); err != nil {
		return err
	}
	reset := []byte("0")
	if g.k.cg.pure() {
		reset = []byte("reset\n")
	}
	g.peakReset = false
	if g.peak >= 0 {
		_, err := unix.Pwrite(g.peak, reset, 0)
		g.peakReset = err == nil
	}
	return nil
}

func (g *callGroup) limitMemory(b *group, want int64) error {
	text := strconv.FormatInt(want, 10)
	if g.k.cg.in2["memory"] {
		return b.write(text, "", "memory.max")
	}
	files := []string{"memory.limit_in_bytes", "memory.memsw.limit_in_bytes"}
	switch {
	case !g.k.cg.swap:
		files = files[:1]
	case g.memory > 0 && want > g.memory: // the sum is never below the part
		files[0], files[1] = files[1], files[0]
	}
	for _, f := range files {
		if err := b.write(text, "memory", f); err != nil {
			return err
		}
	}
	return nil
}

// userns is the user namespace of the uid, made at its first use.
func (g *callGroup) userns() (int, error) {
	if g.user < 0 {
		fd, err := g.k.slots.make([]syscall.SysProcIDMap{{ContainerID: inside, HostID: int(g.uid), Size: 1}})
		if err != nil {
			return -1, fmt.Errorf("user namespace: %w", err)
		}
		g.user = fd
	}
	return g.user, nil
}

// kill kills what is in the group, which is then given up: since 6.14 nothing can be cloned into a group that was killed.
func (g *callGroup) kill() {
	g.spent = true
	b := group{g: g.k.cg, class: classLS, id: g.name}
	b.kill()
}

// figures reads the counters after a call.
func (g *callGroup) figures(e *CallEnd) {
	if v, err := preadKey(g.oom, "oom_kill"); err == nil {
		e.OOM = v > g.base.oom
	}
	if v, err := preadKey(g.pids, "max"); err == nil {
		e.PidsHit = v > g.base.pids
	}
	e.Memory = -1
	if v, err := preadNumber(g.peak); err == nil {
		// Of what was charged before, half a MiB may be the kernel's advance for this call.
		e.Memory = max(0, v-max(0, g.base.usage-callAdvance))
	}
}

func preadNumber(fd int) (int64, error) {
	var buf [64]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(string(bytes.TrimSpace(buf[:n])), 10, 64)
}

func preadKey(fd int, key string) (int64, error) {
	var buf [1024]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return 0, err
	}
	return findKey(buf[:n], key, "counters")
}
