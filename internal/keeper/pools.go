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
	ready chan *netns
	back  chan *netns
	fresh string // what a new one tells of itself; of the goroutine of run alone
	kept  int    // namespaces whose files were left open; of that goroutine too
}

// netns is a network namespace.
type netns struct {
	fd    int
	files []int // those of told, open once it came back: a look at them then costs half. Of the pool's goroutine and of close
}

const keptNetns = 64 // that have files open, with 12 KiB of the kernel's memory each

func (n *netns) close() {
	unix.Close(n.fd)
	closeAll(n.files)
}

func newNetnsPool(size int) *netnsPool {
	return &netnsPool{ready: make(chan *netns, size), back: make(chan *netns, size)}
}

// run fills the pool until ctx ends, on a thread of its own whose namespace changes.
func (p *netnsPool) run(ctx context.Context, log *slog.Logger) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	defer func() {
		for {
			select {
			case n := <-p.ready:
				n.close()
			case n := <-p.back:
				n.close()
			default:
				return
			}
		}
	}()
	for {
		n, err := p.next()
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
		case p.ready <- n:
		case <-ctx.Done():
			n.close()
			return
		}
	}
}

// next is one that came back and is as good as new, or a new one.
func (p *netnsPool) next() (*netns, error) {
	for {
		select {
		case n := <-p.back:
			if p.asMade(n) {
				return n, nil
			}
			n.close()
			continue
		default:
		}
		fd, err := makeNetns()
		if err != nil {
			return nil, err
		}
		if p.fresh == "" {
			files := openTold()
			p.fresh = traces(files)
			closeAll(files)
		}
		return &netns{fd: fd}, nil
	}
}

func (p *netnsPool) asMade(n *netns) bool {
	if n.files != nil {
		return p.fresh != "" && traces(n.files) == p.fresh
	}
	if unix.Setns(n.fd, unix.CLONE_NEWNET) != nil {
		return false
	}
	files := openTold()
	if p.kept < keptNetns { // so many in the keeper's life, of which most are in use again and again
		p.kept++
		n.files = files
	} else {
		defer closeAll(files)
	}
	return p.fresh != "" && traces(files) == p.fresh
}

// openTold opens what tells of sockets in the calling thread's network namespace: every packet or attempt at one is counted, and so is
// every socket that is open. nil: it can't be read.
func openTold() (files []int) {
	for _, f := range []string{"sockstat", "snmp", "snmp6"} {
		fd, err := unix.Open("/proc/thread-self/net/"+f, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == unix.ENOENT && f == "snmp6" {
			continue // a kernel without IPv6
		}
		if err != nil {
			closeAll(files)
			return nil
		}
		files = append(files, fd)
	}
	return files
}

// traces is what the files of openTold tell. Empty: they can't be read.
func traces(files []int) string {
	var buf [16 << 10]byte
	n := 0
	for i, fd := range files {
		for at := 0; ; {
			m, err := unix.Pread(fd, buf[n+at:], int64(at))
			if err == unix.EINTR {
				continue
			}
			if err != nil || n+at+m == len(buf) {
				return ""
			}
			if at += m; m == 0 {
				if i == 0 { // the lines of sockstat after the first count the whole machine's memory
					first, _, _ := bytes.Cut(buf[:at], []byte("\n"))
					at = len(first)
				}
				n += at
				break
			}
		}
	}
	return string(buf[:n])
}

// give takes back a namespace that no process is in any more and that nobody outside was given; it becomes the pool's.
func (p *netnsPool) give(n *netns) bool {
	select {
	case p.back <- n:
		return true
	default:
		return false
	}
}

func (p *netnsPool) take(ctx context.Context) (*netns, error) {
	select {
	case n := <-p.ready:
		return n, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for a network namespace: %w", ctx.Err())
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
