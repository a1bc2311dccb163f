package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/dsec-dev/dsec/internal/guest/wire"
	"golang.org/x/sys/unix"
)

// spawner is a helper that clones process 1 of every sandbox: the same program, waiting in the keeper's namespaces with all set up
// that process 1 sets up. Its children are the keeper's (CLONE_PARENT). A fork of the keeper copies a table of thousands of
// descriptors, then an exec closes them; this has six and no exec.
type spawner struct {
	cg     *cgroups
	helper int // descriptor of the program
	tmpl   *templates
	log    *slog.Logger

	mu  sync.Mutex
	fd  int // stream to the helper; -1: none
	pid int
	num uint64
}

const spawnBound = 5 * time.Second // for one clone

func newSpawner(cg *cgroups, helper int, tmpl *templates, log *slog.Logger) *spawner {
	return &spawner{cg: cg, helper: helper, tmpl: tmpl, log: log, fd: -1}
}

// start starts the helper. The caller holds mu.
func (s *spawner) start() error {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	null := uintptr(s.tmpl.null)
	s.pid, err = syscall.ForkExec("/proc/self/fd/"+strconv.Itoa(s.helper), []string{"dsec-init"},
		&syscall.ProcAttr{Files: []uintptr{null, null, null, uintptr(p[1])}, Sys: &syscall.SysProcAttr{Setsid: true}})
	unix.Close(p[1])
	if err != nil {
		unix.Close(p[0])
		return err
	}
	// Its children are born there, which costs a birth nothing.
	if err := s.cg.join(s.pid); err != nil {
		unix.Close(p[0])
		reap(s.pid) // it ends with its stream
		return err
	}
	tv := unix.NsecToTimeval(int64(spawnBound))
	unix.SetsockoptTimeval(p[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	unix.SetsockoptTimeval(p[0], unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
	s.fd = p[0]
	if err := s.furnish(); err != nil { // what fails there shows at the first SPAWN
		s.stop()
		return err
	}
	return nil
}

// furnish gives the helper the mount namespace that each of its children starts with a copy of: /dev and /sys of all sandboxes lie in it
// already, since a mount that is copied with its namespace costs a fifth of one that is cloned, sent and attached.
func (s *spawner) furnish() error {
	o := &ops{}
	defer o.close()
	if err := o.move("/dev")(clonePlain(s.tmpl.dev)); err != nil {
		return err
	}
	if err := o.move("/sys")(clonePlain(s.tmpl.sys)); err != nil {
		return err
	}
	for _, p := range []wire.Frame{
		{Type: wire.TPrepare, Body: wire.Prepare{Ops: []string{wire.Op("base")}}.Append(nil)},
		{Type: wire.TPrepare, Body: wire.Prepare{Ops: o.list}.Append(nil), FDs: o.fds},
	} {
		if err := s.send(append(p.AppendHeader(nil), p.Body...), p.FDs...); err != nil {
			return err
		}
	}
	return nil
}

// send sends octets and descriptors to the helper.
func (s *spawner) send(b []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		err := unix.Sendmsg(s.fd, b, oob, nil, unix.MSG_NOSIGNAL)
		if err != unix.EINTR {
			return err
		}
	}
}

// stop ends the helper. The caller holds mu.
func (s *spawner) stop() {
	if s.fd < 0 {
		return
	}
	unix.Close(s.fd)
	s.fd = -1
	unix.Kill(s.pid, unix.SIGKILL)
	reap(s.pid)
}

func (s *spawner) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop()
}

// spawn clones a process 1 with the stream into the group and returns its number, here and for wait.
func (s *spawner) spawn(stream, group int) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		if err := s.start(); err != nil {
			return 0, fmt.Errorf("start the spawner: %w", err)
		}
	}
	pid, err := s.ask(stream, group)
	if err != nil {
		// The next birth has a new helper. A child that was cloned and not told of ends with its stream, which the caller closes.
		s.log.Error("spawner", "err", err)
		s.stop()
		return 0, fmt.Errorf("spawner: %w", err)
	}
	if pid <= 0 {
		return 0, unix.Errno(-pid)
	}
	return pid, nil
}

// ask sends SPAWN and reads SPAWNED.
func (s *spawner) ask(stream, group int) (int, error) {
	s.num++
	f := wire.Frame{Type: wire.TSpawn, ID: s.num, FDs: []int{stream, group}}
	head := f.AppendHeader(nil)
	if err := s.send(head, stream, group); err != nil {
		return 0, err
	}
	var buf [wire.HeaderSize + 4]byte
	for n := 0; n < len(buf); {
		m, err := unix.Read(s.fd, buf[n:])
		if err == unix.EINTR { // one with a time bound is not begun again by the kernel
			continue
		}
		if err != nil || m <= 0 {
			return 0, errors.Join(err, unix.EPIPE)
		}
		n += m
	}
	if wire.Type(buf[4]) != wire.TSpawned || binary.LittleEndian.Uint64(buf[8:]) != s.num {
		return 0, fmt.Errorf("answer % x: %w", buf[:], wire.ErrFormat)
	}
	return int(int32(binary.LittleEndian.Uint32(buf[wire.HeaderSize:]))), nil
}
