package trace

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/internal/sandbox"
)

// Bounds of what is held of one sandbox between two calls of Take: what comes on top is counted.
const (
	maxExecs    = 256
	maxReads    = 1024
	maxConnects = 64
	sweepEvery  = 250 * time.Millisecond // how long an event may wait in the ring
)

// Kernel is what the kernel tells of processes in sandboxes. Its programs run for every process of the machine; those outside of watched
// sandboxes leave at once.
type Kernel struct {
	log   *slog.Logger
	off   offsets
	maps  maps
	links []link.Link

	mu      sync.Mutex
	full    []link.Link // attached while a sandbox is watched fully
	fulls   int
	lacking string // why a full watch tells no reads or connections
	boxes   map[uint64]*Watch
	drained *sync.Cond // a pass over the ring has ended
	passes  uint64
	wanted  uint64
	closed  bool
	over    bool // Run has ended: nobody reads any more
	reader  *ringbuf.Reader
}

// Open loads and attaches the programs. sandbox.ErrUnsupported says why this kernel or this process can't.
func Open(log *slog.Logger) (*Kernel, error) {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, fmt.Errorf("trace: the kernel's types: %w: %w", err, sandbox.ErrUnsupported)
	}
	k := &Kernel{log: log, boxes: map[uint64]*Watch{}}
	k.drained = sync.NewCond(&k.mu)
	if k.off, err = kernelOffsets(spec); err != nil {
		return nil, fmt.Errorf("trace: %w: %w", err, sandbox.ErrUnsupported)
	}
	if k.maps, err = newMaps(); err != nil {
		return nil, fmt.Errorf("trace: %w: %w", err, sandbox.ErrUnsupported)
	}
	for _, p := range []struct {
		name string
		at   string
		ins  asm.Instructions
	}{{"dsec_exec", "sched_process_exec", execProgram(k.off, k.maps)}, {"dsec_exit", "sched_process_exit", exitProgram(k.off, k.maps)}} {
		l, err := attach(p.name, p.at, ebpf.AttachTraceRawTp, p.ins)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("trace: %w: %w", err, sandbox.ErrUnsupported), k.Close())
		}
		k.links = append(k.links, l)
	}
	if k.reader, err = ringbuf.NewReader(k.maps.ring); err != nil {
		return nil, errors.Join(fmt.Errorf("trace: read events: %w: %w", err, sandbox.ErrUnsupported), k.Close())
	}
	return k, nil
}

func attach(name, at string, how ebpf.AttachType, ins asm.Instructions) (link.Link, error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.Tracing, AttachType: how, AttachTo: at, Instructions: ins, License: "GPL"})
	if err != nil {
		return nil, fmt.Errorf("load the program at %s: %w", at, err)
	}
	defer p.Close() // the link holds it
	l, err := link.AttachTracing(link.TracingOptions{Program: p, AttachType: how})
	if err != nil {
		return nil, fmt.Errorf("attach to %s: %w", at, err)
	}
	return l, nil
}

// Close detaches everything. Run must have ended.
func (k *Kernel) Close() error {
	var errs []error
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil
	}
	k.closed = true
	k.drained.Broadcast()
	for _, l := range append(k.links, k.full...) {
		errs = append(errs, l.Close())
	}
	if k.reader != nil {
		errs = append(errs, k.reader.Close())
	}
	return errors.Join(append(errs, k.maps.close())...)
}

// Run reads events until ctx ends.
func (k *Kernel) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { k.reader.Flush() }) // a read under way ends, or the next one
	defer stop()
	defer func() {
		k.mu.Lock()
		k.over = true
		k.drained.Broadcast()
		k.mu.Unlock()
	}()
	var r ringbuf.Record
	for ctx.Err() == nil {
		k.mu.Lock()
		idle := len(k.boxes) == 0
		target := k.wanted
		k.mu.Unlock()
		if idle {
			k.reader.SetDeadline(time.Now().Add(time.Minute))
		} else {
			k.reader.SetDeadline(time.Now().Add(sweepEvery))
		}
		err := k.reader.ReadInto(&r)
		switch {
		case err == nil:
			k.take(r.RawSample)
			continue
		case errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, ringbuf.ErrFlushed):
		default:
			return fmt.Errorf("trace: read events: %w", err)
		}
		k.mu.Lock()
		k.passes = max(k.passes, target)
		k.drained.Broadcast()
		k.mu.Unlock()
	}
	return nil
}

// drain returns when all events that are in the ring now were taken, or nobody reads any more.
func (k *Kernel) drain() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.wanted++
	want := k.wanted
	for k.passes < want && !k.closed && !k.over {
		k.reader.Flush()
		k.drained.Wait()
	}
}

