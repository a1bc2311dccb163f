package keeper

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const idsPerSandbox = 65536

// slot is the two user namespaces of a range of host ids.
type slot struct {
	user  int // joined by process 1: 0 -> base
	idmap int // of the upper's mount: also 65536 -> host 0, else overlayfs, which acts as host root, can't make its work folder
}

// slots makes and keeps user namespaces by the base of their range. A namespace that a sandbox uses lives on without its descriptor,
// so an entry may be dropped at any time.
type slots struct {
	helper int // descriptor of the helper program
	making sync.Mutex
	maker  int // stream to the helper that forks children into new user namespaces; -1: none
	pid    int // of the helper
	mu     sync.Mutex
	byBase map[uint32]slot
}

const keptSlots = 1024

// get returns descriptors that belong to the pool; they stay open at least until keptSlots other bases were asked for.
func (s *slots) get(base uint32) (slot, error) {
	s.mu.Lock()
	sl, ok := s.byBase[base]
	s.mu.Unlock()
	if ok {
		return sl, nil
	}
	user, err := s.make([]syscall.SysProcIDMap{{ContainerID: 0, HostID: int(base), Size: idsPerSandbox}})
	if err != nil {
		return slot{}, err
	}
	idmap, err := s.make([]syscall.SysProcIDMap{
		{ContainerID: 0, HostID: int(base), Size: idsPerSandbox}, {ContainerID: idsPerSandbox, HostID: 0, Size: 1}})
	if err != nil {
		unix.Close(user)
		return slot{}, err
	}
	sl = slot{user, idmap}
	s.mu.Lock()
	defer s.mu.Unlock()
	if have, ok := s.byBase[base]; ok { // two births of one base: only the host's mistake makes that
		unix.Close(user)
		unix.Close(idmap)
		return have, nil
	}
	for old, o := range s.byBase {
		if len(s.byBase) < keptSlots {
			break
		}
		unix.Close(o.user)
		unix.Close(o.idmap)
		delete(s.byBase, old)
	}
	s.byBase[base] = sl
	return sl, nil
}

// newSlots starts the helper. Without it namespaces are made by forks of the keeper, which take ten times as long.
func newSlots(helper int, log *slog.Logger) *slots {
	s := &slots{helper: helper, maker: -1, byBase: map[uint32]slot{}}
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		log.Warn("no maker of user namespaces", "err", err)
		return s
	}
	far := uintptr(p[1])
	// It ends when our end of the stream closes.
	s.pid, err = syscall.ForkExec("/proc/self/fd/"+strconv.Itoa(helper), []string{"dsec-userns"}, &syscall.ProcAttr{Files: []uintptr{far, far, far, far},
		Sys: &syscall.SysProcAttr{Setsid: true}})
	unix.Close(p[1])
	if err != nil {
		unix.Close(p[0])
		log.Warn("no maker of user namespaces", "err", err)
		return s
	}
	tv := unix.NsecToTimeval(int64(5 * time.Second))
	unix.SetsockoptTimeval(p[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	s.maker = p[0]
	return s
}

func (s *slots) make(ids []syscall.SysProcIDMap) (int, error) {
	s.making.Lock()
	defer s.making.Unlock()
	if s.maker >= 0 {
		fd, err := s.ask(ids)
		if err == nil {
			return fd, nil
		}
		s.endMaker()
	}
	return makeUserns(s.helper, ids)
}

// endMaker ends the helper. The caller holds making.
func (s *slots) endMaker() {
	if s.maker < 0 {
		return
	}
	unix.Close(s.maker)
	s.maker = -1
	unix.Kill(s.pid, unix.SIGKILL) // its child dies with it
	reap(s.pid)
}

// close ends what the pool runs.
func (s *slots) close() {
	s.making.Lock()
	defer s.making.Unlock()
	s.endMaker()
}

// ask lets the helper make a child in a new user namespace, maps its ids and takes the namespace.
func (s *slots) ask(ids []syscall.SysProcIDMap) (int, error) {
	if _, err := unix.Write(s.maker, []byte{1}); err != nil {
		return -1, err
	}
	var b [4]byte
	n, err := unix.Read(s.maker, b[:])
	for err == unix.EINTR { // a read with a bound is not begun again by the kernel, and the runtime's signals are frequent under load
		n, err = unix.Read(s.maker, b[:])
	}
	if err != nil || n != 4 {
		return -1, fmt.Errorf("maker of user namespaces: %d octets: %w", n, errors.Join(err, unix.EPIPE))
	}
	pid := int(int32(binary.LittleEndian.Uint32(b[:])))
	if pid <= 0 {
		return -1, fmt.Errorf("clone into a user namespace: %w", unix.Errno(-pid))
	}
	proc := "/proc/" + strconv.Itoa(pid)
	var text string
	for _, m := range ids {
		text += fmt.Sprintf("%d %d %d\n", m.ContainerID, m.HostID, m.Size)
	}
	err = errors.Join(writeFile(proc+"/uid_map", text), writeFile(proc+"/gid_map", text))
	fd := -1
	if err == nil {
		fd, err = unix.Open(proc+"/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if _, e := unix.Write(s.maker, []byte{0}); e != nil && fd >= 0 {
		unix.Close(fd)
		return -1, e
	}
	return fd, err
}

// makeUserns makes a user namespace with the map for uids and gids. The helper lives in it, waiting for a birth that never comes,
// only until the namespace's descriptor is taken.
func makeUserns(helper int, ids []syscall.SysProcIDMap) (int, error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("make user namespace: %w", err)
	}
	defer unix.Close(p[0])
	path := "/proc/self/fd/" + strconv.Itoa(helper)
	pid, err := syscall.ForkExec(path, []string{"dsec"}, &syscall.ProcAttr{
		Files: []uintptr{uintptr(p[1]), uintptr(p[1]), uintptr(p[1]), uintptr(p[1])},
		Sys: &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids,
			GidMappingsEnableSetgroups: true},
	})
	unix.Close(p[1])
	if err != nil {
		return -1, fmt.Errorf("make user namespace: %w", err)
	}
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	unix.Kill(pid, unix.SIGKILL)
	reap(pid)
	if err != nil {
		return -1, fmt.Errorf("open user namespace: %w", err)
	}
	return fd, nil
}

