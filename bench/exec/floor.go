package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dsec-dev/dsec/bench/measure"
	"github.com/dsec-dev/dsec/internal/confine"
	"github.com/dsec-dev/dsec/internal/guest/wire"
	initproc "github.com/dsec-dev/dsec/internal/keeper/init"
)

// floor is process 1 alone: no API, no host, no log, no keeper. A command is started in it as the keeper does it, with pipes, in a group of
// its own and behind the filter, and its end is read from the same stream.
type floor struct {
	dir   string
	group *measure.Group
	at    *os.File // the command's group
	null  *os.File
	conn  *wire.Conn
	proc  *os.Process
	next  uint64
}

const floorBase = 1_900_000_000 // first host id of its user namespace

func newFloor() (*floor, error) {
	f := &floor{}
	if err := f.start(); err != nil {
		f.close()
		return nil, fmt.Errorf("process 1 alone: %w", err)
	}
	return f, nil
}

func (f *floor) start() (err error) {
	if f.dir, err = os.MkdirTemp("", "dsec-bench-floor-"); err != nil {
		return err
	}
	if err := os.Chmod(f.dir, 0o755); err != nil {
		return err
	}
	root := filepath.Join(f.dir, "root")
	if err := measure.Unpack(root, floorBase); err != nil {
		return err
	}
	if f.group, err = measure.NewGroup("floor"); err != nil {
		return err
	}
	// As in the keeper's tree: process 1 and the command in groups beside each other, which process 1 may put processes into.
	for _, sub := range []string{"", "init", "cmd"} {
		p := filepath.Join(f.group.Path, sub)
		if sub != "" {
			if err := os.Mkdir(p, 0o755); err != nil {
				return err
			}
		}
		if err := os.Chown(filepath.Join(p, "cgroup.procs"), floorBase+65536, floorBase+65536); err != nil {
			return err
		}
	}
	if f.at, err = os.Open(filepath.Join(f.group.Path, "cmd")); err != nil {
		return err
	}
	born, err := os.Open(filepath.Join(f.group.Path, "init"))
	if err != nil {
		return err
	}
	defer born.Close()
	if f.null, err = os.OpenFile("/dev/null", os.O_RDWR, 0); err != nil {
		return err
	}
	image, err := initproc.Open()
	if err != nil {
		return err
	}
	defer image.Close()
	var far int
	if f.conn, far, err = wire.Pair(); err != nil {
		return err
	}
	guest := os.NewFile(uintptr(far), "guest")
	defer guest.Close()
	program := "/proc/self/fd/" + strconv.Itoa(int(image.Fd()))
	f.proc, err = os.StartProcess(program, []string{"dsec-init"}, &os.ProcAttr{
		Dir: "/", Env: []string{}, Files: []*os.File{f.null, f.null, f.null, guest},
		Sys: &syscall.SysProcAttr{Setsid: true, Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET,
			UseCgroupFD: true, CgroupFD: int(born.Fd())},
	})
	if err != nil {
		return err
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, root, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	user, err := userNamespace(image)
	if err != nil {
		return err
	}
	defer user.Close()
	filter, err := confine.Container().Compile(false)
	if err != nil {
		return err
	}
	birth := wire.Birth{UID: floorBase + 65536, Caps: confine.Caps, Filter: filter, Ops: []string{
		wire.Op("private"), wire.OpFD("root", 0), wire.Op("proc", "/proc"), wire.Op("pivot"), wire.OpFD("userns", 1)}}
	if err := f.conn.Send(wire.TBirth, 0, birth, tree, int(user.Fd())); err != nil {
		return err
	}
	frame, err := f.read()
	if err != nil {
		return err
	}
	if frame.Type != wire.THello {
		m, _ := wire.DecodeFailed(frame.Body)
		return fmt.Errorf("%s: %s: %w", frame.Type, m.Text, syscall.Errno(m.Errno))
	}
	return nil
}

func (f *floor) read() (wire.Frame, error) {
	if err := f.conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return wire.Frame{}, err
	}
	frame, err := f.conn.ReadFrame()
	frame.CloseFDs()
	return frame, err
}

// userNamespace makes one of 65,536 ids; a helper lives in it until its descriptor is taken.
func userNamespace(helper *os.File) (*os.File, error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(p[0])
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: floorBase, Size: 65536}}
	fd := uintptr(p[1])
	pid, err := syscall.ForkExec("/proc/self/fd/"+strconv.Itoa(int(helper.Fd())), []string{"dsec-init"}, &syscall.ProcAttr{
		Files: []uintptr{fd, fd, fd, fd},
		Sys:   &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true},
	})
	unix.Close(p[1])
	if err != nil {
		return nil, err
	}
	ns, err := os.Open("/proc/" + strconv.Itoa(pid) + "/ns/user")
	unix.Kill(pid, unix.SIGKILL)
	var ws unix.WaitStatus
	unix.Wait4(pid, &ws, 0, nil)
	return ns, err
}

// step runs one command.
func (f *floor) step(context.Context) (time.Duration, error) {
	start := time.Now()
	var out, err [2]int
	if e := unix.Pipe2(out[:], unix.O_CLOEXEC); e != nil {
		return 0, e
	}
	defer unix.Close(out[0])
	if e := unix.Pipe2(err[:], unix.O_CLOEXEC); e != nil {
		unix.Close(out[1])
		return 0, e
	}
	defer unix.Close(err[0])
	f.next++
	e := f.conn.Send(wire.TStart, f.next, wire.Start{Argv: []string{"/true"}, Flags: wire.StartCgroupNS},
		wire.StartFDs(int(f.at.Fd()), int(f.null.Fd()), out[1], err[1])...)
	unix.Close(out[1])
	unix.Close(err[1])
	if e != nil {
		return 0, e
	}
	for {
		frame, e := f.read()
		if e != nil {
			return 0, e
		}
		switch frame.Type {
		case wire.TStarted:
		case wire.TExited:
			m, e := wire.DecodeExited(frame.Body)
			if e == nil && m.Status != 0 {
				e = fmt.Errorf("true ended with %#x", m.Status)
			}
			return time.Since(start), e
		default:
			m, _ := wire.DecodeFailed(frame.Body)
			return 0, errors.Join(fmt.Errorf("%s: %s", frame.Type, m.Text), syscall.Errno(m.Errno))
		}
	}
}

func (f *floor) close() {
	if f.conn != nil {
		f.conn.Close() // process 1 ends with its stream
	}
	if f.proc != nil {
		f.proc.Kill()
		f.proc.Wait()
	}
	for _, x := range []*os.File{f.at, f.null} {
		if x != nil {
			x.Close()
		}
	}
	if f.group != nil {
		if err := f.group.Remove(); err != nil {
			measure.Note("%v", err)
		}
	}
	if f.dir != "" {
		os.RemoveAll(f.dir)
	}
}