// Watch gathers what the kernel tells of one sandbox.
type Watch struct {
	k     *Kernel
	box   uint64
	level sandbox.TraceLevel
	epoch uint32

	mu   sync.Mutex
	seen map[uint64]*groupEvents // by group
	lost int64                   // events of groups beyond maxGroups
}

const maxGroups = 64

// groupEvents are those of one command's group.
type groupEvents struct {
	execs, reads, connects []event
	ends                   map[uint32]event // by process
	moreReads, moreConns   int64
	last                   counters
}

type event struct {
	pid, parent uint32
	at          time.Duration // monotonic
	a, b        uint64
	text        []byte
}

type counters struct{ execs, exits, read, written, lost uint64 }

// Watch begins to watch the sandbox whose group of the v2 hierarchy has that ID (the inode of its folder). Its commands' groups lie
// right below.
func (k *Kernel) Watch(box uint64, level sandbox.TraceLevel) (*Watch, error) {
	w := &Watch{k: k, box: box, level: level, seen: map[uint64]*groupEvents{}}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil, fmt.Errorf("trace: closed: %w", sandbox.ErrState)
	}
	if level == sandbox.TraceFull {
		k.attachFull()
	}
	if err := k.put(w); err != nil {
		return nil, fmt.Errorf("trace: watch a sandbox: %w", err)
	}
	k.boxes[box] = w
	if len(k.boxes) == 1 {
		k.reader.Flush() // it waits for longer while there is nothing to watch
	}
	return w, nil
}

func (k *Kernel) put(w *Watch) error {
	level := uint32(levelLight)
	if w.level == sandbox.TraceFull {
		level = levelFull
	}
	return k.maps.boxes.Put(w.box, uint64(w.epoch)<<32|uint64(level))
}

// attachFull attaches the programs of full watches for the first of them; mu is held.
func (k *Kernel) attachFull() {
	if k.fulls++; k.fulls > 1 {
		return
	}
	k.lacking = ""
	for _, p := range []struct {
		name, at string
		ins      asm.Instructions
	}{{"dsec_open", "sys_exit", openProgram(k.off, k.maps)}, {"dsec_connect", "sys_exit", connectProgram(k.off, k.maps)}} {
		l, err := attach(p.name, p.at, ebpf.AttachTraceRawTp, p.ins)
		if err != nil {
			k.lacking = err.Error()
			k.log.Warn("trace: files read or connections are not told", "err", err)
			continue
		}
		k.full = append(k.full, l)
	}
}

// Full says why reads and connections can't be told; "" when they can, or nobody has asked.
func (k *Kernel) Full() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lacking
}

// Close ends the watch.
func (w *Watch) Close() error {
	k := w.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.boxes[w.box] != w {
		return nil
	}
	delete(k.boxes, w.box)
	var errs []error
	if w.level == sandbox.TraceFull {
		if k.fulls--; k.fulls == 0 {
			for _, l := range k.full {
				errs = append(errs, l.Close())
			}
			k.full = nil
		}
	}
	if !k.closed {
		errs = append(errs, k.maps.boxes.Delete(w.box))
	}
	return errors.Join(errs...)
}

// take files an event.
func (k *Kernel) take(b []byte) {
	if len(b) < evHead {
		return
	}
	ne := binary.NativeEndian
	box, grp := ne.Uint64(b[evBox:]), ne.Uint64(b[evGroup:])
	k.mu.Lock()
	w := k.boxes[box]
	k.mu.Unlock()
	if w == nil {
		return
	}
	e := event{pid: ne.Uint32(b[evPid:]), parent: ne.Uint32(b[evParent:]), at: time.Duration(ne.Uint64(b[evTime:])), a: ne.Uint64(b[evA:]), b: ne.Uint64(b[evB:])}
	n := min(int(ne.Uint32(b[evLen:])), len(b)-evHead)
	text := b[evHead : evHead+n]
	w.mu.Lock()
	defer w.mu.Unlock()
	g := w.seen[grp]
	if g == nil {
		if len(w.seen) >= maxGroups {
			w.lost++
			return
		}
		g = &groupEvents{ends: map[uint32]event{}}
		w.seen[grp] = g
	}
	add := func(list *[]event, most int, more *int64) {
		if len(*list) >= most {
			*more++
			return
		}
		e.text = bytes.Clone(text)
		*list = append(*list, e)
	}
	switch ne.Uint32(b[evKind:]) {
	case kindExec:
		var none int64 // the kernel counts them all
		add(&g.execs, maxExecs, &none)
	case kindExit:
		if len(g.ends) < 4*maxExecs {
			g.ends[e.pid] = e
		}
	case kindOpen:
		add(&g.reads, maxReads, &g.moreReads)
	case kindConnect:
		add(&g.connects, maxConnects, &g.moreConns)
	}
}