func reap(pid int) (unix.WaitStatus, error) {
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &ws, 0, nil)
		if err != unix.EINTR {
			return ws, err
		}
	}
}

// netnsPool keeps network namespaces ready: making one costs 0.3 ms and its end as much in the kernel's threads, taking it nothing.
// They belong to the initial user namespace, so a sandbox has no power over its own and can change nothing in it but by
// sockets. One that comes back is given again only when it is as it was made: nobody ever sent through it (a connection that was
// closed holds its port for a minute, and counters tell of it) and no socket is left in it.
type netnsPool struct {
	ready chan int
	back  chan int
	fresh string // what a new one tells of itself; of the goroutine of run alone
}

func newNetnsPool(size int) *netnsPool {
	return &netnsPool{ready: make(chan int, size), back: make(chan int, size)}
}

// run fills the pool until ctx ends, on a thread of its own whose namespace changes.
func (p *netnsPool) run(ctx context.Context, log *slog.Logger) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	defer func() {
		for {
			select {
			case fd := <-p.ready:
				unix.Close(fd)
			case fd := <-p.back:
				unix.Close(fd)
			default:
				return
			}
		}
	}()
	for {
		fd, err := p.next()
		if err != nil {
			log.Error("make network namespace", "err", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Second):
			}
			continue
		}
		select {
		case p.ready <- fd:
		case <-ctx.Done():
			unix.Close(fd)
			return
		}
	}
}

// next is one that came back and is as good as new, or a new one.
func (p *netnsPool) next() (int, error) {
	for {
		select {
		case fd := <-p.back:
			if p.asMade(fd) {
				return fd, nil
			}
			unix.Close(fd)
			continue
		default:
		}
		fd, err := makeNetns()
		if err == nil && p.fresh == "" {
			p.fresh = traces()
		}
		return fd, err
	}
}

func (p *netnsPool) asMade(fd int) bool {
	return unix.Setns(fd, unix.CLONE_NEWNET) == nil && p.fresh != "" && traces() == p.fresh
}

// traces is what sockets leave in the calling thread's network namespace: every packet or attempt at one is counted, and so
// is every socket that is open. Empty: it can't be read.
func traces() string {
	var buf [16 << 10]byte
	n := 0
	for _, f := range []string{"snmp", "snmp6", "sockstat"} {
		b, err := readFile("/proc/thread-self/net/"+f, buf[n:])
		if os.IsNotExist(err) && f == "snmp6" {
			continue // a kernel without IPv6
		}
		if err != nil || n+len(b) == len(buf) {
			return ""
		}
		if f == "sockstat" { // the lines after the first count the whole machine's memory
			b, _, _ = bytes.Cut(b, []byte("\n"))
		}
		n += len(b)
	}
	return string(buf[:n])
}

// give takes back a namespace that no process is in any more and that nobody outside was given; it becomes the pool's.
func (p *netnsPool) give(fd int) bool {
	select {
	case p.back <- fd:
		return true
	default:
		return false
	}
}

func (p *netnsPool) take(ctx context.Context) (int, error) {
	select {
	case fd := <-p.ready:
		return fd, nil
	case <-ctx.Done():
		return -1, fmt.Errorf("wait for a network namespace: %w", ctx.Err())
	}
}

// makeNetns makes a namespace on the calling thread, which stays in it.
func makeNetns() (int, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return -1, err
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return -1, err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr); err != nil {
		return -1, fmt.Errorf("lo up: %w", err)
	}
	// The namespace is not the sandbox's own, so its root would be refused ports below 1024 and ping.
	for path, value := range map[string]string{
		"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
		"/proc/sys/net/ipv4/ping_group_range":           "0 2147483647",
	} {
		if err := writeFile(path, value); err != nil && !os.IsNotExist(err) {
			return -1, err
		}
	}
	return unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
}
