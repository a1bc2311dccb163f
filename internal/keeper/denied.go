package keeper

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/dsec-dev/dsec/internal/confine"
	"golang.org/x/sys/unix"
)

// Calls that no honest tool makes wait, in the kernel, for the word of one goroutine that serves the listeners of all sandboxes. It
// always says EPERM: nothing that stands in a process's memory is looked at, so there is nothing to race with. What a sandbox can
// cost the keeper so is bounded: beyond eventsPerTick its calls wait for the next tick, and of those that are refused only
// maxDenials at a time are on their way to the host; the others are counted.
const (
	eventTick     = 100 * time.Millisecond
	eventsPerTick = 20
	maxDenials    = 16 // of one sandbox, not acknowledged by the host
)

// denial is a refused call.
type denial struct{ cmd, call, detail string }

// denials are those of one sandbox. Guarded by box.mu.
type denials struct {
	pending []denial
	out     int // sent, not acknowledged
	missed  int // not kept since the last that was
}

// watcher serves listeners.
type watcher struct {
	log   *slog.Logger
	epoll int

	mu    sync.Mutex
	boxes map[int]*watched // by listener; the watcher owns the descriptors
}

type watched struct {
	b      *box
	served int // in this tick; of the goroutine alone
}

func newWatcher(log *slog.Logger) (*watcher, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	return &watcher{log: log, epoll: fd, boxes: map[int]*watched{}}, nil
}

// add takes a listener of a sandbox. It is dropped by itself when the last process under its filter has ended.
func (w *watcher) add(b *box, listener int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.boxes[listener] = &watched{b: b}
	err := unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, listener, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(listener)})
	if err != nil {
		delete(w.boxes, listener)
		unix.Close(listener)
		return fmt.Errorf("watch a listener: %w", err)
	}
	return nil
}

// run serves until ctx ends. Calls that wait then are refused by the kernel as the descriptors close (ENOSYS).
func (w *watcher) run(ctx context.Context) {
	defer w.close()
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		w.log.Error("refused calls are not reported", "err", err)
		return
	}
	defer unix.Close(wake)
	stop := context.AfterFunc(ctx, func() { unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) })
	defer stop()
	if err := unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, wake, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(wake)}); err != nil {
		w.log.Error("refused calls are not reported", "err", err)
		return
	}
	var events [64]unix.EpollEvent
	used := map[int]*watched{} // those with something served in this tick
	var tick time.Time         // its end
	for ctx.Err() == nil {
		wait := -1
		if len(used) > 0 {
			wait = max(1, int(time.Until(tick)/time.Millisecond))
		}
		n, err := unix.EpollWait(w.epoll, events[:], wait)
		if err != nil && err != unix.EINTR {
			w.log.Error("refused calls are not reported any more", "err", err)
			return
		}
		if now := time.Now(); !now.Before(tick) {
			for fd, x := range used {
				if x.served >= eventsPerTick {
					w.listen(fd, unix.EPOLLIN)
				}
				x.served = 0
			}
			clear(used)
			tick = now.Add(eventTick)
		}
		for _, e := range events[:max(0, n)] {
			fd := int(e.Fd)
			w.mu.Lock()
			x := w.boxes[fd]
			w.mu.Unlock()
			switch {
			case x == nil:
			case e.Events&unix.EPOLLIN != 0:
				w.serve(fd, x)
				used[fd] = x
				if x.served++; x.served >= eventsPerTick {
					w.listen(fd, 0)
				}
			case e.Events&(unix.EPOLLHUP|unix.EPOLLERR) != 0:
				delete(used, fd)
				w.drop(fd)
			}
		}
	}
}

func (w *watcher) listen(fd int, events uint32) {
	if err := unix.EpollCtl(w.epoll, unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)}); err != nil {
		w.log.Error("watch a listener", "err", err)
	}
}

func (w *watcher) drop(fd int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.boxes[fd] != nil {
		delete(w.boxes, fd)
		unix.Close(fd)
	}
}

func (w *watcher) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for fd := range w.boxes {
		unix.Close(fd)
	}
	clear(w.boxes)
	unix.Close(w.epoll)
}