// Seen is what the kernel told of one command's group.
type Seen struct {
	Processes     []Process
	MoreProcesses int64 // that were started beyond those
	Reads         []Read
	MoreReads     int64
	Connections   []Connection
	MoreConns     int64
	ReadBytes     int64 // from storage, by threads that have ended
	WriteBytes    int64 // that were dirtied, by threads that have ended
	Lost          int64 // events that found no room
}

// Take returns what was gathered of a command's group, the ID of its folder, and forgets it. What the group's processes do from
// now on is the next call's.
func (w *Watch) Take(grp uint64) Seen {
	w.k.drain()
	var now [groupSize]byte
	ne := binary.NativeEndian
	w.k.mu.Lock()
	known := !w.k.closed && w.k.maps.groups.Lookup(grp, &now) == nil
	w.epoch++
	if !w.k.closed && w.level == sandbox.TraceFull && w.k.boxes[w.box] == w {
		_ = w.k.put(w) // else files that the next step reads too are not told of it
	}
	w.k.mu.Unlock()
	w.mu.Lock()
	g := w.seen[grp]
	if g == nil {
		g = &groupEvents{}
	}
	was := g.last
	lost := w.lost
	w.lost = 0
	next := &groupEvents{ends: map[uint32]event{}, last: was}
	if known {
		next.last = counters{ne.Uint64(now[0:]), ne.Uint64(now[8:]), ne.Uint64(now[16:]), ne.Uint64(now[24:]), ne.Uint64(now[32:])}
		w.seen[grp] = next
	} else {
		delete(w.seen, grp)
	}
	w.mu.Unlock()
	if next.last.execs < was.execs { // the group's entry was pushed out and made anew
		was = counters{}
	}
	s := Seen{MoreReads: g.moreReads, MoreConns: g.moreConns, Lost: lost}
	for _, e := range g.execs {
		p := Process{Pid: int64(e.pid), Parent: int64(e.parent), At: e.at, Args: splitArgs(e.text), Octets: int64(e.a)}
		if end, ok := g.ends[e.pid]; ok && end.at >= e.at {
			p.Ended, p.CPU, p.Code, p.Signal = true, time.Duration(end.a), int(end.b>>8&0xff), int(end.b&0x7f)
		}
		s.Processes = append(s.Processes, p)
	}
	if known {
		s.MoreProcesses = max(0, int64(next.last.execs-was.execs)-int64(len(s.Processes)))
		s.ReadBytes, s.WriteBytes = int64(next.last.read-was.read), int64(next.last.written-was.written)
		s.Lost += int64(next.last.lost - was.lost)
	}
	for _, e := range g.reads {
		s.Reads = append(s.Reads, Read{Path: pathOf(e), At: e.at, Pid: int64(e.pid)})
	}
	for _, e := range g.connects {
		if c, ok := connectionOf(e); ok {
			s.Connections = append(s.Connections, c)
		}
	}
	return s
}

// pathOf puts a path together from its names, the last one first. What lies too deep to be told whole begins with three dots.
func pathOf(e event) string {
	names := bytes.Split(bytes.TrimSuffix(e.text, []byte{0}), []byte{0})
	slices.Reverse(names)
	path := "/" + string(bytes.Join(names, []byte{'/'}))
	if e.b != 0 {
		return "..." + path
	}
	return path
}

func splitArgs(b []byte) []string {
	b = bytes.TrimSuffix(b, []byte{0})
	if len(b) == 0 {
		return nil
	}
	var args []string
	for a := range bytes.SplitSeq(b, []byte{0}) {
		args = append(args, string(a))
	}
	return args
}

// connectionOf reads a socket address; those of the machine's own sockets are left out.
func connectionOf(e event) (c Connection, ok bool) {
	c = Connection{At: e.at, Pid: int64(e.pid), Error: -int(int64(e.b))}
	if len(e.text) < 4 {
		return c, false
	}
	port := binary.BigEndian.Uint16(e.text[2:])
	switch binary.NativeEndian.Uint16(e.text) {
	case unix.AF_INET:
		if len(e.text) < 8 {
			return c, false
		}
		c.To = netip.AddrPortFrom(netip.AddrFrom4([4]byte(e.text[4:8])), port)
	case unix.AF_INET6:
		if len(e.text) < 24 {
			return c, false
		}
		c.To = netip.AddrPortFrom(netip.AddrFrom16([16]byte(e.text[8:24])).Unmap(), port)
	default:
		return c, false
	}
	return c, true
}

// Probe loads and detaches all programs: the errors say why processes, or what only a full watch tells, can't be told here.
func Probe(log *slog.Logger) (light, full error) {
	k, err := Open(log)
	if err != nil {
		return err, err
	}
	k.mu.Lock()
	k.attachFull()
	k.mu.Unlock()
	if why := k.Full(); why != "" {
		full = fmt.Errorf("trace: %s: %w", why, sandbox.ErrUnsupported)
	}
	return k.Close(), full
}