const (
	notifRecv = 0xc0502100 // SECCOMP_IOCTL_NOTIF_RECV
	notifSend = 0xc0182101 // SECCOMP_IOCTL_NOTIF_SEND
)

// serve refuses one call. What is readable does not block; ENOENT says that the caller has gone meanwhile.
func (w *watcher) serve(fd int, x *watched) {
	var req [80]byte // struct seccomp_notif: u64 id, u32 pid, u32 flags, s32 nr, u32 arch, u64 ip, u64 args[6]
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), notifRecv, uintptr(unsafe.Pointer(&req))); e != 0 {
		return
	}
	pid := int(binary.NativeEndian.Uint32(req[8:]))
	call := binary.NativeEndian.Uint32(req[16:])
	var args [6]uint64
	for i := range args {
		args[i] = binary.NativeEndian.Uint64(req[32+8*i:])
	}
	keep := x.b.wantsDenial()
	var d denial
	if keep { // the caller waits: what /proc says of pid is of it
		d = denial{x.b.commandOf(pid), confine.EventName(call, args), "by " + programOf(pid)}
	}
	var answer [24]byte // struct seccomp_notif_resp: u64 id, s64 val, s32 error, u32 flags
	copy(answer[:8], req[:8])
	refused := -int32(unix.EPERM)
	binary.NativeEndian.PutUint32(answer[16:], uint32(refused))
	unix.Syscall(unix.SYS_IOCTL, uintptr(fd), notifSend, uintptr(unsafe.Pointer(&answer)))
	if keep {
		x.b.deny(d)
	}
}

// wantsDenial reports whether one more can be kept, and counts it if not.
func (b *box) wantsDenial() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.denials.pending)+b.denials.out < maxDenials {
		return true
	}
	b.denials.missed++
	return false
}

func (b *box) deny(d denial) {
	b.mu.Lock()
	if n := b.denials.missed; n > 0 {
		d.detail += fmt.Sprintf(", after %d more", n)
		b.denials.missed = 0
	}
	b.denials.pending = append(b.denials.pending, d)
	b.mu.Unlock()
	b.k.changed(b)
}

// pumpDenials sends what was refused. One that is lost with the host's connection is lost: it is news, not state.
func (b *box) pumpDenials(l *link) error {
	b.mu.Lock()
	send := b.denials.pending
	b.denials.pending = nil
	b.denials.out += len(send)
	b.mu.Unlock()
	for _, d := range send {
		err := l.send(evDenied, &deniedEvent{b.id, d.cmd, d.call, d.detail}, nil, func() {
			b.mu.Lock()
			b.denials.out = max(0, b.denials.out-1)
			b.mu.Unlock()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// commandOf is the ID of the command whose group a process is in: in a session's group that of the one that runs there.
func (b *box) commandOf(pid int) string {
	var buf [4096]byte
	text, err := readFile("/proc/"+strconv.Itoa(pid)+"/cgroup", buf[:])
	if err != nil {
		return ""
	}
	_, at, ok := strings.Cut("\n"+string(text), "\n0::")
	at, _, _ = strings.Cut(at, "\n")
	if !ok || !strings.Contains(at, "/"+b.grp.id+"/") {
		return ""
	}
	group := path.Base(at)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.cmds {
		c.mu.Lock()
		in := !c.hidden && !c.exited && (c.group == group || c.place != nil && c.place.group == group)
		c.mu.Unlock()
		if in {
			return c.id
		}
	}
	return ""
}

// programOf is the name that a process gives itself, visible octets only.
func programOf(pid int) string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	if err != nil {
		return "a process that has gone"
	}
	return strconv.Quote(string(bytes.TrimSpace(b)))
}

// eventsFile is a file with a filter that process 1 installs. A host has one, so they are kept.
func (k *Keeper) eventsFile(code []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if fd, ok := k.events[string(code)]; ok {
		return fd, nil
	}
	fd, err := unix.MemfdCreate("dsec-events", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before 6.3
		fd, err = unix.MemfdCreate("dsec-events", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return -1, fmt.Errorf("file of a filter: %w", err)
	}
	if _, err := unix.Write(fd, code); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("file of a filter: %w", err)
	}
	k.events[string(code)] = fd
	return fd, nil
}
